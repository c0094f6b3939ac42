"""Garbage on the disk of an engine without a store: files of its log that nobody needs any more.

Invariants
- The last file stays, and so does everything from the beginning of the last complete checkpoint on: opening begins
  there.
- Everything that a rollback would read stays. Entries that count are in the order of their seqs: if the first operation
  behind a file is at or below the low-water mark, no rollback ever looks further back than that.
- Files go oldest first, so a crash leaves a log that begins later and has no hole.
"""

from __future__ import annotations

from typing import Final

from tidelog.engine.core import Core
from tidelog.engine.garbage_plan import Piece
from tidelog.engine.record_header import OPERATION, decode_header
from tidelog.log.frame import Frames


class FileGarbage:
    """The garbage of one engine on its disk."""

    place: Final = "disk"

    def __init__(self, core: Core) -> None:
        self._core = core

    def pieces(self) -> list[Piece]:
        """The files of the log, oldest first."""
        found = []
        for span in self._core.wal.spans():
            size = span.next_position - span.first_position
            found.append(Piece(span.path.name, span.first_lsn, span.next_lsn, size, size))
        return found

    def needed_from_lsn(self) -> int:
        """The last boundary between files that opening and rollbacks leave behind."""
        if self._core.marks.high_water_mark:
            return 0  # a store has the beginning of this log, and is not at hand: its files are not ours to drop
        redo_lsn = self._core.checkpointer.redo_lsn
        boundaries = [span.next_lsn for span in self._core.wal.spans()[:-1] if span.next_lsn <= redo_lsn]
        return next((lsn for lsn in reversed(boundaries) if self._is_behind_rollbacks(lsn)), 0)

    def _is_behind_rollbacks(self, lsn: int) -> bool:
        low_water_mark = self._core.marks.low_water_mark
        wal = self._core.wal
        for frames in wal.batches(lsn, wal.durable_lsn + 1):
            seq = _first_seq(frames)
            if seq is not None:
                return seq <= low_water_mark
        return False

    def compacted_lsn(self) -> int:
        """Compacted data is in stores alone."""
        return 0

    def limit(self, horizon: int) -> int:
        """Nobody else reads here."""
        return horizon

    def move_start(self, horizon: int, keep_versions: int) -> int:
        """The log alone says where history begins."""
        return horizon

    def drop_below(self, lsn: int) -> tuple[int, int]:
        """Deletes the files all of whose records are below an LSN; how many, and their bytes."""
        wal = self._core.wal
        before = len(wal.spans())
        freed = wal.remove_below(min(lsn, self.needed_from_lsn()))
        return before - len(wal.spans()), freed

    def finish(self) -> None:
        """Nothing is ever left half done."""


def _first_seq(frames: Frames) -> int | None:
    for index, at in enumerate(memoryview(frames.positions).cast("Q")):
        if frames.buffer[at] == OPERATION:
            lsn = frames.first_offset + index
            return decode_header(frames.payloads(index, index + 1)[0], lsn).transaction
    return None
