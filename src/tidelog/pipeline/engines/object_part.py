"""A part of an engine's objects for one task: a range of keys, and where their rows and bodies are.

Plain data, made by the driver and sent to a worker.

Invariants
- A range ends between two names, never between versions of one: a task sees all versions of what it has.
- Rows come from a state (its own blocks, or row files) and from `tail`, what the log behind it changed: that wins.
"""

from __future__ import annotations

import msgspec

from tidelog.engine.row_file import RowPart
from tidelog.engine.store_checkpoint import BlockPlace
from tidelog.pipeline.engines.store_place import EnginePlace


class StateBlocks(msgspec.Struct, frozen=True):
    """Blocks of a state that is one object."""

    key: str
    blocks: tuple[BlockPlace, ...] = ()


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
    state: StateBlocks | None = None
    files: tuple[RowPart, ...] = ()
    tail: bytes = b""
