"""Nodes of a cluster, running in one process over a store in memory: documents, watches, heartbeats, leader and agents
with their threads, and logs that only remember whether they are open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from tests.cluster.test_agent import FakeHost

from tidelog.clock import SystemClock
from tidelog.cluster.failures import Failures
from tidelog.cluster.leader import TopicSeen
from tidelog.cluster.member import Identity, Member
from tidelog.cluster.operations import ClusterOperations
from tidelog.cluster.runtime import Cluster, _LoadWatch
from tidelog.errors import ConfigError, ConflictError, HeldError, InputError, NotFoundError, ServerUnavailableError
from tidelog.service.cluster_control import NodeLoad, NodeTail, Unshipped
from tidelog.store.document import encode_json
from tidelog.store.keys import DEFAULT_ROOT, ClusterKeys
from tidelog.store.metadata.base import Entry
from tidelog.store.metadata.memory import MemoryMetadataStore
from tidelog.store.metadata.watch import Changes, Watch
from tidelog.topics.names import TopicName

ORDERS = TopicName("shop", "orders")
WAIT_SECONDS = 120
LEASE_SECONDS = 2


class RunningNode:
    """A node whose process can end without a word."""

    def __init__(self, etcd: MemoryMetadataStore, name: str) -> None:
        clock = SystemClock()
        identity = Identity(name, name, f"127.0.0.1:{9000 + int(name[1:])}", f"http://{name}", "", "1.0")
        self.host = FakeHost()
        self.cluster = Cluster(etcd, clock, Member(etcd, ClusterKeys(), clock, identity, LEASE_SECONDS))
        self.unshipped = 0
        self.cluster.measure = self._measure

    def _measure(self) -> tuple[NodeLoad, NodeTail]:
        now_us, agent = SystemClock().now_us(), self.cluster.agent
        opening = 0 if agent is None else agent.opening
        load = NodeLoad(
            node=self.name, at_us=now_us, disk_free_bytes=1 << 40, open=len(self.host.open), opening=opening
        )
        unshipped = Unshipped(messages=self.unshipped, bytes=100, seconds=1.0)
        return load, NodeTail(at_us=now_us, topics={str(ORDERS): unshipped} if self.unshipped else {})

    @property
    def name(self) -> str:
        return self.cluster.member.name

    async def start(self) -> None:
        await self.cluster.load()
        await self.cluster.join(self.host)

    async def stop(self) -> None:
        await self.cluster.stop()
        await self.cluster.leave()

    async def die(self) -> None:
        """Nothing is handed over, and the lease runs out by itself."""
        self.cluster._is_over = True
        self.cluster._watch.close()
        self.cluster._close_loads()
        for task in self.cluster._tasks:
            task.cancel()
        await asyncio.gather(*self.cluster._tasks, return_exceptions=True)
        assert self.cluster.agent is not None
        await self.cluster.agent.stop()
        await asyncio.to_thread(self.cluster._heartbeat.close)


@asynccontextmanager
async def running(etcd: MemoryMetadataStore, count: int) -> AsyncIterator[list[RunningNode]]:
    nodes = [RunningNode(etcd, f"n{number + 1}") for number in range(count)]
    for node in nodes:
        await node.start()
    try:
        yield nodes
    finally:
        await asyncio.gather(*(node.stop() for node in nodes if not node.cluster._is_over))


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not is_so():
            await asyncio.sleep(0.01)


def parts(node: RunningNode) -> set[int]:
    return {number for name, number in node.host.open if name == str(ORDERS)}


def run(work: Callable[[MemoryMetadataStore], Awaitable[None]]) -> None:
    async def main() -> None:
        await work(MemoryMetadataStore())

    asyncio.run(main())


def test_created_topics_are_spread_and_opened_on_their_nodes() -> None:
    """Every node answers the same about who serves what; a topic is created once and can grow."""

    async def work(etcd: MemoryMetadataStore) -> None:
        async with running(etcd, 3) as nodes:
            await until(lambda: all(len(node.cluster.placement.nodes()) == 3 for node in nodes))
            facts = await nodes[0].cluster.placement.create(ORDERS, 3, {"retention_seconds": 5})
            assert (facts.partitions, facts.settings) == (3, {"retention_seconds": 5})
            assert {nodes[0].cluster.placement.owner(ORDERS, number) for number in range(3)} == set(
                nodes[0].cluster.placement.nodes()
            )
            await until(lambda: sorted(number for node in nodes for number in parts(node)) == [0, 1, 2])
            with pytest.raises(ConflictError):
                await nodes[1].cluster.placement.create(ORDERS, 1, {})
            await nodes[2].cluster.placement.grow(ORDERS, 6)
            await until(lambda: sorted(number for node in nodes for number in parts(node)) == list(range(6)))
            await until(lambda: len({str(node.cluster.placement.owner(ORDERS, 5)) for node in nodes}) == 1)
            owned = [{n for n in range(6) if node.cluster.placement.is_ours(ORDERS, n)} for node in nodes]
            assert owned == [parts(node) for node in nodes]
            assert {node.cluster.placement.node_id for node in nodes} == {1, 2, 3}
            assert nodes[0].cluster.placement.controller() in nodes[0].cluster.placement.nodes()

    run(work)


def test_log_directory_gives_a_sign_of_life_with_its_node() -> None:
    """Loss prevented: it had a lease and a rhythm of its own, and others waited for both after the node had died."""

    async def work(etcd: MemoryMetadataStore) -> None:
        async with running(etcd, 1) as nodes:
            await until(lambda: nodes[0].host.calls.count("renew") >= 2)

    run(work)


def test_partitions_of_a_node_that_died_are_opened_elsewhere() -> None:
    """Also when it was the leader; nothing is its own any more by then."""

    async def work(etcd: MemoryMetadataStore) -> None:
        async with running(etcd, 3) as nodes:
            await until(lambda: all(len(node.cluster.placement.nodes()) == 3 for node in nodes))
            await nodes[0].cluster.placement.create(ORDERS, 6, {})
            dead = next(node for node in nodes if node.cluster.leads)
            alive = [node for node in nodes if node is not dead]
            await dead.die()
            await until(lambda: set().union(*map(parts, alive)) == set(range(6)))
            assert not any(dead.cluster.placement.is_ours(ORDERS, number) for number in range(6))
            await until(lambda: sum(node.cluster.leads for node in alive) == 1)
            slots = alive[0].cluster.state.coordinators.slots
            assert dead.name not in slots

    run(work)


def test_a_leader_whose_round_failed_leads_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss prevented: its loop ended with the first error that nobody had foreseen, it kept its lease, and nothing was
    given to anybody from then on. Loops that report and follow go on, too."""

    async def work(etcd: MemoryMetadataStore) -> None:
        async with running(etcd, 2) as nodes:
            await until(lambda: all(len(node.cluster.placement.nodes()) == 2 for node in nodes))
            leader = next(node for node in nodes if node.cluster.leads).cluster
            loads = leader._loads
            assert loads is not None
            seen: list[str] = []

            def failing_once(name: str, there: object, method: str) -> None:
                right = getattr(there, method)

                def fail(*arguments: Any) -> Any:
                    if name not in seen:
                        seen.append(name)
                        raise KeyError(name)
                    if name in leader.failures:
                        seen.append(f"{name}: {leader.failures[name]}")
                    return right(*arguments)

                monkeypatch.setattr(there, method, fail)

            failing_once("lead", leader.rounds, "round")
            failing_once("load", leader, "measure")
            failing_once("documents", leader._watch, "next")
            failing_once("loads", loads._watch, "next")
            failing_once("lease", leader.member, "beat")
            failing_once("sign of life", leader.agent, "renew")
            every = {"lead", "load", "documents", "loads", "lease", "sign of life"}
            for number in range(2):  # what is followed has news
                etcd.put(ClusterKeys().topic("shop", f"news-{number}"), b"{}")
                leader._progress.set()
                await until(lambda: {"documents", "loads", "load"} <= set(seen))
            await until(lambda: {f"{name}: KeyError: '{name}'" for name in every} <= set(seen))
            await nodes[0].cluster.placement.create(ORDERS, 4, {})
            await until(lambda: set().union(*map(parts, nodes)) == set(range(4)))
            await until(lambda: not leader.failures)

    run(work)


