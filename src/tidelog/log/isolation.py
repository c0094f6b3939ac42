"""Readers that see only what is committed: messages of open and aborted transactions, and the control records that end
them, are left out.

    log      | p | t1 | t2 | p | t1 | abort 1 | t2 | commit 2 | t3 | p |
    visible    p        t2   p                  t2              ^ last stable offset: t3 is open

How a transaction ends is in the log itself, behind its messages. A batch whose transactions are not all decided yet is
held back; the reader goes on, for a bounded number of bytes, and then a second reader of the same log, the scout, runs
ahead. Of what the scout reads only producers and offsets of control records are kept. So one mechanism serves files,
memory, the object store and views, wherever a reader begins, and needs no metadata.

    CommittedReader(reader, open_scout)         a reader with the methods of `log.reader.Reader`, threads and tasks
    committed_batches(batches, open_scout)      the same for an iterator of batches, as the tasks of Spark have it
    decided_batches(read)                       the same of a part of a log that nobody will decide any more
    Visibility                                  what both are made of, without I/O

Invariants
- Batches come in order, without a duplicate; between two of them offsets are left out only if they are control records
  or aborted, or if the reader below passed over them.
- Nothing is returned from the last stable offset on. Without `follow` that is the end, even if plain messages follow;
  with it, the reader waits for the control record.
- A batch without transactions is returned as it came, and costs one look at each message, in C.
- Held are at most `AHEAD_BYTES` and a batch. The scout does not read what the reader has read ahead.
- If an offset is lost that a control record had, the next one of the same producer decides: more is not known.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal, get_args

from tidelog.errors import InputError
from tidelog.log.reader import BatchReader
from tidelog.log.tail_cache import Batch
from tidelog.log.transactions import MESSAGES, Mark, Outcomes, marks_of

Isolation = Literal["read_committed", "read_uncommitted"]
READ_COMMITTED: Isolation = "read_committed"
AHEAD_BYTES = 4 << 20


def check_isolation(isolation: object) -> None:
    """InputError when it is neither of the two."""
    if isolation not in get_args(Isolation):
        raise InputError(f'isolation must be "read_committed" or "read_uncommitted", not {isolation!r}')


class _Held:
    """A batch with transactions, from `offset` on: what is before was returned or left out."""

    __slots__ = ("batch", "marks", "offset", "size_bytes")

    def __init__(self, batch: Batch, marks: Iterable[Mark]) -> None:
        self.batch = batch
        self.offset = batch.first_offset
        self.marks = deque(marks)
        self.size_bytes = _size_bytes(batch)


class Visibility:
    """Sorts batches into visible ones. Pure: who uses it reads, for itself and as the scout."""

    def __init__(self, *, passes_open: bool = False) -> None:
        """With `passes_open` an open transaction is left out, as if it were aborted, and holds nothing back."""
        self._passes_open = passes_open
        self._outcomes = Outcomes()
        self._held: deque[_Held] = deque()
        self.held_bytes = 0

    @property
    def known_to(self) -> int:
        """What a scout reads next: up to here every control record is known."""
        return self._outcomes.known_to

    @property
    def held_offset(self) -> int | None:
        """The first offset that is held back; None if nothing is."""
        return self._held[0].offset if self._held else None

    @property
    def is_ready(self) -> bool:
        """Whether `visible` gets on with what is held."""
        if not self._held:
            return False
        held = self._held[0]
        mark = held.marks[0] if held.marks else None
        return mark is None or mark.first_offset > held.offset or self._outcome(mark) is not None

    def take(self, batch: Batch) -> Batch | None:
        """The next batch of the reader: itself when nothing holds it back, else None; `visible` has it then."""
        marks = marks_of(batch)
        if marks is None and not self._held:
            if (stop := batch.next_offset) > self._outcomes.known_to:
                self._outcomes.known_to = stop
            return batch
        self._outcomes.learn(marks or (), batch.next_offset)
        held = _Held(batch, marks or ())
        self._held.append(held)
        self.held_bytes += held.size_bytes
        return None

    def learn(self, batch: Batch) -> None:
        """The next batch of the scout."""
        self._outcomes.learn(marks_of(batch) or (), batch.next_offset)

    def visible(self) -> Batch | None:
        """The next visible messages of those held; None when an open transaction is next, or nothing is held."""
        self._pass_hidden()
        if not self._held:
            return None
        held = self._held[0]
        start = held.offset
        held.offset = stop = self._end_of_run(held)
        self._pass_hidden()  # so that `held_offset` is the next that somebody may get
        return _part(held.batch, start, stop) if start < stop else None

    def _end_of_run(self, held: _Held) -> int:
        while held.marks:
            if not self._outcome(held.marks[0]):
                return held.marks[0].first_offset
            held.marks.popleft()
        return held.batch.next_offset

    def _pass_hidden(self) -> None:
        """Goes behind what is known not to be visible."""
        while self._held:
            held = self._held[0]
            if held.offset == held.batch.next_offset:
                self._held.popleft()
                self.held_bytes -= held.size_bytes
                self._outcomes.forget_before(held.offset)
                continue
            mark = held.marks[0] if held.marks else None
            if mark is None or mark.first_offset > held.offset or self._outcome(mark) is not False:
                return
            held.offset = mark.last_offset + 1
            held.marks.popleft()

    def _outcome(self, mark: Mark) -> bool | None:
        """Whether it is visible; a control record is not. None: nobody knows yet."""
        if mark.kind != MESSAGES:
            return False
        outcome = self._outcomes.of(mark.producer_id, mark.last_offset)
        return False if outcome is None and self._passes_open else outcome


class CommittedReader(BatchReader):
    """A position in a log, as `Reader`, that sees only what is committed."""

    def __init__(self, reader: BatchReader, open_scout: Callable[[int], BatchReader]) -> None:
        """`open_scout` opens a reader of the same log from an offset to its end, which waits there if this one does."""
        self._reader = reader
        self._open_scout = open_scout
        self._scout: BatchReader | None = None
        self._visibility = Visibility()
        self._is_closed = False
        self.lost = 0
        """How many offsets the reader has passed over because they are gone."""

    @property
    def offset(self) -> int:
        """The next one; all below were returned, or are not visible."""
        held = self._visibility.held_offset
        return self._reader.offset if held is None else held

    @property
    def waits_at(self) -> int:
        """As far as the log was looked at: while an open transaction holds it up, only messages from here on help."""
        return max(self._visibility.known_to, self._reader.offset)

    @property
    def is_ready(self) -> bool:
        """Whether the next batch is there without reading."""
        return self._visibility.is_ready

    @property
    def is_at_stop(self) -> bool:
        return self._visibility.held_offset is None and self._reader.is_at_stop

    def next_batch(self, timeout_seconds: float | None = None) -> Batch | None:
        """As `Reader.next_batch`; None also at the last stable offset, without `follow`."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        if not self._visibility.held_bytes:  # without transactions this is all; no batch has 0 bytes
            reached = self._reader.offset
            batch = self._reader.next_batch(timeout_seconds)
            if batch is None:
                return None
            self.lost += batch.first_offset - reached
            if self._visibility.take(batch) is not None:
                return batch
        while (visible := self._visibility.visible()) is None:
            source, reached = self._source(), self._reader.offset
            found = source.next_batch(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if found is None:
                return None
            if (whole := self._take(source, found, reached)) is not None:
                return whole
        return visible

    async def next_batch_async(self) -> Batch | None:
        while (visible := self._visibility.visible()) is None:
            source, reached = self._source(), self._reader.offset
            found = await source.next_batch_async()
            if found is None:
                return None
            if (whole := self._take(source, found, reached)) is not None:
                return whole
        return visible

    def place_of(self, offset: int) -> Path | str:
        return self._reader.place_of(offset)

    def close(self) -> None:
        """Closes both readers."""
        self._is_closed = True
        self._reader.close()
        if self._scout is not None:
            self._scout.close()

    def _source(self) -> BatchReader:
        """Which reader is to read on: the scout when something is held back, and the other one has read enough."""
        visibility, reader = self._visibility, self._reader
        if visibility.held_offset is None:
            return reader
        is_first = visibility.known_to <= reader.offset
        if is_first and visibility.held_bytes < AHEAD_BYTES and not reader.is_at_stop:
            return reader
        return self._scout_at(self.waits_at)

    def _scout_at(self, offset: int) -> BatchReader:
        scout = self._scout
        if scout is None or scout.offset != offset:
            if scout is not None:
                scout.close()
            scout = self._scout = self._open_scout(offset)
            if self._is_closed:
                scout.close()  # another thread closed it meanwhile
        return scout

    def _take(self, source: BatchReader, batch: Batch, reached: int) -> Batch | None:
        if source is self._reader:
            self.lost += batch.first_offset - reached
            return self._visibility.take(batch)
        self._visibility.learn(batch)
        return None


def committed_batches(batches: Iterable[Batch], open_scout: Callable[[int], Iterator[Batch]]) -> Iterator[Batch]:
    """The visible batches of an iterator, up to the last stable offset.

    `open_scout` iterates over the batches of the same log from an offset to its end; it is called when the given ones
    are used up, or too many are held back.
    """
    visibility = Visibility()
    source, scout = iter(batches), None
    is_used_up, reached = False, 0
    while True:
        yield from iter(visibility.visible, None)
        is_ahead = visibility.known_to > reached or visibility.held_bytes >= AHEAD_BYTES or is_used_up
        if visibility.held_offset is not None and is_ahead:
            scout = scout or open_scout(visibility.known_to)
            found = next(scout, None)
            if found is None:
                return
            visibility.learn(found)
        elif (batch := next(source, None)) is not None:
            reached = batch.next_offset
            if reached > visibility.known_to:
                scout = None
            if (whole := visibility.take(batch)) is not None:
                yield whole
        elif visibility.held_offset is None:
            return
        else:
            is_used_up = True


def decided_batches(read: Callable[[], Iterable[Batch]]) -> Iterator[Batch]:
    """What is committed within a part of a log, which is read twice. What has no outcome there is left out."""
    visibility = Visibility(passes_open=True)
    for batch in read():
        visibility.learn(batch)
    for batch in read():
        if (whole := visibility.take(batch)) is not None:
            yield whole
        yield from iter(visibility.visible, None)


def _part(batch: Batch, first_offset: int, stop_offset: int) -> Batch:
    start, stop = first_offset - batch.first_offset, stop_offset - batch.first_offset
    if batch.frames is None:
        bare = batch.bare[start:stop]
        return Batch(first_offset, None, 0, len(bare), bare)
    return Batch(first_offset, batch.frames, batch.start + start, batch.start + stop, [])


def _size_bytes(batch: Batch) -> int:
    if batch.frames is None:
        return sum(map(len, batch.bare))
    return batch.frames.start_of(batch.stop) - batch.frames.start_of(batch.start)
