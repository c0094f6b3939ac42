"""Files that are written beside the log and become its next ones: rows that count together, or not at all.

    wal.prepared-0-0000000000.tmp    the first file of the first writer; adopted, it is renamed to the log's next file

Invariants
- Nothing of it is in the log before it is adopted. What a crash leaves is removed at the next opening.
- Only whoever holds the appends of others back has such files, since their frames carry the offsets that come next.
- Files are synced before they are adopted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from threading import Lock

from tidelog.clock import Clock
from tidelog.files import Files, explained
from tidelog.log.active_file import ActiveFile
from tidelog.log.frame import Frames
from tidelog.log.names import is_prepared, prepared_name
from tidelog.log.segment import Segment
from tidelog.log.segments import Segments
from tidelog.log.settings import LogSettings


class PreparedFiles:
    """Writes frames from one offset on, into files of the log's usual size. One thread uses it."""

    def __init__(
        self,
        files: Files,
        clock: Clock,
        directory: Path,
        settings: LogSettings,
        time_field: int | None,
        first_offset: int,
        number: int,
    ) -> None:
        """`number` tells several apart that are written at the same time."""
        self._files = files
        self._directory = directory
        self._segments = Segments([], first_offset)
        self._active = ActiveFile(
            *(files, clock, directory, settings, self._segments, Lock(), time_field, 0),
            name_of=lambda seq: prepared_name(number, seq),
        )

    @property
    def next_offset(self) -> int:
        """The number that the next frame gets."""
        last = self._segments.last
        return self._segments.start_offset if last is None else last.next_offset

    def write(self, frames: Frames) -> None:
        """Takes frames, which are numbered anew."""
        rest = frames.renumbered(self.next_offset) if frames.count else frames
        with explained("write", self._directory):
            while rest.count:
                if self._active.must_seal(rest):
                    self._seal()
                part = self._active.write(rest)
                rest = rest.slice(part.count, rest.count)

    def finish(self) -> list[Segment]:
        """Everything is on the disk, under names that do not count; the files in order."""
        with explained("write", self._directory):
            self._seal()
        return list(self._segments)

    def _seal(self) -> None:
        self._active.sync()
        self._active.seal()

    def discard(self) -> None:
        """Removes what was written."""
        self._active.close()
        for segment in self._segments:
            with contextlib.suppress(OSError):
                self._files.remove(segment.path)


def remove_prepared(files: Files, directory: Path, names: Iterable[str]) -> None:
    """Removes what was prepared and not adopted before a crash."""
    for name in filter(is_prepared, names):
        files.remove(directory / name)
