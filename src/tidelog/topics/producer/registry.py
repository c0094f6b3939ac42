"""The producers of an open topic: recovered once, then updated with every append, and snapshotted.

Invariants
- Checking whether a sequence is stored, appending it and recording its offset are one step, under the lock of its name.
- Each name has one live producer: opening it again assigns a higher epoch and fences the previous one.
- A snapshot is taken at the next offset, which is never inside a batch, and only when no append below it is in
  progress. It is written once its location has everything below that offset.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from threading import Lock, RLock

from tidelog.cold.tiered_log import TieredLog
from tidelog.errors import DataError, InputError, OffsetOutOfRangeError, TidelogError
from tidelog.log import Log
from tidelog.log.directory import PRODUCERS
from tidelog.log.frame import encode_many
from tidelog.log.reader import BatchReader
from tidelog.log.tail_cache import Batch
from tidelog.topics.message import (
    MAX_PRODUCER_NAME_BYTES,
    ProducerMark,
    decode_extension,
    is_batch_mark,
    raw_extensions,
)
from tidelog.topics.producer.dedup import ProducersSnapshot, ProducerState, ProducerTable, within
from tidelog.topics.producer.snapshots import SnapshotKind, SnapshotPlaces

_logger = logging.getLogger("tidelog.topics")
_WRITE_EVERY_MESSAGES = 1 << 16
_PATIENCE_SECONDS = 0.2
_SNAPSHOTS = SnapshotKind("producers", 1, PRODUCERS, lambda keys: keys.producers, ProducersSnapshot, within)
OpenReader = Callable[[int, int], BatchReader]


class ProducerName:
    """What all producers of one name share, one after the other. `lock` guards everything in it."""

    def __init__(self, name: str, state: ProducerState) -> None:
        self.name = name
        self.state = state
        self.lock = Lock()
        self.epoch = state.epoch
        """Of the live producer, or the last one."""
        self.is_open = False
        self.unsure_from: int | None = None
        """An append was interrupted: whether it is in the topic, from this offset on, has to be looked up."""


class ProducerRegistry:
    """Made with the topic; finds out about its producers when the first one is asked for."""

    def __init__(self, log: Log, tiered: TieredLog | None, open_reader: OpenReader) -> None:
        self._log = log
        self._tiered = tiered
        self._open_reader = open_reader
        self._guard = RLock()
        self._table: ProducerTable | None = None
        self._names: dict[str, ProducerName] = {}
        owned = None if tiered is None else tiered.owned
        self._snapshots = SnapshotPlaces(log, owned, self._payload_at, _SNAPSHOTS)
        self._unsynced: ProducersSnapshot | None = None
        self._unshipped: ProducersSnapshot | None = None
        self._unwritten = 0

    @property
    def log(self) -> Log:
        """What the producers append to."""
        return self._log

    @property
    def tiered(self) -> TieredLog | None:
        """The same with its store; None without one."""
        return self._tiered

    # Opening

    def open(self, name: str) -> tuple[ProducerName, int]:
        """What the name has stored, and the epoch of the new producer; an older one is fenced from here on."""
        check_name(name)
        with self._guard:
            table = self._loaded()
            entry = self._names.get(name)
            if entry is None:
                entry = self._names[name] = ProducerName(name, table.of(name))
            with entry.lock:
                entry.epoch = max(entry.epoch, entry.state.epoch) + 1
                entry.is_open = True
            self._forget_silent(table)
            return entry, entry.epoch

    def last_sequence(self, name: str) -> int | None:
        """The highest stored sequence of a producer, open or not; None where it stored nothing. It fences nobody."""
        check_name(name)
        with self._guard:
            known = dict(self._loaded()).get(name)
            entry = self._names.get(name)
        if entry is None:
            return None if known is None else known.last_sequence
        with entry.lock:
            self.settle(entry)
            return entry.state.last_sequence

    def closed(self, entry: ProducerName, epoch: int) -> None:
        """A producer is done, unless a newer one has its name already."""
        with entry.lock:
            if entry.epoch == epoch:
                entry.is_open = False

    def _forget_silent(self, table: ProducerTable) -> None:
        if table.is_full:
            table.forget_silent(keep={name for name, entry in self._names.items() if entry.is_open})
            known = {name for name, _ in table}
            self._names = {name: entry for name, entry in self._names.items() if name in known}

    def _loaded(self) -> ProducerTable:
        if self._table is None:
            table, start = self._restored()
            self._learn(start, table.record)
            table.forget_silent()
            self._table = table
            self._keep()
            if self._tiered is not None:
                self._tiered.shipper.on_published = self.published
        return self._table

    def _restored(self) -> tuple[ProducerTable, int]:
        """What the newest snapshot says, and the offset from which on the messages have to be read."""
        table, snapshot = ProducerTable(), self._snapshots.newest()
        if snapshot is None:
            return table, 0
        try:
            table.restore(snapshot)
        except (ValueError, OverflowError) as error:
            _logger.warning("%s: a snapshot of the producers cannot be used: %s", self._log.directory, error)
            return ProducerTable(), 0
        return table, snapshot.as_of_offset

    # Learning from messages

    def _learn(self, start: int, record: Callable[[ProducerMark, int], None]) -> None:
        """Reads what was appended from an offset on."""
        for batch in self._open_reader(max(start, self._start_offset), self._log.next_offset):
            for offset, data in enumerate(_raw(batch), batch.first_offset):
                if data is None or is_batch_mark(data):
                    continue
                # A reader of the message reports what cannot be decoded.
                with contextlib.suppress(DataError):
                    mark = decode_extension(data).producer
                    if mark is not None:
                        record(mark, offset)

    def settle(self, entry: ProducerName) -> None:
        """After an interrupted append: looks whether it is in the topic. Called under the name's lock."""
        if entry.unsure_from is None:
            return

        def record(mark: ProducerMark, offset: int) -> None:
            if mark.name == entry.name:
                entry.state.record(mark.epoch, mark.sequence, offset)

        entry.state.mend()
        self._learn(entry.unsure_from, record)
        entry.unsure_from = None

    @property
    def _start_offset(self) -> int:
        return self._log.start_offset if self._tiered is None else self._tiered.start_offset

    def _payload_at(self, offset: int) -> bytes | None:
        if offset < self._start_offset:
            return None
        reader = self._open_reader(offset, offset + 1)
        try:
            batch = reader.next_batch()
            return None if batch is None else batch.payloads()[0]
        except OffsetOutOfRangeError:
            return None
        finally:
            reader.close()

    # Snapshots

    def stored(self, count: int) -> None:
        """Counts appended messages; periodically rewrites the file. Called without a name's lock."""
        if self.count_stored(count):
            self.keep()

    def count_stored(self, count: int) -> bool:
        """So many messages were appended. Whether it is time for `keep`, which a task leaves to a worker thread."""
        self._unwritten += count
        return self._unwritten >= _WRITE_EVERY_MESSAGES

    def keep(self) -> None:
        """Rewrites the file, unless another thread is doing so."""
        if self._guard.acquire(blocking=False):
            try:
                self._keep()
            finally:
                self._guard.release()

    def _keep(self) -> None:
        """Writes the file, once everything below the snapshot is synced."""
        self._unwritten = 0
        snapshot = self._unsynced or self._take()
        if snapshot is not None and snapshot.as_of_offset <= self._log.durable_offset:
            self._snapshots.write_local(snapshot)
            snapshot = None
        self._unsynced = snapshot

    def published(self, shipped_offset: int) -> None:
        """Everything below is in the store: writes a snapshot there that knows no more than that."""
        if not self._guard.acquire(timeout=_PATIENCE_SECONDS):
            return
        try:
            now, ready = self._take(), self._unshipped
            if now is not None and now.as_of_offset <= shipped_offset:
                ready, self._unshipped = now, None
            elif ready is None or ready.as_of_offset <= shipped_offset:
                self._unshipped = now
        finally:
            self._guard.release()
        if ready is not None and ready.as_of_offset <= shipped_offset:
            self._snapshots.write_shipped(ready)

    def _take(self) -> ProducersSnapshot | None:
        """The state at the next offset; None while somebody is in the middle of an append for long."""
        offset = self._log.next_offset
        if self._table is None or not offset:
            return None
        producers = []
        for name, state in self._table:
            entry = self._names.get(name)
            # A thread that got an offset below has also recorded it once its lock can be acquired.
            if entry is not None and not entry.lock.acquire(timeout=_PATIENCE_SECONDS):
                return None
            try:
                producers.append(state.snapshot(name, offset))
            except LookupError:
                return None
            finally:
                if entry is not None:
                    entry.lock.release()
        return ProducersSnapshot(
            as_of_offset=offset,
            last_crc32=self._snapshots.crc32_below(offset),
            epoch=self._snapshots.epoch,
            producers=tuple(producer for producer in producers if producer is not None),
        )

    # Ending

    def before_seal(self) -> None:
        """Ships what there is and writes a snapshot beside it; what is appended meanwhile goes with the sealing."""
        if self._table is not None and self._tiered is not None:
            self.published(self._tiered.ship())

    def close(self) -> None:
        """Writes the file. What keeps it from that keeps the log from closing well, too, and is said there."""
        if self._table is None or self._log.over:
            return
        with contextlib.suppress(TidelogError), self._guard:
            self._log.flush()
            self._unsynced = None
            self._keep()


def check_name(name: object) -> None:
    """InputError when a producer cannot be called that."""
    if not isinstance(name, str) or not name:
        raise InputError(f"a producer has a name, which is text, not {name!r}")
    try:
        size = len(name.encode("utf-8"))
    except UnicodeEncodeError:
        raise InputError("the name of a producer must be text that UTF-8 can hold") from None
    if size > MAX_PRODUCER_NAME_BYTES:
        raise InputError(f"the name of a producer has at most {MAX_PRODUCER_NAME_BYTES} bytes, not {size}")


def _raw(batch: Batch) -> list[bytes | None]:
    if batch.frames is not None:
        return raw_extensions(batch.frames, batch.start, batch.stop) or []
    return raw_extensions(encode_many(batch.first_offset, batch.bare), 0, len(batch.bare)) or []
