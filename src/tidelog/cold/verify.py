"""Reads a whole object to verify it: every frame, and what a descriptor of it has to say.

Invariants
- Nothing but the name, the size and the bytes is trusted, and all of them must agree.
- One range is in memory, or one frame or block where that is larger, up to `most_frame_bytes`; one more with threads
  that read ahead.
- Bytes that fail verification are fetched once more: a bad transfer is not a bad object.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import Generic, NamedTuple, TypeVar

import msgspec

from tidelog.cold import blocks
from tidelog.cold.catalog import (
    MAX_BLOCK_BYTES,
    Catalog,
    Codec,
    Descriptor,
    Owner,
    SealedMarker,
    decode_descriptor,
    largest_frame_bytes,
)
from tidelog.cold.fetch import check_frame_size
from tidelog.cold.reader import History
from tidelog.cold.upload import OffsetIndexBuilder, checksum_text
from tidelog.errors import ConflictError, CorruptionError, DataError, NotFoundError, OtherLogError
from tidelog.findings import UNREADABLE, About, Finding
from tidelog.log.binding import BINDING_BYTES, check_binding, decode_binding
from tidelog.log.frame import HEADER, HEADER_BYTES, Frames, Stop, crc32, scan
from tidelog.log.verify import UNREADABLE_FIX, Unreadable
from tidelog.store.keys import ObjectId, TopicKeys
from tidelog.store.metadata.base import Entry
from tidelog.store.object_store import ObjectInfo, ObjectStore

RANGE_BYTES = 4 << 20
# Called with each piece of frames found to be good, and the byte of the object at which the piece begins.
OnFrames = Callable[[Frames, int], None]
_Result = TypeVar("_Result")


class _Piece(NamedTuple):
    """Good frames that take so many bytes of the object."""

    frames: Frames
    size: int


class ObjectCheck:
    """One pass over one object. `time_field` is where its payloads have their time.

    `log_id` is that of the log that it must belong to; None: it says so itself. `ahead` reads the range after the one
    that is looked at.
    """

    def __init__(
        self,
        objects: ObjectStore,
        info: ObjectInfo,
        name: ObjectId,
        log_id: str | None,
        time_field: int | None,
        on_bytes: Callable[[int], None] | None = None,
        on_frames: OnFrames | None = None,
        *,
        most_frame_bytes: int,
        ahead: Executor | None = None,
    ) -> None:
        self._objects = objects
        self._executor = ahead
        self._ahead: tuple[int, Future[memoryview]] | None = None
        self._info = info
        self._name = name
        self._log_id = log_id
        self._time_field = time_field
        self._on_bytes = on_bytes
        self._on_frames = on_frames
        self._most_frame_bytes = max(most_frame_bytes, MAX_BLOCK_BYTES)
        self._largest_bytes: int | msgspec.UnsetType = msgspec.UNSET
        self._codec: Codec = "none"
        self._offset = name.start
        self._position = 0
        self._added = 0
        self._buffer = b""
        self._at = 0
        self._crc = 0
        self._raw_size = 0
        self._index = OffsetIndexBuilder()
        self._times: tuple[int, int] | None = None

    def descriptor(self) -> Descriptor:
        """Reads everything. CorruptionError names the byte at which it is not what its name says."""
        self._retried(self._check_header)
        self._skip_header()
        self._retried(self._sniff)
        while self._position < self._info.size:
            piece = self._retried(self._next_piece)
            self._take(piece)
        if self._offset != self._name.end + 1:
            raise self._damage(f"the end, where offset {self._offset} has to come")
        first_time_us, last_time_us = self._times or (None, None)
        return Descriptor(
            object_id=str(self._name),
            start_offset=self._name.start,
            end_offset=self._name.end,
            first_time_us=first_time_us,
            last_time_us=last_time_us,
            reached_time_us=last_time_us,
            size=self._info.size,
            raw_size=self._raw_size,
            etag=self._info.etag,
            checksum=checksum_text(self._crc),
            codec=self._codec,
            epoch=self._name.epoch,
            created_us=self._info.modified_us,
            log_id=self._log_id or "",
            offset_index=self._index.entries(),
            largest_bytes=self._largest_bytes,
        )

    def _take(self, piece: _Piece) -> None:
        frames, stored = piece.frames, memoryview(self._buffer)[self._at : self._at + piece.size]
        if self._codec == "none":
            self._index.add_frames(frames, self._position - self._at)
        else:
            self._index.add_block(frames.first_offset, self._position)
        self._crc = crc32(stored, self._crc)
        self._raw_size += frames.end - frames.start_of(0)
        self._learn_times(frames)
        self._largest_bytes = largest_frame_bytes(frames, self._largest_bytes)
        if self._on_frames is not None:
            self._on_frames(frames.renumbered(self._offset) if self._added else frames, self._position)
        self._offset = frames.next_offset
        self._at += piece.size
        self._position += piece.size
        if self._on_bytes is not None:
            self._on_bytes(piece.size)

    def _learn_times(self, frames: Frames) -> None:
        found = None if self._time_field is None else frames.field_range(self._time_field)
        if found is not None:
            known = self._times or found
            self._times = min(known[0], found[0]), max(known[1], found[1])

    # Decoding

    def _check_header(self) -> None:
        self._fill(BINDING_BYTES)
        self._log_id = self._log_id or decode_binding(self._buffer).log_id
        self._added = check_binding(self._buffer, self._info.key, self._log_id, self._name.start)

    def _skip_header(self) -> None:
        self._crc = crc32(self._buffer[:BINDING_BYTES])
        self._at = self._position = BINDING_BYTES
        if self._on_bytes is not None:
            self._on_bytes(BINDING_BYTES)

    def _sniff(self) -> None:
        self._fill(min(HEADER_BYTES, max(1, self._info.size - BINDING_BYTES)))
        codec = blocks.sniff_codec(self._buffer[self._at :], self._name.start - self._added)
        if codec is None:
            raise DataError("the object begins neither with a frame nor with a block of the offset in its name")
        self._codec = codec

    def _next_piece(self) -> _Piece:
        piece = None
        while piece is None:
            piece = self._frames() if self._codec == "none" else self._block()
        if piece.frames.next_offset > self._name.end + 1:
            raise DataError(f"more messages than up to offset {self._name.end}")
        return piece

    def _frames(self) -> _Piece | None:
        frames, end, stop = scan(self._buffer, self._at, self._offset - self._added)
        if frames.count:
            return _Piece(msgspec.structs.replace(frames, first_offset=self._offset), end - self._at)
        if stop not in (Stop.PARTIAL, Stop.END):
            raise DataError(stop.reason)
        needed = HEADER_BYTES
        if len(self._buffer) - self._at >= HEADER_BYTES:
            needed += int(HEADER.unpack_from(self._buffer, self._at)[1])
        if self._position + needed <= self._info.size:
            check_frame_size(needed, self._most_frame_bytes)
        self._fill(needed)
        return None

    def _block(self) -> _Piece | None:
        header = blocks.parse_header(self._buffer, self._at, self._offset, None, self._most_frame_bytes)
        needed = blocks.HEADER_BYTES if header is None else header.size
        if header is None or len(self._buffer) - self._at < needed:
            self._fill(needed)
            return None
        block = memoryview(self._buffer)[self._at : self._at + needed]
        return _Piece(blocks.decode_block(header, block), needed)

    # Bytes

    def _fill(self, needed: int) -> None:
        """Reads so many bytes after the position into the buffer, and the rest of the range."""
        if self._position + needed > self._info.size:
            raise DataError("a frame or block that is cut short")
        parts: list[bytes | memoryview] = [memoryview(self._buffer)[self._at :]]
        size = len(parts[0])
        while size < needed:
            data = self._read(self._position + size)
            parts.append(data)
            size += len(data)
        self._buffer, self._at = b"".join(parts), 0

    def _read(self, start: int) -> memoryview:
        length = self._range_bytes(start)
        try:
            data = self._fetched(start, length)
        except NotFoundError as error:
            raise ConflictError(
                f"{self._info.key} was deleted while it was read", operation="rebuild", hint="Try again"
            ) from error
        if len(data) != length:
            raise DataError("an object that is shorter than the store said")
        following = start + length
        if self._executor is not None and following < self._info.size:
            wanted = self._info.key, following, self._range_bytes(following)
            self._ahead = following, self._executor.submit(self._objects.read_range, *wanted)
        return data

    def _range_bytes(self, start: int) -> int:
        """The last range may be longer by a quarter: a request for what little is left costs as much as a large one."""
        left = self._info.size - start
        return left if left <= RANGE_BYTES + RANGE_BYTES // 4 else RANGE_BYTES

    def _fetched(self, start: int, length: int) -> memoryview:
        """What was read ahead, if it is that range. A second attempt at a range asks the store again."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[0] != start or ahead[1].cancel():
            return self._objects.read_range(self._info.key, start, length)
        return ahead[1].result()

    def _retried(self, step: Callable[[], _Result]) -> _Result:
        try:
            return step()
        except DataError:
            self._buffer, self._at = b"", 0
        try:
            return step()
        except OtherLogError:
            raise
        except DataError as error:
            raise self._damage(error.message, error.hint) from error

    def _damage(self, message: str, hint: str | None = None) -> CorruptionError:
        return CorruptionError(
            message,
            path=self._info.key,
            byte=self._position,
            operation="rebuild",
            hint=hint or "Put a good copy of the object in its place, or allow gaps to go on without it",
        )


