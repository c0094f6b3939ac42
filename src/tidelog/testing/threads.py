"""Runs code that may die, hang or leave threads behind, without going down with it.

Invariants
- Nothing that is raised on a thread of a dead run reaches the screen or the test runner.
- A thread that does not end in time is left behind: it is a daemon, and the dead disk refuses it everything.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tidelog.testing.faults import Crash

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


@contextlib.contextmanager
def quiet_crashes() -> Iterator[None]:
    """Within it, a Crash may end a thread or a finalizer unheard: dying is what it is for."""
    thread_hook, unraisable_hook = threading.excepthook, sys.unraisablehook

    def on_thread(arguments: threading.ExceptHookArgs) -> None:
        if not issubclass(arguments.exc_type, Crash):
            thread_hook(arguments)

    def on_unraisable(unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, Crash):
            unraisable_hook(unraisable)

    threading.excepthook, sys.unraisablehook = on_thread, on_unraisable
    try:
        yield
    finally:
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
