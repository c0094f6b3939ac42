"""What became of the newest entries: kept in memory, in checkpoints and in states, for when their records are gone.

    (floor, last]      every entry in between is known: its print, and its result. A seq there without an entry had none
    <= floor           nothing is known here

Invariants
- It is what the log says: records are looked at when the log takes them, and again after a crash. Rollbacks included.
- It is bounded. In memory are the last `MOST` entries, in a checkpoint and a state the last `KEPT`.
- A print tells entries apart, as their records do: by operations, names, sizes and checksums (`results_python.py`).
"""

from __future__ import annotations

import os
import struct
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec

from tidelog.engine import results_python
from tidelog.engine.entry import Entry, operations
from tidelog.engine.gate import LsnRange
from tidelog.engine.operation_record import decode_operation, identity_of
from tidelog.engine.record_header import HEADER_BYTES, ROLLBACK_END
from tidelog.engine.results import Result
from tidelog.engine.results_python import NONE_OPEN, Found
from tidelog.engine.version_keys import MAX_SEQ
from tidelog.errors import DataError
from tidelog.log.frame import Frames, crc32

if TYPE_CHECKING:
    _kernel = results_python
else:
    try:
        if os.environ.get("TIDELOG_PURE_PYTHON"):
            raise ImportError
        from tidelog.engine import _engine as _kernel
    except ImportError:
        _kernel = results_python

MOST: Final = 1 << 16
KEPT: Final = 1 << 12
_REASON_BYTES: Final = 1 << 18
_STATUSES: Final[tuple[Literal["applied", "nothing", "refused"], ...]] = ("applied", "nothing", "refused")
_NAMES = struct.Struct("<IBHHHH")
_BODY = struct.Struct("<IQ")
_TARGET = struct.Struct(f"<{HEADER_BYTES}xQ")


class KnownResults(msgspec.Struct, frozen=True, kw_only=True):
    """Results in a checkpoint or a state: little-endian u64 seqs and prints, one byte a status, reasons by seq."""

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
    """What an entry is told apart by."""
    names = bodies = 0
    for order, operation in enumerate(operations(entry)):
        identity = identity_of(operation, order)
        op, *texts = identity.names
        encoded = [text.encode() for text in texts]
        head = _NAMES.pack(order, op, *map(len, encoded))
        names = crc32(b"".join(encoded), crc32(head, names))
        bodies = crc32(_BODY.pack(identity.crc, identity.size), bodies)
    return names << 32 | bodies


class ResultTable:
    """The results of the newest entries of one engine. Any thread may use it."""

    def __init__(self, known: KnownResults) -> None:
        self._floor = known.floor
        self._seqs, self._prints = _numbers(known.seqs), _numbers(known.prints)
        self._statuses = bytearray(known.statuses)
        self._reasons = dict(known.reasons)
        if not len(self._seqs) == len(self._prints) == len(self._statuses) or max(known.statuses, default=0) > 2:
            raise DataError("a table of results whose columns do not go together")
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
        """The next records of the log."""
        with self._mutex:
            self._add(_kernel.results_of(first_lsn, records, self._open), records.__getitem__, first_lsn)

    def take_frames(self, frames: Frames) -> None:
        """The same, as they are in a file or an object."""
        with self._mutex:
            found = _kernel.results_in(frames.first_offset, frames.buffer, frames.positions, frames.lengths, self._open)
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
        """Nothing above it counts any more."""
        count = bisect_right(self._seqs, seq)
        del self._seqs[count:], self._prints[count:], self._statuses[count:]
        self._floor = min(self._floor, seq)
        self._reasons = {one: reason for one, reason in self._reasons.items() if one <= seq}

    def _forget(self, count: int) -> None:
        """The oldest so many."""
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
        raise DataError("a table of results that is cut short")
    found.frombytes(data)
    if sys.byteorder == "big":
        found.byteswap()
    return found


def _bytes(numbers: array[int]) -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
