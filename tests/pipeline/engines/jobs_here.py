"""Jobs over engines done in this process, on a store in memory: what Spark's workers do, one task after the other."""

from __future__ import annotations

from typing import Any

from tests.engine.stations import KEYS, EngineNode, new_store
from tests.pipeline.engines.in_memory import place_of
from tests.pipeline.engines.table_flow import TableFlow

from tidelog.clock import ManualClock
from tidelog.cold.catalog import Catalog
from tidelog.engine.sst.sorted_index import Compaction, SortedIndex, read_compaction
from tidelog.pipeline.address import OpenedEngine
from tidelog.pipeline.jobs.engine.compact import CompactEngineJob, CompactEngineOptions, CompactEngineReport
from tidelog.pipeline.jobs.engine.snapshot import CheckpointJob, CheckpointReport
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.store.object_store import ObjectStore
from tidelog.testing import FaultyStore

SMALL_COMPACTION = {"large_bytes": 1500, "blob_file_bytes": 8 << 10, "rows_per_file": 40}


def opened_engine(objects: ObjectStore) -> OpenedEngine:
    """The engine of a store in memory, open for a job."""
    metadata = BucketMetadataStore(objects)
    view = OpenedEngine(objects, metadata, Catalog(metadata, KEYS), KEYS, None)  # type: ignore[arg-type]
    return OpenedEngine(objects, metadata, view.catalog, KEYS, view.newest_manifest())


def write_state(objects: ObjectStore, seq: int | None = None, *, tasks: int = 3, rows: int = 40) -> CheckpointReport:
    """The job `checkpoint`."""
    place = place_of(objects)
    job = CheckpointJob(TableFlow(tasks), opened_engine(objects), place, ManualClock(), rows_per_file=rows)
    return job.run(seq)


def compaction_job(objects: ObjectStore, *, tasks: int = 3, **options: Any) -> CompactEngineJob:
    """The job `compact`, ready to run."""
    given = CompactEngineOptions(**{**SMALL_COMPACTION, **options})
    return CompactEngineJob(TableFlow(tasks), opened_engine(objects), place_of(objects), ManualClock(), given)


def compact(objects: ObjectStore, *, tasks: int = 3, **options: Any) -> CompactEngineReport:
    """The same, run."""
    return compaction_job(objects, tasks=tasks, **options).run()


def root_of(node: EngineNode) -> Compaction:
    """The compaction that is published."""
    compacted = node.view.manifest.compacted
    assert compacted is not None
    return read_compaction(node.objects, KEYS, compacted)


def data_of(node: EngineNode) -> SortedIndex:
    """The same, to look things up in."""
    return SortedIndex(node.objects, KEYS, root_of(node))


def copy_of(objects: ObjectStore) -> FaultyStore:
    """Another store with the same objects."""
    store = new_store()
    for key in keys_of(objects):
        store.put(key, objects.get(key).data)
    return store


def keys_of(objects: ObjectStore) -> list[str]:
    """Everything in a store."""
    return [info.key for info in objects.list()]


def new_files(objects: ObjectStore, before: ObjectStore) -> dict[str, bytes]:
    """Files that came since then, but for the metadata, which has times in it."""
    known = set(keys_of(before))
    prefix = "storage/engine/"
    return {key: objects.get(key).data for key in keys_of(objects) if key not in known and key.startswith(prefix)}
