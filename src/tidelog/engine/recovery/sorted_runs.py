"""Sorted runs: the temporary files of a restore, each in key order, and their merge.

Invariants
- Of two runs with the same key the one of the higher rank wins. A row without a value deletes the key: no cell of the
  tree is empty.
- The snapshot's blocks are kept as they came. Those of a version index have value pointers after their cells, which are
  dropped when runs are merged.
- One block of each run is in memory, and where the others are. Nothing here outlives the restore, and nothing here is
  synced. Blocks are verified when they are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from tidelog._native import check_rows, merge_rows
from tidelog.engine.sst.block import PackedRows, Row, decode_block, encode_packed_blocks, pack_rows, row_at, rows_in
from tidelog.engine.sst.sstable import BlockHandle, RowBlock, Source
from tidelog.errors import CorruptionError, DataError
from tidelog.files import Files, LocalFiles

REMOVED = b""
_FASTEST_LEVEL = 1
# Small enough that a task of a key range reads little that it does not need.
RUN_BLOCK_BYTES = 256 << 10
_ROW_OVERHEAD_BYTES = 200
# Of so many rows the least is looked for one by one; of more it is found in several steps.
_MERGED_AT_ONCE = 16


class RawRows(NamedTuple):
    """Rows one after the other as they are in a block, and how many."""

    raw: bytes
    rows: int


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A file of rows in order of key. Of two with the same key the one of the higher `rank` counts.

    Rows of a snapshot have value pointers behind their cells.
    """

    path: str
    rank: int
    has_places: bool = False
    blocks: tuple[BlockHandle, ...] = ()

    def between(self, start: bytes, stop: bytes | None) -> Run:
        """The same with those blocks only that may have keys from `start` up to `stop` (exclusive)."""
        kept = tuple(one for one in self.blocks if one.last_key >= start and (stop is None or one.first_key < stop))
        return msgspec.structs.replace(self, blocks=kept)


def write_run(path: Path, rank: int, rows: Iterable[PackedRows], files: Files | None = None) -> Run:
    """Rows in order of key, packed into pieces of about `RUN_BLOCK_BYTES`, as a file."""
    encoded = encode_packed_blocks(rows, _FASTEST_LEVEL)
    handles = ((one.data, BlockHandle(0, len(one.data), one.count, one.first_key, one.last_key)) for one in encoded)
    return write_blocks(path, rank, handles, files=files)


def write_blocks(
    path: Path,
    rank: int,
    blocks: Iterable[tuple[bytes | memoryview, BlockHandle]],
    *,
    has_places: bool = False,
    files: Files | None = None,
) -> Run:
    """Blocks of rows in order of key as a file, wherever they were before."""
    placed: list[BlockHandle] = []
    file, byte = (files or LocalFiles()).create(path), 0
    try:
        for data, at in blocks:
            file.write_at(byte, data)
            placed.append(BlockHandle(byte, at.size, at.rows, at.first_key, at.last_key))
            byte += at.size
    finally:
        file.close()
    return Run(path=str(path), rank=rank, has_places=has_places, blocks=tuple(placed))


def merged_rows(
    runs: Iterable[Run], start: bytes = b"", stop: bytes | None = None, files: Files | None = None
) -> Iterator[RawRows]:
    """What is left of all runs between two keys, in order of key, many rows at a time."""
    newest_first = sorted((run for run in runs if run.blocks), key=lambda one: -one.rank)
    return merge_newest_first(
        (_blocks(run, start, stop, files or LocalFiles()), run.has_places) for run in newest_first
    )


def _blocks(run: Run, start: bytes, stop: bytes | None, files: Files) -> Iterator[RawRows]:
    path, last_key = Path(run.path), b""
    file = files.open(path)
    try:
        for at in run.blocks:
            try:
                raw = decode_block(file.read_at(at.byte, at.size))
                last_key = check_rows(raw, at.rows, last_key, run.has_places)
            except DataError as error:
                raise CorruptionError(error.message, path=path, byte=at.byte, operation="restore") from error
            is_inside = at.first_key >= start and (stop is None or at.last_key < stop)
            yield RawRows(raw, at.rows) if is_inside else _cut(raw, start, stop)
    finally:
        file.close()


