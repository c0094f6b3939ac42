"""`tidelog doctor`: checks whether this machine is fit for a log, and says what to do if it is not."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import secrets
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Literal, NamedTuple

import typer

from tidelog._native import CRC32_BY
from tidelog.cli.dev_s3 import INSTALL_HINT, weed_program
from tidelog.cli.errors import ExitCode, hint_of, text_of
from tidelog.cli.session import Session, command
from tidelog.clock import SystemClock
from tidelog.errors import ConfigError, TidelogError
from tidelog.files import LocalFiles
from tidelog.log.directory import wal_files
from tidelog.pipeline.session.java import JAVA_HINT, find_java
from tidelog.store.binding import StoreBinding
from tidelog.store.keys import topics_prefix
from tidelog.store.metadata.bucket import PREFIX, prove_conditional_writes
from tidelog.store.metadata.open import BUCKET, open_metadata_store
from tidelog.store.object_store import ObjectStore
from tidelog.store.urls import open_store
from tidelog.topics.directory_info import INSIDE, LOCAL, METADATA_FILE, Place, metadata_url, read_info, settle_place
from tidelog.units import human_bytes

_COLUMNS = ("check", "status", "detail", "fix")


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    command(app, "doctor")(doctor)


def doctor(session: Session) -> None:
    """Checks what tidelog needs here. Python, the native code, Java, Spark, the disk, its speed, the clock, the
    machine's limits, and the store.

    Every check is ok, warn or fail, and says how to fix what is not ok. Java is needed by the Spark pipeline only, so
    its absence is a warning. If the log directory has a store, or one is named, it is tested: read, written, its clock
    compared with ours, its catalog read, and with the catalog in the bucket, whether conditional writes are honoured.
    The exit code is 1 if a check fails. Nothing is left over, in the directory or in the store.
    """
    checks = run_checks(session.root, store_checks(session))
    session.output.rows(_COLUMNS, [check._asdict() for check in checks])
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(ExitCode.FOUND_WRONG)


# The file system of a path, and which kinds of file system do not honour the guarantees that a log relies on.


NETWORK_KINDS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "beegfs", "fuse.sshfs"}
    | {"fuse.s3fs", "fuse.rclone", "fuse.gcsfuse", "fuse.glusterfs", "fuse.ceph", "virtiofs", "vboxsf"}
)
MEMORY_KINDS = frozenset({"tmpfs", "ramfs"})
PASSING_KINDS = frozenset({"overlay", "aufs"})

_MOUNTS = Path("/proc/self/mounts")


def file_system_kind(path: Path) -> str | None:
    """The kind of the innermost mount that holds the path; None where the system does not tell."""
    try:
        lines = _MOUNTS.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return None
    resolved = path.resolve()
    # Of two mounts at one place the later one is seen, so the last of the longest wins.
    best: tuple[int, str] | None = None
    for line in lines:
        _, where, kind, *_ = line.split(" ")
        mount = Path(_unescape(where))
        if resolved.is_relative_to(mount) and (best is None or len(mount.parts) >= best[0]):
            best = (len(mount.parts), kind)
    return None if best is None else best[1]


def _unescape(text: str) -> str:
    """The Linux kernel writes blanks and the like in octal."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text


# The checks of `tidelog doctor`; each is a function that returns one `Check`.
#
# A check measures and judges and never raises: if it cannot measure, that is its result.


_SPARK_PACKAGES = ("pyspark", "pyarrow")
_SPARK_HINT = "pip install 'tidelog[spark]'"
_LOW_FREE_BYTES = 1 << 30
_NO_FREE_BYTES = 64 << 20
_SYNC_ROUNDS = 30
_SYNC_BYTES = 4096
# No disk confirms a write in less; one that seems to keeps it in its memory.
_INCREDIBLE_SYNC_US = 15
_SLOW_SYNC_US = 30_000
_PLAUSIBLE_YEARS = range(2024, 2100)
_CLOCK_SECONDS = 0.05
_CLOCK_DRIFT_SECONDS = 0.02
_LOW_OPEN_FILES = 1024
_NO_OPEN_FILES = 64


