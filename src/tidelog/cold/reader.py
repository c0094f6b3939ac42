"""Reads history: the messages of a topic from the object store, as one sequence of batches across objects.

Invariants
- A reader returns exactly the offset that comes next, or raises, or (with `on_gap="skip"`) skips what is gone or
  damaged, and logs which offsets. Damage before the requested offset does not keep it from being read.
- Descriptors are looked up when they are reached, so that concurrent publishing and removal are seen.
- Something is reported missing only after the catalog was read once more: what retention removed is "no longer kept",
  what was published just now is there.
- Of small objects whose places are known beforehand, the next ones are fetched while one is read: one range of each, of
  as many as a reader may hold ranges ahead.
- A store that gives no answer raises StoreUnavailableError and changes nothing: the same call resumes where it was.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor
from threading import Lock
from typing import Literal, NamedTuple, cast

import msgspec

from tidelog.cold import blocks
from tidelog.cold.catalog import Catalog, Descriptor
from tidelog.cold.fetch import ColdReadCounters, Fetcher, FetchSettings, RangeStream, check_frame_size
from tidelog.errors import (
    CorruptionError,
    DataError,
    GapError,
    NotFoundError,
    OffsetOutOfRangeError,
    OtherLogError,
    offsets_text,
)
from tidelog.log.frame import HEADER, HEADER_BYTES, Frames, Stop, scan
from tidelog.log.recovery import find_good_frame
from tidelog.log.tail_cache import Batch, framed_batch
from tidelog.store.object_store import ObjectStore

# The frames of one object, from an offset on: fetched, verified, in order.
#
# Invariants
# - Everything returned has been verified: checksum, length, the expected offset, and that the object ends where its
#   descriptor says, in bytes and in offsets.
# - `position` is the boundary after what was returned, `offset` the one that comes next there.
# - Bytes that fail verification are fetched once more, from the boundary before them: a bad transfer is not a bad
#   object. If the same bytes come again, the object is damaged.
# - The length that a frame or block declares is checked against the descriptor before memory is allocated for it: no
#   frame is larger than `max_message_bytes` of the reader, or than the largest that the descriptor knows of.
# - Frames have the numbers of their offsets, also where the object was staged and has them numbered from 0: they are
#   renumbered in a copy. Readers of payloads alone skip that (`payloads_only`).
# - `skip_damage` resumes at the next good frame, or block, so that exactly what is damaged is left out. Where damage
#   hides the next one, the sparse index knows a later boundary.


DAMAGE_HINT = "Put a good copy of the object in its place; for a good object `tidelog topic rebuild-catalog` helps"


class _Decoded(NamedTuple):
    """What a buffer begins with: frames (None: passed over) of so many bytes, or how many bytes are needed for any."""

    frames: Frames | None
    next_offset: int
    size: int
    needed: int = 0


class ObjectFrames:
    """A position in one object. `ahead`: whether ranges are fetched ahead from the first one on. `payloads_only`:
    whether nobody looks at the headers of the frames."""

    def __init__(
        self,
        fetcher: Fetcher,
        key: str,
        descriptor: Descriptor,
        offset: int,
        stop_offset: int,
        *,
        ahead: bool,
        payloads_only: bool = False,
    ) -> None:
        self.descriptor = descriptor
        self.key = key
        self.offset, self.position = descriptor.position_of(offset)
        self._is_bound = not descriptor.header_bytes
        self._added = 0
        self._payloads_only = payloads_only
        if self.position == descriptor.header_bytes:
            self.position = 0  # the header comes with the first frames
        self._fetcher = fetcher
        self._most_frame_bytes = max(descriptor.most_frame_bytes, HEADER_BYTES + fetcher.settings.max_message_bytes)
        self._wanted_offset = offset
        self._end = descriptor.end_of(min(stop_offset, descriptor.next_offset) - 1)
        self._boundaries = [position for _, position in descriptor.offset_index]
        self._buffer = b""
        self._buffer_at = 0
        self._is_second_try = False
        self._stream = self._stream_from_here(ahead=ahead)

    def next_frames(self) -> Frames | None:
        """The next frames, including those before the wanted offset; None after the last."""
        while self.position < self._end:
            try:
                self._bind()
                decoded = self._decode_next()
                self._check_end(decoded)
            except DataError as damage:
                self._try_again(damage)
                continue
            self._accept(decoded)
            if decoded.frames is not None and decoded.next_offset > self._wanted_offset:
                return decoded.frames
        return None

    def begin(self) -> None:
        """Requests the first range, before it is wanted."""
        self._stream.begin()

    def close(self) -> None:
        """Releases the ranges in flight."""
        self._stream.close()

    def _accept(self, decoded: _Decoded) -> None:
        self._is_second_try = False
        self._buffer_at += decoded.size
        self.position += decoded.size
        self.offset = decoded.next_offset

    def _check_end(self, decoded: _Decoded) -> None:
        last, size = self.descriptor.end_offset, self.descriptor.size
        ends = self.position + decoded.size == size
        if decoded.next_offset > last + 1 or ends != (decoded.next_offset == last + 1):
            raise DataError(f"an object that does not end with offset {last} and {size} bytes")

    # Bytes that are not what they must be

    def _try_again(self, damage: DataError) -> None:
        if self._is_second_try:
            self._begin_anew(is_second_try=False)
            if isinstance(damage, OtherLogError):
                raise damage
            raise CorruptionError(
                damage.message, path=self.key, byte=self.position, operation="read", hint=damage.hint or DAMAGE_HINT
            ) from damage
        self._fetcher.counters.repeated()
        self._begin_anew(is_second_try=True)

    def _begin_anew(self, *, is_second_try: bool) -> None:
        self._stream.close()
        self._buffer, self._buffer_at = b"", 0
        self._is_second_try = is_second_try
        self._stream = self._stream_from_here(ahead=False)

    def _stream_from_here(self, *, ahead: bool) -> RangeStream:
        size, boundaries = self.descriptor.size, self._boundaries
        return RangeStream(self._fetcher, self.key, self.position, self._end, size, ahead=ahead, boundaries=boundaries)

    def skip_damage(self) -> None:
        """Continues after damage, which `next_frames` has just raised: `offset` is the next that can be read."""
        find = self._good_frame if self.descriptor.codec == "none" else self._good_block
        found = find()
        self.offset, self.position = self._next_boundary() if found is None else found
        self._begin_anew(is_second_try=False)

    def _next_boundary(self) -> tuple[int, int]:
        """The next one that the index knows, or the end of the object."""
        later = (entry for entry in self.descriptor.offset_index if entry[0] > self.offset)
        return next(later, (self.descriptor.next_offset, self.descriptor.size))

    def _good_frame(self) -> tuple[int, int] | None:
        """The first good frame before the next boundary, as (offset, position)."""
        end_offset, end = self._next_boundary()
        damaged = bytes(self._fetcher.fetch(self.key, self.position, end - self.position))
        number = self.offset - self._added
        found = find_good_frame(damaged, number, min_offset=number + 1)
        if found is None or found[1] + self._added >= end_offset:
            return None
        return found[1] + self._added, self.position + found[0]

    def _good_block(self) -> tuple[int, int] | None:
        """The block after the damaged one, if the damaged one still shows its length, and one begins there."""
        header_bytes = blocks.HEADER_BYTES
        try:
            damaged = blocks.parse_header(self._fetcher.fetch(self.key, self.position, header_bytes), 0, self.offset)
            if damaged is None or self.position + damaged.size + header_bytes > self.descriptor.end_of(self.offset):
                return None
            position = self.position + damaged.size
            behind = self._fetcher.fetch(self.key, position, header_bytes)
            blocks.parse_header(behind, 0, damaged.next_offset)
        except DataError:
            return None
        return damaged.next_offset, position

    # Decoding

    def _bind(self) -> None:
        """A reader that begins inside the object fetches its header separately, once."""
        if not self._is_bound and self.position:
            header = self._fetcher.fetch(self.key, 0, self.descriptor.header_bytes)
            self._added = self.descriptor.check_header(header, self.key)
            self._is_bound = True

    def _decode_header(self) -> _Decoded:
        size = self.descriptor.header_bytes
        if len(self._buffer) - self._buffer_at < size:
            return _Decoded(None, self.offset, 0, size)
        self._added = self.descriptor.check_header(memoryview(self._buffer)[self._buffer_at :], self.key)
        self._is_bound = True
        return _Decoded(None, self.offset, size)

    def _decode_next(self) -> _Decoded:
        while True:
            decoded = self._decode_one()
            if decoded.size:
                return decoded
            self._refuse_to_take(decoded.needed)
            self._fetch(decoded.needed)

    def _refuse_to_take(self, needed: int) -> None:
        """The index knows where the next frames or blocks begin, so that no length can reach past that."""
        if self.position + needed > self.descriptor.end_of(self.offset):
            raise DataError("a length that leads too far")
        if self.descriptor.codec == "none":  # a block was asked when its header was read
            check_frame_size(needed, self._most_frame_bytes)

    def _fetch(self, needed: int) -> None:
        """Reads more bytes into the buffer, until there are as many as are needed after its position."""
        parts: list[memoryview] = [memoryview(self._buffer)[self._buffer_at :]]
        missing = needed - len(parts[0])
        try:
            while missing > 0:
                parts.append(self._next_range())
                missing -= len(parts[-1])
        finally:
            # After an error too: the stream does not give what it gave once more.
            kept = [part for part in parts if len(part)]
            # One range that stands for itself is used as it came: a view reads like bytes, and the copy costs as much
            # as the checksums.
            self._buffer, self._buffer_at = cast(bytes, kept[0]) if len(kept) == 1 else b"".join(kept), 0

    def _next_range(self) -> memoryview:
        data = self._stream.next()
        if data is None:
            raise DataError("an object that is cut short")
        if self._stream.has_surplus:
            raise DataError(f"an object that is longer than the {self.descriptor.size} bytes of its descriptor")
        return data

    def _decode_one(self) -> _Decoded:
        if not self._is_bound:
            return self._decode_header()
        return self._decode_frames() if self.descriptor.codec == "none" else self._decode_block()

    def _decode_frames(self) -> _Decoded:
        frames, end, stop = scan(self._buffer, self._buffer_at, self.offset - self._added)
        if frames.count:
            frames = self._with_offsets(frames)
            return _Decoded(frames, frames.next_offset, end - self._buffer_at)
        if stop not in (Stop.PARTIAL, Stop.END):
            raise DataError(stop.reason)
        needed = HEADER_BYTES
        if len(self._buffer) - self._buffer_at >= HEADER_BYTES:
            needed += HEADER.unpack_from(self._buffer, self._buffer_at)[1]
        return _Decoded(None, self.offset, 0, needed)

    def _with_offsets(self, frames: Frames) -> Frames:
        if not self._added:
            return frames
        if self._payloads_only:
            return msgspec.structs.replace(frames, first_offset=self.offset)
        return frames.renumbered(self.offset)

    def _decode_block(self) -> _Decoded:
        header = blocks.parse_header(
            *(self._buffer, self._buffer_at, self.offset), self.descriptor.raw_size, self._most_frame_bytes
        )
        if header is None:
            return _Decoded(None, self.offset, 0, blocks.HEADER_BYTES)
        end = self._buffer_at + header.size
        if end > len(self._buffer):
            return _Decoded(None, self.offset, 0, header.size)
        block = memoryview(self._buffer)[self._buffer_at : end]
        if header.next_offset <= self._wanted_offset:
            blocks.check_block(block)
            return _Decoded(None, header.next_offset, header.size)
        return _Decoded(blocks.decode_block(header, block), header.next_offset, header.size)


_logger = logging.getLogger("tidelog.cold")
OnGap = Literal["raise", "skip"]


class History:
    """The cold half of one topic. Threads may share it; `executor` fetches ahead for all readers."""

    def __init__(
        self,
        catalog: Catalog,
        objects: ObjectStore,
        executor: Executor,
        *,
        counters: ColdReadCounters | None = None,
        settings: FetchSettings | None = None,
        payloads_only: bool = False,
    ) -> None:
        """`payloads_only`: whether those who get frames use nothing but their payloads and `first_offset`."""
        self.payloads_only = payloads_only
        self.catalog = catalog
        self.objects = objects
        self.counters = counters or ColdReadCounters()
        self.fetcher = Fetcher(objects, executor, self.counters, settings or FetchSettings.of(objects.settings))

    def read(self, offset: int, stop_offset: int, *, on_gap: OnGap = "raise") -> HistoryReader:
        """A reader from `offset` up to `stop_offset` (exclusive), or to the end of what is published by then."""
        return HistoryReader(self, offset, stop_offset, on_gap)

    def frames(self, offset: int, stop_offset: int) -> Iterator[Frames]:
        """The same as frames: all of what is published of this stretch, and nothing else."""
        for batch in self.read(offset, stop_offset):
            assert batch.frames is not None, "what comes from objects is framed"
            yield batch.frames.slice(batch.start, batch.stop)

    def offset_at(self, time_field: int, time_us: int, below_offset: int) -> int | None:
        """The first offset whose time, at this byte of its payload, is `time_us` or later.

        None when there is none, or when it is in an object that begins at or after `below_offset`.
        """
        with self.counters.query():
            first = self.catalog.first_for_time(time_us)
        if first is None or first.start_offset >= below_offset:
            return None
        start = max(first.start_offset, self.catalog.start_offset())
        for descriptor in self.catalog.walk(start):
            if descriptor.start_offset >= below_offset:
                break
            if descriptor.last_time_us is not None and descriptor.last_time_us >= time_us:
                found = self._first_in(max(start, descriptor.start_offset), descriptor, time_field, time_us)
                if found is not None:
                    return found
        return None

    def _first_in(self, offset: int, descriptor: Descriptor, time_field: int, time_us: int) -> int | None:
        for frames in self.frames(offset, descriptor.next_offset):
            found = frames.first_at_least(time_field, time_us, 0)
            if found is not None:
                return frames.first_offset + found
        return None


class HistoryReader:
    """A position in history. Each reader is independent; one reader is for one thread at a time."""

    def __init__(self, history: History, offset: int, stop_offset: int, on_gap: OnGap = "raise") -> None:
        self.offset = offset
        self._catalog = history.catalog
        self._fetcher = history.fetcher
        self._payloads_only = history.payloads_only
        self._counters = history.counters
        self._stop_offset = stop_offset
        self._on_gap = on_gap
        self._object: ObjectFrames | None = None
        self._following: deque[ObjectFrames] = deque()
        self._objects_read = 0
        self._closed = False
        self._reading = Lock()

    @property
    def reached_stop(self) -> bool:
        return self.offset >= self._stop_offset

    def __iter__(self) -> Iterator[Batch]:
        """All that is left, in batches; it is closed then."""
        try:
            while (batch := self.next_batch()) is not None:
                yield batch
        finally:
            self.close()

    def next_batch(self) -> Batch | None:
        """The next messages; None at the stop, or when nothing after `offset` is published."""
        try:
            with self._reading:
                return self._next_batch()
        finally:
            if self._closed:
                self._let_go()

    def close(self) -> None:
        """Releases the ranges in flight. Another thread may close it: a read in progress then releases them itself."""
        self._closed = True
        self._let_go()

    def _let_go(self) -> None:
        if self._reading.acquire(blocking=False):
            self._leave_object()
            self._forget_following()
            self._reading.release()

    def _next_batch(self) -> Batch | None:
        while self.offset < self._stop_offset and not self._closed:
            source = self._object or self._open_object()
            if source is None:
                return None
            batch = self._batch_from(source)
            if batch is not None:
                return batch
        return None

    def _batch_from(self, source: ObjectFrames) -> Batch | None:
        """None when the object is used up, or when what is missing of it was passed over."""
        try:
            frames = source.next_frames()
        except NotFoundError:
            self._leave_object()
            self._settle_missing(self.offset, source.descriptor.end_offset, source)
            return None
        except CorruptionError as damage:
            self._settle_damage(source, damage)
            return None
        if frames is None:
            self._leave_object()
            return None
        batch = framed_batch(frames, self.offset, self._stop_offset)
        self.offset = batch.next_offset
        return batch

    # From object to object

    def _open_object(self) -> ObjectFrames | None:
        while self.offset < self._stop_offset:
            descriptor = self._find_descriptor()
            if descriptor is None:
                self._refuse_if_no_longer_kept()
                return None
            if descriptor.start_offset <= self.offset:
                return self._opened(descriptor)
            self._settle_missing(self.offset, descriptor.start_offset - 1, None)
        return None

    def _find_descriptor(self) -> Descriptor | None:
        """After an object the next one has the key of this offset; otherwise it is searched for."""
        with self._counters.query():
            if self._objects_read:
                found = self._catalog.find(self.offset)
                if found is not None and isinstance(found.value, Descriptor):
                    return found.value
            return next(self._catalog.walk(self.offset), None)

    def _opened(self, descriptor: Descriptor) -> ObjectFrames:
        self._counters.opened()
        # A reader that has read an object to its end reads the next one too.
        ahead = self._objects_read > 0
        self._object = self._taken_of_following(descriptor) or self._frames_of(descriptor, self.offset, ahead=ahead)
        self._objects_read += 1
        if ahead:
            self._begin_following(descriptor)
        return self._object

    def _frames_of(self, descriptor: Descriptor, offset: int, *, ahead: bool) -> ObjectFrames:
        key = self._catalog.keys.object(descriptor.name)
        return ObjectFrames(
            *(self._fetcher, key, descriptor, offset, self._stop_offset),
            ahead=ahead,
            payloads_only=self._payloads_only,
        )

    # Small objects: while one is read, those that follow come. Of a large one, its own ranges do.

    def _begin_following(self, descriptor: Descriptor) -> None:
        """Begins to fetch what follows an object, if where it is need not be asked for."""
        settings = self._fetcher.settings
        last = self._following[-1].descriptor if self._following else descriptor
        while len(self._following) < settings.read_ahead_ranges and descriptor.size <= settings.range_bytes:
            following = self._catalog.known(last.next_offset)
            if following is None or following.start_offset >= self._stop_offset:
                return
            begun = self._frames_of(following, following.start_offset, ahead=True)
            begun.begin()
            self._following.append(begun)
            last = following

    def _taken_of_following(self, descriptor: Descriptor) -> ObjectFrames | None:
        """The same object, if it is the next of those that come; otherwise none of them is wanted any more."""
        following = self._following[0].descriptor if self._following else None
        if following is None or following != descriptor or self.offset != descriptor.start_offset:
            self._forget_following()
            return None
        return self._following.popleft()

    def _forget_following(self) -> None:
        while self._following:
            self._following.popleft().close()

    def _leave_object(self) -> None:
        source, self._object = self._object, None
        if source is not None:
            source.close()

    # What is damaged

    def _settle_damage(self, source: ObjectFrames, damage: CorruptionError) -> None:
        """Returns when reading can continue after the damage; raises if wanted offsets are damaged."""
        if isinstance(damage, OtherLogError):
            raise damage
        if self._on_gap == "raise" and source.offset >= self.offset:
            raise _damage_error(damage, source.key)
        source.skip_damage()
        first, next_offset = self.offset, min(source.offset, self._stop_offset)
        if first >= next_offset:
            return
        if self._on_gap == "raise":
            self._leave_object()  # the next call reaches the same point, and raises again
            raise _damage_error(damage, source.key)
        _logger.warning("%s: %s damaged and passed over: %s", source.key, offsets_text(first, next_offset - 1), damage)
        self._pass_over(next_offset)

    # What is missing

    def _settle_missing(self, first: int, last: int, gone: ObjectFrames | None) -> None:
        """Returns when there is something to go on with: the catalog says something else now, or it is passed over."""
        with self._counters.query():
            found = self._catalog.at(first)
        if found is not None and (gone is None or found.object_id != gone.descriptor.object_id):
            return
        if self._refuse_if_no_longer_kept():
            return
        if self._on_gap == "raise":
            raise _gap_error(first, last, None if gone is None else gone.key)
        self._pass_over(last + 1)

    def _refuse_if_no_longer_kept(self) -> bool:
        """Whether retention has removed the offset, and it was passed over; raises if it may not be."""
        with self._counters.query():
            start = self._catalog.start_offset()
        if self.offset >= start:
            return False
        if self._on_gap == "raise":
            message = f"offset {self.offset} is no longer kept; the oldest is {start}"
            raise OffsetOutOfRangeError(message, operation="read", hint=f"Read on from {start}")
        self._pass_over(start)
        return True

    def _pass_over(self, offset: int) -> None:
        reached = min(offset, self._stop_offset)
        self._counters.skipped(reached - self.offset)
        self.offset = reached


def _damage_error(damage: CorruptionError, key: str) -> CorruptionError:
    around = 'on_gap="skip", --skip-gaps of tidelog consume, or failOnDataLoss=false in Spark'
    hint = f"{damage.hint}. To leave out exactly what is damaged: {around}"
    return CorruptionError(damage.reason, path=key, byte=damage.byte, operation=damage.operation, hint=hint)


def _gap_error(first: int, last: int, key: str | None) -> GapError:
    what = "no object in the catalog has them" if key is None else "their object is not in the store"
    return GapError(
        f"{offsets_text(first, last)} missing in the history: {what}",
        first=first,
        last=last,
        path=key,
        hint=f'Put the object back, or read on from {last + 1}, or with on_gap="skip"',
    )
