"""Assembles an engine: takes settings, returns an open engine."""

from __future__ import annotations

import contextlib
import os
import secrets
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Literal, Protocol, Unpack, overload

import msgspec

from tidelog.clock import Clock, SystemClock
from tidelog.cold.catalog import Catalog, Owner
from tidelog.cold.owned_log import Node
from tidelog.cold.ownership import read_local_claim
from tidelog.cold.rebuild import NODE
from tidelog.config import EngineConfig, load_engine_config
from tidelog.config.load import OpenEngineOptions, checked_directory, directory_of
from tidelog.engine.cold.rebuild import RebuiltManifest, rebuild_manifest
from tidelog.engine.cold.shared_store import SharedStore
from tidelog.engine.cold.shipping import Shipping, shipped_pieces_of
from tidelog.engine.cold.store_link import refuse_occupied
from tidelog.engine.core import WAL, Core
from tidelog.engine.directory import EngineDirectory, remember, remembered, settled
from tidelog.engine.engine import Engine
from tidelog.engine.orchestrator.base import Orchestrator, check_orchestrator, drive
from tidelog.engine.reader import EngineReader
from tidelog.engine.recovery.checkpoint import refuse_half_restored
from tidelog.engine.recovery.restore import DrillStore, OnProgress, Restore, RestoreProgress, RestoreReport
from tidelog.engine.recovery.takeover import commit_takeover, discard_takeover, finish_takeover, prepare_takeover
from tidelog.engine.restoring import RestoringEngine
from tidelog.engine.succession import Succession
from tidelog.errors import ClosedError, ConfigError, Hint, InputError, NotFoundError, RetryError, TidelogError
from tidelog.events import turn_on_output
from tidelog.files import Files, LocalFiles
from tidelog.log import shutdown as stopping
from tidelog.log.directory import LOCK
from tidelog.store.aio import twin
from tidelog.store.binding import StoreBinding
from tidelog.store.keys import DEFAULT_ENGINE
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.metadata.bucket import copy_of
from tidelog.store.metadata.open import BUCKET, MEMORY, canonical_metadata_url, open_metadata_store
from tidelog.store.object_store import ObjectStore
from tidelog.store.scheduler import Threads, answered_within, in_thread
from tidelog.store.urls import check_replicas, open_store, require_store_directory

OnTakeOver = Callable[[Engine], object]
_EXAMPLE = 'tidelog.open_engine("./engine")'


class _ReadOptions(OpenEngineOptions, total=False):
    """The keywords of `open_engine` and `restore_engine`, for the overloads that say what is returned."""

    store: str | None
    metadata: str | None
    config: str | os.PathLike[str] | None


class _OwnOptions(_ReadOptions, total=False):
    orchestrator: Orchestrator | None
    take_over: bool


class _OpenOptions(_OwnOptions, total=False):
    create: bool
    shares_store: bool
    on_take_over: OnTakeOver | None


class _RestoreOptions(_OwnOptions, total=False):
    on_progress: OnProgress | None
    claim: bool
    shares_store: bool


@overload
def open_engine(
    dir: str | os.PathLike[str] | None = None, *, read_only: Literal[False] = False, **options: Unpack[_OpenOptions]
) -> Engine: ...


@overload
def open_engine(
    dir: str | os.PathLike[str] | None = None, *, read_only: Literal[True], **options: Unpack[_ReadOptions]
) -> EngineReader: ...


