"""What the state allows: whether an entry can be applied, and why not.

Invariants
- The answer depends on the entries before and on nothing else, so it is the same on every replica.
- A batch is looked at as a whole, each operation after those before it; one that is refused refuses all of it. To
  delete an object that is not there is allowed, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, starmap

from tidelog.engine.entry import CopyObject, CreateBucket, DeleteBucket, DeleteObject, Operation, PutObject
from tidelog.engine.guard import Guarded
from tidelog.engine.results import ObjectInfo
from tidelog.engine.version_keys import MAX_SEQ
from tidelog.engine.versions import Versions


class Rules:
    """The newest state, as the operations of one entry find it."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions

    def refusal_of_guarded(self, guarded: Guarded, operations: tuple[Operation, ...]) -> str | None:
        """The same for what must also find true what was read for it."""
        return guarded.refusal(self) or self.refusal(operations)

    def seq_of(self, bucket: str, key: str) -> int:
        """The seq of the newest version of an object that is to be seen; 0 for none. For guards."""
        found = self._versions.find(bucket, key, MAX_SEQ)
        return 0 if found is None else found.seq

    def listing(self, bucket: str, prefix: str) -> Iterator[ObjectInfo] | None:
        """The objects of a bucket; None when there is no such bucket. For guards."""
        if not self.allows_put(bucket):
            return None
        return starmap(ObjectInfo, chain.from_iterable(self._versions.objects(bucket, prefix, MAX_SEQ)))

    def refusal(self, operations: tuple[Operation, ...]) -> str | None:
        """Why the entry cannot be applied; None when it can."""
        if len(operations) == 1:
            return _State(self._versions).refusal(operations[0])
        state = _State(self._versions)
        for number, operation in enumerate(operations):
            reason = state.refusal(operation)
            if reason is not None:
                return f"operation {number}: {reason}"
            state.note(operation)
        return None

    def allows_put(self, bucket: str) -> bool:
        """The short way for the entry that there is most of."""
        return self._versions.buckets.created(bucket, MAX_SEQ) is not None


class _State:
    """The state with the changes of a batch that is not applied yet."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self._buckets: dict[str, bool] = {}
        self._objects: dict[tuple[str, str], bool] = {}

    def refusal(self, operation: Operation) -> str | None:
        match operation:
            case CreateBucket(bucket):
                return f"there is a bucket {bucket!r} already" if self._has_bucket(bucket) else None
            case DeleteBucket(bucket, force):
                return self._refusal_of_delete(bucket, force=force)
            case CopyObject(src_bucket, src_key, dest_bucket, _):
                return (
                    self._no_bucket(src_bucket) or self._no_object(src_bucket, src_key) or self._no_bucket(dest_bucket)
                )
            case PutObject(bucket) | DeleteObject(bucket):
                return self._no_bucket(bucket)

    def note(self, operation: Operation) -> None:
        """The operation is done, as far as those after it are concerned."""
        match operation:
            case CreateBucket(bucket):
                self._buckets[bucket] = True
            case DeleteBucket(bucket):
                self._buckets[bucket] = False
                self._objects = {name: there for name, there in self._objects.items() if name[0] != bucket}
            case PutObject(bucket, key) | CopyObject(_, _, bucket, key):
                self._objects[bucket, key] = True
            case DeleteObject(bucket, key):
                self._objects[bucket, key] = False

    def _refusal_of_delete(self, bucket: str, *, force: bool) -> str | None:
        missing = self._no_bucket(bucket)
        if missing is not None or force or self._is_empty(bucket):
            return missing
        return f"the bucket {bucket!r} is not empty"

    def _no_bucket(self, bucket: str) -> str | None:
        return None if self._has_bucket(bucket) else f"there is no bucket {bucket!r}"

    def _no_object(self, bucket: str, key: str) -> str | None:
        return None if self._has_object(bucket, key) else f"there is no object {key!r} in {bucket!r}"

    def _has_bucket(self, bucket: str) -> bool:
        known = self._buckets.get(bucket)
        return self._versions.buckets.created(bucket, MAX_SEQ) is not None if known is None else known

    def _has_object(self, bucket: str, key: str) -> bool:
        known = self._objects.get((bucket, key))
        if known is not None:
            return known
        # A bucket that this batch has made has none of the objects of an earlier one of that name.
        return bucket not in self._buckets and self._versions.find(bucket, key, MAX_SEQ) is not None

    def _is_empty(self, bucket: str) -> bool:
        if any(there for (name, _), there in self._objects.items() if name == bucket):
            return False
        if bucket in self._buckets:
            return True
        return all(self._objects.get((bucket, key)) is False for key in self._versions.names(bucket, MAX_SEQ))
