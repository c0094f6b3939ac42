"""The job `compact`: merges small objects into large ones, and removes superseded messages of keyed topics.

    small objects    neighbours are merged, frame by frame, up to a size                           every topic
    by key           messages superseded by a later one of their key are removed, offsets stay     topics that opt in

Workers read, check, write and read back; the driver compares and commits the rewrite to the catalog. It holds no claim,
so it runs beside the owners of the topics; `cold/rewrite_commit.py` explains why that is safe.

Invariants
- At every moment every offset can be read: with its message, or as removed if a newer one of its key is published.
- After a kill at any point, the next run continues: a commit that had begun is finished, an unfinished build is
  repeated.
- A topic that cannot be compacted is a problem in the report; the others are compacted. A few topics are processed
  concurrently.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from tidelog.clock import Clock, SystemClock
from tidelog.cold.catalog import Catalog, Codec, Descriptor
from tidelog.cold.gc import DEFAULT_GRACE_SECONDS, Collector, ReplacedObjects, Report
from tidelog.cold.rewrite import (
    DEFAULT_TARGET_BYTES,
    Built,
    FramesTally,
    Planned,
    RemovedOffsets,
    Run,
    plan_merges,
    plan_rewrites,
)
from tidelog.cold.rewrite_commit import Rewrite, RewriteCommit, begin, finish
from tidelog.errors import CorruptionError, DataError, InputError
from tidelog.findings import Finding
from tidelog.log.transactions import Transactions
from tidelog.pipeline.address import Root
from tidelog.pipeline.jobs.compact_topic_tasks import (
    BuildDone,
    BuildWork,
    TransactionsFound,
    TransactionsWork,
    build_run,
    find_transactions,
)
from tidelog.pipeline.jobs.job import (
    JobReport,
    OnProgress,
    Progress,
    Reconciliation,
    Totals,
    ignore_progress,
    logged,
    sum_text,
    told_in_our_words,
    total,
)
from tidelog.pipeline.jobs.tally import cataloged_topics, chosen_logs, notes_on, read_rows, store_of
from tidelog.pipeline.location import TopicLocation
from tidelog.pipeline.work import kept_alive, run_in_threads, run_on_workers
from tidelog.store.document import decode_json
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.object_store import ObjectStore
from tidelog.topics.producer.dedup import AnchoredSnapshot

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


# Finds the superseded messages of a topic: Spark finds the newest of every key, the driver keeps one bit per message.
#
# Invariants
# - Only published messages count, both as superseded and as superseding: a message that is on the owner's disk alone
#   may be lost with it. The same is true of the control records that end transactions.
# - Messages of aborted transactions supersede nothing, and stay. From the last stable offset on nothing counts.
# - Messages without a key are never superseded. A null or empty value is a tombstone: it supersedes like any other
#   message, and is removed itself when it is old enough and no other message of its key is left.
# - A message that is younger than the topic's `min_compaction_lag_seconds` stays, superseded or not.
# - A bit that is set stays valid after later appends, removals and compactions.


_WORD_BITS = 64
_LOOK_BYTES = 64 << 20
_GONE = """
    (offset < newest AND timestamp <= timestamp_micros({superseded_until_us}))
    OR (offset = newest AND offset = oldest AND is_tombstone AND timestamp < timestamp_micros({before_us}))