def open_engine(
    dir: str | os.PathLike[str] | None = None,
    *,
    store: str | None = None,
    metadata: str | None = None,
    orchestrator: Orchestrator | None = None,
    config: str | os.PathLike[str] | None = None,
    create: bool = True,
    take_over: bool = False,
    shares_store: bool = False,
    on_take_over: OnTakeOver | None = None,
    read_only: bool = False,
    **settings: Unpack[OpenEngineOptions],
) -> Engine | EngineReader:
    """Opens an engine, creating it if absent (unless `create=False`), and returns it; use it in a `with` statement.

    With a `store` (s3://bucket/prefix, gs://, az://, file:///path) everything at or below the low-water mark is shipped
    there, and the directory remembers the store. `metadata` names where its catalog and manifest are: bucket (the store
    itself, the default), sqlite:///path, etcd://host:port or memory://; it is remembered too. With an `orchestrator`
    the engine applies the entries that it lacks before it is returned. Settings come from the table `[storage_engine]`
    of `config` (a TOML file), then `TIDELOG_ENGINE_*` variables, then keywords, as `checkpoint_interval_seconds=60`.

    Raises HeldError while another node has the engine open; `take_over=True` takes it over.

    With `shares_store=True` it is one of several replicas, driven by the same log, that have one store: the first of
    them owns it and ships, the others follow (`is_follower`). They apply the same entries, let go of what the owner has
    shipped and read it from there; `take_over()`, or opening with `take_over=True`, makes one of them the owner. The
    directory remembers that it shares its store. With `take_over_after_seconds` a follower takes over by itself when
    the owner is dead: `on_take_over` is called with the engine to go on with and to close, in a thread, with the
    entries that the `orchestrator` has; this one is closed by then.

    With `read_only=True` it is read from its store alone: no directory is needed (one that is given names its store),
    nothing is claimed, any number of them may be open beside the owner, and it is open at once, however large it is.
    It shows what was shipped, and follows every `refresh_seconds`.
    """
    if orchestrator is not None:
        check_orchestrator(orchestrator)
    turn_on_output()
    loaded = _loaded(dir, store, metadata, config, settings)
    if read_only:
        given = {"an orchestrator": orchestrator is not None, "take_over": take_over, "create=False": not create}
        given |= {"shares_store": shares_store, "on_take_over": on_take_over is not None}
        for what in (name for name, is_given in given.items() if is_given):
            raise InputError(f"{what} is for an engine that is owned, and read_only=True owns nothing")
        return open_reader(loaded)
    directory = directory_of(loaded, _EXAMPLE)
    if not create:
        _require_engine(directory)
    if not (on_take_over is None or callable(on_take_over)):
        raise InputError(f"on_take_over must be a function of the engine, not {on_take_over!r}")
    _check_on_take_over(directory, loaded, is_given=on_take_over is not None, shares_store=shares_store)

    def taken_over(owner: Engine) -> None:
        if on_take_over is not None:
            on_take_over(_caught_up(owner, orchestrator))

    engine = open_engine_at(directory, loaded, take_over=take_over, shares_store=shares_store, on_take_over=taken_over)
    return _caught_up(engine, orchestrator)


def _check_on_take_over(directory: Path, config: EngineConfig, *, is_given: bool, shares_store: bool) -> None:
    if (config.storage_engine.take_over_after_seconds is not None) != is_given:
        raise InputError(
            "take_over_after_seconds and on_take_over go together",
            operation="open engine",
            hint=Hint(
                "Pass on_take_over=..., which is called with the engine that a replica has become",
                "Leave take_over_after_seconds out of the settings: it is for programs that hold a replica open",
            ),
        )
    if is_given and not (shares_store or _shares_store(directory)):
        raise InputError(
            "on_take_over is for a replica that shares its store, and this engine has its own, or none",
            operation="open engine",
            hint=Hint(
                "Open it with shares_store=True, or leave take_over_after_seconds and on_take_over out",
                "Leave take_over_after_seconds out of the settings: it is for replicas that share their store",
            ),
        )


def _shares_store(directory: Path) -> bool:
    known = remembered(LocalFiles(), directory)
    return known is not None and known.shares_store


class _OpensInTask(Protocol):
    """`open_engine` in a task: which of the two comes is known from `read_only`."""

    @overload
    async def __call__(
        self,
        dir: str | os.PathLike[str] | None = None,
        *,
        read_only: Literal[False] = False,
        **options: Unpack[_OpenOptions],
    ) -> Engine: ...

    @overload
    async def __call__(
        self, dir: str | os.PathLike[str] | None = None, *, read_only: Literal[True], **options: Unpack[_ReadOptions]
    ) -> EngineReader: ...


