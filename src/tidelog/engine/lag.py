"""How long the oldest entry has been waiting that is not in the store yet."""

from __future__ import annotations

from tidelog.clock import Clock
from tidelog.engine.operation_record import TIME_BYTE
from tidelog.engine.record_header import OPERATION
from tidelog.engine.wal import Wal
from tidelog.errors import TidelogError
from tidelog.log.frame import Frames

# Between two entries there are a few records at most that are none.
_LOOKED_AT = 256


class Lag:
    """Remembers the time of that entry: it is looked for once for each place that was shipped up to."""

    def __init__(self, wal: Wal, clock: Clock) -> None:
        self._wal = wal
        self._clock = clock
        self._known: tuple[int, int] | None = None

    def seconds(self, shipped_lsn: int) -> float:
        """0 when no entry waits."""
        known = self._known
        if known is None or known[0] != shipped_lsn:
            time_us = self._time_from(shipped_lsn)
            if time_us is None:
                return 0.0
            known = self._known = shipped_lsn, time_us
        return max(0, self._clock.now_us() - known[1]) / 1_000_000

    def _time_from(self, lsn: int) -> int | None:
        first = max(lsn, self._wal.first_lsn)
        stop = min(first + _LOOKED_AT, self._wal.log.durable_offset)
        try:
            for frames in self._wal.batches(first, stop):
                if (found := _first_time(frames)) is not None:
                    return found
        except TidelogError:
            return None
        return None


def _first_time(frames: Frames) -> int | None:
    lengths = memoryview(frames.lengths).cast("I")
    for index, at in enumerate(memoryview(frames.positions).cast("Q")):
        if frames.buffer[at] == OPERATION and lengths[index] >= TIME_BYTE + 8:
            return int.from_bytes(frames.buffer[at + TIME_BYTE : at + TIME_BYTE + 8], "little")
    return None