# The catalog against the objects, for any log: descriptors that fit together, and objects that are what they say.
#
#     look (catalog) -> works (objects not read yet) -> check_object, here or on a worker -> look again until settled
#
# Invariants
# - A document that cannot be understood is a finding with its key, and the others are still read.
# - From the start of the log to its end every offset is in one object. A descriptor that lies inside a compacted one
#   was replaced by it and is about to be deleted: nothing is wrong with that.
# - Every object is read whole: its frames, their order, its size, its checksum, and every entry of its index must be
#   what its descriptor says. Payloads are opaque; callbacks that understand them get all good frames.
# - Concurrent retention, shipping and compaction are not findings: the catalog is read again, new objects are read too,
#   and only what is wrong twice counts.
# - A store that gives no answer raises.


_COMPARED = ("checksum", "raw_size", "codec", "first_time_us", "last_time_us", "most_frame_bytes")
# Once to see it, once more to be sure that nobody changed it at that moment, and one for what came meanwhile.
LOOKS = 3
CheckFrames = Callable[[Frames], Iterable[Finding]]
FIX = "Put a good copy of the object in its place; `tidelog topic remove-orphans` shows what is gone"


class CatalogLook(msgspec.Struct, frozen=True, kw_only=True):
    """A log's descriptors as they are at one moment, in order, and what is wrong with them."""

    start_offset: int
    descriptors: tuple[Descriptor, ...]
    replaced: tuple[Descriptor, ...]
    findings: tuple[Finding, ...] = ()

    @property
    def next_offset(self) -> int:
        return max([self.start_offset, *(one.next_offset for one in self.descriptors)])

    @property
    def object_ids(self) -> frozenset[str]:
        return frozenset(one.object_id for one in (*self.descriptors, *self.replaced))


