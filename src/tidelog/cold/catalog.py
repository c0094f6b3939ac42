"""The catalog of a topic, read-only: which offsets are in which object, who owns the topic, where it begins and ends.

Invariants
- Descriptors are contiguous, so the next one has the key of the offset after this one. A missing key with a later one
  after it is a hole, and is reported as one.
- A descriptor does not change, but a rewrite replaces several by one (`rewrite_commit.py`): those that begin inside of
  it disappear under concurrent readers. Each offset is in some descriptor at any time.
- `cur` is a hint at the newest descriptor: where to start looking, never the answer.
- An error while reading is raised. Only an answer from the store can mean "nothing there".
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from threading import Lock
from typing import Annotated, Literal, NamedTuple, TypeVar

import msgspec

from tidelog.codec import JSON_ERRORS, MAX_OFFSET, from_json
from tidelog.cold.cursor import Cursor, Number
from tidelog.errors import DataError
from tidelog.log.binding import BINDING_BYTES, check_binding, is_log_id
from tidelog.log.frame import HEADER_BYTES, MAX_PAYLOAD_BYTES, Frames
from tidelog.store.document import Fence, VersionedDocument, decode_json, decode_mapping, encode_json
from tidelog.store.keys import (
    MAX_NUMBER,
    PARTITION_SUFFIX,
    FlushSource,
    ObjectId,
    TopicKeys,
    group_of_cursor,
    padded,
    parse_object_id,
    parse_padded,
    parse_topic_key,
    topics_prefix,
)
from tidelog.store.metadata.base import Entry, MetadataStore, end_of

# A descriptor: what the catalog knows about one shipped object, as JSON under the key of its first offset.
#
#     {"completed": true, "object_id": "data-0-999-e1.tlog", "start_offset": 0, "end_offset": 999, "epoch": 1, ...,
#      "log_id": "0f1e...", "offset_index": [[0, 36], [500, 65572]]}
#
#     {"completed": false, "start_offset": 1000, "epoch": 2}     a reservation: an owner holds the key, no object yet
#
# Invariants
# - `end_offset` is inclusive. The object's name agrees with its descriptor, so one can be rebuilt from the other.
# - `log_id` is that of the log that the object belongs to, and the object's header says the same. Only staged rows
#   that were written for no certain log have none: nobody stores a descriptor of them.
# - The index begins with the first frame or block, right after the header; offsets and positions grow together. With
#   `codec` "none" an entry is the position of a frame, with "zstd" that of a block.
# - Times are the least and the greatest of the messages, which need not be in order of time. `reached_time_us` is the
#   greatest of this object and of all before it, so it grows from one to the next: a time is found by bisection.
# - `epoch` is that of the owner who wrote it. A compacted object has messages of several: `epochs` lists the offset
#   from which each applies, both growing, and `epoch` is the last. Without `epochs` all of it counts as written under
#   `epoch`.
# - `largest_bytes` is the size of the largest frame, where that is over 8 MiB: a reader of the object allocates no more
#   memory for a frame than that, or than its own `max_message_bytes`, whatever the object says. So a hostile object
#   cannot exhaust memory, and what was shipped under a larger setting stays readable.
# - `position` is for logs whose readers address bytes, not offsets (an engine's): how many bytes of frames precede it.
# - An inconsistent descriptor is refused when it is read: nothing is trusted merely because it is in our store.

# Which numbers a document in a metadata store may hold. A number out of bounds was not written by tidelog.
#
# JSON has numbers of any size. Trusting an impossible one moves a topic's start past all its messages, or ends a
# process with a plain OverflowError somewhere far from the document; so each is checked when it is read.


_LEAST, _MOST = -(1 << 63), (1 << 64) - 1


def impossible_number(document: object) -> str | None:
    """The field of a document whose number has more than 64 bits, with the number; None when there is none."""
    return next((f"{path} is {number}" for path, number in _numbers(msgspec.to_builtins(document), "")), None)


def _numbers(value: object, path: str) -> Iterator[tuple[str, int]]:
    if isinstance(value, bool):
        return
    if isinstance(value, int):
        if not _LEAST <= value <= _MOST:
            yield path, value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield from _numbers(one, f"{path}.{name}" if path else str(name))
    elif isinstance(value, (list, tuple)):
        for index, one in enumerate(value):
            yield from _numbers(one, f"{path}[{index}]")


Codec = Literal["none", "zstd"]
# A compressed block of several frames has no more than this, so every reader is ready for it.
MAX_BLOCK_BYTES = 8 << 20


class Descriptor(msgspec.Struct, frozen=True, kw_only=True):
    """A published object. `size` is its size in the store, `raw_size` that of the frames in it."""

    object_id: str
    start_offset: int
    end_offset: int
    first_time_us: int | None
    last_time_us: int | None
    reached_time_us: int | None
    size: int
    raw_size: int
    etag: str
    checksum: str
    codec: Codec
    epoch: int
    created_us: int
    log_id: str
    completed: bool = True
    offset_index: tuple[tuple[int, int], ...]
    epochs: tuple[tuple[int, int], ...] | msgspec.UnsetType = msgspec.UNSET
    position: Annotated[int, msgspec.Meta(ge=0)] | msgspec.UnsetType = msgspec.UNSET
    largest_bytes: int | msgspec.UnsetType = msgspec.UNSET

    @property
    def most_frame_bytes(self) -> int:
        """A frame of it has no more bytes, header included."""
        return MAX_BLOCK_BYTES if isinstance(self.largest_bytes, msgspec.UnsetType) else self.largest_bytes

    @property
    def header_bytes(self) -> int:
        """How many bytes are before its first frame or block."""
        return BINDING_BYTES if self.log_id else 0

    def check_header(self, data: bytes | memoryview, key: str) -> int:
        """DataError unless the bytes that the object begins with bind it to its log; by name if it is another's.
        Returns what is to be added to the numbers of its frames."""
        return check_binding(data, key, self.log_id, self.start_offset) if self.log_id else 0

    @property
    def start_position(self) -> int:
        """How many bytes of frames are before it in the log; DataError where nobody wrote it down."""
        if isinstance(self.position, msgspec.UnsetType):
            raise DataError(f"the descriptor of {self.object_id} does not say its position in the log")
        return self.position

    @property
    def all_epochs(self) -> tuple[tuple[int, int], ...]:
        """From which offset on it was written under which epoch, in order."""
        return ((self.start_offset, self.epoch),) if isinstance(self.epochs, msgspec.UnsetType) else self.epochs

    def written_until(self, epoch: int) -> int:
        """The first offset of it that was written under a later epoch than this; `next_offset` when none was."""
        return next((offset for offset, written in self.all_epochs if written > epoch), self.next_offset)

    @property
    def next_offset(self) -> int:
        return self.end_offset + 1

    @property
    def count(self) -> int:
        return self.next_offset - self.start_offset

    @property
    def name(self) -> ObjectId:
        """Its object's name, taken apart."""
        name = parse_object_id(self.object_id)
        assert name is not None, "it was checked when it was read"
        return name

    def position_of(self, offset: int) -> tuple[int, int]:
        """Where to begin reading for an offset: the last entry of the index that is not after it."""
        return self.offset_index[bisect_right(self.offset_index, offset, key=_offset_of) - 1]

    def end_of(self, offset: int) -> int:
        """A byte position at or after the end of an offset's frame or block, as close as the index tells."""
        behind = bisect_right(self.offset_index, offset, key=_offset_of)
        return self.offset_index[behind][1] if behind < len(self.offset_index) else self.size


