"""Switching the catalog from many objects to one, beside an owner that ships and deletes at the same time.

Nothing here needs the owner's claim. What an owner changes it changes on versions, and so does a switch; these are the
places where both could meet.
- The newest descriptor belongs to the owner: it may be about to publish it once more, because the answer got lost. It
  is never replaced. Those before it are changed by nobody but retention and a rebuild.
- Retention removes descriptors below the start, on their versions. If it was faster, the switch of that object does not
  happen; if the switch was faster, the new descriptor stays until all of it is below the start.
- A rebuild writes descriptors anew, so that no version is what it was, and the switch does not happen.

How one object is switched, and what a reader finds meanwhile
1. The new descriptor takes the key of the first one. From here on it is found from there.
2. The others go, the first one first. An offset whose old descriptor is still there is read through that; the objects
   of both are in the store. An offset whose old descriptor has gone finds no other key in front of it but that of the
   new descriptor, since those in between went before.
So every offset is found at every moment, with the same message. Where the store changes many keys at once, all of it is
one step, or few.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from tidelog.clock import Clock
from tidelog.errors import ConflictError, DataError, InputError, NotFoundError, TidelogError
from tidelog.tier import owner as documents
from tidelog.tier.catalog import Catalog
from tidelog.tier.descriptor import Descriptor, encode_descriptor
from tidelog.tier.keys import ObjectId, padded
from tidelog.tier.metadata.store import MAX_VALUE_BYTES, Check, Delete, Put
from tidelog.tier.object_store import ObjectStore
from tidelog.tier.replacement import (
    Replaced,
    Replacement,
    ReplacementState,
    Waiting,
    read_replacement,
    read_state,
)

# etcd takes 128 in one transaction.
_KEYS_AT_ONCE = 100
_ATTEMPTS = 20


class Replacing:
    """One generation, from its beginning to its switch, in the hands of whoever builds it."""

    def __init__(
        self, catalog: Catalog, objects: ObjectStore, clock: Clock, state: ReplacementState, version: str
    ) -> None:
        self.generation = state.generation
        self._catalog = catalog
        self._objects = objects
        self._clock = clock
        self._state = state
        self._version = version

    def renew(self) -> None:
        """Says that it is still being worked on; ConflictError when somebody else has taken over."""
        self._become(renewed_us=self._clock.now_us())

    def switch(self, replacements: Sequence[Replacement]) -> list[Replacement]:
        """Makes the new objects part of the topic; returns those for which that was still possible."""
        for one in replacements:
            self._check(one)
        _refuse_deleted(self._catalog)
        metadata, keys = self._catalog.metadata, self._catalog.keys
        for one in replacements:
            metadata.put(keys.replacement(self.generation, one.descriptor.start_offset), documents.encode(one))
        starts = tuple(one.descriptor.start_offset for one in replacements)
        self._become(phase="switching", starts=starts)
        return _finish(self._catalog, self._clock, self._state)

    def abandon(self) -> None:
        """Gives up what is being built: what was uploaded is in nobody's way, the sweep removes it.

        What has begun to be switched can only be finished, which the next one does.
        """
        if self._state.phase == "building":
            self._become(phase="idle")

    @contextlib.contextmanager
    def abandoned_on_error(self) -> Iterator[None]:
        """Who fails within says so at once, so that the next one does not have to wait."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(TidelogError):
                self.abandon()
            raise

    def _check(self, one: Replacement) -> None:
        found = self._objects.head(self._catalog.keys.object(one.descriptor.name))
        if found.size != one.descriptor.size:
            raise DataError(f"{found.key} has {found.size} bytes, not {one.descriptor.size}", operation="compact")
        if len(documents.encode(one)) > MAX_VALUE_BYTES:
            raise InputError(f"{one.descriptor.object_id} replaces too many objects at once", operation="compact")

    def _become(self, **changes: object) -> None:
        """Changes the state, unless it is another one's by now. A cleanup may change what waits in it meanwhile."""
        key, metadata = self._catalog.keys.replacement_state, self._catalog.metadata
        for _ in range(_ATTEMPTS):
            state = msgspec.structs.replace(self._state, **changes)
            try:
                versions = metadata.commit([Check(key, self._version)], [Put(key, documents.encode(state))])
            except ConflictError:
                self._look_again()
            else:
                self._state, self._version = state, versions[key]
                return
        raise ConflictError("the state of the compaction changes all the time", operation="compact")

    def _look_again(self) -> None:
        state, version = read_state(self._catalog)
        if version is None or (state.generation, state.phase) != (self.generation, "building"):
            raise ConflictError(
                f"another compaction has taken over from number {self.generation}",
                operation="compact",
                hint="Nothing was changed by this one; let the other one end",
            )
        self._state, self._version = state, version


