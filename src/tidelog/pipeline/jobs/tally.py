"""The input of a job: its topics, their rows between fixed offsets, and the counts and sums for its proof."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.errors import NotFoundError, NotSupportedError
from tidelog.log.frame import Frames
from tidelog.log.repair import is_lost
from tidelog.pipeline.address import Root
from tidelog.pipeline.jobs.job import NO_ROWS, Totals, sum_text, told_in_our_words
from tidelog.pipeline.location import TopicLocation
from tidelog.pipeline.source.arrow import frames_of
from tidelog.topics.columns import frames_digest
from tidelog.topics.directory import LogDirectory
from tidelog.topics.names import parse_topic_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read_rows(
    spark: SparkSession,
    root: Root,
    offsets: Mapping[str, tuple[int, int]],
    partition: int = 0,
    /,
    **options: object,
) -> DataFrame:
    """The messages of these logs, by their names, each from its first offset up to its end (exclusive).

    With `partition` the names are those of topics, of which that one is read.
    """
    reader = spark.read.format("tidelog")
    starts = {name: {str(partition): first} for name, (first, _) in offsets.items()}
    ends = {name: {str(partition): end} for name, (_, end) in offsets.items()}
    given = {
        **root_options(root),
        "assign": msgspec.json.encode({name: [partition] for name in offsets}).decode(),
        "startingOffsets": msgspec.json.encode(starts).decode(),
        "endingOffsets": msgspec.json.encode(ends).decode(),
        **options,
    }
    for name, value in given.items():
        reader = reader.option(name, str(value))
    with told_in_our_words("the messages cannot be read"):
        return reader.load()


def root_options(root: Root) -> dict[str, str]:
    """A root as the options of the source and of the sink."""
    place = {"root": root.location} if root.metadata is None else {"root": root.location, "metadata": root.metadata}
    return {**root.settings, **place}


# Counts and sums frames, for the proofs of jobs that process whole frames.


# A message's envelope is longer: what is one byte is a mark in the place of a message.
_MARK_BYTES = 1


def tally_frames(frames: Frames, start: int = 0, stop: int | None = None) -> Totals:
    """Frames `start` to `stop` (exclusive). All of them are summed up; marks are not counted as messages."""
    stop = frames.count if stop is None else stop
    if start >= stop:
        return Totals()
    return Totals(
        messages=stop - start - _marks(frames, start, stop),
        first_offset=frames.first_offset + start,
        last_offset=frames.first_offset + stop - 1,
        checksum=sum_text("frames", frames_digest(frames, start, stop)),
    )


def lost_offsets(frames: Frames) -> list[int]:
    """The offsets that a repair has marked as lost."""
    if not _marks(frames, 0, frames.count):
        return []
    lengths = memoryview(frames.lengths).cast("I")
    marks = [index for index in range(frames.count) if lengths[index] == _MARK_BYTES]
    return [frames.first_offset + index for index in marks if is_lost(frames.payloads(index, index + 1)[0])]


def _marks(frames: Frames, start: int, stop: int) -> int:
    lengths = array("I")
    lengths.frombytes(frames.lengths[start * lengths.itemsize : stop * lengths.itemsize])
    return lengths.count(_MARK_BYTES)


# Counts and sums rows of a topic, for the proofs of jobs that turn messages into rows.
#
# The sum of a row is that of the frame that a message with only its offset, key, value and time would have, so the
# extension does the loops. Runs with gaps between their offsets are summed separately.


def tally_rows(offset: pa.Array, key: pa.Array, value: pa.Array | None, timestamp: pa.Array) -> Totals:
    """Rows in the order of their offsets; without values, those are left out of the sum."""
    if not len(offset):
        return NO_ROWS
    value = pa.repeat(pa.scalar(b""), len(offset)) if value is None else value
    batch = pa.record_batch([key, value, timestamp], names=["key", "value", "timestamp"])
    digest = 0
    for first, last in _runs(offset):
        frames = frames_of(batch.slice(first, last - first), offset[first].as_py(), 0, keeps_timestamps=True)
        digest += frames_digest(frames)
    return Totals(
        messages=len(offset),
        first_offset=offset[0].as_py(),
        last_offset=offset[-1].as_py(),
        checksum=sum_text("rows", digest),
    )


def _runs(offset: pa.Array) -> Iterator[tuple[int, int]]:
    """The stretches of rows whose offsets follow each other."""
    if offset[-1].as_py() - offset[0].as_py() == len(offset) - 1:
        return iter([(0, len(offset))])
    steps = pc.subtract(offset.slice(1), offset.slice(0, len(offset) - 1))
    breaks = pc.add(pc.indices_nonzero(pc.not_equal(steps, 1)), pa.scalar(1, pa.uint64())).to_pylist()
    return pairwise([0, *breaks, len(offset)])


# The topics that a job processes, named ones or all, and the store that they are in.
#
# Invariants
# - Only None stands for all topics. A program that found no topic to name processes none, rather than all.
# - A topic with partitions stands for all of their logs. One that nobody has used has none yet, and is left out.


def chosen_logs(log: LogDirectory, known: Sequence[str], topics: Sequence[str] | None, where: str) -> list[str]:
    """The logs of some of the topics that are known, or of all."""
    return chosen_topics(known, topics, where, lambda name: _existing_logs(log, name))


def _existing_logs(log: LogDirectory, name: str) -> list[str]:
    logs = log.partition_logs(name)
    return logs if logs == [name] else [one for one in logs if log.has_topic(one)]


def chosen_topics(
    known: Sequence[str],
    topics: Sequence[str] | None,
    where: str,
    logs_of: Callable[[str], Sequence[str]] = lambda name: (name,),
) -> list[str]:
    """The logs of the topics, each of them once; NotFoundError names one that is not among those that are known."""
    if topics is None:
        return list(dict.fromkeys(each for name in known for each in logs_of(name)))
    names = list(dict.fromkeys(str(parse_topic_name(name)) for name in topics))
    for missing in [name for name in names if name not in known]:
        parent = parse_topic_name(missing).parent()
        if parent is None or str(parent[0]) not in known or missing not in logs_of(str(parent[0])):
            raise NotFoundError(f"there is no topic {missing}", path=where, hint="`tidelog topic list` shows them")
    return list(dict.fromkeys(each for name in names for each in (logs_of(name) if name in known else (name,))))


def notes_on(names: Sequence[str], where: str) -> Iterator[str]:
    """Of a place without topics: that there is nothing wrong with nothing may be a slip in its name."""
    if not names:
        yield f"there are no topics in {where}"


def cataloged_topics(log: LogDirectory) -> list[str]:
    """The topics that the catalog of a store knows, sorted. Those that are on a disk alone are not among them."""
    assert log._tier is not None, "there is a store"
    return sorted("/".join(topic) for topic in log._tier.topics())


def store_of(root: Root, log: LogDirectory, otherwise: str) -> TopicLocation:
    """The store of a root; NotSupportedError says why a job has nothing to do without one."""
    place = root.place
    if place is None:
        raise NotSupportedError("these topics have no store", path=log.root, hint=otherwise)
    return place
