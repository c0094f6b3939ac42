"""The options of topics, as text from Spark, turned into what they mean.

Names and meanings are those of Spark's Kafka source and sink; case does not matter. One set of options serves both:
what is for the other side is passed over. An option that is not known is refused with the nearest name: one that is
misspelt must not be ignored. Options of Kafka that mean nothing here are passed over with a warning. Settings of
`tidelog.open` are options too.
"""

from __future__ import annotations

import logging
import os
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeVar

import msgspec
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

from tidelog.client.tail import ServerPlace
from tidelog.client.transport import parse_server
from tidelog.config import Settings
from tidelog.config.load import TLS_CA_VARIABLE, TOKEN_VARIABLE, settings_of
from tidelog.errors import ConfigError, InputError
from tidelog.log.isolation import READ_COMMITTED, Isolation
from tidelog.pipeline.address import Root, find_root
from tidelog.pipeline.source.declared import LOST_OPTIONS_HINT
from tidelog.secret import Secret
from tidelog.store.keys import PARTITION_SUFFIX
from tidelog.topics.names import parse_topic_name
from tidelog.units import parse_bytes, parse_seconds

# Where a read begins and ends, partition by partition: as options and checkpoints say it, and as offsets.
#
#     earliest | latest
#     {"shop/orders": {"0": 100, "1": -2}}   offsets, as Kafka's users write them; -2 is earliest, -1 latest
#     {"shop/orders": 100}                   the same, shorter, for a topic without partitions
#     a time in milliseconds, for all topics, for each, or for each partition
#
# Invariants
# - Ends are exclusive. A partition that is not named begins and ends where it would without the option.
# - A time stands for the first message of that time or later.
# - What Spark keeps in its checkpoint is `{"shop/orders": {"0": 100}, "log_ids": {"shop/orders": {"0": "0f1e..."}}}`,
#   whatever the options were: the ids tell a log from another one that was made in its place. Without them nothing is
#   known. The id of a topic without partitions may stand there alone, without the number.


Edge = Literal["earliest", "latest"]
LOG_IDS = "log_ids"
EPOCHS = "epochs"
ALL_PARTITIONS = -1
_EDGES: dict[object, Edge] = {-2: "earliest", -1: "latest", "earliest": "earliest", "latest": "latest"}
_MICROSECONDS = 1000
_Value = int | str | dict[str, int | str]
_NUMBER = re.compile(r"0|[1-9][0-9]{0,4}", re.ASCII)
_Number = Annotated[str, msgspec.Meta(pattern=f"^({_NUMBER.pattern})$")]
_Place = TypeVar("_Place")


class Partition(NamedTuple):
    """A partition of a topic, and the name of its log. A topic without partitions is the partition 0 of itself."""

    topic: str
    number: int
    log: str


def alone(topic: str) -> Partition:
    """A topic without partitions."""
    return Partition(topic, 0, topic)


class Positions(msgspec.Struct, frozen=True):
    """One place for each partition of each topic; `ALL_PARTITIONS` is that of those that are not named.

    `everywhere` is for topics that are not named, None: the default of the query.
    """

    offsets: dict[str, dict[int, int | Edge]] = {}
    times_us: dict[str, dict[int, int]] = {}
    everywhere: Edge | None = None
    everywhere_us: int | None = None

    @property
    def topics(self) -> dict[str, dict[int, Any]]:
        """The topics that are named, with the places of their partitions."""
        return {**self.offsets, **self.times_us}


class Ends(Protocol):
    """What a topic's log says about itself."""

    @property
    def start_offset(self) -> int: ...

    @property
    def next_offset(self) -> int: ...

    def offset_at(self, time_us: int) -> int: ...


def parse_offsets(text: str) -> Positions:
    """The options startingOffsets and endingOffsets."""
    plain = text.strip().lower()
    if plain in ("earliest", "latest"):
        return Positions(everywhere=_EDGES[plain])
    return Positions(offsets=_each(_by_topic(text), _offset))


def parse_by_timestamp(text: str) -> Positions:
    """The options startingOffsetsByTimestamp and endingOffsetsByTimestamp."""
    return Positions(times_us=_each(_by_topic(text), _time_us))


