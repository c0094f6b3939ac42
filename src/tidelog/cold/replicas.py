"""Replicas: further stores that receive a copy of everything that is shipped, so that each of them alone has the log.

    owner -> objects, each with its descriptor and `cur` -> further documents -> start of the log -> deletions

Further documents are a policy (`Documents`): a topic has small ones, which are copied; an engine has a manifest, and
the files that it names.

Invariants
- A replica is a complete store with the catalog in the bucket: the same keys, the same documents. What names others is
  written after them.
- Objects are copied in order, and their checksum is verified against the descriptor while copying: corruption is not
  copied.
- Only objects in the owner's own catalog are copied, so there is one history. A replica that somebody has gone on with
  has a later epoch, and one of another log another log id: it is left alone, and reported.
- Objects that a compaction merged in the first store are merged in a replica too (`follow_compaction`).
- What the first store has dropped is dropped in a replica after the documents no longer reference it.
- A replica that was unreachable catches up from its own position. An unreachable replica delays nothing, unless the
  mode is "sync": then nothing counts as shipped before all replicas have it.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Lock
from typing import Any, NamedTuple, Protocol

import msgspec

from tidelog.clock import Clock
from tidelog.cold.catalog import Catalog, Descriptor, StartMark, encode_descriptor
from tidelog.cold.owned_log import OwnedLog
from tidelog.cold.ownership import OwnedCatalog
from tidelog.cold.retention import published_below
from tidelog.cold.rewrite_commit import read_state
from tidelog.cold.settings import ReplicaStatistics
from tidelog.cold.upload import checksum_text
from tidelog.errors import (
    ConflictError,
    CorruptionError,
    DataError,
    FencedError,
    NotFoundError,
    RetryError,
    TidelogError,
)
from tidelog.log.frame import crc32
from tidelog.store.document import encode_json
from tidelog.store.keys import ObjectId, TopicKeys, parse_owned_key
from tidelog.store.metadata.base import Check, Delete, MetadataStore, Put
from tidelog.store.metadata.open import BUCKET, open_metadata_store
from tidelog.store.object_store import ObjectStore
from tidelog.store.scheduler import NEVER, Task

_RANGE_BYTES = 4 << 20
DAMAGE_HINT = "Put a good copy of the object in its place; later objects are not replicated before"


def ranges(source: ObjectStore, key: str, size: int) -> Iterator[memoryview]:
    """Yields an object of that many bytes piece by piece."""
    for start in range(0, size, _RANGE_BYTES):
        length = min(_RANGE_BYTES, size - start)
        data = source.read_range(key, start, length)
        if len(data) != length:
            raise damage(key, start + len(data), f"an object that must have {size} bytes ends")
        yield data


def damage(key: str, byte: int, message: str) -> CorruptionError:
    """The error for an object that is not copied because it is corrupted."""
    return CorruptionError(message, path=key, byte=byte, operation="replicate", hint=DAMAGE_HINT)


# Replicas after a merge in the first store: large objects replace small ones there too.
#
# Invariants
# - A large object is copied whole and verified before its descriptor takes the key of the first small one. The others
#   are removed then, the first one first, so that every offset is readable at every moment; their objects are deleted
#   last.
# - It can be interrupted anywhere and repeated: the remaining work is derived from what is there.
# - Only where the first store's catalog has a merged object does anything change.


CopyObject = Callable[[Descriptor], None]


def follow_compaction(origin: Catalog, copied: Catalog, objects: ObjectStore, copy_object: CopyObject) -> int:
    """Replaces objects of a replica by those that the first store's catalog has now; returns how many changed."""
    starts = _starts(copied)
    if not starts:
        return 0
    behind = copied.next_offset()
    compacted = [one for one in origin.between(starts[0], behind) if one.name.generation]
    changed = [one for one in compacted if _put_in_place(copied, one, starts, copy_object)]
    if compacted:
        _delete_replaced(copied, objects, compacted)
    return len(changed)


def _starts(copied: Catalog) -> list[int]:
    keys = copied.keys
    found = (keys.parse_descriptor(key) for key in copied.metadata.keys(keys.segments_prefix))
    return sorted(start for start in found if start is not None)


