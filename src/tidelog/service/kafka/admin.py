"""Topics as administrators handle them: created, deleted, divided, configured and emptied through Kafka's protocol.

Invariants
- Every item of a request is answered for itself: one that is refused changes nothing, and says why in words.
- `validate_only` checks what can be checked without changing anything.
- What is answered without an error is durable. A changed config is in effect on open partitions by then.
- The replication factor is accepted and means nothing: there is one broker, and copies are in the object store.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple

from tidelog.cold.catalog import MAX_PARTITIONS
from tidelog.errors import (
    ConfigError,
    ConflictError,
    InputError,
    NotFoundError,
    OffsetOutOfRangeError,
    TidelogError,
    TopicNameError,
)
from tidelog.service.kafka.broker import Broker, ServedTopic, error_code
from tidelog.service.kafka.codec import wire
from tidelog.service.kafka.configs import ConfigType, Described, checked, describe_broker, describe_topic, find
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.groups.group_configs import GroupConfigs
from tidelog.service.kafka.primitives import ZERO_UUID
from tidelog.service.kafka.requests import Handler, RequestContext, known_name, listed_name, topic_name
from tidelog.store.scheduler import in_store_thread
from tidelog.topics.names import TopicName

_CREATE_TOPICS, _DELETE_TOPICS, _DELETE_RECORDS, _DESCRIBE_CONFIGS = 19, 20, 21, 32
_ALTER_CONFIGS, _CREATE_PARTITIONS, _INCREMENTAL_ALTER_CONFIGS = 33, 37, 44
_TOPIC, _BROKER, _GROUP = 2, 4, 32
_HIGH_WATERMARK = -1
_LONGEST_NAME = 249


Change = Callable[[dict[str, str]], dict[str, str | None]]
"""The configs that a topic is to have, made of those that it has."""


class Refusal(NamedTuple):
    """Why an item of a request is not done."""

    code: ErrorCode
    message: str


class _RefusedError(Exception):
    """Carries the refusal of one item to where it is answered."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.refusal = Refusal(code, message)


_CODES: tuple[tuple[type[TidelogError], ErrorCode], ...] = (
    (ConflictError, ErrorCode.TOPIC_ALREADY_EXISTS),
    (TopicNameError, ErrorCode.INVALID_TOPIC_EXCEPTION),
    (ConfigError, ErrorCode.INVALID_CONFIG),
)


async def _tried(work: Awaitable[None]) -> Refusal | None:
    """Does one item; what is wrong with it, if anything is."""
    try:
        await work
    except _RefusedError as error:
        return error.refusal
    except TidelogError as error:
        code = next((code for kind, code in _CODES if isinstance(error, kind)), None)
        text = error.message if error.hint is None else f"{error.message}. {error.hint}"
        return Refusal(error_code(error) if code is None else code, text)
    return None


