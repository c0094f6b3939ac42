"""The garbage collector: one rule per kind of garbage, and one way for all of them: plan, show, apply.

    plan    each rule lists candidates, with what is to be done about each and why; nothing is changed
    show    `Plan` is data: for people as lines, for programs as JSON, in a file until it is applied
    apply   each candidate is checked again and deleted, or kept for a reason; what is gone already is not mentioned

A rule knows what is garbage, why that stays true, and how it is deleted. What all rules share is the collector's: grace
periods, uploads in progress, and the fence. The rules for any log are here; `engine/cold/gc.py` has those for snapshots
and compacted data.

Why an orphan can be deleted without a claim
An orphan is an object X that no descriptor names, of an earlier epoch than the owner's, all of whose offsets (those
above the start) are in published objects that exist. Names are never reused, since they contain the epoch.
- A publisher, however late, needs the key of X's first offset, and the catalog to end there. The catalog ends after X
  and never goes back, and what covers X is replaced only by what covers the same. So X is never published.
- A rewrite publishes objects of its own generation, while its state says so (`rewrite.py`). The state is read after the
  objects were listed: an object of a generation that the state no longer covers is published already, or never will
  be.
- A paused owner that wakes up can at most upload X once more. The next collection finds it.
- Retention removes descriptors below the start only. If it removes those that cover X, X is below the start as well,
  and an orphan.
- A rebuild may want X, in place of the object that covers it. It claims the topic before it lists the objects. Before
  each deletion the owner is read again: if it differs from the plan's, nothing is deleted. As its last step a rebuild
  checks that everything it is about to publish still exists.
- Objects below the start are read by nobody, and nothing is ever published there.

Objects that a rewrite has replaced were recorded for deletion before the catalog switched. The grace period is for
readers that hold an old descriptor; one that finds its object gone reads the catalog again.

Staged rows that nobody committed within a day are deleted, if the staging document does not name their commit. If a
writer commits them later all the same, ingest finds them missing: they are refused, with an error.

The only copy of anything stays: an object that was uploaded and never published, with offsets that are in no other one.
If the catalog is an old copy of itself, or lost descriptors, this is the data that `rebuild` needs. Only an owner can
drop it, and only objects of an earlier epoch: those cannot be published once the owner has settled in.

Invariants
- A candidate is deleted only if the plan names it and its rule finds nothing that keeps it right before. An error while
  checking is raised, and nothing is deleted: what cannot be read is never garbage.
- Every change of the catalog needs the owner. A replaced owner plans nothing and deletes nothing (FencedError).
- A name that tidelog did not create is never touched.
- Nothing goes while the published copy of the catalog may name it (`store/metadata/published.py`).
- A collection can be interrupted anywhere, and applied again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from itertools import groupby, islice
from typing import ClassVar, Literal

import msgspec

from tidelog.cold.catalog import Catalog, Descriptor, Owner
from tidelog.cold.ownership import OwnedCatalog
from tidelog.cold.retention import is_safe_to_remove, names_object, remove_published
from tidelog.cold.rewrite_commit import (
    Rewrite,
    RewriteState,
    Waiting,
    pending_rewrites,
    read_rewrite,
    read_state,
    state_document,
)
from tidelog.errors import InputError, NotFoundError, offsets_text
from tidelog.store.keys import MAX_NUMBER, ObjectId, parse_object_id
from tidelog.store.metadata.bucket import copy_error
from tidelog.store.object_store import ObjectInfo, ObjectStore

DEFAULT_GRACE_SECONDS = 3600
UNFINISHED_AGE_US = 24 * 3600 * 1_000_000
STAGED_AGE_US = UNFINISHED_AGE_US
_DELETED_AT_ONCE = 200

Action = Literal["remove", "removed", "owner", "keep", "move", "LOST", "DAMAGED"]


class Reason(StrEnum):
    """Why something goes or stays: a word for programs, with its `text` for people."""

    text: str

    def __new__(cls, word: str, text: str) -> Reason:
        reason = str.__new__(cls, word)
        reason._value_, reason.text = word, text
        return reason

    # It goes
    BELOW_START = "below-start", "it is below the start"
    ORPHAN = "orphan", "no descriptor names it, and others have all that is in it"
    REPLACED = "replaced", "a rewrite has replaced it"
    UNFINISHED = "unfinished", "an upload that nobody has touched for a day"
    UNCOMMITTED = "uncommitted", "rows that were staged a day ago and never committed"
    COMPACTED = "compacted", "its values are in compacted data, and no snapshot needs it"
    OLD = "old", "two newer snapshots are listed, and nobody reads it"
    LEAVING = "leaving", "its deletion is recorded in the manifest"
    UNLISTED = "unlisted", "it is not listed, and nobody can list it any more"
    SUPERSEDED = "superseded", "neither the published compaction nor a listed snapshot uses it"
    HISTORY = "history", "where history is to begin; older versions go with the next compaction"
    # It stays
    ONLY_COPY = "only-copy", "it may be the only copy of what is in it"
    OWNER = "owner", "only the owner removes descriptors"
    IN_PROGRESS = "in-progress", "its owner, or a job at work, may be about to publish it"
    RECENT = "recent", "superseded not long ago: somebody may be reading it"
    LATER_EPOCH = "later-epoch", "it is of a later epoch than the owner's: the catalog may be an old copy"
    FOREIGN = "foreign", "tidelog did not create it"
    NEEDED = "needed", "it is in use by now"
    END = "end", "it says where the topic ends"
    TAKEN_OVER = "taken-over", "another node has claimed it since: make a new plan"
    UNREADABLE = "unreadable", "something that may use it cannot be read"
    PUBLISHED = "published", "the published copy of the catalog is out of date and may name it: collect again later"
    STALE = "stale", "the manifest has gone back: it may be an old copy"
    # It is wrong
    LOST = "lost", "the object is gone"
    DAMAGED = "damaged", "the object has another size than its reference says"
    # It is not there any more: nothing to do, and nothing to tell
    GONE = "gone", "it is gone already"


_ON_DEMAND = (Reason.LOST, Reason.ONLY_COPY)


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a rule found: what it is, what is done about it, and why. `by` is what replaces it."""

    kind: str
    action: Action
    reason: Reason
    key: str
    bytes: int | None = None
    by: str = ""

    @property
    def name(self) -> ObjectId | None:
        """Of an object of the log: its name taken apart."""
        return parse_object_id(self.key.rpartition("/")[2])

    @property
    def is_wrong(self) -> bool:
        """Whether something that should be there is not, or not as it should."""
        return self.action in ("LOST", "DAMAGED")

    @property
    def why(self) -> str:
        """The reason, for people."""
        return f"{self.by} has replaced it" if self.by and self.reason is Reason.REPLACED else self.reason.text

    def __str__(self) -> str:
        name = self.name
        offsets = "" if name is None else f"{offsets_text(name.start, name.end)}, "
        return f"{self.key} ({offsets}{self.bytes or 0} bytes)"


