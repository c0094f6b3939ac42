"""Verifies the replicas of an engine: each must have what it claims, and it must equal what the engine's store has.

Invariants
- A replica is judged by its own manifest and catalog: everything they name must exist, with the same bytes as in the
  engine's store if that still has it. What it does not name yet is lag: a note, not a problem.
- A replica that is ahead of the engine's store, or that was continued under a later epoch, is a problem.
- Unreferenced files are noted. If a replica with a problem was changed meanwhile, it is compared again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tidelog.cold.catalog import Catalog
from tidelog.cold.verify import LOOKS, CatalogLook, look_at_catalog
from tidelog.engine.cold.manifest import Manifest
from tidelog.engine.sst.snapshot import StoredState
from tidelog.engine.sst.sorted_index import read_compaction
from tidelog.engine.sst.sstable import RowPart
from tidelog.engine.verify.store import FIRST_LSN, about_engine
from tidelog.errors import DataError, NotFoundError
from tidelog.findings import Finding
from tidelog.pipeline.address import EngineRoot, OpenedEngine
from tidelog.pipeline.jobs.engine.verify_tasks import CopyWork, compare_copies
from tidelog.pipeline.jobs.job import OnProgress, counted_progress
from tidelog.pipeline.jobs.verify import some_names
from tidelog.pipeline.work import run_on_workers
from tidelog.store.keys import EngineKeys
from tidelog.store.object_store import ObjectStore
from tidelog.store.urls import canonical_url

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# The references of an engine's documents to objects in its store, for comparing one store with another.


class References(NamedTuple):
    """Keys, with the size that they have to have (None: not known); and the value index, which names the data files."""

    files: dict[str, int | None]
    values: tuple[RowPart, ...]


def references_of(objects: ObjectStore, catalog: Catalog, keys: EngineKeys, manifest: Manifest) -> References:
    """Everything that a manifest and a catalog name. What cannot be read of it is left out: others tell of that."""
    files: dict[str, int | None] = dict(_log_objects(catalog, keys))
    values: tuple[RowPart, ...] = ()
    for state in manifest.checkpoints:
        files[state.key] = state.size
        try:
            files |= {part.key: part.size for part in StoredState(objects, state).parts()}
        except (DataError, NotFoundError):
            continue
    if manifest.compacted is not None:
        files[manifest.compacted.key] = manifest.compacted.size
        try:
            root = read_compaction(objects, keys, manifest.compacted)
        except (DataError, NotFoundError):
            return References(files, ())
        files |= {blob_file.key: blob_file.size for blob_file in root.blob_files}
        files |= {part.key: part.size for part in (*root.versions, *root.values)}
        values = root.values
    return References(files, values)


def _log_objects(catalog: Catalog, keys: EngineKeys) -> Iterator[tuple[str, int]]:
    try:
        for descriptor in catalog.between(catalog.start_offset(), 1 << 63):
            yield keys.object(descriptor.name), descriptor.size
    except DataError:
        return  # a descriptor that cannot be understood is reported as such


_FILES_PER_TASK = 16


class ReplicaCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that was compared. `lag_bytes` are those of the log that it has not yet."""

    url: str
    high_water_mark: int
    lag_bytes: int
    files: int
    bytes: int
    problems: int


