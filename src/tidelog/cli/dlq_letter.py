"""A dead letter: a message whose headers say where it came from. Headers are bytes that anybody may have written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidelog.errors import TopicNameError
from tidelog.topics.dead_letters import (
    NACK_REASON,
    ORIGIN_DELIVERIES,
    ORIGIN_OFFSET,
    ORIGIN_REASON,
    ORIGIN_SUBSCRIPTION,
    ORIGIN_TOPIC,
)
from tidelog.topics.message import Message
from tidelog.topics.names import parse_topic_name

if TYPE_CHECKING:
    from tidelog.cli.output import Row

REPLAYED_FROM = "tidelog-replayed-from"
"""The header of a message that was sent back: `<topic of the dead letters>@<offset there>`."""
_OF_A_LETTER = (ORIGIN_TOPIC, ORIGIN_OFFSET, ORIGIN_SUBSCRIPTION, ORIGIN_DELIVERIES, ORIGIN_REASON, NACK_REASON)
# More digits are no offset, and would cost time to read.
_MAX_DIGITS = 20


class Letter:
    """One message of a topic with dead letters; what its headers do not say properly is None."""

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

    def row(self) -> Row:
        """What is shown of it."""
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
            "bytes": len(self.message.value),
        }

    def reborn(self) -> Message:
        """The message as it was before it was given up, and a header that tells where it was meanwhile."""
        headers = {name: value for name, value in self.message.headers.items() if name not in _OF_A_LETTER}
        headers[REPLAYED_FROM] = f"{self.topic}@{self.offset}".encode()
        return Message(self.message.value, key=self.message.key, headers=headers)

    def _text(self, header: str) -> str | None:
        value = self.message.headers.get(header)
        return None if value is None else value.decode("utf-8", "replace")

    def _number(self, header: str) -> int | None:
        value = self.message.headers.get(header, b"")
        return int(value) if value.isdigit() and len(value) <= _MAX_DIGITS else None
