"""A log: an ordered, durable sequence of payloads in one directory.

This module only assembles the parts: `append_queue` assigns offsets, `writer` writes messages to disk, `recovery` finds
them again, `reader` reads them. Payloads are opaque here, except that an i64 of microseconds at a fixed byte
(`time_field`) may be used to find an offset by time.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock

from tidelog.clock import Clock, Stopwatch, SystemClock
from tidelog.errors import (
    ClosedError,
    DiskFullError,
    ExhaustedError,
    LogFailedError,
    OffsetOutOfRangeError,
    TidelogError,
    offsets_text,
)
from tidelog.events import subject_of, tell
from tidelog.files import Files, explained
from tidelog.files import Lock as FileLock
from tidelog.log import shutdown as stopping
from tidelog.log.append_queue import AppendQueue, Waiter
from tidelog.log.atomic_batches import GroupOf, cut_unfinished, whole_below, without_unfinished
from tidelog.log.binding import BoundFiles
from tidelog.log.directory import marked_offset, take_directory
from tidelog.log.frame import Frames
from tidelog.log.reader import Position, ReadableLog, Reader, check_first_offset
from tidelog.log.recovery import KeptElsewhere, Recovered, cut_torn_tail, move_start, recover, settle_start
from tidelog.log.segment import FilePart, FileSpan, Segment, Segments, describe_segments, write_checkpoint
from tidelog.log.settings import LogSettings, LogStatistics
from tidelog.log.tail_cache import Batch
from tidelog.log.writer import ActiveFile, IngestedSegments, Writer, remove_ingested

_logger = logging.getLogger("tidelog.log")
# How long a deletion on a full disk waits for the writer, which looks for room four times a second.
_ROOM_SECONDS = 10.0
_LOOK_SECONDS = 0.01


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
        noun: str = "topic",
        marked_start: int | None = None,
    ) -> None:
        super().__init__(directory, files, settings.read_chunk_bytes, time_field)
        self.recovery = recovered.report
        self.subject = subject_of(noun, directory)
        """The subject of events in this log."""
        self._clock = clock
        self._settings = settings
        self._segments = Segments(recovered.segments, recovered.start_offset)
        self._segments.floor = min(marked_start or 0, recovered.next_offset)
        self._append_queue = AppendQueue(recovered.next_offset, settings)
        self._active = ActiveFile(
            files, clock, directory, settings, self._segments, self._append_queue.mutex, time_field, recovered.next_seq
        )
        self._writer = Writer(
            self._append_queue,
            self._active,
            settings,
            clock,
            directory,
            self._save_checkpoint,
            notes_new_files,
            subject=self.subject,
        )
        self._pruning = Lock()
        self._leaving: Segment | None = None
        self._closing = Lock()
        self._closed = False
        self._counting = Lock()
        self._append_wait_seconds = Stopwatch()
        self.try_append = self._append_queue.try_append
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
        noun: str = "topic",
    ) -> Log:
        """Takes the directory (created if absent), recovers what is in it and starts the writer.

        `first_offset` is where a log begins that has no frames yet. `group_of` tells which payloads are atomic batches.
        With `notes_new_files` the checkpoint lists every file from its first sync on, so that recovery notices one that
        is missing later. `kept_elsewhere` is asked about the start of a log whose files are gone.
        `is_covered`: the directory exists and is durable, and the caller holds a lock that covers it. `noun` is whose
        log it is, for events: that of a topic, or of an engine.
        """
        begin = time.perf_counter()
        settings = settings or LogSettings()
        files = files or BoundFiles()
        clock = clock or SystemClock()
        check_first_offset(first_offset)
        log: Log | None = None
        with explained("open", directory):
            if not is_covered:
                files.make_directories(directory)
            lock = None if is_covered else take_directory(files, directory)
            try:
                names = files.list(directory)
                remove_ingested(files, directory, names)
                recovered = recover(files, clock, directory, settings, time_field, first_offset, names)
                settle_start(
                    files, directory, marked_offset(names), recovered.segments, recovered.start_offset, kept_elsewhere
                )
                cut_torn_tail(files, directory, recovered.report)
                whole = recovered
                if group_of is not None:
                    whole = without_unfinished(files, recovered, group_of, time_field)
                    cut_unfinished(files, clock, directory, recovered, whole)
                marked = marked_offset(names)
                log = cls(directory, settings, files, clock, time_field, whole, notes_new_files, noun, marked)
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
        log._tell_opened(time.perf_counter() - begin)
        return log

    def _tell_opened(self, seconds: float) -> None:
        report = self.recovery
        tail = report.torn_tail
        if tail is not None or report.missing_synced is not None or report.unfinished is not None:
            tell(
                _logger,
                "log_recovered",
                **self.subject,
                next_offset=self.next_offset,
                file=None if tail is None else tail.file,
                cut_at_byte=None if tail is None else tail.byte,
                cut_bytes=0 if tail is None else tail.size,
                reason=None if tail is None else tail.reason,
                unfinished_offsets=report.unfinished,
                missing_offsets=report.missing_synced,
            )
        tell(
            _logger,
            "log_opened",
            **self.subject,
            start_offset=self.start_offset,
            next_offset=self.next_offset,
            files=report.files,
            checked_bytes=report.checked_bytes,
            seconds=seconds,
        )

    def _go_on_in_last_file(self, *, is_synced: bool) -> None:
        """Syncs the recovered data before it counts as durable: it may have been in the page cache only.

        Where the checkpoint vouches for all of it, the writer of the checkpoint has synced it before.
        """
        last = self._segments.last
        if last is None:
            return
        if not is_synced:
            file = self.files.open(last.path, write=True)
            try:
                file.sync()
                # Its name too: the process that created the file may have been killed before that was durable.
                self.files.sync_directory(self.directory)
            finally:
                file.close()
        self._active.adopt(last)
        self._writer.is_noted = is_synced

    # Appending

    def append(self, payload: bytes, *, sync: bool = False, timeout_seconds: float | None = None) -> int:
        """Accepts a payload and returns its offset, with `sync` once it is on the disk."""
        return self.finish_append(payload, self._append_queue.try_append(payload), sync, timeout_seconds)

    def finish_append(self, payload: bytes, offset: int | None, sync: bool, timeout_seconds: float | None) -> int:
        """Completes an append after `try_append`: waits for room if there was none, and for the disk if requested."""
        begin = time.perf_counter()
        if offset is None:
            offset = self._append_queue.append_many((payload,), timeout_seconds)
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
        first = self._append_queue.append_many(payloads, timeout_seconds)
        if sync:
            self.wait_durable(first, len(payloads))
        self._waited(begin)
        return range(first, first + len(payloads))

    def append_frames(self, frames: Frames, *, sync: bool = False, timeout_seconds: float | None = None) -> int:
        """Accepts payloads that are framed (`frame.encode_many`) with consecutive offsets, or none: the first offset.

        Whatever offsets the frames have, the log gives them its own and completes the checksums. The caller gives up
        the frames: in a buffer that can be written to (a bytearray) that happens without a copy, once it comes to the
        disk. The checksums must be right: they are not checked.
        """
        begin = time.perf_counter()
        first = self._append_queue.append_frames(frames, timeout_seconds)
        if sync:
            self.wait_durable(first, frames.count)
        self._waited(begin)
        return first

    async def append_async(self, payload: bytes, *, sync: bool = False, timeout_seconds: float | None = None) -> int:
        """As `append`, suspending the task instead of blocking the thread."""
        offset = self._append_queue.try_append(payload)
        if offset is None:
            offset = await self._append_queue.append_many_async((payload,), timeout_seconds)
        if sync:
            await self.wait_durable_async(offset, 1)
        return offset

    async def append_many_async(
        self, payloads: Sequence[bytes], *, sync: bool = False, timeout_seconds: float | None = None
    ) -> range:
        """As `append_many`, suspending the task instead of blocking the thread."""
        first = await self._append_queue.append_many_async(payloads, timeout_seconds)
        if sync:
            await self.wait_durable_async(first, len(payloads))
        return range(first, first + len(payloads))

    async def append_frames_async(
        self, frames: Frames, *, sync: bool = False, timeout_seconds: float | None = None
    ) -> int:
        """As `append_frames`, suspending the task instead of blocking the thread."""
        first = await self._append_queue.append_frames_async(frames, timeout_seconds)
        if sync:
            await self.wait_durable_async(first, frames.count)
        return first

    def append_frames_at_once(self, frames: Frames, *, sync: bool) -> int | None:
        """As `append_frames` if that is possible without waiting, else None: for event loops. With `sync`, the messages
        are synced soon, and `on_durable` tells."""
        return self._append_queue.append_frames_at_once(frames, sync=sync)

    def hold_appends(self) -> int:
        """From here on only `append_held` appends, and others wait, until `release_appends`; the next offset."""
        self._append_queue.hold()
        return self._append_queue.next_offset

    def release_appends(self) -> None:
        """Ends `hold_appends`: the appends that waited are served in order of arrival."""
        self._append_queue.release()

    def append_held(self, frames: Frames) -> None:
        """As `append_frames`, by the caller that holds back other appends."""
        if frames.count:
            self._append_queue.append_held(frames)

    def prepare_files(self, first_offset: int, number: int = 0) -> IngestedSegments:
        """For the caller that holds back other appends: files beside the log, whose messages get offsets from here on.

        `number` distinguishes the files of several writing threads.
        """
        place = self.files, self._clock, self.directory, self._settings, self._time_field
        return IngestedSegments(*place, first_offset, number)

    def adopt_held(self, prepared: Sequence[Segment]) -> None:
        """Such files become the next ones of the log, in this order. When it returns, all of it is on the disk."""
        self._append_queue.adopt_held(prepared)

    def wait_durable(self, first: int, count: int) -> None:
        """Returns once these accepted messages are on the disk.

        An error about a full disk says that they were accepted, and at which offset: they are not to be repeated.
        """
        try:
            self._append_queue.wait_durable(first + count)
        except (DiskFullError, ExhaustedError) as error:
            error.offset = first
            raise

    async def wait_durable_async(self, first: int, count: int) -> None:
        """As `wait_durable`, suspending the task."""
        try:
            if (durable := self._append_queue.durable_future(first + count)) is not None:
                await durable
        except (DiskFullError, ExhaustedError) as error:
            error.offset = first
            raise

    def on_written(self, callback: Callable[[], None] | None) -> None:
        """Calls this whenever more is in the files than before, and when the log stalls or ends: it must be quick, and
        raise nothing."""
        self._append_queue.on_written = callback

    def on_durable(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls this too whenever more is on the disk than before: it must be quick, and raise nothing. What is
        returned ends that."""
        queue = self._append_queue
        with queue.mutex:
            queue.on_durable += (callback,)

        def end() -> None:
            with queue.mutex:
                queue.on_durable = tuple(one for one in queue.on_durable if one is not callback)

        return end

    def request_sync(self, next_offset: int) -> None:
        """Everything below this offset is synced soon, and `on_durable` tells; raises why it cannot be."""
        self._append_queue.request_sync(next_offset)

    def flush(self) -> None:
        """Returns once everything accepted so far is on the disk."""
        self._append_queue.wait_durable(self._append_queue.next_offset)

    def end_file(self) -> None:
        """Seals the current file: everything accepted so far is then in sealed files."""
        self._append_queue.wait_file_end()

    async def flush_async(self) -> None:
        """As `flush`, suspending the task."""
        if (durable := self._append_queue.durable_future(self._append_queue.next_offset)) is not None:
            await durable

    # Where it stands

    @property
    def next_offset(self) -> int:
        return self._append_queue.next_offset

    @property
    def written_offset(self) -> int:
        """Everything below is in a file: it outlives this process, though not a loss of power."""
        return self._append_queue.written_offset

    @property
    def durable_offset(self) -> int:
        """Everything below is on the disk. It may lie inside a group of messages that count only together."""
        return self._append_queue.durable_offset

    @property
    def start_offset(self) -> int:
        with self._append_queue.mutex:
            return self._start_offset()

    def _start_offset(self) -> int:
        return self._segments.start_offset if len(self._segments) else self._append_queue.cache.start_offset

    # Reading

    def check_open(self) -> None:
        """ClosedError once it is closed, and in a forked child, whose parent runs on."""
        if self._closed:
            raise self._closed_error()

    def read(self, start: Position = "earliest", stop: Position | None = None, *, follow: bool = False) -> Reader:
        """As every readable log; a closed one raises."""
        self.check_open()
        return super().read(start, stop, follow=follow)

    def locate(self, offset: int, stop_offset: int) -> Batch | FilePart | None:
        with self._append_queue.mutex:
            batch = self._append_queue.cache.read(offset, stop_offset)
            if batch is not None and offset >= self._segments.floor:
                return batch
            segment = self._segments.find(offset)
            if segment is not None:
                return FilePart(segment, offset)
            if offset >= self._append_queue.next_offset:
                return None
            earliest = self._start_offset()
        raise OffsetOutOfRangeError(
            f"offset {offset} is no longer kept; the oldest is {earliest}", operation="read", path=self.directory
        )

    def place_of(self, offset: int) -> Path:
        with self._append_queue.mutex:
            segment = self._segments.find(offset)
        return self.directory if segment is None else segment.path

    def _file_for_time(self, time_us: int) -> int:
        with self._append_queue.mutex:
            segment = self._segments.first_for_time(time_us)
            return segment.first_offset if segment is not None else self._append_queue.written_offset

    def wait_for_news(self, offset: int, timeout_seconds: float | None) -> bool:
        return self._append_queue.wait_for_news(offset, timeout_seconds)

    async def wait_for_news_async(self, offset: int) -> None:
        await self._append_queue.wait_for_news_async(offset)

    def listen(self, waiter: Waiter, offset: int) -> bool:
        """Finishes the waiter when there is something at `offset`; False when there is already, or never will be."""
        return self._append_queue.listen(waiter, offset)

    def stop_listening(self, waiter: Waiter) -> bool:
        """Whether it was still listening: only then must the caller finish it."""
        return self._append_queue.stop_listening(waiter)

    @property
    def over(self) -> bool:
        """Closed, or failed."""
        return self._append_queue.over

    @property
    def stall(self) -> TidelogError | None:
        """Why nothing becomes durable, for now or for good."""
        stall = self._append_queue.stall
        return None if stall is None else stall()

    @property
    def failure(self) -> TidelogError | None:
        stall = self._append_queue.stall
        return stall() if self._writer.error is not None and not self._closed and stall is not None else None

    # For shipping and pruning

    def ends_whole_at(self, offset: int) -> bool:
        """Whether no group of messages lies across an offset because the log ends there: groups are accepted whole,
        unless they are being ingested."""
        return self._append_queue.ends_whole_at(offset)

    def parts(self, offset: int, stop_offset: int) -> list[FilePart]:
        """Where the messages from `offset` up to `stop_offset` (exclusive) are in the files, oldest first."""
        with self._append_queue.mutex:
            overlapping = [s for s in self._segments if s.next_offset > offset and s.first_offset < stop_offset]
            return [FilePart(segment, max(offset, segment.first_offset)) for segment in overlapping]

    def file_spans(self) -> list[FileSpan]:
        """The files as they are at this moment, oldest first."""
        with self._append_queue.mutex:
            return [
                FileSpan(s.first_offset, s.next_offset, s.size, s.created_us, s.max_time_us) for s in self._segments
            ]

    def delete_before(self, offset: int) -> None:
        """Nothing below an offset can be read from now on, for good; files that lie wholly below it are removed.

        The mark of the start is durable before readers notice, and everything below it is on the disk: a log never
        ends before its start. On a full disk what is in the files goes first: that is the way out of it.
        """
        try:
            self.flush()
        except DiskFullError:
            self._make_room_below(offset)
            self.flush()
        self._delete_below(offset)

    def _delete_below(self, offset: int) -> None:
        with self._pruning:
            if offset > self.start_offset:
                with explained("delete", self.directory):
                    move_start(self.files, self.directory, offset)
                with self._append_queue.mutex:
                    self._segments.floor = offset
        self.remove_below(offset)

    def _make_room_below(self, offset: int) -> None:
        """Deletes what is in files, and waits until the writer has found the room."""
        self._writer.leave_file(_ROOM_SECONDS)
        self._delete_below(min(offset, self.durable_offset))
        deadline = time.monotonic() + _ROOM_SECONDS
        while self._append_queue.stall is not None and time.monotonic() < deadline:
            self._writer.ring()
            time.sleep(_LOOK_SECONDS)

    def remove_below(self, offset: int) -> int:
        """Deletes files all of whose messages are below an offset, never the last one; returns the bytes freed.

        The new start of the log is marked first. Each deletion is durable before the next begins, so that a crash
        leaves no hole.
        """
        freed_bytes, files, begin = 0, 0, time.perf_counter()
        with self._pruning:
            start_offset = self._mark_start(offset)
            while not self._closed and (segment := self._next_to_remove(start_offset)) is not None:
                with explained("remove", segment.path):
                    with contextlib.suppress(FileNotFoundError):
                        self.files.remove(segment.path)
                    self.files.sync_directory(self.directory)
                self._leaving = None
                self._writer.is_noted = False
                freed_bytes, files = freed_bytes + segment.size, files + 1
        if files:
            tell(
                _logger,
                "local_pruned",
                **self.subject,
                start_offset=start_offset,
                files=files,
                bytes=freed_bytes,
                seconds=time.perf_counter() - begin,
            )
        return freed_bytes

    def _mark_start(self, offset: int) -> int:
        """Where the log begins when all files below an offset are gone. Files that become removable later stay."""
        with self._append_queue.mutex:
            first, after = self._segments.first_offset, self._segments.start_without(offset)
        if not self._closed and (after > first or self._leaving is not None):
            with explained("remove", self.directory):
                move_start(self.files, self.directory, after)
        return after

    def _next_to_remove(self, offset: int) -> Segment | None:
        """One whose removal failed comes first: removing a later file would leave a hole."""
        if self._leaving is None:
            with self._append_queue.mutex:
                self._leaving = self._segments.remove_first_below(offset)
        return self._leaving

    def refuse_appends(self, make_error: Callable[[], TidelogError] | None) -> None:
        """From now on every append raises this; accepted messages are written, and reading continues. None ends
        that."""
        self._append_queue.bar(make_error)

    # Ending

    def close(self) -> None:
        """Brings everything accepted to the disk and gives the directory back. Closing twice is fine."""
        with self._closing:
            if self._closed:
                return
            self._append_queue.close(self._closed_error)
            self._writer.join()
            self._closed = True
            self._append_queue.stop_short(self._closed_error, over=True)
            self._release_lock()
            stopping.no_longer_open(self)
        if self._writer.error is not None and self._append_queue.next_offset > self._append_queue.durable_offset:
            raise self._unwritten_error(self._writer.error)

    def _abandon(self) -> None:
        """In a forked child: the parent keeps writing, this copy never does."""
        self._closed = True
        self._closing, self._pruning = Lock(), Lock()  # other threads of the parent may have held them
        self._append_queue = AppendQueue(self._append_queue.next_offset, LogSettings())
        self.try_append = self._append_queue.try_append
        self._append_queue.close(self._forked_error)
        self._append_queue.stop_short(self._forked_error, over=True)
        if self._lock is not None:
            self._lock.abandon()

    def forget(self) -> None:
        """After closing, when the files are deleted: readers must not look for them, another log may soon use their
        names."""
        self._append_queue.forget()
        with self._append_queue.mutex:
            self._segments = Segments([], self._append_queue.next_offset)

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
        first = whole_below(self, self._append_queue.durable_offset, self._group_of)
        lost = offsets_text(first, self._append_queue.next_offset - 1)
        error = LogFailedError(
            f"closed, but {lost} accepted before could not be written to the disk: {cause.message}",
            path=self.directory,
            hint="What did not reach the disk is lost with this process; append it again once the disk works",
        )
        error.__cause__ = cause
        return error

    def _save_checkpoint(self) -> None:
        """Called by the writer when everything in the files is synced."""
        with self._append_queue.mutex:
            checkpoint = describe_segments(tuple(self._segments), self._start_offset(), self._clock.now_us())
        write_checkpoint(self.files, self.directory, checkpoint)

    def statistics(self) -> LogStatistics:
        append_queue, writer = self._append_queue, self._writer
        with append_queue.mutex:
            return LogStatistics(
                state=self._state(),
                start_offset=self._start_offset(),
                next_offset=append_queue.next_offset,
                written_offset=append_queue.written_offset,
                durable_offset=append_queue.durable_offset,
                files=len(self._segments),
                file_bytes=self._segments.total_bytes,
                cached_messages=append_queue.cache.cached_messages,
                cached_bytes=append_queue.cache.cached_bytes,
                queued_messages=append_queue.next_offset - append_queue.written_offset,
                queued_bytes=append_queue.held_bytes,
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
        return "disk full" if self._append_queue.stall is not None else "open"
