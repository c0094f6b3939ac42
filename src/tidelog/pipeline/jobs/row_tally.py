"""Counting rows of a topic and summing them up, for the proofs of jobs that turn messages into rows.

The sum of a row is that of the frame that a message with its offset, key, value and time alone would have, so the loops
are those of the kernel. Of runs with holes between their offsets each is summed up by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pyarrow as pa
import pyarrow.compute as pc

from tidelog.pipeline.arrow_columns import frames_of
from tidelog.pipeline.jobs.proof import Tally
from tidelog.topics.columns import frames_digest

NO_ROWS = Tally(kind="rows")


def tally_rows(offset: pa.Array, key: pa.Array, value: pa.Array | None, timestamp: pa.Array) -> Tally:
    """Rows in the order of their offsets; without values, those are left out of the sum."""
    if not len(offset):
        return NO_ROWS
    value = pa.repeat(pa.scalar(b""), len(offset)) if value is None else value
    batch = pa.record_batch([key, value, timestamp], names=["key", "value", "timestamp"])
    digest = 0
    for first, last in _runs(offset):
        frames = frames_of(batch.slice(first, last - first), offset[first].as_py(), 0, keeps_timestamps=True)
        digest += frames_digest(frames)
    return Tally(
        messages=len(offset),
        first_offset=offset[0].as_py(),
        last_offset=offset[-1].as_py(),
        digest=digest % (1 << 64),
        kind="rows",
    )


def _runs(offset: pa.Array) -> Iterator[tuple[int, int]]:
    """The stretches of rows whose offsets follow each other."""
    if offset[-1].as_py() - offset[0].as_py() == len(offset) - 1:
        return iter([(0, len(offset))])
    steps = pc.subtract(offset.slice(1), offset.slice(0, len(offset) - 1))
    breaks = pc.add(pc.indices_nonzero(pc.not_equal(steps, 1)), pa.scalar(1, pa.uint64())).to_pylist()
    return pairwise([0, *breaks, len(offset)])