def test_a_node_that_is_stopped_hands_over_first() -> None:
    """It releases what others are to open; the last one just ends."""

    async def work(etcd: MemoryMetadataStore) -> None:
        async with running(etcd, 2) as nodes:
            await until(lambda: all(len(node.cluster.placement.nodes()) == 2 for node in nodes))
            await nodes[0].cluster.placement.create(ORDERS, 4, {})
            await until(lambda: all(len(parts(node)) == 2 for node in nodes))
            await nodes[0].stop()
            assert nodes[0].host.open == set()
            await until(lambda: parts(nodes[1]) == set(range(4)))

    run(work)


def test_operators_drain_move_pin_and_see_the_reasons() -> None:
    """By documents alone; a plan is shown before, and what was decided after."""

    async def work(etcd: MemoryMetadataStore) -> None:
        async with running(etcd, 3) as nodes:
            await until(lambda: all(len(node.cluster.placement.nodes()) == 3 for node in nodes))
            await nodes[0].cluster.placement.create(ORDERS, 3, {})
            await until(lambda: sum(len(parts(node)) for node in nodes) == 3)
            operations = ClusterOperations(etcd, DEFAULT_ROOT)
            planned = operations.plan(drain=["n2"])
            assert [(one.kind, one.source) for one in planned if one.topic] == [("drain", "n2")]
            assert operations.drain("n2")
            assert await asyncio.to_thread(operations.until, operations.is_empty("n2"), WAIT_SECONDS)
            assert nodes[1].host.open == set()
            assert next(row for row in operations.nodes() if row.name == "n2").state == "drained"
            with pytest.raises(InputError, match="n2 gets no partitions"):
                operations.move(str(ORDERS), 0, "n2")
            assert operations.undrain("n2")
            request = operations.move(str(ORDERS), 0, "n2", pin=True, by="ops")
            assert await asyncio.to_thread(operations.until, operations.is_carried_out(request), WAIT_SECONDS)
            await until(lambda: 0 in parts(nodes[1]))
            assert operations.state().topics[ORDERS].pins == {0: "n2"}
            reasons = {one.reason for rounds in operations.decisions() for one in rounds.decisions}
            assert {"n2 is being drained", "asked for by ops", "nobody serves it"} <= reasons
            assert operations.unpin(str(ORDERS), 0)
            status = operations.status()
            assert (status.nodes, status.partitions, status.unassigned) == (3, 3, 0)
            with pytest.raises(NotFoundError, match="no node n9"):
                operations.plan(lose=["n9"])
            assert operations.settings(strategy="fair", max_moves_per_hour="7").max_moves_per_hour == 7
            with pytest.raises(ConfigError, match="strategy"):
                operations.settings(strategy="wild")
            assert operations.settings(strategy=None).strategy == "balanced"

    run(work)


