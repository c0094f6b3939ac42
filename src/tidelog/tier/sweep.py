"""The sweep: finds what belongs to nothing, shows it, and removes it when told. Plan, show, apply.

The order in which a plan looks: owner and start, then the objects, then the catalog.

Why an orphan can be deleted without a claim
An orphan is an object X that no descriptor names, of an earlier epoch than the owner's, all of whose offsets (those
above the start) are in published objects that are there. Names are never used again, since they contain the epoch.
- A publisher, however late, needs the key of X's first offset, and the catalog to end there. The catalog ends behind X
  and never goes back, and what covers X is replaced only by what covers the same. So X is never published.
- A compaction publishes objects of its own generation, while its state says so (`replacement.py`). The state is read
  after the objects were listed: whose generation it does not speak for any more is published already, or never will
  be. What was replaced and waits for its deletion is spoken for as well, and left to that.
- A paused owner that wakes up can at most upload X once more. It is found by the next sweep.
- A retention removes descriptors below the start only. If it takes those that cover X, X is below the start as well,
  and left over.
- A rebuild may want X, in place of the object that covers it. It claims the topic before it lists the objects. Before
  each deletion the owner is read again: if it is another one than in the plan, nothing is deleted. A rebuild looks at
  last whether everything is still there that it was about to publish.
- Objects below the start are read by nobody, and nothing is ever published there.

Staged rows that nobody committed within a day are deleted, if the intake document does not name their consignment. A
writer that commits them later all the same finds them missing when they are taken in: they are refused, with an error.

What is the only copy of something stays: an object that was uploaded and never published, with offsets that are in no
other one. If the catalog is an old copy of itself, or lost descriptors, this is the data that `rebuild` needs. Only an
owner can drop it, and only what is of an earlier epoch: those cannot publish once it has settled in.

Invariants
- Whatever changes the catalog needs the owner.
- Each thing is looked at again right before it is removed. An error while looking is raised, and nothing is removed.
- A name that we did not make is never touched.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from tidelog.errors import InputError, NotFoundError
from tidelog.tier.catalog import Catalog
from tidelog.tier.descriptor import Descriptor
from tidelog.tier.intake_document import decode_intake
from tidelog.tier.keys import ObjectId, TopicKeys
from tidelog.tier.object_store import ObjectInfo, ObjectStore
from tidelog.tier.owned_catalog import OwnedCatalog
from tidelog.tier.owner import Owner
from tidelog.tier.replacement import Spoken, spoken_for
from tidelog.tier.retention import is_safe_to_remove, names_object, remove_published
from tidelog.tier.sweep_plan import SweepPlan, SweepReport, SweptObject

__all__ = ["SweepPlan", "SweepReport", "SweptObject", "apply_sweep", "finish_deletion", "plan_sweep"]

UNFINISHED_AGE_US = 24 * 3600 * 1_000_000
STAGED_AGE_US = UNFINISHED_AGE_US
_DELETED_AT_ONCE = 200


# Planning


def plan_sweep(
    catalog: Catalog,
    objects: ObjectStore,
    owned: OwnedCatalog | None,
    now_us: int,
    *,
    in_flight: Collection[str] | None = None,
) -> SweepPlan:
    """What a sweep would do. Changes nothing, and needs no claim.

    The owner itself may have objects of its own epoch swept: it gives the keys that its shipper is busy with.
    """
    if owned is not None:
        owned.ownership.verify()
    owner = _owner_of(catalog)
    mark = catalog.start_mark()
    listed = _list(catalog.keys, objects)
    published = list(catalog.walk(0))
    start_offset = 0 if mark is None else mark[0].start_offset
    sorting = _Sorting(catalog, objects, owner.epoch, start_offset, listed, published, spoken_for(catalog))
    own = None if owned is None or in_flight is None else frozenset(in_flight)
    return SweepPlan(
        epoch=owner.epoch,
        claim=owner.claim,
        start_offset=start_offset,
        next_offset=max([start_offset, *(one.next_offset for one in published[-1:])]),
        is_deleted=mark is not None and mark[0].deleted,
        unfinished=tuple(_unfinished(catalog, objects, now_us)),
        staged=tuple(_staged(catalog, objects, now_us)),
        foreign=tuple(listed.foreign),
        **sorting.of_descriptors(),
        **sorting.of_objects(own),
    )


class _Listed(NamedTuple):
    """What is below the prefix of the topic."""

    ours: dict[ObjectId, SweptObject]
    foreign: list[str]


def _list(keys: TopicKeys, objects: ObjectStore) -> _Listed:
    listed = _Listed({}, [])
    for info in objects.list(keys.objects_prefix):
        name = keys.parse_object(info.key)
        if name is None:
            listed.foreign.append(info.key)
        else:
            listed.ours[name] = _swept(keys, name, info.size)
    return listed


def _unfinished(catalog: Catalog, objects: ObjectStore, now_us: int) -> Iterable[ObjectInfo]:
    before_us = now_us - UNFINISHED_AGE_US
    for prefix in (catalog.keys.objects_prefix, catalog.keys.intake_prefix):
        yield from objects.unfinished_uploads(prefix, modified_before_us=before_us)


def _staged(catalog: Catalog, objects: ObjectStore, now_us: int) -> Iterable[ObjectInfo]:
    """Rows that were staged long ago for a consignment that the intake document does not name.

    They are listed before the document is read: what was committed meanwhile is named in it.
    """
    listed = [info for info in objects.list(catalog.keys.intake_prefix) if info.modified_us < now_us - STAGED_AGE_US]
    named = _consignments(catalog) if listed else set()
    for info in listed:
        consignment = catalog.keys.parse_staged(info.key)
        if consignment is not None and consignment not in named:
            yield info


def _consignments(catalog: Catalog) -> set[str]:
    entry = catalog.metadata.get(catalog.keys.intake)
    return set() if entry is None else decode_intake(entry.value, entry.key).consignments


class _Sorting:
    """Objects and descriptors of one moment, held against each other."""

    def __init__(
        self,
        catalog: Catalog,
        objects: ObjectStore,
        epoch: int,
        start_offset: int,
        listed: _Listed,
        published: Sequence[Descriptor],
        spoken: Spoken,
    ) -> None:
        self._spoken = spoken
        self._catalog = catalog
        self._objects = objects
        self._epoch = epoch
        self._start_offset = start_offset
        self._listed = listed
        self._published = published
        self._lost: list[Descriptor] = []
        self._damaged: list[Descriptor] = []

    def of_descriptors(self) -> dict[str, tuple[SweptObject, ...]]:
        below = [one for one in self._published if one.next_offset <= self._start_offset]
        for descriptor in self._published[len(below) :]:
            self._look_for_object_of(descriptor)
        return {
            "below_start": self._shown(below),
            "lost": self._shown(self._lost),
            "damaged": self._shown(self._damaged),
        }

    def _look_for_object_of(self, descriptor: Descriptor) -> None:
        """What the listing did not show may be younger than the listing, or going just now: the store is asked."""
        found = self._listed.ours.get(descriptor.name)
        if found is not None and found.size == descriptor.size:
            return
        size = _size_of(self._objects, self._catalog.keys.object(descriptor.name))
        if size == descriptor.size or not names_object(self._catalog, descriptor.start_offset, descriptor.object_id):
            return
        (self._lost if size is None else self._damaged).append(descriptor)

    def of_objects(self, in_flight: frozenset[str] | None) -> dict[str, tuple[SweptObject, ...]]:
        """Those that no descriptor names. `in_flight`: what the asking owner is busy with."""
        kinds: dict[str, list[SweptObject]] = {
            name: [] for name in ("left_over", "orphans", "uncovered", "pending", "replaced", "newer")
        }
        named = {descriptor.name for descriptor in self._published}
        is_covered = self._coverage()
        for name in sorted(self._listed.ours.keys() - named):
            found = self._listed.ours[name]
            kind = self._kind_of(found, is_covered(found), in_flight)
            if name in self._spoken and kind != "newer":
                kind = "replaced" if name in self._spoken.replaced else "pending"
            kinds[kind].append(found)
        return {kind: tuple(found) for kind, found in kinds.items()}

    def _kind_of(self, found: SweptObject, is_covered: bool, in_flight: frozenset[str] | None) -> str:
        if found.epoch > self._epoch:
            return "newer"
        if found.next_offset <= self._start_offset:
            return "left_over"
        if found.epoch < self._epoch or found.is_compacted:  # owners publish what they shipped, and nothing else
            return "orphans" if is_covered else "uncovered"
        is_idle = in_flight is not None and found.key not in in_flight
        return "orphans" if is_idle and is_covered else "pending"

    def _coverage(self) -> Callable[[SweptObject], bool]:
        """Whether an object's offsets from the start on are all in published objects that are there."""
        missing = {descriptor.name for descriptor in (*self._lost, *self._damaged)}
        runs: list[list[int]] = []
        for descriptor in self._published:
            if descriptor.name in missing:
                continue
            if runs and runs[-1][1] == descriptor.start_offset:
                runs[-1][1] = descriptor.next_offset
            else:
                runs.append([descriptor.start_offset, descriptor.next_offset])

        def is_covered(found: SweptObject) -> bool:
            first = max(found.start_offset, self._start_offset)
            at = bisect_right(runs, first, key=lambda run: run[0]) - 1
            return at >= 0 and found.next_offset <= runs[at][1]

        return is_covered

    def _shown(self, descriptors: Iterable[Descriptor]) -> tuple[SweptObject, ...]:
        return tuple(_swept(self._catalog.keys, one.name, one.size) for one in descriptors)


