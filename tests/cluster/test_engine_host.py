"""Engines of a cluster: nodes in this process over a real etcd and one bucket, with real engines behind HTTP."""

from __future__ import annotations

import asyncio
import itertools
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Event
from typing import Any, TypeVar
from uuid import uuid4

import pytest
from tests.cluster.test_runtime import until
from tests.servers import EtcdServer
from tests.service.http.test_placed import Answer

import tidelog
from tidelog import engine_wiring
from tidelog.cluster.documents import EngineArguments
from tidelog.cluster.engine_host import FOLDER, ClusterEngines, Place, _shipping
from tidelog.cluster.joining import join, make_cluster
from tidelog.cluster.operations import ClusterOperations
from tidelog.cluster.runtime import Cluster
from tidelog.config import EngineConfig
from tidelog.engine.entry import CreateBucket, PutObject
from tidelog.engine_wiring import open_engine_at, restore_directory
from tidelog.errors import ConflictError, FencedError, InputError, NotFoundError
from tidelog.service.node import Node
from tidelog.service.placement import Address
from tidelog.store.metadata.memory import MemoryMetadataStore
from tidelog.store.metadata.open import open_metadata_store
from tidelog.store.settings import StoreSettings
from tidelog.store.urls import open_store

LOOPBACK = Address("127.0.0.1", 0)
NAME = "photos"
ENGINE = f"/v1/engines/{NAME}"
# Longer than a busy machine pauses a process: a node that is alive must not lose its engine to another here.
LEASE_SECONDS = 60.0
WAIT_SECONDS = 120
Result = TypeVar("Result")


class ServingNode:
    """A node as `tidelog serve` runs it."""

    def __init__(self, root: Path, name: str, etcd: str, metadata_root: str, store: str = "") -> None:
        self.name = name
        self.root = root / name
        self._store, self._metadata, self._metadata_root = store or f"file://{root}/bucket", etcd, metadata_root
        self.cluster: Cluster
        self.node: Node
        self.engines: ClusterEngines
        self.url = ""
        self.is_dead = False

    async def start(self, config: EngineConfig | None = None) -> None:
        directory = await asyncio.to_thread(
            lambda: tidelog.open(
                self.root, store=self._store, metadata=self._metadata, metadata_root=self._metadata_root
            )
        )
        self.cluster = make_cluster(directory, self.name, "", "1.0", LEASE_SECONDS)
        self.node = Node(directory, placement=self.cluster.placement)
        await self.cluster.load()
        listening = await self.node.start(LOOPBACK, LOOPBACK)
        self.url = listening.http_url
        self.engines = await join(self.cluster, self.node, directory, listening, config)

    def has(self, name: str = NAME) -> bool:
        """Whether it serves the engine whole."""
        return name in self.node.http.engines

    async def stop(self) -> None:
        if not self.is_dead:
            await self.cluster.stop()
        await self.engines.stop()
        if not self.is_dead:
            await self.cluster.leave()
        await self.node.stop()
        await asyncio.to_thread(self.cluster._watching.join, WAIT_SECONDS)

    async def stop_looking(self) -> None:
        """It does not notice any more that an engine is lost."""
        looking = self.engines._looking
        assert looking is not None
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)

    async def die(self) -> None:
        """It hands nothing over, and its leases run out; what it has open stays open."""
        self.is_dead = True
        await self.stop_looking()
        cluster = self.cluster
        cluster._is_over = True
        cluster._watch.close()
        for task in cluster._tasks:
            task.cancel()
        await asyncio.gather(*cluster._tasks, return_exceptions=True)
        assert cluster.agent is not None
        await cluster.agent.stop()
        await asyncio.to_thread(cluster._heartbeat.close)
        for lease in (_shipping(engine)._node.lease for engine in self.node.http.engines.values()):
            await asyncio.to_thread(lease._background.close)
            assert lease._lease is not None
            await asyncio.to_thread(lease._lease.revoke)
        assert cluster.member._lease is not None
        await asyncio.to_thread(cluster.member._lease.revoke)


