"""What a partition knows of its producers, after restarts, kills, moves and the loss of disks and snapshots."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.oracles.record_batches import Record, batch_bytes, put_record

import tidelog
from tidelog.clock import SystemClock
from tidelog.cold.rebuild import rebuild_catalog
from tidelog.log.directory import KAFKA_PRODUCERS
from tidelog.log.frame import encode_many
from tidelog.service.kafka.records import Control, StoredBatch, control_payload, decode_produced, stored_batches
from tidelog.service.kafka.transactions.producer_state import (
    KafkaSnapshot,
    StoredProducers,
    _compressed,
    _decompressed,
    _Scan,
    _within,
)
from tidelog.service.kafka.transactions.producers import PartitionProducers
from tidelog.store.keys import TopicKeys
from tidelog.store.metadata.open import open_metadata_store
from tidelog.store.urls import open_store
from tidelog.topics.directory import LogDirectory
from tidelog.topics.message import TIMESTAMP_FIELD
from tidelog.topics.topic import Topic

TIME_MS = 1_700_000_000_000


class Played:
    """A topic that producers append to, and the state that its owner has."""

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self.stored = StoredProducers(topic)
        self.producers = self.stored.load()

    def produce(self, producer_id: int, sequence: int, count: int = 1, *, epoch: int = 0, attributes: int = 0) -> int:
        """Appends a batch as a partition does."""
        records = [put_record(Record(0, number, None, b"v" * 40, [])) for number in range(count)]
        data = batch_bytes(0, count - 1, 0, attributes, (producer_id, epoch, sequence), TIME_MS, 0, records)
        batch = decode_produced(data)
        first = self.topic.append_frames(batch.frames)
        is_transactional = batch.header.is_transactional
        stop = first + count - 1
        self.producers.record(
            StoredBatch(first, stop, producer_id, epoch, sequence, is_transactional, False, False, TIME_MS * 1000)
        )
        return first

    def end(self, producer_id: int, is_commit: bool) -> None:
        """Appends a control record."""
        payload = control_payload(Control(is_commit, producer_id, 0, 0, TIME_MS * 1000))
        offset = self.topic.append_frames(encode_many(0, [payload]))
        self.producers.record(StoredBatch(offset, offset, producer_id, 0, -1, True, True, is_commit, TIME_MS * 1000))

    def busy(self) -> None:
        """Some of everything: plain messages, batches of two producers, a commit, an abort, one that stays open."""
        self.topic.append(b"plain")
        self.produce(1, 0, 3)
        self.produce(2, 0, 2, attributes=0x10)
        self.produce(1, 3, 300)
        self.end(2, False)
        self.produce(2, 2, attributes=0x10)
        self.end(2, True)
        self.produce(3, 0, 4, attributes=0x10)
        self.topic.append_many([b"plain"] * 3)


def facts(producers: PartitionProducers) -> tuple[Any, ...]:
    """What two states must have in common: everything but the time when they heard of a producer."""
    known = {
        producer_id: (known.epoch, list(known.batches)) for producer_id, known in sorted(producers._producers.items())
    }
    return known, producers.open_transactions, producers.aborted(0, 1 << 60)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[LogDirectory]:
    with tidelog.open(tmp_path / "local") as opened:
        yield opened


def with_store(tmp_path: Path, node: str = "one") -> LogDirectory:
    """A node with a disk of its own, and a store that all share."""
    store = f"file://{tmp_path}/objects"
    return tidelog.open(tmp_path / node, store=store, metadata="bucket", lease_seconds=5.0)


@pytest.mark.parametrize("saves", [0, 1, 2])
def test_a_restart_knows_what_the_owner_knew(tmp_path: Path, saves: int) -> None:
    """With any number of snapshots in between; a batch that comes again gets the offset that it had."""
    with tidelog.open(tmp_path) as log:
        played = Played(log.topic("shop/orders"))
        for _ in range(saves):
            played.busy()
            log.topic("shop/orders").flush()
            played.stored.save()
        last = played.produce(9, 0, 5)
        expected = facts(played.producers)
    with tidelog.open(tmp_path) as log:
        again = Played(log.topic("shop/orders"))
        assert facts(again.producers) == expected
        assert again.producers.check(9, 0, 0, 5).duplicate_offset == last
        assert again.producers.check(9, 0, 5, 1).duplicate_offset is None


def test_opening_reads_only_what_came_after_the_snapshot(directory: LogDirectory, monkeypatch: Any) -> None:
    """However long the partition is."""
    played = Played(directory.topic("shop/orders"))
    for number in range(50):
        played.produce(1, number * 10, 10)
    played.topic.flush()
    played.stored.save()
    played.produce(1, 500, 1)
    read: list[int] = []
    monkeypatch.setattr(_Scan, "take", lambda self, frames, start, stop: read.append(stop - start))
    StoredProducers(played.topic).load()
    assert sum(read) == 1


@pytest.mark.parametrize("damage", [None, b"", b"garbage", "cut", "other"])
def test_a_damaged_snapshot_is_rebuilt_from_the_log(directory: LogDirectory, damage: Any) -> None:
    """Or one that is missing, cut, or of other messages."""
    played = Played(directory.topic("shop/orders"))
    played.busy()
    played.topic.flush()
    played.stored.save()
    path = played.topic._log.directory / KAFKA_PRODUCERS
    good = path.read_bytes()
    if damage is None:
        path.unlink()
    elif damage == "other":
        other = Played(directory.topic("shop/others"))
        for number in range(played.topic.next_offset):
            other.topic.append(b"%d" % number)
        other.topic.flush()
        other.stored.save()
        path.write_bytes((other.topic._log.directory / KAFKA_PRODUCERS).read_bytes())
    else:
        path.write_bytes(good[:-20] if damage == "cut" else damage)
    again = StoredProducers(played.topic)
    assert facts(again.load()) == facts(played.producers)
    again.save()
    assert facts(StoredProducers(played.topic).load()) == facts(played.producers)


def test_the_next_owner_knows_it_after_the_disk_is_lost(tmp_path: Path) -> None:
    """From the catalog's snapshot, and from the store for what came after it."""
    with with_store(tmp_path) as log:
        played = Played(log.topic("shop/orders"))
        played.busy()
        played.topic.ship()
        played.stored.save()
        played.produce(5, 0, 3)
        played.topic.ship()
        expected = facts(played.producers)
        snapshot = played.stored._places.shipped()
        assert snapshot is not None
        assert snapshot.as_of_offset == played.topic.next_offset - 3
    shutil.rmtree(tmp_path / "one")
    with with_store(tmp_path, "two") as log:
        taken = log.topic("shop/orders", take_over=True)
        assert facts(StoredProducers(taken).load()) == expected


