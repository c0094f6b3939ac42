"""Making one object out of several: the same frames one after the other, or with the payloads of some taken away.

Invariants
- Every frame of the old objects is checked, and each old object as a whole against its descriptor.
- The descriptor of the new object is made from what the store gives back, read to the last byte: what was written is
  known to be there, and the sum over its frames to be that of the frames that went in.
- The bytes depend on the frames and the codec alone, not on how the frames came in.
- A few MiB are in memory, however large the objects are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from tidelog.errors import CorruptionError, OtherLogError
from tidelog.log.binding import encode_binding
from tidelog.log.frame import HEADER_BYTES, Frames, crc32, encode_many
from tidelog.log.removed import REMOVED_PAYLOAD
from tidelog.tier.blocks import DEFAULT_LEVEL, MAX_BLOCK_BYTES, TARGET_BLOCK_BYTES, block_compressor, encode_block
from tidelog.tier.descriptor import Codec, Descriptor
from tidelog.tier.keys import ObjectId, TopicKeys
from tidelog.tier.object_check import ObjectCheck
from tidelog.tier.object_store import ObjectInfo, ObjectStore, ObjectWriter
from tidelog.tier.upload import checksum_text

_MODULUS = 1 << 64
_SMALL_BYTES = 4 << 20
_READS_AT_ONCE = 8
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
    """Writes the object that is to take the place of some neighbours, reads it back, and describes it."""
    name = ObjectId(old[0].start_offset, old[-1].end_offset, max(one.epoch for one in old), generation)
    before, after = _Sum(digest), _Sum(digest)
    rewriting = _Rewriting(removed, before)
    with objects.open_writer(keys.object(name)) as writer:
        content = _Content(writer, codec, level)
        content.begin(_one_log(old), name.start)
        read_old(objects, keys, old, lambda frames: content.add(rewriting.rewritten(frames)), time_field)
        content.close()
    assert writer.published is not None
    found = ObjectCheck(
        *(objects, writer.published, name, old[0].log_id, time_field),
        on_frames=lambda frames, _: after.add(frames, _marks(frames)),
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
    """The log that all of them belong to."""
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
        """Where the block ends that is being filled: behind the frame that makes it large enough, or before a huge."""
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
    """Hands over all frames of some objects in order, each object checked as a whole. Small ones are fetched ahead."""

    def read(descriptor: Descriptor, take_some: Callable[[Frames], None]) -> None:
        info = ObjectInfo(keys.object(descriptor.name), descriptor.size, descriptor.etag, descriptor.created_us)
        check = ObjectCheck(
            *(objects, info, descriptor.name, descriptor.log_id, time_field),
            on_frames=lambda frames, _: take_some(frames),
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
                read(descriptor, take)
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