# Applying


def apply_sweep(
    plan: SweepPlan,
    catalog: Catalog,
    objects: ObjectStore,
    owned: OwnedCatalog | None = None,
    *,
    in_flight: Collection[str] | None = None,
    drop_lost: bool = False,
    drop_uncovered: bool = False,
) -> SweepReport:
    """Does what the plan says, each thing only if it is still so.

    `drop_lost` takes descriptors out whose objects are gone, so that the hole is told by the catalog; the newest stays,
    since it says where the topic ends. `drop_uncovered` deletes what earlier owners uploaded and never published. Both
    need the owner.
    """
    if owned is None and (drop_lost or drop_uncovered):
        raise InputError("only the owner of a topic can drop what is lost or was never published", operation="sweep")
    if owned is not None:
        owned.ownership.verify()
    applying = _Applying(plan, catalog, objects, owned, in_flight)
    applying.remove_below_start()
    applying.delete_left_over()
    applying.delete_orphans()
    if drop_uncovered:
        applying.delete_uncovered()
    if drop_lost:
        applying.drop_lost()
    applying.delete_unfinished()
    applying.delete_staged()
    return applying.report()


class _Applying:
    def __init__(
        self,
        plan: SweepPlan,
        catalog: Catalog,
        objects: ObjectStore,
        owned: OwnedCatalog | None,
        in_flight: Collection[str] | None,
    ) -> None:
        self._plan = plan
        self._catalog = catalog
        self._objects = objects
        self._owned = owned
        self._in_flight = in_flight
        self._deleted: list[SweptObject] = []
        self._descriptors: list[int] = []
        self._dropped: list[int] = []
        self._skipped: list[tuple[str, str]] = []
        self._is_unfinished_done = False
        self._staged: list[ObjectInfo] = []

    def report(self) -> SweepReport:
        unfinished = self._plan.unfinished if self._is_unfinished_done else ()
        return SweepReport(
            objects=tuple(one.key for one in self._deleted),
            descriptors=tuple(self._descriptors),
            unfinished=tuple(one.key for one in unfinished),
            dropped_lost=tuple(self._dropped),
            staged=tuple(one.key for one in self._staged),
            skipped=tuple(self._skipped),
            bytes=sum(one.size for one in self._deleted) + sum(one.size for one in (*unfinished, *self._staged)),
        )

    # What is below the start

    def remove_below_start(self) -> None:
        for one in self._plan.below_start:
            found = self._catalog.find(one.start_offset)
            if self._owned is None:
                self._skip(one, "only the owner removes descriptors")
            elif found is None or not isinstance(found.value, Descriptor) or found.value.object_id != one.object_id:
                self._skip(one, "it is gone already")
            elif found.value.next_offset > self._catalog.start_offset():
                self._skip(one, "it is not below the start")
            else:
                remove_published(self._owned, self._objects, [found.value])
                self._descriptors.append(one.start_offset)
                self._deleted.append(one)

    def delete_left_over(self) -> None:
        for one in self._plan.left_over:
            if one.next_offset > self._catalog.start_offset():
                self._skip(one, "it is not below the start")
            else:
                self._delete_unnamed(one)

    # What nobody will publish

    def delete_orphans(self) -> None:
        for one in self._plan.orphans:
            if self._in_flight is None and one.epoch >= self._plan.epoch and not one.is_compacted:
                self._skip(one, "the owner may be about to publish it")
            elif self._in_flight is not None and one.key in self._in_flight:
                self._skip(one, "it is being uploaded")
            elif not is_safe_to_remove(self._catalog, self._objects, one.start_offset, one.next_offset):
                self._skip(one, "its offsets are not all in other objects")
            else:
                self._delete_unnamed(one)

    def delete_uncovered(self) -> None:
        assert self._owned is not None
        for one in self._plan.uncovered:
            if one.epoch >= self._owned.epoch:
                self._skip(one, "it is not of an earlier epoch")
            else:
                self._delete_unnamed(one)

    def _delete_unnamed(self, one: SweptObject) -> None:
        owner = _owner_of(self._catalog)
        if owner.claim != self._plan.claim:
            self._skip(one, f"{owner.node} has taken the topic over since")
        elif names_object(self._catalog, one.start_offset, one.object_id):
            self._skip(one, "it is published")
        else:
            self._objects.delete(one.key)
            self._deleted.append(one)

    # What is gone

    def drop_lost(self) -> None:
        assert self._owned is not None
        newest = self._catalog.newest()
        for one in self._plan.lost:
            found = self._catalog.find(one.start_offset)
            if found is None or not isinstance(found.value, Descriptor) or found.value.object_id != one.object_id:
                self._skip(one, "its descriptor is gone already")
            elif _size_of(self._objects, one.key) is not None:
                self._skip(one, "the object is there")
            elif newest is not None and newest.start_offset == one.start_offset:
                self._skip(one, "it says where the topic ends")
            else:
                self._owned.remove_descriptors([found.value])
                self._dropped.append(one.start_offset)

    def delete_unfinished(self) -> None:
        self._objects.delete_unfinished(self._plan.unfinished)
        self._is_unfinished_done = True

    def delete_staged(self) -> None:
        """What was committed since, by a writer that took its time, stays."""
        named = _consignments(self._catalog) if self._plan.staged else set()
        for one in self._plan.staged:
            if self._catalog.keys.parse_staged(one.key) in named:
                self._skipped.append((one.key, "its consignment was committed since"))
            else:
                self._staged.append(one)
        for start in range(0, len(self._staged), _DELETED_AT_ONCE):
            self._objects.delete([one.key for one in self._staged[start : start + _DELETED_AT_ONCE]])

    def _skip(self, one: SweptObject, why: str) -> None:
        self._skipped.append((one.key, why))


