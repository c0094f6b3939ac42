"""Entries of a log in bytes, straight from its records: the kernel held against the decoder and the encoder."""

from __future__ import annotations

import random
import struct
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from tests.oracles import entry_bytes as oracle
from tests.twins import agreed

from tidelog import _native
from tidelog.engine.entry import (
    Batch,
    CopyObject,
    CreateBucket,
    DeleteBucket,
    DeleteObject,
    Entry,
    Operation,
    PutObject,
)
from tidelog.engine.txn.read_set import decode_entry, encode_entry
from tidelog.engine.wal.operations import encode_operation
from tidelog.engine.wal.record_header import LAST, PART_OF_BATCH, REFUSED
from tidelog.engine.wal.value import NO_VALUE, StoredValue, encode_value
from tidelog.log.frame import crc32

kernel: Any = _native
FIRST_LSN = 1000
Records = list[bytes]


def records_of(seq: int, entry: Entry, flags: int = 0, codec: int = 0) -> Records:
    """What the log has of an entry, the first record of which gets this LSN."""
    if not isinstance(entry, Batch):
        return [_record(entry, seq, flags | LAST, codec)]
    parts: Records = []
    for order, one in enumerate(entry.entries):
        last = LAST if order == len(entry.entries) - 1 else 0
        parts.append(
            _record(one, seq, flags | PART_OF_BATCH | last, codec, previous_lsn=1 if order else 0, order=order)
        )
    return parts


def _record(one: Operation, seq: int, flags: int, codec: int = 0, *, previous_lsn: int = 0, order: int = 0) -> bytes:
    value = NO_VALUE
    if isinstance(one, PutObject) and not flags & REFUSED:
        stored = encode_value(one.data, one.metadata)
        value = StoredValue(stored, codec, len(one.data), crc32(stored))
    time_us = 7 * seq
    return encode_operation(one, seq, flags=flags, previous_lsn=previous_lsn, time_us=time_us, order=order, value=value)


def places_of(records: Records) -> tuple[bytes, bytes, bytes]:
    """Buffer, positions and lengths."""
    positions = [sum(map(len, records[:number])) for number in range(len(records))]
    lengths = [len(one) for one in records]
    return b"".join(records), struct.pack(f"<{len(records)}Q", *positions), struct.pack(f"<{len(records)}I", *lengths)


def encoded(records: Records, start: int = 0, most: int = 1 << 16, max_bytes: int = 1 << 20) -> tuple[int, list[bytes]]:
    """What both of them say: where to go on, and the entries."""
    indexes = struct.pack(f"<{len(records)}I", *range(len(records)))
    given = FIRST_LSN, *places_of(records), indexes, start, most, max_bytes
    _, (count, at, (seqs, times, ends, values)) = agreed(kernel, oracle, "encode_plain_entries", *given)
    cuts = memoryview(ends).cast("i")
    assert [7 * seq for seq in memoryview(seqs).cast("Q")] == memoryview(times).cast("Q").tolist()
    assert len(cuts) == count + 1
    return at, [values[first:end] for first, end in pairwise(cuts)]


OPERATIONS: list[Operation] = [
    CreateBucket("b" * 31),
    CreateBucket("b" * 32),
    DeleteBucket("b"),
    DeleteBucket("b", force=True),
    DeleteObject("b", "k" * 300),
    CopyObject("from", "here", "to", "there"),
    *(PutObject("b", "key", bytes(size)) for size in (0, 1, 255, 256, 65535, 65536)),
    PutObject("b", "key", b"data", {"type": "text/plain", "n": 127, "yes": True, "no": False, "none": None}),
    PutObject("b", "key", b"data", {"": "x" * 31, "long": "x" * 32, "longest": "y" * 255}),
]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: type(one).__name__)
def test_plain_entries_are_encoded_as_the_encoder_does(operation: Operation) -> None:
    """Alone, and in batches of all sizes that msgpack tells apart."""
    entries: list[Entry] = [operation, Batch([operation]), Batch([operation] * 16)]
    records = [record for seq, entry in enumerate(entries, 1) for record in records_of(seq, entry)]
    at, found = encoded(records)
    assert at == len(records)
    assert found == [encode_entry(entry) for entry in entries]


def test_large_batches_have_longer_heads() -> None:
    """More operations than four bits, and than two bytes, can say."""
    for count in (15, 16, 65_535, 65_536):
        batch = Batch([DeleteObject("b", "k")] * count)
        record, last = _record(batch.entries[0], 1, PART_OF_BATCH), _record(batch.entries[0], 1, PART_OF_BATCH | LAST)
        given = places_of([record, last])
        indexes = struct.pack(f"<{count}I", *[0] * (count - 1), 1)
        found = kernel.encode_plain_entries(FIRST_LSN, *given, indexes, 0, 1 << 20, 1)
        assert (found[:2], found[2][3]) == ((1, count), encode_entry(batch))


