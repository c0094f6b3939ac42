"""Frame boundaries by offset and by byte, against a list of where every frame really begins."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.campaign import examples
from tests.log.workbench import DIRECTORY, disk_with

from tidelog.errors import CorruptionError
from tidelog.log import atomic_batches as boundary
from tidelog.log.frame import HEADER_BYTES, encode_many, scan
from tidelog.log.segment import FilePart, Segment, byte_of_offset, last_boundary
from tidelog.testing import FaultyFiles

FIRST = 1000
NAME = "wal.0.log"
SIZES = st.lists(st.integers(1, 900), min_size=1, max_size=40)


class OneFile:
    """A file of frames of these sizes, and where each of them begins; the last place is the end."""

    def __init__(self, sizes: list[int], *, indexed: bool = False) -> None:
        frames = encode_many(FIRST, [bytes([65 + number % 26]) * size for number, size in enumerate(sizes)])
        self.files = disk_with({NAME: frames.buffer})
        self.starts = list(accumulate((HEADER_BYTES + size for size in sizes), initial=0))
        self.segment = Segment(0, DIRECTORY / NAME, FIRST, 0)
        self.segment.next_offset, self.segment.size = FIRST + len(sizes), len(frames.buffer)
        if indexed:
            self.segment.index.extend(frames, 0)

    def part(self, offset: int = FIRST) -> FilePart:
        return FilePart(self.segment, offset)

    def damage(self, byte: int) -> None:
        data = bytearray(self.files.read(DIRECTORY / NAME))
        data[byte] ^= 1
        self.files = disk_with({NAME: bytes(data)})


@pytest.fixture(params=[64, 500, 256 << 10])
def chunk_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Chunks smaller than a frame, of a few frames, and larger than the file."""
    monkeypatch.setattr(boundary, "_CHUNK_BYTES", request.param)
    return int(request.param)


@pytest.mark.usefixtures("chunk_bytes")
def test_every_offset_is_found_where_its_frame_begins() -> None:
    """Whatever the chunks are, the byte of an offset is the sum of the frames before it."""

    @settings(max_examples=examples(40))
    @given(sizes=SIZES, indexed=st.booleans(), data=st.data())
    def check(sizes: list[int], indexed: bool, data: st.DataObject) -> None:
        file = OneFile(sizes, indexed=indexed)
        index = data.draw(st.integers(0, len(sizes)))
        asked_from = data.draw(st.integers(0, min(index, len(sizes) - 1)))
        assert byte_of_offset(file.files, file.part(FIRST + asked_from), FIRST + index) == file.starts[index]

    check()


@pytest.mark.usefixtures("chunk_bytes")
def test_the_last_boundary_before_a_byte_is_the_greatest_one() -> None:
    """It is the greatest boundary up to the byte, and at least one frame behind the offset."""

    @settings(max_examples=examples(60))
    @given(sizes=SIZES, indexed=st.booleans(), data=st.data())
    def check(sizes: list[int], indexed: bool, data: st.DataObject) -> None:
        file = OneFile(sizes, indexed=indexed)
        index = data.draw(st.integers(0, len(sizes) - 1))
        room = data.draw(st.integers(0, file.starts[-1]))
        max_byte = file.starts[index] + room
        expected = max(index + 1, *(place for place, start in enumerate(file.starts) if start <= max_byte))
        found = last_boundary(file.files, file.part(FIRST + index), FIRST + index, max_byte)
        assert found == (FIRST + expected, file.starts[expected])

    check()


@pytest.mark.usefixtures("chunk_bytes")
def test_a_limit_on_a_boundary_is_that_boundary() -> None:
    """A frame that ends exactly at the limit belongs to what is before it."""
    file = OneFile([100] * 10)
    for index in range(1, 11):
        assert last_boundary(file.files, file.part(), FIRST, file.starts[index]) == (FIRST + index, file.starts[index])
        assert last_boundary(file.files, file.part(), FIRST, file.starts[index] - 1)[0] == max(
            FIRST + 1, FIRST + index - 1
        )


def test_a_frame_larger_than_a_chunk_is_passed() -> None:
    """A huge frame is read whole, and the one behind it is found."""
    file = OneFile([10, 700_000, 10, 10])
    assert byte_of_offset(file.files, file.part(), FIRST + 2) == file.starts[2]
    assert last_boundary(file.files, file.part(), FIRST, file.starts[2] + 5) == (FIRST + 2, file.starts[2])


