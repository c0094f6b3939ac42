"""Partitions of other nodes, as the store has them: any node reads what is shipped, without asking the owner.

Invariants
- Nothing is opened for writing, claimed or kept on the disk. What is read is what the catalog says, whoever owns it.
- The catalog is asked where a partition ends only for an offset that is not below the end it had, and at most once in
  `_LOOK_SECONDS`: a client that waits at the end costs no more than that.
- A batch is given the epoch that the owner had after everything up to there was published, or a later one. With an
  earlier one a client would take what a new owner has shipped for messages that were lost (KIP-320).
- A partition that nobody has read for `_KEPT_SECONDS` is forgotten.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from tidelog.cold.catalog import Catalog
from tidelog.errors import NotFoundError
from tidelog.log.isolation import READ_COMMITTED
from tidelog.service.kafka.partition_reader import ColdReads, EncodedBatches, Fetched, PartitionReader
from tidelog.service.kafka.records import Compression
from tidelog.store.scheduler import in_store_thread
from tidelog.topics.directory import LogDirectory
from tidelog.topics.names import TopicName, parse_topic_name
from tidelog.topics.topic import Topic

if TYPE_CHECKING:
    from tidelog.service.kafka.broker import ServedTopic

_LOOK_SECONDS = 1.0
_KEPT_SECONDS = 120.0


def stored_topic(directory: LogDirectory, name: TopicName, number: int) -> Topic:
    """In a thread: a partition as the store has it; NotFoundError before its owner has opened it for the first time."""
    logs = directory.partition_logs(str(name))
    if number >= len(logs):
        raise NotFoundError(f"the store has nothing of {name}, partition {number}, yet")
    return directory._opener.look_at_store(parse_topic_name(logs[number]), number)


class _Ends(NamedTuple):
    """Where a partition starts and ends in the store, and the epoch of who owned it after that."""

    start_offset: int
    end_offset: int
    epoch: int


class StoredPartition:
    """What the store has of a partition, for any number of requests."""

    def __init__(self, catalog: Catalog, ends: _Ends, committed: PartitionReader, all_of_it: PartitionReader) -> None:
        self.catalog = catalog
        self._committed = committed
        self._all = all_of_it
        self.used_at = asyncio.get_running_loop().time()
        self.take(ends)

    def take(self, ends: _Ends) -> None:
        """Where it stands by now."""
        self.start_offset, self.end_offset = ends.start_offset, ends.end_offset
        self._committed.leader_epoch = self._all.leader_epoch = ends.epoch
        self.looked_at = asyncio.get_running_loop().time()

    def has(self, offset: int) -> bool:
        return self.start_offset <= offset < self.end_offset

    async def read(self, offset: int, max_bytes: int, *, is_committed: bool) -> Fetched:
        """Batches from an offset on, at least one message; none where the store has no more that may be seen."""
        reader = self._committed if is_committed else self._all
        was_kept = reader.continues(offset)
        fetched = await reader.read(offset, self.end_offset, max_bytes)
        if fetched.next_offset == offset and was_kept:  # it ended where the store did when it was opened
            fetched = await reader.read(offset, self.end_offset, max_bytes)
        return fetched

    def close_idle(self, now: float) -> None:
        self._committed.close_idle(now)
        self._all.close_idle(now)

    def close(self) -> None:
        self._committed.close()
        self._all.close()


def _ends_of(catalog: Catalog) -> _Ends:
    """In a thread. The owner is asked for last."""
    start, end, owner = catalog.start_offset(), catalog.next_offset(), catalog.owner()
    return _Ends(start, end, 0 if owner is None else owner[0].epoch)


_Key = tuple[bytes, int]
"""The id of a topic, and a partition."""


class StoredPartitions:
    """Those that were read lately."""

    def __init__(
        self,
        directory: LogDirectory,
        cold: ColdReads,
        encoded: EncodedBatches,
        compression_of: Callable[[TopicName], Compression],
    ) -> None:
        """`compression_of` is called in a thread."""
        self._directory = directory
        self._cold = cold
        self._encoded = encoded
        self._compression_of = compression_of
        self._known: dict[_Key, StoredPartition] = {}
        self._missing_at: dict[_Key, float] = {}
        self._looking: dict[_Key, asyncio.Future[None]] = {}

    async def covering(self, served: ServedTopic, number: int, offset: int) -> StoredPartition | None:
        """A partition if the store has this offset of it."""
        key = served.id, number
        known, now = self._known.get(key), asyncio.get_running_loop().time()
        if known is None or not known.has(offset):
            looked_at = self._missing_at.get(key, 0.0) if known is None else known.looked_at
            if not looked_at or now - looked_at >= _LOOK_SECONDS:
                await self._look_again(key, served.name)
            known = self._known.get(key)
        if known is None or not known.has(offset):
            return None
        known.used_at = now
        return known

    async def _look_again(self, key: _Key, name: TopicName) -> None:
        running = self._looking.get(key)
        if running is None:
            running = self._looking[key] = asyncio.ensure_future(self._look(key, name))
            running.add_done_callback(lambda done: self._looked(key, done))
        await asyncio.shield(running)

    def _looked(self, key: _Key, done: asyncio.Future[None]) -> None:
        del self._looking[key]
        if not done.cancelled():
            done.exception()

    async def _look(self, key: _Key, name: TopicName) -> None:
        known = self._known.get(key)
        if known is not None:
            known.take(await in_store_thread(_ends_of, known.catalog))
            return

        def find() -> tuple[Topic, Catalog, _Ends, Compression]:
            topic = stored_topic(self._directory, name, key[1])
            assert topic._joined is not None, "it is in a store"
            catalog = topic._joined.catalog
            return topic, catalog, _ends_of(catalog), self._compression_of(name)

        try:
            topic, catalog, ends, compression = await in_store_thread(find)
        except NotFoundError:
            self._missing_at[key] = asyncio.get_running_loop().time()
            return
        self._missing_at.pop(key, None)
        common = topic, self._cold, self._encoded, ends.epoch, compression
        readers = PartitionReader(*common, READ_COMMITTED), PartitionReader(*common)
        self._known[key] = StoredPartition(catalog, ends, *readers)

    def forget(self, partition: StoredPartition) -> None:
        """Reading it failed: the next request looks it up again."""
        for key, known in list(self._known.items()):
            if known is partition:
                del self._known[key]
                partition.close()

    def close_idle(self, now: float) -> None:
        for key, known in list(self._known.items()):
            known.close_idle(now)
            if now - known.used_at > _KEPT_SECONDS:
                del self._known[key]
                known.close()
        self._missing_at = {key: at for key, at in self._missing_at.items() if now - at < _LOOK_SECONDS}

    def close(self) -> None:
        for known in self._known.values():
            known.close()
        self._known.clear()
