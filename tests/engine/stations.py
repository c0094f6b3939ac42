"""Engines with a store, on nodes with disks of their own: what the tests of the cold half stand on."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from tests.cold.published import lease_of
from tests.engine.engines import SMALL, RandomEntries, assert_same
from tests.engine.model import Model

from tidelog.clock import ManualClock
from tidelog.cold.catalog import Catalog, Descriptor
from tidelog.cold.owned_log import Node
from tidelog.cold.replicas import Replica
from tidelog.engine.cold.manifest import Manifest, OwnedManifest, read_manifest
from tidelog.engine.cold.replicas import EngineDocuments
from tidelog.engine.cold.shipping import Shipping
from tidelog.engine.cold.store_link import claim_engine
from tidelog.engine.core import WAL, Core
from tidelog.engine.engine import Engine
from tidelog.engine.entry import Batch, CreateBucket, Entry, PutObject
from tidelog.engine.recovery.restore import OnProgress, Restore, RestoreReport
from tidelog.engine.settings import EngineSettings
from tidelog.engine.txn.read_set import Guarded, ObjectRead
from tidelog.fields import read_keywords
from tidelog.store.keys import EngineKeys
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.store.object_store import ObjectStore
from tidelog.testing import FaultyFiles, FaultyStore

KEYS = EngineKeys()
DIRECTORY = Path("/engine")


class StoreView:
    """What is in a store, seen from outside."""

    def __init__(self, objects: ObjectStore) -> None:
        self.objects = objects
        self.metadata = BucketMetadataStore(objects, read_only=True)

    @property
    def manifest(self) -> Manifest:
        found = read_manifest(self.metadata, KEYS)
        assert found is not None
        return found[0]

    def descriptors(self) -> list[Descriptor]:
        return list(Catalog(self.metadata, KEYS).walk(1))

    def object_keys(self) -> list[str]:
        """The data objects that are there, published or not."""
        return [info.key for info in self.objects.list(KEYS.objects_prefix)]

    def state_keys(self) -> list[str]:
        """The states that are there, listed or not, and whatever else is beside them but their files."""
        keys = (info.key for info in self.objects.list(KEYS.checkpoints_prefix))
        return [key for key in keys if KEYS.parse_state_part(key) is None]


def node_of(objects: ObjectStore, clock: ManualClock, name: str, metadata: MetadataStore | None = None) -> Node:
    """A store as a node opens it, whose lease nobody renews."""
    metadata = metadata or BucketMetadataStore(objects, proves_late=True)
    return Node(objects, metadata, clock=clock, name=name, directory=DIRECTORY, renews_lease=False)


class EngineNode:
    """One node: a disk, and an engine on it that ships to a store when it is told to.

    It takes the engine from living nodes, unless it is told not to: most tests are about what happens then.
    """

    def __init__(
        self,
        objects: ObjectStore,
        *,
        name: str = "a",
        files: FaultyFiles | None = None,
        clock: ManualClock | None = None,
        replicas: Sequence[ObjectStore] = (),
        metadata: MetadataStore | None = None,
        **settings: Any,
    ) -> None:
        self.objects = objects
        self.metadata = metadata
        self.name = name
        self.files = files or FaultyFiles()
        self.clock = clock or ManualClock()
        self.replicas = replicas
        self.settings: EngineSettings = msgspec.structs.replace(
            SMALL, **read_keywords(EngineSettings, settings, "a setting")
        )
        self.model = Model()
        self._entries = RandomEntries(name)
        self._engine: Engine | None = None
        self._shipping: Shipping | None = None

    def open(self, *, connects: bool = True, take_over: bool = True) -> Self:
        """Opens the engine, and claims its store."""
        core = Core.open(DIRECTORY, self.settings, self.files, self.clock)
        node = node_of(self.objects, self.clock, self.name.replace(" ", "-"), self.metadata)
        self._shipping = Shipping(core, node, keys=KEYS, replicas=self.replicas, take_over=take_over)
        self._engine = Engine(
            core, self._shipping.reader, self._shipping, threads=node.threads, runs_in_background=False
        )
        if connects:
            self._shipping.connect()
        return self

    @property
    def engine(self) -> Engine:
        assert self._engine is not None
        return self._engine

    @property
    def shipping(self) -> Shipping:
        assert self._shipping is not None
        return self._shipping

    @property
    def core(self) -> Core:
        return self.engine._core

    @property
    def view(self) -> StoreView:
        return StoreView(self.objects)

    def apply(self, count: int) -> None:
        """Random entries, to the engine and to the model."""
        entries = self._entries.entries(count, self.engine.applied_seq + 1)
        self.apply_these(entries)

    def apply_these(self, entries: list[tuple[int, Entry]]) -> None:
        self.engine.apply_many(entries)
        for seq, entry in entries:
            self.model.apply(seq, entry)

    def apply_refused(self) -> None:
        """A guarded entry that would change much if what was read for it were true."""
        seq = self.engine.applied_seq + 1
        batch = Batch((CreateBucket(f"refused-{seq}"), PutObject(f"refused-{seq}", "k", b"v" * 300)))
        assert self.engine.apply(seq, Guarded(batch, (ObjectRead("nowhere", "k", 1),))).status == "refused"
        self.model.refuse(seq, batch)

    def roll_back(self, seq: int) -> None:
        self.engine.rollback_to(seq)
        self.model.roll_back(seq)

    def ship_all(self) -> int:
        """Everything that was applied is everywhere, and goes to the store."""
        self.engine.update_low_water_mark(self.engine.applied_seq)
        return self.engine.ship()

    def assert_same(self, seqs: list[int] | None = None) -> None:
        """The engine has what the model has."""
        assert_same(self.engine, self.model, seqs)

    def restore(
        self, objects: ObjectStore | None = None, *, take_over: bool = True, on_progress: OnProgress | None = None
    ) -> RestoreReport:
        """Makes the engine anew on this node's disk, from a store; it is not open then."""
        store = self.objects if objects is None else objects
        return Restore(
            *(DIRECTORY, store, self.metadata or BucketMetadataStore(store)),
            replicas=[(one, BucketMetadataStore(one, read_only=True)) for one in self.replicas],
            keys=KEYS,
            node=self.name,
            settings=self.settings,
            files=self.files,
            clock=self.clock,
            take_over=take_over,
            renews_lease=False,
            on_progress=on_progress,
        ).run()

    def crash(self) -> None:
        """The process is gone: nothing is finished, and nothing is given back but the lock."""
        if self._engine is not None:
            self.shipping.stop()
            self.core.close()
            self._engine = None

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def use_replica(node: EngineNode, objects: ObjectStore) -> None:
    """From here on the node has another replica, which knows nothing yet."""
    metadata = BucketMetadataStore(objects)
    node.shipping._replicas()._replicas = [Replica(objects, metadata, KEYS, node.clock, EngineDocuments(KEYS))]


def successor(node: EngineNode, name: str = "b", **settings: Any) -> EngineNode:
    """Another node with an empty disk, which knows what the first one's engine has in the store."""
    other = EngineNode(node.objects, name=name, clock=node.clock, replicas=node.replicas, **settings)
    other.model = copy.deepcopy(node.model)
    other.model.roll_back(node.view.manifest.high_water_mark)
    return other


def new_store(clock: ManualClock | None = None) -> FaultyStore:
    """An empty store in memory."""
    return FaultyStore(clock=clock or ManualClock())


def usurp(store: ObjectStore) -> None:
    """Somebody with another disk takes the engine over, as a restore does."""
    clock = ManualClock()
    metadata = BucketMetadataStore(store)
    lease = lease_of(metadata, clock, "usurper")
    taken = claim_engine(
        *(FaultyFiles(), DIRECTORY / WAL, Catalog(metadata, KEYS), store, clock, lease), take_over=True
    )
    OwnedManifest(taken.catalog, KEYS, clock).settle_in()
