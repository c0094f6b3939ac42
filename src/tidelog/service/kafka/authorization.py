"""Which permission each request of Kafka's protocol needs, and what is answered without it.

    RULES[api key]    what it needs, in words for docs/reference/kafka.md, and the decision

Invariants
- Every API that is served has a rule here; one without is refused as a whole.
- Nothing of what is refused reaches a handler: a request that names several topics or groups goes on with those that
  are allowed, and the others are answered with Kafka's code for it and no fact about them, not even whether they exist.
- What a handler answers by itself (listings, sessions that remember their topics) is filtered afterwards.
- The topics and groups of a listing are those on which the principal has any permission.
- A topic is created on first use only by those who may create it: `admin`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, get_args, get_type_hints

from tidelog.service.auth.access import NODE, SERVER, Kind, Permission, Resource, topic_resource
from tidelog.service.kafka.codec import APIS, wire
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.primitives import ZERO_UUID
from tidelog.service.kafka.requests import RequestContext, known_name, listed_name
from tidelog.topics.names import TopicName

_READ, _WRITE, _ADMIN = Permission.READ, Permission.WRITE, Permission.ADMIN
_TOPIC = ErrorCode.TOPIC_AUTHORIZATION_FAILED
_GROUP = ErrorCode.GROUP_AUTHORIZATION_FAILED
_CLUSTER = ErrorCode.CLUSTER_AUTHORIZATION_FAILED
_TRANSACTION = ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
_REFUSED = "The principal has no permission for this."
_BY_TRANSACTION = 1
_TOPIC_CONFIGS = 2
_FIRST_WITH_GROUPS, _FIRST_WITH_KEYS = 8, 4


class Topics(Protocol):
    """The topics of the broker."""

    def find(self, name: TopicName) -> Any: ...

    def find_id(self, topic_id: bytes) -> Any: ...

    def topics(self) -> Sequence[Any]: ...


class Access:
    """What one principal may do."""

    def __init__(
        self,
        topics: Topics,
        allows: Callable[[Permission | None, Resource], bool],
        any_write: Callable[[], bool],
    ) -> None:
        """`allows` decides and writes the audit log; `any_write`: whether there is a topic that it may write to."""
        self.topics = topics
        self._allows = allows
        self.any_write = any_write

    def topic(self, permission: Permission | None, sent: str | None, topic_id: bytes = ZERO_UUID) -> bool:
        """Whether it has the permission on a topic, by the name that a client sent, else by id. An id of no topic is
        left to the handler, which says so."""
        if sent or bytes(topic_id) == ZERO_UUID:
            return self._allows(permission, self.resource(sent or ""))
        served = self.topics.find_id(bytes(topic_id))
        return served is None or self._allows(permission, topic_resource(served.name))

    def resource(self, sent: str) -> Resource:
        name = known_name(sent)
        return Resource(Kind.TOPIC, sent) if name is None else topic_resource(name)

    def exists(self, sent: str) -> bool:
        name = known_name(sent)
        return name is not None and self.topics.find(name) is not None

    def group(self, permission: Permission | None, group_id: str | None) -> bool:
        return self._allows(permission, Resource(Kind.GROUP, group_id or ""))

    def transaction(self, transactional_id: str | None, permission: Permission | None = _WRITE) -> bool:
        return self._allows(permission, Resource(Kind.TRANSACTION, transactional_id or ""))

    def server(self, permission: Permission) -> bool:
        return self._allows(permission, SERVER)


class Decision(NamedTuple):
    """The whole answer, of a request that is refused; or what is still to be done to the handler's answer."""

    response: Any = None
    amend: Callable[[Any], None] | None = None


Decide = Callable[[Access, RequestContext, Any], Decision]


class Rule(NamedTuple):
    """What an API needs, in words, and its decision. Without one it needs nothing."""

    needs: str
    decide: Decide | None = None


_FREE = Decision()


# Answers


@functools.cache
def _response_class(api_key: int) -> Any:
    name = "".join(part.capitalize() for part in APIS[api_key].name.split("_"))
    return getattr(wire(api_key), f"{name}Response")


@functools.cache
def _item_class(owner: Any, field: str) -> Any:
    """The class of the items of a list in an answer."""
    (found,) = (one for one in get_args(get_type_hints(owner)[field]) if one is not type(None))
    return found


