"""Configs of topics and of the broker, under the names that users of Kafka know.

    client's text  --checked-->  configs of the topic  --settings_of-->  settings of the topic in the library
                                                       --serving_of-->   what Produce and Fetch do

Invariants
- A topic's configs are stored with its settings (`kafka_configs`), as their text: they move with the topic, and a
  client reads back what it set. Those that the library has a setting for set that too, and the setting is what counts:
  when the library changes it, clients see what it is now.
- A config is here, or it is unknown and refused. One without an effect says so in the docs, and is harmless: it is
  about files, replicas or caches of Kafka's brokers.
- What is written here is the reference: docs/reference/kafka.md is generated from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple

from tidelog.cold.settings import TierSettings
from tidelog.errors import ConfigError
from tidelog.fields import nearest
from tidelog.service.kafka.records import Compression

_MAX_INT, _MAX_LONG = (1 << 31) - 1, (1 << 63) - 1
_FOREVER = 10 * 365 * 86_400
"""The most seconds that a setting takes: for ever, where the directory's default is a limit. As bytes `_ENDLESS`."""
_ENDLESS = 1 << 50
_COMPRESSIONS = {
    "producer": Compression.NONE,
    "uncompressed": Compression.NONE,
    "none": Compression.NONE,
    "gzip": Compression.GZIP,
    "snappy": Compression.SNAPPY,
    "lz4": Compression.LZ4,
    "zstd": Compression.ZSTD,
}


class ConfigType(IntEnum):
    """As DescribeConfigs says it."""

    BOOLEAN = 1
    STRING = 2
    INT = 3
    LONG = 5
    DOUBLE = 6
    LIST = 7


class ConfigSource(IntEnum):
    """Where a value comes from."""

    TOPIC = 1
    STATIC_BROKER = 4
    DEFAULT = 5
    GROUP = 8


class Config(NamedTuple):
    """One config of a topic: what it accepts, its default, and what it does here."""

    name: str
    type: ConfigType
    default: str
    effect: str
    """In a sentence; empty: none."""
    least: float | None = None
    choices: tuple[str, ...] = ()
    broker_name: str | None = None
    """The broker's config that Kafka takes the default from."""

    def check(self, text: str) -> None:
        """ConfigError when it is no value of this config."""
        try:
            self._check(text.strip())
        except ValueError as error:
            raise ConfigError(f"Invalid value {text} for configuration {self.name}: {error}") from None

    def _check(self, text: str) -> None:
        if self.type is ConfigType.BOOLEAN:
            _require(text.lower() in ("true", "false"), "expected true or false")
        elif self.type is ConfigType.LIST:
            parts = [part for part in _parts(text) if self.choices and part not in self.choices]
            _require(not parts, f"expected one or more of {', '.join(self.choices)}")
        elif self.type is ConfigType.STRING:
            _require(not self.choices or text in self.choices, f"expected one of {', '.join(self.choices)}")
        elif self.type is ConfigType.DOUBLE:
            _require(0 <= _number(text, float) <= 1, "expected a number from 0 to 1")
        else:
            number, most = _number(text, int), _MAX_INT if self.type is ConfigType.INT else _MAX_LONG
            _require((self.least or 0) <= number <= most, f"expected {self.least or 0:.0f} to {most}")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _number(text: str, kind: type[float]) -> float:
    try:
        return kind(text)
    except ValueError:
        raise ValueError("expected a number") from None


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


_B, _S, _I, _L, _D, _LIST = (
    *(ConfigType.BOOLEAN, ConfigType.STRING, ConfigType.INT),
    *(ConfigType.LONG, ConfigType.DOUBLE, ConfigType.LIST),
)
_POLICIES = ("delete", "compact")

