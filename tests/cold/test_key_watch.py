"""Keys of many topics are looked at with few requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from tidelog.cold.ownership import NEVER_SEEN, KeyRound, Watched
from tidelog.errors import ConflictError, StoreUnavailableError
from tidelog.store.metadata.base import Check, Entry, Put
from tidelog.store.metadata.memory import MemoryMetadataStore
from tidelog.store.metadata.open import RememberedMetadata
from tidelog.store.scheduler import Background


class CountingStore(MemoryMetadataStore):
    """Counts requests; may be out of reach, and may not know whether something has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = 0
        self.has_marks = True
        self.is_away = False

    def get(self, key: str) -> Entry | None:
        self.requests += 1
        return super().get(key)

    def get_many(self, keys: Sequence[str]) -> dict[str, Entry]:
        self.requests += 1
        if self.is_away:
            raise StoreUnavailableError("away")
        return super().get_many(keys)

    def change_mark(self) -> object | None:
        return super().change_mark() if self.has_marks else None


@pytest.fixture
def store() -> CountingStore:
    return CountingStore()


@pytest.fixture
def background() -> Iterator[Background]:
    background = Background(1, "test")
    yield background
    background.close()


def watch(round: KeyRound, key: str, version: str | None, told: list[str]) -> Watched:
    watched = Watched(key, version, lambda: told.append(key), round)
    round.add(watched)
    return watched


def test_one_request_looks_at_all_keys(store: CountingStore) -> None:
    """Lost: a quarter of a core for a hundred idle topics."""
    round, told = KeyRound(lambda: store, 5.0), list[str]()
    store.has_marks = False
    for number in range(100):
        watch(round, f"topics/{number}/owner", store.put(f"topics/{number}/owner", b"me"), told)
    assert round.look() == 5.0
    assert (told, store.requests) == ([], 1)
    store.put("topics/7/owner", b"other")
    round.look()
    assert (told, store.requests) == (["topics/7/owner"], 2)
    round.look()
    assert told == ["topics/7/owner"]


def test_nothing_is_asked_where_nothing_was_written(store: CountingStore) -> None:
    """A store that knows that nothing has changed is not asked for the keys; a new key is looked at all the same."""
    round, told = KeyRound(lambda: store, 5.0), list[str]()
    watch(round, "a", store.put("a", b"1"), told)
    for _ in range(3):
        round.look()
    assert store.requests == 1
    store.put("b", b"there before it was watched")
    round.look()
    watch(round, "b", NEVER_SEEN, told)
    round.look()
    assert told == ["b"]


def test_an_entry_that_comes_or_goes_is_a_change(store: CountingStore) -> None:
    """Also one of which only its absence was known."""
    round, told = KeyRound(lambda: store, 5.0), list[str]()
    watch(round, "a", NEVER_SEEN, told)
    round.look()
    assert told == []
    store.put("a", b"1")
    round.look()
    store.delete("a")
    round.look()
    assert told == ["a", "a"]


def test_a_store_out_of_reach_is_asked_again(store: CountingStore) -> None:
    """Nothing is told meanwhile, and the change afterwards."""
    round, told = KeyRound(lambda: store, 5.0), list[str]()
    watch(round, "a", store.put("a", b"1"), told)
    store.put("a", b"2")
    store.is_away = True
    assert round.look() == 5.0
    assert told == []
    store.is_away = False
    round.look()
    assert told == ["a"]


def test_a_key_that_was_cancelled_is_not_told_of(store: CountingStore) -> None:
    """And costs nothing."""
    round, told = KeyRound(lambda: store, 5.0), list[str]()
    watched = watch(round, "a", store.put("a", b"1"), told)
    watched.cancel()
    store.put("a", b"2")
    round.look()
    assert (told, store.requests) == ([], 0)


