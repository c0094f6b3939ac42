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

import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from tidelog.engine.cell_blocks import Row, decode_block, encode_blocks
from tidelog.engine.restore_runs import RawRows, merge_newest_first
from tidelog.engine.row_file import BlockPlace
from tidelog.engine.rows import check_rows
from tidelog.engine.rows_python import row_at
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


def merged_rows(runs: Iterable[Run], start: bytes, stop: bytes | None) -> Iterator[bytes]:
    """What is left of all runs between two keys, in order of key: rows of cells, many at a time."""
    newest_first = sorted((run for run in runs if run.blocks), key=lambda one: -one.rank)
    streams = ((_blocks(run, start, stop), run.values == "versions") for run in newest_first)
    return (merged.raw for merged in merge_newest_first(streams))


def _blocks(run: Run, start: bytes, stop: bytes | None) -> Iterator[RawRows]:
    path, has_places = Path(run.path), run.values == "versions"
    file, last_key = LocalFiles().open(path), b""
    try:
        for at in run.blocks:
            try:
                raw = decode_block(file.read_at(at.byte, at.size))
                last_key = check_rows(raw, at.rows, last_key, has_places)
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
        key, _, behind = row_at(raw, at, False)
        if key < start:
            begin = end = behind
        elif stop is not None and key >= stop:
            break
        else:
            end, count = behind, count + 1
        at = behind
    return RawRows(raw[begin:end], count)