def parse_timestamp(text: str) -> Positions:
    """The options startingTimestamp and endingTimestamp."""
    try:
        return Positions(everywhere_us=int(text.strip()) * _MICROSECONDS)
    except ValueError:
        raise InputError(f"a timestamp is in milliseconds since 1970, not {text!r}") from None


def _each(
    given: Mapping[str, Mapping[int, int | str]], place_of: Callable[[str, int | str], _Place]
) -> dict[str, dict[int, _Place]]:
    return {
        topic: {number: place_of(topic, value) for number, value in places.items()} for topic, places in given.items()
    }


def _by_topic(text: str) -> dict[str, dict[int, int | str]]:
    try:
        found = msgspec.json.decode(text, type=dict[str, _Value])
    except msgspec.MsgspecError:
        raise InputError(
            f"{text!r} is not a position", hint='earliest, latest, or JSON such as {"shop/orders": {"0": 100}}'
        ) from None
    return {str(parse_topic_name(topic)): _by_partition(topic, value) for topic, value in found.items()}


def _by_partition(topic: str, value: _Value) -> dict[int, int | str]:
    if not isinstance(value, dict):
        return {ALL_PARTITIONS: value}
    wrong = next((number for number in value if _NUMBER.fullmatch(number) is None), None)
    if wrong is not None:
        raise InputError(f'{topic}: a partition is a number such as "0", not {wrong!r}')
    return {int(number): place for number, place in value.items()}


def _offset(topic: str, value: int | str) -> int | Edge:
    if value in _EDGES:
        return _EDGES[value]
    if isinstance(value, str) or value < 0:
        raise InputError(f"{topic}: an offset is 0 or more, -2 for earliest or -1 for latest, not {value!r}")
    return value


def _time_us(topic: str, value: int | str) -> int:
    if isinstance(value, str):
        raise InputError(f"{topic}: a timestamp is in milliseconds since 1970, not {value!r}")
    return value * _MICROSECONDS


# To offsets


def resolve_start(positions: Positions | None, name: Partition, log: Ends, default: Edge, when_no_later: str) -> int:
    """Where a read of a partition begins."""
    found = _time_of(positions, name)
    if found is None:
        return _edge_or_offset(positions, name, log, default)
    latest, offset = log.next_offset, log.offset_at(found)
    if offset >= latest and when_no_later == "error":
        raise InputError(
            f"{name.log} has no message of the starting time or later",
            hint='startingOffsetsByTimestampStrategy "latest" begins at the end then',
        )
    return offset


def resolve_range(
    starting: Positions | None, ending: Positions | None, name: Partition, log: Ends, when_no_later: str
) -> tuple[int, int]:
    """Where a batch read of a partition begins and ends; InputError if the two are in the wrong order.

    The beginning is looked up first: an append between the two lookups must not move it past the end.
    """
    latest = log.next_offset
    start = resolve_start(starting, name, log, "earliest", when_no_later)
    stop = resolve_end(ending, name, log)
    if start <= stop or starting is None or ending is None:
        return start, stop
    if start >= latest and _time_of(starting, name) is not None:
        return stop, stop  # no message is that late, and beginning at the end of all is beginning at the end asked for
    raise InputError(f"{name.log}: the starting offset {start} is after the ending offset {stop}")


def resolve_end(positions: Positions | None, name: Partition, log: Ends) -> int:
    """Where a read of a partition ends, exclusive. A time that no message has reached yet is the end."""
    found = _time_of(positions, name)
    return _edge_or_offset(positions, name, log, "latest") if found is None else log.offset_at(found)


def _time_of(positions: Positions | None, name: Partition) -> int | None:
    return None if positions is None else _place_of(positions.times_us, name, positions.everywhere_us)


def _place_of(places: Mapping[str, Mapping[int, _Place]], name: Partition, otherwise: _Place | None) -> _Place | None:
    of_topic = places.get(name.topic)
    return otherwise if of_topic is None else of_topic.get(name.number, of_topic.get(ALL_PARTITIONS))


