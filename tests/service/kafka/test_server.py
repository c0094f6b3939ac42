"""The listener: order of answers, hostile bytes, limits and stopping, with a server in this process."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import struct
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.campaign import examples, first_seed
from tests.service.kafka.kafka_python import DefaultRecordBatchBuilder

import tidelog
from tidelog.errors import ConfigError, LogFailedError
from tidelog.service.kafka.broker import BrokerSettings, ServedTopic
from tidelog.service.kafka.codec import APIS, decode_response, encode_request, wire
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.groups import share_fetch
from tidelog.service.node import Node
from tidelog.service.placement import Address
from tidelog.topics.names import TopicName

PRODUCE, FETCH, LIST_OFFSETS, METADATA, API_VERSIONS = 0, 1, 2, 3, 18
LOOPBACK = Address("127.0.0.1", 0)
WAIT_SECONDS = 60


class Client:
    """A connection that sends what it is given."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._next_id = 0

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def request(self, api_key: int, version: int, body: Any) -> bytes:
        self._next_id += 1
        return bytes(encode_request(api_key, version, self._next_id, "test", body))

    async def answer(self, api_key: int, version: int) -> tuple[int, Any]:
        async with asyncio.timeout(WAIT_SECONDS):
            size = int.from_bytes(await self._reader.readexactly(4), "big")
            return decode_response(api_key, version, await self._reader.readexactly(size))

    async def call(self, api_key: int, version: int, body: Any) -> Any:
        await self.send(self.request(api_key, version, body))
        correlation_id, response = await self.answer(api_key, version)
        assert correlation_id == self._next_id
        return response

    async def is_closed(self) -> bool:
        """Whether the server closes the connection, without another answer."""
        async with asyncio.timeout(WAIT_SECONDS):
            with contextlib.suppress(ConnectionError):
                return await self._reader.read(1) == b""
            return True

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


class Running:
    """A server of a new directory, and clients of it."""

    def __init__(self, node: Node, address: Address) -> None:
        self.node = node
        self.address = address
        self._clients: list[Client] = []

    async def client(self) -> Client:
        client = Client(*await asyncio.open_connection(*self.address))
        self._clients.append(client)
        return client

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


@contextlib.asynccontextmanager
async def running(directory: Path, **settings: Any) -> AsyncIterator[Running]:
    node = Node(tidelog.open(directory), BrokerSettings(**settings))
    listening = await node.start(LOOPBACK, LOOPBACK)
    server = Running(node, listening.kafka)
    try:
        yield server
    finally:
        await server.close()
        await node.stop()


Play = Callable[[Running], Coroutine[Any, Any, None]]


def play(directory: Path, work: Play, **settings: Any) -> None:
    async def run() -> None:
        async with running(directory, **settings) as server:
            await work(server)

    asyncio.run(run())


def batch(*values: bytes) -> bytes:
    builder = DefaultRecordBatchBuilder(2, 0, False, -1, -1, -1, 1 << 20)
    for index, value in enumerate(values):
        builder.append(index, 1_700_000_000_000, None, value, [])
    return bytes(builder.build())


def produce_request(*values: bytes, acks: int = -1, topic: str = "shop.orders") -> Any:
    module = wire(PRODUCE)
    partition = module.ProduceRequestPartitionProduceData(index=0, records=batch(*values))
    data = module.ProduceRequestTopicProduceData(name=topic, partition_data=[partition])
    return module.ProduceRequest(acks=acks, timeout_ms=WAIT_SECONDS * 1000, topic_data=[data])


def fetch_request(offset: int, *, wait_ms: int = 0, min_bytes: int = 1, topic: str = "shop.orders") -> Any:
    module = wire(FETCH)
    partition = module.FetchRequestPartition(partition=0, fetch_offset=offset, partition_max_bytes=1 << 20)
    asked = module.FetchRequestTopic(topic=topic, partitions=[partition])
    return module.FetchRequest(max_wait_ms=wait_ms, min_bytes=min_bytes, max_bytes=1 << 24, topics=[asked])


