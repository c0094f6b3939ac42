"""Distributes work over Spark's workers: one function, many items, one result per item as soon as it is known.

    results = run_on_workers(spark, check_object, [ObjectWork(...), ObjectWork(...)])

Invariants
- It works in classic sessions, and over Spark Connect, which needs only a range and a plain UDF.
- The function is found by its name, in a module that the workers can import. Items travel as pickles, as everything
  does that Spark sends to a worker; results come back as msgpack of the function's return type.
- A tidelog error raised in a worker is raised here as the same error. Any other is a failed task, which Spark retries
  as its settings say, so the function must be idempotent.
- Results come in any order. A caller that stops iterating cancels the work that has not begun.
"""

from __future__ import annotations

import importlib
import pickle
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from operator import attrgetter
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_type_hints

import msgspec

from tidelog import errors
from tidelog.errors import InputError, InternalError, TidelogError
from tidelog.pipeline.tasks import context_of, slots_of, tune_worker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Item = TypeVar("Item")
Result = TypeVar("Result")

# A wave is one job, which takes a tenth of a second of CPU time by itself: enough of them to see progress, not so
# many that starting them is the work.
_WAVES = 20
_TASKS_OF_SLOT = 2
_MAX_WAVE_ITEMS = 256
# While one wave runs out of tasks the next one fills the workers that have become free.
_WAVES_AT_ONCE = 2
_LOOK_SECONDS = 0.2


class _Answer(msgspec.Struct, frozen=True):
    """What a worker hands back for an item: its result, or an error of ours and what that carries."""

    number: int
    result: bytes | None = None
    error: str | None = None
    details: dict[str, str | int | None] = {}


def run_on_workers(
    spark: SparkSession, function: Callable[[Item], Result], items: Sequence[Item], *, items_per_task: int = 1
) -> Iterator[Result]:
    """The results of a module-level function for all items, as they become known.

    A task takes `items_per_task` of them: more than one where an item is less work than the start of a task, which is
    some tens of milliseconds.
    """
    path = _path_of(function)
    result_type = get_type_hints(function)["return"]
    waves = _waves(items, items_per_task, slots_of(spark))
    tag = f"tidelog-{secrets.token_hex(8)}"
    pool = ThreadPoolExecutor(_WAVES_AT_ONCE, thread_name_prefix="tidelog-work")
    running = {pool.submit(_run_wave, spark, path, wave, items_per_task, tag) for wave in waves}
    try:
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from _results(done, result_type)
    finally:
        _give_up(spark, tag, running)  # a caller that has seen enough does not wait for the rest
        pool.shutdown(wait=True)


def _give_up(spark: SparkSession, tag: str, running: set[Future[list[bytes]]]) -> None:
    """Spark cancels the jobs that it knows. A wave may be about to start one: Spark is asked until all have ended."""
    left = {future for future in running if not future.cancel()}
    while left := {future for future in left if not future.done()}:
        _cancel(spark, tag)
        wait(left, _LOOK_SECONDS)


def _results(done: set[Future[list[bytes]]], result_type: Any) -> Iterator[Any]:
    for future in done:
        for data in future.result():
            answer = msgspec.msgpack.decode(data, type=_Answer)
            if answer.error is not None:
                raise _error_of(answer)
            yield msgspec.msgpack.decode(answer.result or b"", type=result_type)


def _path_of(function: Callable[..., object]) -> str:
    module, name = function.__module__, function.__qualname__
    if module == "__main__" or "<" in name:
        raise InputError(
            f"workers cannot find the function {name} of {module}", hint="Put it at the top of a module that they have"
        )
    return f"{module}:{name}"


