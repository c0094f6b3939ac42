"""The driver's half of a stream without Spark: what it makes of topics that go, and of checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

import tidelog
from tidelog.errors import InputError, NotFoundError, OffsetOutOfRangeError
from tidelog.pipeline.options import parse_source_options
from tidelog.pipeline.positions import to_checkpoint
from tidelog.pipeline.schema import source_schema
from tidelog.pipeline.source import read_partition
from tidelog.pipeline.stream_source import TopicStreamReader

GONE, KEPT = "shop/gone", "shop/kept"
ALL = ReadAllAvailable()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A log directory with two topics of ten messages."""
    with tidelog.open(tmp_path / "data") as log:
        for name in (GONE, KEPT):
            log.topic(name).append_many([b"x"] * 10)
    return tmp_path / "data"


def reader_of(root: Path, **options: str) -> TopicStreamReader:
    """A stream of both topics from their beginning."""
    given = {"root": str(root), "subscribe": f"{GONE},{KEPT}", "startingOffsets": "earliest", **options}
    return TopicStreamReader(parse_source_options(given), source_schema())


def rows(reader: TopicStreamReader, start: dict[str, int], end: dict[str, int]) -> dict[str, int]:
    """How many rows of each topic a batch has."""
    found: dict[str, int] = {}
    for partition in reader.partitions(to_checkpoint(start), to_checkpoint(end)):
        for batch in read_partition(partition, reader._options, source_schema()):
            for name in batch.column("topic").to_pylist():
                found[name] = found.get(name, 0) + 1
    return found


@pytest.mark.parametrize("is_available_now", [False, True])
def test_a_stream_that_allows_loss_outlives_a_topic(root: Path, is_available_now: bool) -> None:
    """The others go on, also in a batch that was begun before; where loss is an error it is one."""
    with tidelog.open(root) as log:
        log.delete_topic(GONE)
        log.topic(KEPT).append_many([b"x"] * 5)
    strict, lossy = reader_of(root), reader_of(root, failOnDataLoss="false")
    begun = {GONE: 6, KEPT: 6}
    for reader in (strict, lossy):
        if is_available_now:
            reader.prepareForTriggerAvailableNow()
        assert reader.reportLatestOffset() == to_checkpoint({KEPT: 15})
    assert lossy.latestOffset(to_checkpoint(begun), ALL) == to_checkpoint({GONE: 6, KEPT: 15})
    assert rows(lossy, {GONE: 0, KEPT: 0}, begun) == {KEPT: 6}
    with pytest.raises(OffsetOutOfRangeError, match="shop/gone is gone, and was read up to offset 6"):
        strict.latestOffset(to_checkpoint(begun), ALL)
    with pytest.raises(OffsetOutOfRangeError, match="shop/gone is gone, and was to be read up to offset 6"):
        rows(strict, {GONE: 0, KEPT: 0}, begun)


@pytest.mark.parametrize("allowed", ["true", "false"])
def test_a_topic_that_never_was_is_a_mistake(root: Path, allowed: str) -> None:
    """Nothing of it is lost, whatever is allowed; also when a query gets one more topic."""
    reader = reader_of(root, subscribe=f"{KEPT},shop/kepd", failOnDataLoss=allowed)
    with pytest.raises(NotFoundError, match="no topic shop/kepd"):
        reader.initialOffset()
    with pytest.raises(NotFoundError, match="no topic shop/kepd"):
        reader.latestOffset(to_checkpoint({KEPT: 3}), ALL)


@pytest.mark.parametrize("offsets", [5, "x", None, {"1": 5}, {"0": "5"}, {"0": 5.0}, {"0": None}, [5]])
def test_a_checkpoint_of_something_else_is_refused(root: Path, offsets: object) -> None:
    """Its offsets are not taken for those of a topic."""
    with pytest.raises(InputError, match=r"not tidelog's.*take another one"):
        reader_of(root).latestOffset({KEPT: offsets}, ALL)


def test_offsets_of_a_checkpoint_beyond_the_topic_are_loss(root: Path) -> None:
    """However large they are."""
    for offset in (11, 2**63, 2**70):
        with pytest.raises(OffsetOutOfRangeError, match="ends at offset 10"):
            reader_of(root).latestOffset(to_checkpoint({GONE: 0, KEPT: offset}), ALL)
        with pytest.raises(OffsetOutOfRangeError, match="ends at offset 10"):
            rows(reader_of(root), {GONE: 0, KEPT: 0}, {GONE: 0, KEPT: offset})