def produced(response: Any) -> tuple[int, int]:
    (topic,) = response.responses
    (partition,) = topic.partition_responses
    return partition.error_code, partition.base_offset


def fetched(response: Any) -> Any:
    (topic,) = response.responses
    (partition,) = topic.partitions
    return partition


def test_pipelined_requests_are_answered_in_their_order(tmp_path: Path) -> None:
    """Produce waits for the disk while the requests after it are begun; its answer still comes first."""

    async def work(server: Running) -> None:
        client = await server.client()
        requests = []
        for number in range(20):
            requests.append((PRODUCE, 9, produce_request(b"%d" % number)))
            requests.append((METADATA, 9, wire(METADATA).MetadataRequest(topics=None)))
        await client.send(b"".join(client.request(*request) for request in requests))
        offsets = []
        for expected_id, (api_key, version, _) in enumerate(requests, 1):
            correlation_id, response = await client.answer(api_key, version)
            assert correlation_id == expected_id
            if api_key == PRODUCE:
                offsets.append(produced(response))
        assert offsets == [(0, number) for number in range(20)]

    play(tmp_path, work)


def test_a_request_may_arrive_byte_by_byte(tmp_path: Path) -> None:
    """Also when a large one follows, and two come in one piece."""

    async def work(server: Running) -> None:
        client = await server.client()
        small, large = produce_request(b"small"), produce_request(b"x" * 900_000)
        for byte in client.request(PRODUCE, 9, small):
            await client.send(bytes([byte]))
        assert produced((await client.answer(PRODUCE, 9))[1]) == (0, 0)
        both = client.request(PRODUCE, 9, large) + client.request(PRODUCE, 9, small)
        for at in range(0, len(both), 70_001):
            await client.send(both[at : at + 70_001])
        assert [produced((await client.answer(PRODUCE, 9))[1]) for _ in range(2)] == [(0, 1), (0, 2)]

    play(tmp_path, work)


def test_acks_0_has_no_answer(tmp_path: Path) -> None:
    """The next answer is that of the next request."""

    async def work(server: Running) -> None:
        client = await server.client()
        await client.send(client.request(PRODUCE, 9, produce_request(b"a", acks=0)))
        assert produced(await client.call(PRODUCE, 9, produce_request(b"b"))) == (0, 1)

    play(tmp_path, work)


def test_a_waiting_fetch_is_answered_by_the_next_message(tmp_path: Path) -> None:
    """Long before its time is up."""

    async def work(server: Running) -> None:
        producer, consumer = await server.client(), await server.client()
        await producer.call(PRODUCE, 9, produce_request(b"a"))
        waiting = asyncio.ensure_future(consumer.call(FETCH, 12, fetch_request(1, wait_ms=10 * WAIT_SECONDS * 1000)))
        await producer.call(PRODUCE, 9, produce_request(b"b"))
        answer = fetched(await waiting)
        assert (answer.error_code, answer.high_watermark) == (0, 2)
        assert b"b" in bytes(answer.records)

    play(tmp_path, work)


@pytest.mark.parametrize(
    ("offset", "error"), [(0, ErrorCode.NONE), (1, ErrorCode.NONE), (2, ErrorCode.OFFSET_OUT_OF_RANGE), (-5, 1)]
)
def test_offsets_outside_of_the_log_are_refused(tmp_path: Path, offset: int, error: int) -> None:
    """The end itself is no error: nothing is there yet. Records are never null: librdkafka would not see the error."""

    async def work(server: Running) -> None:
        client = await server.client()
        await client.call(PRODUCE, 9, produce_request(b"a"))
        answer = fetched(await client.call(FETCH, 12, fetch_request(offset)))
        assert answer.error_code == error
        assert answer.records is not None
        unknown = fetched(await client.call(FETCH, 12, fetch_request(offset, topic="shop.unknown")))
        assert (unknown.error_code, bytes(unknown.records)) == (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, b"")

    play(tmp_path, work)


