"""The rules by which an engine's garbage in its store is collected, and the proof for each (`cold/gc.py` applies them).

    compacted log    whole objects below what the published compaction holds and every listed snapshot replays
    snapshot         all but the two newest listed ones; one that is not listed, once nobody can list it any more
    snapshot part    of an earlier seq than the newest listed snapshot, if no listed one uses it
    blob file, index file, root
                     of a generation that is published, if neither the published root nor a listed snapshot names it
    data file        of a seq that is compacted, if the published index does not name it
    value file       of a seq up to that of the newest listed snapshot, if neither a listed snapshot nor the published
                     index refers to it
and of any log: orphans, replaced objects, unfinished uploads.

Why none of this needs a claim, nor a clock
- A compaction is published on the generation before it or not at all, a snapshot is listed after the newest one or not
  at all, and whether a value has a data file is decided once, when it is first compacted. So a file that is not
  referenced now, of a published generation, seq or snapshot, is never referenced again, whatever publishes, restores or
  owns the engine meanwhile: a collection that slept between plan and deletion deletes nothing that became needed.
- A version that refers to a value file is the put that named it, or a copy of a version that was seen. A snapshot has
  all versions up to its seq that any state since the start of history sees: a file of an earlier put to which none of
  them refers is never referred to again.
- The log below `droppable_below_lsn` of a published manifest is never needed again: a compaction only moves forward, a
  snapshot is only ever added after the newest one, and a pinned one stays listed. The start of the log is moved on the
  version that was read, with the manifest unchanged, and only forwards; a new owner's own rewrite comes first or makes
  this retry.

Invariants
- The manifest is read first, then what it leads to, then the store is listed, then the catalog is walked: an object
  that appears in between belongs to work in progress, and no rule applies to it.
- Nothing is deleted because something could not be read: with an unreadable root or snapshot all files stay, and while
  anything that is referenced is missing, the whole log does.
- The deletion of a snapshot is recorded in the manifest, done, and forgotten, in this order. A pinned one stays.
- The start of the log moves before descriptors go, and these before their objects. Whole objects are dropped, oldest
  first, and never the newest one: the log continues there. What is interrupted is found below the start.
- Superseded files stay for a grace period, for readers that have not pinned them.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple, cast

import msgspec

from tidelog._native import count_cells
from tidelog.clock import Clock, SystemClock
from tidelog.cold.catalog import Catalog, Descriptor, StartMark
from tidelog.cold.gc import (
    DEFAULT_GRACE_SECONDS,
    Action,
    Candidate,
    Collector,
    LogObjects,
    Plan,
    Reason,
    ReplacedObjects,
    Report,
    Rule,
    UnfinishedUploads,
)
from tidelog.cold.ownership import OwnedCatalog
from tidelog.cold.retention import names_object, published_below, remove_all_unpublished
from tidelog.cold.rewrite_commit import pending_rewrites
from tidelog.engine.cold.manifest import Manifest, change_manifest, read_manifest, without_old
from tidelog.engine.cold.value_store import stored_values
from tidelog.engine.mvcc.cells import Cell, decode_cell
from tidelog.engine.sst.blob_file import FilePointer, cell_of, decode_version
from tidelog.engine.sst.block import rows_in
from tidelog.engine.sst.snapshot import StoredState, named_states
from tidelog.engine.sst.sorted_index import Compaction, read_compaction
from tidelog.engine.sst.sstable import SSTable
from tidelog.engine.sst.value_file import ValueName, parse_value_name, reference_of
from tidelog.errors import DataError, NotFoundError
from tidelog.store.document import UnchangedNeighbours, retried
from tidelog.store.keys import EngineKeys, ObjectId
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.object_store import ObjectStore

_MARKS = 4


# What is referenced, and what never will be again


class DataFile(NamedTuple):
    """A file with one value: how it is stored, and a version that points to it, which has its checksum."""

    key: str
    place: FilePointer
    cell: Cell


def data_files(objects: ObjectStore, keys: EngineKeys, root: Compaction) -> Iterator[DataFile]:
    """The data files of a compaction, each with one value; some more than once: copies point to the same file."""
    for part in root.versions:
        for _, value in SSTable(objects, part, kind="versions").rows():
            cell, place = decode_version(value)
            if isinstance(place, FilePointer):
                key = keys.data_file_named(place.name)
                if key is None:
                    raise DataError(f"{part.key} names an unknown data file {place.name!r}")
                yield DataFile(key, place, decode_cell(cell))


_NEVER_AGAIN = frozenset({Reason.SUPERSEDED, Reason.UNLISTED, Reason.LEAVING})
_GOES = _NEVER_AGAIN | {Reason.OLD}


def fate_of(key: str, manifest: Manifest, keys: EngineKeys) -> tuple[str, Reason]:
    """What an object is that this manifest does not lead to, and whether a later one ever can (`_NEVER_AGAIN`)."""
    states = manifest.checkpoints
    if (file := keys.parse_compacted(key)) is not None:
        kind = {"blob": "blob file", "root": "root"}.get(file.kind, "index file")
        return kind, Reason.SUPERSEDED if file.generation <= manifest.generation else Reason.IN_PROGRESS
    if (data := keys.parse_data_file(key)) is not None:
        is_past = manifest.compacted is not None and data.seq <= manifest.compacted.seq
        return "data file", Reason.SUPERSEDED if is_past else Reason.IN_PROGRESS
    if key.startswith(keys.values_prefix):
        name = parse_value_name(key.removeprefix(keys.values_prefix))
        is_past = name is not None and bool(states) and name.seq <= states[-1].seq
        return "value file", Reason.SUPERSEDED if is_past else Reason.IN_PROGRESS
    if (part := keys.parse_state_part(key)) is not None:
        is_past = bool(states) and part.seq < states[-1].seq
        return "snapshot part", Reason.SUPERSEDED if is_past else Reason.IN_PROGRESS
    if (state := keys.parse_checkpoint(key)) is None:
        return "foreign", Reason.FOREIGN
    if key in manifest.leaving:
        return "snapshot", Reason.LEAVING
    is_past = bool(states) and (state.seq, state.lsn) < (states[-1].seq, states[-1].lsn)
    return "snapshot", Reason.UNLISTED if is_past else Reason.IN_PROGRESS


def is_superseded(key: str, manifest: Manifest, referenced: Collection[str], keys: EngineKeys) -> bool:
    """Whether a file of a compaction or of a snapshot is unreferenced, and will stay so. False for anything else."""
    return key not in referenced and fate_of(key, manifest, keys)[1] is Reason.SUPERSEDED


def superseded_parts(objects: ObjectStore, keys: EngineKeys, manifest: Manifest) -> list[str]:
    """Files of snapshots that no listed snapshot uses any more. Those of a compaction are never among them."""
    return [key for key, kind, _, _ in _unused_snapshots(objects, keys, manifest) if kind == "snapshot part"]


def _unused_snapshots(objects: ObjectStore, keys: EngineKeys, manifest: Manifest) -> list[tuple[str, str, Reason, int]]:
    """Snapshots that nobody can list any more, and parts that no listed one uses: key, kind, reason and size."""
    listed = {state.key for state in manifest.checkpoints} | set(manifest.leaving)
    found = [
        (info.key, *fate_of(info.key, manifest, keys), info.size)
        for info in objects.list(keys.checkpoints_prefix)
        if info.key not in listed
    ]
    suspects = [one for one in found if one[2] in _NEVER_AGAIN]
    if not any(kind == "snapshot part" for _, kind, _, _ in suspects):
        return suspects
    try:
        used = {part.key for state in manifest.checkpoints for part in StoredState(objects, state).parts()}
    except (DataError, NotFoundError):  # which files it has is not known
        return [one for one in suspects if one[1] == "snapshot"]
    return [one for one in suspects if one[0] not in used]


def unused_values(objects: ObjectStore, keys: EngineKeys, manifest: Manifest) -> dict[str, int]:
    """Value files to which no state in the store refers, with their bytes; those that are too new are among them. Rows
    are read only if there are value files; DataError or NotFoundError if some cannot be.
    """
    there = stored_values(objects, keys)
    used: set[ValueName] = set()
    for state in named_states(objects, keys, manifest) if there else ():
        for block in state.open().blocks():
            cells = [(key, cell_of(value)) for key, value in rows_in(block.raw, block.place.rows, b"")]
            used |= {reference_of(decode_cell(cell)).name for cell in count_cells(cells, array("Q", [0]))}
    return {keys.values_prefix + str(name): size for name, size in there.items() if name not in used}


class References(NamedTuple):
    """What a manifest leads to, data files apart: sizes by key, and what cannot be read."""

    manifest: Manifest
    sizes: dict[str, int]
    problems: tuple[str, ...]

    @property
    def superseded_us(self) -> int:
        """When the newest of it took the place of something else."""
        compacted = self.manifest.compacted
        times = [state.created_us for state in self.manifest.checkpoints[-1:]]
        return max([*times, *([] if compacted is None else [compacted.created_us])], default=0)


def references_of(manifest: Manifest, objects: ObjectStore, keys: EngineKeys) -> References:
    """Everything that a manifest leads to, except for the log and data files."""
    sizes: dict[str, int] = {}
    problems: list[str] = []
    try:
        sizes |= _sizes_of_compaction(manifest, objects, keys)
    except (DataError, NotFoundError) as error:
        problems.append(str(error))
    for state in manifest.checkpoints:
        sizes[state.key] = state.size
        try:
            sizes |= {part.key: part.size for part in StoredState(objects, state).parts()}
        except (DataError, NotFoundError) as error:
            problems.append(str(error))
    return References(manifest, sizes, tuple(problems))


def _sizes_of_compaction(manifest: Manifest, objects: ObjectStore, keys: EngineKeys) -> dict[str, int]:
    compacted = manifest.compacted
    if compacted is None:
        return {}
    root = read_compaction(objects, keys, compacted)
    files = {part.key: part.size for part in (*root.versions, *root.values)}
    return {compacted.key: compacted.size, **{blob_file.key: blob_file.size for blob_file in root.blob_files}, **files}


# The mark phase


class ComparedDataFiles(NamedTuple):
    """Data files held against the published index: those that it does not name, and those that it names and that are
    not there or have another size (key, wanted and found bytes); of the rest a count and a sum.
    """

    unnamed: Mapping[str, int] = {}
    missing: Sequence[tuple[str, int, int | None]] = ()
    named: int = 0
    named_bytes: int = 0
    named_sum: int = 0
    there: int = 0
    there_sum: int = 0


CompareDataFiles = Callable[[Compaction | None], ComparedDataFiles]
"""An engine may have millions of data files: who collects says how their names are compared, by Spark for example."""


class Marked(NamedTuple):
    """What is referenced and what is there, as of one moment. `references` are those without old snapshots."""

    published: Manifest
    references: References
    sizes: dict[str, int]
    data: ComparedDataFiles
    unused_values: Mapping[str, int] = {}

    @property
    def missing(self) -> list[tuple[str, int, int | None]]:
        """What is referenced and not there, or of another size: key, bytes that it must have, and those it has."""
        named = sorted(self.references.sizes.items())
        return [(key, size, self.sizes.get(key)) for key, size in named if self.sizes.get(key) != size]

    @property
    def wrong(self) -> frozenset[str]:
        """What is not as it should be: keys, and what could not be read."""
        missing = (key for key, _, _ in (*self.missing, *self.data.missing))
        return frozenset((*missing, *self.references.problems))


class EngineCollector(Collector):
    """Collects the garbage of an engine in its store. It claims nothing and runs beside owners, restores and jobs."""

    def __init__(
        self,
        catalog: Catalog,
        objects: ObjectStore,
        keys: EngineKeys,
        clock: Clock,
        compare: CompareDataFiles,
        *,
        grace_seconds: float = DEFAULT_GRACE_SECONDS,
    ) -> None:
        super().__init__(catalog, objects, clock.now_us(), grace_seconds=grace_seconds, rules=ENGINE_RULES)
        self.keys = keys
        self._clock = clock
        self._compare = compare
        self._fresh: References | None = None

    def plan(self) -> Plan:
        self.marked = self.mark()
        return super().plan()

    def apply(self, plan: Plan, *, drop: Collection[Reason] = ()) -> Report:
        """Old snapshots are recorded in the manifest first: what only they lead to can go with them."""
        old = {one.key for one in plan.removable if one.reason is Reason.OLD}
        if old:
            self._change(lambda manifest: self._recorded(manifest, old))
        self.marked = self.mark()
        report = super().apply(plan, drop=drop)
        self._change(self._without_gone)
        return report

    def _recorded(self, manifest: Manifest, planned: Collection[str]) -> Manifest:
        """Those of the planned snapshots that may still go: one that somebody has pinned meanwhile stays listed."""
        leaving = without_old(manifest, self.now_us).leaving
        going = [key for key in leaving if key in planned and key not in manifest.leaving]
        return msgspec.structs.replace(
            manifest,
            checkpoints=tuple(state for state in manifest.checkpoints if state.key not in going),
            leaving=(*manifest.leaving, *going),
        )

    def _without_gone(self, manifest: Manifest) -> Manifest:
        left = tuple(key for key in manifest.leaving if self._is_there(key))
        return msgspec.structs.replace(manifest, leaving=left)

    def _is_there(self, key: str) -> bool:
        try:
            self.objects.head(key)
        except NotFoundError:
            return False
        return True

    def _change(self, change: Callable[[Manifest], Manifest]) -> None:
        change_manifest(self.catalog.metadata, self.keys, self._clock, change)

    # What is referenced

    def published(self) -> Manifest:
        found = read_manifest(self.catalog.metadata, self.keys)
        return Manifest(epoch=0) if found is None else found.value

    def fresh_references(self) -> References:
        """What the manifest of this moment leads to."""
        manifest = self.published()
        if self._fresh is None or self._fresh.manifest != manifest:
            self._fresh = references_of(manifest, self.objects, self.keys)
        return self._fresh

    def mark(self) -> Marked:
        """What is referenced, and what is there. What others change meanwhile may look missing: that is believed if it
        persists in a second mark phase.
        """
        marked, before = self._mark_one_generation(), frozenset[str]()
        for _ in range(_MARKS - 1):
            if marked.wrong <= before:
                break
            before, marked = marked.wrong, self._mark_one_generation()
        return marked

    def _mark_one_generation(self) -> Marked:
        """One mark phase. Files of a compaction may vanish meanwhile, if another was published: then it restarts."""
        for _ in range(_MARKS - 1):
            generation = self.published().generation
            try:
                return self._mark_once()
            except Exception:  # what a task of Spark meets is not raised as an error of ours
                if self.published().generation == generation:
                    raise
        return self._mark_once()

    def _mark_once(self) -> Marked:
        published = self.published()
        references = references_of(published, self.objects, self.keys)
        settled = without_old(published, self.now_us)
        # If something cannot be read, every snapshot may be the last good one.
        if not references.problems and settled.checkpoints != published.checkpoints:
            references = references_of(settled, self.objects, self.keys)
        prefixes = (self.keys.blobs_prefix, self.keys.index_prefix, self.keys.checkpoints_prefix)
        sizes = {info.key: info.size for prefix in prefixes for info in self.objects.list(prefix)}
        marked = Marked(published, references, sizes, ComparedDataFiles())
        if marked.wrong:
            return marked
        marked = marked._replace(data=self._compared(references.manifest))
        try:
            unused = unused_values(self.objects, self.keys, references.manifest)
        except (DataError, NotFoundError):  # what its rows refer to is not known; a verification says what is wrong
            return marked
        return marked._replace(unused_values=unused)

    def _compared(self, manifest: Manifest) -> ComparedDataFiles:
        """Nothing is asked for where no data file is there, and none is named."""
        root = None if manifest.compacted is None else read_compaction(self.objects, self.keys, manifest.compacted)
        has_files = next(iter(self.objects.list(self.keys.data_prefix)), None) is not None
        return self._compare(root) if has_files or (root is not None and root.data_files) else ComparedDataFiles()


# The rules


class _EngineRule(Rule):
    is_fenced = False
    batch_size = 1000

    @property
    def _engine(self) -> EngineCollector:
        return cast(EngineCollector, self._collector)

    @property
    def _marked(self) -> Marked:
        return self._engine.marked


class CompactedLog(_EngineRule):
    """Objects of the log that compacted data has made unnecessary, and what an interrupted collection left of them."""

    kinds = ("compacted log",)
    batch_size = sys.maxsize  # the start of the log moves once

    def find(self) -> Iterator[Candidate]:
        for descriptor in self._doomed(self._marked.references.manifest):
            key = self._keys.object(descriptor.name)
            yield self._found("remove", Reason.COMPACTED, key, descriptor.size)
        for descriptor in published_below(self._catalog, self._collector.start_offset):
            yield self._found("remove", Reason.BELOW_START, self._keys.object(descriptor.name), descriptor.size)
        for key, size in objects_below(self._catalog, self._objects, self._collector.start_offset):
            yield self._found("remove", Reason.BELOW_START, key, size)

    def _doomed(self, manifest: Manifest) -> list[Descriptor]:
        """While anything of the compacted data is missing or unreadable, all of the log may be needed."""
        return [] if self._marked.wrong else whole_objects_below(self._catalog, droppable_below_lsn(manifest))

    def kept(self, batch: Sequence[Candidate]) -> dict[str, Reason]:
        doomed = {self._keys.object(one.name) for one in self._doomed(self._engine.published())}
        start_lsn = self._catalog.start_offset()
        kept: dict[str, Reason] = {}
        for one in batch:
            name = self._keys.parse_object(one.key)
            if name is None:
                kept[one.key] = Reason.FOREIGN
            elif name.end < start_lsn:
                if one.key not in self._collector.there and not names_object(self._catalog, name.start, str(name)):
                    kept[one.key] = Reason.GONE
            elif one.key not in doomed:
                kept[one.key] = Reason.UNREADABLE if self._marked.wrong else Reason.NEEDED
        return kept

    def delete(self, batch: Sequence[Candidate]) -> None:
        below_lsn = max([name.end + 1 for one in batch if (name := one.name) is not None])
        drop_wal(self._objects, self._catalog.metadata, self._engine.keys, below_lsn)


class CompactedFiles(_EngineRule):
    """Snapshots and their parts; blob files, index files and roots of compactions; and what is missing of them."""

    kinds: ClassVar[tuple[str, ...]] = ("snapshot", "snapshot part", "blob file", "index file", "root")

    def find(self) -> Iterator[Candidate]:
        marked, manifest = self._marked, self._marked.references.manifest
        for key, size, found in marked.missing:
            kind = fate_of(key, manifest, self._engine.keys)[0]
            yield _wrong(kind, key, size, found)
        for key, size in marked.sizes.items():
            if key not in marked.references.sizes:
                yield self._judged(key, size)

    def _judged(self, key: str, size: int) -> Candidate:
        """What becomes of a file to which no reference leads."""
        kind, reason = fate_of(key, self._marked.references.manifest, self._engine.keys)
        kept = self._kept_back(reason)
        if kept is None and any(state.key == key for state in self._marked.published.checkpoints):
            reason = Reason.OLD  # it is listed still
        action: Action = "remove" if kept is None and reason in _GOES else "keep"
        return Candidate(kind=kind, action=action, reason=kept or reason, key=key, bytes=size)

    def _kept_back(self, reason: Reason) -> Reason | None:
        """What keeps a file to which no reference leads: doubt, and the grace period. Readers pin snapshots."""
        if reason in _NEVER_AGAIN and self._marked.references.problems:
            return Reason.UNREADABLE
        is_recent = self._collector.is_recent(self._marked.references.superseded_us)
        return Reason.RECENT if reason in _NEVER_AGAIN and reason is not Reason.LEAVING and is_recent else None

    def kept(self, batch: Sequence[Candidate]) -> dict[str, Reason]:
        references = self._engine.fresh_references()
        found = ((one.key, self._kept(one.key, references)) for one in batch)
        return {key: reason for key, reason in found if reason is not None}

    def _kept(self, key: str, references: References) -> Reason | None:
        if not self._was_there(key):
            return Reason.GONE
        if references.manifest.generation < self._marked.published.generation:
            return Reason.STALE
        if key in references.sizes:
            return Reason.NEEDED
        reason = fate_of(key, references.manifest, self._engine.keys)[1]
        if reason not in _NEVER_AGAIN:
            return reason
        return Reason.UNREADABLE if references.problems else self._kept_back(reason)

    def _was_there(self, key: str) -> bool:
        return key in self._marked.sizes


class DataFiles(CompactedFiles):
    """Data files that the published index does not name."""

    kinds = ("data file",)

    def find(self) -> Iterator[Candidate]:
        for missing in self._marked.data.missing:
            yield _wrong("data file", *missing)
        yield from (self._judged(key, size) for key, size in self._marked.data.unnamed.items())

    def _was_there(self, key: str) -> bool:
        """There and not named by the index of this moment. One that is named is no garbage, whatever a plan says."""
        return key in self._marked.data.unnamed


class ValueFiles(CompactedFiles):
    """Value files to which no version refers. The owner collects them too; this finds what nobody does any more."""

    kinds = ("value file",)

    def find(self) -> Iterator[Candidate]:
        yield from (self._judged(key, size) for key, size in self._marked.unused_values.items())

    def _was_there(self, key: str) -> bool:
        """There, and not referred to at this moment."""
        return key in self._marked.unused_values


class EngineUploads(UnfinishedUploads):
    """Uploads to an engine's store that nobody has touched for a day."""

    @property
    def prefixes(self) -> tuple[str, ...]:
        keys = cast(EngineCollector, self._collector).keys
        of_compaction = keys.blobs_prefix, keys.index_prefix, keys.data_prefix
        return keys.objects_prefix, keys.checkpoints_prefix, keys.values_prefix, *of_compaction


