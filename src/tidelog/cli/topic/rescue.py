"""`tidelog topic rescue`: recovers messages accepted here but not shipped when another node took the topic over."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO, NamedTuple

import typer
from msgspec.structs import asdict, replace

from tidelog.cli.output import counted, json_lines
from tidelog.cli.session import Session, confirm
from tidelog.cli.topic.names import TopicArgument
from tidelog.clock import to_datetime
from tidelog.errors import ConflictError, InputError, NotFoundError
from tidelog.topics.directory import LogDirectory, why_not_ours
from tidelog.topics.message import Message
from tidelog.topics.names import parse_topic_name
from tidelog.topics.partitioned import PartitionedTopic
from tidelog.topics.rescue import RescuableTail, Rescue, RescueInto
from tidelog.topics.topic import Topic

COLUMNS = ("partition", "tail", "epoch", "first_offset", "last_offset", "messages", "file_bytes", "set_aside")


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

    Of a topic with partitions the tails of all are meant. In their own topic, and in one with as many partitions,
    messages get the partition that they came from, in another one that of their key; an absent one is created with as
    many.
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
        found = _chosen([(one, one.tails()) for one in Rescue.of_partitions(log, topic)], wanted)
    session.output.rows(COLUMNS, [_row(rescue, tail) for rescue, tail in found])
    if not found:
        session.output.note(f"there is nothing of {topic} to rescue in {log.root}")


_Tails = list[tuple[Rescue, RescuableTail]]


def _chosen(partitions: list[tuple[Rescue, list[RescuableTail]]], wanted: str | None) -> _Tails:
    found = [(rescue, tail) for rescue, tails in partitions for tail in tails]
    if wanted is not None and wanted not in {tail.name for _, tail in found}:
        names = ", ".join(tail.name for _, tail in found) or "none"
        raise NotFoundError(f"there is no tail {wanted}", hint=f"Existing tails: {names}")
    return [(rescue, tail) for rescue, tail in found if wanted in (None, tail.name)]


def _row(rescue: Rescue, tail: RescuableTail) -> dict[str, object]:
    return {
        "partition": rescue.origin.number,
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
    tails = _chosen([(one, one.set_aside()) for one in Rescue.of_partitions(log, topic)], wanted)
    if not tails:
        session.output.note(f"there is nothing of {topic} to rescue in {log.root}")
    elif action.output is not None:
        _write(session, topic, tails, action.output)
    elif action.into is not None:
        _append(session, log, tails, action.into, take_over)
    else:
        _discard(session, topic, tails, yes)


def _write(session: Session, topic: str, tails: _Tails, path: Path) -> None:
    handed_over = sum(rescue.handed_over(tail) for rescue, tail in tails)
    total = sum(tail.count for _, tail in tails) - handed_over
    found = (
        replace(message, partition=rescue.origin.number) for rescue, tail in tails for message in rescue.messages(tail)
    )
    write_tails(session, topic, path, found, total, handed_over)


def write_tails(
    session: Session, topic: str, path: Path, messages: Iterable[Message], total: int, handed_over: int
) -> None:
    """Writes messages to a file; `total` are those that the tails have."""
    to_line, written = json_lines(topic), 0
    with session.output.progress(f"writing {path}", total) as on_done, _new_file(path) as stream:
        for message in messages:
            stream.write(to_line(message))
            written += 1
            if written % 1000 == 0:
                on_done(written)
    if session.as_json and str(path) != "-":
        counts = {"messages": written, "lost": total - written, "handed_over": handed_over}
        session.output.document({"topic": topic, "output": str(path), **counts})
        return
    left_out = _lost(total - written) + _handed_over(handed_over)
    session.output.note(f"wrote {_messages(written)} of {topic} to {path}{left_out}")
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


def _append(session: Session, log: LogDirectory, tails: _Tails, into: str, take_over: bool) -> None:
    """Nothing is appended if one of the targets is not ours."""
    _refuse_beside_cluster(log)
    logs = log.partition_logs(into)
    own = [rescue.origin.number for rescue, _ in tails if rescue.origin.topic == into]
    for name in [logs[number] for number in own] or logs:
        why = None if take_over else why_not_ours(log, name)
        if why is not None:
            hint = (
                "Append them there: --output FILE here, `tidelog produce --from-json` there. Or take it over: "
                "--take-over"
            )
            raise ConflictError(why, hint=hint)
    count = tails[0][0].origin.partitions
    if count > 1 and not log.has_topic(into):
        log.topic(into, partitions=count)
    target: Topic | PartitionedTopic = log.topic(into, take_over=take_over)
    logs = log.partition_logs(into)
    where = RescueInto(into, logs, target.partition)
    documents = []
    for rescue, tail in tails:
        with session.output.progress(f"appending {tail.name}", tail.count) as on_done:
            done = rescue.append_into(tail, where, on_done)
        documents.append(appended_row(rescue.origin.number, tail.name, into, asdict(done)))
        if not session.as_json:
            session.output.note(appended_text(documents[-1]))
    if session.as_json:
        session.output.document(documents)
    else:
        session.output.note("the tails are kept; --discard deletes them")


def _refuse_beside_cluster(log: LogDirectory) -> None:
    """InputError for the directory of a node of a cluster: topics and owners are settled by its nodes."""
    from tidelog.cluster.joining import can_join
    from tidelog.cluster.operations import ClusterOperations

    if not can_join(log):
        return
    if any(node.state != "gone" for node in ClusterOperations(*log._shared_metadata(), log._clock).nodes()):
        raise ConflictError(
            "other nodes of the cluster serve its topics",
            hint="Start the node of this directory, and run this again: it appends them wherever the topic is served",
        )


def appended_row(partition: int, tail: str, into: str | None, done: Mapping[str, int]) -> dict[str, object]:
    """What became of a tail."""
    return {"partition": partition, "tail": tail, "into": into, **done}


def appended_text(row: Mapping[str, object]) -> str:
    """The same for people."""
    done = {name: value for name, value in row.items() if isinstance(value, int)}
    already = f", {_messages(done['already_there'])} had been appended before" if done["already_there"] else ""
    left_out = _lost(done["lost"]) + _handed_over(done["handed_over"])
    return f"{row['tail']}: appended {_messages(done['appended'])} to {row['into']}{already}{left_out}"


def _discard(session: Session, topic: str, tails: _Tails, yes: bool) -> None:
    count = sum(tail.count for _, tail in tails)
    names = ", ".join(tail.name for _, tail in tails)
    question = f"Delete {names} of {topic} ({_messages(count)} that are nowhere else) for good?"
    confirm(session, yes, question, f"delete the tails of {topic}")
    for rescue, tail in tails:
        rescue.discard(tail)
    discarded = {"topic": topic, "discarded": [tail.name for _, tail in tails], "messages": count}
    session.output.result(discarded, f"deleted {names}: {_messages(count)}")


def _messages(count: int) -> str:
    return counted(count, "message")


def _lost(count: int) -> str:
    return f", without {_messages(count)} that an earlier repair marked as lost" if count else ""


def _handed_over(count: int) -> str:
    return f", without {_messages(count)} that the owner of the topic has ingested again" if count else ""
