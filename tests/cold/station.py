"""A node with a disk, and the stores that nodes share: what the tests of shipping, pruning and taking over stand on."""

from __future__ import annotations

import struct
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.cold.published import KEYS, lease_of, open_metadata

from tidelog.clock import ManualClock
from tidelog.cold.catalog import Catalog, Descriptor
from tidelog.cold.ownership import OwnedCatalog
from tidelog.cold.settings import TierSettings
from tidelog.cold.shipper import Gate, Shipper
from tidelog.cold.takeover import Taken, Takeover
from tidelog.log import Log, LogSettings
from tidelog.log.binding import bound
from tidelog.store.metadata.base import DelegatingMetadata, MetadataStore
from tidelog.store.metadata.open import RememberedMetadata
from tidelog.store.object_store import ObjectStore
from tidelog.testing import FaultyFiles, FaultyStore

DIRECTORY = Path("/data/shop/orders")
TIME_FIELD = 0
# A payload of 20 bytes is a frame of 36: three of them a file, and nothing in memory that is in one.
PAYLOAD_BYTES = 20
FRAME_BYTES = PAYLOAD_BYTES + 16
SMALL_FILES = LogSettings(rotate_max_bytes=3 * FRAME_BYTES, cache_max_messages=0, cache_max_bytes=0)


class _ReadsMany(DelegatingMetadata):
    """As etcd, for which one question about many keys is one request."""

    reads_many_at_once = True


class Stores:
    """What all nodes share."""

    def __init__(self, kind: str = "multi-key") -> None:
        self.clock = ManualClock()
        self.objects = FaultyStore(clock=self.clock)
        self.metadata: MetadataStore = open_metadata(kind, self.objects)

    @property
    def catalog(self) -> Catalog:
        """One that remembers nothing."""
        return Catalog(self.metadata, KEYS)

    @property
    def opening_catalog(self) -> Catalog:
        """One that remembers what it was asked for, as `Tier.opening_catalog` does."""
        asked = (KEYS.owner, KEYS.start, KEYS.state, KEYS.settings, KEYS.staging, KEYS.current, KEYS.epoch_floor)
        return Catalog(RememberedMetadata(_ReadsMany(self.metadata), asked, KEYS.metadata_prefix), KEYS)

    def descriptors(self) -> list[Descriptor]:
        return list(self.catalog.walk(0))

    def object_keys(self) -> list[str]:
        """The data objects that are in the store, published or not."""
        return [info.key for info in self.objects.list(KEYS.objects_prefix)]


class Node:
    """One node's disk. `take` claims the topic, `open` goes on to a log with a shipper.

    It takes the topic from living nodes, unless it is told not to: most tests are about what happens then.
    """

    def __init__(self, stores: Stores, name: str = "a", *, settings: LogSettings = SMALL_FILES) -> None:
        self.stores = stores
        self.name = name
        self.files = FaultyFiles()
        self.files.make_directories(DIRECTORY)
        self.log_settings = settings
        self._log: Log | None = None

    def take(
        self,
        first_offset: int = 0,
        objects: ObjectStore | None = None,
        *,
        take_over: bool = True,
        catalog: Catalog | None = None,
    ) -> Taken:
        """Claims the topic; opens no log."""
        stores, catalog = self.stores, catalog or self.stores.catalog
        self.lease = lease_of(stores.metadata, stores.clock, self.name)
        takeover = Takeover(self.files, DIRECTORY, catalog, objects or stores.objects, stores.clock, self.lease)
        return takeover.take(first_offset, take_over=take_over)

    def open(
        self,
        settings: TierSettings | None = None,
        *,
        first_offset: int = 0,
        gate: Gate | None = None,
        take_over: bool = True,
    ) -> Self:
        """Claims the topic and opens its log, with a shipper."""
        taken = self.take(first_offset, take_over=take_over)
        self.open_log(taken.next_offset)
        self.owned: OwnedCatalog = taken.catalog
        self.shipper = self.new_shipper(settings, taken.next_offset, gate=gate)
        return self

    def open_log(self, first_offset: int = 0) -> Log:
        """The log alone, as it is without a store."""
        self._log = Log.open(
            DIRECTORY,
            self.log_settings,
            files=bound(self.files),
            clock=self.stores.clock,
            time_field=TIME_FIELD,
            first_offset=first_offset,
        )
        return self._log

    def new_shipper(self, settings: TierSettings | None, next_offset: int, gate: Gate | None = None) -> Shipper:
        return Shipper(
            *(self.log, self.owned, self.stores.objects, settings or TierSettings(), self.stores.clock),
            *(TIME_FIELD, next_offset, gate),
        )

    @property
    def log(self) -> Log:
        assert self._log is not None
        return self._log

    def payload(self, offset: int) -> bytes:
        """The time, the node and the offset: no two nodes write the same."""
        text = f"{self.name}{offset}".encode()
        return struct.pack("<q", self.stores.clock.now_us()) + text.ljust(PAYLOAD_BYTES - 8, b"-")

    def append(self, count: int) -> None:
        """Durable when it returns, each in the file where it would be if it came alone."""
        for offset in range(self.log.next_offset, self.log.next_offset + count):
            self.log.append(self.payload(offset), sync=True)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
