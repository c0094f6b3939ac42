"""The options and columns of `tidelog_entries` and `tidelog_objects`: parses the text that Spark passes.

Names are case-insensitive. An unknown option is refused with the nearest name; settings of `tidelog.open_engine` that
say how the store is reached are options too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
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

from tidelog.config import EngineConfig
from tidelog.errors import InputError, NotSupportedError
from tidelog.pipeline.address import EngineRoot, find_engine
from tidelog.pipeline.source.options import DEFAULT_PARTITION_BYTES, OptionReader, parse_columns

# The columns of `tidelog_entries` and `tidelog_objects` in Spark.
#
#     entries   seq, order, lsn, kind, bucket, key, src_bucket, src_key, is_forced, size, metadata, timestamp,
#     is_refused,
#               reason                                            and value when asked for
#     changes   bucket, key, seq, order, change, before, after
#     objects   bucket, key, seq, order, size, crc                and metadata, data when asked for
#     versions  the same, with is_deleted behind order
#
# Numbers of the engine have 64 bits without a sign and Spark's have one: engines whose seqs need the last bit are
# refused.


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


CHANGED = ("seq", "size", "crc", "metadata", "data")
_CHANGED = StructType([StructField(name, OBJECT_COLUMNS[name]) for name in CHANGED])
CHANGE_COLUMNS: dict[str, DataType] = {
    "bucket": StringType(),
    "key": StringType(),
    "seq": LongType(),
    "order": IntegerType(),
    "change": StringType(),
    "before": _CHANGED,
    "after": _CHANGED,
}


def schema_of(known: Mapping[str, DataType], names: Sequence[str]) -> StructType:
    """These columns, in this order."""
    return StructType([StructField(name, known[name]) for name in names])


EARLIEST: Literal["earliest"] = "earliest"
LATEST: Literal["latest"] = "latest"
Start = int | Literal["earliest", "latest"]
DEFAULT_ROWS_PER_BATCH = 16384
DEFAULT_TAIL_BYTES = 1 << 30

_PLACES = ("root", "path", "engine", "config", "columns", "minPartitions", "maxPartitionBytes", "maxRowsPerBatch")
_ENTRY_NAMES = (
    *(*_PLACES, "startingSeq", "endingSeq", "includeValue", "includeMetadata", "includeRefused"),
    *("failOnDataLoss", "maxEntriesPerTrigger", "changes", "newestOnly"),
)
_OBJECT_NAMES = (
    *_PLACES,
    "seq",
    "bucket",
    "prefix",
    "withData",
    "withMetadata",
    "versions",
    "maxTailBytes",
    "pinSeconds",
)


class EntryOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which entries are read, and how. It can be pickled: tasks get it as it is."""

    root: EngineRoot
    columns: tuple[str, ...]
    starting: Start | None = None
    ending_seq: int | None = None
    includes_refused: bool = True
    fail_on_data_loss: bool = True
    min_partitions: int | None = None
    max_partition_bytes: int = DEFAULT_PARTITION_BYTES
    max_rows_per_batch: int = DEFAULT_ROWS_PER_BATCH
    max_entries_per_trigger: int | None = None
    are_changes: bool = False
    newest_only: bool = False
    includes_metadata: bool = True
    includes_value: bool = False
    is_table: bool = False
    """A table may be over an engine that has shipped nothing yet: until then it is empty."""


class ObjectOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which objects are read, as of which seq, and how. It can be pickled: tasks get it as it is."""

    root: EngineRoot
    columns: tuple[str, ...]
    seq: int | None = None
    bucket: str | None = None
    prefix: str = ""
    all_versions: bool = False
    min_partitions: int | None = None
    max_partition_bytes: int = DEFAULT_PARTITION_BYTES
    max_rows_per_batch: int = DEFAULT_ROWS_PER_BATCH
    max_tail_bytes: int = DEFAULT_TAIL_BYTES
    pin_seconds: int | None = None
    is_table: bool = False
    """As for entries."""


class _EngineOptionReader(OptionReader):
    def __init__(self, given: Mapping[str, str], names: tuple[str, ...]) -> None:
        super().__init__(given, names, EngineConfig)
        for name in ("store", "metadata"):
            if self.text(name) is not None:
                raise InputError(f"the option {name} is for topics", hint="The option root says where the engine is")

    def engine(self) -> EngineRoot:
        location = self.location("It is an engine's directory, or a store such as s3://bucket/prefix")
        return find_engine(location, self.text("engine"), **self.settings())

    def start(self) -> Start | None:
        text = (self.text("startingSeq") or "").strip().lower()
        if text == EARLIEST:
            return EARLIEST
        return LATEST if text == LATEST else self.count("startingSeq")


def parse_entry_options(given: Mapping[str, str], *, is_table: bool = False) -> EntryOptions:
    """The options of a read of entries; InputError names the one that is wrong and what would be right."""
    options = _EngineOptionReader(given, _ENTRY_NAMES)
    left_out = {name for name, option, default in _ENTRY_EXTRAS if not options.truth(option, default)}
    are_changes = _are_changes(options)
    columns = CHANGE_COLUMNS if are_changes else ENTRY_COLUMNS
    named = options.parsed("columns", lambda text: parse_columns(text, columns))
    starting, ending = options.start(), options.count("endingSeq")
    # Changes behind the last one are none: that is where the next read begins.
    least = starting - are_changes if isinstance(starting, int) else 0
    if ending is not None and ending < least:
        raise InputError(f"endingSeq {ending} is before startingSeq {starting}: there is nothing between them")
    return EntryOptions(
        root=options.engine(),
        columns=named or tuple(name for name in columns if name not in left_out),
        starting=starting,
        ending_seq=ending,
        includes_refused=options.truth("includeRefused", True),
        fail_on_data_loss=options.truth("failOnDataLoss", True),
        min_partitions=options.number("minPartitions"),
        max_partition_bytes=options.size("maxPartitionBytes") or DEFAULT_PARTITION_BYTES,
        max_rows_per_batch=options.number("maxRowsPerBatch") or DEFAULT_ROWS_PER_BATCH,
        max_entries_per_trigger=options.number("maxEntriesPerTrigger"),
        are_changes=are_changes,
        newest_only=options.truth("newestOnly", False),
        includes_metadata="metadata" not in left_out,
        includes_value="value" not in left_out,
        is_table=is_table,
    )


def _are_changes(options: _EngineOptionReader) -> bool:
    """Whether change data is asked for; InputError for what goes with entries only, or with changes only."""
    if not options.truth("changes", False):
        if options.truth("newestOnly", False):
            raise InputError("the option newestOnly is for change data", hint="Set changes to true")
        return False
    for name in ("includeRefused", "maxEntriesPerTrigger", "failOnDataLoss"):
        if options.text(name) is not None:
            raise InputError(f"the option {name} is for entries, and changes is true", hint="Leave it out")
    return True


_ENTRY_EXTRAS = (("metadata", "includeMetadata", True), ("value", "includeValue", False))


def parse_object_options(given: Mapping[str, str], *, is_table: bool = False) -> ObjectOptions:
    """The options of a read of objects; InputError names the one that is wrong and what would be right."""
    options = _EngineOptionReader(given, _OBJECT_NAMES)
    all_versions = options.truth("versions", False)
    extras = (("metadata", "withMetadata"), ("data", "withData"))
    left_out = {name for name, option in extras if not options.truth(option, False)}
    left_out |= set() if all_versions else {"is_deleted"}
    named = options.parsed("columns", lambda text: parse_columns(text, OBJECT_COLUMNS))
    bucket, prefix = options.text("bucket"), options.text("prefix") or ""
    if prefix and not bucket:
        raise InputError("the option prefix is of keys in a bucket", hint="Name the bucket too: the option bucket")
    return ObjectOptions(
        root=options.engine(),
        columns=named or tuple(name for name in OBJECT_COLUMNS if name not in left_out),
        seq=options.count("seq"),
        bucket=bucket or None,
        prefix=prefix,
        all_versions=all_versions,
        min_partitions=options.number("minPartitions"),
        max_partition_bytes=options.size("maxPartitionBytes") or DEFAULT_PARTITION_BYTES,
        max_rows_per_batch=options.number("maxRowsPerBatch") or DEFAULT_ROWS_PER_BATCH,
        max_tail_bytes=options.size("maxTailBytes") or DEFAULT_TAIL_BYTES,
        pin_seconds=options.number("pinSeconds"),
        is_table=is_table,
    )


def no_writer(format_name: str) -> NotSupportedError:
    """The error for a write to an engine from Spark."""
    hint = "Give your rows to the log that the engine follows, or to its apply_many, as entries"
    return NotSupportedError(f"{format_name} is read only: an engine is built from a log, in order", hint=hint)
