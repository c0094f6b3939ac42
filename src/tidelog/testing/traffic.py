"""What went to a store and back: for tests that prove how little is asked and read."""

from __future__ import annotations

import threading
from collections import Counter
from typing import NamedTuple


class Traffic(NamedTuple):
    """A snapshot. `requests` are counted by operation, failed ones included; bytes are those of contents."""

    requests: dict[str, int]
    bytes_read: int
    bytes_written: int

    @property
    def request_count(self) -> int:
        """All of them together."""
        return sum(self.requests.values())


class Meter:
    """Counts from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """From here on again."""
        with self._lock:
            self._requests: Counter[str] = Counter()
            self._bytes_read = 0
            self._bytes_written = 0

    def request(self, operation: str, *, bytes_written: int = 0) -> None:
        """One more."""
        with self._lock:
            self._requests[operation] += 1
            self._bytes_written += bytes_written

    def answered(self, bytes_read: int) -> None:
        """What came back."""
        with self._lock:
            self._bytes_read += bytes_read

    def snapshot(self) -> Traffic:
        """What was counted so far."""
        with self._lock:
            return Traffic(dict(self._requests), self._bytes_read, self._bytes_written)
