"""The cold read path: reads values from the store by pointer, through a cache, with fallback to other copies.

    the log's object (unless it was dropped) -> compacted data -> each replica: its log, its compacted data

Invariants
- Every returned value has the checksum of its cell. Bytes that fail it are fetched once more, then from the other
  copies; if none is good, the error names the object and the byte of the first. Only `metadata` reads less.
- A single read is one range request for exactly the value (a block of about 1 MiB where objects are compressed). If the
  record was dropped it is two: the index of compacted data is read first.
- Concurrent reads of the same value share one request, and those of one object that of its header.
- Reading never changes the store.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from tidelog.clock import Histogram, Stopwatch
from tidelog.cold.catalog import Catalog
from tidelog.cold.fetch import (
    CacheStatistics,
    ColdCache,
    ColdReadCounters,
    Fetcher,
    FetchSettings,
    Neighbours,
    ReadAhead,
    Shared,
    Window,
    neighbours,
)
from tidelog.engine.cold.compacted_values import CompactedValue, CompactedValues, CountedSource, OnRequest, Stretch
from tidelog.engine.cold.disk_cache import DiskCache, DiskCacheStatistics
from tidelog.engine.cold.log_objects import (
    CheckedHeaders,
    ColdObject,
    ColdObjects,
    manifest_in,
    missing,
    read_blocks,
    read_plain,
)
from tidelog.engine.cold.manifest import Manifest, read_manifest
from tidelog.engine.cold.value_store import ColdValue
from tidelog.engine.mvcc.cells import POINTER, Cell
from tidelog.engine.sst.value_file import Reference, check_value_file, reference_of
from tidelog.engine.value_files import OpenValue
from tidelog.engine.wal.replay import ShippedLog
from tidelog.engine.wal.scan_values import Group, Places, ScannedRows
from tidelog.engine.wal.value import CODEC_FILE, beginning_bytes, decode_value, metadata_in, stored_again
from tidelog.errors import CorruptionError, DataError, GapError, NotFoundError, OtherLogError, RetryError, TidelogError
from tidelog.store.keys import EngineKeys
from tidelog.store.object_store import ObjectStore
from tidelog.store.scheduler import DaemonPool

_FETCHING_THREADS = 16
_REQUESTS_A_CALLER = 16
_RANGE_BYTES = 8 << 20
_GAP_BYTES = 256 << 10
_DAMAGE_HINT = "Put a good copy of the object in its place; an engine with replicas reads theirs"
Value = tuple[bytes, dict[str, Any]]


class Fetched(NamedTuple):
    """A stored value, and its codec in the copy it came from."""

    stored: bytes
    codec: int


class _Span(NamedTuple):
    """Where a stored value is, its codec there, and the number of the cell that wants it."""

    key: str
    byte: int
    stored_bytes: int
    codec: int
    number: int

    def bytes(self) -> tuple[int, int]:
        return self.byte, self.byte + self.stored_bytes


class PlacedCell(Cell):
    """A value in the log of another replica; `here` is its cell in the log of this one, by which this disk knows it."""

    here: Cell

    @classmethod
    def of(cls, cell: Cell, here: Cell) -> PlacedCell:
        placed = cls._make(cell)
        placed.here = here
        return placed


def _known_here(cell: Cell) -> Cell:
    return cell.here if isinstance(cell, PlacedCell) else cell


class ColdStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the statistics of cold reads."""

    reads: int
    requests: int
    bytes_fetched: int
    bytes_used: int
    """Of values that were asked for, from the store or the cache: beside `bytes_fetched` it tells what fetching ahead,
    blocks and neighbours cost, and what the cache saves."""
    shared: int
    fetched_ahead: int
    repeated: int
    from_replicas: int
    from_compacted: int
    read_seconds: Histogram
    """Of single reads, those from the cache too."""
    cache: CacheStatistics
    disk_cache: DiskCacheStatistics | None
    """Of an engine with a directory."""


class _Counters:
    """Plain counters: an increment lost between threads does no harm."""

    def __init__(self) -> None:
        self.reads = 0
        self.requests = 0
        self.bytes_fetched = 0
        self.bytes_used = 0
        self.shared = 0
        self.fetched_ahead = 0
        self.repeated = 0
        self.from_replicas = 0
        self.from_compacted = 0


