"""Transactions: reads and writes that become one batch for the orchestrator's log.

    with engine.transaction() as tx:
        balance = int(tx.read("bank", "ann", for_update=True).data)
        tx.put("bank", "ann", b"%d" % (balance - 10))
        tx.put("bank", "bob", b"10")
        propose(tx.guarded())        # to the log; the locks are held until the block ends

An engine writes nothing but what its log tells it, so a transaction does not commit: it *prepares*. What is promised:

- **It reads one state.** Everything that it has read is true at `tx.seq`, with its own writes laid over it. That is the
  engine's applied seq when it begins, and moves forward when it locks something new (`locks.py` says why it may). What
  is read is locked first, and looked at where that lock was granted. A rollback makes other states of the same seqs: it
  lowers the applied seq before it changes anything, and ends all transactions when it is done. So a look after which
  neither is to be seen has seen the state that was meant.
- **Two-phase locks.** What it reads is locked in S, what it writes in X, a bucket that it lists in S, all until the end
  of the block. So transactions on one engine that meet wait for each other instead of failing, as long as each is in
  the log and applied before its block ends.
- **The log is the truth and never waits.** An entry that is applied counts as an X lock on what it writes, and wins: a
  conflicting transaction is aborted, with ConflictError at its next call. `batch` compares everything that was read
  with the newest state once more.
- **After that, the log decides.** Between `batch` and its place in the log other entries may still come first, from
  other nodes. `guarded` is the same batch with what was read, and is refused by every replica if that is no longer true
  (`read_set.py`). Use `batch` only where this engine's transactions are the only writers of what they read.
- Once prepared, a transaction is only waiting for its end: its own entry may be applied within the block, and ends it.

A write does not read: a blind put does not depend on what was there. Retry on ConflictError,
DeadlockError and a refused entry by running the whole block again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Final, Self, TypeVar

import msgspec

from tidelog.engine.entry import (
    Batch,
    CopyObject,
    CreateBucket,
    DeleteBucket,
    DeleteObject,
    Entry,
    ObjectInfo,
    Operation,
    PutObject,
    StoredObject,
    operations,
)
from tidelog.engine.txn.locks import LockManager, LockOwner, LockStatistics, Resource, S, X
from tidelog.engine.txn.read_set import (
    Guarded,
    ListingRead,
    ObjectRead,
    Read,
    Readable,
    VisibleState,
    find_objects,
    first_change,
    listing_digest,
)
from tidelog.errors import ClosedError, ConflictError, Hint, InputError, NotFoundError
from tidelog.store.aio import twin_of

# The write set: what a transaction has written itself, overlaid on the state that it reads.
#
# Invariants
# - Nothing here is shared: each transaction has its own, which ends with it.
# - `entries` are in the order in which they were made, and applying them to the state that the transaction reads gives
#   what `find`, `has_bucket` and `laid_over` show.
# - A bucket that the transaction created or deleted hides everything that was in it before (`hides`).


OWN_SEQ: Final = 0
"""The seq of what a transaction has written itself: it has none yet."""


class Original(msgspec.Struct, frozen=True):
    """An object of the state below, at another place now because it was copied. Its data is not looked at."""

    bucket: str
    key: str
    info: ObjectInfo


Value = PutObject | Original


class WriteSet:
    """The writes of one transaction."""

    def __init__(self) -> None:
        self.entries: list[Operation] = []
        self._buckets: dict[str, bool] = {}
        self._objects: dict[str, dict[str, Value | None]] = {}

    # Looking

    def has_bucket(self, bucket: str) -> bool | None:
        """True: created here; False: deleted here; None: ask the state below."""
        return self._buckets.get(bucket)

    def hides(self, bucket: str) -> bool:
        """Whether nothing of the state below is to be seen in this bucket."""
        return bucket in self._buckets

    def knows(self, bucket: str, key: str) -> bool:
        """Whether the answer about an object is here, and not in the state below."""
        return self.hides(bucket) or key in self._objects.get(bucket, ())

    def find(self, bucket: str, key: str) -> Value | None:
        """What an object is, if `knows`; None when it is not there."""
        return self._objects.get(bucket, {}).get(key)

    def laid_over(self, bucket: str, prefix: str, below: Iterable[ObjectInfo]) -> list[ObjectInfo]:
        """A listing of the state below, as it looks with these writes."""
        seen = {} if self.hides(bucket) else {info.key: info for info in below}
        for key, value in self._objects.get(bucket, {}).items():
            if not key.startswith(prefix):
                continue
            if value is None:
                seen.pop(key, None)
            else:
                seen[key] = ObjectInfo(key, size_of(value), OWN_SEQ)
        # By the bytes of UTF-8, as an engine lists; that is the order of code points too.
        return [seen[key] for key in sorted(seen)]

    # Writing

    def put(self, bucket: str, key: str, data: bytes, metadata: Mapping[str, object] | None) -> None:
        entry = PutObject(bucket, key, data, dict(metadata or {}))
        if not isinstance(entry.data, bytes):
            raise InputError(
                "a transaction puts bytes: it may read what it has put",
                hint="Apply a PutObject, or read the data first",
            )
        self._note(entry, bucket, key, entry)

    def delete(self, bucket: str, key: str) -> None:
        self._note(DeleteObject(bucket, key), bucket, key, None)

    def copy(self, entry: CopyObject, value: Value) -> None:
        self._note(entry, entry.dest_bucket, entry.dest_key, value)

    def _note(self, entry: Operation, bucket: str, key: str, value: Value | None) -> None:
        self.entries.append(entry)
        self._objects.setdefault(bucket, {})[key] = value

    def create_bucket(self, bucket: str) -> None:
        self.entries.append(CreateBucket(bucket))
        self._buckets[bucket] = True

    def delete_bucket(self, bucket: str, force: bool) -> None:
        self.entries.append(DeleteBucket(bucket, force))
        self._buckets[bucket] = False
        self._objects.pop(bucket, None)


def size_of(value: Value) -> int:
    """Bytes of data."""
    return len(value.data) if isinstance(value, PutObject) else value.info.size


DEFAULT_LOCK_TIMEOUT_SECONDS = 30.0

Answer = TypeVar("Answer")


class Transaction:
    """Reads and writes that become one atomic batch. For one thread or task at a time; use it in a `with` block."""

    def __init__(self, engine: Readable, locks: LockManager, timeout_seconds: float | None) -> None:
        self._engine = engine
        self._locks = locks
        self._timeout_seconds = timeout_seconds
        self._open_owner: LockOwner | None = None
        self._own = WriteSet()
        self._objects_read: dict[tuple[str, str], int] = {}
        self._listings_read: dict[tuple[str, str], bytes] = {}
        self._buckets_seen: set[str] = set()
        self._batch: Batch | None = None

    # Its beginning and its end

    def __enter__(self) -> Self:
        if self._open_owner is not None or self._batch is not None or self._own.entries:
            raise InputError("a transaction is used once", hint="Begin a new one")
        self._open_owner = owner = self._locks.begin()
        owner.seq = self._engine.applied_seq  # after `begin`, so that no entry comes in between unnoticed
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open_owner is not None:
            self._locks.release_all(self._open_owner)
            self._open_owner = None

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    @property
    def seq(self) -> int:
        """The seq at which it reads."""
        return self._owner.seq

    @property
    def _owner(self) -> LockOwner:
        if self._open_owner is None:
            raise ClosedError("the transaction is not open", hint="Use it inside its `with` block")
        return self._open_owner

    # Locks

    def lock(self, bucket: str, key: str | None = None, *, exclusive: bool = False) -> None:
        """Locks a key, or a whole bucket, before it is read or written."""
        owner = self._working()
        mode = X if exclusive else S
        if key is None:
            self._locks.acquire(owner, bucket, mode, self._timeout_seconds)
        else:
            self._locks.acquire_key(owner, bucket, key, mode, self._timeout_seconds)

    @twin_of(lock)
    async def lock_async(self, bucket: str, key: str | None = None, *, exclusive: bool = False) -> None:
        """What is locked so needs no waiting when it is used."""
        owner = self._working()
        mode = X if exclusive else S
        if key is None:
            await self._locks.acquire_async(owner, bucket, mode, self._timeout_seconds)
        else:
            await self._locks.acquire_key_async(owner, bucket, key, mode, self._timeout_seconds)

    def _working(self) -> LockOwner:
        """The owner, if this may still read and write."""
        owner = self._owner
        self._check(owner)
        if self._batch is not None:
            raise InputError("the transaction is prepared and can no longer change", hint="Begin a new one")
        return owner

    def _check(self, owner: LockOwner) -> None:
        self._locks.check(owner)
        if owner.seq > self._engine.applied_seq:
            raise ConflictError("entries are being rolled back", hint="Run the transaction again")

    # Reading

    def _look(self, look: Callable[[int], Answer]) -> Answer:
        """What the engine's state is at this transaction's seq, unless that was rolled back meanwhile."""
        owner = self._owner
        try:
            return look(owner.seq)
        finally:
            self._check(owner)

    def read(self, bucket: str, key: str, *, for_update: bool = False) -> StoredObject:
        """Returns an object as this transaction sees it; `for_update` locks it for writing. Own writes have the seq 0.

        Without `for_update`, two transactions that read and then write the same key are a deadlock: one of them fails.
        """
        self.lock(bucket, key, exclusive=for_update)
        if self._own.knows(bucket, key):
            return self._read_own(bucket, key)
        try:
            found = self._look(lambda seq: self._engine.read(bucket, key, seq))
        except NotFoundError:
            self._note_read(bucket, key, 0)
            raise
        self._note_read(bucket, key, found.seq)
        return found

    def _read_own(self, bucket: str, key: str) -> StoredObject:
        value = self._own.find(bucket, key)
        if value is None:
            raise NotFoundError(f"no object {key!r} in bucket {bucket!r}: the transaction deleted it")
        if isinstance(value, PutObject):
            return StoredObject(value.data, value.metadata, OWN_SEQ, "hot")
        source = self._look(lambda seq: self._engine.read(value.bucket, value.key, seq))
        return StoredObject(source.data, source.metadata, OWN_SEQ, source.tier)

    def list_objects(self, bucket: str, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yields the objects of a bucket as this transaction sees them, sorted by key. It locks the bucket."""
        self.lock(bucket)
        self._require_bucket(bucket)
        below: list[ObjectInfo] = []
        if not self._own.hides(bucket):
            found = self._look(lambda seq: find_objects(self._engine, bucket, prefix, seq))
            below = found or []
            self._note_listing(bucket, prefix, listing_digest(below))
        return iter(self._own.laid_over(bucket, prefix, below))

    def _note_read(self, bucket: str, key: str, seq: int) -> None:
        if self._objects_read.setdefault((bucket, key), seq) != seq:
            raise ConflictError(f"{bucket!r}/{key!r} was changed during the transaction", hint="Run it again")

    def _note_listing(self, bucket: str, prefix: str, digest: bytes) -> None:
        if self._listings_read.setdefault((bucket, prefix), digest) != digest:
            raise ConflictError(f"bucket {bucket!r} was changed during the transaction", hint="Run it again")

    def _require_bucket(self, bucket: str) -> None:
        if not self._has_bucket(bucket):
            raise NotFoundError(f"no bucket {bucket!r}", hint="Create it first")

    def _has_bucket(self, bucket: str) -> bool:
        own = self._own.has_bucket(bucket)
        if own is not None or bucket in self._buckets_seen:
            return own is not False
        if not self._look(lambda seq: self._engine.has_bucket(bucket, seq)):
            return False
        self._buckets_seen.add(bucket)  # it stays, as long as the transaction does: there is a lock on it
        return True

    # Writing

    def put(self, bucket: str, key: str, data: bytes, metadata: Mapping[str, object] | None = None) -> None:
        """Writes a new version of an object."""
        self.lock(bucket, key, exclusive=True)
        self._require_bucket(bucket)
        self._own.put(bucket, key, data, metadata)

    def delete(self, bucket: str, key: str) -> None:
        """Deletes an object; it need not exist."""
        self.lock(bucket, key, exclusive=True)
        self._require_bucket(bucket)
        self._own.delete(bucket, key)

    def copy(self, src_bucket: str, src_key: str, dest_bucket: str, dest_key: str) -> None:
        """Writes a new version of an object with data and metadata of another, without reading them."""
        self.lock(src_bucket, src_key)
        self.lock(dest_bucket, dest_key, exclusive=True)
        self._require_bucket(dest_bucket)
        entry = CopyObject(src_bucket, src_key, dest_bucket, dest_key)
        self._own.copy(entry, self._source(src_bucket, src_key))

    def _source(self, bucket: str, key: str) -> Value:
        if self._own.knows(bucket, key):
            own = self._own.find(bucket, key)
            if own is None:
                raise NotFoundError(f"no object {key!r} in bucket {bucket!r}: the transaction deleted it")
            return own
        info = self._look(lambda seq: self._engine.find_object(bucket, key, seq))
        self._note_read(bucket, key, 0 if info is None else info.seq)
        if info is None:
            raise NotFoundError(f"no object {key!r} in bucket {bucket!r}")
        return Original(bucket, key, info)

    def create_bucket(self, bucket: str) -> None:
        """Creates an empty bucket."""
        self.lock(bucket, exclusive=True)
        if self._has_bucket(bucket):
            raise InputError(f"bucket {bucket!r} already exists")
        self._own.create_bucket(bucket)

    def delete_bucket(self, bucket: str, force: bool = False) -> None:
        """Deletes a bucket; one with objects only with `force`."""
        self.lock(bucket, exclusive=True)
        self._require_bucket(bucket)
        if not force and any(True for _ in self.list_objects(bucket)):
            raise InputError(
                f"bucket {bucket!r} is not empty",
                hint=Hint(
                    "Delete its objects first, or give force=True", 'Delete its objects first, or give "force": true'
                ),
            )
        self._own.delete_bucket(bucket, force)

    # Its result

    def batch(self) -> Batch:
        """Checks that everything read is unchanged and returns the writes as one batch. Afterwards it takes no more."""
        if self._batch is None:
            self._working()
            if not self._own.entries:
                raise InputError("the transaction wrote nothing")
            changed = first_change(VisibleState(self._engine), self.reads())
            if changed is not None:
                raise ConflictError(changed, hint="Run the whole transaction again")
            self._owner.is_ingested = True
            self._batch = Batch(tuple(self._own.entries))
        return self._batch

    def guarded(self) -> Guarded:
        """Like `batch`, with the reads: replicas refuse it if an earlier entry of the log changed one of them."""
        return Guarded(self.batch(), self.reads())

    def reads(self) -> tuple[Read, ...]:
        """The reads of the engine's state, with the versions that were seen."""
        objects = [ObjectRead(bucket, key, seq) for (bucket, key), seq in self._objects_read.items()]
        listings = [ListingRead(bucket, prefix, digest) for (bucket, prefix), digest in self._listings_read.items()]
        return (*objects, *listings)


