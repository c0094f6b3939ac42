"""`uploader.ckpt`: where in the files the next object begins. A hint: the catalog says what has been shipped.

Without it, or with one that the catalog or the file contradicts, the place is searched in the files.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from tidelog.codec import decode_document, encode_document
from tidelog.errors import DataError
from tidelog.files import Files
from tidelog.tier.shipment import Place

NAME = "uploader.ckpt"
_KIND = "uploader-checkpoint"
_VERSION = 1


class UploaderCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The offset that is next, its file and byte, and the object that was published last."""

    next_offset: int
    file_seq: int
    byte: int
    last_object_id: str
    epoch: int
    updated_us: int

    @property
    def place(self) -> Place:
        return Place(self.next_offset, self.file_seq, self.byte)


def write_uploader_checkpoint(files: Files, directory: Path, checkpoint: UploaderCheckpoint) -> None:
    """Replaces it, durably."""
    files.write_atomically(directory / NAME, encode_document(_KIND, _VERSION, checkpoint))


def read_uploader_checkpoint(files: Files, directory: Path) -> UploaderCheckpoint | None:
    """The checkpoint; None when there is none that can be used."""
    try:
        return decode_document(_KIND, _VERSION, files.read(directory / NAME), UploaderCheckpoint)
    except (OSError, DataError):
        return None
