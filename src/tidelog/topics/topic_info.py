"""`topic.json` in a topic's directory, and the settings that a topic has for itself.

The settings of a topic with a store are in the catalog too, and those count: they move with the topic.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from tidelog.clock import Clock
from tidelog.codec import JSON_ERRORS
from tidelog.errors import ConfigError, DataError
from tidelog.files import Files
from tidelog.log.names import wal_files
from tidelog.tier.tier_settings import TierSettings
from tidelog.topics.directory_info import pretty
from tidelog.topics.keywords import find_wrong_keyword
from tidelog.topics.names import TopicName

TOPIC_FILE = "topic.json"
_FORMAT = 1


class TopicInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of `topic.json`. `settings` are those that differ from the directory's.

    What is not `reliable` has its messages in memory only.
    """

    format: int
    name: str
    created_us: int
    settings: dict[str, object] = {}
    reliable: bool = True


def read_topic_info(files: Files, directory: Path) -> TopicInfo | None:
    """What a topic's directory says; None when it says nothing."""
    path = directory / TOPIC_FILE
    try:
        data = files.read(path)
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(data, type=TopicInfo)
    except JSON_ERRORS as error:
        raise DataError(
            f"{path.name} cannot be understood: {error}",
            path=path,
            hint="Put it back from a copy, or move it away: it is written anew, messages are elsewhere",
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


def with_own(settings: TierSettings, own: Mapping[str, object]) -> TierSettings:
    """The directory's settings with a topic's own in their place; ConfigError names one that cannot be."""
    given = {name: getattr(settings, name, None) if value is None else value for name, value in own.items()}
    wrong = find_wrong_keyword(TierSettings, given, "a setting of a topic")
    if wrong is not None:
        raise ConfigError(wrong.text, hint=wrong.hint)
    return msgspec.structs.replace(settings, **given)
