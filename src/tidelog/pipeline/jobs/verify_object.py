"""What a worker does for `verify`: reads an object of a topic to its last byte (`descriptor_check.py`), and counts.

Invariants
- An object that is not there is told as gone, for the driver to find out whether it should be. A store that gives no
  answer raises.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from tidelog.errors import ConflictError, NotFoundError
from tidelog.log.frame import Frames
from tidelog.pipeline.jobs.descriptor_check import DescriptorCheck, Fault
from tidelog.pipeline.jobs.frame_tally import lost_offsets, tally_frames
from tidelog.pipeline.jobs.job import Problem
from tidelog.pipeline.jobs.proof import Tally
from tidelog.pipeline.part import ColdPlace
from tidelog.tier.descriptor import Descriptor
from tidelog.tier.keys import TopicKeys
from tidelog.tier.object_store import ObjectStore
from tidelog.tier.stores import open_store
from tidelog.topics.columns import unreadable_frames
from tidelog.topics.message import TIMESTAMP_FIELD
from tidelog.topics.names import parse_topic_name

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
        self._tally = Tally()
        self._lost: list[int] = []
        self._unreadable: list[Problem] = []

    def finding(self) -> ObjectFinding:
        objects, descriptor = _objects(self._work.place), self._descriptor
        check = DescriptorCheck(objects, self._key, descriptor, TIMESTAMP_FIELD, self._take)
        try:
            check.run()
        except (NotFoundError, ConflictError):  # the second: while it was read
            return ObjectFinding(topic=self._work.topic, object_id=descriptor.object_id, is_gone=True)
        return ObjectFinding(
            topic=self._work.topic,
            object_id=descriptor.object_id,
            size=descriptor.size,
            tally=self._tally,
            lost=tuple(self._lost),
            is_rewritten=check.is_rewritten,
            problems=(*(self._problem(fault) for fault in check.faults), *self._unreadable),
        )

    def _take(self, frames: Frames) -> None:
        self._tally += tally_frames(frames)
        self._lost += lost_offsets(frames)
        for index, reason in unreadable_frames(frames):
            offset = frames.first_offset + index
            self._unreadable.append(
                Problem(topic=self._work.topic, place=self._key, reason=reason, first_offset=offset, last_offset=offset)
            )

    def _problem(self, fault: Fault) -> Problem:
        return Problem(
            topic=self._work.topic,
            place=self._key if fault.byte is None else f"{self._key}, byte {fault.byte}",
            reason=fault.reason,
            first_offset=self._descriptor.start_offset,
            last_offset=self._descriptor.end_offset,
        )
