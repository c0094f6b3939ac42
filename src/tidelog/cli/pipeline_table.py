"""`tidelog pipeline table`: a topic as a Parquet or Iceberg table, brought up to date by each run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tidelog.cli.pipeline_job import MasterOption, RootOption, run_job
from tidelog.cli.session import Session
from tidelog.cli.table_choice import CatalogOption, CatalogPropertyOption, chosen_target

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidelog.cli.output import Output
    from tidelog.pipeline.jobs.job import OnProgress
    from tidelog.pipeline.jobs.table import TableOptions, TableReport
    from tidelog.pipeline.root import Root


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
        bool, typer.Option("--skip-gaps", help="Go on where offsets are lost or no longer kept.")
    ] = False,
    root: RootOption = None,
    master: MasterOption = None,
) -> None:
    """Writes the messages of a topic that are not in the table yet, all at once: killed or not, each of them once.

    A Parquet table is a directory that `spark.read.parquet` reads. With --values json the columns are inferred and grow
    with the values; what does not fit is kept in _rejected_value with the reason in _rejected. Run it again to bring
    the table up to date.
    """
    from tidelog.pipeline.jobs import table as job

    _check_format(table_format, catalog)
    _check_values(values, schema, headers=headers)

    def work(spark: SparkSession, place: Root, on_progress: OnProgress) -> TableReport:
        target = chosen_target(place, to, catalog, catalog_property)
        options = _options(values, schema, headers=headers, skip_gaps=skip_gaps)
        return job.table(spark, place, topic, target, options, on_progress)

    run_job(session, "table", root, master, work, _show)


def _check_format(table_format: str | None, catalog: str | None) -> None:
    from tidelog.errors import InputError

    if table_format == "iceberg" and catalog is None:
        raise InputError("an Iceberg table is in a catalog", hint="Name it: --catalog sqlite:////path/catalog.db")
    if table_format == "parquet" and catalog is not None:
        raise InputError("a Parquet table is in no catalog", hint="Leave --catalog out, or take --format iceberg")


def _check_values(values: str, schema: str | None, *, headers: bool) -> None:
    """What would be ignored was meant otherwise."""
    from tidelog.errors import InputError

    if values == "raw" and schema is not None:
        raise InputError("raw values have no fields", hint="--schema goes with --values json or avro")
    if values != "raw" and headers:
        raise InputError("a table of fields has no headers", hint="--headers goes with --values raw")


def _options(
    values: Literal["raw", "json", "avro"], schema: str | None, *, headers: bool, skip_gaps: bool
) -> TableOptions:
    from tidelog.pipeline.jobs.table import TableOptions

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
    from tidelog.errors import InputError

    try:
        as_json = text if text.lstrip().startswith("{") else StructType.fromDDL(text).json()
        return msgspec.json.decode(as_json, type=dict[str, Any])
    except (PySparkException, *JSON_ERRORS) as error:
        reason = str(error).strip().partition("\n")[0]
        hint = 'Such as "amount double, name string"'
        raise InputError(f"the schema cannot be understood: {reason}", hint=hint) from error


def _show(output: Output, report: TableReport) -> None:
    output.record(
        {
            "table": report.table,
            "topic": report.topic,
            "first_offset": report.first_offset,
            "next_offset": report.next_offset,
            "new_files": report.files,
            "new_bytes": report.bytes,
            "rejected": report.rejected,
            "columns": [field["name"] for field in report.columns["fields"]],
        }
    )
