"""Following everything below a prefix of a metadata store: what is there, then each change.

    watch = metadata.watch("tidelog/cluster/")
    while (changes := watch.next(timeout_seconds=5.0)) is not None: ...

Invariants
- The first answer is everything that is there (`is_whole`), and so is each one after something was missed: who follows
  starts anew from it. In between, each answer is what has changed since the last.
- Answers are in the order of the store: who has seen a change has seen all that was written before it.
- None means that the time is over and nothing has changed as far as the store has answered. A store that does not
  answer raises StoreUnavailableError; the next call goes on where this one was.
- One thread uses it. `close` may be called by another, and ends a wait within the patience of one request.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tidelog.store.metadata.base import Entry, MetadataStore

POLL_SECONDS = 0.1


class Changes(NamedTuple):
    """What has changed: entries by their keys, None where one is gone. `is_whole`: what is not in it is not there."""

    is_whole: bool
    entries: dict[str, Entry | None]


class Watch(ABC):
    """Follows a prefix."""

    def __init__(self) -> None:
        self.is_closed = False

    @abstractmethod
    def next(self, timeout_seconds: float) -> Changes | None:
        """What has changed since the last call, as soon as there is something."""

    def close(self) -> None:
        """Twice is fine."""
        self.is_closed = True

    def end(self) -> None:  # noqa: B027 - most wait by nothing that is to be given back
        """By the thread that uses it, when it is done: gives back what it waits by."""


class PollingWatch(Watch):
    """For a store that tells nothing by itself: asks it whether anything has changed, and reads all if so."""

    def __init__(self, metadata: MetadataStore, prefix: str) -> None:
        super().__init__()
        self._metadata = metadata
        self._prefix = prefix
        self._mark: object | None = None
        self._known: dict[str, str] | None = None

    def next(self, timeout_seconds: float) -> Changes | None:
        deadline = time.monotonic() + timeout_seconds
        while not self.is_closed:
            changes = self.look()
            if changes is not None:
                return changes
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(left, POLL_SECONDS))
        return None

    def look(self) -> Changes | None:
        """One look, without waiting."""
        mark = self._metadata.change_mark()
        if self._known is not None and mark is not None and mark == self._mark:
            return None
        found = {entry.key: entry for entry in self._metadata.range(self._prefix)}
        known, self._known = self._known, {key: entry.version for key, entry in found.items()}
        self._mark = mark
        if known is None:
            return Changes(True, dict(found))
        changed: dict[str, Entry | None] = {
            key: entry for key, entry in found.items() if known.get(key) != entry.version
        }
        changed.update(dict.fromkeys(known.keys() - found.keys()))
        return Changes(False, changed) if changed else None
