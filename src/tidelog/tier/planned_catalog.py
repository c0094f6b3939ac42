"""A catalog that begins with descriptors that somebody has looked up before, for readers far from the metadata store.

Invariants
- What was planned answers until something is found to be missing. From then on the store is asked, which was not even
  opened before: a reader of what is where it was needs no metadata store at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tidelog.tier.catalog import Catalog, Found
from tidelog.tier.descriptor import Descriptor
from tidelog.tier.keys import TopicKeys


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
        planned = next((one for one in self._planned if one.start_offset == start_offset), None)
        return self._catalog().find(start_offset) if planned is None else Found(planned, "")

    def walk(self, offset: int) -> Iterator[Descriptor]:
        planned = [one for one in self._planned if one.end_offset >= offset] if self._asked is None else []
        return iter(planned) if planned else self._catalog().walk(offset)

    def at(self, offset: int) -> Descriptor | None:
        """Asked when an object was not where it should be, so what was planned is not believed any more."""
        return self._catalog().at(offset)

    def start_offset(self) -> int:
        return self._catalog().start_offset()

    def _catalog(self) -> Catalog:
        if self._asked is None:
            self._asked = self._open_catalog()
        return self._asked
