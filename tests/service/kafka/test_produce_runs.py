"""Small Produce requests that are looked at together: what is plain, and that nothing else changes for a client."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.oracles import produce_requests as oracle
from tests.oracles.record_batches import Record, put_record
from tests.oracles.record_batches import batch_bytes as batch_of
from tests.service.kafka.test_records import make_batch, producers, read_batches, records
from tests.service.kafka.test_server import (
    FETCH,
    METADATA,
    PRODUCE,
    WAIT_SECONDS,
    Client,
    Running,
    fetch_request,
    fetched,
    play,
    produce_request,
    produced,
)

from tidelog import _native
from tidelog.log.append_queue import AppendQueue
from tidelog.log.frame import MAX_PAYLOAD_BYTES
from tidelog.service.kafka import produce_runs
from tidelog.service.kafka.codec import decode_header, decode_request, decode_response, encode_request, wire
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.partitions import Partition
from tidelog.service.kafka.produce import LaterAnswer, Produce
from tidelog.service.kafka.produce_runs import ProduceRuns
from tidelog.service.kafka.records import Compression, compressed_batch

NOW_MS = 1_700_000_000_000
VERSIONS = st.integers(3, 12)
names = st.text(max_size=12)


def request_of(
    data: bytes, *, topic: str = "shop.orders", index: int = 0, acks: int = -1, timeout_ms: int = 60_000
) -> Any:
    module = wire(PRODUCE)
    partition = module.ProduceRequestPartitionProduceData(index=index, records=data)
    topic_data = module.ProduceRequestTopicProduceData(name=topic, partition_data=[partition])
    return module.ProduceRequest(acks=acks, timeout_ms=timeout_ms, topic_data=[topic_data])


def batch_from(producer: tuple[int, int, int], *values: bytes) -> bytes:
    return make_batch([Record(0, number, None, value, []) for number, value in enumerate(values)], producer)


@st.composite
def sent(draw: st.DrawFn) -> bytes:
    """What a connection sends: plain requests, and some that are not."""
    parts = []
    for _ in range(draw(st.integers(0, 4))):
        attributes = draw(st.sampled_from([0, 0, 0, 0, 1, 0x10, 0x20]))
        request = request_of(
            make_batch(draw(records()), draw(producers), attributes),
            topic=draw(names),
            index=draw(st.integers(-(1 << 31), (1 << 31) - 1)),
            acks=draw(st.integers(-1, 1)),
            timeout_ms=draw(st.integers(0, (1 << 31) - 1)),
        )
        if draw(st.integers(0, 9)) == 0:
            request.transactional_id = draw(names)
        if draw(st.integers(0, 9)) == 0:
            request.topic_data *= 2
        client = draw(st.none() | names)
        parts.append(bytes(encode_request(PRODUCE, draw(VERSIONS), draw(st.integers(0, 1 << 30)), client, request)))
    return b"".join(parts)


@given(received=st.lists(sent(), max_size=4), cut=st.integers(0, 40))
def test_plain_requests_are_those_that_the_oracle_finds(received: list[bytes], cut: int) -> None:
    """In every version, with and without a producer; a request that is cut off is left, and so is what comes after one
    that is not plain."""
    received = [data[: len(data) - cut] if number == 1 else data for number, data in enumerate(received)]
    found = _native.produce_requests(received, MAX_PAYLOAD_BYTES)
    assert found == oracle.produce_requests(received, MAX_PAYLOAD_BYTES)
    batches = [
        (data, one[4], one[5]) for data, (all_of_it, _) in zip(received, found, strict=True) for one in all_of_it
    ]
    made = _native.batches_to_frames(batches, MAX_PAYLOAD_BYTES)
    assert tuple(map(bytes, made)) == oracle.batches_to_frames(batches, MAX_PAYLOAD_BYTES)


@given(data=sent(), changes=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 255)), min_size=1, max_size=3))
def test_of_hostile_bytes_only_what_the_codec_reads_the_same_is_plain(
    data: bytes, changes: list[tuple[int, int]]
) -> None:
    """Whatever was changed on the way."""
    changed = bytearray(data)
    for at, mask in changes:
        if changed:
            changed[at % len(changed)] ^= mask
    received = bytes(changed)
    ((found, end),) = _native.produce_requests([received], MAX_PAYLOAD_BYTES)
    assert 0 <= end <= len(received)
    for key, version, correlation_id, begin, start, stop, *_ in found:
        size = struct.unpack_from(">I", received, begin)[0]
        frame = received[begin + 4 : begin + 4 + size]
        header = decode_header(frame)
        request = decode_request(header, frame)
        (topic,) = request.topic_data
        (part,) = topic.partition_data
        assert (header.api_version, header.correlation_id) == (version, correlation_id)
        assert (topic.name, part.index, request.acks, request.timeout_ms) == key
        assert bytes(part.records) == received[start:stop]
    batches = [(received, one[4], one[5]) for one in found]
    made = _native.batches_to_frames(batches, MAX_PAYLOAD_BYTES)
    assert tuple(map(bytes, made)) == oracle.batches_to_frames(batches, MAX_PAYLOAD_BYTES)


@given(data=st.binary(max_size=200), start=st.integers(0, 210), stop=st.integers(0, 210))
def test_frames_are_made_of_plain_batches_only(data: bytes, start: int, stop: int) -> None:
    """Anything else is an error of the caller, and never a read beyond it."""
    with pytest.raises(ValueError, match=r"plain|sound"):
        _native.batches_to_frames([(data, start, stop)], MAX_PAYLOAD_BYTES)


def test_a_payload_that_is_too_large_is_not_plain() -> None:
    """As `max_message_bytes` of the caller says."""
    data = bytes(encode_request(PRODUCE, 9, 1, "test", request_of(batch_from((-1, -1, -1), b"12345"))))
    ((found, _),) = _native.produce_requests([data], MAX_PAYLOAD_BYTES)
    largest = found[0][10]
    assert _native.produce_requests([data], largest) == [(found, len(data))]
    assert _native.produce_requests([data], largest - 1) == [([], 0)]


@given(
    version=VERSIONS, name=names, index=st.integers(0, 100), start=st.integers(0, 1 << 60), base=st.integers(0, 1 << 60)
)
def test_answers_are_those_of_the_codec(version: int, name: str, index: int, start: int, base: int) -> None:
    """The template of an answer and the offset in it are what the codec makes of the whole."""
    template, at = produce_runs._template(version, name, index, start)
    out = bytearray(template)
    struct.pack_into(">i", out, 4, 77)
    struct.pack_into(">q", out, at, base)
    assert out == produce_runs._encoded(version, 77, name, index, base, start, ErrorCode.NONE, None)


# What clients see


async def answers(client: Client, *requests: tuple[int, int, Any]) -> list[Any]:
    """The answers to requests that are sent in one piece, which must have their order."""
    first = client._next_id + 1
    await client.send(b"".join(client.request(*request) for request in requests))
    found = []
    for number, (api_key, version, _) in enumerate(requests):
        correlation_id, response = await client.answer(api_key, version)
        assert correlation_id == first + number
        found.append(response)
    return found


async def values(client: Client) -> list[bytes]:
    """All values of the topic, by a Fetch."""
    response = await client.call(FETCH, 12, fetch_request(0))
    data, found = bytes(fetched(response).records), []
    for _, contents in read_batches(data):
        found += [record.value or b"" for _, _, record in contents]
    return found


def test_plain_requests_and_others_keep_their_order(tmp_path: Path) -> None:
    """Compressed batches, other APIs, acks 0 and two topics at once, between plain ones, in one piece."""

    async def work(server: Running) -> None:
        client = await server.client()
        await client.call(PRODUCE, 9, produce_request(b"first"))
        two = request_of(batch_from((-1, -1, -1), b"two"))
        two.topic_data += request_of(batch_from((-1, -1, -1), b"elsewhere"), topic="shop.other").topic_data
        got = await answers(
            client,
            (PRODUCE, 9, produce_request(b"a", b"b")),
            (PRODUCE, 3, produce_request(b"c")),
            (METADATA, 9, wire(METADATA).MetadataRequest(topics=None)),
            (PRODUCE, 12, produce_request(b"d", acks=1)),
            (PRODUCE, 9, two),
            (PRODUCE, 9, request_of(compressed_batch(batch_from((-1, -1, -1), b"g"), Compression.LZ4))),
            (PRODUCE, 8, produce_request(b"e")),
            (PRODUCE, 9, request_of(batch_from((-1, -1, -1), b"none"), acks=7)),
            (PRODUCE, 9, request_of(batch_from((-1, -1, -1), b"none"), index=5)),
            (PRODUCE, 9, produce_request(b"f")),
        )
        offsets = [one.responses[0].partition_responses[0] for one in got if hasattr(one, "responses")]
        assert [(one.error_code, one.base_offset) for one in offsets] == [
            (0, 1),
            (0, 3),
            (0, 4),
            (0, 5),
            (0, 6),
            (0, 7),
            (ErrorCode.INVALID_REQUIRED_ACKS, -1),
            (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, -1),
            (0, 8),
        ]
        assert await values(client) == [b"first", b"a", b"b", b"c", b"d", b"two", b"g", b"e", b"f"]

    play(tmp_path, work)


def test_batches_of_a_producer_are_judged_one_after_the_other(tmp_path: Path) -> None:
    """Sent in one piece: the next sequence is taken, the same one again is answered with its offset, a later one is
    refused, and other producers do not mind."""

    async def work(server: Running) -> None:
        client = await server.client()
        await client.call(PRODUCE, 9, produce_request(b"first"))
        sends = [
            ((7, 0, 0), b"a"),
            ((8, 0, 0), b"b"),
            ((7, 0, 1), b"c"),
            ((7, 0, 1), b"c"),
            ((7, 0, 5), b"gap"),
            ((8, 0, 1), b"d"),
            ((7, 0, 0), b"a"),
            ((7, 0, 2), b"e"),
            ((-1, -1, -1), b"f"),
        ]
        got = await answers(client, *((PRODUCE, 9, request_of(batch_from(who, value))) for who, value in sends))
        assert [produced(one) for one in got] == [
            (0, 1),
            (0, 2),
            (0, 3),
            (0, 3),
            (ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, -1),
            (0, 4),
            (0, 1),
            (0, 5),
            (0, 6),
        ]
        assert await values(client) == [b"first", b"a", b"b", b"c", b"d", b"e", b"f"]

    play(tmp_path, work)


def test_a_full_queue_delays_and_keeps_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What finds no room is appended when there is some, before what its connection sent after it."""
    refused = list[int]()

    async def work(server: Running) -> None:
        client = await server.client()
        await client.call(PRODUCE, 9, produce_request(b"first"))
        append = AppendQueue.append_frames_at_once

        def has_no_room(queue: AppendQueue, frames: Any, *, sync: bool) -> int | None:
            if not refused:
                refused.append(frames.count)
                return None
            return append(queue, frames, sync=sync)

        monkeypatch.setattr(AppendQueue, "append_frames_at_once", has_no_room)
        sends = [((7, 0, number), b"%d" % number) for number in range(5)] + [((-1, -1, -1), b"last")]
        got = await answers(client, *((PRODUCE, 9, request_of(batch_from(who, value))) for who, value in sends))
        assert [produced(one) for one in got] == [(0, number + 1) for number in range(6)]
        assert await values(client) == [b"first", b"0", b"1", b"2", b"3", b"4", b"last"]

    play(tmp_path, work)
    assert refused


