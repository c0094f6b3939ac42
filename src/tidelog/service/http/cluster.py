"""The cluster over HTTP: what operators see of it and ask of it, with the operations of the command line.

Invariants
- Every node answers, from the metadata store itself: what it says does not depend on which one is asked.
- What is asked for is a document that the leader carries out. `wait` waits for that, no longer than the server lets
  anything wait; `is_done` says whether it came.
- Who asks needs `admin` on the server, also for looking: it is about all topics and engines.
- A node by itself has no cluster: 404.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any

import msgspec

from tidelog.clock import to_datetime
from tidelog.errors import InputError, NotFoundError
from tidelog.service.auth.access import Permission
from tidelog.service.cluster_control import (
    ClusterControl,
    ClusterEngine,
    ClusterNode,
    ClusterStatus,
    ClusterTopic,
    Unsaved,
)
from tidelog.service.http.call import Call
from tidelog.service.http.routes import RouteTable
from tidelog.store.scheduler import in_store_thread

routes = RouteTable("Cluster")
_CLUSTER = "/v1/cluster"
_LOOK_SECONDS = 0.2


# What is shown


class ClusterNodes(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes of a cluster."""

    nodes: list[ClusterNode]


class ClusterTopicList(msgspec.Struct, frozen=True, kw_only=True):
    """The topics of a cluster."""

    topics: list[ClusterTopic]


class ClusterEngineList(msgspec.Struct, frozen=True, kw_only=True):
    """The engines of a cluster."""

    engines: list[ClusterEngine]


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """One thing gets another node, and why."""

    kind: str
    what: str
    source: str | None = msgspec.field(name="from")
    to: str
    reason: str
    time: datetime | None = None
    """When it was decided; None in a plan."""
    leader: str | None = None


class DecidedList(msgspec.Struct, frozen=True, kw_only=True):
    """Decisions, the newest last."""

    decisions: list[Decided]


class RestorePoint(msgspec.Struct, frozen=True, kw_only=True):
    """What is only on the disk of one node, as the nodes have told in the last seconds."""

    unshipped: list[Unsaved]


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a request."""

    is_done: bool
    """Whether it is carried out; else the leader goes on with it."""


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """Whether anything was changed."""

    is_changed: bool


# What is given


class PlanQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """As if."""

    drain: str = ""
    """These nodes were drained; names with commas between them."""
    lose: str = ""
    """These nodes died; names with commas between them."""
    balance: bool = False
    """Balance were asked for."""
    slots: bool = False
    """With the slots of coordinators, besides topics and engines."""


class LastQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """How many."""

    last: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 50
    """So many of the newest."""
    slots: bool = False
    """With the slots of coordinators, besides topics and engines."""


class PatienceQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """How long to wait."""

    wait: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """So many seconds at most, until it is carried out."""


class Move(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What goes where: a partition of a topic, or an engine."""

    node: str
    topic: str = ""
    partition: Annotated[int, msgspec.Meta(ge=0)] = 0
    engine: str = ""
    pin: bool = False
    """Keep it there, whatever the balance says."""


