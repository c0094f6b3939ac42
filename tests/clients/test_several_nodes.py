"""Unmodified clients of Kafka with an installation of several nodes: partitions and coordinators are not where they
bootstrap, and move while they work."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from tests.service.installation import Installation, installed, run
from tests.service.test_placement import created

WAIT_SECONDS = 100
Result = TypeVar("Result")


def bootstrap(nodes: Installation, number: int = 1) -> dict[str, Any]:
    host, port = nodes.addresses[number].kafka
    return {"bootstrap.servers": f"{host}:{port}", "topic.metadata.refresh.interval.ms": 1000}


def send(settings: dict[str, Any], numbers: range, partitions: int) -> list[KafkaError]:
    failed: list[KafkaError] = []
    producer = Producer({**settings, "enable.idempotence": True, "retry.backoff.ms": 50})
    for number in numbers:
        producer.produce(
            "shop.orders",
            b"%d" % number,
            partition=number % partitions,
            on_delivery=lambda error, _: failed.append(error) if error is not None else None,
        )
        producer.poll(0)
    assert producer.flush(WAIT_SECONDS) == 0
    return failed


def receive(settings: dict[str, Any], count: int, group: str = "billing", topic: str = "shop.orders") -> list[bytes]:
    """Values of so many messages, all of them committed."""
    consumer = Consumer(
        {
            **settings,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
        }
    )
    consumer.subscribe([topic])
    found: list[bytes] = []
    try:
        for _ in range(WAIT_SECONDS * 10):
            for message in consumer.consume(100, 0.1):
                error = message.error()
                if error is None:
                    found.append(message.value() or b"")
                elif error.fatal():
                    raise KafkaException(error)
            if len(found) >= count:
                consumer.commit(asynchronous=False)  # once: without news since the last one it is an error
                return found
        raise AssertionError(f"{len(found)} of {count} messages came")
    finally:
        consumer.close()


def in_thread(work: Callable[..., Result], *arguments: Any) -> Awaitable[Result]:
    return asyncio.to_thread(work, *arguments)


def test_clients_follow_partitions_and_coordinators(tmp_path: Path) -> None:
    """An idempotent producer goes on over two moves without an error, and a consumer group reads every message once,
    with its coordinator on another node than its partitions; the next coordinator has what it has committed."""

    async def work() -> None:
        async with installed(tmp_path) as nodes:
            await created(nodes, 2)
            await nodes.give_slots(2)
            sending = asyncio.ensure_future(in_thread(send, bootstrap(nodes), range(4000), 2))
            await nodes.move("shop/orders", 0, 2)
            await nodes.move("shop/orders", 0, 1)
            await nodes.move("shop/orders", 1, 1)
            assert await sending == []
            values = await in_thread(receive, bootstrap(nodes, 2), 4000)
            assert Counter(values) == Counter(b"%d" % number for number in range(4000))
            for slot in list(nodes.slots):
                nodes.slots[slot] = 1
            await asyncio.gather(*(nodes.nodes[2].release_slot(slot) for slot in nodes.slots))
            await asyncio.gather(*(nodes.nodes[1].acquire_slot(slot) for slot in nodes.slots))
            assert await in_thread(send, bootstrap(nodes, 2), range(4000, 4010), 2) == []
            values = await in_thread(receive, bootstrap(nodes, 2), 10)
            assert sorted(map(int, values)) == list(range(4000, 4010))

    run(work())


def transform(settings: dict[str, Any], count: int, step: Callable[[int], None]) -> None:
    """Consumes, and produces what it consumed to another topic, in transactions of ten; some are aborted first."""
    consumer = Consumer({**settings, "group.id": "copy", "auto.offset.reset": "earliest", "enable.auto.commit": False})
    producer = Producer({**settings, "transactional.id": "copier", "retry.backoff.ms": 50})
    producer.init_transactions(WAIT_SECONDS)
    consumer.subscribe(["shop.orders"])
    done = rounds = 0
    try:
        while done < count:
            messages = [one for one in consumer.consume(10, 1.0) if one.error() is None]
            if not messages:
                continue
            rounds += 1
            for is_commit in (rounds % 3 != 0, True):
                producer.begin_transaction()
                newest: dict[int, TopicPartition] = {}
                for message in messages:
                    place, offset = message.partition() or 0, message.offset() or 0
                    producer.produce("shop.copies", message.value(), partition=offset % 2)
                    newest[place] = TopicPartition("shop.orders", place, offset + 1)
                producer.send_offsets_to_transaction(
                    list(newest.values()), consumer.consumer_group_metadata(), WAIT_SECONDS
                )
                if is_commit:
                    producer.commit_transaction(WAIT_SECONDS)
                    break
                producer.abort_transaction(WAIT_SECONDS)
            done += len(messages)
            step(done)
    finally:
        consumer.close()


def test_transactions_span_nodes(tmp_path: Path) -> None:
    """The coordinator of the transaction is on one node, that of the group on the other, partitions on both, and the
    coordinator moves in the middle: each message is copied once, and offsets are committed with the copies."""

    async def work() -> None:
        async with installed(tmp_path) as nodes:
            await created(nodes, 2)
            await nodes.create_topic("shop/copies", 2)
            await nodes.move_slot("copier", 1)
            await nodes.move_slot("copy", 2)
            await nodes.give_slots(1)
            assert await in_thread(send, bootstrap(nodes), range(100), 2) == []
            loop, has_moved = asyncio.get_running_loop(), asyncio.Event()

            def step(done: int) -> None:
                if done >= 50 and not has_moved.is_set():
                    loop.call_soon_threadsafe(has_moved.set)

            copying = asyncio.ensure_future(in_thread(transform, bootstrap(nodes), 100, step))
            moved = asyncio.ensure_future(has_moved.wait())
            await asyncio.wait([copying, moved], return_when=asyncio.FIRST_COMPLETED)
            await nodes.move_slot("copier", 2)
            await nodes.move("shop/copies", 0, nodes.owner("shop/copies", 1))
            await copying
            moved.cancel()
            values = await in_thread(receive, bootstrap(nodes), 100, "check", "shop.copies")
            assert Counter(values) == Counter(b"%d" % number for number in range(100))

    run(work())
