"""Replaying shipped records: which rows of the tree each entry left.

Every record of an operation says which cells it changed, pointers included. So nothing is decided again here, and no
value is read: the same cells come into the new tree that were in the old one.

Invariants
- An entry counts when its last record is there, its seq is at or below the high-water mark, and no rollback took it
  away (`rolled_back` of the manifest). An entry without its last record was undone by the recovery that came behind it.
- What retention removed (VACUUM) is removed here too.
- What is damaged or missing in the store is read from the first replica that has it, an object at a time: a replica has
  the same records under the same LSNs, and may end earlier.
- Changes of pages are none of ours: the new tree has pages of its own.
"""

from __future__ import annotations

import contextlib
import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Protocol

from tidelog.engine.gate import LsnRange
from tidelog.engine.known_results import ResultTable
from tidelog.engine.manifest import Manifest
from tidelog.engine.record_header import HEADER, HEADER_BYTES, LAST, OPERATION, VACUUM
from tidelog.engine.restore_runs import REMOVED
from tidelog.engine.updates import INSERT, REMOVE, REPLACE, decode, record_updates
from tidelog.errors import DataError, GapError, NotFoundError, TidelogError
from tidelog.log.cache import Batch
from tidelog.tier.catalog import Catalog
from tidelog.tier.history import History
from tidelog.tier.object_store import ObjectStore

_logger = logging.getLogger("tidelog.engine")
OnBytes = Callable[[int], None]
_SEQ_BYTES = 8


class RowSink(Protocol):
    """Who takes the rows."""

    def set(self, key: bytes, value: bytes) -> None:
        """The row is this from here on; `REMOVED` takes it away."""


class Replay:
    """Goes through the shipped log from an LSN on, as far as it is told to."""

    def __init__(
        self,
        catalog: Catalog,
        objects: ObjectStore,
        executor: Executor,
        changes: RowSink,
        lsn: int,
        results: ResultTable | None = None,
        replicas: Sequence[tuple[Catalog, ObjectStore]] = (),
    ) -> None:
        self.results = results
        """Learns what became of the entries, if anybody wants to know."""
        self.lsn = lsn
        """The first record that was not looked at."""
        self.entries = 0
        self.history_start_seq = 0
        """The oldest seq that may be read, as far as the records say so."""
        self._catalog = catalog
        self._history = History(catalog, objects, executor)
        self._replicas = [History(*replica, executor) for replica in replicas]
        self._changes = changes
        self._open_seq = 0
        self._open_updates: list[tuple[int, bytes]] = []
        self._dead: tuple[LsnRange, ...] = ()
        self._high_water_mark = 0

    def run(self, manifest: Manifest, on_bytes: OnBytes) -> None:
        """Up to the record that completes the last entry of a manifest."""
        self._dead, self._high_water_mark = manifest.rolled_back, manifest.high_water_mark
        stop_lsn = manifest.high_water_lsn + 1
        is_read = False
        while not is_read:
            is_read = self._read_what_is_good(stop_lsn, on_bytes)
        if self.lsn < stop_lsn:
            raise GapError(
                f"the store has no records from LSN {self.lsn} to {stop_lsn - 1}, which its manifest tells of",
                first=self.lsn,
                last=stop_lsn - 1,
                hint="Put the objects and their descriptors back, or restore from a replica",
            )

    def _read_what_is_good(self, stop_lsn: int, on_bytes: OnBytes) -> bool:
        """False when a replica had to help out: then the store may have the rest."""
        try:
            self._read(self._history, stop_lsn, on_bytes)
        except (DataError, NotFoundError) as error:
            if not self._read_from_replicas(self._end_of_object(stop_lsn), on_bytes):
                raise
            _logger.warning("a replica had what cannot be read in the store: %s", error)
            return False
        return True

    def _read_from_replicas(self, stop_lsn: int, on_bytes: OnBytes) -> bool:
        """Whether one of them had something of it."""
        first_lsn = self.lsn
        for history in self._replicas:
            with contextlib.suppress(TidelogError):  # what is wrong with the store itself is what is told
                self._read(history, stop_lsn, on_bytes)
            if self.lsn > first_lsn:
                return True
        return False

    def _end_of_object(self, stop_lsn: int) -> int:
        """Where the object ends that the next record is in; all there is where that cannot be told."""
        with contextlib.suppress(TidelogError):
            for one in self._catalog.between(self.lsn, self.lsn + 1):
                return min(one.next_offset, stop_lsn)
        return stop_lsn

    def _read(self, history: History, stop_lsn: int, on_bytes: OnBytes) -> None:
        reader = history.read(self.lsn, max(stop_lsn, self.lsn))
        try:
            while (batch := reader.next_batch()) is not None:
                self._look_at(batch)
                self.lsn = batch.next_offset
                on_bytes(len(batch.frames.buffer) if batch.frames is not None else 0)
        finally:
            reader.close()

    def _look_at(self, batch: Batch) -> None:
        frames = batch.frames
        assert frames is not None
        buffer = memoryview(frames.buffer)
        positions, lengths = memoryview(frames.positions).cast("Q"), memoryview(frames.lengths).cast("I")
        if self.results is not None:
            self.results.take_live(frames.slice(batch.start, batch.stop), self._dead)
        for index in range(batch.start, batch.stop):
            at, length = positions[index], lengths[index]
            kind = buffer[at]
            if kind in (OPERATION, VACUUM):
                self._look_at_record(buffer[at : at + length], frames.first_offset + index)

    def _look_at_record(self, record: memoryview, lsn: int) -> None:
        if len(record) < HEADER_BYTES:
            raise DataError(f"a record of {len(record)} bytes has no header, LSN {lsn}")
        kind, flags, _, updates_offset, seq, previous_lsn, _ = HEADER.unpack_from(record)
        if not HEADER_BYTES <= updates_offset <= len(record):
            raise DataError(f"a record of {len(record)} bytes has its page updates at {updates_offset}, LSN {lsn}")
        updates = record_updates(record, lsn)
        if kind == VACUUM:
            self._note_start(record[HEADER_BYTES:updates_offset], lsn)
            self._change(updates, lsn)
        elif not self._is_dead(lsn):
            self._look_at_operation(flags, seq, previous_lsn, updates, lsn)

    def _note_start(self, own: memoryview, lsn: int) -> None:
        if len(own) != _SEQ_BYTES:
            raise DataError(f"a record of removed versions has {len(own)} bytes of its own, LSN {lsn}")
        self.history_start_seq = max(self.history_start_seq, int.from_bytes(own, "little"))

    def _look_at_operation(self, flags: int, seq: int, previous_lsn: int, updates: bytes, lsn: int) -> None:
        if seq != self._open_seq or not previous_lsn:
            self._open_updates.clear()  # what was before it was never completed
        self._open_seq = seq
        if updates:
            self._open_updates.append((lsn, updates))
        if flags & LAST:
            if seq <= self._high_water_mark:
                for update_lsn, one in self._open_updates:
                    self._change(one, update_lsn)
                self.entries += 1
            self._open_updates.clear()

    def _is_dead(self, lsn: int) -> bool:
        at = bisect_right(self._dead, lsn, key=lambda one: one.first)
        return at > 0 and lsn <= self._dead[at - 1].last

    def _change(self, updates: bytes, lsn: int) -> None:
        for update in decode(updates, lsn):
            if update.what in (INSERT, REPLACE):
                self._changes.set(update.key, update.value)
            elif update.what == REMOVE:
                self._changes.set(update.key, REMOVED)
            else:
                raise DataError(f"an entry has an update of kind {update.what}, LSN {lsn}")