def test_a_topic_without_a_snapshot_is_not_read_from_the_store(tmp_path: Path, monkeypatch: Any) -> None:
    """It never had a producer of Kafka's: the first snapshot is written before the first of them is let in."""
    with with_store(tmp_path) as log:
        topic = log.topic("shop/orders")
        topic.append_many([b"plain"] * 100)
        topic.ship()
    shutil.rmtree(tmp_path / "one")
    read: list[int] = []
    monkeypatch.setattr(_Scan, "take", lambda self, frames, start, stop: read.append(stop - start))
    with with_store(tmp_path, "two") as log:
        stored = StoredProducers(log.topic("shop/orders", take_over=True))
        assert stored.load().count == 0
        assert read == []
        assert stored._places.is_in_catalog


def test_a_damaged_snapshot_in_the_catalog_is_no_reason_to_forget(tmp_path: Path) -> None:
    """Then the history is read."""
    with with_store(tmp_path) as log:
        played = Played(log.topic("shop/orders"))
        played.busy()
        played.topic.ship()
        expected = facts(played.producers)
        tiered = played.topic._tiered
        assert tiered is not None
        catalog = tiered.owned.catalog
        catalog.metadata.put(catalog.keys.kafka_producers, b"{}")
    shutil.rmtree(tmp_path / "one")
    with with_store(tmp_path, "two") as log:
        assert facts(StoredProducers(log.topic("shop/orders", take_over=True)).load()) == expected