class Nodes:
    """All of them, and what operators and clients do."""

    def __init__(self, nodes: list[ServingNode], operations: ClusterOperations) -> None:
        self.all = nodes
        self.operations = operations

    @property
    def owner(self) -> ServingNode:
        return next(node for node in self.all if not node.is_dead and node.has())

    @property
    def other(self) -> ServingNode:
        return next(node for node in self.all if not node.is_dead and not node.has())

    async def owned(self) -> None:
        await until(lambda: any(node.has() for node in self.all if not node.is_dead))

    async def ask(self, work: Callable[..., Result], *arguments: Any, **options: Any) -> Result:
        return await asyncio.to_thread(lambda: work(*arguments, **options))

    async def move(self, to: ServingNode, **options: Any) -> None:
        request = await self.ask(self.operations.move_engine, NAME, to.name, by="ops", **options)
        assert await self.ask(self.operations.until, self.operations.is_carried_out(request), WAIT_SECONDS)
        await until(to.has)


@asynccontextmanager
async def clustered(root: Path, etcd: str, count: int = 2) -> AsyncIterator[Nodes]:
    metadata_root = f"engines-{uuid4().hex[:8]}"
    nodes = [ServingNode(root, f"n{number + 1}", etcd, metadata_root) for number in range(count)]
    with open_metadata_store(etcd) as metadata:
        for node in nodes:
            await node.start()
        try:
            yield Nodes(nodes, ClusterOperations(metadata, metadata_root))
        finally:
            await asyncio.gather(*(node.stop() for node in nodes))


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(4 * WAIT_SECONDS):
            await work()

    asyncio.run(main())


def filled(url: str, first: int, stop: int, *, is_committed: bool = True) -> tuple[int, int]:
    """Applies entries through a node; returns the marks."""
    with tidelog.connect(url) as client:
        engine = client.engine(NAME)
        if first == 1:
            engine.apply(1, CreateBucket("b"))
        for seq in range(max(2, first), stop):
            assert engine.apply(seq, PutObject("b", f"k{seq}", b"v%d" % seq)).applied
        if is_committed:
            engine.update_low_water_mark(stop - 1)
        return engine.applied_seq, engine.high_water_mark


def keys(url: str) -> list[str]:
    with tidelog.connect(url) as client:
        return [one.key for one in client.engine(NAME).scan("b")]


def test_engine_is_placed_served_through_any_node_and_moved_whole(tmp_path: Path, etcd_server: EtcdServer) -> None:
    """The leader gives it to a node, which creates it; others send clients there. A move takes what is committed along,
    and what is not is applied again by who has it; the directory of the old node is empty after it."""

    async def work() -> None:
        async with clustered(tmp_path, etcd_server.url) as nodes:
            await nodes.ask(nodes.operations.add_engine, NAME)
            await nodes.owned()
            first, second = nodes.owner, nodes.other
            await until(lambda: NAME in second.cluster.placement.engines())
            sent_on = await nodes.ask(Answer, second.url, "GET", ENGINE)
            assert (sent_on.status, sent_on.location) == (307, first.url + ENGINE)
            assert (await nodes.ask(Answer, second.url, "GET", "/v1/engines")).json == {
                "engines": [],
                "elsewhere": [{"name": NAME, "node": first.name}],
            }
            assert first.cluster.measure is not None
            await nodes.ask(first.cluster.measure)
            assert (await nodes.ask(filled, second.url, 1, 20))[0] == 19
            load, _ = await nodes.ask(first.cluster.measure)
            assert load.engine_loads[NAME].bytes_in > load.engine_loads[NAME].messages_in > 0 == load.total.messages_in
            owned = [_shipping(first.node.http.engines[NAME]).owner.owned.ownership.owner.who]
            await nodes.move(second)
            owned.append(_shipping(second.node.http.engines[NAME]).owner.owned.ownership.owner.who)
            assert owned == [first.name, second.name]
            assert not first.has()
            await until(lambda: not (first.root / FOLDER / NAME).exists())
            assert (await nodes.ask(Answer, first.url, "GET", ENGINE)).status == 307
            moved = await nodes.ask(Answer, second.url, "GET", ENGINE)
            assert (moved.json["applied_seq"], moved.json["high_water_mark"]) == (19, 19)
            assert await nodes.ask(keys, first.url) == sorted(f"k{seq}" for seq in range(2, 20))
            assert (await nodes.ask(filled, first.url, 20, 25))[0] == 24
            await nodes.move(first, pin=True)
            assert (await nodes.ask(filled, second.url, 25, 26))[0] == 25
            rows = await nodes.ask(nodes.operations.engines)
            assert [(row.name, row.node, row.pin) for row in rows] == [(NAME, first.name, first.name)]

    run(work)


