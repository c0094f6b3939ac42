"""The transaction coordinator, as a pure state machine.

    EMPTY ──> ONGOING ──> PREPARE_COMMIT ──> COMPLETE_COMMIT ──┐
                │  ^                                           │  the next transaction
                │  └───────────────────────────────────────────┤
                └───> PREPARE_ABORT ───> COMPLETE_ABORT ───────┘

Requests return effects; the caller carries them out and tells when they are done:

    Persist(record)      write it durably, then call `persisted(transactional_id)`
    WriteMarkers(...)    append a control record to each partition, commit or drop the offsets of each group, and call
                         `marker_written` for each
    Reply(token, ...)    answer the request with this token

Invariants
- Nothing is answered, and no marker is written, before the record that says so is durable. A coordinator that is built
  from the records finishes what was begun: a transaction whose PREPARE record is durable has that outcome, and its
  markers are written again (a second one in a partition changes nothing).
- While a record is being written for a transactional id, further requests for it get CONCURRENT_TRANSACTIONS.
- A producer with another epoch than the current one is fenced: InitProducerId and a timeout raise the epoch, and the
  markers carry the new one, so that partitions refuse a zombie, too.
- A transaction that is open for longer than its timeout is aborted. Nothing stays open for ever.
- Offsets that are committed within a transaction are part of its record, and count when it commits.
- Calls take the time, in ms of a clock that never goes back; `tick` is due at `next_deadline_ms`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from enum import Enum
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import msgspec

from tidelog.errors import DataError
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.transactions.producers import MAX_NUMBER

Token = Hashable
Partition = tuple[str, int]
NO_PRODUCER = -1
NO_EPOCH = -1
MAX_EPOCH = 32_766  # the one above is for fencing
KEPT_PARTITIONS = 500
"""Of so many partitions a record says which transaction was the last one there. It is written with each change."""
DEFAULT_MAX_TIMEOUT_MS = 15 * 60_000
DEFAULT_EXPIRATION_MS = 7 * 24 * 3_600_000


class TransactionState(Enum):
    """As Kafka's tools show it."""

    EMPTY = "Empty"
    ONGOING = "Ongoing"
    PREPARE_COMMIT = "PrepareCommit"
    PREPARE_ABORT = "PrepareAbort"
    COMPLETE_COMMIT = "CompleteCommit"
    COMPLETE_ABORT = "CompleteAbort"


_PREPARED = (TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT)


class CommittedOffset(NamedTuple):
    """What a consumer of the transaction has read up to."""

    offset: int
    leader_epoch: int = -1
    metadata: str | None = None


class EndedTransaction(NamedTuple):
    """How a transaction ended, and where it was the last one."""

    number: int
    is_commit: bool
    partitions: frozenset[Partition]


class TransactionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is known of a transactional id, as it is persisted."""

    transactional_id: str
    producer_id: int
    epoch: int
    timeout_ms: int
    state: TransactionState = TransactionState.EMPTY
    last_producer_id: int = NO_PRODUCER
    last_epoch: int = NO_EPOCH
    """Those before the last InitProducerId: a client that lost its answer comes with them."""
    partitions: frozenset[Partition] = frozenset()
    groups: frozenset[str] = frozenset()
    offsets: dict[str, dict[str, dict[int, CommittedOffset]]] = {}
    """By group, topic and partition."""
    started_ms: int = -1
    updated_ms: int = 0
    number: int = 0
    """Of the transaction: what ends it carries the number, so that it cannot end the next one."""
    ended: tuple[EndedTransaction, ...] = ()
    """The newest first, each with the partitions in which it was the last one: a partition that has lost its end finds
    out by them (`lost_ends.py`)."""

    def last_in(self, partition: Partition) -> EndedTransaction | None:
        """The last transaction that has ended, of those that had this partition."""
        return next((one for one in self.ended if partition in one.partitions), None)


class Persist(NamedTuple):
    """Write the record durably, and call `persisted`. None: the transactional id is forgotten."""

    transactional_id: str
    record: TransactionRecord | None


class WriteMarkers(NamedTuple):
    """End the transaction in each of its partitions and groups, and call `marker_written` for each."""

    transactional_id: str
    producer_id: int
    epoch: int
    is_commit: bool
    partitions: frozenset[Partition]
    offsets: Mapping[str, Mapping[str, Mapping[int, CommittedOffset]]]
    """By group: to be committed, or not to be pending any more."""
    number: int
    round: int
    """Comes back with `marker_written`, so that a late confirmation does not count for another transaction."""


class Reply(NamedTuple):
    """An answer; the last two are those of InitProducerId."""

    token: Token
    error: ErrorCode
    producer_id: int = NO_PRODUCER
    epoch: int = NO_EPOCH


Effect = Persist | WriteMarkers | Reply


class _Transition(NamedTuple):
    """What happens once the record is durable."""

    record: TransactionRecord | None
    replies: tuple[Reply, ...] = ()


class _Transaction:
    __slots__ = ("missing", "next", "record", "round")

    def __init__(self, record: TransactionRecord) -> None:
        self.record = record
        self.next: _Transition | None = None
        self.missing: set[Partition | str] = set()
        """Partitions and groups whose marker is still to be written."""
        self.round = 0


def encode_record(record: TransactionRecord) -> bytes:
    """The bytes to persist."""
    return msgspec.json.encode(record)


def decode_record(data: bytes) -> TransactionRecord:
    """A persisted record; DataError when it is damaged."""
    try:
        return msgspec.json.decode(data, type=TransactionRecord)
    except msgspec.DecodeError as error:
        raise DataError(f"the record of a transaction is damaged: {error}") from error


class TransactionCoordinator:
    """All transactional ids that one node coordinates. `new_producer_id` never returns the same number twice."""

    def __init__(
        self,
        new_producer_id: Callable[[], int],
        *,
        max_timeout_ms: int = DEFAULT_MAX_TIMEOUT_MS,
        expiration_ms: int = DEFAULT_EXPIRATION_MS,
    ) -> None:
        self._new_producer_id = new_producer_id
        self._max_timeout_ms = max_timeout_ms
        self._expiration_ms = expiration_ms
        self._transactions: dict[str, _Transaction] = {}
        self._by_producer: dict[int, str] = {}
        self._rounds = 0
        # When something is due for a transactional id, as a heap. An entry that is out of date is passed over, and all
        # of them are made new when most are: a transaction changes often, and its deadlines lie far ahead.
        self._deadlines: list[tuple[int, str]] = []

    def recover(self, records: Iterable[TransactionRecord]) -> list[Effect]:
        """Takes over what was persisted, and goes on with what was begun."""
        effects: list[Effect] = []
        for record in records:
            effects += self._restore(record)
        return effects

    def _restore(self, record: TransactionRecord) -> list[Effect]:
        transaction = self._transactions[record.transactional_id] = _Transaction(record)
        self._by_producer[record.producer_id] = record.transactional_id
        self._schedule(record)
        return self._begin_markers(transaction) if record.state in _PREPARED else []

    # Requests

    def init_producer(
        self,
        now_ms: int,
        token: Token,
        transactional_id: str | None,
        timeout_ms: int,
        producer_id: int = NO_PRODUCER,
        epoch: int = NO_EPOCH,
    ) -> list[Effect]:
        """InitProducerId. Without a transactional id it is for an idempotent producer, and nothing is remembered."""
        if transactional_id is None:
            return [Reply(token, ErrorCode.NONE, self._new_producer_id(), 0)]
        if not transactional_id:
            return [Reply(token, ErrorCode.INVALID_REQUEST)]
        if not 0 < timeout_ms <= self._max_timeout_ms:
            return [Reply(token, ErrorCode.INVALID_TRANSACTION_TIMEOUT)]
        transaction = self._transactions.get(transactional_id)
        if transaction is None:
            return self._init_new(now_ms, token, transactional_id, timeout_ms)
        return self._init_again(now_ms, token, transaction, timeout_ms, producer_id, epoch)

    def _init_again(
        self, now_ms: int, token: Token, transaction: _Transaction, timeout_ms: int, producer_id: int, epoch: int
    ) -> list[Effect]:
        record = transaction.record
        if transaction.next is not None or record.state in _PREPARED:
            return [Reply(token, ErrorCode.CONCURRENT_TRANSACTIONS)]
        if producer_id != NO_PRODUCER and not _may_init(record, producer_id, epoch):
            return [Reply(token, ErrorCode.PRODUCER_FENCED)]
        if record.state is TransactionState.ONGOING:
            # The producer before is fenced and its transaction aborted; the client asks again until that is done.
            return self._fence(now_ms, transaction, NO_EPOCH, Reply(token, ErrorCode.CONCURRENT_TRANSACTIONS))
        if producer_id != NO_PRODUCER and epoch == record.last_epoch and epoch != record.epoch:
            return [Reply(token, ErrorCode.NONE, record.producer_id, record.epoch)]  # its answer was lost
        changed = self._bumped(record, now_ms, timeout_ms)
        return self._change(transaction, changed, Reply(token, ErrorCode.NONE, changed.producer_id, changed.epoch))

    def add_partitions(
        self,
        now_ms: int,
        token: Token,
        transactional_id: str,
        producer_id: int,
        epoch: int,
        partitions: Iterable[Partition],
    ) -> list[Effect]:
        """AddPartitionsToTxn."""
        return self._add(now_ms, token, transactional_id, producer_id, epoch, frozenset(partitions), frozenset())

    def add_offsets(
        self, now_ms: int, token: Token, transactional_id: str, producer_id: int, epoch: int, group_id: str
    ) -> list[Effect]:
        """AddOffsetsToTxn."""
        return self._add(now_ms, token, transactional_id, producer_id, epoch, frozenset(), frozenset((group_id,)))

    def commit_offsets(
        self,
        now_ms: int,
        token: Token,
        transactional_id: str,
        producer_id: int,
        epoch: int,
        group_id: str,
        offsets: Mapping[Partition, CommittedOffset],
    ) -> list[Effect]:
        """TxnOffsetCommit: they count when the transaction commits. The group was checked by its own coordinator."""
        transaction, error = self._find(transactional_id, producer_id, epoch)
        if transaction is None:
            return [Reply(token, error)]
        record = transaction.record
        if record.state is not TransactionState.ONGOING or group_id not in record.groups:
            return [Reply(token, ErrorCode.INVALID_TXN_STATE)]
        merged = {topic: dict(known) for topic, known in record.offsets.get(group_id, {}).items()}
        for (topic, partition), offset in offsets.items():
            merged.setdefault(topic, {})[partition] = offset
        changed = _changed(record, now_ms, offsets={**record.offsets, group_id: merged})
        return self._change(transaction, changed, Reply(token, ErrorCode.NONE))

    def end(
        self, now_ms: int, token: Token, transactional_id: str, producer_id: int, epoch: int, is_commit: bool
    ) -> list[Effect]:
        """EndTxn. It is answered once the outcome is durable, before the markers are."""
        transaction, error = self._find(transactional_id, producer_id, epoch, may_be_prepared=True)
        if transaction is None:
            return [Reply(token, error)]
        state = transaction.record.state
        prepared = TransactionState.PREPARE_COMMIT if is_commit else TransactionState.PREPARE_ABORT
        complete = TransactionState.COMPLETE_COMMIT if is_commit else TransactionState.COMPLETE_ABORT
        if state is TransactionState.ONGOING:
            changed = _changed(transaction.record, now_ms, state=prepared)
            return self._change(transaction, changed, Reply(token, ErrorCode.NONE))
        if state is complete:
            return [Reply(token, ErrorCode.NONE)]  # its answer was lost
        if state is prepared:
            return [Reply(token, ErrorCode.CONCURRENT_TRANSACTIONS)]
        return [Reply(token, ErrorCode.INVALID_TXN_STATE)]

    def verify(self, producer_id: int, epoch: int, partition: Partition) -> ErrorCode:
        """Whether a transactional batch may be appended: its transaction is open, and has this partition.

        Without this a batch that comes late would open a transaction that nobody ends.
        """
        transaction = self._transactions.get(self._by_producer.get(producer_id, ""))
        if transaction is None or transaction.record.producer_id != producer_id:
            return ErrorCode.INVALID_PRODUCER_ID_MAPPING
        record = transaction.record
        if epoch != record.epoch:
            return ErrorCode.INVALID_PRODUCER_EPOCH
        if record.state is not TransactionState.ONGOING or partition not in record.partitions:
            return ErrorCode.INVALID_TXN_STATE
        coming = None if transaction.next is None else transaction.next.record
        is_ending = coming is not None and coming.state is not TransactionState.ONGOING
        return ErrorCode.INVALID_TXN_STATE if is_ending else ErrorCode.NONE

    # What the caller has done

    def persisted(self, transactional_id: str) -> list[Effect]:
        """The record of the last Persist is durable."""
        transaction = self._transactions[transactional_id]
        transition = transaction.next
        assert transition is not None, "nothing was to be persisted"
        transaction.next = None
        effects: list[Effect] = list(transition.replies)
        if transition.record is None:
            del self._transactions[transactional_id]
            self._by_producer.pop(transaction.record.producer_id, None)
            return effects
        if transition.record.producer_id != transaction.record.producer_id:
            self._by_producer.pop(transaction.record.producer_id, None)
            self._by_producer[transition.record.producer_id] = transactional_id
        transaction.record = transition.record
        self._schedule(transition.record)
        if transaction.record.state in _PREPARED:
            effects += self._begin_markers(transaction)
        return effects

    def not_persisted(
        self, transactional_id: str, error: ErrorCode = ErrorCode.COORDINATOR_NOT_AVAILABLE
    ) -> list[Effect]:
        """The record surely was not written, and everything is as before. Where that is not sure, recover."""
        transaction = self._transactions[transactional_id]
        transition = transaction.next
        assert transition is not None, "nothing was to be persisted"
        transaction.next = None
        if transaction.record.epoch == NO_EPOCH:
            del self._transactions[transactional_id]
        else:
            self._schedule(transaction.record)
        return [Reply(reply.token, error) for reply in transition.replies]

    def superseded(self, transactional_id: str, record: TransactionRecord | None) -> list[Effect]:
        """The record was not written, for another coordinator has written this one: it counts, and its clients are
        sent to look for their coordinator. None: the transactional id is gone."""
        effects = self.not_persisted(transactional_id, ErrorCode.NOT_COORDINATOR)
        known = self._transactions.pop(transactional_id, None)
        if known is not None:
            self._by_producer.pop(known.record.producer_id, None)
        return effects if record is None else effects + self._restore(record)

    def forget(self, transactional_id: str) -> list[Effect]:
        """Another coordinator has this transactional id now. What is being written here may be written all the same."""
        transaction = self._transactions.pop(transactional_id, None)
        if transaction is None:
            return []
        if self._by_producer.get(transaction.record.producer_id) == transactional_id:
            del self._by_producer[transaction.record.producer_id]
        waiting = () if transaction.next is None else transaction.next.replies
        return [Reply(reply.token, ErrorCode.NOT_COORDINATOR) for reply in waiting]

    def knows(self, producer_id: int) -> bool:
        """Whether a producer is one of those that are coordinated here."""
        return producer_id in self._by_producer

    def is_writing(self, transactional_id: str) -> bool:
        """Whether a record of it is to be persisted."""
        transaction = self._transactions.get(transactional_id)
        return transaction is not None and transaction.next is not None

    def marker_written(self, now_ms: int, markers: WriteMarkers, place: Partition | str) -> list[Effect]:
        """A partition has its control record, or a group (by its name) the offsets."""
        transaction = self._transactions.get(markers.transactional_id)
        if transaction is None or transaction.round != markers.round:
            return []
        transaction.missing.discard(place)
        if transaction.missing or transaction.next is not None or transaction.record.state not in _PREPARED:
            return []
        return self._complete(transaction, now_ms)

    # Time

    @property
    def next_deadline_ms(self) -> int | None:
        """When `tick` is due."""
        while self._deadlines and not self._is_due_at(*self._deadlines[0]):
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _is_due_at(self, due_ms: int, transactional_id: str) -> bool:
        transaction = self._transactions.get(transactional_id)
        is_at_rest = transaction is not None and transaction.next is None
        return is_at_rest and self._deadline_ms(transaction.record) == due_ms  # type: ignore[union-attr]

    def _schedule(self, record: TransactionRecord) -> None:
        heappush(self._deadlines, (self._deadline_ms(record), record.transactional_id))
        if len(self._deadlines) > 64 + 4 * len(self._transactions):
            self._deadlines = [
                (self._deadline_ms(one.record), name) for name, one in self._transactions.items() if one.next is None
            ]
            heapify(self._deadlines)

    def tick(self, now_ms: int) -> list[Effect]:
        """Aborts what was open for too long, and forgets ids that nobody has used for long."""
        effects: list[Effect] = []
        while (due_ms := self.next_deadline_ms) is not None and due_ms <= now_ms:
            transaction = self._transactions[heappop(self._deadlines)[1]]
            if transaction.record.state is TransactionState.ONGOING:
                # Its producer is late, not replaced: it may ask for the new epoch with the one that it has.
                effects += self._fence(now_ms, transaction, transaction.record.epoch)
            elif transaction.record.state in _PREPARED:
                effects += self._retry(transaction, now_ms)
            else:
                transaction.next = _Transition(None)
                effects.append(Persist(transaction.record.transactional_id, None))
        return effects

    def _deadline_ms(self, record: TransactionRecord) -> int:
        if record.state is TransactionState.ONGOING:
            return record.started_ms + record.timeout_ms
        if record.state in _PREPARED:
            return record.updated_ms + max(record.timeout_ms, 1)
        return record.updated_ms + self._expiration_ms

    def _retry(self, transaction: _Transaction, now_ms: int) -> list[Effect]:
        """Markers that were not confirmed for as long as the timeout: they are written again."""
        transaction.record = _changed(transaction.record, now_ms)
        self._schedule(transaction.record)
        return self._begin_markers(transaction)

    # Views

    def transactional_ids(self) -> list[str]:
        return list(self._transactions)

    def describe(self, transactional_id: str) -> TransactionRecord | None:
        """What is durable of a transactional id."""
        transaction = self._transactions.get(transactional_id)
        return None if transaction is None or transaction.record.epoch == NO_EPOCH else transaction.record

    def is_busy(self, transactional_id: str) -> bool:
        """Whether a record or markers are being written, so that requests get CONCURRENT_TRANSACTIONS."""
        transaction = self._transactions.get(transactional_id)
        return transaction is not None and (transaction.next is not None or transaction.record.state in _PREPARED)

    # Steps

    def _find(
        self, transactional_id: str, producer_id: int, epoch: int, *, may_be_prepared: bool = False
    ) -> tuple[_Transaction | None, ErrorCode]:
        transaction = self._transactions.get(transactional_id)
        if transaction is None or transaction.record.producer_id != producer_id:
            return None, ErrorCode.INVALID_PRODUCER_ID_MAPPING
        if epoch != transaction.record.epoch:
            return None, ErrorCode.PRODUCER_FENCED
        if transaction.next is not None or (transaction.record.state in _PREPARED and not may_be_prepared):
            return None, ErrorCode.CONCURRENT_TRANSACTIONS
        return transaction, ErrorCode.NONE

    def _init_new(self, now_ms: int, token: Token, transactional_id: str, timeout_ms: int) -> list[Effect]:
        producer_id = self._new_producer_id()
        record = TransactionRecord(
            transactional_id=transactional_id,
            producer_id=producer_id,
            epoch=0,
            timeout_ms=timeout_ms,
            updated_ms=now_ms,
        )
        # Until the record is durable, nobody has this id: no epoch is the current one.
        transaction = _Transaction(msgspec.structs.replace(record, producer_id=NO_PRODUCER, epoch=NO_EPOCH))
        self._transactions[transactional_id] = transaction
        return self._change(transaction, record, Reply(token, ErrorCode.NONE, producer_id, 0))

    def _bumped(self, record: TransactionRecord, now_ms: int, timeout_ms: int) -> TransactionRecord:
        """The next epoch, or the next producer when epochs are used up."""
        producer_id, epoch = record.producer_id, record.epoch + 1
        if epoch > MAX_EPOCH:
            producer_id, epoch = self._new_producer_id(), 0
        return _changed(
            record,
            now_ms,
            producer_id=producer_id,
            epoch=epoch,
            last_producer_id=record.producer_id,
            last_epoch=record.epoch,
            timeout_ms=timeout_ms,
            state=TransactionState.EMPTY,
        )

    def _add(
        self,
        now_ms: int,
        token: Token,
        transactional_id: str,
        producer_id: int,
        epoch: int,
        partitions: frozenset[Partition],
        groups: frozenset[str],
    ) -> list[Effect]:
        transaction, error = self._find(transactional_id, producer_id, epoch)
        if transaction is None:
            return [Reply(token, error)]
        record = transaction.record
        if record.state is TransactionState.ONGOING:
            if partitions <= record.partitions and groups <= record.groups:
                return [Reply(token, ErrorCode.NONE)]
            changed = _changed(record, now_ms, partitions=record.partitions | partitions, groups=record.groups | groups)
        else:
            changed = _changed(
                record,
                now_ms,
                state=TransactionState.ONGOING,
                partitions=partitions,
                groups=groups,
                offsets={},
                started_ms=now_ms,
                number=record.number % MAX_NUMBER + 1,
            )
        return self._change(transaction, changed, Reply(token, ErrorCode.NONE))

    def _fence(self, now_ms: int, transaction: _Transaction, last_epoch: int, *replies: Reply) -> list[Effect]:
        """Aborts an open transaction under the next epoch, which its producer does not have."""
        record = transaction.record
        changed = _changed(
            record,
            now_ms,
            state=TransactionState.PREPARE_ABORT,
            epoch=record.epoch + 1,
            last_producer_id=record.producer_id,
            last_epoch=last_epoch,
        )
        return self._change(transaction, changed, *replies)

    def _change(self, transaction: _Transaction, record: TransactionRecord, *replies: Reply) -> list[Effect]:
        transaction.next = _Transition(record, replies)
        return [Persist(record.transactional_id, record)]

    def _begin_markers(self, transaction: _Transaction) -> list[Effect]:
        record = transaction.record
        transaction.missing = {*record.partitions, *record.offsets}
        self._rounds += 1
        transaction.round = self._rounds
        if not transaction.missing:
            return self._complete(transaction, record.updated_ms)
        return [
            WriteMarkers(
                record.transactional_id,
                record.producer_id,
                record.epoch,
                record.state is TransactionState.PREPARE_COMMIT,
                record.partitions,
                record.offsets,
                record.number,
                transaction.round,
            )
        ]

    def _complete(self, transaction: _Transaction, now_ms: int) -> list[Effect]:
        is_commit = transaction.record.state is TransactionState.PREPARE_COMMIT
        changed = _changed(
            transaction.record,
            now_ms,
            state=TransactionState.COMPLETE_COMMIT if is_commit else TransactionState.COMPLETE_ABORT,
            partitions=frozenset(),
            groups=frozenset(),
            offsets={},
            started_ms=-1,
            ended=_ended(transaction.record, is_commit),
        )
        return self._change(transaction, changed)


def _changed(record: TransactionRecord, now_ms: int, **changes: object) -> TransactionRecord:
    return msgspec.structs.replace(record, updated_ms=max(now_ms, record.updated_ms), **changes)


def _ended(record: TransactionRecord, is_commit: bool) -> tuple[EndedTransaction, ...]:
    """With the transaction of the record as the newest; so many partitions are kept that records stay small."""
    before = (one._replace(partitions=one.partitions - record.partitions) for one in record.ended)
    kept, left = [], KEPT_PARTITIONS
    for one in (EndedTransaction(record.number, is_commit, record.partitions), *before):
        some = one.partitions if len(one.partitions) <= left else frozenset(sorted(one.partitions)[:left])
        if some:
            kept.append(one._replace(partitions=some))
            left -= len(some)
    return tuple(kept)


def _may_init(record: TransactionRecord, producer_id: int, epoch: int) -> bool:
    """Whether a client that names its producer is the current one, or lost the answer that made the current one."""
    if producer_id == record.producer_id and epoch == record.epoch:
        return True
    return producer_id == record.last_producer_id and epoch == record.last_epoch
