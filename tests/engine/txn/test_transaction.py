"""Transactions: one consistent state to read, a batch to hand over, and an error when the log was faster."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.engine.engines import open_local
from tests.engine.fake_engine import FakeEngine

from tidelog.engine.engine import Engine
from tidelog.engine.entry import Batch, CopyObject, CreateBucket, DeleteBucket, DeleteObject, Entry, PutObject
from tidelog.engine.txn.read_set import ObjectRead, VisibleState
from tidelog.engine.txn.transaction import Transaction, written
from tidelog.errors import (
    ClosedError,
    ConflictError,
    DeadlockError,
    InputError,
    LockTimeoutError,
    NotFoundError,
    RetryError,
)

AnyEngine = Engine | FakeEngine
BEGINNING: list[tuple[int, Entry]] = [
    (1, Batch((CreateBucket("bank"), CreateBucket("empty")))),
    (2, PutObject("bank", "ann", b"100", {"currency": "EUR"})),
    (3, PutObject("bank", "bob", b"0")),
]


@pytest.fixture(params=["model", "engine"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AnyEngine]:
    """Two accounts, and a bucket without any: in the model of an engine, which tells every entry, and in a real one."""
    if request.param == "model":
        fake = FakeEngine()
        fake.apply_many(BEGINNING)
        yield fake
        return
    with open_local(tmp_path) as real:
        real.apply_many(BEGINNING)
        yield real


@pytest.fixture
def silent_engine() -> FakeEngine:
    """One that does not tell the locks what it applies."""
    engine = FakeEngine(settles=False)
    engine.apply_many(BEGINNING)
    return engine


def keys(tx: Transaction, bucket: str = "bank", prefix: str = "") -> list[str]:
    return [info.key for info in tx.list_objects(bucket, prefix)]


# What it sees


def test_it_reads_the_state_and_its_own_writes(engine: AnyEngine) -> None:
    """What was put is read back with its metadata, and has no seq yet; the engine does not know of it."""
    with engine.transaction() as tx:
        assert (tx.read("bank", "ann").data, tx.read("bank", "ann").seq, tx.seq) == (b"100", 2, 3)
        tx.put("bank", "ann", b"90", {"currency": "CHF"})
        seen = tx.read("bank", "ann")
        assert (seen.data, seen.metadata, seen.seq) == (b"90", {"currency": "CHF"}, 0)
    assert engine.read("bank", "ann").data == b"100"


def test_what_it_deleted_is_gone(engine: AnyEngine) -> None:
    """For reads, copies and listings; deleting what is not there is allowed."""
    with engine.transaction() as tx:
        tx.delete("bank", "ann")
        tx.delete("bank", "nobody")
        with pytest.raises(NotFoundError, match="the transaction deleted it"):
            tx.read("bank", "ann")
        with pytest.raises(NotFoundError, match="the transaction deleted it"):
            tx.copy("bank", "ann", "bank", "eve")
        assert keys(tx) == ["bob"]


def test_a_copy_is_what_its_source_was_then(engine: AnyEngine) -> None:
    """Writing the source afterwards does not change it, whether the source was the engine's or its own."""
    with engine.transaction() as tx:
        tx.copy("bank", "ann", "empty", "before")
        tx.put("bank", "ann", b"1")
        tx.copy("bank", "ann", "empty", "after")
        tx.delete("bank", "ann")
        before, after = tx.read("empty", "before"), tx.read("empty", "after")
        assert (before.data, before.metadata, before.seq) == (b"100", {"currency": "EUR"}, 0)
        assert after.data == b"1"
        assert [(info.key, info.size) for info in tx.list_objects("empty")] == [("after", 1), ("before", 3)]


