"""Counting frames and summing them up, for the proofs of jobs that look at whole frames."""

from __future__ import annotations

from array import array

from tidelog.log.frame import Frames
from tidelog.log.repair import is_lost
from tidelog.pipeline.jobs.proof import Tally
from tidelog.topics.columns import frames_digest

# A message's envelope is longer: what is one byte is a mark in the place of a message.
_MARK_BYTES = 1


def tally_frames(frames: Frames, start: int = 0, stop: int | None = None) -> Tally:
    """Frames `start` to `stop` (exclusive). All of them are summed up; marks are not counted as messages."""
    stop = frames.count if stop is None else stop
    if start >= stop:
        return Tally()
    return Tally(
        messages=stop - start - _marks(frames, start, stop),
        first_offset=frames.first_offset + start,
        last_offset=frames.first_offset + stop - 1,
        digest=frames_digest(frames, start, stop),
    )


def lost_offsets(frames: Frames) -> list[int]:
    """The offsets that a repair has marked as lost."""
    if not _marks(frames, 0, frames.count):
        return []
    lengths = memoryview(frames.lengths).cast("I")
    marks = [index for index in range(frames.count) if lengths[index] == _MARK_BYTES]
    return [frames.first_offset + index for index in marks if is_lost(frames.payloads(index, index + 1)[0])]


def _marks(frames: Frames, start: int, stop: int) -> int:
    lengths = array("I")
    lengths.frombytes(frames.lengths[start * lengths.itemsize : stop * lengths.itemsize])
    return lengths.count(_MARK_BYTES)
