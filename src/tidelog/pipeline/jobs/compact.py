"""The job `compact`: many small objects become few large ones, and superseded messages of keyed topics go.

    small objects    neighbours are put together, frame by frame, up to a size                   every topic
    by key           what a later message of its key has superseded is removed, its offset stays   topics that say so

Workers read, check, write and read back; the driver compares and switches the catalog. It holds no claim, so it runs
beside the owners of the topics; `tier/replacement_switch.py` argues why that is safe.

Invariants
- At every moment every offset can be read, with its message, or as removed where a newer one of its key is published.
- Killed anywhere, the next run goes on: what was being switched is finished, what was being built is built again.
- A topic that cannot be compacted is a problem of the report; the others are done. A few topics are worked on at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tidelog.clock import Clock, SystemClock
from tidelog.errors import InputError, TidelogError
from tidelog.pipeline.jobs.choosing import cataloged_topics, chosen_topics, notes_on, store_of
from tidelog.pipeline.jobs.compact_build import BuildDone, BuildWork, build_run
from tidelog.pipeline.jobs.compact_keys import SupersededOffsets, superseded_offsets
from tidelog.pipeline.jobs.compact_topic import CompactedTopic, CompactOptions, TopicCompaction
from tidelog.pipeline.jobs.job import JobReport, OnProgress, Problem, Progress, ignore_progress
from tidelog.pipeline.part import ColdPlace
from tidelog.pipeline.root import Root
from tidelog.pipeline.work import run_on_workers
from tidelog.tier import owner as documents
from tidelog.tier.catalog import Catalog
from tidelog.tier.keys import TopicKeys
from tidelog.tier.metadata.open import open_metadata_store
from tidelog.tier.metadata.store import MetadataStore
from tidelog.tier.object_store import ObjectStore
from tidelog.tier.stores import open_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_WITHOUT_STORE = "Compaction is about objects in a store: there are none"
_TOPICS_AT_ONCE = 4
# Infinity is a time that somebody may give; as a number of microseconds it is none.
_FOR_EVER_SECONDS = 10**10
__all__ = ["CompactOptions", "CompactReport", "CompactedTopic", "compact"]


class _News(NamedTuple):
    """What the threads tell: objects that are planned, objects that are made, the end of a topic."""

    planned: int = 0
    done: int = 0
    is_end: bool = False


class CompactReport(JobReport, frozen=True, kw_only=True):
    """What became of every topic; of a dry run, what would."""

    topics: tuple[CompactedTopic, ...] = ()
    is_dry_run: bool = False


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
    began, options = time.monotonic(), options or CompactOptions()
    _check(options)
    with root.open() as log:
        place = store_of(root, log, _WITHOUT_STORE)
        names = chosen_topics(cataloged_topics(log), topics, root.location)
    objects = open_store(place.store_url, place.store_settings)
    with open_metadata_store(place.metadata_url, objects) as metadata:
        job = _Job(spark, root, place, objects, metadata, options, clock or SystemClock(), on_progress)
        job.compact_all(names)
    return job.report(notes_on(names, root.location), time.monotonic() - began)


class _Job:
    """All topics, some at once: what one of them is planned and switched, workers build for others."""

    def __init__(
        self,
        spark: SparkSession,
        root: Root,
        place: ColdPlace,
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
        self._problems: list[Problem] = []
        self._news: SimpleQueue[_News] = SimpleQueue()

    def compact_all(self, topics: Sequence[str]) -> None:
        """Returns when all are done. How far they are is told from the thread that asked for it."""
        pool = ThreadPoolExecutor(_TOPICS_AT_ONCE, "tidelog-compact")
        try:
            running = [pool.submit(self._compact, topic) for topic in topics]
            for future in running:
                future.add_done_callback(lambda _: self._news.put(_News(is_end=True)))
            self._tell(len(running))
            for future in running:
                future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _tell(self, topics: int) -> None:
        done = total = 0
        while topics:
            news = self._news.get()
            topics -= news.is_end
            done, total = done + news.done, total + news.planned
            if total and not news.is_end:
                self._on_progress(Progress("compacting", done, total))

    def _compact(self, topic: str) -> None:
        namespace, _, name = topic.partition("/")
        catalog = Catalog(self._metadata, TopicKeys(namespace, name, self._place.metadata_root))
        try:
            options = msgspec.structs.replace(self._options, by_key=self._is_by_key(catalog))
            compaction = TopicCompaction(
                *(topic, self._place, catalog, self._objects, options, self._clock),
                self._build,
            )
            compaction.run(self._superseded(topic, catalog) if options.by_key else None)
        except TidelogError as error:
            self._problems.append(Problem(topic=topic, reason=str(error)))
        else:
            self._done.append(compaction)

    def _is_by_key(self, catalog: Catalog) -> bool:
        """What is asked for; else what the topic is marked as, by itself or by its directory."""
        if self._options.by_key is not None:
            return self._options.by_key
        entry = catalog.metadata.get(catalog.keys.settings)
        own = {} if entry is None else documents.decode_mapping(entry.value, entry.key)
        return own.get("compaction", self._root.load().tier.compaction) == "by_key"

    def _superseded(self, topic: str, catalog: Catalog) -> SupersededOffsets:
        kept_seconds = min(self._options.tombstone_seconds, _FOR_EVER_SECONDS)
        before_us = self._clock.now_us() - int(kept_seconds * 1_000_000)
        ends = catalog.start_offset(), catalog.next_offset()
        return superseded_offsets(self._spark, self._root, topic, *ends, before_us)

    def _build(self, works: Sequence[BuildWork]) -> Iterator[BuildDone]:
        self._news.put(_News(planned=len(works)))
        for done in run_on_workers(self._spark, build_run, works):
            self._news.put(_News(done=1))
            yield done

    def report(self, notes: Iterable[str], seconds: float) -> CompactReport:
        return CompactReport(
            job="compact",
            topics=tuple(one.result() for one in self._sorted()),
            is_dry_run=self._options.is_dry_run,
            proofs=tuple(proof for one in self._sorted() if (proof := one.proof()) is not None),
            problems=tuple(sorted(self._problems, key=lambda one: one.topic)),
            notes=(*notes, *self._notes()),
            seconds=round(seconds, 3),
        )

    def _notes(self) -> Iterator[str]:
        for one in self._sorted():
            yield from one.notes()

    def _sorted(self) -> list[TopicCompaction]:
        return sorted(self._done, key=lambda one: one.topic)


def _check(options: CompactOptions) -> None:
    if not 0 < options.min_dirty_ratio <= 1:
        raise InputError(f"min_dirty_ratio is above 0 and at most 1, not {options.min_dirty_ratio}")
    if not (options.tombstone_seconds >= 0 and options.grace_seconds >= 0):
        raise InputError("tombstone_seconds and grace_seconds are 0 or more")
