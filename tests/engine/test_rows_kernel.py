"""Rows without an object for each: the kernel gives the answers of its twin, and those of plain Python."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.oracles import rows as rows_oracle
from tests.twins import agreed

from tidelog import _native
from tidelog.engine.btree.buffer_pool import BufferPool
from tidelog.engine.btree.page import PAGE_BYTES, cells, new_page
from tidelog.engine.btree.page_file import PageFile
from tidelog.engine.btree.tree import Tree
from tidelog.engine.recovery.sorted_runs import REMOVED, Changes, Runs
from tidelog.engine.sst.blob_file import BlobPointer, encode_version
from tidelog.engine.sst.block import Row
from tidelog.errors import DataError, InputError
from tidelog.testing import FaultyFiles

kernel = _native

KEYS = st.binary(min_size=1, max_size=6)
ROWS = st.dictionaries(KEYS, st.binary(max_size=20), min_size=1, max_size=30).map(lambda rows: sorted(rows.items()))
PLACE = BlobPointer(0, 1, 2, 3)


def raw_of(rows: list[Row]) -> bytes:
    """Rows as they are in a block."""
    return b"".join(struct.pack("<HH", len(key), len(value)) + key + value for key, value in rows)


def rows_of(raw: bytes) -> list[Row]:
    """And back."""
    found, at = [], 0
    while at < len(raw):
        key, value, at = rows_oracle.row_at(raw, at, False)
        found.append((key, value))
    return found


@given(ROWS, KEYS, st.integers(-1, 1), st.booleans())
def test_rows_are_checked_as_the_twin_does(rows: list[Row], after: bytes, more: int, has_places: bool) -> None:
    """Their number, their order, and whether they have cells."""
    values = [(key, encode_version(value or b"c", PLACE) if has_places else value) for key, value in rows]
    raw = raw_of(values)
    good = agreed(kernel, rows_oracle, "check_rows", raw, len(rows), b"", has_places)
    assert good == ("returned", rows[-1][0])
    for wanted in ((len(rows) + more, after, has_places), (len(rows), b"", not has_places)):
        agreed(kernel, rows_oracle, "check_rows", raw, *wanted)
    for size in range(0, len(raw), 3):
        agreed(kernel, rows_oracle, "check_rows", raw[:size], len(rows), b"", has_places)


@given(st.binary(max_size=80), st.integers(0, 9), st.booleans())
def test_any_bytes_are_checked_as_the_twin_does(raw: bytes, count: int, has_places: bool) -> None:
    """They are no rows, nearly always."""
    agreed(kernel, rows_oracle, "check_rows", raw, count, b"", has_places)
    if raw:
        agreed(kernel, rows_oracle, "merge_rows", ((raw, 0, has_places),), True)
        agreed(kernel, rows_oracle, "merge_rows", ((raw, 0, has_places), (raw, len(raw) // 2, False)), False)


@given(ROWS, KEYS)
def test_a_row_is_found_as_the_twin_does(rows: list[Row], key: bytes) -> None:
    """The first that is not before the key; what is cut short on the way is noticed."""
    raw = raw_of(rows)
    found = agreed(kernel, rows_oracle, "find_row", raw, key)
    assert found == ("returned", next((row for row in rows if row[0] >= key), None))
    for size in range(len(raw)):
        agreed(kernel, rows_oracle, "find_row", raw[:size], key)


@given(st.lists(st.tuples(ROWS, st.booleans()), min_size=1, max_size=4), st.booleans())
def test_blocks_are_merged_as_the_twin_does(sources: list[tuple[list[Row], bool]], drops_removed: bool) -> None:
    """The first source wins, and it goes as far as the shortest of them."""
    blocks = []
    for rows, has_places in sources:
        values = [(key, encode_version(value or b"c", PLACE) if has_places else value) for key, value in rows]
        blocks.append((raw_of(values), 0, has_places))
    outcome = agreed(kernel, rows_oracle, "merge_rows", tuple(blocks), drops_removed)
    assert outcome[0] == "returned"
    raw, count, places = outcome[1]
    end = min(rows[-1][0] for rows, _ in sources)
    wanted: dict[bytes, bytes] = {}
    for rows, has_places in reversed(sources):
        wanted.update({key: value or (b"c" if has_places else b"") for key, value in rows if key <= end})
    left = sorted((key, value) for key, value in wanted.items() if value or not drops_removed)
    assert (rows_of(raw), count) == (left, len(left))
    assert any(at == len(block[0]) for at, block in zip(places, blocks, strict=True))


@given(ROWS, ROWS, st.integers(0, PAGE_BYTES))
def test_pages_are_filled_as_the_twin_does(first: list[Row], second: list[Row], reserved: int) -> None:
    """Byte by byte the same page, and the same place to go on from."""
    pages = new_page(5, 0), new_page(5, 0)
    for rows in (first, second):
        raw = raw_of([(key, value * 9) for key, value in rows])
        outcomes = []
        for filled, module in zip(pages, (kernel, rows_oracle), strict=True):
            try:
                outcomes.append(module.fill_page(filled, raw, 0, reserved, 7))
            except DataError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]
        assert cells(pages[0]) == cells(pages[1])
        assert not isinstance(outcomes[0], tuple) or pages[0] == pages[1]


def test_what_does_not_go_into_a_page() -> None:
    """A cell that is too large, rows out of order, an older record, a place behind the end."""
    page = new_page(5, 0)
    big, good = raw_of([(b"a", bytes(3000))]), raw_of([(b"b", b"1")])
    agreed(kernel, rows_oracle, "fill_page", page, big, 0, 0, 7)
    for module in (kernel, rows_oracle):
        filled = new_page(5, 0)
        assert module.fill_page(filled, good, 0, 0, 7) == (len(good), 0)
        with pytest.raises(DataError, match="order"):
            module.fill_page(filled, good, 0, 0, 7)
        with pytest.raises(DataError, match="comes behind"):
            module.fill_page(filled, good, 0, 0, 6)
        with pytest.raises(ValueError, match="behind the rows"):
            module.fill_page(filled, good, len(good) + 1, 0, 7)


def test_what_is_no_source() -> None:
    """None at all, one at its end."""
    agreed(kernel, rows_oracle, "merge_rows", (), True)
    agreed(kernel, rows_oracle, "merge_rows", ((b"", 0, False),), True)


@given(st.lists(st.dictionaries(KEYS, st.sampled_from((b"", b"x", b"yy" * 40)), max_size=12), max_size=40))
def test_runs_are_merged_as_a_dictionary_is_updated(runs: list[dict[bytes, bytes]]) -> None:
    """However many there are: what came last counts, and what was removed is gone."""
    files = FaultyFiles()
    files.make_directories(Path("/runs"))
    written, wanted = Runs(files, Path("/runs")), dict[bytes, bytes]()
    changes = Changes(written, 1 << 20)
    for run in runs:
        for key, value in run.items():
            changes.set(key, value or REMOVED)
        changes.flush()
        wanted.update(run)
    left = sorted((key, value) for key, value in wanted.items() if value)
    assert list(written.merged()) == left
    merged = list(written.merged_rows())
    assert sum(part.rows for part in merged) == len(left)


def loaded(rows: list[Row], by: str) -> list[bytes]:
    """The pages of a tree with these rows, loaded one by one or as blocks."""
    files = FaultyFiles()
    file = PageFile.create(files, Path("/pages"))
    pool = BufferPool(file, 64 << 20)
    tree = Tree(pool, lambda _: 0)
    if by == "cells":
        tree.bulk_load(rows, 9)
    else:
        tree.bulk_load_rows((raw_of(rows[at : at + 1000]) for at in range(0, len(rows), 1000)), 9)
    assert tree.check().cells == len(rows)
    pool.flush(pool.dirty_pages())
    return [bytes(file.read_page(page)) for page in range(1, tree.next_page)]


def test_a_tree_from_blocks_is_that_from_cells() -> None:
    """Page by page, byte by byte; an empty one too."""
    rows = [(b"key-%07d" % number, b"v" * (number % 300 + 1)) for number in range(20_000)]
    for count in (0, 1, 50, 20_000):
        assert loaded(rows[:count], "cells") == loaded(rows[:count], "blocks")


def test_blocks_out_of_order_are_not_loaded() -> None:
    """Whether the page has room or not."""
    pool = BufferPool(PageFile.create(FaultyFiles(), Path("/pages")), 1 << 20)
    full = raw_of([(b"k%04d" % number, bytes(1000)) for number in range(8)])
    with pytest.raises((InputError, DataError), match="order"):
        Tree(pool, lambda _: 0).bulk_load_rows((full, full), 9)
