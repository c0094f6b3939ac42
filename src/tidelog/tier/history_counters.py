"""What reading history cost, gathered over all readers and shown as an immutable snapshot."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import msgspec

from tidelog.log.statistics import Histogram, Stopwatch


class HistoryStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of reading history. `requests` are ranges of objects that were asked for, failed ones included."""

    requests: int
    failed_requests: int
    fetched_bytes: int
    repeated_ranges: int
    objects_opened: int
    skipped_messages: int
    request_seconds: Histogram
    query_seconds: Histogram


class HistoryCounters:
    """Shared by readers and by the threads that fetch for them."""

    def __init__(self) -> None:
        self._guard = Lock()
        self._requests = 0
        self._failed_requests = 0
        self._fetched_bytes = 0
        self._repeated_ranges = 0
        self._objects_opened = 0
        self._skipped_messages = 0
        self._request_seconds = Stopwatch()
        self._query_seconds = Stopwatch()

    def fetched(self, size: int, seconds: float) -> None:
        """A range has come."""
        with self._guard:
            self._requests += 1
            self._fetched_bytes += size
            self._request_seconds.add(seconds)

    def failed(self) -> None:
        """A range was asked for and did not come."""
        with self._guard:
            self._requests += 1
            self._failed_requests += 1

    def repeated(self) -> None:
        """A range was not what it must be, and is fetched once more."""
        with self._guard:
            self._repeated_ranges += 1

    def opened(self) -> None:
        """A reader has come to another object."""
        with self._guard:
            self._objects_opened += 1

    def skipped(self, count: int) -> None:
        """Messages that are missing were passed over."""
        with self._guard:
            self._skipped_messages += count

    @contextmanager
    def query(self) -> Iterator[None]:
        """Around a question to the catalog."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            with self._guard:
                self._query_seconds.add(time.perf_counter() - begin)

    def snapshot(self) -> HistoryStatistics:
        """What was counted so far."""
        with self._guard:
            return HistoryStatistics(
                requests=self._requests,
                failed_requests=self._failed_requests,
                fetched_bytes=self._fetched_bytes,
                repeated_ranges=self._repeated_ranges,
                objects_opened=self._objects_opened,
                skipped_messages=self._skipped_messages,
                request_seconds=self._request_seconds.snapshot(),
                query_seconds=self._query_seconds.snapshot(),
            )
