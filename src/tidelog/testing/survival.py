"""What a crash leaves of a disk.

    lose      power loss: everything unsynced is gone, names and contents
    keep      the process was killed, the machine lives: everything written is there, and still as unsynced as it was
    tear      power loss: names up to some moment; of each file the unsynced changes up to some byte
    reorder   power loss: each unsynced change of a name is there or not, by itself; contents as in tear
    holes     as reorder, but of the contents each sector is old or new by itself, and the size may be the new one

Invariants
- What was synced survives under every policy.
- New nodes are built and those that were given are left alone, so one crash can be looked at under every policy.
- The same disk, policy and seed give the same answer.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from typing import Literal, get_args

from tidelog.testing.nodes import ContentChange, DirectoryNode, FileNode, NameChange, Node

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
