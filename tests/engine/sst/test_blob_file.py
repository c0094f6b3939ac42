"""Blob files: values come back from where the blob file says, and every damage is noticed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.oracles.blob_file import pack_by_hand, packed

from tidelog.engine.sst.blob_file import check_blob_file
from tidelog.errors import CorruptionError, InputError
from tidelog.log.frame import crc32

VALUES = st.dictionaries(st.integers(0, 2**64 - 1), st.binary(min_size=1, max_size=80), min_size=1, max_size=40).map(
    lambda values: sorted(values.items())
)


@given(VALUES)
def test_what_was_packed_is_found(values: list[tuple[int, bytes]]) -> None:
    """Each value is where the blob file's own directory says."""
    encoded = packed(values)
    directory = check_blob_file(encoded.data)
    assert [entry.position for entry in directory] == [position for position, _ in values]
    assert [encoded.data[byte : byte + size] for _, byte, size, _ in directory] == [stored for _, stored in values]
    assert [entry.crc for entry in directory] == [crc32(stored) for _, stored in values]
    assert encoded == pack_by_hand(values)[:2]


def test_every_flipped_bit_is_noticed() -> None:
    """Every byte of a blob file is covered, and the error names the file."""
    good = packed([(number * 10, b"value-%d" % number) for number in range(7)]).data
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptionError) as caught:
            check_blob_file(bytes(bad), "the-blob file")
        assert str(caught.value.path) == "the-blob file"


def test_a_file_of_another_size_is_refused() -> None:
    """Cut short anywhere, or with a byte more."""
    good = packed([(number, b"value") for number in range(5)]).data
    for data in (b"", good[:-1], good + b"x", good[:12]):
        with pytest.raises(CorruptionError):
            check_blob_file(data)


@pytest.mark.parametrize("values", [[], [(1, b"")]])
def test_values_that_cannot_be_a_pack(values: list[tuple[int, bytes]]) -> None:
    """None at all, or an empty one."""
    with pytest.raises(InputError):
        packed(values)
