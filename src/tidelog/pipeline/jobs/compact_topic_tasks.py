"""Executor tasks of `compact`: one builds a new object from neighbouring ones, optionally without some of their
messages, the other finds which transactions are open behind some objects.

Invariants
- The only effect of a build is to upload one object, of a generation that only this compaction uses. Running it twice
  writes the same bytes under the same name.
- Of the messages to remove, the newest one of each producer stays, a producer of Kafka's protocol too: deduplication
  state is derived from the messages, and the last sequence of a producer is what keeps it from being stored twice.
- A control record stays whatever is asked for: without it the messages of its transaction would not be decided.
"""

from __future__ import annotations

import msgspec

from tidelog import _native
from tidelog.cold.catalog import Codec, Descriptor
from tidelog.cold.rewrite import Built, RemovedOffsets, build_object, read_old
from tidelog.errors import DataError
from tidelog.log.frame import Frames
from tidelog.log.transactions import MESSAGES, OpenTransaction, Transactions, marks_in
from tidelog.pipeline.location import TopicLocation
from tidelog.store.keys import TopicKeys
from tidelog.store.object_store import ObjectStore
from tidelog.topics.columns import frames_digest
from tidelog.topics.message import TIMESTAMP_FIELD


class BuildWork(msgspec.Struct, frozen=True, kw_only=True):
    """Neighbours that are to become one object."""

    place: TopicLocation
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
    return build_in(work.place.objects, work)


def build_in(objects: ObjectStore, work: BuildWork) -> BuildDone:
    """The same, in a store that is open already."""
    keys = work.place.keys(work.topic)
    removed = work.removed
    if removed is not None:
        removed = _without(removed, _indispensable(objects, keys, work))
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


def _indispensable(objects: ObjectStore, keys: TopicKeys, work: BuildWork) -> set[int]:
    """The newest message of each producer, and the control records."""
    newest: dict[bytes | int, int] = {}
    controls: set[int] = set()

    def look(frames: Frames) -> None:
        for mark in marks_in(frames) or ():
            if mark.kind != MESSAGES:
                controls.add(mark.first_offset)
        newest.update(_newest_of_kafka(frames))
        arrays = frames.buffer, frames.positions, frames.lengths
        newest.update(_native.newest_producers(frames.first_offset, *arrays, 0, frames.count))

    read_old(objects, keys, work.descriptors, look)
    return controls.union(newest.values())


def _newest_of_kafka(frames: Frames) -> dict[bytes | int, int]:
    arrays = (frames.buffer, frames.positions, frames.lengths)
    try:
        found = _native.producer_batches(frames.first_offset, *arrays, 0, frames.count)
    except DataError:  # one of them is damaged, which a reader of it is told: the others count
        singles = [frames.slice(index, index + 1) for index in range(frames.count)]
        return {} if len(singles) < 2 else {key: at for one in singles for key, at in _newest_of_kafka(one).items()}
    return {producer_id: last for _, last, producer_id, _, _, _, is_control, _, _ in found if not is_control}


def _without(removed: RemovedOffsets, kept: set[int]) -> RemovedOffsets:
    bits = bytearray(removed.bits)
    for offset in kept:
        place = offset - removed.first_offset
        if 0 <= place < len(bits) * 8:
            bits[place >> 3] &= ~(1 << (place & 7))
    return RemovedOffsets(removed.first_offset, bytes(bits))


# Transactions: what is open behind some objects, as far as those know.


class TransactionsWork(msgspec.Struct, frozen=True, kw_only=True):
    """Neighbours whose transactions are to be found."""

    place: TopicLocation
    topic: str
    descriptors: tuple[Descriptor, ...]


class TransactionsFound(msgspec.Struct, frozen=True, kw_only=True):
    """Of which producers a transaction ended in the objects, and which began after that and is open at their end."""

    start_offset: int
    ended: tuple[int, ...]
    open: tuple[OpenTransaction, ...]


def find_transactions(work: TransactionsWork) -> TransactionsFound:
    """Reads the objects, in the store that the work names."""
    return find_transactions_in(work.place.objects, work)


def find_transactions_in(objects: ObjectStore, work: TransactionsWork) -> TransactionsFound:
    """The same, in a store that is open already."""
    known, ended = Transactions(), set[int]()

    def look(frames: Frames) -> None:
        for mark in marks_in(frames) or ():
            known.record(mark)
            if mark.kind != MESSAGES:
                ended.add(mark.producer_id)
        known.forget_before(frames.next_offset)

    read_old(objects, work.place.keys(work.topic), work.descriptors, look)
    return TransactionsFound(
        start_offset=work.descriptors[0].start_offset, ended=tuple(sorted(ended)), open=tuple(known.open)
    )
