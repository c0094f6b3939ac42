"""The engines that a cluster gives to this node: opened from the store, handed over, and given up when they are lost.

    <log directory>/.engines/<name>/        the engine, while this node serves it
    <log directory>/.engines/.left/<name>/  what was here when another node had gone on with it

    open     the directory if it is still the end of the log; else a lazy restore: reads at once, changes later
    release  ship and checkpoint while it is served; no more requests; ship the rest; close

Invariants
- An engine is served only once this node has claimed it in the store: the fencing of the cold tier has the last word,
  and a directory that another node has gone on without is never served again.
- What was applied and not shipped when a node died is in the orchestrator's log, since the truncation mark of an engine
  is what its store has. It is on the disk of that node, too, and is set aside there, not deleted.
- An engine that is lost (fenced, failed, or its restore failed, with whatever error) is closed, and the agent is told:
  it opens it again if it is still this node's. None stays `restoring` that nobody restores.
- An engine that cannot be opened or restored says why (`failures` here, and those of the agent) until it can.
- Everything but `_open` and `_close` runs in the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from tidelog.cluster.documents import EngineArguments
from tidelog.cluster.failures import Failures
from tidelog.cold.ownership import read_local_claim
from tidelog.config import EngineConfig
from tidelog.engine.cold.shipping import Shipping
from tidelog.engine.core import WAL
from tidelog.engine.engine import Engine
from tidelog.engine.recovery.checkpoint import MARKER
from tidelog.engine.restoring import RestoringEngine
from tidelog.engine_wiring import open_engine_at, restore_lazily_at
from tidelog.errors import FencedError, NotFoundError, ReopenError, TidelogError
from tidelog.files import Files, LocalFiles
from tidelog.service.cluster_control import Unshipped
from tidelog.service.http.service import Service
from tidelog.store.metadata.open import BUCKET
from tidelog.store.scheduler import in_store_thread
from tidelog.store.urls import settings_beside

_logger = logging.getLogger("tidelog.cluster")
FOLDER = ".engines"
_LEFT = ".left"
_LOOK_SECONDS = 1.0


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where the engines of a cluster are by default: with its topics."""

    root: Path
    """The log directory."""
    store: str
    metadata: str
    metadata_root: str
    lease_seconds: float
    node_name: str = ""


class EngineWork(NamedTuple):
    """Counted since an engine was opened: bytes of its log, and of values that were read from the store; entries that
    were applied, and those reads. Reads from its disk show in the CPU of the node."""

    bytes_in: int
    bytes_out: int
    messages_in: int
    messages_out: int


