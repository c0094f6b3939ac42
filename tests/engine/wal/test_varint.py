"""Varints: numbers come back, and nothing is believed that is cut short or too large."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.engine.wal.record_header import U16, U64, decode_varint, encode_varint
from tidelog.errors import DataError


@given(st.integers(0, U64), st.binary(max_size=3), st.binary(max_size=3))
def test_a_number_comes_back_wherever_it_stands(number: int, before: bytes, behind: bytes) -> None:
    """It takes a byte for every seven bits."""
    encoded = encode_varint(number)
    assert len(encoded) == max(1, -(-number.bit_length() // 7))
    assert decode_varint(before + encoded + behind, len(before)) == (number, len(before + encoded))
    for size in range(len(encoded)):
        with pytest.raises(DataError, match="cut short"):
            decode_varint(encoded[:size], 0)


@pytest.mark.parametrize(("number", "largest"), [(-1, U64), (U64 + 1, U64), (U16 + 1, U16)])
def test_what_does_not_fit_is_not_written(number: int, largest: int) -> None:
    """It would come back as another number."""
    with pytest.raises(OverflowError):
        encode_varint(number, largest)


@pytest.mark.parametrize("data", [b"\xff" * 9 + b"\x02", b"\xff" * 10 + b"\x01", b"\x80" * 10 + b"\x00"])
def test_more_than_64_bits_are_refused(data: bytes) -> None:
    """Ten bytes hold 64 bits and no more."""
    with pytest.raises(DataError):
        decode_varint(data, 0)
    assert decode_varint(b"\xff" * 9 + b"\x01", 0) == (U64, 10)


def test_a_number_has_the_bound_that_is_asked_for() -> None:
    """A length of two bytes is none of three."""
    assert decode_varint(encode_varint(U16), 0, U16) == (U16, 3)
    with pytest.raises(DataError):
        decode_varint(encode_varint(U16 + 1), 0, U16)
