"""What a restore keeps on the disk meanwhile: runs of rows, each in order of key, and their merge.

    restoring/run-0        the state that it begins with
    restoring/run-1 ...    what the log behind it changed, oldest first

Invariants
- A later run wins over an earlier one. A row without a value takes the key away: no cell of the tree is empty.
- One block of each run is in memory. Nothing in here outlives the restore, and nothing in here is synced.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from tidelog.engine.cell_blocks import HEADER_BYTES, Row, block_bytes, count_of, decode_block, encode_blocks, rows_in
from tidelog.errors import CorruptionError, DataError
from tidelog.files import Files

REMOVED = b""
_FASTEST_LEVEL = 1
_ROW_OVERHEAD_BYTES = 200


class Runs:
    """The runs of one restore."""

    def __init__(self, files: Files, directory: Path) -> None:
        self._files = files
        self._directory = directory
        self._paths: list[Path] = []

    def add(self, rows: Iterable[Row]) -> int:
        """Writes another run; how many rows it has. One that fails on the way is not counted."""
        path = self._directory / f"run-{len(self._paths)}"
        if self._files.exists(path):
            self._files.remove(path)
        file, position, count = self._files.create(path), 0, 0
        try:
            for block in encode_blocks(rows, _FASTEST_LEVEL):
                file.write_at(position, block.data)
                position += len(block.data)
                count += block.count
        finally:
            file.close()
        self._paths.append(path)
        return count

    def merged(self) -> Iterator[Row]:
        """All rows that are left, in order of key."""
        streams = [self._tagged(path, -number) for number, path in enumerate(self._paths)]
        last_key: bytes | None = None
        for key, _, value in heapq.merge(*streams):
            if key != last_key and value != REMOVED:
                yield key, value
            last_key = key

    def _tagged(self, path: Path, tag: int) -> Iterator[tuple[bytes, int, bytes]]:
        """The newest run has the smallest tag, so that its row comes first."""
        for key, value in self._rows(path):
            yield key, tag, value

    def _rows(self, path: Path) -> Iterator[Row]:
        file, position, last_key = self._files.open(path), 0, b""
        try:
            size = file.size()
            while position < size:
                block = file.read_at(position, block_bytes(file.read_at(position, HEADER_BYTES)))
                for key, value in rows_in(decode_block(block), count_of(block), last_key):
                    yield key, value
                    last_key = key
                position += len(block)
        except DataError as error:
            raise CorruptionError(error.message, path=path, byte=position, operation="restore") from error
        finally:
            file.close()


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
