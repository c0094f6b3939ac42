"""The buffer pool: as many pages in memory as there is room for, the others in the page file.

Invariants
- A page is written to the file in `write_page` and nowhere else, and not before the WAL is durable up to its LSN:
  waited for, then checked.
- Only one thread at a time changes pages (the applier). It holds a page (`hold`, `new(held=True)`) before it changes
  it, until `settle` (the WAL has the records) or `take_back` (the WAL refused them; the pages are what they were). A
  held page stays in memory. A write of a held page to the file writes it as of the last `settle`. After `abandon` held
  pages stay held forever.
- Steal: a changed page may be evicted to the file before its transaction is complete. No-force: it need not be written.
- `rec_lsn` of a dirty page is at most the LSN of the first change that the file does not have.
- Readers look at `pages` without any lock; they come here only for missing pages, and wait for nothing but the disk.
- The number of pages is bounded, unless more than that are held at once: `wants_settling` says so long before.
- On a full disk dirty pages stay and others are evicted, so that everything can still be read. A recovery on a full
  disk has all the pages that it changes in memory, however many these are; they leave it when there is room.

Eviction is second chance (clock): the oldest page is evicted, unless it was used since it was last considered. The root
is never evicted: every search begins there, and it counts them.

Locks: `_writing` (one write at a time, so that an older copy never overwrites a newer one) before `_mutex` (short;
never held while the disk or the WAL works). No thread waits for a `settle` while holding either.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import msgspec

from tidelog.engine.btree.page import (
    PAGE_BYTES,
    ROOT,
    accesses_of,
    check_page,
    clear_reference,
    is_referenced,
    keep_accesses,
    lsn_of,
    new_page,
    put_back,
    sealed,
)
from tidelog.engine.btree.page_file import PageFile
from tidelog.errors import CorruptionError, DataError, DiskFullError, ExhaustedError, InternalError, LogFailedError

# A smaller pool is little more than one root-to-leaf path for each of a few threads.
MIN_PAGES = 16
# A root-to-leaf path, for a reader that comes when nearly all pages are held.
_WAY_PAGES = 8
# Memory of copies is used again: to get and to give back that much with every batch costs more than the copies.
MAX_SPARE_COPIES = 512
# Readers that may be on their way to a page of a file that was replaced, each once: far more than there are threads.
MAX_STALE_LOADS = 10_000


class BufferPoolStatistics(msgspec.Struct, frozen=True):
    """A snapshot of the pool's counters."""

    hits: int
    misses: int
    hit_rate: float
    size_bytes: int
    capacity_bytes: int
    evictions: int
    dirty: int
    flushes: int


def _always_durable(_lsn: int) -> bool:
    return True


def _wait_for_nothing(_lsn: int) -> None:
    return None


