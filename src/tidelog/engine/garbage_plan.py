"""Which pieces of an engine's log are garbage: looked at, shown, and only then dropped.

A piece is an object in the store, or a file on the disk of an engine without a store. History is contiguous from where
it begins, so pieces are dropped from the front only: what is dead behind a piece that is needed counts as dead bytes,
which a compaction can get rid of.

Invariants
- A piece is dropped when no version that is kept points into it or all of its values are in compacted data too, when
  neither a restore nor opening after a crash nor a rollback would read it, and when that holds for every piece before
  it. The newest one stays: the log goes on there.
- Bytes of values are counted for every version that points to them: a value with copies may count more than once, and
  never for more than its piece has. Live bytes are so an upper bound, and a piece without any is dead for certain.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from tidelog.engine.cell import decode_cell
from tidelog.engine.vacuum_rules import is_pointer

Fate = Literal["drop", "live", "replay", "behind", "newest"]
REASONS: dict[Fate, str] = {
    "drop": "no version that is kept is in it, or all of them are in compacted data too",
    "live": "versions that are kept are in it",
    "replay": "a restore, a start after a crash or a rollback reads it",
    "behind": "dead, behind a piece that is needed: for a compaction",
    "newest": "the newest one: the log goes on behind it",
}


class Piece(NamedTuple):
    """An object or a file: its records, its bytes in the log, and its bytes where it is."""

    name: str
    first_lsn: int
    next_lsn: int
    log_bytes: int
    size: int


class PieceUse(msgspec.Struct, frozen=True, kw_only=True):
    """What of a piece is in use, and what becomes of it. `size` is what dropping it frees."""

    name: str
    first_lsn: int
    next_lsn: int
    size: int
    live_bytes: int
    dead_bytes: int
    fate: Fate

    @property
    def reason(self) -> str:
        """Why, in words."""
        return REASONS[self.fate]


class GarbagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a collection would do now. `place` is where the pieces are: "store" or "disk".

    `versions` stay and `removable_versions` go, with `removable_bytes` of values. Pieces whose records are all below
    `drop_below_lsn` are dropped, which frees `droppable_bytes`.
    """

    horizon_seq: int
    history_start_seq: int
    keep_versions: int
    versions: int
    removable_versions: int
    removable_bytes: int
    place: Literal["store", "disk"]
    drop_below_lsn: int
    droppable_bytes: int
    live_bytes: int
    dead_bytes: int
    pieces: tuple[PieceUse, ...]
    held_back_by: str | None = None
    """Why `horizon_seq` is not where the settings, or whoever asked, would have it."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self.removable_versions and not self.droppable_bytes

    @property
    def dropped(self) -> tuple[PieceUse, ...]:
        """The pieces that go."""
        return tuple(piece for piece in self.pieces if piece.fate == "drop")


class GarbageReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a collection did, and what is left."""

    history_start_seq: int
    versions: int
    removed_versions: int
    removed_bytes: int
    dropped_pieces: int
    dropped_bytes: int
    live_bytes: int
    dead_bytes: int
    seconds: float


class Usage:
    """Counts what points into which piece."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces
        self._starts = [piece.first_lsn for piece in pieces]
        self._live = [0] * len(pieces)

    def note(self, value: bytes) -> None:
        """A cell that is kept. What it points to may lie behind all pieces, or before them."""
        if is_pointer(value):
            cell = decode_cell(value)
            index = bisect_right(self._starts, cell.lsn) - 1
            if index >= 0 and cell.lsn < self.pieces[index].next_lsn:
                self._live[index] += cell.stored_bytes

    def judged(self, needed_from_lsn: int, compacted_lsn: int = 0) -> tuple[PieceUse, ...]:
        """What becomes of each piece. Records from an LSN on are needed whatever is in them; values of those below
        another one are in compacted data."""
        found: list[PieceUse] = []
        is_front = True
        for index, (piece, live) in enumerate(zip(self.pieces, self._live, strict=True)):
            is_newest, needed = index == len(self.pieces) - 1, live if piece.next_lsn > compacted_lsn else 0
            fate = _fate(piece, needed, needed_from_lsn, is_newest=is_newest, is_front=is_front)
            is_front = fate == "drop"
            live_bytes = min(live, piece.log_bytes)
            found.append(
                PieceUse(
                    name=piece.name,
                    first_lsn=piece.first_lsn,
                    next_lsn=piece.next_lsn,
                    size=piece.size,
                    live_bytes=live_bytes,
                    dead_bytes=piece.log_bytes - live_bytes,
                    fate=fate,
                )
            )
        return tuple(found)


def _fate(piece: Piece, live: int, needed_from_lsn: int, *, is_newest: bool, is_front: bool) -> Fate:
    if live:
        return "live"
    if is_newest:
        return "newest"
    if piece.next_lsn > needed_from_lsn:
        return "replay"
    return "drop" if is_front else "behind"


def drop_below(uses: Sequence[PieceUse]) -> int:
    """The LSN below which everything goes; 0 when nothing does."""
    return max([use.next_lsn for use in uses if use.fate == "drop"], default=0)
