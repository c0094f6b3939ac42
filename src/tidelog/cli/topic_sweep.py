"""`tidelog topic sweep`: what in the store belongs to nothing. Plan, show, and with --apply remove.

A sweep needs no claim, so it runs beside the owner, wherever that is. Only what changes the catalog, or drops what may
be the only copy of something, claims the topic first, and says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from tidelog.cli.errors import ExitCode
from tidelog.cli.session import Session
from tidelog.cli.topic_choice import (
    TakeOverOption,
    TopicsArgument,
    exit_if_any_failed,
    require_ours,
    require_store,
    rows_of_each,
)

if TYPE_CHECKING:
    from tidelog.cli.output import Row
    from tidelog.tier.sweep import SweepPlan, SweepReport
    from tidelog.topics.storage import LogDirectory

_COLUMNS = ("topic", "action", "kind", "object", "bytes")
# By the fields of the plan: what a sweep does about them.
_ACTIONS = {
    "below_start": "remove",
    "left_over": "remove",
    "orphans": "remove",
    "unfinished": "remove",
    "staged": "remove",
    "uncovered": "keep",
    "lost": "LOST",
    "damaged": "DAMAGED",
    "pending": "keep",
    "replaced": "keep",
    "newer": "keep",
    "foreign": "keep",
}


class _Wanted(NamedTuple):
    """What is to be done about what is found."""

    apply: bool
    drop_lost: bool
    drop_uncovered: bool
    take_over: bool

    @property
    def drops(self) -> bool:
        return self.drop_lost or self.drop_uncovered


def sweep(
    session: Session,
    topics: TopicsArgument = None,
    every: Annotated[bool, typer.Option("--all", help="All topics in the catalog.")] = False,
    apply: Annotated[bool, typer.Option("--apply", help="Do it.")] = False,
    drop_lost: Annotated[
        bool, typer.Option("--drop-lost", help="Take out of the catalog what is gone, so that readers are told a gap.")
    ] = False,
    drop_uncovered: Annotated[
        bool, typer.Option("--drop-uncovered", help="Delete what was never published, though it is the only copy.")
    ] = False,
    take_over: TakeOverOption = False,
) -> None:
    """Shows what in the store belongs to nothing, and removes it with --apply.

    It claims nothing, so that it can run beside an owner; descriptors below the start stay then, its owner removes
    them. --drop-lost and --drop-uncovered do claim the topic, for the time that it takes. The exit code is 1 when
    objects are lost or damaged.
    """
    wanted = _Wanted(apply, drop_lost, drop_uncovered, take_over)
    with session.open(runs_in_background=False) if apply and wanted.drops else session.look() as log:
        require_store(log)
        names = _chosen(session, log, topics, every)
        results = rows_of_each(session, names, lambda name: _sweep(session, log, name, wanted))
    if session.as_json:
        session.output.document(results)
    else:
        _tell(session, results, apply)
    exit_if_any_failed(results)
    if any(result["is_whole"] is False for result in results):
        raise typer.Exit(ExitCode.FOUND_WRONG)


def _chosen(session: Session, log: LogDirectory, names: list[str] | None, every: bool) -> list[str]:
    from tidelog.cli.topic_names import require_topic
    from tidelog.errors import InputError
    from tidelog.tier.rebuild import topics_in

    if bool(names) == every:
        raise InputError("name the topics, or give --all", hint="All topics: `tidelog topic list`")
    for name in names or []:
        require_topic(log, name)
    if names:
        return list(dict.fromkeys(names))
    tier = require_store(log)
    known = {"/".join(topic) for topic in tier.topics()}
    for name in sorted({"/".join(topic) for topic in topics_in(tier.objects)} - known):
        hint = session.pasteable(f"`tidelog topic rebuild-catalog {name}` makes one")
        session.output.note(f"left out: the store has objects of {name}, and there is no catalog of it; {hint}")
    return sorted(known)


def _sweep(session: Session, log: LogDirectory, name: str, wanted: _Wanted) -> Row:
    if wanted.apply and wanted.drops:
        plan, report = _sweep_as_owner(session, log, name, wanted)
    else:
        plan, report = _sweep_beside_owner(log, name, wanted.apply)
    return {
        "topic": name,
        "is_applied": report is not None,
        "is_whole": not (plan.lost or plan.damaged),
        "is_deleted": plan.is_deleted,
        "bytes": plan.bytes,
        "found": list(_rows(name, plan)),
        "report": report,
    }


def _sweep_beside_owner(log: LogDirectory, name: str, apply: bool) -> tuple[SweepPlan, SweepReport | None]:
    from tidelog.clock import SystemClock
    from tidelog.tier.sweep import apply_sweep, plan_sweep
    from tidelog.topics.names import parse_topic_name

    tier, parsed = require_store(log), parse_topic_name(name)
    catalog = tier.catalog(parsed.namespace, parsed.name)
    plan = plan_sweep(catalog, tier.objects, None, SystemClock().now_us())
    return plan, apply_sweep(plan, catalog, tier.objects) if apply else None


def _sweep_as_owner(
    session: Session, log: LogDirectory, name: str, wanted: _Wanted
) -> tuple[SweepPlan, SweepReport | None]:
    require_ours(log, name, wanted.take_over)
    topic = log.topic(name, take_over=wanted.take_over)
    tier = topic.statistics().tier
    assert tier is not None, "there is a store"
    session.output.note(f"claimed {name} for this, with epoch {tier.epoch}")
    plan = topic.plan_sweep()
    return plan, topic.sweep(plan, drop_lost=wanted.drop_lost, drop_uncovered=wanted.drop_uncovered)


def _rows(name: str, plan: SweepPlan) -> Iterator[Row]:
    for kind, action in _ACTIONS.items():
        for one in getattr(plan, kind):
            key, size = (one, None) if isinstance(one, str) else (one.key, one.size)
            yield {"topic": name, "action": action, "kind": kind, "object": key, "bytes": size}


def _tell(session: Session, results: list[Row], apply: bool) -> None:
    from tidelog.cli.output import counted, human_bytes

    swept = [result for result in results if "found" in result]
    rows = [row for result in swept for row in _listed(result["found"])]
    if rows:
        session.output.table(_COLUMNS, rows, narrower=[("action", "kind", "object", "bytes")])
    for result in swept:
        if result["is_deleted"]:
            session.output.note(f"{result['topic']} is being deleted: whoever opens it finishes that")
        if result["report"] is not None:
            _tell_report(session, str(result["topic"]), result["report"])
    removable = [row for row in rows if row["action"] == "remove"]
    if removable and not apply:
        size = sum(row["bytes"] for row in removable if isinstance(row["bytes"], int))
        session.output.note(f"{counted(len(removable), 'thing')} to remove, {human_bytes(size)}; do it with --apply")
    elif not rows:
        session.output.note("nothing to sweep")


def _listed(found: object) -> list[Row]:
    assert isinstance(found, list)
    return found


def _tell_report(session: Session, name: str, report: object) -> None:
    from tidelog.cli.output import counted, human_bytes
    from tidelog.tier.sweep import SweepReport

    assert isinstance(report, SweepReport)
    objects = len(report.objects) + len(report.unfinished) + len(report.staged)
    text = f"{name}: removed {counted(objects, 'object')}, {human_bytes(report.bytes)}"
    if report.dropped_lost:
        text += f", and {counted(len(report.dropped_lost), 'descriptor')} of lost ones"
    session.output.note(text)
    for key, why in report.skipped:
        session.output.note(f"kept {key}: {why}")
