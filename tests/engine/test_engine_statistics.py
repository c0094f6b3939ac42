"""What an engine tells about itself: every number that somebody has to watch is there, and moves when it must."""

from __future__ import annotations

import pytest
from tests.engine.engines import open_local
from tests.engine.stations import EngineNode, new_store

from tidelog.engine.engine import EngineStatistics

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


def test_without_a_store_there_is_nothing_to_ship(tmp_path_factory: pytest.TempPathFactory) -> None:
    """That part is None, and the marks of the store are 0."""
    with open_local(tmp_path_factory.mktemp("engine")) as engine:
        found = engine.statistics()
        assert (found.shipping, found.high_water_mark, found.truncation_mark) == (None, 0, 0)
