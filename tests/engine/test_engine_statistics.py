"""What an engine tells about itself: every number that somebody has to watch is there, and moves when it must."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from tests.engine.engines import open_local
from tests.engine.stations import DIRECTORY, EngineNode, new_store

from tidelog.clock import Stopwatch
from tidelog.engine.engine import EngineStatistics
from tidelog.engine.entry import CreateBucket, PutObject
from tidelog.engine.settings import EngineSettings
from tidelog.testing import FaultyFiles

# What has to be watched, and where it is.
METRICS = {
    "orchestrator_lwm": "low_water_mark",
    "s3_hwm": "high_water_mark",
    "current_seq": "applied_seq",
    "s3_shipping_lag_bytes": "shipping.lag_bytes",
    "s3_shipping_lag_seconds": "shipping.lag_seconds",
    "s3_shipped_segments_total": "shipping.shipper.objects_created",
    "s3_shipping_errors_total": "shipping.errors_total",
    "buffer_pool_hit_rate": "buffer_pool.hit_rate",
    "buffer_pool_size_bytes": "buffer_pool.size_bytes",
    "buffer_pool_evictions_total": "buffer_pool.evictions",
    "hot_tier_size_bytes": "hot_tier_bytes",
    "wal_write_duration_seconds": "wal.write_seconds",
    "wal_segments_total": "wal.files",
    "wal_size_bytes": "wal.file_bytes",
    "recovery_duration_seconds": "recovery.seconds",
    "checkpoint_creation_duration_seconds": "checkpoint_seconds",
    "lwm_lag_seconds": "low_water_lag_seconds",
    "apply_duration_seconds": "apply_seconds",
    "hot_read_duration_seconds": "hot_read_seconds",
    "cold_read_duration_seconds": "cold.read_seconds",
    "fsync_duration_seconds": "wal.sync_seconds",
    "cold_bytes_fetched": "cold.bytes_fetched",
    "cold_bytes_used": "cold.bytes_used",
}


def value_of(statistics: EngineStatistics, path: str) -> object:
    found: object = statistics
    for name in path.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("path", METRICS.values(), ids=METRICS)
def test_every_number_to_watch_is_there(path: str) -> None:
    """And is a number, or a histogram of them."""
    with EngineNode(new_store()) as node:
        node.open().apply(20)
        found = value_of(node.engine.statistics(), path)
        assert isinstance(found, int | float) or hasattr(found, "total_seconds")


def test_they_move() -> None:
    """Applying, shipping, checkpoints and failures are counted."""
    store = new_store()
    with EngineNode(store) as node:
        node.open().apply(200)
        before = node.engine.statistics()
        assert before.shipping is not None
        assert before.shipping.lag_bytes > 0
        assert before.wal.write_seconds.count > 0
        assert (before.checkpoints, before.truncation_mark) == (0, 0)
        mark = node.ship_all()
        node.engine.create_checkpoint()
        after = node.engine.statistics()
        assert after.shipping is not None
        assert after.shipping.shipper is not None
        assert after.shipping.shipper.objects_created > 0
        assert after.shipping.lag_bytes < before.shipping.lag_bytes
        assert (after.high_water_mark, after.truncation_mark, after.applied_seq) == (mark, mark, mark)
        assert (after.checkpoints, after.shipping.checkpoints) == (1, 1)
        assert after.redo_lsn > before.redo_lsn
        assert after.index_bytes >= 2 * 8192


def test_large_values_that_are_not_shipped_are_part_of_the_lag() -> None:
    """Each has a file of its own beside the log; what the loss of the disk would cost has it, until it is shipped."""
    with EngineNode(new_store(), large_value_bytes=1024) as node:
        node.open()
        node.engine.apply(1, CreateBucket("b"))
        node.engine.apply(2, PutObject("b", "large", b"x" * 100_000))
        before = node.engine.statistics().shipping
        assert before is not None
        assert before.lag_bytes > 100_000
        node.ship_all()
        after = node.engine.statistics().shipping
        assert after is not None
        assert after.lag_bytes < 10_000


def test_without_a_store_there_is_nothing_to_ship(tmp_path_factory: pytest.TempPathFactory) -> None:
    """That part is None, and the marks of the store are 0."""
    with open_local(tmp_path_factory.mktemp("engine")) as engine:
        found = engine.statistics()
        assert (found.shipping, found.high_water_mark, found.truncation_mark) == (None, 0, 0)


def test_quantiles_of_a_histogram_are_upper_bounds() -> None:
    """Within a factor of two, and never more than the longest of all."""
    watch = Stopwatch()
    assert watch.snapshot().quantile(0.99) == 0
    for microseconds in range(1, 1001):
        watch.add(microseconds / 1_000_000)
    found = watch.snapshot()
    for part, exact in ((0.5, 500e-6), (0.99, 990e-6), (0.999, 999e-6), (1.0, 1000e-6)):
        assert exact <= found.quantile(part) <= 2.05 * exact
    assert found.quantile(1.0) == found.max_seconds == 1000e-6


def test_reads_and_applies_are_timed() -> None:
    """Hot reads in a sample, cold reads and applies each; bytes that were asked for are told from bytes fetched."""
    with EngineNode(new_store(), inline_value_bytes=0, local_retention_bytes=0, cold_cache_bytes=0) as node:
        engine = node.open().engine
        node.apply_these([(1, CreateBucket("b"))])
        for seq in range(2, 60):
            node.apply_these([(seq, PutObject("b", f"k{seq:02}", b"v" * 1000))])
        node.ship_all()
        engine.create_checkpoint()
        engine.ship()
        hot = next(f"k{seq:02}" for seq in range(59, 1, -1) if engine.stat("b", f"k{seq:02}").tier == "hot")
        for _ in range(640):
            engine.read("b", hot)
        before = engine.statistics()
        assert before.apply_seconds.count == 59
        assert 5 <= before.hot_read_seconds.count <= 10
        for seq in (2, 9, 5):
            assert engine.read("b", f"k{seq:02}").tier == "cold"
        list(engine.scan("b", limit=10, with_values=True))
        after = engine.statistics()
        assert before.cold is not None
        assert after.cold is not None
        assert after.cold.read_seconds.count == before.cold.read_seconds.count + 3
        used = after.cold.bytes_used - before.cold.bytes_used
        assert used == 13 * 1004
        assert after.cold.bytes_fetched - before.cold.bytes_fetched >= used


def test_hot_reads_of_every_kind_are_timed() -> None:
    """Those of tasks, of parts of objects and of opened ones were in no histogram; each is one of the sample now."""
    with EngineNode(new_store(), large_value_bytes=64 << 10, inline_value_bytes=0) as node:
        engine = node.open().engine
        node.apply_these([(1, CreateBucket("b")), (2, PutObject("b", "small", b"s" * 1000))])
        node.apply_these([(3, PutObject("b", "large", b"l" * (1 << 20)))])

        def count_after(read: Callable[[], object]) -> int:
            before = engine.statistics().hot_read_seconds.count
            for _ in range(128):
                read()
            return engine.statistics().hot_read_seconds.count - before

        with asyncio.Runner() as runner:
            assert count_after(lambda: runner.run(engine.read_async("b", "small"))) == 2
            assert count_after(lambda: runner.run(engine.read_async("b", "large", offset=7, length=9))) == 2
        assert count_after(lambda: engine.read("b", "small", offset=7)) == 2
        with engine.open_object("b", "large") as opened:
            assert count_after(lambda: opened.raw.read(10)) == 2


def test_lag_of_the_low_water_mark_is_apart_from_that_of_the_store() -> None:
    """What the orchestrator has not confirmed waits for it; what it has confirmed waits for the store."""
    with EngineNode(new_store()) as node:
        engine = node.open().engine
        assert engine.statistics().low_water_lag_seconds == 0
        node.apply_these([(1, CreateBucket("b"))])
        node.clock.advance(5)
        node.apply_these([(2, PutObject("b", "k", b"v"))])
        node.clock.advance(2)
        found = engine.statistics()
        assert found.shipping is not None
        assert (found.low_water_lag_seconds, found.shipping.lag_seconds) == (7, 0)
        engine.update_low_water_mark(1)
        found = engine.statistics()
        assert found.shipping is not None
        assert (found.low_water_lag_seconds, found.shipping.lag_seconds) == (2, 7)
        node.ship_all()
        found = engine.statistics()
        assert found.shipping is not None
        assert (found.low_water_lag_seconds, found.shipping.lag_seconds) == (0, 0)


def test_half_of_the_log_is_in_use_after_overwrites() -> None:
    """With `keep_versions=1`, however often objects are overwritten, once collections have settled: as it says itself,
    and measured on the disk.
    """
    settings = EngineSettings(keep_versions=1, inline_value_bytes=0, rotate_max_bytes=128 << 10)
    choose, keys, seq = random.Random(1), 300, 1
    with open_local(DIRECTORY, FaultyFiles(), settings) as engine:
        engine.apply(1, CreateBucket("b"))
        for _ in range(10):
            numbers = [min(choose.randrange(keys), choose.randrange(keys)) for _ in range(300)]
            puts = [PutObject("b", f"k{number:03}", choose.randbytes(6000)) for number in numbers]
            engine.apply_many(list(enumerate(puts, seq + 1)))
            seq += len(puts)
            engine.update_low_water_mark(seq)
            engine.collect_garbage()
        digest = engine.digest()
        for _ in range(4):
            engine.collect_garbage()
        garbage = engine.statistics().garbage
        assert garbage is not None
        assert garbage.live_bytes / (garbage.live_bytes + garbage.dead_bytes) > 0.5, garbage
        live_bytes = sum(one.size for one in engine.list_objects("b"))
        assert live_bytes <= engine.statistics().hot_tier_bytes < 2 * live_bytes
        assert engine.digest() == digest
