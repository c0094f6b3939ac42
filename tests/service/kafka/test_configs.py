"""Configs of topics under Kafka's names: what they accept, and which settings of the library they become."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.cold.settings import TierSettings
from tidelog.errors import ConfigError
from tidelog.service.kafka.configs import (
    BROKER_CONFIGS,
    TOPIC_CONFIGS,
    ConfigSource,
    ConfigType,
    checked,
    configs_of,
    describe_topic,
    serving_of,
    settings_of,
)
from tidelog.service.kafka.records import Compression
from tidelog.service.kafka.requests import listed_name, topic_name
from tidelog.topics.names import TopicName, read_own, with_own

PLAIN = TierSettings()
TEN_YEARS = 10 * 365 * 86_400


def own_after(configs: dict[str, str], defaults: TierSettings = PLAIN) -> dict[str, Any]:
    """The settings of a topic that was given these configs."""
    return {name: value for name, value in settings_of(configs, defaults).items() if value is not None}


@pytest.mark.parametrize(
    ("name", "text", "setting", "value"),
    [
        ("retention.ms", "86400000", "retention_seconds", 86_400),
        ("retention.ms", "1", "retention_seconds", 1),
        ("retention.ms", "1001", "retention_seconds", 2),
        ("retention.ms", "-1", "retention_seconds", None),
        ("retention.ms", str((1 << 63) - 1), "retention_seconds", None),
        ("retention.bytes", "0", "retention_bytes", 1),
        ("retention.bytes", "123456789", "retention_bytes", 123_456_789),
        ("local.retention.ms", "5000", "local_retention_seconds", 5),
        ("local.retention.ms", "-2", "local_retention_seconds", None),
        ("local.retention.bytes", "7", "local_retention_bytes", 7),
        ("min.compaction.lag.ms", "1", "min_compaction_lag_seconds", 1),
        ("tidelog.durability", "shipped", "durability", "shipped"),
        ("cleanup.policy", "compact", "compaction", "by_key"),
        ("cleanup.policy", "delete", "compaction", "none"),
        ("cleanup.policy", "compact, delete", "compaction", "by_key"),
    ],
)
def test_config_becomes_a_setting(name: str, text: str, setting: str, value: object) -> None:
    """Milliseconds are rounded up to seconds; no limit is no setting."""
    configs = checked({name: text}, has_store=True)
    own = own_after(configs)
    assert own.get(setting) == value
    with_own(PLAIN, own)  # the library accepts it
    assert configs_of(own, PLAIN) == configs


def test_no_limit_beats_the_limit_of_the_directory() -> None:
    """A topic can be kept although the others are not: as long as a setting can say."""
    defaults = TierSettings(retention_seconds=60, retention_bytes=1000)
    own = own_after({"retention.ms": "-1", "retention.bytes": "-1"}, defaults)
    assert (own["retention_seconds"], own["retention_bytes"]) == (TEN_YEARS, 1 << 50)
    assert read_own(own)
    assert configs_of(own, defaults)["retention.ms"] == "-1"
    assert own_after({"cleanup.policy": "compact"}, defaults)["retention_seconds"] == TEN_YEARS


def test_compacted_topic_ignores_retention_and_remembers_it() -> None:
    """As in Kafka: without `delete` nothing is deleted by age or size."""
    own = own_after({"cleanup.policy": "compact", "retention.ms": "1000"})
    assert "retention_seconds" not in own
    assert configs_of(own, PLAIN) == {"cleanup.policy": "compact", "retention.ms": "1000"}
    assert own_after({"cleanup.policy": "compact,delete", "retention.ms": "1000"})["retention_seconds"] == 1


def test_what_the_library_sets_is_seen_and_counts() -> None:
    """A setting that was changed after the client's config replaces it."""
    own = {**own_after({"retention.ms": "5000", "segment.ms": "9"}), "retention_seconds": 7, "compaction": "by_key"}
    assert configs_of(own, PLAIN) == {"retention.ms": "7000", "segment.ms": "9", "cleanup.policy": "compact"}
    del own["retention_seconds"]
    assert "retention.ms" not in configs_of(own, PLAIN)