class Listed(NamedTuple):
    """A list of a request, and the list of its answer that has one item for each."""

    asked: str
    answered: str
    name: str = "name"
    """What an item is named by, in the request and in the answer; items of the request may be names themselves."""
    partitions: tuple[str, str] | None = None
    number: tuple[str, str] = ("partition_index", "partition_index")
    error: str = "error_code"
    further: tuple[str, ...] = ()
    """Other fields that the answer repeats."""
    values: dict[str, object] = {}  # noqa: RUF012 - nothing changes it
    """What an answer without a result has in the fields of an item, or of its partitions."""

    def refused(self, api_key: int, item: Any, code: ErrorCode) -> Any:
        """The answer for one item."""
        item_class = _item_class(_response_class(api_key), self.answered)
        if isinstance(item, str):
            return item_class(**{self.name: item, self.error: code}, **self.values)
        named = {
            field: getattr(item, field) for field in (self.name, "topic_id", *self.further) if hasattr(item, field)
        }
        if self.partitions is None:
            return item_class(**{**named, self.error: code, **self.values})
        asked, answered = self.partitions
        part_class = _item_class(item_class, answered)
        parts = [
            part_class(**{self.number[1]: part if isinstance(part, int) else getattr(part, self.number[0])})
            for part in getattr(item, asked)
        ]
        for part in parts:
            setattr(part, self.error, code)
            for field, value in self.values.items():
                setattr(part, field, value)
        return item_class(**named, **{answered: parts})

    def split(self, api_key: int, request: Any, code_of: Callable[[Any], ErrorCode]) -> list[Any]:
        """Takes what is refused out of the request; returns the answers to it."""
        refused, kept = [], []
        for item in getattr(request, self.asked) or ():
            code = code_of(item)
            if code is ErrorCode.NONE:
                kept.append(item)
            else:
                refused.append(self.refused(api_key, item, code))
        if refused:
            setattr(request, self.asked, kept)
        return refused

    def all_refused(self, api_key: int, request: Any, code: ErrorCode) -> Any:
        """The answer that refuses every item."""
        items = self.split(api_key, request, lambda item: code)
        return _response_class(api_key)(**{self.answered: items})

    def adding(self, refused: list[Any]) -> Decision:
        """Goes on without the refused items, and adds them to the answer."""
        if not refused:
            return _FREE

        def amend(response: Any) -> None:
            setattr(response, self.answered, [*getattr(response, self.answered), *refused])

        return Decision(amend=amend)


def _whole(api_key: int, code: ErrorCode, **fields: object) -> Decision:
    """An answer that is one error."""
    response_class = _response_class(api_key)
    if "error_message" in response_class.__struct_fields__:
        fields.setdefault("error_message", _REFUSED)
    return Decision(response_class(error_code=code, **fields))


_BY_INDEX = ("partitions", "partitions")
_PRODUCED = Listed(
    "topic_data", "responses", "name", ("partition_data", "partition_responses"), ("index", "index"),
    values={"base_offset": -1},
)  # fmt: skip
_FETCHED = Listed(
    "topics", "responses", "topic", _BY_INDEX, ("partition", "partition_index"),
    values={"high_watermark": -1, "aborted_transactions": None, "records": []},
)  # fmt: skip
_TOPICS = Listed("topics", "topics", "name", _BY_INDEX)
_EPOCHS = Listed("topics", "topics", "topic", _BY_INDEX, ("partition", "partition"))
_EMPTIED = Listed("topics", "topics", "name", _BY_INDEX, values={"low_watermark": -1})
_ADDED = Listed(
    "v3_and_below_topics", "results_by_topic_v3_and_below", "name", ("partitions", "results_by_partition"),
    error="partition_error_code",
)  # fmt: skip
_TRANSACTIONS = Listed("transactional_ids", "transaction_states", "transactional_id")
_PRODUCERS = Listed("topics", "topics", "name", ("partition_indexes", "partitions"), values={"error_message": _REFUSED})
_SHARED = Listed("topics", "responses", "topic_id", _BY_INDEX, values={"records": []})
_ACKNOWLEDGED = Listed("topics", "responses", "topic_id", _BY_INDEX)
_CREATED = Listed("topics", "topics", values={"error_message": _REFUSED})
_GROWN = Listed("topics", "results", values={"error_message": _REFUSED})
_DELETED = Listed("topics", "responses", values={"error_message": _REFUSED})
_DELETED_NAMES = _DELETED._replace(asked="topic_names")
_DESCRIBED_TOPICS = Listed("topics", "topics")
_GROUPS = Listed("groups", "groups", "group_id", values={"error_message": _REFUSED, "group_state": "Dead"})
_GROUP_IDS = _GROUPS._replace(asked="group_ids")
_DELETED_GROUPS = Listed("groups_names", "results", "group_id")
_COORDINATORS = Listed("coordinator_keys", "coordinators", "key", values={"node_id": -1, "port": -1})
_CONFIGS = Listed("resources", "results", "resource_name", further=("resource_type",))
_ALTERED = _CONFIGS._replace(answered="responses")


