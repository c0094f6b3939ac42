"""A part of a read: what one task reads, and where it is. Plain data, made by the driver and sent to a worker.

This module and those that it imports are all that a task needs of this package besides Spark itself.
"""

from __future__ import annotations

import msgspec

from tidelog.tier.descriptor import Descriptor
from tidelog.tier.store_settings import StoreSettings


class ColdPlace(msgspec.Struct, frozen=True):
    """Where objects and their catalog are."""

    store_url: str
    store_settings: StoreSettings
    metadata_url: str
    metadata_root: str


class FilePiece(msgspec.Struct, frozen=True):
    """A WAL file that holds `first_offset` up to `next_offset` (exclusive) between two bytes."""

    path: str
    first_offset: int
    next_offset: int
    byte: int
    end_byte: int

    @property
    def size(self) -> int:
        return self.end_byte - self.byte


class ReadPart(msgspec.Struct, frozen=True, kw_only=True):
    """Offsets `start` to `stop` (exclusive) of a topic: below `cold_stop` in objects, from there on in files."""

    topic: str
    start: int
    stop: int
    cold_stop: int
    descriptors: tuple[Descriptor, ...] = ()
    files: tuple[FilePiece, ...] = ()
