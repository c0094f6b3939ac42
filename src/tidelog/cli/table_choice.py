"""Which table a command is about: a directory or bucket of Parquet files, or a table of an Iceberg catalog."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidelog.pipeline.jobs.table_target import TableTarget
    from tidelog.pipeline.jobs.verify_table import TableContent
    from tidelog.pipeline.root import Root

CatalogOption = Annotated[
    str | None,
    typer.Option(
        "--catalog", metavar="URI", help="The Iceberg catalog: sqlite:///path/catalog.db, or http://host for REST."
    ),
]
CatalogPropertyOption = Annotated[
    list[str] | None,
    typer.Option("--catalog-property", metavar="NAME=VALUE", help="Such as warehouse=file:///path, s3.endpoint=URL."),
]


def chosen_target(root: Root, name: str, catalog: str | None, properties: list[str] | None) -> TableTarget:
    """The table to be written."""
    if catalog is None:
        from tidelog.pipeline.jobs.table_files import table_place
        from tidelog.pipeline.jobs.table_parquet import ParquetTable

        return ParquetTable(table_place(name, root.load().object_store))
    from tidelog.pipeline.jobs.table_catalog import open_catalog
    from tidelog.pipeline.jobs.table_iceberg import IcebergTable

    return IcebergTable(open_catalog(catalog, _properties(properties)), name)


def chosen_content(
    spark: SparkSession, root: Root, name: str, catalog: str | None, properties: list[str] | None
) -> TableContent:
    """The table to be read."""
    from tidelog.pipeline.jobs.table_content import iceberg_content, parquet_content

    if catalog is None:
        return parquet_content(spark, name, root.load().object_store)
    from tidelog.pipeline.jobs.table_catalog import open_catalog

    return iceberg_content(spark, open_catalog(catalog, _properties(properties)), name)


def _properties(given: list[str] | None) -> dict[str, str]:
    from tidelog.errors import InputError

    found: dict[str, str] = {}
    for one in given or []:
        name, sign, value = one.partition("=")
        if not sign or not name:
            raise InputError(f"{one} is not NAME=VALUE")
        found[name] = value
    return found
