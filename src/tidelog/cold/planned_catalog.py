"""A catalog preloaded with descriptors that were looked up before, for readers far from the metadata store.

Invariants
- The preloaded descriptors answer until something is found to be missing. From then on the store is asked, which was
  not even opened before: while nothing has moved, a reader needs no metadata store at all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from tidelog.cold.catalog import Catalog, Descriptor, Found
from tidelog.store.keys import TopicKeys


class PlannedCatalog(Catalog):
    """The descriptors of one range of offsets, and where to ask when they no longer hold."""

    def __init__(self, descriptors: Sequence[Descriptor], keys: TopicKeys, open_catalog: Callable[[], Catalog]) -> None:
        self.keys = keys
        self._planned = tuple(descriptors)
        self._open_catalog = open_catalog
        self._asked: Catalog | None = None

    def find(self, start_offset: int) -> Found | None:
        if self._asked is not None:
            return self._asked.find(start_offset)
        planned = self.known(start_offset)
        return self._catalog().find(start_offset) if planned is None else Found(planned, "")

    def known(self, start_offset: int) -> Descriptor | None:
        planned = self._planned if self._asked is None else ()
        at = bisect_left(planned, start_offset, key=lambda one: one.start_offset)
        return planned[at] if at < len(planned) and planned[at].start_offset == start_offset else None

    def walk(self, offset: int) -> Iterator[Descriptor]:
        planned = [one for one in self._planned if one.end_offset >= offset] if self._asked is None else []
        return iter(planned) if planned else self._catalog().walk(offset)

    def between(self, first_offset: int, next_offset: int) -> Iterator[Descriptor]:
        planned = self._planned if self._asked is None else ()
        if planned and planned[0].start_offset <= first_offset and planned[-1].next_offset >= next_offset:
            return (one for one in planned if one.end_offset >= first_offset and one.start_offset < next_offset)
        return self._catalog().between(first_offset, next_offset)

    def at(self, offset: int) -> Descriptor | None:
        """Asked when an object was not where it should be, so what was planned is not believed any more."""
        return self._catalog().at(offset)

    def start_offset(self) -> int:
        return (self._asked or self._open_catalog()).start_offset()

    def _catalog(self) -> Catalog:
        if self._asked is None:
            self._asked = self._open_catalog()
        return self._asked
