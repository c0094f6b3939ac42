"""Looks at keys of many topics with few requests, and tells whose entry has changed.

An idle topic has two keys that others may change at any time: its owner, and what was handed over to it. To ask for
each by itself costs two requests for every topic every few seconds; here all keys of a store are asked for together.

Invariants
- A change is told within the interval of its key, once the store answers; what is told is only that there is one.
- A key that was added is looked at in the next round, whatever is known of the store by then.
- Where the store can tell that nothing at all has changed (`change_mark`), a round is one small request, or none.
- A round that fails is made again after the interval: a store that is out of reach tells nothing, and changes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from threading import Lock

from tidelog.errors import TidelogError
from tidelog.tier.background import Background, Task
from tidelog.tier.metadata.store import MetadataStore

OpenedMetadata = Callable[[], MetadataStore | None]
NEVER_SEEN = ""
"""Instead of a version: that there is an entry at all is a change."""


class Watched:
    """A key that is looked at, until it is cancelled. `version` is the one that is known; None: there is no entry."""

    def __init__(self, key: str, version: str | None, on_change: Callable[[], None], round: KeyRound) -> None:
        self.key = key
        self.version = None if version == NEVER_SEEN else version
        self.on_change = on_change
        self._round = round

    def cancel(self) -> None:
        """It is not looked at any more. A round that is under way may still tell of it."""
        self._round.remove(self)


class KeyRound:
    """The keys that are looked at with the same interval."""

    def __init__(self, metadata: OpenedMetadata, seconds: float) -> None:
        self._metadata = metadata
        self._seconds = seconds
        self._guard = Lock()
        self._watched: dict[str, Watched] = {}
        self._mark: object | None = None
        self._additions = 0
        self.task: Task | None = None

    def add(self, watched: Watched) -> None:
        with self._guard:
            self._watched[watched.key] = watched
            self._additions += 1
            self._mark = None

    def remove(self, watched: Watched) -> None:
        with self._guard:
            if self._watched.get(watched.key) is watched:
                del self._watched[watched.key]

    def look(self) -> float:
        """One round, in the background; the seconds until the next."""
        with contextlib.suppress(TidelogError):
            metadata = self._metadata()
            if metadata is not None:
                self._compare(metadata)
        return self._seconds

    def _compare(self, metadata: MetadataStore) -> None:
        with self._guard:
            watched, known_mark, additions = list(self._watched.values()), self._mark, self._additions
        if not watched:
            return
        mark = metadata.change_mark()
        if mark is not None and mark == known_mark:
            return
        found = metadata.get_many([each.key for each in watched])
        for each in watched:
            version = found[each.key].version if each.key in found else None
            if version != each.version:
                each.version = version
                each.on_change()
        with self._guard:
            if self._additions == additions:  # else one was added meanwhile, and must be looked at
                self._mark = mark


class KeyWatch:
    """All keys of one metadata store that this process wants to know about."""

    def __init__(self, metadata: OpenedMetadata, background: Background) -> None:
        self._metadata = metadata
        self._background = background
        self._guard = Lock()
        self._rounds: dict[float, KeyRound] = {}

    def add(self, key: str, version: str | None, on_change: Callable[[], None], seconds: float) -> Watched:
        """Calls `on_change`, which must be quick, whenever the entry has another version than the one known last."""
        with self._guard:
            round = self._rounds.get(seconds)
            if round is None:
                round = self._rounds[seconds] = KeyRound(self._metadata, seconds)
                round.task = self._background.add(round.look, seconds)
        watched = Watched(key, version, on_change, round)
        round.add(watched)
        return watched
