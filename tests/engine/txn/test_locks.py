"""Locks on buckets and keys: what goes together, who waits, who is served when, and how it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product

import pytest

from tidelog.engine.txn.locks import (
    COMPATIBLE,
    IS,
    IX,
    NAMES,
    SIX,
    LockManager,
    LockOwner,
    Resource,
    S,
    X,
    intention_of,
)
from tidelog.errors import ClosedError, ConflictError, DeadlockError, InputError, LockTimeoutError

MODES = (IS, IX, S, SIX, X)
AT_ONCE_SECONDS = 0.0
PATIENCE_SECONDS = 60.0


@pytest.fixture
def locks() -> LockManager:
    return LockManager()


def is_free(locks: LockManager, owner: LockOwner, resource: Resource, mode: int) -> bool:
    try:
        locks.acquire(owner, resource, mode, AT_ONCE_SECONDS)
    except LockTimeoutError:
        return False
    return True


class Waiting:
    """A request in a thread of its own."""

    def __init__(self, request: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self._request = request
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._request()
        except BaseException as error:  # noqa: BLE001  it is what the test asks about
            self.error = error

    def end(self) -> BaseException | None:
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()
        return self.error

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()


def waits_for(locks: LockManager, owner: LockOwner, resource: Resource, mode: int) -> Waiting:
    """Asks in a thread, and returns once that stands in the queue."""
    before = locks.statistics().waits
    waiting = Waiting(lambda: locks.acquire(owner, resource, mode, PATIENCE_SECONDS))
    deadline = time.monotonic() + PATIENCE_SECONDS
    while locks.statistics().waits == before:
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    return waiting


@contextmanager
def held(locks: LockManager, resource: Resource, mode: int) -> Iterator[LockOwner]:
    owner = locks.begin()
    locks.acquire(owner, resource, mode)
    yield owner
    locks.release_all(owner)


# What goes together


@pytest.mark.parametrize(("first", "second"), list(product(MODES, MODES)), ids=lambda mode: NAMES[mode])
def test_modes_go_together_as_in_the_textbook(locks: LockManager, first: int, second: int) -> None:
    """Each pair of modes is granted to two owners, or not, in either order."""
    table = {IS: {IS, IX, S, SIX}, IX: {IS, IX}, S: {IS, S}, SIX: {IS}, X: set[int]()}
    with held(locks, "bucket", first):
        assert is_free(locks, locks.begin(), "bucket", second) == (second in table[first])
    assert set(COMPATIBLE[first]) == table[first]


@pytest.mark.parametrize(
    ("first", "second", "both"), [(IS, IX, IX), (IX, S, SIX), (S, IX, SIX), (IS, S, S), (SIX, X, X), (X, IS, X)]
)
def test_asking_for_more_gives_the_join(locks: LockManager, first: int, second: int, both: int) -> None:
    """S and IX make SIX; nothing that was held is lost."""
    owner = locks.begin()
    locks.acquire(owner, "bucket", first)
    locks.acquire(owner, "bucket", second)
    assert owner.held == {"bucket": both}


def test_a_key_is_locked_under_an_intention(locks: LockManager) -> None:
    """S under IS, X under IX, so that whoever wants the whole bucket sees it."""
    assert (intention_of(S), intention_of(X)) == (IS, IX)
    reader, writer = locks.begin(), locks.begin()
    locks.acquire_key(reader, "bucket", "a", S)
    locks.acquire_key(writer, "bucket", "b")
    assert reader.held == {"bucket": IS, ("bucket", "a"): S}
    assert writer.held == {"bucket": IX, ("bucket", "b"): X}
    assert not is_free(locks, locks.begin(), "bucket", S)


def test_a_locked_bucket_covers_its_keys(locks: LockManager) -> None:
    """Under S or X on the bucket, its keys need no locks of their own, also when others hold the bucket too."""
    with held(locks, "bucket", IS):
        owner = locks.begin()
        locks.acquire(owner, "bucket", S)
        locks.acquire_key(owner, "bucket", "a", S)
        assert owner.held == {"bucket": S}


def test_different_keys_do_not_meet(locks: LockManager) -> None:
    """Two writers of one bucket wait for each other only at the same key."""
    first, second = locks.begin(), locks.begin()
    locks.acquire_key(first, "bucket", "a")
    locks.acquire_key(second, "bucket", "b", timeout_seconds=AT_ONCE_SECONDS)
    with pytest.raises(LockTimeoutError, match=r"X on 'bucket'/'a' was not granted in time"):
        locks.acquire_key(second, "bucket", "a", timeout_seconds=AT_ONCE_SECONDS)


# Waiting


def test_a_waiter_gets_the_lock_when_it_is_free(locks: LockManager) -> None:
    """The end of a transaction frees all of its locks, and wakes whoever waits."""
    first, second = locks.begin(), locks.begin()
    locks.acquire_key(first, "bucket", "a")
    waiting = waits_for(locks, second, ("bucket", "a"), X)
    locks.release_all(first)
    assert waiting.end() is None
    assert second.held[("bucket", "a")] == X


def test_the_queue_is_served_in_order(locks: LockManager) -> None:
    """A reader that comes later does not pass a writer that waits, though it could share the lock."""
    with held(locks, "bucket", S):
        writer, reader = locks.begin(), locks.begin()
        waiting_writer = waits_for(locks, writer, "bucket", X)
        waiting_reader = waits_for(locks, reader, "bucket", S)
        assert not waiting_reader.is_over
    assert waiting_writer.end() is None
    assert not waiting_reader.is_over
    locks.release_all(writer)
    assert waiting_reader.end() is None


def test_a_stream_of_readers_does_not_starve_a_writer(locks: LockManager) -> None:
    """However many readers come and go, the writer is next after those who were there before it."""
    with held(locks, "bucket", S):
        writer = locks.begin()
        waiting = waits_for(locks, writer, "bucket", X)
        assert not any(is_free(locks, locks.begin(), "bucket", S) for _ in range(10))
    assert waiting.end() is None


def test_a_holder_that_wants_more_is_served_first(locks: LockManager) -> None:
    """Whoever waits, waits for it anyway; standing behind them it would wait for ever."""
    with held(locks, "bucket", S):
        upgrading, writer = locks.begin(), locks.begin()
        locks.acquire(upgrading, "bucket", S)
        waiting_writer = waits_for(locks, writer, "bucket", X)
        waiting_upgrade = waits_for(locks, upgrading, "bucket", X)
    assert waiting_upgrade.end() is None
    assert not waiting_writer.is_over
    locks.release_all(upgrading)
    assert waiting_writer.end() is None


def test_a_waiter_that_gives_up_lets_the_next_ones_through(locks: LockManager) -> None:
    """After a timeout the queue is looked at again, and what was held before is still held."""
    with held(locks, "bucket", S):
        writer, reader = locks.begin(), locks.begin()
        locks.acquire(writer, "other", X)
        waiting = Waiting(lambda: locks.acquire(writer, "bucket", X, 0.1))
        while locks.statistics().waits == 0:
            time.sleep(0.0005)
        waiting_reader = Waiting(lambda: locks.acquire(reader, "bucket", S, PATIENCE_SECONDS))
        assert isinstance(waiting.end(), LockTimeoutError)
        assert waiting_reader.end() is None
    assert writer.held == {"other": X}
    assert locks.statistics().timeouts == 1


def test_one_transaction_waits_once(locks: LockManager) -> None:
    """Two threads that use one transaction are told so, rather than mixed up."""
    with held(locks, "a", X), held(locks, "b", X):
        owner = locks.begin()
        waiting = waits_for(locks, owner, "a", X)
        with pytest.raises(InputError, match="already waits"):
            locks.acquire(owner, "b", X)
    assert waiting.end() is None


# Deadlocks


def test_of_two_that_wait_for_each_other_the_younger_is_told(locks: LockManager) -> None:
    """The older one gets its lock, also when it is the one that closes the circle."""
    old, young = locks.begin(), locks.begin()
    locks.acquire_key(old, "bucket", "a")
    locks.acquire_key(young, "bucket", "b")
    waiting = waits_for(locks, young, ("bucket", "a"), X)
    locks.acquire_key(old, "bucket", "b", timeout_seconds=PATIENCE_SECONDS)
    assert isinstance(waiting.end(), DeadlockError)
    assert young.held == {}
    assert locks.statistics().deadlocks == 1
    with pytest.raises(DeadlockError, match="run the whole transaction again"):
        locks.acquire_key(young, "bucket", "c")


def test_the_one_that_closes_the_circle_may_be_the_victim(locks: LockManager) -> None:
    """It is told at once, and those who waited for it go on."""
    old, young = locks.begin(), locks.begin()
    locks.acquire(old, "a", X)
    locks.acquire(young, "b", X)
    waiting = waits_for(locks, old, "b", X)
    with pytest.raises(DeadlockError):
        locks.acquire(young, "a", X, PATIENCE_SECONDS)
    assert waiting.end() is None


def test_two_readers_that_both_want_to_write_are_a_deadlock(locks: LockManager) -> None:
    """Neither upgrade can be granted beside the other's shared lock."""
    old, young = locks.begin(), locks.begin()
    locks.acquire(old, "a", S)
    locks.acquire(young, "a", S)
    waiting = waits_for(locks, young, "a", X)
    locks.acquire(old, "a", X, PATIENCE_SECONDS)
    assert isinstance(waiting.end(), DeadlockError)


