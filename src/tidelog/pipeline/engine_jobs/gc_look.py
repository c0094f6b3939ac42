"""What an engine has in its store, held against what it refers to: the look that a plan is made from.

Invariants
- The manifest is read first, then what it leads to, then the store is listed, then the catalog is walked: what appears
  in between is of somebody at work, and falls under no rule.
- Data files are compared only where the body index is there as a whole: what it names is not known otherwise.
- Nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from tidelog.engine.compacted import read_compaction
from tidelog.engine.manifest import Manifest
from tidelog.engine.raw_log import droppable_below_lsn, whole_objects_below
from tidelog.errors import DataError, NotFoundError
from tidelog.log.frame import crc32
from tidelog.pipeline.engine_jobs.gc_data import NO_DATA_FILES, DataFiles, compare_data_files
from tidelog.pipeline.engine_jobs.gc_rules import Action, Garbage, Kind, References, judged, judged_data
from tidelog.pipeline.engine_jobs.gc_states import OLD_STATE, leaving_of, old_states
from tidelog.pipeline.engine_jobs.gc_work import Listed, ListWork, list_prefix, references_of
from tidelog.pipeline.engines.place import OpenedEngine
from tidelog.pipeline.engines.store_place import EnginePlace
from tidelog.pipeline.jobs.job import OnProgress, counted_progress
from tidelog.pipeline.jobs.proof import Side
from tidelog.pipeline.work import run_on_workers
from tidelog.tier.object_store import ObjectInfo
from tidelog.tier.replacement_cleanup import CleanupPlan, plan_cleanup
from tidelog.tier.sweep import plan_sweep
from tidelog.tier.sweep_plan import SweepPlan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MODULUS = 1 << 64
_LOOKS = 4
_DEAD_UPLOAD = "an upload that nobody has touched for a day"
# By the fields of a sweep's plan: what is done about them, and why.
_SWEPT: dict[str, tuple[Kind, Action, str]] = {
    "below_start": ("below start", "remove", "below the start of the log"),
    "left_over": ("below start", "remove", "below the start of the log, and no descriptor names it"),
    "orphans": ("orphan", "remove", "no descriptor names it, and others have its records"),
    "unfinished": ("unfinished", "remove", _DEAD_UPLOAD),
    "uncovered": ("orphan", "keep", "never published, and the only copy of its records"),
    "lost": ("raw log", "LOST", "the object is gone"),
    "damaged": ("raw log", "DAMAGED", "the object has another size than its descriptor says"),
    "pending": ("orphan", "keep", "its owner may be about to publish it"),
    "newer": ("orphan", "keep", "of a later epoch than the owner's"),
    "foreign": ("foreign", "keep", "not a name of ours"),
}


class Look(NamedTuple):
    """What was seen at one time. `referenced` and `there` are the two sides of the proof."""

    manifest: Manifest
    references: References
    found: tuple[Garbage, ...]
    drop_below_lsn: int
    sweep: SweepPlan
    cleanup: CleanupPlan
    unfinished: tuple[ObjectInfo, ...]
    referenced: Side
    there: Side

    @property
    def wrong(self) -> frozenset[str]:
        """What is not as it should be: keys, and what could not be read."""
        return frozenset((*(one.key for one in self.found if one.is_wrong), *self.references.problems))


def look_at(
    spark: SparkSession,
    place: EnginePlace,
    opened: OpenedEngine,
    now_us: int,
    grace_seconds: float,
    on_progress: OnProgress,
) -> Look:
    """Looks at all of it. Old states that may go are taken as gone already: what they alone lead to goes with them.

    Whoever changes the store meanwhile may take away what was referenced a moment before: what is wrong is told when it
    is still wrong in another look.
    """

    def look_once() -> Look:
        return _look_once(spark, place, opened, now_us, grace_seconds, on_progress)

    look, before = _at_one_generation(opened, look_once), frozenset[str]()
    for _ in range(_LOOKS - 1):
        if look.wrong <= before:
            break
        before = look.wrong
        look = _at_one_generation(opened, look_once)
    return look


def _at_one_generation(opened: OpenedEngine, look_once: Callable[[], Look]) -> Look:
    """One look. Files of a compaction may go while it reads them, when another was published: then it begins anew."""
    for _ in range(_LOOKS - 1):
        generation = opened.newest_manifest().generation
        try:
            return look_once()
        except Exception:  # what a task of Spark meets is not raised as an error of ours
            if opened.newest_manifest().generation == generation:
                raise
    return look_once()


def _look_once(
    spark: SparkSession,
    place: EnginePlace,
    opened: OpenedEngine,
    now_us: int,
    grace_seconds: float,
    on_progress: OnProgress,
) -> Look:
    published = opened.newest_manifest()
    manifest, references = _settled(published, opened, now_us)
    listed = _listed(spark, place, opened, now_us, on_progress)
    is_whole = not references.problems and not missing_of(references, listed)
    data = _data_files(spark, place, opened, manifest) if is_whole else NO_DATA_FILES
    sweep = plan_sweep(opened.catalog, opened.objects, None, now_us)
    is_recent = references.is_recent(now_us, grace_seconds)
    seen = _Seen(opened, published, references, listed, data, sweep, is_recent=is_recent)
    raw = seen.raw_log(manifest)
    cleanup = plan_cleanup(opened.catalog, now_us, grace_seconds)
    found = [*raw, *_swept(sweep, cleanup), *seen.old_states(manifest), *seen.by_rule(), *seen.data_files()]
    referenced, there = seen.sides()
    return Look(
        manifest=published,
        references=references,
        found=tuple({one.key: one for one in reversed(found)}.values())[::-1],
        drop_below_lsn=seen.drop_below_lsn,
        sweep=sweep,
        cleanup=cleanup,
        unfinished=tuple(one for each in listed for one in each.unfinished),
        referenced=referenced,
        there=there,
    )


def _settled(manifest: Manifest, opened: OpenedEngine, now_us: int) -> tuple[Manifest, References]:
    """The manifest without old states, unless something cannot be read: then every state may be the last good one."""
    references = references_of(manifest, opened.objects, opened.keys)
    old = old_states(manifest, now_us)
    if references.problems or not old:
        return manifest, references
    without = leaving_of(manifest, old, now_us)
    return without, references_of(without, opened.objects, opened.keys)


def _listed(
    spark: SparkSession, place: EnginePlace, opened: OpenedEngine, now_us: int, on_progress: OnProgress
) -> list[Listed]:
    keys = opened.keys
    works = [
        ListWork(place=place, prefix=prefix, now_us=now_us, lists_objects=prefix != keys.data_prefix)
        for prefix in (keys.packs_prefix, keys.index_prefix, keys.checkpoints_prefix, keys.data_prefix)
    ]
    return list(counted_progress(run_on_workers(spark, list_prefix, works), "listing", len(works), on_progress))


def missing_of(references: References, listed: Sequence[Listed]) -> list[tuple[str, int, int | None]]:
    """What is referenced and not there, or of another size: key, bytes that it must have, and those that it has."""
    sizes = dict(one for each in listed for one in each.objects)
    named = sorted(references.sizes.items())
    return [(key, size, sizes.get(key)) for key, size in named if sizes.get(key) != size]


def _data_files(spark: SparkSession, place: EnginePlace, opened: OpenedEngine, manifest: Manifest) -> DataFiles:
    """Nothing is asked of Spark where no data file is there, and none is named."""
    root = None
    if manifest.compacted is not None:
        with suppress(DataError, NotFoundError):  # told of among the problems of the references
            root = read_compaction(opened.objects, opened.keys, manifest.compacted)
    has_files = next(iter(opened.objects.list(opened.keys.data_prefix)), None) is not None
    if not has_files and (root is None or not root.data_files):
        return NO_DATA_FILES
    return compare_data_files(spark, place, root)


class _Seen:
    """What was listed and what is referenced, put together."""

    def __init__(
        self,
        opened: OpenedEngine,
        published: Manifest,
        references: References,
        listed: Sequence[Listed],
        data: DataFiles,
        sweep: SweepPlan,
        *,
        is_recent: bool,
    ) -> None:
        self.drop_below_lsn = 0
        self._opened = opened
        self._published = published
        self._references = references
        self._sizes = dict(one for each in listed for one in each.objects)
        self._unfinished = [one for each in listed for one in each.unfinished]
        self._data = data
        self._sweep = sweep
        self._is_recent = is_recent
        self._wrong = [
            *(_wrong(*one, self._kind_of(one[0])) for one in missing_of(references, listed)),
            *(_wrong(*one, "data file") for one in data.missing),
        ]

    def _kind_of(self, key: str) -> Kind:
        """What an object is that must be there."""
        name = self._opened.keys.parse_compacted(key)
        if name is not None:
            return name.kind if name.kind == "pack" or name.kind == "root" else "index"
        return "state part" if self._opened.keys.parse_state_part(key) else "state"

    def raw_log(self, manifest: Manifest) -> list[Garbage]:
        """The log that nobody needs. While anything of the compacted data is not there, all of it may be needed."""
        if self._wrong or self._references.problems:
            return []
        doomed = whole_objects_below(self._opened.catalog, droppable_below_lsn(manifest))
        self.drop_below_lsn = doomed[-1].next_offset if doomed else 0
        why = f"compacted up to seq {self._references.compacted_seq}, and no state needs it"
        keys = self._opened.keys
        return [
            Garbage(kind="raw log", action="remove", key=keys.object(one.name), bytes=one.size, why=why)
            for one in doomed
        ]

    def old_states(self, manifest: Manifest) -> Iterator[Garbage]:
        kept = {state.key for state in manifest.checkpoints}
        for state in self._published.checkpoints:
            if state.key not in kept:
                yield Garbage(kind="state", action="remove", key=state.key, bytes=state.size, why=OLD_STATE)

    def by_rule(self) -> Iterator[Garbage]:
        """Packs, index files, states and their parts; what is wrong with those that are referenced; dead uploads."""
        yield from self._wrong
        for key, size in self._sizes.items():
            found = judged(key, size, self._references, self._opened.keys, is_recent=self._is_recent)
            if found is not None:
                yield found
        for upload in self._unfinished:
            yield Garbage(kind="unfinished", action="remove", key=upload.key, bytes=upload.size, why=_DEAD_UPLOAD)

    def data_files(self) -> Iterator[Garbage]:
        for key, size in self._data.unnamed:
            yield judged_data(key, size, self._references, self._opened.keys, is_recent=self._is_recent)

    def sides(self) -> tuple[Side, Side]:
        """All that is referenced, and all of that which is in the store."""
        named = list(self._references.sizes.items())
        there = [(key, size) for key, size in named if self._sizes.get(key) == size]
        raw = [(one.object_id, one.size) for one in self._opened.catalog.walk(self._sweep.start_offset)]
        bad = {one.object_id for one in (*self._sweep.lost, *self._sweep.damaged)}
        raw_there = [one for one in raw if one[0] not in bad]
        return (
            _side([*named, *raw], self._data.named, self._data.named_sum),
            _side([*there, *raw_there], self._data.there, self._data.there_sum),
        )


def _wrong(key: str, size: int, found: int | None, kind: Kind) -> Garbage:
    if found is None:
        return Garbage(kind=kind, action="LOST", key=key, bytes=size, why="it is referenced, and not there")
    why = f"it is referenced with {size} bytes, and has {found}"
    return Garbage(kind=kind, action="DAMAGED", key=key, bytes=found, why=why)


def _side(objects: Sequence[tuple[str, int]], others: int, others_sum: int) -> Side:
    total = others_sum + sum(crc32(f"{key} {size}".encode()) for key, size in objects)
    return Side(
        messages=len(objects) + others,
        first_offset=None,
        last_offset=None,
        checksum=f"objects:{total % _MODULUS:016x}",
        unit="objects",
    )


def _swept(sweep: SweepPlan, cleanup: CleanupPlan) -> Iterator[Garbage]:
    for old in cleanup.objects:
        why = f"{old.replaced_by} took its place"
        yield Garbage(kind="replaced", action="remove", key=old.key, bytes=old.size, why=why)
    for field, (kind, action, why) in _SWEPT.items():
        for found in getattr(sweep, field):
            key, size = (found, None) if isinstance(found, str) else (found.key, found.size)
            yield Garbage(kind=kind, action=action, key=key, bytes=size, why=why)
