"""The oracle of cells as a collection of garbage looks at them: which versions stay, and where they point."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from itertools import groupby

from tests.oracles.cells import decode_cell

from tidelog.engine.mvcc.cells import INLINE, OBJECTS, POINTER, SEQ_BYTES, is_pointer, seq_of
from tidelog.engine.mvcc.versions import BucketVersion
from tidelog.engine.wal.value import CODEC_FILE

Cells = list[tuple[bytes, bytes]]


def count_cells(cells: Cells, usage: array[int]) -> list[bytes]:
    """Adds versions that stay to what is in use; the cells of those whose values have files of their own."""
    return [value for _, value in cells if _is_in_file(value, usage)]


def _is_in_file(value: bytes, usage: array[int]) -> bool:
    usage[0] += len(value)
    if is_pointer(value):
        cell = decode_cell(value)
        usage[0] += cell.stored_bytes
        index = bisect_right(usage[1::3], cell.lsn) - 1
        if index >= 0 and cell.lsn < usage[3 * index + 2]:
            usage[3 * index + 3] += cell.stored_bytes
    return bool(value) and value[0] == INLINE | CODEC_FILE << 4


def pointing_cells(cells: Cells, first_lsn: int, below_lsn: int, last_seq: int) -> Cells:
    """Those of versions up to a seq that point to records from one LSN up to another."""
    some = [(key, value) for key, value in cells if is_pointer(value) and seq_of(key) <= last_seq]
    return [(key, value) for key, value in some if first_lsn <= decode_cell(value).lsn < below_lsn]


def judge_cells(
    cells: Cells,
    is_last: bool,
    horizon: int,
    keep_versions: int,
    created: dict[bytes, BucketVersion],
    usage: array[int],
) -> tuple[int, list[bytes], int, int, Cells, list[bytes]]:
    """Judges names whose versions are all values that no bucket hides; the others are given back."""
    names = [list(found) for _, found in groupby(cells, lambda cell: cell[0][:-SEQ_BYTES])]
    if not is_last:
        names = names[:-1]
    done, doomed, doomed_bytes, kept = sum(map(len, names)), list[bytes](), 0, 0
    others, in_files = Cells(), list[bytes]()
    for versions in names:
        if not _is_plain(versions, created):
            others += versions
            continue
        newer = [cell for cell in versions if seq_of(cell[0]) > horizon]
        staying = versions[: len(newer) + keep_versions]
        in_files += count_cells(staying, usage)
        kept += len(staying)
        for key, value in reversed(versions[len(staying) :]):
            doomed.append(key)
            doomed_bytes += decode_cell(value).stored_bytes if is_pointer(value) else 0
    return done, doomed, doomed_bytes, kept, others, in_files


def _is_plain(versions: Cells, created: dict[bytes, BucketVersion]) -> bool:
    if not all(value and value[0] & 15 in (INLINE, POINTER) for _, value in versions):
        return False
    key = versions[-1][0]
    bucket, nul, _ = key[1:-SEQ_BYTES].partition(b"\0")
    found = created.get(bucket) if key.startswith(OBJECTS) and nul else None
    return found is not None and seq_of(key) > found.seq
