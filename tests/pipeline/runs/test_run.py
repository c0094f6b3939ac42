"""Runs of a declared pipeline, without Spark: what is due, what is tried again, and what a kill leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from pyspark.sql import SparkSession

import tidelog
from tidelog.cli.app import run as run_command
from tidelog.cli.errors import hint_of
from tidelog.errors import ConfigError, HeldError, LeaseLostError, StoreUnavailableError
from tidelog.findings import Finding
from tidelog.pipeline.jobs.job import JobReport, Reconciliation, Totals
from tidelog.pipeline.runs import run as runs
from tidelog.pipeline.runs.definition import Definition, parse_definition
from tidelog.pipeline.runs.run import PipelineReport, next_due_us, open_book, plan_run, run_pipeline
from tidelog.pipeline.runs.state import LEASE_SECONDS, HeldBook, Holder, PipelineState
from tidelog.pipeline.runs.steps import Request, do
from tidelog.pipeline.session.java import GatewayError
from tidelog.testing import ManualClock

Job = Callable[[Request], JobReport]
CHAIN: list[dict[str, Any]] = [
    {"do": "ship"},
    {"do": "verify", "after": "ship"},
    {"do": "report", "after": ["verify"], "options": {"to": "page.html"}},
]


STAYING = """
name = "nightly"
places.shop.root = "data"
[[steps]]
do = "verify"
every = "2h"
[[steps]]
do = "gc"
every = "1d"
"""


class PassingTime:
    """The module `time` of a process that stays: sleeping takes no time here."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock

    def time_ns(self) -> int:
        return self._clock.now_us() * 1000

    def sleep(self, seconds: float) -> None:
        self._clock.advance(seconds)


