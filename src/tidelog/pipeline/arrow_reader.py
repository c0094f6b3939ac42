"""From a part of a topic to Arrow record batches that match a schema of Spark's.

Invariants
- Columns that are not in the schema are neither gathered nor sent.
- A batch is small enough for Spark to work on at once and large enough that its overhead does not count.
- An offset that a repair marked as lost, or that has no message in it, raises GapError after everything before it, or
  is passed over if gaps are; which one that was is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.types import StructType

from tidelog.errors import GapError, offsets_text
from tidelog.log.cache import Batch
from tidelog.log.frame import Frames
from tidelog.pipeline.arrow_columns import arrow_schema, record_batch
from tidelog.pipeline.part import ColdPlace, ReadPart
from tidelog.pipeline.partition_reader import read_batches, spare_collections
from tidelog.pipeline.worker_memory import keep_memory
from tidelog.topics.columns import Columns, Ended, gather_columns, lost_until, read_error

_logger = logging.getLogger("tidelog.pipeline")
_MAX_BATCH_BYTES = 8 << 20
_HINT = "failOnDataLoss=false reads on behind it"


def read_record_batches(
    part: ReadPart, place: ColdPlace | None, schema: StructType, *, skips_gaps: bool, max_rows: int
) -> Iterator[pa.RecordBatch]:
    """The rows of a part."""
    keep_memory()
    spare_collections()
    names = schema.fieldNames()
    target = arrow_schema(names)
    for batch in read_batches(part, place, skips_gaps=skips_gaps):
        for columns in _gathered(batch, names, max_rows, skips_gaps=skips_gaps):
            yield record_batch(columns, target, part.topic)


def _gathered(batch: Batch, names: list[str], max_rows: int, *, skips_gaps: bool) -> Iterator[Columns]:
    frames = batch.frames
    assert frames is not None, "what comes from files and objects is framed"
    index = batch.start
    while index < batch.stop:
        columns = gather_columns(
            *(frames, index, batch.stop),
            keys="key" in names,
            values="value" in names,
            headers="headers" in names,
            offsets="offset" in names,
            timestamps="timestamp" in names,
            max_rows=max_rows,
            max_bytes=_MAX_BATCH_BYTES,
        )
        if columns.count:
            yield columns
        index = columns.stopped_at
        if columns.ended is Ended.LOST:
            if not skips_gaps:
                raise _lost(
                    frames.first_offset + index, frames.first_offset + lost_until(frames, index, batch.stop) - 1
                )
            index = lost_until(frames, index, batch.stop)
        elif columns.ended is Ended.UNREADABLE:
            _pass_over(frames, index, skips_gaps=skips_gaps)
            index += 1


def _pass_over(frames: Frames, index: int, *, skips_gaps: bool) -> None:
    damage, offset = read_error(frames, index), frames.first_offset + index
    if not skips_gaps:
        raise GapError(f"{damage}: it cannot be read", first=offset, last=offset, hint=_HINT) from damage
    _logger.warning("passed over: %s", damage)


def _lost(first: int, last: int) -> GapError:
    return GapError(
        f"{offsets_text(first, last)} lost to damage, and marked so by a repair",
        first=first,
        last=last,
        hint=_HINT,
    )
