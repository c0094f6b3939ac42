"""What a transaction has written itself, laid over the state that it reads.

Invariants
- Nothing here is shared: a transaction has one of these, and it is gone with it.
- `entries` are in the order in which they were made, and applying them to the state that the transaction reads gives
  what `find`, `has_bucket` and `laid_over` show.
- A bucket that the transaction created or deleted hides everything that was in it before (`hides`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from tidelog.engine.entry import CopyObject, CreateBucket, DeleteBucket, DeleteObject, Operation, PutObject
from tidelog.engine.results import ObjectInfo

OWN_SEQ: Final = 0
"""The seq of what a transaction has written itself: it has none yet."""


class Original(msgspec.Struct, frozen=True):
    """An object of the state below, at another place now because it was copied. Its data is not looked at."""

    bucket: str
    key: str
    info: ObjectInfo


Value = PutObject | Original


class OwnWrites:
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
