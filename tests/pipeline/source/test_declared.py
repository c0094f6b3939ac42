"""Tables of Spark's catalog: options travel in the metadata of columns."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql.types import StructField, StructType

import tidelog
from tidelog.config import Settings
from tidelog.errors import InputError, NotFoundError
from tidelog.pipeline.source.declared import (
    METADATA,
    declared,
    found_declaration,
    options_for,
    options_for_insert,
    options_in,
)
from tidelog.pipeline.source.options import source_schema
from tidelog.pipeline.source.topics import TidelogDataSource

CREATED = {
    "provider": "tidelog",
    "owner": "somebody",
    "comment": "ours",
    "is_managed_location": "true",
    "serialization.format": "1",
    "our.own.property": "x",
    "root": "/data",
    "option.root": "/data",
    "topic": "shop/orders",
    "option.topic": "shop/orders",
    "option.startingoffsets": "earliest",
}
TABLE = declared(source_schema(), CREATED, "/data", Settings)


def test_properties_of_spark_and_of_users_are_passed_over() -> None:
    """Of what Spark hands over for CREATE TABLE, only the OPTIONS count."""
    assert options_in(CREATED) == {"root": "/data", "topic": "shop/orders", "startingoffsets": "earliest"}
    located = {"provider": "tidelog", "location": "s3://bucket/prefix", "path": "s3://bucket/prefix"}
    assert options_in(located) == {"path": "s3://bucket/prefix"}
    assert options_in({"Root": "/data"}) == {"Root": "/data"}


def test_query_finds_options_of_its_table() -> None:
    """The columns of a table say where it is; the schema of a plain query says nothing."""
    assert options_for({}, TABLE) == {"root": "/data", "startingoffsets": "earliest", "topic": "shop/orders"}
    plain = declared(source_schema(), {"root": "/data", "topic": "shop/orders"}, "/data", Settings)
    assert found_declaration(plain) is None


def test_options_of_a_query_win_over_those_of_its_table() -> None:
    """Those that say the same thing in other words replace each other; a place of one's own replaces all."""
    assert options_for({"startingTimestamp": "5"}, TABLE) == {
        "root": "/data",
        "topic": "shop/orders",
        "startingtimestamp": "5",
    }
    assert options_for({"Root": "/other"}, TABLE) == {"Root": "/other"}


def test_secret_is_not_kept_in_the_catalog() -> None:
    """Metadata of columns ends up in files of other formats: a key would be published there."""
    with pytest.raises(InputError, match="store_secret_access_key") as raised:
        declared(source_schema(), CREATED | {"option.store_secret_access_key": "hush"}, "/data", Settings)
    assert "hush" not in str(raised.value)


def test_insert_needs_all_columns_of_one_table() -> None:
    """Some of the columns of a table, or those of two, are rows that were read, not rows of an INSERT."""
    assert options_for_insert({}, TABLE)[1]
    assert options_for_insert({"root": "/other", "topic": "b"}, TABLE) == ({"root": "/other", "topic": "b"}, False)
    other = declared(source_schema(), CREATED | {"option.topic": "shop/b"}, "/data", Settings)
    for wrong in (
        StructType(TABLE.fields[:2]),
        StructType(TABLE.fields[::-1]),
        StructType([*TABLE.fields[:-1], other.fields[-1]]),
        StructType([*TABLE.fields[:-1], StructField(TABLE.names[-1], TABLE.fields[-1].dataType)]),
        source_schema(),
        StructType([StructField(one.name, one.dataType, True, {METADATA: "{"}) for one in source_schema()]),
    ):
        with pytest.raises(InputError, match="the option root is missing"):
            options_for_insert({}, wrong)


def test_table_of_few_columns_is_for_reading() -> None:
    """Without the offset nothing tells rows that were read from rows that are new."""
    narrow = declared(source_schema(["key", "value"]), CREATED, "/data", Settings)
    with pytest.raises(InputError, match="is for reading"):
        options_for_insert({}, narrow)


def test_query_over_a_table_warns_once_of_options_of_kafka(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Spark asks such a query for no schema, where others are warned; those of the table and of `WITH` both count."""
    with tidelog.open(tmp_path) as log:
        log.topic("shop/orders").append(b"x")
    created = {"provider": "tidelog", "option.root": str(tmp_path), "option.topic": "shop/orders"}
    plain = declared(source_schema(), created, str(tmp_path), Settings)
    kafkas = declared(source_schema(), created | {"option.kafka.bootstrap.servers": "b:9092"}, str(tmp_path), Settings)
    for schema, given in ((plain, {"kafka.bootstrap.servers": "b:9092"}), (kafkas, {})):
        TidelogDataSource(given).reader(schema).partitions()
        (record,) = caplog.records
        assert "kafka.bootstrap.servers (root says where the topics are)" in record.message
        caplog.clear()
        source = TidelogDataSource(given)
        source.streamReader(schema)  # for the tasks
        stream = source.streamReader(schema)
        stream.partitions(stream.initialOffset(), stream.initialOffset())
        assert [one.message for one in caplog.records] == [record.message]
        caplog.clear()
    loaded = {"root": str(tmp_path), "topic": "shop/orders", "kafka.bootstrap.servers": "b:9092"}
    TidelogDataSource(loaded).reader(TidelogDataSource(loaded).schema()).partitions()
    assert len(caplog.records) == 1


def test_named_topic_that_was_never_there_is_an_error_also_without_fail_on_data_loss(tmp_path: Path) -> None:
    """As in Kafka's source: `load()` passes it, and the query says it when it begins."""
    tidelog.open(tmp_path).close()
    source = TidelogDataSource({"root": str(tmp_path), "subscribe": "shop/none", "failOnDataLoss": "false"})
    schema = source.schema()
    with pytest.raises(NotFoundError, match="there is no topic shop/none in"):
        source.reader(schema).partitions()
    with pytest.raises(NotFoundError, match="there is no topic shop/none in"):
        source.streamReader(schema).initialOffset()
