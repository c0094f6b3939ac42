"""The engine's write-ahead log: appends records, assigns LSNs and positions, syncs on commit; reads records in both
directions.

Invariants
- The engine is the only writer, so the LSN and the position of the next record are known before it is built.
- Added records stay in memory until they are enqueued to the log, a chunk at a time and at the latest by `commit`.
  Records that were not enqueued can be discarded; enqueued ones are final.
- `commit` returns once everything added before is durable, to the extent that `wal_sync_mode` promises.
- LSNs begin at 1 and are the offsets of the log; positions begin at 0 and count every byte of every frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from typing import Literal, Self

import msgspec

from tidelog.clock import Clock, Histogram, SystemClock
from tidelog.engine.settings import EngineSettings
from tidelog.engine.wal.files import Anchor, WalFiles, WalSpan
from tidelog.engine.wal.record_header import CHECKPOINT_BEGIN
from tidelog.engine.wal.records import CheckpointBeginRecord, decode_record
from tidelog.engine.wal.scan_values import ScannedRows
from tidelog.errors import CorruptionError, InputError, InternalError, OffsetOutOfRangeError
from tidelog.files import File, Files, LocalFiles, explained
from tidelog.log.binding import WrappedFiles, bound, unbound
from tidelog.log.frame import HEADER_BYTES, MAX_PAYLOAD_BYTES, Frames
from tidelog.log.log import Log
from tidelog.log.recovery import REPAIR_HINT
from tidelog.log.segment import FilePart, FileScanner, byte_of_offset
from tidelog.log.settings import MIB, LogSettings

# Reading WAL records from files: forwards for recovery, backwards for undo, or one by one.
#
# Invariants
# - Every returned frame was verified. Corruption raises an error that names file and byte.
# - Memory is bounded by one chunk, in both directions; a larger record is a chunk of its own.


# Fits into the CPU caches: larger pieces are slower to verify.
FORWARD_CHUNK_BYTES = 2 << 20
# The log's index has an entry about every 64 KiB: one step back is usually one such piece.
_BACKWARD_CHUNK_BYTES = 128 << 10


def batches(log: Log, first_lsn: int, stop_lsn: int) -> Iterator[Frames]:
    """Yields all records from one LSN up to another (exclusive), as far as they are in the files. OffsetOutOfRangeError
    for what leaves the disk meanwhile.
    """
    for part in _parts(log, first_lsn, stop_lsn):
        with explained("read", part.segment.path):
            file = _opened(log, part)
            try:
                yield from _frames_of(file, part, first_lsn, stop_lsn)
            finally:
                file.close()


def _opened(log: Log, part: FilePart) -> File:
    try:
        return log.files.open(part.segment.path)
    except FileNotFoundError as error:
        if log.start_offset <= part.offset:
            raise  # it is lost
        raise _left(log, part.offset, log.start_offset) from error


def _parts(log: Log, first_lsn: int, stop_lsn: int) -> list[FilePart]:
    parts = log.parts(first_lsn, stop_lsn)
    if first_lsn < stop_lsn and (not parts or parts[0].segment.first_offset > first_lsn):
        raise _left(log, first_lsn, parts[0].segment.first_offset if parts else log.next_offset)
    return parts


def _left(log: Log, lsn: int, start_lsn: int) -> OffsetOutOfRangeError:
    return OffsetOutOfRangeError(
        f"LSN {lsn} is not in the files of the log, the oldest there is {start_lsn}",
        operation="read",
        path=log.directory,
    )


def _frames_of(file: File, part: FilePart, first_lsn: int, stop_lsn: int) -> Iterator[Frames]:
    scanner = FileScanner(file, part.position, part.offset, FORWARD_CHUNK_BYTES)
    stop_lsn = min(stop_lsn, part.next_offset)
    while scanner.offset < stop_lsn:
        frames = _read(scanner, part)
        if frames.next_offset > first_lsn:
            yield _within(frames, first_lsn, stop_lsn)


def _read(scanner: FileScanner, part: FilePart) -> Frames:
    base = scanner.position
    frames = scanner.read(part.end_byte)
    if frames is None:
        reason, path = scanner.stop.reason, part.segment.path
        raise CorruptionError(reason, path=path, byte=scanner.position, operation="read", hint=REPAIR_HINT)
    part.segment.index.extend(frames, base)
    return frames


def _within(frames: Frames, first_lsn: int, stop_lsn: int) -> Frames:
    start = max(0, first_lsn - frames.first_offset)
    stop = min(frames.count, stop_lsn - frames.first_offset)
    return frames if (start, stop) == (0, frames.count) else frames.slice(start, stop)


def frames_around(log: Log, lsn: int) -> Frames:
    """A verified piece of the WAL that holds a record, and usually some before and after it."""
    return next(_chunks_back_from(log, lsn))


def backwards(log: Log, lsn: int, stop_lsn: int) -> Iterator[tuple[int, bytes]]:
    """Yields (LSN, payload) from one LSN down to another, both included, newest first."""
    while lsn >= stop_lsn:
        for frames in _chunks_back_from(log, lsn):
            first = max(frames.first_offset, stop_lsn)
            payloads = frames.payloads(first - frames.first_offset, lsn + 1 - frames.first_offset)
            for payload in reversed(payloads):
                yield lsn, payload
                lsn -= 1
            if lsn < stop_lsn:
                return


def _chunks_back_from(log: Log, lsn: int) -> Iterator[Frames]:
    """Yields the frames up to this LSN, newest chunk first, from the nearest index entry on.

    Where the index is sparse, the stretch from there is read twice: once to find the chunks, once to read each.
    """
    part = _parts(log, lsn, lsn + 1)[0]
    with explained("read", part.segment.path):
        file = log.files.open(part.segment.path)
        try:
            places, frames = _walk(file, part, lsn)
            yield frames
            for position, offset in reversed(places[:-1]):
                scanner = FileScanner(file, position, offset, _BACKWARD_CHUNK_BYTES)
                yield _read(scanner, part)
        finally:
            file.close()


def _walk(file: File, part: FilePart, lsn: int) -> tuple[list[tuple[int, int]], Frames]:
    """The starts of the chunks up to the one that holds an LSN, and the frames of that one."""
    scanner = FileScanner(file, part.position, part.offset, _BACKWARD_CHUNK_BYTES)
    places: list[tuple[int, int]] = []
    while True:
        places.append((scanner.position, scanner.offset))
        frames = _read(scanner, part)
        if frames.next_offset > lsn:
            return places, frames


# What "synced" means for the engine's log, by `wal_sync_mode`.
#
#     fdatasync   contents and size of a file: what every other log here does
#     fsync       its times too
#     none        nothing; what was written is the system's business
#
# Names of files are synced in every mode: they are few, and a file without a name is lost to everybody.


SyncMode = Literal["fsync", "fdatasync", "none"]


def files_in_mode(files: Files, mode: SyncMode) -> Files:
    """Returns the same files, synced according to the mode. A simulated disk of a test knows one kind of sync."""
    if mode == "none":
        return UnsyncedFiles(files)
    if mode == "fsync" and type(files) is LocalFiles:
        return _FullySyncedFiles()
    return files


class _FullySyncedFiles(LocalFiles):
    _syncs_times = True


class UnsyncedFiles(WrappedFiles):
    """Files whose contents are never synced."""

    def create(self, path: Path) -> File:
        return _UnsyncedFile(self.below.create(path))

    def open(self, path: Path, *, write: bool = False) -> File:
        return _UnsyncedFile(self.below.open(path, write=write))


class _UnsyncedFile:
    def __init__(self, file: File) -> None:
        self._file = file
        self.write_at = file.write_at
        self.read_at = file.read_at
        self.read_ranges = file.read_ranges
        self.truncate = file.truncate
        self.size = file.size
        self.close = file.close

    def sync(self) -> None:
        """No-op: the operating system's cache is enough."""


