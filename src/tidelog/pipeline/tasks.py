"""Tasks that make and take rows as Arrow batches, without pandas; and the tuning of the workers that run them.

`DataFrame.mapInArrow` does the same, and requires pandas although it does not use it: this module builds what it builds
after that check. Over Spark Connect, whose client requires pandas anyway, it is the method itself.

Invariants
- The function is called once per task, with the batches of its partition; what it yields has the schema exactly.
- It is found by its name, or is an object of a class that is, in a module that the workers can import.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from urllib.parse import unquote, urlsplit

from tidelog.store.scheduler import DaemonPool

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


BatchFunction = Callable[[Iterator["pa.RecordBatch"]], Iterator["pa.RecordBatch"]]
ItemFunction = Callable[[Any], Iterator["pa.RecordBatch"]]
Made = TypeVar("Made")
BATCH_ROWS = 8192
# Where the session does not say how many tasks run at once, as over Spark Connect.
_ASSUMED_SLOTS = 8


def map_in_arrow(rows: DataFrame, function: BatchFunction, schema: str | StructType) -> DataFrame:
    """What the function makes of the rows of each partition; `schema` is that of what it yields."""
    from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame
    from pyspark.sql.udf import _create_udf
    from pyspark.util import PythonEvalType

    tuned = _Tuned(function)
    if not isinstance(rows, ClassicDataFrame):
        return rows.mapInArrow(tuned, schema)
    work: Any = _create_udf(f=tuned, evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF, returnType=schema)
    column = work(*(rows[name] for name in rows.columns))
    return ClassicDataFrame(rows._jdf.mapInArrow(column._jc, False, None), rows.sparkSession)


class _Tuned:
    """A function in a tuned worker."""

    def __init__(self, function: BatchFunction) -> None:
        self._function = function

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return tuned(self._function(batches))


def tuned(made: Iterator[Made]) -> Iterator[Made]:
    """What a task makes; its worker is tuned before it, and again when all that it needs is loaded."""
    tune_worker()
    yield from made
    tune_worker()


def rows_of_items(spark: SparkSession, function: ItemFunction, items: Sequence[object], schema: str) -> DataFrame:
    """What a function makes of items, one task for each."""
    numbers = spark.range(0, len(items), 1, max(1, len(items)))
    return map_in_arrow(numbers, Items(function, items), schema)


class Items:
    """What a task does with the number of its item. Each is pickled by itself, so that only its task unpacks it."""

    def __init__(self, function: ItemFunction, items: Sequence[object]) -> None:
        self._function = function
        self._items = [pickle.dumps(item) for item in items]

    def __call__(self, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return self.of(number for batch in numbers for number in batch.column(0).to_pylist())

    def of(self, numbers: Iterable[int]) -> Iterator[pa.RecordBatch]:
        """The same of plain numbers."""
        for number in numbers:
            yield from self._function(pickle.loads(self._items[number]))


def arrow_schema(schema: str) -> pa.Schema:
    """A schema as it is written for Spark."""
    import pyarrow as pa

    types = {"bigint": pa.int64(), "int": pa.int32(), "binary": pa.binary(), "string": pa.string()}
    return pa.schema([(name, types[kind]) for name, kind in (field.split() for field in schema.split(", "))])


def as_batches(
    rows: Iterable[tuple[object, ...]], schema: str, batch_rows: int = BATCH_ROWS
) -> Iterator[pa.RecordBatch]:
    """Rows as Arrow batches of a schema, as Spark writes it."""
    import pyarrow as pa

    fields = arrow_schema(schema)
    remaining = iter(rows)
    while taken := list(islice(remaining, batch_rows)):
        arrays = [pa.array(values, field.type) for values, field in zip(zip(*taken, strict=True), fields, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, names=fields.names)


def tuples_in(batches: Iterable[pa.RecordBatch], *names: str) -> Iterator[tuple[Any, ...]]:
    """The rows of batches, with these columns."""
    for batch in batches:
        yield from zip(*(batch.column(name).to_pylist() for name in names), strict=True)


def context_of(spark: SparkSession) -> SparkContext | None:
    """The context of a classic session; over Spark Connect there is none."""
    return getattr(spark, "_sc", None)


def slots_of(spark: SparkSession) -> int:
    """How many tasks run at once, as far as the session says so."""
    from pyspark.errors import PySparkException

    try:
        return int(spark.sparkContext.defaultParallelism)
    except (AttributeError, PySparkException):
        return _ASSUMED_SLOTS


# Tuning of workers. What is loaded is left out of garbage collections, and freed memory is reused for the next read.
#
# Spark collects garbage after every task. It would look at every module each time, which takes as long as reading some
# MiB: a third of the CPU time of jobs with short tasks.
#
# The allocator of glibc takes large blocks from the operating system one by one and gives each of them back. Then every
# page of every range is cleared and mapped again, which costs as much as reading it.
#
# Invariants
# - Objects are left out once for each set of loaded modules. They are still freed when nothing refers to them; only
#   cycles that exist at that time stay.
# - A worker keeps at most `_KEPT_BYTES` of unused memory at the end of its heap.
# - With any other allocator, nothing is changed.


# As malloc.h numbers them.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

# The most that older versions of glibc accept; ranges and columns of a batch are smaller.
_LARGEST_IN_HEAP_BYTES = 32 << 20
_KEPT_BYTES = 64 << 20


def tune_worker() -> None:
    """For the process of a task, before it and after it: it does nothing if nothing was loaded since the last call."""
    _spare_collections(len(sys.modules))
    keep_memory()


@lru_cache(1)
def _spare_collections(modules: int) -> None:
    gc.freeze()


@lru_cache(1)
def keep_memory() -> bool:
    """Once in a worker; whether its allocator could be told."""
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_IN_HEAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))


# Prefetching for a task: threads fetch what a store has, the operating system what is in a directory.
#
# Invariant: the task itself reads every range, whatever became of the prefetch: that only makes it quicker.


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
    """Begins no call: the one that wants the result makes it. The kernel gets a hint of which bytes of which file come.

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
