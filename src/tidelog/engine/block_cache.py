"""Decoded blocks of row files in memory, those that were used last, up to a number of bytes.

Invariants
- What is in here was checked when it came in. A name stands for one content: files are named by theirs.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

BlockName = tuple[str, int]
_OVERHEAD_BYTES = 200


class BlockCache:
    """Threads may share it."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._blocks: OrderedDict[BlockName, bytes] = OrderedDict()
        self._bytes = 0
        self._mutex = Lock()

    @property
    def bytes_used(self) -> int:
        """What it takes just now."""
        return self._bytes

    def get(self, name: BlockName) -> bytes | None:
        """The block of a file that begins at a byte, if it is here."""
        with self._mutex:
            raw = self._blocks.get(name)
            if raw is not None:
                self._blocks.move_to_end(name)
            return raw

    def add(self, name: BlockName, raw: bytes) -> None:
        """Keeps a block; those that were not used for the longest time go."""
        with self._mutex:
            if name not in self._blocks and len(raw) + _OVERHEAD_BYTES <= self._capacity_bytes:
                self._blocks[name] = raw
                self._bytes += len(raw) + _OVERHEAD_BYTES
            while self._bytes > self._capacity_bytes:
                _, gone = self._blocks.popitem(last=False)
                self._bytes -= len(gone) + _OVERHEAD_BYTES