def _put_in_place(copied: Catalog, new: Descriptor, starts: Sequence[int], copy_object: CopyObject) -> bool:
    """Whether there was something to do."""
    inside = starts[bisect_right(starts, new.start_offset) : bisect_right(starts, new.end_offset)]
    found = copied.find(new.start_offset)
    if found is None or not isinstance(found.value, Descriptor):
        if bisect_left(starts, new.start_offset) == 0:
            return False  # the replica begins inside of it
        raise DataError(
            f"the replica has no object that begins at {new.start_offset}, where {new.object_id} does",
            operation="replicate",
            hint=f"Is it the replica of another {copied.keys.noun}? Give each {copied.keys.noun} a place of its own",
        )
    if found.value.object_id != new.object_id:
        copy_object(new)
        key = copied.keys.descriptor(new.start_offset)
        copied.metadata.commit([Check(key, found.version)], [Put(key, encode_descriptor(new))])
    elif not inside:
        return False
    _take_away(copied, inside)
    _move_hint(copied, new, inside)
    return True


def _take_away(copied: Catalog, inside: Iterable[int]) -> None:
    gone = []
    for start in inside:
        key = copied.keys.descriptor(start)
        entry = copied.metadata.get(key)
        if entry is not None:
            copied.metadata.commit([Check(key, entry.version)], [Delete(key)])
        gone.append(key)
    copied.metadata.purge(gone)


def _move_hint(copied: Catalog, new: Descriptor, inside: Sequence[int]) -> None:
    """`cur` is a hint: a lost race is ignored."""
    current = copied.current()
    if current is not None and current[0] in inside:
        changed: tuple[bytes, str | None] | None = copied.moved_current(new.start_offset)
    else:
        changed = copied.current_without(inside)
    if changed is not None:
        value, version = changed
        with contextlib.suppress(ConflictError):
            copied.metadata.commit([Check(copied.keys.current, version)], [Put(copied.keys.current, value)])


def _delete_replaced(copied: Catalog, objects: ObjectStore, compacted: Sequence[Descriptor]) -> None:
    """Deletes objects of an earlier generation that lie entirely within their replacement."""
    keys = copied.keys
    named = {one.name for one in copied.between(0, copied.next_offset())}
    large = [one.name for one in compacted if one.name in named]
    firsts = [name.start for name in large]

    def is_replaced(name: ObjectId) -> bool:
        at = bisect_right(firsts, name.start) - 1
        return at >= 0 and name.end <= large[at].end and name.generation < large[at].generation and name not in named

    listed = ((info.key, keys.parse_object(info.key)) for info in objects.list(keys.objects_prefix))
    objects.delete([key for key, name in listed if name is not None and is_replaced(name)])


def drop_below_start(copied: Catalog, objects: ObjectStore) -> None:
    """Removes what a replica has below the start of its log."""
    start = copied.start_offset()
    for descriptor in list(published_below(copied, start)):
        found = copied.find(descriptor.start_offset)
        if found is not None and found.value == descriptor:
            copied.metadata.remove(copied.keys.descriptor(descriptor.start_offset), found.version)
    listed = ((info.key, copied.keys.parse_object(info.key)) for info in objects.list(copied.keys.objects_prefix))
    below = [key for key, name in listed if name is not None and name.end < start]
    if below:
        objects.delete(below)


class Origin(msgspec.Struct, frozen=True):
    """The source that replicas copy."""

    objects: ObjectStore
    catalog: Catalog
    epoch: int

    @classmethod
    def of(cls, objects: ObjectStore, owned: OwnedCatalog) -> Origin:
        return cls(objects, owned.catalog, owned.epoch)

    @property
    def keys(self) -> TopicKeys:
        return self.catalog.keys


class Goal(NamedTuple):
    """What a replica is to have: the log up to an offset (exclusive), and of an engine what its manifest names.

    `position` is how many bytes were shipped by then, `mark` how far that is in the words of the log.
    """

    next_offset: int
    position: int
    mark: int
    manifest: Any = None


