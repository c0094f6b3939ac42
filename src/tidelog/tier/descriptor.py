"""A descriptor: what the catalog knows about one shipped object, as JSON under the key of its first offset.

    {"completed": true, "object_id": "data-0-999-e1.tlog", "start_offset": 0, "end_offset": 999, "epoch": 1, ...,
     "log_id": "0f1e...", "offset_index": [[0, 36], [500, 65572]]}

    {"completed": false, "start_offset": 1000, "epoch": 2}     a reservation: an owner holds the key, no object yet

Invariants
- `end_offset` belongs to the object. Its name says the same as its descriptor, so one can be made anew from the other.
- `log_id` is that of the log that the object belongs to, and the header at its beginning says the same. Only rows that
  are staged, and belong to no log yet, have none: nobody stores a descriptor of them.
- The index begins with the first frame or block, right behind the header; offsets and positions grow together. With
  `codec` "none" an entry is the place of a frame, with "zstd" that of a block.
- Times are the least and the greatest of the messages, which need not be in order of time. `reached_time_us` is the
  greatest of this object and of all before it, so it grows from one to the next: a time is found by bisection.
- `epoch` is that of the owner who wrote it. A compacted object has messages of several: `epochs` says from which offset
  on which one, both growing, and `epoch` is the last. Without `epochs` all of it counts as written under `epoch`.
- `position` is for logs whose readers know bytes, not offsets (an engine's): how many bytes of frames are before it.
- What does not hold together is refused when it is read: nothing in here is believed because it is in our store.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import Annotated, Literal

import msgspec

from tidelog.codec import JSON_ERRORS
from tidelog.errors import DataError
from tidelog.log.binding import BINDING_BYTES, check_binding, is_log_id
from tidelog.tier.bounds import impossible_number
from tidelog.tier.keys import MAX_OFFSET, ObjectId, parse_object_id

Codec = Literal["none", "zstd"]


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

    @property
    def header_bytes(self) -> int:
        """How many bytes are before its first frame or block."""
        return BINDING_BYTES if self.log_id else 0

    def check_header(self, data: bytes | memoryview, key: str) -> None:
        """DataError unless the bytes that the object begins with bind it to its log; by name if it is another's."""
        if self.log_id:
            check_binding(data, key, self.log_id, self.start_offset)

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
        """The first offset behind it."""
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
        """Where to begin reading for an offset: the last entry of the index that is not behind it."""
        return self.offset_index[bisect_right(self.offset_index, offset, key=_offset_of) - 1]

    def end_of(self, offset: int) -> int:
        """A byte position at or behind the end of an offset's frame or block, as close as the index tells."""
        behind = bisect_right(self.offset_index, offset, key=_offset_of)
        return self.offset_index[behind][1] if behind < len(self.offset_index) else self.size


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """The place of an owner's next object, taken before it accepts anything."""

    start_offset: int
    epoch: int
    completed: bool = False


def _offset_of(entry: tuple[int, int]) -> int:
    return entry[0]


def encode_descriptor(descriptor: Descriptor | Reservation) -> bytes:
    """The JSON of it."""
    return msgspec.json.encode(descriptor)


def decode_descriptor(data: bytes, key: str, start_offset: int) -> Descriptor | Reservation:
    """What is stored under a descriptor's key; DataError names the key when it cannot be."""
    try:
        if not msgspec.json.decode(data, type=_Completed).completed:
            reservation = msgspec.json.decode(data, type=Reservation)
            _require(reservation.start_offset == start_offset, "its offset is not that of its key")
            _require(0 <= reservation.epoch <= MAX_OFFSET, f"its epoch is {reservation.epoch}, which cannot be")
            return reservation
        descriptor = msgspec.json.decode(data, type=Descriptor)
        _check(descriptor, start_offset)
    except (*JSON_ERRORS, _WrongError) as error:
        raise DataError(
            f"the descriptor {key} cannot be understood: {error}",
            hint="`tidelog topic rebuild-catalog` makes it anew from the objects",
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
    _require(start_offset <= descriptor.end_offset <= MAX_OFFSET, "it ends before it begins")
    name, numbers = parse_object_id(descriptor.object_id), (start_offset, descriptor.end_offset, descriptor.epoch)
    _require(name is not None and name[:3] == numbers, "the name of its object says something else")
    _require(descriptor.size > 0 and descriptor.raw_size > 0, "it has no bytes")
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
