"""Rows on their way between tasks: many of them in one cell, so that Spark moves pieces and not rows.

    batches -> packed -> pieces                                          what a later step reads again
    batches -> Divided("part", 8) -> (task, piece) -> Spark's shuffle -> Gathered(["key"]) -> batches in order

A row that goes through Spark by itself is converted four times (Arrow to row, row to shuffle, sorted, row to Arrow). A
piece is copied, and the rows in it are divided and sorted where they are made and used.

Invariants
- A piece is an Arrow stream of the rows of one task, of about `_PIECE_BYTES` unless a single row is larger.
- `Gathered` gives all rows of a task in order: numbers by value, bytes as unsigned, null last. Equal ones are in any
  order, as the pieces of a shuffle are.
- A task holds about `_DIVIDED_BYTES` of rows that it divides and `_RUN_BYTES` of rows that it sorts. Beyond it, sorted
  runs wait in files of the machine's temporary directory, which have no name and end with the task.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import IO, TYPE_CHECKING

from tidelog import _native

if TYPE_CHECKING:
    import pyarrow as pa

PIECE_SCHEMA = "piece binary"
TASK_SCHEMA = "task int, piece binary"
_PIECE_BYTES = 2 << 20
_DIVIDED_BYTES = 16 << 20
_RUN_BYTES = 192 << 20
_BATCH_ROWS = 32768
# Of a run in a file: all runs have a batch in memory while they are merged.
_RUN_BATCH_ROWS = 4096


def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Buffer]:
    """Rows as pieces."""
    return (piece for table in _tables(batches, _PIECE_BYTES) for piece in _pieces(table))


def unpack(pieces: Iterable[bytes | pa.Buffer]) -> Iterator[pa.Table]:
    """The rows of pieces."""
    import pyarrow as pa

    return (pa.ipc.open_stream(piece).read_all() for piece in pieces)


def packed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Rows as pieces, as batches of `PIECE_SCHEMA`."""
    import pyarrow as pa

    return (pa.RecordBatch.from_arrays([_cell(piece)], names=["piece"]) for piece in pack(batches))


