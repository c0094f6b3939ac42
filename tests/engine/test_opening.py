"""Asking for an engine in a wrong way, and opening one for a task."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest
from tests.engine.list_orchestrator import ListOrchestrator

import tidelog
from tidelog.engine.orchestrator.base import drive_async
from tidelog.errors import ConfigError, InputError, NotSupportedError


class TestNames:
    """What is no directory."""

    @pytest.mark.parametrize("wrong", [5, b"bytes", object(), "", "a\0b", "s3://bucket/prefix"])
    def test_a_name_that_is_none_is_refused(self, wrong: Any) -> None:
        """By an error of ours, for opening and for restoring."""
        with pytest.raises(InputError, match="directory"):
            tidelog.open_engine(wrong)
        with pytest.raises(InputError, match="directory"):
            tidelog.restore_engine(wrong, store="memory://")

    def test_a_file_is_refused(self, tmp_path: Path) -> None:
        """And left as it is; so is what would be below it."""
        path = tmp_path / "file"
        path.write_bytes(b"mine")
        for wrong in (path, path / "below"):
            with pytest.raises(InputError, match="cannot be used"):
                tidelog.open_engine(wrong)
        assert path.read_bytes() == b"mine"

    def test_a_name_from_the_environment_is_looked_at_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is no better than one from a program."""
        monkeypatch.setenv("TIDELOG_STORE", "memory://")
        with pytest.raises(InputError, match="no directory was named"):
            tidelog.open_engine()


def test_store_is_no_replica_of_itself(tmp_path: Path) -> None:
    """Nothing is made of such an engine, and one that is there is not opened so."""
    store = (tmp_path / "store").as_uri()
    for same in (store, f"{store}/"):
        for make in (tidelog.open_engine, tidelog.restore_engine):
            with pytest.raises(ConfigError, match="which is the store itself"):
                make(tmp_path / "e", store=store, replicas=[same])
    assert not (tmp_path / "e").exists()
    with tidelog.open_engine(tmp_path / "e", store=store):
        pass
    with pytest.raises(ConfigError, match="which is the store itself"):
        tidelog.open_engine(tmp_path / "e", replicas=[store])


class TestWithoutAStore:
    """What needs one says so."""

    def test_replicas_are_refused(self, tmp_path: Path) -> None:
        """They would be accepted and ignored."""
        with pytest.raises(InputError, match="copies of a store"):
            tidelog.open_engine(tmp_path / "e", replicas=["memory://"])

    def test_shipping_is_refused(self, tmp_path: Path) -> None:
        """Whoever asks for it wants to have something in a store."""
        with tidelog.open_engine(tmp_path / "e") as engine:
            for work in (engine.ship, engine.compact):
                with pytest.raises(NotSupportedError, match=r"Open it with a store"):
                    work()


class TestOrchestrators:
    """What is no orchestrator."""

    def test_what_is_missing_is_named(self, tmp_path: Path) -> None:
        """Before a directory is made."""
        with pytest.raises(InputError, match=r"object is no orchestrator: it has no low_water_mark\(\), entries\(\)"):
            tidelog.open_engine(tmp_path / "e", orchestrator=cast(Any, object()))
        assert not (tmp_path / "e").exists()
        with (
            tidelog.open_engine(tmp_path / "e") as engine,
            pytest.raises(InputError, match=r"it has no truncate\(\)"),
        ):
            tidelog.drive(engine, cast(Any, _Half()))

    def test_one_of_the_other_kind_names_what_drives_it(self, tmp_path: Path) -> None:
        """An orchestrator for tasks gives out coroutines, which no thread can use."""
        with tidelog.open_engine(tmp_path / "e") as engine:
            with pytest.raises(InputError, match="drive_async"):
                tidelog.drive(engine, cast(Any, _Async()))
            with pytest.raises(InputError, match=r"drive\(\)"):
                asyncio.run(drive_async(engine, cast(Any, ListOrchestrator({}))))


class _Half:
    def low_water_mark(self) -> int:
        return 0

    def entries(self, after_seq: int, up_to: int | None = None) -> list[Any]:
        return []


class _Async(_Half):
    async def low_water_mark(self) -> int:  # type: ignore[override]
        return 0

    async def truncate(self, seq: int) -> None: ...


def opened_once_it_is_closed(directory: Path) -> tidelog.Engine:
    """It is closed in the thread that has opened it, which nobody waits for."""
    deadline = time.monotonic() + 120
    while True:
        try:
            return tidelog.open_engine(directory)
        except (tidelog.LockedError, tidelog.HeldError):
            if time.monotonic() > deadline:
                raise


class TestOpeningForATask:
    """`open_engine_async` and `restore_engine_async`."""

    def test_the_threads_of_the_loop_are_left_alone(self, tmp_path: Path) -> None:
        """All of them may be busy, and it opens."""

        async def run() -> int:
            loop, done = asyncio.get_running_loop(), threading.Event()
            busy = [loop.run_in_executor(None, done.wait, 60) for _ in range(64)]
            try:
                async with await asyncio.wait_for(tidelog.open_engine_async(tmp_path / "e"), 120) as engine:
                    return engine.applied_seq
            finally:
                done.set()
                await asyncio.gather(*busy)

        assert asyncio.run(run()) == 0

    @pytest.mark.parametrize("restores", [False, True])
    def test_what_a_cancelled_task_opened_is_closed(self, tmp_path: Path, restores: bool) -> None:
        """Else nobody could open the directory until the process ends."""
        store = (tmp_path / "store").as_uri()
        with tidelog.open_engine(tmp_path / "first", store=store) as engine:
            engine.apply(1, tidelog.CreateBucket("b"))
            engine.update_low_water_mark(1)
            engine.ship()
        orchestrator = _Slow({})
        call = tidelog.restore_engine_async if restores else tidelog.open_engine_async
        directory = tmp_path / ("second" if restores else "first")

        async def run() -> None:
            task = asyncio.create_task(call(directory, store=store, orchestrator=orchestrator))
            await asyncio.to_thread(orchestrator.is_asked.wait, 120)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            orchestrator.may_answer.set()

        asyncio.run(run())
        with opened_once_it_is_closed(directory) as again:
            assert again.list_buckets() == ["b"]

    def test_what_goes_wrong_is_raised(self, tmp_path: Path) -> None:
        """As without a task."""
        with tidelog.open_engine(tmp_path / "e"), pytest.raises(tidelog.TidelogError, match="already open"):
            asyncio.run(tidelog.open_engine_async(tmp_path / "e"))


class _Slow(ListOrchestrator):
    """One that takes its time."""

    def __init__(self, log: dict[int, Any]) -> None:
        super().__init__(log)
        self.is_asked = threading.Event()
        self.may_answer = threading.Event()

    def low_water_mark(self) -> int:
        self.is_asked.set()
        assert self.may_answer.wait(120)
        return super().low_water_mark()
