"""Reads a partition for Fetch: batches of Kafka's format from memory, files and the store.

Invariants
- A message is read from memory while it is there. Files and the store are read in threads, never in the event loop.
- At most `limit` reads wait for the store at a time, whatever becomes of the requests that asked: a store that hangs
  takes no thread from the rest of the server.
- Reads that continue where an earlier one ended continue with its reader, so that files stay open and objects are
  prefetched. At most `_MAX_READERS` are kept, and none for longer than `_IDLE_SECONDS`.
- Batches are kept as they were encoded, for other consumers at the tail: all partitions together no more than the
  settings allow.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

from tidelog.log.frame import HEADER_BYTES, Frames, encode_many
from tidelog.log.isolation import Isolation
from tidelog.log.reader import BatchReader
from tidelog.log.tail_cache import Batch
from tidelog.service.kafka.records import Compression, compressed_batches, encode_batches
from tidelog.store.scheduler import STORE_THREADS, in_store_thread
from tidelog.topics.topic import Topic

_MAX_READERS = 32
_IDLE_SECONDS = 60.0
Result = TypeVar("Result")


class ReadCounts:
    """Where consumers' reads were answered from, all partitions together."""

    __slots__ = ("files", "for_others", "memory", "sent_away", "store")

    def __init__(self) -> None:
        self.memory = self.files = self.store = 0
        self.for_others = 0
        """From the store, for partitions of other nodes; `store` is without these."""
        self.sent_away = 0
        """Consumers that were sent to another node for history."""


