"""Resolves the topics that a command is about, and whether this directory may work on them.

Opening a topic for writing claims it and fences its previous owner. A maintenance command must not do that by accident:
unless it is forced, it leaves alone the topics that another node owns, or that were sealed for the next one.
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from tidelog.cli.errors import ExitCode, hint_of, text_of
from tidelog.cli.output import Row
from tidelog.cli.session import Session
from tidelog.cold.catalog import Catalog
from tidelog.cold.tiered_log import Tier
from tidelog.errors import (
    ConflictError,
    DataError,
    InputError,
    NotFoundError,
    NotSupportedError,
    TidelogError,
    TopicNameError,
)
from tidelog.files import LocalFiles
from tidelog.log.directory import wal_files
from tidelog.log.verify import LogFindings, verify_files
from tidelog.topics.columns import unreadable_frames
from tidelog.topics.directory import LogDirectory, why_not_ours
from tidelog.topics.message import TIMESTAMP_FIELD
from tidelog.topics.names import TOPIC_FILE, TopicName, is_name_part, parse_topic_name, read_topic_info
from tidelog.topics.partitioned import PartitionedTopic
from tidelog.topics.topic import Topic

# Lists the topics of a log directory, and suggests which one was meant if a name does not exist.
#
# A topic or a namespace that may not be read does not hide the others: it is listed as well, and an attempt to read it
# says why it cannot be.


def topic_names(log: LogDirectory) -> list[str]:
    """The names of all topics, sorted: those in the catalog, and those here, what cannot be read included."""
    names = [] if log._tier is None else [f"{namespace}/{name}" for namespace, name in log._tier.topics()]
    for namespace in _folders(log.root):
        try:
            topics = _folders(log.root / namespace)
        except PermissionError:
            names.append(f"{namespace}/*")
            continue
        names += [f"{namespace}/{name}" for name in topics if _may_be_topic(log, TopicName(namespace, name))]
    return sorted({one for name in set(names) for one in logs_of(log, name)})


def logs_of(log: LogDirectory, name: str) -> list[str]:
    """The topic itself, or the logs of its partitions; one whose kind cannot be read is taken as it is."""
    try:
        return log.partition_logs(name)
    except (TidelogError, OSError):
        return [name]


def _folders(directory: Path) -> list[str]:
    if not directory.is_dir():
        return []  # all of it is in a store
    with os.scandir(directory) as entries:
        return [entry.name for entry in entries if is_name_part(entry.name) and entry.is_dir()]


def _may_be_topic(log: LogDirectory, name: TopicName) -> bool:
    try:
        return log.has_topic(str(name))
    except PermissionError:
        return True


def require_topic(log: LogDirectory, name: str) -> None:
    """NotFoundError where there is no such topic; it suggests the nearest one."""
    parse_topic_name(name)
    if not log.has_topic(name):
        raise NotFoundError(f"there is no topic {name}", path=log.root, hint=nearest_hint(log, name))


def nearest_hint(log: LogDirectory, name: str) -> str:
    """What to try instead."""
    near = difflib.get_close_matches(name, topic_names(log), n=1)
    question = f"Did you mean {near[0]}? " if near else ""
    return f"{question}All topics: `tidelog topic list`"


TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="namespace/name.")]
TopicsArgument = Annotated[list[str] | None, typer.Argument(metavar="TOPIC...", help="namespace/name.")]
AllOption = Annotated[bool, typer.Option("--all", help="All topics that are this directory's.")]
PlanOption = Annotated[
    str | None, typer.Option("--plan", metavar="ID", help="Exactly this plan, which a server has shown.")
]
TakeOverOption = Annotated[
    bool, typer.Option("--take-over", help="Even if another node owns it (that node is fenced) or it is sealed.")
]


def require_store(log: LogDirectory) -> Tier:
    """The cold side; NotSupportedError without a store."""
    if log._tier is None:
        raise NotSupportedError(
            "this log directory has no store", path=log.root, hint="Name one with --store s3://bucket/prefix"
        )
    return log._tier


def catalog_of(log: LogDirectory, name: str) -> Catalog | None:
    """What a topic's catalog says; None without a store."""
    parsed = parse_topic_name(name)
    return None if log._tier is None else log._tier.catalog(parsed.namespace, parsed.name)


def is_live(log: LogDirectory, name: str) -> bool:
    """Whether a topic has its messages in the memory of its process alone (`reliable=False`). Claims nothing."""
    directory = parse_topic_name(name).directory(log.root)
    info = read_topic_info(LocalFiles(), directory) if directory.is_dir() else None
    return info is not None and not info.reliable


