"""Buckets: when each of them was created and deleted. There are few, so all of their versions are in memory.

Invariants
- What is in memory is what the tree has: it is read from there when an engine opens, and again after an undo.
- A bucket that was deleted and made again is another one: `created` tells which versions of objects are of this one.
- Readers take no lock. A history is replaced as a whole, never changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from tidelog.engine.cell import decode_bucket
from tidelog.engine.version_keys import BUCKETS, MAX_SEQ, at, behind, bucket_prefix, parse


class Cells(Protocol):
    """What is asked of the tree."""

    def scan(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]: ...


class BucketVersion(NamedTuple):
    """A creation or a deletion."""

    seq: int
    order: int
    is_deleted: bool


class Buckets:
    """All buckets of an engine."""

    def __init__(self) -> None:
        self._histories: dict[str, tuple[BucketVersion, ...]] = {}

    def load(self, cells: Cells) -> None:
        """Reads all of them anew."""
        found: dict[str, list[BucketVersion]] = {}
        for key, value in cells.scan(BUCKETS, behind(BUCKETS)):
            _add(found, key, value)
        self._histories = {name: tuple(reversed(versions)) for name, versions in found.items()}

    def reload(self, cells: Cells, bucket: str) -> None:
        """Reads one of them anew, after something about it was undone or forgotten."""
        prefix = bucket_prefix(bucket)
        found: dict[str, list[BucketVersion]] = {bucket: []}
        for key, value in cells.scan(at(prefix, MAX_SEQ), behind(prefix)):
            _add(found, key, value)
        if found[bucket]:
            self._histories[bucket] = tuple(reversed(found[bucket]))
        else:
            self._histories.pop(bucket, None)

    def note(self, bucket: str, version: BucketVersion) -> None:
        """A bucket was created or deleted. The later one of two with the same seq counts."""
        history = self._histories.get(bucket, ())
        if history and history[-1].seq == version.seq:
            history = history[:-1]
        self._histories[bucket] = (*history, version)

    def created(self, bucket: str, seq: int) -> BucketVersion | None:
        """The creation of the bucket that is there at a seq; None when there is none."""
        history = self._histories.get(bucket, ())
        if history and history[-1].seq <= seq:  # the newest, as a rule
            return None if history[-1].is_deleted else history[-1]
        for version in reversed(history):
            if version.seq <= seq:
                return None if version.is_deleted else version
        return None

    def alive(self, seq: int) -> Iterator[tuple[str, BucketVersion]]:
        """All buckets that are there at a seq, by name."""
        for name in sorted(self._histories):
            version = self.created(name, seq)
            if version is not None:
                yield name, version


def _add(found: dict[str, list[BucketVersion]], key: bytes, value: bytes) -> None:
    name = parse(key)
    cell = decode_bucket(value)
    found.setdefault(name.bucket, []).append(BucketVersion(name.seq, cell.order, cell.is_deleted))
