"""`tidelog engine verify`: is everything what was written, in the log, the index, the values and the store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidelog.cli.engine_session import (
    cold_reading,
    find_engine,
    keys_of,
    open_objects,
    opened_core,
    restore_hint,
)
from tidelog.cli.engine_status import info_of, is_open
from tidelog.cli.errors import ExitCode
from tidelog.cli.session import Session

if TYPE_CHECKING:
    from tidelog.cli.engine_checks import Finding, LogCheck
    from tidelog.engine.engine_directory import EngineDirectory


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
    counts too, though the next opening cuts it off by itself. While another process has the engine open, only
    --read-only works: it leaves out what needs a recovered engine.
    """
    root = find_engine(session)
    info, damaged = _info(session, root)
    if not read_only and is_open(root):
        from tidelog.errors import LockedError

        raise LockedError(f"{root} is open in another process", path=root)
    log, summary, findings = _check_files(session, root)
    findings += damaged
    applied_seq: int | None = None
    if not read_only and not log.has_damage:
        applied_seq = _check_state(session, root, info, cold, summary, findings)
    if cold and info.store is not None:
        _check_store(session, info, applied_seq, summary, findings)
    _tell(session, root, info, summary, findings)


def _info(session: Session, root: Path) -> tuple[EngineDirectory, list[Finding]]:
    from tidelog.cli.engine_checks import Finding

    problems: list[str] = []
    info = info_of(session, root, problems)
    return info, [Finding("directory", problem) for problem in problems]


def _check_files(session: Session, root: Path) -> tuple[LogCheck, dict[str, Any], list[Finding]]:
    from tidelog.cli.engine_checks import LogCheck, PageCheck
    from tidelog.cli.engine_wal import wal_bytes

    log = LogCheck(root)
    total = wal_bytes(root / "wal") if (root / "wal").is_dir() else 0
    with session.output.progress("reading the log", 2 * total) as on_done:
        log.run(on_done)
    pages = PageCheck(root, log)
    size = (root / "pages.db").stat().st_size if (root / "pages.db").exists() else 0
    with session.output.progress("reading pages", size) as on_done:
        pages.run(on_done)
    summary = {"records": log.records, "log_bytes": log.bytes, "pages": pages.pages}
    return log, summary, [*log.findings, *pages.findings]


def _check_state(
    session: Session,
    root: Path,
    info: EngineDirectory,
    cold: bool,
    summary: dict[str, Any],
    findings: list[Finding],
) -> int | None:
    from tidelog.cli.engine_checks import Finding
    from tidelog.cli.engine_overlay import OverlayFiles
    from tidelog.cli.engine_state_checks import StateCheck
    from tidelog.errors import DataError

    try:
        with (
            OverlayFiles() as files,
            opened_core(session, root, files) as core,
            cold_reading(session, core, info) as reader,
        ):
            check = StateCheck(core, reader, reads_store=cold)
            with session.output.progress("reading values", check.count()) as on_done:
                check.run(on_done)
            findings += check.findings
            summary |= {
                "tree_pages": check.tree_pages,
                "versions": check.versions,
                "hot_values": check.hot_values,
                "cold_values": check.cold_values,
            }
            return core.marks.applied_seq
    except DataError as error:
        findings.append(Finding("recovery", str(error)))
        return None


def _check_store(
    session: Session,
    info: EngineDirectory,
    applied_seq: int | None,
    summary: dict[str, Any],
    findings: list[Finding],
) -> None:
    from tidelog.cli.engine_state_checks import StoreCheck
    from tidelog.tier.metadata.open import BUCKET, open_metadata_store

    assert info.store is not None
    objects = open_objects(session, info.store)
    with open_metadata_store(BUCKET, objects, read_only=True) as metadata:
        check = StoreCheck(objects, metadata, keys_of(info))
        with session.output.progress("reading the store", check.total_bytes()) as on_done:
            check.run(applied_seq, on_done)
    findings += check.findings
    summary |= {"objects": check.objects_read, "object_bytes": check.bytes_read, "states": check.states}


def _advice(session: Session, info: EngineDirectory) -> str:
    if info.store is None:
        return "Without a store an engine is made anew from its orchestrator's log, in another directory"
    return f"{restore_hint(session)} makes a new copy from the store; what is damaged there is read from replicas"


def _tell(
    session: Session, root: Path, info: EngineDirectory, summary: dict[str, Any], findings: list[Finding]
) -> None:
    problems = [finding._asdict() for finding in findings]
    if session.as_json:
        session.output.document({"directory": str(root), **summary, "problems": problems})
    else:
        session.output.record({**summary, "problems": len(findings)})
    for finding in findings:
        session.output.note(f"problem: {finding.part}: {finding.text}")
    if findings:
        session.output.note(f"hint: {session.pasteable(_advice(session, info))}")
        raise typer.Exit(ExitCode.FOUND_WRONG)
