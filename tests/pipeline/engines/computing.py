"""What Spark's workers do for the jobs that look at an engine, in this process: many histories can be tried so."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, get_type_hints

import msgspec
import pyarrow as pa
import pytest
from tests.pipeline.engines.table_flow import TableFlow, TableRows

from tidelog.engine.mvcc.cells import BUCKETS, SEQ_BYTES, decode_cell, is_pointer
from tidelog.engine.mvcc.vacuum_rules import Rule
from tidelog.engine.mvcc.versions import BucketVersion
from tidelog.engine.sst.sorted_index import Compaction
from tidelog.engine.sst.sstable import RowPart
from tidelog.pipeline.cost import cost
from tidelog.pipeline.cost import cost as cost_store
from tidelog.pipeline.cost.tasks import LiveCount, LiveCounter
from tidelog.pipeline.jobs.engine import digest, verify, verify_lost, verify_replicas, verify_tasks
from tidelog.pipeline.jobs.engine.digest_tasks import (
    _PART_BYTES,
    START,
    ComputedState,
    Merge,
    PartMerge,
    PartResult,
    RowItem,
    _added_up,
    parts_in,
    sorted_rows,
)
from tidelog.pipeline.jobs.engine.rows import doomed, note_alive
from tidelog.pipeline.jobs.engine.verify_columns import sound_compaction
from tidelog.pipeline.jobs.engine.verify_lost import (
    LostFinder,
    LostValues,
    NeededValues,
    ValuePart,
    value_batches,
)
from tidelog.pipeline.jobs.engine.verify_tasks import (
    PLACE_SCHEMA,
    VALUE_SCHEMA,
    CompactionCheck,
    IndexItem,
    PlaceMerge,
    ValueChecker,
    ValueRow,
    ValuesResult,
    check_compaction,
    place_rows,
)
from tidelog.pipeline.location import EngineLocation
from tidelog.pipeline.tasks import as_batches

PARTS = 3
NO_SPARK: Any = None


def compute_here(
    spark: object, items: Sequence[RowItem], size: int, *, seq: int, horizon_seq: int, compares: bool = False
) -> ComputedState:
    """What `compute_state` does, with the shuffle of Spark played by a sort."""
    batches = Merge(seq, horizon_seq, compares=compares)(_sorted_batches(items))
    found = [msgspec.msgpack.decode(data, type=PartResult) for batch in batches for data in batch.column(0).to_pylist()]
    # By columns where that is possible; row by row it is the same.
    parts = parts_in(_sorted_batches(items))
    assert found == [PartMerge(seq, horizon_seq, one.number == 0, compares).result(one.rows) for one in parts]
    return _added_up(found, seq)


def compute_once(
    spark: object, items: Sequence[RowItem], size: int, *, seq: int, horizon_seq: int, compares: bool = False
) -> ComputedState:
    """The same by columns alone: nothing is read twice."""
    batches = Merge(seq, horizon_seq, compares=compares)(_sorted_batches(items))
    found = [msgspec.msgpack.decode(data, type=PartResult) for batch in batches for data in batch.column(0).to_pylist()]
    return _added_up(found, seq)


def count_here(spark: object, items: Sequence[RowItem], size: int, counter: LiveCounter) -> LiveCount:
    """What `count_live` does."""
    found = to_rows(counter(_sorted_batches(items)))
    return sum((msgspec.msgpack.decode(row["told"], type=LiveCount) for row in found), LiveCount())


def _sorted_batches(items: Sequence[RowItem]) -> Iterator[pa.RecordBatch]:
    rows = sorted_rows(TableFlow(), items, PARTS * _PART_BYTES)
    assert isinstance(rows, TableRows)
    return (batch for table in rows.tables for batch in table.to_batches(max_chunksize=100))


def values_here(
    spark: object, place: EngineLocation, root: Compaction, items: Sequence[IndexItem]
) -> list[ValuesResult]:
    """What Spark does with the indexes of a compaction and what they point to, in this process."""
    rows = [row for item in items for row in place_rows(item)]
    rows.sort(key=lambda row: (row.position, row.source, row.name))
    values = to_rows(PlaceMerge(place.name, len(root.blob_files))(as_batches(rows, PLACE_SCHEMA)))
    ordered = sorted((ValueRow(**row) for row in values), key=lambda row: (row.file, row.byte, row.name))
    found = to_rows(ValueChecker(place, root.blob_files)(as_batches(ordered, VALUE_SCHEMA)))
    return [msgspec.msgpack.decode(row["told"], type=ValuesResult) for row in found]


def sound_here(flow: object, place: EngineLocation, root: Compaction) -> CompactionCheck | None:
    """What `sound_compaction` does: it says of a compaction what a look at all rows says."""
    found = sound_compaction(TableFlow(), place, root)
    by_rows, findings = check_compaction(NO_SPARK, place, root)
    assert (found is None) == bool(findings)
    assert found in (None, by_rows)
    return found


def lost_here(
    spark: object,
    place: EngineLocation,
    items: Sequence[RowItem],
    size: int,
    values: Sequence[RowPart],
    needed: NeededValues,
) -> list[LostValues]:
    """What Spark does to find values that are nowhere; row by row the same values are needed."""
    batches = list(needed(_sorted_batches(items)))
    found = {position for batch in batches for position in batch.column("position").to_pylist()}
    assert found == set(_needed_by_rows(_sorted_batches(items), needed._start_lsn, needed._horizon_seq))
    batches += [batch for part in values for batch in value_batches(ValuePart(place=place, part=part))]
    return [msgspec.msgpack.decode(row["told"], type=LostValues) for row in to_rows(LostFinder()(iter(batches)))]


def _needed_by_rows(batches: Iterator[pa.RecordBatch], start_lsn: int, horizon: int) -> Iterator[int]:
    for part in parts_in(batches):
        alive = dict[bytes, BucketVersion]()
        for name, changes in groupby(part.rows, key=lambda row: row.key[:-SEQ_BYTES]):
            if not name:
                horizon = max([horizon, *(row.lsn for row in changes if row.source == START)])
                continue
            last = {row.key: row.cell for row in changes}  # newest first, after all changes
            versions = [(key, cell) for key, cell in last.items() if cell is not None]
            if name[:1] == BUCKETS:
                note_alive(alive, name[1:-1], versions, horizon)
                continue
            gone = doomed(versions, Rule(horizon, 1, alive))
            pointers = [(key, decode_cell(cell)) for key, cell in versions if is_pointer(cell)]
            yield from (cell.position for key, cell in pointers if cell.lsn < start_lsn and key not in gone)


def to_rows(batches: Iterator[pa.RecordBatch]) -> list[dict[str, Any]]:
    """Batches as rows."""
    return [row for batch in batches for row in batch.to_pylist()]


def work_here(spark: object, function: Callable[[Any], Any], items: Sequence[Any], **_: int) -> Iterator[Any]:
    """What `run_on_workers` does, here; what goes to a worker is pickled, and what comes back is msgpack, as there."""
    kind = get_type_hints(function)["return"]
    for item in items:
        result = function(pickle.loads(pickle.dumps(item)))
        yield msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=kind)


def work_without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """The jobs that look at an engine do their work in this process from here on."""
    for module in (verify, verify_replicas, cost_store):
        monkeypatch.setattr(module, "run_on_workers", work_here)
    for module in (digest, verify):
        monkeypatch.setattr(module, "compute_state", compute_here)
    monkeypatch.setattr(verify, "spark_flow", TableFlow)
    monkeypatch.setattr(verify, "sound_compaction", sound_here)
    monkeypatch.setattr(verify_tasks, "_results", values_here)
    monkeypatch.setattr(verify_lost, "_found", lost_here)
    monkeypatch.setattr(cost, "count_live", count_here)
