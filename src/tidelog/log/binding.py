"""The id of a log, and the header with it that every WAL file and every shipped object begins with.

    byte   0        4         8                24             32      36
           +--------+---------+----------------+--------------+-------+------------
           | "TLOG" | version | id of the log  | first_offset | crc32 | frames or
           | 4s     | u32 = 1 | 16 bytes       | u64          | u32   | blocks ...       all little-endian
           +--------+---------+----------------+--------------+-------+------------

Invariants
- The id is 16 random bytes, made with the log, and is never another one: a log that is deleted and made again is
  another log. In documents it is written as 32 hex digits.
- `first_offset` is that of the first frame behind the header. The crc32 is zlib's, over the 32 bytes before it.
- Bytes of another log are refused by name, with both ids: they are never read as data.
"""

from __future__ import annotations

import re
import secrets
import struct
from typing import NamedTuple

from tidelog.errors import DataError, OtherLogError
from tidelog.log.frame import crc32

MAGIC = b"TLOG"
VERSION = 1
_CLAIMS = struct.Struct("<4sI16sQ")
_CRC = struct.Struct("<I")
BINDING_BYTES = _CLAIMS.size + _CRC.size
OBJECT_HINT = "Put the log's own object back in its place"
_LOG_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)


class Binding(NamedTuple):
    """What a good header says."""

    log_id: str
    first_offset: int


def new_log_id() -> str:
    """An id that no other log has."""
    return secrets.token_hex(16)


def is_log_id(text: str) -> bool:
    """Whether it is the id of some log."""
    return _LOG_ID.fullmatch(text) is not None


def encode_binding(log_id: str, first_offset: int) -> bytes:
    """The header of a file or an object."""
    claims = _CLAIMS.pack(MAGIC, VERSION, bytes.fromhex(log_id), first_offset)
    return claims + _CRC.pack(crc32(claims))


def decode_binding(data: bytes | memoryview) -> Binding:
    """What the header at the start says; DataError when it is cut short or damaged."""
    if len(data) < BINDING_BYTES:
        raise DataError("a header that is cut short")
    claims = bytes(data[: _CLAIMS.size])
    magic, version, log_id, first_offset = _CLAIMS.unpack(claims)
    if magic != MAGIC:
        raise DataError("no header of a log")
    if _CRC.unpack_from(data, _CLAIMS.size)[0] != crc32(claims):
        raise DataError("a header that is damaged")
    if version != VERSION:
        raise DataError(f"a header of version {version}, and this tidelog reads version {VERSION}")
    return Binding(log_id.hex(), first_offset)


def check_binding(data: bytes | memoryview, key: str, log_id: str, first_offset: int) -> None:
    """DataError unless the header at the start of an object is that of this log and this offset."""
    found = decode_binding(data)
    if found.log_id != log_id:
        raise OtherLogError(path=key, expected=log_id, found=found.log_id, operation="read", hint=OBJECT_HINT)
    if found.first_offset != first_offset:
        raise DataError(f"a header of offset {found.first_offset} where offset {first_offset} begins")
