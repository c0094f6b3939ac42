"""Stores the positions of subscriptions and consumer groups: in the catalog of a topic that has a store, else on disk.

Invariants
- A cursor that cannot be read is an error. A cursor is absent only if the store has answered so.
- With a store a cursor is changed under the owner's epoch: a node that lost the topic gets FencedError and changes
  nothing.
- `write_cursors` writes many cursors of many topics in one transaction where the metadata store has transactions.
- Both use the same keys, so a local directory that is given a store and keeps its metadata keeps its subscriptions.
  With other metadata they are copied there when the topic is opened.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import NamedTuple, Protocol

import msgspec

from tidelog.clock import Clock
from tidelog.cold.catalog import Catalog
from tidelog.cold.cursor import Cursor, checked_cursor
from tidelog.cold.ownership import OwnedCatalog
from tidelog.cold.tiered_log import TieredLog
from tidelog.errors import ConflictError, DataError, InputError, TidelogError
from tidelog.log import Log
from tidelog.store.document import Attempts, encode_json
from tidelog.store.keys import TopicKeys
from tidelog.store.metadata.base import Check, Delete, MetadataStore, Put
from tidelog.store.scheduler import in_parallel
from tidelog.topics.live_log import LiveLog
from tidelog.topics.subscription.delivery import DeliveryState


class CursorStore(Protocol):
    """The cursors of one topic. `names` are those of subscriptions; a consumer group's cursor is a `group_cursor`."""

    def names(self) -> list[str]: ...
    def groups(self) -> list[str]: ...
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

    def groups(self) -> list[str]:
        return self._catalog.groups()

    def owned(self) -> OwnedCatalog:
        """The catalog under the owner's claim; FencedError if this node no longer is the owner."""
        return self._required_owner().change(lambda owned: owned)

    def verify(self) -> None:
        """FencedError if the metadata store says that another node owns the topic."""
        self._required_owner().verify()

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
        self._open_metadata = open_metadata

    def _existing(self) -> Catalog | None:
        metadata = self._open_metadata(False)
        return None if metadata is None else Catalog(metadata, self._keys)

    def names(self) -> list[str]:
        catalog = self._existing()
        return [] if catalog is None else catalog.subscriptions()

    def groups(self) -> list[str]:
        catalog = self._existing()
        return [] if catalog is None else catalog.groups()

    def group_cursors(self) -> dict[str, Cursor | DataError]:
        """Those of all consumer groups, as `Catalog.group_cursors`."""
        catalog = self._existing()
        return {} if catalog is None else catalog.group_cursors()

    def _all(self) -> list[str]:
        catalog = self._existing()
        return [] if catalog is None else catalog.cursors()

    def load(self, name: str) -> Cursor | None:
        catalog = self._existing()
        found = None if catalog is None else catalog.cursor(name)
        return None if found is None else checked_cursor(name, found[0])

    def store(self, name: str, cursor: Cursor) -> None:
        self.metadata().commit([], [self.step(name, cursor)])

    def metadata(self) -> MetadataStore:
        metadata = self._open_metadata(True)
        assert metadata is not None
        return metadata

    def step(self, name: str, cursor: Cursor | None) -> Put | Delete:
        """What stores a cursor, or deletes it."""
        key = self._keys.subscription(name)
        if cursor is None:
            return Delete(key)
        return Put(key, encode_json(msgspec.structs.replace(cursor, epoch=0, moved_us=self._clock.now_us())))

    def clip(self, next_offset: int) -> None:
        """Before anything is accepted: the log may end sooner than it did, after a repair or when it was put back from
        a copy. A position beyond the end would pass over the messages that get those offsets now."""
        for name in self._all():
            with contextlib.suppress(DataError):  # the next subscribe() raises it
                cursor = self.load(name)
                if cursor is not None and (clipped := cursor.clipped(next_offset)) != cursor:
                    self.store(name, clipped)

    def delete(self, name: str) -> None:
        catalog = self._existing()
        if catalog is not None:
            catalog.metadata.delete(self._keys.subscription(name))

    def delete_all(self) -> None:
        """The topic was deleted."""
        for name in self._all():
            self.delete(name)

    def bring_along(self, catalog: CatalogCursors) -> None:
        """Moves the positions of a directory that was local into the catalog that it was given. Can be interrupted
        anywhere."""
        for name in self._all():
            cursor = self.load(name)
            if cursor is not None and catalog.load(name) is None:
                catalog.store(name, cursor)
            self.delete(name)


class CursorWrite(NamedTuple):
    """A cursor to be stored; None deletes it."""

    cursors: CursorStore
    name: str
    cursor: Cursor | None


# etcd refuses transactions of more than 128 operations.
_WRITES_AT_ONCE = 100
_THREADS = 8


def write_cursors(writes: Sequence[CursorWrite]) -> list[TidelogError | None]:
    """Stores cursors of several topics; returns for each why it could not be stored, or None.

    In one transaction, unless there are more than a hundred, or the metadata store changes one key at a time.
    """
    found: dict[int, TidelogError] = {}
    local = [(index, write) for index, write in enumerate(writes) if isinstance(write.cursors, LocalCursors)]
    owned = [(index, write) for index, write in enumerate(writes) if isinstance(write.cursors, CatalogCursors)]
    for batch in _batches(local):
        found |= _write_local(batch)
    for batch in _batches(owned):
        try:
            found |= _write_owned(batch)
        except TidelogError as error:
            found |= {index: error for index, _ in batch}
    for index, write in enumerate(writes):
        if not isinstance(write.cursors, LocalCursors | CatalogCursors):
            found |= _write_one((index, write))
    return [found.get(index) for index in range(len(writes))]


