"""Puts the parts together: settings in, open things out."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from tidelog.clock import Clock, SystemClock
from tidelog.config import Settings, load_settings
from tidelog.errors import ConfigError
from tidelog.files import Files, LocalFiles
from tidelog.log import stopping
from tidelog.tier.metadata.open import open_metadata_store
from tidelog.tier.stores import open_store
from tidelog.tier.tier import Tier
from tidelog.topics.directory_info import DirectoryInfo, Place, metadata_url
from tidelog.topics.storage import LogDirectory
from tidelog.topics.worker_thread import made_in_worker_thread


def open(
    dir: str | os.PathLike[str] | None = None,
    *,
    store: str | None = None,
    metadata: str | None = None,
    config: str | os.PathLike[str] | None = None,
    read_only: bool = False,
    **settings: object,
) -> LogDirectory:
    """Opens a log directory, made when absent, and returns it; close it, or use it in a `with` statement.

    With a `store` (s3://bucket/prefix, gs://, az://, file:///path, memory://) its history goes there; `metadata` says
    where the catalog is (sqlite in the directory, sqlite:///path, etcd://host:port, or bucket: the store itself). The
    directory remembers both. Settings come from `config` (a TOML file), then `TIDELOG_*` variables, then keywords, such
    as `fsync_interval_ms=100`. With `read_only=True` it can be open in another process at the same time; nothing is
    changed, and what that process writes can be followed.
    """
    overrides = {**settings, "store": store, "metadata": metadata}
    if dir is not None:
        overrides["dir"] = _checked_path(dir)
    loaded = load_settings(None if config is None else Path(config), os.environ, overrides)
    if loaded.dir is None:
        raise ConfigError(
            "no directory was named", hint='Give it: tidelog.open("./data"), `dir` in the config, or TIDELOG_DIR'
        )
    return open_directory(Path(loaded.dir), loaded, read_only=read_only)


async def open_async(
    dir: str | os.PathLike[str] | None = None,
    *,
    store: str | None = None,
    metadata: str | None = None,
    config: str | os.PathLike[str] | None = None,
    read_only: bool = False,
    **settings: object,
) -> LogDirectory:
    """As `open`, in a worker thread; for `async with await tidelog.open_async(...)`, or to be closed."""
    stopping.prepare()
    return await made_in_worker_thread(
        lambda: open(dir, store=store, metadata=metadata, config=config, read_only=read_only, **settings),
        LogDirectory.close,
    )


def open_directory(
    root: Path,
    settings: Settings,
    *,
    read_only: bool = False,
    runs_in_background: bool = True,
    files: Files | None = None,
    clock: Clock | None = None,
) -> LogDirectory:
    """A log directory with these settings, with its store if it has one."""
    root = Path(os.path.abspath(root))  # a process may change its directory while this is open
    files, clock = files or LocalFiles(), clock or SystemClock()

    def open_tier(info: DirectoryInfo) -> Tier:
        assert info.store is not None and info.metadata is not None
        objects = open_store(info.store, settings.object_store)
        url = metadata_url(root, info.metadata)
        return Tier(
            objects,
            open_metadata_store(url, objects, read_only=read_only),
            files=files,
            clock=clock,
            node=info.node,
            root=settings.metadata_root,
            runs_in_background=runs_in_background and not read_only,
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
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError(f"a directory is a str or a Path, not {type(path).__name__}")
    text = os.fspath(path)
    if not text:
        raise ConfigError("the name of the directory is empty", hint='The working directory is "."')
    return text
