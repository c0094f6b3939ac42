"""A part of an engine's objects for one task: a range of keys, and where their rows and bodies are.

Plain data, made by the driver and sent to a worker.

Invariants
- A range ends between two names, never between versions of one: a task sees all versions of what it has.
- Rows come from blocks of a state, or of the row files that it or a compaction consists of, and from `tail`, what the
  log behind it changed: that wins.
"""

from __future__ import annotations

import msgspec

from tidelog.engine.store_checkpoint import BlockPlace
from tidelog.pipeline.engines.store_place import EnginePlace


class RowBlocks(msgspec.Struct, frozen=True):
    """Blocks of rows in one object, side by side. Those of a version index have places behind their cells."""

    key: str
    has_places: bool
    blocks: tuple[BlockPlace, ...]

    def between(self, start: bytes, stop: bytes) -> RowBlocks:
        """Those that may have rows of a range of keys."""
        found = tuple(one for one in self.blocks if one.last_key >= start and one.first_key < stop)
        return RowBlocks(self.key, self.has_places, found)


class ObjectPart(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of the tree from `start` up to `stop` (exclusive), as of `seq`.

    `created` has the creation (seq, order) of every bucket that is there at the seq; `tail` are blocks of rows.
    """

    place: EnginePlace
    seq: int
    start: bytes
    stop: bytes
    all_versions: bool = False
    created: dict[str, tuple[int, int]] = {}
    files: tuple[RowBlocks, ...] = ()
    tail: bytes = b""
