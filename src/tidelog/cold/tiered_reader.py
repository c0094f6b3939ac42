"""Reads a topic as one sequence: its history in the object store, then the hot log, under one position.

Invariants
- A reader returns exactly the offset that comes next, wherever it is: no gap, no overlap, no duplicate.
- Local messages are read locally. History is read only for offsets below the hot log's start, which is read before the
  catalog is: files are deleted only when the catalog covers them, so one of the two always has the message.
- If a file is pruned under a reader, the reader returns to history at the same offset.
- Messages in the hot log can be read while the stores are unreachable.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event

from tidelog.cold.catalog import Catalog
from tidelog.cold.reader import History, HistoryReader, OnGap
from tidelog.errors import GapError, InputError, OffsetOutOfRangeError, TidelogError, offsets_text
from tidelog.log.reader import NO_STOP, Position, Positions, RangeReader, ReadableLog, Reader
from tidelog.log.tail_cache import Batch
from tidelog.store.scheduler import in_store_thread

POLL_SECONDS = 1.0
HistoryOf = Callable[[Catalog], History]


class TieredView(Positions):
    """Positions in a topic, and readers from one to another. Without a hot log it is what the bucket alone has."""

    def __init__(
        self,
        hot: ReadableLog | None,
        history: History | HistoryOf,
        catalog: Catalog | None = None,
        *,
        time_field: int | None = None,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        """With a `catalog`, `history` may be what makes it of that, when objects are first read."""
        self._hot = hot
        self._history = history
        found = history.catalog if isinstance(history, History) else catalog
        assert found is not None, "it is made of a catalog"
        self.catalog = found
        self.poll_seconds = poll_seconds
        self._time_field = time_field

    @property
    def history(self) -> History:
        if not isinstance(self._history, History):
            self._history = self._history(self.catalog)
        return self._history

    @property
    def hot(self) -> ReadableLog | None:
        """What this disk has. None once that is gone: the topic is then what the store has of it."""
        return None if self._hot is None or self._hot.is_gone else self._hot

    @property
    def start_offset(self) -> int:
        return self.catalog.start_offset()

    @property
    def known_start_offset(self) -> int:
        """The start as far as it is known without asking; the owner knows it, a view does not."""
        return 0

    @property
    def next_offset(self) -> int:
        """The offset that the next message gets; without a hot log, the end of what is published."""
        hot = self.hot
        reached = None if hot is None else hot.next_offset
        # Read once more: a view finds out by reading that nothing is left.
        return self.catalog.next_offset() if reached is None or self.hot is None else reached

    def read(
        self,
        start: Position = "earliest",
        stop: Position | None = None,
        *,
        follow: bool = False,
        on_gap: OnGap = "raise",
    ) -> TieredReader:
        """A reader from `start` (an offset, "earliest", "latest" or a time) to `stop` (exclusive).

        Without `follow` it ends at the offset that is next now.
        """
        if self._hot is not None:
            self._hot.check_open()
        first, latest = self.resolve(start), NO_STOP if follow else self.next_offset
        end = latest if stop is None else min(latest, self.resolve_stop(stop))
        return TieredReader(self, first, end, follow, on_gap)

    def scout(self, offset: int, *, follow: bool, on_gap: OnGap = "raise") -> TieredReader:
        """A reader from an offset to wherever the topic ends by then; with `follow` it waits there."""
        return TieredReader(self, offset, NO_STOP, follow, on_gap)

    def _check_kept(self, offset: int) -> None:
        hot = self.hot
        if hot is None or not max(hot.start_offset, self.known_start_offset) <= offset <= hot.next_offset:
            super()._check_kept(offset)

    @property
    def _where(self) -> Path | str:
        return self.history.catalog.keys.objects_prefix if self.hot is None else self.hot.directory

    def offset_at(self, time_us: int) -> int:
        """The first offset whose time is `time_us` or later; the next offset when there is none yet."""
        if self._time_field is None:
            raise InputError("this log stores no timestamps", operation="read")
        hot = self.hot
        hot_start = NO_STOP if hot is None else hot.start_offset
        # The catalog finds the first object of the time. When all of that is local, the files tell it sooner.
        found = self.history.offset_at(self._time_field, time_us, hot_start) if hot_start else None
        if found is not None:
            return found
        # The oldest file may begin below the topic's start, with messages that retention has deleted.
        return self.next_offset if hot is None else hot.offset_at(time_us, self.known_start_offset)


class TieredReader(RangeReader):
    """A position in a topic."""

    def __init__(self, log: TieredView, offset: int, stop_offset: int, follow: bool, on_gap: OnGap = "raise") -> None:
        super().__init__(offset, stop_offset, follow)
        self._log = log
        self._on_gap: OnGap = on_gap
        self._cold: HistoryReader | None = None
        self._hot: Reader | None = None
        self._closed = Event()

    def next_batch(self, timeout_seconds: float | None = None) -> Batch | None:
        """The time is that of waiting for messages; fetching those that are there takes as long as it takes."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while self.offset < self._stop_offset and not self._closed.is_set():
            hot = self._hot_reader()
            if hot is not None:
                try:
                    batch = hot.next_batch(_left(deadline))
                    return batch and self._advance(batch)
                except OffsetOutOfRangeError:
                    if not self._return_to_history():
                        raise
            elif (batch := self._next_from_history()) is not None:
                return self._advance(batch)
            elif self._is_at_end():
                pause_seconds = self._pause_seconds(deadline)
                if pause_seconds <= 0:
                    return None
                self._closed.wait(pause_seconds)
        return None

    async def next_batch_async(self) -> Batch | None:
        while self.offset < self._stop_offset and not self._closed.is_set():
            hot = self._hot_reader()
            if hot is not None:
                try:
                    batch = await hot.next_batch_async()
                    return batch and self._advance(batch)
                except OffsetOutOfRangeError:
                    if not self._return_to_history():
                        raise
            elif (batch := await in_store_thread(self._next_from_history)) is not None:
                return self._advance(batch)
            elif self._is_at_end():
                if not self._follow:
                    return None
                await asyncio.sleep(self._log.poll_seconds)
        return None

    def place_of(self, offset: int) -> Path | str:
        hot, catalog = self._log.hot, self._log.history.catalog
        if hot is not None and offset >= hot.start_offset:
            return hot.place_of(offset)
        with contextlib.suppress(TidelogError):
            descriptor = catalog.at(offset)
            if descriptor is not None:
                return catalog.keys.object(descriptor.name)
        return catalog.keys.objects_prefix

    def close(self) -> None:
        self._closed.set()
        for reader in (self._hot, self._cold):
            if reader is not None:
                reader.close()

    # The hot log

    def _hot_reader(self) -> Reader | None:
        """The reader of the hot log, once that holds the offset. From then on it is asked first."""
        source = self._log.hot
        if self._hot is None and source is not None and self.offset >= source.start_offset:
            self._leave_history()
            self._hot = Reader(source, self.offset, self._stop_offset, self._follow)
        return self._hot

    def _return_to_history(self) -> bool:
        """Whether the hot log no longer says that it holds the offset. If it does, what it raised stays an error."""
        assert self._hot is not None
        self._hot.close()
        self._hot = None
        _ = self._log.next_offset  # makes a view poll again
        hot = self._log.hot
        return hot is None or self.offset < hot.start_offset

    # History

    def _next_from_history(self) -> Batch | None:
        """None when the hot log has the rest, or when no more is published."""
        hot = self._log.hot
        hot_start = NO_STOP if hot is None else hot.start_offset  # before the catalog is asked
        if self._cold is None:
            self._leave_deleted()
            if self.offset >= hot_start:
                return None
            stop_offset = min(self._stop_offset, hot_start)
            self._cold = self._log.history.read(self.offset, stop_offset, on_gap=self._on_gap)
        cold = self._cold
        try:
            batch = cold.next_batch()
        finally:
            if self._closed.is_set():
                cold.close()  # it was closed while this thread was making it
        if batch is not None:
            self.offset = batch.first_offset  # another one only where something was passed over
        elif not self._closed.is_set():
            self._leave_history()
            self.offset = cold.offset
            self._settle_missing(cold, hot_start)
        return batch

    def _leave_deleted(self) -> None:
        """An object may hold messages below the start of the topic: they are deleted, and go with it."""
        start = self._log.known_start_offset
        if self.offset >= start:
            return
        if self._on_gap == "raise":
            raise OffsetOutOfRangeError(
                f"offset {self.offset} is no longer kept; the oldest is {start}",
                operation="read",
                hint=f"Read on from {start}",
            )
        self._log.history.counters.skipped(min(start, self._stop_offset) - self.offset)
        self.offset = min(start, self._stop_offset)

    def _settle_missing(self, cold: HistoryReader, hot_start: int) -> None:
        """What history should have had after its end is lost: it was published or pruned, and is not there."""
        # Without a hot log, and to no certain stop, a reader ends where the history does.
        is_open_ended = self._follow or self._stop_offset == NO_STOP
        end = 0 if self._log.hot is None and is_open_ended else hot_start
        first, last = cold.offset, min(end, self._stop_offset) - 1
        if cold.reached_stop or first > last:
            return
        if self._on_gap == "raise":
            raise GapError(
                f"{offsets_text(first, last)} missing after the end of the history",
                first=first,
                last=last,
                path=self._log.history.catalog.keys.objects_prefix,
                hint=f'Read on from {last + 1}, or with on_gap="skip"',
            )
        self._log.history.counters.skipped(last + 1 - first)
        self.offset = last + 1

    def _leave_history(self) -> None:
        cold, self._cold = self._cold, None
        if cold is not None:
            cold.close()

    def _is_at_end(self) -> bool:
        """Whether only another node's shipping could add more."""
        return self._log.hot is None and self.offset < self._stop_offset

    def _pause_seconds(self, deadline: float | None) -> float:
        left = _left(deadline)
        poll_seconds = self._log.poll_seconds if self._follow else 0.0
        return poll_seconds if left is None else min(poll_seconds, left)


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else deadline - time.monotonic()
