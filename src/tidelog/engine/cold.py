"""Reading bodies from the store: by pointer, through a cache, from another copy where the first one is bad.

    the log's object (unless it was dropped) -> compacted data -> each replica: its log, its compacted data

Invariants
- What is handed out has the checksum of its cell. Bytes that have not are fetched once more, then from the other
  copies; if none is good, the error names the object and the byte of the first.
- A lone read is one range request for exactly the body (a block of about 1 MiB where objects are compressed). Where the
  record was dropped it is two: the index of compacted data is asked first.
- Several who want the same body at the same time cause one request.
- Nothing in here changes the store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Lock
from typing import Any, NamedTuple

import msgspec

from tidelog.engine.body import decode_body
from tidelog.engine.cell import Cell
from tidelog.engine.cold_cache import CacheStatistics, ColdCache
from tidelog.engine.cold_objects import (
    CheckedHeaders,
    ColdObject,
    ColdObjects,
    Stretch,
    missing,
    read_blocks,
    read_plain,
)
from tidelog.engine.compacted_bodies import CompactedBodies, CompactedBody, OnRequest, manifest_in
from tidelog.engine.manifest import Manifest, read_manifest
from tidelog.engine.read_ahead import ReadAhead
from tidelog.errors import CorruptionError, DataError, GapError, NotFoundError, OtherLogError, RetryError, TidelogError
from tidelog.tier.catalog import Catalog
from tidelog.tier.daemon_pool import DaemonPool
from tidelog.tier.keys import EngineKeys
from tidelog.tier.object_store import ObjectStore

_FETCHING_THREADS = 2
_DAMAGE_HINT = "Put a good copy of the object in its place; an engine with replicas reads theirs"
Body = tuple[bytes, dict[str, Any]]


class Fetched(NamedTuple):
    """A stored body, and how it is compressed where it came from."""

    stored: bytes
    codec: int


class ColdStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of reading from the store."""

    reads: int
    requests: int
    bytes_fetched: int
    shared: int
    fetched_ahead: int
    repeated: int
    from_replicas: int
    from_compacted: int
    cache: CacheStatistics


class _Counters:
    """Plain numbers: a count that is lost between threads does no harm."""

    def __init__(self) -> None:
        self.reads = 0
        self.requests = 0
        self.bytes_fetched = 0
        self.shared = 0
        self.fetched_ahead = 0
        self.repeated = 0
        self.from_replicas = 0
        self.from_compacted = 0


