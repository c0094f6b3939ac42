"""A process that has no descriptors or threads left: the error says so, nothing is lost or left half open."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.log.workbench import DIRECTORY, contents, numbered, payload, payloads, wait_until

import tidelog
from tidelog import ExhaustedError, RetryError
from tidelog.files import explained
from tidelog.log import Log, LogSettings
from tidelog.store.scheduler import DaemonPool
from tidelog.testing import FaultyFiles

NAME = "shop/orders"
Use = Callable[[Path, str | None], None]


def open_descriptors() -> list[int]:
    return sorted(int(name) for name in os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """As if the process could open only so many more files. What it gives back meanwhile can be opened again, whatever
    numbers earlier tests have left free: these are taken."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    end = max(open_descriptors()) + 1
    with contextlib.ExitStack() as taken:
        resource.setrlimit(resource.RLIMIT_NOFILE, (end + count, hard))
        try:
            with contextlib.suppress(OSError):
                while (number := os.open(os.devnull, os.O_RDONLY)) < end:
                    taken.callback(os.close, number)
                os.close(number)
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def use_topic(root: Path, store: str | None) -> None:
    """Opens, writes and reads as a user does."""
    with tidelog.open(root, store=store, ship_interval_seconds=1000.0) as log:
        topic = log.topic(NAME)
        topic.append(b"value", sync=True)
        assert next(iter(topic.read(0))).value == b"value"
        topic.subscribe("billing", start="earliest").close()


def use_engine(root: Path, store: str | None) -> None:
    with tidelog.open_engine(root, store=store) as engine:
        engine.apply(engine.applied_seq + 1, tidelog.CreateBucket(f"b{engine.applied_seq}"))


def refusal(use: Use, root: Path, store: str | None) -> RetryError | None:
    """What was raised, if it says what ran out."""
    try:
        use(root, store)
    except RetryError as error:
        return error
    return None


@pytest.mark.parametrize("use", [use_topic, use_engine])
@pytest.mark.parametrize("has_store", [False, True])
def test_out_of_descriptors_at_any_point_of_opening(tmp_path: Path, use: Use, has_store: bool) -> None:
    """Whatever is refused says what ran out and how to go on, lets go of all it had, and works the next time."""
    store = (tmp_path / "store").as_uri() if has_store else None
    root = tmp_path / "data"
    use(root, store)
    before = len(open_descriptors())
    failures = 0
    for count in range(12):
        with descriptors_left(count):
            error = refusal(use, root, store)
        if error is not None:
            failures += 1
            # The client of a store says it in its own words.
            is_told = isinstance(error, ExhaustedError) and "ulimit -n" in str(error)
            assert is_told or (has_store and "os error 24" in str(error)), error
        assert len(open_descriptors()) <= before
        use(root, store)
    assert failures > 2


def test_what_was_accepted_is_written_when_a_log_is_closed_without_descriptors(tmp_path: Path) -> None:
    """Without this, closing lost messages for want of one descriptor: a few are kept in reserve for it."""
    before = len(open_descriptors())
    log = Log.open(tmp_path, LogSettings(rotate_max_bytes=100))
    log.append_many(payloads(10), sync=True)
    with descriptors_left(0):
        with pytest.raises(ExhaustedError) as caught:
            append_until_refused(log, first=10)
        accepted = log.next_offset
        assert caught.value.offset == accepted - 1
        log.close()
    assert len(open_descriptors()) <= before  # what other tests have left open may be closed meanwhile
    with contextlib.closing(Log.open(tmp_path)) as log:
        assert contents(log) == numbered(accepted)
    assert len(open_descriptors()) <= before  # what other tests have left open may be closed meanwhile


def test_a_machine_without_descriptors_is_named() -> None:
    """It is another limit than that of the process."""
    words = r"the machine has no file descriptors left.*sysctl"
    with pytest.raises(ExhaustedError, match=words), explained("open", Path("x")):
        raise OSError(errno.ENFILE, "Too many open files in system")


def append_until_refused(log: Log, first: int = 0) -> None:
    for number in range(first, first + 40):
        log.append(payload(number), sync=True)


@pytest.mark.parametrize("operation", ["create", "sync_directory"])
def test_a_log_that_cannot_begin_its_next_file_waits_for_one(operation: str) -> None:
    """Messages that were accepted wait in memory, appends are refused, and everything goes on when there are some."""
    files = FaultyFiles()
    settings = LogSettings(rotate_max_bytes=100)
    with contextlib.closing(Log.open(DIRECTORY, settings, files=files)) as log:
        files.fail(operation, nth=4, times=None, error=errno.EMFILE)  # type: ignore[arg-type]  # both are operations
        with pytest.raises(ExhaustedError, match="ulimit -n") as caught:
            append_until_refused(log)
        accepted = log.next_offset
        assert caught.value.offset == accepted - 1
        with pytest.raises(ExhaustedError):
            log.append(payload(accepted))
        files.heal()
        wait_until(lambda: log.statistics().state == "open", "descriptors")
        log.flush()
        assert contents(log) == numbered(accepted)
        log.append(payload(accepted), sync=True)
    with contextlib.closing(Log.open(DIRECTORY, settings, files=files)) as log:
        assert contents(log) == numbered(accepted + 1)


@pytest.mark.parametrize("use", [use_topic, use_engine])
@pytest.mark.parametrize("has_store", [False, True])
def test_out_of_threads_at_any_point_of_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: Use, has_store: bool
) -> None:
    """The same for threads: an error of ours, and a second attempt works."""
    store = (tmp_path / "store").as_uri() if has_store else None
    root = tmp_path / "data"
    before = len(open_descriptors())
    start = threading.Thread.start
    failures = 0
    for nth in range(8):
        started = 0

        def limited(thread: threading.Thread, nth: int = nth) -> None:
            nonlocal started
            started += 1
            if started > nth:
                raise RuntimeError("can't start new thread")
            start(thread)

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", limited)
            error = refusal(use, root, store)
        if error is not None:
            failures += 1
            assert isinstance(error, ExhaustedError)
            assert "ulimit -u" in str(error)
        use(root, store)
    assert failures > 0
    assert len(open_descriptors()) <= before + 2


def test_a_pool_with_one_thread_serves_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no other thread can be had, calls wait for the one that is there; where there is none, it is said."""
    start = threading.Thread.start
    pool = DaemonPool(4, "test")
    begun, release = threading.Event(), threading.Event()

    def wait() -> bool:
        begun.set()
        return release.wait(60)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(ExhaustedError):
        pool.submit(lambda: 0)
    monkeypatch.setattr(threading.Thread, "start", start)
    first = pool.submit(wait)
    assert begun.wait(60)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    second = pool.submit(lambda: 2)
    release.set()
    assert (first.result(60), second.result(60)) == (True, 2)
    pool.shutdown()