# Deleting a topic


def finish_deletion(owned: OwnedCatalog, objects: ObjectStore) -> None:
    """Removes all of a topic that is marked as deleted: what is below its prefix, then its entries, the owner's last.

    May be interrupted anywhere: the mark stays until all objects are gone, and the next owner goes on.
    """
    mark = owned.catalog.start_mark()
    if mark is None or not mark[0].deleted:
        raise InputError("the topic is not marked as deleted", operation="delete")
    for prefix in (owned.catalog.keys.objects_prefix, owned.catalog.keys.intake_prefix):
        owned.ownership.verify()
        objects.delete_unfinished(list(objects.unfinished_uploads(prefix)))
        names = (info.key for info in objects.list(prefix))
        while some := list(islice(names, _DELETED_AT_ONCE)):
            owned.ownership.verify()
            objects.delete(some)
    owned.remove_everything()


def _owner_of(catalog: Catalog) -> Owner:
    found = catalog.owner()
    if found is None:
        raise NotFoundError(
            "the topic has no catalog, so that nothing in the store can be told from an orphan",
            operation="sweep",
            hint="`tidelog topic rebuild-catalog` makes the catalog anew from the objects",
        )
    return found[0]


def _swept(keys: TopicKeys, name: ObjectId, size: int) -> SweptObject:
    return SweptObject(key=keys.object(name), start_offset=name.start, end_offset=name.end, epoch=name.epoch, size=size)


def _size_of(objects: ObjectStore, key: str) -> int | None:
    try:
        return objects.head(key).size
    except NotFoundError:
        return None
