"""Reading values from the store: exact ranges, the cache, reading ahead, damage and replicas."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.stations import KEYS, EngineNode, new_store
from tests.log.workbench import wait_until

from tidelog.cold.fetch import ColdCache, ReadAhead
from tidelog.engine.cold.reader import ColdReader
from tidelog.engine.entry import CreateBucket, PutObject
from tidelog.errors import CorruptionError, GapError, StoreUnavailableError, TidelogError
from tidelog.testing import FaultyStore

COUNT = 300


def data_of(number: int) -> bytes:
    """The value of an object: no two are the same."""
    return b"%06d" % number * 100


@functools.cache
def shipped(codec: str) -> dict[str, bytes]:
    """What is in the store of an engine with so many objects."""
    store = new_store()
    with EngineNode(store, ship_compression=codec, rotate_max_bytes=64 << 10).open() as node:
        puts = [(number, PutObject("bucket", f"key-{number:04}", data_of(number))) for number in range(2, COUNT)]
        node.engine.apply_many([(1, CreateBucket("bucket")), *puts])
        node.ship_all()
    return store.contents()


@pytest.fixture(params=["none", "zstd"])
def cold(request: pytest.FixtureRequest) -> Iterator[EngineNode]:
    """A restored engine: all values are in the store, none is on its disk."""
    store = new_store()
    for key, data in shipped(request.param).items():
        store.put(key, data)
    with EngineNode(store, name="b") as node:
        node.restore()
        yield node.open()


def reads_of(store: FaultyStore) -> list[str]:
    """The keys of objects from which something is read from here on."""
    seen: list[str] = []

    def look(operation: str, key: str) -> None:
        if operation == "read_range" and key.startswith(KEYS.objects_prefix):
            seen.append(key)

    store.on_request = look
    return seen


def store_of(node: EngineNode) -> FaultyStore:
    """The store in memory that a node has."""
    assert isinstance(node.objects, FaultyStore)
    return node.objects


def read(node: EngineNode, number: int) -> bytes:
    """One value; it comes from the store."""
    found = node.engine.read("bucket", f"key-{number:04}")
    assert found.tier == "cold"
    return found.data


def test_a_lone_read_is_one_request(cold: EngineNode) -> None:
    """One range is fetched, once, and before the first of an object its header; again it comes from the cache, and then
    from this disk.
    """
    seen = reads_of(store_of(cold))
    for _ in range(2):
        assert read(cold, 100) == data_of(100)
    assert cold.engine.read("bucket", "key-0100").tier == "hot"
    assert len(seen) == 2
    statistics = cold.shipping.reader.statistics()
    assert (statistics.requests, statistics.cache.hits) == (2, 1)
    if cold.view.descriptors()[0].codec == "none":
        assert statistics.bytes_fetched == len(data_of(100)) + 4


def test_every_value_is_found(cold: EngineNode) -> None:
    """In any order, from every object."""
    for number in (*range(2, COUNT, 7), *range(COUNT - 1, 1, -11)):
        assert read(cold, number) == data_of(number)


def test_reading_in_order_takes_few_requests(cold: EngineNode) -> None:
    """Who goes on where he was gets larger and larger pieces, before he asks for them."""
    seen = reads_of(store_of(cold))
    for number in range(2, COUNT):
        assert read(cold, number) == data_of(number)
    assert len(seen) < COUNT // 5


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_fetches_neighbours_together(cold: EngineNode, reverse: bool) -> None:
    """In both directions, hot values between the cold ones; a scan of a few fetches a few."""
    mark = cold.engine.applied_seq
    cold.engine.apply(mark + 1, PutObject("bucket", "key-0100", b"hot" * 100))
    wanted = {f"key-{number:04}": data_of(number) for number in range(2, COUNT)} | {"key-0100": b"hot" * 100}
    seen = reads_of(store_of(cold))
    few = [one.data for one in cold.engine.scan("bucket", "key-0200", limit=3, with_values=True)]
    assert few == [data_of(number) for number in (200, 201, 202)]
    assert len(seen) <= 3
    before = cold.shipping.reader.statistics().bytes_fetched
    assert before < (1 << 20) + 4 * len(data_of(0))
    found = [(one.key, one.data) for one in cold.engine.scan("bucket", reverse=reverse, with_values=True)]
    assert found == sorted(wanted.items(), reverse=reverse)
    assert len(seen) < COUNT // 5


def test_a_scan_that_goes_on_asks_for_places_before_it_needs_them(
    cold: EngineNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the next values are is looked up by other threads, many objects at a time: a store far away would hold up
    every batch otherwise.
    """
    monkeypatch.setattr("tidelog.engine.scan._FIRST_ROWS", 16)  # three batches, of which the last is fetched ahead
    descriptors: list[str] = []

    def look(operation: str, key: str) -> None:
        if key.startswith(KEYS.segments_prefix) and operation in ("find", "get"):
            descriptors.append(threading.current_thread().name)

    store_of(cold).on_request = look
    objects = [one for one in cold.view.descriptors() if one.codec == "none"]  # the others are read one by one
    scan = cold.engine.scan("bucket", with_values=True)
    assert [next(scan).data for _ in range(65)] == [data_of(number) for number in range(2, 67)]
    if objects:
        known = cold.shipping.reader._objects.known_plain
        wait_until(lambda: len(known()) == len(objects), "all objects are known")
        assert set(descriptors) > {threading.current_thread().name}
    assert [one.data for one in scan] == [data_of(number) for number in range(67, COUNT)]


