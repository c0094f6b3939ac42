"""Where bodies go in a compaction: the driver's plan, from what the workers counted in windows of the log.

    window    a stretch of the log of a fixed size: what is live in it is counted by the workers
    unit      windows one behind the other, for one task: it writes one pack, or none, and the data files of the unit

Invariants
- The plan depends on the set of live bodies and on the compaction before, not on the number of tasks.
- A body that has a place keeps it, unless it is in a pack of which more than half is dead: what lives there is packed
  anew. Whether a body is a file or in a pack is decided once, when it is compacted for the first time.
- Packs are numbered before they are written: those that stay first, in their old order, then one for each unit that
  packs something.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from tidelog.engine.compacted import Compaction, PackInfo
from tidelog.engine.place import body_key
from tidelog.tier.descriptor import Descriptor

DEFAULT_LARGE_BYTES = 1 << 20
DEFAULT_PACK_BYTES = 64 << 20
_WINDOWS_PER_PACK = 16
# A unit ends with so many packs' worth of data files too, so that no task has all of the large bodies.
_FILE_BYTES_PER_PACK_BYTE = 8
_MAX_UNIT_BODIES = 1_000_000
_NO_LSN = (1 << 64) - 1


class PackedLive(msgspec.Struct, frozen=True, array_like=True):
    """What is live of an old pack, in a window."""

    pack: int
    bodies: int
    stored_bytes: int


class WindowCount(msgspec.Struct, frozen=True, kw_only=True):
    """The live bodies of a window: new ones for packs, new ones for files, those that have a file, those in packs."""

    window: int
    new_bodies: int = 0
    new_bytes: int = 0
    new_files: int = 0
    new_file_bytes: int = 0
    first_new_lsn: int = _NO_LSN
    last_new_lsn: int = 0
    old_files: int = 0
    old_file_bytes: int = 0
    packed: tuple[PackedLive, ...] = ()

    @property
    def bodies(self) -> int:
        """All of them."""
        return self.new_bodies + self.new_files + self.old_files + sum(one.bodies for one in self.packed)


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """What one task builds: the pack with this number, if any, out of records in these objects of the log."""

    pack: int | None
    descriptors: tuple[Descriptor, ...] = ()


class BodyPlan(NamedTuple):
    """Everything that is decided before bodies are read.

    `unit_cuts` and `file_cuts` are the first positions of all units, and of all files of the body index, but the first.
    `kept` are old packs by their new numbers, `renumbered` gives the new numbers of old ones that stay.
    """

    window_bytes: int
    unit_cuts: tuple[int, ...]
    units: tuple[Unit, ...]
    file_cuts: tuple[bytes, ...]
    kept: tuple[PackInfo, ...]
    renumbered: Mapping[int, int]
    rewritten: int
    bodies: int
    new_packed: int
    new_files: int
    data_files: int
    data_bytes: int


def window_bytes_for(pack_bytes: int) -> int:
    """How long a window is, for packs of about this size."""
    return max(1, pack_bytes // _WINDOWS_PER_PACK)


def plan_bodies(
    counts: Sequence[WindowCount],
    previous: Compaction | None,
    descriptors: Sequence[Descriptor],
    *,
    pack_bytes: int,
    rows_per_file: int,
) -> BodyPlan:
    """The plan for the windows that were counted, in order."""
    packs = () if previous is None else previous.packs
    live = _live_of(packs, counts)
    staying = [number for number, pack in enumerate(packs) if _stays(pack, live[number])]
    kept = tuple(
        msgspec.structs.replace(packs[number], live_bodies=live[number].bodies, live_bytes=live[number].stored_bytes)
        for number in staying
    )
    renumbered = {old: new for new, old in enumerate(staying)}
    window_bytes = window_bytes_for(pack_bytes)
    groups = _grouped(counts, renumbered, pack_bytes)
    return BodyPlan(
        window_bytes=window_bytes,
        unit_cuts=tuple(group[0].window * window_bytes for group in groups[1:]),
        units=_units(groups, renumbered, descriptors),
        file_cuts=_file_cuts(counts, window_bytes, rows_per_file),
        kept=kept,
        renumbered=renumbered,
        rewritten=sum(1 for number, one in live.items() if one.bodies and number not in renumbered),
        bodies=sum(one.bodies for one in counts),
        new_packed=sum(_packable(one, renumbered).bodies for one in counts),
        new_files=sum(one.new_files for one in counts),
        data_files=sum(one.new_files + one.old_files for one in counts),
        data_bytes=sum(one.new_file_bytes + one.old_file_bytes for one in counts),
    )


def _live_of(packs: Sequence[PackInfo], counts: Iterable[WindowCount]) -> dict[int, PackedLive]:
    live = {number: PackedLive(number, 0, 0) for number in range(len(packs))}
    for count in counts:
        for one in count.packed:
            before = live[one.pack]
            live[one.pack] = PackedLive(one.pack, before.bodies + one.bodies, before.stored_bytes + one.stored_bytes)
    return live


def _stays(pack: PackInfo, live: PackedLive) -> bool:
    return live.bodies > 0 and 2 * live.stored_bytes >= pack.size


def _packable(count: WindowCount, renumbered: Mapping[int, int]) -> PackedLive:
    """What of a window is to be packed: new bodies, and those of packs that do not stay."""
    moved = [one for one in count.packed if one.pack not in renumbered]
    bodies = count.new_bodies + sum(one.bodies for one in moved)
    return PackedLive(-1, bodies, count.new_bytes + sum(one.stored_bytes for one in moved))


def _grouped(counts: Sequence[WindowCount], renumbered: Mapping[int, int], pack_bytes: int) -> list[list[WindowCount]]:
    groups: list[list[WindowCount]] = [[]]
    packed = files = bodies = 0
    for count in counts:
        is_full = packed >= pack_bytes or files >= pack_bytes * _FILE_BYTES_PER_PACK_BYTE or bodies >= _MAX_UNIT_BODIES
        if is_full:
            groups.append([])
            packed = files = bodies = 0
        groups[-1].append(count)
        packed += _packable(count, renumbered).stored_bytes
        files += count.new_file_bytes
        bodies += count.bodies
    return groups


def _units(
    groups: Sequence[Sequence[WindowCount]], renumbered: Mapping[int, int], descriptors: Sequence[Descriptor]
) -> tuple[Unit, ...]:
    units, number = list[Unit](), len(renumbered)
    for group in groups:
        has_pack = any(_packable(count, renumbered).bodies for count in group)
        first = min((count.first_new_lsn for count in group), default=_NO_LSN)
        last = max((count.last_new_lsn for count in group), default=0)
        units.append(Unit(pack=number if has_pack else None, descriptors=_between(descriptors, first, last)))
        number += has_pack
    return tuple(units)


def _between(descriptors: Sequence[Descriptor], first_lsn: int, last_lsn: int) -> tuple[Descriptor, ...]:
    low = bisect_left(descriptors, first_lsn, key=lambda one: one.end_offset)
    return tuple(descriptors[low : bisect_right(descriptors, last_lsn, key=lambda one: one.start_offset)])


def _file_cuts(counts: Sequence[WindowCount], window_bytes: int, rows_per_file: int) -> tuple[bytes, ...]:
    cuts, rows = list[bytes](), 0
    for count in counts:
        if rows >= rows_per_file:
            cuts.append(body_key(count.window * window_bytes))
            rows = 0
        rows += count.bodies
    return tuple(cuts)
