"""Opens a topic by name: local or with a store, for writing or for reading.

Invariants
- A topic with a store takes its settings from the catalog; settings given at open are added there.
- A setting that has no meaning for the topic's kind of storage is refused.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from tidelog.clock import Clock
from tidelog.cold.catalog import Catalog, PartitionLayout
from tidelog.cold.ownership import OwnedCatalog, read_local_claim
from tidelog.cold.reader import History
from tidelog.cold.retention import LocalPruner
from tidelog.cold.settings import TierSettings
from tidelog.cold.tiered_log import Tier
from tidelog.errors import ConfigError, ConflictError, Hint, InputError, NotSupportedError
from tidelog.files import Files
from tidelog.log import Log, LogSettings
from tidelog.log.binding import made_log_id, write_log_id
from tidelog.log.directory import wal_files
from tidelog.log.frame import Frames
from tidelog.log.view import LogView
from tidelog.staging.ingest import ingester_of
from tidelog.staging.publish import StagedPublisher, staged_log_id
from tidelog.staging.rows import check_sizes
from tidelog.store.document import retried
from tidelog.store.keys import PARTITION_SUFFIX
from tidelog.store.metadata.base import Check, Delete
from tidelog.store.scheduler import Background
from tidelog.store.urls import check_replicas
from tidelog.topics.columns import check_readable
from tidelog.topics.ingest import LocalStagings
from tidelog.topics.live_log import LiveLog
from tidelog.topics.live_topic import LiveTopic
from tidelog.topics.look import TopicViews
from tidelog.topics.message import TIMESTAMP_FIELD, group_of
from tidelog.topics.names import (
    TOPIC_FILE,
    TopicInfo,
    TopicName,
    is_topic_directory,
    read_own,
    read_topic_info,
    settle_topic_info,
    with_own,
    write_topic_info,
)
from tidelog.topics.topic import Topic

_logger = logging.getLogger("tidelog.topics")
_NEEDS_STORE = ("local_retention_seconds", "local_retention_bytes", "replicas")
_WITHOUT_STORE = (
    "progress_flush_interval_seconds",
    "progress_min_offset_delta",
    "retention_seconds",
    "retention_bytes",
    "retention_interval_seconds",
    "compaction",
    "durability",
    "min_compaction_lag_seconds",
    "ingest_check_seconds",
    "kafka_configs",
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
        stagings: LocalStagings,
    ) -> None:
        self.tier = tier
        self.views = TopicViews(
            *(root, log_settings, files, clock, None if tier is None else tier.catalogs),
            None if tier is None else lambda catalog: tier.history(catalog, log_settings.max_message_bytes),
        )
        self._root = root
        self._files = files
        self._clock = clock
        self._log_settings = log_settings
        self._tier_settings = tier_settings
        self._background = background
        self._stagings = stagings
        self._opening: dict[TopicName, Catalog] = {}
        self._read: dict[TopicName, TopicInfo | None] = {}
        """What was read to learn whether a topic has partitions: opening it next does not read it again."""
        self._once = _ReadOnce()
        self._durable_names: set[Path] = set()
        """Namespaces whose entries, as this process found them or made them since, are durable."""

    @property
    def ingest_check_seconds(self) -> float:
        """How often the directory looks for staged rows."""
        return self._tier_settings.ingest_check_seconds

    def exists(self, name: TopicName) -> bool:
        """Whether there is such a topic, on this disk or in the catalog."""
        return self.views.exists(name)

    @contextlib.contextmanager
    def reading_once(self, name: TopicName) -> Iterator[None]:
        """Within it, this thread asks the store once for the documents of a topic, unless it changes one of them, and
        again for partitions that were not recorded. For the opening of a partition: each part of that asks for what the
        topic says."""
        before = self._once.catalog
        if self.tier is not None:
            self._once.catalog = name, self.tier.opening_catalog(name.namespace, name.name)
        try:
            yield
        finally:
            self._once.catalog = before

    # Partitions

    def layout(self, name: TopicName, *, opens: bool = False) -> PartitionLayout | None:
        """How a topic is divided into partitions; None when it is not, or does not exist.

        `opens`: it is opened next, and what was read together with this is not read again.
        """
        if not opens:
            remembered = self._once.of(name)
            found = None if remembered is None else self.views.layout(name, remembered)
            return found or self.views.layout(name)  # another node may have made it since
        if self.tier is not None:
            catalog = self.tier.opening_catalog(name.namespace, name.name)
            layout = self.views.layout(name, catalog)
            if layout is None:
                self._opening[name] = catalog
            return layout
        info = read_topic_info(self._files, name.directory(self._root))
        if info is None or info.partitions is None:
            self._read[name] = info
        return None if info is None else info.partitions

    def set_layout(
        self, name: TopicName, wanted: PartitionLayout, settings: Mapping[str, object], *, is_new: bool = False
    ) -> PartitionLayout:
        """Records how a topic is divided; one that has more partitions by now keeps them.

        `is_new`: nothing of the topic was found. ConflictError when another node creates it without partitions.
        """
        self._read.pop(name, None)
        self._opening.pop(name, None)
        own = {key: value for key, value in read_own(settings).items() if value is not None}
        effective = with_own(self._tier_settings, own)
        self._check(effective, settings)
        if self.tier is not None:
            catalog = self._catalog(name, self.tier)
            if is_new:
                self._create_layout(name, catalog, wanted, self.tier)
            wanted = catalog.partitions_document().update(lambda known: _settled(known, wanted)) or wanted
            if own:
                self._keep_settings(catalog, {**self._own_settings(name, None, catalog), **own})
        directory = name.directory(self._root)
        self._make(directory)
        info = read_topic_info(self._files, directory)
        kept = own or ({} if info is None else info.settings)
        info = settle_topic_info(self._files, directory, name, self._clock, kept, info)
        if self.tier is None:  # in a store nothing is needed to look at a partition that nobody has used yet
            self._make_all(name.log_of(number, wanted).directory(self._root) for number in range(wanted.count))
        write_topic_info(self._files, directory, msgspec.structs.replace(info, partitions=wanted))
        return wanted

    def _create_layout(self, name: TopicName, catalog: Catalog, wanted: PartitionLayout, tier: Tier) -> None:
        """Under a claim of the name: who claims it to create it without partitions is earlier or later, and sees which
        (`Takeover`). Another node that creates it with partitions is waited for."""

        def create() -> None:
            if catalog.partitions_document().read() is None:
                with tier.claimed(catalog) as claim:
                    catalog.partitions_document(claim).create(wanted)

        try:
            retried(create, catalog.keys.partitions)
        except ConflictError as error:
            raise ConflictError(
                f"another node created {name} without partitions at the same moment",
                hint="Open it again: it gets partitions once no other node has it open",
            ) from error

    def forget_layout(self, name: TopicName) -> None:
        """The last step of deleting a topic with partitions."""
        if self.tier is not None:
            catalog = self._catalog(name, self.tier)
            if (claim := catalog.owner()) is not None:  # of a creation that was cut off (`_create_layout`)
                key = catalog.keys.owner
                catalog.metadata.commit([Check(key, claim[1])], [Delete(key)])
            for key in (catalog.keys.settings, catalog.keys.partitions, catalog.keys.writes):
                catalog.metadata.delete(key)
            for entry in catalog.metadata.range(catalog.keys.replays_prefix):
                catalog.metadata.delete(entry.key)

    def settings_of(self, name: TopicName) -> dict[str, object]:
        """The settings that a topic with partitions has for itself: those of each of them."""
        info = read_topic_info(self._files, name.directory(self._root))
        catalog = None if self.tier is None else self._catalog(name, self.tier)
        return self._own_settings(name, info, catalog)

    def has_settings(self, name: TopicName) -> bool:
        """Whether settings of its own are recorded in the catalog, be it none of them."""
        return self.tier is not None and self._catalog(name, self.tier).settings_document().read() is not None

    def forget_earlier(self, name: TopicName, created_us: int) -> None:
        """Of a topic that is not open here: takes away what this disk says about one that was created before this time
        and deleted elsewhere. With a store the catalog has everything that is said about the topic of today."""
        directory = name.directory(self._root)
        info = read_topic_info(self._files, directory)
        if info is not None and info.created_us < created_us:
            self._files.remove(directory / TOPIC_FILE)
            self._files.sync_directory(directory)

    def settings_versions(self, names: Sequence[TopicName]) -> dict[TopicName, str]:
        """The versions of what the catalog has of the settings of these topics; those without any are left out."""
        if self.tier is None:
            return {}
        keys = {self._catalog(name, self.tier).keys.settings: name for name in names}
        metadata, _ = self.tier.shared_metadata()
        return {keys[key]: entry.version for key, entry in metadata.get_many(list(keys)).items()}

    def is_reliable(self, name: TopicName) -> bool:
        """Whether an existing topic keeps its messages; it is not opened for that."""
        info = read_topic_info(self._files, name.directory(self._root))
        return info is None or info.reliable

    def log_exists_with(self, name: TopicName) -> str | None:
        """A topic whose name begins as those of the partitions of this one would; None when there is none."""
        folder, start = self._root / name.namespace, f"{name.name}{PARTITION_SUFFIX}"
        names = self._files.list(folder) if self._files.is_directory(folder) else []
        found = [TopicName(name.namespace, each) for each in names if each.startswith(start)]
        if self.tier is not None:
            catalog = self._catalog(name, self.tier)
            namespace = catalog.keys.metadata_prefix.removesuffix(f"{name.name}/")
            keys = catalog.metadata.keys(namespace, start=namespace + start, limit=1)
            found += [TopicName(name.namespace, key.removeprefix(namespace).split("/")[0]) for key in keys]
            found = [each for each in found if each.name.startswith(start)]
        return next((str(each) for each in found if each.parent() is not None and self.exists(each)), None)

    def open(
        self,
        name: TopicName,
        seal: Callable[[Topic], None],
        settings: Mapping[str, object] = _NO_SETTINGS,
        first_offset: int = 0,
        reliable: bool | None = None,
        *,
        take_over: bool = False,
        partition: int = 0,
    ) -> Topic | LiveTopic:
        """For writing; made when absent, `reliable` unless told otherwise. `take_over`: also from a living node."""
        directory = name.directory(self._root)
        info = self._read.pop(name) if name in self._read else read_topic_info(self._files, directory)
        if not self._is_reliable(name, reliable, info):
            return self._open_live(name, settings, first_offset, info)
        catalog = self._opening.pop(name, None)  # what was read with the layout
        if catalog is None and self.tier is not None:
            catalog = self.tier.opening_catalog(name.namespace, name.name)
        own = {**self._own_settings(name, info, catalog), **read_own(settings)}
        own = {key: value for key, value in own.items() if value is not None}
        effective = with_own(self._tier_settings, own)
        self._check(effective, settings)
        if self.tier is None or catalog is None:
            self._make(directory)
            settle_topic_info(self._files, directory, name, self._clock, own, info)
            made_log_id(self._files, directory)
            return self._open_local(name, directory, effective, seal, first_offset, partition)
        self._stagings.bring_along(name, catalog, self.tier.objects)
        self._make(directory)
        publishes = not self.tier.runs_in_background
        if publishes and (log_id := staged_log_id(self.tier.objects, catalog)) is not None:
            write_log_id(self._files, directory, log_id)
        tiered = self.tier.open_log(
            *(directory, name.namespace, name.name, self._log_settings, effective),
            time_field=TIMESTAMP_FIELD,
            first_offset=first_offset,
            group_of=group_of,
            open_staged=lambda tiered: ingester_of(tiered, self._log_settings.max_message_bytes, check_readable),
            publish_staged=functools.partial(self._publish_staged, effective) if publishes else None,
            take_over=take_over,
            is_covered=True,
            catalog=catalog,
            keep=lambda claimed: self._keep_settings(claimed, own),
        )
        try:
            info = read_topic_info(self._files, directory)  # a deletion may have been finished first
            settle_topic_info(self._files, directory, name, self._clock, own, info)
        except BaseException:
            tiered.let_go()
            raise
        return _with_defaults(Topic(name, tiered.log, self._clock, tiered, seal, partition=partition), effective)

    def _publish_staged(self, settings: TierSettings, owned: OwnedCatalog, history: History, next_offset: int) -> int:
        def check(frames: Frames) -> None:
            check_sizes(frames, self._log_settings.max_message_bytes)
            check_readable(frames)

        publisher = StagedPublisher(owned, history, settings, self._clock, TIMESTAMP_FIELD, check)
        return publisher.publish(next_offset)

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

    def _make_all(self, directories: Iterable[Path]) -> None:
        """Several directories of one namespace that is there already, made durable at once."""
        made = [directory for directory in directories if not self._files.is_directory(directory)]
        for directory in made:
            self._files.make_directory(directory)
        if made:
            self._files.sync_directory(made[0].parent)

    def forget_namespace(self, name: TopicName) -> None:
        """It may be gone, with its last topic."""
        self._durable_names.discard(name.directory(self._root).parent)

    def _open_local(
        self,
        name: TopicName,
        directory: Path,
        settings: TierSettings,
        seal: Callable[[Topic], None],
        first_offset: int,
        partition: int,
    ) -> Topic:
        log = Log.open(
            directory,
            self._log_settings,
            files=self._files,
            clock=self._clock,
            time_field=TIMESTAMP_FIELD,
            first_offset=first_offset,
            group_of=group_of,
            is_covered=True,
        )
        try:
            staging = self._stagings.open(name, log, self._log_settings, settings)
        except BaseException:
            log.close()
            raise
        pruner = LocalPruner(log, settings, self._clock)
        pruner.start(self._background)
        return _with_defaults(Topic(name, log, self._clock, None, seal, pruner, staging, partition), settings)

    def _is_reliable(self, name: TopicName, wanted: bool | None, info: TopicInfo | None) -> bool:
        """What the topic is, else what is wanted of a new one; InputError when these differ."""
        if info is None and (wanted is not False or not self.exists(name)):
            return wanted is not False
        is_reliable = info is None or info.reliable
        if wanted is not None and wanted != is_reliable:
            raise InputError(
                f"the topic {name} has reliable={is_reliable}, and that cannot be changed",
                hint="Choose another name, or delete it first",
            )
        return is_reliable

    def _open_live(
        self, name: TopicName, settings: Mapping[str, object], first_offset: int, info: TopicInfo | None
    ) -> LiveTopic:
        _refuse_live_settings(name, settings)
        if first_offset:
            raise NotSupportedError(f"the offsets of {name} begin at 0: it has reliable=False")
        directory = name.directory(self._root)
        self._make(directory)
        settle_topic_info(self._files, directory, name, self._clock, {}, info, reliable=False)
        return LiveTopic(name, LiveLog(directory, self._log_settings, self._files, TIMESTAMP_FIELD), self._clock)

    def _look_at_live(self, name: TopicName) -> LiveTopic:
        log = LiveLog(name.directory(self._root), self._log_settings, self._files, TIMESTAMP_FIELD)
        log.refuse(lambda: _elsewhere_error(name))
        return LiveTopic(name, log, self._clock)

    def look(self, name: TopicName, partition: int | None = None) -> Topic | LiveTopic:
        """For reading only. A `partition` is there, and empty, before anybody has used it."""
        found = self.views.look(name, is_partition=partition is not None)
        if found is None:
            return self._look_at_live(name)
        if isinstance(found, LogView):
            return Topic(name, found, self._clock, partition=partition or 0)
        hot = found.hot
        assert hot is None or isinstance(hot, LogView)
        return Topic(name, hot, self._clock, found, partition=partition or 0)

    def look_at_store(self, name: TopicName, partition: int) -> Topic:
        """For reading what the store has, whatever is on this disk."""
        assert self.tier is not None, "what another node serves is in a store"
        return Topic(name, None, self._clock, self.views.stored(name), partition=partition)

    # Settings

    def configure(self, name: TopicName, settings: Mapping[str, object]) -> dict[str, object]:
        """Adds to a topic's own settings, or takes some back; returns those that it has then."""
        info = read_topic_info(self._files, name.directory(self._root))
        if not self._is_reliable(name, None, info):
            _refuse_live_settings(name, settings)
            return {}
        catalog = None if self.tier is None else self._catalog(name, self.tier)
        merged = {**self._own_settings(name, info, catalog), **read_own(settings)}
        own = {key: value for key, value in merged.items() if value is not None}
        effective = with_own(self._tier_settings, own)
        self._check(effective, settings)
        if self.tier is not None:
            self._keep_settings(self._catalog(name, self.tier), own)
        directory = name.directory(self._root)
        if is_topic_directory(self._files, directory):
            settle_topic_info(self._files, directory, name, self._clock, own, info)
        return own

    def reconfigure(self, topic: Topic, own: Mapping[str, object]) -> None:
        """Has those of a topic's own settings take effect that can while it is open."""
        effective = with_own(self._tier_settings, own)
        topic._configure(effective)
        _with_defaults(topic, effective)

    def effective(self, own: Mapping[str, object]) -> TierSettings:
        """The directory's settings with those of a topic in their place."""
        return with_own(self._tier_settings, own)

    def _catalog(self, name: TopicName, tier: Tier) -> Catalog:
        return self._once.of(name) or tier.catalog(name.namespace, name.name)

    def _own_settings(self, name: TopicName, info: TopicInfo | None, catalog: Catalog | None) -> dict[str, object]:
        if catalog is not None:
            if self._is_being_deleted(name, catalog):
                return {}  # opening it finishes that first; the new topic takes nothing over from the old one
            found = catalog.settings_document().read()
            if found is not None:
                return found.value
        return {} if info is None else dict(info.settings)

    def _is_being_deleted(self, name: TopicName, catalog: Catalog) -> bool:
        """Whether a deletion was interrupted: it is marked so, or nothing is left but its directory on this disk."""
        mark = catalog.start_mark()
        if mark is not None:
            return mark[0].deleted
        directory = name.directory(self._root)
        has_claim = read_local_claim(self._files, directory) is not None
        return has_claim and not wal_files(self._files.list(directory))

    def _keep_settings(self, catalog: Catalog, own: Mapping[str, object]) -> None:
        """One attempt: what was given is merged with what was there, and somebody else has changed that meanwhile."""
        document = catalog.settings_document()
        found = document.read()
        if own != ({} if found is None else found.value):
            document.replace(dict(own), None if found is None else found.version)

    def _check(self, effective: TierSettings, given: Mapping[str, object]) -> None:
        """ConfigError for a copy that is none. Without a store, for what would delete the only copy, wherever it comes
        from, and what was given for this topic in vain."""
        if self.tier is not None:
            check_replicas(self.tier.objects.url, effective.replicas)
            return
        in_vain = [name for name, value in given.items() if value is not None and name not in _WITHOUT_STORE]
        if effective.durability != "synced":
            in_vain.append("durability")
        for field in [*(name for name in _NEEDS_STORE if getattr(effective, name)), *in_vain]:
            raise ConfigError(
                f"{field} is about what a store has a copy of, and this directory has no store",
                hint=Hint(
                    'Name one, as in tidelog.open("./data", store="s3://bucket/prefix"), or use retention_seconds',
                    command="Name one with --store s3://bucket/prefix, or use retention_seconds",
                ),
            )


