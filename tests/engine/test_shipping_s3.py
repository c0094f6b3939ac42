"""An engine over a real S3 server: shipped, lost, restored; the server killed and stopped under it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.engine.list_orchestrator import ListOrchestrator
from tests.servers import S3Server

import tidelog
from tidelog.engine.cold.shipping import Shipping, ShippingStatistics
from tidelog.engine.engine import Engine
from tidelog.engine.entry import Entry
from tidelog.engine.recovery.restore import RestoreProgress

WAIT_SECONDS = 60


@pytest.fixture
def place(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """How to open an engine over the server, with little patience."""
    settings = s3_server.settings()
    assert settings.store_secret_access_key is not None
    monkeypatch.setenv("AWS_ENDPOINT_URL", str(settings.store_endpoint))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", str(settings.store_access_key_id))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", settings.store_secret_access_key.reveal())

    def of(prefix: str) -> dict[str, Any]:
        return {
            "store": s3_server.url(f"engine-{prefix}"),
            "store_connect_timeout_ms": 500,
            "store_request_timeout_ms": 2000,
            "store_max_retries": 1,
            "store_retry_timeout_seconds": 3,
            "rotate_max_bytes": 256 << 10,
            "ship_interval_seconds": 0.1,
        }

    return of


def entries(count: int, first: int = 1, seed: int = 0) -> list[tuple[int, Entry]]:
    """A bucket and objects in it, some of them again and again."""
    chance = random.Random(f"{seed}:{first}")
    puts = [
        (seq, tidelog.PutObject("bucket", f"key-{chance.randrange(300)}", chance.randbytes(chance.randrange(3000))))
        for seq in range(max(2, first), first + count)
    ]
    return [(1, tidelog.CreateBucket("bucket")), *puts] if first == 1 else list(puts)


def statistics_of(engine: Engine) -> ShippingStatistics:
    """What the cold half of an engine counts."""
    cold = engine._upkeep.cold
    assert isinstance(cold, Shipping)
    return cold.statistics()


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Not for ever."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_a_lost_disk_is_made_good_by_the_bucket_and_the_orchestrator(
    tmp_path: Path, place: Callable[[str], dict[str, Any]]
) -> None:
    """The bucket has what was truncated, the orchestrator the rest; the digest is that of the lost engine."""
    orchestrator = ListOrchestrator({**dict(entries(1500))})
    orchestrator.mark = 1200
    with tidelog.open_engine(tmp_path / "a", orchestrator=orchestrator, **place("lost")) as engine:
        wait_until(lambda: engine.truncation_mark == 1200, "shipping by itself")
        engine.create_checkpoint()
        digest, value = engine.digest(), engine.read("bucket", "key-7").data
    orchestrator.first_seq = 1201
    heard: list[RestoreProgress] = []
    with tidelog.restore_engine(
        tmp_path / "b", orchestrator=orchestrator, on_progress=heard.append, **place("lost")
    ) as restored:
        assert restored.digest() == digest
        assert restored.read("bucket", "key-7").data == value
        assert {"state", "claim", "index", "done"} <= {one.phase for one in heard}
        restored.apply_many(entries(200, 1501))
        restored.update_low_water_mark(1700)
        assert restored.ship() == 1700


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_values_that_left_the_disk_are_read_from_the_bucket(
    tmp_path: Path, place: Callable[[str], dict[str, Any]], compression: str
) -> None:
    """The disk keeps little; every version is still there."""
    settings = {**place(f"cold-{compression}"), "local_retention_bytes": 0, "ship_compression": compression}
    with tidelog.open_engine(tmp_path / "a", **settings) as engine:
        engine.apply_many(entries(800))
        engine.update_low_water_mark(800)
        engine.ship()
        engine.create_checkpoint()
        engine.ship()
        tiers = set()
        for seq, entry in entries(800)[1::13]:
            assert isinstance(entry, tidelog.PutObject)
            found = engine.read("bucket", entry.key, seq)
            assert (found.data, found.seq) == (entry.data, seq)
            tiers.add(found.tier)
        assert tiers == {"hot", "cold"} or tiers == {"cold"}


def test_the_server_may_die_and_come_back(
    tmp_path: Path, s3_server: S3Server, place: Callable[[str], dict[str, Any]]
) -> None:
    """Entries are applied at their usual pace, the lag is told, and everything is shipped once it is back."""
    with tidelog.open_engine(tmp_path / "a", **place("outage")) as engine:
        engine.apply_many(entries(300))
        engine.update_low_water_mark(300)
        wait_until(lambda: engine.truncation_mark == 300, "the first entries")
        s3_server.kill()
        try:
            engine.apply_many(entries(300, 301))
            engine.update_low_water_mark(600)
            engine.apply_many(entries(300, 601))
            engine.update_low_water_mark(900)
            wait_until(lambda: statistics_of(engine).errors_in_a_row > 1, "failed attempts")
            assert engine.truncation_mark == 300
            assert statistics_of(engine).lag_bytes > 0
        finally:
            s3_server.start()
        wait_until(lambda: engine.truncation_mark == 900, "the rest")
        wait_until(lambda: statistics_of(engine).lag_seconds == 0, "no lag")


def test_replicas_follow_and_restore(tmp_path: Path, place: Callable[[str], dict[str, Any]]) -> None:
    """A copy in another place of the bucket is enough."""
    settings = place("replicated")
    replica = settings["store"].replace("engine-", "replica-")
    with tidelog.open_engine(tmp_path / "a", replicas=(replica,), **settings) as engine:
        engine.apply_many(entries(400))
        engine.update_low_water_mark(400)
        engine.ship()
        engine.create_checkpoint()
        wait_until(lambda: statistics_of(engine).replicas[0].high_water_mark == 400, "the replica")
        digest = engine.digest()
    with tidelog.restore_engine(tmp_path / "b", **{**settings, "store": replica}) as restored:
        assert restored.digest() == digest
