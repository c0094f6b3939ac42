"""Topics whose partitions several nodes serve: any node answers as one that has them all."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.service.http.test_placed import MESSAGES, TOPIC, asked, in_thread
from tests.service.installation import Installation, installed, run
from tests.service.kafka.test_server import WAIT_SECONDS

import tidelog
from tidelog.errors import FencedError
from tidelog.topics.names import parse_topic_name
from tidelog.topics.rescue import Rescue

PATH = f"/v1/topics/{TOPIC}"
KEYS = [b"k%d" % number for number in range(8)]


async def ok(nodes: Installation, number: int, method: str, target: str, body: Any = None) -> Any:
    answer = await asked(nodes, number, method, target, body)
    assert answer.status in (200, 201, 204), answer.json
    return answer.json


def messages(count: int = 8) -> dict[str, Any]:
    return {"messages": [{"value": str(number), "key": f"k{number}"} for number in range(count)]}


@contextlib.asynccontextmanager
async def spread(tmp_path: Path, partitions: int = 4, count: int = 2) -> Any:
    """Partitions in turn on the nodes, with eight messages of eight keys."""
    async with installed(tmp_path, count) as nodes:
        await nodes.create_topic(TOPIC, partitions)
        await ok(nodes, 1, "POST", MESSAGES, messages())
        yield nodes


def test_messages_of_any_partition_are_appended_and_read_at_any_node(tmp_path: Path) -> None:
    """A request with keys of several nodes is stored by their owners; pages are merged by time, and the offsets that
    come back read on without a gap."""

    async def work() -> None:
        async with spread(tmp_path) as nodes:
            for number in (1, 2):
                found = await ok(nodes, number, "GET", MESSAGES)
                assert sorted(one["value"] for one in found["messages"]) == [str(one) for one in range(8)]
                assert found["next_offsets"] == found["end_offsets"]
                values: list[str] = []
                offsets = ""
                while len(values) < 8:
                    page = await ok(nodes, number, "GET", f"{MESSAGES}?limit=3{offsets}")
                    values += [one["value"] for one in page["messages"]]
                    text = ",".join(f"%22{one}%22:{at}" for one, at in page["next_offsets"].items())
                    offsets = f"&offsets=%7B{text}%7D"
                assert sorted(values) == [str(one) for one in range(8)]
            described = await ok(nodes, 2, "GET", PATH)
            assert sum(one["next_offset"] for one in described["partitions"]) == 8
            assert [one["node"] for one in described["partitions"]] == ["node1", None, "node1", None]
            assert all(one["epoch"] > 0 for one in described["partitions"])

    run(work())


def test_a_read_of_several_nodes_waits_for_the_first_message(tmp_path: Path) -> None:
    """A long poll at one node ends with a message that another node got."""

    async def work() -> None:
        async with spread(tmp_path) as nodes:
            waiting = asyncio.ensure_future(asked(nodes, 1, "GET", f"{MESSAGES}?offset=latest&wait=60"))
            done: set[Any] = set()
            while not done:  # until the poll has resolved where it begins
                await ok(nodes, 2, "POST", f"{MESSAGES}?partition=1", {"messages": [{"value": "new"}]})
                done, _ = await asyncio.wait([waiting], timeout=0.1)
            assert {one["value"] for one in waiting.result().json["messages"]} == {"new"}

    run(work())


def tailed(url: str, count: int) -> list[str]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=WAIT_SECONDS)
    connection.request("GET", f"{PATH}/tail?offset=earliest")
    response = connection.getresponse()
    found: list[str] = []
    while len(found) < count:
        line = response.readline().decode()
        if line.startswith("data: "):
            found.append(line)
    connection.close()
    return found


def test_a_tail_follows_the_partitions_of_all_nodes(tmp_path: Path) -> None:
    """As server-sent events, from the first message on."""

    async def work() -> None:
        async with spread(tmp_path) as nodes:
            assert len(set(await in_thread(tailed, nodes.addresses[2].http, 8))) == 8

    run(work())


def consume(url: str, move: Callable[[], None]) -> list[bytes | None]:
    """Everything of a subscription, over a move of a partition."""
    with tidelog.connect(url, timeout=WAIT_SECONDS) as client:
        topic = client.topic(TOPIC)
        found: set[bytes | None] = set()
        with topic.subscribe("billing") as consumer:
            while len(found) < 8:
                message = consumer.receive(timeout=WAIT_SECONDS)
                assert message is not None
                found.add(message.value)
                consumer.ack(message)
                if len(found) == 3:
                    move()
            consumer.flush()
            assert consumer.lag.messages == 0
        assert topic.subscriptions() == ["billing"]
        with topic.subscribe("billing") as consumer:
            assert consumer.receive(timeout=0.1) is None, "what was acknowledged does not come again"
            consumer.seek("earliest")
            again = {message.value for message in (consumer.receive(timeout=WAIT_SECONDS) for _ in range(8)) if message}
        topic.delete_subscription("billing")
        assert topic.subscriptions() == []
        return sorted(found & again, key=lambda value: value or b"")


def test_a_subscription_has_the_partitions_of_all_nodes(tmp_path: Path) -> None:
    """Over any node, and over a move: every message comes, acknowledgements count, and it is moved and deleted as a
    whole."""

    async def work() -> None:
        async with spread(tmp_path, count=3) as nodes:
            loop = asyncio.get_running_loop()

            def move() -> None:
                asyncio.run_coroutine_threadsafe(nodes.move(TOPIC, 1, 1), loop).result(WAIT_SECONDS)

            found = await in_thread(consume, nodes.addresses[1].http, move)
            assert found == [b"%d" % number for number in range(8)]

    run(work())


def test_a_consumer_by_long_poll_is_found_at_every_node(tmp_path: Path) -> None:
    """Its id says which node has it: requests elsewhere are sent on there. Acknowledgements reach all owners, and
    another user's gateway does not see them again."""

    async def work() -> None:
        async with spread(tmp_path) as nodes:
            path = f"{PATH}/subscriptions/billing"
            made = await ok(nodes, 1, "POST", f"{path}/consumers", {"kind": "shared", "consumer": "c"})
            consumer = f"{path}/consumers/{made['id']}"
            sent_on = await asked(nodes, 2, "POST", f"{consumer}/receive?wait=10")
            assert (sent_on.status, sent_on.location) == (
                307,
                f"{nodes.addresses[1].http}{consumer}/receive?wait=10",
            )
            got: dict[tuple[int, int], str] = {}
            seen = 0
            while len(got) < 8:
                batch = await ok(nodes, 1, "POST", f"{consumer}/receive?wait=60&seen={seen}&limit=3")
                seen = batch["batch"]
                got |= {(one["partition"], one["offset"]): one["value"] for one in batch["messages"]}
            assert sorted(got.values()) == [str(number) for number in range(8)]
            settled = [list(place) for place in got]
            await ok(nodes, 1, "POST", f"{consumer}/nack", {"messages": settled[:1], "delay": 0})
            again = await ok(nodes, 1, "POST", f"{consumer}/receive?wait=60&seen={seen}")
            assert [[one["partition"], one["offset"]] for one in again["messages"]] == settled[:1]
            await ok(nodes, 1, "POST", f"{consumer}/ack", {"messages": settled, "flush": True})
            listed = (await ok(nodes, 2, "GET", f"{PATH}/subscriptions"))["subscriptions"]
            assert [(one["name"], one["lag_messages"], one["consumers"]) for one in listed] == [("billing", 0, ["c"])]
            assert [one["partition"] for one in listed[0]["partitions"]] == [0, 1, 2, 3]
            await ok(nodes, 1, "DELETE", consumer)
            assert (await asked(nodes, 1, "POST", f"{consumer}/receive")).status in (400, 410)

    run(work())


