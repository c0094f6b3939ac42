"""Engines that are read from their store alone: every answer is the owner's at the same seq, and nothing is changed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from threading import Event
from typing import get_args

import pytest
from tests.engine.compacting import build_by_hand, checkpoint_by_hand, publish_by_hand
from tests.engine.engines import assert_state
from tests.engine.stations import KEYS, EngineNode, StoreView, new_store
from tests.log.workbench import LIMIT_SECONDS

import tidelog
from tidelog.engine import follower as following
from tidelog.engine import reader as reading
from tidelog.engine.entry import CreateBucket, DeleteObject, Entry, PutObject
from tidelog.engine.reader import EngineReader
from tidelog.engine.settings import EngineSettings
from tidelog.errors import (
    ClosedError,
    ConfigError,
    GapError,
    InputError,
    NotFoundError,
    NotSupportedError,
    StoreUnavailableError,
)
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.store.object_store import ObjectStore
from tidelog.testing import FaultyStore
from tidelog.testing.faulty_store import ChangingRequest

SETTINGS = EngineSettings(buffer_pool_bytes=1 << 20, cold_cache_bytes=1 << 20)


def opened(objects: ObjectStore, settings: EngineSettings = SETTINGS) -> EngineReader:
    """A reader that looks at the store again when it is told to."""
    metadata = BucketMetadataStore(objects, read_only=True)
    return EngineReader(objects, metadata, KEYS, settings, runs_in_background=False)


def shipped_node(entries: int = 60) -> EngineNode:
    """An engine that has shipped some entries."""
    node = EngineNode(new_store()).open()
    node.apply(entries)
    node.ship_all()
    return node


def test_reader_asks_for_nothing_but_reads() -> None:
    """Neither opening nor any kind of read, nor following, changes anything in the store."""
    node = shipped_node()
    asked: set[str] = set()
    assert isinstance(node.objects, FaultyStore)
    node.objects.on_request = lambda operation, key: asked.add(operation)
    before = node.objects.contents()
    with opened(node.objects) as reader:
        reader.refresh()
        reader.digest()
        for bucket in reader.list_buckets():
            for one in reader.scan(bucket, with_values=True):
                reader.stat(bucket, one.key)
                reader.versions(bucket, one.key)
        list(reader.changes())
    assert asked
    assert not asked.intersection(get_args(ChangingRequest))
    assert node.objects.contents() == before
    node.close()


def test_reader_shows_what_was_shipped_after_a_refresh_and_nothing_else() -> None:
    """What the owner has not shipped, and may roll back, is never shown."""
    node = shipped_node()
    with opened(node.objects) as reader:
        seq, digest = reader.applied_seq, reader.digest()
        node.apply(20)
        assert reader.refresh() == seq
        assert reader.digest() == digest
        node.ship_all()
        assert (reader.applied_seq, reader.digest()) == (seq, digest)
        assert reader.refresh() == node.engine.applied_seq
        assert reader.digest() == node.engine.digest()
        assert reader.digest(seq) == digest
        with pytest.raises(InputError, match="not applied yet"):
            reader.read("b", "k", seq=node.engine.applied_seq + 1)
    node.close()


def test_reader_that_is_ahead_of_a_new_snapshot_keeps_what_came_after_it() -> None:
    """A compaction takes long: what it publishes may be older than what is shown already."""
    node = shipped_node()
    built = build_by_hand(node.objects, clock=node.clock)
    with opened(node.objects) as reader:
        node.apply(40)
        node.ship_all()
        reader.refresh()
        publish_by_hand(node.objects, built, clock=node.clock)
        assert reader.refresh() == node.engine.applied_seq
        for seq in (built.root.seq, reader.applied_seq):
            assert_state(reader, node.model, seq)
    node.close()


def test_reader_passes_over_versions_that_the_owner_has_removed() -> None:
    """Their rows are in the snapshot, and the log behind it says that they are gone."""
    node = EngineNode(new_store(), keep_versions=1).open()
    entries: list[Entry] = [CreateBucket("b"), PutObject("b", "k", b"v" * 300), DeleteObject("b", "k")]
    node.apply_these(list(enumerate(entries, 1)))
    node.ship_all()
    node.engine.create_checkpoint()
    with opened(node.objects) as reader:
        assert node.engine.collect_garbage().removed_versions == 2
        node.apply_these([(4, PutObject("b", "other", b"v"))])
        node.ship_all()
        assert reader.refresh() == 4
        assert reader.find_object("b", "k") is None
        assert_state(reader, node.model, 4)
    node.close()


def test_opening_a_large_engine_fetches_few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshot has hundreds of blocks; opening and one read fetch a handful of small ranges."""
    node = EngineNode(new_store(), inline_value_bytes=0).open()
    node.apply_these([(1, tidelog.CreateBucket("b"))])
    node.engine.apply_many(
        (seq, tidelog.PutObject("b", f"{seq:05}-{'k' * 200}", b"v" * 150)) for seq in range(2, 20_000)
    )
    node.ship_all()
    node.engine.create_checkpoint()
    sizes: list[int] = []
    assert isinstance(node.objects, FaultyStore)
    read_range = node.objects.read_range

    def counted(key: str, start: int, length: int) -> memoryview:
        data = read_range(key, start, length)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(node.objects, "read_range", counted)
    with opened(node.objects) as reader:
        assert reader.applied_seq == 19_999
        found = reader.read("b", f"{12_345:05}-{'k' * 200}")
        assert (found.data, found.seq, found.tier) == (b"v" * 150, 12_345, "cold")
        assert len(sizes) <= 8
        assert sum(sizes) < 300_000
        before = len(sizes)
        listed = list(reader.list_objects("b"))
        assert len(listed) == 19_998
        assert len(sizes) - before < 20  # a scan fetches more and more with each request
        assert [one.key for one in reader.scan("b", reverse=True, limit=3)] == [one.key for one in listed[:-4:-1]]
    node.close()


