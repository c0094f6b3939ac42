"""The types of a table's columns: inferred from JSON, joined, widened, and written down as Spark's JSON schema.

    JSON        column                  joined with another type
    true        boolean
    1           bigint                  with 1.5: double
    1.5         double
    "text"      string                  with anything else: string, in which all else is its JSON
    {...}       struct of its fields    field by field; new fields are added
    [...]       array of what is in it

Invariants
- Joining is commutative and associative up to the order of fields, so that workers infer parts in any order.
- A column that exists is only ever widened: fields are added, whole numbers become doubles, short ones long. What does
  not fit into it is rejected row by row, never forced.
- `null` and what is empty say nothing about a type.
- What is nested deeper than readers of tables bear is text from there on, which holds anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import pyarrow as pa
from pyarrow import types

from tidelog.errors import InputError
from tidelog.pipeline.source.arrow import arrow_schema
from tidelog.pipeline.tables.avro import avro_decoder
from tidelog.pipeline.tables.commits import Values
from tidelog.pipeline.tables.fitting import Fit, MisfitError, fitter

Signature = tuple[str, tuple[Any, ...]]
_NAMES: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "byte": pa.int8(),
    "short": pa.int16(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
}
_BY_TYPE = {kind: name for name, kind in _NAMES.items()}
_WHOLE = (pa.int8(), pa.int16(), pa.int32(), pa.int64())
_NUMBERS = (*_WHOLE, pa.float32(), pa.float64())
_MAX_LONG = (1 << 63) - 1
_MAX_DEPTH = 40
_MAX_DECIMAL_DIGITS = 38
_DECIMAL = re.compile(r"decimal\((\d{1,2}),(\d{1,2})\)", re.ASCII)


# Inferring


def signature(value: object, depth: int = _MAX_DEPTH) -> Signature:
    """The shape of a value that was decoded from JSON. Most values of a topic share a few of them."""
    if isinstance(value, dict | list) and not depth:
        return ("str", ())
    if isinstance(value, dict):
        return ("struct", tuple((name, signature(one, depth - 1)) for name, one in value.items()))
    if isinstance(value, list):
        return ("list", tuple(dict.fromkeys(signature(one, depth - 1) for one in value)))
    if isinstance(value, int) and not isinstance(value, bool) and not -_MAX_LONG <= value <= _MAX_LONG:
        return ("str", ())
    return (type(value).__name__, ())


def type_of(found: Signature) -> pa.DataType:
    """The type of all values with a signature."""
    kind, parts = found
    if kind == "struct":
        return pa.struct([pa.field(name, type_of(part)) for name, part in parts])
    if kind == "list":
        return pa.list_(pa.field("element", joined_all([type_of(part) for part in parts])))
    return _JSON_TYPES[kind]


_JSON_TYPES = {
    "NoneType": pa.null(),
    "bool": pa.bool_(),
    "int": pa.int64(),
    "float": pa.float64(),
    "str": pa.string(),
}


def joined_all(kinds: Sequence[pa.DataType]) -> pa.DataType:
    """The type that holds all of them."""
    result = pa.null()
    for kind in dict.fromkeys(kinds):
        result = joined(result, kind)
    return result


def joined(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """The narrowest type that holds what either of them holds; a union where no other does."""
    found: dict[str, pa.DataType] = {}
    for kind in (*_members(one), *_members(other)):
        family = _family(kind)
        found[family] = _joined_relatives(found[family], kind) if family in found else kind
    if len(found) < 2:
        return next(iter(found.values()), pa.null())
    return pa.dense_union([pa.field(family, found[family]) for family in sorted(found)])


def _members(kind: pa.DataType) -> list[pa.DataType]:
    if types.is_null(kind):
        return []
    return [field.type for field in kind] if types.is_union(kind) else [kind]


def _family(kind: pa.DataType) -> str:
    """Types of one family have one among them that holds the others."""
    if kind in _NUMBERS:
        return "number"
    return "struct" if types.is_struct(kind) else "list" if types.is_list(kind) else str(kind)


def _joined_relatives(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    if one in _NUMBERS:
        return max(one, other, key=_NUMBERS.index)
    if types.is_struct(one):
        return pa.struct(_joined_fields(list(one), list(other)))
    if types.is_list(one):
        return pa.list_(pa.field("element", joined(one.value_type, other.value_type)))
    return one


def _joined_fields(one: list[pa.Field], other: list[pa.Field]) -> list[pa.Field]:
    found = {field.name: field.type for field in one}
    for field in other:
        known = found.get(field.name)
        found[field.name] = field.type if known is None else joined(known, field.type)
    return [pa.field(name, kind) for name, kind in found.items()]


def settled(kind: pa.DataType) -> pa.DataType | None:
    """A type that a file can have; None for what was never more than null."""
    if types.is_null(kind):
        return None
    if types.is_list(kind):
        return pa.list_(pa.field("element", settled(kind.value_type) or pa.string()))
    if types.is_struct(kind):
        fields = [pa.field(field.name, found) for field in kind if (found := settled(field.type)) is not None]
        return pa.struct(_distinct(fields)) if fields else pa.string()
    return pa.string() if types.is_union(kind) else kind


def _distinct(fields: list[pa.Field]) -> list[pa.Field]:
    """Without names that Spark takes for one that stands before it, since case does not matter to it, or for none."""
    taken: dict[str, pa.Field] = {}
    for field in fields:
        if field.name.strip():
            taken.setdefault(field.name.lower(), field)
    return list(taken.values())


# Widening


def widened(known: pa.DataType, wanted: pa.DataType) -> pa.DataType:
    """What a column becomes that is there already when such values come: it grows within its family of types."""
    for kind in _members(wanted):
        if _family(kind) == _family(known):
            known = _widened_relative(known, kind)
    return known


def _widened_relative(known: pa.DataType, wanted: pa.DataType) -> pa.DataType:
    if types.is_struct(known):
        fields = {field.name: field.type for field in known}
        for field in wanted:
            before = fields.get(field.name)
            found = settled(field.type) if before is None else widened(before, field.type)
            if found is not None:
                fields[field.name] = found
        return pa.struct(_distinct([pa.field(name, kind) for name, kind in fields.items()]))
    if types.is_list(known):
        return pa.list_(pa.field("element", widened(known.value_type, wanted.value_type)))
    return _joined_relatives(known, wanted)


def contradictions(known: pa.DataType, wanted: pa.DataType) -> list[str]:
    """The fields of one struct that have a type in the other which no widening leads to."""
    before = {field.name: field.type for field in known}
    shared = [field for field in wanted if field.name in before]
    return [field.name for field in shared if _family(before[field.name]) != _family(field.type)]


def must_be_rewritten(known: pa.DataType, now: pa.DataType) -> bool:
    """Whether files with the one type cannot stand beside files with the other: new fields can, new types cannot."""
    if types.is_struct(known) and types.is_struct(now):
        names = [field.name for field in known]
        return any(must_be_rewritten(known.field(name).type, now.field(name).type) for name in names)
    if types.is_list(known) and types.is_list(now):
        return must_be_rewritten(known.value_type, now.value_type)
    return bool(known != now)


# As JSON


def to_json(kind: pa.DataType) -> Any:
    """The type as Spark writes it in a JSON schema."""
    if types.is_struct(kind):
        return {"type": "struct", "fields": [_field_json(field) for field in kind]}
    if types.is_list(kind):
        return {"type": "array", "elementType": to_json(kind.value_type), "containsNull": True}
    if types.is_decimal128(kind):
        return f"decimal({kind.precision},{kind.scale})"
    return _BY_TYPE[kind]


def _field_json(field: pa.Field) -> dict[str, Any]:
    return {"name": field.name, "type": to_json(field.type), "nullable": True, "metadata": {}}


def from_json(document: Any) -> pa.DataType:
    """The type of a JSON schema of Spark's; InputError for one that a table cannot have."""
    match document:
        case {"type": "struct", "fields": list(fields)}:
            return pa.struct([_field_from_json(field) for field in fields])
        case {"type": "array", "elementType": element}:
            return pa.list_(pa.field("element", from_json(element)))
        case str() if document in _NAMES:
            return _NAMES[document]
        case str() if (decimal := _decimal_from(document)) is not None:
            return decimal
        case _:
            raise InputError(
                f"a table does not support columns of the type {document}",
                hint=f"Types are {', '.join(_NAMES)}, decimal, array and struct",
            )


