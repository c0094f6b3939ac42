"""A log: an ordered, durable sequence of payloads in one directory.

This file only puts the parts together; `handover` gives offsets, `writer` brings them to disk, `recovery` finds them
again, `reader` reads them. Payloads are opaque here, except that an i64 of microseconds at a fixed byte (`time_field`)
may be used to find an offset by time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock

from tidelog.clock import Clock, SystemClock
from tidelog.errors import (
    ClosedError,
    DiskFullError,
    ExhaustedError,
    LogFailedError,
    OffsetOutOfRangeError,
    TidelogError,
    offsets_text,
)
from tidelog.files import Files, explained
from tidelog.files import Lock as FileLock
from tidelog.log import stopping
from tidelog.log.active_file import ActiveFile
from tidelog.log.bound_files import BoundFiles
from tidelog.log.cache import Batch
from tidelog.log.checkpoint import describe_segments, write_checkpoint
from tidelog.log.frame import Frames
from tidelog.log.groups import GroupOf, cut_unfinished, whole_below, without_unfinished
from tidelog.log.handover import Handover
from tidelog.log.prepared import PreparedFiles, remove_prepared
from tidelog.log.readable import Position, ReadableLog
from tidelog.log.reader import FilePart, Reader
from tidelog.log.recovery import Recovered, cut_torn_tail, recover
from tidelog.log.segment import Segment
from tidelog.log.segments import FileSpan, Segments
from tidelog.log.settings import LogSettings
from tidelog.log.start_mark import KeptElsewhere, move_start, settle_start
from tidelog.log.statistics import LogStatistics, Stopwatch
from tidelog.log.taking import take_directory
from tidelog.log.waiting import Waiter
from tidelog.log.writer import Writer


class Log(ReadableLog):
    """An open log. Make one with `Log.open`; it owns its directory until it is closed."""

    def __init__(
        self,
        directory: Path,
        settings: LogSettings,
        files: Files,
        clock: Clock,
        time_field: int | None,
        recovered: Recovered,
        notes_new_files: bool = False,
    ) -> None:
        super().__init__(directory, files, settings.read_chunk_bytes, time_field)
        self.recovery = recovered.report
        self._clock = clock
        self._settings = settings
        self._segments = Segments(recovered.segments, recovered.start_offset)
        self._handover = Handover(recovered.next_offset, settings)
        self._active = ActiveFile(
            files, clock, directory, settings, self._segments, self._handover.mutex, time_field, recovered.next_seq
        )
        self._writer = Writer(
            *(self._handover, self._active, settings, clock, directory, self._save_checkpoint, notes_new_files)
        )
        self._pruning = Lock()
        self._leaving: Segment | None = None
        self._closing = Lock()
        self._closed = False
        self._counting = Lock()
        self._append_wait_seconds = Stopwatch()
        self.try_append = self._handover.try_append
        """Accepts a payload if there is room at once: its offset, or None."""
        self._lock: FileLock | None = None
        self._group_of: GroupOf | None = None

    @classmethod
    def open(
        cls,
        directory: Path,
        settings: LogSettings | None = None,
        *,
        files: Files | None = None,
        clock: Clock | None = None,
        time_field: int | None = None,
        first_offset: int = 0,
        group_of: GroupOf | None = None,
        notes_new_files: bool = False,
        kept_elsewhere: KeptElsewhere | None = None,
        is_covered: bool = False,
    ) -> Log:
        """Takes the directory (made when absent), recovers what is in it and starts the writer.

        `first_offset` is where a log begins that has no frames yet. `group_of` tells which payloads are there only
        together with others. With `notes_new_files` the checkpoint knows every file from its first sync on, so that
        one that is missing later is missed. `kept_elsewhere` is asked about the start of a log whose files are gone.
        `is_covered`: the directory is there and durable, and the caller holds a lock that covers it.
        """
        settings = settings or LogSettings()
        files = files or BoundFiles()
        clock = clock or SystemClock()
        log: Log | None = None
        with explained("open", directory):
            if not is_covered:
                files.make_directories(directory)
            lock = None if is_covered else take_directory(files, directory)
            try:
                remove_prepared(files, directory, files.list(directory))
                recovered = recover(files, clock, directory, settings, time_field, first_offset)
                settle_start(files, directory, recovered.segments, recovered.start_offset, kept_elsewhere)
                cut_torn_tail(files, directory, recovered.report)
                whole = without_unfinished(files, recovered, group_of, time_field)
                cut_unfinished(files, clock, directory, recovered, whole)
                log = cls(directory, settings, files, clock, time_field, whole, notes_new_files)
                log._lock = lock
                log._group_of = group_of
                log._go_on_in_last_file(is_synced=whole.is_synced)
                log._writer.start(files)
            except BaseException:
                if log is not None:
                    log._active.close()
                if lock is not None:
                    lock.release()
                raise
        stopping.closes_at_exit(log)
        return log

    def _go_on_in_last_file(self, *, is_synced: bool) -> None:
        """What was found is synced before it counts as durable: it may have been in the system's memory only.

        Where the checkpoint vouches for all of it, whoever wrote that has synced it before.
        """
        last = self._segments.last
        if last is None:
            return
        if not is_synced:
            file = self.files.open(last.path, write=True)
            try:
                file.sync()
                # Its name too: whoever made the file may have been killed before that was durable.
                self.files.sync_directory(self.directory)
            finally:
                file.close()
        self._active.adopt(last)
        self._writer.is_noted = is_synced

    # Appending

    def append(self, payload: bytes, *, sync: bool = False, timeout_seconds: float | None = None) -> int:
        """Accepts a payload and returns its offset, with `sync` once it is on the disk."""
        return self.finish_append(payload, self._handover.try_append(payload), sync, timeout_seconds)

    def finish_append(self, payload: bytes, offset: int | None, sync: bool, timeout_seconds: float | None) -> int:
        """What is left to do after `try_append`: wait for room if there was none, and for the disk if asked to."""
        begin = time.perf_counter()
        if offset is None:
            offset = self._handover.append_many((payload,), timeout_seconds)
        if sync:
            self.wait_durable(offset, 1)
        self._waited(begin)
        return offset

    def _waited(self, begin: float) -> None:
        """Counts an append that had to wait for room or for the disk; the others take a few microseconds each."""
        with self._counting:
            self._append_wait_seconds.add(time.perf_counter() - begin)

    def append_many(
        self, payloads: Sequence[bytes], *, sync: bool = False, timeout_seconds: float | None = None
    ) -> range:
        """Accepts all payloads with consecutive offsets, or none of them."""
        begin = time.perf_counter()
        first = self._handover.append_many(payloads, timeout_seconds)
        if sync:
            self.wait_durable(first, len(payloads))
        self._waited(begin)
        return range(first, first + len(payloads))

    async def append_async(self, payload: bytes, *, sync: bool = False, timeout_seconds: float | None = None) -> int:
        """As `append`, suspending the task instead of blocking the thread."""
        offset = self._handover.try_append(payload)
        if offset is None:
            offset = await self._handover.append_many_async((payload,), timeout_seconds)
        if sync:
            await self.wait_durable_async(offset, 1)
        return offset

    async def append_many_async(
        self, payloads: Sequence[bytes], *, sync: bool = False, timeout_seconds: float | None = None
    ) -> range:
        """As `append_many`, suspending the task instead of blocking the thread."""
        first = await self._handover.append_many_async(payloads, timeout_seconds)
        if sync:
            await self.wait_durable_async(first, len(payloads))
        return range(first, first + len(payloads))

    def hold_appends(self) -> int:
        """From here on only `append_held` appends, and others wait, until `release_appends`; the next offset."""
        self._handover.hold()
        return self._handover.next_offset

    def release_appends(self) -> None:
        """Ends that: those who waited are served in order of arrival."""
        self._handover.release()

    def append_held(self, frames: Frames) -> None:
        """Accepts frames of whoever holds the appends of others back; they are numbered anew."""
        if frames.count:
            self._handover.append_held(frames.renumbered(self._handover.next_offset))

    def prepare_files(self, first_offset: int, number: int = 0) -> PreparedFiles:
        """For whoever holds the appends of others back: files beside the log, whose messages get offsets from here on.

        `number` tells several apart that are written by several threads.
        """
        place = self.files, self._clock, self.directory, self._settings, self._time_field
        return PreparedFiles(*place, first_offset, number)

    def adopt_held(self, prepared: Sequence[Segment]) -> None:
        """Such files become the next ones of the log, in this order. When it returns, all of it is on the disk."""
        self._handover.adopt_held(prepared)

    def wait_durable(self, first: int, count: int) -> None:
        """Returns once these messages, which were accepted, are on the disk.

        Who hears of a full disk hears that they were accepted, and at which offset: not to be repeated.
        """
        try:
            self._handover.wait_durable(first + count)
        except (DiskFullError, ExhaustedError) as error:
            error.offset = first
            raise

    async def wait_durable_async(self, first: int, count: int) -> None:
        """As `wait_durable`, suspending the task."""
        try:
            if (durable := self._handover.durable_future(first + count)) is not None:
                await durable
        except (DiskFullError, ExhaustedError) as error:
            error.offset = first
            raise

    def on_durable(self, callback: Callable[[], None]) -> None:
        """Calls this whenever more is on the disk than before: it must be quick, and raise nothing."""
        self._handover.on_durable = callback

    def flush(self) -> None:
        """Returns once everything accepted so far is on the disk."""
        self._handover.wait_durable(self._handover.next_offset)

    def end_file(self) -> None:
        """Ends the file at the end: everything accepted so far is in files that nothing is added to any more."""
        self._handover.wait_file_end()

    async def flush_async(self) -> None:
        """As `flush`, suspending the task."""
        if (durable := self._handover.durable_future(self._handover.next_offset)) is not None:
            await durable

    # Where it stands

    @property
    def next_offset(self) -> int:
        return self._handover.next_offset

    @property
    def durable_offset(self) -> int:
        """Everything below is on the disk. It may lie inside a group of messages that count only together."""
        return self._handover.durable_offset

    @property
    def start_offset(self) -> int:
        with self._handover.mutex:
            return self._start_offset()

    def _start_offset(self) -> int:
        return self._segments.start_offset if len(self._segments) else self._handover.cache.start_offset

    # Reading

    def read(self, start: Position = "earliest", stop: Position | None = None, *, follow: bool = False) -> Reader:
        """As every readable log; a closed one raises."""
        if self._closed:
            raise self._closed_error()
        return super().read(start, stop, follow=follow)

    def locate(self, offset: int, stop_offset: int) -> Batch | FilePart | None:
        with self._handover.mutex:
            batch = self._handover.cache.read(offset, stop_offset)
            if batch is not None:
                return batch
            segment = self._segments.find(offset)
            if segment is not None:
                return FilePart(segment, offset)
            if offset >= self._handover.next_offset:
                return None
            earliest = self._start_offset()
        raise OffsetOutOfRangeError(
            f"offset {offset} is no longer kept; the oldest is {earliest}", operation="read", path=self.directory
        )

    def place_of(self, offset: int) -> Path:
        with self._handover.mutex:
            segment = self._segments.find(offset)
        return self.directory if segment is None else segment.path

    def _file_for_time(self, time_us: int) -> int:
        with self._handover.mutex:
            segment = self._segments.first_for_time(time_us)
            return segment.first_offset if segment is not None else self._handover.written_offset

    def wait_for_news(self, offset: int, timeout_seconds: float | None) -> bool:
        return self._handover.wait_for_news(offset, timeout_seconds)

    async def wait_for_news_async(self, offset: int) -> None:
        await self._handover.wait_for_news_async(offset)

    def listen(self, waiter: Waiter, offset: int) -> bool:
        """Finishes the waiter when there is something at `offset`; False when there is already, or never will be."""
        return self._handover.listen(waiter, offset)

    def stop_listening(self, waiter: Waiter) -> bool:
        """Whether it was still listening: only then is it the caller's to finish."""
        return self._handover.stop_listening(waiter)

    @property
    def over(self) -> bool:
        """Closed, or failed."""
        return self._handover.over

    @property
    def failure(self) -> TidelogError | None:
        stall = self._handover.stall
        return stall() if self._writer.error is not None and not self._closed and stall is not None else None

    # For those who ship and prune

    def parts(self, offset: int, stop_offset: int) -> list[FilePart]:
        """Where the messages from `offset` up to `stop_offset` (exclusive) are in the files, oldest first."""
        with self._handover.mutex:
            overlapping = [s for s in self._segments if s.next_offset > offset and s.first_offset < stop_offset]
            return [FilePart(segment, max(offset, segment.first_offset)) for segment in overlapping]

    def file_spans(self) -> list[FileSpan]:
        """The files as they are at this moment, oldest first."""
        with self._handover.mutex:
            return [
                FileSpan(s.first_offset, s.next_offset, s.size, s.created_us, s.max_time_us) for s in self._segments
            ]

    def remove_below(self, offset: int) -> int:
        """Deletes files all of whose messages are below an offset, never the last one; returns the bytes freed.

        That the log begins behind them is marked first. Each deletion is durable before the next begins, so that what a
        crash leaves has no hole in it.
        """
        freed_bytes = 0
        with self._pruning:
            start_offset = self._mark_start(offset)
            while not self._closed and (segment := self._next_to_remove(start_offset)) is not None:
                with explained("remove", segment.path):
                    with contextlib.suppress(FileNotFoundError):
                        self.files.remove(segment.path)
                    self.files.sync_directory(self.directory)
                self._leaving = None
                self._writer.is_noted = False
                freed_bytes += segment.size
        return freed_bytes

    def _mark_start(self, offset: int) -> int:
        """Where the log begins when all files below an offset are gone. Files that become removable later stay."""
        with self._handover.mutex:
            before, after = self._segments.start_offset, self._segments.start_without(offset)
        if not self._closed and (after > before or self._leaving is not None):
            with explained("remove", self.directory):
                move_start(self.files, self.directory, after)
        return after

    def _next_to_remove(self, offset: int) -> Segment | None:
        """One whose removal failed comes first: if what is behind it went, the files would have a hole."""
        if self._leaving is None:
            with self._handover.mutex:
                self._leaving = self._segments.remove_first_below(offset)
        return self._leaving

    def refuse_appends(self, make_error: Callable[[], TidelogError] | None) -> None:
        """From now on every append raises this; what was accepted is written, and reading goes on. None ends that."""
        self._handover.bar(make_error)

    # Ending

    def close(self) -> None:
        """Brings everything accepted to the disk and gives the directory back. Closing twice is fine."""
        with self._closing:
            if self._closed:
                return
            self._handover.close(self._closed_error)
            self._writer.join()
            self._closed = True
            self._handover.stop_short(self._closed_error, over=True)
            self._release_lock()
            stopping.no_longer_open(self)
        if self._writer.error is not None and self._handover.next_offset > self._handover.durable_offset:
            raise self._unwritten_error(self._writer.error)

    def abandon(self) -> None:
        """In a forked child: the parent goes on writing, this copy never does."""
        self._closed = True
        self._closing, self._pruning = Lock(), Lock()  # other threads of the parent may have held them
        self._handover = Handover(self._handover.next_offset, LogSettings())
        self.try_append = self._handover.try_append
        self._handover.close(self._forked_error)
        self._handover.stop_short(self._forked_error, over=True)
        if self._lock is not None:
            self._lock.abandon()

    def forget(self) -> None:
        """After closing, when the files go: readers must not look for them, their names may soon be another log's."""
        self._handover.forget()
        with self._handover.mutex:
            self._segments = Segments([], self._handover.next_offset)

    def _release_lock(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def _closed_error(self) -> ClosedError:
        return ClosedError("the log is closed", path=self.directory, hint="Open it again")

    def _forked_error(self) -> ClosedError:
        return ClosedError(
            "the log was opened before this process was forked", path=self.directory, hint="Open it after the fork"
        )

    def _unwritten_error(self, cause: TidelogError) -> LogFailedError:
        first = whole_below(self, self._handover.durable_offset, self._group_of)
        lost = offsets_text(first, self._handover.next_offset - 1)
        error = LogFailedError(
            f"closed, but {lost} accepted before could not be brought to the disk: {cause.message}",
            path=self.directory,
            hint="What did not reach the disk is lost with this process; once the disk is well, append it again",
        )
        error.__cause__ = cause
        return error

    def _save_checkpoint(self) -> None:
        """Called by the writer when everything in the files is synced."""
        with self._handover.mutex:
            checkpoint = describe_segments(tuple(self._segments), self._start_offset(), self._clock.now_us())
        write_checkpoint(self.files, self.directory, checkpoint)

    def statistics(self) -> LogStatistics:
        """One moment of the log."""
        handover, writer = self._handover, self._writer
        with handover.mutex:
            return LogStatistics(
                state=self._state(),
                start_offset=self._start_offset(),
                next_offset=handover.next_offset,
                written_offset=handover.written_offset,
                durable_offset=handover.durable_offset,
                files=len(self._segments),
                file_bytes=self._segments.total_bytes,
                cached_messages=handover.cache.cached_messages,
                cached_bytes=handover.cache.cached_bytes,
                handover_messages=handover.next_offset - handover.written_offset,
                handover_bytes=handover.held_bytes,
                writes=writer.writes,
                written_bytes=writer.written_bytes,
                rotations=self._active.sealed_files,
                checkpoint_failures=writer.checkpoint_failures,
                full_disk_waits=writer.full_disk_waits,
                append_wait_seconds=self._append_wait_seconds.snapshot(),
                write_seconds=writer.write_seconds.snapshot(),
                sync_seconds=writer.sync_seconds.snapshot(),
                recovery=self.recovery,
            )

    def _state(self) -> str:
        if self._closed:
            return "closed"
        if self._writer.error is not None:
            return "failed"
        return "disk full" if self._handover.stall is not None else "open"