def begin(catalog: Catalog, objects: ObjectStore, clock: Clock, *, take_over: bool = False) -> Replacing:
    """Takes the next generation; what another one has begun to switch is finished first.

    ConflictError while somebody else is at work, unless that is to be taken over.
    """
    for _ in range(_ATTEMPTS):
        finish(catalog, clock)
        state, version = read_state(catalog)
        now_us = clock.now_us()
        if not take_over and state.is_at_work(now_us):
            raise ConflictError(
                f"a compaction of this topic is under way on {state.host}, process {state.pid}",
                operation="compact",
                hint="Let it end; one whose process is gone can be taken over with --take-over",
            )
        used = max((name.generation for name in _names(catalog, objects)), default=0)
        mine = state.built_by_here(max(state.generation, used) + 1, now_us)
        _refuse_deleted(catalog)
        key = catalog.keys.replacement_state
        with contextlib.suppress(ConflictError):  # somebody was first, and is found at work by the next look
            versions = catalog.metadata.commit([Check(key, version)], [Put(key, documents.encode(mine))])
            _forget_abandoned(catalog, mine)
            return Replacing(catalog, objects, clock, mine, versions[key])
    raise ConflictError("the state of the compaction changes all the time", operation="compact")


def _forget_abandoned(catalog: Catalog, state: ReplacementState) -> None:
    """Removes what earlier generations wrote down and never came to switch to."""
    prefix = catalog.keys.replacements_prefix
    known = {padded(one.generation) for one in state.waiting} | {"state"}
    for key in catalog.metadata.keys(prefix):
        if key.removeprefix(prefix).partition("/")[0] not in known:
            catalog.metadata.delete(key)


def _names(catalog: Catalog, objects: ObjectStore) -> Iterable[ObjectId]:
    """All names in the store: a catalog that was made anew knows of no generation."""
    prefix = catalog.keys.objects_prefix
    return (name for info in objects.list(prefix) if (name := catalog.keys.parse_object(info.key)) is not None)


def _refuse_deleted(catalog: Catalog) -> None:
    mark = catalog.start_mark()
    if catalog.owner() is None or mark is None or mark[0].deleted:
        raise NotFoundError("the topic has no catalog, or is being deleted", operation="compact")


# Finishing


def settle(catalog: Catalog, clock: Clock) -> None:
    """For a new owner, where only owners compact: finishes what was being switched, takes away what was being built.

    Whoever was building it finds out when it wants to switch.
    """
    for _ in range(_ATTEMPTS):
        finish(catalog, clock)
        state, version = read_state(catalog)
        if state.phase == "idle":
            return
        key = catalog.keys.replacement_state
        idle = msgspec.structs.replace(state, phase="idle")
        if state.phase == "building":
            with contextlib.suppress(ConflictError):  # it has gone on, and is looked at again
                catalog.metadata.commit([Check(key, version)], [Put(key, documents.encode(idle))])
    raise ConflictError("the state of the compaction changes all the time", operation="compact")


def finish(catalog: Catalog, clock: Clock) -> list[Replacement]:
    """Carries out what was begun to be switched, by whomever; returns what was switched to."""
    state, _ = read_state(catalog)
    return _finish(catalog, clock, state) if state.phase == "switching" else []


def _finish(catalog: Catalog, clock: Clock, state: ReplacementState) -> list[Replacement]:
    found = [_written(catalog, state.generation, start) for start in state.starts]
    switched = [one for one in found if _switch_one(catalog, one)]
    _forget_starts(catalog, switched)
    waiting = Waiting(generation=state.generation, switched_us=clock.now_us(), starts=state.starts)
    for _ in range(_ATTEMPTS):
        if _has_switched(catalog, waiting):
            return switched
    raise ConflictError("the state of the compaction changes all the time", operation="compact")


