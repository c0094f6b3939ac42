"""A Spark session with good defaults for topics.

Invariants:

- What the caller sets wins over every default; a session that runs already is used as it is.
- Java is found and asked first: a machine without it gets an error that says how to get it, not a broken gateway.
- Nothing is written but the user's cache; for a local session, a cache that cannot be used only costs time.
- Python workers are forked by Spark's daemon, which imports nothing of ours: the client of object stores hangs in the
  child of a process that has used it. The driver itself forks nothing.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tidelog.errors import ConfigError
from tidelog.pipeline import class_archive
from tidelog.pipeline.cluster_package import sending_settings
from tidelog.pipeline.gateway import GatewayError, start_gateway
from tidelog.pipeline.java import find_java
from tidelog.pipeline.master import check_master, told_as_settings
from tidelog.pipeline.session_settings import DEFAULTS, JAVA_OPTIONS, defaults_for, text_of
from tidelog.pipeline.spark_home import installed_home, lean_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

INSTALL_HINT = "Install it: pip install 'tidelog[spark]'"
_PACKAGES = Path(__file__).resolve().parents[2]
# Every interpreter of the same environment looks there by itself.
_INSTALLED = ("site-packages", "dist-packages")


def spark_session(app_name: str = "tidelog", master: str | None = None, **conf: object) -> SparkSession:
    """A session in which `format("tidelog")` is known; the running one where there is one.

    `master` is `local[*]` unless given, or what `spark-submit` says where that started the program; `sc://host:port` is
    a Spark Connect server. To the executors of a cluster it brings this package along, unless `conf` sets
    `spark.archives` or `spark.executorEnv.PYTHONPATH`.

    `conf` are settings of Spark. Their names have dots in them: give them as `**{"spark.driver.memory": "4g"}`.
    """
    _require_spark()
    if master is not None:
        check_master(master)
    settings = {name: text_of(value) for name, value in conf.items()}
    if _is_remote(master):
        session = _connected(app_name, master, settings)
    elif (running := _running(master, settings)) is not None:
        session = running
    elif "PYSPARK_GATEWAY_PORT" in os.environ:
        session = _submitted(app_name, master, settings)
    else:
        session = _started(app_name, master or "local[*]", settings)
    return register(session)


def register(spark: SparkSession) -> SparkSession:
    """Makes the formats of tidelog known to a session of yours, and gives it back.

    Where tidelog is installed Spark finds them by itself; this is for the case that it is not. In a thread of its
    own a program calls it too: Spark looks for a format to write to in the session that the thread has, and a new
    thread has none.
    """
    from pyspark.sql import SparkSession

    from tidelog.pipeline.engines.entries_source import EntriesDataSource
    from tidelog.pipeline.engines.objects_source import ObjectsDataSource
    from tidelog.pipeline.source import TidelogDataSource

    for source in (TidelogDataSource, EntriesDataSource, ObjectsDataSource):
        spark.dataSource.register(source)
    if isinstance(spark, SparkSession):  # over Spark Connect it is another class, and the session goes with every plan
        SparkSession._get_j_spark_session_class(spark._jvm).setActiveSession(spark._jsparkSession)
    return spark


def _require_spark() -> None:
    for package in ("pyspark", "pyarrow"):
        if find_spec(package) is None:
            raise ConfigError(f"{package} is not installed", operation="start Spark", hint=INSTALL_HINT)


def _is_remote(master: str | None) -> bool:
    if master is not None:
        return master.startswith("sc://")
    # The first names a server; Spark sets the second in a process that has connected to one.
    return "SPARK_REMOTE" in os.environ or "SPARK_CONNECT_MODE_ENABLED" in os.environ


def _connected(app_name: str, remote: str | None, settings: dict[str, str]) -> SparkSession:
    from pyspark.errors import PySparkImportError
    from pyspark.sql import SparkSession

    builder = SparkSession.Builder().appName(app_name)
    try:
        return _configured(builder if remote is None else builder.remote(remote), settings).getOrCreate()
    except PySparkImportError as error:
        hint = "Spark Connect has needs of its own: pip install 'tidelog[connect]'"
        raise ConfigError(str(error), operation="connect to Spark", hint=hint) from error


def _running(master: str | None, settings: dict[str, str]) -> SparkSession | None:
    """The session of this process, whichever thread began it, with the settings that can still be changed."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    context = SparkContext._active_spark_context
    if context is None:
        return None
    its_master = context.master
    if master not in (None, its_master):
        text = f"a session with master {its_master} is running in this process, so there can be none with {master}"
        raise ConfigError(text, operation="start Spark", hint="Stop it first: spark.stop()")
    return _configured(SparkSession.Builder(), settings).getOrCreate()


