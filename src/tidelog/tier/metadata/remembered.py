"""A metadata store as whoever opens a topic sees it: what was read is remembered until something is written.

Opening asks for the same few documents again and again, each part for itself. Here they are read once, and together
where the store can, once before the claim and once after it.

Invariants
- Every write forgets all that was read: what is read after a claim was read after it.
- What was read before is as old as the opening at most, and decides nothing by itself: a claim names the version that
  it was made from, and fails when that has changed since.
- When the topic is open nothing is remembered any more (`forget_for_good`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock

from tidelog.tier.metadata.lease import Lease
from tidelog.tier.metadata.store import Check, Entry, MetadataStore, Write


class RememberedMetadata(MetadataStore):
    """Passes everything on to the store that it was made with. `keys` are those that will be asked for."""

    def __init__(self, store: MetadataStore, keys: Sequence[str]) -> None:
        self.url = store.url
        self.store = store
        self._expected = keys if store.reads_many_at_once else ()
        self._guard = Lock()
        self._known: dict[str, Entry | None] = {}
        self._is_over = False

    def forget_for_good(self) -> None:
        """From now on everything is asked for again, each time."""
        with self._guard:
            self._is_over = True
            self._known.clear()

    @property
    def supports_multi_key(self) -> bool:
        return self.store.supports_multi_key

    @property
    def supports_leases(self) -> bool:
        return self.store.supports_leases

    @property
    def floor_is_cheap(self) -> bool:
        return self.store.floor_is_cheap

    @property
    def reads_many_at_once(self) -> bool:
        return self.store.reads_many_at_once

    def get(self, key: str) -> Entry | None:
        if self._is_over:
            return self.store.get(key)
        with self._guard:
            if key not in self._known:
                self._read(key)
            return self._known[key]

    def _read(self, key: str) -> None:
        if key in self._expected:
            found = self.store.get_many(self._expected)
            self._known |= {expected: found.get(expected) for expected in self._expected}
        else:
            self._known[key] = self.store.get(key)

    def get_many(self, keys: Sequence[str]) -> dict[str, Entry]:
        return self.store.get_many(keys)

    def change_mark(self) -> object | None:
        return self.store.change_mark()

    def floor(self, prefix: str, key: str) -> Entry | None:
        return self.store.floor(prefix, key)

    def purge(self, keys: Sequence[str]) -> None:
        self._forget()
        self.store.purge(keys)

    def close(self) -> None:
        """It is not ours to close."""

    def _forget(self) -> None:
        with self._guard:
            self._known.clear()

    def _range(self, prefix: str, start: str, limit: int | None) -> list[Entry]:
        return self.store._range(prefix, start, limit)

    def _keys(self, prefix: str, start: str, limit: int | None) -> list[str]:
        return self.store._keys(prefix, start, limit)

    def _commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Mapping[str, str]:
        try:
            return self.store._commit(checks, writes)
        finally:
            self._forget()

    def _lease(self, ttl_seconds: int) -> Lease:
        return self.store._lease(ttl_seconds)
