"""A Spark session that stays for this user, so that the next command need not start one.

`keep` starts a process of its own with a session that serves Spark Connect on this machine; later commands find it
(`find_kept`), and each has a session of its own there.

    <cache>/kept/address.json   where it listens, its token and what it was started with; for this user alone
    <cache>/kept/lock           the server has it locked for as long as it lives
    <cache>/kept/log            what it said

Invariants
- A server is used only by commands that would start the same: the same Python, packages, working directory, environment
  that stores are reached by, and master. Others start their own session as if there were none.
- It listens on this machine only, and answers only to those who know the token.
- A command whose server ends under it says so within seconds, and its process can start a session of its own.
- It counts as running while its lock is held, whatever the file says. It ends when it is told to, or when nobody has
  used it for as long as it was told to stay; Java ends with it, however it ends. Looking does not take the lock from
  others who look: an address without a server is never believed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import msgspec

from tidelog.errors import ConfigError, RetryError
from tidelog.pipeline.session.java import cache_directory, find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEFAULT_MASTER = "local[*]"
DEFAULT_IDLE_SECONDS = 1800.0
_TOKEN_VARIABLE = "SPARK_CONNECT_AUTHENTICATE_TOKEN"
_HOST = "127.0.0.1"
_START_SECONDS = 300.0
_END_SECONDS = 60.0
_LOOK_SECONDS = 0.1
_SHOWN_LINES = 5
_RETRIES = 4  # some four seconds; Spark's default are ten minutes, and a server on this machine does not come back
_CONNECT_MODE = "SPARK_CONNECT_MODE_ENABLED"
# What decides which data a job reaches, and what Spark and Python do.
_PREFIXES = ("AWS_", "AZURE_", "GOOGLE_", "TIDELOG_", "SPARK_", "PYSPARK_", "JAVA_", "JDK_JAVA_")
_NAMES = ("PYTHONPATH", "HOME", "SSL_CERT_FILE", "SSL_CERT_DIR", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
# Where a program runs already by other means: its session is there, or is not ours to choose.
_OTHERS = ("SPARK_REMOTE", _CONNECT_MODE, "PYSPARK_GATEWAY_PORT")


class Kept(msgspec.Struct, frozen=True):
    """A server that runs."""

    pid: int
    port: int
    token: str
    master: str
    idle_seconds: float
    identity: dict[str, str]

    @property
    def remote(self) -> str:
        """What a client connects to; by any other name Spark's client would ask for a certificate."""
        return f"sc://localhost:{self.port}"


def directory_of_kept() -> Path:
    """Where its files are."""
    return cache_directory() / "kept"


def running(directory: Path | None = None) -> Kept | None:
    """The server of this user, whatever it was started with."""
    directory = directory or directory_of_kept()
    try:
        with _locked(directory, "lock", fcntl.LOCK_SH | fcntl.LOCK_NB):
            return None  # no server has it
    except FileNotFoundError:
        return None
    except BlockingIOError:
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
            return msgspec.json.decode((directory / "address.json").read_bytes(), type=Kept)
        return None  # it is starting


def find_kept(master: str | None) -> Kept | None:
    """The server that can stand in for a session with this master started here."""
    if any(name in os.environ for name in _OTHERS):
        return None
    kept = running()
    return None if kept is None or differences(kept, master) or not _answers(kept) else kept


def differences(kept: Kept, master: str | None) -> list[str]:
    """The names of what a session with this master would have otherwise, were it started here."""
    own = identity()
    names = sorted(name for name in own.keys() | kept.identity.keys() if own.get(name) != kept.identity.get(name))
    return [*names, *(["master"] if master not in (None, kept.master) else [])]


def _answers(kept: Kept) -> bool:
    try:
        socket.create_connection((_HOST, kept.port), 1.0).close()
    except OSError:
        return False
    return True


def identity() -> dict[str, str]:
    """What the sessions of two processes have in common if this is the same; values are hashed, for some are secret."""
    parts = {
        "python": sys.executable,
        "pyspark": version("pyspark"),
        "tidelog": str(_newest_source()),
        "directory": os.getcwd(),  # Spark looks there for relative paths
    }
    for name, value in os.environ.items():
        if name != _TOKEN_VARIABLE and (name.startswith(_PREFIXES) or name.upper() in _NAMES):
            parts[name] = value
    return {name: hashlib.sha256(os.fsencode(value)).hexdigest()[:16] for name, value in parts.items()}


def _newest_source() -> int:
    """When the package changed last: workers that run keep what they have imported."""
    package = Path(__file__).resolve().parents[2]
    return max(path.stat().st_mtime_ns for path in (package, *package.rglob("*.py"), *package.glob("*.so")))


_servers: WeakKeyDictionary[SparkSession, Kept] = WeakKeyDictionary()  # of the sessions of this process


def connect_to(kept: Kept, name: str, settings: dict[str, object]) -> SparkSession | None:
    """A session there; None where a setting is one that only a new server could have."""
    from pyspark.sql.connect.client.retries import DefaultPolicy

    from tidelog.pipeline.session.session import spark_session, text_of

    os.environ[_TOKEN_VARIABLE] = kept.token
    spark = spark_session(name, kept.remote)
    _servers[spark] = kept
    client: Any = spark.client
    client.set_retry_policies([DefaultPolicy(max_retries=_RETRIES)])
    if not all(spark.conf.isModifiable(one) for one in settings):
        leave(spark)
        return None
    for one, value in settings.items():
        spark.conf.set(one, text_of(value))
    return spark


def is_kept(spark: SparkSession) -> bool:
    """Whether it is a session of a kept server."""
    return spark in _servers


