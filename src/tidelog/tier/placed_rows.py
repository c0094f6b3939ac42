"""`placed.json`: which offsets of a log are rows that were handed over, as far as they may not be shipped yet.

If another node takes the topic over before they are, it takes them in again, from where they were staged. They are in
the fenced tail here as well, and whoever rescues that must leave them out: they would come twice.

Invariants
- A range is written after its place is in the intake document, and before the first of its rows is appended. What the
  document does not place any more is taken out before anything else is appended.
- It is moved with the files of the log, before them.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from tidelog.codec import decode_document, encode_document
from tidelog.files import Files, explained
from tidelog.tier.intake_document import IntakeDocument

PLACED_FILE = "placed.json"
_KIND = "placed-rows"
_VERSION = 1

Ranges = tuple[tuple[int, int], ...]


class _Placed(msgspec.Struct, frozen=True, kw_only=True):
    ranges: Ranges


class PlacedRows:
    """The ranges of one log, (first, next) each; written only when they change."""

    def __init__(self, files: Files, directory: Path) -> None:
        self._files = files
        self._directory = directory
        self._written: Ranges | None = None

    def remember(self, document: IntakeDocument) -> None:
        """All that the document places; durable when it returns."""
        placed = [one for one in document.pending if one.first_offset is not None and one.rows]
        ranges = tuple((one.next_offset - one.rows, one.next_offset) for one in placed)
        with explained("take in", self._directory):
            if self._written is None:
                self._written = read_placed(self._files, self._directory)
            if ranges != self._written:
                data = encode_document(_KIND, _VERSION, _Placed(ranges=ranges))
                self._files.write_atomically(self._directory / PLACED_FILE, data)
        self._written = ranges


def read_placed(files: Files, directory: Path) -> Ranges:
    """What is written beside a log; nothing where there is no such file."""
    path = directory / PLACED_FILE
    if not files.exists(path):
        return ()
    return decode_document(_KIND, _VERSION, files.read(path), _Placed).ranges