def test_a_listing_has_its_own_writes_in_order(engine: AnyEngine) -> None:
    """Sorted as an engine sorts, by prefix, with sizes."""
    with engine.transaction() as tx:
        tx.put("bank", "b", b"12")
        tx.put("bank", "zoe", b"1")
        tx.put("bank", "ann", b"12345")
        listed = [(info.key, info.size, info.seq) for info in tx.list_objects("bank")]
        assert listed == [("ann", 5, 0), ("b", 2, 0), ("bob", 1, 3), ("zoe", 1, 0)]
        assert keys(tx, prefix="b") == ["b", "bob"]


def test_a_bucket_of_its_own_hides_what_was_there(engine: AnyEngine) -> None:
    """Deleted by force and created anew it is empty, and can be written again."""
    with engine.transaction() as tx:
        tx.put("bank", "own", b"1")
        with pytest.raises(InputError, match="is not empty"):
            tx.delete_bucket("bank")
        tx.delete_bucket("bank", force=True)
        with pytest.raises(NotFoundError):
            tx.read("bank", "ann")
        with pytest.raises(NotFoundError, match="no bucket 'bank'"):
            tx.put("bank", "x", b"1")
        with pytest.raises(NotFoundError, match="no bucket 'bank'"):
            keys(tx)
        tx.create_bucket("bank")
        assert keys(tx) == []
        tx.put("bank", "new", b"1")
        assert keys(tx) == ["new"]
        assert engine.apply(4, tx.batch()).applied
    assert [info.key for info in engine.list_objects("bank")] == ["new"]


def test_mistakes_are_told_at_once(engine: AnyEngine) -> None:
    """What every replica would refuse is refused here already, and the transaction can go on."""
    with engine.transaction() as tx:
        with pytest.raises(InputError, match="already"):
            tx.create_bucket("bank")
        with pytest.raises(NotFoundError, match="no bucket"):
            tx.put("nowhere", "a", b"")
        with pytest.raises(NotFoundError, match="no bucket"):
            tx.delete("nowhere", "a")
        with pytest.raises(NotFoundError, match="no bucket"):
            tx.delete_bucket("nowhere")
        with pytest.raises(NotFoundError, match="no object 'nobody'"):
            tx.copy("bank", "nobody", "bank", "b")
        with pytest.raises(InputError, match="wrote nothing"):
            tx.batch()
        tx.delete_bucket("empty")
        assert tx.batch() == Batch((DeleteBucket("empty"),))


def test_reads_stay_what_they_were(engine: AnyEngine) -> None:
    """Entries about other keys do not disturb it, and what it locks then is read as it is then."""
    with engine.transaction() as tx:
        assert tx.read("bank", "ann").data == b"100"
        engine.apply(4, PutObject("bank", "bob", b"7"))
        assert tx.read("bank", "bob").data == b"7"
        assert tx.seq == 4
        assert tx.read("bank", "ann").seq == 2


# Its result


def test_the_batch_has_the_writes_in_order(engine: AnyEngine) -> None:
    """As they were made, and applying it gives what the transaction saw."""
    with engine.transaction() as tx:
        tx.create_bucket("new")
        tx.put("new", "a", b"1")
        tx.copy("new", "a", "bank", "c")
        tx.delete("bank", "bob")
        seen = keys(tx)
        batch = tx.batch()
    assert batch.entries == (
        CreateBucket("new"),
        PutObject("new", "a", b"1"),
        CopyObject("new", "a", "bank", "c"),
        DeleteObject("bank", "bob"),
    )
    assert engine.apply(4, batch).applied
    assert [info.key for info in engine.list_objects("bank")] == seen == ["ann", "c"]


def test_a_prepared_transaction_takes_nothing_more(engine: AnyEngine) -> None:
    """The batch stays what it is, and its own entry may be applied while its block still runs."""
    with engine.transaction() as tx:
        tx.put("bank", "ann", b"%d" % (int(tx.read("bank", "ann").data) - 1))
        batch = tx.batch()
        with pytest.raises(InputError, match="prepared"):
            tx.put("bank", "bob", b"1")
        engine.apply(4, batch)
        assert tx.batch() is batch
    assert engine.read("bank", "ann").data == b"99"
    assert engine.statistics().locks.overtaken == 0


