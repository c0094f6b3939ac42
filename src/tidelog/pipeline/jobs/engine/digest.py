"""The job `digest`: computes the digest of an engine's state at a seq in Spark, from its store.

Invariants
- It equals `engine.digest(seq)` of every node that has the same log. Nothing is changed, and no node is asked.
- The newest readable source is used, and the log after it only if the seq is after it. With the log alone (`from_log`)
  the oldest source is used: none at all while the log begins with LSN 1.
- If a source turns out to be damaged, the one before it is used, and this is noted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec.structs import asdict

from tidelog.cold.catalog import Descriptor
from tidelog.engine.sst.snapshot import CompactionState, StoredState, named_states
from tidelog.engine.sst.sorted_index import Compaction
from tidelog.engine.sst.sstable import RowPart
from tidelog.errors import DataError, InputError, NotFoundError
from tidelog.pipeline.address import OpenedEngine
from tidelog.pipeline.jobs.engine.checked_log import CheckedPart
from tidelog.pipeline.jobs.engine.digest_tasks import (
    BASE,
    ComputedState,
    PartRows,
    RowItem,
    Unreadable,
    compute_state,
)
from tidelog.pipeline.jobs.engine.rows import digest_totals
from tidelog.pipeline.jobs.job import JobReport, OnProgress, Progress, Reconciliation, ignore_progress, logged
from tidelog.pipeline.location import EngineLocation
from tidelog.pipeline.source.entry_batches import PART_BYTES, cut_log, log_part

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidelog.engine.cold.manifest import Manifest
    from tidelog.pipeline.address import EngineRoot, OpenedEngine


# The sources from which the state of an engine can be computed: snapshots, the version index of the compaction, and the
# log.
#
#     log from LSN 1 (where it is still there) -> oldest source -> ... -> newest source -> log up to the high-water mark
#
# Invariants
# - A source is the state at its LSN: with the records from there on it leads to every later one. Sources are ordered by
#   LSN, and the log between two neighbours is read once.
# - Planning trusts the manifest and the catalog; other checks find out whether they are right. A source that cannot be
#   read is reported as damaged and left out.


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Rows that are the state at an LSN: a snapshot, or the index of the compaction, or nothing at LSN 1."""

    key: str
    seq: int = 0
    lsn: int = 1
    size: int = 0
    history_start_seq: int = 0
    parts: tuple[RowPart, ...] = ()

    def items(self, place: EngineLocation, source: int = BASE) -> list[RowItem]:
        """What workers read of it."""
        return [PartRows(place=place, part=part, source=source) for part in self.parts]


NOTHING = Source(key="the empty engine")
"""What there was before the first record."""


class Sources(NamedTuple):
    """Everything that a state can be computed from, oldest first; and what should be among it and cannot be read."""

    found: tuple[Source, ...]
    unreadable: tuple[Unreadable, ...]
    compaction: Compaction | None


def sources_of(opened: OpenedEngine) -> Sources:
    """The sources that the manifest names; the empty engine is the first while the log begins with LSN 1."""
    found, unreadable = [NOTHING] if opened.catalog.start_offset() <= 1 else [], list[Unreadable]()
    compaction: Compaction | None = None
    for named in named_states(opened.objects, opened.keys, opened.manifest):
        try:
            state = named.open()
        except (DataError, NotFoundError) as error:
            place = named.key if error.byte is None else f"{named.key}, byte {error.byte}"
            unreadable.append(Unreadable(place, error.reason))
        else:
            found.append(_source(state))
            compaction = state.root if isinstance(state, CompactionState) else compaction
    return Sources(tuple(found), tuple(unreadable), compaction)


def _source(state: StoredState) -> Source:
    return Source(
        key=state.key,
        seq=state.footer.seq,
        lsn=state.footer.lsn,
        size=state.stored_bytes,
        history_start_seq=state.footer.history_start_seq,
        parts=state.parts(),
    )


class LogPlan(NamedTuple):
    """What workers read of a range of the log, and how many bytes that is."""

    items: list[RowItem]
    size: int


