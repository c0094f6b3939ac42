"""Transactions in a log: whose messages belong to one, and how it ended. Everything is in the log itself.

A message of a transaction names its producer in its envelope's extension (kind 5, docs/formats.md). A control record
ends the transaction of a producer:

    byte  0        1        2       4                    8          16            24
          +--------+--------+-------+--------------------+----------+-------------+
          | 2      | commit | epoch | coordinator's epoch| time, us | producer id |   all little-endian
          | u8     | u8     | i16   | i32                | i64      | i64         |
          +--------+--------+-------+--------------------+----------+-------------+

Invariants
- The first control record of a producer after a message decides that message, from any writer. A message without one
  belongs to an open transaction.
- The last stable offset is the first offset of the oldest open transaction, or the end of the log: below it everything
  is decided.
- Nothing here holds a payload: what is remembered are producers and offsets.

`Transactions` goes through a log from its beginning and knows what is open and what was aborted; `Outcomes` is for a
reader that begins anywhere, and answers how the transaction of one message ended. The loop over messages is C
(`native/record_batches_transactions.h`).
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from enum import IntEnum
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tidelog import _native
from tidelog.errors import DataError, NotFoundError
from tidelog.log.frame import CONTROL_BYTE, Buffer, Frames
from tidelog.log.tail_cache import Batch

if TYPE_CHECKING:
    from tidelog.log.reader import BatchReader

# Control records

_CONTROL_PAYLOAD = struct.Struct("<BBhiqq")


class Control(NamedTuple):
    """The end of a transaction in a partition."""

    is_commit: bool
    producer_id: int
    producer_epoch: int
    coordinator_epoch: int
    timestamp_us: int


def control_payload(control: Control) -> bytes:
    """The payload of the frame that ends a transaction. Its time is where every payload has it."""
    return _CONTROL_PAYLOAD.pack(
        CONTROL_BYTE,
        int(control.is_commit),
        control.producer_epoch,
        control.coordinator_epoch,
        control.timestamp_us,
        control.producer_id,
    )


def read_control(payload: Buffer) -> Control | None:
    """What a payload says about the end of a transaction; None for every other payload."""
    if len(payload) != _CONTROL_PAYLOAD.size or payload[0] != CONTROL_BYTE:
        return None
    _, kind, epoch, coordinator_epoch, time_us, producer_id = _CONTROL_PAYLOAD.unpack(payload)
    if kind > 1:
        raise DataError(f"a control record has the unknown kind {kind}")
    return Control(kind == 1, producer_id, epoch, coordinator_epoch, time_us)


# What a batch has of transactions


class MarkKind(IntEnum):
    """What a mark stands for."""

    MESSAGES = 0
    ABORT = 1
    COMMIT = 2


MESSAGES, ABORT, COMMIT = MarkKind


class Mark(NamedTuple):
    """Consecutive messages of one producer's transaction, or the control record that ends it."""

    first_offset: int
    last_offset: int
    producer_id: int
    epoch: int
    kind: int
    """Of `MarkKind`."""


def marks_of(batch: Batch) -> list[Mark] | None:
    """All marks of a batch, in order; None where no message knows of transactions, which costs next to nothing.

    A message that cannot be decoded belongs to no transaction.
    """
    frames = batch.frames
    if frames is None:
        found = _native.payload_transaction_marks(batch.first_offset, batch.bare)
        return None if found is None else [Mark(*mark) for mark in found]
    return marks_in(frames, batch.start, batch.stop)


def marks_in(frames: Frames, start: int = 0, stop: int | None = None) -> list[Mark] | None:
    """As `marks_of`, of frames `start` to `stop` (exclusive)."""
    stop = frames.count if stop is None else stop
    found = _native.transaction_marks(frames.first_offset, frames.buffer, frames.positions, frames.lengths, start, stop)
    return None if found is None else [Mark(*mark) for mark in found]


# What a log has of transactions


