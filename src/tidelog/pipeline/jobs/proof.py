"""Proofs: what went into a job and what came out, as numbers that anybody can compute again.

Invariants
- A checksum is a sum over messages modulo 2**64, of a mix of each message: it is the same for any split and any order,
  so that workers sum up their parts and the driver adds those. It finds loss, doubling and change; it is no signature.
- `checksum` says by its prefix what was summed up: `frames` (offset and payload of whole frames), `rows` (offset, key,
  value and time of messages) or `xxhash64` (the same, by a function of Spark's). Two kinds are never equal.
- A side without messages has no offsets.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from tidelog.errors import InputError

Kind = Literal["frames", "rows", "xxhash64"]
_MODULUS = 1 << 64


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """Messages counted and summed up: how many, the first and the last offset of them, and the sum."""

    messages: int = 0
    first_offset: int | None = None
    last_offset: int | None = None
    digest: int = 0
    kind: Kind = "frames"

    @property
    def checksum(self) -> str:
        """The sum as text, with what was summed up."""
        return f"{self.kind}:{self.digest % _MODULUS:016x}"

    def __add__(self, other: Tally) -> Tally:
        if self.kind != other.kind:
            raise InputError(f"sums over {self.kind} and over {other.kind} cannot be added")
        firsts = [one.first_offset for one in (self, other) if one.first_offset is not None]
        lasts = [one.last_offset for one in (self, other) if one.last_offset is not None]
        return Tally(
            messages=self.messages + other.messages,
            first_offset=min(firsts, default=None),
            last_offset=max(lasts, default=None),
            digest=(self.digest + other.digest) % _MODULUS,
            kind=self.kind,
        )


def total(tallies: Iterable[Tally], kind: Kind = "frames") -> Tally:
    """All of them together."""
    result = Tally(kind=kind)
    for one in tallies:
        result += one
    return result


class Side(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One side of a proof, as it is shown. Both offsets belong to it. `unit` says what was counted, if not messages."""

    messages: int
    first_offset: int | None
    last_offset: int | None
    checksum: str
    unit: str = "messages"


def side_of(tally: Tally) -> Side:
    """A tally as it is shown."""
    return Side(
        messages=tally.messages,
        first_offset=tally.first_offset,
        last_offset=tally.last_offset,
        checksum=tally.checksum,
    )


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """What a job read of something and what it made of it. `came_out` is absent where a job only reads."""

    subject: str
    went_in: Side
    came_out: Side | None = None

    @property
    def holds(self) -> bool:
        """Whether both sides are the same."""
        return self.came_out is None or self.came_out == self.went_in

    def __str__(self) -> str:
        if self.came_out is None:
            return f"{self.subject}: {_text(self.went_in)}"
        verdict = "equal" if self.holds else "NOT EQUAL"
        return f"{self.subject}: in {_text(self.went_in)}; out {_text(self.came_out)}; {verdict}"


def _text(side: Side) -> str:
    if side.first_offset is None:
        return f"{side.messages:,} {side.unit}, {side.checksum}"
    return f"{side.messages:,} {side.unit}, offsets {side.first_offset} to {side.last_offset}, {side.checksum}"
