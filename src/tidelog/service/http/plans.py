"""Plans over HTTP: what would be deleted is shown first, and applied as it was shown.

    GET .../orphans            an operation, whose result is the plan and whose id names it
    POST .../orphans/remove?plan=ID

Invariants
- Making a plan changes nothing.
- What is applied by the name of a plan is what was shown, and nothing else; if any of it is no longer so, the operation
  fails with 409 (ConflictError) and nothing is deleted. What is due besides by then stays for another plan.
- Between that look and the deletion each thing is checked once more: what came into use in this moment stays, and the
  report says so.
- Without a plan the server makes one and applies it at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec

from tidelog.cold.gc import Candidate, Plan, Reason
from tidelog.cold.retention import RetentionPlan
from tidelog.engine.cold.garbage import GarbagePlan, GarbageReport
from tidelog.engine.engine import Engine
from tidelog.errors import ConflictError, InputError
from tidelog.service.auth.access import Kind, Resource, topic_resource
from tidelog.service.http.admin import by_partition, for_each
from tidelog.service.http.call import Call, Reply
from tidelog.service.http.engines import engine_of
from tidelog.service.http.operations import Report, WaitQuery, begun, starting
from tidelog.service.http.routes import RouteTable
from tidelog.service.http.spread.parts import Joined, SpreadPlan, by_number
from tidelog.service.http.subscriptions import partition_logs
from tidelog.topics.topic import Topic

routes = RouteTable("Plans")
_TOPIC = "/v1/topics/{namespace}/{name}"
_ENGINE = "/v1/engines/{engine}"
PLAN_ORPHANS, PLAN_RETENTION, PLAN_GARBAGE = "plan-orphans", "plan-retention", "plan-garbage"


class ApplyQuery(WaitQuery, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Which plan to apply."""

    plan: str | None = None
    """The id of the operation that made it. Default: a plan that is made now."""


