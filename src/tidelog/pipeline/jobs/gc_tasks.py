"""Executor tasks of `gc`: collect the garbage of one topic by its rules; list and read the names of data files.

Invariants
- They hold no claim. What only an owner may remove stays, and is shown as the owner's to do.
- The collector checks every object again right before it is removed (`cold/gc.py`): running a task twice, or beside
  another one, removes nothing that is still needed.
- Objects that were published and present before are published and present afterwards; both are reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tidelog.cold.catalog import Catalog
from tidelog.cold.gc import Collector, Plan, Report
from tidelog.engine.sst.blob_file import FilePointer, decode_value_pointer
from tidelog.engine.sst.sstable import RowPart, SSTable
from tidelog.errors import TidelogError
from tidelog.log.frame import crc32
from tidelog.pipeline.jobs.engine.columns import file_rows, pointing_elsewhere
from tidelog.pipeline.jobs.job import Totals
from tidelog.pipeline.location import EngineLocation, TopicLocation
from tidelog.pipeline.tasks import as_batches
from tidelog.store.keys import MAX_NUMBER
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.metadata.open import open_metadata_store
from tidelog.store.object_store import ObjectStore

if TYPE_CHECKING:
    import pyarrow as pa

_KEPT_PLACES = 16
_Run = tuple[int, int]


# Topics


class TopicWork(msgspec.Struct, frozen=True, kw_only=True):
    """A topic to be looked at; with a plan, one to be collected. All topics are looked at by the driver's clock."""

    place: TopicLocation
    topic: str
    now_us: int
    grace_seconds: float
    plan: Plan | None = None


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """The plan, what was removed by it, and what was published and there before and after; or why that is unknown."""

    subject: str
    plan: Plan | None = None
    report: Report = Report()
    before: Totals | None = None
    after: Totals | None = None
    problem: str | None = None


def collect_topic(work: TopicWork) -> Collected:
    """Makes the plan of one topic, which changes nothing, or applies it. An error leaves the rest for the next time."""
    try:
        objects = work.place.objects
        catalog = Catalog(_metadata(work.place), work.place.keys(work.topic))
        collector = Collector(catalog, objects, work.now_us, grace_seconds=work.grace_seconds)
        if work.plan is None:
            plan, covered = collector.plan(), _covered(catalog, objects)
            return Collected(subject=work.topic, plan=plan, before=_totals(covered))
        return _applied(collector, work.plan)
    except TidelogError as error:
        return Collected(subject=work.topic, problem=str(error))


def _applied(collector: Collector, plan: Plan) -> Collected:
    catalog, objects = collector.catalog, collector.objects
    before = _covered(catalog, objects)
    report = collector.apply(plan)
    after = _covered(catalog, objects)
    # What an owner ships or lets go of meanwhile is not ours to answer for.
    first = catalog.start_offset()
    end = max((run[1] for run in before), default=first)
    return Collected(
        subject=plan.subject,
        plan=plan,
        report=report,
        before=_totals(_clipped(before, first, end)),
        after=_totals(_clipped(after, first, end)),
    )


def _covered(catalog: Catalog, objects: ObjectStore) -> list[_Run]:
    """The offsets that are in a published object of the right size, as runs (start, end exclusive)."""
    sizes = {info.key: info.size for info in objects.list(catalog.keys.objects_prefix)}
    runs: list[_Run] = []
    for one in catalog.between(catalog.start_offset(), MAX_NUMBER):
        if sizes.get(catalog.keys.object(one.name)) != one.size:
            continue
        if runs and runs[-1][1] >= one.start_offset:
            runs[-1] = runs[-1][0], max(runs[-1][1], one.next_offset)
        else:
            runs.append((one.start_offset, one.next_offset))
    return runs


def _clipped(runs: Iterable[_Run], first: int, end: int) -> list[_Run]:
    clipped = ((max(run[0], first), min(run[1], end)) for run in runs)
    return [run for run in clipped if run[0] < run[1]]


def _totals(runs: list[_Run]) -> Totals:
    return Totals(
        messages=sum(end - start for start, end in runs),
        first_offset=runs[0][0] if runs else None,
        last_offset=runs[-1][1] - 1 if runs else None,
        checksum=f"offsets:{crc32(msgspec.json.encode(runs)):08x}",
    )


@lru_cache(_KEPT_PLACES)
def _metadata(place: TopicLocation) -> MetadataStore:
    """For writing; opened in the process that works, and kept for its next item."""
    return open_metadata_store(place.metadata_url, place.objects, settings=place.metadata_settings)


# Data files of an engine

NAMES = "key string, size bigint"


class NameRange(NamedTuple):
    """Keys after one and up to another (inclusive); None for no bound."""

    start_after: str | None
    last: str | None


def list_names(place: EngineLocation, names: NameRange) -> Iterator[pa.RecordBatch]:
    """The data files in a range, with their sizes."""
    listed = place.opened().objects.list(place.keys.data_prefix, start_after=names.start_after)
    inside = takewhile(lambda info: names.last is None or info.key <= names.last, listed)
    return as_batches(((info.key, info.size) for info in inside), NAMES)


def read_names(place: EngineLocation, part: RowPart) -> Iterator[pa.RecordBatch]:
    """The data files that a file of the value index names, with their sizes."""
    for rows in file_rows(SSTable(place.opened().objects, part, kind="values")):
        others = rows.values.filter(pointing_elsewhere(rows.values)).to_pylist()
        named = (one for one in map(decode_value_pointer, others) if isinstance(one, FilePointer))
        yield from as_batches(((place.keys.data_prefix + one.name, one.stored_bytes) for one in named), NAMES)
