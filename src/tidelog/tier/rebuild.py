"""The catalog, made anew from the objects: the bucket alone gives the topic back.

Objects say in their names which offsets they hold and under which epoch they were made. All that become part of the
topic are read and checked, frame by frame; `object_chain` says which those are.

Invariants
- Nothing is written before everything has been read and found to be good.
- The entry of the owner is what makes a catalog exist. It is written last: a crash on the way leaves no catalog, and
  the next attempt begins anew. A catalog that is there is replaced only on demand: its owner is fenced first, and its
  entry is taken away while the others are written.
- The epoch of the new entry is higher than every epoch that objects or entries mention.
- The start of the topic does not go back, where it is known.
- No object is changed or deleted. What is not part of the chain is reported; the sweep may remove it later.
- Cursors of subscriptions stay as they are. A disk with messages that were not shipped stays the end of the topic only
  where a catalog that could be read ends at the same offset as the new one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import msgspec

from tidelog.clock import Clock
from tidelog.errors import (
    ConflictError,
    CorruptionError,
    DataError,
    GapError,
    InputError,
    NotFoundError,
    OtherLogError,
    offsets_text,
)
from tidelog.log.binding import new_log_id
from tidelog.tier import owner as documents
from tidelog.tier.catalog import Catalog, Current
from tidelog.tier.descriptor import Descriptor, Reservation, encode_descriptor
from tidelog.tier.keys import ObjectId, TopicKeys, is_part, padded
from tidelog.tier.known_starts import MAX_NAMED_STARTS
from tidelog.tier.metadata.store import Check, Delete, Entry, MetadataStore, Put
from tidelog.tier.object_chain import Chain, choose_chain
from tidelog.tier.object_check import ObjectCheck
from tidelog.tier.object_store import ObjectInfo, ObjectStore
from tidelog.tier.owned_catalog import OwnedCatalog
from tidelog.tier.owner import Owner, StartMark
from tidelog.tier.ownership import Ownership, new_claim

Progress = Callable[[int, int], None]
NODE = "rebuild"
_TOPICS_PREFIX = "storage/topics/"
# Sorts behind every name of an object, which begins with `data`.
_BEHIND_OBJECTS = "e"


class Damaged(msgspec.Struct, frozen=True, kw_only=True):
    """An object that was left out, and why."""

    key: str
    byte: int
    reason: str


class RebuildReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the new catalog has, and what of the bucket it has not."""

    epoch: int
    start_offset: int
    next_offset: int
    objects: int
    messages: int
    bytes: int
    gaps: tuple[tuple[int, int], ...] = ()
    damaged: tuple[Damaged, ...] = ()
    orphans: tuple[str, ...] = ()
    below_start: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()


def rebuild_catalog(
    metadata: MetadataStore,
    keys: TopicKeys,
    objects: ObjectStore,
    *,
    clock: Clock,
    node: str = NODE,
    time_field: int | None = None,
    progress: Progress | None = None,
    allow_gaps: bool = False,
    replace: bool = False,
    start_offset: int | None = None,
    lineage: str | None = None,
) -> RebuildReport:
    """Makes the catalog of a topic from its objects.

    allow_gaps    go on where offsets are missing, and without objects that are damaged; else GapError, CorruptionError
    replace       also if there is a catalog: whoever owns the topic is fenced
    start_offset  leave out what is before; for a bucket in which the remains of a retention begin the topic
    lineage       the claim of a disk whose files are still the end of the topic; without it they are put aside
    progress      is told how many bytes of how many have been checked
    """
    run = _Rebuild(metadata, keys, objects, clock, time_field, progress)
    if run.has_owner and not replace:
        raise InputError(
            "the topic has a catalog",
            operation="rebuild",
            hint="Replacing it fences whoever owns the topic; ask for that if you mean it",
        )
    run.refuse_deleted_topic()
    if run.has_owner:
        run.fence(node)
    chain = run.choose(start_offset, allow_gaps=allow_gaps)
    return run.write(chain, node, lineage)


