"""Messages of one key to one consumer, in order, while consumers come and go. Pure.

Invariants
- A message of a key is handed out only when every earlier open one of that key is with the same consumer. So a key
  moves to another consumer only when nothing of it is left at the old one, and waits behind one that is to come back.
- Which consumer a free key belongs to depends on the names of the consumers alone (consistent hashing): one that joins
  takes keys from all, one that leaves gives its keys to all, and no other key moves.
- Messages without a key have no order; whoever asks first gets them.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from heapq import heappop, heappush
from operator import attrgetter

from tidelog.topics.delivery_queue import NO_LIMIT, Delivery, OpenQueue

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
        """Who may have the next one."""
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
        # whatever changes the first message of a line or its consumer announces the line again.
        self._announced: dict[str, list[tuple[int, bytes]]] = {}
        self._keyless = OpenQueue()
        self._gone: set[int] = set()
        self._unseen: set[int] = set()
        self._ready = 0

    def __len__(self) -> int:
        return self._ready + len(self._keyless)

    # Coming in

    def add(self, messages: Iterable[Delivery]) -> None:
        """Messages that were never handed out, in order."""
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
        """It is with its consumer no longer: settled, or on its way back."""
        if message.key is not None:
            line = self._lines[message.key]
            line.with_holder -= 1
            self._changed(message.key, line)

    def discard(self, offset: int) -> None:
        """It was settled while it was in here."""
        self._gone.add(offset)
        self._unseen.discard(offset)

    def is_unseen(self, offset: int) -> bool:
        """Whether one that was read, and is not settled, was never handed out."""
        return offset in self._unseen

    @property
    def unseen_from(self) -> int:
        raise AssertionError("messages of keys are acknowledged one by one")

    def discard_below(self, offset: int) -> list[int]:
        raise AssertionError("messages of keys are acknowledged one by one")

    # Going out

    def take(self, consumer: str, limit: int, below: int = NO_LIMIT) -> list[Delivery]:
        """Up to so many messages that this consumer may have."""
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