class ColdReader:
    """Reads bodies of objects from a store. Threads may share it."""

    def __init__(
        self,
        catalog: Catalog,
        store: ObjectStore,
        cache_bytes: int,
        replicas: Callable[[], Sequence[ObjectStore]] = tuple,
        on_manifest: Callable[[Manifest], None] = lambda manifest: None,
    ) -> None:
        self._objects = ColdObjects(catalog)
        self._store = store
        self._replicas = replicas
        self._compacted = _compacted_bodies(catalog, store, on_manifest, self._count_request)
        self._compacted_of: dict[int, CompactedBodies] = {}
        self._cache = ColdCache(cache_bytes)
        self._read_ahead = ReadAhead()
        self._fetchers = DaemonPool(_FETCHING_THREADS, "tidelog-cold")
        self._on_their_way: dict[tuple[int, int], Future[Fetched]] = {}
        self._mutex = Lock()
        self._counters = _Counters()
        self._headers = CheckedHeaders()

    def read(self, cell: Cell) -> Body:
        """Data and metadata of the body that a cell points to."""
        self._counters.reads += 1
        window_bytes = self._read_ahead.noticed(cell.position, cell.stored_bytes)
        body = self._from_cache(cell) or self._decoded(*self._shared(cell, window_bytes), cell)
        if window_bytes:
            self._fetch_next(cell, window_bytes)
        return body

    @property
    def history_start_seq(self) -> int:
        """Where history begins, as far as the store was asked: versions before it may be gone."""
        return 0 if self._compacted is None else self._compacted.history_start_seq

    def close(self) -> None:
        """Lets go of what is fetched ahead. Closing twice is fine."""
        self._fetchers.shutdown(wait=False, cancel_futures=True)

    def statistics(self) -> ColdStatistics:
        """One moment of it."""
        return ColdStatistics(**vars(self._counters), cache=self._cache.statistics())

    def _from_cache(self, cell: Cell) -> Body | None:
        cached = self._cache.get(cell.position, cell.stored_bytes)
        if cached is None:
            return None
        try:
            return self._decoded(cached, cell.codec, cell)
        except DataError:
            self._cache.discard(cell.position, cell.stored_bytes)
            return None

    def _decoded(self, stored: bytes | memoryview, codec: int, cell: Cell) -> Body:
        return decode_body(stored, codec, cell.size, cell.crc, cell.lsn)

    def _count_request(self, size: int) -> None:
        self._counters.requests += 1
        self._counters.bytes_fetched += size

    # One request for all who want the same

    def _shared(self, cell: Cell, window_bytes: int) -> Fetched:
        wanted = cell.position, cell.stored_bytes
        own: Future[Fetched] = Future()
        with self._mutex:
            found = self._on_their_way.setdefault(wanted, own)
        if found is not own:
            self._counters.shared += 1
            return found.result()
        try:
            own.set_result(self._fetched(cell, window_bytes))
        except BaseException as error:
            own.set_exception(error)
            raise
        finally:
            with self._mutex:
                del self._on_their_way[wanted]
        return own.result()

    # From wherever a good copy is

    def _fetched(self, cell: Cell, window_bytes: int) -> Fetched:
        """The first failure is the one to be told, if nobody has a good copy."""
        failures: list[TidelogError] = []
        for fetch in (self._from_log, self._from_compacted, self._from_replicas):
            found = fetch(cell, window_bytes, failures)
            if found is not None:
                return found
        raise failures[0] if failures else missing(cell.lsn)

    def _from_log(self, cell: Cell, window_bytes: int, failures: list[TidelogError]) -> Fetched | None:
        """From the object that its record is in, if that was not dropped. What comes out wrong is fetched once more."""
        for attempt in range(2):
            found = self._objects.find_kept(cell.lsn)
            if found is None:
                failures.clear()  # it was dropped meanwhile, which is no failure
                return None
            try:
                return self._fetched_from(self._store, found, cell, 0 if attempt else window_bytes)
            except (DataError, NotFoundError, RetryError) as error:
                self._counters.repeated += 1
                failures.append(_told(error, found, cell))
                if isinstance(error, RetryError):
                    return None  # it has been asked often enough
                if isinstance(error, NotFoundError):
                    self._objects.forget(found)  # it may have been replaced since its descriptor was read, or dropped
        return None

    def _from_compacted(self, cell: Cell, window_bytes: int, failures: list[TidelogError]) -> Fetched | None:
        """From compacted data, where every value is whose record was dropped, and others too."""
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

    def _kept(self, found: CompactedBody, cell: Cell) -> Fetched:
        """The cache is of bytes of the log: what is compressed in another way does not belong in there."""
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

    def _compacted_in(self, replica: ObjectStore) -> CompactedBodies:
        keys = self._objects.keys
        known = self._compacted_of.get(id(replica))
        if known is None:
            known = CompactedBodies(replica, keys, lambda: manifest_in(replica, keys), on_request=self._count_request)
            self._compacted_of[id(replica)] = known
        return known

    def _fetched_from(self, store: ObjectStore, found: ColdObject, cell: Cell, window_bytes: int) -> Fetched:
        stretches = self._read_stretches(store, found, cell, window_bytes)
        for position, data in stretches:
            if position <= cell.position and cell.position + cell.stored_bytes <= position + len(data):
                begin = cell.position - position
                stored = bytes(data[begin : begin + cell.stored_bytes])
                self._decoded(stored, cell.codec, cell)  # bad bytes are told before they are kept
                for stretch in stretches:
                    self._cache.add(*stretch)
                return Fetched(stored, cell.codec)
        raise DataError(f"no body at position {cell.position}, LSN {cell.lsn}")

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

    # Fetching ahead

    def _fetch_next(self, cell: Cell, window_bytes: int) -> None:
        """Somebody reads in order: what comes next in the same object is on its way before it is asked for."""
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
        """How far behind a position the cache goes on, as far as that matters."""
        for part in (window_bytes, window_bytes // 2):
            if self._cache.holds(position, part):
                return position + part
        return position

    def _fetch_ahead(self, found: ColdObject, start: int, length: int) -> None:
        try:
            self._cache.add(*read_plain(self._store, found, start, length))
            self._counters.fetched_ahead += 1
            self._counters.bytes_fetched += length
        except TidelogError:
            return  # whoever wants it asks for it, and hears what is wrong


def _told(failure: TidelogError, found: ColdObject, cell: Cell) -> TidelogError:
    """What is wrong, with the object and the byte."""
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
    """The same of compacted data: damage is named there already."""
    if not isinstance(failure, NotFoundError):
        return failure
    return GapError(
        f"LSN {cell.lsn} is missing in the store: a file of compacted data is not there: {failure.message}",
        first=cell.lsn,
        last=cell.lsn,
        path=failure.path,
        hint="Put the file back; an engine with replicas reads theirs",
    )


def _compacted_bodies(
    catalog: Catalog, store: ObjectStore, on_manifest: Callable[[Manifest], None], on_request: OnRequest
) -> CompactedBodies | None:
    """Only an engine's log has compacted data."""
    keys = catalog.keys
    if not isinstance(keys, EngineKeys):
        return None

    def manifest() -> Manifest | None:
        found = read_manifest(catalog.metadata, keys)
        return None if found is None else found[0]

    return CompactedBodies(store, keys, manifest, on_manifest=on_manifest, on_request=on_request)