def test_engine_of_a_node_that_died_is_restored_elsewhere(tmp_path: Path, etcd_server: EtcdServer) -> None:
    """With all that was shipped. What was not is counted before, the client is told to apply it again, and the old node
    neither answers nor changes anything."""

    async def work() -> None:
        async with clustered(tmp_path, etcd_server.url) as nodes:
            await nodes.ask(nodes.operations.add_engine, NAME)
            await nodes.owned()
            dead, alive = nodes.owner, nodes.other
            await nodes.ask(filled, dead.url, 1, 10)
            await dead.node.http.engines[NAME].ship_async()
            await nodes.ask(filled, dead.url, 10, 13, is_committed=False)
            assert dead.engines.unshipped()[NAME].messages == 3
            client = await nodes.ask(tidelog.connect, alive.url)
            remote = client.engine(NAME)
            assert await nodes.ask(lambda: remote.applied_seq) == 12
            engine = dead.node.http.engines[NAME]
            await dead.die()
            await until(alive.has)
            with pytest.raises(ConflictError, match="is at seq 9, and had applied 12"):
                await nodes.ask(remote.apply, 13, PutObject("b", "k13", b"next"))
            for seq in range(10, 14):
                assert (await nodes.ask(remote.apply, seq, PutObject("b", f"k{seq}", b"late"))).applied
            await nodes.ask(client.close)
            with pytest.raises(FencedError):
                await nodes.ask(engine.ship)
            answer = await nodes.ask(Answer, dead.url, "GET", ENGINE)
            assert (answer.status, answer.retry_after) == (503, "1")
            assert await nodes.ask(keys, alive.url) == sorted(f"k{seq}" for seq in range(2, 14))
            reasons = {one.reason for one in itertools.chain(*(r.decisions for r in nodes.operations.decisions()))}
            assert f"{dead.name} is not alive" in reasons

    run(work)


def test_engine_that_was_fenced_is_opened_again_from_the_store(tmp_path: Path, etcd_server: EtcdServer) -> None:
    """Somebody took it over by hand: the node sets aside what it had, and serves what the store has."""

    async def work() -> None:
        async with clustered(tmp_path, etcd_server.url, count=1) as nodes:
            await nodes.ask(nodes.operations.add_engine, NAME)
            await nodes.owned()
            node = nodes.owner
            await nodes.ask(filled, node.url, 1, 10)
            fenced = node.node.http.engines[NAME]
            await fenced.ship_async()
            place, config = node.engines._place, node.engines._config_of(EngineArguments())

            def take_over() -> None:
                copy = tmp_path / "copy"
                restore_directory(copy, config, take_over=True, name=NAME)
                with open_engine_at(copy, config, name=NAME) as engine:
                    engine.apply(10, PutObject("b", "k10", b"by hand"))
                    engine.update_low_water_mark(10)
                    engine.ship()

            await node.stop_looking()  # or it takes the engine back before the copy is open
            await nodes.ask(take_over)
            with pytest.raises(FencedError):
                await fenced.ship_async()
            node.engines._looking = asyncio.ensure_future(node.engines._look())
            await until(lambda: node.has() and node.node.http.engines[NAME] is not fenced)
            assert "k10" in await nodes.ask(keys, node.url)
            assert (place.root / FOLDER / ".left" / NAME).is_dir()
            await nodes.ask(nodes.operations.remove_engine, NAME)
            await until(lambda: not node.has())
            assert (await nodes.ask(Answer, node.url, "GET", ENGINE)).status == 404

    run(work)


