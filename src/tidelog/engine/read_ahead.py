"""Noticing that somebody reads the log in order: then more than was asked for is fetched, and early.

Invariants
- A read that stands alone fetches exactly what it wants.
- Who goes on right behind the last read, three times in a row, gets larger and larger stretches, up to 4 MiB.
"""

from __future__ import annotations

from collections import deque
from threading import Lock

_STREAMS = 8
_MAX_GAP_BYTES = 256 << 10
_READS_IN_A_ROW = 3
_FIRST_BYTES = 256 << 10
MAX_BYTES = 4 << 20


class _Stream:
    """Somebody who reads forwards."""

    def __init__(self, end: int) -> None:
        self.end = end
        self.reads = 1
        self.fetched_end = end


class ReadAhead:
    """Remembers the last readers by where they are. Threads may share it."""

    def __init__(self) -> None:
        self._streams: deque[_Stream] = deque(maxlen=_STREAMS)
        self._mutex = Lock()

    def noticed(self, position: int, length: int) -> int:
        """Somebody reads there. How many bytes are worth fetching from there on: 0 when only what is wanted."""
        with self._mutex:
            stream = self._stream_at(position)
            if stream is None:
                self._streams.append(_Stream(position + length))
                return 0
            stream.reads += 1
            stream.end = position + length
            beyond = stream.reads - _READS_IN_A_ROW
            return 0 if beyond < 0 else min(MAX_BYTES, _FIRST_BYTES << min(beyond, 4))

    def wants_next(self, position: int, window_bytes: int) -> int | None:
        """Where to fetch ahead for the reader that is here: behind what is fetched, once half of it is used up."""
        with self._mutex:
            stream = next((one for one in self._streams if one.end == position), None)
            if stream is None or stream.fetched_end - position > window_bytes // 2 or stream.fetched_end < position:
                return None
            return stream.fetched_end

    def fetched(self, end: int, up_to: int) -> None:
        """What the reader that is at `end` will find fetched."""
        with self._mutex:
            for stream in self._streams:
                if stream.end == end:
                    stream.fetched_end = max(stream.fetched_end, up_to)

    def _stream_at(self, position: int) -> _Stream | None:
        return next((one for one in self._streams if 0 <= position - one.end <= _MAX_GAP_BYTES), None)
