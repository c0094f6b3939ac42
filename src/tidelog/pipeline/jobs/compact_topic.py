"""The compaction of one topic, round by round, as the driver sees it. Spark is what `build` and `find_superseded` use.

Invariants
- A round is one generation: planned, built by workers, checked, switched. A job that is killed loses the round that it
  was in, and the next run begins by finishing a switch that was begun.
- What went in and what came out are summed up by the workers and compared here once more, before anything is switched.
- While workers build, somebody says from time to time that it is still being worked on.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from tidelog.clock import Clock
from tidelog.errors import CorruptionError, DataError, TidelogError
from tidelog.pipeline.jobs.compact_build import BuildDone, BuildWork
from tidelog.pipeline.jobs.compact_keys import SupersededOffsets
from tidelog.pipeline.jobs.proof import Proof, Tally, side_of, total
from tidelog.pipeline.part import ColdPlace
from tidelog.tier import owner as documents
from tidelog.tier.catalog import Catalog
from tidelog.tier.descriptor import Codec, Descriptor
from tidelog.tier.object_store import ObjectStore
from tidelog.tier.replacement import Replacement
from tidelog.tier.replacement_build import Built, FramesTally
from tidelog.tier.replacement_cleanup import DEFAULT_GRACE_SECONDS, CleanupReport, apply_cleanup, plan_cleanup
from tidelog.tier.replacement_plan import DEFAULT_TARGET_BYTES, Planned, Run, plan_merges, plan_rewrites
from tidelog.tier.replacement_switch import Replacing, begin, finish
from tidelog.topics.producer_state import ProducersSnapshot

_RENEW_SECONDS = 20.0
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
        place: ColdPlace,
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
        self._went_in: list[Tally] = []
        self._came_out: list[Tally] = []
        self._replaced: list[Run] = []
        self._made: list[Built] = []
        self._cleanup = CleanupReport()
        self._superseded_messages = 0

    def run(self, superseded: SupersededOffsets | None) -> None:
        """Everything there is to do: first by key, if `superseded` says what is to go, then the small objects."""
        if not self._options.is_dry_run:
            finish(self._catalog, self._clock)
        if superseded is not None:
            self._superseded = self._without_anchor(superseded)
            self._superseded_messages = superseded.count(self._catalog.start_offset(), self._catalog.next_offset())
            self._rounds(self._plan_rewrites, "zstd")
            self._superseded = None
        self._rounds(self._plan_merges, None)
        if not self._options.is_dry_run:
            plan = plan_cleanup(self._catalog, self._clock.now_us(), self._options.grace_seconds)
            self._cleanup = apply_cleanup(plan, self._catalog, self._objects)

    def _without_anchor(self, superseded: SupersededOffsets) -> SupersededOffsets:
        """A snapshot of the producers is believed by the message before its offset: that one stays."""
        key = self._catalog.keys.producers
        entry = self._catalog.metadata.get(key)
        try:
            snapshot = None if entry is None else documents.decode(entry.value, key, ProducersSnapshot)
        except DataError:
            snapshot = None  # nobody believes it
        return superseded if snapshot is None else superseded.without(max(0, snapshot.as_of_offset - 1))

    # Planning

    def _plan_merges(self, from_offset: int) -> Planned:
        options = self._options
        return plan_merges(
            self._catalog,
            target_bytes=options.target_bytes,
            keep_newest=options.keep_newest,
            from_offset=from_offset,
            max_runs=_RUNS_AT_ONCE,
        )

    def _plan_rewrites(self, from_offset: int) -> Planned:
        options = self._options
        return plan_rewrites(
            *(self._catalog, self._is_dirty),
            target_bytes=options.target_bytes,
            keep_newest=options.keep_newest,
            from_offset=from_offset,
            max_runs=_RUNS_AT_ONCE,
        )

    def _is_dirty(self, descriptor: Descriptor) -> bool:
        assert self._superseded is not None, "asked by key only"
        count = self._superseded.count(descriptor.start_offset, descriptor.next_offset)
        return count > 0 and count >= descriptor.count * self._options.min_dirty_ratio

    # Rounds

    def _rounds(self, plan: Callable[[int], Planned], codec: Codec | None) -> None:
        from_offset: int | None = 0
        while from_offset is not None:
            planned = plan(from_offset)
            if planned.runs and self._options.is_dry_run:
                self._replaced += [run for run in planned.runs if not self._is_counted(run)]
            elif planned.runs:
                # Once more, now that nobody else compacts: what was planned before may have been replaced.
                work = begin(self._catalog, self._objects, self._clock, take_over=self._options.take_over)
                with work.abandoned_on_error():
                    planned = plan(from_offset)
                    self._round(work, planned.runs, codec)
                    work.abandon()  # does nothing where there was something to switch to
            from_offset = planned.next_offset

    def _is_counted(self, run: Run) -> bool:
        """Whether some of it is to be replaced already: by the time of this run it would be another object."""
        return any(one.start_offset < run.next_offset and run.start_offset < one.next_offset for one in self._replaced)

    def _round(self, work: Replacing, runs: Sequence[Run], codec: Codec | None) -> None:
        works = [self._work(work.generation, run, codec) for run in runs]
        with _kept_alive(work):
            built = {one.start_offset: one.built for one in self._build(works) if one.built is not None}
        done = [(run, built[run.start_offset]) for run in runs if run.start_offset in built]
        for run, one in done:
            _check(run, one)
        if done:
            made = [Replacement(descriptor=one.descriptor, replaced=run.replaced) for run, one in done]
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

    # What is told

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
            deleted_objects=len(self._cleanup.objects),
            deleted_bytes=self._cleanup.bytes,
        )

    def proof(self) -> Proof | None:
        """What went into the new objects and what came out of them; None where none were made."""
        if not self._made:
            return None
        return Proof(subject=self.topic, went_in=side_of(total(self._went_in)), came_out=side_of(total(self._came_out)))

    def notes(self) -> Iterator[str]:
        for key, why in self._cleanup.skipped:
            yield f"{self.topic}: kept {key}: {why}"


def _tally(run: Run, found: FramesTally) -> Tally:
    return Tally(
        messages=found.messages,
        first_offset=run.start_offset,
        last_offset=run.next_offset - 1,
        digest=found.digest,
    )


def _check(run: Run, built: Built) -> None:
    """What a worker says it has made is what it was asked for."""
    made = built.descriptor
    if (made.start_offset, made.next_offset) != (run.start_offset, run.next_offset) or built.went_in != built.came_out:
        raise CorruptionError(
            f"the new object does not have the messages {run.start_offset} to {run.next_offset - 1}",
            path=made.object_id,
            byte=0,
            operation="compact",
            hint="Nothing was replaced; run it again",
        )


@contextlib.contextmanager
def _kept_alive(work: Replacing) -> Iterator[None]:
    """Says that the work goes on, while it does. Who was taken over finds out when it wants to switch."""
    is_over = threading.Event()

    def renew() -> None:
        while not is_over.wait(_RENEW_SECONDS):
            with contextlib.suppress(TidelogError):
                work.renew()

    thread = threading.Thread(target=renew, name="tidelog-compact-renew", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