def require_kept(log: LogDirectory, name: str) -> None:
    """NotSupportedError for a live topic: there is nothing of it that another process could work on."""
    if is_live(log, name):
        raise NotSupportedError(
            f"{name} is a live topic (reliable=False): its messages and subscriptions are only in the memory of the "
            "process that has it open",
            hint="Do it in that program, or use a reliable topic",
        )


def open_log(log: LogDirectory, name: str, *, take_over: bool = False) -> Topic:
    """One of those that `logs_of` names. A topic that got partitions later has its own name and that of partition 0."""
    opened: Topic | PartitionedTopic = log.topic(name, take_over=take_over)
    return opened.partition(0)


def require_one_log(log: LogDirectory, name: str) -> None:
    """InputError for a topic with partitions: this work is done for one of them at a time."""
    logs = logs_of(log, name)
    if logs != [name]:
        raise InputError(f"{name} has {len(logs)} partitions", hint=f"Name one of them, for example {logs[0]}")


def owned_log(log: LogDirectory, name: str, take_over: bool) -> Topic:
    """A topic of one log that keeps its messages, opened for writing if this node may own it."""
    require_kept(log, name)
    require_one_log(log, name)
    require_ours(log, name, take_over)
    return open_log(log, name, take_over=take_over)


def is_sealed(log: LogDirectory, name: str) -> bool:
    """Whether the topic waits for its next owner."""
    catalog = catalog_of(log, name)
    found = None if catalog is None else catalog.owner()
    return catalog is not None and found is not None and catalog.sealed_by(found[0]) is not None


def require_ours(log: LogDirectory, name: str, take_over: bool) -> None:
    """ConflictError where opening the topic would take it from another node."""
    why = None if take_over else why_not_ours(log, name)
    if why is not None:
        raise ConflictError(why, hint="Do it there, or take the topic over with --take-over")


def chosen_topics(
    session: Session, log: LogDirectory, names: Sequence[str] | None, every: bool, take_over: bool
) -> list[str]:
    """The named topics, all of which exist; or all that this directory owns, with a note for each that it does not.

    Of a live topic there is nothing to work on.
    """
    if bool(names) == every:
        raise InputError("name the topics, or give --all", hint="All topics: `tidelog topic list`")
    for name in names or []:
        require_topic(log, name)
    chosen = list(dict.fromkeys(one for name in names or [] for one in logs_of(log, name)))
    for name in chosen:
        require_kept(log, name)
        require_ours(log, name, take_over)
    if names:
        return chosen
    kept = [name for name in topic_names(log) if _may_be_kept(log, name)]
    return [name for name in kept if take_over or _is_ours(session, log, name)]


def _may_be_kept(log: LogDirectory, name: str) -> bool:
    """A topic whose kind cannot be read is included: work on it reports the problem."""
    try:
        return not is_live(log, name)
    except (TidelogError, OSError):
        return True


def _is_ours(session: Session, log: LogDirectory, name: str) -> bool:
    why = why_not_ours(log, name)
    if why is not None:
        session.output.note(f"left out: {why}")
    return why is None


def rows_of_each(session: Session, names: Sequence[str], work: Callable[[str], Row | None]) -> list[Row]:
    """What the work gives for each topic. One that fails does not keep the others from being done."""
    rows: list[Row] = []
    for name in names:
        try:
            row = work(name)
        except TidelogError as error:
            if len(names) == 1:
                raise
            rows.append({"topic": name, "problem": text_of(error)})
            session.output.note(f"problem: {name}: {text_of(error)}")
            if (hint := hint_of(error)) is not None:
                session.output.note(f"hint: {session.pasteable(hint, name)}")
        else:
            rows += [] if row is None else [row]
    return rows


def usage(directory: Path) -> tuple[int, int]:
    """How many files of messages a topic has on this disk, and their bytes; none where all of it is in the store."""
    try:
        sizes = {entry.name: entry.stat().st_size for entry in directory.iterdir()}
    except FileNotFoundError:
        return 0, 0
    names = [file for _, file in wal_files(list(sizes))]
    return len(names), sum(sizes[file] for file in names)


def show_with_problems(
    session: Session,
    rows: Sequence[Row],
    columns: Sequence[str],
    narrower: Sequence[Sequence[str]],
    named_by: Sequence[str] = ("topic",),
) -> None:
    """Shows rows whose last column is a problem: only where one has some, with a note for each."""
    problems = [row for row in rows if row["problem"] is not None]
    if session.as_json:
        session.output.document(rows)
    else:
        session.output.table(columns if problems else columns[:-1], rows, narrower=narrower)
        for row in problems:
            session.output.note(f"problem: {' '.join(str(row[one] or '') for one in named_by)}: {row['problem']}")
    exit_if_any_failed(rows)


