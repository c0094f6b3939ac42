"""Replay of shipped records: which records of a range count, as rows of the tree or as columns.

    part = log_range(manifest, start_lsn, stop_lsn)
    for frames, indexes in counting(ShippedLog(catalog, objects, executor), part):
        changes_of(record, lsn)                  rows of the tree: what a restore, a compaction and a digest are made of
        gather_entries(frames, indexes, ...)     columns of operations: what Spark reads

Every operation record contains the cells that it changed, pointers included. So replay decides nothing again and reads
no value: the new tree receives the same cells as the old one.

Invariants
- An entry counts if its last record is there, its seq is requested, and no rollback undid it (`rolled_back` of the
  manifest). An entry without its last record was undone by the recovery that followed it. If the rolled-back ranges
  are no longer all known, that is an error.
- An entry belongs, with all of its records, to the range in which its first record lies: adjacent ranges yield every
  entry once, also one that continues past the end of its range.
- Versions that retention removed (VACUUM) are removed here too, and values that were moved are where they were moved
  to, in rolled-back ranges as well.
- Records that are corrupted or missing in the store are read from the first replica that has them, an object at a time:
  a replica has the same records under the same LSNs, and may end earlier.
- Output is in log order. The records of an incomplete entry are buffered in memory. Page updates are ignored: a new
  tree has pages of its own.

The loops over records are C (`native/entries.c`).
"""

from __future__ import annotations

import contextlib
import logging
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from tidelog import _native
from tidelog.cold.catalog import Catalog
from tidelog.cold.reader import History, OnGap
from tidelog.engine.btree.page import INSERT, REMOVE, REPLACE, decode, record_updates
from tidelog.engine.mvcc.cells import MAX_SEQ, SEQ_BYTES
from tidelog.engine.recovery.sorted_runs import REMOVED
from tidelog.engine.wal.record_header import HEADER_BYTES, LAST, VACUUM, decode_header
from tidelog.engine.wal.ship_watermark import LsnRange
from tidelog.errors import DataError, GapError, NotFoundError, TidelogError
from tidelog.log.frame import Frames
from tidelog.log.tail_cache import Batch
from tidelog.store.object_store import ObjectStore

if TYPE_CHECKING:
    from tidelog.engine.cold.manifest import Manifest
    from tidelog.engine.mvcc.known_results import ResultTable

_logger = logging.getLogger("tidelog.engine")

# The fate of an entry that was open before.
STILL_OPEN, COUNTS, NEVER_COMPLETE = range(3)

Chosen = tuple[Frames, bytes]
"""Frames, and which of them count: indexes, u32."""
Change = tuple[bytes, int, int, bytes | None]
"""A changed row: key, LSN, number in the record, cell (None: removed)."""
OnBytes = Callable[[int], None]


class LogRange(msgspec.Struct, frozen=True, kw_only=True):
    """The entries that begin at `start_lsn` or after it and before `stop_lsn`, with seqs from `first_seq` to
    `last_seq`.

    The last of them may continue after `stop_lsn`, but not to `end_lsn`: there the part of the log ends that the
    manifest covers. `dead` are the ranges that were rolled back, packed.
    """

    start_lsn: int
    stop_lsn: int
    end_lsn: int
    first_seq: int = 0
    last_seq: int = MAX_SEQ
    dead: bytes = b""


def log_range(manifest: Manifest, start_lsn: int, stop_lsn: int | None = None) -> LogRange:
    """All entries that count from an LSN up to another; up to the manifest's last entry by default."""
    end_lsn = manifest.high_water_lsn + 1
    stop_lsn = end_lsn if stop_lsn is None else stop_lsn
    return LogRange(
        start_lsn=start_lsn,
        stop_lsn=stop_lsn,
        end_lsn=end_lsn,
        last_seq=manifest.high_water_mark,
        dead=packed_ranges(manifest.rolled_back, start_lsn, stop_lsn),
    )


def packed_ranges(ranges: Sequence[LsnRange], start_lsn: int = 0, stop_lsn: int = MAX_SEQ) -> bytes:
    """Encodes those ranges for the extension that touch these LSNs.

    An entry may continue after `stop_lsn`, but not into what was rolled back there.
    """
    touching = (one for one in ranges if one.last >= start_lsn and one.first < stop_lsn)
    return array("Q", [lsn for one in touching for lsn in one]).tobytes()


