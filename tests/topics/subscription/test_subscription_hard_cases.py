"""Subscriptions when things go wrong around them: seeks, forks, dead loops, wrong arguments, owners that changed."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread, Timer
from typing import Any

import pytest
from tests.crash.tier_promises import open_node, tier_settings

import tidelog
from tidelog.clock import ManualClock, to_datetime
from tidelog.errors import ClosedError, DiskFullError, FencedError, InputError, StoreUnavailableError
from tidelog.store import scheduler as background
from tidelog.testing import FaultyFiles, World
from tidelog.topics.directory import LogDirectory
from tidelog.topics.subscription.consumer import Consumer
from tidelog.topics.subscription.delivery import MAX_HOLES
from tidelog.topics.subscription.queue import Delivery
from tidelog.topics.topic import Topic

NAME = "shop/orders"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def log(tmp_path: Path, clock: ManualClock) -> Iterator[LogDirectory]:
    with LogDirectory(tmp_path / "data", clock=clock) as opened:
        yield opened


@pytest.fixture
def topic(log: LogDirectory) -> Topic:
    topic = log.topic(NAME)
    topic.append_many([b"%d" % number for number in range(10)])
    return topic


def offsets(sub: Consumer, count: int = 100) -> list[int]:
    """What it gets now."""
    return [message.offset for message in sub.receive_many(count, timeout=0)]


def stored_offset(topic: Topic) -> int:
    cursor = topic._registry.cursors.load("work")
    assert cursor is not None
    return cursor.offset


# A full disk


@pytest.fixture
def full(tmp_path: Path, clock: ManualClock) -> Iterator[Topic]:
    """A topic on a full disk that has just been opened: ten messages are in its files, the eleventh in memory alone."""
    files = FaultyFiles()
    with LogDirectory(tmp_path / "data", files=files) as log:
        log.topic(NAME).append_many([b"%d" % number for number in range(10)], sync=True)
        log.topic(NAME).subscribe("work", start="earliest").close()
    files.capacity_bytes = sum(len(content or b"") for content in files.tree().values())
    with LogDirectory(tmp_path / "data", files=files, clock=clock) as log:
        topic = log.topic(NAME)
        with pytest.raises(DiskFullError):
            topic.append(b"10", sync=True)
        yield topic
        files.heal()


def test_a_subscription_gets_messages_on_a_full_disk(full: Topic) -> None:
    """What is in files and what waits in memory, and it can be acknowledged."""
    sub = full.subscribe("work")
    messages = sub.receive_many(100, timeout=0)
    assert [message.offset for message in messages] == list(range(11))
    sub.ack_many(messages)
    sub.close()
    assert stored_offset(full) == 10  # as much as is durable
    assert [message.offset for message in full.read("earliest")] == list(range(11))


def test_a_new_subscription_begins_at_the_end_on_a_full_disk(full: Topic) -> None:
    """Without this nobody could begin to consume until there was room: it does not wait for the disk."""
    sub = full.subscribe("new", start="latest")
    assert offsets(sub) == []
    cursor = full._registry.cursors.load("new")
    assert cursor is not None
    assert cursor.offset == 10  # after a crash the log ends there
    sub.close()


# Seeking


def test_who_goes_back_gets_everything_again(topic: Topic) -> None:
    """Acknowledgements of what was handed out before the seek do not make holes in what is asked for again."""
    worker, operator = topic.subscribe("work", "shared"), topic.subscribe("work", "shared")
    before = worker.receive_many(5, timeout=0)
    operator.seek(0)
    worker.ack_many(before)
    assert offsets(operator) == list(range(10))


def test_an_acknowledgement_after_a_seek_counts_for_what_came_since(topic: Topic) -> None:
    """The same consumer that had a message before gets it again, and settles it."""
    sub = topic.subscribe("work", "shared")
    before = sub.receive_many(3, timeout=0)
    sub.seek(0)
    assert offsets(sub) == list(range(10))
    sub.ack_many(before)
    sub.close()
    assert offsets(topic.subscribe("work", "shared")) == list(range(3, 10))


def test_a_cumulative_acknowledgement_from_before_a_seek_settles_nothing(topic: Topic) -> None:
    """It speaks of messages that are to come again."""
    sub = topic.subscribe("work")
    last = sub.receive_many(5, timeout=0)[-1]
    sub.seek(0)
    assert offsets(sub, 2) == [0, 1]
    with pytest.raises(InputError):
        sub.ack_cumulative(last)
    assert offsets(sub) == list(range(2, 10))


def test_a_seek_over_messages_that_are_not_on_the_disk_is_stored_all_the_same(tmp_path: Path) -> None:
    """They are brought there first: what was passed over on purpose does not come after a crash."""
    with tidelog.open(tmp_path, fsync_interval_ms=3_600_000) as log:
        topic = log.topic(NAME)
        sub = topic.subscribe("work")
        topic.append_many([b"x"] * 10)
        sub.seek("latest")
        assert sub._subscription.position.offset == 10


# Acknowledging


def test_a_cumulative_acknowledgement_leaves_what_is_delayed(topic: Topic, clock: ManualClock) -> None:
    """Nobody has seen it yet: it comes when it is due, also when that is so by the time of the acknowledgement."""
    due = to_datetime(clock.now_us()) + timedelta(hours=1)
    sub = topic.subscribe("work", start="latest")
    for _ in range(2):
        topic.append(b"later", deliver_at=due)
        topic.append(b"now")
    first = sub.receive(0)
    assert first is not None
    sub.ack_cumulative(first)
    second = sub.receive(0)
    clock.advance(3601)
    assert sub._subscription.state.waiting_count == 2
    sub._subscription.state.tick(sub._subscription._now())
    sub.ack_cumulative(second or 0)
    assert offsets(sub) == [10, 12]


def test_what_was_read_ahead_cannot_be_acknowledged_with_those_before(topic: Topic) -> None:
    """Only what was handed out can be: the others would be lost."""
    sub = topic.subscribe("work")
    assert sub.receive(0) is not None
    with pytest.raises(InputError, match="not delivered"):
        sub.ack_cumulative(7)
    assert offsets(sub) == list(range(1, 10))


def test_one_wrong_acknowledgement_among_many_leaves_nobody_waiting(topic: Topic) -> None:
    """Those before it count, and whoever waited for room goes on."""
    first, second = (topic.subscribe("work", "shared", max_unacked=5) for _ in range(2))
    taken = first.receive_many(5, timeout=0)
    found: list[Any] = []
    thread = Thread(target=lambda: found.append(second.receive(120)))
    thread.start()
    time.sleep(0.1)
    with pytest.raises(InputError):
        first.ack_many([*taken, 10**9])
    thread.join(120)
    assert found[0].offset == 5


def test_a_position_cannot_be_made_too_large_to_be_stored(tmp_path: Path) -> None:
    """Acknowledging every second message that was received before, and not since the subscription was opened again,
    ends in an error, not in a position that is stuck."""
    with tidelog.open(tmp_path) as log:
        topic = log.topic(NAME)
        topic.append_many([b"x"] * (2 * MAX_HOLES + 100))
        sub = topic.subscribe("work", "shared")
        with pytest.raises(InputError, match="too many"):
            sub.ack_many(Delivery(b"x", offset=offset) for offset in range(1, topic.next_offset, 2))
        sub.flush()
        assert sub._subscription.position.cursor.acked


def test_failures_of_messages_that_are_passed_over_are_forgotten(topic: Topic) -> None:
    """A subscription that is opened again with a filter does not count for ever what the filter leaves out."""
    sub = topic.subscribe("work", redelivery_backoff_seconds=0)
    for message in sub.receive_many(10, timeout=0):
        sub.nack(message)
    sub.close()
    sub = topic.subscribe("work", filter=lambda message: message.offset == 9)
    assert offsets(sub) == [9]
    assert list(sub._subscription.state.failures) == [9]


@pytest.mark.parametrize("matches", [5, "kind", [("kind", b"x")], {"kind": "text"}, {5: b"x"}, {"kind": None}])
def test_a_filter_that_cannot_match_is_refused(topic: Topic, matches: Any) -> None:
    """A header is text and its value bytes; anything else would silently pass over the whole topic."""
    with pytest.raises(InputError, match="filter"):
        topic.subscribe("work", filter=matches)
    assert topic.subscriptions() == []


# Tasks, loops, processes


def test_a_task_that_is_cancelled_before_a_thread_is_free_holds_nobody_up(tmp_path: Path) -> None:
    """It was its turn to read the disk, and all worker threads were busy: others read then."""
    with tidelog.open(tmp_path, cache_max_messages=4) as log:
        topic = log.topic(NAME)
        for number in range(50):
            topic.append(b"%d" % number)
        topic.flush()
        sub = topic.subscribe("work", "shared")

        async def main() -> None:
            loop, is_free = asyncio.get_running_loop(), Event()
            loop.set_default_executor(ThreadPoolExecutor(1))
            busy = loop.run_in_executor(None, is_free.wait, 120)
            task = asyncio.create_task(sub.receive_async())
            await asyncio.sleep(0.05)
            assert sub._subscription._is_reading
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            is_free.set()
            await busy

        asyncio.run(main())
        assert sub.receive(120) is not None


def test_a_loop_that_was_closed_in_the_middle_holds_nobody_up(tmp_path: Path) -> None:
    """Its task was the one that listened to the log, and will never run again: somebody else listens."""
    with tidelog.open(tmp_path) as log:
        topic = log.topic(NAME)
        first, second = topic.subscribe("work", "shared"), topic.subscribe("work", "shared")
        loop = asyncio.new_event_loop()
        task = loop.create_task(first.receive_async())
        loop.run_until_complete(asyncio.sleep(0.05))
        loop.close()
        Timer(0.2, lambda: topic.append(b"x")).start()
        assert second.receive(300) is not None
        assert not task.done()


def test_a_forked_child_moves_no_position(tmp_path: Path) -> None:
    """It has a copy of everything, and what it acknowledges in there is not the parent's."""
    with tidelog.open(tmp_path) as log:
        topic = log.topic(NAME)
        topic.append_many([b"x"] * 10, sync=True)
        sub = topic.subscribe("work")
        taken = sub.receive_many(10, timeout=0)
        sub.ack_many(taken[:2])
        sub.flush()
        child = os.fork()
        if not child:
            status = 1
            try:
                sub.ack_many(taken)
                sub.flush()
            except ClosedError:
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert stored_offset(topic) == 2
        sub.ack_many(taken[2:4])
        sub.flush()
        assert stored_offset(topic) == 4


