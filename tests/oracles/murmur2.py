"""murmur2 as Kafka's clients compute it, in Python."""

from __future__ import annotations

import struct

from tests.oracles.column_rows import BytesColumn, _Bytes, _FaultyRowError

_FACTOR = 0x5BD1E995
_MASK = 0xFFFFFFFF


def murmur2(key: bytes) -> int:
    """The hash of a key, as an unsigned number."""
    whole = len(key) & ~3
    hash = 0x9747B28C ^ len(key)
    for at in range(0, whole, 4):
        word = int.from_bytes(key[at : at + 4], "little") * _FACTOR & _MASK
        word = (word ^ word >> 24) * _FACTOR & _MASK
        hash = (hash * _FACTOR & _MASK) ^ word
    if rest := key[whole:]:
        hash = (hash ^ int.from_bytes(rest, "little")) * _FACTOR & _MASK
    hash = (hash ^ hash >> 13) * _FACTOR & _MASK
    return hash ^ hash >> 15


def partitions_of(count: int, keys: BytesColumn | None, partitions: int, turn: int, /) -> tuple[bytes, int]:
    """The partition of each row: that of its key; rows without one take turns."""
    if not 1 <= partitions < 1 << 31:
        raise ValueError("partitions must be in the range 1 to 2**31 - 1")
    column = None if keys is None else _Bytes(*keys)
    if column is not None and column.rows < count:
        raise ValueError("the column has fewer rows than were announced")
    numbers: list[int] = []
    for row in range(count):
        try:
            key = None if column is None else column.get(row)
        except _FaultyRowError:
            raise ValueError("a key lies outside the data of its column") from None
        if key is None:
            turn %= partitions
            numbers.append(turn)
            turn += 1
        else:
            numbers.append((murmur2(key) & 0x7FFFFFFF) % partitions)
    return struct.pack(f"<{count}i", *numbers), turn
