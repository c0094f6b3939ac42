"""Configs of groups: what administrators set for one group, before it has members or while it has.

    {root}/storage/kafka-group-configs    `GroupConfigDocument`, as JSON in the metadata store of the installation

    share.auto.offset.reset    latest | earliest: where a share group begins in a partition in which it has no position

Invariants
- A change is durable before it is answered, and counts from then on. A position that a group has is not moved.
- What is not listed above is refused by name: a config that has no effect would be believed.
- A group needs no members and no offsets to have configs, as in Kafka.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import msgspec

from tidelog.errors import ConfigError, InputError
from tidelog.service.kafka.configs import ConfigSource, ConfigType, Described
from tidelog.store.document import VersionedDocument, decode_json, encode_json
from tidelog.store.keys import DEFAULT_ROOT, group_cursor, kafka_group_configs_key
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.scheduler import in_store_thread

SHARE_START = "share.auto.offset.reset"
_STARTS = ("latest", "earliest")
_WORDS = "where a share group begins in a partition in which it has no position: latest or earliest"
_MAX_GROUPS = 10_000
Configs = Mapping[str, str]
Change = Callable[[dict[str, str]], dict[str, str | None]]


class GroupConfigDocument(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The configs of all groups that have some."""

    groups: dict[str, dict[str, str]] = {}


class GroupConfigs:
    """The configs of the groups of one installation."""

    def __init__(self) -> None:
        self._stored: VersionedDocument[GroupConfigDocument] | None = None
        self._known = GroupConfigDocument()

    async def start(self, metadata: MetadataStore, root: str = DEFAULT_ROOT) -> None:
        """Learns which there are."""
        decode = partial(decode_json, kind=GroupConfigDocument)
        stored = VersionedDocument(metadata, kafka_group_configs_key(root), encode_json, decode)
        found = await in_store_thread(stored.read)
        self._stored, self._known = stored, GroupConfigDocument() if found is None else found.value

    def share_start(self, group: str) -> Literal["latest", "earliest"]:
        """Where a share group begins."""
        return "earliest" if self._known.groups.get(group, {}).get(SHARE_START) == "earliest" else "latest"

    def describe(self, group: str) -> list[Described]:
        """All configs of a group."""
        group_cursor(group)
        own = self._known.groups.get(group, {}).get(SHARE_START)
        default = (SHARE_START, _STARTS[0], ConfigSource.DEFAULT)
        if own is None:
            return [Described(*default, ConfigType.STRING, _WORDS, synonyms=(default,))]
        synonyms = ((SHARE_START, own, ConfigSource.GROUP), default)
        return [Described(SHARE_START, own, ConfigSource.GROUP, ConfigType.STRING, _WORDS, synonyms=synonyms)]

    async def alter(self, group: str, change: Change, *, validate_only: bool) -> None:
        """Gives a group other configs; ConfigError names what it cannot have."""
        group_cursor(group)  # InputError for what no group can be called
        if validate_only:
            _checked(change(dict(self._known.groups.get(group, {}))))
            return
        assert self._stored is not None, "it was started"
        self._known = await in_store_thread(
            self._stored.update, lambda known: _changed(known or GroupConfigDocument(), group, change)
        )


def _changed(known: GroupConfigDocument, group: str, change: Change) -> GroupConfigDocument:
    configs = _checked(change(dict(known.groups.get(group, {}))))
    others = {name: own for name, own in known.groups.items() if name != group}
    if configs and len(others) >= _MAX_GROUPS:
        raise InputError(f"{_MAX_GROUPS} groups have configs already", hint="Delete those of groups that are gone")
    return GroupConfigDocument(groups={**others, group: configs} if configs else others)


def _checked(configs: Mapping[str, str | None]) -> dict[str, str]:
    found = {}
    for name, value in configs.items():
        if name != SHARE_START:
            raise ConfigError(f"groups have no config {name} here: {SHARE_START} is one")
        if value not in _STARTS:
            raise ConfigError(f"{name} must be {' or '.join(_STARTS)}, not {value}")
        found[name] = value
    return found
