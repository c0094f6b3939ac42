"""Plans where a compaction stores values: the driver decides, from counts that the workers made per window of the log.

    window    a range of the log of a fixed size: the workers count what is live in it
    unit      consecutive windows, for one task: it writes at most one blob file, and the data files of the unit

Invariants
- The plan depends on the set of live values and on the previous compaction, not on the number of tasks.
- A value that has a location keeps it, unless more than half of its blob file is dead: live values of such a file move
  to a new one. Whether a value is a file or in a blob file is decided once, when it is first compacted.
- Blob files are numbered before they are written: retained ones first, in their old order, then those of the units.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from tidelog.cold.catalog import Descriptor
from tidelog.engine.sst.blob_file import value_key
from tidelog.engine.sst.sorted_index import BlobFileInfo, Compaction

DEFAULT_LARGE_BYTES = 1 << 20
DEFAULT_BLOB_FILE_BYTES = 64 << 20
_WINDOWS_PER_BLOB_FILE = 16
# A unit ends with so many blob files' worth of data files too, so that no task has all of the large values.
_FILE_BYTES_PER_BLOB_BYTE = 8
_MAX_UNIT_VALUES = 1_000_000
_NO_LSN = (1 << 64) - 1


class LiveValues(msgspec.Struct, frozen=True, array_like=True):
    """What is live of an old blob file, in a window."""

    blob_file: int
    values: int
    stored_bytes: int


class WindowCount(msgspec.Struct, frozen=True, kw_only=True):
    """The live values of a window: new ones for blob files, new ones for files, those in files, those in blob files."""

    window: int
    new_values: int = 0
    new_bytes: int = 0
    new_files: int = 0
    new_file_bytes: int = 0
    first_new_lsn: int = _NO_LSN
    last_new_lsn: int = 0
    old_files: int = 0
    old_file_bytes: int = 0
    packed: tuple[LiveValues, ...] = ()

    @property
    def values(self) -> int:
        """All of them."""
        return self.new_values + self.new_files + self.old_files + sum(one.values for one in self.packed)


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """What one task builds: the blob file with this number, if any, out of records in these objects of the log."""

    blob_file: int | None
    descriptors: tuple[Descriptor, ...] = ()


class ValuePlan(NamedTuple):
    """Everything that is decided before values are read.

    `unit_cuts` and `file_cuts`: the first positions of all units, and of all files of the value index, but the first.
    `kept` are old blob files by their new numbers, `renumbered` gives the new numbers of old ones that stay.
    """

    window_bytes: int
    unit_cuts: tuple[int, ...]
    units: tuple[Unit, ...]
    file_cuts: tuple[bytes, ...]
    kept: tuple[BlobFileInfo, ...]
    renumbered: Mapping[int, int]
    rewritten: int
    values: int
    new_blob_values: int
    new_files: int
    data_files: int
    data_bytes: int


def window_bytes_for(blob_file_bytes: int) -> int:
    """How long a window is, for blob files of about this size."""
    return max(1, blob_file_bytes // _WINDOWS_PER_BLOB_FILE)


def plan_values(
    counts: Sequence[WindowCount],
    previous: Compaction | None,
    descriptors: Sequence[Descriptor],
    *,
    blob_file_bytes: int,
    rows_per_file: int,
) -> ValuePlan:
    """The plan for the windows that were counted, in order."""
    blob_files = () if previous is None else previous.blob_files
    live = _live_of(blob_files, counts)
    staying = [number for number, blob_file in enumerate(blob_files) if _stays(blob_file, live[number])]
    kept = tuple(
        msgspec.structs.replace(
            blob_files[number], live_values=live[number].values, live_bytes=live[number].stored_bytes
        )
        for number in staying
    )
    renumbered = {old: new for new, old in enumerate(staying)}
    window_bytes = window_bytes_for(blob_file_bytes)
    groups = _grouped(counts, renumbered, blob_file_bytes)
    return ValuePlan(
        window_bytes=window_bytes,
        unit_cuts=tuple(group[0].window * window_bytes for group in groups[1:]),
        units=_units(groups, renumbered, descriptors),
        file_cuts=_file_cuts(counts, window_bytes, rows_per_file),
        kept=kept,
        renumbered=renumbered,
        rewritten=sum(1 for number, one in live.items() if one.values and number not in renumbered),
        values=sum(one.values for one in counts),
        new_blob_values=sum(_to_write(one, renumbered).values for one in counts),
        new_files=sum(one.new_files for one in counts),
        data_files=sum(one.new_files + one.old_files for one in counts),
        data_bytes=sum(one.new_file_bytes + one.old_file_bytes for one in counts),
    )


def _live_of(blob_files: Sequence[BlobFileInfo], counts: Iterable[WindowCount]) -> dict[int, LiveValues]:
    live = {number: LiveValues(number, 0, 0) for number in range(len(blob_files))}
    for count in counts:
        for one in count.packed:
            before = live[one.blob_file]
            live[one.blob_file] = LiveValues(
                one.blob_file, before.values + one.values, before.stored_bytes + one.stored_bytes
            )
    return live


def _stays(blob_file: BlobFileInfo, live: LiveValues) -> bool:
    return live.values > 0 and 2 * live.stored_bytes >= blob_file.size


def _to_write(count: WindowCount, renumbered: Mapping[int, int]) -> LiveValues:
    """What of a window is to be packed: new values, and those of blob files that do not stay."""
    moved = [one for one in count.packed if one.blob_file not in renumbered]
    values = count.new_values + sum(one.values for one in moved)
    return LiveValues(-1, values, count.new_bytes + sum(one.stored_bytes for one in moved))


def _grouped(
    counts: Sequence[WindowCount], renumbered: Mapping[int, int], blob_file_bytes: int
) -> list[list[WindowCount]]:
    groups: list[list[WindowCount]] = [[]]
    packed = files = values = 0
    for count in counts:
        is_full = (
            packed >= blob_file_bytes
            or files >= blob_file_bytes * _FILE_BYTES_PER_BLOB_BYTE
            or values >= _MAX_UNIT_VALUES
        )
        if is_full:
            groups.append([])
            packed = files = values = 0
        groups[-1].append(count)
        packed += _to_write(count, renumbered).stored_bytes
        files += count.new_file_bytes
        values += count.values
    return groups


def _units(
    groups: Sequence[Sequence[WindowCount]], renumbered: Mapping[int, int], descriptors: Sequence[Descriptor]
) -> tuple[Unit, ...]:
    units, number = list[Unit](), len(renumbered)
    for group in groups:
        has_blob_file = any(_to_write(count, renumbered).values for count in group)
        first = min((count.first_new_lsn for count in group), default=_NO_LSN)
        last = max((count.last_new_lsn for count in group), default=0)
        units.append(Unit(blob_file=number if has_blob_file else None, descriptors=_between(descriptors, first, last)))
        number += has_blob_file
    return tuple(units)


def _between(descriptors: Sequence[Descriptor], first_lsn: int, last_lsn: int) -> tuple[Descriptor, ...]:
    low = bisect_left(descriptors, first_lsn, key=lambda one: one.end_offset)
    return tuple(descriptors[low : bisect_right(descriptors, last_lsn, key=lambda one: one.start_offset)])


def _file_cuts(counts: Sequence[WindowCount], window_bytes: int, rows_per_file: int) -> tuple[bytes, ...]:
    cuts, rows = list[bytes](), 0
    for count in counts:
        if rows >= rows_per_file:
            cuts.append(value_key(count.window * window_bytes))
            rows = 0
        rows += count.values
    return tuple(cuts)
