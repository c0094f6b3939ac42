"""Reads all of a topic's history and says everything that is wrong with it, without changing anything.

Invariants
- Every object is read whole: its frames, their order, its size and its checksum must be what its descriptor says.
- Descriptors must follow each other without a gap, from the start of the topic to its end.
- What retention removes and compactions replace meanwhile is no problem: the catalog is asked again before something
  counts as gone or as there twice.
- A store that gives no answer raises.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from tidelog.errors import ConflictError, CorruptionError, NotFoundError, offsets_text
from tidelog.log.examine import Unreadable
from tidelog.log.frame import Frames
from tidelog.tier.catalog import Catalog
from tidelog.tier.descriptor import Descriptor
from tidelog.tier.object_check import ObjectCheck
from tidelog.tier.object_store import ObjectStore
from tidelog.tier.retention import names_object

_COMPARED = ("checksum", "raw_size", "codec", "first_time_us", "last_time_us")


class HistoryProblem(msgspec.Struct, frozen=True, kw_only=True):
    """Something wrong with an object, or between two; the offsets are those that are concerned by it."""

    key: str
    reason: str
    first_offset: int
    last_offset: int
    byte: int | None = None
    is_unreadable: bool = False
    """The frame is as it was written, and the layer above cannot make anything of it."""

    def __str__(self) -> str:
        where = self.key if self.byte is None else f"{self.key}, byte {self.byte}"
        return f"{where}: {self.reason} ({offsets_text(self.first_offset, self.last_offset)})"


class HistoryExamination(msgspec.Struct, frozen=True, kw_only=True):
    """What was read, and what is wrong."""

    objects: int
    bytes: int
    messages: int
    problems: tuple[HistoryProblem, ...]


def check_history(
    catalog: Catalog,
    objects: ObjectStore,
    time_field: int | None,
    on_bytes: Callable[[int], None] | None = None,
    unreadable: Unreadable | None = None,
) -> HistoryExamination:
    """Reads every object that the catalog names. `on_bytes` is told the size of each piece that was read."""
    walk = _Walk(catalog, objects, time_field, on_bytes, unreadable)
    for descriptor in catalog.walk(catalog.start_offset()):
        walk.visit(descriptor)
    return HistoryExamination(
        objects=walk.objects_read, bytes=walk.bytes_read, messages=walk.messages, problems=tuple(walk.problems)
    )


class _Walk:
    """Goes from object to object and keeps the offset that must come next."""

    def __init__(
        self,
        catalog: Catalog,
        objects: ObjectStore,
        time_field: int | None,
        on_bytes: Callable[[int], None] | None,
        unreadable: Unreadable | None,
    ) -> None:
        self._catalog = catalog
        self._objects = objects
        self._time_field = time_field
        self._on_bytes = on_bytes
        self._unreadable = unreadable
        self._expected = catalog.start_offset()
        self._before: Descriptor | None = None
        self.objects_read = 0
        self.bytes_read = 0
        self.messages = 0
        self.problems: list[HistoryProblem] = []

    def visit(self, descriptor: Descriptor) -> None:
        self._check_order(descriptor)
        self._expected, self._before = descriptor.next_offset, descriptor
        try:
            self._check_object(descriptor)
        except CorruptionError as error:
            self._add(descriptor, error.message.partition(" at byte ")[0], error.byte)
        except (NotFoundError, ConflictError):  # the second: while it was read
            self._settle_gone(descriptor)

    def _check_order(self, descriptor: Descriptor) -> None:
        key = self._catalog.keys.descriptor(descriptor.start_offset)
        start, expected = descriptor.start_offset, max(self._expected, self._catalog.start_offset())
        if start > expected:
            self.problems.append(
                HistoryProblem(
                    key=key, reason="no object before it has them", first_offset=expected, last_offset=start - 1
                )
            )
        elif start < self._expected and self._before is not None and self._is_published(self._before):
            reason = "the object before it has them too"
            self.problems.append(
                HistoryProblem(key=key, reason=reason, first_offset=start, last_offset=self._expected - 1)
            )

    def _check_object(self, descriptor: Descriptor) -> None:
        info = self._objects.head(self._catalog.keys.object(descriptor.name))
        if info.size != descriptor.size:
            self._add(descriptor, f"it has {info.size} bytes, its descriptor says {descriptor.size}")
            return
        found = ObjectCheck(
            *(self._objects, info, descriptor.name, descriptor.log_id, self._time_field, self._on_bytes),
            on_frames=partial(self._note_unreadable, descriptor),
        ).descriptor()
        self.objects_read += 1
        self.bytes_read += info.size
        self.messages += descriptor.count
        for field in _COMPARED:
            if getattr(found, field) != getattr(descriptor, field):
                self._add(
                    descriptor,
                    f"its {field} is {getattr(found, field)}, its descriptor says {getattr(descriptor, field)}",
                )

    def _note_unreadable(self, descriptor: Descriptor, frames: Frames, position: int) -> None:
        """`position` is the byte of the object at which these frames, or the block that they are in, begin."""
        for index, reason in () if self._unreadable is None else self._unreadable(frames):
            inside = frames.start_of(index) - frames.start_of(0) if descriptor.codec == "none" else 0
            offset = frames.first_offset + index
            self.problems.append(
                HistoryProblem(
                    key=self._catalog.keys.object(descriptor.name),
                    reason=reason,
                    first_offset=offset,
                    last_offset=offset,
                    byte=position + inside,
                    is_unreadable=True,
                )
            )

    def _settle_gone(self, descriptor: Descriptor) -> None:
        if descriptor.next_offset <= self._catalog.start_offset():
            return
        if self._is_published(descriptor):
            self._add(descriptor, "the object is gone")

    def _is_published(self, descriptor: Descriptor) -> bool:
        return names_object(self._catalog, descriptor.start_offset, descriptor.object_id)

    def _add(self, descriptor: Descriptor, reason: str, byte: int | None = None) -> None:
        self.problems.append(
            HistoryProblem(
                key=self._catalog.keys.object(descriptor.name),
                reason=reason,
                first_offset=descriptor.start_offset,
                last_offset=descriptor.end_offset,
                byte=byte,
            )
        )