class Admin:
    """Answers what administrators ask."""

    def __init__(self, broker: Broker, groups: GroupConfigs) -> None:
        self._broker = broker
        self._groups = groups
        self._configuring = asyncio.Lock()

    def handlers(self) -> dict[int, Handler]:
        return {
            _CREATE_TOPICS: self.create_topics,
            _DELETE_TOPICS: self.delete_topics,
            _DELETE_RECORDS: self.delete_records,
            _DESCRIBE_CONFIGS: self.describe_configs,
            _ALTER_CONFIGS: self.alter_configs,
            _CREATE_PARTITIONS: self.create_partitions,
            _INCREMENTAL_ALTER_CONFIGS: self.incremental_alter_configs,
        }

    # Creating

    async def create_topics(self, context: RequestContext, request: Any) -> Any:
        module = wire(_CREATE_TOPICS)
        repeated = _repeated(one.name for one in request.topics)
        answers = []
        for asked in {one.name: one for one in request.topics}.values():
            answer = module.CreateTopicsResponseCreatableTopicResult(
                name=asked.name, topic_id=ZERO_UUID, error_message=None, configs=[]
            )
            answers.append(answer)
            if asked.name in repeated:
                refusal: Refusal | None = Refusal(ErrorCode.INVALID_REQUEST, "Duplicate topic name.")
            else:
                refusal = await _tried(self._create(asked, answer, request.validate_only))
            _refuse(answer, refusal)
        return module.CreateTopicsResponse(topics=answers)

    async def _create(self, asked: Any, answer: Any, validate_only: bool) -> None:
        name = self._new_name(asked.name)
        count = self._new_count(asked)
        texts = {one.name: one.value for one in asked.configs}
        configs = checked(texts, has_store=self._broker.has_store)
        if validate_only:
            answer.topic_id = ZERO_UUID
        else:
            served = await self._broker.create(name, count, **self._broker.settings_for(configs))
            answer.topic_id = served.id
        answer.num_partitions, answer.replication_factor = count, 1
        module = wire(_CREATE_TOPICS)
        answer.configs = [
            module.CreateTopicsResponseCreatableTopicConfigs(one.name, one.value, False, one.source, False)
            for one in self._describe(configs)
        ]

    def _new_name(self, sent: str) -> TopicName:
        if not 1 <= len(sent) <= _LONGEST_NAME:
            raise TopicNameError(f"Topic name is invalid: it must have 1 to {_LONGEST_NAME} characters")
        name = topic_name(sent)
        if self._broker.find(name) is not None:
            raise ConflictError(f"Topic '{sent}' already exists.")
        if name.parent() is not None:
            raise TopicNameError(f"Topic name is invalid: {sent} is reserved for a partition")
        return name

    def _new_count(self, asked: Any) -> int:
        if asked.assignments:
            if asked.num_partitions != -1 or asked.replication_factor != -1:
                text = "A manual partition assignment was specified, but numPartitions or replicationFactor was not -1."
                raise _RefusedError(ErrorCode.INVALID_REQUEST, text)
            self._check_assignments(sorted(one.partition_index for one in asked.assignments), 0)
            self._check_brokers(one.broker_ids for one in asked.assignments)
            return len(asked.assignments)
        if asked.replication_factor < -1 or asked.replication_factor == 0:
            text = "Replication factor must be larger than 0, or -1 to use the default value."
            raise _RefusedError(ErrorCode.INVALID_REPLICATION_FACTOR, text)
        count = self._broker.settings.default_partitions if asked.num_partitions == -1 else asked.num_partitions
        self._check_count(count)
        return int(count)

    def _check_count(self, count: int) -> None:
        if not 1 <= count <= MAX_PARTITIONS:
            text = f"Number of partitions must be 1 to {MAX_PARTITIONS}, not {count}."
            raise _RefusedError(ErrorCode.INVALID_PARTITIONS, text)

    def _check_assignments(self, numbers: Sequence[int], first: int) -> None:
        if list(numbers) != list(range(first, first + len(numbers))):
            text = "partitions should be a consecutive 0-based integer sequence"
            raise _RefusedError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, text)

    def _check_brokers(self, assigned: Iterable[Sequence[int]]) -> None:
        node_id = self._broker.node_id
        if any(list(broker_ids) != [node_id] for broker_ids in assigned):
            text = f"There is one broker, {node_id}: every partition must be assigned to it alone."
            raise _RefusedError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, text)

    async def create_partitions(self, context: RequestContext, request: Any) -> Any:
        module = wire(_CREATE_PARTITIONS)
        repeated = _repeated(one.name for one in request.topics)
        answers = []
        for asked in {one.name: one for one in request.topics}.values():
            answer = module.CreatePartitionsResponseTopicResult(name=asked.name, error_message=None)
            answers.append(answer)
            if asked.name in repeated:
                refusal: Refusal | None = Refusal(ErrorCode.INVALID_REQUEST, "Duplicate topic name.")
            else:
                refusal = await _tried(self._grow(asked, request.validate_only))
            _refuse(answer, refusal)
        return module.CreatePartitionsResponse(results=answers)

    async def _grow(self, asked: Any, validate_only: bool) -> None:
        served = await self._served(asked.name)
        if asked.count <= served.count:
            text = f"The topic {asked.name} currently has {served.count} partition(s); {asked.count} would not be an "
            raise _RefusedError(ErrorCode.INVALID_PARTITIONS, text + "increase.")
        self._check_count(asked.count)
        if asked.assignments is not None:
            if len(asked.assignments) != asked.count - served.count:
                text = f"{asked.count - served.count} additional partition(s) were wanted, but "
                text += f"{len(asked.assignments)} assignment(s) were specified."
                raise _RefusedError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, text)
            self._check_brokers(one.broker_ids for one in asked.assignments)
        if not validate_only:
            await self._broker.grow(served, asked.count)

    async def _served(self, sent: str) -> ServedTopic:
        name = known_name(sent)
        served = None if name is None else await self._broker.find_newest(name)
        if served is None:
            raise NotFoundError("This server does not host this topic-partition.")
        return served

    # Deleting

    async def delete_topics(self, context: RequestContext, request: Any) -> Any:
        module = wire(_DELETE_TOPICS)
        asked = [(one.name, one.topic_id) for one in request.topics] or [(one, None) for one in request.topic_names]
        repeated = _repeated(asked)
        answers = []
        for name, topic_id in dict.fromkeys(asked):
            answer = module.DeleteTopicsResponseDeletableTopicResult(name=name, topic_id=topic_id or ZERO_UUID)
            answers.append(answer)
            if (name, topic_id) in repeated:
                refusal: Refusal | None = Refusal(ErrorCode.INVALID_REQUEST, "Duplicate topic name.")
            else:
                refusal = await _tried(self._delete(answer))
            _refuse(answer, refusal)
        return module.DeleteTopicsResponse(responses=answers)

    async def _delete(self, answer: Any) -> None:
        if answer.name is None:
            served = self._broker.find_id(answer.topic_id)
            if served is None:
                raise _RefusedError(ErrorCode.UNKNOWN_TOPIC_ID, "This server does not host this topic ID.")
            answer.name = listed_name(served.name)
        else:
            if answer.topic_id != ZERO_UUID:
                raise _RefusedError(ErrorCode.INVALID_REQUEST, "A topic is named or has an id, not both.")
            served = await self._served(answer.name)
            answer.topic_id = served.id
        await self._broker.delete(served)

    async def delete_records(self, context: RequestContext, request: Any) -> Any:
        module, topics = wire(_DELETE_RECORDS), []
        for topic in request.topics:
            answers = []
            for asked in topic.partitions:
                answer = module.DeleteRecordsResponsePartitionResult(asked.partition_index, low_watermark=-1)
                answers.append(answer)
                refusal = await _tried(self._empty(topic.name, asked.offset, answer))
                if refusal is not None:
                    answer.error_code = refusal.code
            topics.append(module.DeleteRecordsResponseTopicResult(topic.name, answers))
        return module.DeleteRecordsResponse(topics=topics)

    async def _empty(self, sent: str, offset: int, answer: Any) -> None:
        partition = await self._broker.partition(await self._served(sent), answer.partition_index)
        if not partition.serving.is_deletable:
            raise _RefusedError(ErrorCode.POLICY_VIOLATION, "cleanup.policy of the topic has no delete")
        high = partition.high_watermark
        if offset == _HIGH_WATERMARK:
            offset = high
        if not 0 <= offset <= high:
            raise OffsetOutOfRangeError(f"offset {offset} is not in the partition, which ends at {high}")
        answer.low_watermark = await partition.topic.delete_before_async(offset)

    # Configs

    async def describe_configs(self, context: RequestContext, request: Any) -> Any:
        module, results = wire(_DESCRIBE_CONFIGS), []
        for asked in request.resources:
            result = module.DescribeConfigsResponseResult(
                resource_type=asked.resource_type, resource_name=asked.resource_name, error_message=None
            )
            results.append(result)
            refusal = await _tried(self._fill(asked, result, request))
            _refuse(result, refusal)
        return module.DescribeConfigsResponse(results=results)

    async def _fill(self, asked: Any, result: Any, request: Any) -> None:
        if asked.resource_type == _TOPIC:
            topic_name(asked.resource_name)  # what no topic can be called is an error of its own
            served = await self._served(asked.resource_name)
            found = self._describe(await in_store_thread(self._broker.configs_of, served.name))
        elif asked.resource_type == _BROKER:
            self._check_broker_name(asked.resource_name)
            found = describe_broker(self._broker.broker_configs()) if asked.resource_name else []
        elif asked.resource_type == _GROUP:
            found = self._groups.describe(asked.resource_name)
        else:
            text = (
                f"configs of resource type {asked.resource_type} are not served: topics (2), brokers (4) and groups "
                "(32) have some"
            )
            raise _RefusedError(ErrorCode.INVALID_REQUEST, text)
        wanted = asked.configuration_keys
        module = wire(_DESCRIBE_CONFIGS)
        result.configs = [
            module.DescribeConfigsResponseResourceResult(
                name=one.name,
                value=one.value,
                read_only=one.is_read_only,
                config_source=one.source,
                is_sensitive=False,
                synonyms=[module.DescribeConfigsResponseSynonym(*synonym) for synonym in one.synonyms]
                if request.include_synonyms
                else [],
                config_type=one.type,
                documentation=one.documentation if request.include_documentation else None,
            )
            for one in found
            if wanted is None or one.name in wanted
        ]

    def _describe(self, configs: dict[str, str]) -> list[Described]:
        broker = self._broker
        defaults, most = broker.topic_defaults, broker.settings.max_batch_bytes
        return describe_topic(configs, defaults, most, has_store=broker.has_store)

    def _check_broker_name(self, name: str) -> None:
        """An empty name is the default of all brokers, which has nothing of its own."""
        if name not in ("", str(self._broker.node_id)):
            text = f"Unexpected broker id, expected {self._broker.node_id} or empty string, but received {name}"
            raise _RefusedError(ErrorCode.INVALID_REQUEST, text)

    async def alter_configs(self, context: RequestContext, request: Any) -> Any:
        """What is named replaces all that the topic had."""
        module, answers = wire(_ALTER_CONFIGS), []
        for asked in request.resources:
            given = {one.name: one.value for one in asked.configs}
            refusal = await _tried(self._alter(asked, request.validate_only, functools.partial(_replaced, given)))
            answers.append(_altered(module.AlterConfigsResponseResourceResponse, asked, refusal))
        return module.AlterConfigsResponse(responses=answers)

    async def incremental_alter_configs(self, context: RequestContext, request: Any) -> Any:
        module, answers = wire(_INCREMENTAL_ALTER_CONFIGS), []
        make = module.IncrementalAlterConfigsResponseAlterConfigsResourceResponse
        for asked in request.resources:
            change = functools.partial(_changed, asked.configs)
            answers.append(_altered(make, asked, await _tried(self._alter(asked, request.validate_only, change))))
        return module.IncrementalAlterConfigsResponse(responses=answers)

    async def _alter(self, asked: Any, validate_only: bool, change: Change) -> None:
        if asked.resource_type == _BROKER:
            text = "Configs of the broker are options of `tidelog serve`, and cannot be changed by clients."
            raise _RefusedError(ErrorCode.INVALID_REQUEST, text)
        if asked.resource_type not in (_TOPIC, _GROUP):
            text = (
                f"Configs of resource type {asked.resource_type} cannot be changed: those of topics (2) and groups "
                "(32) can."
            )
            raise _RefusedError(ErrorCode.INVALID_REQUEST, text)
        repeated = _repeated(one.name for one in asked.configs)
        if repeated:
            text = f"Error due to duplicate config keys: {', '.join(sorted(repeated))}"
            raise _RefusedError(ErrorCode.INVALID_REQUEST, text)
        if asked.resource_type == _GROUP:
            await self._groups.alter(asked.resource_name, change, validate_only=validate_only)
            return
        served = await self._served(asked.resource_name)
        for one in asked.configs:
            find(one.name)
        async with self._configuring:
            known = await in_store_thread(self._broker.configs_of, served.name)
            configs = checked(change(known), has_store=self._broker.has_store)
            if not validate_only:
                await self._broker.configure(served, configs)


