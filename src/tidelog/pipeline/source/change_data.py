"""`format("tidelog_entries")` with `changes`: each change of an engine's objects with what was there before.

    CREATE TABLE changes USING tidelog_entries OPTIONS (root 's3://bucket/prefix', changes 'true', startingSeq '1201')

    bucket, key string   seq bigint, order int   change: insert | update | delete
    before, after        struct<seq, size, crc, metadata, data>, null where there is no object

Invariants
- From the state before `startingSeq` on it has every change of an object up to `endingSeq`, both included, once;
  `before` of a change is `after` of the one before it. With `newestOnly` it is one row for each object that differs at
  the end, of a stream in each micro-batch.
- It is read from versions: a state that the store does not tell of any more is an error, no change is left out. The
  log of the range need not be there.
- A deletion of what is not there is no change, and a version that an entry put again in the same place is one.
- Two seqs determine a micro-batch of a stream, however often and wherever it is rerun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow

from tidelog.errors import InputError, NotFoundError, OffsetOutOfRangeError
from tidelog.pipeline.source.change_batches import ChangePart
from tidelog.pipeline.source.engine_options import EARLIEST, LATEST, EntryOptions, ObjectOptions, Start
from tidelog.pipeline.source.entries import refuse_large_seqs
from tidelog.pipeline.source.explained import PlannedRead, tell_planned
from tidelog.pipeline.source.objects import ObjectPlan
from tidelog.pipeline.source.told import told_in_one_line, told_rows

_Made = TypeVar("_Made")
_FIRST_SEQ = 1


class ChangePartition(InputPartition):
    """One task's range of keys."""

    def __init__(self, part: ChangePart) -> None:
        super().__init__((part.objects.start, part.objects.stop))
        self.part = part


def _planned(options: EntryOptions, first: int, last: int, make: Callable[[ObjectPlan], list[_Made]]) -> list[_Made]:
    """What is made of a plan of the changes from one seq to another."""
    if first > last:
        return []
    columns = (("metadata",) if options.includes_metadata else ()) + (("data",) if options.includes_value else ())
    of_objects = ObjectOptions(
        root=options.root, columns=columns, seq=last, all_versions=True, min_partitions=options.min_partitions
    )
    with options.root.open() as engine:
        return make(ObjectPlan(of_objects, engine, oldest_seq=first - 1))


def _partitions(options: EntryOptions, first: int, last: int) -> list[InputPartition]:
    def parts(plan: ObjectPlan) -> list[InputPartition]:
        found = plan.parts()
        tell_planned(lambda: [plan.described(found)], len(found))
        emptied = tuple((name, at.seq, at.order) for name, at in plan.buckets.emptied(last))
        made = (
            ChangePart(
                objects=part,
                first_seq=first,
                emptied=emptied,
                newest_only=options.newest_only,
                with_metadata=options.includes_metadata,
                with_data=options.includes_value,
            )
            for part in found
        )
        return [ChangePartition(one) for one in made]

    return _planned(options, first, last, parts)


def _described(options: EntryOptions, first: int, last: int) -> list[PlannedRead]:
    return _planned(options, first, last, lambda plan: [plan.described(plan.parts())])


def _mark(options: EntryOptions) -> int:
    """The newest seq that is in the store."""
    with options.root.open() as engine:
        refuse_large_seqs(engine.manifest)
        return engine.manifest.high_water_mark


def _first(starting: Start) -> int:
    assert starting != LATEST, "it has no first seq"
    return _FIRST_SEQ if starting == EARLIEST else int(starting)


def _read(partition: InputPartition, options: EntryOptions, names: list[str]) -> Iterator[Any]:
    from tidelog.pipeline.source.change_batches import read_change_batches
    from tidelog.pipeline.tasks import tune_worker

    if not isinstance(partition, ChangePartition):
        return iter(())  # Spark makes one up where there are none
    tune_worker()
    return told_rows(read_change_batches(partition.part, names, options.max_rows_per_batch))


class ChangesReader(DataSourceReader):
    """A batch read: what is shipped when it is planned."""

    def __init__(self, options: EntryOptions, names: list[str]) -> None:
        self._options = options
        self._names = names

    @told_in_one_line
    def partitions(self) -> list[InputPartition]:
        seqs = self._seqs()
        return [] if seqs is None else _partitions(self._options, *seqs)

    def planned(self) -> list[PlannedRead]:
        seqs = self._seqs()
        return [] if seqs is None else _described(self._options, *seqs)

    def _seqs(self) -> tuple[int, int] | None:
        """The first and the last seq; None for a table over an engine that has shipped nothing yet."""
        options = self._options
        first = _first(EARLIEST if options.starting is None else options.starting)
        try:
            mark = _mark(options)
        except NotFoundError:
            if options.is_table and options.starting in (None, EARLIEST) and options.ending_seq is None:
                return None
            raise
        last = mark if options.ending_seq is None else options.ending_seq
        if first < _FIRST_SEQ or not first - 1 <= last <= mark:
            raise InputError(
                f"there are no changes from seq {first} to {last}: the store has entries up to {mark}",
                hint="Begin at 1 or later, and end at what is shipped",
            )
        return first, last

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return _read(partition, self._options, self._names)


Offset = dict[str, int]
# {"seq": 1200}: all changes up to this seq were read.


class ChangesStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The driver's half of a stream. A micro-batch is all that was shipped since the one before."""

    def __init__(self, options: EntryOptions, names: list[str]) -> None:
        self._options = options
        self._names = names
        self._target: int | None = None

    @told_in_one_line
    def initialOffset(self) -> Offset:
        starting = LATEST if self._options.starting is None else self._options.starting
        return {"seq": _mark(self._options) if starting == LATEST else max(0, _first(starting) - 1)}

    @told_in_one_line
    def prepareForTriggerAvailableNow(self) -> None:
        self._target = _mark(self._options)

    @told_in_one_line
    def reportLatestOffset(self) -> Offset | None:
        return {"seq": _mark(self._options)}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable()

    @told_in_one_line
    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        seq, mark = _checked(start), _mark(self._options) if self._target is None else self._target
        if mark < seq:
            raise OffsetOutOfRangeError(
                f"the store has entries up to seq {mark}, and changes were read up to {seq}: it is another engine",
                operation="read changes",
                hint="Use a new checkpoint location",
            )
        return {"seq": mark}

    @told_in_one_line
    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        return _partitions(self._options, _checked(start) + 1, _checked(end))

    def planned(self) -> list[PlannedRead]:
        """What a query that begins now reads first."""
        return _described(self._options, _checked(self.initialOffset()) + 1, _mark(self._options))

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return _read(partition, self._options, self._names)

    def commit(self, end: Offset) -> None:
        """Spark keeps the position itself."""

    def stop(self) -> None:
        """Nothing is open."""


def _checked(offset: Offset) -> int:
    seq = offset.get("seq")
    if type(seq) is not int or seq < 0:
        raise InputError(f"{offset} is not a position in changes", hint="Use a new checkpoint location")
    return seq