def test_engine_is_readable_while_it_is_restored_and_changed_after(
    tmp_path: Path, etcd_server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads come from the store; what changes it is 503 with Retry-After, so that clients wait."""
    go_on = Event()
    original = engine_wiring.open_engine_at

    async def work() -> None:
        async with clustered(tmp_path, etcd_server.url) as nodes:
            await nodes.ask(nodes.operations.add_engine, NAME)
            await nodes.owned()
            first, second = nodes.owner, nodes.other
            await nodes.ask(filled, first.url, 1, 10)

            def held_up(*arguments: Any, **options: Any) -> Any:
                assert go_on.wait(WAIT_SECONDS)
                return original(*arguments, **options)

            monkeypatch.setattr(engine_wiring, "open_engine_at", held_up)
            await nodes.ask(nodes.operations.move_engine, NAME, second.name)
            await until(lambda: NAME in second.node.http.restoring)
            try:
                assert len(await nodes.ask(keys, first.url)) == 8
                marks = (await nodes.ask(Answer, second.url, "GET", ENGINE)).json
                assert (marks["applied_seq"], marks["is_restoring"]) == (9, True)
                refused = await nodes.ask(Answer, second.url, "POST", f"{ENGINE}/low-water-mark", {"seq": 9})
                assert (refused.status, refused.retry_after) == (503, "1")
            finally:
                go_on.set()
            await until(second.has)
            assert (await nodes.ask(filled, first.url, 10, 12))[0] == 11

    run(work)


def test_engine_whose_restore_fails_on_the_disk_is_restored_again(
    tmp_path: Path, etcd_server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss prevented: an error that nobody had foreseen left it readable, and closed to changes for ever."""
    original = engine_wiring.open_engine_at
    failed: list[Path] = []

    async def work() -> None:
        async with clustered(tmp_path, etcd_server.url) as nodes:
            await nodes.ask(nodes.operations.add_engine, NAME)
            await nodes.owned()
            first, second = nodes.owner, nodes.other
            await nodes.ask(filled, first.url, 1, 10)

            def failing_once(directory: Path, *arguments: Any, **options: Any) -> Any:
                if not failed:
                    failed.append(directory)
                    raise OSError(5, "Input/output error")
                return original(directory, *arguments, **options)

            monkeypatch.setattr(engine_wiring, "open_engine_at", failing_once)
            await nodes.move(second)
            assert failed
            assert NAME not in second.node.http.restoring
            assert (await nodes.ask(filled, first.url, 10, 12))[0] == 11

    run(work)


def test_entries_that_are_applied_while_an_engine_is_sealed_are_moved_too(
    tmp_path: Path, etcd_server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner answers until it closes the engine: what it has acknowledged and was committed is shipped before."""

    async def work() -> None:
        async with clustered(tmp_path, etcd_server.url) as nodes:
            await nodes.ask(nodes.operations.add_engine, NAME)
            await nodes.owned()
            first, second = nodes.owner, nodes.other
            await nodes.ask(filled, first.url, 1, 10)
            engine = first.node.http.engines[NAME]
            original = engine.create_checkpoint_async

            async def checkpointing() -> int:
                seq = await original()
                await nodes.ask(filled, first.url, 10, 15)
                return seq

            monkeypatch.setattr(engine, "create_checkpoint_async", checkpointing)
            await nodes.move(second)
            assert (await nodes.ask(Answer, second.url, "GET", ENGINE)).json["applied_seq"] == 14
            assert len(await nodes.ask(keys, first.url)) == 13

    run(work)


def test_operators_are_told_what_cannot_be(tmp_path: Path, etcd_server: EtcdServer) -> None:
    """Names are checked, an engine is added once, and one that must exist is not made up."""

    async def work() -> None:
        async with clustered(tmp_path, etcd_server.url, count=1) as nodes:
            operations = nodes.operations
            with pytest.raises(InputError, match="cannot be the name of an engine"):
                await nodes.ask(operations.add_engine, "a/b")
            with pytest.raises(NotFoundError, match="no engine maps"):
                await nodes.ask(operations.move_engine, "maps", "n1")
            with pytest.raises(NotFoundError, match="no engine maps"):
                await nodes.ask(operations.remove_engine, "maps")
            await nodes.ask(operations.add_engine, "maps", must_exist=True)
            with pytest.raises(ConflictError, match="has an engine maps"):
                await nodes.ask(operations.add_engine, "maps")
            agent = nodes.all[0].cluster.agent
            assert agent is not None
            await until(lambda: any("there is no engine 'maps'" in text for text in agent.failures.values()))
            answer = await nodes.ask(Answer, nodes.all[0].url, "GET", "/v1/engines/maps")
            assert (answer.status, answer.json["error"]) == (503, "ServerUnavailableError")
            assert "n1 cannot open it: there is no engine 'maps'" in answer.json["detail"]
            assert "taking it over" not in answer.json["hint"]
            assert (await seen_failing(nodes))[0].startswith("n1: open engine: there is no engine 'maps'")
            assert (await nodes.ask(operations.status)).failing_engines == 1
            assert "tidelog_cluster_failing_engines 1\n" in await nodes.ask(metrics_of, nodes.all[0].url)
            await nodes.ask(operations.remove_engine, "maps")
            await until(lambda: not agent._working)

    run(work)


def metrics_of(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=WAIT_SECONDS) as answer:
        return str(answer.read().decode())


async def seen_failing(nodes: Nodes) -> list[str]:
    """The reasons, once there are any."""
    while True:
        rows = await nodes.ask(nodes.operations.engines)
        if found := [row.reason for row in rows if row.state == "failing" and row.reason is not None]:
            return found
        await asyncio.sleep(0.05)


def test_engine_of_another_kind_of_store_is_not_opened_with_the_settings_of_the_nodes(tmp_path: Path) -> None:
    """An engine in a directory could not be served by nodes whose topics are in S3: the endpoint was not its."""
    reached = StoreSettings(store_endpoint="http://127.0.0.1:1", store_access_key_id="a", store_fetch_bytes=1)
    place = Place(root=tmp_path, store="s3://bucket/a", metadata="memory://", metadata_root="", lease_seconds=9)
    service: Any = None
    made = ClusterEngines(service, EngineConfig(object_store=reached), place, lambda name: EngineArguments())
    directory = f"file://{tmp_path}/maps"
    other = made._config_of(EngineArguments(store=directory)).object_store
    assert open_store(directory, other).url == directory
    for same in (EngineArguments(store="s3://bucket/b"), EngineArguments()):
        assert made._config_of(same).object_store == reached


def test_engine_whose_store_no_node_can_reach_is_not_added(tmp_path: Path) -> None:
    """It was added, and waited for a node for ever."""
    operations = ClusterOperations(MemoryMetadataStore(), "tidelog")
    with pytest.raises(InputError, match="no such directory"):
        operations.add_engine("maps", store=f"file://{tmp_path}/missing")
    with pytest.raises(InputError, match="no node reaches it"):
        operations.add_engine("maps", store="memory://")
    operations.add_engine("maps", store=f"file://{tmp_path}")
    assert [(one.name, one.state, one.node) for one in operations.engines()] == [("maps", "unassigned", None)]
    assert not (tmp_path / "missing").exists()
