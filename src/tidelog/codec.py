"""Small documents on disk: versioned, checksummed, readable by eye.

    tidelog <kind> <version> <crc32 of body, 8 hex digits>\n
    <body: JSON>\n

A document that does not parse is reported with the reason; what to do about it is the caller's decision (a checkpoint
is a hint and is ignored, a settings file is not).
"""

from __future__ import annotations

import zlib
from typing import Any, TypeVar

import msgspec

from tidelog.errors import DataError

Body = TypeVar("Body")

JSON_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What reading JSON raises when it is not what was expected; the last of them when it is nested without end."""


def encode_document(kind: str, version: int, body: Any) -> bytes:
    """The bytes of a document."""
    text = msgspec.json.format(msgspec.json.encode(body), indent=1) + b"\n"
    return f"tidelog {kind} {version} {zlib.crc32(text):08x}\n".encode("ascii") + text


def decode_document(kind: str, version: int, data: bytes, body_type: type[Body]) -> Body:
    """The body of a document; DataError says why when it cannot be trusted."""
    head, newline, text = data.partition(b"\n")
    words = head.split(b" ")
    if not newline or len(words) != 4 or words[:2] != [b"tidelog", kind.encode("ascii")]:
        raise DataError(f"not a tidelog {kind} document")
    if words[2] != str(version).encode("ascii"):
        raise DataError(f"a {kind} document of version {words[2]!r}, this tidelog reads version {version}")
    if words[3] != f"{zlib.crc32(text):08x}".encode("ascii"):
        raise DataError(f"the checksum of the {kind} document does not match")
    try:
        return msgspec.json.decode(text, type=body_type)
    except JSON_ERRORS as error:
        raise DataError(f"the {kind} document has an unexpected shape: {error}") from error