def _field_from_json(document: Any) -> pa.Field:
    match document:
        case {"name": str(name), "type": kind}:
            return pa.field(name, from_json(kind))
        case _:
            raise InputError(f"a field of a schema has a name and a type, not {document}")


def _decimal_from(text: str) -> pa.DataType | None:
    match = _DECIMAL.fullmatch(text.replace(" ", ""))
    if match is None:
        return None
    precision, scale = int(match[1]), int(match[2])
    return pa.decimal128(precision, scale) if max(scale, 1) <= precision <= _MAX_DECIMAL_DIGITS else None


# From the rows of a topic to the rows of a table.
#
#     raw     key, value, topic, partition, offset, timestamp, timestampType: the columns of the source
#     json    _offset, _timestamp, _key, _rejected, _rejected_value, and a column for each field of the values; of a
#             topic with partitions _partition as well
#     avro    the same, by the schema of the values
#
# Invariants
# - Every message becomes one row, in the order of offsets of its partition. A value that cannot be parsed, or does not
#   fit the columns, is kept whole in `_rejected_value`, with the reason in `_rejected`; its fields are null then.
# - A null or empty value (a tombstone) has no fields, and is not rejected.


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
_PARTITION = pa.field("_partition", pa.int32())
_MAX_COLUMNS = 2000
_decode_json = msgspec.json.Decoder().decode


class TableShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a table's rows look like. `columns` is Spark's JSON schema of all of them."""

    values: Values
    columns: dict[str, Any]
    avro_schema: str | None = None
    ignores_unknown: bool = False
    """Fields without a column are left out: a caller that gives a schema says what is wanted."""
    has_partitions: bool = False
    """Whether rows say of which partition they are, in a column of the table's own."""

    @property
    def own_columns(self) -> list[pa.Field]:
        """The columns that do not come out of values, of a table whose values are parsed."""
        return [*_OWN_COLUMNS, _PARTITION] if self.has_partitions else list(_OWN_COLUMNS)

    @property
    def kind(self) -> pa.DataType:
        """All columns, as a struct."""
        return from_json(self.columns)

    @property
    def schema(self) -> pa.Schema:
        return pa.schema(list(self.kind))

    @property
    def source_columns(self) -> tuple[str, ...]:
        if self.values == "raw":
            return tuple(self.schema.names)
        return (*_READ_FOR_FIELDS, "partition") if self.has_partitions else _READ_FOR_FIELDS


def raw_shape(*, with_headers: bool = False) -> TableShape:
    """A table with the source's own columns."""
    names = [*RAW_COLUMNS, "headers"] if with_headers else list(RAW_COLUMNS)
    return TableShape(values="raw", columns=to_json(pa.struct(list(arrow_schema(names)))))


def parsed_shape(values: Values, fields: pa.DataType, *, has_partitions: bool = False, **more: Any) -> TableShape:
    """A table with a column for each of these fields."""
    shape = TableShape(values=values, columns={}, has_partitions=has_partitions, **more)
    taken = {field.name for field in shape.own_columns}
    own = [field for field in fields if field.name.lower() not in taken]
    if len(own) > _MAX_COLUMNS:
        raise InputError(
            f"the values have {len(own)} different fields; a table has at most {_MAX_COLUMNS} columns",
            hint="Select the fields with a schema",
        )
    return msgspec.structs.replace(shape, columns=to_json(pa.struct([*shape.own_columns, *own])))


def refuse_taken_names(fields: pa.DataType, *, has_partitions: bool = False) -> None:
    """For a given schema; in an inferred one, such a field is a reason to reject its row."""
    shape = TableShape(values="json", columns={}, has_partitions=has_partitions)
    taken = {field.name for field in shape.own_columns}
    own = ", ".join(field.name for field in shape.own_columns)
    for field in fields:
        if field.name.lower() in taken:
            raise InputError(
                f"the schema has the column {field.name} twice, or it is a column that every table has",
                hint=f"Case does not matter; a table has {own}",
            )
        taken.add(field.name.lower())


def fields_of(shape: TableShape) -> pa.DataType:
    """The columns that come out of the values."""
    own = {field.name for field in shape.own_columns}
    return pa.struct([field for field in shape.kind if field.name not in own])


def evolved(known: TableShape | None, found: pa.DataType, *, has_partitions: bool = False) -> TableShape:
    """The shape of a JSON table that exists already, or of a new one, when values with these fields come to it."""
    if known is not None:
        return parsed_shape("json", widened(fields_of(known), found), has_partitions=has_partitions)
    fields = settled(found)
    is_object = fields is not None and pa.types.is_struct(fields)
    return parsed_shape("json", fields if is_object else pa.struct([]), has_partitions=has_partitions)


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
        self._has_partitions = shape.has_partitions
        self.rejected = 0
        if not self._is_raw:
            self._fields = fields_of(shape)
            self._fit: Fit = fitter(self._fields, ignores_unknown=shape.ignores_unknown)
            self._decode: Fit = _decode_json if shape.values == "json" else avro_decoder(shape.avro_schema or "")

    def rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
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
        own += [batch.column("partition")] if self._has_partitions else []
        columns = pa.array(fields, self._fields).flatten() if len(self._fields) else []
        return pa.RecordBatch.from_arrays([*own, *columns], schema=self._schema)

    def _parsed(self, value: bytes | None) -> tuple[dict[str, Any], str | None]:
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
