"""The marks of an engine, and the order that they keep.

    high_water_mark <= low_water_mark <= applied_seq <= accepted_seq

Invariants
- Every change is checked here, whoever makes it: a mark that would break the order raises, and nothing moves.
- The low-water and the high-water mark only grow. `applied_seq` goes back in a rollback alone, never below the
  low-water mark.
- `accepted_seq` is ahead of `applied_seq` while the log has records of entries that it could not sync yet. Once the log
  is committed, both are the same to whoever asks what is on the disk.
"""

from __future__ import annotations

from tidelog.errors import InputError, InternalError


class Marks:
    """Where an engine stands. One thread at a time moves them; anybody may look."""

    def __init__(self, applied_seq: int = 0, low_water_mark: int = 0, high_water_mark: int = 0) -> None:
        self.applied_seq = applied_seq
        self.low_water_mark = low_water_mark
        self.high_water_mark = high_water_mark
        self.accepted_seq = applied_seq
        self.check()

    def check(self) -> None:
        """The order holds, or the engine is wrong."""
        if not 0 <= self.high_water_mark <= self.low_water_mark <= self.applied_seq:
            raise InternalError(
                f"marks out of order: high-water {self.high_water_mark}, low-water {self.low_water_mark}, "
                f"applied {self.applied_seq}"
            )

    def applied(self, seq: int) -> None:
        """Everything up to a seq is on the disk."""
        if seq < self.applied_seq:
            raise InternalError(f"seq {seq} was applied after {self.applied_seq}")
        self.applied_seq = seq
        self.accepted_seq = max(seq, self.accepted_seq)

    def accepted(self, seq: int) -> None:
        """The log has the records of everything up to a seq, and brings them to the disk as soon as it can."""
        self.accepted_seq = seq

    def rolled_back(self, seq: int) -> None:
        """What was after a seq is thrown away."""
        if seq < self.low_water_mark:
            raise InputError(
                f"seq {seq} is below the low-water mark {self.low_water_mark}: all replicas have what is after it",
                operation="roll back",
                hint="Only what is above the low-water mark can be taken back",
            )
        self.applied_seq = min(seq, self.applied_seq)
        self.accepted_seq = min(seq, self.accepted_seq)

    def raise_low_water_mark(self, seq: int) -> bool:
        """All replicas have applied everything up to a seq. Whether it moved; an older mark that comes late is fine."""
        if seq > self.applied_seq:
            raise InputError(
                f"a low-water mark of {seq}, when {self.applied_seq} is the last seq that was applied here",
                operation="update low-water mark",
                hint="It is the least applied seq of all replicas, this one included; apply the entries first",
            )
        moved = seq > self.low_water_mark
        self.low_water_mark = max(seq, self.low_water_mark)
        return moved

    def raise_high_water_mark(self, seq: int) -> None:
        """Everything up to a seq is in the store, and its manifest says so."""
        if seq > self.low_water_mark:
            raise InternalError(f"seq {seq} was shipped, above the low-water mark {self.low_water_mark}")
        self.high_water_mark = max(seq, self.high_water_mark)