class EntrySelection:
    """Scans the records of one range, and a little further, and selects those that count.

    With `removals` those of retention count too.
    """

    def __init__(
        self, stop_lsn: int, first_seq: int, last_seq: int, dead: bytes = b"", *, removals: bool = False
    ) -> None:
        self._stop_lsn = stop_lsn
        self._first_seq = first_seq
        self._last_seq = last_seq
        self._dead = dead
        self._removals = removals
        self._open_seq = 0
        self._held: list[Chosen] = []
        self.is_done = False
        """Whether everything of the range was seen."""

    def feed(self, frames: Frames, start: int, stop: int) -> Iterator[Chosen]:
        """Scans the next frames, from one index to another; yields what counts of them and of those before."""
        owned_stop = max(0, self._stop_lsn - frames.first_offset)
        fate, chosen, pending, open_seq, self.is_done = _native.select_entries(
            frames.first_offset,
            frames.buffer,
            frames.positions,
            frames.lengths,
            start,
            stop,
            owned_stop,
            self._dead,
            self._first_seq,
            self._last_seq,
            self._open_seq,
            self._removals,
        )
        if fate == COUNTS:
            yield from self._held
        if fate != STILL_OPEN:
            self._held = []
        if chosen:
            yield frames, chosen
        if pending:
            self._held.append((frames, pending))
        self._open_seq = open_seq
        self.is_done = self.is_done or (not open_seq and stop >= owned_stop)


class ShippedLog:
    """The shipped records of an engine: in its store, or in a replica where something of it is corrupted or missing."""

    def __init__(
        self,
        catalog: Catalog,
        objects: ObjectStore,
        executor: Executor,
        replicas: Sequence[tuple[Catalog, ObjectStore]] = (),
    ) -> None:
        self._catalog = catalog
        self._history = History(catalog, objects, executor)
        self._replicas = [History(*replica, executor) for replica in replicas]

    def read(self, lsn: int, stop_lsn: int, *, on_gap: OnGap = "raise") -> Generator[Batch, None, None]:
        """Yields the records from an LSN up to another, in batches with frames; GapError where the log ends before."""
        while lsn < stop_lsn:
            try:
                for batch in self._history.read(lsn, stop_lsn, on_gap=on_gap):
                    lsn = batch.next_offset
                    yield batch
                break
            except (DataError, NotFoundError) as error:
                failed_lsn = lsn
                for batch in self._from_replica(lsn, stop_lsn):
                    lsn = batch.next_offset
                    yield batch
                if lsn == failed_lsn:
                    raise
                _logger.warning("a replica had what cannot be read in the store: %s", error)
        if lsn < stop_lsn and on_gap == "raise":
            raise missing_records(lsn, stop_lsn)

    def _from_replica(self, lsn: int, stop_lsn: int) -> Iterator[Batch]:
        """Yields what the first replica has of the object that holds a record."""
        end_lsn = self._end_of_object(lsn, stop_lsn) if self._replicas else stop_lsn
        for history in self._replicas:
            has_any = False
            with contextlib.suppress(TidelogError):  # the error of the store itself is raised
                for batch in history.read(lsn, end_lsn):
                    has_any = True
                    yield batch
            if has_any:
                return

    def _end_of_object(self, lsn: int, stop_lsn: int) -> int:
        """The end of the object that holds a record; everything there is if that is unknown."""
        with contextlib.suppress(TidelogError):
            for one in self._catalog.between(lsn, lsn + 1):
                return min(one.next_offset, stop_lsn)
        return stop_lsn


def missing_records(lsn: int, stop_lsn: int) -> GapError:
    """The error for records that the manifest covers and the store does not have."""
    return GapError(
        f"the store has no records from LSN {lsn} to {stop_lsn - 1}, which its manifest tells of",
        first=lsn,
        last=stop_lsn - 1,
        hint="Put the objects and their descriptors back, or restore from a replica",
    )


def counting(
    log: ShippedLog,
    part: LogRange,
    *,
    removals: bool = False,
    on_gap: OnGap = "raise",
    on_batch: Callable[[Batch], None] = lambda batch: None,
) -> Generator[Chosen, None, None]:
    """Yields the records of a range that count, with their frames; `on_batch` is called with all that is read."""
    if part.start_lsn >= part.stop_lsn:
        return
    selection = EntrySelection(part.stop_lsn, part.first_seq, part.last_seq, part.dead, removals=removals)
    # The end of an entry that continues after the range is fetched only if there is one.
    for start, stop in ((part.start_lsn, part.stop_lsn), (part.stop_lsn, part.end_lsn)):
        with contextlib.closing(log.read(start, stop, on_gap=on_gap)) as batches:
            while not selection.is_done and (batch := next(batches, None)) is not None:
                assert batch.frames is not None, "what comes from objects is framed"
                on_batch(batch)
                yield from selection.feed(batch.frames, batch.start, batch.stop)


# Rows of the tree


