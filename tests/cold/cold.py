"""History made by hand: payloads as objects in a store, with their descriptors in a catalog."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import msgspec

from tidelog.cold.blocks import block_compressor, encode_block
from tidelog.cold.catalog import Catalog, Codec, Descriptor, StartMark, encode_descriptor, largest_frame_bytes
from tidelog.cold.fetch import FetchSettings
from tidelog.cold.reader import History, HistoryReader
from tidelog.cold.tiered_reader import TieredReader
from tidelog.log.binding import encode_binding
from tidelog.log.frame import Frames, encode_many
from tidelog.log.tail_cache import Batch
from tidelog.store.document import encode_json
from tidelog.store.keys import ObjectId, TopicKeys
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.object_store import ObjectStore

EPOCH = 1
LOG_ID = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"
Message = tuple[int, bytes]


class ColdTopic:
    """A topic of which only history exists. Blocks, and entries of the index, are of `index_every` messages."""

    def __init__(
        self,
        objects: ObjectStore,
        metadata: MetadataStore,
        *,
        codec: Codec = "none",
        index_every: int = 10,
        time_field: int | None = None,
        topic: str = "orders",
    ) -> None:
        self.objects = objects
        self.catalog = Catalog(metadata, TopicKeys("shop", topic))
        self.descriptors: list[Descriptor] = []
        self._codec = codec
        self._index_every = index_every
        self._time_field = time_field
        self._reached_time_us: int | None = None

    # Making it

    def fill(self, payloads: Sequence[bytes], per_object: int, first_offset: int = 0) -> list[Descriptor]:
        """Objects of so many messages, published one after the other."""
        for start in range(0, len(payloads), per_object):
            descriptor = self.put_object(payloads[start : start + per_object], first_offset + start)
            self.publish(descriptor)
        return self.descriptors

    def put_object(self, payloads: Sequence[bytes], first_offset: int) -> Descriptor:
        """Writes an object, and publishes nothing."""
        frames = encode_many(first_offset, payloads)
        data, index = self._encoded(frames)
        times = None if self._time_field is None else frames.field_range(self._time_field)
        self._reached_time_us = max(filter(None, (self._reached_time_us, times and times[1])), default=None)
        name = ObjectId(first_offset, frames.next_offset - 1, EPOCH)
        return Descriptor(
            object_id=str(name),
            start_offset=first_offset,
            end_offset=name.end,
            first_time_us=times and times[0],
            last_time_us=times and times[1],
            reached_time_us=self._reached_time_us,
            size=len(data),
            raw_size=len(frames.buffer),
            etag=self.objects.put(self.catalog.keys.object(name), data),
            checksum=f"crc32:{zlib.crc32(data):08x}",
            codec=self._codec,
            epoch=EPOCH,
            created_us=0,
            log_id=LOG_ID,
            offset_index=tuple(index),
            largest_bytes=largest_frame_bytes(frames, msgspec.UNSET),
        )

    def _encoded(self, frames: Frames) -> tuple[bytes, list[tuple[int, int]]]:
        starts = range(0, frames.count, self._index_every)
        data, index, compressor = bytearray(encode_binding(LOG_ID, frames.first_offset)), [], block_compressor()
        if self._codec == "none":
            index = [(frames.first_offset + start, len(data) + frames.start_of(start)) for start in starts]
            return bytes(data + frames.buffer), index
        for start in starts:
            stop = min(start + self._index_every, frames.count)
            raw = frames.buffer[frames.start_of(start) : frames.start_of(stop)]
            index.append((frames.first_offset + start, len(data)))
            data += encode_block(raw, frames.first_offset + start, stop - start, compressor)
        return bytes(data), index

    def publish(self, descriptor: Descriptor) -> None:
        """Puts a descriptor into the catalog, whatever is in it, and moves `cur`."""
        metadata, keys = self.catalog.metadata, self.catalog.keys
        metadata.put(keys.descriptor(descriptor.start_offset), encode_descriptor(descriptor))
        metadata.put(keys.current, self.catalog.moved_current(descriptor.start_offset)[0])
        self.descriptors.append(descriptor)

    def withdraw(self, descriptor: Descriptor) -> None:
        """Takes a descriptor out of the catalog."""
        self.catalog.metadata.delete(self.catalog.keys.descriptor(descriptor.start_offset))

    def move_start(self, offset: int) -> None:
        """As retention does before it removes anything."""
        mark = StartMark(start_offset=offset, epoch=EPOCH, moved_us=0, deleted=False)
        self.catalog.metadata.put(self.catalog.keys.start, encode_json(mark))

    def key_of(self, descriptor: Descriptor) -> str:
        return self.catalog.keys.object(descriptor.name)

    # Reading it

    @contextmanager
    def history(
        self, *, range_bytes: int = 4 << 20, read_ahead_ranges: int = 4, max_message_bytes: int = 16 << 20
    ) -> Iterator[History]:
        """Its history, with threads of its own."""
        settings = FetchSettings(
            range_bytes=range_bytes, read_ahead_ranges=read_ahead_ranges, max_message_bytes=max_message_bytes
        )
        with ThreadPoolExecutor(4) as executor:
            yield History(self.catalog, self.objects, executor, settings=settings)


def batches(reader: HistoryReader | TieredReader) -> Iterator[Batch]:
    """All that a reader gives; it is closed then."""
    try:
        while (batch := reader.next_batch()) is not None:
            yield batch
    finally:
        reader.close()


def everything(reader: HistoryReader | TieredReader) -> list[Message]:
    """All that a reader gives, as (offset, payload)."""
    return [entry for batch in batches(reader) for entry in enumerate(batch.payloads(), batch.first_offset)]


def numbered(payloads: Sequence[bytes], first_offset: int = 0) -> list[Message]:
    return list(enumerate(payloads, first_offset))
