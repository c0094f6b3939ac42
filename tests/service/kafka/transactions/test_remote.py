"""Verification of transactional batches where another node coordinates their transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tidelog.errors import StoreUnavailableError
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.transactions.remote import Verification
from tidelog.service.kafka.transactions.state_machine import TransactionRecord, TransactionState

PLACE = ("shop/orders", 3)
PRODUCER, EPOCH = 7, 1


class Records:
    """One record, as it is stored; reading it can be made to wait."""

    def __init__(self, **fields: Any) -> None:
        self.record: TransactionRecord | None = TransactionRecord(
            transactional_id="t",
            producer_id=PRODUCER,
            epoch=EPOCH,
            timeout_ms=1000,
            state=TransactionState.ONGOING,
            partitions=frozenset({PLACE}),
        )
        self.reads = 0
        self.error: StoreUnavailableError | None = None
        self.on_read: Callable[[], None] = lambda: None

    def read(self, transactional_id: str) -> TransactionRecord | None:
        self.reads += 1
        found = self.record
        self.on_read()
        if self.error is not None:
            raise self.error
        return found


class Nobody:
    """A coordinator of this node that knows no producer."""

    def knows(self, producer_id: int) -> bool:
        return False

    def verify(self, producer_id: int, epoch: int, topic: str, partition: int, version: int) -> ErrorCode:
        raise AssertionError


async def at_once(work: Callable[..., Any], *arguments: Any) -> Any:
    return work(*arguments)


def verified(check: Verification, epoch: int = EPOCH, version: int = 9) -> ErrorCode:
    """What a batch is answered with that comes now."""
    if not check.is_known(PRODUCER, epoch, *PLACE):
        asyncio.run(check.prepare("t", PRODUCER, epoch, *PLACE))
    return check.verify(PRODUCER, epoch, *PLACE, version)


def test_an_open_transaction_is_read_once() -> None:
    """Until a marker of its producer comes: then the record says whether there is a next one."""
    records = Records()
    check = Verification(records, Nobody(), at_once)
    assert [verified(check) for _ in range(3)] == [ErrorCode.NONE] * 3
    assert records.reads == 1
    check.ended(*PLACE, PRODUCER)
    assert verified(check) is ErrorCode.NONE
    assert records.reads == 2
    check.opened(*PLACE)
    assert verified(check) is ErrorCode.NONE
    assert records.reads == 3


def test_a_marker_between_reading_and_appending_refuses_the_batch() -> None:
    """What was read before it does not count: the batch would open a transaction that nobody ends."""
    records = Records()
    check = Verification(records, Nobody(), at_once)
    records.on_read = lambda: check.ended(*PLACE, PRODUCER)
    assert verified(check) is ErrorCode.NOT_ENOUGH_REPLICAS
    records.on_read = lambda: None
    records.record = None
    assert verified(check) is ErrorCode.INVALID_PRODUCER_ID_MAPPING


def test_what_is_not_open_is_refused_and_looked_up_again() -> None:
    """An ended transaction, another epoch, a partition that was not added, a store that does not answer."""
    records = Records()
    check = Verification(records, Nobody(), at_once)
    ongoing = records.record
    assert ongoing is not None
    assert verified(check, epoch=EPOCH + 1) is ErrorCode.INVALID_PRODUCER_EPOCH
    records.record = TransactionRecord(transactional_id="t", producer_id=PRODUCER, epoch=EPOCH, timeout_ms=1)
    assert verified(check) is ErrorCode.INVALID_TXN_STATE
    assert verified(check, version=11) is ErrorCode.TRANSACTION_ABORTABLE
    records.error = StoreUnavailableError("away")
    assert verified(check) is ErrorCode.NOT_ENOUGH_REPLICAS
    records.error, records.record = None, ongoing
    assert verified(check) is ErrorCode.NONE