"""


class SupersededOffsets:
    """The offsets whose message is to go, as words of 64 bits, where any bit is set."""

    def __init__(self, words: array[int], bits: array[int]) -> None:
        """`words` are numbers of words (offset / 64), in order; `bits` are those of each."""
        self._words = words
        self._bits = bits

    def between(self, start: int, stop: int) -> RemovedOffsets:
        first = start // _WORD_BITS
        dense = array("Q", bytes(8 * (-(-stop // _WORD_BITS) - first)))
        low = bisect_left(self._words, first)
        for index in range(low, bisect_left(self._words, first + len(dense))):
            dense[self._words[index] - first] = self._bits[index]
        number = int.from_bytes(dense.tobytes(), "little")
        number &= ((1 << (stop - start)) - 1) << (start - first * _WORD_BITS)
        return RemovedOffsets(first * _WORD_BITS, number.to_bytes(8 * len(dense), "little"))

    def count(self, start: int, stop: int) -> int:
        return int.from_bytes(self.between(start, stop).bits, "little").bit_count() if start < stop else 0

    def without(self, offset: int) -> SupersededOffsets:
        index = bisect_left(self._words, offset // _WORD_BITS)
        bits = array("Q", self._bits)
        if index < len(bits) and self._words[index] == offset // _WORD_BITS:
            bits[index] &= ~(1 << offset % _WORD_BITS)
        return SupersededOffsets(self._words, bits)


def superseded_offsets(
    spark: SparkSession,
    root: Root,
    topic: str,
    start: int,
    stop: int,
    tombstones_before_us: int,
    superseded_until_us: int,
) -> SupersededOffsets:
    """Looks at all messages of a topic from `start` up to `stop` (exclusive), which is as far as it is published."""
    if start >= stop:
        return SupersededOffsets(array("Q"), array("Q"))
    rows = read_rows(spark, root, {topic: (start, stop)}, columns="key,value,offset,timestamp")
    with told_in_our_words(f"looking for what is superseded in {topic}"):
        found = _words(rows, tombstones_before_us, superseded_until_us).toArrow().sort_by("word")
    words, bits = array("Q"), array("Q")
    for chunk in found.to_batches():
        words.extend(chunk.column("word").to_pylist())
        bits.extend(number % (1 << _WORD_BITS) for number in chunk.column("bits").to_pylist())
    return SupersededOffsets(words, bits)


def stable_end(found: Iterable[TransactionsFound], end: int) -> int:
    """The last stable offset of what is published, of what workers have found in all of it."""
    known = Transactions()
    for one in sorted(found, key=lambda one: one.start_offset):
        for producer_id in one.ended:
            known.end(producer_id, one.start_offset, is_commit=True)
        for opened in one.open:
            known.add(opened.producer_id, opened.epoch, opened.first_offset, opened.last_offset)
    return known.last_stable_offset(end)


def transaction_works(place: TopicLocation, topic: str, descriptors: Iterable[Descriptor]) -> list[TransactionsWork]:
    """Neighbours together, as many as are a task worth its start."""
    works: list[list[Descriptor]] = []
    size = 0
    for descriptor in descriptors:
        if not works or size + descriptor.size > _LOOK_BYTES:
            works.append([])
            size = 0
        works[-1].append(descriptor)
        size += descriptor.size
    return [TransactionsWork(place=place, topic=topic, descriptors=tuple(some)) for some in works]


def _words(rows: DataFrame, tombstones_before_us: int, superseded_until_us: int) -> DataFrame:
    """One row for each word that has a bit."""
    from pyspark.sql import Window
    from pyspark.sql import functions as sql

    key = Window.partitionBy("key")
    marked = rows.where("key IS NOT NULL").select(
        "offset",
        "timestamp",
        sql.expr("coalesce(length(value), 0) = 0").alias("is_tombstone"),
        sql.max("offset").over(key).alias("newest"),
        sql.min("offset").over(key).alias("oldest"),
    )
    gone = marked.where(_GONE.format(before_us=tombstones_before_us, superseded_until_us=superseded_until_us))
    word, bits = sql.expr("shiftright(offset, 6)"), sql.expr("bit_or(shiftleft(1L, CAST(offset & 63 AS INT)))")
    return gone.groupBy(word.alias("word")).agg(bits.alias("bits"))


# The compaction of one topic, round by round, as the driver runs it. Only `build` and `find_superseded` use Spark.
#
# Invariants
# - A round is one generation: planned, built by workers, checked, committed. A killed job loses its current round, and
#   the next run begins by finishing a commit that had begun.
# - The workers sum up the input and the output, and the driver compares both once more before it commits.
# - While workers build, the driver periodically records that the work is still in progress.


_RUNS_AT_ONCE = 64
Build = Callable[[Sequence[BuildWork]], Iterable[BuildDone]]


class CompactOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How topics are compacted. `codec` None: as the newest of the objects is, by key with zstd."""

    target_bytes: int = DEFAULT_TARGET_BYTES
    keep_newest: int = 1
    codec: Codec | None = None
    by_key: bool | None = None
    min_dirty_ratio: float = 0.5
    tombstone_seconds: float = 24 * 3600
    grace_seconds: float = DEFAULT_GRACE_SECONDS
    take_over: bool = False
    is_dry_run: bool = False


