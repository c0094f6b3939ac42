"""A topic as the log of engines.

    seq = offset + 1        offsets begin at 0, and a seq of 0 means "nothing applied yet"

Invariants
- Only what is on the topic's disk is given out: an engine never applies what a crash of the topic could take back.
  Where the topic belongs to another process this one cannot know that, and takes what has been written.
- Any number of engines may follow one topic, each from its own `applied_seq`. The low-water mark of a group is the
  least that its members have reported (`topic.py`); without a group there is one engine, and it is the topic's
  end.
- A topic keeps its history by its own retention, in its store as a rule. `truncate` therefore deletes nothing, and is
  remembered in `truncated_seq`. An engine that is too far behind for what is left gets GapError.
- A message that is no entry is an error that names its offset: nothing is skipped.

The topic is taken by its shape, not by its class: engines know nothing of topics.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from threading import Lock
from typing import Protocol

import msgspec

from tidelog.codec import decode_document, encode_document
from tidelog.engine.txn.read_set import Carried, decode_entry, encode_entry
from tidelog.errors import DataError, GapError, InputError
from tidelog.files import Files, LocalFiles, explained

# How far each member of a group of engines is, and so how far all of them are.
#
# The members of a group are named beforehand: a member that has never been heard of has applied nothing, and keeps the
# low-water mark at 0. It could not be told otherwise from one that does not exist.
#
# `DirectoryMarks` keeps one small file a member, `<member>.mark`, in a directory that all of them see. Each member
# writes its own and nobody else's, as a whole and by renaming, so there is nothing to lock and nothing to lose: a
# member that reports late, or whose report is lost in a crash, makes the low-water mark lower than it could be, which
# is safe. A file that cannot be read is an error and not a 0, since something is wrong there that will not mend itself.


_KIND = "mark"
_VERSION = 1
_MEMBER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


class MemberMarks(Protocol):
    """The marks of a group."""

    def report(self, member: str, seq: int) -> None:
        """A member has applied everything up to a seq, and has it on its disk."""
        ...

    def low_water_mark(self) -> int:
        """What every member has applied."""
        ...


class MemoryMarks:
    """Marks of engines in one process."""

    def __init__(self, members: Iterable[str]) -> None:
        self._applied = dict.fromkeys(_checked(members), 0)
        self._mutex = Lock()

    def report(self, member: str, seq: int) -> None:
        _check_member(member, self._applied)
        with self._mutex:
            self._applied[member] = seq

    def low_water_mark(self) -> int:
        with self._mutex:
            return min(self._applied.values())


class _Mark(msgspec.Struct, frozen=True):
    member: str
    applied_seq: int


class DirectoryMarks:
    """Marks of engines in several processes, in a shared directory."""

    def __init__(self, directory: str | Path, members: Iterable[str], *, files: Files | None = None) -> None:
        self._directory = Path(directory)
        self._members = _checked(members)
        self._files = files or LocalFiles()
        self._reported: dict[str, int] = {}
        with explained("make the directory of marks", self._directory):
            self._files.make_directories(self._directory)

    def report(self, member: str, seq: int) -> None:
        _check_member(member, self._members)
        if self._reported.get(member) == seq:
            return
        path = self._path(member)
        with explained("write a mark", path):
            self._files.write_atomically(path, encode_document(_KIND, _VERSION, _Mark(member, seq)))
        self._reported[member] = seq

    def low_water_mark(self) -> int:
        return min(self._applied(member) for member in self._members)

    def _applied(self, member: str) -> int:
        path = self._path(member)
        with explained("read a mark", path):
            if not self._files.exists(path):
                return 0
            content = self._files.read(path)
        return decode_document(_KIND, _VERSION, content, _Mark).applied_seq

    def _path(self, member: str) -> Path:
        return self._directory / f"{member}.mark"


def _checked(members: Iterable[str]) -> tuple[str, ...]:
    names = tuple(members)
    if not names or len(set(names)) != len(names):
        raise InputError(f"the members of a group must be named, each once, and not {names!r}")
    for name in names:
        if not _MEMBER.fullmatch(name):
            raise InputError(f"{name!r} is no name of a member", hint="Letters, digits, '_', '.' and '-', 100 at most")
    return names


def _check_member(member: str, members: Iterable[str]) -> None:
    if member not in members:
        raise InputError(f"{member!r} is no member of the group {', '.join(members)}")


class EntryMessage(Protocol):
    """A message, as far as it matters here."""

    @property
    def offset(self) -> int: ...

    @property
    def value(self) -> bytes | None: ...


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
            raise InputError("marks and member must be given together", hint="Give both, or neither")
        self._topic = topic
        self._marks = marks
        self._member = member
        self._is_owner = is_owner
        self.truncated_seq = 0

    def append(self, entry: Carried) -> int:
        """Appends an entry to the log; returns its seq once it is durable in the topic. Several at once are a Batch."""
        return seq_of(self._topic.append(encode_entry(entry), sync=True))

    @property
    def last_seq(self) -> int:
        """The seq of the last entry; 0 without entries."""
        return self._stop_offset()

    def _stop_offset(self) -> int:
        return self._topic.durable_offset if self._is_owner else self._topic.next_offset

    # What `drive` asks for

    def entries(self, after_seq: int, up_to: int | None = None) -> Iterator[tuple[int, Carried]]:
        """Yields the entries after a seq, up to another (inclusive) or to the current end."""
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
            return decode_entry(message.value or b"")
        except DataError as error:
            where = f"offset {message.offset} of topic {self._topic.name}"
            raise DataError(f"{where}: {error.message}", hint="Use a topic of its own for entries") from error

    def low_water_mark(self) -> int:
        """The seq that all members have applied; without a group, the last seq."""
        return self.last_seq if self._marks is None else self._marks.low_water_mark()

    def note_applied(self, seq: int) -> None:
        """Records how far this member is."""
        if self._marks is not None and self._member is not None:
            self._marks.report(self._member, seq)

    def agreed_seq(self, applied_seq: int) -> int:
        """The last seq on which engine and topic agree: a topic that was taken over may have lost its end."""
        return min(applied_seq, self.last_seq)

    def truncate(self, seq: int) -> None:
        """Records that the store has everything up to a seq; the topic follows its own retention."""
        self.truncated_seq = seq
