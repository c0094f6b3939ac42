"""Retention: what of a topic may go, by age and by size. In the store for good, on the local disk as a copy.

Cold, in this order
1. `plan_cold` looks; nothing changes.
2. The start of the topic moves: that is the written plan. From here on nobody reads below it, whatever happens next.
3. Descriptors below the start go, oldest first.
4. Objects that no descriptor names any more go, oldest first: the objects alone tell a history without holes, too.
A crash after 2 leaves descriptors, which `finish_cold` removes with their objects; one after 3 leaves objects below the
start that no descriptor names, which the sweep removes.

Invariants
- Whole objects and whole files go, never parts, and always the oldest first: what stays has no hole.
- An object goes when all of it is below the start. The newest may go as well: the start remembers where the topic ends.
- A local file goes only when the catalog covers it and the store has just said that the objects are there. What could
  not be asked is raised, and nothing is removed. The newest file stays: it may be written to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol

import msgspec

from tidelog.errors import NotFoundError
from tidelog.tier.catalog import Catalog
from tidelog.tier.descriptor import Descriptor
from tidelog.tier.object_store import ObjectStore
from tidelog.tier.owned_catalog import OwnedCatalog

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
    """Goes on where a deletion was interrupted: removes what is wholly below the start, and returns it."""
    left_over = list(published_below(owned.catalog, owned.catalog.start_offset()))
    remove_published(owned, objects, left_over)
    return left_over


def published_below(catalog: Catalog, offset: int) -> Iterable[Descriptor]:
    """The descriptors of which nothing is at an offset or above it, oldest first."""
    for descriptor in catalog.walk(0):
        if descriptor.next_offset > offset:
            return
        yield descriptor


def remove_published(owned: OwnedCatalog, objects: ObjectStore, descriptors: Sequence[Descriptor]) -> None:
    """Descriptors first, then their objects. They are below the start."""
    owned.remove_descriptors(descriptors)
    for descriptor in descriptors:
        # Who lost the topic has no say any more, not even in what is past.
        owned.ownership.verify()
        remove_unpublished(owned.catalog, objects, descriptor)


def remove_unpublished(catalog: Catalog, objects: ObjectStore, descriptor: Descriptor) -> bool:
    """Deletes an object unless a descriptor still names it; returns whether it was deleted."""
    if names_object(catalog, descriptor.start_offset, descriptor.object_id):
        return False
    objects.delete(catalog.keys.object(descriptor.name))
    return True


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
