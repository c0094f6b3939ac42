"""The record of a put in one step: C and its twin, and what the engine's other parts make of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.oracles import records as records_oracle
from tests.oracles import updates as updates_oracle
from tests.twins import agreed

from tidelog import _native
from tidelog.engine.btree.page import INSERT, Update, decode
from tidelog.engine.entry import PutObject
from tidelog.engine.mvcc.cells import decode_cell, parse
from tidelog.engine.wal.operations import decode_operation, operation_of
from tidelog.engine.wal.record_header import LAST, PART_OF_BATCH, REFUSED
from tidelog.engine.wal.value import decode_value
from tidelog.log.frame import HEADER_BYTES

kernel: Any = _native
U64 = st.integers(0, (1 << 64) - 1)
U32 = st.integers(0, (1 << 32) - 1)
NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=20)


def record_of(*arguments: Any) -> tuple[bytes, bytes]:
    """What C and its twin both give."""
    kind, found = agreed(kernel, records_oracle, "put_record", *arguments)
    assert kind == "returned"
    return found[0], found[1]


@given(NAMES, NAMES, U64)
def test_keys_are_the_same(bucket: str, name: str, seq: int) -> None:
    """Both give the key of a version, which says what it is of."""
    _, key = agreed(kernel, records_oracle, "object_key", bucket, name, seq)
    assert parse(key) == (bucket, name, seq)


PUTS = st.tuples(
    *(st.integers(1, (1 << 64) - 1), st.integers(0, 999), U64, U32, NAMES, NAMES, st.binary(max_size=2000)),
    *(U32, st.integers(0, 1 << 60)),
)


@given(PUTS)
def test_records_are_the_same_and_mean_the_put(put: tuple[Any, ...]) -> None:
    """C and the twin agree on every byte, and every reader finds in it what was put."""
    seq, previous_lsn, time_us, order, bucket, name, data, page, position = put
    arguments = (seq, LAST | PART_OF_BATCH, previous_lsn, time_us, order, bucket, name, data, page, 1000, position)
    payload, value = record_of(*arguments)
    record = decode_operation(payload, 1000)
    assert operation_of(record, 1000) == PutObject(bucket, name, data)
    assert (record.transaction, record.order, record.time_us, record.previous_lsn) == (
        seq,
        order,
        time_us,
        previous_lsn,
    )
    assert decode(record.updates) == [Update(page, INSERT, kernel.object_key(bucket, name, seq), value)]
    assert agreed(_native, updates_oracle, "record_updates", payload, 1000) == ("returned", record.updates)
    cell = decode_cell(value)
    assert (cell.order, cell.size, cell.crc, cell.lsn) == (order, len(data), record.crc, 1000)
    start = cell.position - position - HEADER_BYTES
    stored = payload[start : start + cell.stored_bytes]
    assert decode_value(stored, cell.codec, cell.size, cell.crc, 1000) == (data, {})


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 16 << 10, (16 << 10) + 1, 3 << 20])
def test_every_size_of_data_is_the_same(size: int) -> None:
    """With and without letting go of the interpreter's lock, and for every way to a checksum."""
    record_of(7, LAST, 0, 5, 0, "b", "k", bytes(range(256)) * (size // 256) + bytes(size % 256), 3, 9, 77)


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        *((place, wrong) for place in (0, 1, 2, 3, 4, 8, 9) for wrong in (-1, 1 << 64, "x", None)),
        *((place, wrong) for place in (1, 4, 8) for wrong in (1 << 32,)),
        *((place, wrong) for place in (5, 6) for wrong in (b"bytes", None, 3, "\ud800", "x" * 70_000)),
        *((7, wrong) for wrong in ("text", None, 3)),
    ],
)
def test_what_does_not_fit_raises(place: int, wrong: object) -> None:
    """No argument is cut to its size: C raises where the twin does."""
    arguments: list[object] = [7, LAST | PART_OF_BATCH, 0, 5, 0, "b", "k", b"data", 3, 9, 77]
    arguments[place] = wrong
    for either in (kernel, records_oracle):
        with pytest.raises(Exception):  # noqa: B017, PT011 - which one differs: struct.error here, OverflowError there
            either.put_record(*arguments)