class OrphanQuery(ApplyQuery, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Which plan to apply, and what else to remove."""

    drop_lost: bool = False
    """Also descriptors of objects that are lost."""
    drop_uncovered: bool = False
    """Also objects that were never published."""


class HorizonQuery(WaitQuery, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What may go."""

    horizon: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """States before this seq are no longer needed. Default: what the settings say."""


class GarbageQuery(HorizonQuery, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Which plan to apply, or what may go."""

    plan: str | None = None
    """The id of the operation that made it, which has its own horizon. Default: a plan that is made now."""


def _changed(what: str) -> ConflictError:
    return ConflictError(
        f"{what} changed since the plan was made: nothing was deleted", hint="Make a new plan, and review it"
    )


# Topics


async def _planned(call: Call, kind: str, plan: Callable[[Topic], Any]) -> Reply:
    served = await call.service.topic(call.topic_name)
    logs = await partition_logs(call, served)

    async def run(report: Report) -> Any:
        found = await for_each(list(logs.values()), report, plan)
        return by_partition("plans")(dict(zip(logs, found, strict=True)))

    return await begun(call, kind, topic_resource(served.name), run, call.query.wait)


async def _applied(
    call: Call,
    kind: str,
    planned_as: str,
    apply: Callable[[Topic, Any], Any],
    join: Callable[[dict[int, Any]], Any],
    check: Callable[[Topic, Any], None] | None = None,
) -> Reply:
    """Applies what was shown, or what is planned now, to each partition; all of them are checked before the first."""
    served = await call.service.topic(call.topic_name)
    resource = topic_resource(served.name)
    numbered = await partition_logs(call, served)
    logs = list(numbered.values())
    shown = _shown(call, planned_as, resource, list(numbered))
    plan_of = dict(zip(logs, shown, strict=True))

    async def run(report: Report) -> Any:
        if check is not None and call.query.plan is not None:
            await for_each(logs, report, lambda log: check(log, plan_of[log]))
        applied = await for_each(logs, report, lambda log: apply(log, plan_of[log]))
        return join(dict(zip(numbered, applied, strict=True)))

    return await begun(call, kind, resource, run, call.query.wait)


def _shown(call: Call, planned_as: str, resource: Resource, numbers: list[int]) -> list[Any]:
    """The plan that was named, by partition; None for each where none was."""
    if call.query.plan is None:
        return [None] * len(numbers)
    plan = call.service.operations.plan(planned_as, resource, call.query.plan)
    if isinstance(plan, SpreadPlan):
        raise _changed("the nodes of its partitions")
    plans: dict[str, Any] = plan["plans"]
    if list(plans) != list(map(str, numbers)):
        raise _changed("the number of partitions")
    return list(plans.values())


@starting(routes, "GET", f"{_TOPIC}/retention", Kind.TOPIC, join=Joined(PLAN_RETENTION, by_number("plans")))
async def plan_retention(call: Call) -> Reply:
    """Plans what the retention settings delete now; the result has a plan for each partition. Changes nothing."""
    return await _planned(call, PLAN_RETENTION, Topic.plan_retention)


@starting(
    routes,
    "POST",
    f"{_TOPIC}/retention",
    Kind.TOPIC,
    ApplyQuery,
    join=Joined("retention", by_number("start_offsets"), PLAN_RETENTION),
)
async def apply_retention(call: Call) -> Reply:
    """Deletes now what the retention settings say; the result has `start_offsets`.

    With `plan`, what that plan has shown; 409 when it is no longer what is due.
    """

    def prune(log: Topic, plan: RetentionPlan | None) -> int:
        log.prune(plan)
        return log.start_offset

    def check(log: Topic, plan: RetentionPlan) -> None:
        now = log.plan_retention()
        is_due = now.delete_before >= plan.delete_before and now.objects[: len(plan.objects)] == plan.objects
        if now.start_offset != plan.start_offset or not is_due:
            raise _changed("what is due")

    return await _applied(call, "retention", PLAN_RETENTION, prune, by_partition("start_offsets"), check)


@starting(routes, "GET", f"{_TOPIC}/orphans", Kind.TOPIC, join=Joined(PLAN_ORPHANS, by_number("plans")))
async def plan_orphans(call: Call) -> Reply:
    """Plans the removal of objects that no message needs; the result has a plan for each partition. Changes nothing."""
    return await _planned(call, PLAN_ORPHANS, Topic.plan_orphans)


@starting(
    routes,
    "POST",
    f"{_TOPIC}/orphans/remove",
    Kind.TOPIC,
    OrphanQuery,
    join=Joined("remove-orphans", by_number("reports"), PLAN_ORPHANS),
)
async def remove_orphans(call: Call) -> Reply:
    """Removes objects that no message needs; the result has a report for each partition.

    With `plan`, what that plan has shown; 409 when some of it is in use or gone by now.
    """
    query: OrphanQuery = call.query
    drops = {Reason.LOST: query.drop_lost, Reason.ONLY_COPY: query.drop_uncovered}

    def going(plan: Plan) -> set[Candidate]:
        return {one for one in plan.found if drops.get(one.reason, one.action == "remove")}

    def check(log: Topic, plan: Plan) -> None:
        now = log.plan_orphans()
        if now.claim != plan.claim or not going(plan) <= going(now):
            raise _changed("some of what was to be removed")

    def remove(log: Topic, plan: Plan | None) -> Any:
        wanted = log.plan_orphans() if plan is None else plan
        return log.remove_orphans(wanted, drop_lost=query.drop_lost, drop_uncovered=query.drop_uncovered)

    return await _applied(call, "remove-orphans", PLAN_ORPHANS, remove, by_partition("reports"), check)


# Engines


async def _begun(call: Call, kind: str, work: Callable[[Engine], Awaitable[Any]]) -> Reply:
    engine = engine_of(call)

    async def run(report: Report) -> Any:
        return await work(engine)

    return await begun(call, kind, Resource(Kind.ENGINE, call.path["engine"]), run, call.query.wait)


@starting(routes, "GET", f"{_ENGINE}/garbage", Kind.ENGINE, HorizonQuery)
async def plan_engine_garbage(call: Call) -> Reply:
    """Plans the collection of what no readable state needs; the result is the plan. Changes nothing."""
    horizon = call.query.horizon
    return await _begun(call, PLAN_GARBAGE, lambda engine: engine.plan_garbage_async(horizon))


@starting(routes, "POST", f"{_ENGINE}/garbage/collect", Kind.ENGINE, GarbageQuery)
async def collect_engine_garbage(call: Call) -> Reply:
    """Collects what no readable state needs; the result is the report.

    With `plan`, the versions and pieces of the log that that plan has shown; 409 when they are others by now.
    """
    query: GarbageQuery = call.query
    if query.plan is not None and query.horizon is not None:
        raise InputError("a plan has its own horizon", hint="Give one of them")
    resource = Resource(Kind.ENGINE, call.path["engine"])
    shown = None if query.plan is None else call.service.operations.plan(PLAN_GARBAGE, resource, query.plan)
    return await _begun(call, "collect-garbage", lambda engine: _collected(engine, shown, query.horizon))


async def _collected(engine: Engine, shown: GarbagePlan | None, horizon: int | None) -> GarbageReport:
    if shown is None:
        return await engine.collect_garbage_async(horizon=horizon)
    horizon = shown.horizon_seq if shown.removable_versions else None
    now = await engine.plan_garbage_async(horizon)
    if horizon is not None and _versions(now) != _versions(shown):
        raise _changed("which versions can go")
    if now.place != shown.place or not {one.name for one in shown.dropped} <= {one.name for one in now.dropped}:
        raise _changed("which pieces of the log can go")
    return await engine.collect_garbage_async(shown)


def _versions(plan: GarbagePlan) -> tuple[int, ...]:
    return plan.horizon_seq, plan.keep_versions, plan.removable_versions, plan.removable_bytes