def _edge_or_offset(positions: Positions | None, name: Partition, log: Ends, default: Edge) -> int:
    given = None if positions is None else _place_of(positions.offsets, name, positions.everywhere)
    place = default if given is None else given
    if place == "earliest":
        return log.start_offset
    return log.next_offset if place == "latest" else place


# In checkpoints


def to_checkpoint(
    offsets: Mapping[str, int],
    log_ids: Mapping[str, str] | None = None,
    partition_of: Callable[[str], Partition] = alone,
    epochs: Mapping[str, int] | None = None,
) -> dict[str, dict[str, Any]]:
    """What Spark keeps: offsets by the names of logs, and of which logs they are, and known under which epochs, as far
    as that is known."""
    names = sorted(map(partition_of, offsets))
    kept: dict[str, dict[str, Any]] = {}
    known: dict[str, Any] = {}
    under: dict[str, dict[str, int]] = {}
    for topic, number, log in names:
        kept.setdefault(topic, {})[str(number)] = offsets[log]
        if epochs and log in epochs:
            under.setdefault(topic, {})[str(number)] = epochs[log]
        log_id = (log_ids or {}).get(log)
        if log_id is not None and log == topic and number == 0:
            known.setdefault(topic, log_id)
        elif log_id is not None:
            known[topic] = {**_ids_of(known.get(topic, {})), str(number): log_id}
    return kept | ({LOG_IDS: known} if known else {}) | ({EPOCHS: under} if under else {})


def _log_alone(topic: str, number: int) -> str:
    return topic if number == 0 else f"{topic}{PARTITION_SUFFIX}{number}"


def from_checkpoint(
    found: Mapping[str, object], log_of: Callable[[str, int], str] = _log_alone
) -> tuple[dict[str, int], dict[str, str]]:
    """What Spark kept, back again by the names of logs: offsets and ids; InputError when somebody else wrote it."""
    try:
        ids = msgspec.convert(found.get(LOG_IDS, {}), dict[str, str | dict[_Number, str]])
        others = {topic: partitions for topic, partitions in found.items() if topic not in (LOG_IDS, EPOCHS)}
        topics = msgspec.convert(others, dict[str, dict[_Number, int]])
        offsets = _by_log(topics, log_of)
        return offsets, _by_log({topic: _ids_of(known) for topic, known in ids.items()}, log_of)
    except msgspec.ValidationError as error:
        raise InputError(
            f"the checkpoint of this query has offsets that are not tidelog's: {found}",
            hint="A query keeps its checkpoint location for itself; take another one",
        ) from error


def epochs_in(found: Mapping[str, object], log_of: Callable[[str, int], str] = _log_alone) -> dict[str, int]:
    """The epochs that Spark kept beside offsets, by the names of logs."""
    try:
        return _by_log(msgspec.convert(found.get(EPOCHS, {}), dict[str, dict[_Number, int]]), log_of)
    except msgspec.ValidationError:
        return {}  # `from_checkpoint` refuses what is not ours


def _ids_of(known: str | dict[str, str]) -> dict[str, str]:
    return {"0": known} if isinstance(known, str) else known


def _by_log(topics: Mapping[str, Mapping[str, _Place]], log_of: Callable[[str, int], str]) -> dict[str, _Place]:
    return {log_of(topic, int(number)): place for topic, places in topics.items() for number, place in places.items()}


# The columns of a topic in Spark: those of Spark's Kafka source, with the same names, types and order.
#
#     key binary, value binary, topic string, partition int, offset long, timestamp timestamp, timestampType int
#     headers array<struct<key string, value binary>>        when asked for
#
# `partition` is 0 in a topic without partitions. `timestampType` is 0 always: the time is the one of the append.


HEADERS = "headers"
_HEADER = StructType([StructField("key", StringType()), StructField("value", BinaryType())])
TOPIC_COLUMNS: dict[str, DataType] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "timestampType": IntegerType(),
    HEADERS: ArrayType(_HEADER),
}


