"""Entries on their way from a log to an engine: as many at a time as one sync is worth.

Plain or guarded, the engine judges them (`guard.py`), one after the other, and gives one answer for each seq.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, Protocol

from tidelog.engine.entry import PutObject, operations
from tidelog.engine.entry_codec import Carried
from tidelog.engine.guard import Readable, batch_of
from tidelog.engine.results import Result

BATCH_ENTRIES: Final = 256
"""Entries that are applied with one sync. More of them make no entry cheaper, and let readers wait longer for news."""
BATCH_BYTES: Final = 8 << 20


class Applying(Readable, Protocol):
    """What is asked of an engine."""

    def apply_many(self, entries: Iterable[tuple[int, Carried]]) -> list[Result]: ...


def apply_entries(engine: Applying, entries: Iterable[tuple[int, Carried]]) -> list[Result]:
    """Applies them in order; the results in the same order. An engine does all of it."""
    return engine.apply_many(entries)


def batches(entries: Iterable[tuple[int, Carried]]) -> Iterator[list[tuple[int, Carried]]]:
    """The same entries in lists, each for one sync, and none larger than memory should hold."""
    gathered = Gathered()
    for pair in entries:
        if gathered.add(pair):
            yield gathered.take()
    if gathered.pairs:
        yield gathered.take()


class Gathered:
    """Entries on their way into one batch."""

    def __init__(self) -> None:
        self.pairs: list[tuple[int, Carried]] = []
        self._bytes = 0

    def add(self, pair: tuple[int, Carried]) -> bool:
        """Whether it is time to apply them."""
        self.pairs.append(pair)
        self._bytes += data_bytes(pair[1])
        return len(self.pairs) >= BATCH_ENTRIES or self._bytes >= BATCH_BYTES

    def take(self) -> list[tuple[int, Carried]]:
        """What has gathered; nothing is left."""
        pairs, self.pairs, self._bytes = self.pairs, [], 0
        return pairs


def data_bytes(entry: Carried) -> int:
    """Bytes of data in an entry."""
    if isinstance(entry, PutObject):
        return len(entry.data)
    return sum(len(part.data) for part in operations(batch_of(entry)) if isinstance(part, PutObject))