def total_bytes(found: Iterable[Candidate]) -> int:
    """Their bytes together."""
    return sum(one.bytes or 0 for one in found)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What was found of one topic or engine, and what is to be done about it. `claim` is that of the owner then."""

    subject: str
    epoch: int
    claim: str
    start_offset: int
    is_deleted: bool = False
    found: tuple[Candidate, ...] = ()

    @property
    def removable(self) -> tuple[Candidate, ...]:
        """What goes when the plan is applied without further options."""
        return tuple(one for one in self.found if one.action == "remove")

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing that is removed without being asked for."""
        return not self.removable

    @property
    def bytes(self) -> int:
        return total_bytes(self.removable)

    def of(self, *reasons: Reason) -> tuple[Candidate, ...]:
        """What was found for one of these reasons."""
        return tuple(one for one in self.found if one.reason in reasons)

    def after(self, report: Report) -> tuple[Candidate, ...]:
        """What was found, with what became of it. What was gone before it could be removed is left out."""
        done = {one.key: one for one in (*report.removed, *report.kept)}
        return tuple(done.get(one.key, one) for one in self.found if one.key in done or one.action != "remove")

    def lines(self) -> Iterator[str]:
        """For people: a line for each thing, what is removed first."""
        for one in sorted(self.found, key=lambda one: one.action != "remove"):
            yield f"{one.action}, {one.why}: {one}"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was removed, and what was planned and stayed, each with its reason. What was gone already is in neither."""

    removed: tuple[Candidate, ...] = ()
    kept: tuple[Candidate, ...] = ()

    @property
    def objects(self) -> tuple[str, ...]:
        """The keys of what was deleted from the store."""
        return tuple(one.key for one in self.removed if one.reason is not Reason.LOST)

    @property
    def bytes(self) -> int:
        return total_bytes(one for one in self.removed if one.reason is not Reason.LOST)


class Rule(ABC):
    """One kind of garbage. Its methods are called in this order: `find`; later `batches`, then `kept` and `delete` for
    each batch, then `finish`.
    """

    kinds: ClassVar[tuple[str, ...]]
    """What its candidates are called; no other rule has these."""
    is_fenced: ClassVar[bool] = True
    """Whether a plan from before a takeover is void: the new owner, or a rebuild, may have a use for it."""
    batch_size: ClassVar[int] = 1
    """How many candidates are checked and deleted together."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._catalog = collector.catalog
        self._objects = collector.objects
        self._keys = collector.catalog.keys

    @abstractmethod
    def find(self) -> Iterable[Candidate]:
        """The candidates. Changes nothing."""

    def batches(self, planned: Sequence[Candidate]) -> Iterable[Sequence[Candidate]]:
        """What is checked and deleted together."""
        return (planned[at : at + self.batch_size] for at in range(0, len(planned), self.batch_size))

    @abstractmethod
    def kept(self, batch: Sequence[Candidate]) -> dict[str, Reason]:
        """By key, what keeps some of a batch at this moment; `GONE` for what is not there."""

    def delete(self, batch: Sequence[Candidate]) -> None:
        """Deletes candidates that nothing keeps."""
        self._objects.delete([one.key for one in batch])

    def finish(self, planned: Collection[str], kept: Mapping[str, Reason]) -> None:
        """Called after all batches, with what was planned and what stayed of it."""
        return

    def _found(self, action: Action, reason: Reason, key: str, size: int | None = None, by: str = "") -> Candidate:
        return Candidate(kind=self.kinds[0], action=action, reason=reason, key=key, bytes=size, by=by)