class Answered:
    """A client that keeps its answers."""

    def __init__(self) -> None:
        self.answers: list[LaterAnswer] = []
        self.fed = b""
        self.done = asyncio.Event()

    def takes_at_once(self, count: int) -> bool:
        return True

    def feed(self, data: bytes) -> None:
        self.fed += data

    def queue_later(self, answer: LaterAnswer) -> None:
        self.answers.append(answer)

    def answered(self) -> None:
        self.done.set()


def test_requests_of_many_connections_share_an_append(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What arrives in one turn is one append, in the order in which it came; each request has its own offset."""
    joined = list[int]()
    append = Partition.append_joined

    def counted(partition: Partition, frames: Any, batches: Any, *, sync: bool) -> int | None:
        joined.append(len(batches))
        return append(partition, frames, batches, sync=sync)

    monkeypatch.setattr(Partition, "append_joined", counted)

    async def work(server: Running) -> None:
        client = await server.client()
        await client.call(PRODUCE, 9, produce_request(b"first"))
        broker = server.node._broker
        runs = ProduceRuns(broker, Produce(broker), lambda api_key, began, count: None)
        clients = [Answered() for _ in range(10)]
        for number, one in enumerate(clients):
            data = encode_request(PRODUCE, 9, number, "test", produce_request(b"%d" % number))
            runs.add(one, bytes(data) * 2 + b"\x00\x00")
        for number, one in enumerate(clients):
            async with asyncio.timeout(WAIT_SECONDS):
                await one.done.wait()
            read = [decode_response(PRODUCE, 9, (answer.encode() or b"")[4:]) for answer in one.answers]
            assert [(found, produced(answer)) for found, answer in read] == [
                (number, (0, 1 + 2 * number)),
                (number, (0, 2 + 2 * number)),
            ]
            assert one.fed == b"\x00\x00"
        assert joined == [20]
        assert await values(client) == [b"first", *(b"%d" % (number // 2) for number in range(20))]

    play(tmp_path, work)


def test_limits_of_a_topic_hold_for_plain_requests(tmp_path: Path) -> None:
    """A batch beyond max.message.bytes is refused alone."""

    async def work(server: Running) -> None:
        client = await server.client()
        await client.call(PRODUCE, 9, produce_request(b"first"))
        got = await answers(
            client,
            (PRODUCE, 9, produce_request(b"small")),
            (PRODUCE, 9, produce_request(b"x" * 2000)),
            (PRODUCE, 9, produce_request(b"small")),
        )
        assert [produced(one) for one in got] == [(0, 1), (ErrorCode.MESSAGE_TOO_LARGE, -1), (0, 2)]

    play(tmp_path, work, max_batch_bytes=1000)


def test_a_marked_batch_is_not_plain() -> None:
    """Of a transaction, of control records, compressed: the usual way knows what to do with them."""
    record = [put_record(Record(0, 0, None, b"v", []))]
    for attributes in (0x01, 0x08, 0x10, 0x20):
        batch = batch_of(0, 0, 0, attributes, (7, 0, 0), NOW_MS, NOW_MS, record)
        data = bytes(encode_request(PRODUCE, 9, 1, None, request_of(batch)))
        assert _native.produce_requests([data], MAX_PAYLOAD_BYTES) == [([], 0)]
