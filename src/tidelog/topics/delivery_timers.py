"""Messages that wait for a time: rejected ones for their pause, delayed ones for `deliver_at`. Pure."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import NamedTuple

from tidelog.topics.delivery_queue import Delivery

_SPARE_ENTRIES = 64


class Now(NamedTuple):
    """One moment by both clocks. Pauses are measured by `steady_us`, which never jumps; only the times that messages
    carry are compared with `wall_us`, which people and machines set."""

    wall_us: int
    steady_us: int


class Waiting(NamedTuple):
    """A message, and when its time comes by the clock of its room."""

    due_us: int
    message: Delivery


class WaitingRoom:
    """Each offset waits once. What left early is found out when its time comes, or when there is too much of it."""

    def __init__(self) -> None:
        self._by_offset: dict[int, Waiting] = {}
        self._heap: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._by_offset)

    def __contains__(self, offset: int) -> bool:
        return offset in self._by_offset

    def add(self, message: Delivery, due_us: int) -> None:
        self._by_offset[message.offset] = Waiting(due_us, message)
        heappush(self._heap, (due_us, message.offset))

    def remove(self, offset: int) -> Waiting | None:
        found = self._by_offset.pop(offset, None)
        if found is not None and len(self._heap) > 2 * len(self._by_offset) + _SPARE_ENTRIES:
            self._heap = [(waiting.due_us, waited) for waited, waiting in self._by_offset.items()]
            heapify(self._heap)
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
                del self._by_offset[offset]
                due.append(found)
        return due
