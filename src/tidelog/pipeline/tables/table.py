"""The job `table`: maintains a topic as a table, which each run brings up to date.

Invariants
- A run continues at the offset at which the table ends, and commits everything that it adds atomically, with the new
  end. Killed at any moment it has added everything or nothing, and the next run continues from there.
- Workers read, convert, write and read back; the driver adds up their results, and commits only if the output equals
  the input.
- A table belongs to one topic and one kind of values. Of a topic with partitions it has all of them, each from its own
  offset on; partitions that are added come in from their oldest message on.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import pyarrow as pa

from tidelog.errors import DataError, InputError, OffsetOutOfRangeError, StoreUnavailableError, TidelogError
from tidelog.pipeline.address import Root
from tidelog.pipeline.jobs.job import (
    NO_ROWS,
    OPEN_TRANSACTION_SECONDS,
    JobReport,
    OnProgress,
    Reconciliation,
    counted_progress,
    ignore_progress,
    logged,
    total,
)
from tidelog.pipeline.location import ReadPart, TopicLocation
from tidelog.pipeline.source.options import SourceOptions
from tidelog.pipeline.source.planning import OpenTopics
from tidelog.pipeline.tables.avro import avro_fields
from tidelog.pipeline.tables.commits import Partitions, Values
from tidelog.pipeline.tables.files import FilePointer
from tidelog.pipeline.tables.tasks import (
    InferWork,
    RewriteWork,
    RewrittenFile,
    WriteWork,
    WrittenPart,
    infer_part,
    rewrite_file,
    write_part,
)
from tidelog.pipeline.tables.types import (
    TableShape,
    contradictions,
    evolved,
    fields_of,
    from_json,
    joined_all,
    must_be_rewritten,
    parsed_shape,
    raw_shape,
    refuse_taken_names,
    widened,
)
from tidelog.pipeline.work import run_on_workers
from tidelog.topics.names import parse_topic_name

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyspark.sql import SparkSession


# What the job `table` needs of a table, in any format.


class TargetState(msgspec.Struct, frozen=True, kw_only=True):
    """What a table is now: of which topic, up to which offset (exclusive), with which columns."""

    topic: str
    values: Values
    columns: dict[str, Any]
    first_offset: int
    next_offset: int
    partitions: Partitions = msgspec.UNSET

    def known_partitions(self) -> tuple[tuple[int, int], ...]:
        """What it has of each partition: a topic without any was its own first one."""
        return ((self.first_offset, self.next_offset),) if self.partitions is msgspec.UNSET else self.partitions


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """What a run goes through: offsets of a topic, or with partitions their number, and what the table then has."""

    first_offset: int
    next_offset: int
    partitions: Partitions = msgspec.UNSET


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What a run adds to a table, all of it or nothing."""

    topic: str
    attempt: str
    shape: TableShape
    first_offset: int
    next_offset: int
    written: tuple[WrittenPart, ...]
    rewritten: tuple[RewrittenFile, ...]
    proof: Reconciliation
    partitions: Partitions = msgspec.UNSET


class TableTarget(Protocol):
    """A table that is written step by step."""

    @property
    def name(self) -> str:
        """For reports."""
        ...

    @property
    def place(self) -> FilePointer: ...

    def begin(self) -> TargetState | None:
        """Finishes what an earlier run left unfinished, and returns the state of the table; None if there is none."""
        ...

    def prepare(self, shape: TableShape) -> None:
        """Makes what has to be there before files can be written."""
        ...

    def new_key(self, attempt: str, first_offset: int, number: int) -> str:
        """Where a run writes a file."""
        ...

    def files(self) -> Sequence[str]:
        """All files of the table, for rewriting."""
        ...

    def commit(self, step: Step) -> None:
        """Makes a step count; ConflictError when another run was first. What was written goes then."""
        ...

    def discard(self, attempt: str, keys: Sequence[str]) -> None:
        """Removes the files of a run that will not be committed."""
        ...


DEFAULT_FILE_BYTES = 128 << 20


class TableOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How messages become rows. `schema` is Spark's JSON schema of the fields; without one they are inferred."""

    values: Values = "raw"
    schema: dict[str, Any] | None = None
    avro_schema: str | None = None
    with_headers: bool = False
    fail_on_data_loss: bool = True
    file_bytes: int = DEFAULT_FILE_BYTES


