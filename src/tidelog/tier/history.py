"""Reading history: the messages of a topic from the object store, as one sequence of batches across objects.

Invariants
- A reader hands out exactly the offset that comes next, or raises, or (with `on_gap="skip"`) passes over what is gone
  or damaged, and logs which offsets. Damage before the offset that is wanted does not keep it from being read.
- Descriptors are looked up when they are reached, so that what is published or removed meanwhile is seen.
- That something is missing is said only after the catalog was asked once more: what retention removed is "no longer
  kept", what was published just now is there.
- A store that gives no answer raises StoreUnavailableError and changes nothing: the same call goes on where it was.
"""

from __future__ import annotations

import logging
from concurrent.futures import Executor
from threading import Lock
from typing import Literal

from tidelog.errors import CorruptionError, GapError, NotFoundError, OffsetOutOfRangeError, OtherLogError, offsets_text
from tidelog.log.cache import Batch, framed_batch
from tidelog.tier.catalog import Catalog
from tidelog.tier.descriptor import Descriptor
from tidelog.tier.history_counters import HistoryCounters
from tidelog.tier.history_object import ObjectFrames
from tidelog.tier.history_ranges import Fetcher, HistorySettings
from tidelog.tier.object_store import ObjectStore

_logger = logging.getLogger("tidelog.tier")
OnGap = Literal["raise", "skip"]


class History:
    """The cold half of one topic. Threads may share it; `executor` fetches ahead for all readers."""

    def __init__(
        self,
        catalog: Catalog,
        objects: ObjectStore,
        executor: Executor,
        *,
        counters: HistoryCounters | None = None,
        settings: HistorySettings | None = None,
    ) -> None:
        self.catalog = catalog
        self.counters = counters or HistoryCounters()
        self.fetcher = Fetcher(objects, executor, self.counters, settings or HistorySettings.of(objects.settings))

    def read(self, offset: int, stop_offset: int, *, on_gap: OnGap = "raise") -> HistoryReader:
        """A reader from `offset` up to `stop_offset` (exclusive), or to the end of what is published by then."""
        return HistoryReader(self, offset, stop_offset, on_gap)

    def offset_at(self, time_field: int, time_us: int, below_offset: int) -> int | None:
        """The first offset whose time, at this byte of its payload, is `time_us` or later.

        None when there is none, or when it is in an object that begins at `below_offset` or behind it.
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
        reader = self.read(offset, descriptor.next_offset)
        try:
            while (batch := reader.next_batch()) is not None:
                assert batch.frames is not None
                found = batch.frames.first_at_least(time_field, time_us, batch.start)
                if found is not None and found < batch.stop:
                    return batch.frames.first_offset + found
        finally:
            reader.close()
        return None


class HistoryReader:
    """A position in history. Each reader is independent; one reader is for one thread at a time."""

    def __init__(self, history: History, offset: int, stop_offset: int, on_gap: OnGap = "raise") -> None:
        self.offset = offset
        self._catalog = history.catalog
        self._fetcher = history.fetcher
        self._counters = history.counters
        self._stop_offset = stop_offset
        self._on_gap = on_gap
        self._object: ObjectFrames | None = None
        self._objects_read = 0
        self._closed = False
        self._reading = Lock()

    @property
    def reached_stop(self) -> bool:
        return self.offset >= self._stop_offset

    def next_batch(self) -> Batch | None:
        """The next messages; None at the stop, or when nothing behind `offset` is published."""
        try:
            with self._reading:
                return self._next_batch()
        finally:
            if self._closed:
                self._let_go()

    def close(self) -> None:
        """Lets go of what is on its way. Another thread may close it: whoever reads just now lets go itself."""
        self._closed = True
        self._let_go()

    def _let_go(self) -> None:
        if self._reading.acquire(blocking=False):
            self._leave_object()
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
        """Behind an object the next one has the key of this offset; otherwise it is looked for."""
        with self._counters.query():
            if self._objects_read:
                found = self._catalog.find(self.offset)
                if found is not None and isinstance(found.value, Descriptor):
                    return found.value
            return next(self._catalog.walk(self.offset), None)

    def _opened(self, descriptor: Descriptor) -> ObjectFrames:
        self._counters.opened()
        key = self._catalog.keys.object(descriptor.name)
        # Whoever has read an object to its end reads the next one too.
        ahead = self._objects_read > 0
        self._object = ObjectFrames(self._fetcher, key, descriptor, self.offset, self._stop_offset, ahead=ahead)
        self._objects_read += 1
        return self._object

    def _leave_object(self) -> None:
        source, self._object = self._object, None
        if source is not None:
            source.close()

    # What is damaged

    def _settle_damage(self, source: ObjectFrames, damage: CorruptionError) -> None:
        """Returns when it can go on behind the damage; raises if offsets that are wanted are damaged."""
        if isinstance(damage, OtherLogError):
            raise damage
        if self._on_gap == "raise" and source.offset >= self.offset:
            raise _damage_error(damage, source.key)
        source.skip_damage()
        first, next_offset = self.offset, min(source.offset, self._stop_offset)
        if first >= next_offset:
            return
        if self._on_gap == "raise":
            self._leave_object()  # the next call comes to the same place, and raises again
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
    hint = f'{damage.hint}. To read around exactly what is damaged: on_gap="skip"'
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
