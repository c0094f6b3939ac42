"""HTTP with several nodes: requests are sent on to owners, clients follow, and the store answers at any node."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pytest
from tests.service.installation import Installation, installed, run
from tests.service.kafka.test_server import WAIT_SECONDS

import tidelog
from tidelog.service.placement import TopicFacts
from tidelog.topics.names import parse_topic_name

TOPIC = "shop/orders"
MESSAGES = f"/v1/topics/{TOPIC}/messages"
Result = TypeVar("Result")


class Answer:
    """What one node said, without following it."""

    def __init__(self, url: str, method: str, target: str, body: Any = None) -> None:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=WAIT_SECONDS)
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, target, data, {"content-type": "application/json"} if data else {})
        response = connection.getresponse()
        self.status = response.status
        self.location = response.getheader("location")
        self.retry_after = response.getheader("retry-after")
        text = response.read()
        self.json: Any = json.loads(text) if text else None
        connection.close()


def in_thread(work: Callable[..., Result], *arguments: Any) -> Awaitable[Result]:
    return asyncio.to_thread(work, *arguments)


def asked(nodes: Installation, number: int, method: str, target: str, body: Any = None) -> Awaitable[Answer]:
    return in_thread(Answer, nodes.addresses[number].http, method, target, body)


def test_requests_for_a_partition_are_sent_on_to_its_owner(tmp_path: Path) -> None:
    """With path and query as they came, nothing carried out here; the owner answers the same request."""

    async def work() -> None:
        async with installed(tmp_path) as nodes:
            await nodes.create_topic(TOPIC, 2)
            other = nodes.addresses[2].http
            for method, target, body in (
                ("POST", f"{MESSAGES}?partition=1", {"messages": [{"value": "a"}]}),
                ("GET", f"{MESSAGES}?partition=1&offset=earliest", None),
                ("GET", f"/v1/topics/{TOPIC}?partition=1", None),
            ):
                answer = await asked(nodes, 1, method, target, body)
                assert (answer.status, answer.location) == (307, other + target)
                assert (await asked(nodes, 2, method, target, body)).status == 200
            found = await asked(nodes, 2, "GET", f"{MESSAGES}?partition=1")
            assert [one["value"] for one in found.json["messages"]] == ["a"]

    run(work())


def test_a_topic_that_a_node_has_not_heard_of_is_found(tmp_path: Path) -> None:
    """Another node created it a moment ago. Who asks for it here heard that there is none, or was not sent on."""

    async def work() -> None:
        async with installed(tmp_path, auto_create_topics=False) as nodes:
            name = parse_topic_name(TOPIC)
            nodes.unheard.add((2, name))
            await nodes.create_topic(TOPIC, 1)
            assert nodes.owner(TOPIC) == 1
            assert nodes.nodes[2]._broker.find(name) is None
            sent = await asked(nodes, 2, "POST", MESSAGES, {"messages": [{"value": "a"}]})
            assert (sent.status, sent.location) == (307, f"{nodes.addresses[1].http}{MESSAGES}")

            for method, body in (("GET", None), ("PATCH", {"settings": {"retention_seconds": 60}})):
                nodes.unheard.add((2, name))
                nodes._changed()
                answer = await asked(nodes, 2, method, f"/v1/topics/{TOPIC}", body)
                assert answer.status == 200, answer.json
            assert (await asked(nodes, 2, "GET", "/v1/topics/shop/none")).status == 404

    run(work())


def test_topic_whose_partitions_nobody_has_opened_yet_is_described(tmp_path: Path) -> None:
    """A node that was asked right after the topic was made found less in the store than it knew of, and failed."""

    async def work() -> None:
        async with installed(tmp_path) as nodes:
            name = parse_topic_name(TOPIC)
            nodes.owners |= {(name, 0): 3, (name, 1): 3}  # which is not there yet
            nodes.topics[name] = TopicFacts(bytes(16), 1, 2)
            nodes._changed()
            described = await asked(nodes, 1, "GET", f"/v1/topics/{TOPIC}")
            assert described.status == 200
            assert [(one["next_offset"], one["node"]) for one in described.json["partitions"]] == [(0, "")] * 2

    run(work())


def test_messages_go_to_the_owners_of_their_keys(tmp_path: Path) -> None:
    """A topic is described and listed anywhere, messages without a key go to a partition that is here, and those of one
    key to its owner."""

    async def work() -> None:
        async with installed(tmp_path) as nodes:
            await nodes.create_topic(TOPIC, 2)
            described = await asked(nodes, 1, "GET", f"/v1/topics/{TOPIC}")
            assert [one["node"] for one in described.json["partitions"]] == [None, "node2"]
            listed = await asked(nodes, 2, "GET", "/v1/topics")
            assert [one["name"] for one in listed.json["topics"]] == [TOPIC]
            for number in (1, 2):
                stored = await asked(nodes, number, "POST", MESSAGES, {"messages": [{"value": "a"}, {"value": "b"}]})
                assert stored.json["partitions"] == [number - 1] * 2
            keyed = {key: {"messages": [{"value": "c", "key": key}]} for key in "abcdefgh"}
            answers = [await asked(nodes, 1, "POST", MESSAGES, body) for body in keyed.values()]
            assert {answer.status for answer in answers} == {200, 307}
            away = next(answer for answer in answers if answer.status == 307)
            assert away.location == f"{nodes.addresses[2].http}{MESSAGES}?partition=1"
            mixed = {"messages": [body["messages"][0] for body in keyed.values()]}
            assert set((await asked(nodes, 1, "POST", MESSAGES, mixed)).json["partitions"]) == {0, 1}

    run(work())


def test_what_nobody_serves_is_to_be_tried_again(tmp_path: Path) -> None:
    """503 with Retry-After."""

    async def work() -> None:
        async with installed(tmp_path) as nodes:
            await nodes.create_topic(TOPIC, 1)
            nodes.owners.clear()
            answer = await asked(nodes, 1, "GET", MESSAGES)
            assert (answer.status, answer.json["error"]) == (503, "ServerUnavailableError")
            assert answer.retry_after == "1"

    run(work())


def test_history_is_read_at_any_node(tmp_path: Path) -> None:
    """What is in the store, where the client says that this is enough; the owner has the rest."""

    async def work() -> None:
        async with installed(tmp_path) as nodes:
            await nodes.create_topic(TOPIC, 1)
            await asked(nodes, 1, "POST", MESSAGES, {"messages": [{"value": "a"}, {"value": "b"}]})
            await nodes.nodes[1]._broker.find(parse_topic_name(TOPIC)).open[0].topic.ship_async()  # type: ignore[union-attr]
            await asked(nodes, 1, "POST", MESSAGES, {"messages": [{"value": "hot"}]})
            target = f"{MESSAGES}?offset=1&stored=true"
            found = await asked(nodes, 2, "GET", target)
            assert [one["value"] for one in found.json["messages"]] == ["b"]
            assert (found.json["next_offsets"], found.json["end_offsets"]) == ({"0": 2}, {"0": 2})
            for elsewhere in (f"{MESSAGES}?offset=1", f"{MESSAGES}?offset=2&stored=true"):
                assert (await asked(nodes, 2, "GET", elsewhere)).status == 307

    run(work())


def append_and_read(url: str, moves: Callable[[], None]) -> dict[bytes, list[bytes | None]]:
    """The values of each key that were appended while partitions moved, as they are read."""
    with tidelog.connect(url, timeout=WAIT_SECONDS) as client:
        topic = client.topic(TOPIC, partitions=3)
        for number in range(60):
            keys = [b"k%d" % key for key in range(5)]
            topic.append_many([tidelog.Message(b"%d" % number, key) for key in keys])
            if number in (20, 40):
                moves()
        assert sum(topic.next_offsets.values()) == 300
        found: dict[bytes, list[bytes | None]] = {}
        for message in topic.read():
            found.setdefault(message.key or b"", []).append(message.value)
        return found


def test_a_client_follows_moves_and_stores_nothing_twice(tmp_path: Path) -> None:
    """`tidelog.connect` with any node: appends by key reach every partition while they move, and reading finds each
    message once, in the order of its key."""

    async def work() -> None:
        async with installed(tmp_path) as nodes:
            await nodes.create_topic(TOPIC, 3)
            loop, moving = asyncio.get_running_loop(), asyncio.Lock()

            async def turn() -> None:
                async with moving:
                    for partition in range(3):
                        await nodes.move(TOPIC, partition, 3 - nodes.owner(TOPIC, partition))

            def moves() -> None:
                asyncio.run_coroutine_threadsafe(turn(), loop)

            found = await in_thread(append_and_read, nodes.addresses[1].http, moves)
            assert found == {b"k%d" % key: [b"%d" % number for number in range(60)] for key in range(5)}

    run(work())


def test_a_client_goes_on_when_the_node_it_knows_first_has_ended(tmp_path: Path) -> None:
    """It was sent to another one before."""

    def use(url: str, end: Callable[[], None]) -> list[bytes | None]:
        with tidelog.connect(url, timeout=WAIT_SECONDS) as client:
            topic = client.topic(TOPIC)
            topic.append(b"a")
            end()
            topic.append(b"b")
            return [message.value for message in topic.read()]

    async def work() -> None:
        async with installed(tmp_path) as nodes:
            await nodes.create_topic("shop/other", 1)
            await nodes.create_topic(TOPIC, 1)
            assert nodes.owner(TOPIC) == 2
            loop = asyncio.get_running_loop()

            def end() -> None:
                asyncio.run_coroutine_threadsafe(nodes.stop_node(1), loop).result(WAIT_SECONDS)

            assert await in_thread(use, nodes.addresses[1].http, end) == [b"a", b"b"]

    run(work())


def test_a_consumer_of_a_subscription_finds_the_owner(tmp_path: Path) -> None:
    """Over any node, and again after a move, with what was not acknowledged."""

    def use(url: str, move: Callable[[], None]) -> list[bytes | None]:
        with tidelog.connect(url, timeout=WAIT_SECONDS) as client:
            topic = client.topic(TOPIC)
            consumer = topic.subscribe("billing")
            found: list[bytes | None] = []
            for value in (b"a", b"b"):
                topic.append(value)
                while not found or found[-1] != value:
                    message = consumer.receive(timeout=WAIT_SECONDS)
                    assert message is not None
                    consumer.ack(message)
                    found.append(message.value)
                move()
            return found

    async def work() -> None:
        async with installed(tmp_path) as nodes:
            await nodes.create_topic("shop/other", 1)
            await nodes.create_topic(TOPIC, 1)
            loop = asyncio.get_running_loop()

            def move() -> None:
                moving = nodes.move(TOPIC, 0, 3 - nodes.owner(TOPIC))
                asyncio.run_coroutine_threadsafe(moving, loop).result(WAIT_SECONDS)

            found = await in_thread(use, nodes.addresses[1].http, move)
            assert (found[0], found[-1]) == (b"a", b"b")

    run(work())


def until_it_knows_others(client: tidelog.Client) -> None:
    """It asks for them in the background, with its first answer."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not client._http._others:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def used(url: str, end: Callable[[], None]) -> list[bytes | None]:
    """Appends, a reader that follows and a consumer, which all begin at a node that ends then."""
    with tidelog.connect(url, timeout=WAIT_SECONDS) as client:
        topic = client.topic(TOPIC)
        consumer = topic.subscribe("billing")
        following = iter(topic.read(follow=True))
        topic.append(b"a", sync=True)
        message = consumer.receive(timeout=WAIT_SECONDS)
        assert message is not None
        assert (message.value, next(following).value) == (b"a", b"a")
        consumer.ack(message)
        topic.ship()
        until_it_knows_others(client)
        end()
        found: list[bytes | None] = []
        while not found or found[-1] != b"b":
            message = consumer.receive(timeout=WAIT_SECONDS)
            assert message is not None
            consumer.ack(message)
            found.append(message.value)
        consumer.close()
        topic.append(b"c", sync=True)
        return [*found[-1:], next(following).value, *(one.value for one in topic.read())]


