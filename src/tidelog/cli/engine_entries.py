"""Entries as lines of JSON, for `tidelog engine put-log`.

    {"seq": 1, "op": "create_bucket", "bucket": "photos"}
    {"seq": 2, "op": "put_object", "bucket": "photos", "key": "cat", "data": "meow", "metadata": {"type": "sound"}}
    {"seq": 3, "op": "put_object", "bucket": "photos", "key": "raw", "data_base64": "AAEC"}
    {"seq": 4, "op": "copy_object", "src_bucket": "photos", "src_key": "cat", "dest_bucket": "b", "dest_key": "dog"}
    {"seq": 5, "op": "delete_object", "bucket": "photos", "key": "cat"}
    {"seq": 6, "op": "batch", "entries": [{"op": "create_bucket", "bucket": "b"}, ...]}
    {"seq": 7, "op": "delete_bucket", "bucket": "photos", "force": true}

A field that is not known, or missing, or of another type is an error that names it: nothing is guessed.
"""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any

import msgspec

from tidelog.engine.entry import (
    Batch,
    CopyObject,
    CreateBucket,
    DeleteBucket,
    DeleteObject,
    Entry,
    Operation,
    PutObject,
)
from tidelog.errors import InputError

Seq = Annotated[int, msgspec.Meta(ge=1)]


class _Line(msgspec.Struct, tag_field="op", forbid_unknown_fields=True, kw_only=True):
    """What every line has; inside a batch there is no seq."""

    seq: Seq | None = None


class _CreateBucket(_Line, tag="create_bucket", kw_only=True):
    bucket: str

    def operation(self) -> Operation:
        return CreateBucket(self.bucket)


class _DeleteBucket(_Line, tag="delete_bucket", kw_only=True):
    bucket: str
    force: bool = False

    def operation(self) -> Operation:
        return DeleteBucket(self.bucket, self.force)


class _PutObject(_Line, tag="put_object", kw_only=True):
    bucket: str
    key: str
    data: str | None = None
    data_base64: str | None = None
    metadata: dict[str, Any] = {}

    def operation(self) -> Operation:
        return PutObject(self.bucket, self.key, self._bytes(), self.metadata)

    def _bytes(self) -> bytes:
        if (self.data is None) == (self.data_base64 is None):
            raise InputError("put_object takes either `data` (text) or `data_base64`")
        if self.data is not None:
            return self.data.encode()
        try:
            return base64.b64decode(self.data_base64 or "", validate=True)
        except (binascii.Error, ValueError) as error:
            raise InputError(f"data_base64 is not base64: {error}") from error


class _DeleteObject(_Line, tag="delete_object", kw_only=True):
    bucket: str
    key: str

    def operation(self) -> Operation:
        return DeleteObject(self.bucket, self.key)


class _CopyObject(_Line, tag="copy_object", kw_only=True):
    src_bucket: str
    src_key: str
    dest_bucket: str
    dest_key: str

    def operation(self) -> Operation:
        return CopyObject(self.src_bucket, self.src_key, self.dest_bucket, self.dest_key)


_Lone = _CreateBucket | _DeleteBucket | _PutObject | _DeleteObject | _CopyObject


class _Batch(_Line, tag="batch", kw_only=True):
    entries: list[_Lone]


_decode = msgspec.json.Decoder(_Lone | _Batch).decode
_KINDS = (_CreateBucket, _DeleteBucket, _PutObject, _DeleteObject, _CopyObject, _Batch)
OPERATIONS = tuple(str(kind.__struct_config__.tag) for kind in _KINDS)
"""What a line may have as its `op`."""


def parse_entry(line: bytes) -> tuple[int, Entry]:
    """The seq and the entry in a line; InputError says what is wrong with it."""
    try:
        found = _decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(_told(str(error))) from error
    if found.seq is None:
        raise InputError("it has no `seq`, a whole number from 1 on")
    if isinstance(found, _Batch):
        if any(one.seq is not None for one in found.entries):
            raise InputError("entries of a batch have no `seq` of their own")
        return found.seq, Batch([one.operation() for one in found.entries])
    return found.seq, found.operation()


def _told(reason: str) -> str:
    """With the operations that there are, where the one that was named is none of them."""
    return f"{reason}; an `op` is one of {', '.join(OPERATIONS)}" if "op`" in reason else reason
