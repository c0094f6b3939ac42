"""What a restore keeps on the disk meanwhile: runs of rows, each in order of key, and their merge.

    restoring/run-0        the state that it begins with
    restoring/run-1 ...    what the log behind it changed, oldest first

Invariants
- A later run wins over an earlier one. A row without a value takes the key away: no cell of the tree is empty.
- The state's blocks are kept as they came. Those of a version index have places behind their cells, which are left out
  when runs are merged.
- One block of each run is in memory. Nothing in here outlives the restore, and nothing in here is synced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from tidelog.engine.cell_blocks import HEADER_BYTES, Row, block_bytes, count_of, decode_block, encode_blocks, rows_in
from tidelog.engine.rows import Source, check_rows, merge_rows
from tidelog.errors import CorruptionError, DataError
from tidelog.files import Files

REMOVED = b""
_FASTEST_LEVEL = 1
_ROW_OVERHEAD_BYTES = 200
# Of so many rows the least is looked for one by one; of more it is found in several steps.
_MERGED_AT_ONCE = 16


class RawRows(NamedTuple):
    """Rows one after the other as they are in a block, and how many."""

    raw: bytes
    rows: int


class _Run(NamedTuple):
    path: Path
    has_places: bool


class Runs:
    """The runs of one restore."""

    def __init__(self, files: Files, directory: Path) -> None:
        self._files = files
        self._directory = directory
        self._runs: list[_Run] = []

    def add(self, rows: Iterable[Row]) -> int:
        """Writes another run; how many rows it has. One that fails on the way is not counted."""
        return self.add_blocks(block.data for block in encode_blocks(rows, _FASTEST_LEVEL))

    def add_blocks(self, blocks: Iterable[bytes | memoryview], *, has_places: bool = False) -> int:
        """The same from blocks as they are in a state: they need not be made anew."""
        path = self._directory / f"run-{len(self._runs)}"
        if self._files.exists(path):
            self._files.remove(path)
        file, position, count = self._files.create(path), 0, 0
        try:
            for block in blocks:
                file.write_at(position, block)
                position += len(block)
                count += count_of(block)
        finally:
            file.close()
        self._runs.append(_Run(path, has_places))
        return count

    def merged(self) -> Iterator[Row]:
        """All rows that are left, in order of key."""
        for raw, count in self.merged_rows():
            yield from rows_in(raw, count, b"")

    def merged_rows(self) -> Iterator[RawRows]:
        """The same, many at a time."""
        return merge_newest_first((self._blocks(run), run.has_places) for run in reversed(self._runs))

    def _blocks(self, run: _Run) -> Iterator[RawRows]:
        file, position, last_key = self._files.open(run.path), 0, b""
        try:
            size = file.size()
            while position < size:
                block = file.read_at(position, block_bytes(file.read_at(position, HEADER_BYTES)))
                raw, count = decode_block(block), count_of(block)
                last_key = check_rows(raw, count, last_key, run.has_places)
                yield RawRows(raw, count)
                position += len(block)
        except DataError as error:
            raise CorruptionError(error.message, path=run.path, byte=position, operation="restore") from error
        finally:
            file.close()


def merge_newest_first(runs: Iterable[tuple[Iterator[RawRows], bool]]) -> Iterator[RawRows]:
    """The rows that are left of several runs, each with whether it has places, many rows at a time."""
    newest_first = [_Stream(blocks, has_places) for blocks, has_places in runs]
    while len(newest_first) > _MERGED_AT_ONCE:
        groups = [newest_first[at : at + _MERGED_AT_ONCE] for at in range(0, len(newest_first), _MERGED_AT_ONCE)]
        newest_first = [_Stream(_merged(group, drops_removed=False)) for group in groups]
    return _merged(newest_first, drops_removed=True)


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
