"""What a partition knows of Kafka's producers, kept beyond a restart: rebuilt from the log, from a snapshot on.

    kafka.ckpt          beside the log: what follows from messages that are on this disk
    producers-kafka     in the catalog: the same of messages that are shipped, for the next owner

Invariants
- The log has the truth: each message names its producer, epoch and sequence, and control records end transactions. A
  snapshot that is missing, damaged, or of other messages costs time, nothing else.
- A snapshot is made of the one before it and the log behind that, in a thread: the event loop's own state is not
  touched. It never covers a part of a batch.
- A log that never had a snapshot in its catalog has no message of Kafka's in its history: the first is written before
  the first batch is taken. So a large topic that is served for the first time is not read from the store.
- Opening reads at most what was appended since the last snapshot: `SNAPSHOT_EVERY_MESSAGES` messages, or what came
  within `SNAPSHOT_EVERY_SECONDS` and while it was made.
- A reader may return a batch in parts. They are joined by the number that each message has in its batch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import cramjam
import msgspec

from tidelog.errors import DataError, OffsetOutOfRangeError, TidelogError
from tidelog.log.atomic_batches import whole_below
from tidelog.log.directory import KAFKA_PRODUCERS
from tidelog.log.frame import Frames, encode_many
from tidelog.log.reader import BatchReader
from tidelog.service.kafka.records import Compression, RecordError, StoredBatch, decompress, stored_batches
from tidelog.service.kafka.transactions.producers import SEQUENCES, PartitionProducers
from tidelog.store.document import encode_json
from tidelog.store.scheduler import in_store_thread
from tidelog.topics.message import group_of
from tidelog.topics.producer.dedup import AnchoredSnapshot
from tidelog.topics.producer.snapshots import SnapshotKind, SnapshotPlaces
from tidelog.topics.topic import Topic

SNAPSHOT_EVERY_MESSAGES = 1 << 17
SNAPSHOT_EVERY_SECONDS = 60.0
_EXPIRE_EVERY_SECONDS = 600.0
_MAX_STATE_BYTES = 256 << 20
_logger = logging.getLogger("tidelog.kafka")


class KafkaSnapshot(AnchoredSnapshot, frozen=True, kw_only=True):
    """The state of all producers (`PartitionProducers.snapshot`), compressed."""

    state: bytes


class StoredProducers:
    """Loads the state of one partition, and writes snapshots of it. `load` and `save` wait for disk and store."""

    def __init__(
        self,
        topic: Topic,
        *,
        every_messages: int = SNAPSHOT_EVERY_MESSAGES,
        every_seconds: float = SNAPSHOT_EVERY_SECONDS,
    ) -> None:
        self._topic = topic
        self._log = topic._log
        self._tiered = topic._tiered
        self._every_messages = every_messages
        self._every_seconds = every_seconds
        owned = None if self._tiered is None else self._tiered.owned
        self._places = SnapshotPlaces(self._log, owned, self._payload_at, _KIND)
        self._saved_offset = 0
        self._shipped_offset = -1
        self._saved_at = self._now()
        self._expired_at = self._now()
        self._saving: asyncio.Task[None] | None = None

    # Loading

    def load(self) -> PartitionProducers:
        """The state as the log has it now. Nothing may be appended by Kafka's producers meanwhile."""
        is_first = self._is_first
        producers, start = self._begun(self._places.newest())
        self._scan(producers, start, self._log.next_offset)
        producers.forget_before(self._topic.start_offset)
        self._saved_offset = start
        if is_first:
            self._save_shipped()
        return producers

    @property
    def _is_first(self) -> bool:
        return self._tiered is not None and not self._places.is_in_catalog

    def _begun(self, snapshot: KafkaSnapshot | None) -> tuple[PartitionProducers, int]:
        """What a snapshot says, and the offset from which on the log has to be read."""
        if snapshot is not None:
            producers = PartitionProducers()
            try:
                producers.restore(_decompressed(snapshot.state))
            except DataError as error:
                _logger.warning("%s: a snapshot of the producers cannot be used: %s", self._topic.name, error)
            else:
                return producers, snapshot.as_of_offset
        return PartitionProducers(), self._log.start_offset if self._is_first else self._topic.start_offset

    def _scan(self, producers: PartitionProducers, start: int, stop: int) -> None:
        """Records what the log has from `start` up to `stop` (exclusive)."""
        heard_us = self._topic._clock.now_us()
        self._find(start, stop, lambda batch: producers.record(batch, heard_us))

    def _find(self, start: int, stop: int, found: Callable[[StoredBatch], None]) -> None:
        scan = _Scan(found)
        start = max(start, self._topic.start_offset)
        if start < stop:
            for batch in self._read(start, stop):
                if batch.frames is None:
                    scan.take(encode_many(batch.first_offset, batch.bare), 0, len(batch.bare))
                else:
                    scan.take(batch.frames, batch.start, batch.stop)
        scan.finish()

    def batches_from(self, start: int) -> list[StoredBatch]:
        """What the log has from an offset on, in a thread: after an append whose outcome is not known."""
        self._log.flush()
        found: list[StoredBatch] = []
        self._find(start, self._log.next_offset, found.append)
        return found

    def payloads(self, start: int, count: int) -> list[bytes]:
        """Messages of the log, in a thread; fewer where some are gone."""
        found: list[bytes] = []
        if start >= self._topic.start_offset:
            for batch in self._read(start, start + count):
                found += batch.payloads()
        return found

    def _read(self, start: int, stop: int) -> BatchReader:
        return self._topic._reader(start, stop, False, "skip", "read_uncommitted")

    def _payload_at(self, offset: int) -> bytes | None:
        if offset < self._topic.start_offset:
            return None
        try:
            reader = self._read(offset, offset + 1)
        except OffsetOutOfRangeError:
            return None
        try:
            batch = reader.next_batch()
            return None if batch is None or batch.first_offset != offset else batch.payloads()[0]
        except OffsetOutOfRangeError:
            return None
        finally:
            reader.close()

    # Saving

    def appended(self, producers: PartitionProducers) -> None:
        """On the event loop, after a batch was recorded: now and then a snapshot is written, beside everything else."""
        now = self._now()
        if self._saving is not None:
            return
        is_long = self._log.next_offset - self._saved_offset >= self._every_messages
        if is_long or now - self._saved_at >= self._every_seconds:
            self._saving = asyncio.get_running_loop().create_task(self._save_in_thread())
        if now - self._expired_at >= _EXPIRE_EVERY_SECONDS:
            self._expired_at = now
            producers.expire(self._topic._clock.now_us())
            producers.forget_before(self._topic.start_offset)

    async def _save_in_thread(self) -> None:
        reached = self._log.next_offset
        try:
            await in_store_thread(self.save)
        except TidelogError as error:
            _logger.warning("%s: no snapshot of the producers was written: %s", self._topic.name, error)
        finally:
            # Also after a failure: the next one is tried when as much has come again.
            self._saved_offset = max(self._saved_offset, reached)
            self._saved_at = self._now()
            self._saving = None

    def save(self) -> None:
        """Writes both snapshots, as far as there is something new."""
        stop = whole_below(self._log, self._log.durable_offset, group_of)
        made = self._made(self._places.local(), stop)
        if made is not None:
            self._places.write_local(made)
        self._saved_offset = max(self._saved_offset, stop)
        self._save_shipped()

    def _save_shipped(self) -> None:
        tiered = self._tiered
        if tiered is None or tiered.shipped_offset <= self._shipped_offset:
            return
        shipped_offset = tiered.shipped_offset
        made = self._made(self._places.shipped(), shipped_offset)
        if made is not None:
            tiered.change(lambda _: self._places.write_shipped(made))
        self._shipped_offset = shipped_offset

    def _made(self, before: KafkaSnapshot | None, stop: int) -> KafkaSnapshot | None:
        """The state below `stop`; None when the one before says it already."""
        if before is not None and before.as_of_offset == stop and self._places.is_true(before):
            return None
        producers, start = self._begun(self._places.newest(stop))
        self._scan(producers, start, stop)
        producers.expire(self._topic._clock.now_us())
        producers.forget_before(self._topic.start_offset)
        return KafkaSnapshot(
            as_of_offset=stop,
            last_crc32=self._places.crc32_below(stop),
            epoch=self._places.epoch,
            state=_compressed(producers),
        )

    def _now(self) -> float:
        return self._topic._clock.monotonic()


