"""Where objects begin, for a store that lists forwards only: the last one before an offset, in a few reads.

Invariants
- It is a memory of keys, not of what is under them: descriptors are read when they are needed.
- A descriptor that holds the offset is the answer, however it was found. Anything else is answered from a listing.
- It begins with the starts that `cur` names, so that whoever has just come need not list a long catalog. Those are a
  hint: some may be missing or gone. After a listing from the first key on, none is missing before the last known one,
  since keys are added behind all others. (Where a lost one was put back, it is found from the one before it.)
"""

from __future__ import annotations

from bisect import bisect_right, insort
from threading import Lock
from typing import TYPE_CHECKING

from tidelog.tier.descriptor import Descriptor

if TYPE_CHECKING:
    from tidelog.tier.catalog import Catalog

# How many starts `cur` names at most; then every second one is forgotten.
MAX_NAMED_STARTS = 4096
# From a start that is known to one that is not, each step costs a read. A listing costs about as much as ten.
_MAX_STEPS = 8


def with_start(starts: list[int], start_offset: int) -> list[int]:
    """What `cur` names after an object was published: it is behind all others."""
    longer = [start for start in starts if start < start_offset] + [start_offset]
    return longer if len(longer) <= MAX_NAMED_STARTS else longer[::2]


class KnownStarts:
    """What one catalog remembers. Threads may share it."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._is_complete = False
        self._guard = Lock()

    def floor(self, catalog: Catalog, offset: int) -> Descriptor | None:
        """The last descriptor that begins at an offset or before it."""
        with self._guard:
            if not self._starts:
                self._starts = catalog.named_starts()
            found = self._nearest(catalog, offset)
            if found is not None and offset <= found.end_offset:
                return found
            if self._knows_all_before(offset) and (found is not None or offset < self._starts[0]):
                return found
            self._list(catalog, found)
            return self._last_listed(catalog, offset)

    def _knows_all_before(self, offset: int) -> bool:
        return self._is_complete and bool(self._starts) and offset < self._starts[-1]

    def _nearest(self, catalog: Catalog, offset: int) -> Descriptor | None:
        """The one that is known, or a few steps behind it; None when it is gone."""
        found = self._last_known(catalog, offset)
        for _ in range(_MAX_STEPS):
            if found is None or not found.end_offset < offset < self._starts[-1]:
                break
            behind = catalog.find(found.next_offset)
            if behind is None or not isinstance(behind.value, Descriptor):
                break
            found = behind.value
            insort(self._starts, found.start_offset)
        return found

    def _last_known(self, catalog: Catalog, offset: int) -> Descriptor | None:
        while (index := bisect_right(self._starts, offset) - 1) >= 0:
            found = catalog.find(self._starts[index])
            if found is None:
                return None
            if isinstance(found.value, Descriptor):
                return found.value
            del self._starts[index:]  # a reservation: nothing is behind it, and it may be an object the next time
        return None

    def _list(self, catalog: Catalog, found: Descriptor | None) -> None:
        """Asks for all names from a descriptor on; without one, for all there are."""
        keys = catalog.keys
        first = None if found is None else keys.descriptor(found.start_offset)
        names = catalog.metadata.keys(keys.segments_prefix, start=first)
        listed = [start for name in names if (start := keys.parse_descriptor(name)) is not None]
        if found is None:
            self._starts, self._is_complete = listed, True
        else:
            self._starts = [start for start in self._starts if start < found.start_offset] + listed

    def _last_listed(self, catalog: Catalog, offset: int) -> Descriptor | None:
        while (index := bisect_right(self._starts, offset) - 1) >= 0:
            found = catalog.find(self._starts[index])
            if found is not None and isinstance(found.value, Descriptor):
                return found.value
            del self._starts[index]  # removed since it was listed, or a reservation
        return None
