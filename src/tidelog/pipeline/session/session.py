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
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tidelog.errors import ConfigError, RetryError
from tidelog.pipeline.session.cluster import sending_settings
from tidelog.pipeline.session.java import (
    GatewayError,
    archive_options,
    cache_directory,
    discard,
    find_java,
    installed_home,
    lean_home,
    start_gateway,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# What a session of ours sets, and why.
#
# Invariant: every entry is a default. What the caller names wins, and Spark works without any of them.


JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_FEWEST_SHUFFLE_PARTITIONS = 4

DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Times of messages are instants. Shown in UTC they look the same on every machine that runs a job.
    "spark.sql.session.timeZone": "UTC",
}

LOCAL_DEFAULTS = {
    # No other machine has to reach a driver whose executors are in it, and no name is looked up.
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # The executors' share is in it too. Java takes it only as it needs it.
    "spark.driver.memory": "2g",
    # The checkpoint of a local stream is in local files. Spark's default manager starts programs to look for links;
    # this one writes and renames in the same order, through the older interface.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}


def defaults_for(master: str) -> dict[str, str]:
    """The defaults for a master."""
    if not master.startswith("local"):
        return dict(DEFAULTS)
    # 200, Spark's own default, are 200 files a micro-batch of a stream that aggregates.
    partitions = max(_FEWEST_SHUFFLE_PARTITIONS, 2 * cores_of(master))
    return DEFAULTS | LOCAL_DEFAULTS | {"spark.sql.shuffle.partitions": str(partitions)}


def cores_of(master: str) -> int:
    """How many tasks a local master runs at once."""
    match = re.match(r"local\[(\d+|\*)", master)
    if match is None:
        return 1
    return (os.cpu_count() or 1) if match[1] == "*" else int(match[1])


def text_of(value: object) -> str:
    """A setting the way Spark writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


# Where Spark runs, checked before anything is started: Java takes seconds to reject a name, and
# Spark's clients minutes to give up a server that is not there.
#
# Invariant: what Spark understands is never refused; a server counts as running if its port answers.


_FORMS = re.compile(
    r"local|local\[(\*|0*[1-9]\d*)(\s*,\s*\d+)?\]|local-cluster\[[\d\s,]+\]|yarn|(spark|k8s|sc)://\S+", re.ASCII
)
_HINT = "It is local[*], local[4], spark://host:7077, yarn, k8s://..., or sc://host for Spark Connect"
_ADDRESS = re.compile(r"(?P<host>\[[^\]]+\]|[^:/;,\s]+)(?::(?P<port>\d{1,5}))?")
_DEFAULT_PORTS = {"spark": 7077, "sc": 15002}
# A client that uses one of these may not reach the server without it.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy", "HTTPS_PROXY", "HTTP_PROXY")
_ANSWER_SECONDS = 10.0
_DYING_SECONDS = 1.0  # its ports are closed before the process is gone


def check_master(master: str) -> None:
    """ConfigError for a name that Spark does not understand, RetryError if the server does not answer."""
    if _FORMS.fullmatch(master) is None:
        raise ConfigError(f"{master!r} is not a Spark master", operation="start Spark", hint=_HINT)
    scheme, _, rest = master.partition("://")
    if scheme not in _DEFAULT_PORTS or any(name in os.environ for name in _PROXIES):
        return
    found = [_ADDRESS.match(one) for one in rest.split(",")]
    addresses = [(one["host"].strip("[]"), int(one["port"] or _DEFAULT_PORTS[scheme])) for one in found if one]
    if addresses and not any(_answers(*address) for address in addresses):
        hint = "Check that it runs, and its port"
        raise RetryError(f"{master} does not answer", operation="start Spark", hint=hint)


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), _ANSWER_SECONDS).close()
    except (OSError, OverflowError):
        return False
    return True


@contextmanager
def told_as_settings() -> Iterator[None]:
    """What Java says of a context that it cannot make is about the master and the settings that it was given."""
    from py4j.protocol import Py4JJavaError

    try:
        yield
    except Py4JJavaError as error:
        reason = str(error.java_exception.getMessage()).partition("\n")[0]
        hint = "Check the master, and the settings of Spark"
        raise ConfigError(f"Spark did not start: {reason}", operation="start Spark", hint=hint) from error


_logger = logging.getLogger("tidelog.pipeline")
_PYTHON_VARIABLE = "PYSPARK_PYTHON"
_PYTHON_SETTING = "spark.pyspark.python"
_OTHER_PYTHON_HINT = (
    "they need one that has tidelog. Set PYSPARK_PYTHON or spark.pyspark.python to it before the session starts, or "
    "let tidelog.spark_session() start it, which sends the package along"
)
INSTALL_HINT = "Install it: pip install 'tidelog[spark]'"
_PACKAGES = Path(__file__).resolve().parents[3]
# Every interpreter of the same environment looks there by itself.
_INSTALLED = ("site-packages", "dist-packages")


def spark_session(app_name: str = "tidelog", master: str | None = None, **conf: object) -> SparkSession:
    """Returns a Spark session that knows `format("tidelog")`: the running one, or a new one.

    `master` defaults to `local[*]`, or to that of `spark-submit` if it started the program; `sc://host:port` is
    a Spark Connect server. The executors of a cluster get this package, unless `conf` sets
    `spark.archives` or `spark.executorEnv.PYTHONPATH`.

    `conf` are settings of Spark. Their names contain dots: pass them as `**{"spark.driver.memory": "4g"}`.
    """
    _require_spark()
    if master is not None:
        check_master(master)
    settings = {name: text_of(value) for name, value in conf.items()}
    forget_dead_java()
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
    """Registers the formats of tidelog in an existing session, and returns it.

    Spark finds them without this if tidelog is installed for the Python of its workers. On this machine the workers
    then take the Python of this process, unless `PYSPARK_PYTHON` or `spark.pyspark.python` names one. Call it also in a
    new thread that writes: Spark looks up the format in the session of the thread, and a new thread has none.
    """
    from pyspark.sql import SparkSession

    from tidelog.pipeline.source.entries import EntriesDataSource
    from tidelog.pipeline.source.objects import ObjectsDataSource
    from tidelog.pipeline.source.topics import TidelogDataSource

    _choose_python(spark)
    for source in (TidelogDataSource, EntriesDataSource, ObjectsDataSource):
        spark.dataSource.register(source)
    if isinstance(spark, SparkSession):  # over Spark Connect it is another class, and the session goes with every plan
        SparkSession._get_j_spark_session_class(spark._jvm).setActiveSession(spark._jsparkSession)
    return spark


def _choose_python(spark: SparkSession) -> None:
    """Has the workers of a session that somebody else started run the Python that has this package.

    Spark takes `python3` from PATH where nothing is said, which is another one if an environment is not activated.
    """
    context = getattr(spark, "_sc", None)  # over Spark Connect there is none, and the server decides
    if context is None or _PYTHON_VARIABLE in os.environ or context.getConf().contains(_PYTHON_SETTING):
        return
    if context.master.startswith("local"):
        context.pythonExec = sys.executable
    else:
        _logger.warning("workers of %s run python3 from their PATH: %s", context.master, _OTHER_PYTHON_HINT)


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
        hint = "Spark Connect needs more packages: pip install 'tidelog[connect]'"
        raise ConfigError(str(error), operation="connect to Spark", hint=hint) from error


def _running(master: str | None, settings: dict[str, str]) -> SparkSession | None:
    """The session of this process, of any thread, with the settings that can still be changed."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    context = SparkContext._active_spark_context
    if context is None:
        return None
    its_master = context.master
    if master not in (None, its_master):
        text = f"this process already runs a session with master {its_master}; it cannot have another with {master}"
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

    os.environ.setdefault(_PYTHON_VARIABLE, sys.executable)
    _tell_errors_once()
    settings = {"spark.app.name": app_name, **defaults_for(master), **settings, "spark.master": master}
    if not master.startswith("local"):
        settings |= sending_settings(settings, cache_directory())
    with told_as_settings():
        if not _has_gateway():
            _start_java(settings)
        return _configured(SparkSession.Builder(), settings).getOrCreate()


def _tell_errors_once() -> None:
    """A caller that gets a Spark exception need not read it on the standard error too, as a line of JSON."""
    from pyspark.logger import PySparkLogger

    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)


