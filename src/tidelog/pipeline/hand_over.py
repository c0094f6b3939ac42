"""What was committed is brought into its topic: by the topic's owner, or here, where nobody owns it now.

Who may take in here
- A directory whose lock is free: it is opened as its owner would open it. With a store, only if the topic is not some
  other node's.
- A store alone: a topic that never had an owner, or was sealed, or was last owned in this way. It is claimed from a
  directory that is made for it, everything is taken in and shipped, and it is sealed again.
- Everybody else's topic is left alone, and its owner is waited for.

Why a topic may be taken from one who did the same and died
Such an owner (its name says so) appends nothing but consignments, and their parts stay until the rows are shipped. So
whatever it had not shipped is taken in again, and nothing is lost. One that is still at work would only lose its work:
it keeps its lease, and is left alone until that has run out.
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
from collections.abc import Iterator
from pathlib import Path

from tidelog.clock import SystemClock
from tidelog.config import Settings
from tidelog.errors import (
    ConflictError,
    FencedError,
    InputError,
    LockedError,
    NotTakenInError,
    ReopenError,
    RetryError,
    TidelogError,
)
from tidelog.files import LocalFiles
from tidelog.pipeline.root import Root
from tidelog.tier.catalog import Catalog
from tidelog.tier.intake_area import IntakeArea
from tidelog.tier.intake_document import IntakeStatus
from tidelog.tier.stores import canonical_url
from tidelog.topics.directory_info import DirectoryInfo, remember
from tidelog.topics.names import TopicName
from tidelog.topics.storage import LogDirectory
from tidelog.topics.topic import Topic
from tidelog.wiring import open_directory

_logger = logging.getLogger("tidelog.pipeline")
# Soon, since who has the topic may be another write that is done in a moment; then seldom, since it is its owner.
_FIRST_WAIT_SECONDS = 0.2
_LONGEST_WAIT_SECONDS = 3.0
_BULK_SYNC_BYTES = 256 << 20
_NODE = re.compile(r"intake\.([A-Za-z0-9-]+)\.([0-9]+)\.([0-9a-f]+)", re.ASCII)


def take_in(
    root: Root, name: TopicName, area: IntakeArea, app: str, version: int, timeout_seconds: float
) -> IntakeStatus:
    """Returns once a committed version is in its topic; NotTakenInError when its owner does not take it in in time."""
    deadline, pause_seconds = time.monotonic() + timeout_seconds, _FIRST_WAIT_SECONDS
    while True:
        status = _wait(area, app, version, 0)
        if status is None or status.state != "taken":
            take_in_unowned(root, name)
            left_seconds = max(0.0, deadline - time.monotonic())
            status = _wait(area, app, version, min(pause_seconds, left_seconds))
            pause_seconds = min(2 * pause_seconds, _LONGEST_WAIT_SECONDS)
        if status is not None and status.state == "taken":
            return status
        if time.monotonic() >= deadline:
            raise NotTakenInError(
                f"version {version} of {app} is handed over to {name}, and not taken in within {timeout_seconds:g} s",
                operation="write",
                hint="It comes in when the owner of the topic runs. Do not write it again",
            )


def _wait(area: IntakeArea, app: str, version: int, seconds: float) -> IntakeStatus | None:
    """None while the store gives no answer: what was committed is safe there, and the wait is not over."""
    try:
        return area.wait(app, version, seconds)
    except RetryError as error:
        _logger.warning("%s: it cannot be asked now how far version %d is: %s", app, version, error)
        time.sleep(seconds)
        return None


def take_in_unowned(root: Root, name: TopicName) -> bool:
    """Takes in what waits for a topic, if nobody owns it now; whether that was so."""
    try:
        return _in_directory(root, root.directory, name) if root.directory is not None else _in_bucket(root, name)
    except (LockedError, FencedError, ConflictError):
        return False  # somebody else has it, or has it now, and takes everything in
    except (RetryError, ReopenError) as error:  # the latter when the disk is full: what was handed over is safe
        _logger.warning("%s: could not be taken in now: %s", name, error)
        return False


def _in_directory(root: Root, directory: Path, name: TopicName) -> bool:
    with open_directory(directory, _bulk_settings(root), runs_in_background=False, renews_lease=True) as log:
        if log.tier is not None:
            catalog = log.tier.catalog(name.namespace, name.name)
            if not _may_own(catalog, log.info.node):
                return False
        topic = log.topic(str(name))
        if not topic.is_reliable:
            raise InputError(f"{name} has reliable=False: it keeps nothing, and nothing can be handed over to it")
        topic.take_in()
        if log.tier is not None:
            _ship_if_possible(topic)
    return True


def _bulk_settings(root: Root) -> Settings:
    """What is taken in is staged until it is synced, so syncs may be as far apart as is fast, unless somebody has set
    how far."""
    if "fsync_max_batch_bytes" in root.settings:
        return root.load()
    return root.load(fsync_max_batch_bytes=_BULK_SYNC_BYTES)


def _ship_if_possible(topic: Topic) -> None:
    """So that those see it who read the store alone. On this disk it is already, whatever the store says."""
    try:
        topic.ship()
        topic.take_in()  # what was staged can go
    except RetryError as error:
        _logger.warning("%s: taken in, and not shipped yet: %s", topic.name, error)


def _in_bucket(root: Root, name: TopicName) -> bool:
    with root.open() as view:
        assert view.tier is not None, "a root without a directory is a store"
        if not _may_own(view.tier.catalog(name.namespace, name.name), None):
            return False
    with _temporary_owner(root) as log:
        topic = log.topic(str(name))
        topic.take_in()
        topic.ship()
        topic.take_in()
        topic.seal()
    return True


@contextlib.contextmanager
def _temporary_owner(root: Root) -> Iterator[LogDirectory]:
    with tempfile.TemporaryDirectory(prefix="tidelog-intake-", ignore_cleanup_errors=True) as place:
        info = DirectoryInfo(
            format=1,
            created_us=SystemClock().now_us(),
            node=f"intake.{_host()}.{os.getpid()}.{secrets.token_hex(4)}",
            store=canonical_url(root.location),
            metadata=root.metadata,
        )
        remember(LocalFiles(), Path(place), info)
        log = open_directory(Path(place), _bulk_settings(root), runs_in_background=False, renews_lease=True)
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
    marker = catalog.sealed()
    return marker is not None and marker.sealed and marker.epoch == found[0].epoch


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9]", "-", socket.gethostname())[:40] or "host"
