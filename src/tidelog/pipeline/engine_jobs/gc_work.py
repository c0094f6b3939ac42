"""What a worker does for the garbage of an engine: lists, and deletes what still falls under the rules.

Invariants
- What is referenced is read before anything is listed: a file that appears later is of a later compaction.
- Right before a deletion the manifest is read again, and every key is judged once more by it.
"""

from __future__ import annotations

import msgspec

from tidelog.engine.compacted import read_compaction
from tidelog.engine.manifest import Manifest, read_manifest
from tidelog.engine.store_checkpoint import StoredState
from tidelog.errors import DataError, NotFoundError
from tidelog.pipeline.engine_jobs.gc_rules import References, judged, judged_data
from tidelog.pipeline.engines.store_place import EnginePlace
from tidelog.tier.keys import EngineKeys
from tidelog.tier.object_store import ObjectInfo, ObjectStore
from tidelog.tier.sweep import UNFINISHED_AGE_US


class ListWork(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix to be listed."""

    place: EnginePlace
    prefix: str
    now_us: int
    lists_objects: bool = True


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """Keys and sizes below a prefix, and uploads that nobody has touched for a day."""

    prefix: str
    objects: tuple[tuple[str, int], ...]
    unfinished: tuple[ObjectInfo, ...]


class DeleteWork(msgspec.Struct, frozen=True, kw_only=True):
    """Keys to be deleted, and the generation that they were found to be garbage of."""

    place: EnginePlace
    objects: tuple[tuple[str, int], ...]
    generation: int


class Deleted(msgspec.Struct, frozen=True, kw_only=True):
    """What was deleted, and what stayed, and why."""

    keys: tuple[str, ...] = ()
    bytes: int = 0
    kept: tuple[tuple[str, str], ...] = ()


def list_prefix(work: ListWork) -> Listed:
    """What is below a prefix."""
    objects = work.place.opened().objects
    found = tuple((info.key, info.size) for info in objects.list(work.prefix)) if work.lists_objects else ()
    before_us = work.now_us - UNFINISHED_AGE_US
    unfinished = tuple(objects.unfinished_uploads(work.prefix, modified_before_us=before_us))
    return Listed(prefix=work.prefix, objects=found, unfinished=unfinished)


def delete_garbage(work: DeleteWork) -> Deleted:
    """Deletes those that are garbage by the manifest of this moment too."""
    keys, objects = work.place.keys, work.place.opened().objects
    found = read_manifest(work.place.catalog().metadata, keys)
    references = References(epoch=0) if found is None else references_of(found[0], objects, keys)
    doomed: list[tuple[str, int]] = []
    kept: list[tuple[str, str]] = []
    for key, size in work.objects:
        why = _why_not(key, size, references, keys, work.generation)
        if why is None:
            doomed.append((key, size))
        else:
            kept.append((key, why))
    objects.delete([key for key, _ in doomed])
    return Deleted(keys=tuple(key for key, _ in doomed), bytes=sum(size for _, size in doomed), kept=tuple(kept))


def _why_not(key: str, size: int, references: References, keys: EngineKeys, generation: int) -> str | None:
    if references.generation < generation:
        return "the manifest has gone back: it may be an old copy of itself"
    is_data = key.startswith(keys.data_prefix)
    judge = judged_data if is_data else judged
    verdict = judge(key, size, references, keys, is_recent=False)
    if verdict is None:
        return "it is referenced by now"
    return None if verdict.action == "remove" else verdict.why


# What is referenced


def references_of(manifest: Manifest, objects: ObjectStore, keys: EngineKeys) -> References:
    """Everything that a manifest leads to, except for the log and data files."""
    found = _Gathering(manifest, objects, keys)
    found.gather()
    compacted, states = manifest.compacted, manifest.checkpoints
    times = [state.created_us for state in states[-1:]] + ([] if compacted is None else [compacted.created_us])
    return References(
        epoch=manifest.epoch,
        generation=manifest.generation,
        compacted_seq=0 if compacted is None else compacted.seq,
        newest_state=(states[-1].seq, states[-1].lsn) if states else (0, 0),
        superseded_us=max(times, default=0),
        sizes=found.sizes,
        leaving=manifest.leaving,
        problems=tuple(found.problems),
    )


class _Gathering:
    """Goes through what a manifest names."""

    def __init__(self, manifest: Manifest, objects: ObjectStore, keys: EngineKeys) -> None:
        self.sizes: dict[str, int] = {}
        self.problems: list[str] = []
        self._manifest = manifest
        self._objects = objects
        self._keys = keys

    def gather(self) -> None:
        """Whatever cannot be read is a problem, and what it would lead to is not known."""
        if self._manifest.compacted is not None:
            try:
                self._gather_root()
            except (DataError, NotFoundError) as error:
                self.problems.append(str(error))
        for state in self._manifest.checkpoints:
            self.sizes[state.key] = state.size
            try:
                parts = StoredState(self._objects, state).parts()
                self.sizes |= {part.key: part.size for part in parts}
            except (DataError, NotFoundError) as error:
                self.problems.append(str(error))

    def _gather_root(self) -> None:
        compacted = self._manifest.compacted
        assert compacted is not None
        self.sizes[compacted.key] = compacted.size
        root = read_compaction(self._objects, self._keys, compacted)
        self.sizes |= {pack.key: pack.size for pack in root.packs}
        self.sizes |= {part.key: part.size for part in (*root.versions, *root.bodies)}