# Owners


def test_a_position_beyond_the_end_of_the_log_passes_over_nothing(tmp_path: Path) -> None:
    """The log was put back from a copy that is older than the positions; its offsets are given to other messages."""
    with tidelog.open(tmp_path / "data") as log:
        topic = log.topic(NAME)
        topic.append_many([b"kept"] * 5, sync=True)
        shutil.copytree(tmp_path / "data" / NAME, tmp_path / "copy")
        topic.append_many([b"gone"] * 5, sync=True)
        with topic.subscribe("work") as sub:
            sub.ack_many(sub.receive_many(10, timeout=0))
    shutil.rmtree(tmp_path / "data" / NAME)
    shutil.copytree(tmp_path / "copy", tmp_path / "data" / NAME)
    with tidelog.open(tmp_path / "data") as log:
        log.topic(NAME).append_many([b"new"] * 10, sync=True)
    with tidelog.open(tmp_path / "data") as log, log.topic(NAME).subscribe("work") as sub:
        assert offsets(sub) == list(range(5, 15))


def test_who_waits_for_a_topic_that_went_elsewhere_is_told(tmp_path: Path) -> None:
    """Nothing will ever be appended here again, and nothing has to be stored: it would wait for ever."""
    nodes = [tidelog.open(tmp_path / node, store=f"file://{tmp_path}/store", metadata="bucket") for node in "ab"]
    topic = nodes[0].topic(NAME)
    sub = topic.subscribe("work", progress_flush_interval_seconds=0.1)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            sub.receive(120)
        except FencedError as error:
            raised.append(error)

    thread = Thread(target=wait)
    thread.start()
    nodes[1].topic(NAME, take_over=True)
    assert topic._tiered is not None
    with pytest.raises(FencedError):
        topic._tiered.verify()  # as it does by itself every few seconds
    thread.join(120)
    assert raised
    for node in nodes:
        node.close()


