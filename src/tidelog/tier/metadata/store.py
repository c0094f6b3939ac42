"""What tidelog asks of a metadata store.

Invariants
- `commit` does all of its writes or none. ConflictError means none; StoreUnavailableError means that it is not known,
  and that reading back did not tell.
- A version is never used twice for a key, not even after the key was deleted and made again: what was read and has
  its version still is unchanged.
- Keys are those of `keys.check_key`; ranges are in their order, over a prefix that ends in a slash.
- An error while reading is an error. None and an empty list mean that the store has answered.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from tidelog.errors import InputError, NotSupportedError
from tidelog.tier.keys import check_key, check_prefix
from tidelog.tier.metadata.lease import Lease

# etcd takes 1.5 MiB in one request, its own overhead included.
MAX_VALUE_BYTES = 1 << 20


class Entry(NamedTuple):
    """A value, and the version to name in a `Check`. Versions are opaque."""

    key: str
    value: bytes
    version: str


class Check(NamedTuple):
    """The key must have this version; None: it must not be there."""

    key: str
    version: str | None


class Put(NamedTuple):
    """Writes a value; with a lease it vanishes when the lease does."""

    key: str
    value: bytes
    lease: Lease | None = None


class Delete(NamedTuple):
    """Removes a key. That it is not there is fine."""

    key: str


Write = Put | Delete


class MetadataStore(ABC):
    """An open metadata store. Threads may share it."""

    url: str

    @property
    @abstractmethod
    def supports_multi_key(self) -> bool:
        """Whether one `commit` may name several keys. Without it: one key, checked and written or either."""

    @property
    @abstractmethod
    def supports_leases(self) -> bool: ...

    @property
    def floor_is_cheap(self) -> bool:
        """Whether `floor` costs about as much as `get`; a store that lists forwards only has to read names up to it."""
        return True

    @abstractmethod
    def get(self, key: str) -> Entry | None: ...

    @property
    def reads_many_at_once(self) -> bool:
        """Whether `get_many` takes one request for many keys."""
        return False

    def get_many(self, keys: Sequence[str]) -> dict[str, Entry]:
        """The entries of those among these keys that are there, as they were at some moment each."""
        found = [self.get(key) for key in keys]
        return {entry.key: entry for entry in found if entry is not None}

    def change_mark(self) -> object | None:
        """Equal to an earlier mark if nothing was written since; None where it would cost as much as to look."""
        return None

    def range(self, prefix: str, *, start: str | None = None, limit: int | None = None) -> list[Entry]:
        """What is below a prefix, from the key `start` on (inclusive), at most `limit` entries."""
        return self._range(*_checked_range(prefix, start, limit))

    def keys(self, prefix: str, *, start: str | None = None, limit: int | None = None) -> list[str]:
        """As `range`, without the values: cheap in every store."""
        return self._keys(*_checked_range(prefix, start, limit))

    @abstractmethod
    def floor(self, prefix: str, key: str) -> Entry | None:
        """The last entry below the prefix whose key is `key` or before it."""

    def put(self, key: str, value: bytes) -> str:
        """Writes whatever was there before. Returns the new version."""
        return self.commit([], [Put(key, value)])[key]

    def delete(self, key: str) -> None:
        """Removes whatever was there. That it is not there is fine."""
        self.commit([], [Delete(key)])

    def remove(self, key: str, version: str) -> None:
        """Removes an entry that has this version, else ConflictError, and leaves no trace of it.

        For keys that nobody makes again: where deleting on a condition leaves something behind, that goes without one.
        """
        self.commit([Check(key, version)], [Delete(key)])
        self.purge([key])

    def purge(self, keys: Sequence[str]) -> None:
        """Takes away what deleting on a condition left behind under keys that are not there, and nobody makes again.

        Nothing is left behind, unless a store says otherwise.
        """
        for key in keys:
            check_key(key)

    def commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Mapping[str, str]:
        """If all checks hold, does all writes at once, else ConflictError. Returns the versions of what was put."""
        self._refuse_what_cannot_be(checks, writes)
        return self._commit(checks, writes)

    def lease(self, ttl_seconds: int) -> Lease:
        """A new lease. Its holder refreshes it in time."""
        if not self.supports_leases:
            raise NotSupportedError(f"{self.url} has no leases", hint="etcd:// and memory:// have")
        if ttl_seconds < 1:
            raise InputError(f"a lease of {ttl_seconds} seconds is none")
        return self._lease(ttl_seconds)

    @abstractmethod
    def close(self) -> None:
        """Closing twice is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"

    @abstractmethod
    def _range(self, prefix: str, start: str, limit: int | None) -> list[Entry]: ...

    @abstractmethod
    def _keys(self, prefix: str, start: str, limit: int | None) -> list[str]: ...

    @abstractmethod
    def _commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Mapping[str, str]: ...

    def _lease(self, ttl_seconds: int) -> Lease:
        raise NotSupportedError(f"{self.url} has no leases")

    def _refuse_what_cannot_be(self, checks: Sequence[Check], writes: Sequence[Write]) -> None:
        checked = [check_key(check.key) for check in checks]
        written = [check_key(write.key) for write in writes]
        if len(set(checked)) < len(checked) or len(set(written)) < len(written):
            raise InputError("a key is checked or written twice in one commit")
        if len({*checked, *written}) > 1 and not self.supports_multi_key:
            message = f"{self.url} changes one key at a time, not {len({*checked, *written})}"
            raise NotSupportedError(message, hint="`supports_multi_key` says which stores can")
        for write in writes:
            if isinstance(write, Put):
                self._refuse_put(write)

    def _refuse_put(self, put: Put) -> None:
        if len(put.value) > MAX_VALUE_BYTES:
            raise InputError(f"the value of {put.key} has {len(put.value)} bytes, over {MAX_VALUE_BYTES}")
        if put.lease is not None and not self.supports_leases:
            raise NotSupportedError(f"{self.url} has no leases", hint="etcd:// and memory:// have")


def end_of(prefix: str) -> str:
    """The first key that is behind everything below a prefix: `0` comes right after the slash."""
    return prefix[:-1] + "0" if prefix else "\x7f"


def numeric_version(check: Check) -> int:
    """The version in a check, for stores that count; 0 stands for "not there"."""
    if check.version is None:
        return 0
    if not check.version.isascii() or not check.version.isdecimal() or check.version == "0":
        raise InputError(f"{check.version!r} is not a version of this store")
    return int(check.version)


def _checked_range(prefix: str, start: str | None, limit: int | None) -> tuple[str, str, int | None]:
    check_prefix(prefix)
    if start is not None and not start.startswith(prefix):
        raise InputError(f"a range over {prefix!r} cannot start at {start!r}")
    if limit is not None and limit < 1:
        raise InputError(f"a range of {limit} entries is none")
    return prefix, prefix if start is None else start, limit
