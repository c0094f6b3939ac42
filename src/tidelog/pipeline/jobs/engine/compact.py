"""The job `compact` over an engine: turns its log up to the high-water mark into data that is indexed by key.

    rows of the last compaction (or a snapshot) + the log since then -> settled, retention -> counts of values -> plan
    -> units: blob files, data files -> version index, value index -> read back -> root -> the manifest, with a snapshot

Invariants
- Everything is published by one compare-and-swap of the manifest, which fails if another compaction was published since
  this one began. Until then no existing data is changed, and no reader sees what was written.
- The same engine at the same seq, with the same options, gives the same bytes under the same names.
- Published data was read back: its rows have the digest of the input rows.
- The version index is a snapshot too. It is published as one in the same step, if it is newer than the newest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tidelog.clock import Clock, SystemClock
from tidelog.engine.cold.manifest import (
    KeptFrom,
    Manifest,
    Pinning,
    StoredCheckpoint,
    StoredCompaction,
    move_history_start,
    publish_compaction,
    told_of_dropped_log,
)
from tidelog.engine.mvcc.applier import shipped_results
from tidelog.engine.mvcc.known_results import KnownResults
from tidelog.engine.sst.snapshot import write_parts_state
from tidelog.engine.sst.sorted_index import Compaction, encode_compaction, read_compaction
from tidelog.errors import ConflictError, DataError, NotFoundError
from tidelog.pipeline.address import EngineRoot, OpenedEngine
from tidelog.pipeline.flow import Flow, Rows
from tidelog.pipeline.jobs.engine.blobs import ValuePlan
from tidelog.pipeline.jobs.engine.compact_steps import (
    CompactEngineOptions,
    CompactEngineReport,
    Made,
    RowsAt,
    SourceOfRows,
    Steps,
    checked_options,
    large_bytes_of,
    pinning_for,
    report_of,
)
from tidelog.pipeline.jobs.engine.rows import (
    ROW_SCHEMA,
    Base,
    CompactedValues,
    Retained,
    Survey,
    created_at,
    look,
    position_of_lsn,
    read_back,
    require_equal,
    survey,
    write_checked,
)
from tidelog.pipeline.jobs.job import OnProgress, Progress, ignore_progress, logged
from tidelog.pipeline.location import EngineLocation
from tidelog.pipeline.spark_flow import spark_flow
from tidelog.store.keys import CheckpointId

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["CompactEngineJob", "CompactEngineOptions", "CompactEngineReport", "compact_engine"]

_FIRST_LSN = 1
_STEPS = ("rows", "counting values", "packing values", "reading back", "publishing")


@logged
def compact_engine(
    spark: SparkSession,
    root: EngineRoot,
    options: CompactEngineOptions | None = None,
    *,
    on_progress: OnProgress = ignore_progress,
    clock: Clock | None = None,
) -> CompactEngineReport:
    """Compacts an engine up to its high-water mark, beside its owner.

    Raises ConflictError if another compaction was published meanwhile: then nothing is lost, and nothing was changed.
    """
    with closing(spark_flow(spark)) as flow, root.open(read_only=False) as opened:
        return CompactEngineJob(flow, opened, root.place, clock or SystemClock(), options, on_progress).run()


class _Sorted(NamedTuple):
    """The rows that are to be written, where they are from, and what was to be seen in those that were read."""

    found: RowsAt
    rows: Rows
    read: Survey
    survey: Survey
    kept_from: KeptFrom | None

    @property
    def dropped(self) -> int:
        """How many rows retention left out."""
        return self.read.rows - self.survey.rows


class CompactEngineJob:
    """One run of it, with the store open for writing."""

    def __init__(
        self,
        flow: Flow,
        opened: OpenedEngine,
        place: EngineLocation,
        clock: Clock,
        options: CompactEngineOptions | None = None,
        on_progress: OnProgress = ignore_progress,
    ) -> None:
        self._flow = flow
        self._opened = opened
        self._place = place
        self._clock = clock
        self._options = checked_options(options or CompactEngineOptions())
        self._on_progress = on_progress

    def run(self) -> CompactEngineReport:
        """Compacts, unless nothing has come since the last time."""
        with told_of_dropped_log(self._opened.catalog):
            return self._run()

    def _run(self) -> CompactEngineReport:
        manifest = self._opened.newest_manifest()
        previous = self._previous(manifest)
        large_bytes = large_bytes_of(self._options, previous)
        manifest = self._moved(manifest)
        if previous is not None and self._is_done(manifest, previous):
            return report_of(self._opened.keys.name, previous, None, self._options)
        with (
            pinning_for("compact", self._opened, self._clock, pins=not self._options.is_dry_run) as pinning,
            self._told_of_others(manifest),
        ):
            self._tell(0)
            found = self._found(manifest, previous, pinning)
            return self._compact(manifest, previous, self._sorted(found, manifest, previous), large_bytes)

    # What it begins with

    def _previous(self, manifest: Manifest) -> Compaction | None:
        if manifest.compacted is None:
            return None
        return read_compaction(self._opened.objects, self._opened.keys, manifest.compacted)

    def _moved(self, manifest: Manifest) -> Manifest:
        """The start of history is published before anything is left out: no reader asks for what is not there."""
        seq = self._options.keep_from
        if seq is None or seq <= manifest.history_start_seq:
            return manifest
        if self._options.is_dry_run:
            return msgspec.structs.replace(manifest, history_start_seq=min(seq, manifest.high_water_mark))
        return move_history_start(self._opened.metadata, self._opened.keys, self._clock, seq)

    def _is_done(self, manifest: Manifest, previous: Compaction) -> bool:
        is_newest = (previous.seq, previous.lsn) == (manifest.high_water_mark, manifest.high_water_lsn + 1)
        return is_newest and (self._options.keep_from is None or self._is_left_out(manifest, previous))

    def _is_left_out(self, manifest: Manifest, previous: Compaction) -> bool:
        """Whether the compaction before has nothing that is to go now."""
        kept = previous.kept_from
        return (
            kept is not None and manifest.history_start_seq <= kept.seq and kept.versions <= self._options.keep_versions
        )

    def _found(self, manifest: Manifest, previous: Compaction | None, pinning: Pinning | None) -> RowsAt:
        source = SourceOfRows(self._flow, self._opened, self._place)
        if previous is None or self._has_no_log_behind(previous):
            return source.at(manifest, pinning)
        return source.behind(_base_of(manifest, previous), manifest, manifest.high_water_mark)

    def _has_no_log_behind(self, previous: Compaction) -> bool:
        """An owner may have dropped log behind a compaction that no value is in, since there are newer states."""
        return previous.lsn < self._opened.catalog.start_offset()

    def _sorted(self, found: RowsAt, manifest: Manifest, previous: Compaction | None) -> _Sorted:
        # A state may have versions that the compaction before has let go, and their values with them.
        let_go = None if previous is None or found.base is None or found.base.lsn == previous.lsn else previous
        start_lsn = _FIRST_LSN if previous is not None and let_go is None else self._opened.catalog.start_offset()
        rules = self._rules(manifest)
        kept_from = max([*rules, *_kept_by(previous, let_go)], key=lambda one: one.seq, default=None)
        if not rules and let_go is None and start_lsn <= _FIRST_LSN:
            seen = survey(found.rows, found.created, found.seq, self._options.rows_per_file)
            return _Sorted(found, found.rows, seen, seen, kept_from)
        read = look(found.rows, found.created, found.seq)
        rows = self._retained(found, manifest.history_start_seq, rules, start_lsn, let_go).kept()
        seen = survey(rows, found.created, found.seq, self._options.rows_per_file)
        return _Sorted(found, rows, read, seen, kept_from)

    def _rules(self, manifest: Manifest) -> list[KeptFrom]:
        """What goes by rule: that of the options, and that of the owner's own collection, whose records may come later
        than what is shipped."""
        rules: list[KeptFrom] = []
        if manifest.collected is not None:
            rules.append(manifest.collected)
        if self._options.keep_from is not None:
            rules.append(KeptFrom(seq=manifest.history_start_seq, versions=self._options.keep_versions))
        return rules

    def _retained(
        self, found: RowsAt, horizon: int, rules: Sequence[KeptFrom], start_lsn: int, let_go: Compaction | None
    ) -> Rows:
        """Without what the rules let go, and without versions that its owner's let go of with their log."""
        rows = found.rows
        for rule in rules:
            created = created_at(found.buckets, rule.seq)
            rows = rows.mapped(Retained(rule.seq, rule.versions, created), ROW_SCHEMA)
        if let_go is not None or start_lsn > _FIRST_LSN:
            created = created_at(found.buckets, horizon)
            packed = None if let_go is None else CompactedValues(self._place, let_go)
            rows = rows.mapped(Retained(horizon, 1, created, below_lsn=start_lsn, packed=packed), ROW_SCHEMA)
        return rows

    # What it makes

    def _compact(
        self, manifest: Manifest, previous: Compaction | None, given: _Sorted, large_bytes: int
    ) -> CompactEngineReport:
        self._tell(1)
        steps = Steps(self._flow, self._opened, self._place, self._options, previous, large_bytes)
        plan = steps.planned(given.rows, given.found)
        if self._options.is_dry_run:
            root = self._root(manifest, given, plan, large_bytes)
            made = Made(given.found, given.read, None, given.dropped, plan)
            return report_of(self._opened.keys.name, root, made, self._options)
        self._tell(2)
        with ThreadPoolExecutor(1, thread_name_prefix="tidelog-results") as pool:
            results = pool.submit(self._results, manifest, given.found)  # while the workers pack
            built = steps.built(given.rows, plan, manifest.generation + 1, given.survey.cuts)
        self._tell(3)
        root = msgspec.structs.replace(
            self._root(manifest, given, plan, large_bytes),
            blob_files=(*plan.kept, *built.blob_files),
            versions=built.versions,
            values=built.values,
        )
        came_out = read_back(self._flow, self._place, root.versions, given.found.created, root.seq)
        require_equal(given.survey, came_out, root.seq)
        require_equal(msgspec.structs.replace(given.read, rows=came_out.rows), came_out, root.seq)
        self._tell(4)
        is_first = self._publish(manifest, root, results.result())
        self._tell(5)
        made = Made(given.found, given.read, came_out, given.dropped, plan, is_first)
        return report_of(self._opened.keys.name, root, made, self._options)

    def _root(self, manifest: Manifest, given: _Sorted, plan: ValuePlan, large_bytes: int) -> Compaction:
        lsn = given.found.lsn
        position = position_of_lsn(self._opened.catalog, self._place, lsn)
        return Compaction(
            generation=manifest.generation + 1,
            seq=given.found.seq,
            lsn=lsn,
            position=manifest.shipped_position if position is None else position,
            history_start_seq=manifest.history_start_seq,
            large_bytes=large_bytes,
            data_files=plan.data_files,
            data_bytes=plan.data_bytes,
            kept_from=given.kept_from,
        )

    def _publish(self, manifest: Manifest, root: Compaction, results: KnownResults | None) -> bool:
        """Whether nobody else has published the very same meanwhile."""
        opened, encoded = self._opened, encode_compaction(root)
        compacted = encoded.stored(opened.keys, root, self._clock.now_us())
        write_checked(opened.objects, compacted.key, encoded.data)
        state = None if results is None else self._state(manifest, root, results)
        others = opened.newest_manifest().compacted
        publish_compaction(
            opened.metadata,
            opened.keys,
            self._clock,
            base_generation=manifest.generation,
            compacted=compacted,
            state=state,
        )
        return others is None or others.key != compacted.key

    def _results(self, manifest: Manifest, found: RowsAt) -> KnownResults | None:
        """What the snapshot tells of the last entries; None if there is a snapshot that is as new."""
        newest = manifest.checkpoints[-1] if manifest.checkpoints else None
        if newest is not None and (newest.seq, newest.lsn) >= (found.seq, found.lsn):
            return None
        opened, fetchers = self._opened, self._place.opened().fetchers
        catalog = found.catalog(opened, self._place)
        return shipped_results(catalog, opened.objects, fetchers, manifest, found.seq, found.lsn)

    def _state(self, manifest: Manifest, root: Compaction, results: KnownResults) -> StoredCheckpoint:
        opened = self._opened
        return write_parts_state(
            opened.objects,
            opened.keys,
            CheckpointId(root.seq, root.lsn, manifest.epoch),
            root.versions,
            created_us=self._clock.now_us(),
            history_start_seq=root.history_start_seq,
            results=results,
        )

    # Others

    @contextmanager
    def _told_of_others(self, manifest: Manifest) -> Iterator[None]:
        """Files of the compaction before may be gone when another was published: that is what is to be told then."""
        try:
            yield
        except (DataError, NotFoundError) as error:
            now = self._opened.newest_manifest()
            if now.generation == manifest.generation:
                raise
            raise ConflictError(
                f"another compaction, generation {now.generation}, was published while this one was at work",
                hint="Nothing was lost; run it again to compact what has come since then",
            ) from error

    def _tell(self, done: int) -> None:
        step = _STEPS[min(done, len(_STEPS) - 1)]
        self._on_progress(Progress(step, done, len(_STEPS)))


def _kept_by(previous: Compaction | None, let_go: Compaction | None) -> list[KeptFrom]:
    """What rows of the compaction before were left out, if this one is built on them."""
    return [] if previous is None or let_go is not None or previous.kept_from is None else [previous.kept_from]


def _base_of(manifest: Manifest, previous: Compaction) -> Base:
    """The version index of the compaction before: what retention removed from it does not come back."""
    compacted: StoredCompaction | None = manifest.compacted
    assert compacted is not None
    return Base(
        key=compacted.key,
        seq=previous.seq,
        lsn=previous.lsn,
        parts=previous.versions,
    )
