"""The job `table`: a topic as a table, brought up to date by each run.

Invariants
- A run goes on at the offset at which the table ends, and commits all of what it adds at once, with the new end. Killed
  at any moment it has added everything or nothing, and the next run goes on from there.
- Workers read, convert, write and read back; the driver adds up what they say, and commits only if what came out is
  what went in.
- A table belongs to one topic and one kind of values.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from tidelog.errors import DataError, InputError, OffsetOutOfRangeError
from tidelog.pipeline.jobs.avro_values import avro_fields
from tidelog.pipeline.jobs.job import JobReport, OnProgress, counted_progress, ignore_progress
from tidelog.pipeline.jobs.proof import Proof, side_of, total
from tidelog.pipeline.jobs.table_columns import (
    TableShape,
    evolved,
    fields_of,
    parsed_shape,
    raw_shape,
    refuse_taken_names,
)
from tidelog.pipeline.jobs.table_commits import Values
from tidelog.pipeline.jobs.table_rewriter import RewriteWork, RewrittenFile, rewrite_file
from tidelog.pipeline.jobs.table_target import Step, TableTarget, TargetState
from tidelog.pipeline.jobs.table_types import contradictions, from_json, joined_all, must_be_rewritten, widened
from tidelog.pipeline.jobs.table_writer import InferWork, WriteWork, WrittenPart, infer_part, write_part
from tidelog.pipeline.open_topics import OpenTopics
from tidelog.pipeline.options import SourceOptions
from tidelog.pipeline.part import ColdPlace, ReadPart
from tidelog.pipeline.root import Root
from tidelog.pipeline.work import run_on_workers
from tidelog.topics.names import parse_topic_name

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEFAULT_FILE_BYTES = 128 << 20


class TableOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How messages become rows. `schema` is Spark's JSON schema of the fields; without one they are inferred."""

    values: Values = "raw"
    schema: dict[str, Any] | None = None
    avro_schema: str | None = None
    with_headers: bool = False
    fail_on_data_loss: bool = True
    file_bytes: int = DEFAULT_FILE_BYTES


class TableReport(JobReport, frozen=True, kw_only=True):
    """What a run added. The table now has the offsets from `first_offset` up to `next_offset` (exclusive)."""

    topic: str
    table: str
    first_offset: int
    next_offset: int
    files: int
    bytes: int
    rejected: int
    columns: dict[str, Any]


