"""The catalog of a topic: which offsets are in which object, who owns it, where it begins and ends. For reading.

Invariants
- Descriptors are contiguous, so the next one has the key of the offset behind this one. A missing key with a later one
  behind it is a hole, and is told as one.
- A descriptor does not change, but a compaction puts one in the place of several (`replacement_switch.py`): those that
  begin inside of it go while somebody reads. Each offset is in some descriptor at every moment.
- `cur` is a hint at the newest descriptor: where to begin to look, never the answer.
- An error while reading is raised. "Nothing there" is said only by a store that has answered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple, TypeVar

import msgspec

from tidelog.codec import JSON_ERRORS
from tidelog.errors import DataError
from tidelog.tier import owner as documents
from tidelog.tier.descriptor import Descriptor, Reservation, decode_descriptor
from tidelog.tier.keys import MAX_OFFSET, TopicKeys, padded, parse_padded
from tidelog.tier.known_starts import KnownStarts, with_start
from tidelog.tier.metadata.store import Entry, MetadataStore
from tidelog.tier.owner import Cursor, EpochFloor, Owner, SealedMarker, StartMark

Document = TypeVar("Document", bound=msgspec.Struct)
_MANY = 512


class Found(NamedTuple):
    """What is under a descriptor's key, and its version."""

    value: Descriptor | Reservation
    version: str


class Current(msgspec.Struct, frozen=True, omit_defaults=True):
    """`segments/cur`: the key of the newest descriptor, a hint; also of others where looking backwards is expensive."""

    start: str
    starts: list[int] = []


class Catalog:
    """What the metadata store says about one topic. Threads may share it."""

    def __init__(self, metadata: MetadataStore, keys: TopicKeys) -> None:
        self.metadata = metadata
        self.keys = keys
        self._starts = KnownStarts()

    # Documents

    def owner(self) -> tuple[Owner, str] | None:
        """Who writes, and the version of that entry; None for a topic that never had an owner."""
        return self._document(self.keys.owner, Owner)

    def sealed(self) -> SealedMarker | None:
        found = self._document(self.keys.state, SealedMarker)
        return None if found is None else found[0]

    def start_mark(self) -> tuple[StartMark, str] | None:
        return self._document(self.keys.start, StartMark)

    def start_offset(self) -> int:
        """The oldest offset that may be read."""
        found = self.start_mark()
        return 0 if found is None else found[0].start_offset

    def cursor(self, name: str) -> tuple[Cursor, str] | None:
        """How far a subscription is; None when there is none of that name."""
        return self._document(self.keys.subscription(name), Cursor)

    def subscriptions(self) -> list[str]:
        """The names of all subscriptions."""
        keys = self.metadata.keys(self.keys.subscriptions_prefix)
        return [name for key in keys if (name := self.keys.parse_subscription(key)) is not None]

    def epoch_floor(self) -> int:
        """The highest epoch that a deleted topic of this installation had."""
        found = self._document(self.keys.epoch_floor, EpochFloor)
        return 0 if found is None else found[0].epoch

    def _document(self, key: str, kind: type[Document]) -> tuple[Document, str] | None:
        entry = self.metadata.get(key)
        return None if entry is None else (documents.decode(entry.value, key, kind), entry.version)

    # Descriptors

    def find(self, start_offset: int) -> Found | None:
        """What is under the key of this offset, reservations included."""
        entry = self.metadata.get(self.keys.descriptor(start_offset))
        return None if entry is None else self._decoded(entry)

    def newest(self) -> Descriptor | None:
        """The last descriptor."""
        hint = self.current()
        found = [one for one in self._range(hint[0]) if isinstance(one, Descriptor)] if hint is not None else []
        # Without a hint, or with one that points behind everything that retention left.
        return found[-1] if found else self._floor(MAX_OFFSET)

    def next_offset(self) -> int:
        """The first offset that is not in the store: everything below was published, and may be deleted by now."""
        newest = self.newest()
        start = self.start_offset()
        if newest is not None and start > newest.next_offset:
            newest = self._newest_for(start)
        return start if newest is None else max(start, newest.next_offset)

    def _newest_for(self, start: int) -> Descriptor | None:
        """The start seems to lie behind the end. Both may have moved between two looks; the end is looked at again."""
        newest = self.newest()
        if newest is not None and newest.next_offset < start:
            raise DataError(
                f"{self.keys.start} in the metadata store makes no sense: start_offset is {start}, "
                f"and the catalog ends at {newest.next_offset}",
                hint="`tidelog topic rebuild-catalog` makes the catalog anew from the objects",
            )
        return newest

    def current(self) -> tuple[int, str] | None:
        """What `cur` points at, and its version. Nonsense in it counts as no hint."""
        found = self._current()
        return None if found is None else (parse_padded(found[0].start) or 0, found[1])

    def named_starts(self) -> list[int]:
        """Where objects begin, as far as `cur` says so, in order."""
        found = self._current()
        if found is None:
            return []
        newest = parse_padded(found[0].start)
        starts = found[0].starts if newest is None else [*found[0].starts, newest]
        return sorted({start for start in starts if 0 <= start <= MAX_OFFSET})

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
            return msgspec.json.decode(found.value, type=Current), found.version
        except JSON_ERRORS:
            return Current(""), found.version

    def at(self, offset: int) -> Descriptor | None:
        """The descriptor of the object that holds an offset; None when none does."""
        found = self._floor(offset)
        return found if found is not None and offset <= found.end_offset else None

    def oldest(self) -> Descriptor | None:
        """The first descriptor that is there."""
        return next(iter(self.walk(0)), None)

    def walk(self, offset: int) -> Iterator[Descriptor]:
        """The descriptors of the objects from the one that holds `offset`, or the next behind it, to the newest.

        Each is read when it is asked for. Who walks sees holes: the start of one is not the end of the one before.
        Where a compaction was at work meanwhile, one may begin before the end of the one before, and holds the same.
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
        # The newest one is never replaced, so an offset that is in another one has something behind it.
        return behind if behind is None or behind.start_offset == offset else self.at(offset) or behind

    def between(self, first_offset: int, next_offset: int) -> Iterator[Descriptor]:
        """As `walk`, of a range of offsets: many at a time, for those who want all of them.

        No two of them hold the same: where a compaction was at work meanwhile, it is the large one that is told.
        """
        kept: list[Descriptor] = []
        found = self.at(first_offset) or self._ceiling(first_offset)
        while found is not None and found.start_offset < next_offset:
            while kept and kept[-1].start_offset >= found.start_offset:
                kept.pop()  # it was replaced by the one that was found, after it was seen
            behind = self._following(found.start_offset, next_offset)
            kept += behind
            reached = behind[-1].next_offset if behind else found.start_offset
            found = self._behind_missing(reached) if reached < next_offset else None
        return iter(kept)

    def _following(self, offset: int, next_offset: int) -> list[Descriptor]:
        """The one that begins at an offset and those behind it, up to a hole: many, but maybe not all."""
        found: list[Descriptor] = []
        for one in list(self._range(offset, _MANY)):
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
        first = self.keys.descriptor(start)
        for entry in self.metadata.range(self.keys.segments_prefix, start=first, limit=limit):
            if self.keys.parse_descriptor(entry.key) is not None:
                yield self._decoded(entry).value

    def _ceiling(self, offset: int) -> Descriptor | None:
        """The first descriptor that begins at an offset or behind it."""
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