def _waves(items: Sequence[Item], items_per_task: int, slots: int) -> list[Sequence[Item]]:
    size = max(-(-len(items) // _WAVES), slots * _TASKS_OF_SLOT * items_per_task)
    size = min(size, _MAX_WAVE_ITEMS * items_per_task)
    return [items[start : start + size] for start in range(0, len(items), size)]


def _run_wave(spark: SparkSession, path: str, items: Sequence[object], items_per_task: int, tag: str) -> list[bytes]:
    """The answers of one wave. A context has no query to plan for it; Spark Connect has nothing else."""
    tasks, work, context = -(-len(items) // items_per_task), _Work(path, items), context_of(spark)
    if context is None:
        return _run_query(spark, work, len(items), tasks, tag)
    context.addJobTag(tag)
    try:
        return context.parallelize(range(len(items)), tasks).map(work).collect()
    finally:
        context.removeJobTag(tag)


def _run_query(spark: SparkSession, work: _Work, count: int, tasks: int, tag: str) -> list[bytes]:
    from pyspark.sql import functions as sql
    from pyspark.sql.types import BinaryType

    answer = sql.udf(work, BinaryType(), useArrow=False).asNondeterministic()
    spark.addTag(tag)
    try:
        rows = spark.range(0, count, 1, tasks).select(answer("id").alias("answer")).collect()
    finally:
        spark.removeTag(tag)
    return [bytes(row.answer) for row in rows]


def _cancel(spark: SparkSession, tag: str) -> None:
    context = context_of(spark)
    if context is None:
        spark.interruptTag(tag)
    else:
        context.cancelJobsWithTag(tag)


class _Work:
    """What a task does with the number of an item. Each item is pickled by itself, so that only its task unpacks it."""

    def __init__(self, path: str, items: Sequence[object]) -> None:
        self._path = path
        self._items = [pickle.dumps(item) for item in items]

    def __call__(self, number: int) -> bytes:
        return msgspec.msgpack.encode(self._answer(number))

    def _answer(self, number: int) -> _Answer:
        function = _function_at(self._path)
        try:
            result = function(pickle.loads(self._items[number]))
        except TidelogError as error:
            return _Answer(number, error=type(error).__name__, details=_details_of(error))
        finally:
            tune_worker()
        return _Answer(number, msgspec.msgpack.encode(result))


def _function_at(path: str) -> Callable[[Any], Any]:
    module, _, name = path.partition(":")
    found: Callable[[Any], Any] = getattr(importlib.import_module(module), name)
    return found


# Errors over the wire

_DETAILS = ("message", "operation", "hint", "path", "byte", "first", "last", "offset")


def _details_of(error: TidelogError) -> dict[str, str | int | None]:
    found = {name: getattr(error, name, None) for name in _DETAILS}
    return {name: value if isinstance(value, int) else str(value) for name, value in found.items() if value is not None}


def error_with_text(kind: type[TidelogError], message: str, path: str | None = None) -> TidelogError:
    """An error of a kind that has this message: it is not put together once more from parts that may be missing."""
    made = cast(type[TidelogError], type(kind.__name__, (kind,), {"message": property(attrgetter("reason"))}))
    error = made.__new__(made)
    TidelogError.__init__(error, message, path=path)
    return error


def _error_of(answer: _Answer) -> TidelogError:
    """The error that the worker met; what an error of another version carries is left out rather than guessed."""
    kind = getattr(errors, answer.error or "", InternalError)
    if not (isinstance(kind, type) and issubclass(kind, TidelogError)):
        kind = InternalError
    details = dict(answer.details)
    path = details.pop("path", None)
    error = error_with_text(kind, str(details.pop("message", "")), None if path is None else str(path))
    for name, value in details.items():
        setattr(error, name, value)
    return error


# Topics that a job works on at once, in threads of the driver.


def run_in_threads(
    work: Callable[[Item], None], items: Sequence[Item], at_once: int, look: Callable[[], None], *, waits: bool
) -> Iterator[tuple[Item, TidelogError]]:
    """Does the work for all items, some at once, and yields those that fail, with their errors.

    `look` is called in the calling thread, now and then and at the end. With `waits` nothing runs any more when this
    ends, also when it is given up.
    """
    pool = ThreadPoolExecutor(at_once, thread_name_prefix="tidelog-job")
    try:
        items_of = {pool.submit(work, item): item for item in items}
        running = set(items_of)
        while running:
            done, running = wait(running, _LOOK_SECONDS, FIRST_COMPLETED)
            look()
            for future in done:
                try:
                    future.result()
                except TidelogError as error:
                    yield items_of[future], error
    finally:
        pool.shutdown(wait=waits, cancel_futures=True)


# Signs of life of a job that others wait for.

RENEW_SECONDS = 20.0


@contextmanager
def kept_alive(renew: Callable[[], None]) -> Iterator[None]:
    """Periodically records that work is in progress. A job that was taken over finds out when it tries to commit."""
    is_over = Event()

    def renew_now_and_then() -> None:
        while not is_over.wait(RENEW_SECONDS):
            with suppress(TidelogError):
                renew()

    thread = Thread(target=renew_now_and_then, name="tidelog-renew", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
