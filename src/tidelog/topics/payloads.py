"""From what a caller gives to the payload of a frame: one message, or several that count only together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime

from tidelog.clock import to_microseconds
from tidelog.errors import InputError
from tidelog.topics.envelope_python import LEAST_US, MOST_US
from tidelog.topics.extension import batch_marks, encode_deliver_at
from tidelog.topics.message import ENVELOPE_ERRORS, Message, encode_envelope, explain_envelope_error


class PayloadEncoder:
    """Puts messages into envelopes; those without a time get the time of the append."""

    def __init__(self, now_us: Callable[[], int]) -> None:
        self._now_us = now_us

    def one(
        self,
        value: bytes | Message,
        key: bytes | None,
        headers: Mapping[str, bytes] | None,
        timestamp: datetime | None,
        deliver_at: datetime | None = None,
        extension: bytes = b"",
    ) -> bytes:
        """A single message; a `Message` carries everything itself."""
        time_us = self._now_us() if timestamp is None else _checked_time_us(timestamp, "timestamp")
        whole = extension if deliver_at is None else extension + _delivery(deliver_at)
        try:
            return encode_envelope(value, key, headers, time_us, whole)
        except ENVELOPE_ERRORS as error:
            # Not bytes: a Message, or a mistake. Looked at only now, so that the common way pays nothing for it.
            if not isinstance(value, Message):
                raise explain_envelope_error(error, value, key, headers) from error
        if key is not None or headers is not None or timestamp is not None or deliver_at is not None:
            raise InputError("a Message carries its own key, headers and times; give them there")
        return self.one(value.value, value.key, value.headers, value.timestamp, value.deliver_at, extension)

    def many(self, messages: Iterable[bytes | Message]) -> list[bytes]:
        """Messages that are appended together; more than one of them are marked as a batch."""
        whole = several(messages)
        if len(whole) < 2:
            return [self.one(message, None, None, None) for message in whole]
        marks = batch_marks(len(whole))
        return [self.one(message, None, None, None, None, mark) for message, mark in zip(whole, marks, strict=True)]


def several(messages: Iterable[bytes | Message]) -> Sequence[bytes | Message]:
    """The messages as a sequence; InputError for a single one."""
    if isinstance(messages, (bytes, bytearray, str, Message)) or not isinstance(messages, Iterable):
        raise InputError(f"append_many takes several messages, not one {type(messages).__name__}")
    return messages if isinstance(messages, list | tuple) else list(messages)


def _delivery(deliver_at: object) -> bytes:
    return encode_deliver_at(_checked_time_us(deliver_at, "deliver_at"))


def _checked_time_us(time: object, what: str) -> int:
    if not isinstance(time, datetime):
        raise InputError(f"{what} must be a datetime, not {type(time).__name__}")
    time_us = to_microseconds(time)
    if not LEAST_US <= time_us <= MOST_US:
        raise InputError(f"{what} is outside of the years 1 to 9999 in UTC: {time.isoformat()}")
    return time_us
