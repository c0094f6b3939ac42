"""The job `report`: one page with plots of all topics, from descriptors and files, or counted message by message.

Without `exact` nothing of Spark is needed: a page of hundreds of topics is made on the driver in a moment. With a
session the topics are looked at on its workers, and with `exact` these count every message.

Invariants
- The page is replaced as a whole, or stays as it was.
- Nothing is changed where the topics are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tidelog.clock import Clock, SystemClock
from tidelog.errors import InputError
from tidelog.files import LocalFiles, explained
from tidelog.pipeline.jobs.choosing import chosen_topics
from tidelog.pipeline.jobs.job import JobReport, OnProgress, Problem, Progress, ignore_progress
from tidelog.pipeline.jobs.report_exact import exact_times
from tidelog.pipeline.jobs.report_figures import TopicFigures, gather_figures, topic_names
from tidelog.pipeline.jobs.report_page import Page, page_html
from tidelog.pipeline.jobs.report_times import TimeBins, TimeCounts, choose_bins, spread
from tidelog.pipeline.root import Root
from tidelog.pipeline.work import run_on_workers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEFAULT_MAX_DETAILS = 100
_TOPICS_A_TASK = 8


class ReportReport(JobReport, frozen=True, kw_only=True):
    """What is on the page, in numbers."""

    page: str
    page_bytes: int
    topics: int
    messages: int
    cold_bytes: int
    hot_bytes: int
    unshipped_messages: int
    largest_lag_messages: int


class LookWork(msgspec.Struct, frozen=True):
    """Some topics that a worker looks at."""

    root: Root
    names: tuple[str, ...]


def look_at_topics(work: LookWork) -> list[TopicFigures]:
    """Runs on a worker."""
    return list(gather_figures(work.root, work.names))


def make_report(
    root: Root,
    to: str | os.PathLike[str],
    topics: Sequence[str] | None = None,
    *,
    spark: SparkSession | None = None,
    exact: bool = False,
    max_details: int = DEFAULT_MAX_DETAILS,
    on_progress: OnProgress = ignore_progress,
    clock: Clock | None = None,
) -> ReportReport:
    """Writes the page and says what is on it; all topics unless some are named."""
    clock = clock or SystemClock()
    if exact and spark is None:
        raise InputError("only a Spark session can count every message", operation="report", hint="Give it one")
    begin = clock.monotonic()
    names = chosen_topics(topic_names(root), topics, root.location)
    figures = sorted(_figures(root, names, spark, on_progress), key=lambda one: one.name)
    bins = choose_bins(figures)
    page = Page(
        root=root.location,
        made_us=clock.now_us(),
        topics=figures,
        bins=bins,
        times=_times(root, figures, bins, spark if exact else None),
        is_exact=exact,
        max_details=max_details,
    )
    path, data = Path(to), page_html(page).encode("utf-8")
    with explained("report", path):
        LocalFiles().write_atomically(path, data)
    return _report(path, len(data), figures, clock.monotonic() - begin)


def _figures(
    root: Root, names: Sequence[str], spark: SparkSession | None, on_progress: OnProgress
) -> Iterator[TopicFigures]:
    done = 0
    on_progress(Progress("looking at topics", done, len(names)))
    for some in _looked_at(root, names, spark):
        yield from some
        done += len(some)
        on_progress(Progress("looking at topics", done, len(names)))


def _looked_at(root: Root, names: Sequence[str], spark: SparkSession | None) -> Iterator[list[TopicFigures]]:
    if spark is None:
        yield from ([one] for one in gather_figures(root, names))
        return
    tasks = [tuple(names[at : at + _TOPICS_A_TASK]) for at in range(0, len(names), _TOPICS_A_TASK)]
    yield from run_on_workers(spark, look_at_topics, [LookWork(root, some) for some in tasks])


def _times(
    root: Root, figures: Sequence[TopicFigures], bins: TimeBins | None, spark: SparkSession | None
) -> list[TimeCounts]:
    if bins is None:
        return []
    return [spread(one, bins) for one in figures] if spark is None else exact_times(spark, root, figures, bins)


def _report(path: Path, page_bytes: int, figures: Sequence[TopicFigures], seconds: float) -> ReportReport:
    return ReportReport(
        job="report",
        problems=tuple(Problem(topic=one.name, reason=one.problem) for one in figures if one.problem is not None),
        seconds=seconds,
        page=str(path),
        page_bytes=page_bytes,
        topics=len(figures),
        messages=sum(one.messages for one in figures),
        cold_bytes=sum(one.cold_bytes for one in figures),
        hot_bytes=sum(one.hot_bytes for one in figures),
        unshipped_messages=sum(one.unshipped_messages for one in figures),
        largest_lag_messages=max((one.lag_messages for one in figures), default=0),
    )
