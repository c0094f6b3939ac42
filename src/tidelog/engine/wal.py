"""The engine's write-ahead log: records in, LSNs and positions out, and a promise of durability.

Invariants
- The engine is the only one who appends, so the LSN and the position of the next record are known before it is built.
- Records that were added are in memory until they are handed over to the log, a chunk at a time and at the latest by
  `commit`. What was not handed over can be discarded; what was is in the log for good.
- `commit` returns when everything that was added before is durable, as far as `wal_sync_mode` promises that.
- LSNs begin at 1 and are the offsets of the log; positions begin at 0 and count every byte of every frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from typing import Self

import msgspec

from tidelog.clock import Clock, SystemClock
from tidelog.engine import wal_reading
from tidelog.engine.record import CheckpointBeginRecord, decode_record
from tidelog.engine.record_header import CHECKPOINT_BEGIN
from tidelog.engine.settings import EngineSettings
from tidelog.engine.sync_mode import files_in_mode
from tidelog.engine.wal_files import Anchor, WalFiles, WalSpan
from tidelog.errors import InputError, InternalError
from tidelog.files import Files
from tidelog.log.bound_files import bound, unbound
from tidelog.log.boundary import byte_of_offset
from tidelog.log.frame import HEADER_BYTES, MAX_PAYLOAD_BYTES, Frames
from tidelog.log.log import Log
from tidelog.log.reader import FilePart
from tidelog.log.settings import MIB, LogSettings
from tidelog.log.statistics import Histogram

__all__ = ["FIRST", "Anchor", "Wal", "WalSpan", "WalStatistics", "log_settings"]

FIRST = Anchor(1, 0)
"""Where a log begins that is not the continuation of another."""
_CHUNK_BYTES = 4 * MIB
_MAX_REMEMBERED_BYTES = MIB


class WalStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of the log. `first_lsn` is the oldest record on this disk; `pending_bytes` wait for a commit."""

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
    """The log's settings that follow from the engine's."""
    return LogSettings(
        rotate_max_bytes=settings.wal_segment_size,
        rotate_max_seconds=settings.wal_segment_max_secs,
        # One commit is one sync, as a rule; only a very long one is synced in between.
        fsync_max_batch_bytes=64 * MIB,
        handover_max_bytes=32 * MIB,
        handover_max_messages=1 << 20,
        # The engine has its own ways to find what it wrote: nothing is kept in memory once it is in a file.
        cache_max_messages=0,
        cache_max_bytes=0,
        max_message_bytes=MAX_PAYLOAD_BYTES,
        read_chunk_bytes=wal_reading.FORWARD_CHUNK_BYTES,
    )