class Collector:
    """Plans and applies what the rules say about one log. Without `owned` it claims nothing.

    An owner passes the keys that its shipper is using (`in_flight`), so that other objects of its epoch can go.
    """

    def __init__(
        self,
        catalog: Catalog,
        objects: ObjectStore,
        now_us: int,
        *,
        owned: OwnedCatalog | None = None,
        in_flight: Collection[str] | None = None,
        grace_seconds: float = DEFAULT_GRACE_SECONDS,
        rules: Sequence[Callable[[Collector], Rule]] | None = None,
    ) -> None:
        self.catalog = catalog
        self.objects = objects
        self.now_us = now_us
        self.owned = owned
        self.grace_seconds = grace_seconds
        self.epoch = 0
        self.start_offset = 0
        self._in_flight = in_flight
        self._rules = [rule(self) for rule in (LOG_RULES if rules is None else rules)]

    # What all rules share

    def is_recent(self, since_us: int) -> bool:
        """Whether the grace period of what is garbage since then is not over."""
        return self.now_us - since_us < self.grace_seconds * 1_000_000

    def is_in_progress(self, key: str, name: ObjectId) -> bool:
        """Whether an owner may be about to publish an object: what it is shipping, or all that is of its epoch."""
        if self._in_flight is not None:
            return key in self._in_flight
        return name.epoch >= self.epoch and not name.generation

    @cached_property
    def there(self) -> frozenset[str]:
        """The objects of the log, listed once for all that is checked: what is gone by then was removed before."""
        return frozenset(info.key for info in self.objects.list(self.catalog.keys.objects_prefix))

    def _verify(self) -> None:
        if self.owned is not None:
            self.owned.ownership.verify()

    def _owner(self) -> Owner | None:
        found = self.catalog.owner()
        if found is not None and isinstance(found[0].copy_of, str):  # which may not know what was published last
            raise copy_error(self.catalog.keys.metadata_prefix, self.catalog.metadata.url, found[0].copy_of)
        return None if found is None else found[0]

    def _claim(self) -> str:
        owner = self._owner()
        return "" if owner is None else owner.claim

    # Plan and apply

    def plan(self) -> Plan:
        """What would be removed, and what was found besides. Changes nothing."""
        self._verify()
        owner, mark = self._owner(), self.catalog.start_mark()
        self.epoch = 0 if owner is None else owner.epoch
        self.start_offset = 0 if mark is None else mark[0].start_offset
        found: dict[str, Candidate] = {}
        for rule in self._rules:
            for one in rule.find():
                found.setdefault(one.key, one)
        return Plan(
            subject=self.catalog.keys.subject,
            epoch=self.epoch,
            claim="" if owner is None else owner.claim,
            start_offset=self.start_offset,
            is_deleted=mark is not None and mark[0].deleted,
            found=tuple(found.values()),
        )

    def apply(self, plan: Plan, *, drop: Collection[Reason] = ()) -> Report:
        """Removes what the plan says, each thing only if nothing keeps it at this moment.

        `drop` names what goes besides: `LOST` takes descriptors of lost objects out of the catalog, so that it reports
        the hole; `ONLY_COPY` deletes what earlier owners uploaded and never published. Both need the owner.
        """
        if drop and self.owned is None:
            raise InputError(
                "only the owner of a topic can drop what is lost or was never published", operation="remove-orphans"
            )
        self._verify()
        self.epoch = plan.epoch
        wanted = [one for one in plan.found if _is_wanted(one, drop)]
        if wanted and not self.catalog.metadata.copy_is_current(self.catalog.keys.metadata_prefix):
            return Report(kept=tuple(_stays(one, Reason.PUBLISHED) for one in wanted))
        removed: list[Candidate] = []
        kept: list[Candidate] = []
        for rule in self._rules:
            planned = [one for one in wanted if one.kind in rule.kinds]
            stays: dict[str, Reason] = {}
            for batch in rule.batches(planned):
                found = self._kept(rule, batch, plan.claim)
                gone = [one for one in batch if one.key not in found]
                if gone:
                    rule.delete(gone)
                removed += [msgspec.structs.replace(one, action="removed") for one in gone]
                kept += [
                    _stays(one, found[one.key]) for one in batch if found.get(one.key, Reason.GONE) is not Reason.GONE
                ]
                stays |= found
            rule.finish({one.key for one in planned}, stays)
        return Report(removed=tuple(removed), kept=tuple(kept))

    def _kept(self, rule: Rule, batch: Sequence[Candidate], claim: str) -> dict[str, Reason]:
        """What keeps some of a batch. The owner is asked for last, right before the deletion."""
        found = rule.kept(batch)
        is_void = rule.is_fenced and any(one.key not in found for one in batch) and self._claim() != claim
        return {one.key: Reason.TAKEN_OVER for one in batch} | found if is_void else found


