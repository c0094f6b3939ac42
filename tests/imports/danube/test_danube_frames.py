"""Walking a Danube file: every good frame once, every other byte named, in bounded memory."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.danube.danube_bytes import encode, frame, frames

from tidelog.errors import MessageTooLargeError, RetryError
from tidelog.imports.danube.frames import CHUNK_BYTES, Damage, Event, Run, read_frames
from tidelog.log.frame import HEADER_BYTES

LIMIT = 16 << 20


class Reading:
    """Bytes to be walked, and how they were asked for."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.largest_read = 0
        self.read_bytes = 0

    def read_at(self, position: int, size: int) -> bytes:
        self.largest_read = max(self.largest_read, size)
        self.read_bytes += size
        return self.data[position : position + size]

    def events(self, limit: int = LIMIT) -> list[Event]:
        return list(read_frames("wal.log", len(self.data), self.read_at, limit))


def walk(data: bytes) -> list[Event]:
    return Reading(data).events()


def offsets(events: list[Event]) -> list[int]:
    runs = [event for event in events if isinstance(event, Run)]
    return [offset for run in runs for offset in range(run.first_offset, run.next_offset)]


def damages(events: list[Event]) -> list[Damage]:
    return [event for event in events if isinstance(event, Damage)]


def check_every_byte_once(events: list[Event], size: int) -> None:
    """Runs and damages lie end to end."""
    position = 0
    for event in events:
        assert (event.byte() if isinstance(event, Run) else event.byte) == position
        position += event.size
    assert position == size


@given(st.lists(st.integers(0, 100), max_size=50))
def test_any_order_of_offsets_is_walked(order: list[int]) -> None:
    """Nothing is expected of offsets: each frame is handed out, in the order of the file."""
    data = frames(order)
    events = walk(data)
    assert offsets(events) == order
    check_every_byte_once(events, len(data))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.data())
def test_damage_anywhere_costs_no_other_frame(order: list[int], data: st.DataObject) -> None:
    """One changed byte costs the frame that it is in, at most, and every byte belongs to a run or to a damage."""
    whole = bytearray(frames(order))
    byte = data.draw(st.integers(0, len(whole) - 1))
    whole[byte] ^= data.draw(st.integers(1, 255))
    hit = next(n for n in range(len(order)) if byte < len(frames(order[: n + 1])))
    events = walk(bytes(whole))
    found = offsets(events)
    others = order[:hit] + order[hit + 1 :]
    assert others in (found, found[:hit] + found[hit + 1 :])
    check_every_byte_once(events, len(whole))


def test_every_cut_is_a_torn_tail() -> None:
    """A file that ends anywhere gives the frames before that place, and one tail."""
    whole, kept = frames(range(3)), frames(range(2))
    for size in range(len(kept) + 1, len(whole)):
        events = walk(whole[:size])
        assert offsets(events) == [0, 1]
        (tail,) = damages(events)
        assert (tail.byte, tail.size, tail.is_tail) == (len(kept), size - len(kept), True)


@pytest.mark.parametrize("hole", [bytes(5000), b"\xff" * 5000, bytes(CHUNK_BYTES + 3)])
def test_a_hole_is_stepped_over(hole: bytes) -> None:
    """Zeros and the like between two frames are one damage, however long."""
    events = walk(frames(range(3)) + hole + frames(range(3, 6)))
    assert offsets(events) == list(range(6))
    (damage,) = damages(events)
    assert (damage.byte, damage.size, damage.is_tail) == (len(frames(range(3))), len(hole), False)


def test_frames_across_chunks_are_whole() -> None:
    """Files are read in chunks; frames that lie across their ends, and frames larger than one, are found."""
    sizes = [100, CHUNK_BYTES - 200, 1000, CHUNK_BYTES + 17, 2 * CHUNK_BYTES, 5]
    data = b"".join(frame(n, bytes([n + 1]) * size) for n, size in enumerate(sizes))
    reading = Reading(data)
    events = reading.events()
    assert offsets(events) == list(range(len(sizes)))
    check_every_byte_once(events, len(data))
    assert reading.largest_read <= CHUNK_BYTES


def test_a_file_is_read_about_once() -> None:
    """Ends of chunks cost a part of a frame to be read again, and no more."""
    data = frames(range(60_000))
    reading = Reading(data)
    assert offsets(reading.events()) == list(range(60_000))
    assert reading.read_bytes < len(data) + 10_000


def test_a_length_that_is_a_lie_is_not_read_into_memory() -> None:
    """A header that claims more than is accepted is checked in pieces, and found out."""
    lie = struct.pack("<QII", 3, CHUNK_BYTES + 100, 12345)
    data = frames(range(3)) + lie + bytes(CHUNK_BYTES + 200) + frames(range(3, 5))
    reading = Reading(data)
    events = reading.events(limit=CHUNK_BYTES // 2)
    assert offsets(events) == list(range(5))
    assert reading.largest_read <= CHUNK_BYTES


def test_a_message_that_is_too_large_is_named() -> None:
    """A whole frame over the limit is no damage: the error says where it is and which setting to raise."""
    before = frames(range(3))
    with pytest.raises(MessageTooLargeError) as caught:
        Reading(before + encode(3, b"x" * (CHUNK_BYTES + 1))).events(limit=CHUNK_BYTES)
    assert f"at byte {len(before)} of wal.log" in str(caught.value)
    assert "max_message_bytes" in str(caught.value.hint)


def test_a_file_that_becomes_shorter_is_an_error() -> None:
    """A file that is cut while it is read is not taken for one that ends there."""
    data = frames(range(3))
    with pytest.raises(RetryError):
        list(read_frames("wal.log", len(data) + 1, Reading(data).read_at, LIMIT))


def test_a_run_can_stand_alone() -> None:
    """A slice that is kept knows its place in the file without the chunk it came from."""
    (run,) = walk(frames(range(10)))
    assert isinstance(run, Run)
    part = run.slice(4, 6)
    alone = part.alone()
    assert (alone.first_offset, alone.count, alone.byte(), alone.byte(1)) == (4, 2, part.byte(), part.byte(1))
    assert alone.frames.payloads() == part.frames.payloads()
    assert len(alone.frames.buffer) == part.size
    assert part.byte() == len(frames(range(4)))
    assert alone.frames.start_of(0) == 0
    assert HEADER_BYTES == 16
