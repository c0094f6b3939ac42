"""What a worker does with one shipped object: reads it to its last byte and holds it against its descriptor.

Invariants
- Every frame is read: its checksum, its length, and that its offset is the next one.
- What a descriptor says is compared with what was read: size, checksum, codec, times, and that every entry of the index
  is the place of the frame or block that it names.
- Payloads are opaque here; who understands them is told all frames that are good. Damage ends the reading.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tidelog.errors import CorruptionError
from tidelog.log.frame import Frames
from tidelog.tier.descriptor import Descriptor
from tidelog.tier.object_check import ObjectCheck
from tidelog.tier.object_store import ObjectStore

_COMPARED = ("checksum", "raw_size", "codec", "first_time_us", "last_time_us")


class Fault(NamedTuple):
    """Something wrong with an object, and at which byte where that is known."""

    reason: str
    byte: int | None = None


class DescriptorCheck:
    """One object. `time_field` is where its payloads have their time, if they do; `on_frames` is told good frames."""

    def __init__(
        self,
        objects: ObjectStore,
        key: str,
        descriptor: Descriptor,
        time_field: int | None,
        on_frames: Callable[[Frames], None],
    ) -> None:
        self._objects = objects
        self._key = key
        self._descriptor = descriptor
        self._time_field = time_field
        self._on_frames = on_frames
        self._entries = list(descriptor.offset_index)
        self.faults: list[Fault] = []
        self.is_rewritten = False
        """Whether the bytes are right, and yet it is not the object that was uploaded."""

    def run(self) -> None:
        """Reads all of it. NotFoundError or ConflictError when it is gone, or went while it was read."""
        try:
            self._read()
        except CorruptionError as error:
            self.faults.append(Fault(error.message.partition(" at byte ")[0], error.byte))

    def _read(self) -> None:
        descriptor = self._descriptor
        info = self._objects.head(self._key)
        if info.size != descriptor.size:
            self.faults.append(Fault(f"it has {info.size} bytes, its descriptor says {descriptor.size}"))
        check = ObjectCheck(
            *(self._objects, info, descriptor.name, descriptor.log_id, self._time_field), on_frames=self._take
        )
        found = check.descriptor()
        for field in _COMPARED:
            is_said, is_found = getattr(descriptor, field), getattr(found, field)
            if is_said != is_found:
                self.faults.append(Fault(f"its {field} is {is_found}, its descriptor says {is_said}"))
        self.is_rewritten = found.etag != descriptor.etag and not self.faults

    def _take(self, frames: Frames, position: int) -> None:
        self._on_frames(frames)
        self._check_index(frames, position)

    def _check_index(self, frames: Frames, position: int) -> None:
        while self._entries and self._entries[0][0] < frames.next_offset:
            offset, byte = self._entries.pop(0)
            if byte != self._place_of(frames, position, offset):
                self._entries.clear()
                reason = f"the index of its descriptor says that offset {offset} is at byte {byte}, where it is not"
                self.faults.append(Fault(reason))

    def _place_of(self, frames: Frames, position: int, offset: int) -> int | None:
        """Where an entry of the index for this offset has to point; None where there can be none."""
        if self._descriptor.codec != "none":
            return position if offset == frames.first_offset else None
        if offset < frames.first_offset:
            return None
        return position + frames.start_of(offset - frames.first_offset) - frames.start_of(0)
