"""Compaction of an engine over a real S3 server, by itself and on demand, while entries come and values are read."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engine.compacting import compact_by_hand
from tests.engine.test_shipping_s3 import WAIT_SECONDS, entries, place

import tidelog

__all__ = ["place"]


def some_values(engine: tidelog.Engine) -> dict[str, bytes]:
    """Of every so-many-th object: each is a request or two."""
    return {one.key: engine.read("bucket", one.key).data for one in list(engine.list_objects("bucket"))[::7]}


def test_an_engine_compacts_by_itself_while_it_ships_and_is_read(
    tmp_path: Path, place: Callable[[str], dict[str, Any]]
) -> None:
    """Digests, old states and a restore are what they were without it."""
    settings = {
        **place("compacted"),
        "compaction_interval_seconds": 0.3,
        "local_retention_bytes": 0,
        "cold_cache_bytes": 0,
    }
    digests: dict[int, str] = {}
    with tidelog.open_engine(tmp_path / "a", read_only=False, **settings) as engine:
        for first in range(1, 900, 150):
            engine.apply_many(entries(150, first))
            engine.update_low_water_mark(engine.applied_seq)
            engine.ship()
            digests[engine.applied_seq] = engine.digest()
        deadline = time.monotonic() + WAIT_SECONDS
        while not engine.statistics().compaction.replaced_objects and time.monotonic() < deadline:
            time.sleep(0.05)
        assert engine.statistics().compaction.replaced_objects > 0
        engine.create_checkpoint()
        engine.ship()
        engine.compact(grace_seconds=0)
        engine.compact_index()
        contents = some_values(engine)
        assert engine.statistics().compaction.failed_runs == 0
    with tidelog.restore_engine(tmp_path / "b", **settings) as engine:
        assert {seq: engine.digest(seq) for seq in digests} == digests
        assert some_values(engine) == contents


def test_compacted_data_and_a_log_that_was_dropped(tmp_path: Path, place: Callable[[str], dict[str, Any]]) -> None:
    """An engine that runs, and one that is restored, read every value with no more requests than are promised."""
    settings = {**place("packed"), "local_retention_bytes": 0, "cold_cache_bytes": 0, "rotate_max_bytes": "32KiB"}
    with tidelog.open_engine(tmp_path / "a", read_only=False, **settings) as engine:
        for first in range(1, 450, 150):
            engine.apply_many(entries(150, first))
            engine.update_low_water_mark(engine.applied_seq)
            engine.ship()
        digests = {seq: engine.digest(seq) for seq in (100, 250, engine.applied_seq)}
        contents = some_values(engine)
        shipping = engine._garbage()._place._shipping  # type: ignore[attr-defined]
        compact_by_hand(shipping._objects, blob_file_bytes=64 << 10, rows_a_file=500)
        assert engine.collect_garbage().dropped_pieces > 1
        assert some_values(engine) == contents
    with tidelog.restore_engine(tmp_path / "b", **settings) as engine:
        assert {seq: engine.digest(seq) for seq in digests} == digests
        assert some_values(engine) == contents
        found = engine.statistics().cold
        assert found is not None
        assert found.from_compacted > 0
        assert found.requests <= 2 * found.reads + 10, "the root and the footers are read once"
