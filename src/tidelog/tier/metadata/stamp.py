"""Values with a stamp: how a writer finds its own write again, and how a version comes to be unique.

    tidelog-entry 1 <write id, 32 hex digits> <crc32 of the value, 8 hex digits> <put | deleted>\\n
    <value>

Invariants
- Every write has an id of its own. Whoever does not know whether a write was done reads the entry and looks for the id.
- Two writes of the same value differ, so an etag that is a checksum of the content is a version.
- `deleted` stands for an entry that is not there (where a store cannot delete on a condition); its value is empty.
"""

from __future__ import annotations

import re
import secrets
import zlib
from typing import NamedTuple

from tidelog.errors import DataError

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
