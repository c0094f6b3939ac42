"""What administrators see of transactions: ListTransactions, DescribeTransactions and DescribeProducers.

    kafka-transactions list|describe|describe-producers|find-hanging

Invariants
- What is shown is durable: a record that is being written is not seen before it is.
- Nothing is changed, and no partition waits: a view is taken in one turn of the event loop.
- Topics have the names of listings, which clients send back as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tidelog.errors import TidelogError
from tidelog.service.kafka.broker import Broker, error_code
from tidelog.service.kafka.codec import wire
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.requests import Handler, RequestContext, known_name, listed_name
from tidelog.service.kafka.transactions.coordinator import TransactionService
from tidelog.service.kafka.transactions.state_machine import TransactionRecord, TransactionState
from tidelog.topics.names import parse_topic_name

DESCRIBE_PRODUCERS, DESCRIBE_TRANSACTIONS, LIST_TRANSACTIONS = 61, 65, 66
_NO_EPOCH = -1  # of the coordinator that ended a transaction last: it is not kept, as Kafka says before the first end
_STATES = {state.value for state in TransactionState}


class TransactionViews:
    """Answers about the transactions of one coordinator, and about the producers of the broker's partitions."""

    def __init__(self, service: TransactionService, broker: Broker, now_ms: Callable[[], int]) -> None:
        self._service = service
        self._broker = broker
        self._now_ms = now_ms

    def handlers(self) -> dict[int, Handler]:
        """By API key."""
        return {
            DESCRIBE_PRODUCERS: self.describe_producers,
            DESCRIBE_TRANSACTIONS: self.describe_transactions,
            LIST_TRANSACTIONS: self.list_transactions,
        }

    async def list_transactions(self, context: RequestContext, request: Any) -> Any:
        module = wire(LIST_TRANSACTIONS)
        error = self._service.refusal()
        if error is not ErrorCode.NONE:
            return module.ListTransactionsResponse(error_code=error)
        unknown = [name for name in request.state_filters if name not in _STATES]
        return module.ListTransactionsResponse(
            unknown_state_filters=unknown,
            transaction_states=[
                module.ListTransactionsResponseTransactionState(
                    transactional_id=record.transactional_id,
                    producer_id=record.producer_id,
                    transaction_state=record.state.value,
                )
                for record in self._records()
                if self._is_asked_for(record, request)
            ],
        )

    def _records(self) -> list[TransactionRecord]:
        found = (self._service.describe(one) for one in sorted(self._service.transactional_ids()))
        return [record for record in found if record is not None]

    def _is_asked_for(self, record: TransactionRecord, request: Any) -> bool:
        if request.producer_id_filters and record.producer_id not in request.producer_id_filters:
            return False
        if request.state_filters and record.state.value not in request.state_filters:
            return False
        # As Kafka does it: one that is not open has begun before everything.
        least_ms: int = request.duration_filter
        return least_ms < 0 or self._now_ms() - record.started_ms > least_ms

    async def describe_transactions(self, context: RequestContext, request: Any) -> Any:
        module = wire(DESCRIBE_TRANSACTIONS)
        states = [self._described(transactional_id) for transactional_id in request.transactional_ids]
        return module.DescribeTransactionsResponse(transaction_states=states)

    def _described(self, transactional_id: str) -> Any:
        module = wire(DESCRIBE_TRANSACTIONS)
        answer = module.DescribeTransactionsResponseTransactionState(transactional_id=transactional_id)
        record = self._service.describe(transactional_id)
        answer.error_code = (
            ErrorCode.INVALID_REQUEST if not transactional_id else self._service.refusal(transactional_id)
        )
        if answer.error_code == ErrorCode.NONE and record is None:
            answer.error_code = ErrorCode.TRANSACTIONAL_ID_NOT_FOUND
        if answer.error_code != ErrorCode.NONE or record is None:
            return answer
        answer.transaction_state = record.state.value
        answer.transaction_timeout_ms = record.timeout_ms
        answer.transaction_start_time_ms = record.started_ms
        answer.producer_id, answer.producer_epoch = record.producer_id, record.epoch
        topics: dict[str, list[int]] = {}
        for topic, number in sorted(record.partitions):
            topics.setdefault(listed_name(parse_topic_name(topic)), []).append(number)
        answer.topics = [
            module.DescribeTransactionsResponseTopicData(topic=name, partitions=numbers)
            for name, numbers in topics.items()
        ]
        return answer

    async def describe_producers(self, context: RequestContext, request: Any) -> Any:
        module = wire(DESCRIBE_PRODUCERS)
        topics = []
        for topic in request.topics:
            partitions = [await self._producers(topic.name, number) for number in topic.partition_indexes]
            topics.append(module.DescribeProducersResponseTopicResponse(name=topic.name, partitions=partitions))
        return module.DescribeProducersResponse(topics=topics)

    async def _producers(self, sent: str, number: int) -> Any:
        module = wire(DESCRIBE_PRODUCERS)
        answer = module.DescribeProducersResponsePartitionResponse(partition_index=number)
        name = known_name(sent)
        served = None if name is None else self._broker.find(name)
        if served is None:
            answer.error_code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            return answer
        try:
            partition = await self._broker.partition(served, number)
        except TidelogError as error:
            answer.error_code, answer.error_message = error_code(error), error.message
            return answer
        answer.active_producers = [
            module.DescribeProducersResponseProducerState(
                producer_id=one.producer_id,
                producer_epoch=one.epoch,
                last_sequence=one.last_sequence,
                last_timestamp=one.last_us // 1000,
                coordinator_epoch=_NO_EPOCH,
                current_txn_start_offset=one.open_from,
            )
            for one in partition.producers.active()
        ]
        return answer