TOPIC_CONFIGS: dict[str, Config] = {
    one.name: one
    for one in (
        Config(
            *("cleanup.policy", _LIST, "delete"),
            '`compact` sets `compaction = "by_key"`, which `tidelog pipeline compact` carries out; without `delete` no '
            "retention applies",
            choices=_POLICIES,
            broker_name="log.cleanup.policy",
        ),
        Config(
            *("compression.type", _S, "producer"),
            "how answers to Fetch are compressed; `producer`, `uncompressed` and `none`: not at all, for messages are "
            "stored apart from their batches, and the producer's own compression is not kept",
            choices=tuple(_COMPRESSIONS),
            broker_name="compression.type",
        ),
        Config(
            *("flush.messages", _L, "1"),
            "1: acks=all is answered once the messages are on the disk; more: once they are in a file, as Kafka's "
            "default is",
            least=1,
            broker_name="log.flush.interval.messages",
        ),
        Config(
            *("local.retention.bytes", _L, "-2"),
            "`local_retention_bytes`: when messages that are in the store leave the disk; needs a store",
            least=-2,
            broker_name="log.local.retention.bytes",
        ),
        Config(
            *("local.retention.ms", _L, "-2"),
            "`local_retention_seconds`, rounded up to seconds; needs a store",
            least=-2,
            broker_name="log.local.retention.ms",
        ),
        Config(
            *("max.message.bytes", _I, "1048588"),
            "the largest batch of a producer, as it comes, compressed or not",
            broker_name="message.max.bytes",
        ),
        Config(
            *("message.timestamp.type", _S, "CreateTime"),
            "`LogAppendTime`: messages get the time of the broker",
            choices=("CreateTime", "LogAppendTime"),
            broker_name="log.message.timestamp.type",
        ),
        Config(
            *("min.compaction.lag.ms", _L, "0"),
            "`min_compaction_lag_seconds`, rounded up to seconds",
            broker_name="log.cleaner.min.compaction.lag.ms",
        ),
        Config(
            *("remote.storage.enable", _B, "false"),
            "true with a store, false without one; it cannot be changed for a topic",
        ),
        Config(
            *("retention.bytes", _L, "-1"),
            "`retention_bytes`: of all of a partition, on the disk and in the store; -1: no limit",
            least=-1,
            broker_name="log.retention.bytes",
        ),
        Config(
            *("retention.ms", _L, "-1"),
            "`retention_seconds`, rounded up to seconds; -1, the default: for ever",
            least=-1,
            broker_name="log.retention.ms",
        ),
        Config(
            *("tidelog.durability", _S, "synced"),
            "`durability`: what acks=all waits for. `synced`: the disk of this node; `shipped`: the store has it too, "
            "and consumers get nothing before that",
            choices=("synced", "shipped"),
        ),
        Config("compression.gzip.level", _I, "-1", "", least=-1, broker_name="compression.gzip.level"),
        Config("compression.lz4.level", _I, "9", "", least=1, broker_name="compression.lz4.level"),
        Config("compression.zstd.level", _I, "3", "", least=-131072, broker_name="compression.zstd.level"),
        Config("delete.retention.ms", _L, "86400000", "", broker_name="log.cleaner.delete.retention.ms"),
        Config("file.delete.delay.ms", _L, "60000", "", broker_name="log.segment.delete.delay.ms"),
        Config("flush.ms", _L, str(_MAX_LONG), ""),
        Config("follower.replication.throttled.replicas", _LIST, "", ""),
        Config("index.interval.bytes", _I, "4096", "", broker_name="log.index.interval.bytes"),
        Config("leader.replication.throttled.replicas", _LIST, "", ""),
        Config(
            "max.compaction.lag.ms", _L, str(_MAX_LONG), "", least=1, broker_name="log.cleaner.max.compaction.lag.ms"
        ),
        Config("message.timestamp.after.max.ms", _L, "3600000", "", broker_name="log.message.timestamp.after.max.ms"),
        Config(
            "message.timestamp.before.max.ms", _L, str(_MAX_LONG), "", broker_name="log.message.timestamp.before.max.ms"
        ),
        Config("min.cleanable.dirty.ratio", _D, "0.5", "", broker_name="log.cleaner.min.cleanable.ratio"),
        Config("min.insync.replicas", _I, "1", "", least=1, broker_name="min.insync.replicas"),
        Config("preallocate", _B, "false", "", broker_name="log.preallocate"),
        Config("remote.log.copy.disable", _B, "false", ""),
        Config("remote.log.delete.on.disable", _B, "false", ""),
        Config("segment.bytes", _I, "1073741824", "", least=14, broker_name="log.segment.bytes"),
        Config("segment.index.bytes", _I, "10485760", "", least=4, broker_name="log.index.size.max.bytes"),
        Config("segment.jitter.ms", _L, "0", ""),
        Config("segment.ms", _L, "604800000", "", least=1),
        Config("unclean.leader.election.enable", _B, "false", "", broker_name="unclean.leader.election.enable"),
    )
}
"""What a topic may be given. Those without an effect are about files, replicas and caches that are not there."""

