"""Stamped values: what was written comes back, and what was not written is noticed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.errors import DataError
from tidelog.store.metadata import base as stamp


@given(st.binary(max_size=200), st.booleans())
def test_values_round_trip(value: bytes, is_deleted: bool) -> None:
    """With the id of the write and whether it was a deletion."""
    write_id = stamp.new_write_id()
    assert stamp.decode(stamp.encode(write_id, value, is_deleted=is_deleted), "k") == (write_id, value, is_deleted)


@given(st.binary(max_size=100), st.data())
def test_a_flipped_bit_is_noticed(value: bytes, data: st.DataObject) -> None:
    """In the value; and nothing else than the id can change in the head without being noticed."""
    stored = bytearray(stamp.encode("0" * 32, value))
    bit = data.draw(st.integers(0, len(stored) * 8 - 1))
    stored[bit // 8] ^= 1 << bit % 8
    try:
        found = stamp.decode(bytes(stored), "k")
    except DataError:
        return
    assert (found.value, found.is_deleted) == (value, False)
    assert found.write_id != "0" * 32


@pytest.mark.parametrize(
    "data", [b"", b"\n", b"{}", b"tidelog-entry 2 " + b"0" * 32, stamp.encode("0" * 32, b"x")[:-2]]
)
def test_what_is_not_ours_is_named(data: bytes) -> None:
    """With the key where it was found."""
    with pytest.raises(DataError, match="the/key"):
        stamp.decode(data, "the/key")


def test_a_deletion_has_its_size() -> None:
    """By which a listing tells what must be read from what need not."""
    assert len(stamp.encode(stamp.new_write_id(), b"", is_deleted=True)) == stamp.DELETED_SIZE