def test_long_log_after_the_snapshot_is_shown_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening does not wait for it: the snapshot is shown first, then the pieces of the log one after the other."""
    node = shipped_node()
    node.engine.create_checkpoint()
    snapshot_seq = node.engine.applied_seq
    for _ in range(3):
        node.apply(40)
        node.ship_all()
    monkeypatch.setattr(reading, "_OPENING_BYTES", 1)
    monkeypatch.setattr(following, "_STEP_BYTES", 1)
    with opened(node.objects) as reader:
        assert reader.applied_seq == snapshot_seq
        assert_state(reader, node.model, snapshot_seq)
        shown: list[int] = []

        def look() -> None:
            shown.append(reader.applied_seq)
            assert_state(reader, node.model, reader.applied_seq)

        reader._follower.on_news = look
        assert reader.refresh() == node.engine.applied_seq
        assert len(shown) >= 3
        assert shown == sorted(shown)
    node.close()


def test_reader_goes_on_when_its_snapshot_was_replaced() -> None:
    """A scan that has begun continues at its seq in the newest snapshot, and lookups too."""
    node = shipped_node(200)
    checkpoint_by_hand(node.objects, clock=node.clock, rows_a_file=5)
    with opened(node.objects, EngineSettings(buffer_pool_bytes=64 * 8192, cold_cache_bytes=0)) as reader:
        seq, bucket = reader.applied_seq, max(node.model.at(reader.applied_seq), key=len)
        expected = list(node.engine.scan(bucket, seq=seq))
        scan = reader.scan(bucket)
        begun = [next(scan)] if expected else []
        files = reader._follower.versions.newest.files
        for _ in range(3):
            node.apply(20)
            node.clock.advance(1)
            node.ship_all()
            node.engine.create_checkpoint()
        assert files is reader._follower.versions.newest.files  # it has not looked at the manifest
        assert [*begun, *scan] == expected
        assert_state(reader, node.model, seq)
        assert reader._follower.versions.newest.files is not files
    node.close()


def test_lost_file_of_the_newest_snapshot_is_an_error_and_not_an_absent_object() -> None:
    """It names the file; a damaged snapshot is skipped for the one before it when a reader is opened."""
    node = shipped_node()
    checkpoint_by_hand(node.objects, clock=node.clock, rows_a_file=10)
    assert isinstance(node.objects, FaultyStore)
    parts = [key for key in node.objects.contents() if KEYS.parse_state_part(key) is not None]
    with opened(node.objects) as reader:
        node.objects.delete(parts)
        with pytest.raises(GapError, match="not in the store"):
            reader.digest()
    newest = StoreView(node.objects).manifest.checkpoints[-1].key
    node.objects.tamper(newest, b"?" * len(node.objects.contents()[newest]))
    with opened(node.objects) as reader:
        assert_state(reader, node.model, reader.applied_seq)
    node.close()


def test_failed_refresh_changes_nothing() -> None:
    """A store that does not answer is an error of the refresh alone; reads go on with what is known."""
    node = shipped_node()
    node.engine.create_checkpoint()
    with opened(node.objects) as reader:
        seq, digest = reader.applied_seq, reader.digest()
        node.apply(20)
        node.ship_all()
        assert isinstance(node.objects, FaultyStore)

        def fail(operation: str, key: str) -> None:
            if key.startswith(KEYS.objects_prefix):
                raise StoreUnavailableError("no answer")

        node.objects.on_request = fail
        with pytest.raises(StoreUnavailableError):
            reader.refresh()
        assert (reader.applied_seq, reader.digest()) == (seq, digest)
        node.objects.on_request = None
        assert reader.refresh() == node.engine.applied_seq
        assert reader.digest() == node.engine.digest()
    node.close()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


def filled(path: Path, url: str, last_seq: int = 50) -> tidelog.Engine:
    """An engine with shipped objects."""
    engine = tidelog.open_engine(path, store=url)
    engine.apply(1, tidelog.CreateBucket("b"))
    engine.apply_many(
        (seq, tidelog.PutObject("b", f"k{seq}", b"%d" % seq * 200, {"n": seq})) for seq in range(2, last_seq + 1)
    )
    engine.update_low_water_mark(last_seq)
    engine.ship()
    return engine


def test_read_only_engine_follows_its_living_owner(tmp_path: Path, url: str) -> None:
    """Without a directory, beside the owner and beside other readers: what is shipped appears by itself."""
    with (
        filled(tmp_path / "engine", url) as engine,
        tidelog.open_engine(store=url, read_only=True, refresh_seconds=0.02) as reader,
        tidelog.open_engine(tmp_path / "engine", read_only=True) as other,
    ):
        assert reader.applied_seq == other.applied_seq == 50
        assert reader.read("b", "k7").metadata == {"n": 7}
        assert [one.data for one in reader.read_many([("b", "k9")]) if one is not None] == [b"9" * 200]
        feed = reader.changes(50, follow=True, with_values=True)
        assert next(feed).seq == 50
        engine.apply(51, tidelog.DeleteObject("b", "k7"))
        engine.update_low_water_mark(51)
        engine.ship()
        assert next(feed).entry == tidelog.DeleteObject("b", "k7")  # it waits for the refresh
        with pytest.raises(NotFoundError):
            reader.read("b", "k7")
        assert other.read("b", "k7").seq == 7
        assert other.refresh() == 51
        assert other.digest() == reader.digest() == engine.digest()
        assert not [path for path in tmp_path.iterdir() if path.name not in ("engine", "store")]
    with pytest.raises(ClosedError):
        reader.read("b", "k9")


def test_read_only_engine_in_tasks(tmp_path: Path, url: str) -> None:
    """The async twins have the same answers."""

    async def read() -> None:
        async with await tidelog.open_engine_async(store=url, read_only=True) as reader:
            assert (await reader.read_async("b", "k3")).data == b"3" * 200
            assert [one.key async for one in reader.scan_async("b", limit=2)] == ["k10", "k11"]
            assert await reader.refresh_async() == 50
            assert await reader.digest_async() == digest
            assert [one.seq async for one in reader.changes_async(48)] == [48, 49, 50]

    with filled(tmp_path / "engine", url) as engine:
        digest = engine.digest()
        asyncio.run(asyncio.wait_for(read(), LIMIT_SECONDS))


def test_read_only_engine_says_what_it_lacks(tmp_path: Path, url: str) -> None:
    """Without a store, without an engine in it, and with what only an owner may be given."""
    with pytest.raises(ConfigError, match="no store was named"):
        tidelog.open_engine(read_only=True)
    with pytest.raises(NotFoundError, match=r"no such directory|there is no engine"):
        tidelog.open_engine(store=url, read_only=True)
    with pytest.raises(InputError, match="take_over"):
        tidelog.open_engine(store=url, read_only=True, take_over=True)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "name",
    [
        "apply",
        "apply_async",
        "apply_many",
        "update_low_water_mark",
        "rollback_to",
        "ship",
        "create_checkpoint",
        "collect_garbage",
        "transaction",
        "prefetch",
        "take_over",
    ],
)
def test_reader_asked_for_what_only_an_engine_does_says_where_that_is(name: str) -> None:
    """It names the fix, and `hasattr` says that there is no such method."""
    store = new_store()
    with EngineNode(store).open() as node:
        node.apply(3)
        node.ship_all()
        with opened(store) as reader:
            assert not hasattr(reader, name)
            assert name not in dir(reader)
            with pytest.raises(NotSupportedError, match=f"{name} is not possible") as refused:
                getattr(reader, name)
            assert "Open it by its directory" in str(refused.value.hint)
            with pytest.raises(AttributeError, match="no attribute 'aply'") as unknown:
                getattr(reader, "aply")  # noqa: B009 - a type checker knows it without
            assert not isinstance(unknown.value, NotSupportedError)


def test_reading_creates_no_store(tmp_path: Path) -> None:
    """Loss prevented: a mistyped path became an empty store, and the error named the engine instead."""
    missing = tmp_path / "typo"
    for work in (
        lambda: tidelog.open_engine(store=f"file://{missing}", read_only=True),
        lambda: tidelog.restore_engine(tmp_path / "new", store=f"file://{missing}"),
        lambda: tidelog.open(tmp_path / "data", store=f"file://{missing}", metadata="bucket", read_only=True),
    ):
        with pytest.raises(NotFoundError, match="there is no such directory"):
            work()
        assert list(tmp_path.iterdir()) == []


def test_feed_of_a_reader_is_that_of_the_owner() -> None:
    """From any seq, with refused entries, and with values."""
    node = shipped_node()
    node.apply_refused()
    node.apply(30)
    node.ship_all()
    with opened(node.objects) as reader:
        for start_seq in (1, 5, reader.applied_seq):
            found, expected = (list(each.changes(start_seq, with_values=True)) for each in (reader, node.engine))
            assert found == expected
    node.close()


def test_closing_a_reader_ends_those_who_wait(tmp_path: Path, url: str) -> None:
    """A feed that waits for more gets ClosedError."""
    from concurrent.futures import ThreadPoolExecutor

    with filled(tmp_path / "engine", url), ThreadPoolExecutor(1) as pool:
        reader = tidelog.open_engine(store=url, read_only=True)
        feed, begun = reader.changes(50, follow=True), Event()

        def wait() -> object:
            next(feed)
            begun.set()
            return next(feed)

        waiting = pool.submit(wait)
        assert begun.wait(LIMIT_SECONDS)
        reader.close()
        reader.close()
        with pytest.raises(ClosedError):
            waiting.result(LIMIT_SECONDS)