def _is_wanted(one: Candidate, drop: Collection[Reason]) -> bool:
    return one.reason in drop if one.reason in _ON_DEMAND else one.action == "remove"


def _stays(one: Candidate, reason: Reason) -> Candidate:
    return msgspec.structs.replace(one, action="keep", reason=reason)


# The rules for any log


class LogObjects(Rule):
    """Objects of the log below the start, orphans, the only copy of something, and descriptors without an object."""

    kinds = ("log object",)

    def find(self) -> Iterator[Candidate]:
        if not self._collector.epoch:
            raise NotFoundError(
                "the topic has no catalog, so that nothing in the store can be told from an orphan",
                operation="remove-orphans",
                hint="`tidelog topic rebuild-catalog` rebuilds the catalog from the objects",
            )
        listed = {info.key: info for info in self._objects.list(self._keys.objects_prefix)}
        published = list(self._catalog.between(0, MAX_NUMBER))
        wrong = {one.key: one for descriptor in published if (one := self._wrong(descriptor, listed)) is not None}
        yield from wrong.values()
        yield from (one for descriptor in published if (one := self._below_start(descriptor)) is not None)
        yield from self._unnamed(listed, published, wrong)

    def _below_start(self, descriptor: Descriptor) -> Candidate | None:
        """A descriptor that only its owner may remove, with its object."""
        if descriptor.next_offset > self._collector.start_offset:
            return None
        action: Action = "owner" if self._collector.owned is None else "remove"
        return self._found(action, Reason.BELOW_START, self._keys.object(descriptor.name), descriptor.size)

    def _wrong(self, descriptor: Descriptor, listed: Mapping[str, ObjectInfo]) -> Candidate | None:
        """What the listing did not show may be younger than the listing, or going just now: the store is asked."""
        key = self._keys.object(descriptor.name)
        if descriptor.next_offset <= self._collector.start_offset or _size(listed.get(key)) == descriptor.size:
            return None
        size = _size(_head(self._objects, key))
        if size == descriptor.size or not names_object(self._catalog, descriptor.start_offset, descriptor.object_id):
            return None
        if size is None:
            return self._found("LOST", Reason.LOST, key, descriptor.size)
        return self._found("DAMAGED", Reason.DAMAGED, key, size)

    def _unnamed(
        self, listed: Mapping[str, ObjectInfo], published: Sequence[Descriptor], wrong: Mapping[str, Candidate]
    ) -> Iterator[Candidate]:
        named = {descriptor.name for descriptor in published}
        is_covered = self._coverage(published, wrong)
        pending = pending_rewrites(self._catalog)  # behind the listing: what is in it and is being built is known to be
        for key, info in listed.items():
            name = self._keys.parse_object(key)
            if name is None:
                yield Candidate(kind="foreign", action="keep", reason=Reason.FOREIGN, key=key, bytes=info.size)
            elif name not in named:
                reason = self._reason(key, name, is_covered(name))
                if name in pending and reason is not Reason.LATER_EPOCH:
                    reason = Reason.REPLACED if name in pending.replaced else Reason.IN_PROGRESS
                goes = reason in (Reason.BELOW_START, Reason.ORPHAN)
                yield self._found("remove" if goes else "keep", reason, key, info.size)

    def _reason(self, key: str, name: ObjectId, is_covered: bool) -> Reason:
        if name.epoch > self._collector.epoch:
            return Reason.LATER_EPOCH
        if name.end < self._collector.start_offset:
            return Reason.BELOW_START
        if name.epoch == self._collector.epoch and not name.generation:  # owners publish what they shipped
            return Reason.ORPHAN if is_covered and not self._collector.is_in_progress(key, name) else Reason.IN_PROGRESS
        return Reason.ORPHAN if is_covered else Reason.ONLY_COPY

    def _coverage(self, published: Sequence[Descriptor], wrong: Mapping[str, Candidate]) -> Callable[[ObjectId], bool]:
        """Whether an object's offsets from the start on are all in published objects that are there."""
        runs: list[list[int]] = []
        for descriptor in published:
            if self._keys.object(descriptor.name) in wrong:
                continue
            if runs and runs[-1][1] == descriptor.start_offset:
                runs[-1][1] = descriptor.next_offset
            else:
                runs.append([descriptor.start_offset, descriptor.next_offset])

        def is_covered(name: ObjectId) -> bool:
            at = bisect_right(runs, max(name.start, self._collector.start_offset), key=lambda run: run[0]) - 1
            return at >= 0 and name.end < runs[at][1]

        return is_covered

    # Applying

    def kept(self, batch: Sequence[Candidate]) -> dict[str, Reason]:
        return {one.key: reason for one in batch if (reason := self._kept(one)) is not None}

    def _kept(self, one: Candidate) -> Reason | None:
        name = self._keys.parse_object(one.key)
        if name is None:
            return Reason.FOREIGN
        if one.reason is Reason.LOST:
            return self._kept_lost(one, name)
        if one.reason is Reason.BELOW_START:
            return self._kept_below_start(one, name)
        if one.key not in self._collector.there:
            return Reason.GONE
        reason = self._kept_by_rule(one, name)
        return Reason.NEEDED if names_object(self._catalog, name.start, str(name)) else reason

    def _kept_below_start(self, one: Candidate, name: ObjectId) -> Reason | None:
        is_named = names_object(self._catalog, name.start, str(name))
        if not is_named and one.key not in self._collector.there:
            return Reason.GONE
        if name.end >= self._catalog.start_offset():
            return Reason.NEEDED
        return Reason.OWNER if is_named and self._collector.owned is None else None

    def _kept_by_rule(self, one: Candidate, name: ObjectId) -> Reason | None:
        owned = self._collector.owned
        if one.reason is Reason.ONLY_COPY and owned is not None:  # only owners are asked to drop it
            return Reason.IN_PROGRESS if name.epoch >= owned.epoch else None
        if self._collector.is_in_progress(one.key, name):
            return Reason.IN_PROGRESS
        is_safe = is_safe_to_remove(self._catalog, self._objects, name.start, name.end + 1)
        return None if is_safe else Reason.ONLY_COPY

    def _kept_lost(self, one: Candidate, name: ObjectId) -> Reason | None:
        newest = self._catalog.newest()
        if not names_object(self._catalog, name.start, str(name)):
            return Reason.GONE
        if _head(self._objects, one.key) is not None:
            return Reason.NEEDED
        return Reason.END if newest is not None and newest.start_offset == name.start else None

    def delete(self, batch: Sequence[Candidate]) -> None:
        owned = self._collector.owned
        for one in batch:
            name = one.name
            assert name is not None, "it was checked"
            found = None if owned is None else self._catalog.find(name.start)
            descriptor = None if found is None or not isinstance(found.value, Descriptor) else found.value
            if owned is None or descriptor is None or descriptor.object_id != str(name):
                self._objects.delete(one.key)
            elif one.reason is Reason.LOST:
                owned.remove_descriptors([descriptor])
            elif one.reason is Reason.BELOW_START:
                remove_published(owned, self._objects, [descriptor])


