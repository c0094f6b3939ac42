"""The values of rows of a scan, as the kernel and its oracle find, group and take them."""

from __future__ import annotations

import random
import zlib
from array import array
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.campaign import examples
from tests.oracles import ranges as range_oracle
from tests.oracles import scan_values as oracle
from tests.twins import agreed, outcome

from tidelog import _native
from tidelog.engine.mvcc.cells import at, encode_inline, encode_pointer, encode_tombstone
from tidelog.engine.sst.blob_file import BlobPointer, FilePointer, encode_version
from tidelog.engine.sst.block import pack_rows
from tidelog.engine.wal.scan_values import Places, Row, ScannedRows, batches_of

kernel: Any = _native
PREFIX = b"ob\0"


def row_of(number: int, chance: random.Random, position: int) -> tuple[Row, bytes]:
    """A row with a key of its own, and the stored value that it speaks of."""
    data = chance.randbytes(chance.choice((0, 3, 100)))
    stored = chance.choice((bytes(4), bytes(4), b"\1\0\0\0\x80")) + data
    crc = zlib.crc32(stored) ^ (chance.random() < 0.1)
    codec = chance.choice((0, 0, 0, 0, 1, 2))
    head = f"k{number:03d}" + "é" * chance.randrange(2), len(data), chance.randrange(1, 900), crc, codec
    if chance.random() < 0.2:
        return (*head, 0, 0, 0, stored), stored
    return (*head, 5, position, len(stored), None), stored


def batch(seed: int) -> tuple[list[Row], list[bytes], random.Random]:
    """Rows in the order of keys, whose values are somewhere in a log."""
    chance = random.Random(seed)
    found = [row_of(number, chance, chance.randrange(3000)) for number in range(chance.randrange(1, 40))]
    return [row for row, _ in found], [stored for _, stored in found], chance


def both(name: str, *arguments: Any) -> tuple[Any, ...]:
    """What a call answers, and what it makes of its arguments: the same in the kernel and in the oracle."""
    given = deepcopy(arguments)
    answer = outcome(getattr(kernel, name), *arguments)
    assert answer == outcome(getattr(oracle, name), *given)
    assert arguments == given
    return answer


def started(rows: list[Row]) -> tuple[list[Any], bytearray]:
    values, _ = both("start_values", rows)[1]
    return values, bytearray(b"\xff" * (oracle.PLACE.size * len(rows)))


def index_blocks(rows: list[Row], chance: random.Random) -> list[bytes]:
    """Blocks of the version index with most of them, and with others."""
    found: dict[bytes, bytes] = {}
    for key, size, seq, crc, codec, lsn, position, stored_bytes, _ in rows:
        moved = position + (chance.random() < 0.1)
        cells = encode_pointer(0, size, crc, codec, lsn, moved, stored_bytes), encode_inline(0, 1, 2, 0, b"x")
        cell = chance.choice((*[cells[0]] * 6, cells[1], encode_tombstone(0)))
        place = chance.choice(
            (*[BlobPointer(chance.randrange(2), chance.randrange(3), chance.randrange(2000), stored_bytes)] * 6, None)
        )
        of_seq = seq + (chance.random() < 0.1)
        found[at(PREFIX + key.encode() + b"\0", of_seq)] = encode_version(cell, place)
        if chance.random() < 0.3:
            name = FilePointer(0, 4, "b/k/1") if chance.random() < 0.5 else None
            found[at(PREFIX + key.encode() + b"~\0", seq)] = encode_version(cells[0], name)
    return [packed.raw for packed in pack_rows(sorted(found.items()), chance.choice((1, 300, 1 << 20)))]


@settings(max_examples=examples(150))
@given(st.integers(0, 2**32))
def test_values_are_placed_grouped_and_taken_as_the_twin_does(seed: int) -> None:
    """In files of the log and in blob files, in both directions, with files that end early, and with damage."""
    rows, _, chance = batch(seed)
    is_reverse = chance.random() < 0.5
    if is_reverse:
        rows.reverse()
    both("cut_rows", rows, chance.randrange(3), chance.randrange(1, 50), chance.randrange(1, 4000))
    values, places = started(rows)
    if chance.random() < 0.7:
        blocks = index_blocks(rows, chance)
        both("place_in_index", rows, values, places, 7, PREFIX, blocks, is_reverse)
    starts = sorted(chance.sample(range(3000), chance.randrange(4)))
    ends = [start + chance.randrange(1500) for start in starts]
    arguments = rows, values, places, chance.randrange(5), array("Q", starts), array("Q", ends)
    both("place_in_log", *arguments, chance.randrange(len(rows)))
    gap, most = chance.choice((0, 50, 1000)), chance.choice((0, 1, 200, 1 << 20))
    if chance.random() < 0.5:
        for _, ranges, indexes in both("join_places", values, places, gap, most)[1]:
            data = chance.randbytes(max(0, sum(array("Q", ranges)[1::2]) - chance.choice((0, 0, 60))))
            both("take_values", rows, values, places, indexes, data, 0)
        both("unfinished", values)
        return
    groups = both("group_places", values, places, gap, max(1, most))[1]
    for _, first, end, indexes in groups:
        data = chance.randbytes(max(0, end - first - chance.choice((0, 0, 60))))
        both("take_values", rows, values, places, indexes, data, first)
    both("unfinished", values)


