"""What a worker does with the bodies of a unit: reads those that have no place yet, writes them as a pack and as data
files, and tells the rows of both indexes.

Invariants
- Every body is checked against its cell before it is written, and what was written is read back and compared.
- The same bodies give the same bytes under the same names: a unit that is built twice is the same.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tidelog.engine.cell_blocks import Row
from tidelog.engine.compacted import PackInfo
from tidelog.engine.pack import encode_pack
from tidelog.engine.place import FilePlace, PackPlace, Place, body_key, encode_place, encode_version
from tidelog.errors import InternalError
from tidelog.pipeline.engine_jobs.bodies_plan import BodyPlan, Unit
from tidelog.pipeline.engine_jobs.bodies_read import BodyCodec, Stored, bodies_in_log, bodies_in_pack, recoded
from tidelog.pipeline.engine_jobs.bodies_rows import Body, bodies_of, gets_file, points_to_body, require_new
from tidelog.pipeline.engine_jobs.index_files import (
    BODY_ROW,
    FILED_SCHEMA,
    TOLD_ROW,
    VERSION_ROW,
    as_filed,
    write_checked,
)
from tidelog.pipeline.engine_jobs.index_rows import rows_of
from tidelog.pipeline.engines.store_place import EnginePlace
from tidelog.tier.compacted_names import CompactedId, digest_of

if TYPE_CHECKING:
    import pyarrow as pa

    from tidelog.pipeline.engine_jobs.compact_flow import Rows

Placed = tuple[Body, Place]


class BuiltPack(msgspec.Struct, frozen=True, kw_only=True):
    """A pack that was written, and its number."""

    number: int
    info: PackInfo


class BuildSettings(NamedTuple):
    """How a compaction is built, the same for all units."""

    place: EnginePlace
    generation: int
    large_bytes: int
    first_new_lsn: int
    codec: BodyCodec | None
    old_packs: Sequence[str]
    version_cuts: Sequence[bytes]


class Builder:
    """Builds the units of a task. A unit's part of the plan is unpacked by the task that has it."""

    def __init__(self, settings: BuildSettings, plan: BodyPlan) -> None:
        self._settings = settings
        self._keys = settings.place.keys
        self._renumbered: Mapping[int, int] = plan.renumbered
        self._file_cuts = plan.file_cuts
        self._units = [pickle.dumps(unit) for unit in plan.units]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number, bodies in groupby(bodies_of(batches), key=lambda one: one[0]):
            unit: Unit = pickle.loads(self._units[number])
            yield from self._build(unit, [body for _, body in bodies])

    def _build(self, unit: Unit, bodies: Sequence[Body]) -> Iterator[pa.RecordBatch]:
        placed, to_pack = self._settled(bodies), list[tuple[Body, Stored]]()
        for body, stored in self._read(unit, bodies):
            name = None if body.place is not None else gets_file(body, self._settings.large_bytes, self._keys)
            if name is None:
                to_pack.append((body, recoded(stored, self._settings.codec)))
            else:
                placed.append((body, self._written_file(name, stored)))
        if to_pack:
            built, packed = self._written_pack(unit, sorted(to_pack, key=lambda one: one[0].position))
            placed += packed
            yield from as_filed([(b"", msgspec.msgpack.encode(built))], (), TOLD_ROW)
        yield from as_filed(_version_rows(placed), self._settings.version_cuts, VERSION_ROW)
        yield from as_filed(_body_rows(placed), self._file_cuts, BODY_ROW)

    def _settled(self, bodies: Iterable[Body]) -> list[Placed]:
        """Those that stay where they are."""
        found: list[Placed] = []
        for body in bodies:
            place = body.place
            if isinstance(place, FilePlace):
                found.append((body, place))
            elif place is not None and place.pack in self._renumbered:
                found.append((body, place._replace(pack=self._renumbered[place.pack])))
        return found

    def _read(self, unit: Unit, bodies: Sequence[Body]) -> Iterator[tuple[Body, Stored]]:
        """Those that do not: from the log, and from packs that are given up."""
        new, moved = list[Body](), dict[int, list[tuple[PackPlace, Body]]]()
        for body in bodies:
            if body.place is None:
                require_new(body, self._settings.first_new_lsn)
                new.append(body)
            elif isinstance(body.place, PackPlace) and body.place.pack not in self._renumbered:
                moved.setdefault(body.place.pack, []).append((body.place, body))
        from_log = bodies_in_log(self._settings.place, unit.descriptors, [body.cell for body in new])
        for body, data in zip(new, from_log, strict=True):
            yield body, Stored(data, body.cell.codec)
        for pack, group in sorted(moved.items()):
            key = self._settings.old_packs[pack]
            cells = [(place, body.cell) for place, body in group]
            from_pack = bodies_in_pack(self._settings.place.opened().objects, key, cells)
            for (place, body), data in zip(group, from_pack, strict=True):
                yield body, Stored(data, place.codec)

    def _written_file(self, name: str, stored: Stored) -> FilePlace:
        key = self._keys.data_file_named(name)
        if key is None:
            raise InternalError(f"{name} was to be the name of a data file")
        write_checked(self._settings.place.opened().objects, key, stored.data, digest_of(stored.data))
        return FilePlace(stored.codec, len(stored.data), name)

    def _written_pack(self, unit: Unit, bodies: Sequence[tuple[Body, Stored]]) -> tuple[BuiltPack, list[Placed]]:
        if unit.pack is None:
            raise InternalError("a unit packs bodies, and none were counted")
        encoded = encode_pack((body.position, stored.data) for body, stored in bodies)
        key = self._keys.compacted(CompactedId("pack", self._settings.generation, encoded.digest))
        write_checked(self._settings.place.opened().objects, key, encoded.data, encoded.digest)
        info = PackInfo(
            key=key,
            size=len(encoded.data),
            bodies=len(bodies),
            live_bodies=len(bodies),
            live_bytes=sum(len(stored.data) for _, stored in bodies),
            first_position=bodies[0][0].position,
            last_position=bodies[-1][0].position,
        )
        placed: list[Placed] = [
            (body, PackPlace(stored.codec, unit.pack, at.byte, at.stored_bytes))
            for (body, stored), at in zip(bodies, encoded.places, strict=True)
        ]
        return BuiltPack(number=unit.pack, info=info), placed


def _version_rows(placed: Iterable[Placed]) -> Iterator[Row]:
    return ((key, encode_version(cell, place)) for body, place in placed for key, cell in body.versions)


def _body_rows(placed: Iterable[Placed]) -> Iterator[Row]:
    return ((body_key(body.position), encode_place(place)) for body, place in placed)


class Bodiless:
    """The rows that point to no body, as those of the version index."""

    def __init__(self, cuts: Sequence[bytes]) -> None:
        self._cuts = cuts

    def of(self, rows: Rows) -> Rows:
        """Them, with the numbers of their files."""
        return rows.mapped(self, FILED_SCHEMA)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found = ((key, encode_version(cell, None)) for key, cell in rows_of(batches) if not points_to_body(key, cell))
        return as_filed(found, self._cuts)
