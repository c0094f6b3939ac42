"""Producers: a message of the same producer and sequence is stored once, whoever restarts meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.crash.tier_promises import NAME, open_node, tier_settings
from tests.log.workbench import start_python

import tidelog
from tidelog import BackpressureError, ClosedError, FencedError, InputError, Message, Topic
from tidelog.log.directory import PRODUCERS
from tidelog.testing import World
from tidelog.topics.message import BatchMark, decode_extension, raw_extensions
from tidelog.topics.producer import dedup as producer_state
from tidelog.topics.producer import registry as producer_registry


@pytest.fixture
def topic(tmp_path: Path) -> Iterator[Topic]:
    with tidelog.open(tmp_path) as log:
        yield log.topic(NAME)


def values(topic: Topic) -> list[bytes]:
    return [message.value or b"" for message in topic.read()]


class TestOnce:
    """What is stored once."""

    def test_the_same_sequence_again_gives_the_same_offset(self, topic: Topic) -> None:
        """Whatever comes with it the second time: the first one counts."""
        with topic.producer("app-1") as producer:
            known = [producer.last_sequence]
            assert producer.append(b"a", sequence=7) == 0
            assert producer.append(b"other", sequence=7, key=b"k") == 0
            assert [*known, producer.last_sequence] == [None, 7]
        assert values(topic) == [b"a"]

    def test_sequences_are_counted_where_none_is_given(self, topic: Topic) -> None:
        """From 0 on, and on from the last one; gaps are fine."""
        producer = topic.producer("app-1")
        producer.append(b"a")
        assert producer.last_sequence == 0
        producer.append(b"b", sequence=10)
        producer.append(b"c")
        assert producer.last_sequence == 11
        assert values(topic) == [b"a", b"b", b"c"]

    def test_one_that_comes_too_late_counts_as_stored(self, topic: Topic) -> None:
        """A smaller sequence that never was stored is not stored any more, and has no offset."""
        producer = topic.producer("app-1")
        producer.append(b"a", sequence=5)
        assert producer.append(b"late", sequence=3) == -1
        assert values(topic) == [b"a"]

    def test_names_do_not_know_of_each_other(self, topic: Topic) -> None:
        """Each counts by itself, and beside plain appends."""
        one, two = topic.producer("one"), topic.producer("zwei-ä")
        assert [one.append(b"1", sequence=1), topic.append(b"plain"), two.append(b"2", sequence=1)] == [0, 1, 2]
        assert (one.last_sequence, two.last_sequence) == (1, 1)

    def test_a_window_of_sequences_is_remembered(self, topic: Topic) -> None:
        """The last 1000 with their offsets at least; of those before only that they are stored."""
        producer = topic.producer("app-1")
        for number in range(5000):
            producer.append(b"x", sequence=2 * number)
        assert [producer.append(b"x", sequence=2 * number) for number in range(4000, 5000)] == list(range(4000, 5000))
        assert producer.append(b"x", sequence=0) == -1
        assert producer.append(b"x", sequence=9001) == -1
        assert topic.next_offset == 5000

    def test_all_parts_of_a_message_are_kept(self, topic: Topic) -> None:
        """Key, headers and times as with `topic.append`, given by keyword or in a Message."""
        now = datetime(2025, 5, 5, tzinfo=UTC)
        whole = Message(b"v", key=b"k", headers={"h": b"1"}, timestamp=now, deliver_at=now)
        producer = topic.producer("app-1")
        producer.append(b"v", key=b"k", headers={"h": b"1"}, timestamp=now, deliver_at=now)
        producer.append(whole)
        for message in topic.read():
            assert (message.value, message.key, message.headers) == (b"v", b"k", {"h": b"1"})
            assert (message.timestamp, message.deliver_at) == (now, now)


class TestSeveral:
    """`append_many` of a producer."""

    def test_they_have_consecutive_sequences_and_are_one_batch(self, topic: Topic) -> None:
        """Each message says which producer, which sequence, and which place in the batch."""
        producer = topic.producer("app-1")
        assert producer.append_many([b"a", Message(b"b", key=b"k")], sequence=4) == [0, 1]
        assert producer.append_many([b"a", b"b"], sequence=4) == [0, 1]
        assert producer.last_sequence == 5
        batch = topic._log.read(0).next_batch()
        assert batch is not None
        assert batch.frames is None or batch.frames.count == 2
        topic.flush()
        frames = topic._log.read(0).next_batch()
        assert frames is not None
        assert frames.frames is not None
        marks = [decode_extension(data or b"") for data in raw_extensions(frames.frames, 0, 2) or []]
        assert [mark.batch for mark in marks] == [BatchMark(0, 2), BatchMark(1, 2)]
        assert [mark.producer for mark in marks] == [(1, 4, "app-1"), (1, 5, "app-1")]

    def test_of_some_that_are_stored_the_others_are_stored(self, topic: Topic) -> None:
        """Those that are new are stored together, behind the ones that are there."""
        producer = topic.producer("app-1")
        producer.append_many([b"a", b"b"], sequence=0)
        topic.append(b"between")
        assert producer.append_many([b"a", b"b", b"c", b"d"], sequence=0) == [0, 1, 3, 4]
        assert values(topic) == [b"a", b"b", b"between", b"c", b"d"]

    def test_none_is_fine(self, topic: Topic) -> None:
        """No message, no offset; a single one by mistake is refused."""
        producer = topic.producer("app-1")
        assert producer.append_many([], sync=True) == []
        one: Any = b"one"
        with pytest.raises(InputError, match="several messages"):
            producer.append_many(one)


class TestFencing:
    """One live producer a name."""

    def test_a_second_one_takes_over(self, topic: Topic) -> None:
        """The first one's appends raise from then on, in another way than those of a lost topic."""
        first = topic.producer("app-1")
        first.append(b"a", sequence=1)
        second = topic.producer("app-1")
        assert (first.epoch, second.epoch, second.last_sequence) == (1, 2, 1)
        with pytest.raises(FencedError, match="another producer was opened as 'app-1'"):
            first.append(b"b", sequence=2)
        first.close()
        assert second.append(b"b", sequence=2) == 1
        assert values(topic) == [b"a", b"b"]

    def test_a_closed_one_appends_nothing(self, topic: Topic) -> None:
        """Closing twice is fine, and the name can be opened again."""
        producer = topic.producer("app-1")
        producer.close()
        producer.close()
        with pytest.raises(ClosedError):
            producer.append(b"a")
        assert topic.producer("app-1").append(b"a") == 0

    def test_epochs_grow_over_restarts(self, tmp_path: Path) -> None:
        """As far as anything was stored under them."""
        for epoch in (1, 2, 3):
            with tidelog.open(tmp_path) as log, log.topic(NAME).producer("app-1") as producer:
                assert producer.epoch == epoch
                producer.append(b"x")