def test_reads_of_many_fetch_neighbours_together(cold: EngineNode) -> None:
    """In the order that was asked for, with what is not there."""
    seen = reads_of(store_of(cold))
    found = cold.engine.read_many([("bucket", f"key-{number:04}") for number in range(COUNT - 1, 0, -1)])
    assert found[-1] is None
    there = [one for one in found if one is not None]
    assert [(one.data, one.tier) for one in there] == [(data_of(n), "cold") for n in range(COUNT - 1, 1, -1)]
    assert len(seen) < COUNT // 5


def test_a_scan_ahead_of_its_reader_is_ended_with_it(cold: EngineNode) -> None:
    """What was begun and is not wanted any more is no error, also not in an engine that is closed meanwhile."""
    scan = cold.engine.scan("bucket", with_values=True)
    for _ in range(20):
        next(scan)
    del scan
    scan = cold.engine.scan("bucket", with_values=True)
    next(scan)
    cold.close()
    with pytest.raises(TidelogError):
        list(scan)


def test_a_scan_says_what_cannot_be_read(cold: EngineNode) -> None:
    """A damaged object is named, where the scan comes to it; the values before it are there."""
    store = store_of(cold)
    last = sorted(key for key in store.contents() if key.startswith(KEYS.objects_prefix))[-1]
    store.put(last, bytes(len(store.contents()[last])))
    found: list[bytes | None] = []
    with pytest.raises(TidelogError) as told:
        found += (one.data for one in cold.engine.scan("bucket", with_values=True))
    assert last in str(told.value.path)


