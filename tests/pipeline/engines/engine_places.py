"""Engines with a store on this disk, for the jobs over engines, and workers that are this process."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec
import pytest
from tests.engine.engines import RandomEntries

import tidelog
from tidelog.engine.entry import Batch, CreateBucket
from tidelog.engine.txn.read_set import Guarded, ObjectRead
from tidelog.pipeline.address import EngineRoot, find_engine

Item = TypeVar("Item")
Result = TypeVar("Result")


class EngineHome:
    """An engine's directory and its store; entries are random, the same for the same seed."""

    def __init__(self, path: Path, seed: object = 1, **settings: Any) -> None:
        self.directory = path / "engine"
        self.store = path / "store"
        self.entries = RandomEntries(seed)
        self.seq = 0
        self.url = self.store.as_uri()
        self._settings: dict[str, Any] = {"rotate_max_bytes": "64KiB", "compaction_enabled": False, **settings}

    @property
    def root(self) -> EngineRoot:
        return find_engine(self.url)

    def open(self) -> tidelog.Engine:
        return tidelog.open_engine(self.directory, store=self.url, read_only=False, **self._settings)

    def feed(self, engine: tidelog.Engine, count: int) -> None:
        """So many further entries, all of them shipped."""
        pairs = self.entries.entries(count, self.seq + 1)
        engine.apply_many(pairs)
        self.seq = pairs[-1][0]
        engine.update_low_water_mark(self.seq)
        engine.ship()

    def feed_refused(self, engine: tidelog.Engine) -> None:
        """A guarded entry that would change something if what was read for it were true; shipped too."""
        self.seq += 1
        entry = Guarded(Batch([CreateBucket("refused")]), (ObjectRead("nowhere", "k", 1),))
        assert engine.apply(self.seq, entry).status == "refused"
        engine.update_low_water_mark(self.seq)
        engine.ship()

    def stored(self, prefix: str = "storage/engine/main/") -> set[str]:
        """The keys in the store below a prefix, metadata apart."""
        below = self.store / prefix
        return {str(path.relative_to(self.store)) for path in below.rglob("*") if path.is_file()}


def run_here(
    spark: object, function: Callable[[Item], Result], items: Sequence[Item], *, items_per_task: int = 1
) -> Iterator[Result]:
    """As `run_on_workers`, in this process; what travels is packed and unpacked as it would be."""
    kind = get_type_hints(function)["return"]
    for item in items:
        result = function(pickle.loads(pickle.dumps(item)))
        yield msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=kind)


def work_here(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """The jobs in these modules run their workers in this process."""
    for module in modules:
        monkeypatch.setattr(f"tidelog.pipeline.jobs.{module}.run_on_workers", run_here)
