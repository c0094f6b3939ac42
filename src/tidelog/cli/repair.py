"""`tidelog repair`: how a damaged log can be mended, from the store where that has a copy, and doing it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidelog.cli.errors import ExitCode
from tidelog.cli.session import Session, command

if TYPE_CHECKING:
    from tidelog.cli.targets import Target
    from tidelog.log.repair import OtherCopy, RepairPlan


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    command(app, "repair")(repair)


def repair(
    session: Session,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A topic, or a directory with WAL files.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do it.")] = False,
    local_only: Annotated[
        bool, typer.Option("--local-only", help="Do not ask the store: what is damaged here is marked as lost.")
    ] = False,
) -> None:
    """Says how a damaged log can be mended, and does it with --yes.

    Every good message keeps its offset and its bytes. What is damaged or missing is put back from the store, where that
    has it; otherwise it is marked as lost, so that readers are told, and can go around it (`consume --skip-gaps`).
    Whatever is taken out is kept beside the log, in removed/. Without --yes nothing is changed, and the exit code is 1
    when there is something to mend.
    """
    from tidelog.cli.targets import find_target, require_files
    from tidelog.log.repair import plan_repair

    found = find_target(session, target)
    require_files(found)
    with nullcontext() if local_only else _other_copy(session, found) as copy, _hinted():
        plan = plan_repair(found.directory, copy=copy)
        kept = plan.apply() if yes and plan.is_needed else None
    _tell_plan(session, found, plan, kept)
    if plan.is_needed and not yes:
        raise typer.Exit(ExitCode.FOUND_WRONG)


@contextmanager
def _other_copy(session: Session, target: Target) -> Iterator[OtherCopy | None]:
    """What the store has of a topic; None for files that no store knows, or that are not known to be the topic's."""
    from tidelog.errors import NotFoundError, TopicNameError
    from tidelog.files import LocalFiles
    from tidelog.tier.cold_copy import ColdCopy
    from tidelog.tier.local_claim import read_local_claim
    from tidelog.topics.names import parse_topic_name

    try:
        name, log = parse_topic_name(target.name), session.look()
    except (TopicNameError, NotFoundError):
        yield None
        return
    with log:
        claim = None if log.tier is None else read_local_claim(LocalFiles(), target.directory)
        if log.tier is None or claim is None or name.directory(log.root) != target.directory.absolute():
            yield None
        else:
            history = log.tier.view(name.namespace, name.name, None, target.time_field).history
            yield ColdCopy(history, claim.epoch)


@contextmanager
def _hinted() -> Iterator[None]:
    from tidelog.errors import StoreUnavailableError

    try:
        yield
    except StoreUnavailableError as error:
        hint = "Try again when the store can be reached, or mark what is damaged here as lost with --local-only"
        raise StoreUnavailableError(error.message, operation=error.operation, path=error.path, hint=hint) from error


def _tell_plan(session: Session, target: Target, plan: RepairPlan, kept: list[Path] | None) -> None:
    """`kept` is None when nothing was done."""
    if session.as_json:
        session.output.document(
            {
                "target": target.name,
                "is_needed": plan.is_needed,
                "is_done": kept is not None,
                "actions": plan.actions,
                "restored": plan.restored,
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
