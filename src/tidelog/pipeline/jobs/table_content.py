"""Tables as `verify` compares them: what they say of themselves, and their rows in Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidelog.errors import NotFoundError
from tidelog.pipeline.jobs.table_commits import TableCommits
from tidelog.pipeline.jobs.table_files import table_place
from tidelog.pipeline.jobs.table_reader import read_files
from tidelog.pipeline.jobs.table_target import TargetState
from tidelog.pipeline.jobs.verify_table import TableContent
from tidelog.tier.store_settings import StoreSettings

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyspark.sql import SparkSession


def parquet_content(spark: SparkSession, path: str, settings: StoreSettings) -> TableContent:
    """A table of Parquet files."""
    place = table_place(path, settings)
    commits = TableCommits(place.open_existing())
    state = commits.state()
    if state.newest is None:
        raise NotFoundError(f"there is no table in {place.url}", hint="`tidelog pipeline table` makes one")
    newest = state.newest
    rows = read_files(spark, place, commits.keys_of(state), newest.columns)
    told = TargetState(
        topic=newest.topic,
        values=newest.values,
        columns=newest.columns,
        first_offset=state.first_offset,
        next_offset=newest.next_offset,
    )
    return TableContent(place.url, told, rows)


def iceberg_content(spark: SparkSession, catalog: Catalog, name: str) -> TableContent:
    """A table of an Iceberg catalog."""
    from pyiceberg.exceptions import NoSuchTableError

    from tidelog.pipeline.jobs.table_catalog import told_of_catalog
    from tidelog.pipeline.jobs.table_iceberg import IcebergPlace, data_files, state_of

    try:
        with told_of_catalog():
            table = catalog.load_table(name)
    except NoSuchTableError as error:
        raise NotFoundError(f"there is no table {name} in this catalog") from error
    state = state_of(table)
    if state is None:
        raise NotFoundError(f"{name} is no table of a topic", hint="`tidelog pipeline table` makes one")
    place = IcebergPlace(tuple(sorted(table.io.properties.items())))
    return TableContent(name, state, read_files(spark, place, data_files(table), state.columns))