def look_at_catalog(about: About, catalog: Catalog, first_offset: int = 0) -> CatalogLook:
    """All descriptors that count. `first_offset` is that of a log from which nothing was removed."""
    findings: list[Finding] = []
    keys = catalog.keys
    # The end before the descriptors, which grow, and the start after them: it moves before any of them goes.
    ends = _Ends(
        _document(keys.current, catalog.current, about, findings),
        _document(keys.owner, catalog.owner, about, findings),
        _document(keys.state, catalog.sealed, about, findings),
    )
    _document(keys.partitions, catalog.partitions_document().read, about, findings)
    listed = list(_descriptors(catalog, about))
    start_offset = max(first_offset, _document(keys.start, catalog.start_offset, about, findings) or 0)
    kept: list[Descriptor] = []
    replaced: list[Descriptor] = []
    for one in listed:
        if isinstance(one, Finding):
            findings.append(one)
        elif one.next_offset > start_offset:
            before = kept[-1] if kept else None
            is_inside = before is not None and one.end_offset <= before.end_offset
            is_replaced = is_inside and before is not None and before.name.generation > one.name.generation
            (replaced if is_replaced else kept).append(one)
    look = CatalogLook(start_offset=start_offset, descriptors=tuple(kept), replaced=tuple(replaced))
    findings += [*_check_order(look, catalog, about), *_check_ends(look, catalog, about, ends)]
    return msgspec.structs.replace(look, findings=tuple(findings))


class _Ends(NamedTuple):
    """What says how far a log goes, beside its descriptors."""

    current: tuple[int, str] | None
    owner: tuple[Owner, str] | None
    sealed: SealedMarker | None


