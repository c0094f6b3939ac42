"""Restore drills: a copy for reading, which claims nothing, ships nothing and disturbs nobody."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.engine.list_orchestrator import ListOrchestrator
from tests.log.workbench import LIMIT_SECONDS

import tidelog
from tidelog.cold.catalog import Catalog
from tidelog.engine.directory import ENGINE_FILE
from tidelog.errors import ConfigError, InputError, NotSupportedError
from tidelog.store.keys import EngineKeys
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.store.urls import open_store

OBJECTS = 20


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


def filled(path: Path, url: str) -> tidelog.Engine:
    """An engine with shipped objects, and one that is not shipped."""
    engine = tidelog.open_engine(path, store=url)
    engine.apply(1, tidelog.CreateBucket("b"))
    puts = [(seq, tidelog.PutObject("b", f"k{seq}", b"%d" % seq * 300)) for seq in range(2, OBJECTS + 2)]
    engine.apply_many(puts)
    engine.update_low_water_mark(OBJECTS + 1)
    engine.ship()
    engine.apply(OBJECTS + 2, tidelog.PutObject("b", "unshipped", b"x"))
    return engine


def claim_in(url: str) -> object:
    with BucketMetadataStore(open_store(url), read_only=True) as metadata:
        return Catalog(metadata, EngineKeys()).owner(), metadata.keys("tidelog/storage/nodes/")


def test_drill_beside_living_engine_reads_what_was_shipped(tmp_path: Path, url: str) -> None:
    """The digest is that of the engine at the same seq; the engine keeps its claim, and goes on."""
    with filled(tmp_path / "engine", url) as engine:
        before = claim_in(url)
        with tidelog.restore_engine(tmp_path / "drill", store=url, claim=False) as copy:
            assert copy.applied_seq == OBJECTS + 1
            assert copy.digest() == engine.digest(OBJECTS + 1)
            assert copy.read("b", "k7").data == b"7" * 300
            with pytest.raises(tidelog.NotFoundError):
                copy.read("b", "unshipped")
        assert claim_in(url) == before
        engine.update_low_water_mark(OBJECTS + 2)
        assert engine.ship() == OBJECTS + 2


def test_drill_refuses_changes(tmp_path: Path, url: str) -> None:
    """Whatever would change the copy, or the store; nothing in the store is moved by trying."""
    with filled(tmp_path / "engine", url), tidelog.restore_engine(tmp_path / "drill", store=url, claim=False) as copy:
        before = claim_in(url)
        for change in (
            lambda: copy.apply(OBJECTS + 2, tidelog.DeleteBucket("b", force=True)),
            lambda: copy.update_low_water_mark(OBJECTS + 1),
            lambda: copy.rollback_to(3),
            copy.ship,
            copy.create_checkpoint,
            copy.compact,
            copy.collect_garbage,
            copy.transaction,
        ):
            with pytest.raises(NotSupportedError, match="restore drill"):
                change()
        assert copy.truncation_mark == 0
        assert claim_in(url) == before


def test_drill_stays_a_drill_when_it_is_opened_again(tmp_path: Path, url: str) -> None:
    """Its directory remembers that: it is not the engine, whatever becomes of that, and has no other store."""
    with filled(tmp_path / "engine", url) as engine:
        tidelog.restore_engine(tmp_path / "drill", store=url, claim=False).close()
        for settings in ({}, {"store": url}, {"take_over": True}):
            with tidelog.open_engine(tmp_path / "drill", **settings) as copy:
                assert copy.read("b", "k3").data == b"3" * 300
                with pytest.raises(NotSupportedError):
                    copy.apply(OBJECTS + 2, tidelog.CreateBucket("c"))
        with pytest.raises(ConfigError):
            tidelog.open_engine(tmp_path / "drill", store=f"file://{tmp_path}/other")
        assert engine.ship() == OBJECTS + 1


def test_drill_that_was_cut_off_is_no_engine(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it says that it is a drill, its directory cannot be opened: it would claim the engine."""
    with filled(tmp_path / "engine", url) as engine:
        monkeypatch.setattr("tidelog.engine.recovery.restore.remember", _dies)
        with pytest.raises(ZeroDivisionError):
            tidelog.restore_engine(tmp_path / "drill", store=url, claim=False)
        monkeypatch.undo()
        assert not (tmp_path / "drill" / ENGINE_FILE).exists()
        with pytest.raises(InputError, match="cut off"):
            tidelog.open_engine(tmp_path / "drill", store=url)
        with tidelog.restore_engine(tmp_path / "drill", store=url, claim=False) as copy:
            assert copy.digest() == engine.digest(OBJECTS + 1)


def _dies(*_: object) -> None:
    raise ZeroDivisionError


def test_drill_takes_no_orchestrator_and_takes_nothing_over(tmp_path: Path, url: str) -> None:
    """Both are for an engine that is claimed."""
    for wrong in ({"orchestrator": ListOrchestrator()}, {"take_over": True}):
        with pytest.raises(InputError, match="claim=False"):
            tidelog.restore_engine(tmp_path / "drill", store=url, claim=False, **wrong)
    assert not (tmp_path / "drill").exists()


def test_drill_for_tasks(tmp_path: Path, url: str) -> None:
    """The twin passes it on."""

    async def restore() -> None:
        opening = tidelog.restore_engine_async(tmp_path / "drill", store=url, claim=False)
        async with await asyncio.wait_for(opening, LIMIT_SECONDS) as copy:
            assert copy.applied_seq == OBJECTS + 1

    with filled(tmp_path / "engine", url):
        asyncio.run(restore())
