"""How Spark executes the steps of a job (`flow.py`): with RDDs of pieces where there is a context, else with frames.

                    a task's rows in and out        a shuffle
    `RddFlow`       pieces, as bytes                (task, piece)
    `FrameFlow`     a frame of pieces               repartitionById of a frame (task, piece)

Frames are planned as queries, for which Spark generates and compiles classes: with jobs of some ten short steps that
is most of the CPU time of Java. RDDs need none of it. Spark Connect has frames alone.

Invariants
- Both give the same rows to the same tasks, in the same order.
- Nothing but pieces, and at the end of a source its numbers, goes between Java and Python.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from tidelog.pipeline.flow import Flow, Rows
from tidelog.pipeline.jobs.job import told_in_our_words
from tidelog.pipeline.pieces import (
    PIECE_SCHEMA,
    TASK_SCHEMA,
    Divided,
    Gathered,
    pack,
    packed,
    unpack,
    unpacked,
)
from tidelog.pipeline.tasks import (
    BatchFunction,
    ItemFunction,
    Items,
    arrow_schema,
    context_of,
    map_in_arrow,
    slots_of,
    tuned,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import RDD, SparkContext
    from pyspark.sql import DataFrame, SparkSession

# Enough for every core several times over, unless starting them would be the work; never more than a task can hold.
_TASKS_PER_SLOT = 3
_LEAST_TASK_BYTES = 4 << 20
_TASK_BYTES = 64 << 20


def spark_flow(spark: SparkSession) -> Flow:
    """The steps as a session does them best."""
    context = context_of(spark)
    return FrameFlow(spark) if context is None else RddFlow(spark, context)


class _SparkFlow(Flow):
    def __init__(self, spark: SparkSession) -> None:
        self._slots = slots_of(spark)
        self._kept: list[Any] = []

    def tasks_for(self, size: int) -> int:
        return max(1, size // _TASK_BYTES, min(self._slots * _TASKS_PER_SLOT, -(-size // _LEAST_TASK_BYTES)))

    def close(self) -> None:
        while self._kept:
            self._kept.pop().unpersist()


class _Branch(NamedTuple):
    """An RDD or a frame, and what tasks still have to do with its batches."""

    rows: Any
    functions: tuple[BatchFunction, ...]


class _Chained:
    """Functions one after the other, in one task."""

    def __init__(self, functions: Sequence[BatchFunction]) -> None:
        self._functions = functions

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for function in self._functions:
            batches = function(batches)
        return batches


class _Where:
    def __init__(self, name: str, number: int) -> None:
        self._name = name
        self._number = number

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow.compute as pc

        return (batch.filter(pc.equal(batch.column(self._name), self._number)) for batch in batches)


class _SparkRows(Rows):
    """Rows of one or more branches. Spark sees them where they are divided, kept or collected, in pieces."""

    def __init__(self, branches: Sequence[_Branch], schema: str, kept: list[Any]) -> None:
        self._branches = branches
        self._schema = schema
        self._kept = kept

    def mapped(self, function: BatchFunction, schema: str) -> Rows:
        return self._of([_Branch(one.rows, (*one.functions, function)) for one in self._branches], schema)

    def where(self, name: str, number: int) -> Rows:
        return self.mapped(_Where(name, number), self._schema)

    def joined_by(self, others: Rows) -> Rows:
        assert isinstance(others, _SparkRows), "rows of one flow"
        return self._of([*self._branches, *others._branches], self._schema)

    def collected(self) -> pa.Table:
        with told_in_our_words("computing rows"):
            return self._collected()

    @abstractmethod
    def _collected(self) -> pa.Table: ...

    def _of(self, branches: Sequence[_Branch], schema: str) -> Rows:
        return type(self)(branches, schema, self._kept)


# With RDDs. The calls into Spark are those of `RDD.partitionBy`, whose pieces would be pickled and held back.


class RddFlow(_SparkFlow):
    """The steps with RDDs."""

    def __init__(self, spark: SparkSession, context: SparkContext) -> None:
        super().__init__(spark)
        self._context = context

    def source(self, function: ItemFunction, works: Sequence[object], schema: str) -> Rows:
        numbers = self._context.parallelize(range(len(works)), max(1, len(works)))
        return _RddRows([_Branch(numbers, (_Numbered(Items(function, works)),))], schema, self._kept)


class _Numbered:
    """A source, whose task gets numbers as they are."""

    def __init__(self, items: Items) -> None:
        self._items = items

    def __call__(self, numbers: Iterator[Any]) -> Iterator[pa.RecordBatch]:
        return self._items.of(numbers)


class _Unpacked:
    def __call__(self, pieces: Iterator[Any]) -> Iterator[pa.RecordBatch]:
        return (batch for table in unpack(pieces) for batch in table.to_batches())


class _GatheredPieces:
    def __init__(self, gathered: Gathered) -> None:
        self._gathered = gathered

    def __call__(self, pieces: Iterator[Any]) -> Iterator[pa.RecordBatch]:
        return self._gathered.of(unpack(pieces))


class _Task:
    """What a worker does: its rows as pieces; those for the tasks of a shuffle with their numbers in front."""

    def __init__(self, functions: Sequence[BatchFunction], divided: Divided | None = None) -> None:
        self._function = _Chained(functions)
        self._divided = divided

    def __call__(self, _: int, taken: Iterable[Any]) -> Iterator[bytes | pa.Buffer]:
        return tuned(self._made(iter(taken)))

    def _made(self, taken: Iterator[Any]) -> Iterator[bytes | pa.Buffer]:
        batches = self._function(taken)
        if self._divided is None:
            yield from pack(batches)
            return
        for task, piece in self._divided.pieces(batches):
            yield task.to_bytes(8, "big")
            yield piece


class _RddRows(_SparkRows):
    def grouped(self, by: str, tasks: int, order: Sequence[str]) -> Rows:
        from pyspark import RDD
        from pyspark.serializers import NoOpSerializer

        pieces = self._together(Divided(by, tasks))
        context, jvm = pieces.ctx, pieces.ctx._jvm
        assert jvm is not None, "a context that was stopped"
        pairs = jvm.PairwiseRDD(pieces._jrdd.rdd()).asJavaPairRDD()
        apart = jvm.PythonRDD.valueOfPair(pairs.partitionBy(jvm.PythonPartitioner(tasks, id(pieces))))
        branch = _Branch(RDD(apart, context, NoOpSerializer()), (_GatheredPieces(Gathered(order)),))
        return self._of([branch], self._schema)

    def kept(self) -> Rows:
        from pyspark import StorageLevel

        pieces = self._together().persist(StorageLevel.MEMORY_AND_DISK)
        self._kept.append(pieces)
        return self._of([_Branch(pieces, (_Unpacked(),))], self._schema)

    def _collected(self) -> pa.Table:
        import pyarrow as pa

        pieces = self._together().collect()
        return pa.concat_tables(chain([arrow_schema(self._schema).empty_table()], unpack(pieces)))

    def _together(self, divided: Divided | None = None) -> RDD[Any]:
        done = [_pieces_of(one.rows, _Task(one.functions, divided)) for one in self._branches]
        return done[0] if len(done) == 1 else done[0].ctx.union(done)


def _pieces_of(rdd: RDD[Any], task: _Task) -> RDD[Any]:
    """What the tasks make, as bytes that nobody pickles."""
    from pyspark import RDD
    from pyspark.serializers import NoOpSerializer

    made: Any = rdd.mapPartitionsWithIndex(task)
    made._bypass_serializer = True
    return RDD(made._jrdd, rdd.ctx, NoOpSerializer())


# With frames.


class FrameFlow(_SparkFlow):
    """The steps with frames."""

    def __init__(self, spark: SparkSession) -> None:
        super().__init__(spark)
        self._spark = spark

    def source(self, function: ItemFunction, works: Sequence[object], schema: str) -> Rows:
        numbers = self._spark.range(0, len(works), 1, max(1, len(works)))
        return _FrameRows([_Branch(numbers, (Items(function, works),))], schema, self._kept)


class _FrameRows(_SparkRows):
    def grouped(self, by: str, tasks: int, order: Sequence[str]) -> Rows:
        pieces = self._together(TASK_SCHEMA, Divided(by, tasks))
        apart = pieces.repartitionById(tasks, pieces["task"]).select("piece")
        return self._of([_Branch(apart, (Gathered(order),))], self._schema)

    def kept(self) -> Rows:
        frame = self._together(PIECE_SCHEMA, packed).persist()
        self._kept.append(frame)
        return self._of([_Branch(frame, (unpacked,))], self._schema)

    def _collected(self) -> pa.Table:
        return self._together(self._schema).toArrow()

    def _together(self, schema: str, *more: BatchFunction) -> DataFrame:
        done = (map_in_arrow(one.rows, _Chained((*one.functions, *more)), schema) for one in self._branches)
        return reduce(lambda one, other: one.union(other), done)
