"""What a job over an engine begins with: the newest state or compaction that can be read, so that only the tail of the
log is. Rolled back ranges of what is older may be forgotten, so the log is read from its beginning only if there is
nothing else.

Invariants
- A base has all rows up to a seq, and says from which LSN on the log goes on.
- Blocks of a state of one file are split among tasks, and so are the files of one of several.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from tidelog.engine.cell_blocks import Row, block_bytes, decode_block, rows_in
from tidelog.engine.manifest import StoredCheckpoint
from tidelog.engine.row_file import RowPart
from tidelog.engine.store_checkpoint import BlockPlace, StoredState
from tidelog.errors import CorruptionError, DataError
from tidelog.pipeline.engine_jobs.index_rows import PartWork, as_changes, part_batches
from tidelog.pipeline.engine_jobs.log_rows import CHANGE_SCHEMA
from tidelog.pipeline.engines.store_place import EnginePlace
from tidelog.tier.object_store import ObjectStore

if TYPE_CHECKING:
    import pyarrow as pa

    from tidelog.pipeline.engine_jobs.compact_flow import Flow, Rows

_TASK_BYTES = 8 << 20


class Base(msgspec.Struct, frozen=True, kw_only=True):
    """Rows up to `seq`; the log goes on with `lsn`. `key` is what they are read from."""

    key: str
    seq: int
    lsn: int
    rows: int
    parts: tuple[RowPart, ...] = ()
    blocks: tuple[BlockPlace, ...] = ()

    def changes(self, flow: Flow, place: EnginePlace) -> Rows | None:
        """Its rows, as changes before those of the log; None where it has none."""
        if self.parts:
            works = [PartWork(place=place, part=part) for part in self.parts]
            return flow.source(part_batches, works, CHANGE_SCHEMA)
        groups = _groups(self.blocks)
        blocks = [BlocksWork(place=place, key=self.key, blocks=group) for group in groups]
        return flow.source(block_batches, blocks, CHANGE_SCHEMA) if blocks else None


def base_of(objects: ObjectStore, listed: StoredCheckpoint) -> Base:
    """A state as a base; DataError or NotFoundError when its footer cannot be read."""
    state = StoredState(objects, listed)
    return Base(
        key=listed.key,
        seq=listed.seq,
        lsn=listed.lsn,
        rows=listed.rows,
        parts=state.parts(),
        blocks=state.footer.blocks,
    )


class BlocksWork(msgspec.Struct, frozen=True, kw_only=True):
    """Some blocks of a state of one file, one behind the other."""

    place: EnginePlace
    key: str
    blocks: tuple[BlockPlace, ...]


def _groups(blocks: Sequence[BlockPlace]) -> list[tuple[BlockPlace, ...]]:
    groups: list[list[BlockPlace]] = []
    for block in blocks:
        if not groups or block.byte + block.size - groups[-1][0].byte > _TASK_BYTES:
            groups.append([])
        groups[-1].append(block)
    return [tuple(group) for group in groups]


def block_batches(work: BlocksWork) -> Iterator[pa.RecordBatch]:
    """Their rows, as changes before those of the log."""
    return as_changes(_rows_of_blocks(work))


def _rows_of_blocks(work: BlocksWork) -> Iterator[Row]:
    start, last = work.blocks[0].byte, work.blocks[-1]
    data = work.place.opened().objects.read_range(work.key, start, last.byte + last.size - start)
    for block in work.blocks:
        try:
            yield from _rows_of(block, data[block.byte - start : block.byte - start + block.size])
        except CorruptionError:
            raise
        except DataError as error:
            raise CorruptionError(error.message, path=work.key, byte=block.byte, operation="read") from error


def _rows_of(place: BlockPlace, block: memoryview) -> list[Row]:
    if block_bytes(block) != place.size:
        raise DataError("a block of another size than it must have")
    rows = list(rows_in(decode_block(block), place.count, b""))
    if (rows[0][0], rows[-1][0]) != (place.first_key, place.last_key):
        raise DataError("a block with other keys than it must have")
    return rows