def _altered(make: Callable[..., Any], asked: Any, refusal: Refusal | None) -> Any:
    answer = make(resource_type=asked.resource_type, resource_name=asked.resource_name, error_message=None)
    _refuse(answer, refusal)
    return answer


_SET, _DELETE, _APPEND, _SUBTRACT = range(4)


def _replaced(given: dict[str, str | None], known: dict[str, str]) -> dict[str, str | None]:
    return given


def _changed(changes: Iterable[Any], known: dict[str, str]) -> dict[str, str | None]:
    """The configs of a topic after some were set, deleted, or had items added or taken out."""
    found: dict[str, str | None] = dict(known)
    for one in changes:
        if one.value is None and one.config_operation != _DELETE:
            raise _RefusedError(ErrorCode.INVALID_REQUEST, f"Null value not supported for : {one.name}")
        if one.config_operation == _SET:
            found[one.name] = one.value
        elif one.config_operation == _DELETE:
            found.pop(one.name, None)
        elif one.config_operation in (_APPEND, _SUBTRACT):
            config = find(one.name)
            found[one.name] = _with_items(config.type, one, known.get(one.name, config.default))
        else:
            raise InputError(f"Unknown operation {one.config_operation} on the config {one.name}")
    return found


def _with_items(kind: ConfigType, change: Any, known: str) -> str:
    if kind is not ConfigType.LIST:
        raise ConfigError(f"Config value append or subtract is not allowed for config key: {change.name}")
    items, given = ([part for part in text.split(",") if part] for text in (known, change.value))
    if change.config_operation == _APPEND:
        return ",".join(dict.fromkeys([*items, *given]))
    return ",".join(item for item in items if item not in given)


def _repeated(names: Iterable[Any]) -> set[Any]:
    return {name for name, times in Counter(names).items() if times > 1}


def _refuse(answer: Any, refusal: Refusal | None) -> None:
    if refusal is not None:
        answer.error_code, answer.error_message = refusal
