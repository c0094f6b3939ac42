"""Finds the Java on which Spark will run, and checks its version before Spark is started.

Invariants: it finds the same Java as Spark's own launcher (`JAVA_HOME`, else `java` on the path); nothing here imports
Spark, so the machine can be checked without it; an error says what is missing and how to get it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tidelog.errors import ConfigError

if TYPE_CHECKING:
    from py4j.java_gateway import JavaGateway
    from pyspark import SparkConf

OLDEST_JAVA = 17
JAVA_HINT = (
    f"Spark needs Java {OLDEST_JAVA} or newer. Install one (Debian, Ubuntu: apt-get install openjdk-17-jre-headless; "
    "macOS: brew install openjdk@17), or point JAVA_HOME to one that is installed"
)
_ANSWER_SECONDS = 30


class Java(NamedTuple):
    """A Java that runs; `told` is all that it says about itself, which differs between any two builds."""

    program: str
    version: int
    told: str


def find_java() -> Java:
    """The Java that Spark's launcher will take; an error says what is wrong with it and how to get one."""
    home = os.environ.get("JAVA_HOME")
    program = shutil.which("java", path=str(Path(home, "bin"))) if home else shutil.which("java")
    if program is None:
        where = f"JAVA_HOME is {home}, and there is no bin/java in it" if home else "there is no java on the path"
        raise ConfigError(where, operation="find Java", hint=JAVA_HINT)
    told = _told_by(program)
    version = java_version(told)
    if version is None or version < OLDEST_JAVA:
        text = f"{program} is version {version or 'unknown'}, older than {OLDEST_JAVA}"
        raise ConfigError(text, operation="find Java", hint=JAVA_HINT)
    return Java(program, version, told)


def _told_by(program: str) -> str:
    command = [program, "-version"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False).stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{program} does not run: {error}", operation="find Java", hint=JAVA_HINT) from error


def java_version(text: str) -> int | None:
    """The feature version that `java -version` tells; before 9 it was written 1.8."""
    match = re.search(r'version "(?:1\.)?(\d+)', text)
    return None if match is None else int(match[1])


# An archive of the classes that Spark loads (Java's class data sharing): the next session starts in about half the
# time.
#
# Java can write the classes of a program to a file when it ends, and map that file when it starts the next time. The
# first session of a machine creates the archive, after its program has ended; later ones use it.
#
# Invariants:
#
# - An archive is named by everything that Java checks it against (its own build, the jars, options): a stale one is not
#   found.
# - It is written under a temporary name and becomes an archive by a rename, at the start of a later session. Java
#   writes the magic number last: a file without it is unfinished.
# - Without an archive, with a damaged one (its size is known, and Java checks its sums), or with a cache that cannot be
#   written, a session starts as slowly as without this module, and works the same.


# Of an archive on top of the one that Java brings along; in the machine's order of bytes, which is little-endian here.
_MAGIC = bytes.fromhex("a8ab0bf0")
_SHARED = "-XX:SharedArchiveFile="
_UNFINISHED = ".new"
_SETTLED_SECONDS = 2
_UNFINISHED_SECONDS = 3600
_UNUSED_SECONDS = 30 * 86400
_OWN_CHOICES = ("-Xshare", "SharedArchiveFile", "ArchiveClassesAtExit")
# What the class path is made of besides the jars.
_CLASS_PATH_VARIABLES = ("SPARK_HOME", "SPARK_CONF_DIR", "HADOOP_CONF_DIR", "YARN_CONF_DIR", "SPARK_DIST_CLASSPATH")


