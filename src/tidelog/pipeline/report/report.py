"""The job `report`: one page with plots of all topics, from descriptors and files, or counted message by message.

Without `exact` it does not need Spark: the driver renders a page of hundreds of topics in a moment. With a session its
workers read the topics, and with `exact` they count every message.

Invariants
- The page is replaced atomically, or stays as it was.
- The topics and their stores are not changed.
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
from tidelog.findings import Finding
from tidelog.pipeline.address import Root
from tidelog.pipeline.jobs.job import JobReport, OnProgress, Progress, ignore_progress, logged
from tidelog.pipeline.report.figures import (
    TimeBins,
    TimeCounts,
    TopicFigures,
    choose_bins,
    chosen_names,
    exact_times,
    gather_figures,
    spread,
)
from tidelog.pipeline.report.page import Page, page_html
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


@logged
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
        raise InputError("counting every message needs a Spark session", operation="report", hint="Pass spark=")
    names = chosen_names(root, topics)
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
    return _report(path, len(data), figures)


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


def _report(path: Path, page_bytes: int, figures: Sequence[TopicFigures]) -> ReportReport:
    return ReportReport(
        job="report",
        findings=tuple(Finding(subject=one.name, message=one.problem) for one in figures if one.problem is not None),
        page=str(path),
        page_bytes=page_bytes,
        topics=len(figures),
        messages=sum(one.messages for one in figures),
        cold_bytes=sum(one.cold_bytes for one in figures),
        hot_bytes=sum(one.hot_bytes for one in figures),
        unshipped_messages=sum(one.unshipped_messages for one in figures),
        largest_lag_messages=max((one.lag_messages for one in figures), default=0),
    )
