"""`tidelog verify`: is every frame what was written, on this disk and, if asked for, in the store."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from msgspec import to_builtins

from tidelog.cli.errors import ExitCode
from tidelog.cli.session import Session, command

if TYPE_CHECKING:
    from tidelog.cli.output import OnDone
    from tidelog.cli.targets import Target
    from tidelog.log.examine import LogExamination, Problem
    from tidelog.tier.history_check import HistoryExamination
    from tidelog.topics.storage import LogDirectory

_COLUMNS = ("target", "files", "frames", "bytes", "problems")
_COLD_COLUMNS = ("target", "files", "frames", "bytes", "objects", "object_messages", "object_bytes", "problems")
_GROWTH_WAIT_SECONDS = 0.2
_UNREADABLE_HINT = (
    "The bytes are as they were written, and no message can be read from them: "
    '`consume --skip-gaps` and on_gap="skip" leave out that one'
)


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    command(app, "verify")(verify)


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
    history: HistoryExamination | None = None


def verify(
    session: Session,
    targets: Annotated[
        list[str] | None,
        typer.Argument(metavar="TARGET", help="Topics, or directories with WAL files [default: all topics]."),
    ] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Read every object in the store as well.")] = False,
) -> None:
    """Reads every frame: its checksum and length, that its offset is the next one, and that a message is in it.

    It takes no lock and changes nothing, so it works on a topic that is in use. Problems are listed on stderr with file
    and byte, and the exit code is then 1; a topic that cannot be read is a problem, and the others are read all the
    same. A torn tail, which a killed process leaves behind, counts too, though the next opening cuts it off by itself.

    With --cold the objects in the store are read too, all of them: frames, order, sizes and checksums, and that no
    offset is missing between them.
    """
    from tidelog.cli.targets import all_targets, find_target

    found = [find_target(session, target) for target in targets] if targets else all_targets(session)
    results = [_examine(session, target) for target in found]
    if cold:
        results = _with_history(session, results)
    columns = _COLD_COLUMNS if cold else _COLUMNS
    rows = [_row(result, columns) for result in results]
    if session.as_json:
        details = [[finding.document for finding in result.findings] for result in results]
        session.output.document([{**row, "problems": one} for row, one in zip(rows, details, strict=True)])
    else:
        session.output.table(columns, rows)
    _tell_findings(session, results)
    if any(result.findings for result in results):
        raise typer.Exit(ExitCode.FOUND_WRONG)


def _tell_findings(session: Session, results: list[Result]) -> None:
    for result in results:
        for finding in result.findings:
            session.output.note(f"problem: {result.target.name}: {finding.text}")
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
        repair = session.repair_hint(target.name)
        findings += [Finding(str(p), _describe(p), _hint_for(p, repair)) for p in problems]
        check_topic_file(target.directory)
    except (TidelogError, OSError) as error:
        findings.append(Finding(text_of(error), {"reason": text_of(error), "text": text_of(error)}, hint_of(error)))
    return Result(target, examined, findings)


def _hint_for(problem: Problem, repair_hint: str) -> str | None:
    if problem.is_torn_tail:
        return None
    return _UNREADABLE_HINT if problem.is_unreadable else repair_hint


def _is_being_written(directory: Path, examined: LogExamination, problem: Problem) -> bool:
    """A frame without an end in a file that grows is one that its owner is writing right now."""
    if not problem.is_torn_tail:
        return False
    from tidelog.log.binding import BINDING_BYTES

    time.sleep(_GROWTH_WAIT_SECONDS)
    size = next(file.size for file in examined.files if file.name == problem.file)
    return (directory / problem.file).stat().st_size > BINDING_BYTES + size


def _with_history(session: Session, results: list[Result]) -> list[Result]:
    from tidelog.cli.topic_choice import require_store

    with session.look() as log:
        require_store(log)
        return [_read_history(session, log, result) for result in results]


def _read_history(session: Session, log: LogDirectory, result: Result) -> Result:
    from tidelog.cli.errors import hint_of, text_of
    from tidelog.cli.targets import unreadable_in
    from tidelog.cli.topic_choice import require_store
    from tidelog.errors import TidelogError, TopicNameError
    from tidelog.tier.history_check import check_history
    from tidelog.topics.names import parse_topic_name

    try:
        parsed, tier = parse_topic_name(result.target.name), require_store(log)
    except TopicNameError:
        return result  # a directory of files, of which no store knows
    try:
        catalog = tier.catalog(parsed.namespace, parsed.name)
        total_bytes = sum(descriptor.size for descriptor in catalog.walk(catalog.start_offset()))
        with session.output.progress(f"reading objects of {result.target.name}", total_bytes) as on_done:
            count = _Counting(on_done)
            history = check_history(
                *(catalog, tier.objects, result.target.time_field, count.add), unreadable=unreadable_in(result.target)
            )
    except TidelogError as error:
        finding = Finding(text_of(error), {"reason": text_of(error), "text": text_of(error)}, hint_of(error))
        return result._replace(findings=[*result.findings, finding])
    advice = "Put a good copy of the object in its place; `tidelog topic sweep` shows what is gone"
    hint = session.pasteable(advice, result.target.name)
    found = [
        Finding(str(p), {**to_builtins(p), "text": str(p)}, _UNREADABLE_HINT if p.is_unreadable else hint)
        for p in history.problems
    ]
    return result._replace(findings=[*result.findings, *found], history=history)


class _Counting:
    """Sums up the pieces that were read."""

    def __init__(self, on_done: OnDone) -> None:
        self._on_done = on_done
        self._done_bytes = 0

    def add(self, size: int) -> None:
        self._done_bytes += size
        self._on_done(self._done_bytes)


def _row(result: Result, columns: Sequence[str]) -> dict[str, object]:
    examined, history = result.examined, result.history
    row: dict[str, object] = dict.fromkeys(columns) | {"target": result.target.name}
    if examined is not None:
        row |= {"files": len(examined.files), "frames": examined.frames, "bytes": examined.total_bytes}
    if history is not None:
        row |= {"objects": history.objects, "object_messages": history.messages, "object_bytes": history.bytes}
    return row | {"problems": len(result.findings)}


def _describe(problem: Problem) -> dict[str, object]:
    return {
        "file": problem.file,
        "byte": problem.byte,
        "reason": problem.reason,
        "lost_first": problem.lost_first,
        "lost_last": problem.lost_last,
        "is_torn_tail": problem.is_torn_tail,
        "is_unreadable": problem.is_unreadable,
        "text": str(problem),
    }
