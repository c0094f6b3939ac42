"""The hot tier of an engine: its WAL, its pages and the structures on top of them, opened and recovered.

    wal/          the WAL: records of entries, with their values
    values/       values too large for the WAL, each a file
    pages.db      the version index
    engine.ckpt   the last complete checkpoint

Invariants
- The WAL's lock is the engine's lock: one process has the engine open.
- Opening recovers the state after the last entry that is complete in the WAL, wherever a crash interrupted it.
- Pages can be rebuilt from the WAL as long as all of it is on this disk. Once files of it have been purged, opening
  needs `engine.ckpt` and the page file, or a restore from the store.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from threading import Event, RLock
from typing import Self

import msgspec

from tidelog._native import survey
from tidelog.clock import Clock
from tidelog.engine.btree.buffer_pool import BufferPool
from tidelog.engine.btree.page_file import PageFile, rebuild_page
from tidelog.engine.btree.tree import NewIndex, Tree, build_new_index, remove_unused_index, use_new_index
from tidelog.engine.mvcc.applier import Applier
from tidelog.engine.mvcc.known_results import KnownResults, ResultTable
from tidelog.engine.mvcc.retention import History, Marks
from tidelog.engine.mvcc.versions import Buckets, Versions
from tidelog.engine.recovery.checkpoint import MASTER, Checkpointer, read_master, refuse_half_restored
from tidelog.engine.recovery.recovery import (
    Recovery,
    Undo,
    refuse_lost_end,
    refuse_missing_files,
    refuse_older_than_pages,
)
from tidelog.engine.settings import EngineSettings
from tidelog.engine.value_files import VALUES, ValueFiles
from tidelog.engine.wal.files import Anchor
from tidelog.engine.wal.record_header import CHECKPOINT_END
from tidelog.engine.wal.records import (
    CheckpointEndRecord,
    CheckpointState,
    decode_record,
    encode_marks,
    encode_repack,
    encode_structure,
)
from tidelog.engine.wal.ship_watermark import EntryEnd, SeqIndex
from tidelog.engine.wal.wal import FIRST, Wal, files_in_mode
from tidelog.errors import CorruptionError, DataError, DiskFullError, GapError, LockedError
from tidelog.events import tell
from tidelog.files import Files, explained
from tidelog.log.frame import Frames
from tidelog.store.scheduler import Lazy

_logger = logging.getLogger("tidelog.engine")
ShippedPieces = Callable[[int], Iterator[Iterable[Frames]]]
_SHORTEST_TURN_SECONDS = 0.001
_LONGEST_TURN_SECONDS = 0.05
WAL = "wal"
PAGES = "pages.db"


class Turns:
    """Whose turn it is to change an engine: that of entries, or that of maintenance, which is a context manager.

    A lock alone would leave maintenance waiting for as long as entries come: who releases it takes it again at once.
    So entries give way to maintenance that waits, and that takes about as long as the last entries did.
    """

    def __init__(self) -> None:
        self.applying = RLock()
        self._is_taken = Event()
        self._is_taken.set()
        self._entry_seconds = 0.0
        self._until = 0.0

    def give_way(self) -> None:
        """Before entries are applied: if maintenance waits, it comes first."""
        if not self._is_taken.is_set():
            self._is_taken.wait(_LONGEST_TURN_SECONDS)

    def entries_took(self, seconds: float) -> None:
        """How long entries have held the lock."""
        self._entry_seconds = seconds

    def __enter__(self) -> Self:
        self._is_taken.clear()
        try:
            self.applying.acquire()
        finally:
            self._is_taken.set()
        seconds = min(max(self._entry_seconds, _SHORTEST_TURN_SECONDS), _LONGEST_TURN_SECONDS)
        self._until = time.perf_counter() + seconds
        return self

    def __exit__(self, *failure: object) -> None:
        self.applying.release()

    @property
    def is_over(self) -> bool:
        """Whether maintenance should let entries through. It may finish what it is at."""
        return time.perf_counter() >= self._until


class Core:
    """The parts of an open engine. Every writer holds `applying`: entries themselves, maintenance through `turns`."""

    def __init__(
        self,
        directory: Path,
        settings: EngineSettings,
        files: Files,
        clock: Clock,
        wal: Wal,
        state: CheckpointState | None,
        shipped_pieces: ShippedPieces | None = None,
    ) -> None:
        self.directory = directory
        self.settings = settings
        self.files = files
        self.clock = clock
        self.wal = wal
        self.turns = Turns()
        self.applying = self.turns.applying
        self.moved_bytes = 0
        """What values have taken of the log that were moved within it since the engine was opened."""
        self._shipped_pieces = shipped_pieces
        remove_unused_index(files, directory / PAGES)
        self.page_file = _page_file(files, directory / PAGES, is_new=state is None)
        try:
            self._load(state)
        except BaseException:
            self.page_file.close()
            raise

    def _load(self, state: CheckpointState | None) -> None:
        """Loads the in-memory structures from the pages and the WAL."""
        directory, settings, files, clock, wal = self.directory, self.settings, self.files, self.clock, self.wal
        is_new = state is None and wal.next_lsn == 1
        refuse_older_than_pages(self.page_file, wal)
        self.pool = BufferPool(
            self.page_file,
            settings.buffer_pool_bytes,
            wait_durable=wal.wait_durable,
            is_durable=lambda lsn: lsn <= wal.durable_lsn,
            rebuild=self._rebuild,
            checks_invariants=settings.checks_invariants,
        )
        self.tree = Tree(self.pool, self._log_structure) if state is None else self._tree_at(state)
        if is_new:
            self.tree.create()
            wal.commit()
            self.tree.settle()
        begin = clock.monotonic()
        self.results = ResultTable(_known_at(state))
        wal.on_handed_over = self.results.take
        recovery = Recovery(wal, self.tree, state, self.page_file.made_lsn, self._repack, self.results)
        with self.pool.growing_on_full_disk():
            report = recovery.run()
        self.recovery = msgspec.structs.replace(report, seconds=clock.monotonic() - begin)
        tell(
            _logger,
            "engine_opened",
            engine=directory,
            seq=recovery.found.applied_seq,
            first_lsn=report.begin_lsn,
            next_lsn=report.next_lsn,
            undone_seq=report.undone_seq,
            seconds=self.recovery.seconds,
        )
        self.buckets = Buckets()
        self.buckets.load(self.tree)
        self.versions = Versions(self.tree, self.buckets)
        found = recovery.found
        self.values = ValueFiles(
            files_in_mode(files, settings.wal_sync_mode), directory / VALUES, settings.large_value_bytes
        )
        self.values.load(found.applied_seq)
        self.marks = Marks(found.applied_seq, found.low_water_mark, found.high_water_mark)
        self.applier = Lazy(lambda: Applier(self.tree, wal, self.versions, settings, clock))
        self.entry_ends = Lazy(lambda: SeqIndex(wal.batches, EntryEnd(0, 0), wal.first_lsn))
        """Where the entries end whose records are on this disk."""
        self.undo = Undo(self.tree, wal)
        self.checkpointer = Checkpointer(
            directory=directory,
            files=files,
            clock=clock,
            tree=self.tree,
            pool=self.pool,
            wal=wal,
            marks=self.marks,
            results=self.results,
            applying=self.turns,
            last=state,
        )
        self.checkpointer.history_start_seq = found.history_start_seq
        self.history = History(self.checkpointer)

    @classmethod
    def open(
        cls,
        directory: Path,
        settings: EngineSettings,
        files: Files,
        clock: Clock,
        shipped_pieces: ShippedPieces | None = None,
    ) -> Core:
        """Opens the engine in a directory, or starts a new one in an empty directory.

        `shipped_pieces` yields the shipped log below an LSN, newest object first; it serves the rebuild of damaged
        pages.
        """
        with explained("open engine", directory):
            files.make_directories(directory)
            refuse_half_restored(files, directory)
            state, reason = read_master(files, directory)
            anchor = FIRST if state is None else Anchor(state.begin_lsn, state.begin_position)
            refuse_missing_files(files, directory / WAL, state, settings.wal_sync_mode)
            wal = _open_wal(directory, settings, files, clock, anchor)
            try:
                refuse_lost_end(wal, state)
                if state is None:
                    state = _found_in_log(wal, directory, reason)
                usable = _usable(state, wal, files, directory)
                return cls(directory, settings, files, clock, wal, usable, shipped_pieces)
            except BaseException:
                wal.close()
                raise

    def close(self) -> None:
        """Closes the files. Dirty pages are not flushed: the WAL has everything."""
        try:
            self.wal.close()
        finally:
            self.page_file.close()

    def fail(self) -> None:
        """Marks pages and WAL as inconsistent: nothing is made durable from here on."""
        self.checkpointer.stop()
        self.pool.abandon()

    def _tree_at(self, state: CheckpointState) -> Tree:
        """Opens the tree as of the page file, which may have been rewritten after the checkpoint."""
        made_lsn = self.page_file.made_lsn
        is_newer = made_lsn >= state.begin_lsn
        tree = Tree(self.pool, self._log_structure, self.page_file.page_count if is_newer else state.next_page)
        tree.image_floor = max(state.begin_lsn, made_lsn + 1)
        return tree

    # Rewriting the page file: see `compact_index`

    def build_new_index(self, lsn: int) -> NewIndex:
        """Writes all current cells to a new file, which is not in use yet; the record with this LSN will switch to
        it.
        """
        return build_new_index(self.files, self.directory / PAGES, self.tree, lsn)

    def use_new_index(self, new: NewIndex) -> None:
        """Switches to the new page file. The caller excludes all writers."""
        self.page_file = use_new_index(self.files, self.directory / PAGES, self.tree, new)

    def _repack(self, lsn: int, cells: int) -> None:
        """Redoes the record of a page file rewrite."""
        new = self.build_new_index(lsn)
        if new.cells != cells:
            raise DataError(
                f"the index had {cells} cells when it was rewritten at LSN {lsn}, and has {new.cells} now",
                path=self.directory,
                hint="Restore the engine from its store into a new directory",
            )
        self.use_new_index(new)

    @property
    def written_bytes(self) -> int:
        """How much was written for entries: the log apart from moves, and value files since the engine was opened."""
        return self.wal.next_position - self.moved_bytes + self.values.installed_bytes

    def note_low_water_mark(self, seq: int) -> None:
        """Persists the low-water mark: nothing at or below it is ever rolled back. Does not wait for a sync."""
        self.wal.add(encode_marks(seq))
        self.wal.hand_over()

    def roll_back(self, seq: int) -> None:
        """Undoes every entry above a seq."""
        self.undo.roll_back(seq)
        self.buckets.load(self.tree)
        self.values.remove_above(seq)

    def _log_structure(self, updates: bytes) -> int:
        return self.wal.add(encode_structure(updates))

    def _rebuild(self, page_id: int) -> bytearray:
        """Rebuilds a damaged page of the file from the WAL, which has every update to it."""
        return rebuild_page(page_id, self._pieces_of_log())

    def _pieces_of_log(self) -> Iterator[Iterable[Frames]]:
        """Yields the WAL since the page file was created, newest file first, then the shipped log."""
        first_lsn, stop_lsn = self.page_file.made_lsn + 1, self.wal.durable_lsn + 1
        for span in reversed(self.wal.spans()):
            if span.first_lsn < stop_lsn and first_lsn < span.next_lsn:
                yield self.wal.batches(max(span.first_lsn, first_lsn), min(span.next_lsn, stop_lsn))
        if self._shipped_pieces is not None and first_lsn < self.wal.first_lsn:
            for piece in self._shipped_pieces(self.wal.first_lsn):
                yield _from_lsn(piece, first_lsn)


def _known_at(state: CheckpointState | None) -> KnownResults:
    """Returns what a checkpoint knows of the entries before it; nothing if there was no checkpoint yet."""
    if state is None:
        return KnownResults(floor=0)
    return state.results or KnownResults(floor=state.applied_seq)


def _from_lsn(piece: Iterable[Frames], lsn: int) -> Iterator[Frames]:
    for frames in piece:
        if frames.next_offset > lsn:
            yield frames.slice(max(0, lsn - frames.first_offset), frames.count)


def _open_wal(directory: Path, settings: EngineSettings, files: Files, clock: Clock, anchor: Anchor) -> Wal:
    try:
        return Wal.open(directory / WAL, settings, files=files, clock=clock, anchor=anchor)
    except LockedError as error:
        error.hint = "Close it there, or wait; `tidelog engine status` works beside it"
        raise
    except (CorruptionError, GapError) as error:
        error.hint = "Nothing was changed. `tidelog engine verify` lists all damage; restore into a new directory"
        if isinstance(error, GapError) and error.unit is not None:
            error.unit = "LSN"
        raise


def _page_file(files: Files, path: Path, *, is_new: bool) -> PageFile:
    """Opens the page file. Without a checkpoint its contents are ignored: all pages come from the WAL.

    On a full disk the old file serves: redo makes each page before it reads it, and overwrites what is there.
    """
    if not is_new and files.exists(path):
        return PageFile(files, path)
    try:
        return PageFile.create(files, path)
    except DiskFullError as full:
        if not files.exists(path):
            raise
        try:
            old = PageFile(files, path)
        except CorruptionError:
            raise full from None
        if old.made_lsn:  # the log up to there would be taken for one of other pages
            old.close()
            raise
        return old


def _found_in_log(wal: Wal, directory: Path, reason: str | None) -> CheckpointState | None:
    """Without `engine.ckpt`: finds the last checkpoint that the WAL records as complete."""
    if wal.first_lsn == 1 and reason is None:
        return None  # a new engine, or one that never made a checkpoint
    found: CheckpointState | None = None
    for frames in wal.batches(wal.first_lsn, wal.next_lsn):
        *_, others = survey(frames.first_offset, frames.buffer, frames.positions, frames.lengths, 0, 0)
        for index in others:
            payload = frames.payloads(index, index + 1)[0]
            if payload[0] == CHECKPOINT_END:
                record = decode_record(payload, frames.first_offset + index)
                assert isinstance(record, CheckpointEndRecord)
                found = record.state
    if found is None and wal.first_lsn > 1:
        raise DataError(
            f"{MASTER} {reason or 'is missing'}, and the log begins at LSN {wal.first_lsn} without a checkpoint in it",
            path=directory,
            hint="Restore the engine from its store into a new directory",
        )
    _logger.warning(
        "%s: %s %s; the last checkpoint was looked for in the log", directory, MASTER, reason or "is missing"
    )
    return found


def _usable(state: CheckpointState | None, wal: Wal, files: Files, directory: Path) -> CheckpointState | None:
    """Returns the checkpoint if its page file exists; otherwise all pages are rebuilt from the start of the WAL."""
    if state is None or state.next_page <= 1 or files.exists(directory / PAGES):
        return state
    if wal.first_lsn > 1:
        raise DataError(
            f"{PAGES} is gone, and the log begins at LSN {wal.first_lsn}: the index cannot be made from it",
            path=directory,
            hint="Restore the engine from its store into a new directory",
        )
    _logger.warning("%s: %s is gone; the index is rebuilt from the log", directory, PAGES)
    return None


# Repack: rewrites the version index in full pages, since random inserts and vacuums leave pages half empty.
#
#     all cells, in order -> pages.db.new, synced -> REPACK in the log -> renamed to pages.db -> in use -> checkpoint
#
# The pages have other numbers then, so page updates of the WAL before the REPACK record and after it refer to different
# trees. Why a crash anywhere is harmless:
#
# - Before the record is in the WAL, nothing has happened: the next open removes `pages.db.new`.
# - With the record and the old file, redo applies the updates before the record, then repeats the repack (the new tree
#   follows from the cells and the LSN alone), then applies the updates after it. The whole WAL builds an index this
#   way too.
# - With the record and the new file, whose header names the record it belongs to (`made_lsn`), redo skips everything up
#   to that record: all pages of the file have its LSN, and have those changes.
# - A changed page of the new file has its image in the WAL first, as after a checkpoint: `image_floor` is after the
#   record. So a torn page does not matter, though no checkpoint was taken since.
# - A damaged page is rebuilt from images after the record only: those before are of pages with other numbers.
#
# Invariants
# - Appliers wait while it runs, as long as it takes to read and write the whole index. Readers go on; one that was
#   about to load a page of the old file restarts its search, and finds the same cells.
# - No cell changes: every state is read as before.
# - If it fails before the record, the engine continues unchanged. After it, the engine must be reopened.


class IndexCompactionReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the index. Appliers waited for `seconds`."""

    cells: int
    pages_before: int
    pages_after: int
    seconds: float


def compact_index(
    core: Core, *, check: Callable[[], None], on_failure: Callable[[BaseException], None]
) -> IndexCompactionReport:
    """Rewrites the index. `check` raises if the engine cannot be changed; `on_failure` is called for unrecoverable
    failures.
    """
    checkpointer = core.checkpointer
    with checkpointer.one_at_a_time, core.applying:
        check()
        begin, before = core.clock.monotonic(), core.tree.next_page
        core.wal.commit()
        core.tree.settle()
        new = core.build_new_index(core.wal.next_lsn)
        try:
            core.wal.add(encode_repack(new.cells))
            core.wal.commit()
            core.use_new_index(new)
        except BaseException as error:
            on_failure(error)
            raise
        seconds = core.clock.monotonic() - begin
    checkpointer.checkpoint()
    return IndexCompactionReport(cells=new.cells, pages_before=before, pages_after=new.next_page, seconds=seconds)
