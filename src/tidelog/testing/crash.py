"""The crash driver: kills a workload at every changing call in turn and checks what is found afterwards.

    def workload(files: FaultyFiles, history: History) -> None: ...   # uses the product, records what it was promised
    def check(files: FaultyFiles, history: History) -> None: ...      # opens the product again, asserts the promises

    crash_everywhere(workload, check)

Invariants
- Cut points are tried from 1 on, until a run ends without meeting its own. Runs may differ a little in their number of
  calls (a background thread gathers more or less into one write).
- The end of the workload is a cut point too: the power may fail after the last call.
- Whatever a run raises after its crash is the crash: its process is dead. What it raises before is a failure.
- A failure names the crash point, and a command that plays only that one again.

The driver knows nothing of files: a machine is whatever can crash, several stores that share one `Faults` included.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

from tidelog.testing.crash_plan import CrashPlan, CrashPoint
from tidelog.testing.faults import Call
from tidelog.testing.faulty_files import FaultyFiles
from tidelog.testing.history import History
from tidelog.testing.survival import Policy
from tidelog.testing.threads import Outcome, quiet_crashes, run_aside

REPLAY_VARIABLE = "TIDELOG_CRASH_POINT"

_DEFAULT_PLAN = CrashPlan()
_REPLAYS = 10
_CALLS_SHOWN = 12
_SPARE_CALLS = 1000


class Machine(Protocol):
    """What the driver asks of a thing that crashes."""

    @property
    def calls(self) -> list[Call]: ...

    @property
    def crashed(self) -> bool: ...

    @property
    def in_flight_bytes(self) -> int:
        """Size of the write that the crash interrupted; 1 for a call that can only be done or not done."""
        ...

    def crash(self) -> None: ...

    def after_crash(self, policy: Policy, *, seed: int, torn_bytes: int) -> Self: ...

    def image(self) -> object:
        """Equal for two machines of which only one needs to be checked."""
        ...


AnyMachine = TypeVar("AnyMachine", bound=Machine)
Step = Callable[[AnyMachine, History], None]


@dataclass(frozen=True)
class CrashSummary:
    """What was tried. `abandoned_threads` of dead runs did not end by themselves in time."""

    cut_points: int
    runs: int
    checks: int
    abandoned_threads: int


class BrokenPromiseError(AssertionError):
    """The check failed after the crash at `point`."""

    def __init__(self, message: str, point: CrashPoint) -> None:
        super().__init__(message)
        self.point = point


def crash_everywhere(
    workload: Step[FaultyFiles], check: Step[FaultyFiles], plan: CrashPlan = _DEFAULT_PLAN
) -> CrashSummary:
    """Runs `workload` on an empty disk to its death at every changing call, and `check` on what is left of it."""
    return crash_machine_everywhere(lambda crash_at: FaultyFiles(crash_at=crash_at), workload, check, plan)


def crash_machine_everywhere(
    start: Callable[[int | None], AnyMachine],
    workload: Step[AnyMachine],
    check: Step[AnyMachine],
    plan: CrashPlan = _DEFAULT_PLAN,
) -> CrashSummary:
    """The same for any machine: `start` makes one that crashes at the given call (None: never).

    A disk that is not empty: `start=lambda crash_at: prepared.after_crash("keep", crash_at=crash_at)`.
    """
    driver = _Driver(start, workload, check, plan)
    with quiet_crashes():
        replay = os.environ.get(REPLAY_VARIABLE)
        if replay:
            return driver.replay(CrashPoint.parse(replay))
        return driver.cut_everywhere()


class _Driver(Generic[AnyMachine]):
    def __init__(
        self,
        start: Callable[[int | None], AnyMachine],
        workload: Step[AnyMachine],
        check: Step[AnyMachine],
        plan: CrashPlan,
    ) -> None:
        self._start = start
        self._workload = workload
        self._check = check
        self._plan = plan
        self._cut_points = 0
        self._runs = 0
        self._checks = 0
        self._abandoned_threads = 0

    def cut_everywhere(self) -> CrashSummary:
        whole_run, _ = self._run(None)
        whole_run.crash()
        usual_calls = len(whole_run.calls)
        for call in itertools.count(1, self._plan.every):
            if call > 2 * usual_calls + _SPARE_CALLS:
                raise AssertionError(f"the workload made {usual_calls} calls at first and now more than {call}")
            machine, history = self._run(call)
            is_end = not machine.crashed
            if not is_end or call > usual_calls:
                self._check_remains(call, machine, history)
            if is_end and call > usual_calls:
                break
        return self._summary()

    def replay(self, point: CrashPoint) -> CrashSummary:
        """One crash, several times: a workload with threads may not come by the same way at once."""
        for _ in range(_REPLAYS):
            machine, history = self._run(point.call)
            machine.crash()
            self._check_one(point, machine, _remains(machine, point), history)
        self._cut_points = 1
        return self._summary()

    def _run(self, crash_at: int | None) -> tuple[AnyMachine, History]:
        machine, history = self._start(crash_at), History()
        self._runs += 1
        outcome = run_aside(
            lambda: self._workload(machine, history),
            timeout_seconds=self._plan.timeout_seconds,
            is_dead=lambda: machine.crashed,
            grace_seconds=self._plan.grace_seconds,
        )
        self._abandoned_threads += len(outcome.left_behind)
        if not machine.crashed:
            _raise_failure_of(outcome, f"the workload (to be cut at call {crash_at})")
        return machine, history

    def _check_remains(self, call: int, machine: AnyMachine, history: History) -> None:
        # A run that ended by itself dies now, between two calls; threads it left running must not go on.
        machine.crash()
        self._cut_points += 1
        seen: list[object] = []
        for point in self._plan.points(call, machine.in_flight_bytes):
            remains = _remains(machine, point)
            image = remains.image()
            if image not in seen:
                seen.append(image)
                self._check_one(point, machine, remains, history.copy())

    def _check_one(self, point: CrashPoint, machine: AnyMachine, remains: AnyMachine, history: History) -> None:
        self._checks += 1
        outcome = run_aside(lambda: self._check(remains, history), timeout_seconds=self._plan.timeout_seconds)
        try:
            _raise_failure_of(outcome, "the check")
        except Exception as error:
            raise BrokenPromiseError(_explain(point, machine, error), point) from error

    def _summary(self) -> CrashSummary:
        return CrashSummary(self._cut_points, self._runs, self._checks, self._abandoned_threads)


def _remains(machine: AnyMachine, point: CrashPoint) -> AnyMachine:
    return machine.after_crash(point.policy, seed=point.seed, torn_bytes=point.torn_bytes)


def _raise_failure_of(outcome: Outcome, what: str) -> None:
    if outcome.stacks is not None:
        raise AssertionError(f"{what} hangs:\n{outcome.stacks}")
    if outcome.error is not None:
        outcome.error.add_note(f"raised by {what}")
        raise outcome.error


def _explain(point: CrashPoint, machine: Machine, error: BaseException) -> str:
    calls = machine.calls
    place = f"call {calls[-1]}" if len(calls) == point.call else f"the end, after {len(calls)} calls"
    trace = "\n".join(f"    {call}" for call in calls[-_CALLS_SHOWN:])
    return (
        f"after a crash at {place}\n"
        f"  policy {point.policy}, seed {point.seed}, "
        f"{point.torn_bytes} of {machine.in_flight_bytes} bytes of an interrupted write\n"
        f"  {type(error).__name__}: {error}\n"
        f"  replay: {_replay_command(point)}\n"
        f"  the last calls:\n{trace}"
    )


def _replay_command(point: CrashPoint) -> str:
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    command = f"python -m pytest '{test}'" if test else " ".join(["python", *sys.argv])
    return f"{REPLAY_VARIABLE}={point} {command}"
