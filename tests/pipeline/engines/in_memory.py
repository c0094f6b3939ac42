"""An engine whose store is in memory, for the parts of the jobs over engines that need no Spark."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tidelog.cold.catalog import Catalog
from tidelog.pipeline.location import EngineLocation, OpenedLocation
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.store.object_store import ObjectStore

_STORES: dict[str, ObjectStore] = {}
_FETCHERS = ThreadPoolExecutor(2, "in-memory-place")


class MemoryPlace(EngineLocation, frozen=True):
    """A place that leads to a store of this process."""

    def opened(self) -> OpenedLocation:
        return OpenedLocation(_STORES[self.store_url], self.keys, _FETCHERS)

    def catalog(self) -> Catalog:
        return Catalog(BucketMetadataStore(_STORES[self.store_url], read_only=True), self.keys)


def place_of(objects: ObjectStore) -> MemoryPlace:
    """The place of a store; one at a time, so that the names of earlier tests go."""
    _STORES.clear()
    _STORES["memory://here"] = objects
    return MemoryPlace("memory://here")
