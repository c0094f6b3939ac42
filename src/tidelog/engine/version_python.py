"""The pure-Python twin of the C kernel that finds the version of an object to be seen at a seq.

The same answers as `_engine.c`, slower.
"""

from __future__ import annotations

import struct

from tidelog.engine import tree_python
from tidelog.engine.cell import POINTER_BYTES
from tidelog.engine.version_keys import SEQ_BYTES, at, object_prefix, seq_of

_POINTER = struct.Struct("<xIQIBQQI")
_MAX_KEY_BYTES = 2048

Pointer = tuple[int, int, int, int, int, int, int, int]
"""(seq, order, size, crc, codec, lsn, position, stored bytes) of a version whose body is in the log."""
Other = tuple[int, bytes]
"""(seq, cell) of a version that is a tombstone, or has its body in the page."""


def find_version(
    pages: tree_python.Pages, root: int, bucket: str, key: str, seq: int, /
) -> Pointer | Other | int | None:
    """The newest version of an object that is not after a seq; None when there is none; or a missing page."""
    wanted = at(object_prefix(bucket, key), seq)
    if len(wanted) > _MAX_KEY_BYTES:
        return None
    found = tree_python.find(pages, root, wanted)
    if found is None or isinstance(found, int):
        return found
    name, value = found
    if name[:-SEQ_BYTES] != wanted[:-SEQ_BYTES]:
        return None
    if len(value) == POINTER_BYTES and not value[0]:
        return (seq_of(name), *_POINTER.unpack(value))
    return seq_of(name), value
