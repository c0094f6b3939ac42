"""Work that is spread over Spark's workers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from tests.pipeline.work_items import Number, Square, Stop, broken, damaged, square, wait_for_file

from tidelog.errors import CorruptionError, InputError
from tidelog.pipeline import work
from tidelog.pipeline.work import run_on_workers


def test_every_item_is_worked_on_once_and_elsewhere(spark: SparkSession) -> None:
    """There is one result an item, and none of them was made in the driver."""
    items = [Number(value) for value in range(50)]
    results = list(run_on_workers(spark, square, items, items_per_task=5))
    assert sorted(result.value for result in results) == list(range(50))
    assert all(result.square == result.value**2 for result in results)
    assert os.getpid() not in {result.process for result in results}


def test_no_items_are_no_work(spark: SparkSession) -> None:
    """Nothing in, nothing out."""
    assert list(run_on_workers(spark, square, [])) == []


def test_an_error_of_ours_comes_back_as_itself(spark: SparkSession) -> None:
    """The driver gets the class of the error, its text, and what it carries."""
    with pytest.raises(CorruptionError) as caught:
        list(run_on_workers(spark, damaged, [Number(7)]))
    error = caught.value
    assert (error.byte, str(error.path), error.hint) == (7, "object-7", "Mend it")
    assert str(error) == "a bad frame at byte 7 of object-7. Mend it"


def test_any_other_error_fails_the_task(spark: SparkSession) -> None:
    """A bug is not dressed up: Spark shows the traceback of the worker."""
    with pytest.raises(PySparkException, match="ZeroDivisionError: a bug at 1"):
        list(run_on_workers(spark, broken, [Number(1)]))


def test_work_in_a_classic_session_plans_no_query(spark: SparkSession) -> None:
    """A query takes longer to plan and to compile than a small topic takes to be verified."""
    queries = spark._jsparkSession.sharedState().statusStore().executionsCount
    before = queries()
    assert len(list(run_on_workers(spark, square, [Number(1), Number(2)]))) == 2
    assert queries() == before


def one_of_the_second_wave(waits_for: str) -> list[Stop]:
    """Items of two waves of local[2]. Spark may run the second one first, and a slot must be left for the other one."""
    return [Stop(number, waits_for if number == 4 else None) for number in range(8)]


def test_a_caller_that_has_seen_enough_cancels_what_runs(spark: SparkSession, tmp_path: Path) -> None:
    """What is left would wait for ever for a file: the caller gets on nevertheless, and its tasks end."""
    never = str(tmp_path / "never")
    results = run_on_workers(spark, wait_for_file, one_of_the_second_wave(never))
    assert isinstance(results, Generator)
    assert next(results).value < 4
    results.close()
    tracker, deadline = spark.sparkContext.statusTracker(), time.monotonic() + 60
    while tracker.getActiveJobsIds() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not tracker.getActiveJobsIds()


def test_cancel_reaches_a_job_that_starts_after_it(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller may have seen enough while a wave is about to start its job: it must not wait for that job for ever."""
    cancelled, cancel, run = threading.Event(), work._cancel, work._run_wave

    def cancel_and_tell(*arguments: Any) -> None:
        cancel(*arguments)
        cancelled.set()

    def run_late(session: SparkSession, path: str, items: Sequence[Any], *rest: Any) -> list[bytes]:
        if items[0].value == 4:
            cancelled.wait()
        return run(session, path, items, *rest)

    monkeypatch.setattr(work, "_cancel", cancel_and_tell)
    monkeypatch.setattr(work, "_run_wave", run_late)
    never = str(tmp_path / "never")
    results = run_on_workers(spark, wait_for_file, one_of_the_second_wave(never))
    assert isinstance(results, Generator)
    assert next(results).value < 4
    results.close()
    assert cancelled.is_set()


def test_a_function_that_workers_cannot_find_is_refused() -> None:
    """A function inside another one is named as the mistake, before anything is sent."""

    def local(item: Number) -> Square:
        return square(item)

    nobody: Any = None
    with pytest.raises(InputError, match="workers cannot find the function"):
        next(run_on_workers(nobody, local, [Number(1)]))
