"""The log of an engine as `verify` sees it: what the catalog says, what was found in its objects, what follows.

Invariants
- Objects that were read stay known from one look to the next; those that were gone are looked for once more.
- Descriptors follow each other in LSNs and in positions; the manifest's marks are where the objects end, and at the
  high-water LSN is the record that completes the entry of the high-water mark.
- From the oldest state on every record is there: else it could not be restored from.
"""

from __future__ import annotations

from collections.abc import Iterator

from tidelog.engine.manifest import Manifest
from tidelog.pipeline.engine_jobs.verify_log import LogFinding, LogWork
from tidelog.pipeline.engine_jobs.verify_words import engine_problem, in_lsns
from tidelog.pipeline.engines.place import OpenedEngine
from tidelog.pipeline.engines.store_place import EnginePlace
from tidelog.pipeline.jobs.job import Problem
from tidelog.pipeline.jobs.verify_catalog import CatalogLook, look_at_catalog
from tidelog.tier.catalog import Catalog
from tidelog.tier.descriptor import Descriptor

_FIRST_LSN = 1


def catalog_of(opened: OpenedEngine) -> CatalogLook:
    """The catalog as it is now."""
    return look_at_catalog(f"engine {opened.keys.name}", Catalog(opened.metadata, opened.keys), _FIRST_LSN)


class LogVerification:
    """What is known of the log so far."""

    def __init__(self, place: EnginePlace) -> None:
        self.found: dict[str, LogFinding] = {}
        self._place = place
        self._look: CatalogLook | None = None
        self._manifest: Manifest | None = None
        self._owner_is_known = True

    def look(self, opened: OpenedEngine, manifest: Manifest) -> None:
        """Reads the catalog, again."""
        self._manifest = manifest
        self._look = catalog_of(opened)
        self._owner_is_known = opened.catalog.owner() is not None
        self.found = {name: one for name, one in self.found.items() if not one.is_gone}

    @property
    def seen(self) -> CatalogLook | None:
        """The catalog as it was looked at."""
        return self._look

    @property
    def descriptors(self) -> tuple[Descriptor, ...]:
        """Those that count."""
        return () if self._look is None else self._look.descriptors

    def works(self) -> list[LogWork]:
        """Objects that have not been read yet."""
        assert self._manifest is not None, "it was looked at"
        high_water_lsn = self._manifest.high_water_lsn
        return [
            LogWork(place=self._place, descriptor=one, high_water_lsn=high_water_lsn)
            for one in self.descriptors
            if one.object_id not in self.found
        ]

    def findings(self) -> list[LogFinding]:
        """What was found in the objects that count."""
        return [one for descriptor in self.descriptors if (one := self.found.get(descriptor.object_id)) is not None]

    def problems(self) -> Iterator[Problem]:
        """All that is wrong, in the order of the catalog."""
        assert self._look is not None, "it was looked at"
        yield from (in_lsns(problem) for problem in self._look.problems)
        if self.descriptors and not self._owner_is_known:
            yield self._problem(None, "nobody is written down as the owner of the engine")
        yield from self._position_problems()
        for descriptor in self.descriptors:
            yield from self._object_problems(descriptor)
        yield from self._mark_problems()

    def _object_problems(self, descriptor: Descriptor) -> Iterator[Problem]:
        found = self.found.get(descriptor.object_id)
        if found is None or found.is_gone:
            reason = f"the object is missing (LSN {descriptor.start_offset} to {descriptor.end_offset})"
            yield self._problem(self._place.keys.object(descriptor.name), reason)
        else:
            yield from found.problems

    def _position_problems(self) -> Iterator[Problem]:
        expected: int | None = None
        for one in self.descriptors:
            key = self._place.keys.descriptor(one.start_offset)
            if not isinstance(one.position, int):
                yield self._problem(key, "it does not say its position in the log")
                expected = None
                continue
            if expected is not None and one.position != expected:
                yield self._problem(
                    key, f"it begins at position {one.position}, and the object before ends at {expected}"
                )
            expected = one.position + one.raw_size

    # The marks of the manifest

    def _mark_problems(self) -> Iterator[Problem]:
        assert self._look is not None, "it was looked at"
        assert self._manifest is not None, "it was looked at"
        manifest, end_lsn = self._manifest, self._look.next_offset
        if manifest.shipped_lsn > max(1, end_lsn):
            reason = f"it says that LSN {manifest.shipped_lsn - 1} is shipped, and the catalog ends at {end_lsn - 1}"
            yield self._mark_problem(reason)
        yield from self._shipped_position_problems(manifest)
        yield from self._high_water_problems(manifest)
        yield from self._start_problems(manifest)

    def _shipped_position_problems(self, manifest: Manifest) -> Iterator[Problem]:
        last = next((one for one in self.descriptors if one.next_offset == manifest.shipped_lsn), None)
        if last is not None and isinstance(last.position, int):
            position = last.position + last.raw_size
            if position != manifest.shipped_position:
                yield self._mark_problem(f"it says position {manifest.shipped_position}, the objects end at {position}")

    def _high_water_problems(self, manifest: Manifest) -> Iterator[Problem]:
        lsn = manifest.high_water_lsn
        holder = next((one for one in self.descriptors if one.start_offset <= lsn <= one.end_offset), None)
        found = None if holder is None else self.found.get(holder.object_id)
        if found is None or found.is_gone or found.problems:
            return  # dropped behind a compaction, or told already
        if found.high_water_seq != manifest.high_water_mark:
            said = f"it says that seq {manifest.high_water_mark} is complete with LSN {lsn}"
            there = "no entry ends there" if found.high_water_seq is None else f"seq {found.high_water_seq} ends there"
            yield self._mark_problem(f"{said}, and {there}")

    def _start_problems(self, manifest: Manifest) -> Iterator[Problem]:
        """Whatever a restore may begin with, the records from there on have to be there."""
        assert self._look is not None, "it was looked at"
        start = self._look.start_offset
        if not manifest.checkpoints and start > _FIRST_LSN:
            yield self._mark_problem(f"it names no state, and the log begins at LSN {start}")
        for state in manifest.checkpoints:
            if state.lsn < start:
                yield self._problem(state.key, f"it goes on with LSN {state.lsn}, and the log begins at LSN {start}")

    def _mark_problem(self, reason: str) -> Problem:
        return self._problem(self._place.keys.engine_manifest, reason)

    def _problem(self, place: str | None, reason: str) -> Problem:
        return engine_problem(self._place.name, place, reason)
