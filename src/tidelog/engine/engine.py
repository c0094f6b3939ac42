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
import weakref
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self

from tidelog.engine.arguments import checked_entries, checked_seq
from tidelog.engine.cold import ColdReader
from tidelog.engine.compaction_calls import Compaction, CompactionCalls
from tidelog.engine.core import Core
from tidelog.engine.engine_stat import EngineStat
from tidelog.engine.engine_statistics import EngineStatistics, snapshot
from tidelog.engine.engine_tasks import EngineTasks, TaskThreads
from tidelog.engine.entry import Entry
from tidelog.engine.entry_codec import Carried
from tidelog.engine.garbage import Garbage
from tidelog.engine.garbage_calls import GarbageCalls
from tidelog.engine.guard import batch_of
from tidelog.engine.holding import Holding
from tidelog.engine.replayed import Replayed
from tidelog.engine.results import Result
from tidelog.engine.standing import Standing
from tidelog.engine.transaction import DEFAULT_LOCK_TIMEOUT_SECONDS, Transaction, Transactions
from tidelog.engine.turn import Turn
from tidelog.engine.upkeep import ColdTier, Upkeep
from tidelog.errors import DiskFullError, ExhaustedError, LogFailedError, TidelogError
from tidelog.units import to_seconds

_MAX_CHUNK_BYTES = 2 << 20


class Engine(EngineStat, EngineTasks, GarbageCalls, CompactionCalls):
    """An open engine. Make one with `tidelog.open_engine`; it owns its directory until it is closed."""

    def __init__(
        self,
        core: Core,
        reader: ColdReader | None = None,
        cold: ColdTier | None = None,
        *,
        runs_in_background: bool = True,
    ) -> None:
        # Whatever a thread may hold is told of these, never of the engine: one that is dropped must be noticed.
        standing = Standing(core, _nothing if cold is None else cold.check_not_fenced)
        super().__init__(core, reader, standing)
        self._check_open = standing.check
        self._fail = standing.fail
        self._applying = core.applying
        self._replayed = Replayed(core.wal, core.versions, core.results)
        self._transactions = Transactions()
        self._tasks = TaskThreads()
        self._unsettled: list[tuple[list[tuple[int, Carried]], list[Result]]] = []
        self._garbage = Garbage(
            *(core, cold),
            check=standing.check,
            on_failure=standing.fail,
            least_read_seq=self._transactions.locks.least_seq,
        )
        self.upkeep = Upkeep(core, cold, self._garbage, runs_in_background=runs_in_background)
        """What runs beside: checkpoints, and shipping where there is a store."""
        self.driving = Turn()
        """Whose turn it is to drive this engine: `drive` takes it."""
        self._compaction = Compaction(core, cold, check=standing.check, on_failure=standing.fail)
        if runs_in_background:
            self._compaction.start()
        self._holding = Holding(core, standing, self.upkeep, self._compaction, self._transactions, self._tasks)
        self._when_dropped = weakref.finalize(self, self._holding.on_dropped)
        self._when_dropped.atexit = False  # at exit the logs are closed by their own ways

    # Applying

    def apply(self, seq: int, entry: Carried) -> Result:
        """Applies an entry; returns once it is on the disk. What the state does not allow is a result, not an error."""
        return self.apply_many([(seq, entry)])[0]

    def apply_many(self, entries: Iterable[tuple[int, Carried]]) -> list[Result]:
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

    def _apply_chunk(self, entries: list[tuple[int, Carried]], begin: int, results: list[Result]) -> int:
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
            self._unsettled.append((entries[begin:stop], results[len(results) - (stop - begin) :]))
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
            except (DiskFullError, ExhaustedError):
                raise
            except Exception as error:  # an interrupt is none: the next call waits for the same records
                self._fail(error)
                raise
            self._publish(self._marks.accepted_seq)

    def _publish(self, seq: int) -> None:
        self._marks.applied(seq)
        self._transactions.settle(seq, _that_changed(self._unsettled))
        self._unsettled = []

    def _again(self, seq: int, entry: Carried) -> Result:
        """An entry that was accepted before: what became of it."""
        return self._replayed.result(seq, batch_of(entry))

    def update_low_water_mark(self, seq: int) -> None:
        """All replicas have applied everything up to a seq: it may be shipped, and is not rolled back any more."""
        checked_seq(seq, least=0)
        with self._applying:
            self._check_open()
            if self._marks.raise_low_water_mark(seq):
                self._core.note_low_water_mark(seq)

    def rollback_to(self, seq: int) -> None:
        """Takes back every entry above a seq: the orchestrator threw them away before they were everywhere.

        An engine that has none above it, because it has not come that far, has nothing to take back: that is no error.
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
            self._transactions.rolled_back(seq)

    # Transactions

    def transaction(self, timeout_seconds: float | str | None = DEFAULT_LOCK_TIMEOUT_SECONDS) -> Transaction:
        """Reads and writes that become one batch for the orchestrator; a context manager. See `transaction.py`."""
        self._check_open()
        return self._transactions.begin(self, to_seconds(timeout_seconds, "timeout_seconds"))

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
        """Ships everything up to the low-water mark now; the new high-water mark. NotSupportedError without a store."""
        self._check_open()
        return self.upkeep.ship()

    def statistics(self) -> EngineStatistics:
        """One moment of the engine."""
        return snapshot(self._core, self.upkeep, self._transactions, self._compaction)

    # Ending

    def close(self, *, checkpoint: bool = True) -> None:
        """Stops what runs beside, makes a last checkpoint and gives the directory back. Closing twice is fine.

        The checkpoint spares the next opening work, and may be left out.
        """
        if self._standing.is_closed:
            return
        self._when_dropped.detach()
        self._end_reading()
        self._holding.stop()
        try:
            if checkpoint and not self._standing.has_failed:
                with contextlib.suppress(TidelogError, OSError):  # the log has everything that a checkpoint has
                    self._core.checkpointer.checkpoint()
        finally:
            self._holding.give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        where = str(self._core.directory)
        return f"<tidelog.Engine {where!r} applied_seq={self._marks.applied_seq} {self._standing}>"


def _that_changed(applied: list[tuple[list[tuple[int, Carried]], list[Result]]]) -> Iterator[Entry]:
    """The entries that changed the state: transactions need not be told of the others."""
    for entries, results in applied:
        for (_, entry), result in zip(entries, results, strict=True):
            if result.applied:
                yield batch_of(entry)


def _cut_off(error: DiskFullError | ExhaustedError) -> LogFailedError:
    """A rollback cannot wait halfway, as an entry can: others would be applied to what is neither old nor new."""
    return LogFailedError(
        f"there was no room to finish a rollback: {error.message}",
        operation="roll back",
        path=error.path,
        hint="Make room, close the engine and open it again, which finishes it; then roll back once more, to be sure",
    )


def _nothing() -> None:
    """There is no store that another node could own."""
