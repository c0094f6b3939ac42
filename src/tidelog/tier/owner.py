"""The small documents that say who may write a topic and where it stands, as JSON in the metadata store.

    owner                    who writes now, and under which epoch
    state                    the sealed marker: where the last owner stopped on purpose
    start                    the oldest offset that may be read; it never goes back
    subscriptions/{name}     a cursor

`claim` is a random number that no two claims share. An epoch orders owners; a claim tells one from every other, also
after the topic was deleted and made again. `lineage` is the claim whose disk has what was accepted and not shipped: an
owner that closes without having accepted anything gives it back to the one before. `session` names the opening of the
node that holds the topic (`node_lease.py`); it is empty once the node has let go of the topic and goes on.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from tidelog.codec import JSON_ERRORS
from tidelog.errors import DataError
from tidelog.tier.bounds import Number


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Who writes a topic. `log_id` is that of the topic: it stays with every claim, and binds files and objects."""

    epoch: Number
    claim: str
    lineage: str
    node: str
    claimed_us: Number
    log_id: str
    session: str = ""


class SealedMarker(msgspec.Struct, frozen=True, kw_only=True):
    """Everything up to `last_committed_offset` is in the store. None: there never was a message."""

    sealed: bool
    last_committed_offset: Number | None
    node: str
    epoch: Number
    sealed_us: Number


class StartMark(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing below `start_offset` is to be read any more; what is still there is on its way out.

    `deleted`: the whole topic is on its way out, and whoever opens it finishes that before anything else.
    """

    start_offset: Number
    epoch: Number
    moved_us: Number
    deleted: bool = False


class Cursor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far a subscription is: everything below `offset` is done with, and so are the ranges of `acked`.

    `acked` are (start, stop), stop exclusive, in order and above `offset`. `failures` are (offset, deliveries) of open
    messages that were rejected. With `hold_retention` nothing that is open is deleted. Dead letters of this
    subscription below `dead_letter_offset` of their topic are done with here.
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

        One that was moved back since, or deleted and made again, stays as it is: somebody wants all of it again.
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


class EpochFloor(msgspec.Struct, frozen=True, kw_only=True):
    """The highest epoch of a deleted topic: no epoch is used twice, so no name of an object is."""

    epoch: Number


Document = TypeVar("Document", bound=msgspec.Struct)


def encode(document: msgspec.Struct) -> bytes:
    """The JSON of a document."""
    return msgspec.json.encode(document)


def decode(data: bytes, key: str, kind: type[Document]) -> Document:
    """The document under a key; DataError when it is something else."""
    try:
        return msgspec.json.decode(data, type=kind)
    except JSON_ERRORS as error:
        raise DataError(
            f"{key} in the metadata store cannot be understood: {error}",
            hint="`tidelog topic rebuild-catalog` makes the catalog anew from the objects",
        ) from error


def decode_mapping(data: bytes, key: str) -> dict[str, object]:
    """A document without a fixed shape, such as a topic's own settings."""
    try:
        return msgspec.json.decode(data, type=dict[str, object])
    except JSON_ERRORS as error:
        raise DataError(f"{key} in the metadata store cannot be understood: {error}") from error