def largest_frame_bytes(frames: Frames, known: int | msgspec.UnsetType) -> int | msgspec.UnsetType:
    """`largest_bytes` of an object of which so much is known, and that has these frames too."""
    if frames.end - frames.start_of(0) <= MAX_BLOCK_BYTES:
        return known
    largest = HEADER_BYTES + max(memoryview(frames.lengths).cast("I"))
    if largest <= MAX_BLOCK_BYTES:
        return known
    return largest if isinstance(known, msgspec.UnsetType) else max(largest, known)


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """The key of an owner's next object, reserved before it accepts anything."""

    start_offset: int
    epoch: int
    completed: bool = False


def _offset_of(entry: tuple[int, int]) -> int:
    return entry[0]


def encode_descriptor(descriptor: Descriptor | Reservation) -> bytes:
    """The JSON of it."""
    return msgspec.json.encode(descriptor)


def decode_descriptor(data: bytes, key: str, start_offset: int) -> Descriptor | Reservation:
    """Decodes the entry under a descriptor's key; DataError names the key when it is invalid."""
    try:
        if not from_json(data, _Completed).completed:
            reservation = from_json(data, Reservation)
            _require(reservation.start_offset == start_offset, "its offset is not that of its key")
            _require(start_offset <= MAX_OFFSET + 1, f"its offset is {start_offset}, which cannot be")
            _require(0 <= reservation.epoch <= MAX_NUMBER, f"its epoch is {reservation.epoch}, which cannot be")
            return reservation
        descriptor = from_json(data, Descriptor)
        _check(descriptor, start_offset)
    except (*JSON_ERRORS, _WrongError) as error:
        raise DataError(
            f"the descriptor {key} cannot be understood: {error}",
            hint="`tidelog topic rebuild-catalog` rebuilds it from the objects",
        ) from error
    return descriptor


