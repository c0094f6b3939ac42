"""Fetches the bytes of cold objects by position: ranges one after the other, with prefetching; many ranges, of which
neighbours come with one request; and a bounded cache.

Invariants
- Ranges come in order, without a gap. An error does not advance the stream: the same call tries again.
- Nothing is prefetched before the first range is consumed: a reader of a few messages fetches a few.
- At most `read_ahead_ranges` ranges are held besides the one last returned.
- A reader never waits for a thread that is busy with another reader's ranges: it fetches a range not yet begun itself.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from threading import Lock
from typing import Generic, Protocol, TypeVar, cast

import msgspec

from tidelog.clock import Stopwatch
from tidelog.cold.settings import ColdReadStatistics
from tidelog.errors import DataError
from tidelog.log.frame import HEADER_BYTES
from tidelog.log.settings import DEFAULT_MAX_MESSAGE_BYTES
from tidelog.store.settings import DEFAULT_FETCH_AHEAD, DEFAULT_FETCH_BYTES, StoreSettings
from tidelog.tracing import TRACING, record_span

Item = TypeVar("Item")
Wanted = TypeVar("Wanted", bound=Hashable)


class Shared(Generic[Wanted, Item]):
    """One call for all who want the same at the same time. Thread-safe."""

    def __init__(self) -> None:
        self._under_way: dict[Wanted, Future[Item]] = {}
        self._mutex = Lock()

    def get(self, wanted: Wanted, make: Callable[[], Item], *, on_joined: Callable[[], None] = lambda: None) -> Item:
        """What `make` returns or raises. `on_joined` is called before it waits for the call of another."""
        own: Future[Item] = Future()
        with self._mutex:
            found = self._under_way.setdefault(wanted, own)
        if found is not own:
            on_joined()
            return found.result()
        try:
            own.set_result(make())
        except BaseException as error:
            own.set_exception(error)
            raise
        finally:
            with self._mutex:
                del self._under_way[wanted]
        return own.result()


class ColdReadCounters:
    """Shared by readers and by the threads that fetch for them."""

    def __init__(self) -> None:
        self._guard = Lock()
        self._requests = 0
        self._failed_requests = 0
        self._fetched_bytes = 0
        self._repeated_ranges = 0
        self._objects_opened = 0
        self._skipped_messages = 0
        self._request_seconds = Stopwatch()
        self._query_seconds = Stopwatch()

    def fetched(self, size: int, seconds: float) -> None:
        """A range has come."""
        with self._guard:
            self._requests += 1
            self._fetched_bytes += size
            self._request_seconds.add(seconds)
        if TRACING.is_on:
            record_span("tidelog.cold_read", seconds, {"tidelog.bytes": size})

    def failed(self) -> None:
        """A range was asked for and did not come."""
        with self._guard:
            self._requests += 1
            self._failed_requests += 1

    def repeated(self) -> None:
        """A range was not what it must be, and is fetched once more."""
        with self._guard:
            self._repeated_ranges += 1

    def opened(self) -> None:
        """A reader has come to another object."""
        with self._guard:
            self._objects_opened += 1

    def skipped(self, count: int) -> None:
        """Messages that are missing were passed over."""
        with self._guard:
            self._skipped_messages += count

    @contextmanager
    def query(self) -> Iterator[None]:
        """Around a question to the catalog."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            with self._guard:
                self._query_seconds.add(time.perf_counter() - begin)

    def snapshot(self) -> ColdReadStatistics:
        """What was counted so far."""
        with self._guard:
            return ColdReadStatistics(
                requests=self._requests,
                failed_requests=self._failed_requests,
                fetched_bytes=self._fetched_bytes,
                repeated_ranges=self._repeated_ranges,
                objects_opened=self._objects_opened,
                skipped_messages=self._skipped_messages,
                request_seconds=self._request_seconds.snapshot(),
                query_seconds=self._query_seconds.snapshot(),
            )


