"""Transactions whose end was lost with the tail of a node."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer
from tests.service.installation import Installation, installed, run

from tidelog.errors import ServerUnavailableError, StoreUnavailableError
from tidelog.log.transactions import OpenTransaction
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.records import Control
from tidelog.service.kafka.transactions.lost_ends import LostEnds, lost_end
from tidelog.service.kafka.transactions.producers import MAX_NUMBER
from tidelog.service.kafka.transactions.state_machine import (
    EndedTransaction,
    TransactionRecord,
    TransactionState,
)
from tidelog.topics.names import TopicName

HERE, ELSEWHERE = ("shop/orders", 3), ("shop/orders", 4)
PRODUCER, EPOCH = 7, 2
OPENED = OpenTransaction(PRODUCER, EPOCH, 10, 12)
ORDERS = TopicName("shop", "orders")
WAIT_SECONDS = 60.0
ONGOING, PREPARE_COMMIT, PREPARE_ABORT = (
    *(TransactionState.ONGOING, TransactionState.PREPARE_COMMIT),
    TransactionState.PREPARE_ABORT,
)
COMPLETE_COMMIT, COMPLETE_ABORT, EMPTY = (
    *(TransactionState.COMPLETE_COMMIT, TransactionState.COMPLETE_ABORT),
    TransactionState.EMPTY,
)


def recorded(
    state: TransactionState,
    number: int,
    epoch: int = EPOCH,
    *partitions: tuple[str, int],
    last: tuple[str, int] = ELSEWHERE,
    last_is_commit: bool = False,
    last_number: int = 0,
) -> Any:
    newest = EndedTransaction((number - 2) % MAX_NUMBER + 1, last_is_commit, frozenset((last,)))
    earlier = EndedTransaction(last_number, last_is_commit, frozenset((HERE,)))
    return TransactionRecord(
        transactional_id="t",
        producer_id=PRODUCER,
        epoch=epoch,
        timeout_ms=1000,
        state=state,
        number=number,
        partitions=frozenset(partitions),
        ended=(newest, earlier) if last_number else (newest,),
    )


# Each with the number of the last transaction that ended in the partition.
@pytest.mark.parametrize(
    ("record", "ended"),
    [
        (recorded(ONGOING, 5, EPOCH, HERE), 4),
        (recorded(PREPARE_COMMIT, 5, EPOCH, HERE), 4),
        (recorded(PREPARE_ABORT, 5, EPOCH, HERE), 2),
        (recorded(PREPARE_ABORT, 5, EPOCH + 1, HERE), 4),  # it took too long: aborted under the next epoch
        (recorded(ONGOING, 5, EPOCH, HERE, last=HERE), 4),  # the end of the one before is here
        (recorded(ONGOING, 1, EPOCH, HERE, last=HERE), MAX_NUMBER),
        (recorded(ONGOING, 5, EPOCH, HERE), 2),  # no earlier one is known to have been here: it is open
        (recorded(ONGOING, 5, EPOCH, HERE, last_number=2), 2),  # the end of the last one here is here
        (recorded(ONGOING, 5, EPOCH, HERE, last=HERE), 0),  # nothing is known of an end here
        (recorded(PREPARE_ABORT, 5, EPOCH + 1, HERE, last=HERE), 3),
    ],
)
def test_open_and_ending_transactions_are_left_alone(record: TransactionRecord, ended: int) -> None:
    """Their coordinator writes the end."""
    assert lost_end(record, OPENED, ended, HERE, 99) is None


@pytest.mark.parametrize(
    ("record", "ended", "is_commit", "number"),
    [
        (None, 4, False, 0),
        (recorded(COMPLETE_COMMIT, 5), 4, True, 5),
        (recorded(COMPLETE_COMMIT, 1), 0, True, 1),
        (recorded(COMPLETE_COMMIT, 1), MAX_NUMBER, True, 1),  # numbers go around
        (recorded(COMPLETE_COMMIT, 5), 3, False, 5),  # 4 may be meant, and may have been aborted
        (recorded(COMPLETE_COMMIT, 5), 0, False, 5),
        (recorded(COMPLETE_COMMIT, 5, EPOCH + 1), 4, False, 5),  # of a later producer
        (recorded(COMPLETE_COMMIT, 5), 5, False, 0),  # never so; but it must not be taken for late
        (recorded(COMPLETE_ABORT, 5), 4, False, 5),
        (recorded(EMPTY, 5, EPOCH + 1), 4, False, 5),
        (recorded(ONGOING, 6, EPOCH, ELSEWHERE), 4, False, 5),
        (recorded(PREPARE_COMMIT, 6, EPOCH, ELSEWHERE), 4, False, 5),
        (recorded(ONGOING, 6, EPOCH + 1, HERE), 4, False, 5),
        (recorded(PREPARE_COMMIT, 6, EPOCH + 1, HERE), 4, False, 5),  # its marker would commit what is open here
        # The next transaction of the producer had begun here before the node died, and its messages are lost.
        (recorded(ONGOING, 6, EPOCH, HERE, last=HERE), 4, False, 5),
        (recorded(PREPARE_COMMIT, 6, EPOCH, HERE, last=HERE), 4, False, 5),
        (recorded(ONGOING, 6, EPOCH, HERE, last=HERE, last_is_commit=True), 4, True, 5),
        (recorded(ONGOING, 6, EPOCH, HERE, last=HERE, last_is_commit=True), 3, False, 5),  # 4 may be meant
        (recorded(ONGOING, 1, EPOCH, HERE, last=HERE), MAX_NUMBER - 1, False, MAX_NUMBER),
        # The last one here was not the one before.
        (recorded(ONGOING, 7, EPOCH, HERE, last_number=5), 4, False, 5),
        (recorded(ONGOING, 7, EPOCH, HERE, last_number=5, last_is_commit=True), 4, True, 5),
        (recorded(ONGOING, 7, EPOCH, HERE, last_number=5, last_is_commit=True), 3, False, 5),  # 4 may be meant
        (recorded(ONGOING, 7, EPOCH, ELSEWHERE, last_number=5, last_is_commit=True), 4, True, 5),
        (recorded(COMPLETE_ABORT, 7, EPOCH, last_number=5, last_is_commit=True), 4, True, 5),
        (recorded(EMPTY, 7, EPOCH + 1, last_number=5, last_is_commit=True), 4, True, 5),  # of a later producer
    ],
)
def test_what_has_ended_is_ended_here(
    record: TransactionRecord | None, ended: int, is_commit: bool, number: int
) -> None:
    """Committed only where the record is surely about it; markers of the transactions after it are not late."""
    assert lost_end(record, OPENED, ended, HERE, 99) == Control(is_commit, PRODUCER, EPOCH, number, 99)


async def owner_dies(nodes: Installation, new: int) -> None:
    """What the owner has shipped is all that the next one gets."""
    nodes.owners[ORDERS, 0] = new
    nodes._changed()
    await asyncio.to_thread(nodes.nodes[new]._directory.topic, str(ORDERS), take_over=True)
    await nodes.nodes[new].open_partition(ORDERS, 0)


def committed(address: str, count: int) -> list[bytes]:
    """So many messages from the beginning, and those that come with them."""
    settings = {"bootstrap.servers": address, "group.id": "none", "isolation.level": "read_committed"}
    consumer = Consumer({**settings, "auto.offset.reset": "earliest", "enable.auto.commit": False})
    consumer.subscribe(["shop.orders"])
    found: list[bytes] = []
    try:
        deadline = time.monotonic() + WAIT_SECONDS
        while len(found) < count:
            assert time.monotonic() < deadline, f"{found} is all that came"
            found += [one.value() or b"" for one in consumer.consume(1, 1.0) if one.error() is None]
        return found
    finally:
        consumer.close()


def test_lost_ends_are_written_again_as_they_were_decided(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One that was committed is visible on the next owner; one that was aborted is not, though the same producer goes
    on there and commits: without the end of the one before, that would be decided with it."""
    caplog.set_level(logging.WARNING, "tidelog.kafka")

    async def work() -> None:
        async with installed(tmp_path, 4) as nodes:
            await nodes.create(ORDERS, 1, {"ship_interval_seconds": 3600})
            await nodes.give_slots(2)
            addresses = [f"{host}:{port}" for host, port in (one.kafka for one in nodes.addresses.values())]
            settings = {"bootstrap.servers": ",".join(addresses), "transactional.id": "t"}
            producer = Producer({**settings, "topic.metadata.refresh.interval.ms": 200, "retry.backoff.ms": 50})

            async def send(value: bytes, ends: Any, ship: bool) -> None:
                producer.begin_transaction()
                producer.produce("shop.orders", value, partition=0)
                assert await asyncio.to_thread(producer.flush, WAIT_SECONDS) == 0
                if ship:
                    owner = nodes.nodes[nodes.owner("shop/orders")]
                    await asyncio.to_thread(owner._directory.topic("shop/orders").ship)
                await asyncio.to_thread(ends, WAIT_SECONDS)
                coordinator = nodes.nodes[2]._transactions
                assert coordinator is not None
                while (record := coordinator.describe("t")) is None or record.state not in (
                    COMPLETE_COMMIT,
                    COMPLETE_ABORT,
                ):
                    await asyncio.sleep(0.01)  # the client is answered before the markers are written

            await asyncio.to_thread(producer.init_transactions, WAIT_SECONDS)
            await send(b"committed", producer.commit_transaction, True)
            await owner_dies(nodes, 2)
            assert await asyncio.to_thread(committed, addresses[1], 1) == [b"committed"]
            await send(b"aborted", producer.abort_transaction, True)
            await owner_dies(nodes, 3)
            await send(b"after", producer.commit_transaction, False)
            assert await asyncio.to_thread(committed, addresses[2], 2) == [b"committed", b"after"]
            await send(b"aborted, too", producer.abort_transaction, True)
            producer.begin_transaction()
            producer.produce("shop.orders", b"lost", partition=0)
            assert await asyncio.to_thread(producer.flush, WAIT_SECONDS) == 0
            await owner_dies(nodes, 4)  # committing what was lost does not decide about the one before
            await asyncio.to_thread(producer.commit_transaction, WAIT_SECONDS)
            other = Producer({"bootstrap.servers": addresses[3]})
            other.produce("shop.orders", b"at last", partition=0)
            assert await asyncio.to_thread(other.flush, WAIT_SECONDS) == 0
            assert await asyncio.to_thread(committed, addresses[3], 3) == [b"committed", b"after", b"at last"]

    run(work())
    lost = [record.getMessage() for record in caplog.records if "the end of a transaction was lost" in record.message]
    assert [line.split()[-2] for line in lost] == ["committed", "aborted", "aborted"], caplog.text


