"""What survives on a disk after a crash.

    lose      power loss: everything unsynced is gone, names and contents
    keep      the process was killed, the machine lives: everything written is there, and still as unsynced as it was
    tear      power loss: names up to some moment; of each file the unsynced changes up to some byte
    reorder   power loss: each unsynced change of a name independently survives or not; contents as in tear
    holes     as reorder, but each sector of the contents is independently old or new, and the size may be the new one

Invariants
- Synced data survives under every policy.
- The policies build new nodes and leave the given ones unchanged, so one crash can be examined under every policy.
- The same disk, policy and seed give the same result.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple, get_args

Policy = Literal["lose", "keep", "tear", "reorder", "holes"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
SECTOR_BYTES = 512


def after_crash(root: DirectoryNode, policy: Policy, seed: int) -> DirectoryNode:
    """What is found when the machine (or for `keep`, the process) is started again."""
    if policy not in POLICIES:
        raise ValueError(f"no policy {policy!r}, only {', '.join(POLICIES)}")
    if policy == "keep":
        return copy(root, {})
    random_source = random.Random(seed)
    kept = _surviving_name_changes(root, policy, random_source)
    return _Survivors(kept, _content_rule(policy, random_source)).directory(root)


def copy(node: DirectoryNode, copies: dict[Node, Node]) -> DirectoryNode:
    """The same disk again, unsynced changes and all. `copies` tells afterwards which node became which."""
    fresh = DirectoryNode()
    copies[node] = fresh
    fresh.durable = {name: _copy_node(child, copies) for name, child in node.durable.items()}
    fresh.entries = {name: _copy_node(child, copies) for name, child in node.entries.items()}
    fresh.unsynced = [
        NameChange(number, {name: child and _copy_node(child, copies) for name, child in names.items()})
        for number, names in node.unsynced
    ]
    return fresh


def _copy_node(node: Node, copies: dict[Node, Node]) -> Node:
    if node not in copies:
        if isinstance(node, DirectoryNode):
            return copy(node, copies)
        fresh = FileNode(node.durable)
        fresh.content = bytearray(node.content)
        fresh.unsynced = list(node.unsynced)
        copies[node] = fresh
    return copies[node]


class _Survivors:
    """Rebuilds a disk from the name changes and the contents that a crash left. All of it is durable then."""

    def __init__(self, kept: set[int], content_of: Callable[[FileNode], bytearray]) -> None:
        self._kept = kept
        self._content_of = content_of
        self._rebuilt: dict[Node, Node] = {}

    def directory(self, node: DirectoryNode) -> DirectoryNode:
        fresh = DirectoryNode()
        self._rebuilt[node] = fresh
        names = dict(node.durable)
        for change in node.unsynced:
            if change.number in self._kept:
                change.apply(names)
        fresh.durable = {name: self._node(child) for name, child in sorted(names.items())}
        fresh.entries = dict(fresh.durable)
        return fresh

    def _node(self, node: Node) -> Node:
        if node not in self._rebuilt:
            if isinstance(node, DirectoryNode):
                return self.directory(node)
            self._rebuilt[node] = FileNode(self._content_of(node))
        return self._rebuilt[node]


def _surviving_name_changes(root: DirectoryNode, policy: Policy, random_source: random.Random) -> set[int]:
    if policy == "lose":
        return set()
    numbers = sorted(_unsynced_name_changes(root))
    if policy == "tear":
        return set(numbers[: _cut(len(numbers), random_source)])
    return {number for number in numbers if random_source.random() < 0.5}


def _unsynced_name_changes(root: DirectoryNode) -> set[int]:
    numbers: set[int] = set()
    seen: set[Node] = set()
    waiting: list[Node] = [root]
    while waiting:
        node = waiting.pop()
        if isinstance(node, DirectoryNode) and node not in seen:
            seen.add(node)
            numbers.update(change.number for change in node.unsynced)
            waiting.extend(_possible_children(node))
    return numbers


def _possible_children(node: DirectoryNode) -> Iterable[Node]:
    """All that some name of the directory may turn out to be after a crash."""
    changed = (child for change in node.unsynced for child in change.names.values() if child is not None)
    return itertools.chain(node.durable.values(), changed)


def _content_rule(policy: Policy, random_source: random.Random) -> Callable[[FileNode], bytearray]:
    if policy == "lose":
        return lambda file: file.durable
    if policy == "holes":
        return lambda file: _with_holes(file, random_source)
    return lambda file: _torn(file, random_source)


def _torn(file: FileNode, random_source: random.Random) -> bytearray:
    """The durable content and the unsynced changes up to some byte."""
    content = bytearray(file.durable)
    left = _cut(sum(change.weight for change in file.unsynced), random_source)
    for change in file.unsynced:
        if left <= 0:
            break
        change.apply(content, min(left, change.weight))
        left -= change.weight
    return content


def _with_holes(file: FileNode, random_source: random.Random) -> bytearray:
    """The old size or the new one, and each sector old or new by itself."""
    new = bytearray(file.durable)
    for change in file.unsynced:
        change.apply(new, change.weight)
    content = bytearray(file.durable)
    if random_source.random() < 0.5:
        ContentChange(len(new), None).apply(content, 0)
    for start in range(0, min(len(content), len(new)), SECTOR_BYTES):
        if random_source.random() < 0.5:
            end = min(start + SECTOR_BYTES, len(content), len(new))
            content[start:end] = new[start:end]
    return content


def _cut(size: int, random_source: random.Random) -> int:
    """How much survives. Nothing and everything get a good share, since most bugs need only those."""
    draw = random_source.random()
    if draw < 0.2:
        return 0
    if draw < 0.4:
        return size
    return random_source.randint(0, size)


# The contents of a disk: files and directories, each with its durable and its not yet durable state.
#
# Invariants
# - A file has its current content (what the process sees), its durable content, and the changes in between, in order.
#   The durable content changes only by a sync. A sync that failed forgets the changes in between for good, as Linux
#   does when it marks the pages clean: a second sync succeeds and makes none of them durable.
# - A directory has the same three for its names. A rename within one directory is one change: it never half survives.


_change_numbers = itertools.count()


class ContentChange(NamedTuple):
    """A write of `data` at `position`, or without data a cut to the size `position`."""

    position: int
    data: bytes | None

    @property
    def weight(self) -> int:
        """At how many positions it can be torn."""
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
    """A file with any number of names."""

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
