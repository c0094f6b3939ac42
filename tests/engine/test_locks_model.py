"""Locks under random requests and under many threads: the rules hold after every step, and everybody gets done."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.engine.txn.locks import COMPATIBLE, IS, IX, LockManager, LockOwner, S, X
from tidelog.errors import DeadlockError, LockTimeoutError

OWNERS = 5
BUCKETS = ("a", "b", "c")
Step = tuple[int, str, int]

ASK = st.tuples(st.integers(0, OWNERS - 1), st.sampled_from(BUCKETS), st.sampled_from([IS, IX, S, X]))
RELEASE = st.tuples(st.integers(0, OWNERS - 1), st.just(""), st.just(0))


class Schedule:
    """Owners whose requests are tasks of one loop, so that every interleaving is a plain list of steps."""

    def __init__(self) -> None:
        self.locks = LockManager()
        self.owners = [self.locks.begin() for _ in range(OWNERS)]
        self.tasks: dict[LockOwner, asyncio.Task[None]] = {}
        self.victims: list[LockOwner] = []

    async def take(self, step: Step) -> None:
        number, bucket, mode = step
        owner = self.owners[number]
        if not bucket:
            await self.renew(number)
        elif owner not in self.tasks:
            self.tasks[owner] = asyncio.create_task(self.locks.acquire_async(owner, bucket, mode))
        await self.settle()

    async def renew(self, number: int) -> None:
        """Ends an owner that does not wait, and begins another in its place."""
        if self.owners[number] not in self.tasks:
            self.locks.release_all(self.owners[number])
            self.owners[number] = self.locks.begin()

    async def settle(self) -> None:
        """Lets the loop run until nothing moves, and looks who has got what."""
        for _ in range(6):
            await asyncio.sleep(0)
        for owner, task in list(self.tasks.items()):
            if task.done():
                del self.tasks[owner]
                if isinstance(task.exception(), DeadlockError):
                    self.victims.append(owner)
                    await self.renew(self.owners.index(owner))

    def check(self) -> None:
        for first, second in combinations(self.owners, 2):
            for bucket in first.held.keys() & second.held.keys():
                assert second.held[bucket] in COMPATIBLE[first.held[bucket]]
        assert {owner for owner in self.owners if owner.request is not None} == set(self.tasks)
        # Without a circle somebody runs, and whoever waits, waits for somebody who runs in the end.
        assert len(self.tasks) < OWNERS

    async def finish(self) -> None:
        """Running owners end, one by one: everybody who waits gets its turn."""
        while self.tasks:
            running = [number for number, owner in enumerate(self.owners) if owner not in self.tasks]
            before = len(self.tasks)
            for number in running:
                await self.renew(number)
            await self.settle()
            assert len(self.tasks) < before


@given(st.lists(st.one_of(ASK, ASK, ASK, RELEASE), max_size=40))
def test_any_sequence_of_requests_keeps_the_rules(steps: list[Step]) -> None:
    """No two hold what does not go together, nobody waits in a circle, and all get through in the end."""

    async def play() -> None:
        schedule = Schedule()
        for step in steps:
            await schedule.take(step)
            schedule.check()
        await schedule.finish()
        for owner in schedule.owners:
            schedule.locks.release_all(owner)
        assert schedule.locks.statistics().held == 0
        assert schedule.locks.statistics().deadlocks == len(schedule.victims)

    asyncio.run(play())


def test_a_cancelled_task_leaves_the_queue() -> None:
    """Those behind it are served, and it may ask again."""

    async def play() -> None:
        locks = LockManager()
        reader, writer, late = (locks.begin() for _ in range(3))
        await locks.acquire_async(reader, "a", S)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await locks.acquire_async(writer, "a", X)
        await asyncio.wait_for(locks.acquire_async(late, "a", S), 60)
        locks.release_all(reader)
        locks.release_all(late)
        await asyncio.wait_for(locks.acquire_key_async(writer, "a", "k"), 60)
        assert writer.held == {"a": IX, ("a", "k"): X}

    asyncio.run(play())


def test_tasks_and_threads_wait_for_each_other() -> None:
    """A thread frees what a task waits for; a bucket in X covers the key that the task asks for then."""
    locks = LockManager()
    thread_owner, task_owner = locks.begin(), locks.begin()
    locks.acquire(thread_owner, "a", X)

    async def play() -> None:
        timer = threading.Timer(0.02, locks.release_all, (thread_owner,))
        timer.start()
        await asyncio.wait_for(locks.acquire_async(task_owner, "a", X), 60)
        await locks.acquire_key_async(task_owner, "a", "k")
        timer.join()

    asyncio.run(play())
    assert task_owner.held == {"a": X}


def transfer(locks: LockManager, balances: Counter[str], chooser: random.Random) -> bool:
    """Moves one from one account to another under locks, in an order that invites deadlocks."""
    owner = locks.begin()
    source, target = chooser.sample(sorted(balances), 2)
    try:
        locks.acquire_key(owner, "bank", source, S, 5)
        before = balances[source]
        locks.acquire_key(owner, "bank", target, X, 5)
        locks.acquire_key(owner, "bank", source, X, 5)
        assert balances[source] == before
        balances[source] = before - 1
        balances[target] += 1
    except (DeadlockError, LockTimeoutError):
        return False
    finally:
        locks.release_all(owner)
    return True


def test_threads_that_transfer_lose_nothing() -> None:
    """Under locks read-modify-write is safe from many threads, deadlocks and retries included."""
    locks = LockManager()
    balances = Counter({"ann": 0, "bob": 0, "cid": 0})
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        chooser = random.Random(seed)
        done = 0
        try:
            while done < 100:
                done += transfer(locks, balances, chooser)
        except BaseException as error:  # noqa: BLE001  a thread's failure is the test's
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert sum(balances.values()) == 0
    now = locks.statistics()
    assert (now.owners, now.held, now.waiting, now.timeouts) == (0, 0, 0, 0)
