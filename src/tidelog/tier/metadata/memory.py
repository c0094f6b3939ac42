"""A metadata store in memory, for tests and for trying things out: gone with the process."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from threading import Lock

from tidelog.errors import ConflictError
from tidelog.tier.keys import check_key, check_prefix
from tidelog.tier.metadata.store import Check, Delete, Entry, MetadataStore, Write, end_of, numeric_version


class MemoryMetadataStore(MetadataStore):
    """Every instance is a store of its own."""

    url = "memory://"
    supports_multi_key = True
    supports_leases = False

    def __init__(self) -> None:
        self._guard = Lock()
        self._entries: dict[str, Entry] = {}
        self._last_version = 0

    def get(self, key: str) -> Entry | None:
        return self._entries.get(check_key(key))

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
            for check in checks:
                found = self._entries.get(check.key)
                if numeric_version(check) != (int(found.version) if found else 0):
                    raise ConflictError(f"{check.key} was changed by somebody else")
            self._last_version += 1
            return self._write(writes, str(self._last_version))

    def _write(self, writes: Sequence[Write], version: str) -> dict[str, str]:
        versions = {}
        for write in writes:
            if isinstance(write, Delete):
                self._entries.pop(write.key, None)
            else:
                self._entries[write.key] = Entry(write.key, bytes(write.value), version)
                versions[write.key] = version
        return versions

    def _sorted_keys(self, prefix: str, start: str) -> list[str]:
        keys = sorted(self._entries)
        return keys[bisect_left(keys, start) : bisect_left(keys, end_of(prefix))]
