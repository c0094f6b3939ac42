"""What a sweep has found and what it did: data that can be shown, stored as JSON and carried out."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tidelog.errors import offsets_text
from tidelog.tier.keys import parse_object_id
from tidelog.tier.object_store import ObjectInfo


class SweptObject(msgspec.Struct, frozen=True, kw_only=True):
    """An object, or what a descriptor says about one."""

    key: str
    start_offset: int
    end_offset: int
    epoch: int
    size: int

    @property
    def object_id(self) -> str:
        """Its name without the place."""
        return self.key.rpartition("/")[2]

    @property
    def next_offset(self) -> int:
        return self.end_offset + 1

    @property
    def is_compacted(self) -> bool:
        """Whether a compaction made it, and not an owner."""
        name = parse_object_id(self.object_id)
        return name is not None and name.generation > 0

    def __str__(self) -> str:
        return f"{self.key} ({offsets_text(self.start_offset, self.end_offset)}, {self.size} bytes)"


class SweepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What does not belong together, by what is done about it.

    below_start   descriptors wholly below the start: removed with their objects, by the owner
    left_over     objects wholly below the start that no descriptor names: deleted
    orphans       objects that no descriptor names, whose offsets are published in others: deleted
    unfinished    uploads that nobody has touched for a day: deleted
    staged        rows that were staged a day ago and never handed over: deleted
    uncovered     objects of earlier owners that no descriptor names, the only ones with some offset: kept, unless told
    lost          descriptors whose object is gone: kept, unless told
    damaged       descriptors whose object has another size: kept
    pending       objects of the owner's epoch, or of a compaction at work, that are not published, or not yet: kept
    replaced      objects that a compaction has replaced, and that it will delete: kept
    newer         objects of a later epoch than the owner's: kept; the catalog may be an old copy
    foreign       names that are not ours: kept
    """

    epoch: int
    claim: str
    start_offset: int
    next_offset: int
    is_deleted: bool = False
    below_start: tuple[SweptObject, ...] = ()
    left_over: tuple[SweptObject, ...] = ()
    orphans: tuple[SweptObject, ...] = ()
    unfinished: tuple[ObjectInfo, ...] = ()
    staged: tuple[ObjectInfo, ...] = ()
    uncovered: tuple[SweptObject, ...] = ()
    lost: tuple[SweptObject, ...] = ()
    damaged: tuple[SweptObject, ...] = ()
    pending: tuple[SweptObject, ...] = ()
    replaced: tuple[SweptObject, ...] = ()
    newer: tuple[SweptObject, ...] = ()
    foreign: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing that is removed without being asked for."""
        return not (self.below_start or self.left_over or self.orphans or self.unfinished or self.staged)

    @property
    def bytes(self) -> int:
        """What is freed."""
        removed = (*self.below_start, *self.left_over, *self.orphans)
        uncommitted = (*self.unfinished, *self.staged)
        return sum(one.size for one in removed) + sum(one.size for one in uncommitted)

    def lines(self) -> Iterator[str]:
        """For people: a line for each thing, what is removed first."""
        for title, found in (
            ("remove, below the start", self.below_start),
            ("remove, below the start and not published", self.left_over),
            ("remove, published by others", self.orphans),
            ("keep, never published and the only copy", self.uncovered),
            ("LOST, the object is gone", self.lost),
            ("DAMAGED, the object has another size", self.damaged),
            ("keep, of the owner's epoch or being made", self.pending),
            ("keep, replaced, and deleted by the compaction", self.replaced),
            ("keep, of a later epoch", self.newer),
            ("keep, not ours", self.foreign),
        ):
            yield from (f"{title}: {one}" for one in found)
        yield from (f"remove, unfinished upload: {one.key} ({one.size} bytes)" for one in self.unfinished)
        yield from (f"remove, staged and never handed over: {one.key} ({one.size} bytes)" for one in self.staged)


class SweepReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a sweep did. `skipped` is what turned out otherwise when it was looked at again, and why it stayed."""

    objects: tuple[str, ...] = ()
    descriptors: tuple[int, ...] = ()
    unfinished: tuple[str, ...] = ()
    staged: tuple[str, ...] = ()
    dropped_lost: tuple[int, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    bytes: int = 0
