"""Entries as bytes, to be carried by any log.

    u8      version: 1
    rest    msgpack: a map with "type" (the class) and the fields of the entry, a guarded one and its batch included

Invariants
- What is decoded could have been made by hand: every name, size and type is checked by the entry itself.
- Bytes that are anything else raise DataError, whatever they are; nothing behind the entry is ignored.
"""

from __future__ import annotations

from typing import Final

import msgspec

from tidelog.engine.entry import Entry
from tidelog.engine.guard import Guarded
from tidelog.errors import DataError

VERSION: Final = 1
_PREFIX: Final = bytes([VERSION])

Carried = Entry | Guarded
"""What a log may carry for an engine."""

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Carried).decode


def encode_entry(entry: Carried) -> bytes:
    """The bytes of an entry."""
    return _PREFIX + _encode(entry)


def decode_entry(data: bytes | bytearray | memoryview) -> Carried:
    """The entry in these bytes. DataError: they are none."""
    view = memoryview(data)
    if not len(view) or view[0] != VERSION:
        found = f"version {view[0]}" if len(view) else "nothing"
        raise DataError(f"these bytes are no entry: {found} where version {VERSION} was expected")
    try:
        entry: Carried = _decode(view[1:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"these bytes are no entry: {error}") from error
    return entry