# Decisions


def _topics(listed: Listed, permission: Permission | None) -> Decide:
    """Each topic needs the permission."""

    def decide(access: Access, context: RequestContext, request: Any) -> Decision:
        return listed.adding(listed.split(context.api_key, request, _code_of(access, listed, permission)))

    return decide


def _code_of(access: Access, listed: Listed, permission: Permission | None) -> Callable[[Any], ErrorCode]:
    def code_of(item: Any) -> ErrorCode:
        sent = item if isinstance(item, str) else None if listed.name == "topic_id" else getattr(item, listed.name)
        return ErrorCode.NONE if access.topic(permission, sent, getattr(item, "topic_id", ZERO_UUID)) else _TOPIC

    return code_of


def _produce(access: Access, context: RequestContext, request: Any) -> Decision:
    if request.transactional_id is not None and not access.transaction(request.transactional_id):
        return Decision(_PRODUCED.all_refused(context.api_key, request, _TRANSACTION))
    may_write = _code_of(access, _PRODUCED, _WRITE)

    def code_of(topic: Any) -> ErrorCode:
        code = may_write(topic)
        if code is ErrorCode.NONE and topic.name and not _is_there(access, topic.name):
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        return code

    return _PRODUCED.adding(_PRODUCED.split(context.api_key, request, code_of))


def _is_there(access: Access, sent: str) -> bool:
    """Whether a topic exists, or may be created by its first use."""
    return access.exists(sent) or access.topic(_ADMIN, sent)


def _fetch(access: Access, context: RequestContext, request: Any) -> Decision:
    refused = _FETCHED.split(context.api_key, request, _code_of(access, _FETCHED, _READ))
    if refused:
        request.max_wait_ms = 0  # an error is answered at once

    def amend(response: Any) -> None:
        _refuse_records(access, _FETCHED, context.api_key, response, lambda topic: topic.topic)
        response.responses = [*response.responses, *refused]
        if refused:  # the session does not know them: the client has to name them again
            response.session_id = 0

    return Decision(amend=amend)


def _refuse_records(
    access: Access, listed: Listed, api_key: int, response: Any, name_of: Callable[[Any], str | None]
) -> None:
    """Replaces topics that a session has remembered, and that may not be read any more, or not by this principal."""
    answer = listed._replace(asked="responses", partitions=("partitions", "partitions"), number=(listed.number[1],) * 2)
    response.responses = [
        topic
        if access.topic(_READ, name_of(topic), getattr(topic, "topic_id", ZERO_UUID))
        else answer.refused(api_key, topic, _TOPIC)
        for topic in response.responses
    ]


def _metadata(access: Access, context: RequestContext, request: Any) -> Decision:
    is_listing = request.topics is None or (not request.topics and context.version == 0)
    if is_listing:

        def keep_visible(response: Any) -> None:
            response.topics = [one for one in response.topics if access.topic(None, one.name)]

        return Decision(amend=keep_visible)
    visible = _code_of(access, _DESCRIBED_TOPICS, None)

    def code_of(topic: Any) -> ErrorCode:
        code = visible(topic)
        may_create = request.allow_auto_topic_creation and topic.name
        if code is ErrorCode.NONE and may_create and not _is_there(access, topic.name):
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        return code

    refused = _DESCRIBED_TOPICS.split(context.api_key, request, code_of)
    if refused and not request.topics and context.version == 0:
        request.topics = [wire(context.api_key).MetadataRequestTopic(name="")]  # an empty list would be all of them

        def replace(response: Any) -> None:
            response.topics = refused

        return Decision(amend=replace)
    return _DESCRIBED_TOPICS.adding(refused)


