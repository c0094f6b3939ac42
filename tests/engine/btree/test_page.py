"""Pages: cells in and out, images, checks, and that the C kernel and its pure-Python twin always agree."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.campaign import examples
from tests.engine.tree_workbench import both
from tests.oracles.pages import id_of

from tidelog.engine.btree import page
from tidelog.engine.btree.page import PAGE_BYTES, new_page
from tidelog.engine.sst.block import pack_rows
from tidelog.errors import DataError

KEYS = st.one_of(st.binary(max_size=3), st.binary(max_size=40), st.binary(min_size=1000, max_size=1290))
VALUES = st.one_of(st.binary(max_size=8), st.binary(min_size=200, max_size=700))
CHANGES = st.tuples(st.sampled_from(["insert", "replace", "remove"]), KEYS, VALUES)


def filled(count: int, page_id: int = 5) -> bytearray:
    """A leaf with so many cells."""
    made = new_page(page_id, 0)
    for number in range(count):
        page.insert(made, b"key-%04d" % number, b"value-%d" % number, number + 1)
    return made


def change(target: bytearray, name: str, key: bytes, value: bytes, lsn: int) -> tuple[Any, ...]:
    """One change, by kernel and twin alike."""
    return both(name, target, key, lsn) if name == "remove" else both(name, target, key, value, lsn)


@given(st.lists(CHANGES, max_size=60), st.integers(0, 3))
@settings(max_examples=examples(60), deadline=None)
def test_a_page_is_a_sorted_dict_that_can_be_full(changes: list[tuple[str, bytes, bytes]], few: int) -> None:
    """Kernel and twin do what a dict does, refuse what it would not have, and leave a sound page."""
    target, model = new_page(7, 0), dict[bytes, bytes]()
    for lsn, (name, drawn, value) in enumerate(changes, 1):
        key = drawn[:few] if few else drawn  # short keys meet each other
        result = change(target, name, key, value, lsn)
        if result[0] == "returned":
            assert (key in model) == (name != "insert")
            model.pop(key) if name == "remove" else model.update({key: value})
            assert page.lsn_of(target) == lsn
        else:
            assert result[1] is DataError
            assert (key in model) == (name == "insert") or "no room" in result[2]
        assert page.cells(target) == sorted(model.items())
        assert both("check_page", target, 7) == ("returned", None)
    assert both("cells", target) == ("returned", sorted(model.items()))
    packed = b"".join(block.raw for block in pack_rows(sorted(model.items())))
    assert both("page_rows", target) == ("returned", (len(model), packed))


def test_cells_are_found_by_key() -> None:
    """What was inserted is there, and nothing else."""
    made = filled(50)
    assert both("get", made, b"key-0007") == ("returned", b"value-7")
    assert both("get", made, b"key-00070") == ("returned", None)


def test_a_page_takes_back_dead_bytes_before_it_is_full() -> None:
    """Room that removed and shortened cells leave is used again."""
    made = new_page(3, 0)
    for number in range(4):
        page.insert(made, b"%d" % number, bytes(1990), 1)
    assert change(made, "insert", b"9", bytes(1990), 2)[0] == "raised"
    change(made, "replace", b"1", b"short", 3)
    change(made, "remove", b"2", b"", 4)
    assert change(made, "insert", b"9", bytes(3900), 5) == ("returned", None)
    assert both("check_page", made, 3) == ("returned", None)


def test_a_longer_value_moves_its_cell() -> None:
    """A replaced value may grow into the room of its old cell."""
    made = new_page(3, 0)
    page.insert(made, b"a", bytes(4000), 1)
    page.insert(made, b"b", bytes(1000), 1)
    assert change(made, "replace", b"a", b"x" * 7000, 2) == ("returned", None)
    assert page.get(made, b"a") == b"x" * 7000
    assert change(made, "replace", b"b", bytes(1500), 3)[2] == "page 3: no room for a cell of 1505 bytes"


def test_a_change_never_comes_behind_a_later_one() -> None:
    """A smaller LSN than the page's is refused: records are done in their order."""
    made = filled(3)
    assert change(made, "insert", b"x", b"", 2)[2] == "page 5: a change of record 2 comes behind one of record 3"


def test_an_image_is_the_page_without_its_free_middle() -> None:
    """It has the cells and not the dead bytes, and makes the same page again."""
    made = filled(100)
    for number in range(0, 100, 3):
        page.remove(made, b"key-%04d" % number, 200)
    outcome, image = both("compact_image", made)
    assert outcome == "returned"
    assert len(image) < PAGE_BYTES // 2
    other = new_page(9, 0)
    assert both("set_image", other, image) == ("returned", None)
    assert page.cells(other) == page.cells(made)
    assert (id_of(other), page.lsn_of(other)) == (5, 0)


def test_a_sealed_page_shows_every_changed_bit() -> None:
    """Any byte but the one that is in memory only makes the checksum wrong."""
    made = filled(60)
    made[38] = 1
    _, image = both("sealed", made)
    assert both("verify_crc", image) == ("returned", True)
    for at in [0, 3, 4, 7, 16, 39, 40, 5000, 8191]:
        damaged = bytearray(image)
        damaged[at] ^= 0x10
        assert both("verify_crc", damaged) == ("returned", False)


