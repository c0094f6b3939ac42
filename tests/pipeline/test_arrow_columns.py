"""Arrow batches of topics: the columns that Spark's Kafka source has, with its types."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from tidelog.errors import InputError, InternalError
from tidelog.log.frame import encode_many
from tidelog.pipeline.arrow_columns import arrow_schema, record_batch
from tidelog.topics.columns import gather_columns
from tidelog.topics.message import encode_message

EVERY_COLUMN = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
ROWS: list[tuple[bytes, bytes | None, dict[str, bytes], int]] = [
    (b"first", b"k", {"trace": b"1", "ключ": b""}, 1_700_000_000_123_456),
    (b"", b"", {}, 0),
    (b"third", None, {"trace": b"3"}, -1),
]
FRAMES = encode_many(40, [encode_message(*row) for row in ROWS])


def expected_row(index: int) -> dict[str, Any]:
    """What Spark's Kafka source would show of a message."""
    value, key, headers, time_us = ROWS[index]
    return {
        "key": key,
        "value": value,
        "topic": "shop/orders",
        "partition": 0,
        "offset": 40 + index,
        "timestamp": EPOCH + timedelta(microseconds=time_us),
        "timestampType": 0,
        "headers": [{"key": name, "value": content} for name, content in headers.items()] or None,
    }


def test_a_batch_has_the_columns_of_the_kafka_source() -> None:
    """Every column has its type and every row what was appended; no headers are null, as Kafka's are."""
    batch = record_batch(gather_columns(FRAMES, 0, 3, headers=True), arrow_schema(EVERY_COLUMN), "shop/orders")
    batch.validate(full=True)
    assert batch.to_pylist() == [expected_row(index) for index in range(3)]
    assert [str(kind) for kind in batch.schema.types] == [
        "binary",
        "binary",
        "string",
        "int32",
        "int64",
        "timestamp[us, tz=UTC]",
        "int32",
        "list<element: struct<key: string, value: binary>>",
    ]


@pytest.mark.parametrize("names", [("offset",), ("topic", "key"), ("headers", "value"), ()])
def test_a_batch_has_the_columns_that_are_asked_for(names: tuple[str, ...]) -> None:
    """Only those, in that order; without any the rows are still counted."""
    batch = record_batch(gather_columns(FRAMES, 0, 3, headers=True), arrow_schema(names), "shop/orders")
    batch.validate(full=True)
    assert batch.num_rows == 3
    assert batch.to_pylist() == [{name: expected_row(index)[name] for name in names} for index in range(3)]


def test_a_batch_without_rows_is_a_batch() -> None:
    """No rows are no reason for another shape."""
    batch = record_batch(gather_columns(FRAMES, 3, 3, headers=True), arrow_schema(EVERY_COLUMN), "shop/orders")
    batch.validate(full=True)
    assert (batch.num_rows, batch.num_columns) == (0, 8)


def test_data_is_not_copied() -> None:
    """The arrays lie in the very bytes that were gathered."""
    columns = gather_columns(FRAMES, 0, 3)
    assert columns.values is not None
    batch = record_batch(columns, arrow_schema(["value"]), "shop/orders")
    assert batch.column(0).buffers()[2].address == pa.py_buffer(columns.values.data).address


def test_what_cannot_be_is_named() -> None:
    """A column that a topic does not have, and one that nobody gathered."""
    with pytest.raises(InputError, match="no column colour"):
        arrow_schema(["key", "colour"])
    with pytest.raises(InternalError, match="headers was not gathered"):
        record_batch(gather_columns(FRAMES, 0, 3), arrow_schema(["headers"]), "shop/orders")