def test_named_producers_store_once_over_several_nodes(tmp_path: Path) -> None:
    """The same sequences again are stored nowhere, also after partitions were added; whoever opens the name again
    fences the one before on every node."""

    def use(url: str, other_url: str) -> tuple[int, list[int]]:
        with tidelog.connect(url, timeout=WAIT_SECONDS) as client, tidelog.connect(other_url) as other:
            topic = client.topic(TOPIC)
            first = topic.producer("importer")
            several = [tidelog.Message(b"v", key) for key in KEYS] + [tidelog.Message(b"v")] * 4
            stored = first.append_many(several, sequence=0)
            assert first.append_many(several, sequence=0) == stored
            other.topic(TOPIC, partitions=6)
            assert first.append_many(several, sequence=0) == stored, "before partitions were added"
            second = other.topic(TOPIC).producer("importer")
            assert second.last_sequence == 11
            with pytest.raises(FencedError):
                first.append_many(several, sequence=12)
            second.append_many(several, sequence=12)
            return sum(other.topic(TOPIC).next_offsets.values()), [second.last_sequence or 0]  # type: ignore[attr-defined]

    async def work() -> None:
        async with installed(tmp_path) as nodes:
            await nodes.create_topic(TOPIC, 4)
            found = await in_thread(use, nodes.addresses[1].http, nodes.addresses[2].http)
            assert found == (24, [23])

    run(work())


