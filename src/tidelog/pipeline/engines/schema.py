"""The columns of `tidelog_entries` and `tidelog_objects` in Spark.

    entries   seq, order, lsn, kind, bucket, key, src_bucket, src_key, is_forced, size, metadata, timestamp, is_refused,
              reason                                            and value when asked for
    objects   bucket, key, seq, order, size, crc                and metadata, data when asked for
    versions  the same, with is_deleted behind order

Numbers of the engine have 64 bits without a sign and Spark's have one: engines whose seqs need the last bit are
refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from tidelog.errors import InputError

_METADATA = MapType(StringType(), StringType())
ENTRY_COLUMNS: dict[str, DataType] = {
    "seq": LongType(),
    "order": IntegerType(),
    "lsn": LongType(),
    "kind": StringType(),
    "bucket": StringType(),
    "key": StringType(),
    "src_bucket": StringType(),
    "src_key": StringType(),
    "is_forced": BooleanType(),
    "size": LongType(),
    "metadata": _METADATA,
    "timestamp": TimestampType(),
    "is_refused": BooleanType(),
    "reason": StringType(),
    "value": BinaryType(),
}
OBJECT_COLUMNS: dict[str, DataType] = {
    "bucket": StringType(),
    "key": StringType(),
    "seq": LongType(),
    "order": IntegerType(),
    "is_deleted": BooleanType(),
    "size": LongType(),
    "crc": LongType(),
    "metadata": _METADATA,
    "data": BinaryType(),
}


def schema_of(known: Mapping[str, DataType], names: Sequence[str]) -> StructType:
    """These columns, in this order."""
    return StructType([StructField(name, known[name]) for name in names])


def parse_columns(text: str, known: Mapping[str, DataType]) -> tuple[str, ...]:
    """The column names of the option `columns`; InputError names one that there is not."""
    by_lower_name = {name.lower(): name for name in known}
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name.lower() not in by_lower_name]
    if unknown or not names:
        problem = f"there is no column {unknown[0]}" if unknown else "columns is empty"
        raise InputError(problem, hint=f"Columns are {', '.join(known)}")
    found = tuple(by_lower_name[name.lower()] for name in names)
    if len(set(found)) < len(found):
        raise InputError(f"columns names one twice: {text}")
    return found


def checked_schema(schema: StructType, known: Mapping[str, DataType]) -> list[str]:
    """The names of the columns in their order; InputError for a schema of another kind."""
    for field in schema:
        if known.get(field.name) != field.dataType:
            raise InputError(
                f"there is no column {field.name} of type {field.dataType.simpleString()}",
                hint="Leave the schema out; the option columns says which ones are read",
            )
    return [str(name) for name in schema.fieldNames()]
