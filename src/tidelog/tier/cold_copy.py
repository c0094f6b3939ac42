"""What the store has of a log that is damaged on the disk: the other copy that a repair mends it from.

Invariants
- Only objects up to the epoch of the files count. Those of a later owner are other messages under the same offsets.
- What is said to be there has been read and checked just before. A store that gives no answer raises; that an object is
  gone or damaged itself means that it is not there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing

from tidelog.errors import DataError, NotFoundError
from tidelog.tier.history import History

_logger = logging.getLogger("tidelog.tier")


class ColdCopy:
    """The history of a topic, for files that were written up to an epoch."""

    def __init__(self, history: History, epoch: int) -> None:
        self._history = history
        self._epoch = epoch

    def ranges(self, first: int, last: int) -> list[tuple[int, int]]:
        """What of these offsets can be read from the store, as stretches of (first, last)."""
        found: list[tuple[int, int]] = []
        begin = max(first, self._history.catalog.start_offset())
        for descriptor in self._history.catalog.walk(begin):
            if descriptor.start_offset > last:
                break
            start = max(begin, descriptor.start_offset)
            until = min(last + 1, descriptor.written_until(self._epoch))
            reached = self._checked(start, until - 1) if start < until else start
            if reached == start:
                continue
            if found and found[-1][1] + 1 == start:
                start = found.pop()[0]
            found.append((start, reached - 1))
        return found

    def _checked(self, first: int, last: int) -> int:
        """How far it can be read: the offset behind the last good one."""
        reached = first
        try:
            for payloads in self.payloads(first, last):
                reached += len(payloads)
        except (DataError, NotFoundError) as error:
            _logger.warning("the copy in the store cannot be used from offset %d on: %s", reached, error)
        return reached

    def payloads(self, first: int, last: int) -> Iterator[list[bytes]]:
        """All payloads of a stretch, some at a time."""
        with closing(self._history.read(first, last + 1)) as reader:
            while (batch := reader.next_batch()) is not None:
                yield batch.payloads()