def test_administration_is_of_all_partitions(tmp_path: Path) -> None:
    """Purge, flush, ship, verify, compact, retention, seal and open at one node are done by the owners, and the result
    has every partition."""

    async def work() -> None:
        async with spread(tmp_path) as nodes:
            numbers = ["0", "1", "2", "3"]
            await ok(nodes, 1, "POST", f"{PATH}/flush")
            shipped = await ok(nodes, 1, "POST", f"{PATH}/ship?wait=60")
            assert sum(shipped["result"]["shipped_offsets"].values()) == 8
            assert list(shipped["result"]["shipped_offsets"]) == numbers
            elsewhere = await asked(nodes, 2, "GET", f"/v1/operations/{shipped['id']}")
            assert elsewhere.location == f"{nodes.addresses[1].http}/v1/operations/{shipped['id']}"
            verified = (await ok(nodes, 2, "POST", f"{PATH}/verify?wait=60"))["result"]
            assert (verified["verdict"], verified["subject"]) == ("ok", TOPIC)
            compacted = (await ok(nodes, 1, "POST", f"{PATH}/compact?wait=60"))["result"]
            assert list(compacted["reports"]) == numbers
            planned = await ok(nodes, 2, "GET", f"{PATH}/retention?wait=60")
            assert list(planned["result"]["plans"]) == numbers
            sent_on = await asked(nodes, 1, "POST", f"{PATH}/retention?wait=60&plan={planned['id']}")
            assert sent_on.status == 307, "a plan is applied where it was made"
            applied = await ok(nodes, 2, "POST", f"{PATH}/retention?wait=60&plan={planned['id']}")
            assert applied["result"] == {"start_offsets": dict.fromkeys(numbers, 0)}
            await nodes.move(TOPIC, 0, 2)
            late = await ok(nodes, 2, "POST", f"{PATH}/retention?wait=60&plan={planned['id']}")
            assert (late["state"], late["problem"]["error"]) == ("failed", "ConflictError")
            purged = await ok(nodes, 1, "POST", f"{PATH}/purge", {})
            assert sum(purged["start_offsets"].values()) == 8
            await ok(nodes, 1, "POST", f"{PATH}/seal?wait=60")
            refused = await asked(nodes, 2, "POST", f"{MESSAGES}?partition=1", {"messages": [{"value": "a"}]})
            assert (refused.status, refused.json["error"]) == (503, "ClosedError")
            opened = await ok(nodes, 1, "POST", f"{PATH}/open")
            assert [one["next_offset"] for one in opened["partitions"]] == list(purged["start_offsets"].values())

    run(work())


def test_a_purge_names_partitions_of_several_nodes(tmp_path: Path) -> None:
    """Each offset counts for its own partition."""

    async def work() -> None:
        async with spread(tmp_path) as nodes:
            described = (await ok(nodes, 1, "GET", PATH))["partitions"]
            before = {str(one["partition"]): one["next_offset"] for one in described if one["partition"] in (0, 1)}
            found = await ok(nodes, 2, "POST", f"{PATH}/purge", {"before": before})
            assert found["start_offsets"] == before

    run(work())


def test_a_part_that_has_moved_is_asked_of_the_next_owner(tmp_path: Path) -> None:
    """A node that was asked for partitions which it does not have answers for none of them, and others are asked."""

    async def work() -> None:
        async with spread(tmp_path) as nodes:
            placement: Any = nodes.nodes[1].placement
            stale = dict.fromkeys(range(4), 3)
            true_owner = placement.owner

            def owner(topic: Any, partition: int) -> Any:
                """Each partition is at the other node for three looks: two decide who answers, one who is asked."""
                stale[partition] -= 1
                if stale[partition] < 0:
                    return true_owner(topic, partition)
                return nodes.addresses[1 if nodes.owner(TOPIC, partition) == 2 else 2]

            placement.owner = owner
            found = await ok(nodes, 1, "GET", MESSAGES)
            assert len(found["messages"]) == 8
            assert max(stale.values()) < 0

    run(work())


def test_tails_of_all_nodes_are_listed_and_appended_to_the_owner(tmp_path: Path) -> None:
    """A tail lies on the disk of a node that was fenced; any node lists it, its node appends it wherever the partition
    is now."""

    async def work() -> None:
        async with spread(tmp_path, partitions=2) as nodes:
            name = parse_topic_name(TOPIC)
            await ok(nodes, 2, "POST", f"{PATH}/ship?wait=60")
            await ok(nodes, 2, "POST", f"{MESSAGES}?partition=1", {"messages": [{"value": "lost"}]})
            log = nodes.nodes[2]._broker.find(name).open[1].topic

            def take_over() -> None:
                nodes.nodes[1]._directory.topic(log.name, take_over=True)

            await in_thread(take_over)
            nodes.owners[name, 1] = 1
            nodes._changed()
            await nodes.nodes[1].open_partition(name, 1)
            with contextlib.suppress(tidelog.TidelogError):
                await nodes.nodes[2].release_partition(name, 1)
            await in_thread(Rescue(nodes.nodes[2]._directory, log.name).set_aside)
            (tail,) = (await ok(nodes, 1, "GET", f"{PATH}/rescue"))["tails"]
            assert (tail["node"], tail["partition"]) == ("node2", 1)
            wanted = {"name": tail["name"], "partition": 1, "node": "node2"}
            assert (await asked(nodes, 1, "POST", f"{PATH}/rescue?wait=60", wanted)).status == 307
            done = await ok(nodes, 2, "POST", f"{PATH}/rescue?wait=60", wanted)
            assert done["result"]["appended"] == 1, done
            found = await ok(nodes, 1, "GET", f"{MESSAGES}?partition=1")
            assert found["messages"][-1]["value"] == "lost"

    run(work())


