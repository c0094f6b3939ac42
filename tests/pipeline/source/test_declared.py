"""Tables of Spark's catalog: options travel in the metadata of columns."""

from __future__ import annotations

import pytest
from pyspark.sql.types import StructField, StructType

from tidelog.config import Settings
from tidelog.errors import InputError
from tidelog.pipeline.source.declared import (
    METADATA,
    declared,
    found_declaration,
    options_for,
    options_for_insert,
    options_in,
)
from tidelog.pipeline.source.options import source_schema

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