class Pinned(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A partition of a topic, or an engine."""

    topic: str = ""
    partition: Annotated[int, msgspec.Meta(ge=0)] = 0
    engine: str = ""


class NodeName(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A node."""

    node: str


class NewEngine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where an engine is."""

    store: str | None = None
    """That of one that exists and has a store of its own. Default: that of the cluster, where it is created."""
    metadata: str | None = None
    """Of one with a store of its own. Default: that store."""
    existing: bool = False
    """It is there, and not to be created."""


def _control(call: Call) -> ClusterControl:
    if call.service.cluster is None:
        raise NotFoundError(
            "this node is by itself: there is no cluster", hint="Start it with --metadata etcd://... beside others"
        )
    return call.service.cluster


def _decided(decision: Any, time: datetime | None = None, leader: str | None = None) -> Decided:
    return Decided(
        kind=decision.kind,
        what=decision.subject,
        source=decision.source or None,
        to=decision.to,
        reason=decision.reason,
        time=time,
        leader=leader,
    )


# Looking


@routes.add("GET", f"{_CLUSTER}/status", Permission.ADMIN, ClusterStatus)
async def cluster_status(call: Call) -> ClusterStatus:
    """Shows the cluster in a few numbers."""
    return await in_store_thread(_control(call).status)


@routes.add("GET", f"{_CLUSTER}/nodes", Permission.ADMIN, ClusterNodes)
async def cluster_nodes(call: Call) -> ClusterNodes:
    """Lists all nodes that were ever members, and what they have and do."""
    return ClusterNodes(nodes=list(await in_store_thread(_control(call).nodes)))


@routes.add("GET", f"{_CLUSTER}/topics", Permission.ADMIN, ClusterTopicList)
async def cluster_topics(call: Call) -> ClusterTopicList:
    """Lists the topics of the cluster, and who serves their partitions."""
    return ClusterTopicList(topics=list(await in_store_thread(_control(call).topics)))


@routes.add("GET", f"{_CLUSTER}/engines", Permission.ADMIN, ClusterEngineList)
async def cluster_engines(call: Call) -> ClusterEngineList:
    """Lists the engines of the cluster, and who serves them."""
    return ClusterEngineList(engines=list(await in_store_thread(_control(call).engines)))


@routes.add("GET", f"{_CLUSTER}/plan", Permission.ADMIN, DecidedList, query=PlanQuery)
async def cluster_plan(call: Call) -> DecidedList:
    """Shows what the leader would decide now about topics and engines, and why. Nothing is changed."""
    query: PlanQuery = call.query
    found = await in_store_thread(
        _control(call).plan, drain=_names(query.drain), lose=_names(query.lose), balance=query.balance
    )
    return DecidedList(decisions=[_decided(one) for one in found if call.query.slots or not one.is_of_slot])


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


@routes.add("GET", f"{_CLUSTER}/decisions", Permission.ADMIN, DecidedList, query=LastQuery)
async def cluster_decisions(call: Call) -> DecidedList:
    """Lists what the leader has decided about topics and engines, and why."""
    rounds = await in_store_thread(_control(call).decisions)
    query: LastQuery = call.query
    found = [(one, decision) for one in rounds for decision in one.decisions if query.slots or not decision.is_of_slot]
    return DecidedList(
        decisions=[_decided(decision, to_datetime(one.at_us), one.leader) for one, decision in found[-query.last :]]
    )


@routes.add("GET", f"{_CLUSTER}/restore-point", Permission.ADMIN, RestorePoint)
async def cluster_restore_point(call: Call) -> RestorePoint:
    """Shows what is only on the disk of one node, and would be missing if it were lost now."""
    return RestorePoint(unshipped=list(await in_store_thread(_control(call).restore_point)))


# Asking


async def _asked(call: Call, is_so: Callable[[Any], bool]) -> Asked:
    """Waits for a state of the cluster as long as the client wants to, and the server lets it."""
    control, loop = _control(call), asyncio.get_running_loop()
    deadline = loop.time() + min(call.query.wait, call.service.settings.max_wait_seconds)

    async def carried_out() -> bool:
        while not await in_store_thread(lambda: is_so(control.state())):
            left = deadline - loop.time()
            if left <= 0:
                return False
            await asyncio.sleep(min(_LOOK_SECONDS, left))
        return True

    return Asked(is_done=bool(await call.service.unless_stopping(carried_out())))


def _check_one(topic: str, engine: str) -> None:
    if bool(topic) == bool(engine):
        raise InputError("either a topic or an engine is needed", hint='Send {"topic": "shop/orders", "partition": 0}')


@routes.add("POST", f"{_CLUSTER}/move", Permission.ADMIN, Asked, mode="wait", query=PatienceQuery, body=Move)
async def cluster_move(call: Call) -> Asked:
    """Moves a partition, or an engine, to a node. Clients follow by themselves."""
    control, body = _control(call), call.body
    _check_one(body.topic, body.engine)
    options = {"pin": body.pin, "by": call.principal.name}
    if body.engine:
        request = await in_store_thread(control.move_engine, body.engine, body.node, **options)
    else:
        request = await in_store_thread(control.move, body.topic, body.partition, body.node, **options)
    return await _asked(call, control.is_carried_out(request))


@routes.add("POST", f"{_CLUSTER}/unpin", Permission.ADMIN, Changed, body=Pinned)
async def cluster_unpin(call: Call) -> Changed:
    """Lets the load manager move a partition, or an engine, again."""
    control, body = _control(call), call.body
    _check_one(body.topic, body.engine)
    if body.engine:
        return Changed(is_changed=await in_store_thread(control.unpin_engine, body.engine))
    return Changed(is_changed=await in_store_thread(control.unpin, body.topic, body.partition))


@routes.add("POST", f"{_CLUSTER}/drain", Permission.ADMIN, Asked, mode="wait", query=PatienceQuery, body=NodeName)
async def cluster_drain(call: Call) -> Asked:
    """Moves everything off a node and keeps it empty, until it is undrained."""
    control, node = _control(call), call.body.node
    await in_store_thread(control.drain, node)
    return await _asked(call, control.is_empty(node))


@routes.add("POST", f"{_CLUSTER}/undrain", Permission.ADMIN, Changed, body=NodeName)
async def cluster_undrain(call: Call) -> Changed:
    """Lets a node serve again."""
    return Changed(is_changed=await in_store_thread(_control(call).undrain, call.body.node))


@routes.add("POST", f"{_CLUSTER}/balance", Permission.ADMIN, Asked, mode="wait", query=PatienceQuery)
async def cluster_balance(call: Call) -> Asked:
    """Balances now, whatever was moved within the hour."""
    control = _control(call)
    request = await in_store_thread(control.balance, call.principal.name)
    return await _asked(call, control.is_carried_out(request))


@routes.add("PUT", f"{_CLUSTER}/engines/{{engine}}", Permission.ADMIN, body=NewEngine)
async def add_cluster_engine(call: Call) -> None:
    """Has a node serve an engine; it is created if its store has none, unless it is one that exists."""
    body: NewEngine = call.body
    await in_store_thread(
        _control(call).add_engine,
        call.path["engine"],
        store=body.store,
        metadata=body.metadata,
        must_exist=body.existing,
    )


@routes.add("DELETE", f"{_CLUSTER}/engines/{{engine}}", Permission.ADMIN)
async def remove_cluster_engine(call: Call) -> None:
    """Has no node serve an engine any more. What its store has stays."""
    await in_store_thread(_control(call).remove_engine, call.path["engine"])
