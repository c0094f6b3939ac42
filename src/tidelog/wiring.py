"""Assembles logs and topics: takes settings, returns open objects."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import EllipsisType
from typing import Unpack

import msgspec

from tidelog.clock import Clock, SystemClock
from tidelog.cold.tiered_log import Tier
from tidelog.config import Settings, load_settings
from tidelog.config.load import OpenOptions, checked_directory, directory_of
from tidelog.errors import ConfigError, Hint, NotFoundError
from tidelog.events import tell, turn_on_output
from tidelog.files import Files, LocalFiles
from tidelog.log import shutdown as stopping
from tidelog.memory_files import MemoryFiles
from tidelog.store.aio import twin
from tidelog.store.binding import StoreBinding
from tidelog.store.keys import DEFAULT_ROOT
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.metadata.open import BUCKET, MEMORY, open_metadata_store
from tidelog.store.urls import check_replicas, open_store, require_store_directory
from tidelog.topics.directory import LogDirectory
from tidelog.topics.directory_info import INSIDE, DirectoryInfo, Place, look_at, metadata_url, read_info

_logger = logging.getLogger("tidelog.topics")
_IN_MEMORY = Path("/in-memory")


def open(
    dir: str | os.PathLike[str] | EllipsisType | None = ...,
    *,
    store: str | None = None,
    metadata: str | None = None,
    config: str | os.PathLike[str] | None = None,
    read_only: bool = False,
    create: bool = True,
    **settings: Unpack[OpenOptions],
) -> LogDirectory:
    """Opens a log directory, creating it if absent (unless `create=False`); close it or use it in a `with` statement.

    `tidelog.open(None)` is a log in memory, for tests: it behaves the same and is gone when it is closed. Without `dir`
    the settings name the directory.
    With a `store` (s3://bucket/prefix, gs://, az://, file:///path, memory://) history is shipped there; `metadata`
    names the location of the catalog (sqlite in the directory, sqlite:///path, etcd://host:port, or bucket: the store
    itself). The directory remembers both, and `metadata_root`. Settings come from `config` (a TOML file), then
    `TIDELOG_*` variables, then keywords, such as `fsync_interval_ms=100`. With `read_only=True` it may be open in
    another process at the same time; nothing is changed, and readers can follow what that process writes.
    """
    overrides = {**settings, "store": store, "metadata": metadata}
    if dir is not None and dir is not ...:
        overrides["dir"] = checked_directory(dir)
    turn_on_output()
    loaded = load_settings(None if config is None else Path(config), os.environ, overrides)
    if dir is None:
        return _open_in_memory(loaded, read_only=read_only)
    root = directory_of(loaded, 'tidelog.open("./data")')
    if not create:
        _require_directory(root)
    return open_directory(root, loaded, read_only=read_only)


open_async = twin(open, give_back=LogDirectory.close, before=stopping.prepare)


def _require_directory(root: Path) -> None:
    if read_info(LocalFiles(), root) is None:
        raise NotFoundError(
            f"there is no log directory at {root}",
            hint=Hint("Check the path, or open it without create=False", "Check --dir"),
        )


def _open_in_memory(settings: Settings, *, read_only: bool) -> LogDirectory:
    if read_only:
        raise ConfigError("a log in memory has no other reader, so it cannot be opened with read_only=True")
    return open_directory(_IN_MEMORY, settings, files=MemoryFiles())


def open_directory(
    root: Path,
    settings: Settings,
    *,
    read_only: bool = False,
    runs_in_background: bool = True,
    renews_lease: bool | None = None,
    files: Files | None = None,
    clock: Clock | None = None,
) -> LogDirectory:
    """A log directory with these settings, with its store if it has one.

    `renews_lease` defaults to `runs_in_background`: a caller that works long without background tasks can still keep
    its lease.
    """
    begin = time.perf_counter()
    root = Path(os.path.abspath(root))  # a process may change its directory while this is open
    files, clock = files or LocalFiles(), clock or SystemClock()

    def open_tier(info: DirectoryInfo) -> Tier:
        assert info.store is not None and info.metadata is not None and info.metadata_root is not None
        check_replicas(info.store, settings.tier.replicas)
        if read_only:
            require_store_directory(info.store)
        objects = open_store(info.store, settings.object_store)
        url = (
            MEMORY if isinstance(files, MemoryFiles) and info.metadata == INSIDE else metadata_url(root, info.metadata)
        )
        metadata = open_metadata_store(
            url,
            objects,
            read_only=read_only,
            settings=settings.metadata_store,
            runs_in_background=runs_in_background,
        )
        is_shared = info.metadata not in (INSIDE, MEMORY, BUCKET)
        return Tier(
            objects,
            metadata,
            files=files,
            clock=clock,
            node=info.node,
            directory=root,
            root=info.metadata_root,
            binding=StoreBinding(objects, metadata, info.metadata_root, clock, read_only=read_only)
            if is_shared
            else None,
            runs_in_background=runs_in_background and not read_only,
            lease_seconds=settings.lease_seconds,
            # A catalog inside the directory is for this directory alone, and that has a lock.
            renews_lease=False if info.metadata == INSIDE else renews_lease,
            open_objects=lambda url: open_store(url, settings.object_store),
        )

    log = LogDirectory(
        root,
        settings.log,
        files=files,
        clock=clock,
        read_only=read_only,
        place=Place(settings.store, settings.metadata, settings.metadata_root),
        open_tier=open_tier,
        tier_settings=settings.tier,
    )
    if log._info.store is None:
        try:
            refuse_store_settings(root, settings)
        except ConfigError:
            log.close()
            raise
    tell(
        _logger,
        "directory_opened",
        directory=root,
        store=log._info.store,
        node=log._info.node,
        read_only=read_only,
        seconds=time.perf_counter() - begin,
    )
    return log


@contextlib.contextmanager
def open_shared_metadata(root: Path, settings: Settings) -> Iterator[tuple[MetadataStore, str]]:
    """The metadata store of an installation for writing, and the root of its keys: for documents that no topic owns.

    Another process may have the directory open: a writer of a document names the version that it has read.
    """
    root = Path(os.path.abspath(root))
    info = look_at(LocalFiles(), root, Place(settings.store, settings.metadata, settings.metadata_root))
    url = metadata_url(root, info.metadata or INSIDE)
    objects = open_store(info.store, settings.object_store) if info.store is not None and url == BUCKET else None
    settings_there = None if info.store is None else settings.metadata_store
    with open_metadata_store(url, objects, settings=settings_there) as metadata:
        yield metadata, info.metadata_root or DEFAULT_ROOT


def refuse_store_settings(root: Path, settings: Settings) -> None:
    """For a directory without a store: no setting is accepted and then ignored."""
    tables = (settings.object_store, settings.metadata_store)
    given = [name for one in tables for name, value in msgspec.structs.asdict(one).items() if value is not None]
    if given:
        raise ConfigError(
            f"{given[0]} says how a store is reached, and this directory has no store",
            path=root,
            hint=Hint(
                'Name one, as in tidelog.open("./data", store="s3://bucket/prefix"), or leave it out',
                command="Name one with --store s3://bucket/prefix, or leave it out",
            ),
        )
