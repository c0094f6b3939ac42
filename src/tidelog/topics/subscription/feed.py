"""Feeds a subscription from the log: decodes batches incrementally, as many messages as are requested.

Invariants
- A result begins at the requested offset and says where it ends; offsets that are not among the messages were skipped
  for a reason that is counted.
- After any error the next call opens a new reader at its requested offset: nothing is skipped.
- Only committed messages are read. While an open transaction is next, `news_from` says where the log has to grow.
- Used by one thread at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

from tidelog.errors import DataError, GapError, InputError, OffsetOutOfRangeError, TidelogError, offsets_text
from tidelog.log import Log
from tidelog.log.frame import is_no_message
from tidelog.log.isolation import CommittedReader
from tidelog.log.reader import BatchReader, Position
from tidelog.log.repair import is_lost
from tidelog.log.tail_cache import Batch
from tidelog.topics.live_log import LiveLog
from tidelog.topics.message import (
    Message,
    OnGap,
    decode_frames_as,
    decode_payloads_as,
    unreadable_error,
    warn_of_unreadable,
)
from tidelog.topics.subscription.delivery import READ_AHEAD
from tidelog.topics.subscription.queue import Delivery

_logger = logging.getLogger("tidelog.topics")
_FEW = 100
_MUCH_BYTES = 1 << 20
Filter = Mapping[str, bytes] | Callable[[Message], bool]


class Source(NamedTuple):
    """The topic as a subscription sees it. `check_owned` raises FencedError when another node has the topic."""

    topic: str
    log: Log | LiveLog
    open_reader: Callable[[int, OnGap], BatchReader]
    resolve: Callable[[Position], int]
    start_offset: Callable[[], int]
    check_owned: Callable[[], None]
    partition: int = 0


class Fed(NamedTuple):
    """What was read, up to `next_offset` (exclusive), and how much of it was passed over."""

    messages: list[Delivery]
    next_offset: int
    filtered: int = 0
    lost: int = 0
    expired: int = 0


class Feed:
    """Reads the topic for one subscription."""

    def __init__(self, source: Source, matches: Filter | None, *, on_gap: OnGap) -> None:
        self._source = source
        self._matches = checked_filter(matches)
        self._on_gap: OnGap = on_gap
        self._kind: Callable[..., Delivery] = (
            partial(Delivery, partition=source.partition) if source.partition else Delivery
        )
        self._reader: BatchReader | None = None
        self._batch: Batch | None = None
        self._behind = 0
        """The reader's next offset after the batch: what is between is not visible to anybody."""
        self._counted_lost = 0
        self._blocked = (-1, -1)

    def news_from(self, offset: int) -> int:
        """Reading at `offset` brings something once the log has this offset."""
        blocked_offset, waits_at = self._blocked
        return waits_at if offset == blocked_offset else offset

    def is_on_disk(self, offset: int) -> bool:
        """Whether this disk has the offset, so that no store is asked for it."""
        return offset >= self._source.log.start_offset

    def is_in_memory(self, offset: int) -> bool:
        """Whether reading there waits for no disk and no store."""
        batch = self._batch
        if batch is not None and batch.first_offset <= offset < batch.next_offset:
            return True
        reader = self._reader
        if isinstance(reader, CommittedReader) and reader.offset == offset and reader.is_ready:
            return True
        log = self._source.log
        return offset >= log.start_offset and isinstance(log.locate(offset, offset + 1), Batch)

    def read(self, offset: int) -> Fed | None:
        """Some messages from `offset` on; None if there are none yet.

        Messages that were synced one by one are in batches of one: those at hand are put together.
        """
        fed = self._read_batch(offset)
        while fed is not None and len(fed.messages) < _FEW and self._is_more_at_hand(fed):
            try:
                more = self._read_batch(fed.next_offset)
            except TidelogError:
                break  # the next read there raises it
            if more is None:
                break
            fed = _joined(fed, more)
        return fed

    def _is_more_at_hand(self, fed: Fed) -> bool:
        """Only messages in memory, at most a batch of large ones; it never raises."""
        size_bytes = sum(len(message.value or b"") for message in fed.messages)
        has_more = size_bytes < _MUCH_BYTES and fed.next_offset < self._source.log.next_offset
        return has_more and self._matches is None and self.is_in_memory(fed.next_offset)

    def _read_batch(self, offset: int) -> Fed | None:
        try:
            self._source.check_owned()
            batch = self._batch_at(offset)
            if batch is None:
                return self._without_batch(offset)
            if batch.first_offset > offset:  # history passed over what is lost, or it is not visible
                return Fed([], batch.first_offset, lost=self._newly_lost(batch.first_offset - offset))
            return self._filtered(self._decoded(batch, offset))
        except OffsetOutOfRangeError:
            self.close()
            return self._after_retention(offset)
        except BaseException:
            self.close()
            raise

    def _without_batch(self, offset: int) -> Fed | None:
        """At the end of what is visible; the reader may have passed over what is not."""
        reader = self._reader
        if reader is None or reader.offset < offset:
            return None
        if reader.offset > offset:
            return Fed([], reader.offset, lost=self._newly_lost(reader.offset - offset))
        self._blocked = (offset, reader.waits_at)
        return None

    def _newly_lost(self, passed_over: int) -> int:
        if not isinstance(self._reader, CommittedReader):
            return passed_over
        lost, self._counted_lost = self._reader.lost - self._counted_lost, self._reader.lost
        return lost

    def close(self) -> None:
        """Lets go of files; reading again opens them again."""
        reader, self._reader, self._batch = self._reader, None, None
        self._counted_lost = 0
        if reader is not None:
            reader.close()

    def _after_retention(self, offset: int) -> Fed:
        """Messages that retention deleted before they were read are gone; the subscription continues with the oldest
        kept.
        """
        start = self._source.start_offset()
        if start <= offset:
            raise OffsetOutOfRangeError(f"offset {offset} is not in {self._source.topic}", operation="receive")
        _logger.warning("%s: %s deleted by retention before being read", self._source.topic, _offsets(offset, start))
        return Fed([], start, expired=start - offset)

    def _batch_at(self, offset: int) -> Batch | None:
        batch = self._batch
        if batch is not None and batch.first_offset <= offset < batch.next_offset:
            return batch
        self._batch = None
        if offset >= self._source.log.next_offset:
            return None
        if self._reader is None or self._reader.offset != offset:
            self.close()
            self._reader = self._source.open_reader(offset, self._on_gap)
        self._batch = self._reader.next_batch(0.0)
        self._behind = self._reader.offset
        return self._batch

    # Decoding

    def _decoded(self, batch: Batch, offset: int) -> Fed:
        first = offset - batch.first_offset
        count = min(READ_AHEAD, batch.stop - batch.start - first)
        behind = offset + count
        if behind == batch.next_offset:
            behind = max(behind, self._behind)
        if batch.frames is None:
            payloads = batch.bare[first : first + count]
            try:
                return Fed(decode_payloads_as(self._kind, offset, payloads), behind)
            except DataError:
                return self._one_by_one(offset, payloads, behind)
        start = batch.start + first
        try:
            return Fed(decode_frames_as(self._kind, batch.frames, start, start + count), behind)
        except DataError:
            return self._one_by_one(offset, batch.frames.payloads(start, start + count), behind)

    def _one_by_one(self, offset: int, payloads: list[bytes], behind: int) -> Fed:
        """Everything before the first one that cannot be had; that one alone is an error, or passed over."""
        messages: list[Delivery] = []
        lost = 0
        for reached, payload in enumerate(payloads, offset):
            if is_no_message(payload):
                continue  # removed on purpose, or the end of a transaction: not an error
            try:
                message = self._one(reached, payload)
            except DataError:
                if reached == offset:
                    raise
                return Fed(messages, reached, lost=lost)
            messages += message
            lost += not message
        return Fed(messages, behind, lost=lost)

    def _one(self, offset: int, payload: bytes) -> list[Delivery]:
        """The message; none when it cannot be had and is passed over."""
        if is_lost(payload):
            if self._on_gap == "raise":
                raise _gap_error(offset)
            return []
        try:
            return decode_payloads_as(self._kind, offset, [payload])
        except DataError as damage:
            place = self._source.log.directory if self._reader is None else self._reader.place_of(offset)
            if self._on_gap == "raise":
                raise unreadable_error(damage, offset, place, _seek_hint(offset)) from damage
            warn_of_unreadable(damage, place)
            return []

    def _filtered(self, fed: Fed) -> Fed:
        if self._matches is None:
            return fed
        wanted = [message for message in fed.messages if self._matches(message)]
        return fed._replace(messages=wanted, filtered=len(fed.messages) - len(wanted))


