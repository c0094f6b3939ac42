"""Long work that a client starts: it is answered at once, runs to its end, and its outcome can be asked for.

Invariants
- An operation goes on when its client is gone: what was begun with a topic is finished.
- Its outcome is kept until `_KEPT` later ones have ended, or the server stops. Those who may see what it is about may
  see it, without the files and bytes of findings, which are for administrators.
- The last `_KEPT_PLANS` plans are kept as they were made, so that they are applied as they were shown.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from tidelog.errors import NotFoundError, TidelogError
from tidelog.events import tell
from tidelog.service.auth.access import SERVER, Kind, Permission, Principal, Resource
from tidelog.service.http.call import Call, Reply
from tidelog.service.http.problems import Problem, internal_problem, problem_of
from tidelog.service.http.routes import RouteTable

routes = RouteTable("Operations")
_logger = logging.getLogger("tidelog.http")
_KEPT = 1000
_FOR_READERS = ("subject", "kind", "severity", "first_offset", "last_offset", "unit")
_KEPT_PLANS = 100
_encode = msgspec.json.Encoder().encode


OPERATION_SEPARATOR = "-"
"""Before the number of the node in the id of an operation, where there are several nodes."""
PLANNING = "plan-"
"""What the kinds of operations that make a plan begin with."""


class WaitQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """How long to wait for the end."""

    wait: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.0
    """Seconds to wait for the end before the answer."""


class Operation(msgspec.Struct, kw_only=True):
    """Work that was started, and what became of it."""

    id: str
    kind: str
    """ship, seal, verify, ..."""
    subject: str
    """The topic or engine, as `topic:shop/orders`."""
    state: Literal["running", "done", "failed"]
    done: int
    """How many of `total` parts are done: partitions, files."""
    total: int
    started: datetime
    started_by: str
    ended: datetime | None = None
    result: Any = None
    """What came of it."""
    problem: Problem | None = None
    """Why it failed."""


class OperationList(msgspec.Struct, frozen=True, kw_only=True):
    """Operations that run, and those that ended last, newest first."""

    operations: list[Operation]


def starting(
    routes: RouteTable, method: str, path: str, resource: Kind, query: type[WaitQuery] = WaitQuery, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declares a route of administrators that starts an operation, and waits for its end as long as it is asked to."""
    settings = {"mode": "wait", "may_go_on": True, **options}
    return routes.add(method, path, Permission.ADMIN, Operation, resource=resource, query=query, **settings)


Report = Callable[[int, int], None]
"""Called with how much is done, and of how much."""


class KeptPlan(NamedTuple):
    """A plan that is kept in another form than it is shown in."""

    kept: Any
    shown: Any


