"""A store that hangs holds up those who need it, and nobody else: hot reads, listings, applies and opening go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Condition, Event, Semaphore
from typing import Any

import pytest
from tests.engine.stations import KEYS, EngineNode, new_store
from tests.log.workbench import LIMIT_SECONDS

import tidelog
from tidelog import engine_wiring
from tidelog.cold.catalog import Catalog, Descriptor
from tidelog.cold.fetch import ColdReadCounters, Fetcher, FetchSettings, Neighbours, Window
from tidelog.engine.cold.log_objects import CheckedHeaders, ColdObjects
from tidelog.engine.entry import CreateBucket, PutObject
from tidelog.errors import ClosedError
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.store.scheduler import DaemonPool
from tidelog.testing import FaultyStore

COLD_THREADS = 4
COLD_KEYS = [f"cold-{number:03}" for number in range(60)]


class Hanging:
    """Holds every request of a store until it may go on; counts those that are held."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._held = 0
        self._hangs = True

    def __call__(self, operation: str, key: str) -> None:
        with self._changed:
            self._held += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: not self._hangs, 2 * LIMIT_SECONDS)
            self._held -= 1

    def wait_for(self, count: int) -> None:
        """So many requests are held."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._held >= count, LIMIT_SECONDS)

    def end(self) -> None:
        with self._changed:
            self._hangs = False
            self._changed.notify_all()


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    one = Hanging()
    yield one
    one.end()


@pytest.fixture
def node() -> Iterator[EngineNode]:
    """An engine with values in the store alone, and others on its disk."""
    settings: dict[str, Any] = {"local_retention_bytes": 0, "inline_value_bytes": 0, "cold_cache_bytes": 0}
    with EngineNode(new_store(), cold_read_threads=COLD_THREADS, **settings).open() as one:
        puts = [(seq, PutObject("b", key, b"c" * 500)) for seq, key in enumerate(COLD_KEYS, 2)]
        one.apply_these([(1, CreateBucket("b")), *puts])
        one.ship_all()
        one.engine.create_checkpoint()
        one.engine.ship()
        last = one.engine.applied_seq
        one.apply_these([(last + 1, PutObject("b", "hot", b"h" * 500))])
        assert one.engine.stat("b", COLD_KEYS[0]).tier == "cold"
        assert one.engine.stat("b", "hot").tier == "hot"
        for key in COLD_KEYS:
            one.engine.read("b", key)  # where the objects are is known from here on
        yield one


async def all_of(items: AsyncIterator[Any]) -> list[Any]:
    return [one async for one in items]


def cold_keys(node: EngineNode) -> list[str]:
    """The keys of the values that have left the disk."""
    found = [key for key in COLD_KEYS if node.engine.stat("b", key).tier == "cold"]
    assert len(found) > 2 * COLD_THREADS
    return found


def test_tasks_that_read_cold_values_hold_up_no_other_task(node: EngineNode, hanging: Hanging) -> None:
    """Many more of them than there are threads hang; hot reads, listings, applies and digests are done meanwhile."""
    engine, keys = node.engine, cold_keys(node)
    assert isinstance(node.objects, FaultyStore)
    hot_seq = engine.stat("b", "hot").seq
    applied = list(engine.changes(with_values=True))
    node.objects.on_request = hanging

    async def play() -> None:
        cold = [asyncio.create_task(engine.read_async("b", key)) for key in keys]
        parts = [asyncio.create_task(engine.read_async("b", key, offset=1)) for key in keys]
        opened_ones = [asyncio.create_task(engine.open_object_async("b", key)) for key in keys]
        scanned = asyncio.create_task(all_of(engine.scan_async("b", with_values=True)))
        changed = asyncio.create_task(all_of(engine.changes_async(with_values=True)))
        many = asyncio.create_task(engine.read_many_async([("b", key) for key in keys]))
        await asyncio.to_thread(hanging.wait_for, COLD_THREADS)
        for seq in range(100, 140):
            assert (await engine.read_async("b", "hot")).tier == "hot"
            assert (await engine.read_async("b", "hot", offset=497, length=9)).data == b"h" * 3
            async with await engine.open_object_async("b", "hot") as opened:
                assert (opened.tier, await opened.read()) == ("hot", b"h" * 500)
            assert [one.data async for one in engine.scan_async("b", prefix="hot", with_values=True)] == [b"h" * 500]
            assert (await all_of(engine.changes_async(hot_seq, with_values=True)))[0].seq == hot_seq
            assert (await engine.stat_async("b", "hot")).size == 500
            assert (await engine.stat_async("b", keys[3])).tier == "cold"  # the index knows all of it
            found = await engine.read_many_async([("b", "hot"), ("b", "none")])
            assert [None if one is None else one.tier for one in found] == ["hot", None]
            await engine.apply_async(seq, PutObject("b", f"new-{seq}", b"n" * 300))
            listed = [one.key async for one in engine.list_objects_async("b")]
            assert len(listed) == len(COLD_KEYS) + 1 + seq - 99
            assert [one.key async for one in engine.scan_async("b")] == listed
        digest = await engine.digest_async()
        assert not any(task.done() for task in [*cold, *parts, *opened_ones, scanned, changed])
        hanging.end()
        assert [(await task).data for task in parts] == [b"c" * 499] * len(keys)
        for task in opened_ones:
            async with await task as opened:
                assert await opened.read() == b"c" * 500
        assert [one.data for one in await scanned if one.key.startswith("cold")] == [b"c" * 500] * len(COLD_KEYS)
        assert (await changed)[: len(applied)] == applied
        assert [(await task).data for task in cold] == [b"c" * 500] * len(keys)
        assert [one.data for one in await many if one is not None] == [b"c" * 500] * len(keys)
        assert await engine.digest_async() == digest

    asyncio.run(asyncio.wait_for(play(), LIMIT_SECONDS))


def test_threads_that_read_cold_values_hold_up_no_other_thread(node: EngineNode, hanging: Hanging) -> None:
    """The same for threads of the program, and for scans with values that stand still."""
    engine, keys = node.engine, cold_keys(node)
    assert isinstance(node.objects, FaultyStore)
    node.objects.on_request = hanging
    with ThreadPoolExecutor(8) as pool, ThreadPoolExecutor(1) as others:
        reads = [pool.submit(engine.read, "b", key) for key in keys[:4]]
        scans = [pool.submit(lambda: list(engine.scan("b", with_values=True))) for _ in range(3)]
        hanging.wait_for(5)
        for seq in range(100, 120):
            assert others.submit(engine.read, "b", "hot").result(LIMIT_SECONDS).tier == "hot"
            assert others.submit(engine.apply, seq, PutObject("b", "new", b"n" * 300)).result(LIMIT_SECONDS).applied
            assert others.submit(lambda: list(engine.list_objects("b"))).result(LIMIT_SECONDS)
        assert not any([*(one.done() for one in reads), *(one.done() for one in scans)])
        hanging.end()
        assert all(one.result(LIMIT_SECONDS).tier == "cold" for one in reads)
        assert all(len(one.result(LIMIT_SECONDS)) >= len(COLD_KEYS) for one in scans)


def test_opening_waits_for_a_store_that_hangs_and_claims_later(
    tmp_path: Path, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is usable without the store; once that answers, the engine is claimed and ships by itself."""
    store = FaultyStore()
    monkeypatch.setattr(engine_wiring, "open_store", lambda url, settings: store)
    where: dict[str, Any] = {"store": "s3://bucket/prefix", "ship_interval_seconds": 0.05}
    with tidelog.open_engine(tmp_path / "e", read_only=False, **where) as engine:
        engine.apply(1, tidelog.CreateBucket("b"))
    store.on_request = hanging
    with tidelog.open_engine(tmp_path / "e", open_store_wait_seconds=0, read_only=False, **where) as engine:
        hanging.wait_for(1)
        engine.apply(2, tidelog.PutObject("b", "k", b"v" * 300))
        engine.update_low_water_mark(2)
        assert engine.read("b", "k").data == b"v" * 300
        shipping = engine.statistics().shipping
        assert shipping is not None
        assert not shipping.is_connected
        assert engine.truncation_mark == 0
        hanging.end()
        follower = Event()
        for _ in range(int(LIMIT_SECONDS / 0.05)):
            if engine.truncation_mark == 2:
                break
            follower.wait(0.05)
        assert engine.truncation_mark == 2
        assert engine.ship() == 2


