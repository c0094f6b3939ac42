"""Commits a rewrite: switches the catalog from many objects to one, while the owner ships and deletes.

Nothing here needs the owner's claim. An owner changes entries on their versions, and so does a switch; these are the
points where both could meet.
- The newest descriptor belongs to the owner: it may be about to publish it once more, because the answer got lost. It
  is never replaced. Those before it are changed by nobody but retention and a rebuild.
- Retention removes descriptors below the start, on their versions. If it was faster, the switch of that object does not
  happen; if the switch was faster, the new descriptor stays until all of it is below the start.
- A rebuild rewrites the descriptors, so that every version changes, and the switch does not happen.

How one object is switched, and what a reader finds meanwhile
1. The new descriptor takes the key of the first one. From here on it is found from there.
2. The others are removed, the first one first. An offset whose old descriptor still exists is read through that; the
   objects of both are in the store. An offset whose old descriptor is gone finds no other key before it but that of
   the new descriptor, since those in between were removed before.
So every offset is found at any time, with the same message. Where the store changes many keys at once, all of it is one
step, or few.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from tidelog.clock import Clock
from tidelog.cold.catalog import Catalog, Descriptor, encode_descriptor
from tidelog.errors import ConflictError, DataError, InputError, NotFoundError, TidelogError
from tidelog.events import tell
from tidelog.store.document import VersionedDocument, decode_json, encode_json, retried
from tidelog.store.keys import ObjectId, padded, parse_object_id
from tidelog.store.metadata.base import MAX_VALUE_BYTES, Check, Delete, Put
from tidelog.store.object_store import ObjectStore

_logger = logging.getLogger("tidelog.cold")

# etcd takes 128 in one transaction.
_KEYS_AT_ONCE = 100

# The records of a rewrite (objects that replace others), so that any process can finish it.
#
#     replacements/state                   one per topic: which generation was used last, and how far it is
#     replacements/{generation}/{start}    one for each new object: its descriptor, and what it is to replace
#
#     idle ──> building ──> switching ──> idle, with the replaced objects awaiting deletion
#
# Invariants
# - One generation is at work at a time: a rewrite begins by taking the next one by compare-and-swap of the state. A
#   generation is never reused, so no object name is.
# - While it is `building`, nothing in the catalog has changed, and another process may take over: the objects already
#   made become orphans. It becomes `switching` in one step, after everything to be done was recorded: from there on it
#   can only be finished, by any process, and finishing twice changes nothing.
# - A process that is `building` renews its state from time to time. That only informs the next process, and nothing
#   depends on it: one that was taken over finds out when it tries to switch.


Phase = Literal["idle", "building", "switching"]
# A builder that has not renewed its state for so long is considered dead.
SILENT_US = 120 * 1_000_000


class RewrittenObject(msgspec.Struct, frozen=True, array_like=True):
    """An object that is to be replaced. `version` is that of its descriptor when the new object was planned."""

    object_id: str
    version: str
    size: int

    @property
    def name(self) -> ObjectId:
        """Its name, taken apart."""
        name = parse_object_id(self.object_id)
        assert name is not None, "only objects of ours are replaced"
        return name


class Rewrite(msgspec.Struct, frozen=True, kw_only=True):
    """A new object and those that it replaces: neighbours, in order, with the same offsets together."""

    descriptor: Descriptor
    replaced: tuple[RewrittenObject, ...]


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """A generation that has switched: the objects that it replaced are to be deleted some time after that."""

    generation: int
    switched_us: int
    starts: tuple[int, ...]


class RewriteState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far the compactions of a topic are. `starts` are those of the new objects that are being switched to."""

    generation: int = 0
    phase: Phase = "idle"
    host: str = ""
    pid: int = 0
    renewed_us: int = 0
    starts: tuple[int, ...] = ()
    waiting: tuple[Waiting, ...] = ()

    def is_at_work(self, now_us: int) -> bool:
        """Whether a builder seems to be at work: it has renewed its state recently, and is not known to be dead."""
        if self.phase != "building" or now_us - self.renewed_us > SILENT_US:
            return False
        return self.host != socket.gethostname() or _is_running(self.pid)

    def built_by_here(self, generation: int, now_us: int) -> RewriteState:
        """The state in which this process builds the objects of a generation."""
        return msgspec.structs.replace(
            self,
            generation=generation,
            phase="building",
            host=socket.gethostname(),
            pid=os.getpid(),
            renewed_us=now_us,
        )


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def state_document(catalog: Catalog) -> VersionedDocument[RewriteState]:
    """The state of a rewrite of the topic, for its participants."""
    return catalog.document(catalog.keys.rewrite_state, RewriteState)


