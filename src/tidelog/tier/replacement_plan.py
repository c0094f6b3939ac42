"""Which objects of a topic are to become one: runs of neighbours, small enough together and worth the work.

Invariants
- A run has no hole, and neither the newest objects nor anything below the start is in one: what is newest is the
  owner's to publish again, what is below the start is about to go.
- Runs do not overlap, and are in order.
- An object is written again only together with others that have at least as many bytes, so what a topic's messages are
  copied for grows with the logarithm of its size, however often it is compacted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from tidelog.errors import InputError
from tidelog.tier.catalog import Catalog, Found
from tidelog.tier.descriptor import Descriptor
from tidelog.tier.replacement import Replaced

DEFAULT_TARGET_BYTES = 256 << 20
# What one new object replaces is written down in one entry, which has at most a MiB.
MAX_RUN_OBJECTS = 1000
# A descriptor says which owner wrote which part of its object; it is read often, and has to stay small.
MAX_EPOCHS = 1024
IsWanted = Callable[[Descriptor], bool]


class Run(msgspec.Struct, frozen=True):
    """Neighbours that are to become one object, and what the catalog has to say about them when it is switched."""

    descriptors: tuple[Descriptor, ...]
    replaced: tuple[Replaced, ...]

    @property
    def start_offset(self) -> int:
        return self.descriptors[0].start_offset

    @property
    def next_offset(self) -> int:
        return self.descriptors[-1].next_offset

    @property
    def bytes(self) -> int:
        return sum(one.size for one in self.descriptors)


class Planned(NamedTuple):
    """Some runs, and the offset from which on there may be more; None: these are all."""

    runs: list[Run]
    next_offset: int | None


def plan_merges(
    catalog: Catalog, *, target_bytes: int, keep_newest: int = 1, from_offset: int = 0, max_runs: int = 64
) -> Planned:
    """Runs of small objects, each of at most `target_bytes` together."""
    _check(target_bytes, keep_newest)
    small = _Gathering(target_bytes, lambda one: one.size * 2 <= target_bytes)
    return small.take(_old_enough(catalog, from_offset, keep_newest), max_runs, _worth_merging)


def plan_rewrites(
    catalog: Catalog,
    is_wanted: IsWanted,
    *,
    target_bytes: int,
    keep_newest: int = 1,
    from_offset: int = 0,
    max_runs: int = 64,
) -> Planned:
    """Runs of the objects that are wanted, neighbours together as long as they fit; one alone is a run as well."""
    _check(target_bytes, keep_newest)
    gathering = _Gathering(target_bytes, is_wanted)
    return gathering.take(_old_enough(catalog, from_offset, keep_newest), max_runs, lambda found: found)


def _check(target_bytes: int, keep_newest: int) -> None:
    if target_bytes < 1:
        raise InputError(f"an object of {target_bytes} bytes is none", operation="compact")
    if keep_newest < 1:
        raise InputError("the newest object belongs to the owner of the topic and is never replaced")


def _old_enough(catalog: Catalog, from_offset: int, keep_newest: int) -> Iterator[Found]:
    """All but the newest ones."""
    held: list[Found] = []
    for found in catalog.found_from(max(from_offset, catalog.start_offset())):
        held.append(found)
        if len(held) > keep_newest:
            yield held.pop(0)


class _Gathering:
    """Puts neighbours together."""

    def __init__(self, target_bytes: int, is_wanted: IsWanted) -> None:
        self._target_bytes = target_bytes
        self._is_wanted = is_wanted
        self._open: list[tuple[Descriptor, str]] = []
        self._bytes = 0
        self._epochs = 0

    def take(
        self,
        found: Iterator[Found],
        max_runs: int,
        worth: Callable[[list[tuple[Descriptor, str]]], list[tuple[Descriptor, str]]],
    ) -> Planned:
        runs: list[Run] = []
        for closed in self._closed(found):
            if kept := worth(closed):
                runs.append(_run(kept))
            if len(runs) == max_runs:
                return Planned(runs, closed[-1][0].next_offset)
        return Planned(runs, None)

    def _closed(self, found: Iterator[Found]) -> Iterator[list[tuple[Descriptor, str]]]:
        for one in found:
            descriptor = one.value
            assert isinstance(descriptor, Descriptor), "reservations have been left out"
            if self._open and not self._fits(descriptor):
                yield self._close()
            if self._is_wanted(descriptor):
                self._open.append((descriptor, one.version))
                self._bytes += descriptor.size
                self._epochs += len(descriptor.all_epochs)
        if self._open:
            yield self._close()

    def _fits(self, descriptor: Descriptor) -> bool:
        return (
            self._open[-1][0].next_offset == descriptor.start_offset
            and self._bytes + descriptor.size <= self._target_bytes
            and len(self._open) < MAX_RUN_OBJECTS
            and self._epochs + len(descriptor.all_epochs) <= MAX_EPOCHS
            and self._is_wanted(descriptor)
        )

    def _close(self) -> list[tuple[Descriptor, str]]:
        closed, self._open, self._bytes, self._epochs = self._open, [], 0, 0
        return closed


def _worth_merging(found: list[tuple[Descriptor, str]]) -> list[tuple[Descriptor, str]]:
    """Without those in front that are larger than all that follows them; nothing where fewer than two are left."""
    rest = sum(one.size for one, _ in found)
    for index, (descriptor, _) in enumerate(found):
        rest -= descriptor.size
        if descriptor.size <= rest:
            return found[index:]
    return []


def _run(found: list[tuple[Descriptor, str]]) -> Run:
    replaced = tuple(Replaced(one.object_id, version, one.size) for one, version in found)
    return Run(tuple(one for one, _ in found), replaced)
