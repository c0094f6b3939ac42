"""Entries: the operations that an orchestrator's log tells an engine to apply; and the results of applying and reading.

    CreateBucket("photos")
    PutObject("photos", "cat.png", data, {"type": "image/png"})
    Batch([CopyObject("photos", "cat.png", "backup", "cat.png"), DeleteObject("photos", "cat.png")])

Invariants
- Every entry is valid: names, lengths and types are checked when it is constructed, and it is immutable. Data and
  metadata are copied if the caller could change them. Data that is a file object or an iterator is read once, by the
  engine that applies the entry; such an entry cannot be encoded.
- Names are UTF-8 without NUL, so that tree keys can be composed from them; 255 bytes for a bucket and 1024 for a key,
  so that several tree keys fit into a page.
- A batch contains single operations, at least one, and no batch.
- A condition of an operation (`if_absent`, `if_match`, `if_match_crc`) is decided once, where the entry is applied,
  from the entries before it alone: all replicas decide the same. The verdict is in the log, the condition is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from msgspec.structs import force_setattr

from tidelog.errors import InputError

MAX_BUCKET_BYTES: Final = 255
MAX_KEY_BYTES: Final = 1024
MAX_DATA_BYTES: Final = 1000 << 20
"""Of data that is given as bytes: a record must fit into a frame of the log."""
MAX_STREAM_BYTES: Final = 5 << 30
"""Of data that is read from a file object or an iterator."""
MAX_METADATA_BYTES: Final = 1 << 20
MAX_BATCH_OPERATIONS: Final = 1 << 20
_MAX_SEQ: Final = (1 << 64) - 1
_U32: Final = (1 << 32) - 1
_INTEGERS: Final = range(-(1 << 63), 1 << 64)

MetadataValue = str | int | float | bool | None | bytes
_pack = msgspec.msgpack.Encoder(order="deterministic").encode
_READ_BYTES: Final = 256 << 10

if TYPE_CHECKING:
    Data = Any
    """Bytes, a file object that is open for reading bytes, or an iterator of bytes."""
else:
    Data = bytes  # what is decoded is bytes


class Matching(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, repr_omit_defaults=True):
    """Conditions on the object that an operation writes. If one does not hold, the entry is refused."""

    if_match: int | None = None
    """Its newest version must have this seq."""
    if_match_crc: int | None = None
    """Its newest version must have this checksum: `crc` of `stat` and `scan`, or `tidelog.object_crc`."""

    def _check_conditions(self) -> None:
        for field, value, most in (("if_match", self.if_match, _MAX_SEQ), ("if_match_crc", self.if_match_crc, _U32)):
            if value is not None and (type(value) is not int or not 0 <= value <= most):
                raise _wrong(field, f"must be a whole number from 0 to {most}, not {value!r}")
        if self.if_match == 0:
            raise _wrong("if_match", "is 0, which is the seq of no version; give if_absent=True to a put or a copy")


class Conditional(Matching, frozen=True, kw_only=True, omit_defaults=True, repr_omit_defaults=True):
    """The same, or that there is no such object."""

    if_absent: bool = False
    """There must be no such object."""

    def _check_conditions(self) -> None:
        Matching._check_conditions(self)
        if type(self.if_absent) is not bool:
            raise _wrong("if_absent", f"must be True or False, not {self.if_absent!r}")
        if self.if_absent and (self.if_match is not None or self.if_match_crc is not None):
            raise _wrong("if_absent", "contradicts if_match and if_match_crc; give one of them")


class CreateBucket(msgspec.Struct, frozen=True, tag=True):
    """Creates an empty bucket. Refused if a bucket of this name exists."""

    bucket: str

    def __post_init__(self) -> None:
        _check_name("bucket", self.bucket, MAX_BUCKET_BYTES)


class DeleteBucket(msgspec.Struct, frozen=True, tag=True):
    """Deletes a bucket. Refused if it contains objects, unless `force` deletes them too."""

    bucket: str
    force: bool = False

    def __post_init__(self) -> None:
        _check_name("bucket", self.bucket, MAX_BUCKET_BYTES)
        if type(self.force) is not bool:
            raise _wrong("force", f"must be True or False, not {self.force!r}")


class PutObject(Conditional, frozen=True, tag=True, omit_defaults=True, repr_omit_defaults=True):
    """Puts a new version of an object. Metadata is a small dict of text to text, numbers, booleans, None or bytes.

    `data` is bytes, a file object that is open for reading bytes, or an iterator of bytes, of up to 5 GiB. A file
    object or an iterator is read once, piece by piece, where the entry is applied; if it fails, nothing is applied, and
    the entry is to be made again from the beginning of the data.
    With `if_absent=True`, `if_match=seq` or `if_match_crc=crc` it is refused unless that is true of the object before.
    """

    bucket: str
    key: str
    data: Data
    metadata: dict[str, Any] = {}

    def __post_init__(self) -> None:
        bucket, key, data = self.bucket, self.key, self.data
        # The fast path for the common case; anything else is checked field by field.
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
            # Checked here, since an entry that no engine can apply must not enter a log that all of them follow.
            packed_metadata(metadata)
            force_setattr(self, "metadata", metadata)
        if self.if_absent is not False or self.if_match is not None or self.if_match_crc is not None:
            self._check_conditions()


class PutFile(PutObject, frozen=True, tag=True, kw_only=True):
    """A put whose value is in a value file by now, of this size and with this checksum. Only inside of an engine."""

    file: Any
    """The file as it was staged (`engine/value_files.py`)."""
    size: int
    crc: int


class DeleteObject(Matching, frozen=True, tag=True, omit_defaults=True, repr_omit_defaults=True):
    """Writes a tombstone. Deleting an object that does not exist changes nothing.

    With `if_match=seq` or `if_match_crc=crc` it is refused unless that is true of the object.
    """

    bucket: str
    key: str

    def __post_init__(self) -> None:
        _check_name("bucket", self.bucket, MAX_BUCKET_BYTES)
        _check_name("key", self.key, MAX_KEY_BYTES)
        self._check_conditions()


class CopyObject(Conditional, frozen=True, tag=True, omit_defaults=True, repr_omit_defaults=True):
    """Writes a new version of one object with data and metadata of another, without copying its bytes.

    With `if_absent=True`, `if_match=seq` or `if_match_crc=crc` it is refused unless that is true of its destination.
    """

    src_bucket: str
    src_key: str
    dest_bucket: str
    dest_key: str

    def __post_init__(self) -> None:
        _check_name("src_bucket", self.src_bucket, MAX_BUCKET_BYTES)
        _check_name("src_key", self.src_key, MAX_KEY_BYTES)
        _check_name("dest_bucket", self.dest_bucket, MAX_BUCKET_BYTES)
        _check_name("dest_key", self.dest_key, MAX_KEY_BYTES)
        self._check_conditions()


Operation = CreateBucket | DeleteBucket | PutObject | DeleteObject | CopyObject
_OPERATIONS: Final = (CreateBucket, DeleteBucket, PutObject, DeleteObject, CopyObject)


class Batch(msgspec.Struct, frozen=True, tag=True):
    """Several operations that are applied atomically, in order, or refused together."""

    entries: Sequence[Operation]
    """The operations, as a tuple."""

    def __post_init__(self) -> None:
        force_setattr(self, "entries", _checked_operations(self.entries))


Entry = Operation | Batch


def has_condition(operation: Operation) -> bool:
    """Whether an operation depends on the object that it writes."""
    if not isinstance(operation, Matching):
        return False
    is_matching = operation.if_match is not None or operation.if_match_crc is not None
    return is_matching or (isinstance(operation, Conditional) and operation.if_absent)


def operations(entry: Entry) -> tuple[Operation, ...]:
    """Returns the single operations of an entry, in order."""
    if isinstance(entry, Batch):
        return tuple(entry.entries)
    if not isinstance(entry, _OPERATIONS):
        raise InputError(
            f"{_kind(entry)} is no entry",
            hint="Give a CreateBucket, DeleteBucket, PutObject, DeleteObject, CopyObject or Batch",
        )
    return (entry,)


def checked_metadata(metadata: object) -> dict[str, MetadataValue]:
    """Returns a copy of an object's metadata, validated and sorted by key."""
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
    """Encodes metadata deterministically. InputError if it exceeds the limit."""
    packed = _pack(metadata)
    if len(packed) > MAX_METADATA_BYTES:
        raise _wrong(
            "metadata", f"takes {len(packed)} bytes and may take {MAX_METADATA_BYTES}; put some of it into the data"
        )
    return packed


