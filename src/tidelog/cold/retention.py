"""Retention: what of a topic may be deleted, by age and by size. In the store for good, on the local disk as a copy.

In the store, in this order
1. `plan_cold` makes the plan; nothing changes.
2. The start of the topic moves: that records the plan. From here on nobody reads below it, whatever happens next.
3. Descriptors below the start are deleted, oldest first.
4. Objects that no descriptor names any more are deleted, oldest first: the objects alone hold a history without holes.
A crash after 2 leaves descriptors, which `finish_cold` removes with their objects; one after 3 leaves objects below the
start that no descriptor names, which orphan removal deletes.

Invariants
- Whole objects and whole files are deleted, never parts, and always the oldest first: what stays has no hole.
- An object is deleted when all of it is below the start. The newest may be, too: the start records where the topic
  ends.
- A local file is deleted only when the catalog covers it and the store has just confirmed that the objects exist. If
  the store cannot be asked, the error is raised and nothing is removed. The newest file stays: it may be written to.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from threading import Lock
from typing import Literal, NamedTuple, Protocol

import msgspec

from tidelog.clock import Clock
from tidelog.cold.catalog import Catalog, Descriptor
from tidelog.cold.ownership import OwnedCatalog
from tidelog.cold.settings import RetentionStatistics, TierSettings
from tidelog.errors import ConflictError, NotFoundError, TidelogError
from tidelog.events import tell
from tidelog.log import Log
from tidelog.store.object_store import ObjectStore
from tidelog.store.scheduler import NEVER, Background, Task

Reason = Literal["age", "size"]


# Cold: the topic itself


class ColdPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be deleted: `reasons` has one for each of the `descriptors`. Empty when nothing is due."""

    start_offset: int
    descriptors: tuple[Descriptor, ...] = ()
    reasons: tuple[Reason, ...] = ()
    bytes: int = 0

    @property
    def is_empty(self) -> bool:
        return not self.descriptors

    def below(self, offset: int | None) -> ColdPlan:
        """The part of it that deletes nothing at an offset or above it; None: all of it."""
        kept = [one for one in self.descriptors if offset is None or one.next_offset <= offset]
        if len(kept) == len(self.descriptors):
            return self
        return ColdPlan(
            start_offset=kept[-1].next_offset if kept else self.descriptors[0].start_offset,
            descriptors=tuple(kept),
            reasons=self.reasons[: len(kept)],
            bytes=sum(one.size for one in kept),
        )


class RetentionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What retention would delete now. Messages below `delete_before` go for good, with these `objects` of the store;
    files below `evict_before` leave this disk, and the store has what is in them.

    Without a store files go for good: then both are the same, and there are no objects.
    """

    start_offset: int
    delete_before: int
    objects: tuple[str, ...] = ()
    object_bytes: int = 0
    hot_start_offset: int
    evict_before: int
    file_bytes: int

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return self.delete_before <= self.start_offset and self.evict_before <= self.hot_start_offset


def _changed() -> ConflictError:
    return ConflictError(
        "what is due has changed since the plan was made: nothing was deleted", hint="Make a new plan, and review it"
    )


def _bytes_below(files: Sequence[File], offset: int) -> int:
    return sum(file.size for file in files if file.next_offset <= offset)


class _Due(NamedTuple):
    descriptor: Descriptor
    reason: Reason


def plan_cold(catalog: Catalog, now_us: int, max_age_seconds: int | None, max_bytes: int | None) -> ColdPlan:
    """What of the store is too old or too much.

    By age alone it reads no further than the first object that stays. By size it reads every descriptor: their sum is
    nowhere else.
    """
    start_offset = catalog.start_offset()
    due = _due(catalog, start_offset, _oldest_kept_us(now_us, max_age_seconds), max_bytes)
    return ColdPlan(
        start_offset=max(start_offset, due[-1].descriptor.next_offset) if due else start_offset,
        descriptors=tuple(one.descriptor for one in due),
        reasons=tuple(one.reason for one in due),
        bytes=sum(one.descriptor.size for one in due),
    )


def _due(catalog: Catalog, start_offset: int, oldest_kept_us: int | None, max_bytes: int | None) -> list[_Due]:
    due: list[_Due] = []
    if oldest_kept_us is None and max_bytes is None:
        return due
    kept: deque[Descriptor] = deque()
    kept_bytes = 0
    for descriptor in catalog.walk(start_offset):
        if not kept and oldest_kept_us is not None and _newest_us(descriptor) < oldest_kept_us:
            due.append(_Due(descriptor, "age"))
            continue
        if max_bytes is None:
            break
        kept.append(descriptor)
        kept_bytes += descriptor.size
        while kept and kept_bytes > max_bytes:
            kept_bytes -= kept[0].size
            due.append(_Due(kept.popleft(), "size"))
    return due


def _newest_us(descriptor: Descriptor) -> int:
    """No message of the object is newer."""
    return descriptor.created_us if descriptor.last_time_us is None else descriptor.last_time_us


def apply_cold(owned: OwnedCatalog, objects: ObjectStore, plan: ColdPlan) -> None:
    """Deletes what was planned. May be interrupted anywhere, and made again."""
    if plan.is_empty:
        return
    owned.move_start(plan.start_offset)
    remove_published(owned, objects, plan.descriptors)


def finish_cold(owned: OwnedCatalog, objects: ObjectStore) -> list[Descriptor]:
    """Resumes an interrupted deletion: removes what is wholly below the start, and returns it."""
    start_offset = owned.catalog.start_offset()
    if start_offset == 0:
        return []  # nothing was ever deleted, and nothing need be looked for
    left_over = list(published_below(owned.catalog, start_offset))
    remove_published(owned, objects, left_over)
    return left_over


def published_below(catalog: Catalog, offset: int) -> Iterable[Descriptor]:
    """The descriptors of which nothing is at an offset or above it, oldest first."""
    return (one for one in catalog.between(0, offset) if one.next_offset <= offset)


def remove_published(owned: OwnedCatalog, objects: ObjectStore, descriptors: Sequence[Descriptor]) -> None:
    """Descriptors first, then their objects. They are below the start.

    Where the copy of the catalog cannot be brought up to date its readers may still be led to the objects: then they
    stay, and orphan removal deletes them later.
    """
    owned.remove_descriptors(descriptors)
    if not descriptors or not owned.catalog.metadata.copy_is_current(owned.catalog.keys.start):
        return
    for descriptor in descriptors:
        # A node that lost the topic may change nothing any more, not even what is past.
        owned.ownership.verify()
        remove_unpublished(owned.catalog, objects, descriptor)


def remove_unpublished(catalog: Catalog, objects: ObjectStore, descriptor: Descriptor) -> bool:
    """Deletes an object unless a descriptor still names it; returns whether it was deleted."""
    if names_object(catalog, descriptor.start_offset, descriptor.object_id):
        return False
    objects.delete(catalog.keys.object(descriptor.name))
    return True


def remove_all_unpublished(
    catalog: Catalog, objects: ObjectStore, descriptors: Sequence[Descriptor]
) -> list[Descriptor]:
    """The same of many objects, with few requests; returns the descriptors of those that were deleted."""
    found = catalog.find_many(one.start_offset for one in descriptors)
    named = {one.value.object_id for one in found.values() if isinstance(one.value, Descriptor)}
    gone = [one for one in descriptors if one.object_id not in named]
    objects.delete([catalog.keys.object(one.name) for one in gone])
    return gone


def names_object(catalog: Catalog, start_offset: int, object_id: str) -> bool:
    """Whether the descriptor at an offset is there and names this object."""
    found = catalog.find(start_offset)
    return found is not None and isinstance(found.value, Descriptor) and found.value.object_id == object_id


# Local: files on this disk


class File(Protocol):
    """What is asked of a WAL file: `log.file_spans()` has them, and so do segments."""

    @property
    def first_offset(self) -> int: ...

    @property
    def next_offset(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def created_us(self) -> int: ...

    @property
    def max_time_us(self) -> int | None: ...


def plan_local(
    files: Sequence[File],
    covered_offset: int | None,
    now_us: int,
    max_age_seconds: int | None,
    max_bytes: int | None,
) -> int:
    """The offset below which local files may go; that of the first file when none may.

    Only files wholly below `covered_offset` do. None: the log has no other copy, and they go for good.
    """
    oldest_kept_us = _oldest_kept_us(now_us, max_age_seconds)
    left_bytes = sum(file.size for file in files)
    offset = files[0].first_offset if files else 0
    for file, behind in pairwise(files):
        is_old = oldest_kept_us is not None and _newest_in(file, behind) < oldest_kept_us
        is_too_much = max_bytes is not None and left_bytes > max_bytes
        if not (is_old or is_too_much) or (covered_offset is not None and file.next_offset > covered_offset):
            break
        left_bytes -= file.size
        offset = file.next_offset
    return offset


def _newest_in(file: File, behind: File) -> int:
    """No message of the file is newer: without times it was written until the next file began."""
    return behind.created_us if file.max_time_us is None else file.max_time_us


def is_safe_to_remove(
    catalog: Catalog, objects: ObjectStore, first_offset: int, next_offset: int, *, max_epoch: int | None = None
) -> bool:
    """Whether the store has all of a range of offsets: published, and there now, with the right size.

    With `max_epoch`, only objects up to that epoch count: those of a later owner are other messages, although they have
    the same offsets. What is below the topic's start needs no copy.
    """
    reached = max(first_offset, catalog.start_offset())
    if reached >= next_offset:
        return True
    for descriptor in catalog.walk(reached):
        wanted = min(next_offset, descriptor.next_offset)
        is_foreign = max_epoch is not None and descriptor.written_until(max_epoch) < wanted
        if is_foreign or descriptor.start_offset > reached or not _is_there(catalog, objects, descriptor):
            return False
        reached = descriptor.next_offset
        if reached >= next_offset:
            return True
    return False


def safe_below(
    files: Sequence[File], offset: int, catalog: Catalog, objects: ObjectStore, *, max_epoch: int | None = None
) -> int:
    """How far below `offset` files may be deleted now: each is asked about, oldest first, up to the first doubt."""
    safe = files[0].first_offset if files else 0
    for file in files:
        if file.next_offset > offset:
            break
        if not is_safe_to_remove(catalog, objects, file.first_offset, file.next_offset, max_epoch=max_epoch):
            break
        safe = file.next_offset
    return safe


def _is_there(catalog: Catalog, objects: ObjectStore, descriptor: Descriptor) -> bool:
    try:
        return objects.head(catalog.keys.object(descriptor.name)).size == descriptor.size
    except NotFoundError:
        return False


def _oldest_kept_us(now_us: int, max_age_seconds: int | None) -> int | None:
    return None if max_age_seconds is None else now_us - max_age_seconds * 1_000_000


class Eviction:
    """Deletes files of one log from this disk, once the store has them.

    `below` is the rule: the offset below which files are no longer wanted here. Files go oldest first.
    """

    def __init__(
        self, log: Log, objects: ObjectStore, below: Callable[[], int], remove_below: Callable[[int], int] | None = None
    ) -> None:
        self._log = log
        self._objects = objects
        self._below = below
        self._remove_below = remove_below or log.remove_below
        self._evicting = Lock()
        self.freed_bytes = 0

    def run(self, owned: OwnedCatalog, most: int | None = None) -> int:
        """Deletes what may go now, nothing at the offset `most` or above it; returns the bytes freed."""
        with self._evicting:
            files, offset = self._log.file_spans(), self._below()
            offset = offset if most is None else min(offset, most)
            if not files or offset <= files[0].first_offset:
                return 0
            owned.ownership.verify()
            safe = safe_below(files, offset, owned.catalog, self._objects, max_epoch=owned.epoch)
            freed = self._remove_below(safe)
            self.freed_bytes += freed
            return freed


# Carries out retention for a topic that this process owns, now and then.


_logger = logging.getLogger("tidelog.cold")


class Pruner:
    """Deletes what is due, in the store and on the disk. `shipped_offset` tells how far the store may have it."""

    def __init__(
        self,
        log: Log,
        owned: OwnedCatalog,
        objects: ObjectStore,
        settings: TierSettings,
        clock: Clock,
        shipped_offset: Callable[[], int],
    ) -> None:
        self.start_offset = owned.catalog.start_offset()
        """The oldest offset that may be read, as this owner left it."""
        self._log = log
        self._owned = owned
        self._objects = objects
        self._settings = settings
        self._clock = clock
        self._shipped_offset = shipped_offset
        self.keep_from: Callable[[], int | None] = lambda: None
        """The lowest offset that is still needed: nothing from there on is deleted. None: no offset is."""
        self._pruning = Lock()
        self._must_finish = True
        self._eviction = Eviction(log, objects, self._unwanted_below)
        self._cold_objects = 0
        self._cold_bytes = 0
        self._errors = 0
        self._last_error: str | None = None

    def configure(self, settings: TierSettings) -> None:
        self._settings = settings

    def delete_before(self, offset: int) -> None:
        """Moves the start of the topic, and deletes what is wholly below it. The store has everything below it."""
        with self._pruning:
            if offset > self.start_offset:
                self._must_finish = True
                self._owned.move_start(offset)
                self._begins_at(offset)
            self._finish()
            self._eviction.run(self._owned)

    def prune_if_due(self) -> float:
        """One look in the background; returns the seconds until the next."""
        try:
            self.prune()
        except TidelogError as error:
            self._errors += 1
            self._last_error = str(error)
            raise
        return NEVER if self._is_done_for_good else self._settings.retention_interval_seconds

    @property
    def _is_done_for_good(self) -> bool:
        """Nothing will ever be due: nothing is to be deleted by age or size, and what was to be deleted is."""
        settings = self._settings
        limits = (
            *(settings.retention_seconds, settings.retention_bytes),
            *(settings.local_retention_seconds, settings.local_retention_bytes),
        )
        is_over = not self._must_finish and self._log.start_offset >= self.start_offset
        return is_over and all(limit is None for limit in limits)

    def plan(self) -> RetentionPlan:
        """What `prune` would delete now. Changes nothing."""
        with self._pruning:
            cold, files = self._due_cold(), self._log.file_spans()
            evict_before = self._unwanted_below(cold.start_offset)
            return RetentionPlan(
                start_offset=self.start_offset,
                delete_before=cold.start_offset,
                objects=tuple(one.object_id for one in cold.descriptors),
                object_bytes=cold.bytes,
                hot_start_offset=self._log.start_offset,
                evict_before=evict_before,
                file_bytes=_bytes_below(files, evict_before),
            )

    def prune(self, plan: RetentionPlan | None = None) -> None:
        """Deletes everything that is due now, or what the plan says and nothing else; ConflictError if that is not
        what is due by now."""
        with self._pruning:
            self._finish()
            due = self._due_cold()
            if plan is not None:
                due = due.below(plan.delete_before)
                if due.start_offset != plan.delete_before or plan.objects != tuple(
                    o.object_id for o in due.descriptors
                ):
                    raise _changed()
            self._prune_cold(due)
            self._eviction.run(self._owned, None if plan is None else plan.evict_before)
            self._last_error = None

    def _due_cold(self) -> ColdPlan:
        settings, now_us = self._settings, self._clock.now_us()
        if settings.retention_seconds is None and settings.retention_bytes is None:
            return ColdPlan(start_offset=self.start_offset)
        plan = plan_cold(self._owned.catalog, now_us, settings.retention_seconds, settings.retention_bytes)
        return plan.below(self.keep_from())

    def _prune_cold(self, plan: ColdPlan) -> None:
        if plan.is_empty:
            return
        begin = self._clock.monotonic()
        self._must_finish = True
        self._owned.move_start(plan.start_offset)
        self._begins_at(plan.start_offset)
        apply_cold(self._owned, self._objects, plan)
        self._must_finish = False
        self._cold_objects += len(plan.descriptors)
        self._cold_bytes += plan.bytes
        tell(
            _logger,
            "cold_deleted",
            **self._log.subject,
            start_offset=plan.start_offset,
            objects=len(plan.descriptors),
            bytes=plan.bytes,
            seconds=self._clock.monotonic() - begin,
        )

    def _finish(self) -> None:
        """What an interrupted deletion left, and what is below a start that was moved."""
        if self._must_finish:
            self._begins_at(self._owned.catalog.start_offset())  # whether it was moved may have been undecided
            removed = finish_cold(self._owned, self._objects)
            self._must_finish = False
            self._cold_objects += len(removed)
            self._cold_bytes += sum(one.size for one in removed)

    def _begins_at(self, offset: int) -> None:
        """From the moment the start has moved nobody reads below it, however long the deletion takes."""
        self.start_offset = max(self.start_offset, offset)

    def _unwanted_below(self, start_offset: int = 0) -> int:
        """What is below the topic's start, or a later one, goes in any case; the rest as the local settings say."""
        settings, shipped = self._settings, self._shipped_offset()
        offset = plan_local(
            self._log.file_spans(),
            shipped,
            self._clock.now_us(),
            settings.local_retention_seconds,
            settings.local_retention_bytes,
        )
        return max(offset, min(max(self.start_offset, start_offset), shipped))

    def statistics(self) -> RetentionStatistics:
        return RetentionStatistics(
            local_bytes_removed=self._eviction.freed_bytes,
            cold_objects_removed=self._cold_objects,
            cold_bytes_removed=self._cold_bytes,
            errors=self._errors,
            last_error=self._last_error,
        )


