"""Keys of the tree: what stands for a version of an object or of a bucket, in the order in which it is looked for.

    "o" bucket NUL key NUL (2**64 - 1 - seq, 8 bytes big-endian)      a version of an object
    "b" bucket NUL (the same 8 bytes)                                 a version of a bucket: created or deleted

Invariants
- Compared byte by byte, keys are in the order of bucket, key, newest version first. Neither name has a NUL in it, so a
  name that begins like another never comes between the versions of that one.
- The first key that is not before `at(prefix, seq)` and begins with the prefix is the version to be seen at `seq`.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_SEQ = (1 << 64) - 1
SEQ_BYTES = 8
OBJECTS = b"o"
BUCKETS = b"b"


class VersionKey(NamedTuple):
    """A key taken apart; `key` is None for a bucket's own versions."""

    bucket: str
    key: str | None
    seq: int


def object_prefix(bucket: str, key: str) -> bytes:
    """What all versions of an object begin with."""
    return b"o%b\0%b\0" % (bucket.encode(), key.encode())


def bucket_prefix(bucket: str) -> bytes:
    """What all versions of a bucket begin with."""
    return b"b%b\0" % bucket.encode()


def objects_of(bucket: str, key_prefix: str = "") -> tuple[bytes, bytes]:
    """From where on, and up to where (exclusive), the objects are whose keys begin like this."""
    start = b"o%b\0%b" % (bucket.encode(), key_prefix.encode())
    return start, behind(start)


def behind(prefix: bytes) -> bytes:
    """The first key that is behind everything with this prefix. Ours are never all 0xff: they begin with a letter."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes((kept[-1] + 1,))


def at(prefix: bytes, seq: int) -> bytes:
    """The version of this seq, or the place where it would be: the next older one is behind it."""
    return prefix + (MAX_SEQ - seq).to_bytes(SEQ_BYTES, "big")


def seq_of(key: bytes) -> int:
    """The seq in a key."""
    return MAX_SEQ - int.from_bytes(key[-SEQ_BYTES:], "big")


def parse(key: bytes) -> VersionKey:
    """The names and the seq in a key that was built here."""
    names = key[1 : -SEQ_BYTES - 1].decode()
    if key[:1] == BUCKETS:
        return VersionKey(names, None, seq_of(key))
    bucket, _, name = names.partition("\0")
    return VersionKey(bucket, name, seq_of(key))
