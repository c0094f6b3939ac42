"""Engines that are read from their store alone: every answer is the owner's at the same seq, and nothing is changed."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any, cast, get_args

import pytest
from tests.campaign import examples, first_seed
from tests.engine.compacting import checkpoint_by_hand, compact_by_hand
from tests.engine.engines import assert_state
from tests.engine.stations import KEYS, EngineNode, StoreView, new_store, successor
from tests.log.workbench import LIMIT_SECONDS

import tidelog
from tidelog.cold.catalog import Catalog
from tidelog.engine import follower as following
from tidelog.engine import reader as reading
from tidelog.engine.engine import Engine
from tidelog.engine.entry import CopyObject, DeleteObject, Entry, PutObject
from tidelog.engine.reader import EngineReader
from tidelog.engine.restoring import RestoringEngine
from tidelog.engine.settings import EngineSettings
from tidelog.engine.wal.value import object_crc
from tidelog.errors import (
    ClosedError,
    ConfigError,
    ConflictError,
    GapError,
    InputError,
    NotFoundError,
    NotSupportedError,
    OffsetOutOfRangeError,
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


class Walk:
    """An owner that does whatever owners do, in any order, and readers beside it."""

    def __init__(self, seed: int) -> None:
        self._choose = random.Random(seed)
        self._settings: dict[str, Any] = {
            "keep_versions": self._choose.choice((None, 1, 2)),
            "local_retention_bytes": 0,
            "large_value_bytes": self._choose.choice((1024, 8 << 20)),
            "disk_cache_bytes": self._choose.choice((0, 64 << 10)),
        }
        self.store = new_store()
        self.node = EngineNode(self.store, **self._settings).open()
        self.node.apply(30)
        self.node.ship_all()
        self.reader = opened(self.store)
        self._names = 0

    def step(self) -> None:
        """Something happens to the owner."""
        steps: list[tuple[int, Callable[[], object]]] = [
            (6, lambda: self.node.apply(self._choose.randrange(1, 40))),
            (5, self.node.ship_all),
            (3, self._apply_conditions),
            (2, self._apply_streams),
            (1, self._prefetch),
            (2, self._roll_back),
            (2, self._checkpoint),
            (2, lambda: self._by_another_process(checkpoint_by_hand)),
            (2, lambda: self._by_another_process(compact_by_hand)),
            (2, self.node.engine.collect_garbage),
            (1, self._reopen),
            (1, self._fail_over),
        ]
        self._choose.choices([step for _, step in steps], [weight for weight, _ in steps])[0]()

    def _apply_conditions(self) -> None:
        """Some hold, and others do not: then the entry is refused, and its seq is used."""
        choose, node = self._choose, self.node
        state = node.model.at(node.engine.applied_seq)
        for name in list(state)[:2]:
            objects = state[name].objects
            for key in ["key/1", "key/5", *list(objects)[:1]]:
                found = objects.get(key)
                conditions: list[dict[str, Any]] = [{"if_absent": True}, {"if_match": choose.randrange(1, 50)}]
                if found is not None:
                    conditions += [{"if_match": found.seq}, {"if_match_crc": object_crc(found.data, found.metadata)}]
                entries: list[Entry] = [
                    PutObject(name, key, choose.randbytes(300), **choose.choice(conditions)),
                    DeleteObject(name, key, **choose.choice(conditions[1:])),
                    CopyObject(name, key, name, "key/7", **choose.choice(conditions)),
                ]
                seq = node.engine.applied_seq + 1
                entry = choose.choice(entries)
                assert node.engine.apply(seq, entry).applied == node.model.apply(seq, entry)

    def _apply_streams(self) -> None:
        """Data in pieces, which is large or is not; a stream that breaks leaves nothing."""
        node, data = self.node, self._choose.randbytes(self._choose.choice((10, 1024, 5000)))
        for name in list(node.model.at(node.engine.applied_seq))[:1]:
            seq = node.engine.applied_seq + 1
            node.engine.apply(seq, PutObject(name, "key/stream", iter([data[:700], data[700:]]), {"n": 1}))
            node.model.apply(seq, PutObject(name, "key/stream", data, {"n": 1}))
            with pytest.raises(OSError, match="the peer is gone"):
                node.engine.apply(seq + 1, PutObject(name, "key/stream", _broken(data)))
            assert node.engine.applied_seq == seq

    def _prefetch(self) -> None:
        for name in self.node.engine.list_buckets():
            self.node.engine.prefetch(name, "key/")

    def _roll_back(self) -> None:
        engine = self.node.engine
        self.node.roll_back(self._choose.randint(engine.low_water_mark, engine.applied_seq))

    def _checkpoint(self) -> None:
        self.node.clock.advance(1)
        self.node.engine.create_checkpoint()

    def _by_another_process(self, work: Callable[..., object]) -> None:
        # The same snapshot is listed already; or the owner has dropped the log of versions that it has removed.
        with contextlib.suppress(ConflictError, OffsetOutOfRangeError):
            work(self.store, clock=self.node.clock)

    def _reopen(self) -> None:
        """The owner is killed, and opened again."""
        self.node.crash()
        self.node.open()

    def _fail_over(self) -> None:
        """Its disk is lost, and another node restores what was shipped, which is read meanwhile."""
        self.node.crash()
        self._names += 1
        self.node = node = successor(self.node, f"node-{self._names}", **self._settings)

        def restore(on_progress: object) -> Engine:
            node.restore()
            return node.open().engine

        with opened(self.store) as reader:  # the engine goes on without it
            restoring = RestoringEngine(lambda: reader, restore)
            seq = StoreView(self.store).manifest.high_water_mark
            assert_state(cast(Engine, restoring), node.model, seq)
            assert restoring.wait(LIMIT_SECONDS) is node.engine
            assert_state(cast(Engine, restoring), node.model, seq)

    def compare(self) -> None:
        """The owner has what the model has. Readers that were open before, and those that are opened now, have what the
        owner had at their seq.
        """
        engine, model = self.node.engine, self.node.model
        for seq in {engine.applied_seq, self._choose.randint(self.node.core.history.start_seq, engine.applied_seq)}:
            assert_state(engine, model, seq)
        self._compare(self.reader)
        if self._choose.random() < 0.5:
            self.reader.refresh()
            assert self.reader.applied_seq == StoreView(self.store).manifest.high_water_mark
            self._compare(self.reader)
        if self._choose.random() < 0.2:
            with opened(self.store) as fresh:
                assert fresh.applied_seq == StoreView(self.store).manifest.high_water_mark
                self._compare(fresh)

    def _compare(self, reader: EngineReader) -> None:
        model, first, last = self.node.model, reader.history_start_seq, reader.applied_seq
        for seq in {last, self._choose.randint(first, last)}:
            if seq >= self.node.core.history.start_seq:  # what the owner has removed since may be gone from the store
                assert_state(reader, model, seq)
                self._compare_scans(reader, seq)
                self._compare_many(reader, seq)
        self._compare_changes(reader)

    def _compare_many(self, reader: EngineReader, seq: int) -> None:
        """Those that are there, and some that are not, in any order."""
        owner = self.node.engine
        keys = [(bucket, one.key) for bucket in owner.list_buckets(seq) for one in owner.list_objects(bucket, "", seq)]
        keys += [(bucket, "nowhere") for bucket, _ in keys[:2]]
        self._choose.shuffle(keys)
        found, expected = (
            [one and (one.data, one.metadata, one.seq) for one in each.read_many(keys, seq)] for each in (reader, owner)
        )
        assert found == expected

    def _compare_changes(self, reader: EngineReader) -> None:
        """From any seq on, as far as the store has the log. The owner may have more of it on its disk."""
        start_seq, last_seq = self._choose.randint(0, reader.applied_seq), reader.applied_seq
        try:
            found = list(reader.changes(start_seq))
        except GapError:
            assert Catalog(StoreView(self.store).metadata, KEYS).start_offset() > 1  # its beginning was dropped
            return
        expected = self.node.engine.changes(start_seq)
        assert found == [change for change in expected if change.seq <= last_seq]
        assert list(reader.changes(start_seq, committed=True)) == found

    def _compare_scans(self, reader: EngineReader, seq: int) -> None:
        owner, choose = self.node.engine, self._choose
        for bucket in reader.list_buckets(seq):
            keys = ["", "key/1", "key/5", "key-", "key/", "zzz", None]
            start, end, reverse = choose.choice(keys), choose.choice(keys), choose.random() < 0.5
            limit, prefix = choose.choice((None, 1, 3)), choose.choice(("", "key/", "key-"))
            for with_values in (False, True):
                found, expected = (
                    [
                        (one.key, one.size, one.seq, one.crc, one.data, one.metadata)
                        for one in each.scan(
                            *(bucket, start, end),
                            prefix=prefix,
                            reverse=reverse,
                            limit=limit,
                            with_values=with_values,
                            seq=seq,
                        )
                    ]
                    for each in (reader, owner)
                )
                assert found == expected
            after = choose.choice((None, "key/", "key/1"))
            for delimiter in ("", "/"):
                listed = [
                    list(each.list_objects(bucket, prefix[:3], seq, start_after=after, delimiter=delimiter))
                    for each in (reader, owner)
                ]
                assert listed[0] == listed[1]

    def close(self) -> None:
        self.reader.close()
        self.node.close()


@pytest.mark.deeper
@pytest.mark.parametrize("number", range(examples(6)))
def test_reader_has_what_the_owner_has_at_the_same_seq(number: int) -> None:
    """Whatever the owner does: it ships, rolls back, snapshots, compacts, removes, is killed, is replaced."""
    walk = Walk(first_seed() + number)
    for _ in range(25):
        walk.step()
        walk.compare()
    walk.close()


def _broken(data: bytes) -> Iterator[bytes]:
    yield data
    raise OSError("the peer is gone")


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