def used_async(url: str, end: Callable[[], None]) -> list[bytes | None]:
    """The same, awaited."""

    async def use() -> list[bytes | None]:
        client = await tidelog.connect_async(url, timeout=WAIT_SECONDS)
        topic = await client.topic_async(TOPIC)
        consumer = await topic.subscribe_async("billing")
        await topic.append_async(b"a", sync=True)
        message = await consumer.receive_async(timeout=WAIT_SECONDS)
        assert message is not None
        await consumer.ack_async(message)
        await topic.ship_async()
        await asyncio.to_thread(until_it_knows_others, client)
        await asyncio.to_thread(end)
        found: list[bytes | None] = []
        while not found or found[-1] != b"b":
            message = await consumer.receive_async(timeout=WAIT_SECONDS)
            assert message is not None
            await consumer.ack_async(message)
            found.append(message.value)
        await consumer.close_async()
        await topic.append_async(b"c", sync=True)
        read = [one.value async for one in topic.read_async()]
        await client.close_async()
        return [*found[-1:], b"b", *read]

    return asyncio.run(use())


@pytest.mark.parametrize("use", [used, used_async])
def test_a_client_that_was_never_sent_on_goes_on_at_another_node(
    tmp_path: Path, use: Callable[[str, Callable[[], None]], list[bytes | None]]
) -> None:
    """It knows the nodes from the one that it was given, and needs no second address."""

    async def work() -> None:
        async with installed(tmp_path) as nodes:
            await nodes.create_topic(TOPIC, 1)
            assert nodes.owner(TOPIC) == 1
            loop = asyncio.get_running_loop()

            async def fail() -> None:
                await nodes.stop_node(1)
                await nodes.move(TOPIC, 0, 2)

            def end() -> None:
                asyncio.run_coroutine_threadsafe(fail(), loop).result(WAIT_SECONDS)
                with tidelog.connect(nodes.addresses[2].http) as other:
                    other.topic(TOPIC).append(b"b", sync=True)

            assert await in_thread(use, nodes.addresses[1].http, end) == [b"b", b"b", b"a", b"b", b"c"]

    run(work())
