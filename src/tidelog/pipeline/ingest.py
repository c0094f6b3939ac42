"""Ingests staged commits into their topics: the topic's owner does it, or this process if the topic has no owner now.

When this process may ingest
- A directory whose lock is free: it is opened as its owner would open it. With a store, only if no other node owns the
  topic.
- A store alone: a topic that never had an owner, or was sealed, or was last owned in this way. The topic is claimed
  from a temporary directory, all commits are ingested and shipped, and it is sealed again.
- Any other topic is left alone, and this process waits for its owner.

Why a topic may be taken over from such a process that died
Such an owner (its name says so) appends nothing but staged commits, and their parts stay until the rows are shipped. So
whatever it had not shipped is ingested again, and nothing is lost. One that is still running would only lose its work:
it keeps its lease, and is left alone until that has expired.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path

from tidelog.clock import SystemClock
from tidelog.cold.catalog import Catalog
from tidelog.config import Settings
from tidelog.errors import (
    ConflictError,
    FencedError,
    IngestPendingError,
    InputError,
    LockedError,
    ReopenError,
    RetryError,
    TidelogError,
)
from tidelog.files import LocalFiles, ScratchFiles
from tidelog.pipeline.address import Root
from tidelog.pipeline.location import TopicLocation
from tidelog.staging.area import StagingArea
from tidelog.staging.document import StagingStatus
from tidelog.store.binding import StoreBinding
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.object_store import ObjectStore
from tidelog.store.urls import canonical_url
from tidelog.topics.directory import LogDirectory
from tidelog.topics.directory_info import INSIDE, DirectoryInfo, metadata_url, read_info, remember
from tidelog.topics.ingest import staging_url
from tidelog.topics.names import TopicName
from tidelog.topics.partitioned import PartitionedTopic
from tidelog.topics.topic import Topic
from tidelog.wiring import open_directory

_logger = logging.getLogger("tidelog.pipeline")
# Soon at first, since the topic may be held by another write that is about to finish; then seldom, since it is its
# owner.
_FIRST_WAIT_SECONDS = 0.2
_LONGEST_WAIT_SECONDS = 3.0
_BULK_SYNC_BYTES = 256 << 20
_KEPT_PLACES = 8
_NODE = re.compile(r"ingest\.([A-Za-z0-9-]+)\.([0-9]+)\.([0-9a-f]+)", re.ASCII)


def write_place(root: Root) -> TopicLocation:
    """Where rows for the topics of a root are staged: without a store, in the directory."""
    directory = directory_alone(root)
    if directory is not None:
        return TopicLocation(staging_url(directory), metadata_url=metadata_url(directory, INSIDE))
    place = root.place
    assert place is not None, "it has a store"
    return place


def directory_alone(root: Root) -> Path | None:
    """The directory of a root that has no store, whether it is there yet or not."""
    directory = root.directory
    if directory is None:
        return None
    known = read_info(LocalFiles(), directory) if directory.is_dir() else None
    return directory if known is None or known.store is None else None


def bound_place(root: Root) -> TopicLocation:
    """The same, and nobody else's: ConfigError where the catalog is that of another store."""
    place = write_place(root)
    if place.is_shared:
        _require_bound(place)
    return place


@lru_cache(_KEPT_PLACES)
def _require_bound(place: TopicLocation) -> None:
    """Once for each place, however many topics are written to."""
    with place.open_stores() as (objects, metadata):
        StoreBinding(objects, metadata, place.metadata_root, SystemClock()).check(asks_store=True)


@contextlib.contextmanager
def open_for_writing(root: Root) -> Iterator[tuple[ObjectStore, MetadataStore]]:
    """The stores in which rows for the topics of a root are staged."""
    with bound_place(root).open_stores() as stores:
        yield stores


@contextlib.contextmanager
def open_area(root: Root, name: TopicName) -> Iterator[StagingArea]:
    """The staging of a topic, for processes that stage rows for it."""
    with open_for_writing(root) as (objects, metadata):
        yield StagingArea(objects, metadata, write_place(root).keys(str(name)))


def ingest(
    root: Root, name: TopicName, area: StagingArea, app: str, version: int, timeout_seconds: float
) -> StagingStatus:
    """Returns once a committed version is in its topic; IngestPendingError if its owner does not ingest it in time."""
    deadline, pause_seconds = time.monotonic() + timeout_seconds, _FIRST_WAIT_SECONDS
    while True:
        status = _wait(area, app, version, 0)
        if status is None or status.state != "taken":
            ingest_unowned(root, name)
            left_seconds = max(0.0, deadline - time.monotonic())
            status = _wait(area, app, version, min(pause_seconds, left_seconds))
            pause_seconds = min(2 * pause_seconds, _LONGEST_WAIT_SECONDS)
        if status is not None and status.state == "taken":
            return status
        if time.monotonic() >= deadline:
            raise IngestPendingError(
                f"version {version} of {app} is committed; the owner of {name} has not ingested it after "
                f"{timeout_seconds:g} s",
                operation="write",
                hint="The owner ingests it when it runs. Do not write it again",
            )


