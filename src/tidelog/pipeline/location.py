"""Locations as they travel to workers: a store, the topics or the engine in it, a part of a topic for a task.

Invariants
- A location is plain data. This module and its imports are all that a task needs of this package besides Spark itself:
  the cold tier, the log, and nothing of an engine but its name.
- A store is opened in the process that uses it, and kept for its next task: a fork must not inherit one.
- Nothing that a location keeps open writes metadata; `open_stores` is for jobs that do.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import msgspec

from tidelog.client.tail import ServerPlace
from tidelog.cold.catalog import Catalog, Descriptor
from tidelog.pipeline.tasks import reading_ahead
from tidelog.store.keys import DEFAULT_ENGINE, DEFAULT_ROOT, EngineKeys, TopicKeys
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.metadata.open import BUCKET, open_metadata_store
from tidelog.store.object_store import ObjectStore
from tidelog.store.settings import MetadataSettings, StoreSettings
from tidelog.store.urls import open_store

_KEPT_STORES = 16


class Location(msgspec.Struct, frozen=True):
    """A store, and how it is reached."""

    store_url: str
    store_settings: StoreSettings = StoreSettings()

    @property
    def objects(self) -> ObjectStore:
        """The store as this process has it open; opened once, and never closed."""
        return _opened(self.store_url, self.store_settings)

    @property
    def fetchers(self) -> Executor:
        """Threads that fetch from it."""
        return reading_ahead(self.store_url)


@lru_cache(_KEPT_STORES)
def _opened(url: str, settings: StoreSettings) -> ObjectStore:
    return open_store(url, settings)


class TopicLocation(Location, frozen=True):
    """The topics of a store, and where their catalogs are. `is_shared`: other stores may have theirs there too."""

    metadata_url: str = BUCKET
    metadata_root: str = DEFAULT_ROOT
    metadata_settings: MetadataSettings = MetadataSettings()
    is_shared: bool = False

    def keys(self, topic: str) -> TopicKeys:
        namespace, _, name = topic.partition("/")
        return TopicKeys(namespace, name, self.metadata_root)

    def catalog(self, topic: str) -> Catalog:
        """What is known about a topic, for reading."""
        return Catalog(_metadata(self), self.keys(topic))

    @contextmanager
    def open_stores(self, *, read_only: bool = False) -> Iterator[tuple[ObjectStore, MetadataStore]]:
        """Both stores, for as long as they are needed."""
        objects = open_store(self.store_url, self.store_settings)
        with open_metadata_store(
            self.metadata_url, objects, read_only=read_only, settings=self.metadata_settings
        ) as metadata:
            yield objects, metadata


@lru_cache(_KEPT_STORES)
def _metadata(place: TopicLocation) -> MetadataStore:
    return open_metadata_store(place.metadata_url, place.objects, read_only=True, settings=place.metadata_settings)


class EngineLocation(Location, frozen=True):
    """An engine, by its name in a store."""

    name: str = DEFAULT_ENGINE

    @property
    def keys(self) -> EngineKeys:
        return EngineKeys(self.name)

    def opened(self) -> OpenedLocation:
        """The engine's store as this process has it open."""
        return OpenedLocation(self.objects, self.keys, self.fetchers)

    def catalog(self) -> Catalog:
        """Which objects the log consists of, as the store says now."""
        return Catalog(open_metadata_store(BUCKET, self.opened().objects, read_only=True), self.keys)


class OpenedLocation(NamedTuple):
    """A store that this process has open, and threads that fetch from it."""

    objects: ObjectStore
    keys: EngineKeys
    fetchers: Executor


class FilePiece(msgspec.Struct, frozen=True):
    """A WAL file that holds `first_offset` up to `next_offset` (exclusive) between two bytes."""

    path: str
    first_offset: int
    next_offset: int
    byte: int
    end_byte: int

    @property
    def size(self) -> int:
        return self.end_byte - self.byte


class OwnerPart(msgspec.Struct, frozen=True):
    """Where the newest messages of a part are: at the owner of its partition, any server of the installation knows who
    that is. `epoch` is that of the owner when they were planned, `size` about how many bytes they are."""

    server: ServerPlace
    epoch: int
    size: float


class ReadPart(msgspec.Struct, frozen=True, kw_only=True):
    """Offsets `start` to `stop` (exclusive) of a log: below `cold_stop` in objects, from there on in files, or at its
    owner.

    `topic` is the name of the log. That of a partition is one of the logs of the topic `of_topic`.
    """

    topic: str
    of_topic: str | None = None
    partition: int = 0
    start: int
    stop: int
    cold_stop: int
    descriptors: tuple[Descriptor, ...] = ()
    files: tuple[FilePiece, ...] = ()
    owner: OwnerPart | None = None
