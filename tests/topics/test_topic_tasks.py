"""The async twins of topics, consumers, producers and log directories: the same results, and a loop that goes on."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.crash.tier_promises import NAME, open_node, tier_settings

import tidelog
from tidelog import Consumer, LatestByKey, LiveTopic, LogDirectory, NotSupportedError, Producer, Topic
from tidelog.store.aio import made_in_thread
from tidelog.testing import World

# What waits for nothing, or is for commands.
WITHOUT_TWIN = {
    Topic: {"statistics", "partition"},
    LiveTopic: {"statistics", "partition"},
    Consumer: set[str](),
    Producer: set[str](),
    LatestByKey: {"get", "items", "keys", "values", "offset_of"},
    LogDirectory: set[str](),
}


@pytest.fixture
def topic(tmp_path: Path) -> Iterator[Topic]:
    with tidelog.open(tmp_path) as log:
        yield log.topic(NAME)


@pytest.mark.parametrize("kind", WITHOUT_TWIN, ids=lambda kind: kind.__name__)
def test_everything_that_may_wait_has_an_async_twin(kind: type) -> None:
    """A method that is added without one is noticed here."""
    methods = {name for name, _ in inspect.getmembers(kind, callable) if not name.startswith("_")}
    twins = {name for name in methods if name.endswith("_async")}
    assert methods - twins - {name.removesuffix("_async") for name in twins} == WITHOUT_TWIN[kind]


@pytest.mark.parametrize("kind", [Topic, LiveTopic, LogDirectory, Producer])
def test_twins_take_the_same_arguments(kind: type) -> None:
    """In the same order, under the same names."""
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        twin = getattr(kind, f"{name}_async", None)
        if twin is not None and not name.startswith("_"):
            assert list(inspect.signature(twin).parameters) == list(inspect.signature(method).parameters), name


class TestSubscribing:
    """`subscribe_async` and what belongs to it."""

    def test_a_task_makes_uses_and_deletes_a_subscription(self, topic: Topic) -> None:
        """Without a call that waits in the thread of the loop."""
        topic.append_many([b"a", b"b", b"c"])

        async def play() -> None:
            async with await topic.subscribe_async("billing", "shared", start=1, max_unacked=5) as sub:
                message = await sub.receive_async(timeout=120)
                assert message is not None
                assert message.value == b"b"
                await sub.ack_async(message)
                assert (await sub.lag_async()).messages == 1
            assert await topic.subscriptions_async() == ["billing"]
            assert (await topic.subscription_info_async("billing")).offset == 2
            await topic.delete_subscription_async("billing")
            other = await topic.subscribe_async("other")
            await other.unsubscribe_async()
            assert await topic.subscriptions_async() == []

        asyncio.run(play())

    def test_without_a_start_it_begins_where_subscribe_does(self, tmp_path: Path) -> None:
        """At the first message of a topic that keeps them, and at the next one of a live topic."""
        with tidelog.open(tmp_path) as log:
            kept, live = log.topic("shop/kept"), log.topic("shop/live", reliable=False)
            for topic in (kept, live):
                topic.append(b"before")

            async def offset(topic: Topic) -> int:
                await topic.subscribe_async("here")
                return topic.subscription_info("here").offset

            assert asyncio.run(offset(kept)) == 0
            assert asyncio.run(offset(live)) == 1

    def test_the_loop_goes_on_while_a_store_is_slow(self, topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
        """A subscription is made in a worker thread, since its position is stored first."""
        threads: list[threading.Thread] = []
        subscribe = topic._registry.subscribe

        def recorded(*arguments: Any, **options: Any) -> Consumer:
            threads.append(threading.current_thread())
            return subscribe(*arguments, **options)

        monkeypatch.setattr(topic._registry, "subscribe", recorded)
        asyncio.run(topic.subscribe_async("billing"))
        assert len(threads) == 1
        assert threading.main_thread() not in threads

    def test_a_cancelled_task_leaves_no_consumer_behind(self, topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nobody could close it, and an exclusive subscription would be taken for ever."""
        is_busy, go_on = threading.Event(), threading.Event()
        subscribe = topic._registry.subscribe

        def slow(*arguments: Any, **options: Any) -> Consumer:
            is_busy.set()
            go_on.wait(120)
            return subscribe(*arguments, **options)

        monkeypatch.setattr(topic._registry, "subscribe", slow)

        async def play() -> None:
            task = asyncio.create_task(topic.subscribe_async("billing"))
            await asyncio.to_thread(is_busy.wait, 120)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            go_on.set()

        asyncio.run(play())  # waits for the worker threads
        monkeypatch.undo()
        topic.subscribe("billing").close()

    def test_a_consumer_has_no_thread(self, topic: Topic) -> None:
        """A hundred of them are made and wait with the few threads of the loop's pool."""

        async def play() -> int:
            before = threading.active_count()
            subs = await asyncio.gather(*(topic.subscribe_async("work", "shared") for _ in range(100)))
            waiting = [asyncio.create_task(sub.receive_async(timeout=120)) for sub in subs]
            await asyncio.sleep(0.05)
            more = threading.active_count() - before
            topic.append_many([b"x"] * 100)
            assert all(await asyncio.gather(*waiting))
            return more

        assert asyncio.run(play()) < 80