ENGINE_RULES = (ReplacedObjects, CompactedLog, LogObjects, EngineUploads, CompactedFiles, DataFiles, ValueFiles)


def _wrong(kind: str, key: str, size: int, found: int | None) -> Candidate:
    if found is None:
        return Candidate(kind=kind, action="LOST", reason=Reason.LOST, key=key, bytes=size)
    return Candidate(kind=kind, action="DAMAGED", reason=Reason.DAMAGED, key=key, bytes=found)


# An owner's own collection, when it has settled in: what its predecessors left


class OverlappingObjects(LogObjects):
    """Orphans of the log, found with few requests: published objects follow each other without overlap, so the catalog
    is read only where names overlap.

    What a crashed process uploaded after the end of the catalog is shipped again: then its name overlaps.
    """

    def find(self) -> Iterator[Candidate]:
        end_lsn = self._catalog.next_offset()
        infos = list(self._objects.list(self._keys.objects_prefix))
        sizes = {name: info.size for info in infos if (name := self._keys.parse_object(info.key)) is not None}
        pending = pending_rewrites(self._catalog)  # behind the listing: what is in it and is being built is known to be
        for name in overlapping(sizes):
            is_suspect = name.end < end_lsn and (name.epoch < self._collector.epoch or name.generation)
            if is_suspect and name not in pending and not names_object(self._catalog, name.start, str(name)):
                yield self._found("remove", Reason.ORPHAN, self._keys.object(name), sizes[name])