def read_state(catalog: Catalog) -> RewriteState:
    """How far it is; idle where there never was a compaction."""
    found = state_document(catalog).read()
    return RewriteState() if found is None else found.value


def read_rewrite(catalog: Catalog, generation: int, start_offset: int) -> Rewrite | None:
    """What was written down for one new object; None when that is done with."""
    key = catalog.keys.replacement(generation, start_offset)
    entry = catalog.metadata.get(key)
    return None if entry is None else decode_json(entry.value, key, Rewrite)


class PendingRewrites(msgspec.Struct, frozen=True):
    """Objects that no descriptor needs to name, because a compaction still speaks for them."""

    building: int | None
    replaced: frozenset[ObjectId]

    def __contains__(self, name: ObjectId) -> bool:
        return name in self.replaced or (name.generation > 0 and name.generation == self.building)


def pending_rewrites(catalog: Catalog) -> PendingRewrites:
    """Which objects orphan removal has to leave alone: those being made, and those that await deletion."""
    state = read_state(catalog)
    starts = [(one.generation, start) for one in state.waiting for start in one.starts]
    starts += [(state.generation, start) for start in state.starts]
    found = (read_rewrite(catalog, *place) for place in starts)
    replaced = frozenset(old.name for one in found if one is not None for old in one.replaced)
    return PendingRewrites(None if state.phase == "idle" else state.generation, replaced)


# The commit


class RewriteCommit:
    """One generation, from its beginning to its switch, for the process that builds it."""

    def __init__(self, catalog: Catalog, objects: ObjectStore, clock: Clock, state: RewriteState) -> None:
        self.generation = state.generation
        self._catalog = catalog
        self._objects = objects
        self._clock = clock
        self._state = state

    def renew(self) -> None:
        """Renews the builder's state; ConflictError when another process has taken over."""
        self._become(renewed_us=self._clock.now_us())

    def switch(self, replacements: Sequence[Rewrite]) -> list[Rewrite]:
        """Makes the new objects part of the topic; returns those for which that was still possible."""
        for one in replacements:
            self._check(one)
        _refuse_deleted(self._catalog)
        metadata, keys = self._catalog.metadata, self._catalog.keys
        for one in replacements:
            metadata.put(keys.replacement(self.generation, one.descriptor.start_offset), encode_json(one))
        starts = tuple(one.descriptor.start_offset for one in replacements)
        self._become(phase="switching", starts=starts)
        return _finish(self._catalog, self._clock, self._state)

    def abandon(self) -> None:
        """Gives up what is being built: uploaded objects do no harm, orphan removal deletes them.

        A switch that has begun can only be finished, which the next builder does.
        """
        if self._state.phase == "building":
            self._become(phase="idle")

    @contextlib.contextmanager
    def abandoned_on_error(self) -> Iterator[None]:
        """Records a failure within at once, so that the next builder does not have to wait."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(TidelogError):
                self.abandon()
            raise

    def _check(self, one: Rewrite) -> None:
        found = self._objects.head(self._catalog.keys.object(one.descriptor.name))
        if found.size != one.descriptor.size:
            raise DataError(f"{found.key} has {found.size} bytes, not {one.descriptor.size}", operation="compact")
        if len(encode_json(one)) > MAX_VALUE_BYTES:
            raise InputError(f"{one.descriptor.object_id} replaces too many objects at once", operation="compact")

    def _become(self, **changes: object) -> None:
        """Changes the state, unless it is another one's by now. A cleanup may change what waits in it meanwhile."""

        def become(known: RewriteState | None) -> RewriteState:
            if known is None or (known.generation, known.phase) != (self.generation, "building"):
                raise ConflictError(
                    f"another compaction has taken over from number {self.generation}",
                    operation="compact",
                    hint="Nothing was changed by this one; let the other one end",
                )
            return msgspec.structs.replace(known, **changes)

        self._state = state_document(self._catalog).update(become, rewrites=True)