def test_what_the_producer_sends_waits_until_its_record_was_read(tmp_path: Path) -> None:
    """A batch would join the transaction whose end was lost, and a marker would decide about both."""

    class Records:
        fails = True

        def find(self, producer_ids: Any) -> dict[int, TransactionRecord]:
            if self.fails:
                raise StoreUnavailableError("away")
            return {}

    async def work() -> None:
        async with installed(tmp_path, 1) as nodes:
            await nodes.create(ORDERS, 1, {})
            node = nodes.nodes[1]
            served = node._broker.find(ORDERS)
            assert served is not None
            partition = await node._broker.partition(served, 0)
            partition.producers._transactions.add(PRODUCER, EPOCH, 0, 1)
            ends, records = LostEnds(lambda: 1), Records()
            ends.opened(partition)
            marker = Control(True, PRODUCER, EPOCH, 9, 1)
            for now in (None, records):  # the node is starting; its store is away
                ends.records = now
                await asyncio.sleep(0.5)
                assert partition._refusal(PRODUCER, lambda: ErrorCode.NONE) is ErrorCode.NOT_ENOUGH_REPLICAS
                assert partition._refusal(PRODUCER + 1, lambda: ErrorCode.NONE) is ErrorCode.NONE
                with pytest.raises(ServerUnavailableError):
                    await partition.write_marker(marker)
            records.fails = False
            while partition.undecided:
                await asyncio.sleep(0.01)
            assert partition._refusal(PRODUCER, lambda: ErrorCode.NONE) is ErrorCode.NONE
            assert not partition.producers.is_open(PRODUCER)
            await partition.write_marker(marker)
            ends.stop()

    run(work())
