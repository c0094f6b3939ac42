"""Crash recovery (ARIES): recovers the state after the last complete entry in the WAL; also rollback, and the detection
of a lost WAL.

    analysis and redo    one pass over the WAL from the last complete checkpoint on: brings pages up to date, and finds
                         the incomplete entry and the rollback in progress
    undo                 undoes that entry, finishes that rollback; both write compensations

Invariants
- Redo repeats history, complete entries or not, and skips pages that have a record's changes already.
- Page updates up to the `made_lsn` of the page file belong to another file, and are skipped.
- Recovery appends only compensations and the end of a rollback. It can be interrupted anywhere and restarted.
- Every page that redo reads from the file was not changed since the checkpoint, so it was not being written when the
  power failed; all others begin with their image in the WAL, or were split from one that did.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from tidelog._native import survey
from tidelog.cold.ownership import NAME as CLAIM_FILE
from tidelog.engine.btree.page import decode, encode
from tidelog.engine.btree.page_file import PageFile
from tidelog.engine.btree.tree import Tree
from tidelog.engine.mvcc.cells import MAX_SEQ
from tidelog.engine.mvcc.known_results import ResultTable
from tidelog.engine.recovery.checkpoint import MASTER
from tidelog.engine.wal.operations import decode_operation
from tidelog.engine.wal.record_header import COMPENSATION, LAST, OPERATION, ROLLBACK_BEGIN, ROLLBACK_END, decode_header
from tidelog.engine.wal.records import (
    CheckpointEndRecord,
    CheckpointState,
    CompensationRecord,
    MarksRecord,
    Record,
    RepackRecord,
    RollbackBeginRecord,
    RollbackEndRecord,
    VacuumRecord,
    decode_record,
    encode_compensation,
    encode_rollback_begin,
    encode_rollback_end,
)
from tidelog.engine.wal.wal import SyncMode, Wal
from tidelog.errors import DataError, DiskFullError
from tidelog.files import Files
from tidelog.log.binding import bound
from tidelog.log.directory import CHECKPOINT, wal_files, wal_name
from tidelog.log.frame import Frames
from tidelog.log.segment import Checkpoint, read_checkpoint

# Analysis: derives the marks and the unfinished work from the records after a checkpoint, without touching a page.
#
# It is the first phase of recovery, and all that a read-only inspection of an engine needs, next to its owner or after
# a crash.
#
# Invariants
# - Frames come in order and without a gap, from the beginning of the last complete checkpoint on.
# - At most one entry is incomplete, the newest; at most one rollback is in progress, and it is the newest too.


class OpenRollback(NamedTuple):
    """A rollback that has begun and not ended; `undo_next_lsn` is that of its last compensation, None before it."""

    begin_lsn: int
    target_seq: int
    undo_next_lsn: int | None


class Repack(NamedTuple):
    """A rewrite of the index, with this many cells."""

    lsn: int
    cells: int


class Analysis:
    """The marks and the unfinished work as of the frames analysed so far."""

    def __init__(self, state: CheckpointState | None) -> None:
        self.applied_seq = 0 if state is None else state.applied_seq
        self.low_water_mark = 0 if state is None else state.low_water_mark
        self.high_water_mark = 0 if state is None else state.high_water_mark
        self.history_start_seq = 0 if state is None else state.history_start_seq
        self.open_seq = 0
        """The entry that is not complete; 0 for none."""
        self.open_lsn = 0
        """What of it is to be undone next."""
        self.rollback: OpenRollback | None = None

    def take(self, frames: Frames) -> list[Repack]:
        """Analyses the next frames; returns where in them the index was rewritten."""
        first_lsn = frames.first_offset
        applied_seq, applied_lsn, self.open_seq, self.open_lsn, others = survey(
            first_lsn, frames.buffer, frames.positions, frames.lengths, self.open_seq, self.open_lsn
        )
        if applied_lsn:
            self.applied_seq = applied_seq
        repacks: list[Repack] = []
        for index in others:
            lsn = first_lsn + index
            record = decode_record(frames.payloads(index, index + 1)[0], lsn)
            if isinstance(record, RepackRecord):
                repacks.append(Repack(lsn, record.cells))
            else:
                self._note(record, lsn, applied_lsn)
        return repacks

    def _note(self, record: Record, lsn: int, applied_lsn: int) -> None:
        match record:
            case MarksRecord():
                self.low_water_mark = max(self.low_water_mark, record.low_water_mark)
            case CheckpointEndRecord():
                self.history_start_seq = max(self.history_start_seq, record.state.history_start_seq)
                # It may have learned both from the store, after a crash that took its own record of the first.
                self.low_water_mark = max(self.low_water_mark, record.state.low_water_mark)
                self.high_water_mark = max(self.high_water_mark, record.state.high_water_mark)
            case VacuumRecord():
                self.history_start_seq = max(self.history_start_seq, record.history_start_seq)
            case RollbackBeginRecord():
                self.rollback = OpenRollback(lsn, record.target_seq, None)
            case RollbackEndRecord():
                self.rollback = None
                if lsn > applied_lsn:
                    self.applied_seq = record.target_seq
            case CompensationRecord():
                self._note_compensation(record, lsn)

    def _note_compensation(self, record: CompensationRecord, lsn: int) -> None:
        if self.rollback is not None:
            self.rollback = self.rollback._replace(undo_next_lsn=record.undo_next_lsn)
        elif lsn > self.open_lsn:
            self.open_lsn = record.undo_next_lsn
            self.open_seq = record.transaction if record.undo_next_lsn else 0


# Undo: undoes entries that were applied, and entries of which a crash left only a part.
#
#     ROLLBACK_BEGIN(target) -> COMPENSATION ... COMPENSATION -> ROLLBACK_END        the orchestrator discarded a tail
#     COMPENSATION ... COMPENSATION                                                  a batch without its last record
#
# Invariants
# - What to undo is found in the WAL, newest first, and each step is a record of its own that is never undone itself.
#   Its `undo_next_lsn` says what is left, so that an interrupted undo resumes where it was.
# - Undo is logical, by key: the cell is removed, or restored, in whatever page it is by now. A split in between does
#   not matter.
# - Operations above the target of an earlier rollback were undone by it, and are skipped. So are those of a batch that
#   was never completed: compensations outside a rollback identify them.


# Records that are written before the log is asked to take them: what is undone may be much.
_COMMIT_EVERY = 4096


class Victim(NamedTuple):
    """An operation to undo."""

    lsn: int
    transaction: int


class Undo:
    """Takes operations back."""

    def __init__(self, tree: Tree, wal: Wal, *, waits_for_room: bool = True) -> None:
        """`waits_for_room` is false where what is undone is undone again if its records never reach the disk."""
        self._tree = tree
        self._wal = wal
        self._waits_for_room = waits_for_room

    def roll_back(self, target_seq: int) -> range:
        """Undoes all entries above a seq; returns the range of LSNs that was undone, including its own records."""
        from_lsn = self._wal.next_lsn - 1
        begin_lsn = self._wal.add(encode_rollback_begin(target_seq, from_lsn))
        first_lsn = self._undo(list(self._victims(from_lsn, target_seq)), begin_lsn)
        return range(first_lsn, self._finish(target_seq, begin_lsn) + 1)

    def resume_rollback(self, begin_lsn: int, undo_next_lsn: int | None) -> range:
        """Resumes an interrupted rollback; `undo_next_lsn` is that of its last compensation, if any."""
        begin = decode_record(self._wal.record(begin_lsn), begin_lsn)
        if not isinstance(begin, RollbackBeginRecord):
            raise DataError(f"a rollback ends whose beginning, LSN {begin_lsn}, is another record")
        victims = list(self._victims(begin.from_lsn, begin.target_seq))
        first_lsn = min([victim.lsn for victim in victims], default=begin_lsn)
        left = victims if undo_next_lsn is None else [v for v in victims if v.lsn <= undo_next_lsn]
        self._undo(left, begin_lsn)
        return range(first_lsn, self._finish(begin.target_seq, begin_lsn) + 1)

    def undo_transaction(self, transaction: int, last_lsn: int) -> None:
        """Undoes an entry whose last record is missing, from its newest record that is not undone yet."""
        chain: list[Victim] = []
        lsn = last_lsn
        while lsn:
            header = decode_header(self._wal.record(lsn), lsn)
            if header.kind != OPERATION or header.transaction != transaction:
                raise DataError(f"LSN {lsn} does not belong to seq {transaction}, whose records lead to it")
            chain.append(Victim(lsn, transaction))
            lsn = header.previous_lsn
        self._undo(chain, 0)
        self._commit()

    def _finish(self, target_seq: int, begin_lsn: int) -> int:
        end_lsn = self._wal.add(encode_rollback_end(target_seq, begin_lsn))
        self._commit()
        return end_lsn

    def _commit(self) -> None:
        try:
            self._wal.commit()
        except DiskFullError:
            if self._waits_for_room or self._wal.log.next_offset < self._wal.next_lsn:
                raise  # or the log has no room for them in its memory either
        self._tree.settle()

    def _victims(self, from_lsn: int, target_seq: int) -> Iterator[Victim]:
        """The operations above a seq that still count, newest first."""
        walk = _Walk(from_lsn)
        for lsn, payload in self._wal.backwards(from_lsn, self._wal.first_lsn):
            seq = walk.counts(lsn, payload)
            if seq is None:
                continue
            if seq <= target_seq:
                return
            yield Victim(lsn, seq)

    def _undo(self, victims: list[Victim], previous_lsn: int) -> int:
        """Undoes them in this order; the lowest LSN of them, or that of what began it. The caller commits."""
        for number, victim in enumerate(victims):
            next_lsn = victims[number + 1].lsn if number + 1 < len(victims) else 0
            previous_lsn = self._undo_one(victim, previous_lsn, next_lsn)
            if number % _COMMIT_EVERY == _COMMIT_EVERY - 1:
                self._commit()
        return victims[-1].lsn if victims else previous_lsn

    def _undo_one(self, victim: Victim, previous_lsn: int, next_lsn: int) -> int:
        record = decode_operation(self._wal.record(victim.lsn), victim.lsn)
        done = decode(record.updates, victim.lsn)
        if len(done) > 1:
            raise DataError(f"an operation changes {len(done)} cells, LSN {victim.lsn}")
        steps = [self._tree.reversal(update) for update in done]
        updates = b"".join(encode(step) for step in steps)
        lsn = self._wal.add(encode_compensation(victim.transaction, previous_lsn, next_lsn, victim.lsn, updates))
        for step in steps:
            self._tree.apply(step, lsn)
        return lsn


class _Walk:
    """A way back through the log: which operations count, given what came after them."""

    def __init__(self, from_lsn: int) -> None:
        self._below_lsn = from_lsn + 1
        self._ceiling = MAX_SEQ
        self._unfinished: int | None = None

    def counts(self, lsn: int, payload: bytes) -> int | None:
        """The seq of an operation that was neither undone nor left unfinished; None for all else."""
        if lsn >= self._below_lsn:
            return None  # inside a rollback that is complete: what it did is done
        header = decode_header(payload, lsn)
        if header.kind == OPERATION:
            return self._operation(header.transaction, is_last=bool(header.flags & LAST))
        if header.kind == COMPENSATION:
            self._unfinished = header.transaction
        elif header.kind == ROLLBACK_BEGIN:
            raise DataError(f"a rollback that begins at LSN {lsn} has no end")
        elif header.kind == ROLLBACK_END:
            self._pass_over(payload, lsn)
        return None

    def _operation(self, seq: int, *, is_last: bool) -> int | None:
        if seq == self._unfinished and not is_last:
            return None
        self._unfinished = None
        return seq if seq <= self._ceiling else None

    def _pass_over(self, payload: bytes, lsn: int) -> None:
        end = decode_record(payload, lsn)
        assert isinstance(end, RollbackEndRecord)
        self._below_lsn = end.begin_lsn
        self._ceiling = min(self._ceiling, end.target_seq)


_logger = logging.getLogger("tidelog.engine")


class RecoveryReport(msgspec.Struct, frozen=True, kw_only=True):
    """What opening found and did."""

    begin_lsn: int
    next_lsn: int
    undone_seq: int | None
    finished_rollback: bool
    seconds: float = 0.0

    @property
    def records(self) -> int:
        """How many records redo looked at."""
        return self.next_lsn - self.begin_lsn


class Recovery:
    """One run of recovery. The marks in `found` are those when the engine stopped; `results` learns of all entries.

    `made_lsn` is that of the page file; `repack` rewrites the index as the record of an LSN with this many cells did.
    """

    def __init__(
        self,
        wal: Wal,
        tree: Tree,
        state: CheckpointState | None,
        made_lsn: int,
        repack: Callable[[int, int], None],
        results: ResultTable,
    ) -> None:
        self._wal = wal
        self._tree = tree
        self._begin_lsn = wal.first_lsn if state is None else state.begin_lsn
        self._made_lsn = made_lsn
        self._repack = repack
        self._results = results
        self.found = Analysis(state)

    def run(self) -> RecoveryReport:
        """Analysis, redo, undo."""
        next_lsn = self._wal.next_lsn
        for frames in self._wal.batches(self._begin_lsn, next_lsn):
            self._redo(frames, self.found.take(frames))
            self._results.take_frames(frames)
        undone, resumed = self.found.open_seq or None, self.found.rollback is not None
        self._undo()
        return RecoveryReport(
            begin_lsn=self._begin_lsn, next_lsn=next_lsn, undone_seq=undone, finished_rollback=resumed
        )

    def _redo(self, frames: Frames, repacks: list[Repack]) -> None:
        """Redoes what the page file lacks. Where the WAL has a REPACK record, the rewrite of the index is repeated in
        its place.
        """
        done = min(max(self._made_lsn + 1 - frames.first_offset, 0), frames.count)
        for lsn, cells in repacks:
            index = lsn - frames.first_offset
            if index >= done:
                self._tree.redo(frames.slice(done, index))
                self._repack(lsn, cells)
                done = index + 1
        self._tree.redo(frames, done)

    def _undo(self) -> None:
        """On a full disk as well: the next opening would do the same, and the log has the records in its memory."""
        undo, found = Undo(self._tree, self._wal, waits_for_room=False), self.found
        if found.open_seq:
            _logger.warning("seq %d was not complete in the log and is taken back", found.open_seq)
            undo.undo_transaction(found.open_seq, found.open_lsn)
        if found.rollback is not None:
            _logger.warning("a rollback was cut off at LSN %d and is finished", found.rollback.begin_lsn)
            undo.resume_rollback(found.rollback.begin_lsn, found.rollback.undo_next_lsn)
            found.applied_seq = found.rollback.target_seq


# Detects on opening that the WAL lost its end or all of it, while pages and marks refer to it.
#
# Three sources say what must exist, none of which costs an entry anything:
#
#     wal/wal.ckpt    the files, and how much of each was synced when a file was begun, ended or closed
#     engine.ckpt     where the last checkpoint began: its record is in the WAL
#     pages.db        a page is never on the disk before the record of its last change
#
# Invariants
# - Nothing is changed before missing files are detected, so that they can be put back.
# - With `wal_sync_mode` "none" a power failure may lose any tail of the WAL: then only what contradicts pages and marks
#   is refused.


_HINT = "Put the files back, or restore the engine from its store into a new directory; its orchestrator has the rest"


def refuse_missing_files(files: Files, wal_directory: Path, state: CheckpointState | None, mode: SyncMode) -> None:
    """DataError when files of the log are gone, or shorter than they were when they were synced."""
    # Before the files are listed: an engine that is being closed elsewhere begins a file first, and then names it.
    known, _ = read_checkpoint(files, wal_directory)
    names = files.list(wal_directory) if files.is_directory(wal_directory) else []
    listed = wal_files(names)
    if state is not None and not listed and CLAIM_FILE not in names:  # a restore begins without, and has claimed
        raise DataError(
            f"{MASTER} is there, and no file of the log: the objects were in it", path=wal_directory, hint=_HINT
        )
    if known is None or not known.files or mode == "none":
        return
    newest_seq = listed[-1][0] if listed else -1
    if newest_seq < known.file_seq:
        raise DataError(
            f"{wal_name(known.file_seq)} is gone, in which LSN {known.last_offset} was synced",
            path=wal_directory,
            hint=_HINT,
        )
    if newest_seq == known.file_seq:
        _refuse_short_file(files, wal_directory / listed[-1][1], known)


def _refuse_short_file(files: Files, path: Path, known: Checkpoint) -> None:
    synced_bytes = known.files[-1].size
    file = bound(files).open(path)
    try:
        size = file.size()
    finally:
        file.close()
    if size < synced_bytes:
        raise DataError(
            f"the file has {size} bytes, {CHECKPOINT} knows of {synced_bytes}, synced up to LSN {known.last_offset}",
            path=path,
            hint=_HINT,
        )


def refuse_lost_end(wal: Wal, state: CheckpointState | None) -> None:
    """DataError when the record of the last checkpoint is not in the log; a restore begins with an empty one."""
    if state is None or state.begin_lsn < wal.next_lsn:
        return
    if wal.first_lsn < wal.next_lsn or state.begin_lsn > wal.next_lsn:
        raise DataError(
            f"the last checkpoint began at LSN {state.begin_lsn}, and the log ends at LSN {wal.next_lsn - 1}",
            path=wal.log.directory,
            hint=_HINT,
        )


def refuse_older_than_pages(page_file: PageFile, wal: Wal) -> None:
    """DataError when the page file was made behind the end of the log."""
    if page_file.made_lsn >= wal.next_lsn:
        raise DataError(
            f"{page_file.path.name} was made at LSN {page_file.made_lsn}, and the log ends at {wal.next_lsn - 1}",
            path=page_file.path,
            hint=_HINT,
        )
