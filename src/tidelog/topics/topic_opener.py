"""From a name to an open topic: local, with a store, for writing or for reading.

Invariants
- A topic with a store takes its settings from the catalog; what is given when it is opened is added there.
- A setting that means nothing where the topic is kept is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from tidelog.clock import Clock
from tidelog.errors import ConfigError, InputError, NotFoundError, NotSupportedError, RetryError
from tidelog.files import Files
from tidelog.log import Log, LogSettings
from tidelog.log.bound_files import made_log_id
from tidelog.log.names import wal_files
from tidelog.log.view import LogView
from tidelog.tier import owner as documents
from tidelog.tier.background import Background
from tidelog.tier.catalog import Catalog
from tidelog.tier.local_claim import read_local_claim
from tidelog.tier.local_pruner import LocalPruner
from tidelog.tier.metadata.store import Check, Put
from tidelog.tier.tier import Tier
from tidelog.tier.tier_settings import TierSettings
from tidelog.topics.columns import check_readable
from tidelog.topics.extension import group_of
from tidelog.topics.keywords import read_units
from tidelog.topics.live_log import LiveLog
from tidelog.topics.live_topic import LiveTopic
from tidelog.topics.local_intake import LocalIntakes
from tidelog.topics.message import TIMESTAMP_FIELD
from tidelog.topics.names import TopicName
from tidelog.topics.topic import Topic
from tidelog.topics.topic_info import TopicInfo, is_topic_directory, read_topic_info, settle_topic_info, with_own

_logger = logging.getLogger("tidelog.topics")
_NEEDS_STORE = ("local_retention_seconds", "local_retention_bytes")
_WITHOUT_STORE = (
    "progress_flush_interval_seconds",
    "progress_min_offset_delta",
    "retention_seconds",
    "retention_bytes",
    "retention_interval_seconds",
    "compaction",
    "intake_check_seconds",
)
_NO_SETTINGS: Mapping[str, object] = {}


class TopicOpener:
    """Opens the topics of one log directory."""

    def __init__(
        self,
        root: Path,
        files: Files,
        clock: Clock,
        log_settings: LogSettings,
        tier_settings: TierSettings,
        tier: Tier | None,
        background: Background,
        intakes: LocalIntakes,
    ) -> None:
        self.tier = tier
        self._root = root
        self._files = files
        self._clock = clock
        self._log_settings = log_settings
        self._tier_settings = tier_settings
        self._background = background
        self._intakes = intakes
        self._durable_names: set[Path] = set()
        """Namespaces whose entries, as this process found them or made them since, are durable."""

    def exists(self, name: TopicName) -> bool:
        """Whether there is such a topic, on this disk or in the catalog."""
        if is_topic_directory(self._files, name.directory(self._root)):
            return True
        return self.tier is not None and self._catalog(name, self.tier).owner() is not None

    def open(
        self,
        name: TopicName,
        seal: Callable[[Topic], None],
        settings: Mapping[str, object] = _NO_SETTINGS,
        first_offset: int = 0,
        reliable: bool | None = None,
        *,
        take_over: bool = False,
    ) -> Topic:
        """For writing; made when absent, `reliable` unless told otherwise. `take_over`: also from a living node."""
        directory = name.directory(self._root)
        info = read_topic_info(self._files, directory)
        if not self._is_reliable(name, reliable, info):
            return self._open_live(name, settings, first_offset, info)
        catalog = None if self.tier is None else self.tier.opening_catalog(name.namespace, name.name)
        own = {**self._own_settings(name, info, catalog), **read_units(TierSettings, settings)}
        own = {key: value for key, value in own.items() if value is not None}
        effective = with_own(self._tier_settings, own)
        if self.tier is None or catalog is None:
            self._refuse_without_store(effective, settings)
            self._make(directory)
            settle_topic_info(self._files, directory, name, self._clock, own, info)
            made_log_id(self._files, directory)
            return self._open_local(name, effective, seal, first_offset)
        self._intakes.bring_along(name, catalog, self.tier.objects)
        self._make(directory)
        tiered = self.tier.open_log(
            *(directory, name.namespace, name.name, self._log_settings, effective),
            time_field=TIMESTAMP_FIELD,
            first_offset=first_offset,
            group_of=group_of,
            check_rows=check_readable,
            take_over=take_over,
            is_covered=True,
            catalog=catalog,
        )
        try:
            self._keep_settings(name, self.tier, own)
            info = read_topic_info(self._files, directory)  # a deletion may have been finished first
            settle_topic_info(self._files, directory, name, self._clock, own, info)
        except BaseException:
            tiered.let_go()
            raise
        return _with_defaults(Topic(name, tiered.log, self._clock, tiered, seal), effective)

    def _make(self, directory: Path) -> None:
        """A topic's directory, durable in its namespace. Who made it may have been killed before that was synced: once
        for all topics of a namespace, since the lock of the root keeps others out."""
        namespace = directory.parent
        if namespace not in self._durable_names:
            self._files.make_directories(namespace)
        is_there = self._files.is_directory(directory)
        if not is_there:
            self._files.make_directory(directory)
        if not is_there or namespace not in self._durable_names:
            self._files.sync_directory(namespace)
            self._durable_names.add(namespace)

    def forget_namespace(self, name: TopicName) -> None:
        """It may be gone, with its last topic."""
        self._durable_names.discard(name.directory(self._root).parent)

    def _open_local(
        self, name: TopicName, settings: TierSettings, seal: Callable[[Topic], None], first_offset: int
    ) -> Topic:
        log = Log.open(
            name.directory(self._root),
            self._log_settings,
            files=self._files,
            clock=self._clock,
            time_field=TIMESTAMP_FIELD,
            first_offset=first_offset,
            group_of=group_of,
            is_covered=True,
        )
        try:
            intake = self._intakes.open(name, log, self._log_settings, settings)
        except BaseException:
            log.close()
            raise
        pruner = LocalPruner(log, settings, self._clock)
        if pruner.has_work:
            pruner.start(self._background)
        return _with_defaults(Topic(name, log, self._clock, None, seal, pruner, intake), settings)

    def _is_reliable(self, name: TopicName, wanted: bool | None, info: TopicInfo | None) -> bool:
        """What the topic is, else what is wanted of a new one; InputError when these differ."""
        if info is None and (wanted is not False or not self.exists(name)):
            return wanted is not False
        is_reliable = info is None or info.reliable
        if wanted is not None and wanted != is_reliable:
            raise InputError(
                f"the topic {name} has reliable={is_reliable}, and that cannot be changed",
                hint="Take another name, or delete it first",
            )
        return is_reliable

    def _open_live(
        self, name: TopicName, settings: Mapping[str, object], first_offset: int, info: TopicInfo | None
    ) -> Topic:
        _refuse_live_settings(name, settings)
        if first_offset:
            raise NotSupportedError(f"the offsets of {name} begin at 0: it has reliable=False")
        directory = name.directory(self._root)
        self._make(directory)
        settle_topic_info(self._files, directory, name, self._clock, {}, info, reliable=False)
        return LiveTopic(name, LiveLog(directory, self._log_settings, self._files, TIMESTAMP_FIELD), self._clock)

    def _look_at_live(self, name: TopicName) -> Topic:
        log = LiveLog(name.directory(self._root), self._log_settings, self._files, TIMESTAMP_FIELD)
        log.refuse(lambda: _elsewhere_error(name))
        return LiveTopic(name, log, self._clock)

    def look(self, name: TopicName) -> Topic:
        """For reading only."""
        directory = name.directory(self._root)
        info = read_topic_info(self._files, directory)
        if info is not None and not info.reliable:
            return self._look_at_live(name)
        has_files = is_topic_directory(self._files, directory)
        if not has_files and (self.tier is None or not self.exists(name)):
            raise NotFoundError(f"there is no topic {name}", path=self._root, hint="`tidelog topic list` shows them")
        if self.tier is None:
            return Topic(name, self._view(directory, refuses_missing_start=True), self._clock)
        try:
            hot = self._view_of_tail(name, self.tier) if has_files else None
        except RetryError as error:
            _logger.warning("%s: only what is on this disk can be read now: %s", directory, error.message)
            return Topic(name, self._view(directory), self._clock)
        joined = self.tier.view(name.namespace, name.name, hot, TIMESTAMP_FIELD)
        return Topic(name, hot, self._clock, joined)

    def _view(self, directory: Path, first_offset: int = 0, *, refuses_missing_start: bool = False) -> LogView:
        return LogView(
            directory,
            self._log_settings,
            files=self._files,
            clock=self._clock,
            time_field=TIMESTAMP_FIELD,
            first_offset=first_offset,
            group_of=group_of,
            refuses_missing_start=refuses_missing_start,
        )

    def _view_of_tail(self, name: TopicName, tier: Tier) -> LogView | None:
        """The files here, unless another node has written since: then they are not the end of the topic any more."""
        directory = name.directory(self._root)
        catalog = self._catalog(name, tier)
        owner, next_offset = catalog.owner(), catalog.next_offset()
        local = read_local_claim(self._files, directory)
        if owner is not None and (local is None or not local.knows(owner[0].lineage)):
            return None
        return self._view(directory, next_offset)

    # Settings

    def configure(self, name: TopicName, settings: Mapping[str, object]) -> dict[str, object]:
        """Adds to a topic's own settings, or takes some back; returns those that it has then."""
        info = read_topic_info(self._files, name.directory(self._root))
        if not self._is_reliable(name, None, info):
            _refuse_live_settings(name, settings)
            return {}
        catalog = None if self.tier is None else self._catalog(name, self.tier)
        merged = {**self._own_settings(name, info, catalog), **read_units(TierSettings, settings)}
        own = {key: value for key, value in merged.items() if value is not None}
        effective = with_own(self._tier_settings, own)
        if self.tier is None:
            self._refuse_without_store(effective, settings)
        else:
            self._keep_settings(name, self.tier, own)
        directory = name.directory(self._root)
        if is_topic_directory(self._files, directory):
            settle_topic_info(self._files, directory, name, self._clock, own, info)
        return own

    def _catalog(self, name: TopicName, tier: Tier) -> Catalog:
        return tier.catalog(name.namespace, name.name)

    def _own_settings(self, name: TopicName, info: TopicInfo | None, catalog: Catalog | None) -> dict[str, object]:
        if catalog is not None:
            if self._is_being_deleted(name, catalog):
                return {}  # opening it finishes that first; the new topic takes nothing over from the old one
            entry = catalog.metadata.get(catalog.keys.settings)
            if entry is not None:
                return documents.decode_mapping(entry.value, entry.key)
        return {} if info is None else dict(info.settings)

    def _is_being_deleted(self, name: TopicName, catalog: Catalog) -> bool:
        """Whether a deletion was interrupted: it is marked so, or nothing is left but its directory on this disk."""
        mark = catalog.start_mark()
        if mark is not None:
            return mark[0].deleted
        directory = name.directory(self._root)
        has_claim = read_local_claim(self._files, directory) is not None
        return has_claim and not wal_files(self._files.list(directory))

    def _keep_settings(self, name: TopicName, tier: Tier, own: Mapping[str, object]) -> None:
        catalog = self._catalog(name, tier)
        key = catalog.keys.settings
        entry = catalog.metadata.get(key)
        known = {} if entry is None else documents.decode_mapping(entry.value, key)
        if known != own:
            check = Check(key, None if entry is None else entry.version)
            catalog.metadata.commit([check], [Put(key, msgspec.json.encode(own))])

    def _refuse_without_store(self, effective: TierSettings, given: Mapping[str, object]) -> None:
        """What would delete the only copy, wherever it comes from, and what was given for this topic in vain."""
        in_vain = [name for name, value in given.items() if value is not None and name not in _WITHOUT_STORE]
        for field in [*(name for name in _NEEDS_STORE if getattr(effective, name) is not None), *in_vain]:
            raise ConfigError(
                f"{field} is about what a store has a copy of, and this directory has no store",
                hint='Name one, as in tidelog.open("./data", store="s3://bucket/prefix"), or use retention_seconds',
            )


def _refuse_live_settings(name: TopicName, settings: Mapping[str, object]) -> None:
    for field in settings:
        raise ConfigError(f"{field} is about messages that are kept, and {name} has reliable=False")


def _elsewhere_error(name: TopicName) -> NotSupportedError:
    return NotSupportedError(
        f"the messages of {name} are only in the memory of the process that has it open: it has reliable=False",
        hint="Read it there, or use a reliable topic",
    )


def _with_defaults(topic: Topic, settings: TierSettings) -> Topic:
    topic.delivery_defaults = {
        "progress_flush_interval_seconds": settings.progress_flush_interval_seconds,
        "progress_min_offset_delta": settings.progress_min_offset_delta,
    }
    return topic
