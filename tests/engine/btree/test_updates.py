"""Page updates: their bytes, doing them again at any point, and that kernel and twin agree on anything."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.campaign import examples
from tests.engine.tree_workbench import STRUCTURE_HEADER, RecordedTree, both

from tidelog.engine.btree import page
from tidelog.engine.btree import page as updates
from tidelog.engine.btree.page import IMAGE, INSERT, REMOVE, REPLACE, SPLIT, TRUNCATE, Update, decode, encode, new_page
from tidelog.errors import DataError
from tidelog.log.frame import Frames, encode_many

UPDATES = st.builds(
    Update,
    page=st.integers(0, (1 << 32) - 1),
    what=st.sampled_from([INSERT, REPLACE, REMOVE, IMAGE, TRUNCATE, SPLIT]),
    key=st.binary(max_size=40),
    value=st.binary(max_size=40),
    old=st.binary(max_size=40),
)


@given(st.lists(UPDATES, max_size=12))
@settings(max_examples=examples(60), deadline=None)
def test_updates_come_back_as_they_were(given_updates: list[Update]) -> None:
    """Decoding gives what was encoded."""
    data = b"".join(encode(update) for update in given_updates)
    assert decode(data) == given_updates
    assert both("decode_updates", data, 3) == ("returned", [tuple(update) for update in given_updates])


def test_the_short_ways_give_the_same_bytes() -> None:
    """An INSERT and an IMAGE have encoders of their own."""
    assert updates.encode_insert(4, b"k", b"v") == encode(Update(4, INSERT, b"k", b"v"))
    assert updates.encode_image(4, b"image") == encode(Update(4, IMAGE, b"", b"image"))


def test_the_bytes_of_an_update_are_those_of_the_formats_page() -> None:
    """The page draws one to the letter."""
    text = (Path(__file__).resolve().parents[3] / "docs" / "formats.md").read_text("utf-8")
    block = text.split("```hex engine update\n")[1].split("```")[0]
    drawn = b"".join(bytes.fromhex(line.split("  ")[0]) for line in block.splitlines())
    assert encode(Update(7, INSERT, b"key", b"value")) == drawn


@given(st.binary(max_size=80))
@settings(max_examples=examples(80), deadline=None)
def test_hostile_updates_never_get_through(data: bytes) -> None:
    """Any bytes are updates or an error that names the record."""
    result = both("decode_updates", data, 77)
    if result[0] == "raised":
        assert result[1] is DataError
        assert "record 77" in result[2]
    both("redo", {1: new_page(1, 0)}, data, 77)


def test_an_update_is_done_once() -> None:
    """A page that has a record's LSN is left alone: redo may be repeated."""
    pages = {3: new_page(3, 0)}
    insert = encode(Update(3, INSERT, b"k", b"v"))
    assert both("redo", pages, insert, 5) == ("returned", -1)
    assert both("redo", pages, insert, 5) == ("returned", -1)
    assert both("redo", pages, insert, 4) == ("returned", -1)
    assert page.cells(pages[3]) == [(b"k", b"v")]
    assert page.lsn_of(pages[3]) == 5


def test_all_updates_of_a_record_are_done_on_a_page() -> None:
    """The LSN rises after the last of them, and each page is judged by itself."""
    pages = {3: new_page(3, 0), 4: new_page(4, 0)}
    page.insert(pages[4], b"x", b"old", 9)
    data = b"".join(
        encode(update)
        for update in (
            Update(3, INSERT, b"k", b"1"),
            Update(4, REPLACE, b"x", b"new", b"old"),
            Update(3, REPLACE, b"k", b"22", b"1"),
            Update(3, INSERT, b"m", b"3"),
            Update(3, TRUNCATE, b"l", struct.pack("<I", 4)),
        )
    )
    assert both("redo", pages, data, 9) == ("returned", -1)
    assert page.cells(pages[3]) == [(b"k", b"22")]
    assert page.right_of(pages[3]) == 4
    assert page.cells(pages[4]) == [(b"x", b"old")]