def _cut(raw: bytes, start: bytes, stop: bytes | None) -> RawRows:
    """The rows of a block that are between two keys."""
    at = begin = end = count = 0
    while at < len(raw):
        key, _, behind = row_at(raw, at)
        if key < start:
            begin = end = behind
        elif stop is not None and key >= stop:
            break
        else:
            end, count = behind, count + 1
        at = behind
    return RawRows(raw[begin:end], count)


class Runs:
    """The runs of a restore by one process."""

    def __init__(self, files: Files, directory: Path) -> None:
        self._files = files
        self._directory = directory
        self._runs: list[Run] = []

    def add(self, rows: Iterable[Row]) -> int:
        """Writes another run, newer than those before; returns its number of rows."""
        return self._added(write_run(self._path(), len(self._runs), pack_rows(rows, RUN_BLOCK_BYTES), self._files))

    def add_blocks(self, blocks: Iterable[RowBlock]) -> int:
        """The same from blocks of a snapshot, without encoding them again. A run that fails midway is not counted."""
        found = ((block.data, block.place) for block in blocks)
        return self._added(write_blocks(self._path(), len(self._runs), found, has_places=True, files=self._files))

    def _added(self, run: Run) -> int:
        self._runs.append(run)
        return sum(block.rows for block in run.blocks)

    def _path(self) -> Path:
        path = self._directory / f"run-{len(self._runs)}"
        if self._files.exists(path):
            self._files.remove(path)
        return path

    def merged(self) -> Iterator[Row]:
        """All rows that are left, in order of key."""
        for raw, count in self.merged_rows():
            yield from rows_in(raw, count, b"")

    def merged_rows(self) -> Iterator[RawRows]:
        """The same, many at a time."""
        return merged_rows(self._runs, files=self._files)


def merge_newest_first(
    runs: Iterable[tuple[Iterator[RawRows], bool]], *, drops_removed: bool = True
) -> Iterator[RawRows]:
    """Merges several runs, each with a flag whether it has value pointers; yields the remaining rows, many at a
    time. Removed ones stay, as such, unless `drops_removed`.
    """
    newest_first = [_Stream(blocks, has_places) for blocks, has_places in runs]
    while len(newest_first) > _MERGED_AT_ONCE:
        groups = [newest_first[at : at + _MERGED_AT_ONCE] for at in range(0, len(newest_first), _MERGED_AT_ONCE)]
        newest_first = [_Stream(_merged(group, drops_removed=False)) for group in groups]
    return _merged(newest_first, drops_removed=drops_removed)


class _Stream:
    """Rows that are merged with others: the block that it is in, and how far."""

    def __init__(self, blocks: Iterator[RawRows], has_places: bool = False) -> None:
        self._blocks = blocks
        self._has_places = has_places
        self._raw = b""
        self.at = 0

    @property
    def source(self) -> Source:
        return self._raw, self.at, self._has_places

    def has_more(self) -> bool:
        """Whether there is another row; then `source` begins with it."""
        while self.at == len(self._raw):
            following = next(self._blocks, None)
            if following is None:
                return False
            self._raw, self.at = following.raw, 0
        return True


def _merged(newest_first: list[_Stream], *, drops_removed: bool) -> Iterator[RawRows]:
    streams = [stream for stream in newest_first if stream.has_more()]
    while streams:
        raw, count, places = merge_rows(tuple(stream.source for stream in streams), drops_removed)
        if count:
            yield RawRows(raw, count)
        for stream, at in zip(streams, places, strict=True):
            stream.at = at
        streams = [stream for stream in streams if stream.has_more()]


class RunSink(Protocol):
    """Where runs go."""

    def add(self, rows: list[Row]) -> int: ...


class Changes:
    """What the log changes, gathered in memory and written as a run when there is enough of it."""

    def __init__(self, runs: RunSink, max_bytes: int) -> None:
        self._runs = runs
        self._max_bytes = max_bytes
        self._rows: dict[bytes, bytes] = {}
        self._bytes = 0

    def set(self, key: bytes, value: bytes) -> None:
        """The row is this from here on; `REMOVED` takes it away."""
        if key not in self._rows:
            self._bytes += len(key) + len(value) + _ROW_OVERHEAD_BYTES
        self._rows[key] = value
        if self._bytes >= self._max_bytes:
            self.flush()

    def flush(self) -> None:
        """Everything gathered so far becomes a run."""
        if self._rows:
            self._runs.add(sorted(self._rows.items()))
            self._rows, self._bytes = {}, 0
