"""Deleting what a compaction replaced, some time after its switch: plan, show, apply.

The time is for readers that hold an old descriptor. One that finds its object gone asks the catalog again and goes on,
so the time spares a request and is not what keeps the messages.

Invariants
- What is to be deleted was written down before the switch. An object goes only when no descriptor names it and all of
  its offsets are in published objects that are there, of the right size; what could not be asked is raised.
- Objects go oldest first: a catalog from an old backup finds its newest object gone, or all of them there.
- If another node claims the topic meanwhile, nothing more is deleted: a rebuild may be looking at the objects.
- What was deleted is forgotten only when it is gone, so an interrupted cleanup is made again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from tidelog.errors import ConflictError
from tidelog.tier import owner as documents
from tidelog.tier.catalog import Catalog
from tidelog.tier.keys import ObjectId
from tidelog.tier.metadata.store import Check, Put
from tidelog.tier.object_store import ObjectStore
from tidelog.tier.replacement import Replacement, ReplacementState, Waiting, read_replacement, read_state
from tidelog.tier.retention import is_safe_to_remove, names_object

DEFAULT_GRACE_SECONDS = 3600
_ATTEMPTS = 20


class ObsoleteObject(msgspec.Struct, frozen=True, kw_only=True):
    """An object that another one has taken the place of."""

    key: str
    size: int
    start_offset: int
    end_offset: int
    replaced_by: str


class CleanupPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be deleted now, and what waits. `claim` is that of the owner when the plan was made."""

    claim: str | None
    due: tuple[Waiting, ...] = ()
    objects: tuple[ObsoleteObject, ...] = ()
    waiting_objects: int = 0
    waiting_bytes: int = 0

    @property
    def bytes(self) -> int:
        return sum(one.size for one in self.objects)

    @property
    def is_empty(self) -> bool:
        return not self.due


class CleanupReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was deleted, and what turned out otherwise when it was looked at again, and why it stayed."""

    objects: tuple[str, ...] = ()
    bytes: int = 0
    skipped: tuple[tuple[str, str], ...] = ()


def plan_cleanup(catalog: Catalog, now_us: int, grace_seconds: float = DEFAULT_GRACE_SECONDS) -> CleanupPlan:
    """Looks at what compactions have replaced; changes nothing."""
    state, _ = read_state(catalog)
    due = tuple(one for one in state.waiting if now_us - one.switched_us >= grace_seconds * 1_000_000)
    later = [one for one in state.waiting if one not in due]
    waiting = [old for one in later for found in _written(catalog, one) for old in found.replaced]
    found = (found for one in due for written in _written(catalog, one) for found in _of(catalog, written))
    return CleanupPlan(
        claim=_claim(catalog),
        due=due,
        objects=tuple({one.key: one for one in found}.values()),
        waiting_objects=len(waiting),
        waiting_bytes=sum(one.size for one in waiting),
    )


def _written(catalog: Catalog, waiting: Waiting) -> Iterator[Replacement]:
    for start in waiting.starts:
        found = read_replacement(catalog, waiting.generation, start)
        if found is not None:
            yield found


def _of(catalog: Catalog, written: Replacement) -> Iterator[ObsoleteObject]:
    """The old objects; and the new one, where the switch to it did not happen, or it was replaced itself by now."""
    new = written.descriptor
    if not names_object(catalog, new.start_offset, new.object_id):
        yield _obsolete(catalog, new.name, new.size, "what is there")
    for old in written.replaced:
        yield _obsolete(catalog, old.name, old.size, new.object_id)


def _obsolete(catalog: Catalog, name: ObjectId, size: int, replaced_by: str) -> ObsoleteObject:
    return ObsoleteObject(
        key=catalog.keys.object(name),
        size=size,
        start_offset=name.start,
        end_offset=name.end,
        replaced_by=replaced_by,
    )


def apply_cleanup(plan: CleanupPlan, catalog: Catalog, objects: ObjectStore) -> CleanupReport:
    """Deletes what the plan says, each thing only if it is still so. May be interrupted anywhere, and made again."""
    applying = _Applying(plan, catalog, objects)
    for waiting in plan.due:
        for written in list(_written(catalog, waiting)):
            applying.delete(written)
        if applying.is_stopped:
            break
        _forget(catalog, waiting)
    return applying.report()


class _Applying:
    def __init__(self, plan: CleanupPlan, catalog: Catalog, objects: ObjectStore) -> None:
        self._plan = plan
        self._catalog = catalog
        self._objects = objects
        self._deleted: list[ObsoleteObject] = []
        self._skipped: list[tuple[str, str]] = []
        self.is_stopped = False

    def delete(self, written: Replacement) -> None:
        wanted = list(_of(self._catalog, written))
        first, behind = written.descriptor.start_offset, written.descriptor.next_offset
        if self.is_stopped or _claim(self._catalog) != self._plan.claim:
            self.is_stopped = True
            self._skip(wanted, "another node has claimed the topic since")
        elif not is_safe_to_remove(self._catalog, self._objects, first, behind):
            self._skip(wanted, "its offsets are not all in other objects that are there")
        else:
            named = self._named(wanted)
            self._skip([one for one in wanted if one.key in named], "the catalog has it")
            named |= {one.key for one in self._deleted}
            gone = [one for one in wanted if one.key not in named]
            self._objects.delete([one.key for one in gone])
            self._deleted += gone

    def _named(self, wanted: Sequence[ObsoleteObject]) -> set[str]:
        """Those that a descriptor names: where no key is there is none, and few keys are there as a rule."""
        keys = self._catalog.keys
        first = keys.descriptor(wanted[0].start_offset)
        present = set(self._catalog.metadata.keys(keys.segments_prefix, start=first, limit=len(wanted) + 1))
        return {
            one.key
            for one in wanted
            if keys.descriptor(one.start_offset) in present
            and names_object(self._catalog, one.start_offset, one.key.rpartition("/")[2])
        }

    def _skip(self, found: Iterable[ObsoleteObject], why: str) -> None:
        self._skipped += [(one.key, why) for one in found]

    def report(self) -> CleanupReport:
        return CleanupReport(
            objects=tuple(one.key for one in self._deleted),
            bytes=sum(one.size for one in self._deleted),
            skipped=tuple(self._skipped),
        )


def _forget(catalog: Catalog, waiting: Waiting) -> None:
    """The entry of the state goes last: what is not in it is never looked for again."""
    keys, metadata = catalog.keys, catalog.metadata
    for start in waiting.starts:
        metadata.delete(keys.replacement(waiting.generation, start))
    for attempt in range(_ATTEMPTS):
        state, version = read_state(catalog)
        kept = tuple(one for one in state.waiting if one.generation != waiting.generation)
        if version is None or len(kept) == len(state.waiting):
            return
        write = Put(keys.replacement_state, documents.encode(_with_waiting(state, kept)))
        try:
            metadata.commit([Check(keys.replacement_state, version)], [write])
        except ConflictError:
            if attempt == _ATTEMPTS - 1:
                raise
        else:
            return


def _with_waiting(state: ReplacementState, waiting: tuple[Waiting, ...]) -> ReplacementState:
    return msgspec.structs.replace(state, waiting=waiting)


def _claim(catalog: Catalog) -> str | None:
    found = catalog.owner()
    return None if found is None else found[0].claim
