"""The crash driver: it finds what is wrong with a log that forgets a sync, and lets an honest one pass."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from tidelog.log import Log
from tidelog.log import shutdown as stopping
from tidelog.testing import (
    BrokenPromiseError,
    CrashPlan,
    CrashPoint,
    FaultyFiles,
    History,
    assert_history,
    crash_everywhere,
    crash_machine_everywhere,
)
from tidelog.testing.crash import quiet_crashes
from tidelog.testing.faults import Crash

DIRECTORY = Path("/toy")
MESSAGE = b"%03d;"
PER_FILE = 4


class ToyLog:
    """Messages of four bytes, four to a file. Its flaws are planted."""

    def __init__(self, files: FaultyFiles, *, syncs_files: bool = True, syncs_names: bool = True) -> None:
        self._files = files
        self._syncs_files = syncs_files
        self._syncs_names = syncs_names
        files.make_directories(DIRECTORY)
        self.messages = self._recover()

    def append(self, message: bytes) -> int:
        """Durable when it returns, if nothing is forgotten."""
        offset = len(self.messages)
        path = DIRECTORY / f"{offset // PER_FILE:03d}"
        if self._files.exists(path):
            file = self._files.open(path, write=True)
        else:
            file = self._files.create(path)
            if self._syncs_names:
                self._files.sync_directory(DIRECTORY)
        file.write_at(offset % PER_FILE * len(message), message)
        if self._syncs_files:
            file.sync()
        file.close()
        self.messages.append(message)
        return offset

    def _recover(self) -> list[bytes]:
        found: list[bytes] = []
        for name in self._files.list(DIRECTORY):
            content = self._files.read(DIRECTORY / name)
            whole = len(content) // 4 * 4
            found += [content[start : start + 4] for start in range(0, whole, 4)]
            file = self._files.open(DIRECTORY / name, write=True)
            file.truncate(whole)
            file.sync()
            file.close()
        return found


def append_all(log: ToyLog, history: History, count: int = 10) -> None:
    """Appends and writes down what was promised."""
    for number in range(count):
        message = MESSAGE % number
        history.attempted("t", message)
        offset = log.append(message)
        history.accepted("t", offset, message)
        history.synced(offset)


def toy_workload(files: FaultyFiles, history: History) -> None:
    append_all(ToyLog(files), history)


def toy_check(files: FaultyFiles, history: History) -> None:
    log = ToyLog(files)
    history.reopened(len(log.messages))
    for offset, message in enumerate(log.messages):
        history.read("after", offset, message)
    assert_history(history)


def test_an_honest_log_passes_at_every_cut() -> None:
    """Each changing call is a cut point, and so is the end."""
    summary = crash_everywhere(toy_workload, toy_check)
    files = FaultyFiles()
    toy_workload(files, History())
    assert summary.cut_points == len(files.calls) + 1
    assert summary.runs == len(files.calls) + 2
    assert summary.checks >= summary.cut_points
    assert summary.abandoned_threads == 0


@pytest.mark.parametrize("flaw", ["syncs_files", "syncs_names"])
def test_a_log_that_forgets_a_sync_is_found(flaw: str) -> None:
    """A message that was promised and lost is reported with the cut point, the policy and a command to replay it."""

    def workload(files: FaultyFiles, history: History) -> None:
        append_all(ToyLog(files, **{flaw: False}), history)

    with pytest.raises(BrokenPromiseError, match="synced is never lost") as failure:
        crash_everywhere(workload, toy_check)
    assert failure.value.point.policy == "lose"
    assert f"TIDELOG_CRASH_POINT={failure.value.point} python -m pytest" in str(failure.value)
    assert "sync_directory /" in str(failure.value)


def test_a_log_that_takes_torn_messages_for_whole_ones_is_found() -> None:
    """Writes are torn in the middle, also the one that the crash interrupted."""

    def check(files: FaultyFiles, history: History) -> None:
        contents = [content for content in files.tree().values() if content is not None]
        assert all(len(content) % 4 == 0 for content in contents), "half a message"

    with pytest.raises(BrokenPromiseError, match="half a message") as failure:
        crash_everywhere(toy_workload, check)
    assert failure.value.point.policy in ("keep", "tear", "reorder")


def test_a_crash_point_replays_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the point in the environment nothing else is run, and the failure is the same."""

    def workload(files: FaultyFiles, history: History) -> None:
        append_all(ToyLog(files, syncs_files=False), history)

    with pytest.raises(BrokenPromiseError) as failure:
        crash_everywhere(workload, toy_check, CrashPlan(policies=("tear",)))
    monkeypatch.setenv("TIDELOG_CRASH_POINT", str(failure.value.point))
    with pytest.raises(BrokenPromiseError) as again:
        crash_everywhere(workload, toy_check)
    assert again.value.point == failure.value.point
    assert str(again.value) == str(failure.value)
    assert crash_everywhere(toy_workload, toy_check).cut_points == 1


