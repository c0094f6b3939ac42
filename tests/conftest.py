"""What holds for all tests: the same outcome on every machine."""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.campaign import IS_DEEP, SEED, load_profile
from tests.campaign_plugin import Campaign, mark
from tests.servers import etcd_server, pytest_runtest_makereport, s3_server

from tidelog.store import scheduler

__all__ = ["etcd_server", "pytest_runtest_makereport", "s3_server"]

load_profile()

# Most tests wait for the disk longer than for anything else, and none of them can tell whether a disk keeps what it was
# told to sync (`FaultyFiles` can). So their directories are in memory where there is plenty of it.
IN_MEMORY = Path("/dev/shm")
ROOM_BYTES = 6 << 30


def has_room_in_memory() -> bool:
    """Whether directories in memory have the room that tests on several processes may need."""
    try:
        available = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())["MemAvailable"]
        room = min(int(available.split()[0]) << 10, shutil.disk_usage(IN_MEMORY).free)
    except (OSError, KeyError):
        return False
    return room > ROOM_BYTES and os.access(IN_MEMORY, os.W_OK)


if has_room_in_memory():
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY))
    tempfile.tempdir = str(IN_MEMORY)

# A shell that starts tests in the background has them ignore Ctrl-C, and whatever they start inherits that: no program
# under test would answer it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Opening an engine waits some seconds for its store. On a busy machine a store that works may take longer, and tests of
# who may open it would see an engine without one. Those that mean a store that hangs do not wait at all.
PATIENCE_SECONDS = 120.0
_answered_within = scheduler.answered_within


def _answered_patiently(seconds: float, work: Callable[[], None], name: str) -> None:
    _answered_within(PATIENCE_SECONDS if seconds else 0.0, work, name)


for module in (
    scheduler,
    *(sys.modules.get(name) for name in ("tidelog.engine_wiring", "tidelog.engine.cold.shipping")),
):
    if module is not None:
        vars(module)["answered_within"] = _answered_patiently


def _outside_of_tests(drawn: Callable[..., Any], apart: Callable[..., Any]) -> Callable[..., Any]:
    def draw(*arguments: Any, **named: Any) -> Any:
        is_test = threading.current_thread() is threading.main_thread()
        return drawn(*arguments, **named) if is_test else apart(*arguments, **named)

    return draw


# Hypothesis seeds the generator of `random` and fails a test during which its state changes: threads of client
# libraries, which pause for random times, have one of their own.
_apart = random.Random()
for drawing in ("random", "uniform", "randint", "randrange", "choice", "choices", "sample", "shuffle", "getrandbits"):
    setattr(random, drawing, _outside_of_tests(getattr(random, drawing), getattr(_apart, drawing)))


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test sees the settings that it makes itself, none from outside."""
    for name in os.environ:
        if name.startswith("TIDELOG_"):
            monkeypatch.delenv(name)


def pytest_configure(config: pytest.Config) -> None:
    """In a campaign the tests have a budget, and an order."""
    if IS_DEEP:
        config.pluginmanager.register(Campaign(config), "campaign")


def pytest_report_header() -> list[str]:
    """A campaign says at its beginning what it takes to repeat it."""
    return [f"CAMPAIGN_SEED={SEED}"] if IS_DEEP else []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before markers choose among the tests."""
    mark(items)


def pytest_collection_finish() -> None:
    """Thousands of tests and what they import stay until the end: the collector need not look at them again."""
    gc.collect()
    gc.freeze()
