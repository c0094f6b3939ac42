"""Staging and ingest for a log directory without a store: other processes stage rows in it, and its owner ingests them.

    <root>/.staging/storage/topics/{namespace}/{topic}/staging/...     staged rows, named as in a store
    <root>/metadata.db                                               the staging document of each topic

Invariants
- The writer of staged rows is another process and uses the real file system: nothing is created here before that.
- Rows are durable once they are on disk; only then are the staged files removed.
- A directory that is given a store carries its pending rows over to it.
- Rows that were staged a day ago and never committed are removed when the topic is opened.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from urllib.parse import quote

from tidelog.clock import Clock
from tidelog.cold.catalog import Catalog
from tidelog.cold.fetch import ColdReadCounters, Fetcher, FetchSettings
from tidelog.cold.gc import STAGED_AGE_US
from tidelog.cold.ownership import NEVER_SEEN, KeyWatch, Watched
from tidelog.cold.settings import TierSettings
from tidelog.errors import TidelogError
from tidelog.log import Log, LogSettings
from tidelog.staging.ingest import Ingester
from tidelog.staging.ledger import LocalLedger, OpenMetadata
from tidelog.staging.rows import Staging
from tidelog.store.keys import TopicKeys
from tidelog.store.metadata.base import Check, Put
from tidelog.store.object_store import ObjectStore
from tidelog.store.scheduler import NEVER, Background, DaemonPool, Task
from tidelog.store.urls import open_store
from tidelog.topics.columns import check_readable
from tidelog.topics.names import TopicName

_logger = logging.getLogger("tidelog.topics")
STAGING_DIRECTORY = ".staging"
_FETCHING_THREADS = 2
_AGAIN_SECONDS = 0.1
_COPIED_AT_ONCE_BYTES = 8 << 20


def staging_url(root: Path) -> str:
    """The store in which rows for a directory without one are staged."""
    return f"file://{quote(str(root / STAGING_DIRECTORY))}"


class LocalStaging:
    """The staging of one topic, with the background task that polls for more once there is some."""

    def __init__(self, taker: Ingester, check_seconds: float) -> None:
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


class LocalStagings:
    """The staging of a directory's topics. `runs_in_background` is False if the disk is not the real one."""

    def __init__(self, root: Path, open_metadata: OpenMetadata, clock: Clock, *, runs_in_background: bool) -> None:
        self._root = root
        self._staging_directory = root / STAGING_DIRECTORY
        self._open_metadata = open_metadata
        self._clock = clock
        self._runs_in_background = runs_in_background
        self._background = Background(1, "tidelog-ingest")
        self._watch = KeyWatch(lambda: open_metadata(False), self._background)
        self._guard = Lock()
        self._staging: Staging | None = None
        self._fetchers = DaemonPool(_FETCHING_THREADS, "tidelog-ingest-fetch")

    def open(self, name: TopicName, log: Log, log_settings: LogSettings, settings: TierSettings) -> LocalStaging:
        """Ingests the commits that wait for a topic, before the topic is returned to any caller, and polls for more
        from then on.
        """
        keys = TopicKeys(name.namespace, name.name)
        taker = Ingester(
            log,
            LocalLedger(self._open_metadata, keys),
            keys,
            self._opened,
            lambda: log.durable_offset,
            self._clock,
            max_message_bytes=log_settings.max_message_bytes,
            check_seconds=settings.ingest_check_seconds,
            check_rows=check_readable,
        )
        taker.settle()
        staging = LocalStaging(taker, settings.ingest_check_seconds)
        if self._runs_in_background:
            self._remove_uncommitted(keys)
            staging.start(self._background, self._watch, keys.staging)
        return staging

    def has_waiting(self, name: TopicName) -> bool:
        """Whether commits wait for a topic, which need not be open."""
        ledger = LocalLedger(self._open_metadata, TopicKeys(name.namespace, name.name))
        return bool(ledger.load()[0].waiting)

    def watch_writes(
        self, name: TopicName, check_seconds: float, on_write: Callable[[], bool]
    ) -> Callable[[], None] | None:
        """Calls `on_write` whenever rows are committed to the partitions of a topic, again if it returns False; returns
        what ends that."""
        if not self._runs_in_background:
            return None

        def work() -> float:
            try:
                return NEVER if on_write() else _AGAIN_SECONDS
            except TidelogError as error:
                _logger.warning("%s: staged rows of %s are not ingested now: %s", self._root, name, error)
                return NEVER

        task = self._background.add(work, NEVER)
        watched = self._watch.add(TopicKeys(name.namespace, name.name).writes, NEVER_SEEN, task.soon, check_seconds)

        def end() -> None:
            watched.cancel()
            task.is_cancelled = True  # not waited for: it may be what ends it

        return end

    def bring_along(self, name: TopicName, catalog: Catalog, objects: ObjectStore) -> None:
        """Moves commits that were staged while the directory had no store into its new store. Can be interrupted.

        Called before the topic is claimed for the first time: a topic that already has an owner there is a different
        one.
        """
        keys = TopicKeys(name.namespace, name.name)
        if not self._has_staging or catalog.owner() is not None:
            return
        here = self._opened().objects
        staged = [info.key for info in here.list(keys.staging_prefix)]
        for key in staged:
            _copy(here, objects, key)
        self._bring_document(keys, catalog)
        if staged:
            self._remove(keys, staged)

    def _bring_document(self, keys: TopicKeys, catalog: Catalog) -> None:
        local = self._open_metadata(False)
        entry = None if local is None else local.get(keys.staging)
        if local is None or entry is None or catalog.metadata.get(catalog.keys.staging) is not None:
            return  # where the metadata is the same file, it is there already
        catalog.metadata.commit([Check(catalog.keys.staging, None)], [Put(catalog.keys.staging, entry.value)])
        local.delete(keys.staging)

    def delete(self, name: TopicName) -> None:
        """A topic that is created again under this name has nothing to ingest."""
        keys = TopicKeys(name.namespace, name.name)
        metadata = self._open_metadata(False)
        if metadata is not None:
            metadata.delete(keys.staging)
            metadata.delete(keys.writes)
        if self._has_staging:
            self._remove(keys, [info.key for info in self._opened().objects.list(keys.staging_prefix)])

    def close(self) -> None:
        """Topics are closed before. Closing twice is fine."""
        self._background.close()
        self._fetchers.shutdown(wait=False, cancel_futures=True)

    @property
    def _has_staging(self) -> bool:
        return self._runs_in_background and self._staging_directory.is_dir()

    def _opened(self) -> Staging:
        with self._guard:
            if self._staging is None:
                objects = open_store(staging_url(self._root))
                fetcher = Fetcher(objects, self._fetchers, ColdReadCounters(), FetchSettings.of(objects.settings))
                self._staging = Staging(objects, fetcher, others_may_wait=True)
            return self._staging

    def _remove_uncommitted(self, keys: TopicKeys) -> None:
        if not self._has_staging:
            return
        try:
            before_us = self._clock.now_us() - STAGED_AGE_US
            objects = self._opened().objects
            objects.delete_unfinished(
                list(objects.unfinished_uploads(keys.staging_prefix, modified_before_us=before_us))
            )
            old = [info.key for info in objects.list(keys.staging_prefix) if info.modified_us < before_us]
            if old:
                named = LocalLedger(self._open_metadata, keys).load()[0].staged_commits
                self._remove(keys, [key for key in old if keys.parse_staged(key) not in (None, *named)])
        except TidelogError as error:
            _logger.warning("%s: old staged rows could not be removed: %s", self._root, error)

    def _remove(self, keys: TopicKeys, names: list[str]) -> None:
        objects = self._opened().objects
        objects.delete(names)
        for staged_commit in filter(None, map(keys.parse_staged, names)):
            objects.remove_folder(keys.staged_commit_prefix(staged_commit))


def _copy(source: ObjectStore, target: ObjectStore, key: str) -> None:
    with target.open_writer(key) as writer:
        while data := source.read_range(key, writer.bytes_written, _COPIED_AT_ONCE_BYTES):
            writer.write(data)
