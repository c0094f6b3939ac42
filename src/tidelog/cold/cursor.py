"""How far a subscription or a consumer group is in a log, as the catalog keeps it.

Invariants
- What is acknowledged is a set of offsets: everything below `offset`, and ranges above it.
- A cursor can be clipped to the end of a log and restored: nothing that was acknowledged below the end is lost, and
  nothing above it counts.
- Numbers that contradict each other are refused when a cursor is read.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from tidelog.errors import DataError

Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""An offset, an epoch, a count, a size, a time since 1970."""


class Cursor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far a subscription is: everything below `offset` is done with, and so are the ranges of `acked`.

    `acked` are (start, stop), stop exclusive, in order and above `offset`. `failures` are (offset, deliveries) of open
    messages that were rejected. With `hold_retention` nothing that is open is deleted. Dead letters of this
    subscription below `dead_letter_offset` of their topic are done with here.

    A consumer group of Kafka's protocol has a cursor of the kind `group` in each partition: the offset that it has
    committed, with the leader epoch (-1: not given) and the text that the client committed with it.
    """

    offset: Number
    epoch: Number
    moved_us: Number
    kind: str = "exclusive"
    created_us: Number = 0
    acked: tuple[tuple[Number, Number], ...] = ()
    failures: tuple[tuple[Number, Number], ...] = ()
    hold_retention: bool = False
    dead_letter_offset: Number = 0
    leader_epoch: Annotated[int, msgspec.Meta(ge=-1, le=(1 << 31) - 1)] = -1
    metadata: str = ""

    def clipped(self, limit: int) -> Cursor:
        """The same cursor, as if nothing at or above `limit` were done with."""
        return msgspec.structs.replace(
            self,
            offset=min(self.offset, limit),
            acked=tuple((start, min(stop, limit)) for start, stop in self.acked if start < limit),
            failures=tuple((offset, count) for offset, count in self.failures if offset < limit),
        )

    def restored(self, original: Cursor, limit: int) -> Cursor:
        """This cursor was `original` before it was clipped: the same with what was cut off, as if it had stayed there.

        One that was moved back since, or deleted and created again, stays as it is: its user wants all of it again.
        """
        clipped = original.clipped(limit)
        if self.created_us != original.created_us or not self._covers(clipped):
            return self
        cut_off = [(max(start, limit), stop) for start, stop in original._ranges if stop > limit]
        (_, offset), *acked = _joined([*self._ranges, *cut_off])
        lost_failures = tuple(one for one in original.failures if one not in clipped.failures)
        return msgspec.structs.replace(
            self, offset=offset, acked=tuple(acked), failures=(*self.failures, *lost_failures)
        )

    @property
    def _ranges(self) -> list[tuple[int, int]]:
        return [(0, self.offset), *self.acked]

    def _covers(self, other: Cursor) -> bool:
        return all(
            any(first <= start and stop <= last for first, last in self._ranges) for start, stop in other._ranges
        )


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges in order; those that touch are one."""
    joined = ranges[:1]
    for start, stop in ranges[1:]:
        if start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def checked_cursor(name: str, cursor: Cursor) -> Cursor:
    """The cursor; DataError if its numbers are inconsistent, since they decide what is never delivered again."""
    reached = cursor.offset
    for start, stop in cursor.acked:
        if not reached < start < stop:
            raise _damaged(name, f"range {start} to {stop} after {reached}")
        reached = stop
    if cursor.offset < 0 or any(count < 1 for _, count in cursor.failures):
        raise _damaged(name, f"offset {cursor.offset}, {len(cursor.failures)} failures")
    return cursor


def _damaged(name: str, what: str) -> DataError:
    return DataError(
        f"the stored position of the subscription {name} is invalid: {what}",
        hint="Delete the subscription and create it again at the right position",
    )