class Operations:
    """All operations of this process."""

    def __init__(self, suffix: Callable[[], str] = lambda: "") -> None:
        """`suffix` is what ids of this node end with."""
        self._suffix = suffix
        self._all: dict[str, tuple[Operation, Resource]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._plans: dict[str, Any] = {}

    def start(
        self, kind: str, resource: Resource, principal: Principal, work: Callable[[Report], Awaitable[Any]]
    ) -> Operation:
        """Begins the work; its result must be fit for JSON."""
        operation = Operation(
            id=secrets.token_hex(8) + self._suffix(),
            kind=kind,
            subject=str(resource),
            state="running",
            done=0,
            total=1,
            started=datetime.now(UTC),
            started_by=str(principal),
        )
        self._all[operation.id] = operation, resource
        task = asyncio.ensure_future(self._run(operation, work))
        self._tasks[operation.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(operation.id, None))
        return operation

    async def _run(self, operation: Operation, work: Callable[[Report], Awaitable[Any]]) -> None:
        def report(done: int, total: int) -> None:
            operation.done, operation.total = done, total

        try:
            result = await work(report)
            kept, shown = result if isinstance(result, KeptPlan) else (result, result)
            operation.result = msgspec.to_builtins(shown)
            if operation.kind.startswith(PLANNING):
                self._plans[operation.id] = kept
            operation.done, operation.state = operation.total, "done"
        except TidelogError as error:
            operation.state, operation.problem = "failed", problem_of(error)
        except Exception:
            _logger.exception("%s of %s failed", operation.kind, operation.subject)
            operation.state, operation.problem = "failed", internal_problem()
        finally:
            operation.ended = datetime.now(UTC)
            tell(_logger, "operation_ended", kind=operation.kind, subject=operation.subject, state=operation.state)
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        ended = [one.id for one, _ in self._all.values() if one.ended is not None]
        for old in ended[: max(0, len(ended) - _KEPT)]:
            del self._all[old]
        for old in list(self._plans)[: max(0, len(self._plans) - _KEPT_PLANS)]:
            del self._plans[old]

    @property
    def running(self) -> int:
        """How many have not ended."""
        return len(self._tasks)

    def find(self, operation_id: str) -> tuple[Operation, Resource] | None:
        return self._all.get(operation_id)

    def plan(self, kind: str, resource: Resource, plan_id: str) -> Any:
        """The plan that an operation of this kind about this resource has made; NotFoundError if it is not kept."""
        operation, subject = self._all.get(plan_id, (None, None))
        if operation is None or (operation.kind, subject) != (kind, resource) or plan_id not in self._plans:
            raise NotFoundError(
                f"there is no such plan for {resource}",
                hint="The newest 100 are kept, until the server stops: make a new one, and review it",
            )
        return self._plans[plan_id]

    def all(self) -> list[tuple[Operation, Resource]]:
        """Newest first."""
        return list(self._all.values())[::-1]

    async def wait(self, operation_id: str, seconds: float) -> None:
        """Until an operation has ended, or the time is up."""
        task = self._tasks.get(operation_id)
        if task is not None and seconds > 0:
            await asyncio.wait([task], timeout=seconds)

    async def stop(self, seconds: float) -> None:
        """Waits for what runs: the topics are closed afterwards, and end the rest."""
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=seconds)


async def begun(
    call: Call, kind: str, resource: Resource, work: Callable[[Report], Awaitable[Any]], wait: float
) -> Reply:
    """The answer to a request that starts an operation: 200 when it has ended within `wait`, else 202."""
    operation = call.service.operations.start(kind, resource, call.principal, work)
    await call.service.unless_stopping(call.service.operations.wait(operation.id, wait))
    status = HTTPStatus.OK if operation.ended is not None else HTTPStatus.ACCEPTED
    return Reply(_encode(operation), status=status, headers=(("location", f"/v1/operations/{operation.id}"),))


@routes.add("GET", "/v1/operations", None, OperationList)
async def list_operations(call: Call) -> OperationList:
    """Lists operations about what the client may see, newest first."""
    found = [
        _visible(call, one, resource)
        for one, resource in call.service.operations.all()
        if call.allows(Permission.READ, resource)
    ]
    return OperationList(operations=found)


def _visible(call: Call, operation: Operation, resource: Resource) -> Operation:
    """What the client may see of an operation: findings name files of the server for administrators only."""
    if not isinstance(operation.result, dict) or "findings" not in operation.result:
        return operation
    if call.allows(Permission.ADMIN, resource):
        return operation
    findings = [{name: one[name] for name in _FOR_READERS} for one in operation.result["findings"]]
    return msgspec.structs.replace(operation, result={**operation.result, "findings": findings, "notes": []})


@routes.add("GET", "/v1/operations/{operation}", None, Operation, query=WaitQuery, mode="wait")
async def describe_operation(call: Call) -> Operation:
    """Shows an operation; with `wait` it answers when that has ended, or the time is up."""
    found = call.service.operations.find(call.path["operation"])
    if found is None or not call.allows(Permission.READ, found[1]):
        call.check(Permission.READ, SERVER)  # others do not learn which operations there are
        raise NotFoundError("there is no such operation", hint="The newest 1000 are kept, until the server stops")
    await call.service.unless_stopping(call.service.operations.wait(found[0].id, call.query.wait))
    return _visible(call, *found)
