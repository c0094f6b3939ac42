"""Recovery: rebuilds the state of a log from its files, with the checkpoint as a hint.

Invariants
- The next offset comes from the frames in the files. The checkpoint only saves reading old files again, and only where
  name, size and first frame agree with it.
- A torn tail (the last file ends in something that is not a frame, and no frame follows) is cut and reported.
- Damage with a frame after it, a file that ends early before another file, and a missing file are errors that name the
  file: nothing is guessed and nothing is deleted.
- Offsets that no message can have are errors too: readers could not handle them.
- Recovery is idempotent: running it again, or crashing in it and running it again, gives the same state.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from tidelog.clock import Clock
from tidelog.codec import MAX_OFFSET
from tidelog.errors import CorruptionError, DataError, GapError, offsets_text
from tidelog.files import File, Files, is_full_disk
from tidelog.log.binding import first_offset_of
from tidelog.log.directory import REMOVED, marked_offset, removed_name, start_name, start_offsets, wal_files
from tidelog.log.frame import HEADER, HEADER_BYTES, MAX_PAYLOAD_BYTES, Frames, Stop, find_frame, frame_crc, scan
from tidelog.log.segment import Checkpoint, CheckpointFile, FileScanner, Segment, read_checkpoint
from tidelog.log.settings import MIB, LogSettings, RecoveryReport, TornTail

# Classifies what follows the point where the frames stop: nothing (a torn tail), or good frames (damage).
#
# Invariants
# - A message may contain frames itself, a copy of a log for example. So frames inside the frame that stopped prove
#   nothing, unless that frame's own length is shown to be wrong: its checksum fits another length, or the frames found
#   inside it run on to the very end of the file.
# - A frame whose header has another offset, and whose checksum fits the expected one, was whole: its offset is damaged.
# - A frame of any offset after the stop is evidence against a torn tail, also one that does not belong there: a tail
#   with good frames in it is never cut.
# - The rest of the file is read whole, to find a frame of any size: only here does memory grow with a file.


_MAX_CANDIDATES = 64


def find_good_frames(
    file: File, position: int, size: int, expected: int, *, min_offset: int, known_next_offset: int = 0
) -> tuple[int, int] | None:
    """The first good frame where no good frame of the expected offset begins: (byte, offset).

    Offsets are looked for from `min_offset` up to as many as there is room for, or, where bytes were taken out, up to
    the end that the file is known to have. A frame right at `position` counts only if its offset is a smaller one: it
    is good, and does not belong there.
    """
    buffer = file.read_at(position, size - position)
    found = find_good_frame(buffer, expected, min_offset=min_offset, known_next_offset=known_next_offset)
    return None if found is None else (position + found[0], found[1])


def find_good_frame(
    buffer: bytes, expected: int, *, min_offset: int, known_next_offset: int = 0
) -> tuple[int, int] | None:
    """The same in bytes that begin where no good frame of the expected offset does."""
    max_offset = max(expected + len(buffer) // HEADER_BYTES, known_next_offset - 1)
    own_end = _own_end(buffer, expected)
    found = _frame_inside(buffer, expected, max_offset, own_end) if own_end > 0 else None
    if found is None:
        start = min(own_end or int(min_offset >= expected), len(buffer))
        found = find_frame(buffer, start, min_offset, max_offset)
    return found


def is_misnumbered(file: File, position: int, size: int, expected: int) -> bool:
    """Whether the frame at a byte is the expected one, whole, but for the offset in its header: no torn tail."""
    header = file.read_at(position, HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return False
    offset, length, crc = HEADER.unpack(header)
    end = position + HEADER_BYTES + int(length)
    if offset == expected or not 0 < length <= MAX_PAYLOAD_BYTES or end > size:
        return False
    return bool(frame_crc(expected, file.read_at(position + HEADER_BYTES, int(length))) == crc)


def _own_end(buffer: bytes, expected: int) -> int:
    """How far the frame at the start says that it goes; 0 when its header is not to be believed."""
    if len(buffer) < HEADER_BYTES:
        return 0
    offset, length, _ = HEADER.unpack_from(buffer)
    credible = offset == expected and 0 < length <= MAX_PAYLOAD_BYTES
    return HEADER_BYTES + int(length) if credible else 0


def _frame_inside(buffer: bytes, expected: int, max_offset: int, own_end: int) -> tuple[int, int] | None:
    """A later frame inside what the one that stopped claims for itself, if that claim is shown to be wrong."""
    own_crc = HEADER.unpack_from(buffer)[2]
    is_torn = own_end > len(buffer)
    for found in (
        _offset_by_offset(buffer, expected, max_offset) if is_torn else _in_order(buffer, expected, max_offset)
    ):
        ends_here = found[0] > HEADER_BYTES and _crc_up_to(buffer, expected, found[0]) == own_crc
        if ends_here or scan(buffer, found[0], found[1]).stop is Stop.END:
            return found
    return None


def _crc_up_to(buffer: bytes, offset: int, end: int) -> int:
    """The checksum that the frame at the start would have if it ended there."""
    return frame_crc(offset, memoryview(buffer)[HEADER_BYTES:end])


def _in_order(buffer: bytes, expected: int, max_offset: int) -> Iterator[tuple[int, int]]:
    """The good frames after the first byte, in order."""
    position = 1
    for _ in range(_MAX_CANDIDATES):
        found = find_frame(buffer, position, expected + 1, max_offset)
        if found is None:
            return
        yield found
        position = found[0] + 1


def _offset_by_offset(buffer: bytes, expected: int, max_offset: int) -> Iterator[tuple[int, int]]:
    """The first good frame of each of the next offsets.

    A frame that runs past the end of the file is usually torn, and trying every number in its value as a header would
    take long: one offset at a time, there are few positions to try.
    """
    for offset in range(expected + 1, min(expected + _MAX_CANDIDATES, max_offset) + 1):
        found = find_frame(buffer, 1, offset, offset)
        if found is not None:
            yield found


_logger = logging.getLogger("tidelog.log")
_SCAN_CHUNK_BYTES = 2 * MIB
BEYOND_ALL_OFFSETS = f"offsets above {MAX_OFFSET}, the last that a message may have"
REPAIR_HINT = "Nothing was changed. `tidelog verify` shows what is wrong; `tidelog repair` repairs it"


class Recovered(NamedTuple):
    """The state that opening found."""

    segments: list[Segment]
    start_offset: int
    next_offset: int
    next_seq: int
    report: RecoveryReport
    is_synced: bool = False
    """Whether the checkpoint vouches for everything in the last file: it was written after a sync of all of that."""
    last_frames: Frames | None = None
    """Those that the last file ends with, where they were read."""


def recover(
    files: Files,
    clock: Clock,
    directory: Path,
    settings: LogSettings,
    time_field: int | None,
    first_offset: int,
    names: list[str] | None = None,
) -> Recovered:
    """Finds the state of a log directory; `first_offset` is where a log without any frame begins.

    `names` lists the directory, which no other process changes.
    """
    checkpoint, problem = read_checkpoint(files, directory)
    marked_start = marked_offset(files.list(directory) if names is None else names)
    if marked_start is not None and marked_start > MAX_OFFSET + 1:
        raise DataError(
            f"a log cannot begin at offset {marked_start}; the largest offset is {MAX_OFFSET}",
            path=directory / start_name(marked_start),
            hint="Remove this file, which is empty: then the log begins with its oldest WAL file",
        )
    run = Recovery(files, clock, directory, time_field, checkpoint, settings.open_check_bytes, marked_start, names)
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
        names: list[str] | None = None,
    ) -> None:
        self._files = files
        self._clock = clock
        self._directory = directory
        self._check_bytes = check_bytes
        self._time_field = time_field
        self._checkpoint = checkpoint
        self._marked_start = marked_start
        self._names = names
        self._last_frames: Frames | None = None
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
        is_synced = self._is_synced(segments)
        return Recovered(segments, start_offset, next_offset, next_seq, report, is_synced, self._last_frames)

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
            if segment.next_offset > MAX_OFFSET + 1:
                byte = first_impossible_byte(file, 0, segment.first_offset, segment.size)
                raise CorruptionError(f"{BEYOND_ALL_OFFSETS},", path=path, byte=byte, hint=REPAIR_HINT)
            found.append(segment)
        return found

    def _begin(self, seq: int, file: File, first_offset: int) -> int:
        return oldest_offset(self._checkpoint, seq, file, first_offset, self._marked_start)

    def _hint(self, seq: int) -> CheckpointFile | None:
        return self._checkpoint.file(seq) if self._checkpoint is not None else None

    def _walk(self) -> Iterator[tuple[Path, int, File, bool, bool]]:
        """Each file with whether it is among the newest bytes that are always checked, and whether it is the last."""
        listed = wal_files(self._files.list(self._directory) if self._names is None else self._names)
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
        """For each file, the bytes in the files after it."""
        sizes = []
        for _, name in listed[1:]:
            file = self._files.open(self._directory / name)
            try:
                sizes.append(file.size())
            finally:
                file.close()
        return list(accumulate(reversed(sizes), initial=0))[::-1]

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
            and hint.first_offset < hint.next_offset <= MAX_OFFSET + 1
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
            raise CorruptionError("an empty file is not the last one", path=path, byte=0, hint=REPAIR_HINT)
        return segment

    def _scan(self, file: File, segment: Segment) -> Stop:
        """Extends the segment by every whole frame after its end."""
        self._last_frames = None
        end = file.size()
        scanner = FileScanner(file, segment.size, segment.next_offset, _SCAN_CHUNK_BYTES)
        while True:
            base = scanner.position
            frames = scanner.read(end)
            if frames is None:
                return scanner.stop
            segment.extend(frames, base, scanner.position, self._time_field)
            self._last_frames = frames
            self._checked_bytes += scanner.position - base

    def _judge(self, file: File, segment: Segment, stop: Stop, is_last: bool) -> None:
        """A torn tail is noted for cutting; anything else is refused."""
        self._refuse_gap(file, segment)
        size, hint = file.size(), self._hint(segment.seq)
        if not is_last or is_misnumbered(file, segment.size, size, segment.next_offset):
            raise CorruptionError(stop.reason, path=segment.path, byte=segment.size, hint=REPAIR_HINT)
        known_next_offset = hint.next_offset if hint is not None else 0
        after = find_good_frames(
            file, segment.size, size, segment.next_offset, min_offset=0, known_next_offset=known_next_offset
        )
        if after is not None:
            raise CorruptionError(
                f"{stop.reason}, with good frames there (the next at byte {after[0]}, offset {after[1]}),",
                path=segment.path,
                byte=segment.size,
                hint=REPAIR_HINT,
            )
        self._torn_tail = TornTail(
            file=segment.path.name, byte=segment.size, size=size - segment.size, reason=stop.reason
        )

    def _refuse_gap(self, file: File, segment: Segment) -> None:
        """A file that begins with a good frame of a later offset means that something before it is missing."""
        found = None if segment.count else offset_after_gap(file, segment.first_offset)
        if found is None:
            return
        raise GapError(
            f"missing before {segment.path.name}",
            first=segment.first_offset,
            last=found - 1,
            unit="offset",
            path=segment.path,
            hint=REPAIR_HINT,
        )


def first_impossible_byte(file: File, position: int, offset: int, end: int) -> int:
    """Where in frames from a position on, the first of which carries `offset`, those begin that no message can have."""
    scanner = FileScanner(file, position, offset, _SCAN_CHUNK_BYTES)
    while scanner.offset <= MAX_OFFSET:
        base = scanner.position
        frames = scanner.read(end)
        if frames is None:
            return end
        if frames.next_offset > MAX_OFFSET + 1:
            return base + frames.start_of(MAX_OFFSET + 1 - frames.first_offset)
    return scanner.position


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
            directory,
            tail.size,
            tail.reason,
            tail.byte,
            tail.file,
        )
    if report.missing_synced is not None:
        lost = offsets_text(*report.missing_synced)
        _logger.error("%s: %s had been synced and are missing from the files", directory, lost)


# Finds the first offset of frames that no earlier frame can vouch for: in the oldest file, and after a gap.
#
# A frame header alone is not trusted, only a whole frame is. One flipped bit in the first offset would make every frame
# after it look wrong: the log would be cut there as if it were a torn tail, or a repair would fill a gap of billions of
# messages that never existed. The file header is consulted first, then the checkpoint, then the frames.


_MAX_OFFSET = (1 << 63) - 1
_LEAST_FRAME_BYTES = HEADER_BYTES + 1


def oldest_offset(
    checkpoint: Checkpoint | None, seq: int, file: File, default: int, marked_start: int | None = None
) -> int:
    """Where the oldest file begins; `default` when neither the checkpoint nor the file can tell.

    The file's own header has a checksum and takes precedence over everything.
    Two frames that agree take precedence over the checkpoint, which may be of another state of the log. `marked_start`,
    where the log is marked to begin, is used when the file does not begin with a frame.
    """
    bound_to = first_offset_of(file)
    if bound_to is not None:
        return bound_to
    known = checkpoint.first_offset_of(seq) if checkpoint is not None else None
    if known is None:
        if marked_start is not None and not _next_offsets(file, 0):
            return marked_start
        return _offset_by_frames(file, default)
    if header_offset(file) == known:
        return known
    offsets = _next_offsets(file, 0)[:2]
    return offsets[0] if len(offsets) == 2 and offsets[1] == offsets[0] + 1 else known


def header_offset(file: File, position: int = 0) -> int | None:
    """The offset in the header at this byte, right or wrong; None when there is no whole header."""
    header = file.read_at(position, HEADER_BYTES)
    return int(HEADER.unpack(header)[0]) if len(header) == HEADER_BYTES else None


def offset_after_gap(
    file: File, expected: int, known: int | None = None, max_jump: int = _MAX_OFFSET, position: int = 0
) -> int | None:
    """The offset at which frames begin at a byte if it is later than `expected` and credible; None otherwise.

    `known` is what the checkpoint says. Without it the following frames decide, or where there are none, whether so
    many messages (`max_jump`) can be missing.
    """
    found = header_offset(file, position)
    if found is None or found <= expected or (known is not None and known != found):
        return None
    offsets = _next_offsets(file, position)
    if not offsets:
        return None
    credible = found - expected <= max_jump if len(offsets) == 1 else _is_confirmed(offsets)
    return found if credible else None


def _offset_by_frames(file: File, default: int) -> int:
    found = header_offset(file)
    if found is None:
        return default
    offsets = _next_offsets(file, 0)
    if not offsets:
        return _offset_by_a_later_frame(file, found)
    return found if len(offsets) == 1 or _is_confirmed(offsets) else max(0, offsets[1] - 1)


def _is_confirmed(offsets: list[int]) -> bool:
    """Whether one of the following frames agrees with the first; the other one may be damaged itself."""
    return any(offset == offsets[0] + distance for distance, offset in enumerate(offsets[1:], 1))


def _next_offsets(file: File, position: int) -> list[int]:
    """What the headers of three frames say, as far as there are whole frames."""
    offsets: list[int] = []
    size = file.size()
    while len(offsets) < 3 and (offset := header_offset(file, position)) is not None:
        scanner = FileScanner(file, position, offset, HEADER_BYTES)
        if scanner.read(size) is None:
            break
        offsets.append(offset)
        position = scanner.position
    return offsets


def _offset_by_a_later_frame(file: File, found: int) -> int:
    """The first frame is damaged: its offset is believed if the first good one can follow it."""
    size = file.size()
    after = find_frame(file.read_at(0, size), 1, 0, _MAX_OFFSET)
    if after is None or found < after[1] <= found + size // _LEAST_FRAME_BYTES:
        return found
    return max(0, after[1] - 1)


# `wal.start-<offset>`: where a log begins, recorded independently of its oldest file, which may be lost.
#
#     wal.start-00000000000000001000    an empty file; its name is all its content
#
# Invariants
# - It is moved before the first file below it is removed. So files that begin at or below it are whole at their start,
#   whatever a crash has left; files that begin after it have lost something.
# - Moving it is one rename: it is atomic, and needs no space on a disk that is being freed.
# - A reader other than the owner reads the files first and then the mark, which is therefore as new as the files.
# - Without one the log begins with its oldest file, and opening it for writing creates one.


KeptElsewhere = Callable[[int, int], bool]
"""Whether offsets from one up to another (exclusive), which no file here has, can be read from somewhere else."""


def read_start(files: Files, directory: Path) -> int | None:
    """Where the log begins; None when that is not marked. Call it after reading the files."""
    return marked_offset(files.list(directory))


def move_start(files: Files, directory: Path, offset: int) -> None:
    """Marks that the log begins there from now on, durably. What is marked already costs nothing."""
    marked = start_offsets(files.list(directory))
    if marked == [offset]:
        return
    if marked:
        files.rename(directory / start_name(marked[-1]), directory / start_name(offset))
    else:
        files.create(directory / start_name(offset)).close()
    files.sync_directory(directory)
    for older in marked[:-1]:  # a crash can leave one under both names
        if older != offset:
            files.remove(directory / start_name(older))


def refuse_missing_start(
    first: int | None, segments: Sequence[Segment], kept_elsewhere: KeptElsewhere | None = None
) -> bool:
    """GapError when the files are gone that the log began with, at `first`, as it is marked. True when they are, and
    what they had is elsewhere."""
    if not segments or first is None or first >= segments[0].first_offset:
        return False
    last = segments[0].first_offset - 1
    if kept_elsewhere is not None and kept_elsewhere(first, last + 1):
        return True
    oldest = segments[0].path
    raise GapError(
        f"missing: the log began with them, but its oldest file is {oldest.name}",
        first=first,
        last=last,
        unit="offset",
        path=oldest,
        hint="Put the files back if you have a copy; else `tidelog repair` marks these offsets as lost",
    )


def settle_start(
    files: Files,
    directory: Path,
    marked: int | None,
    segments: Sequence[Segment],
    start_offset: int,
    kept_elsewhere: KeptElsewhere | None,
) -> None:
    """When a log is opened for writing: raises GapError if its start is missing, else writes a mark if no valid one
    exists.

    A full disk must not prevent opening; the next opening writes it.
    """
    is_elsewhere = refuse_missing_start(marked, segments, kept_elsewhere)
    if segments and not is_elsewhere and marked is not None:
        return  # at the oldest file, or after it: that one was about to be removed
    try:
        move_start(files, directory, start_offset)
    except OSError as error:
        if not is_full_disk(error):
            raise


def remove_start(files: Files, directory: Path) -> None:
    """Before all files of a log are removed or taken elsewhere."""
    for offset in start_offsets(files.list(directory)):
        with contextlib.suppress(FileNotFoundError):
            files.remove(directory / start_name(offset))
        files.sync_directory(directory)
