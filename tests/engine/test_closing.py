"""Closing an engine while others use it: they are told, nobody hangs, and nothing that was acknowledged is missing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.engine.engines import RandomEntries
from tests.engine.model import Model

import tidelog
from tidelog.engine.engine import Engine
from tidelog.errors import ClosedError, ConflictError, NotFoundError
from tidelog.store.scheduler import DaemonPool


class Crowd:
    """Threads that use an engine in all ways until they are told that it is closed."""

    def __init__(self, engine: Engine, *, has_store: bool) -> None:
        self._engine = engine
        self._entries = RandomEntries("closing").entries(4000)
        self.acknowledged = 0
        self.told: list[BaseException] = []
        self.is_under_way = threading.Event()
        works: list[Callable[[], object]] = [self._apply, self._read, self._read, self._lock, engine.digest]
        works += [engine.create_checkpoint, engine.collect_garbage, engine.compact_index]
        works += [engine.ship, lambda: engine.compact(0.0)] if has_store else []
        self._threads = [threading.Thread(target=self._until_told, args=(work,), daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    def _until_told(self, work: Callable[[], object]) -> None:
        try:
            while True:
                with contextlib.suppress(NotFoundError, ConflictError):  # what a transaction read has changed
                    work()
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            self.told.append(error)

    def _apply(self) -> None:
        done = self.acknowledged
        self._engine.apply_many(self._entries[done : done + 20])
        self.acknowledged = done + 20
        self._engine.update_low_water_mark(self._entries[max(0, done - 10)][0])
        if self.acknowledged > 200:
            self.is_under_way.set()

    def _read(self) -> None:
        for bucket in self._engine.list_buckets():
            for one in self._engine.list_objects(bucket, limit=30):
                self._engine.read(bucket, one.key)
                self._engine.stat(bucket, one.key)

    def _lock(self) -> None:
        with self._engine.transaction() as transaction:
            transaction.read("bucket-0", "key/1", for_update=True)

    def ended(self) -> bool:
        """Whether all of them have, before long."""
        for thread in self._threads:
            thread.join(120)
        return not any(thread.is_alive() for thread in self._threads)

    def model(self, seq: int) -> Model:
        """What an engine has that was applied so far."""
        model = Model()
        for one, entry in self._entries:
            if one <= seq:
                model.apply(one, entry)
        return model


@pytest.mark.parametrize("has_store", [False, True])
def test_whoever_uses_it_is_told(tmp_path: Path, has_store: bool) -> None:
    """By ClosedError alone, wherever they were just then."""
    store = (tmp_path / "store").as_uri() if has_store else None
    small: dict[str, Any] = {
        "rotate_max_bytes": 64 << 10,
        "buffer_pool_bytes": 64 * 8192,
        "local_retention_bytes": 0,
        "keep_versions": 3,
    }
    engine = tidelog.open_engine(tmp_path / "e", store=store, **small)
    crowd = Crowd(engine, has_store=has_store)
    assert crowd.is_under_way.wait(60)
    engine.close()
    assert crowd.ended()
    assert [error for error in crowd.told if not isinstance(error, ClosedError)] == []
    with tidelog.open_engine(tmp_path / "e") as again:
        model = crowd.model(again.applied_seq)
        assert again.applied_seq >= crowd._entries[crowd.acknowledged - 1][0]
        assert again.digest() == model.digest()


def test_a_pool_that_is_closed_says_so_in_both_tongues() -> None:
    """As an Executor does, and as everything here does that was closed while it was in use."""
    pool = DaemonPool(1, "test")
    pool.shutdown()
    for kind in (RuntimeError, ClosedError):
        with pytest.raises(kind, match="closed"):
            pool.submit(int)


def test_closing_takes_no_checkpoint_that_says_the_same(tmp_path: Path) -> None:
    """What was checkpointed a moment ago, or restored, is not written again; whatever has changed is."""

    def last() -> bytes:
        return (tmp_path / "e/engine.ckpt").read_bytes()

    with tidelog.open_engine(tmp_path / "e") as engine:
        engine.apply(1, tidelog.CreateBucket("b"))
        engine.create_checkpoint()
        taken = last()
    assert last() == taken
    with tidelog.open_engine(tmp_path / "e") as engine:
        engine.create_checkpoint()
        taken = last()
        engine.update_low_water_mark(1)
    assert last() != taken
    with tidelog.open_engine(tmp_path / "e") as engine:
        assert (engine.applied_seq, engine.low_water_mark) == (1, 1)
        engine.create_checkpoint()
        taken = last()
        engine.apply(2, tidelog.PutObject("b", "k", b"v"))
    assert last() != taken
    with tidelog.open_engine(tmp_path / "e") as engine:
        assert engine.read("b", "k").data == b"v"
