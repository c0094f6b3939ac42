"""An in-memory log: keeps the newest messages for the readers that are connected.

    oldest                                newest
    | chunk | chunk | chunk | ... | open chunk |        whole chunks are dropped from the left when over the bounds

Invariants
- One mutex guards all state: the order of offsets is the order of delivery.
- An append never waits. When the log is full, messages that a slow reader has not read are dropped, and the reader
  continues with the oldest message that remains. The number of messages it missed is counted, and logged the first
  time.
- Memory is bounded by `cache_max_messages` and `cache_max_bytes`; the newest message is always kept.
- Nothing is written to disk. Offsets begin at 0 each time the log is opened.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from struct import Struct
from threading import Lock

import msgspec

from tidelog.errors import ClosedError, MessageTooLargeError, OffsetOutOfRangeError, TidelogError
from tidelog.files import Files
from tidelog.log import LogSettings
from tidelog.log import shutdown as stopping
from tidelog.log.append_queue import Listened, Waiter, finish_all
from tidelog.log.reader import NO_STOP, Position, ReadableLog, Reader
from tidelog.log.tail_cache import Batch

_logger = logging.getLogger("tidelog.topics")
_TIME = Struct("<q")
# A chunk is at most this part of the bounds, so that dropping a whole one leaves most of what may be kept.
_PART = 16


class LiveStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of a live log. `missed_messages` were dropped before a reader had read them, over all readers."""

    state: str
    start_offset: int
    next_offset: int
    kept_messages: int
    kept_bytes: int
    missed_messages: int


class _Chunk:
    """Consecutive messages that are dropped together."""

    __slots__ = ("first_offset", "payload_bytes", "payloads")

    def __init__(self, first_offset: int) -> None:
        self.first_offset = first_offset
        self.payloads: list[bytes] = []
        self.payload_bytes = 0


def _first_offset(chunk: _Chunk) -> int:
    return chunk.first_offset


class LiveReader(Reader):
    """A position in a live log, which moves to the oldest message when the messages at it were dropped."""

    def __init__(
        self, log: LiveLog, offset: int, stop_offset: int, follow: bool, missed: Callable[[int], None]
    ) -> None:
        super().__init__(log, offset, stop_offset, follow)
        self._missed = missed

    def _advance(self, batch: Batch) -> Batch:
        if batch.first_offset > self.offset:
            self._missed(batch.first_offset - self.offset)
        self.offset = batch.next_offset
        return batch


