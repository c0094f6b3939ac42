"""A run of a declared pipeline: which steps are due, one after the other in one session, and one report of all.

Invariants
- A step is due in every run, or with `every` when so much time has passed since the begin of the run in which it was
  last done. A step that failed, or found something wrong, was not done: it is due again.
- A step is taken after those that it is `after`, as far as they are in the same run; where one of them failed, found
  something wrong or was skipped, it is skipped: nothing is collected behind a verification that found damage.
- What may pass is tried again with growing pauses, as often as the step says; bad input and damaged data are not.
- A step that fails ends nothing but itself and what comes after it. The run ends, is reported and is over.
- A run that was killed is continued, with the tasks that it had. See `state.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from tidelog.clock import Clock, SystemClock
from tidelog.errors import ClosedError, ConflictError, FencedError, ReopenError, RetryError, TidelogError
from tidelog.events import tell, turn_on_output
from tidelog.findings import Finding
from tidelog.pipeline.ingest import bound_place
from tidelog.pipeline.jobs.job import (
    JobReport,
    OnProgress,
    Progress,
    Reconciliation,
    first_line,
    ignore_progress,
    told_in_our_words,
)
from tidelog.pipeline.runs.definition import Definition, Step
from tidelog.pipeline.runs.state import HeldBook, PipelineBook, PipelineState, RunState, Status, TaskState
from tidelog.pipeline.runs.steps import Request, all_topics_of, check_options, do, needs_spark
from tidelog.pipeline.session.java import GatewayError
from tidelog.pipeline.session.session import java_has_died
from tidelog.store.scheduler import with_backoff

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Sleep = Callable[[float], None]
_logger = logging.getLogger("tidelog.pipeline")
_LONGEST_PAUSE_SECONDS = 60.0
_FIRST_PAUSE_SECONDS = 60.0
_LONGEST_FAILURE_PAUSE_SECONDS = 3600.0
_WORTH_RETRYING = (RetryError, ConflictError, ReopenError)
_US = 1_000_000
_REPORT = "report"
_UNDONE = {"found": "found something wrong", "failed": "failed", "skipped": "was skipped"}


class PlannedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step in the next run, or not in it, and why."""

    step: str
    do: str
    on: tuple[str, ...]
    is_due: bool
    why: str
    due_us: int | None = None
    """When it is due by `every`; None for one that is due in every run."""


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a step on a place. `report` is the key of its own report in the store."""

    step: str
    do: str
    on: str
    topic: str | None
    status: Status
    attempts: int
    seconds: float
    message: str | None = None
    error: str | None = None
    report: str | None = None


class PipelineReport(JobReport, frozen=True, kw_only=True):
    """What a run did, with the findings and reconciliations of all of its steps."""

    pipeline: str
    run: str
    is_resumed: bool
    steps: tuple[StepResult, ...] = ()
    report: str | None = None


@contextmanager
def open_book(definition: Definition) -> Iterator[PipelineBook]:
    """The state of a pipeline and its reports."""
    place = bound_place(definition.state_root())
    with place.open_stores() as (objects, metadata):
        yield PipelineBook(definition.name, place.metadata_root, objects, metadata)


# What is due


def plan_run(definition: Definition, state: PipelineState, now_us: int) -> list[PlannedStep]:
    """Every step in its order, and whether the next run takes it."""
    return [_planned(definition, step, state, now_us) for step in definition.ordered()]


def _planned(definition: Definition, step: Step, state: PipelineState, now_us: int) -> PlannedStep:
    is_due, why, due_us = _due(step, state, now_us)
    on = tuple(definition.places_of(step))
    return PlannedStep(step=step.name, do=step.do, on=on, is_due=is_due, why=why, due_us=due_us)


def _due(step: Step, state: PipelineState, now_us: int) -> tuple[bool, str, int | None]:
    if state.run is not None:
        tasks = [one for one in state.run.tasks if one.step == step.name]
        waiting = sum(one.status == "waiting" for one in tasks)
        if waiting:
            return True, f"the run {state.run.id} is not over: {waiting} of {len(tasks)} tasks are left", None
        return False, f"done in the run {state.run.id}, which goes on" if tasks else f"not in {state.run.id}", None
    done_us, every = state.done_us.get(step.name), step.every_seconds
    before = _UNDONE.get(state.undone.get(step.name, "done"))
    if every is None:
        return True, "in every run" if before is None else f"in every run; the last time it {before}", None
    if before is not None:
        return True, f"the last time it {before}", now_us
    if done_us is None:
        return True, "never done", now_us
    due_us = done_us + int(every * _US)
    ago = f"last done {_time_text((now_us - done_us) / _US)} ago, every {step.every}"
    return due_us <= now_us, ago, due_us


def next_due_us(
    definition: Definition, state: PipelineState, now_us: int, not_before_us: Mapping[str, int] = MappingProxyType({})
) -> int | None:
    """When a step with `every` is due next, some not before their time; None where there is none."""
    planned = ((one.step, one.due_us) for one in plan_run(definition, state, now_us))
    times = [max(due_us, not_before_us.get(name, 0)) for name, due_us in planned if due_us is not None]
    return now_us if state.run is not None else min(times, default=None)


class Pauses:
    """For a process that stays: steps that were not done are due again, but not at once.

    After a minute, then after twice as long each time, up to an hour or the `every` of the step.
    """

    def __init__(self) -> None:
        self.not_before_us: dict[str, int] = {}
        self._failures: dict[str, int] = {}

    def note(self, definition: Definition, report: PipelineReport, now_us: int) -> None:
        """What became of the steps in a run that ended now."""
        not_done = {one.step for one in report.steps if one.status != "done"}
        for name in {one.step for one in report.steps} - not_done:
            self._failures.pop(name, None)
            self.not_before_us.pop(name, None)
        for name in not_done:
            failures = self._failures[name] = self._failures.get(name, 0) + 1
            step = definition.step(name)
            every_seconds = (step and step.every_seconds) or _LONGEST_FAILURE_PAUSE_SECONDS
            doubled_seconds = _FIRST_PAUSE_SECONDS * 2 ** min(failures - 1, 10)
            pause_seconds = min(doubled_seconds, _LONGEST_FAILURE_PAUSE_SECONDS, every_seconds)
            self.not_before_us[name] = now_us + int(pause_seconds * _US)


def _time_text(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


# A run


def run_pipeline(
    definition: Definition,
    session: Callable[[], SparkSession],
    *,
    on_progress: OnProgress = ignore_progress,
    take_over: bool = False,
    clock: Clock | None = None,
    sleep: Sleep = time.sleep,
) -> PipelineReport:
    """Takes all steps that are due, or those that are left of a run that was interrupted.

    `session` is asked for a session when the first step needs one. HeldError if the pipeline is being run.
    """
    turn_on_output()
    check_options(definition)
    clock = clock or SystemClock()
    with open_book(definition) as book, book.held(clock, take_over=take_over) as held:
        return _Run(definition, held, session, on_progress, clock, sleep).all()


class _Run:
    def __init__(
        self,
        definition: Definition,
        held: HeldBook,
        session: Callable[[], SparkSession],
        on_progress: OnProgress,
        clock: Clock,
        sleep: Sleep,
    ) -> None:
        self._definition = definition
        self._held = held
        self._session = session
        self._on_progress = on_progress
        self._clock = clock
        self._sleep = sleep

    def all(self) -> PipelineReport:
        began = self._clock.monotonic()
        is_resumed = self._held.book.read().run is not None
        run = self._held.begin(self._tasks)
        tell(_logger, "run_started", pipeline=self._definition.name, run=run.id, tasks=len(run.tasks))
        for number, task in enumerate(run.tasks):
            if task.status == "waiting":
                run = self._held.record(number, self._taken(run, number, task))
        report = self._report(run, is_resumed, round(self._clock.monotonic() - began, 3))
        key = self._held.book.put_report(run.id, _REPORT, {**msgspec.to_builtins(report), "ok": report.ok})
        self._held.end(run)
        self._held.book.prune(self._definition.keep_reports, run.id)
        tell(_logger, "run_ended", pipeline=self._definition.name, run=run.id, ok=report.ok, seconds=report.seconds)
        return msgspec.structs.replace(report, report=key)

    def _tasks(self, state: PipelineState) -> tuple[TaskState, ...]:
        """The steps that are due, on each of their places, tables on each topic."""
        due = {one.step for one in plan_run(self._definition, state, self._clock.now_us()) if one.is_due}
        return tuple(task for step in self._definition.ordered() if step.name in due for task in self._tasks_of(step))

    def _tasks_of(self, step: Step) -> Iterator[TaskState]:
        for name in self._definition.places_of(step):
            place = self._definition.places[name]
            topics: list[str | None] = [None]
            if step.do == "table":
                with suppress(TidelogError):  # the step says so in its turn, and ends no other one
                    topics = [*all_topics_of(self._definition, place)] or topics
            for topic in topics:
                yield TaskState(step=step.name, on=name, topic=topic)

    # A task

    def _taken(self, run: RunState, number: int, task: TaskState) -> TaskState:
        """The task with what became of it. Its report is in the store by then."""
        step = self._definition.step(task.step)
        if step is None or task.on not in self._definition.places:
            return msgspec.structs.replace(task, status="skipped", message="it is no longer declared")
        missing = self._missing(step, run)
        if missing is not None:
            return msgspec.structs.replace(task, status="skipped", message=missing)
        began, attempts = self._clock.monotonic(), _Attempts(self._request(run, step, task), self._sleep)
        status: Status = "done"
        message = kind = None
        try:
            report = attempts.made()
        except TidelogError as error:
            status, message, kind = "failed", str(error), type(error).__name__
        else:
            self._held.book.put_report(run.id, f"{number:05}", {**msgspec.to_builtins(report), "ok": report.ok})
            if not report.ok:
                status, message = "found", _what_was_found(report)
        seconds = round(self._clock.monotonic() - began, 3)
        tell(_logger, "step_ended", step=task.step, on=task.subject, outcome=status, error=kind, seconds=seconds)
        return msgspec.structs.replace(
            task, status=status, message=message, error=kind, attempts=attempts.count, seconds=seconds
        )

    def _missing(self, step: Step, run: RunState) -> str | None:
        """Why a step has to wait: a step of this run that comes before and was not done."""
        before = {step.after} if isinstance(step.after, str) else {*step.after}
        undone = next((one for one in run.tasks if one.step in before and one.status != "done"), None)
        if undone is None:
            return None
        return f"{undone.step} {_UNDONE['found'] if undone.status == 'found' else 'was not done'}"

    def _request(self, run: RunState, step: Step, task: TaskState) -> Request:
        def on_progress(progress: Progress) -> None:
            self._on_progress(Progress(f"{step.name} {task.subject}: {progress.step}", progress.done, progress.total))

        return Request(
            definition=self._definition,
            step=step,
            place_name=task.on,
            topic=task.topic,
            run=run.id,
            began_us=run.began_us,
            session=self._session,
            on_progress=on_progress,
        )

    # The report

    def _report(self, run: RunState, is_resumed: bool, seconds: float) -> PipelineReport:
        results, reports = [], []
        for number, task in enumerate(run.tasks):
            has_report = task.status in ("done", "found")
            found = self._held.book.report(run.id, f"{number:05}") if has_report else None
            results.append(self._result(task, f"{run.id}/{number:05}.json" if found is not None else None))
            reports.append((task, found or {}))
        failed = [
            Finding(subject=f"{one.step} {one.subject}", kind="step", message=one.message or one.status)
            for one in run.tasks
            if one.status not in ("done", "found")
        ]
        return PipelineReport(
            job="run",
            pipeline=self._definition.name,
            run=run.id,
            is_resumed=is_resumed,
            steps=tuple(results),
            reconciliations=tuple(one for _, each in reports for one in _kept(each, "reconciliations", Reconciliation)),
            findings=(*failed, *(one for _, each in reports for one in _kept(each, "findings", Finding))),
            notes=tuple(f"{task.step} {note}" for task, each in reports for note in each.get("notes", ())),
            seconds=seconds,
        )

    def _result(self, task: TaskState, report: str | None) -> StepResult:
        step = self._definition.step(task.step)
        return StepResult(
            step=task.step,
            do="" if step is None else step.do,
            on=task.on,
            topic=task.topic,
            status=task.status,
            attempts=task.attempts,
            seconds=task.seconds,
            message=task.message,
            error=task.error,
            report=report,
        )


def _kept(report: dict[str, Any], name: str, kind: type[Any]) -> Iterator[Any]:
    return (msgspec.convert(one, kind) for one in report.get(name, ()))


def _what_was_found(report: JobReport) -> str:
    found = len(report.findings)
    return f"problems found: {found}" if found else "what came out is not what went in"


class _Attempts:
    """A step, as often as it takes or is allowed."""

    def __init__(self, request: Request, sleep: Sleep) -> None:
        self.count = 0
        self._request = request
        self._sleep = sleep
        self._report: JobReport | None = None

    def made(self) -> JobReport:
        """The report of the attempt that succeeded; the error of the last one otherwise."""
        work = with_backoff(self._try, _LONGEST_PAUSE_SECONDS, self._failed)
        while True:
            pause_seconds = work()
            if self._report is not None:
                return self._report
            self._sleep(pause_seconds)

    def _try(self) -> float:
        self.count += 1
        with _told(self._request.step):
            self._report = do(self._request)
        return 0.0

    def _failed(self, error: TidelogError) -> None:
        if self.count > self._request.step.retries or not isinstance(error, _WORTH_RETRYING):
            raise error
        tell(_logger, "step_retried", step=self._request.step.name, attempt=self.count, reason=str(error))


@contextmanager
def _told(step: Step) -> Iterator[None]:
    """Everything that a step may raise as an error of ours: what Spark or a function of the user's raises may pass."""
    try:
        if needs_spark(step):
            with told_in_our_words(step.name):
                yield
        else:
            yield
    except (FencedError, ClosedError) as error:
        raise ConflictError(f"{step.name}: {error.message}", hint=error.hint) from error
    except GatewayError as error:
        raise RetryError(error.message, operation=step.name, hint=error.hint) from error  # it may have been killed
    except TidelogError:
        raise
    except Exception as error:
        is_sparks = type(error).__module__.startswith(("pyspark", "py4j", "grpc"))
        if step.do != "python" and not is_sparks and not (needs_spark(step) and java_has_died()):
            raise
        what = step.function if step.do == "python" else "Spark"
        raise RetryError(f"{what} raised {_what_is_said(error)}", operation=step.name) from error


def _what_is_said(error: Exception) -> str:
    """An error of Java's has its words there: they are lost with it."""
    with suppress(Exception):
        return f"{type(error).__name__}: {first_line(error)}"
    return f"{type(error).__name__}, and Java has ended"