class Wal:
    """An open log of an engine. One thread at a time adds and commits; everything else is for any thread."""

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
        """Opens the log in this directory, made when absent; what a crash tore off its end is cut.

        `anchor` is the place of any record that is still in the files, or of the first one that will be. Without one,
        a log that does not begin with its first record is asked for a checkpoint, which says where it is.
        """
        settings = settings or EngineSettings()
        files = bound(files_in_mode(unbound(files), settings.wal_sync_mode))
        clock = clock or SystemClock()
        log = Log.open(
            *(directory, log_settings(settings)),
            files=files,
            clock=clock,
            first_offset=anchor.lsn,
            notes_new_files=True,
        )
        try:
            return cls(log, files, anchor if anchor != FIRST else _found_anchor(log))
        except BaseException:
            log.close()
            raise

    # Writing

    def add(self, payload: bytes) -> int:
        """Takes a record; the LSN that it has."""
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
        """Brings everything that was added to the disk; the last LSN that is durable then.

        A full disk or a failed log raises. What had been handed over by then is written if the disk has room again:
        `wait_durable` tells, and `discard` says whether there is such a thing.
        """
        target = self._hand_over_all()
        self.log.wait_durable(target - 1, 1)
        self._committed_lsn = target
        return target - 1

    def hand_over(self) -> None:
        """As `commit` without the wait: what was added is complete, and is written in the background."""
        self._committed_lsn = self._hand_over_all()

    def _hand_over_all(self) -> int:
        """Gives everything that was added to the log; the LSN that comes next."""
        with self._adding:
            self._hand_over()
            return self.next_lsn

    def _hand_over(self) -> None:
        """What the log does not take now stays pending, and the same call may succeed later."""
        if not self._pending:
            return
        first = self.next_lsn - len(self._pending)
        if self.log.next_offset != first:
            raise InternalError(f"the log goes on at {self.log.next_offset} and the engine at LSN {first}")
        taken = self._pending
        self.log.append_many(taken)
        self._pending, self._pending_bytes = [], 0
        self._files.anchor = Anchor(self.next_lsn, self.next_position)
        self.on_handed_over(first, taken)

    def discard(self) -> bool:
        """Drops what was added and not handed over. True when other records since the last commit are in the log."""
        with self._adding:
            self.next_position -= self._pending_bytes
            self.next_lsn -= len(self._pending)
            self._pending, self._pending_bytes = [], 0
            return self.next_lsn > self._committed_lsn

    @property
    def durable_lsn(self) -> int:
        """This record and all before it are on the disk."""
        return self.log.durable_offset - 1

    def wait_durable(self, lsn: int) -> None:
        """Returns once a record that was added is on the disk, with all before it."""
        if self.log.durable_offset > lsn:
            return
        if lsn >= self.next_lsn:
            raise InternalError(f"LSN {lsn} is waited for, and the next one is {self.next_lsn}")
        if self.log.next_offset <= lsn:
            self._hand_over_all()
        self.log.wait_durable(lsn, 1)

    def seal(self) -> None:
        """Ends the file at the end, with everything that was added: nothing is written into it any more."""
        self.hand_over()
        self.log.end_file()

    # Reading

    def read_stored(self, position: int, length: int) -> bytes | None:
        """The bytes at a position; None when they are not on this disk any more."""
        found = self._files.read(position, length)
        if found is None or len(found) == length:
            return found
        return self._read_again(position, length)

    def _read_again(self, position: int, length: int) -> bytes | None:
        """For what was not in the files that were known: there are new ones, as a rule."""
        self._files.refresh()
        found = self._files.read(position, length)
        if found is None or len(found) == length:
            return found
        return self._read_when_written(position, length)

    def _read_when_written(self, position: int, length: int) -> bytes | None:
        """For what is still on its way to a file."""
        if position + length > self.next_position:
            raise InternalError(f"{length} bytes at position {position} are behind the end of the log")
        self._hand_over_all()
        self.log.flush()
        self._files.refresh()
        found = self._files.read(position, length)
        if found is not None and len(found) < length:
            raise self._files.missing(position, length, len(found))
        return found

    def record(self, lsn: int) -> bytes:
        """One record. Its neighbours are remembered: records of one entry are looked at one after the other."""
        frames = self._recent
        if frames is None or not frames.first_offset <= lsn < frames.next_offset:
            self._written_up_to(lsn + 1)
            frames = wal_reading.frames_around(self.log, lsn)
            self._recent = frames if len(frames.buffer) <= _MAX_REMEMBERED_BYTES else None
        return frames.payloads(lsn - frames.first_offset, lsn + 1 - frames.first_offset)[0]

    def batches(self, first_lsn: int, stop_lsn: int | None = None) -> Iterator[Frames]:
        """The records from one LSN up to another (exclusive; the end by default), in large pieces."""
        stop_lsn = self._written_up_to(self.next_lsn if stop_lsn is None else stop_lsn)
        return wal_reading.batches(self.log, first_lsn, stop_lsn)

    def backwards(self, lsn: int, stop_lsn: int) -> Iterator[tuple[int, bytes]]:
        """(LSN, payload) from one LSN down to another, both included."""
        self._written_up_to(lsn + 1)
        return wal_reading.backwards(self.log, lsn, stop_lsn)

    def _written_up_to(self, stop_lsn: int) -> int:
        """Readers read files: what they are to find there must have left the memory."""
        if stop_lsn > self.next_lsn:
            raise InputError(f"LSN {stop_lsn - 1} is behind the end of the log, the next one is {self.next_lsn}")
        if stop_lsn > self.log.durable_offset:
            self.wait_durable(stop_lsn - 1)
        return stop_lsn

    def position_of(self, lsn: int) -> int:
        """Where the frame of a record begins; of the next LSN, where it will."""
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
        """The files of this moment, oldest first."""
        return self._files.refresh()

    def was_read_lately(self, span: WalSpan) -> bool:
        """Whether values in a file were read since this was asked last."""
        return self._files.was_read(span.first_lsn)

    def remove_below(self, lsn: int) -> int:
        """Deletes files all of whose records are below an LSN, never the last one; the bytes that this freed."""
        try:
            return self.log.remove_below(lsn)
        finally:
            self._files.refresh()

    def statistics(self) -> WalStatistics:
        """What it counted."""
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
        """Gives the directory back. What was added and not committed is dropped, unless it was handed over."""
        self.discard()
        try:
            self.log.close()
        finally:
            self._files.close()


def _ignore(first_lsn: int, records: list[bytes]) -> None:
    """Nobody listens."""


def _found_anchor(log: Log) -> Anchor:
    """Every checkpoint begins with a record that knows its own position."""
    if log.start_offset == FIRST.lsn:
        return FIRST
    for frames in wal_reading.batches(log, log.start_offset, log.next_offset):
        for lsn, payload in enumerate(frames.payloads(), frames.first_offset):
            if payload[0] == CHECKPOINT_BEGIN:
                record = decode_record(payload, lsn)
                assert isinstance(record, CheckpointBeginRecord)
                return Anchor(lsn, record.position)
    return FIRST