class Documents(Protocol):
    """What a replica has besides its log."""

    def is_needed(self, goal: Goal, replica: Replica, origin: Origin, start: StartMark) -> bool:
        """Whether anything is missing; RetryError where the goal is outdated."""
        ...

    def copy(self, goal: Goal, replica: Replica, origin: Origin) -> None:
        """After the log: what is missing."""
        ...

    def may_delete(self, now_us: int) -> bool:
        """Whether nobody reads what is no longer referenced."""
        ...

    def let_go(self, goal: Goal, replica: Replica, origin: Origin) -> None:
        """Deletes what is no longer referenced."""
        ...


class Replica:
    """One further store. One thread at a time brings it up to date; any thread may read its statistics."""

    def __init__(
        self, objects: ObjectStore, metadata: MetadataStore, keys: TopicKeys, clock: Clock, further: Documents
    ) -> None:
        self.objects = objects
        self.catalog = Catalog(metadata, keys)
        self.reached: Goal | None = None
        """What it has, as far as is known."""
        self.dropped_below = -1
        """The start of its log, as far as that is known."""
        self._metadata = metadata
        self._clock = clock
        self._documents = further
        self._bringing = Lock()
        self._objects_copied = 0
        self._bytes_copied = 0
        self._errors = 0
        self._errors_in_a_row = 0
        self._last_error: str | None = None
        self._last_success_us: int | None = None
        self._followed: tuple[int, str] | None = None

    def bring_up_to(self, goal: Goal, origin: Origin) -> None:
        """Copies what is missing."""
        with self._bringing:
            try:
                self._bring(goal, origin)
            except TidelogError as error:
                self._errors += 1
                self._errors_in_a_row += 1
                self._last_error = str(error)
                raise
            self._errors_in_a_row, self._last_error = 0, None
            self._last_success_us = self._clock.now_us()

    def _bring(self, goal: Goal, origin: Origin) -> None:
        self._refuse_others(origin)
        start = self._start_of(origin)
        is_needed = self._documents.is_needed(goal, self, origin, start)
        self._follow_compaction(origin)
        if is_needed:
            self._copy_all(goal, origin, start)
        if self._documents.may_delete(self._clock.now_us()):
            self._follow_start(origin, start)
            self._documents.let_go(goal, self, origin)
        self.reached = goal

    def _start_of(self, origin: Origin) -> StartMark:
        """As it is now: what is copied later must not begin later than what the goal is compared with."""
        found = origin.catalog.start_mark()
        return StartMark(start_offset=0, epoch=0, moved_us=0) if found is None else found[0]

    def _copy_all(self, goal: Goal, origin: Origin, start: StartMark) -> None:
        """The documents that name everything last."""
        keys = origin.keys
        if start.epoch and self._metadata.get(keys.start) is None:
            self.put(keys.start, encode_json(start))
        if (owner := origin.catalog.metadata.get(keys.owner)) is not None:
            self.put(keys.owner, owner.value)
        self._copy_log(goal.next_offset, origin, start.start_offset)
        self._documents.copy(goal, self, origin)

    def _follow_start(self, origin: Origin, start: StartMark) -> None:
        """Drops here what the first store has dropped."""
        if start.epoch and start.start_offset != self.dropped_below:
            self.put(origin.keys.start, encode_json(start))
            drop_below_start(self.catalog, self.objects)
            self.dropped_below = start.start_offset

    def _refuse_others(self, origin: Origin) -> None:
        found, own = self.catalog.owner(), origin.catalog.owner()
        if found is None or own is None:
            return
        noun = origin.keys.noun
        if found[0].epoch > origin.epoch:
            raise FencedError(
                f"{found[0].who} went on with the replica {self.objects.url}, with epoch {found[0].epoch}",
                operation="replicate",
                hint=f"It is the store of another {noun} now; take it out of the replicas of this one",
            )
        if found[0].log_id != own[0].log_id:
            raise self._other_history(f"has another {noun} of this name")

    # The log

    def _follow_compaction(self, origin: Origin) -> None:
        """Runs before anything else is copied: the next object begins where an object of the first store ends now."""
        while (seen := _compaction_of(origin)) != self._followed:
            try:
                follow_compaction(origin.catalog, self.catalog, self.objects, lambda one: self._copy(origin, one))
            except NotFoundError:
                if _compaction_of(origin) == seen:
                    raise
            else:
                self._followed = seen

    def _copy_log(self, end: int, origin: Origin, start_offset: int) -> None:
        """Copies the log. If a merge intervenes, follows it first and then copies the rest."""
        while not self._copy_objects(end, origin, start_offset):
            reached, is_new = self.catalog.next_offset(), _compaction_of(origin) != self._followed
            self._followed = None
            self._follow_compaction(origin)
            if not is_new and self.catalog.next_offset() == reached:
                raise self._other_history(f"ends at {reached - 1}, where no object of the first store ends")

    def _copy_objects(self, end: int, origin: Origin, start_offset: int) -> bool:
        """Whether all were copied; False if one of them was merged with others meanwhile."""
        for descriptor in origin.catalog.walk(max(self.catalog.next_offset(), start_offset)):
            if descriptor.start_offset >= end:
                return True
            if not self._goes_on_with(descriptor, start_offset):
                return False
            try:
                self._copy(origin, descriptor)
            except NotFoundError:
                if _compaction_of(origin) == self._followed:
                    raise
                return False
            self.put(origin.keys.descriptor(descriptor.start_offset), encode_descriptor(descriptor))
            self._put_hint(descriptor)
        return True

    def _put_hint(self, descriptor: Descriptor) -> None:
        value, version = self.catalog.moved_current(descriptor.start_offset)
        self._metadata.commit([Check(self.catalog.keys.current, version)], [Put(self.catalog.keys.current, value)])

    def _goes_on_with(self, descriptor: Descriptor, start_offset: int) -> bool:
        """Whether an object continues this replica's log, unless everything between was dropped in the first store.

        False if it is a merged object, and this replica's log ends inside it.
        """
        expected = self.catalog.next_offset()
        if descriptor.start_offset == expected or expected < descriptor.start_offset <= start_offset:
            return True
        if self.catalog.newest() is None and descriptor.start_offset <= max(expected, start_offset, 1):
            return True
        if not descriptor.start_offset < expected <= descriptor.end_offset or not descriptor.name.generation:
            raise self._other_history(f"ends at {expected - 1}, where no object of the first store ends")
        return False

    def _other_history(self, what: str) -> DataError:
        noun = self.catalog.keys.noun
        return DataError(
            f"the replica {self.objects.url} {what}",
            operation="replicate",
            hint=f"Is it the replica of another {noun}? Give each {noun} a place of its own",
        )

    def _copy(self, origin: Origin, descriptor: Descriptor) -> None:
        key = origin.keys.object(descriptor.name)
        if self.has(key, descriptor.size):
            return
        crc = 0
        with self.objects.open_writer(key) as writer:
            for data in ranges(origin.objects, key, descriptor.size):
                crc = crc32(data, crc)
                writer.write(data)
            if checksum_text(crc) != descriptor.checksum:
                raise damage(key, 0, "checksum does not match")
        self.count_copied(descriptor.size)

    # For further documents

    def has(self, key: str, size: int) -> bool:
        with contextlib.suppress(NotFoundError):
            return self.objects.head(key).size == size
        return False

    def put(self, key: str, value: bytes) -> None:
        """Writes on the version that was read: a concurrent write is not overwritten."""
        there = self._metadata.get(key)
        if there is None or there.value != value:
            self._metadata.commit([Check(key, None if there is None else there.version)], [Put(key, value)])

    def count_copied(self, size: int) -> None:
        """One more object was copied."""
        self._objects_copied += 1
        self._bytes_copied += size

    def statistics(self, position: int) -> ReplicaStatistics:
        """Returns a snapshot of the statistics; the first store has the log up to this position."""
        known = self.reached
        return ReplicaStatistics(
            url=self.objects.url,
            high_water_mark=0 if known is None else known.mark,
            lag_bytes=max(0, position - (0 if known is None else known.position)),
            objects_copied=self._objects_copied,
            bytes_copied=self._bytes_copied,
            errors_total=self._errors,
            errors_in_a_row=self._errors_in_a_row,
            last_error=self._last_error,
            last_success_us=self._last_success_us,
        )