def test_several_who_want_the_same_cause_one_request(cold: EngineNode) -> None:
    """They wait for the first of them."""
    store, others_wait = store_of(cold), threading.Event()
    requests: list[str] = []

    def hold(operation: str, key: str) -> None:
        if operation == "read_range" and key.startswith(KEYS.objects_prefix):
            requests.append(key)
            others_wait.wait(120)

    store.on_request = hold
    results: list[bytes] = []
    threads = [threading.Thread(target=lambda: results.append(read(cold, 50))) for _ in range(4)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 120
    while cold.shipping.reader.statistics().shared < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    others_wait.set()
    for thread in threads:
        thread.join(120)
    assert results == [data_of(50)] * 4
    assert len(requests) == 2  # the header of the object, and the value


def test_the_cache_is_bounded(cold: EngineNode) -> None:
    """What was not used for the longest time leaves."""
    reader = ColdReader(cold.shipping.reader._objects._catalog, cold.objects, 128 << 10)
    for number in range(2, COUNT):
        found = cold.core.versions.find("bucket", f"key-{number:04}", COUNT)
        assert found is not None
        assert reader.read(found.cell)[0] == data_of(number)
        assert reader.statistics().cache.bytes <= 128 << 10
    reader.close()


class TestDamage:
    """Bad bytes never get out."""

    def test_a_bad_transfer_is_made_good(self, cold: EngineNode) -> None:
        """Bytes that were damaged on the way are fetched once more."""
        store_of(cold).fail("read_range", "flipped", matching="*.tlog")
        assert read(cold, 20) == data_of(20)
        assert cold.shipping.reader.statistics().repeated == 1

    def test_a_damaged_object_is_named(self, cold: EngineNode) -> None:
        """The error says which object and which byte."""
        store = store_of(cold)
        key = cold.view.object_keys()[0]
        descriptor = cold.view.descriptors()[0]
        store.tamper(key, bytes(len(store.contents()[key])))
        with pytest.raises(CorruptionError, match="data-1-") as failed:
            read(cold, 20)
        assert 0 <= failed.value.byte < descriptor.size

    def test_a_missing_object_is_named(self, cold: EngineNode) -> None:
        """It is a hole in the data, not an object that was never there."""
        store_of(cold).delete(cold.view.object_keys())
        with pytest.raises(GapError, match="not there"):
            read(cold, 20)

    def test_a_store_that_is_away_is_told_and_asked_again(self, cold: EngineNode) -> None:
        """The next read succeeds when it is back."""
        read(cold, 3)
        store_of(cold).fail("*", times=None)
        with pytest.raises(StoreUnavailableError):
            read(cold, 250)
        store_of(cold).heal()
        assert read(cold, 250) == data_of(250)

    @pytest.mark.parametrize("trouble", ["damaged", "missing", "away"])
    def test_a_replica_has_a_good_copy(self, cold: EngineNode, trouble: str) -> None:
        """Whatever is wrong with the store's own copy."""
        copied = new_store()
        for key, data in store_of(cold).contents().items():
            copied.put(key, data)
        reader = ColdReader(cold.shipping.reader._objects._catalog, cold.objects, 1 << 20, lambda: [copied])
        found = cold.core.versions.find("bucket", "key-0020", COUNT)
        assert found is not None
        for key in cold.view.object_keys():
            if trouble == "damaged":
                store_of(cold).tamper(key, bytes(len(store_of(cold).contents()[key])))
            elif trouble == "missing":
                store_of(cold).delete(key)
            else:
                store_of(cold).fail("read_range", times=None, matching="*.tlog")
        assert reader.read(found.cell)[0] == data_of(20)
        assert reader.statistics().from_replicas == 1
        reader.close()


PIECES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=60)


@given(PIECES, st.integers(0, 80))
def test_a_cache_never_says_anything_wrong(pieces: list[tuple[int, int]], capacity: int) -> None:
    """Whatever is put in, what comes out is what was at that position, and the bound holds."""
    log = bytes(range(100))
    cache = ColdCache(capacity)
    for position, length in pieces:
        found = cache.get(position, length)
        assert found is None or bytes(found) == log[position : position + length]
        cache.add(position, log[position : position + length])
        assert cache.holds(position, length) or length > capacity // 2
        assert cache.statistics().bytes <= capacity
    for position, length in pieces:
        cache.discard(position, length)
        assert not cache.holds(position, length)


def test_only_reading_in_order_is_noticed() -> None:
    """Reads here and there fetch what they want, and nothing more."""
    ahead = ReadAhead()
    assert [ahead.noticed(position, 10) for position in (0, 1 << 30, 500 << 20, 7 << 30)] == [0, 0, 0, 0]
    windows = [ahead.noticed((1 << 40) + 10 * number, 10) for number in range(10)]
    assert windows[:2] == [0, 0]
    assert windows[2:] == sorted(windows[2:])
    assert 0 < windows[2] < windows[-1] <= 4 << 20