def _first(item: tuple[str, MetadataValue]) -> str:
    return item[0]


def _plain(name: str, value: object) -> MetadataValue:
    """Returns the value if it is allowed: immutable, and equal to what is read back later."""
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


def _checked_data(data: object) -> object:
    if not isinstance(data, bytes | bytearray | memoryview):
        if isinstance(data, str) or not (callable(getattr(data, "read", None)) or isinstance(data, Iterator)):
            hint = "; encode text first" if isinstance(data, str) else ""
            raise _wrong("data", f"must be bytes, a file object or an iterator of bytes, not {_kind(data)}{hint}")
        return data
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    if size > MAX_DATA_BYTES:
        raise _wrong("data", f"has {size} bytes and may have {MAX_DATA_BYTES}; give larger data as a file object")
    return bytes(data)


def is_large(data: object, large_bytes: int) -> bool:
    """Whether the data of a put has more bytes than this, or may have."""
    return type(data) is not bytes or len(data) > large_bytes


class _ReadBefore:
    """Stands in a put for a stream that was read."""

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        raise InputError(
            "the stream with the data of this put was read before: what is left of it is not the object",
            hint="Make the entry again, with a stream that is at its beginning",
        )


def taken_data(put: PutObject) -> object:
    """The data of a put, to be read now. A stream is given out once: if reading it failed and the entry is applied
    again, the rest of the stream would be taken for the object.
    """
    data = put.data
    if not isinstance(data, bytes):
        force_setattr(put, "data", _ReadBefore())
    return data