class TablePartition(msgspec.Struct, frozen=True, kw_only=True):
    """What a table has of one partition, up to `next_offset` (exclusive)."""

    partition: int
    first_offset: int
    next_offset: int


class TableReport(JobReport, frozen=True, kw_only=True):
    """What a run added. The table now has the offsets from `first_offset` up to `next_offset` (exclusive).

    Of a topic with partitions these count what came in, and `partitions` has the offsets.
    """

    topic: str
    table: str
    first_offset: int
    next_offset: int
    files: int
    bytes: int
    rejected: int
    columns: dict[str, Any]
    partitions: tuple[TablePartition, ...] = ()


@logged
def table(
    spark: SparkSession,
    root: Root,
    topic: str,
    target: TableTarget,
    options: TableOptions | None = None,
    on_progress: OnProgress = ignore_progress,
) -> TableReport:
    """Brings a table up to date with its topic."""
    name = str(parse_topic_name(topic))
    return _Run(spark, root, name, target, options or TableOptions(), on_progress).run()


class _Run:
    def __init__(
        self,
        spark: SparkSession,
        root: Root,
        topic: str,
        target: TableTarget,
        options: TableOptions,
        on_progress: OnProgress,
    ) -> None:
        self._spark = spark
        self._topic = topic
        self._target = target
        self._options = options
        self._on_progress = on_progress
        self._attempt = secrets.token_hex(8)
        self._source = SourceOptions(
            root=root,
            topics=(topic,),
            pattern=None,
            fail_on_data_loss=options.fail_on_data_loss,
            max_partition_bytes=options.file_bytes,
            open_transaction_seconds=OPEN_TRANSACTION_SECONDS,
        )
        self._cold: TopicLocation | None = None
        self._keys: list[str] = []

    def run(self) -> TableReport:
        state = self._target.begin()
        self._check(state)
        span, parts = self._plan(state)
        shape = self._shape(state, parts, has_partitions=span.partitions is not msgspec.UNSET)
        self._target.prepare(shape)
        rewritten: list[RewrittenFile] = []
        written: list[WrittenPart] = []
        proof = self._proof(written)
        try:
            written = self._write(parts, shape)
            rewritten = self._rewrite(state, shape)
            proof = self._proof(written)
            if not proof.holds:
                raise DataError(
                    f"the files do not have what was read: {proof}", hint="Nothing was committed; run it again"
                )
        except BaseException:
            self._target.discard(self._attempt, self._keys)
            raise
        if state is None or span.first_offset < span.next_offset:
            step = Step(
                topic=self._topic,
                attempt=self._attempt,
                shape=shape,
                first_offset=span.first_offset,
                next_offset=span.next_offset,
                written=tuple(written),
                rewritten=tuple(rewritten),
                proof=proof,
                partitions=span.partitions,
            )
            self._target.commit(step)
        return self._report(state, span, shape, written, rewritten, proof)

    def _check(self, state: TargetState | None) -> None:
        if state is None:
            return
        if state.topic != self._topic:
            raise InputError(f"{self._target.name} is the table of {state.topic}", hint="Name another place")
        if state.values != self._options.values:
            raise InputError(
                f"{self._target.name} stores values as {state.values}, not as {self._options.values}",
                hint="The kind of values of a table cannot change; name another place",
            )

    def _plan(self, state: TargetState | None) -> tuple[Span, list[ReadPart]]:
        with OpenTopics(self._source) as topics:
            self._cold = topics.place
            logs, known = topics.names(), () if state is None else state.known_partitions()
            if len(known) > len(logs):
                raise OffsetOutOfRangeError(
                    f"the table has {len(known)} partitions, but {self._topic} has {len(logs)}", hint=_MADE_AGAIN
                )
            starts = [known[at][1] if at < len(known) else topics.log(log).start_offset for at, log in enumerate(logs)]
            ranges = {log: self._range(topics, log, start) for log, start in zip(logs, starts, strict=True)}
            stops = [stop for _, stop in ranges.values()]
            parts = topics.plan(ranges)
        if logs == [self._topic]:
            return Span(first_offset=starts[0], next_offset=stops[0]), parts
        begin = 0 if state is None else state.next_offset
        firsts = [known[at][0] if at < len(known) else starts[at] for at in range(len(logs))]
        added = sum(stops) - sum(starts)
        ends = tuple(zip(firsts, stops, strict=True))
        return Span(first_offset=begin, next_offset=begin + added, partitions=ends), parts

    def _range(self, topics: OpenTopics, log: str, start: int) -> tuple[int, int]:
        stop = topics.log(log).next_offset
        if start > stop:
            raise OffsetOutOfRangeError(
                f"the table has offsets up to {start - 1}, but {log} ends at {stop}", hint=_MADE_AGAIN
            )
        return topics.readable_range(log, start, stop)

    # Columns

    def _shape(self, state: TargetState | None, parts: Sequence[ReadPart], *, has_partitions: bool) -> TableShape:
        options = self._options
        if options.values == "raw":
            return raw_shape(with_headers=options.with_headers or _has_headers(state))
        known = None if state is None else _known_shape(state)
        if options.values == "json" and options.schema is None:
            return evolved(known, self._inferred(parts), has_partitions=has_partitions)
        return self._given_shape(known, has_partitions=has_partitions)

    def _given_shape(self, known: TableShape | None, *, has_partitions: bool) -> TableShape:
        options = self._options
        if options.values == "avro":
            if options.avro_schema is None:
                raise InputError("Avro values need a schema", hint="Pass the schema (.avsc)")
            fields = avro_fields(options.avro_schema)
        else:
            fields = from_json(options.schema)
        if not pa.types.is_struct(fields):
            raise InputError("the schema must name columns", hint='For example "amount double, name string"')
        refuse_taken_names(fields, has_partitions=has_partitions)
        if known is not None:
            self._refuse_contradictions(fields_of(known), fields)
            fields = widened(fields_of(known), fields)
        more = {"avro_schema": options.avro_schema, "ignores_unknown": True}
        return parsed_shape(options.values, fields, has_partitions=has_partitions, **more)

    def _refuse_contradictions(self, known: pa.DataType, wanted: pa.DataType) -> None:
        for name in contradictions(known, wanted):
            kinds = f"{known.field(name).type}, and in the schema {wanted.field(name).type}"
            raise InputError(
                f"the column {name} of {self._target.name} is {kinds}",
                hint="A column may only become wider; for another type name another table or another column",
            )

    def _inferred(self, parts: Sequence[ReadPart]) -> pa.DataType:
        works = [InferWork(part=part, cold=self._cold, source=self._source) for part in parts]
        results = run_on_workers(self._spark, infer_part, works)
        found = list(counted_progress(results, "looking at values", len(works), self._on_progress))
        # In the order of offsets, so that columns come in the order in which fields appeared.
        return joined_all([one.fields for one in sorted(found, key=lambda one: one.start)])

    # Files

    def _write(self, parts: Sequence[ReadPart], shape: TableShape) -> list[WrittenPart]:
        works = [
            WriteWork(
                part=part,
                cold=self._cold,
                source=self._source,
                shape=shape,
                place=self._target.place,
                key=self._new_key(part.start, number),
            )
            for number, part in enumerate(parts)
        ]
        results = run_on_workers(self._spark, write_part, works)
        found = list(counted_progress(results, "writing files", len(works), self._on_progress))
        return sorted(found, key=lambda one: one.start)

    def _rewrite(self, state: TargetState | None, shape: TableShape) -> list[RewrittenFile]:
        """Files in which a column is narrower than it is now."""
        if state is None or not must_be_rewritten(from_json(state.columns), shape.kind):
            return []
        works = [
            RewriteWork(
                place=self._target.place,
                source=source,
                key=self._new_key(state.first_offset, number),
                shape=shape,
            )
            for number, source in enumerate(self._target.files(), start=_REWRITTEN_NUMBERS)
        ]
        results = run_on_workers(self._spark, rewrite_file, works)
        return list(counted_progress(results, "widening columns", len(works), self._on_progress))

    def _new_key(self, first_offset: int, number: int) -> str:
        """Remembered, so that a failed run leaves no files."""
        self._keys.append(self._target.new_key(self._attempt, first_offset, number))
        return self._keys[-1]

    def _proof(self, written: Sequence[WrittenPart]) -> Reconciliation:
        went_in = total((one.went_in for one in written), NO_ROWS)
        came_out = total((one.came_out for one in written), NO_ROWS)
        return Reconciliation(subject=f"{self._topic} to {self._target.name}", went_in=went_in, came_out=came_out)

    def _report(
        self,
        state: TargetState | None,
        span: Span,
        shape: TableShape,
        written: Sequence[WrittenPart],
        rewritten: Sequence[RewrittenFile],
        proof: Reconciliation,
    ) -> TableReport:
        rejected = sum(one.rejected for one in written)
        notes = [f"{rejected} values did not fit the columns; they are in _rejected_value"] if rejected else []
        notes += [f"{len(rewritten)} files were rewritten: a column has become wider"] if rewritten else []
        is_up_to_date = state is not None and span.first_offset == span.next_offset
        notes += ["the table is up to date"] if is_up_to_date else []
        ends = () if span.partitions is msgspec.UNSET else span.partitions
        return TableReport(
            job="table",
            topic=self._topic,
            table=self._target.name,
            first_offset=span.first_offset if state is None else state.first_offset,
            next_offset=span.next_offset,
            files=sum(bool(one.went_in.messages) for one in written),
            bytes=sum(one.bytes for one in written),
            rejected=rejected,
            columns=shape.columns,
            partitions=tuple(
                TablePartition(partition=number, first_offset=first, next_offset=end)
                for number, (first, end) in enumerate(ends)
            ),
            reconciliations=(proof,),
            notes=tuple(notes),
        )


