"""What workers do for `table` when a column has become wider: files that have it narrow are written anew.

A reader of Parquet takes one type for a column from all of its files, so files of both types cannot stand side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from tidelog.errors import DataError
from tidelog.pipeline.jobs.proof import Tally, total
from tidelog.pipeline.jobs.table_columns import TableShape
from tidelog.pipeline.jobs.table_files import FilePlace, write_batches
from tidelog.pipeline.jobs.table_writer import PARSED_SUMMED, tally_table


@dataclass(frozen=True, kw_only=True)
class RewriteWork:
    """A file, and the one that takes its place."""

    place: FilePlace
    source: str
    key: str
    shape: TableShape


class RewrittenFile(msgspec.Struct, frozen=True, kw_only=True):
    """What was made of it."""

    source: str
    key: str
    bytes: int
    rows: int


def rewrite_file(work: RewriteWork) -> RewrittenFile:
    """Writes the rows of a file with the columns of today, and reads them back."""
    place, schema = work.place, work.shape.schema
    with place.reading(work.source) as source, pq.ParquetFile(source) as file, place.writing(work.key) as sink:
        batches = (widened_batch(batch, schema) for batch in file.iter_batches())
        size = write_batches(sink, schema, batches)
    went_in, came_out = (_sum_up(place, key) for key in (work.source, work.key))
    if went_in != came_out:
        raise DataError(f"{work.key} does not have the rows of {work.source}", hint="Run it again")
    return RewrittenFile(source=work.source, key=work.key, bytes=size, rows=came_out.messages)


def _sum_up(place: FilePlace, key: str) -> Tally:
    with place.reading(key) as source, pq.ParquetFile(source) as file:
        return total(
            (tally_table(batch, PARSED_SUMMED) for batch in file.iter_batches(columns=list(PARSED_SUMMED))), "rows"
        )


def widened_batch(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The same rows with these columns; those that are new are null."""
    arrays = [_column(batch, field) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _column(batch: pa.RecordBatch, field: pa.Field) -> Any:
    if field.name not in batch.schema.names:
        return pa.nulls(batch.num_rows, field.type)
    found = batch.column(field.name)
    if found.type == field.type:
        return found
    if pa.types.is_nested(field.type):  # a cast cannot add fields to structs
        return pa.array(found.to_pylist(), field.type)
    return found.cast(field.type)