_MAPPED = {
    "retention.ms": "retention_seconds",
    "retention.bytes": "retention_bytes",
    "local.retention.ms": "local_retention_seconds",
    "local.retention.bytes": "local_retention_bytes",
    "min.compaction.lag.ms": "min_compaction_lag_seconds",
    "cleanup.policy": "compaction",
    "tidelog.durability": "durability",
}


def find(name: str) -> Config:
    """The config of this name; ConfigError names the nearest one."""
    found = TOPIC_CONFIGS.get(name)
    if found is None:
        hint = nearest(name, TOPIC_CONFIGS)
        raise ConfigError(f"Unknown topic config name: {name}" + (f". {hint}" if hint else ""))
    return found


def checked(configs: Mapping[str, str | None], *, has_store: bool) -> dict[str, str]:
    """The configs that a client gives a topic, all of them right; ConfigError names one that is not."""
    found: dict[str, str] = {}
    for name, text in configs.items():
        config = find(name)
        if text is None:
            raise ConfigError(f"Null value not supported for topic config: {name}")
        config.check(text)
        found[name] = text.strip()
    _check_together(found, has_store)
    return found


def _check_together(configs: Mapping[str, str], has_store: bool) -> None:
    if configs.get("remote.storage.enable", "").lower() == ("false" if has_store else "true"):
        where = "history is in the store of this installation" if has_store else "this installation has no store"
        raise ConfigError(f"remote.storage.enable cannot be changed for a topic: {where}")
    if configs.get("tidelog.durability") == "shipped" and not has_store:
        raise ConfigError("tidelog.durability=shipped needs a store, and this installation has none")
    for local, whole in (("local.retention.ms", "retention.ms"), ("local.retention.bytes", "retention.bytes")):
        local_limit, limit = int(configs.get(local, -2)), int(configs.get(whole, -1))
        if local_limit >= 0 and not has_store:
            raise ConfigError(f"{local} is about what a store has a copy of, and there is none: use {whole}")
        if 0 <= limit < local_limit:
            raise ConfigError(f"Value {local_limit} for {local} must not be more than the {limit} of {whole}")