class ColdReads:
    """The reads that wait for the store, all partitions together."""

    def __init__(self, limit: int = STORE_THREADS // 2) -> None:
        self.counts = ReadCounts()
        self._free = asyncio.Semaphore(limit)
        self._running: set[asyncio.Future[Any]] = set()

    @property
    def under_way(self) -> int:
        """How many wait for the store now."""
        return len(self._running)

    async def run(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """The result of the work, which goes on when the caller is cancelled: its thread cannot be stopped."""
        await self._free.acquire()
        task = asyncio.ensure_future(work())
        self._running.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Future[Any]) -> None:
        self._running.discard(task)
        self._free.release()
        if not task.cancelled():
            task.exception()  # the caller raises it, if there still is one


class Fetched(NamedTuple):
    """Some batches of a partition, and where the next ones begin."""

    records: bytes
    next_offset: int


class EncodedBatches:
    """Batches that were fetched, of all partitions: many consumers at the tail ask for the same."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        # The one that was used longest ago first.
        self._kept: dict[tuple[object, int, int], Fetched] = {}
        self.kept_bytes = 0

    def find(self, reader: object, first: int, stop: int) -> Fetched | None:
        key = (reader, first, stop)
        found = self._kept.pop(key, None)
        if found is not None:
            self._kept[key] = found
        return found

    def keep(self, reader: object, first: int, stop: int, fetched: Fetched) -> None:
        """One that alone would take most of the room is not kept."""
        if len(fetched.records) > self._max_bytes // 2:
            return
        before = self._kept.pop((reader, first, stop), None)  # two may have compressed the same
        self._kept[reader, first, stop] = fetched
        self.kept_bytes += len(fetched.records) - (0 if before is None else len(before.records))
        while self.kept_bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))

    def forget(self, reader: object) -> None:
        """Those of a partition that is closed, or is compressed otherwise from now on."""
        for key in [key for key in self._kept if key[0] is reader]:
            self._drop(key)

    def _drop(self, key: tuple[object, int, int]) -> None:
        self.kept_bytes -= len(self._kept.pop(key).records)


class _OpenReader:
    """A reader at rest, with what it has read and not given yet."""

    __slots__ = ("left", "reader", "used_at")

    def __init__(self, reader: BatchReader) -> None:
        self.reader = reader
        self.left: Batch | None = None
        self.used_at = 0.0


class PartitionReader:
    """Reads one partition, for any number of requests."""

    def __init__(
        self,
        topic: Topic,
        cold: ColdReads,
        encoded: EncodedBatches,
        leader_epoch: int,
        compression: Compression,
        isolation: Isolation = "read_uncommitted",
    ) -> None:
        """With `read_committed` messages of transactions that are open or aborted are left out, as are their ends:
        for a partition of another node, about whose transactions nothing else is known here."""
        self._topic = topic
        self._isolation = isolation
        self._log = topic._owned  # None: what the store has, and nothing else
        self._cold = cold
        self.leader_epoch = leader_epoch
        """What batches are said to be of."""
        self._compression = compression
        self._readers: dict[int, _OpenReader] = {}
        self._encoded = encoded
        self.sent_bytes = 0
        """What consumers got of this partition, by any protocol."""
        self.sent_messages = 0

    def use_compression(self, compression: Compression) -> None:
        """Compresses what is read from now on so."""
        if compression is not self._compression:
            self._compression = compression
            self._encoded.forget(self)

    def read_cached(self, offset: int, stop_offset: int, max_bytes: int) -> Fetched | None:
        """Batches from `offset` up to `stop_offset` (exclusive) that are in memory; None when they are elsewhere, or
        have to be compressed first."""
        found = self._in_memory(offset, stop_offset)
        if found is None or self._compression is not Compression.NONE:
            return None
        self._cold.counts.memory += 1
        return self._encode(found, max_bytes)

    def _in_memory(self, offset: int, stop_offset: int) -> Batch | None:
        log = self._log
        found = log.locate(offset, stop_offset) if log is not None and offset >= log.start_offset else None
        return found if isinstance(found, Batch) else None

    async def read(self, offset: int, stop_offset: int, max_bytes: int) -> Fetched:
        """Batches from `offset` up to `stop_offset` (exclusive), wherever they are; at least one message."""
        cached = self._in_memory(offset, stop_offset)
        counts = self._cold.counts
        if cached is not None:
            counts.memory += 1
            return await self._encode_async(cached, max_bytes)
        if self._log is None or offset < self._log.start_offset:
            counts.for_others += self._log is None
            counts.store += self._log is not None
            opened, batch = await self._cold.run(lambda: self._next(offset))
        else:
            counts.files += 1
            opened, batch = await self._next(offset)
        if batch is None:
            opened.reader.close()
            return Fetched(b"", offset)
        # A gap that was passed over, or messages above what this consumer may see.
        stop = min(batch.stop, batch.start + max(0, stop_offset - batch.first_offset))
        fetched = Fetched(b"", offset)
        if stop > batch.start:
            fetched = await self._encode_async(batch._replace(stop=stop), max_bytes)
        self._rest(opened, batch, fetched.next_offset)
        return fetched

    async def _next(self, offset: int) -> tuple[_OpenReader, Batch | None]:
        opened = self._readers.pop(offset, None)
        if opened is None:
            follows = self._log is not None  # the end of what is stored is not waited at
            opened = _OpenReader(
                await in_store_thread(lambda: self._topic._reader(offset, None, follows, "raise", self._isolation))
            )
        # From a file or from the store: each has threads of its own.
        return opened, opened.left or await opened.reader.next_batch_async()

    def _rest(self, opened: _OpenReader, batch: Batch, next_offset: int) -> None:
        """Keeps a reader for the request that continues there."""
        opened.left = _rest_of(batch, next_offset)
        opened.used_at = asyncio.get_running_loop().time()
        other = self._readers.pop(next_offset, None)
        self._readers[next_offset] = opened
        idle = [other] if other is not None else []
        if len(self._readers) > _MAX_READERS:
            idle.append(self._readers.pop(next(iter(self._readers))))
        for one in idle:
            one.reader.close()

    def continues(self, offset: int) -> bool:
        """Whether a read from there continues an earlier one."""
        return offset in self._readers

    def close_idle(self, now: float) -> None:
        """Closes the readers that no request has continued."""
        for offset, opened in list(self._readers.items()):
            if now - opened.used_at > _IDLE_SECONDS:
                del self._readers[offset]
                opened.reader.close()

    async def _encode_async(self, batch: Batch, max_bytes: int) -> Fetched:
        """As `_encode`, and compressed if the topic wants that: in a thread, for it takes long."""
        compression = self._compression
        if compression is Compression.NONE:
            return self._encode(batch, max_bytes)
        frames = batch.frames or encode_many(batch.first_offset, batch.bare)
        stop = _fitting(frames, batch.start, batch.stop, max_bytes)
        key = frames.first_offset + batch.start, frames.first_offset + stop
        known = self._encoded.find(self, *key)
        if known is None:
            epoch = self.leader_epoch
            records = await in_store_thread(
                lambda: compressed_batches(encode_batches(frames, batch.start, stop, leader_epoch=epoch), compression)
            )
            known = Fetched(records, key[1])
            if compression is self._compression:
                self._encoded.keep(self, *key, known)
        self.count_sent(len(known.records), stop - batch.start)
        return known

    def _encode(self, batch: Batch, max_bytes: int) -> Fetched:
        frames = batch.frames or encode_many(batch.first_offset, batch.bare)
        stop = _fitting(frames, batch.start, batch.stop, max_bytes)
        key = frames.first_offset + batch.start, frames.first_offset + stop
        known = self._encoded.find(self, *key)
        if known is None:
            records = encode_batches(frames, batch.start, stop, leader_epoch=self.leader_epoch)
            known = Fetched(records, key[1])
            self._encoded.keep(self, *key, known)
        self.count_sent(len(known.records), stop - batch.start)
        return known

    def count_sent(self, size: int, messages: int) -> None:
        """Counts what a consumer gets."""
        self.sent_bytes += size
        self.sent_messages += messages

    def close(self) -> None:
        """Closes all readers."""
        for opened in self._readers.values():
            opened.reader.close()
        self._readers.clear()
        self._encoded.forget(self)


def _fitting(frames: Frames, start: int, stop: int, max_bytes: int) -> int:
    """The end of the frames from `start` on that fit, at least one."""
    limit = frames.start_of(start) + max_bytes
    if frames.start_of(stop) <= limit:
        return stop
    # Frame i ends where frame i + 1 begins, so counting the starts that are within the limit is enough.
    positions = memoryview(frames.positions).cast("Q")
    return max(start + 1, bisect_right(positions, limit + HEADER_BYTES, start, stop) - 1)


def _rest_of(batch: Batch, offset: int) -> Batch | None:
    """What is left of a batch from an offset on."""
    taken = offset - batch.first_offset
    if taken >= batch.stop - batch.start:
        return None
    if batch.frames is None:
        return Batch(offset, None, 0, len(batch.bare) - taken, batch.bare[taken:])
    return batch._replace(first_offset=offset, start=batch.start + taken)
