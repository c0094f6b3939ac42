"""Finding, scanning, placing and splitting over resident pages: kernel and twin agree, also on hostile trees."""

from __future__ import annotations

import random

import pytest
from tests.engine.tree_workbench import RecordedTree, both

from tidelog.engine.btree import page
from tidelog.engine.btree import page as updates
from tidelog.engine.btree.page import MISSING, NEEDS_IMAGE, NO_ROOM, ROOT, new_page
from tidelog.errors import DataError


def grown(count: int, value_bytes: int = 60, seed: int = 1) -> RecordedTree:
    """A tree with so many cells in random order."""
    recorded = RecordedTree()
    numbers = list(range(count))
    random.Random(seed).shuffle(numbers)
    for number in numbers:
        recorded.insert(b"key-%05d" % number, bytes(value_bytes))
    recorded.tree.settle()
    return recorded


@pytest.fixture(scope="module")
def pages() -> dict[int, bytearray]:
    """The pages of a tree of three levels."""
    return grown(3000, value_bytes=1900).pool.pages


def test_the_first_cell_at_or_behind_a_key_is_found(pages: dict[int, bytearray]) -> None:
    """Also when it is in the leaf to the right, and nothing behind the last."""
    for number in range(0, 3000, 97):
        assert both("find", pages, ROOT, b"key-%05d" % number)[1][0] == b"key-%05d" % number
        assert both("find", pages, ROOT, b"key-%05d!" % number)[1][0] == b"key-%05d" % (number + 1)
    assert both("find", pages, ROOT, b"l") == ("returned", None)
    assert both("find", pages, ROOT, b"")[1][0] == b"key-00000"


def test_a_page_that_is_not_in_memory_is_named(pages: dict[int, bytearray]) -> None:
    """Each step of a descent says what it misses, and the caller comes again."""
    resident = {ROOT: pages[ROOT]}
    assert both("find", {}, ROOT, b"key") == ("returned", ROOT)
    asked = []
    while isinstance(found := both("find", resident, ROOT, b"key-01234")[1], int):
        asked.append(found)
        resident[found] = pages[found]
    assert len(asked) == 2
    assert found[0] == b"key-01234"


def test_a_scan_goes_on_from_where_it_stopped(pages: dict[int, bytearray]) -> None:
    """In steps of any size all cells come once, in order, up to the stop."""
    for limit in (5, 10_000):
        resume: bytes | None = b"key-00500"
        keys: list[bytes] = []
        while resume is not None:
            cells, resume = both("scan_tree", pages, ROOT, resume, b"key-00600", limit)[1]
            keys += [key for key, _ in cells]
        assert keys == [b"key-%05d" % number for number in range(500, 600)]
    assert both("scan_tree", pages, ROOT, b"", None, 0)[1] is ValueError


def test_a_scan_gives_what_it_has_before_a_missing_page(pages: dict[int, bytearray]) -> None:
    """Nothing is lost and nothing comes twice when a leaf in the middle is not in memory."""
    cells, _ = both("scan_tree", pages, ROOT, b"key-01000", None, 100)[1]
    leaf = both("place", pages, ROOT, cells[50][0], 0, 0)[1]
    resident = {page_id: content for page_id, content in pages.items() if page_id != leaf}
    first, resume = both("scan_tree", resident, ROOT, b"key-01000", None, 100)[1]
    assert 0 < len(first) <= 50
    assert both("scan_tree", resident, ROOT, resume, None, 100) == ("returned", leaf)
    assert both("scan_tree", pages, ROOT, resume, None, 1)[1][0] == [cells[len(first)]]


def test_place_says_what_is_to_be_done_first(pages: dict[int, bytearray]) -> None:
    """A missing page, no room, or an image that is due; else the leaf."""
    leaf = both("place", pages, ROOT, b"key-00100", 10, 0)[1]
    assert isinstance(leaf, int)
    assert both("place", pages, ROOT, b"key-00100", 8000, 0)[1][0] == NO_ROOM
    assert both("place", pages, ROOT, b"key-00100", 8000, 0)[1][1][-1] == leaf
    assert both("place", pages, ROOT, b"key-00100", 0, 1 << 60) == ("returned", (NEEDS_IMAGE, leaf))
    resident = {page_id: content for page_id, content in pages.items() if page_id != leaf}
    assert both("place", resident, ROOT, b"key-00100", 0, 0) == ("returned", (MISSING, leaf))