class OpenTransaction(msgspec.Struct, frozen=True, array_like=True):
    """A transaction without an end: readers of committed messages wait at the first offset of the oldest."""

    producer_id: int
    epoch: int
    first_offset: int
    last_offset: int


class AbortedTransaction(NamedTuple):
    """Offsets from `first_offset` to `last_offset` (its control record) of a producer that do not count."""

    producer_id: int
    first_offset: int
    last_offset: int


class Transactions:
    """What is open and what was aborted in a log, as far as it was recorded. Pure; used by one thread at a time."""

    def __init__(self, open: Iterable[OpenTransaction] = (), aborted: Iterable[AbortedTransaction] = ()) -> None:
        """`open` in the order of their first offsets, `aborted` in that of their last."""
        # In the order of their first offsets, which is that of the log.
        self._open = {one.producer_id: one for one in open}
        self._aborted = list(aborted)

    def record(self, mark: Mark) -> None:
        if mark.kind == MESSAGES:
            self.add(mark.producer_id, mark.epoch, mark.first_offset, mark.last_offset)
        else:
            self.end(mark.producer_id, mark.first_offset, is_commit=mark.kind == COMMIT)

    def add(self, producer_id: int, epoch: int, first_offset: int, last_offset: int) -> None:
        """Messages of a transaction, the first or further ones."""
        known = self._open.get(producer_id)
        first = first_offset if known is None else known.first_offset
        self._open[producer_id] = OpenTransaction(producer_id, epoch, first, last_offset)

    def end(self, producer_id: int, offset: int, *, is_commit: bool) -> None:
        """The control record of a producer."""
        ended = self._open.pop(producer_id, None)
        if ended is not None and not is_commit:
            self._aborted.append(AbortedTransaction(producer_id, ended.first_offset, offset))

    def is_open(self, producer_id: int) -> bool:
        """Whether a transaction of the producer is open here."""
        return producer_id in self._open

    @property
    def open(self) -> list[OpenTransaction]:
        """In the order of their first offsets."""
        return list(self._open.values())

    def last_stable_offset(self, high_watermark: int) -> int:
        """Consumers that read committed messages get nothing from here on."""
        first = next(iter(self._open.values()), None)
        return high_watermark if first is None else min(first.first_offset, high_watermark)

    @property
    def all_aborted(self) -> list[AbortedTransaction]:
        """In the order of their control records."""
        return list(self._aborted)

    def aborted(self, start_offset: int, stop_offset: int) -> list[AbortedTransaction]:
        """Aborted transactions with a message in this range (its end is exclusive)."""
        # Control records are appended in the order of their offsets, so the list is sorted by last offset.
        at = bisect_left(self._aborted, start_offset, key=lambda one: one.last_offset)
        return [one for one in self._aborted[at:] if one.first_offset < stop_offset]

    def forget_open_before(self, start_offset: int) -> None:
        """The log begins later now: an open transaction without a message from there on holds nobody up."""
        left = (one for one in self._open.values() if one.last_offset >= start_offset)
        self._open = {one.producer_id: one for one in left}

    def forget_before(self, start_offset: int) -> None:
        """The log begins later now: aborted transactions before that are of no use to anybody."""
        self._aborted = [one for one in self._aborted if one.last_offset >= start_offset]


_PRUNE_FROM = 64