@settings(max_examples=examples(100))
@given(st.integers(0, 2**32))
def test_values_of_files_come_as_they_were_stored(seed: int) -> None:
    """However they lie, near or far or one upon the other: each row has its own value, also if all come at once."""
    chance = random.Random(seed)
    log = bytearray(chance.randbytes(chance.choice((500, 50_000))))
    wanted: dict[int, bytes] = {}
    rows: list[Row] = []
    for _ in range(chance.randrange(1, 60)):
        stored = bytes(4) + chance.randbytes(chance.randrange(1, 40))
        at_byte = chance.randrange(len(log) - 50)
        log[at_byte : at_byte + len(stored)] = stored
        wanted[at_byte] = stored
    for number, (at_byte, stored) in enumerate(wanted.items()):
        now = bytes(log[at_byte : at_byte + len(stored)])  # one that came later may lie upon it
        rows.append((f"k{number}", len(now) - 4, 1, zlib.crc32(now), 0, 1, 1000 + at_byte, len(now), None))
    middle = 1000 + len(log) // 2
    scanned = ScannedRows(rows, PREFIX, is_reverse=False)
    places = Places(scanned)
    places.in_log(0, [1000, middle], [middle, 1000 + len(log)])
    for one in places.joined(gap_bytes=chance.choice((0, 10, 4096)), most_bytes=chance.choice((1, 300, 1 << 20))):
        begin = (0, middle - 1000)[one.unit]
        pairs = zip(array("Q", one.ranges)[::2], array("Q", one.ranges)[1::2], strict=True)
        read = b"".join(bytes(log[begin + first : begin + first + size]) for first, size in pairs)
        places.take_joined(one, read)
    for (*_, position, stored_bytes, _), value in zip(rows, scanned.values, strict=True):
        stored = bytes(log[position - 1000 : position - 1000 + stored_bytes])
        is_in_both = position < middle < position + stored_bytes
        found = None if value is None else (value[4] if len(value) == 6 else value[0][4:])
        assert found == (None if is_in_both else stored[4:])


def test_a_value_that_is_read_has_the_checksum_of_its_row() -> None:
    """Good bytes become a row with data, metadata and damage go on as they are, a short read is left out."""
    good, other, damaged = b"\0\0\0\0good", b"\1\0\0\0\x80x", b"\0\0\0\0dama"
    data = good + other + damaged
    crcs = zlib.crc32(good), zlib.crc32(other), zlib.crc32(damaged) ^ 1
    sizes, begins = (4, 1, 4), (0, len(good), len(good) + len(other))
    rows: list[Row] = [
        (f"k{n}", sizes[n], n + 1, crcs[n], 0, 5, 100 + begins[n], len((good, other, damaged)[n]), None)
        for n in range(3)
    ]
    scanned = ScannedRows([*rows, ("k3", 9, 9, 0, 0, 5, 100 + len(data), 9, None)], PREFIX, is_reverse=False)
    places = Places(scanned)
    assert places.in_log(0, [100], [1000]) == 4
    (group,) = places.groups(gap_bytes=0, range_bytes=1 << 20)
    assert places.take(group, data) == len(data)
    assert scanned.values == [("k0", 4, 1, crcs[0], b"good", {}), (other, 0), (damaged, 0), None]
    alone: list[str] = []

    def read_alone(row: Row) -> Row:
        alone.append(row[0])
        return *row[:4], b"alone", {}

    assert [row[4] for row in scanned.finished(read_alone)] == [b"good", b"x", b"alone", b"alone"]
    assert alone == ["k2", "k3"]


def test_batches_have_rows_and_bytes_up_to_their_sizes() -> None:
    """Whatever lists the rows come in, each batch is as large as it may be, and no row is lost."""
    sizes = [chance for seed in range(20) for chance in (random.Random(seed).randrange(30), 200)]
    rows: list[Row] = [(f"k{n}", size, n, 0, 0, 5, 0, size, None) for n, size in enumerate(sizes)]
    for list_rows in (1, 3, 7, 40):
        lists = (rows[first : first + list_rows] for first in range(0, len(rows), list_rows))
        found = list(batches_of(lists, iter([(2, 1000)] + [(5, 300)] * 40)))
        assert [row for some in found for row in some] == rows
        assert len(found[0]) == 2
        assert all(len(some) <= 5 and sum(row[1] for row in some[:-1]) < 300 for some in found[1:])
    assert list(batches_of(iter(()), iter([(1, 1)]))) == []


