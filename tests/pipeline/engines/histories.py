"""Engines with a random past in a store: batches, copies, refused entries, rollbacks; and what they must look like."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.engine.compacting import compact_by_hand
from tests.engine.engines import RandomEntries
from tests.engine.model import Model

import tidelog
from tidelog.engine.cold.gc import drop_wal
from tidelog.engine.engine import Engine
from tidelog.engine.entry import Entry
from tidelog.pipeline.address import find_engine
from tidelog.store.urls import open_store


class History:
    """An engine that was fed with random entries and has shipped all of them, and the model of it."""

    def __init__(self, directory: Path, seed: object, store: str | None = None, **settings: object) -> None:
        self.directory = directory / "engine"
        self.store = store or f"file://{directory / 'store'}"
        self.model = Model()
        self._choose = random.Random(str(seed))
        self._source = RandomEntries(seed)
        self._settings = settings
        self.applied: list[tuple[int, Entry, bool]] = []

    def open(self) -> Engine:
        """The engine, open."""
        settings: dict[str, Any] = {"rotate_max_bytes": 16 << 10, "large_value_bytes": 1500, **self._settings}
        return tidelog.open_engine(self.directory, store=self.store, read_only=False, **settings)

    def grow(self, engine: Engine, entries: int = 60, *, rolls_back: bool = True) -> None:
        """Some more entries, of which the last are thrown away and replaced by others now and then; all are shipped."""
        for _ in range(3):
            self._apply(engine, entries // 3)
            if rolls_back and self._choose.random() < 0.7:
                kept = self._choose.randint(engine.low_water_mark, engine.applied_seq)
                engine.rollback_to(kept)
                self.model.roll_back(kept)
                self.applied = [one for one in self.applied if one[0] <= kept]
                self._apply(engine, 5)
            engine.update_low_water_mark(engine.applied_seq)
            engine.ship()

    def _apply(self, engine: Engine, count: int) -> None:
        entries = self._source.entries(count, engine.applied_seq + 1)
        engine.apply_many(entries)
        self.applied += [(seq, entry, self.model.apply(seq, entry)) for seq, entry in entries]

    def compact(self) -> int:
        """Everything that is shipped is compacted, and its raw log dropped; the LSN that the log begins with then."""
        compact_by_hand(open_store(self.store))
        with find_engine(self.store).open(read_only=False) as opened:
            drop_wal(opened.objects, opened.metadata, opened.keys, opened.manifest.high_water_lsn)
            return opened.catalog.start_offset()

    def objects_at(self, seq: int) -> list[tuple[Any, ...]]:
        """All objects to be seen at a seq: bucket, key, seq, data, metadata."""
        return sorted(
            (name, key, one.seq, one.data, one.metadata)
            for name, bucket in self.model.at(seq).items()
            for key, one in bucket.objects.items()
        )
