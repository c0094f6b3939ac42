"""Rows that an INSERT into a table of Spark's catalog may have."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tidelog.errors import InputError
from tidelog.pipeline.sink.task import refuse_read_rows


@pytest.mark.parametrize(
    ("row", "problem"),
    [((b"k", b"v", 3), "has an offset"), ((None, None, None), "neither a key nor a value")],
)
def test_rows_that_were_read_are_not_inserted(row: tuple[object, ...], problem: str) -> None:
    """Among others that may be: one is enough."""
    names = ["key", "value", "offset"]
    kinds = [pa.binary(), pa.binary(), pa.int64()]
    rows = [(b"k", None, None), (None, b"v", None), row]
    columns = [pa.array(values, kind) for values, kind in zip(zip(*rows, strict=True), kinds, strict=True)]
    refuse_read_rows(pa.RecordBatch.from_arrays([one.slice(0, 2) for one in columns], names))
    with pytest.raises(InputError, match=problem):
        refuse_read_rows(pa.RecordBatch.from_arrays(columns, names))
