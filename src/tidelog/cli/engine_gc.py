"""`tidelog engine gc`: old versions, and what of the log nobody needs any more. Plan, show, and with --apply do it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tidelog.cli.engine_session import changing
from tidelog.cli.session import Session

if TYPE_CHECKING:
    from tidelog.cli.output import Row
    from tidelog.engine.garbage_plan import GarbagePlan, GarbageReport

_COLUMNS = ("piece", "first_lsn", "last_lsn", "bytes", "live_bytes", "dead_bytes", "fate", "reason")


def gc(
    session: Session,
    apply: Annotated[bool, typer.Option("--apply", help="Do it.")] = False,
    horizon: Annotated[
        int | None,
        typer.Option("--horizon", metavar="N", min=0, help="States before this seq are no longer needed."),
    ] = None,
) -> None:
    """Shows which versions and which pieces of the log nobody needs any more, and removes them with --apply.

    Versions go as `keep_versions` and `keep_seconds` say, or with --horizon those that no state from that seq on needs;
    without any of these all of them stay. Pieces of the log go from the front: objects of the store, or files on the
    disk where there is none. What is dead behind one that is needed is counted for a compaction.
    """
    with changing(session) as engine:
        plan = engine.plan_garbage(horizon)
        report = engine.collect_garbage(plan) if apply and not plan.is_empty else None
    if session.as_json:
        session.output.document(_document(plan, report))
    else:
        _tell(session, plan, report, apply=apply)


def _document(plan: GarbagePlan, report: GarbageReport | None) -> Row:
    import msgspec

    return {
        "plan": {**msgspec.to_builtins(plan), "pieces": _rows(plan)},
        "is_applied": report is not None,
        "report": None if report is None else msgspec.to_builtins(report),
    }


def _rows(plan: GarbagePlan) -> list[Row]:
    return [
        {
            "piece": use.name,
            "first_lsn": use.first_lsn,
            "last_lsn": use.next_lsn - 1,
            "bytes": use.size,
            "live_bytes": use.live_bytes,
            "dead_bytes": use.dead_bytes,
            "fate": use.fate,
            "reason": use.reason,
        }
        for use in plan.pieces
    ]


def _tell(session: Session, plan: GarbagePlan, report: GarbageReport | None, *, apply: bool) -> None:
    from tidelog.cli.output import counted, human_bytes

    output = session.output
    if plan.pieces:
        output.table(_COLUMNS, _rows(plan), narrower=[("piece", "bytes", "live_bytes", "fate")])
    if report is not None:
        output.note(
            f"removed {counted(report.removed_versions, 'version')}, {counted(report.dropped_pieces, 'piece')} of the "
            f"log and {human_bytes(report.dropped_bytes)}; history begins at seq {report.history_start_seq}"
        )
    elif plan.is_empty:
        output.note("nothing to collect")
    elif not apply:
        output.note(
            f"{counted(plan.removable_versions, 'version')} and {counted(len(plan.dropped), 'piece')} of the log to "
            f"remove, {human_bytes(plan.droppable_bytes)}; states before seq {plan.horizon_seq} cannot be read then; "
            "do it with --apply"
        )
