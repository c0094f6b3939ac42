"""A metadata store that counts: how many requests, how long they took, how many failed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from tidelog.errors import ConflictError, TidelogError
from tidelog.log.statistics import Histogram, Stopwatch
from tidelog.tier.metadata.lease import Lease
from tidelog.tier.metadata.store import Check, Entry, MetadataStore, Write


class MetadataStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of a metadata store, seen from this process."""

    url: str
    reads: int
    read_seconds: Histogram
    commits: int
    commit_seconds: Histogram
    conflicts: int
    errors: int


class MeasuredMetadata(MetadataStore):
    """Passes everything on to the store that it was made with."""

    def __init__(self, store: MetadataStore) -> None:
        self.url = store.url
        self._store = store
        self._read_seconds = Stopwatch()
        self._commit_seconds = Stopwatch()
        self._conflicts = 0
        self._errors = 0

    @property
    def supports_multi_key(self) -> bool:
        return self._store.supports_multi_key

    @property
    def supports_leases(self) -> bool:
        return self._store.supports_leases

    @property
    def floor_is_cheap(self) -> bool:
        return self._store.floor_is_cheap

    def get(self, key: str) -> Entry | None:
        with self._measured(self._read_seconds):
            return self._store.get(key)

    @property
    def reads_many_at_once(self) -> bool:
        return self._store.reads_many_at_once

    def get_many(self, keys: Sequence[str]) -> dict[str, Entry]:
        with self._measured(self._read_seconds):
            return self._store.get_many(keys)

    def change_mark(self) -> object | None:
        return self._store.change_mark()

    def floor(self, prefix: str, key: str) -> Entry | None:
        with self._measured(self._read_seconds):
            return self._store.floor(prefix, key)

    def close(self) -> None:
        self._store.close()

    def statistics(self) -> MetadataStatistics:
        """One moment of it."""
        reads, commits = self._read_seconds.snapshot(), self._commit_seconds.snapshot()
        return MetadataStatistics(
            url=self.url,
            reads=reads.count,
            read_seconds=reads,
            commits=commits.count,
            commit_seconds=commits,
            conflicts=self._conflicts,
            errors=self._errors,
        )

    def _range(self, prefix: str, start: str, limit: int | None) -> list[Entry]:
        with self._measured(self._read_seconds):
            return self._store._range(prefix, start, limit)

    def _keys(self, prefix: str, start: str, limit: int | None) -> list[str]:
        with self._measured(self._read_seconds):
            return self._store._keys(prefix, start, limit)

    def _commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Mapping[str, str]:
        with self._measured(self._commit_seconds):
            return self._store._commit(checks, writes)

    def purge(self, keys: Sequence[str]) -> None:
        with self._measured(self._commit_seconds):
            self._store.purge(keys)

    def _lease(self, ttl_seconds: int) -> Lease:
        return self._store._lease(ttl_seconds)

    @contextlib.contextmanager
    def _measured(self, stopwatch: Stopwatch) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        except ConflictError:
            self._conflicts += 1
            raise
        except TidelogError:
            self._errors += 1
            raise
        finally:
            stopwatch.add(time.monotonic() - begin)