__all__ = ["FIRST", "Anchor", "Wal", "WalSpan", "WalStatistics", "log_settings"]

FIRST = Anchor(1, 0)
"""Where a log begins that is not the continuation of another."""
_CHUNK_BYTES = 4 * MIB
_MAX_REMEMBERED_BYTES = MIB


class WalStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of WAL statistics. `first_lsn` is the oldest record on this disk; `pending_bytes` wait for a
    commit.
    """

    first_lsn: int
    next_lsn: int
    durable_lsn: int
    next_position: int
    files: int
    file_bytes: int
    pending_bytes: int
    written_bytes: int
    rotations: int
    write_seconds: Histogram
    sync_seconds: Histogram


def log_settings(settings: EngineSettings) -> LogSettings:
    """Derives the log's settings from the engine's."""
    return LogSettings(
        rotate_max_bytes=settings.rotate_max_bytes,
        rotate_max_seconds=settings.rotate_max_seconds,
        # One commit is usually one sync; only a very long one is synced in between.
        fsync_max_batch_bytes=64 * MIB,
        append_queue_max_bytes=32 * MIB,
        append_queue_max_messages=1 << 20,
        # The engine has its own read path: nothing is cached once it is in a file.
        cache_max_messages=0,
        cache_max_bytes=0,
        max_message_bytes=MAX_PAYLOAD_BYTES,
        read_chunk_bytes=FORWARD_CHUNK_BYTES,
    )


class Wal:
    """An open WAL. One thread at a time adds and commits; all other methods are thread-safe."""

    def __init__(self, log: Log, files: Files, anchor: Anchor) -> None:
        self.log = log
        self._files = WalFiles(log, files, anchor)
        spans = self._files.refresh()
        self.next_lsn = log.next_offset
        self.next_position = spans[-1].next_position if spans else anchor.position
        """Where the frame of the next record will begin."""
        self.on_handed_over: Callable[[int, list[bytes]], None] = _ignore
        """Hears of records, in order, once the log has them; the first one's LSN comes first."""
        self._adding = Lock()
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._committed_lsn = self.next_lsn
        self._recent: Frames | None = None

    @classmethod
    def open(
        cls,
        directory: Path,
        settings: EngineSettings | None = None,
        *,
        files: Files | None = None,
        clock: Clock | None = None,
        anchor: Anchor = FIRST,
    ) -> Self:
        """Opens the WAL in this directory, creating it if absent; truncates a torn tail.

        `anchor` is the position of any record that is still in the files, or of the first one that will be. Without
        one, a WAL that does not begin with its first record is searched for a checkpoint, which records its position.
        """
        settings = settings or EngineSettings()
        files = bound(files_in_mode(unbound(files), settings.wal_sync_mode))
        clock = clock or SystemClock()
        log = Log.open(
            directory,
            log_settings(settings),
            files=files,
            clock=clock,
            first_offset=anchor.lsn,
            notes_new_files=True,
            noun="engine",
        )
        try:
            return cls(log, files, anchor if anchor != FIRST else _found_anchor(log))
        except BaseException:
            log.close()
            raise

    # Writing

    def add(self, payload: bytes) -> int:
        """Adds a record; returns its LSN."""
        size = len(payload) + HEADER_BYTES
        if size > MAX_PAYLOAD_BYTES:
            raise InputError(f"a record of {len(payload)} bytes does not fit into a frame of the log")
        with self._adding:
            lsn = self.next_lsn
            self.next_lsn = lsn + 1
            self.next_position += size
            self._pending.append(payload)
            self._pending_bytes += size
            if self._pending_bytes >= _CHUNK_BYTES:
                self._hand_over()
        return lsn

    def commit(self) -> int:
        """Makes everything that was added durable; returns the last durable LSN.

        A full disk or a failed log raises. Records that were enqueued by then are written once the disk has room again:
        `wait_durable` waits for that, and `discard` says whether there are any.
        """
        target = self._hand_over_all()
        self.log.wait_durable(target - 1, 1)
        self._committed_lsn = target
        return target - 1

    def hand_over(self) -> None:
        """Like `commit` without the wait: the added records are final, and are written in the background."""
        self._committed_lsn = self._hand_over_all()

    def _hand_over_all(self) -> int:
        """Enqueues everything that was added; returns the next LSN."""
        with self._adding:
            self._hand_over()
            return self.next_lsn

    def _hand_over(self) -> None:
        """Records that the log rejects now stay pending, and the same call may succeed later."""
        if not self._pending:
            return
        first = self.next_lsn - len(self._pending)
        if self.log.next_offset != first:
            raise InternalError(f"the log continues at {self.log.next_offset}, the engine at LSN {first}")
        taken = self._pending
        self.log.append_many(taken)
        self._pending, self._pending_bytes = [], 0
        self._files.anchor = Anchor(self.next_lsn, self.next_position)
        self.on_handed_over(first, taken)

    def discard(self) -> bool:
        """Drops the added records that were not enqueued. True if other records since the last commit are in the
        log.
        """
        with self._adding:
            self.next_position -= self._pending_bytes
            self.next_lsn -= len(self._pending)
            self._pending, self._pending_bytes = [], 0
            return self.next_lsn > self._committed_lsn

    @property
    def durable_lsn(self) -> int:
        """The last LSN that is durable, with all before it."""
        return self.log.durable_offset - 1

    def wait_durable(self, lsn: int) -> None:
        """Waits until a record that was added is durable, with all before it."""
        if self.log.durable_offset > lsn:
            return
        if lsn >= self.next_lsn:
            raise InternalError(f"LSN {lsn} is waited for, and the next one is {self.next_lsn}")
        if self.log.next_offset <= lsn:
            self._hand_over_all()
        self.log.wait_durable(lsn, 1)

    def seal(self) -> None:
        """Seals the current file, with everything that was added: nothing is appended to it any more."""
        self.hand_over()
        self.log.end_file()

    # Reading

    def read_stored(self, position: int, length: int) -> bytes | None:
        """Returns the bytes at a position; None if they are no longer on this disk."""
        found = self._files.read(position, length)
        if found is None or len(found) == length:
            return found
        return self._read_again(position, length)

    def read_values(self, scanned: ScannedRows) -> None:
        """Takes the values of rows of a scan that are in files on this disk, neighbours with one read."""
        self._files.read_values(scanned)

    def _read_again(self, position: int, length: int) -> bytes | None:
        """Refreshes the list of files and retries: usually there are new ones."""
        self._files.refresh()
        found = self._files.read(position, length)
        if found is None or len(found) == length:
            return found
        return self._read_when_written(position, length)

    def _read_when_written(self, position: int, length: int) -> bytes | None:
        """Waits for bytes that are not written to a file yet."""
        if position + length > self.next_position:
            raise InternalError(f"{length} bytes at position {position} are after the end of the log")
        self._hand_over_all()
        self.log.flush()
        self._files.refresh()
        found = self._files.read(position, length)
        if found is not None and len(found) < length:
            raise self._files.missing(position, length, len(found))
        return found

    def record(self, lsn: int) -> bytes:
        """Reads one record. Its neighbours are cached: the records of one entry are read one after the other."""
        frames = self._recent
        if frames is None or not frames.first_offset <= lsn < frames.next_offset:
            self._written_up_to(lsn + 1)
            frames = frames_around(self.log, lsn)
            self._recent = frames if len(frames.buffer) <= _MAX_REMEMBERED_BYTES else None
        return frames.payloads(lsn - frames.first_offset, lsn + 1 - frames.first_offset)[0]

    def batches(self, first_lsn: int, stop_lsn: int | None = None) -> Iterator[Frames]:
        """Yields the records from one LSN up to another (exclusive; the end by default), in large pieces."""
        stop_lsn = self._written_up_to(self.next_lsn if stop_lsn is None else stop_lsn)
        return batches(self.log, first_lsn, stop_lsn)

    def backwards(self, lsn: int, stop_lsn: int) -> Iterator[tuple[int, bytes]]:
        """Yields (LSN, payload) from one LSN down to another, both included."""
        self._written_up_to(lsn + 1)
        return backwards(self.log, lsn, stop_lsn)

    def _written_up_to(self, stop_lsn: int) -> int:
        """Waits until records are written: readers read files, not memory."""
        if stop_lsn > self.next_lsn:
            raise InputError(f"LSN {stop_lsn - 1} is after the end of the log; the next one is {self.next_lsn}")
        if stop_lsn > self.log.durable_offset:
            self.wait_durable(stop_lsn - 1)
        return stop_lsn

    def position_of(self, lsn: int) -> int:
        """The position of a record's frame; for the next LSN, where it will be."""
        if lsn == self.next_lsn:
            return self.next_position
        self._written_up_to(lsn + 1)
        for span in reversed(self.spans()):
            if span.first_lsn <= lsn < span.next_lsn:
                (part,) = self.log.parts(lsn, lsn + 1)
                return span.first_position + byte_of_offset(self.log.files, FilePart(part.segment, lsn), lsn)
        raise InputError(f"LSN {lsn} is not in the files of the log", path=self.log.directory)

    # Files

    @property
    def first_lsn(self) -> int:
        """The oldest record that is on this disk."""
        return self.log.start_offset

    @property
    def first_position(self) -> int:
        """The oldest byte that is on this disk."""
        return self._files.start_position

    def spans(self) -> list[WalSpan]:
        """The current files, oldest first."""
        return self._files.refresh()

    def was_read_lately(self, span: WalSpan) -> bool:
        """Whether values in a file were read since the last call."""
        return self._files.was_read(span.first_lsn)

    def remove_below(self, lsn: int) -> int:
        """Deletes files whose records are all below an LSN, never the last one; returns the bytes freed."""
        self._files.refresh()  # those that stay are placed by those that go
        try:
            return self.log.remove_below(lsn)
        finally:
            self._files.refresh()

    def statistics(self) -> WalStatistics:
        log = self.log.statistics()
        return WalStatistics(
            first_lsn=log.start_offset,
            next_lsn=self.next_lsn,
            durable_lsn=log.durable_offset - 1,
            next_position=self.next_position,
            files=log.files,
            file_bytes=log.file_bytes,
            pending_bytes=self._pending_bytes,
            written_bytes=log.written_bytes,
            rotations=log.rotations,
            write_seconds=log.write_seconds,
            sync_seconds=log.sync_seconds,
        )

    def close(self) -> None:
        """Releases the directory. Records that were added but not committed are dropped, unless they were enqueued."""
        self.discard()
        try:
            self.log.close()
        finally:
            self._files.close()


def _ignore(first_lsn: int, records: list[bytes]) -> None:
    """Nobody listens."""


def _found_anchor(log: Log) -> Anchor:
    """Finds an anchor: every checkpoint begins with a record that knows its own position."""
    if log.start_offset == FIRST.lsn:
        return FIRST
    for frames in batches(log, log.start_offset, log.next_offset):
        for lsn, payload in enumerate(frames.payloads(), frames.first_offset):
            if payload[0] == CHECKPOINT_BEGIN:
                record = decode_record(payload, lsn)
                assert isinstance(record, CheckpointBeginRecord)
                return Anchor(lsn, record.position)
    return FIRST