_MADE_AGAIN = "The topic was created again, or lost its end; make the table again in another place"


def _known_shape(state: TargetState) -> TableShape:
    has_partitions = state.partitions is not msgspec.UNSET
    return TableShape(values=state.values, columns=state.columns, has_partitions=has_partitions)


# Numbers of files in a run: those of the new rows come first.
_REWRITTEN_NUMBERS = 50_000


def _has_headers(state: TargetState | None) -> bool:
    return state is not None and any(field["name"] == "headers" for field in state.columns["fields"])


# The catalog of Iceberg tables: opened by its URI, and what goes wrong with it told as errors of ours.


_CHECK = "Check --catalog; it is sqlite:////path/catalog.db, postgresql+psycopg2://..., or http://host for REST"
_WAREHOUSE = "Say where tables are: --catalog-property warehouse=file:///path"
# Of SQLAlchemy, which only SQL catalogs need. By name, since it may not be there.
_SQL_MISTAKES = ("ArgumentError", "NoSuchModuleError")
_SQL_FAILURES = ("OperationalError", "InterfaceError", "TimeoutError")


def open_catalog(uri: str, properties: dict[str, str]) -> Catalog:
    """The catalog at a URI: `sqlite:///path`, `postgresql://...`, or `http(s)://` for a REST catalog."""
    from pyiceberg.catalog import load_catalog  # Parquet tables need no pyiceberg

    kind = "rest" if uri.startswith(("http://", "https://")) else "sql"
    with told_of_catalog():
        return load_catalog("tidelog", **{"type": kind, "uri": uri, **properties})


