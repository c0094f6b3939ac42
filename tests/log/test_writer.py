"""The writer: when it syncs, when it begins a new file, and that a process that stops loses nothing."""

from __future__ import annotations

import signal
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from tests.log.workbench import (
    DIRECTORY,
    Gate,
    Threads,
    calls_of,
    contents,
    everything,
    lines_of,
    numbered,
    payload,
    payloads,
    run_python,
    start_python,
    wait_until,
    wal_paths,
)

from tidelog.errors import ClosedError, LockedError
from tidelog.log import Log, LogSettings
from tidelog.log.binding import BINDING_BYTES
from tidelog.log.frame import HEADER_BYTES
from tidelog.testing import Call, FaultyFiles, ManualClock

FRAME_BYTES = HEADER_BYTES + 20
NEVER_MS = 3_600_000
ONLY_ON_DEMAND = LogSettings(fsync_interval_ms=NEVER_MS)


class TestSyncing:
    """When what was written becomes durable."""

    def test_many_waiting_threads_share_few_syncs(self) -> None:
        """Group commit: 64 threads that wait for their messages while a sync runs are all served by the next one."""
        files = FaultyFiles()
        with Gate(files, "sync") as gate, closing(Log.open(DIRECTORY, ONLY_ON_DEMAND, files=files)) as log:
            with Threads() as threads:
                threads.start(partial(log.append, payload(0), sync=True))
                gate.wait_until_reached()
                for number in range(1, 65):
                    threads.start(partial(log.append, payload(number), sync=True))
                wait_until(lambda: log.next_offset == 65, "64 appends")
                gate.open()
            assert log.durable_offset == 65
            # The one that was held up, and one for those that gathered; two more if some came in late.
            assert len(calls_of(files, "sync")) <= 4

    def test_every_waiting_thread_finds_its_message_durable(self) -> None:
        """Whoever comes back from a synced append finds its offset below the durable one."""
        with closing(Log.open(DIRECTORY, ONLY_ON_DEMAND, files=FaultyFiles())) as log:

            def produce() -> None:
                for _ in range(50):
                    offset = log.append(b"value", sync=True)
                    assert offset < log.durable_offset

            with Threads() as threads:
                for _ in range(16):
                    threads.start(produce)
            assert log.durable_offset == log.next_offset == 800

    def test_the_interval_syncs_what_nobody_waits_for(self) -> None:
        """A message is durable after the interval, though nobody asked."""
        files = FaultyFiles()
        with closing(Log.open(DIRECTORY, LogSettings(fsync_interval_ms=20), files=files)) as log:
            log.append(payload(0))
            wait_until(lambda: log.durable_offset == 1, "the interval")

    def test_nothing_is_synced_before_there_is_a_reason(self) -> None:
        """Without a waiter, within the interval and below the batch size, writing is all that happens."""
        files = FaultyFiles()
        with closing(Log.open(DIRECTORY, ONLY_ON_DEMAND, files=files)) as log:
            log.append_many(payloads(100))
            wait_until(lambda: log.statistics().written_offset == 100, "the write")
            assert log.durable_offset == 0
            assert calls_of(files, "sync") == []

    def test_unsynced_bytes_are_bounded(self) -> None:
        """So many unsynced bytes force a sync, whatever the interval says."""
        settings = LogSettings(fsync_interval_ms=NEVER_MS, fsync_max_batch_bytes=10 * FRAME_BYTES)
        with closing(Log.open(DIRECTORY, settings, files=FaultyFiles())) as log:
            for number in range(9):
                log.append(payload(number))
            wait_until(lambda: log.statistics().written_offset == 9, "the write")
            assert log.durable_offset == 0
            log.append(payload(9))
            wait_until(lambda: log.durable_offset == 10, "the sync of a full batch")

    def test_a_stream_of_appends_does_not_put_off_a_wanted_sync(self) -> None:
        """Somebody who waits is served after a few writes, although there is always more to write."""
        files = FaultyFiles()
        with closing(Log.open(DIRECTORY, ONLY_ON_DEMAND, files=files)) as log:
            writes, writes_at_sync = [0], list[int]()

            def append_more(call: Call) -> None:
                if call.path.endswith(".log") and call.operation == "sync":
                    writes_at_sync.append(writes[0])
                elif call.operation == "write_at" and writes[0] < 200:
                    writes[0] += 1
                    log.append(b"more")

            files.faults.on_call = append_more
            log.append(b"wanted", sync=True)
            wait_until(lambda: writes[0] == 200, "the end of the stream")
            assert writes_at_sync[0] <= 64

    def test_flush_makes_all_durable(self) -> None:
        """After a flush, everything accepted before it is on the disk."""
        files = FaultyFiles()
        with closing(Log.open(DIRECTORY, ONLY_ON_DEMAND, files=files)) as log:
            log.append_many(payloads(1000))
            log.flush()
            assert log.durable_offset == 1000
            with closing(Log.open(DIRECTORY, files=files.after_crash("lose"))) as found:
                assert contents(found) == numbered(1000)

    def test_flushing_twice_costs_one_sync(self) -> None:
        """There is nothing to do for a flush of what is durable already."""
        files = FaultyFiles()
        with closing(Log.open(DIRECTORY, ONLY_ON_DEMAND, files=files)) as log:
            log.append(payload(0))
            log.flush()
            log.flush()
            assert len(calls_of(files, "sync")) == 1

    def test_closing_makes_all_durable(self) -> None:
        """Closing brings everything accepted to the disk."""
        files = FaultyFiles()
        log = Log.open(DIRECTORY, ONLY_ON_DEMAND, files=files)
        log.append_many(payloads(1000))
        log.close()
        log.close()
        with closing(Log.open(DIRECTORY, files=files.after_crash("lose"))) as found:
            assert contents(found) == numbered(1000)


