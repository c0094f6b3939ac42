"""Entries for a replay: decoded by workers from an engine's shipped log, or reconstructed from the versions of a
snapshot.

Invariants
- Entries come in the order of the log, each once, whole, and as a batch if they were one (which records count:
  `engine/wal/replay.py`).
- A refused entry has its seq, and is replayed, so that the seqs of the copy are those of the original. The data of its
  puts is no longer in the log: they are replayed without. It is guarded by a condition that is never true, with the
  reason why it was refused: no engine applies it, whatever its state is, and every engine gives that reason.
- A guarded batch that was applied is replayed as that batch.
- Plain entries are encoded from their records in C (`native/entries_encode.h`), without an object for each. Their bytes
  are those that the decoder of records and the encoder of entries would make of them, as they do of all others.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from operator import itemgetter
from typing import TYPE_CHECKING

import msgspec

from tidelog import _native
from tidelog.engine.cold.value_store import value_of
from tidelog.engine.entry import Batch, CreateBucket, DeleteBucket, DeleteObject, Entry, Operation, PutObject
from tidelog.engine.mvcc.cells import OBJECTS, Cell, decode_bucket, decode_cell, parse
from tidelog.engine.mvcc.versions import BucketVersion
from tidelog.engine.sst.blob_file import cell_of
from tidelog.engine.sst.block import Row, rows_in
from tidelog.engine.sst.snapshot import StoredState
from tidelog.engine.sst.sstable import BlockHandle, SSTable, read_row_blocks
from tidelog.engine.txn.read_set import Carried, Guarded, NeverTrue, decode_entry, encode_entry
from tidelog.engine.wal.operations import PUT_OBJECT, OperationRecord, decode_operation, operation_of
from tidelog.engine.wal.record_header import PART_OF_BATCH
from tidelog.engine.wal.replay import counting, first_counting, records_of
from tidelog.engine.wal.value import CODEC_FILE
from tidelog.log.frame import Frames
from tidelog.pipeline.location import EngineLocation
from tidelog.pipeline.source.entry_batches import LogPart
from tidelog.pipeline.source.object_batches import read_values
from tidelog.pipeline.tasks import arrow_schema, as_batches, tuples_in
from tidelog.store.object_store import ObjectStore

if TYPE_CHECKING:
    import pyarrow as pa


class EncodedEntries(msgspec.Struct, frozen=True, kw_only=True):
    """Entries in bytes (`txn/read_set.py`) as columns: seqs u64, times at which they were applied u64, and values, of
    which row i is values[ends[i]:ends[i + 1]], ends as i32."""

    seqs: bytes
    times_us: bytes
    ends: bytes
    values: bytes

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, bytes]]) -> EncodedEntries:
        """The same of rows: seq, time and value."""
        ends = accumulate((len(value) for *_, value in rows), initial=0)
        return cls(
            seqs=array("Q", [seq for seq, *_ in rows]).tobytes(),
            times_us=array("Q", [time_us for _, time_us, _ in rows]).tobytes(),
            ends=array("i", ends).tobytes(),
            values=b"".join([value for *_, value in rows]),
        )

    def pairs(self) -> Iterator[tuple[int, bytes]]:
        """Seq and value of each."""
        ends = memoryview(self.ends).cast("i")
        for seq, first, end in zip(memoryview(self.seqs).cast("Q"), ends, ends[1:], strict=False):
            yield seq, self.values[first:end]

    def batch(self) -> pa.RecordBatch:
        """They as a batch of `ENTRY_SCHEMA`."""
        import pyarrow as pa

        count = len(self.seqs) // 8
        times = pa.Array.from_buffers(pa.int64(), count, [None, pa.py_buffer(self.times_us)])
        seqs = pa.Array.from_buffers(pa.int64(), count, [None, pa.py_buffer(self.seqs)])
        values = pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(self.ends), pa.py_buffer(self.values)])
        return pa.RecordBatch.from_arrays([seqs, times, values], schema=arrow_schema(ENTRY_SCHEMA))


class Entries(msgspec.Struct, frozen=True, kw_only=True):
    """The entries of a part, which has a number."""

    number: int
    encoded: tuple[EncodedEntries, ...]

    def pairs(self) -> Iterator[tuple[int, bytes]]:
        """Seq and bytes of each entry."""
        for some in self.encoded:
            yield from some.pairs()


class EntriesWork(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the log to be decoded."""

    number: int
    part: LogPart


def first_lsn_of(part: LogPart) -> int | None:
    """Where the first entry of a part begins that counts."""
    return first_counting(part.log(), part)


def decode_entries(work: EntriesWork) -> Entries:
    """All entries of a part."""
    return Entries(number=work.number, encoded=tuple(encoded_entries(work.part)))


