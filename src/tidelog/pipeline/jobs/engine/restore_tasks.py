"""Executor tasks of `restore`: turn pieces of the shipped log and of a snapshot into sorted runs, and runs into tree
pages.

Invariants
- `engine/wal/replay.py` decides which records count, as in a restore by one process.
- Blocks of a snapshot are compared with their checksum before they are kept.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from tidelog.engine.btree.bulk_load import filled_leaves, placed
from tidelog.engine.btree.page import PAGE_BYTES, divider_of, page_rows
from tidelog.engine.btree.page_file import PageFile
from tidelog.engine.recovery.sorted_runs import RUN_BLOCK_BYTES, Run, merged_rows, write_blocks, write_run
from tidelog.engine.sst.block import PackedRows, pack_rows
from tidelog.engine.sst.sstable import BlockHandle, read_row_blocks
from tidelog.errors import InputError
from tidelog.files import LocalFiles, explained
from tidelog.log.frame import crc32
from tidelog.pipeline.location import EngineLocation
from tidelog.pipeline.source.entry_batches import LogPart
from tidelog.pipeline.source.log_changes import EntryEnds, LastChanges, change_columns, packed_rows

# Files that the tasks of a restore exchange in the new directory: runs of rows, and leaves without numbers.
#
#     restoring/probe-{token}              made by the driver: a worker that does not see it has another directory
#     restoring/{what}-{number}-{token}    blocks of rows in order of key (`cell_blocks`), or pages one after the other
#
# Invariants
# - Every attempt of a task uses its own file name; only files reported to the driver count. The rest is deleted with
#   the folder.
# - Only pages of the tree are synced: an interrupted restore starts over.
# - Rows come from blocks whose checksum was compared.


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


_CHANGES_BYTES = 64 << 20
_RUNS_A_PIECE = 1 << 16


class LogPiece(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the log to be replayed."""

    part: LogPart
    workshop: Workshop
    number: int


class LogRuns(msgspec.Struct, frozen=True, kw_only=True):
    """What the entries that begin in a piece have changed, oldest run first."""

    number: int
    entries: int
    history_start_seq: int
    runs: tuple[Run, ...]


