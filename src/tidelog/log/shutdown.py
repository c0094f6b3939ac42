"""Flushes logs when the process stops: at interpreter exit and on SIGTERM, but never in a forked child.

Invariants
- A signal handler of the application is never replaced: ours is installed only over the default action.
- SIGTERM still ends the process by SIGTERM, after the flush. The handler itself takes no lock (the thread it interrupts
  may hold one); the closing runs in a thread of its own, and a second SIGTERM ends the process at once.
- A forked child has the memory of a log but no thread that writes it; it must not write, and must not keep the lock.
"""

from __future__ import annotations

import _thread
import atexit
import logging
import os
import signal
import sys
import threading
import weakref
from types import FrameType
from typing import Protocol

_logger = logging.getLogger("tidelog.log")


class Stoppable(Protocol):
    """An open log."""

    def close(self) -> None: ...

    def _abandon(self) -> None:
        """Gives up without a write: this process is a forked child."""
        ...


_open_logs: weakref.WeakSet[Stoppable] = weakref.WeakSet()
_with_others: weakref.WeakSet[Stoppable] = weakref.WeakSet()
_installed_in: int | None = None


def closes_at_exit(log: Stoppable, *, has_others: bool = False) -> None:
    """Registers an open log. One that closes others with it, many at a time, is closed before them."""
    _install()
    _open_logs.add(log)
    if has_others:
        _with_others.add(log)


def prepare() -> None:
    """Before a log is opened in a worker thread: Python installs handlers of signals in the main thread only."""
    _install()


def no_longer_open(log: Stoppable) -> None:
    """Forgets a log that was closed."""
    _open_logs.discard(log)
    _with_others.discard(log)


def open_logs() -> weakref.WeakSet[Stoppable]:
    """Those that are open now."""
    return _open_logs.copy()


def close_all() -> None:
    """Closes every open log; one that fails does not keep the others from closing."""
    for log in [*_with_others, *_open_logs]:
        try:
            log.close()
        except Exception:
            _logger.exception("a log could not be closed cleanly")


def _install() -> None:
    global _installed_in
    if _installed_in is None:
        atexit.register(close_all)
        os.register_at_fork(after_in_child=_abandon_all)
    if _installed_in != os.getpid():
        _installed_in = os.getpid()
        _close_with_multiprocessing()
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)


def _close_with_multiprocessing() -> None:
    """A process of `multiprocessing` ends without the interpreter's exit handlers, but runs finalizers of its own."""
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util.Finalize(None, close_all, exitpriority=100)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Not a `Thread`: starting one takes locks of `threading` that the interrupted code may hold.
    _thread.start_new_thread(_close_and_die, ())


def _close_and_die() -> None:
    close_all()
    os.kill(os.getpid(), signal.SIGTERM)


def _abandon_all() -> None:
    for log in list(_open_logs):
        log._abandon()
    _open_logs.clear()
    _with_others.clear()
