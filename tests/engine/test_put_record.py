"""The record of a put in one step: C and its twin, and what the engine's other parts make of it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.twins import agreed

from tidelog.engine import put_record, record_python, updates, updates_python
from tidelog.engine.body import decode_body
from tidelog.engine.cell import decode_cell
from tidelog.engine.entry import PutObject
from tidelog.engine.operation_record import decode_operation, operation_of
from tidelog.engine.record_header import LAST
from tidelog.engine.updates import INSERT, Update, decode
from tidelog.engine.version_keys import parse
from tidelog.log.frame import HEADER_BYTES

kernel: Any = put_record._kernel
U64 = st.integers(0, (1 << 64) - 1)
U32 = st.integers(0, (1 << 32) - 1)
NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=20)


def record_of(*arguments: Any) -> tuple[bytes, bytes]:
    """What C and its twin both give."""
    kind, found = agreed(kernel, record_python, "put_record", *arguments)
    assert kind == "returned"
    return found[0], found[1]


@given(NAMES, NAMES, U64)
def test_keys_are_the_same(bucket: str, name: str, seq: int) -> None:
    """Both give the key of a version, which says what it is of."""
    _, key = agreed(kernel, record_python, "object_key", bucket, name, seq)
    assert parse(key) == (bucket, name, seq)


PUTS = st.tuples(
    *(st.integers(1, (1 << 64) - 1), st.integers(0, 999), U64, U32, NAMES, NAMES, st.binary(max_size=2000)),
    *(U32, st.integers(0, 1 << 60)),
)


@given(PUTS)
def test_records_are_the_same_and_mean_the_put(put: tuple[Any, ...]) -> None:
    """C and the twin agree on every byte, and every reader finds in it what was put."""
    seq, previous_lsn, time_us, order, bucket, name, data, page, position = put
    arguments = (seq, LAST | 4, previous_lsn, time_us, order, bucket, name, data, page, 1000, position)
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
    assert agreed(updates._kernel, updates_python, "record_updates", payload, 1000) == ("returned", record.updates)
    cell = decode_cell(value)
    assert (cell.order, cell.size, cell.crc, cell.lsn) == (order, len(data), record.crc, 1000)
    start = cell.position - position - HEADER_BYTES
    stored = payload[start : start + cell.stored_bytes]
    assert decode_body(stored, cell.codec, cell.size, cell.crc, 1000) == (data, {})


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
    arguments: list[object] = [7, LAST, 0, 5, 0, "b", "k", b"data", 3, 9, 77]
    arguments[place] = wrong
    for either in (kernel, record_python):
        with pytest.raises(Exception):  # noqa: B017, PT011 - which one differs: struct.error here, OverflowError there
            either.put_record(*arguments)


def test_record_of_a_put_says_its_names_and_numbers_once() -> None:
    """Besides what was put it has a header, and where cell and body go."""
    payload, _ = record_of(7, LAST, 0, 5, 0, "bucket", "a key", bytes(200), 3, 9, 77)
    assert len(payload) == 72 + len("bucket") + len("a key") + 4 + 200 + 13


@pytest.mark.parametrize("byte", [0, 4, 44, 45, 46, 47, 48, 72, -9])
def test_updates_of_a_damaged_put_are_refused_or_the_same(byte: int) -> None:
    """Kernel and twin write out the same update, or refuse the record alike."""
    payload, _ = record_of(7, LAST, 0, 5, 0, "bucket", "a key", bytes(20), 3, 9, 77)
    for mask in (1, 2, 0x80, 0xFF):
        damaged = bytearray(payload)
        damaged[byte] ^= mask
        agreed(updates._kernel, updates_python, "record_updates", bytes(damaged), 9)
        agreed(updates._kernel, updates_python, "record_updates", bytes(damaged[: len(damaged) - mask % 20]), 9)


def test_a_wrong_number_of_arguments_is_refused() -> None:
    """As with every function."""
    for function in (kernel.put_record, kernel.object_key):
        with pytest.raises(TypeError, match="positional argument"):
            function(1)


def test_the_kernel_is_native_unless_it_is_told_otherwise() -> None:
    """Without the variable the C kernel runs; with it, the twin."""
    code = "from tidelog.engine.put_record import KERNEL_IS_NATIVE; print(KERNEL_IS_NATIVE)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TIDELOG_PURE_PYTHON": "1"}
    finished = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert finished.stdout == "False\n"
    assert put_record.KERNEL_IS_NATIVE or os.environ.get("TIDELOG_PURE_PYTHON")
