"""The version index of an engine as it is in its store: sorted files of a snapshot, and what the log changed after it.

    find      changes in memory, newest first, then one block of one file (cached)
    objects   blocks of the changes and of the files, merged and looked through in C

Invariants
- A `StoredIndex` never changes: who reads in one sees one state of it to the end. A newer one takes its place.
- Only blocks are fetched that may hold what is asked for. A single lookup fetches one; what is read on and on comes
  with fewer and larger requests.
- A seq below the start of an index is never answered by it: what retention removed is not reported as absent.
- A file that is gone was replaced by those of a newer snapshot: the newest index is asked for, and reading goes on
  there at the same seq. If that names the same file, it is lost, and the error says so.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Protocol, TypeVar

from tidelog._native import check_rows, find_row
from tidelog.cold.fetch import ByteSource, ColdCache
from tidelog.engine.mvcc.cells import SEQ_BYTES, Cell, at, decode_cell, object_prefix, objects_of, prefix_end, seq_of
from tidelog.engine.mvcc.retention import forgotten
from tidelog.engine.mvcc.versions import (
    INFO,
    WITH_VALUE,
    Buckets,
    BucketVersion,
    Found,
    Row,
    VersionLook,
    behind_common,
    bounds_of,
    visible_in,
)
from tidelog.engine.recovery.sorted_runs import REMOVED, RawRows, merge_newest_first
from tidelog.engine.sst.blob_file import cell_of
from tidelog.engine.sst.block import PackedRows, pack_rows, rows_in
from tidelog.engine.sst.sstable import RowPart, SSTable
from tidelog.errors import GapError, Hint, NotFoundError

TreeRow = tuple[bytes, bytes]
Answer = TypeVar("Answer")

_RUN_BLOCK_BYTES = 32 << 10
_MAX_RUNS = 16
# How many blocks come with one request to a reader that goes on: few for a short listing, many for a long scan.
_FIRST_BLOCKS = 1
_MOST_BLOCKS = 64
# A snapshot leaves the store after two newer ones: it is rare that this happens several times during one read.
_ATTEMPTS = 4


class RowSource(Protocol):
    """Rows of the tree in order of key."""

    has_places: bool

    def at_or_after(self, key: bytes) -> TreeRow | None:
        """The first row at or after a key: its key and its cell."""
        ...

    def blocks(self, low: bytes, high: bytes) -> Iterator[RawRows]:
        """Blocks that have all rows between two keys, and perhaps others around them."""
        ...

    def cut_before(self, high: bytes) -> bytes | None:
        """The first key of the last block that begins before a key."""
        ...


class ChangedRows:
    """Rows that a piece of the log has changed, in memory. The records are before `next_lsn`."""

    has_places = False

    def __init__(self, blocks: Iterable[PackedRows], next_lsn: int) -> None:
        self._blocks = tuple(blocks)
        self._first_keys = [block.first_key for block in self._blocks]
        self._last_keys = [block.last_key for block in self._blocks]
        self.next_lsn = next_lsn

    @classmethod
    def of(cls, rows: dict[bytes, bytes], next_lsn: int) -> ChangedRows:
        """By their keys; `REMOVED` for those that are gone."""
        return cls(pack_rows(sorted(rows.items()), _RUN_BLOCK_BYTES), next_lsn)

    @property
    def memory_bytes(self) -> int:
        return sum(len(block.raw) for block in self._blocks)

    def at_or_after(self, key: bytes) -> TreeRow | None:
        index = bisect_left(self._last_keys, key)
        return None if index == len(self._blocks) else find_row(self._blocks[index].raw, key)

    def blocks(self, low: bytes, high: bytes) -> Iterator[RawRows]:
        for block in self._blocks[bisect_left(self._last_keys, low) : bisect_left(self._first_keys, high)]:
            yield RawRows(block.raw, block.rows)

    def all(self) -> Iterator[RawRows]:
        return (RawRows(block.raw, block.rows) for block in self._blocks)

    def cut_before(self, high: bytes) -> bytes | None:
        index = bisect_left(self._first_keys, high)
        return self._first_keys[index - 1] if index else None


def together(first: int, most: int) -> Iterator[int]:
    """How many come with each request: twice as many with every further one."""
    while True:
        yield first
        first = min(2 * first, most)


def _packed(merged: Iterator[RawRows]) -> Iterator[PackedRows]:
    for raw, count in merged:
        first = find_row(raw, b"")
        assert first is not None, "merged rows are at least one"
        yield PackedRows(raw, count, first[0], check_rows(raw, count, b"", False))


class StoredFiles:
    """The sorted files of a snapshot, which are opened when they are first needed. Thread-safe."""

    has_places = True

    def __init__(
        self, objects: ByteSource, parts: Sequence[RowPart], cache: ColdCache, fetchers: Executor | None = None
    ) -> None:
        """`fetchers` fetch ahead of those who read on and on."""
        self._fetchers = fetchers
        self._first_keys = [part.first_key for part in parts]
        self._last_keys = [part.last_key for part in parts]
        self._files = [SSTable(objects, part, kind="versions", cache=cache) for part in parts]

    def at_or_after(self, key: bytes) -> TreeRow | None:
        index = bisect_left(self._last_keys, key)
        if index == len(self._files):
            return None
        row = self._files[index].at_or_after(key)
        return None if row is None else (row[0], cell_of(row[1]))

    def blocks(self, low: bytes, high: bytes) -> Iterator[RawRows]:
        growing = together(_FIRST_BLOCKS, _MOST_BLOCKS)
        for file in self._files[bisect_left(self._last_keys, low) : bisect_left(self._first_keys, high)]:
            yield from (RawRows(*block) for block in file.blocks_between(low, high, growing, self._fetchers))

    def cut_before(self, high: bytes) -> bytes | None:
        index = bisect_left(self._first_keys, high)
        return self._files[index - 1].block_before(high) if index else None


class StoredIndex:
    """All versions up to a point of the log, as of one moment. Immutable.

    `files` are those of a snapshot at `base_lsn`, `changes` what the log changed after it, newest first.
    """

    def __init__(
        self,
        files: StoredFiles,
        base_lsn: int,
        changes: tuple[ChangedRows, ...] = (),
        history_start_seq: int = 0,
    ) -> None:
        self.files = files
        self.base_lsn = base_lsn
        self.changes = changes
        self.history_start_seq = history_start_seq
        self._sources: tuple[RowSource, ...] = (*changes, files)

    def changed(self, rows: dict[bytes, bytes], next_lsn: int, history_start_seq: int) -> StoredIndex:
        """The same after another piece of the log."""
        changes = (ChangedRows.of(rows, next_lsn), *self.changes) if rows else self.changes
        if len(changes) > _MAX_RUNS:
            merged = merge_newest_first(((one.all(), False) for one in changes), drops_removed=False)
            changes = (ChangedRows(_packed(merged), next_lsn),)
        return StoredIndex(self.files, self.base_lsn, changes, history_start_seq)

    def rebased(self, files: StoredFiles, base_lsn: int) -> StoredIndex:
        """The same on a newer snapshot: changes before it are in its files."""
        kept = tuple(one for one in self.changes if one.next_lsn > base_lsn)
        return StoredIndex(files, base_lsn, kept, self.history_start_seq)

    def find(self, key: bytes, stop: bytes) -> TreeRow | None:
        """The first row from a key on and before another."""
        while key < stop:
            found = [row for source in self._sources if (row := source.at_or_after(key)) is not None]
            first = min(found, key=lambda row: row[0], default=None)  # of equal keys the newest, which comes first
            if first is None or first[0] >= stop:
                return None
            if first[1] != REMOVED:
                return first
            key = first[0] + b"\0"
        return None

    def raw(self, low: bytes, high: bytes) -> Iterator[RawRows]:
        """Rows that have all between two keys, many at a time, and perhaps others around them."""
        return merge_newest_first((source.blocks(low, high), source.has_places) for source in self._sources)

    def scan(self, start: bytes, stop: bytes) -> Iterator[TreeRow]:
        """Yields the rows from a key on and before another, one by one."""
        for raw, count in self.raw(start, stop):
            yield from (row for row in rows_in(raw, count, b"") if start <= row[0] < stop)

    def cut_before(self, low: bytes, high: bytes) -> bytes:
        """Where the last piece of a range begins, for reading backwards: at the first version of some name, so that no
        more than a block of each source is behind it, or a name with many versions.
        """
        cuts = [cut for source in self._sources if (cut := source.cut_before(high)) is not None]
        return max(low, max(cuts)[:-SEQ_BYTES]) if cuts else low


class StoredVersions:
    """What is in an engine, at any seq, from its store: in the place of `Versions`. Thread-safe.

    `on_missing` brings the newest index; it is called when a file of the one in use is gone.
    """

    def __init__(self, buckets: Buckets, on_missing: Callable[[], object]) -> None:
        self.buckets = buckets
        self._on_missing = on_missing
        self._indexes: tuple[StoredIndex, ...] = ()

    def use(self, index: StoredIndex) -> None:
        """Reads go on in this index. Those that have begun at a seq that it no longer has find it in the one before."""
        before = self._indexes[:1]
        keeps = before and before[0].history_start_seq < index.history_start_seq
        self._indexes = (index, *(before if keeps else self._indexes[1:2]))

    @property
    def newest(self) -> StoredIndex:
        return self._indexes[0]

    def _at(self, seq: int) -> StoredIndex:
        for index in self._indexes:
            if index.history_start_seq <= seq:
                return index
        raise forgotten(self.newest.history_start_seq)

    def _read(self, seq: int, read: Callable[[StoredIndex], Answer]) -> Answer:
        """Reads in the index that has a seq, or in the one that replaced it meanwhile."""
        index = self._at(seq)
        for _ in range(_ATTEMPTS - 1):
            try:
                return read(index)
            except NotFoundError as error:
                index = self._renewed(index, seq, error)
        return read(index)

    def _renewed(self, index: StoredIndex, seq: int, error: NotFoundError) -> StoredIndex:
        """The newest index instead of one whose file is gone."""
        self._on_missing()
        newest = self._at(seq)
        if newest.files is index.files:
            raise GapError(
                f"a file of the newest snapshot is not in the store: {error.message}",
                first=index.base_lsn,
                last=index.base_lsn,
                path=error.path,
                hint=Hint(
                    "Put the file back, or open a replica; the owner's `create_checkpoint()` writes a new snapshot",
                    command="Put the file back, or open a replica; `tidelog engine checkpoint` and `ship` at its owner "
                    "write a new snapshot",
                ),
            ) from error
        return newest

    def renew(self) -> None:
        """Looks for what was shipped since: values that are gone may have been moved."""
        self._on_missing()

    def version(self, name: bytes) -> Cell | None:
        """The version with this key of the tree, if it is kept, whatever is visible of it."""
        found = self._read(self.newest.history_start_seq, lambda index: index.find(name, name + b"\0"))
        return None if found is None else decode_cell(found[1])

    def find(self, bucket: str, key: str, seq: int) -> Found | None:
        created = self.buckets.created(bucket, seq)
        return None if created is None else self.find_in(created, bucket, key, seq)

    def find_in(self, created: BucketVersion, bucket: str, key: str, seq: int) -> Found | None:
        prefix = object_prefix(bucket, key)
        found = self._read(seq, lambda index: index.find(at(prefix, seq), prefix_end(prefix)))
        if found is None or found[0][:-SEQ_BYTES] != prefix:
            return None
        return visible_in(created, seq_of(found[0]), decode_cell(found[1]))

    def pointer(self, created: BucketVersion, bucket: str, key: str, seq: int) -> None:
        """There is no faster way here."""

    def history(self, bucket: str, key: str, seq: int) -> Iterator[Found]:
        """All versions that are kept and are not after a seq, newest first, deletions and earlier buckets included."""
        prefix = object_prefix(bucket, key)
        found = self._read(seq, lambda index: list(index.scan(at(prefix, seq), prefix_end(prefix))))
        return (Found(seq_of(name), decode_cell(value)) for name, value in found)

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
        """As `Versions.objects`."""
        created, index = self.buckets.created(bucket, seq), self._at(seq)
        if created is None or "\0" in key_prefix:
            return iter(())
        low, high = bounds_of(bucket, key_prefix, after, start, end)
        if delimiter and after is not None and delimiter in after[len(key_prefix) :]:
            low = max(low, behind_common(bucket, key_prefix, after, delimiter))
        pieces = _Pieces(self, index, bucket, created, seq, columns)
        if delimiter:
            return pieces.folded(low, high, key_prefix, delimiter)
        return pieces.backward(low, high) if reverse else pieces.forward(low, high)


class _Pieces:
    """The rows of one listing, piece by piece; it goes on in a newer index when files of this one are gone."""

    def __init__(
        self,
        versions: StoredVersions,
        index: StoredIndex,
        bucket: str,
        created: BucketVersion,
        seq: int,
        columns: int,
    ) -> None:
        self._versions = versions
        self._index = index
        self._bucket = bucket
        self._created = {bucket: (created.seq, created.order)}
        self._seq = seq
        self._columns = columns
        self._failed = 0

    def forward(self, low: bytes, high: bytes) -> Iterator[list[Row]]:
        while low < high:
            look = VersionLook(self._seq, self._created, start=low, stop=high)
            raws = self._index.raw(low, high)
            while (rows := self._next(raws, look)) is not None:
                if rows:
                    yield rows
                    low = prefix_end(object_prefix(self._bucket, rows[-1][0]))
            if not self._failed:
                return

    def _next(self, raws: Iterator[RawRows], look: VersionLook) -> list[Row] | None:
        """The next rows; None at the end, and where it has to begin again in another index."""
        try:
            piece = next(raws, None)
        except NotFoundError as error:
            self._move(error)
            return None
        self._failed = 0
        return None if piece is None else look.rows(piece.raw, self._columns)

    def _move(self, error: NotFoundError) -> None:
        self._failed += 1
        if self._failed == _ATTEMPTS:
            raise error
        self._index = self._versions._renewed(self._index, self._seq, error)

    def backward(self, low: bytes, high: bytes) -> Iterator[list[Row]]:
        while low < high:
            try:
                cut = self._index.cut_before(low, high)
                look = VersionLook(self._seq, self._created, start=cut, stop=high)
                rows = self._all_rows(look, cut, high)
            except NotFoundError as error:
                self._move(error)
                continue
            self._failed, high = 0, cut
            if rows:
                rows.reverse()
                yield rows

    def _all_rows(self, look: VersionLook, low: bytes, high: bytes) -> list[Row]:
        """Of one shape: with data only where all of them are."""
        raws = [raw for raw, _ in self._index.raw(low, high)]
        columns = self._columns if len(raws) == 1 else min(self._columns, WITH_VALUE)
        return [row for raw in raws for row in look.rows(raw, columns)]

    def folded(self, low: bytes, high: bytes, key_prefix: str, delimiter: str) -> Iterator[list[Row]]:
        """Keys with a delimiter behind the prefix as one row each, what they begin with; what is in it is skipped."""
        begin = len(key_prefix)
        while True:
            common: str | None = None
            for rows in self.forward(low, high):
                kept: list[Row] = []
                for row in rows:
                    if common is not None and row[0].startswith(common):
                        continue
                    end = row[0].find(delimiter, begin)
                    common = None if end < 0 else row[0][: end + len(delimiter)]
                    kept.append(row if common is None else (common, 0, 0))
                if kept:
                    yield kept
                if common is not None:
                    break  # much may be behind it that nobody wants to see
            if common is None:
                return
            low = max(low, objects_of(self._bucket, common)[1])
