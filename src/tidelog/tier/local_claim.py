"""`owner.json` in a topic's directory: under which claims the files beside it were written.

It is written before a claim is made and again when it was: a crash in between leaves both, and whichever the metadata
store names as the topic's lineage says that nobody else has written since. A claim that got no answer may still be made
later, also after others were tried: those are kept until one of ours is made, and none of them can be made any more.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from tidelog.codec import decode_document, encode_document
from tidelog.files import Files

NAME = "owner.json"
_KIND = "local-claim"
_VERSION = 1
# A request that was sent so many attempts ago has long been done or lost.
MAX_GIVEN_UP = 16


class LocalClaim(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`claim` is the one that was made, `intended` one that may have been, `given_up` are earlier ones of those."""

    epoch: int
    claim: str | None
    intended: str | None
    given_up: tuple[str, ...] = ()

    def knows(self, lineage: str) -> bool:
        """Whether the files here are the end of a topic of that lineage."""
        return lineage in (self.claim, self.intended, *self.given_up)

    @property
    def undecided_claims(self) -> tuple[str, ...]:
        """The last of those that may have been made, or may yet be."""
        return (*self.given_up, *(() if self.intended is None else (self.intended,)))[-MAX_GIVEN_UP:]


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
