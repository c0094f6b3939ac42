"""Fuzzy checkpoints: entries are applied while one is made, and opening after a crash begins at the last complete one.

    CHECKPOINT_BEGIN -> pages that were dirty then go to the page file -> CHECKPOINT_END -> engine.ckpt

Invariants
- From the record of the beginning on, the first change of every page is preceded by its image in the log. So redo,
  which begins there, needs no page from the file that was being written when the power failed.
- The end is written when all pages that were dirty at the beginning are synced in the page file, and counts when
  `engine.ckpt` names it. A crash before leaves the checkpoint before as the last.
- After a failure that only opening again mends, none is begun and none is ended: undo begins with what a checkpoint
  would hide.
- Only the two records are written under the engine's lock; writing pages is not.
"""

from __future__ import annotations

from pathlib import Path
from threading import Lock, RLock

from tidelog.clock import Clock
from tidelog.engine.btree import Tree
from tidelog.engine.buffer_pool import BufferPool
from tidelog.engine.known_results import ResultTable
from tidelog.engine.marks import Marks
from tidelog.engine.master import CheckpointState, write_master
from tidelog.engine.record import encode_checkpoint_begin, encode_checkpoint_end
from tidelog.engine.wal import Wal
from tidelog.errors import LogFailedError
from tidelog.files import Files


class Checkpointer:
    """Makes checkpoints of one engine, one at a time."""

    def __init__(
        self,
        *,
        directory: Path,
        files: Files,
        clock: Clock,
        tree: Tree,
        pool: BufferPool,
        wal: Wal,
        marks: Marks,
        results: ResultTable,
        applying: RLock,
        last: CheckpointState | None,
    ) -> None:
        self.last = last
        self.history_start_seq = 0 if last is None else last.history_start_seq
        """Versions that were replaced at or before this seq may be gone: states before it are not to be read."""
        self.count = 0
        self.seconds = 0.0
        self._directory = directory
        self._files = files
        self._clock = clock
        self._tree = tree
        self._pool = pool
        self._wal = wal
        self._marks = marks
        self._results = results
        self._applying = applying
        self.one_at_a_time = Lock()
        """Held while a checkpoint is made. Before the engine's own lock, where both are wanted."""
        self._is_stopped = False

    def stop(self) -> None:
        """The engine has failed: the checkpoint that was made last stays the last."""
        self._is_stopped = True

    @property
    def redo_lsn(self) -> int:
        """Where opening would begin: nothing of the log from here on may leave the disk."""
        return 1 if self.last is None else self.last.begin_lsn

    def checkpoint(self) -> CheckpointState:
        """Makes one; it is complete when this returns."""
        with self.one_at_a_time:
            begin = self._clock.monotonic()
            with self._applying:
                self._check_not_stopped()
                state = self._begin()
            self._pool.flush(list(state.dirty_pages))
            with self._applying:
                self._check_not_stopped()
                self._wal.add(encode_checkpoint_end(state))
                self._wal.commit()
            write_master(self._files, self._directory, state)
            self.last = state
            self.count += 1
            self.seconds = self._clock.monotonic() - begin
            return state

    def _check_not_stopped(self) -> None:
        if self._is_stopped:
            raise LogFailedError(
                "the engine failed", operation="checkpoint", path=self._directory, hint="Open it again"
            )

    def _begin(self) -> CheckpointState:
        """Everything that is in memory at this moment, and from here on images come first."""
        position, time_us = self._wal.next_position, self._clock.now_us()
        lsn = self._wal.add(encode_checkpoint_begin(position, time_us))
        self._wal.commit()
        self._tree.image_floor = lsn
        return CheckpointState(
            begin_lsn=lsn,
            begin_position=position,
            time_us=time_us,
            applied_seq=self._marks.accepted_seq,  # all of it is on the disk by now, visible or not
            low_water_mark=self._marks.low_water_mark,
            high_water_mark=self._marks.high_water_mark,
            history_start_seq=self.history_start_seq,
            next_page=self._tree.next_page,
            dirty_pages=self._pool.dirty_pages(),
            transactions={},
            results=self._results.known_up_to(self._marks.accepted_seq),
        )
