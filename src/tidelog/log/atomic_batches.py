"""Atomic batches: after a crash either all messages of a batch are there, or none.

The log does not interpret payloads; its opener may supply `group_of`, which says that a payload is message `number`
(from 0 on) of `total` that were appended together. (0, 1) is a message on its own.

Invariants
- A group is accepted in one step, so only its end can be missing, and only at the end of the log: everything after the
  first message of an unfinished group belongs to that group.
- A cut is recorded before it is made: before the first byte is removed, the checkpoint vouches for what stays and for
  nothing else. Files are removed newest first, so that a crash leaves a shorter unfinished group, and the next opening
  cuts again.
- A message acknowledged as synced is never cut: a group counts as synced only when its last message is.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from tidelog.clock import Clock
from tidelog.errors import CorruptionError, TidelogError, offsets_text
from tidelog.files import Files
from tidelog.log.directory import CHECKPOINT
from tidelog.log.frame import Frames
from tidelog.log.reader import Reader, Source
from tidelog.log.recovery import REPAIR_HINT, Recovered
from tidelog.log.segment import FilePart, FileScanner, Segment, byte_of_offset, describe_segments, write_checkpoint

_logger = logging.getLogger("tidelog.log")
GroupOf = Callable[[bytes], tuple[int, int]]
_CHUNK_BYTES = 256 << 10
Found = TypeVar("Found")


def without_unfinished(
    files: Files, recovered: Recovered, group_of: GroupOf | None, time_field: int | None
) -> Recovered:
    """The same state, ending before a group whose end is missing. Changes nothing on the disk."""
    first = None if group_of is None else _unfinished_from(files, recovered, group_of)
    if first is None:
        return recovered
    kept = [segment for segment in recovered.segments if segment.first_offset < first] or recovered.segments[:1]
    kept[-1] = _shortened(files, kept[-1], first, time_field)
    report = msgspec.structs.replace(recovered.report, unfinished=(first, recovered.next_offset - 1))
    return Recovered(kept, recovered.start_offset, first, kept[-1].seq + 1, report)


def _unfinished_from(files: Files, recovered: Recovered, group_of: GroupOf) -> int | None:
    """The first offset of the group that the log ends in, if its end is missing."""
    filled = [segment for segment in recovered.segments if segment.count]
    if not filled:
        return None
    last = recovered.next_offset - 1
    number, total = group_of(_last_payload(files, recovered, filled[-1]))
    if number + 1 >= total:
        return None
    # Pruning may have taken the beginning of a group that is larger than a file.
    first = max(last - number, recovered.start_offset)
    holder = next(segment for segment in filled if segment.next_offset > first)
    if group_of(_payload(files, holder, first)) != (first - last + number, total):
        _logger.warning("%s: what message %d says of its group is not true", holder.path, last)
        return None
    return first


def whole_below(log: Source, offset: int, group_of: GroupOf | None) -> int:
    """The same offset, or the first of the group that it lies inside of, as far as that can still be read."""
    if group_of is None or not offset:
        return offset
    try:
        batch = Reader(log, offset - 1, offset, follow=False).next_batch()
    except (TidelogError, OSError):
        return offset
    number, total = (0, 1) if batch is None else group_of(batch.payloads()[0])
    return offset if number + 1 >= total else offset - 1 - number


def _last_payload(files: Files, recovered: Recovered, segment: Segment) -> bytes:
    """That of the last message, which opening has just read, as a rule."""
    frames, next_offset = recovered.last_frames, recovered.next_offset
    if frames is not None and frames.next_offset == next_offset:
        return frames.payloads(frames.count - 1, frames.count)[0]
    return _payload(files, segment, next_offset - 1)


def _payload(files: Files, segment: Segment, offset: int) -> bytes:
    """The payload of an offset in a file, from the nearest known position."""
    known = segment.last_frame_byte
    if offset == segment.next_offset - 1 and known is not None:
        found = _search(files, segment, known, offset, lambda frames: frames.payloads(0, 1)[0])
        if found is not None:
            return found
    part = FilePart(segment, offset)
    found = _search(files, segment, part.position, part.offset, lambda frames: _payload_in(frames, offset))
    if found is None:
        raise CorruptionError(
            "a frame that was valid before is missing", path=segment.path, byte=part.position, hint=REPAIR_HINT
        )
    return found


def _payload_in(frames: Frames, offset: int) -> bytes | None:
    index = offset - frames.first_offset
    return frames.payloads(index, index + 1)[0] if index < frames.count else None


def _search(
    files: Files, segment: Segment, byte: int, offset: int, look: Callable[[Frames], Found | None]
) -> Found | None:
    file = files.open(segment.path)
    try:
        scanner = FileScanner(file, byte, offset, _CHUNK_BYTES)
        while (frames := scanner.read(segment.size)) is not None:
            if (found := look(frames)) is not None:
                return found
        return None
    finally:
        file.close()


def _shortened(files: Files, segment: Segment, next_offset: int, time_field: int | None) -> Segment:
    """The segment up to an offset, read again: its index and its times must not include what follows."""
    shorter = Segment(segment.seq, segment.path, segment.first_offset, segment.created_us)
    end = byte_of_offset(files, FilePart(segment, segment.first_offset), next_offset)
    file = files.open(segment.path)
    try:
        scanner = FileScanner(file, 0, segment.first_offset, _CHUNK_BYTES)
        while (frames := scanner.read(end)) is not None:
            shorter.extend(frames, shorter.size, scanner.position, time_field)
    finally:
        file.close()
    return shorter


def _write_down(files: Files, clock: Clock, directory: Path, after: Recovered) -> None:
    try:
        write_checkpoint(files, directory, describe_segments(after.segments, after.start_offset, clock.now_us()))
    except OSError:
        if after.next_offset == after.start_offset:
            raise  # nothing else would know where the log begins
        # A full disk must not keep a log from being opened: without a checkpoint the files tell the same.
        with contextlib.suppress(FileNotFoundError):
            files.remove(directory / CHECKPOINT)
        files.sync_directory(directory)


def cut_unfinished(files: Files, clock: Clock, directory: Path, before: Recovered, after: Recovered) -> None:
    """Makes the files what `without_unfinished` says they are."""
    if after.report.unfinished is None:
        return
    _logger.warning("%s: cut %s of an unfinished batch", directory, offsets_text(*after.report.unfinished))
    _write_down(files, clock, directory, after)
    for segment in reversed(before.segments[len(after.segments) :]):
        files.remove(segment.path)
        files.sync_directory(directory)
    last = after.segments[-1]
    file = files.open(last.path, write=True)
    try:
        file.truncate(last.size)
        file.sync()
    finally:
        file.close()
