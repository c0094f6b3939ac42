"""The steps of a compaction that workers do: counting bodies, building units, writing the indexes.

Invariants
- Each step is done by tasks that may be repeated. What they write is named by its content, or is a body's own file.
- What units have built is kept: the indexes are written from it, and bodies are read once.
"""

from __future__ import annotations

import msgspec

from tidelog.engine.compacted import Compaction, PackInfo
from tidelog.engine.row_file import RowPart
from tidelog.errors import InternalError
from tidelog.pipeline.engine_jobs.bodies_build import Bodiless, Builder, BuildSettings, BuiltPack
from tidelog.pipeline.engine_jobs.bodies_plan import BodyPlan, WindowCount, plan_bodies, window_bytes_for
from tidelog.pipeline.engine_jobs.bodies_rows import BODY_SCHEMA, Counting, Grouping, OldPlaces, Pointing
from tidelog.pipeline.engine_jobs.compact_flow import Flow, Rows
from tidelog.pipeline.engine_jobs.compact_options import CompactEngineOptions
from tidelog.pipeline.engine_jobs.index_files import FILED_SCHEMA, TOLD_ROW, FileNames, write_files
from tidelog.pipeline.engine_jobs.index_rows import TOLD_SCHEMA, PartWork, told_by
from tidelog.pipeline.engines.place import OpenedEngine
from tidelog.pipeline.engines.store_place import EnginePlace

_BODY_ORDER = ("unit", "position", "kind")


class Steps:
    """What workers do for one compaction; `previous` is the one that it is built on."""

    def __init__(
        self,
        flow: Flow,
        opened: OpenedEngine,
        place: EnginePlace,
        options: CompactEngineOptions,
        previous: Compaction | None,
        large_bytes: int,
    ) -> None:
        self._flow = flow
        self._opened = opened
        self._place = place
        self._options = options
        self._previous = previous
        self._large_bytes = large_bytes
        self._first_new_lsn = 0 if previous is None else previous.lsn

    def planned(self, rows: Rows, end_lsn: int, tasks: int) -> BodyPlan:
        """Counts the bodies that rows point to, and plans where they go."""
        window_bytes = window_bytes_for(self._options.pack_bytes)
        bodies = self._bodies(rows, Grouping(window_bytes)).grouped("unit", tasks, _BODY_ORDER)
        counting = Counting(self._opened.keys, window_bytes, self._large_bytes, self._first_new_lsn)
        counts = sorted(told_by(bodies.mapped(counting, TOLD_SCHEMA), WindowCount), key=lambda one: one.window)
        first_lsn = min((one.first_new_lsn for one in counts), default=end_lsn)
        log = list(self._opened.catalog.between(first_lsn, end_lsn)) if first_lsn < end_lsn else []
        return plan_bodies(
            *(counts, self._previous, log),
            pack_bytes=self._options.pack_bytes,
            rows_per_file=self._options.rows_per_file,
        )

    def built(self, rows: Rows, plan: BodyPlan, generation: int, version_cuts: tuple[bytes, ...]) -> Built:
        """Writes packs and data files; both indexes can be written then."""
        filed = Bodiless(version_cuts).of(rows)
        if plan.bodies:
            settings = BuildSettings(
                place=self._place,
                generation=generation,
                large_bytes=self._large_bytes,
                first_new_lsn=self._first_new_lsn,
                codec=self._options.codec,
                old_packs=[] if self._previous is None else [pack.key for pack in self._previous.packs],
                version_cuts=version_cuts,
            )
            bodies = self._bodies(rows, Grouping(plan.window_bytes, plan.unit_cuts))
            units = bodies.grouped("unit", len(plan.units), _BODY_ORDER).mapped(Builder(settings, plan), FILED_SCHEMA)
            filed = filed.joined_by(units.kept())
        return Built(filed, plan, self._place, generation, len(version_cuts) + 1)

    def _bodies(self, rows: Rows, grouping: Grouping) -> Rows:
        pointing = rows.mapped(Pointing(grouping), BODY_SCHEMA)
        if self._previous is None or not self._previous.bodies:
            return pointing
        works = [PartWork(place=self._place, part=part) for part in self._previous.bodies]
        return pointing.joined_by(self._flow.source(OldPlaces(grouping), works, BODY_SCHEMA))


class Built:
    """What came of the units. Each of these is asked for once."""

    def __init__(self, filed: Rows, plan: BodyPlan, place: EnginePlace, generation: int, version_files: int) -> None:
        self._filed = filed
        self._plan = plan
        self._place = place
        self._generation = generation
        self._version_files = version_files

    def packs(self) -> list[PackInfo]:
        """The packs that were written, by their numbers."""
        told = self._filed.where("kind", TOLD_ROW).collected().column("value").to_pylist()
        packs = sorted((msgspec.msgpack.decode(one, type=BuiltPack) for one in told), key=lambda one: one.number)
        planned = [unit.pack for unit in self._plan.units if unit.pack is not None]
        if [pack.number for pack in packs] != planned:
            raise InternalError(f"packs {planned} were planned, and others were built")
        return [pack.info for pack in packs]

    def versions(self) -> list[RowPart]:
        """Writes the version index."""
        names = FileNames(kind="versions", generation=self._generation)
        return write_files(self._filed, self._version_files, self._place, names)

    def bodies(self) -> list[RowPart]:
        """Writes the body index."""
        names = FileNames(kind="bodies", generation=self._generation)
        parts = write_files(self._filed, len(self._plan.file_cuts) + 1, self._place, names)
        if sum(part.rows for part in parts) != self._plan.bodies:
            raise InternalError(f"{self._plan.bodies} bodies were counted, and the index has another number of them")
        return parts