def _compaction_of(origin: Origin) -> tuple[int, str]:
    """How far the compactions of the first store are."""
    state = read_state(origin.catalog)
    return state.generation, state.phase


class ReplicaStores:
    """The stores of replicas, each opened once however many logs are copied there."""

    def __init__(self, open_objects: Callable[[str], ObjectStore]) -> None:
        self._open_objects = open_objects
        self._guard = Lock()
        self._opened: dict[str, tuple[ObjectStore, MetadataStore]] = {}

    def open(self, url: str) -> tuple[ObjectStore, MetadataStore]:
        """The store and the catalog in it. One that is out of reach is no error yet."""
        with self._guard:
            if url not in self._opened:
                objects = self._open_objects(url)
                self._opened[url] = objects, open_metadata_store(BUCKET, objects, proves_late=True)
            return self._opened[url]

    def close(self) -> None:
        for _, metadata in self._opened.values():
            metadata.close()


class Replicas:
    """All replicas of one owned log, and the background work that feeds them."""

    def __init__(self, replicas: Sequence[Replica], *, is_sync: bool) -> None:
        self._replicas = replicas
        self.is_sync = is_sync
        self._tasks: list[Task] = []

    def __bool__(self) -> bool:
        return bool(self._replicas)

    @property
    def stores(self) -> list[ObjectStore]:
        return [replica.objects for replica in self._replicas]

    @property
    def next_offset(self) -> int:
        """The first offset that some replica lacks, as far as is known."""
        return min([0 if one.reached is None else one.reached.next_offset for one in self._replicas], default=0)

    def bring_up_to(self, goal: Goal, origin: Origin) -> None:
        """Brings all up to date; raises the first failure after all were tried."""
        failure: TidelogError | None = None
        for replica in self._replicas:
            try:
                replica.bring_up_to(goal, origin)
            except FencedError as error:  # it is the replica that has another owner
                failure = failure or RetryError(error.message, operation="replicate", hint=error.hint)
            except TidelogError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def add_tasks(self, owner: OwnedLog, goal: Callable[[], Goal | None], seconds: float = NEVER) -> None:
        """Each follows by itself: every so often, and whenever it is woken. `goal` is None before the claim."""

        def bring(replica: Replica) -> float:
            wanted = goal()
            if wanted is not None:
                try:
                    replica.bring_up_to(wanted, Origin.of(owner.node.objects, owner.owned))
                except FencedError:  # it is the replica that has another owner; its statistics say so
                    return owner.settings.ship_retry_max_seconds
            return seconds

        for replica in self._replicas:
            what = f"copying to {replica.objects.url}"
            self._tasks.append(owner.add_task(what, lambda one=replica: bring(one)))  # type: ignore[misc]

    def wake(self) -> None:
        for task in self._tasks:
            task.soon()

    def statistics(self, position: int) -> tuple[ReplicaStatistics, ...]:
        return tuple(replica.statistics(position) for replica in self._replicas)


