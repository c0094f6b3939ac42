"""Which messages of a topic are superseded: Spark finds the newest of every key, the driver keeps one bit a message.

Invariants
- Only what is published counts, as what is superseded and as what supersedes: a message that is on the owner's disk
  alone may be lost with it.
- Messages without a key are never superseded. An empty value is a tombstone: it supersedes as any other message, and
  goes itself when it is old enough and no other message of its key is left.
- A bit that is set stays right, whatever is appended, removed or compacted later.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import TYPE_CHECKING

from tidelog.pipeline.jobs.spark_errors import told_in_our_words
from tidelog.pipeline.jobs.topic_rows import read_rows
from tidelog.pipeline.root import Root
from tidelog.tier.replacement_build import RemovedOffsets

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_WORD_BITS = 64
_GONE = """
    offset < newest
    OR (offset = newest AND offset = oldest AND is_tombstone AND timestamp < timestamp_micros({before_us}))
"""


class SupersededOffsets:
    """The offsets whose message is to go, as words of 64 bits, where any bit is set."""

    def __init__(self, words: array[int], bits: array[int]) -> None:
        """`words` are numbers of words (offset / 64), in order; `bits` are those of each."""
        self._words = words
        self._bits = bits

    def between(self, start: int, stop: int) -> RemovedOffsets:
        """Those of a range of offsets, and no others."""
        first = start // _WORD_BITS
        dense = array("Q", bytes(8 * (-(-stop // _WORD_BITS) - first)))
        low = bisect_left(self._words, first)
        for index in range(low, bisect_left(self._words, first + len(dense))):
            dense[self._words[index] - first] = self._bits[index]
        number = int.from_bytes(dense.tobytes(), "little")
        number &= ((1 << (stop - start)) - 1) << (start - first * _WORD_BITS)
        return RemovedOffsets(first * _WORD_BITS, number.to_bytes(8 * len(dense), "little"))

    def count(self, start: int, stop: int) -> int:
        """How many there are in a range."""
        return int.from_bytes(self.between(start, stop).bits, "little").bit_count() if start < stop else 0

    def without(self, offset: int) -> SupersededOffsets:
        """The same, but for one offset."""
        index = bisect_left(self._words, offset // _WORD_BITS)
        bits = array("Q", self._bits)
        if index < len(bits) and self._words[index] == offset // _WORD_BITS:
            bits[index] &= ~(1 << offset % _WORD_BITS)
        return SupersededOffsets(self._words, bits)


def superseded_offsets(
    spark: SparkSession, root: Root, topic: str, start: int, stop: int, tombstones_before_us: int
) -> SupersededOffsets:
    """Looks at all messages of a topic from `start` up to `stop` (exclusive), which is as far as it is published."""
    if start >= stop:
        return SupersededOffsets(array("Q"), array("Q"))
    rows = read_rows(spark, root, {topic: (start, stop)}, columns="key,value,offset,timestamp")
    with told_in_our_words(f"looking for what is superseded in {topic}"):
        found = _words(rows, tombstones_before_us).toArrow().sort_by("word")
    words, bits = array("Q"), array("Q")
    for chunk in found.to_batches():
        words.extend(chunk.column("word").to_pylist())
        bits.extend(number % (1 << _WORD_BITS) for number in chunk.column("bits").to_pylist())
    return SupersededOffsets(words, bits)


def _words(rows: DataFrame, tombstones_before_us: int) -> DataFrame:
    """One row for each word that has a bit."""
    from pyspark.sql import Window
    from pyspark.sql import functions as sql

    key = Window.partitionBy("key")
    marked = rows.where("key IS NOT NULL").select(
        "offset",
        "timestamp",
        sql.expr("length(value) = 0").alias("is_tombstone"),
        sql.max("offset").over(key).alias("newest"),
        sql.min("offset").over(key).alias("oldest"),
    )
    gone = marked.where(_GONE.format(before_us=tombstones_before_us))
    word, bits = sql.expr("shiftright(offset, 6)"), sql.expr("bit_or(shiftleft(1L, CAST(offset & 63 AS INT)))")
    return gone.groupBy(word.alias("word")).agg(bits.alias("bits"))
