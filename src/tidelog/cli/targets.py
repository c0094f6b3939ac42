"""What `inspect`, `verify` and `repair` work on: a topic of the log directory, or any directory with WAL files.

Of a topic with a store everything may be in the store, and no directory here.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from tidelog.cli.session import Session
from tidelog.cli.topic_names import nearest_hint, topic_names
from tidelog.errors import DataError, NotFoundError, TidelogError, TopicNameError
from tidelog.files import LocalFiles
from tidelog.log.examine import LogExamination, Unreadable, examine_log
from tidelog.log.names import wal_files
from tidelog.topics.columns import unreadable_frames
from tidelog.topics.message import TIMESTAMP_FIELD
from tidelog.topics.names import parse_topic_name

# What a topic's directory can be told by, wherever it was copied to.
_TOPIC_FILE = "topic.json"


class _TopicInfo(msgspec.Struct):
    """What has to be in a topic's file for it to be opened."""

    format: int
    name: str


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
            is_there = log.tier is not None and log.has_topic(text)
    except (TopicNameError, NotFoundError):
        return None
    return Target(text, parsed.directory(session.root), TIMESTAMP_FIELD) if is_there else None


def all_targets(session: Session) -> list[Target]:
    """Every topic of the log directory."""
    with session.look() as log:
        return [Target(name, log.root / name, TIMESTAMP_FIELD) for name in topic_names(log)]


def examine_target(session: Session, target: Target, doing: str) -> LogExamination:
    """Reads every frame, with a bar while it lasts."""
    if not target.directory.is_dir():
        return LogExamination(files=(), checkpoint=None, checkpoint_problem="there is none: all of it is in the store")
    total_bytes = sum(path.stat().st_size for path in target.directory.iterdir() if wal_files([path.name]))
    with session.output.progress(f"{doing} {target.name}", total_bytes) as on_done:
        return examine_log(
            target.directory,
            time_field=target.time_field,
            on_progress=lambda done_bytes, _: on_done(done_bytes),
            unreadable=unreadable_in(target),
        )


def unreadable_in(target: Target) -> Unreadable | None:
    """Finds frames that are no messages, where there are to be messages."""
    return None if target.time_field is None else unreadable_frames


def require_files(target: Target) -> None:
    """NotFoundError for a topic that is in the store alone."""
    if not target.directory.is_dir():
        raise NotFoundError(
            f"nothing of {target.name} is on this disk", hint="`tidelog verify --cold` reads what the store has of it"
        )


def check_topic_file(directory: Path) -> None:
    """DataError where the file beside a topic's messages keeps it from being opened; one that is gone does not."""
    path = directory / _TOPIC_FILE
    try:
        msgspec.json.decode(LocalFiles().read(path), type=_TopicInfo)
    except FileNotFoundError:
        return
    except msgspec.MsgspecError as error:
        hint = f"Put {path} back from a copy, or move it away: it is written anew, and the messages are elsewhere"
        raise DataError(f"{_TOPIC_FILE} cannot be understood: {error}", path=path, hint=hint) from error


def _find_topic(root: Path, text: str) -> Target | None:
    try:
        directory = parse_topic_name(text).directory(root)
    except TopicNameError:
        return None
    return Target(text, directory, TIMESTAMP_FIELD) if _may_be_topic(directory) else None


def _may_be_topic(directory: Path) -> bool:
    """One that may not be looked into is taken for a topic, so that whoever reads it is told why it cannot."""
    try:
        return directory.is_dir() and _is_log(_names(directory))
    except PermissionError:
        return True


def _find_directory(path: Path) -> Target | None:
    if not path.is_dir():
        return None
    names = _names(path)
    time_field = TIMESTAMP_FIELD if _TOPIC_FILE in names else None
    return Target(str(path), path, time_field) if _is_log(names) else None


def _names(directory: Path) -> list[str]:
    return [entry.name for entry in directory.iterdir()]


def _is_log(names: list[str]) -> bool:
    return _TOPIC_FILE in names or bool(wal_files(names))
