"""Records of transactions and ids of producers in metadata stores of every kind, with lost answers and rivals."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tidelog
from tidelog.clock import ManualClock
from tidelog.errors import StoreUnavailableError
from tidelog.service.kafka.transactions.state_machine import Persist, TransactionRecord, TransactionState
from tidelog.service.kafka.transactions.store import (
    PRODUCER_ID_BLOCK,
    Superseded,
    TransactionStore,
    is_too_large,
)
from tidelog.store.keys import check_key, transaction_key
from tidelog.store.metadata import Check, MetadataStore, Write
from tidelog.store.metadata.memory import MemoryMetadataStore
from tidelog.store.metadata.open import open_metadata_store
from tidelog.store.urls import open_store


@pytest.fixture(params=["memory", "sqlite", "bucket"])
def metadata(request: pytest.FixtureRequest, tmp_path: Path) -> MetadataStore:
    if request.param == "bucket":
        return open_metadata_store("bucket", open_store(f"file://{tmp_path}/objects"))
    return open_metadata_store("memory://" if request.param == "memory" else f"sqlite://{tmp_path}/metadata.db")


def record(name: str, epoch: int = 0, **more: object) -> TransactionRecord:
    return TransactionRecord(transactional_id=name, producer_id=7, epoch=epoch, timeout_ms=1000, **more)  # type: ignore[arg-type]


def persist(name: str, epoch: int = 0) -> Persist:
    return Persist(name, record(name, epoch))


def test_records_survive_in_every_store(metadata: MetadataStore) -> None:
    """Written together, changed, deleted and read by another process."""
    store = TransactionStore(metadata)
    names = [f"app {number}" for number in range(150)]
    assert store.write([persist(name) for name in names]) == []
    assert store.write([persist("app 3", 1), Persist("app 4", None), persist("Ü/🦀", 2)]) == []
    found = {one.transactional_id: one for one in TransactionStore(metadata).load()}
    assert found.keys() == {*names, "Ü/🦀"} - {"app 4"}
    assert (found["app 3"].epoch, found["app 5"].epoch, found["Ü/🦀"].epoch) == (1, 0, 2)


def test_records_that_come_together_are_one_commit() -> None:
    """A hundred producers wait for one sync, not for a hundred."""

    class Counting(MemoryMetadataStore):
        commits = 0

        def _commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Mapping[str, str]:
            self.commits += 1
            return super()._commit(checks, writes)

    metadata = Counting()
    assert TransactionStore(metadata).write([persist(f"app-{number}") for number in range(100)]) == []
    assert metadata.commits == 1


def test_a_rival_coordinator_is_never_overwritten(metadata: MetadataStore) -> None:
    """Its record is returned; the others of the same write are written all the same."""
    first, second = TransactionStore(metadata), TransactionStore(metadata)
    first.write([persist("app"), persist("other")])
    second.load()
    second.write([persist("app", 1)])
    assert first.write([persist("app", 5), persist("other", 5)]) == [Superseded("app", record("app", 1))]
    assert {one.transactional_id: one.epoch for one in second.load()} == {"app": 1, "other": 5}
    assert first.write([persist("app", 2)]) == []
    assert second.write([Persist("app", None)]) == [Superseded("app", record("app", 2))]


@pytest.mark.parametrize("epoch", [1, None])
def test_a_write_without_an_answer_is_made_again(epoch: int | None) -> None:
    """It may have been done: then the second one changes nothing, and is no conflict."""

    class LosesAnswers(MemoryMetadataStore):
        is_losing = False

        def _commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Mapping[str, str]:
            versions = super()._commit(checks, writes)
            if self.is_losing:
                self.is_losing = False
                raise StoreUnavailableError("no answer")
            return versions

    metadata = LosesAnswers()
    store = TransactionStore(metadata)
    store.write([persist("app")])
    metadata.is_losing = True
    change = Persist("app", None if epoch is None else record("app", epoch))
    with pytest.raises(StoreUnavailableError):
        store.write([change])
    assert store.write([change]) == []
    assert [one.epoch for one in TransactionStore(metadata).load()] == ([] if epoch is None else [epoch])
    assert store.write([persist("app", 9)]) == []


def test_a_damaged_record_gives_way_to_a_new_one() -> None:
    """One bad document must not keep the other transactions from going on."""
    metadata = MemoryMetadataStore()
    store = TransactionStore(metadata)
    store.write([persist("app"), persist("other")])
    metadata.put(transaction_key("app"), b"{}")
    again = TransactionStore(metadata)
    assert [one.transactional_id for one in again.load()] == ["other"]
    assert again.write([persist("app", 3)]) == [Superseded("app", None)]
    assert again.write([persist("app", 3)]) == []
    assert len(again.load()) == 2


def test_producer_ids_are_never_given_twice(metadata: MetadataStore) -> None:
    """By several nodes at once, which share the metadata store."""
    taken: list[range] = []

    def take() -> None:
        store = TransactionStore(metadata)
        taken.extend(store.take_producer_ids() for _ in range(5))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ids = [number for block in taken for number in block]
    assert len(ids) == len(set(ids)) == 20 * PRODUCER_ID_BLOCK


def test_ids_begin_above_those_of_an_installation_that_lost_its_metadata() -> None:
    """Its partitions still know the producers from before: a new one must not be taken for one of them."""
    clock = ManualClock()
    before = TransactionStore(MemoryMetadataStore(), clock=clock).take_producer_ids()
    clock.advance(1)
    after = TransactionStore(MemoryMetadataStore(), clock=clock).take_producer_ids()
    assert after.start >= before.stop
    assert after.stop < 1 << 53


def test_a_transaction_that_is_too_large_is_noticed() -> None:
    """Before the store refuses it; and a record of the largest size can still be ended."""
    partitions = frozenset(("shop/orders", number) for number in range(100_000))
    assert is_too_large(record("app", partitions=partitions, state=TransactionState.ONGOING))
    assert not is_too_large(record("app", partitions=frozenset([("shop/orders", 1)])))


@given(st.text(min_size=1), st.text(min_size=1))
def test_every_transactional_id_has_a_key_of_its_own(one: str, other: str) -> None:
    """Also the long ones, and those that look like a shortened one."""
    for name in (one, one * 100, other):
        assert check_key(transaction_key(name))
    shortened = transaction_key(one * 1000).rpartition("/")[2]
    names = {one, other, one * 100, one * 1000, shortened}
    assert len({transaction_key(name) for name in names}) == len(names)


@pytest.mark.parametrize("has_store", [False, True])
def test_a_directory_keeps_transactions_beside_its_topics(tmp_path: Path, has_store: bool) -> None:
    """In its own metadata file, or in the metadata store of its installation, where they outlive the disk."""
    more: dict[str, Any] = {"store": f"file://{tmp_path}/objects", "metadata": "bucket"} if has_store else {}
    for number, place in enumerate(["one", "two" if has_store else "one"]):
        with tidelog.open(tmp_path / place, **more) as directory:
            store = TransactionStore(*directory._shared_metadata())
            assert [one.epoch for one in store.load()] == [5] * number
            if not number:
                store.write([persist("app", 5)])