def test_a_split_in_the_middle_halves_the_bytes(pages: dict[int, bytearray]) -> None:
    """Both sides are about as large, and the key that divides is as short as it can be."""
    made = new_page(ROOT, 0)
    for number in range(100):
        page.insert(made, b"k%02d-with-a-tail" % number, bytes(10 if number < 50 else 100), 1)
    planned, fresh = both("plan_split", {ROOT: made}, (ROOT,), b"k00", 2)[1]
    left, right, top = updates.decode(planned)
    assert fresh == 2
    restored = new_page(ROOT, 0)
    free = []
    for half in (left, right):
        page.set_image(restored, half.value)
        free.append(page.free_bytes(restored))
    assert abs(free[0] - free[1]) < 250
    page.set_image(restored, top.value)
    divider = page.cells(restored)[1][0]
    assert len(divider) == 3


def test_a_split_behind_the_last_cell_moves_nothing() -> None:
    """Whoever inserts in order leaves full pages behind."""
    recorded = RecordedTree()
    for number in range(5000):
        recorded.insert(b"%08d" % number, bytes(30))
    report = recorded.tree.check()
    assert report.pages < 5000 * 44 / 8152 * 1.05 + 2


def test_inserting_in_order_in_the_middle_of_others_leaves_full_pages() -> None:
    """It is the order that counts, not the end of the tree."""
    recorded = RecordedTree()
    for prefix in (b"a", b"z"):
        recorded.insert(prefix, b"")
    for number in range(5000):
        recorded.insert(b"m%08d" % number, bytes(29))
    assert recorded.tree.check().pages < 5000 * 44 / 8152 * 1.1 + 2


def test_siblings_in_a_circle_are_found() -> None:
    """A reader does not walk for ever."""
    root = new_page(ROOT, 1)
    page.insert(root, b"", (2).to_bytes(4, "little"), 1)
    first, second = new_page(2, 0), new_page(3, 0)
    page.set_header(first, 3, 1)
    page.set_header(second, 2, 1)
    circle = {1: root, 2: first, 3: second}
    assert both("find", circle, ROOT, b"k")[1] is DataError
    assert both("scan_tree", circle, ROOT, b"k", None, 9)[1] is DataError


def test_a_child_of_the_wrong_level_is_found() -> None:
    """A page that names itself or its parent ends the descent."""
    root = new_page(ROOT, 1)
    page.insert(root, b"", (1).to_bytes(4, "little"), 1)
    assert both("find", {1: root}, ROOT, b"k")[2] == "page 1: it is not the page 1 that another one names"


@pytest.mark.parametrize("seed", range(30))
def test_hostile_trees_never_get_through(seed: int, pages: dict[int, bytearray]) -> None:
    """Whatever pages say, kernel and twin give the same answer or the same error, and change the same bytes."""
    source = random.Random(seed)
    some = source.sample(sorted(pages), 12)
    hostile = {page_id: bytearray(pages[page_id]) for page_id in {ROOT, *some}}
    root = hostile[ROOT]
    for index, (key, _) in enumerate(page.cells(root)[: len(some)]):
        page.replace(root, key, some[index].to_bytes(4, "little"), 1 << 40)
    for _ in range(source.randrange(1, 20)):
        target = hostile[source.choice(sorted(hostile))]
        at = source.choice([7, 12, 13, 24, 26, 27, 28, source.randrange(40, 100), source.randrange(8192)])
        target[at] = source.choice([0, 1, 2, source.randrange(256)])
    for _ in range(25):
        key = b"key-%05d" % source.randrange(3100)
        both("find", hostile, ROOT, key)
        both("skip", hostile, ROOT, key)
        both("scan_tree", hostile, ROOT, key, source.choice([None, b"key-02"]), source.choice([1, 50]))
        placed = both("place", hostile, ROOT, key, source.choice([0, 90, 2000, 8000]), source.choice([0, 99999999]))
        if placed[0] == "returned" and isinstance(placed[1], tuple) and placed[1][0] == NO_ROOM:
            both("plan_split", hostile, placed[1][1], key, 1000)
        both("plan_split", hostile, (ROOT, source.choice(some)), key, 1000)


def test_a_leaf_with_nothing_is_skipped_by_key() -> None:
    """From key to key all leaves are visited, and the last one has none behind it."""
    pages = grown(120, value_bytes=1900).pool.pages
    emptied = {page_id: bytearray(content) for page_id, content in pages.items()}
    leaves = [page_id for page_id, content in emptied.items() if content[7] == 0]
    for leaf in leaves:
        for key, _ in page.cells(emptied[leaf]):
            page.remove(emptied[leaf], key, 1 << 40)
    key, fences = b"", []
    while (fence := both("skip", emptied, ROOT, key)[1]) is not None:
        assert fence > key
        fences.append(key := fence)
    assert len(fences) == len(leaves) - 1
    assert both("skip", pages, ROOT, b"key-00100") == ("returned", None)
    assert both("skip", {}, ROOT, b"key") == ("returned", ROOT)
