"""Requests of many threads that become one, and are what each would have been alone."""

from __future__ import annotations

import secrets
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.servers import EtcdServer

from tidelog.errors import ConflictError, DataError, InputError, StoreUnavailableError
from tidelog.store.metadata import Check, Delete, Put
from tidelog.store.metadata.etcd import EtcdMetadataStore
from tidelog.store.metadata.etcd_batches import UNDER_WAY, Answer, Batches, Question, _Request

PATIENCE_SECONDS = 60.0


class Held:
    """A store whose first requests wait until they are let go; it remembers how many transactions each had."""

    def __init__(self, answer: Callable[[Question], Answer]) -> None:
        self.sizes: list[int] = []
        self.asked: list[Question] = []
        self.go = threading.Event()
        self.begun = threading.Semaphore(0)
        self._answer = answer

    def ask(self, question: Question) -> Answer:
        self.sizes.append(len(question["success"]))
        self.asked.append(question)
        self.begun.release()
        assert self.go.wait(PATIENCE_SECONDS)
        return self._answer(question)


@contextmanager
def gathered(
    held: Held, batches: Batches, count: int, ask: Callable[[int], Any]
) -> Iterator[tuple[list[Future[Any]], list[Future[Any]]]]:
    """Requests 0 to `count`, of which the first are under way and the others have gathered behind them."""
    with ThreadPoolExecutor(count) as pool:
        try:
            first = [pool.submit(ask, number) for number in range(UNDER_WAY)]
            for _ in first:
                assert held.begun.acquire(timeout=PATIENCE_SECONDS)
            others = []
            for number in range(UNDER_WAY, count):
                others.append(pool.submit(ask, number))
                while len(batches._waiting) < len(others):
                    assert not others[-1].done()
            held.go.set()
            yield first, others
        finally:
            held.go.set()


def transaction(key: str) -> Question:
    put = {"request_put": {"key": key, "value": ""}}
    return {"compare": [{"key": key}], "success": [put], "failure": []}


def answered(question: Question) -> Answer:
    """As etcd would: each transaction within succeeds, and says its first key."""

    def of(one: Question) -> Answer:
        return {"succeeded": True, "responses": [one["success"][0]["request_put"]["key"]]}

    header = {"header": {"revision": "7"}}
    if "request_txn" in question["success"][0]:
        within = [{"response_txn": of(one["request_txn"])} for one in question["success"]]
        return {"succeeded": True, "responses": within} | header
    return of(question) | header


def test_what_gathers_behind_requests_is_made_together() -> None:
    """Each thread has its own answer; the first ones waited for nobody."""
    held = Held(answered)
    batches = Batches(held.ask)

    def ask(number: int) -> Answer:
        key = f"k{number}"
        return batches.ask(transaction(key), frozenset([key]), frozenset([key]))

    with gathered(held, batches, 12, ask) as (first, others):
        answers = [one.result(PATIENCE_SECONDS) for one in (*first, *others)]
    assert [answer["responses"] for answer in answers] == [[f"k{number}"] for number in range(12)]
    assert {answer["header"]["revision"] for answer in answers} == {"7"}
    assert sorted(held.sizes) == [1, 1, 10]


def test_transactions_that_touch_each_other_are_not_made_together() -> None:
    """Loss prevented: two that each check what the other writes would both succeed on what was there before."""
    held = Held(answered)
    batches = Batches(held.ask)

    def ask(number: int) -> Answer:
        one, other = ("a", "b") if number % 2 else ("b", "a")
        return batches.ask(transaction(one), frozenset([other]), frozenset([one]))

    with gathered(held, batches, 6, ask) as (first, others):
        for one in (*first, *others):
            assert one.result(PATIENCE_SECONDS)["succeeded"]
    assert held.sizes == [1] * 6


def test_large_transactions_are_not_made_together() -> None:
    """Of what etcd takes in one request: by bytes and by operations."""
    held = Held(answered)
    batches = Batches(held.ask)
    with gathered(held, batches, 6, lambda n: batches.ask(transaction(f"k{n}"), size=300 << 10)) as (_, others):
        for one in others:
            one.result(PATIENCE_SECONDS)
    assert held.sizes == [1] * 6
    held = Held(answered)
    many = Batches(held.ask)
    with gathered(held, many, 120, lambda n: many.ask(transaction(f"k{n}"))) as (_, others):
        for one in others:
            one.result(PATIENCE_SECONDS)
    assert max(held.sizes) == 50
    assert sum(held.sizes) == 120


def test_one_that_is_refused_fails_alone() -> None:
    """The others of its batch are made without it."""

    def refusing(question: Question) -> Answer:
        if "k3" in repr(question):
            raise InputError("not that one")
        return answered(question)

    held = Held(refusing)
    batches = Batches(held.ask)
    with gathered(held, batches, 6, lambda n: batches.ask(transaction(f"k{n}"))) as (_, others):
        for number, one in enumerate(others, UNDER_WAY):
            if number == 3:
                assert isinstance(one.exception(PATIENCE_SECONDS), InputError)
            else:
                assert one.result(PATIENCE_SECONDS)["responses"] == [f"k{number}"]


def test_batch_without_an_answer_is_undecided_for_all_of_it() -> None:
    """It may have been made: nobody makes it again without having looked."""

    def silent(question: Question) -> Answer:
        raise StoreUnavailableError("no answer")

    held = Held(silent)
    batches = Batches(held.ask)
    with gathered(held, batches, 6, lambda n: batches.ask(transaction(f"k{n}"))) as (first, others):
        for one in (*first, *others):
            assert isinstance(one.exception(PATIENCE_SECONDS), StoreUnavailableError)
    assert sorted(held.sizes) == [1, 1, 4]
    assert batches._free == UNDER_WAY


