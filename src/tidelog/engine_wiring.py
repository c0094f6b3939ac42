"""Puts the parts of an engine together: settings in, an open engine out."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Unpack

from tidelog.clock import Clock, SystemClock
from tidelog.config import EngineConfig, load_engine_config
from tidelog.config.options import OpenEngineOptions
from tidelog.engine.claim import refuse_occupied
from tidelog.engine.core import WAL, Core
from tidelog.engine.engine import Engine
from tidelog.engine.engine_directory import EngineDirectory, settled
from tidelog.engine.opening import checked_directory, opened_in_thread
from tidelog.engine.orchestrator import Orchestrator, check_orchestrator, drive
from tidelog.engine.restore import OnProgress, Restore, RestoreReport
from tidelog.engine.restore_marker import refuse_half_restored
from tidelog.engine.shipped_log import shipped_pieces_of
from tidelog.engine.shipping import Shipping
from tidelog.errors import ConfigError, NotFoundError, RetryError
from tidelog.files import Files, LocalFiles
from tidelog.tier.catalog import Catalog
from tidelog.tier.keys import EngineKeys
from tidelog.tier.metadata.open import BUCKET, open_metadata_store
from tidelog.tier.object_store import ObjectStore
from tidelog.tier.stores import open_store


def open_engine(
    dir: str | os.PathLike[str] | None = None,
    *,
    store: str | None = None,
    orchestrator: Orchestrator | None = None,
    config: str | os.PathLike[str] | None = None,
    create: bool = True,
    **settings: Unpack[OpenEngineOptions],
) -> Engine:
    """Opens an engine, made when absent (unless `create=False`), and returns it; use it in a `with` statement.

    With a `store` (s3://bucket/prefix, gs://, az://, file:///path) what is at or below the low-water mark goes there,
    and the directory remembers it. With an `orchestrator` the engine applies what that has and it has not, before it is
    returned. Settings come from the table `[storage_engine]` of `config` (a TOML file), then `TIDELOG_ENGINE_*`
    variables, then keywords, such as `checkpoint_interval_secs=60`.
    """
    if orchestrator is not None:
        check_orchestrator(orchestrator)
    loaded = _loaded(dir, store, config, settings)
    if not create:
        _require_engine(_directory(loaded))
    engine = open_engine_at(_directory(loaded), loaded)
    return _caught_up(engine, orchestrator)


async def open_engine_async(
    dir: str | os.PathLike[str] | None = None,
    *,
    store: str | None = None,
    orchestrator: Orchestrator | None = None,
    config: str | os.PathLike[str] | None = None,
    create: bool = True,
    **settings: Unpack[OpenEngineOptions],
) -> Engine:
    """As `open_engine`, in a worker thread. If the task is cancelled meanwhile, what it opens is closed."""
    return await opened_in_thread(
        lambda: open_engine(dir, store=store, orchestrator=orchestrator, config=config, create=create, **settings)
    )


def restore_engine(
    dir: str | os.PathLike[str] | None = None,
    *,
    store: str | None = None,
    orchestrator: Orchestrator | None = None,
    config: str | os.PathLike[str] | None = None,
    on_progress: OnProgress | None = None,
    **settings: Unpack[OpenEngineOptions],
) -> Engine:
    """Builds a lost engine anew in an empty directory, from its store and its orchestrator, and returns it open.

    Whoever had the engine open loses it: the restored one owns the store from then on. A restore that was cut off is
    begun anew by the same call. `on_progress` hears how far it is.
    """
    if orchestrator is not None:
        check_orchestrator(orchestrator)
    loaded = _loaded(dir, store, config, settings)
    directory = _directory(loaded)
    restore_directory(directory, loaded, on_progress=on_progress)
    return _caught_up(open_engine_at(directory, loaded), orchestrator)


async def restore_engine_async(
    dir: str | os.PathLike[str] | None = None,
    *,
    store: str | None = None,
    orchestrator: Orchestrator | None = None,
    config: str | os.PathLike[str] | None = None,
    on_progress: OnProgress | None = None,
    **settings: Unpack[OpenEngineOptions],
) -> Engine:
    """As `restore_engine`, in a worker thread. If the task is cancelled meanwhile, what it opens is closed."""
    return await opened_in_thread(
        lambda: restore_engine(
            dir, store=store, orchestrator=orchestrator, config=config, on_progress=on_progress, **settings
        )
    )


def _require_engine(directory: Path) -> None:
    if not LocalFiles().exists(directory / WAL):
        raise NotFoundError(
            f"there is no engine in {directory}",
            hint="Check the path, open it without create=False, or get it back from its store with restore_engine",
        )


def open_engine_at(
    directory: Path,
    config: EngineConfig,
    *,
    runs_in_background: bool = True,
    files: Files | None = None,
    clock: Clock | None = None,
) -> Engine:
    """An engine with these settings, with its store if it has one."""
    files, clock = files or LocalFiles(), clock or SystemClock()
    refuse_half_restored(files, directory)
    _refuse_wrong_store(files, directory, config)
    info = settled(files, directory, _store_url(config))
    if info.store is None and config.storage_engine.replicas:
        raise ConfigError(
            "replicas are copies of a store, and this engine has none",
            path=directory,
            hint="Name a store, or no replicas",
        )
    objects = None if info.store is None else open_store(info.store, config.object_store)
    keys = EngineKeys(info.name)
    pieces = None if objects is None else shipped_pieces_of(objects, keys)
    core = Core.open(directory, config.storage_engine, files, clock, pieces)
    try:
        shipping = None if objects is None else _shipping(core, objects, keys, info.node, config)
        return Engine(
            *(core, None if shipping is None else shipping.reader, shipping), runs_in_background=runs_in_background
        )
    except BaseException:
        core.close()
        raise


def _refuse_wrong_store(files: Files, directory: Path, config: EngineConfig) -> None:
    """What is wrong with the store of a new engine is told before anything is made in its directory."""
    url = _store_url(config)
    if url is None or files.exists(directory / WAL):
        return
    objects = open_store(url, config.object_store)
    # A store that gives no answer is asked again when it is claimed.
    with contextlib.suppress(RetryError), open_metadata_store(BUCKET, objects, read_only=True) as metadata:
        refuse_occupied(Catalog(metadata, EngineKeys()), objects, directory)


def restore_directory(
    directory: Path,
    config: EngineConfig,
    *,
    files: Files | None = None,
    clock: Clock | None = None,
    on_progress: OnProgress | None = None,
) -> RestoreReport:
    """Fills an empty directory from the store, so that it can be opened as an engine."""
    files, clock = files or LocalFiles(), clock or SystemClock()
    url = _store_url(config)
    if url is None:
        raise ConfigError(
            "no store was named to restore from",
            hint='Give it, as in tidelog.restore_engine("./new", store="s3://bucket/prefix"), or with --store',
        )
    objects = open_store(url, config.object_store)
    info = EngineDirectory(node=f"restore-{os.getpid()}")
    copies = [open_store(replica, config.object_store) for replica in config.storage_engine.replicas]
    with contextlib.ExitStack() as opened:
        metadata = opened.enter_context(open_metadata_store(BUCKET, objects))
        reading = [opened.enter_context(open_metadata_store(BUCKET, one, read_only=True)) for one in copies]
        return Restore(
            *(directory, objects, metadata),
            replicas=list(zip(copies, reading, strict=True)),
            keys=EngineKeys(info.name),
            node=info.node,
            settings=config.storage_engine,
            files=files,
            clock=clock,
            on_progress=on_progress,
        ).run()


def _shipping(core: Core, objects: ObjectStore, keys: EngineKeys, node: str, config: EngineConfig) -> Shipping:
    replicas = [open_store(replica, config.object_store) for replica in config.storage_engine.replicas]
    shipping = Shipping(core, objects, keys=keys, node=node, replicas=replicas)
    shipping.connect_if_possible()
    return shipping


def _loaded(
    dir: str | os.PathLike[str] | None,
    store: str | None,
    config: str | os.PathLike[str] | None,
    settings: OpenEngineOptions,
) -> EngineConfig:
    overrides: dict[str, object] = {**settings, "store": store}
    if dir is not None:
        overrides["dir"] = checked_directory(dir)
    return load_engine_config(config, os.environ, overrides)


def _directory(config: EngineConfig) -> Path:
    if not config.dir:
        raise ConfigError("no directory was named", hint='Give it, as in tidelog.open_engine("./engine")')
    return Path(os.path.abspath(checked_directory(config.dir)))


def _store_url(config: EngineConfig) -> str | None:
    return config.store or config.storage_engine.store_url


def _caught_up(engine: Engine, orchestrator: Orchestrator | None) -> Engine:
    if orchestrator is not None:
        try:
            drive(engine, orchestrator)
        except BaseException:
            engine.close()
            raise
    return engine
