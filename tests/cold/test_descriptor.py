"""Descriptors: what does not hold together is refused by name, and the index leads to the right bytes."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.codec import MAX_OFFSET
from tidelog.cold.catalog import Descriptor, Reservation, decode_descriptor, encode_descriptor
from tidelog.errors import DataError
from tidelog.store.keys import ObjectId

KEY = "tidelog/storage/topics/shop/orders/segments/00000000000000000100"


def good() -> dict[str, Any]:
    return {
        "completed": True,
        "object_id": "data-100-199-e3.tlog",
        "start_offset": 100,
        "end_offset": 199,
        "first_time_us": 5,
        "last_time_us": 9,
        "reached_time_us": 12,
        "size": 5000,
        "raw_size": 6000,
        "etag": "x",
        "checksum": "crc32:00000000",
        "codec": "zstd",
        "epoch": 3,
        "created_us": 1,
        "log_id": "0f1e2d3c4b5a69788796a5b4c3d2e1f0",
        "offset_index": [[100, 36], [150, 2000], [180, 4000]],
    }


def decode(document: object) -> Descriptor | Reservation:
    return decode_descriptor(json.dumps(document).encode(), KEY, 100)


def test_a_descriptor_survives_its_json() -> None:
    """What is encoded is decoded again, with everything in it."""
    descriptor = decode(good())
    assert isinstance(descriptor, Descriptor)
    assert decode_descriptor(encode_descriptor(descriptor), KEY, 100) == descriptor
    assert (descriptor.next_offset, descriptor.count) == (200, 100)
    assert descriptor.name == ObjectId(100, 199, 3)


def test_a_reservation_survives_its_json() -> None:
    """A place that is held is told apart from an object."""
    reservation = Reservation(start_offset=100, epoch=7)
    assert decode_descriptor(encode_descriptor(reservation), KEY, 100) == reservation
    with pytest.raises(DataError, match="its offset"):
        decode_descriptor(encode_descriptor(reservation), KEY, 99)


WRONG: list[tuple[str, object]] = [
    ("start_offset", 99),
    ("start_offset", -100),
    ("start_offset", "100"),
    ("end_offset", 99),
    ("end_offset", 200),
    ("end_offset", MAX_OFFSET + 1),
    ("end_offset", (1 << 64) - 1),
    ("end_offset", 1 << 200),
    ("end_offset", None),
    ("epoch", 4),
    ("epoch", -3),
    ("object_id", "data-100-198-e3.tlog"),
    ("object_id", "data-0100-199-e3.tlog"),
    ("object_id", "../data-100-199-e3.tlog"),
    ("object_id", "data-100-199-e3.tlog\n"),
    ("object_id", ""),
    ("size", 0),
    ("size", -1),
    ("size", 4000),
    ("size", 5000.5),
    ("raw_size", 0),
    ("raw_size", -6000),
    ("epochs", []),
    ("epochs", [[101, 3]]),
    ("epochs", [[100, 2]]),
    ("epochs", [[100, 2], [150, 2], [160, 3]]),
    ("epochs", [[100, 1], [100, 3]]),
    ("epochs", [[100, 1], [200, 3]]),
    ("epochs", [[100, 4], [150, 3]]),
    ("codec", "lz4"),
    ("codec", None),
    ("completed", "yes"),
    ("completed", None),
    ("etag", 5),
    ("checksum", None),
    ("first_time_us", "now"),
    ("first_time_us", 10),
    ("first_time_us", None),
    ("last_time_us", None),
    ("last_time_us", 13),
    ("reached_time_us", None),
    ("reached_time_us", 8),
    ("offset_index", []),
    ("offset_index", None),
    ("offset_index", [[101, 0]]),
    ("offset_index", [[100, 1]]),
    ("offset_index", [[150, 2000]]),
    ("offset_index", [[100, 0], [100, 2000]]),
    ("offset_index", [[100, 0], [150, 0]]),
    ("offset_index", [[100, 0], [150, 2000], [140, 3000]]),
    ("offset_index", [[100, 0], [150, 2000], [160, 1000]]),
    ("offset_index", [[100, 0], [200, 2000]]),
    ("offset_index", [[100, 0], [150, 5000]]),
    ("offset_index", [[100, 0], [150, -1]]),
    ("offset_index", [[100, 0, 0]]),
    ("offset_index", [[100, "0"]]),
    ("offset_index", {"100": 0}),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_what_does_not_hold_together_is_refused(field: str, value: object) -> None:
    """Each invariant by itself: the error names the key and how to make it anew."""
    with pytest.raises(DataError, match=KEY) as raised:
        decode({**good(), field: value})
    assert "rebuild-catalog" in str(raised.value)


@pytest.mark.parametrize("field", sorted(good()))
def test_a_field_that_is_missing_is_refused(field: str) -> None:
    """Nothing has a default: half a descriptor is none."""
    document = good()
    del document[field]
    with pytest.raises(DataError, match="cannot be understood"):
        decode(document)


HOSTILE = [
    b"",
    b"null",
    b"[]",
    b"7",
    b'"text"',
    b"\xff\xfe",
    b"{",
    b'{"completed": true',
    b'{"completed": true}',
    b'{"completed": false}',
    b'{"completed": false, "start_offset": 1e400, "epoch": 1}',
    b'{"completed": true, "etag": "\xff"}',
    b'{"completed": true, "x": ' + b"[" * 100_000,
    b'{"completed": true, "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b"{" + b'"a":{' * 50_000,
    json.dumps(good()).encode() + b"x",
    b"\x00" * 1000,
]


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_bytes_are_refused(data: bytes) -> None:
    """Whatever is under the key, it is a DataError or something that holds together."""
    with pytest.raises(DataError, match="cannot be understood"):
        decode_descriptor(data, KEY, 100)


@given(data=st.binary(max_size=60))
def test_random_bytes_raise_nothing_else(data: bytes) -> None:
    """No other error gets out."""
    with pytest.raises(DataError):
        decode_descriptor(data, KEY, 100)


@given(data=st.data())
def test_one_changed_byte_is_refused_or_holds_together(data: st.DataObject) -> None:
    """A byte that was changed at rest never gives a descriptor that contradicts itself."""
    encoded = bytearray(json.dumps(good()).encode())
    encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode_descriptor(bytes(encoded), KEY, 100)
    except DataError:
        return
    if isinstance(found, Descriptor):
        assert found.object_id == str(found.name)
        assert found.offset_index[0] == (found.start_offset, 36)
        assert found.offset_index[-1][1] < found.size


def test_unknown_fields_of_a_later_version_are_left_alone() -> None:
    """What a newer tidelog adds does not keep an older one from reading."""
    assert decode({**good(), "added_later": {"a": [1, 2]}}) == decode(good())


def test_messages_without_times_have_none() -> None:
    """No times at all is fine, also behind objects that had some."""
    timeless = {**good(), "first_time_us": None, "last_time_us": None}
    for document in (timeless, {**timeless, "reached_time_us": None}):
        assert isinstance(decode(document), Descriptor)


@st.composite
def indexed(draw: st.DrawFn) -> Descriptor:
    steps = draw(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 5000)), max_size=12))
    offset, position, index = 100, 36, [(100, 36)]
    for offsets, size in steps:
        offset, position = offset + offsets, position + size
        index.append((offset, position))
    end = offset + draw(st.integers(0, 50))
    name = ObjectId(100, end, 3)
    changed = {"end_offset": end, "object_id": str(name), "size": position + draw(st.integers(1, 5000))}
    found = decode({**good(), **changed, "offset_index": index})
    assert isinstance(found, Descriptor)
    return found


@given(descriptor=indexed(), data=st.data())
def test_the_index_leads_to_the_right_bytes(descriptor: Descriptor, data: st.DataObject) -> None:
    """Reading begins at the last entry that is not behind the offset and ends at the first that is."""
    offset = data.draw(st.integers(descriptor.start_offset, descriptor.end_offset))
    before = [entry for entry in descriptor.offset_index if entry[0] <= offset]
    behind = [entry for entry in descriptor.offset_index if entry[0] > offset]
    assert descriptor.position_of(offset) == before[-1]
    assert descriptor.end_of(offset) == (behind[0][1] if behind else descriptor.size)
    assert descriptor.position_of(offset)[1] < descriptor.end_of(offset)


def test_a_descriptor_cannot_be_changed() -> None:
    """It is a value: a changed one is another one."""
    descriptor = decode(good())
    with pytest.raises(AttributeError):
        descriptor.epoch = 9  # type: ignore[misc]  # that is the point
    assert msgspec.structs.replace(descriptor, epoch=9) != descriptor


@pytest.mark.parametrize("start", [MAX_OFFSET + 1, (1 << 64) - 1])
def test_an_object_behind_all_offsets_is_refused_by_its_key(start: int) -> None:
    """Without this a catalog could send readers, and Spark, to offsets that they have no numbers for."""
    key = f"segments/{start:020d}"
    beyond = {**good(), "start_offset": start, "end_offset": start, "object_id": f"data-{start}-{start}-e3.tlog"}
    with pytest.raises(DataError, match=f"{key} .*end_offset is {start}"):
        decode_descriptor(json.dumps(beyond).encode(), key, start)
    with pytest.raises(DataError, match=f"{key} .*its offset is {start + 1}"):
        decode_descriptor(encode_descriptor(Reservation(start_offset=start + 1, epoch=7)), key, start + 1)