def test_what_opening_asks_for_is_read_once(store: CountingStore) -> None:
    """And again after a write: what is known of the time before a claim does not count after it."""
    store.put("a", b"1")
    remembered = RememberedMetadata(store, ("a", "b"))
    assert [remembered.get("a"), remembered.get("b"), remembered.get("a")] == [
        store._entries["a"],
        None,
        store._entries["a"],
    ]
    assert store.requests == 1
    remembered.commit([Check("b", None)], [Put("b", b"2")])
    store.put("a", b"3")
    assert [entry and entry.value for entry in (remembered.get("a"), remembered.get("b"))] == [b"3", b"2"]
    assert store.requests == 2
    remembered.forget_all_but(())
    store.put("a", b"4")
    found = remembered.get("a")
    assert found is not None
    assert found.value == b"4"


def test_what_is_below_a_prefix_is_read_once(store: CountingStore) -> None:
    """Its documents, its listings, and what is not there; what is elsewhere is asked for."""
    store.put("t/a", b"1")
    store.put("t/s/1", b"2")
    store.put("t/s/2", b"3")
    store.put("u", b"4")
    remembered = RememberedMetadata(store, ("t/a", "t/b"), "t/")
    assert remembered.get("t/b") is None
    store.put("t/b", b"late")
    store.requests = 0
    assert remembered.keys("t/s/") == ["t/s/1", "t/s/2"]
    assert [entry.value for entry in remembered.range("t/", start="t/s/1", limit=1)] == [b"2"]
    assert list(remembered.get_many(["t/a", "t/b", "t/c"])) == ["t/a"]
    assert store.requests == 0
    assert remembered.keys("") == ["t/a", "t/b", "t/s/1", "t/s/2", "u"]
    assert remembered.get("u") is not None


def test_what_lies_behind_the_part_that_was_read_is_asked_for(store: CountingStore) -> None:
    """A topic may have more entries than are read at once: none of them counts as missing."""
    for number in range(100):
        store.put(f"t/s/{number:03}", b"%d" % number)
    store.put("t/state", b"sealed")
    remembered = RememberedMetadata(store, ("t/owner", "t/start", "t/state"), "t/")
    assert remembered.get("t/owner") is None
    assert [entry and entry.value for entry in map(remembered.get, ("t/start", "t/state"))] == [None, b"sealed"]
    assert remembered.keys("t/s/") == [f"t/s/{number:03}" for number in range(100)]
    assert [entry.value for entry in remembered.range("t/s/", start="t/s/098")] == [b"98", b"99"]
    found = [remembered.get(f"t/s/{number:03}") for number in (0, 63, 64, 99)]
    assert [entry and entry.value for entry in found] == [b"0", b"63", b"64", b"99"]


def test_documents_of_the_owner_are_known_until_they_are_written(store: CountingStore) -> None:
    """When a topic is open, all others are asked for each time; large ones are not kept in memory."""
    store.put("t/mine", b"1")
    store.put("t/large", b"1" * 5000)
    store.put("t/others", b"1")
    remembered = RememberedMetadata(store, (), "t/")
    assert remembered.get("t/mine") is not None
    remembered.forget_all_but(("t/mine", "t/large", "t/none"))
    for key in ("t/mine", "t/large", "t/none", "t/others"):
        store.put(key, b"2")
    found = [remembered.get(key) for key in ("t/mine", "t/none", "t/large", "t/others")]
    assert [entry and entry.value for entry in found] == [b"1", None, b"2", b"2"]
    with pytest.raises(ConflictError):
        remembered.commit([Check("t/mine", "1")], [Put("t/mine", b"3")])
    assert [entry.value for entry in (remembered.get("t/mine"), remembered.get("t/none")) if entry] == [b"2"]


def test_a_task_that_rests_runs_when_it_is_woken(background: Background) -> None:
    """It is asked nothing before, and a wake-up while it is due anyway changes nothing."""
    runs: list[int] = []
    ran = threading.Semaphore(0)

    def work() -> float:
        runs.append(1)
        ran.release()
        return float("inf")

    task = background.add(work, float("inf"))
    for turn in range(3):
        task.wake()
        assert ran.acquire(timeout=60)
        assert len(runs) == turn + 1
