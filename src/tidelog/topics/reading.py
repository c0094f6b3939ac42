"""From batches of frames to messages, a batch at a time.

A batch is decoded in one call. When that fails, the stretches between what a compaction removed are; only what fails
then is gone through message by message, to tell an offset that a repair marked as lost from one that is damaged, and to
hand out everything before it first.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Literal

from tidelog.errors import DataError, GapError, offsets_text
from tidelog.log.cache import Batch
from tidelog.log.reader import Reader
from tidelog.log.removed import kept_runs
from tidelog.log.repair import is_lost
from tidelog.tier.joined import JoinedReader
from tidelog.topics.message import Message, decode_frames, decode_payloads

OnGap = Literal["raise", "skip"]


def read_messages(reader: Reader | JoinedReader, on_gap: OnGap) -> Iterator[Message]:
    """All messages of a reader."""
    for batch in reader:
        yield from _decode(batch, on_gap)


async def read_messages_async(reader: Reader | JoinedReader, on_gap: OnGap) -> AsyncIterator[Message]:
    """All messages of a reader, in a task."""
    async for batch in reader:
        for message in _decode(batch, on_gap):
            yield message


def _decode(batch: Batch, on_gap: OnGap) -> list[Message] | Iterator[Message]:
    try:
        if batch.frames is None:
            return decode_payloads(batch.first_offset, batch.bare)
        return decode_frames(batch.frames, batch.start, batch.stop)
    except DataError:
        return _decode_kept(batch, on_gap)


def _decode_kept(batch: Batch, on_gap: OnGap) -> Iterator[Message]:
    payloads = batch.payloads()
    for start, stop in kept_runs(payloads):
        kept, offset = payloads[start:stop], batch.first_offset + start
        try:
            messages: Iterable[Message] = decode_payloads(offset, kept)
        except DataError:
            messages = _decode_one_by_one(offset, kept, on_gap)
        yield from messages


def _decode_one_by_one(first_offset: int, payloads: list[bytes], on_gap: OnGap) -> Iterator[Message]:
    for index, payload in enumerate(payloads):
        if not is_lost(payload):
            yield from decode_payloads(first_offset + index, [payload])
        elif on_gap == "raise":
            raise _gap_error(payloads, index, first_offset)


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
