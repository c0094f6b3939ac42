"""The digest of a state: equal for equal buckets and objects, on any replica and however they are stored.

Invariants
- Every visible bucket and object counts once, with its name, its seq, its size and the checksum of its value (metadata
  and data). The location of a value and its history do not count.
- It is a sum, so its parts can be computed in any order and in parallel: `Digest.add` of the parts, then `text`.
"""

from __future__ import annotations

import hashlib
import struct

_BYTES = 32
_MODULUS = 1 << (8 * _BYTES)
_OBJECT = struct.Struct("<cHHQQI")
_BUCKET = struct.Struct("<cHQ")


class Digest:
    """A sum of the hashes of things, and how many they are."""

    def __init__(self, total: int = 0, count: int = 0) -> None:
        self.total = total
        self.count = count

    def add_object(self, bucket: bytes, key: bytes, seq: int, size: int, crc: int) -> None:
        """One object; names in UTF-8."""
        self._add(_OBJECT.pack(b"o", len(bucket), len(key), seq, size, crc) + bucket + key)

    def add_bucket(self, bucket: bytes, seq: int) -> None:
        self._add(_BUCKET.pack(b"b", len(bucket), seq) + bucket)

    def add(self, other: Digest) -> None:
        """Another part of the same state."""
        self.total = (self.total + other.total) % _MODULUS
        self.count += other.count

    def text(self) -> str:
        """How it is written down."""
        whole = self.count.to_bytes(8, "little") + self.total.to_bytes(_BYTES, "little")
        return hashlib.blake2b(whole, digest_size=_BYTES).hexdigest()

    def _add(self, thing: bytes) -> None:
        number = int.from_bytes(hashlib.blake2b(thing, digest_size=_BYTES).digest(), "little")
        self.total = (self.total + number) % _MODULUS
        self.count += 1
