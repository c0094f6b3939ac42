"""History and hot log as one sequence: one position, no gap, no overlap, whatever is shipped and pruned meanwhile."""

from __future__ import annotations

import asyncio
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.campaign import examples
from tests.cold.cold import ColdTopic, everything, numbered
from tests.servers import EtcdServer, S3Server

from tidelog.cold.reader import History
from tidelog.cold.tiered_reader import TieredReader, TieredView
from tidelog.errors import ClosedError, GapError, InputError, OffsetOutOfRangeError, StoreUnavailableError, TidelogError
from tidelog.log import Log
from tidelog.log.settings import LogSettings
from tidelog.log.tail_cache import Batch
from tidelog.log.view import LogView
from tidelog.store.metadata.open import open_metadata_store
from tidelog.store.urls import open_store
from tidelog.testing import FaultyMetadata, FaultyStore

# Small files, and nothing in memory that is in one: every message is read from where it is.
SETTINGS = LogSettings(rotate_max_bytes=1 << 10, cache_max_messages=0, cache_max_bytes=0)
EPOCH_TIME = datetime(1970, 1, 1, tzinfo=UTC)
LIMIT_SECONDS = 60


def payload(number: int) -> bytes:
    """Its time is its number, in microseconds."""
    return struct.pack("<q", number) + f"message {number}".encode()


def payloads(first: int, stop: int) -> list[bytes]:
    return [payload(number) for number in range(first, stop)]


def messages(batch: Batch) -> list[tuple[int, bytes]]:
    return list(enumerate(batch.payloads(), batch.first_offset))


def read_until_error(reader: TieredReader) -> tuple[list[tuple[int, bytes]], TidelogError]:
    """What a reader gives before it raises, and what it raises. It is not closed."""
    found: list[tuple[int, bytes]] = []
    try:
        while (batch := reader.next_batch()) is not None:
            found += messages(batch)
    except TidelogError as error:
        return found, error
    raise AssertionError(f"nothing was raised, {len(found)} messages were read")


class Bench:
    """A log, its history and what an owner does with them, step by step."""

    def __init__(self, directory: Path, history: History, cold: ColdTopic) -> None:
        self.log = Log.open(directory, SETTINGS, time_field=0)
        self.history = history
        self.cold = cold
        self.joined = TieredView(self.log, history, time_field=0, poll_seconds=0.01)

    def append(self, count: int) -> None:
        first = self.log.next_offset
        self.log.append_many(payloads(first, first + count), sync=True)

    def ship(self) -> None:
        """Everything that is on the disk."""
        first, stop = self.cold.catalog.next_offset(), self.log.durable_offset
        if first < stop:
            found = [one for batch in self.log.read(first, stop) for one in batch.payloads()]
            self.cold.publish(self.cold.put_object(found, first))

    def prune(self) -> None:
        """What is in the catalog."""
        self.log.remove_below(self.cold.catalog.next_offset())


