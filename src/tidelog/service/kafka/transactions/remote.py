"""Transactions over several nodes: markers, offsets and verification where coordinator and owner are not one node.

    coordinator of the transaction ── WriteTxnMarkers (27) ──> owner of a partition
    coordinator of the transaction ── OffsetCommit, FORWARDED ──> coordinator of a group: its offsets count, or not
    coordinator of a group ── TxnOffsetCommit, FORWARDED ──> coordinator of the transaction
    owner of a partition ── reads the record of the transaction ──> metadata store

Invariants
- The owner of a partition appends a transactional batch only while the record of its transaction, as it is stored,
  is open and has the partition. What was read counts until a marker of that producer comes: the record is stored as
  ended before any marker is sent, so a batch that comes after the marker is checked against that.
- Markers and offsets are sent again until they are confirmed. A second one changes nothing, however late it comes: it
  has the number of its transaction, in the field that Kafka has for the coordinator's epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from tidelog.errors import NotFoundError, ServerUnavailableError, TidelogError
from tidelog.service.kafka.broker import Broker, error_code
from tidelog.service.kafka.codec import wire
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.peers import Peers
from tidelog.service.kafka.records import Control
from tidelog.service.kafka.requests import Handler, RequestContext, known_name
from tidelog.service.kafka.transactions.state_machine import Partition, TransactionRecord, TransactionState
from tidelog.service.placement import NodeAddress
from tidelog.store.scheduler import in_store_thread
from tidelog.topics.names import parse_topic_name
from tidelog.topics.subscription.group_offsets import GroupOffset

WRITE_TXN_MARKERS = 27
_OFFSET_COMMIT, _TXN_OFFSET_COMMIT = 8, 28
_ABORTABLE_SINCE = 11  # versions of Produce whose clients know TRANSACTION_ABORTABLE
_logger = logging.getLogger("tidelog.kafka")


class RemoteCoordinators:
    """Asks the nodes that coordinate groups and transactions (`coordinator.Remote`), and those that own partitions."""

    def __init__(self, broker: Broker, peers: Peers) -> None:
        self._broker = broker
        self._peers = peers

    def _coordinator(self, key: str) -> NodeAddress:
        node = self._broker.placement.coordinator(key)
        if node is None or node.node_id == self._broker.node_id:
            raise ServerUnavailableError(f"the coordinator of {key} is not known yet", hint="Try again in a moment")
        return node

    async def commit_offsets(self, context: RequestContext, request: Any) -> Any:
        """TxnOffsetCommit, at the coordinator of its transaction."""
        node = self._coordinator(request.transactional_id)
        return await self._peers.call(node, _TXN_OFFSET_COMMIT, 3, request)

    async def complete(
        self, group_id: str, producer_id: int, number: int, commit: bool, offsets: Mapping[Partition, GroupOffset]
    ) -> None:
        """The offsets of a transaction that has ended, at the coordinator of their group."""
        node, module = self._coordinator(group_id), wire(_OFFSET_COMMIT)
        topics: dict[str, list[Any]] = {}
        for (topic, partition), offset in offsets.items():
            part = module.OffsetCommitRequestPartition(partition, offset.offset, offset.leader_epoch, offset.metadata)
            topics.setdefault(topic, []).append(part)
        request = module.OffsetCommitRequest(
            group_id=group_id,
            generation_id_or_member_epoch=1 if commit else 0,
            member_id=str(producer_id),
            group_instance_id=str(number),
            topics=[module.OffsetCommitRequestTopic(name=topic, partitions=some) for topic, some in topics.items()],
        )
        answer = await self._peers.call(node, _OFFSET_COMMIT, 8, request)
        for topic in answer.topics:
            for one in topic.partitions:
                if one.error_code not in (ErrorCode.NONE, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION):
                    code = ErrorCode(one.error_code).name
                    raise ServerUnavailableError(f"the coordinator of group {group_id} answered {code}")

    async def write_marker(self, topic: str, partition: int, control: Control) -> None:
        """A marker in a partition of another node; NotFoundError when there is no such partition any more."""
        name = parse_topic_name(topic)
        node = self._broker.placement.owner(name, partition)
        if node is None or node.node_id == self._broker.node_id:
            raise ServerUnavailableError(f"no node serves {topic}, partition {partition}, at the moment")
        module = wire(WRITE_TXN_MARKERS)
        marker = module.WriteTxnMarkersRequestWritableTxnMarker(
            producer_id=control.producer_id,
            producer_epoch=control.producer_epoch,
            transaction_result=control.is_commit,
            coordinator_epoch=control.coordinator_epoch,
            topics=[module.WriteTxnMarkersRequestWritableTxnMarkerTopic(topic, [partition])],
        )
        answer = await self._peers.call(node, WRITE_TXN_MARKERS, 1, module.WriteTxnMarkersRequest([marker]))
        code = ErrorCode(answer.markers[0].topics[0].partitions[0].error_code)
        if code is ErrorCode.NONE:
            return
        served = self._broker.find(name)
        if code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION and served is None:
            raise NotFoundError(f"there is no topic {topic}")
        raise ServerUnavailableError(f"the node {node.node} answered {code.name} to a marker of a transaction")


class MarkerRequests:
    """Answers WriteTxnMarkers for the partitions of this node."""

    def __init__(self, broker: Broker, now_us: Callable[[], int]) -> None:
        self._broker = broker
        self._now_us = now_us

    def handlers(self) -> dict[int, Handler]:
        return {WRITE_TXN_MARKERS: self.write}

    async def write(self, context: RequestContext, request: Any) -> Any:
        module = wire(WRITE_TXN_MARKERS)
        markers = []
        for marker in request.markers:
            who = (marker.transaction_result, marker.producer_id, marker.producer_epoch)
            control = Control(*who, max(0, marker.coordinator_epoch), self._now_us())
            topics = []
            for topic in marker.topics:
                result = module.WriteTxnMarkersResponseWritableTxnMarkerPartitionResult
                parts = [result(n, await self._written(topic.name, n, control)) for n in topic.partition_indexes]
                topics.append(module.WriteTxnMarkersResponseWritableTxnMarkerTopicResult(topic.name, parts))
            markers.append(module.WriteTxnMarkersResponseWritableTxnMarkerResult(marker.producer_id, topics))
        return module.WriteTxnMarkersResponse(markers)

    async def _written(self, sent: str, partition: int, control: Control) -> ErrorCode:
        name = known_name(sent)
        if name is None:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        try:
            await self._broker.write_own_marker(str(name), partition, control)
        except TidelogError as error:
            return error_code(error)
        return ErrorCode.NONE


class Records(Protocol):
    """The records of transactions, as they are stored (`store.py`)."""

    def read(self, transactional_id: str) -> TransactionRecord | None: ...


class Local(Protocol):
    """The transactions that this node coordinates (`coordinator.py`)."""

    def knows(self, producer_id: int) -> bool: ...

    def verify(self, producer_id: int, epoch: int, topic: str, partition: int, version: int) -> ErrorCode: ...


_Place = tuple[str, int, int]
"""Topic, partition and producer id."""


class _Read:
    """That the record of a transaction was read, or is being read: with this epoch, and what it said."""

    __slots__ = ("epoch", "error")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.error: ErrorCode | None = None


class Verification:
    """Whether transactional batches may be appended to partitions of this node, where others coordinate them."""

    def __init__(self, records: Records, local: Local, read: Callable[..., Awaitable[Any]] = in_store_thread) -> None:
        """`local` is the coordinator of this node, which knows its own transactions better."""
        self._records = records
        self._local = local
        self._in_thread = read
        self._known: dict[_Place, _Read] = {}

    def is_known(self, producer_id: int, epoch: int, topic: str, partition: int) -> bool:
        """Whether `verify` can answer at once."""
        if self._local.knows(producer_id):
            return True
        found = self._known.get((topic, partition, producer_id))
        return found is not None and found.epoch == epoch and found.error is not None

    async def prepare(self, transactional_id: str, producer_id: int, epoch: int, topic: str, partition: int) -> None:
        """Reads the record of a transaction, so that `verify` knows it."""
        place = (topic, partition, producer_id)
        reading = self._known[place] = _Read(epoch)
        try:
            record = await self._in_thread(self._records.read, transactional_id)
        except TidelogError as error:
            _logger.info("the transaction %s cannot be read: %s", transactional_id, error)
            reading.error = ErrorCode.NOT_ENOUGH_REPLICAS  # the client tries again
        else:
            reading.error = _verdict(record, producer_id, epoch, (topic, partition))

    def verify(self, producer_id: int, epoch: int, topic: str, partition: int, version: int) -> ErrorCode:
        """As `TransactionService.verify`, in the turn in which the batch is appended."""
        if self._local.knows(producer_id):
            return self._local.verify(producer_id, epoch, topic, partition, version)
        place = (topic, partition, producer_id)
        found = self._known.get(place)
        if found is None or found.epoch != epoch or found.error is None:
            return (
                ErrorCode.NOT_ENOUGH_REPLICAS
            )  # a marker came meanwhile: the client tries again, and it is read again
        if found.error is not ErrorCode.NONE:
            del self._known[place]
        if found.error is ErrorCode.INVALID_TXN_STATE and version >= _ABORTABLE_SINCE:
            return ErrorCode.TRANSACTION_ABORTABLE
        return found.error

    def ended(self, topic: str, partition: int, producer_id: int) -> None:
        """A marker of this producer is about to be written."""
        self._known.pop((topic, partition, producer_id), None)

    def opened(self, topic: str, partition: int) -> None:
        """A partition was opened here: transactions may have ended there since it was here last."""
        for place in [place for place in self._known if place[:2] == (topic, partition)]:
            del self._known[place]


def _verdict(record: TransactionRecord | None, producer_id: int, epoch: int, partition: Partition) -> ErrorCode:
    if record is None or record.producer_id != producer_id:
        return ErrorCode.INVALID_PRODUCER_ID_MAPPING
    if record.epoch != epoch:
        return ErrorCode.INVALID_PRODUCER_EPOCH
    is_open = record.state is TransactionState.ONGOING and partition in record.partitions
    return ErrorCode.NONE if is_open else ErrorCode.INVALID_TXN_STATE
