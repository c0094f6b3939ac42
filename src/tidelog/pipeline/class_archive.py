"""An archive of the classes that Spark loads, so that the next session starts in about half the time.

Java can write the classes of a program into a file when it ends, and map that file when it starts the next time. The
first session of a machine makes the archive, after its program has ended; later ones use it.

Invariants:

- An archive is named by all that Java holds against it (its own build, the jars, options): a stale one is not found.
- It is written under a name of its own and becomes an archive by a rename, at the start of a later session. Java writes
  the magic number last: a file without it is unfinished.
- Without an archive, with a damaged one (its size is known, and Java checks its sums), or with a cache that cannot be
  written, a session starts as slowly as ever and is none the worse.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import time
from collections.abc import Iterable
from pathlib import Path

from tidelog.pipeline.java import Java

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
    """Java runs what is in an archive, so nobody else may be able to put one there."""
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
    """Takes over what an earlier session wrote, if there is none yet.

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