@pytest.mark.parametrize(("previous_lsn", "order"), [(1, 0), (0, 1)])
def test_a_lone_put_has_none_before_it(previous_lsn: int, order: int) -> None:
    """What only parts of batches have would be lost on its way to the log."""
    for either in (kernel, records_oracle):
        with pytest.raises(ValueError, match="no part of a batch"):
            either.put_record(7, LAST, previous_lsn, 5, order, "b", "k", b"data", 3, 9, 77)


def test_record_of_a_put_says_its_names_and_numbers_once() -> None:
    """Besides what was put it has a header, and where cell and value go."""
    payload, _ = record_of(7, LAST, 0, 5, 0, "bucket", "a key", bytes(200), 3, 9, 77)
    assert len(payload) == 15 + 7 + len("bucket") + len("a key") + 4 + 200 + 6


@pytest.mark.parametrize("byte", [0, 1, 14, 15, 16, 17, 18, 19, 20, 21, -7, -3, -2, -1])
def test_updates_of_a_damaged_put_are_refused_or_the_same(byte: int) -> None:
    """Kernel and twin write out the same update, or refuse the record alike."""
    payload, _ = record_of(7, LAST, 0, 5, 0, "bucket", "a key", bytes(20), 3, 9, 77)
    for mask in (1, 2, 0x80, 0xFF):
        damaged = bytearray(payload)
        damaged[byte] ^= mask
        agreed(_native, updates_oracle, "record_updates", bytes(damaged), 9)
        agreed(_native, updates_oracle, "record_updates", bytes(damaged[: len(damaged) - mask % 20]), 9)


def test_a_wrong_number_of_arguments_is_refused() -> None:
    """As with every function."""
    for function in (kernel.put_record, kernel.object_key):
        with pytest.raises(TypeError, match="positional argument"):
            function(1)


HEADS = st.tuples(
    *(st.sampled_from([0, LAST, LAST | REFUSED, PART_OF_BATCH, LAST | PART_OF_BATCH | REFUSED]), U64, U32),
    *(st.integers(1, 6), st.integers(0, 1), U64, U64, U32, U64, U32, *[st.integers(0, (1 << 16) - 1)] * 5),
)


@given(HEADS)
def test_heads_of_operations_are_the_same(numbers: tuple[int, ...]) -> None:
    """C and the twin agree on every kind of operation, and refuse alike what has no place in it."""
    agreed(kernel, records_oracle, "operation_head", *numbers)


STORED = st.tuples(st.binary(min_size=1, max_size=400), st.integers(0, 1), U64, U32, st.booleans())


@given(PUTS, STORED)
def test_records_of_stored_values_are_the_same(put: tuple[Any, ...], stored: tuple[Any, ...]) -> None:
    """Compressed or not, in the cell or in the log, with C and with the twin; cells say what was given."""
    seq, previous_lsn, time_us, order, bucket, name, _, page, position = put
    value, codec, size, crc, is_inline = stored
    arguments = (seq, LAST | PART_OF_BATCH, previous_lsn, time_us, order, bucket, name, value, page, 1000, position)
    kind, found = agreed(kernel, records_oracle, "stored_record", *arguments, codec, size, crc, is_inline)
    assert kind == "returned"
    record, cell = decode_operation(found[0], 1000), decode_cell(found[1])
    assert (record.stored, record.codec, record.size, record.crc) == (value, codec, size, crc)
    assert (cell.order, cell.codec, cell.size, cell.crc, cell.stored_bytes) == (order, codec, size, crc, len(value))
    assert (cell.inline == value) if is_inline else (cell.position == position + HEADER_BYTES + record.value_offset)
    (update,) = decode(record.updates)
    assert update == Update(page, INSERT, kernel.object_key(bucket, name, seq), found[1])


@given(st.one_of(st.binary(max_size=60), st.tuples(PUTS, st.data())))
def test_cells_are_taken_apart_alike(value: Any) -> None:
    """Cells, damaged cells and random bytes: C and the twin say the same."""
    if not isinstance(value, bytes):
        (seq, previous_lsn, time_us, order, bucket, name, data, page, position), draw = value
        arguments = (seq, LAST | PART_OF_BATCH, previous_lsn, time_us, order, bucket, name, data, page, 1000, position)
        damaged = bytearray(records_oracle.put_record(*arguments)[1])
        damaged[draw.draw(st.integers(0, len(damaged) - 1))] = draw.draw(st.integers(0, 255))
        value = bytes(damaged[: draw.draw(st.integers(1, len(damaged)))])
    agreed(kernel, records_oracle, "cell_parts", value)
