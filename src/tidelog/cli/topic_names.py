"""Which topics a log directory has, and which one was meant when there is none of a name.

A topic or a namespace that may not be looked into does not hide the others: it is listed as well, and whoever then
tries to read it is told why it cannot.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tidelog.errors import NotFoundError
from tidelog.topics.names import TopicName, is_name_part, parse_topic_name

if TYPE_CHECKING:
    from tidelog.topics.storage import LogDirectory


def topic_names(log: LogDirectory) -> list[str]:
    """The names of all topics, sorted: those in the catalog, and those here, what cannot be read included."""
    names = [] if log.tier is None else [f"{namespace}/{name}" for namespace, name in log.tier.topics()]
    for namespace in _folders(log.root):
        try:
            topics = _folders(log.root / namespace)
        except PermissionError:
            names.append(f"{namespace}/*")
            continue
        names += [f"{namespace}/{name}" for name in topics if _may_be_topic(log, TopicName(namespace, name))]
    return sorted(set(names))


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