class _Rebuild:
    def __init__(
        self,
        metadata: MetadataStore,
        keys: TopicKeys,
        objects: ObjectStore,
        clock: Clock,
        time_field: int | None,
        progress: Progress | None,
    ) -> None:
        self._metadata = metadata
        self._keys = keys
        self._objects = objects
        self._clock = clock
        self._time_field = time_field
        self._progress = progress
        self._mark = self._start_mark()
        self._infos: dict[ObjectId, ObjectInfo] = {}
        self._foreign: list[str] = []
        self._good: dict[ObjectId, bytes] = {}
        self._damaged: dict[ObjectId, Damaged] = {}
        self._fenced_version: str | None = None
        self._known_end: int | None = None
        self._lineage: str | None = None
        self._log_id: str | None = None
        self._is_log_known = False
        self._start_offset: int | None = None
        self._checked_bytes = 0

    # What is there already. Damage in it is what a rebuild is for, so it counts as nothing.

    @property
    def has_owner(self) -> bool:
        return self._metadata.get(self._keys.owner) is not None

    def refuse_deleted_topic(self) -> None:
        if self._mark is not None and self._mark.deleted:
            raise InputError("the topic is being deleted", operation="rebuild", hint="Delete it again to finish that")

    def _start_mark(self) -> StartMark | None:
        entry = self._metadata.get(self._keys.start)
        try:
            return None if entry is None else documents.decode(entry.value, entry.key, StartMark)
        except DataError:
            return None

    def _next_epoch(self) -> int:
        entries = self._metadata.range(self._keys.metadata_prefix)
        floor = self._metadata.get(self._keys.epoch_floor)
        mentioned = [_epoch_in(entry) for entry in (*entries, *([] if floor is None else [floor]))]
        return 1 + max([*mentioned, *(name.epoch for name in self._infos)], default=0)

    # Fencing

    def fence(self, node: str) -> None:
        """From here on no earlier owner publishes anything: what is listed after this is all there is."""
        self._list()
        before = self._metadata.get(self._keys.owner)
        with contextlib.suppress(DataError):
            known = None if before is None else documents.decode(before.value, before.key, Owner)
            self._lineage, self._log_id = (None, None) if known is None else (known.lineage, known.log_id)
            self._is_log_known = known is not None
        owner = self._owner(node, self._lineage)
        check = Check(self._keys.owner, None if before is None else before.version)
        version = self._metadata.commit([check], [Put(self._keys.owner, documents.encode(owner))])[self._keys.owner]
        self._fenced_version = version
        if self._mark is None:
            return  # nobody has settled in, and to do so would say that the topic begins at 0
        ownership = Ownership(Catalog(self._metadata, self._keys), owner, version, None)
        with contextlib.suppress(DataError):  # a catalog that cannot be read has no next offset to hold
            self._known_end = OwnedCatalog(ownership, self._clock).settle_in(self._mark.start_offset)

    def _owner(self, node: str, lineage: str | None) -> Owner:
        claim = new_claim()
        now_us = self._clock.now_us()
        return Owner(
            epoch=self._next_epoch(),
            claim=claim,
            lineage=lineage or claim,
            node=node,
            claimed_us=now_us,
            log_id=self._log_id or new_log_id(),
        )

    # Reading

    def choose(self, start_offset: int | None, *, allow_gaps: bool) -> Chain:
        """The objects that are the topic, each of them checked."""
        self._list()
        known = None if self._mark is None else self._mark.start_offset
        self._start_offset = max((one for one in (known, start_offset) if one is not None), default=None)
        self._refuse_nothing(known)
        while True:
            chain = choose_chain(self._infos.keys() - self._damaged.keys(), self._start_offset)
            if chain.holes and not allow_gaps:
                raise _gap(*chain.holes[0])
            found = [self._is_good(name, chain, allow_gaps=allow_gaps) for name in chain.objects]
            if all(found):
                return chain

    def _refuse_nothing(self, known_start: int | None) -> None:
        if not self._infos and known_start is None:
            raise NotFoundError(f"{self._objects.url} has no objects of this topic", operation="rebuild")
        if self._start_offset != known_start and not choose_chain(self._infos, self._start_offset).objects:
            raise InputError(f"the topic has no objects from offset {self._start_offset} on", operation="rebuild")

    def _list(self) -> None:
        self._infos.clear()
        self._foreign.clear()
        for info in self._objects.list(self._keys.objects_prefix):
            name = self._keys.parse_object(info.key)
            if name is None:
                self._foreign.append(info.key)
            else:
                self._infos[name] = info

    def _is_good(self, name: ObjectId, chain: Chain, *, allow_gaps: bool) -> bool:
        if name in self._good:
            return True
        total = sum(self._infos[one].size for one in chain.objects)
        try:
            check = ObjectCheck(
                *(self._objects, self._infos[name], name, self._log_id, self._time_field, self._counting(total))
            )
            descriptor = check.descriptor()
            # Without a catalog that says it, the first object says which log it is, and all others must agree.
            self._log_id = self._log_id or descriptor.log_id
            self._good[name] = encode_descriptor(descriptor)
        except CorruptionError as error:
            if isinstance(error, OtherLogError) and not self._is_log_known:
                raise
            if not allow_gaps:
                raise
            self._damaged[name] = Damaged(key=self._infos[name].key, byte=error.byte, reason=error.message)
            return False
        return True

    def _counting(self, total_bytes: int) -> Callable[[int], None] | None:
        progress = self._progress
        if progress is None:
            return None

        def count(size: int) -> None:
            self._checked_bytes += size
            progress(min(self._checked_bytes, total_bytes), total_bytes)

        return count

    # Writing

    def write(self, chain: Chain, node: str, lineage: str | None) -> RebuildReport:
        """Entry by entry, the owner's last."""
        start_offset, next_offset = self._ends(chain)
        self._refuse_if_changed(chain)
        is_same_end = self._known_end == next_offset
        owner = self._owner(node, lineage or (self._lineage if is_same_end else None))
        if self._fenced_version is not None:
            self._write_start(start_offset, owner.epoch)  # which remembers the epoch while there is no owner
            self._metadata.commit([Check(self._keys.owner, self._fenced_version)], [Delete(self._keys.owner)])
        messages = self._write_descriptors(chain)
        self._reserve(next_offset, owner.epoch)
        self._write_current(chain)
        self._write_start(start_offset, owner.epoch)
        self._metadata.commit([Check(self._keys.owner, None)], [Put(self._keys.owner, documents.encode(owner))])
        return self._report(chain, owner.epoch, (start_offset, next_offset), messages)

    def _ends(self, chain: Chain) -> tuple[int, int]:
        start_offset = self._start_offset or 0
        if not chain.objects:
            return start_offset, start_offset
        return max(start_offset, chain.objects[0].start), chain.objects[-1].end + 1

    def _refuse_if_changed(self, chain: Chain) -> None:
        """A sweep or a retention that was under way may have had its last word while the objects were read."""
        there = {info.key: info.size for info in self._objects.list(self._keys.objects_prefix)}
        for name in chain.objects:
            info = self._infos[name]
            if there.get(info.key) != info.size:
                raise ConflictError(f"{info.key} is not what it was", operation="rebuild", hint="Try again")

    def _write_start(self, start_offset: int, epoch: int) -> None:
        mark = StartMark(start_offset=start_offset, epoch=epoch, moved_us=self._clock.now_us())
        self._put(self._keys.start, documents.encode(mark))

    def _write_descriptors(self, chain: Chain) -> int:
        wanted = {self._keys.descriptor(name.start) for name in chain.objects}
        if self._known_end is not None:
            wanted.add(self._keys.descriptor(self._known_end))
        for key in self._metadata.keys(self._keys.segments_prefix):
            if self._keys.parse_descriptor(key) is not None and key not in wanted:
                self._remove(key)
        reached_us: int | None = None
        for name in chain.objects:
            descriptor = msgspec.json.decode(self._good[name], type=Descriptor)
            reached_us = max((time for time in (reached_us, descriptor.last_time_us) if time is not None), default=None)
            settled = msgspec.structs.replace(descriptor, reached_time_us=reached_us)
            self._put(self._keys.descriptor(name.start), encode_descriptor(settled))
        return sum(name.end + 1 - name.start for name in chain.objects)

    def _reserve(self, next_offset: int, epoch: int) -> None:
        """Where one key changes at a time, a late publisher must not find the next one free."""
        if not self._metadata.supports_multi_key:
            reservation = Reservation(start_offset=next_offset, epoch=epoch)
            self._put(self._keys.descriptor(next_offset), encode_descriptor(reservation))

    def _write_current(self, chain: Chain) -> None:
        if not chain.objects:
            self._remove(self._keys.current)
            return
        named = [] if self._metadata.floor_is_cheap else [name.start for name in chain.objects]
        while len(named) > MAX_NAMED_STARTS:
            named = named[::2]
        self._put(self._keys.current, msgspec.json.encode(Current(padded(chain.objects[-1].start), named)))

    def _put(self, key: str, value: bytes) -> None:
        entry = self._metadata.get(key)
        if entry is None or entry.value != value:
            self._metadata.commit([Check(key, None if entry is None else entry.version)], [Put(key, value)])

    def _remove(self, key: str) -> None:
        entry = self._metadata.get(key)
        if entry is not None:
            self._metadata.commit([Check(key, entry.version)], [Delete(key)])

    def _report(self, chain: Chain, epoch: int, ends: tuple[int, int], messages: int) -> RebuildReport:
        unused = [name for name in chain.unused if name not in self._damaged]
        below = [name for name in unused if name.end < ends[0]]
        return RebuildReport(
            epoch=epoch,
            start_offset=ends[0],
            next_offset=ends[1],
            objects=len(chain.objects),
            messages=messages,
            bytes=sum(self._infos[name].size for name in chain.objects),
            gaps=chain.holes,
            damaged=tuple(self._damaged.values()),
            orphans=tuple(self._infos[name].key for name in unused if name.end >= ends[0]),
            below_start=tuple(self._infos[name].key for name in below),
            foreign=tuple(self._foreign),
        )