def _close(opened: Engine | EngineReader | RestoringEngine) -> None:
    opened.close()


open_engine_async: _OpensInTask = twin(open_engine, give_back=_close, before=stopping.prepare)  # type: ignore[assignment]


def open_reader(config: EngineConfig, *, runs_in_background: bool = True, name: str = DEFAULT_ENGINE) -> EngineReader:
    """Opens the engine that these settings name for reading, from its store, where it has this name."""
    known = None if config.dir is None else remembered(LocalFiles(), Path(config.dir).absolute())
    store = _store_url(config) or (None if known is None else known.store)
    if store is None:
        raise ConfigError(
            "no store was named to read from" if known is None else "this engine has no store to be read from",
            path=config.dir,
            hint=Hint(
                'Give it, as in tidelog.open_engine(store="s3://bucket/prefix", read_only=True)',
                command="Give it with --store s3://bucket/prefix",
            ),
        )
    own = known or EngineDirectory(node="", name=name)
    info = own.placed(store, _metadata_url(config), config.storage_engine.metadata_root)
    check_replicas(store, config.storage_engine.replicas)
    require_store_directory(store)
    objects = open_store(store, config.object_store)
    replicas = tuple(open_store(replica, config.object_store) for replica in config.storage_engine.replicas)
    metadata = _opened_metadata(info, config, objects, read_only=True)
    try:
        return EngineReader(
            objects,
            metadata,
            info.keys,
            config.storage_engine,
            replicas=replicas,
            runs_in_background=runs_in_background,
        )
    except BaseException:
        metadata.close()
        raise


@overload
def restore_engine(
    dir: str | os.PathLike[str] | None = None, *, lazy: Literal[False] = False, **options: Unpack[_RestoreOptions]
) -> Engine: ...


@overload
def restore_engine(
    dir: str | os.PathLike[str] | None = None, *, lazy: Literal[True], **options: Unpack[_RestoreOptions]
) -> RestoringEngine: ...


def restore_engine(
    dir: str | os.PathLike[str] | None = None,
    *,
    store: str | None = None,
    metadata: str | None = None,
    orchestrator: Orchestrator | None = None,
    config: str | os.PathLike[str] | None = None,
    on_progress: OnProgress | None = None,
    take_over: bool = False,
    claim: bool = True,
    shares_store: bool = False,
    lazy: bool = False,
    **settings: Unpack[OpenEngineOptions],
) -> Engine | RestoringEngine:
    """Restores a lost engine into an empty directory, from its store and its orchestrator, and returns it open.

    `metadata` is that of the engine that was lost, `bucket` by default.
    The restored engine owns the store from then on. Raises HeldError while another node has the engine open;
    `take_over=True` takes it over. Calling again resumes an interrupted restore. `on_progress` receives the progress.

    With `claim=False` it is a restore drill: the copy is read-only, also when it is opened again. It claims nothing,
    ships nothing and affects no other node, and has what was shipped when it was made.

    With `shares_store=True` it becomes a replica that follows the owner of the store, as `open_engine` says: nothing is
    claimed, and entries after what was shipped come from the orchestrator.

    With `lazy=True` it returns at once an engine that answers reads from the store while the disk is filled in the
    background; its `wait()` returns the restored engine. A restore that cannot begin is refused at once.
    """
    if orchestrator is not None:
        check_orchestrator(orchestrator)
        _refuse_in_drill("an orchestrator", not claim)
    _refuse_in_drill("take_over", take_over and not claim)
    _refuse_in_drill("shares_store", shares_store and not claim)
    turn_on_output()
    loaded = _loaded(dir, store, metadata, config, settings)
    directory = directory_of(loaded, _EXAMPLE)

    def restore(progressed: OnProgress | None) -> Engine:
        restore_directory(
            *(directory, loaded),
            on_progress=progressed,
            take_over=take_over,
            claims=claim,
            shares_store=shares_store,
            lazy=lazy,
        )
        return _caught_up(open_engine_at(directory, loaded, shares_store=shares_store), orchestrator)

    if not lazy:
        return restore(on_progress)
    restoring = _begun(loaded, restore, on_progress)
    # A drill's copy may be older than what a later look at the store would show.
    if claim and restoring._reader._is_behind:
        in_thread(lambda: _refresh(restoring._reader), "tidelog-engine-restore-refresh")
    return restoring


