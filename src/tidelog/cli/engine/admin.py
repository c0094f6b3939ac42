"""`tidelog engine checkpoint`, `ship`, `restore`, `rebuild-manifest`, `gc`, `compact` and `verify`: maintenance of an
engine by hand."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tidelog.cli.engine.session import (
    TakeOverOption,
    changing,
    changing_anywhere,
    cold_reading,
    described,
    engine_config,
    engine_root,
    find_engine,
    open_metadata,
    open_objects,
    opened_core,
    require_store,
    restore_hint,
    served,
    statistics_of,
)
from tidelog.cli.engine.show import info_of, is_open
from tidelog.cli.errors import ExitCode
from tidelog.cli.output import Row, counted
from tidelog.cli.session import Session
from tidelog.engine.cold.garbage import Garbage, GarbagePlan, GarbageReport, ViewedStore
from tidelog.engine.core import Core
from tidelog.engine.directory import EngineDirectory
from tidelog.engine.recovery.restore import Phase, RestoreProgress
from tidelog.engine.verify.local import EngineVerification
from tidelog.engine.verify.overlay import OverlayFiles
from tidelog.engine_wiring import open_engine_at, rebuild_manifest_of, restore_directory
from tidelog.errors import DataError, InputError, LockedError
from tidelog.findings import Finding, VerifyReport
from tidelog.units import human_bytes


def checkpoint(session: Session, take_over: TakeOverOption = False) -> None:
    """Makes a checkpoint, so that opening has little to do. Writes the state into the store too, if there is one.

    A restore begins with the newest state in the store.
    """
    with changing_anywhere(session, take_over=take_over) as engine:
        started = time.perf_counter()
        seq = engine.create_checkpoint()
        found = statistics_of(engine)
        shipping = found["shipping"] or {}
        record = {
            "seq": seq,
            "seconds": time.perf_counter() - started,
            "redo_lsn": found["redo_lsn"],
            "state_seq": shipping.get("newest_checkpoint_seq"),
            "states": shipping.get("checkpoints"),
        }
    session.output.record(record)


def ship(
    session: Session,
    low_water_mark: Annotated[
        int | None,
        typer.Option(
            "--low-water-mark", metavar="N", min=0, help="All replicas have applied everything up to this seq."
        ),
    ] = None,
    take_over: TakeOverOption = False,
) -> None:
    """Ships everything up to the low-water mark to the store. Files that may leave the disk do.

    The low-water mark is the orchestrator's to say. With --low-water-mark it is raised first: what is at or below it is
    never rolled back afterwards.
    """
    with changing_anywhere(session, take_over=take_over) as engine:
        require_store(engine, session)
        if low_water_mark is not None:
            engine.update_low_water_mark(low_water_mark)
        started = time.perf_counter()
        mark = engine.ship()
        shipping = statistics_of(engine)["shipping"]
        shipper = shipping["shipper"] or {"objects_created": 0, "bytes_uploaded": 0}
        record = {
            "store": shipping["store"],
            "high_water_mark": mark,
            "low_water_mark": engine.low_water_mark,
            "applied_seq": engine.applied_seq,
            "objects": shipper["objects_created"],
            "shipped_bytes": shipper["bytes_uploaded"],
            "lag_bytes": shipping["lag_bytes"],
            "purged_bytes": shipping["purged_bytes"],
            "seconds": time.perf_counter() - started,
        }
    session.output.record(record)


def restore(
    session: Session,
    take_over: TakeOverOption = False,
    drill: Annotated[
        bool, typer.Option("--drill", help="Make a read-only copy: claims nothing and does not affect the owner.")
    ] = False,
    lazy: Annotated[
        bool, typer.Option("--lazy", help="Reads of the directory are answered at once, from the store.")
    ] = False,
) -> None:
    """Restores a lost engine into an empty directory. From the newest snapshot in the store, and the log after it.

    The new directory owns the engine from then on. An engine that another node has open is refused, unless --take-over
    is given. The orchestrator has to send entries above the restored seq again. To restart an interrupted restore, run
    the same command again.

    With --drill the directory becomes a read-only copy of what is shipped: `tidelog engine get`, `ls`, `status` and
    `verify` work on it, and it never claims or ships anything.

    With --lazy, commands that read it (get, stat, ls, scan, changes, versions, digest) are answered from the store from
    the moment when the restore begins, which is said; this command fills the disk, and ends when that is done.
    """
    if drill and take_over:
        raise InputError("--drill claims nothing, so there is nothing to take over", hint="Leave one of them out")
    config = engine_config(session)
    if not config.dir:
        raise InputError(
            "no directory was named to restore into",
            hint="Give an empty or a new one: tidelog engine restore ./new --store s3://bucket/prefix",
        )
    directory = Path(config.dir).absolute()
    started, is_told = time.perf_counter(), not lazy
    with session.output.steps() as show:

        def on_progress(progress: RestoreProgress) -> None:
            nonlocal is_told
            if not is_told:
                session.output.note(f"{directory} can be read now; it is filled meanwhile")
                is_told = True
            if progress.phase in _DOING:
                show(_DOING[progress.phase], progress.done, progress.total)

        report = restore_directory(
            directory, config, on_progress=on_progress, take_over=take_over, claims=not drill, lazy=lazy
        )
    with open_engine_at(directory, config, runs_in_background=False) as engine:
        record = {
            "directory": str(directory),
            "applied_seq": engine.applied_seq,
            "state_seq": report.state_seq,
            "entries_replayed": report.entries,
            "rows": report.rows,
            "damaged_states": list(report.damaged_states),
            "seconds": time.perf_counter() - started,
        }
    session.output.record(record)
    for key in report.damaged_states:
        session.output.note(f"problem: the state {key} could not be used; an older one was")
    if drill:
        session.output.note(f"a copy for reading, up to seq {report.seq}; the engine in the store was not touched")
    else:
        session.output.note(f"entries above seq {report.seq} come from the orchestrator")


def rebuild_manifest(session: Session) -> None:
    """Rebuilds the metadata of an engine that lost it. If its SQLite file or etcd is gone, the copy in its store is
    used.

    The engine's directory says which store and metadata are meant, and can be opened again afterwards; it must not be
    open. If it is lost too, name both with --store and --metadata, then run `tidelog engine restore`. An engine that is
    in the metadata store is not replaced. The exit code is 1 if the copy names objects that are not in the store.
    """
    config = msgspec.structs.replace(engine_config(session), dir=str(engine_root(session)))
    report = rebuild_manifest_of(config)
    session.output.record(
        {**msgspec.structs.asdict(report), "missing": len(report.missing), "unpublished": len(report.unpublished)}
    )
    if report.unpublished:
        session.output.note(
            f"{counted(len(report.unpublished), 'object')} shipped after the copy was made; their entries come from "
            "the engine's directory or its orchestrator"
        )
    for key in report.missing:
        session.output.note(f"problem: {key} is named and not in the store as it should be")
    if report.missing:
        raise typer.Exit(ExitCode.FOUND_WRONG)


_DOING: dict[Phase, str] = {
    "state": "reading the state",
    "log": "replaying the log",
    "claim": "claiming the engine",
    "index": "making the index",
}


# `tidelog engine gc`: removes old versions, and the log that is no longer needed. Plan, show, and with --apply do it.


_COLUMNS = ("piece", "first_lsn", "last_lsn", "bytes", "live_bytes", "dead_bytes", "fate", "reason")


def gc(
    session: Session,
    apply: Annotated[bool, typer.Option("--apply", help="Do it.")] = False,
    horizon: Annotated[
        int | None,
        typer.Option("--horizon", metavar="N", min=0, help="States before this seq are no longer needed."),
    ] = None,
    plan_id: Annotated[
        str | None,
        typer.Option("--plan", metavar="ID", help="With --apply: exactly this plan, which a server has shown."),
    ] = None,
    take_over: TakeOverOption = False,
) -> None:
    """Shows which versions and pieces of the log can go. Removes them with --apply.

    Versions are removed according to `keep_versions` and `keep_seconds`, or with --horizon those that no state from
    that seq on needs; without any of these all of them stay. Pieces of the log are removed from the front: objects of
    the store, or files on the disk if there is none. Dead pieces after one that is needed are counted for a compaction.
    Without --apply nothing is changed, here or in the store, and nothing is claimed. A server that has the engine open
    does it: it gives the plan an id, and --apply --plan ID removes what was shown, or fails if that has changed.
    """
    if plan_id is not None and (not apply or horizon is not None):
        raise InputError("--plan goes with --apply, and has its own horizon", hint="Give --apply --plan ID")
    with served(session) as remote:
        if remote is not None:
            plan = remote.plan_garbage(horizon) if plan_id is None else remote._bridge.wait(remote._find_plan(plan_id))
            report = remote.collect_garbage(plan) if apply and not plan.is_empty else None
        elif plan_id is not None:
            raise InputError("--plan names a plan of a server, and none has this engine open", hint="Leave it out")
        elif apply:
            with changing(session, take_over=take_over) as engine:
                plan = engine.plan_garbage(horizon)
                report = None if plan.is_empty else engine.collect_garbage(plan)
        else:
            plan, report = _planned(session, horizon), None
    if session.as_json:
        session.output.document(_document(plan, report))
    else:
        _tell_garbage(session, plan, report)


def _planned(session: Session, horizon: int | None) -> GarbagePlan:
    """What would be done, without a claim: the engine is recovered in an overlay, and the store is only read."""
    root = find_engine(session)
    info = described(session, root)
    with (
        OverlayFiles() as files,
        opened_core(session, root, files) as core,
        _viewed(session, core, info) as view,
    ):
        garbage = Garbage(core, None, check=_nothing, on_failure=_nothing_of, least_read_seq=lambda: None, view=view)
        return garbage.plan(horizon)


@contextmanager
def _viewed(session: Session, core: Core, info: EngineDirectory) -> Iterator[ViewedStore | None]:
    if info.store is None:
        yield None
        return
    objects = open_objects(session, info.store)
    with open_metadata(session, info, objects) as metadata:
        yield ViewedStore(core, objects, metadata, info.keys)


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


def _tell_garbage(session: Session, plan: GarbagePlan, report: GarbageReport | None) -> None:
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
        known = getattr(plan, "id", None)
        output.note(
            f"{counted(plan.removable_versions, 'version')} and {counted(len(plan.dropped), 'piece')} of the log to "
            f"remove, {human_bytes(plan.droppable_bytes)}; states before seq {plan.horizon_seq} cannot be read then; "
            f"do it with --apply{'' if known is None else f' --plan {known}'}"
        )


# `tidelog engine compact`: merges small objects of the store, and half-empty pages of the index.


def compact(
    session: Session,
    index: Annotated[
        bool, typer.Option("--index", help="Rewrite the index on this disk in full pages instead.")
    ] = False,
    grace_seconds: Annotated[
        float | None,
        typer.Option("--grace-seconds", metavar="S", min=0, help="Delete what was replaced longer ago than this."),
    ] = None,
    take_over: TakeOverOption = False,
) -> None:
    """Merges small objects of the store. `compaction_max_bytes` says which are small.

    Replaced objects stay for a while, for current readers, and are deleted by a later run. With --index the page file
    is rewritten instead, which frees space after versions were removed.
    """
    with changing_anywhere(session, take_over=take_over) as engine:
        if index:
            report: object = engine.compact_index()
        else:
            require_store(engine, session)
            report = engine.compact() if grace_seconds is None else engine.compact(grace_seconds)
    session.output.record(msgspec.to_builtins(report))


# `tidelog engine verify`: checks the log, the index, the values and the store.


def verify(
    session: Session,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Files alone, without a lock: beside the process that has it open.")
    ] = False,
    cold: Annotated[bool, typer.Option("--cold/--no-cold", help="Read everything in the store as well.")] = True,
) -> None:
    """Reads everything and checks it: nothing is changed.

    The log, every frame and every record; the page file, every page; then the engine is recovered in memory, and its
    index is checked as a whole, every version, and the checksum of every value, on this disk and in the store; the
    marks and the last checkpoint against the log; and in the store every object, the manifest and the states.

    Problems are listed on stderr, and the exit code is then 1. A torn tail, which a killed process leaves behind,
    counts too, though the next opening cuts it off by itself. A server that has the engine open verifies it. While
    another process has it open, only --read-only works: it leaves out what needs a recovered engine.
    """
    if not read_only and (found := _verified_by_server(session, cold)) is not None:
        _show(session, engine_root(session) if session.server is None else None, found)
        return
    root = find_engine(session)
    damaged: list[str] = []
    info = info_of(session, root, damaged)
    if not read_only and is_open(root):
        raise LockedError(f"{root} is open in another process", path=root)
    with session.output.steps() as on_step:
        check = EngineVerification(root, info.name, fix=_fix(session, info), on_step=on_step)
        is_whole, applied_seq = check.check_files(), None
        check.findings += [Finding(subject=check.about.subject, kind="settings", message=text) for text in damaged]
        if not read_only and is_whole:
            try:
                applied_seq = _check_state(session, root, info, cold, check)
            except DataError as error:
                check.findings.append(check.about.finding_of(error, "recovery"))
        if cold and info.store is not None:
            _check_store(session, info, applied_seq, check)
    _show(session, root, check.report())


def _verified_by_server(session: Session, cold: bool) -> VerifyReport | None:
    with served(session) as remote:
        return None if remote is None else remote.verify(cold=cold)


def _check_state(
    session: Session, root: Path, info: EngineDirectory, cold: bool, check: EngineVerification
) -> int | None:
    with (
        OverlayFiles() as files,
        opened_core(session, root, files) as core,
        cold_reading(session, core, info) as reader,
    ):
        check.check_state(core, reader, cold=cold)
        return core.marks.applied_seq


def _check_store(session: Session, info: EngineDirectory, applied_seq: int | None, check: EngineVerification) -> None:
    assert info.store is not None
    objects = open_objects(session, info.store)
    with open_metadata(session, info, objects) as metadata:
        check.check_store(objects, metadata, info.keys, applied_seq)


def _fix(session: Session, info: EngineDirectory) -> str:
    if info.store is None:
        return "Without a store, rebuild the engine from its orchestrator's log in another directory"
    return f"{restore_hint(session)} makes a new copy from the store; what is damaged there is read from replicas"


def _show(session: Session, root: Path | None, report: VerifyReport) -> None:
    from tidelog.cli.verify import documents, tell_findings

    if session.as_json:
        verdict = {"ok": report.ok, "verdict": report.verdict, "problems": len(report.findings)}
        found = documents(report.findings)
        place = {} if root is None else {"directory": str(root)}
        session.output.document({**place, **report.read, **verdict, "findings": found})
    else:
        session.output.record({**report.read, "problems": len(report.findings)})
    tell_findings(session, list(report.findings))
