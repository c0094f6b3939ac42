"""Puts the parts together: settings in, open things out."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import EllipsisType
from typing import Unpack

import msgspec

from tidelog.clock import Clock, SystemClock
from tidelog.config import Settings, load_settings
from tidelog.config.options import OpenOptions
from tidelog.errors import ConfigError, NotFoundError
from tidelog.files import Files, LocalFiles
from tidelog.log import stopping
from tidelog.memory_files import MemoryFiles
from tidelog.tier.metadata.open import open_metadata_store
from tidelog.tier.stores import open_store
from tidelog.tier.tier import Tier
from tidelog.topics.directory_info import INSIDE, MEMORY, DirectoryInfo, Place, metadata_url, read_info
from tidelog.topics.storage import LogDirectory
from tidelog.topics.worker_thread import made_in_worker_thread

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
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
    """Opens a log directory, made when absent (unless `create=False`), to be closed or used in a `with` statement.

    `tidelog.open(None)` is a log in memory, for tests: it behaves the same and is gone when it is closed. Without `dir`
    the settings say which directory.
    With a `store` (s3://bucket/prefix, gs://, az://, file:///path, memory://) its history goes there; `metadata` says
    where the catalog is (sqlite in the directory, sqlite:///path, etcd://host:port, or bucket: the store itself). The
    directory remembers both. Settings come from `config` (a TOML file), then `TIDELOG_*` variables, then keywords, such
    as `fsync_interval_ms=100`. With `read_only=True` it can be open in another process at the same time; nothing is
    changed, and what that process writes can be followed.
    """
    overrides = {**settings, "store": store, "metadata": metadata}
    if isinstance(dir, str | os.PathLike):
        overrides["dir"] = _checked_path(dir)
    elif dir is not None and dir is not ...:
        raise ConfigError(f"dir must be a str, a Path or None, not {type(dir).__name__}")
    loaded = load_settings(None if config is None else Path(config), os.environ, overrides)
    if dir is None:
        return _open_in_memory(loaded, read_only=read_only)
    if loaded.dir is None:
        raise ConfigError(
            "no directory was named", hint='Give it: tidelog.open("./data"), `dir` in the config, or TIDELOG_DIR'
        )
    if not create:
        _require_directory(Path(loaded.dir))
    return open_directory(Path(loaded.dir), loaded, read_only=read_only)


async def open_async(
    dir: str | os.PathLike[str] | EllipsisType | None = ...,
    *,
    store: str | None = None,
    metadata: str | None = None,
    config: str | os.PathLike[str] | None = None,
    read_only: bool = False,
    create: bool = True,
    **settings: Unpack[OpenOptions],
) -> LogDirectory:
    """As `open`, in a worker thread; for `async with await tidelog.open_async(...)`, or to be closed."""
    stopping.prepare()
    return await made_in_worker_thread(
        lambda: open(
            dir, store=store, metadata=metadata, config=config, read_only=read_only, create=create, **settings
        ),
        LogDirectory.close,
    )


def _require_directory(root: Path) -> None:
    if read_info(LocalFiles(), root) is None:
        raise NotFoundError(
            f"there is no log directory at {root}", hint="Check the path, or open it without create=False"
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

    `renews_lease` is as `runs_in_background` by default: who works without that for long still keeps its lease.
    """
    root = Path(os.path.abspath(root))  # a process may change its directory while this is open
    files, clock = files or LocalFiles(), clock or SystemClock()

    def open_tier(info: DirectoryInfo) -> Tier:
        assert info.store is not None and info.metadata is not None
        objects = open_store(info.store, settings.object_store)
        url = (
            MEMORY if isinstance(files, MemoryFiles) and info.metadata == INSIDE else metadata_url(root, info.metadata)
        )
        return Tier(
            objects,
            open_metadata_store(url, objects, read_only=read_only),
            files=files,
            clock=clock,
            node=info.node,
            directory=root,
            root=settings.metadata_root,
            runs_in_background=runs_in_background and not read_only,
            lease_seconds=settings.lease_seconds,
            # A catalog inside the directory is for this directory alone, and that has a lock.
            renews_lease=False if info.metadata == INSIDE else renews_lease,
        )

    log = LogDirectory(
        root,
        settings.log,
        files=files,
        clock=clock,
        read_only=read_only,
        place=Place(settings.store, settings.metadata),
        open_tier=open_tier,
        tier_settings=settings.tier,
    )
    if log.info.store is None:
        _refuse_what_needs_a_store(log, settings)
    return log


def _refuse_what_needs_a_store(log: LogDirectory, settings: Settings) -> None:
    """No setting is accepted and then ignored."""
    given = [name for name, value in msgspec.structs.asdict(settings.object_store).items() if value is not None]
    if given:
        log.close()
        raise ConfigError(
            f"{given[0]} says how a store is reached, and this directory has no store",
            path=log.root,
            hint='Name one, as in tidelog.open("./data", store="s3://bucket/prefix"), or leave it out',
        )


def _checked_path(path: str | os.PathLike[str]) -> str:
    """An empty path is refused: it would mean the working directory, and is an unset variable as a rule."""
    text = os.fspath(path)
    if not text:
        raise ConfigError("the name of the directory is empty", hint='The working directory is "."')
    if _URL.match(text):
        raise ConfigError(
            f"dir must be a directory on this machine, not the URL {text}",
            hint='A store is named beside it: tidelog.open("./data", store="s3://bucket/prefix"); '
            "a log in memory is tidelog.open(None)",
        )
    return text
