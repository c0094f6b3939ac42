"""Entries: what an orchestrator's log tells an engine to do.

    CreateBucket("photos")
    PutObject("photos", "cat.png", data, {"type": "image/png"})
    Batch([CopyObject("photos", "cat.png", "backup", "cat.png"), DeleteObject("photos", "cat.png")])

Invariants
- An entry that exists is right: names, lengths and types are checked when it is made, and nothing in it can change
  afterwards. Data and metadata are copied if the caller's could.
- Names are UTF-8 without NUL, so that keys of the tree can be put together from them; 255 bytes for a bucket and 1024
  for a key, so that a key of the tree fits into a page several times.
- A batch holds lone operations, at least one of them, and no batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import force_setattr

from tidelog.errors import InputError

MAX_BUCKET_BYTES: Final = 255
MAX_KEY_BYTES: Final = 1024
MAX_DATA_BYTES: Final = 1000 << 20
"""A record must fit into a frame of the log, its metadata and page updates included."""
MAX_METADATA_BYTES: Final = 1 << 20
MAX_BATCH_OPERATIONS: Final = 1 << 20
_INTEGERS: Final = range(-(1 << 63), 1 << 64)

MetadataValue = str | int | float | bool | None | bytes
_pack = msgspec.msgpack.Encoder(order="deterministic").encode


class CreateBucket(msgspec.Struct, frozen=True, tag=True):
    """A new, empty bucket. Refused where there is one of this name."""

    bucket: str

    def __post_init__(self) -> None:
        _check_name("bucket", self.bucket, MAX_BUCKET_BYTES)


class DeleteBucket(msgspec.Struct, frozen=True, tag=True):
    """Ends a bucket. Refused while there are objects in it, unless `force` takes them with it."""

    bucket: str
    force: bool = False

    def __post_init__(self) -> None:
        _check_name("bucket", self.bucket, MAX_BUCKET_BYTES)
        if type(self.force) is not bool:
            raise _wrong("force", f"must be True or False, not {self.force!r}")


class PutObject(msgspec.Struct, frozen=True, tag=True):
    """A new version of an object. Metadata is a small dict of text to text, numbers, truth values, None or bytes."""

    bucket: str
    key: str
    data: bytes
    metadata: dict[str, Any] = {}

    def __post_init__(self) -> None:
        bucket, key, data = self.bucket, self.key, self.data
        # The common case in as few steps as possible; whatever is not that is looked at by name.
        if (
            type(bucket) is not str
            or not (0 < len(bucket) <= MAX_BUCKET_BYTES and bucket.isascii())
            or "\0" in bucket
            or type(key) is not str
            or not (0 < len(key) <= MAX_KEY_BYTES and key.isascii())
            or "\0" in key
        ):
            _check_name("bucket", bucket, MAX_BUCKET_BYTES)
            _check_name("key", key, MAX_KEY_BYTES)
        if type(data) is not bytes or len(data) > MAX_DATA_BYTES:
            force_setattr(self, "data", _checked_data(data))
        if self.metadata or type(self.metadata) is not dict:
            metadata = checked_metadata(self.metadata)
            # Here, since an entry that no engine can apply must not come into a log that all of them follow.
            packed_metadata(metadata)
            force_setattr(self, "metadata", metadata)


class DeleteObject(msgspec.Struct, frozen=True, tag=True):
    """A tombstone. To delete what is not there changes nothing."""

    bucket: str
    key: str

    def __post_init__(self) -> None:
        _check_name("bucket", self.bucket, MAX_BUCKET_BYTES)
        _check_name("key", self.key, MAX_KEY_BYTES)


class CopyObject(msgspec.Struct, frozen=True, tag=True):
    """A new version of one object with data and metadata of another, whose bytes are not written again."""

    src_bucket: str
    src_key: str
    dest_bucket: str
    dest_key: str

    def __post_init__(self) -> None:
        _check_name("src_bucket", self.src_bucket, MAX_BUCKET_BYTES)
        _check_name("src_key", self.src_key, MAX_KEY_BYTES)
        _check_name("dest_bucket", self.dest_bucket, MAX_BUCKET_BYTES)
        _check_name("dest_key", self.dest_key, MAX_KEY_BYTES)


Operation = CreateBucket | DeleteBucket | PutObject | DeleteObject | CopyObject
_OPERATIONS: Final = (CreateBucket, DeleteBucket, PutObject, DeleteObject, CopyObject)


class Batch(msgspec.Struct, frozen=True, tag=True):
    """Several operations that are applied together, in order, or refused together."""

    entries: Sequence[Operation]
    """A tuple, whatever it was made from."""

    def __post_init__(self) -> None:
        force_setattr(self, "entries", _checked_operations(self.entries))


Entry = Operation | Batch


def operations(entry: Entry) -> tuple[Operation, ...]:
    """The lone operations of an entry, in order."""
    if isinstance(entry, Batch):
        return tuple(entry.entries)
    if not isinstance(entry, _OPERATIONS):
        raise InputError(
            f"{_kind(entry)} is no entry",
            hint="Give a CreateBucket, DeleteBucket, PutObject, DeleteObject, CopyObject or Batch",
        )
    return (entry,)


def checked_metadata(metadata: object) -> dict[str, MetadataValue]:
    """A copy, sorted by key, of what may be the metadata of an object."""
    if type(metadata) is not dict and not isinstance(metadata, Mapping):
        raise _wrong("metadata", f"must be a dict, not {_kind(metadata)}")
    plain: dict[str, MetadataValue] = {}
    for name, value in metadata.items():
        if not isinstance(name, str):
            raise _wrong("metadata", f"must have text as its keys, not {_kind(name)}")
        if not name.isascii():
            _check_text("metadata", name)
        plain[str(name)] = value if type(value) is str and value.isascii() else _plain(name, value)
    return plain if len(plain) == 1 else dict(sorted(plain.items(), key=_first))


def packed_metadata(metadata: dict[str, MetadataValue]) -> bytes:
    """Metadata as it is stored, the same for the same metadata. InputError where it takes more than it may."""
    packed = _pack(metadata)
    if len(packed) > MAX_METADATA_BYTES:
        raise _wrong(
            "metadata", f"takes {len(packed)} bytes and may take {MAX_METADATA_BYTES}; put some of it into the data"
        )
    return packed


def _first(item: tuple[str, MetadataValue]) -> str:
    return item[0]


def _plain(name: str, value: object) -> MetadataValue:
    """The value, if it can be one: what cannot change afterwards, and equals what is read back later."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    field = f"metadata[{name!r}]"
    if isinstance(value, str):
        _check_text(field, value)
        return str(value)
    if isinstance(value, int | float):
        return _plain_number(field, value)
    raise _wrong(field, f"must be text, a number, a truth value, None or bytes, not {_kind(value)}")


