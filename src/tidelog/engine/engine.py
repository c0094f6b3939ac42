"""The engine: a transactional, multi-version object store that is materialised from an ordered log of entries.

    apply(seq, entry)              record -> log -> page in memory -> on the disk -> visible
    read(bucket, key, seq)         version index -> value in the log, on this disk or in the store

This module is the public interface, including the garbage collection calls; the work is done by its parts (`core.py`
assembles those of the hot tier).

Invariants
- `apply` returns once the entry is durable, and only then is the entry visible. Entries that were accepted but could
  not be synced yet (a full disk) are neither visible nor lost: the same call waits for them again.
- high_water_mark <= low_water_mark <= applied_seq, at every moment (`engine/mvcc/retention.py`).
- Applying the same entry with the same seq again is a no-op; another entry with that seq is refused, and so is a new
  entry whose seq is not greater than all before.
- Readers take no lock and never wait for a writer.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import logging
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from threading import Event
from typing import Any

import msgspec

from tidelog.clock import Histogram, Stopwatch
from tidelog.engine.aio import TaskThreads, in_order, reaching_store, reading, reading_cold, reading_here_or_cold
from tidelog.engine.btree.buffer_pool import BufferPoolStatistics
from tidelog.engine.changes import ChangeCalls, ChangeLog
from tidelog.engine.cold.garbage import Garbage, GarbagePlan, GarbageReport, GarbageStatistics
from tidelog.engine.cold.merge import Compaction, CompactionCalls, CompactionStatistics
from tidelog.engine.cold.reader import ColdReader, ColdStatistics
from tidelog.engine.cold.shared_store import SharedStore
from tidelog.engine.cold.shipping import Shipping, ShippingStatistics, first_time
from tidelog.engine.core import Core
from tidelog.engine.entry import Entry, ObjectStat, Result, StoredObject
from tidelog.engine.maintenance import ColdTier, Maintenance
from tidelog.engine.mvcc.applier import Replayed
from tidelog.engine.mvcc.cells import MAX_SEQ
from tidelog.engine.object_file import AsyncObjectFile
from tidelog.engine.orchestrator.base import Turn
from tidelog.engine.reads import EngineStat, News, Standing, checked_entries, checked_seq
from tidelog.engine.recovery.recovery import RecoveryReport
from tidelog.engine.scan import EnginePrefetch, EngineScans, checked_keys
from tidelog.engine.scan_iterator import AsyncScan
from tidelog.engine.txn.locks import LockStatistics
from tidelog.engine.txn.read_set import Carried, batch_of
from tidelog.engine.txn.transaction import DEFAULT_LOCK_TIMEOUT_SECONDS, Transaction, Transactions
from tidelog.engine.verify.local import at_its_place, verify_open_engine
from tidelog.engine.wal.wal import WalStatistics
from tidelog.errors import (
    ClosedError,
    DiskFullError,
    ExhaustedError,
    InputError,
    LogFailedError,
    NotSupportedError,
    TidelogError,
)
from tidelog.findings import VerifyReport
from tidelog.store.aio import ClosedAtExit, twin, twin_by, twin_iterator, twin_of
from tidelog.store.scheduler import Lazy, Threads
from tidelog.units import to_seconds

# Engine statistics as one immutable snapshot.


class EngineStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of an engine's statistics.

    `applied_seq` is the last applied seq, `redo_lsn` the LSN where redo would start after a crash. `hot_tier_bytes` is
    the size of the WAL on this disk, `index_bytes` the size of the page file. `checkpoint_seconds` is the duration of
    the last checkpoint. `shipping` is None for an engine without a store, and for one that follows another; `cold`, of
    reads of values in the store, only for one without a store.

    `apply_seconds` are calls of `apply` and `apply_many`, until their entries are durable; `hot_read_seconds` a sample
    of the reads from this disk, one of 64. `low_water_lag_seconds` is how long the oldest applied entry above the
    low-water mark waits for the orchestrator and its replicas; what waits for the store is `shipping.lag_seconds`.
    """

    applied_seq: int
    low_water_mark: int
    high_water_mark: int
    truncation_mark: int
    history_start_seq: int
    wal: WalStatistics
    buffer_pool: BufferPoolStatistics
    hot_tier_bytes: int
    index_bytes: int
    redo_lsn: int
    checkpoints: int
    checkpoint_seconds: float
    failed_checkpoints: int
    recovery: RecoveryReport
    locks: LockStatistics
    garbage: GarbageStatistics | None
    compaction: CompactionStatistics
    shipping: ShippingStatistics | None
    cold: ColdStatistics | None
    apply_seconds: Histogram
    hot_read_seconds: Histogram
    low_water_lag_seconds: float


