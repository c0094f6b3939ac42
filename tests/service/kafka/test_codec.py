"""Every message of every version: against another implementation, back and forth, and with hostile bytes."""

from __future__ import annotations

import dataclasses
import importlib
import io
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode as OtherErrorCode
from kio.serial import entity_reader, entity_writer
from scripts.kafka_codec.generate import Api, Field, MessageFacts, module_text, present
from scripts.kafka_codec.generate import main as generate
from tests.campaign import examples
from tests.service.kafka.random_messages import APIS, CASES, make, module_of, plain

from tidelog.service.kafka import codec
from tidelog.service.kafka.codec import RequestHeader, UnsupportedVersionError
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.primitives import ZERO_UUID, Buffer, ProtocolError, put_tags, put_uvarint, read_uvarint

NAMES = [f"{message.name}-{version}" for _, message, version in CASES]
every_message = pytest.mark.parametrize(("api", "message", "version"), CASES, ids=NAMES)
seeds = st.integers(0, 1 << 32).map(random.Random)


def encode(api: Api, message: MessageFacts, version: int, value: Any) -> bytes:
    out = bytearray()
    getattr(module_of(api), f"ENCODE_{message.kind.upper()}")[version](value, out)
    return bytes(out)


def decode(api: Api, message: MessageFacts, version: int, data: Buffer) -> Any:
    function = getattr(module_of(api), f"DECODE_{message.kind.upper()}")[version]
    found, at = function(data, 0, len(data))
    assert at == len(data)
    return found


def other_class(api: Api, message: MessageFacts, version: int) -> Any:
    """The class of kio."""
    module = importlib.import_module(f"kio.schema.{api.name}.v{version}.{message.kind}")
    return getattr(module, message.name)


def compare(fields: list[Field], version: int, ours: Any, theirs: Any) -> None:
    """Every field, by its name; kio drops `_ms` where it has types for times."""
    names = {field.name for field in dataclasses.fields(theirs)}
    assert len(names) == len(present(fields, version))
    for one in present(fields, version):
        name = one.name if one.name in names else re.sub("_ms$", "", one.name)
        mine, other = getattr(ours, one.name), plain(getattr(theirs, name))
        if one.class_name and mine is not None:
            pairs = zip(mine, other, strict=True) if one.is_array else [(mine, other)]
            for own, foreign in pairs:
                compare(one.fields, version, own, foreign)
        elif one.element == "uuid" and not one.is_array:
            assert (other or ZERO_UUID) == mine
        elif other is None and name != one.name:
            assert mine == -1
        else:
            assert other == mine, one.name


@every_message
@settings(max_examples=examples(3))
@given(chance=seeds)
def test_another_implementation_reads_and_writes_the_same(
    api: Api, message: MessageFacts, version: int, chance: random.Random
) -> None:
    """What kio reads from our bytes are our values, and what it writes of them are our bytes."""
    value = make(api, message, version, chance)
    data = encode(api, message, version, value)
    kind = other_class(api, message, version)
    found, size = entity_reader(kind)(data, 0)
    assert size == len(data)
    compare(message.fields, version, value, found)
    again = io.BytesIO()
    entity_writer(kind)(again, found)
    assert again.getvalue() == data


@every_message
@settings(max_examples=examples(5))
@given(chance=seeds)
def test_what_is_encoded_is_decoded(api: Api, message: MessageFacts, version: int, chance: random.Random) -> None:
    """Back and forth nothing changes, from bytes and from a memoryview."""
    value = make(api, message, version, chance)
    data = encode(api, message, version, value)
    assert decode(api, message, version, data) == value
    assert encode(api, message, version, decode(api, message, version, memoryview(data))) == data


@every_message
@settings(max_examples=examples(5))
@given(chance=seeds)
def test_hostile_bytes_are_refused_and_nothing_else_happens(
    api: Api, message: MessageFacts, version: int, chance: random.Random
) -> None:
    """Cut, changed and random bytes give an object or an error that the codec knows."""
    data = bytearray(encode(api, message, version, make(api, message, version, chance)))
    for _ in range(20):
        hostile = bytearray(data)
        for _ in range(chance.randrange(0, 4)):
            if hostile:
                hostile[chance.randrange(len(hostile))] = chance.choice((0, 1, 127, 128, 255, chance.randrange(256)))
        del hostile[chance.randrange(len(hostile) + 1) :]
        function = getattr(module_of(api), f"DECODE_{message.kind.upper()}")[version]
        try:
            function(bytes(hostile), 0, len(hostile))
        except (ProtocolError, *codec._DAMAGE):
            pass


