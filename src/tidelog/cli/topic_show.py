"""`tidelog topic list` and `tidelog topic describe`: what there is, on this disk and in the store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidelog.cli.session import Session

if TYPE_CHECKING:
    from tidelog.tier.catalog import Catalog
    from tidelog.topics.storage import LogDirectory
    from tidelog.topics.topic import Topic

_COLUMNS = (
    "topic",
    "start_offset",
    "hot_start_offset",
    "shipped_offset",
    "next_offset",
    "messages",
    "files",
    "bytes",
    "state",
)

_OFFSETS = ("start_offset", "hot_start_offset", "shipped_offset", "next_offset", "messages")

_NARROWER = (
    ("topic", "start_offset", "shipped_offset", "next_offset", "messages", "bytes", "state"),
    ("topic", "next_offset", "messages", "bytes", "state"),
    ("topic", "messages", "bytes", "state"),
)

TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="namespace/name.")]


def list_topics(session: Session) -> None:
    """Lists the topics with their offsets and sizes: those on this disk and those in the catalog.

    Messages from start_offset on can be read; those from hot_start_offset on are on this disk, those below
    shipped_offset are in the store. Files and bytes are those on this disk. A topic whose state is live keeps nothing
    (reliable=False): what it has is known only in the process that has it open.

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

    row: dict[str, object] = dict.fromkeys(_COLUMNS) | {"topic": name, "reliable": None, "problem": None}
    try:
        row["files"], row["bytes"] = usage(log.root / name)
        row |= _offsets(log, log.topic(name))
        row["state"] = "ok" if row["reliable"] else "live"
        check_topic_file(log.root / name)
    except (TidelogError, OSError) as error:
        problems[name] = error
        state = "damaged" if isinstance(error, DataError) else "unreadable"
        row |= {"state": state, "problem": text_of(error)}
    return row


def _offsets(log: LogDirectory, topic: Topic) -> dict[str, object]:
    if not topic.is_reliable:
        return {**dict.fromkeys(_OFFSETS), "reliable": False}
    start, end = topic.start_offset, topic.next_offset
    return {
        "start_offset": start,
        "hot_start_offset": topic.hot_start_offset,
        "shipped_offset": None if log.tier is None else topic.shipped_offset,
        "next_offset": end,
        "messages": max(0, end - start),
        "reliable": True,
    }


def usage(directory: Path) -> tuple[int, int]:
    """How many files of messages a topic has on this disk, and their bytes; none where all of it is in the store."""
    from tidelog.log.names import wal_files

    try:
        sizes = {entry.name: entry.stat().st_size for entry in directory.iterdir()}
    except FileNotFoundError:
        return 0, 0
    names = [file for _, file in wal_files(list(sizes))]
    return len(names), sum(sizes[file] for file in names)


def describe(session: Session, topic: TopicArgument) -> None:
    """Shows where a topic begins and ends, its files, its bytes, its times and its own settings.

    With a store also: who owns it and under which epoch, whether it is sealed, what the store has of it, and how much
    is not there yet (lag), which is what the loss of this disk would cost. What `tidelog topic rescue` would return is
    counted as to_rescue. A topic that is not reliable is a live one: it keeps nothing, and what it has is known only in
    the process that has it open.
    """
    from tidelog.cli.topic_choice import catalog_of
    from tidelog.cli.topic_names import require_topic
    from tidelog.cli.topic_settings import own_settings

    with session.look() as log:
        require_topic(log, topic)
        opened, directory, catalog = log.topic(topic), log.topic_directory(topic), catalog_of(log, topic)
        start, end = opened.start_offset, opened.next_offset
        files, size = usage(directory)
        described: dict[str, object] = {
            "topic": topic,
            "id": _log_id(directory, catalog),
            "mode": log.mode,
            "directory": str(directory),
            **_offsets(log, opened),
            "files": files,
            "bytes": size,
            "first_timestamp": _timestamp(opened, start, end),
            "last_timestamp": _timestamp(opened, end - 1, end),
            "settings": own_settings(catalog, directory),
            "to_rescue": _to_rescue(log, topic),
        }
        if catalog is not None and opened.is_reliable:
            described |= _in_store(log, opened, catalog)
    session.output.record(described)


def _log_id(directory: Path, catalog: Catalog | None) -> str | None:
    """Which log it is; None for one that keeps nothing."""
    from tidelog.files import LocalFiles
    from tidelog.log.bound_files import known_log_id

    found = None if catalog is None else catalog.owner()
    if found is not None:
        return found[0].log_id
    return known_log_id(LocalFiles(), directory) if directory.is_dir() else None


def _to_rescue(log: LogDirectory, topic: str) -> int:
    """Messages that `tidelog topic rescue` would return, whether they were put aside already or not."""
    from tidelog.topics.rescue import Rescue

    return sum(tail.count for tail in Rescue(log, topic).tails())


def _timestamp(topic: Topic, offset: int, end: int) -> object:
    """The time of one message; None where there is none, or where a repair marked it as lost."""
    messages = topic.read(offset, offset + 1, on_gap="skip") if topic.start_offset <= offset < end else iter(())
    return next((message.timestamp for message in messages), None)


def _in_store(log: LogDirectory, topic: Topic, catalog: Catalog) -> dict[str, object]:
    from tidelog.cli.topic_choice import sealed_marker

    found = catalog.owner()
    owner = None if found is None else found[0]
    shipped, end = topic.shipped_offset, topic.next_offset
    descriptors = list(catalog.walk(0))
    return {
        "store": log.info.store,
        "metadata": log.info.metadata,
        "owner": None if owner is None else owner.node,
        "is_owner_here": owner is not None and owner.node == log.info.node,
        "epoch": None if owner is None else owner.epoch,
        "sealed": sealed_marker(catalog, owner) is not None,
        "objects": len(descriptors),
        "object_bytes": sum(descriptor.size for descriptor in descriptors),
        "lag_messages": max(0, end - shipped),
        "oldest_unshipped": _timestamp(topic, shipped, end),
    }