def cache_directory() -> Path:
    """Where archives are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base, "tidelog", "spark")


def archive_options(java: Java, jars: Path, settings: dict[str, str], directory: Path) -> list[str]:
    """What to tell Java: to use the archive, to make one, or nothing where that cannot be."""
    if any(choice in text for text in settings.values() for choice in _OWN_CHOICES):
        return []
    try:
        _make_private(directory)
        identity = _identity(java, jars, settings)
        _adopt_finished(directory, identity)
        _clear_away(directory)
        archive = _archive_of(directory, identity)
        return _make(directory, identity) if archive is None else _use(archive)
    except OSError:
        return []


def discard(options: Iterable[str]) -> bool:
    """Removes the archive that these options name; whether there was one."""
    for option in options:
        if option.startswith(_SHARED):
            (path,) = shlex.split(option.removeprefix(_SHARED))
            with contextlib.suppress(OSError):
                os.unlink(path)
            return True
    return False


def _make_private(directory: Path) -> None:
    """Java runs what is in an archive, so only this user may write there."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = directory.stat()
    if state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise PermissionError(f"{directory} is open to others")


def _identity(java: Java, jars: Path, settings: dict[str, str]) -> str:
    parts = [java.program, java.told, str(jars)]
    parts += [f"{name}={os.environ.get(name, '')}" for name in _CLASS_PATH_VARIABLES]
    parts += [f"{name}={value}" for name, value in sorted(settings.items())]
    for entry in sorted(os.scandir(jars), key=lambda entry: entry.name):
        state = entry.stat()
        parts.append(f"{entry.name} {state.st_size} {state.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def _adopt_finished(directory: Path, identity: str) -> None:
    """Adopts what an earlier session wrote, if there is no archive yet.

    Its size becomes part of its name, since Java crashes on an archive that was cut short.
    """
    for made in directory.glob(f"{identity}.*{_UNFINISHED}"):
        with contextlib.suppress(FileNotFoundError):
            state = made.stat()
            if time.time() - state.st_mtime < _SETTLED_SECONDS or not _is_finished(made):
                continue
            if _archive_of(directory, identity) is None:
                os.replace(made, directory / f"{identity}-{state.st_size}.jsa")
            else:
                made.unlink()


def _is_finished(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def _clear_away(directory: Path) -> None:
    """What no session will use again: archives and packages of other versions, what killed sessions have left."""
    for suffix, most_seconds in (
        (".jsa", _UNUSED_SECONDS),
        (".zip", _UNUSED_SECONDS),
        (_UNFINISHED, _UNFINISHED_SECONDS),
    ):
        for found in directory.glob(f"*{suffix}"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - found.stat().st_mtime > most_seconds:
                    found.unlink()


def _archive_of(directory: Path, identity: str) -> Path | None:
    for found in directory.glob(f"{identity}-*.jsa"):
        if found.name == f"{identity}-{found.stat().st_size}.jsa":
            return found
    return None


def _use(archive: Path) -> list[str]:
    os.utime(archive)
    # Without the check of its sums, damage would not be noticed but run.
    return [f"{_SHARED}{shlex.quote(str(archive))}", "-XX:+VerifySharedSpaces"]


def _make(directory: Path, identity: str) -> list[str]:
    unfinished = directory / f"{identity}.{os.getpid()}-{time.time_ns():x}{_UNFINISHED}"
    return [f"-XX:ArchiveClassesAtExit={shlex.quote(str(unfinished))}"]


# A home of Spark without the zipped copies of its Python files.
#
# Spark puts `python/lib/pyspark.zip` of its home in front of the path of every Python process it starts, and Python
# compiles what it imports from a zip every time: most of a second for each of the first five processes of a session.
# Where the home is the installed package, those processes find the same files there, compiled.
#
# Invariants: such a home is a folder of links to the installed package, so it takes no room and follows it; it is made
# under another name and renamed, so that two may make it at once; where it cannot be, Spark's own home serves.


_ZIPPED = "python"


def installed_home() -> Path:
    """The home that Spark's launcher takes by itself."""
    from pyspark.find_spark_home import _find_spark_home

    return Path(_find_spark_home())


def lean_home(directory: Path) -> Path | None:
    """The home without zips, made in a directory; None where it cannot be, or Spark is no package of this Python."""
    import pyspark

    package = Path(pyspark.__file__).resolve().parent
    if installed_home().resolve() != package:
        return None
    identity = hashlib.sha256(f"{package}\n{version('pyspark')}".encode()).hexdigest()[:16]
    lean = directory / f"home-{identity}"
    try:
        if not lean.is_dir():
            _make_home(lean, package)
    except OSError:
        return None
    return lean


def _make_home(lean: Path, package: Path) -> None:
    lean.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=lean.parent, prefix=".home-"))
    try:
        for entry in package.iterdir():
            if entry.name != _ZIPPED:
                os.symlink(entry, unfinished / entry.name)
        with contextlib.suppress(FileExistsError):
            _rename(unfinished, lean)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _rename(unfinished: Path, lean: Path) -> None:
    """A folder with something in it is not replaced: another writer changed it first, and made the same."""
    try:
        os.rename(unfinished, lean)
    except OSError:
        if not lean.is_dir():
            raise


# Starts the Java side of a Spark session, and listens to what it says on its standard error.
#
# Invariants: all output of Java reaches the standard error of this process, except for the one line that every start of
# Spark prints; when Java does not start, what it said is in the error. No Java outlives a start that was interrupted.


# Spark's launcher always asks for this module, and Java always says so.
_NOISE = (b"WARNING: Using incubator modules: jdk.incubator.vector",)
_STDERR = 2
_PIPE_BYTES = 1 << 20
_SHOWN_BYTES = 2000


class GatewayError(ConfigError):
    """Java ended before Spark was there."""


def start_gateway(conf: SparkConf) -> JavaGateway:
    """A running Java with Spark in it; GatewayError with its last words where it does not run."""
    from py4j.protocol import Py4JNetworkError
    from pyspark.errors import PySparkRuntimeError
    from pyspark.java_gateway import launch_gateway

    ours, theirs = os.pipe()
    try:
        _enlarge(ours)
        with _interrupt_later() as interrupts:
            gateway = launch_gateway(conf, {"stderr": theirs})  # type: ignore[no-untyped-call]
            if interrupts:
                gateway.proc.stdin.close()  # Java ends when this closes
    except PySparkRuntimeError as error:
        os.close(theirs)
        said = _rest_of(ours)
        raise GatewayError(f"Java did not start Spark: {said}", operation="start Spark", hint=JAVA_HINT) from error
    except BaseException as error:
        os.close(theirs)
        os.close(ours)
        if isinstance(error, (ConnectionError, Py4JNetworkError)):
            raise GatewayError("Java ended while Spark started", operation="start Spark", hint=JAVA_HINT) from error
        raise
    os.close(theirs)
    threading.Thread(target=_pass_on, args=(ours,), name="tidelog-spark-stderr", daemon=True).start()
    return gateway


@contextmanager
def _interrupt_later() -> Iterator[list[int]]:
    """Defers Ctrl-C until Java is up: before that, Spark's launcher would leave a Java that waits forever.

    A second Ctrl-C takes effect at once.
    """
    interrupts: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield interrupts  # Python interrupts the main thread alone
        return
    usual = signal.getsignal(signal.SIGINT)

    def note(number: int, _: Any) -> None:
        interrupts.append(number)
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, usual)
    if interrupts:
        signal.raise_signal(signal.SIGINT)


def _enlarge(pipe: int) -> None:
    """Nothing is read before Java is up, so its output until then has to fit. (A thread now would be forked.)"""
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


def _rest_of(pipe: int) -> str:
    with os.fdopen(pipe, "rb") as lines:
        said = b"".join(line for line in lines if not line.startswith(_NOISE))
    return said[-_SHOWN_BYTES:].decode("utf-8", "replace").strip() or "it said nothing"


def _pass_on(pipe: int) -> None:
    """Until Java and its Python workers have ended, or this process has."""
    with os.fdopen(pipe, "rb") as lines:
        for line in lines:
            if not line.startswith(_NOISE):
                _write_all(line)


def _write_all(line: bytes) -> None:
    try:
        while line:
            line = line[os.write(_STDERR, line) :]
    except OSError:
        return  # a closed standard error loses the line; the pipe must be read on, or Java waits for it