def snapshot(
    core: Core,
    reader: ColdReader | None,
    upkeep: Maintenance,
    transactions: Transactions,
    apply_seconds: Stopwatch,
    hot_read_seconds: Stopwatch,
) -> EngineStatistics:
    """Collects the statistics. Makes no request to the store."""
    wal = core.wal.statistics()
    cold = upkeep.cold
    return EngineStatistics(
        applied_seq=core.marks.applied_seq,
        low_water_mark=core.marks.low_water_mark,
        high_water_mark=core.marks.high_water_mark,
        truncation_mark=upkeep.truncation_mark(),
        history_start_seq=core.checkpointer.history_start_seq,
        wal=wal,
        buffer_pool=core.pool.statistics(),
        hot_tier_bytes=wal.file_bytes,
        index_bytes=core.tree.next_page * core.settings.page_bytes,
        redo_lsn=core.checkpointer.redo_lsn,
        checkpoints=core.checkpointer.count,
        checkpoint_seconds=core.checkpointer.seconds,
        failed_checkpoints=upkeep.failed_checkpoints,
        recovery=core.recovery,
        locks=transactions.statistics(),
        garbage=upkeep.garbage().statistics(),
        compaction=upkeep.compaction().statistics(),
        shipping=cold.statistics() if isinstance(cold, Shipping) else None,
        cold=None if reader is None else reader.statistics(),
        apply_seconds=apply_seconds.snapshot(),
        hot_read_seconds=hot_read_seconds.snapshot(),
        low_water_lag_seconds=low_water_lag(core),
    )


def low_water_lag(core: Core) -> float:
    """How long the oldest entry above the low-water mark has been applied; 0 if there is none."""
    mark, wal = core.marks.low_water_mark, core.wal
    if mark >= core.marks.applied_seq:
        return 0.0
    with contextlib.suppress(TidelogError):  # its file is gone: then it is not above the mark any more
        ends, stop_lsn = core.entry_ends(), wal.durable_lsn + 1
        ends.learn_disk(stop_lsn, wal.first_lsn)
        for frames in wal.batches(max(ends.at_or_before(mark).lsn + 1, wal.first_lsn), stop_lsn):
            if (time_us := first_time(frames, MAX_SEQ)) is not None:
                return max(0, core.clock.now_us() - time_us) / 1_000_000
    return 0.0


# The resources of an open engine (its directory, its threads) and their release, including those of an engine that was
# dropped without being closed.
#
# Invariants
# - It references the parts and not the engine, so that the garbage collection of an engine is noticed: it is reported
#   as a ResourceWarning and in the log, and everything is released, without a last checkpoint.
# - A dropped engine may be collected at any point, in a thread that holds one of its own locks. So another thread
#   releases the resources, and the finalizer waits for it only briefly.
# - A forked child releases nothing: everything belongs to its parent.


_logger = logging.getLogger("tidelog.engine")
_PATIENCE_SECONDS = 2.0