def entry_batches(part: LogPart) -> Iterator[pa.RecordBatch]:
    """The entries of a part, as batches of `ENTRY_SCHEMA`."""
    return (some.batch() for some in encoded_entries(part))


def encoded_entries(part: LogPart) -> Iterator[EncodedEntries]:
    """The entries of a part in order, some at a time; those that are not plain one by one."""
    by_hand = _ByHand(part.place)
    for frames, indexes in counting(part.log(), part):
        places = frames.first_offset, frames.buffer, frames.positions, frames.lengths, indexes
        at, there = 0, len(indexes) // 4
        while at < there:
            if not by_hand.is_open:
                count, at, columns = _native.encode_plain_entries(*places, at, _RECORDS_AT_ONCE, _ENCODED_BYTES)
                if count:
                    yield from by_hand.taken()
                    yield EncodedEntries(**dict(zip(EncodedEntries.__struct_fields__, columns, strict=True)))
                    continue
            at = by_hand.take_entry(frames, indexes, at)
            if by_hand.is_full:
                yield from by_hand.taken()
    yield from by_hand.taken()


class _ByHand:
    """Entries that are decoded record by record: refused ones, compressed values, and what is wrong."""

    def __init__(self, place: EngineLocation) -> None:
        self._place = place
        self._operations: list[Operation] = []
        self._rows: list[tuple[int, int, bytes]] = []
        self._bytes = 0

    @property
    def is_open(self) -> bool:
        """Whether an entry was begun whose last record is not there yet."""
        return bool(self._operations)

    @property
    def is_full(self) -> bool:
        return len(self._rows) >= ROWS_A_BATCH or self._bytes >= _ENCODED_BYTES

    def take_entry(self, frames: Frames, indexes: bytes, at: int) -> int:
        """The records from there on, up to the end of their entry or of all; returns where to go on."""
        for lsn, found in records_of(frames, memoryview(indexes)[4 * at :]):
            at += 1
            record = decode_operation(bytes(found), lsn)
            self._operations.append(_operation(record, lsn, self._place))
            if record.is_last:
                value = encode_entry(_entry(record, self._operations))
                self._rows.append((record.transaction, record.time_us, value))
                self._operations = []
                self._bytes += len(value)
                break
        return at

    def taken(self) -> Iterator[EncodedEntries]:
        """What was taken since."""
        if self._rows:
            yield EncodedEntries.of(self._rows)
            self._rows, self._bytes = [], 0


def _entry(last: OperationRecord, operations: list[Operation]) -> Carried:
    if last.is_refused:
        return Guarded(Batch(operations), (NeverTrue(last.reason),))
    return Batch(operations) if last.flags & PART_OF_BATCH else operations[0]


def _operation(record: OperationRecord, lsn: int, place: EngineLocation) -> Operation:
    if record.is_refused and record.op == PUT_OBJECT:
        return PutObject(record.bucket, record.key, b"")
    if record.codec == CODEC_FILE:
        opened = place.opened()
        return PutObject(record.bucket, record.key, *value_of(opened.objects, opened.keys, record, lsn))
    return operation_of(record, lsn)


# Reconstructs entries that lead to a state from its versions: for a log that no longer has its beginning.
#
# Every version says which seq wrote it and at which position of its batch, so versions of one seq are combined into a
# batch again. What is invisible at every seq is left out: versions that retention removed, refused entries, and what
# one operation of a batch did and a later one undid.
#
# Invariants
# - Applied in order, the states from the beginning of history on are those of the original, and so are their digests.
# - A copy is replayed as a put of the same data.
# - Each entry is valid in its position: a bucket that a batch has recreated is deleted first, and what was written into
#   a bucket that the same batch has deleted is not written at all.
# - An entry depends only on the versions of its seq and on the history of the buckets, so tasks share nothing.


VERSION_SCHEMA = "seq bigint, place int, operation binary"
ENTRY_SCHEMA = "seq bigint, time_us bigint, value binary"
_PIECE_BYTES = 1 << 20
ROWS_A_BATCH = 256
_RECORDS_AT_ONCE = 1 << 16
_ENCODED_BYTES = 4 << 20

BucketHistories = dict[str, tuple[BucketVersion, ...]]
"""The versions of each bucket, oldest first."""