class ClusterEngines:
    """The engines of this node (`agent.EngineHost`). `lost` tells the agent of one that is not open any more."""

    def __init__(
        self,
        service: Service,
        config: EngineConfig,
        place: Place,
        arguments: Callable[[str], EngineArguments],
        files: Files | None = None,
    ) -> None:
        self._service = service
        self._config = config
        self._place = place
        self._arguments = arguments
        self._files = files or LocalFiles()
        self._open_here: dict[str, Engine] = {}
        self._restoring: dict[str, RestoringEngine] = {}
        """Also after they are restored: their readers are closed with the engines."""
        self._finishing: dict[str, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._failures = Failures[str]()
        self.failures = Failures[str]()
        """Restores that are tried again, by engine."""
        self.lost: Callable[[str], None] = lambda name: None

    # Opening

    async def open_engine(self, name: str) -> None:
        """Returns when it can be read; HeldError while another node has it open."""
        opened = await in_store_thread(self._opened, name)
        if isinstance(opened, Engine):
            self._serve(name, opened)
        else:
            self._restoring[name] = self._service.restoring[name] = opened
            self._finishing[name] = asyncio.ensure_future(self._finish(name, opened))
        if self._looking is None:
            self._looking = asyncio.ensure_future(self._look())

    def _serve(self, name: str, engine: Engine) -> None:
        self._open_here[name] = self._service.engines[name] = engine

    def _opened(self, name: str) -> Engine | RestoringEngine:
        """In a thread."""
        directory, arguments = self._directory(name), self._arguments(name)
        config = self._config_of(arguments)
        there, node_name = arguments.name or name, self._place.node_name
        if self._may_go_on(directory):
            try:
                return _claimed(open_engine_at(directory, config, name=there, node_name=node_name))
            except FencedError as error:
                _logger.info("the engine %s is restored: %s", name, error)
                self._set_aside(directory)
        try:
            return restore_lazily_at(directory, config, name=there, node_name=node_name)
        except NotFoundError:
            if arguments.must_exist:
                raise
            self._clear(directory)
            return _claimed(open_engine_at(directory, config, name=there, node_name=node_name))

    def _directory(self, name: str) -> Path:
        return self._place.root / FOLDER / name

    def _config_of(self, arguments: EngineArguments) -> EngineConfig:
        place, own, reached = self._place, self._config.storage_engine, self._config.object_store
        is_elsewhere = arguments.store is not None
        if arguments.store is not None:
            reached = settings_beside(place.store, arguments.store, reached)
        settings = msgspec.structs.replace(
            own,
            metadata=(arguments.metadata or BUCKET) if is_elsewhere else place.metadata,
            metadata_root=arguments.metadata_root if is_elsewhere else place.metadata_root,
        )
        return msgspec.structs.replace(
            self._config,
            dir=None,
            store=arguments.store or place.store,
            lease_seconds=min(self._config.lease_seconds, place.lease_seconds),
            object_store=reached,
            storage_engine=settings,
        )

    def _may_go_on(self, directory: Path) -> bool:
        """Whether there is an engine that was served from here. One that never claimed anything has nothing."""
        files = self._files
        if not files.exists(directory / WAL) or files.exists(directory / MARKER):
            return False  # a restore that was cut off begins again by itself
        claim = read_local_claim(files, directory / WAL)
        if claim is not None and claim.claim is not None:
            return True
        self._clear(directory)
        return False

    def _clear(self, directory: Path) -> None:
        if self._files.is_directory(directory):
            self._files.remove_tree(directory)

    def _set_aside(self, directory: Path) -> None:
        folder = directory.parent / _LEFT
        self._files.make_directories(folder)
        self._clear(folder / directory.name)
        self._files.rename(directory, folder / directory.name)
        self._files.sync_directory(folder)
        self._files.sync_directory(directory.parent)

    async def _finish(self, name: str, restoring: RestoringEngine) -> None:
        """Serves it whole once it is restored."""
        try:
            engine = await restoring.wait_async()
            await in_store_thread(_verify, engine)
        except Exception as error:  # noqa: BLE001 - a disk, too, raises what it likes
            self.failures.add(name, f"the engine {name} was not restored", error)
            await self._give_up(name)
            return
        self.failures.pop(name, None)
        self._service.restoring.pop(name, None)
        self._serve(name, engine)
        _logger.info("the engine %s is restored, at seq %d", name, engine.applied_seq)

    # Releasing

    async def release_engine(self, name: str) -> None:
        """Ships what it may, and closes it so that another node may restore it at once."""
        finishing = self._finishing.pop(name, None)
        self.failures.pop(name, None)
        engine = self._open_here.get(name)
        if engine is None:
            if finishing is not None:
                finishing.cancel()
            await self._close(name)
            return
        if name in self._service.engines:
            with contextlib.suppress(TidelogError):  # it shortens what follows, and the restore elsewhere
                await engine.ship_async()
                await engine.create_checkpoint_async()
        self._service.engines.pop(name, None)
        try:
            await engine.update_low_water_mark_async(engine.low_water_mark)  # after what was accepted before
            await engine.ship_async()
        except ReopenError as error:
            _logger.warning("the engine %s is closed without shipping: %s", name, error)
        except Exception:
            self._serve(name, engine)  # until the store answers, or the node is to keep it
            raise
        is_shipped = engine.applied_seq == engine.high_water_mark and not _is_lost(engine)
        await self._close(name)
        if is_shipped:
            await in_store_thread(self._clear, self._directory(name))

    async def _close(self, name: str) -> None:
        """Not served from here on, whatever it is."""
        self._service.engines.pop(name, None)
        self._service.restoring.pop(name, None)
        engine, restoring = self._open_here.pop(name, None), self._restoring.pop(name, None)
        if engine is not None:
            await engine.close_async()
        if restoring is not None:
            await restoring.close_async()

    async def stop(self) -> None:
        """Closes all of them as they are."""
        tasks = [*self._finishing.values(), *(() if self._looking is None else (self._looking,))]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for name in list({**self._open_here, **self._restoring}):
            with contextlib.suppress(TidelogError):
                await self._close(name)

    # Losing

    async def _look(self) -> None:
        """An engine that was fenced, or failed, is opened again: it may be this node's once more."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for name, engine in list(self._open_here.items()):
                with self._failures.step(name, f"whether the engine {name} is lost is not known"):
                    if name in self._service.engines and _is_lost(engine):
                        _logger.warning("the engine %s is lost here, and is opened again if it is to be served", name)
                        await self._give_up(name)

    async def _give_up(self, name: str) -> None:
        self._finishing.pop(name, None)
        try:
            await self._close(name)
        except Exception as error:  # noqa: BLE001 - it is not served any more, however it was closed
            self._failures.add(name, f"the engine {name} was closed with an error", error)
        self.lost(name)

    async def fenced_engines(self) -> list[str]:
        """Those that another node has claimed since."""
        return await in_store_thread(_fenced, dict(self._open_here))

    # Restore points

    def unshipped(self) -> dict[str, Unshipped]:
        """In a thread: entries that are only on this disk and in the orchestrator's log."""
        found = {}
        for name, engine in list(self._open_here.items()):
            with contextlib.suppress(TidelogError):
                shipping = engine.statistics().shipping
                entries = max(0, engine.applied_seq - engine.high_water_mark)
                if entries and shipping is not None:
                    seconds = round(shipping.lag_seconds, 3)
                    found[name] = Unshipped(messages=entries, bytes=shipping.lag_bytes, seconds=seconds)
        return found

    def work(self) -> dict[str, EngineWork]:
        """In a thread: what the engines that are open here have done since."""
        found = {}
        for name, engine in list(self._open_here.items()):
            with contextlib.suppress(TidelogError):
                known = engine.statistics()
                cold_bytes, cold_reads = (0, 0) if known.cold is None else (known.cold.bytes_used, known.cold.reads)
                found[name] = EngineWork(known.wal.written_bytes, cold_bytes, known.applied_seq, cold_reads)
        return found

    def names(self) -> list[str]:
        """Those that are open here, or being restored."""
        return sorted({**self._open_here, **self._restoring})


def _shipping(engine: Engine) -> Shipping:
    cold = engine._upkeep.cold
    assert isinstance(cold, Shipping), "engines of a cluster have a store"
    return cold


def _claimed(engine: Engine) -> Engine:
    """The engine, once the store says that it is this node's."""
    try:
        _verify(engine)
    except BaseException:
        engine.close(checkpoint=False)
        raise
    return engine


def _verify(engine: Engine) -> None:
    _shipping(engine).owner.verify()


def _is_lost(engine: Engine) -> bool:
    return _shipping(engine).owner.is_fenced or engine._standing.has_failed


def _fenced(opened: dict[str, Engine]) -> list[str]:
    found = []
    for name, engine in opened.items():
        try:
            _verify(engine)
        except FencedError:
            found.append(name)
    return found
