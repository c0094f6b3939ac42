"""The options of the source and where topics are: a slip is named, before anything is read."""

from __future__ import annotations

from pathlib import Path

import pytest

import tidelog
from tidelog.errors import ConfigError, InputError, NotFoundError
from tidelog.pipeline.address import find_root
from tidelog.pipeline.sink.sink import parse_sink_options
from tidelog.pipeline.source.options import SourceOptions, parse_source_options


def _parse(**options: str) -> SourceOptions:
    return parse_source_options({"root": "./data", **options})


@pytest.mark.parametrize("option", ["startingOffsets", "endingOffsets", "startingOffsetsByTimestamp"])
def test_a_place_for_a_topic_that_is_not_read_is_refused(option: str) -> None:
    """A misspelt topic in the offsets would have the topic that is meant read whole."""
    with pytest.raises(InputError, match=r"offsets name shop/order, .*Read is shop/orders"):
        _parse(subscribe="shop/orders", **{option: '{"shop/order": 5}'})


def test_a_place_must_fit_the_pattern() -> None:
    """A topic that a pattern may match, now or later, can be given a place; another one cannot."""
    assert _parse(subscribePattern="shop/.*", startingOffsets='{"shop/later": 5}').starting is not None
    with pytest.raises(InputError, match=r"offsets name bank/orders"):
        _parse(subscribePattern="shop/.*", startingOffsets='{"bank/orders": 5}')


def test_topics_without_a_place_are_read_by_default() -> None:
    """Offsets may name some of the topics that are read."""
    options = _parse(subscribe="shop/orders,shop/returns", startingOffsets='{"shop/returns": 5}')
    assert options.topics == ("shop/orders", "shop/returns")


def test_two_places_are_refused() -> None:
    """The one that was not read would be missing without a word; twice the same is no mistake."""
    with pytest.raises(InputError, match=r"two places are given: \./data and \./other"):
        _parse(subscribe="shop/orders", path="./other")
    assert _parse(subscribe="shop/orders", path="./data").topics == ("shop/orders",)


def test_path_that_spark_has_rewritten_is_told_from_a_slip() -> None:
    """`OPTIONS (path '/data')` arrives as `file:/data`, of which the user wrote nothing, and so does `file:///data`."""
    with pytest.raises(InputError, match=r"the path has become file:/data in Spark.*option root"):
        parse_source_options({"subscribe": "shop/orders", "path": "file:/data"})


@pytest.mark.parametrize("slip", ["s3:/bucket/prefix", "file:/data", "gs:bucket"])
def test_a_store_with_a_slash_too_few_is_not_taken_for_a_directory(slip: str) -> None:
    """The error says how a store is written, not that a directory is missing."""
    with pytest.raises(ConfigError, match="two slashes"):
        find_root(slip)


def test_a_root_that_is_not_there_is_told_from_one_that_is_no_log(tmp_path: Path) -> None:
    """A typo in a path and a directory of something else are different mistakes."""
    with pytest.raises(NotFoundError, match="there is no such directory"):
        find_root(tmp_path / "typo").open()
    with pytest.raises(NotFoundError, match=r"no tidelog\.json in it"):
        find_root(tmp_path).open()
    with tidelog.open(tmp_path / "log"):
        pass
    find_root(tmp_path / "log").open().close()


def test_options_of_kafka_are_passed_over_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A query that is moved over from Kafka runs, and says once what it can leave out and what is ours."""
    kafka = {"kafka.bootstrap.servers": "b:9092", "groupIdPrefix": "g", "kafka.sasl.mechanism": "PLAIN"}
    given = {"root": "./data", "subscribe": "shop/orders", **kafka}
    assert parse_source_options(given, warns=True) == parse_source_options(given)
    (record,) = caplog.records
    assert "kafka.bootstrap.servers (root says where the topics are)" in record.message
    assert all(name in record.message for name in kafka)
    with pytest.raises(InputError, match="there is no option kafkabootstrap"):
        parse_source_options({**given, "kafkabootstrap": "b"})


# All options of Spark 4.3's Kafka source and sink, as its guide lists them.
OF_SOURCE = {
    "subscribe": "shop/orders",
    "subscribePattern": "shop/.*",
    "assign": '{"shop/orders": [0]}',
    "kafka.bootstrap.servers": "broker:9092",
    "startingTimestamp": "1000",
    "startingOffsetsByTimestamp": '{"shop/orders": {"0": 1000}}',
    "startingOffsets": '{"shop/orders": {"0": 23, "1": -2}}',
    "startingOffsetsByTimestampStrategy": "latest",
    "endingTimestamp": "1000",
    "endingOffsetsByTimestamp": '{"shop/orders": {"0": 1000}}',
    "endingOffsets": '{"shop/orders": {"0": 50, "1": -1}}',
    "failOnDataLoss": "false",
    "kafkaConsumer.pollTimeoutMs": "120000",
    "fetchOffset.numRetries": "3",
    "fetchOffset.retryIntervalMs": "10",
    "maxOffsetsPerTrigger": "1000",
    "minOffsetsPerTrigger": "10",
    "maxTriggerDelay": "15m",
    "minPartitions": "10",
    "maxRecordsPerPartition": "1000",
    "groupIdPrefix": "spark-kafka-source",
    "kafka.group.id": "g",
    "includeHeaders": "true",
    "kafka.isolation.level": "read_committed",
}
OF_SINK = {
    "topic": "shop/orders",
    "kafka.bootstrap.servers": "broker:9092",
    "includeHeaders": "true",
    "partition.metadata.cache.ttl.ms": "60000",
    "kafka.compression.type": "zstd",
}


@pytest.mark.parametrize("name", OF_SOURCE)
def test_every_option_of_sparks_kafka_source_is_accepted(name: str) -> None:
    """A query that is moved over needs another format and a root, and nothing else; a write passes over all of them."""
    subscribed = {} if name in ("subscribe", "subscribePattern", "assign") else {"subscribe": "shop/orders"}
    given = {"root": "./data", **subscribed, name: OF_SOURCE[name]}
    for is_stream in (False, True):
        parse_source_options(given, is_stream=is_stream)
    parse_sink_options({**given, "topic": "shop/orders"}, is_stream=False)


@pytest.mark.parametrize("name", OF_SINK)
def test_every_option_of_sparks_kafka_sink_is_accepted(name: str) -> None:
    """So is a write, and a read passes over what is for the write alone."""
    given = {"root": "./data", "topic": "shop/orders", name: OF_SINK[name]}
    assert parse_sink_options(given, is_stream=False).topic == "shop/orders"
    parse_source_options(given)


def test_options_of_kafka_that_have_a_meaning_count() -> None:
    """The isolation level of Kafka's consumers is the option isolation."""
    assert _parse(subscribe="a/b", **{"kafka.isolation.level": "read_uncommitted"}).isolation == "read_uncommitted"


def test_one_set_of_options_reads_and_writes() -> None:
    """The topic that is written is the one that is read, unless both are named; options of the other side are known."""
    shared = {"root": "./data", "includeHeaders": "true", "handOverTimeout": "5s", "startingOffsets": "earliest"}
    for given, read, written in (
        ({"topic": "a/b"}, ("a/b",), "a/b"),
        ({"subscribe": "a/b"}, ("a/b",), "a/b"),
        ({"subscribe": "a/b,a/c"}, ("a/b", "a/c"), None),
        ({"subscribe": "a/b,a/c", "topic": "a/d"}, ("a/b", "a/c"), "a/d"),
    ):
        assert parse_source_options(shared | given).topics == read
        assert parse_sink_options(shared | given, is_stream=False).topic == written
