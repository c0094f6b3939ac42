"""The ready queue of subscription kinds without keys, and the set of settled offsets. Pure.

Messages are delivered in order of offsets, redelivered ones included. A redelivered message is usually older than those
never delivered, but a delayed message becomes ready in the middle of those that were read with it.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from heapq import heappop, heappush
from operator import attrgetter

from tidelog.topics.message import Message

NO_LIMIT = 1 << 64


class Delivery(Message, frozen=True, gc=False):
    """A message that was delivered, for the `delivery_count`-th time."""

    delivery_count: int = 1


class OpenQueue:
    """Ready messages that any consumer may get."""

    def __init__(self) -> None:
        self._fresh: deque[Delivery] = deque()
        self._back: list[tuple[int, Delivery]] = []
        self._gone: set[int] = set()
        # Of those in `_back`, the ones that were delayed and never delivered.
        self._back_unseen: set[int] = set()

    def __len__(self) -> int:
        """Settled ones that were not passed over yet are counted: it may be more than there is."""
        return len(self._fresh) + len(self._back)

    @property
    def head_offset(self) -> int:
        """The offset of the next one; NO_LIMIT if the queue is empty."""
        back_offset = self._back[0][0] if self._back else NO_LIMIT
        return min(back_offset, self.unseen_from)

    def add(self, messages: Iterable[Delivery]) -> None:
        """Adds messages that were never delivered, in order."""
        self._fresh.extend(messages)

    def put_back(self, message: Delivery) -> None:
        """Adds a message that was delivered before, or was delayed."""
        heappush(self._back, (message.offset, message))
        if message.delivery_count == 1:
            self._back_unseen.add(message.offset)

    def discard(self, offset: int) -> None:
        """It was settled while it was in here."""
        self._gone.add(offset)

    @property
    def unseen_from(self) -> int:
        """Of what was read, nothing from this offset on was delivered; NO_LIMIT if everything was."""
        return self._fresh[0].offset if self._fresh else NO_LIMIT

    def is_unseen(self, offset: int) -> bool:
        """Whether a message that was read, and is not settled, was never delivered."""
        return offset >= self.unseen_from or offset in self._back_unseen

    def discard_below(self, offset: int) -> list[int]:
        """Removes settled messages below an offset; those never delivered stay, and are returned."""
        unseen: list[Delivery] = []
        while self.head_offset < offset:
            message = self._pop()
            if message.offset in self._gone:
                self._gone.discard(message.offset)
            elif message.delivery_count == 1:
                unseen.append(message)
        for message in unseen:
            self.put_back(message)
        return [message.offset for message in unseen]

    def take(self, consumer: str, limit: int, below: int = NO_LIMIT) -> list[Delivery]:
        """Up to `limit` messages with offsets below a mark."""
        if not self._back and not self._gone and below == NO_LIMIT:
            fresh = self._fresh
            return [fresh.popleft() for _ in range(min(limit, len(fresh)))]
        taken: list[Delivery] = []
        while len(taken) < limit and self.head_offset < below:
            message = self._pop()
            if message.offset in self._gone:
                self._gone.discard(message.offset)
            else:
                taken.append(message)
        return taken

    def take_fresh(self) -> Delivery | None:
        """The next one, when nothing has to go before it and nothing was settled in here."""
        return self._fresh.popleft() if self._fresh and not self._back and not self._gone else None

    def _pop(self) -> Delivery:
        if not self._back or self._back[0][0] > self.unseen_from:
            return self._fresh.popleft()
        offset, message = heappop(self._back)
        self._back_unseen.discard(offset)
        return message

    # What only queues with keys need to know

    def set_consumers(self, consumers: Sequence[str]) -> None:
        """All are alike here."""

    def released(self, message: Delivery) -> None:
        """It is with its consumer no longer."""

    def hold(self, message: Delivery) -> None:
        """It will come back, and others may go before it."""

    def unhold(self, message: Delivery) -> None:
        """It will come back now, or never."""


# The position of a subscription: which offsets are settled. Pure.
#
#     settled   settled   open   settled  open   settled          open ...
#     0 ------------------ 10     11 --- 13       14 ---- 20
#                          ^ floor [11, 13)        [14, 20)  ranges
#
# Invariants
# - Everything below `floor` is settled; `floor` itself never is.
# - Ranges are sorted and disjoint: between two of them, and between `floor` and the first, at least one offset is open.
# - Settling in order costs one step; out of order it costs a search among the ranges, of which there are as many as
#   holes.


Range = tuple[int, int]


class Progress:
    """Settled offsets. `ranges` are (start, stop), stop exclusive, and lie above `floor`."""

    __slots__ = ("_starts", "_stops", "floor")

    def __init__(self, floor: int, ranges: Iterable[Range] = ()) -> None:
        self.floor = floor
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in ranges:
            self.settle_range(start, stop)

    @property
    def ranges(self) -> list[Range]:
        return list(zip(self._starts, self._stops, strict=True))

    @property
    def range_count(self) -> int:
        return len(self._starts)

    @property
    def end(self) -> int:
        """Nothing at or above it is settled."""
        return self._stops[-1] if self._stops else self.floor

    @property
    def settled_above(self) -> int:
        """How many offsets above the floor are settled."""
        return sum(self._stops) - sum(self._starts)

    def is_settled(self, offset: int) -> bool:
        if offset < self.floor:
            return True
        index = bisect_right(self._starts, offset)
        return index > 0 and offset < self._stops[index - 1]

    def settle(self, offset: int) -> bool:
        """False when it was settled before."""
        if offset == self.floor:
            self.floor = offset + 1
            if self._starts and self._starts[0] == self.floor:
                del self._starts[0]
                self.floor = self._stops.pop(0)
            return True
        if self.is_settled(offset):
            return False
        self.settle_range(offset, offset + 1)
        return True

    def settle_range(self, start: int, stop: int) -> None:
        """Settles `start` up to `stop` (exclusive); some of it may be settled already."""
        start = max(start, self.floor)
        if start >= stop:
            return
        if start > self.floor:
            self._insert(start, stop)
            return
        self.floor = stop
        passed = bisect_right(self._starts, stop)
        if passed:
            self.floor = max(stop, self._stops[passed - 1])
            del self._starts[:passed], self._stops[:passed]

    def _insert(self, start: int, stop: int) -> None:
        """Joins it with every range that it touches."""
        first = bisect_right(self._starts, start)
        if first and self._stops[first - 1] >= start:
            first -= 1
        last = bisect_right(self._starts, stop)
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    def clipped(self, limit: int) -> Progress:
        """The same, as if nothing at or above `limit` had been settled."""
        below = [(start, min(stop, limit)) for start, stop in self.ranges if start < limit]
        return Progress(min(self.floor, limit), below)


# Key-shared delivery: the messages of a key go to one consumer, in order, while consumers join and leave. Pure.
#
# Invariants
# - A message of a key is delivered only if every earlier unsettled message of that key is with the same consumer. So a
#   key moves to another consumer only when the old one has none of its messages left, and waits for a message that is
#   to be redelivered.
# - The consumer of a free key depends on the names of the consumers alone (consistent hashing): a consumer that joins
#   takes keys from all others, one that leaves gives its keys to all others, and no other key moves.
# - Messages without a key are unordered; the first consumer to ask gets them.


# More points spread keys more evenly: with 64 the largest share is about a fifth over the mean.
_POINTS_PER_CONSUMER = 64
_offset = attrgetter("offset")


class HashRing:
    """Who owns which key."""

    def __init__(self, consumers: Iterable[str]) -> None:
        points = sorted(
            (_hash(f"{consumer}#{number}".encode()), consumer)
            for consumer in consumers
            for number in range(_POINTS_PER_CONSUMER)
        )
        self._hashes = [point for point, _ in points]
        self._owners = [consumer for _, consumer in points]

    def owner(self, key: bytes) -> str | None:
        """The consumer of a key; None when there are no consumers."""
        if not self._owners:
            return None
        return self._owners[bisect_right(self._hashes, _hash(key)) % len(self._owners)]


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")


class _Line:
    """The messages of one key: those ready, how many are with whom, and which are to come back."""

    __slots__ = ("held", "holder", "owner", "ready", "with_holder")

    def __init__(self, owner: str | None) -> None:
        self.owner = owner
        self.holder: str | None = None
        self.with_holder = 0
        self.held: set[int] = set()
        self.ready: list[Delivery] = []

    @property
    def consumer(self) -> str | None:
        return self.holder if self.with_holder else self.owner

    @property
    def is_idle(self) -> bool:
        return not (self.ready or self.held or self.with_holder)


class KeyQueues:
    """Ready messages by key. It has the methods of an `OpenQueue`."""

    def __init__(self) -> None:
        self._ring = HashRing(())
        self._lines: dict[bytes, _Line] = {}
        # By consumer: (offset, key) of lines whose first message may be its. Entries are checked when they are used:
        # each change of the first message of a line, or of its consumer, announces the line again.
        self._announced: dict[str, list[tuple[int, bytes]]] = {}
        self._keyless = OpenQueue()
        self._gone: set[int] = set()
        self._unseen: set[int] = set()
        self._ready = 0

    def __len__(self) -> int:
        return self._ready + len(self._keyless)

    # Coming in

    def add(self, messages: Iterable[Delivery]) -> None:
        """Adds messages that were never delivered, in order."""
        for message in messages:
            self.put_back(message)

    def put_back(self, message: Delivery) -> None:
        if message.delivery_count == 1:
            self._unseen.add(message.offset)
        if message.key is None:
            self._keyless.put_back(message)
            return
        line = self._line(message.key)
        insort(line.ready, message, key=_offset)
        self._ready += 1
        if line.ready[0] is message:
            self._announce(message.key, line)

    def hold(self, message: Delivery) -> None:
        """It will come back: later ones of its key wait for it."""
        if message.key is not None:
            self._line(message.key).held.add(message.offset)

    def unhold(self, message: Delivery) -> None:
        """It comes back now, or never."""
        if message.key is not None:
            line = self._line(message.key)
            line.held.discard(message.offset)
            self._changed(message.key, line)

    def released(self, message: Delivery) -> None:
        """Its consumer no longer has it: it is settled, or will be redelivered."""
        if message.key is not None:
            line = self._lines[message.key]
            line.with_holder -= 1
            self._changed(message.key, line)

    def discard(self, offset: int) -> None:
        """It was settled while it was in here."""
        self._gone.add(offset)
        self._unseen.discard(offset)

    def is_unseen(self, offset: int) -> bool:
        """Whether a message that was read, and is not settled, was never delivered."""
        return offset in self._unseen

    @property
    def unseen_from(self) -> int:
        raise AssertionError("key_shared messages must be acknowledged one by one")

    def discard_below(self, offset: int) -> list[int]:
        raise AssertionError("key_shared messages must be acknowledged one by one")

    # Going out

    def take(self, consumer: str, limit: int, below: int = NO_LIMIT) -> list[Delivery]:
        taken = self._take(consumer, limit)
        if self._unseen:
            self._unseen.difference_update(message.offset for message in taken)
        return taken

    def _take(self, consumer: str, limit: int) -> list[Delivery]:
        announced = self._announced.get(consumer)
        taken: list[Delivery] = []
        while announced and len(taken) < limit:
            if self._keyless.head_offset < announced[0][0]:
                taken += self._take_keyless(consumer, 1)
                continue
            offset, key = heappop(announced)
            line = self._lines.get(key)
            if line is not None and self._is_next(line, offset, consumer):
                message = self._take_first(consumer, key, line)
                if message is not None:
                    taken.append(message)
        return taken + self._take_keyless(consumer, limit - len(taken))

    def take_fresh(self) -> Delivery | None:
        """Keys always take the long way."""
        return None

    def _is_next(self, line: _Line, offset: int, consumer: str) -> bool:
        if not line.ready or line.ready[0].offset != offset or line.consumer != consumer:
            return False
        return not line.held or min(line.held) > offset

    def _take_first(self, consumer: str, key: bytes, line: _Line) -> Delivery | None:
        message = line.ready.pop(0)
        self._ready -= 1
        is_gone = message.offset in self._gone
        if is_gone:
            self._gone.discard(message.offset)
        else:
            line.holder = consumer
            line.with_holder += 1
        self._changed(key, line)
        return None if is_gone else message

    def _take_keyless(self, consumer: str, limit: int) -> list[Delivery]:
        taken: list[Delivery] = []
        while len(taken) < limit and len(self._keyless):
            for message in self._keyless.take(consumer, limit - len(taken)):
                if message.offset in self._gone:
                    self._gone.discard(message.offset)
                else:
                    taken.append(message)
        return taken

    # Who owns what

    def set_consumers(self, consumers: Sequence[str]) -> None:
        """Free keys get their new owners at once, the others when they are free."""
        self._ring = HashRing(consumers)
        self._announced = {consumer: [] for consumer in consumers}
        for key, line in self._lines.items():
            line.owner = self._ring.owner(key)
            self._announce(key, line)

    def _line(self, key: bytes) -> _Line:
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line(self._ring.owner(key))
        return line

    def _changed(self, key: bytes, line: _Line) -> None:
        if line.is_idle:
            del self._lines[key]
        else:
            self._announce(key, line)

    def _announce(self, key: bytes, line: _Line) -> None:
        if line.ready and line.consumer is not None:
            heappush(self._announced[line.consumer], (line.ready[0].offset, key))