def _document(key: str, read: Callable[[], _Result], about: About, findings: list[Finding]) -> _Result | None:
    """A document of the catalog; None and a finding if it cannot be understood."""
    try:
        return read()
    except DataError as error:
        findings.append(_not_understood(key, error, about))
        return None


def _not_understood(key: str, error: DataError, about: About) -> Finding:
    found = about.finding("catalog", key, error.message)
    if about.unit != "offset":  # an engine's catalog is not made from its objects alone
        return found
    fix = f"`tidelog topic rebuild-catalog {about.subject} --replace` rebuilds the catalog from the objects"
    return msgspec.structs.replace(found, fix=fix)


def _descriptors(catalog: Catalog, about: About) -> Iterator[Descriptor | Finding]:
    for entry in _entries(catalog, about):
        start = None if isinstance(entry, Finding) else catalog.keys.parse_descriptor(entry.key)
        if isinstance(entry, Finding):
            yield entry
        elif start is not None:
            try:
                found = decode_descriptor(entry.value, entry.key, start)
            except DataError as error:
                yield _not_understood(entry.key, error, about)
            else:
                yield from [found] if isinstance(found, Descriptor) else []


def _entries(catalog: Catalog, about: About) -> Iterator[Entry | Finding]:
    """Documents below the prefix of descriptors; one at a time if not all of them can be read."""
    metadata, keys = catalog.metadata, catalog.keys
    with contextlib.suppress(DataError):
        yield from metadata.range(keys.segments_prefix)
        return
    for key in metadata.keys(keys.segments_prefix):
        if keys.parse_descriptor(key) is not None:
            try:
                found = metadata.get(key)
            except DataError as error:
                yield _not_understood(key, error, about)
            else:
                yield from [] if found is None else [found]


def _check_order(look: CatalogLook, catalog: Catalog, about: About) -> Iterator[Finding]:
    expected, reached = look.start_offset, None
    for number, one in enumerate(look.descriptors):
        start, key = one.start_offset, catalog.keys.descriptor(one.start_offset)
        if start > expected:
            yield about.finding("catalog", key, "a gap: no object has the range before it", expected, start - 1)
        elif start < expected and number:
            last = min(expected, one.next_offset) - 1
            yield about.finding("catalog", key, "an overlap: the object before it has this range too", start, last)
        if reached is not None and (one.reached_time_us is None or one.reached_time_us < reached):
            reason = f"its reached_time_us is {one.reached_time_us}, and objects before it reach {reached}"
            yield about.finding("catalog", key, reason, start, one.end_offset)
        expected = max(expected, one.next_offset)
        reached = max(filter(None, (reached, one.reached_time_us)), default=None)


def _check_ends(look: CatalogLook, catalog: Catalog, about: About, ends: _Ends) -> Iterator[Finding]:
    """`cur` is a hint, but it was written together with a descriptor: one that is missing has been lost."""
    end, owner, sealed = look.next_offset, ends.owner, ends.sealed
    if ends.current is not None and ends.current[0] >= end:
        reason = "the newest descriptor was published, and is gone"
        yield about.finding("catalog", catalog.keys.descriptor(ends.current[0]), reason, end, ends.current[0])
    if sealed is None or not sealed.sealed or owner is None or owner[0].epoch != sealed.epoch:
        return
    if sealed.last_committed_offset is not None and sealed.last_committed_offset >= end:
        reason = "it was sealed with more than the objects have"
        yield about.finding("catalog", catalog.keys.state, reason, end, sealed.last_committed_offset)


class ObjectFinding(msgspec.Struct, frozen=True, kw_only=True):
    """What was found in an object. Those who read more out of it derive from this."""

    object_id: str
    size: int = 0
    is_gone: bool = False
    """Missing, or deleted while it was read: the caller knows the catalog, and whether it should exist."""
    is_rewritten: bool = False
    """The bytes are right, and yet it is not the object that was uploaded."""
    findings: tuple[Finding, ...] = ()