def test_as_many_producers_as_fit_go_into_the_catalog(tmp_path: Path) -> None:
    """Those that were silent longest are left out there; one with an open transaction never is."""
    with with_store(tmp_path) as log:
        played = Played(log.topic("shop/orders"))
        played.produce(7, 0, attributes=0x10)
        for number in range(2000):
            batches = [(number * 977 + sequence) % (1 << 30) for sequence in range(5)]
            for sequence in batches:
                played.producers.record(
                    StoredBatch(
                        played.producers.next_offset + sequence % 7,
                        played.producers.next_offset + sequence % 7,
                        1_700_000_000_000_000 + number * 7919,
                        0,
                        sequence,
                        False,
                        False,
                        False,
                        TIME_MS * 1000 + sequence,
                    )
                )
        whole = KafkaSnapshot(as_of_offset=1, last_crc32=0, epoch=0, state=_compressed(played.producers))
        limit = len(whole.state) // 2
        small = _within(whole, limit)
        assert small is not None
        restored = PartitionProducers()
        restored.restore(_decompressed(small.state))
        assert 100 < restored.count < 2000
        assert restored.is_open(7)
        assert 1_700_000_000_000_000 + 1999 * 7919 in restored._producers
        assert _within(whole, 10) is None


@given(
    counts=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    cuts=st.sets(st.integers(1, 40)),
    transactional=st.booleans(),
)
def test_batches_that_a_reader_cuts_are_put_together_again(
    counts: list[int], cuts: set[int], transactional: bool
) -> None:
    """Wherever it cuts them, and also where one batch continues another."""
    payloads: list[bytes] = []
    sequence = 0
    for count in counts:
        records = [put_record(Record(0, number, None, b"v", [])) for number in range(count)]
        who = (4, 0, sequence)
        data = batch_bytes(0, count - 1, 0, 0x10 if transactional else 0, who, TIME_MS, 0, records)
        payloads += decode_produced(data).frames.payloads()
        sequence += count
    frames = encode_many(0, payloads)
    whole, parts = PartitionProducers(), PartitionProducers()
    whole.record_all(stored_batches(frames))
    scan = _Scan(parts.record)
    borders = sorted({0, len(payloads), *(cut for cut in cuts if cut < len(payloads))})
    for start, stop in itertools.pairwise(borders):
        scan.take(frames, start, stop)
    scan.finish()
    assert facts(parts) == facts(whole)
    assert len(whole._producers[4].batches) == min(5, len(counts))


def test_a_message_that_cannot_be_decoded_does_not_hide_the_others(directory: LogDirectory) -> None:
    """Only what it would have said itself is lost."""
    played = Played(directory.topic("shop/orders"))
    played.produce(1, 0, 3)
    played.topic._log.append(b"\x01" + b"\xff" * 40)
    played.produce(1, 3, 3)
    assert facts(StoredProducers(played.topic).load()) == facts(played.producers)


def test_a_producer_of_old_messages_is_not_taken_for_a_silent_one() -> None:
    """The time of a message is the client's; that of the broker decides who is silent."""
    producers = PartitionProducers(expiration_us=1000)
    producers.record(StoredBatch(0, 0, 1, 0, 0, False, False, False, 5), heard_us=10_000)
    producers.expire(10_500)
    assert producers.count == 1
    producers.expire(12_000)
    assert producers.count == 0


def test_a_rebuilt_catalog_has_the_history_read(tmp_path: Path) -> None:
    """Its snapshot is lost: aborted transactions in the history are found again."""
    with with_store(tmp_path) as log:
        played = Played(log.topic("shop/orders"))
        played.busy()
        played.end(3, True)
        played.topic.ship()
        expected = facts(played.producers)
    shutil.rmtree(tmp_path / "one")
    shutil.rmtree(tmp_path / "objects" / "tidelog")
    store = open_store(f"file://{tmp_path}/objects")
    with open_metadata_store("bucket", store) as metadata:
        rebuild_catalog(metadata, TopicKeys("shop", "orders"), store, clock=SystemClock(), time_field=TIMESTAMP_FIELD)
    with with_store(tmp_path, "two") as log:
        assert facts(StoredProducers(log.topic("shop/orders", take_over=True)).load()) == expected
