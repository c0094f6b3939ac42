"""The options of a write, and the columns that make a message.

    value       binary or string, needed
    key         binary or string
    headers     array<struct<key string, value binary>>
    topic       string, where the option `topic` does not name one
    timestamp   timestamp; without it, the time of the write

`partition`, `offset` and `timestampType`, as a read of a topic gives them, are taken and not used: a message that is
written gets a new place. Any other column is refused, since it would be lost.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from pyspark.sql.types import ArrayType, BinaryType, DataType, StringType, StructType, TimestampType

from tidelog.errors import InputError
from tidelog.pipeline.options import OptionReader
from tidelog.pipeline.root import Root
from tidelog.pipeline.schema import source_schema
from tidelog.tier.intake_area import consignment_of
from tidelog.topics.names import parse_topic_name

# Spark's own, which it hands on with ours.
_OF_SPARK = ("checkpointLocation", "queryName", "outputMode")
_NAMES = ("root", "path", "metadata", "config", "topic", "txnAppId", "txnVersion", "handOverTimeout", *_OF_SPARK)
_PASSED_OVER = ("partition", "offset", "timestampType")
_TEXT_OR_BYTES = (BinaryType, StringType)
_DEFAULT_WAIT_SECONDS = 60.0


class SinkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where rows go, and the name under which they go there once."""

    root: Root
    topic: str | None = None
    app: str | None = None
    version: int | None = None
    wait_seconds: float = _DEFAULT_WAIT_SECONDS


def parse_sink_options(given: Mapping[str, str], *, is_stream: bool) -> SinkOptions:
    """The options of a write; InputError names the one that is wrong."""
    options = OptionReader(given, _NAMES)
    topic, app = options.text("topic"), options.text("txnAppId")
    version = options.count("txnVersion")
    _check_transaction(app, version, is_stream=is_stream)
    return SinkOptions(
        root=options.root(),
        topic=None if topic is None else str(parse_topic_name(topic)),
        app=app,
        version=version,
        wait_seconds=options.seconds("handOverTimeout", _DEFAULT_WAIT_SECONDS),
    )


def _check_transaction(app: str | None, version: int | None, *, is_stream: bool) -> None:
    if is_stream and version is not None:
        raise InputError("a stream numbers its batches itself", hint="Leave txnVersion out, or write in foreachBatch")
    if not is_stream and (app is None) != (version is None):
        raise InputError("txnAppId and txnVersion go together", hint="Give both, or neither")
    if app is not None:
        consignment_of(app, version or 0)  # says what a name may be


def check_columns(schema: StructType, topic: str | None) -> None:
    """InputError says which column is missing, of the wrong type, or none of a message."""
    names = [field.name for field in schema]
    if len(set(names)) < len(names):
        raise InputError(f"a column is there twice: {', '.join(names)}")
    if "value" not in names:
        raise InputError(
            "the column value is missing", hint="Name one so, as in df.selectExpr('to_json(struct(*)) value')"
        )
    if topic is None and "topic" not in names:
        raise InputError("no topic is named", hint="Give the option topic, or a column topic")
    for field in schema:
        if field.name not in _PASSED_OVER:
            _check_type(field.name, field.dataType)


def _check_type(name: str, kind: DataType) -> None:
    headers = source_schema(["headers"])["headers"].dataType
    if name in ("key", "value"):
        fits, expected = isinstance(kind, _TEXT_OR_BYTES), "binary or string"
    elif name == "topic":
        fits, expected = isinstance(kind, StringType), "string"
    elif name == "timestamp":
        fits, expected = isinstance(kind, TimestampType), "timestamp"
    elif name == "headers":
        fits, expected = _is_headers(kind), headers.simpleString()
    else:
        raise InputError(
            f"{name} is no part of a message, and would be lost",
            hint="Columns are value, key, headers, topic, timestamp; put more into the value, as in to_json(struct(*))",
        )
    if not fits:
        raise InputError(f"the column {name} is {kind.simpleString()}, and must be {expected}", hint="Cast it")


def _is_headers(kind: DataType) -> bool:
    if not isinstance(kind, ArrayType) or not isinstance(kind.elementType, StructType):
        return False
    fields = [(field.name, type(field.dataType)) for field in kind.elementType]
    return fields == [("key", StringType), ("value", BinaryType)]
