"""Rebuilds the catalog from the objects: the bucket alone restores the topic.

Object names give their offsets and the epoch they were made under. All objects that become part of the topic are read
and verified, frame by frame; `choose_chain` chooses them.

Invariants
- Nothing is written before everything has been read and verified.
- A catalog exists once it has the owner's entry, which is written last: a crash before that leaves no catalog, and the
  next attempt starts over. An existing catalog is replaced only on request: its owner is fenced first, and its entry is
  removed while the others are written.
- The epoch of the new entry is higher than every epoch that objects or entries mention.
- The start of the topic does not go back, where it is known.
- A living owner is not fenced by accident: HeldError, unless the caller passes `take_over`.
- How a topic is divided into partitions stays as the metadata store has it. If that is lost, it is what the copy in the
  bucket says, or a directory, with as many partitions as have objects at least (`rebuild_layout`).
- No object is changed or deleted. Objects outside the chain are reported; orphan removal may remove them later.
- Cursors of subscriptions and settings stay as they are. If there is no catalog at all, they come from the published
  copy in the bucket, and so does the start, if that is a copy of the log that the objects belong to.
- A disk with unshipped messages stays the end of the topic only where a catalog that could be read ends at the same
  offset as the new one.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import msgspec

from tidelog.clock import Clock
from tidelog.codec import from_json
from tidelog.cold.catalog import (
    MAX_NAMED_STARTS,
    MAX_PARTITIONS,
    Catalog,
    Current,
    Descriptor,
    Owner,
    PartitionLayout,
    Reservation,
    StartMark,
    encode_descriptor,
)
from tidelog.cold.lease import NodeLease
from tidelog.cold.ownership import OwnedCatalog, Ownership, new_claim
from tidelog.cold.verify import ObjectCheck
from tidelog.errors import (
    ConflictError,
    CorruptionError,
    DataError,
    GapError,
    Hint,
    InputError,
    NotFoundError,
    OtherLogError,
    offsets_text,
)
from tidelog.log.binding import BINDING_BYTES, decode_binding, new_log_id
from tidelog.log.frame import HEADER_BYTES
from tidelog.log.settings import DEFAULT_MAX_MESSAGE_BYTES
from tidelog.store.document import decode_json, encode_json
from tidelog.store.keys import PARTITION_SUFFIX, ObjectId, TopicKeys, is_part, padded
from tidelog.store.metadata.base import Check, Delete, Entry, MetadataStore, Put
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.store.object_store import ObjectInfo, ObjectStore

# Chooses the objects that form the topic, from their names alone: some were never published, or were replaced.
#
# Invariants
# - The chain has no overlap: each object begins where the one before ends, or after a hole.
# - Of all chains it is one that misses the fewest offsets between its beginning and the last object that begins
#   anywhere.
# - Where several do, at each offset the highest epoch wins (its owner could know the others and did not continue after
#   them), then the highest generation (a compaction made it from the others), then the one that leads furthest, then
#   the longest. A compacted object has the highest epoch of those that it was made from, and all their messages that
#   count.


class Chain(NamedTuple):
    """Objects in order, the holes between them (first and last offset), and what was not used."""

    objects: tuple[ObjectId, ...]
    holes: tuple[tuple[int, int], ...]
    unused: tuple[ObjectId, ...]


class _Way(NamedTuple):
    """The best way on from an offset. Smaller is better."""

    missing: int
    lower_epoch: int
    lower_generation: int
    nearer_end: int
    shorter: int
    begin: ObjectId
    next_start: int | None


def choose_chain(names: Iterable[ObjectId], start_offset: int | None = None) -> Chain:
    """The chain from the object that holds `start_offset`, or without it from the first of all.

    Objects wholly below the start do not take part and are among the unused.
    """
    candidates = set(names)
    usable = sorted(name for name in candidates if start_offset is None or name.end >= start_offset)
    if not usable:
        return Chain((), (), tuple(sorted(candidates)))
    chain = tuple(_follow(usable, usable[0].start if start_offset is None else start_offset))
    expected = chain[0].start if start_offset is None else max(start_offset, 0)
    return Chain(chain, tuple(_holes(chain, expected)), tuple(sorted(candidates.difference(chain))))


def _follow(usable: list[ObjectId], begin: int) -> Iterator[ObjectId]:
    by_start: dict[int, list[ObjectId]] = {}
    for name in usable:
        # Where the topic begins within an object, that object is as good as one that begins there.
        by_start.setdefault(max(name.start, begin), []).append(name)
    starts = sorted(by_start)
    ways: dict[int, _Way] = {}
    for start in reversed(starts):
        ways[start] = min(_way(name, starts, ways) for name in by_start[start])
    at: int | None = starts[0]
    while at is not None:
        way = ways[at]
        yield way.begin
        at = way.next_start


def _way(name: ObjectId, starts: list[int], ways: dict[int, _Way]) -> _Way:
    next_offset = name.end + 1
    index = bisect_left(starts, next_offset)
    if index == len(starts):
        return _Way(0, -name.epoch, -name.generation, -next_offset, -name.end, name, None)
    on = ways[starts[index]]
    missing = starts[index] - next_offset + on.missing
    return _Way(missing, -name.epoch, -name.generation, on.nearer_end, -name.end, name, starts[index])


def _holes(chain: Iterable[ObjectId], expected: int) -> Iterator[tuple[int, int]]:
    for name in chain:
        if name.start > expected:
            yield expected, name.start - 1
        expected = name.end + 1


Progress = Callable[[int, int], None]
NODE = "rebuild"
_TOPICS_PREFIX = "storage/topics/"
# Sorts after every name of an object, which begins with `data`.
_BEHIND_OBJECTS = "e"
# Sorts after every character of a key.
_BEHIND_ALL = "~"


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
    incarnation: str | None = None,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    lease: NodeLease | None = None,
    take_over: bool = False,
) -> RebuildReport:
    """Rebuilds the catalog of a topic from its objects.

    allow_gaps    continue past missing offsets, and without damaged objects; else GapError, CorruptionError
    replace       also if there is a catalog: its owner is fenced
    lease         that of the node that rebuilds: HeldError while another node has the topic open, unless `take_over`
    start_offset  leave out what is before; for a bucket in which the remains of a retention begin the topic
    incarnation       the claim of a disk whose files are still the end of the topic; without it they are set aside
    progress      is called with how many bytes of how many have been verified
    max_message_bytes  larger messages count as damage; readers of the catalog may read any message in a good object
    """
    run = _Rebuild(metadata, keys, objects, clock, time_field, progress, HEADER_BYTES + max_message_bytes)
    if run.has_owner and not replace:
        raise InputError(
            "the topic has a catalog",
            operation="rebuild",
            hint=Hint(
                "Replacing it fences the owner of the topic; pass replace=True if you mean it",
                command="Replacing it fences the owner of the topic; pass --replace if you mean it",
            ),
        )
    run.refuse_deleted_topic()
    if run.has_owner:
        if lease is not None and not take_over:
            run.refuse_held(lease)
        run.fence(node)
    chain = run.choose(start_offset, allow_gaps=allow_gaps)
    return run.write(chain, node, incarnation)


class _Rebuild:
    def __init__(
        self,
        metadata: MetadataStore,
        keys: TopicKeys,
        objects: ObjectStore,
        clock: Clock,
        time_field: int | None,
        progress: Progress | None,
        most_frame_bytes: int,
    ) -> None:
        self._metadata = metadata
        self._most_frame_bytes = most_frame_bytes
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

    # What was imported before. Damage in it is what a rebuild is for, so it counts as nothing.

    @property
    def has_owner(self) -> bool:
        try:
            return self._metadata.get(self._keys.owner) is not None
        except DataError:
            return True

    def _entry(self, key: str) -> Entry | None:
        """What is about to be replaced. A damaged one has no version to be replaced on, so it goes first."""
        try:
            return self._metadata.get(key)
        except DataError:
            self._metadata.delete(key)
            return None

    def refuse_held(self, lease: NodeLease) -> None:
        """HeldError while another node has the topic open. A sealed topic is held by nobody."""
        catalog = Catalog(self._metadata, self._keys)
        with contextlib.suppress(DataError):
            found = catalog.owner()
            if found is not None and catalog.sealed_by(found[0]) is None:
                lease.refuse_held(found[0], self._keys.noun, Path(self._keys.subject))

    def refuse_deleted_topic(self) -> None:
        if self._mark is not None and self._mark.deleted:
            raise InputError("the topic is being deleted", operation="rebuild", hint="Delete it again to finish that")

    def _start_mark(self) -> StartMark | None:
        try:
            entry = self._metadata.get(self._keys.start)
            found = entry or self._published.get(self._keys.start)
            mark = None if found is None else decode_json(found.value, found.key, StartMark)
        except DataError:
            return None
        # A deletion that was lost with the metadata cannot be finished any more.
        return None if mark is not None and mark.deleted and entry is None else mark

    @cached_property
    def _published(self) -> dict[str, Entry]:
        """What the copy in the bucket has, and the objects do not say; nothing if there is a catalog."""
        found: dict[str, Entry] = {}
        if self.has_owner:
            return found
        with BucketMetadataStore(self._objects, read_only=True) as copy, contextlib.suppress(DataError):
            owner = Catalog(copy, self._keys).owner()
            is_copy = owner is not None and isinstance(owner[0].copy_of, str)
            if owner is None or not is_copy or owner[0].log_id != self._log_of_objects():
                return found
            for key in (self._keys.start, self._keys.settings, *copy.keys(self._keys.subscriptions_prefix)):
                with contextlib.suppress(DataError):
                    if (entry := copy.get(key)) is not None:
                        found[key] = entry
        return found

    def _log_of_objects(self) -> str | None:
        for info in self._objects.list(self._keys.objects_prefix):
            if self._keys.parse_object(info.key) is not None:
                with contextlib.suppress(DataError, NotFoundError):
                    return decode_binding(self._objects.read_range(info.key, 0, BINDING_BYTES)).log_id
        return None

    def _next_epoch(self) -> int:
        floor = self._metadata.get(self._keys.epoch_floor)
        entries = (*self._entries(), *self._published.values(), *([] if floor is None else [floor]))
        mentioned = [_epoch_in(entry) for entry in entries]
        return 1 + max([*mentioned, *(name.epoch for name in self._infos)], default=0)

    def _entries(self) -> Iterator[Entry]:
        """All that can be read of the catalog, one at a time if not all of it can."""
        with contextlib.suppress(DataError):
            yield from self._metadata.range(self._keys.metadata_prefix)
            return
        for key in self._metadata.keys(self._keys.metadata_prefix):
            with contextlib.suppress(DataError):
                if (entry := self._metadata.get(key)) is not None:
                    yield entry

    # Fencing

    def fence(self, node: str) -> None:
        """From here on no earlier owner publishes anything: what is listed after this is all there is."""
        self._list()
        before = self._entry(self._keys.owner)
        with contextlib.suppress(DataError):
            known = None if before is None else decode_json(before.value, before.key, Owner)
            self._lineage, self._log_id = (None, None) if known is None else (known.incarnation, known.log_id)
            self._is_log_known = known is not None
        owner = self._owner(node, self._lineage)
        check = Check(self._keys.owner, None if before is None else before.version)
        version = self._metadata.commit([check], [Put(self._keys.owner, encode_json(owner))])[self._keys.owner]
        self._fenced_version = version
        if self._mark is None:
            return  # nobody has settled in, and to do so would say that the topic begins at 0
        ownership = Ownership(Catalog(self._metadata, self._keys), owner, version, None)
        with contextlib.suppress(DataError):  # a catalog that cannot be read has no next offset to hold
            self._known_end = OwnedCatalog(ownership, self._clock).settle_in(self._mark.start_offset)

    def _owner(self, node: str, incarnation: str | None) -> Owner:
        claim = new_claim()
        now_us = self._clock.now_us()
        return Owner(
            epoch=self._next_epoch(),
            claim=claim,
            incarnation=incarnation or claim,
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
                self._objects,
                self._infos[name],
                name,
                self._log_id,
                self._time_field,
                self._counting(total),
                most_frame_bytes=self._most_frame_bytes,
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
            self._damaged[name] = Damaged(key=self._infos[name].key, byte=error.byte, reason=error.reason)
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

    def write(self, chain: Chain, node: str, incarnation: str | None) -> RebuildReport:
        """Entry by entry, the owner's last."""
        start_offset, next_offset = self._ends(chain)
        self._refuse_if_changed(chain)
        is_same_end = self._known_end == next_offset
        owner = self._owner(node, incarnation or (self._lineage if is_same_end else None))
        if self._fenced_version is not None:
            self._write_start(start_offset, owner.epoch)  # which remembers the epoch while there is no owner
            self._metadata.commit([Check(self._keys.owner, self._fenced_version)], [Delete(self._keys.owner)])
        messages = self._write_descriptors(chain)
        self._remove(self._keys.state)  # of an earlier epoch, so nobody believes it
        for key, entry in self._published.items():
            if key != self._keys.start and self._entry(key) is None:
                self._put(key, entry.value)
        self._ask_for_kafka_producers()
        self._reserve(next_offset, owner.epoch)
        self._write_current(chain)
        self._write_start(start_offset, owner.epoch)
        self._metadata.commit([Check(self._keys.owner, None)], [Put(self._keys.owner, encode_json(owner))])
        return self._report(chain, owner.epoch, (start_offset, next_offset), messages)

    def _ask_for_kafka_producers(self) -> None:
        """Without a snapshot a topic has none of their messages. What they had may be lost with the catalog, so one
        that cannot be used says that the messages are to be read."""
        key = self._keys.kafka_producers
        if self._fenced_version is None and self._keys.noun == "topic" and self._entry(key) is None:
            self._put(key, b"{}")

    def _ends(self, chain: Chain) -> tuple[int, int]:
        start_offset = self._start_offset or 0
        if not chain.objects:
            return start_offset, start_offset
        return max(start_offset, chain.objects[0].start), chain.objects[-1].end + 1

    def _refuse_if_changed(self, chain: Chain) -> None:
        """An orphan removal or a retention in progress may have made its last deletion while the objects were read."""
        there = {info.key: info.size for info in self._objects.list(self._keys.objects_prefix)}
        for name in chain.objects:
            info = self._infos[name]
            if there.get(info.key) != info.size:
                raise ConflictError(f"{info.key} is not what it was", operation="rebuild", hint="Try again")

    def _write_start(self, start_offset: int, epoch: int) -> None:
        mark = StartMark(start_offset=start_offset, epoch=epoch, moved_us=self._clock.now_us())
        self._put(self._keys.start, encode_json(mark))

    def _write_descriptors(self, chain: Chain) -> int:
        wanted = {self._keys.descriptor(name.start) for name in chain.objects}
        if self._known_end is not None:
            wanted.add(self._keys.descriptor(self._known_end))
        for key in self._metadata.keys(self._keys.segments_prefix):
            if self._keys.parse_descriptor(key) is not None and key not in wanted:
                self._remove(key)
        reached_us: int | None = None
        for name in chain.objects:
            descriptor = from_json(self._good[name], Descriptor)
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
        entry = self._entry(key)
        if entry is None or entry.value != value:
            self._metadata.commit([Check(key, None if entry is None else entry.version)], [Put(key, value)])

    def _remove(self, key: str) -> None:
        entry = self._entry(key)
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
        return from_json(entry.value, _HasEpoch).epoch
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return 0


