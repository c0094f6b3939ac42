"""The iterators of a scan, which `seek` moves to another key: `Scan`, and `AsyncScan` for asyncio.

    lists of rows from a key on ─> the rest of one list (C) ─> items
             └──────── seek drops both and begins new ones

Invariants
- Items come without a call of Python's for each: what `iter` returns is a chain in C, or a generator.
- A scan that has ended goes on after a seek, also for who iterates over it again.
- An empty list says that the next one may have to wait for the store: `take` stops there for who may not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterator
from itertools import chain, islice, starmap

from tidelog.engine.entry import ScannedObject
from tidelog.engine.mvcc.versions import Row
from tidelog.engine.reads import check_names
from tidelog.store.aio import ITEMS_AT_ONCE

Lists = Generator[list[Row], None, None]
"""Lists of rows as items have them, an empty one before one that may wait for the store; closing it ends what is under
way."""
Take = Callable[[bool], list[ScannedObject] | None]
"""Takes the next objects; told whether it may wait for the store, and None where it would have to."""
Run = Callable[[Take], Awaitable[list[ScannedObject]]]


class _Source(Iterator[Iterator[ScannedObject]]):
    """The items of one list after the other. Unlike a generator it goes on after its end, if it was moved."""

    def __init__(self, begin: Callable[[str | None], Lists]) -> None:
        self._begin = begin
        self._lists = begin(None)
        self._rest: Iterator[Row] = iter(())
        self._waits = False
        self.has_ended = False

    def __next__(self) -> Iterator[ScannedObject]:
        self.has_ended = True
        rows = next(self._lists)
        self.has_ended = False
        self._rest = iter(rows)
        return starmap(ScannedObject, self._rest)

    def take(self, most: int, *, may_wait: bool) -> list[ScannedObject] | None:
        """So many items at most, none at the end. Without `may_wait` only those before a wait: None if there are
        none.
        """
        found = list(islice(starmap(ScannedObject, self._rest), most))
        while len(found) < most:
            if self._waits and not may_wait:
                return found or None
            rows = next(self._lists, None)
            if rows is None:
                break
            self._waits, self._rest = not rows, iter(rows)
            found += islice(starmap(ScannedObject, self._rest), most - len(found))
        return found

    def seek(self, key: str) -> None:
        """Lists from a key on. If that is refused, nothing has changed."""
        lists = self._begin(key)
        self.close()
        self._lists, self._waits, self.has_ended = lists, False, False

    def close(self) -> None:
        self._lists.close()
        deque(self._rest, maxlen=0)  # whoever iterates over these is at their end


class Scan(Iterator[ScannedObject]):
    """The objects of a scan, an iterator; `engine.scan()` returns it. For one thread at a time.

    It keeps its state until it has ended, or is closed or dropped.
    """

    def __init__(self, begin: Callable[[str | None], Lists]) -> None:
        self._source = _Source(begin)
        self._items = chain.from_iterable(self._source)

    def __iter__(self) -> Iterator[ScannedObject]:
        return self._items

    def __next__(self) -> ScannedObject:
        return next(self._items)

    def _take(self, most: int, *, may_wait: bool) -> list[ScannedObject] | None:
        """So many of the next objects at most, none at the end. Without `may_wait` None where the store has to be
        asked. Who takes does not iterate.
        """
        return self._source.take(most, may_wait=may_wait)

    def seek(self, key: str) -> None:
        """Goes on at a key, forwards or backwards: the next object is the first one at or after it, in reverse the
        last one at or before it. State, bounds and prefix of the scan stay; `limit` counts from here.

        A scan that has ended goes on too: NotFoundError if its state is not kept any more, ConflictError if it was
        rolled back.
        """
        check_names("", key)
        has_ended = self._source.has_ended
        self._source.seek(key)
        if has_ended:
            self._items = chain.from_iterable(self._source)

    def close(self) -> None:
        """Ends the scan, and lets go of its state. Idempotent."""
        self._source.close()


class AsyncScan(AsyncIterator[ScannedObject]):
    """The objects of a scan for asyncio; `engine.scan_async()` returns it. For one task at a time."""

    def __init__(self, begin: Callable[[], Scan], run: Run) -> None:
        """`run` has a thread do the work of a call."""
        self._run = run
        self._begin = begin
        self._scan: Scan | None = None
        self._wanted: str | None = None
        self._rest: Iterator[ScannedObject] = iter(())
        self._has_ended = False
        self._items = self._iterate()

    async def _iterate(self) -> AsyncGenerator[ScannedObject, None]:
        self._has_ended = True  # also if something fails
        while some := await self._run(self._next_ones):
            self._has_ended, self._rest = False, iter(some)
            for item in self._rest:
                yield item
            self._has_ended = True

    def _next_ones(self, may_wait: bool) -> list[ScannedObject] | None:
        """In a thread."""
        if self._scan is None:
            self._scan = self._begin()
        if self._wanted is not None:
            wanted, self._wanted = self._wanted, None
            self._scan.seek(wanted)
        return self._scan._take(ITEMS_AT_ONCE, may_wait=may_wait)

    def __aiter__(self) -> AsyncIterator[ScannedObject]:
        return self._items

    def __anext__(self) -> Awaitable[ScannedObject]:
        return self._items.__anext__()

    def seek(self, key: str) -> None:
        """Goes on at a key, as `Scan.seek` does: with the next object, which raises what that raises."""
        check_names("", key)
        self._wanted = key
        deque(self._rest, maxlen=0)
        if self._has_ended:
            self._has_ended, self._items = False, self._iterate()

    async def aclose(self) -> None:
        """Ends the scan, and lets go of its state. Idempotent."""
        await self._items.aclose()
        if self._scan is not None:
            self._scan.close()
