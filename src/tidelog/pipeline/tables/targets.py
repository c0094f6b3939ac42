"""Which table is meant: a directory or bucket of Parquet files, or a table of an Iceberg catalog."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tidelog.pipeline.address import Root

if TYPE_CHECKING:
    from tidelog.pipeline.tables.table import TableTarget


def table_target(root: Root, name: str, catalog: str | None, properties: Mapping[str, str]) -> TableTarget:
    """The table to be written: `name` is a path or URL, or with a catalog the name of a table in it."""
    if catalog is None:
        from tidelog.pipeline.tables.files import table_location
        from tidelog.pipeline.tables.parquet import ParquetTable

        return ParquetTable(table_location(name, root.load().object_store))
    from tidelog.pipeline.tables.iceberg import IcebergTable
    from tidelog.pipeline.tables.table import open_catalog

    return IcebergTable(open_catalog(catalog, dict(properties)), name)