@pytest.fixture(params=["none", "zstd"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    """Empty, over stores that can be made to fail."""
    cold = ColdTopic(FaultyStore(), FaultyMetadata(), codec=request.param, time_field=0)
    with cold.history(range_bytes=500) as history:
        bench = Bench(tmp_path / "log", history, cold)
        yield bench
        bench.log.close()


@pytest.fixture
def half(bench: Bench) -> Bench:
    """300 messages: 200 shipped in four objects, of which about the first 150 are pruned."""
    for _ in range(4):
        bench.append(50)
        bench.ship()
    bench.append(100)
    bench.log.remove_below(150)
    assert 100 < bench.log.start_offset <= 150
    return bench


# One sequence


@pytest.mark.parametrize("start", [0, 49, 50, 120, 150, 199, 200, 299, 300])
@pytest.mark.parametrize("stop", [None, 130, 170, 250, 300])
def test_history_and_hot_log_are_one_sequence(half: Bench, start: int, stop: int | None) -> None:
    """From any offset to any other, wherever they are."""
    expected = numbered(payloads(0, 300))[start : 300 if stop is None else stop]
    assert everything(half.joined.read(start, stop)) == expected


def test_what_is_local_is_read_locally(half: Bench) -> None:
    """The store is asked only for what the hot log no longer has."""
    store = half.cold.objects
    assert isinstance(store, FaultyStore)
    store.reset_traffic()
    start = half.log.start_offset
    assert len(everything(half.joined.read(start))) == 300 - start
    assert store.traffic.requests == {}


def test_the_hot_log_can_be_read_while_the_stores_are_out_of_reach(half: Bench) -> None:
    """An outage concerns history alone."""
    store, metadata = half.cold.objects, half.cold.catalog.metadata
    assert isinstance(store, FaultyStore)
    assert isinstance(metadata, FaultyMetadata)
    store.fail("*", times=None)
    metadata.fail("*", times=None)
    assert len(everything(half.joined.read(200))) == 100
    assert half.joined.resolve("latest") == 300
    with pytest.raises(StoreUnavailableError):
        half.joined.read("earliest")


def test_a_reader_goes_on_after_an_outage(half: Bench) -> None:
    """The same call, later, continues at the same offset."""
    store = half.cold.objects
    assert isinstance(store, FaultyStore)
    reader = half.joined.read(0)
    store.fail("read_range", times=None)
    for _ in range(3):
        with pytest.raises(StoreUnavailableError):
            reader.next_batch()
    store.heal()
    first = reader.next_batch()
    assert first is not None
    store.fail("read_range", times=None)
    found, error = read_until_error(reader)
    assert isinstance(error, StoreUnavailableError)
    store.heal()
    assert messages(first) + found + everything(reader) == numbered(payloads(0, 300))


def test_a_file_that_is_pruned_under_a_reader_sends_it_to_history(bench: Bench) -> None:
    """It was reading the hot log; what goes there, goes on here."""
    bench.append(200)
    reader = bench.joined.read("earliest")
    batch = reader.next_batch()
    assert batch is not None
    assert bench.history.counters.snapshot().requests == 0
    bench.ship()
    bench.prune()
    assert bench.log.start_offset > 100
    rest = [entry for one in iter(reader.next_batch, None) for entry in enumerate(one.payloads(), one.first_offset)]
    assert messages(batch) + rest == numbered(payloads(0, 200))
    assert bench.history.counters.snapshot().objects_opened == 1
    reader.close()


def test_pruning_while_history_is_read_moves_the_boundary(half: Bench) -> None:
    """A reader that was on its way to the hot log stays in history for as long as it must."""
    reader = half.joined.read(0)
    first = reader.next_batch()
    assert first is not None
    half.ship()
    half.prune()
    rest = everything(reader)
    assert messages(first) + rest == numbered(payloads(0, 300))


def test_a_reader_follows_across_the_boundary(half: Bench) -> None:
    """From history through the files to what is appended while it waits."""
    reader = half.joined.read(0, follow=True)
    found: list[tuple[int, bytes]] = []

    def follow() -> None:
        while len(found) < 320:
            batch = reader.next_batch(LIMIT_SECONDS)
            assert batch is not None
            found.extend(enumerate(batch.payloads(), batch.first_offset))

    thread = threading.Thread(target=follow)
    thread.start()
    half.append(10)
    half.append(10)
    thread.join(LIMIT_SECONDS)
    assert found == numbered(payloads(0, 320))
    assert reader.next_batch(0.01) is None
    reader.close()


def test_a_closed_log_ends_readers_and_refuses_new_ones(half: Bench) -> None:
    """As that of a hot log alone does."""
    reader = half.joined.read(290, follow=True)
    half.log.close()
    assert len(everything(reader)) == 10
    with pytest.raises(ClosedError):
        half.joined.read(0)


# Positions


def at(time_us: int) -> datetime:
    return EPOCH_TIME + timedelta(microseconds=time_us)


@pytest.mark.parametrize("time_us", [0, 1, 49, 50, 77, 149, 150, 151, 199, 200, 250, 299])
def test_a_time_is_found_wherever_it_is(half: Bench, time_us: int) -> None:
    """Each message's time is its offset."""
    assert half.joined.resolve(at(time_us)) == time_us


def test_a_time_that_has_not_come_is_the_end(half: Bench) -> None:
    """Nothing is that young yet."""
    assert half.joined.resolve(at(1000)) == 300


def test_a_time_is_found_when_everything_was_shipped_and_pruned(half: Bench) -> None:
    """Also when the last file holds next to nothing."""
    half.ship()
    half.prune()
    assert [half.joined.resolve(at(time_us)) for time_us in (0, 123, 250, 299, 300)] == [0, 123, 250, 299, 300]


def test_words_are_positions(half: Bench) -> None:
    """The earliest is that of history, the latest that of the hot log."""
    assert (half.joined.resolve("earliest"), half.joined.resolve("latest")) == (0, 300)
    half.cold.move_start(50)
    assert half.joined.resolve("earliest") == half.joined.start_offset == 50


@pytest.mark.parametrize("offset", [301, 1 << 70])
def test_offsets_behind_the_end_are_refused(half: Bench, offset: int) -> None:
    """A reader cannot begin in the future."""
    with pytest.raises(OffsetOutOfRangeError, match="holds 0 up to 300"):
        half.joined.read(offset)


def test_offsets_that_are_no_longer_kept_are_refused(half: Bench) -> None:
    """Nor before what retention left."""
    half.cold.move_start(50)
    with pytest.raises(OffsetOutOfRangeError, match="holds 50 up to 300"):
        half.joined.read(49)
    assert everything(half.joined.read(50)) == numbered(payloads(0, 300))[50:]


@pytest.mark.parametrize("position", ["yesterday", 1.5, True, None, -1])
def test_nonsense_is_no_position(half: Bench, position: object) -> None:
    """It is refused as an input."""
    with pytest.raises(InputError):
        half.joined.resolve(position)  # type: ignore[arg-type]


def test_a_log_without_times_has_none_to_look_for(half: Bench) -> None:
    """The error says so."""
    with pytest.raises(InputError, match="stores no timestamps"):
        TieredView(half.log, half.history).resolve(at(0))


# What is missing


def test_what_neither_has_is_a_gap(half: Bench) -> None:
    """Pruned and not published: the error says which offsets are lost."""
    for descriptor in half.cold.descriptors[1:]:
        half.cold.withdraw(descriptor)
    hot_start = half.log.start_offset
    reader = half.joined.read(0)
    _, error = read_until_error(reader)
    assert isinstance(error, GapError)
    assert (reader.offset, error.first, error.last) == (50, 50, hot_start - 1)


def test_gaps_are_passed_over_when_asked_to(half: Bench) -> None:
    """Reading goes on in the hot log, or in history, behind what is missing."""
    for descriptor in half.cold.descriptors[1:]:
        half.cold.withdraw(descriptor)
    hot_start = half.log.start_offset
    expected = numbered(payloads(0, 300))
    assert everything(half.joined.read(0, on_gap="skip")) == expected[:50] + expected[hot_start:]
    half.cold.publish(half.cold.descriptors[2])
    assert everything(half.joined.read(0, on_gap="skip")) == expected[:50] + expected[100:]
    assert half.history.counters.snapshot().skipped_messages == (hot_start - 50) + 50


def test_what_retention_removed_is_no_longer_kept(half: Bench) -> None:
    """A slow reader is told where the topic begins now."""
    reader = half.joined.read(0)
    half.cold.move_start(100)
    for descriptor in half.cold.descriptors[:2]:
        half.cold.withdraw(descriptor)
    with pytest.raises(OffsetOutOfRangeError, match="the oldest is 100"):
        reader.next_batch()


# The bucket alone


def test_the_bucket_alone_can_be_read(half: Bench) -> None:
    """Without a hot log a topic ends where the catalog does."""
    alone = TieredView(None, half.history, time_field=0)
    assert (alone.start_offset, alone.next_offset) == (0, 200)
    assert everything(alone.read(30)) == numbered(payloads(0, 200))[30:]
    assert (alone.resolve(at(170)), alone.resolve(at(500))) == (170, 200)
    with pytest.raises(OffsetOutOfRangeError):
        alone.read(201)


def test_the_bucket_alone_can_be_followed(half: Bench) -> None:
    """What others ship comes after a while; closing ends the wait."""
    alone = TieredView(None, half.history, time_field=0, poll_seconds=0.01)
    reader = alone.read(190, follow=True)
    assert everything_there(reader) == numbered(payloads(0, 200))[190:]
    assert reader.next_batch(0.03) is None
    half.ship()
    batch = reader.next_batch(LIMIT_SECONDS)
    assert batch is not None
    assert batch.first_offset == 200
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(lambda: list(iter(reader.next_batch, None)))
        time.sleep(0.05)
        reader.close()
        answer.result(LIMIT_SECONDS)


def everything_there(reader: TieredReader) -> list[tuple[int, bytes]]:
    """All that a reader that follows gives without waiting."""
    found: list[tuple[int, bytes]] = []
    while (batch := reader.next_batch(0)) is not None:
        found += enumerate(batch.payloads(), batch.first_offset)
    return found


def test_the_end_of_the_bucket_cannot_vanish(half: Bench) -> None:
    """A reader that was promised messages up to an offset does not end before it in silence."""
    reader = TieredView(None, half.history).read(0)
    half.cold.withdraw(half.cold.descriptors[3])
    _, error = read_until_error(reader)
    assert isinstance(error, GapError)
    assert (error.first, error.last) == (150, 199)


# Tasks


async def collected(joined: TieredView, start: int | str, count: int) -> list[tuple[int, bytes]]:
    """So many messages of a reader that follows, in a task."""
    found: list[tuple[int, bytes]] = []
    async for batch in joined.read(start, follow=True):
        found += enumerate(batch.payloads(), batch.first_offset)
        if len(found) >= count:
            break
    return found


def test_tasks_read_without_blocking_the_loop(half: Bench) -> None:
    """Many readers at once, across the boundary, while others are served."""

    async def read_all() -> None:
        readers = [asyncio.create_task(collected(half.joined, start, 310 - start)) for start in range(0, 300, 30)]
        await asyncio.sleep(0.05)
        half.append(10)
        for start, found in zip(range(0, 300, 30), await asyncio.gather(*readers), strict=True):
            assert found == numbered(payloads(0, 310))[start:]

    asyncio.run(asyncio.wait_for(read_all(), LIMIT_SECONDS))


def test_a_task_follows_the_bucket_alone(half: Bench) -> None:
    """It sleeps, and sees what is shipped."""
    alone = TieredView(None, half.history, poll_seconds=0.01)

    async def read_all() -> list[tuple[int, bytes]]:
        reader = asyncio.create_task(collected(alone, 0, 300))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(half.ship)
        return await reader

    assert asyncio.run(asyncio.wait_for(read_all(), LIMIT_SECONDS)) == numbered(payloads(0, 300))


# Everything at once


def follow_from_the_beginning(joined: TieredView, total: int) -> None:
    """Each batch begins where the one before ended, and has what was appended there."""
    reader, expected = joined.read(0, total, follow=True), 0
    while expected < total:
        batch = reader.next_batch(LIMIT_SECONDS)
        assert batch is not None
        assert batch.first_offset == expected
        assert batch.payloads() == payloads(expected, batch.next_offset)
        expected = batch.next_offset
    reader.close()


def follow_in_a_task(joined: TieredView, total: int) -> None:
    assert asyncio.run(collected(joined, 0, total)) == numbered(payloads(0, total))


def repeat(step: Callable[[], None], done: threading.Event) -> None:
    while not done.is_set():
        step()


def run_readers(bench: Bench, total: int, reading: list[TieredView]) -> None:
    """Appends, ships and prunes in threads of their own while readers of every kind follow from the beginning."""
    done = threading.Event()
    with ThreadPoolExecutor(len(reading) * 2 + 2) as threads:
        ways = (follow_from_the_beginning, follow_in_a_task)
        readers = [threads.submit(way, joined, total) for joined in reading for way in ways]
        keepers = [threads.submit(repeat, step, done) for step in (bench.ship, bench.prune)]
        try:
            while bench.log.next_offset < total:
                bench.append(min(17, total - bench.log.next_offset))
            for reader in readers:
                reader.result(LIMIT_SECONDS)
        finally:
            done.set()
        for keeper in keepers:
            keeper.result(LIMIT_SECONDS)


@pytest.mark.deeper
def test_one_sequence_while_everything_moves(bench: Bench, tmp_path: Path) -> None:
    """Rotation, shipping and pruning at full speed: owner, onlooker and the bucket alone read the same messages."""
    bench.append(20)
    view = LogView(tmp_path / "log", SETTINGS, time_field=0)
    onlooker = TieredView(view, bench.history, time_field=0)
    alone = TieredView(None, bench.history, poll_seconds=0.01)
    total = examples(600)
    run_readers(bench, total, [bench.joined, bench.joined, onlooker, alone])
    bench.ship()
    bench.prune()
    assert bench.log.start_offset > total // 2


@pytest.mark.parametrize("metadata_kind", ["etcd", "bucket"])
def test_one_sequence_over_real_servers(
    tmp_path: Path, s3_server: S3Server, etcd_server: EtcdServer, metadata_kind: str
) -> None:
    """The same over SeaweedFS, with the catalog in etcd and in the bucket itself."""
    objects = open_store(s3_server.url(f"joined-{metadata_kind}"), s3_server.settings())
    url = etcd_server.url if metadata_kind == "etcd" else "bucket"
    with open_metadata_store(url, objects) as metadata:
        cold = ColdTopic(objects, metadata, codec="zstd", time_field=0, topic=f"joined-{metadata_kind}")
        with cold.history(range_bytes=5000) as history:
            bench = Bench(tmp_path / "log", history, cold)
            run_readers(bench, 1000, [bench.joined, TieredView(None, history, poll_seconds=0.01)])
            assert bench.joined.resolve(at(500)) == 500
            bench.log.close()