# The replicas of a topic.


class TopicDocuments:
    """The small documents of a topic: settings, partitions, positions of subscriptions, and where it was sealed."""

    def is_needed(self, goal: Goal, replica: Replica, origin: Origin, start: StartMark) -> bool:
        return True

    def copy(self, goal: Goal, replica: Replica, origin: Origin) -> None:
        keys, source, target = origin.keys, origin.catalog.metadata, replica.catalog.metadata
        wanted = {entry.key: entry.value for entry in source.range(keys.subscriptions_prefix)}
        single = (keys.settings, keys.state, *_layouts(keys))
        wanted |= {entry.key: entry.value for key in single if (entry := source.get(key)) is not None}
        for key, value in wanted.items():
            replica.put(key, value)
        for entry in target.range(keys.subscriptions_prefix):
            if entry.key not in wanted:
                target.remove(entry.key, entry.version)
        if keys.state not in wanted and (sealed := target.get(keys.state)) is not None:
            target.remove(keys.state, sealed.version)

    def may_delete(self, now_us: int) -> bool:
        return True

    def let_go(self, goal: Goal, replica: Replica, origin: Origin) -> None:
        """Nothing but the log is ever deleted."""


def _layouts(keys: TopicKeys) -> Iterator[str]:
    """Where it is written into how many partitions the topic is divided, or the topic that this is a partition of."""
    yield keys.partitions
    owned = parse_owned_key(keys.partitions)
    if owned is not None and owned.layout is not None:
        yield owned.layout.key
