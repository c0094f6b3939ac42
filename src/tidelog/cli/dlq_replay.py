"""Sending dead letters back, each once into each topic.

Invariants
- The sequence of a letter is its offset among the dead letters, and the producer is named after their topic. What a
  killed run has stored is therefore known to the next one, from the target itself.
- A topic of dead letters that was deleted and made again counts from 0 again: its letters are not taken for those of
  the old one. The last letter that was sent is looked up in the target, and when it is another one, the producer gets
  the next name.
"""

from __future__ import annotations

import hashlib
from itertools import count
from typing import TYPE_CHECKING

from tidelog.cli.dlq_letter import Letter
from tidelog.cli.errors import text_of
from tidelog.cli.topic_choice import require_ours
from tidelog.cli.topic_names import require_topic
from tidelog.errors import InputError, TidelogError

if TYPE_CHECKING:
    from tidelog.cli.output import Row
    from tidelog.topics.message import Message
    from tidelog.topics.producer import Producer
    from tidelog.topics.storage import LogDirectory
    from tidelog.topics.topic import Topic

# A producer's name is shorter than a topic's may be.
_READABLE_LETTERS = 100


class Replay:
    """One run over the letters of a topic, which this process owns."""

    def __init__(self, log: LogDirectory, letters: Topic, into: str | None, take_over: bool) -> None:
        self._log = log
        self._letters = letters
        self._into = into
        self._take_over = take_over
        self._targets: dict[str | None, _Target] = {}

    def run(self, max_messages: int | None) -> list[Row]:
        """Sends up to so many letters; returns a row for each topic that they belong to."""
        sent = 0
        for message in self._letters.read("earliest", follow=False, on_gap="skip"):
            if sent == max_messages:
                break
            letter = Letter(self._letters.name, message)
            sent += self._target(self._into or letter.origin_topic).send(letter)
        for target in self._targets.values():
            target.close()
        return [target.row() for target in self._targets.values()]

    def _target(self, name: str | None) -> _Target:
        if name not in self._targets:
            target = self._targets[name] = _Target(name)
            try:
                target.open(self._opened(name), self._letters)
            except TidelogError as error:
                target.problem = f"{text_of(error)}; --into sends the letters elsewhere"
        return self._targets[name]

    def _opened(self, name: str | None) -> Topic:
        if name is None:
            raise InputError("no header says where the letters came from")
        if name == self._letters.name:
            raise InputError("dead letters cannot be sent to the topic that they are in")
        require_topic(self._log, name)
        require_ours(self._log, name, self._take_over)
        return self._log.topic(name, take_over=self._take_over)


class _Target:
    """A topic that letters go to, or one that cannot take them: then they stay."""

    def __init__(self, name: str | None) -> None:
        self.problem: str | None = None
        self._name = name
        self._topic: Topic | None = None
        self._producer: Producer | None = None
        self._last_sent = -1
        self._first_offset: int | None = None
        self._last_offset: int | None = None
        self._sent = 0
        self._skipped = 0

    def open(self, topic: Topic, letters: Topic) -> None:
        self._topic = topic
        self._producer = _producer(topic, letters)
        last = self._producer.last_sequence
        self._last_sent = -1 if last is None else last

    def send(self, letter: Letter) -> bool:
        """Whether it went out just now."""
        if self._producer is None or letter.offset <= self._last_sent:
            self._skipped += 1
            return False
        self._last_offset = self._producer.append(letter.reborn(), sequence=letter.offset)
        if self._first_offset is None:
            self._first_offset = self._last_offset
        self._sent += 1
        return True

    def close(self) -> None:
        """Everything that was sent is on the disk when this returns."""
        if self._topic is not None and self._producer is not None:
            self._topic.flush()
            self._producer.close()

    def row(self) -> Row:
        return {
            "into": self._name,
            "messages": self._sent,
            "skipped": self._skipped,
            "first_offset": self._first_offset,
            "last_offset": self._last_offset,
            "problem": self.problem,
        }


def _producer(target: Topic, letters: Topic) -> Producer:
    """The producer that has sent these letters before, or a new one."""
    for generation in count():
        producer = target.producer(_producer_name(letters.name, generation))
        if _has_sent_these(producer, target, letters):
            return producer
        producer.close()
    raise AssertionError("counting does not end")


def _producer_name(letters: str, generation: int) -> str:
    digest = hashlib.blake2b(letters.encode(), digest_size=8).hexdigest()
    return f"dlq-replay {letters[:_READABLE_LETTERS]} {digest} {generation}"


def _has_sent_these(producer: Producer, target: Topic, letters: Topic) -> bool:
    """Whether the last letter that a producer sent is the one that is there now. What retention took is believed."""
    last = producer.last_sequence
    if last is None:
        return True
    if last >= letters.next_offset:
        return False
    letter = _at(letters, last)
    if letter is None:
        return True
    expected = Letter(letters.name, letter).reborn()
    # It is stored: nothing is appended, and the offset of what is stored comes back.
    found = _at(target, producer.append(expected, sequence=last))
    return found is None or _content(found) == _content(expected)


def _content(message: Message) -> tuple[bytes, bytes | None, dict[str, bytes]]:
    return message.value, message.key, dict(message.headers)


def _at(topic: Topic, offset: int) -> Message | None:
    if not topic.start_offset <= offset < topic.next_offset:
        return None
    return next(iter(topic.read(offset, offset + 1, follow=False, on_gap="skip")), None)