class TestThreadsAndTasks:
    """Looking, appending and remembering are one step."""

    def test_threads_that_repeat_each_other_store_each_sequence_once(self, topic: Topic) -> None:
        """Eight threads append the same hundred sequences through one producer: all get the same offsets."""
        producer = topic.producer("app-1")
        found: list[dict[int, int]] = []

        def run() -> None:
            mine = {}
            for number in range(100):
                with contextlib.suppress(BackpressureError):
                    mine[number] = producer.append(b"%d" % number, sequence=number, sync=number % 10 == 0)
            found.append(mine)

        threads = [threading.Thread(target=run) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert values(topic) == [b"%d" % number for number in range(100)]
        assert found == [{number: number for number in range(100)}] * 8

    def test_tasks(self, topic: Topic) -> None:
        """The async twins do the same."""

        async def play() -> None:
            producer = topic.producer("app-1")
            again = await asyncio.gather(*(producer.append_async(b"a", sequence=1, sync=True) for _ in range(20)))
            assert again == [0] * 20
            assert await producer.append_many_async([b"b", b"c"], sync=True) == [1, 2]
            assert await producer.append_many_async([b"b", b"c"], sequence=2) == [1, 2]

        asyncio.run(play())
        assert values(topic) == [b"a", b"b", b"c"]

    def test_an_interrupted_append_is_looked_up(self, topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ctrl-C came after the message was accepted and before that was remembered: it is not stored twice."""
        producer = topic.producer("app-1")
        producer.append(b"a", sequence=1)

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(producer_state.ProducerState, "record_many", interrupted)
            with pytest.raises(KeyboardInterrupt):
                producer.append(b"b", sequence=2)
        assert producer.append(b"b", sequence=2) == 1
        assert producer.last_sequence == 2
        assert values(topic) == [b"a", b"b"]


class TestInput:
    """What is refused, before anything is stored."""

    @pytest.mark.parametrize("name", ["", "n" * 240, "\ud800", 7])
    def test_names(self, topic: Topic, name: Any) -> None:
        """Text of 1 to 239 bytes."""
        with pytest.raises(InputError, match="producer"):
            topic.producer(name)

    @pytest.mark.parametrize("sequence", [-1, 1 << 64, True, "1", 1.0])
    def test_sequences(self, topic: Topic, sequence: Any) -> None:
        """Numbers of 64 bits."""
        with pytest.raises(InputError, match="sequence"):
            topic.producer("app-1").append(b"x", sequence=sequence)
        assert topic.next_offset == 0

    def test_the_last_sequence_of_all(self, topic: Topic) -> None:
        """Behind it there is none."""
        producer = topic.producer("app-1")
        producer.append(b"x", sequence=(1 << 64) - 1)
        with pytest.raises(InputError, match="sequence"):
            producer.append(b"y")

    def test_onlookers(self, tmp_path: Path) -> None:
        """Who only reads has no producers."""
        with tidelog.open(tmp_path) as log:
            log.topic(NAME).append(b"x")
            with tidelog.open(tmp_path, read_only=True) as onlooker, pytest.raises(InputError, match="read_only"):
                onlooker.topic(NAME).producer("app-1")


class TestRestarts:
    """What is stored is found again."""

    @pytest.mark.parametrize("keep_file", [True, False])
    def test_after_closing(self, tmp_path: Path, keep_file: bool) -> None:
        """With the file of the last time, and without it from the messages alone."""
        with tidelog.open(tmp_path) as log:
            producer = log.topic(NAME).producer("app-1")
            for number in range(50):
                producer.append(b"%d" % number, sequence=number)
            path = log._topic_directory(NAME) / PRODUCERS
        assert path.exists()
        if not keep_file:
            path.unlink()
        with tidelog.open(tmp_path) as log:
            producer = log.topic(NAME).producer("app-1")
            assert producer.last_sequence == 49
            assert [producer.append(b"again", sequence=number) for number in range(50)] == list(range(50))

    @pytest.mark.parametrize("damage", [b"", b"noise", b"tidelog producers 1 00000000\n{}\n"])
    def test_a_damaged_file_is_ignored(self, tmp_path: Path, damage: bytes) -> None:
        """It is a hint."""
        with tidelog.open(tmp_path) as log:
            log.topic(NAME).producer("app-1").append(b"x", sequence=3)
            path = log._topic_directory(NAME) / PRODUCERS
        path.write_bytes(damage)
        with tidelog.open(tmp_path) as log:
            assert log.topic(NAME).producer("app-1").last_sequence == 3

    def test_a_file_beside_other_messages_is_not_believed(self, tmp_path: Path) -> None:
        """It is of a topic that had other messages at these offsets: what it claims to be stored is not."""
        for name, sequence in (("other", 9), ("topic", 3)):
            with tidelog.open(tmp_path / name) as log:
                log.topic(NAME).producer("app-1").append(b"x", sequence=sequence)
        alien = (tmp_path / "other" / NAME / PRODUCERS).read_bytes()
        (tmp_path / "topic" / NAME / PRODUCERS).write_bytes(alien)
        with tidelog.open(tmp_path / "topic") as log:
            assert log.topic(NAME).producer("app-1").last_sequence == 3

    def test_what_retention_took_is_remembered(self, tmp_path: Path) -> None:
        """The messages are gone, that they were stored is not."""
        with tidelog.open(tmp_path, rotate_max_bytes=200) as log:
            log.topic(NAME).producer("app-1").append(b"x", sequence=3, sync=True)
        with tidelog.open(tmp_path, rotate_max_bytes=200) as log:
            topic = log.topic(NAME)
            for _ in range(20):
                topic.append(b"later", sync=True)
            topic._log.remove_below(10)
            assert topic.start_offset > 1
        with tidelog.open(tmp_path) as log:
            assert log.topic(NAME).producer("app-1").append(b"x", sequence=3) == 0

    def test_a_killed_process_stored_what_it_was_promised(self, tmp_path: Path) -> None:
        """kill -9 in the middle: repeating everything stores each sequence once."""
        code = """
import os, sys, tidelog
log = tidelog.open(sys.argv[1])
producer = log.topic("shop/orders").producer("app-1")
for number in range(100):
    producer.append(b"%d" % number, sequence=number, sync=number % 7 == 0)
    if number == 60:
        os.kill(os.getpid(), 9)
"""
        start_python(code, tmp_path).communicate(timeout=60)
        with tidelog.open(tmp_path) as log:
            topic = log.topic(NAME)
            producer = topic.producer("app-1")
            assert producer.last_sequence is not None
            assert producer.last_sequence >= 56
            for number in range(100):
                producer.append(b"%d" % number, sequence=number)
            assert values(topic) == [b"%d" % number for number in range(100)]


class TestMoves:
    """With a store: what is stored goes with the topic."""

    def fill(self, world: World, node: str, first: int, *, seal: bool, ship: bool = True) -> None:
        with contextlib.closing(open_node(world, node, tier_settings())) as log:
            topic = log.topic(NAME)
            producer = topic.producer("app-1")
            for number in range(first, first + 10):
                producer.append(b"%d" % number, sequence=number, sync=True)
            if ship:
                topic.ship()
            if seal:
                topic.seal()

    @pytest.mark.parametrize("seal", [True, False])
    @pytest.mark.parametrize("multi_key", [True, False])
    def test_to_another_node_and_back(self, seal: bool, multi_key: bool) -> None:
        """Sealed or taken over: the next owner knows all that is shipped, and so does the first one when it is back."""
        world = World(multi_key=multi_key)
        for number, node in enumerate(["a", "b", "a", "c"]):
            self.fill(world, node, 10 * number, seal=seal)
            with contextlib.closing(open_node(world, "z" if seal else node, tier_settings())) as log:
                producer = log.topic(NAME).producer("app-1")
                found = [producer.append(b"again", sequence=sequence) for sequence in range(10 * number + 10)]
                assert found == list(range(10 * number + 10))

    def test_after_the_disk_was_lost(self) -> None:
        """What was shipped is known, what was lost with the disk is stored when it comes again."""
        world = World()
        self.fill(world, "a", 0, seal=False)
        self.fill(world, "a", 10, seal=False, ship=False)
        with contextlib.closing(open_node(world.lose_disk("a"), "a", tier_settings())) as log:
            topic = log.topic(NAME)
            producer = topic.producer("app-1")
            assert producer.last_sequence == 9
            for number in range(20):
                assert producer.append(b"%d" % number, sequence=number) == number
            assert values(topic) == [b"%d" % number for number in range(20)]

    def test_a_fenced_tail_is_not_taken_for_stored(self) -> None:
        """A node whose messages never reached the topic forgets about them when it owns the topic again."""
        world = World()
        self.fill(world, "a", 0, seal=False)
        self.fill(world, "a", 10, seal=False, ship=False)
        with contextlib.closing(open_node(world, "b", tier_settings())) as log:
            for _ in range(30):
                log.topic(NAME).append(b"of b", sync=True)
            log.topic(NAME).seal()
        with contextlib.closing(open_node(world, "a", tier_settings())) as log:
            producer = log.topic(NAME).producer("app-1")
            assert producer.last_sequence == 9
            assert producer.append(b"10", sequence=10) == 40

    def test_the_catalog_alone_is_enough(self) -> None:
        """Without the messages, which retention deleted, the new owner knows what was stored."""
        world = World()
        self.fill(world, "a", 0, seal=True)
        with contextlib.closing(open_node(world, "b", tier_settings(retention_bytes=1))) as log:
            topic = log.topic(NAME)
            topic.append(b"x" * 500, sync=True)
            topic.ship()
            topic.prune()
            assert topic.start_offset > 9
            assert topic.producer("app-1").last_sequence == 9


class TestBounds:
    """What is kept is bounded."""

    def test_the_silent_ones_are_forgotten(self, topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
        """Beyond the most that may be known, those go whose last message is oldest; open ones stay."""
        monkeypatch.setattr(producer_state, "MAX_PRODUCERS", 10)
        first = topic.producer("open")
        first.append(b"x", sequence=5)
        for number in range(20):
            with topic.producer(f"p{number}") as producer:
                producer.append(b"x", sequence=number)
        known = {name for name, _ in topic._producers._loaded()} if topic._producers is not None else set()
        assert known == {"open", *(f"p{number}" for number in range(11, 20))}
        assert first.append(b"x", sequence=5) == 0
        assert topic.producer("p3").last_sequence is None

    def test_the_file_is_written_now_and_then(self, topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
        """A long run needs not be read again as a whole."""
        monkeypatch.setattr(producer_registry, "_WRITE_EVERY_MESSAGES", 10)
        producer = topic.producer("app-1")
        for _ in range(50):
            producer.append(b"x", sync=True)
        registry = topic._producers
        assert registry is not None
        found = registry._snapshots.newest()
        assert found is not None
        assert found.as_of_offset >= 20

    def test_a_snapshot_is_cut_to_a_size(self) -> None:
        """Where sequences are goes first, then the producers that were silent longest."""
        producers = tuple(
            producer_state.ProducerSnapshot(name=f"p{n}", epoch=1, last_sequence=n, last_offset=n, recent="1:1 " * 50)
            for n in range(100)
        )
        whole = producer_state.ProducersSnapshot(as_of_offset=1, last_crc32=0, epoch=0, producers=producers)
        assert len(producer_state.within(whole, 1 << 20).producers) == 100
        small = producer_state.within(whole, 4000).producers
        assert 20 < len(small) < 40
        assert small[0].name == "p99"


class TestFailures:
    """What goes wrong around an append."""

    def test_no_room_uses_no_sequence(self, tmp_path: Path) -> None:
        """A full hand-over raises; the same sequence is stored when there is room, in tasks as well."""
        with tidelog.open(tmp_path, append_queue_max_bytes=100) as log:
            topic = log.topic(NAME)
            producer = topic.producer("app-1")

            async def play() -> None:
                big = b"x" * 60
                await asyncio.gather(*(producer.append_async(big, sequence=n, timeout=120) for n in range(50)))

            for sequence in range(100, 120):
                with contextlib.suppress(BackpressureError):
                    producer.append(b"x" * 60, sequence=sequence, timeout=0)
                producer.append(b"x" * 60, sequence=sequence)
            assert topic.next_offset == 20
            asyncio.run(play())
            assert topic.next_offset == 20, "all of those came too late"

    def test_tasks_wait_for_room_beside_each_other(self, tmp_path: Path) -> None:
        """The event loop goes on while they wait, and each message is stored once."""
        with tidelog.open(tmp_path, append_queue_max_bytes=200) as log:
            topic = log.topic(NAME)
            producers = [topic.producer(f"app-{number}") for number in range(5)]

            async def play() -> None:
                for _ in range(3):
                    for sequence in range(20):
                        await asyncio.gather(*(each.append_async(b"x" * 90, sequence=sequence) for each in producers))

            asyncio.run(play())
            assert topic.next_offset == 100

    def test_a_catalog_that_fails_does_not_hold_up_shipping(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The snapshot is written with the next object, and is not needed to know what is stored."""
        world = World()
        with contextlib.closing(open_node(world, "a", tier_settings())) as log:
            topic = log.topic(NAME)
            producer = topic.producer("app-1")
            producer.append(b"x", sequence=1)
            registry = topic._producers
            assert registry is not None

            def fails(_: object) -> None:
                raise tidelog.StoreUnavailableError("not now")

            monkeypatch.setattr(registry._snapshots, "write_shipped", fails)
            assert topic.ship() == 1
        with contextlib.closing(open_node(world, "b", tier_settings())) as log:
            assert log.topic(NAME).producer("app-1").last_sequence == 1

    @pytest.mark.parametrize("timeout", [-1, "soon", True])
    def test_a_timeout_is_a_number(self, topic: Topic, timeout: Any) -> None:
        """As for the topic's own appends."""
        producer = topic.producer("app-1")
        with pytest.raises(InputError, match="timeout"):
            producer.append(b"x", timeout=timeout)
        with pytest.raises(InputError, match="timeout"):
            producer.append_many([b"x", b"y"], timeout=timeout)
        with pytest.raises(InputError, match="timeout"):
            asyncio.run(producer.append_async(b"x", timeout=timeout))
        assert topic.next_offset == 0


@pytest.mark.parametrize("sizes", [(1,), (3, 1000), (1255, 1, 1), (1256,), (900, 900, 2), (5000,), (256, 1511)])
def test_messages_recorded_together_are_as_one_by_one(sizes: tuple[int, ...]) -> None:
    """The window, what is older, and the snapshot are the same."""
    together, alone = producer_state.ProducerState(), producer_state.ProducerState()
    reached = 0
    for size in sizes:
        sequences = range(reached + 5, reached + 5 + size)
        together.record_many(1, sequences, reached + 100)
        for number, sequence in enumerate(sequences):
            alone.record(1, sequence, reached + 100 + number)
        reached += size
    end = reached + 100
    assert together.snapshot("p", end) == alone.snapshot("p", end)
    assert [together.find(one) for one in range(reached + 7)] == [alone.find(one) for one in range(reached + 7)]
