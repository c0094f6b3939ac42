"""What a worker does for `gc`: finds what is left over of one topic, or removes what a plan says of it.

Invariants
- It holds no claim. What only an owner may do stays, and is shown as the owner's to do.
- Each thing is looked at again right before it is removed (`tier/sweep.py`, `tier/replacement_cleanup.py`): running it
  twice, or beside another one, removes nothing that is still needed.
- What was published and there before is published and there afterwards; both are told, as the proof.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import msgspec

from tidelog.errors import TidelogError
from tidelog.log.frame import crc32
from tidelog.pipeline.jobs.gc_plan import TopicGarbage
from tidelog.pipeline.jobs.proof import Side
from tidelog.pipeline.part import ColdPlace
from tidelog.tier.catalog import Catalog
from tidelog.tier.keys import TopicKeys
from tidelog.tier.metadata.open import open_metadata_store
from tidelog.tier.metadata.store import MetadataStore
from tidelog.tier.object_store import ObjectStore
from tidelog.tier.replacement_cleanup import CleanupReport, apply_cleanup, plan_cleanup
from tidelog.tier.stores import open_store
from tidelog.tier.sweep import apply_sweep, plan_sweep
from tidelog.tier.sweep_plan import SweepReport

_KEPT_PLACES = 16
_Run = tuple[int, int]


class FindWork(msgspec.Struct, frozen=True, kw_only=True):
    """A topic to look at. `now_us` is the driver's, so that all topics are looked at by one clock."""

    place: ColdPlace
    topic: str
    now_us: int
    grace_seconds: float


class RemoveWork(msgspec.Struct, frozen=True, kw_only=True):
    """A topic of which something is to be removed."""

    place: ColdPlace
    garbage: TopicGarbage


class Looked(msgspec.Struct, frozen=True, kw_only=True):
    """What was found of a topic, or why it could not be looked at."""

    topic: str
    garbage: TopicGarbage | None = None
    problem: str | None = None


class Removed(msgspec.Struct, frozen=True, kw_only=True):
    """What was removed of a topic, and what is published and there, before and after; or why that was not possible."""

    topic: str
    sweep: SweepReport = SweepReport()
    cleanup: CleanupReport = CleanupReport()
    before: Side | None = None
    after: Side | None = None
    problem: str | None = None


def find_garbage(work: FindWork) -> Looked:
    """Lists the topic's objects and holds them against its catalog. Changes nothing."""
    try:
        return Looked(topic=work.topic, garbage=_find(work))
    except TidelogError as error:
        return Looked(topic=work.topic, problem=str(error))


def remove_garbage(work: RemoveWork) -> Removed:
    """Carries out the plan of one topic. An error on the way leaves the rest for the next time."""
    try:
        return _remove(work)
    except TidelogError as error:
        return Removed(topic=work.garbage.topic, problem=str(error))


def _find(work: FindWork) -> TopicGarbage:
    catalog, objects = _catalog(work.place, work.topic), _objects(work.place)
    return TopicGarbage(
        topic=work.topic,
        sweep=plan_sweep(catalog, objects, None, work.now_us),
        cleanup=plan_cleanup(catalog, work.now_us, work.grace_seconds),
        catalog=_side(_covered(catalog, objects)),
    )


def _remove(work: RemoveWork) -> Removed:
    garbage = work.garbage
    catalog, objects = _catalog(work.place, garbage.topic), _objects(work.place)
    before = _covered(catalog, objects)
    cleanup = apply_cleanup(garbage.cleanup, catalog, objects)
    sweep = apply_sweep(garbage.sweep, catalog, objects)
    after = _covered(catalog, objects)
    # What an owner ships or lets go of meanwhile is not ours to answer for.
    first = catalog.start_offset()
    end = max((run[1] for run in before), default=first)
    return Removed(
        topic=garbage.topic,
        sweep=sweep,
        cleanup=cleanup,
        before=_side(_clipped(before, first, end)),
        after=_side(_clipped(after, first, end)),
    )


# What is published and there


def _covered(catalog: Catalog, objects: ObjectStore) -> list[_Run]:
    """The offsets that are in a published object of the right size, as runs (start, end exclusive)."""
    sizes = {info.key: info.size for info in objects.list(catalog.keys.objects_prefix)}
    runs: list[_Run] = []
    for one in catalog.walk(catalog.start_offset()):
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


def _side(runs: list[_Run]) -> Side:
    return Side(
        messages=sum(end - start for start, end in runs),
        first_offset=runs[0][0] if runs else None,
        last_offset=runs[-1][1] - 1 if runs else None,
        checksum=f"offsets:{crc32(msgspec.json.encode(runs)):08x}",
    )


# Stores are opened in the process that works, and kept for its next item


class _Opened(NamedTuple):
    objects: ObjectStore
    metadata: MetadataStore


@lru_cache(_KEPT_PLACES)
def _opened(place: ColdPlace) -> _Opened:
    objects = open_store(place.store_url, place.store_settings)
    return _Opened(objects, open_metadata_store(place.metadata_url, objects))


def _objects(place: ColdPlace) -> ObjectStore:
    return _opened(place).objects


def _catalog(place: ColdPlace, topic: str) -> Catalog:
    namespace, _, name = topic.partition("/")
    return Catalog(_opened(place).metadata, TopicKeys(namespace, name, place.metadata_root))