def test_new_engine_is_made_while_its_store_hangs(
    tmp_path: Path, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the store is another engine's is found out when it answers."""
    store = FaultyStore()
    monkeypatch.setattr(engine_wiring, "open_store", lambda url, settings: store)
    store.on_request = hanging
    where: dict[str, Any] = {"store": "s3://bucket/prefix", "open_store_wait_seconds": 0}
    with tidelog.open_engine(tmp_path / "e", read_only=False, **where) as engine:
        engine.apply(1, tidelog.CreateBucket("b"))
        assert engine.list_buckets() == ["b"]
        hanging.end()
        engine.update_low_water_mark(1)
        assert engine.ship() == 1


def test_engine_that_was_closed_before_its_store_answered_claims_nothing(
    tmp_path: Path, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt that still waits ends without a claim that nobody would give back."""
    store = FaultyStore()
    monkeypatch.setattr(engine_wiring, "open_store", lambda url, settings: store)
    where: dict[str, Any] = {"store": "s3://bucket/prefix", "open_store_wait_seconds": 0}
    tidelog.open_engine(tmp_path / "e", store="s3://bucket/prefix").close()
    store.on_request = hanging
    engine = tidelog.open_engine(tmp_path / "e", read_only=False, **where)
    hanging.wait_for(1)
    engine.close()
    hanging.end()
    store.on_request = None
    with tidelog.open_engine(
        tmp_path / "e", store="s3://bucket/prefix", open_store_wait_seconds=LIMIT_SECONDS
    ) as engine:
        engine.apply(1, tidelog.CreateBucket("b"))
        engine.update_low_water_mark(1)
        assert engine.ship() == 1


def test_one_caller_has_a_bounded_number_of_requests_under_way() -> None:
    """Further ones are begun as the first are taken, in order; none is asked for twice."""

    class Source:
        def __init__(self) -> None:
            self.asked: list[int] = []

        def read_range(self, key: str, start: int, length: int) -> memoryview:
            self.asked.append(start)
            return memoryview(bytes([start]) * length)

    source, pool = Source(), DaemonPool(8, "test")
    fetcher = Fetcher(source, pool, ColdReadCounters(), FetchSettings())
    groups = [Neighbours(fetcher, "key", [number], lambda one: (one, one + 1)) for number in range(10)]
    window = Window(groups, 3)
    assert [group._ahead is not None for group in groups] == [True] * 3 + [False] * 7
    for number, group in enumerate(window):
        assert sum(one._ahead is not None for one in groups) == min(10, number + 3)
        assert [(item, bytes(data)) for item, data in group.take()] == [(number, bytes([number]))]
    assert sorted(source.asked) == list(range(10))
    pool.shutdown()


def test_many_cold_reads_at_once_read_the_header_of_an_object_once(
    hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hundred reads of objects that nobody had read before made four hundred requests."""
    settings: dict[str, Any] = {"local_retention_bytes": 0, "inline_value_bytes": 0, "cold_cache_bytes": 0}
    with EngineNode(new_store(), **settings).open() as node, ThreadPoolExecutor(len(COLD_KEYS)) as pool:
        node.apply_these([(1, CreateBucket("b"))])
        node.apply_these([(seq, PutObject("b", key, b"c" * 500)) for seq, key in enumerate(COLD_KEYS, 2)])
        node.ship_all()
        node.engine.create_checkpoint()
        node.engine.ship()
        keys = cold_keys(node)
        assert isinstance(node.objects, FaultyStore)
        node.objects.on_request = lambda operation, key: hanging(operation, key) if operation == "read_range" else None
        coming = Semaphore(0)
        check = CheckedHeaders.check

        def reached(headers: CheckedHeaders, *about: Any) -> bool:
            coming.release()
            return check(headers, *about)

        checked: list[str] = []
        check_header = Descriptor.check_header

        def noted(descriptor: Descriptor, data: memoryview, key: str) -> None:
            checked.append(key)
            check_header(descriptor, data, key)

        monkeypatch.setattr(Descriptor, "check_header", noted)
        monkeypatch.setattr(CheckedHeaders, "check", reached)
        reads = [pool.submit(node.engine.read, "b", key) for key in keys]
        for _ in keys:
            assert coming.acquire(timeout=LIMIT_SECONDS)
        hanging.wait_for(1)
        hanging.end()
        assert all(one.result(LIMIT_SECONDS).data == b"c" * 500 for one in reads)
        assert len(checked) == len(set(checked)) > 0


def test_many_cold_reads_at_once_ask_the_catalog_once_for_each_object(
    hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hundred first reads asked for as many descriptors, of a few objects."""
    with EngineNode(new_store()).open() as node, ThreadPoolExecutor(len(COLD_KEYS)) as pool:
        for _ in range(3):
            node.apply(20)
            node.ship_all()
        assert isinstance(node.objects, FaultyStore)
        metadata = BucketMetadataStore(node.objects, read_only=True)
        shipped = list(Catalog(metadata, KEYS).walk(1))
        keys = [KEYS.descriptor(one.start_offset) for one in shipped]
        assert len(keys) == 3
        lsns = [lsn for one in shipped for lsn in (one.start_offset, one.start_offset + 1, one.end_offset)]
        objects, coming = ColdObjects(Catalog(metadata, KEYS)), Semaphore(0)
        asked: list[str] = []

        def on_request(operation: str, key: str) -> None:
            if key in keys:
                asked.append(key)
                hanging(operation, key)

        node.objects.on_request = on_request
        nearest_start = Catalog.nearest_start

        def reached(catalog: Catalog, offset: int) -> int | None:
            start = nearest_start(catalog, offset)
            coming.release()
            return start

        monkeypatch.setattr(Catalog, "nearest_start", reached)
        finds = [pool.submit(objects.find_kept, lsn) for lsn in lsns]
        for _ in finds:
            assert coming.acquire(timeout=LIMIT_SECONDS)
        try:
            hanging.wait_for(len(shipped))
        finally:
            hanging.end()
        found = [one.result(LIMIT_SECONDS) for one in finds]
        assert [one and one.descriptor for one in found] == [one for one in shipped for _ in range(3)]
        assert sorted(asked) == sorted(keys)


def test_tasks_that_read_cold_values_by_pieces_leave_the_event_loop_free(hanging: Hanging) -> None:
    """Opened objects and values of the change feed blocked it. A file whose read was cancelled is closed at once."""
    data = bytes(range(250)) * 20
    with EngineNode(new_store(), local_retention_bytes=0, large_value_bytes=1024, disk_cache_bytes=0).open() as node:
        node.apply_these([(1, CreateBucket("b")), (2, PutObject("b", "k", data))])
        node.ship_all()
        engine = node.engine
        assert isinstance(node.objects, FaultyStore)
        store = node.objects

        async def play() -> None:
            file = await engine.open_object_async("b", "k")
            assert file.tier == "cold"
            (change,) = await all_of(engine.changes_async(2, with_values=True))
            store.on_request = hanging
            reading = asyncio.create_task(file.read())
            feeding = asyncio.create_task(anext(change.entry.data))
            await asyncio.to_thread(hanging.wait_for, 2)
            assert (await engine.stat_async("b", "k")).size == len(data)
            assert not reading.done()
            assert not feeding.done()
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            await file.close()
            with pytest.raises(ClosedError):
                await file.read()
            hanging.end()
            assert await feeding == data
            assert [piece async for piece in change.entry.data] == []

        asyncio.run(asyncio.wait_for(play(), LIMIT_SECONDS))
