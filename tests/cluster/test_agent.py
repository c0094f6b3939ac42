"""The agent: a node has open what the documents assign to it, whatever happens on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from tidelog.cluster.agent import Agent, Piece, engine_piece
from tidelog.cluster.documents import NOBODY, ClusterState, Coordinators, EnginePlacement, TopicPlacement
from tidelog.errors import ConfigError, HeldError, StoreUnavailableError
from tidelog.service.placement import SLOTS
from tidelog.store.document import encode_json
from tidelog.store.keys import ClusterKeys
from tidelog.store.metadata.base import Entry
from tidelog.store.metadata.watch import Changes
from tidelog.topics.names import TopicName

KEYS = ClusterKeys()
ORDERS = TopicName("shop", "orders")
WAIT_SECONDS = 60


class FakeHost:
    """A node that remembers what it was asked for; each opening may fail first, or wait."""

    def __init__(self) -> None:
        self.open: set[tuple[str, int]] = set()
        self.failures: list[Exception] = []
        self.release_failures: list[Exception] = []
        self.gate: asyncio.Event | None = None
        self.fenced: list[tuple[TopicName, int]] = []
        self.calls: list[str] = []

    async def open_partition(self, topic: TopicName, number: int) -> None:
        self.calls.append(f"open {number}")
        if self.gate is not None:
            await self.gate.wait()
        if self.failures:
            raise self.failures.pop(0)
        self.open.add((str(topic), number))

    async def release_partition(self, topic: TopicName, number: int) -> None:
        self.calls.append(f"release {number}")
        if self.release_failures:
            raise self.release_failures.pop(0)
        self.open.discard((str(topic), number))

    async def acquire_slot(self, slot: int) -> None:
        self.open.add(("slot", slot))

    async def release_slot(self, slot: int) -> None:
        self.open.discard(("slot", slot))

    def renew(self) -> None:
        self.calls.append("renew")

    async def fenced_partitions(self) -> Sequence[tuple[TopicName, int]]:
        return self.fenced


class FakeEngines:
    """Engines that only remember whether they are open."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fenced: list[str] = []
        self.failures: list[Exception] = []

    async def open_engine(self, name: str) -> None:
        self.calls.append(f"open {name}")
        if self.failures:
            raise self.failures.pop(0)

    async def release_engine(self, name: str) -> None:
        self.calls.append(f"release {name}")

    async def fenced_engines(self) -> Sequence[str]:
        return self.fenced


class Documents:
    """What the cluster says, and an agent that follows it."""

    def __init__(self, host: FakeHost) -> None:
        self.state = ClusterState(KEYS)
        self.engines = FakeEngines()
        self.agent = Agent("a", host, self.engines)
        self._version = 0

    def _say(self, key: str, document: msgspec.Struct | None) -> None:
        self._version += 1
        entry = None if document is None else Entry(key, encode_json(document), str(self._version))
        self.agent.follow(self.state, self.state.apply(Changes(False, {key: entry})))

    def place(self, *nodes: str, is_deleting: bool = False) -> None:
        self._say(KEYS.topic(*ORDERS), TopicPlacement(id="00", created_us=1, partitions=nodes, is_deleting=is_deleting))

    def engine(self, name: str, node: str | None) -> None:
        """None: it is removed."""
        self._say(KEYS.engine(name), None if node is None else EnginePlacement(node=node))

    def slots(self, *ours: int) -> None:
        self._say(KEYS.coordinators, Coordinators(slots=tuple("a" if n in ours else NOBODY for n in range(SLOTS))))

    async def settled(self) -> None:
        """Until nothing is left to be done."""
        async with asyncio.timeout(WAIT_SECONDS):
            while self.agent._working:
                await asyncio.sleep(0.001)


def parts(host: FakeHost) -> set[int]:
    return {number for name, number in host.open if name == str(ORDERS)}


