"""Who fetches what a task reads next: threads where a store has to be asked, the kernel where it is a directory.

Invariant: a range is read by the task itself, whatever became of the announcement: that only makes it quicker.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import ParamSpec, TypeVar
from urllib.parse import unquote, urlsplit

from tidelog.tier.daemon_pool import DaemonPool

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_FETCHING_THREADS = 4


def reading_ahead(store_url: str) -> Executor:
    """What fetches ahead from the store at a URL."""
    place = urlsplit(store_url)
    if place.scheme == "file" and hasattr(os, "posix_fadvise"):
        return KernelReadAhead(Path(unquote(place.path)))
    return DaemonPool(_FETCHING_THREADS, "tidelog-fetch")


class KernelReadAhead(Executor):
    """Begins no call, so that whoever wants its result makes it; the kernel is told which bytes of which file come.

    Cores are busy while a task reads. A thread that copies what is in memory already is one more to share them, and
    handing over from it costs a quarter of the copying.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def submit(
        self, fn: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Future[Result]:
        """A future that nobody works on. `args` are those of `Fetcher.fetch`: a key, the first byte, how many."""
        key, start, length = args
        with contextlib.suppress(OSError):  # who reads it learns about it
            file = os.open(self._directory / str(key), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(file, start, length, os.POSIX_FADV_WILLNEED)  # type: ignore[arg-type]
            finally:
                os.close(file)
        return Future()