def begin(catalog: Catalog, objects: ObjectStore, clock: Clock, *, take_over: bool = False) -> RewriteCommit:
    """Takes the next generation, after finishing any switch that another has begun.

    ConflictError while another process is at work, unless that is to be taken over.
    """

    def take_next(known: RewriteState | None) -> RewriteState:
        state = _finished(catalog, clock, known)
        now_us = clock.now_us()
        if not take_over and state.is_at_work(now_us):
            raise ConflictError(
                f"a compaction of this topic is under way on {state.host}, process {state.pid}",
                operation="compact",
                hint="Let it end; one whose process is gone can be taken over with --take-over",
            )
        used = max((name.generation for name in _names(catalog, objects)), default=0)
        _refuse_deleted(catalog)
        return state.built_by_here(max(state.generation, used) + 1, now_us)

    mine = state_document(catalog).update(take_next, rewrites=True)
    _forget_abandoned(catalog, mine)
    return RewriteCommit(catalog, objects, clock, mine)


def _forget_abandoned(catalog: Catalog, state: RewriteState) -> None:
    """Removes what earlier generations wrote down and never came to switch to."""
    prefix = catalog.keys.rewrites_prefix
    known = {padded(one.generation) for one in state.waiting} | {"state"}
    for key in catalog.metadata.keys(prefix):
        if key.removeprefix(prefix).partition("/")[0] not in known:
            catalog.metadata.delete(key)


def _names(catalog: Catalog, objects: ObjectStore) -> Iterable[ObjectId]:
    """All names in the store: a rebuilt catalog knows of no generation."""
    prefix = catalog.keys.objects_prefix
    return (name for info in objects.list(prefix) if (name := catalog.keys.parse_object(info.key)) is not None)


def _refuse_deleted(catalog: Catalog) -> None:
    mark = catalog.start_mark()
    if catalog.owner() is None or mark is None or mark[0].deleted:
        raise NotFoundError("the topic has no catalog, or is being deleted", operation="compact")


# Finishing


def settle(catalog: Catalog, clock: Clock) -> None:
    """For a new owner, where only owners compact: finishes a switch in progress, discards what was being built.

    Its builder finds out when it tries to switch.
    """

    def idle(known: RewriteState | None) -> RewriteState | None:
        return None if known is None else msgspec.structs.replace(_finished(catalog, clock, known), phase="idle")

    state_document(catalog).update(idle)


def finish(catalog: Catalog, clock: Clock) -> list[Rewrite]:
    """Carries out what was begun to be switched, by whomever; returns what was switched to."""
    state = read_state(catalog)
    return _finish(catalog, clock, state) if state.phase == "switching" else []


def _finished(catalog: Catalog, clock: Clock, known: RewriteState | None) -> RewriteState:
    """The state after what was being switched is. It has another version then: a change of what was known fails."""
    if known is not None and known.phase == "switching":
        _finish(catalog, clock, known)
        return read_state(catalog)
    return known or RewriteState()