@pytest.mark.parametrize("is_noticed", [False, True])
def test_closing_a_replaced_owner_says_which_acknowledgements_are_lost(is_noticed: bool) -> None:
    """The whole log directory, as closing a subscription does, whoever noticed first that another node owns the topics;
    all of them are closed all the same, and only the lost acknowledgements are told."""
    world = World(clock=ManualClock())
    first, second = open_node(world, "a", tier_settings()), open_node(world, "b", tier_settings())
    names = (NAME, "shop/returns")
    for name in names:
        topic = first.topic(name)
        topic.append_many([b"x"] * 3, sync=True)
        topic.ship()
    taken = [first.topic(name).subscribe("work", max_unacked=3) for name in names]
    idle = first.topic(NAME).subscribe("idle")
    for sub in taken:
        sub.ack(sub.receive(0) or 0)
    for name in names:
        second.topic(name, take_over=True)
    for sub in [*taken, idle] if is_noticed else []:
        sub._subscription._upkeep()
    with pytest.raises(FencedError, match="acknowledgements of the subscription work are lost"):
        first.close()
    first.close()
    with pytest.raises(ClosedError):
        first.topic(NAME)
    assert [second.topic(name).subscription_info("work").offset for name in names] == [0, 0]
    second.close()
    open_node(world, "a", tier_settings()).close()


