"""Transactions of a bank and of growing lists, on several engines that follow one log, and what must be true of them.

A program is a generator: it does its work on a transaction, and gives its runner what may wait: locks to take, moments
at which others may run, and the entry for the log. So threads and tasks run the same programs.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from threading import Lock as Mutex
from typing import NamedTuple

from tests.engine.model import Model
from tests.engine.serializability import Elements, ListTransaction, anomalies

from tidelog.engine.engine import Engine
from tidelog.engine.entry import Batch, CreateBucket, Operation, PutObject, Result, StoredObject
from tidelog.engine.txn.read_set import Carried, Guarded, batch_of
from tidelog.engine.txn.transaction import Transaction

ACCOUNTS = ("ann", "bob", "cid", "dan")
LISTS = ("red", "green", "blue")
BALANCE = 100
TOTAL = BALANCE * len(ACCOUNTS)


class Wanted(NamedTuple):
    """A lock that a program needs before it goes on."""

    bucket: str
    key: str | None = None
    exclusive: bool = False


class Proposed(NamedTuple):
    """An entry for the log. It is applied here before the program goes on, or not: `waits`."""

    entry: Guarded
    waits: bool


Step = Wanted | Proposed | None
"""None: others may run."""


class Run:
    """What one transaction has seen and done."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seq = 0
        self.began_at = 0
        self.objects: dict[tuple[str, str], StoredObject] = {}
        self.listings: dict[str, dict[str, int]] = {}
        self.appends: dict[str, str] = {}
        self.commit_seq: int | None = None


Program = Callable[[Transaction, Run, random.Random], Iterator[Step]]


def beginning() -> Batch:
    """The first entry of the log: accounts and empty lists."""
    accounts: list[Operation] = [PutObject("bank", name, b"%d" % BALANCE) for name in ACCOUNTS]
    lists: list[Operation] = [PutObject("lists", name, b"") for name in LISTS]
    return Batch((CreateBucket("bank"), CreateBucket("lists"), *accounts, *lists))


# Programs


def audit(tx: Transaction, run: Run, chooser: random.Random) -> Iterator[Step]:
    """Reads every account, one after the other; writes nothing."""
    for account in chooser.sample(ACCOUNTS, len(ACCOUNTS)):
        yield from _read(tx, run, "bank", account)


def listing(tx: Transaction, run: Run, chooser: random.Random) -> Iterator[Step]:
    """Reads two accounts, and then lists the bank."""
    for account in chooser.sample(ACCOUNTS, 2):
        yield from _read(tx, run, "bank", account)
    yield Wanted("bank")
    run.listings["bank"] = {info.key: info.seq for info in tx.list_objects("bank")}
    run.seq = tx.seq


def reading(tx: Transaction, run: Run, chooser: random.Random) -> Iterator[Step]:
    """Reads every list and an account."""
    for name in chooser.sample(LISTS, len(LISTS)):
        yield from _read(tx, run, "lists", name)
    yield from _read(tx, run, "bank", chooser.choice(ACCOUNTS))


def transfer(tx: Transaction, run: Run, chooser: random.Random) -> Iterator[Step]:
    """Moves money between two accounts."""
    source, target = chooser.sample(ACCOUNTS, 2)
    amount, early = chooser.randint(1, 20), chooser.random() < 0.5
    for account, change in ((source, -amount), (target, amount)):
        yield from _read(tx, run, "bank", account, exclusive=early)
        tx_data = int(run.objects["bank", account].data)
        yield Wanted("bank", account, exclusive=True)
        tx.put("bank", account, b"%d" % (tx_data + change))
    yield from _commit(tx, run, chooser)


def append(tx: Transaction, run: Run, chooser: random.Random) -> Iterator[Step]:
    """Reads some lists, and appends to one or two of them."""
    names = chooser.sample(LISTS, chooser.randint(1, len(LISTS)))
    for name in names:
        yield from _read(tx, run, "lists", name)
    for name in names[:2]:
        yield Wanted("lists", name, exclusive=True)
        before = run.objects["lists", name].data
        tx.put("lists", name, (before + b" " + run.name.encode()).strip())
        run.appends[name] = run.name
    yield from _commit(tx, run, chooser)