def _wait(area: StagingArea, app: str, version: int, seconds: float) -> StagingStatus | None:
    """None while the store gives no answer: what was committed is safe there, and the wait is not over."""
    try:
        return area.wait(app, version, seconds)
    except RetryError as error:
        _logger.warning("%s: it cannot be asked now how far version %d is: %s", app, version, error)
        time.sleep(seconds)
        return None


def ingest_unowned(root: Root, *names: TopicName) -> bool:
    """Ingests what waits for topics or partitions that have no owner now; returns whether those were all."""
    directory = root.directory
    where = ", ".join(map(str, names))
    if directory is None:
        return _tried(where, lambda: _in_bucket(root, names))
    return _tried(where, lambda: _in_directory(root, directory, names))


def _tried(where: str, work: Callable[[], bool]) -> bool:
    try:
        return work()
    except (LockedError, FencedError, ConflictError):
        return False  # somebody else has it, or has it now, and takes everything in
    except (RetryError, ReopenError) as error:  # the latter when the disk is full: what was staged is safe
        _logger.warning("%s: could not be ingested now: %s", where, error)
        return False


def _in_directory(root: Root, directory: Path, names: Sequence[TopicName]) -> bool:
    with open_directory(directory, _bulk_settings(root), runs_in_background=False, renews_lease=True) as log:
        done = [_tried(str(name), partial(_ingest_here, log, name)) for name in names]
    return all(done)


def _ingest_here(log: LogDirectory, name: TopicName) -> bool:
    if log._tier is not None and not _may_own(log._tier.catalog(name.namespace, name.name), log._info.node):
        return False
    topic = opened_log(log, name)
    if not topic.is_reliable:
        raise InputError(f"{name} has reliable=False: it keeps no messages, so rows cannot be staged for it")
    topic.ingest()
    if log._tier is not None:
        _ship_if_possible(topic)
    return True


def opened_log(log: LogDirectory, name: TopicName) -> Topic:
    """The log of a name. Of a topic that has grown partitions it is the first of them."""
    topic: Topic | PartitionedTopic = log.topic(str(name))
    return topic.partition(0) if isinstance(topic, PartitionedTopic) else topic


def _bulk_settings(root: Root) -> Settings:
    """Ingested rows stay staged until they are synced, so syncs may be as far apart as is fast, unless the interval was
    configured.
    """
    if "fsync_max_batch_bytes" in root.settings:
        return root.load()
    return root.load(fsync_max_batch_bytes=_BULK_SYNC_BYTES)


def _ship_if_possible(topic: Topic) -> None:
    """So that those see it who read the store alone. On this disk it is already, whatever the store says."""
    try:
        topic.ship()
        topic.ingest()  # what was staged can go
    except RetryError as error:
        _logger.warning("%s: ingested, not shipped yet: %s", topic.name, error)


def _in_bucket(root: Root, names: Sequence[TopicName]) -> bool:
    with root.open() as view:
        assert view._tier is not None, "a root without a directory is a store"
        unowned = [name for name in names if _may_own(view._tier.catalog(name.namespace, name.name), None)]
    if not unowned:
        return False
    with _temporary_owner(root) as log:
        done = [_tried(str(name), partial(_ingest_and_leave, log, name)) for name in unowned]
    return all(done) and len(done) == len(names)


def _ingest_and_leave(log: LogDirectory, name: TopicName) -> bool:
    topic = opened_log(log, name)
    topic.ingest()
    topic.ship()
    topic.ingest()
    topic.seal()
    return True


@contextlib.contextmanager
def _temporary_owner(root: Root) -> Iterator[LogDirectory]:
    with tempfile.TemporaryDirectory(prefix="tidelog-ingest-", ignore_cleanup_errors=True) as place:
        info = DirectoryInfo(
            format=1,
            created_us=SystemClock().now_us(),
            node=f"ingest.{_host()}.{os.getpid()}.{secrets.token_hex(4)}",
            store=canonical_url(root.location),
            metadata=root.metadata,
        )
        # Its rows are staged until they are shipped, and nobody reads this directory after a crash.
        files = ScratchFiles()
        remember(files, Path(place), info)
        log = open_directory(
            Path(place), _bulk_settings(root), runs_in_background=False, renews_lease=True, files=files
        )
        try:
            yield log
        finally:
            with contextlib.suppress(TidelogError):
                log.close()


def _may_own(catalog: Catalog, own_node: str | None) -> bool:
    """Whether the topic would be nobody else's loss. That nobody has it open now is for the lease to say."""
    found = catalog.owner()
    if found is None or found[0].node == own_node or _NODE.fullmatch(found[0].node) is not None:
        return True
    return catalog.sealed_by(found[0]) is not None


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9]", "-", socket.gethostname())[:40] or "host"