class UnusedSnapshots(Rule):
    """Snapshots that nobody can list any more, and parts that no listed one uses."""

    kinds = ("snapshot", "snapshot part")
    batch_size = 1000

    def _unused(self) -> list[tuple[str, str, Reason, int]]:
        keys = cast(EngineKeys, self._keys)
        found = read_manifest(self._catalog.metadata, keys)
        return [] if found is None else _unused_snapshots(self._objects, keys, found.value)

    def find(self) -> Iterator[Candidate]:
        for key, kind, reason, size in self._unused():
            yield Candidate(kind=kind, action="remove", reason=reason, key=key, bytes=size)

    def kept(self, batch: Sequence[Candidate]) -> dict[str, Reason]:
        unused = {key for key, _, _, _ in self._unused()}
        return {one.key: Reason.NEEDED for one in batch if one.key not in unused}


def remove_engine_orphans(owned: OwnedCatalog, objects: ObjectStore, now_us: int) -> Report:
    """Deletes what earlier owners left: objects that were never published, and snapshots that were never listed.

    Nothing of a compaction is touched here.
    """
    rules = (OverlappingObjects, UnusedSnapshots)
    collector = Collector(owned.catalog, objects, now_us, owned=owned, rules=rules)
    return collector.apply(collector.plan())


