"""How errors of the formats reach a user of Spark: one line, what is wrong and what to do, without a traceback.

Spark sends what a Python worker raises as text, with a traceback of the worker before the message. What is a matter of
the input, the data or the store is said by the message alone; the traceback of a worker is for faults of this package.

Invariants
- Only errors of tidelog lose their traceback, and only in a worker of Spark, which ends after it has reported one.
- A stream that cannot be read says so itself: Spark covers an error of `streamReader` with one of its own.
- A limit that ends a reading early (`show`, `take`) is no error, and nothing is printed: Spark closes the pipe to a
  worker that has more rows, and its worker's main loop, which finds that out, is about to print a traceback.
"""

from __future__ import annotations

import functools
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, ParamSpec, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from tidelog.errors import InternalError, TidelogError

_HIDES_TRACEBACKS = "SPARK_HIDE_TRACEBACK"
_P = ParamSpec("_P")
_R = TypeVar("_R")


def told_in_one_line(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function whose errors of tidelog arrive at Spark's driver as their message."""

    @functools.wraps(function)
    def told(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except TidelogError as error:
            hide_traceback(error)
            raise

    return told


def told_rows(batches: Iterator[Any]) -> Iterator[Any]:
    """The same for what a task reads; see the head of the module for what else it keeps quiet."""
    if is_worker() and not isinstance(sys.stderr, _WithoutBrokenPipes):
        sys.stderr = _WithoutBrokenPipes(sys.stderr.buffer, sys.stderr.encoding, line_buffering=True)
    try:
        yield from batches
    except TidelogError as error:
        hide_traceback(error)
        raise


def hide_traceback(error: TidelogError) -> None:
    """Has this process, if it is a worker of Spark, report nothing but messages: the next one is its last."""
    if not isinstance(error, InternalError) and is_worker():
        os.environ[_HIDES_TRACEBACKS] = "1"


class _WithoutBrokenPipes(io.TextIOWrapper):
    """Standard error without what the main module says of a pipe that was closed at the other end."""

    def write(self, text: str) -> int:
        return len(text) if _is_broken_pipe_of_main(sys.exception()) else super().write(text)


def _is_broken_pipe_of_main(error: BaseException | None) -> bool:
    if not isinstance(error, BrokenPipeError | ConnectionResetError) or error.__traceback__ is None:
        return False
    return error.__traceback__.tb_frame.f_globals.get("__name__") == "__main__"


def is_worker() -> bool:
    """Whether this process was started by Spark: its main module is one of Spark's."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name.startswith("pyspark.")


def stream_reader(make: Callable[[], DataSourceStreamReader]) -> DataSourceStreamReader:
    """The reader of a stream, or one that says why there is none when Spark first asks it something."""
    try:
        return make()
    except TidelogError as error:
        return refused_stream(error)


def refused_stream(error: TidelogError) -> DataSourceStreamReader:
    """A stream that says why there is none."""
    return _RefusedStream(error)


class _RefusedStream(DataSourceStreamReader):
    """A stream that cannot be read."""

    def __init__(self, error: TidelogError) -> None:
        self._error = error

    def initialOffset(self) -> NoReturn:
        self._refuse()

    def latestOffset(self, *_: object) -> NoReturn:
        self._refuse()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> NoReturn:
        self._refuse()

    def read(self, partition: InputPartition) -> NoReturn:
        self._refuse()

    def planned(self) -> NoReturn:
        self._refuse()

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing was read."""

    def stop(self) -> None:
        """Nothing is open."""

    def _refuse(self) -> NoReturn:
        hide_traceback(self._error)
        raise self._error
