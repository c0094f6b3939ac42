"""The results of the newest entries: kept in memory, in checkpoints and in snapshots, for when their records are gone.

    (floor, last]      every entry in between is known: its print, and its result. A seq there without an entry had none
    <= floor           nothing is known here

    print of an entry, u64      high half: crc32 over order, op and lengths of names, then the names, of each operation
                                low half:  crc32 over crc and size of each operation's value; zeros for a copy
    status                      0 applied, 1 nothing, 2 refused

Invariants
- It follows from the WAL: records are processed when the WAL accepts them, and again after a crash. Rollbacks included.
- It is bounded. Memory holds the last `MOST` entries, a checkpoint or a snapshot the last `KEPT`.
- A print (fingerprint) distinguishes entries as their records do: by operations, names, sizes and checksums.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Final, Literal, NamedTuple

import msgspec

from tidelog import _native
from tidelog.engine.entry import Entry, Result, operations
from tidelog.engine.mvcc.cells import MAX_SEQ
from tidelog.engine.wal.operations import decode_operation, identity_of
from tidelog.engine.wal.record_header import HEADER_BYTES, ROLLBACK_END
from tidelog.engine.wal.ship_watermark import LsnRange
from tidelog.errors import DataError
from tidelog.log.frame import Frames, crc32

Open = tuple[int, int, int, bool]
"""An entry that is not complete yet: its seq (0 for none), both halves of its print, whether it changed anything."""
NONE_OPEN: Open = (0, 0, 0, False)
Found = tuple[bytes, bytes, bytes, list[tuple[int, int]], Open]
"""Seqs and prints (native u64) and statuses of the entries that became complete; (rows before, index) of the records
that say more: refused ones and ends of rollbacks; and what is open then."""

MOST: Final = 1 << 16
KEPT: Final = 1 << 12
_REASON_BYTES: Final = 1 << 18
_STATUSES: Final[tuple[Literal["applied", "nothing", "refused"], ...]] = ("applied", "nothing", "refused")
_NAMES = struct.Struct("<IBHHHH")
_VALUE = struct.Struct("<IQ")
_TARGET = struct.Struct(f"<{HEADER_BYTES}xQ")


class KnownResults(msgspec.Struct, frozen=True, kw_only=True):
    """Results in a checkpoint or a snapshot: little-endian u64 seqs and prints, one byte per status, reasons by seq."""

    floor: int
    seqs: bytes = b""
    prints: bytes = b""
    statuses: bytes = b""
    reasons: dict[int, str] = {}


NOTHING_KNOWN: Final = KnownResults(floor=MAX_SEQ)


class Known(NamedTuple):
    """What is known about an entry."""

    print: int
    result: Result


def print_of(entry: Entry) -> int:
    """The fingerprint of an entry."""
    names = values = 0
    for order, operation in enumerate(operations(entry)):
        identity = identity_of(operation, order)
        op, *texts = identity.names
        encoded = [text.encode() for text in texts]
        head = _NAMES.pack(order, op, *map(len, encoded))
        names = crc32(b"".join(encoded), crc32(head, names))
        values = crc32(_VALUE.pack(identity.crc, identity.size), values)
    return names << 32 | values


class ResultTable:
    """The results of the newest entries of one engine. Thread-safe."""

    def __init__(self, known: KnownResults) -> None:
        self._floor = known.floor
        self._seqs, self._prints = _numbers(known.seqs), _numbers(known.prints)
        self._statuses = bytearray(known.statuses)
        self._reasons = dict(known.reasons)
        if not len(self._seqs) == len(self._prints) == len(self._statuses) or max(known.statuses, default=0) > 2:
            raise DataError("table of results: its columns differ in length")
        self._open = NONE_OPEN
        self._mutex = Lock()

    @property
    def floor(self) -> int:
        """Entries above it are known."""
        return self._floor

    def find(self, seq: int) -> Known | None:
        """What is known about the entry of a seq above the floor; None when there never was one."""
        with self._mutex:
            at = bisect_left(self._seqs, seq)
            if at == len(self._seqs) or self._seqs[at] != seq:
                return None
            result = Result(seq, _STATUSES[self._statuses[at]], self._reasons.get(seq))
            return Known(self._prints[at], result)

    # What the log says

    def take(self, first_lsn: int, records: list[bytes]) -> None:
        with self._mutex:
            self._add(_native.results_of(first_lsn, records, self._open), records.__getitem__, first_lsn)

    def take_frames(self, frames: Frames) -> None:
        """The same, as they are in a file or an object."""
        with self._mutex:
            found = _native.results_in(frames.first_offset, frames.buffer, frames.positions, frames.lengths, self._open)
            self._add(found, lambda index: frames.payloads(index, index + 1)[0], frames.first_offset)

    def take_live(self, frames: Frames, dead: Sequence[LsnRange]) -> None:
        """The same, but for ranges of which no entry counts."""
        first, behind = frames.first_offset, frames.next_offset
        lsn = first
        for one in dead[bisect_left(dead, first, key=lambda one: one.last) :]:
            if one.first >= behind:
                break
            if one.first > lsn:
                self.take_frames(frames.slice(lsn - first, one.first - first))
            lsn = max(lsn, one.last + 1)
        if lsn < behind:
            self.take_frames(frames.slice(lsn - first, behind - first))

    def _add(self, found: Found, record_at: Callable[[int], bytes], first_lsn: int) -> None:
        seqs, prints, statuses, others, self._open = found
        done = 0
        for rows, index in others:
            self._add_rows(seqs, prints, statuses, done, rows)
            done, record = rows, record_at(index)
            if record[0] == ROLLBACK_END:
                self._cut(_TARGET.unpack_from(record)[0])
            else:
                operation = decode_operation(record, first_lsn + index)
                self._reasons[operation.transaction] = operation.reason
        self._add_rows(seqs, prints, statuses, done, len(statuses))
        if len(self._seqs) > 2 * MOST:
            self._forget(len(self._seqs) - MOST)

    def _add_rows(self, seqs: bytes, prints: bytes, statuses: bytes, start: int, stop: int) -> None:
        if start == stop:
            return
        if not self._seqs:  # of those before the first one of a part of the log nothing is known
            self._floor = min(self._floor, int.from_bytes(seqs[8 * start : 8 * start + 8], sys.byteorder) - 1)
        self._seqs.frombytes(seqs[8 * start : 8 * stop])
        self._prints.frombytes(prints[8 * start : 8 * stop])
        self._statuses += statuses[start:stop]

    def _cut(self, seq: int) -> None:
        """Forgets the entries above a seq."""
        count = bisect_right(self._seqs, seq)
        del self._seqs[count:], self._prints[count:], self._statuses[count:]
        self._floor = min(self._floor, seq)
        self._reasons = {one: reason for one, reason in self._reasons.items() if one <= seq}

    def _forget(self, count: int) -> None:
        """Drops the oldest ones."""
        self._floor = floor = self._seqs[count - 1]
        del self._seqs[:count], self._prints[:count], self._statuses[:count]
        self._reasons = {one: reason for one, reason in self._reasons.items() if one > floor}

    # For checkpoints and states

    def known_up_to(self, seq: int) -> KnownResults:
        """What is to be kept, at a seq: that of the last entries up to it."""
        with self._mutex:
            stop = bisect_right(self._seqs, seq)
            start = max(0, stop - KEPT)
            floor = self._seqs[start - 1] if start else min(self._floor, seq)
            reasons = {one: reason for one, reason in sorted(self._reasons.items()) if floor < one <= seq}
            floor = max(floor, _too_long(reasons))
            start = bisect_right(self._seqs, floor)
            return KnownResults(
                floor=floor,
                seqs=_bytes(self._seqs[start:stop]),
                prints=_bytes(self._prints[start:stop]),
                statuses=bytes(self._statuses[start:stop]),
                reasons={one: reason for one, reason in reasons.items() if one > floor},
            )


def _too_long(reasons: dict[int, str]) -> int:
    """The last seq that must be left out because reasons would take too much; 0 for none."""
    left = _REASON_BYTES
    for seq, reason in reversed(reasons.items()):
        left -= len(reason)
        if left < 0:
            return seq
    return 0


def _numbers(data: bytes) -> array[int]:
    found = array("Q")
    if len(data) % found.itemsize:
        raise DataError("truncated table of results")
    found.frombytes(data)
    if sys.byteorder == "big":
        found.byteswap()
    return found


def _bytes(numbers: array[int]) -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
