"""Process limits other than disk space: file descriptors and threads.

Errors name the exhausted resource, its limit and how to raise it: the disk and the path are not at fault. The same
call succeeds once some are released or the limit is raised.

While logs are open a few descriptors are held in reserve: accepted messages must not be lost because the process has no
descriptor left when a log is closed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from threading import Lock, Thread

from tidelog.errors import ExhaustedError

_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_FEW = 6
# A file of the log, its id or directory while it is opened, and one that another thread may take first.
_RESERVED = 3
_NO_THREAD = "can't start new thread"


def is_out_of_descriptors(error: OSError) -> bool:
    """Whether an operation failed because no file can be opened now, and may succeed later."""
    return error.errno in _NO_DESCRIPTORS


def why_few_can_be_opened() -> OSError | None:
    """For callers of a library that reports only that a file could not be opened, after it closed its own files:
    whether the system would allow a few more."""
    opened: list[int] = []
    try:
        for _ in range(_FEW):
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return error if is_out_of_descriptors(error) else None
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return None


class DescriptorReserve:
    """Unused descriptors of a process, kept while any log wants a reserve. One borrower at a time may have them."""

    def __init__(self) -> None:
        self._kept: list[int] = []
        self._holders = 0
        self._guard = Lock()

    def hold(self) -> None:
        """From now on some are kept, as far as there are any; until `let_go` was called as often."""
        with self._guard:
            self._holders += 1
            self._fill()

    def let_go(self) -> None:
        """Ends one `hold`."""
        with self._guard:
            self._holders -= 1
            if not self._holders:
                self._give_back()

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Frees them meanwhile, for the caller or any thread that is quicker."""
        with self._guard:
            self._give_back()
            try:
                yield
            finally:
                self._fill()

    def _fill(self) -> None:
        with contextlib.suppress(OSError):
            while self._holders and len(self._kept) < _RESERVED:
                self._kept.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def _give_back(self) -> None:
        while self._kept:
            os.close(self._kept.pop())

    def forget(self) -> None:
        """In a forked child, whose other threads are gone: nobody holds any."""
        self._guard = Lock()
        self._holders = 0
        self._give_back()


reserve = DescriptorReserve()


def out_of_descriptors(operation: str, path: Path | None, error: OSError) -> ExhaustedError:
    """The error to raise for it."""
    if error.errno == errno.ENFILE:
        text, hint = "the machine has no file descriptors left", "Raise fs.file-max (sysctl), or close what is open"
    else:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        text = f"the process has no file descriptors left, it may have {most}"
        hint = "Raise the limit (ulimit -n), or open fewer topics and files at once; then try again"
    return ExhaustedError(text, operation=operation, path=path, hint=hint)


def start_thread(thread: Thread) -> None:
    """Starts a thread; ExhaustedError when the system gives none."""
    try:
        thread.start()
    except RuntimeError as error:
        if _NO_THREAD not in str(error):
            raise
        raise ExhaustedError(
            "the process can start no more threads",
            operation=thread.name,
            hint="Raise the limit (ulimit -u, or that of the container), or give it more memory; then try again",
        ) from error