class Transactions:
    """The transactions of one engine, for the engine.

    It calls `settle` after entries have become visible (`applied_seq` is moved), before it applies the next ones, and
    `rolled_back` after a rollback.
    """

    def __init__(self) -> None:
        self.locks = LockManager()

    def begin(self, engine: Readable, timeout_seconds: float | None = DEFAULT_LOCK_TIMEOUT_SECONDS) -> Transaction:
        """A new one, to be used as a context manager; it waits for a lock no longer than that."""
        return Transaction(engine, self.locks, timeout_seconds)

    def settle(self, seq: int, entries: Iterable[Entry]) -> None:
        """Entries up to `seq` were applied. Nearly free while no transaction is open."""
        if self.locks.owners:
            self.locks.settle(seq, (resource for entry in entries for resource in written(entry)))

    def rolled_back(self, seq: int) -> None:
        """Everything after `seq` was taken back."""
        self.locks.roll_back(seq)

    def close(self) -> None:
        """The engine is closing: waiters for locks get an error."""
        self.locks.close()

    def statistics(self) -> LockStatistics:
        return self.locks.statistics()


def written(entry: Entry) -> Iterator[Resource]:
    """What an entry writes: buckets as a whole, and keys."""
    for operation in operations(entry):
        if isinstance(operation, CreateBucket | DeleteBucket):
            yield operation.bucket
        elif isinstance(operation, CopyObject):
            yield operation.dest_bucket, operation.dest_key
        else:
            yield operation.bucket, operation.key
