"""Analysis: what the records behind a checkpoint say about the state that they lead to, without touching a page.

The first part of recovery; and all of it for whoever only looks at an engine, beside its owner or after a crash.

Invariants
- Frames come in order and without a gap, from the beginning of the last complete checkpoint on.
- At most one entry is not complete, the newest; at most one rollback is under way, and it is the newest too.
"""

from __future__ import annotations

from typing import NamedTuple

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
from tidelog.log.frame import Frames


class OpenRollback(NamedTuple):
    """A rollback that has begun and not ended; `undo_next_lsn` is what its last compensation says, None before it."""

    begin_lsn: int
    target_seq: int
    undo_next_lsn: int | None


class Repack(NamedTuple):
    """The index was written anew, with so many cells."""

    lsn: int
    cells: int


class Analysis:
    """The marks, and what is unfinished, as far as the frames go that were taken."""

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
        """Looks at the next frames; where in them the index was written anew."""
        first_lsn = frames.first_offset
        applied_seq, applied_lsn, self.open_seq, self.open_lsn, others = survey(
            *(first_lsn, frames.buffer, frames.positions, frames.lengths, self.open_seq, self.open_lsn)
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