@pytest.mark.parametrize("size", [3, 5, 8])
def test_a_long_circle_has_one_victim(locks: LockManager, size: int) -> None:
    """Exactly the youngest is ended; the others all get what they wanted, one after the other."""
    owners = [locks.begin() for _ in range(size)]
    for number, owner in enumerate(owners):
        locks.acquire(owner, str(number), X)
    waiting = [waits_for(locks, owner, str((number + 1) % size), X) for number, owner in enumerate(owners)]
    assert isinstance(waiting[-1].end(), DeadlockError)
    for number in reversed(range(size - 1)):
        assert waiting[number].end() is None
        locks.release_all(owners[number])
    assert locks.statistics().deadlocks == 1


def test_a_request_may_close_two_circles(locks: LockManager) -> None:
    """Each of them has its own victim: after the first the second would still stand."""
    old, left, right = (locks.begin() for _ in range(3))
    locks.acquire(old, "a", X)
    locks.acquire(left, "b", S)
    locks.acquire(right, "b", S)
    waiting = [waits_for(locks, left, "a", S), waits_for(locks, right, "a", S)]
    locks.acquire(old, "b", X, PATIENCE_SECONDS)
    assert all(isinstance(each.end(), DeadlockError) for each in waiting)
    assert locks.statistics().deadlocks == 2


