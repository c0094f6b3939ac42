"""Engines to which anything happened, in a store of files: what the jobs that look at an engine are tried on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.engine.stations import EngineNode, successor

from tidelog.pipeline.address import EngineRoot, find_engine
from tidelog.store.settings import StoreSettings
from tidelog.store.urls import open_store

SETTINGS: dict[str, Any] = {"local_retention_bytes": 0, "cold_cache_bytes": 0, "rotate_max_bytes": 4 << 10}


class EventfulEngine:
    """One engine and what was done to it: entries, rollbacks, retention, compactions by its owner, lost disks."""

    def __init__(self, directory: Path, seed: object = 0) -> None:
        self.store = directory / "store"
        self.store.mkdir(parents=True)
        self._chance = random.Random(f"history {seed}")
        self.node = EngineNode(open_store(self.store.as_uri(), StoreSettings()), name=f"n{seed}", **SETTINGS).open()

    @property
    def root(self) -> EngineRoot:
        """As a job names it."""
        return find_engine(self.store.as_uri())

    @property
    def high_water_mark(self) -> int:
        return self.node.view.manifest.high_water_mark

    def run(self, steps: int, *, keeps_all: bool = False) -> None:
        """Does steps, and ships what came of them. With `keeps_all` nothing of the log and no version goes."""
        kinds = [self._ship, self._ship, self._compact, self._roll_back, self._checkpoint, self._kill, self._restore]
        kinds += [] if keeps_all else [self._collect]
        for _ in range(steps):
            self.node.apply(self._chance.choice((1, 8, 25)))
            self._chance.choice(kinds)()
        self._ship()

    def close(self) -> None:
        self.node.close()

    def _ship(self) -> None:
        self.node.ship_all()
        self.node.shipping.purge()

    def _compact(self) -> None:
        self.node.engine.compact(grace_seconds=0)

    def _collect(self) -> None:
        self._ship()
        self.node.engine.collect_garbage(horizon=self._chance.randint(0, self.node.engine.applied_seq))

    def _roll_back(self) -> None:
        engine = self.node.engine
        self.node.roll_back(
            self._chance.randint(max(engine.low_water_mark, engine.applied_seq - 40), engine.applied_seq)
        )

    def _checkpoint(self) -> None:
        self.node.engine.create_checkpoint()

    def _kill(self) -> None:
        self.node.crash()
        self.node.open()

    def _restore(self) -> None:
        """The disk is gone, and some records behind the last entry are in the store."""
        self._ship()
        other = successor(self.node, **SETTINGS)
        self.node.crash()
        other.restore()
        other._entries = self.node._entries
        self.node = other.open()
