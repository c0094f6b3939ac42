"""Puts the parts of an engine together: settings in, an open engine out."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Unpack

from tidelog.clock import Clock, SystemClock
from tidelog.config import EngineConfig, load_engine_config
from tidelog.config.options import OpenEngineOptions
from tidelog.engine.claim import refuse_occupied
from tidelog.engine.core import WAL, Core
from tidelog.engine.drill import DrillStore
from tidelog.engine.engine import Engine
from tidelog.engine.engine_directory import EngineDirectory, settled
from tidelog.engine.opening import checked_directory, opened_in_thread
from tidelog.engine.orchestrator import Orchestrator, check_orchestrator, drive
from tidelog.engine.restore import OnProgress, Restore, RestoreReport
from tidelog.engine.restore_marker import refuse_half_restored
from tidelog.engine.shipped_log import shipped_pieces_of
from tidelog.engine.shipping import ClaimPolicy, Shipping
from tidelog.errors import ConfigError, InputError, NotFoundError, RetryError
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
    take_over: bool = False,
    **settings: Unpack[OpenEngineOptions],
) -> Engine:
    """Opens an engine, made when absent (unless `create=False`), and returns it; use it in a `with` statement.

    With a `store` (s3://bucket/prefix, gs://, az://, file:///path) what is at or below the low-water mark goes there,
    and the directory remembers it. With an `orchestrator` the engine applies what that has and it has not, before it is
    returned. Settings come from the table `[storage_engine]` of `config` (a TOML file), then `TIDELOG_ENGINE_*`
    variables, then keywords, such as `checkpoint_interval_secs=60`.

    HeldError while another node has the engine open: `take_over=True` takes it from there.
    """
    if orchestrator is not None:
        check_orchestrator(orchestrator)
    loaded = _loaded(dir, store, config, settings)
    if not create:
        _require_engine(_directory(loaded))
    engine = open_engine_at(_directory(loaded), loaded, take_over=take_over)
    return _caught_up(engine, orchestrator)


async def open_engine_async(
    dir: str | os.PathLike[str] | None = None,
    *,
    store: str | None = None,
    orchestrator: Orchestrator | None = None,
    config: str | os.PathLike[str] | None = None,
    create: bool = True,
    take_over: bool = False,
    **settings: Unpack[OpenEngineOptions],
) -> Engine:
    """As `open_engine`, in a worker thread. If the task is cancelled meanwhile, what it opens is closed."""
    return await opened_in_thread(
        lambda: open_engine(
            dir,
            store=store,
            orchestrator=orchestrator,
            config=config,
            create=create,
            take_over=take_over,
            **settings,
        )
    )


def restore_engine(
    dir: str | os.PathLike[str] | None = None,
    *,
    store: str | None = None,
    orchestrator: Orchestrator | None = None,
    config: str | os.PathLike[str] | None = None,
    on_progress: OnProgress | None = None,
    take_over: bool = False,
    claim: bool = True,
    **settings: Unpack[OpenEngineOptions],
) -> Engine:
    """Builds a lost engine anew in an empty directory, from its store and its orchestrator, and returns it open.

    The restored one owns the store from then on. HeldError while another node has the engine open: `take_over=True`
    takes it from there. A restore that was cut off is begun again by the same call. `on_progress` hears how far it is.

    With `claim=False` it is a restore drill: the copy is for reading, also when it is opened again. It claims nothing,
    ships nothing and disturbs nobody, and has what was shipped when it was made.
    """
    if orchestrator is not None:
        check_orchestrator(orchestrator)
        _refuse_in_drill("an orchestrator", not claim)
    _refuse_in_drill("take_over", take_over and not claim)
    loaded = _loaded(dir, store, config, settings)
    directory = _directory(loaded)
    restore_directory(directory, loaded, on_progress=on_progress, take_over=take_over, claims=claim)
    return _caught_up(open_engine_at(directory, loaded), orchestrator)


async def restore_engine_async(
    dir: str | os.PathLike[str] | None = None,
    *,
    store: str | None = None,
    orchestrator: Orchestrator | None = None,
    config: str | os.PathLike[str] | None = None,
    on_progress: OnProgress | None = None,
    take_over: bool = False,
    claim: bool = True,
    **settings: Unpack[OpenEngineOptions],
) -> Engine:
    """As `restore_engine`, in a worker thread. If the task is cancelled meanwhile, what it opens is closed."""
    return await opened_in_thread(
        lambda: restore_engine(
            dir,
            store=store,
            orchestrator=orchestrator,
            config=config,
            on_progress=on_progress,
            take_over=take_over,
            claim=claim,
            **settings,
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
    take_over: bool = False,
) -> Engine:
    """An engine with these settings, with its store if it has one. Its lease is kept in the background in any case."""
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
        if objects is not None and info.is_drill:
            return _drill(core, objects, keys, config)
        shipping = None if objects is None else _shipping(core, objects, keys, info.node, config, take_over)
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
    take_over: bool = False,
    claims: bool = True,
) -> RestoreReport:
    """Fills an empty directory from the store, so that it can be opened as an engine; without a claim for reading."""
    files, clock = files or LocalFiles(), clock or SystemClock()
    url = _store_url(config)
    if url is None:
        raise ConfigError(
            "no store was named to restore from",
            hint='Give it, as in tidelog.restore_engine("./new", store="s3://bucket/prefix"), or with --store',
        )
    objects = open_store(url, config.object_store)
    info = EngineDirectory(node=f"restore-{secrets.token_hex(8)}", store=url, is_drill=not claims)
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
            take_over=take_over,
            drill=None if claims else info,
            lease_seconds=config.lease_seconds,
        ).run()


def _shipping(
    core: Core, objects: ObjectStore, keys: EngineKeys, node: str, config: EngineConfig, take_over: bool
) -> Shipping:
    replicas = [open_store(replica, config.object_store) for replica in config.storage_engine.replicas]
    policy = ClaimPolicy(
        take_over=take_over,
        lease_seconds=config.lease_seconds,
        ownership_check_seconds=config.tier.ownership_check_seconds,
    )
    shipping = Shipping(core, objects, keys=keys, node=node, replicas=replicas, policy=policy)
    shipping.connect_if_possible()
    return shipping


def _drill(core: Core, objects: ObjectStore, keys: EngineKeys, config: EngineConfig) -> Engine:
    """A copy that a restore drill has made: for reading, and without a claim."""
    settings = config.storage_engine
    replicas = [open_store(replica, config.object_store) for replica in settings.replicas]
    cold = DrillStore(core.directory, objects, keys, cache_bytes=settings.cold_cache_bytes, replicas=replicas)
    return Engine(core, cold.reader, cold, runs_in_background=False)


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


def _refuse_in_drill(what: str, is_given: bool) -> None:
    if is_given:
        raise InputError(
            f"{what} is for an engine that is claimed, and claim=False makes a copy for reading", operation="restore"
        )


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
