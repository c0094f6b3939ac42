"""Holding appends back: what the holder appends has consecutive offsets, and all others wait their turn."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import pytest
from tests.log.test_handover import wait_for_line
from tests.log.workbench import DIRECTORY, Threads, contents, payload, wait_until

from tidelog.errors import BackpressureError, ClosedError, DiskFullError
from tidelog.log import Log, LogSettings
from tidelog.log.frame import encode_many
from tidelog.testing import FaultyFiles


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def log(files: FaultyFiles) -> Iterator[Log]:
    with closing(Log.open(DIRECTORY, LogSettings(), files=files)) as opened:
        yield opened


def fill(log: Log) -> None:
    while True:
        log.append_held(encode_many(0, [b"x" * 20]))


def values(log: Log) -> list[bytes]:
    return [value for _, value in contents(log)]


def test_others_wait_and_come_in_order_of_arrival(log: Log) -> None:
    """First come, first served, once the holder has let go."""
    log.append(b"before")
    assert log.hold_appends() == 1
    with Threads() as threads:
        for number in range(3):
            threads.start(partial(log.append, b"other-%d" % number))
            wait_for_line(log, number + 1)
        log.append_held(encode_many(0, [b"a", b"b"]))
        log.append_held(encode_many(0, [b"c"]))
        assert log.next_offset == 4
        log.release_appends()
    assert values(log) == [b"before", b"a", b"b", b"c", b"other-0", b"other-1", b"other-2"]


def test_tasks_wait_too(log: Log) -> None:
    """The event loop goes on meanwhile."""

    async def append_beside() -> int:
        log.hold_appends()
        task = asyncio.create_task(log.append_async(b"other"))
        await asyncio.sleep(0.01)
        assert not task.done()
        log.append_held(encode_many(0, [b"a"]))
        log.release_appends()
        return await task

    assert asyncio.run(append_beside()) == 1


def test_an_append_that_waits_too_long_used_no_offset(log: Log) -> None:
    """And what comes later is not held up by it."""
    log.hold_appends()
    with pytest.raises(BackpressureError, match=r"waited .* for the ingest"):
        log.append(b"late", timeout_seconds=0.01)
    log.release_appends()
    assert log.append(b"x") == 0


def test_what_is_held_is_read_at_once(log: Log) -> None:
    """It is accepted as everything else: readable, written, synced, and there after opening again."""
    log.append(b"before")
    log.hold_appends()
    log.append_held(encode_many(3, [b"a", b"b"]))
    assert values(log) == [b"before", b"a", b"b"]
    log.release_appends()
    log.append(b"behind", sync=True)
    assert values(log) == [b"before", b"a", b"b", b"behind"]
    assert log.durable_offset == 4


def test_more_than_there_is_room_for_waits_for_the_writer(files: FaultyFiles) -> None:
    """The holder fills the hand-over again and again, in files of any size."""
    settings = LogSettings(append_queue_max_messages=3, rotate_max_bytes=200)
    with closing(Log.open(DIRECTORY, settings, files=files)) as log:
        log.hold_appends()
        for start in range(0, 100, 5):
            log.append_held(encode_many(0, [payload(number) for number in range(start, start + 5)]))
        log.release_appends()
        log.flush()
        expected = [payload(number) for number in range(100)]
        assert values(log) == expected
    with closing(Log.open(DIRECTORY, settings, files=files)) as log:
        assert values(log) == expected


def test_closing_ends_the_wait_of_the_holder(files: FaultyFiles) -> None:
    """What it had appended is written; the rest is refused."""
    log = Log.open(DIRECTORY, LogSettings(append_queue_max_messages=2), files=files)
    log.hold_appends()
    errors: list[Exception] = []

    def append() -> None:
        try:
            while True:
                log.append_held(encode_many(0, [b"a", b"b"]))
        except ClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=append)
    thread.start()
    wait_until(lambda: log.next_offset > 4, "some")
    log.close()
    thread.join(60)
    assert len(errors) == 1


def test_a_full_disk_is_told_to_the_holder(files: FaultyFiles) -> None:
    """It may go on later: nobody else got in between."""
    with closing(Log.open(DIRECTORY, LogSettings(append_queue_max_messages=2), files=files)) as log:
        log.hold_appends()
        files.capacity_bytes = 200
        with pytest.raises(DiskFullError):
            fill(log)
        reached = log.next_offset
        files.capacity_bytes = None
        wait_until(lambda: log.statistics().state == "open", "room")
        log.append_held(encode_many(0, [b"y"]))
        assert log.next_offset == reached + 1
        log.release_appends()
