"""`tidelog pipeline run` and `plan`: a declared pipeline, for cron and Airflow or as a process of its own.

Exit codes of a run: 0 when every step was done and found nothing wrong; 1 when a step found something wrong, or what
came out is not what went in; 4 when it is run elsewhere, or a step failed and the next run may succeed; that of the
error of the first step that failed otherwise.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidelog import errors
from tidelog.cli.errors import ExitCode, exit_code_of, exit_code_of_class, hint_of, text_of
from tidelog.cli.output import Output
from tidelog.cli.pipeline.job import MasterOption, progress_bars, spark_for, tell
from tidelog.cli.session import Session
from tidelog.errors import InputError, RetryError, TidelogError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

    from tidelog.pipeline.runs.definition import Definition
    from tidelog.pipeline.runs.run import PipelineReport

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The file that declares the pipeline.")]
_DEFAULT_FILE = Path("pipeline.toml")
_STEP_COLUMNS = ("step", "on", "topic", "status", "attempts", "seconds", "message")
_PLAN_COLUMNS = ("step", "do", "on", "is_due", "why")
_LONGEST_SLEEP_SECONDS = 60.0
_US = 1_000_000


def run(
    session: Session,
    file: FileArgument = _DEFAULT_FILE,
    every: Annotated[
        bool, typer.Option("--every/--once", help="Stay, and run again whenever a step is due by its `every`.")
    ] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Do not wait for a run elsewhere that still shows signs of life.")
    ] = False,
    master: MasterOption = None,
) -> None:
    """Runs the steps of a declared pipeline that are due.

    They share one session of Spark and one report. One run at a time: a second one exits with 4. A run that was killed
    is continued by the next one where it was. With --every it stays, and runs whenever a step is due.
    """
    from tidelog.pipeline.runs.definition import read_definition
    from tidelog.pipeline.runs.run import run_pipeline
    from tidelog.pipeline.runs.steps import check_ready

    definition = read_definition(file)
    check_ready(definition)
    if every and all(step.every is None for step in definition.steps):
        raise InputError("no step says `every`: there is no time to wait for", hint="Leave --every out, or add it")
    with ExitStack() as stack:
        may_be_kept = not every and all(step.do != "python" for step in definition.steps)
        started = _session_of(session, definition, master, stack, may_be_kept=may_be_kept)
        on_progress = stack.enter_context(progress_bars(session.output))
        once = partial(run_pipeline, definition, started, on_progress=on_progress, take_over=take_over)
        if every:
            _run_every(session, definition, once)
        report = once()
    _tell_run(session, report)


def _session_of(
    session: Session, definition: Definition, master: str | None, stack: ExitStack, *, may_be_kept: bool
) -> Callable[[], SparkSession]:
    """Starts Spark when it is first asked for, again if its Java was killed, and ends it with the stack.

    A process that stays has a session of its own: a kept one ends when nothing is done in it for long. So do functions
    of the user: workers of a kept one have imported what they call, as it was then.
    """
    from tidelog.pipeline.session.session import has_ended

    newest = stack.enter_context(ExitStack())
    found: list[SparkSession] = []

    def started() -> SparkSession:
        if not found or has_ended(found[-1]):
            newest.close()  # what is raised later has nothing to do with it
            conf = definition.spark.settings
            chosen = master or definition.spark.master
            spark = spark_for(session.output, definition.name, chosen, may_be_kept=may_be_kept, **conf)
            found[:] = [newest.enter_context(spark)]
        return found[-1]

    return started


def _run_every(session: Session, definition: Definition, once: Callable[[], PipelineReport]) -> None:
    """Runs for ever. What ends a run does not end this: the next one may succeed."""
    from tidelog.pipeline.runs.run import Pauses, next_due_us, open_book

    pauses = Pauses()
    while True:
        try:
            with open_book(definition) as book:
                due_us = next_due_us(definition, book.read(), time.time_ns() // 1000, pauses.not_before_us)
            wait_seconds = max(0.0, ((due_us or 0) - time.time_ns() // 1000) / _US)
            if wait_seconds <= 0:
                report = once()
                pauses.note(definition, report, time.time_ns() // 1000)
                _show_report(session, report)
            else:
                time.sleep(min(wait_seconds, _LONGEST_SLEEP_SECONDS))
        except TidelogError as error:
            if exit_code_of(error) is ExitCode.BAD_INPUT:
                raise
            session.output.note(f"the run ended: {text_of(error)}. {hint_of(error) or ''}")
            time.sleep(_LONGEST_SLEEP_SECONDS)


def _tell_run(session: Session, report: PipelineReport) -> None:
    """What was found is told before a failure that may pass: one who only tries again would not see that."""
    failed = next((one for one in report.steps if one.error is not None), None)
    has_found = any(one.status == "found" for one in report.steps)
    try:
        tell(session, report, _show)
    except typer.Exit:
        if failed is None or failed.error is None:
            raise
        code = exit_code_of_class(getattr(errors, failed.error, RetryError))
        if has_found and code is ExitCode.TRY_LATER:
            raise
        raise typer.Exit(code) from None


def _show_report(session: Session, report: PipelineReport) -> None:
    try:
        tell(session, report, _show)
    except typer.Exit:
        session.output.note(f"the run {report.run} found something wrong")


def _show(output: Output, report: PipelineReport) -> None:
    rows = [{name: getattr(one, name) for name in _STEP_COLUMNS} for one in report.steps]
    if rows:
        output.table(_STEP_COLUMNS, rows, narrower=[("step", "on", "status", "seconds")])
    else:
        output.note("no step is due; `tidelog pipeline plan` says when")
    resumed = ", continued" if report.is_resumed else ""
    output.note(f"run {report.run}{resumed}; its report: {report.report}")


def plan(session: Session, file: FileArgument = _DEFAULT_FILE) -> None:
    """Shows what the next run would do, and why. Changes nothing, and starts no Spark.

    It imports the modules of functions, and looks whether places are there, as a run does before its first step.
    """
    import msgspec

    from tidelog.pipeline.runs.definition import read_definition
    from tidelog.pipeline.runs.run import open_book, plan_run
    from tidelog.pipeline.runs.state import is_over
    from tidelog.pipeline.runs.steps import check_ready

    definition = read_definition(file)
    check_ready(definition)
    with open_book(definition) as book:
        state = book.read()
    now_us = time.time_ns() // 1000
    steps = plan_run(definition, state, now_us)
    if session.as_json:
        holder = None if state.holder is None else msgspec.to_builtins(state.holder)
        session.output.document(
            {
                "pipeline": definition.name,
                "run": None if state.run is None else state.run.id,
                "holder": holder,
                "steps": [msgspec.to_builtins(one) for one in steps],
            }
        )
        return
    rows = [{**msgspec.structs.asdict(one), "on": ", ".join(one.on)} for one in steps]
    session.output.table(_PLAN_COLUMNS, rows)
    if state.holder is not None:
        where = f"on {state.holder.host} (pid {state.holder.pid})"
        is_dead = is_over(state.holder, now_us)
        session.output.note(f"it was run {where}, which has died" if is_dead else f"it is being run {where}")
