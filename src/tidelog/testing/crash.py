"""The crash driver: kills a workload at every changing call in turn and checks what the crash left.

    def workload(files: FaultyFiles, history: History) -> None: ...   # uses the product, records what it was promised
    def check(files: FaultyFiles, history: History) -> None: ...      # opens the product again, asserts the promises

    crash_everywhere(workload, check)

Invariants
- Crash points are tried from 1 on, until a run ends without reaching its own. Runs may differ a little in their number
  of calls (a background thread gathers more or less into one write).
- The end of the workload is a crash point too: the power may fail after the last call.
- Anything a run raises after its crash is part of the crash: its process is dead. Anything it raises before is a
  failure.
- A failure names the crash point, and a command that replays only that one.

The driver knows nothing of files: a machine is anything that can crash, including several stores that share one
`Faults`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, Self, TypeVar, cast

from tidelog.clock import Clock, SystemClock
from tidelog.log import shutdown as stopping
from tidelog.testing.faults import Call, Crash, Crashing, Faults
from tidelog.testing.faulty_files import FaultyFiles
from tidelog.testing.faulty_store import DEFAULT_PART_BYTES, FaultyMetadata, FaultyStore
from tidelog.testing.history import History
from tidelog.testing.survival import Policy

# ruff: noqa: ERA001 (comments draw formats and formulas)


# Which crashes to play: at which calls, and what each leaves.
#
# Invariant: a crash point depends on the plan, the call and the size of the interrupted write, on nothing else.


@dataclass(frozen=True)
class CrashPoint:
    """One way to die: at which call, and what the crash leaves."""

    call: int
    policy: Policy
    seed: int
    torn_bytes: int

    def __str__(self) -> str:
        return f"{self.call}:{self.policy}:{self.seed}:{self.torn_bytes}"

    @classmethod
    def parse(cls, text: str) -> CrashPoint:
        """Parses the text of a crash point."""
        call, policy, seed, torn_bytes = text.split(":")
        return cls(int(call), cast(Policy, policy), int(seed), int(torn_bytes))


@dataclass(frozen=True)
class CrashPlan:
    """How thoroughly to test.

    policies         what to examine after each crash; the same remains are checked only once
    seeds            how many remains to draw for each policy that draws
    seed             another number draws other remains
    every            only every n-th call is a crash point, for long workloads
    timeout_seconds  a run or a check that takes longer has failed
    grace_seconds    how long the threads of a dead run may take to end; then they are abandoned
    """

    policies: tuple[Policy, ...] = ("lose", "keep", "tear", "reorder")
    seeds: int = 1
    seed: int = 0
    every: int = 1
    timeout_seconds: float = 300.0
    grace_seconds: float = 30.0

    def points(self, call: int, in_flight_bytes: int) -> Iterator[CrashPoint]:
        """The crash points to examine at `call`."""
        for policy in self.policies:
            # Of a call that is done or is not (a store's counts as one byte), both are looked at.
            outcomes = (0, 1) if in_flight_bytes == 1 else (None,)
            for draw in range(self._draws(policy, in_flight_bytes)):
                for torn_bytes in outcomes:
                    yield self._point(call, policy, self.seed + draw, in_flight_bytes, torn_bytes)

    def _draws(self, policy: Policy, in_flight_bytes: int) -> int:
        """Nothing is drawn for "lose"; for "keep" only how much of the interrupted write is there."""
        is_given = policy == "lose" or (policy == "keep" and in_flight_bytes <= 1)
        return 1 if is_given else self.seeds

    def _point(self, call: int, policy: Policy, seed: int, in_flight_bytes: int, torn_bytes: int | None) -> CrashPoint:
        chance = random.Random(f"{seed}:{call}:{policy}")
        somewhere = chance.randint(0, in_flight_bytes)
        drawn = chance.choice((0, in_flight_bytes, somewhere, somewhere, somewhere))
        return CrashPoint(call, policy, chance.randrange(1 << 32), drawn if torn_bytes is None else torn_bytes)


REPLAY_VARIABLE = "TIDELOG_CRASH_POINT"

_DEFAULT_PLAN = CrashPlan()
_REPLAYS = 10
_CALLS_SHOWN = 12
_SPARE_CALLS = 1000


class Machine(Protocol):
    """The interface between the crash driver and what it crashes."""

    @property
    def calls(self) -> list[Call]:
        """The changing calls so far."""
        ...

    @property
    def crashed(self) -> bool:
        """Whether the process has died."""
        ...

    @property
    def in_flight_bytes(self) -> int:
        """Size of the write that the crash interrupted; 1 for a call that can only be done or not done."""
        ...

    def crash(self) -> None:
        """The process dies now, between two calls."""
        ...

    def after_crash(self, policy: Policy, *, seed: int, torn_bytes: int) -> Self:
        """What a restart finds; this machine stays unchanged."""
        ...

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
        # A run that ended by itself dies now, between two calls; threads it left running must stop.
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


# One machine of several parts for the crash driver: disks of nodes, an object store, a metadata store.
#
#     def workload(world: World, history: History) -> None: ...   # on world.files("a"), world.store and world.metadata
#     def check(world: World, history: History) -> None: ...      # on what is left: the same node again, or node "b"
#
#     cut_world_everywhere(workload, check)
#
# Invariants
# - All parts share one numbering of calls and one death: the process that runs the workload, on any node, dies.
# - The stores are other machines. A crash leaves them unchanged, except that the call at the crash point was done or
#   was not; of the disks it leaves what the policy grants.
# - A world copied from another changes independently of it: one crash can be examined in every way.


class World(Crashing):
    """Disks by node, one object store, one metadata store.

    crash_at    the changing call with this number (from 1), on any part, is the last
    on_call     called with every changing call before it takes effect: "a.write_at", "store.put", "metadata.commit"
    part_bytes  of the store's writers: small ones make cut points inside an object
    multi_key   of the metadata store: False for one that changes one key at a time, as a bucket does
    clock       where objects get their time from; give the same one to the product
    """

    def __init__(
        self,
        *,
        crash_at: int | None = None,
        on_call: Callable[[Call], None] | None = None,
        part_bytes: int = DEFAULT_PART_BYTES,
        multi_key: bool = True,
        clock: Clock | None = None,
    ) -> None:
        self.faults = Faults(crash_at=crash_at, on_call=on_call)
        self.clock = clock or SystemClock()
        self.store = FaultyStore(faults=self.faults, part_bytes=part_bytes, clock=self.clock)
        self.metadata = FaultyMetadata(faults=self.faults, multi_key=multi_key)
        self._disks: dict[str, FaultyFiles] = {}
        self._lock = threading.Lock()

    def files(self, node: str = "a") -> FaultyFiles:
        """The disk of a node; one that is asked for the first time is empty."""
        with self._lock:
            if node not in self._disks:
                self._disks[node] = FaultyFiles(faults=self.faults.sharing(node))
            return self._disks[node]

    def heal(self) -> None:
        """Ends all failures on all parts."""
        for part in self._parts():
            part.heal()

    def end_leases(self) -> None:
        """Every node has been silent for longer than its lease: another one may open what it held.

        For worlds with a real clock; with a ManualClock, `clock.advance(lease_seconds)` is the same.
        """
        self.metadata.end_leases()
        self.store.end_leases()

    def lose_disk(self, node: str = "a") -> Self:
        """The same world after all processes were killed and that node got an empty disk; this one is left as it is."""
        fresh = self.after_crash("keep")
        fresh._disks.pop(node, None)
        return fresh

    # What the crash driver asks

    @property
    def in_flight_bytes(self) -> int:
        """Size of the write that the crash interrupted; 1 for a call of a store, which was done or was not."""
        return max(part.in_flight_bytes for part in self._parts())

    def after_crash(
        self, policy: Policy = "lose", *, seed: int = 0, torn_bytes: int = 0, crash_at: int | None = None
    ) -> Self:
        """The world that is found afterwards; this one is left as it is. `crash_at` cuts the next life short.

        `torn_bytes` of the interrupted write count as written; an interrupted call of a store is done with any of them.
        """
        fresh = type(self)(crash_at=crash_at, clock=self.clock)
        fresh.store = self.store.after_crash(torn_bytes=torn_bytes, faults=fresh.faults)
        fresh.metadata = self.metadata.after_crash(torn_bytes=torn_bytes, faults=fresh.faults)
        for node, disk in self._all_disks().items():
            faults = fresh.faults.sharing(node)
            fresh._disks[node] = disk.after_crash(policy, seed=seed, torn_bytes=torn_bytes, faults=faults)
        return fresh

    def image(self) -> object:
        """Equal for two worlds of which only one needs to be checked."""
        disks = {node: disk.image() for node, disk in self._all_disks().items()}
        return disks, self.store.image(), self.metadata.image()

    def _parts(self) -> list[FaultyFiles | FaultyStore | FaultyMetadata]:
        return [*self._all_disks().values(), self.store, self.metadata]

    def _all_disks(self) -> dict[str, FaultyFiles]:
        with self._lock:
            return dict(self._disks)


def cut_world_everywhere(
    workload: Step[World],
    check: Step[World],
    plan: CrashPlan = _DEFAULT_PLAN,
    start: Callable[[int | None], World] | None = None,
) -> CrashSummary:
    """Runs `workload` in an empty world to its death at every changing call, and `check` on what is left of it.

    `start` makes another world that crashes at the given call: `lambda crash_at: prepared.after_crash("keep",
    crash_at=crash_at)` for one with a past, `lambda crash_at: World(crash_at=crash_at, multi_key=False)`, ...
    """
    return crash_machine_everywhere(start or (lambda crash_at: World(crash_at=crash_at)), workload, check, plan)


# Runs code that may die, hang or leak threads, and isolates the test run from it.
#
# Invariants
# - Nothing that is raised on a thread of a dead run reaches the screen or the test runner.
# - A thread that does not end in time is abandoned: it is a daemon, and the dead disk refuses its every call.


_POLL_SECONDS = 0.02


@dataclass
class Outcome:
    """How it ended: by itself, by raising `error`, or not at all (`stacks` says where it stood)."""

    error: BaseException | None = None
    stacks: str | None = None
    left_behind: list[threading.Thread] = field(default_factory=list)


def run_aside(
    action: Callable[[], None],
    *,
    timeout_seconds: float,
    is_dead: Callable[[], bool] = lambda: False,
    grace_seconds: float = 0.0,
) -> Outcome:
    """Runs `action` on a thread and waits for it; once it `is_dead`, only for the grace, for its threads as well."""
    outcome = Outcome()
    finished = threading.Event()

    def run() -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001  # handed to the caller, who decides
            outcome.error = error
        finally:
            finished.set()

    before = set(threading.enumerate())
    runner = threading.Thread(target=run, name="tidelog-run-aside", daemon=True)
    runner.start()
    if not _wait(finished, is_dead, timeout_seconds):
        outcome.stacks = _stacks_of(set(threading.enumerate()) - before)
    if is_dead():
        outcome.left_behind = _join(before, grace_seconds)
    return outcome


class _Unheard:
    """A hook for uncaught errors that ignores Crash."""

    def __init__(self, hook: Callable[[Any], object]) -> None:
        self._hook = hook

    def __call__(self, arguments: Any, /) -> None:
        if not issubclass(arguments.exc_type, Crash):
            self._hook(arguments)


@contextlib.contextmanager
def quiet_crashes() -> Iterator[None]:
    """Within it, a Crash may silently end a thread or a finalizer: dying is what it is for.

    If threads that began within it are abandoned, also after it: they hit the dead disk when they wake up. Logs that
    are left open are not closed when the interpreter ends: their disk is dead.
    """
    before, open_before = set(threading.enumerate()), stopping.open_logs()
    thread_hook, unraisable_hook = threading.excepthook, sys.unraisablehook
    if not isinstance(thread_hook, _Unheard):
        threading.excepthook, sys.unraisablehook = _Unheard(thread_hook), _Unheard(unraisable_hook)
    try:
        yield
    finally:
        for log in stopping.open_logs() - open_before:
            stopping.no_longer_open(log)
        if before.issuperset(threading.enumerate()):
            threading.excepthook, sys.unraisablehook = thread_hook, unraisable_hook


def _wait(finished: threading.Event, is_dead: Callable[[], bool], timeout_seconds: float) -> bool:
    """Until it has finished or died; False when it did neither in time."""
    deadline = time.monotonic() + timeout_seconds
    while not finished.wait(_POLL_SECONDS) and not is_dead():
        if time.monotonic() > deadline:
            return False
    return True


def _join(before: set[threading.Thread], grace_seconds: float) -> list[threading.Thread]:
    """Waits for the threads that were not there before; those that did not end."""
    deadline = time.monotonic() + grace_seconds
    while True:
        left = [thread for thread in threading.enumerate() if thread not in before]
        seconds = deadline - time.monotonic()
        if not left or seconds <= 0:
            return left
        # A thread is listed a moment before it can be joined, and one that is dying may still start others.
        with contextlib.suppress(RuntimeError):
            left[0].join(seconds)


def _stacks_of(threads: set[threading.Thread]) -> str:
    frames = sys._current_frames()
    return "\n".join(
        f"thread {thread.name}:\n" + "".join(traceback.format_stack(frames[thread.ident]))
        for thread in threads
        if thread.ident in frames
    )
