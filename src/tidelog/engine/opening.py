"""How an engine is asked for: the name of its directory, and opening it for a task.

Invariants
- What is no name of a directory is told as such, before anything is made.
- Opening may wait for a store for long: it has a thread of its own, which holds up neither the threads of the event
  loop nor the end of the process. None is kept for the next time: a forked child would wait for it in vain.
- What was opened for a task that is cancelled meanwhile is closed: nobody else would ever close it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future

from tidelog.engine.engine import Engine
from tidelog.errors import ConfigError
from tidelog.log import stopping
from tidelog.tier.daemon_pool import DaemonPool


def checked_directory(path: object) -> str:
    """A name of a directory, as text. An empty one is refused: it is an unset variable, as a rule."""
    if not isinstance(path, (str, os.PathLike)) or not isinstance(text := os.fspath(path), str):
        raise ConfigError(f"a directory is a str or a Path, not {type(path).__name__}")
    if not text:
        raise ConfigError("the name of the directory is empty", hint='The working directory is "."')
    if "\0" in text:
        raise ConfigError(f"the name of the directory has a NUL in it: {text!r}")
    return text


async def opened_in_thread(make: Callable[[], Engine]) -> Engine:
    """The engine that `make` opens, in a worker thread."""
    stopping.prepare()
    thread = DaemonPool(1, "tidelog-engine-open")
    opening = thread.submit(make)
    try:
        return await asyncio.wrap_future(opening)
    except asyncio.CancelledError:
        thread.submit(_close_opened, opening)  # behind it, and not here: who cancels does not want to wait
        raise
    finally:
        thread.shutdown(wait=False)


def _close_opened(opening: Future[Engine]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