class ReplacedObjects(Rule):
    """Objects that a rewrite has replaced, some time after its switch.

    They go oldest first: a catalog from an old backup finds its newest object gone, or all of them there. What is to go
    is forgotten only when it is gone, so an interrupted collection is repeated.
    """

    kinds = ("replaced object",)

    def find(self) -> Iterator[Candidate]:
        for waiting in read_state(self._catalog).waiting:
            is_recent = self._collector.is_recent(waiting.switched_us)
            for written in self._written(waiting):
                for name, size, by in self._obsolete(written):
                    action: Action = "keep" if is_recent else "remove"
                    reason = Reason.RECENT if is_recent else Reason.REPLACED
                    yield self._found(action, reason, self._keys.object(name), size, by)

    def _written(self, waiting: Waiting) -> Iterator[Rewrite]:
        found = (read_rewrite(self._catalog, waiting.generation, start) for start in waiting.starts)
        return (one for one in found if one is not None)

    def _obsolete(self, written: Rewrite) -> Iterator[tuple[ObjectId, int, str]]:
        """The old objects; and the new one, where the switch to it did not happen, or it was replaced itself by now."""
        new = written.descriptor
        if not names_object(self._catalog, new.start_offset, new.object_id):
            yield new.name, new.size, ""
        for old in written.replaced:
            yield old.name, old.size, new.object_id

    def batches(self, planned: Sequence[Candidate]) -> Iterator[Sequence[Candidate]]:
        return (tuple(batch) for _, batch in groupby(planned, key=lambda one: one.by))

    def kept(self, batch: Sequence[Candidate]) -> dict[str, Reason]:
        names = [self._keys.parse_object(one.key) for one in batch]
        if any(name is None for name in names):
            return {one.key: Reason.FOREIGN for one in batch}
        ours = [name for name in names if name is not None]
        first, stop = min(name.start for name in ours), max(name.end for name in ours) + 1
        if not is_safe_to_remove(self._catalog, self._objects, first, stop):
            return {one.key: Reason.ONLY_COPY for one in batch}
        named = self._named(ours, self._keys.descriptor(first))
        gone = {one.key: Reason.GONE for one in batch if one.key not in self._collector.there}
        return gone | {self._keys.object(name): Reason.NEEDED for name in named}

    def _named(self, names: Sequence[ObjectId], first: str) -> list[ObjectId]:
        """Those that a descriptor names. Where no key is there is none, and few keys are there as a rule."""
        limit = len(names) + 1
        listed = list(self._catalog.metadata.keys(self._keys.segments_prefix, start=first, limit=limit))
        present = set(listed)

        def is_absent(key: str) -> bool:
            return key not in present and (len(listed) < limit or key < listed[-1])

        suspects = (name for name in names if not is_absent(self._keys.descriptor(name.start)))
        return [name for name in suspects if names_object(self._catalog, name.start, str(name))]

    def finish(self, planned: Collection[str], kept: Mapping[str, Reason]) -> None:
        for waiting in read_state(self._catalog).waiting:
            keys = (self._keys.object(name) for one in self._written(waiting) for name, _, _ in self._obsolete(one))
            if all(key in planned and kept.get(key, Reason.GONE) in (Reason.GONE, Reason.NEEDED) for key in keys):
                self._forget(waiting)

    def _forget(self, waiting: Waiting) -> None:
        """The entry of the state goes last: what is not in it is never looked for again."""
        for start in waiting.starts:
            self._catalog.metadata.delete(self._keys.replacement(waiting.generation, start))

        def without(known: RewriteState | None) -> RewriteState | None:
            if known is None:
                return None
            left = tuple(one for one in known.waiting if one.generation != waiting.generation)
            return msgspec.structs.replace(known, waiting=left)

        state_document(self._catalog).update(without)