def restore_lazily_at(
    directory: Path, config: EngineConfig, *, name: str = DEFAULT_ENGINE, node_name: str = ""
) -> RestoringEngine:
    """Restores the engine of this name in its store into a directory, and answers reads from the store meanwhile: all
    that was shipped when this returns. `node_name` is what a cluster calls this node.
    """

    def restore(progressed: OnProgress | None) -> Engine:
        restore_directory(directory, config, on_progress=progressed, name=name, node_name=node_name)
        return open_engine_at(directory, config, name=name, node_name=node_name)

    restoring = _begun(config, restore, None, name=name)
    _refresh(restoring._reader)
    return restoring


def _begun(
    config: EngineConfig,
    restore: Callable[[OnProgress | None], Engine],
    on_progress: OnProgress | None,
    *,
    name: str = DEFAULT_ENGINE,
) -> RestoringEngine:
    config = msgspec.structs.replace(config, dir=None)
    return RestoringEngine(lambda: open_reader(config, runs_in_background=False, name=name), restore, on_progress)


def _refresh(reader: EngineReader) -> None:
    with contextlib.suppress(TidelogError):  # reads go on with what it has, and the restore tells what is wrong
        reader.refresh()


class _RestoresInTask(Protocol):
    """`restore_engine` in a task."""

    @overload
    async def __call__(
        self,
        dir: str | os.PathLike[str] | None = None,
        *,
        lazy: Literal[False] = False,
        **options: Unpack[_RestoreOptions],
    ) -> Engine: ...

    @overload
    async def __call__(
        self, dir: str | os.PathLike[str] | None = None, *, lazy: Literal[True], **options: Unpack[_RestoreOptions]
    ) -> RestoringEngine: ...


restore_engine_async: _RestoresInTask = twin(  # type: ignore[assignment]
    restore_engine, give_back=_close, before=stopping.prepare
)


def rebuild_engine_manifest(
    dir: str | os.PathLike[str] | None = None,
    *,
    store: str | None = None,
    metadata: str | None = None,
    config: str | os.PathLike[str] | None = None,
    **settings: Unpack[OpenEngineOptions],
) -> RebuiltManifest:
    """Rebuilds the metadata of an engine whose SQLite file or etcd is lost, from the copy that is published in its
    store.

    `dir` is the engine's directory: it says which store and metadata are meant, and can be opened again afterwards. If
    it is lost too, leave it out, name both, and call `restore_engine`. Nobody may have the engine open. An engine that
    is in the metadata store is not replaced (InputError).
    """
    turn_on_output()
    return rebuild_manifest_of(_loaded(dir, store, metadata, config, settings))