class Holding:
    """The parts of an open engine that must be shut down."""

    def __init__(
        self,
        core: Core,
        standing: Standing,
        upkeep: Maintenance,
        transactions: Lazy[Transactions],
        tasks: Lazy[TaskThreads],
    ) -> None:
        self._core = core
        self._standing = standing
        self._upkeep = upkeep
        self._transactions = transactions
        self._tasks = tasks
        self._process_id = os.getpid()

    def stop(self) -> None:
        """Stops background work, and wakes waiters for locks. Waits a few seconds at most."""
        self._standing.is_closed = True
        self._transactions.close()
        self._upkeep.stop()

    def give_back(self) -> None:
        """Releases the task threads and the directory."""
        self._tasks.close()
        with self._core.applying:
            self._core.close()

    def on_dropped(self) -> None:
        """Called when the engine was garbage collected without being closed."""
        if self._process_id != os.getpid():
            return
        self._give_back_aside()
        text = f"the engine in {self._core.directory} was dropped without being closed"
        _logger.warning("%s: no last checkpoint was made; use `with`, or call close()", text)
        warnings.warn(text, ResourceWarning, stacklevel=3)

    def _give_back_aside(self) -> None:
        done = Event()
        try:
            # Not a `Thread`: starting one takes locks of `threading` that the interrupted code may hold.
            _thread.start_new_thread(self._end, (done,))
        except RuntimeError:
            return  # the interpreter ends, and the logs are closed by their own ways
        done.wait(_PATIENCE_SECONDS)

    def _end(self, done: Event) -> None:
        try:
            self.stop()
            self.give_back()
        except BaseException as error:  # noqa: BLE001 - a thread that nobody waits for has nobody else to tell
            _logger.warning("%s: was not given back as it should be: %s", self._core.directory, error)
        finally:
            done.set()


# The public garbage collection calls, sync and async.


class GarbageCalls:
    """The garbage collection calls of an engine."""

    _garbage: Lazy[Garbage]
    _tasks: Lazy[TaskThreads]

    def plan_garbage(self, horizon: int | None = None) -> GarbagePlan:
        """Returns what a collection would do now: which versions and which pieces of the log it removes, and how much
        of each piece is in use.

        It removes versions that the settings no longer keep (`keep_versions`, `keep_seconds`), or with a `horizon`
        those that no state from that seq on needs. Changes nothing.
        """
        return self._garbage().plan(_checked(horizon))

    def collect_garbage(self, plan: GarbagePlan | None = None, horizon: int | None = None) -> GarbageReport:
        """Removes versions that are no longer kept, and drops the parts of the log that are no longer needed.

        With a `plan`, executes exactly that; without one, what `plan_garbage` would plan now. States before
        `history_start_seq` of the report can no longer be read.
        """
        if plan is not None and horizon is not None:
            raise InputError("a plan has its own horizon", hint="Give one of them")
        return self._garbage().collect(plan, _checked(horizon))

    plan_garbage_async = twin(plan_garbage, reaching_store)
    collect_garbage_async = twin(collect_garbage, reaching_store)


def _checked(horizon: int | None) -> int | None:
    if horizon is not None and (type(horizon) is not int or not 0 <= horizon <= MAX_SEQ):
        raise InputError(f"horizon must be a seq, a whole number from 0 to 2**64 - 1, not {horizon!r}")
    return horizon


_MAX_CHUNK_BYTES = 2 << 20


