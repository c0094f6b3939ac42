"""Consumers that wait, in threads and in tasks: woken by what comes, what others give back, and the end."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import tidelog
from tidelog.errors import ClosedError
from tidelog.topics.topic import Topic

NAME = "shop/orders"


def fill(topic: Topic, count: int, first: int = 0) -> None:
    topic.append_many([b"%d" % number for number in range(first, first + count)])


def test_waiting_consumers_get_what_is_appended(tmp_path: Path) -> None:
    """Many threads wait on several subscriptions; every message comes once to each subscription."""
    with tidelog.open(tmp_path) as log:
        topic = log.topic(NAME)
        got: dict[str, list[int]] = {"one": [], "two": []}

        def work(name: str) -> None:
            with topic.subscribe(name, "shared") as sub:
                while len(got[name]) < 200:
                    message = sub.receive(timeout=0.2)
                    if message is not None:
                        got[name].append(message.offset)
                        sub.ack(message)

        threads = [Thread(target=work, args=(name,)) for name in ("one", "two", "one", "two")]
        for thread in threads:
            thread.start()
        for number in range(200):
            topic.append(b"%d" % number)
        for thread in threads:
            thread.join(120)
        assert sorted(got["one"]) == sorted(got["two"]) == list(range(200))


def test_a_waiting_consumer_gets_what_another_one_rejects(tmp_path: Path) -> None:
    """It is woken although nothing is appended."""
    with tidelog.open(tmp_path) as log:
        topic = log.topic(NAME)
        topic.append(b"x")
        first, second = topic.subscribe("work", "shared"), topic.subscribe("work", "shared")
        message = first.receive(120)
        assert message is not None
        found: list[Any] = []
        thread = Thread(target=lambda: found.append(second.receive(120)))
        thread.start()
        time.sleep(0.1)
        first.nack(message, delay=0)
        thread.join(120)
        assert found[0].delivery_count == 2


def test_a_waiting_consumer_gets_what_times_out_elsewhere(tmp_path: Path) -> None:
    """The time-out of a message that was handed out after it began to wait wakes it."""
    with tidelog.open(tmp_path) as log:
        topic = log.topic(NAME)
        first, second = (topic.subscribe("work", "shared", ack_timeout_seconds=0.3) for _ in range(2))
        found: list[Any] = []
        threads = [Thread(target=lambda sub: found.append(sub.receive(120)), args=(one,)) for one in (first, second)]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        topic.append(b"x")
        for thread in threads:
            thread.join(120)
        assert sorted(message.delivery_count for message in found) == [1, 2]


def test_iteration_ends_when_the_topic_is_closed(tmp_path: Path) -> None:
    """A consumer that waits is told."""
    log = tidelog.open(tmp_path)
    topic = log.topic(NAME)
    fill(topic, 3)
    seen: list[int] = []
    sub = topic.subscribe("billing")

    def work() -> None:
        for message in sub:
            seen.append(message.offset)
            sub.ack(message)

    thread = Thread(target=work)
    thread.start()
    deadline = time.monotonic() + 120
    while len(seen) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    log.close()
    thread.join(120)
    assert not thread.is_alive()
    assert seen == [0, 1, 2]
    with pytest.raises(ClosedError):
        sub.ack(0)


def test_tasks_receive_without_threads_of_their_own(tmp_path: Path) -> None:
    """Many tasks wait in one loop, and get everything once."""

    async def main(topic: Topic) -> list[int]:
        got: list[int] = []

        async def work() -> None:
            sub = topic.subscribe("work", "shared")
            while len(got) < 100:
                message = await sub.receive_async(timeout=0.5)
                if message is not None:
                    got.append(message.offset)
                    await sub.ack_async(message)
            sub.close()

        tasks = [asyncio.create_task(work()) for _ in range(10)]
        await asyncio.sleep(0.05)
        for number in range(100):
            await topic.append_async(b"%d" % number)
        await asyncio.gather(*tasks)
        return got

    with tidelog.open(tmp_path) as log:
        assert sorted(asyncio.run(main(log.topic(NAME)))) == list(range(100))


def test_async_iteration_gives_messages_as_they_come(tmp_path: Path) -> None:
    """`async for` over a consumer."""

    async def main(topic: Topic) -> list[int]:
        got = []
        sub = topic.subscribe("billing")
        async for message in sub:
            got.append(message.offset)
            await sub.ack_async(message)
            if len(got) == 3:
                break
        return got

    with tidelog.open(tmp_path) as log:
        fill(log.topic(NAME), 3)
        assert asyncio.run(main(log.topic(NAME))) == [0, 1, 2]


def test_everything_has_a_twin_for_tasks(tmp_path: Path) -> None:
    """Seeking, rejecting, acknowledging and closing never block the loop for a store."""

    async def main(topic: Topic) -> None:
        async with topic.subscribe("billing") as sub:
            batch = await sub.receive_many_async(3, timeout=120)
            await sub.ack_many_async(batch[:2])
            await sub.nack_async(batch[2], delay=0)
            again = await sub.receive_async(timeout=120)
            assert again is not None
            assert (again.offset, again.delivery_count) == (2, 2)
            await sub.ack_cumulative_async(again)
            await sub.flush_async()
            assert topic.subscription_info("billing").offset == 3
            await sub.seek_async(1)
            assert [message.offset for message in await sub.receive_many_async(9, timeout=120)] == [1, 2]
            assert await sub.receive_async(timeout=0.01) is None

    with tidelog.open(tmp_path) as log:
        fill(log.topic(NAME), 3)
        asyncio.run(main(log.topic(NAME)))


def test_a_cancelled_task_leaves_nothing_behind(tmp_path: Path) -> None:
    """Another one that waits gets the next message."""

    async def main(topic: Topic) -> None:
        sub = topic.subscribe("billing")
        first = asyncio.create_task(sub.receive_async())
        second = asyncio.create_task(sub.receive_async(timeout=120))
        await asyncio.sleep(0.05)
        first.cancel()
        await asyncio.sleep(0.05)
        await topic.append_async(b"x")
        message = await second
        assert message is not None
        sub.close()

    with tidelog.open(tmp_path) as log:
        asyncio.run(main(log.topic(NAME)))