def test_thread_that_is_interrupted_holds_nobody_up() -> None:
    """While it waits for its turn, or makes the requests of others with its own."""
    held = Held(answered)
    batches = Batches(held.ask)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with gathered(held, batches, 2, lambda n: batches.ask(transaction(f"k{n}"))) as (first, _):
        request = _Request(transaction("k2"), frozenset(), frozenset(), 0)
        batches._waiting.append(request)
        request.wait = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            batches._wait(request)
        assert batches._waiting == []
        for one in first:
            one.result(PATIENCE_SECONDS)
    assert batches.ask(transaction("after"))["responses"] == ["after"]

    def ended(question: Question) -> Answer:
        if len(question["success"]) > 1:
            raise KeyboardInterrupt
        return answered(question)

    held = Held(ended)
    batches = Batches(held.ask)
    with gathered(held, batches, 6, lambda n: batches.ask(transaction(f"k{n}"))) as (_, others):
        errors = [one.exception(PATIENCE_SECONDS) for one in others]
    kinds = sorted(type(error).__name__ for error in errors)
    assert kinds == ["KeyboardInterrupt", *["StoreUnavailableError"] * 3]
    assert batches._free == UNDER_WAY


class TestAgainstEtcd:
    """The real server."""

    def test_many_threads_write_and_read_at_once(self, etcd_server: EtcdServer) -> None:
        """Every condition is decided by itself: of two that create the same key one succeeds, and all others do."""
        at = f"test-{secrets.token_hex(8)}/"
        with EtcdMetadataStore([etcd_server.endpoint]) as store, ThreadPoolExecutor(24) as pool:

            def create(number: int) -> str | None:
                key = f"{at}{number % 60:03}"
                try:
                    version = store.commit([Check(key, None)], [Put(key, str(number).encode())])[key]
                except ConflictError:
                    return None
                found = store.get(key)
                assert found is not None
                assert (found.value, found.version) == (str(number).encode(), version)
                return version

            made = list(pool.map(create, range(120)))
            assert sum(version is not None for version in made) == 60
            keys = store.keys(at)
            assert len(keys) == 60
            read = list(pool.map(lambda n: store.get_many(keys[n : n + 7]), range(50)))
            assert all(sorted(found) == keys[n : n + 7] for n, found in enumerate(read))
            list(pool.map(lambda key: store.commit([], [Delete(key)]), keys))
            assert store.keys(at) == []

    def test_many_ranges_are_read_with_few_requests(
        self, etcd_server: EtcdServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each is what `range` says, also one that is longer than a page."""
        at = f"test-{secrets.token_hex(8)}/"
        with EtcdMetadataStore([etcd_server.endpoint]) as store:
            for prefix, count in ((f"{at}a/", 3), (f"{at}b/", 250), (f"{at}d/", 1)):
                for first in range(0, count, 50):
                    some = range(first, min(count, first + 50))
                    store.commit([], [Put(f"{prefix}{number:04}", b"x") for number in some])
            prefixes = [f"{at}{name}/" for name in "abcd"] + [f"{at}e{number}/" for number in range(60)]
            found = store.range_many(prefixes)
            assert [len(entries) for entries in found] == [3, 250, 0, 1, *[0] * 60]
            assert found == [store.range(prefix) for prefix in prefixes]
            asked: list[str] = []
            ask = store._client.ask

            def counted(path: str, question: Mapping[str, Any], *, is_write: bool = False) -> dict[str, Any]:
                asked.append(path)
                return ask(path, question, is_write=is_write)

            monkeypatch.setattr(store._client, "ask", counted)
            store.range_many(prefixes[2:])
            assert len(asked) == 2

    def test_damaged_entry_is_an_error_of_who_reads_it(self, etcd_server: EtcdServer) -> None:
        """Others that read at the same time get theirs."""
        at = f"test-{secrets.token_hex(8)}/"
        with EtcdMetadataStore([etcd_server.endpoint]) as store, ThreadPoolExecutor(16) as pool:
            foreign = {"key": b64encode(f"{at}foreign".encode()).decode(), "value": b64encode(b"{}").decode()}
            store._client.ask("kv/put", foreign)
            store.put(f"{at}good", b"x")
            asked = [pool.submit(store.get, f"{at}{'foreign' if n % 4 == 0 else 'good'}") for n in range(64)]
            for number, one in enumerate(asked):
                if number % 4 == 0:
                    assert isinstance(one.exception(PATIENCE_SECONDS), DataError)
                else:
                    assert one.result(PATIENCE_SECONDS) is not None
            store.delete(f"{at}foreign")


@given(st.lists(st.tuples(st.sets(st.sampled_from("abcde")), st.sets(st.sampled_from("abcde"))), max_size=12))
def test_batches_are_sets_of_independent_transactions(wanted: list[tuple[set[str], set[str]]]) -> None:
    """Whatever gathers: all of it goes in some batch, the oldest in the first, and no batch contradicts itself."""
    batches = Batches(answered)
    waiting = [_Request(transaction("k"), frozenset(checked), frozenset(written), 0) for checked, written in wanted]
    batches._waiting = list(waiting)
    taken: list[_Request] = []
    while batches._waiting:
        oldest = batches._waiting[0]
        some = batches._take()
        assert some[0] is oldest
        for number, one in enumerate(some):
            for other in some[:number]:
                assert not one.written & (other.checked | other.written)
                assert not other.written & one.checked
        taken += some
    assert sorted(map(id, taken)) == sorted(map(id, waiting))
