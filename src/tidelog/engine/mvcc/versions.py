"""The version index: which version of an object is visible at a seq; and the in-memory history of buckets (`Buckets`).

Invariants
- A version is visible at a seq if it is the newest of its key at or before it, is no deletion, and belongs to the
  bucket that exists at that seq: it was put after that bucket's creation.
- Reads change nothing, take no lock and never wait for a writer. Each step sees the tree as of one moment, and versions
  at or before the requested seq do not change, so many steps see one state.
- A listing seeks from key to key: its cost does not depend on how many versions a key has. Deleted objects that are
  still kept are skipped a key at a time.
"""

# ruff: noqa: ERA001 (comments draw formats and formulas)
from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple, Protocol

from tidelog import _native
from tidelog._native import find_version, list_seen
from tidelog.engine.btree.page import ROOT
from tidelog.engine.btree.tree import Tree
from tidelog.engine.mvcc.cells import (
    BUCKETS,
    INLINE,
    MAX_SEQ,
    POINTER,
    SEQ_BYTES,
    TOMBSTONE,
    Cell,
    at,
    bucket_prefix,
    decode_bucket,
    decode_cell,
    object_prefix,
    objects_of,
    parse,
    prefix_end,
    seq_of,
)
from tidelog.engine.wal.replay import Strings

# Buckets: when each of them was created and deleted. There are few, so all of their versions are in memory.
#
# Invariants
# - Memory mirrors the tree: it is loaded when an engine opens, and again after an undo.
# - A bucket that was deleted and created again is another one: `created` tells which versions of objects belong to it.
# - Readers take no lock. A history is replaced as a whole, never mutated.


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
        found: dict[str, list[BucketVersion]] = {}
        for key, value in cells.scan(BUCKETS, prefix_end(BUCKETS)):
            _add(found, key, value)
        self._histories = {name: tuple(reversed(versions)) for name, versions in found.items()}

    def reload(self, cells: Cells, bucket: str) -> None:
        """Reloads one of them after an undo or a removal."""
        prefix = bucket_prefix(bucket)
        found: dict[str, list[BucketVersion]] = {bucket: []}
        for key, value in cells.scan(at(prefix, MAX_SEQ), prefix_end(prefix)):
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
        """The creation of the bucket that exists at a seq; None if none does."""
        history = self._histories.get(bucket, ())
        if history and history[-1].seq <= seq:  # the newest, as a rule
            return None if history[-1].is_deleted else history[-1]
        for version in reversed(history):
            if version.seq <= seq:
                return None if version.is_deleted else version
        return None

    def emptied(self, seq: int) -> Iterator[tuple[str, BucketVersion]]:
        """Where buckets lost all that was in them up to a seq, by name: deleted, or made anew by one entry."""
        for name in sorted(self._histories):
            for before, version in pairwise(self._histories[name]):
                if version.seq <= seq and not before.is_deleted:
                    yield name, version

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


Pointer = tuple[int, int, int, int, int, int, int, int]
"""(seq, order, size, crc, codec, lsn, position, stored bytes) of a version whose value is in the log."""
Other = tuple[int, bytes]
"""(seq, cell) of a version that is a tombstone, or has its value in the page."""
Row = tuple[Any, ...]
"""(key, size, seq) of an object that is to be seen, and what else is asked for."""
Seen = tuple[list[Row], bytes | None, int]
"""Rows, the key to continue from (None at the end), and the page that must be loaded first (0: none)."""

# Objects of one step of a listing: enough to forget what a step costs, few enough that it delays no other thread.
LISTED_ROWS = 256
INFO, WITH_CRC, WITH_VALUE, WITH_DATA = range(4)
"""The columns of a row: (key, size, seq); and crc; and codec, lsn, position, stored bytes, small value or None.

With data they are the same, or, where the index has all values of a list as they are and without metadata, (key, size,
seq, crc, data, {}): `PLAIN_COLUMNS` of them.
"""
_MAX_BOUND_BYTES = 2048


class Found(NamedTuple):
    """A version and its seq."""

    seq: int
    cell: Cell


