"""What a topic's catalog says, read without believing it: every descriptor, and whether they fit together.

Invariants
- A descriptor that cannot be understood is a problem with its key, and the others are read all the same.
- From the start of the topic to its end every offset is in one object. A descriptor that lies inside a compacted one
  was replaced by it and is about to go: no problem.
- Nothing here reads an object.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tidelog.errors import DataError
from tidelog.pipeline.jobs.job import Problem
from tidelog.tier.catalog import Catalog
from tidelog.tier.descriptor import Descriptor, decode_descriptor


class CatalogLook(msgspec.Struct, frozen=True, kw_only=True):
    """A topic's descriptors as they are at one moment, in order, and what is wrong with them."""

    start_offset: int
    descriptors: tuple[Descriptor, ...]
    replaced: tuple[Descriptor, ...]
    problems: tuple[Problem, ...]

    @property
    def next_offset(self) -> int:
        """The first offset that no object has."""
        return max([self.start_offset, *(one.next_offset for one in self.descriptors)])

    @property
    def object_ids(self) -> frozenset[str]:
        return frozenset(one.object_id for one in (*self.descriptors, *self.replaced))


def look_at_catalog(topic: str, catalog: Catalog, first_offset: int = 0) -> CatalogLook:
    """All descriptors that count. `first_offset` is that of a log from which nothing was removed."""
    return _Look(topic, catalog, first_offset).result()


class _Look:
    def __init__(self, topic: str, catalog: Catalog, first_offset: int) -> None:
        self._topic = topic
        self._catalog = catalog
        self._first_offset = first_offset
        self._keys = catalog.keys
        self._problems: list[Problem] = []

    def result(self) -> CatalogLook:
        start_offset = max(self._first_offset, self._catalog.start_offset())
        found = [one for one in self._read() if one.next_offset > start_offset]
        kept, replaced = _without_replaced(found)
        self._check_order(kept, start_offset)
        self._check_times(kept)
        look = CatalogLook(
            start_offset=start_offset,
            descriptors=tuple(kept),
            replaced=tuple(replaced),
            problems=tuple(self._problems),
        )
        ends = [*self._check_current(look), *self._check_seal(look)]
        return msgspec.structs.replace(look, problems=(*look.problems, *ends))

    def _read(self) -> Iterator[Descriptor]:
        for entry in self._catalog.metadata.range(self._keys.segments_prefix):
            start = self._keys.parse_descriptor(entry.key)
            if start is None:
                continue
            try:
                found = decode_descriptor(entry.value, entry.key, start)
            except DataError as error:
                self._add(entry.key, error.message)
                continue
            if isinstance(found, Descriptor):
                yield found

    def _check_order(self, descriptors: list[Descriptor], start_offset: int) -> None:
        expected = start_offset
        for number, one in enumerate(descriptors):
            key = self._keys.descriptor(one.start_offset)
            if one.start_offset > expected:
                self._add(key, "a gap: no object has the offsets before it", expected, one.start_offset - 1)
            elif one.start_offset < expected and number:
                last = min(expected, one.next_offset) - 1
                self._add(key, "an overlap: the object before it has these offsets too", one.start_offset, last)
            expected = max(expected, one.next_offset)

    def _check_times(self, descriptors: list[Descriptor]) -> None:
        reached: int | None = None
        for one in descriptors:
            if reached is not None and (one.reached_time_us is None or one.reached_time_us < reached):
                reason = f"its reached_time_us is {one.reached_time_us}, and objects before it reach {reached}"
                self._add(self._keys.descriptor(one.start_offset), reason, one.start_offset, one.end_offset)
            reached = max(filter(None, (reached, one.reached_time_us)), default=None)

    def _check_current(self, look: CatalogLook) -> Iterator[Problem]:
        """`cur` is a hint, but it was written together with a descriptor: one that is missing has been lost."""
        current = self._catalog.current()
        if current is not None and current[0] >= look.next_offset:
            yield Problem(
                topic=self._topic,
                place=self._keys.descriptor(current[0]),
                reason="the newest descriptor was published, and is gone",
                first_offset=look.next_offset,
                last_offset=current[0],
            )

    def _check_seal(self, look: CatalogLook) -> Iterator[Problem]:
        owner, sealed = self._catalog.owner(), self._catalog.sealed()
        if sealed is None or not sealed.sealed or owner is None or owner[0].epoch != sealed.epoch:
            return
        if sealed.last_committed_offset is not None and sealed.last_committed_offset >= look.next_offset:
            yield Problem(
                topic=self._topic,
                place=self._keys.state,
                reason="it was sealed with these offsets, and no object has them",
                first_offset=look.next_offset,
                last_offset=sealed.last_committed_offset,
            )

    def _add(self, key: str, reason: str, first: int | None = None, last: int | None = None) -> None:
        self._problems.append(
            Problem(topic=self._topic, place=key, reason=reason, first_offset=first, last_offset=last)
        )


def _without_replaced(descriptors: list[Descriptor]) -> tuple[list[Descriptor], list[Descriptor]]:
    """Those that count, and those inside of a compacted one before them."""
    kept: list[Descriptor] = []
    replaced: list[Descriptor] = []
    for one in descriptors:
        before = kept[-1] if kept else None
        is_replaced = (
            before is not None and one.end_offset <= before.end_offset and before.name.generation > one.name.generation
        )
        (replaced if is_replaced else kept).append(one)
    return kept, replaced
