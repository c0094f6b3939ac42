"""Chooses which objects of a topic to merge into one: runs of neighbours, small enough together and worth the work.

Invariants
- A run has no hole, and contains neither the newest objects nor anything below the start: the owner may publish the
  newest again, and what is below the start is about to be deleted.
- Runs do not overlap, and are in order.
- An object is rewritten only together with others that have at least as many bytes, so the number of times that a
  topic's messages are copied grows with the logarithm of its size, however often it is compacted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from tidelog.cold.blocks import DEFAULT_LEVEL, TARGET_BLOCK_BYTES, block_compressor, encode_block
from tidelog.cold.catalog import MAX_BLOCK_BYTES, Catalog, Codec, Descriptor, Found
from tidelog.cold.rewrite_commit import RewrittenObject
from tidelog.cold.upload import checksum_text
from tidelog.cold.verify import ObjectCheck
from tidelog.errors import CorruptionError, InputError, OtherLogError
from tidelog.log.binding import encode_binding
from tidelog.log.frame import HEADER_BYTES, REMOVED_PAYLOAD, Frames, crc32, encode_many
from tidelog.store.keys import ObjectId, TopicKeys
from tidelog.store.object_store import ObjectInfo, ObjectStore, ObjectWriter

DEFAULT_TARGET_BYTES = 256 << 20
# What one new object replaces is written down in one entry, which has at most a MiB.
MAX_RUN_OBJECTS = 1000
# A descriptor says which owner wrote which part of its object; it is read often, and has to stay small.
MAX_EPOCHS = 1024
IsWanted = Callable[[Descriptor], bool]


class Run(msgspec.Struct, frozen=True):
    """Neighbours that are to become one object, and what the catalog has to say about them when it is switched."""

    descriptors: tuple[Descriptor, ...]
    replaced: tuple[RewrittenObject, ...]

    @property
    def start_offset(self) -> int:
        return self.descriptors[0].start_offset

    @property
    def next_offset(self) -> int:
        return self.descriptors[-1].next_offset

    @property
    def bytes(self) -> int:
        return sum(one.size for one in self.descriptors)


class Planned(NamedTuple):
    """Some runs, and the offset from which on there may be more; None: these are all."""

    runs: list[Run]
    next_offset: int | None


def plan_merges(
    catalog: Catalog, *, target_bytes: int, keep_newest: int = 1, from_offset: int = 0, max_runs: int = 64
) -> Planned:
    """Runs of small objects, each of at most `target_bytes` together."""
    _check(target_bytes, keep_newest)
    small = _Gathering(target_bytes, lambda one: one.size * 2 <= target_bytes)
    return small.take(_old_enough(catalog, from_offset, keep_newest), max_runs, _worth_merging)


def plan_rewrites(
    catalog: Catalog,
    is_wanted: IsWanted,
    *,
    target_bytes: int,
    keep_newest: int = 1,
    from_offset: int = 0,
    max_runs: int = 64,
) -> Planned:
    """Runs of the objects that are wanted, neighbours together as long as they fit; one alone is a run as well."""
    _check(target_bytes, keep_newest)
    gathering = _Gathering(target_bytes, is_wanted)
    return gathering.take(_old_enough(catalog, from_offset, keep_newest), max_runs, lambda found: found)


def _check(target_bytes: int, keep_newest: int) -> None:
    if target_bytes < 1:
        raise InputError(f"target_bytes must be 1 or more, not {target_bytes}", operation="compact")
    if keep_newest < 1:
        raise InputError("the newest object belongs to the owner of the topic and is never replaced")


def _old_enough(catalog: Catalog, from_offset: int, keep_newest: int) -> Iterator[Found]:
    """All but the newest ones."""
    held: list[Found] = []
    for found in catalog.found_from(max(from_offset, catalog.start_offset())):
        held.append(found)
        if len(held) > keep_newest:
            yield held.pop(0)


class _Gathering:
    """Puts neighbours together."""

    def __init__(self, target_bytes: int, is_wanted: IsWanted) -> None:
        self._target_bytes = target_bytes
        self._is_wanted = is_wanted
        self._open: list[tuple[Descriptor, str]] = []
        self._bytes = 0
        self._epochs = 0

    def take(
        self,
        found: Iterator[Found],
        max_runs: int,
        worth: Callable[[list[tuple[Descriptor, str]]], list[tuple[Descriptor, str]]],
    ) -> Planned:
        runs: list[Run] = []
        for closed in self._closed(found):
            if kept := worth(closed):
                runs.append(_run(kept))
            if len(runs) == max_runs:
                return Planned(runs, closed[-1][0].next_offset)
        return Planned(runs, None)

    def _closed(self, found: Iterator[Found]) -> Iterator[list[tuple[Descriptor, str]]]:
        for one in found:
            descriptor = one.value
            assert isinstance(descriptor, Descriptor), "reservations have been left out"
            if self._open and not self._fits(descriptor):
                yield self._close()
            if self._is_wanted(descriptor):
                self._open.append((descriptor, one.version))
                self._bytes += descriptor.size
                self._epochs += len(descriptor.all_epochs)
        if self._open:
            yield self._close()

    def _fits(self, descriptor: Descriptor) -> bool:
        return (
            self._open[-1][0].next_offset == descriptor.start_offset
            and self._bytes + descriptor.size <= self._target_bytes
            and len(self._open) < MAX_RUN_OBJECTS
            and self._epochs + len(descriptor.all_epochs) <= MAX_EPOCHS
            and self._is_wanted(descriptor)
        )

    def _close(self) -> list[tuple[Descriptor, str]]:
        closed, self._open, self._bytes, self._epochs = self._open, [], 0, 0
        return closed


def _worth_merging(found: list[tuple[Descriptor, str]]) -> list[tuple[Descriptor, str]]:
    """Without those in front that are larger than all that follows them; nothing where fewer than two are left."""
    rest = sum(one.size for one, _ in found)
    for index, (descriptor, _) in enumerate(found):
        rest -= descriptor.size
        if descriptor.size <= rest:
            return found[index:]
    return []


def _run(found: list[tuple[Descriptor, str]]) -> Run:
    replaced = tuple(RewrittenObject(one.object_id, version, one.size) for one, version in found)
    return Run(tuple(one for one, _ in found), replaced)


# Merges several objects into one: the same frames one after the other, or with the payloads of some removed.
#
# Invariants
# - Every frame of the old objects is verified, and each old object as a whole against its descriptor.
# - The descriptor of the new object is made from what the store returns, read to the last byte: what was written is
#   known to be there, and the sum over its frames to be that of the frames that went in.
# - The bytes depend on the frames and the codec alone, not on how the frames arrived.
# - Some tens of MiB are in memory, however large the objects are.


_MODULUS = 1 << 64
# Objects of up to so many bytes are read whole, several at once; of larger ones the next range is read ahead.
_SMALL_BYTES = 8 << 20
_READS_AT_ONCE = 4
Digest = Callable[[Frames, int, int], int]


class RemovedOffsets(msgspec.Struct, frozen=True):
    """Which offsets are to lose their message: one bit an offset from `first_offset` on, lowest bit first."""

    first_offset: int
    bits: bytes

    def indexes(self, frames: Frames) -> list[int]:
        """Those of a piece of frames, by their number in it."""
        first, bits, end = frames.first_offset - self.first_offset, self.bits, len(self.bits) * 8
        found = range(max(0, first), min(first + frames.count, end))
        return [place - first for place in found if bits[place >> 3] >> (place & 7) & 1]


class FramesTally(msgspec.Struct, frozen=True, kw_only=True):
    """Messages that were counted, and the sum over their frames."""

    messages: int
    digest: int


class Built(msgspec.Struct, frozen=True, kw_only=True):
    """A new object that no catalog knows yet: what went into it, and what came back out of the store."""

    descriptor: Descriptor
    went_in: FramesTally
    came_out: FramesTally
    removed: int


def build_object(
    objects: ObjectStore,
    keys: TopicKeys,
    old: Sequence[Descriptor],
    generation: int,
    *,
    codec: Codec,
    digest: Digest,
    time_field: int | None = None,
    removed: RemovedOffsets | None = None,
    level: int = DEFAULT_LEVEL,
) -> Built:
    """Writes the object that is to replace some neighbours, reads it back, and describes it."""
    name = ObjectId(old[0].start_offset, old[-1].end_offset, max(one.epoch for one in old), generation)
    before, after = _Sum(digest), _Sum(digest)
    rewriting = _Rewriting(removed, before)
    with objects.open_writer(keys.object(name)) as writer:
        content = _Content(writer, codec, level)
        content.begin(_one_log(old), name.start)
        read_old(objects, keys, old, lambda frames: content.add(rewriting.rewritten(frames)), time_field)
        content.close()
    assert writer.published is not None
    with ThreadPoolExecutor(1, "tidelog-compact") as ahead:
        found = ObjectCheck(
            objects,
            writer.published,
            name,
            old[0].log_id,
            time_field,
            most_frame_bytes=max(one.most_frame_bytes for one in old),
            on_frames=lambda frames, _: after.add(frames, _marks(frames)),
            ahead=ahead,
        ).descriptor()
    _compare(found, content, before.tally(), after.tally())
    descriptor = msgspec.structs.replace(
        found,
        reached_time_us=old[-1].reached_time_us,
        created_us=max(one.created_us for one in old),
        epochs=_epochs(old),
        position=old[0].position,
    )
    return Built(descriptor=descriptor, went_in=before.tally(), came_out=after.tally(), removed=rewriting.count)


def _one_log(old: Sequence[Descriptor]) -> str:
    other = next((one for one in old if one.log_id != old[0].log_id), None)
    if other is not None:
        hint = "`tidelog verify --cold` says what is wrong"
        raise OtherLogError(
            path=other.object_id, expected=old[0].log_id, found=other.log_id, operation="compact", hint=hint
        )
    return old[0].log_id


def _epochs(old: Sequence[Descriptor]) -> tuple[tuple[int, int], ...] | msgspec.UnsetType:
    """Under which epoch what was written; not said where it is one."""
    found: list[tuple[int, int]] = []
    for offset, epoch in (one for descriptor in old for one in descriptor.all_epochs):
        if not found or found[-1][1] < epoch:
            found.append((offset, epoch))
    return tuple(found) if len(found) > 1 else msgspec.UNSET


def _compare(found: Descriptor, content: _Content, before: FramesTally, after: FramesTally) -> None:
    """What the store gave back is what was written, and that is what was read."""
    if (found.checksum, found.raw_size) != (checksum_text(content.crc), content.raw_bytes) or before != after:
        raise CorruptionError(
            "what was written is not what the store gives back",
            path=found.object_id,
            byte=0,
            operation="compact",
            hint="Nothing was replaced; run it again, and look at the store if it comes again",
        )


class _Sum:
    """Counts and sums up all frames but some."""

    def __init__(self, digest: Digest) -> None:
        self._digest = digest
        self._messages = 0
        self._sum = 0

    def add(self, frames: Frames, without: Sequence[int]) -> None:
        self._messages += frames.count - len(without)
        self._sum += self._digest(frames, 0, frames.count)
        self._sum -= sum(self._digest(frames, index, index + 1) for index in without)

    def tally(self) -> FramesTally:
        return FramesTally(messages=self._messages, digest=self._sum % _MODULUS)


def _marks(frames: Frames) -> list[int]:
    """The frames whose message was removed before, by their number."""
    lengths = memoryview(frames.lengths).cast("I")
    short = [index for index, length in enumerate(lengths) if length == 1] if 1 in lengths else []
    return [index for index in short if frames.payloads(index, index + 1)[0] == REMOVED_PAYLOAD]


class _Rewriting:
    """Takes the payloads of some frames away, and sums up the others."""

    def __init__(self, removed: RemovedOffsets | None, kept: _Sum) -> None:
        self._removed = removed
        self._kept = kept
        self.count = 0

    def rewritten(self, frames: Frames) -> Frames:
        marks = _marks(frames)
        hit = set(self._removed.indexes(frames)).difference(marks) if self._removed is not None else set()
        self._kept.add(frames, [*marks, *hit])
        if not hit:
            return frames
        self.count += len(hit)
        payloads = frames.payloads()
        for index in hit:
            payloads[index] = REMOVED_PAYLOAD
        return encode_many(frames.first_offset, payloads)


class _Content:
    """The bytes of an object, as they go into the store."""

    def __init__(self, writer: ObjectWriter, codec: Codec, level: int) -> None:
        self._writer = writer
        self._compressor = block_compressor(level) if codec == "zstd" else None
        self._pending = bytearray()
        self._first_offset = 0
        self._count = 0
        self.crc = 0
        self.raw_bytes = 0

    def add(self, frames: Frames) -> None:
        self.raw_bytes += frames.end - frames.start_of(0)
        if self._compressor is None:
            self._write(memoryview(frames.buffer)[frames.start_of(0) : frames.end])
            return
        index = 0
        while index < frames.count:
            stop = self._block_stop(frames, index)
            self._take(frames, index, stop)
            if stop < frames.count or len(self._pending) >= TARGET_BLOCK_BYTES:
                self._write_block()
            index = stop

    def begin(self, log_id: str, first_offset: int) -> None:
        """The header that binds the object to its log."""
        self._write(encode_binding(log_id, first_offset))

    def close(self) -> None:
        self._write_block()

    def _block_stop(self, frames: Frames, index: int) -> int:
        """Where the block being filled ends: after the frame that makes it large enough, or before a huge one."""
        starts, base = memoryview(frames.positions).cast("Q"), frames.start_of(index)
        wanted = base + TARGET_BLOCK_BYTES - len(self._pending)
        stop = bisect_left(starts, wanted + HEADER_BYTES, lo=index + 1)
        is_alone = stop == index + 1 and not self._pending
        if len(self._pending) + frames.start_of(stop) - base > MAX_BLOCK_BYTES and not is_alone:
            return stop - 1
        return stop

    def _take(self, frames: Frames, start: int, stop: int) -> None:
        if not self._count:
            self._first_offset = frames.first_offset + start
        self._pending += memoryview(frames.buffer)[frames.start_of(start) : frames.start_of(stop)]
        self._count += stop - start

    def _write_block(self) -> None:
        if self._count:
            assert self._compressor is not None
            self._write(encode_block(bytes(self._pending), self._first_offset, self._count, self._compressor))
            self._pending.clear()
            self._count = 0

    def _write(self, data: bytes | memoryview) -> None:
        self.crc = crc32(data, self.crc)
        self._writer.write(data)


# Reading the old ones


def read_old(
    objects: ObjectStore,
    keys: TopicKeys,
    old: Sequence[Descriptor],
    take: Callable[[Frames], None],
    time_field: int | None = None,
) -> None:
    """Yields all frames of some objects in order, each object verified as a whole. Small ones are prefetched."""

    def read(descriptor: Descriptor, take_some: Callable[[Frames], None], ahead: Executor | None = None) -> None:
        info = ObjectInfo(keys.object(descriptor.name), descriptor.size, descriptor.etag, descriptor.created_us)
        check = ObjectCheck(
            objects,
            info,
            descriptor.name,
            descriptor.log_id,
            time_field,
            most_frame_bytes=descriptor.most_frame_bytes,
            on_frames=lambda frames, _: take_some(frames),
            ahead=ahead,
        )
        _compare_old(check.descriptor(), descriptor, info.key)

    def read_small(descriptor: Descriptor) -> list[Frames]:
        found: list[Frames] = []
        read(descriptor, found.append)
        return found

    with ThreadPoolExecutor(_READS_AT_ONCE, "tidelog-compact") as pool:
        ahead: deque[Future[list[Frames]]] = deque()
        for descriptor in old:
            if descriptor.raw_size > _SMALL_BYTES:
                _take_all(ahead, 0, take)
                read(descriptor, take, pool)
            else:
                ahead.append(pool.submit(read_small, descriptor))
                _take_all(ahead, _READS_AT_ONCE, take)
        _take_all(ahead, 0, take)


def _take_all(ahead: deque[Future[list[Frames]]], leave: int, take: Callable[[Frames], None]) -> None:
    while len(ahead) > leave:
        for frames in ahead.popleft().result():
            take(frames)


def _compare_old(found: Descriptor, descriptor: Descriptor, key: str) -> None:
    if (found.checksum, found.raw_size, found.codec) != (descriptor.checksum, descriptor.raw_size, descriptor.codec):
        raise CorruptionError(
            "its checksum is not that of its descriptor",
            path=key,
            byte=0,
            operation="compact",
            hint="`tidelog verify --cold` says what is wrong with the topic",
        )
