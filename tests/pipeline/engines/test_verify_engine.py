"""The job `verify` finds what is wrong with an engine, and nothing where nothing is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.engine.compacting import checkpoint_by_hand, compact_by_hand
from tests.pipeline.engines.computing import work_without_spark
from tests.pipeline.engines.eventful import EventfulEngine

from tidelog.engine.raw_log import drop_raw_log
from tidelog.pipeline.engine_jobs.verify import verify_engine
from tidelog.tier.keys import EngineKeys
from tidelog.tier.metadata.bucket import BucketMetadataStore

NO_SPARK: Any = None


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_wrong_whatever_happened(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollbacks, crashes, lost disks, retention, compactions, states by others, and a log that was dropped."""
    work_without_spark(monkeypatch)
    history = EventfulEngine(tmp_path, f"healthy {seed}")
    for step in range(3):
        history.run(4)
        objects = history.node.objects
        if step == seed % 3:
            checkpoint_by_hand(objects)
        compact_by_hand(objects, keep_from=history.high_water_mark // 2 if seed % 2 else 0)
        if seed % 3:
            drop_raw_log(objects, BucketMetadataStore(objects), EngineKeys(), 1 << 62)
        report = verify_engine(NO_SPARK, history.root, own_digest=history.node.engine.digest)
        assert report.problems == ()
        assert report.digest == history.node.engine.digest(history.high_water_mark)
        assert report.is_good
    history.close()
