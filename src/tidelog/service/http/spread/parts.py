"""Requests about partitions of several nodes: each node answers for its own, and the one that was asked joins it.

    client ── request ──> node A ── the same, x-tidelog-partitions: 1,4 ──> node B
                             └──── its own partitions, in this process
           <── join ────────┘

Invariants
- A part is asked of the node that serves its partitions. It answers for all of them or for none (503, when they have
  moved), and never asks others: the node that the client has asked looks again where they are.
- The whole fails with the first error, after every part has ended. What parts have done stays done, as with the
  partitions of one node.
- What takes long is an operation of the node that was asked, which waits for the operations of the others. A plan is
  applied where it was made: its parts by the nodes that made them, or not at all.
- The ids of operations and of consumers say which node has them, and requests for them are sent on there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl, urlencode

import msgspec

from tidelog.client.transport import Problem as Told
from tidelog.client.transport import path_of
from tidelog.clock import jittered
from tidelog.errors import ConflictError, NotFoundError, ServerUnavailableError, TidelogError
from tidelog.service.auth.access import Resource, topic_resource
from tidelog.service.http.operations import PLANNING, KeptPlan, Operation, begun
from tidelog.service.http.problems import RETRY_SECONDS, HttpError, Problem
from tidelog.service.http.spread.others import PARTITIONS_HEADER, said_for
from tidelog.service.placement import NodeAddress, NotOwnerError

if TYPE_CHECKING:
    from tidelog.service.cluster_control import NotServed
    from tidelog.service.http.call import Call, Reply
    from tidelog.service.kafka.broker import Broker, ServedTopic

_MOVING_SECONDS = 30.0
_PART_SECONDS = 600.0
_POLL_SECONDS = 30.0
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0


class Part(NamedTuple):
    """What one node has answered for its partitions."""

    node: NodeAddress
    numbers: Sequence[int]
    answer: Any


class SpreadPlan(NamedTuple):
    """A plan whose parts other nodes have made: by node the partitions, and the id of its own plan."""

    parts: dict[int, tuple[tuple[int, ...], str]]


def nobody(what: str, why: NotServed | None = None) -> HttpError:
    """For what no node serves at the moment; `why` its node cannot."""
    return HttpError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        f"no node serves {what} at the moment" + (f": {why.reason}" if why is not None else ""),
        hint="Try again: another node is taking it over" if why is None else why.hint,
        error="ServerUnavailableError",
        headers=(("retry-after", str(RETRY_SECONDS)),),
    )


def parts_of(broker: Broker, served: ServedTopic, numbers: Iterable[int]) -> dict[NodeAddress, list[int]]:
    """The nodes that serve these partitions; HttpError (503) when nobody serves one of them."""
    found: dict[NodeAddress, list[int]] = {}
    for number in numbers:
        owner = broker.placement.owner(served.name, number)
        if owner is None:
            raise nobody(f"{served.name}, partition {number},")
        found.setdefault(owner, []).append(number)
    return found


Ask = Callable[[NodeAddress, Sequence[int]], Awaitable[Any]]


async def from_each(broker: Broker, served: ServedTopic, numbers: Iterable[int], ask: Ask) -> list[Part]:
    """What the nodes of these partitions answer; those that moved meanwhile are asked of their next owners."""
    loop = asyncio.get_running_loop()
    deadline, pause = loop.time() + _MOVING_SECONDS, _FIRST_PAUSE_SECONDS
    done: list[Part] = []
    left = list(numbers)
    while True:
        parts, moving = _placed(broker, served, left)
        results = await asyncio.gather(*(ask(node, some) for node, some in parts.items()), return_exceptions=True)
        left = []
        failure: BaseException | None = moving
        for (node, some), result in zip(parts.items(), results, strict=True):
            if not isinstance(result, BaseException):
                done.append(Part(node, some, result))
            elif not _is_moving(result):
                raise result
            else:
                failure = result
                left += some
        if failure is None:
            return done
        if moving is not None:
            left = [number for number in numbers if not any(number in part.numbers for part in done)]
        if loop.time() + pause >= deadline:
            raise failure
        await asyncio.sleep(jittered(pause))
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _placed(
    broker: Broker, served: ServedTopic, numbers: Iterable[int]
) -> tuple[dict[NodeAddress, list[int]], HttpError | None]:
    try:
        return parts_of(broker, served, numbers), None
    except HttpError as error:
        return {}, error


def _is_moving(error: BaseException) -> bool:
    is_refused = isinstance(error, HttpError) and error.status is HTTPStatus.SERVICE_UNAVAILABLE
    return is_refused or isinstance(error, ServerUnavailableError | NotOwnerError)


# One answer of several


async def answered_by_all(call: Call) -> Any:
    """The answer to a request whose route says how to join those of several nodes."""
    assert call.route.join is not None
    if isinstance(call.route.join, Joined):
        return await operated_by_all(call, call.route.join)
    served = await call.service.topic(call.topic_name)
    asked = [number for numbers in (call.spread or {}).values() for number in numbers]
    missing: list[NotFoundError] = []

    async def ask(node: NodeAddress, numbers: Sequence[int]) -> Any:
        try:
            return await part(call, node, numbers)
        except NotFoundError as error:
            missing.append(error)
            return None

    found = await from_each(call.service.broker, served, sorted(asked), ask)
    if len(missing) == len(found):
        raise missing[0]
    return call.route.join(call, [one.answer for one in found if one.answer is not None])


def nothing(call: Call, parts: list[Any]) -> None:
    """Joins answers that say nothing."""


async def part(call: Call, node: NodeAddress, numbers: Sequence[int], target: str | None = None) -> Any:
    """What one node says to a request for some of its partitions, in the declared type; "" where it says nothing."""
    kind = call.route.response
    if node.node_id == call.service.broker.node_id:
        narrowed = call.part(numbers)
        if target is not None:
            narrowed.query = _query_of(target, type(call.query))
        result = await call.route.handler(narrowed)
        body = getattr(result, "body", None)
        if body is not None:  # a reply, which is written already
            return msgspec.json.decode(body, type=kind)
        return "" if result is None else result
    answer = await ask_node(call, node, call.route.method, target or call.target, numbers, call.raw_body)
    return answer.json(kind) if answer.body else ""


async def ask_node(
    call: Call,
    node: NodeAddress,
    method: str,
    target: str,
    numbers: Sequence[int] | None = None,
    body: bytes = b"",
    said: Mapping[str, str] | None = None,
    **options: Any,
) -> Any:
    """The answer of a node, for the client of this call; once, so that the caller looks where partitions are now.
    `said` is what the node is told of the client, if not its name alone."""
    headers = dict(said_for(call.principal) if said is None else said)
    if numbers is not None:
        headers[PARTITIONS_HEADER] = ",".join(map(str, numbers))
    given: dict[str, Any] = {"timeout": _PART_SECONDS, "attempt": _PART_SECONDS, "media_type": call.media_type}
    others = call.service.others
    assert others is not None, "a node by itself serves everything"
    return await others.http(node).ask(
        method, target, body=body, headers=headers, waits=True, is_only_try=True, **{**given, **options}
    )


def _query_of(target: str, kind: type[msgspec.Struct]) -> Any:
    pairs = parse_qsl(target.partition("?")[2], keep_blank_values=True)
    return msgspec.convert(dict(pairs), kind, strict=False)


# Operations


class Joined(NamedTuple):
    """How the operations of several nodes become one: its kind, what makes its result, and the kind of the operation
    whose plan it may apply."""

    kind: str
    join: Callable[[list[Any]], Any]
    planned_as: str = ""

    def __call__(self, call: Call, parts: list[Any]) -> Any:
        raise AssertionError("operations are waited for")


async def operated_by_all(call: Call, joined: Joined) -> Reply:
    """Starts an operation that waits for those of the nodes."""
    service = call.service
    served = await service.topic(call.topic_name)
    resource = topic_resource(served.name)
    asked = sorted(number for numbers in (call.spread or {}).values() for number in numbers)
    plan = _plan_of(call, joined, resource)

    async def ask(node: NodeAddress, numbers: Sequence[int]) -> Any:
        target = _with(call.target, wait="0")
        if plan is not None:
            target = _with(target, plan=_part_of(plan, node, numbers))
        return await _ended(call, node, await part(call, node, numbers, target))

    async def run(report: Callable[[int, int], None]) -> Any:
        if plan is not None:  # all of it is where it was, before the first part is applied
            for node, numbers in parts_of(service.broker, served, asked).items():
                _part_of(plan, node, numbers)
        found = await from_each(service.broker, served, asked, ask)
        found.sort(key=lambda one: one.numbers[0])
        result = joined.join([one.answer.result for one in found])
        if not joined.kind.startswith(PLANNING):
            return result
        parts = {one.node.node_id: (tuple(one.numbers), one.answer.id) for one in found}
        return KeptPlan(SpreadPlan(parts), result)

    return await begun(call, joined.kind, resource, run, call.query.wait)


def _plan_of(call: Call, joined: Joined, resource: Resource) -> SpreadPlan | None:
    """The plan that a request names."""
    plan_id = getattr(call.query, "plan", None)
    if plan_id is None:
        return None
    plan = call.service.operations.plan(joined.planned_as, resource, plan_id)
    if not isinstance(plan, SpreadPlan):
        raise _moved_since()
    return plan


def _part_of(plan: SpreadPlan, node: NodeAddress, numbers: Sequence[int]) -> str:
    """The id of the plan that a node has made for these partitions."""
    known = plan.parts.get(node.node_id)
    if known is None or known[0] != tuple(numbers):
        raise _moved_since()
    return known[1]


def _moved_since() -> ConflictError:
    return ConflictError(
        "partitions moved to other nodes since the plan was made: nothing was deleted",
        hint="Make a new plan, and review it",
    )


def _with(target: str, **values: str) -> str:
    path, _, query = target.partition("?")
    return f"{path}?{urlencode({**dict(parse_qsl(query, keep_blank_values=True)), **values})}"


async def _ended(call: Call, node: NodeAddress, operation: Operation) -> Operation:
    """The operation of a node, when it has ended; its failure is raised."""
    operations = call.service.operations
    while operation.state == "running":
        if node.node_id == call.service.broker.node_id:
            await operations.wait(operation.id, _POLL_SECONDS)
            found = operations.find(operation.id)
            assert found is not None, "it has not ended long ago"
            operation = found[0]
        else:
            target = f"{path_of('operations', operation.id)}?wait={_POLL_SECONDS:g}"
            operation = (await ask_node(call, node, "GET", target)).json(type(operation))
    if operation.problem is not None:
        raise _error_of(operation.problem)
    return operation


def _error_of(problem: Problem) -> TidelogError:
    return msgspec.convert(msgspec.to_builtins(problem), Told).as_error()


def by_number(name: str) -> Callable[[list[Any]], dict[str, Any]]:
    """Joins results that have values by partition under a name."""
    return lambda results: {name: merged_by_number(result[name] for result in results)}


def node_of(identity: str, separator: str, placement_nodes: Iterable[NodeAddress]) -> NodeAddress | None:
    """The node that has made an id, if it is alive."""
    number = identity.rpartition(separator)[2]
    if not (number.isascii() and number.isdigit()):
        return None
    return next((node for node in placement_nodes if node.node_id == int(number)), None)


def merged_by_number(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Values by partition of several nodes."""
    found = {number: value for one in parts for number, value in one.items()}
    return {number: found[number] for number in sorted(found, key=int)}
