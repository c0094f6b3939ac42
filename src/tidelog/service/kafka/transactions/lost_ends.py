"""Transactions whose end a partition has lost, with the tail of a node that died: ends them.

    a partition is opened, with open transactions ──> their records, as stored ──> the control record, written again

A topic with `durability = "synced"` may lose the end of its log with its owner, and the control record of a transaction
with it. The coordinator has that one as done, and nobody else would end it: readers of committed messages would wait
for ever, and the next transaction of its producer would decide about its messages.

Invariants
- Until the record was read, the producer's batches and markers are refused, and their senders try again: what is open
  here is older than both.
- A transaction that is open or about to end, as its record says, is left alone, unless an earlier one had this
  partition, too, and its end is not here: then that one is what is open here, since all that came after it is lost. All
  others have ended: aborted, unless the record surely is about this transaction, and says that it was committed.
- The record has the last transaction in each partition, and how it ended. What is open here is the next after the last
  one that ended here: where the record has another number, one between them may be meant, and is aborted. Of a
  transaction that was committed this may lose the rest, as the topic may lose a tail.
- Nothing that was aborted gets visible, but for one case: the record's transaction is open, had added this partition
  before its owner died, and goes on, and it is not known which one ended here last, or was here last. That is so for
  the first transaction of a producer in a partition, and for one that has more partitions than records keep
  (`KEPT_PARTITIONS`). It decides about an earlier one whose end was lost, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Protocol

from tidelog.clock import jittered
from tidelog.errors import TidelogError
from tidelog.log.transactions import OpenTransaction
from tidelog.service.kafka.partitions import Partition
from tidelog.service.kafka.records import Control
from tidelog.service.kafka.transactions.producers import MAX_NUMBER, is_after
from tidelog.service.kafka.transactions.state_machine import Partition as Place
from tidelog.service.kafka.transactions.state_machine import TransactionRecord, TransactionState
from tidelog.store.scheduler import in_store_thread

_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 5.0
_logger = logging.getLogger("tidelog.kafka")


class Records(Protocol):
    """The records of transactions, as they are stored (`store.py`)."""

    def find(self, producer_ids: Collection[int]) -> Mapping[int, TransactionRecord]: ...


class LostEnds:
    """Looks after the partitions of a node that were opened with open transactions. On the event loop."""

    def __init__(self, now_us: Callable[[], int], read: Callable[..., Awaitable[Any]] = in_store_thread) -> None:
        self.records: Records | None = None
        """Until it is set, partitions wait."""
        self._now_us = now_us
        self._in_thread = read
        self._waiting: list[Partition] = []
        self._working: asyncio.Task[None] | None = None

    def opened(self, partition: Partition) -> None:
        """In the turn in which it was opened. Without a store no tail is lost."""
        found = partition.producers.open_transactions
        if found and partition.topic._tiered is not None:
            partition.undecided = {one.producer_id for one in found}
            self._waiting.append(partition)
            if self._working is None or self._working.done():
                self._working = asyncio.get_running_loop().create_task(self._work())

    def stop(self) -> None:
        if self._working is not None:
            self._working.cancel()

    async def _work(self) -> None:
        pause_seconds = 0.0
        while self._waiting:
            await asyncio.sleep(jittered(pause_seconds))
            some, self._waiting = [one for one in self._waiting if one.is_open], []
            wanted = {producer_id for one in some for producer_id in one.undecided}
            try:
                records = {} if self.records is None else await self._in_thread(self.records.find, wanted)
            except TidelogError as error:
                _logger.info("the records of open transactions cannot be read: %s", error)
                self._waiting += some
            else:
                if self.records is None:
                    self._waiting += some
                else:
                    done = await asyncio.gather(*(self._decide(one, records) for one in some))
                    self._waiting += [one for one, is_done in zip(some, done, strict=True) if not is_done]
            pause_seconds = min(max(2 * pause_seconds, _FIRST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)

    async def _decide(self, partition: Partition, records: Mapping[int, TransactionRecord]) -> bool:
        where = (str(partition.name), partition.number)
        for one in partition.producers.open_transactions:
            if one.producer_id not in partition.undecided:
                continue
            ended = partition.producers.last_ended(one.producer_id)
            control = lost_end(records.get(one.producer_id), one, ended, where, self._now_us())
            try:
                if control is not None:
                    await partition.write_lost_end(control)
                    how = "committed" if control.is_commit else "aborted"
                    _logger.warning(
                        "%s, partition %d: the end of a transaction was lost; from offset %d on it is %s now",
                        *(partition.name, partition.number, one.first_offset, how),
                    )
            except TidelogError as error:
                _logger.info("%s, partition %d: a lost end waits: %s", partition.name, partition.number, error)
                return not partition.is_open
            partition.undecided.discard(one.producer_id)
        partition.undecided.clear()
        return True


def lost_end(
    record: TransactionRecord | None, opened: OpenTransaction, ended: int, where: Place, now_us: int
) -> Control | None:
    """The control record that is missing behind an open transaction; None: none is.

    `record` is that of its producer, if there is one; `ended` the number of the last transaction that ended here.
    """
    if record is None:
        return Control(False, opened.producer_id, opened.epoch, 0, now_us)
    is_same = record.epoch == opened.epoch
    is_unended = record.state in _UNENDED
    before = record.last_in(where)
    has_lost_it = before is not None and is_after(before.number, ended)
    is_open_here = is_unended and where in record.partitions
    if is_open_here and (not (ended and has_lost_it) if is_same else record.state is TransactionState.PREPARE_ABORT):
        return None
    if before is not None and has_lost_it:
        is_commit = before.is_commit and before.number == ended % MAX_NUMBER + 1
        return Control(is_commit, opened.producer_id, opened.epoch, before.number, now_us)
    last = record.number - is_unended
    is_its_own = is_same and record.number == ended % MAX_NUMBER + 1
    is_commit = is_its_own and record.state is TransactionState.COMPLETE_COMMIT
    number = last if last > 0 and (not ended or is_after(last, ended)) else 0
    return Control(is_commit, opened.producer_id, opened.epoch, number, now_us)


_UNENDED = (TransactionState.ONGOING, TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT)