def test_it_is_used_in_its_block_and_once(engine: AnyEngine) -> None:
    """Outside there are no locks, so there is no transaction."""
    tx = engine.transaction()
    with pytest.raises(ClosedError, match="`with` block"):
        tx.read("bank", "ann")
    with tx:
        tx.put("bank", "ann", b"1")
    with pytest.raises(ClosedError, match="`with` block"):
        tx.batch()
    with pytest.raises(InputError, match="used once"), tx:
        pass
    assert engine.statistics().locks.owners == 0


# When the log is faster


def read_ann(tx: Transaction) -> None:
    tx.read("bank", "ann")


def miss_eve(tx: Transaction) -> None:
    with pytest.raises(NotFoundError):
        tx.read("bank", "eve")


def list_bank(tx: Transaction) -> None:
    keys(tx)


def copy_ann(tx: Transaction) -> None:
    tx.copy("bank", "ann", "empty", "copy")


CASES: list[tuple[Callable[[Transaction], None], Entry]] = [
    (read_ann, PutObject("bank", "ann", b"5")),
    (read_ann, DeleteObject("bank", "ann")),
    (read_ann, CopyObject("bank", "bob", "bank", "ann")),
    (read_ann, DeleteBucket("bank", force=True)),
    (miss_eve, PutObject("bank", "eve", b"5")),
    (list_bank, PutObject("bank", "phantom", b"5")),
    (list_bank, DeleteObject("bank", "bob")),
    (copy_ann, Batch((PutObject("bank", "bob", b"1"), PutObject("bank", "ann", b"5")))),
]


@pytest.mark.parametrize(("look", "entry"), CASES)
def test_an_entry_that_changes_what_was_read_ends_it(
    engine: AnyEngine, look: Callable[[Transaction], None], entry: Entry
) -> None:
    """By ConflictError at the next call, and at every other one."""
    with engine.transaction() as tx:
        look(tx)
        assert engine.apply(4, entry).applied
        with pytest.raises(ConflictError, match="again"):
            tx.put("empty", "x", b"1")
        with pytest.raises(ConflictError, match="again"):
            tx.batch()


@pytest.mark.parametrize(("look", "entry"), CASES)
def test_the_batch_is_compared_with_the_newest_state(
    silent_engine: FakeEngine, look: Callable[[Transaction], None], entry: Entry
) -> None:
    """An entry that is visible, and has not been told to the locks yet, is noticed as well."""
    with silent_engine.transaction() as tx:
        look(tx)
        tx.put("empty", "x", b"1")
        assert silent_engine.apply(4, entry).applied
        with pytest.raises(ConflictError, match="again"):
            tx.batch()


@pytest.mark.parametrize(
    ("look", "entry"),
    [
        (read_ann, PutObject("bank", "bob", b"5")),
        (read_ann, CopyObject("bank", "ann", "bank", "carol")),
        (miss_eve, PutObject("bank", "evelyn", b"5")),
        (list_bank, PutObject("empty", "x", b"5")),
        (copy_ann, PutObject("empty", "other", b"5")),
    ],
)
def test_an_entry_about_something_else_does_not(
    engine: AnyEngine, look: Callable[[Transaction], None], entry: Entry
) -> None:
    """Nor do keys that merely begin alike."""
    with engine.transaction() as tx:
        look(tx)
        assert engine.apply(4, entry).applied
        tx.put("empty", "x", b"1")
        assert tx.batch().entries[-1] == PutObject("empty", "x", b"1")


def test_the_log_does_not_wait_for_a_transaction(engine: AnyEngine) -> None:
    """Entries are applied at once, whatever is locked; the transaction's block ends in peace."""
    with engine.transaction() as tx:
        tx.lock("bank", exclusive=True)
        assert engine.apply(4, PutObject("bank", "ann", b"5")).applied
        with pytest.raises(ConflictError):
            tx.read("bank", "ann")
        with pytest.raises(ConflictError):
            tx.batch()