@pytest.mark.parametrize(
    ("configs", "words"),
    [
        ({"retention.m": "1"}, "Did you mean retention.ms?"),
        ({"nonsense": "1"}, "Unknown topic config name: nonsense"),
        ({"retention.ms": None}, "Null value"),
        ({"retention.ms": "-2"}, "expected -1 to"),
        ({"retention.ms": "1e3"}, "expected a number"),
        ({"max.message.bytes": str(1 << 31)}, "expected 0 to 2147483647"),
        ({"cleanup.policy": "delete,shred"}, "one or more of delete, compact"),
        ({"compression.type": "brotli"}, "one of producer"),
        ({"message.timestamp.type": "Never"}, "CreateTime"),
        ({"preallocate": "maybe"}, "true or false"),
        ({"min.cleanable.dirty.ratio": "2"}, "from 0 to 1"),
        ({"tidelog.durability": "replicated"}, "one of synced, shipped"),
        ({"remote.storage.enable": "true"}, "no store"),
        ({"local.retention.bytes": "5"}, "there is none: use retention.bytes"),
    ],
)
def test_wrong_config_is_refused_in_words(configs: dict[str, str | None], words: str) -> None:
    """The words name what was expected."""
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")):
        checked(configs, has_store=False)


def test_local_retention_is_not_longer_than_all_of_it() -> None:
    """Kafka refuses it too."""
    with pytest.raises(ConfigError, match="must not be more than the 1000 of retention"):
        checked({"local.retention.ms": "2000", "retention.ms": "1000"}, has_store=True)
    with pytest.raises(ConfigError, match="history is in the store"):
        checked({"remote.storage.enable": "false"}, has_store=True)


def test_every_default_is_a_value_of_its_config() -> None:
    """What is described can be set."""
    for one in TOPIC_CONFIGS.values():
        one.check(one.default)
    described = describe_topic({}, PLAIN, 1_048_588, has_store=False)
    assert [one.name for one in described] == sorted(TOPIC_CONFIGS)
    assert {one.source for one in described} == {ConfigSource.DEFAULT}
    assert {one.name: one.value for one in described} == {name: one.default for name, one in TOPIC_CONFIGS.items()}


def test_defaults_of_the_directory_are_described() -> None:
    """A topic without a config of its own has that of the directory."""
    defaults = TierSettings(retention_seconds=60, compaction="by_key")
    described = {one.name: one for one in describe_topic({}, defaults, 5, has_store=True)}
    found = {name: (one.value, one.source) for name, one in described.items()}
    assert found["retention.ms"] == ("60000", ConfigSource.STATIC_BROKER)
    assert found["cleanup.policy"] == ("compact", ConfigSource.STATIC_BROKER)
    assert found["max.message.bytes"] == ("5", ConfigSource.STATIC_BROKER)
    assert found["remote.storage.enable"] == ("true", ConfigSource.STATIC_BROKER)


def test_serving_follows_configs() -> None:
    """What Produce and Fetch go by."""
    assert serving_of({}, 77) == (77, Compression.NONE, False, True, True)
    configs = {
        "max.message.bytes": "5",
        "compression.type": "zstd",
        "message.timestamp.type": "LogAppendTime",
        "cleanup.policy": "compact",
        "flush.messages": "1000",
    }
    assert serving_of(configs, 77) == (5, Compression.ZSTD, True, False, False)


def test_broker_configs_have_types() -> None:
    """Each has one, and words."""
    assert all(kind in ConfigType and words for kind, words in BROKER_CONFIGS.values())


_PART = st.from_regex(r"[a-z0-9_-][a-z0-9._-]{0,8}", fullmatch=True)


@given(st.builds(TopicName, _PART, _PART))
def test_listed_name_means_the_same_topic(name: TopicName) -> None:
    """Whatever is listed can be asked for: no two topics have one name."""
    assert topic_name(listed_name(name)) == name
