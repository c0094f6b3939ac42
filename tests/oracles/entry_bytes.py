"""The oracle of `native/entries_encode.h`: entries of a log by the decoder of records and the encoder of entries."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from tidelog.engine.entry import MAX_BUCKET_BYTES, MAX_KEY_BYTES, Batch, Operation, PutObject
from tidelog.engine.txn.read_set import encode_entry
from tidelog.engine.wal.operations import OperationRecord, decode_operation, operation_of
from tidelog.engine.wal.record_header import PART_OF_BATCH
from tidelog.errors import DataError
from tidelog.log.frame import Buffer

__all__ = ["encode_plain_entries"]

Plain = tuple[OperationRecord, Operation]


def encode_plain_entries(
    first_lsn: int,
    buffer: Buffer,
    positions: Buffer,
    lengths: Buffer,
    indexes: Buffer,
    start: int,
    max_records: int,
    max_bytes: int,
    /,
) -> tuple[int, int, tuple[bytes, bytes, bytes, bytes]]:
    """The plain entries from a record on, and where to go on: at what is not plain, or at an entry that has no end."""
    view, at = memoryview(buffer).cast("B"), start
    seqs, times, ends, values = b"", b"", struct.pack("<i", 0), b""
    chosen = memoryview(indexes).cast("B").cast("I")[start : start + max_records]
    records = _records(first_lsn, view, memoryview(positions).cast("B"), memoryview(lengths).cast("B"), chosen)
    count = 0
    while count == 0 or len(values) < max_bytes:
        entry = _next_entry(records)
        if not entry:
            break
        last, operations = entry[-1][0], [operation for _, operation in entry]
        values += encode_entry(Batch(operations) if last.flags & PART_OF_BATCH else operations[0])
        seqs += struct.pack("<Q", last.transaction)
        times += struct.pack("<Q", last.time_us)
        ends += struct.pack("<i", len(values))
        count, at = count + 1, at + len(entry)
    return count, at, (seqs, times, ends, values)


def _records(
    first_lsn: int, view: memoryview, positions: memoryview, lengths: memoryview, chosen: Sequence[int]
) -> Iterator[tuple[bytes, int]]:
    for index in chosen:
        if index >= len(lengths) // 4:
            raise ValueError("an index is behind the last record")
        (position,), (length,) = (
            struct.unpack_from("<Q", positions, 8 * index),
            struct.unpack_from("<I", lengths, 4 * index),
        )
        if position + length > len(view):
            raise ValueError(f"payload {index} is outside the buffer of {len(view)} bytes")
        yield bytes(view[position : position + length]), first_lsn + index


def _next_entry(records: Iterator[tuple[bytes, int]]) -> list[Plain]:
    """Nothing when something of it is not plain, or its last record is not there."""
    entry: list[Plain] = []
    for payload, lsn in records:
        plain = _plain(payload, lsn)
        if plain is None or (entry and not (plain[0].flags & entry[0][0].flags & PART_OF_BATCH)):
            return []
        entry.append(plain)
        if plain[0].is_last:
            return entry
    return []


def _plain(payload: bytes, lsn: int) -> Plain | None:
    try:
        record = decode_operation(payload, lsn)
        if record.is_refused or record.codec:
            return None
        operation = operation_of(record, lsn)
    except DataError:
        return None
    names = (record.bucket, record.key, record.src_bucket, record.src_key)
    if not all(name.isascii() for name in names):
        return None
    assert max(map(len, names)) <= max(MAX_BUCKET_BYTES, MAX_KEY_BYTES)
    return (
        (record, operation) if not isinstance(operation, PutObject) or _has_plain_metadata(record, operation) else None
    )


def _has_plain_metadata(record: OperationRecord, put: PutObject) -> bool:
    """At most 15 pairs, of short texts, small numbers, truth values and None; as the encoder writes them."""
    if not put.metadata:
        return record.stored[:4] == bytes(4)
    texts = [text for text in (*put.metadata, *put.metadata.values()) if isinstance(text, str)]
    others = [value for value in put.metadata.values() if not isinstance(value, str)]
    is_small = all(value is None or isinstance(value, bool) or _is_small_number(value) for value in others)
    is_short = all(text.isascii() and len(text) < 256 for text in texts)
    packed = record.stored[4 : len(record.stored) - record.size]
    return is_small and is_short and len(put.metadata) < 16 and encode_entry(put).endswith(packed)


def _is_small_number(value: object) -> bool:
    return type(value) is int and 0 <= value < 128
