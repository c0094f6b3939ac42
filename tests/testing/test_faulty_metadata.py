"""The metadata store that dies and fails: what a crash leaves in it, what its callers are told, what it counts."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest

from tidelog.errors import AccessDeniedError, ConflictError, InputError, StoreUnavailableError, TidelogError
from tidelog.store.metadata import Check, Delete, Entry, Put
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.testing import (
    Crash,
    CrashPlan,
    Faults,
    FaultyMetadata,
    FaultyStore,
    History,
    StoreFault,
    crash_machine_everywhere,
)


def both_ways(store: FaultyMetadata) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """What there is after a crash if the interrupted commit was not done, and if it was."""
    return store.after_crash(torn_bytes=0).contents(), store.after_crash(torn_bytes=1).contents()


class TestCrashes:
    """The death of the process."""

    def test_the_last_commit_was_done_or_was_not(self) -> None:
        """All of it, or none: there is no third way."""
        store = FaultyMetadata(crash_at=2)
        version = store.put("a", b"old")
        with pytest.raises(Crash, match=r"metadata\.commit a,b,c"):
            store.commit([Check("a", version), Check("c", None)], [Put("a", b"new"), Put("b", b"new")])
        assert both_ways(store) == ({"a": b"old"}, {"a": b"new", "b": b"new"})

    def test_a_condition_holds_for_the_last_commit_too(self) -> None:
        """A commit that would have been refused is not done by dying."""
        store = FaultyMetadata(crash_at=2)
        store.put("a", b"old")
        with pytest.raises(Crash):
            store.commit([Check("a", None)], [Put("a", b"new")])
        assert both_ways(store) == ({"a": b"old"}, {"a": b"old"})

    def test_a_dead_client_can_do_nothing(self) -> None:
        """Neither look nor write; closing is all that is left."""
        store = FaultyMetadata()
        store.put("a", b"old")
        store.crash()
        uses: list[Callable[[], object]] = [
            lambda: store.get("a"),
            lambda: store.range(""),
            lambda: store.keys(""),
            lambda: store.floor("", "a"),
            lambda: store.put("a", b"new"),
            lambda: store.delete("a"),
        ]
        for use in uses:
            with pytest.raises(Crash):
                use()
        store.close()
        assert store.contents() == {"a": b"old"}

    def test_what_is_found_afterwards_is_another_life(self) -> None:
        """Versions are still those that were given, and none is given twice."""
        store = FaultyMetadata(multi_key=False)
        version = store.put("a", b"old")
        found = store.after_crash("lose", crash_at=2)
        assert not found.supports_multi_key
        assert found.get("a") == ("a", b"old", version)
        assert found.commit([Check("a", version)], [Put("a", b"new")])["a"] != version
        assert store.contents() == {"a": b"old"}
        with pytest.raises(Crash):
            found.put("a", b"")

    def test_another_client_lives_on(self) -> None:
        """The one who takes over sees what the dead one did."""
        store = FaultyMetadata(crash_at=2)
        other = store.another_client()
        version = store.put("owner", b"1")
        with pytest.raises(Crash):
            store.put("owner", b"again")
        other.commit([Check("owner", version)], [Put("owner", b"2")])
        assert store.contents() == {"owner": b"2"}

    def test_store_and_metadata_have_one_numbering(self) -> None:
        """A driver can cut between an object and its descriptor; each fails for itself."""
        faults = Faults()
        store, metadata = FaultyStore(faults=faults), FaultyMetadata(faults=faults)
        store.put("a", b"")
        metadata.put("a", b"")
        assert [str(call) for call in metadata.calls] == ["1 store.put a", "2 metadata.commit a"]
        metadata.fail("get")
        store.get("a")
        with pytest.raises(StoreUnavailableError):
            metadata.get("a")

    def test_the_driver_tries_both_at_every_commit(self) -> None:
        """Every state between two commits is found."""
        found: list[dict[str, bytes]] = []

        def workload(store: FaultyMetadata, _: History) -> None:
            store.put("a", b"1")
            store.commit([], [Delete("a"), Put("b", b"2")])

        def check(store: FaultyMetadata, _: History) -> None:
            found.append(store.contents())

        crash_machine_everywhere(lambda call: FaultyMetadata(crash_at=call), workload, check, CrashPlan(seeds=3))
        assert found == [{}, {"a": b"1"}, {"a": b"1"}, {"b": b"2"}, {"b": b"2"}]


class TestFailures:
    """A store that lives and fails."""

    @pytest.mark.parametrize(
        ("fault", "error", "is_done"),
        [
            ("unavailable", StoreUnavailableError, False),
            ("unanswered", StoreUnavailableError, True),
            ("late", StoreUnavailableError, False),
            ("denied", AccessDeniedError, False),
            ("conflict", ConflictError, False),
        ],
    )
    def test_a_commit_fails_as_planned(self, fault: StoreFault, error: type[TidelogError], is_done: bool) -> None:
        """Once; with a lost answer although it was done."""
        store = FaultyMetadata()
        store.fail("commit", fault)
        with pytest.raises(error):
            store.commit([Check("a", None)], [Put("a", b"new")])
        assert store.contents() == ({"a": b"new"} if is_done else {})
        store.put("b", b"")

    def test_a_late_commit_lands_on_what_is_there_then(self) -> None:
        """An owner that was paused loses against the one that came after it."""
        store = FaultyMetadata()
        version = store.put("owner", b"1")
        store.fail("commit", "late")
        with pytest.raises(StoreUnavailableError):
            store.commit([Check("owner", version)], [Put("owner", b"2, late")])
        store.commit([Check("owner", version)], [Put("owner", b"2")])
        assert store.land_late_writes() == 1
        assert store.contents() == {"owner": b"2"}

    def test_reads_fail_as_planned(self) -> None:
        """None and an empty list are never the answer of a store that gave none."""
        store = FaultyMetadata()
        uses: list[tuple[str, Callable[[], object]]] = [
            ("get", lambda: store.get("a")),
            ("range", lambda: store.range("")),
            ("keys", lambda: store.keys("")),
            ("floor", lambda: store.floor("", "a")),
        ]
        for operation, use in uses:
            store.fail(operation)
            with pytest.raises(StoreUnavailableError):
                use()
            assert not use()

    def test_a_failure_finds_its_key_among_several(self) -> None:
        """By the name at the end or by the whole key."""
        store = FaultyMetadata()
        for matching in ("cur", "t/segments/*"):
            store.fail("commit", matching=matching)
            store.put("t/owner", b"")
            with pytest.raises(StoreUnavailableError):
                store.commit([], [Put("t/segments/cur", b""), Put("t/state", b"")])

    def test_values_arrive_damaged(self) -> None:
        """One bit, or the end is missing; the entry itself is whole."""
        store = FaultyMetadata()
        store.put("a", b"0123")
        reads: list[Callable[[], Entry | None]] = [
            lambda: store.get("a"),
            lambda: store.range("")[0],
            lambda: store.floor("", "a"),
        ]
        for read in reads:
            store.fail("[gfr]*", "flipped", at_byte=0)
            entry = read()
            assert entry is not None
            assert entry.value == b"1123"
        store.fail("get", "truncated")
        damaged = store.get("a")
        assert damaged is not None
        assert damaged.value == b"01"
        assert store.contents() == {"a": b"0123"}

    def test_plans_that_mean_nothing_are_refused(self) -> None:
        """A put is a commit here, and what is missing is None, not an error."""
        store = FaultyMetadata()
        for operation, fault in (("put", "unavailable"), ("get", "not_found"), ("commit", "flipped")):
            with pytest.raises(ValueError, match="only"):
                store.fail(operation, fault)  # type: ignore[arg-type]

    @pytest.mark.parametrize("fault", ["unavailable", "unanswered"])
    def test_a_bucket_store_finds_its_own_write(self, fault: StoreFault) -> None:
        """On a faulty object store the real one for buckets is crashed and failed as well."""
        objects = FaultyStore()
        with BucketMetadataStore(objects) as store:
            objects.fail("put_if_absent", fault)
            versions = store.commit([Check("a", None)], [Put("a", b"mine")])
            assert store.get("a") == ("a", b"mine", versions["a"])
            with pytest.raises(ConflictError):
                store.commit([Check("a", None)], [Put("a", b"other")])


def test_requests_and_bytes_are_counted() -> None:
    """By operation; bytes are those of values."""
    store = FaultyMetadata()
    store.commit([], [Put("a", b"01234"), Put("b", b"0123456789")])
    store.get("a")
    store.range("", limit=1)
    store.keys("")
    assert store.traffic == ({"commit": 1, "get": 1, "range": 1, "keys": 1}, 10, 15)


def test_it_is_not_taken_elsewhere() -> None:
    """What lives in one process says that it cannot be pickled."""
    with pytest.raises(InputError):
        pickle.dumps(FaultyMetadata())