def test_closing_a_consumer_of_a_replaced_owner_says_what_is_lost() -> None:
    """Also when the subscription noticed before, in the background; once, and not when nothing is lost."""
    world = World(clock=ManualClock())
    first, second = open_node(world, "a", tier_settings()), open_node(world, "b", tier_settings())
    topic = first.topic(NAME)
    topic.append_many([b"x"] * 3, sync=True)
    topic.ship()
    sub, idle = topic.subscribe("work"), topic.subscribe("idle")
    sub.ack(sub.receive(0) or 0)
    second.topic(NAME, take_over=True)
    for one in (sub, idle):
        one._subscription._upkeep()
    idle.close()
    with pytest.raises(FencedError, match="acknowledgements of the subscription work are lost"):
        sub.close()
    sub.close()
    first.close()
    second.close()


# Stores that fail


def test_closing_does_not_wait_for_a_store_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many positions are to be stored, it takes no longer than the patience with one."""
    monkeypatch.setattr(background, "_PATIENCE_SECONDS", 0.3)
    world = World(clock=ManualClock())
    log = open_node(world, "a", tier_settings())
    topic = log.topic(NAME)
    topic.append_many([b"x"] * 10, sync=True)
    for number in range(20):
        sub = topic.subscribe(f"work-{number}")
        sub.ack_many(sub.receive_many(5, timeout=0))
    answers = Event()

    def hang(operation: str, keys: str) -> None:
        answers.wait(120)

    world.metadata.on_request = hang
    begin = time.monotonic()
    log.close()
    assert time.monotonic() - begin < 60
    answers.set()


def test_closing_again_stores_what_could_not_be_stored() -> None:
    """A store that was down for a while costs nothing but the second attempt; so does subscribing again."""
    world = World(clock=ManualClock())
    with open_node(world, "a", tier_settings()) as log:
        topic = log.topic(NAME)
        topic.append_many([b"x"] * 10, sync=True)
        for is_made_again in (False, True):
            sub = topic.subscribe("work")
            taken = sub.receive_many(3, timeout=0)
            sub.ack_many(taken)
            world.metadata.on_request = _refuse
            for _ in range(2):
                with pytest.raises(StoreUnavailableError):
                    sub.close()
            world.metadata.on_request = None
            (topic.subscribe("work") if is_made_again else sub).close()
            assert stored_offset(topic) == taken[-1].offset + 1


def _refuse(operation: str, keys: Any) -> None:
    raise StoreUnavailableError("down")
