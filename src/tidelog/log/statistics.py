"""What a log counted, as an immutable snapshot; only the service knows how to export it."""

from __future__ import annotations

import msgspec


class Histogram(msgspec.Struct, frozen=True):
    """Durations in powers of two of a microsecond: `counts[i]` took less than 2**i us and not less than half of it."""

    counts: tuple[int, ...]
    total_seconds: float
    max_seconds: float

    @property
    def count(self) -> int:
        return sum(self.counts)


class Stopwatch:
    """Gathers durations; one thread adds, any thread may take a snapshot."""

    _BUCKETS = 32

    def __init__(self) -> None:
        self._counts = [0] * self._BUCKETS
        self._total_seconds = 0.0
        self._max_seconds = 0.0

    def add(self, seconds: float) -> None:
        bucket = min(int(seconds * 1_000_000).bit_length(), self._BUCKETS - 1)
        self._counts[bucket] += 1
        self._total_seconds += seconds
        self._max_seconds = max(self._max_seconds, seconds)

    def snapshot(self) -> Histogram:
        return Histogram(tuple(self._counts), self._total_seconds, self._max_seconds)


class TornTail(msgspec.Struct, frozen=True, kw_only=True):
    """What was cut off the end of the last file: `size` bytes from `byte` on, for `reason`."""

    file: str
    byte: int
    size: int
    reason: str


class RecoveryReport(msgspec.Struct, frozen=True, kw_only=True):
    """What opening found. `missing_synced` are the first and last offset that the checkpoint says were synced and that
    the files no longer have; None when nothing is missing. `unfinished` are the first and last offset of a batch whose
    end was missing, so that none of it counts; None when there was none."""

    checkpoint_used: bool
    checkpoint_problem: str | None
    files: int
    checked_bytes: int
    seconds: float
    torn_tail: TornTail | None
    missing_synced: tuple[int, int] | None
    unfinished: tuple[int, int] | None = None


class LogStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of a log. Offsets are exclusive ends, as everywhere.

    `append_wait_seconds` has the appends that waited for room or for the disk, and those of several messages.
    """

    state: str
    start_offset: int
    next_offset: int
    written_offset: int
    durable_offset: int
    files: int
    file_bytes: int
    cached_messages: int
    cached_bytes: int
    handover_messages: int
    handover_bytes: int
    writes: int
    written_bytes: int
    rotations: int
    checkpoint_failures: int
    full_disk_waits: int
    append_wait_seconds: Histogram
    write_seconds: Histogram
    sync_seconds: Histogram
    recovery: RecoveryReport