class Jobs:
    """Jobs that only note that they ran, or raise what the test wants."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.errors: dict[str, Iterator[BaseException]] = {}
        self.findings: dict[str, Iterator[Finding]] = {}

    def __call__(self, request: Request) -> JobReport:
        error = next(self.errors.get(request.step.name, iter(())), None)
        if error is not None:
            raise error
        self.done.append(request.step.name)
        proof = Reconciliation(subject=request.step.name, went_in=Totals(messages=1))
        found = tuple(islice(self.findings.get(request.step.name, iter(())), 1))
        return JobReport(job=request.step.do, reconciliations=(proof,), notes=("a note",), findings=found)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    """In the place of all kinds of steps."""
    made = Jobs()
    monkeypatch.setattr(runs, "do", made)
    return made


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def _definition(tmp_path: Path, *steps: dict[str, Any], **more: object) -> Definition:
    tidelog.open(tmp_path / "data", store=f"file://{tmp_path}/store", metadata="bucket").close()
    document = {"name": "nightly", "places": {"shop": {"root": str(tmp_path / "data")}}, "steps": [*steps], **more}
    return parse_definition(document, tmp_path)


def _no_spark() -> SparkSession:
    return cast(SparkSession, None)


def _run(definition: Definition, clock: ManualClock, **more: Any) -> PipelineReport:
    return run_pipeline(definition, _no_spark, clock=clock, sleep=lambda _: None, **more)


def _state(definition: Definition) -> PipelineState:
    with open_book(definition) as book:
        return book.read()


def _statuses(report: PipelineReport) -> dict[str, str]:
    return {one.step: one.status for one in report.steps}


def test_run_takes_all_steps_in_order_and_reports_them_as_one(tmp_path: Path, jobs: Jobs, clock: ManualClock) -> None:
    """One report has the proofs and notes of all steps, and is in the store."""
    definition = _definition(tmp_path, *reversed(CHAIN))
    report = _run(definition, clock)
    assert jobs.done == ["ship", "verify", "report"]
    assert report.ok
    assert [one.subject for one in report.reconciliations] == jobs.done
    assert report.notes[0] == "ship a note"
    with open_book(definition) as book:
        kept = book.report(report.run, "report")
        assert kept is not None
        assert (kept["ok"], len(kept["steps"])) == (True, 3)
    assert _state(definition).run is None
    assert _state(definition).holder is None


def test_step_is_due_by_its_time_since_it_was_done(tmp_path: Path, jobs: Jobs, clock: ManualClock) -> None:
    """`every` counts from the begin of the run in which it was done; without it a step is in every run."""
    definition = _definition(tmp_path, {"do": "ship"}, {"do": "verify", "every": "1h"})
    _run(definition, clock)
    clock.advance(3599)
    _run(definition, clock)
    assert jobs.done == ["ship", "verify", "ship"]
    (ship, verify) = plan_run(definition, _state(definition), clock.now_us())
    assert (ship.is_due, ship.why) == (True, "in every run")
    assert (verify.is_due, verify.why) == (False, "last done 60.0 min ago, every 1h")
    due_us = next_due_us(definition, _state(definition), clock.now_us())
    assert due_us is not None
    clock.advance((due_us - clock.now_us()) / 1_000_000)
    _run(definition, clock)
    assert jobs.done[3:] == ["ship", "verify"]


def test_failed_step_skips_what_comes_after_it_and_is_due_again(tmp_path: Path, jobs: Jobs, clock: ManualClock) -> None:
    """Loses, without this: a table made of what was not verified, and a step that nobody repeats."""
    steps = [{**one, "every": "1d"} for one in CHAIN]
    definition = _definition(tmp_path, *steps, {"do": "gc"})
    jobs.errors["verify"] = iter([ConfigError("no such thing")])
    report = _run(definition, clock)
    assert _statuses(report) == {"ship": "done", "verify": "failed", "report": "skipped", "gc": "done"}
    assert not report.ok
    assert [(one.subject, one.message) for one in report.findings] == [
        ("verify shop", "no such thing"),
        ("report shop", "verify was not done"),
    ]
    assert _statuses(_run(definition, clock)) == {"verify": "done", "report": "done", "gc": "done"}


def test_step_that_finds_damage_stops_what_comes_after_it(tmp_path: Path, jobs: Jobs, clock: ManualClock) -> None:
    """Loses, without this: what a verification found damaged, to the collection behind it. The step is due again."""
    damage = Finding(subject="shop/orders", message="a frame is damaged")
    steps: list[dict[str, Any]] = [
        {"do": "verify", "every": "1d"},
        {"do": "gc", "every": "1d", "after": "verify"},
        {"do": "ship"},
    ]
    definition = _definition(tmp_path, *steps)
    jobs.findings["verify"] = iter([damage, damage])
    report = _run(definition, clock)
    assert _statuses(report) == {"verify": "found", "gc": "skipped", "ship": "done"}
    assert [one.message for one in report.steps] == ["problems found: 1", None, "verify found something wrong"]
    assert not report.ok
    assert [one.subject for one in report.findings] == ["gc shop", "shop/orders"]
    assert [one.subject for one in report.reconciliations] == ["verify", "ship"]
    planned = plan_run(definition, _state(definition), clock.now_us())
    assert [(one.is_due, one.why) for one in planned] == [
        (True, "the last time it found something wrong"),
        (True, "in every run"),
        (True, "the last time it was skipped"),
    ]
    assert _statuses(_run(definition, clock))["gc"] == "skipped"
    assert _statuses(_run(definition, clock)) == {"verify": "done", "gc": "done", "ship": "done"}
    assert not plan_run(definition, _state(definition), clock.now_us())[0].is_due


def test_step_whose_output_is_not_its_input_stops_what_comes_after_it(
    tmp_path: Path, jobs: Jobs, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table that lacks a message is no table to go on with, although nothing was found damaged."""
    definition = _definition(tmp_path, {"do": "ship"}, {"do": "gc", "after": "ship"})
    unequal = Reconciliation(subject="shop/orders", went_in=Totals(messages=2), came_out=Totals(messages=1))
    monkeypatch.setattr(runs, "do", lambda _: JobReport(job="ship", reconciliations=(unequal,)))
    report = _run(definition, clock)
    assert _statuses(report) == {"ship": "found", "gc": "skipped"}
    assert report.steps[0].message == "what came out is not what went in"