def test_an_unknown_version_of_api_versions_is_answered_in_version_0(tmp_path: Path) -> None:
    """As KIP-511 wants it: the client tries again with what it learned."""

    async def work(server: Running) -> None:
        client = await server.client()
        await client.send(struct.pack(">ihhih", 10, API_VERSIONS, 99, 7, -1))
        correlation_id, response = await client.answer(API_VERSIONS, 0)
        assert (correlation_id, response.error_code) == (7, ErrorCode.UNSUPPORTED_VERSION)
        response = await client.call(API_VERSIONS, 0, wire(API_VERSIONS).ApiVersionsRequest())
        offered = {one.api_key: one.max_version for one in response.api_keys}
        assert offered[PRODUCE] == APIS[PRODUCE].last

    play(tmp_path, work)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        struct.pack(">i", -1),
        struct.pack(">i", 0),
        struct.pack(">i", (1 << 31) - 1),
        struct.pack(">ihhih", 10, 999, 0, 1, -1),
        struct.pack(">ihhih", 10, PRODUCE, 99, 1, -1),
        struct.pack(">ihhih", 10, METADATA, 9, 1, 500),
        struct.pack(">ih", 2, METADATA),
    ],
    ids=["http", "negative", "empty", "huge", "unknown api", "unknown version", "cut", "no header"],
)
def test_bytes_that_are_no_request_close_their_connection_only(tmp_path: Path, data: bytes) -> None:
    """Others go on."""

    async def work(server: Running) -> None:
        good, bad = await server.client(), await server.client()
        await good.call(PRODUCE, 9, produce_request(b"a"))
        await bad.send(data)
        assert await bad.is_closed()
        assert produced(await good.call(PRODUCE, 9, produce_request(b"b"))) == (0, 1)

    play(tmp_path, work)


def test_a_damaged_batch_is_refused_and_the_connection_stays(tmp_path: Path) -> None:
    """The checksum does not match; the next batch of the same connection is taken."""

    async def work(server: Running) -> None:
        client = await server.client()
        damaged = produce_request(b"a")
        records = bytearray(damaged.topic_data[0].partition_data[0].records)
        records[-1] ^= 1
        damaged.topic_data[0].partition_data[0].records = bytes(records)
        assert produced(await client.call(PRODUCE, 9, damaged))[0] == ErrorCode.CORRUPT_MESSAGE
        assert produced(await client.call(PRODUCE, 9, produce_request(b"b"))) == (0, 0)

    play(tmp_path, work)


def test_too_many_connections_are_refused(tmp_path: Path) -> None:
    """One that ends makes room."""

    async def work(server: Running) -> None:
        first, second = await server.client(), await server.client()
        request = wire(API_VERSIONS).ApiVersionsRequest()
        await first.call(API_VERSIONS, 0, request)
        await second.call(API_VERSIONS, 0, request)
        assert await (await server.client()).is_closed()
        await first.close()
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                client = await server.client()
                with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                    await client.call(API_VERSIONS, 0, request)
                    break

    play(tmp_path, work, max_connections=2)


def test_an_idle_connection_is_closed(tmp_path: Path) -> None:
    """After `idle_seconds`."""

    async def work(server: Running) -> None:
        assert await (await server.client()).is_closed()

    play(tmp_path, work, idle_seconds=0.1)


def test_stopping_answers_what_was_begun(tmp_path: Path) -> None:
    """A Produce that was appended is answered, and is there when the directory is opened again."""

    async def run() -> None:
        node = Node(tidelog.open(tmp_path))
        listening = await node.start(LOOPBACK, LOOPBACK)
        client = Client(*await asyncio.open_connection(*listening.kafka))
        await client.call(PRODUCE, 9, produce_request(b"a"))
        waiting = asyncio.ensure_future(client.call(PRODUCE, 9, produce_request(b"b")))
        await asyncio.sleep(0)
        await node.stop()
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            assert produced(await waiting) == (0, 1)
        await client.close()

    asyncio.run(run())
    with tidelog.open(tmp_path) as log:
        assert [message.value for message in log.topic("shop/orders").read()][:1] == [b"a"]