def _plain_number(field: str, value: float) -> int | float:
    if isinstance(value, int):
        if value not in _INTEGERS:
            raise _wrong(field, "must fit into 64 bits; give a larger number as text")
        return int(value)
    if value != value:
        raise _wrong(field, "must be a number that equals itself; give None in place of NaN")
    return float(value)


def _checked_data(data: object) -> bytes:
    if not isinstance(data, bytes | bytearray | memoryview):
        hint = "; encode text first" if isinstance(data, str) else ""
        raise _wrong("data", f"must be bytes, not {_kind(data)}{hint}")
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    if size > MAX_DATA_BYTES:
        raise _wrong("data", f"has {size} bytes and may have {MAX_DATA_BYTES}; put it into several objects")
    return bytes(data)


def _check_name(field: str, name: object, max_bytes: int) -> None:
    if type(name) is str and 0 < len(name) <= max_bytes and name.isascii() and "\0" not in name:
        return
    if not isinstance(name, str):
        raise _wrong(field, f"must be text, not {_kind(name)}")
    if not name:
        raise _wrong(field, "is empty; give it a name")
    if "\0" in name:
        raise _wrong(field, "has a NUL character in it; leave that out")
    size = _check_text(field, name)
    if size > max_bytes:
        raise _wrong(field, f"has {size} bytes in UTF-8 and may have {max_bytes}; shorten it")


def _check_text(field: str, text: str) -> int:
    """How many bytes it has in UTF-8."""
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError:
        raise _wrong(field, "has half a surrogate pair in it, which is not UTF-8; leave that out") from None


def _checked_operations(entries: object) -> tuple[Operation, ...]:
    if not isinstance(entries, Sequence) or isinstance(entries, str | bytes):
        raise _wrong("entries", f"must be a list of entries, not {_kind(entries)}")
    if not 0 < len(entries) <= MAX_BATCH_OPERATIONS:
        raise _wrong("entries", f"has {len(entries)} entries; a batch has 1 to {MAX_BATCH_OPERATIONS}")
    for number, entry in enumerate(entries):
        if not isinstance(entry, _OPERATIONS):
            why = "a batch in a batch; put its entries here" if isinstance(entry, Batch) else _kind(entry)
            raise _wrong(f"entries[{number}]", f"must be a lone operation, not {why}")
    return tuple(entries)


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__


def _wrong(field: str, problem: str) -> InputError:
    return InputError(f"{field} {problem}")