def settings_of(configs: Mapping[str, str], defaults: TierSettings) -> dict[str, Any]:
    """The library's settings for a topic with these configs; None takes one back. `defaults` are the directory's."""
    policy = _parts(configs.get("cleanup.policy", "delete"))
    kept = configs if "delete" in policy else {**configs, "retention.ms": "-1", "retention.bytes": "-1"}
    found: dict[str, Any] = {
        setting: _limit(kept.get(name), name.endswith(".ms"), getattr(defaults, setting))
        for name, setting in _MAPPED.items()
        if "retention" in name
    }
    lag = configs.get("min.compaction.lag.ms")
    found["min_compaction_lag_seconds"] = None if lag is None else min(_FOREVER, -(-int(lag) // 1000))
    found["compaction"] = None
    if "cleanup.policy" in configs:
        found["compaction"] = "by_key" if "compact" in policy else "none"
    found["durability"] = configs.get("tidelog.durability")
    found["kafka_configs"] = dict(configs) or None
    return found


def _limit(text: str | None, is_ms: bool, default: int | None) -> int | None:
    if text is None:
        return None
    most = _FOREVER if is_ms else _ENDLESS
    number = -(-int(text) // 1000) if is_ms else int(text)
    if int(text) < 0 or number >= most:  # no limit; -2 of local retention: as long as the topic itself
        return None if default is None else most
    return max(1, number)


def configs_of(own: Mapping[str, Any], defaults: TierSettings) -> dict[str, str]:
    """The configs that a topic with these settings of its own has been given, by clients or by the library."""
    found: dict[str, str] = dict(own.get("kafka_configs", {}))
    said = settings_of(found, defaults)
    for name, setting in _MAPPED.items():
        if own.get(setting) != said[setting]:  # the library had the last word
            found.pop(name, None)
            if own.get(setting) is not None:
                found[name] = _text(name, own[setting])
    return found


def _text(name: str, value: Any) -> str:
    if name == "cleanup.policy":
        return "compact" if value == "by_key" else "delete"
    if value == (_FOREVER if name.endswith(".ms") else _ENDLESS):
        return "-1"
    return str(value * 1000 if name.endswith(".ms") else value)


class Serving(NamedTuple):
    """What Produce, Fetch and DeleteRecords go by for one topic."""

    max_batch_bytes: int
    compression: Compression = Compression.NONE
    uses_append_time: bool = False
    is_deletable: bool = True
    """Whether its policy lets messages be deleted."""
    syncs_all: bool = True
    """Whether acks=all waits for the disk, or for the file."""


def serving_of(configs: Mapping[str, str], max_batch_bytes: int) -> Serving:
    """From the configs of a topic; `max_batch_bytes` is the broker's."""
    return Serving(
        int(configs.get("max.message.bytes", max_batch_bytes)),
        _COMPRESSIONS[configs.get("compression.type", "producer")],
        configs.get("message.timestamp.type") == "LogAppendTime",
        "delete" in _parts(configs.get("cleanup.policy", "delete")),
        int(configs.get("flush.messages", 1)) == 1,
    )


class Described(NamedTuple):
    """One line of an answer to DescribeConfigs."""

    name: str
    value: str
    source: ConfigSource
    type: ConfigType
    documentation: str
    is_read_only: bool = False
    synonyms: tuple[tuple[str, str, ConfigSource], ...] = ()


def describe_topic(
    configs: Mapping[str, str], defaults: TierSettings, max_batch_bytes: int, *, has_store: bool
) -> list[Described]:
    """All configs of a topic, by name: its own values, those of the directory, and the defaults."""
    return [
        _described(one, configs.get(one.name), *_default(one, defaults, max_batch_bytes, has_store))
        for _, one in sorted(TOPIC_CONFIGS.items())
    ]


def _default(one: Config, defaults: TierSettings, max_batch_bytes: int, has_store: bool) -> tuple[str, ConfigSource]:
    value, plain = one.default, one.default
    if one.name == "max.message.bytes":
        value = str(max_batch_bytes)
    elif one.name == "remote.storage.enable":
        value = str(has_store).lower()
    elif one.name in _MAPPED:
        setting = getattr(defaults, _MAPPED[one.name])
        value = plain if setting is None else _text(one.name, setting)
    return value, ConfigSource.DEFAULT if value == plain else ConfigSource.STATIC_BROKER


def _described(one: Config, own: str | None, default: str, source: ConfigSource) -> Described:
    synonyms = () if one.broker_name is None else ((one.broker_name, default, source),)
    documentation = one.effect or "Accepted for tools that set it; it has no effect here."
    if own is None:
        return Described(one.name, default, source, one.type, documentation, synonyms=synonyms)
    mine = ((one.name, own, ConfigSource.TOPIC), *synonyms)
    return Described(one.name, own, ConfigSource.TOPIC, one.type, documentation, synonyms=mine)


# The broker


BROKER_CONFIGS: dict[str, tuple[ConfigType, str]] = {
    "advertised.listeners": (_LIST, "`--advertise-kafka`"),
    "auto.create.topics.enable": (_B, "`--auto-create-topics`, `--no-auto-create-topics`"),
    "broker.id": (_I, "the number of this broker"),
    "compression.type": (_S, "the default of topics"),
    "connections.max.idle.ms": (_L, "a connection without a request for so long is closed"),
    "default.replication.factor": (_I, "1: copies are in the object store"),
    "delete.topic.enable": (_B, "always true"),
    "fetch.max.bytes": (_I, "the most that an answer to a Fetch has"),
    "log.cleanup.policy": (_LIST, "the directory's `compaction`"),
    "log.dirs": (_LIST, "the log directory, `--dir`"),
    "log.message.timestamp.type": (_S, "the default of topics"),
    "log.retention.bytes": (_L, "the directory's `retention_bytes`; -1: no limit"),
    "log.retention.ms": (_L, "the directory's `retention_seconds`; -1: for ever"),
    "max.connections": (_I, "further connections are refused"),
    "message.max.bytes": (_I, "the largest batch of a producer, unless the topic has its own"),
    "min.insync.replicas": (_I, "always 1"),
    "node.id": (_I, "the number of this broker"),
    "num.partitions": (_I, "`--default-partitions`"),
    "remote.log.storage.system.enable": (_B, "whether there is a store, `--store`"),
    "socket.request.max.bytes": (_I, "a larger request closes the connection"),
    "unclean.leader.election.enable": (_B, "always false"),
}
"""What DescribeConfigs says of the broker. They are options of `tidelog serve`, and cannot be changed by clients."""


def describe_broker(values: Mapping[str, str]) -> list[Described]:
    """All configs of the broker, by name."""
    return [
        Described(
            name,
            values[name],
            ConfigSource.STATIC_BROKER,
            kind,
            documentation,
            is_read_only=True,
            synonyms=((name, values[name], ConfigSource.STATIC_BROKER),),
        )
        for name, (kind, documentation) in BROKER_CONFIGS.items()
    ]
