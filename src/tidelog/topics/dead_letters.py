"""Messages that were given up, in a topic of their own, with where they came from in their headers.

Invariants
- A message is durable among the dead letters before it counts as acknowledged: a crash in between loses nothing.
- What was written before such a crash is found there by its origin, and not written again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from tidelog.errors import InputError
from tidelog.topics.delivery_queue import Delivery
from tidelog.topics.message import Message

ORIGIN_TOPIC = "tidelog-origin-topic"
ORIGIN_OFFSET = "tidelog-origin-offset"
ORIGIN_SUBSCRIPTION = "tidelog-origin-subscription"
ORIGIN_DELIVERIES = "tidelog-origin-deliveries"
ORIGIN_REASON = "tidelog-origin-reason"
_REASON = "max_deliveries"


class DeadLetterTopic(Protocol):
    """What is asked of the topic that takes them."""

    def append_many(self, messages: Iterable[bytes | Message], *, sync: bool = False) -> list[int]: ...
    def read(self) -> Iterable[Message]: ...


class DeadLetters:
    """Where one subscription puts the messages that it gives up."""

    def __init__(self, target: DeadLetterTopic, topic: str, subscription: str) -> None:
        self._target = target
        self._topic = topic
        self._subscription = subscription
        self._written: set[int] | None = None

    def write(self, messages: Sequence[Delivery], floor: int) -> list[int]:
        """Makes them durable there; returns their offsets. None below `floor` can come again."""
        if self._written is None:
            self._written = {offset for offset in self._origins() if offset >= floor}
        new = [self._letter(message) for message in messages if message.offset not in self._written]
        if new:
            self._target.append_many(new, sync=True)
        offsets = [message.offset for message in messages]
        self._written = {offset for offset in self._written if offset >= floor} | set(offsets)
        return offsets

    def _origins(self) -> Iterable[int]:
        """The offsets that this subscription has put there before: an earlier process may not have got further."""
        for message in self._target.read():
            origin = message.headers.get(ORIGIN_TOPIC), message.headers.get(ORIGIN_SUBSCRIPTION)
            offset = message.headers.get(ORIGIN_OFFSET, b"")
            if origin == (self._topic.encode(), self._subscription.encode()) and offset.isdigit():
                yield int(offset)

    def _letter(self, message: Delivery) -> Message:
        headers = {
            **message.headers,
            ORIGIN_TOPIC: self._topic.encode(),
            ORIGIN_OFFSET: b"%d" % message.offset,
            ORIGIN_SUBSCRIPTION: self._subscription.encode(),
            ORIGIN_DELIVERIES: b"%d" % message.delivery_count,
            ORIGIN_REASON: _REASON.encode(),
        }
        return Message(message.value, key=message.key, headers=headers, timestamp=message.timestamp)


def dead_letter_name(topic: str, subscription: str, chosen: str | None) -> str:
    """The topic for the dead letters of a subscription."""
    if chosen == topic:
        raise InputError("dead letters cannot go to the topic that they come from", hint="Name another topic")
    return chosen or f"{topic}.{subscription}.dlq"