class _Completed(msgspec.Struct):
    completed: bool


class _WrongError(Exception):
    """What is wrong with a descriptor."""


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _WrongError(otherwise)


def _check(descriptor: Descriptor, start_offset: int) -> None:
    impossible = impossible_number(descriptor)
    _require(impossible is None, f"{impossible}, which cannot be")
    _require(descriptor.start_offset == start_offset, "its offset is not that of its key")
    _require(start_offset <= descriptor.end_offset, "it ends before it begins")
    _require(descriptor.end_offset <= MAX_OFFSET, f"its end_offset is {descriptor.end_offset}, which cannot be")
    name, numbers = parse_object_id(descriptor.object_id), (start_offset, descriptor.end_offset, descriptor.epoch)
    _require(name is not None and name[:3] == numbers, "the name of its object says something else")
    _require(descriptor.size > 0 and descriptor.raw_size > 0, "it has no bytes")
    _require(_largest_agrees(descriptor), f"its largest_bytes is {descriptor.largest_bytes}, which cannot be")
    _require(descriptor.epoch >= 0, f"its epoch is {descriptor.epoch}, which cannot be")
    _require(_epochs_agree(descriptor), "its epochs contradict each other")
    _require(_times_agree(descriptor), "its times contradict each other")
    index = descriptor.offset_index
    _require(is_log_id(descriptor.log_id), "it does not say which log it belongs to")
    _require(
        bool(index) and index[0] == (start_offset, descriptor.header_bytes), "its index does not begin with the object"
    )
    _require(all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(index)), "its index is not in order")
    _require(index[-1][0] <= descriptor.end_offset and index[-1][1] < descriptor.size, "its index leaves the object")


def _largest_agrees(descriptor: Descriptor) -> bool:
    largest = descriptor.largest_bytes
    if isinstance(largest, msgspec.UnsetType):
        return True
    return MAX_BLOCK_BYTES < largest <= min(descriptor.raw_size, HEADER_BYTES + MAX_PAYLOAD_BYTES)


def _epochs_agree(descriptor: Descriptor) -> bool:
    epochs = descriptor.all_epochs
    grow = all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(epochs))
    begins = bool(epochs) and epochs[0][0] == descriptor.start_offset
    return begins and grow and epochs[-1][0] <= descriptor.end_offset and epochs[-1][1] == descriptor.epoch


def _times_agree(descriptor: Descriptor) -> bool:
    first, last, reached = descriptor.first_time_us, descriptor.last_time_us, descriptor.reached_time_us
    if first is None or last is None:
        return first is last
    return reached is not None and first <= last <= reached


# The small documents that record who may write a topic and how far it is, as JSON in the metadata store.
#
#     owner                    who writes now, and under which epoch
#     state                    the sealed marker: where the last owner stopped on purpose
#     start                    the oldest offset that may be read; it never goes back
#     partitions               into how many logs it is divided, if it is
#     subscriptions/{name}     a cursor; those of consumer groups are below `_groups/`
#
# `claim` is a random number that no two claims share. An epoch orders owners; a claim tells one from every other, also
# after the topic was deleted and created again. `incarnation` is the claim whose disk has the messages that were
# accepted and not shipped: an owner that closes without having accepted anything returns it to the one before.
# `session` names the opening of the node that holds the topic (`lease.py`); it is empty once the node has released the
# topic and runs on.


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The owner of a topic. `log_id` is that of the topic: it stays with every claim, and binds files and objects.

    `flushed` stays until a later owner has flushed. `copy_of` is in a published copy alone: the metadata store's URL.
    `node_name` is what a cluster calls the node, for people.
    """

    epoch: Number
    claim: str
    incarnation: str
    node: str
    claimed_us: Number
    log_id: str
    session: str = ""
    flushed: FlushSource | None = None
    copy_of: str | msgspec.UnsetType = msgspec.UNSET
    node_name: str | msgspec.UnsetType = msgspec.UNSET

    @property
    def who(self) -> str:
        """The node, as people know it."""
        return self.node_name or self.node


class SealedMarker(msgspec.Struct, frozen=True, kw_only=True):
    """Everything up to `last_committed_offset` is in the store. None: there never was a message."""

    sealed: bool
    last_committed_offset: Annotated[int, msgspec.Meta(ge=0, le=MAX_OFFSET)] | None
    node: str
    epoch: Number
    sealed_us: Number


class StartMark(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing below `start_offset` is to be read any more; what is still there is being deleted.

    `deleted`: the whole topic is being deleted, and the next opening finishes that before anything else.
    """

    start_offset: Number
    epoch: Number
    moved_us: Number
    deleted: bool = False


