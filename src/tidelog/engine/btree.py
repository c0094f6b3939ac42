"""The B+tree of versions: cells in order of their keys, in pages of a buffer pool.

Invariants
- The root is page 1 for ever. Pages are never merged; an empty leaf may stay in the chain, and any number of them in a
  row: readers go over them by key, one at a time, and need no more of them in memory than one.
- Everything that changes the tree is in the log first, as page updates: a split is one STRUCTURE record, and it is done
  by the same redo that recovery uses. Only `bulk_load` logs nothing: its caller makes a checkpoint.
- Before a page is first changed after `image_floor` (the last CHECKPOINT_BEGIN), its image is logged; so redo never
  needs what the page file has of it.
- Readers (`find`, `get`, `scan`) take no lock, from any thread. All else is for one thread at a time, the applier.

The order of a change: `prepare` (may log structure records), then the caller knows the LSN that its own record will
have, then `insert`, `replace` or `remove` with that LSN, before the next `prepare`. `settle` when the log has all of
it; after any failure in between `take_back`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from tidelog.engine import page as kernel
from tidelog.engine.buffer_pool import BufferPool
from tidelog.engine.page import MAX_CELL_BYTES, MISSING, NEEDS_IMAGE, ROOT, Cell, cell_bytes, compact_image, lsn_of
from tidelog.engine.tree_check import TreeReport, check_tree
from tidelog.engine.tree_load import load_tree, load_tree_of_rows
from tidelog.engine.updates import IMAGE, INSERT, REMOVE, Update, decode, encode_image, redo, redo_frames, reverse_of
from tidelog.errors import DataError, InputError, InternalError
from tidelog.log.frame import Frames

# Cells of one step of a scan: enough to forget what a step costs, few enough that nobody waits for it.
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

    `log_structure` adds a STRUCTURE record with these page updates to the log and gives its LSN.
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
        """Loads a page that was missed; from where to go on: behind the leaf of the key if it has nothing."""
        self._load(missing_page)
        while isinstance(further := _skip(self._pages, ROOT, key), int):
            self._load(further)
        return key if further is None else further

    def get(self, key: bytes) -> bytes | None:
        """The value of a key."""
        found = self.find(key)
        return found[1] if found is not None and found[0] == key else None

    def scan(self, start: bytes = b"", stop: bytes | None = None) -> Iterator[Cell]:
        """The cells from `start` to before `stop`, in steps: each sees the tree as it is at its moment."""
        resume: bytes | None = start
        while resume is not None:
            found = _scan(self._pages, ROOT, resume, stop, SCAN_CELLS)
            if isinstance(found, int):
                resume = self._step(resume, found)
                if stop is not None and resume >= stop:
                    return
                continue
            cells, resume = found
            yield from cells

    # ---- changing ----

    def prepare(self, key: bytes, cell_bytes: int) -> int:
        """The leaf of a key, with room for a cell of so many bytes (`page.cell_bytes`; 0 for a removal), held."""
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
        self._log_images([update.page for update in decode(updates) if update.what != IMAGE])
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
            raise InternalError(f"page {missing} left memory while it was held")
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
        room = 0 if back.what == REMOVE else cell_bytes(len(back.key), len(back.value))
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
            raise DataError("the log changes page 0, which is no page of the tree")
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
        """The same from rows as they are in blocks (`cell_blocks`), before they are compressed."""
        self.next_page = self._settled_next_page = load_tree_of_rows(self.pool, blocks, lsn)

    def renumbered(self, next_page: int, lsn: int) -> None:
        """The pages are those of another file, all made by this record: each needs an image before it is changed."""
        self.next_page = self._settled_next_page = next_page
        self.image_floor = lsn + 1

    def check(self) -> TreeReport:
        """Reads the whole tree; DataError at the first thing that is not as it must be."""
        return check_tree(self.pool, self.next_page)