@pytest.mark.parametrize(
    "call",
    [
        lambda: kernel.start_values([("k",)]),
        lambda: kernel.start_values(()),
        lambda: kernel.cut_rows([()], 0, 1, 1),
        lambda: kernel.unfinished(()),
        lambda: kernel.place_in_log([("k",)], [None], bytearray(b"\xff" * 24), 0, b"", b"", 0),
        lambda: kernel.place_in_index([], [], bytearray(), 0, PREFIX, b"", False),
        lambda: kernel.place_in_index([], [], bytearray(), 0, PREFIX, [None], False),
        lambda: kernel.take_values([], [], b"", b"", b"", 0),
    ],
)
def test_what_are_no_rows_is_refused(call: Callable[[], object]) -> None:
    """A mistake of a caller is an exception, not a crash."""
    with pytest.raises((TypeError, BufferError)):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: kernel.take_values([], [], bytearray(), b"\0\0\0\0", b"", 0),
        lambda: kernel.group_places([None], bytearray(23), 0, 0),
        lambda: kernel.join_places([None], bytearray(23), 0, 0),
        lambda: kernel.place_in_log([], [], bytearray(), 0, bytes(8), b"", 0),
        lambda: kernel.place_in_log([], [], bytearray(), 0, bytes(7), bytes(7), 0),
        lambda: kernel.place_in_log([()], [], bytearray(), 0, b"", b"", 0),
    ],
)
def test_arrays_that_do_not_fit_are_refused(call: Callable[[], object]) -> None:
    """Nothing is read or written behind the end of one."""
    with pytest.raises(ValueError, match=r"same count|behind the rows"):
        call()


def test_a_block_that_is_cut_off_ends_where_it_does() -> None:
    """Rows behind the cut are not found; nothing is read behind the end."""
    rows, _, chance = batch(3)
    raw = b"".join(index_blocks(rows, chance))
    for end in range(0, len(raw), 3):
        values, places = started(rows)
        assert outcome(kernel.place_in_index, rows, values, places, 0, PREFIX, [raw[:end]], False)[0] == "returned"


def test_kernel_and_twin_answer_alike_without_rows() -> None:
    """Nothing in, nothing out."""
    assert agreed(kernel, oracle, "start_values", []) == ("returned", ([], 0))
    assert agreed(kernel, oracle, "group_places", [], bytearray(), 0, 0) == ("returned", [])
    assert agreed(kernel, oracle, "join_places", [], bytearray(), 0, 0) == ("returned", [])


@pytest.mark.parametrize("size", [0, 10, 3000, 100_000])
def test_ranges_of_a_file_are_read_as_the_twin_reads_them(tmp_path: Path, size: int) -> None:
    """Some lie behind its end, or upon each other, and some are empty."""
    chance, path = random.Random(size), tmp_path / "file"
    path.write_bytes(chance.randbytes(size))
    with path.open("rb") as file:
        for count in (0, 1, 2, 50):
            numbers = array("Q", (chance.randrange(size + 99) for _ in range(2 * count)))
            position = chance.choice((0, 7, size))
            assert (
                agreed(kernel, range_oracle, "read_ranges", file.fileno(), position, numbers.tobytes())[0] == "returned"
            )


@pytest.mark.parametrize(
    ("position", "ranges", "error"),
    [
        (0, bytes(15), ValueError),
        (0, bytes(8), ValueError),
        (0, array("Q", (1 << 63, 1)), OverflowError),
        (0, array("Q", (0, 1 << 63)), OverflowError),
        (0, array("Q", (0, (1 << 64) - 1, 0, 2)), OverflowError),
        (0, array("Q", (0, (1 << 63) - 1, 0, 1)), OverflowError),
        (1, array("Q", ((1 << 63) - 1, 0)), OverflowError),
        (1, array("Q", (1, (1 << 63) - 2)), OverflowError),
        (1 << 63, array("Q", (0, 1)), OverflowError),
        (-1, b"", OverflowError),
        (1 << 64, b"", OverflowError),
        (0, bytearray(16), TypeError),
    ],
)
def test_ranges_that_no_file_has_are_refused(
    tmp_path: Path, position: int, ranges: bytes | array[int], error: type[Exception]
) -> None:
    """Whatever their count, their ends and their sum are: no memory is taken for them."""
    path = tmp_path / "file"
    path.write_bytes(b"hello")
    with path.open("rb") as file, pytest.raises(error):
        kernel.read_ranges(file.fileno(), position, ranges.tobytes() if isinstance(ranges, array) else ranges)


def test_ranges_of_a_file_that_cannot_be_read_are_an_error(tmp_path: Path) -> None:
    """As of a descriptor that is for writing alone, or of none."""
    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match="Bad file descriptor"):
        kernel.read_ranges(file.fileno(), 0, array("Q", (0, 1)).tobytes())
    with pytest.raises((OSError, ValueError)):
        kernel.read_ranges(-1, 0, b"")
