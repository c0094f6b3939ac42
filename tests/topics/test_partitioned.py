"""Topics with partitions: choosing one, reading and subscribing over all, growing, deleting."""

from __future__ import annotations

import asyncio
import pickle
import random
import threading
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.campaign import every
from tests.oracles.murmur2 import murmur2

import tidelog
from tidelog import _native
from tidelog.errors import ConflictError, HeldError, InputError, NotFoundError, TopicNameError
from tidelog.testing import CrashPlan, FaultyFiles, History, crash_everywhere
from tidelog.topics.directory import LogDirectory
from tidelog.topics.names import TopicName
from tidelog.topics.partitioned import PartitionedTopic, PartitionOffset, partition_of

WAIT_SECONDS = 120
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[tidelog.LogDirectory]:
    with tidelog.open(tmp_path / "data") as opened:
        yield opened


def partitioned(log: tidelog.LogDirectory, name: str = "shop/orders", count: int | None = 4) -> PartitionedTopic:
    topic = cast(object, log.topic(name) if count is None else log.topic(name, partitions=count))
    assert isinstance(topic, PartitionedTopic)
    return topic


def values(messages: Iterator[tidelog.Message]) -> list[bytes]:
    return [message.value or b"" for message in messages]


class TestChoosing:
    """Which partition a message goes to."""

    @pytest.mark.parametrize(
        ("key", "hash"),
        [
            (b"21", -973932308),
            (b"foobar", -790332482),
            (b"a-little-bit-long-string", -985981536),
            (b"a-little-bit-longer-string", -1486304829),
            (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
            (b"abc", 479470107),
        ],
    )
    def test_murmur2_agrees_with_the_values_of_kafkas_own_tests(self, key: bytes, hash: int) -> None:
        """A key is in the partition where every other client looks for it."""
        assert _native.murmur2(key) == hash % (1 << 32)

    @given(st.binary(max_size=70))
    def test_murmur2_equals_its_oracle(self, key: bytes) -> None:
        """For keys of every length."""
        assert _native.murmur2(key) == murmur2(key)

    def test_messages_of_a_key_share_a_partition(self, log: tidelog.LogDirectory) -> None:
        """And keep their order there."""
        topic = partitioned(log)
        for number in range(100):
            topic.append(b"%d" % number, key=b"k%d" % (number % 9))
        found: dict[bytes | None, list[tidelog.Message]] = defaultdict(list)
        for message in topic.read():
            found[message.key].append(message)
        for key, messages in found.items():
            assert key is not None
            assert {message.partition for message in messages} == {partition_of(key, 4)}
            assert [int(message.value or b"") for message in messages] == sorted(int(m.value or b"") for m in messages)

    def test_messages_without_key_take_turns(self, log: tidelog.LogDirectory) -> None:
        """No partition is left out."""
        topic = partitioned(log)
        assert [topic.append(b"v").partition for _ in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]

    def test_named_partition_wins_over_the_key(self, log: tidelog.LogDirectory) -> None:
        """The caller may know better."""
        topic = partitioned(log)
        assert {topic.append(b"v", key=b"k%d" % number, partition=2).partition for number in range(20)} == {2}
        with pytest.raises(InputError, match="partitions 0 to 3, not 4"):
            topic.append(b"v", partition=4)

    def test_append_many_keeps_order_and_returns_offsets_in_order(self, log: tidelog.LogDirectory) -> None:
        """Messages without a key stay together in one partition."""
        topic = partitioned(log)
        messages = [tidelog.Message(b"%d" % n, key=None if n % 3 else b"k%d" % n) for n in range(30)]
        offsets = topic.append_many(messages, sync=True)
        assert len({offset.partition for n, offset in enumerate(offsets) if n % 3}) == 1
        for n, offset in enumerate(offsets):
            (found,) = topic.partition(offset.partition).read(offset, offset + 1)
            assert (found.value, found.partition) == (b"%d" % n, offset.partition)

    def test_offset_says_its_partition(self) -> None:
        """It is an int for all else, and survives pickling."""
        offset = PartitionOffset(7, 3)
        again = pickle.loads(pickle.dumps(offset))
        assert (offset, again, again.partition, offset + 1) == (7, 7, 3, 8)

    def test_wrong_keys_are_named(self, log: tidelog.LogDirectory) -> None:
        """As those of a topic without partitions are."""
        with pytest.raises(InputError, match="key must be bytes, not str"):
            partitioned(log).append(b"v", key="k")  # type: ignore[arg-type]


class TestReading:
    """All partitions as one stream."""

    def test_partitions_are_merged_by_time(self, log: tidelog.LogDirectory) -> None:
        """Whatever partition a message is in."""
        topic = partitioned(log)
        for number in range(60):
            topic.append(b"%d" % number, partition=number * 7 % 4, timestamp=BEGIN + timedelta(seconds=number))
        assert values(topic.read()) == [b"%d" % number for number in range(60)]
        assert values(topic.read(BEGIN + timedelta(seconds=30))) == [b"%d" % number for number in range(30, 60)]
        assert sorted(values(topic.read(order="arrival"))) == sorted(b"%d" % number for number in range(60))

    def test_mapping_of_offsets_chooses_partitions(self, log: tidelog.LogDirectory) -> None:
        """And where each begins and ends."""
        topic = partitioned(log)
        for number in range(20):
            topic.append(b"%d" % number, partition=number % 4)
        assert values(topic.read({1: 3, 2: "earliest"}, {2: 1})) == [b"2", b"13", b"17"]
        with pytest.raises(InputError, match="shop/orders has 4 partitions, and each has its own offsets: 5 alone"):
            topic.read(5)
        with pytest.raises(InputError, match='"time" or "arrival"'):
            topic.read(order="key")  # type: ignore[arg-type]

    def test_follower_gets_messages_of_every_partition(self, log: tidelog.LogDirectory) -> None:
        """As they are appended."""
        topic = partitioned(log)
        topic.append(b"before")
        follower = topic.read(start="latest", follow=True)
        appended = threading.Event()

        def append() -> None:
            for number in range(40):
                topic.append(b"%d" % number, partition=number % 4)
            appended.set()

        threading.Thread(target=append).start()
        assert {next(follower).value for _ in range(40)} == {b"%d" % number for number in range(40)}
        assert appended.wait(WAIT_SECONDS)
        follower.close()  # type: ignore[attr-defined]

    def test_follower_ends_when_the_directory_is_closed(self, tmp_path: Path) -> None:
        """As that of a topic without partitions does."""
        log = tidelog.open(tmp_path / "data")
        topic = partitioned(log)
        topic.append(b"one")
        found: list[bytes] = []
        messages = topic.read(follow=True)
        follower = threading.Thread(target=lambda: found.extend(values(messages)))
        follower.start()
        log.close()
        follower.join(WAIT_SECONDS)
        assert not follower.is_alive()
        assert found in ([b"one"], [])

    def test_read_only_process_follows(self, tmp_path: Path) -> None:
        """It reads what another process owns, and hears of nothing by itself."""
        with tidelog.open(tmp_path / "data") as log, tidelog.open(tmp_path / "data", read_only=True) as other:
            topic = partitioned(log)
            topic.append(b"first", partition=1, sync=True)
            follower = partitioned(other, count=None).read(follow=True)
            assert next(follower).value == b"first"
            topic.append(b"second", partition=3, sync=True)
            assert next(follower).value == b"second"
            follower.close()  # type: ignore[attr-defined]

    def test_tasks_read_and_append(self, log: tidelog.LogDirectory) -> None:
        """The same, without blocking the event loop."""

        async def run() -> tuple[list[bytes], list[bytes]]:
            topic = await log.topic_async("shop/orders", partitions=3)  # type: ignore[arg-type]
            for number in range(12):
                await topic.append_async(b"%d" % number, partition=number % 3)  # type: ignore[call-arg]
            whole = [message.value or b"" async for message in topic.read_async()]
            followed: list[bytes] = []
            async for message in topic.read_async(follow=True):
                followed.append(message.value or b"")
                if len(followed) == 12:
                    break
            return whole, followed

        whole, followed = asyncio.run(run())
        assert whole == [b"%d" % number for number in range(12)]
        assert sorted(followed) == sorted(whole)

    def test_latest_by_key_covers_all_partitions(self, log: tidelog.LogDirectory) -> None:
        """A tombstone removes its key."""
        topic = partitioned(log)
        for number in range(50):
            topic.append(b"%d" % number, key=b"k%d" % (number % 10))
        view = topic.latest_by_key()
        assert {key: view[key].value for key in view} == {b"k%d" % n: b"%d" % (40 + n) for n in range(10)}
        topic.append(b"", key=b"k3")
        view.refresh()
        assert (b"k3" in view, len(view)) == (False, 9)
        with pytest.raises(KeyError):
            view[b"k3"]

    @pytest.mark.parametrize("values", [True, False])
    def test_key_that_moved_is_removed_where_it_was(self, log: tidelog.LogDirectory, values: bool) -> None:
        """A tombstone in the partition that the key has now counts, and so does a later value in either."""
        keys = [b"k%d" % number for number in range(20)]
        for key in keys:
            partitioned(log, count=2).append(b"old", key=key, timestamp=BEGIN)
        topic = partitioned(log, count=5)
        moved = [key for key in keys if partition_of(key, 2) != partition_of(key, 5)]
        for key in moved[:3]:
            topic.append(None, key=key, timestamp=BEGIN + timedelta(seconds=1))
        view = topic.latest_by_key(values=values)
        assert sorted(view) == sorted(set(keys) - set(moved[:3]))
        assert len(view) == len(keys) - 3
        assert moved[0] not in view
        with pytest.raises(KeyError):
            view[moved[0]]
        topic.append(b"new", key=moved[0])
        later = BEGIN + timedelta(seconds=2)
        topic.append(b"by hand", key=moved[1], partition=partition_of(moved[1], 2), timestamp=later)
        view.refresh()
        assert [view[key].value for key in moved[:2]] == [b"new", b"by hand"]
        assert moved[2] not in view


class TestSubscribing:
    """One subscription over all partitions."""

    def test_every_message_comes_once(self, log: tidelog.LogDirectory) -> None:
        """And is settled in its partition."""
        topic = partitioned(log)
        for number in range(100):
            topic.append(b"%d" % number, key=b"k%d" % number)
        with topic.subscribe("billing") as sub:
            first = [sub.receive(WAIT_SECONDS) for _ in range(60)]
            for message in first:
                assert message is not None
                sub.ack(message)
            assert sub.lag.messages == 40
        with topic.subscribe("billing") as sub:
            rest = []
            while (some := sub.receive_many(7, timeout=0)) or sub.lag.messages:
                rest += some
                sub.ack_many(some)
        assert sorted(m.value or b"" for m in [*first, *rest] if m) == sorted(b"%d" % number for number in range(100))
        assert topic.subscriptions() == ["billing"]
        assert sum(info.lag_messages for info in topic.subscription_info("billing").values()) == 0

    def test_waiting_consumer_is_woken_by_any_partition(self, log: tidelog.LogDirectory) -> None:
        """Also by the last one."""
        topic = partitioned(log)
        with topic.subscribe("billing") as sub:
            for number in range(4):
                thread = threading.Thread(target=topic.append, args=(b"%d" % number,), kwargs={"partition": number})
                thread.start()
                message = sub.receive(WAIT_SECONDS)
                thread.join()
                assert message is not None
                assert (message.value, message.partition) == (b"%d" % number, number)
                sub.ack(message)
            assert sub.receive(timeout=0) is None

    def test_tasks_receive_from_any_partition(self, log: tidelog.LogDirectory) -> None:
        """And a timeout ends the wait."""

        async def run() -> list[int]:
            topic = await log.topic_async("shop/orders", partitions=3)  # type: ignore[arg-type]
            async with await topic.subscribe_async("billing") as sub:
                waiting = asyncio.ensure_future(sub.receive_async(WAIT_SECONDS))
                await asyncio.sleep(0)
                await topic.append_async(b"v", partition=2)  # type: ignore[call-arg]
                first = await waiting
                assert first is not None
                await sub.ack_async(first)
                assert await sub.receive_async(timeout=0) is None
                return [first.partition]

        assert asyncio.run(run()) == [2]

    def test_consumers_of_a_shared_subscription_share_partitions(self, log: tidelog.LogDirectory) -> None:
        """No message goes to both."""
        topic = partitioned(log)
        with topic.subscribe("work", "shared") as one, topic.subscribe("work", "shared") as two:
            for number in range(40):
                topic.append(b"%d" % number)
            taken = [[sub.receive(WAIT_SECONDS) for _ in range(20)] for sub in (one, two)]
        found = [message.value or b"" for messages in taken for message in messages if message]
        assert sorted(found) == sorted(b"%d" % number for number in range(40))

    def test_rejected_message_comes_again_from_its_partition(self, log: tidelog.LogDirectory) -> None:
        """And cumulative acknowledgements are the partition's."""
        topic = partitioned(log, count=2)
        for number in range(6):
            topic.append(b"%d" % number, partition=number % 2)
        with topic.subscribe("billing") as sub:
            messages = [sub.receive(WAIT_SECONDS) for _ in range(6)]
            last = max((m for m in messages if m and m.partition == 0), key=lambda m: m.offset)
            sub.ack_cumulative(last)
            first = min((m for m in messages if m and m.partition == 1), key=lambda m: m.offset)
            sub.nack(first)
            again = sub.receive(WAIT_SECONDS)
            assert again is not None
            assert (again.value, again.partition, again.delivery_count) == (b"1", 1, 2)
            assert sub.lag.messages == 3
            with pytest.raises(InputError, match="does not say its partition"):
                sub.ack(0)
            sub.ack(PartitionOffset(again.offset, 1))
            sub.seek("earliest")
            assert sub.lag.messages == 6
            sub.seek({0: 2})  # type: ignore[arg-type]
            assert sub.lag.messages == 4

    def test_subscription_is_deleted_in_all_partitions(self, log: tidelog.LogDirectory) -> None:
        """Not while somebody uses it."""
        topic = partitioned(log)
        with topic.subscribe("billing"), pytest.raises(ConflictError):
            topic.delete_subscription("billing")
        topic.delete_subscription("billing")
        assert topic.subscriptions() == []
        with pytest.raises(NotFoundError, match="no subscription billing"):
            topic.subscription_info("billing")

    def test_messages_leave_for_dead_letters(self, log: tidelog.LogDirectory) -> None:
        """The letter says which partition's log it comes from."""
        topic = partitioned(log, count=2)
        topic.append(b"bad", partition=1)
        options = {"max_deliveries": 1, "dead_letter_topic": "shop/dead"}
        with topic.subscribe("billing", **options) as sub:  # type: ignore[arg-type]
            message = sub.receive(WAIT_SECONDS)
            assert message is not None
            sub.nack(message, reason="broken")
            assert sub.receive(timeout=0) is None
        (letter,) = log.topic("shop/dead").read()
        assert letter.value == b"bad"
        assert b"shop/orders-part-1" in letter.headers.values()


class TestProducing:
    """Appends that can be made again."""

    def test_same_key_and_sequence_is_stored_once(self, tmp_path: Path) -> None:
        """Also after the directory was opened again."""
        for _ in range(2):
            with tidelog.open(tmp_path / "data") as log, partitioned(log).producer("app") as producer:
                for sequence in range(20):
                    producer.append(b"%d" % sequence, key=b"k%d" % sequence, sequence=sequence)
                for sequence in range(20, 40):
                    producer.append(b"%d" % sequence, sequence=sequence)
        with tidelog.open(tmp_path / "data") as log:
            assert len(list(partitioned(log).read())) == 40

    @pytest.mark.parametrize("seed", range(3))
    def test_sequence_is_stored_once_while_partitions_are_added(self, tmp_path: Path, seed: int) -> None:
        """Whatever is appended again, alone or with others, with a key or without, before or after a restart."""
        chance = random.Random(seed)
        keys = [None if chance.random() < 0.5 else b"k%d" % chance.randrange(20) for _ in range(90)]
        whole = [tidelog.Message(b"%d" % number, key=key) for number, key in enumerate(keys)]
        known: dict[int, PartitionOffset] = {}
        done, count = 0, 1 + seed % 3
        while done < len(whole):
            count = min(7, chance.choice([count, count + 1, count + 2])) if done else count
            with (
                tidelog.open(tmp_path / "data") as log,
                log.topic("shop/orders", partitions=count).producer("app") as producer,
            ):
                for _ in range(chance.randint(2, 9)):
                    first = chance.randint(max(0, done - 30), done)
                    some = whole[first : first + chance.randint(1, 12)]
                    if chance.random() < 0.5:
                        offsets = producer.append_many(some, sequence=first, sync=chance.random() < 0.1)
                    else:
                        offsets = [producer.append(one, sequence=first + place) for place, one in enumerate(some)]
                    for place, found_at in enumerate(offsets, first):
                        offset = PartitionOffset(found_at, getattr(found_at, "partition", 0))
                        assert repr(known.setdefault(place, offset)) == repr(offset)
                    done = max(done, first + len(some))
        with tidelog.open(tmp_path / "data") as log:
            found = {
                (message.partition, message.offset): message.value for message in partitioned(log, count=None).read()
            }
        assert found == {(offset.partition, offset): b"%d" % place for place, offset in known.items()}

    def test_many_without_sequence_get_the_next_ones(self, log: tidelog.LogDirectory) -> None:
        """As those of a producer without partitions do; what has no key goes to one partition."""
        topic = partitioned(log)
        with topic.producer("app") as producer:
            offsets = producer.append_many([b"a", b"b", tidelog.Message(b"c", key=b"k")])
            assert len({offset.partition for offset in offsets[:2]}) == 1
            assert offsets[2].partition == partition_of(b"k", 4)
            assert producer.append_many([b"d"], partition=3, sequence=70) == [topic.partition(3).next_offset - 1]
            assert producer.last_sequence(3) == 70
            assert producer.append_many([]) == []
            assert asyncio.run(producer.append_many_async([b"d", b"e"], partition=3, sequence=70))[0] == 0
        assert len(list(topic.read())) == 5

    def test_impossible_sequences_are_refused(self, log: tidelog.LogDirectory) -> None:
        """Before anything is stored."""
        topic = partitioned(log)
        with topic.producer("app") as producer:
            for wrong in (-1, 1 << 64, "1", True):
                with pytest.raises(InputError, match="sequence"):
                    producer.append(b"x", sequence=wrong)  # type: ignore[arg-type]
                with pytest.raises(InputError, match="sequence"):
                    producer.append_many([b"x"], sequence=wrong)  # type: ignore[arg-type]
        assert list(topic.read()) == []


class TestNames:
    """How many partitions there are, and whose names they have."""

    def test_count_is_remembered(self, tmp_path: Path) -> None:
        """Opening it later needs no number, and the logs are not shown as topics."""
        with tidelog.open(tmp_path / "data") as log:
            assert partitioned(log, count=3) is partitioned(log, count=None)
            partitioned(log, count=3).append(b"v", partition=2)
            assert log.topics() == ["shop/orders"]
        with tidelog.open(tmp_path / "data") as log:
            assert partitioned(log, count=None).partitions == 3
            assert log.topics() == ["shop/orders"]
            assert log.topic("shop/orders-part-2").partitions == 1
            assert next(log.topic("shop/orders-part-2").read()).partition == 2
            assert log.has_topic("shop/orders")

    def test_topic_without_partitions_is_partition_0_of_itself(self, log: tidelog.LogDirectory) -> None:
        """`partitions=1` asks for nothing else."""
        topic = cast(object, log.topic("shop/plain", partitions=1))
        assert isinstance(topic, tidelog.Topic)
        assert (topic.partitions, topic.partition(0)) == (1, topic)
        with pytest.raises(InputError, match="one partition, 0, not 1"):
            topic.partition(1)

    def test_larger_count_adds_partitions(self, log: tidelog.LogDirectory) -> None:
        """What is there stays; fewer cannot be had."""
        topic = partitioned(log, count=2)
        topic.append_many([b"a", b"b"], partition=1)
        assert partitioned(log, count=5) is topic
        assert topic.partitions == 5
        topic.append(b"c", partition=4)
        assert sorted(values(topic.read())) == [b"a", b"b", b"c"]
        with pytest.raises(InputError, match="has 5 partitions, and cannot have fewer"):
            log.topic("shop/orders", partitions=2)

    def test_topic_without_partitions_grows(self, tmp_path: Path) -> None:
        """Its log is partition 0."""
        with tidelog.open(tmp_path / "data") as log:
            log.topic("shop/orders").append(b"old")
            topic = partitioned(log, count=3)
            topic.append(b"new", partition=2)
            assert topic.partition(0).name == "shop/orders"
        with tidelog.open(tmp_path / "data") as log:
            assert [(m.value, m.partition) for m in partitioned(log, count=None).read()] == [(b"old", 0), (b"new", 2)]
            assert log.topics() == ["shop/orders"]

    def test_names_of_partitions_are_reserved(self, log: tidelog.LogDirectory) -> None:
        """Nobody else gets them, and they keep nobody else's."""
        with pytest.raises(TopicNameError, match="reserved for partition 3 of shop/orders"):
            log.topic("shop/orders-part-3")
        partitioned(log, count=2)
        with pytest.raises(TopicNameError, match="reserved"):
            log.topic("shop/orders-part-2")
        log.topic("shop/orders-part-1")
        with pytest.raises(InputError, match="is a partition of shop/orders"):
            log.delete_topic("shop/orders-part-1")
        assert log.topic("shop/spare-part-list").partitions == 1

    @pytest.mark.parametrize("count", [0, -1, 10_001, True, "4", 2.0])
    def test_impossible_counts_are_refused(self, log: tidelog.LogDirectory, count: object) -> None:
        """By name, and nothing is made."""
        with pytest.raises(InputError, match="partitions must be 1 to 10,000"):
            log.topic("shop/orders", partitions=count)  # type: ignore[call-overload]
        assert log.topics() == []

    def test_live_topics_have_no_partitions(self, log: tidelog.LogDirectory) -> None:
        """Neither at once nor later."""
        with pytest.raises(InputError, match="is reliable"):
            log.topic("shop/live", partitions=2, reliable=False)
        log.topic("shop/live", reliable=False)
        with pytest.raises(InputError, match="reliable=False, and cannot have partitions"):
            log.topic("shop/live", partitions=2)

    def test_settings_are_those_of_every_partition(self, tmp_path: Path) -> None:
        """Those given at first, and those configured later."""
        with tidelog.open(tmp_path / "data") as log:
            log.topic("shop/orders", partitions=2, retention_seconds=60)
            partitioned(log, count=None).append(b"v", partition=1)
            assert log.configure_topic("shop/orders", retention_bytes=1 << 20)["retention_seconds"] == 60
        with tidelog.open(tmp_path / "data") as log:
            assert log.configure_topic("shop/orders-part-1") == {"retention_seconds": 60, "retention_bytes": 1 << 20}


class TestVerifying:
    """All partitions in one report."""

    def test_damage_in_one_partition_is_found(self, tmp_path: Path) -> None:
        """With its file."""
        with tidelog.open(tmp_path / "data") as log:
            topic = partitioned(log)
            for number in range(4):
                topic.append(b"value %d" % number, partition=number)
            topic.flush()
            assert topic.verify().ok
        (file,) = (tmp_path / "data/shop/orders-part-2").glob("wal.*.log")
        data = bytearray(file.read_bytes())
        data[-3] ^= 1
        file.write_bytes(data)
        with tidelog.open(tmp_path / "data", read_only=True) as log:
            report = partitioned(log, count=None).verify()
        assert not report
        assert {str(finding.path) for finding in report.findings} == {str(file)}


class TestDeleting:
    """A topic goes with all its partitions."""

    def test_deleted_topic_leaves_nothing(self, tmp_path: Path) -> None:
        """And its name is free again."""
        with tidelog.open(tmp_path / "data") as log:
            partitioned(log).append_many([b"v"] * 3, partition=3)
            log.delete_topic("shop/orders")
            assert log.topics() == []
            assert list((tmp_path / "data").glob("shop/*")) == []
            assert values(log.topic("shop/orders").read()) == []

    def test_handle_of_a_deleted_topic_makes_nothing_anew(self, log: tidelog.LogDirectory) -> None:
        """Its partitions came back, and the name could not have partitions any more."""
        topic = partitioned(log, count=2)
        topic.append(b"v", partition=0)
        log.delete_topic("shop/orders")
        for number in range(2):
            with pytest.raises(NotFoundError, match="was deleted"):
                topic.append(b"v", partition=number)
        assert log.topics() == []
        assert values(partitioned(log, count=2).read()) == []

    @pytest.mark.deeper
    def test_deletion_cut_at_any_write_is_finished_or_never_was(self) -> None:
        """A topic that lost some of its partitions, and gets empty ones in their place, would look like a whole one."""
        root, stage = Path("/data"), [""]

        def workload(files: FaultyFiles, history: History) -> None:
            stage[0] = "new"
            with LogDirectory(root, files=files) as log:
                topic = partitioned(log, count=3)
                for number in range(3):
                    topic.append(b"v", partition=number, sync=True)
                stage[0] = "stored"
                log.delete_topic("shop/orders")
                stage[0] = "deleted"

        def check(files: FaultyFiles, history: History) -> None:
            with LogDirectory(root, files=files) as log:
                found = values(log.topic("shop/orders").read())
                allowed = {"new": [1, 2, 3, 0], "stored": [3, 0], "deleted": [0]}[stage[0]]
                assert len(found) in allowed

        crash_everywhere(workload, check, CrashPlan(every=every(3)))


class TestWithStore:
    """Partitions in a store: owned one by one, found by anybody who has the catalog."""

    def test_deletion_that_stops_half_way_is_finished_by_the_next_opening(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Loses, without the mark: a topic some of whose partitions begin empty at offset 0 again."""
        place = {"store": f"file://{tmp_path}/bucket", "metadata": "bucket"}
        with tidelog.open(tmp_path / "a", **place) as log:  # type: ignore[arg-type]
            topic = partitioned(log, count=3)
            for number in range(3):
                topic.append(b"v", partition=number)
            topic.ship()
            deleted: list[str] = []
            delete = LogDirectory._delete_whole

            def stops(self: LogDirectory, name: TopicName, *, take_over: bool) -> None:
                if deleted:
                    raise tidelog.StoreUnavailableError("the process ends here")
                deleted.append(str(name))
                delete(self, name, take_over=take_over)

            with monkeypatch.context() as patched:
                patched.setattr(LogDirectory, "_delete_whole", stops)
                with pytest.raises(tidelog.StoreUnavailableError):
                    log.delete_topic("shop/orders")
        assert deleted == ["shop/orders-part-0"]
        with tidelog.open(tmp_path / "a") as log:
            assert values(log.topic("shop/orders").read()) == []
            assert log.topics() == ["shop/orders"]
            assert log.topic("shop/orders").partitions == 1

    def test_partition_of_a_topic_that_another_node_deleted_is_not_made_anew(self, tmp_path: Path) -> None:
        """Also after the topic has grown: messages were accepted and shipped for a topic that was not there."""
        place = {"store": f"file://{tmp_path}/bucket", "metadata": "bucket"}
        with tidelog.open(tmp_path / "a", **place) as log:  # type: ignore[arg-type]
            topic = partitioned(log, count=2)
            assert partitioned(log, count=3) is topic
            recorded = log._opener.layout(topic._name)
            assert recorded is not None
            log._opener.set_layout(topic._name, msgspec.structs.replace(recorded, is_deleted=True), {})
            with pytest.raises(NotFoundError, match="was deleted"):
                topic.append(b"v", partition=2)

    def test_sealed_topic_is_not_claimed_back_by_its_handle(self, tmp_path: Path) -> None:
        """Whoever asks for it again owns it again."""
        place = {"store": f"file://{tmp_path}/bucket", "metadata": "bucket"}
        with tidelog.open(tmp_path / "a", **place) as log:  # type: ignore[arg-type]
            topic = partitioned(log, count=2)
            topic.append(b"v", partition=1)
            topic.seal()
            with pytest.raises(tidelog.ClosedError, match="sealed"):
                topic.append(b"x", partition=1)
            assert partitioned(log, count=None).append(b"w", partition=1) == 1

    def test_history_of_all_partitions_is_read_on_another_machine(self, tmp_path: Path) -> None:
        """The count is in the catalog."""
        place = {"store": f"file://{tmp_path}/bucket", "metadata": "bucket"}
        with tidelog.open(tmp_path / "a", **place) as log:  # type: ignore[arg-type]
            topic = partitioned(log)
            for number in range(40):
                topic.append(b"%d" % number, key=b"k%d" % number)
            topic.ship()
            topic.seal()
        with tidelog.open(tmp_path / "b", **place) as log:  # type: ignore[arg-type]
            assert log.topics() == ["shop/orders"]
            again = partitioned(log, count=None)
            assert again.partitions == 4
            assert sorted(values(again.read())) == sorted(b"%d" % number for number in range(40))
            assert sum(again.shipped_offsets.values()) == 40
            log.delete_topic("shop/orders")
            assert log.topics() == []
        assert list((tmp_path / "bucket").rglob("*.tlog")) == []

    def test_partitions_of_one_topic_have_several_owners(self, tmp_path: Path) -> None:
        """A node opens those that it uses, and is refused those of a living one."""
        place = {"store": f"file://{tmp_path}/bucket", "metadata": "bucket"}
        with (
            tidelog.open(tmp_path / "a", **place) as one,  # type: ignore[arg-type]
            tidelog.open(tmp_path / "b", **place) as two,  # type: ignore[arg-type]
        ):
            partitioned(one).append(b"one", partition=0)
            partitioned(two, count=None).append(b"two", partition=1)
            with pytest.raises(HeldError):
                partitioned(two, count=None).append(b"no", partition=0)
            assert partitioned(one, count=None).partition(0).next_offset == 1


@pytest.mark.parametrize("metadata", [None, "bucket"])
def test_a_local_topic_keeps_its_partitions_when_it_is_given_a_store(tmp_path: Path, metadata: str | None) -> None:
    """Otherwise its messages are hidden behind an empty topic of the same name."""
    with tidelog.open(tmp_path / "data") as log:
        topic = log.topic("shop/orders", partitions=4)
        topic.append_many([tidelog.Message(b"%d" % number, key=b"%d" % number) for number in range(20)])
        log.topic("shop/plain").append(b"plain")
    with tidelog.open(tmp_path / "data", store=f"file://{tmp_path}/store", metadata=metadata) as log:
        assert log.topics() == ["shop/orders", "shop/plain"]
        found = log.topic("shop/orders", partitions=4)
        assert sorted(int(message.value or b"") for message in found.read()) == list(range(20))
        assert [message.value for message in log.topic("shop/plain").read()] == [b"plain"]
