"""The rows of one consignment: looked through before the first of them is appended, then handed out.

Invariants
- `verify` reads every part to its end. What it finds to be wrong is said before anything is in the log.
- A small consignment is read once, and kept in memory until it is appended. A large one is read twice, or once where
  its rows can be written beside the log meanwhile (see `intake_prepared`).
- What turns out to be damaged after all, when some rows are in the log already, leaves marks of lost rows in its place:
  every other row gets the offset that was meant for it, and the loss is seen by whoever reads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tidelog.errors import DataError, MessageTooLargeError, NotFoundError
from tidelog.log.frame import Frames, encode_many
from tidelog.log.repair import LOST_PAYLOAD
from tidelog.tier.history_ranges import Fetcher
from tidelog.tier.intake_document import Consignment
from tidelog.tier.intake_part import StagedPart, decode_manifest, read_part, read_whole_part
from tidelog.tier.object_store import ObjectStore

_logger = logging.getLogger("tidelog.tier")
_KEPT_BYTES = 16 << 20
_ROWS_AT_ONCE = 16384

CheckRows = Callable[[Frames], None]
"""Raises when rows must not become messages."""


class Staging(NamedTuple):
    """Where staged rows are, and who fetches them."""

    objects: ObjectStore
    fetcher: Fetcher
    is_local: bool = False
    """On the disk of the log: reading takes no longer than appending, so that others may wait for it."""


class ConsignmentRows:
    """Reads one consignment."""

    def __init__(self, staging: Staging, consignment: Consignment) -> None:
        self.lost_rows = 0
        self._staging = staging
        self._consignment = consignment
        self._parts: tuple[StagedPart, ...] | None = None
        self._kept: list[Frames] | None = None

    @property
    def is_read_once(self) -> bool:
        """Whether it is to be written beside the log while it is looked through."""
        return self._staging.is_local and self._consignment.bytes > _KEPT_BYTES

    def verify(self, check_rows: CheckRows) -> None:
        """Reads all. DataError or NotFoundError when it is not what was committed, or what `check_rows` raises."""
        kept: list[Frames] | None = [] if self._consignment.bytes <= _KEPT_BYTES else None
        for part in self.parts():
            for frames in read_whole_part(self._staging.fetcher, part):
                check_rows(frames)
                if kept is not None:
                    kept.append(frames)
        self._kept = kept

    def frames(self, first_row: int) -> Iterator[Frames]:
        """The rows from one on, some at a time, numbered somehow. Where the store does not answer, ask from there."""
        if self._kept is not None:
            return _from_frames(self._kept, first_row)
        return self._from_parts(first_row)

    def whole_part(self, part: StagedPart) -> Iterator[Frames]:
        """All of a part, for the only time."""
        return read_whole_part(self._staging.fetcher, part, self._letting_go(part))

    def parts(self) -> tuple[StagedPart, ...]:
        """What the manifest lists; DataError or NotFoundError when it is not what was committed."""
        if self._parts is None:
            one = self._consignment
            data = self._staging.objects.get(one.manifest).data
            parts = decode_manifest(data, one.manifest, one.checksum).parts
            if (sum(part.rows for part in parts), sum(part.bytes for part in parts)) != (one.rows, one.bytes):
                raise DataError(f"{one.manifest} does not list the {one.rows} rows that were committed")
            self._parts = parts
        return self._parts

    def _from_parts(self, first_row: int) -> Iterator[Frames]:
        try:
            parts = self.parts()
        except (DataError, NotFoundError) as damage:
            yield from self._lost(self._consignment.rows - first_row, damage)
            return
        begin = 0
        for part in parts:
            if begin + part.rows > first_row:
                yield from self._from_part(part, max(0, first_row - begin))
            begin += part.rows

    def _from_part(self, part: StagedPart, row: int) -> Iterator[Frames]:
        try:
            for frames in read_part(self._staging.fetcher, part, row, self._letting_go(part)):
                for some in _some_at_a_time(frames):
                    yield some
                    row += some.count
        except (DataError, NotFoundError) as damage:
            yield from self._lost(part.rows - row, damage)

    def _letting_go(self, part: StagedPart) -> Callable[[int], None]:
        return lambda position: self._staging.objects.let_go_below(part.key, position)

    def _lost(self, count: int, damage: Exception) -> Iterator[Frames]:
        self.lost_rows += count
        _logger.error("%d rows of %s are lost while they are taken in: %s", count, self._consignment.id, damage)
        while count:
            some = min(count, _ROWS_AT_ONCE)
            yield encode_many(0, [LOST_PAYLOAD] * some)
            count -= some


def check_sizes(frames: Frames, max_message_bytes: int) -> None:
    """MessageTooLargeError when a row is larger than the topic allows."""
    largest = max(memoryview(frames.lengths).cast("I"))
    if largest > max_message_bytes:
        raise MessageTooLargeError(
            f"a row of {largest} bytes is over max_message_bytes ({max_message_bytes})",
            hint="Raise max_message_bytes of the topic's owner, and write it again",
        )


def _from_frames(kept: list[Frames], first_row: int) -> Iterator[Frames]:
    begin = 0
    for frames in kept:
        if begin + frames.count > first_row:
            yield from _some_at_a_time(frames.slice(max(0, first_row - begin), frames.count))
        begin += frames.count


def _some_at_a_time(frames: Frames) -> Iterator[Frames]:
    for start in range(0, frames.count, _ROWS_AT_ONCE):
        yield frames.slice(start, min(start + _ROWS_AT_ONCE, frames.count))
