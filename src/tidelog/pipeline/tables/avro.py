"""Decodes Avro's binary encoding with the schema that the values were written with: messages, and rows of files.

Spark's own Avro support is a jar that PySpark does not include. Container files are `avro_files.py`.

Invariants
- A value is read to its last byte: a value that is truncated, too long, or contains impossible numbers is
  `MisfitError`.
- Lengths are checked against the remaining bytes before anything is read by them.
"""

from __future__ import annotations

import datetime
import decimal
import struct
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pyarrow as pa

from tidelog.errors import InputError
from tidelog.pipeline.tables.fitting import MisfitError

_Read = Callable[["Cursor"], Any]
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_EPOCH_DAY = datetime.date(1970, 1, 1)
_MAX_VARINT_BYTES = 10
_EXACT = decimal.Context(prec=1000)  # no digit is rounded away; what is too long does not fit its column


class Cursor:
    """A place in the bytes of a value."""

    __slots__ = ("_data", "_position")

    def __init__(self, data: bytes, position: int = 0) -> None:
        self._data = data
        self._position = position

    @property
    def position(self) -> int:
        return self._position

    def take(self, length: int) -> bytes:
        end = self._position + length
        if length < 0 or end > len(self._data):
            raise MisfitError("the value is truncated, or was written with another schema")
        found = self._data[self._position : end]
        self._position = end
        return found

    def long(self) -> int:
        """A zigzag varint."""
        number = shift = 0
        for _ in range(_MAX_VARINT_BYTES):
            byte = self.take(1)[0]
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return (number >> 1) ^ -(number & 1)
            shift += 7
        raise MisfitError("a number is too long")

    def count(self) -> int:
        """The number of items in a block. A negative count is followed by the block's size in bytes."""
        count = self.long()
        if count < 0:
            self.long()
            count = -count
        if count > len(self._data) - self._position:  # an item of no bytes (null) is not worth more
            raise MisfitError("a block claims more items than the value has bytes")
        return count

    @property
    def is_at_end(self) -> bool:
        return self._position == len(self._data)


class AvroDecoder:
    """Reads values that were written with this schema (the text of an .avsc file); its top must be a record."""

    def __init__(self, schema: str) -> None:
        self._read = _Schema(schema).reader

    def __call__(self, value: bytes) -> Any:
        return next(self.several(value, 1))

    def several(self, data: bytes, count: int) -> Iterator[Any]:
        """So many values, one behind the other; these are all of the bytes."""
        cursor = Cursor(data)
        for left in range(count - 1, -1, -1):
            found = self._read(cursor)
            if not left and not cursor.is_at_end:
                raise MisfitError("the value has bytes after its end, or was written with another schema")
            yield found


def avro_decoder(schema: str) -> AvroDecoder:
    """The reader of values that were written with a schema."""
    return AvroDecoder(schema)


def avro_fields(schema: str) -> pa.DataType:
    """The columns of such values."""
    return _Schema(schema).kind