def overlapping(names: Iterable[ObjectId]) -> list[ObjectId]:
    """Returns the objects that share an LSN with another one."""
    found: set[ObjectId] = set()
    widest: ObjectId | None = None
    for name in sorted(names):
        if widest is not None and name.start <= widest.end:
            found |= {name, widest}
        if widest is None or name.end > widest.end:
            widest = name
    return sorted(found)


# Dropping the front of the log, by any process beside a live owner


class DroppedLog(msgspec.Struct, frozen=True, kw_only=True):
    """What was dropped, and where the log begins now."""

    start_lsn: int
    objects: int = 0
    bytes: int = 0


def droppable_below_lsn(manifest: Manifest) -> int:
    """The LSN below which no record is needed, neither for a value nor by a restore. 0 while all are."""
    if manifest.compacted is None or not manifest.checkpoints:
        return 0
    return min(manifest.compacted.lsn, *(state.lsn for state in manifest.checkpoints))


def whole_objects_below(catalog: Catalog, lsn: int) -> list[Descriptor]:
    """The published objects whose records are all below an LSN, oldest first; never the newest one."""
    newest = catalog.newest()
    stop_lsn = min(lsn, 0 if newest is None else newest.start_offset)
    return [one for one in catalog.between(catalog.start_offset(), stop_lsn) if one.next_offset <= stop_lsn]