def is_lost(spark: SparkSession) -> bool:
    """Whether it is a session of a kept server that has ended."""
    kept = _servers.get(spark)
    return kept is not None and (running() != kept or not _answers(kept))


def leave(spark: SparkSession) -> None:
    """Ends a session there; the server stays, and this process may start a session of its own."""
    if is_lost(spark):
        spark.release_session_on_close = False  # type: ignore[attr-defined]  # there is nobody to ask
    spark.stop()
    for name in (_CONNECT_MODE, _TOKEN_VARIABLE):
        os.environ.pop(name, None)


def keep(master: str | None = None, idle_seconds: float = DEFAULT_IDLE_SECONDS) -> Kept:
    """The server that runs, if commands of this process can use it; else a new one, when it is ready."""
    from tidelog.pipeline.session.session import check_master

    if master is not None:
        check_master(master)
    if (found := find_kept(master)) is not None:
        return found
    _require_connect()
    find_java()  # its error would be the end of a traceback in the log of the server
    directory = directory_of_kept()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.chmod(directory, 0o700)
    with _locked(directory, "starting", fcntl.LOCK_EX):
        return find_kept(master) or _start(directory, master or DEFAULT_MASTER, idle_seconds)


def _start(directory: Path, master: str, idle_seconds: float) -> Kept:
    stop_kept()
    (directory / "address.json").unlink(missing_ok=True)
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(directory), master, str(idle_seconds)],
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as told:
        told.write(msgspec.json.encode(identity()))  # other users can see what is in a command
    return _when_ready(process, directory)


def stop_kept() -> bool:
    """Ends the server; whether there was one. Nothing of it is left then."""
    kept = running()
    if kept is None:
        return False
    try:
        process = os.pidfd_open(kept.pid)
    except ProcessLookupError:
        return False
    try:
        if running() != kept:
            return False  # its number may have become that of another process
        signal.pidfd_send_signal(process, signal.SIGTERM)
        if not select.select([process], [], [], _END_SECONDS)[0]:
            raise RetryError(f"the kept session (pid {kept.pid}) has not ended", operation="stop Spark")
    finally:
        os.close(process)
    return True


def _require_connect() -> None:
    from pyspark.errors import PySparkImportError
    from pyspark.sql.connect.utils import check_dependencies

    try:
        check_dependencies()
    except PySparkImportError as error:
        hint = "A kept session needs more packages: pip install 'tidelog[connect]'"
        raise ConfigError(str(error), operation="keep a session", hint=hint) from error


def _environment() -> dict[str, str]:
    """That of this process; it finds the package where this one did."""
    packages = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), packages]))
    kept = {name: value for name, value in os.environ.items() if name not in _OTHERS}
    return {**kept, "PYTHONPATH": path, _TOKEN_VARIABLE: secrets.token_urlsafe(32)}


def _when_ready(process: subprocess.Popen[bytes], directory: Path) -> Kept:
    deadline = time.monotonic() + _START_SECONDS
    while (kept := running(directory)) is None or kept.pid != process.pid:
        if process.poll() is not None or time.monotonic() > deadline:
            process.terminate()
            said = (directory / "log").read_text("utf-8", "replace").strip().splitlines()[-_SHOWN_LINES:]
            text = "the kept session did not start: " + " ".join(said)
            raise ConfigError(text, operation="keep a session", hint=f"{directory / 'log'} has all that it said")
        time.sleep(_LOOK_SECONDS)
    return kept


@contextlib.contextmanager
def _locked(directory: Path, name: str, how: int) -> Iterator[None]:
    """BlockingIOError where another process has it, unless it is waited for."""
    descriptor = os.open(directory / name, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


# The server


def serve(directory: Path, master: str, idle_seconds: float, identity_of_starter: dict[str, str]) -> None:
    """Starts the session, says where it listens, and stays until it is told to end or nobody needs it."""
    from tidelog.pipeline.session.session import spark_session

    with contextlib.ExitStack() as stack:
        stack.enter_context(_locked(directory, "lock", fcntl.LOCK_EX))  # a command may just be looking
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        spark = spark_session(
            "tidelog kept",
            master,
            **{
                "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
                "spark.connect.grpc.binding.address": _HOST,
                "spark.connect.grpc.binding.port": "0",
                "spark.connect.session.manager.defaultSessionTimeout": f"{max(60, int(idle_seconds))}s",
            },
        )
        stack.callback(spark.stop)
        java: Any = spark._jvm
        service = getattr(getattr(java.org.apache.spark.sql.connect.service, "SparkConnectService$"), "MODULE$")
        spark.range(1).count()  # the first query is the slow one
        token = os.environ[_TOKEN_VARIABLE]
        kept = Kept(os.getpid(), service.localPort(), token, master, idle_seconds, identity_of_starter)
        stack.callback((directory / "address.json").unlink, missing_ok=True)
        _write_address(directory, kept)
        _stay(service, idle_seconds)


def _write_address(directory: Path, kept: Kept) -> None:
    unfinished = directory / "address.json.new"
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(kept))
    os.replace(unfinished, directory / "address.json")


def _stay(service: Any, idle_seconds: float) -> None:
    """Until no session was open there for so long. One that was left open by a client that was killed times out."""
    last_used = time.monotonic()
    while time.monotonic() - last_used < idle_seconds:
        time.sleep(min(1.0, max(_LOOK_SECONDS, idle_seconds / 10)))
        if service.sessionManager().listActiveSessions().nonEmpty() or service.listActiveExecutions().isRight():
            last_used = time.monotonic()


if __name__ == "__main__":
    told = msgspec.json.decode(sys.stdin.buffer.read(), type=dict[str, str])
    serve(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), told)