NOT_PLAIN: dict[str, Records] = {
    "name": records_of(2, PutObject("b", "kéy", b"")),
    "refused": records_of(2, PutObject("b", "k", b""), REFUSED),
    "compressed": records_of(2, PutObject("b", "k", b"x"), codec=1),
    "bytes": records_of(2, PutObject("b", "k", b"x", {"m": b"bytes"})),
    "number": records_of(2, PutObject("b", "k", b"x", {"m": 128})),
    "float": records_of(2, PutObject("b", "k", b"x", {"m": 0.5})),
    "text": records_of(2, PutObject("b", "k", b"x", {"m": "é"})),
    "long": records_of(2, PutObject("b", "k", b"x", {"m": "x" * 256})),
    "many": records_of(2, PutObject("b", "k", b"x", {f"{number:02}": 1 for number in range(16)})),
    "cut": [records_of(2, PutObject("b", "k", b"x"))[0][:12]],
    "open": records_of(2, Batch([DeleteObject("b", "k")] * 3))[:2],
    "second": records_of(2, Batch([DeleteObject("b", "k"), PutObject("b", "é", b"")])),
}


@pytest.mark.parametrize("what", NOT_PLAIN)
def test_it_stops_in_front_of_what_is_not_plain(what: str) -> None:
    """The entries before are there; whoever takes records apart goes on at the first one of the entry."""
    plain = PutObject("b", "k", b"plain")
    records = [*records_of(1, plain), *NOT_PLAIN[what], *records_of(3, plain)]
    assert encoded(records) == (1, [encode_entry(plain)])
    assert encoded(records, 1) == (1, [])
    behind = len(records) - 1
    assert encoded(records, behind) == (len(records), [encode_entry(plain)])


def test_metadata_that_no_encoder_writes_is_left_to_the_decoder() -> None:
    """Names that are not in order, or twice; lengths that could be shorter; bytes behind the map."""
    for packed in (
        b"\x82\xa1b\x01\xa1a\x01",
        b"\x82\xa1a\x01\xa1a\x01",
        b"\x81\xd9\x01a\x01",
        b"\x81\xa1a\x01\x00",
        b"\x80",
    ):
        stored = struct.pack("<I", len(packed)) + packed + b"data"
        value = StoredValue(stored, 0, 4, crc32(stored))
        record = encode_operation(PutObject("b", "k", b"data"), 1, flags=LAST, time_us=7, value=value)
        assert encoded([record]) == (0, [])


def test_records_and_bytes_are_limited() -> None:
    """At least one entry comes, and none that does not fit into the records that may be looked at."""
    puts = [PutObject("b", "k", bytes(100))] * 5
    records = [record for seq, put in enumerate(puts, 1) for record in records_of(seq, put)]
    assert encoded(records, max_bytes=1)[0] == 1
    assert encoded(records, max_bytes=200)[0] == 2
    assert encoded(records, most=3)[0] == 3
    assert encoded(records_of(1, Batch(puts)), most=4) == (0, [])
    assert encoded([]) == (0, [])


def test_damaged_records_are_told_or_left_as_the_oracle_does() -> None:
    """A bit that is flipped, a record that is cut: never an entry that differs from what the decoder makes of it."""
    chance = random.Random(5)
    entries: list[Entry] = [*OPERATIONS[4:7], Batch(OPERATIONS[:6]), OPERATIONS[-2], OPERATIONS[-1]]
    records = [record for seq, entry in enumerate(entries, 1) for record in records_of(seq, entry)]
    buffer, positions, lengths = places_of(records)
    indexes = struct.pack(f"<{len(records)}I", *range(len(records)))
    for _ in range(1500):
        flipped, cut = bytearray(buffer), bytearray(lengths)
        flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
        if chance.random() < 0.3:
            number = chance.randrange(len(records))
            struct.pack_into("<I", cut, 4 * number, chance.randrange(len(records[number]) + 40))
        given = FIRST_LSN, bytes(flipped), positions, bytes(cut), indexes
        for start in (0, chance.randrange(len(records))):
            found = agreed(kernel, oracle, "encode_plain_entries", *given, start, 1 << 16, 1 << 20)
            if found[0] == "returned":
                _, _, (_, _, ends, values) = found[1]
                cuts = memoryview(ends).cast("i")
                assert all(decode_entry(values[a:b]) for a, b in pairwise(cuts))
    agreed(
        kernel, oracle, "encode_plain_entries", FIRST_LSN, buffer, positions, lengths, struct.pack("<I", 99), 0, 9, 9
    )


def test_packed_metadata_is_msgpack() -> None:
    """What the kernel copies is what the decoder of entries reads."""
    put = OPERATIONS[-2]
    assert isinstance(put, PutObject)
    (value,) = encoded(records_of(1, put))[1]
    assert msgspec.msgpack.decode(value[1:])["metadata"] == put.metadata
