"""The columns of a topic in Spark: those of Spark's Kafka source, with the same names, types and order.

    key binary, value binary, topic string, partition int, offset long, timestamp timestamp, timestampType int
    headers array<struct<key string, value binary>>        when asked for

A topic is one sequence, so `partition` is 0 always, and `timestampType` too: the time is the one of the append.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from tidelog.errors import InputError

HEADERS = "headers"
_HEADER = StructType([StructField("key", StringType()), StructField("value", BinaryType())])
_TYPES: dict[str, DataType] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "timestampType": IntegerType(),
    HEADERS: ArrayType(_HEADER),
}
_BY_LOWER_NAME = {name.lower(): name for name in _TYPES}


def source_schema(columns: Sequence[str] = (), *, include_headers: bool = False) -> StructType:
    """The schema with these columns, in this order; without any, all of them, with headers if those are asked for."""
    names = list(columns) or [name for name in _TYPES if name != HEADERS or include_headers]
    if include_headers and HEADERS not in names:
        names.append(HEADERS)
    return StructType([StructField(name, _TYPES[name]) for name in names])


def parse_columns(text: str) -> tuple[str, ...]:
    """The column names of the option `columns`; InputError names one that there is not."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name.lower() not in _BY_LOWER_NAME]
    if unknown or not names:
        problem = f"there is no column {unknown[0]}" if unknown else "columns is empty"
        raise InputError(problem, hint=f"Columns are {', '.join(_TYPES)}")
    found = tuple(_BY_LOWER_NAME[name.lower()] for name in names)
    if len(set(found)) < len(found):
        raise InputError(f"columns names one twice: {text}")
    return found
