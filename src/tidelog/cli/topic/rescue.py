"""`tidelog topic rescue`: recovers messages accepted here but not shipped when another node took the topic over."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO, NamedTuple

import typer

from tidelog.cli.output import counted, json_lines
from tidelog.cli.session import Session, confirm
from tidelog.cli.topic.names import TopicArgument
from tidelog.clock import to_datetime
from tidelog.errors import ConflictError, InputError, NotFoundError, offsets_text
from tidelog.topics.directory import LogDirectory, why_not_ours
from tidelog.topics.names import parse_topic_name
from tidelog.topics.rescue import RescuableTail, Rescue

COLUMNS = ("tail", "epoch", "first_offset", "last_offset", "messages", "file_bytes", "set_aside")


class _Action(NamedTuple):
    """What is to be done with the tails; nothing: they are listed."""

    output: Path | None
    into: str | None
    discard: bool

    @property
    def chosen(self) -> int:
        return (self.output is not None) + (self.into is not None) + self.discard


def rescue(
    session: Session,
    topic: TopicArgument,
    tail: Annotated[str | None, typer.Option("--tail", metavar="NAME", help="This one [default: all].")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", readable=False, help="Write the messages as lines of JSON."),
    ] = None,
    into: Annotated[str | None, typer.Option("--into", metavar="TOPIC", help="Append the messages to a topic.")] = None,
    discard: Annotated[bool, typer.Option("--discard", help="Delete them for good.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before deleting.")] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Even into a topic that another node owns; that node is fenced.")
    ] = False,
) -> None:
    """Returns messages that a takeover left behind. Those that were accepted here and not shipped when another node
    took TOPIC over; without more options they are listed.

    The new owner has other messages under the same offsets, so these never regain their offsets. --output writes them
    as `tidelog consume --json` does (- is stdout), for `tidelog produce --from-json`. --into appends them to a topic as
    new messages, with the headers tidelog-rescued-from and tidelog-rescued-offset; interrupted and run again, it
    continues after what it finds there. Neither deletes anything; --discard does that, after confirmation.
    """
    action = _Action(output, into, discard)
    if action.chosen > 1:
        raise InputError("--output, --into and --discard cannot be combined", hint="Give one of them")
    parse_topic_name(topic)
    if into is not None:
        parse_topic_name(into)
    if action.chosen == 0:
        _list(session, topic, tail)
        return
    with session.open(runs_in_background=False) as log:
        _act(session, log, topic, tail, action, yes=yes, take_over=take_over)


def _list(session: Session, topic: str, wanted: str | None) -> None:
    with session.look() as log:
        tails = _chosen(Rescue(log, topic).tails(), wanted)
    session.output.rows(COLUMNS, [_row(tail) for tail in tails])
    if not tails:
        session.output.note(f"there is nothing of {topic} to rescue in {log.root}")


def _chosen(tails: list[RescuableTail], wanted: str | None) -> list[RescuableTail]:
    if wanted is not None and wanted not in {tail.name for tail in tails}:
        names = ", ".join(tail.name for tail in tails) or "none"
        raise NotFoundError(f"there is no tail {wanted}", hint=f"Existing tails: {names}")
    return [tail for tail in tails if wanted in (None, tail.name)]


def _row(tail: RescuableTail) -> dict[str, object]:
    return {
        "tail": tail.name,
        "epoch": tail.epoch,
        "first_offset": tail.first_offset if tail.count else None,
        "last_offset": tail.next_offset - 1 if tail.count else None,
        "messages": tail.count,
        "file_bytes": tail.file_bytes,
        "set_aside": None if tail.set_aside_us is None else to_datetime(tail.set_aside_us),
    }


def _act(
    session: Session,
    log: LogDirectory,
    topic: str,
    wanted: str | None,
    action: _Action,
    *,
    yes: bool,
    take_over: bool,
) -> None:
    rescue = Rescue(log, topic)
    tails = _chosen(rescue.set_aside(), wanted)
    if not tails:
        session.output.note(f"there is nothing of {topic} to rescue in {log.root}")
    elif action.output is not None:
        _write(session, rescue, tails, action.output)
    elif action.into is not None:
        _append(session, log, rescue, tails, action.into, take_over)
    else:
        _discard(session, rescue, tails, yes)


def _write(session: Session, rescue: Rescue, tails: list[RescuableTail], path: Path) -> None:
    to_line, written = json_lines(rescue.topic), 0
    handed_over = sum(map(rescue.handed_over, tails))
    total = sum(tail.count for tail in tails) - handed_over
    with session.output.progress(f"writing {path}", total) as on_done, _new_file(path) as stream:
        for tail in tails:
            for message in rescue.messages(tail):
                stream.write(to_line(message))
                written += 1
                if written % 1000 == 0:
                    on_done(written)
    if session.as_json and str(path) != "-":
        counts = {"messages": written, "lost": total - written, "handed_over": handed_over}
        session.output.document({"topic": rescue.topic, "output": str(path), **counts})
        return
    left_out = _lost(total - written) + _handed_over(handed_over)
    session.output.note(f"wrote {_messages(written)} of {rescue.topic} to {path}{left_out}")
    session.output.note("the tails are kept; --discard deletes them")


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that is there whole and synced when the body is done, and is not there otherwise; none is replaced."""
    if str(path) == "-":
        yield sys.stdout.buffer
        return
    if path.exists():
        raise InputError(f"{path} already exists", hint="Name another file: rescue does not overwrite files")
    temporary = path.with_name(path.name + ".part")
    try:
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def _append(
    session: Session, log: LogDirectory, rescue: Rescue, tails: list[RescuableTail], into: str, take_over: bool
) -> None:
    why = None if take_over else why_not_ours(log, into)
    if why is not None:
        hint = (
            "Append them there: --output FILE here, `tidelog produce --from-json` there. Or take it over: --take-over"
        )
        raise ConflictError(why, hint=hint)
    target, documents = log.topic(into, take_over=take_over), []
    for tail in tails:
        before = target.next_offset
        with session.output.progress(f"appending {tail.name}", tail.count) as on_done:
            done = rescue.append_to(tail, target, on_done)
        where = f": {offsets_text(before, target.next_offset - 1)}" if done.appended else ""
        already = f", {_messages(done.already_there)} had been appended before" if done.already_there else ""
        documents.append({"tail": tail.name, "into": into, "appended": done.appended, "lost": done.lost})
        documents[-1] |= {"already_there": done.already_there, "handed_over": done.handed_over}
        if not session.as_json:
            left_out = _lost(done.lost) + _handed_over(done.handed_over)
            text = f"{tail.name}: appended {_messages(done.appended)} to {into}{where}{already}{left_out}"
            session.output.note(text)
    if session.as_json:
        session.output.document(documents)
    else:
        session.output.note("the tails are kept; --discard deletes them")


def _discard(session: Session, rescue: Rescue, tails: list[RescuableTail], yes: bool) -> None:
    count = sum(tail.count for tail in tails)
    names = ", ".join(tail.name for tail in tails)
    question = f"Delete {names} of {rescue.topic} ({_messages(count)} that are nowhere else) for good?"
    confirm(session, yes, question, f"delete the tails of {rescue.topic}")
    for tail in tails:
        rescue.discard(tail)
    discarded = {"topic": rescue.topic, "discarded": [tail.name for tail in tails], "messages": count}
    session.output.result(discarded, f"deleted {names}: {_messages(count)}")


def _messages(count: int) -> str:
    return counted(count, "message")


def _lost(count: int) -> str:
    return f", without {_messages(count)} that an earlier repair marked as lost" if count else ""


def _handed_over(count: int) -> str:
    return f", without {_messages(count)} that the owner of the topic has ingested again" if count else ""