@pytest.mark.parametrize("version", range(4, 13))
@settings(max_examples=examples(10))
@given(chance=seeds)
def test_a_fetch_is_answered_by_a_list_of_buffers(version: int, chance: random.Random) -> None:
    """Joined they are the same answer; the records in it are the objects that were given."""
    facts = next(api for api in APIS if api.name == "fetch")
    response = make(facts, facts.messages[1], version, chance)
    header = RequestHeader(1, version, 77, None, 0)
    whole = bytes(codec.encode_response(header, response))
    given_buffers = []
    for partition in (one for topic in response.responses for one in topic.partitions):
        if partition.records is not None:
            cut = len(partition.records) // 2
            partition.records = [partition.records[:cut], memoryview(partition.records)[cut:]]
            given_buffers += partition.records
    parts = codec.gather_response(header, response)
    assert b"".join(parts) == whole
    assert {id(one) for one in given_buffers} <= {id(one) for one in parts}


def test_records_of_a_produce_are_views_of_the_request() -> None:
    """A megabyte is not copied on its way through the codec."""
    produce = codec.wire(0)
    data = produce.ProduceRequestPartitionProduceData(index=3, records=bytes(1 << 20))
    request = produce.ProduceRequest(
        topic_data=[produce.ProduceRequestTopicProduceData(name="a/b", partition_data=[data])]
    )
    frame = memoryview(bytes(codec.encode_request(0, 9, 1, "c", request)))[4:]
    found = codec.decode_request(codec.decode_header(frame), frame)
    records = found.topic_data[0].partition_data[0].records
    assert isinstance(records, memoryview)
    assert records.obj is frame.obj
    assert len(records) == 1 << 20


def test_huge_counts_are_refused_before_anything_is_made_of_them() -> None:
    """A count of two billion in a request of 30 bytes costs nothing."""
    body = b"\xff\xff\xff\xff\x07" + bytes(20)
    frame = bytes.fromhex("0003 000c 00000001 ffff 00".replace(" ", "")) + body
    with pytest.raises(ProtocolError, match="more elements than fit"):
        codec.decode_request(codec.decode_header(frame), frame)


def test_a_generated_module_checks_counts_before_it_uses_them() -> None:
    """What the generator writes now, not what the last build made of it."""
    metadata = next(api for api in APIS if api.name == "metadata")
    made: dict[str, Any] = {"__name__": "generated"}
    exec(compile(module_text(metadata), "generated", "exec"), made)
    with pytest.raises(ProtocolError, match="more elements than fit"):
        made["DECODE_REQUEST"][12](b"\xff\xff\xff\xff\x07" + bytes(20), 0, 25)


def test_the_build_is_what_the_generator_makes_now(tmp_path: Path) -> None:
    """A build that is older than `messages.txt` would speak another protocol than the tests think."""
    generate(tmp_path)
    built = Path(codec.__file__).with_name("wire")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted(path.name for path in built.glob("api_*.py"))
    assert all((tmp_path / name).read_text("utf-8") == (built / name).read_text("utf-8") for name in names)


def test_unknown_tagged_fields_are_skipped() -> None:
    """A newer client may say more than this broker understands."""
    heartbeat = codec.wire(12)
    out = bytearray()
    heartbeat.ENCODE_REQUEST[4](heartbeat.HeartbeatRequest("g", 3, "m"), out)
    del out[-1]
    put_tags(out, [(0, bytearray(b"abc")), (77, bytearray(300)), (4000, bytearray())])
    head = bytearray(b"\x00\x0c\x00\x04\x00\x00\x00\x09\x00\x01c")
    put_tags(head, [(5, bytearray(b"x"))])
    frame = bytes(head + out)
    header = codec.decode_header(frame)
    assert header[:4] == (12, 4, 9, "c")
    assert codec.decode_request(header, frame) == heartbeat.HeartbeatRequest("g", 3, "m")


def test_requests_and_answers_go_both_ways() -> None:
    """A client's request is read by the broker, and the broker's answer by the client."""
    for key, api in codec.APIS.items():
        module = codec.wire(key)
        facts = next(one for one in APIS if one.key == key)
        for version in range(api.accepts_from or api.first, api.last + 1):
            request, response = (make(facts, message, version, random.Random(version)) for message in facts.messages)
            frame = bytes(codec.encode_request(key, version, 7, "me", request))
            header = codec.decode_header(frame[4:])
            assert header[:4] == (key, version, 7, "me")
            assert codec.decode_request(header, frame[4:]) == request
            answer = bytes(codec.encode_response(header, response))
            assert int.from_bytes(answer[:4], "big") == len(answer) - 4
            assert codec.decode_response(key, version, answer[4:]) == (7, response)
        assert set(range(api.accepts_from or api.first, api.last + 1)) <= set(module.DECODE_REQUEST)


