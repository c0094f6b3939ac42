"""`wal.ckpt`: the writer's view of its files when it last rotated or closed, or began a log without files; an engine
also writes it when it first syncs a file.

It is a hint. Recovery trusts an entry only where the file agrees with it, and finds the same state without it; the
checkpoint only saves reading old files. It is replaced atomically: a crash leaves the new one or the previous one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from tidelog.codec import decode_document, encode_document
from tidelog.errors import DataError
from tidelog.files import Files
from tidelog.log.directory import CHECKPOINT
from tidelog.log.segment import Segment

_KIND = "wal-checkpoint"
_VERSION = 1


class CheckpointFile(msgspec.Struct, frozen=True, kw_only=True):
    """One WAL file; `size` bytes of it were synced and end at a frame boundary."""

    seq: int
    first_offset: int
    next_offset: int
    size: int
    created_us: int
    min_time_us: int | None
    max_time_us: int | None
    last_frame_byte: int | None = None


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The whole hint. `last_offset` is -1 while the log is empty."""

    start_offset: int
    last_offset: int
    file_seq: int
    files: tuple[CheckpointFile, ...]
    written_us: int

    def file(self, seq: int) -> CheckpointFile | None:
        return next((file for file in self.files if file.seq == seq), None)

    def first_offset_of(self, seq: int) -> int | None:
        """Where a file begins, also the first one of a log that had none when this was written."""
        known = self.file(seq)
        if known is not None:
            return known.first_offset
        return self.start_offset if not self.files and seq == 0 else None


def describe_segments(segments: Sequence[Segment], start_offset: int, now_us: int) -> Checkpoint:
    """The checkpoint of these segments, all of whose bytes are synced."""
    files = tuple(
        CheckpointFile(
            seq=segment.seq,
            first_offset=segment.first_offset,
            next_offset=segment.next_offset,
            size=segment.size,
            created_us=segment.created_us,
            min_time_us=segment.min_time_us,
            max_time_us=segment.max_time_us,
            last_frame_byte=segment.last_frame_byte,
        )
        for segment in segments
    )
    return Checkpoint(
        start_offset=start_offset,
        last_offset=files[-1].next_offset - 1 if files else start_offset - 1,
        file_seq=files[-1].seq if files else -1,
        files=files,
        written_us=now_us,
    )


def write_checkpoint(files: Files, directory: Path, checkpoint: Checkpoint) -> None:
    """Replaces the checkpoint, durably."""
    files.write_atomically(directory / CHECKPOINT, encode_document(_KIND, _VERSION, checkpoint))


def read_checkpoint(files: Files, directory: Path) -> tuple[Checkpoint | None, str | None]:
    """The checkpoint, or None and why it cannot be used."""
    try:
        data = files.read(directory / CHECKPOINT)
    except FileNotFoundError:
        return None, "there is none"
    except OSError as error:
        return None, str(error)
    try:
        return decode_document(_KIND, _VERSION, data, Checkpoint), None
    except DataError as error:
        return None, str(error)
