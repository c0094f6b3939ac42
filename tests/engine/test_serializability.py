"""Transactions of several nodes are serializable, and whatever one has read is one state, whether it commits or not."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.campaign import first_seed
from tests.engine.bank_and_lists import PROGRAMS, Program, Proposed, Run, SharedLog, Wanted, check
from tests.engine.engines import open_local
from tests.engine.fake_engine import FakeEngine
from tests.engine.serializability import ListTransaction, anomalies

from tidelog.engine.engine import Engine
from tidelog.engine.entry import Batch, CreateBucket, ObjectInfo, PutObject, StoredObject
from tidelog.engine.orchestrator.base import drive
from tidelog.engine.settings import EngineSettings
from tidelog.engine.txn.transaction import Transaction
from tidelog.errors import ConflictError, RetryError

UNSYNCED = EngineSettings(wal_sync_mode="none")

# The checker itself


def read(name: str, **reads: str) -> ListTransaction:
    return ListTransaction(name, {key: tuple(elements) for key, elements in reads.items()}, {})


def appended(name: str, element: str, *keys: str) -> ListTransaction:
    return ListTransaction(name, {}, dict.fromkeys(keys, element))


@pytest.mark.parametrize(
    ("history", "found"),
    [
        ([appended("A", "a", "x"), read("B", x="a"), read("C", x="")], None),
        ([read("B", x="a")], "never committed"),
        ([appended("A", "a", "x"), appended("B", "b", "x"), read("C", x="ab"), read("D", x="b")], "was read too"),
        ([appended("A", "a", "x", "y"), read("B", x="a", y=""), read("C", y="a")], "a circle"),
        (
            [
                ListTransaction("A", {"y": ()}, {"x": "a"}),
                ListTransaction("B", {"x": ()}, {"y": "b"}),
                read("C", x="a", y="b"),
            ],
            "a circle",
        ),
    ],
)
def test_the_checker_finds_what_cannot_have_been(history: list[ListTransaction], found: str | None) -> None:
    """Uncommitted elements, torn lists, half of a transaction, and write skew; a late reader is none of these."""
    problems = anomalies(history)
    assert [found in problem for problem in problems] == [True] if found else problems == []


# One state


@pytest.fixture(params=["model", "engine"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine | FakeEngine]:
    """Three numbers, of which the first and the last add up to 100 in every state."""
    start = Batch(
        (CreateBucket("b"), PutObject("b", "x", b"50"), PutObject("b", "y", b"0"), PutObject("b", "z", b"50"))
    )
    if request.param == "model":
        fake = FakeEngine()
        fake.apply(1, start)
        yield fake
        return
    with open_local(tmp_path) as real:
        real.apply(1, start)
        yield real


def test_entries_of_one_call_end_a_reader_that_inherits_a_lock_of_the_first(engine: Engine | FakeEngine) -> None:
    """A reader held the old x beside the new z when the lock that it waited for was freed before x was changed."""

    async def play() -> None:
        with engine.transaction() as writer, engine.transaction() as reader:
            writer.put("b", "y", b"1")
            batch = writer.batch()
            assert reader.read("b", "x").data == b"50"
            waiting = asyncio.create_task(reader.lock_async("b", "y"))
            await asyncio.sleep(0)
            engine.apply_many([(2, batch), (3, Batch((PutObject("b", "x", b"40"), PutObject("b", "z", b"60"))))])
            with pytest.raises(ConflictError, match="changed 'b'/'x' during the transaction"):
                await waiting
            with pytest.raises(ConflictError):
                reader.read("b", "z")

    asyncio.run(play())


def test_a_reader_that_nothing_concerns_reads_at_the_new_seq(engine: Engine | FakeEngine) -> None:
    """It inherits the lock of the first entry, and sees both: what it has read before is true there as well."""

    async def play() -> None:
        with engine.transaction() as writer, engine.transaction() as reader:
            writer.put("b", "x", b"40")
            batch = writer.batch()
            assert reader.read("b", "y").data == b"0"
            waiting = asyncio.create_task(reader.lock_async("b", "x"))
            await asyncio.sleep(0)
            engine.apply_many([(2, batch), (3, PutObject("b", "z", b"60"))])
            await waiting
            assert (reader.read("b", "x").data, reader.read("b", "z").data, reader.seq) == (b"40", b"60", 3)

    asyncio.run(play())


class RolledBackMeanwhile(FakeEngine):
    """Its log loses its end, and gets another one, just before anything is looked at."""

    def read(self, bucket: str, key: str, seq: int | None = None) -> StoredObject:
        self._lose_end()
        return super().read(bucket, key, seq)

    def list_objects(self, bucket: str, prefix: str = "", seq: int | None = None) -> Iterator[ObjectInfo]:
        self._lose_end()
        return super().list_objects(bucket, prefix, seq)

    def find_object(self, bucket: str, key: str, seq: int | None = None) -> ObjectInfo | None:
        self._lose_end()
        return super().find_object(bucket, key, seq)

    def has_bucket(self, bucket: str, seq: int | None = None) -> bool:
        self._lose_end()
        return super().has_bucket(bucket, seq)

    def _lose_end(self) -> None:
        self.rollback_to(1)
        self.apply(2, PutObject("b", "x", b"of the new end"))


@pytest.mark.parametrize(
    "look",
    [
        lambda tx: tx.read("b", "x"),
        lambda tx: tx.list_objects("b"),
        lambda tx: tx.copy("b", "x", "b", "y"),
        lambda tx: tx.put("b", "y", b""),
        lambda tx: tx.read("b", "nothing"),
    ],
)
def test_a_look_that_a_rollback_cut_across_is_not_believed(look: Callable[[Transaction], object]) -> None:
    """The seq means another state by then: what was found, or not found, there is not what the transaction reads."""
    engine = RolledBackMeanwhile()
    engine.apply_many([(1, Batch((CreateBucket("b"), PutObject("b", "x", b"1")))), (2, PutObject("b", "x", b"2"))])
    with engine.transaction() as tx, pytest.raises(ConflictError, match="rolled back"):
        look(tx)


# Many of them


class Tasks:
    """Workers and followers of one loop over several nodes. A run with the same seed is the same, step by step."""

    def __init__(self, seed: int, engines: list[Engine]) -> None:
        self._seed = seed
        self._engines = engines
        self._seen = [0] * len(engines)
        self.log = SharedLog()
        self.runs: list[Run] = []

    async def play(self, workers: int, transactions: int) -> None:
        """Every node applies the log at its own pace, some entries at a time."""
        following = [asyncio.create_task(self._follow(node)) for node in range(len(self._engines))]
        working = [self._work(number, transactions) for number in range(workers * len(self._engines))]
        await asyncio.gather(*working)
        while min(self._seen) < self.log.last_seq:
            await asyncio.sleep(0)
        for task in following:
            task.cancel()

    async def _follow(self, node: int) -> None:
        chooser = random.Random(f"{self._seed} follows {node}")
        while True:
            up_to = self._seen[node] + chooser.randint(1, 5)
            entries = list(self.log.entries(self._seen[node], up_to))
            for result in self._engines[node].apply_many(entries):
                self.log.note(result)
            self._seen[node] += len(entries)
            for _ in range(chooser.randint(1, 12)):
                await asyncio.sleep(0)

    async def _work(self, number: int, transactions: int) -> None:
        chooser = random.Random(f"{self._seed} works {number}")
        node = number % len(self._engines)
        while self._seen[node] == 0:
            await asyncio.sleep(0)
        for count in range(transactions):
            run = Run(f"{number}.{count}")
            self.runs.append(run)
            try:
                await self._run(node, run, chooser.choice(PROGRAMS), chooser)
            except (ConflictError, RetryError):
                await asyncio.sleep(0)

    async def _run(self, node: int, run: Run, program: Program, chooser: random.Random) -> None:
        engine = self._engines[node]
        run.began_at = engine.applied_seq
        async with engine.transaction() as tx:
            for step in program(tx, run, chooser):
                if isinstance(step, Wanted):
                    await tx.lock_async(step.bucket, step.key, exclusive=step.exclusive)
                elif isinstance(step, Proposed):
                    run.commit_seq = self.log.append(step.entry)
                    while step.waits and self._seen[node] < run.commit_seq:
                        await asyncio.sleep(0)
                for _ in range(chooser.randint(0, 3)):
                    await asyncio.sleep(0)


def check_tasks(directory: Path, seed: int, *, nodes: int, workers: int, transactions: int) -> None:
    """Plays a schedule and checks what came of it."""
    with ExitStack() as stack:
        engines = [stack.enter_context(open_local(directory / f"{n}", settings=UNSYNCED)) for n in range(nodes)]
        tasks = Tasks(seed, engines)
        asyncio.run(tasks.play(workers, transactions))
        kinds = check(tasks.log, tasks.runs, engines)
        assert kinds["committed"]
        assert all(engine.statistics().locks.owners == 0 for engine in engines)


class Threads:
    """Workers that all drive the engine of their node, as programs do: append to the log, then apply what is there."""

    def __init__(self, seed: int, engines: list[Engine]) -> None:
        self._seed = seed
        self._engines = engines
        self.log = SharedLog()
        self.runs: list[Run] = []
        self._failures: list[BaseException] = []

    def play(self, workers: int, transactions: int) -> None:
        """Ends when all are done and all nodes have everything."""
        for engine in self._engines:
            drive(engine, self.log, on_result=self.log.note)
        working = [
            threading.Thread(target=self._work, args=(number, transactions))
            for number in range(workers * len(self._engines))
        ]
        for thread in working:
            thread.start()
        for thread in working:
            thread.join(300)
        assert self._failures == []
        for engine in self._engines:
            drive(engine, self.log, on_result=self.log.note)

    def _work(self, number: int, transactions: int) -> None:
        chooser = random.Random(f"{self._seed} works {number}")
        engine = self._engines[number % len(self._engines)]
        try:
            for count in range(transactions):
                run = Run(f"{number}.{count}")
                self.runs.append(run)
                with contextlib.suppress(ConflictError, RetryError):
                    self._run(engine, run, chooser.choice(PROGRAMS), chooser)
        except BaseException as error:  # noqa: BLE001 - a thread's failure is the test's
            self._failures.append(error)

    def _run(self, engine: Engine, run: Run, program: Program, chooser: random.Random) -> None:
        run.began_at = engine.applied_seq
        with engine.transaction() as tx:
            for step in program(tx, run, chooser):
                if isinstance(step, Wanted):
                    tx.lock(step.bucket, step.key, exclusive=step.exclusive)
                elif isinstance(step, Proposed):
                    run.commit_seq = self.log.append(step.entry)
                    if step.waits:
                        drive(engine, self.log, on_result=self.log.note)


def check_threads(directory: Path, seed: int, *, nodes: int, workers: int, transactions: int) -> None:
    """Lets threads work, and checks what came of it."""
    with ExitStack() as stack:
        engines = [stack.enter_context(open_local(directory / f"{n}", settings=UNSYNCED)) for n in range(nodes)]
        threads = Threads(seed, engines)
        threads.play(workers, transactions)
        kinds = check(threads.log, threads.runs, engines)
        assert kinds["committed"]


def test_threads_that_drive_one_engine_each_hear_the_same(tmp_path: Path) -> None:
    """Whoever drives an engine together with others is never told that an entry was refused that was applied."""
    check_threads(tmp_path, 1, nodes=2, workers=3, transactions=25)


@pytest.mark.long
@pytest.mark.parametrize("part", range(8))
def test_many_schedules_are_serializable(tmp_path: Path, part: int) -> None:
    """Tasks and threads, on one node and on several, with many seeds."""
    for seed in range(first_seed() + part * 25, first_seed() + part * 25 + 25):
        nodes, workers = 1 + seed % 3, 2 + seed % 5
        check_tasks(tmp_path / f"{seed} tasks", seed, nodes=nodes, workers=workers, transactions=40)
        check_threads(tmp_path / f"{seed} threads", seed, nodes=nodes, workers=workers, transactions=40)


@pytest.mark.parametrize("seed", range(4))
def test_tasks_on_several_nodes_are_serializable(tmp_path: Path, seed: int) -> None:
    """Transfers keep the total in every audit, lists grow in one order, and every read is true at the reader's seq."""
    check_tasks(tmp_path, seed, nodes=2, workers=4, transactions=20)