def frame_bytes(directory: Path) -> list[int]:
    """How many bytes of frames each file has, behind its header."""
    return [path.stat().st_size - BINDING_BYTES for path in wal_paths(directory)]


class TestRotation:
    """When a new file is begun."""

    @pytest.mark.parametrize("at_once", [1, 7, 1000])
    def test_a_file_is_full_at_its_size(self, tmp_path: Path, at_once: int) -> None:
        """No file is larger than allowed, none is smaller than needed, and no frame is split."""
        settings = LogSettings(rotate_max_bytes=10 * FRAME_BYTES + 5)
        with closing(Log.open(tmp_path, settings)) as log:
            for first in range(0, 95, at_once):
                log.append_many(payloads(min(at_once, 95 - first), first=first))
            log.flush()
            assert frame_bytes(tmp_path) == [10 * FRAME_BYTES] * 9 + [5 * FRAME_BYTES]
            assert contents(log) == numbered(95)
            assert log.statistics().rotations == 9

    def test_a_message_larger_than_a_file_has_one_for_itself(self, tmp_path: Path) -> None:
        """It is written all the same, and its neighbours go into other files."""
        with closing(Log.open(tmp_path, LogSettings(rotate_max_bytes=100))) as log:
            log.append_many([b"small", b"x" * 500, b"small"])
            log.flush()
            assert frame_bytes(tmp_path) == [21, 516, 21]

    def test_a_file_is_closed_when_it_is_old(self) -> None:
        """The first message after the age goes into a new file."""
        files, clock = FaultyFiles(), ManualClock()
        settings = LogSettings(rotate_max_seconds=60)
        with closing(Log.open(DIRECTORY, settings, files=files, clock=clock)) as log:
            log.append(payload(0), sync=True)
            clock.advance(59)
            log.append(payload(1), sync=True)
            assert log.statistics().files == 1
            clock.advance(1)
            log.append(payload(2), sync=True)
            assert log.statistics().files == 2

    def test_the_age_of_a_file_counts_over_a_reopening(self) -> None:
        """A file that a log goes on in is as old as it was."""
        files, clock = FaultyFiles(), ManualClock()
        settings = LogSettings(rotate_max_seconds=60)
        for number in range(3):
            with closing(Log.open(DIRECTORY, settings, files=files, clock=clock)) as log:
                log.append(payload(number), sync=True)
                assert log.statistics().files == (2 if number == 2 else 1)
            clock.advance(30)

    def test_a_quiet_log_closes_its_old_file_too(self) -> None:
        """Nobody appends, and the file is sealed all the same; an empty log makes no file."""
        files = FaultyFiles()
        with closing(Log.open(DIRECTORY, LogSettings(rotate_max_seconds=1), files=files)) as log:
            log.append(payload(0), sync=True)
            wait_until(lambda: log.statistics().rotations == 1, "the age")
            assert len(calls_of(files, "create")) == 1


APPENDS_AND = """
import os, signal, sys, threading, time
from pathlib import Path
from tidelog.log import Log, LogSettings
{before}
log = Log.open(Path(sys.argv[1]), LogSettings(fsync_interval_ms=3_600_000, rotate_max_bytes=10_000))
for number in range(3000):
    log.append(b"%d" % number)
{then}
"""


def stopped(tmp_path: Path, *, before: str = "", then: str) -> tuple[int, str, int]:
    """Runs a program that appends 3000 messages and then stops: its status, its output and how many were kept."""
    done = run_python(APPENDS_AND.format(before=before, then=then), tmp_path)
    assert not done.stderr, done.stderr
    with closing(Log.open(tmp_path)) as log:
        assert contents(log) == [(number, b"%d" % number) for number in range(log.next_offset)]
        return done.returncode, done.stdout.strip(), log.next_offset