PROGRAMS: tuple[Program, ...] = (audit, listing, reading, transfer, transfer, append, append)


def _read(tx: Transaction, run: Run, bucket: str, key: str, *, exclusive: bool = False) -> Iterator[Step]:
    yield Wanted(bucket, key, exclusive)
    found = tx.read(bucket, key, for_update=exclusive)
    known = run.objects.setdefault((bucket, key), found)
    assert known == found
    run.seq = tx.seq
    yield None


def _commit(tx: Transaction, run: Run, chooser: random.Random) -> Iterator[Step]:
    entry = tx.guarded()
    run.seq = tx.seq
    yield Proposed(entry, waits=chooser.random() < 0.7)


# The log and its verdicts


class SharedLog:
    """An orchestrator that several nodes follow; it remembers what each of them said about each entry."""

    def __init__(self) -> None:
        self._entries: list[Carried] = [beginning()]
        self._mutex = Mutex()
        self.answers: dict[int, set[str]] = {}

    def append(self, entry: Carried) -> int:
        """Its seq."""
        with self._mutex:
            self._entries.append(entry)
            return len(self._entries)

    def note(self, result: Result) -> None:
        """What became of an entry on one of the nodes."""
        with self._mutex:
            self.answers.setdefault(result.seq, set()).add(result.status)

    @property
    def last_seq(self) -> int:
        return len(self._entries)

    def low_water_mark(self) -> int:
        return 0

    def entries(self, after_seq: int, up_to: int | None = None) -> Iterable[tuple[int, Carried]]:
        return list(enumerate(self._entries[after_seq:up_to], start=after_seq + 1))

    def truncate(self, seq: int) -> None:
        """Never called: there is no store."""

    def model(self) -> Model:
        """Every state, by what was applied."""
        model = Model()
        for seq, entry in self.entries(0):
            record = model.apply if self.answers.get(seq) == {"applied"} else model.refuse
            record(seq, batch_of(entry))
        return model


# What must be true


def check(log: SharedLog, runs: list[Run], engines: list[Engine]) -> Counter[str]:
    """AssertionError for anything that is not serializable; how many transactions of which kind there were."""
    assert all(len(answers) == 1 for answers in log.answers.values()), log.answers
    assert sorted(log.answers) == list(range(1, log.last_seq + 1))
    model = log.model()
    assert {engine.digest() for engine in engines} == {model.digest()}
    for run in runs:
        assert run.seq >= run.began_at or not run.objects
        _check_reads(model, run, run.seq)
        if _is_committed(log, run):
            assert run.commit_seq is not None
            _check_reads(model, run, run.commit_seq - 1)
    last = model.at(model.applied_seq)
    final = ListTransaction("the end", {name: _elements(last["lists"].objects[name].data) for name in LISTS}, {})
    assert anomalies([*(_as_lists(log, run) for run in runs), final]) == []
    return Counter("committed" if _is_committed(log, run) else "others" for run in runs)


def _check_reads(model: Model, run: Run, seq: int) -> None:
    state = model.at(seq)
    for (bucket, key), found in run.objects.items():
        one = state[bucket].objects[key]
        assert (found.seq, found.data) == (one.seq, one.data), f"{run.name} at seq {seq}: {bucket}/{key}"
    for bucket, listed in run.listings.items():
        assert listed == {key: one.seq for key, one in state[bucket].objects.items()}, f"{run.name} at seq {seq}"
    balances = [int(found.data) for (bucket, _), found in run.objects.items() if bucket == "bank"]
    assert len(balances) < len(ACCOUNTS) or sum(balances) == TOTAL, run.name


def _is_committed(log: SharedLog, run: Run) -> bool:
    return run.commit_seq is not None and log.answers[run.commit_seq] == {"applied"}


def _as_lists(log: SharedLog, run: Run) -> ListTransaction:
    reads = {key: _elements(found.data) for (bucket, key), found in run.objects.items() if bucket == "lists"}
    return ListTransaction(run.name, reads, dict(run.appends) if _is_committed(log, run) else {})


def _elements(data: bytes) -> Elements:
    return tuple(data.decode().split())
