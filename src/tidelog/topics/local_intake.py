"""What is handed over to the topics of a directory without a store: staged in it, and taken in from there.

    <root>/.intake/storage/topics/{namespace}/{topic}/intake/...     staged rows, named as in a store
    <root>/metadata.db                                               the intake document of each topic

Invariants
- Whoever hands rows over is another process, and writes to the real file system: nothing is made here before that.
- Rows are safe when they are on the disk; then what was staged goes.
- A directory that is given a store takes what waits along.
- What was staged a day ago and never committed is removed when the topic is opened.
"""

from __future__ import annotations

import logging
from pathlib import Path
from threading import Lock
from urllib.parse import quote

from tidelog.clock import Clock
from tidelog.errors import TidelogError
from tidelog.log import Log, LogSettings
from tidelog.tier.background import NEVER, Background, Task
from tidelog.tier.catalog import Catalog
from tidelog.tier.daemon_pool import DaemonPool
from tidelog.tier.history_counters import HistoryCounters
from tidelog.tier.history_ranges import Fetcher, HistorySettings
from tidelog.tier.intake_ledger import LocalLedger, OpenMetadata
from tidelog.tier.intake_rows import Staging
from tidelog.tier.intake_taker import IntakeTaker
from tidelog.tier.key_watch import NEVER_SEEN, KeyWatch, Watched
from tidelog.tier.keys import TopicKeys
from tidelog.tier.metadata.store import Check, Put
from tidelog.tier.object_store import ObjectStore
from tidelog.tier.stores import open_store
from tidelog.tier.sweep import STAGED_AGE_US
from tidelog.tier.tier_settings import TierSettings
from tidelog.topics.columns import check_readable
from tidelog.topics.names import TopicName

_logger = logging.getLogger("tidelog.topics")
STAGING_DIRECTORY = ".intake"
_FETCHING_THREADS = 2
_COPIED_AT_ONCE_BYTES = 8 << 20


def staging_url(root: Path) -> str:
    """The store in which rows for a directory without one are staged."""
    return f"file://{quote(str(root / STAGING_DIRECTORY))}"


class LocalIntake:
    """The intake of one topic, with the background task that looks for more once there is some."""

    def __init__(self, taker: IntakeTaker, check_seconds: float) -> None:
        self.taker = taker
        self._check_seconds = check_seconds
        self._task: Task | None = None
        self._watched: Watched | None = None

    def start(self, background: Background, watch: KeyWatch, key: str) -> None:
        self.taker.is_told = True
        self._task = background.add(self.taker.look, NEVER)
        self._watched = watch.add(key, NEVER_SEEN, self._task.soon, self._check_seconds)

    def stop(self) -> None:
        """Before the log is closed."""
        self.taker.stop()
        if self._watched is not None:
            self._watched.cancel()
        if self._task is not None:
            self._task.cancel()


class LocalIntakes:
    """The intake of a directory's topics. `runs_in_background` is False where the disk is not the real one."""

    def __init__(self, root: Path, open_metadata: OpenMetadata, clock: Clock, *, runs_in_background: bool) -> None:
        self._root = root
        self._open_metadata = open_metadata
        self._clock = clock
        self._runs_in_background = runs_in_background
        self._background = Background(1, "tidelog-intake")
        self._watch = KeyWatch(lambda: open_metadata(False), self._background)
        self._guard = Lock()
        self._staging: Staging | None = None
        self._fetchers = DaemonPool(_FETCHING_THREADS, "tidelog-intake-fetch")

    def open(self, name: TopicName, log: Log, log_settings: LogSettings, settings: TierSettings) -> LocalIntake:
        """Takes in what waits for a topic, before it is handed to anybody, and looks for more from then on."""
        keys = TopicKeys(name.namespace, name.name)
        taker = IntakeTaker(
            *(log, LocalLedger(self._open_metadata, keys), keys),
            *(self._opened, lambda: log.durable_offset, self._clock),
            max_message_bytes=log_settings.max_message_bytes,
            check_seconds=settings.intake_check_seconds,
            check_rows=check_readable,
        )
        taker.settle()
        intake = LocalIntake(taker, settings.intake_check_seconds)
        if self._runs_in_background:
            self._remove_uncommitted(keys)
            intake.start(self._background, self._watch, keys.intake)
        return intake

    def bring_along(self, name: TopicName, catalog: Catalog, objects: ObjectStore) -> None:
        """What was handed over while the directory had no store, into the one that it was given. Can be interrupted.

        Before the topic is claimed for the first time: one that has an owner there already is another one.
        """
        keys = TopicKeys(name.namespace, name.name)
        if not self._has_staging or catalog.owner() is not None:
            return
        here = self._opened().objects
        staged = [info.key for info in here.list(keys.intake_prefix)]
        for key in staged:
            _copy(here, objects, key)
        self._bring_document(keys, catalog)
        if staged:
            self._remove(keys, staged)

    def _bring_document(self, keys: TopicKeys, catalog: Catalog) -> None:
        local = self._open_metadata(False)
        entry = None if local is None else local.get(keys.intake)
        if local is None or entry is None or catalog.metadata.get(catalog.keys.intake) is not None:
            return  # where the metadata is the same file, it is there already
        catalog.metadata.commit([Check(catalog.keys.intake, None)], [Put(catalog.keys.intake, entry.value)])
        local.delete(keys.intake)

    def delete(self, name: TopicName) -> None:
        """A topic that is made again under this name has nothing to take in."""
        keys = TopicKeys(name.namespace, name.name)
        metadata = self._open_metadata(False)
        if metadata is not None:
            metadata.delete(keys.intake)
        if self._has_staging:
            self._remove(keys, [info.key for info in self._opened().objects.list(keys.intake_prefix)])

    def close(self) -> None:
        """Topics are closed before. Closing twice is fine."""
        self._background.close()
        self._fetchers.shutdown(wait=False, cancel_futures=True)

    @property
    def _has_staging(self) -> bool:
        return self._runs_in_background and (self._root / STAGING_DIRECTORY).is_dir()

    def _opened(self) -> Staging:
        with self._guard:
            if self._staging is None:
                objects = open_store(staging_url(self._root))
                fetcher = Fetcher(objects, self._fetchers, HistoryCounters(), HistorySettings.of(objects.settings))
                self._staging = Staging(objects, fetcher, is_local=True)
            return self._staging

    def _remove_uncommitted(self, keys: TopicKeys) -> None:
        if not self._has_staging:
            return
        try:
            before_us = self._clock.now_us() - STAGED_AGE_US
            objects = self._opened().objects
            objects.delete_unfinished(
                list(objects.unfinished_uploads(keys.intake_prefix, modified_before_us=before_us))
            )
            old = [info.key for info in objects.list(keys.intake_prefix) if info.modified_us < before_us]
            if old:
                named = LocalLedger(self._open_metadata, keys).load()[0].consignments
                self._remove(keys, [key for key in old if keys.parse_staged(key) not in (None, *named)])
        except TidelogError as error:
            _logger.warning("%s: old staged rows could not be removed: %s", self._root, error)

    def _remove(self, keys: TopicKeys, names: list[str]) -> None:
        objects = self._opened().objects
        objects.delete(names)
        for consignment in filter(None, map(keys.parse_staged, names)):
            objects.remove_folder(keys.consignment_prefix(consignment))


def _copy(source: ObjectStore, target: ObjectStore, key: str) -> None:
    with target.open_writer(key) as writer:
        while data := source.read_range(key, writer.bytes_written, _COPIED_AT_ONCE_BYTES):
            writer.write(data)