class Versions:
    """What is in an engine, at any seq."""

    def __init__(self, tree: Tree, buckets: Buckets) -> None:
        self.tree = tree
        self.buckets = buckets
        self._pages = tree.pool.pages

    def renew(self) -> None:
        """The tree is always the newest."""

    def find(self, bucket: str, key: str, seq: int) -> Found | None:
        """The version to be seen at a seq."""
        created = self.buckets.created(bucket, seq)
        return None if created is None else self.find_in(created, bucket, key, seq)

    def find_in(self, created: BucketVersion, bucket: str, key: str, seq: int) -> Found | None:
        """The same, in a bucket that is known to be there."""
        found = self._newest(bucket, key, seq)
        if found is None:
            return None
        if len(found) == 2:
            return visible_in(created, found[0], decode_cell(found[1]))
        return visible_in(created, found[0], Cell(POINTER, *found[1:]))

    def pointer(self, created: BucketVersion, bucket: str, key: str, seq: int) -> Pointer | None:
        """The fast path for the most frequent case: a version whose value is in the log; None for all others."""
        found = find_version(self._pages, ROOT, bucket, key, seq)
        if type(found) is not tuple or len(found) == 2:
            return None
        if found[0] < created.seq or (found[0] == created.seq and found[1] < created.order):
            return None
        return found

    def _newest(self, bucket: str, key: str, seq: int) -> Pointer | Other | None:
        found = find_version(self._pages, ROOT, bucket, key, seq)
        return self._newest_step_by_step(bucket, key, seq) if isinstance(found, int) else found

    def _newest_step_by_step(self, bucket: str, key: str, seq: int) -> Other | None:
        """The same where pages must be loaded."""
        prefix = object_prefix(bucket, key)
        found = self.tree.find(at(prefix, seq), prefix_end(prefix))
        if found is None or found[0][:-SEQ_BYTES] != prefix:
            return None
        return seq_of(found[0]), found[1]

    def history(self, bucket: str, key: str, seq: int) -> Iterator[Found]:
        """All versions that are kept and are not after a seq, newest first, deletions and earlier buckets included."""
        prefix = object_prefix(bucket, key)
        for name, value in self.tree.scan(at(prefix, seq), prefix_end(prefix)):
            yield Found(seq_of(name), decode_cell(value))

    def objects(
        self,
        bucket: str,
        key_prefix: str,
        seq: int,
        *,
        after: str | None = None,
        start: str | None = None,
        end: str | None = None,
        reverse: bool = False,
        columns: int = INFO,
        delimiter: str = "",
    ) -> Iterator[list[Row]]:
        """The objects of a bucket whose keys begin like this, are after another key, not before `start` and before
        `end`; in order of key, or in `reverse`. In lists of rows with these columns.

        Keys with a delimiter behind the prefix come as one row: what they begin with, up to it, with a seq of 0.
        """
        created = self.buckets.created(bucket, seq)
        if created is None or "\0" in key_prefix:
            return
        low, high = bounds_of(bucket, key_prefix, after, start, end)
        if delimiter and after is not None and delimiter in after[len(key_prefix) :]:
            low = max(low, behind_common(bucket, key_prefix, after, delimiter))
        prefix_bytes, folds_at = len(key_prefix.encode()), delimiter.encode()
        resume: bytes | None = None if low >= high else high if reverse else low
        while resume is not None:
            if reverse:
                high = resume
            else:
                low = resume
            rows, resume, missing_page = list_seen(
                self._pages, ROOT, low, high, seq, created.seq, created.order, LISTED_ROWS, columns, reverse,
                prefix_bytes, folds_at,
            )  # fmt: skip
            if rows:
                yield rows
            if missing_page:
                self.tree.pool.load(missing_page)

    def names(self, bucket: str, seq: int) -> Iterator[str]:
        """The keys of all objects of a bucket."""
        return (key for key, *_ in chain.from_iterable(self.objects(bucket, "", seq)))


def bounds_of(
    bucket: str, key_prefix: str, after: str | None, start: str | None, end: str | None
) -> tuple[bytes, bytes]:
    """The range of tree keys of some objects."""
    low, high = objects_of(bucket, key_prefix)
    if start is not None:
        low = max(low, _least_from(bucket, start))
    if after is not None:
        low = max(low, prefix_end(object_prefix(bucket, after.partition("\0")[0])))
    if end is not None:
        high = min(high, _least_from(bucket, end))
    # Cut off, a bound is longer than any key still, and so between the same two.
    return low[:_MAX_BOUND_BYTES], high[:_MAX_BOUND_BYTES]


def behind_common(bucket: str, key_prefix: str, after: str, delimiter: str) -> bytes:
    """Behind the common prefix of a key: who continues after a common prefix has seen all that is in it."""
    if not after.startswith(key_prefix):
        return b""
    common = after[: after.index(delimiter, len(key_prefix)) + len(delimiter)]
    return objects_of(bucket, common)[1][:_MAX_BOUND_BYTES]