def rebuild_manifest_of(config: EngineConfig) -> RebuiltManifest:
    """Rebuilds the metadata of the engine that these settings name."""
    files, clock = LocalFiles(), SystemClock()
    directory = None if config.dir is None else Path(config.dir).absolute()
    known = None if directory is None else remembered(files, directory)
    info = known or EngineDirectory(node=NODE)
    if directory is not None and known is not None and known.store is not None:
        info = settled(files, directory, _store_url(config), _metadata_url(config), config.storage_engine.metadata_root)
    else:
        info = info.placed(_store_url(config), _metadata_url(config), config.storage_engine.metadata_root)
    if info.store is None or info.metadata == BUCKET:
        raise ConfigError(
            "no store was named to rebuild from" if info.store is None else "the metadata is the bucket itself",
            hint=Hint(
                'Name both, as in store="s3://bucket/prefix", metadata="etcd://host:2379"; metadata in the bucket has '
                "no copy to be rebuilt from",
                command="Name both, --store s3://bucket/prefix and --metadata etcd://host:2379; metadata in the bucket "
                "has no copy to be rebuilt from",
            ),
        )
    with contextlib.ExitStack() as opened:
        local = None
        if directory is not None and known is not None and files.is_directory(directory / WAL):
            lock = files.lock(directory / WAL / LOCK)
            opened.callback(lock.release)
            local = read_local_claim(files, directory / WAL)
        require_store_directory(info.store)
        objects = open_store(info.store, config.object_store)
        store = opened.enter_context(_opened_metadata(info, config, objects))
        return rebuild_manifest(store, info.keys, objects, clock=clock, node=info.node, local=local)


def _require_engine(directory: Path) -> None:
    if not LocalFiles().exists(directory / WAL):
        raise NotFoundError(
            f"there is no engine in {directory}",
            hint=Hint(
                "Check the path, open it without create=False, or get it back from its store with restore_engine",
                command="Check --dir, or get it back from its store with `tidelog engine restore`",
            ),
        )


def _require_store(directory: Path, store: str | None) -> None:
    if store is None:
        raise ConfigError(
            "shares_store is for replicas of one store, and this engine has none",
            path=directory,
            hint=Hint("Name the store with store=...", "Name the store with --store"),
        )


def open_engine_at(
    directory: Path,
    config: EngineConfig,
    *,
    runs_in_background: bool = True,
    files: Files | None = None,
    clock: Clock | None = None,
    take_over: bool = False,
    name: str = DEFAULT_ENGINE,
    shares_store: bool = False,
    on_take_over: OnTakeOver | None = None,
    node_name: str = "",
) -> Engine:
    """Opens an engine with these settings, and its store if it has one. Its lease is always renewed in the
    background. `name` is that of a new one in its store, `node_name` what a cluster calls this node.
    """
    files, clock = files or LocalFiles(), clock or SystemClock()
    finish_takeover(files, directory)
    refuse_half_restored(files, directory)
    settings, known = config.storage_engine, remembered(files, directory)
    store = _store_url(config) or (None if known is None else known.store)
    check_replicas(store or MEMORY, settings.replicas)
    answers_by = clock.monotonic() + settings.open_store_wait_seconds
    shares_store = shares_store or (known is not None and known.shares_store)
    if shares_store:
        _require_store(directory, store)
    else:
        _refuse_wrong_store(files, directory, config, name)
    info = settled(files, directory, _store_url(config), _metadata_url(config), settings.metadata_root, name)
    if shares_store and not info.shares_store:
        info = msgspec.structs.replace(info, shares_store=True)
        remember(files, directory, info)
    if info.store is None:
        if settings.replicas:
            raise ConfigError(
                "replicas are copies of a store, and this engine has none",
                path=directory,
                hint="Name a store, or no replicas",
            )
        with contextlib.ExitStack() as undo:
            core = Core.open(directory, settings, files, clock)
            undo.callback(core.close)
            threads = Threads()
            undo.callback(threads.close)
            engine = Engine(core, threads=threads, runs_in_background=runs_in_background)
            undo.pop_all()
            return engine
    with contextlib.ExitStack() as undo:
        objects = open_store(info.store, config.object_store)
        metadata = _opened_metadata(
            info, config, objects, read_only=info.is_drill, runs_in_background=runs_in_background
        )
        undo.callback(metadata.close)
        catalog = Catalog(metadata, info.keys)
        follows = info.shares_store and is_owned_elsewhere(files, directory, catalog, settings.open_store_wait_seconds)
        if follows and take_over:
            _restore_in_place(files, directory, _at(config, info), clock, info.name)
            follows = False
        # The log in a store that another replica ships is not this one's.
        core = Core.open(directory, settings, files, clock, None if follows else shipped_pieces_of(objects, catalog))
        undo.callback(core.close)
        if info.is_drill:
            engine = _drill(core, objects, metadata, info, config)
        elif follows:
            engine = _follower(
                core, objects, metadata, info, config, runs_in_background=runs_in_background, on_take_over=on_take_over
            )
        else:
            node = _node(core, objects, metadata, info, config)
            undo.callback(node.close)
            node.lease.node_name = node_name
            wait_seconds = max(0.0, answers_by - clock.monotonic())
            shipping = _shipping(core, node, info, config, take_over, wait_seconds)
            engine = Engine(
                core, shipping.reader, shipping, threads=node.threads, runs_in_background=runs_in_background
            )
        undo.pop_all()
        return engine