def pieces_of(data: object) -> Iterator[bytes | memoryview]:
    """The bytes of a put, piece by piece, each until the next is asked for; InputError if a file object or an iterator
    yields something else.
    """
    if isinstance(data, bytes):
        yield data
        return
    pieces = _read_pieces(data) if callable(getattr(data, "read", None)) else data
    for piece in pieces:  # type: ignore[attr-defined]
        if not isinstance(piece, bytes | bytearray | memoryview):
            hint = "; open the file in binary mode" if isinstance(piece, str) else ""
            raise _wrong("data", f"must yield bytes, not {_kind(piece)}{hint}")
        yield memoryview(piece).cast("B") if len(piece) else b""


def _read_pieces(file: Any) -> Iterator[object]:
    """One buffer is filled again and again where the file can do that: memory that is new each time costs as much as
    writing what is in it.
    """
    if not callable(getattr(file, "readinto", None)):
        while piece := file.read(_READ_BYTES):
            yield piece
        return
    buffer = memoryview(bytearray(_READ_BYTES))
    while size := file.readinto(buffer):
        yield buffer[:size]


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
    """Returns its length in bytes as UTF-8."""
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


# Results of an engine, as immutable values.


Status = Literal["applied", "nothing", "refused", "unverified"]
Tier = Literal["hot", "cold"]


class Result(msgspec.Struct, frozen=True, gc=False):
    """The result of an entry. Every status but the last is the same on all replicas.

    "applied"      it changed the state
    "nothing"      it was allowed and changed nothing: an object was to be deleted that is not there
    "refused"      the state did not allow it (`reason`); nothing changed, and its seq is used
    "unverified"   its seq was used so long ago that this engine knows neither whether this is the same entry, nor what
                   became of it (`reason`); nothing changed
    """

    seq: int
    status: Status
    reason: str | None = None

    @property
    def applied(self) -> bool:
        """Whether it changed the state."""
        return self.status == "applied"


class StoredObject(msgspec.Struct, frozen=True):
    """A version of an object: what was put, the seq that put it, and where it was read from."""

    data: bytes
    metadata: dict[str, MetadataValue]
    seq: int
    tier: Tier


class ObjectStat(msgspec.Struct, frozen=True):
    """A version of an object without its data; `size` is the data's length in bytes, `crc` the checksum of data and
    metadata.
    """

    size: int
    metadata: dict[str, MetadataValue]
    seq: int
    tier: Tier
    crc: int


class ObjectInfo(msgspec.Struct, frozen=True, gc=False):
    """An object in a listing; `size` is the data's length in bytes. With a delimiter, also the common prefix of several
    objects (`is_prefix`), with no size and no seq.
    """

    key: str
    size: int
    seq: int
    is_prefix: bool = False


class ScannedObject(msgspec.Struct, frozen=True):
    """An object in a scan: `size` is the data's length in bytes, `crc` the checksum of data and metadata. `data` and
    `metadata` are None in a scan without values.
    """

    key: str
    size: int
    seq: int
    crc: int
    data: bytes | None = None
    metadata: dict[str, MetadataValue] | None = None


class VersionInfo(msgspec.Struct, frozen=True, gc=False):
    """A version in an object's history; a deletion is a version too."""

    seq: int
    size: int
    is_deleted: bool
    tier: Tier | None