class TestCancelling:
    """What was made for a task that no longer wants it."""

    @pytest.mark.parametrize("is_late", [False, True])
    def test_it_is_given_back_once(self, is_late: bool) -> None:
        """Whether the task is cancelled before it was made, or when it is there and the task has not run since."""
        given_back: queue.SimpleQueue[str] = queue.SimpleQueue()
        is_busy, go_on = threading.Event(), threading.Event()

        def make() -> str:
            is_busy.set()
            go_on.wait(120)
            return "made"

        async def play() -> None:
            task = asyncio.create_task(made_in_thread(make, given_back.put))
            await asyncio.to_thread(is_busy.wait, 120)
            if is_late:
                go_on.set()
                time.sleep(0.1)  # the loop does not run: the task cannot learn of it
            task.cancel()
            await asyncio.wait([task])
            go_on.set()
            assert task.cancelled()

        asyncio.run(play())
        assert given_back.get(timeout=120) == "made"  # by a thread that the event loop does not wait for
        assert given_back.empty()

    def test_what_fails_is_an_error_and_nothing_is_given_back(self) -> None:
        """There is nothing."""
        given_back: list[str] = []

        def fails() -> str:
            raise NotSupportedError("not here")

        with pytest.raises(NotSupportedError):
            asyncio.run(made_in_thread(fails, given_back.append))
        assert given_back == []


class TestDirectory:
    """A log directory in tasks."""

    def test_a_task_opens_makes_lists_and_deletes_topics(self, tmp_path: Path) -> None:
        """All of it without a call that waits in the thread of the loop."""

        async def play() -> None:
            async with await tidelog.open_async(tmp_path, fsync_interval_ms=50) as log:
                topic = await log.topic_async(NAME, retention_seconds=3600)
                assert topic is log.topic(NAME)
                await topic.append_async(b"a", key=b"k", sync=True)
                assert (await topic.latest_by_key_async())[b"k"].value == b"a"
                assert await log.topics_async() == [NAME]
                assert await log.has_topic_async(NAME)
                assert await log.configure_topic_async(NAME, retention_seconds=60) == {"retention_seconds": 60}
                await topic.prune_async()
                await log.delete_topic_async(NAME)
                assert not await log.has_topic_async(NAME)
            with pytest.raises(tidelog.ClosedError):
                log.topics()

        asyncio.run(play())

    def test_sigterm_still_flushes(self, tmp_path: Path) -> None:
        """Though the worker thread that opens the directory cannot install a handler."""
        before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            asyncio.run(tidelog.open_async(tmp_path)).close()
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        finally:
            signal.signal(signal.SIGTERM, before)

    def test_a_task_ships_sweeps_and_seals(self) -> None:
        """A topic with a store."""
        with contextlib.closing(open_node(World(), "a", tier_settings())) as log:
            topic = log.topic(NAME)
            topic.append_many([b"a", b"b"])

            async def play() -> None:
                assert await topic.ship_async() == 2
                await topic.remove_orphans_async(await topic.plan_orphans_async())
                await topic.seal_async()

            asyncio.run(play())
            assert not topic._is_open


class TestReading:
    """`read_async` looks up in a worker thread what has to be looked up."""

    def _threads_of(self, monkeypatch: pytest.MonkeyPatch, topic: Topic, read: Callable[[], Any]) -> set[bool]:
        """Whether readers were opened in the main thread."""
        were_main: set[bool] = set()
        make = topic._reader

        def recorded(*arguments: Any) -> Any:
            were_main.add(threading.current_thread() is threading.main_thread())
            return make(*arguments)

        monkeypatch.setattr(topic, "_reader", recorded)

        async def play() -> None:
            assert [message.value async for message in read()] == [b"a", b"b"]

        asyncio.run(play())
        return were_main

    def test_a_time_is_looked_up_beside_the_loop(self, topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
        """It may be anywhere in large files, or in a store."""
        topic.append_many([b"a", b"b"])
        since = datetime(2020, 1, 1, tzinfo=UTC)
        assert self._threads_of(monkeypatch, topic, lambda: topic.read_async(since)) == {False}

    def test_so_is_everything_beside_another_owner(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where the topic ends has to be read from its files, or asked of the catalog."""
        with tidelog.open(tmp_path) as log:
            log.topic(NAME).append_many([b"a", b"b"], sync=True)
            with tidelog.open(tmp_path, read_only=True) as beside:
                topic = beside.topic(NAME)
                assert self._threads_of(monkeypatch, topic, topic.read_async) == {False}

    def test_wrong_arguments_are_told_by_the_call(self, topic: Topic) -> None:
        """As by `read`."""
        with pytest.raises(tidelog.InputError, match="on_gap"):
            topic.read_async(datetime(2020, 1, 1, tzinfo=UTC), on_gap="ignore")  # type: ignore[arg-type]
