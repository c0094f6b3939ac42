"""The bytes of an object, a range at a time, with the next ones on their way.

Invariants
- Ranges come in order, without a gap. An error leaves the stream where it is: the same call tries again.
- Nothing is fetched ahead before the first range was used up: who wants a few messages fetches a few.
- At most `read_ahead_ranges` ranges are held besides the one that was handed out.
- A reader never waits for a thread that is busy with somebody else's ranges: what nobody has begun it fetches itself.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor, Future

import msgspec

from tidelog.tier.history_counters import HistoryCounters
from tidelog.tier.object_store import ObjectStore
from tidelog.tier.store_settings import DEFAULT_FETCH_AHEAD, DEFAULT_FETCH_BYTES, StoreSettings


class HistorySettings(msgspec.Struct, frozen=True, kw_only=True):
    """How history is fetched: a reader holds about `range_bytes * (read_ahead_ranges + 3)` bytes."""

    range_bytes: int = DEFAULT_FETCH_BYTES
    read_ahead_ranges: int = DEFAULT_FETCH_AHEAD

    @classmethod
    def of(cls, store: StoreSettings) -> HistorySettings:
        """As the settings of a store say."""
        ahead = store.store_fetch_ahead
        return cls(
            range_bytes=store.store_fetch_bytes or DEFAULT_FETCH_BYTES,
            read_ahead_ranges=DEFAULT_FETCH_AHEAD if ahead is None else ahead,
        )


class Fetcher:
    """Fetches ranges, now or in a background thread, and counts them. Threads may share it."""

    def __init__(
        self, objects: ObjectStore, executor: Executor, counters: HistoryCounters, settings: HistorySettings
    ) -> None:
        self.settings = settings
        self.counters = counters
        self._objects = objects
        self._executor = executor

    def fetch(self, key: str, start: int, length: int) -> memoryview:
        """As `ObjectStore.read_range`."""
        begin = time.perf_counter()
        try:
            data = self._objects.read_range(key, start, length)
        except BaseException:
            self.counters.failed()
            raise
        self.counters.fetched(len(data), time.perf_counter() - begin)
        return data

    def begin(self, key: str, start: int, length: int) -> Future[memoryview] | None:
        """The same, by another thread; None when there is none, because whoever owns them is closed."""
        try:
            return self._executor.submit(self.fetch, key, start, length)
        except RuntimeError:
            return None


class _Ahead:
    """A range on its way."""

    def __init__(self, fetcher: Fetcher, key: str, start: int, length: int) -> None:
        self._fetcher = fetcher
        self._place = (key, start, length)
        self._future = fetcher.begin(key, start, length)

    def take(self) -> memoryview:
        if self._future is None or self._future.cancel():
            return self._fetcher.fetch(*self._place)
        return self._future.result()

    def forget(self) -> None:
        if self._future is not None:
            self._future.cancel()


class RangeStream:
    """The bytes of an object of `size` bytes from `position` up to `end` (exclusive).

    Ranges end at a place of `boundaries` (in order) where there is one in reach: then no frame is in two of them, and
    what was fetched need not be copied to put it together. The last range of the object asks for one byte more than
    there should be; `has_surplus` says that it was there.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        key: str,
        position: int,
        end: int,
        size: int,
        *,
        ahead: bool,
        boundaries: Sequence[int] = (),
    ) -> None:
        self.has_surplus = False
        self._fetcher = fetcher
        self._key = key
        self._position = position
        self._end = end
        self._size = size
        self._boundaries = boundaries
        self._fetches_ahead = ahead
        self._next_ahead = position
        self._on_their_way: deque[_Ahead] = deque()

    def next(self) -> memoryview | None:
        """The next range; None at the end. One that is shorter than it must be is the last."""
        length = self._length_at(self._position)
        if length <= 0:
            return None
        data = self._take()
        if len(data) < length:
            self._end = self._position + len(data)
            self.close()
        self.has_surplus = len(data) > length
        self._position += min(length, len(data))
        return data[:length]

    def close(self) -> None:
        """Lets go of what is on its way."""
        while self._on_their_way:
            self._on_their_way.popleft().forget()
        self._next_ahead = self._position

    def _take(self) -> memoryview:
        if not self._fetches_ahead:
            data = self._fetcher.fetch(self._key, self._position, self._asked_at(self._position))
            self._fetches_ahead = True
            self._next_ahead = self._position + self._length_at(self._position)
            return data
        self._fill()
        try:
            return self._on_their_way.popleft().take()
        except BaseException:
            self.close()
            raise

    def _fill(self) -> None:
        """Sends for the range that is wanted now, and for those behind it."""
        while len(self._on_their_way) <= self._fetcher.settings.read_ahead_ranges and self._next_ahead < self._end:
            asked = self._asked_at(self._next_ahead)
            self._on_their_way.append(_Ahead(self._fetcher, self._key, self._next_ahead, asked))
            self._next_ahead += self._length_at(self._next_ahead)

    def _length_at(self, position: int) -> int:
        most = self._fetcher.settings.range_bytes
        if position + most >= self._end:
            return self._end - position
        found = bisect_right(self._boundaries, position + most) - 1
        length = self._boundaries[found] - position if found >= 0 else 0
        # A range that is much too short would cost more as a request than it spares as a copy.
        return length if length > most // 2 else most

    def _asked_at(self, position: int) -> int:
        length = self._length_at(position)
        return length + 1 if position + length == self._size else length