def test_a_crash_point_is_written_and_read_as_one_word() -> None:
    """It fits into an environment variable."""
    point = CrashPoint(17, "tear", 12345, 9)
    assert str(point) == "17:tear:12345:9"
    assert CrashPoint.parse(str(point)) == point


def test_the_same_remains_are_checked_once() -> None:
    """Where everything is synced, all policies leave the same."""
    checked: list[FaultyFiles] = []

    def workload(files: FaultyFiles, history: History) -> None:
        files.make_directory(DIRECTORY)
        files.sync_directory(DIRECTORY.parent)

    crash_everywhere(workload, lambda files, history: checked.append(files), CrashPlan(seeds=50))
    trees = sorted(len(files.tree()) for files in checked)
    # At the end and before the first call there is one remainder; between making and syncing there are three:
    # the directory is there and durable, there and not durable, or not there.
    assert trees == [0, 0, 1, 1, 1]


def test_recovery_is_crashed_as_well() -> None:
    """A machine may begin with anything, for example with what a crash left."""
    files = FaultyFiles(crash_at=20, torn_bytes=2)
    history = History()
    with pytest.raises(BaseException, match="crash at call 20"):
        toy_workload(files, history)

    def recover(files: FaultyFiles, _: History) -> None:
        ToyLog(files)

    def check(files: FaultyFiles, _: History) -> None:
        toy_check(files, history.copy())

    summary = crash_machine_everywhere(lambda crash_at: files.after_crash("keep", crash_at=crash_at), recover, check)
    assert summary.cut_points > 2


class ThreadedToy:
    """A writer thread that batches as it likes, so the number of calls differs from run to run."""

    THREAD_NAME = "toy-writer"

    def __init__(self, files: FaultyFiles) -> None:
        self._files = files
        self._log = ToyLog(files)
        self._waiting: queue.Queue[tuple[bytes, Future[int]] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._write, name=self.THREAD_NAME, daemon=True)
        self._thread.start()

    def append(self, message: bytes) -> int:
        """Hands the message over and waits for the answer."""
        answer: Future[int] = Future()
        self._waiting.put((message, answer))
        return answer.result()

    def _write(self) -> None:
        while (item := self._waiting.get()) is not None:
            message, answer = item
            try:
                if time.monotonic_ns() % 3 == 0:
                    self._files.sync_directory(DIRECTORY)
                answer.set_result(self._log.append(message))
            except BaseException:
                answer.set_exception(RuntimeError("the writer is dead"))
                raise

    def close(self) -> None:
        """Ends the thread."""
        self._waiting.put(None)
        self._thread.join()


def threaded_workload(files: FaultyFiles, history: History) -> None:
    log = ThreadedToy(files)
    try:
        for number in range(6):
            history.attempted("t", MESSAGE % number)
            offset = log.append(MESSAGE % number)
            history.accepted("t", offset, MESSAGE % number)
            history.synced(offset)
    finally:
        log.close()


def test_a_workload_with_threads_and_a_varying_number_of_calls_passes() -> None:
    """A thread that dies of the crash ends unheard, and cutting goes on until a run is not met."""
    summary = crash_everywhere(threaded_workload, toy_check)
    assert summary.cut_points > 10
    assert summary.abandoned_threads == 0
    assert not any(thread.name == ThreadedToy.THREAD_NAME for thread in threading.enumerate())