def drop_wal(
    objects: ObjectStore, metadata: MetadataStore, keys: EngineKeys, below_lsn: int, *, clock: Clock | None = None
) -> DroppedLog:
    """Drops the objects of the log below an LSN, as far as the published manifest allows it. Needs no claim.

    May be interrupted anywhere and repeated, concurrently with an owner and with other droppers.
    """
    catalog = Catalog(metadata, keys)
    start_lsn = _move_start(catalog, keys, below_lsn, clock or SystemClock())
    doomed = _unpublish(catalog, start_lsn)
    if not metadata.copy_is_current(keys.metadata_prefix):
        return DroppedLog(start_lsn=start_lsn)  # a later collection finds them below the start
    gone = remove_all_unpublished(catalog, objects, doomed)
    left_over = [key for key, _ in objects_below(catalog, objects, start_lsn)]
    objects.delete(left_over)
    size = sum(one.size for one in gone)
    return DroppedLog(start_lsn=start_lsn, objects=len(gone) + len(left_over), bytes=size)


def _move_start(catalog: Catalog, keys: EngineKeys, below_lsn: int, clock: Clock) -> int:
    """Persists the new start of the log; returns its LSN."""
    fence = UnchangedNeighbours(catalog.metadata)

    def move(mark: StartMark | None) -> StartMark | None:
        found = read_manifest(catalog.metadata, keys)
        if mark is None or found is None or mark.deleted:
            return None
        fence.expect(keys.engine_manifest, found.version)
        doomed = whole_objects_below(catalog, min(below_lsn, droppable_below_lsn(found.value)))
        start_lsn = doomed[-1].next_offset if doomed else 0
        if start_lsn <= mark.start_offset:
            return mark
        # The epoch stays as it was found: this is no claim, and a new owner rewrites what is not its own.
        return msgspec.structs.replace(mark, start_offset=start_lsn, moved_us=clock.now_us())

    moved = catalog.start_document(fence).update(move)
    return 0 if moved is None else moved.start_offset


def _unpublish(catalog: Catalog, start_lsn: int) -> list[Descriptor]:
    """Removes everything below the start from the catalog, concurrently with others; returns what was removed."""
    seen: dict[str, Descriptor] = {}

    def remove_all() -> None:
        doomed = list(published_below(catalog, start_lsn))
        there = catalog.find_many(one.start_offset for one in doomed)
        seen.update({one.object_id: one for one in doomed})
        found = ((one, there.get(one.start_offset)) for one in doomed)
        versions = {
            catalog.keys.descriptor(one.start_offset): now.version
            for one, now in found
            if now is not None and now.value == one
        }
        catalog.metadata.remove_many(versions)

    retried(remove_all, catalog.keys.segments_prefix)
    return list(seen.values())


def objects_below(catalog: Catalog, objects: ObjectStore, start_lsn: int) -> list[tuple[str, int]]:
    """Objects below the start, and their bytes. Nothing is ever published there again: without a descriptor they go."""
    listed = ((info, catalog.keys.parse_object(info.key)) for info in objects.list(catalog.keys.objects_prefix))
    return [(info.key, info.size) for info, name in listed if name is not None and name.end < start_lsn]
