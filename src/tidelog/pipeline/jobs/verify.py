"""The job `verify`: workers read every frame of every object and file of topics, and check it against the catalog.

The checks are those of `topic.verify()`; Spark distributes them, and the driver adds up what was read.

Invariants
- Nothing is changed, and no lock is taken: it runs beside the owners of the topics.
- Concurrent changes by an owner, a compaction or retention are not findings: the catalog is read again, new objects
  are checked too, and only what is wrong twice is reported (`cold/verify.py`).
- The reconciliation covers what the catalog names at the end, and the files after it. Files that are no longer the
  topic's end, because another node owns it, are checked, but not counted.
- Objects that no descriptor names are noted: `tidelog topic remove-orphans` and `tidelog pipeline gc` explain them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from tidelog.cold.catalog import Descriptor
from tidelog.cold.tiered_reader import TieredView
from tidelog.cold.verify import FIX, LOOKS, ColdCheck, ObjectFinding, check_object
from tidelog.errors import TidelogError
from tidelog.files import LocalFiles
from tidelog.findings import About, Finding
from tidelog.log.frame import Frames
from tidelog.log.reader import ReadableLog
from tidelog.pipeline.address import Root
from tidelog.pipeline.ingest import opened_log
from tidelog.pipeline.jobs.job import (
    NO_FRAMES,
    JobReport,
    OnProgress,
    Progress,
    Reconciliation,
    Totals,
    counted_progress,
    ignore_progress,
    logged,
    total,
)
from tidelog.pipeline.jobs.tally import chosen_logs, lost_offsets, notes_on, tally_frames
from tidelog.pipeline.location import TopicLocation
from tidelog.pipeline.tasks import slots_of
from tidelog.pipeline.work import run_on_workers
from tidelog.topics.columns import unreadable_frames
from tidelog.topics.directory import LogDirectory
from tidelog.topics.message import TIMESTAMP_FIELD
from tidelog.topics.names import parse_topic_name
from tidelog.topics.verify import check_joint, verify_local

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SHOWN_NAMES = 5
# A task takes some tens of milliseconds to start: small objects go to it several at a time.
_TASK_BYTES = 64 << 20
_MAX_OBJECTS_PER_TASK = 64


def objects_per_task(descriptors: Sequence[Descriptor], slots: int = 4) -> int:
    """How many of these a task reads, so that it has enough to do and there are enough tasks for so many at once."""
    count, size = len(descriptors), sum(one.size for one in descriptors)
    return max(1, min(_MAX_OBJECTS_PER_TASK, count * _TASK_BYTES // max(1, size), count // (4 * slots)))


def some_names(names: Iterable[str]) -> str:
    """The first of them, and how many more there are."""
    listed = list(names)
    more = "" if len(listed) <= _SHOWN_NAMES else f" and {len(listed) - _SHOWN_NAMES} more"
    return ", ".join(listed[:_SHOWN_NAMES]) + more


# On the workers


class ObjectWork(msgspec.Struct, frozen=True, kw_only=True):
    """An object to read, and what is said about it."""

    topic: str
    place: TopicLocation
    descriptor: Descriptor


class TopicObject(ObjectFinding, frozen=True, kw_only=True):
    """What an object has, and what is wrong with it."""

    topic: str
    totals: Totals = NO_FRAMES
    lost: tuple[int, ...] = ()


def check_topic_object(work: ObjectWork) -> TopicObject:
    """Reads all of it."""
    name = parse_topic_name(work.topic)
    keys = work.place.keys(str(name))
    counted, lost = NO_FRAMES, list[int]()

    def count(frames: Frames) -> Iterable[Finding]:
        nonlocal counted
        counted += tally_frames(frames)
        lost.extend(lost_offsets(frames))
        return ()

    with work.place.fetchers as ahead:
        found = check_object(
            work.place.objects,
            keys,
            work.descriptor,
            About(work.topic, fix=FIX),
            time_field=TIMESTAMP_FIELD,
            unreadable=unreadable_frames,
            check=count,
            ahead=ahead,
        )
    return TopicObject(**msgspec.structs.asdict(found), topic=work.topic, totals=counted, lost=tuple(lost))


class FilesWork(msgspec.Struct, frozen=True, kw_only=True):
    """A topic whose files are to be read. What is below `cold_end` is in objects, and counted there."""

    topic: str
    root: Root
    cold_end: int


class TopicFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What the files have, and what is wrong with them. `start_offset` is where they begin, None without any."""

    topic: str
    files: int = 0
    size: int = 0
    start_offset: int | None = None
    totals: Totals = NO_FRAMES
    lost: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()


