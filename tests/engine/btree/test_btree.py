"""The B+tree: a sorted dict whose every change is in the log first."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.campaign import examples
from tests.engine.tree_workbench import PATH, STRUCTURE_HEADER, RecordedTree, empty_tree, meanwhile, new_files

from tidelog.engine.btree import page
from tidelog.engine.btree import page as updates
from tidelog.engine.btree.buffer_pool import MIN_PAGES, BufferPool
from tidelog.engine.btree.page import MAX_CELL_BYTES, PAGE_BYTES, ROOT
from tidelog.engine.btree.page_file import PageFile, rebuild_page
from tidelog.engine.btree.tree import Tree
from tidelog.errors import DataError, DiskFullError, InputError
from tidelog.log.frame import encode_many

KEYS = st.one_of(st.binary(max_size=2), st.binary(max_size=30), st.binary(min_size=900, max_size=1290))
VALUES = st.one_of(st.binary(max_size=40), st.binary(min_size=400, max_size=700))
STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "put", "put", "remove", "find", "scan"]), KEYS, VALUES), max_size=120
)


def step(recorded: RecordedTree, model: dict[bytes, bytes], name: str, key: bytes, value: bytes) -> None:
    """One step on a tree and on its model; reads are compared."""
    ordered = sorted(model.items())
    if name == "put":
        recorded.replace(key, value) if key in model else recorded.insert(key, value)
        model[key] = value
    elif name == "remove" and ordered:
        found = next((each for each, _ in ordered if each >= key), ordered[0][0])
        recorded.remove(found)
        del model[found]
    elif name == "find":
        assert recorded.tree.find(key) == next((cell for cell in ordered if cell[0] >= key), None)
        assert recorded.tree.get(key) == model.get(key)
    elif name == "scan":
        stop = key + value
        assert list(recorded.tree.scan(key, stop)) == [cell for cell in ordered if key <= cell[0] < stop]


@given(STEPS, st.sampled_from([1 << 24, MIN_PAGES * PAGE_BYTES]))
@settings(max_examples=examples(80), deadline=None)
def test_a_tree_is_a_sorted_dict(steps: list[tuple[str, bytes, bytes]], size_bytes: int) -> None:
    """Whatever is put, replaced, removed and asked, with memory for all pages or for few."""
    recorded, model = RecordedTree(size_bytes=size_bytes), dict[bytes, bytes]()
    for number, (name, key, value) in enumerate(steps):
        step(recorded, model, name, key, value)
        if number % 5 == 0:
            recorded.tree.settle()
    assert list(recorded.tree.scan()) == sorted(model.items())
    assert recorded.tree.check().cells == len(model)


@given(STEPS)
@settings(max_examples=examples(30), deadline=None)
def test_redo_makes_the_same_tree_from_every_prefix_of_the_log(steps: list[tuple[str, bytes, bytes]]) -> None:
    """On an empty file, after any record, the tree is sound and what it was then."""
    recorded, model = RecordedTree(), dict[bytes, bytes]()
    states = {len(recorded.records): dict(model)}
    for name, key, value in steps:
        step(recorded, model, name, key, value)
        states[len(recorded.records)] = dict(model)
    again = empty_tree()
    state: dict[bytes, bytes] = {}
    for count in range(1, len(recorded.records) + 1):
        again.redo(encode_many(count, recorded.records[count - 1 : count]))
        state = states.get(count, state)  # a split or an image changes nothing that a reader sees
        assert dict(again.scan()) == state
        again.check()
    assert again.next_page == recorded.tree.next_page


def random_tree(count: int, size_bytes: int = 1 << 24, seed: int = 3) -> tuple[RecordedTree, dict[bytes, bytes]]:
    """Many cells of many sizes in random order."""
    source = random.Random(seed)
    recorded, model = RecordedTree(size_bytes=size_bytes), dict[bytes, bytes]()
    for _ in range(count):
        key, value = source.randbytes(source.choice([6, 40, 900])), source.randbytes(source.choice([5, 60, 500]))
        recorded.insert(key, value)
        model[key] = value
        if recorded.pool.wants_settling:
            recorded.tree.settle()
    recorded.tree.settle()
    return recorded, model


def test_a_tree_larger_than_memory_is_the_same_tree() -> None:
    """A pool of a tenth of the pages gives the same answers, and redo in it the same tree."""
    recorded, model = random_tree(1200, MIN_PAGES * PAGE_BYTES)
    assert len(recorded.pool.pages) <= MIN_PAGES
    assert recorded.pool.statistics().evictions > 100
    assert list(recorded.tree.scan()) == sorted(model.items())
    again = empty_tree(MIN_PAGES * PAGE_BYTES)
    again.redo(recorded.frames())
    assert list(again.scan()) == sorted(model.items())
    assert again.check() == recorded.tree.check()


def test_redo_may_be_repeated() -> None:
    """Records that a page has are not done again, whatever was flushed in between: pages begin with their images."""
    recorded, model = random_tree(400)
    frames = recorded.frames()
    half = frames.count // 2
    files = new_files()
    first = Tree(BufferPool(PageFile.create(files, PATH), 1 << 24), recorded.log)
    first.redo(frames.slice(0, half))
    first.pool.flush(first.pool.dirty_pages())
    second = Tree(BufferPool(PageFile(files, PATH), 1 << 24), recorded.log, first.next_page)
    second.redo(frames)
    second.redo(frames, half // 3)
    assert list(second.scan()) == sorted(model.items())
    assert second.check() == recorded.tree.check()


@pytest.mark.parametrize("pieces", [1, 3, 40])
def test_every_page_can_be_made_anew_from_the_log(pieces: int) -> None:
    """Whether it begins with an image or was split from another, which may have been split from a third."""
    recorded, _ = random_tree(600)
    recorded.tree.image_floor = len(recorded.records)
    for number in range(300):
        recorded.insert(b"%04d" % (number * 7919 % 3000), bytes(200))
    frames = recorded.frames()
    step = -(-frames.count // pieces)
    cuts = range(0, frames.count, step)
    assert len([one for one in recorded.records if one[len(STRUCTURE_HEADER) + 4] == updates.SPLIT]) > 40
    for page_id, each in recorded.pool.pages.items():
        newest_first = ([frames.slice(at, min(at + step, frames.count))] for at in reversed(cuts))
        rebuilt = rebuild_page(page_id, newest_first)
        for look in (page.cells, page.lsn_of, page.right_of):
            assert look(rebuilt) == look(each)
    with pytest.raises(DataError, match="no longer has its last image"):
        rebuild_page(recorded.tree.next_page, [[frames]])


def test_after_a_checkpoint_redo_needs_nothing_of_a_changed_page() -> None:
    """The first change of each page behind the floor comes with its image: torn pages do not matter."""
    files = new_files()
    source = random.Random(5)
    recorded = RecordedTree(files)
    model = {source.randbytes(20): source.randbytes(60) for _ in range(900)}
    for key, value in model.items():
        recorded.insert(key, value)
    recorded.tree.settle()
    floor = recorded.log(b"")
    recorded.tree.image_floor = floor
    recorded.pool.flush(recorded.pool.dirty_pages())
    for key in source.sample(sorted(model), 200):
        recorded.replace(key, b"after")
        model[key] = b"after"
    for _ in range(300):
        key = source.randbytes(20)
        recorded.insert(key, b"new")
        model[key] = b"new"
    recorded.tree.settle()
    changed = recorded.pool.dirty_pages()
    assert min(changed.values()) > floor
    for page_id in changed:
        recorded.pool._file.write_page(page_id, b"torn" + source.randbytes(PAGE_BYTES - 4))
    after = Tree(BufferPool(PageFile(files, PATH), 1 << 24), recorded.log)
    after.redo(recorded.frames(), floor - 1)
    assert dict(after.scan()) == model
    assert after.next_page == recorded.tree.next_page


def test_what_the_log_refused_is_taken_back() -> None:
    """Cells, splits and the next page are what they were; the tree goes on from there."""
    recorded, model = random_tree(300)
    tree = recorded.tree
    before, next_page, count = tree.check(), tree.next_page, len(recorded.records)
    for number in range(300):
        recorded.insert(b"refused-%03d" % number, bytes(400))
    assert tree.next_page > next_page
    tree.take_back()
    del recorded.records[count:]
    assert (tree.check(), tree.next_page) == (before, next_page)
    assert list(tree.scan()) == sorted(model.items())
    for number in range(300):
        recorded.insert(b"again-%03d" % number, bytes(400))
        model[b"again-%03d" % number] = bytes(400)
    tree.settle()
    again = empty_tree()
    again.redo(recorded.frames())
    assert list(again.scan()) == sorted(model.items())


def insert_many(recorded: RecordedTree, count: int) -> None:
    """Enough for a split."""
    for number in range(count):
        recorded.insert(b"key-%03d" % number, bytes(900))


def test_a_log_that_refuses_a_split_leaves_a_tree_that_can_be_taken_back() -> None:
    """The failure is the log's own, and nothing of the split stays."""
    recorded, model = random_tree(200)

    def refuse(_updates: bytes) -> int:
        raise DiskFullError("no room")

    recorded.tree._log_structure = refuse
    with pytest.raises(DiskFullError):
        insert_many(recorded, 100)
    recorded.tree.take_back()
    assert list(recorded.tree.scan()) == sorted(model.items())
    recorded.tree.check()