class TestStopping:
    """A process that ends, by itself or by a signal."""

    def test_the_end_of_the_interpreter_flushes(self, tmp_path: Path) -> None:
        """A program that forgets to close its log loses nothing."""
        assert stopped(tmp_path, then="") == (0, "", 3000)

    def test_an_unhandled_error_flushes(self, tmp_path: Path) -> None:
        """Nor does one that ends by an error."""
        assert stopped(tmp_path, then="sys.exit(3)") == (3, "", 3000)

    def test_sigterm_flushes_and_is_still_the_end(self, tmp_path: Path) -> None:
        """Whoever started the process sees that it was ended by SIGTERM."""
        then = "os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)"
        assert stopped(tmp_path, then=then) == (-signal.SIGTERM, "", 3000)

    def test_sigterm_flushes_while_the_main_thread_waits(self, tmp_path: Path) -> None:
        """A program that sits in a wait for ever is flushed and ended."""
        then = "threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()\nthreading.Event().wait()"
        assert stopped(tmp_path, then=then) == (-signal.SIGTERM, "", 3000)

    def test_sigterm_under_load_flushes_and_ends(self, tmp_path: Path) -> None:
        """The signal comes while threads append: the process ends, and what was accepted before is there."""
        then = (
            "def more():\n"
            "    while True: log.append(b'%d' % log.next_offset)\n"
            "def one():\n"
            "    try: more()\n"
            "    except Exception: pass\n"
            "log.flush()\n"
            "threading.Thread(target=one, daemon=True).start()\n"
            "threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
            "one()\n"
            "time.sleep(60)"
        )
        done = run_python(APPENDS_AND.format(before="", then=then), tmp_path)
        assert (done.returncode, done.stderr) == (-signal.SIGTERM, "")
        with closing(Log.open(tmp_path)) as log:
            assert log.next_offset >= 3000

    def test_the_programs_own_handler_is_kept(self, tmp_path: Path) -> None:
        """A program that handles SIGTERM itself goes on doing so, and its log is flushed when it ends."""
        before = "signal.signal(signal.SIGTERM, lambda *_: print('mine', flush=True))"
        then = "os.kill(os.getpid(), signal.SIGTERM)\nlog.append(b'3000')"
        assert stopped(tmp_path, before=before, then=then) == (0, "mine", 3001)

    def test_a_handler_installed_later_is_kept(self, tmp_path: Path) -> None:
        """Opening another log does not take a handler away that came after the first."""
        then = (
            "signal.signal(signal.SIGTERM, lambda *_: print('mine', flush=True))\n"
            "Log.open(Path(sys.argv[1]) / 'other').close()\n"
            "os.kill(os.getpid(), signal.SIGTERM)"
        )
        assert stopped(tmp_path, then=then) == (0, "mine", 3000)


FORKS = """
import os, sys
from pathlib import Path
from tidelog.errors import ClosedError
from tidelog.log import Log

def say(text):
    os.write(1, text.encode() + b"\\n")  # one write: two processes share the pipe

log = Log.open(Path(sys.argv[1]))
log.append(b"0", sync=True)
log.append(b"1")
child = os.fork()
if child == 0:
    for attempt in (lambda: log.append(b"child"), lambda: log.append_many([b"child"], sync=True)):
        try:
            attempt()
            say("child allowed")
        except ClosedError as error:
            say(f"child refused: {'fork' in str(error)}")
    log.close()
    sys.stdin.readline()
    os._exit(0)
say(str(log.append(b"2", sync=True)))
log.close()
say("parent closed")
os.waitpid(child, 0)
"""


def test_a_forked_child_neither_writes_nor_keeps_the_lock(tmp_path: Path) -> None:
    """The parent goes on as if there were no child; once it has closed, others may open, although the child lives."""
    process = start_python(FORKS, tmp_path)
    lines = lines_of(process)
    said = [next(lines) for _ in range(4)]
    assert sorted(said) == ["2", "child refused: True", "child refused: True", "parent closed"]
    with closing(Log.open(tmp_path)) as log:
        assert contents(log) == [(0, b"0"), (1, b"1"), (2, b"2")]
        assert log.append(b"3") == 3
        with pytest.raises(LockedError):
            Log.open(tmp_path)
    process.communicate("go on\n", timeout=60)
    assert process.returncode == 0


def test_a_closed_log_refuses_appends_and_new_readers(tmp_path: Path) -> None:
    """It says so; a flush has nothing to do, and a reader that was there before comes to its end."""
    log = Log.open(tmp_path)
    log.append_many(payloads(10))
    reader = log.read("earliest", follow=True)
    log.close()
    with pytest.raises(ClosedError, match="Open it again"):
        log.append(payload(10))
    with pytest.raises(ClosedError, match="Open it again"):
        log.read("earliest")
    log.flush()
    assert everything(reader) == numbered(10)
    assert log.statistics().state == "closed"