def _describe_topic_partitions(access: Access, context: RequestContext, request: Any) -> Decision:
    if request.topics:
        refused = _DESCRIBED_TOPICS.split(context.api_key, request, _code_of(access, _DESCRIBED_TOPICS, None))
        if not request.topics:  # which would be all of them
            return Decision(_response_class(context.api_key)(topics=refused))
        return _DESCRIBED_TOPICS.adding(refused)
    # Named, so that the cursor of a page is one of them too.
    names = [listed_name(served.name) for served in access.topics.topics()]
    asked = wire(context.api_key).DescribeTopicPartitionsRequestTopicRequest
    request.topics = [asked(name=name) for name in names if access.topic(None, name)]
    return _FREE if request.topics else Decision(_response_class(context.api_key)())


def _group(permission: Permission) -> Decide:
    """One group, and an answer with one error."""

    def decide(access: Access, context: RequestContext, request: Any) -> Decision:
        return _FREE if access.group(permission, request.group_id) else _whole(context.api_key, _GROUP)

    return decide


def _groups(listed: Listed, permission: Permission | None) -> Decide:
    """Each group needs the permission."""

    def decide(access: Access, context: RequestContext, request: Any) -> Decision:
        def code_of(item: Any) -> ErrorCode:
            return ErrorCode.NONE if access.group(permission, item) else _GROUP

        return listed.adding(listed.split(context.api_key, request, code_of))

    return decide


def _described_group(access: Access, context: RequestContext, request: Any) -> Decision:
    """A group whose members have topics that may not be seen is not shown."""
    decision = _groups(_GROUP_IDS, None)(access, context, request)

    def amend(response: Any) -> None:
        response.groups = [
            one if _is_visible(access, one) else _GROUP_IDS.refused(context.api_key, one.group_id, _TOPIC)
            for one in response.groups
        ]
        if decision.amend is not None:
            decision.amend(response)

    return Decision(amend=amend)


def _is_visible(access: Access, group: Any) -> bool:
    names = {name for member in group.members for name in member.subscribed_topic_names}
    names |= {one.topic_name for member in group.members for one in member.assignment.topic_partitions}
    return all(access.topic(None, name) for name in names)


def _list_groups(access: Access, context: RequestContext, request: Any) -> Decision:
    def amend(response: Any) -> None:
        response.groups = [one for one in response.groups if access.group(None, one.group_id)]

    return Decision(amend=amend)


def _heartbeat(access: Access, context: RequestContext, request: Any) -> Decision:
    """Of the newer protocols, which say what they subscribe to."""
    if not access.group(_READ, request.group_id):
        return _whole(context.api_key, _GROUP)
    if not all(access.topic(_READ, name) for name in request.subscribed_topic_names or ()):
        return _whole(context.api_key, _TOPIC)

    def amend(response: Any) -> None:  # what a pattern has found besides
        if response.assignment is not None:
            found = response.assignment.topic_partitions
            response.assignment.topic_partitions = [one for one in found if access.topic(_READ, None, one.topic_id)]

    return Decision(amend=amend)


def _offset_commit(access: Access, context: RequestContext, request: Any) -> Decision:
    if not access.group(_READ, request.group_id):
        return Decision(_TOPICS.all_refused(context.api_key, request, _GROUP))
    return _topics(_TOPICS, _READ)(access, context, request)


def _txn_offset_commit(access: Access, context: RequestContext, request: Any) -> Decision:
    if not access.transaction(request.transactional_id):
        return Decision(_TOPICS.all_refused(context.api_key, request, _TRANSACTION))
    return _offset_commit(access, context, request)


def _offset_delete(access: Access, context: RequestContext, request: Any) -> Decision:
    if not access.group(_ADMIN, request.group_id):
        return _whole(context.api_key, _GROUP)
    return _topics(_TOPICS, _READ)(access, context, request)


