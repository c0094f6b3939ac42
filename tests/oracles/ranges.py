"""The oracle of what reads ranges of a file."""

from __future__ import annotations

import os
from array import array


def read_ranges(descriptor: int, position: int, ranges: bytes, /) -> bytes:
    """The bytes of the ranges, one after the other, with zeros for those that the file does not have."""
    numbers = array("Q", ranges)
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return b"".join(os.pread(descriptor, size, position + byte).ljust(size, b"\0") for byte, size in pairs)
