"""What a worker does for the index of a restored engine: leaves of a range of keys, then their place in `pages.db`.

Invariants
- A range has its own leaves: no cell of a neighbour is in them. Numbers and siblings come when all ranges are counted.
- What is placed is read back from the page file and summed up again: both sums are the proof.
- A page is written to its place alone, with the same bytes however often; the file is synced before it is told of.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from tidelog.engine.page import PAGE_BYTES, Cell, cells
from tidelog.engine.page_file import PageFile
from tidelog.engine.tree_pieces import filled_leaves, placed
from tidelog.engine.tree_python import divider_of
from tidelog.files import LocalFiles, explained
from tidelog.log.frame import crc32
from tidelog.pipeline.engine_jobs.restore_files import Run, Workshop, merged_rows

_PAGES_AT_ONCE = 128
_LENGTHS = struct.Struct("<HH")
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
    """Leaves that have their numbers by now: from `first_page` on; `right` is the page behind the last, 0 for none."""

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
        for leaf in filled_leaves(merged_rows(work.runs, work.start, work.stop), work.lsn):
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
            found = cells(file.read_page(page_id))
            rows += len(found)
            checksum += cells_sum(found)
    finally:
        file.close()
    return Placed(pages=work.leaves.pages, rows=rows, checksum=checksum % _MODULUS)


def _pages_in(path: Path) -> Iterator[bytes]:
    with explained("restore", path), path.open("rb") as file:
        while data := file.read(_PAGES_AT_ONCE * PAGE_BYTES):
            for at in range(0, len(data), PAGE_BYTES):
                yield data[at : at + PAGE_BYTES]


def cells_sum(found: Iterable[Cell]) -> int:
    """The checksum of the rows that these cells were made of, as they are in a block."""
    return crc32(b"".join([part for key, value in found for part in (_LENGTHS.pack(len(key), len(value)), key, value)]))