def _offset_fetch(access: Access, context: RequestContext, request: Any) -> Decision:
    module = wire(context.api_key)
    if context.version < _FIRST_WITH_GROUPS:
        if not access.group(None, request.group_id):
            response = _OFFSETS.all_refused(context.api_key, request, _GROUP)
            response.error_code = _GROUP
            return Decision(response)
        hidden = _OFFSETS.split(context.api_key, request, _code_of(access, _OFFSETS, None))

        def hide(response: Any) -> None:
            response.topics = [one for one in response.topics if access.topic(None, one.name)] + hidden

        return Decision(amend=hide)
    amends, refused, kept = [], [], []
    for group in request.groups:
        if access.group(None, group.group_id):
            kept.append(group)
            amends.append((group.group_id, _hidden_topics(access, group)))
        else:
            refused.append(module.OffsetFetchResponseGroup(group_id=group.group_id, error_code=_GROUP))
    request.groups = kept

    def amend(response: Any) -> None:
        for answer, (_, hidden) in zip(response.groups, amends, strict=False):
            answer.topics = [one for one in answer.topics if access.topic(None, one.name)] + hidden
        response.groups = [*response.groups, *refused]

    return Decision(amend=amend)


_OFFSETS = Listed(
    "topics", "topics", "name", ("partition_indexes", "partitions"), values={"committed_offset": -1, "metadata": ""}
)


def _hidden_topics(access: Access, group: Any) -> list[Any]:
    """Takes the topics of a group that may not be seen out of the request; returns their answers."""
    module = wire(9)
    hidden = []
    for topic in group.topics or ():
        if not access.topic(None, topic.name, topic.topic_id):
            part = module.OffsetFetchResponsePartitions
            parts = [part(index, -1, -1, "", _TOPIC) for index in topic.partition_indexes]
            hidden.append(module.OffsetFetchResponseTopics(name=topic.name, topic_id=topic.topic_id, partitions=parts))
    if hidden:
        names = {(one.name, one.topic_id) for one in hidden}
        group.topics = [topic for topic in group.topics if (topic.name, topic.topic_id) not in names]
    return hidden


def _find_coordinator(access: Access, context: RequestContext, request: Any) -> Decision:
    is_transaction = request.key_type == _BY_TRANSACTION
    code = _TRANSACTION if is_transaction else _GROUP

    def is_allowed(key: str) -> bool:
        return access.transaction(key) if is_transaction else access.group(None, key)

    if context.version < _FIRST_WITH_KEYS:
        return _FREE if is_allowed(request.key) else _whole(context.api_key, code, node_id=-1, port=-1)
    refused = _COORDINATORS.split(
        context.api_key, request, lambda key: ErrorCode.NONE if is_allowed(key) else code
    )  # fmt: skip
    return _COORDINATORS.adding(refused)


def _init_producer_id(access: Access, context: RequestContext, request: Any) -> Decision:
    if request.transactional_id is not None:
        return _transaction(access, context, request)
    return _FREE if access.any_write() else _whole(context.api_key, _CLUSTER)


def _transaction(access: Access, context: RequestContext, request: Any) -> Decision:
    return _FREE if access.transaction(request.transactional_id) else _whole(context.api_key, _TRANSACTION)


def _describe_transactions(access: Access, context: RequestContext, request: Any) -> Decision:
    """Topics that may not be seen are left out."""

    def code_of(transactional_id: str) -> ErrorCode:
        return ErrorCode.NONE if access.transaction(transactional_id, None) else _TRANSACTION

    refused = _TRANSACTIONS.split(context.api_key, request, code_of)

    def amend(response: Any) -> None:
        for one in response.transaction_states:
            one.topics = [topic for topic in one.topics if access.topic(None, topic.topic)]
        response.transaction_states = [*response.transaction_states, *refused]

    return Decision(amend=amend)


def _list_transactions(access: Access, context: RequestContext, request: Any) -> Decision:
    def amend(response: Any) -> None:
        found = response.transaction_states
        response.transaction_states = [one for one in found if access.transaction(one.transactional_id, None)]

    return Decision(amend=amend)


