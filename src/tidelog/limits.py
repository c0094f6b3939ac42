"""What a process may run out of besides room on a disk: descriptors and threads.

Both are said by name, with the limit and how to raise it: the disk and the path are not to blame. The same call
succeeds once others have let go of some, or the limit is higher.
"""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from threading import Thread

from tidelog.errors import ExhaustedError

_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_FEW = 6
_NO_THREAD = "can't start new thread"


def is_out_of_descriptors(error: OSError) -> bool:
    """Whether an operation failed because no file can be opened now, and may succeed later."""
    return error.errno in _NO_DESCRIPTORS


def why_few_can_be_opened() -> OSError | None:
    """For those whom a library tells only that a file could not be opened, when it has closed what it had: whether the
    system would let it have a few."""
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
