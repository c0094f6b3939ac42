"""What a shipper counted, as an immutable snapshot."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec

from tidelog.errors import TidelogError
from tidelog.log.statistics import Histogram, Stopwatch
from tidelog.tier.descriptor import Descriptor


class ShipperStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of a shipper. Lag is what a lost disk would cost: in messages, bytes of files, and seconds."""

    shipped_offset: int
    lag_messages: int
    lag_bytes: int
    lag_seconds: float
    oldest_unshipped_us: int | None
    cycles: int
    cycle_seconds: Histogram
    objects_created: int
    bytes_uploaded: int
    raw_bytes_uploaded: int
    errors: int
    errors_in_a_row: int
    last_error: str | None
    last_object_id: str | None
    uploading: str | None
    uploading_raw_bytes: int


class ShipperCounters:
    """Counts for one shipper; any thread may take a snapshot."""

    def __init__(self) -> None:
        self.cycle_seconds = Stopwatch()
        self._objects_created = 0
        self._bytes_uploaded = 0
        self._raw_bytes_uploaded = 0
        self._errors = 0
        self._errors_in_a_row = 0
        self._last_error: str | None = None
        self._last_object_id: str | None = None
        self._uploading: dict[str, int] = {}

    @contextlib.contextmanager
    def uploading(self, object_id: str, raw_bytes: int) -> Iterator[None]:
        """While an object is on its way. Several may be."""
        self._uploading[object_id] = raw_bytes
        try:
            yield
        finally:
            self._uploading.pop(object_id, None)

    def uploaded(self, size: int, raw_bytes: int) -> None:
        self._bytes_uploaded += size
        self._raw_bytes_uploaded += raw_bytes

    def published(self, descriptor: Descriptor) -> None:
        self._objects_created += 1
        self._last_object_id = descriptor.object_id

    def failed(self, error: TidelogError) -> None:
        self._errors += 1
        self._errors_in_a_row += 1
        self._last_error = str(error)

    def succeeded(self) -> None:
        self._errors_in_a_row = 0
        self._last_error = None

    def snapshot(
        self,
        *,
        shipped_offset: int,
        lag_messages: int,
        lag_bytes: int,
        oldest_unshipped_us: int | None,
        now_us: int,
    ) -> ShipperStatistics:
        """Everything, with where the shipper stands now."""
        cycles = self.cycle_seconds.snapshot()
        uploading = dict(self._uploading)
        age_us = 0 if oldest_unshipped_us is None else max(0, now_us - oldest_unshipped_us)
        return ShipperStatistics(
            shipped_offset=shipped_offset,
            lag_messages=lag_messages,
            lag_bytes=lag_bytes,
            lag_seconds=age_us / 1_000_000,
            oldest_unshipped_us=oldest_unshipped_us,
            cycles=cycles.count,
            cycle_seconds=cycles,
            objects_created=self._objects_created,
            bytes_uploaded=self._bytes_uploaded,
            raw_bytes_uploaded=self._raw_bytes_uploaded,
            errors=self._errors,
            errors_in_a_row=self._errors_in_a_row,
            last_error=self._last_error,
            last_object_id=self._last_object_id,
            uploading=next(iter(uploading), None),
            uploading_raw_bytes=sum(uploading.values()),
        )
