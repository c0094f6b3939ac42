"""Reading bodies from the store: by pointer, through a cache, from a replica where the store's own copy is bad.

Invariants
- What is handed out has the checksum of its cell. Bytes that have not are fetched once more, then from each replica;
  if they come again as they were, the error names the object and the byte.
- A lone read is one range request for exactly the body (a block of about 1 MiB where objects are compressed).
- Several who want the same body at the same time cause one request.
- Nothing in here changes the store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Lock
from typing import Any

import msgspec

from tidelog.engine.body import decode_body
from tidelog.engine.cell import Cell
from tidelog.engine.cold_cache import CacheStatistics, ColdCache
from tidelog.engine.cold_objects import ColdObject, ColdObjects, Stretch, read_blocks, read_plain
from tidelog.engine.read_ahead import ReadAhead
from tidelog.errors import CorruptionError, DataError, GapError, NotFoundError, RetryError, TidelogError
from tidelog.tier.catalog import Catalog
from tidelog.tier.daemon_pool import DaemonPool
from tidelog.tier.object_store import ObjectStore

_FETCHING_THREADS = 2
_DAMAGE_HINT = "Put a good copy of the object in its place; an engine with replicas reads theirs"
Body = tuple[bytes, dict[str, Any]]


class ColdStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of reading from the store."""

    reads: int
    requests: int
    bytes_fetched: int
    shared: int
    fetched_ahead: int
    repeated: int
    from_replicas: int
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


class ColdReader:
    """Reads bodies of objects from a store. Threads may share it."""

    def __init__(
        self,
        catalog: Catalog,
        store: ObjectStore,
        cache_bytes: int,
        replicas: Callable[[], Sequence[ObjectStore]] = tuple,
    ) -> None:
        self._objects = ColdObjects(catalog)
        self._store = store
        self._replicas = replicas
        self._cache = ColdCache(cache_bytes)
        self._read_ahead = ReadAhead()
        self._fetchers = DaemonPool(_FETCHING_THREADS, "tidelog-cold")
        self._on_their_way: dict[tuple[int, int], Future[bytes]] = {}
        self._mutex = Lock()
        self._counters = _Counters()

    def read(self, cell: Cell) -> Body:
        """Data and metadata of the body that a cell points to."""
        self._counters.reads += 1
        window_bytes = self._read_ahead.noticed(cell.position, cell.stored_bytes)
        body = self._from_cache(cell) or self._decoded(self._shared(cell, window_bytes), cell)
        if window_bytes:
            self._fetch_next(cell, window_bytes)
        return body

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
            return self._decoded(cached, cell)
        except DataError:
            self._cache.discard(cell.position, cell.stored_bytes)
            return None

    def _decoded(self, stored: bytes | memoryview, cell: Cell) -> Body:
        return decode_body(stored, cell.codec, cell.size, cell.crc, cell.lsn)

    # One request for all who want the same

    def _shared(self, cell: Cell, window_bytes: int) -> bytes:
        wanted = cell.position, cell.stored_bytes
        own: Future[bytes] = Future()
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

    def _fetched(self, cell: Cell, window_bytes: int) -> bytes:
        """The first failure is the one to be told, if nobody has a good copy."""
        found = self._objects.find(cell.lsn)
        failure: TidelogError | None = None
        for attempt, store in enumerate((self._store, self._store, *self._replicas())):
            if attempt == 1 and isinstance(failure, RetryError):
                continue  # it has been asked often enough
            if attempt == 1 and isinstance(failure, NotFoundError):
                found = self._looked_up_again(found, cell)
            where = found if attempt < 2 else self._objects.found_in(store, found, cell.lsn)
            try:
                body = self._fetched_from(store, where, cell, window_bytes if not attempt else 0)
            except (DataError, NotFoundError, RetryError) as error:
                failure = failure or error
                self._counters.repeated += 1
                continue
            self._counters.from_replicas += attempt > 1
            return body
        assert failure is not None
        raise _told(failure, found, cell)

    def _looked_up_again(self, found: ColdObject, cell: Cell) -> ColdObject:
        """An object that is not there may have been replaced since its descriptor was read."""
        self._objects.forget(found)
        return self._objects.find(cell.lsn)

    def _fetched_from(self, store: ObjectStore, found: ColdObject, cell: Cell, window_bytes: int) -> bytes:
        stretches = self._read_stretches(store, found, cell, window_bytes)
        for position, data in stretches:
            if position <= cell.position and cell.position + cell.stored_bytes <= position + len(data):
                begin = cell.position - position
                stored = bytes(data[begin : begin + cell.stored_bytes])
                self._decoded(stored, cell)  # bad bytes are told before they are kept
                for stretch in stretches:
                    self._cache.add(*stretch)
                return stored
        raise DataError(f"no body at position {cell.position}, LSN {cell.lsn}")

    def _read_stretches(
        self, store: ObjectStore, found: ColdObject, cell: Cell, window_bytes: int
    ) -> Sequence[Stretch]:
        self._counters.requests += 1
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
        found = self._objects.find(cell.lsn)
        end = cell.position + cell.stored_bytes
        if found.descriptor.codec != "none":
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
    if isinstance(failure, DataError):
        byte = found.byte_of(cell)
        return CorruptionError(failure.message, path=found.key, byte=byte, operation="read", hint=_DAMAGE_HINT)
    return failure
