"""The hot half of an engine: its log, its pages and what is built on them, opened and recovered.

    wal/          the log: records of entries, with their values
    pages.db      the version index
    engine.ckpt   the last complete checkpoint

Invariants
- The lock of the log is the lock of the engine: one process has it open.
- What is found when it opens is the state after the last entry that is whole in the log, whatever was cut off where.
- Pages can be made from the log as long as all of it is here. Once files of it have left, `engine.ckpt` and the page
  file are needed, or a restore from the store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from threading import RLock

import msgspec

from tidelog.clock import Clock
from tidelog.engine.applier import Applier
from tidelog.engine.btree import Tree
from tidelog.engine.buckets import Buckets
from tidelog.engine.buffer_pool import BufferPool
from tidelog.engine.checkpointer import Checkpointer
from tidelog.engine.index_compaction_file import NewIndex, build_new_index, remove_unused_index, use_new_index
from tidelog.engine.known_results import KnownResults, ResultTable
from tidelog.engine.lost_log import refuse_lost_end, refuse_missing_files, refuse_older_than_pages
from tidelog.engine.marks import Marks
from tidelog.engine.master import MASTER, CheckpointState, read_master
from tidelog.engine.page_file import PageFile
from tidelog.engine.page_rebuild import rebuild_page
from tidelog.engine.record import CheckpointEndRecord, decode_record, encode_marks, encode_structure
from tidelog.engine.record_header import CHECKPOINT_END
from tidelog.engine.recovery import Recovery
from tidelog.engine.restore_marker import refuse_half_restored
from tidelog.engine.retention import History
from tidelog.engine.settings import EngineSettings
from tidelog.engine.survey import survey
from tidelog.engine.undo import Undo
from tidelog.engine.versions import Versions
from tidelog.engine.wal import FIRST, Wal
from tidelog.engine.wal_files import Anchor
from tidelog.errors import CorruptionError, DataError, GapError, LockedError
from tidelog.files import Files, explained
from tidelog.log.frame import Frames

_logger = logging.getLogger("tidelog.engine")
ShippedPieces = Callable[[int], Iterator[Iterable[Frames]]]
WAL = "wal"
PAGES = "pages.db"


class Core:
    """The parts of an open engine. `applying` is held by whoever changes anything."""

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
        self.applying = RLock()
        self._shipped_pieces = shipped_pieces
        remove_unused_index(files, directory / PAGES)
        self.page_file = _page_file(files, directory / PAGES, is_new=state is None)
        try:
            self._load(state)
        except BaseException:
            self.page_file.close()
            raise

    def _load(self, state: CheckpointState | None) -> None:
        """Everything that is in memory, from the pages and the log."""
        directory, settings, files, clock, wal = self.directory, self.settings, self.files, self.clock, self.wal
        is_new = state is None and wal.next_lsn == 1
        refuse_older_than_pages(self.page_file, wal)
        self.pool = BufferPool(
            self.page_file,
            settings.buffer_pool_size,
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
        report = recovery.run()
        self.recovery = msgspec.structs.replace(report, seconds=clock.monotonic() - begin)
        self.buckets = Buckets()
        self.buckets.load(self.tree)
        self.versions = Versions(self.tree, self.buckets)
        found = recovery.found
        self.marks = Marks(found.applied_seq, found.low_water_mark, found.high_water_mark)
        self.applier = Applier(self.tree, wal, self.versions, settings, clock)
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
            applying=self.applying,
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
        """Opens what is in a directory, or begins a new engine in an empty one.

        `shipped_pieces` gives the log below an LSN as it is in the store, newest object first: for damaged pages.
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
        """Lets go of the files. Pages that are dirty stay what they were: the log has it all."""
        try:
            self.wal.close()
        finally:
            self.page_file.close()

    def fail(self) -> None:
        """Pages and log do not belong together any more: from here on nothing of it is made durable."""
        self.checkpointer.stop()
        self.pool.abandon()

    def _tree_at(self, state: CheckpointState) -> Tree:
        """The tree as the page file has it, which may have been written anew after the checkpoint."""
        made_lsn = self.page_file.made_lsn
        is_newer = made_lsn >= state.begin_lsn
        tree = Tree(self.pool, self._log_structure, self.page_file.page_count if is_newer else state.next_page)
        tree.image_floor = max(state.begin_lsn, made_lsn + 1)
        return tree

    # The page file, written anew: see `index_compaction.py`

    def build_new_index(self, lsn: int) -> NewIndex:
        """All cells of now in a file of its own, which is not used yet; as the record with this LSN will say."""
        return build_new_index(self.files, self.directory / PAGES, self.tree, lsn)

    def use_new_index(self, new: NewIndex) -> None:
        """Takes it for the page file. Nobody changes anything meanwhile."""
        self.page_file = use_new_index(self.files, self.directory / PAGES, self.tree, new)

    def _repack(self, lsn: int, cells: int) -> None:
        """Redo of the record that says so."""
        new = self.build_new_index(lsn)
        if new.cells != cells:
            raise DataError(
                f"the index had {cells} cells when it was written anew at LSN {lsn}, and has {new.cells} now",
                path=self.directory,
                hint="Restore the engine from its store into a new directory",
            )
        self.use_new_index(new)

    def note_low_water_mark(self, seq: int) -> None:
        """Remembered across restarts: what is at or below it is never rolled back. No sync is worth waiting for it."""
        self.wal.add(encode_marks(seq))
        self.wal.hand_over()

    def roll_back(self, seq: int) -> None:
        """Undoes every entry above a seq."""
        self.undo.roll_back(seq)
        self.buckets.load(self.tree)

    def _log_structure(self, updates: bytes) -> int:
        return self.wal.add(encode_structure(updates))

    def _rebuild(self, page_id: int) -> bytearray:
        """A page of the file is damaged: the log has all that was ever done to it."""
        return rebuild_page(page_id, self._pieces_of_log())

    def _pieces_of_log(self) -> Iterator[Iterable[Frames]]:
        """The log since the page file was made, newest file first, then what is in the store."""
        first_lsn, stop_lsn = self.page_file.made_lsn + 1, self.wal.durable_lsn + 1
        for span in reversed(self.wal.spans()):
            if span.first_lsn < stop_lsn and first_lsn < span.next_lsn:
                yield self.wal.batches(max(span.first_lsn, first_lsn), min(span.next_lsn, stop_lsn))
        if self._shipped_pieces is not None and first_lsn < self.wal.first_lsn:
            for piece in self._shipped_pieces(self.wal.first_lsn):
                yield _from_lsn(piece, first_lsn)


def _known_at(state: CheckpointState | None) -> KnownResults:
    """What a checkpoint knows of the entries before it; before the first of all there was none."""
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
        raise


def _page_file(files: Files, path: Path, *, is_new: bool) -> PageFile:
    """Without a checkpoint nothing in the file is believed: all pages are in the log."""
    return PageFile.create(files, path) if is_new or not files.exists(path) else PageFile(files, path)


def _found_in_log(wal: Wal, directory: Path, reason: str | None) -> CheckpointState | None:
    """Without `engine.ckpt`: the last checkpoint that the log says is complete."""
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
    """The checkpoint, if the page file that it speaks of is there; else all pages come from the log, from its start."""
    if state is None or state.next_page <= 1 or files.exists(directory / PAGES):
        return state
    if wal.first_lsn > 1:
        raise DataError(
            f"{PAGES} is gone, and the log begins at LSN {wal.first_lsn}: the index cannot be made from it",
            path=directory,
            hint="Restore the engine from its store into a new directory",
        )
    _logger.warning("%s: %s is gone; the index is made anew from the log", directory, PAGES)
    return None