def test_updates_are_undone_wherever_their_keys_are_now() -> None:
    """Each in its own record, newest first, though splits have moved the cells meanwhile."""
    recorded, model = random_tree(150)
    start = len(recorded.records)
    source = random.Random(9)
    for number in range(200):
        recorded.insert(b"undo-%d" % source.randrange(1 << 60), bytes(300))
        if number % 3 == 0:
            key = source.choice(sorted(model))
            recorded.replace(key, b"x" * source.randrange(200)) if recorded.tree.get(key) is not None else None
        if number % 5 == 0:
            key = source.choice(sorted(model))
            recorded.remove(key) if recorded.tree.get(key) is not None else None
    for record in reversed(recorded.records[start:]):
        for update in reversed(updates.decode(record[len(STRUCTURE_HEADER) :])):
            if update.what in (updates.INSERT, updates.REPLACE, updates.REMOVE) and not is_inner(recorded, update):
                back = recorded.tree.reversal(update)
                recorded.tree.apply(back, recorded.log(updates.encode(back)))
    assert list(recorded.tree.scan()) == sorted(model.items())
    recorded.tree.check()


def is_inner(recorded: RecordedTree, update: updates.Update) -> bool:
    """Whether an update belongs to a split."""
    return page.level_of(recorded.pool.pages[update.page]) > 0