def _gap(first: int, last: int) -> GapError:
    return GapError(
        f"{offsets_text(first, last)} are in no object",
        first=first,
        last=last,
        hint="Put the missing objects back, start after the gap, or allow gaps",
    )


def rebuild_layout(
    metadata: MetadataStore, keys: TopicKeys, objects: ObjectStore, remembered: PartitionLayout | None = None
) -> PartitionLayout | None:
    """Brings back how a topic is divided into partitions; None where it is not, or the metadata store has it.

    `remembered` is what a directory says.
    """
    document = Catalog(metadata, keys).partitions_document()
    try:
        if document.read() is not None:
            return None
    except DataError:
        metadata.delete(document.key)
    numbers = partitions_in(objects, keys)
    known = _published_layout(objects, keys.partitions) or remembered
    if known is None and not numbers:
        return None
    has_own = next(iter(objects.list(keys.objects_prefix)), None) is not None
    known = known or PartitionLayout(count=1, has_grown=has_own)
    layout = msgspec.structs.replace(known, count=max([known.count, *(number + 1 for number in numbers)]))
    document.create(layout)
    return layout


def _published_layout(objects: ObjectStore, key: str) -> PartitionLayout | None:
    """What the copy in the bucket says."""
    with BucketMetadataStore(objects, read_only=True) as copy, contextlib.suppress(DataError):
        found = copy.get(key)
        return None if found is None else decode_json(found.value, key, PartitionLayout)
    return None


def partitions_in(objects: ObjectStore, keys: TopicKeys) -> list[int]:
    """The partitions of a topic that have objects, by their names. Costs about one request each."""
    folder, _, name = keys.subject.partition("/")
    prefix, start = f"{_TOPICS_PREFIX}{folder}/", f"{name}{PARTITION_SUFFIX}"
    found: list[int] = []
    behind: str | None = prefix + start
    while behind is not None:
        info = next(iter(objects.list(prefix, start_after=behind)), None)
        log = "" if info is None else info.key.removeprefix(prefix).partition("/")[0]
        number = log.removeprefix(start)
        if log.startswith(start) and number.isdecimal() and str(int(number)) == number and int(number) < MAX_PARTITIONS:
            found.append(int(number))
        behind = f"{prefix}{log}/{_BEHIND_ALL}" if log.startswith(start) else None
    return sorted(found)


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
