"""The job `replay` of an engine into a topic: its entries as messages, for engines and others that follow a topic.

    seqs="offset"    the entry of seq s has offset s - 1, as `TopicOrchestrator` has it: the topic drives engines
    seqs="header"    the seq is in the header `tidelog-seq`, and offsets are just places

Values are entries as `encode_entry` writes them.

Invariants
- Entries arrive in order and once, however often the job is killed and run again, or run twice at once: it goes in
  steps of the log (`jobs/replay_steps.py`), each of which is one consignment.
- With offsets, seqs that no entry has (the orchestrator left them out, or a state has forgotten them) are filled with
  an entry that is refused wherever it is applied, so that it changes nothing. The topic must have begun with this.
- A step that begins with a state depends on that state being listed still; one that is gone is told.
"""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Literal

import msgspec

from tidelog.engine.entry import Batch, CreateBucket
from tidelog.engine.entry_codec import encode_entry
from tidelog.engine.guard import Guarded, NeverTrue
from tidelog.engine.manifest import StoredCheckpoint
from tidelog.errors import ConflictError, InputError, NotFoundError
from tidelog.pipeline.engine_jobs.replay_source import ReplaySource
from tidelog.pipeline.engines.entry_log import refuse_large_seqs
from tidelog.pipeline.engines.place import EngineRoot, OpenedEngine
from tidelog.pipeline.jobs.job import OnProgress, Progress, ignore_progress
from tidelog.pipeline.jobs.replay import ReplayReport, report_of
from tidelog.pipeline.jobs.replay_rows import StepWriter
from tidelog.pipeline.jobs.replay_steps import ReplaySteps, Step, open_steps
from tidelog.pipeline.root import Root
from tidelog.topics.names import parse_topic_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Seqs = Literal["offset", "header"]
SEQ_HEADER = "tidelog-seq"
NOTHING = encode_entry(Guarded(Batch([CreateBucket("nothing")]), (NeverTrue("the original has no entry here"),)))
"""Refused in every state."""
_STEP_BYTES = 256 << 20
_FIRST_LSN = 1
# More places without an entry than this, and than twice the entries, are a sign of seqs that are no offsets.
_MAX_FILLED = 10_000


def replay_engine_to_topic(
    spark: SparkSession,
    root: EngineRoot,
    topic_root: Root,
    topic: str,
    *,
    until_seq: int | None = None,
    seqs: Seqs = "offset",
    step_bytes: int = _STEP_BYTES,
    name: str | None = None,
    on_progress: OnProgress = ignore_progress,
) -> ReplayReport:
    """Writes the entries of an engine, up to a seq, into a topic, which is made when absent.

    `name` is under which the topic remembers how far it is; by default it follows from the engine. A later run goes on
    where this one ended.
    """
    began, topic = time.monotonic(), str(parse_topic_name(topic))
    identity = msgspec.json.encode({"engine": root.store_url, "name": root.name, "seqs": seqs}).decode()
    name = name or f"engine-{hashlib.sha256(identity.encode()).hexdigest()[:20]}"
    with root.open() as opened:
        refuse_large_seqs(opened.manifest)  # before anything is made
        with open_steps(topic_root, topic, name, identity) as steps:
            source = ReplaySource(spark, opened, root.place, until_seq)
            writer = StepWriter(spark, topic_root, topic, steps)
            job = _TopicReplay(spark, source, opened, topic_root, topic, seqs, step_bytes)
            done: list[Step] = []
            for step in steps.all(0, job.end_of):
                on_progress(Progress(f"replaying {root.name}", max(0, step.first - 1), opened.manifest.high_water_lsn))
                writer.write(step, job.rows(step, steps))
                job.check_place(steps, step)
                done.append(step)
    report = report_of(writer, done, root.location, topic, name, time.monotonic() - began)
    return msgspec.structs.replace(report, notes=(*report.notes, _told(seqs), *job.notes))


def _told(seqs: Seqs) -> str:
    if seqs == "offset":
        return "the entry of seq s has offset s - 1: the topic can drive engines"
    return f"the seq of each entry is in its header {SEQ_HEADER}"