class CompactedTopic(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one topic: objects and bytes that were replaced, and what took their place."""

    topic: str
    by_key: bool = False
    replaced_objects: int = 0
    replaced_bytes: int = 0
    new_objects: int = 0
    new_bytes: int = 0
    superseded_messages: int = 0
    removed_messages: int = 0
    deleted_objects: int = 0
    deleted_bytes: int = 0


class TopicCompaction:
    """One topic, with its stores open for writing."""

    def __init__(
        self,
        topic: str,
        place: TopicLocation,
        catalog: Catalog,
        objects: ObjectStore,
        options: CompactOptions,
        clock: Clock,
        build: Build,
    ) -> None:
        self.topic = topic
        self._place = place
        self._catalog = catalog
        self._objects = objects
        self._options = options
        self._clock = clock
        self._build = build
        self._superseded: SupersededOffsets | None = None
        self._went_in: list[Totals] = []
        self._came_out: list[Totals] = []
        self._replaced: list[Run] = []
        self._made: list[Built] = []
        self._removed = Report()
        self._superseded_messages = 0
        self._nothing: str | None = None
        """Why nothing was done."""

    def run(self, superseded: SupersededOffsets | None) -> None:
        """Everything there is to do: first by key, if `superseded` says what is to go, then the small objects."""
        if not self._options.is_dry_run:
            finish(self._catalog, self._clock)
        if superseded is not None:
            self._superseded = self._without_anchor(superseded)
            self._superseded_messages = superseded.count(self._catalog.start_offset(), self._catalog.next_offset())
            self._rounds(partial(plan_rewrites, self._catalog, self._is_dirty), "zstd")
            self._superseded = None
        self._rounds(partial(plan_merges, self._catalog), None)
        if not self._options.is_dry_run:
            collector = Collector(
                *(self._catalog, self._objects, self._clock.now_us()),
                grace_seconds=self._options.grace_seconds,
                rules=[ReplacedObjects],
            )
            self._removed = collector.apply(collector.plan())
        self._nothing = None if self._replaced else self._why_nothing()

    def _without_anchor(self, superseded: SupersededOffsets) -> SupersededOffsets:
        """A snapshot of the producers is believed by the message before its offset: that one stays."""
        keys = self._catalog.keys
        for key in (keys.producers, keys.kafka_producers):
            entry = self._catalog.metadata.get(key)
            try:
                snapshot = None if entry is None else decode_json(entry.value, key, AnchoredSnapshot)
            except DataError:
                continue  # it is not trusted
            if snapshot is not None:
                superseded = superseded.without(max(0, snapshot.as_of_offset - 1))
        return superseded

    def _is_dirty(self, descriptor: Descriptor) -> bool:
        assert self._superseded is not None, "asked by key only"
        count = self._superseded.count(descriptor.start_offset, descriptor.next_offset)
        return count > 0 and count >= descriptor.count * self._options.min_dirty_ratio

    # Rounds

    def _rounds(self, plan: Callable[..., Planned], codec: Codec | None) -> None:
        limits = {"target_bytes": self._options.target_bytes, "keep_newest": self._options.keep_newest}
        from_offset: int | None = 0
        while from_offset is not None:
            planned = plan(from_offset=from_offset, max_runs=_RUNS_AT_ONCE, **limits)
            if planned.runs and self._options.is_dry_run:
                self._replaced += [run for run in planned.runs if not self._is_counted(run)]
            elif planned.runs:
                # Again, now that no other run compacts: what was planned before may have been replaced.
                work = begin(self._catalog, self._objects, self._clock, take_over=self._options.take_over)
                with work.abandoned_on_error():
                    planned = plan(from_offset=from_offset, max_runs=_RUNS_AT_ONCE, **limits)
                    self._round(work, planned.runs, codec)
                    work.abandon()  # does nothing where there was something to switch to
            from_offset = planned.next_offset

    def _is_counted(self, run: Run) -> bool:
        """Whether some of it is to be replaced already: by the time of this run it would be another object."""
        return any(one.start_offset < run.next_offset and run.start_offset < one.next_offset for one in self._replaced)

    def _round(self, work: RewriteCommit, runs: Sequence[Run], codec: Codec | None) -> None:
        works = [self._work(work.generation, run, codec) for run in runs]
        with kept_alive(work.renew):
            built = {one.start_offset: one.built for one in self._build(works) if one.built is not None}
        done = [(run, built[run.start_offset]) for run in runs if run.start_offset in built]
        for run, one in done:
            _check(run, one)
        if done:
            made = [Rewrite(descriptor=one.descriptor, replaced=run.replaced) for run, one in done]
            switched = {one.descriptor.start_offset for one in work.switch(made)}
            for run, one in done:
                if run.start_offset in switched:
                    self._count(run, one)

    def _work(self, generation: int, run: Run, codec: Codec | None) -> BuildWork:
        removed = None if self._superseded is None else self._superseded.between(run.start_offset, run.next_offset)
        return BuildWork(
            place=self._place,
            topic=self.topic,
            generation=generation,
            descriptors=run.descriptors,
            codec=self._options.codec or codec or run.descriptors[-1].codec,
            removed=removed,
        )

    def _count(self, run: Run, built: Built) -> None:
        self._replaced.append(run)
        self._made.append(built)
        self._went_in.append(_tally(run, built.went_in))
        self._came_out.append(_tally(run, built.came_out))

    # Reporting

    def result(self) -> CompactedTopic:
        """What was done, or what would be."""
        return CompactedTopic(
            topic=self.topic,
            by_key=self._options.by_key is True,
            replaced_objects=sum(len(run.descriptors) for run in self._replaced),
            replaced_bytes=sum(run.bytes for run in self._replaced),
            new_objects=len(self._replaced),
            new_bytes=sum(one.descriptor.size for one in self._made),
            superseded_messages=self._superseded_messages,
            removed_messages=sum(one.removed for one in self._made),
            deleted_objects=len(self._removed.objects),
            deleted_bytes=self._removed.bytes,
        )

    def proof(self) -> Reconciliation | None:
        """What went into the new objects and what came out of them; None where none were made."""
        if not self._made:
            return None
        return Reconciliation(subject=self.topic, went_in=total(self._went_in), came_out=total(self._came_out))

    def notes(self) -> Iterator[str]:
        for one in self._removed.kept:
            yield f"{self.topic}: kept {one.key}: {one.why}"
        if self._nothing is not None:
            yield f"{self.topic}: nothing to compact: {self._nothing}"

    def _why_nothing(self) -> str:
        options, first = self._options, self._catalog.start_offset()
        objects = sum(1 for _ in islice(self._catalog.found_from(first), options.keep_newest + 1))
        if not objects:
            return "it has no object in the store yet; its owner ships, or `tidelog pipeline ship` does"
        if objects <= options.keep_newest:
            return f"{objects} in the store, and the {options.keep_newest} newest are left alone (--keep-newest)"
        small = f"no neighbours among its objects are worth merging into one of {options.target_bytes} bytes"
        if options.by_key is True:
            share = f"{self._superseded_messages} superseded messages are less than {options.min_dirty_ratio:g} of any"
            return f"{share} object (--min-dirty-ratio), or in the newest; {small} (--target-bytes)"
        return f"{small} (--target-bytes)"


def _tally(run: Run, found: FramesTally) -> Totals:
    return Totals(
        messages=found.messages,
        first_offset=run.start_offset,
        last_offset=run.next_offset - 1,
        checksum=sum_text("frames", found.digest),
    )


def _check(run: Run, built: Built) -> None:
    """What a worker says it has made is what it was asked for."""
    made = built.descriptor
    if (made.start_offset, made.next_offset) != (run.start_offset, run.next_offset) or built.went_in != built.came_out:
        raise CorruptionError(
            f"the new object lacks messages of {run.start_offset} to {run.next_offset - 1}",
            path=made.object_id,
            byte=0,
            operation="compact",
            hint="Nothing was replaced; run it again",
        )


_WITHOUT_STORE = "Compaction needs a store: this directory has none"
_TOPICS_AT_ONCE = 4
# Infinity is a valid setting, but not a number of microseconds.
_FOR_EVER_SECONDS = 10**10
_LAST_TIME_US = 253_402_300_799_999_999  # the end of the year 9999
__all__ = ["CompactOptions", "CompactReport", "CompactedTopic", "compact"]


class CompactReport(JobReport, frozen=True, kw_only=True):
    """What became of every topic; of a dry run, what would."""

    topics: tuple[CompactedTopic, ...] = ()
    is_dry_run: bool = False


@logged
def compact(
    spark: SparkSession,
    root: Root,
    topics: Sequence[str] | None = None,
    options: CompactOptions | None = None,
    *,
    on_progress: OnProgress = ignore_progress,
    clock: Clock | None = None,
) -> CompactReport:
    """Compacts these topics, all by default; by key those that are marked so, or all of them if the options say so."""
    options = options or CompactOptions()
    _check_arguments(options)
    with root.open() as log:
        place = store_of(root, log, _WITHOUT_STORE)
        names = chosen_logs(log, cataloged_topics(log), topics, root.location)
    with place.open_stores() as (objects, metadata):
        job = _Job(spark, root, place, objects, metadata, options, clock or SystemClock(), on_progress)
        job.compact_all(names)
    return job.report(notes_on(names, root.location))


class _Job:
    """All topics, some at once: what one of them is planned and switched, workers build for others."""

    def __init__(
        self,
        spark: SparkSession,
        root: Root,
        place: TopicLocation,
        objects: ObjectStore,
        metadata: MetadataStore,
        options: CompactOptions,
        clock: Clock,
        on_progress: OnProgress,
    ) -> None:
        self._spark = spark
        self._root = root
        self._place = place
        self._objects = objects
        self._metadata = metadata
        self._options = options
        self._clock = clock
        self._on_progress = on_progress
        self._done: list[TopicCompaction] = []
        self._problems: list[Finding] = []
        self._planned: list[BuildWork] = []
        self._built: list[BuildDone] = []

    def compact_all(self, topics: Sequence[str]) -> None:
        """Returns when all are done. Progress is reported from the calling thread."""
        for topic, error in run_in_threads(self._compact, topics, _TOPICS_AT_ONCE, self._tell, waits=False):
            self._problems.append(Finding(subject=topic, message=str(error)))

    def _tell(self) -> None:
        if self._planned:
            self._on_progress(Progress("compacting", len(self._built), len(self._planned)))

    def _compact(self, topic: str) -> None:
        catalog = Catalog(self._metadata, self._place.keys(topic))
        options = msgspec.structs.replace(self._options, by_key=self._is_by_key(catalog))
        compaction = TopicCompaction(topic, self._place, catalog, self._objects, options, self._clock, self._build)
        compaction.run(self._superseded(topic, catalog) if options.by_key else None)
        self._done.append(compaction)

    def _is_by_key(self, catalog: Catalog) -> bool:
        """What is asked for; else what the topic is marked as, by itself or by its directory."""
        if self._options.by_key is not None:
            return self._options.by_key
        return bool(self._setting(catalog, "compaction") == "by_key")

    def _setting(self, catalog: Catalog, name: str) -> Any:
        """The topic's own, else that of its directory."""
        found = catalog.settings_document().read()
        own = {} if found is None else found.value
        return own[name] if name in own else getattr(self._root.load().tier, name)

    def _superseded(self, topic: str, catalog: Catalog) -> SupersededOffsets:
        now_us = self._clock.now_us()
        kept_seconds = min(self._options.tombstone_seconds, _FOR_EVER_SECONDS)
        before_us = now_us - int(kept_seconds * 1_000_000)
        lag_seconds = min(self._setting(catalog, "min_compaction_lag_seconds"), _FOR_EVER_SECONDS)
        # Without a lag a message is superseded whatever its time, that of the future included.
        until_us = now_us - int(lag_seconds * 1_000_000) if lag_seconds else _LAST_TIME_US
        start, end = catalog.start_offset(), self._stable_end(topic, catalog)
        return superseded_offsets(self._spark, self._root, topic, start, end, before_us, until_us)

    def _stable_end(self, topic: str, catalog: Catalog) -> int:
        """Objects are read only where Kafka's clients have written: their snapshot comes before their messages."""
        end = catalog.next_offset()
        if catalog.metadata.get(catalog.keys.kafka_producers) is None:
            return end
        works = transaction_works(self._place, topic, catalog.walk(catalog.start_offset()))
        return stable_end(run_on_workers(self._spark, find_transactions, works), end)

    def _build(self, works: Sequence[BuildWork]) -> Iterator[BuildDone]:
        self._planned += works
        for done in run_on_workers(self._spark, build_run, works):
            self._built.append(done)
            yield done

    def report(self, notes: Iterable[str]) -> CompactReport:
        return CompactReport(
            job="compact",
            topics=tuple(one.result() for one in self._sorted()),
            is_dry_run=self._options.is_dry_run,
            reconciliations=tuple(proof for one in self._sorted() if (proof := one.proof()) is not None),
            findings=tuple(sorted(self._problems, key=lambda one: one.subject)),
            notes=(*notes, *self._notes()),
        )

    def _notes(self) -> Iterator[str]:
        for one in self._sorted():
            yield from one.notes()

    def _sorted(self) -> list[TopicCompaction]:
        return sorted(self._done, key=lambda one: one.topic)


def _check_arguments(options: CompactOptions) -> None:
    if not 0 < options.min_dirty_ratio <= 1:
        raise InputError(f"min_dirty_ratio must be above 0 and at most 1, not {options.min_dirty_ratio}")
    if not (options.tombstone_seconds >= 0 and options.grace_seconds >= 0):
        raise InputError("tombstone_seconds and grace_seconds must be 0 or more")