class StateRows(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one file of a snapshot whose versions are wanted, from one seq (exclusive) up to another."""

    place: EngineLocation
    key: str
    blocks: tuple[BlockHandle, ...]
    after_seq: int
    up_to: int


def state_pieces(
    objects: ObjectStore, place: EngineLocation, state: StoredState, after_seq: int, up_to: int
) -> list[StateRows]:
    """The rows of a state, divided among tasks."""
    return [
        StateRows(place=place, key=part.key, blocks=tuple(group), after_seq=after_seq, up_to=up_to)
        for part in state.parts()
        for group in SSTable(objects, part, kind="versions").block_groups(_PIECE_BYTES)
    ]


def bucket_histories(pieces: Sequence[StateRows]) -> BucketHistories:
    """The buckets of a state. Their rows come before those of all objects."""
    found: dict[str, list[BucketVersion]] = {}
    for piece in pieces:
        for key, value in _rows(piece):
            if key[:1] == OBJECTS:
                return {bucket: tuple(reversed(versions)) for bucket, versions in found.items()}
            name, cell = parse(key), decode_bucket(value)
            found.setdefault(name.bucket, []).append(BucketVersion(name.seq, cell.order, cell.is_deleted))
    return {bucket: tuple(reversed(versions)) for bucket, versions in found.items()}


def _rows(piece: StateRows) -> Iterator[Row]:
    for block in read_row_blocks(piece.place.opened().objects, piece.key, piece.blocks):
        for key, value in rows_in(block.raw, block.place.rows, b""):
            yield key, cell_of(value)


# What tasks do: versions with their data


def version_batches(piece: StateRows) -> Iterator[pa.RecordBatch]:
    """For each version of a piece the operation that leaves it, as batches of `VERSION_SCHEMA`."""
    return as_batches(versions_of(piece), VERSION_SCHEMA, ROWS_A_BATCH)


def versions_of(piece: StateRows) -> Iterator[tuple[int, int, bytes]]:
    """Seq, place in the batch, and the operation in bytes."""
    chosen: list[tuple[str, str, int, Cell]] = []
    for key, value in _rows(piece):
        name = parse(key)
        if not piece.after_seq < name.seq <= piece.up_to:
            continue
        if name.key is None:
            cell = decode_bucket(value)
            made = DeleteBucket(name.bucket, True) if cell.is_deleted else CreateBucket(name.bucket)
            yield name.seq, cell.order, encode_entry(made)
        else:
            chosen.append((name.bucket, name.key, name.seq, decode_cell(value)))
        if len(chosen) == ROWS_A_BATCH:
            yield from _with_values(piece.place, chosen)
            chosen = []
    yield from _with_values(piece.place, chosen)


def _with_values(
    place: EngineLocation, chosen: Sequence[tuple[str, str, int, Cell]]
) -> Iterator[tuple[int, int, bytes]]:
    values = read_values(place, [one[3] for one in chosen])
    for (bucket, key, seq, cell), value in zip(chosen, values, strict=True):
        left = DeleteObject(bucket, key) if value is None else PutObject(bucket, key, *value)
        yield seq, cell.order, encode_entry(left)


# What tasks do: versions of a seq to its entry


class RebuildEntries:
    """Puts versions, which come in order of seq and place, together to entries."""

    def __init__(self, histories: BucketHistories) -> None:
        self._histories = histories

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = tuples_in(batches, "seq", "place", "operation")
        return as_batches(self._entries(rows), ENTRY_SCHEMA, ROWS_A_BATCH)

    def _entries(self, rows: Iterator[tuple[int, int, bytes]]) -> Iterator[tuple[int, int | None, bytes]]:
        for seq, group in groupby(rows, itemgetter(0)):
            versions = [(place, decode_entry(value)) for _, place, value in group]
            entry = entry_of(seq, versions, self._histories)  # type: ignore[arg-type]
            if entry is not None:
                yield seq, None, encode_entry(entry)


def entry_of(seq: int, versions: Sequence[tuple[int, Operation]], histories: BucketHistories) -> Entry | None:
    """The entry that leaves these versions; None when none of them can be seen at any seq."""
    operations: list[Operation] = []
    for place, operation in sorted(versions, key=itemgetter(0)):
        assert isinstance(operation, CreateBucket | DeleteBucket | PutObject | DeleteObject)
        was_there, now = _bucket_at(seq, histories.get(operation.bucket, ()))
        if isinstance(operation, CreateBucket):
            operations += [DeleteBucket(operation.bucket, True), operation] if was_there else [operation]
        elif isinstance(operation, DeleteBucket):
            operations += [operation] if was_there else []
        elif was_there if now is None else not now.is_deleted and place > now.order:
            operations.append(operation)
    if not operations:
        return None
    return operations[0] if len(operations) == 1 else Batch(operations)


def _bucket_at(seq: int, history: Sequence[BucketVersion]) -> tuple[bool, BucketVersion | None]:
    """Whether a bucket was there before a seq, and what this seq made of it."""
    before = [version for version in history if version.seq < seq]
    now = next((version for version in history if version.seq == seq), None)
    return bool(before) and not before[-1].is_deleted, now
