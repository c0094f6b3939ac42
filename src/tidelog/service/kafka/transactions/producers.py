"""What a partition knows of its idempotent and transactional producers, as a pure state machine.

A producer has an id and an epoch, and numbers its records: a batch has the sequence of its first record, and the next
batch goes on where it ended (after 2^31 - 1 comes 0). For each producer the last five batches are known: so many may be
on their way at once.

Invariants
- `check` changes nothing; `record` is called with the offset that the batch got, before the next `check`. Recording
  what the log holds, in its order (`stored_batches` of `records.py`), gives the state that the log's owner had.
- A batch that is one of the last five is answered with the offset that it got the first time. One that is not the next
  is refused, and so is an epoch before the known one. Of an unknown producer any first sequence is taken: what was
  known of it may have been dropped with the messages, or by the limit below.
- A control record of a transaction that has ended here is late (`is_late`): a coordinator that was replaced sent it, or
  the network kept it. Written, it would end the transaction after, which has the same producer and epoch. So the
  transactions of a transactional id are numbered, and control records carry the number, from 1 on and around.
- At most `max_producers` are known: those that were silent longest are dropped, never one with an open transaction.
- What is open, what was aborted and the last stable offset: `Transactions` of `log/transactions.py`, fed with the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

import msgspec

from tidelog.errors import DataError
from tidelog.log.transactions import AbortedTransaction as AbortedTransaction
from tidelog.log.transactions import OpenTransaction, Transactions
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.records import StoredBatch

SEQUENCES = 1 << 31
MAX_NUMBER = (1 << 31) - 1
"""Of a transaction; after it comes 1."""
KEPT_BATCHES = 5
DEFAULT_MAX_PRODUCERS = 50_000
DEFAULT_EXPIRATION_US = 24 * 3600 * 1_000_000
_SNAPSHOT_VERSION = 1


class KnownBatch(NamedTuple):
    """A batch that may come again."""

    base_sequence: int
    last_sequence: int
    first_offset: int
    timestamp_us: int


class Verdict(NamedTuple):
    """What to do with a batch: append it, answer with `duplicate_offset`, or answer with the error."""

    error: ErrorCode = ErrorCode.NONE
    duplicate_offset: int | None = None
    duplicate_timestamp_us: int = -1


_APPEND = Verdict()


class ActiveProducer(NamedTuple):
    """A producer as administrators see it; -1 for what there is not."""

    producer_id: int
    epoch: int
    last_sequence: int
    last_us: int
    open_from: int
    """The first offset of its open transaction."""


class _Producer:
    __slots__ = ("batches", "ended", "epoch", "last_us")

    def __init__(self, epoch: int, last_us: int, ended: int = 0) -> None:
        self.epoch = epoch
        self.last_us = last_us
        self.ended = ended
        """The number of the last transaction that ended here; 0: of none."""
        self.batches: deque[KnownBatch] = deque(maxlen=KEPT_BATCHES)


class _Snapshot(msgspec.Struct, array_like=True):
    version: int
    next_offset: int
    producers: list[tuple[int, int, int, list[tuple[int, int, int, int]]]]
    open: list[tuple[int, int, int, int]]
    aborted: list[tuple[int, int, int]]
    ended: list[tuple[int, int]] = []


def is_after(number: int, other: int) -> bool:
    """Whether a transaction is younger than another one of its id: numbers go around."""
    return 0 < (number - other) % MAX_NUMBER < MAX_NUMBER // 2


class PartitionProducers:
    """The producers of one partition."""

    def __init__(
        self, *, max_producers: int = DEFAULT_MAX_PRODUCERS, expiration_us: int = DEFAULT_EXPIRATION_US
    ) -> None:
        self._max_producers = max_producers
        self._expiration_us = expiration_us
        # In the order in which they were last heard of, so that the first one is the one to drop.
        self._producers: dict[int, _Producer] = {}
        self._transactions = Transactions()
        self.next_offset = 0
        """Behind the last batch that was recorded."""

    # Appending

    def check(self, producer_id: int, epoch: int, base_sequence: int, count: int) -> Verdict:
        """What to do with a batch from a client."""
        known = self._producers.get(producer_id)
        if known is None:
            return _APPEND
        if epoch < known.epoch:
            return Verdict(ErrorCode.INVALID_PRODUCER_EPOCH)
        if epoch > known.epoch:
            return _APPEND if base_sequence == 0 else Verdict(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER)
        last_sequence = (base_sequence + count - 1) % SEQUENCES
        for batch in known.batches:
            if batch.base_sequence == base_sequence and batch.last_sequence == last_sequence:
                return Verdict(ErrorCode.NONE, batch.first_offset, batch.timestamp_us)
        # Without a batch, only a control record has brought this epoch.
        expected = (known.batches[-1].last_sequence + 1) % SEQUENCES if known.batches else 0
        return _APPEND if base_sequence == expected else Verdict(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER)

    def record(self, batch: StoredBatch, heard_us: int | None = None) -> None:
        """A batch or a control record that the log has now. One that is recorded already changes nothing.

        `heard_us` is when it came; the time of the message if nobody knows, which a client is free to choose.
        """
        if batch.first_offset < self.next_offset:
            return
        self.next_offset = batch.last_offset + 1
        known = self._touch(batch, batch.timestamp_us if heard_us is None else heard_us)
        if batch.is_control:
            known.ended = max(batch.base_sequence, 0) or known.ended
            self._transactions.end(batch.producer_id, batch.last_offset, is_commit=batch.is_commit)
            return
        last_sequence = (batch.base_sequence + batch.last_offset - batch.first_offset) % SEQUENCES
        known.batches.append(KnownBatch(batch.base_sequence, last_sequence, batch.first_offset, batch.timestamp_us))
        if batch.is_transactional:
            self._transactions.add(batch.producer_id, batch.producer_epoch, batch.first_offset, batch.last_offset)

    def record_all(self, batches: Iterable[StoredBatch], heard_us: int | None = None) -> None:
        """What a part of the log holds, in its order."""
        for batch in batches:
            self.record(batch, heard_us)

    def _touch(self, batch: StoredBatch, heard_us: int) -> _Producer:
        known = self._producers.pop(batch.producer_id, None)
        if known is None or known.epoch != batch.producer_epoch:
            known = _Producer(batch.producer_epoch, heard_us, 0 if known is None else known.ended)
        known.last_us = max(known.last_us, heard_us)
        self._producers[batch.producer_id] = known
        if len(self._producers) > self._max_producers:
            self.drop_silent(1)
        return known

    def drop_silent(self, count: int) -> None:
        """Forgets so many of those that were silent longest, and have no open transaction."""
        silent = list(islice((one for one in self._producers if not self.is_open(one)), count))
        for producer_id in silent:
            del self._producers[producer_id]

    def expire(self, now_us: int) -> None:
        """Forgets producers that were silent for too long."""
        limit = now_us - self._expiration_us
        silent = [one for one, known in self._producers.items() if known.last_us < limit and not self.is_open(one)]
        for producer_id in silent:
            del self._producers[producer_id]

    def forget_before(self, start_offset: int) -> None:
        """The log begins later now: aborted transactions before that are of no use to anybody."""
        self._transactions.forget_before(start_offset)

    # Transactions

    def is_late(self, producer_id: int, epoch: int, number: int) -> bool:
        """Whether a control record is about a transaction that has ended here already."""
        known = self._producers.get(producer_id)
        if known is None or number <= 0:
            return False
        return epoch < known.epoch or (known.ended > 0 and not is_after(number, known.ended))

    def last_ended(self, producer_id: int) -> int:
        """The number of the last transaction of the producer that ended here; 0: none is known."""
        known = self._producers.get(producer_id)
        return 0 if known is None else known.ended

    def is_open(self, producer_id: int) -> bool:
        """Whether a transaction of the producer is open here."""
        return self._transactions.is_open(producer_id)

    @property
    def open_transactions(self) -> list[OpenTransaction]:
        """In the order of their first offsets."""
        return self._transactions.open

    def last_stable_offset(self, high_watermark: int) -> int:
        """Consumers that read committed messages get nothing from here on."""
        return self._transactions.last_stable_offset(high_watermark)

    def aborted(self, start_offset: int, stop_offset: int) -> list[AbortedTransaction]:
        """Aborted transactions with a message in this range (its end is exclusive), for the answer to a Fetch."""
        return self._transactions.aborted(start_offset, stop_offset)

    def active(self) -> list[ActiveProducer]:
        """All that are known, the one that was heard of last at the end."""
        opened = {one.producer_id: one.first_offset for one in self.open_transactions}
        return [
            ActiveProducer(
                producer_id,
                known.epoch,
                known.batches[-1].last_sequence if known.batches else -1,
                known.last_us,
                opened.get(producer_id, -1),
            )
            for producer_id, known in self._producers.items()
        ]

    @property
    def count(self) -> int:
        """How many producers are known."""
        return len(self._producers)

    # Persistence

    def snapshot(self) -> bytes:
        """All of it, so that opening the log reads only what came after `next_offset`."""
        producers = [
            (producer_id, known.epoch, known.last_us, [tuple(batch) for batch in known.batches])
            for producer_id, known in self._producers.items()
        ]
        opened, aborted = self._transactions.open, self._transactions.all_aborted
        ended = [(producer_id, known.ended) for producer_id, known in self._producers.items() if known.ended]
        whole = (_SNAPSHOT_VERSION, self.next_offset, producers, opened, aborted, ended)
        return msgspec.msgpack.encode(whole)

    def restore(self, data: bytes) -> None:
        """What `snapshot` returned; DataError when it is not that: then the log is read from its beginning."""
        try:
            found = msgspec.msgpack.decode(data, type=_Snapshot)
        except msgspec.DecodeError as error:
            raise DataError(f"a snapshot of producers is damaged: {error}") from error
        if found.version != _SNAPSHOT_VERSION:
            raise DataError(
                f"a snapshot of producers has version {found.version}, this tidelog reads {_SNAPSHOT_VERSION}"
            )
        self._producers.clear()
        for producer_id, epoch, last_us, batches in found.producers:
            known = self._producers[producer_id] = _Producer(epoch, last_us)
            known.batches.extend(KnownBatch(*batch) for batch in batches)
        for producer_id, number in found.ended:
            if producer_id in self._producers:
                self._producers[producer_id].ended = number
        self._transactions = Transactions(
            (OpenTransaction(*one) for one in found.open), (AbortedTransaction(*one) for one in found.aborted)
        )
        self.next_offset = found.next_offset
