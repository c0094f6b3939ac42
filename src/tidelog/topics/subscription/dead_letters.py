"""Dead letters: undeliverable messages, stored in a topic of their own with their origin in the headers.

Invariants
- A message is durable in the dead letter topic before it counts as acknowledged: a crash in between loses nothing. With
  a store, durable means shipped, because the acknowledgement is stored where it outlives the local disk, and so was the
  message.
- A dead letter that was written before such a crash is found by its origin and not written again. The position of the
  subscription says where that search begins: earlier letters have their acknowledgements stored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from tidelog.errors import InputError, TopicNameError
from tidelog.log.isolation import Isolation
from tidelog.topics.message import Message, with_headers, without_headers
from tidelog.topics.names import parse_topic_name
from tidelog.topics.subscription.queue import Delivery

ORIGIN_TOPIC = "tidelog-origin-topic"
ORIGIN_OFFSET = "tidelog-origin-offset"
ORIGIN_SUBSCRIPTION = "tidelog-origin-subscription"
ORIGIN_DELIVERIES = "tidelog-origin-deliveries"
ORIGIN_REASON = "tidelog-origin-reason"
NACK_REASON = "tidelog-origin-nack-reason"
_REASON = "max_deliveries"
MAX_REASON_CHARACTERS = 1000
"""So much is kept of what a consumer says when it rejects a message."""
_NO_REASONS: Mapping[int, str] = {}


class DeadLetterTopic(Protocol):
    """What is asked of the topic that takes them."""

    @property
    def durable_offset(self) -> int: ...
    @property
    def start_offset(self) -> int: ...
    @property
    def next_offset(self) -> int: ...
    @property
    def shipped_offset(self) -> int: ...
    @property
    def _has_store(self) -> bool: ...
    def append_many(self, messages: Iterable[bytes | Message], *, sync: bool = False) -> list[int]: ...
    def ship(self) -> int: ...
    def read(self, start: int, *, isolation: Isolation) -> Iterable[Message]: ...


class Written(NamedTuple):
    """The messages that are durable among the dead letters; `refused` says what could not be written."""

    offsets: list[int]
    refused: InputError | None


class DeadLetters:
    """Where one subscription puts the messages that it gives up. One thread at a time."""

    def __init__(self, open_target: Callable[[], DeadLetterTopic], topic: str, subscription: str) -> None:
        """`open_target` is called each time: the topic may have been deleted, or moved to another owner, since."""
        self._open_target = open_target
        self._topic = topic
        self._subscription = subscription
        # Where the letters are of messages that may come again; None: not looked for yet.
        self._written: dict[int, int] | None = None
        self._end_offset = 0

    def end_offset(self) -> int:
        """Everything that was written there is below."""
        return self._open_target().durable_offset

    def forget(self) -> None:
        """Existing letters are from an earlier time: the same messages may be given up again."""
        self._written = {}

    def write(
        self, messages: Sequence[Delivery], settled_offset: int, reasons: Mapping[int, str] = _NO_REASONS
    ) -> Written:
        """Makes them durable there, with the reasons for which they were rejected.

        An earlier process may have done so, in letters from `settled_offset` on.
        """
        target = self._open_target()
        if self._written is None:
            self._written = dict(self._origins(target, settled_offset))
        new = [message for message in messages if message.offset not in self._written]
        refused: InputError | None = None
        try:
            self._append(target, new, reasons)
        except InputError:
            refused = self._append_each(target, new, reasons)
        offsets = [message.offset for message in messages if message.offset in self._written]
        if target._has_store and target.shipped_offset < target.durable_offset:
            target.ship()  # else an acknowledgement that outlives this disk would be all that is left of the message
        self._end_offset = target.durable_offset
        return Written(offsets, refused)

    def settled_offset(self, is_settled: Callable[[int], bool]) -> int:
        """All letters below this offset of their topic are of messages that are settled. Called after `write`."""
        assert self._written is not None
        self._written = {origin: offset for origin, offset in self._written.items() if not is_settled(origin)}
        return min(self._written.values(), default=self._end_offset)

    def _append(self, target: DeadLetterTopic, messages: Sequence[Delivery], reasons: Mapping[int, str]) -> None:
        assert self._written is not None
        if messages:
            letters = target.append_many(
                [self._letter(message, reasons.get(message.offset)) for message in messages], sync=True
            )
            self._written.update((message.offset, at) for message, at in zip(messages, letters, strict=True))

    def _append_each(
        self, target: DeadLetterTopic, messages: Sequence[Delivery], reasons: Mapping[int, str]
    ) -> InputError | None:
        """With its origin a letter is a little larger than the message: one that is too large holds up no other, and
        goes without its reason if that makes it fit."""
        refused = None
        for message in messages:
            try:
                with contextlib.suppress(InputError):
                    self._append(target, [message], reasons)
                    continue
                self._append(target, [message], _NO_REASONS)
            except InputError as error:
                refused = InputError(
                    f"message {message.offset} does not fit into a dead letter: {error.message}",
                    operation=f"subscription {self._subscription}",
                    hint="Allow larger messages with max_message_bytes, or acknowledge this one",
                )
        return refused

    def _origins(self, target: DeadLetterTopic, first: int) -> Iterable[tuple[int, int]]:
        """What this subscription has put there, but did not live to acknowledge."""
        is_same_topic = first <= target.next_offset
        start = max(first if is_same_topic else 0, target.start_offset)
        for message in target.read(start, isolation="read_uncommitted"):
            origin = message.headers.get(ORIGIN_TOPIC), message.headers.get(ORIGIN_SUBSCRIPTION)
            offset = message.headers.get(ORIGIN_OFFSET, b"")
            if origin == (self._topic.encode(), self._subscription.encode()) and offset.isdigit():
                yield int(offset), message.offset

    def _letter(self, message: Delivery, nack_reason: str | None) -> Message:
        said = {
            ORIGIN_TOPIC: self._topic.encode(),
            ORIGIN_OFFSET: b"%d" % message.offset,
            ORIGIN_SUBSCRIPTION: self._subscription.encode(),
            ORIGIN_DELIVERIES: b"%d" % message.delivery_count,
            ORIGIN_REASON: _REASON.encode(),
        }
        if nack_reason is not None:
            said[NACK_REASON] = nack_reason.encode()
        headers = with_headers(without_headers(message.headers, {NACK_REASON}), said)
        return Message(message.value, key=message.key, headers=headers, timestamp=message.timestamp)


def check_dead_letter_name(topic: str, subscription: str, chosen: str | None) -> str:
    """The topic for the dead letters, as far as it can be one; else an error that says what to choose."""
    name = dead_letter_name(topic, subscription, chosen)
    try:
        return str(parse_topic_name(name))
    except TopicNameError as error:
        if chosen is not None:
            raise
        raise TopicNameError(
            f"the topic for dead letters would be called {name}, which is too long",
            hint='Choose another with dead_letter_topic="namespace/name"',
        ) from error


def dead_letter_name(topic: str, subscription: str, chosen: str | None) -> str:
    """The topic for the dead letters of a subscription."""
    if chosen == topic:
        raise InputError("dead letters cannot go to the topic that they come from", hint="Name another topic")
    return f"{topic}.{subscription}{_SUFFIX}" if chosen is None else chosen


_SUFFIX = ".dlq"


def is_dead_letter_name(name: str) -> bool:
    """Whether a topic may have been made for dead letters."""
    return name.endswith(_SUFFIX)


def is_for_letters(name: str, topic: str) -> bool:
    """Whether a topic may be that of the dead letters of some subscription of another one, both without namespace."""
    return name.startswith(f"{topic}.") and name.endswith(_SUFFIX) and len(name) > len(topic) + 1 + len(_SUFFIX)


# A dead letter: a message whose headers say where it came from. Headers are bytes that anybody may have written.


REPLAYED_FROM = "tidelog-replayed-from"
"""The header of a message that was sent back: `<topic of the dead letters>@<offset there>`."""
_OF_A_LETTER = (ORIGIN_TOPIC, ORIGIN_OFFSET, ORIGIN_SUBSCRIPTION, ORIGIN_DELIVERIES, ORIGIN_REASON, NACK_REASON)
# More digits are no offset, and would cost time to read.
_MAX_DIGITS = 20


class Letter:
    """One message of a topic with dead letters; a missing or invalid header is None."""

    def __init__(self, topic: str, message: Message) -> None:
        self.topic = topic
        self.message = message

    @property
    def offset(self) -> int:
        return self.message.offset

    @property
    def origin_topic(self) -> str | None:
        text = self._text(ORIGIN_TOPIC)
        try:
            return None if text is None else str(parse_topic_name(text))
        except TopicNameError:
            return None

    @property
    def subscription(self) -> str | None:
        return self._text(ORIGIN_SUBSCRIPTION)

    def row(self) -> dict[str, object]:
        return {
            "topic": self.topic,
            "offset": self.offset,
            "origin_topic": self.origin_topic,
            "origin_offset": self._number(ORIGIN_OFFSET),
            "subscription": self.subscription,
            "deliveries": self._number(ORIGIN_DELIVERIES),
            "reason": self._text(ORIGIN_REASON),
            "nack_reason": self._text(NACK_REASON),
            "timestamp": self.message.timestamp,
            "bytes": len(self.message.value or b""),
        }

    def reborn(self) -> Message:
        """The message as it was before it was given up, and a header that tells where it was meanwhile."""
        place = {REPLAYED_FROM: f"{self.topic}@{self.offset}".encode()}
        headers = with_headers(without_headers(self.message.headers, _OF_A_LETTER), place)
        return Message(self.message.value, key=self.message.key, headers=headers)

    def _text(self, header: str) -> str | None:
        value = self.message.headers.get(header)
        return None if value is None else value.decode("utf-8", "replace")

    def _number(self, header: str) -> int | None:
        value = self.message.headers.get(header, b"")
        return int(value) if value.isdigit() and len(value) <= _MAX_DIGITS else None
