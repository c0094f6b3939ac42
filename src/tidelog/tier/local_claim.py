"""`owner.json` in a topic's directory: under which claims the files beside it were written.

It is written before a claim is made and again when it was: a crash in between leaves both, and whichever the metadata
store names as the topic's lineage says that nobody else has written since.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from tidelog.codec import decode_document, encode_document
from tidelog.files import Files

NAME = "owner.json"
_KIND = "local-claim"
_VERSION = 1


class LocalClaim(msgspec.Struct, frozen=True, kw_only=True):
    """`claim` is the one that was made, `intended` one that may have been."""

    epoch: int
    claim: str | None
    intended: str | None

    def knows(self, lineage: str) -> bool:
        """Whether the files here are the end of a topic of that lineage."""
        return lineage in (self.claim, self.intended)


def read_local_claim(files: Files, directory: Path) -> LocalClaim | None:
    """What is written down here; None in a directory that never belonged to an owner. Damage raises DataError."""
    try:
        data = files.read(directory / NAME)
    except FileNotFoundError:
        return None
    return decode_document(_KIND, _VERSION, data, LocalClaim)


def write_local_claim(files: Files, directory: Path, claim: LocalClaim) -> None:
    """Durable when it returns."""
    files.write_atomically(directory / NAME, encode_document(_KIND, _VERSION, claim))
