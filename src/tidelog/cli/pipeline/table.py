"""`tidelog pipeline table`: maintains a topic as a Parquet or Iceberg table; each run brings it up to date."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tidelog.cli.output import Output
from tidelog.cli.pipeline.job import MasterOption, RootOption, run_job
from tidelog.cli.session import Session
from tidelog.errors import InputError
from tidelog.pipeline.address import Root

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidelog.pipeline.jobs.job import OnProgress
    from tidelog.pipeline.tables.table import TableOptions, TableReport, TableTarget
    from tidelog.pipeline.tables.verify import TableContent


# Which table a command is about: a directory or bucket of Parquet files, or a table of an Iceberg catalog.


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
    from tidelog.pipeline.tables.targets import table_target

    return table_target(root, name, catalog, _properties(properties))


def chosen_content(
    spark: SparkSession, root: Root, name: str, catalog: str | None, properties: list[str] | None
) -> TableContent:
    """The table to be read."""
    from tidelog.pipeline.tables.verify import iceberg_content, parquet_content

    if catalog is None:
        return parquet_content(spark, name, root.load().object_store)
    from tidelog.pipeline.tables.table import open_catalog

    return iceberg_content(spark, open_catalog(catalog, _properties(properties)), name)


def _properties(given: list[str] | None) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in given or []:
        name, sign, value = one.partition("=")
        if not sign or not name:
            raise InputError(f"{one} is not NAME=VALUE")
        found[name] = value
    return found


def table(
    session: Session,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="namespace/name.")],
    to: Annotated[
        str, typer.Option("--to", metavar="PATH|URL|NAME", help="A directory or store URL; with --catalog, ns.table.")
    ],
    table_format: Annotated[
        Literal["parquet", "iceberg"] | None,
        typer.Option("--format", help="parquet, or iceberg [default: iceberg with --catalog, else parquet]."),
    ] = None,
    catalog: CatalogOption = None,
    catalog_property: CatalogPropertyOption = None,
    values: Annotated[
        Literal["raw", "json", "avro"],
        typer.Option("--values", help="raw: keys and values as they are. json, avro: a column a field."),
    ] = "raw",
    schema: Annotated[
        str | None,
        typer.Option("--schema", metavar="DDL|FILE", help='Fields of the values: "amount double", or an .avsc file.'),
    ] = None,
    headers: Annotated[bool, typer.Option("--headers", help="With a column for headers (raw).")] = False,
    skip_gaps: Annotated[
        bool, typer.Option("--skip-gaps", help="Continue after offsets that are lost or no longer kept.")
    ] = False,
    root: RootOption = None,
    master: MasterOption = None,
) -> None:
    """Brings a table up to date with a topic. Writes the messages that are not in it yet, all at once: killed or not,
    each of them once.

    A Parquet table is a directory that `spark.read.parquet` reads. With --values json the columns are inferred and grow
    with the values; what does not fit is kept in _rejected_value with the reason in _rejected. Run it again to bring
    the table up to date.
    """
    from tidelog.pipeline.tables import table as job

    _check_format(table_format, catalog)
    _check_values(values, schema, headers=headers)

    def work(spark: SparkSession, place: Root, on_progress: OnProgress) -> TableReport:
        target = chosen_target(place, to, catalog, catalog_property)
        options = _options(values, schema, headers=headers, skip_gaps=skip_gaps)
        return job.table(spark, place, topic, target, options, on_progress)

    run_job(session, "table", root, master, work, _show)


def _check_format(table_format: str | None, catalog: str | None) -> None:
    if table_format == "iceberg" and catalog is None:
        raise InputError("an Iceberg table needs a catalog", hint="Name it: --catalog sqlite:////path/catalog.db")
    if table_format == "parquet" and catalog is not None:
        raise InputError("a Parquet table has no catalog", hint="Leave --catalog out, or use --format iceberg")


def _check_values(values: str, schema: str | None, *, headers: bool) -> None:
    """What would be ignored was meant otherwise."""
    if values == "raw" and schema is not None:
        raise InputError("raw values have no fields", hint="--schema goes with --values json or avro")
    if values != "raw" and headers:
        raise InputError("a table of fields has no headers", hint="--headers goes with --values raw")


def _options(
    values: Literal["raw", "json", "avro"], schema: str | None, *, headers: bool, skip_gaps: bool
) -> TableOptions:
    from tidelog.pipeline.tables.table import TableOptions

    text = Path(schema).read_text("utf-8") if schema is not None and Path(schema).is_file() else schema
    return TableOptions(
        values=values,
        schema=_parsed(text) if values == "json" and text is not None else None,
        avro_schema=text if values == "avro" else None,
        with_headers=headers,
        fail_on_data_loss=not skip_gaps,
    )


def _parsed(text: str) -> dict[str, Any]:
    """Spark's JSON schema, or columns as in CREATE TABLE."""
    import msgspec
    from pyspark.errors import PySparkException
    from pyspark.sql.types import StructType

    from tidelog.codec import JSON_ERRORS

    try:
        as_json = text if text.lstrip().startswith("{") else StructType.fromDDL(text).json()
        return msgspec.json.decode(as_json, type=dict[str, Any])
    except (PySparkException, *JSON_ERRORS) as error:
        reason = str(error).strip().partition("\n")[0]
        hint = 'For example "amount double, name string"'
        raise InputError(f"the schema cannot be understood: {reason}", hint=hint) from error


def _show(output: Output, report: TableReport) -> None:
    output.record(
        {
            "table": report.table,
            "topic": report.topic,
            "first_offset": report.first_offset,
            "next_offset": report.next_offset,
            **({"partitions": [one.next_offset for one in report.partitions]} if report.partitions else {}),
            "new_files": report.files,
            "new_bytes": report.bytes,
            "rejected": report.rejected,
            "columns": [field["name"] for field in report.columns["fields"]],
        }
    )
