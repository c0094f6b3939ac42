"""A topic as the log of engines.

    seq = offset + 1        offsets begin at 0, and a seq of 0 means "nothing applied yet"

Invariants
- Only what is on the topic's disk is given out: an engine never applies what a crash of the topic could take back.
  Where the topic belongs to another process this one cannot know that, and takes what has been written.
- Any number of engines may follow one topic, each from its own `applied_seq`. The low-water mark of a group is the
  least that its members have reported (`member_marks.py`); without a group there is one engine, and it is the topic's
  end.
- A topic keeps its history by its own retention, in its store as a rule. `truncate` therefore deletes nothing, and is
  remembered in `truncated_seq`. An engine that comes too late for what is left is told by GapError.
- A message that is no entry is an error that names its offset: nothing is skipped.

The topic is taken by its shape, not by its class: engines know nothing of topics.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from tidelog.engine.entry_codec import Carried, decode_entry, encode_entry
from tidelog.engine.member_marks import MemberMarks
from tidelog.errors import DataError, GapError, InputError


class EntryMessage(Protocol):
    """A message, as far as it matters here."""

    @property
    def offset(self) -> int: ...

    @property
    def value(self) -> bytes: ...


class EntryTopic(Protocol):
    """A topic, as far as it matters here."""

    @property
    def name(self) -> str: ...

    @property
    def start_offset(self) -> int: ...

    @property
    def next_offset(self) -> int: ...

    @property
    def durable_offset(self) -> int: ...

    def read(self, start: int, stop: int) -> Iterator[EntryMessage]: ...

    def append(self, value: bytes, *, sync: bool) -> int: ...


def seq_of(offset: int) -> int:
    """The seq of the entry at an offset."""
    return offset + 1


def offset_of(seq: int) -> int:
    """The offset of the entry of a seq."""
    return seq - 1


class TopicOrchestrator:
    """The log of one engine, or of a group of them: then with their `marks` and the name of this `member`.

    `is_owner=False` for a topic that another process owns: it is read, and never appended to.
    """

    def __init__(
        self, topic: EntryTopic, *, marks: MemberMarks | None = None, member: str | None = None, is_owner: bool = True
    ) -> None:
        if (marks is None) != (member is None):
            raise InputError("a group has marks, and this engine a name in it", hint="Give both, or neither")
        self._topic = topic
        self._marks = marks
        self._member = member
        self._is_owner = is_owner
        self.truncated_seq = 0

    def append(self, entry: Carried) -> int:
        """Brings an entry into the log; its seq, once it is on the topic's disk. Several at once are a Batch."""
        return seq_of(self._topic.append(encode_entry(entry), sync=True))

    @property
    def last_seq(self) -> int:
        """The seq of the last entry that is given out; 0 when there is none."""
        return self._stop_offset()

    def _stop_offset(self) -> int:
        return self._topic.durable_offset if self._is_owner else self._topic.next_offset

    # What `drive` asks for

    def entries(self, after_seq: int, up_to: int | None = None) -> Iterator[tuple[int, Carried]]:
        """Entries after a seq, up to another (inclusive) or to what is there now."""
        stop = self._stop_offset() if up_to is None else min(self._stop_offset(), offset_of(up_to) + 1)
        start = offset_of(after_seq + 1)
        if start >= stop:
            return
        self._check_kept(start)
        for message in self._topic.read(start, stop):
            yield seq_of(message.offset), self._decoded(message)

    def _check_kept(self, start: int) -> None:
        kept = self._topic.start_offset
        if start < kept:
            raise GapError(
                f"topic {self._topic.name} begins at offset {kept} by now, and seq {seq_of(start)} is asked for",
                first=start,
                last=kept - 1,
                hint="Restore the engine from its store, which reaches further; then drive it",
            )

    def _decoded(self, message: EntryMessage) -> Carried:
        try:
            return decode_entry(message.value)
        except DataError as error:
            where = f"offset {message.offset} of topic {self._topic.name}"
            raise DataError(f"{where}: {error.message}", hint="Use a topic of its own for entries") from error

    def low_water_mark(self) -> int:
        """What all members have applied; without a group, all there is."""
        return self.last_seq if self._marks is None else self._marks.low_water_mark()

    def note_applied(self, seq: int) -> None:
        """Tells the group how far this member is."""
        if self._marks is not None and self._member is not None:
            self._marks.report(self._member, seq)

    def agreed_seq(self, applied_seq: int) -> int:
        """A topic that was taken over without its tail is shorter than what was applied from it."""
        return min(applied_seq, self.last_seq)

    def truncate(self, seq: int) -> None:
        """Remembers that the store has everything up to a seq; the topic goes by its own retention."""
        self.truncated_seq = seq