def test_a_dead_run_that_hangs_is_left_behind() -> None:
    """Somebody who waits for a dead writer for ever does not stop the driver."""
    release = threading.Event()

    def workload(files: FaultyFiles, history: History) -> None:
        try:
            toy_workload(files, history)
        finally:
            if files.crashed:
                release.wait(120)

    plan = CrashPlan(grace_seconds=0.02, every=10)
    summary = crash_everywhere(workload, toy_check, plan)
    release.set()
    assert summary.abandoned_threads == summary.cut_points - 1 > 1


def test_a_living_run_that_hangs_is_a_failure() -> None:
    """The report says where it stands."""
    release = threading.Event()

    def workload(files: FaultyFiles, history: History) -> None:
        release.wait(120)

    with pytest.raises(AssertionError, match=r"(?s)the workload .* hangs.*release.wait"):
        crash_everywhere(workload, toy_check, CrashPlan(timeout_seconds=1.0))
    release.set()


def test_a_check_that_hangs_is_a_failure() -> None:
    """Reopening that never returns breaks a promise too."""
    release = threading.Event()

    def check(files: FaultyFiles, history: History) -> None:
        release.wait(120)

    with pytest.raises(BrokenPromiseError, match=r"(?s)the check hangs.*release.wait"):
        crash_everywhere(toy_workload, check, CrashPlan(timeout_seconds=4.0))  # which the workload has too
    release.set()


def test_an_error_before_the_crash_is_a_failure_of_its_own() -> None:
    """A workload that is wrong by itself is not taken for a crash."""

    def workload(files: FaultyFiles, history: History) -> None:
        raise ValueError("wrong by itself")

    with pytest.raises(ValueError, match="wrong by itself"):
        crash_everywhere(workload, toy_check)


def test_a_failure_without_pytest_names_its_own_command(tmp_path: Path) -> None:
    """Whoever uses the kit in a script gets a command that replays, and it does."""
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\n"
        "from tidelog.testing import crash_everywhere\n"
        "def workload(files, history):\n"
        "    files.create(Path('/a'))\n"
        "    history.synced(0)\n"
        "def check(files, history):\n"
        "    assert files.tree() or not history.synced_offsets\n"
        "crash_everywhere(workload, check)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("PYTEST_CURRENT_TEST")
    for _ in range(2):
        command = [sys.executable, str(script)]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        found = re.search(rf"replay: (\w+)=(2:lose:\S+) python {re.escape(str(script))}\n", run.stderr)
        assert found is not None, run.stderr
        environment[found[1]] = found[2]


def test_a_thread_that_dies_when_all_is_over_dies_unheard(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was left behind meets the dead disk later; what else ends a thread is heard as ever."""
    heard: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: heard.append(arguments.exc_type))
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    may_go_on = threading.Event()

    def die(error: BaseException) -> None:
        may_go_on.wait(60)
        raise error

    threads = [threading.Thread(target=die, args=[error], daemon=True) for error in (Crash(), ValueError())]
    for _ in range(2):
        with quiet_crashes():
            for thread in threads:
                if thread.ident is None:
                    thread.start()
    may_go_on.set()
    for thread in threads:
        thread.join(60)
    assert heard == [ValueError]


def test_where_nothing_is_left_behind_all_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks are those of whoever runs the tests."""
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    before = threading.excepthook, sys.unraisablehook
    with quiet_crashes():
        assert (threading.excepthook, sys.unraisablehook) != before
    assert (threading.excepthook, sys.unraisablehook) == before


def test_a_log_on_a_dead_disk_is_not_closed_at_exit() -> None:
    """It cannot be, and would keep those from being closed that can."""
    files = FaultyFiles()
    with quiet_crashes():
        log = Log.open(DIRECTORY, files=files)
        files.crash()
        assert log in stopping.open_logs()
    assert log not in stopping.open_logs()
