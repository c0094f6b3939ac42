"""Messages of Danube: decoding what it writes, refusing everything else, and what becomes of them in a topic."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.danube.danube_bytes import (
    BINCODE_1_VECTOR,
    OLDER_VECTOR,
    PUBLISHED_MS,
    VECTOR,
    VECTOR_MESSAGE,
    attributes,
    encode_bincode_1,
    encode_fields,
    encode_message,
    sent,
    text,
)

from tidelog.errors import CorruptionError
from tidelog.imports.danube.message import DanubeMessage, decode_danube_message, to_message
from tidelog.log.frame import scan

U64 = st.integers(0, (1 << 64) - 1) | st.sampled_from([0, 250, 251, 65535, 65536, (1 << 32) - 1, 1 << 32])
U32 = st.integers(0, (1 << 32) - 1)
MESSAGES = st.builds(
    DanubeMessage,
    request_id=U64,
    producer_id=U64,
    topic_name=st.text(),
    broker_addr=st.text(),
    topic_offset=U64,
    payload=st.binary(max_size=400),
    publish_time=U64,
    producer_name=st.text(),
    subscription_name=st.none() | st.text(),
    attributes=st.dictionaries(st.text(), st.text()),
    schema_id=st.none() | U64,
    schema_version=st.none() | U32,
    routing_key=st.none() | st.text(),
)
OF_0_5 = {"schema_id": None, "schema_version": None, "routing_key": None}
FIELD_NAMES = [field.name for field in msgspec.structs.fields(DanubeMessage)]


def decode(data: bytes, offset: int = 70000) -> DanubeMessage:
    return decode_danube_message(data, offset, "wal.log", 16)


def refused(data: bytes, offset: int = 70000) -> CorruptionError:
    """The error that these bytes end in."""
    with pytest.raises(CorruptionError) as caught:
        decode(data, offset)
    assert str(caught.value.path) == "wal.log"
    assert 16 <= caught.value.byte <= 16 + len(data)
    return caught.value


def with_field(name: str, data: bytes) -> bytes:
    """The vector with other bytes in the place of one field."""
    fields = encode_fields(VECTOR_MESSAGE)
    fields[FIELD_NAMES.index(name)] = data
    return b"".join(fields)


def changed(**values: Any) -> DanubeMessage:
    return msgspec.structs.replace(VECTOR_MESSAGE, **values)


def test_the_vector_is_read() -> None:
    """The frame that the format describes gives the message that it stands for."""
    result = scan(VECTOR, 0, 70000, payload_only=True)
    assert (result.frames.count, result.end) == (1, len(VECTOR))
    assert decode(result.frames.payloads()[0]) == VECTOR_MESSAGE
    assert VECTOR[16:] == encode_message(VECTOR_MESSAGE)


@given(MESSAGES)
def test_every_message_is_read_as_it_was_written(message: DanubeMessage) -> None:
    """Decoding undoes encoding, whatever the fields hold."""
    assert decode(encode_message(message), message.topic_offset) == message


@given(MESSAGES)
def test_every_message_of_bincode_1_is_read_as_it_was_written(message: DanubeMessage) -> None:
    """So it is with what Danube 0.5.0 wrote, and nobody has to say that it did."""
    older = msgspec.structs.replace(message, **OF_0_5)
    assert decode(encode_bincode_1(older), older.topic_offset) == older


@given(st.binary(max_size=200) | MESSAGES.map(encode_bincode_1))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    """Bytes that are no message raise CorruptionError and nothing else; those that are one have this one spelling."""
    check_read_or_refused(data)


def check_read_or_refused(data: bytes) -> None:
    try:
        message = decode(data)
    except CorruptionError:
        return
    spellings = encode_message(message), encode_bincode_1(message)
    assert data in (*spellings, spellings[0][:-1], spellings[0][:-3])


@given(MESSAGES, st.data())
def test_damage_in_bincode_1_is_read_or_refused(message: DanubeMessage, data: st.DataObject) -> None:
    """A changed byte, and a cut, give a message that is spelled so, or CorruptionError; no length is believed."""
    whole = bytearray(encode_bincode_1(message))
    whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    check_read_or_refused(bytes(whole))
    check_read_or_refused(bytes(whole[: data.draw(st.integers(0, len(whole)))]))


@pytest.mark.parametrize("subscription", [None, "s"])
def test_the_vectors_of_older_versions_are_read(subscription: str | None) -> None:
    """What the bincode of Danube 0.5.0 and that of 0.5.1 make of one message is that message."""
    message = changed(subscription_name=subscription, **OF_0_5)
    assert decode(BINCODE_1_VECTOR[subscription]) == decode(OLDER_VECTOR[subscription]) == message
    assert encode_bincode_1(message) == BINCODE_1_VECTOR[subscription]


def test_a_message_that_ends_anywhere_is_refused() -> None:
    """Cut at any byte it is no message, except in front of fields that were added later, where older ones end."""
    data = encode_message(changed(subscription_name="s", schema_version=70000))
    fields = encode_fields(changed(subscription_name="s", schema_version=70000))
    older = {len(b"".join(fields[:count])) for count in (10, 12)}
    for size in set(range(len(data))) - older:
        assert "Danube" in refused(data[:size]).message
    whole = BINCODE_1_VECTOR["s"]
    for size in range(16, len(whole)):  # in its first two numbers there are small messages in bincode 2
        assert "Danube" in refused(whole[:size]).message


@pytest.mark.parametrize(
    ("count", "missing"), [(12, ["routing_key"]), (10, ["schema_id", "schema_version", "routing_key"])]
)
def test_an_older_message_has_fewer_fields(count: int, missing: list[str]) -> None:
    """A message of 0.6 to 0.11 ends before routing_key, one of 0.5 before schema_id: both are whole."""
    data = b"".join(encode_fields(VECTOR_MESSAGE)[:count])
    assert decode(data) == changed(**dict.fromkeys(missing))


# In bincode 2 a message whose payload is all but the first bytes, in bincode 1 one with a strange request id.
BOTH = (63 << 40).to_bytes(8, "little") + bytes(65)


def test_what_fits_in_both_ways_has_its_offset_right_in_one() -> None:
    """Danube writes the offset of the frame into each message; a reading with another one is by chance."""
    at_7 = BOTH[:32] + (7).to_bytes(8, "little") + BOTH[40:]
    assert (decode(at_7, 7).request_id, decode(at_7, 7).payload) == (63 << 40, b"")
    assert (decode(at_7, 0).request_id, decode(at_7, 0).payload) == (0, at_7[6:69])


@pytest.mark.parametrize("offset", [0, 5])
def test_what_fits_in_both_ways_alike_is_refused(offset: int) -> None:
    """Nobody can tell what was sent where both readings have the offset, or none has: the byte is named."""
    error = refused(BOTH, offset)
    assert "in bincode 1 and a different one in bincode 2" in error.message
    assert error.byte == 16


@pytest.mark.parametrize(
    ("byte", "change", "reason"),
    [
        (24, b"\xff", "topic_name is not UTF-8"),
        (42, b"\xff", "payload says that it has"),
        (69, b"\x02", "neither there (1) nor not there (0): 2"),
        (70, b"\x02", "the message ends in the middle of attributes"),
    ],
)
def test_what_danube_0_5_0_does_not_write_is_refused(byte: int, change: bytes, reason: str) -> None:
    """The error is that of the way in which most of the message fits, with the byte where it ends to fit."""
    whole = BINCODE_1_VECTOR[None]
    damaged = whole[:byte] + change + whole[byte + 1 :]
    error = refused(damaged)
    assert reason in error.message
    assert "3 bytes after the last known field" in refused(whole + b"\0\0\0").message


@pytest.mark.parametrize(
    ("field", "data", "reason"),
    [
        ("request_id", b"\xfb\xfa\x00", "more bytes than it needs"),
        ("request_id", b"\xfc\xff\xff\x00\x00", "more bytes than it needs"),
        ("request_id", b"\xfd" + b"\xff\xff\xff\xff\x00\x00\x00\x00", "more bytes than it needs"),
        ("request_id", b"\xfe" + bytes(16), "begins with 254"),
        ("request_id", b"\xff", "begins with 255"),
        ("topic_name", b"\x02\xc3\x28", "topic_name is not UTF-8"),
        ("broker_addr", b"\x03\xed\xa0\x80", "broker_addr is not UTF-8"),
        ("payload", b"\xfd" + b"\xff" * 8, "says that it has 18446744073709551615 bytes"),
        ("producer_name", b"\xfc\xff\xff\xff\x7f", "says that it has 2147483647 bytes"),
        ("subscription_name", b"\x02", "neither there (1) nor not there (0): 2"),
        ("attributes", b"\xfd" + b"\xff" * 8, "attributes"),
        ("attributes", attributes([("k", "a"), ("k", "b")]), "a name twice"),
        ("attributes", b"\x01\x01k\x01\xff", "attributes is not UTF-8"),
        ("schema_version", b"\x01\xfd" + b"\x00\x00\x00\x00\x01\x00\x00\x00", "does not fit in 32 bits"),
        ("routing_key", b"\x01" + text("rk") + b"\x00", "1 bytes after the last known field"),
    ],
)
def test_what_danube_does_not_write_is_refused(field: str, data: bytes, reason: str) -> None:
    """Over-long numbers, huge lengths, bad UTF-8 and the like are named, with the byte where they are."""
    assert reason in refused(with_field(field, data)).message


def test_the_error_names_the_byte() -> None:
    """The byte is that of the field in the file, not in the message."""
    assert refused(with_field("producer_id", b"\xff")).byte == 16 + 3


def test_what_has_a_place_in_our_messages_goes_there() -> None:
    """Value, key, time and attributes are as in Danube; the rest of it is in headers."""
    message = to_message(sent(5), 5, 5)
    assert (message.value, message.key, message.offset) == (b"message 5", b"customer-5", 5)
    assert message.timestamp == datetime(2024, 7, 3, 9, 46, 40, 5000, tzinfo=UTC)
    assert message.headers == {
        "source": b"web",
        "danube-request-id": b"1005",
        "danube-producer-id": b"7",
        "danube-topic-name": b"/default/orders",
        "danube-broker-addr": b"http://broker:6650",
        "danube-producer-name": b"till",
    }


def test_what_is_not_set_makes_no_header() -> None:
    """Zero and empty fields leave nothing; an optional field that is there does, though it is zero or empty."""
    empty = changed(request_id=0, producer_id=0, topic_name="", broker_addr="", producer_name="", attributes={})
    bare = to_message(msgspec.structs.replace(empty, schema_id=None, routing_key=None), 70000, 70000)
    assert (bare.headers, bare.key) == ({}, None)
    there = to_message(
        msgspec.structs.replace(empty, subscription_name="", schema_id=0, schema_version=0, routing_key=""),
        70000,
        70000,
    )
    assert there.headers == {
        "danube-subscription-name": b"",
        "danube-schema-id": b"0",
        "danube-schema-version": b"0",
    }
    assert there.key == b""


def test_attributes_are_not_confused_with_our_headers() -> None:
    """An attribute that is called like one of our headers is kept beside it, under a name that says what it is."""
    names = {"danube-producer-name": "x", "danube-attribute-a": "y", "danube-color": "blue"}
    headers = to_message(changed(attributes=names), 70000, 70000).headers
    assert headers["danube-producer-name"] == b"p"
    assert headers["danube-attribute-danube-producer-name"] == b"x"
    assert headers["danube-attribute-danube-attribute-a"] == b"y"
    assert headers["danube-color"] == b"blue"


def test_offsets_that_differ_are_kept() -> None:
    """The frame's offset wins; the one in the message, and the one a renumbered message had, are in headers."""
    headers = to_message(VECTOR_MESSAGE, 9, 12).headers
    assert (headers["danube-topic-offset"], headers["danube-offset"]) == (b"70000", b"9")