def _joined(first: Fed, second: Fed) -> Fed:
    return Fed(
        first.messages + second.messages,
        second.next_offset,
        first.filtered + second.filtered,
        first.lost + second.lost,
        first.expired + second.expired,
    )


def checked_filter(matches: Filter | None) -> Callable[[Message], bool] | None:
    """Whether a message is wanted; InputError for what is no filter."""
    if matches is None:
        return None
    if not isinstance(matches, Mapping):
        if not callable(matches):
            raise InputError(f"filter must be a mapping of headers to values, or a function, not {matches!r}")
        return matches
    given: Iterable[tuple[object, object]] = matches.items()
    for header, value in given:
        if not isinstance(header, str) or not isinstance(value, bytes):
            raise InputError(
                f"filter must map str headers to bytes, not {header!r}: {value!r}",
                hint='For example: filter={"kind": b"order"}',
            )
    wanted = dict(matches).items()
    return lambda message: wanted <= message.headers.items()


def _gap_error(offset: int) -> GapError:
    return GapError(
        f"offset {offset} is damaged; a repair marked it as lost",
        first=offset,
        last=offset,
        hint=_seek_hint(offset),
    )


def _seek_hint(offset: int) -> str:
    return f'Continue with sub.seek({offset + 1}), or subscribe with on_gap="skip"'


def _offsets(start: int, stop: int) -> str:
    return offsets_text(start, stop - 1)
