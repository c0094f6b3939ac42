"""`tidelog verify` checks every frame on this disk and, on request, in the store. `tidelog repair` plans and applies
the repair of a damaged log, from the store where it has a copy.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidelog.cli.errors import ExitCode, hint_of, text_of
from tidelog.cli.session import Session, command
from tidelog.cli.topic.names import Target, all_targets, find_target, find_targets, require_files, require_store
from tidelog.cold.ownership import read_local_claim
from tidelog.cold.verify import ColdCopy
from tidelog.errors import NotFoundError, StoreUnavailableError, TidelogError, TopicNameError
from tidelog.files import LocalFiles
from tidelog.findings import Finding, VerifyReport
from tidelog.log.repair import OtherCopy, RepairPlan, plan_repair
from tidelog.topics.directory import LogDirectory
from tidelog.topics.names import parse_topic_name
from tidelog.topics.verify import verify_topic

if TYPE_CHECKING:
    from collections.abc import Iterable


_COLUMNS = ("target", "files", "frames", "bytes", "problems")
_COLD_COLUMNS = ("target", "files", "frames", "bytes", "objects", "object_messages", "object_bytes", "problems")


def add_to(app: typer.Typer) -> None:
    """Registers both commands."""
    command(app, "verify", remote="verify", is_local_beside=True)(verify)
    command(app, "repair")(repair)


def verify(
    session: Session,
    targets: Annotated[
        list[str] | None,
        typer.Argument(metavar="TARGET", help="Topics, or directories with WAL files [default: all topics]."),
    ] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Read every object in the store as well.")] = False,
) -> None:
    """Reads and checks every frame. Its checksum and length, that its offset is the next one, and that it contains a
    message. Of a topic with partitions all are read.

    It takes no lock and changes nothing, so it works on a topic that is in use. Problems are listed on stderr with file
    and byte, and the exit code is then 1; a topic that cannot be read is a problem, and the others are still read. A
    torn tail, which a killed process leaves, counts too, though the next opening truncates it by itself.

    With --cold the objects in the store are read too, all of them: frames, order, sizes and checksums, the catalog, and
    that no offset is missing between them. --server has a server verify its topics.
    """
    named = [one for target in targets or () for one in find_targets(session, target)]
    found = named if targets else all_targets(session)
    if not cold:
        reports = [_verify(session, target) for target in found]
    else:
        with session.look() as log:
            require_store(log)
            reports = [_verify(session, target, log) for target in found]
    show_reports(session, reports, cold)


def show_reports(session: Session, reports: list[VerifyReport], cold: bool) -> None:
    """A row for each, then the findings; leaves with 1 if there are any."""
    columns = _COLD_COLUMNS if cold else _COLUMNS
    rows = [{**dict.fromkeys(columns), "target": one.subject, **one.read} for one in reports]
    if session.as_json:
        session.output.document(
            [{**row, **_verdict(one), "problems": len(one.findings)} for row, one in zip(rows, reports, strict=True)]
        )
    else:
        session.output.table(
            columns, [{**row, "problems": len(one.findings)} for row, one in zip(rows, reports, strict=True)]
        )
    tell_findings(session, [finding for one in reports for finding in one.findings])


def _verdict(report: VerifyReport) -> dict[str, object]:
    return {"ok": report.ok, "verdict": report.verdict, "findings": documents(report.findings)}


def documents(findings: Iterable[Finding]) -> list[dict[str, object]]:
    """Findings as JSON: what they have, and their text."""
    from msgspec import to_builtins

    return [{**to_builtins(one), "text": one.text} for one in findings]


def tell_findings(session: Session, findings: list[Finding]) -> None:
    """Lists them on stderr, each fix once, and leaves with 1 if there are any."""
    for one in findings:
        session.output.note(f"problem: {one}")
    for hint in dict.fromkeys(session.pasteable(one.fix, one.subject) for one in findings if one.fix is not None):
        session.output.note(f"hint: {hint}")
    if findings:
        raise typer.Exit(ExitCode.FOUND_WRONG)


def _verify(session: Session, target: Target, log: LogDirectory | None = None) -> VerifyReport:
    """A topic that cannot be read is a finding; if the store fails, the disk is still reported."""
    import msgspec

    try:
        return _verified(session, target, log)
    except (TidelogError, OSError) as error:
        finding = Finding(subject=target.name, kind="access", message=text_of(error), fix=hint_of(error))
    read = VerifyReport(subject=target.name) if log is None else _verify(session, target)
    return msgspec.structs.replace(read, findings=(*read.findings, finding))


def _verified(session: Session, target: Target, log: LogDirectory | None) -> VerifyReport:
    catalog = objects = None
    if log is not None:
        try:
            parsed, tier = parse_topic_name(target.name), require_store(log)
            catalog, objects = tier.catalog(parsed.namespace, parsed.name), tier.objects
        except TopicNameError:
            catalog = objects = None  # a directory of files, of which no store knows
    with session.output.steps() as on_step:
        return verify_topic(
            target.name,
            target.directory,
            catalog,
            objects,
            holds_messages=target.time_field is not None,
            on_step=on_step,
        )


# `tidelog repair`: plans and applies the repair of a damaged log, from the store where it has a copy.


def repair(
    session: Session,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A topic, or a directory with WAL files.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do it.")] = False,
    local_only: Annotated[
        bool, typer.Option("--local-only", help="Do not ask the store: what is damaged here is marked as lost.")
    ] = False,
) -> None:
    """Shows how a damaged log can be repaired, and does it with --yes.

    Every good message keeps its offset and its bytes. Damaged or missing messages are restored from the store, if it
    has them; otherwise they are marked as lost, so that readers get an error, and can skip them (`consume
    --skip-gaps`). Everything that is removed is kept beside the log, in removed/. Without --yes nothing is changed, and
    the exit code is 1 if there is something to repair.
    """
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
    try:
        name, log = parse_topic_name(target.name), session.look()
    except (TopicNameError, NotFoundError):
        yield None
        return
    with log:
        claim = None if log._tier is None else read_local_claim(LocalFiles(), target.directory)
        if log._tier is None or claim is None or name.directory(log.root) != target.directory.absolute():
            yield None
        else:
            history = log._tier.view(name.namespace, name.name, None, target.time_field).history
            yield ColdCopy(history, claim.epoch)


@contextmanager
def _hinted() -> Iterator[None]:
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