class LiveLog(Listened, ReadableLog):
    """The newest messages of a topic, in memory. Any number of threads and tasks may use it at once."""

    def __init__(self, directory: Path, settings: LogSettings, files: Files, time_field: int) -> None:
        super().__init__(directory, files, settings.read_chunk_bytes, time_field)
        self._time_at = time_field
        self._max_messages = max(1, settings.cache_max_messages)
        self._max_bytes = settings.cache_max_bytes
        self._max_message_bytes = settings.max_message_bytes
        self._mutex = Lock()
        self._listeners: list[Waiter] = []
        self._somebody_sleeps = False
        self._refusal: Callable[[], TidelogError] | None = None
        self._next_offset = 0
        self._chunks = [_Chunk(0)]
        self._sealed_bytes = 0
        self._missed_messages = 0
        # What `try_append` looks at: the open chunk, the bytes it has room for, and the offset that begins the next.
        self._open_payloads = self._chunks[-1].payloads
        self._chunk_bytes = self._room_bytes = max(1, self._max_bytes // _PART)
        self._chunk_end = self._chunk_messages = max(1, self._max_messages // _PART)
        stopping.closes_at_exit(self)

    # Appending

    def try_append(self, payload: bytes) -> int:
        """Accepts a payload: its offset. It never waits; a closed log raises."""
        size = len(payload)
        with self._mutex:
            offset = self._next_offset
            room = self._room_bytes - size
            if room < 0 or offset >= self._chunk_end or size > self._max_message_bytes or self._somebody_sleeps:
                self._admit(size)
                if room < 0 or offset >= self._chunk_end:
                    self._begin_chunk(size)
                room = self._room_bytes - size
            # In this order because Ctrl-C may raise after any call in here, and offsets must keep counting messages.
            self._next_offset = offset + 1
            self._room_bytes = room
            self._open_payloads.append(payload)
            return offset

    def append_many(self, payloads: Sequence[bytes]) -> range:
        """Accepts all payloads with consecutive offsets, or none of them; readers see them at the same moment."""
        with self._mutex:
            self._admit(max(map(len, payloads), default=0))
            first = self._next_offset
            for payload in payloads:
                size = len(payload)
                if self._room_bytes < size or self._next_offset >= self._chunk_end:
                    self._begin_chunk(size)
                self._next_offset += 1
                self._room_bytes -= size
                self._open_payloads.append(payload)
            return range(first, self._next_offset)

    def _admit(self, size: int) -> None:
        """Raises if the append cannot be accepted; otherwise wakes the waiting readers."""
        if self._refusal is not None:
            raise self._refusal()
        if size > self._max_message_bytes:
            raise MessageTooLargeError(
                f"a message of {size} bytes is over max_message_bytes ({self._max_message_bytes})",
                operation="append",
                hint="Split it, or raise max_message_bytes",
            )
        if self._somebody_sleeps:
            self._wake()

    def _begin_chunk(self, size: int) -> None:
        """Drops so many chunks that a full new one, which begins with a message of this size, is within the bounds."""
        if self._open_payloads:
            last = self._chunks[-1]
            last.payload_bytes = self._chunk_bytes - self._room_bytes
            self._sealed_bytes += last.payload_bytes
            self._chunks.append(_Chunk(self._next_offset))
        while len(self._chunks) > 1 and self._is_over_with(max(size, self._chunk_bytes)):
            self._sealed_bytes -= self._chunks.pop(0).payload_bytes
        self._open_payloads = self._chunks[-1].payloads
        self._room_bytes = self._chunk_bytes
        self._chunk_end = self._next_offset + self._chunk_messages

    def _is_over_with(self, chunk_bytes: int) -> bool:
        messages = self._next_offset - self._chunks[0].first_offset + self._chunk_messages
        return messages > self._max_messages or self._sealed_bytes + chunk_bytes > self._max_bytes

    def _wake(self) -> None:
        listeners, self._listeners = self._listeners, []
        finish_all(listeners)
        self._somebody_sleeps = False

    # Where it stands

    @property
    def start_offset(self) -> int:
        with self._mutex:
            return self._chunks[0].first_offset

    @property
    def next_offset(self) -> int:
        return self._next_offset

    @property
    def durable_offset(self) -> int:
        """For subscriptions: a position here lasts as long as the messages do."""
        return self._next_offset

    @property
    def over(self) -> bool:
        return self._refusal is not None

    def flush(self) -> None:
        """There is nothing to wait for."""

    def statistics(self) -> LiveStatistics:
        with self._mutex:
            start = self._chunks[0].first_offset
            return LiveStatistics(
                state="open" if self._refusal is None else "closed",
                start_offset=start,
                next_offset=self._next_offset,
                kept_messages=self._next_offset - start,
                kept_bytes=self._sealed_bytes + self._chunk_bytes - self._room_bytes,
                missed_messages=self._missed_messages,
            )

    # Reading

    def read(self, start: Position = "earliest", stop: Position | None = None, *, follow: bool = False) -> LiveReader:
        """As every readable log, but a dropped offset is not an error: the reader continues with the oldest message."""
        if self._refusal is not None:
            raise self._refusal()
        first, latest = self.resolve(start), self._next_offset
        end = NO_STOP if stop is None else self.resolve_stop(stop)
        return LiveReader(self, first, end if follow else min(end, latest), follow, self._count_missed)

    def _check_kept(self, offset: int) -> None:
        """An offset may have been dropped: readers continue with the oldest message."""
        if offset > self._next_offset:
            raise OffsetOutOfRangeError(
                f"offset {offset} is not there yet: the next is {self._next_offset}",
                operation="read",
                path=self.directory,
                hint="Offsets of a live topic begin at 0 whenever it is opened",
            )

    def locate(self, offset: int, stop_offset: int) -> Batch | None:
        """Messages from `offset` on, or from the oldest one in memory; none if that is after the stop."""
        with self._mutex:
            if offset >= self._next_offset:
                return None
            first = max(offset, self._chunks[0].first_offset)
            if first >= stop_offset:
                return Batch(stop_offset, None, 0, 0, [])
            chunk = self._chunks[bisect_right(self._chunks, first, key=_first_offset) - 1]
            bare = chunk.payloads[first - chunk.first_offset : stop_offset - chunk.first_offset]
            return Batch(first, None, 0, len(bare), bare)

    def offset_at(self, time_us: int, first_offset: int = 0) -> int:
        """The first offset of this time or later among those that are kept; the next when there is none yet."""
        with self._mutex:
            chunks = [(chunk.first_offset, list(chunk.payloads)) for chunk in self._chunks]
            latest = self._next_offset
        for first, payloads in chunks:
            for offset, payload in enumerate(payloads, first):
                if offset >= first_offset and _TIME.unpack_from(payload, self._time_at)[0] >= time_us:
                    return offset
        return latest

    def _file_for_time(self, time_us: int) -> int:
        return self.start_offset

    def _count_missed(self, count: int) -> None:
        with self._mutex:
            is_first = self._missed_messages == 0
            self._missed_messages += count
        if is_first:
            _logger.warning(
                "%s: a reader was too slow and missed %d messages; from now on they are only counted in statistics()",
                self.directory,
                count,
            )

    # Waiting

    def listen(self, waiter: Waiter, offset: int) -> bool:
        with self._mutex:
            if self._next_offset > offset or self._refusal is not None:
                return False
            self._listeners.append(waiter)
            self._somebody_sleeps = True
            return True

    def stop_listening(self, waiter: Waiter) -> bool:
        with self._mutex:
            if waiter in self._listeners:
                self._listeners.remove(waiter)
                return True
            return False

    # Ending

    def close(self) -> None:
        """Readers that follow get what is kept, and end. Closing twice is fine."""
        self.refuse(lambda: ClosedError("the live topic is closed", path=self.directory, hint="Open it again"))
        stopping.no_longer_open(self)

    def refuse(self, make_error: Callable[[], TidelogError]) -> None:
        """From now on appending and opening readers raise this; the first one counts."""
        with self._mutex:
            self._refusal = self._refusal or make_error
            self._chunk_end = 0
            self._wake()

    def forget(self) -> None:
        """After closing, when the topic is deleted: nothing is kept any more."""
        with self._mutex:
            self._chunks = [_Chunk(self._next_offset)]
            self._sealed_bytes = 0
            self._room_bytes = self._chunk_bytes

    def _abandon(self) -> None:
        """In a forked child: messages go to the readers of the parent, which this copy cannot reach."""
        self._mutex = Lock()  # another thread of the parent may have held it
        self._listeners = []
        self.refuse(
            lambda: ClosedError(
                "the live topic was opened before this process was forked",
                path=self.directory,
                hint="Open it after the fork",
            )
        )
