"""Small documents on disk: versioned, checksummed, human-readable.

    tidelog <kind> <version> <crc32 of body, 8 hex digits>\n
    <body: JSON>\n

A document that does not parse is reported with the reason. The caller decides what to do about it: a checkpoint is a
hint and is ignored, a settings file is not.
"""

from __future__ import annotations

import zlib
from threading import Lock
from typing import Any, TypeVar

import msgspec

from tidelog.errors import DataError

Body = TypeVar("Body")
Value = TypeVar("Value")

# The last offset that a message may have: the one after it still fits into a signed number of 64 bits, which is what
# Kafka and Spark have for offsets. A frame has room for more; what is above was not written by us.
MAX_OFFSET = (1 << 63) - 2

JSON_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The errors of decoding unexpected JSON; the last of them for unbounded nesting."""


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
        return from_json(text, body_type)
    except JSON_ERRORS as error:
        raise DataError(f"the {kind} document has an unexpected shape: {error}") from error


_decoders: dict[type, msgspec.json.Decoder[Any]] = {}
_making_decoder = Lock()


def from_json(data: bytes | memoryview | str, kind: type[Value]) -> Value:
    """As `msgspec.json.decode` does, from any number of threads.

    msgspec publishes what it knows about a struct before that is complete: a second thread that decodes the type for
    the first time at the same moment crashes. So decoders are made one at a time, and kept.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        with _making_decoder:
            decoder = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    found: Value = decoder.decode(data)
    return found
