"""`tidelog verify` and `tidelog repair`: is every frame what was written, and what to do when one is not."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from tidelog.cli.errors import ExitCode
from tidelog.cli.session import Session, command

if TYPE_CHECKING:
    from tidelog.cli.targets import Target
    from tidelog.log.examine import LogExamination, Problem
    from tidelog.log.repair import RepairPlan

_COLUMNS = ("target", "files", "frames", "bytes", "problems")
_GROWTH_WAIT_SECONDS = 0.2


def add_to(app: typer.Typer) -> None:
    """Registers the commands."""
    command(app, "verify")(verify)
    command(app, "repair")(repair)


class Finding(NamedTuple):
    """Something wrong with a target: in words, as JSON, and what to do about it."""

    text: str
    document: dict[str, object]
    hint: str | None


class Result(NamedTuple):
    """What is known of a target; it could not be read at all when there is no examination."""

    target: Target
    examined: LogExamination | None
    findings: list[Finding]


def verify(
    session: Session,
    targets: Annotated[
        list[str] | None,
        typer.Argument(metavar="TARGET", help="Topics, or directories with WAL files [default: all topics]."),
    ] = None,
) -> None:
    """Reads every frame and checks its checksum, its length and that its offset is the next one.

    It takes no lock and changes nothing, so it works on a topic that is in use. Problems are listed on stderr with file
    and byte, and the exit code is then 1; a topic that cannot be read is a problem, and the others are read all the
    same. A torn tail, which a killed process leaves behind, counts too, though the next opening cuts it off by itself.
    """
    from tidelog.cli.targets import all_targets, find_target

    found = [find_target(session, target) for target in targets] if targets else all_targets(session)
    results = [_examine(session, target) for target in found]
    rows = [_row(result) for result in results]
    if session.as_json:
        details = [[finding.document for finding in result.findings] for result in results]
        session.output.document([{**row, "problems": one} for row, one in zip(rows, details, strict=True)])
    else:
        session.output.table(_COLUMNS, rows)
    _tell_findings(session, results)
    if any(result.findings for result in results):
        raise typer.Exit(ExitCode.FOUND_WRONG)


def _tell_findings(session: Session, results: list[Result]) -> None:
    for target, _, findings in results:
        for finding in findings:
            session.output.note(f"problem: {target.name}: {finding.text}")
    hints = [finding.hint for result in results for finding in result.findings if finding.hint is not None]
    for hint in dict.fromkeys(hints):
        session.output.note(f"hint: {hint}")


def _examine(session: Session, target: Target) -> Result:
    from tidelog.cli.errors import hint_of, text_of
    from tidelog.cli.targets import check_topic_file, examine_target
    from tidelog.errors import TidelogError

    examined: LogExamination | None = None
    findings: list[Finding] = []
    try:
        examined = examine_target(session, target, "verifying")
        problems = [p for p in examined.problems if not _is_being_written(target.directory, examined, p)]
        hint = session.repair_hint(target.name)
        findings += [Finding(str(p), _describe(p), None if p.is_torn_tail else hint) for p in problems]
        check_topic_file(target.directory)
    except (TidelogError, OSError) as error:
        findings.append(Finding(text_of(error), {"reason": text_of(error), "text": text_of(error)}, hint_of(error)))
    return Result(target, examined, findings)


def _is_being_written(directory: Path, examined: LogExamination, problem: Problem) -> bool:
    """A frame without an end in a file that grows is one that its owner is writing right now."""
    if not problem.is_torn_tail:
        return False
    time.sleep(_GROWTH_WAIT_SECONDS)
    size = next(file.size for file in examined.files if file.name == problem.file)
    return (directory / problem.file).stat().st_size > size


def _row(result: Result) -> dict[str, object]:
    examined = result.examined
    row: dict[str, object] = dict.fromkeys(_COLUMNS) | {"target": result.target.name}
    if examined is not None:
        row |= {"files": len(examined.files), "frames": examined.frames, "bytes": examined.total_bytes}
    return row | {"problems": len(result.findings)}


def _describe(problem: Problem) -> dict[str, object]:
    return {
        "file": problem.file,
        "byte": problem.byte,
        "reason": problem.reason,
        "lost_first": problem.lost_first,
        "lost_last": problem.lost_last,
        "is_torn_tail": problem.is_torn_tail,
        "text": str(problem),
    }


def repair(
    session: Session,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A topic, or a directory with WAL files.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do it.")] = False,
) -> None:
    """Says how a damaged log can be mended, and does it with --yes.

    Every good message keeps its offset and its bytes. Offsets whose bytes are damaged are marked as lost, so that
    readers are told, and can go around them (`consume --skip-gaps`). Whatever is taken out is kept beside the log, in
    removed/. Without --yes nothing is changed, and the exit code is 1 when there is something to mend.
    """
    from tidelog.cli.targets import find_target
    from tidelog.log.repair import plan_repair

    found = find_target(session, target)
    plan = plan_repair(found.directory)
    kept = plan.apply() if yes and plan.is_needed else None
    _tell_plan(session, found, plan, kept)
    if plan.is_needed and not yes:
        raise typer.Exit(ExitCode.FOUND_WRONG)


def _tell_plan(session: Session, target: Target, plan: RepairPlan, kept: list[Path] | None) -> None:
    """`kept` is None when nothing was done."""
    if session.as_json:
        session.output.document(
            {
                "target": target.name,
                "is_needed": plan.is_needed,
                "is_done": kept is not None,
                "actions": plan.actions,
                "lost": plan.lost,
                "kept": [str(path) for path in kept or []],
            }
        )
    elif not plan.is_needed:
        session.output.note(f"{target.name} needs no repair")
    else:
        _tell_actions(session, target, plan, kept)


def _tell_actions(session: Session, target: Target, plan: RepairPlan, kept: list[Path] | None) -> None:
    for action in plan.actions:
        session.output.line(f"{'would' if kept is None else 'did'}: {action}", indent="  ")
    for path in kept or []:
        print(f"kept: {path}")
    if kept is None:
        again = session.pasteable(f"`tidelog repair {shlex.quote(target.name)} --yes`")
        session.output.note(f"nothing was changed; do it with {again}")
