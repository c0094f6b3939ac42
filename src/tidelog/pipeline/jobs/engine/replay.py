"""The job `replay` of an engine's log, as of a seq: into another engine, or into a topic.

    workers decode the log -> the driver applies it, in order, many entries per sync

Invariants
- The copy continues after its own `applied_seq`, so a killed run can be repeated and an earlier copy extended. It keeps
  what it has; nothing is undone.
- Seqs are those of the original, refused entries included (`replay_entries.py`). The proof: the copy's digest at the
  final seq equals that of the original, which Spark computes from the store.
- Replayed entries are at or below the original's high-water mark, and never rolled back: they are below the copy's
  low-water mark at once, so a copy with a store of its own ships them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from tidelog.engine.cold.manifest import Manifest, StoredCheckpoint
from tidelog.engine.directory import remembered
from tidelog.engine.engine import Engine
from tidelog.engine.entry import Batch, CreateBucket
from tidelog.engine.orchestrator.base import BATCH_BYTES
from tidelog.engine.sst.snapshot import StoredState
from tidelog.engine.txn.read_set import Guarded, NeverTrue, decode_entry, encode_entry
from tidelog.engine_wiring import open_engine
from tidelog.errors import ConflictError, DataError, InputError, NotFoundError
from tidelog.files import LocalFiles
from tidelog.pipeline.address import EngineRoot, OpenedEngine, Root
from tidelog.pipeline.jobs.engine.digest import digest_engine
from tidelog.pipeline.jobs.engine.replay_entries import (
    ENTRY_SCHEMA,
    VERSION_SCHEMA,
    Entries,
    EntriesWork,
    RebuildEntries,
    bucket_histories,
    decode_entries,
    entry_batches,
    first_lsn_of,
    state_pieces,
    version_batches,
)
from tidelog.pipeline.jobs.engine.rows import digest_totals
from tidelog.pipeline.jobs.job import JobReport, OnProgress, Progress, Reconciliation, ignore_progress, logged
from tidelog.pipeline.jobs.replay_topic import (
    ReplayReport,
    ReplaySteps,
    Step,
    StepWriter,
    open_steps,
    report_of,
    target_logs,
)
from tidelog.pipeline.location import EngineLocation
from tidelog.pipeline.source.entries import refuse_large_seqs
from tidelog.pipeline.source.entry_batches import LogPart, plan_log
from tidelog.pipeline.tasks import map_in_arrow, rows_of_items
from tidelog.pipeline.work import run_on_workers
from tidelog.store.urls import canonical_url
from tidelog.topics.names import parse_topic_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


# The source of a replay's entries: the log or, if its beginning was deleted, a snapshot and the log.
#
# Invariants
# - Only what the manifest covers: entries up to its high-water mark, none that was rolled back.
# - The replay begins with the oldest listed snapshot: it leaves the most to the log, which has every entry as it was.
# - A copy that is older than the beginning of history cannot be extended from a snapshot: keys that were deleted since
#   then and are forgotten by now would stay in it. That is refused.
# - Entries are in order of seq, whichever source they come from.
# - Spark rows hold seqs as signed numbers, up to 2**63 - 1: an engine with larger ones is refused by name there.


_PART_BYTES = 8 << 20
_FIRST_LSN = 1


class Beginning(NamedTuple):
    """Where the entries begin: with the versions of a state, or with the log alone; and the first LSN of the log."""

    state: StoredCheckpoint | None
    lsn: int


class ReplaySource:
    """The entries of one engine, as its store has them now."""

    def __init__(self, spark: SparkSession, opened: OpenedEngine, place: EngineLocation, until_seq: int | None) -> None:
        self._spark = spark
        self._opened = opened
        self._place = place
        self.manifest: Manifest = opened.manifest
        self.until_seq = _checked_until(self.manifest, until_seq)

    def beginning(self, after_seq: int) -> Beginning:
        """The position from which entries after a seq are to be read."""
        manifest, start_lsn = self.manifest, max(_FIRST_LSN, self._opened.catalog.start_offset())
        known = [state for state in manifest.checkpoints if state.seq <= after_seq and state.lsn >= start_lsn]
        if known:
            return Beginning(None, known[-1].lsn)
        if start_lsn == _FIRST_LSN:
            return Beginning(None, _FIRST_LSN)
        if 0 < after_seq < manifest.history_start_seq:
            raise InputError(
                f"the copy is at seq {after_seq}, and history begins at seq {manifest.history_start_seq} by now",
                operation="replay",
                hint="Begin with an empty directory, or an empty topic",
            )
        if not manifest.checkpoints:
            raise DataError(
                f"the log begins at LSN {start_lsn}, and there is no state to begin with",
                operation="replay",
                hint="`tidelog pipeline checkpoint --engine` writes one",
            )
        return Beginning(manifest.checkpoints[0], manifest.checkpoints[0].lsn)

    def state_entries(self, listed: StoredCheckpoint, after_seq: int) -> DataFrame:
        """The entries that lead to a state, in order, from one seq (exclusive) on: seq, time_us, value."""
        refuse_large_seqs(self.manifest)
        state = StoredState(self._opened.objects, listed)
        up_to = min(self.until_seq, listed.seq)
        pieces = state_pieces(self._opened.objects, self._place, state, after_seq, up_to)
        versions = rows_of_items(self._spark, version_batches, pieces, VERSION_SCHEMA)
        tasks = max(1, len(pieces))
        in_order = versions.repartitionByRange(tasks, "seq").sortWithinPartitions("seq", "place")
        return map_in_arrow(in_order, RebuildEntries(bucket_histories(pieces)), ENTRY_SCHEMA)

    def log_entries(self, parts: Sequence[LogPart]) -> DataFrame:
        """The entries of parts of the log, in order: seq, time_us, value."""
        refuse_large_seqs(self.manifest)
        return rows_of_items(self._spark, entry_batches, parts, ENTRY_SCHEMA)

    def lsn_behind(self, first_lsn: int) -> int:
        """Where the first entry begins that is behind the last one that is wanted, in the log from an LSN on."""
        manifest = self.manifest
        end_lsn = manifest.high_water_lsn + 1
        if self.until_seq == manifest.high_water_mark:
            return end_lsn
        parts = plan_log(self._opened.catalog, self._place, manifest, first_lsn, first_seq=self.until_seq + 1)
        found = run_on_workers(self._spark, first_lsn_of, parts)
        return min((lsn for lsn in found if lsn is not None), default=end_lsn)

    def parts(self, first_lsn: int, after_seq: int = 0, stop_lsn: int | None = None) -> list[LogPart]:
        """The log from an LSN on, as parts for tasks; entries up to `after_seq` are left out.

        With a `stop_lsn` all entries that begin before it, whatever their seqs: it decides alone.
        """
        return plan_log(
            self._opened.catalog,
            self._place,
            self.manifest,
            first_lsn,
            stop_lsn,
            first_seq=after_seq + 1,
            last_seq=self.until_seq if stop_lsn is None else None,
            part_bytes=_PART_BYTES,
        )


def _checked_until(manifest: Manifest, until_seq: int | None) -> int:
    if until_seq is None:
        return manifest.high_water_mark
    if not manifest.history_start_seq <= until_seq <= manifest.high_water_mark:
        raise InputError(
            f"seq {until_seq} cannot be reached: the store has seqs {manifest.history_start_seq} to "
            f"{manifest.high_water_mark}",
            operation="replay",
        )
    return until_seq


_PARTS_AT_ONCE = 16
_ENTRIES_AT_ONCE = 1000
Pair = tuple[int, bytes]


class EngineReplayReport(JobReport, frozen=True, kw_only=True):
    """What a run has applied: entries from `first_seq` to `seq`. `state_seq` is that of a state it began with, or 0."""

    source: str
    target: str
    first_seq: int
    seq: int
    entries: int
    refused: int
    state_seq: int


@logged
def replay_engine(
    spark: SparkSession,
    root: EngineRoot,
    target: str | os.PathLike[str],
    *,
    until_seq: int | None = None,
    on_progress: OnProgress = ignore_progress,
    **settings: object,
) -> EngineReplayReport:
    """Applies the entries of an engine, up to a seq, to the engine in a directory, which is made when absent.

    `settings` are those of `tidelog.open_engine` for the copy. It must have no other entries than the original's.
    """
    directory = Path(os.path.abspath(os.path.expanduser(target)))
    _refuse_itself(root, directory, settings)
    with root.open() as opened, open_engine(directory, **settings) as engine:  # type: ignore[call-overload]
        source = ReplaySource(spark, opened, root.place, until_seq)
        first_seq = engine.applied_seq
        if first_seq > source.until_seq:
            raise InputError(f"the copy is at seq {first_seq} already, after seq {source.until_seq}", path=directory)
        beginning = source.beginning(first_seq)
        replay = _Replay(spark, source, engine, on_progress)
        replay.run(beginning)
        proof = _proof(spark, root, engine, source.until_seq, on_progress)
    return EngineReplayReport(
        job="replay",
        reconciliations=(proof,),
        notes=_notes(beginning),
        source=root.location,
        target=str(directory),
        first_seq=first_seq + 1,
        seq=source.until_seq,
        entries=replay.entries,
        refused=replay.refused,
        state_seq=0 if beginning.state is None else beginning.state.seq,
    )


def _refuse_itself(root: EngineRoot, directory: Path, settings: dict[str, object]) -> None:
    known = remembered(LocalFiles(), directory)
    stores = [settings.get("store"), None if known is None else known.store]
    if root.directory == directory or any(canonical_url(str(one)) == root.store_url for one in stores if one):
        raise InputError("an engine cannot be replayed into itself", path=directory, hint="Name another directory")


def _notes(beginning: Beginning) -> tuple[str, ...]:
    if beginning.state is None:
        return ()
    return (
        f"the log no longer has its beginning: entries up to seq {beginning.state.seq} were made from the versions of "
        f"{beginning.state.key}",
    )


class _Replay:
    """Applies what comes."""

    def __init__(self, spark: SparkSession, source: ReplaySource, engine: Engine, on_progress: OnProgress) -> None:
        self.entries = self.refused = 0
        self._spark = spark
        self._source = source
        self._engine = engine
        self._on_progress = on_progress

    def run(self, beginning: Beginning) -> None:
        """The snapshot first, if the replay begins with one, then the log after it."""
        if beginning.state is not None and self._engine.applied_seq < beginning.state.seq:
            rows = self._source.state_entries(beginning.state, self._engine.applied_seq)
            self._apply((row.seq, bytes(row.value)) for row in rows.toLocalIterator(prefetchPartitions=True))
        parts = self._source.parts(beginning.lsn, self._engine.applied_seq)
        self._apply(self._logged(parts))
        self._engine.update_low_water_mark(self._engine.applied_seq)

    def _logged(self, parts: Sequence[LogPart]) -> Iterator[Pair]:
        """Entries of parts in order; while some are applied the next ones are decoded."""
        groups = [parts[at : at + _PARTS_AT_ONCE] for at in range(0, len(parts), _PARTS_AT_ONCE)]
        with ThreadPoolExecutor(1, "tidelog-replay") as pool:
            coming = [pool.submit(self._decoded, group) for group in groups[:1]]
            for number in range(len(groups)):
                found = coming.pop().result()
                coming = [pool.submit(self._decoded, group) for group in groups[number + 1 : number + 2]]
                for entries in found:
                    yield from entries.pairs()
                done = min(len(parts), (number + 1) * _PARTS_AT_ONCE)
                self._on_progress(Progress("replaying", done, len(parts)))

    def _decoded(self, parts: Sequence[LogPart]) -> list[Entries]:
        works = [EntriesWork(number=number, part=part) for number, part in enumerate(parts)]
        return sorted(run_on_workers(self._spark, decode_entries, works), key=lambda one: one.number)

    def _apply(self, pairs: Iterator[Pair]) -> None:
        gathered: list[Pair] = []
        size = 0
        for pair in pairs:
            gathered.append(pair)
            size += len(pair[1])
            if len(gathered) >= _ENTRIES_AT_ONCE or size >= BATCH_BYTES:
                self._apply_some(gathered)
                gathered, size = [], 0
        self._apply_some(gathered)

    def _apply_some(self, pairs: Sequence[Pair]) -> None:
        if not pairs:
            return
        if pairs[0][0] <= self._engine.applied_seq:
            raise DataError(
                f"seq {pairs[0][0]} comes after seq {self._engine.applied_seq}: what was rolled back is not known",
                operation="replay",
            )
        results = self._engine.apply_many([(seq, decode_entry(value)) for seq, value in pairs])
        self.entries += len(results)
        self.refused += sum(result.status == "refused" for result in results)


def _proof(spark: SparkSession, root: EngineRoot, engine: Engine, seq: int, on_progress: OnProgress) -> Reconciliation:
    """The digest of the original at the seq, and that of the copy."""
    wanted = digest_engine(spark, root, seq, on_progress=on_progress)
    found = engine.digest(min(seq, engine.applied_seq))
    sides = [digest_totals(seq, digest, unit="seq") for digest in (wanted.digest, found)]
    return Reconciliation(subject=f"{root.name} at seq {seq}", went_in=sides[0], came_out=sides[1])


# The job `replay` of an engine into a topic: its entries as messages, for engines and other consumers of a topic.
#
#     seqs="offset"    the entry of seq s has offset s - 1, as `TopicOrchestrator` has it: the topic drives engines
#     seqs="header"    the seq is in the header `tidelog-seq`, and offsets have no meaning
#
# Values are entries as `encode_entry` writes them.
#
# Invariants
# - Entries arrive in order and exactly once, however often the job is killed and rerun, or run twice concurrently: it
#   proceeds in steps of the log (`jobs/replay_topic.py`), each of which is one staged commit.
# - With offsets, seqs without an entry (the orchestrator skipped them, or a snapshot has forgotten them) are filled
#   with an entry that every engine refuses, so that it changes nothing. The topic must have begun with this job.
# - A step that begins with a snapshot depends on that snapshot still being listed; if it is gone, this is reported.


Seqs = Literal["offset", "header"]
SEQ_HEADER = "tidelog-seq"
NOTHING = encode_entry(Guarded(Batch([CreateBucket("nothing")]), (NeverTrue("the original has no entry here"),)))
"""Refused in every state."""
_STEP_BYTES = 256 << 20
# More places without an entry than this, and than twice the entries, are a sign of seqs that are no offsets.
_MAX_FILLED = 10_000


@logged
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
    """Writes the entries of an engine, up to a seq, into a topic, which is created if absent.

    The topic records its progress under `name`; the default is derived from the engine. A later run continues where
    this one ended.
    """
    topic = str(parse_topic_name(topic))
    if target_logs(topic_root, topic) != [topic]:
        raise InputError(
            f"{topic} has partitions, and the log of an engine has one order",
            operation="replay",
            hint="Name a topic without partitions",
        )
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
    report = report_of(writer, done, root.location, topic, name)
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
        """A step has everything in its range, whatever the run was asked for: the next run continues after it."""
        if self._source.until_seq < state.seq:
            raise InputError(
                f"the log no longer has its beginning, and the state to begin with is that of seq {state.seq}",
                operation="replay",
                hint=f"Ask for seq {state.seq} or a later one",
            )

    # Offsets

    def _next_seq(self, step: Step, steps: ReplaySteps) -> int:
        """The seq that the first message of a step stands for."""
        known = steps.first_offset(step)
        if known is not None:
            return known + 1
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
        found = steps.first_offset(step)
        if self._seqs == "offset" and found not in (None, self._first_offset):
            raise ConflictError(
                f"another process writes to {self._topic}: entries begin at offset {found}, not {self._first_offset}",
                operation="replay",
                hint="Replay into a topic of its own",
            )
