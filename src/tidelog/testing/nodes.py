"""What a disk holds: files and directories, each with what is durable of it and what is not yet.

Invariants
- A file has its current content (what the process sees), its durable content, and the changes in between, in order. The
  durable content moves only by a sync. A sync that failed forgets the changes in between for ever, as Linux does when
  it marks the pages clean: a second sync succeeds and makes nothing of them durable.
- A directory has the same three for its names. A rename within one directory is one change: never half of it survives.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_change_numbers = itertools.count()


class ContentChange(NamedTuple):
    """A write of `data` at `position`, or without data a cut to the size `position`."""

    position: int
    data: bytes | None

    @property
    def weight(self) -> int:
        """At how many places it can be torn."""
        return 1 if self.data is None else len(self.data)

    def apply(self, content: bytearray, weight: int) -> None:
        """The first `weight` bytes of a write; the whole of a cut."""
        missing = self.position - len(content)
        if missing > 0:
            content.extend(bytes(missing))
        if self.data is None:
            del content[self.position :]
        else:
            content[self.position : self.position + weight] = self.data[:weight]


class FileNode:
    """A file, whatever its names."""

    def __init__(self, durable: bytes | bytearray = b"") -> None:
        self.durable = bytearray(durable)
        self.content = bytearray(durable)
        self.unsynced: list[ContentChange] = []
        self.locked = False

    def change(self, change: ContentChange) -> None:
        change.apply(self.content, change.weight)
        self.unsynced.append(change)

    def sync(self) -> None:
        for change in self.unsynced:
            change.apply(self.durable, change.weight)
        self.unsynced.clear()

    def forget_unsynced(self) -> None:
        """After a failed sync: visible as long as the machine runs, never durable."""
        self.unsynced.clear()


class NameChange(NamedTuple):
    """What names of one directory stand for from now on (None: nothing). Parts of one rename share a number."""

    number: int
    names: dict[str, FileNode | DirectoryNode | None]

    def apply(self, entries: dict[str, FileNode | DirectoryNode]) -> None:
        for name, node in self.names.items():
            if node is None:
                entries.pop(name, None)
            else:
                entries[name] = node


class DirectoryNode:
    """A directory."""

    def __init__(self) -> None:
        self.durable: dict[str, FileNode | DirectoryNode] = {}
        self.entries: dict[str, FileNode | DirectoryNode] = {}
        self.unsynced: list[NameChange] = []

    def change(self, number: int, names: dict[str, FileNode | DirectoryNode | None]) -> None:
        change = NameChange(number, names)
        change.apply(self.entries)
        self.unsynced.append(change)

    def sync(self) -> None:
        for change in self.unsynced:
            change.apply(self.durable)
        self.unsynced.clear()

    def forget_unsynced(self) -> None:
        """As for a file."""
        self.unsynced.clear()

    def walk(self, path: str = "") -> Iterator[tuple[str, FileNode | DirectoryNode]]:
        """Everything below as the process sees it, with its path, sorted."""
        for name, node in sorted(self.entries.items()):
            yield f"{path}/{name}", node
            if isinstance(node, DirectoryNode):
                yield from node.walk(f"{path}/{name}")

    def contents(self) -> dict[str, bytes | None]:
        """Every path below with the content of the file; None for directories."""
        return {path: bytes(node.content) if isinstance(node, FileNode) else None for path, node in self.walk()}


Node = FileNode | DirectoryNode


def next_change_number() -> int:
    """Grows with every change of a name, over all directories."""
    return next(_change_numbers)


def find(root: DirectoryNode, path: Path) -> Node | None:
    """What a path stands for, if anything."""
    if ".." in path.parts:
        raise ValueError(f"{path}: a path with '..' is not looked up here")
    node: Node = root
    for name in path.parts[1:] if path.is_absolute() else path.parts:
        child = node.entries.get(name) if isinstance(node, DirectoryNode) else None
        if child is None:
            return None
        node = child
    return node


def node_at(root: DirectoryNode, path: Path) -> Node:
    """What a path stands for; the OSError that Linux raises when it stands for nothing."""
    node = find(root, path)
    if node is None:
        parent_of(root, path)
        raise os_error(errno.ENOENT, path)
    return node


def directory_at(root: DirectoryNode, path: Path) -> DirectoryNode:
    """A directory by its path."""
    node = node_at(root, path)
    if isinstance(node, FileNode):
        raise os_error(errno.ENOTDIR, path)
    return node


def parent_of(root: DirectoryNode, path: Path) -> DirectoryNode:
    """The directory that holds, or would hold, the name at the end of the path."""
    node = find(root, path.parent)
    if node is None:
        raise os_error(errno.ENOENT, path)
    if isinstance(node, FileNode):
        raise os_error(errno.ENOTDIR, path)
    return node


def os_error(number: int, path: Path | str) -> OSError:
    """The OSError of the right class (FileNotFoundError for ENOENT and so on)."""
    return OSError(number, os.strerror(number), str(path))
