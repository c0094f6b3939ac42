"""Appending frames: as `append_many`, with payloads that somebody has framed, whatever offsets their frames have."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.log.test_frame import ANY_INT, OFFSETS, PAYLOADS, assert_twins_agree
from tests.log.test_handover import wait_for_line
from tests.log.workbench import DIRECTORY, Threads, contents, frames_in, wait_until

from tidelog.codec import MAX_OFFSET
from tidelog.errors import (
    BackpressureError,
    ClosedError,
    DiskFullError,
    InputError,
    LogFailedError,
    MessageTooLargeError,
)
from tidelog.log import Log, LogSettings
from tidelog.log.frame import Frames, encode_many, join, scan, writable_frames
from tidelog.testing import FaultyFiles


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def log(files: FaultyFiles) -> Iterator[Log]:
    with closing(Log.open(DIRECTORY, LogSettings(), files=files)) as opened:
        yield opened


def framed(offset: int, payloads: list[bytes], *, writable: bool = True) -> Frames:
    """Frames in a buffer of either kind."""
    made = encode_many(offset, payloads)
    return writable_frames(offset, bytearray(made.buffer), made.positions, made.lengths) if writable else made


def values(log: Log) -> list[bytes]:
    return [value for _, value in contents(log)]


@given(st.lists(st.tuples(OFFSETS, PAYLOADS, st.booleans(), st.booleans()), max_size=6))
def test_framed_and_bare_payloads_are_one_sequence(pieces: list[tuple[int, list[bytes], bool, bool]]) -> None:
    """What is read is what was appended, from memory and after the log was opened again."""
    files, wanted = FaultyFiles(), list[bytes]()
    with closing(Log.open(DIRECTORY, LogSettings(rotate_max_bytes=4096), files=files)) as log:
        for offset, payloads, is_framed, writable in pieces:
            if is_framed:
                assert log.append_frames(framed(offset, payloads, writable=writable)) == len(wanted)
            else:
                log.append_many(payloads)
            wanted += payloads
        assert contents(log) == list(enumerate(wanted))
        log.flush()
        assert contents(log) == list(enumerate(wanted))
    with closing(Log.open(DIRECTORY, files=files)) as log:
        assert contents(log) == list(enumerate(wanted))


@given(OFFSETS, OFFSETS, PAYLOADS, st.binary(max_size=20), st.binary(max_size=20))
def test_frames_are_renumbered_where_they_are(
    old: int, new: int, payloads: list[bytes], before: bytes, behind: bytes
) -> None:
    """Nothing around them changes."""
    wrapped, _, _ = scan(before + encode_many(old, payloads).buffer + behind, len(before), old)
    taken = wrapped.slice(0, len(payloads))
    buffer, twin = bytearray(taken.buffer), bytearray(taken.buffer)
    moved = writable_frames(old, buffer, taken.positions, taken.lengths).numbered(new)
    assert moved.first_offset == new
    assert id(moved.buffer) == id(buffer)
    assert buffer == before + encode_many(new, payloads).buffer + behind
    assert_twins_agree("renumber_in_place", twin, taken.positions, taken.lengths, new)
    assert taken.numbered(new) == encode_many(new, payloads)


@given(st.binary(max_size=60), st.binary(max_size=40), st.binary(max_size=40), st.booleans(), st.data())
def test_the_twins_agree_about_nonsense(
    buffer: bytes, positions: bytes, lengths: bytes, writable: bool, data: st.DataObject
) -> None:
    """Arrays of any bytes lead nowhere outside the buffer."""
    given_buffer = bytearray(buffer) if writable else buffer
    assert_twins_agree("renumber_in_place", given_buffer, positions, lengths, data.draw(OFFSETS))
    assert_twins_agree("measure_frames", buffer, positions, lengths)


@given(st.integers(0, MAX_OFFSET), st.lists(st.tuples(OFFSETS, PAYLOADS, st.integers(0, 3)), max_size=4), st.data())
def test_pieces_are_joined(first: int, pieces: list[tuple[int, list[bytes], int]], data: st.DataObject) -> None:
    """As if all payloads had been framed at once; nonsense leads nowhere."""
    some = [encode_many(offset, payloads).slice(skip, len(payloads)) for offset, payloads, skip in pieces]
    wanted = [payload for _, payloads, skip in pieces for payload in payloads[skip:]]
    assert join(first, some) == encode_many(first, wanted)
    places = [(piece.buffer, piece.positions, piece.lengths) for piece in some]
    assert_twins_agree("join_frames", first, places)
    nonsense = data.draw(st.tuples(st.binary(max_size=60), st.binary(max_size=40), st.binary(max_size=40)))
    assert_twins_agree("join_frames", data.draw(ANY_INT), [*places, nonsense])
    assert_twins_agree("join_frames", data.draw(ANY_INT), places)


@given(OFFSETS, PAYLOADS, st.data())
def test_headers_that_say_something_else_are_refused(offset: int, payloads: list[bytes], data: st.DataObject) -> None:
    """A log with such frames in it could not be read."""
    frames = encode_many(offset, payloads)
    assert frames.measure() == (sum(map(len, payloads)), max(map(len, payloads), default=0))
    assert_twins_agree("measure_frames", frames.buffer, frames.positions, frames.lengths)
    if len(payloads) > 1:
        index = data.draw(st.integers(0, len(payloads) - 1))
        broken = bytearray(frames.buffer)
        broken[frames.start_of(index) + data.draw(st.integers(0, 11))] ^= 1 << data.draw(st.integers(0, 7))
        with pytest.raises(InputError, match="header of frame"):
            writable_frames(offset, broken, frames.positions, frames.lengths).measure()
        assert_twins_agree("measure_frames", broken, frames.positions, frames.lengths)


def test_no_frames_use_no_offset(log: Log) -> None:
    """The first offset is then the next one."""
    log.append(b"a")
    assert log.append_frames(encode_many(0, []), sync=True) == 1
    assert values(log) == [b"a"]


def test_sync_returns_once_they_are_on_the_disk(log: Log) -> None:
    """By threads and by tasks."""
    assert log.append_frames(framed(7, [b"a", b"b"]), sync=True) == 0
    assert log.durable_offset == 2
    assert asyncio.run(log.append_frames_async(framed(0, [b"c"]), sync=True)) == 2
    assert log.durable_offset == 3


def test_the_same_frames_can_be_appended_again(log: Log, files: FaultyFiles) -> None:
    """Their headers are rewritten for the second time, after they were written for the first."""
    frames = framed(0, [b"a", b"b"])
    assert [log.append_frames(frames) for _ in range(3)] == [0, 2, 4]
    log.flush()
    written = frames_in(files.read(log.place_of(0)), 0)
    assert written.payloads() == [b"a", b"b"] * 3


def test_frames_too_large_are_refused_whole(files: FaultyFiles) -> None:
    """As payloads are."""
    with closing(Log.open(DIRECTORY, LogSettings(max_message_bytes=10), files=files)) as log:
        with pytest.raises(MessageTooLargeError):
            log.append_frames(framed(0, [b"a", b"b" * 11]))
        assert log.next_offset == 0


def test_offsets_end_for_frames_too(files: FaultyFiles) -> None:
    """No offset is used then."""
    with closing(Log.open(DIRECTORY, files=files, first_offset=MAX_OFFSET)) as log:
        with pytest.raises(InputError, match="largest offset"):
            log.append_frames(framed(0, [b"a", b"b"]))
        assert log.append_frames(framed(0, [b"a"])) == MAX_OFFSET


def test_frames_wait_for_room_in_order_of_arrival(files: FaultyFiles) -> None:
    """Beside bare payloads; without room in time no offset is used."""
    settings = LogSettings(append_queue_max_messages=2)
    with closing(Log.open(DIRECTORY, settings, files=files)) as log:
        log.hold_appends()
        with pytest.raises(BackpressureError):
            log.append_frames(framed(0, [b"late"]), timeout_seconds=0.01)
        with pytest.raises(BackpressureError):
            asyncio.run(log.append_frames_async(framed(0, [b"late"]), timeout_seconds=0.01))
        with Threads() as threads:
            threads.start(lambda: log.append_frames(framed(5, [b"a", b"b"]), timeout_seconds=60))
            wait_for_line(log, 1)
            threads.start(lambda: log.append_many([b"c"], timeout_seconds=60))
            wait_for_line(log, 2)
            threads.start(lambda: asyncio.run(log.append_frames_async(framed(9, [b"d"]), timeout_seconds=60)))
            wait_for_line(log, 3)
            log.release_appends()
        assert values(log) == [b"a", b"b", b"c", b"d"]


def test_frames_that_would_have_to_wait_are_not_appended_at_once(files: FaultyFiles) -> None:
    """No offset is used then; what is refused for good raises."""
    with closing(Log.open(DIRECTORY, LogSettings(max_message_bytes=10), files=files)) as log:
        assert log.append_frames_at_once(framed(5, [b"a", b"b"]), sync=False) == 0
        log.hold_appends()
        assert log.append_frames_at_once(framed(0, [b"c"]), sync=True) is None
        log.release_appends()
        with pytest.raises(MessageTooLargeError):
            log.append_frames_at_once(framed(0, [b"d" * 11]), sync=True)
        assert log.append_frames_at_once(framed(0, [b"c"]), sync=False) == 2
        assert values(log) == [b"a", b"b", b"c"]
    with pytest.raises(ClosedError):
        log.append_frames_at_once(framed(0, [b"e"]), sync=True)


def test_a_sync_is_told_without_a_waiter(files: FaultyFiles) -> None:
    """Asked for with the append or afterwards; of what is on the disk already nothing is told."""
    told = threading.Semaphore(0)
    with closing(Log.open(DIRECTORY, LogSettings(fsync_interval_ms=3_600_000), files=files)) as log:
        log.on_durable(told.release)
        assert log.append_frames_at_once(framed(0, [b"a"]), sync=True) == 0
        assert told.acquire(timeout=60)
        assert log.durable_offset == 1
        assert log.append_frames_at_once(framed(0, [b"b"]), sync=False) == 1
        log.request_sync(2)
        assert told.acquire(timeout=60)
        assert log.durable_offset == 2
        log.request_sync(2)
        assert not told.acquire(blocking=False)


def test_a_log_that_fails_tells_it(log: Log, files: FaultyFiles) -> None:
    """Who waits without a waiter hears of it, and whoever asks for a sync later."""
    told = threading.Semaphore(0)
    log.append(b"a", sync=True)
    files.fail("sync")
    log.on_written(lambda: told.release() if log.stall is not None else None)
    log.append_frames_at_once(framed(0, [b"b"]), sync=True)
    assert told.acquire(timeout=60)
    with pytest.raises(LogFailedError):
        log.request_sync(2)
    with pytest.raises(LogFailedError):
        log.close()


def test_a_full_disk_keeps_the_rest_of_the_frames(files: FaultyFiles) -> None:
    """They are accepted, readable, and written once there is room."""
    with closing(Log.open(DIRECTORY, files=files)) as log:
        log.append(b"begin", sync=True)
        files.capacity_bytes = len(files.read(log.place_of(0))) + 30
        with pytest.raises(DiskFullError) as caught:
            log.append_frames(framed(3, [b"a" * 10, b"b" * 10]), sync=True)
        assert caught.value.offset == 1
        files.capacity_bytes = None
        wait_until(lambda: log.statistics().state == "open", "room on the disk")
        assert log.append_frames(framed(0, [b"c"]), sync=True) == 3
    with closing(Log.open(DIRECTORY, files=files)) as log:
        assert values(log) == [b"begin", b"a" * 10, b"b" * 10, b"c"]


def test_many_threads_append_frames_and_payloads(log: Log) -> None:
    """The frames of one call stay together."""
    begun = threading.Barrier(4)

    def append(number: int) -> None:
        begun.wait()
        for step in range(50):
            pieces = [b"%d-%d-%d" % (number, step, index) for index in range(3)]
            first = log.append_frames(framed(0, pieces)) if step % 2 else log.append_many(pieces)[0]
            assert log.read(first, first + 3).next_batch() is not None

    with Threads() as threads:
        for number in range(4):
            threads.start(partial(append, number))
    found = values(log)
    assert len(found) == 600
    for at in range(0, 600, 3):
        begin = found[at].rsplit(b"-", 1)[0]
        assert found[at : at + 3] == [begin + b"-%d" % index for index in range(3)]