# Replicas that share a store: who owns it, who follows, and how a follower becomes the owner.


def is_owned_elsewhere(files: Files, directory: Path, catalog: Catalog, wait_seconds: float) -> bool:
    """Whether another replica owns the store. While that does not answer, a directory that has owned it still does."""
    local = read_local_claim(files, directory / WAL)
    answers: list[bool] = []

    def ask() -> None:
        found = catalog.owner()
        answers.append(found is not None and (local is None or not local.knows(found[0].incarnation)))

    with contextlib.suppress(RetryError):
        answered_within(wait_seconds, ask, "tidelog-engine-owner")
    return answers[0] if answers else local is None or local.claim is None


def _follower(
    core: Core,
    objects: ObjectStore,
    metadata: MetadataStore,
    info: EngineDirectory,
    config: EngineConfig,
    *,
    runs_in_background: bool,
    on_take_over: OnTakeOver | None,
) -> Engine:
    threads, settings = Threads(), config.storage_engine
    discard_takeover(core.files, core.directory)  # of a process that was killed
    replicas = [open_store(replica, config.object_store) for replica in settings.replicas]
    cold = SharedStore(core, objects, metadata, info.keys, replicas=replicas, threads=threads, node=info.node)
    taking_over = Lock()

    def take_over(follower: Engine, only_from_epoch: int | None = None) -> Engine:
        def check(progress: RestoreProgress) -> None:
            if only_from_epoch is not None:  # a caller of `take_over` waits for it
                follower._check_open()

        copied = _at(config, info)
        with taking_over:
            follower._check_open()
            _restore_beside(core.files, core.directory, copied, core.clock, info.name, only_from_epoch, check)
            follower._check_open()
            follower.close()
            commit_takeover(core.files, core.directory)
        return open_engine_at(
            core.directory,
            copied,
            runs_in_background=runs_in_background,
            files=core.files,
            clock=core.clock,
            on_take_over=on_take_over,
        )

    def succeed(dead: Owner) -> Callable[[], object] | None:
        follower = known()
        if follower is None or on_take_over is None:
            return None
        return partial(on_take_over, take_over(follower, dead.epoch))

    if settings.take_over_after_seconds is not None and on_take_over is not None:
        cold.succession = Succession(settings.take_over_after_seconds, core.clock, cold.dead_owner, succeed)
    engine = Engine(
        core,
        cold.reader,
        cold,
        threads=threads,
        runs_in_background=runs_in_background,
        on_take_over=take_over,
    )
    known = weakref.ref(engine)  # that it was dropped without being closed is to be noticed
    return engine


def _restore_in_place(files: Files, directory: Path, config: EngineConfig, clock: Clock, name: str) -> None:
    """Makes the owner of what is closed."""
    with contextlib.ExitStack() as opened:
        if files.is_directory(directory / WAL):
            lock = files.lock(directory / WAL / LOCK)
            opened.callback(lock.release)
        _restore_beside(files, directory, config, clock, name)
    commit_takeover(files, directory)


