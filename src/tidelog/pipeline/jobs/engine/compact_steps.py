"""The distributed steps of a compaction: counts values, builds units, writes the indexes; also its options, source and
report.

Invariants
- Every step consists of tasks that may be repeated. Their output is named by its content, or is a value's own file.
- Values are read once: the places that units give them go straight into the files of the indexes.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tidelog.clock import Clock
from tidelog.cold.catalog import Catalog
from tidelog.cold.planned_catalog import PlannedCatalog
from tidelog.engine.cold.manifest import Manifest, Pinning
from tidelog.engine.mvcc.versions import Buckets
from tidelog.engine.sst.sorted_index import BlobFileInfo, Compaction
from tidelog.engine.sst.sstable import RowPart
from tidelog.errors import DataError, InputError, InternalError, NotFoundError, TidelogError
from tidelog.pipeline.address import OpenedEngine
from tidelog.pipeline.flow import Flow, Rows
from tidelog.pipeline.jobs.engine.blobs import (
    DEFAULT_BLOB_FILE_BYTES,
    DEFAULT_LARGE_BYTES,
    ValuePlan,
    WindowCount,
    plan_values,
    window_bytes_for,
)
from tidelog.pipeline.jobs.engine.rows import (
    FILED_SCHEMA,
    ROWS_PER_FILE,
    TOLD_SCHEMA,
    Base,
    Created,
    FileNames,
    FirstLsn,
    PartWork,
    Survey,
    Written,
    base_of,
    buckets_in,
    created_at,
    first_lsn,
    parts_of,
    settled_rows,
    state_proof,
    told_by,
    write_files,
)
from tidelog.pipeline.jobs.engine.values import (
    VALUE_SCHEMA,
    Builder,
    BuildSettings,
    BuiltBlobFile,
    Counting,
    Grouping,
    OldPlaces,
    Pointing,
    ValueCodec,
    bodiless,
)
from tidelog.pipeline.jobs.job import JobReport
from tidelog.pipeline.location import EngineLocation
from tidelog.pipeline.source.entry_batches import LogPart, objects_of, plan_log

if TYPE_CHECKING:
    from tidelog.pipeline.address import OpenedEngine
    from tidelog.pipeline.flow import Flow, Rows


# The options of the job, checked.


class CompactEngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is compacted.

    large_bytes     values of so many stored bytes or more are files (1 MiB); can be given the first time only
    blob_file_bytes      how many bytes of values are in a blob file, about
    codec           how values are stored in blob files; None: as the engine stored them
    keep_from       the history begins here from now on; what only older seqs would show is left out
    keep_versions   so many versions of each object stay that are not above `keep_from`
    """

    large_bytes: int | None = None
    blob_file_bytes: int = DEFAULT_BLOB_FILE_BYTES
    codec: ValueCodec | None = None
    keep_from: int | None = None
    keep_versions: int = 1
    rows_per_file: int = ROWS_PER_FILE
    is_dry_run: bool = False


def checked_options(options: CompactEngineOptions) -> CompactEngineOptions:
    """The same, or InputError."""
    for name in ("blob_file_bytes", "keep_versions", "rows_per_file"):
        if getattr(options, name) < 1:
            raise InputError(f"{name} is at least 1, not {getattr(options, name)}")
    if options.keep_versions > 1 and options.keep_from is None:
        raise InputError(
            "keep_versions says how many versions stay below the start of history, and none is given",
            hint="Give keep_from too",
        )
    if options.codec not in (None, "none", "zstd"):
        raise InputError(f"codec must be none or zstd, not {options.codec}")
    return options


def large_bytes_of(options: CompactEngineOptions, previous: Compaction | None) -> int:
    """From how many bytes on a value is a file. The first compaction decides it, for those that follow."""
    if previous is None:
        large_bytes = DEFAULT_LARGE_BYTES if options.large_bytes is None else options.large_bytes
        if large_bytes < 1:
            raise InputError(f"large_bytes is at least 1, not {large_bytes}")
        return large_bytes
    if options.large_bytes not in (None, previous.large_bytes):
        raise InputError(
            f"values of {previous.large_bytes} bytes or more are files in this engine's store: the first compaction "
            f"said so, and it stays",
            hint="Leave large_bytes out",
        )
    return previous.large_bytes


_VALUE_ORDER = ("unit", "position", "kind", "key")