@pytest.mark.parametrize("count", [0, 1, 3, 5000])
def test_a_tree_is_loaded_in_bulk(count: int) -> None:
    """Sorted cells fill the pages, nothing is logged, and the tree can be changed afterwards."""
    cells = [(b"key-%06d" % number, bytes(number % 90)) for number in range(count)]
    tree = empty_tree(MIN_PAGES * PAGE_BYTES)
    assert tree.bulk_load(iter(cells), lsn=7) == count
    assert list(tree.scan()) == cells
    report = tree.check()
    assert report.cells == count
    assert report.pages <= count * 65 / (PAGE_BYTES * 0.88) + 3
    tree.pool.flush(tree.pool.dirty_pages())
    leaf = tree.prepare(b"key-x", 40)
    tree.insert(leaf, b"key-x", b"", 8)
    assert tree.get(b"key-x") == b""


def test_cells_of_a_bulk_load_must_be_in_order() -> None:
    """A stream that is not sorted is refused."""
    with pytest.raises(InputError, match="not sorted"):
        empty_tree().bulk_load([(b"b", b""), (b"a", b"")])
    with pytest.raises(InputError, match="at most"):
        empty_tree().bulk_load([(b"b", bytes(3000))])


def test_redo_keeps_away_from_the_header_of_the_page_file() -> None:
    """Page 0 is no page of the tree, whatever a record says."""
    record = STRUCTURE_HEADER + updates.encode_image(0, page.compact_image(page.new_page(0, 0)))
    with pytest.raises(DataError, match="page 0"):
        empty_tree().redo(encode_many(1, [record]))


def test_a_cell_that_is_too_large_is_refused() -> None:
    """Four cells fit into every page."""
    recorded = RecordedTree()
    with pytest.raises(InputError, match=f"at most {MAX_CELL_BYTES} bytes"):
        recorded.insert(b"key", bytes(MAX_CELL_BYTES))
    recorded.insert(b"key", bytes(MAX_CELL_BYTES - 7))


def test_the_largest_cells_find_room_in_any_order() -> None:
    """One split always makes room."""
    source = random.Random(2)
    recorded = RecordedTree()
    for _ in range(300):
        key = source.randbytes(1290)
        recorded.insert(key, bytes(MAX_CELL_BYTES - 4 - len(key)))
        recorded.insert(source.randbytes(3), b"")
    assert recorded.tree.check().cells == 600


@pytest.mark.parametrize("hit", ["sibling", "order", "child"])
def test_a_check_finds_what_is_wrong_between_pages(hit: str) -> None:
    """A wrong sibling, a key in the wrong leaf, a child with two parents."""
    recorded, _ = random_tree(300)
    root = recorded.pool.pages[ROOT]
    children = [int.from_bytes(value, "little") for _, value in page.cells(root)]
    lsn = 1 << 40
    if hit == "sibling":
        page.set_header(recorded.pool.pages[children[2]], children[5], lsn)
    elif hit == "order":
        page.insert(recorded.pool.pages[children[-1]], b"\0", b"", lsn)
    else:
        page.replace(root, page.cells(root)[3][0], children[0].to_bytes(4, "little"), lsn)
    with pytest.raises(DataError, match="page"):
        recorded.tree.check()


def test_readers_see_every_key_while_the_tree_grows() -> None:
    """No reader ever misses a key that was there before it looked, in a pool that evicts all the time."""
    recorded = RecordedTree(size_bytes=2 * MIN_PAGES * PAGE_BYTES)
    source = random.Random(11)
    there = [source.randbytes(16)]
    recorded.insert(there[0], there[0])

    def look() -> None:
        key = random.choice(there)
        assert recorded.tree.get(key) == key

    def scan() -> None:
        known = set(there[:])
        assert known <= {key for key, _ in recorded.tree.scan()}

    with meanwhile(look, look, scan):
        for _ in range(2500):
            key = source.randbytes(16)
            recorded.insert(key, key)
            there.append(key)
            if recorded.pool.wants_settling:
                recorded.tree.settle()
    assert sorted(there) == [key for key, _ in recorded.tree.scan()]
