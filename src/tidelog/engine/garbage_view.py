"""The store of an engine for whoever plans a collection and owns nothing: everything is read, nothing is claimed.

Invariants
- Nothing in the store is changed, and its owner goes on undisturbed.
- The engine beside it is brought to where its owner would be: the marks and the start of history of the manifest count.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Self

from tidelog.engine.core import Core
from tidelog.engine.garbage_plan import Piece
from tidelog.engine.garbage_store import allowed_by_pins
from tidelog.engine.manifest import Manifest, read_manifest
from tidelog.engine.store_link import take_over_start
from tidelog.errors import NotSupportedError
from tidelog.tier.catalog import Catalog
from tidelog.tier.keys import EngineKeys
from tidelog.tier.metadata.store import MetadataStore
from tidelog.tier.object_store import ObjectStore


class ViewedStore:
    """What a plan asks of a store. `owned` and `published` are named as those of an owner, for who asks either."""

    place: Final = "store"

    def __init__(self, core: Core, objects: ObjectStore, metadata: MetadataStore, keys: EngineKeys) -> None:
        self._core = core
        self.objects = objects
        self.catalog = Catalog(metadata, keys)
        found = read_manifest(metadata, keys)
        self.published = Manifest(epoch=0) if found is None else found[0]
        self._catch_up()

    def _catch_up(self) -> None:
        shipped_seq, marks = self.published.high_water_mark, self._core.marks
        if shipped_seq > marks.low_water_mark:
            marks.raise_low_water_mark(shipped_seq)
        marks.raise_high_water_mark(shipped_seq)
        take_over_start(self._core, self.published)

    @property
    def owned(self) -> Self:
        """Its catalog is there; what an owner could change is not."""
        return self

    @contextmanager
    def linked(self) -> Iterator[Self]:
        """As an owner's link, for those who read through it."""
        yield self

    def pieces(self) -> list[Piece]:
        """The objects of the log, oldest first."""
        found = self.catalog.between(self.catalog.start_offset(), self.published.shipped_lsn)
        return [Piece(one.object_id, one.start_offset, one.next_offset, one.raw_size, one.size) for one in found]

    def needed_from_lsn(self) -> int:
        """Where the oldest state goes on."""
        return min([state.lsn for state in self.published.checkpoints], default=0)

    def compacted_lsn(self) -> int:
        """The LSN below which all values are in compacted data; 0 where there is none."""
        compacted = self.published.compacted
        return 0 if compacted is None else compacted.lsn

    def limit(self, horizon: int) -> int:
        """The horizon, as far as those allow it who read a state in the store."""
        return allowed_by_pins(self.published, horizon, self._core.clock.now_us())

    def move_start(self, horizon: int, keep_versions: int) -> int:
        """Is for owners."""
        raise _not_owned()

    def drop_below(self, lsn: int) -> tuple[int, int]:
        """Is for owners."""
        raise _not_owned()

    def finish(self) -> None:
        """Is for owners."""
        raise _not_owned()


def _not_owned() -> NotSupportedError:
    return NotSupportedError("garbage is collected by the owner of an engine", hint="Open the engine")
