"""Guarded entries: a batch that is refused, on every replica alike, when what it was made from has changed since.

Between the moment when a batch is made and the moment when its place in the log is decided, other entries may come
first, from other nodes too. No lock of one node can prevent that. So the batch takes along what was read for it, and
whoever applies the log compares that with the state just before the batch. The state there is the same on every
replica, and so is the verdict: nothing needs to be agreed on.

    Guarded(batch, reads)     reads: ObjectRead(bucket, key, seq of the version that was seen, 0 for none)
                                     ListingRead(bucket, prefix, digest of the keys and seqs that were listed)

A refused one changes nothing and leaves no trace in the engine: `applied_seq` passes over its seq. Replaying the log
comes to the same verdict, since the same state is before it.

What this relies on: a seq names one version for ever. An entry that was read, thrown away by a rollback and replaced by
another of the same seq would look unchanged; so read for a guarded entry only what can no longer be rolled back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Protocol

import msgspec

from tidelog.engine.entry import Batch
from tidelog.engine.results import ObjectInfo, StoredObject
from tidelog.errors import NotFoundError

_DIGEST_BYTES = 16


class Readable(Protocol):
    """What is asked of an engine here: its state at a seq."""

    @property
    def applied_seq(self) -> int: ...

    def read(self, bucket: str, key: str, seq: int | None = None) -> StoredObject: ...

    def has_bucket(self, bucket: str, seq: int | None = None) -> bool: ...

    def find_object(self, bucket: str, key: str, seq: int | None = None) -> ObjectInfo | None: ...

    def list_objects(self, bucket: str, prefix: str = "", seq: int | None = None) -> Iterator[ObjectInfo]: ...


class ObjectRead(msgspec.Struct, frozen=True, tag=True):
    """A version of an object that was seen, or with 0 that none was."""

    bucket: str
    key: str
    seq: int

    def changed(self, engine: Readable) -> str | None:
        """What is different now, in words."""
        info = engine.find_object(self.bucket, self.key)
        if self.seq == (0 if info is None else info.seq):
            return None
        seen = f"its version of seq {self.seq}" if self.seq else "that it was not there"
        return f"{self.bucket!r}/{self.key!r} was changed: {seen} was read, and is no longer true"


class ListingRead(msgspec.Struct, frozen=True, tag=True):
    """What was listed, as a digest, so that what was added is noticed too."""

    bucket: str
    prefix: str
    digest: bytes

    def changed(self, engine: Readable) -> str | None:
        """What is different now, in words."""
        if self.digest == listing_digest(find_objects(engine, self.bucket, self.prefix)):
            return None
        return f"the objects of {self.bucket!r} with the prefix {self.prefix!r} were changed since they were listed"


Read = ObjectRead | ListingRead


class Guarded(msgspec.Struct, frozen=True, tag=True):
    """A batch with what was read for it. `orchestrator.apply_entries` knows what to do with it; an engine does not."""

    batch: Batch
    reads: tuple[Read, ...]

    def refusal(self, engine: Readable) -> str | None:
        """Why it must not be applied to this state; None when it may."""
        return first_change(engine, self.reads)


def first_change(engine: Readable, reads: Iterable[Read]) -> str | None:
    """The first of the reads that would come out differently now."""
    return next((found for read in reads if (found := read.changed(engine)) is not None), None)


def find_objects(engine: Readable, bucket: str, prefix: str, seq: int | None = None) -> list[ObjectInfo] | None:
    """What is in a bucket; None when there is no such bucket."""
    try:
        return list(engine.list_objects(bucket, prefix, seq))
    except NotFoundError:
        return None


def listing_digest(listing: Iterable[ObjectInfo] | None) -> bytes:
    """The same for the same keys with the same seqs; that of no bucket is that of no other listing."""
    if listing is None:
        return b""
    found = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for info in listing:
        found.update(info.key.encode("utf-8") + b"\0" + info.seq.to_bytes(8, "little"))
    return found.digest()