def unpacked(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows of pieces, which come as batches of `PIECE_SCHEMA`."""
    for piece in unpack(_cells(batches)):
        yield from piece.to_batches()


class Divided:
    """Rows as pieces for tasks by a number of theirs: with the number of the task, or as batches of `TASK_SCHEMA`."""

    def __init__(self, by: str, tasks: int) -> None:
        self._by = by
        self._tasks = tasks

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        for task, piece in self.pieces(batches):
            columns = [pa.array([task], pa.int32()), _cell(piece)]
            yield pa.RecordBatch.from_arrays(columns, names=["task", "piece"])

    def pieces(self, batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.Buffer]]:
        """The pieces, each with its task."""
        for table in _tables(batches, _DIVIDED_BYTES):
            for task, rows in self._by_task(table):
                for piece in _pieces(rows):
                    yield task, piece

    def _by_task(self, table: pa.Table) -> Iterator[tuple[int, pa.Table]]:
        import pyarrow.compute as pc

        if self._tasks == 1:
            yield 0, table
            return
        whole = table.combine_chunks()
        tasks = remainders(whole.column(self._by).combine_chunks(), self._tasks)
        order = pc.sort_indices(tasks)
        rows, runs, first = whole.take(order), pc.run_end_encode(tasks.take(order)), 0
        for task, end in zip(runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True):
            yield task, rows.slice(first, end - first)
            first = end


def remainders(numbers: pa.Array, divisor: int) -> pa.Array:
    """Numbers modulo another one, none of them negative."""
    import pyarrow as pa
    import pyarrow.compute as pc

    wide = numbers.cast(pa.int64())
    by = pa.scalar(divisor, pa.int64())
    rest = pc.subtract(wide, pc.multiply(pc.divide(wide, by), by))
    return pc.if_else(pc.less(rest, 0), pc.add(rest, by), rest).cast(pa.int32())


class Gathered:
    """All rows of the pieces of a task, in the order of some columns."""

    def __init__(self, order: Sequence[str], run_bytes: int = _RUN_BYTES) -> None:
        self._order = tuple(order)
        self._run_bytes = run_bytes

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return self.of(unpack(_cells(batches)))

    def of(self, pieces: Iterable[pa.Table]) -> Iterator[pa.RecordBatch]:
        """The same of what is in pieces."""
        runs, held, held_bytes = list[Iterator["pa.RecordBatch"]](), list["pa.Table"](), 0
        for piece in pieces:
            held.append(piece)
            held_bytes += piece.nbytes
            if held_bytes >= self._run_bytes:
                runs.append(_in_file(self._sorted(held)))
                held, held_bytes = [], 0
        if runs:
            rest = self._sorted(held).to_batches(max_chunksize=_RUN_BATCH_ROWS) if held else []
            yield from self._merged([*runs, iter(rest)])
        elif held:
            yield from self._sorted(held).to_batches(max_chunksize=_BATCH_ROWS)

    def _sorted(self, pieces: Sequence[pa.Table]) -> pa.Table:
        import pyarrow as pa

        whole = pa.concat_tables(pieces).combine_chunks()
        return whole.take(order_of(whole, self._order))

    def _merged(self, runs: Sequence[Iterator[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
        """Sorted runs as one. What is known of all of them is sorted together; it is final up to the first row behind
        which a run has more that is not known yet."""
        import pyarrow as pa
        import pyarrow.compute as pc

        waiting: pa.Table | None = None
        heads = {number: next(run, None) for number, run in enumerate(runs)}
        unknown = {number for number, head in heads.items() if head is not None}
        while True:
            known = [_marked(head, number) for number, head in heads.items() if head is not None]
            whole = pa.concat_tables([one for one in (waiting, *known) if one is not None]).combine_chunks()
            whole = whole.take(order_of(whole, self._order))
            lasts = whole.column("run").combine_chunks()
            final, run = min(
                ((pc.index(lasts, number).as_py(), number) for number in unknown), default=(whole.num_rows - 1, -1)
            )
            yield from whole.slice(0, final + 1).drop_columns(["run"]).to_batches()
            waiting = whole.slice(final + 1)
            if run < 0:
                return
            heads = {run: next(runs[run], None)}
            if heads[run] is None:
                unknown.discard(run)


BytesColumn = tuple["pa.Buffer | None", "pa.Buffer | bytes", "pa.Buffer | bytes", int, int]
_NumbersColumn = tuple["pa.Buffer | None", "pa.Buffer | bytes", int, int]


def order_of(table: pa.Table, names: Iterable[str]) -> pa.Array:
    """The numbers of rows in the order of some columns: numbers by value, bytes as unsigned, null last."""
    return order_of_columns([table.column(name).combine_chunks() for name in names], table.num_rows)


def order_of_columns(columns: Sequence[pa.Array], count: int) -> pa.Array:
    """The same of arrays, which are of binary or of signed numbers."""
    import pyarrow as pa

    ordered = _native.order_rows(tuple(_column(one) for one in columns), count)
    return pa.Array.from_buffers(pa.uint32(), count, [None, pa.py_buffer(ordered)])


def _column(array: pa.Array) -> BytesColumn | _NumbersColumn:
    import pyarrow as pa

    if pa.types.is_binary(array.type):
        return bytes_column(array)
    assert pa.types.is_signed_integer(array.type), "numbers are compared as signed ones"
    validity, data = array.buffers()
    return validity, b"" if data is None else data, array.offset, array.type.bit_width // 8


def bytes_column(array: pa.Array) -> BytesColumn:
    """An array of binary as the kernels take it."""
    validity, ends, data = array.buffers()
    return validity, b"" if ends is None else ends, b"" if data is None else data, array.offset, 4


def _marked(head: pa.RecordBatch, number: int) -> pa.Table:
    """Rows of a run; the last of them has its number, the others -1."""
    import pyarrow as pa

    marks = pa.array([*([-1] * (head.num_rows - 1)), number], pa.int32())
    return pa.Table.from_batches([head]).append_column("run", marks)


def _in_file(rows: pa.Table) -> Iterator[pa.RecordBatch]:
    """The same rows, which are in a file from now on."""
    import pyarrow as pa

    directory = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or None
    file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  it is closed behind its last batch
    with pa.ipc.new_stream(file, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=_RUN_BATCH_ROWS)
    return _read_from(file)


def _read_from(file: IO[bytes]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    with file:
        file.seek(0)
        yield from pa.ipc.open_stream(file)


def _tables(batches: Iterable[pa.RecordBatch], size: int) -> Iterator[pa.Table]:
    """Rows in tables of about this size; the last one may be smaller."""
    import pyarrow as pa

    held, held_bytes = list["pa.RecordBatch"](), 0
    for batch in chain(batches, [None]):
        if batch is not None and batch.num_rows:
            held.append(batch)
            held_bytes += batch.nbytes
        if held and (batch is None or held_bytes >= size):
            yield pa.Table.from_batches(held)
            held, held_bytes = [], 0


def _pieces(table: pa.Table) -> Iterator[pa.Buffer]:
    """A table as streams of bytes."""
    import pyarrow as pa

    count = min(table.num_rows, -(-table.nbytes // _PIECE_BYTES)) or 1
    cuts = [table.num_rows * number // count for number in range(count + 1)]
    for first, end in pairwise(cuts):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table.slice(first, end - first).combine_chunks())
        yield sink.getvalue()


def _cell(piece: pa.Buffer) -> pa.Array:
    """A column of one row, without a copy."""
    import pyarrow as pa

    ends = pa.array([0, piece.size], pa.int32()).buffers()[1]
    return pa.Array.from_buffers(pa.binary(), 1, [None, ends, piece])


def _cells(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Buffer]:
    return (piece.as_buffer() for batch in batches for piece in batch.column("piece"))
