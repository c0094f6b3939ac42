"""Arrow batches of topics, with the columns of Spark's Kafka source, and frames of their rows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from tidelog.errors import InputError, InternalError
from tidelog.log.frame import Frames, encode_many
from tidelog.pipeline.source.arrow import arrow_schema, frames_of, record_batch
from tidelog.topics.columns import gather_columns
from tidelog.topics.message import decode_frames, encode_message

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


# ---- rows to frames ----

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def seen(frames: Frames) -> list[tuple[Any, ...]]:
    """What a reader sees of frames."""
    return [(each.value, each.key, each.headers) for each in decode_frames(frames, 0, frames.count)]


def test_a_batch_that_was_read_goes_back_as_it_was() -> None:
    """From frames to Arrow to frames nothing changes, also for a part of a batch."""
    batch = record_batch(gather_columns(FRAMES, 0, 3, headers=True), arrow_schema(EVERY_COLUMN), "shop/orders")
    assert frames_of(batch, 40, 0, keeps_timestamps=True) == FRAMES
    part = frames_of(batch.slice(1, 2), 41, 0, keeps_timestamps=True)
    assert part == encode_many(41, [encode_message(*row) for row in ROWS[1:]])


def test_rows_get_the_time_of_the_write() -> None:
    """A column of times is kept only if that is asked for, and where it is null the time of the write counts."""
    column = pa.array([5, None], pa.timestamp("us", tz="Europe/Madrid"))
    batch = pa.record_batch({"value": pa.array([b"a", b"b"]), "timestamp": column})
    times = [message.timestamp for message in decode_frames(frames_of(batch, 0, 9), 0, 2)]
    kept = [message.timestamp for message in decode_frames(frames_of(batch, 0, 9, keeps_timestamps=True), 0, 2)]
    assert times == [EPOCH + timedelta(microseconds=9)] * 2
    assert kept == [EPOCH + timedelta(microseconds=time_us) for time_us in (5, 9)]


@pytest.mark.parametrize("kind", [pa.binary(), pa.string(), pa.large_binary(), pa.large_string()])
def test_text_and_bytes_are_values_and_keys(kind: pa.DataType) -> None:
    """Of 32 or 64 bits, and from the middle of an array."""
    column = pa.array([None, "x", "née", None, ""], kind)
    batch = pa.record_batch({"key": column.slice(1), "value": pa.array(["1", "2", "3", "4"], kind)})
    keys = [b"x", "née".encode(), None, b""]
    assert seen(frames_of(batch, 0, 0)) == [(b"%d" % row, key, {}) for row, key in enumerate(keys, 1)]


@pytest.mark.parametrize("is_large", [False, True])
def test_headers_are_lists_of_structs(is_large: bool) -> None:
    """Null lists and empty ones are no headers; slices of lists and of what is in them are read right."""
    kind = pa.large_list(HEADERS.value_type) if is_large else HEADERS
    lists = [[{"key": "skipped", "value": b""}], [{"key": "a", "value": b"1"}, {"key": "b", "value": b""}], None, []]
    column = pa.array(lists, kind).slice(1)
    batch = pa.record_batch({"headers": column, "value": pa.array([b""] * 3)})
    assert [headers for _, _, headers in seen(frames_of(batch, 0, 0))] == [{"a": b"1", "b": b""}, {}, {}]


def test_nulls_and_repeated_names_are_kept() -> None:
    """A tombstone, a header without a value and a name that is there twice, as Kafka's rows may have them."""
    headers = [[{"key": "a", "value": None}, {"key": "a", "value": b"2"}, {"key": "b", "value": b""}], None]
    columns = {"value": pa.array([None, b""]), "headers": pa.array(headers, HEADERS)}
    frames = frames_of(pa.record_batch(columns), 0, 0)
    found = record_batch(gather_columns(frames, 0, 2, headers=True), arrow_schema(["value", "headers"]), "a/b")
    found.validate(full=True)
    assert found.to_pydict() == {"value": [None, b""], "headers": headers}


def test_a_column_of_nulls_is_no_column() -> None:
    """Spark gives the type null to a key that is always null."""
    batch = pa.record_batch({"key": pa.nulls(1), "headers": pa.nulls(1), "value": pa.array([b"v"])})
    assert seen(frames_of(batch, 0, 0)) == [(b"v", None, {})]


def test_no_rows_make_no_frames() -> None:
    """Arrays without rows may have no buffers at all."""
    schema = pa.schema({"key": pa.binary(), "value": pa.string(), "headers": HEADERS})
    batch = pa.RecordBatch.from_arrays([pa.array([], kind) for kind in schema.types], schema=schema)
    assert frames_of(batch, 4, 0).count == 0


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"key": [b"k"]}, "there is no column value"),
        ({"value": [1]}, "the column value is of the type int64"),
        ({"value": pa.nulls(1)}, "the column value is of the type null"),
        ({"value": [b""], "headers": [["a"]]}, "the column headers is of the type list"),
        ({"value": [b""], "headers": [[{"key": 1, "value": b""}]]}, "the column headers.key is of the type int64"),
        ({"value": [b""], "headers": pa.array([[None]], HEADERS)}, "row 0 has a header without a name"),
        ({"value": [b""], "timestamp": [datetime(2026, 1, 1)]}, "the column timestamp is of the type"),  # noqa: DTZ001
        ({"value": [b"1234567"]}, "row 0 makes a message of 31 bytes"),
    ],
)
def test_what_cannot_be_written_is_named(columns: dict[str, Any], message: str) -> None:
    """The error says which column or row it is."""
    batch = pa.record_batch(columns)
    with pytest.raises(InputError, match=message):
        frames_of(batch, 0, 0, keeps_timestamps=True, max_message_bytes=30)
