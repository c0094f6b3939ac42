"""History to read: one large object of small messages in a store, and the plainest way to download and scan it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import obstore
from obstore.store import S3Store

from tidelog.cold.catalog import Catalog, Descriptor, encode_descriptor
from tidelog.cold.upload import OffsetIndexBuilder
from tidelog.log.binding import BINDING_BYTES, encode_binding, new_log_id
from tidelog.log.frame import encode_many, scan
from tidelog.store.keys import ObjectId, TopicKeys
from tidelog.store.metadata.memory import MemoryMetadataStore
from tidelog.store.object_store import ObjectStore

KEYS = TopicKeys("bench", "history")
LOG_ID = new_log_id()
_BATCH_MESSAGES = 4096


def put_large_object(objects: ObjectStore, count: int, payload_bytes: int) -> Descriptor:
    """Writes `count` messages as one object; nothing is published."""
    name, index = ObjectId(0, count - 1, 1), OffsetIndexBuilder()
    payloads = [os.urandom(payload_bytes) for _ in range(_BATCH_MESSAGES)]
    with objects.open_writer(KEYS.object(name)) as writer:
        writer.write(encode_binding(LOG_ID, 0))
        for first in range(0, count, _BATCH_MESSAGES):
            frames = encode_many(first, payloads[: count - first])
            index.add_frames(frames, writer.bytes_written)
            writer.write(frames.buffer)
    return descriptor_of(name, writer.bytes_written, index.entries())


def descriptor_of(name: ObjectId, size: int, index: tuple[tuple[int, int], ...]) -> Descriptor:
    """What the catalog says about an object without times."""
    return Descriptor(
        object_id=str(name),
        start_offset=name.start,
        end_offset=name.end,
        first_time_us=None,
        last_time_us=None,
        reached_time_us=None,
        size=size,
        raw_size=size,
        etag="",
        checksum="",
        codec="none",
        epoch=name.epoch,
        created_us=0,
        log_id=LOG_ID,
        offset_index=index,
    )


def catalog_of(descriptor: Descriptor) -> Catalog:
    """A catalog in memory with this one object."""
    metadata = MemoryMetadataStore()
    metadata.put(KEYS.descriptor(descriptor.start_offset), encode_descriptor(descriptor))
    return Catalog(metadata, KEYS)


def plain_ranges(client: S3Store, path: str, size: int, range_bytes: int, at_once: int) -> Iterator[memoryview]:
    """The frames of an object through obstore alone, in order, with so many requests on their way."""
    waiting: deque[Future[obstore.Bytes]] = deque()
    with ThreadPoolExecutor(at_once) as threads:
        for start in range(BINDING_BYTES, size, range_bytes):
            end = min(size, start + range_bytes)
            waiting.append(threads.submit(obstore.get_range, client, path, start=start, end=end))
            if len(waiting) == at_once:
                yield memoryview(waiting.popleft().result())
        while waiting:
            yield memoryview(waiting.popleft().result())


def plain_scan(ranges: Iterator[memoryview]) -> int:
    """Scans what comes, frame by frame, and returns how many messages there were."""
    rest, offset = b"", 0
    for data in ranges:
        buffer = b"".join((rest, data))
        frames, end, _ = scan(buffer, 0, offset)
        rest, offset = buffer[end:], frames.next_offset
    assert not rest
    return offset
