"""A state of an engine computed in Spark, from a source and the log behind it, and compared with another one.

    items -> rows -> parts by name -> in each part in order of key -> sums and differences -> added up by the driver

Invariants
- Data goes between workers alone; the driver gets one small result a part.
- How many parts there are depends on the amount of data, and changes nothing of the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from tidelog.engine.digest import Digest
from tidelog.pipeline.arrow_map import map_in_arrow
from tidelog.pipeline.engine_jobs.digest_merge import RESULT_SCHEMA, Difference, Merge, PartResult
from tidelog.pipeline.engine_jobs.digest_rows import DAMAGE, ROW_SCHEMA, START, RowItem, RowReader, Unreadable
from tidelog.pipeline.jobs.spark_errors import told_in_our_words

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_PART_BYTES = 8 << 20
_MAX_PARTS = 1024
_NAMED = 5
# All versions of a name go to one part; what everybody needs (buckets, where history begins) goes to each.
_PARTS = """
    CASE WHEN source = {damage} THEN array(0)
         WHEN source = {start} OR substring(key, 1, 1) = X'62' THEN sequence(0, {last})
         ELSE array(CAST(pmod(xxhash64(substring(key, 1, length(key) - 8)), {count}) AS INT)) END
"""


class ComputedState(msgspec.Struct, frozen=True, kw_only=True):
    """A state as it was computed, and how it compares. `differences` are the first ones in order of key."""

    seq: int
    digest: str
    things: int
    rows: int
    actual_digest: str
    actual_things: int
    actual_rows: int
    counts: dict[str, int]
    differences: tuple[Difference, ...]
    damage: tuple[Unreadable, ...]


def compute_state(
    spark: SparkSession,
    items: Sequence[RowItem],
    size: int,
    *,
    seq: int,
    horizon_seq: int,
    compares: bool = False,
) -> ComputedState:
    """The state at a seq from these items, of about so many bytes; with `compares`, beside the ACTUAL ones of them."""
    merged = map_in_arrow(sorted_rows(spark, items, size), Merge(seq, horizon_seq, compares=compares), RESULT_SCHEMA)
    with told_in_our_words("computing a state"):
        found = [msgspec.msgpack.decode(bytes(row.result), type=PartResult) for row in merged.collect()]
    return _added_up(found, seq)


def sorted_rows(spark: SparkSession, items: Sequence[RowItem], size: int) -> DataFrame:
    """The rows of items of about so many bytes, as `Merge` takes them: all of a name in one part, in order of key."""
    from pyspark.sql import functions as sql

    parts = min(_MAX_PARTS, max(1, -(-size // _PART_BYTES)))
    rows = map_in_arrow(spark.range(0, len(items), 1, max(1, len(items))), RowReader(items), ROW_SCHEMA)
    numbers = sql.expr(_PARTS.format(damage=DAMAGE, start=START, last=parts - 1, count=parts))
    placed = rows.withColumn("part", sql.explode(numbers))
    return placed.repartition(parts, "part").sortWithinPartitions("part", "key", "source", "lsn", "step")


def _added_up(results: Iterable[PartResult], seq: int) -> ComputedState:
    expected, actual, rows, actual_rows = Digest(), Digest(), 0, 0
    counts: dict[str, int] = {}
    differences: list[Difference] = []
    damage: set[tuple[str, str, int]] = set()
    for one in results:
        expected.add(one.expected.digest())
        actual.add(one.actual.digest())
        rows, actual_rows = rows + one.expected.rows, actual_rows + one.actual.rows
        for kind, count in one.counts.items():
            counts[kind] = counts.get(kind, 0) + count
        differences += one.differences
        damage.update((found.place, found.reason, found.source) for found in one.damage)
    return ComputedState(
        seq=seq,
        digest=expected.text(),
        things=expected.count,
        rows=rows,
        actual_digest=actual.text(),
        actual_things=actual.count,
        actual_rows=actual_rows,
        counts=counts,
        differences=tuple(sorted(differences)[:_NAMED]),
        damage=tuple(Unreadable(*one) for one in sorted(damage)),
    )
