"""The ship watermark: up to which record the WAL may be shipped, given the orchestrator's low-water mark.

An entry ends with the record that completes it. Entries that were not rolled back follow each other in the order of
their seqs, so the watermark is right after the last of them whose seq is at or below the mark. Everything before that
one has a smaller seq, or was discarded by a rollback that was complete before it came.

All of this follows from the records themselves. The shipper reads them once, shortly after they were written: the
applier does no extra work, and nothing has to be rebuilt after a restart.

Invariants
- Entries above a given mark are never below its watermark; those at or below the mark are never rolled back.
- The last entries are known one by one, of older ones every 256th: what is between two of those is read again on
  demand. A million entries that cannot be shipped yet take two megabytes.
- Records are read up to a durable LSN that was taken after the mark: a rollback that made the mark possible is seen.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from threading import RLock
from typing import NamedTuple

from tidelog._native import entry_ends
from tidelog.log.frame import Frames

ReadFrames = Callable[[int, int], Iterator[Frames]]
"""The frames of the log from an LSN up to another (exclusive)."""

_KNOWN_EXACTLY = 1 << 16
_SAMPLE_EVERY = 256


class EntryEnd(NamedTuple):
    """An entry and the LSN of the record that completes it."""

    seq: int
    lsn: int


class Rollback(NamedTuple):
    """A rollback to `target_seq` that was completed by the record at `lsn`."""

    target_seq: int
    lsn: int


class LsnRange(NamedTuple):
    """Records whose entries do not count; both ends inclusive."""

    first: int
    last: int


def is_rolled_back(ranges: Sequence[LsnRange], lsn: int) -> bool:
    """Whether a record lies in one of these ranges, which are in order."""
    at = bisect_right(ranges, lsn, key=lambda one: one.first)
    return at > 0 and lsn <= ranges[at - 1].last


def _ends_in(frames: Frames) -> tuple[array[int], array[int], list[tuple[int, int, int]]]:
    """Seqs and LSNs of the entries that end in these frames, whether they count or not, and the rollbacks."""
    seqs, lsns, rollbacks = entry_ends(frames.first_offset, frames.buffer, frames.positions, frames.lengths)
    return array("Q", seqs), array("Q", lsns), rollbacks


class _Ends:
    """Ends of entries, increasing in both numbers."""

    def __init__(self) -> None:
        self.seqs = array("Q")
        self.lsns = array("Q")

    def __len__(self) -> int:
        return len(self.seqs)

    def __getitem__(self, index: int) -> EntryEnd:
        return EntryEnd(self.seqs[index], self.lsns[index])

    def add(self, end: EntryEnd) -> None:
        self.seqs.append(end.seq)
        self.lsns.append(end.lsn)

    def extend(self, seqs: array[int], lsns: array[int]) -> None:
        self.seqs.extend(seqs)
        self.lsns.extend(lsns)

    def cut(self, count: int) -> None:
        del self.seqs[count:], self.lsns[count:]

    def drop(self, count: int) -> None:
        del self.seqs[:count], self.lsns[:count]


class SeqIndex:
    """Index of the entries in the WAL after the shipped part, and where each ends.

    `base` is the last entry that is shipped whole (0, 0: none is), and `next_lsn` the first record that is not.
    """

    def __init__(self, read_frames: ReadFrames, base: EntryEnd, next_lsn: int) -> None:
        self._read_frames = read_frames
        self._base = base
        self._first_lsn = self._learned_lsn = max(next_lsn, base.lsn + 1)
        self._samples = _Ends()
        self._exact = _Ends()
        self._rolled_back: list[LsnRange] = []
        self._mutex = RLock()

    def gate(self, low_water_mark: int, durable_lsn: int) -> int:
        """The ship watermark: the first LSN that must not be shipped. `durable_lsn` is the first one that is not
        durable.
        """
        with self._mutex:
            self.learn(durable_lsn)
            return self._floor(low_water_mark, by_lsn=False).lsn + 1

    def last_entry_below(self, lsn: int) -> EntryEnd:
        """The last entry whose records are all below an LSN."""
        with self._mutex:
            return self._floor(lsn - 1, by_lsn=True)

    def at_or_before(self, seq: int) -> EntryEnd:
        """The last known entry whose seq is at most this; the base if there is none."""
        with self._mutex:
            return self._floor(seq, by_lsn=False)

    def left_disk_below(self, lsn: int) -> None:
        """Records below have been purged from the disk: lookups no longer know their entries."""
        with self._mutex:
            self._first_lsn = max(self._first_lsn, lsn)
            for ends in (self._samples, self._exact):
                ends.drop(bisect_right(ends.lsns, lsn - 1))

    def rolled_back_below(self, lsn: int) -> tuple[LsnRange, ...]:
        """What was discarded by rollbacks that were complete below an LSN."""
        with self._mutex:
            return tuple(one for one in self._rolled_back if one.last < lsn)

    def forget_below(self, lsn: int) -> None:
        """All of it is shipped, and its rolled-back ranges are recorded elsewhere."""
        with self._mutex:
            self._base = base = self._floor(lsn - 1, by_lsn=True)
            self._first_lsn = max(self._first_lsn, lsn)
            self._rolled_back = [one for one in self._rolled_back if one.last >= lsn]
            for ends in (self._samples, self._exact):
                ends.drop(bisect_right(ends.lsns, base.lsn))

    def learn(self, stop_lsn: int) -> None:
        """Reads what was written since the last call, up to an LSN (exclusive)."""
        with self._mutex:
            if stop_lsn <= self._learned_lsn:
                return
            for frames in self._read_frames(self._learned_lsn, stop_lsn):
                self._learn(frames)
                self._thin_out()
                self._learned_lsn = frames.next_offset

    def learn_disk(self, stop_lsn: int, first_lsn: int) -> None:
        """As `learn`; forgets what is no longer on the disk, which begins at `first_lsn`. What left it unread is not
        missed.
        """
        with self._mutex:
            self.left_disk_below(first_lsn)
            self._learned_lsn = max(self._learned_lsn, first_lsn)
            self.learn(stop_lsn)

    def _learn(self, frames: Frames) -> None:
        seqs, lsns, rollbacks = _ends_in(frames)
        taken = 0
        for count, target_seq, lsn in rollbacks:
            self._exact.extend(seqs[taken:count], lsns[taken:count])
            self._roll_back(Rollback(target_seq, lsn))
            taken = count
        self._exact.extend(seqs[taken:], lsns[taken:])

    def _thin_out(self) -> None:
        while len(self._exact) >= 2 * _KNOWN_EXACTLY:
            for index in range(_SAMPLE_EVERY - 1, _KNOWN_EXACTLY, _SAMPLE_EVERY):
                self._samples.add(self._exact[index])
            self._exact.drop(_KNOWN_EXACTLY)

    def _roll_back(self, rollback: Rollback) -> None:
        self._exact.cut(bisect_right(self._exact.seqs, rollback.target_seq))
        if not self._exact and len(self._samples) and self._samples.seqs[-1] > rollback.target_seq:
            self._samples.cut(bisect_right(self._samples.seqs, rollback.target_seq))
            last = self._floor(rollback.target_seq, by_lsn=False, stop_lsn=rollback.lsn)
            if last.lsn > (self._samples[-1].lsn if len(self._samples) else self._base.lsn):
                self._samples.add(last)
        newest = self._newest()
        while self._rolled_back and self._rolled_back[-1].first > newest.lsn:
            self._rolled_back.pop()
        self._rolled_back.append(LsnRange(newest.lsn + 1, rollback.lsn))

    def _newest(self) -> EntryEnd:
        return next((ends[-1] for ends in (self._exact, self._samples) if len(ends)), self._base)

    def _floor(self, value: int, *, by_lsn: bool, stop_lsn: int | None = None) -> EntryEnd:
        """The last entry whose seq, or LSN, is at most this."""
        found, exact = self._base, self._exact
        at = bisect_right(exact.lsns if by_lsn else exact.seqs, value)
        if at:
            return exact[at - 1]
        samples = self._samples
        at = bisect_right(samples.lsns if by_lsn else samples.seqs, value)
        if at:
            found = samples[at - 1]
        behind = samples[at] if at < len(samples) else None
        stop = stop_lsn if behind is None else behind.lsn
        return found if stop is None else self._read_again(found, stop, value, by_lsn)

    def _read_again(self, found: EntryEnd, stop_lsn: int, value: int, by_lsn: bool) -> EntryEnd:
        """Finds the last matching entry between a known one and an LSN."""
        for frames in self._read_frames(max(found.lsn + 1, self._first_lsn), stop_lsn + 1):
            for end in map(EntryEnd, *_ends_in(frames)[:2]):
                if not is_rolled_back(self._rolled_back, end.lsn):
                    if (end.lsn if by_lsn else end.seq) > value:
                        return found
                    found = end
        return found