class EpochStarts(msgspec.Struct, frozen=True, kw_only=True):
    """The offset at which the messages of each owner begin, as (epoch, offset); both grow.

    A reader that knows under which epoch it read a message finds out whether a later owner has lost it.
    """

    starts: tuple[tuple[Number, Number], ...] = ()

    def with_owner(self, epoch: int, next_offset: int) -> EpochStarts:
        """A new owner appends from an offset on: what earlier ones had there is lost, or was nothing."""
        kept = [start for start in self.starts if start[1] < next_offset and start[0] < epoch]
        return EpochStarts(starts=(*kept[-_MAX_EPOCH_STARTS:], (epoch, next_offset)))

    def end_of(self, epoch: int, next_offset: int) -> tuple[int, int] | None:
        """The last epoch up to this one, and where its messages end; None for one before all that are known."""
        at = bisect_right(self.starts, epoch, key=lambda start: start[0])
        if at == 0:
            return None
        return self.starts[at - 1][0], next_offset if at == len(self.starts) else self.starts[at][1]


_MAX_EPOCH_STARTS = 999
MAX_PARTITIONS = 10_000


class PartitionLayout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a topic is divided into logs.

    `has_grown`: it was a topic without partitions, whose log is partition 0. `is_deleted`: its deletion has begun, and
    is finished before anything else. `earlier_counts` are the numbers of partitions that it had before, oldest first: a
    message that is appended again may be where it belonged then.
    """

    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_PARTITIONS)]
    has_grown: bool = False
    is_deleted: bool = False
    earlier_counts: tuple[int, ...] = ()

    def grown(self, count: int) -> PartitionLayout:
        return msgspec.structs.replace(self, count=count, earlier_counts=(*self.earlier_counts, self.count))

    def log_name(self, name: str, number: int) -> str:
        """The name of the log of a partition, in the namespace of the topic."""
        return name if self.has_grown and number == 0 else f"{name}{PARTITION_SUFFIX}{number}"


class EpochFloor(msgspec.Struct, frozen=True, kw_only=True):
    """The highest epoch of a deleted topic: no epoch is used twice, so no name of an object is."""

    epoch: Number


# Known starts of objects, for a store that lists forwards only: finds the last one before an offset in a few reads.
#
# Invariants
# - It caches keys, not their values: descriptors are read when they are needed.
# - A descriptor that holds the offset is the answer, however it was found. Anything else is answered from a listing.
# - It begins with the starts that `cur` names, so that a new reader need not list a long catalog. Those are a hint:
#   some may be missing or gone. After a listing from the first key on, none is missing before the last known one,
#   since keys are added after all others. (A lost one that was put back is found from the one before it.)


# How many starts `cur` names at most; then every second one is forgotten.
MAX_NAMED_STARTS = 4096
# From a start that is known to one that is not, each step costs a read. A listing costs about as much as ten.
_MAX_STEPS = 8


def with_start(starts: list[int], start_offset: int) -> list[int]:
    """What `cur` names after an object was published: it comes after all others."""
    longer = [start for start in starts if start < start_offset] + [start_offset]
    return longer if len(longer) <= MAX_NAMED_STARTS else longer[::2]


class KnownStarts:
    """The starts that one catalog knows. Threads may share it."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._is_complete = False
        self._guard = Lock()

    def floor(self, catalog: Catalog, offset: int) -> Descriptor | None:
        """The last descriptor that begins at an offset or before it."""
        # Most offsets are in a known one. Those who ask for several of them do not wait for each other.
        start = self.nearest(catalog, offset)
        known = None if start is None else catalog.find(start)
        nearest = known.value if known is not None and isinstance(known.value, Descriptor) else None
        if nearest is not None and offset <= nearest.end_offset:
            return nearest
        with self._guard:
            found = self._nearest(catalog, offset, nearest)
            if found is not None and offset <= found.end_offset:
                return found
            if self._knows_all_before(offset) and (found is not None or offset < self._starts[0]):
                return found
            self._list(catalog, found)
            return self._last_listed(catalog, offset)

    def nearest(self, catalog: Catalog, offset: int) -> int | None:
        """The last known start at an offset or before it."""
        with self._guard:
            if not self._starts:
                self._starts = catalog.named_starts()
            index = bisect_right(self._starts, offset) - 1
            return self._starts[index] if index >= 0 else None

    def _knows_all_before(self, offset: int) -> bool:
        return self._is_complete and bool(self._starts) and offset < self._starts[-1]

    def _nearest(self, catalog: Catalog, offset: int, known: Descriptor | None) -> Descriptor | None:
        """The known one, or one a few steps after it; None when it is gone."""
        found = known or self._last_known(catalog, offset)
        for _ in range(_MAX_STEPS):
            if found is None or not found.end_offset < offset < self._starts[-1]:
                break
            behind = catalog.find(found.next_offset)
            if behind is None or not isinstance(behind.value, Descriptor):
                break
            found = behind.value
            insort(self._starts, found.start_offset)
        return found

    def _last_known(self, catalog: Catalog, offset: int) -> Descriptor | None:
        while (index := bisect_right(self._starts, offset) - 1) >= 0:
            found = catalog.find(self._starts[index])
            if found is None:
                return None
            if isinstance(found.value, Descriptor):
                return found.value
            del self._starts[index:]  # a reservation: nothing follows it, and it may be an object the next time
        return None

    def _list(self, catalog: Catalog, found: Descriptor | None) -> None:
        """Asks for all names from a descriptor on; without one, for all there are."""
        keys = catalog.keys
        first = None if found is None else keys.descriptor(found.start_offset)
        names = catalog.metadata.keys(keys.segments_prefix, start=first)
        listed = [start for name in names if (start := keys.parse_descriptor(name)) is not None]
        if found is None:
            self._starts, self._is_complete = listed, True
        else:
            self._starts = [start for start in self._starts if start < found.start_offset] + listed

    def _last_listed(self, catalog: Catalog, offset: int) -> Descriptor | None:
        while (index := bisect_right(self._starts, offset) - 1) >= 0:
            found = catalog.find(self._starts[index])
            if found is not None and isinstance(found.value, Descriptor):
                return found.value
            del self._starts[index]  # removed since it was listed, or a reservation
        return None