class _Scan:
    """Puts the batches of producers together again that a reader returned in parts."""

    def __init__(self, found: Callable[[StoredBatch], None]) -> None:
        self._found = found
        self._last: StoredBatch | None = None

    def take(self, frames: Frames, start: int, stop: int) -> None:
        """The messages that come next."""
        try:
            runs = stored_batches(frames, start, stop)
        except DataError as error:
            if stop - start == 1:
                _logger.warning("message %d says nothing of its producer: %s", frames.first_offset + start, error)
                return
            middle = (start + stop) // 2
            self.take(frames, start, middle)
            self.take(frames, middle, stop)
            return
        if self._last is not None and runs and _continues(self._last, runs[0]):
            at = runs[0].first_offset - frames.first_offset
            if at == start and group_of(frames.payloads(at, at + 1)[0])[0] > 0:
                joined = self._last._replace(last_offset=runs[0].last_offset, timestamp_us=runs[0].timestamp_us)
                self._last, runs[0] = None, joined
        if runs:
            self.finish()
            for run in runs[:-1]:
                self._found(run)
            self._last = runs[-1]

    def finish(self) -> None:
        """There is no more."""
        if self._last is not None:
            self._found(self._last)
            self._last = None


def _continues(one: StoredBatch, other: StoredBatch) -> bool:
    if one.is_control or other.is_control:
        return False
    same = (one.producer_id, one.producer_epoch, one.is_transactional)
    expected = (one.base_sequence + other.first_offset - one.first_offset) % SEQUENCES
    return same == (other.producer_id, other.producer_epoch, other.is_transactional) and (
        other.base_sequence == expected
    )


def _compressed(producers: PartitionProducers) -> bytes:
    return bytes(cramjam.zstd.compress(producers.snapshot()))


def _decompressed(data: bytes) -> bytes:
    try:
        return bytes(decompress(Compression.ZSTD, data, _MAX_STATE_BYTES))
    except RecordError as error:
        raise DataError(f"a snapshot of producers is damaged: {error}") from error


def _within(snapshot: KafkaSnapshot, max_bytes: int) -> KafkaSnapshot | None:
    """Without the producers that were silent longest; what is open and what was aborted has to fit."""
    while len(encode_json(snapshot)) > max_bytes:
        producers = PartitionProducers()
        producers.restore(_decompressed(snapshot.state))
        before = producers.count
        producers.drop_silent((before + 1) // 2)
        if producers.count == before:
            return None
        snapshot = msgspec.structs.replace(snapshot, state=_compressed(producers))
    return snapshot


_KIND = SnapshotKind("kafka-producers", 1, KAFKA_PRODUCERS, lambda keys: keys.kafka_producers, KafkaSnapshot, _within)
