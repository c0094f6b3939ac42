"""The file at the end of the log: written, synced, and closed for good when it is full or old.

Invariants
- Only the writer calls in here, and it is served by one thread at a time.
- A segment's `size` and `next_offset` move only after its bytes were written, in one step and under the mutex, so a
  reader never looks at half a frame.
- A write that failed is made again at the same position, over whatever it left behind.
- A new file is made only after the one before is synced, and its name is durable before anything in it can be.
- A descriptor is given back only when everything is synced: an error of the disk is told to a descriptor that was open
  when it happened.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock

from tidelog.clock import Clock
from tidelog.errors import LogFailedError
from tidelog.files import File, Files
from tidelog.limits import is_out_of_descriptors
from tidelog.log.frame import HEADER_BYTES, Frames
from tidelog.log.names import wal_name
from tidelog.log.segment import Segment
from tidelog.log.segments import Segments
from tidelog.log.settings import LogSettings


class ActiveFile:
    """Where frames go. There is none until the first frame after opening or sealing needs one."""

    def __init__(
        self,
        files: Files,
        clock: Clock,
        directory: Path,
        settings: LogSettings,
        segments: Segments,
        mutex: Lock,
        time_field: int | None,
        next_seq: int,
        name_of: Callable[[int], str] = wal_name,
    ) -> None:
        self._files = files
        self._clock = clock
        self._directory = directory
        self._max_bytes = settings.rotate_max_bytes
        self._max_age_us = settings.rotate_max_seconds * 1_000_000
        self._segments = segments
        self._mutex = mutex
        self._time_field = time_field
        self._next_seq = next_seq
        self._name_of = name_of
        self._segment: Segment | None = None
        self._file: File | None = None
        self.unsynced_bytes = 0
        self.sealed_files = 0

    def adopt(self, segment: Segment) -> None:
        """Goes on in a file that was there when the log was opened."""
        self._segment = segment

    @property
    def is_there(self) -> bool:
        """Whether there is a file that the next frame may go into."""
        return self._segment is not None

    @property
    def is_open(self) -> bool:
        """Whether a descriptor is in use for it."""
        return self._file is not None

    def rest(self) -> None:
        """Gives the descriptor back, of a file that is synced; the next frame opens it again."""
        assert not self.unsynced_bytes
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    @property
    def seq(self) -> int | None:
        """The number of that file."""
        return None if self._segment is None else self._segment.seq

    @property
    def holds_frames(self) -> bool:
        """Whether there is something in that file."""
        return self._segment is not None and self._segment.size > 0

    @property
    def is_old(self) -> bool:
        """Whether the file is due for sealing by age."""
        seconds = self.seconds_until_old
        return seconds is not None and seconds <= 0

    @property
    def seconds_until_old(self) -> float | None:
        """How long until the file is due for sealing by age; None while it is empty."""
        if self._segment is None or not self._segment.size:
            return None
        return (self._segment.created_us + self._max_age_us - self._clock.now_us()) / 1_000_000

    def write(self, frames: Frames) -> Frames:
        """Writes as many frames as belong into one file, at least one; returns those that were written."""
        file, segment = self._open_file(frames.first_offset)
        part = frames if self._fits(frames, segment) else self._first_part(frames, segment)
        begin, end = part.start_of(0), part.end
        view = memoryview(part.buffer)[begin:end]
        try:
            file.write_at(segment.size, view)
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(segment.size)
            raise
        self.unsynced_bytes += end - begin
        with self._mutex:
            segment.extend(part, segment.size - begin, segment.size + end - begin, self._time_field)
        return part

    def sync(self) -> None:
        """What was written is on the disk when this returns. A failure is final: what it left unsynced is unknown."""
        if self._file is not None and self.unsynced_bytes:
            try:
                self._file.sync()
            except OSError as error:
                self._cut_unsynced()
                raise _sync_failed(error, self._directory) from error
        self.unsynced_bytes = 0

    def _cut_unsynced(self) -> None:
        """After a failed sync the system shows bytes that it will never write, and calls the next sync a success.

        Whoever opens the log next must not find them: it would go on behind them, and they would be a hole after a
        power failure, with acknowledged frames on the far side.
        """
        if self._file is not None and self._segment is not None:
            with contextlib.suppress(OSError):
                self._file.truncate(self._segment.size - self.unsynced_bytes)

    def seal(self) -> None:
        """Closes the file, which must be synced; the next frame begins a new one."""
        assert not self.unsynced_bytes
        file, segment, self._file, self._segment = self._file, self._segment, None, None
        if file is not None:
            file.close()
        if segment is not None:
            self.sealed_files += 1

    def adopt_prepared(self, prepared: Sequence[Segment]) -> None:
        """Files that were written and synced beside the log become its next ones, all at once for whoever reads.

        Each name is durable before the next is given, so that what a crash leaves has no hole in it.
        """
        self._let_go_of_empty()
        self.seal()
        for segment in prepared:
            path = self._directory / self._name_of(self._next_seq)
            self._files.rename(segment.path, path)
            self._files.sync_directory(self._directory)
            segment.seq, segment.path = self._next_seq, path
            self._next_seq += 1
        with self._mutex:
            for segment in prepared:
                self._segments.add(segment)

    def _let_go_of_empty(self) -> None:
        """A file without frames must not be followed by another one: that one gets its name."""
        segment = self._segment
        if segment is not None and not segment.size:
            self._next_seq = segment.seq
            with self._mutex:
                self._segments.remove_empty_last()

    def close(self) -> None:
        """Lets go of the file as it is."""
        file, self._file, self._segment = self._file, None, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def must_seal(self, frames: Frames) -> bool:
        """Whether the next frame belongs into a new file."""
        segment = self._segment
        if segment is None or not segment.size:
            return False
        first_bytes = frames.start_of(1) - frames.start_of(0)
        return segment.size + first_bytes > self._max_bytes or self.is_old

    def _open_file(self, first_offset: int) -> tuple[File, Segment]:
        if self._segment is None:
            path = self._directory / self._name_of(self._next_seq)
            file = self._create(path)
            self._segment = Segment(self._next_seq, path, first_offset, self._clock.now_us())
            self._file = file
            self._next_seq += 1
            with self._mutex:
                self._segments.add(self._segment)
        elif self._file is None:
            self._file = self._files.open(self._segment.path, write=True)
        return self._file, self._segment

    def _create(self, path: Path) -> File:
        file = self._files.create(path)
        try:
            self._files.sync_directory(self._directory)
        except OSError as error:
            file.close()
            if is_out_of_descriptors(error):  # nothing was synced, and nothing failed to be
                self._files.remove(path)
                raise
            # Its name may never be durable, whatever a later sync says: nobody must go on in this file.
            with contextlib.suppress(OSError):
                self._files.remove(path)
            raise _sync_failed(error, self._directory) from error
        return file

    def _fits(self, frames: Frames, segment: Segment) -> bool:
        return segment.size + frames.end - frames.start_of(0) <= self._max_bytes

    def _first_part(self, frames: Frames, segment: Segment) -> Frames:
        """The frames that still fit, at least one."""
        room = self._max_bytes - segment.size + frames.start_of(0)
        payload_positions = memoryview(frames.positions).cast("Q")
        # Frame i ends where frame i + 1 begins, so counting the starts that are within the room is enough.
        count = bisect_right(payload_positions, room + HEADER_BYTES) - 1
        return frames.slice(0, max(1, count))


def _sync_failed(error: OSError, directory: Path) -> LogFailedError:
    return LogFailedError(
        f"the disk failed to sync: {error}",
        operation="sync",
        path=directory,
        hint="What was acknowledged as synced is safe. Check the disk, then open the log again",
    )
