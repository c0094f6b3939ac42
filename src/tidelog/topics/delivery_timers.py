"""Messages that wait for a time: rejected ones for their pause, delayed ones for `deliver_at`. Pure."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

from tidelog.topics.delivery_queue import Delivery


class Waiting(NamedTuple):
    """`is_new`: it was never handed out, and others of its key may go before it."""

    due_us: int
    message: Delivery
    is_new: bool


class WaitingRoom:
    """Each offset waits once. What left early is found out when its time comes."""

    def __init__(self) -> None:
        self._by_offset: dict[int, Waiting] = {}
        self._heap: list[tuple[int, int]] = []
        self.new_count = 0

    def __len__(self) -> int:
        return len(self._by_offset)

    def add(self, message: Delivery, due_us: int, *, is_new: bool = False) -> None:
        self._by_offset[message.offset] = Waiting(due_us, message, is_new)
        self.new_count += is_new
        heappush(self._heap, (due_us, message.offset))

    def remove(self, offset: int) -> Waiting | None:
        found = self._by_offset.pop(offset, None)
        if found is not None:
            self.new_count -= found.is_new
        return found

    def offsets_below(self, offset: int) -> list[int]:
        return [waiting for waiting in self._by_offset if waiting < offset]

    @property
    def next_due_us(self) -> int | None:
        """Not later than the first one's time."""
        return self._heap[0][0] if self._heap else None

    def take_due(self, now_us: int) -> list[Waiting]:
        """Those whose time has come."""
        due = []
        while self._heap and self._heap[0][0] <= now_us:
            due_us, offset = heappop(self._heap)
            found = self._by_offset.get(offset)
            if found is not None and found.due_us == due_us:
                self.remove(offset)
                due.append(found)
        return due
