"""What a worker does for `compact`: one new object out of neighbours, with some messages removed if that is asked for.

Invariants
- It changes nothing but that it uploads one object, of a generation that only this compaction uses. Running it twice
  writes the same bytes under the same name.
- Of the messages that are to go, the newest one of each producer stays: which sequences are stored follows from the
  messages, and the last sequence of a producer is what keeps it from being stored twice.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from tidelog.errors import DataError
from tidelog.log.frame import Frames
from tidelog.pipeline.part import ColdPlace
from tidelog.tier.descriptor import Codec, Descriptor
from tidelog.tier.keys import TopicKeys
from tidelog.tier.object_store import ObjectStore
from tidelog.tier.replacement_build import Built, RemovedOffsets, build_object, read_old
from tidelog.tier.stores import open_store
from tidelog.topics.columns import frames_digest
from tidelog.topics.extension import decode_extension
from tidelog.topics.message import TIMESTAMP_FIELD, raw_extensions

_KEPT_STORES = 16


class BuildWork(msgspec.Struct, frozen=True, kw_only=True):
    """Neighbours that are to become one object."""

    place: ColdPlace
    topic: str
    generation: int
    descriptors: tuple[Descriptor, ...]
    codec: Codec
    removed: RemovedOffsets | None = None


class BuildDone(msgspec.Struct, frozen=True, kw_only=True):
    """The object that came of it; None where nothing could be removed after all, and the old ones are as good."""

    topic: str
    start_offset: int
    built: Built | None


def build_run(work: BuildWork) -> BuildDone:
    """Makes the object, in the store that the work names."""
    return build_in(_store(work.place), work)


def build_in(objects: ObjectStore, work: BuildWork) -> BuildDone:
    """The same, in a store that is open already."""
    namespace, _, name = work.topic.partition("/")
    keys = TopicKeys(namespace, name, work.place.metadata_root)
    removed = work.removed
    if removed is not None:
        removed = _without(removed, _newest_of_producers(objects, keys, work))
    built = None
    if removed is None or any(removed.bits):
        built = build_object(
            *(objects, keys, work.descriptors, work.generation),
            codec=work.codec,
            digest=frames_digest,
            time_field=TIMESTAMP_FIELD,
            removed=removed,
        )
    return BuildDone(topic=work.topic, start_offset=work.descriptors[0].start_offset, built=built)


def _newest_of_producers(objects: ObjectStore, keys: TopicKeys, work: BuildWork) -> set[int]:
    newest: dict[str, int] = {}

    def look(frames: Frames) -> None:
        for index, data in enumerate(raw_extensions(frames, 0, frames.count) or ()):
            name = None if data is None else _producer_of(data)
            if name is not None:
                newest[name] = frames.first_offset + index

    read_old(objects, keys, work.descriptors, look)
    return set(newest.values())


def _producer_of(extension: bytes) -> str | None:
    try:
        mark = decode_extension(extension).producer
    except DataError:
        return None  # whoever reads the message is told
    return None if mark is None else mark.name


def _without(removed: RemovedOffsets, kept: set[int]) -> RemovedOffsets:
    bits = bytearray(removed.bits)
    for offset in kept:
        place = offset - removed.first_offset
        if 0 <= place < len(bits) * 8:
            bits[place >> 3] &= ~(1 << (place & 7))
    return RemovedOffsets(removed.first_offset, bytes(bits))


@lru_cache(_KEPT_STORES)
def _store(place: ColdPlace) -> ObjectStore:
    """Opened in the process that works, and kept for its next item."""
    return open_store(place.store_url, place.store_settings)