def records_of(frames: Frames, indexes: bytes | memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yields LSN and bytes of the records at these indexes."""
    buffer = memoryview(frames.buffer)
    positions, lengths = memoryview(frames.positions).cast("Q"), memoryview(frames.lengths).cast("I")
    for index in memoryview(indexes).cast("I"):
        at = positions[index]
        yield frames.first_offset + index, buffer[at : at + lengths[index]]


def changes_of(record: memoryview, lsn: int) -> Iterator[Change]:
    """Yields the rows that a record changed; DataError if it changed anything else."""
    for number, update in enumerate(decode(record_updates(record, lsn), lsn)):
        if len(update.key) <= SEQ_BYTES or update.what not in (INSERT, REPLACE, REMOVE):
            raise DataError(f"an entry has an update of kind {update.what} that is no row's, LSN {lsn}")
        yield update.key, lsn, number, None if update.what == REMOVE else update.value


def history_start_in(record: memoryview, lsn: int) -> int | None:
    """The start of history that a record of retention announces; None for any other record."""
    if record[0] != VACUUM:
        return None
    own = record[HEADER_BYTES : decode_header(record, lsn).updates_offset]
    if len(own) < SEQ_BYTES:
        raise DataError(f"a record of removed versions has {len(own)} bytes of its own, LSN {lsn}")
    return int.from_bytes(own[:SEQ_BYTES], "little")


def first_counting(log: ShippedLog, part: LogRange) -> int | None:
    """The LSN with which the first entry of a range begins that counts."""
    with contextlib.closing(counting(log, part)) as chosen:
        for frames, indexes in chosen:
            return frames.first_offset + memoryview(indexes).cast("I")[0]
    return None


class RowSink(Protocol):
    """The receiver of rows."""

    def set(self, key: bytes, value: bytes) -> None:
        """Sets a row; `REMOVED` deletes it."""


class Replay:
    """Replays the shipped log into rows from an LSN on, as often as there is more of it."""

    def __init__(self, log: ShippedLog, changes: RowSink, lsn: int, results: ResultTable | None = None) -> None:
        self.results = results
        """Learns what became of the entries, if anybody wants to know."""
        self.lsn = lsn
        """The first record that was not looked at."""
        self.entries = 0
        self.last_seq = 0
        """That of the last entry that counted."""
        self.history_start_seq = 0
        """The oldest seq that may be read, as far as the records say so."""
        self._log = log
        self._changes = changes

    def run(self, manifest: Manifest, on_bytes: OnBytes = lambda size: None) -> None:
        """Replays up to the record that completes the last entry of a manifest."""
        ranges = manifest.rolled_back

        def note(batch: Batch) -> None:
            assert batch.frames is not None
            if self.results is not None:
                self.results.take_live(batch.frames.slice(batch.start, batch.stop), ranges)
            on_bytes(len(batch.frames.buffer))

        self.run_range(log_range(manifest, self.lsn), note)

    def run_range(self, part: LogRange, on_batch: Callable[[Batch], None] = lambda batch: None) -> None:
        last: tuple[memoryview, int] | None = None
        for frames, indexes in counting(self._log, part, removals=True, on_batch=on_batch):
            for lsn, record in records_of(frames, indexes):
                start_seq = history_start_in(record, lsn)
                if start_seq is not None:
                    self.history_start_seq = max(self.history_start_seq, start_seq)
                elif record[1] & LAST:
                    self.entries += 1
                    last = record, lsn
                for key, _, _, cell in changes_of(record, lsn):
                    self._changes.set(key, REMOVED if cell is None else cell)
        if last is not None:
            self.last_seq = decode_header(*last).transaction
        self.lsn = max(self.lsn, part.stop_lsn)


# Columns of operations

WANT_NAMES, WANT_SOURCES, WANT_REASONS, WANT_METADATA, WANT_VALUES = 1, 2, 4, 8, 16


class Strings(NamedTuple):
    """A column of bytes: row i is data[ends[i]:ends[i + 1]], ends as i32."""

    ends: bytes
    data: bytes


@dataclass(frozen=True, slots=True)
class EntryColumns:
    """Operations as arrays, little-endian. `compressed` is the number of operations with a compressed value: their
    metadata and value are empty here.
    """

    count: int
    compressed: int
    seqs: bytes
    lsns: bytes
    times_us: bytes
    sizes: bytes
    crcs: bytes
    orders: bytes
    ops: bytes
    flags: bytes
    codecs: bytes
    buckets: Strings
    keys: Strings
    src_buckets: Strings
    src_keys: Strings
    reasons: Strings
    metadata: Strings
    values: Strings


def gather_entries(
    frames: Frames, indexes: bytes, wanted: int, max_rows: int, max_bytes: int
) -> Iterator[tuple[EntryColumns, bytes]]:
    """Yields the operations at these indexes as columns, bounded by rows and (approximately) bytes, with the indexes
    of each. `wanted` is a sum of the WANT_ numbers.
    """
    at, count = 0, len(indexes) // 4
    while at < count:
        places = frames.buffer, frames.positions, frames.lengths
        rows, stop, compressed, numbers, strings = _native.gather_entries(
            frames.first_offset, *places, indexes, at, wanted, max_rows, max_bytes
        )
        texts = [Strings(*strings[number : number + 2]) for number in range(0, len(strings), 2)]
        yield _columns(rows, compressed, numbers, texts), indexes[4 * at : 4 * stop]
        at = stop


def _columns(rows: int, compressed: int, numbers: tuple[bytes, ...], texts: list[Strings]) -> EntryColumns:
    seqs, lsns, times_us, sizes, crcs, orders, ops, flags, codecs = numbers
    return EntryColumns(rows, compressed, seqs, lsns, times_us, sizes, crcs, orders, ops, flags, codecs, *texts)
