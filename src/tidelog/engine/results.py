"""What an engine answers, as immutable values."""

from __future__ import annotations

from typing import Literal

import msgspec

from tidelog.engine.entry import MetadataValue

Status = Literal["applied", "nothing", "refused", "unverified"]
Tier = Literal["hot", "cold"]


class Result(msgspec.Struct, frozen=True, gc=False):
    """What became of an entry, the same on every replica but for the last one.

    "applied"      it changed the state
    "nothing"      it was allowed and changed nothing: an object was to be deleted that is not there
    "refused"      the state did not allow it (`reason`); nothing changed, and its seq is used
    "unverified"   its seq was used so long ago that this engine knows neither whether this is the same entry, nor what
                   became of it (`reason`); nothing changed
    """

    seq: int
    status: Status
    reason: str | None = None

    @property
    def applied(self) -> bool:
        """Whether it changed the state."""
        return self.status == "applied"


class StoredObject(msgspec.Struct, frozen=True):
    """A version of an object: what was put, the seq that put it, and where it was read from."""

    data: bytes
    metadata: dict[str, MetadataValue]
    seq: int
    tier: Tier


class ObjectStat(msgspec.Struct, frozen=True):
    """What is known about a version of an object, without its data: `size` are the bytes of that."""

    size: int
    metadata: dict[str, MetadataValue]
    seq: int
    tier: Tier


class ObjectInfo(msgspec.Struct, frozen=True, gc=False):
    """An object in a listing: `size` are the bytes of its data."""

    key: str
    size: int
    seq: int


class VersionInfo(msgspec.Struct, frozen=True, gc=False):
    """A version in an object's history; a deletion is one too."""

    seq: int
    size: int
    is_deleted: bool
    tier: Tier | None