class Check(NamedTuple):
    """What a check found; `fix` is empty when there is nothing to do."""

    check: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    fix: str = ""


def run_checks(root: Path, more: Mapping[str, Callable[[], Check]] | None = None) -> list[Check]:
    """All of them, and more at the end; `root` is the log directory, there or not yet."""
    place = nearest_directory(root)
    checks: dict[str, Callable[[], Check]] = {
        "python": check_python,
        "native code": check_native,
        "java": check_java,
        "spark": check_spark,
        "weed": check_weed,
        "directory": lambda: check_permissions(root, place),
        "free space": lambda: check_free_space(place),
        "file system": lambda: check_file_system(place),
        "sync time": lambda: check_sync_time(place),
        "clock": lambda: check_clock(root),
        "open files": check_open_files,
        **(more or {}),
    }
    return [_outcome(name, check) for name, check in checks.items()]


def _outcome(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except TidelogError as error:
        return Check(name, "fail", text_of(error), hint_of(error) or "Fix that and run doctor again")
    except OSError as error:
        return Check(name, "fail", f"cannot be checked: {error}", "Fix the directory, or name another one with --dir")


def nearest_directory(path: Path) -> Path:
    """The path itself or the closest directory above it that can be seen."""
    absolute = path.absolute()
    return next(one for one in (absolute, *absolute.parents) if os.path.isdir(one))


def check_python() -> Check:
    """The interpreter; one that is too old could not have installed the package."""
    version = f"{platform.python_implementation()} {platform.python_version()} at {sys.executable}"
    return Check("python", "ok", version)


def check_native() -> Check:
    """The C extension; without it nothing would run, so only how it uses this processor is reported."""
    return Check("native code", "ok", f"checksums by {CRC32_BY}")


def check_java() -> Check:
    """Needed by the Spark pipeline only."""
    try:
        java = find_java()
    except ConfigError as error:
        return Check("java", "warn", error.message, f"Only the Spark pipeline needs it. {JAVA_HINT}")
    return Check("java", "ok", f"version {java.version} at {java.program}")


def check_spark() -> Check:
    """The packages of the pipeline. A machine without them misses nothing else, so that is no reason to warn."""
    versions = {name: _version_of(name) for name in _SPARK_PACKAGES}
    if not any(versions.values()):
        return Check("spark", "ok", f"not installed; only the pipeline needs it: {_SPARK_HINT}")
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        return Check(
            "spark", "warn", f"{' and '.join(missing)} is not installed", f"The pipeline needs it: {_SPARK_HINT}"
        )
    return Check("spark", "ok", ", ".join(f"{name} {version}" for name, version in versions.items()))


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_weed() -> Check:
    """The S3 server for development. A machine without it misses nothing else, so that is no reason to warn."""
    program = weed_program()
    if program is None:
        return Check("weed", "ok", f"not installed; only tidelog dev-s3 needs it: {INSTALL_HINT}")
    return Check("weed", "ok", f"{program}, for tidelog dev-s3")


def check_permissions(root: Path, place: Path) -> Check:
    """Whether a log can be made and written there."""
    absolute = root.absolute()
    there = next(one for one in (absolute, *absolute.parents) if os.path.lexists(one))
    if there != place and not os.path.isdir(there):
        shown = root if there == absolute else there
        return Check("directory", "fail", f"{shown} is not a directory", "Name another one with --dir")
    if not os.access(place, os.R_OK | os.W_OK | os.X_OK):
        return Check(
            "directory", "fail", f"{place} cannot be written", "Change its owner or mode, or use another --dir"
        )
    if place == root.absolute():
        return Check("directory", "ok", f"{place} can be read and written")
    return Check("directory", "ok", f"{root} does not exist yet and can be made in {place}")


def check_free_space(place: Path) -> Check:
    """Room for messages."""
    free_bytes = shutil.disk_usage(place).free
    detail = f"{human_bytes(free_bytes)} free"
    if free_bytes >= _LOW_FREE_BYTES:
        return Check("free space", "ok", detail)
    status: Literal["warn", "fail"] = "warn" if free_bytes >= _NO_FREE_BYTES else "fail"
    return Check("free space", status, detail, "Make room: a full disk refuses appends until there is some")


def check_file_system(place: Path) -> Check:
    """Whether what is synced there stays there."""
    kind = file_system_kind(place)
    if kind is None:
        return Check("file system", "ok", "kind unknown on this system")
    if kind in NETWORK_KINDS:
        fix = "Use a local disk: locks and syncs over a network are weaker than a log needs"
        return Check("file system", "warn", f"{kind}, over a network", fix)
    if kind in MEMORY_KINDS:
        return Check("file system", "warn", f"{kind}, in memory", "Use a disk: nothing here survives a restart")
    if kind in PASSING_KINDS:
        fix = "In a container, mount a volume for the log: this layer goes with the container"
        return Check("file system", "warn", f"{kind}, a layer of a container", fix)
    return Check("file system", "ok", kind)


def check_sync_time(place: Path) -> Check:
    """How long the disk takes to confirm a small write."""
    try:
        time_us = measure_sync_us(place)
    except OSError as error:
        return Check("sync time", "fail", f"cannot be measured: {error}", "See the checks above")
    detail = f"{time_us:,.0f} us for a write of 4 KiB and fdatasync (median of {_SYNC_ROUNDS})"
    if time_us < _INCREDIBLE_SYNC_US:
        fix = "A disk is not that fast: find out whether it, or its controller, confirms before it writes"
        return Check("sync time", "warn", detail, fix)
    if time_us > _SLOW_SYNC_US:
        return Check("sync time", "warn", detail, "Synced appends will be slow: use a faster disk, append in batches")
    return Check("sync time", "ok", detail)


def measure_sync_us(place: Path) -> float:
    """The median time of a small write and its sync, in a file that is removed again."""
    times_us = []
    with tempfile.TemporaryFile(dir=place) as file:
        for number in range(_SYNC_ROUNDS):
            started = time.perf_counter()
            os.pwrite(file.fileno(), bytes(_SYNC_BYTES), number * _SYNC_BYTES)
            os.fdatasync(file.fileno())
            times_us.append((time.perf_counter() - started) * 1e6)
    return statistics.median(times_us)


def check_clock(root: Path) -> Check:
    """Messages get their times from it, so it has to be right and to go forward."""
    wall, steady = time.time(), time.monotonic()
    time.sleep(_CLOCK_SECONDS)
    drift_seconds = (time.time() - wall) - (time.monotonic() - steady)
    now = datetime.now().astimezone()
    detail = f"{now.isoformat(timespec='seconds')} (UTC{now:%z})"
    fix = "Set the clock and let a time service (chrony, systemd-timesyncd) keep it"
    if now.year not in _PLAUSIBLE_YEARS:
        return Check("clock", "fail", f"{detail}: not a plausible year", fix)
    if abs(drift_seconds) > _CLOCK_DRIFT_SECONDS:
        return Check("clock", "warn", f"{detail}: it jumped by {drift_seconds:.3f} s while it was watched", fix)
    newest = _newest_write(root)
    if newest > time.time() + 60:
        return Check("clock", "warn", f"{detail}: files of the log are {newest - time.time():.0f} s in the future", fix)
    return Check("clock", "ok", detail)


def _newest_write(root: Path) -> float:
    """When the newest file of a topic was written; 0 without topics."""
    times = [path.stat().st_mtime for path in root.glob("*/*/wal.*.log") if wal_files([path.name])]
    return max(times, default=0.0)


def check_open_files() -> Check:
    """Every open topic and every reader holds a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    detail = f"{soft} (may be raised to {hard})"
    if soft == resource.RLIM_INFINITY or soft >= _LOW_OPEN_FILES:
        return Check("open files", "ok", detail)
    return Check("open files", "warn" if soft >= _NO_OPEN_FILES else "fail", detail, "Raise it: ulimit -n 4096")


# The checks of a log directory's store: can it be reached, written, and trusted with a catalog.


_MAX_SKEW_SECONDS = 60
_CLOCK_FIX = "Run a time service (chrony, systemd-timesyncd): stores refuse signed requests if the clock is minutes off"


def store_checks(session: Session) -> dict[str, Callable[[], Check]]:
    """The checks of the store; none for a directory in local mode."""
    try:
        place = _place_of(session)
    except TidelogError as error:
        return {"store": lambda error=error: _raise(error)}  # type: ignore[misc]
    if place.store is None:
        return {}
    return {"store": lambda: check_store(session, place), "metadata": lambda: check_metadata(session, place)}


def _raise(error: TidelogError) -> Check:
    raise error


def _place_of(session: Session) -> Place:
    """What the directory remembers, else what the options name."""
    known = read_info(LocalFiles(), session.root) if session.root.is_dir() else None
    named = Place(session.settings.store, session.settings.metadata, session.settings.metadata_root)
    return settle_place(session.root, LOCAL if known is None else known.place, named)


def _open(session: Session, place: Place) -> ObjectStore:
    assert place.store is not None
    return open_store(place.store, session.settings.object_store)


def check_store(session: Session, place: Place) -> Check:
    """Writes a small object, reads it, and compares its time with ours."""
    objects = _open(session, place)
    key = f"{PREFIX}{secrets.token_hex(16)}"
    begin = time.monotonic()
    objects.put(key, b"doctor")
    written_seconds, now = time.monotonic() - begin, time.time()
    try:
        info = objects.head(key)
        data = objects.get(key).data
    finally:
        objects.delete(key)
    if data != b"doctor":
        return Check("store", "fail", f"{objects.url} returned other bytes than were written", "Use another store")
    skew_seconds = info.modified_us / 1e6 - now
    detail = f"{objects.url} can be read and written ({written_seconds * 1000:.0f} ms for a small object)"
    if abs(skew_seconds) > _MAX_SKEW_SECONDS:
        return Check("store", "warn", f"{detail}; its clock and ours are {abs(skew_seconds):.0f} s apart", _CLOCK_FIX)
    return Check("store", "ok", detail)


def check_metadata(session: Session, place: Place) -> Check:
    """Reads the catalog; where that is in the bucket, proves that its conditional writes hold."""
    assert place.metadata is not None and place.metadata_root is not None
    objects = _open(session, place)
    if place.metadata == INSIDE and not Path(session.root, METADATA_FILE).exists():
        return Check("metadata", "ok", f"{METADATA_FILE} does not exist yet and is made in {session.root}")
    if place.metadata == BUCKET:
        try:
            prove_conditional_writes(objects)
        except ConfigError as error:
            return Check("metadata", "fail", error.message, hint_of(error) or "")
    url, settings = metadata_url(session.root, place.metadata), session.settings.metadata_store
    store = open_metadata_store(url, objects, read_only=True, settings=settings)
    try:
        if place.metadata not in (INSIDE, BUCKET):
            StoreBinding(objects, store, place.metadata_root, SystemClock(), read_only=True).check(asks_store=True)
        found = store.keys(topics_prefix(place.metadata_root), limit=1)
    finally:
        store.close()
    honours = ", conditional writes are honoured" if place.metadata == BUCKET else ""
    return Check("metadata", "ok", f"{place.metadata}: {'has' if found else 'has no'} topics{honours}")
