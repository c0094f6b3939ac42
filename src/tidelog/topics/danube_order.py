"""Puts the runs of a Danube topic in order: each offset once, and a word for everything that is missing or comes again.

Invariants
- What is handed out is contiguous, except across a `Gap`, which is handed out in its place.
- An offset that comes again is used once: `first_difference` compares it with what was taken before. If it differs,
  Danube has begun again with offsets that it had used. That is refused, or those messages get the offsets that come
  next.
- Frames that are early wait for those that belong before them, for as long as `WINDOW_BYTES` are read, no longer.
- A lone frame far ahead is not believed: a checksum does not cover its offset, and one flipped bit must not make a gap
  of billions of messages that never were.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from tidelog.errors import CorruptionError
from tidelog.topics.danube_frames import Damage, Event, Run
from tidelog.topics.danube_message import decode_danube_message

WINDOW_BYTES = 16 << 20
_FIRST_MESSAGES = 1000
_FIRST_BYTES = 4 << 20
# How far out of place a frame may be at the very beginning, where nothing before it tells.
_LITTLE = 64
_CREDIBLE_JUMP = 1 << 16


class Gap(NamedTuple):
    """Offsets `first` to `last` (inclusive) are in no place where they should be. `damage` may be the reason.

    `behind` is the run that follows; when it is not credible, nothing is missing but its own frame is out of place.
    """

    first: int
    last: int
    behind: Run
    damage: Damage | None
    is_credible: bool


Step = Run | Gap | Damage
FirstDifference = Callable[[Run], "int | None"]


def in_order(events: Iterable[Event], first_difference: FirstDifference, *, renumber: bool) -> Iterator[Step]:
    """Runs and gaps in the order of offsets, and every damage as it is met.

    A step must have been dealt with before the next one is asked for: what was taken may come again.
    """
    order = _Order(first_difference, renumber)
    for event in events:
        yield from order.add(event)
    yield from order.finish()


class _Order:
    """`_next` is the offset that comes next; while `_is_beginning`, runs gather until it is clear where they begin."""

    def __init__(self, first_difference: FirstDifference, renumber: bool) -> None:
        self._first_difference = first_difference
        self._renumber = renumber
        self._next: int | None = None
        self._shift = 0
        self._is_beginning = True
        self._beginning: list[Event] = []
        self._early: list[tuple[int, int, Run]] = []
        self._damage: Damage | None = None
        self._read_bytes = 0
        self._waiting_since_bytes = 0
        self._arrivals = 0

    def add(self, event: Event) -> Iterator[Step]:
        """Takes what comes next in the files."""
        if not self._is_beginning:
            yield from self._meet(event) if isinstance(event, Damage) else self._add(event)
            return
        self._beginning.append(event)
        runs = _runs(self._beginning)
        if sum(run.count for run in runs) >= _FIRST_MESSAGES or sum(run.size for run in runs) >= _FIRST_BYTES:
            yield from self._begin()

    def finish(self) -> Iterator[Step]:
        """There are no more runs: nothing waits any longer."""
        while self._beginning or self._early:
            yield from self._begin() if self._beginning else self._give_up_waiting()

    # Beginnings

    def _begin(self) -> Iterator[Step]:
        """The first offset of what has gathered comes next."""
        events, self._beginning = self._beginning, []
        self._is_beginning = False
        if runs := _runs(events):
            first = _first_of(runs)
            self._next = first if self._next is None else self._next
            self._shift = self._next - first
        for event in events:
            yield from self.add(event)

    def _begin_again(self, run: Run, index: int) -> Iterator[Step]:
        """Another message where one was taken before: after a restart, offsets were used a second time."""
        if not self._renumber:
            raise _restart_error(run, index)
        is_first = not self._is_beginning
        self._is_beginning = True
        while self._early and is_first:
            yield from self._give_up_waiting()
        self._beginning.append(run.slice(index))

    # In the middle

    def _meet(self, damage: Damage) -> Iterator[Step]:
        """It explains what is missing next, unless something is missing already."""
        if not self._early and self._damage is None:
            self._damage = damage
        yield damage

    def _add(self, run: Run) -> Iterator[Step]:
        self._read_bytes += run.size
        run = run.shifted(self._shift)
        if run.first_offset != self._position and _has_wrong_offset(run, self._position - self._shift):
            yield from self._meet(
                Damage(run.file, run.byte(), run.size, "an offset that is not the message's own", False)
            )
        elif run.first_offset > self._position:
            self._wait(run)
        else:
            yield from self._place(run)
            yield from self._place_early()
        while self._early and self._read_bytes - self._waiting_since_bytes > WINDOW_BYTES:
            yield from self._give_up_waiting()

    def _wait(self, run: Run) -> None:
        if not self._early:
            self._waiting_since_bytes = self._read_bytes
        self._arrivals += 1
        heapq.heappush(self._early, (run.first_offset, self._arrivals, run.alone()))

    def _place_early(self) -> Iterator[Step]:
        """Those that waited for what has just been placed."""
        while self._early and self._early[0][0] <= self._position:
            yield from self._place(heapq.heappop(self._early)[2])
            self._waiting_since_bytes = self._read_bytes

    def _place(self, run: Run) -> Iterator[Step]:
        """A run that begins at the next offset or before it."""
        again = run.slice(0, max(0, min(run.count, self._position - run.first_offset)))
        difference = self._first_difference(again) if again.count else None
        if difference is not None:
            yield from self._begin_again(run, difference)
            return
        new = run.slice(again.count)
        if new.count:
            self._damage = None
            self._next = new.next_offset
            yield new

    def _give_up_waiting(self) -> Iterator[Step]:
        """What the earliest of those that wait was waiting for does not come."""
        run = heapq.heappop(self._early)[2]
        is_credible = self._is_credible(run)
        yield Gap(self._position, run.first_offset - 1, run, self._damage, is_credible)
        self._waiting_since_bytes = self._read_bytes
        if is_credible:
            self._next = run.first_offset
            yield from self._place(run)
            yield from self._place_early()

    def _is_credible(self, run: Run) -> bool:
        if run.count > 1 or run.first_offset - self._position <= _CREDIBLE_JUMP:
            return True
        return bool(self._early) and self._early[0][0] == run.next_offset

    @property
    def _position(self) -> int:
        assert self._next is not None
        return self._next


def _runs(events: list[Event]) -> list[Run]:
    return [event for event in events if isinstance(event, Run)]


def _has_wrong_offset(run: Run, expected: int) -> bool:
    """Whether a lone frame's message says that it is the one that is expected, and its header another offset.

    The checksum covers the message alone: it is the header that is damaged.
    """
    if run.count > 1 or expected == 0:
        return False
    try:
        message = decode_danube_message(run.frames.payloads()[0], run.file, run.byte())
    except CorruptionError:
        return False
    return message.topic_offset == expected


def _first_of(runs: list[Run]) -> int:
    """Where these runs begin, in Danube's offsets. A lone frame ahead of two that agree is not believed.

    The run that begins there comes before any that goes far back, so something is placed before that one is looked at.
    """
    confirmed = next((index for index, run in enumerate(runs) if run.count > 1), 0)
    first = anchor = min(run.frames.first_offset for run in runs[: confirmed + 1])
    for run in runs:
        if run.frames.first_offset < anchor - _LITTLE:
            break
        first = min(first, run.frames.first_offset)
    return first


def _restart_error(run: Run, index: int) -> CorruptionError:
    offset = run.frames.first_offset + index
    return CorruptionError(
        f"offset {offset} comes again, with another message than the one before: "
        "Danube used its offsets a second time, as it does after a restart without sealing",
        path=run.file,
        byte=run.byte(index),
        hint="--on-restart renumber imports all of them: from here on messages get the offsets that come next, and "
        "keep Danube's in the header danube-offset",
    )