class UnfinishedUploads(Rule):
    """Uploads that nobody has touched for a day."""

    kinds = ("upload",)
    is_fenced = False
    batch_size = 10_000

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Where uploads of this log are looked for."""
        return self._keys.objects_prefix, self._keys.staging_prefix

    def _uploads(self) -> Iterator[ObjectInfo]:
        before_us = self._collector.now_us - UNFINISHED_AGE_US
        for prefix in self.prefixes:
            yield from self._objects.unfinished_uploads(prefix, modified_before_us=before_us)

    def find(self) -> Iterator[Candidate]:
        return (self._found("remove", Reason.UNFINISHED, info.key, info.size) for info in self._uploads())

    def kept(self, batch: Sequence[Candidate]) -> dict[str, Reason]:
        there = {info.key for info in self._uploads()}
        return {one.key: Reason.GONE for one in batch if one.key not in there}

    def delete(self, batch: Sequence[Candidate]) -> None:
        wanted = {one.key for one in batch}
        self._objects.delete_unfinished([info for info in self._uploads() if info.key in wanted])


class StagedRows(Rule):
    """Rows that were staged long ago for a commit that the staging document does not name."""

    kinds = ("staged rows",)
    is_fenced = False
    batch_size = _DELETED_AT_ONCE

    def find(self) -> Iterator[Candidate]:
        """They are listed before the document is read: rows committed meanwhile are named in it."""
        before_us = self._collector.now_us - STAGED_AGE_US
        listed = [info for info in self._objects.list(self._keys.staging_prefix) if info.modified_us < before_us]
        named = self._commits() if listed else set()
        for info in listed:
            commit = self._keys.parse_staged(info.key)
            if commit is not None and commit not in named:
                yield self._found("remove", Reason.UNCOMMITTED, info.key, info.size)

    @cached_property
    def _there(self) -> frozenset[str]:
        return frozenset(info.key for info in self._objects.list(self._keys.staging_prefix))

    def _commits(self) -> set[str]:
        return self._catalog.staged_commits()

    def kept(self, batch: Sequence[Candidate]) -> dict[str, Reason]:
        """What was committed since, by a writer that took its time, stays."""
        named, found = self._commits(), dict[str, Reason]()
        for one in batch:
            commit = self._keys.parse_staged(one.key)
            if commit is None or one.key not in self._there:
                found[one.key] = Reason.FOREIGN if commit is None else Reason.GONE
            elif commit in named:
                found[one.key] = Reason.NEEDED
        return found


LOG_RULES: tuple[Callable[[Collector], Rule], ...] = (ReplacedObjects, LogObjects, UnfinishedUploads, StagedRows)


def _head(objects: ObjectStore, key: str) -> ObjectInfo | None:
    try:
        return objects.head(key)
    except NotFoundError:
        return None


def _size(info: ObjectInfo | None) -> int | None:
    return None if info is None else info.size


# Deleting a topic


def finish_deletion(owned: OwnedCatalog, objects: ObjectStore) -> None:
    """Removes all of a topic that is marked as deleted: what is below its prefix, then its entries, the owner's last.

    May be interrupted anywhere: the mark stays until all objects are gone, and the next owner resumes.
    """
    mark = owned.catalog.start_mark()
    if mark is None or not mark[0].deleted:
        raise InputError("the topic is not marked as deleted", operation="delete")
    for prefix in (owned.catalog.keys.objects_prefix, owned.catalog.keys.staging_prefix):
        owned.ownership.verify()
        objects.delete_unfinished(list(objects.unfinished_uploads(prefix)))
        names = (info.key for info in objects.list(prefix))
        while some := list(islice(names, _DELETED_AT_ONCE)):
            owned.ownership.verify()
            objects.delete(some)
    owned.remove_everything()
