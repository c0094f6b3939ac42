"""An in-memory metadata store, for tests and experiments: gone with the process.

Invariant: an entry attached to a lease is invisible from the moment the lease expires.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from threading import Lock

from tidelog.clock import Clock, SystemClock
from tidelog.errors import ConflictError, LeaseLostError
from tidelog.store.keys import check_key, check_prefix
from tidelog.store.metadata.base import Check, Delete, Entry, Lease, MetadataStore, Put, Write, end_of, numeric_version


class MemoryMetadataStore(MetadataStore):
    """Every instance is a store of its own."""

    url = "memory://"
    supports_multi_key = True
    supports_leases = True
    reads_many_at_once = True

    def __init__(self, clock: Clock | None = None) -> None:
        self._guard = Lock()
        self._clock = clock or SystemClock()
        self._last_lease = 0
        self._lease_ends: dict[int, float] = {}
        self._leased: dict[str, int] = {}
        self._entries: dict[str, Entry] = {}
        self._last_version = 0

    def get(self, key: str) -> Entry | None:
        check_key(key)
        with self._guard:
            self._drop_lapsed()
            return self._entries.get(key)

    def get_many(self, keys: Sequence[str]) -> dict[str, Entry]:
        with self._guard:
            self._drop_lapsed()
            return {key: self._entries[key] for key in map(check_key, keys) if key in self._entries}

    def change_mark(self) -> object | None:
        with self._guard:
            self._drop_lapsed()  # which writes nothing: one entry less
            return self._last_version, len(self._entries)

    def floor(self, prefix: str, key: str) -> Entry | None:
        with self._guard:
            below = self._sorted_keys(check_prefix(prefix), prefix)
            at = bisect_right(below, check_key(key))
            return self._entries[below[at - 1]] if at else None

    def close(self) -> None:
        """Nothing to give back."""

    def _range(self, prefix: str, start: str, limit: int | None) -> list[Entry]:
        with self._guard:
            return [self._entries[key] for key in self._sorted_keys(prefix, start)[:limit]]

    def _keys(self, prefix: str, start: str, limit: int | None) -> list[str]:
        with self._guard:
            return self._sorted_keys(prefix, start)[:limit]

    def _commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Mapping[str, str]:
        with self._guard:
            self._drop_lapsed()
            for write in writes:
                if isinstance(write, Put) and write.lease is not None and write.lease.lease_id not in self._lease_ends:
                    raise LeaseLostError(f"the lease {write.lease.lease_id} ran out", hint="Take a new one")
            for check in checks:
                found = self._entries.get(check.key)
                if numeric_version(check) != (int(found.version) if found else 0):
                    raise ConflictError(f"{check.key} was changed concurrently")
            self._last_version += 1
            return self._write(writes, str(self._last_version))

    def _write(self, writes: Sequence[Write], version: str) -> dict[str, str]:
        versions = {}
        for write in writes:
            self._leased.pop(write.key, None)
            if isinstance(write, Delete):
                self._entries.pop(write.key, None)
            else:
                if write.lease is not None:
                    self._leased[write.key] = write.lease.lease_id
                self._entries[write.key] = Entry(write.key, bytes(write.value), version)
                versions[write.key] = version
        return versions

    def _sorted_keys(self, prefix: str, start: str) -> list[str]:
        self._drop_lapsed()
        keys = sorted(self._entries)
        return keys[bisect_left(keys, start) : bisect_left(keys, end_of(prefix))]

    # Leases

    def _lease(self, ttl_seconds: int) -> Lease:
        with self._guard:
            self._last_lease += 1
            now = self._clock.monotonic()
            self._lease_ends[self._last_lease] = now + ttl_seconds
            return _MemoryLease(self, self._last_lease, ttl_seconds, self._clock, now)

    def extend_lease(self, lease_id: int, ttl_seconds: int) -> bool:
        """Whether it was still there."""
        with self._guard:
            self._drop_lapsed()
            if lease_id not in self._lease_ends:
                return False
            self._lease_ends[lease_id] = self._clock.monotonic() + ttl_seconds
            return True

    def end_lease(self, lease_id: int) -> None:
        """What hangs on it goes with it."""
        with self._guard:
            self._lease_ends[lease_id] = float("-inf")
            self._drop_lapsed()

    def _drop_lapsed(self) -> None:
        if not self._lease_ends:
            return
        now = self._clock.monotonic()
        lapsed = {lease_id for lease_id, end in self._lease_ends.items() if now >= end}
        for lease_id in lapsed:
            del self._lease_ends[lease_id]
        for key in [key for key, lease_id in self._leased.items() if lease_id in lapsed]:
            del self._leased[key], self._entries[key]


class _MemoryLease(Lease):
    def __init__(
        self, store: MemoryMetadataStore, lease_id: int, ttl_seconds: int, clock: Clock, asked_at: float
    ) -> None:
        super().__init__(lease_id, ttl_seconds, clock, asked_at)
        self._store = store

    def _refresh(self) -> bool:
        return self._store.extend_lease(self.lease_id, self.ttl_seconds)

    def _revoke(self) -> None:
        self._store.end_lease(self.lease_id)