def test_a_frame_larger_than_the_limit_is_the_least_that_is_taken() -> None:
    """Whoever asks for less than one frame gets one: something must move on."""
    file = OneFile([10, 5000, 10])
    assert last_boundary(file.files, file.part(FIRST + 1), FIRST + 1, file.starts[1] + 1) == (FIRST + 2, file.starts[2])


def test_the_offset_behind_the_last_needs_no_reading() -> None:
    """The end of a part is known, also of a file that cannot be read any more."""
    file = OneFile([10] * 5)
    file.files.fail("open", times=None)
    assert byte_of_offset(file.files, file.part(), FIRST + 5) == file.starts[5]
    assert last_boundary(file.files, file.part(), FIRST, file.starts[5]) == (FIRST + 5, file.starts[5])


def test_a_part_ends_where_it_did_when_it_was_asked_for() -> None:
    """Frames that were added since then are not counted, however far the limit is."""
    file = OneFile([10] * 10)
    part = file.part()
    part.next_offset, part.end_byte = FIRST + 4, file.starts[4]
    assert last_boundary(file.files, part, FIRST, 1 << 40) == (FIRST + 4, file.starts[4])
    assert byte_of_offset(file.files, part, FIRST + 7) == file.starts[4]


@pytest.mark.parametrize("where", ["offset", "length", "crc", "payload"])
def test_damage_before_the_place_is_named(where: str) -> None:
    """Nobody is told a boundary behind a frame that is not whole: the file and the byte of it are named."""
    file = OneFile([50] * 6)
    file.damage(file.starts[2] + {"offset": 0, "length": 10, "crc": 12, "payload": HEADER_BYTES + 7}[where])
    with pytest.raises(CorruptionError, match=NAME) as raised:
        byte_of_offset(file.files, file.part(), FIRST + 4)
    assert raised.value.byte == file.starts[2]
    with pytest.raises(CorruptionError) as raised:
        last_boundary(file.files, file.part(), FIRST, file.starts[5] - 1)
    assert raised.value.byte == file.starts[2]


def test_damage_behind_the_place_is_not_looked_at() -> None:
    """A boundary before the damage is given, without reading on."""
    file = OneFile([50] * 6)
    file.damage(file.starts[4] + HEADER_BYTES)
    assert byte_of_offset(file.files, file.part(), FIRST + 2) == file.starts[2]
    assert last_boundary(file.files, file.part(), FIRST, file.starts[3])[1] == file.starts[3]


def test_a_file_that_is_shorter_than_it_was_is_damage() -> None:
    """A file that lost its end is told as damage, not searched for ever."""
    file = OneFile([50] * 6)
    whole = file.files.read(DIRECTORY / NAME)
    file.files = disk_with({NAME: whole[: file.starts[3] + 5]})
    with pytest.raises(CorruptionError):
        byte_of_offset(file.files, file.part(), FIRST + 5)


def test_searching_teaches_the_index() -> None:
    """A second search for the same place reads next to nothing."""
    file = OneFile([5000] * 200)
    target = FIRST + 190
    byte_of_offset(file.files, file.part(target), target)
    part = file.part(target)
    assert file.starts[190] - part.position < 70_000
    assert byte_of_offset(file.files, part, target) == file.starts[190]


def test_the_file_is_closed_whatever_happens() -> None:
    """Neither a result nor damage leaves a file open."""
    file = OneFile([50] * 6)
    closed: list[Path] = []

    class Watching(FaultyFiles):
        def open(self, path: Path, *, write: bool = False):  # type: ignore[no-untyped-def]  # wraps what it gets
            opened = file.files.open(path, write=write)
            close = opened.close

            def noted() -> None:
                closed.append(path)
                close()

            opened.close = noted  # type: ignore[method-assign]
            return opened

    byte_of_offset(Watching(), file.part(), FIRST + 3)
    file.damage(20)
    with pytest.raises(CorruptionError):
        byte_of_offset(Watching(), file.part(), FIRST + 3)
    assert len(closed) == 2
    assert scan(file.files.read(DIRECTORY / NAME), 0, FIRST).frames.count == 0