def check_topic_files(work: FilesWork) -> TopicFiles:
    """Reads all of them."""
    with work.root.open() as log:
        directory = log._topic_directory(work.topic)
        if not directory.is_dir():
            return TopicFiles(topic=work.topic)
        local = verify_local(work.topic, directory, LocalFiles(), unreadable_frames)
        size, findings = local.total_bytes, local.findings
        found = TopicFiles(topic=work.topic, files=len(local.files), size=size, findings=findings)
        return found if findings else _counted(log, work, found)


def _counted(log: LogDirectory, work: FilesWork, found: TopicFiles) -> TopicFiles:
    try:
        readable = opened_log(log, parse_topic_name(work.topic))._readable
        hot = readable.hot if isinstance(readable, TieredView) else readable
    except TidelogError as error:
        finding = About(work.topic).finding_of(error, "access")
        return msgspec.structs.replace(found, findings=(finding,))
    if not isinstance(hot, ReadableLog):
        notes = () if not found.size else (f"{work.topic}: its files here are not its end, another node has that",)
        return msgspec.structs.replace(found, notes=notes)
    counted, lost = NO_FRAMES, list[int]()
    start = max(work.cold_end, hot.start_offset)
    for batch in hot.read(start, hot.next_offset) if start < hot.next_offset else ():
        assert batch.frames is not None, "a view reads files"
        counted += tally_frames(batch.frames, batch.start, batch.stop)
        lost += [offset for offset in lost_offsets(batch.frames) if start <= offset < batch.next_offset]
    return msgspec.structs.replace(found, start_offset=hot.start_offset, totals=counted, lost=tuple(lost))


# On the driver


class TopicCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What was read of a topic, or of one of its partitions."""

    topic: str
    objects: int
    object_bytes: int
    files: int
    file_bytes: int
    totals: Totals
    problems: int


class TopicsVerifyReport(JobReport, frozen=True, kw_only=True):
    """Every topic that was looked at."""

    topics: tuple[TopicCheck, ...] = ()


@logged
def verify(
    spark: SparkSession, root: Root, topics: Sequence[str] | None = None, on_progress: OnProgress = ignore_progress
) -> TopicsVerifyReport:
    """Reads everything of these topics, of all by default."""
    with root.open() as log:
        names = chosen_logs(log, log.topics(), topics, root.location)
        checks = {name: _TopicVerification(log, root, name) for name in names}
        _run(spark, checks, on_progress)
        done = [check.result() for check in checks.values()]
    return TopicsVerifyReport(
        job="verify",
        topics=tuple(done),
        reconciliations=tuple(Reconciliation(subject=one.topic, went_in=one.totals) for one in done),
        findings=tuple(finding for check in checks.values() for finding in check.findings()),
        notes=(*notes_on(names, root.location), *(note for check in checks.values() for note in check.notes())),
    )


def _run(spark: SparkSession, checks: dict[str, _TopicVerification], on_progress: OnProgress) -> None:
    """Looks at all topics until nothing would be seen by another look."""
    unsettled = list(checks.values())
    for _ in range(LOOKS):
        for check in unsettled:
            check.look()
        works = [FilesWork(topic=one.name, root=one.root, cold_end=one.cold_end) for one in unsettled if one.has_files]
        results = run_on_workers(spark, check_topic_files, works)
        for files in counted_progress(results, "reading files", len(works), on_progress):
            checks[files.topic].files = files
        _read_objects(spark, [work for check in unsettled for work in check.works()], checks, on_progress)
        unsettled = [check for check in unsettled if not check.is_settled]
        if not unsettled:
            break


def _read_objects(
    spark: SparkSession, works: list[ObjectWork], checks: dict[str, _TopicVerification], on_progress: OnProgress
) -> None:
    descriptors = [work.descriptor for work in works]
    done, size = 0, sum(one.size for one in descriptors)
    per_task = objects_per_task(descriptors, slots_of(spark))
    results = run_on_workers(spark, check_topic_object, works, items_per_task=per_task)
    for found in results:
        checks[found.topic].take(found)
        done += found.size
        on_progress(Progress("reading objects", done, size))


class _TopicVerification:
    """What is known of one topic so far."""

    def __init__(self, log: LogDirectory, root: Root, name: str) -> None:
        parsed = parse_topic_name(name)
        self.name = name
        self.root = root
        self.files = TopicFiles(topic=name)
        self._place: TopicLocation | None = root.place
        self._tier = log._tier
        self._cold: ColdCheck[TopicObject] | None = None
        if log._tier is not None:
            self._cold = ColdCheck(About(name, fix=FIX), log._tier.catalog(parsed.namespace, parsed.name))

    @property
    def has_files(self) -> bool:
        return self.root.directory is not None

    @property
    def cold_end(self) -> int:
        return 0 if self._cold is None else self._cold.next_offset

    def look(self) -> None:
        """Reads the catalog, again."""
        if self._cold is not None:
            self._cold.look()

    def works(self) -> Iterator[ObjectWork]:
        """Objects that have not been read yet."""
        for descriptor in () if self._cold is None else self._cold.works():
            assert self._place is not None, "a catalog has a store"
            yield ObjectWork(topic=self.name, place=self._place, descriptor=descriptor)

    def take(self, found: TopicObject) -> None:
        """What a worker has read."""
        assert self._cold is not None, "it had work"
        self._cold.found[found.object_id] = found

    @property
    def is_settled(self) -> bool:
        """Whether the catalog is, and the files begin where the objects end, or before, and are counted from there."""
        if self._cold is None:
            return True
        begin, counted = self.files.start_offset, self.files.totals.first_offset
        has_joint = begin is None or (begin <= self.cold_end and counted in (None, self.cold_end))
        return self._cold.is_settled and has_joint

    def _read(self) -> list[TopicObject]:
        return [] if self._cold is None else self._cold.read()

    def result(self) -> TopicCheck:
        read = self._read()
        return TopicCheck(
            topic=self.name,
            objects=len(read),
            object_bytes=sum(one.size for one in read),
            files=self.files.files,
            file_bytes=self.files.size,
            totals=total([*(one.totals for one in read), self.files.totals]),
            problems=len(list(self.findings())),
        )

    def findings(self) -> Iterator[Finding]:
        """All that is wrong, in the order of the catalog, the objects and the files."""
        yield from () if self._cold is None else self._cold.findings()
        yield from self.files.findings
        yield from () if self._cold is None else check_joint(self._cold, self.files.start_offset)

    def notes(self) -> Iterator[str]:
        """What is not wrong, and may be worth knowing."""
        read = self._read()
        lost = [*(offset for one in read for offset in one.lost), *self.files.lost]
        rewritten = [one.object_id for one in read if one.is_rewritten]
        yield from self.files.notes
        yield from self._orphans()
        if lost:
            yield f"{self.name}: {len(lost)} offsets are marked as lost: {some_names(map(str, lost))}"
        if rewritten:
            yield f"{self.name}: written again since they were shipped, with the same bytes: {some_names(rewritten)}"

    def _orphans(self) -> Iterator[str]:
        """Objects that no descriptor names."""
        if self._cold is None or self._cold.seen is None or self._tier is None:
            return
        named = self._cold.seen.object_ids
        found = [info.key for info in self._tier.objects.list(self._cold.catalog.keys.objects_prefix)]
        unnamed = [key for key in found if key.rpartition("/")[2] not in named]
        if unnamed:
            text = f"{self.name}: {len(unnamed)} objects that no descriptor names: {some_names(unnamed)}"
            yield f"{text}; `tidelog topic remove-orphans` says what they are"