Document = TypeVar("Document", bound=msgspec.Struct)
_MANY = 512


class Found(NamedTuple):
    """The entry under a descriptor's key, and its version."""

    value: Descriptor | Reservation
    version: str


class Current(msgspec.Struct, frozen=True, omit_defaults=True):
    """`segments/cur`: the key of the newest descriptor, a hint; also of others where looking backwards is expensive."""

    start: str
    starts: list[int] = []


class _Named(msgspec.Struct, frozen=True):
    id: str


class _StagedNames(msgspec.Struct, frozen=True):
    """What the catalog knows of the staging document (`staging/document.py`): which staged commits it names."""

    pending: tuple[_Named, ...] = ()
    refused: tuple[_Named, ...] = ()


class Catalog:
    """The catalog of one topic in the metadata store. Threads may share it."""

    def __init__(self, metadata: MetadataStore, keys: TopicKeys) -> None:
        self.metadata = metadata
        self.keys = keys
        self._starts = KnownStarts()

    # Documents

    def owner(self) -> tuple[Owner, str] | None:
        """The owner, and the version of that entry; None for a topic that never had an owner."""
        return self.owner_document().read()

    def sealed(self) -> SealedMarker | None:
        found = self.document(self.keys.state, SealedMarker).read()
        return None if found is None else found[0]

    def sealed_by(self, owner: Owner | None) -> SealedMarker | None:
        """The marker of a topic that is sealed now; one of an earlier owner is not believed."""
        marker = None if owner is None else self.sealed()
        is_believed = marker is not None and owner is not None and marker.sealed and marker.epoch == owner.epoch
        return marker if is_believed else None

    def start_mark(self) -> tuple[StartMark, str] | None:
        return self.document(self.keys.start, StartMark).read()

    def start_offset(self) -> int:
        """The oldest offset that may be read."""
        found = self.start_mark()
        return 0 if found is None else found[0].start_offset

    def cursor(self, name: str) -> tuple[Cursor, str] | None:
        """How far a subscription or a consumer group (`group_cursor`) is; None when there is none of that name."""
        return self.document(self.keys.subscription(name), Cursor).read()

    def subscriptions(self) -> list[str]:
        return [name for name in self.cursors() if group_of_cursor(name) is None]

    def groups(self) -> list[str]:
        """The names of all consumer groups that have committed an offset."""
        return [group for name in self.cursors() if (group := group_of_cursor(name)) is not None]

    def group_cursors(self) -> dict[str, Cursor | DataError]:
        """The cursors of all consumer groups; an error in place of one that cannot be understood."""
        return self._decoded_groups(self.metadata.range(self.keys.groups_prefix))

    def _decoded_groups(self, entries: Iterable[Entry]) -> dict[str, Cursor | DataError]:
        found: dict[str, Cursor | DataError] = {}
        for entry in entries:
            if (group := self.keys.parse_group(entry.key)) is not None:
                try:
                    found[group] = decode_json(entry.value, entry.key, Cursor)
                except DataError as error:
                    found[group] = error
        return found

    def cursors(self) -> list[str]:
        """What `cursor` takes, of subscriptions and of consumer groups."""
        keys = self.metadata.keys(self.keys.subscriptions_prefix)
        return [name for key in keys if (name := self.keys.parse_cursor(key)) is not None]

    def staged_commits(self) -> set[str]:
        """The names of all staged commits whose objects are still needed, or may be looked at."""
        found = self.document(self.keys.staging, _StagedNames).read()
        return set() if found is None else {one.id for one in (*found.value.pending, *found.value.refused)}

    def epoch_floor(self) -> int:
        """The highest epoch that a deleted topic of this installation had."""
        found = self.document(self.keys.epoch_floor, EpochFloor).read()
        return 0 if found is None else found[0].epoch

    def owner_document(self) -> VersionedDocument[Owner]:
        """The owner document of the topic, for claiming it."""
        return self.document(self.keys.owner, Owner)

    def start_document(self, fence: Fence | None = None) -> VersionedDocument[StartMark]:
        """The start document of the topic, for moving its start."""
        return self.document(self.keys.start, StartMark, fence)

    def settings_document(self) -> VersionedDocument[dict[str, object]]:
        """The topic's own settings."""
        return VersionedDocument(self.metadata, self.keys.settings, msgspec.json.encode, decode_mapping)

    def partitions_document(self, fence: Fence | None = None) -> VersionedDocument[PartitionLayout]:
        """How the topic is divided into partitions."""
        return self.document(self.keys.partitions, PartitionLayout, fence)

    def document(self, key: str, kind: type[Document], fence: Fence | None = None) -> VersionedDocument[Document]:
        """One of the topic's documents, to be read or to be changed."""
        return VersionedDocument(
            self.metadata, key, encode_json, lambda data, key: decode_json(data, key, kind), fence=fence
        )

    def find(self, start_offset: int) -> Found | None:
        """What is under the key of this offset, reservations included."""
        entry = self.metadata.get(self.keys.descriptor(start_offset))
        return None if entry is None else self._decoded(entry)

    def known(self, start_offset: int) -> Descriptor | None:
        """The object that begins with an offset, if the store need not be asked for it."""
        return None

    def find_many(self, start_offsets: Iterable[int]) -> dict[int, Found]:
        """The same of many offsets at once: those under whose keys there is something."""
        starts = {self.keys.descriptor(start): start for start in start_offsets}
        return {starts[key]: self._decoded(entry) for key, entry in self.metadata.get_many(list(starts)).items()}

    def newest(self) -> Descriptor | None:
        hint = self.current()
        found = [one for one in self._range(hint[0]) if isinstance(one, Descriptor)] if hint is not None else []
        # Without a hint, or with one that points past everything that retention left.
        return found[-1] if found else self._floor(MAX_NUMBER)

    def next_offset(self) -> int:
        """The first offset that is not in the store: everything below was published, and may be deleted by now."""
        newest = self.newest()
        start = self.start_offset()
        if newest is not None and start > newest.next_offset:
            newest = self._newest_for(start)
        return start if newest is None else max(start, newest.next_offset)

    def _newest_for(self, start: int) -> Descriptor | None:
        """The start seems to lie after the end. Both may have moved between two reads; the end is read again."""
        newest = self.newest()
        if newest is not None and newest.next_offset < start:
            raise DataError(
                f"{self.keys.start} in the metadata store makes no sense: start_offset is {start}, "
                f"and the catalog ends at {newest.next_offset}",
                hint="`tidelog topic rebuild-catalog` rebuilds the catalog from the objects",
            )
        return newest

    def current(self) -> tuple[int, str] | None:
        """The descriptor that `cur` names, and its version. An invalid one counts as no hint."""
        found = self._current()
        return None if found is None else (parse_padded(found[0].start) or 0, found[1])

    def named_starts(self) -> list[int]:
        """Where objects begin, as far as `cur` says so, in order."""
        found = self._current()
        if found is None:
            return []
        newest = parse_padded(found[0].start)
        starts = found[0].starts if newest is None else [*found[0].starts, newest]
        return sorted({start for start in starts if 0 <= start <= MAX_NUMBER})

    def moved_current(self, start_offset: int) -> tuple[bytes, str | None]:
        """What `cur` becomes when the object that begins there is the newest, and its version now."""
        found = self._current()
        starts = [] if found is None else found[0].starts
        named = [] if self.metadata.floor_is_cheap else with_start(starts, start_offset)
        value = msgspec.json.encode(Current(padded(start_offset), named))
        return value, None if found is None else found[1]

    def current_without(self, starts: Collection[int]) -> tuple[bytes, str] | None:
        """What `cur` becomes when objects no longer begin there, and its version; None where it does not say so."""
        found = self._current()
        if found is None or not set(found[0].starts).intersection(starts):
            return None
        kept = [start for start in found[0].starts if start not in starts]
        return msgspec.json.encode(Current(found[0].start, kept)), found[1]

    def _current(self) -> tuple[Current, str] | None:
        found = self.metadata.get(self.keys.current)
        if found is None:
            return None
        try:
            return from_json(found.value, Current), found.version
        except JSON_ERRORS:
            return Current(""), found.version

    def at(self, offset: int) -> Descriptor | None:
        """The descriptor of the object that holds an offset; None when none does."""
        found = self._floor(offset)
        return found if found is not None and offset <= found.end_offset else None

    def nearest_start(self, offset: int) -> int | None:
        """Where `at` begins to look, so that those who look at once can do it together; None where that is cheap."""
        return None if self.metadata.floor_is_cheap else self._starts.nearest(self, offset)

    def oldest(self) -> Descriptor | None:
        return next(iter(self.walk(0)), None)

    def walk(self, offset: int) -> Iterator[Descriptor]:
        """The descriptors of the objects from the one that holds `offset`, or the next after it, to the newest.

        Each is read when it is requested. The caller sees holes: the start of one is not the end of the one before.
        During a concurrent compaction, one may begin before the end of the one before, and holds the same messages.
        """
        found = self.at(offset) or self._ceiling(offset)
        while found is not None:
            yield found
            behind = self.find(found.next_offset)
            if behind is not None and isinstance(behind.value, Descriptor):
                found = behind.value
            else:
                found = self._behind_missing(found.next_offset)

    def _behind_missing(self, offset: int) -> Descriptor | None:
        """The next one, where none begins at an offset: that is in one that replaced others, or in none."""
        behind = self._ceiling(offset)
        # The newest one is never replaced, so an offset that is in another one has something after it.
        return behind if behind is None or behind.start_offset == offset else self.at(offset) or behind

    def between(self, first_offset: int, next_offset: int) -> Iterator[Descriptor]:
        """As `walk`, for a range of offsets: reads many at a time, for callers that want all of them.

        No two of them overlap: after a concurrent compaction, only the large one is returned.
        """
        kept: list[Descriptor] = []
        found = self.at(first_offset) or self._ceiling(first_offset)
        while found is not None and found.start_offset < next_offset:
            while kept and kept[-1].start_offset >= found.start_offset:
                kept.pop()  # it was replaced by the one that was found, after it was seen
            behind = self.following(found.start_offset, next_offset)
            kept += behind
            reached = behind[-1].next_offset if behind else found.start_offset
            found = self._behind_missing(reached) if reached < next_offset else None
        return iter(kept)

    def following(self, offset: int, next_offset: int = MAX_OFFSET, limit: int = _MANY) -> list[Descriptor]:
        """The one that begins at an offset and those after it, up to a hole: many, but maybe not all."""
        found: list[Descriptor] = []
        for one in list(self._range(offset, limit)):
            # One that begins inside another was replaced by it, and is about to go.
            if not isinstance(one, Descriptor) or one.start_offset < offset:
                continue
            if one.start_offset > offset or offset >= next_offset:
                break
            found.append(one)
            offset = one.next_offset
        return found

    def found_from(self, offset: int) -> Iterator[Found]:
        """The descriptors from the one that holds `offset` on, with their versions, many at a time."""
        first = self.at(offset) or self._ceiling(offset)
        at, reached = None if first is None else first.start_offset, 0
        while at is not None:
            start = self.keys.descriptor(at)
            entries = self.metadata.range(self.keys.segments_prefix, start=start, limit=_MANY)
            found = [self._decoded(one) for one in entries if self.keys.parse_descriptor(one.key) is not None]
            for one in found:
                if isinstance(one.value, Descriptor) and one.value.start_offset >= reached:
                    yield one
                    reached = one.value.next_offset
            at = found[-1].value.start_offset + 1 if len(entries) == _MANY and found else None

    def covers(self, first_offset: int, next_offset: int) -> bool:
        """Whether every offset of a range is in a published object."""
        reached = first_offset
        for descriptor in self.walk(first_offset):
            if reached >= next_offset or descriptor.start_offset > reached:
                break
            reached = descriptor.next_offset
        return reached >= next_offset

    def first_for_time(self, time_us: int) -> Descriptor | None:
        """The first descriptor that has a message of this time or later; None when none has.

        Bisects over offsets: a few lookups, however many descriptors there are.
        """
        newest, oldest = self.newest(), self.oldest()
        if newest is None or oldest is None or not _reaches(newest, time_us):
            return None
        low, high = oldest.start_offset, newest.start_offset
        while low < high:
            offset = (low + high) // 2
            middle = self._floor(offset) or oldest
            if _reaches(middle, time_us):
                high = middle.start_offset
            else:
                low = max(offset + 1, middle.next_offset)  # in a hole the one before ends long before the offset
        return self.at(high)

    def _range(self, start: int, limit: int | None = None) -> Iterator[Descriptor | Reservation]:
        first, parse = self.keys.descriptor(start), self.keys.parse_descriptor
        if self.metadata.floor_is_cheap or self.metadata.reads_many_at_once:
            entries = self.metadata.range(self.keys.segments_prefix, start=first, limit=limit)
            yield from (self._decoded(entry).value for entry in entries if parse(entry.key) is not None)
            return
        # There each value is a request of its own, and `cur` is among the keys.
        prefix = self.keys.segments_prefix
        entries = self.metadata.listed(prefix, lambda name: parse(name) is not None, start=first, limit=limit)
        yield from (self._decoded(entry).value for entry in entries)

    def _ceiling(self, offset: int) -> Descriptor | None:
        """The first descriptor that begins at or after an offset."""
        # Two, because one of them may be a reservation.
        found = self._range(offset, limit=2)
        return next((one for one in found if isinstance(one, Descriptor)), None)

    def _floor(self, offset: int) -> Descriptor | None:
        """The last descriptor that begins at an offset or before it."""
        if self.metadata.floor_is_cheap:
            return self._floor_in_store(offset)
        return self._starts.floor(self, offset)

    def _floor_in_store(self, offset: int) -> Descriptor | None:
        entry = self.metadata.floor(self.keys.segments_prefix, self.keys.descriptor(offset))
        if entry is None:
            return None
        if self.keys.parse_descriptor(entry.key) is None:
            return self._starts.floor(self, offset)  # somebody else's key is in the way: a listing passes over it
        found = self._decoded(entry).value
        if isinstance(found, Descriptor):
            return found
        return self._floor_in_store(found.start_offset - 1) if found.start_offset else None

    def _decoded(self, entry: Entry) -> Found:
        start = self.keys.parse_descriptor(entry.key)
        if start is None:
            raise DataError(f"{entry.key} is not the key of a descriptor")
        return Found(decode_descriptor(entry.value, entry.key, start), entry.version)


