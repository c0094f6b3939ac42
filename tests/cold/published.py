"""A topic with objects, for the tests of what deletes and rebuilds them."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tidelog.clock import ManualClock
from tidelog.cold.blocks import block_compressor, encode_block
from tidelog.cold.catalog import Catalog, Codec, Descriptor
from tidelog.cold.lease import NodeLease
from tidelog.cold.ownership import OwnedCatalog, claim_topic, new_claim
from tidelog.cold.upload import OffsetIndexBuilder, checksum_text
from tidelog.log.binding import BINDING_BYTES, encode_binding
from tidelog.log.frame import crc32, encode_many
from tidelog.store.keys import ObjectId, TopicKeys
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.store.object_store import ObjectStore
from tidelog.testing import FaultyMetadata, FaultyStore, World

KINDS = ["multi-key", "single-key", "bucket"]
KEYS = TopicKeys("shop", "orders")
LOG_ID = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"
TIME_FIELD = 0
BLOCK_MESSAGES = 7
SECOND_US = 1_000_000


def open_metadata(kind: str, store: ObjectStore) -> MetadataStore:
    """A metadata store that changes several keys at once, or one, or the bucket itself."""
    if kind == "bucket":
        return BucketMetadataStore(store)
    return FaultyMetadata(multi_key=kind == "multi-key")


def lease_of(metadata: MetadataStore, clock: ManualClock, node: str, directory: str = "/data") -> NodeLease:
    """The lease of a node that is opened now; its heartbeat is renewed by hand."""
    return NodeLease(metadata, clock, node, Path(directory), renews_itself=False)


def payloads_of(name: ObjectId, time_us: int) -> list[bytes]:
    """Messages that say where they are from: two epochs never have the same."""
    return [
        struct.pack("<q", time_us) + b"%d of %d" % (offset, name.epoch) for offset in range(name.start, name.end + 1)
    ]


def encode_object(name: ObjectId, time_us: int, codec: Codec = "none") -> tuple[bytes, tuple[tuple[int, int], ...]]:
    """The bytes of an object, and the index into them that a shipper makes."""
    payloads, index = payloads_of(name, time_us), OffsetIndexBuilder()
    data = encode_binding(LOG_ID, name.start)
    if codec == "none":
        frames = encode_many(name.start, payloads)
        index.add_frames(frames, len(data))
        return data + frames.buffer, index.entries()
    for begin in range(0, len(payloads), BLOCK_MESSAGES):
        block = encode_many(name.start + begin, payloads[begin : begin + BLOCK_MESSAGES])
        index.add_block(block.first_offset, len(data))
        data += encode_block(block.buffer, block.first_offset, block.count, block_compressor())
    return data, index.entries()


def put_object(store: ObjectStore, name: ObjectId, time_us: int, codec: Codec = "none") -> Descriptor:
    """Uploads an object that no catalog knows, and returns what a descriptor of it would be."""
    data, index = encode_object(name, time_us, codec)
    return Descriptor(
        object_id=str(name),
        start_offset=name.start,
        end_offset=name.end,
        first_time_us=time_us,
        last_time_us=time_us,
        reached_time_us=time_us,
        size=len(data),
        raw_size=len(encode_object(name, time_us)[0]) - BINDING_BYTES,
        etag=store.put(KEYS.object(name), data),
        checksum=checksum_text(crc32(data)),
        codec=codec,
        epoch=name.epoch,
        created_us=time_us,
        log_id=LOG_ID,
        offset_index=index,
    )


class PublishedTopic:
    """A topic that somebody owns, whose objects are published one by one."""

    def __init__(
        self, kind: str = "multi-key", store: ObjectStore | None = None, metadata: MetadataStore | None = None
    ):
        self.clock = ManualClock()
        self.store = FaultyStore(clock=self.clock) if store is None else store
        self.metadata = open_metadata(kind, self.store) if metadata is None else metadata
        self.owned = self.take_over("a")

    @property
    def catalog(self) -> Catalog:
        """One that remembers nothing."""
        return Catalog(self.metadata, KEYS)

    @property
    def epoch(self) -> int:
        return self.owned.epoch

    def take_over(self, node: str, *, settle: bool = True) -> OwnedCatalog:
        """The next owner."""
        ownership = claim_topic(
            *(self.catalog, self.catalog.owner(), lease_of(self.metadata, self.clock, node), self.clock, new_claim()),
            log_id=LOG_ID,
        )
        self.owned = OwnedCatalog(ownership, self.clock)
        if settle:
            self.owned.settle_in(0)
        return self.owned

    def upload(self, start: int, end: int, *, epoch: int | None = None, codec: Codec = "none") -> Descriptor:
        """An object that is not published, by the owner or by one of an earlier epoch."""
        name = ObjectId(start, end, self.epoch if epoch is None else epoch)
        return put_object(self.store, name, self.clock.now_us(), codec)

    def publish(self, count: int, *, with_times: bool = True, codec: Codec = "none") -> Descriptor:
        """The next object."""
        start = self.catalog.next_offset()
        newest = self.catalog.newest()
        descriptor = self.upload(start, start + count - 1, codec=codec)
        if not with_times:
            reached = None if newest is None else newest.reached_time_us
            descriptor = msgspec.structs.replace(
                descriptor, first_time_us=None, last_time_us=None, reached_time_us=reached
            )
        self.owned.publish(descriptor)
        return descriptor

    def publish_hourly(self, objects: int, count: int = 10) -> list[Descriptor]:
        """One object an hour; the clock stands an hour behind the last."""
        published = []
        for _ in range(objects):
            published.append(self.publish(count))
            self.clock.advance(3600)
        return published

    def object_names(self) -> list[ObjectId]:
        """What is in the store, by offsets."""
        found = (KEYS.parse_object(info.key) for info in self.store.list(KEYS.objects_prefix))
        return sorted(name for name in found if name is not None)

    def descriptors(self) -> list[Descriptor]:
        """What is in the catalog."""
        return list(self.catalog.walk(0))

    def names_in_catalog(self) -> list[ObjectId]:
        """The objects that the catalog knows."""
        return [descriptor.name for descriptor in self.descriptors()]


@contextlib.contextmanager
def topic_in(world: World, kind: str) -> Iterator[PublishedTopic]:
    """The next owner of the topic in a world that may crash. Its threads end with it."""
    with BucketMetadataStore(world.store) if kind == "bucket" else world.metadata as metadata:
        yield PublishedTopic(store=world.store, metadata=metadata)
