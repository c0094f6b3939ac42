"""What is written down about a compaction, so that anybody can finish it: objects that take the place of others.

    replacements/state                   one a topic: which generation was used last, and how far it is
    replacements/{generation}/{start}    one for each new object: its descriptor, and what it is to replace

    idle ──> building ──> switching ──> idle, with the replaced objects waiting for their deletion

Invariants
- One generation is at work at a time: whoever begins takes the next one by compare-and-swap of the state. A generation
  is never used again, so no name of an object is.
- While it is `building`, nothing of the catalog has changed, and whoever comes next may take over: the objects that
  were made are orphans then. It has become `switching` in one step, after everything that is to be done was written
  down: from there on it can only be finished, by anybody, and to do so twice changes nothing.
- Who is `building` says from time to time that it is still there. That is a courtesy to whoever comes next, and nothing
  depends on it: who was taken over finds out when it wants to switch.
"""

from __future__ import annotations

import os
import socket
from typing import Literal

import msgspec

from tidelog.tier import owner as documents
from tidelog.tier.catalog import Catalog
from tidelog.tier.descriptor import Descriptor
from tidelog.tier.keys import ObjectId, parse_object_id

Phase = Literal["idle", "building", "switching"]
# Who has not said for so long that it is still there is taken for dead.
SILENT_US = 120 * 1_000_000


class Replaced(msgspec.Struct, frozen=True, array_like=True):
    """An object that is to be replaced. `version` is that of its descriptor when the new object was planned."""

    object_id: str
    version: str
    size: int

    @property
    def name(self) -> ObjectId:
        """Its name, taken apart."""
        name = parse_object_id(self.object_id)
        assert name is not None, "only objects of ours are replaced"
        return name


class Replacement(msgspec.Struct, frozen=True, kw_only=True):
    """A new object and those that it takes the place of: neighbours, in order, with the same offsets together."""

    descriptor: Descriptor
    replaced: tuple[Replaced, ...]


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """A generation that has switched: the objects that it replaced are to be deleted some time after that."""

    generation: int
    switched_us: int
    starts: tuple[int, ...]


class ReplacementState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far the compactions of a topic are. `starts` are those of the new objects that are being switched to."""

    generation: int = 0
    phase: Phase = "idle"
    host: str = ""
    pid: int = 0
    renewed_us: int = 0
    starts: tuple[int, ...] = ()
    waiting: tuple[Waiting, ...] = ()

    def is_at_work(self, now_us: int) -> bool:
        """Whether somebody seems to be building: it has said so not long ago, and is not known to be dead."""
        if self.phase != "building" or now_us - self.renewed_us > SILENT_US:
            return False
        return self.host != socket.gethostname() or _is_running(self.pid)

    def built_by_here(self, generation: int, now_us: int) -> ReplacementState:
        """The state in which this process builds the objects of a generation."""
        return msgspec.structs.replace(
            self,
            generation=generation,
            phase="building",
            host=socket.gethostname(),
            pid=os.getpid(),
            renewed_us=now_us,
        )


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def read_state(catalog: Catalog) -> tuple[ReplacementState, str | None]:
    """The state, and its version; None where there never was a compaction."""
    key = catalog.keys.replacement_state
    entry = catalog.metadata.get(key)
    if entry is None:
        return ReplacementState(), None
    return documents.decode(entry.value, key, ReplacementState), entry.version


def read_replacement(catalog: Catalog, generation: int, start_offset: int) -> Replacement | None:
    """What was written down for one new object; None when that is done with."""
    key = catalog.keys.replacement(generation, start_offset)
    entry = catalog.metadata.get(key)
    return None if entry is None else documents.decode(entry.value, key, Replacement)


class Spoken(msgspec.Struct, frozen=True):
    """Objects that no descriptor needs to name, because a compaction still speaks for them."""

    building: int | None
    replaced: frozenset[ObjectId]

    def __contains__(self, name: ObjectId) -> bool:
        return name in self.replaced or (name.generation > 0 and name.generation == self.building)


def spoken_for(catalog: Catalog) -> Spoken:
    """Which objects a sweep has to leave alone: those that are being made, and those that wait for their deletion."""
    state, _ = read_state(catalog)
    starts = [(one.generation, start) for one in state.waiting for start in one.starts]
    starts += [(state.generation, start) for start in state.starts]
    found = (read_replacement(catalog, *place) for place in starts)
    replaced = frozenset(old.name for one in found if one is not None for old in one.replaced)
    return Spoken(None if state.phase == "idle" else state.generation, replaced)
