"""The B+tree of versions: cells in key order, in pages of a buffer pool; and its consistency check (`check_tree`).

Invariants
- The root is always page 1. Pages are never merged; an empty leaf may stay in the chain, and any number of them in a
  row: readers pass over them by key, one at a time, and need no more than one of them in memory.
- Every change of the tree is logged first, as page updates: a split is one STRUCTURE record, applied by the same redo
  that recovery uses. Only `bulk_load` logs nothing: its caller takes a checkpoint.
- Before a page is first changed after `image_floor` (the last CHECKPOINT_BEGIN), its image is logged; so redo never
  needs the page file's version of it.
- Readers (`find`, `get`, `scan`) take no lock, from any thread. All other methods are for one thread at a time, the
  applier.

The order of a change: `prepare` (may log structure records), then the caller knows the LSN that its own record will
have, then `insert`, `replace` or `remove` with that LSN, before the next `prepare`. `settle` once the WAL has all of
it; after any failure in between `take_back`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tidelog.engine.btree import page as kernel
from tidelog.engine.btree.buffer_pool import BufferPool
from tidelog.engine.btree.bulk_load import load_tree, load_tree_of_rows
from tidelog.engine.btree.page import (
    CELL_HEADER_BYTES,
    IMAGE,
    INSERT,
    MAX_CELL_BYTES,
    MISSING,
    NEEDS_IMAGE,
    REMOVE,
    ROOT,
    SPLIT,
    Cell,
    Update,
    cells,
    check_page,
    compact_image,
    decode,
    encode_image,
    level_of,
    lsn_of,
    redo,
    redo_frames,
    reverse_of,
    right_of,
)
from tidelog.engine.btree.page_file import PageFile
from tidelog.errors import DataError, InputError, InternalError
from tidelog.files import Files, explained
from tidelog.log.frame import Frames

# Consistency check of a whole tree: order, levels, siblings, every page referenced once.


class TreeReport(NamedTuple):
    """What a tree consists of."""

    pages: int
    cells: int
    height: int


class _Range(NamedTuple):
    """A page, and the keys that may be below it: from `low` to before `high`."""

    page_id: int
    low: bytes
    high: bytes | None


def check_tree(pool: BufferPool, next_page: int) -> TreeReport:
    """Reads all pages, level by level; DataError at the first that is wrong."""
    level = level_of(_page_of(pool, ROOT))
    height, cell_count = level + 1, 0
    row = [_Range(ROOT, b"", None)]
    seen = {ROOT}
    while True:
        below, cell_count = _check_row(pool, row, level)
        if level == 0:
            return TreeReport(len(seen), cell_count, height)
        for each in below:
            if each.page_id in seen or not ROOT < each.page_id < next_page:
                raise DataError(f"page {each.page_id} has more than one parent, or was never allocated")
            seen.add(each.page_id)
        row, level = below, level - 1


def _check_row(pool: BufferPool, row: list[_Range], level: int) -> tuple[list[_Range], int]:
    """Checks the pages of a level from left to right; (those of the level below, number of cells)."""
    below: list[_Range] = []
    cell_count = 0
    rights = [each.page_id for each in row[1:]] + [0]
    for each, right in zip(row, rights, strict=True):
        page = _page_of(pool, each.page_id)
        if level_of(page) != level or right_of(page) != right:
            raise DataError(f"page {each.page_id}: its level or its right sibling is wrong")
        found = cells(page)
        _check_keys(found, each, level)
        cell_count += len(found)
        if level:
            below += _children(found, each)
    return below, cell_count


def _check_keys(found: list[Cell], within: _Range, level: int) -> None:
    if level and found[0][0] != b"":
        raise DataError(f"page {within.page_id}: the first key of an inner page is not empty")
    keys = [key for key, _ in found[1 if level else 0 :]]
    if keys and (keys[0] < within.low or (within.high is not None and keys[-1] >= within.high)):
        raise DataError(f"page {within.page_id}: a key is outside the range of its page")


def _children(found: list[Cell], within: _Range) -> list[_Range]:
    lows = [within.low] + [key for key, _ in found[1:]]
    highs = [*lows[1:], within.high]
    numbers = [int.from_bytes(value, "little") for _, value in found]
    return [_Range(*parts) for parts in zip(numbers, lows, highs, strict=True)]


def _page_of(pool: BufferPool, page_id: int) -> bytes:
    """A copy of a page that is sound by itself."""
    while (page := pool.pages.get(page_id)) is None:
        pool.load(page_id)
    copy = bytes(page)
    fault = check_page(copy, page_id)
    if fault is not None:
        raise DataError(f"page {page_id}: {fault}")
    return copy


# Cells of one step of a scan: enough to forget what a step costs, few enough that it delays no other thread.
SCAN_CELLS = 128

_find = kernel.find
_place = kernel.place
_scan = kernel.scan
_skip = kernel.skip
_insert = kernel.insert
_replace = kernel.replace
_remove = kernel.remove


class Tree:
    """A B+tree over a buffer pool.

    `log_structure` adds a STRUCTURE record with these page updates to the WAL and returns its LSN.
    """

    def __init__(self, pool: BufferPool, log_structure: Callable[[bytes], int], next_page: int = ROOT + 1) -> None:
        self.pool = pool
        self.next_page = next_page
        self.image_floor = 0
        self._settled_next_page = next_page
        self._log_structure = log_structure
        self._pages = pool.pages
        self._load = pool.load
        self._hold = pool.hold
        self._dirtied = pool.dirtied

    def create(self) -> None:
        """An empty tree, in a log that has none: its root is the first thing to be logged."""
        root = self.pool.new(ROOT, 0, held=True)
        self._do_structure(encode_image(ROOT, compact_image(root)))

    # ---- reading ----

    def find(self, key: bytes, stop: bytes | None = None) -> Cell | None:
        """The first cell whose key is not less than `key`; with `stop`, None may be said of those from there on."""
        while isinstance(found := _find(self._pages, ROOT, key), int):
            key = self._step(key, found)
            if stop is not None and key >= stop:
                return None
        return found

    def _step(self, key: bytes, missing_page: int) -> bytes:
        """Loads a missing page; returns where to continue: after the leaf of the key if that has nothing."""
        self._load(missing_page)
        while isinstance(further := _skip(self._pages, ROOT, key), int):
            self._load(further)
        return key if further is None else further

    def get(self, key: bytes) -> bytes | None:
        found = self.find(key)
        return found[1] if found is not None and found[0] == key else None

    def scan(self, start: bytes = b"", stop: bytes | None = None) -> Iterator[Cell]:
        """The cells from `start` to before `stop`, in steps: each sees the tree as it is at its moment."""
        for step in self.steps(start, stop):
            yield from step

    def steps(
        self, start: bytes = b"", stop: bytes | None = None, most_cells: int = SCAN_CELLS
    ) -> Iterator[list[Cell]]:
        """The same, a step at a time."""
        resume: bytes | None = start
        while resume is not None:
            found = _scan(self._pages, ROOT, resume, stop, most_cells)
            if isinstance(found, int):
                resume = self._step(resume, found)
                if stop is not None and resume >= stop:
                    return
                continue
            cells, resume = found
            yield cells

    # ---- changing ----

    def prepare(self, key: bytes, cell_bytes: int) -> int:
        """The pinned leaf of a key, with room for a cell of this size (header, key and value; 0 for a removal)."""
        if cell_bytes > MAX_CELL_BYTES:
            raise InputError(f"a cell has at most {MAX_CELL_BYTES} bytes, this one would have {cell_bytes}")
        while True:
            placed = _place(self._pages, ROOT, key, cell_bytes, self.image_floor)
            if isinstance(placed, int):
                if self._hold(placed):
                    return placed
            else:
                self._make_ready(placed, key)

    def _make_ready(self, placed: tuple[int, int] | tuple[int, tuple[int, ...]], key: bytes) -> None:
        """One step towards a leaf that can be changed."""
        reason, what = placed
        if isinstance(what, tuple):
            self._split(what, key)
        elif reason == MISSING:
            self._load(what)
        elif reason == NEEDS_IMAGE and self._hold(what):
            self._log_images([what])

    def _split(self, path: tuple[int, ...], key: bytes) -> None:
        """Splits the lowest page of the path whose parent has room, unless one has left memory meanwhile."""
        if not all(self._hold(page_id) for page_id in path):
            return
        updates, fresh = kernel.plan_split(self._pages, path, key, self.next_page)
        self._log_images([update.page for update in decode(updates) if update.what not in (IMAGE, SPLIT)])
        for page_id in range(self.next_page, self.next_page + fresh):
            self.pool.new(page_id, 0, held=True)
        self.next_page += fresh
        self._do_structure(updates)

    def _log_images(self, page_ids: list[int]) -> None:
        """Logs those pages (held) that have not been changed since the floor, so that redo need not read them."""
        stale = [page_id for page_id in page_ids if lsn_of(self._pages[page_id]) < self.image_floor]
        if stale:
            self._do_structure(b"".join(encode_image(each, compact_image(self._pages[each])) for each in stale))

    def _do_structure(self, updates: bytes) -> None:
        lsn = self._log_structure(updates)
        missing = redo(self._pages, updates, lsn)
        if missing >= 0:
            raise InternalError(f"page {missing} was evicted while it was pinned")
        for update in decode(updates):
            self._dirtied(update.page, lsn)

    def insert(self, page_id: int, key: bytes, value: bytes, lsn: int) -> None:
        """Adds a cell to a prepared page."""
        _insert(self._pages[page_id], key, value, lsn)
        self._dirtied(page_id, lsn)

    def replace(self, page_id: int, key: bytes, value: bytes, lsn: int) -> None:
        """Gives a cell of a prepared page another value."""
        _replace(self._pages[page_id], key, value, lsn)
        self._dirtied(page_id, lsn)

    def remove(self, page_id: int, key: bytes, lsn: int) -> None:
        """Takes a cell of a prepared page away."""
        _remove(self._pages[page_id], key, lsn)
        self._dirtied(page_id, lsn)

    def reversal(self, update: Update) -> Update:
        """What takes an update back, for the page (prepared) where its key is by now. One a record: then `apply` it."""
        back = reverse_of(update)
        room = 0 if back.what == REMOVE else CELL_HEADER_BYTES + len(back.key) + len(back.value)
        return back._replace(page=self.prepare(back.key, room))

    def apply(self, update: Update, lsn: int) -> None:
        """Does an INSERT, REPLACE or REMOVE in a prepared page."""
        if update.what == REMOVE:
            self.remove(update.page, update.key, lsn)
        elif update.what == INSERT:
            self.insert(update.page, update.key, update.value, lsn)
        else:
            self.replace(update.page, update.key, update.value, lsn)

    def settle(self) -> None:
        """The log has everything up to here."""
        self.pool.settle()
        self._settled_next_page = self.next_page

    def take_back(self) -> None:
        """The log refused what came since the last settling: the tree is what it was."""
        self.pool.take_back()
        self.next_page = self._settled_next_page

    # ---- recovery, restores, checks ----

    def redo(self, frames: Frames, start: int = 0) -> None:
        """Does the page updates of whole frames of the log where a page has not got them."""
        index = start
        while index < frames.count:
            done = redo_frames(self._pages, self.pool.rec_lsns, frames, index)
            index = done.next_index
            if done.missing_page >= 0:
                self._bring(done.missing_page, must_be_read=done.must_be_read)
        self._settled_next_page = self.next_page

    def _bring(self, page_id: int, *, must_be_read: bool) -> None:
        if page_id < ROOT:
            raise DataError("the log changes page 0, which is not a page of the tree")
        self.next_page = max(self.next_page, page_id + 1)
        if must_be_read:
            self._load(page_id)
        else:
            self.pool.new(page_id, 0)

    def bulk_load(self, cells: Iterable[Cell], lsn: int = 0) -> int:
        """Fills a tree that has no pages yet from cells in order; how many. Logs nothing: a checkpoint must follow."""
        count, self.next_page = load_tree(self.pool, cells, lsn)
        self._settled_next_page = self.next_page
        return count

    def bulk_load_rows(self, blocks: Iterable[bytes], lsn: int = 0) -> None:
        """The same from rows as they are in blocks (`block.py`), before compression."""
        self.next_page = self._settled_next_page = load_tree_of_rows(self.pool, blocks, lsn)

    def renumbered(self, next_page: int, lsn: int) -> None:
        """The pages are those of another file, all made by this record: each needs an image before it is changed."""
        self.next_page = self._settled_next_page = next_page
        self.image_floor = lsn + 1

    def check(self) -> TreeReport:
        """Reads the whole tree; DataError at the first thing that is not as it must be."""
        return check_tree(self.pool, self.next_page)


# Building a new page file from the cells of a tree, and switching to it.
#
# `compact_index` in `core.py` says why that is safe; this module is shared by a running engine and by redo.
#
# Invariants
# - The new tree follows from the cells and the LSN alone: the same input always produces the same pages.
# - Until `use_new_index` the file in use is not touched. `pages.db.new` is unreferenced before that.


_SUFFIX = ".new"
# Pages are written once and in order, so a few that are still being filled are all that has to be in memory.
_POOL_BYTES = 4 << 20


class NewIndex(NamedTuple):
    """A page file that is complete and synced, and not in use yet."""

    lsn: int
    cells: int
    next_page: int


def build_new_index(files: Files, path: Path, tree: Tree, lsn: int) -> NewIndex:
    """Writes all cells of a tree beside its page file, as the record of this LSN will leave them."""
    new_path = _new_path(path)
    page_file = PageFile.create(files, new_path, made_lsn=lsn)
    try:
        pool = BufferPool(page_file, _POOL_BYTES)
        new_tree = Tree(pool, log_nothing)
        cells = new_tree.bulk_load(tree.scan(), lsn)
        pool.flush(pool.dirty_pages())
        return NewIndex(lsn, cells, new_tree.next_page)
    except BaseException:
        with contextlib.suppress(OSError):
            files.remove(new_path)
        raise
    finally:
        page_file.close()


def use_new_index(files: Files, path: Path, tree: Tree, new: NewIndex) -> PageFile:
    """Renames the new file over the old one, and reads pages from it from now on. The tree has nothing unsettled."""
    with explained("replace the page file", path):
        files.rename(_new_path(path), path)
        files.sync_directory(path.parent)
    page_file = PageFile(files, path)
    old_next_page = tree.next_page
    tree.renumbered(new.next_page, new.lsn)
    tree.pool.use_file(page_file, stale_pages=range(new.next_page, old_next_page))
    return page_file


def remove_unused_index(files: Files, path: Path) -> None:
    """Removes what a crash has left of a file that was never in use."""
    if files.exists(_new_path(path)):
        with explained("open engine", path):
            files.remove(_new_path(path))


def _new_path(path: Path) -> Path:
    return path.with_name(path.name + _SUFFIX)


def log_nothing(updates: bytes) -> int:
    """For a tree that is built from rows."""
    raise InternalError("a tree that is loaded in bulk logs nothing")
