"""What workers do for `table`: infer the fields of a part of a topic, and write a part as a Parquet file.

Invariants
- A file holds exactly the messages of its part, in order. It is read back before it counts, and both sides are summed
  up: offset, key and time, and the value where the table keeps it.
- A task that runs twice writes the same rows under the same name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from tidelog.pipeline.arrow_reader import read_record_batches
from tidelog.pipeline.jobs.proof import Tally, total
from tidelog.pipeline.jobs.row_tally import NO_ROWS, tally_rows
from tidelog.pipeline.jobs.table_columns import RowMaker, TableShape, inferred_fields
from tidelog.pipeline.jobs.table_files import FilePlace, write_batches
from tidelog.pipeline.part import ColdPlace, ReadPart
from tidelog.pipeline.schema import source_schema

_BATCH_ROWS = 16_384
_SUMMED = ("offset", "key", "value", "timestamp")
PARSED_SUMMED = ("_offset", "_key", "_timestamp")


@dataclass(frozen=True, kw_only=True)
class InferWork:
    """A part of a topic whose values are looked at."""

    part: ReadPart
    cold: ColdPlace | None
    skips_gaps: bool = False


@dataclass(frozen=True, kw_only=True)
class WriteWork(InferWork):
    """A part of a topic, what its rows become, and where."""

    shape: TableShape
    place: FilePlace
    key: str


class WrittenPart(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a part; a part without messages has no file."""

    key: str
    start: int
    stop: int
    bytes: int
    went_in: Tally
    came_out: Tally
    rejected: int


class InferredPart(msgspec.Struct, frozen=True):
    """The fields of a part's values, as Arrow describes types; some of them only inference knows."""

    start: int
    description: bytes

    @property
    def fields(self) -> pa.DataType:
        return pa.ipc.read_schema(pa.py_buffer(self.description)).field(0).type


def infer_part(work: InferWork) -> InferredPart:
    """Looks at every value of a part."""
    found = inferred_fields(_source_batches(work, ("value",)))
    return InferredPart(work.part.start, pa.schema([pa.field("fields", found)]).serialize().to_pybytes())


def write_part(work: WriteWork) -> WrittenPart:
    """Reads a part, writes its file, and reads that again."""
    rows = _Rows(work)
    first = next(rows, None)
    size, came_out = 0, NO_ROWS
    if first is not None:
        with work.place.writing(work.key) as sink:
            size = write_batches(sink, work.shape.schema, chain([first], rows))
        came_out = _read_back(work)
    return WrittenPart(
        key=work.key,
        start=work.part.start,
        stop=work.part.stop,
        bytes=size,
        went_in=rows.tally,
        came_out=came_out,
        rejected=rows.maker.rejected,
    )


class _Rows(Iterator[pa.RecordBatch]):
    """The rows that a part becomes, batch by batch, and the sum of the messages that they were made of."""

    def __init__(self, work: WriteWork) -> None:
        self.maker = RowMaker(work.shape)
        self.tally = NO_ROWS
        self._is_raw = work.shape.values == "raw"
        self._batches = _source_batches(work, work.shape.source_columns)

    def __next__(self) -> pa.RecordBatch:
        batch = next(self._batches)
        offset, key, value, timestamp = (batch.column(name) for name in _SUMMED)
        self.tally += tally_rows(offset, key, value if self._is_raw else None, timestamp)
        return self.maker.rows(batch)


def _source_batches(work: InferWork, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    schema = source_schema(columns)
    return read_record_batches(work.part, work.cold, schema, skips_gaps=work.skips_gaps, max_rows=_BATCH_ROWS)


def _read_back(work: WriteWork) -> Tally:
    names = _SUMMED if work.shape.values == "raw" else PARSED_SUMMED
    with work.place.reading(work.key) as source, pq.ParquetFile(source) as file:
        return total((tally_table(batch, names) for batch in file.iter_batches(columns=list(names))), "rows")


def tally_table(batch: pa.RecordBatch, names: tuple[str, ...]) -> Tally:
    """The rows of a table with these columns, which have the names of the source's, or the same with a line before."""
    columns = {name: batch.column(name) for name in names}
    own = {name.removeprefix("_"): column for name, column in columns.items()}
    return tally_rows(own["offset"], own["key"], own.get("value"), own["timestamp"])
