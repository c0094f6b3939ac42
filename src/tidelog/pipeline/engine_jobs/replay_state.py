"""Entries that lead to a state, made from its versions: for a log that no longer has its beginning.

Every version says which seq wrote it and in which place of its batch, so versions of one seq are put together to a
batch again. What nobody can see at any seq is left out: versions that the retention removed, refused entries, and what
one operation of a batch did and a later one undid.

Invariants
- Applied in order, the states from the beginning of history on are those of the original, and so are their digests.
- A copy is given as a put of the same data.
- Each entry is allowed where it stands: a bucket that a batch has made anew is deleted first, and what was written into
  a bucket that the same batch has taken away is not written at all.
- An entry is made from the versions of its seq and from the history of the buckets alone, so tasks share nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

import msgspec

from tidelog.engine.buckets import BucketVersion
from tidelog.engine.cell import Cell, decode_bucket, decode_cell
from tidelog.engine.cell_blocks import Row, decode_block, rows_in
from tidelog.engine.entry import Batch, CreateBucket, DeleteBucket, DeleteObject, Entry, Operation, PutObject
from tidelog.engine.entry_codec import decode_entry, encode_entry
from tidelog.engine.place import cell_of
from tidelog.engine.row_file import BlockPlace, RowFile
from tidelog.engine.store_checkpoint import StoredState
from tidelog.engine.version_keys import OBJECTS, parse
from tidelog.errors import CorruptionError, DataError
from tidelog.pipeline.engines.object_bodies import read_bodies
from tidelog.pipeline.engines.store_place import EnginePlace
from tidelog.tier.object_store import ObjectStore

if TYPE_CHECKING:
    import pyarrow as pa

VERSION_SCHEMA = "seq bigint, place int, operation binary"
ENTRY_SCHEMA = "seq bigint, time_us bigint, value binary"
_PIECE_BYTES = 1 << 20
_ROWS_A_BATCH = 256

BucketHistories = dict[str, tuple[BucketVersion, ...]]
"""The versions of each bucket, oldest first."""


class StateRows(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one object of a state whose versions are wanted, from one seq (exclusive) up to another."""

    place: EnginePlace
    key: str
    has_places: bool
    blocks: tuple[BlockPlace, ...]
    after_seq: int
    up_to: int


def state_pieces(
    objects: ObjectStore, place: EnginePlace, state: StoredState, after_seq: int, up_to: int
) -> list[StateRows]:
    """The rows of a state, divided among tasks."""
    return [
        StateRows(place=place, key=key, has_places=state.has_places, blocks=group, after_seq=after_seq, up_to=up_to)
        for key, blocks in _objects_of(objects, state)
        for group in _grouped(blocks)
    ]


def _objects_of(objects: ObjectStore, state: StoredState) -> Iterator[tuple[str, Sequence[BlockPlace]]]:
    for part in state.parts():
        yield part.key, RowFile(objects, part, kind="versions").footer.blocks
    if not state.parts():
        own = state.footer.blocks
        yield state.key, [BlockPlace(one.byte, one.size, one.count, one.first_key, one.last_key) for one in own]


def _grouped(blocks: Sequence[BlockPlace]) -> Iterator[tuple[BlockPlace, ...]]:
    first = 0
    for index, block in enumerate(blocks, 1):
        if block.byte + block.size - blocks[first].byte >= _PIECE_BYTES or index == len(blocks):
            yield tuple(blocks[first:index])
            first = index


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
    first, last = piece.blocks[0], piece.blocks[-1]
    data = piece.place.opened().objects.read_range(piece.key, first.byte, last.byte + last.size - first.byte)
    for at in piece.blocks:
        begin = at.byte - first.byte
        try:
            for key, value in rows_in(decode_block(data[begin : begin + at.size]), at.rows, b""):
                yield key, cell_of(value) if piece.has_places else value
        except DataError as error:
            raise CorruptionError(error.message, path=piece.key, byte=at.byte, operation="replay") from error


# What tasks do: versions with their data


class ReadVersions:
    """Reads the pieces of a state whose numbers a task gets: for each version the operation that leaves it."""

    def __init__(self, pieces: Sequence[StateRows]) -> None:
        self._pieces = pieces

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from as_batches(versions_of(self._pieces[number]), VERSION_SCHEMA)


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
        if len(chosen) == _ROWS_A_BATCH:
            yield from _with_bodies(piece.place, chosen)
            chosen = []
    yield from _with_bodies(piece.place, chosen)


def _with_bodies(place: EnginePlace, chosen: Sequence[tuple[str, str, int, Cell]]) -> Iterator[tuple[int, int, bytes]]:
    bodies = read_bodies(place, [one[3] for one in chosen])
    for (bucket, key, seq, cell), body in zip(chosen, bodies, strict=True):
        left = DeleteObject(bucket, key) if body is None else PutObject(bucket, key, *body)
        yield seq, cell.order, encode_entry(left)


# What tasks do: versions of a seq to its entry


class RebuildEntries:
    """Puts versions, which come in order of seq and place, together to entries."""

    def __init__(self, histories: BucketHistories) -> None:
        self._histories = histories

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = (row for batch in batches for row in zip(*(column.to_pylist() for column in batch.columns), strict=True))
        yield from as_batches(self._entries(rows), ENTRY_SCHEMA)

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


def as_batches(rows: Iterator[tuple[object, ...]], schema: str) -> Iterator[pa.RecordBatch]:
    """Rows as Arrow batches of a schema."""
    from itertools import islice

    import pyarrow as pa

    types = {"bigint": pa.int64(), "int": pa.int32(), "binary": pa.binary()}
    columns = [field.split() for field in schema.split(", ")]
    while taken := list(islice(rows, _ROWS_A_BATCH)):
        arrays = [
            pa.array(values, types[kind]) for values, (_, kind) in zip(zip(*taken, strict=True), columns, strict=True)
        ]
        yield pa.RecordBatch.from_arrays(arrays, names=[name for name, _ in columns])