def test_a_tail_goes_into_a_new_topic_that_all_nodes_know(tmp_path: Path) -> None:
    """It was made behind the back of the others, and nobody could read it. The tail need not be set aside before, it
    can be read beside the node, two who ask at once store it once, and the name of a partition is refused."""

    async def work() -> None:
        async with spread(tmp_path, partitions=2) as nodes:
            name = parse_topic_name(TOPIC)
            await ok(nodes, 2, "POST", f"{PATH}/ship?wait=60")
            await ok(nodes, 2, "POST", f"{MESSAGES}?partition=1", {"messages": [{"value": "lost"}]})
            log = nodes.nodes[2]._broker.find(name).open[1].topic

            def take_over() -> None:
                nodes.nodes[1]._directory.topic(log.name, take_over=True)

            await in_thread(take_over)
            nodes.owners[name, 1] = 1
            nodes._changed()
            await nodes.nodes[1].open_partition(name, 1)
            with contextlib.suppress(tidelog.TidelogError):
                await nodes.nodes[2].release_partition(name, 1)
            (tail,) = (await ok(nodes, 2, "GET", f"{PATH}/rescue"))["tails"]
            read = await ok(nodes, 2, "GET", f"{PATH}/rescue/{tail['name']}/messages?partition=1")
            assert [(one["value"], one["partition"]) for one in read["messages"]] == [("lost", 1)]
            wanted = {"name": tail["name"], "partition": 1, "node": "node2"}
            refused = await asked(nodes, 2, "POST", f"{PATH}/rescue?wait=60", {**wanted, "into": f"{TOPIC}-part-0"})
            assert (refused.status, "name of a partition" in refused.json["detail"]) == (400, True)
            saved = "shop/saved"
            both = [ok(nodes, 2, "POST", f"{PATH}/rescue?wait=60", {**wanted, "into": saved}) for _ in range(2)]
            done = [one["result"] for one in await asyncio.gather(*both)]
            assert sorted((one["appended"], one["already_there"]) for one in done) == [(0, 1), (1, 0)]
            assert nodes.topics[parse_topic_name(saved)].partitions == 2
            described = [await ok(nodes, number, "GET", f"/v1/topics/{saved}") for number in (1, 2)]
            assert [one["partitions"][1]["next_offset"] for one in described] == [1, 1]

    run(work())


def give_up(url: str, letters: str) -> None:
    with tidelog.connect(url, timeout=WAIT_SECONDS) as client:
        topic = client.topic(TOPIC)
        options: Any = {"max_deliveries": 1, "dead_letter_topic": letters, "redelivery_backoff_seconds": 0}
        with topic.subscribe("billing", "shared", **options) as consumer:
            for _ in range(8):
                message = consumer.receive(timeout=WAIT_SECONDS)
                assert message is not None
                consumer.nack(message, reason="no")
            for _ in range(WAIT_SECONDS * 10):
                if client.topic(letters).next_offset == 8:
                    return
                consumer.receive(timeout=0.1)
        raise AssertionError("the letters are not written")


def test_dead_letters_of_all_nodes_are_in_one_topic_that_all_know(tmp_path: Path) -> None:
    """Whichever node serves it. It is listed at once, and letters go back to the partitions that they came from, each
    once."""

    async def work() -> None:
        letters = "shop/letters"
        async with spread(tmp_path) as nodes:
            await in_thread(give_up, nodes.addresses[1].http, letters)
            assert parse_topic_name(letters) in nodes.topics
            path, owner = f"/v1/topics/{letters}/dead-letters", nodes.owner(letters)
            listed = (await ok(nodes, owner, "GET", path))["letters"]
            assert sorted(one["message"]["value"] for one in listed) == [str(number) for number in range(8)]
            sent = await ok(nodes, owner, "POST", f"{path}/replay", {"offsets": [3, 1]})
            rest = await ok(nodes, owner, "POST", f"{path}/replay", {})
            assert (sent["sent"], rest["sent"], rest["refused"]) == (2, 6, [])
            described = await ok(nodes, 1, "GET", PATH)
            assert sum(one["next_offset"] for one in described["partitions"]) == 16

    run(work())