class _Schema:
    """A schema taken apart: how to read its values, and the type of their column."""

    def __init__(self, text: str) -> None:
        try:
            document = msgspec.json.decode(text)
        except msgspec.MsgspecError as error:
            raise InputError(f"the Avro schema is not JSON: {error}") from error
        self._named: dict[str, tuple[_Read, pa.DataType]] = {}
        self._namespace = ""
        try:
            self.reader, self.kind = self._parse(document)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"the Avro schema cannot be understood: {error!r}") from error
        if not pa.types.is_struct(self.kind):
            raise InputError("the Avro schema of a table's values must be a record", hint="Put the type into a record")

    def _parse(self, document: Any) -> tuple[_Read, pa.DataType]:
        if isinstance(document, list):
            return self._union(document)
        kind = document.get("type") if isinstance(document, dict) else document
        if isinstance(document, dict) and "logicalType" in document and (logical := _logical(document)) is not None:
            return logical
        if isinstance(kind, dict | list):
            return self._parse(kind)
        if kind in _PRIMITIVES:
            return _PRIMITIVES[kind]
        if kind in self._named:
            return self._named[kind]
        if isinstance(document, dict) and kind in ("record", "array", "map", "enum", "fixed"):
            found: tuple[_Read, pa.DataType] = getattr(self, f"_{kind}")(document)
            return found
        raise InputError(f"the Avro schema has the unknown type {kind}", hint="Recursive types have no columns")

    def _record(self, document: dict[str, Any]) -> tuple[_Read, pa.DataType]:
        around, self._namespace = self._namespace, self._namespace_of(document)
        fields = [(str(field["name"]), *self._parse(field["type"])) for field in document["fields"]]
        self._namespace = around

        def read(cursor: Cursor) -> dict[str, Any]:
            return {name: read_field(cursor) for name, read_field, _ in fields}

        return self._remember(document, read, pa.struct([pa.field(name, kind) for name, _, kind in fields]))

    def _array(self, document: dict[str, Any]) -> tuple[_Read, pa.DataType]:
        read_item, kind = self._parse(document["items"])

        def read(cursor: Cursor) -> list[Any]:
            found: list[Any] = []
            while count := cursor.count():
                found += [read_item(cursor) for _ in range(count)]
            return found

        return read, pa.list_(pa.field("element", kind))

    def _map(self, document: dict[str, Any]) -> tuple[_Read, pa.DataType]:
        """As a list of pairs: names of a map are data, not columns."""
        read_item, kind = self._parse(document["values"])

        def read(cursor: Cursor) -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = []
            while count := cursor.count():
                found += [{"key": _text(cursor), "value": read_item(cursor)} for _ in range(count)]
            return found

        return read, pa.list_(pa.field("element", pa.struct([pa.field("key", pa.string()), pa.field("value", kind)])))

    def _enum(self, document: dict[str, Any]) -> tuple[_Read, pa.DataType]:
        symbols = [str(symbol) for symbol in document["symbols"]]

        def read(cursor: Cursor) -> str:
            index = cursor.long()
            if not 0 <= index < len(symbols):
                raise MisfitError(f"there is no symbol {index} in {document['name']}")
            return symbols[index]

        return self._remember(document, read, pa.string())

    def _fixed(self, document: dict[str, Any]) -> tuple[_Read, pa.DataType]:
        size = int(document["size"])
        return self._remember(document, lambda cursor: cursor.take(size), pa.binary())

    def _union(self, branches: list[Any]) -> tuple[_Read, pa.DataType]:
        parsed = [self._parse(branch) for branch in branches]
        kinds = [kind for _, kind in parsed if not pa.types.is_null(kind)]
        if len(set(kinds)) != 1:
            raise InputError(
                f"the Avro schema has a union of {len(kinds)} types, and a column has one",
                hint="Unions of null and one type become columns",
            )

        def read(cursor: Cursor) -> Any:
            index = cursor.long()
            if not 0 <= index < len(parsed):
                raise MisfitError(f"there is no branch {index} in a union of {len(parsed)}")
            return parsed[index][0](cursor)

        return read, kinds[0]

    def _remember(self, document: dict[str, Any], read: _Read, kind: pa.DataType) -> tuple[_Read, pa.DataType]:
        name = str(document["name"]).rpartition(".")[2]
        self._named[name] = self._named[f"{self._namespace_of(document)}.{name}"] = (read, kind)
        return read, kind

    def _namespace_of(self, document: dict[str, Any]) -> str:
        """That of a full name, else its own, else that of the record around it."""
        return str(document["name"]).rpartition(".")[0] or str(document.get("namespace") or self._namespace)


def _text(cursor: Cursor) -> str:
    try:
        return cursor.take(cursor.long()).decode()
    except UnicodeDecodeError:
        raise MisfitError("text that is not UTF-8") from None


def _boolean(cursor: Cursor) -> bool:
    byte = cursor.take(1)[0]
    if byte > 1:
        raise MisfitError(f"{byte} where true or false is expected")
    return bool(byte)


def _unpacked(form: str) -> _Read:
    packed = struct.Struct(form)

    def read(cursor: Cursor) -> Any:
        return packed.unpack(cursor.take(packed.size))[0]

    return read


_PRIMITIVES: dict[str, tuple[_Read, pa.DataType]] = {
    "null": (lambda cursor: None, pa.null()),
    "boolean": (_boolean, pa.bool_()),
    "int": (Cursor.long, pa.int32()),
    "long": (Cursor.long, pa.int64()),
    "float": (_unpacked("<f"), pa.float32()),
    "double": (_unpacked("<d"), pa.float64()),
    "bytes": (lambda cursor: cursor.take(cursor.long()), pa.binary()),
    "string": (_text, pa.string()),
}


def _logical(document: dict[str, Any]) -> tuple[_Read, pa.DataType] | None:
    """The logical types that have a column type of their own; others are read as what is under them."""
    match document["logicalType"]:
        case "timestamp-millis":
            return lambda cursor: _moment(cursor.long() * 1000), pa.timestamp("us", tz="UTC")
        case "timestamp-micros":
            return lambda cursor: _moment(cursor.long()), pa.timestamp("us", tz="UTC")
        case "date":
            return lambda cursor: _day(cursor.long()), pa.date32()
        case "decimal" if document.get("type") == "bytes":
            scale = int(document.get("scale", 0))
            kind = pa.decimal128(int(document["precision"]), scale)
            return lambda cursor: _decimal(cursor.take(cursor.long()), scale), kind
        case _:
            return None


def _moment(time_us: int) -> datetime.datetime:
    try:
        return _EPOCH + datetime.timedelta(microseconds=time_us)
    except OverflowError:
        raise MisfitError(f"{time_us} us since 1970 is out of range for a timestamp") from None


def _day(days: int) -> datetime.date:
    try:
        return _EPOCH_DAY + datetime.timedelta(days=days)
    except OverflowError:
        raise MisfitError(f"{days} days since 1970 is out of range for a date") from None


def _decimal(data: bytes, scale: int) -> decimal.Decimal:
    return _EXACT.scaleb(decimal.Decimal(int.from_bytes(data, "big", signed=True)), -scale)
