"""What a worker does for `verify`: reads an object to its last byte and compares it with its descriptor.

Invariants
- Every frame is read: its checksum, its length, and that its offset is the next one.
- What a descriptor says is compared with what was read: size, checksum, codec, times, and that every entry of the index
  is the place of the frame or block that it names.
- An object that is not there is told as gone, for the driver to find out whether it should be. A store that gives no
  answer raises.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from tidelog.errors import ConflictError, CorruptionError, NotFoundError
from tidelog.log.frame import Frames
from tidelog.pipeline.jobs.frame_tally import lost_offsets, tally_frames
from tidelog.pipeline.jobs.job import Problem
from tidelog.pipeline.jobs.proof import Tally
from tidelog.pipeline.part import ColdPlace
from tidelog.tier.descriptor import Descriptor
from tidelog.tier.keys import TopicKeys
from tidelog.tier.object_check import ObjectCheck
from tidelog.tier.object_store import ObjectStore
from tidelog.tier.stores import open_store
from tidelog.topics.message import TIMESTAMP_FIELD
from tidelog.topics.names import parse_topic_name

_COMPARED = ("checksum", "raw_size", "codec", "first_time_us", "last_time_us")
_KEPT_STORES = 16


class ObjectWork(msgspec.Struct, frozen=True, kw_only=True):
    """An object to read, and what is said about it."""

    topic: str
    place: ColdPlace
    descriptor: Descriptor


class ObjectFinding(msgspec.Struct, frozen=True, kw_only=True):
    """What an object has, and what is wrong with it."""

    topic: str
    object_id: str
    size: int = 0
    tally: Tally = Tally()
    lost: tuple[int, ...] = ()
    is_gone: bool = False
    is_rewritten: bool = False
    problems: tuple[Problem, ...] = ()


def check_object(work: ObjectWork) -> ObjectFinding:
    """Reads all of it."""
    return _Check(work).finding()


@lru_cache(_KEPT_STORES)
def _objects(place: ColdPlace) -> ObjectStore:
    """Opened in the process that reads, and kept for its next task."""
    return open_store(place.store_url, place.store_settings)


class _Check:
    """One object."""

    def __init__(self, work: ObjectWork) -> None:
        self._work = work
        self._descriptor = work.descriptor
        name = parse_topic_name(work.topic)
        keys = TopicKeys(name.namespace, name.name, work.place.metadata_root)
        self._key = keys.object(work.descriptor.name)
        self._entries = list(work.descriptor.offset_index)
        self._tally = Tally()
        self._lost: list[int] = []
        self._problems: list[Problem] = []

    def finding(self) -> ObjectFinding:
        is_rewritten = False
        try:
            is_rewritten = self._read()
        except CorruptionError as error:
            self._add(error.message.partition(" at byte ")[0], byte=error.byte)
        except (NotFoundError, ConflictError):  # the second: while it was read
            return ObjectFinding(topic=self._work.topic, object_id=self._descriptor.object_id, is_gone=True)
        return ObjectFinding(
            topic=self._work.topic,
            object_id=self._descriptor.object_id,
            size=self._descriptor.size,
            tally=self._tally,
            lost=tuple(self._lost),
            is_rewritten=is_rewritten,
            problems=tuple(self._problems),
        )

    def _read(self) -> bool:
        """Whether the bytes are right, and yet it is not the object that was uploaded."""
        objects, descriptor = _objects(self._work.place), self._descriptor
        info = objects.head(self._key)
        if info.size != descriptor.size:
            self._add(f"it has {info.size} bytes, its descriptor says {descriptor.size}")
        found = ObjectCheck(objects, info, descriptor.name, TIMESTAMP_FIELD, on_frames=self._take).descriptor()
        for field in _COMPARED:
            is_said, is_found = getattr(descriptor, field), getattr(found, field)
            if is_said != is_found:
                self._add(f"its {field} is {is_found}, its descriptor says {is_said}")
        return found.etag != descriptor.etag and not self._problems

    def _take(self, frames: Frames, position: int) -> None:
        self._tally += tally_frames(frames)
        self._lost += lost_offsets(frames)
        self._check_index(frames, position)

    def _check_index(self, frames: Frames, position: int) -> None:
        while self._entries and self._entries[0][0] < frames.next_offset:
            offset, byte = self._entries.pop(0)
            if byte != self._place_of(frames, position, offset):
                self._entries.clear()
                self._add(f"the index of its descriptor says that offset {offset} is at byte {byte}, where it is not")

    def _place_of(self, frames: Frames, position: int, offset: int) -> int | None:
        """Where an entry of the index for this offset has to point; None where there can be none."""
        if self._descriptor.codec != "none":
            return position if offset == frames.first_offset else None
        if offset < frames.first_offset:
            return None
        return position + frames.start_of(offset - frames.first_offset) - frames.start_of(0)

    def _add(self, reason: str, byte: int | None = None) -> None:
        self._problems.append(
            Problem(
                topic=self._work.topic,
                place=self._key if byte is None else f"{self._key}, byte {byte}",
                reason=reason,
                first_offset=self._descriptor.start_offset,
                last_offset=self._descriptor.end_offset,
            )
        )
