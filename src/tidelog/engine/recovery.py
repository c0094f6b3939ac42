"""Recovery: from what a crash left to the state at the last entry that is whole on the disk.

    analysis and redo    one sweep over the log from the last complete checkpoint on: pages get what they miss, and it
                         is learned which entry is not complete and which rollback was under way
    undo                 that entry is taken back, that rollback is finished; both write compensations

Invariants
- Redo repeats history, complete entries or not, and does nothing to a page that has a record's changes already.
- Page updates up to the `made_lsn` of the page file are of another file, and are left out.
- Recovery appends only compensations and the end of a rollback. It can be cut off anywhere and begun again.
- Every page that redo reads from the file was not changed since the checkpoint, so it was not being written when the
  power failed; all others begin with their image in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from tidelog.engine.btree import Tree
from tidelog.engine.master import CheckpointState
from tidelog.engine.record import (
    CheckpointEndRecord,
    CompensationRecord,
    MarksRecord,
    Record,
    RepackRecord,
    RollbackBeginRecord,
    RollbackEndRecord,
    VacuumRecord,
    decode_record,
)
from tidelog.engine.survey import survey
from tidelog.engine.undo import Undo
from tidelog.engine.wal import Wal
from tidelog.log.frame import Frames

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


class _Rollback(NamedTuple):
    """A rollback that has begun; `undo_next_lsn` is what its last compensation says."""

    begin_lsn: int
    undo_next_lsn: int | None


class Recovery:
    """One run of it. The marks are what they were when the engine stopped.

    `made_lsn` is that of the page file; `repack` writes the index anew, as the record of an LSN with so many cells did.
    """

    def __init__(
        self, wal: Wal, tree: Tree, state: CheckpointState | None, made_lsn: int, repack: Callable[[int, int], None]
    ) -> None:
        self._wal = wal
        self._tree = tree
        self._begin_lsn = wal.first_lsn if state is None else state.begin_lsn
        self.applied_seq = 0 if state is None else state.applied_seq
        self.low_water_mark = 0 if state is None else state.low_water_mark
        self.high_water_mark = 0 if state is None else state.high_water_mark
        self.history_start_seq = 0 if state is None else state.history_start_seq
        self._open_seq = 0
        self._open_lsn = 0
        self._rollback: _Rollback | None = None
        self._made_lsn = made_lsn
        self._repack = repack
        self._repacks: list[tuple[int, int]] = []

    def run(self) -> RecoveryReport:
        """Analysis, redo, undo."""
        next_lsn = self._wal.next_lsn
        for frames in self._wal.batches(self._begin_lsn, next_lsn):
            self._analyse(frames)
            self._redo(frames)
        undone, resumed = self._open_seq or None, self._rollback is not None
        self._undo()
        return RecoveryReport(
            begin_lsn=self._begin_lsn, next_lsn=next_lsn, undone_seq=undone, finished_rollback=resumed
        )

    def _redo(self, frames: Frames) -> None:
        """What the page file has not got. Where the index was written anew, that is done again in its place."""
        done = min(max(self._made_lsn + 1 - frames.first_offset, 0), frames.count)
        for lsn, cells in self._repacks:
            index = lsn - frames.first_offset
            if index >= done:
                self._tree.redo(frames.slice(done, index))
                self._repack(lsn, cells)
                done = index + 1
        self._repacks.clear()
        self._tree.redo(frames, done)

    def _analyse(self, frames: Frames) -> None:
        first_lsn = frames.first_offset
        applied_seq, applied_lsn, self._open_seq, self._open_lsn, others = survey(
            *(first_lsn, frames.buffer, frames.positions, frames.lengths, self._open_seq, self._open_lsn)
        )
        if applied_lsn:
            self.applied_seq = applied_seq
        for index in others:
            lsn = first_lsn + index
            record = decode_record(frames.payloads(index, index + 1)[0], lsn)
            if isinstance(record, RepackRecord):
                self._repacks.append((lsn, record.cells))
            else:
                self._note(record, lsn, applied_lsn)

    def _note(self, record: Record, lsn: int, applied_lsn: int) -> None:
        match record:
            case MarksRecord():
                self.low_water_mark = max(self.low_water_mark, record.low_water_mark)
            case CheckpointEndRecord():
                self.history_start_seq = max(self.history_start_seq, record.state.history_start_seq)
                self.high_water_mark = max(self.high_water_mark, record.state.high_water_mark)
            case VacuumRecord():
                self.history_start_seq = max(self.history_start_seq, record.history_start_seq)
            case RollbackBeginRecord():
                self._rollback = _Rollback(lsn, None)
            case RollbackEndRecord():
                self._rollback = None
                if lsn > applied_lsn:
                    self.applied_seq = record.target_seq
            case CompensationRecord():
                self._note_compensation(record, lsn)

    def _note_compensation(self, record: CompensationRecord, lsn: int) -> None:
        if self._rollback is not None:
            self._rollback = _Rollback(self._rollback.begin_lsn, record.undo_next_lsn)
        elif lsn > self._open_lsn:
            self._open_lsn = record.undo_next_lsn
            self._open_seq = record.transaction if record.undo_next_lsn else 0

    def _undo(self) -> None:
        undo = Undo(self._tree, self._wal)
        if self._open_seq:
            _logger.warning("seq %d was not complete in the log and is taken back", self._open_seq)
            undo.undo_transaction(self._open_seq, self._open_lsn)
        if self._rollback is not None:
            _logger.warning("a rollback was cut off at LSN %d and is finished", self._rollback.begin_lsn)
            begin = decode_record(self._wal.record(self._rollback.begin_lsn), self._rollback.begin_lsn)
            assert isinstance(begin, RollbackBeginRecord)
            undo.resume_rollback(*self._rollback)
            self.applied_seq = begin.target_seq