class _TopicReplay:
    """Makes the rows of each step."""

    def __init__(
        self,
        spark: SparkSession,
        source: ReplaySource,
        opened: OpenedEngine,
        topic_root: Root,
        topic: str,
        seqs: Seqs,
        step_bytes: int,
    ) -> None:
        self.notes: list[str] = []
        self._spark = spark
        self._source = source
        self._opened = opened
        self._root = topic_root
        self._topic = topic
        self._seqs = seqs
        self._step_bytes = step_bytes
        self._start_lsn = max(_FIRST_LSN, opened.catalog.start_offset())
        self._stop_lsn: int | None = None
        self._first_offset = 0

    # Steps are ranges of LSNs; 0 is the beginning, whatever that is

    def end_of(self, first: int) -> int:
        """Where a step ends that begins at an LSN."""
        if first == 0 and self._start_lsn > _FIRST_LSN:
            return self._source.beginning(0).lsn
        first = max(first, _FIRST_LSN)
        self._require_log(first)
        if self._stop_lsn is None:
            self._stop_lsn = self._source.lsn_behind(first)
        size = 0
        for one in self._opened.catalog.between(first, self._stop_lsn) if first < self._stop_lsn else ():
            size += one.raw_size
            if size >= self._step_bytes:
                return min(one.next_offset, self._stop_lsn)
        return self._stop_lsn

    def _require_log(self, lsn: int) -> None:
        if lsn < self._start_lsn:
            raise NotFoundError(
                f"the topic has the entries up to LSN {lsn - 1}, and the log begins at LSN {self._start_lsn} by now",
                operation="replay",
                hint="Replay into another topic, which begins with a state",
            )

    def rows(self, step: Step, steps: ReplaySteps) -> DataFrame:
        """What is written: values, and headers or places as they are asked for."""
        from pyspark.sql import functions as sql

        entries = self._entries(step)
        if self._seqs == "offset":
            next_seq = self._next_seq(step, steps)
            self._first_offset = next_seq - 1
            entries = self._filled(entries, next_seq)
        else:
            seq = sql.col("seq").cast("string").cast("binary")
            header = sql.struct(sql.lit(SEQ_HEADER).alias("key"), seq.alias("value"))
            entries = entries.withColumn("headers", sql.array(header))
        return entries.withColumn("timestamp", sql.timestamp_micros("time_us")).drop("seq", "time_us")

    def _entries(self, step: Step) -> DataFrame:
        from pyspark.sql import functions as sql

        if step.first == 0 and self._start_lsn > _FIRST_LSN:
            listed = next((one for one in self._opened.manifest.checkpoints if one.lsn == step.end), None)
            if listed is None:
                raise NotFoundError(
                    f"this replay was begun with a state up to LSN {step.end - 1}, which is not listed any more",
                    operation="replay",
                    hint="Replay into another topic",
                )
            self._require_whole(listed)
            self.notes.append(f"the log no longer has its beginning: entries up to seq {listed.seq} are from a state")
            # The same time whenever it is asked for: versions do not know theirs.
            return self._source.state_entries(listed, 0).withColumn("time_us", sql.lit(listed.created_us))
        first = max(step.first, _FIRST_LSN)
        self._require_log(first)
        return self._source.log_entries(self._source.parts(first, stop_lsn=step.end))

    def _require_whole(self, state: StoredCheckpoint) -> None:
        """A step has all that is in its range, whatever the run was asked for: the next run goes on behind it."""
        if self._source.until_seq < state.seq:
            raise InputError(
                f"the log no longer has its beginning, and the state to begin with is that of seq {state.seq}",
                operation="replay",
                hint=f"Ask for seq {state.seq} or a later one",
            )

    # Offsets

    def _next_seq(self, step: Step, steps: ReplaySteps) -> int:
        """The seq that the first message of a step stands for."""
        status = steps.status(step)
        if status.first_offset is not None:
            return status.first_offset + 1
        with self._root.open() as log:
            return log.topic(self._topic).next_offset + 1 if log.has_topic(self._topic) else 1

    def _filled(self, entries: DataFrame, next_seq: int) -> DataFrame:
        from pyspark.sql import functions as sql

        ends = sql.min("seq").alias("first"), sql.max("seq").alias("last")
        found = entries.agg(*ends, sql.count("seq").alias("count"), sql.min("time_us").alias("time_us")).first()
        assert found is not None
        if not found["count"]:
            return entries
        self._check_seqs(found["first"], found["last"], found["count"], next_seq)
        if found["last"] - next_seq + 1 == found["count"]:
            return entries
        places = self._spark.range(next_seq, found["last"] + 1).withColumnRenamed("id", "seq")
        filled = places.join(entries, "seq", "left")
        filled = filled.withColumn("value", sql.coalesce("value", sql.lit(NOTHING)))
        return filled.withColumn("time_us", sql.coalesce("time_us", sql.lit(found["time_us"]))).orderBy("seq")

    def _check_seqs(self, first: int, last: int, count: int, next_seq: int) -> None:
        if first < next_seq:
            raise InputError(
                f"{self._topic} has {next_seq - 1} messages: seq {first} would not be at offset {first - 1}",
                operation="replay",
                hint="Name an empty topic, or let seqs travel in a header: --seqs header",
            )
        missing = last - next_seq + 1 - count
        if missing > max(_MAX_FILLED, 2 * count):
            raise InputError(
                f"of seqs {next_seq} to {last} only {count} are entries: these seqs are no offsets",
                operation="replay",
                hint="Let seqs travel in a header: --seqs header",
            )

    def check_place(self, steps: ReplaySteps, step: Step) -> None:
        """ConflictError if somebody else has written in between, so that offsets are no longer seqs."""
        found = steps.status(step).first_offset
        if self._seqs == "offset" and found not in (None, self._first_offset):
            raise ConflictError(
                f"somebody else writes to {self._topic}: entries are at offset {found} on, not {self._first_offset} on",
                operation="replay",
                hint="Replay into a topic of its own",
            )
