"""What records did to rows of the tree, as columns: the kernel held against its oracle, damaged records included."""

from __future__ import annotations

import random
import struct
from typing import Any

import pyarrow as pa
import pytest
from tests.engine.stations import EngineNode, new_store
from tests.oracles import changes as oracle
from tests.pipeline.engines.test_log_rows import planned
from tests.twins import agreed

from tidelog import _native
from tidelog.engine.wal.replay import counting
from tidelog.pipeline.jobs.engine.rows import settled
from tidelog.pipeline.source.log_changes import change_columns
from tidelog.pipeline.tasks import BATCH_ROWS

kernel: Any = _native


def _node() -> Any:
    """Puts, copies, deletions, batches, rollbacks, and what retention removed."""
    node = EngineNode(new_store(), name="changes", rotate_max_bytes=4096).open()
    for _ in range(3):
        node.apply(40)
        kept = node.engine.applied_seq
        node.apply(10)
        node.roll_back(kept)
    node.ship_all()
    return node


def test_columns_are_those_of_the_oracle_however_they_are_divided() -> None:
    """All rows, some at a time, and from any place on."""
    with _node() as node:
        (work,) = planned(node, 1 << 30)
        seen = 0
        for frames, indexes in counting(work.log(), work, removals=True):
            given = (frames.first_offset, frames.buffer, frames.positions, frames.lengths, indexes)
            for start, most in ((0, BATCH_ROWS), (0, 1), (3, 5), (len(indexes) // 4, 9)):
                agreed(kernel, oracle, "gather_changes", *given, start, most)
            seen += agreed(kernel, oracle, "gather_changes", *given, 0, BATCH_ROWS)[1][0]
        assert seen == sum(len(columns.key) for _, columns in change_columns(work))
        assert seen > 40


def test_damaged_records_are_told_as_the_oracle_tells_them() -> None:
    """A bit that is flipped, a record that is cut, an index that is none: the same error, or the same rows."""
    chance = random.Random(7)
    with _node() as node:
        (work,) = planned(node, 1 << 30)
        frames, _ = next(iter(counting(work.log(), work, removals=True)))
        for _ in range(400):
            buffer, lengths = bytearray(frames.buffer), bytearray(frames.lengths)
            at = chance.randrange(len(lengths) // 4)
            position = struct.unpack_from("<Q", frames.positions, 8 * at)[0]
            (length,) = struct.unpack_from("<I", lengths, 4 * at)
            buffer[position + chance.randrange(length)] ^= 1 << chance.randrange(8)
            if chance.random() < 0.3:
                struct.pack_into("<I", lengths, 4 * at, chance.randrange(1, length))
            given = (frames.first_offset, bytes(buffer), frames.positions, bytes(lengths))
            agreed(kernel, oracle, "gather_changes", *given, struct.pack("<I", at), 0, BATCH_ROWS)
        given = (frames.first_offset, frames.buffer, frames.positions, frames.lengths)
        agreed(kernel, oracle, "gather_changes", *given, struct.pack("<I", frames.count), 0, 5)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_last_change_of_each_key_is_settled_however_rows_are_divided(size: int) -> None:
    """A key may begin in one batch and end in a later one; one that was removed last is not there."""
    rows = [(b"a", b"1"), (b"a", b"2"), (b"b", b"3"), (b"b", None), (b"c", None), (b"c", b"4"), (b"d", b"5")]
    whole = pa.table({"key": [key for key, _ in rows], "cell": [cell for _, cell in rows]})
    whole = whole.cast(pa.schema([("key", pa.binary()), ("cell", pa.binary())]))
    found = pa.Table.from_batches(settled(iter(whole.to_batches(max_chunksize=size))))
    assert found.to_pydict() == {"key": [b"a", b"c", b"d"], "cell": [b"2", b"4", b"5"]}
