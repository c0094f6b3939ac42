"""`tidelog verify` and `tidelog repair`: is every frame what was written, and what to do when one is not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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


def verify(
    session: Session,
    targets: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TARGET]...", help="Topics, or directories with WAL files [default: all topics]."),
    ] = None,
) -> None:
    """Reads every frame and checks its checksum, its length and that its offset is the next one.

    It takes no lock and changes nothing, so it works on a topic that is in use. Problems are listed on stderr with file
    and byte, and the exit code is then 1. A torn tail, which a killed process leaves behind, counts as a problem too,
    though the next opening cuts it off by itself.
    """
    from tidelog.cli.targets import all_targets, find_target

    found = [find_target(session, target) for target in targets] if targets else all_targets(session)
    results = [(target, *_examine(session, target)) for target in found]
    rows = [_row(target, examined, problems) for target, examined, problems in results]
    if session.as_json:
        details = [[_describe(problem) for problem in problems] for _, _, problems in results]
        session.output.document([{**row, "problems": one} for row, one in zip(rows, details, strict=True)])
    else:
        session.output.table(_COLUMNS, rows)
    _tell_problems(session, results)


def _tell_problems(session: Session, results: list[tuple[Target, LogExamination, list[Problem]]]) -> None:
    for target, _, problems in results:
        for problem in problems:
            session.output.note(f"problem: {target.name}: {problem}")
    damaged = [target.name for target, _, problems in results if any(not p.is_torn_tail for p in problems)]
    for name in damaged:
        session.output.note(f"hint: `tidelog repair {name}` says what can be done")
    if any(problems for _, _, problems in results):
        raise typer.Exit(ExitCode.FOUND_WRONG)


def _examine(session: Session, target: Target) -> tuple[LogExamination, list[Problem]]:
    from tidelog.cli.targets import examine_target

    examined = examine_target(session, target, "verifying")
    return examined, [p for p in examined.problems if not _is_being_written(target.directory, examined, p)]


def _is_being_written(directory: Path, examined: LogExamination, problem: Problem) -> bool:
    """A frame without an end in a file that grows is one that its owner is writing right now."""
    if not problem.is_torn_tail:
        return False
    time.sleep(_GROWTH_WAIT_SECONDS)
    return (directory / problem.file).stat().st_size > examined.files[-1].size


def _row(target: Target, examined: LogExamination, problems: list[Problem]) -> dict[str, object]:
    return {
        "target": target.name,
        "files": len(examined.files),
        "frames": examined.frames,
        "bytes": examined.total_bytes,
        "problems": len(problems),
    }


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
    kept = plan.apply() if yes and plan.is_needed else []
    _tell_plan(session, found, plan, kept)
    if plan.is_needed and not yes:
        raise typer.Exit(ExitCode.FOUND_WRONG)


def _tell_plan(session: Session, target: Target, plan: RepairPlan, kept: list[Path]) -> None:
    output = session.output
    if session.as_json:
        output.document(
            {
                "target": target.name,
                "is_needed": plan.is_needed,
                "is_done": bool(kept),
                "actions": plan.actions,
                "lost": plan.lost,
                "kept": [str(path) for path in kept],
            }
        )
        return
    if not plan.is_needed:
        output.note(f"{target.name} needs no repair")
        return
    verb = "did" if kept else "would"
    for action in plan.actions:
        print(f"{verb}: {action}")
    for path in kept:
        print(f"kept: {path}")
    if not kept:
        output.note("nothing was changed; do it with --yes")