def _add_partitions(access: Access, context: RequestContext, request: Any) -> Decision:
    """All of them or none, as Kafka does it."""
    key = context.api_key
    if not access.transaction(request.v3_and_below_transactional_id):
        return Decision(_ADDED.all_refused(key, request, _TRANSACTION))
    code_of = _code_of(access, _ADDED, _WRITE)
    codes = [code_of(topic) for topic in request.v3_and_below_topics]
    if not any(codes):
        return _FREE
    answers = [
        _ADDED.refused(key, topic, code or ErrorCode.OPERATION_NOT_ATTEMPTED)
        for topic, code in zip(request.v3_and_below_topics, codes, strict=True)
    ]
    return Decision(_response_class(key)(results_by_topic_v3_and_below=answers))


def _add_offsets(access: Access, context: RequestContext, request: Any) -> Decision:
    decision = _transaction(access, context, request)
    return decision if decision.response is not None else _group(_READ)(access, context, request)


def _delete_topics(access: Access, context: RequestContext, request: Any) -> Decision:
    refused = _DELETED.split(context.api_key, request, _code_of(access, _DELETED, _ADMIN))
    refused += _DELETED_NAMES.split(context.api_key, request, _code_of(access, _DELETED, _ADMIN))
    return _DELETED.adding(refused)


def _configs(listed: Listed, of_topic: Permission | None, of_server: Permission) -> Decide:
    def decide(access: Access, context: RequestContext, request: Any) -> Decision:
        def code_of(item: Any) -> ErrorCode:
            if item.resource_type == _TOPIC_CONFIGS:
                return ErrorCode.NONE if access.topic(of_topic, item.resource_name or "/") else _TOPIC
            return ErrorCode.NONE if access.server(of_server) else _CLUSTER

        return listed.adding(listed.split(context.api_key, request, code_of))

    return decide


def _server(permission: Permission, **fields: object) -> Decide:
    def decide(access: Access, context: RequestContext, request: Any) -> Decision:
        return _FREE if access.server(permission) else _whole(context.api_key, _CLUSTER, **fields)

    return decide


def _alter_quotas(access: Access, context: RequestContext, request: Any) -> Decision:
    if access.server(_ADMIN):
        return _FREE
    module = wire(context.api_key)
    one = module.AlterClientQuotasResponseEntityData
    entries = [
        module.AlterClientQuotasResponseEntryData(
            _CLUSTER, _REFUSED, [one(part.entity_type, part.entity_name) for part in entry.entity]
        )
        for entry in request.entries
    ]
    return Decision(module.AlterClientQuotasResponse(entries=entries))


def _share(listed: Listed) -> Decide:
    """Group and topics; a session remembers its topics, so what it answers is looked at too."""

    def decide(access: Access, context: RequestContext, request: Any) -> Decision:
        if not access.group(_READ, request.group_id):
            return _whole(context.api_key, _GROUP)
        refused = listed.split(context.api_key, request, _code_of(access, listed, _READ))

        def amend(response: Any) -> None:
            _refuse_records(access, listed, context.api_key, response, lambda topic: None)
            response.responses = [*response.responses, *refused]

        return Decision(amend=amend)

    return decide


def _nodes_only(access: Access, context: RequestContext, request: Any) -> Decision:
    """Markers end transactions of others: nodes of the installation write them, and nobody else."""
    if context.principal == str(NODE):
        return _FREE
    module = wire(context.api_key)
    result, of_topic = (
        module.WriteTxnMarkersResponseWritableTxnMarkerPartitionResult,
        module.WriteTxnMarkersResponseWritableTxnMarkerTopicResult,
    )
    refused = [
        module.WriteTxnMarkersResponseWritableTxnMarkerResult(
            marker.producer_id,
            [of_topic(topic.name, [result(n, _CLUSTER) for n in topic.partition_indexes]) for topic in marker.topics],
        )
        for marker in request.markers
    ]
    return Decision(_response_class(context.api_key)(refused))


def _create_acls(access: Access, context: RequestContext, request: Any) -> Decision:
    if access.server(_ADMIN):
        return _FREE
    refused = wire(context.api_key).CreateAclsResponseAclCreationResult(_CLUSTER, _REFUSED)
    return Decision(_response_class(context.api_key)(results=[refused for _ in request.creations]))


