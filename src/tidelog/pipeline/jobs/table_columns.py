"""From the rows of a topic to the rows of a table.

    raw     key, value, topic, partition, offset, timestamp, timestampType: the columns of the source
    json    _offset, _timestamp, _key, _rejected, _rejected_value, and a column for each field of the values
    avro    the same, by the schema of the values

Invariants
- Every message becomes one row, in the order of offsets. A value that cannot be parsed, or does not fit the columns, is
  kept whole in `_rejected_value`, with the reason in `_rejected`; its fields are null then.
- An empty value (a tombstone) has no fields, and is not rejected.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pyarrow as pa

from tidelog.errors import InputError
from tidelog.pipeline.arrow_columns import arrow_schema
from tidelog.pipeline.jobs.avro_values import avro_decoder
from tidelog.pipeline.jobs.table_commits import Values
from tidelog.pipeline.jobs.table_fitting import Fit, MisfitError, fitter
from tidelog.pipeline.jobs.table_types import (
    Signature,
    from_json,
    joined_all,
    settled,
    signature,
    to_json,
    type_of,
    widened,
)

RAW_COLUMNS = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")
_READ_FOR_FIELDS = ("key", "value", "offset", "timestamp")
_OWN_COLUMNS = pa.struct(
    [
        pa.field("_offset", pa.int64()),
        pa.field("_timestamp", pa.timestamp("us", tz="UTC")),
        pa.field("_key", pa.binary()),
        pa.field("_rejected", pa.string()),
        pa.field("_rejected_value", pa.binary()),
    ]
)
_OWN_NAMES = tuple(field.name for field in _OWN_COLUMNS)
_MAX_COLUMNS = 2000
_decode_json = msgspec.json.Decoder().decode


class TableShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a table's rows look like. `columns` is Spark's JSON schema of all of them."""

    values: Values
    columns: dict[str, Any]
    avro_schema: str | None = None
    ignores_unknown: bool = False
    """Fields without a column are left out: whoever gives a schema says what is wanted."""

    @property
    def kind(self) -> pa.DataType:
        """All columns, as a struct."""
        return from_json(self.columns)

    @property
    def schema(self) -> pa.Schema:
        return pa.schema(list(self.kind))

    @property
    def source_columns(self) -> tuple[str, ...]:
        """The columns of the source that are needed."""
        return tuple(self.schema.names) if self.values == "raw" else _READ_FOR_FIELDS


def raw_shape(*, with_headers: bool = False) -> TableShape:
    """A table with the source's own columns."""
    names = [*RAW_COLUMNS, "headers"] if with_headers else list(RAW_COLUMNS)
    return TableShape(values="raw", columns=to_json(pa.struct(list(arrow_schema(names)))))


def parsed_shape(values: Values, fields: pa.DataType, **more: Any) -> TableShape:
    """A table with a column for each of these fields."""
    taken = {name.lower() for name in _OWN_NAMES}
    own = [field for field in fields if field.name.lower() not in taken]
    if len(own) > _MAX_COLUMNS:
        raise InputError(
            f"the values have {len(own)} different fields, and a table has {_MAX_COLUMNS} columns at most",
            hint="Name the ones that are wanted with a schema",
        )
    return TableShape(values=values, columns=to_json(pa.struct([*_OWN_COLUMNS, *own])), **more)


def refuse_taken_names(fields: pa.DataType) -> None:
    """Of a schema that somebody gives; in one that is inferred, such a field is a reason to reject its row."""
    taken = {name.lower() for name in _OWN_NAMES}
    for field in fields:
        if field.name.lower() in taken:
            raise InputError(
                f"the schema has a column {field.name} twice, or one that a table has already",
                hint=f"Case does not matter; a table has {', '.join(_OWN_NAMES)}",
            )
        taken.add(field.name.lower())


def fields_of(shape: TableShape) -> pa.DataType:
    """The columns that come out of the values."""
    return pa.struct([field for field in shape.kind if field.name not in _OWN_NAMES])


def evolved(known: TableShape | None, found: pa.DataType) -> TableShape:
    """The shape of a JSON table that exists already, or of a new one, when values with these fields come to it."""
    if known is not None:
        return parsed_shape("json", widened(fields_of(known), found))
    fields = settled(found)
    is_object = fields is not None and pa.types.is_struct(fields)
    return parsed_shape("json", fields if is_object else pa.struct([]))


def inferred_fields(batches: Iterable[pa.RecordBatch]) -> pa.DataType:
    """The fields of the JSON objects among the values; what is no object has none."""
    return joined_all([_fields_in(batch) for batch in batches])


def _fields_in(batch: pa.RecordBatch) -> pa.DataType:
    found: dict[Signature, None] = {}
    for value in batch.column("value").to_pylist():
        try:
            decoded = _decode_json(value) if value else None
            if isinstance(decoded, dict):
                found[signature(decoded)] = None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
    return joined_all([type_of(one) for one in found])


class RowMaker:
    """Makes rows of one shape."""

    def __init__(self, shape: TableShape) -> None:
        self._schema = shape.schema
        self._is_raw = shape.values == "raw"
        self.rejected = 0
        if not self._is_raw:
            self._fields = fields_of(shape)
            self._fit: Fit = fitter(self._fields, ignores_unknown=shape.ignores_unknown)
            self._decode: Fit = _decode_json if shape.values == "json" else avro_decoder(shape.avro_schema or "")

    def rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of a batch of the source."""
        if self._is_raw:
            return batch.select(self._schema.names)
        fields: list[dict[str, Any]] = []
        reasons: list[str | None] = []
        kept: list[bytes | None] = []
        for value in batch.column("value").to_pylist():
            row, reason = self._parsed(value)
            fields.append(row)
            reasons.append(reason)
            kept.append(None if reason is None else value)
        self.rejected += sum(reason is not None for reason in reasons)
        own = [batch.column("offset"), batch.column("timestamp"), batch.column("key")]
        own += [pa.array(reasons, pa.string()), pa.array(kept, pa.binary())]
        columns = pa.array(fields, self._fields).flatten() if len(self._fields) else []
        return pa.RecordBatch.from_arrays([*own, *columns], schema=self._schema)

    def _parsed(self, value: bytes) -> tuple[dict[str, Any], str | None]:
        if not value:
            return {}, None
        try:
            return self._fit(self._decode(value)), None
        except MisfitError as error:
            return {}, str(error)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return {}, f"it is not JSON: {error}"
        except RecursionError:
            return {}, "it is nested too deeply"