class _ReadOnce(threading.local):
    """What a thread reads once (`TopicOpener.reading_once`)."""

    catalog: tuple[TopicName, Catalog] | None = None

    def of(self, name: TopicName) -> Catalog | None:
        return self.catalog[1] if self.catalog is not None and self.catalog[0] == name else None


def bring_layouts_along(files: Files, root: Path, settings: LogSettings, clock: Clock, tier: Tier) -> None:
    """The partitions of topics in a directory that was local, into the catalog of the store that it is given. Can be
    interrupted anywhere."""
    for name in TopicViews(root, settings, files, clock, None, None).local():
        info = read_topic_info(files, name.directory(root))
        local = None if info is None else info.partitions
        if local is None or local.is_deleted:
            continue
        catalog = tier.catalog(name.namespace, name.name)
        if not local.has_grown and catalog.owner() is not None and catalog.partitions_document().read() is None:
            raise ConflictError(
                f"{name} has {local.count} partitions here, and the store has a topic of this name without any",
                hint="Name another store or prefix, or delete one of the two topics first",
            )
        catalog.partitions_document().update(functools.partial(_settled, wanted=local))


def _settled(known: PartitionLayout | None, wanted: PartitionLayout) -> PartitionLayout:
    """Another node may have added partitions since."""
    if known is None or wanted.is_deleted:
        return wanted
    return known if known.count >= wanted.count else known.grown(wanted.count)


def _refuse_live_settings(name: TopicName, settings: Mapping[str, object]) -> None:
    for field in settings:
        raise ConfigError(f"{field} is about messages that are kept, and {name} has reliable=False")


def _elsewhere_error(name: TopicName) -> NotSupportedError:
    return NotSupportedError(
        f"the messages of {name} are only in the memory of the process that has it open: it has reliable=False",
        hint="Read it there, or use a reliable topic",
    )


def _with_defaults(topic: Topic, settings: TierSettings) -> Topic:
    topic._delivery_defaults = {
        "progress_flush_interval_seconds": settings.progress_flush_interval_seconds,
        "progress_min_offset_delta": settings.progress_min_offset_delta,
    }
    return topic