def test_waiting_behind_somebody_in_a_queue_counts(locks: LockManager) -> None:
    """A circle through a place in a queue, not through a held lock, is found as well."""
    reader, writer, late = (locks.begin() for _ in range(3))
    locks.acquire(reader, "a", S)
    locks.acquire(late, "b", X)
    waiting_writer = waits_for(locks, writer, "a", X)
    waiting_late = waits_for(locks, late, "a", S)  # could share with the reader, and stands behind the writer
    locks.acquire(reader, "b", X, PATIENCE_SECONDS)
    assert isinstance(waiting_late.end(), DeadlockError)
    locks.release_all(reader)
    assert waiting_writer.end() is None


# The log


def test_an_entry_ends_those_who_locked_what_it_writes(locks: LockManager) -> None:
    """The log does not wait: a reader or writer of that key is told at its next call, others are not."""
    reader, writer, lister, other = (locks.begin() for _ in range(4))
    locks.acquire_key(reader, "bucket", "a", S)
    locks.acquire_key(writer, "second", "a")
    locks.acquire(lister, "bucket", S)
    locks.acquire_key(other, "bucket", "b", S)
    locks.settle(7, [("bucket", "a"), ("second", "a")])
    for owner in (reader, writer, lister):
        with pytest.raises(ConflictError, match=r"seq 7 or earlier"):
            locks.check(owner)
        assert owner.held == {}
    locks.check(other)
    assert locks.statistics().overtaken == 3