def _restore_beside(
    files: Files,
    directory: Path,
    config: EngineConfig,
    clock: Clock,
    name: str,
    only_from_epoch: int | None = None,
    on_progress: OnProgress | None = None,
) -> None:
    """A copy of what is in the store, which owns it then, beside the replica; in the place of any owner, or only of a
    dead one that had an epoch.
    """
    copy = prepare_takeover(files, directory)
    try:
        restore_directory(
            copy,
            config,
            files=files,
            clock=clock,
            take_over=only_from_epoch is None,
            only_from_epoch=only_from_epoch,
            name=name,
            on_progress=on_progress,
        )
    except ClosedError:
        raise  # the directory may be somebody else's by now
    except (TidelogError, OSError):
        with contextlib.suppress(TidelogError, OSError):
            discard_takeover(files, directory)
        raise


def _at(config: EngineConfig, info: EngineDirectory) -> EngineConfig:
    """The same settings with the store that the directory remembers."""
    metadata = msgspec.structs.replace(config.storage_engine, metadata=info.metadata, metadata_root=info.metadata_root)
    return msgspec.structs.replace(config, store=info.store, storage_engine=metadata)


def _opened_metadata(
    info: EngineDirectory,
    config: EngineConfig,
    objects: ObjectStore,
    *,
    read_only: bool = False,
    runs_in_background: bool = False,
) -> MetadataStore:
    """The metadata store of an engine. One that is out of reach is no error: the engine works without it."""
    return open_metadata_store(
        info.metadata,
        objects,
        read_only=read_only,
        proves_late=True,
        settings=config.metadata_store,
        runs_in_background=runs_in_background,
    )


def _node(
    core: Core, objects: ObjectStore, metadata: MetadataStore, info: EngineDirectory, config: EngineConfig
) -> Node:
    # One for each of shipping, snapshots, garbage, compactions and replicas: none of them waits for another.
    threads = Threads(4 + len(config.storage_engine.replicas))
    is_own = info.metadata in (BUCKET, MEMORY)
    return Node(
        objects,
        metadata,
        clock=core.clock,
        name=info.node,
        directory=core.directory,
        root=info.metadata_root,
        binding=None if is_own else StoreBinding(objects, metadata, info.metadata_root, core.clock),
        lease_seconds=config.lease_seconds,
        threads=threads,
    )


def _refuse_wrong_store(files: Files, directory: Path, config: EngineConfig, name: str) -> None:
    """Reports errors in the store of a new engine before anything is created in its directory."""
    url = _store_url(config)
    if url is None or files.exists(directory / WAL):
        return
    objects, info = open_store(url, config.object_store), _named(config, node="", name=name)

    def ask() -> None:
        with _opened_metadata(info, config, objects) as metadata:
            refuse_occupied(Catalog(metadata, info.keys), objects, directory)

    # A store that does not answer is tried again when it is claimed.
    with contextlib.suppress(RetryError):
        answered_within(config.storage_engine.open_store_wait_seconds, ask, "tidelog-engine-ask")


