"""What the tasks of a restore leave for each other in the new directory: runs of rows, and leaves without numbers.

    restoring/probe-{token}              made by the driver: whoever does not see it has another directory before it
    restoring/{what}-{number}-{token}    blocks of rows in order of key (`cell_blocks`), or pages one after the other

Invariants
- A file has a name of its own for each attempt of a task; what counts is what the driver was told of. The rest goes
  with the folder.
- Nothing in here is synced but pages of the tree: a restore that was cut off begins anew.
- Rows come from blocks whose checksum was compared.
"""

from __future__ import annotations

import heapq
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from tidelog.engine.cell_blocks import Row, decode_block, encode_blocks, rows_in
from tidelog.engine.place import decode_version
from tidelog.engine.restore_runs import REMOVED
from tidelog.engine.row_file import BlockPlace
from tidelog.errors import CorruptionError, DataError, InputError
from tidelog.files import Files, LocalFiles

_FASTEST_LEVEL = 1
# Small enough that a task of a key range reads little that it does not need.
_BLOCK_BYTES = 256 << 10

Values = Literal["cells", "versions"]
"""What a row has behind its key: a cell, or a cell with the place of its body, as index files have it."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A file of rows in order of key. Of two with the same key the one of the higher `rank` counts."""

    path: str
    rank: int
    values: Values = "cells"
    blocks: tuple[BlockPlace, ...] = ()

    def between(self, start: bytes, stop: bytes | None) -> Run:
        """The same with those blocks only that may have keys from `start` up to `stop` (exclusive)."""
        kept = tuple(one for one in self.blocks if one.last_key >= start and (stop is None or one.first_key < stop))
        return msgspec.structs.replace(self, blocks=kept)


class Workshop(msgspec.Struct, frozen=True, kw_only=True):
    """The folder of a restore that is under way, as its tasks see it."""

    folder: str
    probe: str

    def path(self, what: str, number: int) -> Path:
        """A new file; InputError where this machine has not the driver's directory."""
        folder = Path(self.folder)
        if not (folder / self.probe).exists():
            raise InputError(
                "a worker does not see the directory that is restored into",
                operation="restore",
                path=folder,
                hint="Name one that the driver and all workers have in common, or leave --master out",
            )
        return folder / f"{what}-{number:05d}-{secrets.token_hex(4)}"


def write_run(path: Path, rank: int, rows: Iterable[Row], files: Files | None = None) -> Run:
    """Rows in order of key as a file."""
    blocks: list[BlockPlace] = []
    file, byte = (files or LocalFiles()).create(path), 0
    try:
        for block in encode_blocks(rows, _FASTEST_LEVEL, _BLOCK_BYTES):
            file.write_at(byte, block.data)
            blocks.append(BlockPlace(byte, len(block.data), block.count, block.first_key, block.last_key))
            byte += len(block.data)
    finally:
        file.close()
    return Run(path=str(path), rank=rank, blocks=tuple(blocks))


def merged_rows(runs: Iterable[Run], start: bytes, stop: bytes | None) -> Iterator[Row]:
    """What is left of all runs between two keys, in order of key, as cells."""
    parts = sorted((run for run in runs if run.blocks), key=lambda one: -one.rank)
    if len(parts) == 1:
        yield from (row for row in _rows(parts[0], start, stop) if row[1] != REMOVED)
        return
    last_key: bytes | None = None
    tagged = [_tagged(run, place, start, stop) for place, run in enumerate(parts)]
    for key, _, value in heapq.merge(*tagged):
        if key != last_key and value != REMOVED:
            yield key, value
        last_key = key


def _tagged(run: Run, place: int, start: bytes, stop: bytes | None) -> Iterator[tuple[bytes, int, bytes]]:
    """The newest run comes first among equal keys."""
    for key, value in _rows(run, start, stop):
        yield key, place, value


def _rows(run: Run, start: bytes, stop: bytes | None) -> Iterator[Row]:
    for block in _blocks(run):
        is_inside = block[0][0] >= start and (stop is None or block[-1][0] < stop)
        wanted = block if is_inside else [row for row in block if row[0] >= start and (stop is None or row[0] < stop)]
        if run.values == "cells":
            yield from wanted
        else:
            yield from ((key, decode_version(value)[0]) for key, value in wanted)


def _blocks(run: Run) -> Iterator[list[Row]]:
    path = Path(run.path)
    file = LocalFiles().open(path)
    try:
        for at in run.blocks:
            try:
                yield list(rows_in(decode_block(file.read_at(at.byte, at.size)), at.rows, b""))
            except DataError as error:
                raise CorruptionError(error.message, path=path, byte=at.byte, operation="restore") from error
    finally:
        file.close()
