"""The twin of `_record.c`: the same answers, put together from the formats where they are at home."""

from __future__ import annotations

from tidelog.engine.body import BodyEncoder
from tidelog.engine.cell import encode_pointer
from tidelog.engine.operation_record import body_position, encode_put
from tidelog.engine.updates import encode_put_update
from tidelog.engine.version_keys import at
from tidelog.engine.version_keys import object_prefix as _object_prefix
from tidelog.log.frame import crc32

_bodies = BodyEncoder()


def object_key(bucket: str, name: str, seq: int, /) -> bytes:
    """The key of a version in the tree."""
    return at(_object_prefix(bucket, name), seq)


def put_record(
    seq: int,
    flags: int,
    previous_lsn: int,
    time_us: int,
    order: int,
    bucket: str,
    name: str,
    data: bytes,
    page: int,
    lsn: int,
    position: int,
    /,
) -> tuple[bytes, bytes]:
    """The record of a put without metadata, stored as it is, and the cell that points to its body.

    The cell is inserted into `page` under the key of the version. The record will have this LSN, and its frame begins
    at `position`.
    """
    names = bucket.encode(), name.encode()
    body = _bodies.store(data, {})
    place = body_position(position, *names)
    value = encode_pointer(order, body.size, body.crc, body.codec, lsn, place, len(body.stored))
    updates = encode_put_update(page, place)
    return encode_put(seq, flags, previous_lsn, time_us, order, *names, body, updates), value


def plain_data(stored: bytes, size: int, crc: int, /) -> bytes | None:
    """The data of a body without metadata that is as it must be, else None."""
    if len(stored) != size + 4 or stored[:4] != bytes(4) or crc32(stored) != crc:
        return None
    return stored[4:]
