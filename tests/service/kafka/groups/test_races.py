"""Groups whose members come, go, hang and lose their connections, over a broker that is killed again and again.

Whatever happens, two members never own a partition in the same generation, of the new protocol never at all; and when
it is quiet again, the members that are left share all partitions.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from tests.campaign import examples, first_seed
from tests.service.kafka.group_requests import ORDERS, Bench, run

from tidelog.service.kafka.error_codes import ErrorCode as E

PARTITIONS = 7
SEEDS = range(first_seed(), first_seed() + examples(5))
_RETRY = (E.NOT_COORDINATOR, E.COORDINATOR_NOT_AVAILABLE, E.COORDINATOR_LOAD_IN_PROGRESS)


class DroppedError(Exception):
    """The connection was closed."""


class Client:
    """A consumer. `owned` is what it believes it may read."""

    def __init__(self, bench: Bench, name: str, world: World) -> None:
        self.bench = bench
        self.name = name
        self.world = world
        self.owned: frozenset[int] = frozenset()
        self.generation = -1
        self.request: asyncio.Task[Any] | None = None
        self.task = asyncio.get_running_loop().create_task(self._live())

    async def ask(self, api: int, version: int, **fields: Any) -> Any:
        """Sends a request; DroppedError when the connection closes meanwhile."""
        self.request = asyncio.get_running_loop().create_task(
            self.bench.ask(api, version, client=self.name, group_id="g", **fields)
        )
        try:
            return await asyncio.shield(self.request)
        except asyncio.CancelledError:
            if self.request.cancelled() and not self.task.cancelling():
                raise DroppedError from None
            self.request.cancel()
            raise
        finally:
            self.request = None

    def drop(self) -> None:
        if self.request is not None:
            self.request.cancel()

    async def _live(self) -> None:
        while True:
            try:
                await self._step()
            except DroppedError:
                await asyncio.sleep(0.1)

    async def _step(self) -> None:
        raise NotImplementedError

    async def leave(self) -> None:
        raise NotImplementedError

    async def kill(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.owned = frozenset()


class ClassicClient(Client):
    """Of the classic protocol, eager: it gives up everything before it joins."""

    member_id = ""
    is_joined = False

    async def _step(self) -> None:
        if not self.is_joined:
            await self._join()
            return
        await asyncio.sleep(3)
        known = {"member_id": self.member_id, "generation_id": self.generation}
        self._heard((await self.ask(12, 4, **known)).error_code)

    def _heard(self, error: int) -> None:
        if error in _RETRY or error == E.NONE:
            return
        assert error in (E.UNKNOWN_MEMBER_ID, E.ILLEGAL_GENERATION, E.REBALANCE_IN_PROGRESS), E(error)
        self.is_joined, self.owned = False, frozenset()
        if error == E.UNKNOWN_MEMBER_ID:
            self.member_id = ""

    async def _join(self) -> None:
        joined = await self.ask(
            11,
            5,
            member_id=self.member_id,
            session_timeout_ms=10_000,
            rebalance_timeout_ms=20_000,
            protocol_type="consumer",
            protocols=[{"name": "range", "metadata": b"m"}],
        )
        if joined.error_code == E.MEMBER_ID_REQUIRED:
            self.member_id = joined.member_id
        elif joined.error_code != E.NONE:
            self._heard(joined.error_code)
            await asyncio.sleep(0.1)
        else:
            await self._sync(joined)

    async def _sync(self, joined: Any) -> None:
        self.member_id, self.generation = joined.member_id, joined.generation_id
        ids = sorted(one.member_id for one in joined.members)
        parts = [{"member_id": one, "assignment": bytes(range(at, PARTITIONS, len(ids)))} for at, one in enumerate(ids)]
        known = {"member_id": self.member_id, "generation_id": self.generation}
        synced = await self.ask(14, 3, **known, assignments=parts)
        if synced.error_code != E.NONE:
            self._heard(synced.error_code)
            await asyncio.sleep(0.1)
            return
        self.is_joined, self.owned = True, frozenset(synced.assignment)
        self.world.check(self)

    async def leave(self) -> None:
        await self.kill()
        await self.bench.ask(13, 3, group_id="g", members=[{"member_id": self.member_id}])


class NewClient(Client):
    """Of the new protocol."""

    epoch = 0
    is_whole = True

    async def _step(self) -> None:
        facts = next(iter(self.bench.topics.topics()))
        fields: dict[str, Any] = {}
        if self.is_whole or self.epoch == 0:
            owned = [{"topic_id": facts.id, "partitions": sorted(self.owned)}] if self.owned and self.epoch else []
            fields = {
                "rebalance_timeout_ms": 20_000,
                "subscribed_topic_names": [ORDERS],
                "topic_partitions": owned,
            }
        self.is_whole = True  # until there is an answer
        answer = await self.ask(68, 1, member_id=self.name, member_epoch=self.epoch, **fields)
        if answer.error_code in (E.UNKNOWN_MEMBER_ID, E.FENCED_MEMBER_EPOCH):
            self.epoch, self.owned = 0, frozenset()
            return
        if answer.error_code in _RETRY:
            await asyncio.sleep(0.1)
            return
        assert answer.error_code == E.NONE, (E(answer.error_code), answer.error_message)
        self.epoch = self.generation = answer.member_epoch
        self.is_whole = False
        if answer.assignment is not None:
            got = frozenset(number for one in answer.assignment.topic_partitions for number in one.partitions)
            self.is_whole = got != self.owned  # it says what it has now, so that others may have the rest
            self.owned = got
            self.world.check(self)
        await asyncio.sleep(0.1 if self.is_whole else 5)

    async def leave(self) -> None:
        await self.kill()
        await self.bench.ask(68, 1, group_id="g", member_id=self.name, member_epoch=-1)


class World:
    """All clients, and what happens to them."""

    def __init__(self, bench: Bench, kind: type[Client], seed: int) -> None:
        self.bench = bench
        self.kind = kind
        self.chance = random.Random(seed)
        self.clients: list[Client] = []
        self.made = 0
        self.claims: dict[tuple[int, int], str] = {}
        self.wrong: list[str] = []

    def check(self, client: Client) -> None:
        """Nobody else may have what it has."""
        for other in self.clients:
            is_same = self.kind is NewClient or other.generation == client.generation
            if other is not client and is_same and other.owned & client.owned:
                self.wrong.append(f"{other.name} and {client.name} own {other.owned & client.owned}")
        if self.kind is ClassicClient:
            for number in client.owned:
                owner = self.claims.setdefault((client.generation, number), client.name)
                if owner != client.name:
                    self.wrong.append(f"{owner} and {client.name} own {number} in generation {client.generation}")

    def begin(self) -> None:
        self.made += 1
        self.clients.append(self.kind(self.bench, f"client-{self.made}", self))

    async def happen(self) -> None:
        """One thing or another."""
        what = self.chance.choice(["begin", "begin", "drop", "drop", "leave", "kill", "restart", "wait", "wait"])
        one = self.chance.choice(self.clients) if self.clients else None
        if what == "begin" and len(self.clients) < PARTITIONS:
            self.begin()
        elif what == "drop" and one is not None:
            one.drop()
        elif what in ("leave", "kill") and one is not None:
            self.clients.remove(one)
            await (one.leave() if what == "leave" else one.kill())
        elif what == "restart":
            for client in self.clients:
                client.drop()
            await self.bench.restart(is_killed=True)
        await asyncio.sleep(self.chance.choice([0, 0.01, 0.5, 2, 9]))

    def is_shared(self) -> bool:
        owned = sorted(number for client in self.clients for number in client.owned)
        return owned == list(range(PARTITIONS)) and all(client.owned for client in self.clients)


@pytest.mark.deeper
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", [ClassicClient, NewClient])
def test_members_share_the_partitions_whatever_happens(kind: type[Client], seed: int) -> None:
    """Without two owners on the way, and for good in the end."""

    async def work(bench: Bench) -> None:
        bench.topics.make(ORDERS, PARTITIONS)
        await bench.coordinator.start()
        await bench.commit({(ORDERS, 0): 1})  # the group is not forgotten while nobody is in it
        world = World(bench, kind, seed)
        for _ in range(60):
            await world.happen()
        while len(world.clients) < 3:
            world.begin()
        try:
            for _ in range(300):
                await asyncio.sleep(1)
                if world.is_shared():
                    break
            assert world.is_shared(), [(one.name, one.generation, sorted(one.owned)) for one in world.clients]
            assert all(not client.task.done() for client in world.clients)
            assert world.wrong == []
        finally:
            for client in world.clients:
                await client.kill()

    run(work)