def test_topics_are_listed_while_one_is_deleted(tmp_path: Path) -> None:
    """Loss prevented: a node measures its load in a thread, and one that was deleted meanwhile ended that."""

    class Deleting(dict[TopicName, ServedTopic]):
        """One goes whenever somebody begins to look at them one by one."""

        def __iter__(self) -> Iterator[TopicName]:
            names = [*super().__iter__()]
            self.pop(names[0], None)
            return iter(names)

    async def run() -> None:
        node = Node(tidelog.open(tmp_path))
        await node.start(LOOPBACK, LOOPBACK)
        broker = node.http.broker
        for name in ("b", "a"):
            await broker.create(TopicName("shop", name))
        broker._topics = Deleting(broker._topics)
        assert [str(topic.name) for topic in broker.topics()] == ["shop/a", "shop/b"]
        await node.stop()

    asyncio.run(run())


def test_acks_1_is_no_promise_when_the_file_cannot_be_written(tmp_path: Path) -> None:
    """What waits for the file is refused when the log fails."""
    answers = list[tuple[int, int]]()

    async def work(server: Running) -> None:
        client = await server.client()
        assert produced(await client.call(PRODUCE, 9, produce_request(b"a")))[0] == ErrorCode.NONE
        await client.call(20, 5, wire(20).DeleteTopicsRequest(topic_names=["shop.orders"], timeout_ms=1000))
        await client.call(METADATA, 9, metadata_request("shop.orders"))
        shutil.rmtree(tmp_path / "shop" / "orders")
        answers.append(produced(await client.call(PRODUCE, 9, produce_request(b"b", acks=1))))

    with pytest.raises(LogFailedError):  # stopping says it, too
        play(tmp_path, work)
    assert [offset for _, offset in answers] == [-1]


def metadata_request(*names: str) -> Any:
    module = wire(METADATA)
    return module.MetadataRequest(
        topics=[module.MetadataRequestTopic(name=name) for name in names], allow_auto_topic_creation=True
    )


def test_topics_that_are_changed_by_many_at_once_stay_whole(tmp_path: Path) -> None:
    """Created, deleted, divided and written to at the same moment: no log is left over, and the topic can be used."""

    async def change(client: Client, chance: random.Random) -> None:
        for _ in range(25):
            kind = chance.randrange(4)
            if kind == 0:
                await client.call(20, 5, wire(20).DeleteTopicsRequest(topic_names=["shop.orders"], timeout_ms=1000))
            elif kind == 1:
                topic = wire(19).CreateTopicsRequestCreatableTopic("shop.orders", chance.randint(1, 3), 1)
                await client.call(19, 5, wire(19).CreateTopicsRequest(topics=[topic], timeout_ms=1000))
            elif kind == 2:
                topic = wire(37).CreatePartitionsRequestTopic("shop.orders", chance.randint(2, 5), None)
                await client.call(37, 3, wire(37).CreatePartitionsRequest(topics=[topic], timeout_ms=1000))
            else:
                await client.call(PRODUCE, 9, produce_request(b"a", acks=1))

    async def work(server: Running) -> None:
        chances = [random.Random(seed) for seed in range(4)]
        await asyncio.gather(*[change(await server.client(), chance) for chance in chances])
        client = await server.client()
        assert produced(await client.call(PRODUCE, 9, produce_request(b"last")))[0] == ErrorCode.NONE
        found = await client.call(METADATA, 9, wire(METADATA).MetadataRequest(topics=None))
        counts.update({topic.name: len(topic.partitions) for topic in found.topics})

    counts: dict[str, int] = {}
    play(tmp_path, work)
    with tidelog.open(tmp_path) as log:
        assert log.topics() == ["shop/orders"]
        assert len(log.partition_logs("shop/orders")) == counts["shop.orders"]