def test_an_entry_about_a_bucket_ends_all_who_are_in_it(locks: LockManager) -> None:
    """A bucket that is made or deleted changes every read of its keys."""
    reader, other = locks.begin(), locks.begin()
    locks.acquire_key(reader, "bucket", "a", S)
    locks.acquire_key(other, "second", "a", S)
    locks.settle(7, ["bucket"])
    with pytest.raises(ConflictError):
        locks.check(reader)
    locks.check(other)


def test_what_an_owner_reads_already_does_not_end_it(locks: LockManager) -> None:
    """Its seq is that of the entry or later, so it has seen the change."""
    owner = locks.begin()
    owner.seq = 7
    locks.acquire_key(owner, "bucket", "a")
    locks.settle(7, [("bucket", "a")])
    locks.check(owner)


def test_a_grant_moves_its_owner_to_what_has_been_settled(locks: LockManager) -> None:
    """Whatever it locked before is unchanged, so it may read the newest state of what it locks now."""
    owner = locks.begin()
    locks.acquire_key(owner, "bucket", "a", S)
    locks.settle(9, [("bucket", "b")])
    assert owner.seq == 0
    locks.acquire_key(owner, "bucket", "b", S)
    assert owner.seq == 9
    locks.settle(10, [])
    locks.acquire(owner, "other", S)
    assert owner.seq == 10


def test_those_who_wait_for_an_overtaken_one_go_on(locks: LockManager) -> None:
    """It has lost its locks, and the next one reads what the entry left."""
    first, second = locks.begin(), locks.begin()
    locks.acquire_key(first, "bucket", "a")
    waiting = waits_for(locks, second, ("bucket", "a"), X)
    locks.settle(3, [("bucket", "a")])
    assert waiting.end() is None
    assert second.seq == 3


def test_one_that_waits_can_be_overtaken(locks: LockManager) -> None:
    """It is woken with the error rather than left in the queue."""
    first, second = locks.begin(), locks.begin()
    locks.acquire(first, "a", X)
    locks.acquire_key(second, "bucket", "b", S)
    waiting = waits_for(locks, second, "a", X)
    locks.settle(3, [("bucket", "b")])
    assert isinstance(waiting.end(), ConflictError)


def test_a_rollback_ends_everybody(locks: LockManager) -> None:
    """What they read may be gone; and the log's end is earlier than before."""
    owner = locks.begin()
    locks.settle(9, [])
    locks.acquire(owner, "a", S)
    locks.roll_back(5)
    with pytest.raises(ConflictError, match="rolled back"):
        locks.check(owner)
    later = locks.begin()
    locks.acquire(later, "a", S)
    assert later.seq == 5


# The end


def test_a_finished_owner_gets_nothing(locks: LockManager) -> None:
    """Its end is told by name, frees everything, and may be said twice."""
    owner = locks.begin()
    locks.acquire_key(owner, "bucket", "a")
    assert locks.owners
    locks.release_all(owner)
    locks.release_all(owner)
    assert not locks.owners
    with pytest.raises(ClosedError, match="has ended"):
        locks.acquire(owner, "a", S)


def test_statistics_tell_who_holds_and_who_waits(locks: LockManager) -> None:
    """An immutable snapshot, and nothing is left when all have ended."""
    first, second = locks.begin(), locks.begin()
    locks.acquire_key(first, "bucket", "a")
    waiting = waits_for(locks, second, "bucket", X)
    now = locks.statistics()
    assert (now.owners, now.held, now.waiting, now.waits) == (2, 2, 1, 1)
    locks.release_all(first)
    assert waiting.end() is None
    locks.release_all(second)
    now = locks.statistics()
    assert (now.owners, now.held, now.waiting) == (0, 0, 0)