def test_a_time_that_no_calendar_has_is_kept() -> None:
    """A time behind the year 9999 becomes the last moment of it, and stays whole in a header."""
    message = to_message(changed(publish_time=(1 << 64) - 1), 70000, 70000)
    assert message.timestamp == datetime(9999, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC)
    assert message.headers["danube-publish-time"] == b"18446744073709551615"
    assert "danube-publish-time" not in to_message(changed(publish_time=PUBLISHED_MS), 70000, 70000).headers


@given(MESSAGES, U64, U64)
def test_no_two_messages_become_the_same(message: DanubeMessage, frame_offset: int, offset: int) -> None:
    """Everything that Danube stored can be told from what became of it: nothing is lost on the way."""
    ours = to_message(message, frame_offset, offset)
    headers = dict(ours.headers)

    def taken(name: str) -> str | None:
        value = headers.pop(f"danube-{name}", None)
        return None if value is None else value.decode()

    def number(name: str) -> int | None:
        value = taken(name)
        return None if value is None else int(value)

    assert number("offset") == (None if offset == frame_offset else frame_offset)
    assert ours.timestamp is not None
    milliseconds = round((ours.timestamp - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() * 1000)
    again = DanubeMessage(
        request_id=number("request-id") or 0,
        producer_id=number("producer-id") or 0,
        topic_name=taken("topic-name") or "",
        broker_addr=taken("broker-addr") or "",
        topic_offset=frame_offset if (inner := number("topic-offset")) is None else inner,
        payload=ours.value or b"",
        publish_time=number("publish-time") or milliseconds,
        producer_name=taken("producer-name") or "",
        subscription_name=taken("subscription-name"),
        schema_id=number("schema-id"),
        schema_version=number("schema-version"),
        routing_key=None if ours.key is None else ours.key.decode(),
        attributes={name.removeprefix("danube-attribute-"): value.decode() for name, value in headers.items()},
    )
    assert again == message


def test_the_vector_is_on_the_formats_page() -> None:
    """The page draws the bytes of the vector, field by field."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "formats.md").read_text("utf-8")
    block = page.split("```hex danube\n")[1].split("```")[0]
    lines = [line.split("  ")[0] for line in block.splitlines()]
    assert bytes.fromhex("".join(lines)) == VECTOR
    fields = encode_fields(VECTOR_MESSAGE)
    assert [bytes.fromhex(line) for line in lines[3:]] == fields
    older = page.split("```hex danube bincode 1\n")[1].split("```")[0]
    assert bytes.fromhex("".join(line[:30] for line in older.splitlines())) == BINCODE_1_VECTOR[None]