def exit_if_any_failed(rows: Sequence[Row]) -> None:
    """After the rows were shown."""
    if any(row.get("problem") is not None for row in rows):
        raise typer.Exit(ExitCode.FOUND_WRONG)


# The target of `inspect`, `verify` and `repair`: a topic of the log directory, or any directory with WAL files.
#
# All data of a topic with a store may be in the store, with no directory here.


class Target(NamedTuple):
    """A log to look at. `time_field` is set where the messages are those of a topic."""

    name: str
    directory: Path
    time_field: int | None


def find_target(session: Session, text: str) -> Target:
    """The topic of this name, else the directory at this path."""
    found = _find_topic(session.root, text) or _find_directory(Path(text)) or _find_in_store(session, text)
    if found is None:
        raise NotFoundError(
            f"{text} is neither a topic in {session.root} nor a directory with WAL files", hint=_hint(session, text)
        )
    return found


def find_targets(session: Session, text: str) -> list[Target]:
    """As `find_target`; of a topic with partitions the logs of all of them."""
    try:
        with session.look() as log:
            logs = logs_of(log, text)
    except (TidelogError, OSError):  # a path, or what cannot be read: a finding of the command
        return [find_target(session, text)]
    if logs == [text]:
        return [find_target(session, text)]
    return [Target(name, parse_topic_name(name).directory(session.root), TIMESTAMP_FIELD) for name in logs]


def _hint(session: Session, text: str) -> str:
    try:
        with session.look() as log:
            return nearest_hint(log, text)
    except TidelogError:
        return "Name another log directory with --dir"


def _find_in_store(session: Session, text: str) -> Target | None:
    try:
        parsed = parse_topic_name(text)
        with session.look() as log:
            is_there = log._tier is not None and log.has_topic(text)
    except (TopicNameError, NotFoundError):
        return None
    return Target(text, parsed.directory(session.root), TIMESTAMP_FIELD) if is_there else None


def all_targets(session: Session) -> list[Target]:
    """Every topic of the log directory."""
    with session.look() as log:
        return [Target(name, log.root / name, TIMESTAMP_FIELD) for name in topic_names(log)]


def examine_target(session: Session, target: Target, doing: str) -> LogFindings:
    """Reads every frame, with a bar while it lasts."""
    if not target.directory.is_dir():
        return LogFindings(checkpoint_problem="no local files: everything is in the store")
    total_bytes = sum(path.stat().st_size for path in target.directory.iterdir() if wal_files([path.name]))
    with session.output.progress(f"{doing} {target.name}", total_bytes) as on_done:
        return verify_files(
            target.directory,
            time_field=target.time_field,
            on_progress=lambda done_bytes, _: on_done(done_bytes),
            unreadable=None if target.time_field is None else unreadable_frames,
        )


def require_files(target: Target) -> None:
    """NotFoundError for a topic that is in the store alone."""
    if not target.directory.is_dir():
        raise NotFoundError(
            f"nothing of {target.name} is on this disk", hint="`tidelog verify --cold` reads what the store has of it"
        )


def _find_topic(root: Path, text: str) -> Target | None:
    try:
        name = parse_topic_name(text)
    except TopicNameError:
        return None
    directory = name.directory(root)
    with contextlib.suppress(DataError, OSError):  # what cannot be read is a finding of the command
        info = read_topic_info(LocalFiles(), directory)
        if info is not None and info.partitions is not None and not info.partitions.has_grown:
            first = name.log_of(1, info.partitions)
            raise InputError(
                f"{text} has {info.partitions.count} partitions", hint=f"Name one of them, for example {first}"
            )
    return Target(text, directory, TIMESTAMP_FIELD) if _may_name_topic(directory) else None


def _may_name_topic(directory: Path) -> bool:
    """An unreadable directory counts as a topic, so that an attempt to read it says why it cannot be read."""
    try:
        return directory.is_dir() and _is_log(_names(directory))
    except PermissionError:
        return True


def _find_directory(path: Path) -> Target | None:
    if not path.is_dir():
        return None
    names = _names(path)
    time_field = TIMESTAMP_FIELD if TOPIC_FILE in names else None
    return Target(str(path), path, time_field) if _is_log(names) else None


def _names(directory: Path) -> list[str]:
    return [entry.name for entry in directory.iterdir()]


def _is_log(names: list[str]) -> bool:
    return TOPIC_FILE in names or bool(wal_files(names))
