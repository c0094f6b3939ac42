"""Opening: what the files say, with the checkpoint as a hint.

Invariants
- The next offset comes from the frames in the files. The checkpoint only spares reading old files again, and only where
  name, size and first frame agree with it.
- A torn tail (the last file ends in something that is not a frame, and no frame follows) is cut and reported.
- Damage with a frame behind it, a file that ends early before another file, or a missing file are refused by name:
  nothing is guessed and nothing is deleted.
- Running it again, or crashing in it and running it again, gives the same state.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from tidelog.clock import Clock
from tidelog.errors import CorruptionError, GapError, offsets_text
from tidelog.files import File, Files
from tidelog.log.beginning import header_offset, offset_behind_gap, oldest_offset
from tidelog.log.checkpoint import Checkpoint, CheckpointFile, read_checkpoint
from tidelog.log.damage import find_good_frames, is_misnumbered
from tidelog.log.frame import HEADER_BYTES, Stop
from tidelog.log.names import REMOVED, removed_name, start_offsets, wal_files
from tidelog.log.scanner import FileScanner
from tidelog.log.segment import Segment
from tidelog.log.settings import MIB, LogSettings
from tidelog.log.statistics import RecoveryReport, TornTail

_logger = logging.getLogger("tidelog.log")
_SCAN_CHUNK_BYTES = 2 * MIB
REPAIR_HINT = "Nothing was changed. See what is wrong with `tidelog verify`, mend it with `tidelog repair`"


class Recovered(NamedTuple):
    """The state that opening found."""

    segments: list[Segment]
    start_offset: int
    next_offset: int
    next_seq: int
    report: RecoveryReport
    is_synced: bool = False
    """Whether the checkpoint vouches for everything in the last file: it was written after a sync of all of that."""


def recover(
    files: Files, clock: Clock, directory: Path, settings: LogSettings, time_field: int | None, first_offset: int
) -> Recovered:
    """Finds the state of a log directory; `first_offset` is where a log without any frame begins."""
    checkpoint, problem = read_checkpoint(files, directory)
    marked_start = max(start_offsets(files.list(directory)), default=None)
    run = Recovery(files, clock, directory, time_field, checkpoint, settings.open_check_bytes, marked_start)
    return run.find(first_offset, problem)


class Recovery:
    """One pass over the files of a directory, oldest first."""

    def __init__(
        self,
        files: Files,
        clock: Clock,
        directory: Path,
        time_field: int | None,
        checkpoint: Checkpoint | None,
        check_bytes: int,
        marked_start: int | None = None,
    ) -> None:
        self._files = files
        self._clock = clock
        self._directory = directory
        self._check_bytes = check_bytes
        self._time_field = time_field
        self._checkpoint = checkpoint
        self._marked_start = marked_start
        self._trusted_files = 0
        self._checked_bytes = 0
        self._torn_tail: TornTail | None = None

    def find(self, first_offset: int, checkpoint_problem: str | None = None) -> Recovered:
        """The state, with a report of how it was found. Changes nothing."""
        begin = time.monotonic()
        segments = self._segments(first_offset)
        next_offset = segments[-1].next_offset if segments else first_offset
        report = RecoveryReport(
            checkpoint_used=self._trusted_files > 0,
            checkpoint_problem=checkpoint_problem,
            files=len(segments),
            checked_bytes=self._checked_bytes,
            seconds=time.monotonic() - begin,
            torn_tail=self._torn_tail,
            missing_synced=_missing_synced(self._checkpoint, next_offset),
        )
        start_offset = segments[0].first_offset if segments else first_offset
        next_seq = segments[-1].seq + 1 if segments else 0
        return Recovered(segments, start_offset, next_offset, next_seq, report, self._is_synced(segments))

    def _is_synced(self, segments: list[Segment]) -> bool:
        hint = self._hint(segments[-1].seq) if segments else None
        if hint is None or not hint.size or self._torn_tail is not None:
            return False
        last = segments[-1]
        return (hint.first_offset, hint.next_offset, hint.size) == (last.first_offset, last.next_offset, last.size)

    def _segments(self, first_offset: int) -> list[Segment]:
        found: list[Segment] = []
        for path, seq, file, must_check, is_last in self._walk():
            expected = found[-1].next_offset if found else self._begin(seq, file, first_offset)
            segment = self._trusted(path, seq, file, expected, must_check)
            if segment is None:
                segment = self._scanned(path, seq, file, expected, is_last)
            found.append(segment)
        return found

    def _begin(self, seq: int, file: File, first_offset: int) -> int:
        return oldest_offset(self._checkpoint, seq, file, first_offset, self._marked_start)

    def _hint(self, seq: int) -> CheckpointFile | None:
        return self._checkpoint.file(seq) if self._checkpoint is not None else None

    def _walk(self) -> Iterator[tuple[Path, int, File, bool, bool]]:
        """Each file with whether it is among the newest bytes that are always checked, and whether it is the last."""
        listed = wal_files(self._files.list(self._directory))
        newer_bytes = self._bytes_after(listed)
        for index, (seq, name) in enumerate(listed):
            path = self._directory / name
            file = self._files.open(path)
            try:
                must_check = newer_bytes[index] + file.size() <= self._check_bytes
                yield path, seq, file, must_check, index == len(listed) - 1
            finally:
                file.close()

    def _bytes_after(self, listed: list[tuple[int, str]]) -> list[int]:
        """For each file, the bytes in the files behind it."""
        sizes = []
        for _, name in listed:
            file = self._files.open(self._directory / name)
            try:
                sizes.append(file.size())
            finally:
                file.close()
        return list(accumulate(reversed(sizes[1:]), initial=0))[::-1]

    def _trusted(self, path: Path, seq: int, file: File, expected: int, must_check: bool) -> Segment | None:
        """The segment as the checkpoint tells it, scanned from there on; None when it must be read from the start."""
        hint = self._hint(seq)
        if hint is None or must_check or not self._agrees(hint, file, expected):
            return None
        segment = Segment(seq, path, hint.first_offset, hint.created_us)
        segment.next_offset, segment.size = hint.next_offset, hint.size
        segment.min_time_us, segment.max_time_us = hint.min_time_us, hint.max_time_us
        segment.last_frame_byte = hint.last_frame_byte
        if self._scan(file, segment) is not Stop.END:
            return None
        self._trusted_files += 1
        return segment

    def _agrees(self, hint: CheckpointFile, file: File, expected: int) -> bool:
        return (
            hint.first_offset == expected == header_offset(file)
            and hint.next_offset > hint.first_offset
            and HEADER_BYTES < hint.size <= file.size()
        )

    def _scanned(self, path: Path, seq: int, file: File, expected: int, is_last: bool) -> Segment:
        """The segment as its frames tell it."""
        segment = Segment(seq, path, expected, self._clock.now_us())
        hint = self._hint(seq)
        if hint is not None:
            segment.created_us = hint.created_us
        stop = self._scan(file, segment)
        if stop is not Stop.END:
            self._judge(file, segment, stop, is_last)
        elif not segment.count and not is_last:
            raise CorruptionError("an empty file before another one", path=path, byte=0, hint=REPAIR_HINT)
        return segment

    def _scan(self, file: File, segment: Segment) -> Stop:
        """Extends the segment by every whole frame behind its end."""
        end = file.size()
        scanner = FileScanner(file, segment.size, segment.next_offset, _SCAN_CHUNK_BYTES)
        while True:
            base = scanner.position
            frames = scanner.read(end)
            if frames is None:
                return scanner.stop
            segment.extend(frames, base, scanner.position, self._time_field)
            self._checked_bytes += scanner.position - base

    def _judge(self, file: File, segment: Segment, stop: Stop, is_last: bool) -> None:
        """A torn tail is noted for cutting; anything else is refused."""
        self._refuse_gap(file, segment)
        size, hint = file.size(), self._hint(segment.seq)
        if not is_last or is_misnumbered(file, segment.size, size, segment.next_offset):
            raise CorruptionError(stop.reason, path=segment.path, byte=segment.size, hint=REPAIR_HINT)
        known_next_offset = hint.next_offset if hint is not None else 0
        behind = find_good_frames(
            *(file, segment.size, size, segment.next_offset), min_offset=0, known_next_offset=known_next_offset
        )
        if behind is not None:
            raise CorruptionError(
                f"{stop.reason}, with good frames there (the next at byte {behind[0]}, offset {behind[1]}),",
                path=segment.path,
                byte=segment.size,
                hint=REPAIR_HINT,
            )
        self._torn_tail = TornTail(
            file=segment.path.name, byte=segment.size, size=size - segment.size, reason=stop.reason
        )

    def _refuse_gap(self, file: File, segment: Segment) -> None:
        """A file that begins with a good frame of a later offset means that something before it is missing."""
        found = None if segment.count else offset_behind_gap(file, segment.first_offset)
        if found is None:
            return
        raise GapError(
            f"{offsets_text(segment.first_offset, found - 1)} missing before {segment.path.name}",
            first=segment.first_offset,
            last=found - 1,
            path=segment.path,
            hint=REPAIR_HINT,
        )


def cut_torn_tail(files: Files, directory: Path, report: RecoveryReport) -> None:
    """Carries out the cut that recovery found. What the checkpoint vouched for is kept aside, not thrown away."""
    _tell(directory, report)
    tail = report.torn_tail
    if tail is None:
        return
    file = files.open(directory / tail.file, write=True)
    try:
        if report.missing_synced is not None:
            keep_aside(files, directory, tail.file, tail.byte, file.read_at(tail.byte, tail.size))
        file.truncate(tail.byte)
        file.sync()
    finally:
        file.close()


def keep_aside(files: Files, directory: Path, wal_file_name: str, byte: int, data: bytes) -> Path:
    """Stores bytes that are about to leave a WAL file, durably; returns where."""
    folder = directory / REMOVED
    files.make_directories(folder)
    target = folder / removed_name(wal_file_name, byte, 0)
    number = 1
    while files.exists(target):
        target = folder / removed_name(wal_file_name, byte, number)
        number += 1
    files.write_atomically(target, data)
    return target


def _missing_synced(checkpoint: Checkpoint | None, next_offset: int) -> tuple[int, int] | None:
    if checkpoint is None or checkpoint.last_offset < next_offset:
        return None
    return next_offset, checkpoint.last_offset


def _tell(directory: Path, report: RecoveryReport) -> None:
    tail = report.torn_tail
    if tail is not None:
        _logger.warning(
            "%s: cut %d bytes of a torn tail (%s) at byte %d of %s",
            *(directory, tail.size, tail.reason, tail.byte, tail.file),
        )
    if report.missing_synced is not None:
        lost = offsets_text(*report.missing_synced)
        _logger.error("%s: %s had been synced and cannot be found in the files any more", directory, lost)
