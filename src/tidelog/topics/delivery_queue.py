"""What is ready to be handed out, for kinds without keys. Pure.

Messages go out in order of offsets, those that came back among them. What came back is mostly older than what was never
handed out, but a delayed message becomes ready in the middle of what was read with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from tidelog.topics.message import Message

NO_LIMIT = 1 << 64


class Delivery(Message, frozen=True, gc=False):
    """A message that was handed out, for the `delivery_count`-th time."""

    delivery_count: int = 1


class OpenQueue:
    """Ready messages that any consumer may get."""

    def __init__(self) -> None:
        self._fresh: deque[Delivery] = deque()
        self._back: list[tuple[int, Delivery]] = []
        self._gone: set[int] = set()
        # Of those in `_back`, the ones that were delayed and never handed out.
        self._back_unseen: set[int] = set()

    def __len__(self) -> int:
        """Settled ones that were not passed over yet are counted: it may be more than there is."""
        return len(self._fresh) + len(self._back)

    @property
    def head_offset(self) -> int:
        """The offset of the one that comes next; NO_LIMIT when there is none."""
        back_offset = self._back[0][0] if self._back else NO_LIMIT
        return min(back_offset, self.unseen_from)

    def add(self, messages: Iterable[Delivery]) -> None:
        """Messages that were never handed out, in order."""
        self._fresh.extend(messages)

    def put_back(self, message: Delivery) -> None:
        """One that was handed out before, or was delayed."""
        heappush(self._back, (message.offset, message))
        if message.delivery_count == 1:
            self._back_unseen.add(message.offset)

    def discard(self, offset: int) -> None:
        """It was settled while it was in here."""
        self._gone.add(offset)

    @property
    def unseen_from(self) -> int:
        """Nothing of what was read from this offset on was handed out; NO_LIMIT when all was."""
        return self._fresh[0].offset if self._fresh else NO_LIMIT

    def is_unseen(self, offset: int) -> bool:
        """Whether one that was read, and is not settled, was never handed out."""
        return offset >= self.unseen_from or offset in self._back_unseen

    def discard_below(self, offset: int) -> list[int]:
        """Those below were settled, except the ones that nobody has seen yet: these stay, and are returned."""
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
        """Up to so many messages with offsets below a mark."""
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