class _HasEpoch(msgspec.Struct):
    epoch: int


def _epoch_in(entry: Entry) -> int:
    try:
        return msgspec.json.decode(entry.value, type=_HasEpoch).epoch
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return 0


def _gap(first: int, last: int) -> GapError:
    return GapError(
        f"{offsets_text(first, last)} are in no object",
        first=first,
        last=last,
        hint="Put the missing objects back, begin behind the gap, or allow gaps",
    )


def topics_in(objects: ObjectStore) -> list[tuple[str, str]]:
    """The topics that have objects in a bucket: namespace and name. Costs about one request a topic."""
    found: list[tuple[str, str]] = []
    topic = _next_topic(objects, None, found)
    while topic is not None:
        found.append(topic)
        topic = _next_topic(objects, f"{TopicKeys(*topic).objects_prefix}{_BEHIND_OBJECTS}", found)
    return found


def _next_topic(objects: ObjectStore, behind: str | None, found: list[tuple[str, str]]) -> tuple[str, str] | None:
    for info in objects.list(_TOPICS_PREFIX, start_after=behind):
        parts = info.key.removeprefix(_TOPICS_PREFIX).split("/")
        topic = (parts[0], parts[1]) if len(parts) > 2 and all(map(is_part, parts[:2])) else None
        if topic is not None and topic not in found and TopicKeys(*topic).parse_object(info.key) is not None:
            return topic
    return None
