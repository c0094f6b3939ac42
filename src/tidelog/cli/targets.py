"""What `inspect`, `verify` and `repair` work on: a topic of the log directory, or any directory with WAL files."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tidelog.cli.session import Session
from tidelog.errors import NotFoundError, TopicNameError
from tidelog.log.examine import LogExamination, examine_log
from tidelog.log.names import wal_files
from tidelog.topics.message import TIMESTAMP_FIELD
from tidelog.topics.names import parse_topic_name

# What a topic's directory can be told by, wherever it was copied to.
_TOPIC_FILE = "topic.json"


class Target(NamedTuple):
    """A log to look at. `time_field` is set where the messages are those of a topic."""

    name: str
    directory: Path
    time_field: int | None


def find_target(session: Session, text: str) -> Target:
    """The topic of this name, else the directory at this path."""
    found = _find_topic(session.root, text) or _find_directory(Path(text))
    if found is None:
        raise NotFoundError(
            f"{text} is neither a topic in {session.root} nor a directory with WAL files",
            hint="`tidelog topic list` shows the topics; name another log directory with --dir",
        )
    return found


def all_targets(session: Session) -> list[Target]:
    """Every topic of the log directory."""
    with session.look() as log:
        return [Target(name, log.topic_directory(name), TIMESTAMP_FIELD) for name in log.topics()]


def examine_target(session: Session, target: Target, doing: str) -> LogExamination:
    """Reads every frame, with a bar while it lasts."""
    total_bytes = sum(path.stat().st_size for path in target.directory.iterdir() if wal_files([path.name]))
    with session.output.progress(f"{doing} {target.name}", total_bytes) as on_done:
        return examine_log(
            target.directory, time_field=target.time_field, on_progress=lambda done_bytes, _: on_done(done_bytes)
        )


def _find_topic(root: Path, text: str) -> Target | None:
    try:
        directory = parse_topic_name(text).directory(root)
    except TopicNameError:
        return None
    return Target(text, directory, TIMESTAMP_FIELD) if (directory / _TOPIC_FILE).is_file() else None


def _find_directory(path: Path) -> Target | None:
    if not path.is_dir():
        return None
    names = [entry.name for entry in path.iterdir()]
    if _TOPIC_FILE in names:
        return Target(str(path), path, TIMESTAMP_FIELD)
    return Target(str(path), path, None) if wal_files(names) else None