def source_schema(columns: Sequence[str] = (), *, include_headers: bool = False) -> StructType:
    """The schema with these columns, in this order; without any, all of them, with headers if those are asked for."""
    names = list(columns) or [name for name in TOPIC_COLUMNS if name != HEADERS or include_headers]
    if include_headers and HEADERS not in names:
        names.append(HEADERS)
    return StructType([StructField(name, TOPIC_COLUMNS[name]) for name in names])


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


MIB = 1 << 20
Parsed = TypeVar("Parsed")
DEFAULT_PARTITION_BYTES = 128 * MIB
_TRUTH_VALUES = {"true": True, "false": False}
_SUBSCRIPTIONS = ("subscribe", "subscribePattern", "assign")
SINK_NAMES = ("topic", "txnAppId", "txnVersion", "handOverTimeout")
# Spark's own, which it hands on with ours.
_OF_SPARK = ("checkpointLocation", "queryName", "outputMode")
TOPIC_OPTIONS = (
    *(
        "root",
        "path",
        "metadata",
        "config",
        "server",
        "serverToken",
        "serverTlsCa",
        *_SUBSCRIPTIONS,
        "columns",
        "includeHeaders",
        "failOnDataLoss",
    ),
    *("startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp", "startingOffsetsByTimestampStrategy"),
    *("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"),
    *("minPartitions", "maxRecordsPerPartition", "maxPartitionBytes", "maxRowsPerBatch"),
    *("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "maxBytesPerTrigger"),
    *("isolation", "openTransactionTimeout", "kafka.isolation.level"),
    *(*SINK_NAMES, *_OF_SPARK),
)
_logger = logging.getLogger("tidelog.pipeline")
_DEFAULT_STREAM_WAIT_SECONDS = 900.0


class SourceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be read, and how. It can be pickled: tasks get it as it is."""

    root: Root
    topics: tuple[str, ...] | None
    pattern: str | None
    assigned: dict[str, tuple[int, ...]] = {}
    """The partitions that are read of topics of which not all are."""
    columns: tuple[str, ...] = ()
    include_headers: bool = False
    fail_on_data_loss: bool = True
    isolation: Isolation = READ_COMMITTED
    open_transaction_seconds: float = 0.0
    """How long a task waits for the end of a transaction. 0: it leaves out what comes from there on."""
    starting: Positions | None = None
    ending: Positions | None = None
    when_no_later_message: Literal["error", "latest"] = "error"
    min_partitions: int | None = None
    max_records_per_partition: int | None = None
    max_partition_bytes: int = DEFAULT_PARTITION_BYTES
    max_rows_per_batch: int = 16384
    max_offsets_per_trigger: int | None = None
    min_offsets_per_trigger: int | None = None
    max_trigger_delay_seconds: float = 900.0
    max_bytes_per_trigger: int | None = None
    server: ServerPlace | None = None
    """A server whose newest messages are to be read, too, as far as they are not in the store."""
    is_table: bool = False
    """A table may be over a topic that its first INSERT creates: until then it is empty."""


def parse_source_options(
    given: Mapping[str, str], *, is_stream: bool = False, is_table: bool = False, warns: bool = False
) -> SourceOptions:
    """The options of a read; InputError names the one that is wrong and what would be right.

    `warns` tells of options that are passed over: once for a query, which parses its options several times.
    """
    options = TopicOptionReader(given)
    if warns:
        options.warn_of_kafka()
    root = options.root()
    topics, pattern, assigned = options.subscription()
    starting, ending = options.positions("starting"), options.positions("ending")
    _check_places({"starting": starting, "ending": ending}, topics, pattern)
    return SourceOptions(
        root=root,
        topics=topics,
        pattern=pattern,
        assigned=assigned,
        columns=options.parsed("columns", lambda text: parse_columns(text, TOPIC_COLUMNS)) or (),
        include_headers=options.truth("includeHeaders", False),
        fail_on_data_loss=options.truth("failOnDataLoss", True),
        isolation=options.isolation(),
        open_transaction_seconds=options.seconds(
            "openTransactionTimeout", _DEFAULT_STREAM_WAIT_SECONDS if is_stream else 0.0
        ),
        starting=starting,
        ending=ending,
        when_no_later_message=options.strategy(),
        min_partitions=options.number("minPartitions"),
        max_records_per_partition=options.number("maxRecordsPerPartition"),
        max_partition_bytes=options.size("maxPartitionBytes") or DEFAULT_PARTITION_BYTES,
        max_rows_per_batch=options.number("maxRowsPerBatch") or 16384,
        max_offsets_per_trigger=options.number("maxOffsetsPerTrigger"),
        min_offsets_per_trigger=options.number("minOffsetsPerTrigger"),
        max_trigger_delay_seconds=options.seconds("maxTriggerDelay", 900.0),
        max_bytes_per_trigger=options.size("maxBytesPerTrigger"),
        server=options.server(),
        is_table=is_table,
    )


def _authorities(path: str) -> str:
    """The certificates in a file: tasks may run where it is not."""
    try:
        text = Path(path).read_text("ascii")
        ssl.create_default_context(cadata=text)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the certificate of the authority cannot be read: {getattr(error, 'strerror', None) or error}",
            path=Path(path),
            hint="serverTlsCa must name a file in PEM",
        ) from None
    return text


class OptionReader:
    """Options by name, whatever their case; one that is neither among `names` nor a setting is refused."""

    def __init__(
        self, given: Mapping[str, str], names: Sequence[str], settings_type: type[Settings] = Settings
    ) -> None:
        settings = settings_of(settings_type)
        self._given = {name.lower(): str(value) for name, value in given.items()}
        known = {name.lower(): name for name in (*names, *settings)}
        for name in given:
            if name.lower() not in known and not self.passes_over(name):
                raise _unknown(name, list(known.values()))
        places = ("dir", "store", "metadata")
        self._settings = {name: self._given[name] for name in settings if name in self._given and name not in places}

    def passes_over(self, name: str) -> bool:
        """Whether an option that means nothing here is allowed."""
        return False

    def text(self, name: str) -> str | None:
        return self._given.get(name.lower())

    def root(self) -> Root:
        return find_root(
            self.location("It is a log directory, or a store such as s3://bucket/prefix"),
            self.text("metadata"),
            **self.settings(),
        )

    def location(self, hint: str) -> str:
        """The one place that the options name; `hint` says what it may be."""
        path = self.text("path") or ""
        if path.startswith("file:/") and not path.startswith("file://"):
            # Spark makes `file:/x` of `/x` and of `file:///x`, and these are a directory and a store.
            raise InputError(f"the path has become {path} in Spark", hint="In SQL the option root names the place")
        places = [place for name in ("root", "path", "dir") if (place := self.text(name))]
        if len(set(places)) > 1:
            raise InputError(
                f"two places are given: {' and '.join(places)}", hint="Give the option root, or load(path)"
            )
        if not places:
            raise InputError("the option root is missing", hint=f"{hint}. {LOST_OPTIONS_HINT}")
        return places[0]

    def settings(self) -> dict[str, str]:
        """Settings among the options, and the file that has others."""
        config = self.text("config")
        return self._settings if config is None else {**self._settings, "config": config}

    def parsed(self, name: str, parse: Callable[[str], Parsed]) -> Parsed | None:
        text = self.text(name)
        if text is None:
            return None
        try:
            return parse(text)
        except InputError as error:
            raise InputError(f"the option {name}: {error.message}", hint=error.hint) from error

    def truth(self, name: str, default: bool) -> bool:
        text = self.text(name)
        if text is None:
            return default
        if text.strip().lower() not in _TRUTH_VALUES:
            raise InputError(f"the option {name} is true or false, not {text!r}")
        return _TRUTH_VALUES[text.strip().lower()]

    def number(self, name: str) -> int | None:
        return self._positive(name, _whole_number, "a number of 1 or more")

    def count(self, name: str) -> int | None:
        """As `number`, from 0 on."""
        text = self.text(name)
        number = None if text is None else _whole_number(text.strip())
        if text is not None and number is None:
            raise InputError(f"the option {name} is a number of 0 or more, not {text!r}")
        return number

    def size(self, name: str) -> int | None:
        return self._positive(name, parse_bytes, "a number of bytes, such as 64MiB")

    def seconds(self, name: str, default: float) -> float:
        text = self.text(name)
        seconds = default if text is None else parse_seconds(_spark_duration(text))
        if seconds is None or seconds < 0:
            raise InputError(f"the option {name} is a time such as 30s or 15m, not {text!r}")
        return float(seconds)

    def _positive(self, name: str, parse: Callable[[str], int | float | None], what: str) -> int | None:
        text = self.text(name)
        if text is None:
            return None
        number = parse(text.strip())
        if not isinstance(number, int) or number < 1:
            raise InputError(f"the option {name} is {what}, not {text!r}")
        return number


# Options of Spark's Kafka source and sink, and of Kafka's clients, that mean nothing here, and what to use instead.
_KAFKA = "kafka."
_INSTEAD = {
    "kafka.bootstrap.servers": "root says where the topics are",
    "kafka.group.id": "a query's checkpoint has its position",
    "groupidprefix": "a query's checkpoint has its position",
    "kafka.enable.auto.commit": "a query's checkpoint has its position",
    "kafka.auto.offset.reset": "startingOffsets",
    "kafka.max.poll.records": "maxRowsPerBatch",
    "kafka.fetch.max.bytes": "maxPartitionBytes",
    "kafka.max.request.size": "max_message_bytes",
    "kafka.compression.type": "ship_compression",
    "kafka.transactional.id": "txnAppId",
    "kafka.acks": "a write is in the store when it returns",
    "kafkaconsumer.polltimeoutms": "store_request_timeout_ms",
    "fetchoffset.numretries": "store_max_retries",
    "fetchoffset.retryintervalms": "store_max_retries",
    "partition.metadata.cache.ttl.ms": "partitions are looked up for every write",
}
_SECURITY = ("kafka.security.", "kafka.ssl.", "kafka.sasl.")


class TopicOptionReader(OptionReader):
    """The options of topics, of a read and of a write."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self.of_kafka: list[str] = []
        super().__init__(given, TOPIC_OPTIONS)

    def passes_over(self, name: str) -> bool:
        is_kafkas = name.lower().startswith(_KAFKA) or name.lower() in _INSTEAD
        if is_kafkas:
            self.of_kafka.append(name)
        return is_kafkas

    def warn_of_kafka(self) -> None:
        """One warning for all options of Kafka that were passed over, with what is ours."""
        if self.of_kafka:
            told = [f"{name} ({_instead(name)})" for name in self.of_kafka]
            _logger.warning("tidelog passes over options of Kafka: %s", ", ".join(told))

    def server(self) -> ServerPlace | None:
        """The server that is asked for the newest messages, with what proves it and us."""
        url = self.text("server")
        if url is None:
            return None
        if not url.startswith(("http://", "https://")):
            raise InputError(f"server must be the URL of a tidelog server, such as http://127.0.0.1:8080, not {url!r}")
        parse_server(url)
        token, path = (
            self.text(name) or os.environ.get(variable)
            for name, variable in (("serverToken", TOKEN_VARIABLE), ("serverTlsCa", TLS_CA_VARIABLE))
        )
        return ServerPlace(url, Secret(token) if token else None, _authorities(path) if path else None)

    def target(self) -> str | None:
        """The topic that is written: the one that is named for it, or the only one that is read."""
        topic, subscribed = self.text("topic"), (self.text("subscribe") or "").strip(" ,")
        if topic is None and subscribed and "," not in subscribed:
            topic = subscribed
        return None if topic is None else str(parse_topic_name(topic))

    def subscription(self) -> tuple[tuple[str, ...] | None, str | None, dict[str, tuple[int, ...]]]:
        """The topics or the pattern of their names, and the partitions of those of which not all are read."""
        named = [name for name in _SUBSCRIPTIONS if self.text(name) is not None]
        if not named and self.text("topic") is not None:
            return _checked_topics([self.text("topic") or ""], "topic"), None, {}
        if len(named) != 1:
            problem = "none of them is given" if not named else f"{' and '.join(named)} are given"
            raise InputError(f"exactly one of {', '.join(_SUBSCRIPTIONS)} says what is read; {problem}")
        text = self.text(named[0]) or ""
        if named[0] == "subscribePattern":
            return None, _checked_pattern(text), {}
        assigned = _assigned(text) if named[0] == "assign" else {}
        topics = list(assigned) if named[0] == "assign" else [name.strip() for name in text.split(",")]
        return _checked_topics([name for name in topics if name], named[0]), None, assigned

    def positions(self, end: Literal["starting", "ending"]) -> Positions | None:
        """What was given; a time for all wins over times for each, and those over offsets."""
        found = self.parsed(f"{end}Timestamp", parse_timestamp)
        found = found or self.parsed(f"{end}OffsetsByTimestamp", parse_by_timestamp)
        return found or self.parsed(f"{end}Offsets", parse_offsets)

    def isolation(self) -> Isolation:
        text = (self.text("isolation") or self.text("kafka.isolation.level") or READ_COMMITTED).lower()
        if text == "read_committed":
            return "read_committed"
        if text == "read_uncommitted":
            return "read_uncommitted"
        raise InputError(f"isolation is read_committed or read_uncommitted, not {text}")

    def strategy(self) -> Literal["error", "latest"]:
        text = (self.text("startingOffsetsByTimestampStrategy") or "error").lower()
        if text == "error":
            return "error"
        if text == "latest":
            return "latest"
        raise InputError(f"startingOffsetsByTimestampStrategy is error or latest, not {text}")


def _whole_number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\d{1,18}", text) else None


def _spark_duration(text: str) -> str:
    """Spark's users write `15 minutes` and `15m` alike."""
    plain = text.strip().lower().replace(" ", "")
    for word, unit in (("milliseconds", "ms"), ("seconds", "s"), ("minutes", "m"), ("hours", "h"), ("days", "d")):
        plain = plain.replace(word, unit).replace(word[:-1], unit)
    return plain.replace("min", "m")


def _checked_pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise InputError(f"subscribePattern is not a regular expression: {error}") from error
    return text


def _assigned(text: str) -> dict[str, tuple[int, ...]]:
    """Kafka's `{"topic": [0, 2]}`."""
    try:
        found = msgspec.json.decode(text, type=dict[str, list[int]])
    except msgspec.MsgspecError as error:
        raise InputError(f'assign is JSON such as {{"shop/orders": [0]}}: {error}') from error
    for topic, numbers in found.items():
        if not numbers or min(numbers) < 0 or len(set(numbers)) < len(numbers):
            raise InputError(
                f"assign names the partitions {numbers} of {topic}", hint="Name each partition once, from 0 on"
            )
    return {str(parse_topic_name(topic)): tuple(sorted(numbers)) for topic, numbers in found.items()}


def _checked_topics(names: list[str], option: str) -> tuple[str, ...]:
    if not names:
        raise InputError(f"the option {option} names no topic")
    return tuple(dict.fromkeys(str(parse_topic_name(name)) for name in names))


def _check_places(given: Mapping[str, Positions | None], topics: tuple[str, ...] | None, pattern: str | None) -> None:
    """A place for a topic that is not read is a slip in its name; ignored, the one that is meant is read whole."""
    for end, positions in given.items():
        for topic in () if positions is None else positions.topics:
            is_read = topic in topics if topics is not None else re.fullmatch(pattern or "", topic) is not None
            if not is_read:
                read = f"what matches {pattern}" if topics is None else ", ".join(topics)
                raise InputError(f"the {end} offsets name {topic}, which is not read", hint=f"Read is {read}")


def _instead(name: str) -> str:
    if name.lower().startswith(_SECURITY):
        return "the store's settings and the variables of its cloud say how it is reached"
    return _INSTEAD.get(name.lower(), "a setting of Kafka's clients")


def _unknown(name: str, known: list[str]) -> InputError:
    near = get_close_matches(name, known, n=1)
    hint = f"Did you mean {near[0]}?" if near else "docs/reference/spark-options.md has all of them"
    return InputError(f"there is no option {name}", hint=hint)