class Outcomes:
    """How the transactions of messages ended, for a reader that goes forward from any offset. Pure.

    It remembers the control records between the reader and the end of what was learnt. Of several in a row of one
    producer with the same outcome only the last one is kept: it decides the messages of all of them alike.
    """

    def __init__(self) -> None:
        self.known_to = 0
        """Everything below was learnt, as far as the reader is concerned."""
        # Of each producer: offsets of control records, times two, plus one for a commit.
        self._ends: dict[int, list[int]] = {}
        self._prune_at = _PRUNE_FROM

    def learn(self, marks: Iterable[Mark], next_offset: int) -> None:
        """What the log has up to `next_offset`; what is known already changes nothing."""
        for mark in marks:
            if mark.kind != MESSAGES and mark.first_offset >= self.known_to:
                self._add(mark.producer_id, mark.first_offset << 1 | (mark.kind == COMMIT))
        self.known_to = max(self.known_to, next_offset)

    def _add(self, producer_id: int, end: int) -> None:
        ends = self._ends.setdefault(producer_id, [])
        if ends and ends[-1] & 1 == end & 1:
            ends[-1] = end
        else:
            ends.append(end)

    def of(self, producer_id: int, offset: int) -> bool | None:
        """Whether the message of a producer at an offset is committed; None while its transaction is open.

        A reader goes forward: what was asked for an offset is not asked for one before it.
        """
        ends = self._ends.get(producer_id)
        if ends is None:
            return None
        at = bisect_right(ends, offset << 1 | 1)
        if at >= _PRUNE_FROM and 2 * at >= len(ends):
            del ends[:at]
            at = 0
        return None if at == len(ends) else bool(ends[at] & 1)

    def forget_before(self, offset: int) -> None:
        """The reader is there: what ended before is of no use to it. Costs little, however often it is called."""
        if len(self._ends) < self._prune_at:
            return
        for producer_id, ends in list(self._ends.items()):
            del ends[: bisect_left(ends, offset << 1)]
            if not ends:
                del self._ends[producer_id]
        self._prune_at = max(_PRUNE_FROM, 2 * len(self._ends))


# The open transactions of a topic, and the way out of one whose coordinator is gone.
#
# Readers need none of this: they find the outcome of a transaction in the log (`isolation.py`). This is for people:
# what holds readers up, and since which offset.
#
# Invariants
# - The topic is read once, from its start, when somebody first asks, and from there on only what was appended since. No
#   payload is kept.
# - A transaction is aborted by a control record like any other; whether it is open is looked up in the same step, under
#   one lock, so that no second one is written for it.

OpenReader = Callable[[int], "BatchReader"]


class TopicTransactions:
    """What is open in a topic, as far as it was read. Any number of threads may use it at once."""

    def __init__(self, name: str, open_reader: OpenReader, start_offset: Callable[[], int]) -> None:
        """`open_reader` reads everything from an offset to the end, uncommitted messages too."""
        self._name = name
        self._open_reader = open_reader
        self._start_offset = start_offset
        self._lock = Lock()
        self._known = Transactions()
        self._reached = 0

    def open(self) -> list[OpenTransaction]:
        """In the order of their first offsets."""
        with self._lock:
            self._read_on()
            return self._known.open

    def last_stable_offset(self) -> int:
        """Below it everything is decided."""
        with self._lock:
            start = self._read_on()
            return max(start, self._known.last_stable_offset(self._reached))

    def abort(self, producer_id: int, now_us: int, append: Callable[[bytes], int]) -> OpenTransaction:
        """Ends the open transaction of a producer; `append` returns once the control record is durable."""
        with self._lock:
            self._read_on()
            found = next((one for one in self._known.open if one.producer_id == producer_id), None)
            if found is None:
                raise self._not_open(producer_id)
            append(control_payload(Control(False, producer_id, found.epoch, 0, now_us)))
            self._read_on()
            return found

    def _not_open(self, producer_id: int) -> NotFoundError:
        others = ", ".join(str(one.producer_id) for one in self._known.open)
        hint = f"Open are those of the producers {others}" if others else "No transaction is open there"
        return NotFoundError(f"{self._name}: producer {producer_id} has no open transaction", hint=hint)

    def _read_on(self) -> int:
        """Returns where the topic starts."""
        start = self._start_offset()
        self._known.forget_open_before(start)
        reader = self._open_reader(max(start, self._reached))
        for batch in reader:
            for mark in marks_of(batch) or ():
                self._known.record(mark)
            self._reached = batch.next_offset
            self._known.forget_before(self._reached)  # nobody asks here for what was aborted
        self._reached = reader.offset
        return start