def _has_switched(catalog: Catalog, done: Waiting) -> bool:
    """Writes down that a generation has switched, unless somebody else was faster and did."""
    state, version = read_state(catalog)
    if (state.phase, state.generation) != ("switching", done.generation):
        return True
    key = catalog.keys.replacement_state
    after = ReplacementState(generation=state.generation, waiting=(*state.waiting, done))
    try:
        catalog.metadata.commit([Check(key, version)], [Put(key, documents.encode(after))])
    except ConflictError:
        return False
    return True


def _written(catalog: Catalog, generation: int, start_offset: int) -> Replacement:
    found = read_replacement(catalog, generation, start_offset)
    if found is None:
        key = catalog.keys.replacement(generation, start_offset)
        raise DataError(
            f"{key} is gone, which says what a compaction has to replace",
            operation="compact",
            hint="`tidelog topic rebuild-catalog --replace` makes the catalog anew from the objects",
        )
    return found


def _switch_one(catalog: Catalog, one: Replacement) -> bool:
    """Whether the catalog has the new object then; it has not where the old ones were changed meanwhile."""
    if catalog.metadata.supports_multi_key and _switch_at_once(catalog, one):
        return True
    if not _place(catalog, one):
        return False
    gone = [catalog.keys.descriptor(old.name.start) for old in one.replaced[1:] if _take_away(catalog, old)]
    catalog.metadata.purge(gone)
    return True


def _switch_at_once(catalog: Catalog, one: Replacement) -> bool:
    """As many keys as a transaction takes; what another one has changed is left to the steps one by one."""
    keys = catalog.keys
    for begin_at in range(0, len(one.replaced), _KEYS_AT_ONCE):
        part = one.replaced[begin_at : begin_at + _KEYS_AT_ONCE]
        checks = [Check(keys.descriptor(old.name.start), old.version) for old in part]
        writes: list[Put | Delete] = [Delete(check.key) for check in checks]
        if begin_at == 0:
            writes[0] = Put(checks[0].key, encode_descriptor(one.descriptor))
        try:
            catalog.metadata.commit(checks, writes)
        except ConflictError:
            return False
    return True


def _place(catalog: Catalog, one: Replacement) -> bool:
    """Puts the new descriptor where the first of the old ones is, if that is what it was."""
    start_offset = one.descriptor.start_offset
    for _ in range(_ATTEMPTS):
        found = catalog.find(start_offset)
        if found is None or not isinstance(found.value, Descriptor):
            return False
        if found.value.object_id == one.descriptor.object_id:
            return True
        if found.version != one.replaced[0].version:
            return False
        key = catalog.keys.descriptor(start_offset)
        try:
            catalog.metadata.commit([Check(key, found.version)], [Put(key, encode_descriptor(one.descriptor))])
        except ConflictError:
            continue
        return True
    return False


def _take_away(catalog: Catalog, old: Replaced) -> bool:
    """Removes a descriptor that is inside the new one; returns whether it is gone."""
    key, version = catalog.keys.descriptor(old.name.start), old.version
    for _ in range(_ATTEMPTS):
        try:
            catalog.metadata.commit([Check(key, version)], [Delete(key)])
        except ConflictError:
            found = catalog.find(old.name.start)
            if found is None:
                return True
            if not isinstance(found.value, Descriptor) or found.value.object_id != old.object_id:
                return False  # whoever has put another one there had its reasons
            version = found.version
        else:
            return True
    return False


def _forget_starts(catalog: Catalog, switched: Sequence[Replacement]) -> None:
    """`cur` names starts where looking for them is expensive; it is a hint, and whoever is faster may keep it."""
    gone = {old.name.start for one in switched for old in one.replaced[1:]}
    changed = None if catalog.metadata.floor_is_cheap else catalog.current_without(gone)
    if changed is not None:
        value, version = changed
        with contextlib.suppress(ConflictError):
            catalog.metadata.commit([Check(catalog.keys.current, version)], [Put(catalog.keys.current, value)])
