"""Where the positions of subscriptions are kept: with the catalog of a topic that has a store, else on this disk.

Invariants
- A cursor that cannot be read is an error. "There is none" is said only by a store that has answered.
- With a store a cursor is changed under the owner's epoch: who lost the topic gets FencedError and changes nothing.
- Both use the same keys, so a local directory that is given a store and keeps its metadata keeps its subscriptions.
  With other metadata they are brought there when the topic is opened.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from tidelog.clock import Clock
from tidelog.errors import DataError, InputError
from tidelog.tier.catalog import Catalog
from tidelog.tier.keys import TopicKeys
from tidelog.tier.metadata.store import MetadataStore
from tidelog.tier.owner import Cursor, encode
from tidelog.tier.tiered_log import TieredLog


class CursorStore(Protocol):
    """The cursors of one topic."""

    def names(self) -> list[str]: ...
    def load(self, name: str) -> Cursor | None: ...
    def store(self, name: str, cursor: Cursor) -> None: ...
    def delete(self, name: str) -> None: ...


class CatalogCursors:
    """Cursors in the catalog of a topic; without `owner` they can only be read."""

    def __init__(self, catalog: Catalog, owner: TieredLog | None = None) -> None:
        self._catalog = catalog
        self._owner = owner

    def names(self) -> list[str]:
        return self._catalog.subscriptions()

    def load(self, name: str) -> Cursor | None:
        found = self._catalog.cursor(name)
        return None if found is None else checked_cursor(name, found[0])

    def store(self, name: str, cursor: Cursor) -> None:
        self._required_owner().change(lambda owned: owned.store_cursor(name, cursor))

    def delete(self, name: str) -> None:
        self._required_owner().change(lambda owned: owned.delete_cursor(name))

    def _required_owner(self) -> TieredLog:
        if self._owner is None:
            raise InputError("the log directory was opened with read_only=True")
        return self._owner


class LocalCursors:
    """Cursors in the metadata file of a log directory, which is opened when the first of them is asked for."""

    def __init__(self, open_metadata: Callable[[bool], MetadataStore | None], keys: TopicKeys, clock: Clock) -> None:
        """`open_metadata(make)` returns None when there is no file and it is not to be made."""
        self._keys = keys
        self._clock = clock
        self._existing = partial(open_metadata, False)
        self._made = partial(open_metadata, True)

    def names(self) -> list[str]:
        metadata = self._existing()
        return [] if metadata is None else Catalog(metadata, self._keys).subscriptions()

    def load(self, name: str) -> Cursor | None:
        metadata = self._existing()
        found = None if metadata is None else Catalog(metadata, self._keys).cursor(name)
        return None if found is None else checked_cursor(name, found[0])

    def store(self, name: str, cursor: Cursor) -> None:
        metadata = self._made()
        assert metadata is not None
        moved = msgspec.structs.replace(cursor, epoch=0, moved_us=self._clock.now_us())
        metadata.put(self._keys.subscription(name), encode(moved))

    def clip(self, next_offset: int) -> None:
        """Before anything is accepted: the log may end sooner than it did, after a repair or when it was put back from
        a copy. A position beyond the end would pass over the messages that get those offsets now."""
        for name in self.names():
            with contextlib.suppress(DataError):  # whoever subscribes is told
                cursor = self.load(name)
                if cursor is not None and (clipped := cursor.clipped(next_offset)) != cursor:
                    self.store(name, clipped)

    def delete(self, name: str) -> None:
        metadata = self._existing()
        if metadata is not None:
            metadata.delete(self._keys.subscription(name))


def bring_along(local: LocalCursors, catalog: CatalogCursors) -> None:
    """The positions of a directory that was local, into the catalog that it was given. Can be interrupted anywhere."""
    for name in local.names():
        cursor = local.load(name)
        if cursor is not None and catalog.load(name) is None:
            catalog.store(name, cursor)
        local.delete(name)


def checked_cursor(name: str, cursor: Cursor) -> Cursor:
    """The same cursor; DataError when its numbers make no sense, since they decide what is never handed out again."""
    reached = cursor.offset
    for start, stop in cursor.acked:
        if not reached < start < stop:
            raise _damaged(name, f"range {start} to {stop} behind {reached}")
        reached = stop
    if cursor.offset < 0 or any(count < 1 for _, count in cursor.failures):
        raise _damaged(name, f"offset {cursor.offset}, {len(cursor.failures)} failures")
    return cursor


def _damaged(name: str, what: str) -> DataError:
    return DataError(
        f"the position of the subscription {name} makes no sense: {what}",
        hint="Delete the subscription and make it again where it should begin",
    )