def plan_log(
    opened: OpenedEngine, place: EngineLocation, first_lsn: int, stop_lsn: int, *, checks: bool = False
) -> LogPlan:
    """The log from an LSN up to another (exclusive), in tasks of some objects each. Of a hole its task will say so.

    With `checks` tasks verify objects while they read them.
    """
    descriptors = _descriptors(opened, first_lsn, stop_lsn)
    parts = [
        log_part(place, opened.manifest, first, stop, descriptors=group)
        for first, stop, group in cut_log(descriptors, first_lsn, stop_lsn, PART_BYTES)
    ]
    mark, size = opened.manifest.high_water_lsn, sum(one.raw_size for one in descriptors)
    return LogPlan([CheckedPart(**asdict(one), high_water_lsn=mark) if checks else one for one in parts], size)


def _descriptors(opened: OpenedEngine, first_lsn: int, stop_lsn: int) -> list[Descriptor]:
    """None where one of them cannot be understood: the task that reads the range tells of that."""
    try:
        return list(opened.catalog.between(first_lsn, stop_lsn)) if first_lsn < stop_lsn else []
    except DataError:
        return []


class DigestReport(JobReport, frozen=True, kw_only=True):
    """The digest of the state at a seq. `things` are its buckets and objects, `rows` all versions that were read."""

    engine: str
    seq: int
    digest: str
    things: int
    rows: int
    source: str
    log_bytes: int


@logged
def digest_engine(
    spark: SparkSession,
    root: EngineRoot,
    seq: int | None = None,
    *,
    from_log: bool = False,
    on_progress: OnProgress = ignore_progress,
) -> DigestReport:
    """The digest at a seq, of the newest state in the store by default."""
    with root.open() as opened:
        at = checked_seq(opened.manifest, seq)
        job = _DigestJob(spark, root, opened, at)
        on_progress(Progress("computing the state", 0, 1))
        source, plan, state = job.run(from_log=from_log)
        on_progress(Progress("computing the state", 1, 1))
    return DigestReport(
        job="digest",
        engine=root.name,
        seq=at,
        digest=state.digest,
        things=state.things,
        rows=state.rows,
        source=source.key,
        log_bytes=plan.size,
        reconciliations=(
            Reconciliation(
                subject=f"engine {root.name} at seq {at}", went_in=digest_totals(state.things, state.digest)
            ),
        ),
        notes=tuple(f"{one.place}: {one.reason}; it was passed over" for one in job.damage),
    )


def checked_seq(manifest: Manifest, seq: int | None) -> int:
    """The seq that is meant; an error that says which can be had, where it is none of them."""
    at = manifest.high_water_mark if seq is None else seq
    if at > manifest.high_water_mark:
        raise InputError(
            f"seq {at} is not in the store, which has the log up to seq {manifest.high_water_mark}",
            hint="Ship first, or ask for an earlier seq",
        )
    if at < manifest.history_start_seq:
        raise NotFoundError(f"states are kept from seq {manifest.history_start_seq} on", hint="Ask for a later seq")
    return at


class _DigestJob:
    """One digest: sources from the best to the worst, until one can be read."""

    def __init__(self, spark: SparkSession, root: EngineRoot, opened: OpenedEngine, seq: int) -> None:
        self._spark = spark
        self._place = root.place
        self._opened = opened
        self._seq = seq
        self.damage: list[Unreadable] = []

    def run(self, *, from_log: bool) -> tuple[Source, LogPlan, ComputedState]:
        for source in self._candidates(from_log):
            plan = self._plan(source, from_log)
            items = [*source.items(self._place), *plan.items]
            size = source.size + plan.size
            state = compute_state(self._spark, items, size, seq=self._seq, horizon_seq=0)
            if not state.damage:
                return source, plan, state
            self.damage += state.damage
        first = self.damage[0] if self.damage else None
        raise DataError(
            "no snapshot in the store can be read, and its log does not begin with LSN 1"
            if first is None
            else f"the state cannot be computed: {first.place}: {first.reason}",
            operation="digest",
            hint="`tidelog pipeline verify --engine` lists all problems; a replica may have good copies",
        )

    def _candidates(self, from_log: bool) -> Iterator[Source]:
        sources = sources_of(self._opened)
        self.damage += sources.unreadable
        usable = [one for one in sources.found if one.history_start_seq <= self._seq]
        yield from usable[:1] if from_log else reversed(usable)

    def _plan(self, source: Source, from_log: bool) -> LogPlan:
        """Versions up to the seq are all in a source that is not before it."""
        if self._seq <= source.seq and not from_log:
            return LogPlan([], 0)
        return plan_log(self._opened, self._place, source.lsn, self._opened.manifest.high_water_lsn + 1)
