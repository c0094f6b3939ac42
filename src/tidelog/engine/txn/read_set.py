"""Read sets and guarded entries: a batch that every replica refuses alike if what it read has changed since; and the
encoding of entries.

Between the moment when a batch is made and the moment when its position in the log is decided, other entries may come
first, from other nodes too. No lock of one node can prevent that. So the batch carries its read set, and an engine that
applies it compares that with the state just before the batch (optimistic validation). That state is the same on every
replica, and so is the verdict: no agreement is needed.

    Guarded(batch, reads)     reads: ObjectRead(bucket, key, seq of the version that was seen, 0 for none)
                                     ListingRead(bucket, prefix, digest of the keys and seqs that were listed)
                                     NeverTrue(reason): of an entry that was refused where it comes from

Invariants
- The engine decides once, at the entry's position in the log and under the engine's lock: the state just before an
  entry has all entries before it, visible or not, and never the entry itself.
- A refused entry changes nothing, and is logged as refused, like any other. So its seq is used, here and wherever that
  log is applied, and the same entry again gets the same answer.

What this relies on: a seq names one version forever. An entry that was read, discarded by a rollback and replaced by
another of the same seq would look unchanged; so read for a guarded entry only what can no longer be rolled back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Final, Protocol

import msgspec
from msgspec.structs import force_setattr

from tidelog.engine.entry import Batch, Entry, ObjectInfo, PutObject, StoredObject, has_condition, operations
from tidelog.errors import DataError, InputError, NotFoundError

_DIGEST_BYTES = 16


class Readable(Protocol):
    """What is asked of an engine here: its state at a seq."""

    @property
    def applied_seq(self) -> int: ...

    def read(self, bucket: str, key: str, seq: int | None = None) -> StoredObject: ...

    def has_bucket(self, bucket: str, seq: int | None = None) -> bool: ...

    def find_object(self, bucket: str, key: str, seq: int | None = None) -> ObjectInfo | None: ...

    def list_objects(self, bucket: str, prefix: str = "", seq: int | None = None) -> Iterator[ObjectInfo]: ...


class State(Protocol):
    """A state that reads are compared with."""

    def seq_of(self, bucket: str, key: str) -> int:
        """The seq of the version that is to be seen of an object; 0 for none."""

    def listing(self, bucket: str, prefix: str) -> Iterable[ObjectInfo] | None:
        """The objects of a bucket; None when there is no such bucket."""


class VisibleState:
    """What an engine shows now."""

    def __init__(self, engine: Readable) -> None:
        self._engine = engine

    def seq_of(self, bucket: str, key: str) -> int:
        info = self._engine.find_object(bucket, key)
        return 0 if info is None else info.seq

    def listing(self, bucket: str, prefix: str) -> Iterable[ObjectInfo] | None:
        return find_objects(self._engine, bucket, prefix)


class ObjectRead(msgspec.Struct, frozen=True, tag=True):
    """A version of an object that was seen, or with 0 that none was."""

    bucket: str
    key: str
    seq: int

    def __post_init__(self) -> None:
        _check_names(self.bucket, self.key)
        if type(self.seq) is not int or not 0 <= self.seq < 1 << 64:
            raise InputError(f"seq must be the seq of a version, or 0 for none, not {self.seq!r}")

    def changed(self, state: State) -> str | None:
        """What is different there, in words."""
        if self.seq == state.seq_of(self.bucket, self.key):
            return None
        seen = f"its version of seq {self.seq}" if self.seq else "that it was not there"
        return f"{self.bucket!r}/{self.key!r} was changed: {seen} was read, and is no longer true"


class ListingRead(msgspec.Struct, frozen=True, tag=True):
    """What was listed, as a digest, so that what was added is noticed too."""

    bucket: str
    prefix: str
    digest: bytes

    def __post_init__(self) -> None:
        _check_names(self.bucket, self.prefix)
        if type(self.digest) is not bytes:
            raise InputError(f"digest must be bytes, not {type(self.digest).__name__}; ListingRead.of makes it")

    @classmethod
    def of(cls, bucket: str, prefix: str, listing: Iterable[ObjectInfo] | None) -> ListingRead:
        """What `list_objects(bucket, prefix)` gave; None when there was no such bucket."""
        return cls(bucket, prefix, listing_digest(listing))

    def changed(self, state: State) -> str | None:
        """What is different there, in words."""
        if self.digest == listing_digest(state.listing(self.bucket, self.prefix)):
            return None
        return f"the objects of {self.bucket!r} with the prefix {self.prefix!r} were changed since they were listed"


class NeverTrue(msgspec.Struct, frozen=True, tag=True):
    """Refuses its entry in every state: the entry was refused before, for this reason, and is given to another log."""

    reason: str

    def changed(self, state: State) -> str | None:
        return self.reason


Read = ObjectRead | ListingRead | NeverTrue


class Guarded(msgspec.Struct, frozen=True, tag=True):
    """A batch with what was read for it. An engine applies it if none of that has changed, and refuses it otherwise.

    Guarded(Batch([PutObject("bank", "ann", b"90")]), (ObjectRead("bank", "bob", seq=7),))
    """

    batch: Batch
    reads: tuple[Read, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.batch, Batch):
            raise InputError(f"batch must be a Batch, not {type(self.batch).__name__}")
        reads: object = self.reads
        if not isinstance(reads, tuple):
            if not isinstance(reads, Iterable):
                raise InputError(f"reads must be a tuple of what was read, not {type(reads).__name__}")
            force_setattr(self, "reads", tuple(reads))
        for read in self.reads:
            if not isinstance(read, Read):
                raise InputError(f"reads must be ObjectRead, ListingRead or NeverTrue, not {type(read).__name__}")

    def refusal(self, state: State) -> str | None:
        """Why it must not be applied to this state; None when it may."""
        return first_change(state, self.reads)


def _check_names(*names: object) -> None:
    for name in names:
        if not isinstance(name, str):
            raise InputError(f"a read must name bucket and key as str, not {type(name).__name__}")
        try:
            name.encode()
        except UnicodeEncodeError:
            raise InputError(f"{name!r} contains half a surrogate pair, which is not UTF-8") from None


def batch_of(entry: Entry | Guarded) -> Entry:
    """What a guarded entry does when it is applied; any other entry is that itself."""
    return entry.batch if isinstance(entry, Guarded) else entry


def first_change(state: State, reads: Iterable[Read]) -> str | None:
    """The first of the reads that would come out differently in this state."""
    return next((found for read in reads if (found := read.changed(state)) is not None), None)


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


# Entries as bytes, to be carried by any log.
#
#     u8      version: 1; 2 of an entry with conditions
#     rest    msgpack: a map with "type" (the class) and the fields of the entry, a guarded one and its batch included
#
# Invariants
# - A decoded entry is valid: every name, size and type is checked by the entry's constructor.
# - Any other bytes raise DataError; trailing bytes are an error too.
# - A replica that does not know conditions must not apply an entry that has some: it rejects the version.


VERSION: Final = 1
CONDITIONAL_VERSION: Final = 2
_PREFIX: Final = bytes([VERSION])
_CONDITIONAL_PREFIX: Final = bytes([CONDITIONAL_VERSION])

Carried = Entry | Guarded
"""What a log may carry for an engine."""

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Carried).decode


def encode_entry(entry: Carried) -> bytes:
    """The bytes of an entry."""
    parts = operations(batch_of(entry))
    has_conditions = any(has_condition(part) for part in parts)
    if any(isinstance(part, PutObject) and not isinstance(part.data, bytes) for part in parts):
        raise InputError(
            "data from a file object or an iterator is read where the entry is applied, and cannot be carried by a log",
            hint="Read it, and put bytes; or apply the entry to the engine",
        )
    return (_CONDITIONAL_PREFIX if has_conditions else _PREFIX) + _encode(entry)


def decode_entry(data: bytes | bytearray | memoryview) -> Carried:
    """The entry in these bytes; DataError if they are not one."""
    view = memoryview(data)
    if not len(view) or view[0] not in (VERSION, CONDITIONAL_VERSION):
        found = f"version {view[0]}" if len(view) else "nothing"
        raise DataError(
            f"these bytes are not an entry: {found} where version {VERSION} or {CONDITIONAL_VERSION} was expected"
        )
    try:
        entry: Carried = _decode(view[1:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"these bytes are not an entry: {error}") from error
    return entry