class BufferPool:
    """The resident pages of one tree, `pages`, and their transfer from and to the page file."""

    def __init__(
        self,
        file: PageFile,
        size_bytes: int,
        *,
        wait_durable: Callable[[int], None] = _wait_for_nothing,
        is_durable: Callable[[int], bool] = _always_durable,
        rebuild: Callable[[int], bytearray] | None = None,
        checks_invariants: bool = True,
    ) -> None:
        self.pages: dict[int, bytearray] = {}
        self.rec_lsns: dict[int, int] = {}  # of dirty pages; `dirty_pages` is the whole table
        self.capacity_pages = max(size_bytes // PAGE_BYTES, MIN_PAGES)
        self.rebuild = rebuild
        self._file = file
        self._wait_durable = wait_durable
        self._is_durable = is_durable
        self._checks_invariants = checks_invariants
        self._clock: deque[int] = deque()
        # What held pages were (None: new), and the rec_lsn of those that were dirty then. While a page is held,
        # `rec_lsns` knows only of what came since.
        self._held: dict[int, bytearray | None] = {}
        self._held_rec_lsns: dict[int, int] = {}
        self._spare_copies: list[bytearray] = []
        self._holder = 0
        self._pins: dict[int, int] = {}
        self._loading: dict[int, threading.Event] = {}
        self._writing = threading.Lock()
        self._mutex = threading.Lock()
        self._settled = threading.Condition(self._mutex)
        self._settlings = 0
        self._stale_pages = range(0)
        self._stale_loads_left = 0
        self._is_abandoned = False
        self._is_growing = False
        self._grown_pages = 0
        self._misses = self._evictions = self._flushes = 0

    # ---- pages come into memory ----

    def load(self, page_id: int) -> None:
        """Brings a page into memory; it may be gone again by the time the caller looks, who then asks again."""
        with self._mutex:
            if page_id in self.pages:
                return
            other = self._loading.get(page_id)
            if other is None:
                self._loading[page_id] = threading.Event()
        if other is not None:
            other.wait()  # if that one failed, the caller comes again and meets the failure itself
            return
        try:
            self._make_room()
            self._bring(page_id, self._file)
        finally:
            with self._mutex:
                self._loading.pop(page_id).set()

    def _bring(self, page_id: int, file: PageFile) -> None:
        try:
            page, is_rebuilt = self._read(page_id, file)
        except DataError:
            if not self._was_asked_of_another_file(page_id, file):
                raise
        else:
            self._admit(page_id, page, is_rebuilt, file)

    def _read(self, page_id: int, file: PageFile) -> tuple[bytearray, bool]:
        """(page, whether it had to be rebuilt)."""
        try:
            return self._not_ahead(page_id, file.read_page(page_id)), False
        except CorruptionError:
            if self.rebuild is None or self._is_stale(page_id, file):
                raise
        page = self.rebuild(page_id)
        fault = check_page(page, page_id)
        if fault is not None:
            raise DataError(f"page {page_id} was rebuilt from the log and is invalid: {fault}")
        return page, True

    def _not_ahead(self, page_id: int, page: bytearray) -> bytearray:
        """The page; DataError when the log that it was written after has lost its end."""
        if not self._is_durable(lsn_of(page)):
            raise DataError(
                f"page {page_id} was changed at LSN {lsn_of(page)}, after the end of the log: the log lost its end",
                path=self._file.path,
                hint="Put the files of the log back, or restore the engine from its store into a new directory",
            )
        return page

    def _admit(self, page_id: int, page: bytearray, is_dirty: bool, file: PageFile) -> None:
        with self._mutex:
            if self._file is not file:
                return  # the caller begins again, and finds other numbers
            self.pages[page_id] = page
            self._clock.append(page_id)
            self._misses += 1
            if is_dirty:
                self.rec_lsns.setdefault(page_id, lsn_of(page))

    def new(self, page_id: int, level: int, *, held: bool = False) -> bytearray:
        """An empty page that replaces the one in the file. Not dirty until it is changed."""
        self._make_room()
        page = new_page(page_id, level)
        with self._mutex:
            if page_id in self.pages:
                raise InternalError(f"page {page_id} is in memory already")
            self.pages[page_id] = page
            self._clock.append(page_id)
            if held:
                self._holder = threading.get_ident()
                self._held[page_id] = None
        return page

    # ---- and leave it ----

    def _make_room(self) -> None:
        while (victim := self._evict_clean()) is not None:
            try:
                self._steal(*victim)
            except (DiskFullError, ExhaustedError):
                if not self._evict_unchanged():
                    raise
                return

    def _evict_unchanged(self) -> bool:
        """Evicts a clean page for a reader while no page can be written. Returns whether there is room.

        If all pages are dirty, a few pages more than allowed are loaded: they are clean, so the next load evicts them.
        The WAL has no room either, so there will not be more dirty ones, except by a recovery.
        """
        with self._mutex:
            page_id = self._clock_sweep(
                lambda page_id: page_id not in self.rec_lsns and self._may_leave(page_id), rounds=2
            )
            if page_id is not None:
                self._drop(page_id)
            least = max(self.capacity_pages, self._grown_pages) + len(self._held)
            return self._is_growing or len(self.pages) < least + 2 * _WAY_PAGES

    @contextlib.contextmanager
    def growing_on_full_disk(self) -> Iterator[None]:
        """Within it there may be more pages than allowed where none can be written; the bound is what they are then."""
        self._is_growing = True
        try:
            yield
        finally:
            self._is_growing = False
            self._grown_pages = len(self.pages)

    def _evict_clean(self) -> tuple[int, bytearray] | None:
        """Evicts until there is room for one more; a dirty page to be written first, or None when that is all."""
        with self._mutex:
            # Where nearly all pages are held, the way down to one more must fit in beside them.
            capacity = max(self.capacity_pages, len(self._held) + _WAY_PAGES)
            while len(self.pages) + max(len(self._loading), 1) > capacity:
                page_id = self._next_victim()
                if page_id is None:
                    return None
                if page_id in self.rec_lsns:
                    return page_id, self.pages[page_id]
                self._drop(page_id)
        return None

    def _next_victim(self) -> int | None:
        """Takes an evictable page from the clock; None if there is none.

        One whose records the log is still writing goes only if all others are in use: readers should not wait for that,
        but the pages on a path down the tree must not evict each other until the log is done.
        """
        page_id = self._clock_sweep(self._is_settled_on_disk, rounds=1)
        return self._clock_sweep(self._may_leave, rounds=2) if page_id is None else page_id

    def _clock_sweep(self, is_wanted: Callable[[int], bool], rounds: int) -> int | None:
        for _ in range(rounds * len(self._clock)):
            page_id = self._clock.popleft()
            page = self.pages[page_id]
            if not is_referenced(page) and is_wanted(page_id):
                return page_id
            clear_reference(page)
            self._clock.append(page_id)
        return None

    def _is_settled_on_disk(self, page_id: int) -> bool:
        if not self._may_leave(page_id):
            return False
        return page_id not in self.rec_lsns or self._is_durable(lsn_of(self.pages[page_id]))

    def _may_leave(self, page_id: int) -> bool:
        return page_id not in self._held and page_id not in self._pins and page_id != ROOT

    def _drop(self, page_id: int) -> None:
        del self.pages[page_id]
        self._evictions += 1

    def _steal(self, page_id: int, page: bytearray) -> None:
        """Writes a dirty page that left the clock, and drops it unless the applier wants it now."""
        try:
            self._write(page_id, waits=False)
        finally:
            with self._mutex:
                if self.pages.get(page_id) is not page:
                    pass  # all pages are of another file by now
                elif page_id not in self.rec_lsns and self._may_leave(page_id):
                    self._drop(page_id)
                else:
                    self._clock.append(page_id)

    def pin(self, page_id: int) -> bool:
        """Keeps a page in memory until `unpin`; False when it is not there."""
        with self._mutex:
            if page_id not in self.pages:
                return False
            self._pins[page_id] = self._pins.get(page_id, 0) + 1
            return True

    def unpin(self, page_id: int) -> None:
        """Takes one pin away."""
        with self._mutex:
            count = self._pins.pop(page_id) - 1
            if count:
                self._pins[page_id] = count

    # ---- changes ----

    def hold(self, page_id: int) -> bool:
        """Keeps a page, and what it is now, until it is settled or taken back; False when it is not in memory."""
        held = self._held
        if page_id in held:
            return True
        with self._mutex:
            page = self.pages.get(page_id)
            if page is None:
                return False
            if not held:
                self._holder = threading.get_ident()
            if self._spare_copies:
                held[page_id] = copy = self._spare_copies.pop()
                copy[:] = page
            else:
                held[page_id] = bytearray(page)
            if page_id in self.rec_lsns:
                self._held_rec_lsns[page_id] = self.rec_lsns.pop(page_id)
        return True

    def dirtied(self, page_id: int, lsn: int) -> None:
        """A page was changed by this record."""
        if page_id not in self.rec_lsns:
            self.rec_lsns[page_id] = lsn

    @property
    def wants_settling(self) -> bool:
        """Whether the applier holds so many pages that it should enqueue its records and settle."""
        return len(self._held) * 2 > self.capacity_pages

    def settle(self) -> None:
        """The log has the records of all changes so far: nothing will be taken back."""
        with self._mutex:
            self._end_holding()

    def take_back(self) -> None:
        """The log refused the records: all pages are what they were at the last settling, in one step for readers."""
        with self._mutex:
            put_back(self.pages, list(self._held.items()))
            for page_id, before in self._held.items():
                self.rec_lsns.pop(page_id, None)
                if before is None:
                    self._clock.remove(page_id)
            self._end_holding()

    def abandon(self) -> None:
        """The applier has failed for good: what it holds is never settled, and waiters for that get an error."""
        with self._mutex:
            self._is_abandoned = True
            self._settled.notify_all()

    def _end_holding(self) -> None:
        self.rec_lsns.update(self._held_rec_lsns)
        self._held_rec_lsns.clear()
        room = MAX_SPARE_COPIES - len(self._spare_copies)
        if room > 0:
            self._spare_copies += [before for before in self._held.values() if before is not None][:room]
        self._held.clear()
        self._settlings += 1
        self._settled.notify_all()

    # ---- pages go to the file ----

    def write_page(self, page_id: int) -> None:
        """Writes a page as it is at this moment or later, once the log has its records. One not in memory is written.

        Waits for the applier if it holds the page. A write is durable after `sync`.
        """
        self._write(page_id, waits=True)

    def _write(self, page_id: int, *, waits: bool) -> None:
        settlings = self._settlings
        self._wait_beforehand(page_id)
        while True:
            with self._writing:
                must_wait, image = self._image(page_id, settlings)
                if image is not None:
                    self._write_image(page_id, image)
            if not (must_wait and waits):
                return
            self._wait_for_settling(page_id, settlings)

    def _wait_beforehand(self, page_id: int) -> None:
        """Waits for the log before other threads wait for this one; later there is mostly nothing left to wait for."""
        page = self.pages.get(page_id)
        if page is not None and page_id not in self._held:
            self._wait_durable(lsn_of(page))

    def _image(self, page_id: int, settlings: int) -> tuple[bool, bytes | None]:
        """(whether to wait, the page as it was when last settled), provided that was after the count `settlings`."""
        with self._mutex:
            if page_id not in self._held:
                page = self.pages.get(page_id)
            elif self._settlings == settlings:
                return True, None
            else:
                page = self._held[page_id]
            return False, None if page is None else sealed(page)

    def _wait_for_settling(self, page_id: int, settlings: int) -> None:
        with self._mutex:
            if self._held and self._holder == threading.get_ident():
                raise InternalError(
                    f"page {page_id} would be written by the thread whose changes are not committed yet"
                )
            self._settled.wait_for(lambda: self._settlings != settlings or self._is_abandoned)
            if self._is_abandoned and self._settlings == settlings:
                raise LogFailedError(
                    f"page {page_id} has changes whose records are not in the log", hint="Open it again"
                )

    def _write_image(self, page_id: int, image: bytes) -> None:
        """The one place where a page goes to the file: never before its log."""
        lsn = lsn_of(image)
        self._wait_durable(lsn)
        if self._checks_invariants and not self._is_durable(lsn):
            raise InternalError(f"page {page_id} would be written before its record {lsn} is durable")
        self._file.write_page(page_id, image)
        with self._mutex:
            self._flushes += 1
            is_held = page_id in self._held
            page = self._held[page_id] if is_held else self.pages.get(page_id)
            if page is not None and lsn_of(page) == lsn:
                (self._held_rec_lsns if is_held else self.rec_lsns).pop(page_id, None)

    def flush(self, page_ids: Iterable[int]) -> None:
        """Writes those of the pages that are dirty, as they are now or later, and syncs the file."""
        for page_id in sorted(page_ids):
            if self._is_dirty(page_id):
                self.write_page(page_id)
        self.sync()

    def _is_dirty(self, page_id: int) -> bool:
        with self._mutex:  # a settling moves pages from one table to the other
            return page_id in self.rec_lsns or page_id in self._held_rec_lsns

    # ---- another file ----

    def use_file(self, file: PageFile, stale_pages: range) -> None:
        """Switches to another page file, atomically for readers; the previous file is closed.

        Nothing is held. `stale_pages` are numbers that only the previous file had: a reader about to load one of them
        has to restart.
        """
        root = file.read_page(ROOT)
        with self._writing, self._mutex:
            if self._held or self._pins:
                raise InternalError("pages are in use while their file is replaced")
            before, self._file = self._file, file
            self._stale_pages, self._stale_loads_left = stale_pages, MAX_STALE_LOADS
            keep_accesses(self.pages.get(ROOT), root)
            self.rec_lsns.clear()
            self._clock.clear()
            self.pages.clear()
            self.pages[ROOT] = root
            self._clock.append(ROOT)
            loading = list(self._loading.values())
        for other in loading:
            other.wait()  # it may be reading the file
        before.close()

    def _is_stale(self, page_id: int, file: PageFile) -> bool:
        return self._file is not file or (page_id in self._stale_pages and page_id >= file.page_count)

    def _was_asked_of_another_file(self, page_id: int, file: PageFile) -> bool:
        """Whether the caller may have the number from the file before. A tree that is wrong is found out in the end."""
        if not self._is_stale(page_id, file) or self._stale_loads_left <= 0:
            return False
        self._stale_loads_left -= 1
        return True

    def sync(self) -> None:
        """Everything written so far is durable when this returns."""
        self._file.sync()

    def dirty_pages(self) -> dict[int, int]:
        """The dirty page table: {page: rec_lsn}."""
        with self._mutex:
            return self.rec_lsns | self._held_rec_lsns

    def statistics(self) -> BufferPoolStatistics:
        root = self.pages.get(ROOT)
        hits = 0 if root is None else accesses_of(root)
        return BufferPoolStatistics(
            hits=hits,
            misses=self._misses,
            hit_rate=hits / max(hits + self._misses, 1),
            size_bytes=len(self.pages) * PAGE_BYTES,
            capacity_bytes=self.capacity_pages * PAGE_BYTES,
            evictions=self._evictions,
            dirty=len(self.dirty_pages()),
            flushes=self._flushes,
        )

    def close(self) -> None:
        """Closes the page file; what was not flushed is in the log."""
        self._file.close()
