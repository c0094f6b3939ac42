"""`tidelog` with a wall clock that a campaign moves: `python node.py FILE ARGUMENTS...`.

FILE has the number of microseconds by which the clock is off, in eight bytes. Only wall time is moved: the kernel's
monotonic clock does not jump on a real machine either.
"""

from __future__ import annotations

import io
import mmap
import struct
import sys
import time
from pathlib import Path
from typing import TextIO

from tidelog.cli.main import main
from tidelog.clock import SystemClock

OFFSET = struct.Struct("<q")


def shift_clock(path: Path) -> None:
    """From now on every clock of this process is off by what the file says."""
    with path.open("rb") as file:
        shared = mmap.mmap(file.fileno(), OFFSET.size, access=mmap.ACCESS_READ)

    def now_us(self: SystemClock) -> int:
        offset_us: int = OFFSET.unpack(shared[: OFFSET.size])[0]
        return time.time_ns() // 1000 + offset_us

    SystemClock.now_us = now_us  # type: ignore[method-assign]


class Stamped(io.TextIOBase):
    """Says the true time before every line: a log is read beside the history."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_new = True

    def write(self, text: str) -> int:
        for line in text.splitlines(keepends=True):
            stamp = f"{time.time():.3f} " if self._is_new else ""
            self._stream.write(stamp + line)
            self._is_new = line.endswith("\n")
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return False


if __name__ == "__main__":
    sys.stderr = Stamped(sys.stderr)
    shift_clock(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
