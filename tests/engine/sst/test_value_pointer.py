"""Places and the rows of indexes: what goes in comes out, and anything else is refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.engine.sst.blob_file import (
    BlobPointer,
    FilePointer,
    Place,
    cell_of,
    decode_value_pointer,
    decode_version,
    encode_value_pointer,
    encode_version,
    position_of,
    value_key,
)
from tidelog.errors import DataError, InputError
from tidelog.store.keys import data_name

U32, U64, CODECS = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.integers(0, 1)
TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
FILES = st.builds(
    lambda codec, size, *value: FilePointer(codec, size, data_name(*value) or ""), CODECS, U32, TEXT, TEXT, U64
)
PLACES = st.one_of(st.builds(BlobPointer, CODECS, U32, U64, U32), FILES)


@given(PLACES)
def test_a_place_is_what_it_was(place: Place) -> None:
    """In a blob file or a file of its own."""
    assert decode_value_pointer(encode_value_pointer(place)) == place


@given(st.binary(min_size=1, max_size=600), st.none() | PLACES)
def test_a_version_is_what_it_was(cell: bytes, place: Place | None) -> None:
    """The cell unchanged, with a place or without."""
    value = encode_version(cell, place)
    assert decode_version(value) == (cell, place)
    assert cell_of(value) == cell


@given(U64, U64)
def test_positions_are_in_order_as_keys(one: int, other: int) -> None:
    """Compared byte by byte, as row files do it."""
    assert (value_key(one) < value_key(other)) == (one < other)
    assert position_of(value_key(one)) == one


@given(st.binary(max_size=60))
def test_other_bytes_are_refused(data: bytes) -> None:
    """As DataError, or they are what would have been written."""
    with contextlib.suppress(DataError):
        assert encode_value_pointer(decode_value_pointer(data)) == data
    with contextlib.suppress(DataError):
        cell, place = decode_version(data)
        assert encode_version(cell, place) == data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 18,
        b"\3" + bytes(17),
        encode_value_pointer(BlobPointer(0, 1, 2, 3))[:-1],
        encode_value_pointer(BlobPointer(0, 1, 2, 3)) + b"\0",
        encode_value_pointer(BlobPointer(7, 1, 2, 3)),
        encode_value_pointer(FilePointer(0, 3, "../../owner")),
        encode_value_pointer(FilePointer(0, 3, "b/k/v7.dat")),
        encode_value_pointer(FilePointer(0, 3, "b/ü/v0000000007.dat")),
        encode_value_pointer(FilePointer(0, 3, "")),
    ],
)
def test_bad_places(data: bytes) -> None:
    """Unknown kinds and codecs, other lengths, and names that lead elsewhere."""
    with pytest.raises(DataError):
        decode_value_pointer(data)


@pytest.mark.parametrize("value", [b"", b"\1", b"\0\0", b"\0\0abc", b"\4\0abc"])
def test_bad_versions(value: bytes) -> None:
    """A row has a cell, and all of it."""
    with pytest.raises(DataError):
        decode_version(value)
    with pytest.raises(DataError):
        cell_of(value)


def test_what_is_too_large_is_not_written() -> None:
    """A cell has two bytes for its length; a position has eight bytes."""
    with pytest.raises(InputError):
        encode_version(bytes(70_000), None)
    with pytest.raises(DataError):
        position_of(b"short")