def _reaches(descriptor: Descriptor, time_us: int) -> bool:
    return descriptor.reached_time_us is not None and descriptor.reached_time_us >= time_us


_KEYS_AT_ONCE = 200


class Catalogs:
    """The catalogs of all topics of an installation. `check` is called before each use: whose catalogs they are."""

    def __init__(self, metadata: MetadataStore, root: str, check: Callable[[], None]) -> None:
        self._metadata = metadata
        self._root = root
        self._check = check

    def of(self, namespace: str, name: str) -> Catalog:
        """What is known about a topic."""
        self._check()
        return Catalog(self._metadata, TopicKeys(namespace, name, self._root))

    def group_cursors(self, topics: Sequence[tuple[str, str]]) -> list[dict[str, Cursor | DataError]]:
        """The positions of all consumer groups in each of these topics, with few requests where the store can."""
        catalogs = [self.of(*topic) for topic in topics]
        found = self._metadata.range_many([one.keys.groups_prefix for one in catalogs])
        return [one._decoded_groups(entries) for one, entries in zip(catalogs, found, strict=True)]

    def topics(self) -> Iterator[tuple[str, str]]:
        """All topics, as (namespace, name). Costs a small request for those of some hundred keys, or for one that has
        more."""
        self._check()
        prefix = topics_prefix(self._root)
        start, found_prefix = prefix, "\0"
        # Some stores list `a/b` before `a-/b`: keys of one topic stand together, and no more is taken for granted.
        while keys := self._metadata.keys(prefix, start=start, limit=_KEYS_AT_ONCE):
            for key in keys:
                found = None if key.startswith(found_prefix) else parse_topic_key(key, self._root)
                if found is None:
                    continue  # it belongs to the topic before it, or to none
                topic = TopicKeys(found.namespace, found.topic, self._root)
                found_prefix = topic.metadata_prefix
                if self._makes_topic(topic, key):
                    yield found.namespace, found.topic
            if len(keys) < _KEYS_AT_ONCE:
                return
            last = keys[-1]
            start = end_of(found_prefix) if last.startswith(found_prefix) else last + "0"

    def _makes_topic(self, topic: TopicKeys, first: str) -> bool:
        """Rows staged for a name that nobody has opened yet, or to be replayed into it, make no topic."""
        for prefix, behind in (
            (topic.replays_prefix, end_of(topic.replays_prefix)),  # in the order of the keys
            (topic.staging, topic.staging + "0"),
        ):
            if first.startswith(prefix):
                others = self._metadata.keys(topic.metadata_prefix, start=behind, limit=1)
                if not others:
                    return False
                first = others[0]
        return True
