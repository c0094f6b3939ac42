"""The one that owns the file of a log: it decides when to write, when to sync and when to begin a new file.

It has no thread: a worker of the pool serves it while there is something to do (`serve`), one at a time. What is not
finished when the worker goes is kept here for the next one: the rest of a chunk that a full disk has no room for.

Invariants
- Group commit: everything that gathered during one sync is written and made durable by the next.
- `durable_offset` moves only after a sync that returned, and only to what was written before it began.
- A failed sync ends the log: it is never tried again on the same handle, because the system may have dropped the
  data and would report success. A failed write ends it too, except for a full disk, or for want of a descriptor: then
  the same frames are written again at the same place until there is room, and appends are refused meanwhile.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event

from tidelog.clock import Clock
from tidelog.errors import DiskFullError, InternalError, LogFailedError, RetryError, TidelogError
from tidelog.files import Files, is_full_disk
from tidelog.limits import is_out_of_descriptors, out_of_descriptors
from tidelog.log.active_file import ActiveFile
from tidelog.log.cache import Chunk
from tidelog.log.frame import Frames, encode_many
from tidelog.log.handover import Handover
from tidelog.log.segment import Segment
from tidelog.log.settings import LogSettings
from tidelog.log.statistics import Stopwatch
from tidelog.log.writer_pool import WriterPool, join_pool

_logger = logging.getLogger("tidelog.log")
_FULL_DISK_RETRY_SECONDS = 0.25
# So many writes may gather for a sync that somebody waits for: a steady stream of appends must not put it off for long.
_MAX_WRITES_BEFORE_WANTED_SYNC = 16


class _Next(enum.Enum):
    """What comes after a step."""

    STEP = enum.auto()
    REST = enum.auto()
    END = enum.auto()


class _DiskIsFullError(Exception):
    """Nothing more can be written for now; what could not be is kept."""


class Writer:
    """Takes chunks from the hand-over and brings them to the disk."""

    def __init__(
        self,
        handover: Handover,
        active: ActiveFile,
        settings: LogSettings,
        clock: Clock,
        directory: Path,
        save_checkpoint: Callable[[], None],
        notes_new_files: bool = False,
    ) -> None:
        self._handover = handover
        self._active = active
        self._clock = clock
        self._directory = directory
        self._save_checkpoint = save_checkpoint
        self._notes_new_files = notes_new_files
        self._noted_seq: int | None = None
        self._interval_seconds = settings.fsync_interval_ms / 1000
        self._max_unsynced_bytes = settings.fsync_max_batch_bytes
        self._unsynced_since = 0.0
        self._unsynced_writes = 0
        self._pool: WriterPool | None = None
        self._ended = Event()
        self.is_noted = False
        """Whether the checkpoint says all that there is to say, so that closing need not write it."""
        self._unwritten: tuple[Chunk, Frames, Frames] | None = None
        """A chunk that was taken, its frames, and those of them that are not in a file yet."""
        self.alarm_at: float | None = None
        self.error: TidelogError | None = None
        self.writes = 0
        self.written_bytes = 0
        self.checkpoint_failures = 0
        self.full_disk_waits = 0
        self.write_seconds = Stopwatch()
        self.sync_seconds = Stopwatch()

    def start(self, files: Files) -> None:
        """From now on it is served whenever there is something to do."""
        pool = self._pool = join_pool(self, files, self._directory)
        self._handover.call = lambda: pool.call(self)
        self._handover.ring()

    def join(self) -> None:
        """Waits until it has ended, after the hand-over was closed."""
        self._ended.wait()

    def ring(self) -> None:
        self._handover.ring()

    def serve(self) -> None:
        """Goes on until there is nothing to do, in whichever worker it is."""
        if not self._handover.begin_service():
            return
        try:
            while (is_next := self._step()) is _Next.STEP:
                if self._pool is not None and self._pool.is_crowded:
                    self._handover.interrupt_service()
                    return
            if is_next is _Next.REST:
                return
            # The file is gone on with by the next owner; only the hint is brought up to date.
            if self._active.is_there and not self.is_noted:
                self._write_checkpoint()
        except TidelogError as error:
            self._fail(error)
        except BaseException as error:  # noqa: BLE001 - whatever ended the writer, those who wait for it must be told
            self._fail(self._explain(error))
        self._end()

    def _end(self) -> None:
        """It stays served for ever: nobody calls a worker any more."""
        self._active.close()
        if self._pool is not None:
            self._pool.leave(self)
        self._ended.set()

    def _step(self) -> _Next:
        """One round; END when the log is closing and everything is on the disk."""
        try:
            has_written = self._write_next()
        except _DiskIsFullError:
            return self._rest_while_full()
        if self._handover.file_end_due:
            self._end_file()
        elif self._sync_is_due():
            self._sync()
            self._note_new_file()
        elif not has_written:
            if self._handover.closing:
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
        return _Next.REST if self._handover.end_service() else _Next.STEP

    def _spare_descriptor(self) -> None:
        """Where many logs have their files open, one that comes to rest closes its own."""
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
        return _Next.REST if self._handover.pause_service() else _Next.STEP

    def _call_within(self, seconds: float) -> None:
        if self._pool is not None:
            self._pool.call_within(self, seconds)

    def _write_next(self) -> bool:
        """Brings the oldest chunk that is not in a file into one, or adopts files; whether there was a chunk."""
        if self._unwritten is None and (chunk := self._handover.take()) is not None:
            frames = encode_many(chunk.first_offset, chunk.payloads) if chunk.frames is None else chunk.frames
            self._unwritten = chunk, frames, frames
        if self._unwritten is not None:
            self._write_chunk(*self._unwritten)
            return True
        if (prepared := self._handover.files_to_adopt()) is not None:
            self._adopt(prepared)
        return False

    def _write_chunk(self, chunk: Chunk, frames: Frames, rest: Frames) -> None:
        while rest.count:
            part = self._write_part(rest)
            rest = rest.slice(part.count, rest.count)
            self._unwritten = chunk, frames, rest
        self._unwritten = None
        self._handover.chunk_written(chunk, frames)

    def _write_part(self, frames: Frames) -> Frames:
        """Writes what belongs into one file, and as much of it as there is room for on the disk."""
        while True:
            try:
                if self._active.must_seal(frames):
                    self._seal()
                return self._write(frames)
            except OSError as error:
                if is_out_of_descriptors(error):
                    self._refuse_until_there_is_room(error, frames)
                    raise _DiskIsFullError from error
                if not is_full_disk(error):
                    raise
                if frames.count == 1:
                    self._refuse_until_there_is_room(error, frames)
                    raise _DiskIsFullError from error
                frames = frames.slice(0, frames.count // 2)  # there may be room for some of them

    def _write(self, frames: Frames) -> Frames:
        begin = self._clock.monotonic()
        if not self._active.unsynced_bytes:
            self._unsynced_since = begin
        self._note_beginning()
        self.is_noted = False
        part = self._active.write(frames)
        if self._handover.stall is not None:
            # Before anybody can see that it was written: who flushes then must not hear of a full disk.
            _logger.warning("%s: the disk can be written to again", self._directory)
            self._handover.resume()
        self._handover.wrote(part.next_offset)
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
        if self._handover.closing:
            raise make_error()
        if self._handover.stall is None:
            _logger.error("%s: %s, appends are refused", self._directory, error.strerror)
        self.full_disk_waits += 1
        self._handover.stop_short(make_error, over=False)

    def _sync_is_due(self) -> bool:
        unsynced = self._active.unsynced_bytes
        if not unsynced:
            return False
        if unsynced >= self._max_unsynced_bytes or self._seconds_until_sync() <= 0:
            return True
        gathered = not self._handover.has_work or self._unsynced_writes >= _MAX_WRITES_BEFORE_WANTED_SYNC
        return gathered and (self._handover.sync_wanted or self._handover.closing)

    def _sync(self) -> None:
        offset = self._handover.written_offset
        begin = self._clock.monotonic()
        self._active.sync()
        self.sync_seconds.add(self._clock.monotonic() - begin)
        self._unsynced_writes = 0
        self._handover.synced(offset)

    def _note_new_file(self) -> None:
        """Once for each file, after those who waited were told: from then on it is missed when it is gone."""
        if self._notes_new_files and self._active.seq != self._noted_seq:
            self._noted_seq = self._active.seq
            self._write_checkpoint()

    def _seal(self) -> None:
        """Ends the file: synced first, so that whatever is in a later file is never more durable than this one."""
        if self._active.unsynced_bytes:
            self._sync()
        self._active.seal()
        self._write_checkpoint()

    def _note_beginning(self) -> None:
        """Before the first file of a log: where it begins. The header of the first frame alone could be damaged."""
        if not self._active.is_there and not self.is_noted:
            self._write_checkpoint()

    def _adopt(self, prepared: Sequence[Segment]) -> None:
        """What others have written becomes the end of the log; the file that was the last one ends."""
        self._note_beginning()
        if self._active.unsynced_bytes:
            self._sync()
        self._active.adopt_prepared(prepared)
        self.written_bytes += sum(segment.size for segment in prepared)
        self._handover.adopted(prepared[-1].next_offset)
        self._write_checkpoint()

    def _end_file(self) -> None:
        """Because somebody asked for it. A file without frames goes on: an empty one would be left behind."""
        if self._active.holds_frames:
            self._seal()
        self._handover.file_ended()

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

        self._handover.stop_short(make_error, over=True)

    def _explain(self, error: BaseException) -> TidelogError:
        if isinstance(error, OSError):
            explained: TidelogError = LogFailedError(
                f"writing failed: {error}", operation="write", path=self._directory
            )
        else:
            explained = InternalError(f"the writer stopped on {error!r}", path=self._directory)
        explained.__cause__ = error
        return explained