def restore_directory(
    directory: Path,
    config: EngineConfig,
    *,
    files: Files | None = None,
    clock: Clock | None = None,
    on_progress: OnProgress | None = None,
    take_over: bool = False,
    only_from_epoch: int | None = None,
    claims: bool = True,
    name: str = DEFAULT_ENGINE,
    shares_store: bool = False,
    node_name: str = "",
    lazy: bool = False,
) -> RestoreReport:
    """Fills an empty directory from the store so that it can be opened as an engine; without a claim it is
    read-only. A `lazy` one leaves word in the directory that it may be read from the store meanwhile.
    """
    files, clock = files or LocalFiles(), clock or SystemClock()
    url = _store_url(config)
    if url is None:
        raise ConfigError(
            "no store was named to restore from",
            hint=Hint(
                'Give it, as in tidelog.restore_engine("./new", store="s3://bucket/prefix")',
                command="Give it with --store s3://bucket/prefix",
            ),
        )
    check_replicas(url, config.storage_engine.replicas)
    require_store_directory(url)
    objects = open_store(url, config.object_store)
    info = _named(config, node=f"restore-{secrets.token_hex(8)}", is_drill=not claims, name=name)
    if shares_store:
        claims, info = False, msgspec.structs.replace(info, shares_store=True)
    copies = [open_store(replica, config.object_store) for replica in config.storage_engine.replicas]
    with contextlib.ExitStack() as opened:
        reads_copy = not claims and _is_copy(info, objects)
        metadata = opened.enter_context(_opened_metadata(info, config, objects, read_only=reads_copy))
        reading = [opened.enter_context(open_metadata_store(BUCKET, one, read_only=True)) for one in copies]
        return Restore(
            directory,
            objects,
            metadata,
            replicas=list(zip(copies, reading, strict=True)),
            keys=info.keys,
            node=info.node,
            node_name=node_name,
            settings=config.storage_engine,
            files=files,
            clock=clock,
            on_progress=on_progress,
            take_over=take_over,
            only_from_epoch=only_from_epoch,
            drill=None if claims else info,
            lazy=info if lazy else None,
            pins=not reads_copy,
            lease_seconds=config.lease_seconds,
        ).run()


def _is_copy(info: EngineDirectory, objects: ObjectStore) -> bool:
    """Whether the bucket has only the published copy of the engine's metadata."""
    if info.metadata != BUCKET:
        return False
    with open_metadata_store(BUCKET, objects, read_only=True) as reading:
        return copy_of(reading.get(info.keys.owner)) is not None


def _shipping(
    core: Core, node: Node, info: EngineDirectory, config: EngineConfig, take_over: bool, wait_seconds: float
) -> Shipping:
    shipping = Shipping(
        core,
        node,
        keys=info.keys,
        replicas=[open_store(replica, config.object_store) for replica in config.storage_engine.replicas],
        take_over=take_over,
        ownership_check_seconds=config.tier.ownership_check_seconds,
    )
    shipping.connect_within(wait_seconds)
    return shipping


def _drill(
    core: Core, objects: ObjectStore, metadata: MetadataStore, info: EngineDirectory, config: EngineConfig
) -> Engine:
    """Opens a copy that a restore drill has made: read-only, and without a claim."""
    settings = config.storage_engine
    replicas = [open_store(replica, config.object_store) for replica in settings.replicas]
    cold = DrillStore(
        core.directory, objects, metadata, info.keys, cache_bytes=settings.cold_cache_bytes, replicas=replicas
    )
    return Engine(core, cold.reader, cold, runs_in_background=False)


def _named(config: EngineConfig, *, node: str, is_drill: bool = False, name: str = DEFAULT_ENGINE) -> EngineDirectory:
    info = EngineDirectory(node=node, is_drill=is_drill, name=name)
    return info.placed(_store_url(config), _metadata_url(config), config.storage_engine.metadata_root)


def _loaded(
    dir: str | os.PathLike[str] | None,
    store: str | None,
    metadata: str | None,
    config: str | os.PathLike[str] | None,
    settings: OpenEngineOptions,
) -> EngineConfig:
    overrides: dict[str, object] = {**settings, "store": store, "metadata": metadata}
    if dir is not None:
        overrides["dir"] = checked_directory(dir)
    return load_engine_config(config, os.environ, overrides)


def _refuse_in_drill(what: str, is_given: bool) -> None:
    if is_given:
        raise InputError(
            f"{what} is for an engine that is claimed, and claim=False makes a copy for reading", operation="restore"
        )


def _store_url(config: EngineConfig) -> str | None:
    return config.store or config.storage_engine.store_url


def _metadata_url(config: EngineConfig) -> str | None:
    url = config.storage_engine.metadata
    return None if url is None else canonical_metadata_url(url)


def _caught_up(engine: Engine, orchestrator: Orchestrator | None) -> Engine:
    if orchestrator is not None:
        try:
            drive(engine, orchestrator)
        except BaseException:
            engine.close()
            raise
    return engine
