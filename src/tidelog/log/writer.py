"""The writer owns the files of a log: it decides when to write, when to sync and when to begin a new file.

It has no thread: a worker of the pool serves it while there is work (`serve`), one at a time. Work that is unfinished
when the worker leaves is kept here for the next one: the rest of a chunk that a full disk has no room for.

Invariants
- Group commit: everything queued during one sync is written and made durable by the next.
- `durable_offset` advances only after a sync that returned, and only to what was written before it began.
- A failed sync ends the log: it is never retried on the same handle, because the operating system may have dropped the
  data and would report success. A failed write ends it too, except when the disk is full or the process is out of
  descriptors: then the same frames are written again at the same position until there is room, and appends are refused
  meanwhile. A log that is being closed cannot wait: it may use the descriptors that are kept in reserve.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from threading import Event, Lock

from tidelog.clock import Clock, Stopwatch
from tidelog.codec import MAX_OFFSET
from tidelog.errors import DiskFullError, InputError, InternalError, LogFailedError, RetryError, TidelogError
from tidelog.events import Subject, tell
from tidelog.files import File, Files, explained, is_full_disk
from tidelog.limits import is_out_of_descriptors, out_of_descriptors, reserve
from tidelog.log.append_queue import AppendQueue
from tidelog.log.directory import ingested_name, is_ingested, wal_name
from tidelog.log.frame import HEADER_BYTES, Frames, encode_many, join
from tidelog.log.segment import Segment, Segments
from tidelog.log.settings import LogSettings
from tidelog.log.tail_cache import Chunk, caches
from tidelog.log.writer_pool import WriterPool, join_pool
from tidelog.tracing import TRACING, record_span

# The file at the end of the log: written, synced, and closed for good when it is full or old.
#
# Invariants
# - Only the writer calls in here, and it is served by one thread at a time.
# - A segment's `size` and `next_offset` advance only after its bytes were written, in one step and under the mutex, so
#   a reader never sees half a frame.
# - A failed write is retried at the same position, and overwrites what it left there.
# - A new file is created only after the one before is synced, and its name is durable before anything in it can be.
# - A descriptor is released only when everything is synced: a disk error is reported to a descriptor that was open when
#   it happened.


class ActiveFile:
    """The file that frames are written to; created with the first frame after opening or sealing."""

    def __init__(
        self,
        files: Files,
        clock: Clock,
        directory: Path,
        settings: LogSettings,
        segments: Segments,
        mutex: Lock,
        time_field: int | None,
        next_seq: int,
        name_of: Callable[[int], str] = wal_name,
    ) -> None:
        self._files = files
        self._clock = clock
        self._directory = directory
        self._max_bytes = settings.rotate_max_bytes
        self._max_age_us = settings.rotate_max_seconds * 1_000_000
        self._segments = segments
        self._mutex = mutex
        self._time_field = time_field
        self._next_seq = next_seq
        self._name_of = name_of
        self._segment: Segment | None = None
        self._file: File | None = None
        self.unsynced_bytes = 0
        self.sealed_files = 0

    def adopt(self, segment: Segment) -> None:
        """Continues in a file that existed when the log was opened."""
        self._segment = segment

    @property
    def is_there(self) -> bool:
        """Whether there is a file that the next frame may go into."""
        return self._segment is not None

    @property
    def is_open(self) -> bool:
        """Whether a descriptor is in use for it."""
        return self._file is not None

    def rest(self) -> None:
        """Gives the descriptor back, of a file that is synced; the next frame opens it again."""
        assert not self.unsynced_bytes
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    @property
    def seq(self) -> int | None:
        return None if self._segment is None else self._segment.seq

    @property
    def holds_frames(self) -> bool:
        return self._segment is not None and self._segment.size > 0

    @property
    def is_old(self) -> bool:
        """Whether the file is due for sealing by age."""
        seconds = self.seconds_until_old
        return seconds is not None and seconds <= 0

    @property
    def seconds_until_old(self) -> float | None:
        """How long until the file is due for sealing by age; None while it is empty."""
        if self._segment is None or not self._segment.size:
            return None
        return (self._segment.created_us + self._max_age_us - self._clock.now_us()) / 1_000_000

    def write(self, frames: Frames) -> Frames:
        """Writes as many frames as belong into one file, at least one; returns those that were written."""
        file, segment = self._open_file(frames.first_offset)
        part = frames if self._fits(frames, segment) else self._first_part(frames, segment)
        begin, end = part.start_of(0), part.end
        view = memoryview(part.buffer)[begin:end]
        try:
            file.write_at(segment.size, view)
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(segment.size)
            raise
        self.unsynced_bytes += end - begin
        with self._mutex:
            segment.extend(part, segment.size - begin, segment.size + end - begin, self._time_field)
        return part

    def sync(self) -> None:
        """Everything written is on the disk when this returns. A failure is final: what it left unsynced is unknown."""
        if self._file is not None and self.unsynced_bytes:
            try:
                self._file.sync()
            except OSError as error:
                self._cut_unsynced()
                raise _sync_failed(error, self._directory) from error
        self.unsynced_bytes = 0

    def _cut_unsynced(self) -> None:
        """After a failed sync the system shows bytes that it will never write, and reports success for the next sync.

        The next process that opens the log must not find them: it would continue after them, and they would be a hole
        after a power failure, with acknowledged frames on the far side.
        """
        if self._file is not None and self._segment is not None:
            with contextlib.suppress(OSError):
                self._file.truncate(self._segment.size - self.unsynced_bytes)

    def seal(self) -> Segment | None:
        """Closes the file, which must be synced; the next frame begins a new one. The file, where there was one."""
        assert not self.unsynced_bytes
        file, segment, self._file, self._segment = self._file, self._segment, None, None
        if file is not None:
            file.close()
        if segment is not None:
            self.sealed_files += 1
        return segment

    def adopt_ingested(self, prepared: Sequence[Segment]) -> None:
        """Files that were written and synced beside the log become its next ones, all at once for readers.

        Each name is durable before the next is given, so that a crash leaves no hole.
        """
        self._let_go_of_empty()
        self.seal()
        for segment in prepared:
            path = self._directory / self._name_of(self._next_seq)
            self._files.rename(segment.path, path)
            self._files.sync_directory(self._directory)
            segment.seq, segment.path = self._next_seq, path
            self._next_seq += 1
        with self._mutex:
            for segment in prepared:
                self._segments.add(segment)

    def _let_go_of_empty(self) -> None:
        """A file without frames must not be followed by another one: that one gets its name."""
        segment = self._segment
        if segment is not None and not segment.size:
            self._next_seq = segment.seq
            with self._mutex:
                self._segments.remove_empty_last()

    def close(self) -> None:
        """Lets go of the file as it is."""
        file, self._file, self._segment = self._file, None, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def must_seal(self, frames: Frames) -> bool:
        """Whether the next frame belongs into a new file."""
        segment = self._segment
        if segment is None or not segment.size:
            return False
        first_bytes = frames.start_of(1) - frames.start_of(0)
        return segment.size + first_bytes > self._max_bytes or self.is_old

    def _open_file(self, first_offset: int) -> tuple[File, Segment]:
        if self._segment is None:
            path = self._directory / self._name_of(self._next_seq)
            file = self._create(path)
            self._segment = Segment(self._next_seq, path, first_offset, self._clock.now_us())
            self._file = file
            self._next_seq += 1
            with self._mutex:
                self._segments.add(self._segment)
        elif self._file is None:
            self._file = self._files.open(self._segment.path, write=True)
        return self._file, self._segment

    def _create(self, path: Path) -> File:
        file = self._files.create(path)
        try:
            self._files.sync_directory(self._directory)
        except OSError as error:
            file.close()
            if is_out_of_descriptors(error):  # nothing was synced, and nothing failed to be
                self._files.remove(path)
                raise
            # Its name may never be durable, even if a later sync succeeds: this file must not be continued.
            with contextlib.suppress(OSError):
                self._files.remove(path)
            raise _sync_failed(error, self._directory) from error
        return file

    def _fits(self, frames: Frames, segment: Segment) -> bool:
        return segment.size + frames.end - frames.start_of(0) <= self._max_bytes

    def _first_part(self, frames: Frames, segment: Segment) -> Frames:
        """The frames that still fit, at least one."""
        room = self._max_bytes - segment.size + frames.start_of(0)
        payload_positions = memoryview(frames.positions).cast("Q")
        # Frame i ends where frame i + 1 begins, so counting the starts that are within the room is enough.
        count = bisect_right(payload_positions, room + HEADER_BYTES) - 1
        return frames.slice(0, max(1, count))


def _sync_failed(error: OSError, directory: Path) -> LogFailedError:
    return LogFailedError(
        f"the disk failed to sync: {error}",
        operation="sync",
        path=directory,
        hint="What was acknowledged as synced is safe. Check the disk, then open the log again",
    )


_logger = logging.getLogger("tidelog.log")
_FULL_DISK_RETRY_SECONDS = 0.25
_LOOK_SECONDS = 0.01
# At most this many writes gather for a sync that a caller waits for: a stream of appends must not delay it for long.
_MAX_WRITES_BEFORE_WANTED_SYNC = 16


class _Next(enum.Enum):
    """What comes after a step."""

    STEP = enum.auto()
    REST = enum.auto()
    END = enum.auto()


def _as_attributes(subject: Subject) -> dict[str, str]:
    return {f"tidelog.{noun}": name for noun, name in subject.items()}


class _DiskIsFullError(Exception):
    """Nothing more can be written for now; what could not be is kept."""


def frames_of(chunks: Sequence[Chunk]) -> Frames:
    """The frames of chunks that go into a file together, with the offsets that the messages have."""
    first = chunks[0]
    if first.frames is None:
        return encode_many(first.first_offset, first.payloads)
    if len(chunks) == 1:
        return first.frames.numbered(first.first_offset)
    return join(first.first_offset, [chunk.frames for chunk in chunks if chunk.frames is not None])


class Writer:
    """Takes chunks from the append queue and writes them to the disk."""

    def __init__(
        self,
        append_queue: AppendQueue,
        active: ActiveFile,
        settings: LogSettings,
        clock: Clock,
        directory: Path,
        save_checkpoint: Callable[[], None],
        notes_new_files: bool = False,
        *,
        subject: Subject,
    ) -> None:
        self._append_queue = append_queue
        self._active = active
        self._clock = clock
        self._directory = directory
        self._save_checkpoint = save_checkpoint
        self._notes_new_files = notes_new_files
        self._subject = subject
        self._noted_seq: int | None = None
        self._interval_seconds = settings.fsync_interval_ms / 1000
        self._max_unsynced_bytes = settings.fsync_max_batch_bytes
        self._unsynced_since = 0.0
        self._unsynced_writes = 0
        self._pool: WriterPool | None = None
        self._ended = Event()
        self.is_noted = False
        """Whether the checkpoint says all that there is to say, so that closing need not write it."""
        self._unwritten: tuple[Sequence[Chunk], Frames, Frames] | None = None
        """Chunks that were taken, their frames, and those of them that are not in a file yet."""
        self.alarm_at: float | None = None
        self.error: TidelogError | None = None
        self.writes = 0
        self.written_bytes = 0
        self.checkpoint_failures = 0
        self.full_disk_waits = 0
        self._leaves_file = Event()
        """Set by those who are about to delete what is in the file, while the disk is full."""
        self.write_seconds = Stopwatch()
        self.sync_seconds = Stopwatch()

    def start(self, files: Files) -> None:
        """From now on it is served whenever there is something to do."""
        pool = self._pool = join_pool(self, files, self._directory)
        self._append_queue.call = partial(pool.call, self)
        self._append_queue.ring()

    def leave_file(self, seconds: float) -> None:
        """While the disk is full: what is in the file can be deleted when this returns, unless it takes too long."""
        self._leaves_file.set()
        self.ring()
        deadline = time.monotonic() + seconds
        while self._leaves_file.is_set() and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)

    def join(self) -> None:
        """Waits until it has ended, after the append queue was closed."""
        self._ended.wait()

    def ring(self) -> None:
        self._append_queue.ring()

    def serve(self) -> None:
        """Runs until there is nothing to do, in any worker."""
        if not self._append_queue.begin_service():
            return
        try:
            while (is_next := self._step()) is _Next.STEP:
                if self._pool is not None and self._pool.is_crowded:
                    self._append_queue.interrupt_service()
                    return
            if is_next is _Next.REST:
                return
            # The next owner continues in the file; only the hint is updated.
            if self._active.is_there and not self.is_noted:
                self._write_checkpoint()
        except TidelogError as error:
            self._fail(error)
        except BaseException as error:  # noqa: BLE001 - however the writer ended, its waiters must fail
            self._fail(self._explain(error))
        self._end()

    def _end(self) -> None:
        """It stays marked as served: no worker is called for it again."""
        caches.forget(self._append_queue)
        self._active.close()
        if self._pool is not None:
            self._pool.leave(self)
        self._ended.set()

    def _step(self) -> _Next:
        """One round; END when the log is closing and everything is on the disk."""
        try:
            has_written = self._write_next()
        except _DiskIsFullError:
            if self._leaves_file.is_set() and self._active.holds_frames:
                self._seal()  # the next file may be empty for a while: this one can go now, and make room
                return _Next.STEP
            self._leaves_file.clear()
            return self._rest_while_full()
        self._leaves_file.clear()
        if self._append_queue.file_end_due:
            self._end_file()
        elif self._sync_is_due():
            self._sync()
            self._note_new_file()
        elif not has_written:
            if self._append_queue.closing:
                return _Next.END
            if self._active.is_old:
                self._seal()
            self._spare_descriptor()
            return self._rest()
        return _Next.STEP

    def _rest(self) -> _Next:
        due_seconds = self._seconds_until_due()
        if due_seconds is not None:
            self._call_within(due_seconds)
        return _Next.REST if self._append_queue.end_service() else _Next.STEP

    def _spare_descriptor(self) -> None:
        """Where many logs have their files open, one that becomes idle closes its own."""
        if self._pool is None:
            return
        if not self._active.is_open:
            self._pool.file_is_closed(self)
        elif not self._pool.may_keep_file(self, is_synced=not self._active.unsynced_bytes):
            if self._active.unsynced_bytes:
                self._sync()
            self._active.rest()

    def _rest_while_full(self) -> _Next:
        self._call_within(_FULL_DISK_RETRY_SECONDS)
        return _Next.REST if self._append_queue.pause_service() else _Next.STEP

    def _call_within(self, seconds: float) -> None:
        if self._pool is not None:
            self._pool.call_within(self, seconds)

    def _write_next(self) -> bool:
        """Brings the oldest chunks that are not in a file into one, or adopts files; whether there was a chunk."""
        if self._unwritten is None and (chunks := self._append_queue.take()):
            frames = frames_of(chunks)
            self._unwritten = chunks, frames, frames
        if self._unwritten is not None:
            self._write_chunks(*self._unwritten)
            return True
        if (prepared := self._append_queue.files_to_adopt()) is not None:
            self._adopt(prepared)
        return False

    def _write_chunks(self, chunks: Sequence[Chunk], frames: Frames, rest: Frames) -> None:
        while rest.count:
            part = self._write_part(rest)
            rest = rest.slice(part.count, rest.count)
            self._unwritten = chunks, frames, rest
        self._unwritten = None
        self._append_queue.chunks_written(chunks, frames)
        caches.report(self._append_queue, self._append_queue.cache.cached_bytes)

    def _write_part(self, frames: Frames) -> Frames:
        """Writes what belongs into one file, and as much of it as there is room for on the disk."""
        while True:
            try:
                if self._active.must_seal(frames):
                    self._seal()
                return self._write(frames)
            except OSError as error:
                if is_out_of_descriptors(error):
                    if self._append_queue.closing and (part := self._write_with_reserve(frames)) is not None:
                        return part
                    self._refuse_until_there_is_room(error, frames)
                    raise _DiskIsFullError from error
                if not is_full_disk(error):
                    raise
                if frames.count == 1:
                    self._refuse_until_there_is_room(error, frames)
                    raise _DiskIsFullError from error
                frames = frames.slice(0, frames.count // 2)  # there may be room for some of them

    def _write_with_reserve(self, frames: Frames) -> Frames | None:
        """None when there is no descriptor even then."""
        with reserve.lent():
            try:
                return self._write(frames)
            except OSError as error:
                if not is_out_of_descriptors(error):
                    raise
                return None

    def _write(self, frames: Frames) -> Frames:
        begin = self._clock.monotonic()
        if not self._active.unsynced_bytes:
            self._unsynced_since = begin
        self._note_beginning()
        self.is_noted = False
        part = self._active.write(frames)
        if self._append_queue.stall is not None:
            # Before anyone can see that it was written: a flush after that must not report a full disk.
            _logger.warning("%s: the disk can be written to again", self._directory)
            self._append_queue.resume()
        self._append_queue.wrote(part.next_offset)
        self.writes += 1
        self._unsynced_writes += 1
        self.written_bytes += part.end - part.start_of(0)
        self.write_seconds.add(self._clock.monotonic() - begin)
        return part

    def _refuse_until_there_is_room(self, error: OSError, frames: Frames) -> None:
        waiting = f"messages from offset {frames.first_offset} on wait in memory"

        def make_error() -> RetryError:
            if is_out_of_descriptors(error):
                return out_of_descriptors(f"write ({waiting})", self._directory, error)
            return DiskFullError(f"the disk is full ({error.strerror}); {waiting}", path=self._directory)

        if self._active.unsynced_bytes:
            self._sync()  # what did get into a file does not wait for room, and neither does who waits for it
        if self._append_queue.closing:
            raise make_error()
        if self._append_queue.stall is None:
            _logger.error("%s: %s, appends are refused", self._directory, error.strerror)
        self.full_disk_waits += 1
        self._append_queue.stop_short(make_error, over=False)

    def _sync_is_due(self) -> bool:
        unsynced = self._active.unsynced_bytes
        if not unsynced:
            return False
        if unsynced >= self._max_unsynced_bytes or self._seconds_until_sync() <= 0:
            return True
        gathered = not self._append_queue.has_work or self._unsynced_writes >= _MAX_WRITES_BEFORE_WANTED_SYNC
        return gathered and (self._append_queue.sync_wanted or self._append_queue.closing)

    def _sync(self) -> None:
        offset = self._append_queue.written_offset
        begin = self._clock.monotonic()
        self._active.sync()
        seconds = self._clock.monotonic() - begin
        self.sync_seconds.add(seconds)
        if TRACING.is_on:
            record_span("tidelog.sync", seconds, {**_as_attributes(self._subject), "tidelog.next_offset": offset})
        self._unsynced_writes = 0
        self._append_queue.synced(offset)

    def _note_new_file(self) -> None:
        """Once for each file, after its waiters were woken: from then on recovery notices if it is missing."""
        if self._notes_new_files and self._active.seq != self._noted_seq:
            self._noted_seq = self._active.seq
            self._write_checkpoint()

    def _seal(self) -> None:
        """Seals the file. It is synced first, so that a later file is never more durable than this one."""
        if self._active.unsynced_bytes:
            self._sync()
        sealed = self._active.seal()
        self._write_checkpoint()
        if sealed is not None:
            tell(
                _logger,
                "file_rotated",
                **self._subject,
                file=sealed.path.name,
                first_offset=sealed.first_offset,
                next_offset=sealed.next_offset,
                bytes=sealed.size,
            )

    def _note_beginning(self) -> None:
        """Before the first file of a log: where it begins. The header of the first frame alone could be damaged."""
        if not self._active.is_there and not self.is_noted:
            self._write_checkpoint()

    def _adopt(self, prepared: Sequence[Segment]) -> None:
        """Prepared files become the end of the log; the file that was the last one ends."""
        self._note_beginning()
        if self._active.unsynced_bytes:
            self._sync()
        self._active.adopt_ingested(prepared)
        self.written_bytes += sum(segment.size for segment in prepared)
        self._append_queue.adopted(prepared[-1].next_offset)
        self._write_checkpoint()

    def _end_file(self) -> None:
        """On request. A file without frames stays in use: ending it would leave an empty one."""
        if self._active.holds_frames:
            self._seal()
        self._append_queue.file_ended()

    def _write_checkpoint(self) -> None:
        self.is_noted = True
        try:
            self._save_checkpoint()
        except OSError as error:
            self.checkpoint_failures += 1
            _logger.warning("%s: the checkpoint could not be written, opening will scan: %s", self._directory, error)

    def _seconds_until_sync(self) -> float:
        return self._unsynced_since + self._interval_seconds - self._clock.monotonic()

    def _seconds_until_due(self) -> float | None:
        """When the writer must wake up by itself."""
        due = [self._seconds_until_sync()] if self._active.unsynced_bytes else []
        until_old = self._active.seconds_until_old
        if until_old is not None:
            due.append(until_old)
        return max(0.0, min(due)) if due else None

    def _fail(self, error: TidelogError) -> None:
        self.error = error
        _logger.error("%s: %s", self._directory, error)

        def make_error() -> TidelogError:
            failed = LogFailedError(f"the log failed and must be opened again: {error}", path=self._directory)
            failed.__cause__ = error
            return failed

        self._append_queue.stop_short(make_error, over=True)

    def _explain(self, error: BaseException) -> TidelogError:
        if isinstance(error, OSError):
            explained: TidelogError = LogFailedError(
                f"writing failed: {error}", operation="write", path=self._directory
            )
        else:
            explained = InternalError(f"the writer stopped on {error!r}", path=self._directory)
        explained.__cause__ = error
        return explained


# Files that are written beside the log and become its next ones: rows that count together, or not at all.
#
#     wal.prepared-0-0000000000.tmp    the first file of the first writer; adopted, it is renamed to the log's next file
#
# Invariants
# - Nothing of it is in the log before it is adopted. What a crash leaves is removed at the next opening.
# - Only the caller that holds back other appends has such files, since their frames carry the offsets that come next.
# - Files are synced before they are adopted.


class IngestedSegments:
    """Writes frames from one offset on, into files of the log's usual size. One thread uses it."""

    def __init__(
        self,
        files: Files,
        clock: Clock,
        directory: Path,
        settings: LogSettings,
        time_field: int | None,
        first_offset: int,
        number: int,
    ) -> None:
        """`number` tells several apart that are written at the same time."""
        self._files = files
        self._directory = directory
        self._segments = Segments([], first_offset)
        self._active = ActiveFile(
            files,
            clock,
            directory,
            settings,
            self._segments,
            Lock(),
            time_field,
            0,
            name_of=lambda seq: ingested_name(number, seq),
        )

    @property
    def next_offset(self) -> int:
        last = self._segments.last
        return self._segments.start_offset if last is None else last.next_offset

    def write(self, frames: Frames) -> None:
        """Writes frames, renumbered."""
        if self.next_offset + frames.count > MAX_OFFSET + 1:
            raise InputError(
                f"{frames.count} messages from offset {self.next_offset} on are too many; the largest offset is "
                f"{MAX_OFFSET}",
                hint="The log has nothing of it; append to another topic",
            )
        rest = frames.renumbered(self.next_offset) if frames.count else frames
        with explained("write", self._directory):
            while rest.count:
                if self._active.must_seal(rest):
                    self._seal()
                part = self._active.write(rest)
                rest = rest.slice(part.count, rest.count)

    def finish(self) -> list[Segment]:
        """Everything is on the disk, under names that do not count; the files in order."""
        with explained("write", self._directory):
            self._seal()
        return list(self._segments)

    def _seal(self) -> None:
        self._active.sync()
        self._active.seal()

    def discard(self) -> None:
        """Removes what was written."""
        self._active.close()
        for segment in self._segments:
            with contextlib.suppress(OSError):
                self._files.remove(segment.path)


def remove_ingested(files: Files, directory: Path, names: Iterable[str]) -> None:
    """Removes what was prepared and not adopted before a crash."""
    for name in filter(is_ingested, names):
        files.remove(directory / name)