def _submitted(app_name: str, master: str | None, settings: dict[str, str]) -> SparkSession:
    """Where spark-submit started the program, it has settings already: they stay, and only gaps are filled."""
    from pyspark.sql import SparkSession

    builder = SparkSession.Builder().appName(app_name)
    session = _configured(builder if master is None else builder.master(master), settings).getOrCreate()
    given = session.sparkContext.getConf()
    for name, value in DEFAULTS.items():
        if name.startswith("spark.sql.") and not given.contains(name):
            session.conf.set(name, value)
    return session


def _started(app_name: str, master: str, settings: dict[str, str]) -> SparkSession:
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    _tell_errors_once()
    settings = {"spark.app.name": app_name, **defaults_for(master), **settings, "spark.master": master}
    if not master.startswith("local"):
        settings |= sending_settings(settings, class_archive.cache_directory())
    with told_as_settings():
        if not _has_gateway():
            _start_java(settings)
        return _configured(SparkSession.Builder(), settings).getOrCreate()


def _tell_errors_once() -> None:
    """Whoever gets an exception of Spark's need not read it on the standard error too, as a line of JSON."""
    from pyspark.logger import PySparkLogger

    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)


def _has_gateway() -> bool:
    """Whether this process has a Java already: that of a session which was stopped."""
    from pyspark import SparkContext

    return SparkContext._gateway is not None


def _start_java(settings: dict[str, str]) -> None:
    """Starts Java and the context in it; once more without the archive of classes, should it be to blame."""
    java, own, cache = find_java(), settings.get(JAVA_OPTIONS, ""), class_archive.cache_directory()
    home = lean_home(cache) if settings["spark.master"].startswith("local") else None
    told = {name: value for name, value in settings.items() if name.startswith("spark.driver.")}
    archive = class_archive.archive_options(java, (home or installed_home()) / "jars", told, cache)
    try:
        _start_context(settings | {JAVA_OPTIONS: _java_options(archive, own)}, home)
    except GatewayError:
        if not class_archive.discard(archive):
            raise
        _start_context(settings | {JAVA_OPTIONS: _java_options([], own)}, home)


def _start_context(settings: dict[str, str], home: Path | None) -> None:
    from pyspark import SparkConf, SparkContext

    conf = SparkConf().setAll(list(settings.items()))
    with _environment(_variables(home)):
        gateway = start_gateway(conf)
    SparkContext(conf=conf, gateway=gateway)


def _java_options(archive: list[str], own: str) -> str:
    quiet = Path(__file__).with_name("log4j2.properties").as_uri()
    # Java's own warnings go to standard output, where a program's results are. Collecting serially is the quickest for
    # a heap that is small and for rows that pass through.
    return " ".join([f"-Dlog4j2.configurationFile={quiet}", "-Xlog:disable", "-XX:+UseSerialGC", *archive, own]).strip()


def _variables(home: Path | None) -> dict[str, str]:
    """For Java and its Python workers: which Spark, and tidelog where this process found it, be it installed or not."""
    variables = {} if home is None else {"SPARK_HOME": str(home)}
    if _PACKAGES.name not in _INSTALLED:
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(_PACKAGES)]))
    return variables


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """These variables, for as long as it takes to start a process that inherits them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _configured(builder: SparkSession.Builder, settings: dict[str, str]) -> SparkSession.Builder:
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder
