"""Appends that wait for room in the hand-over, in order of arrival.

Invariants (every method is called under the log's mutex)
- Whoever makes room accepts the waiting appends on their behalf, so nobody has to try again and nobody overtakes.
- A request that does not fit yet holds back those behind it: a large message is not starved by small ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from tidelog.log.waiting import MakeError, Waiter, finish_all


class RoomRequest:
    """One waiting append; `offset` is set when it has been accepted."""

    __slots__ = ("offset", "payloads", "size", "waiter")

    def __init__(self, payloads: Sequence[bytes], size: int, waiter: Waiter) -> None:
        self.payloads = payloads
        self.size = size
        self.waiter = waiter
        self.offset: int | None = None


class RoomQueue:
    """Those who wait."""

    def __init__(self, fits: Callable[[int, int], bool], accept: Callable[[Sequence[bytes], int], int]) -> None:
        self._fits = fits
        self._accept = accept
        self._requests: deque[RoomRequest] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def ask(self, payloads: Sequence[bytes], size: int, waiter: Waiter) -> RoomRequest:
        request = RoomRequest(payloads, size, waiter)
        self._requests.append(request)
        return request

    def withdraw(self, request: RoomRequest) -> bool:
        """Takes a request back; False when it has been answered already."""
        if request not in self._requests:
            return False
        self._requests.remove(request)
        return True

    def grant(self) -> None:
        """Accepts as many as there is room for."""
        granted: list[Waiter] = []
        while self._requests and self._fits(len(self._requests[0].payloads), self._requests[0].size):
            request = self._requests.popleft()
            request.offset = self._accept(request.payloads, request.size)
            granted.append(request.waiter)
        finish_all(granted)

    def refuse_all(self, make_error: MakeError) -> None:
        requests, self._requests = self._requests, deque()
        finish_all([request.waiter for request in requests], make_error)