def _least_from(bucket: str, name: str) -> bytes:
    """The least tree key of the objects whose keys are not less than a name. No key has a NUL in it."""
    before, nul, _ = name.partition("\0")
    prefix = object_prefix(bucket, before)
    return prefix_end(prefix) if nul else prefix


def visible_in(created: BucketVersion, seq: int, cell: Cell) -> Found | None:
    """A version with its seq, if it is to be seen in the bucket that was created then; None otherwise."""
    if cell.flags & TOMBSTONE or seq < created.seq or (seq == created.seq and cell.order < created.order):
        return None
    return Found(seq, cell)


# Rows of the version index as columns: selects the versions visible at a seq, without an object per row.
#
#     looking = VersionLook(seq, created, start=..., stop=...)
#     for raw in ...:                                          # rows as they are in blocks, in order of key
#         columns = looking.gather(raw)
#
# Invariants
# - The rule of `versions.py`: at a seq an object is its newest version at or before it, if that is no deletion and
#   belongs to the bucket that exists then. With all versions, everything that is kept up to the seq is included.
# - Versions of a name may span several consecutive pieces of rows: the decision is carried over.
#
# The loops are C (`native/entries_versions.h`).


@dataclass(frozen=True, slots=True)
class VersionColumns:
    """Versions of objects as arrays, little-endian: four of i64, three of u32, two of u8, then strings."""

    count: int
    seqs: bytes
    sizes: bytes
    lsns: bytes
    positions: bytes
    crcs: bytes
    orders: bytes
    stored_bytes: bytes
    flags: bytes
    codecs: bytes
    buckets: Strings
    keys: Strings
    inline: Strings

    def cells(self) -> Iterator[Cell]:
        """Yields the cells one by one, for readers of the values."""
        wide = [memoryview(one).cast("Q") for one in (self.sizes, self.lsns, self.positions)]
        narrow = [memoryview(one).cast("I") for one in (self.orders, self.crcs, self.stored_bytes)]
        ends = memoryview(self.inline.ends).cast("i")
        rows = zip(self.flags, self.codecs, *wide, *narrow, ends, ends[1:], strict=False)
        for flags, codec, size, lsn, position, order, crc, stored_bytes, low, high in rows:
            stored = self.inline.data[low:high] if flags == INLINE else None
            length = stored_bytes if stored is None else high - low
            yield Cell(flags, order, size, crc, codec, lsn, position, length, stored)


class CreatedColumns(NamedTuple):
    """The buckets that are there, in order of name, as the kernels take them."""

    ends: bytes
    names: bytes
    seqs: bytes
    orders: bytes

    @classmethod
    def of(cls, created: Mapping[bytes, tuple[int, ...]]) -> CreatedColumns:
        """Those of a mapping from names to creations: seq and order."""
        names = sorted(created)
        return cls(
            array("I", accumulate(map(len, names), initial=0)).tobytes(),
            b"".join(names),
            array("Q", [created[name][0] for name in names]).tobytes(),
            array("I", [created[name][1] for name in names]).tobytes(),
        )


class VersionLook:
    """Goes through the rows of a range of keys. `created` has the creation (seq, order) of every live bucket."""

    def __init__(
        self,
        seq: int,
        created: Mapping[str, tuple[int, int]],
        *,
        start: bytes,
        stop: bytes,
        all_versions: bool = False,
    ) -> None:
        self._buckets = CreatedColumns.of({name.encode(): version for name, version in created.items()})
        self._range = seq, all_versions, start, stop
        self._settled = b""

    def rows(self, raw: bytes, columns: int) -> list[Row]:
        """What is to be seen of the next rows, as rows of a listing."""
        self._settled, rows = _native.gather_rows(raw, *self._range, self._settled, *self._buckets, columns)
        return rows

    def gather(self, raw: bytes) -> VersionColumns:
        """What is to be seen of the next rows."""
        count, self._settled, numbers, strings = _native.gather_versions(
            raw, *self._range, self._settled, *self._buckets
        )
        texts = [Strings(*strings[number : number + 2]) for number in range(0, len(strings), 2)]
        seqs, sizes, lsns, positions, crcs, orders, stored_bytes, flags, codecs = numbers
        return VersionColumns(count, seqs, sizes, lsns, positions, crcs, orders, stored_bytes, flags, codecs, *texts)