_Numbered = tuple[int, CursorWrite]


def _batches(writes: list[_Numbered]) -> Iterator[list[_Numbered]]:
    for first in range(0, len(writes), _WRITES_AT_ONCE):
        yield writes[first : first + _WRITES_AT_ONCE]


def _write_one(numbered: _Numbered) -> dict[int, TidelogError]:
    index, (cursors, name, cursor) = numbered
    try:
        if cursor is None:
            cursors.delete(name)
        else:
            cursors.store(name, cursor)
    except TidelogError as error:
        return {index: error}
    return {}


def _write_local(batch: list[_Numbered]) -> dict[int, TidelogError]:
    """All of them are in one metadata file."""
    stores = [write.cursors for _, write in batch if isinstance(write.cursors, LocalCursors)]
    try:
        steps = [store.step(write.name, write.cursor) for store, (_, write) in zip(stores, batch, strict=True)]
        stores[0].metadata().commit([], steps)
    except TidelogError as error:
        return {index: error for index, _ in batch}
    return {}


def _write_owned(batch: list[_Numbered]) -> dict[int, TidelogError]:
    """What this node owns goes into one transaction, which requires that it still does."""
    failed: dict[int, TidelogError] = {}
    attempts = Attempts("the cursors of consumer groups")
    while owned := _claimed(batch, failed):
        try:
            failed |= _commit_owned(owned)
            break
        except ConflictError as error:
            lost = {index: lost for (index, write), _ in owned if (lost := _lost(write)) is not None}
            failed |= lost
            if not lost:
                attempts.lost(error)
    return failed


_Owned = list[tuple[_Numbered, OwnedCatalog]]


def _claimed(batch: list[_Numbered], failed: dict[int, TidelogError]) -> _Owned:
    """Those that have not failed, with the catalogs that this node owns; further ones fail here."""
    owned: _Owned = []
    for index, write in batch:
        assert isinstance(write.cursors, CatalogCursors)
        if index not in failed:
            try:
                owned.append(((index, write), write.cursors.owned()))
            except TidelogError as error:
                failed[index] = error
    return owned


def _commit_owned(owned: _Owned) -> dict[int, TidelogError]:
    metadata = owned[0][1].catalog.metadata
    if not metadata.supports_multi_key:
        errors = in_parallel(_write_one, [numbered for numbered, _ in owned], _THREADS, "tidelog-offsets")
        return {index: error for one in errors for index, error in one.items()}
    owners = {one.catalog.keys.owner: one.ownership.version for _, one in owned}
    steps = [one.cursor_step(write.name, write.cursor) for (_, write), one in owned]
    metadata.commit([Check(key, version) for key, version in owners.items()], steps)
    return {}


def _lost(write: CursorWrite) -> TidelogError | None:
    assert isinstance(write.cursors, CatalogCursors)
    try:
        write.cursors.verify()
    except TidelogError as error:
        return error
    return None


# Persists the position of a subscription: at creation, periodically, and at close.
#
# Invariants
# - A stored position is durable in the log: a later one would skip other messages after a crash.
# - One write at a time, never under the subscription's lock: acknowledging does not wait for a metadata store.


_NEVER = 1 << 64


class StoredPosition:
    """The cursor of one subscription, as it is stored."""

    def __init__(self, name: str, cursor: Cursor, cursors: CursorStore, log: Log | LiveLog, min_delta: int) -> None:
        self._name = name
        self._cursors = cursors
        self._log = log
        self._min_delta = min_delta
        self._storing = Lock()
        self.cursor = cursor
        self.soon_at = cursor.offset + min_delta
        """From this offset on it is worth to store it before the next regular time."""

    @property
    def offset(self) -> int:
        return self.cursor.offset

    def wanted(self) -> None:
        """Requests that it is stored soon."""
        self.soon_at = _NEVER

    def store(self, state: DeliveryState, guard: Lock, *, is_last: bool = False) -> None:
        """Stores what `state` says now, if that is news; the last time with all that was acknowledged."""
        with self._storing:
            if is_last:
                _flush(self._log)
            with guard:
                cursor = self._snapshot(state)
            if cursor != self.cursor:
                self._cursors.store(self._name, cursor)
            self.cursor = cursor
            self.soon_at = cursor.offset + self._min_delta

    def misses_acknowledgements(self, state: DeliveryState) -> bool:
        progress = state.progress
        return (progress.floor, tuple(progress.ranges)) != (self.cursor.offset, self.cursor.acked)

    def _snapshot(self, state: DeliveryState) -> Cursor:
        progress = state.progress
        known = msgspec.structs.replace(
            self.cursor,
            offset=progress.floor,
            acked=tuple(progress.ranges),
            failures=tuple(state.stored_failures().items()),
            dead_letter_offset=state.dead_letter_offset,
            kind=state.options.kind,
            hold_retention=state.options.hold_retention,
        )
        return known.clipped(self._log.durable_offset)

    def delete(self) -> None:
        """The subscription was deleted."""
        with self._storing:
            self._cursors.delete(self._name)


def _flush(log: Log | LiveLog) -> None:
    """What cannot be made durable is not stored as acknowledged either; closing the log says why."""
    try:
        log.flush()
    except TidelogError:
        return