def check_object(
    objects: ObjectStore,
    keys: TopicKeys,
    descriptor: Descriptor,
    about: About,
    *,
    time_field: int | None = None,
    on_bytes: Callable[[int], None] | None = None,
    unreadable: Unreadable | None = None,
    check: CheckFrames | None = None,
    ahead: Executor | None = None,
) -> ObjectFinding:
    """Reads all of an object, with `ahead` a range ahead. `unreadable` and `check` get all good frames."""
    reading = _ObjectReading(objects, keys.object(descriptor.name), descriptor, about, unreadable, check)
    try:
        reading.run(time_field, on_bytes, ahead)
    except (NotFoundError, ConflictError):  # the second: while it was read
        return ObjectFinding(object_id=descriptor.object_id, is_gone=True)
    return ObjectFinding(
        object_id=descriptor.object_id,
        size=descriptor.size,
        is_rewritten=reading.is_rewritten,
        findings=tuple(reading.findings),
    )


class _ObjectReading:
    """One object against its descriptor."""

    def __init__(
        self,
        objects: ObjectStore,
        key: str,
        descriptor: Descriptor,
        about: About,
        unreadable: Unreadable | None,
        check: CheckFrames | None,
    ) -> None:
        self._objects = objects
        self._key = key
        self._descriptor = descriptor
        self._about = about
        self._unreadable = unreadable
        self._check = check
        self._entries = list(descriptor.offset_index)
        self.findings: list[Finding] = []
        self.is_rewritten = False

    def run(
        self, time_field: int | None, on_bytes: Callable[[int], None] | None, ahead: Executor | None = None
    ) -> None:
        """Raises NotFoundError or ConflictError when it is gone."""
        said, info = self._descriptor, self._objects.head(self._key)
        if info.size != said.size:
            self._add(f"it has {info.size} bytes, its descriptor says {said.size}")
        reading = ObjectCheck(
            *(self._objects, info, said.name, said.log_id, time_field, on_bytes),
            on_frames=self._take,
            most_frame_bytes=said.most_frame_bytes,
            ahead=ahead,
        )
        try:
            found = reading.descriptor()
        except CorruptionError as error:
            if info.size == said.size:  # else that is why
                self._add(error.reason, error.byte)
            return
        for field in _COMPARED:
            if getattr(said, field) != getattr(found, field):
                self._add(f"its {field} is {getattr(found, field)}, its descriptor says {getattr(said, field)}")
        self.is_rewritten = found.etag != said.etag and not self.findings

    def _add(self, reason: str, byte: int | None = None) -> None:
        first, last = self._descriptor.start_offset, self._descriptor.end_offset
        self.findings.append(self._about.finding("object", self._key, reason, first, last, byte=byte))

    def _take(self, frames: Frames, position: int) -> None:
        if self._check is not None:
            self.findings += self._check(frames)
        for index, reason in () if self._unreadable is None else self._unreadable(frames):
            offset, byte = frames.first_offset + index, self._place_of(frames, position, frames.first_offset + index)
            found = self._about.finding(UNREADABLE, self._key, reason, offset, offset, byte=byte or position)
            self.findings.append(msgspec.structs.replace(found, fix=UNREADABLE_FIX))
        while self._entries and self._entries[0][0] < frames.next_offset:
            offset, byte = self._entries.pop(0)
            if byte != self._place_of(frames, position, offset):
                self._entries.clear()
                unit = self._about.unit
                self._add(f"the index of its descriptor says that {unit} {offset} is at byte {byte}, where it is not")

    def _place_of(self, frames: Frames, position: int, offset: int) -> int | None:
        """Where an entry of the index for this offset has to point; None where there can be none."""
        if self._descriptor.codec != "none":
            return position if offset == frames.first_offset else None
        if offset < frames.first_offset:
            return None
        return position + frames.start_of(offset - frames.first_offset) - frames.start_of(0)


Found = TypeVar("Found", bound=ObjectFinding)


