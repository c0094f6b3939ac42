"""An engine's place in a store, as it travels to workers: plain data there, opened by the process that reads.

Invariants
- This module and those that it imports are fit for executors: the tier, the log and nothing of an engine but its name.
- A store is opened in the process that uses it, and kept for its next task: a fork must not inherit one.
- What is opened through a place writes no metadata: publishing is for the driver, in `place.py`.
"""

from __future__ import annotations

from concurrent.futures import Executor
from functools import lru_cache
from typing import NamedTuple

import msgspec

from tidelog.pipeline.reading_ahead import reading_ahead
from tidelog.tier.catalog import Catalog
from tidelog.tier.keys import DEFAULT_ENGINE, EngineKeys
from tidelog.tier.metadata.open import BUCKET, open_metadata_store
from tidelog.tier.object_store import ObjectStore
from tidelog.tier.store_settings import StoreSettings
from tidelog.tier.stores import open_store

_KEPT_PLACES = 16


class EnginePlace(msgspec.Struct, frozen=True):
    """Where a task finds an engine: its store, how that is reached, and the engine's name there."""

    store_url: str
    store_settings: StoreSettings = StoreSettings()
    name: str = DEFAULT_ENGINE

    @property
    def keys(self) -> EngineKeys:
        """All names of the engine in its store."""
        return EngineKeys(self.name)

    def opened(self) -> OpenedPlace:
        """The place as this process has it open; opened once, and never closed."""
        return _opened(self)

    def catalog(self) -> Catalog:
        """Which objects the log consists of, as the store says now."""
        return Catalog(open_metadata_store(BUCKET, self.opened().objects, read_only=True), self.keys)


class OpenedPlace(NamedTuple):
    """A store that this process has open, and threads that fetch from it."""

    objects: ObjectStore
    keys: EngineKeys
    fetchers: Executor


@lru_cache(_KEPT_PLACES)
def _opened(place: EnginePlace) -> OpenedPlace:
    objects = open_store(place.store_url, place.store_settings)
    return OpenedPlace(objects, place.keys, reading_ahead(place.store_url))
