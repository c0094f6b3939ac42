"""`engine.verify()`: findings and a verdict, on an engine that is open and in use."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

import tidelog
from tidelog.store.keys import EngineKeys
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.store.settings import StoreSettings
from tidelog.store.urls import open_store

PAGE_BYTES = 8192
KEYS = EngineKeys()


def flip(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 0x10
    path.write_bytes(data)


def filled(tmp_path: Path) -> tidelog.Engine:
    """An engine whose older half is in the store alone."""
    store = (tmp_path / "store").as_uri()
    engine = tidelog.open_engine(tmp_path / "engine", store=store, wal_segment_size=40_000, hot_tier_bytes=60_000)
    engine.apply(1, tidelog.CreateBucket("b"))
    for seq in range(2, 202):
        engine.apply(seq, tidelog.PutObject("b", f"k{seq % 120:03}", b"%d" % seq * 300, {"n": seq}))
    engine.update_low_water_mark(150)
    engine.ship()
    engine.create_checkpoint()
    engine.ship()
    return engine


def test_engine_that_is_whole_verifies(tmp_path: Path) -> None:
    """Log, pages, index, every value here and in the store, objects and snapshots are read, and nothing is wrong."""
    with filled(tmp_path) as engine:
        report = engine.verify()
        assert (report.findings, report.ok, report.verdict, bool(report)) == ((), True, "ok", True)
        assert report.subject == "engine main"
        read = report.read
        assert (read["hot_values"] + read["cold_values"], read["states"]) == (200, 1)
        assert min(read["records"], read["pages"], read["cold_values"], read["objects"], read["records_in_store"]) > 0
        assert "objects" not in engine.verify(cold=False).read
        assert asyncio.run(engine.verify_async()).ok


def test_engine_without_a_store_verifies(tmp_path: Path) -> None:
    """What is on the disk is all there is."""
    with tidelog.open_engine(tmp_path / "engine") as engine:
        engine.apply(1, tidelog.CreateBucket("b"))
        engine.apply(2, tidelog.PutObject("b", "k", b"v" * 1000))
        report = engine.verify()
        assert (report.ok, report.read["versions"], report.read["hot_values"]) == (True, 2, 1)


def test_damage_on_the_disk_is_found(tmp_path: Path) -> None:
    """A flipped bit in a page, and one in the log: with path, byte and what to do."""
    with filled(tmp_path) as engine:
        flip(tmp_path / "engine/pages.db", 2 * PAGE_BYTES - 100)
        (page,) = engine.verify(cold=False).findings
        assert (page.kind, page.path, page.byte) == ("page", str(tmp_path / "engine/pages.db"), PAGE_BYTES)
        assert "engine restore" in (page.fix or "")
        wal = sorted((tmp_path / "engine/wal").glob("wal.*.log"))[-1]
        flip(wal, 3000)
        report = engine.verify(cold=False)
        frames = [one for one in report.findings if one.kind == "frames"]
        assert [(one.path, one.unit, one.first_offset is not None) for one in frames] == [(str(wal), "LSN", True)]
        assert report.verdict == "damaged"


@pytest.mark.parametrize("damage", ["flip", "gone"])
def test_damage_in_the_store_is_found(tmp_path: Path, damage: str) -> None:
    """The object is named, and every version whose value is read from it."""
    with filled(tmp_path) as engine:
        victim = sorted((tmp_path / "store").rglob("data-*.tlog"))[0]
        if damage == "gone":
            victim.unlink()
        else:
            flip(victim, victim.read_bytes().index(b"20" * 300) + 100)
        report = engine.verify()
        (found,) = [one for one in report.findings if one.kind == "object"]
        assert victim.name in (found.path or "")
        assert any(one.kind == "value" and "b/k0" in one.message for one in report.findings)
        assert engine.verify(cold=False).ok


def test_damaged_documents_hide_nothing_else(tmp_path: Path) -> None:
    """A manifest and a descriptor that cannot be understood are findings, and the objects are read all the same."""
    with filled(tmp_path) as engine:
        objects = open_store((tmp_path / "store").as_uri(), StoreSettings())
        metadata = BucketMetadataStore(objects)
        metadata.put(KEYS.engine_manifest, b"{}")
        metadata.put(KEYS.descriptor(1), b"{}")
        report = engine.verify()
        assert {"manifest", "catalog"} <= {one.kind for one in report.findings}
        assert report.read["objects"] > 0


def test_engine_in_use_verifies(tmp_path: Path) -> None:
    """Entries, shipping, checkpoints, retention and rollbacks beside a verification are not findings."""
    with filled(tmp_path) as engine:
        done = threading.Event()

        def work() -> None:
            seq = 202
            while not done.is_set():
                for _ in range(20):
                    engine.apply(seq, tidelog.PutObject("b", f"k{seq % 120:03}", b"%d" % seq * 200))
                    seq += 1
                engine.update_low_water_mark(seq - 10)
                engine.rollback_to(seq - 5)
                seq -= 4
                engine.ship()
                engine.create_checkpoint()
                engine.collect_garbage(horizon=seq - 50)

        worker = threading.Thread(target=work)
        worker.start()
        try:
            for _ in range(4):
                assert engine.verify().findings == ()
        finally:
            done.set()
            worker.join()