def test_agent_opens_what_is_assigned_and_releases_what_is_not() -> None:
    """Partitions and slots come and go with the documents."""

    async def run() -> None:
        host = FakeHost()
        documents = Documents(host)
        documents.place("a", "b", "a")
        documents.slots(3, 5)
        await documents.settled()
        assert host.open == {(str(ORDERS), 0), (str(ORDERS), 2), ("slot", 3), ("slot", 5)}
        documents.place("b", "a", "a")
        documents.slots(5)
        await documents.settled()
        assert host.open == {(str(ORDERS), 1), (str(ORDERS), 2), ("slot", 5)}
        documents.place("a", "a", "a", is_deleting=True)
        await documents.settled()
        assert host.open == {("slot", 5)}

    asyncio.run(run())


def test_agent_lets_go_what_it_failed_to_open() -> None:
    """Whatever it failed with: a claim may be there all the same."""

    async def run() -> None:
        host = FakeHost()
        host.failures = [HeldError("b has it")]
        documents = Documents(host)
        documents.place("a")
        while not host.calls:
            await asyncio.sleep(0)
        documents.place("b")
        await documents.settled()
        assert host.calls[-1] == "release 0"

    asyncio.run(run())


def test_agent_asks_again_for_what_another_node_holds() -> None:
    """And for what failed in another way, which is said once."""

    async def run() -> None:
        host = FakeHost()
        host.failures = [HeldError("b has it"), HeldError("b has it"), StoreUnavailableError("no answer")]
        documents = Documents(host)
        documents.place("a")
        assert documents.agent.opening == 1
        await documents.settled()
        assert (parts(host), documents.agent.opening, documents.agent.failures) == ({0}, 0, {})
        assert host.calls == ["open 0"] * 4

    asyncio.run(run())


def test_agent_tries_again_after_an_error_of_the_disk() -> None:
    """Loss prevented: it began again at once and without end, and nothing said so."""

    async def run() -> None:
        host = FakeHost()
        host.failures = [OSError(5, "Input/output error"), KeyError("orders")]
        documents = Documents(host)
        documents.place("a")
        said: list[dict[str, str]] = []
        while documents.agent._working:
            await asyncio.sleep(0.001)
            now = {str(piece): str(text) for piece, text in documents.agent.failures.items()}
            if now and now not in said:
                said.append(now)
                assert len(host.calls) == len(said), "a pause comes before it is tried again"
        assert said == [
            {"shop/orders, partition 0": "OSError: [Errno 5] Input/output error"},
            {"shop/orders, partition 0": "KeyError: 'orders'"},
        ]
        assert (parts(host), documents.agent.failures) == ({0}, {})

    asyncio.run(run())


@pytest.mark.parametrize("node", [None, "b"])
def test_agent_forgets_the_failure_of_what_is_not_its_any_more(node: str | None) -> None:
    """An engine that could not be opened, and was removed or moved away, counted as a failure for ever."""

    async def run() -> None:
        documents = Documents(FakeHost())
        documents.engines.failures = [ConfigError("no such store", hint="Name one")] * 100
        documents.engine("photos", "a")
        while not documents.agent.failures:
            await asyncio.sleep(0.001)
        failure = documents.agent.failures[engine_piece("photos")]
        assert (str(failure), failure.hint) == ("no such store", "Name one")
        documents.engine("photos", node)
        await documents.settled()
        assert documents.agent.failures == {}

    asyncio.run(run())


def test_agent_gives_up_what_is_fenced_also_where_the_disk_fails() -> None:
    """Loss prevented: the node could not join again, since one of its partitions could not be closed."""

    async def run() -> None:
        host = FakeHost()
        documents = Documents(host)
        documents.place("a", "a")
        await documents.settled()
        host.fenced = [(ORDERS, 0)]
        host.release_failures = [OSError(5, "Input/output error")]
        documents.place("b", "a")
        await documents.agent.drop_fenced()
        await documents.settled()
        assert {piece.number for piece in documents.agent.held} == {1}
        assert host.open == {(str(ORDERS), 1)}

    asyncio.run(run())


def test_agent_releases_what_was_moved_away_while_it_was_opened() -> None:
    """The last word of the documents counts."""

    async def run() -> None:
        host = FakeHost()
        host.gate = asyncio.Event()
        documents = Documents(host)
        documents.place("a")
        async with asyncio.timeout(WAIT_SECONDS):
            while not host.calls:
                await asyncio.sleep(0)
        documents.place("b")
        host.gate.set()
        await documents.settled()
        assert (parts(host), host.calls) == (set(), ["open 0", "release 0"])
        assert not documents.agent.held

    asyncio.run(run())


