"""How far each member of a group of engines is, and so how far all of them are.

The members of a group are named beforehand: a member that has never been heard of has applied nothing, and keeps the
low-water mark at 0. It could not be told otherwise from one that does not exist.

`DirectoryMarks` keeps one small file a member, `<member>.mark`, in a directory that all of them see. Each member writes
its own and nobody else's, as a whole and by renaming, so there is nothing to lock and nothing to lose: a member that
reports late, or whose report is lost in a crash, makes the low-water mark lower than it could be, which is safe.
A file that cannot be read is an error and not a 0, since something is wrong there that will not mend itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from threading import Lock
from typing import Protocol

import msgspec

from tidelog.codec import decode_document, encode_document
from tidelog.errors import InputError
from tidelog.files import Files, LocalFiles, explained

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
    """Marks of engines in several processes, in a directory that they share."""

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
