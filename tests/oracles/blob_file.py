"""Blob files from (position, stored value) pairs: as the page of formats describes them, and by the product."""

from __future__ import annotations

import struct
from array import array
from itertools import accumulate
from typing import NamedTuple

from tidelog.engine.sst.blob_file import EncodedBlobFile, encode_blob_file
from tidelog.log.frame import crc32
from tidelog.store.keys import digest_of

Values = list[tuple[int, bytes]]


class PackedFile(NamedTuple):
    """A blob file, its digest, and where its values are: position, byte, stored bytes."""

    data: bytes
    digest: str
    places: list[tuple[int, int, int]]


def pack_by_hand(values: Values) -> PackedFile:
    """In plain Python; the values are in order of position."""
    directory = b"".join(struct.pack("<QII", position, len(stored), crc32(stored)) for position, stored in values)
    head, tail = struct.pack("<4sI", b"TBLB", 1), struct.pack("<II8s", len(values), crc32(directory), b"TBLBEND1")
    data = b"".join((head, *(stored for _, stored in values), directory, tail))
    bytes_before = accumulate((len(stored) for _, stored in values), initial=len(head))
    places = [(position, byte, len(stored)) for (position, stored), byte in zip(values, bytes_before, strict=False)]
    return PackedFile(data, digest_of(data), places)


def packed(values: Values) -> EncodedBlobFile:
    """By the product, from columns."""
    return encode_blob_file(
        b"".join(stored for _, stored in values),
        array("Q", [position for position, _ in values]).tobytes(),
        array("I", [len(stored) for _, stored in values]).tobytes(),
        array("I", [crc32(stored) for _, stored in values]).tobytes(),
    )