def check_frame_size(frame_bytes: int, most_frame_bytes: int) -> None:
    """DataError when an object says that a frame is larger than its descriptor and the settings of the reader allow."""
    if frame_bytes > most_frame_bytes:
        size = frame_bytes - HEADER_BYTES
        raise DataError(
            f"a message has {size} bytes, more than max_message_bytes and than the catalog says",
            hint=f"Nothing was read of it. If it is meant to be there, read it with max_message_bytes = {size}, or "
            "have `tidelog topic rebuild-catalog` with that setting write it down for all readers",
        )


class ByteSource(Protocol):
    """Where bytes are read from by position: any object store."""

    def read_range(self, key: str, start: int, length: int) -> memoryview:
        """Returns up to `length` bytes starting at `start`."""


class FetchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How history is fetched: a reader holds about `range_bytes * (read_ahead_ranges + 3)` bytes."""

    range_bytes: int = DEFAULT_FETCH_BYTES
    read_ahead_ranges: int = DEFAULT_FETCH_AHEAD
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    """Larger messages are read only where the catalog says that an object has such."""

    @classmethod
    def of(cls, store: StoreSettings, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES) -> FetchSettings:
        """As the settings of a store, and of a log, say."""
        ahead = store.store_fetch_ahead
        return cls(
            range_bytes=store.store_fetch_bytes or DEFAULT_FETCH_BYTES,
            read_ahead_ranges=DEFAULT_FETCH_AHEAD if ahead is None else ahead,
            max_message_bytes=max_message_bytes,
        )


class Fetcher:
    """Fetches ranges, now or in a background thread, and counts them. Threads may share it."""

    def __init__(
        self, objects: ByteSource, executor: Executor, counters: ColdReadCounters, settings: FetchSettings
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
        """The same, by another thread; None when there is none, because the owner of the threads is closed."""
        try:
            return self._executor.submit(self.fetch, key, start, length)
        except RuntimeError:
            return None


class _Ahead:
    """A range being fetched."""

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

    Ranges end at one of `boundaries` (in order) where one is in reach: then no frame spans two of them, and the bytes
    need not be copied to join them. The last range of the object requests one byte more than there should be;
    `has_surplus` says that it was there.
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

    def begin(self) -> None:
        """Requests the first range, before it is wanted; for one that fetches ahead."""
        if self._fetches_ahead and not self._on_their_way:
            self._request()

    def close(self) -> None:
        """Releases the ranges in flight."""
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
        """Requests the range that is wanted now, and those after it."""
        while len(self._on_their_way) <= self._fetcher.settings.read_ahead_ranges and self._next_ahead < self._end:
            self._request()

    def _request(self) -> None:
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


# Ranges that lie near each other come with one request.


def coalesced(
    items: Iterable[Item], span: Callable[[Item], tuple[int, int]], *, range_bytes: int, gap_bytes: int = 0
) -> Iterator[list[Item]]:
    """Groups neighbours that one request fetches: at most `gap_bytes` apart, at most `range_bytes` all together.

    Items are in order; `span` gives the first byte of one, and the byte after its last.
    """
    group: list[Item] = []
    first = end = 0
    for item in items:
        begin, behind = span(item)
        if group and (begin - end > gap_bytes or behind - first > range_bytes):
            yield group
            group = []
        if not group:
            first, end = begin, behind
        end = max(end, behind)
        group.append(item)
    if group:
        yield group


def fetch_many(
    objects: ByteSource,
    key: str,
    items: Iterable[Item],
    span: Callable[[Item], tuple[int, int]],
    *,
    range_bytes: int,
    gap_bytes: int = 0,
) -> Iterator[tuple[Item, memoryview]]:
    """Reads ranges of one object, given in order: yields each item with its bytes, fewer where the object ends."""
    for group in coalesced(items, span, range_bytes=range_bytes, gap_bytes=gap_bytes):
        first = span(group[0])[0]
        data = objects.read_range(key, first, max(span(item)[1] for item in group) - first)
        for item in group:
            begin, end = span(item)
            yield item, data[begin - first : end - first]


class Neighbours(Generic[Item]):
    """Neighbours that come with one request, which may be begun before they are wanted."""

    def __init__(self, fetcher: Fetcher, key: str, items: list[Item], span: Callable[[Item], tuple[int, int]]) -> None:
        self._items = items
        self._span = span
        self._first = span(items[0])[0]
        self._fetcher = fetcher
        self._place = (key, self._first, max(span(item)[1] for item in items) - self._first)
        self._ahead: _Ahead | None = None

    def begin(self) -> None:
        """Begins to fetch them in another thread."""
        if self._ahead is None:
            self._ahead = _Ahead(self._fetcher, *self._place)

    def take(self) -> Iterator[tuple[Item, memoryview]]:
        """Each item with its bytes, fewer where the object ends."""
        data = self._fetcher.fetch(*self._place) if self._ahead is None else self._ahead.take()
        for item in self._items:
            begin, end = self._span(item)
            yield item, data[begin - self._first : end - self._first]

    def forget(self) -> None:
        """Nobody wants them any more."""
        if self._ahead is not None:
            self._ahead.forget()


class Window(Generic[Item]):
    """Requests of one caller: at most `at_once` are under way, in their order, so that others get their turn."""

    def __init__(self, groups: Sequence[Neighbours[Item]], at_once: int) -> None:
        self._groups = groups
        self._at_once = at_once
        for group in groups[:at_once]:
            group.begin()

    def __iter__(self) -> Iterator[Neighbours[Item]]:
        """Each of them when it is its turn to be taken."""
        for number, group in enumerate(self._groups):
            yield group
            for following in self._groups[number + self._at_once : number + self._at_once + 1]:
                following.begin()

    def forget(self) -> None:
        """Nobody wants them any more."""
        for group in self._groups:
            group.forget()


def neighbours(
    fetcher: Fetcher,
    key: str,
    items: Iterable[Item],
    span: Callable[[Item], tuple[int, int]],
    *,
    range_bytes: int,
    gap_bytes: int = 0,
) -> list[Neighbours[Item]]:
    """As `fetch_many`, for a `Window`."""
    groups = coalesced(items, span, range_bytes=range_bytes, gap_bytes=gap_bytes)
    return [Neighbours(fetcher, key, group, span) for group in groups]


# Detects sequential reads of the log, and prefetches for them.
#
# Invariants
# - A single read fetches exactly what it wants.
# - A reader that continues right after its last read, three times in a row, gets larger and larger stretches, up to 4
#   MiB.


_STREAMS = 8
_MAX_GAP_BYTES = 256 << 10
_READS_IN_A_ROW = 3
_FIRST_BYTES = 256 << 10
MAX_BYTES = 4 << 20


class _Stream:
    """A sequential reader."""

    def __init__(self, end: int) -> None:
        self.end = end
        self.reads = 1
        self.fetched_end = end


class ReadAhead:
    """Remembers the last readers by where they are. Threads may share it."""

    def __init__(self) -> None:
        self._streams: deque[_Stream] = deque(maxlen=_STREAMS)
        self._mutex = Lock()

    def noticed(self, position: int, length: int) -> int:
        """Notes a read there. Returns how many bytes are worth fetching from there on: 0 for only what is wanted."""
        with self._mutex:
            stream = self._stream_at(position)
            if stream is None:
                self._streams.append(_Stream(position + length))
                return 0
            stream.reads += 1
            stream.end = position + length
            beyond = stream.reads - _READS_IN_A_ROW
            return 0 if beyond < 0 else min(MAX_BYTES, _FIRST_BYTES << min(beyond, 4))

    def wants_next(self, position: int, window_bytes: int) -> int | None:
        """Where to prefetch for the reader that is here: after what is fetched, once half of it is consumed."""
        with self._mutex:
            stream = next((one for one in self._streams if one.end == position), None)
            if stream is None or stream.fetched_end - position > window_bytes // 2 or stream.fetched_end < position:
                return None
            return stream.fetched_end

    def fetched(self, end: int, up_to: int) -> None:
        """What the reader that is at `end` will find fetched."""
        with self._mutex:
            for stream in self._streams:
                if stream.end == end:
                    stream.fetched_end = max(stream.fetched_end, up_to)

    def _stream_at(self, position: int) -> _Stream | None:
        return next((one for one in self._streams if 0 <= position - one.end <= _MAX_GAP_BYTES), None)


# A cache of what was fetched from the store, up to a number of bytes: stretches of the log by their position, or blocks
# of files by their name and byte.
#
# Invariants
# - Positions never change, and a name identifies one content, so nothing in here is ever stale.
# - No stretch lies inside another. Their ends are then in the order of their beginnings, and the one that begins last
#   at or before a position is the only one that can hold what begins there.
# - Bytes are cached as received: readers verify them, and remove bad ones.


class CacheStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of a cache."""

    bytes: int
    capacity_bytes: int
    stretches: int
    hits: int
    misses: int
    evictions: int


