"""`restore.json`: a restore into this directory has begun. While it is there, the directory is no engine."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tidelog.codec import decode_document, encode_document
from tidelog.errors import InputError
from tidelog.files import Files

MARKER = "restore.json"
_KIND = "engine-restore"
_VERSION = 1


class RestoreMarker(msgspec.Struct, frozen=True):
    """From which store, since when, and as which node."""

    store: str
    begun_us: int
    node: str = ""


def write_marker(files: Files, directory: Path, marker: RestoreMarker) -> None:
    """Durable when it returns."""
    files.write_atomically(directory / MARKER, encode_document(_KIND, _VERSION, marker))


def read_marker(files: Files, directory: Path) -> RestoreMarker:
    """What is in it; DataError when it is not ours."""
    return decode_document(_KIND, _VERSION, files.read(directory / MARKER), RestoreMarker)


def refuse_half_restored(files: Files, directory: Path) -> None:
    """InputError for a directory into which a restore was cut off."""
    if files.exists(directory / MARKER):
        raise InputError(
            "a restore into this directory was cut off",
            operation="open engine",
            path=directory,
            hint="Run the restore again: it begins anew in the same directory",
        )
