"""From the log to a subscription: batches are decoded a part at a time, as many as are wanted.

Invariants
- What is returned begins at the offset that was asked for, and says up to where it goes; offsets that are not among the
  messages were passed over for a reason that is counted.
- After any error the next call opens a new reader at the offset that it is asked for: nothing is skipped.
- One thread at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from tidelog.errors import DataError, GapError, InputError, OffsetOutOfRangeError, TidelogError, offsets_text
from tidelog.log import Log
from tidelog.log.cache import Batch
from tidelog.log.readable import Position
from tidelog.log.reader import Reader
from tidelog.log.removed import is_removed
from tidelog.log.repair import is_lost
from tidelog.tier.joined import JoinedReader
from tidelog.topics.delivery import READ_AHEAD
from tidelog.topics.delivery_queue import Delivery
from tidelog.topics.live_log import LiveLog
from tidelog.topics.message import Message, decode_frames_as, decode_payloads_as
from tidelog.topics.reading import OnGap, unreadable_error, warn_of_unreadable

_logger = logging.getLogger("tidelog.topics")
_FEW = 100
_MUCH_BYTES = 1 << 20
Filter = Mapping[str, bytes] | Callable[[Message], bool]


class Source(NamedTuple):
    """The topic as a subscription sees it. `check_owned` raises FencedError when another node has the topic."""

    topic: str
    log: Log | LiveLog
    open_reader: Callable[[int, OnGap], Reader | JoinedReader]
    resolve: Callable[[Position], int]
    start_offset: Callable[[], int]
    check_owned: Callable[[], None]


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
        self._matches = _matcher(matches)
        self._on_gap: OnGap = on_gap
        self._reader: Reader | JoinedReader | None = None
        self._batch: Batch | None = None

    def is_on_disk(self, offset: int) -> bool:
        """Whether this disk has the offset, so that no store is asked for it."""
        return offset >= self._source.log.start_offset

    def is_in_memory(self, offset: int) -> bool:
        """Whether reading there waits for no disk and no store."""
        batch = self._batch
        if batch is not None and batch.first_offset <= offset < batch.next_offset:
            return True
        log = self._source.log
        return offset >= log.start_offset and isinstance(log.locate(offset, offset + 1), Batch)

    def read(self, offset: int) -> Fed | None:
        """Some messages from `offset` on; None when there are none yet.

        Messages that were synced one by one are in batches of one: those at hand are put together.
        """
        fed = self._read_batch(offset)
        while fed is not None and len(fed.messages) < _FEW and self._is_more_at_hand(fed):
            try:
                more = self._read_batch(fed.next_offset)
            except TidelogError:
                break  # whoever reads there next is told
            if more is None:
                break
            fed = _joined(fed, more)
        return fed

    def _is_more_at_hand(self, fed: Fed) -> bool:
        """Only what costs neither a disk nor a store nor an error, and no more than a batch of large messages."""
        size_bytes = sum(len(message.value) for message in fed.messages)
        has_more = size_bytes < _MUCH_BYTES and fed.next_offset < self._source.log.next_offset
        return has_more and self._matches is None and self.is_in_memory(fed.next_offset)

    def _read_batch(self, offset: int) -> Fed | None:
        try:
            self._source.check_owned()
            batch = self._batch_at(offset)
            if batch is None:
                return None
            if batch.first_offset > offset:  # history passed over what is lost
                return Fed([], batch.first_offset, lost=batch.first_offset - offset)
            return self._filtered(self._decoded(batch, offset))
        except OffsetOutOfRangeError:
            self.close()
            return self._after_retention(offset)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets go of files; reading again opens them again."""
        reader, self._reader, self._batch = self._reader, None, None
        if reader is not None:
            reader.close()

    def _after_retention(self, offset: int) -> Fed:
        """What retention deleted before it was read is gone; the subscription goes on with what is kept."""
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
        return self._batch

    # Decoding

    def _decoded(self, batch: Batch, offset: int) -> Fed:
        first = offset - batch.first_offset
        count = min(READ_AHEAD, batch.stop - batch.start - first)
        if batch.frames is None:
            payloads = batch.bare[first : first + count]
            try:
                return Fed(decode_payloads_as(Delivery, offset, payloads), offset + count)
            except DataError:
                return self._one_by_one(offset, payloads)
        start = batch.start + first
        try:
            return Fed(decode_frames_as(Delivery, batch.frames, start, start + count), offset + count)
        except DataError:
            return self._one_by_one(offset, batch.frames.payloads(start, start + count))

    def _one_by_one(self, offset: int, payloads: list[bytes]) -> Fed:
        """Everything before the first one that cannot be had; that one alone is an error, or passed over."""
        messages: list[Delivery] = []
        lost = 0
        for reached, payload in enumerate(payloads, offset):
            if is_removed(payload):
                continue  # it was taken out on purpose: nobody is told
            try:
                message = self._one(reached, payload)
            except DataError:
                if reached == offset:
                    raise
                return Fed(messages, reached, lost=lost)
            messages += message
            lost += not message
        return Fed(messages, offset + len(payloads), lost=lost)

    def _one(self, offset: int, payload: bytes) -> list[Delivery]:
        """The message; none when it cannot be had and is passed over."""
        if is_lost(payload):
            if self._on_gap == "raise":
                raise _gap_error(offset)
            return []
        try:
            return decode_payloads_as(Delivery, offset, [payload])
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


def _matcher(matches: Filter | None) -> Callable[[Message], bool] | None:
    if matches is None:
        return None
    if not isinstance(matches, Mapping):
        if not callable(matches):
            raise InputError(f"a filter is a mapping of headers to values or a function, not {matches!r}")
        return matches
    given: Iterable[tuple[object, object]] = matches.items()
    for header, value in given:
        if not isinstance(header, str) or not isinstance(value, bytes):
            raise InputError(
                f"a filter has the text of a header and its bytes, not {header!r}: {value!r}",
                hint='For example: filter={"kind": b"order"}',
            )
    wanted = dict(matches).items()
    return lambda message: wanted <= message.headers.items()


def _gap_error(offset: int) -> GapError:
    return GapError(
        f"offset {offset} is lost to damage, and marked so by a repair",
        first=offset,
        last=offset,
        hint=_seek_hint(offset),
    )


def _seek_hint(offset: int) -> str:
    return f'Go on with sub.seek({offset + 1}), or subscribe with on_gap="skip"'


def _offsets(start: int, stop: int) -> str:
    return offsets_text(start, stop - 1)