class ColdCache:
    """A read-through cache; the stretches that were not used for the longest time leave first. Threads may share it."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._stretches: OrderedDict[tuple[str, int], bytes | memoryview] = OrderedDict()
        self._starts: list[int] = []
        self._bytes = 0
        self._hits = 0
        self._misses = 0
        self._evictions = 0
        self._mutex = Lock()

    def get(self, position: int, length: int) -> memoryview | None:
        """So many bytes of the log, if they are all here."""
        with self._mutex:
            start = self._holding("", position, length)
            if start is None:
                self._misses += 1
                return None
            self._hits += 1
            begin = position - start
            return memoryview(self._used("", start))[begin : begin + length]

    def get_block(self, name: str, byte: int) -> bytes | None:
        """The block of a file that begins at a byte, decoded and verified, if it is here."""
        with self._mutex:
            block = self._used(name, byte) if (name, byte) in self._stretches else None
        return cast("bytes | None", block)

    def holds(self, position: int, length: int) -> bool:
        """Whether so many bytes of the log are here; it counts neither as a use nor as a miss."""
        with self._mutex:
            return self._holding("", position, length) is not None

    def add(self, position: int, data: bytes | memoryview, name: str = "") -> None:
        """Takes in a stretch of the log, or a block of a file. One that would push out most others is not kept."""
        if not len(data) or len(data) > self._capacity_bytes // 2:
            return
        with self._mutex:
            if self._holding(name, position, len(data)) is not None:
                return
            if not name:
                self._drop_inside(position, position + len(data))
                insort(self._starts, position)
            self._stretches[name, position] = data
            self._bytes += len(data)
            while self._bytes > self._capacity_bytes:
                self._drop(*next(iter(self._stretches)))
                self._evictions += 1

    def discard(self, position: int, length: int) -> None:
        """Takes out what holds these bytes of the log: they are not what they must be."""
        with self._mutex:
            while (start := self._holding("", position, length)) is not None:
                self._drop("", start)

    def _used(self, name: str, start: int) -> bytes | memoryview:
        self._stretches.move_to_end((name, start))
        return self._stretches[name, start]

    def _holding(self, name: str, position: int, length: int) -> int | None:
        if name:
            return position if (name, position) in self._stretches else None
        at = bisect_right(self._starts, position)
        if not at:
            return None
        start = self._starts[at - 1]
        return start if position + length <= start + len(self._stretches["", start]) else None

    def _drop_inside(self, start: int, end: int) -> None:
        first, behind = bisect_left(self._starts, start), bisect_left(self._starts, end)
        for inside in self._starts[first:behind]:
            if inside + len(self._stretches["", inside]) <= end:
                self._drop("", inside)

    def _drop(self, name: str, start: int) -> None:
        self._bytes -= len(self._stretches.pop((name, start)))
        if not name:
            del self._starts[bisect_left(self._starts, start)]

    def statistics(self) -> CacheStatistics:
        with self._mutex:
            return CacheStatistics(
                bytes=self._bytes,
                capacity_bytes=self._capacity_bytes,
                stretches=len(self._stretches),
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
            )
