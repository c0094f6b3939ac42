"""Producers in tasks: appends keep their order, and the event loop is never held up."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.crash.tier_promises import NAME, open_node, tier_settings

import tidelog
from tidelog import BackpressureError, InputError, Topic
from tidelog.cold.tiered_log import TieredLog
from tidelog.testing import World
from tidelog.topics.producer import registry as producer_registry
from tidelog.topics.producer.producer import AppendLine


@pytest.fixture
def topic(tmp_path: Path) -> Iterator[Topic]:
    with tidelog.open(tmp_path) as log:
        yield log.topic(NAME)


class Threads:
    """Remembers in which threads a function was called."""

    def __init__(self, work: Callable[..., Any] = lambda *_: None) -> None:
        self.seen: list[threading.Thread] = []
        self._work = work

    def __call__(self, *arguments: object) -> Any:
        self.seen.append(threading.current_thread())
        return self._work(*arguments)

    @property
    def were_workers(self) -> bool:
        return bool(self.seen) and threading.main_thread() not in self.seen


class TestOrder:
    """Appends of tasks are made in the order in which the tasks came to them."""

    def test_no_append_is_overtaken_when_there_is_no_room(self, tmp_path: Path) -> None:
        """A message that waited for room used to count as stored when a later one was faster, and was lost."""
        with tidelog.open(tmp_path, append_queue_max_bytes=2000) as log:
            topic = log.topic(NAME)
            producer = topic.producer("app-1")

            async def play() -> list[int]:
                appends = (producer.append_async(b"x" * 90, sequence=n, timeout=120) for n in range(1000))
                return await asyncio.gather(*appends)

            assert asyncio.run(play()) == list(range(1000))
            assert topic.next_offset == 1000

    def test_one_that_fails_for_the_moment_takes_those_behind_it_with_it(self) -> None:
        """All of them can be made again: none was passed over."""
        made: list[int] = []
        is_full, room = threading.Event(), threading.Event()

        def fails() -> None:
            is_full.set()
            room.wait(120)
            raise BackpressureError("no room")

        async def play() -> list[Any]:
            line = AppendLine()
            asked = [asyncio.create_task(line.join(fails))]
            await asyncio.to_thread(is_full.wait, 120)
            asked += [asyncio.create_task(line.join(partial(made.append, number))) for number in range(3)]
            await asyncio.sleep(0)
            room.set()
            outcomes = await asyncio.gather(*asked, return_exceptions=True)
            await line.join(lambda: made.append(9))
            return outcomes

        outcomes = asyncio.run(play())
        assert [type(outcome) for outcome in outcomes] == [BackpressureError] * 4
        assert "before this one failed: no room" in str(outcomes[1])
        assert made == [9]

    def test_one_that_can_never_be_made_keeps_nobody(self) -> None:
        """Those behind it are made."""

        def fails() -> None:
            raise InputError("no such thing")

        async def play() -> list[Any]:
            line = AppendLine()
            asked = [asyncio.create_task(line.join(work)) for work in (fails, lambda: 1, lambda: 2)]
            return await asyncio.gather(*asked, return_exceptions=True)

        first, *others = asyncio.run(play())
        assert isinstance(first, InputError)
        assert others == [1, 2]

    def test_a_cancelled_task_leaves_its_append_where_it_was(self) -> None:
        """Taken out of the line, its sequence would be passed over by the next one and count as stored."""
        made: list[str] = []
        is_busy, go_on = threading.Event(), threading.Event()

        def first() -> None:
            is_busy.set()
            go_on.wait(120)
            made.append("first")

        async def play() -> None:
            line = AppendLine()
            before = asyncio.create_task(line.join(first))
            await asyncio.to_thread(is_busy.wait, 120)
            given_up = asyncio.create_task(line.join(lambda: made.append("given up")))
            last = asyncio.create_task(line.join(lambda: made.append("last")))
            await asyncio.sleep(0)
            given_up.cancel()
            await asyncio.sleep(0)
            go_on.set()
            await asyncio.gather(before, last)
            assert given_up.cancelled()

        asyncio.run(play())
        assert made == ["first", "given up", "last"]


class TestTheLoopGoesOn:
    """Whatever may take its time is done in a worker thread."""

    def test_who_owns_the_topic_is_asked_in_a_worker_thread(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """After a sleep of the process, when a store that is slow has to answer first."""
        with contextlib.closing(open_node(World(), "a", tier_settings())) as log:
            topic = log.topic(NAME)
            producer = topic.producer("app-1")
            asked = Threads()
            monkeypatch.setattr(TieredLog, "may_have_slept", property(lambda _: True))
            monkeypatch.setattr(topic, "_check_awake", asked)
            assert asyncio.run(producer.append_async(b"a", sequence=1)) == 0
            assert asyncio.run(producer.append_many_async([b"b", b"c"], sequence=2)) == [1, 2]
            assert asked.were_workers

    def test_the_file_of_the_producers_is_written_in_a_worker_thread(
        self, topic: Topic, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is synced to the disk, which takes a while."""
        producer = topic.producer("app-1")
        registry = topic._producers
        assert registry is not None
        wrote = Threads()
        monkeypatch.setattr(producer_registry, "_WRITE_EVERY_MESSAGES", 1)
        monkeypatch.setattr(registry, "_keep", wrote)
        asyncio.run(producer.append_async(b"a"))
        assert wrote.were_workers

    def test_what_an_interrupted_append_stored_is_looked_up_in_a_worker_thread(
        self, topic: Topic, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """That reads the topic."""
        producer = topic.producer("app-1")
        producer.append(b"a", sequence=1)
        registry = topic._producers
        assert registry is not None
        looked = Threads(registry._learn)
        monkeypatch.setattr(registry, "_learn", looked)
        producer._entry.unsure_from = 0
        assert asyncio.run(producer.append_async(b"a", sequence=1)) == 0
        producer._entry.unsure_from = 0
        assert asyncio.run(producer.last_sequence_async()) == 1
        assert looked.were_workers

    def test_a_producer_is_closed_by_async_with(self, topic: Topic) -> None:
        """As by `with`."""

        async def play() -> None:
            async with await topic.producer_async("app-1") as producer:
                assert await producer.append_async(b"a", sync=True) == 0
            with pytest.raises(tidelog.ClosedError):
                await producer.append_async(b"b")

        asyncio.run(play())