def test_a_rollback_ends_it(engine: AnyEngine) -> None:
    """It may have read what is no longer true."""
    with engine.transaction() as tx:
        tx.read("bank", "bob")
        engine.rollback_to(2)
        with pytest.raises(ConflictError, match="rolled back"):
            tx.read("bank", "ann")


# Guarded entries


def test_a_guarded_entry_carries_what_was_read(engine: AnyEngine) -> None:
    """It is refused exactly by a state in which that is no longer true."""
    with engine.transaction() as tx:
        tx.read("bank", "ann")
        miss_eve(tx)
        keys(tx, "empty")
        tx.put("bank", "ann", b"1")
        guarded = tx.guarded()
    assert guarded.batch == Batch((PutObject("bank", "ann", b"1"),))
    assert guarded.reads[:2] == (ObjectRead("bank", "ann", 2), ObjectRead("bank", "eve", 0))
    assert guarded.refusal(VisibleState(engine)) is None
    engine.apply(4, PutObject("bank", "bob", b"1"))
    assert guarded.refusal(VisibleState(engine)) is None
    engine.apply(5, PutObject("empty", "x", b"1"))
    assert "'empty' with the prefix ''" in str(guarded.refusal(VisibleState(engine)))
    engine.apply(6, PutObject("bank", "ann", b"1"))
    assert "'bank'/'ann' was changed" in str(guarded.refusal(VisibleState(engine)))


def test_a_bucket_that_was_made_anew_is_another_one(engine: AnyEngine) -> None:
    """An empty listing of a bucket, one of none, and objects of an earlier bucket are told apart."""
    with engine.transaction() as tx:
        read_ann(tx)
        tx.put("bank", "x", b"1")
        guarded = tx.guarded()
    engine.apply(4, Batch((DeleteBucket("bank", force=True), CreateBucket("bank"))))
    assert guarded.refusal(VisibleState(engine)) is not None
    with engine.transaction() as tx:
        assert keys(tx, "empty") == []
        tx.put("bank", "x", b"1")
        guarded = tx.guarded()
    engine.apply(5, DeleteBucket("empty"))
    assert guarded.refusal(VisibleState(engine)) is not None


# Several at once


def test_those_who_meet_wait_and_then_read_the_newest(engine: AnyEngine) -> None:
    """The second one begins before the first is applied, and still needs no second attempt."""
    started = threading.Event()
    read: list[bytes] = []

    def second() -> None:
        with engine.transaction() as tx:
            started.set()
            read.append(tx.read("bank", "ann", for_update=True).data)
            tx.put("bank", "ann", b"2")
            engine.apply(5, tx.batch())

    with engine.transaction() as tx:
        tx.put("bank", "ann", b"1")
        thread = threading.Thread(target=second)
        thread.start()
        started.wait(120)
        while engine.statistics().locks.waiting == 0:
            time.sleep(0.001)
        engine.apply(4, tx.batch())
    thread.join(120)
    assert read == [b"1"]
    assert engine.read("bank", "ann").data == b"2"


def test_a_lock_is_not_waited_for_longer_than_allowed(engine: AnyEngine) -> None:
    """It may be tried again, and what was read before is still there."""
    with engine.transaction() as first, engine.transaction(timeout_seconds=0.01) as second:
        first.put("bank", "ann", b"1")
        second.read("bank", "bob")
        with pytest.raises(LockTimeoutError):
            second.read("bank", "ann")
        first.__exit__(None, None, None)
        assert second.read("bank", "ann").data == b"100"