class ColdCheck(Generic[Found]):
    """What is known of a log in the store so far. The reader of the objects puts the results into `found`."""

    def __init__(self, about: About, catalog: Catalog, first_offset: int = 0) -> None:
        self.about = about
        self.catalog = catalog
        self.seen: CatalogLook | None = None
        """The catalog as it was looked at."""
        self.found: dict[str, Found] = {}
        self._first_offset = first_offset
        self._wrong_before: list[Finding | str] = []

    @property
    def descriptors(self) -> tuple[Descriptor, ...]:
        """Those that count."""
        return () if self.seen is None else self.seen.descriptors

    @property
    def next_offset(self) -> int:
        return 0 if self.seen is None else self.seen.next_offset

    def look(self) -> None:
        """Reads the catalog, again. What was gone before is looked for once more."""
        self._wrong_before = self._wrong
        self.seen = look_at_catalog(self.about, self.catalog, self._first_offset)
        self.found = {name: one for name, one in self.found.items() if not one.is_gone}

    def works(self) -> list[Descriptor]:
        """Objects that have not been read yet."""
        return [one for one in self.descriptors if one.object_id not in self.found]

    @property
    def is_settled(self) -> bool:
        """Whether another look would show nothing else: nothing is wrong, or it stays so."""
        return not self._wrong or self._wrong == self._wrong_before

    @property
    def _wrong(self) -> list[Finding | str]:
        """What may be wrong only because somebody changed it meanwhile."""
        findings = () if self.seen is None else self.seen.findings
        return [*findings, *sorted(name for name, one in self.found.items() if one.is_gone)]

    def read(self) -> list[Found]:
        return [one for descriptor in self.descriptors if (one := self.found.get(descriptor.object_id)) is not None]

    def counts(self) -> dict[str, int]:
        """How much was read."""
        good = {one.object_id for one in self.read() if not one.is_gone}
        counted = [one for one in self.descriptors if one.object_id in good]
        return {
            "objects": len(counted),
            "object_messages": sum(one.count for one in counted),
            "object_bytes": sum(one.size for one in counted),
        }

    def findings(self) -> Iterator[Finding]:
        """All that is wrong, in the order of the catalog."""
        yield from () if self.seen is None else self.seen.findings
        for descriptor in self.descriptors:
            one = self.found.get(descriptor.object_id)
            if one is not None and not one.is_gone:
                yield from one.findings
                continue
            key, first, last = self.catalog.keys.object(descriptor.name), descriptor.start_offset, descriptor.end_offset
            yield self.about.finding("object", key, "the object is missing", first, last)


def check_cold(
    catalog: Catalog,
    objects: ObjectStore,
    about: About,
    time_field: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    unreadable: Unreadable | None = None,
) -> ColdCheck[ObjectFinding]:
    """Reads every object that the catalog names. `on_progress` is called with how many bytes of how many were read."""
    check: ColdCheck[ObjectFinding] = ColdCheck(about, catalog)
    done = 0

    def on_bytes(size: int) -> None:
        nonlocal done
        done += size
        on_progress(done, sum(one.size for one in check.descriptors))

    for _ in range(LOOKS):
        check.look()
        for one in check.works():
            check.found[one.object_id] = check_object(
                *(objects, catalog.keys, one, about), time_field=time_field, on_bytes=on_bytes, unreadable=unreadable
            )
        if check.is_settled:
            break
    return check


# The store's copy of a log that is damaged on the disk: a repair restores from it.
#
# Invariants
# - Only objects up to the epoch of the files count. Those of a later owner are other messages under the same offsets.
# - Everything reported as available has been read and verified just before. A store that gives no answer raises; an
#   object that is gone or damaged itself counts as unavailable.


_logger = logging.getLogger("tidelog.cold")


class ColdCopy:
    """The history of a topic, for files that were written up to an epoch."""

    def __init__(self, history: History, epoch: int) -> None:
        self._history = history
        self._epoch = epoch

    def ranges(self, first: int, last: int) -> list[tuple[int, int]]:
        """What of these offsets can be read from the store, as stretches of (first, last)."""
        found: list[tuple[int, int]] = []
        begin = max(first, self._history.catalog.start_offset())
        for descriptor in self._history.catalog.walk(begin):
            if descriptor.start_offset > last:
                break
            start = max(begin, descriptor.start_offset)
            until = min(last + 1, descriptor.written_until(self._epoch))
            reached = self._checked(start, until - 1) if start < until else start
            if reached == start:
                continue
            if found and found[-1][1] + 1 == start:
                start = found.pop()[0]
            found.append((start, reached - 1))
        return found

    def _checked(self, first: int, last: int) -> int:
        """How far it can be read: the offset after the last good one."""
        reached = first
        try:
            for payloads in self.payloads(first, last):
                reached += len(payloads)
        except (DataError, NotFoundError) as error:
            _logger.warning("the copy in the store cannot be used from offset %d on: %s", reached, error)
        return reached

    def payloads(self, first: int, last: int) -> Iterator[list[bytes]]:
        """All payloads of a stretch, some at a time."""
        for batch in self._history.read(first, last + 1):
            yield batch.payloads()
