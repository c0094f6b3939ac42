"""The jobs `replay` and `backfill`: copy messages of a topic, or rows of files, into a topic.

`replay` copies all or some messages of a topic, unchanged or transformed. A topic with partitions is copied partition
by partition, each as a replay of its own. They keep their partitions in a topic that has as many; else keys decide.

Invariants
- Messages of a partition arrive in the order of their offsets, exactly once, however often the job is killed and rerun,
  or run twice concurrently: it proceeds in steps, and each step is one commit (`pipeline/sink/sink.py`).
- A run copies what exists when it begins. The next run with the same arguments continues where it ended.
- The source is not changed.
"""

# ruff: noqa: ERA001 (comments draw formats and formulas)
from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from tidelog.errors import ConflictError, DataError, InputError, NotFoundError, RetryError
from tidelog.pipeline.address import Root
from tidelog.pipeline.ingest import directory_alone, ingest, open_for_writing, write_place
from tidelog.pipeline.jobs.job import (
    OPEN_TRANSACTION_SECONDS,
    JobReport,
    OnProgress,
    Progress,
    Reconciliation,
    Totals,
    ignore_progress,
    logged,
    sum_text,
    told_as_bad_input,
    told_in_our_words,
)
from tidelog.pipeline.jobs.tally import read_rows, root_options
from tidelog.pipeline.sink.sink import check_columns
from tidelog.pipeline.sink.task import layout_of
from tidelog.pipeline.tasks import map_in_arrow
from tidelog.staging.area import StagingArea
from tidelog.staging.document import StagingStatus
from tidelog.staging.partitions import PartitionedArea
from tidelog.store.document import VersionedDocument, decode_json, encode_json
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.object_store import ObjectStore
from tidelog.store.urls import canonical_url
from tidelog.topics.names import TopicName, parse_topic_name
from tidelog.topics.partitioned import PartitionedTopic
from tidelog.topics.topic import Topic

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, DataFrameReader, Row, SparkSession
    from pyspark.sql.types import StructType

DEFAULT_STEP_MESSAGES = 1_000_000
_AS_THEY_ARE = {"includeHeaders": True, "openTransactionTimeout": f"{OPEN_TRANSACTION_SECONDS:g}s"}


class ReplayedPartition(msgspec.Struct, frozen=True, kw_only=True):
    """What was gone through of one partition of the source."""

    partition: int
    source_first: int
    source_end: int
    steps: int
    messages: int