def test_a_topic_that_is_named_a_thousand_times_is_described_once(tmp_path: Path) -> None:
    """A small request has no answer of gigabytes."""

    async def work(server: Running) -> None:
        client = await server.client()
        found = await client.call(METADATA, 12, metadata_request(*["shop.orders"] * 1000))
        assert [topic.name for topic in found.topics] == ["shop.orders"]
        (topic,) = found.topics
        asked = wire(METADATA).MetadataRequest(
            topics=[wire(METADATA).MetadataRequestTopic(topic_id=topic.topic_id, name=None)] * 1000
        )
        assert [one.name for one in (await client.call(METADATA, 12, asked)).topics] == ["shop.orders"]
        # Versions 10 and 11 have the field, and no answer without a name.
        (refused,) = (await client.call(METADATA, 11, asked)).topics
        assert (refused.error_code, refused.name) == (ErrorCode.INVALID_REQUEST, "")

    play(tmp_path, work)


def test_a_share_fetch_of_a_topic_that_is_gone_is_answered(tmp_path: Path) -> None:
    """With an error, not with a closed connection."""

    async def work(server: Running) -> None:
        client, module = await server.client(), wire(78)
        partition = module.ShareFetchRequestFetchPartition(partition_index=0)
        topic = module.ShareFetchRequestFetchTopic(topic_id=bytes(range(16)), partitions=[partition])
        asked = module.ShareFetchRequest(group_id="workers", member_id="one", topics=[topic])
        (found,) = (await client.call(78, 1, asked)).responses
        assert found.partitions[0].error_code == ErrorCode.UNKNOWN_TOPIC_ID

    play(tmp_path, work)


