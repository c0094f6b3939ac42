"""`tidelog engine gc`: old versions, and what of the log nobody needs any more. Plan, show, and with --apply do it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from tidelog.cli.engine_session import (
    TakeOverOption,
    changing,
    described,
    find_engine,
    keys_of,
    open_objects,
    opened_core,
)
from tidelog.cli.session import Session

if TYPE_CHECKING:
    from tidelog.cli.output import Row
    from tidelog.engine.core import Core
    from tidelog.engine.engine_directory import EngineDirectory
    from tidelog.engine.garbage_plan import GarbagePlan, GarbageReport
    from tidelog.engine.garbage_view import ViewedStore

_COLUMNS = ("piece", "first_lsn", "last_lsn", "bytes", "live_bytes", "dead_bytes", "fate", "reason")


def gc(
    session: Session,
    apply: Annotated[bool, typer.Option("--apply", help="Do it.")] = False,
    horizon: Annotated[
        int | None,
        typer.Option("--horizon", metavar="N", min=0, help="States before this seq are no longer needed."),
    ] = None,
    take_over: TakeOverOption = False,
) -> None:
    """Shows which versions and which pieces of the log nobody needs any more, and removes them with --apply.

    Versions go as `keep_versions` and `keep_seconds` say, or with --horizon those that no state from that seq on needs;
    without any of these all of them stay. Pieces of the log go from the front: objects of the store, or files on the
    disk where there is none. What is dead behind one that is needed is counted for a compaction. Without --apply
    nothing is changed, here or in the store, and nothing is claimed.
    """
    if apply:
        with changing(session, take_over=take_over) as engine:
            plan = engine.plan_garbage(horizon)
            report = None if plan.is_empty else engine.collect_garbage(plan)
    else:
        plan, report = _planned(session, horizon), None
    if session.as_json:
        session.output.document(_document(plan, report))
    else:
        _tell(session, plan, report)


def _planned(session: Session, horizon: int | None) -> GarbagePlan:
    """What would be done, without a claim: the engine is recovered in an overlay, and the store is only read."""
    from tidelog.cli.engine_overlay import OverlayFiles
    from tidelog.engine.garbage import Garbage

    root = find_engine(session)
    info = described(session, root)
    with (
        OverlayFiles() as files,
        opened_core(session, root, files) as core,
        _viewed(session, core, info) as view,
    ):
        garbage = Garbage(*(core, None), check=_nothing, on_failure=_nothing_of, least_read_seq=lambda: None, view=view)
        return garbage.plan(horizon)


@contextmanager
def _viewed(session: Session, core: Core, info: EngineDirectory) -> Iterator[ViewedStore | None]:
    from tidelog.engine.garbage_view import ViewedStore
    from tidelog.tier.metadata.open import BUCKET, open_metadata_store

    if info.store is None:
        yield None
        return
    objects = open_objects(session, info.store)
    with open_metadata_store(BUCKET, objects, read_only=True) as metadata:
        yield ViewedStore(core, objects, metadata, keys_of(info))


def _nothing() -> None:
    """The engine is open for as long as it is looked at."""


def _nothing_of(error: BaseException) -> None:
    """Nothing is written, so nothing can fail half done."""


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


def _tell(session: Session, plan: GarbagePlan, report: GarbageReport | None) -> None:
    from tidelog.cli.output import counted, human_bytes

    output = session.output
    if plan.held_back_by is not None:
        output.note(f"history begins at seq {plan.horizon_seq} at the latest: held back by {plan.held_back_by}")
    if plan.pieces:
        output.table(_COLUMNS, _rows(plan), narrower=[("piece", "bytes", "live_bytes", "fate")])
    if report is not None:
        output.note(
            f"removed {counted(report.removed_versions, 'version')}, {counted(report.dropped_pieces, 'piece')} of the "
            f"log and {human_bytes(report.dropped_bytes)}; history begins at seq {report.history_start_seq}"
        )
    elif plan.is_empty:
        output.note("nothing to collect")
    else:
        output.note(
            f"{counted(plan.removable_versions, 'version')} and {counted(len(plan.dropped), 'piece')} of the log to "
            f"remove, {human_bytes(plan.droppable_bytes)}; states before seq {plan.horizon_seq} cannot be read then; "
            "do it with --apply"
        )