def test_headers_equal_those_of_another_implementation() -> None:
    """With and without a client id, flexible and not."""
    for version in (1, 2):
        header_class = importlib.import_module(f"kio.schema.request_header.v{version}.header").RequestHeader
        for client_id in (None, "", "äb"):
            out = io.BytesIO()
            entity_writer(header_class)(
                out,
                header_class(
                    request_api_key=12,
                    request_api_version=4 if version == 2 else 3,
                    correlation_id=-5,
                    client_id=client_id,
                ),
            )
            header = codec.decode_header(out.getvalue())
            assert header == RequestHeader(12, 4 if version == 2 else 3, -5, client_id, len(out.getvalue()))


def test_an_unknown_version_of_api_versions_is_answered_in_the_form_of_version_0() -> None:
    """A client that begins with a version from the future learns what is spoken here."""
    frame = b"\x00\x12\x00\x63\x00\x00\x00\x05\x00\x03abc\x00garbage"
    header = codec.decode_header(frame)
    with pytest.raises(UnsupportedVersionError) as caught:
        codec.decode_request(header, frame)
    answer = bytes(codec.encode_fallback(caught.value.header))
    assert answer == bytes.fromhex("00000010 00000005 0023 00000001 0012 0000 0004")
    correlation_id, response = codec.decode_response(18, 0, answer[4:])
    assert (correlation_id, response.error_code) == (5, 35)


def test_unknown_apis_and_versions_are_refused_with_their_header() -> None:
    """The server needs the header to answer or to log."""
    for key, version in ((999, 0), (0, 2), (0, 13), (1, 3), (11, -1)):
        frame = codec._HEAD.pack(key, version, 1, -1)
        header = codec.decode_header(frame)
        with pytest.raises(UnsupportedVersionError):
            codec.decode_request(header, frame)


def test_produce_is_advertised_from_version_0() -> None:
    """Otherwise librdkafka 2.0 stops compressing without a word."""
    offered = {one.api_key: (one.min_version, one.max_version) for one in codec.api_versions().api_keys}
    assert offered[0] == (0, 12)
    assert offered == {key: (api.first, api.last) for key, api in codec.APIS.items()}


def test_short_headers_are_refused() -> None:
    """A frame of less than a header, and a client id that runs past the end."""
    for frame in (b"", b"\x00", bytes(9), codec._HEAD.pack(12, 4, 1, 100) + b"abc", codec._HEAD.pack(12, 4, 1, -1)):
        with pytest.raises(ProtocolError):
            codec.decode_header(frame)


@given(number=st.integers(0, (1 << 32) - 1))
def test_numbers_of_variable_length_are_read_back(number: int) -> None:
    """All of 32 bits."""
    out = bytearray()
    put_uvarint(out, number)
    assert read_uvarint(out, 0) == (number, len(out))


def test_numbers_of_variable_length_have_32_bits() -> None:
    """More bits than that are an attack or a mistake."""
    for data in (b"\xff\xff\xff\xff\x1f", b"\x80\x80\x80\x80\x80\x01", b"\x80\x80\x80\x80\x80\x00"):
        with pytest.raises(ProtocolError):
            read_uvarint(data, 0)


def test_error_codes_are_those_of_kafka() -> None:
    """Names and numbers, compared with another implementation."""
    theirs = {int(one.value): one.name.upper() for one in OtherErrorCode}
    assert {one.value: one.name for one in ErrorCode} == {one.value: theirs[one.value] for one in ErrorCode}


def test_consumers_metadata_is_read() -> None:
    """What consumers say inside of JoinGroup, with a version that is newer than the known ones."""
    module = importlib.import_module("tidelog.service.kafka.wire.api_consumer_protocol_subscription")
    out = bytearray(b"\x00\x01")
    value = module.ConsumerProtocolSubscription(topics=["a", "b"], user_data=b"x")
    module.ENCODE_MESSAGE[1](value, out)
    assert codec.decode_data("consumer_protocol_subscription", bytes(out)) == value
    module.ENCODE_MESSAGE[3](value, newer := bytearray(b"\x00\x63"))
    assert codec.decode_data("consumer_protocol_subscription", bytes(newer)) == value
    for hostile in (b"", b"\x00", b"\xff\xff", b"\x00\x01\x00\x00\x00\xff"):
        with pytest.raises(ProtocolError):
            codec.decode_data("consumer_protocol_subscription", hostile)
