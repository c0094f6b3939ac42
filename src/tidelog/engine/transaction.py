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
  transaction in its way is over, and told by ConflictError at its next call. `batch` compares everything that was read
  with the newest state once more.
- **After that, the log decides.** Between `batch` and its place in the log other entries may still come first, from
  other nodes. `guarded` is the same batch with what was read, and is refused by every replica if that is no longer true
  (`guard.py`). Use `batch` only where this engine's transactions are the only writers of what they read.
- Once prepared, a transaction is only waiting for its end: its own entry may be applied within the block, and ends it.

A write does not read: whoever puts without having read does not mind what was there. Retry on ConflictError,
DeadlockError and a refused entry by running the whole block again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Self, TypeVar

from tidelog.engine.entry import Batch, CopyObject, CreateBucket, DeleteBucket, Entry, PutObject, operations
from tidelog.engine.guard import (
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
from tidelog.engine.lock_modes import S, X
from tidelog.engine.locks import LockManager, LockOwner, LockStatistics, Resource
from tidelog.engine.own_writes import OWN_SEQ, Original, OwnWrites, Value
from tidelog.engine.results import ObjectInfo, StoredObject
from tidelog.errors import ClosedError, ConflictError, InputError, NotFoundError

DEFAULT_LOCK_TIMEOUT_SECONDS = 30.0

Answer = TypeVar("Answer")


class Transaction:
    """One of them; see the module. For one thread or task at a time."""

    def __init__(self, engine: Readable, locks: LockManager, timeout_seconds: float | None) -> None:
        self._engine = engine
        self._locks = locks
        self._timeout_seconds = timeout_seconds
        self._open_owner: LockOwner | None = None
        self._own = OwnWrites()
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
        """Where it reads."""
        return self._owner.seq

    @property
    def _owner(self) -> LockOwner:
        if self._open_owner is None:
            raise ClosedError("the transaction is not open", hint="Use it inside of its `with` block")
        return self._open_owner

    # Locks

    def lock(self, bucket: str, key: str | None = None, *, exclusive: bool = False) -> None:
        """A lock on a key or on a whole bucket, now rather than when it is read or written."""
        owner = self._working()
        mode = X if exclusive else S
        if key is None:
            self._locks.acquire(owner, bucket, mode, self._timeout_seconds)
        else:
            self._locks.acquire_key(owner, bucket, key, mode, self._timeout_seconds)

    async def lock_async(self, bucket: str, key: str | None = None, *, exclusive: bool = False) -> None:
        """As `lock`, with the same limit of time, without blocking the event loop.

        What is locked so needs no waiting when it is used.
        """
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
            raise InputError("the transaction is prepared: its batch has been made", hint="Begin a new one")
        return owner

    def _check(self, owner: LockOwner) -> None:
        self._locks.check(owner)
        if owner.seq > self._engine.applied_seq:
            raise ConflictError("the log's end is being rolled back", hint="Run the transaction once more")

    # Reading

    def _look(self, look: Callable[[int], Answer]) -> Answer:
        """What the engine's state is at this transaction's seq, unless that was rolled back meanwhile."""
        owner = self._owner
        try:
            return look(owner.seq)
        finally:
            self._check(owner)

    def read(self, bucket: str, key: str, *, for_update: bool = False) -> StoredObject:
        """An object as this transaction sees it; the seq of its own writes is 0. `for_update` locks it for writing.

        To read first and write later without `for_update` works, and two that do so with one key are a deadlock.
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
        """The objects of a bucket as this transaction sees them, sorted. It locks the bucket and holds the listing."""
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
            raise ConflictError(f"{bucket!r}/{key!r} was changed during the transaction", hint="Run it once more")

    def _note_listing(self, bucket: str, prefix: str, digest: bytes) -> None:
        if self._listings_read.setdefault((bucket, prefix), digest) != digest:
            raise ConflictError(f"bucket {bucket!r} was changed during the transaction", hint="Run it once more")

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
        """A new version of an object."""
        self.lock(bucket, key, exclusive=True)
        self._require_bucket(bucket)
        self._own.put(bucket, key, data, metadata)

    def delete(self, bucket: str, key: str) -> None:
        """Deletes an object; one that is not there may be deleted too."""
        self.lock(bucket, key, exclusive=True)
        self._require_bucket(bucket)
        self._own.delete(bucket, key)

    def copy(self, src_bucket: str, src_key: str, dest_bucket: str, dest_key: str) -> None:
        """A new version of one object with data and metadata of another, which is not read."""
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
        """A new, empty bucket."""
        self.lock(bucket, exclusive=True)
        if self._has_bucket(bucket):
            raise InputError(f"there is a bucket {bucket!r} already")
        self._own.create_bucket(bucket)

    def delete_bucket(self, bucket: str, force: bool = False) -> None:
        """Ends a bucket: one without objects, or with `force` any."""
        self.lock(bucket, exclusive=True)
        self._require_bucket(bucket)
        if not force and any(True for _ in self.list_objects(bucket)):
            raise InputError(f"bucket {bucket!r} is not empty", hint="Delete its objects first, or give force=True")
        self._own.delete_bucket(bucket, force)

    # Its result

    def batch(self) -> Batch:
        """The writes, in order, after everything that was read was found unchanged. Nothing may be added any more."""
        if self._batch is None:
            self._working()
            if not self._own.entries:
                raise InputError("the transaction has written nothing, so there is nothing for the log")
            changed = first_change(VisibleState(self._engine), self.reads())
            if changed is not None:
                raise ConflictError(changed, hint="Run the whole transaction once more")
            self._owner.is_prepared = True
            self._batch = Batch(tuple(self._own.entries))
        return self._batch

    def guarded(self) -> Guarded:
        """As `batch`, with what was read: replicas refuse it if that has changed before its place in the log."""
        return Guarded(self.batch(), self.reads())

    def reads(self) -> tuple[Read, ...]:
        """What was read of the engine's state, with the versions that were seen."""
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
        if self.locks.has_owners():
            self.locks.settle(seq, (resource for entry in entries for resource in written(entry)))

    def rolled_back(self, seq: int) -> None:
        """Everything after `seq` was taken back."""
        self.locks.roll_back(seq)

    def close(self) -> None:
        """The engine goes: whoever waits for a lock is told."""
        self.locks.close()

    def statistics(self) -> LockStatistics:
        """An immutable snapshot."""
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
