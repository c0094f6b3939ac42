"""A partition's appends: what becomes of those that are cancelled or fail, and of markers beside batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.oracles.record_batches import Record, batch_bytes, put_record

import tidelog
from tidelog.errors import DiskFullError, StoreUnavailableError, TidelogError
from tidelog.service.kafka.configs import Serving
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.partition_reader import ColdReads, EncodedBatches
from tidelog.service.kafka.partitions import Appended, Partition
from tidelog.service.kafka.records import Control, DecodedBatch, decode_produced
from tidelog.service.kafka.transactions.producer_state import StoredProducers
from tidelog.testing import FaultyFiles
from tidelog.topics.directory import LogDirectory
from tidelog.topics.names import parse_topic_name
from tidelog.topics.topic import Topic

NAME = "shop/orders"


def batch(
    sequence: int, count: int = 2, *, producer_id: int = 7, attributes: int = 0, value: bytes = b"v"
) -> DecodedBatch:
    records = [put_record(Record(0, number, None, value, [])) for number in range(count)]
    data = batch_bytes(0, count - 1, 0, attributes, (producer_id, 0, sequence), 1_700_000_000_000, 0, records)
    return decode_produced(data)


def play(test: Callable[[Partition, Topic], Coroutine[Any, Any, None]], files: FaultyFiles | None = None) -> None:
    """With a partition in memory."""

    async def run() -> None:
        with tidelog.open(None) if files is None else LogDirectory(Path("/data"), files=files) as log:
            topic = log.topic(NAME)
            stored = StoredProducers(topic, every_messages=10)
            shared = ColdReads(), EncodedBatches(1 << 20)
            partition = Partition(parse_topic_name(NAME), 0, topic, stored, stored.load(), Serving(1 << 20), *shared)
            try:
                await test(partition, topic)
            finally:
                if files is not None:
                    files.capacity_bytes = None
            partition.close()

    asyncio.run(run())


@pytest.mark.parametrize("is_acks_all", [True, False])
def test_an_accepted_batch_waits_for_room_on_the_disk(is_acks_all: bool) -> None:
    """Refused, its producer would take it for lost. What comes after it is refused by the disk, not for its sequence:
    librdkafka would begin a new epoch, and send what was accepted again under it. Who cannot wait hears it at once."""
    files = FaultyFiles()

    async def until(is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not is_so():
                await asyncio.sleep(0.01)

    async def test(partition: Partition, topic: Topic) -> None:
        assert partition.append_at_once(batch(0), sync=True) == Appended(ErrorCode.NONE, 0, 2)
        await until(lambda: topic._log.durable_offset == 2)
        files.capacity_bytes = sum(len(content or b"") for content in files.tree().values())
        settled: list[TidelogError | None] = []
        assert partition.append_at_once(batch(2), sync=is_acks_all) == Appended(ErrorCode.NONE, 2, 4)
        reach = partition.reach(is_acks_all)
        assert reach(4, settled.append)
        await until(lambda: topic._log.stall is not None)
        with pytest.raises(DiskFullError):
            partition.append_at_once(batch(6), sync=is_acks_all)
        for late in (batch(4), batch(6)):
            with pytest.raises(DiskFullError):
                await partition.append(late)
        assert await partition.append(batch(2)) == Appended(ErrorCode.NONE, 2, 4)  # it comes again, and waits as well
        assert reach(4, settled.append)
        with pytest.raises(DiskFullError):
            await partition.until_in_files(4)
        await asyncio.sleep(0.2)
        assert settled == []
        files.capacity_bytes = None
        await until(lambda: settled == [None, None])
        assert partition.append_at_once(batch(4), sync=True) == Appended(ErrorCode.NONE, 4, 6)
        assert partition.append_at_once(batch(8), sync=True) == Appended(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER)

    play(test, files)


def test_a_batch_that_waits_for_room_is_refused_when_the_partition_is_closed() -> None:
    """Its producer looks for the next owner."""
    files = FaultyFiles()

    async def test(partition: Partition, topic: Topic) -> None:
        files.capacity_bytes = sum(len(content or b"") for content in files.tree().values())
        settled: list[TidelogError | None] = []
        partition.append_at_once(batch(0), sync=True)
        assert partition.on_disk(2, settled.append)
        await asyncio.sleep(0.2)
        assert settled == []
        partition.close()
        assert len(settled) == 1
        assert settled[0] is not None
        files.capacity_bytes = None

    play(test, files)


@pytest.mark.parametrize("is_stored", [True, False])
@pytest.mark.parametrize("problem", [asyncio.CancelledError, StoreUnavailableError])
def test_an_append_of_unknown_outcome_is_looked_up(
    monkeypatch: pytest.MonkeyPatch, problem: type[BaseException], is_stored: bool
) -> None:
    """The batch comes again: it is stored once, and consumers of committed messages saw nothing before its end."""

    async def test(partition: Partition, topic: Topic) -> None:
        append = topic.append_frames_async

        async def fail(frames: Any, **more: Any) -> int:
            if is_stored:
                await append(frames)
                await topic.flush_async()
            raise problem("gone")

        monkeypatch.setattr(topic, "append_frames_async", fail)
        with pytest.raises(problem):
            await partition.append(batch(0, attributes=0x10))
        assert partition.last_stable_offset == 0
        monkeypatch.setattr(topic, "append_frames_async", append)
        assert await partition.append(batch(0, attributes=0x10)) == Appended(ErrorCode.NONE, 0, 2)
        assert topic.next_offset == 2
        assert partition.producers.check(7, 0, 2, 1).error is ErrorCode.NONE
        await partition.write_marker(Control(True, 7, 0, 0, 1))
        assert partition.last_stable_offset == topic.next_offset == 3

    play(test)


def test_readers_do_not_wait_for_the_next_batch_to_look_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """An append that failed and stored nothing holds nobody back for long."""

    async def test(partition: Partition, topic: Topic) -> None:
        append = topic.append_frames_async

        async def fail(frames: Any, **more: Any) -> int:
            raise StoreUnavailableError("gone")

        monkeypatch.setattr(topic, "append_frames_async", fail)
        with pytest.raises(StoreUnavailableError):
            await partition.append(batch(0, attributes=0x10))
        monkeypatch.setattr(topic, "append_frames_async", append)
        topic.append(b"plain", sync=True)
        async with asyncio.timeout(60):
            while partition.last_stable_offset < 1:
                await asyncio.sleep(0.001)

    play(test)


def test_the_last_word_before_an_append_is_that_of_the_coordinator() -> None:
    """A duplicate needs no permission; what is refused is not stored."""

    async def test(partition: Partition, topic: Topic) -> None:
        asked: list[int] = []

        def verify() -> ErrorCode:
            asked.append(topic.next_offset)
            return ErrorCode.NONE if len(asked) == 1 else ErrorCode.INVALID_TXN_STATE

        first = await partition.append(batch(0, attributes=0x10), verify=verify)
        assert first == Appended(ErrorCode.NONE, 0, 2)
        assert await partition.append(batch(0, attributes=0x10), verify=verify) == first
        refused = await partition.append(batch(2, attributes=0x10), verify=verify)
        assert refused == Appended(ErrorCode.INVALID_TXN_STATE)
        assert asked == [0, 2]
        assert topic.next_offset == 2

    play(test)


def test_a_marker_comes_after_the_batches_that_were_let_in() -> None:
    """Also if all are asked for at the same moment."""

    async def test(partition: Partition, topic: Topic) -> None:
        work: list[Coroutine[Any, Any, Any]] = [
            partition.append(batch(number * 2, attributes=0x10)) for number in range(5)
        ]
        work.append(partition.write_marker(Control(False, 7, 0, 0, 1)))
        done = await asyncio.gather(*work)
        assert done[-1] == 10
        assert [tuple(one) for one in partition.producers.aborted(0, 11)] == [(7, 0, 10)]
        assert (await partition.append(batch(8, attributes=0x10))).first_offset == 8

    play(test)


def test_late_marker_does_not_end_the_next_transaction() -> None:
    """Of a coordinator that was replaced, or kept by the network: it is answered, and changes nothing."""

    async def test(partition: Partition, topic: Topic) -> None:
        await partition.append(batch(0, attributes=0x10))
        first = Control(True, 7, 0, 1, 1)
        await partition.write_marker(first)
        await partition.append(batch(2, attributes=0x10))
        end = topic.next_offset
        await partition.write_marker(first)
        assert topic.next_offset == end
        assert partition.producers.is_open(7)
        await partition.write_marker(first._replace(is_commit=False, coordinator_epoch=2))
        assert not partition.producers.is_open(7)
        assert [tuple(one) for one in partition.producers.aborted(0, 9)] == [(7, 3, 5)]

    play(test)


def test_sequences_that_come_again_with_other_messages_are_refused() -> None:
    """A client that aborted may use them again; taken for the old batch, the new messages would be lost."""

    async def test(partition: Partition, topic: Topic) -> None:
        first = await partition.append(batch(0, attributes=0x10))
        await partition.write_marker(Control(False, 7, 0, 0, 1))
        assert await partition.append(batch(0, attributes=0x10)) == first
        refused = await partition.append(batch(0, attributes=0x10, value=b"w"))
        assert refused == Appended(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER)
        assert topic.next_offset == 3

    play(test)


def test_snapshots_are_written_beside_the_appends(monkeypatch: pytest.MonkeyPatch) -> None:
    """One at a time, when enough has come; one that fails is not tried again at once."""

    async def test(partition: Partition, topic: Topic) -> None:
        saved: list[int] = []
        save = partition._stored.save

        def fail() -> None:
            saved.append(topic.next_offset)
            if len(saved) == 1:
                raise StoreUnavailableError("away")
            save()

        monkeypatch.setattr(partition._stored, "save", fail)
        async with asyncio.timeout(60):
            for number in range(12):
                await partition.append(batch(2 * number))
                while partition._stored._saving is not None:
                    await asyncio.sleep(0.001)
        assert saved == [10, 20]
        await topic.flush_async()
        again = StoredProducers(topic).load()
        assert again.check(7, 0, 22, 2).duplicate_offset == 22

    play(test)
