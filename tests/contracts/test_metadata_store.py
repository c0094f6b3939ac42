"""One suite for everything that calls itself a metadata store: memory, SQLite, a real etcd, a bucket, a directory."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.campaign import IS_DEEP
from tests.servers import EtcdServer, S3Server, Server

from tidelog.errors import ConflictError, InputError, LeaseLostError, NotSupportedError, StoreUnavailableError
from tidelog.store.metadata import Check, Delete, MetadataStore, Put, Write
from tidelog.store.metadata.base import MAX_VALUE_BYTES
from tidelog.store.metadata.etcd import EtcdMetadataStore
from tidelog.store.metadata.open import open_metadata_store
from tidelog.store.urls import open_store
from tidelog.testing.faulty_store import FaultyMetadata

WRITERS = 8
KINDS = ["memory", "faulty", "faulty-single-key", "sqlite", "etcd", "bucket", "directory"]


def open_kind(kind: str, request: pytest.FixtureRequest) -> MetadataStore:
    """A store of this kind; those on a server are shared by all tests."""
    if kind == "bucket":
        server: S3Server = request.getfixturevalue("s3_server")
        return open_metadata_store("bucket", open_store(server.url("metadata"), server.settings(), {}))
    if kind == "etcd":
        etcd: EtcdServer = request.getfixturevalue("etcd_server")
        return open_metadata_store(etcd.url)
    if kind.startswith("faulty"):
        return FaultyMetadata(multi_key=kind == "faulty")
    directory: Path = request.getfixturevalue("tmp_path")
    if kind == "directory":
        return open_metadata_store("bucket", open_store(f"file://{directory}/objects"))
    return open_metadata_store("memory://" if kind == "memory" else f"sqlite://{directory}/deep/metadata.db")


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest) -> Iterator[MetadataStore]:
    with open_kind(request.param, request) as opened:
        yield opened


@pytest.fixture
def at() -> str:
    """A prefix that no other test uses."""
    return f"test-{secrets.token_hex(8)}/"


def writers_of(store: MetadataStore) -> int:
    """SeaweedFS makes those who lose wait for seconds."""
    return 3 if "s3:" in store.url and not IS_DEEP else WRITERS


def winners(store: MetadataStore, attempt: Callable[[int], object]) -> list[int]:
    """Which of the writers that start together do not lose against another."""
    writers = writers_of(store)
    together = threading.Barrier(writers)

    def run(number: int) -> bool:
        together.wait()
        try:
            attempt(number)
        except ConflictError:
            return False
        return True

    with ThreadPoolExecutor(writers) as pool:
        return [number for number, won in enumerate(pool.map(run, range(writers))) if won]


def value_of(store: MetadataStore, key: str) -> bytes | None:
    found = store.get(key)
    return None if found is None else found.value


class TestEntries:
    """One key."""

    def test_what_was_put_is_there(self, store: MetadataStore, at: str) -> None:
        """With its key, its value and the version that putting returned."""
        version = store.put(at + "a", b"hello")
        assert store.get(at + "a") == (at + "a", b"hello", version)

    @pytest.mark.parametrize(
        "value", [b"", b"\0\n\xff" * 100, bytes(MAX_VALUE_BYTES)], ids=["empty", "binary", "largest"]
    )
    def test_values_are_bytes(self, store: MetadataStore, at: str, value: bytes) -> None:
        """Any bytes, up to the limit, come back as they were."""
        store.put(at + "a", value)
        assert value_of(store, at + "a") == value
        assert [entry.value for entry in store.range(at)] == [value]

    def test_what_is_not_there_is_none(self, store: MetadataStore, at: str) -> None:
        """A key is not found by the beginning of its name."""
        store.put(at + "a/b", b"")
        assert store.get(at + "a") is None
        assert store.get(at + "a/b/c") is None

    def test_many_are_read_at_once(self, store: MetadataStore, at: str) -> None:
        """As `get` reads each of them; those that are not there are left out."""
        keys = [f"{at}key-{number:04d}" for number in range(130)]
        for key in keys[::10]:
            store.put(key, key.encode())
        assert store.get_many(keys) == {key: store.get(key) for key in keys[::10]}
        assert store.get_many([]) == {}

    def test_a_watch_tells_what_is_there_and_then_each_change(self, store: MetadataStore, at: str) -> None:
        """Entries that come, change and go below its prefix, and nothing else."""
        store.put(at + "in/a", b"1")
        store.put(at + "other", b"1")
        watch = store.watch(at + "in/")
        first = watch.next(60)
        assert first is not None
        assert first.is_whole
        assert {key: entry and entry.value for key, entry in first.entries.items()} == {at + "in/a": b"1"}
        store.put(at + "other", b"2")
        version = store.put(at + "in/a", b"2")
        store.put(at + "in/b", b"3")
        store.delete(at + "in/b")
        store.put(at + "in/c", b"4")
        store.delete(at + "in/a")
        seen: dict[str, bytes | None] = {}
        while seen.get(at + "in/a", b"") is not None:
            changes = watch.next(60)
            assert changes is not None
            for key, entry in changes.entries.items():
                seen[key] = entry and entry.value
                assert entry is None or key != at + "in/a" or entry.version == version
        assert seen == {at + "in/a": None, at + "in/c": b"4"} | dict.fromkeys(seen.keys() & {at + "in/b"})
        watch.close()
        assert watch.next(60) is None

    def test_a_mark_changes_with_whatever_is_written(self, store: MetadataStore, at: str) -> None:
        """Where there is one: by this client or another, to any key."""
        marks = [store.change_mark(), store.change_mark()]
        store.put(at + "a", b"value")
        marks.append(store.change_mark())
        store.delete(at + "a")
        marks.append(store.change_mark())
        if store.reads_many_at_once:
            assert marks[0] == marks[1]
            assert len(set(marks)) == 3
        else:
            assert set(marks) == {None}

    def test_putting_the_same_value_again_is_a_change(self, store: MetadataStore, at: str) -> None:
        """A version stands for one write: who read before it does not have the newest."""
        versions = [store.put(at + "a", b"same") for _ in range(3)]
        assert len(set(versions)) == 3

    def test_deleting(self, store: MetadataStore, at: str) -> None:
        """What is gone is gone for get and range, and may be deleted again."""
        store.put(at + "a", b"x")
        store.put(at + "b", b"y")
        store.delete(at + "a")
        store.delete(at + "a")
        assert store.get(at + "a") is None
        assert store.keys(at) == [at + "b"]

    def test_a_version_never_comes_back(self, store: MetadataStore, at: str) -> None:
        """Deleted and made again with the same value, it is another entry: who held the old version has lost."""
        first = store.put(at + "a", b"same")
        store.delete(at + "a")
        second = store.put(at + "a", b"same")
        assert first != second
        with pytest.raises(ConflictError):
            store.commit([Check(at + "a", first)], [Put(at + "a", b"new")])
        assert value_of(store, at + "a") == b"same"

    @pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a b", "ü", "a\n", "x" * 2000])
    def test_hostile_keys_are_refused(self, store: MetadataStore, key: str) -> None:
        """In every place where a key is given."""
        uses: list[Callable[[], object]] = [
            lambda: store.get(key),
            lambda: store.put(key, b""),
            lambda: store.delete(key),
            lambda: store.commit([Check(key, None)], []),
            lambda: store.floor("", key),
        ]
        for use in uses:
            with pytest.raises(InputError):
                use()

    def test_values_that_are_too_large_are_refused(self, store: MetadataStore, at: str) -> None:
        """By all stores alike, so that one can take the place of another."""
        with pytest.raises(InputError):
            store.put(at + "a", bytes(MAX_VALUE_BYTES + 1))
        assert store.get(at + "a") is None


class TestRanges:
    """Many keys."""

    def test_a_range_is_in_order(self, store: MetadataStore, at: str) -> None:
        """By key, with values and versions, and without its neighbours."""
        keys = [f"{at}in/{number:020d}" for number in (0, 5, 10, 99)] + [f"{at}in/cur", f"{at}in/deep/er"]
        versions = {key: store.put(key, key.encode()) for key in reversed(keys)}
        for beside in ("i", "in-", "in0", "io/x"):
            store.put(at + beside, b"")
        assert store.range(f"{at}in/") == [(key, key.encode(), versions[key]) for key in keys]
        assert store.keys(f"{at}in/") == keys
        assert store.range(f"{at}none/") == []

    def test_a_range_has_a_start_and_a_limit(self, store: MetadataStore, at: str) -> None:
        """The start is part of it, whether there is such a key or not."""
        keys = [f"{at}{number}" for number in (1, 3, 5, 7)]
        for key in keys:
            store.put(key, b"")
        for read in (store.keys, lambda *a, **k: [entry.key for entry in store.range(*a, **k)]):
            assert read(at, start=f"{at}3") == keys[1:]
            assert read(at, start=f"{at}4") == keys[2:]
            assert read(at, start=f"{at}8") == []
            assert read(at, limit=2) == keys[:2]
            assert read(at, start=f"{at}2", limit=1) == [keys[1]]
            assert read(at, limit=99) == keys

    def test_ranges_that_cannot_be_are_refused(self, store: MetadataStore, at: str) -> None:
        """A start outside the prefix, no entries at all, half a name."""
        wrong: list[tuple[str, str | None, int | None]] = [(at, "other", None), (at, None, 0), (at[:-1], None, None)]
        for prefix, start, limit in wrong:
            with pytest.raises(InputError):
                store.range(prefix, start=start, limit=limit)

    def test_the_entry_at_or_before_a_key(self, store: MetadataStore, at: str) -> None:
        """How the segment that holds an offset is found."""
        for number in (10, 20, 30):
            store.put(f"{at}in/{number:020d}", b"%d" % number)
        store.put(f"{at}a", b"before the prefix")
        found = {number: store.floor(f"{at}in/", f"{at}in/{number:020d}") for number in (9, 10, 19, 20, 29, 30, 99)}
        values = {number: entry and entry.value for number, entry in found.items()}
        assert values == {9: None, 10: b"10", 19: b"10", 20: b"20", 29: b"20", 30: b"30", 99: b"30"}
        store.delete(f"{at}in/{20:020d}")
        entry = store.floor(f"{at}in/", f"{at}in/{25:020d}")
        assert entry is not None
        assert entry.value == b"10"

    def test_a_long_range_is_whole(self, store: MetadataStore, at: str) -> None:
        """Pages are put together without a seam."""
        keys = [f"{at}{number:020d}" for number in range(450)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda key: store.put(key, b"value"), keys))
        assert store.keys(at) == keys
        assert [entry.key for entry in store.range(at, start=keys[5], limit=420)] == keys[5:425]


class TestCommits:
    """Compare and swap."""

    def test_a_key_is_created_once(self, store: MetadataStore, at: str) -> None:
        """The second time is a conflict, and the first value stays."""
        versions = store.commit([Check(at + "a", None)], [Put(at + "a", b"first")])
        with pytest.raises(ConflictError):
            store.commit([Check(at + "a", None)], [Put(at + "a", b"second")])
        assert store.get(at + "a") == (at + "a", b"first", versions[at + "a"])

    def test_a_key_is_replaced_by_who_has_read_it(self, store: MetadataStore, at: str) -> None:
        """Each version serves once."""
        first = store.put(at + "a", b"first")
        second = store.commit([Check(at + "a", first)], [Put(at + "a", b"second")])[at + "a"]
        with pytest.raises(ConflictError):
            store.commit([Check(at + "a", first)], [Put(at + "a", b"third")])
        assert store.get(at + "a") == (at + "a", b"second", second)

    def test_what_is_not_there_cannot_be_replaced(self, store: MetadataStore, at: str) -> None:
        """It is not created by the way."""
        version = store.put(at + "a", b"")
        store.delete(at + "a")
        with pytest.raises(ConflictError):
            store.commit([Check(at + "a", version)], [Put(at + "a", b"x")])
        assert store.get(at + "a") is None

    def test_a_key_is_deleted_by_who_has_read_it(self, store: MetadataStore, at: str) -> None:
        """Then it is not there, for every way of asking, and can be created and deleted again."""
        store.put(at + "b", b"stays")
        for _ in range(2):
            version = store.commit([Check(at + "a", None)], [Put(at + "a", b"x")])[at + "a"]
            changed = store.commit([Check(at + "a", version)], [Put(at + "a", b"y")])[at + "a"]
            with pytest.raises(ConflictError):
                store.commit([Check(at + "a", version)], [Delete(at + "a")])
            assert store.commit([Check(at + "a", changed)], [Delete(at + "a")]) == {}
            assert store.get(at + "a") is None
            assert store.keys(at) == [at + "b"]
            assert [entry.key for entry in store.range(at, limit=1)] == [at + "b"]
            assert store.floor(at, at + "a") is None
            with pytest.raises(ConflictError):
                store.commit([Check(at + "a", changed)], [Put(at + "a", b"z")])

    def test_many_keys_are_removed_by_who_has_read_them(self, store: MetadataStore, at: str) -> None:
        """One that was changed stays, and is told of; all the others go."""
        keys = [f"{at}{number:02}" for number in range(20)]
        versions = {key: store.put(key, b"x") for key in keys}
        changed = store.put(keys[7], b"y")
        with pytest.raises(ConflictError):
            store.remove_many(versions)
        assert store.keys(at) == [keys[7]]
        store.remove_many({keys[7]: changed})
        store.remove_many({})
        assert store.keys(at) == []

    def test_checks_alone_change_nothing(self, store: MetadataStore, at: str) -> None:
        """They hold or they conflict."""
        version = store.put(at + "a", b"x")
        assert store.commit([Check(at + "a", version)], []) == {}
        assert store.commit([Check(at + "none", None)], [Delete(at + "none")]) == {}
        for wrong in (Check(at + "a", None), Check(at + "none", version)):
            with pytest.raises(ConflictError):
                store.commit([wrong], [])
        assert store.get(at + "a") == (at + "a", b"x", version)

    def test_several_keys_change_together_or_not_at_all(self, store: MetadataStore, at: str) -> None:
        """A store that cannot says so before it has done anything."""
        a, b, c = at + "a", at + "b", at + "c"
        version = store.put(a, b"old")
        store.put(c, b"to go")
        writes: list[Write] = [Put(a, b"new"), Put(b, b"new"), Delete(c)]
        if not store.supports_multi_key:
            with pytest.raises(NotSupportedError):
                store.commit([Check(a, version)], writes)
            assert [value_of(store, key) for key in (a, b, c)] == [b"old", None, b"to go"]
            return
        with pytest.raises(ConflictError):
            store.commit([Check(a, version), Check(b, version)], writes)
        assert [value_of(store, key) for key in (a, b, c)] == [b"old", None, b"to go"]
        versions = store.commit([Check(a, version), Check(b, None)], writes)
        assert [value_of(store, key) for key in (a, b, c)] == [b"new", b"new", None]
        assert {entry.key: entry.version for entry in store.range(at)} == versions

    def test_one_key_twice_is_refused(self, store: MetadataStore, at: str) -> None:
        """Which of two writes should win cannot be said."""
        a, absent = at + "a", Check(at + "a", None)
        wrong: list[tuple[list[Check], list[Write]]] = [
            ([], [Put(a, b"1"), Put(a, b"2")]),
            ([], [Put(a, b"1"), Delete(a)]),
            ([absent, absent], [Put(a, b"1")]),
        ]
        for checks, writes in wrong:
            with pytest.raises(InputError):
                store.commit(checks, writes)
        assert store.get(at + "a") is None


@pytest.mark.deeper
class TestRaces:
    """Several at once."""

    def test_of_many_creators_one_wins(self, store: MetadataStore, at: str) -> None:
        """And it is its value that is there."""
        won = winners(store, lambda number: store.commit([Check(at + "a", None)], [Put(at + "a", b"%d" % number)]))
        assert len(won) == 1
        assert value_of(store, at + "a") == b"%d" % won[0]

    def test_of_many_replacers_one_wins(self, store: MetadataStore, at: str) -> None:
        """Whatever they write, even the same."""
        version = store.put(at + "a", b"same")
        won = winners(store, lambda number: store.commit([Check(at + "a", version)], [Put(at + "a", b"same")]))
        assert len(won) == 1

    def test_of_many_deleters_one_wins(self, store: MetadataStore, at: str) -> None:
        """The others learn that it was not they."""
        version = store.put(at + "a", b"x")
        won = winners(store, lambda number: store.commit([Check(at + "a", version)], [Delete(at + "a")]))
        assert len(won) == 1
        assert store.get(at + "a") is None

    def test_of_many_who_make_it_anew_one_wins(self, store: MetadataStore, at: str) -> None:
        """Also where something stays behind of what was deleted."""
        version = store.put(at + "a", b"x")
        store.commit([Check(at + "a", version)], [Delete(at + "a")])
        won = winners(store, lambda number: store.commit([Check(at + "a", None)], [Put(at + "a", b"%d" % number)]))
        assert len(won) == 1
        assert value_of(store, at + "a") == b"%d" % won[0]

    def test_no_increment_is_lost(self, store: MetadataStore, at: str) -> None:
        """Read, add one, write back unless somebody else was faster: the sum is right."""
        store.put(at + "n", b"0")
        rounds = 2

        def add(_: int) -> None:
            done = 0
            while done < rounds:
                entry = store.get(at + "n")
                assert entry is not None
                try:
                    store.commit([Check(at + "n", entry.version)], [Put(at + "n", b"%d" % (int(entry.value) + 1))])
                except ConflictError:
                    continue
                done += 1

        writers = writers_of(store)
        with ThreadPoolExecutor(writers) as pool:
            list(pool.map(add, range(writers)))
        assert value_of(store, at + "n") == b"%d" % (writers * rounds)


class TestLeases:
    """Where the store has them."""

    def test_a_store_without_leases_says_so(self, store: MetadataStore) -> None:
        """One with leases takes no lease of no time."""
        with pytest.raises(InputError if store.supports_leases else NotSupportedError):
            store.lease(0)

    @pytest.mark.parametrize("store", ["memory", "etcd"], indirect=True)
    def test_what_hangs_on_a_lease_goes_with_it(self, store: MetadataStore, at: str) -> None:
        """When it is given back; other entries stay, and so does one that was written again without the lease."""
        lease = store.lease(60)
        store.commit([], [Put(at + "leased", b"x", lease), Put(at + "freed", b"y", lease)])
        store.put(at + "freed", b"z")
        store.put(at + "other", b"w")
        lease.refresh()
        assert store.keys(at) == [at + "freed", at + "leased", at + "other"]
        lease.revoke()
        lease.revoke()
        assert store.keys(at) == [at + "freed", at + "other"]
        assert store.get(at + "leased") is None

    @pytest.mark.parametrize("store", ["memory", "etcd"], indirect=True)
    def test_a_lease_that_is_over_carries_nothing(self, store: MetadataStore, at: str) -> None:
        """It can be neither refreshed nor written with, and a failed write changes nothing."""
        lease = store.lease(60)
        lease.revoke()
        with pytest.raises(LeaseLostError):
            lease.refresh()
        with pytest.raises(LeaseLostError):
            store.commit([], [Put(at + "leased", b"x", lease)])
        assert store.get(at + "leased") is None


class TestServerTrouble:
    """Servers that die, hang and come back."""

    # Of the store of a bucket the contract of object stores shows the same.
    @pytest.mark.parametrize("kind", ["etcd", pytest.param("bucket", marks=pytest.mark.long)])
    def test_a_server_that_died_is_a_reason_to_retry(self, kind: str, request: pytest.FixtureRequest, at: str) -> None:
        """What was acknowledged is there afterwards, and what was not is there whole or not at all."""
        server: Server = request.getfixturevalue("s3_server" if kind == "bucket" else "etcd_server")
        store = impatient(kind, request, 10)
        version = store.put(at + "kept", b"hello")
        uses: list[Callable[[], object]] = [
            lambda: store.get(at + "kept"),
            lambda: store.range(at),
            lambda: store.keys(at),
            lambda: store.floor(at, at + "kept"),
            lambda: store.commit([Check(at + "new", None)], [Put(at + "new", b"undecided")]),
        ]
        server.kill()
        try:
            for use in uses:
                with pytest.raises(StoreUnavailableError):
                    use()
        finally:
            server.start()
        assert store.get(at + "kept") == (at + "kept", b"hello", version)
        assert value_of(store, at + "new") in (None, b"undecided")
        store.commit([Check(at + "kept", version)], [Put(at + "kept", b"goes on")])
        store.close()

    @pytest.mark.parametrize("kind", ["etcd", "bucket"])
    def test_a_write_that_got_no_answer_is_found_again(
        self, kind: str, request: pytest.FixtureRequest, at: str
    ) -> None:
        """A server that hangs for longer than the timeout and then does the write: the writer wins against itself."""
        server: Server = request.getfixturevalue("s3_server" if kind == "bucket" else "etcd_server")
        store = impatient(kind, request, 1)
        server.pause()
        waking = threading.Timer(1.3, server.resume)
        waking.start()
        try:
            versions = store.commit([Check(at + "a", None)], [Put(at + "a", b"mine")])
        finally:
            waking.join()
        store.close()
        store = impatient(kind, request, 60)  # from here on it is not hurried
        assert store.get(at + "a") == (at + "a", b"mine", versions[at + "a"])
        with pytest.raises(ConflictError):
            store.commit([Check(at + "a", None)], [Put(at + "a", b"other")])
        store.close()


def impatient(kind: str, request: pytest.FixtureRequest, timeout_seconds: float) -> MetadataStore:
    """A store that does not wait for longer than this for an answer, and whose client does not ask again."""
    if kind == "etcd":
        etcd: EtcdServer = request.getfixturevalue("etcd_server")
        return EtcdMetadataStore([etcd.endpoint], timeout_seconds=timeout_seconds)
    server: S3Server = request.getfixturevalue("s3_server")
    settings = server.settings(store_max_retries=0, store_request_timeout_ms=int(timeout_seconds * 1000))
    return open_metadata_store("bucket", open_store(server.url("metadata"), settings, {}))
