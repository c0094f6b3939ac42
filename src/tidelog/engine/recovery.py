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

import msgspec

from tidelog.engine.analysis import Analysis, Repack
from tidelog.engine.btree import Tree
from tidelog.engine.known_results import ResultTable
from tidelog.engine.master import CheckpointState
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


class Recovery:
    """One run of it. The marks in `found` are what they were when the engine stopped; `results` learns of all entries.

    `made_lsn` is that of the page file; `repack` writes the index anew, as the record of an LSN with so many cells did.
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
        """What the page file has not got. Where the index was written anew, that is done again in its place."""
        done = min(max(self._made_lsn + 1 - frames.first_offset, 0), frames.count)
        for lsn, cells in repacks:
            index = lsn - frames.first_offset
            if index >= done:
                self._tree.redo(frames.slice(done, index))
                self._repack(lsn, cells)
                done = index + 1
        self._tree.redo(frames, done)

    def _undo(self) -> None:
        undo, found = Undo(self._tree, self._wal), self.found
        if found.open_seq:
            _logger.warning("seq %d was not complete in the log and is taken back", found.open_seq)
            undo.undo_transaction(found.open_seq, found.open_lsn)
        if found.rollback is not None:
            _logger.warning("a rollback was cut off at LSN %d and is finished", found.rollback.begin_lsn)
            undo.resume_rollback(found.rollback.begin_lsn, found.rollback.undo_next_lsn)
            found.applied_seq = found.rollback.target_seq