def test_a_sealed_page_has_nothing_of_what_was_removed_from_its_end() -> None:
    """Free bytes are zero in the file."""
    made = new_page(4, 0)
    page.insert(made, b"k", b"secret" * 9, 1)
    image = page.compact_image(made)
    page.remove(made, b"k", 2)
    page.set_image(made, page.compact_image(made))
    assert b"secret" in image
    assert b"secret" not in page.sealed(made)


@pytest.mark.parametrize(
    ("at", "content", "fault"),
    [
        (4, b"\0", "its header is damaged"),
        (6, b"\2", "its header is damaged"),
        (7, b"\x10", "its level is 16"),
        (7, b"\1", "cell 0 of an inner page names no child"),
        (8, b"\6", "it says that it is page 6"),
        (24, b"\xff\xff", "its header is damaged"),
        (24, b"\2\0", "its heap is miscounted"),
        (26, b"\x01\x20", "its header is damaged"),
        (28, b"\1\0", "its heap is miscounted"),
        (40, b"\0\0", "cell 0 lies outside of the heap"),
        (40, b"\xff\x1f", "cell 0 lies outside of the heap"),
    ],
)
def test_a_fault_of_a_page_is_named(at: int, content: bytes, fault: str) -> None:
    """Whoever verifies a file learns what is wrong."""
    made = filled(3)
    made[at : at + len(content)] = content
    assert both("check_page", made, 5) == ("returned", fault)


def test_cells_out_of_order_or_over_each_other_are_named() -> None:
    """Slots that were changed by somebody else are found."""
    made = filled(3)
    made[40:42], made[42:44] = made[42:44], made[40:42]
    assert both("check_page", made, 5) == ("returned", "cell 1 is out of order")
    other = new_page(5, 0)
    page.insert(other, b"a", b"\1\0\0\0b", 1)
    page.insert(other, b"c", b"", 1)
    other[42:44] = (8192 - 5).to_bytes(2, "little")
    assert both("check_page", other, 5) == ("returned", "cell 1 overlaps another")


def test_something_that_is_no_page_is_refused() -> None:
    """Wrong types and sizes never reach the loops."""
    for wrong in (bytearray(8191), bytearray(), b"x" * 8191):
        for name in ("cells", "page_rows", "sealed", "compact_image", "verify_crc"):
            assert both(name, wrong)[1] is ValueError
    assert both("insert", bytes(8192), b"k", b"v", 1)[1] is ValueError
    with pytest.raises(ValueError, match="bytearray"):
        page.format_page(None, 1, 0)  # type: ignore[arg-type]


def scribbled(source: random.Random) -> bytearray:
    """A page that was hit somewhere, or never was one."""
    if source.random() < 0.1:
        return bytearray(source.randbytes(PAGE_BYTES))
    made = filled(source.randrange(120))
    if source.random() < 0.5:
        made[7] = source.randrange(3)
    for _ in range(source.randrange(1, 8)):
        at = source.choice([source.randrange(24, 30), source.randrange(40, 300), source.randrange(PAGE_BYTES)])
        made[at] = source.randrange(256)
    return made


@pytest.mark.parametrize("seed", range(40))
def test_hostile_pages_never_get_through(seed: int) -> None:
    """Whatever is in a page, kernel and twin give the same answer or the same error, and change the same bytes."""
    source = random.Random(seed)
    for _ in range(10):
        made = scribbled(source)
        key = b"key-%04d" % source.randrange(130)
        both("check_page", made, 5)
        both("cells", made)
        both("page_rows", made)
        both("get", made, key)
        both("compact_image", made)
        both("sealed", made)
        for lsn in range(1 << 40, (1 << 40) + 6):
            name = source.choice(["insert", "replace", "remove"])
            change(made, name, b"key-%04d" % source.randrange(130), source.randbytes(source.choice([3, 2000])), lsn)


@pytest.mark.parametrize("seed", range(10))
def test_hostile_images_never_get_through(seed: int) -> None:
    """An image that is not sound is refused, and the page stays what it was."""
    source = random.Random(seed)
    for _ in range(20):
        image = bytearray(page.compact_image(filled(source.randrange(100))))
        for _ in range(source.randrange(4)):
            image[source.randrange(len(image))] = source.randrange(256)
        cut = bytes(image[: source.choice([len(image), source.randrange(len(image))])])
        target = filled(10)
        before = bytes(target)
        if both("set_image", target, cut)[0] == "raised":
            assert target == before
        else:
            assert page.check_page(target, id_of(target)) is None


def test_put_back_restores_all_pages_at_once() -> None:
    """Pages that had a copy are what they were, new ones are gone, and bad arguments change nothing."""
    pages = {1: filled(3, 1), 2: filled(9, 2)}
    before = bytes(pages[1])
    page.insert(pages[1], b"new", b"", 50)
    assert both("put_back", pages, [(1, before), (2, None), (3, None)]) == ("returned", None)
    assert pages == {1: before}
    with pytest.raises(TypeError):
        page.put_back(pages, [(2, None), (1, b"short")])
    assert pages == {1: before}