def table(
    spark: SparkSession,
    root: Root,
    topic: str,
    target: TableTarget,
    options: TableOptions | None = None,
    on_progress: OnProgress = ignore_progress,
) -> TableReport:
    """Brings a table up to date with its topic."""
    began = time.monotonic()
    name = str(parse_topic_name(topic))
    report = _Run(spark, root, name, target, options or TableOptions(), on_progress).run()
    return msgspec.structs.replace(report, seconds=round(time.monotonic() - began, 3))


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
        )
        self._cold: ColdPlace | None = None
        self._keys: list[str] = []

    def run(self) -> TableReport:
        state = self._target.begin()
        self._check(state)
        start, stop, parts = self._plan(state)
        shape = self._shape(state, parts)
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
        if state is None or start < stop:
            step = Step(
                topic=self._topic,
                attempt=self._attempt,
                shape=shape,
                first_offset=start,
                next_offset=stop,
                written=tuple(written),
                rewritten=tuple(rewritten),
                proof=proof,
            )
            self._target.commit(step)
        return self._report(state, start, stop, shape, written, rewritten, proof)

    def _check(self, state: TargetState | None) -> None:
        if state is None:
            return
        if state.topic != self._topic:
            raise InputError(f"{self._target.name} is the table of {state.topic}", hint="Name another place")
        if state.values != self._options.values:
            raise InputError(
                f"{self._target.name} has its values {state.values}, not {self._options.values}",
                hint="A table keeps the kind of values that it began with; name another place",
            )

    def _plan(self, state: TargetState | None) -> tuple[int, int, list[ReadPart]]:
        with OpenTopics(self._source) as topics:
            log = topics.log(self._topic)
            stop = log.next_offset
            start = log.start_offset if state is None else state.next_offset
            if start > stop:
                raise OffsetOutOfRangeError(
                    f"the table has offsets up to {start - 1}, and {self._topic} ends at {stop}",
                    hint="The topic was made anew, or lost its end; make the table anew in another place",
                )
            first, stop = topics.readable_range(self._topic, start, stop)
            self._cold = topics.place
            return start, stop, topics.plan({self._topic: (first, stop)})

    # Columns

    def _shape(self, state: TargetState | None, parts: Sequence[ReadPart]) -> TableShape:
        options = self._options
        if options.values == "raw":
            return raw_shape(with_headers=options.with_headers or _has_headers(state))
        known = None if state is None else TableShape(values=options.values, columns=state.columns)
        if options.values == "json" and options.schema is None:
            return evolved(known, self._inferred(parts))
        return self._given_shape(known)

    def _given_shape(self, known: TableShape | None) -> TableShape:
        options = self._options
        if options.values == "avro":
            if options.avro_schema is None:
                raise InputError("Avro values say nothing about their fields", hint="Give their schema (.avsc)")
            fields = avro_fields(options.avro_schema)
        else:
            fields = from_json(options.schema)
        if not pa.types.is_struct(fields):
            raise InputError("a schema names columns", hint='Such as "amount double, name string"')
        refuse_taken_names(fields)
        if known is not None:
            self._refuse_contradictions(fields_of(known), fields)
            fields = widened(fields_of(known), fields)
        return parsed_shape(options.values, fields, avro_schema=options.avro_schema, ignores_unknown=True)

    def _refuse_contradictions(self, known: pa.DataType, wanted: pa.DataType) -> None:
        for name in contradictions(known, wanted):
            kinds = f"{known.field(name).type}, and in the schema {wanted.field(name).type}"
            raise InputError(
                f"the column {name} of {self._target.name} is {kinds}",
                hint="A column may become wider; for another type name another place, or another column",
            )

    def _inferred(self, parts: Sequence[ReadPart]) -> pa.DataType:
        works = [InferWork(part=part, cold=self._cold, skips_gaps=self._skips_gaps) for part in parts]
        results = run_on_workers(self._spark, infer_part, works)
        found = list(counted_progress(results, "looking at values", len(works), self._on_progress))
        # In the order of offsets, so that columns come in the order in which fields appeared.
        return joined_all([one.fields for one in sorted(found, key=lambda one: one.start)])

    @property
    def _skips_gaps(self) -> bool:
        return not self._options.fail_on_data_loss

    # Files

    def _write(self, parts: Sequence[ReadPart], shape: TableShape) -> list[WrittenPart]:
        works = [
            WriteWork(
                part=part,
                cold=self._cold,
                skips_gaps=self._skips_gaps,
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
        """Remembered, so that nothing stays behind when the run fails."""
        self._keys.append(self._target.new_key(self._attempt, first_offset, number))
        return self._keys[-1]

    def _proof(self, written: Sequence[WrittenPart]) -> Proof:
        went_in = total((one.went_in for one in written), "rows")
        came_out = total((one.came_out for one in written), "rows")
        return Proof(
            subject=f"{self._topic} to {self._target.name}", went_in=side_of(went_in), came_out=side_of(came_out)
        )

    def _report(
        self,
        state: TargetState | None,
        start: int,
        stop: int,
        shape: TableShape,
        written: Sequence[WrittenPart],
        rewritten: Sequence[RewrittenFile],
        proof: Proof,
    ) -> TableReport:
        rejected = sum(one.rejected for one in written)
        notes = [f"{rejected} values did not fit the columns; they are in _rejected_value"] if rejected else []
        notes += [f"{len(rewritten)} files were written anew: a column has become wider"] if rewritten else []
        notes += ["the table is up to date"] if state is not None and start == stop else []
        return TableReport(
            job="table",
            topic=self._topic,
            table=self._target.name,
            first_offset=start if state is None else state.first_offset,
            next_offset=stop,
            files=sum(bool(one.went_in.messages) for one in written),
            bytes=sum(one.bytes for one in written),
            rejected=rejected,
            columns=shape.columns,
            proofs=(proof,),
            notes=tuple(notes),
        )


# Numbers of files in a run: those of the new rows come first.
_REWRITTEN_NUMBERS = 50_000


def _has_headers(state: TargetState | None) -> bool:
    return state is not None and any(field["name"] == "headers" for field in state.columns["fields"])
