"""Topic names: `namespace/name`, checked once, and the directory that belongs to one.

A name becomes part of file paths and object keys, so it is narrow on purpose: letters, digits, `.`, `_` and `-`, no
part that is empty or begins with a dot (which also rules out `.` and `..`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from tidelog.errors import TopicNameError

MAX_PART_LENGTH = 200
_RESERVED = (
    *("tidelog.json", "tidelog.json.tmp"),
    *("metadata.db", "metadata.db-wal", "metadata.db-shm", "metadata.db-journal"),
)
_PART = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", re.ASCII)
_HINT = (
    f"A topic is named namespace/name; each part has 1 to {MAX_PART_LENGTH} of the characters A-Z a-z 0-9 . _ - "
    "and does not begin with a dot"
)


class TopicName(NamedTuple):
    """A checked name."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    def directory(self, root: Path) -> Path:
        return root / self.namespace / self.name


def parse_topic_name(text: str) -> TopicName:
    """The two parts of a name; TopicNameError says what is wrong with it."""
    if not isinstance(text, str):
        raise TopicNameError(f"a topic name is a str, not {type(text).__name__}", hint=_HINT)
    parts = text.split("/")
    if len(parts) != 2:
        raise TopicNameError(f"{_shown(text)} does not have exactly two parts", hint=_HINT)
    for part in parts:
        if not part:
            raise TopicNameError(f"{_shown(text)} has an empty part", hint=_HINT)
        if len(part) > MAX_PART_LENGTH:
            raise TopicNameError(f"{_shown(text)} has a part of {len(part)} characters", hint=_HINT)
        if not is_name_part(part):
            raise TopicNameError(f"{_shown(text)} has a part that is not allowed: {_shown(part)}", hint=_HINT)
    if parts[0] in _RESERVED:
        raise TopicNameError(f"the namespace {parts[0]!r} is taken by a file of tidelog's own", hint=_HINT)
    return TopicName(*parts)


def is_name_part(text: str) -> bool:
    """Whether this could be a namespace or a name."""
    return len(text) <= MAX_PART_LENGTH and _PART.fullmatch(text) is not None


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
