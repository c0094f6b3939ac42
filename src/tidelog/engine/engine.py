"""The engine: a transactional store of objects that is built from an ordered log, and nothing but that.

    apply(seq, entry)              record -> log -> page in memory -> on the disk -> visible
    read(bucket, key, seq)         version index -> value in the log, on this disk or in the store

This file is what users hold; the work is done by its parts (`core.py` puts those of the hot half together).

Invariants
- `apply` returns when the entry is on the disk, and only then is it visible. Entries that were accepted and could not
  be brought to the disk yet (a full disk) are neither visible nor lost: the same call waits for them again.
- high_water_mark <= low_water_mark <= applied_seq, at every moment (`marks.py`).
- The same seq with the same entry does nothing the second time; with another entry it is refused, and so is a new entry
  whose seq is not above all before.
- Readers take no lock and never wait for whoever applies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self

from tidelog.engine.arguments import check_names, checked_entries, checked_seq
from tidelog.engine.body import decode_body
from tidelog.engine.buckets import Buckets, BucketVersion
from tidelog.engine.cell import Cell
from tidelog.engine.cold import Body, ColdReader
from tidelog.engine.compaction_calls import Compaction, CompactionCalls
from tidelog.engine.core import Core
from tidelog.engine.digest import Digest
from tidelog.engine.engine_statistics import EngineStatistics, snapshot
from tidelog.engine.engine_tasks import EngineTasks, TaskThreads
from tidelog.engine.entry import Entry
from tidelog.engine.garbage import Garbage
from tidelog.engine.garbage_calls import GarbageCalls
from tidelog.engine.put_record import plain_data
from tidelog.engine.replayed import Replayed
from tidelog.engine.results import ObjectInfo, Result, StoredObject, Tier, VersionInfo
from tidelog.engine.retention import Pin, forgotten
from tidelog.engine.transaction import DEFAULT_LOCK_TIMEOUT_SECONDS, Transaction, Transactions
from tidelog.engine.upkeep import ColdTier, Upkeep
from tidelog.errors import (
    ClosedError,
    DiskFullError,
    GapError,
    InputError,
    LogFailedError,
    NotFoundError,
    TidelogError,
)

_MAX_CHUNK_BYTES = 2 << 20


class Engine(EngineTasks, GarbageCalls, CompactionCalls):
    """An open engine. Make one with `tidelog.open_engine`; it owns its directory until it is closed."""

    def __init__(
        self,
        core: Core,
        reader: ColdReader | None = None,
        cold: ColdTier | None = None,
        *,
        runs_in_background: bool = True,
    ) -> None:
        self._core = core
        self._marks = core.marks
        self._wal = core.wal
        self._applying = core.applying
        self._versions = core.versions
        self._buckets = core.buckets
        self._cold = reader
        self._replayed = Replayed(core.wal, core.versions)
        self._transactions = Transactions(self)
        self._tasks = TaskThreads()
        self._unsettled: list[Entry] = []
        self._failure: TidelogError | None = None
        self._closed = False
        self._find_in = core.versions.find_in
        self._pointer = core.versions.pointer
        self._read_stored = core.wal.read_stored
        self._history = core.history
        self._garbage = Garbage(
            *(core, cold),
            check=self._check_open,
            on_failure=self._fail,
            least_read_seq=self._transactions.locks.least_seq,
        )
        self.upkeep = Upkeep(core, cold, self._garbage, runs_in_background=runs_in_background)
        """What runs beside: checkpoints, and shipping where there is a store."""
        self._compaction = Compaction(core, cold, check=self._check_open, on_failure=self._fail)
        if runs_in_background:
            self._compaction.start()

    # Applying

    def apply(self, seq: int, entry: Entry) -> Result:
        """Applies an entry; returns once it is on the disk. What the state does not allow is a result, not an error."""
        return self.apply_many([(seq, entry)])[0]

    def apply_many(self, entries: Iterable[tuple[int, Entry]]) -> list[Result]:
        """Applies entries in order, each by itself, and syncs once."""
        wanted = checked_entries(entries)
        with self._applying:
            self._check_open()
            results = [self._again(seq, entry) for seq, entry in wanted if seq <= self._marks.accepted_seq]
            fresh = wanted[len(results) :]
            begin = 0
            while begin < len(fresh):
                begin = self._apply_chunk(fresh, begin, results)
            self._commit()
        return results

    def _apply_chunk(self, entries: list[tuple[int, Entry]], begin: int, results: list[Result]) -> int:
        """Applies some of them, and gives them to the log; the index of the first that is left."""
        core, wal = self._core, self._wal
        core.tree.settle()
        first_lsn, stop, limit = wal.next_lsn, begin, wal.next_position + _MAX_CHUNK_BYTES
        try:
            core.applier.begin()
            while stop < len(entries) and wal.next_position < limit and not core.pool.wants_settling:
                results.append(core.applier.apply(*entries[stop]))
                stop += 1
            wal.hand_over()
            core.tree.settle()
            self._marks.accepted(entries[stop - 1][0])
            self._unsettled += [entry for _, entry in entries[begin:stop]]
        except BaseException as error:
            self._take_back(error, first_lsn)
            raise
        return stop

    def _take_back(self, error: BaseException, first_lsn: int) -> None:
        """Of a chunk that the log did not take, nothing stays. If it took a part of it, only opening again helps."""
        self._wal.discard()
        if self._wal.next_lsn > first_lsn:
            self._fail(error)
        else:
            self._core.tree.take_back()
            self._core.buckets.load(self._core.tree)

    def _commit(self) -> None:
        """Waits for the disk and makes what was accepted visible."""
        if self._marks.applied_seq < self._marks.accepted_seq:
            try:
                self._wal.commit()
            except DiskFullError:
                raise
            except Exception as error:  # an interrupt is none: the next call waits for the same records
                self._fail(error)
                raise
            self._publish(self._marks.accepted_seq)

    def _publish(self, seq: int) -> None:
        self._marks.applied(seq)
        self._transactions.settle(seq, self._unsettled)
        self._unsettled = []

    def _again(self, seq: int, entry: Entry) -> Result:
        """An entry that was accepted before: what became of it."""
        return self._replayed.result(seq, entry)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = LogFailedError(
                f"the engine failed and must be opened again: {error}", path=self._core.directory
            )
            self._core.fail()

    def update_low_water_mark(self, seq: int) -> None:
        """All replicas have applied everything up to a seq: it may be shipped, and is not rolled back any more."""
        checked_seq(seq, least=0)
        with self._applying:
            self._check_open()
            if self._marks.raise_low_water_mark(seq):
                self._core.note_low_water_mark(seq)

    def rollback_to(self, seq: int) -> None:
        """Takes back every entry above a seq: the orchestrator threw them away before they were everywhere."""
        checked_seq(seq, least=0)
        with self._applying:
            self._check_open()
            if seq >= self._marks.accepted_seq:
                return
            self._marks.rolled_back(seq)
            try:
                self._core.roll_back(seq)
            except BaseException as error:
                self._fail(error)
                raise
            self._publish(seq)  # what was accepted up to it is on the disk by now
            self._replayed.forget()
            self._transactions.rolled_back(seq)

    # Reading

    def read(self, bucket: str, key: str, seq: int | None = None) -> StoredObject:
        """An object as it is at a seq; by default at the last one that was applied."""
        try:
            at = self._marks.applied_seq if seq is None else self._checked_seq(seq)
            created = self._buckets.created(bucket, at)
            if created is not None:
                pointer = self._pointer(created, bucket, key, at)
                if pointer is not None:
                    found_seq, _, size, crc, codec, _, position, stored_bytes = pointer
                    stored = self._read_stored(position, stored_bytes)
                    data = None if stored is None or codec else plain_data(stored, size, crc)
                    if data is not None:
                        return StoredObject(data, {}, found_seq, "hot")
            return self._read_any(created, bucket, key, seq, at)
        except (TypeError, UnicodeEncodeError):
            check_names(bucket, key)
            raise

    def _read_any(self, created: BucketVersion | None, bucket: str, key: str, seq: int | None, at: int) -> StoredObject:
        """An object that is not in the log of this disk, or small, compressed, with metadata, damaged or not there."""
        found = None if created is None else self._find_in(created, bucket, key, at)
        if found is None:
            return self._look_again(bucket, key, seq, at)
        cell = found.cell
        if cell.inline is not None:
            stored: bytes | None = cell.inline
        else:
            stored = self._read_stored(cell.position, cell.stored_bytes)
        if stored is None:
            try:
                data, metadata = self._read_cold(cell)
            except (GapError, NotFoundError):
                if at < self._history.start_seq:
                    return self._look_again(bucket, key, seq, at)
                raise
            return StoredObject(data, metadata, found.seq, "cold")
        data, metadata = decode_body(stored, cell.codec, cell.size, cell.crc, cell.lsn)
        return StoredObject(data, metadata, found.seq, "hot")

    def _look_again(self, bucket: str, key: str, seq: int | None, at: int) -> StoredObject:
        """For what was not found: it may have been removed since this read began. Then the newest state has changed."""
        if seq is None and at < self._history.start_seq and not self._closed:
            return self.read(bucket, key)
        raise self._not_found(bucket, key, at)

    def _read_cold(self, cell: Cell) -> Body:
        if self._cold is None:
            raise NotFoundError(
                f"the value at position {cell.position} has left this disk, and no store is known",
                path=self._core.directory,
                hint="Open the engine with the store that it was shipped to",
            )
        return self._cold.read(cell)

    def list_objects(self, bucket: str, prefix: str = "", seq: int | None = None) -> Iterator[ObjectInfo]:
        """The objects of a bucket whose keys begin like this, in order of key, as they are at a seq."""
        check_names(bucket, prefix)
        pin = self.pin(seq)
        if self._buckets.created(bucket, pin.seq) is None:
            raise self._no_bucket(bucket, pin.seq)
        return self._listed(pin, bucket, prefix)

    def _listed(self, pin: Pin, bucket: str, prefix: str) -> Iterator[ObjectInfo]:
        with pin as seq:
            for found in self._versions.objects(bucket, prefix, seq):
                yield ObjectInfo(found.key, found.cell.size, found.seq)

    def list_buckets(self, seq: int | None = None) -> list[str]:
        """The names of all buckets at a seq, sorted."""
        at = self._checked_read_seq(self._marks.applied_seq if seq is None else seq)
        return [name for name, _ in self._buckets.alive(at)]

    def versions(self, bucket: str, key: str) -> list[VersionInfo]:
        """All versions of an object that are kept, newest first, deletions included."""
        check_names(bucket, key)
        at = self._checked_read_seq(self._marks.applied_seq)
        found = [
            VersionInfo(version.seq, version.cell.size, version.cell.is_tombstone, self._tier_of(version.cell))
            for version in self._versions.history(bucket, key, at)
        ]
        if not found:
            raise self._not_found(bucket, key, at)
        return found

    def digest(self, seq: int | None = None) -> str:
        """A number for the whole state at a seq: equal on every replica, after every restore."""
        digest = Digest()
        with self.pin(seq) as at:
            for bucket, created in self._buckets.alive(at):
                name = bucket.encode()
                digest.add_bucket(name, created.seq)
                for found in self._versions.objects(bucket, "", at):
                    digest.add_object(name, found.key.encode(), found.seq, found.cell.size, found.cell.crc)
        return digest.text()

    def pin(self, seq: int | None = None) -> Pin:
        """Keeps every state from a seq on readable until the end of the `with` block, for long reads of one state."""
        while True:
            at = self._checked_seq(self._marks.applied_seq if seq is None else seq)
            try:
                return self._history.pin(at)
            except NotFoundError:
                if seq is not None:
                    raise

    def _tier_of(self, cell: Cell) -> Tier | None:
        if cell.is_tombstone:
            return None
        return "hot" if cell.inline is not None or cell.position >= self._wal.first_position else "cold"

    def _checked_read_seq(self, seq: int) -> int:
        start = self._history.start_seq
        if self._checked_seq(seq) < start:
            raise forgotten(start)
        return seq

    def _checked_seq(self, seq: int) -> int:
        if self._closed:
            raise self._closed_error()
        checked_seq(seq, least=0)
        if seq > self._marks.applied_seq:
            raise InputError(
                f"seq {seq} is not applied yet, the last one is {self._marks.applied_seq}",
                operation="read",
                hint="Apply the entries up to it first",
            )
        return seq

    def _not_found(self, bucket: str, key: str, seq: int) -> TidelogError:
        if self._closed:
            return self._closed_error()
        if seq < self._history.start_seq:
            return forgotten(self._history.start_seq)
        if self._buckets.created(bucket, seq) is None:
            return self._no_bucket(bucket, seq)
        return NotFoundError(f"there is no object {key!r} in bucket {bucket!r} at seq {seq}")

    def _no_bucket(self, bucket: str, seq: int) -> TidelogError:
        return NotFoundError(f"there is no bucket {bucket!r} at seq {seq}")

    # Transactions

    def transaction(self, timeout_seconds: float | None = DEFAULT_LOCK_TIMEOUT_SECONDS) -> Transaction:
        """Reads and writes that become one batch for the orchestrator; a context manager. See `transaction.py`."""
        self._check_open()
        return self._transactions.begin(timeout_seconds)

    # Where it stands

    @property
    def applied_seq(self) -> int:
        """The last seq that is on the disk and visible; 0 before the first."""
        return self._marks.applied_seq

    @property
    def low_water_mark(self) -> int:
        """All replicas have applied everything up to it, as far as this one was told."""
        return self._marks.low_water_mark

    @property
    def high_water_mark(self) -> int:
        """Everything up to it is in the store."""
        return self._marks.high_water_mark

    @property
    def truncation_mark(self) -> int:
        """The orchestrator may truncate its log up to here: the high-water mark as the published manifest has it."""
        return self.upkeep.truncation_mark()

    def create_checkpoint(self) -> int:
        """Makes a checkpoint now, here and in the store; the seq that it is of."""
        self._check_open()
        return self.upkeep.checkpoint()

    def ship(self) -> int:
        """Ships everything up to the low-water mark now; the new high-water mark."""
        self._check_open()
        return self.upkeep.ship()

    def statistics(self) -> EngineStatistics:
        """One moment of the engine."""
        return snapshot(self._core, self.upkeep, self._transactions, self._compaction)

    # Ending

    def close(self) -> None:
        """Stops what runs beside, makes a last checkpoint and gives the directory back. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        self._buckets = Buckets()  # from here on reads find nothing, and look why
        self._transactions.close()
        self._compaction.stop()
        self.upkeep.stop()
        try:
            if self._failure is None:
                with contextlib.suppress(TidelogError, OSError):  # the log has everything that a checkpoint has
                    self._core.checkpointer.checkpoint()
        finally:
            self._tasks.close()
            with self._applying:
                self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed_error()
        self.upkeep.check_not_fenced()
        if self._failure is not None:
            raise LogFailedError(self._failure.message, path=self._core.directory, hint="Close it and open it again")

    def _closed_error(self) -> ClosedError:
        return ClosedError("the engine is closed", path=self._core.directory, hint="Open it again")
