"""Topics with transactions: readers, tables, subscriptions and views see what is committed, from every place."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.campaign import examples
from tests.transactional import PLAIN, STEPS, Step, fill, last_stable_offset, payload_of, stored, visible

import tidelog
from tidelog.errors import InputError, NotFoundError
from tidelog.log import LogSettings, isolation
from tidelog.testing import FaultyFiles, ManualClock
from tidelog.topics.directory import LogDirectory
from tidelog.topics.message import Message
from tidelog.topics.topic import Topic

NAME = "shop/orders"
BEGIN, MORE, COMMIT, ABORT = Step(1, key=b"k"), Step(1), Step(1, commits=True), Step(1, commits=False)
SMALL = LogSettings(rotate_max_bytes=1024, read_chunk_bytes=256, cache_max_messages=3)
WAIT_SECONDS = 60


def in_memory() -> LogDirectory:
    """For tests without positions, which are in a metadata file on the disk."""
    return LogDirectory(Path("/data"), SMALL, files=FaultyFiles(), clock=ManualClock())


def on_disk(path: Path, settings: LogSettings = SMALL) -> LogDirectory:
    return LogDirectory(path / "data", settings, clock=ManualClock())


def offsets(messages: Sequence[Message]) -> list[int]:
    """Their offsets, once each value was found to be that of its offset."""
    assert [int(message.value or b"") for message in messages] == [message.offset for message in messages]
    return [message.offset for message in messages]


@given(STEPS, st.integers(0, 40), st.integers(0, 45))
def test_read_sees_what_is_committed(steps: list[Step], start: int, stop: int) -> None:
    """By default; uncommitted messages are seen by those who ask for them."""
    start, stop = sorted((start % (len(steps) + 1), stop % (len(steps) + 2)))
    with in_memory() as log:
        topic = log.topic(NAME)
        fill(topic, steps)
        assert offsets(list(topic.read(start, stop))) == visible(steps, start, stop)
        everything = topic.read(start, stop, isolation="read_uncommitted")
        assert offsets(list(everything)) == stored(steps, start, stop)
        assert topic.last_stable_offset() == last_stable_offset(steps)


@pytest.mark.parametrize("ahead", [0, 4 << 20])
@settings(max_examples=examples(8))
@given(steps=STEPS, more=STEPS, start=st.integers(0, 99), ships=st.integers(0, 99))
def test_store_files_and_views_show_the_same(
    ahead: int, steps: list[Step], more: list[Step], start: int, ships: int
) -> None:
    """From the store alone, from the disk of the owner and beside it, with a transaction that is in both."""
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(isolation, "AHEAD_BYTES", ahead)
        store, metadata = f"file://{place}/store", f"sqlite://{place}/metadata.db"
        whole = [PLAIN, *steps, *more]
        ships, start = 1 + ships % (len(steps) + 1), start % (len(whole) + 1)
        with tidelog.open(f"{place}/node", store=store, metadata=metadata, rotate_max_bytes=1024) as log:
            topic = log.topic(NAME, local_retention_bytes=1)
            fill(topic, whole[:ships])
            topic.ship()
            topic.prune()
            fill(topic, whole[ships:])
            topic.flush()
            assert offsets(list(topic.read(start))) == visible(whole, start)
            with tidelog.open(f"{place}/node", store=store, metadata=metadata, read_only=True) as beside:
                assert offsets(list(beside.topic(NAME).read(start))) == visible(whole, start)
                assert beside.topic(NAME).last_stable_offset() == last_stable_offset(whole)
            with tidelog.open(f"{place}/elsewhere", store=store, metadata=metadata, read_only=True) as bucket:
                published = whole[: bucket.topic(NAME).next_offset]
                begin = min(start, len(published))
                assert offsets(list(bucket.topic(NAME).read(begin))) == visible(published, begin)
                assert asyncio.run(read_async(bucket.topic(NAME), begin)) == visible(published, begin)


async def read_async(topic: Topic, start: int) -> list[int]:
    return [message.offset async for message in topic.read_async(start)]


@given(STEPS, STEPS)
def test_table_has_the_newest_committed_message_of_each_key(steps: list[Step], more: list[Step]) -> None:
    """What is open is not in it, and is taken in by the refresh after its end; what is aborted never is."""
    with in_memory() as log:
        topic = log.topic(NAME)
        fill(topic, steps)
        view = topic.latest_by_key()
        assert {key: message.offset for key, message in view.items()} == newest(steps, visible(steps))
        sparse = topic.latest_by_key(values=False)
        assert {key: message.offset for key, message in sparse.items()} == newest(steps, visible(steps))
        fill(topic, more)
        assert view.refresh() == last_stable_offset(steps + more)
        assert {key: view.offset_of(key) for key in view} == newest(steps + more, visible(steps + more))
        dirty = topic.latest_by_key(isolation="read_uncommitted")
        assert {key: dirty.offset_of(key) for key in dirty} == newest(steps + more, stored(steps + more))


def newest(steps: Sequence[Step], seen: list[int]) -> dict[bytes, int]:
    return {key: offset for offset in seen if (key := steps[offset].key) is not None}


# Following


@pytest.mark.parametrize("end", [COMMIT, ABORT])
def test_follower_waits_for_the_outcome(end: Step) -> None:
    """It gets the messages before, none of the open transaction, and goes on when that has ended."""
    steps = [PLAIN, BEGIN, PLAIN, MORE, end, PLAIN]
    with in_memory() as log:
        topic = log.topic(NAME)
        fill(topic, steps[:4])
        expected = visible(steps)
        messages = topic.read(follow=True)
        assert next(messages).offset == 0
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.extend(next(messages).offset for _ in expected[1:]))
        thread.start()
        fill(topic, steps[4:])
        thread.join(WAIT_SECONDS)
        assert found == expected[1:]


def test_follower_in_a_task_waits_for_the_outcome() -> None:
    """The same on an event loop."""
    steps = [PLAIN, BEGIN, PLAIN, COMMIT, PLAIN]

    async def read(topic: Topic) -> list[int]:
        messages = topic.read_async(follow=True)
        found = [(await anext(messages)).offset]

        async def read_on() -> int:
            return (await anext(messages)).offset

        waiting = asyncio.ensure_future(read_on())
        await asyncio.sleep(0)
        fill(topic, steps[3:])
        found.append(await asyncio.wait_for(waiting, WAIT_SECONDS))
        return [*found, await read_on(), await read_on()]

    with in_memory() as log:
        topic = log.topic(NAME)
        fill(topic, steps[:3])
        assert asyncio.run(read(topic)) == visible(steps)


def test_follower_of_the_store_alone_waits_for_what_is_shipped(tmp_path: Path) -> None:
    """Another node polls the catalog: it sees the outcome once the owner has shipped it."""
    store, metadata = f"file://{tmp_path}/store", f"sqlite://{tmp_path}/metadata.db"
    steps = [PLAIN, BEGIN, PLAIN, COMMIT, PLAIN]
    with tidelog.open(tmp_path / "node", store=store, metadata=metadata) as log:
        topic = log.topic(NAME)
        fill(topic, steps[:3])
        topic.ship()
        with tidelog.open(tmp_path / "elsewhere", store=store, metadata=metadata, read_only=True) as other:
            messages = other.topic(NAME).read(follow=True)
            assert next(messages).offset == 0
            found: list[int] = []
            thread = threading.Thread(target=lambda: found.extend(next(messages).offset for _ in range(3)))
            thread.start()
            fill(topic, steps[3:])
            topic.ship()
            thread.join(WAIT_SECONDS)
            assert [0, *found] == visible(steps)


def test_partitions_have_last_stable_offsets_of_their_own(tmp_path: Path) -> None:
    """An open transaction in one holds up that one; a follower of all is woken by its end."""
    with on_disk(tmp_path) as log:
        topic = log.topic(NAME, partitions=2)
        fill(topic.partition(0), [PLAIN, BEGIN, PLAIN])
        fill(topic.partition(1), [PLAIN, PLAIN])
        found = [(message.partition, message.offset) for message in topic.read()]
        assert sorted(found) == [(0, 0), (1, 0), (1, 1)]
        everything = list(topic.read(isolation="read_uncommitted", order="arrival"))
        assert len(everything) == 5
        messages = topic.read(follow=True)
        assert sorted((one.partition, one.offset) for one in (next(messages) for _ in range(3))) == sorted(found)
        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.extend(next(messages).offset for _ in range(2)))
        thread.start()
        fill(topic.partition(0), [COMMIT])
        thread.join(WAIT_SECONDS)
        assert seen == [1, 2]


# Subscriptions


@settings(max_examples=examples(20))
@given(STEPS, STEPS, st.sampled_from(["exclusive", "shared", "key_shared"]))
def test_subscription_delivers_what_is_committed(steps: list[Step], more: list[Step], kind: str) -> None:
    """In order up to the last stable offset; what is left out counts as acknowledged, also after a restart."""
    whole = steps + more
    with tempfile.TemporaryDirectory() as place:
        with on_disk(Path(place)) as log:
            topic = log.topic(NAME)
            fill(topic, steps)
            topic.flush()  # a position is stored as far as the messages are durable
            assert consumed(topic, kind, last_stable_offset(steps)) == visible(steps)
            assert topic.subscription_info("s").offset == last_stable_offset(steps)
            fill(topic, more)
        with on_disk(Path(place)) as log:
            topic = log.topic(NAME)
            assert visible(steps) + consumed(topic, kind, last_stable_offset(whole)) == visible(whole)
            assert topic.subscription_info("s").lag_messages == len(whole) - last_stable_offset(whole)


def consumed(topic: Topic, kind: str, end: int) -> list[int]:
    """All that can be had up to an offset, acknowledged, and what comes then, which is nothing."""
    found: list[int] = []
    with topic.subscribe("s", kind, progress_flush_interval_seconds=3600) as consumer:  # type: ignore[arg-type]
        is_at_end = False
        while not is_at_end:
            is_at_end = topic.subscription_info("s").offset >= end
            messages = consumer.receive_many(7, timeout=0)
            found += [message.offset for message in messages]
            consumer.ack_many(messages)
        consumer.flush()
    return sorted(found)


@pytest.mark.parametrize("cached", [3, 10_000])
@pytest.mark.parametrize("count", [1, 99, 500])
def test_lag_is_none_when_everything_visible_is_acknowledged(count: int, cached: int, tmp_path: Path) -> None:
    """The end of a transaction, and one that was aborted behind it, do not stay as lag once they are passed."""
    few = LogSettings(rotate_max_bytes=1024, read_chunk_bytes=256, cache_max_messages=cached)
    with on_disk(tmp_path, few) as log:
        topic = log.topic(NAME)
        fill(topic, [*[MORE] * count, COMMIT, Step(2), Step(2, commits=False)])
        topic.flush()
        with topic.subscribe("s") as consumer:
            left = count
            while left:
                messages = consumer.receive_many(left, timeout=WAIT_SECONDS)
                consumer.ack_many(messages)
                left -= len(messages)
            while consumer.lag.messages:
                assert consumer.receive(timeout=0) is None


@pytest.mark.parametrize("end", [COMMIT, ABORT])
def test_waiting_consumer_is_woken_by_the_end_of_a_transaction(end: Step, tmp_path: Path) -> None:
    """It sleeps at the last stable offset, and gets what comes behind it once there is an outcome."""
    steps = [BEGIN, PLAIN, end]
    with on_disk(tmp_path) as log:
        topic = log.topic(NAME)
        fill(topic, steps[:2])
        with topic.subscribe("s") as consumer:
            assert consumer.receive(timeout=0) is None
            assert consumer.lag.messages == 2
            found: list[int] = []
            thread = threading.Thread(target=lambda: found.extend(received(consumer, len(visible(steps)))))
            thread.start()
            fill(topic, [end])
            thread.join(WAIT_SECONDS)
            assert found == visible(steps)


def received(consumer: tidelog.Consumer, count: int) -> list[int]:
    """The offsets of so many messages."""
    found = [consumer.receive(timeout=WAIT_SECONDS) for _ in range(count)]
    return [message.offset for message in found if message is not None]


def test_waiting_consumer_does_not_read_again_and_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """While a transaction is open and nothing is appended, a consumer that waits reads nothing."""
    with on_disk(tmp_path) as log:
        topic = log.topic(NAME)
        fill(topic, [BEGIN, PLAIN])
        with topic.subscribe("s") as consumer:
            assert consumer.receive(timeout=0) is None
            feed, reads = consumer._subscription._feed, list[int]()
            read = feed.read

            def counted(offset: int) -> object:
                reads.append(offset)
                return read(offset)

            monkeypatch.setattr(feed, "read", counted)
            assert consumer.receive(timeout=0.05) is None
            assert reads == []
            fill(topic, [COMMIT])
            assert received(consumer, 2) == [0, 1]
            assert reads


def test_seek_behind_an_open_transaction_reads_from_there(tmp_path: Path) -> None:
    """What an earlier position waits for does not hold up another one."""
    with on_disk(tmp_path) as log:
        topic = log.topic(NAME)
        fill(topic, [PLAIN, BEGIN, PLAIN, PLAIN])
        with topic.subscribe("s") as consumer:
            assert received(consumer, 1) == [0]
            assert consumer.receive(timeout=0) is None
            consumer.seek(2)
            assert received(consumer, 2) == [2, 3]
            consumer.seek(0)
            assert received(consumer, 1) == [0]


# The way out of a transaction that hangs


def test_open_transactions_are_listed_and_aborted() -> None:
    """By the owner, with a control record: readers go on behind it."""
    steps = [PLAIN, Step(7), PLAIN, Step(9), Step(7)]
    with in_memory() as log:
        topic = log.topic(NAME)
        fill(topic, steps)
        found = [(one.producer_id, one.first_offset, one.last_offset) for one in topic.open_transactions()]
        assert found == [(7, 1, 4), (9, 3, 3)]
        assert topic.last_stable_offset() == 1
        assert topic.abort_transaction(7).first_offset == 1
        assert [one.producer_id for one in topic.open_transactions()] == [9]
        assert offsets(list(topic.read())) == [0, 2]
        with pytest.raises(NotFoundError, match="producer 7 has no open transaction"):
            topic.abort_transaction(7)
        topic.abort_transaction(9)
        assert topic.last_stable_offset() == topic.next_offset == 7
        assert offsets(list(topic.read())) == [0, 2]


def test_open_transaction_that_retention_deleted_holds_nobody_up() -> None:
    """Its messages are gone, and so is it."""
    with in_memory() as log:
        topic = log.topic(NAME, retention_bytes=2000)
        fill(topic, [BEGIN])
        assert [one.producer_id for one in topic.open_transactions()] == [1]
        fill(topic, [PLAIN] * 100, size=100)
        topic.flush()
        topic.prune()
        assert topic.start_offset > 0
        assert topic.open_transactions() == []
        assert topic.last_stable_offset() == topic.next_offset


def test_isolation_is_checked_by_the_call() -> None:
    """A wrong word is refused before anything is read."""
    wrong: str = "dirty"
    with in_memory() as log:
        topic = log.topic(NAME)
        with pytest.raises(InputError, match="isolation"):
            topic.read(isolation=wrong)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="isolation"):
            topic.read_async(isolation=wrong)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="isolation"):
            topic.latest_by_key(isolation=wrong)  # type: ignore[arg-type]


def test_producers_of_the_library_are_recovered_behind_an_open_transaction() -> None:
    """An open transaction of somebody else does not hide what a producer has stored."""
    files = FaultyFiles()
    with LogDirectory(Path("/data"), SMALL, files=files, clock=ManualClock()) as log:
        topic = log.topic(NAME)
        topic._log.append(payload_of(BEGIN, 0))
        with topic.producer("p") as producer:
            assert producer.append(b"1", sequence=5) == 1
    files.remove(Path("/data") / NAME / "producers.ckpt")
    again = LogDirectory(Path("/data"), SMALL, files=files, clock=ManualClock())
    with again, again.topic(NAME).producer("p") as producer:
        assert producer.append(b"1", sequence=5) == 1