def _delete_acls(access: Access, context: RequestContext, request: Any) -> Decision:
    if access.server(_ADMIN):
        return _FREE
    refused = wire(context.api_key).DeleteAclsResponseFilterResult(_CLUSTER, _REFUSED)
    return Decision(_response_class(context.api_key)(filter_results=[refused for _ in request.filters]))


def _alter_scram(access: Access, context: RequestContext, request: Any) -> Decision:
    if access.server(_ADMIN):
        return _FREE
    names = dict.fromkeys(one.name for one in (*request.deletions, *request.upsertions))
    refused = wire(context.api_key).AlterUserScramCredentialsResponseResult
    return Decision(_response_class(context.api_key)(results=[refused(name, _CLUSTER, _REFUSED) for name in names]))


RULES: dict[int, Rule] = {
    0: Rule("write on the topic (admin to create it); write on the transaction", _produce),
    1: Rule("read on the topic", _fetch),
    2: Rule("any on the topic", _topics(_TOPICS, None)),
    3: Rule("any on the topic, others are not listed; admin to create it", _metadata),
    8: Rule("read on the group and the topic", _offset_commit),
    9: Rule("any on the group and the topic", _offset_fetch),
    10: Rule("any on the group, or write on the transaction", _find_coordinator),
    11: Rule("read on the group", _group(_READ)),
    12: Rule("read on the group", _group(_READ)),
    13: Rule("read on the group", _group(_READ)),
    14: Rule("read on the group", _group(_READ)),
    15: Rule("any on the group", _groups(_GROUPS, None)),
    16: Rule("any on the group, others are not listed", _list_groups),
    17: Rule("nothing: it begins an authentication"),
    18: Rule("nothing: it comes before an authentication"),
    19: Rule("admin on the topic", _topics(_CREATED, _ADMIN)),
    20: Rule("admin on the topic", _delete_topics),
    21: Rule("admin on the topic", _topics(_EMPTIED, _ADMIN)),
    22: Rule("write on the transaction, else on any topic", _init_producer_id),
    23: Rule("any on the topic", _topics(_EPOCHS, None)),
    24: Rule("write on the transaction and the topics", _add_partitions),
    25: Rule("write on the transaction, read on the group", _add_offsets),
    26: Rule("write on the transaction", _transaction),
    27: Rule("being a node of the installation", _nodes_only),
    28: Rule("write on the transaction, read on the group and the topic", _txn_offset_commit),
    29: Rule("admin on the server", _server(_ADMIN)),
    30: Rule("admin on the server", _create_acls),
    31: Rule("admin on the server", _delete_acls),
    32: Rule("any on the topic; read on the server", _configs(_CONFIGS, None, _READ)),
    33: Rule("admin on the topic or the server", _configs(_ALTERED, _ADMIN, _ADMIN)),
    36: Rule("nothing: it is the authentication"),
    37: Rule("admin on the topic", _topics(_GROWN, _ADMIN)),
    42: Rule("admin on the group", _groups(_DELETED_GROUPS, _ADMIN)),
    44: Rule("admin on the topic or the server", _configs(_ALTERED, _ADMIN, _ADMIN)),
    47: Rule("admin on the group, read on the topic", _offset_delete),
    48: Rule("read on the server", _server(_READ, entries=None)),
    49: Rule("admin on the server", _alter_quotas),
    50: Rule("admin on the server", _server(_ADMIN)),
    51: Rule("admin on the server", _alter_scram),
    60: Rule("read on the server", _server(_READ)),
    61: Rule("read on the topic", _topics(_PRODUCERS, _READ)),
    65: Rule("any on the transaction; topics need any, others are not shown", _describe_transactions),
    66: Rule("any on the transaction, others are not listed", _list_transactions),
    68: Rule("read on the group and the topics", _heartbeat),
    69: Rule("any on the group and its topics", _described_group),
    75: Rule("any on the topic, others are not listed", _describe_topic_partitions),
    76: Rule("read on the group and the topics", _heartbeat),
    77: Rule("any on the group and its topics", _described_group),
    78: Rule("read on the group and the topic", _share(_SHARED)),
    79: Rule("read on the group and the topic", _share(_ACKNOWLEDGED)),
}