class Steps:
    """What workers do for one compaction; `previous` is the one that it is built on."""

    def __init__(
        self,
        flow: Flow,
        opened: OpenedEngine,
        place: EngineLocation,
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

    def planned(self, rows: Rows, found: RowsAt) -> ValuePlan:
        """Counts the values that rows point to, and plans where they go."""
        end_lsn, tasks = found.lsn, found.tasks
        window_bytes = window_bytes_for(self._options.blob_file_bytes)
        values = self._values(rows, Grouping(window_bytes)).grouped("unit", tasks, _VALUE_ORDER)
        counting = Counting(self._opened.keys, window_bytes, self._large_bytes, self._first_new_lsn)
        counts = sorted(told_by(values.mapped(counting, TOLD_SCHEMA), WindowCount), key=lambda one: one.window)
        first_lsn = min((one.first_new_lsn for one in counts), default=end_lsn)
        log = list(found.catalog(self._opened, self._place).between(first_lsn, end_lsn)) if first_lsn < end_lsn else []
        return plan_values(
            counts,
            self._previous,
            log,
            blob_file_bytes=self._options.blob_file_bytes,
            rows_per_file=self._options.rows_per_file,
        )

    def built(self, rows: Rows, plan: ValuePlan, generation: int, version_cuts: tuple[bytes, ...]) -> Built:
        """Writes blob files and data files, and from their places both indexes."""
        version_files, value_files = len(version_cuts) + 1, len(plan.file_cuts) + 1
        told_file = version_files + value_files
        filed = rows.mapped(partial(bodiless, version_cuts), FILED_SCHEMA)
        if plan.values:
            settings = BuildSettings(
                place=self._place,
                generation=generation,
                large_bytes=self._large_bytes,
                first_new_lsn=self._first_new_lsn,
                codec=self._options.codec,
                old_blob_files=[]
                if self._previous is None
                else [blob_file.key for blob_file in self._previous.blob_files],
                version_cuts=version_cuts,
                first_value_file=version_files,
                told_file=told_file,
            )
            values = self._values(rows, Grouping(plan.window_bytes, plan.unit_cuts))
            units = values.grouped("unit", len(plan.units), _VALUE_ORDER).mapped(Builder(settings, plan), FILED_SCHEMA)
            filed = filed.joined_by(units)
        names = [FileNames(kind=kind, generation=generation) for kind in ("versions", "values")]
        written = write_files(filed, self._place, (version_files, names[0]), (value_files, names[1]))
        values_written = parts_of(written, version_files, told_file)
        if sum(part.rows for part in values_written) != plan.values:
            raise InternalError(f"{plan.values} values were counted, and the index has another number of them")
        return Built(_blob_files(written, plan), tuple(parts_of(written, 0, version_files)), tuple(values_written))

    def _values(self, rows: Rows, grouping: Grouping) -> Rows:
        pointing = rows.mapped(Pointing(grouping), VALUE_SCHEMA)
        if self._previous is None or not self._previous.values:
            return pointing
        works = [PartWork(place=self._place, part=part) for part in self._previous.values]
        return pointing.joined_by(self._flow.source(OldPlaces(grouping), works, VALUE_SCHEMA))


class Built(NamedTuple):
    """What came of it: new blob files by their numbers, and the files of both indexes."""

    blob_files: tuple[BlobFileInfo, ...]
    versions: tuple[RowPart, ...]
    values: tuple[RowPart, ...]


def _blob_files(written: Sequence[Written], plan: ValuePlan) -> tuple[BlobFileInfo, ...]:
    told = (msgspec.msgpack.decode(one.told, type=BuiltBlobFile) for one in written if one.part is None)
    blob_files = sorted(told, key=lambda one: one.number)
    planned = [unit.blob_file for unit in plan.units if unit.blob_file is not None]
    if [blob_file.number for blob_file in blob_files] != planned:
        raise InternalError(f"blob files {planned} were planned, and others were built")
    return tuple(blob_file.info for blob_file in blob_files)


# All rows of an engine at a seq, from its store alone: the newest readable snapshot, and the log after it.
#
# Invariants
# - Snapshots are pinned in the manifest while they are read: the owner of the engine does not delete them.
# - If a snapshot cannot be read, the one before it is used, and this is reported. If there is none, the log is read
#   from its beginning, if it still has one.
# - Only the manifest determines where the log ends.


_PIN_SECONDS = 24 * 3600
# What a row takes on its way, about: for the number of tasks.
_ROW_BYTES = 150


class RowsAt(NamedTuple):
    """The rows of an engine at a seq, which `lsn` is the first record behind; and where they were found.

    They are in so many `tasks`.
    """

    rows: Rows
    buckets: Buckets
    seq: int
    lsn: int
    base: Base | None
    log: Sequence[LogPart]
    tasks: int
    passed_over: tuple[str, ...] = ()

    @property
    def created(self) -> Created:
        """The buckets that are there at the seq."""
        return created_at(self.buckets, self.seq)

    def catalog(self, opened: OpenedEngine, place: EngineLocation) -> Catalog:
        """Of the log that was read: what is known of its objects is not asked for again."""
        return PlannedCatalog(objects_of(self.log), opened.keys, place.catalog) if self.log else opened.catalog


class SourceOfRows:
    """Finds the rows of one engine."""

    def __init__(self, flow: Flow, opened: OpenedEngine, place: EngineLocation) -> None:
        self._flow = flow
        self._opened = opened
        self._place = place

    def at(self, manifest: Manifest, pinning: Pinning | None, seq: int | None = None) -> RowsAt:
        """The rows at a seq, at the high-water mark by default."""
        wanted = _checked_seq(manifest, seq)
        passed_over: list[str] = []
        for listed in reversed(manifest.checkpoints):
            if listed.seq > wanted or (pinning is not None and not pinning.pin(listed.key)):
                continue
            try:
                return self.behind(base_of(self._opened.objects, listed), manifest, wanted, tuple(passed_over))
            except (DataError, NotFoundError) as error:
                if not _is_about(error, listed.key):
                    raise
                passed_over.append(f"{listed.key} was passed over: {error}")
        return self.behind(None, manifest, wanted, tuple(passed_over))

    def behind(self, base: Base | None, manifest: Manifest, seq: int, passed_over: tuple[str, ...] = ()) -> RowsAt:
        """The rows at a seq, from a base on."""
        start_lsn = 1 if base is None else base.lsn
        self._require_log_from(start_lsn, passed_over)
        lsn = self._first_lsn_behind(manifest, start_lsn, seq)
        log = plan_log(self._opened.catalog, self._place, manifest, start_lsn, lsn, last_seq=seq)
        base_rows = None if base is None else base.changes(self._flow, self._place)
        size = sum(one.raw_size for one in objects_of(log))
        tasks = self._flow.tasks_for(size + (0 if base is None else base.rows * _ROW_BYTES))
        rows = settled_rows(self._flow, base_rows, log, tasks)
        return RowsAt(rows, buckets_in(rows), seq, lsn, base, log, tasks, passed_over)

    def _require_log_from(self, lsn: int, passed_over: tuple[str, ...]) -> None:
        start = self._opened.catalog.start_offset()
        if lsn < start:
            raise DataError(
                f"no state in the store can be read, and its log begins at LSN {start}",
                hint="Put a good copy of a state in its place: " + ("; ".join(passed_over) or "there is none"),
            )

    def _first_lsn_behind(self, manifest: Manifest, start_lsn: int, seq: int) -> int:
        """The record at which the log continues after the state of a seq."""
        end_lsn = max(start_lsn, manifest.high_water_lsn + 1)
        if seq == manifest.high_water_mark:
            return end_lsn
        parts = plan_log(self._opened.catalog, self._place, manifest, start_lsn, first_seq=seq + 1)
        found = told_by(self._flow.source(first_lsn, parts, TOLD_SCHEMA), FirstLsn) if parts else []
        return min((one.lsn for one in found), default=end_lsn)


def _checked_seq(manifest: Manifest, seq: int | None) -> int:
    if not manifest.high_water_mark:
        raise InputError("nothing of the engine is shipped yet", hint="Raise its low-water mark, and ship")
    if seq is None:
        return manifest.high_water_mark
    if not manifest.history_start_seq <= seq <= manifest.high_water_mark or seq < 1:
        raise InputError(
            f"seq {seq} cannot be had: the store has seqs {max(1, manifest.history_start_seq)} to "
            f"{manifest.high_water_mark}",
            hint="Ask for one of those; later ones are there when the engine has shipped them",
        )
    return seq


def _is_about(error: TidelogError, key: str) -> bool:
    """Whether it is the state that cannot be read, or one of the files that it consists of."""
    folder = key.rpartition("/")[0].rpartition("/")[0]
    return any(f"{folder}/{part}/" in f"{error} {error.path}" for part in ("checkpoints", "index"))


@contextlib.contextmanager
def pinning_for(job: str, opened: OpenedEngine, clock: Clock, *, pins: bool = True) -> Iterator[Pinning | None]:
    """The snapshots that a job pins while it reads; all are released after it. None for a read-only job."""
    if not pins:
        yield None
        return
    name = f"{job}-{secrets.token_hex(8)}"
    pinning = Pinning(opened.metadata, opened.keys, clock, name, _PIN_SECONDS)
    try:
        yield pinning
    finally:
        with contextlib.suppress(TidelogError):
            pinning.release()


# The report of a compaction: its input, its output, and the proof that both show the same.


_SAME = "another compaction was at work and was faster: it has published the very same files, so nothing was changed"


class CompactEngineReport(JobReport, frozen=True, kw_only=True):
    """What became of an engine; of a dry run, what would.

    `log_objects` and `log_bytes` are what was read of the log, `objects` and `bytes` all that the compaction consists
    of, data files included; of a dry run, without new blob files and indexes. `is_new` is False where
    nothing had come since the last one, or another run was faster.
    """

    engine: str
    generation: int
    seq: int
    lsn: int
    is_new: bool = True
    is_dry_run: bool = False
    versions: int = 0
    dropped_versions: int = 0
    values: int = 0
    new_blob_values: int = 0
    new_data_files: int = 0
    kept_blob_files: int = 0
    rewritten_blob_files: int = 0
    blob_files: int = 0
    data_files: int = 0
    objects: int = 0
    bytes: int = 0
    log_objects: int = 0
    log_bytes: int = 0
    base: str | None = None
    digest: str | None = None


class Made(NamedTuple):
    """What a run has done: rows it read, what is to be seen in them, and in what it wrote (None: it wrote nothing).

    `is_first` is False when another run has published the same while this one was at work.
    """

    found: RowsAt
    went_in: Survey
    came_out: Survey | None
    dropped: int
    plan: ValuePlan
    is_first: bool = True


def report_of(engine: str, root: Compaction, made: Made | None, options: CompactEngineOptions) -> CompactEngineReport:
    """The report of a run; `made` is None where there was nothing to do."""
    sizes = [blob_file.size for blob_file in root.blob_files] + [part.size for part in (*root.versions, *root.values)]
    report = CompactEngineReport(
        job="compact",
        engine=engine,
        generation=root.generation,
        seq=root.seq,
        lsn=root.lsn,
        is_dry_run=options.is_dry_run,
        blob_files=len(root.blob_files),
        data_files=root.data_files,
        objects=len(sizes) + root.data_files,
        bytes=sum(sizes) + root.data_bytes,
    )
    return _of_nothing(report, root) if made is None else _with_figures(report, made)


def _of_nothing(report: CompactEngineReport, root: Compaction) -> CompactEngineReport:
    return msgspec.structs.replace(
        report,
        is_new=False,
        versions=sum(part.rows for part in root.versions),
        notes=(f"nothing has come since generation {root.generation}, which goes up to seq {root.seq}",),
    )


def _with_figures(report: CompactEngineReport, made: Made) -> CompactEngineReport:
    plan, log, base = made.plan, made.found.log, made.found.base
    proof = None if made.came_out is None else state_proof(report.engine, report.seq, made.went_in, made.came_out)
    return msgspec.structs.replace(
        report,
        is_new=made.is_first,
        versions=made.went_in.rows - made.dropped,
        dropped_versions=made.dropped,
        values=plan.values,
        new_blob_values=plan.new_blob_values,
        new_data_files=plan.new_files,
        kept_blob_files=len(plan.kept),
        rewritten_blob_files=plan.rewritten,
        log_objects=len(objects_of(log)),
        log_bytes=sum(one.size for one in objects_of(log)),
        base=None if base is None else base.key,
        digest=made.went_in.digest,
        reconciliations=() if proof is None else (proof,),
        notes=made.found.passed_over if made.is_first else (*made.found.passed_over, _SAME),
    )
