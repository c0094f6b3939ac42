"""A topic: messages with keys, headers and times, over one log.

Everything is done once a batch: a batch of frames becomes a list of messages in one call, and the iterator hands that
list out.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

import msgspec

from tidelog.clock import Clock, to_microseconds
from tidelog.errors import InputError
from tidelog.log import Log, Position
from tidelog.log.statistics import LogStatistics
from tidelog.log.view import LogView
from tidelog.topics.message import ENVELOPE_ERRORS, Message, encode_envelope, explain_envelope_error
from tidelog.topics.names import TopicName
from tidelog.topics.reading import OnGap, read_messages, read_messages_async


class TopicStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of a topic; `log` is None when it was opened for reading only."""

    name: str
    start_offset: int
    next_offset: int
    log: LogStatistics | None


class Topic:
    """A topic. Any number of threads and tasks may use it at once."""

    def __init__(self, name: TopicName, log: Log | LogView, clock: Clock) -> None:
        self._name = name
        self._readable = log
        self._owned = log if isinstance(log, Log) else None
        self._now_us = clock.now_us

    @property
    def name(self) -> str:
        """`namespace/name`."""
        return str(self._name)

    def __repr__(self) -> str:
        return f"<Topic {self.name} at {self._readable.directory}>"

    # Where it stands

    @property
    def next_offset(self) -> int:
        """The offset that the next message gets."""
        return self._readable.next_offset

    @property
    def durable_offset(self) -> int:
        """Everything below is synced to the disk."""
        return self._log.durable_offset

    @property
    def start_offset(self) -> int:
        """The oldest offset that can be read."""
        return self._readable.start_offset

    @property
    def hot_start_offset(self) -> int:
        """The oldest offset that is on this machine's disk."""
        return self._readable.start_offset

    @property
    def shipped_offset(self) -> int:
        """Everything below is in the object store; 0 without one."""
        return 0

    def statistics(self) -> TopicStatistics:
        """An immutable snapshot."""
        return TopicStatistics(
            name=self.name,
            start_offset=self.start_offset,
            next_offset=self.next_offset,
            log=None if self._owned is None else self._owned.statistics(),
        )

    # Reading

    def read(
        self,
        start: Position = "earliest",
        stop: Position | None = None,
        *,
        follow: bool = False,
        on_gap: OnGap = "raise",
    ) -> Iterator[Message]:
        """Messages from `start` (an offset, "earliest", "latest" or a datetime) up to `stop` (exclusive), in order.

        Without `follow` it ends at the offset that is next now; with it, it waits for more and ends when the log is
        closed. Where the positions lie is settled by this call, not by the first message. Messages that a repair could
        not save raise GapError, or are left out with `on_gap="skip"`.
        """
        return read_messages(self._readable.read(start, stop, follow=follow), _checked_on_gap(on_gap))

    def read_async(
        self,
        start: Position = "earliest",
        stop: Position | None = None,
        *,
        follow: bool = False,
        on_gap: OnGap = "raise",
    ) -> AsyncIterator[Message]:
        """As `read`, for `async for`: waiting and reading files never block the event loop."""
        return read_messages_async(self._readable.read(start, stop, follow=follow), _checked_on_gap(on_gap))

    # Appending

    @property
    def _log(self) -> Log:
        if self._owned is None:
            raise InputError("the log directory was opened with read_only=True", operation=f"topic {self.name}")
        return self._owned

    def append(
        self,
        value: bytes | Message,
        *,
        key: bytes | None = None,
        headers: Mapping[str, bytes] | None = None,
        timestamp: datetime | None = None,
        sync: bool = False,
        timeout: float | None = None,
    ) -> int:
        """Accepts a message and returns its offset; with `sync` once it is on the disk.

        Blocks while the writer is behind, for `timeout` seconds at most (default: `append_timeout_ms`), then raises
        BackpressureError without having used an offset.
        """
        log = self._owned or self._log
        if timeout is not None:
            _check_timeout(timeout)
        payload = self._payload(value, key, headers, timestamp)
        offset = log.try_append(payload)
        if offset is not None and not sync:
            return offset
        return log.finish_append(payload, offset, sync, timeout)

    def append_many(
        self, messages: Iterable[bytes | Message], *, sync: bool = False, timeout: float | None = None
    ) -> list[int]:
        """Accepts all messages with consecutive offsets, or none of them; returns the offsets."""
        _check_timeout(timeout)
        return list(self._log.append_many(self._payloads(messages), sync=sync, timeout_seconds=timeout))

    def append_async(
        self,
        value: bytes | Message,
        *,
        key: bytes | None = None,
        headers: Mapping[str, bytes] | None = None,
        timestamp: datetime | None = None,
        sync: bool = False,
        timeout: float | None = None,
    ) -> Coroutine[Any, Any, int]:
        """As `append`, to be awaited: the task is suspended instead of blocking the thread."""
        log = self._owned or self._log
        _check_timeout(timeout)
        return log.append_async(self._payload(value, key, headers, timestamp), sync=sync, timeout_seconds=timeout)

    async def append_many_async(
        self, messages: Iterable[bytes | Message], *, sync: bool = False, timeout: float | None = None
    ) -> list[int]:
        """As `append_many`, suspending the task."""
        _check_timeout(timeout)
        return list(await self._log.append_many_async(self._payloads(messages), sync=sync, timeout_seconds=timeout))

    def flush(self) -> None:
        """Returns once everything accepted so far is on the disk."""
        self._log.flush()

    async def flush_async(self) -> None:
        """As `flush`, suspending the task."""
        await self._log.flush_async()

    def _payload(
        self,
        value: bytes | Message,
        key: bytes | None,
        headers: Mapping[str, bytes] | None,
        timestamp: datetime | None,
    ) -> bytes:
        time_us = self._now_us() if timestamp is None else _checked_time_us(timestamp)
        try:
            return encode_envelope(value, key, headers, time_us)
        except ENVELOPE_ERRORS as error:
            # Not bytes: a Message, or a mistake. Looked at only now, so that the common way pays nothing for it.
            if not isinstance(value, Message):
                raise explain_envelope_error(error, value, key, headers) from error
        if key is not None or headers is not None or timestamp is not None:
            raise InputError("a Message carries its own key, headers and timestamp; give them there")
        return self._payload(value.value, value.key, value.headers, value.timestamp)

    def _payloads(self, messages: Iterable[bytes | Message]) -> list[bytes]:
        if isinstance(messages, (bytes, bytearray, str, Message)) or not isinstance(messages, Iterable):
            raise InputError(f"append_many takes several messages, not one {type(messages).__name__}")
        return [self._payload(message, None, None, None) for message in messages]


def _checked_time_us(timestamp: object) -> int:
    if not isinstance(timestamp, datetime):
        raise InputError(f"timestamp must be a datetime, not {type(timestamp).__name__}")
    return to_microseconds(timestamp)


def _check_timeout(timeout: object) -> None:
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise InputError(f"timeout must be a number of seconds, 0 or more, not {timeout!r}")


def _checked_on_gap(on_gap: OnGap) -> OnGap:
    if on_gap not in ("raise", "skip"):
        raise InputError(f'on_gap is "raise" or "skip", not {on_gap!r}')
    return on_gap
