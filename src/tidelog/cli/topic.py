"""`tidelog topic`: list, create, describe and delete topics."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidelog.cli.errors import ExitCode
from tidelog.cli.session import Session, command, command_group

if TYPE_CHECKING:
    from tidelog.topics.storage import LogDirectory
    from tidelog.topics.topic import Topic

_COLUMNS = ("topic", "start_offset", "next_offset", "messages", "files", "bytes", "state")

_NARROWER = (
    ("topic", "next_offset", "messages", "files", "bytes", "state"),
    ("topic", "messages", "bytes", "state"),
)

TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="namespace/name.")]


def add_to(app: typer.Typer) -> None:
    """Registers the group."""
    group = command_group("List, create, describe and delete topics.")
    commands: dict[str, Callable[..., None]] = {
        "list": list_topics,
        "create": create,
        "describe": describe,
        "delete": delete,
    }
    for name, work in commands.items():
        command(group, name)(work)
    app.add_typer(group, name="topic")


def list_topics(session: Session) -> None:
    """Lists the topics with their offsets and sizes.

    A topic that cannot be opened is listed as well: its state is damaged or unreadable, and stderr (the field problem
    with --json) says why. The exit code stays 0.
    """
    from tidelog.cli.topic_names import topic_names

    problems: dict[str, Exception] = {}
    with session.look() as log:
        rows = [_row(log, name, problems) for name in topic_names(log)]
    if session.as_json:
        session.output.document(rows)
    else:
        session.output.table(_COLUMNS, rows, narrower=_NARROWER)
        _tell_problems(session, problems)


def _tell_problems(session: Session, problems: dict[str, Exception]) -> None:
    from tidelog.cli.errors import hint_of, text_of
    from tidelog.errors import CorruptionError, GapError

    for name, error in problems.items():
        session.output.note(f"problem: {name}: {text_of(error)}")
    hints = [
        session.repair_hint(name) if isinstance(error, CorruptionError | GapError) else hint_of(error)
        for name, error in problems.items()
    ]
    for hint in dict.fromkeys(hint for hint in hints if hint is not None):
        session.output.note(f"hint: {hint}")


def _row(log: LogDirectory, name: str, problems: dict[str, Exception]) -> dict[str, object]:
    """One topic; what keeps it from being opened is put into `problems`."""
    from tidelog.cli.errors import text_of
    from tidelog.cli.targets import check_topic_file
    from tidelog.errors import DataError, TidelogError

    row: dict[str, object] = dict.fromkeys(_COLUMNS) | {"topic": name, "state": "ok", "problem": None}
    try:
        row["files"], row["bytes"] = _usage(log.root / name)
        topic = log.topic(name)
        row |= {"start_offset": topic.start_offset, "next_offset": topic.next_offset}
        row["messages"] = topic.next_offset - topic.start_offset
        check_topic_file(log.root / name)
    except (TidelogError, OSError) as error:
        problems[name] = error
        state = "damaged" if isinstance(error, DataError) else "unreadable"
        row |= {"state": state, "problem": text_of(error)}
    return row


def _usage(directory: Path) -> tuple[int, int]:
    """How many files of messages a topic has, and their bytes."""
    from tidelog.log.names import wal_files

    sizes = {entry.name: entry.stat().st_size for entry in directory.iterdir()}
    names = [file for _, file in wal_files(list(sizes))]
    return len(names), sum(sizes[file] for file in names)


def create(
    session: Session,
    topic: TopicArgument,
    if_missing: Annotated[bool, typer.Option("--if-missing", help="An existing topic is fine.")] = False,
) -> None:
    """Makes an empty topic, and the log directory where there is none.

    `tidelog produce` makes topics by itself; this is for those who want them to exist before.
    """
    from tidelog.errors import InputError
    from tidelog.topics.names import parse_topic_name

    parse_topic_name(topic)  # before a directory is made for it
    with session.open() as log:
        exists = log.has_topic(topic)
        if exists and not if_missing:
            raise InputError(f"the topic {topic} exists already", hint="Allow that with --if-missing")
        log.topic(topic)
        made = {"topic": topic, "directory": str(log.topic_directory(topic)), "created": not exists}
    if session.as_json:
        session.output.document(made)
    else:
        session.output.note(f"{'kept' if exists else 'created'} {topic} in {made['directory']}")


def describe(session: Session, topic: TopicArgument) -> None:
    """Shows where a topic begins and ends, its files, its bytes and its times."""
    from tidelog.cli.topic_names import require_topic

    with session.look() as log:
        require_topic(log, topic)
        opened = log.topic(topic)
        start, end = opened.start_offset, opened.next_offset
        files, size = _usage(log.topic_directory(topic))
        described: dict[str, object] = {
            "topic": topic,
            "directory": str(log.topic_directory(topic)),
            "start_offset": start,
            "next_offset": end,
            "messages": end - start,
            "files": files,
            "bytes": size,
            "first_timestamp": _timestamp(opened, start, end),
            "last_timestamp": _timestamp(opened, end - 1, end),
        }
    session.output.record(described)


def _timestamp(topic: Topic, offset: int, end: int) -> object:
    """The time of one message; None where there is none, or where a repair marked it as lost."""
    messages = topic.read(offset, offset + 1, on_gap="skip") if 0 <= offset < end else iter(())
    return next((message.timestamp for message in messages), None)


def delete(
    session: Session,
    topic: TopicArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Deletes a topic and every message in it, for good.

    It asks first; where nobody can answer, it needs --yes. After a no the exit code is 1.
    """
    from tidelog.cli.topic_names import require_topic

    with session.open() as log:
        require_topic(log, topic)
        files, size = _usage(log.topic_directory(topic))
        if not yes and not _is_confirmed(topic, files, size):
            session.output.note("nothing was deleted")
            raise typer.Exit(ExitCode.FOUND_WRONG)
        log.delete_topic(topic)
    if session.as_json:
        session.output.document({"topic": topic, "deleted": True, "files": files, "bytes": size})
    else:
        session.output.note(f"deleted {topic}")


def _is_confirmed(topic: str, files: int, size: int) -> bool:
    from tidelog.cli.output import counted, human_bytes
    from tidelog.errors import InputError

    if not sys.stdin.isatty():
        raise InputError(f"deleting {topic} needs a yes", hint="Give it with --yes")
    return typer.confirm(f"Delete {topic} ({counted(files, 'file')}, {human_bytes(size)}) for good?", err=True)