def test_a_task_waits_no_longer_than_it_was_told_to(engine: AnyEngine) -> None:
    """For a key and for a bucket; what it held before it still holds, and it may ask again."""

    async def play() -> None:
        async with engine.transaction() as first, engine.transaction(timeout_seconds=0.01) as second:
            first.put("bank", "ann", b"1")
            await second.lock_async("bank", "bob")
            with pytest.raises(LockTimeoutError, match="S on 'bank'/'ann'"):
                await second.lock_async("bank", "ann")
            with pytest.raises(LockTimeoutError, match="bucket 'bank'"):
                await second.lock_async("bank", exclusive=True)
            assert engine.statistics().locks.timeouts == 2
            await first.__aexit__(None, None, None)
            await second.lock_async("bank", "ann")
            assert second.read("bank", "ann").data == b"100"

    asyncio.run(asyncio.wait_for(play(), 60))


def test_threads_that_count_lose_nothing(engine: AnyEngine) -> None:
    """Read, add one, put: with transactions and retries every one of them counts."""
    order = threading.Lock()
    retries: list[RetryError | ConflictError] = []

    def propose(batch: Batch) -> None:
        with order:
            engine.apply(engine.applied_seq + 1, batch)

    def add_one() -> None:
        with engine.transaction() as tx:
            tx.put("bank", "bob", b"%d" % (int(tx.read("bank", "bob").data) + 1))
            propose(tx.batch())

    def work() -> None:
        done = 0
        while done < 25:
            try:
                add_one()
                done += 1
            except (ConflictError, DeadlockError) as error:
                retries.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert engine.read("bank", "bob").data == b"100"
    assert engine.statistics().locks.owners == 0


def total_seen(engine: AnyEngine) -> int | None:
    """All balances in one transaction, read one by one while others change them; None when the log was faster."""
    try:
        with engine.transaction() as tx:
            return sum(int(tx.read("bank", name).data) for name in ("ann", "bob"))
    except (ConflictError, DeadlockError):
        return None


def test_a_transaction_never_sees_half_of_an_entry(engine: AnyEngine) -> None:
    """Entries of the log move money all the time, without locks; whoever adds it up finds the same, or is told."""
    over = threading.Event()
    seen: list[int | None] = []

    def look() -> None:
        while not over.is_set():
            seen.append(total_seen(engine))

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for seq in range(4, 64):
        share = seq % 100
        engine.apply(
            seq, Batch((PutObject("bank", "ann", b"%d" % (100 - share)), PutObject("bank", "bob", b"%d" % share)))
        )
    over.set()
    for thread in threads:
        thread.join(60)
    seen.append(total_seen(engine))  # the others may all have been overtaken
    assert {total for total in seen if total is not None} == {100}


def test_tasks_take_their_locks_without_blocking_the_loop(engine: AnyEngine) -> None:
    """What is locked by `lock_async` is used at once afterwards."""

    async def add(amount: int) -> None:
        async with engine.transaction() as tx:
            await tx.lock_async("bank", "bob", exclusive=True)
            before = int(tx.read("bank", "bob").data)
            await asyncio.sleep(0.001)
            tx.put("bank", "bob", b"%d" % (before + amount))
            engine.apply(engine.applied_seq + 1, tx.batch())

    async def lock_all() -> None:
        async with engine.transaction() as tx:
            await tx.lock_async("bank")
            keys(tx)

    async def play() -> None:
        async with asyncio.timeout(120):
            await asyncio.gather(*(add(amount) for amount in range(10)), lock_all())

    asyncio.run(play())
    assert engine.read("bank", "bob").data == b"45"


def test_what_an_entry_writes_is_what_it_locks() -> None:
    """Every operation of a batch; the source of a copy is only read."""
    batch = Batch(
        (
            CreateBucket("a"),
            DeleteBucket("b"),
            PutObject("c", "k", b""),
            DeleteObject("d", "k"),
            CopyObject("e", "k", "f", "l"),
        )
    )
    assert list(written(batch)) == ["a", "b", ("c", "k"), ("d", "k"), ("f", "l")]
    assert list(written(PutObject("c", "k", b""))) == [("c", "k")]
