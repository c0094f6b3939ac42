"""The metadata store interface.

Invariants
- `commit` is atomic. ConflictError means that nothing was written; StoreUnavailableError means that the outcome is
  unknown, and that reading back did not tell.
- A version is never reused for a key, not even after the key was deleted and created again: an entry that still has
  the version that was read is unchanged.
- Keys are those of `keys.check_key`; ranges are in their order, over a prefix that ends in a slash.
- An error while reading is an error. None and an empty list mean that the store has answered.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from tidelog.clock import Clock, Histogram, Stopwatch
from tidelog.errors import (
    ConflictError,
    DataError,
    InputError,
    LeaseLostError,
    NotSupportedError,
    StoreUnavailableError,
    TidelogError,
)
from tidelog.store.keys import check_key, check_prefix
from tidelog.store.metadata.watch import PollingWatch, Watch
from tidelog.store.scheduler import in_parallel

# Leases: entries that vanish when their holder does.
#
# Invariants
# - A holder believes in its lease for less time than the server does: the time counts from before the request was sent.
#   A process that was paused for longer finds `is_held` false as soon as it looks, before it hears from the server.
# - A lost lease stays lost. A caller that needs one takes a new one.
# - Nothing here renews by itself: the holder calls `refresh`, as a rule from its background (`cold/lease.py`).


class Lease(ABC):
    """A granted lease."""

    def __init__(self, lease_id: int, ttl_seconds: int, clock: Clock, asked_at: float) -> None:
        self.lease_id = lease_id
        self.ttl_seconds = ttl_seconds
        self._clock = clock
        self._held_until = asked_at + ttl_seconds
        self._is_over = False

    @property
    def is_held(self) -> bool:
        """Whether it is certain that the server has not given up on us yet."""
        return not self._is_over and self._clock.monotonic() < self._held_until

    def refresh(self) -> None:
        """Another `ttl_seconds` from now; LeaseLostError when it is too late."""
        asked_at = self._clock.monotonic()
        if not self.is_held or not self._refresh():
            self._is_over = True
            raise LeaseLostError(f"the lease {self.lease_id} ran out", hint="Take a new one")
        self._held_until = asked_at + self.ttl_seconds

    def revoke(self) -> None:
        """Gives it back at once, with everything that hangs on it. Twice is fine."""
        if not self._is_over:
            self._is_over = True
            self._revoke()

    @abstractmethod
    def _refresh(self) -> bool:
        """Asks the server; False when it knows the lease no more."""

    @abstractmethod
    def _revoke(self) -> None: ...


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

    @property
    def writes_at_once(self) -> int:
        """How many commits are made at once where there are many: more than one where each is a slow request."""
        return 1

    def change_mark(self) -> object | None:
        """Equal to an earlier mark if nothing was written since; None where it would cost as much as to look."""
        return None

    def watch(self, prefix: str) -> Watch:
        """Follows everything below a prefix (`watch.py`)."""
        return PollingWatch(self, check_prefix(prefix))

    def range(self, prefix: str, *, start: str | None = None, limit: int | None = None) -> list[Entry]:
        """What is below a prefix, from the key `start` on (inclusive), at most `limit` entries."""
        return self._range(*checked_range(prefix, start, limit))

    def keys(self, prefix: str, *, start: str | None = None, limit: int | None = None) -> list[str]:
        """As `range`, without the values: cheap in every store."""
        return self._keys(*checked_range(prefix, start, limit))

    def listed(
        self, prefix: str, takes: Callable[[str], bool], *, start: str | None = None, limit: int | None = None
    ) -> list[Entry]:
        """As `range`, with the values of only those keys of it that are taken."""
        names = self.keys(prefix, start=start, limit=limit)
        found = self.get_many([name for name in names if takes(name)])
        return [found[name] for name in names if name in found]

    def range_many(self, prefixes: Sequence[str]) -> list[list[Entry]]:
        """What is below each of these prefixes, as it was at some moment each: for prefixes with little below them."""
        return [self.range(prefix) for prefix in prefixes]

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

    def remove_many(self, versions: Mapping[str, str]) -> None:
        """As `remove`, of many keys with their versions. ConflictError if one has another: the others are removed."""
        keys = list(versions)
        conflicts = in_parallel(
            lambda key: self._conflict_of(key, versions[key]), keys, self.writes_at_once, "tidelog-remove"
        )
        self.purge([key for key, conflict in zip(keys, conflicts, strict=True) if conflict is None])
        for conflict in conflicts:
            if conflict is not None:
                raise conflict

    def _conflict_of(self, key: str, version: str) -> ConflictError | None:
        try:
            self.commit([Check(key, version)], [Delete(key)])
        except ConflictError as error:
            return error
        return None

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
            raise InputError(f"a lease must last longer than 0 seconds, not {ttl_seconds}")
        return self._lease(ttl_seconds)

    def copy_statistics(self) -> CopyStatistics | None:
        """How far behind the copy in the bucket is; None where there is none."""
        return None

    def copy_is_current(self, key: str) -> bool:
        """Whether the copy in the bucket is as new as this document, and as all that this process has changed of the
        topic, after an attempt to bring it up to date; of the prefix of a topic: as new as all of it. True where there
        is no copy.
        """
        return True

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


def checked_range(prefix: str, start: str | None, limit: int | None) -> tuple[str, str, int | None]:
    """What a range is asked for with, complete; InputError for what is no range."""
    check_prefix(prefix)
    if start is not None and not start.startswith(prefix):
        raise InputError(f"a range over {prefix!r} cannot start at {start!r}")
    if limit is not None and limit < 1:
        raise InputError(f"limit must be 1 or more, not {limit}")
    return prefix, prefix if start is None else start, limit


# Values with a stamp: how a writer finds its own write again, and how a version comes to be unique.
#
#     tidelog-entry 1 <write id, 32 hex digits> <crc32 of the value, 8 hex digits> <put | deleted>\n
#     <value>
#
# Invariants
# - Every write has an id of its own. A writer that does not know whether a write was done reads the entry and looks for
#   the id.
# - Two writes of the same value differ, so an etag that is a checksum of the content is a version.
# - `deleted` stands for an entry that is not there (where a store cannot delete on a condition); its value is empty.


_HEAD = re.compile(rb"tidelog-entry 1 ([0-9a-f]{32}) ([0-9a-f]{8}) (put|deleted)")


class Stamped(NamedTuple):
    """A value as it is stored."""

    write_id: str
    value: bytes
    is_deleted: bool


def new_write_id() -> str:
    """Unlike any other."""
    return secrets.token_hex(16)


def encode(write_id: str, value: bytes, *, is_deleted: bool = False) -> bytes:
    """The bytes to store."""
    kind = "deleted" if is_deleted else "put"
    return f"tidelog-entry 1 {write_id} {zlib.crc32(value):08x} {kind}\n".encode("ascii") + value


def decode(data: bytes, key: str) -> Stamped:
    """What is stored; DataError when it is not what was written."""
    head, newline, value = data.partition(b"\n")
    match = _HEAD.fullmatch(head)
    if not newline or match is None:
        raise DataError(f"{key} holds something that tidelog did not write")
    if int(match[2], 16) != zlib.crc32(value):
        raise DataError(f"the checksum of {key} does not match")
    return Stamped(match[1].decode("ascii"), value, match[3] == b"deleted")


DELETED_SIZE = len(encode("0" * 32, b"", is_deleted=True))


# Writing to a store that may not answer.
#
# A write without an answer was done, or was not, or will be. So: read back, and write again only what is safe to be
# written twice (the same stamp under the same condition). Only when that does not settle it the caller hears that it is
# undecided.


ATTEMPTS = 4
FIRST_PAUSE_SECONDS = 0.05
# A client retries by itself before it says that there was no answer: after that long, no more attempts are begun.
PATIENCE_SECONDS = 30.0

Versions = Mapping[str, str]


def settle(write: Callable[[], Versions], landed: Callable[[], Versions | None]) -> Versions:
    """The outcome of a write. `landed` reads back: the versions when the write is there, None when it is not seen.

    A conflict after an attempt without an answer proves nothing: that attempt may have been done and then replaced.
    """
    unanswered: StoreUnavailableError | None = None
    deadline = time.monotonic() + PATIENCE_SECONDS
    for attempt in range(ATTEMPTS):
        try:
            return write()
        except ConflictError as conflict:
            if unanswered is None:
                raise
            found = landed()
            if found is not None:
                return found
            raise _undecided(unanswered) from conflict
        except StoreUnavailableError as error:
            unanswered = error
        time.sleep(FIRST_PAUSE_SECONDS * 2**attempt)
        found = _landed_if_known(landed)
        if found is not None:
            return found
        if time.monotonic() > deadline:
            break
    assert unanswered is not None
    raise _undecided(unanswered) from unanswered


def _landed_if_known(landed: Callable[[], Versions | None]) -> Versions | None:
    try:
        return landed()
    except StoreUnavailableError:
        return None


def _undecided(error: StoreUnavailableError) -> StoreUnavailableError:
    return StoreUnavailableError(f"whether it was written is not known: {error.message}", hint="Read it and decide")


# Metadata stores that add something to another one.


class DelegatingMetadata(MetadataStore):
    """Passes everything on to the store that it was made with."""

    def __init__(self, store: MetadataStore) -> None:
        self.url = store.url
        self.store = store

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

    @property
    def writes_at_once(self) -> int:
        return self.store.writes_at_once

    def get(self, key: str) -> Entry | None:
        return self.store.get(key)

    def get_many(self, keys: Sequence[str]) -> dict[str, Entry]:
        return self.store.get_many(keys)

    def range_many(self, prefixes: Sequence[str]) -> list[list[Entry]]:
        return self.store.range_many(prefixes)

    def change_mark(self) -> object | None:
        return self.store.change_mark()

    def watch(self, prefix: str) -> Watch:
        return self.store.watch(prefix)

    def floor(self, prefix: str, key: str) -> Entry | None:
        return self.store.floor(prefix, key)

    def copy_statistics(self) -> CopyStatistics | None:
        return self.store.copy_statistics()

    def copy_is_current(self, key: str) -> bool:
        return self.store.copy_is_current(key)

    def purge(self, keys: Sequence[str]) -> None:
        self.store.purge(keys)

    def close(self) -> None:
        self.store.close()

    def _range(self, prefix: str, start: str, limit: int | None) -> list[Entry]:
        return self.store._range(prefix, start, limit)

    def _keys(self, prefix: str, start: str, limit: int | None) -> list[str]:
        return self.store._keys(prefix, start, limit)

    def _commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Mapping[str, str]:
        return self.store._commit(checks, writes)

    def _lease(self, ttl_seconds: int) -> Lease:
        return self.store._lease(ttl_seconds)


# A metadata store that counts: how many requests, how long they took, how many failed.


class CopyStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of the copy of the catalog in the bucket: how many documents of it are out of date, and for how
    long."""

    url: str
    behind: int
    behind_seconds: float
    errors: int
    last_error: str | None


class MetadataStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of a metadata store, seen from this process. `copy` is None where it has no copy in the bucket."""

    url: str
    reads: int
    read_seconds: Histogram
    commits: int
    commit_seconds: Histogram
    conflicts: int
    errors: int
    copy: CopyStatistics | None = None


class MeasuredMetadata(DelegatingMetadata):
    """Measures every request."""

    def __init__(self, store: MetadataStore) -> None:
        super().__init__(store)
        self._read_seconds = Stopwatch()
        self._commit_seconds = Stopwatch()
        self._conflicts = 0
        self._errors = 0

    def get(self, key: str) -> Entry | None:
        with self._measured(self._read_seconds):
            return self.store.get(key)

    def get_many(self, keys: Sequence[str]) -> dict[str, Entry]:
        with self._measured(self._read_seconds):
            return self.store.get_many(keys)

    def range_many(self, prefixes: Sequence[str]) -> list[list[Entry]]:
        with self._measured(self._read_seconds):
            return self.store.range_many(prefixes)

    def floor(self, prefix: str, key: str) -> Entry | None:
        with self._measured(self._read_seconds):
            return self.store.floor(prefix, key)

    def statistics(self) -> MetadataStatistics:
        reads, commits = self._read_seconds.snapshot(), self._commit_seconds.snapshot()
        return MetadataStatistics(
            url=self.url,
            reads=reads.count,
            read_seconds=reads,
            commits=commits.count,
            commit_seconds=commits,
            conflicts=self._conflicts,
            errors=self._errors,
            copy=self.copy_statistics(),
        )

    def _range(self, prefix: str, start: str, limit: int | None) -> list[Entry]:
        with self._measured(self._read_seconds):
            return self.store._range(prefix, start, limit)

    def _keys(self, prefix: str, start: str, limit: int | None) -> list[str]:
        with self._measured(self._read_seconds):
            return self.store._keys(prefix, start, limit)

    def _commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Mapping[str, str]:
        with self._measured(self._commit_seconds):
            return self.store._commit(checks, writes)

    def purge(self, keys: Sequence[str]) -> None:
        with self._measured(self._commit_seconds):
            self.store.purge(keys)

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
