"""Records of the log as columns: which of them count, and what they say, without an object a row.

    selection = EntrySelection(start_lsn, stop_lsn, ...)
    for frames in ...:                                       # from start_lsn on, in order
        for frames, indexes in selection.feed(frames, 0, frames.count): ...
        if selection.is_done: break                          # may be some frames behind stop_lsn

Invariants
- An entry belongs to the range in which its first record lies, all of its records: ranges side by side give every entry
  once, also one that goes on behind the end of its range.
- An entry counts when its last record is there, its seq is among those asked for, and no rollback took it away: the
  rule of `restore_replay`. Where the ranges that were rolled back are no longer all known, that is an error.
- What is handed out is in the order of the log. The records of an entry that is not complete wait, in memory.

The loops are C (`_entries.c`); `entry_columns_python` gives the same answers where it could not be built.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tidelog.engine import entry_columns_python
from tidelog.engine.entry_columns_python import (
    COUNTS,
    STILL_OPEN,
    WANT_METADATA,
    WANT_NAMES,
    WANT_REASONS,
    WANT_SOURCES,
    WANT_VALUES,
)
from tidelog.engine.gate import LsnRange
from tidelog.log.frame import Frames

if TYPE_CHECKING:
    _kernel = entry_columns_python
else:
    try:
        if os.environ.get("TIDELOG_PURE_PYTHON"):
            raise ImportError
        from tidelog.engine import _entries as _kernel
    except ImportError:
        _kernel = entry_columns_python

__all__ = [
    "WANT_METADATA",
    "WANT_NAMES",
    "WANT_REASONS",
    "WANT_SOURCES",
    "WANT_VALUES",
    "EntryColumns",
    "EntrySelection",
    "Strings",
    "gather_entries",
]

KERNEL_IS_NATIVE = _kernel is not entry_columns_python


class Strings(NamedTuple):
    """A column of bytes: row i is data[ends[i]:ends[i + 1]], ends as i32."""

    ends: bytes
    data: bytes


@dataclass(frozen=True, slots=True)
class EntryColumns:
    """Operations as arrays, little-endian. `compressed` says how many of them have a compressed body: metadata and
    value of those are empty here."""

    count: int
    compressed: int
    seqs: bytes
    lsns: bytes
    times_us: bytes
    sizes: bytes
    crcs: bytes
    orders: bytes
    ops: bytes
    flags: bytes
    codecs: bytes
    buckets: Strings
    keys: Strings
    src_buckets: Strings
    src_keys: Strings
    reasons: Strings
    metadata: Strings
    values: Strings


Chosen = tuple[Frames, bytes]
"""Frames, and which of them count: indexes, u32."""


class EntrySelection:
    """Goes through the records of one range, and a little further, and says which of them count."""

    def __init__(
        self, stop_lsn: int, first_seq: int, last_seq: int, rolled_back: Sequence[LsnRange], dead: bytes | None = None
    ) -> None:
        self._stop_lsn = stop_lsn
        self._first_seq = first_seq
        self._last_seq = last_seq
        self._dead = dead if dead is not None else packed_ranges(rolled_back)
        self._open_seq = 0
        self._held: list[Chosen] = []
        self.is_done = False
        """Whether everything of the range was seen."""

    def feed(self, frames: Frames, start: int, stop: int) -> Iterator[Chosen]:
        """The next frames, from one index to another; what counts of them, and of those before."""
        owned_stop = max(0, self._stop_lsn - frames.first_offset)
        fate, chosen, pending, open_seq, self.is_done = _kernel.select_entries(
            *(frames.first_offset, frames.buffer, frames.positions, frames.lengths, start, stop, owned_stop),
            *(self._dead, self._first_seq, self._last_seq, self._open_seq),
        )
        if fate == COUNTS:
            yield from self._held
        if fate != STILL_OPEN:
            self._held = []
        if chosen:
            yield frames, chosen
        if pending:
            self._held.append((frames, pending))
        self._open_seq = open_seq
        self.is_done = self.is_done or (not open_seq and stop >= owned_stop)


def packed_ranges(ranges: Sequence[LsnRange]) -> bytes:
    """Ranges as the kernel takes them."""
    return array("Q", [lsn for one in ranges for lsn in one]).tobytes()


def gather_entries(
    frames: Frames, indexes: bytes, wanted: int, max_rows: int, max_bytes: int
) -> Iterator[tuple[EntryColumns, bytes]]:
    """The operations at these indexes, as columns of at most so many rows and about so many bytes, with the indexes of
    each. `wanted` is a sum of the WANT_ numbers."""
    at, count = 0, len(indexes) // 4
    while at < count:
        places = frames.buffer, frames.positions, frames.lengths
        rows, stop, compressed, numbers, strings = _kernel.gather_entries(
            frames.first_offset, *places, indexes, at, wanted, max_rows, max_bytes
        )
        texts = [Strings(*strings[number : number + 2]) for number in range(0, len(strings), 2)]
        yield _columns(rows, compressed, numbers, texts), indexes[4 * at : 4 * stop]
        at = stop


def _columns(rows: int, compressed: int, numbers: tuple[bytes, ...], texts: list[Strings]) -> EntryColumns:
    seqs, lsns, times_us, sizes, crcs, orders, ops, flags, codecs = numbers
    return EntryColumns(rows, compressed, seqs, lsns, times_us, sizes, crcs, orders, ops, flags, codecs, *texts)