def test_nodes_that_all_lost_their_leases_are_named_to_clients() -> None:
    """librdkafka forgets every address when it hears of no node, and never asks again: etcd that did not answer for
    longer than the leases would stop all clients for good."""

    async def work(etcd: MemoryMetadataStore) -> None:
        async with running(etcd, 2) as nodes:
            await until(lambda: all(len(node.cluster.placement.nodes()) == 2 for node in nodes))
            named: list[tuple[int, list[str]]] = []
            for node in nodes:
                cluster = node.cluster
                look = lambda cluster=cluster: named.append(  # noqa: E731
                    (len(cluster.state.nodes), [one.node for one in cluster.placement.nodes()])
                )
                cluster.placement.on_change(look)
            for node in nodes:
                assert node.cluster.member._lease is not None
                node.cluster.member._lease.revoke()
            await until(lambda: [count for count, _ in named].count(0) >= 2)
            assert sorted(names for count, names in named if count == 0)[:2] == [["n1"], ["n2"]]
            assert all(names for _, names in named)
            await until(lambda: all(len(node.cluster.state.nodes) == 2 for node in nodes))

    run(work)


def test_a_topic_that_the_watch_has_not_brought_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that created it at one node was told by another one that there is none. Names that nobody has are not
    asked for without end, and what etcd says late brings nothing back."""

    async def work(etcd: MemoryMetadataStore) -> None:
        async with running(etcd, 2) as nodes:
            await until(lambda: all(len(node.cluster.placement.nodes()) == 2 for node in nodes))
            first, late = (node.cluster.placement for node in nodes)
            held: list[str] = []
            monkeypatch.setattr(late, "follow", held.extend)
            await first.create(ORDERS, 1, {})
            assert ORDERS not in late.topics()
            with monkeypatch.context() as patched:
                patched.setattr("tidelog.cluster.placement._HEARD_SECONDS", 0.1)
                with pytest.raises(ServerUnavailableError, match="has not heard of"):
                    await late.hear_of(ORDERS)
            hearing = asyncio.ensure_future(late.hear_of(ORDERS))
            await until(lambda: len(late._asked_at) == 2 and not late._asking and bool(held))
            assert not hearing.done()
            assert ORDERS not in late.topics()
            monkeypatch.undo()
            late.follow(held)
            await hearing
            assert ORDERS in late.topics()

            asked: list[str] = []
            monkeypatch.setattr(late._clock, "monotonic", lambda: 1000.0)
            read = etcd.get

            def counted(key: str) -> Entry | None:
                asked.append(key)
                return read(key)

            monkeypatch.setattr(etcd, "get", counted)
            for number in range(100):
                await late.hear_of(TopicName("shop", f"none-{number}"))
            assert 10 <= sum("none-" in key for key in asked) <= 20
            monkeypatch.undo()

    run(work)


def test_deletion_waits_until_the_owners_have_let_go() -> None:
    """What is stored is removed while nobody has it open, and then the topic is gone for all."""

    async def work(etcd: MemoryMetadataStore) -> None:
        async with running(etcd, 2) as nodes:
            await nodes[0].cluster.placement.create(ORDERS, 2, {})
            await until(lambda: sum(len(parts(node)) for node in nodes) == 2)
            open_at_removal = []

            async def remove() -> None:
                if any(parts(node) for node in nodes):
                    raise HeldError("a node has it open")
                open_at_removal.append(sum(len(parts(node)) for node in nodes))

            await nodes[1].cluster.placement.delete(ORDERS, remove)
            assert open_at_removal == [0]
            await until(lambda: all(ORDERS not in node.cluster.placement.topics() for node in nodes))
            assert etcd.get(ClusterKeys().topic(*ORDERS)) is None

    run(work)


def test_leader_finishes_a_deletion_whose_node_died() -> None:
    """The mark is there and nobody goes on with it."""

    async def work(etcd: MemoryMetadataStore) -> None:
        async with running(etcd, 2) as nodes:
            removed: list[TopicName] = []

            async def remove(name: TopicName) -> None:
                removed.append(name)

            for node in nodes:
                node.cluster.deletion_seconds = 0.1
                node.cluster.remove_topic = remove
            await nodes[0].cluster.placement.create(ORDERS, 2, {})
            gone = msgspec.structs.replace(nodes[0].cluster.state.topics[ORDERS], is_deleting=True)
            etcd.put(ClusterKeys().topic(*ORDERS), encode_json(gone))
            await until(lambda: etcd.get(ClusterKeys().topic(*ORDERS)) is None)
            assert removed == [ORDERS]

    run(work)


def test_topics_of_the_time_before_the_cluster_are_adopted() -> None:
    """The catalog has them, and the documents of the cluster do not."""

    async def work(etcd: MemoryMetadataStore) -> None:
        node = RunningNode(etcd, "n1")
        node.cluster.known_topics = lambda: {ORDERS: TopicSeen(17, 2)}
        await node.start()
        await until(lambda: parts(node) == {0, 1})
        assert node.cluster.placement.topics()[ORDERS].created_us == 17
        await node.stop()

    run(work)


class _ClosedWhileItSpeaks(Watch):
    """A watch that is closed by another thread while it has something to say."""

    def __init__(self) -> None:
        super().__init__()
        self.has_ended = False

    def next(self, timeout_seconds: float) -> Changes | None:
        self.close()
        return Changes(True, {})

    def end(self) -> None:
        self.has_ended = True


def test_leader_that_leads_no_more_gives_back_what_it_followed_the_loads_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss prevented: the connection of its stream stayed open until the collection of garbage came by."""
    etcd, watch = MemoryMetadataStore(), _ClosedWhileItSpeaks()
    monkeypatch.setattr(etcd, "watch", lambda prefix: watch)
    follower = _LoadWatch(etcd, "loads/", Failures())
    follower.thread.join(WAIT_SECONDS)
    assert (watch.is_closed, watch.has_ended) == (True, True)