def test_agent_releases_what_a_request_opened_before_its_turn_came() -> None:
    """Kept a partition for ever that was moved here and away again at once: clients had opened it meanwhile, and the
    next owner waited for it."""

    async def run() -> None:
        host = FakeHost()
        documents = Documents(host)
        documents.place("a", "a")
        host.open.add((str(ORDERS), 0))
        documents.place("b", "a")
        await documents.settled()
        assert host.open == {(str(ORDERS), 1)}
        assert not documents.agent._doubtful

    asyncio.run(run())


def test_agent_reopens_what_others_have_claimed_while_it_was_away() -> None:
    """The documents name this node again, as before: what it has open is fenced all the same."""

    async def run() -> None:
        host = FakeHost()
        documents = Documents(host)
        documents.place("a", "a")
        documents.slots(1)
        await documents.settled()
        host.calls.clear()
        host.fenced = [(ORDERS, 1)]
        documents.agent.renew()
        await documents.agent.drop_fenced()
        await documents.settled()
        assert host.calls == ["renew", "release 1", "open 1"]
        assert (parts(host), documents.agent.held) == (
            {0, 1},
            {Piece("partition", ORDERS, 0), Piece("partition", ORDERS, 1), Piece("slot", number=1)},
        )

    asyncio.run(run())


def test_agent_releases_what_others_have_claimed_also_if_that_fails_at_first() -> None:
    """Kept it open, and nothing released it any more, where it was not to be opened again."""

    async def run() -> None:
        host = FakeHost()
        documents = Documents(host)
        documents.place("a", "a")
        await documents.settled()
        host.fenced = [(ORDERS, 1)]
        host.release_failures = [StoreUnavailableError("away")] * 2
        documents.place("a", "b")
        await documents.agent.drop_fenced()
        await documents.settled()
        assert host.open == {(str(ORDERS), 0)}
        assert not documents.agent._doubtful

    asyncio.run(run())


def test_agent_that_is_stopped_begins_nothing() -> None:
    """What it has stays open; what it was about to open is not."""

    async def run() -> None:
        host = FakeHost()
        host.gate = asyncio.Event()
        documents = Documents(host)
        documents.place("a")
        await asyncio.sleep(0)
        await documents.agent.stop()
        documents.place("a", "a")
        assert not documents.agent._working
        assert parts(host) == set()

    asyncio.run(run())


def test_engines_are_opened_released_and_opened_again_when_they_are_lost() -> None:
    """By the documents; one that was lost, or claimed elsewhere while the node was away, is opened anew."""

    async def work() -> None:
        documents = Documents(FakeHost())
        calls = documents.engines.calls
        documents.engine("photos", "a")
        await documents.settled()
        assert (documents.agent.opening, calls) == (0, ["open photos"])
        documents.agent.lost(engine_piece("photos"))
        assert documents.agent.opening == 1
        await documents.settled()
        documents.engines.fenced = ["photos"]
        await documents.agent.drop_fenced()
        await documents.settled()
        documents.engine("photos", "b")
        await documents.settled()
        assert calls == ["open photos", "open photos", "release photos", "open photos", "release photos"]
        documents.agent.lost(engine_piece("photos"))
        await documents.settled()
        assert len(calls) == 5

    asyncio.run(work())


def test_agent_releases_what_it_may_have_claimed_without_an_answer() -> None:
    """An opening that failed may have claimed the partition: others could not open it while this node lives."""

    async def main() -> None:
        host = FakeHost()
        documents = Documents(host)
        failed = asyncio.Event()

        async def fail(topic: TopicName, number: int) -> None:
            failed.set()
            raise StoreUnavailableError("the answer was lost")

        host.open_partition = fail  # type: ignore[method-assign]
        documents.place("a", "b")
        async with asyncio.timeout(WAIT_SECONDS):
            await failed.wait()
            documents.place("b", "b")
            await documents.settled()
        assert host.calls == ["release 0"]

    asyncio.run(main())
