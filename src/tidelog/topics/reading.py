"""From batches of frames to messages, a batch at a time.

A batch is decoded in one call. When that fails, the stretches between what a compaction removed are; only what fails
then is gone through message by message, to tell an offset that a repair marked as lost from one that is damaged, and to
hand out everything before it first.

A frame with a good checksum that is no message is as good as lost: GapError says which offset it is, in which file or
object, and why; with `on_gap="skip"` that one is left out, and a warning says the same.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

from tidelog.errors import DataError, GapError, offsets_text
from tidelog.log.cache import Batch
from tidelog.log.reader import Reader
from tidelog.log.removed import kept_runs
from tidelog.log.repair import is_lost
from tidelog.tier.joined import JoinedReader
from tidelog.topics.message import Message, decode_frames, decode_payloads

_logger = logging.getLogger("tidelog.topics")
OnGap = Literal["raise", "skip"]
PlaceOf = Callable[[int], Path | str]
"""In which file or object an offset is."""


def read_messages(reader: Reader | JoinedReader, on_gap: OnGap) -> Iterator[Message]:
    """All messages of a reader."""
    for batch in reader:
        yield from _decode(batch, on_gap, reader.place_of)


async def read_messages_async(reader: Reader | JoinedReader, on_gap: OnGap) -> AsyncIterator[Message]:
    """All messages of a reader, in a task."""
    async for batch in reader:
        for message in _decode(batch, on_gap, reader.place_of):
            yield message


def _decode(batch: Batch, on_gap: OnGap, place_of: PlaceOf) -> list[Message] | Iterator[Message]:
    try:
        if batch.frames is None:
            return decode_payloads(batch.first_offset, batch.bare)
        return decode_frames(batch.frames, batch.start, batch.stop)
    except DataError:
        return _decode_kept(batch, on_gap, place_of)


def _decode_kept(batch: Batch, on_gap: OnGap, place_of: PlaceOf) -> Iterator[Message]:
    payloads = batch.payloads()
    for start, stop in kept_runs(payloads):
        kept, offset = payloads[start:stop], batch.first_offset + start
        try:
            messages: Iterable[Message] = decode_payloads(offset, kept)
        except DataError:
            messages = _decode_one_by_one(offset, kept, on_gap, place_of)
        yield from messages


def _decode_one_by_one(first_offset: int, payloads: list[bytes], on_gap: OnGap, place_of: PlaceOf) -> Iterator[Message]:
    for index, payload in enumerate(payloads):
        if not is_lost(payload):
            yield from _decode_one(first_offset + index, payload, on_gap, place_of)
        elif on_gap == "raise":
            raise _gap_error(payloads, index, first_offset)


def _decode_one(offset: int, payload: bytes, on_gap: OnGap, place_of: PlaceOf) -> list[Message]:
    try:
        return decode_payloads(offset, [payload])
    except DataError as damage:
        if on_gap == "raise":
            hint = f'Read on from {offset + 1}, or with on_gap="skip"'
            raise unreadable_error(damage, offset, place_of(offset), hint) from damage
        warn_of_unreadable(damage, place_of(offset))
        return []


def unreadable_error(damage: DataError, offset: int, place: Path | str, hint: str) -> GapError:
    """What whoever reads is told of a frame that is no message."""
    return GapError(f"{damage.message}: it cannot be read", first=offset, last=offset, path=place, hint=hint)


def warn_of_unreadable(damage: DataError, place: Path | str) -> None:
    """What is said when it is passed over."""
    _logger.warning("%s: passed over: %s", place, damage.message)


def _gap_error(payloads: list[bytes], index: int, first_offset: int) -> GapError:
    last = index
    while last + 1 < len(payloads) and is_lost(payloads[last + 1]):
        last += 1
    first, final = first_offset + index, first_offset + last
    return GapError(
        f"{offsets_text(first, final)} lost to damage, and marked so by a repair",
        first=first,
        last=final,
        hint=f'Read on from {final + 1}, or with on_gap="skip"',
    )