class StatePiece(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that follow each other in one file of a snapshot."""

    place: EngineLocation
    workshop: Workshop
    number: int
    key: str
    blocks: tuple[BlockHandle, ...]


class RunWriter:
    """Takes what `Changes` has gathered, as runs of a piece."""

    def __init__(self, workshop: Workshop, number: int) -> None:
        self.runs: list[Run] = []
        self._workshop = workshop
        self._number = number

    def add(self, rows: list[tuple[bytes, bytes]]) -> int:
        """Another run, newer than those before."""
        return self.add_packed(pack_rows(rows, RUN_BLOCK_BYTES))

    def add_packed(self, rows: Iterable[PackedRows]) -> int:
        """The same of rows that are packed already."""
        rank = 1 + self._number * _RUNS_A_PIECE + len(self.runs)
        run = write_run(self._workshop.path("log", self._number), rank, rows)
        self.runs.append(run)
        return sum(block.rows for block in run.blocks)

    def add_changes(self, changes: LastChanges) -> None:
        """The same of columns, if there are any; a row that is removed has no cell."""
        rows = changes.settle()
        if rows.num_rows:
            keys, cells = (rows.column(name).combine_chunks() for name in ("key", "cell"))
            self.add_packed(packed_rows(keys, cells, RUN_BLOCK_BYTES))


def read_log(piece: LogPiece) -> LogRuns:
    """The changes of one piece of the log."""
    writer, changes = RunWriter(piece.workshop, piece.number), LastChanges()
    ends, history_start_seq = EntryEnds(), 0
    for starts, columns in change_columns(piece.part, on_records=ends.count):
        history_start_seq = max(history_start_seq, *starts, 0)
        changes.add(columns)
        if changes.held_bytes >= _CHANGES_BYTES:
            writer.add_changes(changes)
            changes = LastChanges()
    writer.add_changes(changes)
    return LogRuns(
        number=piece.number,
        entries=ends.entries,
        history_start_seq=history_start_seq,
        runs=tuple(writer.runs),
    )


def keep_state(piece: StatePiece) -> Run:
    """Brings blocks of a state to the new directory, each of them checked."""
    path = piece.workshop.path("state", piece.number)
    found = read_row_blocks(piece.place.opened().objects, piece.key, piece.blocks)
    return write_blocks(path, 0, ((block.data, block.place) for block in found), has_places=True)


# Builds the index of a restored engine: the leaves of a key range, then their pages in `pages.db`.
#
# Invariants
# - A range has its own leaves: they hold no cell of a neighbour. Numbers and siblings are assigned when all ranges are
#   counted.
# - Written pages are read back from the page file and summed up again: both sums are the proof.
# - A page is written only to its own position, with the same bytes however often; the file is synced before it is
#   reported.


_PAGES_AT_ONCE = 128
_MODULUS = 1 << 64


class RangeWork(msgspec.Struct, frozen=True, kw_only=True):
    """A range of keys, `stop` exclusive, and the runs that have rows of it."""

    workshop: Workshop
    number: int
    start: bytes
    stop: bytes | None
    runs: tuple[Run, ...]
    lsn: int


class Leaves(msgspec.Struct, frozen=True, kw_only=True):
    """The leaves of a range. `dividers` has for each but the first the least key that may be in it."""

    number: int
    path: str
    pages: int
    rows: int
    checksum: int
    first_key: bytes = b""
    last_key: bytes = b""
    dividers: tuple[bytes, ...] = ()


class PlaceWork(msgspec.Struct, frozen=True, kw_only=True):
    """Leaves that now have their numbers, from `first_page` on; `right` is the page after the last, 0 for none."""

    leaves: Leaves
    pages_path: str
    first_page: int
    right: int
    lsn: int


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """What is in the page file then."""

    pages: int
    rows: int
    checksum: int


def fill_leaves(work: RangeWork) -> Leaves:
    """Makes the leaves of a range, as a file of pages without numbers."""
    path = work.workshop.path("leaves", work.number)
    rows, checksum, keys, ends = 0, 0, list[bytes](), list[bytes]()
    with explained("restore", path), path.open("wb") as file:
        rows_in_range = (merged.raw for merged in merged_rows(work.runs, work.start, work.stop))
        for leaf in filled_leaves(rows_in_range, work.lsn):
            file.write(leaf.page)
            rows += leaf.cells
            checksum += crc32(leaf.rows)
            keys.append(leaf.first_key)
            ends.append(leaf.last_key)
    dividers = tuple(divider_of(left, right) for left, right in zip(ends, keys[1:], strict=False))
    return Leaves(
        number=work.number,
        path=str(path),
        pages=len(keys),
        rows=rows,
        checksum=checksum % _MODULUS,
        first_key=keys[0] if keys else b"",
        last_key=ends[-1] if ends else b"",
        dividers=dividers,
    )


def place_leaves(work: PlaceWork) -> Placed:
    """Writes leaves to where they belong, and reads them back."""
    file = PageFile(LocalFiles(), Path(work.pages_path))
    stop_page = work.first_page + work.leaves.pages
    rows = checksum = 0
    try:
        for page_id, page in enumerate(_pages_in(Path(work.leaves.path)), work.first_page):
            right = page_id + 1 if page_id + 1 < stop_page else work.right
            file.write_page(page_id, placed(page, page_id, right, work.lsn))
        file.sync()
        for page_id in range(work.first_page, stop_page):
            count, raw = page_rows(file.read_page(page_id))
            rows += count
            checksum += crc32(raw)
    finally:
        file.close()
    return Placed(pages=work.leaves.pages, rows=rows, checksum=checksum % _MODULUS)


def _pages_in(path: Path) -> Iterator[bytes]:
    with explained("restore", path), path.open("rb") as file:
        while data := file.read(_PAGES_AT_ONCE * PAGE_BYTES):
            for at in range(0, len(data), PAGE_BYTES):
                yield data[at : at + PAGE_BYTES]