class ColdReader:
    """Reads values of objects from a store. Thread-safe."""

    def __init__(
        self,
        catalog: Catalog,
        store: ObjectStore,
        cache_bytes: int,
        replicas: Callable[[], Sequence[ObjectStore]] = tuple,
        on_manifest: Callable[[Manifest], None] = lambda manifest: None,
        *,
        threads: int = _FETCHING_THREADS,
        disk: DiskCache | None = None,
    ) -> None:
        """`threads` fetch ahead, for all callers; one of them has a quarter of these at most, and no more than 16. What
        is read often comes back to the `disk`.
        """
        self.catalog = catalog
        self.store = store
        self._objects = ColdObjects(catalog)
        self.keys = self._objects.keys
        self._replicas = replicas
        self._compacted = _compacted_values(catalog, store, on_manifest, self._count_request)
        self._compacted_of: dict[int, CompactedValues] = {}
        self._cache = ColdCache(cache_bytes)
        self._read_ahead = ReadAhead()
        self._fetchers = DaemonPool(threads, "tidelog-cold")
        self._requests_a_caller = max(1, min(_REQUESTS_A_CALLER, threads // 4))
        counted = CountedSource(store, self._count_request)
        self._fetcher = Fetcher(counted, self._fetchers, ColdReadCounters(), FetchSettings())
        self._under_way: Shared[tuple[int, int], Fetched] = Shared()
        self._counters = _Counters()
        self._read_seconds = Stopwatch()
        self._headers = CheckedHeaders()
        self._disk = disk
        self._coming: set[Reference] = set()

    def read(self, cell: Cell) -> Value:
        """Returns data and metadata of the value that a cell points to."""
        began = time.perf_counter()
        self._counters.reads += 1
        if cell.inline is not None and cell.codec != CODEC_FILE:
            return self._decoded(cell.inline, cell.codec, cell)
        if cell.codec == CODEC_FILE:
            value = self._decoded(self.open_value(reference_of(cell)).value(), cell.codec, cell)
            self._read_seconds.add(time.perf_counter() - began)
            return value
        self._counters.bytes_used += cell.stored_bytes
        window_bytes = self._read_ahead.noticed(cell.position, cell.stored_bytes)
        value = self._from_cache(cell) or self._decoded(*self._shared(cell, window_bytes), cell)
        if window_bytes:
            self._fetch_next(cell, window_bytes)
        self.noticed(cell, value)
        self._read_seconds.add(time.perf_counter() - began)
        return value

    def metadata(self, cell: Cell) -> dict[str, Any] | None:
        """The metadata of a value by its beginning, which the checksum cannot verify without the rest; None where it
        does not lie in the store by itself, as in objects of compressed blocks.
        """
        cached = self._from_cache(cell)
        if cached is not None:
            return cached[1]
        span = self._span_of(cell, 0, None)
        if span is None:
            return None
        length = beginning_bytes(span.codec, span.stored_bytes, cell.size)
        beginning = CountedSource(self.store, self._count_request).read_range(span.key, span.byte, max(0, length))
        self.used(len(beginning))
        return metadata_in(beginning, span.codec, cell.size, cell.lsn)

    def read_many(self, cells: Sequence[Cell]) -> list[Value | None]:
        """Returns data and metadata for each cell, None for a deletion. Values that lie near each other come with one
        request, and several requests are under way at once.

        What cannot be read this way (objects of compressed blocks, bad bytes, what was moved meanwhile) is read one by
        one, which looks again and names what is wrong.
        """
        return self.begin_many(cells).take()

    def begin_many(self, cells: Sequence[Cell], keys: Sequence[bytes] = ()) -> ValuesAhead:
        """Begins to fetch what `read_many` returns. Fails only when it is taken.

        With the keys of the versions in the tree, those in compacted data are read from there, where the values of
        neighbours are neighbours, though their records may be in the log too.
        """
        values: list[Value | None] = [None] * len(cells)
        spans: list[_Span] = []
        prefers_compacted = False
        with contextlib.suppress(TidelogError):
            prefers_compacted = bool(keys) and self._compacted is not None and self._compacted.warm(keys)
        for index, cell in enumerate(cells):
            if cell.inline is not None:
                if cell.codec != CODEC_FILE:  # that is read alone, in as many pieces as it takes
                    values[index] = self._decoded(cell.inline, cell.codec, cell)
            elif not cell.is_tombstone:
                values[index] = self._from_cache(cell)
                with contextlib.suppress(TidelogError):  # reading it alone tells of it
                    key = keys[index] if prefers_compacted else None
                    span = self._span_of(cell, index, key) if values[index] is None else None
                    spans += [] if span is None else [span]
        groups = [
            group
            for key, some in groupby(sorted(spans), key=attrgetter("key"))
            for group in neighbours(
                self._fetcher, key, some, _Span.bytes, range_bytes=_RANGE_BYTES, gap_bytes=_GAP_BYTES
            )
        ]
        return ValuesAhead(self, cells, values, Window(groups, self._requests_a_caller), are_scanned=bool(keys))

    def begin_scan(self, scanned: ScannedRows, *, in_background: bool = False) -> RowsAhead:
        """Begins to fetch the values of rows of a scan that were not found yet: from compacted data, where those of
        neighbours are neighbours, or from the log. Fails only when they are taken, and then leaves them out.

        `in_background`: where they are is looked up by another thread, since that may ask the store too.
        """
        return RowsAhead(self, lambda: self._placed(scanned, in_background), self._fetchers if in_background else None)

    def _placed(self, scanned: ScannedRows, goes_on: bool) -> tuple[Places, Window[tuple[Group, int]]]:
        places, units = Places(scanned), list[tuple[str, int]]()
        if self._compacted is not None:
            with contextlib.suppress(TidelogError):  # reading one alone tells of it
                units += [(key, 0) for key in self._compacted.place(scanned, places, 0, goes_on=goes_on)]
        units += self._placed_in_log(scanned, places, len(units), goes_on=goes_on)
        groups = [
            Neighbours(self._fetcher, key, [(group, begin)], _bytes_in_object)
            for group in places.groups(gap_bytes=_GAP_BYTES, range_bytes=_RANGE_BYTES)
            if group.unit < len(units)
            for key, begin in (units[group.unit],)
        ]
        return places, Window(groups, self._requests_a_caller)

    def take_from_disk(self, scanned: ScannedRows) -> None:
        """Takes the values of rows that came back to this disk, which need no request."""
        if self._disk is None or self._disk.is_empty:
            return
        for number, row in scanned.left_in_log():
            if self._disk.has(row[6]):
                stored = self._disk.get(Cell(POINTER, 0, row[1], *row[3:8]))
                scanned.values[number] = None if stored is None else (stored, row[4])

    def _placed_in_log(
        self, scanned: ScannedRows, places: Places, first_unit: int, *, goes_on: bool
    ) -> list[tuple[str, int]]:
        """Finds values in objects of the log, those first that are known; returns their keys, and where in each its
        first record begins.
        """
        units, end = list[tuple[str, int]](), len(scanned.rows)
        row = places.in_log(0, (), ())
        find = self._objects.find_on if goes_on else self._objects.find_kept
        objects = self._objects.known_plain() if row < end else []
        while row < end:
            starts = [one.descriptor.start_position for one in objects]
            ends = [one.end_position for one in objects]
            row = places.in_log(first_unit + len(units), starts, ends, row)
            units += [(one.key, one.descriptor.header_bytes) for one in objects]
            objects = []
            if row < end:
                with contextlib.suppress(TidelogError):  # reading it alone tells of it
                    found = find(scanned.rows[row][5])
                    objects = [] if found is None or found.descriptor.codec != "none" else [found]
                row += not objects
        return units

    def _span_of(self, cell: Cell, index: int, key: bytes | None) -> _Span | None:
        if key is not None and self._compacted is not None:
            place = self._compacted.locate(cell, key)
            if place is not None:
                return _Span(*place, index)
        found = self._objects.find_kept(cell.lsn)
        if found is None:
            place = None if self._compacted is None else self._compacted.locate(cell)
            return None if place is None else _Span(*place, index)
        byte = found.byte_at(cell.position)
        if found.descriptor.codec != "none" or byte < found.descriptor.header_bytes:
            return None
        self._counters.requests += self._headers.check(self.store, found)
        return _Span(found.key, byte, cell.stored_bytes, cell.codec, index)

    # What comes back to this disk

    def on_disk(self, cell: Cell) -> bytes | None:
        """The stored value that a cell points to, if it came back to this disk."""
        return None if self._disk is None else self._disk.get(cell)

    def open_on_disk(self, reference: Reference) -> OpenValue | None:
        """The file of a large value, if it came back to this disk."""
        return None if self._disk is None else self._disk.open(reference)

    def has_on_disk(self, cell: Cell) -> bool:
        """Whether a cold value came back to this disk."""
        key = reference_of(cell).name if cell.codec == CODEC_FILE else cell.position
        return self._disk is not None and self._disk.has(key)

    @property
    def disk_room_bytes(self) -> int:
        """How much of cold values this disk may hold."""
        return 0 if self._disk is None else self._disk.capacity_bytes

    def noticed(self, cell: Cell, value: Value) -> None:
        """Notes a read of a value: the second one brings it back to this disk."""
        cell = _known_here(cell)
        if self._disk is not None and self._disk.is_read_again(cell.position, cell.stored_bytes):
            self._disk.add(cell.position, stored_again(*value, cell.codec))

    def bring_back(self, cells: Sequence[Cell], keys: Sequence[bytes]) -> list[bool]:
        """Brings cold values to this disk, neighbours with one request; returns which of them are there now."""
        disk = self._disk
        if disk is None:
            return [False] * len(cells)
        found = []
        small = [index for index, cell in enumerate(cells) if cell.codec != CODEC_FILE]
        ahead = self.begin_many([cells[index] for index in small], [keys[index] for index in small])
        values = iter(ahead.take())
        for cell in cells:
            if cell.codec == CODEC_FILE:
                found.append(self._bring_file_back(disk, reference_of(cell)))
            else:
                value = next(values)
                assert value is not None, "a deletion is not among the cells"
                here = _known_here(cell)
                found.append(disk.add(here.position, stored_again(*value, here.codec)))
        return found

    def _bring_file_back(self, disk: DiskCache, reference: Reference) -> bool:
        name, file_bytes, key = reference.name, reference.file_bytes, self.keys.values_prefix + str(reference.name)

        def pieces() -> Iterator[memoryview]:
            source = CountedSource(self.store, self._count_request)
            yield from check_value_file(
                name, file_bytes, lambda at, length: source.read_range(key, at, length), self.store.url + "/" + key
            )

        return disk.add_file(name, file_bytes, pieces)

    def _file_noticed(self, reference: Reference) -> None:
        """The second read of a large value brings it back, in the background."""
        disk = self._disk
        if disk is None or reference in self._coming:
            return
        if disk.is_read_again(reference.name, reference.file_bytes):
            self._coming.add(reference)
            try:
                self._fetchers.submit(self._file_comes_back, disk, reference)
            except RuntimeError:  # closed: nobody reads on
                self._coming.discard(reference)

    def _file_comes_back(self, disk: DiskCache, reference: Reference) -> None:
        try:
            with contextlib.suppress(TidelogError):  # the next read of it tells what is wrong
                self._bring_file_back(disk, reference)
        finally:
            self._coming.discard(reference)

    def open_value(self, reference: Reference) -> ColdValue:
        """A value that has a file of its own, to be read by ranges. Asks for nothing yet."""
        self._file_noticed(reference)
        return ColdValue(self.keys, reference, self._copies, self._fetchers.submit, self.used)

    def _copies(self) -> Iterator[CountedSource]:
        """The store, then its replicas."""
        yield CountedSource(self.store, self._count_request)
        for replica in self._replicas():
            self._counters.from_replicas += 1
            yield CountedSource(replica, self._count_request)

    def manifest(self) -> Manifest | None:
        found = read_manifest(self.catalog.metadata, self.keys)
        return None if found is None else found[0]

    def shipped_log(self) -> ShippedLog:
        """The records in the store."""
        return ShippedLog(self.catalog, self.store, self._fetchers)

    @property
    def history_start_seq(self) -> int:
        """The start of history as last read from the store: versions before it may be gone."""
        return 0 if self._compacted is None else self._compacted.history_start_seq

    def used(self, size: int) -> None:
        """Counts bytes of a value that came with others."""
        self._counters.bytes_used += size

    def close(self) -> None:
        """Stops prefetching. Idempotent."""
        self._fetchers.shutdown(wait=False, cancel_futures=True)
        if self._disk is not None:
            self._disk.close()

    def statistics(self) -> ColdStatistics:
        return ColdStatistics(
            **vars(self._counters),
            read_seconds=self._read_seconds.snapshot(),
            cache=self._cache.statistics(),
            disk_cache=None if self._disk is None else self._disk.statistics(),
        )

    def _from_cache(self, cell: Cell) -> Value | None:
        cached = self._cache.get(cell.position, cell.stored_bytes)
        if cached is None:
            return None
        try:
            return self._decoded(cached, cell.codec, cell)
        except DataError:
            self._cache.discard(cell.position, cell.stored_bytes)
            return None

    def _decoded(self, stored: bytes | memoryview, codec: int, cell: Cell) -> Value:
        return decode_value(stored, codec, cell.size, cell.crc, cell.lsn)

    def _count_request(self, size: int) -> None:
        self._counters.requests += 1
        self._counters.bytes_fetched += size

    # One request for concurrent readers of the same value

    def _shared(self, cell: Cell, window_bytes: int) -> Fetched:
        wanted = cell.position, cell.stored_bytes
        return self._under_way.get(wanted, lambda: self._fetched(cell, window_bytes), on_joined=self._count_shared)

    def _count_shared(self) -> None:
        self._counters.shared += 1

    # Fallback to other copies

    def _fetched(self, cell: Cell, window_bytes: int) -> Fetched:
        """If no copy is good, raises the first failure."""
        failures: list[TidelogError] = []
        for fetch in (self._from_log, self._from_compacted, self._from_replicas):
            found = fetch(cell, window_bytes, failures)
            if found is not None:
                return found
        raise failures[0] if failures else missing(cell.lsn)

    def _from_log(self, cell: Cell, window_bytes: int, failures: list[TidelogError]) -> Fetched | None:
        """Reads from the object of its record, if that was not dropped. Retries once if verification fails."""
        for attempt in range(2):
            found = self._objects.find_kept(cell.lsn)
            if found is None:
                failures.clear()  # it was dropped meanwhile, which is no failure
                return None
            try:
                return self._fetched_from(self.store, found, cell, 0 if attempt else window_bytes)
            except (DataError, NotFoundError, RetryError) as error:
                self._counters.repeated += 1
                failures.append(_told(error, found, cell))
                if isinstance(error, RetryError):
                    return None  # it has been asked often enough
                if isinstance(error, NotFoundError):
                    self._objects.forget(found)  # it may have been replaced since its descriptor was read, or dropped
        return None

    def _from_compacted(self, cell: Cell, window_bytes: int, failures: list[TidelogError]) -> Fetched | None:
        """Reads from compacted data, which has every value whose record was dropped, and others."""
        if self._compacted is None or (failures and isinstance(failures[-1], RetryError)):
            return None
        for attempt in range(2):
            try:
                found = self._compacted.read(cell, 0 if attempt else window_bytes)
            except (DataError, NotFoundError, RetryError) as error:
                self._counters.repeated += 1
                failures.append(_told_of_file(error, cell))
                if not isinstance(error, DataError):
                    return None
            else:
                self._counters.from_compacted += found is not None
                return None if found is None else self._kept(found, cell)
        return None

    def _kept(self, found: CompactedValue, cell: Cell) -> Fetched:
        """The cache holds bytes of the log: values with another codec are not cached."""
        if (found.codec, len(found.stored)) == (cell.codec, cell.stored_bytes):
            for stretch in (Stretch(cell.position, found.stored), *found.others):
                self._cache.add(*stretch)
        return Fetched(found.stored, found.codec)

    def _from_replicas(self, cell: Cell, window_bytes: int, failures: list[TidelogError]) -> Fetched | None:
        for replica in self._replicas():
            for fetch in (self._from_log_of, self._from_compacted_of):
                try:
                    found = fetch(replica, cell)
                except (DataError, NotFoundError, RetryError) as error:
                    self._counters.repeated += 1
                    failures.append(error)
                    continue
                if found is not None:
                    self._counters.from_replicas += 1
                    return found
        return None

    def _from_log_of(self, replica: ObjectStore, cell: Cell) -> Fetched | None:
        found = self._objects.found_in(replica, cell.lsn)
        return None if found is None else self._fetched_from(replica, found, cell, 0)

    def _from_compacted_of(self, replica: ObjectStore, cell: Cell) -> Fetched | None:
        found = self._compacted_in(replica).read(cell)
        return None if found is None else self._kept(found, cell)

    def _compacted_in(self, replica: ObjectStore) -> CompactedValues:
        keys = self._objects.keys
        known = self._compacted_of.get(id(replica))
        if known is None:
            known = CompactedValues(replica, keys, lambda: manifest_in(replica, keys), on_request=self._count_request)
            self._compacted_of[id(replica)] = known
        return known

    def _fetched_from(self, store: ObjectStore, found: ColdObject, cell: Cell, window_bytes: int) -> Fetched:
        stretches = self._read_stretches(store, found, cell, window_bytes)
        for position, data in stretches:
            if position <= cell.position and cell.position + cell.stored_bytes <= position + len(data):
                begin = cell.position - position
                stored = bytes(data[begin : begin + cell.stored_bytes])
                self._decoded(stored, cell.codec, cell)  # bad bytes are reported before they are kept
                for stretch in stretches:
                    self._cache.add(*stretch)
                return Fetched(stored, cell.codec)
        raise DataError(f"no value at position {cell.position}, LSN {cell.lsn}")

    def _read_stretches(
        self, store: ObjectStore, found: ColdObject, cell: Cell, window_bytes: int
    ) -> Sequence[Stretch]:
        self._counters.requests += 1 + self._headers.check(store, found)
        if found.descriptor.codec == "none":
            length = min(max(cell.stored_bytes, window_bytes), found.end_position - cell.position)
            stretches = [read_plain(store, found, cell.position, max(length, cell.stored_bytes))]
        else:
            stretches = read_blocks(store, found, cell, whole=bool(window_bytes))
        self._counters.bytes_fetched += sum(len(stretch.data) for stretch in stretches)
        return stretches

    # Prefetching

    def _fetch_next(self, cell: Cell, window_bytes: int) -> None:
        """Prefetches what comes next in the same object for a sequential reader."""
        found = self._objects.known(cell.lsn)
        end = cell.position + cell.stored_bytes
        if found is None or found.descriptor.codec != "none":
            return
        self._read_ahead.fetched(end, self._reached(end, window_bytes))
        start = self._read_ahead.wants_next(end, window_bytes)
        length = 0 if start is None else min(window_bytes, found.end_position - start)
        if start is None or length <= 0:
            return
        self._read_ahead.fetched(end, start + length)
        try:
            self._fetchers.submit(self._fetch_ahead, found, start, length)
        except RuntimeError:  # closed: nobody reads on
            return

    def _reached(self, position: int, window_bytes: int) -> int:
        """How far after a position the cache is filled, up to the relevant bound."""
        for part in (window_bytes, window_bytes // 2):
            if self._cache.holds(position, part):
                return position + part
        return position

    def _fetch_ahead(self, found: ColdObject, start: int, length: int) -> None:
        try:
            self._cache.add(*read_plain(self.store, found, start, length))
            self._counters.fetched_ahead += 1
            self._counters.bytes_fetched += length
        except TidelogError:
            return  # the read that needs it asks again, and raises the error


class RowsAhead:
    """Values of rows of a scan that are being fetched."""

    def __init__(
        self,
        reader: ColdReader,
        begin: Callable[[], tuple[Places, Window[tuple[Group, int]]]],
        background: Executor | None,
    ) -> None:
        self._reader = reader
        self._begin = begin
        self._begun: Future[tuple[Places, Window[tuple[Group, int]]]] = Future()
        with contextlib.suppress(RuntimeError):  # closed: nobody reads on
            if background is not None:
                self._begun = background.submit(begin)
                return
        self._begun.set_result(begin())

    def take(self) -> None:
        """Waits for them. What does not come is left out."""
        # A thread that is busy with what others want is not waited for.
        places, groups = self._begin() if self._begun.cancel() else self._begun.result()
        for one in groups:
            # Compacted, or dropped, since it was looked up; or the store does not answer, which a read alone tells.
            with contextlib.suppress(NotFoundError, RetryError):
                for (group, _), data in one.take():
                    self._reader.used(places.take(group, data))

    def forget(self) -> None:
        """Nobody wants them any more."""
        if not self._begun.cancel():
            self._begun.add_done_callback(_forget_groups)


def _forget_groups(begun: Future[tuple[Places, Window[tuple[Group, int]]]]) -> None:
    if begun.exception() is None:
        begun.result()[1].forget()


def _bytes_in_object(item: tuple[Group, int]) -> tuple[int, int]:
    group, begin = item
    return begin + group.first_byte, begin + group.end


class ValuesAhead:
    """Values of some cells that are being fetched."""

    def __init__(
        self,
        reader: ColdReader,
        cells: Sequence[Cell],
        values: list[Value | None],
        groups: Window[_Span],
        *,
        are_scanned: bool,
    ) -> None:
        self._are_scanned = are_scanned
        self._reader = reader
        self._cells = cells
        self._values = values
        self._groups = groups

    def take(self) -> list[Value | None]:
        """Waits for them."""
        for group in self._groups:
            # Compacted, or dropped, since it was looked up; or the store does not answer, which a read alone tells.
            with contextlib.suppress(NotFoundError, RetryError):
                for span, stored in group.take():
                    cell = self._cells[span.number]
                    with contextlib.suppress(DataError):
                        value = decode_value(stored, span.codec, cell.size, cell.crc, cell.lsn)
                        self._values[span.number] = value
                        self._reader.used(len(stored))
                        if not self._are_scanned:
                            self._reader.noticed(cell, value)
        for index, cell in enumerate(self._cells):
            if self._values[index] is None and not cell.is_tombstone:
                self._values[index] = self._reader.read(cell)
        return self._values

    def forget(self) -> None:
        """Nobody wants them any more."""
        self._groups.forget()


def _told(failure: TidelogError, found: ColdObject, cell: Cell) -> TidelogError:
    """The error, with the object and the byte."""
    if isinstance(failure, NotFoundError):
        return GapError(
            f"LSN {cell.lsn} is missing in the store: its object is not there",
            first=cell.lsn,
            last=cell.lsn,
            path=found.key,
            hint="Put the object back; an engine with replicas reads theirs",
        )
    if isinstance(failure, DataError) and not isinstance(failure, OtherLogError):
        byte = found.byte_of(cell)
        return CorruptionError(failure.message, path=found.key, byte=byte, operation="read", hint=_DAMAGE_HINT)
    return failure


def _told_of_file(failure: TidelogError, cell: Cell) -> TidelogError:
    """The error for compacted data, which names its file already."""
    if not isinstance(failure, NotFoundError):
        return failure
    return GapError(
        f"LSN {cell.lsn} is missing in the store: a file of compacted data is not there: {failure.message}",
        first=cell.lsn,
        last=cell.lsn,
        path=failure.path,
        hint="Put the file back; an engine with replicas reads theirs",
    )


def _compacted_values(
    catalog: Catalog, store: ObjectStore, on_manifest: Callable[[Manifest], None], on_request: OnRequest
) -> CompactedValues | None:
    """Only an engine's log has compacted data."""
    keys = catalog.keys
    if not isinstance(keys, EngineKeys):
        return None

    def manifest() -> Manifest | None:
        found = read_manifest(catalog.metadata, keys)
        return None if found is None else found[0]

    return CompactedValues(store, keys, manifest, on_manifest=on_manifest, on_request=on_request)