# Retention for a log without a store: what goes is gone for good.


class LocalPruner:
    """Deletes the oldest files of a log by age and size.

    The newest file stays on the disk, since it may be written to; its messages go by age one by one, so that a topic
    to which nobody writes becomes empty, too.
    """

    def __init__(self, log: Log, settings: TierSettings, clock: Clock) -> None:
        self._log = log
        self._settings = settings
        self._clock = clock
        self._background: Background | None = None
        self._task: Task | None = None
        self.keep_from: Callable[[], int | None] = lambda: None
        """The lowest offset that is still needed: nothing from there on is deleted. None: no offset is."""

    @property
    def has_work(self) -> bool:
        """Whether anything is ever to be deleted."""
        return self._settings.retention_seconds is not None or self._settings.retention_bytes is not None

    def start(self, background: Background) -> None:
        """Looks now and then, in the background, as soon as anything is ever to be deleted."""
        self._background = background
        if self.has_work:
            self._task = background.add(self._prune_if_due, self._settings.retention_interval_seconds)

    def configure(self, settings: TierSettings) -> None:
        self._settings = settings
        if self._task is not None:
            self._task.soon()
        elif self._background is not None:
            self.start(self._background)

    def plan(self) -> RetentionPlan:
        """What `prune` would delete now. Changes nothing."""
        files, start = self._log.file_spans(), self._log.start_offset
        before = max(start, *self._due(files))
        return RetentionPlan(
            start_offset=start,
            delete_before=before,
            hot_start_offset=start,
            evict_before=before,
            file_bytes=_bytes_below(files[:-1], before),
        )

    def prune(self, plan: RetentionPlan | None = None) -> None:
        """Deletes everything that is due now, or what the plan says and nothing else; ConflictError if that is not
        what is due by now."""
        start = self._log.start_offset
        due, expired = self._due(self._log.file_spans())
        if plan is not None:
            if plan.start_offset != start or max(start, due, expired) < plan.delete_before:
                raise _changed()
            due, expired = min(due, plan.delete_before), min(expired, plan.delete_before)
        if due > start:
            self._log.remove_below(due)
        if expired > max(start, due):
            self._log.delete_before(expired)

    def _due(self, files: Sequence[File]) -> tuple[int, int]:
        """Below which offset files go, and below which one messages do."""
        if not self.has_work:
            return 0, 0
        limits = (self._settings.retention_seconds, self._settings.retention_bytes)
        due, needed = plan_local(files, None, self._clock.now_us(), *limits), self.keep_from()
        expired = self._expired_in_newest(files, due) or 0
        return (due, expired) if needed is None else (min(due, needed), min(expired, needed))

    def _expired_in_newest(self, files: Sequence[File], due: int) -> int | None:
        """The offset below which messages of the newest file are too old; None while no message is, or older files are
        still needed."""
        oldest_kept_us = _oldest_kept_us(self._clock.now_us(), self._settings.retention_seconds)
        if oldest_kept_us is None or not files or due < files[-1].first_offset or files[-1].max_time_us is None:
            return None
        start = max(files[-1].first_offset, self._log.start_offset)
        expired = self._log.offset_at(oldest_kept_us, start)
        return expired if expired > start else None

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _prune_if_due(self) -> float:
        try:
            self.prune()
        except TidelogError as error:
            _logger.warning("%s: retention failed and is tried again: %s", self._log.directory, error)
        return self._settings.retention_interval_seconds if self.has_work else NEVER