class ReplicasResult(NamedTuple):
    """What all of them add to a report."""

    checks: tuple[ReplicaCheck, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()


def check_replicas(
    spark: SparkSession, root: EngineRoot, opened: OpenedEngine, urls: Sequence[str], on_progress: OnProgress
) -> ReplicasResult:
    """Compares all of them, one after the other."""
    checks: list[ReplicaCheck] = []
    findings: list[Finding] = []
    notes: list[str] = []
    for url in dict.fromkeys(canonical_url(url) for url in urls):
        comparison = _Comparison(spark, root, opened, url, on_progress)
        checks.append(comparison.run())
        findings += comparison.findings
        notes += comparison.notes
    return ReplicasResult(tuple(checks), tuple(findings), tuple(notes))


def catalog_of(opened: OpenedEngine) -> CatalogLook:
    """The catalog as it is now."""
    return look_at_catalog(about_engine(opened.keys.name), Catalog(opened.metadata, opened.keys), FIRST_LSN)


class _Comparison:
    """One replica."""

    def __init__(
        self, spark: SparkSession, root: EngineRoot, opened: OpenedEngine, url: str, on_progress: OnProgress
    ) -> None:
        self._spark = spark
        self._root = root
        self._opened = opened
        self._url = url
        self._copy_root = root.at(url)
        self._on_progress = on_progress
        self.findings: list[Finding] = []
        self.notes: list[str] = []

    def run(self) -> ReplicaCheck:
        try:
            for _ in range(LOOKS - 1):
                with self._copy_root.open() as copy:
                    before = catalog_of(copy)
                    check = self._compare(copy)
                    has_changed = (copy.newest_manifest(), catalog_of(copy)) != (copy.manifest, before)
                if not self.findings or not has_changed:
                    return check
                self.findings, self.notes = [], []
            with self._copy_root.open() as copy:
                return self._compare(copy)
        except (DataError, NotFoundError) as error:
            self._add(None, error.message)
            return ReplicaCheck(url=self._url, high_water_mark=0, lag_bytes=0, files=0, bytes=0, problems=1)

    def _compare(self, copy: OpenedEngine) -> ReplicaCheck:
        # The replica was looked at first: what comes meanwhile is lag then, and never the other way round.
        manifest = self._opened.newest_manifest()
        origin_catalog = Catalog(self._opened.metadata, self._opened.keys)
        origin = references_of(self._opened.objects, origin_catalog, self._opened.keys, manifest)
        there = references_of(copy.objects, copy.catalog, copy.keys, copy.manifest)
        self._compare_marks(copy.manifest, manifest)
        files, size = self._compare_files(there)
        self._compare_names(copy, origin, there, manifest)
        return ReplicaCheck(
            url=self._url,
            high_water_mark=copy.manifest.high_water_mark,
            lag_bytes=max(0, manifest.shipped_position - copy.manifest.shipped_position),
            files=files,
            bytes=size,
            problems=len(self.findings),
        )

    def _compare_marks(self, copy: Manifest, origin: Manifest) -> None:
        if copy.epoch > origin.epoch:
            self._add(None, f"somebody went on with it, under epoch {copy.epoch}; the engine's own is {origin.epoch}")
        elif (copy.high_water_mark, copy.shipped_lsn) > (origin.high_water_mark, origin.shipped_lsn):
            self._add(
                None, f"it is at seq {copy.high_water_mark}, ahead of the engine's store at {origin.high_water_mark}"
            )
        elif not _is_up_to_date(copy, origin):
            behind = origin.shipped_position - copy.shipped_position
            seqs = f"it is at seq {copy.high_water_mark}, the engine's store at {origin.high_water_mark}"
            self.notes.append(f"the replica {self._url} follows: {seqs}, {behind:,} bytes of the log behind")

    def _compare_files(self, there: References) -> tuple[int, int]:
        keys = sorted(there.files)
        works = [
            CopyWork(
                origin=self._root.place,
                copy=self._copy_root.place,
                keys=tuple(keys[start : start + _FILES_PER_TASK]),
            )
            for start in range(0, len(keys), _FILES_PER_TASK)
        ]
        works += [CopyWork(origin=self._root.place, copy=self._copy_root.place, values=part) for part in there.values]
        results = run_on_workers(self._spark, compare_copies, works)
        found = list(counted_progress(results, "comparing a replica", len(works), self._on_progress))
        for key, reason in sorted(wrong for one in found for wrong in one.wrong):
            self._add(key, reason)
        return sum(one.files for one in found), sum(one.bytes for one in found)

    def _compare_names(self, copy: OpenedEngine, origin: References, there: References, manifest: Manifest) -> None:
        """What one store names and the other does not, and what nobody does."""
        unknown = [key for key in sorted(origin.files) if key not in there.files]
        if unknown and _is_up_to_date(copy.manifest, manifest) and not _only_log(unknown, copy):
            self._add(unknown[0], f"the replica does not name it, and {len(unknown) - 1} others of the engine's store")
        listed = [key for key in _listed(copy) if key not in there.files and key not in origin.files]
        if listed:
            self.notes.append(
                f"the replica {self._url} has {len(listed)} files that nobody names: {some_names(listed)}"
            )

    def _add(self, key: str | None, reason: str) -> None:
        place = f"replica {self._url}" if not key else f"replica {self._url}: {key}"
        self.findings.append(about_engine(self._root.name).finding("replica", place, reason))


def _is_up_to_date(copy: Manifest, origin: Manifest) -> bool:
    """Whether a replica says all that the engine's store says."""
    names = ("high_water_mark", "high_water_lsn", "shipped_lsn", "checkpoints", "compacted")
    return all(getattr(copy, name) == getattr(origin, name) for name in names)


def _only_log(keys: Sequence[str], copy: OpenedEngine) -> bool:
    """Objects of the log may be put together at another time in a replica: its own catalog has the same records."""
    return all(key.startswith(copy.keys.objects_prefix) for key in keys) and copy.catalog.covers(
        max(1, copy.catalog.start_offset()), copy.manifest.shipped_lsn
    )


def _listed(copy: OpenedEngine) -> Iterator[str]:
    """All files of the engine but data files, of which there may be very many: those are for `gc`."""
    keys = copy.keys
    for prefix in (keys.objects_prefix, keys.checkpoints_prefix, keys.blobs_prefix, keys.index_prefix):
        yield from (info.key for info in copy.objects.list(prefix))
