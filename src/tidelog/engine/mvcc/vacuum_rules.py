"""Vacuum rules: which versions may be removed, given a horizon, decided in one scan in tree order.

    newest                                                             oldest
    seq 19    seq 14  |  seq 9     seq 7     seq 5     seq 2            horizon 10, keep_versions 2
    stays     stays   |  stays     stays     goes      goes
                      |  (seen at the horizon)

Invariants
- Versions above the horizon stay. Of the others, the newest `keep_versions` stay: the first of them is visible at the
  horizon. The decision depends on nothing above the horizon, so concurrent entries and rollbacks do not change it.
- A version that is hidden at the horizon, by the deletion of its bucket or a later creation of it, is hidden forever,
  and is removed. So is a tombstone below which nothing is left: no row means the same.
- Rows of buckets likewise: of each the last one that is not above the horizon stays, unless it is a deletion.
- Of one name the oldest is removed first. In that order, nothing older ever becomes visible instead.
- Memory is bounded by some steps of the scan, and by 8 bytes for each version of one name that goes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from tidelog._native import count_cells, judge_cells
from tidelog.engine.mvcc.cells import BUCKETS, SEQ_BYTES, at, decode_cell, is_pointer, seq_of
from tidelog.engine.mvcc.versions import BucketVersion

_ANY_KEY = bytes(1 + SEQ_BYTES)
# A name with more versions than this is judged one by one: what is not complete is looked at again with every step.
_MOST_CELLS = 8192
_GONE = 1  # the flag of a tombstone, and of a deleted bucket
OnKept = Callable[[bytes], None]


class Rule(NamedTuple):
    """What is to be kept; `created` has the buckets that are there at the horizon, by their names as bytes."""

    horizon: int
    keep_versions: int
    created: dict[bytes, BucketVersion]


class Verdict(NamedTuple):
    """What goes of one name: seqs, newest first, and the bytes of values that it points to."""

    prefix: bytes
    seqs: array[int]
    stored_bytes: int

    def doomed(self) -> Iterator[bytes]:
        """The keys of the rows that go, in the order in which they have to."""
        return (at(self.prefix, seq) for seq in reversed(self.seqs))


class _Name:
    """All versions of one object or bucket, newest first."""

    def __init__(self, prefix: bytes, rule: Rule, on_kept: OnKept) -> None:
        self.prefix = prefix
        self._horizon = rule.horizon
        self._on_kept = on_kept
        self._is_bucket = prefix.startswith(BUCKETS)
        self._keep = 1 if self._is_bucket else rule.keep_versions
        self._created = None if self._is_bucket else rule.created.get(prefix[1 : prefix.index(0)])
        self._kept: list[tuple[int, bytes]] = []
        self._gone = array("Q")
        self._stored_bytes = 0

    def add(self, seq: int, value: bytes) -> None:
        """The next older version."""
        if seq > self._horizon:
            self._on_kept(value)
        elif len(self._kept) < self._keep and not self._is_hidden(seq, value):
            self._kept.append((seq, value))
        else:
            self._gone.append(seq)
            self._stored_bytes += _pointed_bytes(value)

    def _is_hidden(self, seq: int, value: bytes) -> bool:
        if self._is_bucket:
            return False
        created = self._created
        if created is None or seq < created.seq:
            return True
        return seq == created.seq and decode_cell(value).order < created.order

    def verdict(self) -> Verdict:
        """What goes, now that all of them are known."""
        while self._kept and self._kept[-1][1][0] & _GONE:
            # Older ones are gone already or go before it: what is left of the name is the same without it.
            self._gone.insert(0, self._kept.pop()[0])
        for _, value in self._kept:
            self._on_kept(value)
        return Verdict(self.prefix, self._gone, self._stored_bytes)


class LiveBytes:
    """Counts what versions that stay take: all of them, and what they point to in each piece of the log, given by its
    first LSN and the next one behind it.
    """

    def __init__(self, bounds: Iterable[tuple[int, int]]) -> None:
        self.numbers = array("Q", [0])
        for first_lsn, next_lsn in bounds:
            self.numbers.extend((first_lsn, next_lsn, 0))
        self.in_files: list[bytes] = []
        """The cells of those whose values have files of their own."""

    @property
    def live_bytes(self) -> int:
        """Cells, and the values that they point to."""
        return self.numbers[0]

    def of_pieces(self) -> array[int]:
        """The bytes that are pointed to in each piece."""
        return self.numbers[3::3]

    def count(self, cells: list[tuple[bytes, bytes]]) -> None:
        """Counts cells. They may point after all pieces, or before them."""
        self.in_files += count_cells(cells, self.numbers)

    def note(self, value: bytes) -> None:
        """Counts one, without its key."""
        self.count([(_ANY_KEY, value)])


class Swept(NamedTuple):
    """What goes of some names, in the order in which it has to; the bytes that it points to, and how many stay."""

    doomed: list[bytes]
    stored_bytes: int
    kept: int


def sweep(steps: Iterable[list[tuple[bytes, bytes]]], rule: Rule, live: LiveBytes) -> Iterator[Swept]:
    """Judges the cells of a scan, a step at a time; what stays is counted. As `judged`, which has the names that are
    not plain: buckets, tombstones, and what is hidden.
    """
    cells: list[tuple[bytes, bytes]] = []
    rest = iter(steps)
    for step in rest:
        cells += step
        done, swept = _swept(cells, rule, live, is_last=False)
        del cells[:done]
        yield swept
        if len(cells) > _MOST_CELLS:
            yield from _swept_name(cells, rest, rule, live)
    yield _swept(cells, rule, live, is_last=True)[1]


def _swept_name(
    cells: list[tuple[bytes, bytes]], steps: Iterator[list[tuple[bytes, bytes]]], rule: Rule, live: LiveBytes
) -> Iterator[Swept]:
    """Judges the name that the cells begin with, however many versions it has; leaves the cells behind it."""
    prefix, count = cells[0][0][:-SEQ_BYTES], 0
    name = _Name(prefix, rule, live.note)
    while True:
        own = next((number for number, (key, _) in enumerate(cells) if key[:-SEQ_BYTES] != prefix), len(cells))
        for key, value in cells[:own]:
            name.add(seq_of(key), value)
        count += own
        del cells[:own]
        if cells or (step := next(steps, None)) is None:
            break
        cells += step
        yield Swept([], 0, 0)  # a collection may be told to stop
    verdict = name.verdict()
    doomed = verdict.doomed()
    while some := list(islice(doomed, _MOST_CELLS)):
        yield Swept(some, 0, 0)
    yield Swept([], verdict.stored_bytes, count - len(verdict.seqs))


def _swept(cells: list[tuple[bytes, bytes]], rule: Rule, live: LiveBytes, *, is_last: bool) -> tuple[int, Swept]:
    found = judge_cells(cells, is_last, rule.horizon, rule.keep_versions, rule.created, live.numbers)
    done, doomed, stored_bytes, kept, others, in_files = found
    live.in_files += in_files
    for verdict in judged(others, rule, live.note):
        doomed += verdict.doomed()
        stored_bytes += verdict.stored_bytes
        kept -= len(verdict.seqs)
    return done, Swept(doomed, stored_bytes, kept + len(others))


def judged(rows: Iterable[tuple[bytes, bytes]], rule: Rule, on_kept: OnKept) -> Iterator[Verdict]:
    """One verdict for each name of which something goes; `on_kept` is given the cell of every version that stays."""
    name: _Name | None = None
    for key, value in rows:
        prefix = key[:-SEQ_BYTES]
        if name is None or prefix != name.prefix:
            if name is not None:
                yield from _told(name)
            name = _Name(prefix, rule, on_kept)
        name.add(seq_of(key), value)
    if name is not None:
        yield from _told(name)


def _told(name: _Name) -> Iterator[Verdict]:
    verdict = name.verdict()
    if verdict.seqs:
        yield verdict


def _pointed_bytes(value: bytes) -> int:
    return decode_cell(value).stored_bytes if is_pointer(value) else 0
