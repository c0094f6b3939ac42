"""What `tidelog doctor` looks at; each check is a function that returns one `Check`.

A check measures and judges and never raises: what keeps it from measuring is its result.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Literal, NamedTuple

from tidelog.cli.errors import hint_of, text_of
from tidelog.cli.file_systems import MEMORY_KINDS, NETWORK_KINDS, PASSING_KINDS, file_system_kind
from tidelog.cli.output import human_bytes
from tidelog.cli.seaweed import INSTALL_HINT, weed_program
from tidelog.engine.page import KERNEL_IS_NATIVE as PAGES_ARE_NATIVE
from tidelog.errors import ConfigError, TidelogError
from tidelog.log.frame import KERNEL_IS_NATIVE
from tidelog.log.names import wal_files
from tidelog.pipeline.java import JAVA_HINT, find_java
from tidelog.topics.message import CODEC_IS_NATIVE

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
        "kernels": check_kernels,
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
        return Check(name, "fail", text_of(error), hint_of(error) or "Mend that, and look again")
    except OSError as error:
        return Check(name, "fail", f"cannot be checked: {error}", "Mend the directory, or name another one with --dir")


def nearest_directory(path: Path) -> Path:
    """The path itself or the closest directory above it that can be seen."""
    absolute = path.absolute()
    return next(one for one in (absolute, *absolute.parents) if os.path.isdir(one))


def check_python() -> Check:
    """The interpreter; one that is too old could not have installed the package."""
    version = f"{platform.python_implementation()} {platform.python_version()} at {sys.executable}"
    return Check("python", "ok", version)


def check_kernels() -> Check:
    """The C code that scans frames, codes messages and works on an engine's pages."""
    kernels = {"frames": KERNEL_IS_NATIVE, "messages": CODEC_IS_NATIVE, "pages": PAGES_ARE_NATIVE}
    missing = [name for name, is_native in kernels.items() if not is_native]
    if not missing:
        return Check("kernels", "ok", "native C code for frames, messages and pages")
    detail = f"pure Python for {' and '.join(missing)}: correct, but many times slower"
    if os.environ.get("TIDELOG_PURE_PYTHON"):
        return Check("kernels", "warn", detail, "Unset TIDELOG_PURE_PYTHON")
    fix = "Install a C compiler and Python's headers, then: pip install --force-reinstall --no-cache-dir tidelog"
    return Check("kernels", "warn", detail, fix)


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
    """When the newest file of a topic was written; 0 where there is none."""
    times = [path.stat().st_mtime for path in root.glob("*/*/wal.*.log") if wal_files([path.name])]
    return max(times, default=0.0)


def check_open_files() -> Check:
    """Every open topic and every reader holds a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    detail = f"{soft} (may be raised to {hard})"
    if soft == resource.RLIM_INFINITY or soft >= _LOW_OPEN_FILES:
        return Check("open files", "ok", detail)
    return Check("open files", "warn" if soft >= _NO_OPEN_FILES else "fail", detail, "Raise it: ulimit -n 4096")
