"""Topic names and settings: checks `namespace/name`, validates keyword settings, and reads and writes `topic.json`.

A name becomes part of file paths and object keys, so the allowed set is small on purpose: letters, digits, `.`, `_` and
`-`; no part may be empty or begin with a dot (which also rules out `.` and `..`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tidelog.clock import Clock
from tidelog.codec import JSON_ERRORS, from_json
from tidelog.cold.catalog import PartitionLayout
from tidelog.cold.settings import TierSettings
from tidelog.errors import ConfigError, DataError, TopicNameError
from tidelog.fields import read_keywords
from tidelog.files import Files
from tidelog.log.directory import wal_files
from tidelog.store.keys import PARTITION_SUFFIX
from tidelog.topics.directory_info import pretty

MAX_PART_LENGTH = 200
_RESERVED = (
    *("tidelog.json", "tidelog.json.tmp"),
    *("metadata.db", "metadata.db-wal", "metadata.db-shm", "metadata.db-journal"),
)
_PART = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", re.ASCII)
_PARTITION_NAME = re.compile(rf"(.+){PARTITION_SUFFIX}(0|[1-9][0-9]{{0,4}})", re.ASCII)
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
        return root.joinpath(self.namespace, self.name)

    def log_of(self, number: int, layout: PartitionLayout) -> TopicName:
        """The name of the log of a partition."""
        return TopicName(self.namespace, layout.log_name(self.name, number))

    def parent(self) -> tuple[TopicName, int] | None:
        """The topic whose partition has this name, and the number of the partition; None for any other name."""
        match = _PARTITION_NAME.fullmatch(self.name)
        return None if match is None else (TopicName(self.namespace, match[1]), int(match[2]))


def parse_topic_name(text: str) -> TopicName:
    """The two parts of a name; TopicNameError says what is wrong with it."""
    if not isinstance(text, str):
        raise TopicNameError(f"a topic name is a str, not {type(text).__name__}", hint=_HINT)
    parts = text.split("/")
    if len(parts) != 2:
        raise TopicNameError(f"{_shown(text)} needs a namespace and a name, for example shop/orders", hint=_HINT)
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


# `topic.json` in a topic's directory: the settings of that topic.
#
# The settings of a topic with a store are also in the catalog, and those take precedence: they move with the topic.


TOPIC_FILE = "topic.json"
_FORMAT = 1


class TopicInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of `topic.json`. `settings` are those that differ from the directory's.

    What is not `reliable` has its messages in memory only. A topic with `partitions` has no log of its own: see
    `partitioned.py`.
    """

    format: int
    name: str
    created_us: int
    settings: dict[str, object] = {}
    reliable: bool = True
    partitions: PartitionLayout | None = None


def read_topic_info(files: Files, directory: Path) -> TopicInfo | None:
    """What a topic's directory says; None when it says nothing."""
    path = directory / TOPIC_FILE
    try:
        data = files.read(path)
    except FileNotFoundError:
        return None
    try:
        return from_json(data, TopicInfo)
    except JSON_ERRORS as error:
        raise DataError(
            f"{path.name} cannot be understood: {error}",
            path=path,
            hint="Put it back from a copy, or move it away: it is written again; messages are in other files",
        ) from error


def write_topic_info(files: Files, directory: Path, info: TopicInfo) -> None:
    """Durable when it returns; the directory is there and durable."""
    files.write_atomically(directory / TOPIC_FILE, pretty(info))


def settle_topic_info(
    files: Files,
    directory: Path,
    name: TopicName,
    clock: Clock,
    settings: Mapping[str, object],
    known: TopicInfo | None,
    *,
    reliable: bool = True,
) -> TopicInfo:
    """What the topic says about itself, written down when it is new or was changed; `known` is what it says now."""
    info = TopicInfo(
        format=_FORMAT,
        name=str(name),
        created_us=clock.now_us() if known is None else known.created_us,
        settings=dict(settings),
        reliable=reliable,
        partitions=None if known is None else known.partitions,
    )
    if known is None or known.settings != info.settings:
        write_topic_info(files, directory, info)
    return info


def is_topic_directory(files: Files, directory: Path) -> bool:
    """Messages without a `topic.json` are a topic too: it was lost, and is written again when it is opened."""
    if not files.is_directory(directory):
        return False
    names = files.list(directory)
    return TOPIC_FILE in names or bool(wal_files(names))


def read_own(given: Mapping[str, object]) -> dict[str, Any]:
    """The settings of a topic from keywords; None takes one back. ConfigError names one that cannot be."""
    defaults = TierSettings()
    present = {name: getattr(defaults, name, None) if value is None else value for name, value in given.items()}
    read = read_keywords(TierSettings, present, "a setting of a topic", ConfigError)
    return {name: None if given[name] is None else value for name, value in read.items()}


def with_own(settings: TierSettings, own: Mapping[str, object]) -> TierSettings:
    """The directory's settings with a topic's own in their place; ConfigError names one that cannot be."""
    given = {name: getattr(settings, name) if value is None else value for name, value in read_own(own).items()}
    return msgspec.structs.replace(settings, **given)
