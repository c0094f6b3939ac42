"""Dropping the shipped log that compacted data has made unnecessary, by anybody, beside a live owner.

    manifest: how far -> catalog: start of the log -> descriptors -> objects -> what was left without a name

Why no claim is needed
- How far is `droppable_below_lsn` of a manifest that was published. That number never goes back: a compaction only
  moves forward, a state is only ever added behind the newest one, and one that is pinned stays listed. So whoever slept
  in the middle of this wakes up with a limit that is still right.
- The start of the log is changed on the version that was read, and only forwards. An owner that does the same at the
  same time is in front of it or behind it; a new owner's own rewriting of it goes first or makes this try again.
- Descriptors below the start are removed on their versions, objects only when no descriptor names them. Several may do
  both at once: what is gone already is fine.

Invariants
- Nothing goes from the LSN on that a restore would begin to replay at, whichever listed state it begins with, nor what
  is not in compacted data. Whole objects go, oldest first, and never the newest one: the log goes on there.
- From the moment the start has moved nobody reads below it; what is cut off after that is finished by whoever drops or
  collects next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from tidelog.clock import Clock, SystemClock
from tidelog.engine.manifest import Manifest, read_manifest
from tidelog.errors import ConflictError, DataError, NotFoundError
from tidelog.tier import owner as documents
from tidelog.tier.catalog import Catalog
from tidelog.tier.descriptor import Descriptor
from tidelog.tier.keys import EngineKeys
from tidelog.tier.metadata.store import Check, MetadataStore, Put
from tidelog.tier.object_store import ObjectStore
from tidelog.tier.retention import published_below, remove_unpublished

_ATTEMPTS = 20
Result = TypeVar("Result")


class DroppedLog(msgspec.Struct, frozen=True, kw_only=True):
    """What was dropped, and where the log begins now."""

    start_lsn: int
    objects: int = 0
    bytes: int = 0
    keys: tuple[str, ...] = ()


def droppable_below_lsn(manifest: Manifest) -> int:
    """The LSN below which no record is needed: neither for a value, nor by a restore. 0 while all are."""
    if manifest.compacted is None or not manifest.checkpoints:
        return 0
    return min(manifest.compacted.lsn, *(state.lsn for state in manifest.checkpoints))


def whole_objects_below(catalog: Catalog, lsn: int) -> list[Descriptor]:
    """The published objects all of whose records are below an LSN, oldest first; never the newest one."""
    newest = catalog.newest()
    stop_lsn = min(lsn, 0 if newest is None else newest.start_offset)
    return [one for one in catalog.between(catalog.start_offset(), stop_lsn) if one.next_offset <= stop_lsn]


def drop_raw_log(
    objects: ObjectStore, metadata: MetadataStore, keys: EngineKeys, below_lsn: int, *, clock: Clock | None = None
) -> DroppedLog:
    """Drops the objects of the log below an LSN, as far as the published manifest allows it. Needs no claim.

    May be interrupted anywhere and done again, beside an owner and beside others that do the same.
    """
    catalog = Catalog(metadata, keys)
    start_lsn = retried(lambda: _move_start(catalog, keys, below_lsn, clock or SystemClock()))
    doomed = _unpublish(catalog, start_lsn)
    gone = [one for one in doomed if remove_unpublished(catalog, objects, one)]
    left_over = objects_without_name(catalog, objects, start_lsn)
    objects.delete(left_over)
    return DroppedLog(
        start_lsn=start_lsn,
        objects=len(gone) + len(left_over),
        bytes=sum(one.size for one in gone),
        keys=(*(keys.object(one.name) for one in gone), *left_over),
    )


def _move_start(catalog: Catalog, keys: EngineKeys, below_lsn: int, clock: Clock) -> int:
    """Writes down where the log begins from now on; the LSN."""
    mark = catalog.start_mark()
    found = read_manifest(catalog.metadata, keys)
    if mark is None or found is None or mark[0].deleted:
        return 0
    doomed = whole_objects_below(catalog, min(below_lsn, droppable_below_lsn(found[0])))
    start_lsn = doomed[-1].next_offset if doomed else 0
    if start_lsn <= mark[0].start_offset:
        return mark[0].start_offset
    # The epoch stays as it was found: this is nobody's claim, and a new owner rewrites what is not its own.
    moved = msgspec.structs.replace(mark[0], start_offset=start_lsn, moved_us=clock.now_us())
    checks = [Check(keys.start, mark[1])]
    if catalog.metadata.supports_multi_key:
        checks.append(Check(keys.engine_manifest, found[1]))
    catalog.metadata.commit(checks, [Put(keys.start, documents.encode(moved))])
    return start_lsn


def _unpublish(catalog: Catalog, start_lsn: int) -> list[Descriptor]:
    """Takes everything below the start out of the catalog, whoever else is at it; what that was."""
    seen: dict[str, Descriptor] = {}

    def remove_all() -> None:
        for descriptor in list(published_below(catalog, start_lsn)):
            seen[descriptor.object_id] = descriptor
            found = catalog.find(descriptor.start_offset)
            if found is not None and found.value == descriptor:
                catalog.metadata.remove(catalog.keys.descriptor(descriptor.start_offset), found.version)

    retried(remove_all)
    return list(seen.values())


def objects_without_name(catalog: Catalog, objects: ObjectStore, start_lsn: int) -> list[str]:
    """Objects below the start whose descriptors are gone: nothing is ever published there again."""
    listed = ((info.key, catalog.keys.parse_object(info.key)) for info in objects.list(catalog.keys.objects_prefix))
    return [key for key, name in listed if name is not None and name.end < start_lsn]


def retried(change: Callable[[], Result]) -> Result:
    """Others may be faster, but not for ever: each of them gets one change through at most."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return change()
        except ConflictError:
            continue
    return change()


@contextmanager
def told_of_dropped_log(catalog: Catalog) -> Iterator[None]:
    """Who reads the log without having pinned a state may find it dropped meanwhile: ConflictError says to begin anew.

    What fails otherwise stays what it is.
    """
    start_lsn = catalog.start_offset()
    try:
        yield
    except (DataError, NotFoundError) as error:
        now_lsn = catalog.start_offset()
        if now_lsn <= start_lsn:
            raise
        raise ConflictError(
            f"the log before LSN {now_lsn} was dropped while this was at work",
            hint="Nothing was lost; run it again, and it begins with what has taken its place",
        ) from error