def test_finding_is_the_exit_code_and_in_the_table_of_steps(
    tmp_path: Path, jobs: Jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cron sees 1, and a user which step found something and what waits for it, in `run` and in `plan`."""
    tidelog.open(tmp_path / "data").close()
    file = tmp_path / "pipeline.toml"
    file.write_text(STAYING + 'after = "verify"\n')
    jobs.findings["verify"] = iter([Finding(subject="shop/orders", message="a frame is damaged")])
    assert run_command(["--json", "pipeline", "run", str(file)]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [one["status"] for one in report["steps"]] == ["found", "skipped"]
    assert run_command(["--json", "pipeline", "plan", str(file)]) == 0
    assert "found something wrong" in capsys.readouterr().out
    assert run_command(["--json", "pipeline", "run", str(file)]) == 0


def test_finding_is_the_exit_code_also_if_another_step_may_be_tried_again(
    tmp_path: Path, jobs: Jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    """4 says "try again later", and a scheduler that does so would not show that something is damaged."""
    tidelog.open(tmp_path / "data").close()
    file = tmp_path / "pipeline.toml"
    file.write_text(STAYING + "retries = 0\n")
    jobs.errors["gc"] = iter([StoreUnavailableError("away")])
    jobs.findings["verify"] = iter([Finding(subject="shop/orders", message="a frame is damaged")])
    assert run_command(["--json", "pipeline", "run", str(file)]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [one["status"] for one in report["steps"]] == ["found", "failed"]


def test_run_killed_behind_a_finding_still_stops_what_comes_after_it(
    tmp_path: Path, jobs: Jobs, clock: ManualClock
) -> None:
    """The next process knows what was found, skips the same, and reports it; a later run looks again."""
    steps = [{"do": "verify"}, {"do": "ship"}, {"do": "gc", "after": "verify"}]
    definition = _definition(tmp_path, *steps)
    jobs.findings["verify"] = iter([Finding(subject="shop/orders", message="a frame is damaged")])
    jobs.errors["ship"] = iter([KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        _run(definition, clock)
    report = _run(definition, clock)
    assert _statuses(report) == {"verify": "found", "ship": "done", "gc": "skipped"}
    assert "shop/orders" in [one.subject for one in report.findings]
    assert _run(definition, clock).ok


def test_what_may_pass_is_tried_again_as_often_as_the_step_says(tmp_path: Path, jobs: Jobs, clock: ManualClock) -> None:
    """A store that is away for a moment costs a pause; bad input costs none."""
    pauses: list[float] = []
    definition = _definition(tmp_path, {"do": "ship", "retries": 2})
    away = [StoreUnavailableError("away")] * 3
    jobs.errors["ship"] = iter(away[:2])
    report = run_pipeline(definition, _no_spark, clock=clock, sleep=pauses.append)
    assert (report.steps[0].status, report.steps[0].attempts, len(pauses)) == ("done", 3, 2)
    jobs.errors["ship"] = iter(away)
    report = _run(definition, clock)
    assert (report.steps[0].status, report.steps[0].error) == ("failed", "StoreUnavailableError")
    jobs.errors["ship"] = iter([ConfigError("wrong")])
    assert _run(definition, clock).steps[0].attempts == 1


def test_function_that_exits_fails_its_step_and_not_the_run(tmp_path: Path, clock: ManualClock) -> None:
    """Loses, without this: the steps after it, with an exit code of 0 that tells cron that all is well."""
    (tmp_path / "exiting_jobs.py").write_text("import sys\n\n\ndef end(spark, context):\n    sys.exit(0)\n")
    ends = {"do": "python", "function": "exiting_jobs:end"}
    report = _run(_definition(tmp_path, ends, {"do": "report", "options": {"to": "page.html"}}), clock)
    assert _statuses(report) == {"python": "failed", "report": "done"}
    assert (report.steps[0].attempts, report.steps[0].error) == (3, "RetryError")
    assert "SystemExit: 0" in str(report.steps[0].message)


def test_java_that_is_killed_while_it_starts_or_speaks_is_tried_again(
    tmp_path: Path, jobs: Jobs, clock: ManualClock
) -> None:
    """Java that has ended may have been killed, also before it was ready; an error of its whose words went with it is
    one like any other. What is known not to pass is not tried again."""
    definition = _definition(tmp_path, {"do": "verify", "retries": 2})
    jobs.errors["verify"] = iter([GatewayError("Java has ended"), _WordlessError()])
    assert (_run(definition, clock).ok, jobs.done) == (True, ["verify"])
    jobs.errors["verify"] = iter([_WordlessError()] * 3)
    report = _run(definition, clock)
    assert (report.steps[0].error, report.steps[0].attempts) == ("RetryError", 3)
    assert "Spark raised _WordlessError, and Java has ended" in (report.steps[0].message or "")


class _WordlessError(Exception):
    """An error of Spark's, whose words are asked for in Java."""

    __module__ = "py4j.protocol"

    def __str__(self) -> str:
        raise ConnectionRefusedError


@pytest.mark.parametrize("killed", ["ship", "verify", "report"])
def test_killed_run_goes_on_where_it_was(tmp_path: Path, jobs: Jobs, clock: ManualClock, killed: str) -> None:
    """The next one has the same name, does what is left, and its report has the proofs of both."""
    definition = _definition(tmp_path, *CHAIN)
    jobs.errors[killed] = iter([KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        _run(definition, clock)
    first = _state(definition).run
    assert first is not None
    planned = plan_run(definition, _state(definition), clock.now_us())
    assert [one.is_due for one in planned] == [one["do"] not in jobs.done for one in CHAIN]
    clock.advance(10)
    report = _run(definition, clock)
    assert jobs.done == ["ship", "verify", "report"]
    assert (report.run, report.is_resumed, report.ok) == (first.id, True, True)
    assert [one.subject for one in report.reconciliations] == jobs.done
    assert _run(definition, clock).run != first.id


def test_one_run_at_a_time(tmp_path: Path, jobs: Jobs, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run is told who runs it. One that was paused for longer than its lease changes nothing any more."""
    definition = _definition(tmp_path, *CHAIN)
    taken: list[PipelineReport] = []

    def meanwhile(request: Request) -> JobReport:
        monkeypatch.setattr(runs, "do", jobs)
        with pytest.raises(HeldError, match=r"the pipeline is run on .*pid") as held:
            _run(definition, clock)
        assert "--take-over takes it at once" in str(hint_of(held.value))
        clock.advance(LEASE_SECONDS)
        taken.append(_run(definition, clock))
        return jobs(request)

    monkeypatch.setattr(runs, "do", meanwhile)
    with pytest.raises(LeaseLostError, match="taken over"):
        _run(definition, clock)
    assert taken[0].ok
    assert _state(definition).run is None


def test_process_of_another_container_is_not_taken_for_dead(
    tmp_path: Path, jobs: Jobs, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loses, without this: a run beside one in a container with the same host name, whose process is not to be seen
    from here. One that died here is followed at once."""
    definition = _definition(tmp_path, *CHAIN)
    ended = subprocess.Popen(["true"])
    ended.wait()
    real, space = HeldBook._holder, "pid:[another]"

    def holder(held: HeldBook) -> Holder:
        with monkeypatch.context() as patch:
            if space:
                patch.setattr(os, "readlink", lambda _: space)
            return msgspec.structs.replace(real(held), pid=ended.pid)

    monkeypatch.setattr(HeldBook, "_holder", holder)
    monkeypatch.setattr(HeldBook, "release", lambda _: None)
    assert _run(definition, clock).ok
    with pytest.raises(HeldError):
        _run(definition, clock)
    clock.advance(LEASE_SECONDS)
    space = ""
    for _ in range(2):
        assert _run(definition, clock).ok


def test_place_that_cannot_say_its_topics_fails_its_own_step_alone(
    tmp_path: Path, jobs: Jobs, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loses, without this: every step of a run, if one place is out of reach. A place without topics is done, too."""
    steps: list[dict[str, Any]] = [
        {"do": "ship", "on": "shop"},
        {"do": "table", "options": {"to": "tables/{topic}"}, "every": "1h"},
        {"do": "gc", "on": "shop"},
    ]
    places = {name: {"root": str(tmp_path / name)} for name in ("lost", "empty")}
    definition = _definition(tmp_path, *steps, places={"shop": {"root": str(tmp_path / "data")}, **places})
    tidelog.open(tmp_path / "empty").close()
    with tidelog.open(tmp_path / "data") as log:
        log.topic("shop/orders").append(b"x")
    monkeypatch.setattr(runs, "do", lambda request: (do if request.place_name in places else jobs)(request))
    report = _run(definition, clock)
    assert [(one.step, one.on, one.topic, one.status) for one in report.steps] == [
        ("ship", "shop", None, "done"),
        ("table", "shop", "shop/orders", "done"),
        ("table", "lost", None, "failed"),
        ("table", "empty", None, "done"),
        ("gc", "shop", None, "done"),
    ]
    assert "no such directory" in report.findings[0].message
    assert f"table there are no topics in {tmp_path / 'empty'}" in report.notes


def test_process_that_stays_waits_longer_each_time_for_a_step_that_fails(
    tmp_path: Path, jobs: Jobs, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loses, without this: a processor and the reports of all good runs, to a step that fails at once, again and
    again. One that takes turns with it keeps its times."""
    tidelog.open(tmp_path / "data").close()
    file = tmp_path / "pipeline.toml"
    file.write_text(STAYING)
    began_us = clock.now_us()
    tried: list[int] = []

    def fail(request: Request) -> JobReport:
        if request.step.name != "verify":
            return jobs(request)
        tried.append(round((clock.now_us() - began_us) / 60_000_000))
        if len(tried) == 9:
            raise KeyboardInterrupt
        if len(tried) == 8:
            return jobs(request)
        raise ConfigError("no such thing")

    monkeypatch.setattr(runs, "do", fail)
    monkeypatch.setattr("tidelog.cli.pipeline.run.time", PassingTime(clock))
    monkeypatch.setattr(
        "tidelog.pipeline.runs.run.run_pipeline", lambda found, _, **__: run_pipeline(found, _no_spark, clock=clock)
    )
    assert run_command(["pipeline", "run", "--every", str(file)]) == 130
    assert tried == [0, 1, 3, 7, 15, 31, 63, 123, 243]
    assert jobs.done == ["gc", "verify"]


def test_reports_of_old_runs_go(tmp_path: Path, jobs: Jobs, clock: ManualClock) -> None:
    """As many as the definition says are kept."""
    definition = _definition(tmp_path, {"do": "ship"}, keep_reports=2)
    names = []
    for _ in range(4):
        names.append(_run(definition, clock).run)
        clock.advance(1)
    with open_book(definition) as book:
        assert book.runs() == names[-2:]


FUNCTIONS = """
import os, signal
from pathlib import Path

def first(spark, context):
    note("first", context)

def second(spark, context):
    note("second", context)
    if os.environ.get("KILLED"):
        os.kill(os.getpid(), signal.SIGKILL)
    return {"rows": 7}

def note(name, context):
    with Path(context.options["to"]).open("a") as file:
        print(name, *context.topics, *context.once.values(), file=file)
"""
PROGRAM = """
import sys
from tidelog.pipeline.runs.definition import read_definition
from tidelog.pipeline.runs.run import run_pipeline
report = run_pipeline(read_definition(sys.argv[1]), lambda: None)
assert report.ok and report.is_resumed, report
print(report.notes)
"""


def test_killed_process_is_continued_at_once_by_the_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SIGKILL in the second of two functions: the first is not called again, and the second gets the names that it had,
    so that what it writes to topics is stored once. Nobody waits for the lease of a process that is dead, and `plan`
    does not say that it runs."""
    with tidelog.open(tmp_path / "data") as log:
        log.topic("shop/orders").append(b"x")
    (tmp_path / "our_functions.py").write_text(FUNCTIONS)
    options = f'options = {{ to = "{tmp_path}/noted" }}'
    steps = [
        f'[[steps]]\nname = "{one}"\ndo = "python"\nfunction = "our_functions:{one}"\n{options}'
        for one in ("first", "second")
    ]
    file = tmp_path / "pipeline.toml"
    file.write_text("\n".join(['name = "ours"', '[places.shop]\nroot = "data"', *steps]))
    command = [sys.executable, "-c", PROGRAM, str(file)]
    killed = subprocess.run(command, env={**os.environ, "KILLED": "1"}, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert run_command(["pipeline", "plan", str(file)]) == 0
    assert "which has died" in capsys.readouterr().err
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "second rows: 7" in done.stdout
    first, second, again = (tmp_path / "noted").read_text().splitlines()
    assert first.startswith("first shop/orders pipeline-ours-first-shop ")
    assert second == again