@contextmanager
def told_of_catalog() -> Iterator[None]:
    """In the body pyiceberg works: what it, its database or its server raises is InputError or StoreUnavailableError.

    Errors about the outcome of a commit pass unchanged: the caller that commits handles them.
    """
    from pyiceberg.exceptions import NotInstalledError, RESTError, ServerError, ServiceUnavailableError
    from requests.exceptions import RequestException

    try:
        yield
    except TidelogError:
        raise
    except (RequestException, ServerError, ServiceUnavailableError) as error:
        raise StoreUnavailableError(f"the catalog does not answer: {_reason(error)}", hint=_CHECK) from error
    except (RESTError, NotInstalledError) as error:
        raise InputError(f"the catalog refuses: {_reason(error)}", hint=_CHECK) from error
    except ValueError as error:
        hint = _WAREHOUSE if "default path" in str(error) else _CHECK
        raise InputError(f"the catalog cannot do this: {_reason(error)}", hint=hint) from error
    except Exception as error:
        if type(error).__module__ != "sqlalchemy.exc":
            raise
        raise _of_sql(error) from error


def _of_sql(error: Exception) -> Exception:
    name = type(error).__name__
    if name in _SQL_MISTAKES:
        return InputError(f"the catalog cannot be opened: {_reason(error)}", hint=_CHECK)
    if name in _SQL_FAILURES:
        return StoreUnavailableError(f"the database of the catalog does not work: {_reason(error)}", hint=_CHECK)
    return error


def _reason(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
