"""The job `verify`: every frame of every object of topics, read by workers and held against the catalog.

Invariants
- Nothing is changed, and no lock is taken: it runs beside the owners of the topics.
- What an owner, a compaction or retention changes meanwhile is no problem: the catalog is read again, objects that are
  new are checked too, and only what is wrong twice is told.
- A proof is over what the catalog names at the end, and over the files behind it.
- Objects that no descriptor names are noted: `tidelog topic sweep` and `tidelog pipeline gc` know what they are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tidelog.pipeline.jobs.choosing import chosen_topics, notes_on
from tidelog.pipeline.jobs.job import JobReport, OnProgress, Progress, counted_progress, ignore_progress
from tidelog.pipeline.jobs.proof import Proof
from tidelog.pipeline.jobs.verify_files import FilesWork, check_files
from tidelog.pipeline.jobs.verify_object import check_object
from tidelog.pipeline.jobs.verify_topic import TopicCheck, TopicVerification
from tidelog.pipeline.root import Root
from tidelog.pipeline.work import run_on_workers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# Once to see it, once more to be sure that nobody changed it at that moment, and one for what came meanwhile.
_LOOKS = 3
# A task takes some tens of milliseconds to start: small objects go to it several at a time.
_TASK_BYTES = 64 << 20
_MAX_OBJECTS_PER_TASK = 64


class VerifyReport(JobReport, frozen=True, kw_only=True):
    """Every topic that was looked at."""

    topics: tuple[TopicCheck, ...] = ()


def verify(
    spark: SparkSession, root: Root, topics: Sequence[str] | None = None, on_progress: OnProgress = ignore_progress
) -> VerifyReport:
    """Reads everything of these topics, of all by default."""
    began = time.monotonic()
    with root.open() as log:
        names = chosen_topics(log.topics(), topics, root.location)
        checks = [TopicVerification(log, root, name) for name in names]
        _Verification(spark, checks, on_progress).run()
        done = [check.result() for check in checks]
    return VerifyReport(
        job="verify",
        topics=tuple(done),
        proofs=tuple(Proof(subject=one.topic, went_in=one.side) for one in done),
        problems=tuple(problem for check in checks for problem in check.problems()),
        notes=(*notes_on(names, root.location), *(note for check in checks for note in check.notes())),
        seconds=round(time.monotonic() - began, 3),
    )


class _Verification:
    """The steps of a run over all topics."""

    def __init__(self, spark: SparkSession, checks: list[TopicVerification], on_progress: OnProgress) -> None:
        self._spark = spark
        self._checks = {check.name: check for check in checks}
        self._on_progress = on_progress

    def run(self) -> None:
        unsettled = list(self._checks.values())
        for _ in range(_LOOKS):
            for check in unsettled:
                check.look()
            self._read_files([check for check in unsettled if check.root.directory is not None])
            self._read_objects(unsettled)
            unsettled = [check for check in unsettled if not (check.is_settled and check.has_joint)]
            if not unsettled:
                break
        for check in self._checks.values():
            check.note_unnamed()

    def _read_files(self, checks: list[TopicVerification]) -> None:
        works = [FilesWork(topic=one.name, root=one.root, cold_end=one.cold_end) for one in checks]
        results = run_on_workers(self._spark, check_files, works)
        for finding in counted_progress(results, "reading files", len(works), self._on_progress):
            self._checks[finding.topic].files = finding

    def _read_objects(self, checks: list[TopicVerification]) -> None:
        works = [work for check in checks for work in check.works()]
        total_bytes = sum(work.descriptor.size for work in works)
        per_task = max(1, min(_MAX_OBJECTS_PER_TASK, len(works) * _TASK_BYTES // max(1, total_bytes), len(works) // 16))
        done_bytes = 0
        for finding in run_on_workers(self._spark, check_object, works, items_per_task=per_task):
            self._checks[finding.topic].found[finding.object_id] = finding
            done_bytes += finding.size
            self._on_progress(Progress("reading objects", done_bytes, total_bytes))