def _has_gateway() -> bool:
    """Whether this process has a Java already: that of a session which was stopped."""
    from pyspark import SparkContext

    return SparkContext._gateway is not None


def has_ended(spark: SparkSession) -> bool:
    """Whether the Java of a session that was started here, or kept, is gone: killed, or without memory."""
    from pyspark import SparkContext

    from tidelog.pipeline.session.kept import is_lost

    if getattr(spark, "_sc", None) is None:  # over Spark Connect
        return is_lost(spark)
    return spark._jvm is not SparkContext._jvm or _java_is_dead()  # another may have taken its place


def java_has_died() -> bool:
    """The same of the Java of this process, after an error that may come from it: a moment ago it was killed."""
    with suppress(subprocess.TimeoutExpired):
        if (process := _java()) is not None:
            process.wait(_DYING_SECONDS)
    return _java_is_dead()


def forget_dead_java() -> None:
    """Spark's Python side keeps one Java for as long as the process lives, also if it is gone: the next one is new."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    if _java_is_dead():
        SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
        SparkSession._instantiatedSession = None


def _java_is_dead() -> bool:
    process = _java()
    return process is not None and process.poll() is not None


def _java() -> subprocess.Popen[bytes] | None:
    """None where there is none, or it is that of spark-submit."""
    from pyspark import SparkContext

    return getattr(SparkContext._gateway, "proc", None)


def _start_java(settings: dict[str, str]) -> None:
    """Starts Java and the context in it; once more without the archive of classes, should it be to blame."""
    java, own, cache = find_java(), settings.get(JAVA_OPTIONS, ""), cache_directory()
    home = lean_home(cache) if settings["spark.master"].startswith("local") else None
    told = {name: value for name, value in settings.items() if name.startswith("spark.driver.")}
    archive = archive_options(java, (home or installed_home()) / "jars", told, cache)
    try:
        _start_context(settings | {JAVA_OPTIONS: _java_options(archive, own)}, home)
    except GatewayError:
        if not discard(archive):
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
