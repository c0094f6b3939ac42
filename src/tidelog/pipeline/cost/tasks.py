"""Executor tasks of `cost`: list one location of an engine in a store, and count live versions and values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import msgspec

from tidelog.engine.mvcc.cells import BUCKETS, decode_cell, is_pointer
from tidelog.errors import DataError
from tidelog.pipeline.cost.model import Kind
from tidelog.pipeline.jobs.engine.digest_tasks import DAMAGE, InRow, RowItem, Unreadable, parts_in, sorted_rows
from tidelog.pipeline.jobs.engine.rows import TOLD_SCHEMA, as_told, told_by
from tidelog.pipeline.location import EngineLocation
from tidelog.pipeline.spark_flow import spark_flow

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession


class ListingWork(msgspec.Struct, frozen=True, kw_only=True):
    """A place to list. With `names` every object comes back, else their number and their bytes."""

    place: EngineLocation
    prefix: str
    kind: Kind
    names: bool = True


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """What the store lists."""

    kind: Kind
    objects: int
    bytes: int
    names: dict[str, int] = {}


def list_place(work: ListingWork) -> Listing:
    """Lists one place."""
    objects, size, names = 0, 0, dict[str, int]()
    for info in work.place.opened().objects.list(work.prefix):
        objects += 1
        size += info.size
        if work.names:
            names[info.key] = info.size
    return Listing(kind=work.kind, objects=objects, bytes=size, names=names)


# Counts the live versions of an engine, and the values that they point to.
#
#     rows of a source and of the log after it, by name and in order of key (`digest_state`)  ->  one `LiveCount` a
#     part
#
# A value with copies counts once for every version that points to it.


class LiveCount(msgspec.Struct, kw_only=True):
    """Versions, and what they point to. `below_start` and `below_compaction` are values by the LSN of their record."""

    rows: int = 0
    row_bytes: int = 0
    values: int = 0
    value_bytes: int = 0
    large_values: int = 0
    large_bytes: int = 0
    below_start: int = 0
    below_compaction: int = 0

    def __add__(self, other: LiveCount) -> LiveCount:
        return LiveCount(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})


class LiveCounter:
    """The function of a task. Values of `large_bytes` or more would have a file each."""

    def __init__(self, start_lsn: int, compaction_lsn: int, large_bytes: int) -> None:
        self._start_lsn = start_lsn
        self._compaction_lsn = compaction_lsn
        self._large_bytes = large_bytes

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return as_told(self.counted(part.rows, part.number == 0) for part in parts_in(batches))

    def counted(self, rows: Iterable[InRow], counts_buckets: bool) -> LiveCount:
        """All rows of a part; those of buckets are in every part."""
        total = LiveCount()
        for key, changes in groupby(rows, key=lambda row: row.key):
            last = list(changes)[-1]
            if last.source == DAMAGE:
                unreadable = msgspec.msgpack.decode(last.cell or b"", type=Unreadable)
                raise DataError(f"{unreadable.place}: {unreadable.reason}")
            if key and last.cell is not None and (counts_buckets or not key.startswith(BUCKETS)):
                self._count(total, key, last.cell)
        return total

    def _count(self, total: LiveCount, key: bytes, cell: bytes) -> None:
        total.rows += 1
        total.row_bytes += len(key) + len(cell)
        if key.startswith(BUCKETS) or not is_pointer(cell):
            return
        version = decode_cell(cell)
        total.values += 1
        total.value_bytes += version.stored_bytes
        if version.stored_bytes >= self._large_bytes:
            total.large_values += 1
            total.large_bytes += version.stored_bytes
        total.below_start += version.lsn < self._start_lsn
        total.below_compaction += version.lsn < self._compaction_lsn


def count_live(spark: SparkSession, items: Sequence[RowItem], size: int, counter: LiveCounter) -> LiveCount:
    """The live part of these items of about this many bytes."""
    counted = sorted_rows(spark_flow(spark), items, size).mapped(counter, TOLD_SCHEMA)
    return sum(told_by(counted, LiveCount), LiveCount())