class ReplayReport(JobReport, frozen=True, kw_only=True):
    """What a run has written: the range of the source that was gone through, and where its rows are in the target.

    `source_first` and `source_end` are offsets of a topic, or numbers of files; of a topic with partitions the smallest
    and the largest, and `partitions` has those of each. The offsets of the target are None when nothing was written,
    and when it has partitions.
    """

    source: str
    target: str
    name: str
    source_first: int
    source_end: int
    steps: int
    messages: int
    target_first_offset: int | None
    target_next_offset: int | None
    partitions: tuple[ReplayedPartition, ...] = ()


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Which messages are taken and what becomes of them, as SQL over the columns of a topic, headers included.

    `where` is a condition. `select` are expressions, one of which is named `value`, and others `key`, `headers` and
    `timestamp` where those are to be kept.
    """

    where: str | None = None
    select: tuple[str, ...] = ()

    def of(self, rows: DataFrame, *, keeps_partitions: bool = False) -> DataFrame:
        """The rows that are written; those that are transformed go to the partitions of their keys."""
        columns = (*COLUMNS, "partition") if keeps_partitions else COLUMNS
        with told_in_our_words("the selection cannot be understood"):
            if self.where is not None:
                rows = rows.where(self.where)
            chosen = rows.selectExpr(*(self.select or columns))
            _ = chosen.schema  # over Spark Connect a mistake is noticed no sooner
        return chosen


@logged
def replay(
    spark: SparkSession,
    root: Root,
    source: str,
    target: str,
    *,
    target_root: Root | None = None,
    selection: Selection | None = None,
    start_offset: int | None = None,
    end_offset: int | None = None,
    step_messages: int = DEFAULT_STEP_MESSAGES,
    name: str | None = None,
    on_progress: OnProgress = ignore_progress,
) -> ReplayReport:
    """Writes the messages of `source` into `target`, which is made when absent; its own root is that of the source.

    `name` is under which the target remembers how far it is; by default it follows from the source and the selection.
    """
    selection, into = selection or Selection(), target_root or root
    source, target = str(parse_topic_name(source)), str(parse_topic_name(target))
    if source == target and _store(root) == _store(into):
        raise InputError(f"{source} cannot be replayed into itself", hint="Name another topic as the target")
    if step_messages < 1:
        raise InputError(f"step_messages must be 1 or more, not {step_messages}")
    ranges = _ranges(root, source, start_offset, end_offset)
    identity = _identity(root, source, selection)
    name = name or f"topic-{hashlib.sha256(identity.encode()).hexdigest()[:20]}"
    # A mistake in the SQL is reported before the target records anything of it.
    selection.of(read_rows(spark, root, {source: ranges[0]}, **_AS_THEY_ARE))
    run = _Replay(spark, root, source, into, target, selection, step_messages, len(ranges), on_progress)
    if len(ranges) == 1:
        return run.partition(0, ranges[0], name, identity)
    reports = [
        run.partition(number, each, f"{name}-{number}", f"{identity} partition {number}")
        for number, each in enumerate(ranges)
    ]
    return _joined(reports, name)


class _Replay:
    """A run, partition by partition."""

    def __init__(
        self,
        spark: SparkSession,
        root: Root,
        source: str,
        into: Root,
        target: str,
        selection: Selection,
        step_messages: int,
        partitions: int,
        on_progress: OnProgress,
    ) -> None:
        self._spark = spark
        self._root = root
        self._source = source
        self._into = into
        self._target = target
        self._selection = selection
        self._step_messages = step_messages
        self._keeps_partitions = partitions > 1 and len(target_logs(into, target)) == partitions
        self._on_progress = on_progress

    def partition(self, number: int, offsets: tuple[int, int], name: str, identity: str) -> ReplayReport:
        """Brings one partition of the source into the target."""
        (first, end), step_name = offsets, f"replaying {self._source}"
        with open_steps(self._into, self._target, name, identity) as steps:
            writer, done = StepWriter(self._spark, self._into, self._target, steps), list[Step]()
            for step in steps.all(first, lambda at: min(at + self._step_messages, end)):
                self._on_progress(Progress(step_name, max(0, step.first - first), end - first))
                rows = read_rows(self._spark, self._root, {self._source: step}, number, **_AS_THEY_ARE)
                writer.write(step, self._selection.of(rows, keeps_partitions=self._keeps_partitions))
                done.append(step)
        self._on_progress(Progress(step_name, end - first, end - first))
        return report_of(writer, done, self._source, self._target, name)


def _joined(reports: Sequence[ReplayReport], name: str) -> ReplayReport:
    return msgspec.structs.replace(
        reports[0],
        name=name,
        reconciliations=tuple(
            msgspec.structs.replace(proof, subject=f"{proof.subject}, partition {number}")
            for number, report in enumerate(reports)
            for proof in report.reconciliations
        ),
        notes=tuple(note for report in reports for note in report.notes),
        source_first=min(report.source_first for report in reports),
        source_end=max(report.source_end for report in reports),
        steps=sum(report.steps for report in reports),
        messages=sum(report.messages for report in reports),
        target_first_offset=None,
        target_next_offset=None,
        partitions=tuple(
            ReplayedPartition(
                partition=number,
                source_first=report.source_first,
                source_end=report.source_end,
                steps=report.steps,
                messages=report.messages,
            )
            for number, report in enumerate(reports)
        ),
    )


def _store(root: Root) -> str:
    """Where the topics of a root are in the end: a directory and its store are two addresses of the same ones."""
    if root.directory is not None:
        root = msgspec.structs.replace(root, location=str(root.directory.resolve()))
    return canonical_url(write_place(root).store_url)


def _ranges(root: Root, topic: str, start_offset: int | None, end_offset: int | None) -> list[tuple[int, int]]:
    """From where to where, as far as the topic goes now, in each of its partitions."""
    with root.open() as log:
        if not log.has_topic(topic):
            raise NotFoundError(
                f"there is no topic {topic}", path=root.location, hint="`tidelog topic list` shows them"
            )
        opened: Topic | PartitionedTopic = log.topic(topic)
        if isinstance(opened, PartitionedTopic):
            if start_offset is not None or end_offset is not None:
                raise InputError(
                    f"{topic} has partitions, and offsets are each partition's own",
                    hint="Leave the offsets out, or replay a partition by the name of its log",
                )
            starts, ends = opened.start_offsets, opened.next_offsets
            return [(starts[number], ends[number]) for number in range(opened.partitions)]
        earliest, latest = opened.start_offset, opened.next_offset
    first = earliest if start_offset is None else start_offset
    end = latest if end_offset is None else end_offset
    if not earliest <= first <= end <= latest:
        raise InputError(
            f"{topic} has the offsets {earliest} up to {latest} (exclusive); {first} up to {end} were requested"
        )
    return [(first, end)]


def _identity(root: Root, topic: str, selection: Selection) -> str:
    """The identity of a replay. Where it begins and ends is not part of it: a later run goes further."""
    parts = {"root": root.location, "topic": topic, "where": selection.where, "select": selection.select}
    return msgspec.json.encode({name: value for name, value in parts.items() if value}).decode()


def _notes(written: Written) -> Iterator[str]:
    if written.unproven_messages:
        yield f"{written.unproven_messages} messages came in beside another run of this replay, and are in its proof"


def report_of(writer: StepWriter, done: list[Step], source: str, target: str, name: str) -> ReplayReport:
    """The report of a run, with its proof."""
    written = writer.written
    went_in, came_out = written.went_in, written.came_out
    return ReplayReport(
        job="replay",
        reconciliations=(Reconciliation(subject=f"{source} to {target}", went_in=went_in, came_out=came_out),),
        notes=tuple(_notes(written)),
        source=source,
        target=target,
        name=name,
        source_first=done[0].first if done else 0,
        source_end=done[-1].end if done else 0,
        steps=len(done),
        messages=written.came_out.messages,
        target_first_offset=written.first_offset,
        target_next_offset=written.next_offset,
    )


# The job `backfill`: writes the rows of Parquet, CSV, JSON or Avro files as messages of a topic.
#
# Invariants
# - Files are read in the order of their names, the rows of a file in their order; each row is written once, however
#   often the job is killed and rerun: some files are one step, and a step is one staged commit.
# - The first run fixes the list of files, with their sizes and times. If the files differ later, nothing is written:
#   new rows could not be distinguished from those written already.


DEFAULT_STEP_BYTES = 256 << 20
# Each gets its own scan, one after the other, so that rows stay in order.
_MAX_STEP_FILES = 64
FileFormat = Literal["parquet", "csv", "json", "avro"]
_FORMAT_HINTS: dict[FileFormat, str] = {
    "parquet": "If they are other files, say so: --format csv, json or avro",
    "csv": "Check --format and --separator",
    "json": "Check --format; JSON files have one object a line",
    "avro": "Check --format",
}
_HEAD_BYTES = 4 << 20  # of an Avro file, with its schema
_LINE = "value"
_SHOWN_CHARACTERS = 80  # of a line that is refused


class Mapping(msgspec.Struct, frozen=True, kw_only=True):
    """Which columns become what. Without a `value` column the whole row is the value, as JSON: of a file of JSON, its
    line as it is.
    """

    value: str | None = None
    key: str | None = None
    timestamp: str | None = None

    def of_lines(self, lines: DataFrame, path: str) -> DataFrame:
        """Lines of JSON as messages: fields are looked up in each line, and numbers are not written anew."""
        from pyspark.sql import functions as sql

        line = sql.col(_LINE)
        refusal = sql.concat(
            sql.lit(f"{path} has a line that is not JSON: "), sql.substring(line, 1, _SHOWN_CHARACTERS)
        )
        checked = sql.when(sql.get_json_object(line, "$").isNull(), sql.raise_error(refusal)).otherwise(line)
        columns = [(checked if self.value is None else _field(line, self.value)).alias("value")]
        if self.key is not None:
            columns.append(_field(line, self.key).alias("key"))
        if self.timestamp is not None:
            columns.append(_field(line, self.timestamp).cast("timestamp").alias("timestamp"))
        return lines.where(sql.trim(line) != "").select(*columns)

    def of(self, rows: DataFrame) -> DataFrame:
        """The rows as messages."""
        from pyspark.sql import functions as sql

        for name in (self.value, self.key, self.timestamp):
            if name is not None and name not in rows.columns:
                raise InputError(f"there is no column {name}", hint=f"There are {', '.join(rows.columns)}")
        whole = sql.to_json(sql.struct("*"), {"ignoreNullFields": "false"})
        columns = [_text_or_bytes(rows, self.value).alias("value") if self.value is not None else whole.alias("value")]
        if self.key is not None:
            columns.append(_text_or_bytes(rows, self.key).alias("key"))
        if self.timestamp is not None:
            columns.append(sql.col(_quoted(self.timestamp)).cast("timestamp").alias("timestamp"))
        return rows.select(*columns)


def _field(line: Column, name: str) -> Column:
    from pyspark.sql import functions as sql

    return sql.get_json_object(line, f"$['{name}']")


def _text_or_bytes(rows: DataFrame, name: str) -> Column:
    from pyspark.sql import functions as sql
    from pyspark.sql.types import BinaryType

    column = sql.col(_quoted(name))
    return column if isinstance(rows.schema[name].dataType, BinaryType) else column.cast("string")


def _quoted(name: str) -> str:
    """A name that may have dots in it."""
    return f"`{name.replace('`', '``')}`"


class SourceFile(NamedTuple):
    """A file as it was when it was looked at."""

    path: str
    size: int
    modified_us: int


@logged
def backfill(
    spark: SparkSession,
    root: Root,
    paths: Sequence[str],
    target: str,
    *,
    format: FileFormat = "parquet",
    mapping: Mapping | None = None,
    options: dict[str, str] | None = None,
    step_bytes: int = DEFAULT_STEP_BYTES,
    name: str | None = None,
    on_progress: OnProgress = ignore_progress,
) -> ReplayReport:
    """Writes the rows of files, or of all files in directories, into a topic, which is made when absent.

    `options` are those of Spark's reader for the format, such as `header` and `sep` of CSV.
    """
    target, mapping = str(parse_topic_name(target)), mapping or Mapping()
    reading = _Reading(spark, format, dict(options or {}), paths)
    files = reading.files()
    name = name or f"files-{hashlib.sha256(msgspec.json.encode([format, sorted(paths)])).hexdigest()[:20]}"
    source = f"{len(files)} {format} files of {', '.join(paths)}"
    reading.messages(files[:1], mapping)  # reports a wrong column or format before the target stores anything
    with open_steps(root, target, name, f"{source} ({_fingerprint(files, mapping)})") as steps:
        writer, done = StepWriter(spark, root, target, steps), list[Step]()
        for step in steps.all(0, lambda at: _end_of_step(files, at, step_bytes)):
            on_progress(Progress("backfilling files", step.first, len(files)))
            writer.write(step, reading.messages(files[step.first : step.end], mapping))
            done.append(step)
    on_progress(Progress("backfilling files", len(files), len(files)))
    return report_of(writer, done, source, target, name)


def _fingerprint(files: Sequence[SourceFile], mapping: Mapping) -> str:
    return hashlib.sha256(msgspec.json.encode([files, mapping])).hexdigest()[:20]


def _end_of_step(files: Sequence[SourceFile], first: int, step_bytes: int) -> int:
    """As many files as fit, and one at least."""
    end, size = first, 0
    while end < len(files) and end - first < _MAX_STEP_FILES and (end == first or size + files[end].size <= step_bytes):
        size += files[end].size
        end += 1
    return end


class _Reading:
    """The files of a backfill, through Spark, which knows the file systems."""

    def __init__(self, spark: SparkSession, format: FileFormat, options: dict[str, str], paths: Sequence[str]) -> None:
        if not paths:
            raise InputError("no file was named")
        self._spark = spark
        self._format = format
        self._options = options
        self._paths = list(paths)
        self._schema: StructType | None = None
        self._columns: pa.Schema | None = None

    def files(self) -> list[SourceFile]:
        """All of them, by name; those that Spark takes for hidden are left out, as it does."""
        from pyspark.errors import AnalysisException
        from pyspark.sql import functions as sql

        listing = self._spark.read.format("binaryFile").option("recursiveFileLookup", "true")
        try:
            with told_as_bad_input("the files cannot be listed", "Check the path; Spark needs a jar for some stores"):
                rows = listing.load(self._paths).select("path", "length", sql.unix_micros("modificationTime")).collect()
        except InputError as error:
            if not isinstance(error.__cause__, AnalysisException):
                raise
            raise NotFoundError(error.message, hint="Check the path") from error
        found = sorted(SourceFile(row[0], row[1], row[2]) for row in rows)
        if not found:
            named = ", ".join(self._paths)
            raise NotFoundError(f"{named} has no files with rows", hint="Check the path")
        return found

    def messages(self, files: Sequence[SourceFile], mapping: Mapping) -> DataFrame:
        """The messages that some files are, one file after the other."""
        if self._format == "avro":
            return mapping.of(self._avro_rows(files))
        if self._format != "json":
            return mapping.of(self._rows(files))
        self._require_fields(mapping)
        parts = [mapping.of_lines(self._spark.read.text(file.path), file.path) for file in files]
        return reduce(lambda before, after: before.union(after), parts)

    def _require_fields(self, mapping: Mapping) -> None:
        if self._schema is None:
            with told_as_bad_input("the files cannot be read as json", _FORMAT_HINTS["json"]):
                self._schema = self._reader().option("recursiveFileLookup", "true").load(self._paths).schema
        for name in (mapping.value, mapping.key, mapping.timestamp):
            if name is not None and name not in self._schema.names:
                raise InputError(f"there is no field {name}", hint=f"There are {', '.join(self._schema.names)}")

    def _avro_rows(self, files: Sequence[SourceFile]) -> DataFrame:
        """The columns are those of the first file; see `tables/avro_files.py`."""
        from pyspark.sql.pandas.types import from_arrow_schema

        from tidelog.pipeline.tables.avro_files import columns_of, read_head

        if self._columns is None:
            first = self._binary(files[0]).selectExpr(f"substring(content, 1, {_HEAD_BYTES}) AS head").first()
            assert first is not None, "it was listed"
            self._columns = columns_of(read_head(bytes(first.head), files[0].path))
        schema = from_arrow_schema(self._columns, prefer_timestamp_ntz=False)
        decode = _AvroRows(self._columns)
        parts = [map_in_arrow(self._binary(file).select("path", "content"), decode, schema) for file in files]
        return reduce(lambda before, after: before.union(after), parts)

    def _binary(self, file: SourceFile) -> DataFrame:
        return self._spark.read.format("binaryFile").load(file.path)

    def _rows(self, files: Sequence[SourceFile]) -> DataFrame:
        if self._schema is None:
            with told_as_bad_input(f"the files cannot be read as {self._format}", _FORMAT_HINTS[self._format]):
                self._schema = self._reader().option("recursiveFileLookup", "true").load(self._paths).schema
        parts = [self._reader().schema(self._schema).load(file.path) for file in files]
        return reduce(lambda before, after: before.union(after), parts)

    def _reader(self) -> DataFrameReader:
        return self._spark.read.format(self._format).options(**self._options)


class _AvroRows:
    """The rows of files, in a task."""

    def __init__(self, columns: pa.Schema) -> None:
        self._columns = columns

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from tidelog.pipeline.tables.avro_files import read_rows

        for batch in batches:
            for path, content in zip(*(batch.column(name) for name in ("path", "content")), strict=True):
                yield from read_rows(content.as_py(), path.as_py(), self._columns)


# The progress of a replay into a topic: records each step before any of its rows are written, then writes and counts
# them.
#
#     {"source": "...", "first": 2000, "end": 3000, "is_done": false}
#
# A step is a range of the source: offsets of a topic, or numbers of files. Its rows are one staged commit of the
# target, whose version is the end of the step.
#
# Invariants
# - A step is fixed by one compare-and-swap before its rows are written, and the next one only when it is done. So all
#   runs of the same replay, sequential or concurrent, write the same steps, and each staged commit is ingested once.
# - A replay has a name, and belongs to one source: a replay that was begun with another source is not continued.


_ATTEMPTS = 50
_WAIT_SECONDS = 60.0


class ReplayState(msgspec.Struct, frozen=True, kw_only=True):
    """The step that was settled last, and whether its rows are known to be in the topic."""

    source: str
    first: int
    end: int
    is_done: bool


class Step(NamedTuple):
    """A range of the source whose rows are written as one."""

    first: int
    end: int


class ReplaySteps:
    """The steps of one replay, as its target has them written down."""

    def __init__(
        self, root: Root, topic: TopicName, metadata: MetadataStore, objects: ObjectStore, name: str, source: str
    ) -> None:
        self.app = f"replay-{name}"
        place = write_place(root)
        keys, logs = place.keys(str(topic)), target_logs(root, str(topic))
        self._root = root
        self._areas = {log: StagingArea(objects, metadata, place.keys(log)) for log in logs}
        self._writes = None if logs == [str(topic)] else PartitionedArea(objects, metadata, keys)
        self._state = VersionedDocument(
            metadata, keys.replay(name), encode_json, self._decoded, attempts=_ATTEMPTS, gave_up=RetryError
        )
        self._name = name
        self._source = source

    def all(self, start: int, end_of: Callable[[int], int]) -> Iterator[Step]:
        """Step after step, from where the replay was left; `end_of` says where a step ends that begins somewhere.

        A step counts as done when the next one is asked for. It ends when a step would be empty.
        """
        while (step := self._settled(start, end_of)) is not None:
            yield step
            self._finish(step)

    def is_written(self, step: Step) -> bool:
        """Whether the rows of a step are committed, in all partitions of the target."""
        if self._writes is not None:
            return self._writes.is_finished(self.app, step.end)
        return all(status.state not in ("unknown", "refused") for status in self._statuses(step).values())

    def is_ingested(self, step: Step) -> bool:
        """Whether the rows of a step are in the target, wherever they are there."""
        return all(status.state in ("taken", "unknown") for status in self._statuses(step).values())

    def placed(self, step: Step) -> dict[str, tuple[int, int]] | None:
        """Where the rows of a step are, by log; None when a later step is the newest that is known of one."""
        statuses = self._statuses(step)
        if any(status.state != "unknown" and status.first_offset is None for status in statuses.values()):
            return None
        return {
            log: (status.first_offset, status.next_offset)
            for log, status in statuses.items()
            if status.first_offset is not None and status.next_offset is not None
        }

    def first_offset(self, step: Step) -> int | None:
        """Where the rows of a step begin in a target without partitions, as soon as that is known."""
        return min((first for first, _ in (self.placed(step) or {}).values()), default=None)

    def wait(self, step: Step) -> None:
        """Returns once the staged rows of a step are in the topic; IngestPendingError after a while."""
        for log, status in self._statuses(step).items():
            if status.state not in ("unknown", "refused"):
                ingest(self._root, parse_topic_name(log), self._areas[log], self.app, step.end, _WAIT_SECONDS)

    def _statuses(self, step: Step) -> dict[str, StagingStatus]:
        return {log: area.status(self.app, step.end) for log, area in self._areas.items()}

    def _settled(self, start: int, end_of: Callable[[int], int]) -> Step | None:
        def settle(known: ReplayState | None) -> ReplayState | None:
            if known is not None and not known.is_done:
                return known
            first = start if known is None else max(start, known.end)
            end = end_of(first)
            return None if end <= first else ReplayState(source=self._source, first=first, end=end, is_done=False)

        state = self._state.update(settle)
        return None if state is None else Step(state.first, state.end)

    def _finish(self, step: Step) -> None:
        def finish(known: ReplayState | None) -> ReplayState | None:
            if known is None or Step(known.first, known.end) != step:
                return None  # another run found it done too, and is further
            return msgspec.structs.replace(known, is_done=True)

        self._state.update(finish)

    def _decoded(self, data: bytes, key: str) -> ReplayState:
        state = decode_json(data, key, ReplayState)
        if state.source != self._source:
            raise ConflictError(
                f"the replay {self._name} was begun with another source: {state.source}, not {self._source}",
                operation="replay",
                hint="Give this one its own name (--name); what both have in common is then written again",
            )
        return state


def target_logs(root: Root, topic: str) -> list[str]:
    """The logs of a topic that is written to, which need not be there yet."""
    name, layout = parse_topic_name(topic), layout_of(write_place(root), directory_alone(root), topic)
    return [topic] if layout is None else [str(name.log_of(number, layout)) for number in range(layout.count)]


@contextmanager
def open_steps(root: Root, topic: str, name: str, source: str) -> Iterator[ReplaySteps]:
    """The steps of a replay into a topic; the topic itself may not be there yet."""
    if root.directory is not None and not root.directory.is_dir():
        hint = f"Check the path; `tidelog topic create {topic}` makes one"
        raise NotFoundError("there is no log directory to write to", path=root.directory, hint=hint)
    with open_for_writing(root) as (objects, metadata):
        yield ReplaySteps(root, parse_topic_name(topic), metadata, objects, name, source)


# Writes rows to a topic as one staged commit, and counts them on both sides.
#
# Invariants
# - The count and the sum of the input are taken from the rows as they are written, not from a second read of the
#   source; those of the output are read back from the topic.
# - The sum is over the chosen columns among key, value, headers and timestamp; it is the same in any order.


COLUMNS = ("key", "value", "headers", "timestamp")


class Written:
    """What the steps of a run came to, added up."""

    def __init__(self) -> None:
        self.went_in = self.came_out = _summed(0, 0)
        self.first_offset: int | None = None
        self.next_offset: int | None = None
        self.unproven_messages = 0


class StepWriter:
    """Writes the rows of steps into a topic."""

    def __init__(self, spark: SparkSession, root: Root, topic: str, steps: ReplaySteps) -> None:
        self.written = Written()
        self._spark = spark
        self._root = root
        self._topic = topic
        self._steps = steps

    def write(self, step: Step, rows: DataFrame) -> None:
        """Brings the rows of a step into the topic, or finds that they are there, and reads them back."""
        check_columns(rows.schema, self._topic)
        rows, columns = _with_times(rows), [name for name in COLUMNS if name in rows.columns]
        if not self._steps.is_written(step):
            went_in = self._append(step, rows, columns)
        else:
            with told_in_our_words("the rows cannot be read"):
                went_in = _tally(rows.agg(*_sums(columns)).first())
            self._steps.wait(step)
        self._read_back(step, went_in, columns)

    def _append(self, step: Step, rows: DataFrame, columns: Sequence[str]) -> Totals:
        from pyspark.sql import Observation

        observed = Observation()
        options = {"topic": self._topic, "txnAppId": self._steps.app, "txnVersion": str(step.end)}
        target = rows.observe(observed, *_sums(columns)).write.format("tidelog").options(**root_options(self._root))
        with told_in_our_words("the rows cannot be written"):
            target.options(**options).mode("append").save()
        counted = observed.get
        return _summed(counted["messages"], counted["digest"])

    def _read_back(self, step: Step, went_in: Totals, columns: Sequence[str]) -> None:
        placed, written = self._steps.placed(step), self.written
        if placed is None:
            if went_in.messages and not self._steps.is_ingested(step):
                raise DataError(f"the rows of {step.first} to {step.end} were written, but are not in {self._topic}")
            written.unproven_messages += went_in.messages  # another run is further, and its rows are the newest known
            return
        if went_in.messages and not placed:
            raise DataError(f"the rows of {step.first} to {step.end} were written, but are not in {self._topic}")
        written.went_in += went_in
        if [*placed] == [self._topic]:
            written.first_offset = placed[self._topic][0] if written.first_offset is None else written.first_offset
            written.next_offset = placed[self._topic][1]
        offsets = {log: each for log, each in placed.items() if each[0] < each[1]}
        if offsets:
            rows = read_rows(self._spark, self._root, offsets, columns=",".join(columns))
            written.came_out += _tally(rows.agg(*_sums(columns)).first())


def _with_times(rows: DataFrame) -> DataFrame:
    """A row that was to have a time and has none gets that of the write here, so that it is counted as it is stored."""
    from pyspark.sql import functions as sql

    if "timestamp" not in rows.columns:
        return rows
    return rows.withColumn("timestamp", sql.coalesce("timestamp", sql.current_timestamp()))


def _tally(row: Row | None) -> Totals:
    return _summed(0, 0) if row is None else _summed(row["messages"], row["digest"])


def _summed(messages: int, digest: object) -> Totals:
    """Without offsets: those of source and target are not comparable."""
    return Totals(messages=messages, checksum=sum_text("content", int(str(digest or 0))))


def _sums(columns: Sequence[str]) -> list[Column]:
    """How many rows there are, and the sum of their hashes. As decimals: a sum of longs could leave their range."""
    from pyspark.sql import functions as sql

    parts = [part for name in columns for part in (sql.col(name).isNull(), _plain(name))]
    digest = sql.sum(sql.xxhash64(*parts).cast("decimal(20,0)"))
    return [sql.count(sql.lit(1)).alias("messages"), digest.alias("digest")]


def _plain(name: str) -> Column:
    """A column as it is read back, whether it was written as text or as bytes."""
    from pyspark.sql import functions as sql

    return sql.col(name).cast("binary") if name in ("key", "value") else sql.col(name)
