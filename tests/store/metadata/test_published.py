"""The copy of a catalog in the bucket: complete, never older than it was, never the truth."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable

import pytest

from tidelog.errors import ConfigError, ConflictError, StoreUnavailableError
from tidelog.store.keys import EngineKeys, TopicKeys
from tidelog.store.metadata.base import Check, Delete, MeasuredMetadata, Put
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.store.metadata.memory import MemoryMetadataStore
from tidelog.store.metadata.open import open_metadata_store
from tidelog.store.metadata.published import PublishedMetadata
from tidelog.testing import FaultyMetadata, FaultyStore

KEYS = TopicKeys("shop", "orders")
ENGINE = EngineKeys("main")
OWNER = b'{"epoch":1,"log_id":"ab"}'


class Published(PublishedMetadata):
    """A metadata store in memory with its copy, and how both are looked at."""

    def __init__(self, truth: MemoryMetadataStore | FaultyMetadata | None = None, bucket: FaultyStore | None = None):
        self.truth = truth or MemoryMetadataStore()
        self.bucket = bucket or FaultyStore()
        super().__init__(self.truth, self.bucket)

    def claim(self, owner: bytes = OWNER) -> None:
        self.put(KEYS.owner, owner)

    def again(self) -> Published:
        """Another process."""
        return Published(self.truth, self.bucket)


def copies_in(bucket: FaultyStore, prefix: str = KEYS.metadata_prefix) -> dict[str, bytes]:
    """What a reader of the bucket finds, by its name below the prefix."""
    with BucketMetadataStore(bucket, read_only=True) as copy:
        return {entry.key.removeprefix(prefix): entry.value for entry in copy.range(prefix)}


def behind(published: PublishedMetadata) -> int:
    found = published.copy_statistics()
    assert found is not None
    return found.behind


def test_commit_publishes_public_documents() -> None:
    """What readers need is in the bucket when the commit returns, what only writers need is not."""
    with Published() as store:
        store.claim()
        store.commit([], [Put(KEYS.descriptor(0), b"first"), Put(KEYS.current, b"cur"), Put(KEYS.staging, b"private")])
        for key in (KEYS.producers, KEYS.replay("r"), "tidelog/storage/epoch-floor", "tidelog/storage/nodes/a/b"):
            store.put(key, b"private")
        store.put(KEYS.subscription("billing"), b"cursor")
        found = copies_in(store.bucket)
        assert json.loads(found.pop("owner"))["copy_of"] == "memory://"
        assert found == {
            f"segments/{0:020}": b"first",
            "segments/cur": b"cur",
            "subscriptions/billing": b"cursor",
        }
        assert not any("epoch-floor" in info.key or "nodes" in info.key for info in store.bucket.list(""))
        assert store.copy_statistics() == MeasuredMetadata(store).statistics().copy
        assert behind(store) == 0


def test_engine_manifest_is_published() -> None:
    """An engine's catalog is published as a topic's is."""
    with Published() as store:
        store.put(ENGINE.owner, OWNER)
        store.commit([], [Put(ENGINE.engine_manifest, b"manifest"), Put(ENGINE.descriptor(1), b"records")])
        found = copies_in(store.bucket, ENGINE.metadata_prefix)
        assert (found["manifest"], found[f"segments/{1:020}"]) == (b"manifest", b"records")


def test_conflicting_commit_publishes_nothing() -> None:
    """What was not written is not copied."""
    with Published() as store:
        store.claim()
        with pytest.raises(ConflictError):
            store.commit([Check(KEYS.start, "77")], [Put(KEYS.start, b"start")])
        assert "start" not in copies_in(store.bucket)


def test_deleted_documents_leave_the_copy() -> None:
    """And nothing of them stays: not even the stamps of a bucket that cannot delete on a condition."""
    with Published() as store:
        store.claim()
        store.put(KEYS.descriptor(0), b"first")
        store.delete(KEYS.descriptor(0))
        assert [info.key for info in store.bucket.list("")] == [KEYS.owner]


def test_deleted_topic_leaves_nothing_in_the_bucket() -> None:
    """Loses, in another order: a topic that readers of the bucket see for ever."""
    with Published() as store:
        store.claim()
        store.put(KEYS.start, b"start")
        store.delete(KEYS.start)
        store.bucket.fail("delete", times=None)
        with pytest.raises(StoreUnavailableError):
            store.delete(KEYS.owner)
        assert store.truth.get(KEYS.owner) is not None
        store.bucket.heal()
        store.delete(KEYS.owner)
        assert store.truth.get(KEYS.owner) is None
        assert list(store.bucket.list("")) == []


def test_unreachable_bucket_fails_no_commit() -> None:
    """The documents are out of date, that shows, and the next commit brings all of them."""
    with Published() as store:
        store.claim()
        store.bucket.fail("get", times=None)
        store.put(KEYS.descriptor(0), b"first")
        statistics = store.copy_statistics()
        assert statistics is not None
        assert (statistics.behind, statistics.errors) == (1, 1)
        assert statistics.last_error is not None
        assert statistics.behind_seconds >= 0
        store.bucket.heal()
        store._retry_at = 0.0  # a bucket that took long to fail is left alone for a while
        store.put(KEYS.current, b"cur")
        assert behind(store) == 0
        assert copies_in(store.bucket)[f"segments/{0:020}"] == b"first"


def test_commit_does_not_wait_for_a_bucket_that_took_long_to_fail() -> None:
    """A claim or a position must not hang for as long as the bucket is gone."""
    with Published() as store:
        store.claim()
        store._retry_at = float("inf")
        before = store.bucket.traffic.request_count
        store.put(KEYS.descriptor(0), b"first")
        assert store.bucket.traffic.request_count == before
        assert behind(store) == 1


def test_background_copies_what_is_behind() -> None:
    """Also what no later commit touches, as soon as the bucket answers again."""
    truth, bucket, copied = MemoryMetadataStore(), FaultyStore(), threading.Event()
    with PublishedMetadata(truth, bucket, runs_in_background=True) as store:
        bucket.fail("*", times=None)
        store.put(KEYS.owner, OWNER)
        store.put(KEYS.descriptor(0), b"first")
        assert behind(store) == 2
        bucket.heal()
        for _ in range(600):
            if not behind(store):
                break
            copied.wait(0.1)
        assert copies_in(bucket)[f"segments/{0:020}"] == b"first"


def test_closing_copies_what_is_left() -> None:
    """A short-lived process leaves a copy that is up to date."""
    truth, bucket = MemoryMetadataStore(), FaultyStore()
    store = PublishedMetadata(truth, bucket, runs_in_background=True)
    store.put(KEYS.owner, OWNER)
    store.close()
    assert "owner" in copies_in(bucket)


def test_copy_of_a_claim_waits_while_others_are_made() -> None:
    """A node that takes over hundreds of topics is not held up by their copies; with the next one of a topic, and at
    the end, that of its owner is made too, before the others."""
    truth, bucket = MemoryMetadataStore(), FaultyStore()
    with PublishedMetadata(truth, bucket) as before:
        version = before.commit([Check(KEYS.owner, None)], [Put(KEYS.owner, OWNER)])[KEYS.owner]
    with PublishedMetadata(truth, bucket, runs_in_background=True) as store:
        next_owner = b'{"epoch":2,"log_id":"ab"}'
        version = store.commit([Check(KEYS.owner, version)], [Put(KEYS.owner, next_owner)])[KEYS.owner]
        assert list(store._postponed) == [KEYS.metadata_prefix]
        assert json.loads(copies_in(bucket)["owner"])["epoch"] == 1
        store.put(KEYS.descriptor(0), b"first")
        found = copies_in(bucket)
        assert json.loads(found["owner"])["epoch"] == 2
        assert found[f"segments/{0:020}"] == b"first"
        assert not store._postponed
        store.commit([Check(KEYS.owner, version)], [Put(KEYS.owner, b'{"epoch":3,"log_id":"ab"}')])
    assert json.loads(copies_in(bucket)["owner"])["epoch"] == 3


def test_claim_heals_what_a_dead_process_left_out() -> None:
    """Loses, without comparing: what was committed and not copied when the process died, deletions included."""
    with Published() as store:
        store.claim()
        store.put(KEYS.descriptor(0), b"first")
        store.put(KEYS.descriptor(10), b"old")
        store.put(KEYS.descriptor(20), b"third")
        for write in (Delete(KEYS.descriptor(0)), Put(KEYS.descriptor(10), b"new"), Put(KEYS.start, b"start")):
            store.truth.commit([], [write])  # the process died here
        with store.again() as next_owner:
            next_owner.claim(b'{"epoch":2,"log_id":"ab"}')
        found = copies_in(store.bucket)
        assert json.loads(found.pop("owner"))["epoch"] == 2
        assert found == {f"segments/{10:020}": b"new", f"segments/{20:020}": b"third", "start": b"start"}


def test_claim_reads_only_what_is_newer_than_the_last_comparison() -> None:
    """A catalog of many objects must not be read again with every opening."""
    with Published() as store:
        store.claim()
        for start in range(40):
            store.put(KEYS.descriptor(start), b"descriptor")
        with store.again() as second:
            second.claim()
        store.bucket.reset_traffic()
        with store.again() as third:
            third.claim()
        assert store.bucket.traffic.requests.get("get", 0) < 10


def test_job_that_does_not_own_the_topic_publishes_all_of_a_first_copy() -> None:
    """Loses otherwise: readers would find the few documents that a job has changed, and take them for the topic."""
    truth = MemoryMetadataStore()
    for key in (KEYS.owner, KEYS.descriptor(0), KEYS.descriptor(10)):
        truth.put(key, OWNER)
    with Published(truth) as job:
        job.put(KEYS.descriptor(0), b"compacted")
        assert copies_in(job.bucket).keys() == {"owner", f"segments/{0:020}", f"segments/{10:020}"}


def test_nothing_is_published_while_a_topic_has_no_owner() -> None:
    """A rebuild takes the owner away while it works; readers get the catalog when it is whole."""
    with Published() as store:
        store.put(KEYS.descriptor(0), b"first")
        assert copies_in(store.bucket) == {}
        store.claim()
        assert f"segments/{0:020}" in copies_in(store.bucket)


# Races


def run_at(store: FaultyStore | FaultyMetadata, operation: str, key: str, work: Callable[[], object]) -> None:
    """Once, when this is asked for the next time."""
    pending = [work]

    def look(asked: str, keys: str) -> None:
        if asked == operation and key in keys and pending:
            pending.pop()()

    store.on_request = look


def test_late_copy_does_not_replace_a_newer_one() -> None:
    """Loses, without the version: a reader sees the newest object of a topic, and then does not."""
    truth = FaultyMetadata()
    with Published(truth) as late:
        late.claim()
        late.put(KEYS.current, b"1")
        faster = late.again()
        run_at(late.bucket, "put_if_match", KEYS.current, lambda: faster.put(KEYS.current, b"3"))
        late.put(KEYS.current, b"2")
        assert copies_in(late.bucket)["segments/cur"] == b"3"
        assert truth.contents()[KEYS.current] == b"3"


def test_late_creation_does_not_bring_back_what_was_deleted() -> None:
    """Loses, without a second look: a descriptor whose object is gone."""
    truth = FaultyMetadata()
    with Published(truth) as late:
        late.claim()
        faster = late.again()
        run_at(late.bucket, "put_if_absent", KEYS.descriptor(0), lambda: faster.delete(KEYS.descriptor(0)))
        late.put(KEYS.descriptor(0), b"first")
        assert copies_in(late.bucket).keys() == {"owner"}


def test_owner_document_stays_in_the_copy_while_a_rebuild_writes_it_again() -> None:
    """Loses otherwise: for a moment the copy looks like a catalog that anybody may claim."""
    with Published() as store:
        store.claim()
        store.put(KEYS.start, b"start")
        run_at(store.bucket, "get", KEYS.owner, lambda: store.truth.delete(KEYS.owner))
        store.claim(b'{"epoch":2,"log_id":"ab"}')
        assert "owner" in copies_in(store.bucket)
        store.bucket.on_request = None
        store.claim(b'{"epoch":3,"log_id":"ab"}')
        store.delete(KEYS.owner)
        assert json.loads(copies_in(store.bucket)["owner"])["epoch"] == 3


@pytest.mark.parametrize("seed", range(8))
def test_racing_writers_leave_the_truth(seed: int) -> None:
    """Several processes put and delete the same documents; the copy only moves forward, and ends equal."""
    truth, bucket, chance = MemoryMetadataStore(), FaultyStore(), random.Random(seed)
    stores = [Published(truth, bucket) for _ in range(3)]
    stores[0].claim()
    names = [KEYS.current, KEYS.start, KEYS.descriptor(0)]
    plans = [[(chance.choice(names), chance.random() < 0.3) for _ in range(30)] for _ in stores]
    numbers = iter(range(1000))

    def work(store: Published, plan: list[tuple[str, bool]]) -> None:
        for key, deletes in plan:
            store.delete(key) if deletes else store.put(key, b"%d" % next(numbers))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(stores, plans, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for store in stores:
        store.close()
    expected = {key: entry.value for key in names if (entry := truth.get(key)) is not None}
    found = copies_in(bucket, "")
    assert {key: found[key] for key in names if key in found} == expected


# A copy is no catalog to write to


def test_copy_cannot_be_claimed() -> None:
    """Loses otherwise: two catalogs of one topic, each with its own owner. Neither reading nor writing gets through."""
    with Published() as store:
        store.claim()
        store.put(KEYS.descriptor(0), b"first")
        with open_metadata_store("bucket", store.bucket) as writable:
            for attempt in (
                lambda: writable.get(KEYS.owner),
                lambda: writable.get(KEYS.descriptor(0)),
                lambda: writable.keys(KEYS.segments_prefix),
                lambda: writable.range(KEYS.metadata_prefix),
                lambda: writable.floor(KEYS.segments_prefix, KEYS.descriptor(5)),
                lambda: writable.put(KEYS.staging, b"staged"),
                lambda: writable.delete(KEYS.descriptor(0)),
            ):
                with pytest.raises(ConfigError, match="is a copy, for reading: the metadata store is memory://"):
                    attempt()
            assert writable.get(TopicKeys("shop", "others").owner) is None
        with open_metadata_store("bucket", store.bucket, read_only=True) as readable:
            assert readable.get(KEYS.descriptor(0)) is not None


def test_catalog_of_the_bucket_itself_is_not_replaced_by_a_copy() -> None:
    """A topic of that name whose truth is the bucket: the copy would destroy it."""
    bucket = FaultyStore()
    with open_metadata_store("bucket", bucket) as theirs:
        theirs.put(KEYS.owner, b'{"epoch":1,"log_id":"cd"}')
    with Published(bucket=bucket) as store:
        store.claim()
        statistics = store.copy_statistics()
        assert statistics is not None
        assert statistics.behind == 1
        assert "the catalog of another log" in str(statistics.last_error)
    assert copies_in(bucket) == {"owner": b'{"epoch":1,"log_id":"cd"}'}


def test_catalog_that_moved_out_of_the_bucket_becomes_a_copy() -> None:
    """The same log, by its id: who still writes to the old catalog is fenced."""
    bucket = FaultyStore()
    with open_metadata_store("bucket", bucket) as before:
        before.put(KEYS.owner, OWNER)
        before.put(KEYS.descriptor(5), b"old")
        version = before.get(KEYS.owner)
        assert version is not None
        with Published(bucket=bucket) as store:
            store.claim(b'{"epoch":2,"log_id":"ab"}')
            assert copies_in(bucket).keys() == {"owner"}
        with pytest.raises(ConflictError):
            before.commit([Check(KEYS.owner, version.version)], [])


def test_server_without_conditional_writes_gets_no_copy() -> None:
    """It cannot hold one that never goes back; everything else works."""

    class Careless(FaultyStore):
        def put_if_match(self, key: str, data: bytes, etag: str) -> str:
            return self.put(key, data)

    with Published(bucket=Careless()) as store:
        store.claim()
        store.put(KEYS.start, b"start")
        statistics = store.copy_statistics()
        assert statistics is not None
        assert statistics.errors == 1
        assert "ignores If-Match" in str(statistics.last_error)
        assert copies_in(store.bucket) == {}


def test_reading_and_the_bucket_itself_publish_nothing() -> None:
    """Only what is opened for writing, and is not in the bucket, has a copy."""
    bucket = FaultyStore()
    assert isinstance(open_metadata_store("memory://", bucket), PublishedMetadata)
    assert not isinstance(open_metadata_store("memory://", bucket, read_only=True), PublishedMetadata)
    assert not isinstance(open_metadata_store("memory://"), PublishedMetadata)
    assert not isinstance(open_metadata_store("bucket", bucket), PublishedMetadata)


# Damage


@pytest.mark.parametrize("damage", [b"{}", b"", b"tidelog-entry 1 torn"])
@pytest.mark.parametrize("name", ["start", "segments/cur", f"segments/{0:020}", "owner"])
def test_damaged_document_of_the_copy_is_replaced_by_the_truth(name: str, damage: bytes) -> None:
    """Loses otherwise: one damaged document ends copying of its topic for good, and deletions with it."""
    with Published() as store:
        store.claim()
        store.commit([], [Put(KEYS.descriptor(0), b"first"), Put(KEYS.current, b"cur"), Put(KEYS.start, b"start")])
        before = copies_in(store.bucket)
        store.bucket.put(KEYS.metadata_prefix + name, damage)
        with store.again() as other:
            other.put(KEYS.metadata_prefix + name, OWNER if name == "owner" else b"newer")
            assert behind(other) == 0
            assert other.copy_is_current(KEYS.start)
            found = copies_in(store.bucket)
        assert found.keys() == before.keys()
        assert name == "owner" or found[name] == b"newer"
        assert json.loads(found["owner"])["copy_of"] == "memory://"


def test_node_that_reaches_the_metadata_store_elsewhere_goes_on_with_the_copy() -> None:
    """Loses otherwise: with etcd's members in another order, a node's copies of topics with partitions go stale."""
    with Published() as store:
        store.put(KEYS.partitions, b'{"count":2}')
        with store.again() as other:
            other.truth.url = "memory://elsewhere"
            other.put(KEYS.partitions, b'{"count":3,"earlier_counts":[2]}')
            other.put(KEYS.settings, b"{}")
            assert behind(other) == 0
        found = copies_in(store.bucket)
    assert json.loads(found["partitions"])["count"] == 3
    assert found["settings"] == b"{}"


def test_partitions_of_another_topic_of_the_bucket_are_left_alone() -> None:
    """Its number of partitions is one that this topic never had."""
    bucket = FaultyStore()
    with Published(bucket=bucket) as theirs:
        theirs.truth.url = "memory://theirs"
        theirs.put(KEYS.partitions, b'{"count":5}')
        with Published(bucket=bucket) as store:
            store.put(KEYS.partitions, b'{"count":2}')
            assert "the catalog of another log" in str(store.copy_statistics())
    assert json.loads(copies_in(bucket)["partitions"])["count"] == 5


def test_damaged_document_of_the_copy_is_deleted_with_the_truth() -> None:
    """Also one that no longer is."""
    with Published() as store:
        store.claim()
        store.put(KEYS.descriptor(0), b"first")
        store.bucket.put(KEYS.descriptor(0), b"damaged")
        store.delete(KEYS.descriptor(0))
        assert copies_in(store.bucket).keys() == {"owner"}


def test_damaged_owner_of_another_log_is_left_alone() -> None:
    """What else is there tells that it is no copy of this topic."""
    bucket = FaultyStore()
    with open_metadata_store("bucket", bucket) as theirs:
        theirs.put(KEYS.start, b"theirs")
    bucket.put(KEYS.owner, b"damaged")
    with Published(bucket=bucket) as store:
        store.claim()
        store.put(KEYS.start, b"ours")
        assert "the catalog of another log" in str(store.copy_statistics())
        assert not store.copy_is_current(KEYS.start)
    found = bucket.find(KEYS.owner)
    assert found is not None
    assert found.data == b"damaged"


# What may be deleted


def test_copy_is_not_current_while_another_process_has_not_copied() -> None:
    """Loses otherwise: a collection of garbage deletes what readers of the bucket are still led to."""
    with Published() as store:
        store.claim()
        store.put(KEYS.descriptor(0), b"first")
        store.truth.delete(KEYS.descriptor(0))  # by a process that died before it could copy
        store.bucket.fail("delete", times=None)
        assert not store.copy_is_current(KEYS.metadata_prefix)
        store.bucket.heal()
        assert store.copy_is_current(KEYS.metadata_prefix)
        assert f"segments/{0:020}" not in copies_in(store.bucket)
        store.truth.put(KEYS.start, b"moved")
        assert store.copy_is_current(KEYS.start)
        assert copies_in(store.bucket)["start"] == b"moved"


def test_copy_that_cannot_be_keeps_nothing() -> None:
    """A server without conditional writes has no copy that could name anything."""

    class Careless(FaultyStore):
        def put_if_match(self, key: str, data: bytes, etag: str) -> str:
            return self.put(key, data)

    with Published(bucket=Careless()) as store:
        store.claim()
        assert store.copy_is_current(KEYS.metadata_prefix)


def test_claim_of_a_partition_heals_the_number_of_partitions() -> None:
    """Loses otherwise: a reader of the bucket misses the partitions that were added right before a crash."""
    whole, last = TopicKeys("shop", "orders"), TopicKeys("shop", "orders-part-2")
    with Published() as store:
        store.put(whole.partitions, b'{"count":2}')
        store.truth.put(whole.partitions, b'{"count":3}')  # the process died here
        store.truth.put(whole.settings, b"{}")
        with store.again() as next_process:
            next_process.put(last.owner, OWNER)
        found = copies_in(store.bucket)
        assert (json.loads(found["partitions"])["count"], found["settings"]) == (3, b"{}")


def test_rebuilt_truth_is_copied_whole() -> None:
    """Loses otherwise: versions of a new metadata store are compared with a mark of the one that was lost."""
    with Published() as before:
        before.claim()
        before.put(KEYS.descriptor(0), b"before")
        for _ in range(5):
            before.put(KEYS.start, b"start")
        with before.again() as again:
            again.claim()  # the mark is the newest version
        bucket = before.bucket
    with Published(bucket=bucket) as rebuilt:
        rebuilt.put(KEYS.descriptor(0), b"rebuilt")
        for _ in range(10):
            rebuilt.put(KEYS.start, b"start")
        rebuilt.commit([Check(KEYS.owner, None)], [Put(KEYS.owner, OWNER)])
        assert copies_in(bucket)[f"segments/{0:020}"] == b"rebuilt"
