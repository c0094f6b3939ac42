"""Applying what a log carries: plain entries as they are, guarded ones when what was read for them is still true.

Invariants
- A guarded entry is judged by the state just before it: whatever comes before it and touches what it has read is
  applied first. What does not touch it may stay in the same batch, and is applied with the same sync.
- Every entry has one result, in order. A guarded entry that is refused is not given to the engine at all.
- Where the log is repeated (seqs that were applied already) a guarded entry is not judged again, since the state before
  it is gone; it was applied then, or refused then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, Protocol

from tidelog.engine.entry import Entry, PutObject, operations
from tidelog.engine.entry_codec import Carried
from tidelog.engine.guard import Guarded, ObjectRead, Readable
from tidelog.engine.locks import Resource
from tidelog.engine.results import Result
from tidelog.engine.transaction import written

BATCH_ENTRIES: Final = 256
"""Entries that are applied with one sync. More of them make no entry cheaper, and let readers wait longer for news."""
BATCH_BYTES: Final = 8 << 20


class Applying(Readable, Protocol):
    """What is asked of an engine."""

    def apply_many(self, entries: Iterable[tuple[int, Entry]]) -> list[Result]: ...


def apply_entries(engine: Applying, entries: Iterable[tuple[int, Carried]]) -> list[Result]:
    """Applies them in order; the results in the same order."""
    pending = _Pending(engine)
    for seq, entry in entries:
        if isinstance(entry, Guarded):
            pending.add_guarded(seq, entry)
        else:
            pending.add(seq, entry)
    pending.apply()
    return pending.results


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
    batch = entry.batch if isinstance(entry, Guarded) else entry
    return sum(len(part.data) for part in operations(batch) if isinstance(part, PutObject))


class _Pending:
    """Entries that go to the engine together."""

    def __init__(self, engine: Applying) -> None:
        self.results: list[Result] = []
        self._engine = engine
        self._entries: list[tuple[int, Entry]] = []
        self._places: list[int] = []
        self._examined = 0
        self._touched: set[Resource] = set()

    def add(self, seq: int, entry: Entry) -> None:
        self._entries.append((seq, entry))
        self._places.append(len(self.results))
        self.results.append(_UNDECIDED)

    def add_guarded(self, seq: int, guarded: Guarded) -> None:
        if seq <= self._engine.applied_seq:
            self.results.append(Result(seq, "nothing", "its place in the log was passed before"))
            return
        if self._touches(guarded):
            self.apply()
        refusal = guarded.refusal(self._engine)
        if refusal is None:
            self.add(seq, guarded.batch)
        else:
            self.results.append(Result(seq, "refused", refusal))

    def _touches(self, guarded: Guarded) -> bool:
        """Whether anything that waits to be applied could change the verdict."""
        for _, entry in self._entries[self._examined :]:
            for resource in written(entry):
                self._touched.add(resource)
                # An entry about a key is one about a part of its bucket, which listings have read.
                self._touched.add(("", resource if isinstance(resource, str) else resource[0]))
        self._examined = len(self._entries)
        for read in guarded.reads:
            mine = (read.bucket, read.key) if isinstance(read, ObjectRead) else ("", read.bucket)
            if read.bucket in self._touched or mine in self._touched:
                return True
        return False

    def apply(self) -> None:
        """Gives the engine what has gathered."""
        if self._entries:
            for place, result in zip(self._places, self._engine.apply_many(self._entries), strict=True):
                self.results[place] = result
        self._entries, self._places, self._examined = [], [], 0
        self._touched.clear()


_UNDECIDED = Result(0, "nothing")
