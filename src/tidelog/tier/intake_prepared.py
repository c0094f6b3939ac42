"""The rows of a large consignment as files that can become the log's next ones: read, checked and written once.

Invariants
- Nothing is in the log before all of it was read and found to be what was committed.
- Several threads write, each the rows of some parts that follow each other: where the rows of a part begin follows from
  the manifest, and files are in order of the parts.
- One that fails stops the others, and nothing of it is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import accumulate
from threading import Event

from tidelog.errors import ClosedError
from tidelog.log import Log
from tidelog.log.frame import Frames
from tidelog.log.prepared import PreparedFiles
from tidelog.log.segment import Segment
from tidelog.tier.intake_part import StagedPart
from tidelog.tier.intake_rows import ConsignmentRows

_LANES = 2
_LEAST_LANE_BYTES = 32 << 20


class PreparedRows:
    """Files beside the log with all rows of a consignment. `check` is called again and again, and raises to end it."""

    def __init__(self, log: Log, rows: ConsignmentRows, first_offset: int, check: Callable[[], None]) -> None:
        self.segments: list[Segment] = []
        self._rows = rows
        self._check = check
        self._has_failed = Event()
        lanes = _lanes(rows.parts())
        begins = accumulate((sum(part.rows for part in lane) for lane in lanes), initial=first_offset)
        self._lanes = [(lane, log.prepare_files(next(begins), number)) for number, lane in enumerate(lanes)]

    def write(self, check_frames: Callable[[Frames], None]) -> None:
        """Reads and writes everything. What it raises leaves nothing behind."""
        try:
            if len(self._lanes) == 1:
                self.segments = self._write_lane(*self._lanes[0], check_frames)
            else:
                self._write_lanes(check_frames)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Removes the files, unless they are the log's."""
        for _, files in self._lanes:
            files.discard()

    def _write_lanes(self, check_frames: Callable[[Frames], None]) -> None:
        with ThreadPoolExecutor(len(self._lanes), "tidelog-intake-lane") as threads:
            futures = [threads.submit(self._write_lane, *lane, check_frames) for lane in self._lanes]
            try:
                wait(futures)
            except BaseException:  # Ctrl-C: leaving this block waits for the threads, which need not go on to their end
                self._has_failed.set()
                raise
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, _StoppedError)), errors[0])
        self.segments = [segment for future in futures for segment in future.result()]

    def _write_lane(
        self, parts: Sequence[StagedPart], files: PreparedFiles, check_frames: Callable[[Frames], None]
    ) -> list[Segment]:
        try:
            for part in parts:
                for frames in self._rows.whole_part(part):
                    self._check_going_on()
                    check_frames(frames)
                    files.write(frames)
            return files.finish()
        except BaseException:
            self._has_failed.set()
            raise

    def _check_going_on(self) -> None:
        self._check()
        if self._has_failed.is_set():
            raise _StoppedError("another part of the same rows cannot be taken in")


class _StoppedError(ClosedError):
    """Another thread has failed, and its error is the one to be seen."""


def _lanes(parts: Sequence[StagedPart]) -> list[Sequence[StagedPart]]:
    """The parts in order, cut into about equal halves where that is worth a thread."""
    total = sum(part.bytes for part in parts)
    if total < _LANES * _LEAST_LANE_BYTES:
        return [parts]
    ends = list(accumulate(part.bytes for part in parts))
    cut = min(range(1, len(parts) + 1), key=lambda count: abs(2 * ends[count - 1] - total))
    return [lane for lane in (parts[:cut], parts[cut:]) if lane]