def test_share_sessions_of_nobody_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that opens sessions and joins no group does not fill the memory."""
    monkeypatch.setattr(share_fetch, "_CHECK_SECONDS", 0.05)
    monkeypatch.setattr(share_fetch, "_SESSION_IDLE_MS", 1)

    async def work(server: Running) -> None:
        client = await server.client()
        module = wire(78)
        opened = module.ShareFetchRequest(group_id="workers", member_id="one")
        assert (await client.call(78, 1, opened)).error_code == ErrorCode.NONE
        error, epoch = ErrorCode.NONE, 0
        async with asyncio.timeout(WAIT_SECONDS):
            while error == ErrorCode.NONE:  # it is no member, so nothing but time ends its session
                await asyncio.sleep(0.2)
                epoch += 1
                asked = module.ShareFetchRequest(group_id="workers", member_id="one", share_session_epoch=epoch)
                error = (await client.call(78, 1, asked)).error_code
        assert error == ErrorCode.SHARE_SESSION_NOT_FOUND

    play(tmp_path, work)


def test_requests_that_wait_for_others_are_bounded_in_bytes(tmp_path: Path) -> None:
    """Large requests behind one that takes long are left to the client, and answered afterwards."""
    count, size = 10, 6 << 20

    async def work(server: Running) -> None:
        client, go_on = await server.client(), asyncio.Event()
        answer = server.node._kafka._handlers[METADATA]

        async def slow(context: Any, request: Any) -> Any:
            await go_on.wait()
            return await answer(context, request)

        server.node._kafka.add({METADATA: slow})
        body = client.request(METADATA, 5, wire(METADATA).MetadataRequest(topics=[]))[4:] + bytes(size)
        sending = asyncio.create_task(client.send((len(body).to_bytes(4, "big") + body) * count))
        (connection,) = server.node._kafka._connections
        async with asyncio.timeout(WAIT_SECONDS):
            while connection._is_reading:
                await asyncio.sleep(0.01)
        assert sum(map(len, connection._frames)) < 3 * size
        go_on.set()
        for _ in range(count):
            await client.answer(METADATA, 5)
        await sending

    play(tmp_path, work)


def test_the_size_of_a_request_takes_no_memory(tmp_path: Path) -> None:
    """A client that says how much it will send, and sends nothing, may have many connections."""

    async def work(server: Running) -> None:
        client = await server.client()
        await client.send((50 << 20).to_bytes(4, "big") + b"\0\3")
        (connection,) = server.node._kafka._connections
        async with asyncio.timeout(WAIT_SECONDS):
            while connection._frame is None:
                await asyncio.sleep(0.01)
        assert len(connection._frame) <= 64 << 10

    play(tmp_path, work)


def test_a_topic_that_the_process_opens_itself_is_listed(tmp_path: Path) -> None:
    """As the topic for the dead letters of a share group."""

    async def work(server: Running) -> None:
        client = await server.client()
        await asyncio.to_thread(server.node._directory.topic, "shop/own")
        await asyncio.to_thread(lambda: server.node._directory.topic("shop/live", reliable=False))
        async with asyncio.timeout(WAIT_SECONDS):
            names: list[str] = []
            while not names:
                answer = await client.call(METADATA, 9, wire(METADATA).MetadataRequest(topics=None))
                names = [topic.name for topic in answer.topics]
        assert names == ["shop.own"]

    play(tmp_path, work)


def test_an_address_that_is_taken_is_named_with_its_option(tmp_path: Path) -> None:
    """For both addresses."""

    async def work(server: Running) -> None:
        for kafka, http, option in ((server.address, LOOPBACK, "--kafka"), (LOOPBACK, server.address, "--http")):
            node = Node(tidelog.open(tmp_path / option))
            with pytest.raises(ConfigError, match="cannot listen on") as caught:
                await node.start(kafka, http)
            assert option in (caught.value.hint or "")
            await node.stop()

    play(tmp_path / "served", work)


def mutated(chance: random.Random, requests: list[bytes]) -> bytes:
    """A request with some bytes changed, cut, doubled or replaced."""
    data = bytearray(chance.choice(requests))
    for _ in range(chance.randint(1, 8)):
        at = chance.randrange(4, len(data))
        kind = chance.randrange(4)
        if kind == 0:
            data[at] = chance.randrange(256)
        elif kind == 1:
            data[at : at + 4] = chance.choice([b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", bytes(4), b"\x80" * 4])
        elif kind == 2:
            del data[at : at + chance.randint(1, 20)]
        else:
            data[at:at] = chance.randbytes(chance.randint(1, 20))
        if len(data) < 8:
            data += bytes(8)
    data[:4] = (len(data) - 4).to_bytes(4, "big")
    return bytes(data)


@pytest.mark.deeper
def test_mutated_requests_break_nothing(tmp_path: Path) -> None:
    """Every request is answered or closes its connection; afterwards the server serves as before."""

    async def work(server: Running) -> None:
        chance = random.Random(first_seed())
        maker = await server.client()
        await maker.call(PRODUCE, 9, produce_request(b"a"))
        requests = [maker.request(PRODUCE, 9, produce_request(b"a", b"b")), maker.request(FETCH, 12, fetch_request(0))]
        for api_key, api in APIS.items():
            if api_key not in (PRODUCE, FETCH) and hasattr(wire(api_key), "ENCODE_REQUEST"):
                empty = next(
                    kind
                    for name, kind in vars(wire(api_key)).items()
                    if name.lower() == f"{api.name}request".replace("_", "")
                )
                requests += [maker.request(api_key, version, empty()) for version in (api.first, api.last)]
        for _ in range(examples(300)):
            client = await server.client()
            await client.send(mutated(chance, requests))
            with contextlib.suppress(ConnectionError):
                client._writer.write_eof()
            async with asyncio.timeout(WAIT_SECONDS):
                with contextlib.suppress(ConnectionError):
                    await client._reader.read()
            await client.close()
        assert produced(await maker.call(PRODUCE, 9, produce_request(b"z")))[0] == ErrorCode.NONE

    play(tmp_path, work)
