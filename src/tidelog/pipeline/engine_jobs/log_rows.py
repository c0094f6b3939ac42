"""What workers make of an engine's shipped log: the rows of the tree that its records changed, as Arrow batches.

    key binary      the key in the tree
    lsn bigint      of the record that changed it: per key the last (lsn, number) counts
    number int      which of the record's changes it is
    cell binary     what the tree has there from then on; null where the row went away
    part int        the same number for all versions of one name: whoever needs them in one task groups by it

Invariants
- Which records count is decided as `engine/restore_replay.py` decides it: an operation whose entry is whole, is not
  above the seq that is asked for and was not rolled back; what retention removed (VACUUM) is gone.
- An entry without its last record is not in any list of rolled back ranges, so single records cannot be judged. A task
  has the entries that BEGIN in its range: it reads on behind the range until the last of them is whole, and passes over
  what an entry that began before the range has left in it. So each entry is with one task, and with one only.
- Every frame is checked (offset, length, checksum) by whoever reads it. Records come from a store: what does not fit
  together raises DataError with the LSN.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

import msgspec

from tidelog.engine.gate import LsnRange
from tidelog.engine.record_header import HEADER, HEADER_BYTES, LAST, OPERATION, VACUUM
from tidelog.engine.updates import INSERT, REMOVE, REPLACE, decode, record_updates
from tidelog.engine.version_keys import SEQ_BYTES
from tidelog.errors import DataError, GapError
from tidelog.log.cache import Batch
from tidelog.log.frame import crc32
from tidelog.pipeline.engines.store_place import EnginePlace
from tidelog.tier.catalog import Catalog
from tidelog.tier.descriptor import Descriptor
from tidelog.tier.history import History
from tidelog.tier.planned_catalog import PlannedCatalog

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 8192
TASK_BYTES = 16 << 20
CHANGE_SCHEMA = "key binary, lsn bigint, number int, cell binary, part int"
_SEQ_BYTES = 8

Change = tuple[bytes, int, int, bytes | None]
"""Key, LSN, number in the record, cell (None: removed)."""


class LogWork(msgspec.Struct, frozen=True, kw_only=True):
    """The entries that begin at `start_lsn` or behind it, and before `stop_lsn`.

    Nothing at `end_lsn` or behind it counts, and no entry above `max_seq`.
    """

    place: EnginePlace
    start_lsn: int
    stop_lsn: int
    end_lsn: int
    max_seq: int
    rolled_back: tuple[LsnRange, ...] = ()
    descriptors: tuple[Descriptor, ...] = ()


def plan_log(
    catalog: Catalog,
    place: EnginePlace,
    start_lsn: int,
    end_lsn: int,
    *,
    max_seq: int,
    rolled_back: Sequence[LsnRange] = (),
    task_bytes: int = TASK_BYTES,
) -> list[LogWork]:
    """The log from an LSN up to another (exclusive), in tasks of about so many bytes; GapError when some is missing."""
    works: list[LogWork] = []
    for group in _groups(catalog.between(start_lsn, end_lsn) if start_lsn < end_lsn else (), task_bytes):
        first = max(start_lsn, group[0].start_offset)
        _require_next(works[-1].stop_lsn if works else start_lsn, first)
        works.append(
            LogWork(
                place=place,
                start_lsn=first,
                stop_lsn=min(end_lsn, group[-1].next_offset),
                end_lsn=end_lsn,
                max_seq=max_seq,
                rolled_back=_touching(rolled_back, first, end_lsn),
                descriptors=group,
            )
        )
    _require_next(works[-1].stop_lsn if works else start_lsn, max(start_lsn, end_lsn))
    return works


def _groups(descriptors: Iterable[Descriptor], task_bytes: int) -> Iterator[tuple[Descriptor, ...]]:
    """Neighbours, until they have enough bytes."""
    group: list[Descriptor] = []
    size = 0
    for descriptor in descriptors:
        if group and (size >= task_bytes or descriptor.start_offset != group[-1].next_offset):
            yield tuple(group)
            group, size = [], 0
        group.append(descriptor)
        size += descriptor.raw_size
    if group:
        yield tuple(group)


def _require_next(expected_lsn: int, found_lsn: int) -> None:
    if expected_lsn < found_lsn:
        raise GapError(
            f"the store has no records from LSN {expected_lsn} to {found_lsn - 1}, which its manifest tells of",
            first=expected_lsn,
            last=found_lsn - 1,
            hint="Put the objects and their descriptors back, or take them from a replica",
        )


def _touching(ranges: Sequence[LsnRange], first_lsn: int, stop_lsn: int) -> tuple[LsnRange, ...]:
    low = bisect_left(ranges, first_lsn, key=lambda one: one.last)
    return tuple(ranges[low : bisect_left(ranges, stop_lsn, key=lambda one: one.first)])


def change_batches(work: LogWork) -> Iterator[pa.RecordBatch]:
    """The rows that the entries of a task changed, in the order of the log."""
    gathered: list[Change] = []
    for changes in read_changes(work):
        gathered += changes
        if len(gathered) >= BATCH_ROWS:
            yield to_batch(gathered)
            gathered = []
    if gathered:
        yield to_batch(gathered)


def to_batch(changes: Sequence[Change]) -> pa.RecordBatch:
    """Changes as an Arrow batch of `CHANGE_SCHEMA`."""
    import pyarrow as pa

    keys, lsns, numbers, cells = zip(*changes, strict=True) if changes else ((), (), (), ())
    columns = [
        pa.array(keys, pa.binary()),
        pa.array(lsns, pa.int64()),
        pa.array(numbers, pa.int32()),
        pa.array(cells, pa.binary()),
        pa.array([part_of(key) for key in keys], pa.int32()),
    ]
    return pa.RecordBatch.from_arrays(columns, names=["key", "lsn", "number", "cell", "part"])


def part_of(key: bytes) -> int:
    """A number that all versions of the same object or bucket have in common."""
    return crc32(key[:-SEQ_BYTES]) & 0x7FFFFFFF


def read_changes(work: LogWork) -> Iterator[list[Change]]:
    """The same changes, some at a time, without Arrow."""
    return _read(work, _Entries(work))


def first_lsn_above(work: LogWork) -> int | None:
    """The LSN with which the first entry begins that counts but for its seq, which is above `max_seq`."""
    entries = _Entries(work)
    for _ in _read(work, entries):
        if entries.first_lsn_above is not None:
            break
    return entries.first_lsn_above


def _read(work: LogWork, entries: _Entries) -> Iterator[list[Change]]:
    opened = work.place.opened()
    catalog = PlannedCatalog(work.descriptors, opened.keys, work.place.catalog)
    history = History(catalog, opened.objects, opened.fetchers)
    reached = work.start_lsn
    with closing(history.read(work.start_lsn, work.stop_lsn)) as reader:
        while (batch := reader.next_batch()) is not None:
            yield entries.in_range(batch)
            reached = batch.next_offset
    _require_next(reached, work.stop_lsn)
    if entries.has_open:
        yield _completed(history, entries, work)


def _completed(history: History, entries: _Entries, work: LogWork) -> list[Change]:
    """What the entry that is open at the end of a range changed, if it becomes whole behind it."""
    with closing(history.read(work.stop_lsn, work.end_lsn)) as reader:
        while entries.has_open and (batch := reader.next_batch()) is not None:
            changes = entries.behind_range(batch)
            if changes is not None:
                return changes
    return []


class _Entries:
    """Puts records together to entries, and says what those that count changed."""

    def __init__(self, work: LogWork) -> None:
        self._max_seq = work.max_seq
        self._dead = work.rolled_back
        self._open_seq: int | None = None
        self._open_lsn = 0
        self._open: list[Change] = []
        self.first_lsn_above: int | None = None
        """Where the first entry begins that is whole, and above the seq that is asked for."""

    @property
    def has_open(self) -> bool:
        """Whether an entry has begun and is not whole yet."""
        return self._open_seq is not None

    def in_range(self, batch: Batch) -> list[Change]:
        """What became certain by these records."""
        found: list[Change] = []
        for lsn, record in _records(batch):
            kind, flags, _, updates_offset, seq, previous_lsn, _ = HEADER.unpack_from(record)
            if kind == VACUUM:
                found += _vacuumed(record, updates_offset, lsn)
            elif not self._is_dead(lsn):
                if not previous_lsn:
                    self._open_seq, self._open_lsn, self._open = seq, lsn, []
                elif seq != self._open_seq:
                    self._open_seq = None  # it began before the range, or its beginning was never completed
                    continue
                self._open += _changes(record, updates_offset, lsn)
                if flags & LAST:
                    found += self._closed()
        return found

    def behind_range(self, batch: Batch) -> list[Change] | None:
        """What the open entry changed, once its last record is there; None while that is not known."""
        for lsn, record in _records(batch):
            kind, flags, _, updates_offset, seq, previous_lsn, _ = HEADER.unpack_from(record)
            if kind == OPERATION and not self._is_dead(lsn):
                if not previous_lsn or seq != self._open_seq:
                    self._open_seq = None
                    return []
                self._open += _changes(record, updates_offset, lsn)
                if flags & LAST:
                    return self._closed()
        return None

    def _closed(self) -> list[Change]:
        changes, is_above = self._open, (self._open_seq or 0) > self._max_seq
        self._open_seq, self._open = None, []
        if not is_above:
            return changes
        if self.first_lsn_above is None:
            self.first_lsn_above = self._open_lsn
        return []

    def _is_dead(self, lsn: int) -> bool:
        at = bisect_right(self._dead, lsn, key=lambda one: one.first)
        return at > 0 and lsn <= self._dead[at - 1].last


def _records(batch: Batch) -> Iterator[tuple[int, memoryview]]:
    """The records of operations and of retention: no others change rows."""
    frames = batch.frames
    assert frames is not None
    buffer = memoryview(frames.buffer)
    positions, lengths = memoryview(frames.positions).cast("Q"), memoryview(frames.lengths).cast("I")
    for index in range(batch.start, batch.stop):
        at = positions[index]
        if buffer[at] in (OPERATION, VACUUM):
            lsn, record = frames.first_offset + index, buffer[at : at + lengths[index]]
            if len(record) < HEADER_BYTES:
                raise DataError(f"a record of {len(record)} bytes has no header, LSN {lsn}")
            yield lsn, record


def _vacuumed(record: memoryview, updates_offset: int, lsn: int) -> list[Change]:
    if updates_offset != HEADER_BYTES + _SEQ_BYTES:
        own = updates_offset - HEADER_BYTES
        raise DataError(f"a record of removed versions has {own} bytes of its own, LSN {lsn}")
    return _changes(record, updates_offset, lsn)


def _changes(record: memoryview, updates_offset: int, lsn: int) -> list[Change]:
    if not HEADER_BYTES <= updates_offset <= len(record):
        raise DataError(f"a record of {len(record)} bytes has its page updates at {updates_offset}, LSN {lsn}")
    found: list[Change] = []
    for number, update in enumerate(decode(record_updates(record, lsn), lsn)):
        if len(update.key) <= SEQ_BYTES or update.what not in (INSERT, REPLACE, REMOVE):
            raise DataError(f"an entry has an update of kind {update.what} that is no row's, LSN {lsn}")
        found.append((update.key, lsn, number, None if update.what == REMOVE else update.value))
    return found


def position_of_lsn(catalog: Catalog, place: EnginePlace, lsn: int) -> int | None:
    """How many bytes of the log are before a record; None for one that is in no object."""
    descriptor = catalog.at(lsn)
    if descriptor is None:
        return None
    opened, position = place.opened(), descriptor.start_position
    history = History(PlannedCatalog([descriptor], opened.keys, place.catalog), opened.objects, opened.fetchers)
    with closing(history.read(descriptor.start_offset, lsn)) as reader:
        while (batch := reader.next_batch()) is not None:
            assert batch.frames is not None
            position += batch.frames.start_of(batch.stop) - batch.frames.start_of(batch.start)
    return position