def test_nothing_is_done_while_a_page_is_missing() -> None:
    """The caller loads it and makes the same call again."""
    pages = {3: new_page(3, 0)}
    data = encode(Update(3, INSERT, b"k", b"1")) + encode(Update(4, INSERT, b"k", b"1"))
    assert both("redo", pages, data, 9) == ("returned", 4)
    assert page.cells(pages[3]) == []


@pytest.mark.parametrize(
    ("update", "reason"),
    [
        (Update(3, INSERT, b"there", b""), "the key to insert is already there"),
        (Update(3, REPLACE, b"k", b""), "the key to replace is not there"),
        (Update(3, REMOVE, b"k"), "the key to remove is not there"),
        (Update(3, IMAGE, b"", b"short"), "its image is damaged"),
        (Update(3, TRUNCATE, b"", b"abc"), "a right sibling is a number of 4 bytes"),
        (Update(3, SPLIT, b"t", struct.pack("<I", 3)), "the page that it was split from is not as it was then"),
        (Update(3, SPLIT, b"t", b"abc"), "the page that it was split from is not as it was then"),
        (Update(3, INSERT, b"k", bytes(9000)), "no room for a cell of 9005 bytes"),
    ],
)
def test_an_update_that_cannot_be_is_damage(update: Update, reason: str) -> None:
    """It is refused by name."""
    pages = {3: new_page(3, 0)}
    page.insert(pages[3], b"there", b"", 1)
    assert both("redo", pages, encode(update), 5) == ("raised", DataError, f"page 3: {reason}")


def split_of(source: int, fresh: int, divider: bytes) -> bytes:
    """What a record of a split has for the two."""
    split = Update(fresh, SPLIT, divider, struct.pack("<I", source))
    return encode(split) + encode(Update(source, TRUNCATE, divider, struct.pack("<I", fresh)))


@pytest.mark.parametrize("level", [0, 1])
def test_a_split_takes_the_cells_from_the_other_page(level: int) -> None:
    """What is behind the divider is in the new page, whatever that was, with the neighbour that the old one had."""
    pages = {3: new_page(3, level), 4: new_page(9, 5)}
    for number in range(8):
        page.insert(pages[3], b"k%d" % number, struct.pack("<I", number), 1)
    page.set_header(pages[3], 7, 1)
    assert both("redo", pages, split_of(3, 4, b"k5"), 9) == ("returned", -1)
    moved = [(b"k%d" % number, struct.pack("<I", number)) for number in range(8)]
    assert page.cells(pages[3]) == moved[:5]
    assert page.cells(pages[4]) == [(b"" if level else b"k5", moved[5][1]), *moved[6:]]
    assert [page.right_of(pages[each]) for each in (3, 4)] == [4, 7]
    assert [page.lsn_of(pages[each]) for each in (3, 4)] == [9, 9]
    assert page.check_page(pages[4], 4) is None


def test_a_split_of_a_page_that_went_on_is_refused() -> None:
    """Redo that begins where the images are not meets no such page; its cells would be lost without a word."""
    pages = {3: new_page(3, 0), 4: new_page(4, 0)}
    page.insert(pages[3], b"k", b"", 12)
    found = both("redo", pages, split_of(3, 4, b"j"), 9)
    assert found == ("raised", DataError, "page 4: the page that it was split from is not as it was then")


def test_the_image_of_another_page_is_refused() -> None:
    """An image says which page it is."""
    image = page.compact_image(new_page(8, 0))
    result = both("redo", {3: new_page(3, 0)}, encode(Update(3, IMAGE, b"", image)), 5)
    assert result == ("raised", DataError, "page 3: its image is damaged")


def redo_both(pages: dict[int, bytearray], rec_lsns: dict[int, int], frames: Frames, start: int) -> tuple[Any, ...]:
    """The outcome of redo over frames, the same by kernel and twin."""
    places = (frames.buffer, frames.positions, frames.lengths)
    return both("redo_frames", pages, rec_lsns, frames.first_offset, *places, start)


