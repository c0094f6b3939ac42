"""The deduplication state of a topic's producers: which sequences are stored, and at which offsets. Pure: no threads,
no I/O.

Invariants
- The sequences of a producer increase. A sequence that is not above the last one is a duplicate, stored or not.
- The state is a function of the topic's messages, read in order; a snapshot is the same function at an earlier offset.
- At least the last `WINDOW` sequences of a producer are kept with their offsets; older ones are only known to be past.
- At most `MAX_PRODUCERS` are kept. The producers that were idle longest are evicted first, except open ones.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec

from tidelog.topics.message import ProducerMark

WINDOW = 1000
MAX_PRODUCERS = 10_000
NOT_KNOWN = -1
"""In place of an offset: it was stored, too long ago to remember where."""
_SLACK = 256
_ENTRY_BYTES = 120


class Stored(NamedTuple):
    """A sequence, and the offset of its message."""

    sequence: int
    offset: int


class ProducerSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One producer. `recent` are its newest sequences as text: `sequence:offset` or, for a run, `sequence:offset+more`,
    oldest first."""

    name: str
    epoch: int
    last_sequence: int
    last_offset: int
    recent: str = ""


class AnchoredSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Something that follows from the messages below `as_of_offset`; `last_crc32` is that of the last payload there."""

    as_of_offset: int
    last_crc32: int
    epoch: int


class ProducersSnapshot(AnchoredSnapshot, frozen=True, kw_only=True):
    """All producers of a topic."""

    producers: tuple[ProducerSnapshot, ...]


class ProducerState:
    """One producer."""

    def __init__(self) -> None:
        self.epoch = 0
        self.last_sequence: int | None = None
        """None while nothing was stored."""
        self._before: Stored | None = None
        """The last one that is too old for the window."""
        self._window = _Window()

    @property
    def last_offset(self) -> int:
        """Where the last one is; -1 while nothing was stored."""
        last = self._window.at(-1) if len(self._window) else self._before
        return NOT_KNOWN if last is None else last.offset

    def stored(self, sequences: Sequence[int]) -> list[int]:
        """Where those of these sequences are that are duplicates: always the first ones, since they increase."""
        last = self.last_sequence
        if last is None or not sequences or sequences[0] > last:
            return []
        return [self._window.offset_of(sequence) for sequence in sequences if sequence <= last]

    def find(self, sequence: int) -> int | None:
        """Where a sequence is stored; None when it is not. `NOT_KNOWN`: it is older than what is remembered."""
        if self.last_sequence is None or sequence > self.last_sequence:
            return None
        offset = self._window.offset_of(sequence)
        is_forgotten = self._before is not None or len(self._window) >= WINDOW
        if offset != NOT_KNOWN or (is_forgotten and self._window.count_through(sequence) == 0):
            return offset
        return None

    def record(self, epoch: int, sequence: int, offset: int) -> None:
        """A message is in the topic. What is known already changes nothing."""
        if epoch > self.epoch:
            self.epoch = epoch
        if self.last_sequence is not None and sequence <= self.last_sequence:
            return
        window = self._window
        window.offsets.append(offset)
        window.sequences.append(sequence)
        self.last_sequence = sequence
        if len(window.sequences) >= WINDOW + _SLACK:
            self._before = window.at(_SLACK - 1)
            self._window = window.part(_SLACK, len(window))

    def record_many(self, epoch: int, sequences: Sequence[int], offset: int) -> None:
        """Messages are in the topic, from this offset on; their sequences increase."""
        last = self.last_sequence
        if not sequences or (last is not None and sequences[0] <= last):
            for number, sequence in enumerate(sequences):
                self.record(epoch, sequence, offset + number)
            return
        self.epoch = max(self.epoch, epoch)
        window = self._window
        window.offsets.extend(range(offset, offset + len(sequences)))
        window.sequences.extend(sequences)
        self.last_sequence = sequences[-1]
        excess = len(window.sequences) - WINDOW - _SLACK
        if excess >= 0:  # as often as `record` would
            past = (excess // _SLACK + 1) * _SLACK
            self._before = window.at(past - 1)
            self._window = window.part(past, len(window))

    def mend(self) -> None:
        """After something was interrupted in the middle of `record`: as if it had not begun."""
        known = -1 if self.last_sequence is None else self.last_sequence
        self._window = self._window.part(0, self._window.count_through(known))

    def snapshot(self, name: str, below: int) -> ProducerSnapshot | None:
        """What follows from the messages below an offset; None when that is nothing. LookupError: too long ago."""
        size = self._window.count_below(below)
        last = self._window.at(size - 1) if size else self._before
        if last is None:
            return None
        if last.offset >= below:
            raise LookupError(f"what {name} had stored below {below} is forgotten")
        return ProducerSnapshot(
            name=name,
            epoch=self.epoch,
            last_sequence=last.sequence,
            last_offset=last.offset,
            recent=self._window.part(max(0, size - WINDOW), size).written(),
        )

    def restore(self, snapshot: ProducerSnapshot) -> None:
        """What a snapshot says; ValueError or OverflowError when that makes no sense."""
        last = Stored(snapshot.last_sequence, snapshot.last_offset)
        window = _Window()
        for sequence, offset in _parsed(snapshot.recent):
            if len(window) and window.at(-1).sequence >= sequence:
                raise ValueError(f"the sequences of {snapshot.name} do not grow")
            window.offsets.append(offset)
            window.sequences.append(sequence)
        if len(window) and window.at(-1) != last:
            raise ValueError(f"the newest sequence of {snapshot.name} is not its last")
        self.epoch, self.last_sequence, self._window = snapshot.epoch, last.sequence, window
        self._before = None if len(window) else last


class _Window:
    """Sequences and their offsets, both growing."""

    def __init__(self, sequences: array[int] | None = None, offsets: array[int] | None = None) -> None:
        self.sequences = array("Q") if sequences is None else sequences
        self.offsets = array("Q") if offsets is None else offsets

    def __len__(self) -> int:
        return len(self.sequences)

    def at(self, index: int) -> Stored:
        return Stored(self.sequences[index], self.offsets[index])

    def offset_of(self, sequence: int) -> int:
        index = bisect_left(self.sequences, sequence)
        found = index < len(self.sequences) and self.sequences[index] == sequence
        return self.offsets[index] if found else NOT_KNOWN

    def count_below(self, offset: int) -> int:
        return bisect_left(self.offsets, offset)

    def count_through(self, sequence: int) -> int:
        return bisect_right(self.sequences, sequence)

    def part(self, start: int, stop: int) -> _Window:
        return _Window(self.sequences[start:stop], self.offsets[start:stop])

    def written(self) -> str:
        return _written(zip(self.sequences, self.offsets, strict=True))


def _written(recent: Iterable[tuple[int, int]]) -> str:
    runs: list[list[int]] = []
    for sequence, offset in recent:
        last = runs[-1] if runs else None
        if last is not None and (sequence, offset) == (last[0] + last[2], last[1] + last[2]):
            last[2] += 1
        else:
            runs.append([sequence, offset, 1])
    return " ".join(f"{first}:{at}" + (f"+{count - 1}" if count > 1 else "") for first, at, count in runs)


def _parsed(text: str) -> Iterable[tuple[int, int]]:
    for run in text.split():
        sequence, _, rest = run.partition(":")
        offset, _, more = rest.partition("+")
        for step in range(min(int(more or 0), WINDOW) + 1):
            yield int(sequence) + step, int(offset) + step


class ProducerTable:
    """All producers of a topic, by name."""

    def __init__(self) -> None:
        self._by_name: dict[str, ProducerState] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[tuple[str, ProducerState]]:
        return iter(list(self._by_name.items()))

    @property
    def is_full(self) -> bool:
        """Whether there are more than may be known."""
        return len(self._by_name) > MAX_PRODUCERS

    def of(self, name: str) -> ProducerState:
        """The state of a producer; a new one when it is not known."""
        if name not in self._by_name:
            self._by_name[name] = ProducerState()
        return self._by_name[name]

    def record(self, mark: ProducerMark, offset: int) -> None:
        """A message that was read."""
        self.of(mark.name).record(mark.epoch, mark.sequence, offset)

    def forget_silent(self, keep: Container[str] = ()) -> None:
        """Lets go of those that have been silent longest, down to `MAX_PRODUCERS`."""
        excess = len(self._by_name) - MAX_PRODUCERS
        if excess <= 0:
            return
        silent = sorted(
            (name for name in self._by_name if name not in keep), key=lambda n: self._by_name[n].last_offset
        )
        for name in islice(silent, excess):
            del self._by_name[name]

    def restore(self, snapshot: ProducersSnapshot) -> None:
        """Begins with what a snapshot says; ValueError or OverflowError when that makes no sense."""
        for producer in snapshot.producers:
            self.of(producer.name).restore(producer)


def within(snapshot: ProducersSnapshot, max_bytes: int) -> ProducersSnapshot:
    """As much of a snapshot as fits: where sequences are goes first, then the producers that were silent longest."""
    newest_first = sorted(snapshot.producers, key=lambda producer: -producer.last_offset)
    room, names = max_bytes, 0
    for producer in newest_first:
        size = len(producer.name.encode("utf-8")) * 2 + _ENTRY_BYTES
        if size > room:
            break
        room -= size
        names += 1
    fitting = []
    for producer in newest_first[:names]:
        fits = len(producer.recent) <= room
        room -= len(producer.recent) if fits else 0
        fitting.append(producer if fits else msgspec.structs.replace(producer, recent=""))
    return msgspec.structs.replace(snapshot, producers=tuple(fitting))
