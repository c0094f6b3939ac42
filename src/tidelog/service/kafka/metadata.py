"""What clients ask first: which brokers and topics there are, and who leads a partition."""

from __future__ import annotations

from typing import Any

from tidelog.errors import ServerUnavailableError, StoreUnavailableError, TidelogError
from tidelog.service.kafka.broker import Broker, ServedTopic, error_code
from tidelog.service.kafka.codec import wire
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.history import History, HistoryNodes
from tidelog.service.kafka.primitives import ZERO_UUID
from tidelog.service.kafka.requests import Handler, RequestContext, known_name, listed_name, topic_name

_METADATA, _DESCRIBE_CLUSTER, _DESCRIBE_TOPIC_PARTITIONS = 3, 60, 75
_FIRST_WITH_IDS = 12  # in 10 and 11 the field is there, and not to be used
_MAX_DESCRIBED = 2000


class Metadata:
    """Answers from what the broker has in memory; a topic that is asked for by name may be created."""

    def __init__(self, broker: Broker, history: History) -> None:
        self._broker = broker
        self._history = history

    def handlers(self) -> dict[int, Handler]:
        return {
            _METADATA: self.metadata,
            _DESCRIBE_CLUSTER: self.describe_cluster,
            _DESCRIBE_TOPIC_PARTITIONS: self.describe_topic_partitions,
        }

    async def metadata(self, context: RequestContext, request: Any) -> Any:
        module, broker = wire(_METADATA), self._broker
        wanted = request.topics
        # An empty list meant all topics, before there was null.
        if wanted is None or (not wanted and context.version == 0):
            topics = [self._described(served, listed_name(served.name)) for served in broker.topics()]
        else:
            # One that is named a thousand times is answered once, as Kafka does it.
            asked = {(one.name, one.topic_id if one.name is None else ZERO_UUID): one for one in wanted}
            topics = [
                await self._asked(one, context.version, request.allow_auto_topic_creation) for one in asked.values()
            ]
        return module.MetadataResponse(
            brokers=[
                module.MetadataResponseBroker(one.node_id, *one.kafka, one.zone or None)
                for one in broker.placement.nodes()
            ],
            cluster_id=broker.cluster_id,
            controller_id=self._controller_id(),
            topics=topics,
        )

    def _controller_id(self) -> int:
        controller = self._broker.placement.controller()
        return -1 if controller is None else controller.node_id

    async def _asked(self, asked: Any, version: int, may_create: bool) -> Any:
        if asked.name is None and version < _FIRST_WITH_IDS:
            return self._refused("", ErrorCode.INVALID_REQUEST, asked.topic_id)  # its answers cannot be without a name
        if asked.name is None:
            served = self._broker.find_id(asked.topic_id)
            if served is None:
                return self._refused(None, ErrorCode.UNKNOWN_TOPIC_ID, asked.topic_id)
            return self._described(served, listed_name(served.name))
        try:
            name = topic_name(asked.name)
            find = self._broker.find_or_create if may_create else self._broker.find_newest
            served = await find(name)
        except (ServerUnavailableError, StoreUnavailableError):
            return self._refused(asked.name, ErrorCode.LEADER_NOT_AVAILABLE)  # whether there is one is not known
        except TidelogError as error:
            return self._refused(asked.name, error_code(error))
        if served is None:
            return self._refused(asked.name, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        return self._described(served, asked.name)

    def _refused(self, name: str | None, error: ErrorCode, topic_id: bytes = ZERO_UUID) -> Any:
        return wire(_METADATA).MetadataResponseTopic(error_code=error, name=name, topic_id=topic_id)

    def _described(self, served: ServedTopic, shown: str) -> Any:
        module, readers = wire(_METADATA), self._history.nodes()
        return module.MetadataResponseTopic(
            name=shown,
            topic_id=served.id,
            partitions=[
                module.MetadataResponsePartition(**self._led(served, number, readers)) for number in range(served.count)
            ],
        )

    def _led(self, served: ServedTopic, number: int, readers: HistoryNodes) -> dict[str, Any]:
        """Who leads a partition, in the fields of an answer. Its replicas are its owner and the nodes that read history
        for it: copies are the store's."""
        owner = self._broker.placement.owner(served.name, number)
        if owner is None:
            error = ErrorCode.LEADER_NOT_AVAILABLE
            return {"error_code": error, "partition_index": number, "leader_id": -1, "leader_epoch": -1}
        replicas = [owner.node_id, *(node.node_id for node in readers.of(served.name, number, owner.node_id))]
        return {
            "partition_index": number,
            "leader_id": owner.node_id,
            "leader_epoch": self._epoch(served, number),
            "replica_nodes": replicas,
            "isr_nodes": replicas,
        }

    def _epoch(self, served: ServedTopic, number: int) -> int:
        """-1 while the partition is not open here: its epoch is not known, and clients do without."""
        partition = served.open.get(number)
        return -1 if partition is None else partition.leader_epoch

    async def describe_cluster(self, context: RequestContext, request: Any) -> Any:
        module, broker = wire(_DESCRIBE_CLUSTER), self._broker
        return module.DescribeClusterResponse(
            endpoint_type=request.endpoint_type,
            cluster_id=broker.cluster_id,
            controller_id=self._controller_id(),
            brokers=[
                module.DescribeClusterResponseBroker(one.node_id, *one.kafka, one.zone or None)
                for one in broker.placement.nodes()
            ],
        )

    async def describe_topic_partitions(self, context: RequestContext, request: Any) -> Any:
        """Pages over topics and partitions, in order of the names that were asked for."""
        module = wire(_DESCRIBE_TOPIC_PARTITIONS)
        left = max(1, min(request.response_partition_limit, _MAX_DESCRIBED))
        names = sorted({one.name for one in request.topics})
        if not names:
            names = sorted(listed_name(served.name) for served in self._broker.topics())
        topics: list[Any] = []
        cursor, readers = request.cursor, self._history.nodes()
        for name in names:
            if cursor is not None and name < cursor.topic_name:
                continue
            first = cursor.partition_index if cursor is not None and name == cursor.topic_name else 0
            if left == 0:
                following = module.DescribeTopicPartitionsResponseCursor(name, first)
                return module.DescribeTopicPartitionsResponse(topics=topics, next_cursor=following)
            known = known_name(name)
            served = None if known is None else self._broker.find(known)
            if served is None:
                code = ErrorCode.INVALID_TOPIC_EXCEPTION if known is None else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                topics.append(module.DescribeTopicPartitionsResponseTopic(error_code=code, name=name))
                continue
            stop = min(served.count, first + left)
            left -= max(0, stop - first)
            topics.append(
                module.DescribeTopicPartitionsResponseTopic(
                    name=name,
                    topic_id=served.id,
                    partitions=[
                        module.DescribeTopicPartitionsResponsePartition(
                            **self._led(served, number, readers), eligible_leader_replicas=[], last_known_elr=[]
                        )
                        for number in range(first, stop)
                    ],
                )
            )
            if stop < served.count:
                following = module.DescribeTopicPartitionsResponseCursor(name, stop)
                return module.DescribeTopicPartitionsResponse(topics=topics, next_cursor=following)
        return module.DescribeTopicPartitionsResponse(topics=topics)