def test_redo_of_frames_stops_at_what_it_misses() -> None:
    """It says which page, and whether an empty one will do; what was done is not done again."""
    recorded = RecordedTree()
    for number in range(300):
        recorded.insert(b"%04d" % (number * 7919 % 300), bytes(60))
    frames, rec_lsns = recorded.frames(), dict[int, int]()
    pages: dict[int, bytearray] = {}
    missing: int
    assert redo_both(pages, rec_lsns, frames, 0) == ("returned", (0, 1, False))
    index = 0
    while True:
        index, missing, must_be_read = redo_both(pages, rec_lsns, frames, index)[1]
        if missing < 0:
            break
        assert not must_be_read
        pages[missing] = new_page(missing, 0)
    assert index == frames.count
    assert {number: page.cells(each) for number, each in pages.items()} == {
        number: page.cells(each) for number, each in recorded.pool.pages.items()
    }
    assert rec_lsns == recorded.pool.dirty_pages()
    del pages[2]
    assert redo_both(pages, rec_lsns, frames, frames.count - 1)[0] == "returned"


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (b"short", "a record of 5 bytes has no header, LSN 41"),
        (b"\1short", "a record of 6 bytes is no operation, LSN 41"),
        (b"\1" + bytes(18) + b"\2", "the lengths in an operation do not add up, LSN 41"),
        (bytes(32), "a record of 32 bytes has its page updates at 0, LSN 41"),
        (bytes(4) + struct.pack("<I", 41) + bytes(32), "a record of 40 bytes has its page updates at 41, LSN 41"),
        (STRUCTURE_HEADER + b"x", "record 41: a page update is cut short"),
        (STRUCTURE_HEADER + bytes(11), "record 41: a page update of an unknown kind 0"),
        (STRUCTURE_HEADER + struct.pack("<IBHHH", 3, 6, 0, 0, 0), "record 41: a page update of an unknown kind 6"),
    ],
)
def test_a_damaged_record_is_named_by_its_lsn(record: bytes, reason: str) -> None:
    """Redo says which record it could not read."""
    result = redo_both({}, {}, encode_many(40, [STRUCTURE_HEADER, record]), 0)
    assert result == ("raised", DataError, reason)


@pytest.mark.parametrize("seed", range(20))
def test_hostile_records_never_get_through(seed: int) -> None:
    """Scribbled records over scribbled pages: the same answer, the same bytes."""
    source = random.Random(seed)
    recorded = RecordedTree()
    for _ in range(200):
        recorded.insert(source.randbytes(12), source.randbytes(80))
    records = [bytearray(record) for record in recorded.records]
    for _ in range(10):
        record = source.choice(records)
        record[source.randrange(4, len(record))] = source.randrange(256)
    pages = {number: new_page(number, 0) for number in recorded.pool.pages}
    pages[source.choice(sorted(pages))][source.randrange(24, 60)] ^= 0xFF
    index = 0
    for _ in range(30):
        result = redo_both(pages, {}, encode_many(1, [bytes(record) for record in records]), index)
        index = result[1][0] + 1 if result[0] == "returned" else index + 1


def test_what_an_update_did_can_be_taken_back() -> None:
    """The reverse of INSERT, REPLACE and REMOVE; an image has none."""
    assert updates.reverse_of(Update(3, INSERT, b"k", b"v")) == Update(3, REMOVE, b"k", b"", b"v")
    assert updates.reverse_of(Update(3, REPLACE, b"k", b"v", b"o")) == Update(3, REPLACE, b"k", b"o", b"v")
    assert updates.reverse_of(Update(3, REMOVE, b"k", b"", b"o")) == Update(3, INSERT, b"k", b"o")
    with pytest.raises(DataError, match="page 3: an update of kind 4 cannot be undone"):
        updates.reverse_of(Update(3, IMAGE, b"", b"image"))