def _finish(catalog: Catalog, clock: Clock, state: RewriteState) -> list[Rewrite]:
    found = [_written(catalog, state.generation, start) for start in state.starts]
    switched = [one for one in found if _switch_one(catalog, one)]
    _forget_starts(catalog, switched)
    done = Waiting(generation=state.generation, switched_us=clock.now_us(), starts=state.starts)

    def has_switched(known: RewriteState | None) -> RewriteState | None:
        if known is None or (known.phase, known.generation) != ("switching", done.generation):
            return None  # somebody else was faster, and has written it down
        return RewriteState(generation=known.generation, waiting=(*known.waiting, done))

    state_document(catalog).update(has_switched)
    _tell(catalog, state.generation, switched)
    return switched


def _tell(catalog: Catalog, generation: int, switched: Sequence[Rewrite]) -> None:
    """About a topic: an engine, which compacts its log itself, tells that as a whole."""
    if switched and catalog.keys.noun == "topic":
        tell(
            _logger,
            "objects_merged",
            topic=catalog.keys.subject,
            generation=generation,
            first_offset=switched[0].descriptor.start_offset,
            next_offset=switched[-1].descriptor.next_offset,
            replaced_objects=sum(len(one.replaced) for one in switched),
            objects=len(switched),
            bytes=sum(one.descriptor.size for one in switched),
        )


def _written(catalog: Catalog, generation: int, start_offset: int) -> Rewrite:
    found = read_rewrite(catalog, generation, start_offset)
    if found is None:
        key = catalog.keys.replacement(generation, start_offset)
        raise DataError(
            f"{key} is gone, which says what a compaction has to replace",
            operation="compact",
            hint="`tidelog topic rebuild-catalog --replace` rebuilds the catalog from the objects",
        )
    return found


def _switch_one(catalog: Catalog, one: Rewrite) -> bool:
    """Whether the catalog has the new object then; it has not where the old ones were changed meanwhile."""
    if catalog.metadata.supports_multi_key and _switch_at_once(catalog, one):
        return True
    if not _place(catalog, one):
        return False
    gone = [catalog.keys.descriptor(old.name.start) for old in one.replaced[1:] if _take_away(catalog, old)]
    catalog.metadata.purge(gone)
    return True


def _switch_at_once(catalog: Catalog, one: Rewrite) -> bool:
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


def _place(catalog: Catalog, one: Rewrite) -> bool:
    """Puts the new descriptor where the first of the old ones is, if that is what it was."""
    start_offset = one.descriptor.start_offset
    key = catalog.keys.descriptor(start_offset)

    def place() -> bool:
        found = catalog.find(start_offset)
        if found is None or not isinstance(found.value, Descriptor):
            return False
        if found.value.object_id == one.descriptor.object_id:
            return True
        if found.version != one.replaced[0].version:
            return False
        catalog.metadata.commit([Check(key, found.version)], [Put(key, encode_descriptor(one.descriptor))])
        return True

    return retried(place, key)


def _take_away(catalog: Catalog, old: RewrittenObject) -> bool:
    """Removes a descriptor that is inside the new one; returns whether it is gone."""
    key, version = catalog.keys.descriptor(old.name.start), old.version

    def take_away() -> bool:
        nonlocal version
        try:
            catalog.metadata.commit([Check(key, version)], [Delete(key)])
        except ConflictError:
            found = catalog.find(old.name.start)
            if found is None:
                return True
            if not isinstance(found.value, Descriptor) or found.value.object_id != old.object_id:
                return False  # another process put another one there for a reason
            version = found.version
            raise
        return True

    return retried(take_away, key)


def _forget_starts(catalog: Catalog, switched: Sequence[Rewrite]) -> None:
    """`cur` names starts where searching for them is expensive; it is a hint, and a faster writer may keep it."""
    gone = {old.name.start for one in switched for old in one.replaced[1:]}
    changed = None if catalog.metadata.floor_is_cheap else catalog.current_without(gone)
    if changed is not None:
        value, version = changed
        with contextlib.suppress(ConflictError):
            catalog.metadata.commit([Check(catalog.keys.current, version)], [Put(catalog.keys.current, value)])