class Engine(EnginePrefetch, ChangeCalls, GarbageCalls, CompactionCalls, ClosedAtExit):
    """An open engine. Create one with `tidelog.open_engine`; it owns its directory until it is closed."""

    def __init__(
        self,
        core: Core,
        reader: ColdReader | None = None,
        cold: ColdTier | None = None,
        *,
        threads: Threads | None = None,
        runs_in_background: bool = True,
        on_take_over: Callable[[Engine], Engine] | None = None,
    ) -> None:
        """`on_take_over` makes a follower the owner of its store, and returns it open."""
        threads = threads or Threads()
        # Threads may hold references to these objects, never to the engine: a dropped engine must be detected.
        standing = Standing(core, cold)
        super().__init__(core, reader, standing)
        self._core = core
        self._wal = core.wal
        self._standing: Standing = standing
        self._check_open = standing.check
        self._fail = standing.fail
        self._turns = core.turns
        self._apply_seconds = Stopwatch()
        self._applying = core.applying
        self._replayed = Lazy(lambda: Replayed(core.wal, core.versions, core.results, core.entry_ends))
        self._news = News()
        follows = isinstance(cold, SharedStore)
        if isinstance(cold, SharedStore):
            self._placed = cold.place
            self._is_placed_elsewhere = True
        self._change_log = Lazy(lambda: ChangeLog(core, reader, standing, follows=follows))
        self._transactions = transactions = Lazy(Transactions, Transactions.close)
        self._tasks = Lazy(lambda: TaskThreads(core.settings.cold_read_threads), TaskThreads.close)
        self._unsettled: list[tuple[list[tuple[int, Carried]], list[Result]]] = []
        self._garbage = Lazy(
            lambda: Garbage(
                core,
                cold,
                check=standing.check,
                on_failure=standing.fail,
                least_read_seq=lambda: _least_read_seq(transactions, cold),
            )
        )
        self._compaction = Lazy(
            lambda: Compaction(core, cold, check=standing.check, on_failure=standing.fail), Compaction.stop
        )
        self._upkeep = Maintenance(
            core,
            cold,
            garbage=self._garbage,
            compaction=self._compaction,
            threads=threads,
            runs_in_background=runs_in_background,
        )
        """What runs beside: checkpoints, and shipping where there is a store."""
        self._on_take_over = on_take_over
        self._turn = Lazy(Turn)
        self._holding = Holding(core, standing, self._upkeep, self._transactions, self._tasks)
        self._when_dropped = weakref.finalize(self, self._holding.on_dropped)
        self._when_dropped.atexit = False  # at exit the logs are closed by their own ways

    @property
    def _driving(self) -> Turn:
        """Whose turn it is to drive this engine: `drive` takes it."""
        return self._turn()

    # Reading, in tasks

    @twin_of(EngineStat.read)
    async def read_async(
        self, bucket: str, key: str, seq: int | None = None, *, offset: int = 0, length: int | None = None
    ) -> StoredObject:
        if offset or length is not None:
            return await reading_here_or_cold(
                self, lambda may_wait: self._read_range(bucket, key, seq, offset, length, may_wait=may_wait)
            )
        return await self._tasks().read_here_or_cold(
            lambda: self._read_here(bucket, key, seq), lambda: self.read(bucket, key, seq)
        )

    @twin_of(EngineStat.stat)
    async def stat_async(self, bucket: str, key: str, seq: int | None = None) -> ObjectStat:
        return await self._tasks().read_here_or_cold(
            lambda: self._stat_here(bucket, key, seq), lambda: self.stat(bucket, key, seq)
        )

    @twin_of(EngineScans.read_many)
    async def read_many_async(
        self, keys: Iterable[tuple[str, str]], seq: int | None = None
    ) -> list[StoredObject | None]:
        wanted = checked_keys(keys)
        return await self._tasks().read_here_or_cold(
            lambda: self._read_many_here(wanted, seq), lambda: self.read_many(wanted, seq)
        )

    def _scan_in_task(self, *place: Any, with_values: bool, **how: Any) -> AsyncScan:
        return AsyncScan(lambda: self.scan(*place, with_values=with_values, **how), partial(reading_here_or_cold, self))

    scan_async = twin_by(EngineScans.scan, _scan_in_task)

    @twin_of(EngineStat.open_object)
    async def open_object_async(self, bucket: str, key: str, seq: int | None = None) -> AsyncObjectFile:
        """Each call on it is awaited, and so is each step of `async for`, which yields pieces."""
        file = await reading_here_or_cold(self, lambda may_wait: self._open_object(bucket, key, seq, may_wait=may_wait))
        return AsyncObjectFile(file, partial(reading if file.tier == "hot" else reading_cold, self))

    prefetch_async = twin(EnginePrefetch.prefetch, reading_cold)
    has_bucket_async = twin(EngineStat.has_bucket, reading)
    find_object_async = twin(EngineStat.find_object, reading)
    list_objects_async = twin_iterator(EngineStat.list_objects, reading)
    list_buckets_async = twin(EngineStat.list_buckets, reading)
    versions_async = twin(EngineStat.versions, reading)
    digest_async = twin(EngineStat.digest, reading)

    # Applying

    def apply(self, seq: int, entry: Carried) -> Result:
        """Applies an entry; returns once it is durable. An entry that the state does not allow yields a result, not an
        error.
        """
        return self.apply_many([(seq, entry)])[0]

    @twin_of(apply)
    async def apply_async(self, seq: int, entry: Carried) -> Result:
        """Tasks that wait at the same time share a sync; entries are applied in the order of the calls."""
        return await self._tasks().apply(self, seq, entry)

    def apply_many(self, entries: Iterable[tuple[int, Carried]]) -> list[Result]:
        """Applies entries in order, each by itself, with one sync. Data from a file object or an iterator is read
        first: if that fails, none of them is applied.
        """
        wanted, has_large = checked_entries(entries, self._core.values.large_value_bytes)
        if not has_large:
            return self._apply_checked(wanted)
        self._check_open()
        with self._core.values.staged(wanted, lambda seq: seq > self._marks.accepted_seq) as staged:
            return self._apply_checked(staged)

    def _apply_checked(self, wanted: list[tuple[int, Carried]]) -> list[Result]:
        self._turns.give_way()
        with self._applying:
            began = time.perf_counter()
            self._check_open()
            results = [self._again(seq, entry) for seq, entry in wanted if seq <= self._marks.accepted_seq]
            fresh = wanted[len(results) :]
            begin = 0
            while begin < len(fresh):
                begin = self._apply_chunk(fresh, begin, results)
            self._commit()
            seconds = time.perf_counter() - began
            self._turns.entries_took(seconds)
            self._apply_seconds.add(seconds)
            wait_seconds = self._upkeep.grown(self._core.written_bytes, seconds)
        if wait_seconds:
            self._upkeep.hold_back(wait_seconds)
        return results

    @twin_of(apply_many)
    async def apply_many_async(self, entries: Iterable[tuple[int, Carried]]) -> list[Result]:
        given = list(entries)
        return await self._tasks().run_in_order(lambda: self.apply_many(given))

    def _apply_chunk(self, entries: list[tuple[int, Carried]], begin: int, results: list[Result]) -> int:
        """Applies a chunk of entries and appends them to the log; returns the index of the first entry that is left."""
        core, wal = self._core, self._wal
        core.tree.settle()
        first_lsn, stop, limit = wal.next_lsn, begin, wal.next_position + _MAX_CHUNK_BYTES
        try:
            applier = core.applier.built or core.applier()
            applier.begin()
            while stop < len(entries) and wal.next_position < limit and not core.pool.wants_settling:
                results.append(applier.apply(*entries[stop]))
                stop += 1
            wal.hand_over()
            core.tree.settle()
            self._marks.accepted(entries[stop - 1][0])
            self._unsettled.append((entries[begin:stop], results[len(results) - (stop - begin) :]))
        except BaseException as error:
            self._take_back(error, first_lsn)
            raise
        return stop

    def _take_back(self, error: BaseException, first_lsn: int) -> None:
        """Undoes a chunk that the log rejected. If the log took part of it, the engine fails and must be reopened."""
        self._wal.discard()
        if self._wal.next_lsn > first_lsn:
            self._fail(error)
        else:
            self._core.tree.take_back()
            self._core.buckets.load(self._core.tree)
            self._core.values.remove_above(self._marks.accepted_seq)

    def _commit(self) -> None:
        """Waits for the sync, then makes the accepted entries visible."""
        if self._marks.applied_seq < self._marks.accepted_seq:
            try:
                self._wal.commit()
            except (DiskFullError, ExhaustedError):
                raise
            except Exception as error:  # an interrupt is none: the next call waits for the same records
                self._fail(error)
                raise
            self._publish(self._marks.accepted_seq)

    def _publish(self, seq: int) -> None:
        self._marks.applied(seq)
        if self._transactions.built is not None:
            self._transactions.built.settle(seq, _that_changed(self._unsettled))
        self._unsettled = []
        self._news.tell()

    def _again(self, seq: int, entry: Carried) -> Result:
        """Returns the result of an entry that was accepted before."""
        return self._replayed().result(seq, batch_of(entry))

    def update_low_water_mark(self, seq: int) -> None:
        """Records that all replicas have applied everything up to a seq: it may be shipped, and is never rolled
        back.
        """
        checked_seq(seq, least=0)
        with self._applying:
            self._check_open()
            if self._marks.raise_low_water_mark(seq):
                self._core.note_low_water_mark(seq)
                self._news.tell()

    update_low_water_mark_async = twin(update_low_water_mark, in_order)

    def rollback_to(self, seq: int) -> None:
        """Rolls back every entry above a seq: the orchestrator discarded them before they were on every replica.

        If the engine has applied nothing above the seq, there is nothing to roll back; that is no error.
        """
        checked_seq(seq, least=0)
        with self._applying:
            self._check_open()
            if seq >= self._marks.accepted_seq:
                return
            self._marks.rolled_back(seq)
            self._history.rolled_back(seq)
            try:
                self._core.roll_back(seq)
            except (DiskFullError, ExhaustedError) as error:
                self._fail(error)
                raise _cut_off(error) from error
            except BaseException as error:
                self._fail(error)
                raise
            self._publish(seq)  # what was accepted up to it is on the disk by now
            self._transactions().rolled_back(seq)

    rollback_to_async = twin(rollback_to, in_order)

    # Transactions

    def transaction(self, timeout_seconds: float | str | None = DEFAULT_LOCK_TIMEOUT_SECONDS) -> Transaction:
        """Starts a transaction: reads and writes that become one batch for the orchestrator. A context manager; see
        `transaction.py`.
        """
        self._check_open()
        return self._transactions().begin(self, to_seconds(timeout_seconds, "timeout_seconds"))

    # Where it stands

    @property
    def applied_seq(self) -> int:
        """The last seq that is durable and visible; 0 before the first."""
        return self._marks.applied_seq

    @property
    def low_water_mark(self) -> int:
        """All replicas have applied everything up to this seq, as far as this engine knows."""
        return self._marks.low_water_mark

    @property
    def high_water_mark(self) -> int:
        """Everything up to this seq is in the store."""
        return self._marks.high_water_mark

    @property
    def truncation_mark(self) -> int:
        """The orchestrator may truncate its log up to this seq: the high-water mark of the published manifest."""
        return self._upkeep.truncation_mark()

    @property
    def is_follower(self) -> bool:
        """Whether another replica ships to the store that this one reads (`shares_store=True`)."""
        return isinstance(self._upkeep.cold, SharedStore)

    def owner_is_alive(self) -> bool:
        """Asks the store whether the replica that ships has given a sign of life within its lease. True for itself."""
        self._check_open()
        cold = self._upkeep.cold
        return cold.owner_is_alive() if isinstance(cold, SharedStore) else True

    owner_is_alive_async = twin(owner_is_alive, reaching_store)

    def take_over(self) -> Engine:
        """Begins to ship in place of the owner of a shared store, dead or alive, which can change nothing any more.
        Returns the engine to go on with, in the same directory; this one is closed.

        It has what was shipped: entries after its `applied_seq` come from the orchestrator again. Meanwhile this one
        reads and applies. NotSupportedError if this engine owns its store, or has none.
        """
        self._check_open()
        if self._on_take_over is None:
            raise NotSupportedError(
                "this engine follows no other: it owns its store, or has none",
                path=self._core.directory,
                hint="Take over with a replica that shares its store with the owner",
            )
        return self._on_take_over(self)

    take_over_async = twin(take_over, reaching_store)

    def verify(self, *, cold: bool = True) -> VerifyReport:
        """Reads everything and checks it: the log, the pages, the index and every value, here and, with `cold`, in the
        store, with its manifest and snapshots. Changes nothing; the engine may be used meanwhile.

        The report is true if nothing is wrong; `findings` say what is, with path, byte, LSNs and fix.
        """
        self._check_open()
        shared = self._upkeep.cold
        place = shared.place_named if isinstance(shared, SharedStore) else at_its_place
        return verify_open_engine(self._core, self._cold, cold=cold, place=place)

    verify_async = twin(verify, reaching_store)

    def create_checkpoint(self) -> int:
        """Takes a checkpoint now, locally and in the store; returns its seq."""
        self._check_open()
        return self._upkeep.checkpoint()

    create_checkpoint_async = twin(create_checkpoint, reaching_store)

    def ship(self) -> int:
        """Ships everything up to the low-water mark now; returns the new high-water mark. NotSupportedError without a
        store.
        """
        self._check_open()
        return self._upkeep.ship()

    ship_async = twin(ship, reaching_store)

    def statistics(self) -> EngineStatistics:
        """Returns a snapshot of the engine's statistics."""
        return snapshot(
            *(self._core, self._cold, self._upkeep, self._transactions()),
            *(self._apply_seconds, self._hot_read_seconds),
        )

    # Ending

    def close(self, *, checkpoint: bool = True) -> None:
        """Stops background work, takes a last checkpoint and releases the directory. Idempotent.

        The checkpoint shortens the next open, and may be skipped.
        """
        if self._standing.is_closed:
            return
        self._when_dropped.detach()
        self._end_reading()
        self._news.tell()
        self._holding.stop()
        try:
            if checkpoint and not self._standing.has_failed and not self._core.checkpointer.is_current:
                with contextlib.suppress(TidelogError, OSError):  # the log has everything that a checkpoint has
                    self._core.checkpointer.checkpoint()
        finally:
            self._holding.give_back()

    @twin_of(close)
    async def close_async(self, *, checkpoint: bool = True) -> None:
        """Entries that tasks queued before are applied first."""
        try:
            closing = self._tasks().submit_in_order(lambda: self.close(checkpoint=checkpoint))
        except ClosedError:
            return
        await asyncio.wrap_future(closing)

    def __repr__(self) -> str:
        where = str(self._core.directory)
        return f"<tidelog.Engine {where!r} applied_seq={self._marks.applied_seq} {self._standing}>"


def _least_read_seq(transactions: Lazy[Transactions], cold: ColdTier | None) -> int | None:
    """The oldest seq whose state somebody needs: a transaction, or a follower whose owner has not shipped more."""
    read = None if transactions.built is None else transactions.built.locks.least_seq()
    if not isinstance(cold, SharedStore):
        return read
    return cold.least_seq() if read is None else min(read, cold.least_seq())


def _that_changed(applied: list[tuple[list[tuple[int, Carried]], list[Result]]]) -> Iterator[Entry]:
    """Yields the entries that changed the state; transactions ignore the others."""
    for entries, results in applied:
        for (_, entry), result in zip(entries, results, strict=True):
            if result.applied:
                yield batch_of(entry)


def _cut_off(error: DiskFullError | ExhaustedError) -> LogFailedError:
    """Fails the engine when a rollback is interrupted. Unlike an entry, a rollback cannot wait halfway: further entries
    would be applied to a state that is neither old nor new.
    """
    return LogFailedError(
        f"there was no room to finish a rollback: {error.message}",
        operation="roll back",
        path=error.path,
        hint="Make room, close the engine and open it again, which finishes it; then roll back once more, to be sure",
    )
