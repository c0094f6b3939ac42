"""A Spark session with good defaults for topics.

Invariants:

- What the caller sets wins over every default here; what is set here, Spark works without.
- Java is found and asked first: a machine without it gets an error that says how to get it, not a broken gateway.
- Nothing is written outside of the user's cache directory, and a cache that cannot be used only costs time.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tidelog.errors import ConfigError
from tidelog.pipeline.java import find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Times of messages are instants in UTC; how they are shown should not depend on the machine.
    "spark.sql.session.timeZone": "UTC",
}
_LOCAL_DEFAULTS = {
    # Nobody else has to reach a driver whose executors are in it, and no name has to be looked up.
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # For a few cores and a test's worth of rows, 200 shuffle partitions are 200 tasks that do nothing.
    "spark.sql.shuffle.partitions": "4",
}


def spark_session(app_name: str = "tidelog", master: str | None = None, **conf: object) -> SparkSession:
    """A session in which `format("tidelog")` is known; the running one where there is one.

    `master` is `local[*]` unless given, or what `spark-submit` says where that started the program; `sc://host:port` is
    a Spark Connect server. `conf` are settings of Spark; as their names have dots in them they are given as
    `**{"spark.executor.memory": "4g"}`.
    """
    settings = {name: _text_of(value) for name, value in conf.items()}
    session = _connected(app_name, master, settings) if _is_remote(master) else _classic(app_name, master, settings)
    register(session)
    return session


def register(spark: SparkSession) -> SparkSession:
    """Makes `format("tidelog")` known to a session of yours, and gives it back."""
    if find_spec("tidelog.pipeline.source") is not None:
        spark.dataSource.register(import_module("tidelog.pipeline.source").TidelogDataSource)
    return spark


def _connected(app_name: str, remote: str | None, settings: dict[str, str]) -> SparkSession:
    builder = _builder(app_name)
    if remote is not None:
        builder = builder.remote(remote)
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def _classic(app_name: str, master: str | None, settings: dict[str, str]) -> SparkSession:
    builder = _builder(app_name)
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    if master is not None or not submitted:
        builder = builder.master(master or "local[*]")
    if not submitted:
        find_java()
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    defaults = _DEFAULTS | (_LOCAL_DEFAULTS if (master or "local").startswith("local") and not submitted else {})
    settings = defaults | settings | {_JAVA_OPTIONS: _java_options(settings.get(_JAVA_OPTIONS, ""))}
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def _java_options(own: str) -> str:
    quiet = Path(__file__).with_name("log4j2.properties")
    return f"-Dlog4j2.configurationFile={quiet} -XX:+UseSerialGC {own}".strip()


def _is_remote(master: str | None) -> bool:
    return master.startswith("sc://") if master is not None else "SPARK_REMOTE" in os.environ


def _text_of(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _builder(app_name: str) -> SparkSession.Builder:
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        hint = "Install it: pip install 'tidelog[spark]'"
        raise ConfigError("PySpark is not installed", operation="start Spark", hint=hint) from error
    return SparkSession.Builder().appName(app_name)
