"""How long the oldest entry has been waiting that may be shipped and is not in the store yet.

An entry above the low-water mark waits for the orchestrator and its replicas, not for the store: it is no lag, however
long that takes.
"""

from __future__ import annotations

from tidelog.clock import Clock
from tidelog.engine.operation_record import TIME_BYTE
from tidelog.engine.record_header import OPERATION
from tidelog.engine.wal import Wal
from tidelog.errors import TidelogError
from tidelog.log.frame import Frames

LOOKED_AT = 256
"""Records that are looked at: between two entries there are a few at most that are none, or were rolled back."""
_SEQ_BYTE = 8


class Lag:
    """Remembers the time of that entry: it is looked for once for each place that was shipped up to."""

    def __init__(self, wal: Wal, clock: Clock) -> None:
        self._wal = wal
        self._clock = clock
        self._known: tuple[int, int] | None = None

    def seconds(self, shipped_lsn: int, low_water_mark: int) -> float:
        """0 when no entry waits for the store."""
        known = self._known
        if known is None or known[0] != shipped_lsn:
            time_us = self._time_from(shipped_lsn, low_water_mark)
            if time_us is None:
                return 0.0
            known = self._known = shipped_lsn, time_us
        return max(0, self._clock.now_us() - known[1]) / 1_000_000

    def _time_from(self, lsn: int, low_water_mark: int) -> int | None:
        first = max(lsn, self._wal.first_lsn)
        stop = min(first + LOOKED_AT, self._wal.log.durable_offset)
        try:
            for frames in self._wal.batches(first, stop):
                if (found := first_time(frames, low_water_mark)) is not None:
                    return found
        except TidelogError:
            return None
        return None


def first_time(frames: Frames, low_water_mark: int) -> int | None:
    """When the first entry in these frames was applied that is not above the low-water mark; None without such."""
    lengths = memoryview(frames.lengths).cast("I")
    for index, at in enumerate(memoryview(frames.positions).cast("Q")):
        if frames.buffer[at] == OPERATION and lengths[index] >= TIME_BYTE + 8:
            seq, time_us = (_number(frames, at + byte) for byte in (_SEQ_BYTE, TIME_BYTE))
            if seq <= low_water_mark:
                return time_us
    return None


def _number(frames: Frames, at: int) -> int:
    return int.from_bytes(frames.buffer[at : at + 8], "little")
