"""The cold half of a copy that a restore drill has made: it reads values from the store, and refuses everything else.

Invariants
- Nothing is claimed, shipped, published or deleted: the engine that owns the store is not concerned.
- The copy is for reading. An entry that was applied here would get an address that the engine itself gives to another.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tidelog.engine.cold import ColdReader
from tidelog.errors import NotSupportedError
from tidelog.tier.background import Background
from tidelog.tier.catalog import Catalog
from tidelog.tier.keys import EngineKeys
from tidelog.tier.metadata.open import BUCKET, open_metadata_store
from tidelog.tier.object_store import ObjectStore


class DrillStore:
    """The store of a drill's copy, in the place of `Shipping`."""

    def __init__(
        self,
        directory: Path,
        objects: ObjectStore,
        keys: EngineKeys,
        *,
        cache_bytes: int,
        replicas: Sequence[ObjectStore] = (),
    ) -> None:
        self._directory = directory
        self._metadata = open_metadata_store(BUCKET, objects, read_only=True)
        self.reader = ColdReader(Catalog(self._metadata, keys), objects, cache_bytes, lambda: replicas)

    def check_not_fenced(self) -> None:
        """Asked before every change: there is none."""
        raise NotSupportedError(
            "this directory is a copy that a restore drill has made, and is only for reading",
            path=self._directory,
            hint="Change the engine where it is owned. If that one is lost, restore it into another directory",
        )

    def ship(self) -> int:
        self.check_not_fenced()
        return 0

    def checkpoint(self) -> None:
        self.check_not_fenced()

    def truncation_mark(self) -> int:
        """Nothing that an orchestrator may go by."""
        return 0

    def start(self, background: Background) -> None:
        """Nothing runs by itself."""

    def stop(self) -> None:
        self.reader.close()
        self._metadata.close()
