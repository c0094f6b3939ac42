"""Kills a Spark program at a chosen step of a write. Python runs this in every process that has the folder on its path.

    $KILL_DIRECTORY/now      a step of `STEPS`, at which time that it is reached, and who is killed: "one" or "all"
    $KILL_DIRECTORY/hits     a line for every step that was reached, in whichever process
    $KILL_DIRECTORY/killed   what `now` was, as soon as somebody was killed

Invariants
- "all" is the driver, its Java and all Python processes, by SIGKILL, as when a machine loses power: they are one
  session of the operating system. "one" is the process that reached the step: Spark aborts the batch, and the query
  fails.
- Nothing of tidelog is imported here: a step is watched from the moment that its module is imported by somebody else.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple


class Step(NamedTuple):
    """A step is reached when a function is called, or when it has returned."""

    module: str
    name: str
    is_after: bool


STEPS = {
    "before write": Step("tidelog.pipeline.sink.sink", "stage_rows", False),
    "in write": Step("tidelog.staging.area", "PartWriter.write", True),
    "before a part is published": Step("tidelog.staging.area", "PartWriter.__exit__", False),
    "after write": Step("tidelog.pipeline.sink.sink", "stage_rows", True),
    "before commit": Step("tidelog.pipeline.sink.sink", "TopicStreamWriter.commit", False),
    "before the swap": Step("tidelog.staging.area", "StagingArea._manifested", True),
    "after the swap": Step("tidelog.staging.area", "StagingArea.commit", True),
    "before take-in": Step("tidelog.staging.ingest", "Ingester._take", False),
    "placed": Step("tidelog.staging.ingest", "Ingester._place", True),
    "in take-in": Step("tidelog.log.log", "Log.append_held", True),
    "appended": Step("tidelog.staging.ingest", "Ingester._finish", False),
    "taken": Step("tidelog.staging.ingest", "Ingester._finish", True),
    "shipped": Step("tidelog.topics.topic", "Topic.ship", True),
    "sealed": Step("tidelog.topics.topic", "Topic.seal", True),
    "after commit": Step("tidelog.pipeline.sink.sink", "TopicStreamWriter.commit", True),
}
# So that taking in has several steps even for a few rows.
_ROWS_AT_ONCE = 7
_WATCHED = {"tidelog.staging.rows", *(step.module for step in STEPS.values())}


def kill_all() -> None:
    """Everything of this session, this process last."""
    session = os.getsid(0)
    while others := [pid for pid in _processes() if pid != os.getpid() and _is_in(pid, session)]:
        for pid in others:
            _kill(pid)
    os.kill(os.getpid(), signal.SIGKILL)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _is_in(pid: int, session: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state, _, _, its_session = file.read().rpartition(")")[2].split()[:4]
    except OSError:
        return False
    return int(its_session) == session and state not in "ZX"


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def reached(step: str) -> None:
    """Writes it down, and ends this process, or everything, if this is the step."""
    directory = Path(os.environ["KILL_DIRECTORY"])
    log = os.open(directory / "hits", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(log, step.encode() + b"\n")
    os.close(log)
    hits = (directory / "hits").read_text("utf-8").splitlines().count(step)
    try:
        wanted, hit, who = (directory / "now").read_text("utf-8").splitlines()
        if step != wanted or hits < int(hit):
            return
        os.rename(directory / "now", directory / "killed")  # of several at once, one is killed
    except FileNotFoundError:
        return
    if who == "all":
        kill_all()
    os.kill(os.getpid(), signal.SIGKILL)


def _watched(function: Callable[..., Any], step: str, is_after: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def watched(*arguments: Any, **named: Any) -> Any:
        if not is_after:
            reached(step)
        result = function(*arguments, **named)
        if is_after:
            reached(step)
        return result

    return watched


def _watch(module: ModuleType) -> None:
    for step, (name, path, is_after) in STEPS.items():
        if name == module.__name__:
            *owners, last = path.split(".")
            owner = functools.reduce(getattr, owners, module)
            setattr(owner, last, _watched(getattr(owner, last), step, is_after))
    if module.__name__ == "tidelog.staging.rows":
        module._ROWS_AT_ONCE = _ROWS_AT_ONCE  # type: ignore[attr-defined]


class _Watching(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _watch(module)


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _WATCHED:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Watching(spec.loader)
        return spec


if "KILL_DIRECTORY" in os.environ:
    sys.meta_path.insert(0, _Finder())
