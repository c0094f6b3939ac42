"""The driver's half of a stream without Spark: what it makes of topics that go, and of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

import tidelog
from tidelog.errors import InputError, NotFoundError, OffsetOutOfRangeError
from tidelog.log.binding import is_log_id
from tidelog.pipeline.source.options import from_checkpoint, parse_source_options, source_schema, to_checkpoint
from tidelog.pipeline.source.topics import read_partition
from tidelog.pipeline.source.topics_stream import TopicStreamReader

GONE, KEPT = "shop/gone", "shop/kept"
ALL = ReadAllAvailable()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A log directory with two topics of ten messages."""
    with tidelog.open(tmp_path / "data") as log:
        for name in (GONE, KEPT):
            log.topic(name).append_many([b"x"] * 10)
    return tmp_path / "data"


def reader_of(root: Path | str, **options: str) -> TopicStreamReader:
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
    assert from_checkpoint(lossy.latestOffset(to_checkpoint(begun), ALL))[0] == {GONE: 6, KEPT: 15}
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


@pytest.mark.parametrize("offsets", [5, "x", None, {"x": 5}, {"-1": 5}, {"0": "5"}, {"0": 5.0}, {"0": None}, [5]])
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


def make_again(log: tidelog.LogDirectory, messages: int) -> None:
    """Another topic in the place of the first, a longer one."""
    log.delete_topic(GONE)
    log.topic(GONE).append_many([b"new"] * messages, sync=True)


@pytest.fixture(params=["directory", "store"])
def streamed(request: pytest.FixtureRequest, tmp_path: Path, root: Path) -> Iterator[tuple[tidelog.LogDirectory, str]]:
    """A log that is open, with two topics of ten messages, and where a stream reads it."""
    if request.param == "directory":
        with tidelog.open(root) as log:
            yield log, str(root)
        return
    store = (tmp_path / "store").as_uri()
    with tidelog.open(tmp_path / "owner", store=store, metadata="bucket") as log:
        for name in (GONE, KEPT):
            log.topic(name).append_many([b"x"] * 10)
            log.topic(name).ship()
        yield log, store


def read_values(reader: TopicStreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[bytes]:
    batches = (
        batch
        for partition in reader.partitions(start, end)
        for batch in read_partition(partition, reader._options, source_schema())
    )
    return [value for batch in batches for value in batch.column("value").to_pylist()]


@pytest.mark.parametrize("is_same_query", [True, False])
def test_a_topic_that_was_made_again_is_noticed(
    streamed: tuple[tidelog.LogDirectory, str], is_same_query: bool
) -> None:
    """Without this, a stream passed over the first messages of the new topic, and nobody heard of it."""
    log, root = streamed
    strict, lossy = reader_of(root), reader_of(root, failOnDataLoss="false")
    begun = lossy.latestOffset(lossy.initialOffset(), ALL)
    assert from_checkpoint(begun)[0] == {GONE: 10, KEPT: 10}
    assert strict.latestOffset(begun, ALL) == begun
    make_again(log, 12)
    if log._tier is not None:
        log.topic(GONE).ship()
    if not is_same_query:
        strict, lossy = reader_of(root), reader_of(root, failOnDataLoss="false")
    with pytest.raises(OffsetOutOfRangeError, match="shop/gone was deleted and made again"):
        strict.latestOffset(begun, ALL)
    end = lossy.latestOffset(begun, ALL)
    assert from_checkpoint(end)[0] == {GONE: 12, KEPT: 10}
    assert read_values(lossy, begun, end) == [b"new"] * 12
    assert lossy.latestOffset(end, ALL) == end
    assert strict.latestOffset(end, ALL) == end
    for reader in (strict, lossy):
        reader.stop()


def test_a_batch_of_a_topic_that_was_made_again_is_not_read_from_the_new_one(root: Path) -> None:
    """It was planned, the query ended, and the topic is another one when it starts again."""
    with tidelog.open(root) as log:
        reader = reader_of(root, failOnDataLoss="false")
        start = reader.initialOffset()
        end = reader.latestOffset(start, ALL)
        make_again(log, 12)
        assert read_values(reader_of(root, failOnDataLoss="false"), start, end) == [b"x"] * 10
        with pytest.raises(OffsetOutOfRangeError, match="made again: the one that was to be read up to offset 10"):
            reader_of(root).partitions(start, end)
        assert read_values(reader, end, reader.latestOffset(end, ALL)) == [b"new"] * 12


def test_a_checkpoint_without_ids_goes_on_and_gets_them(root: Path) -> None:
    """One that an earlier query left, or that somebody wrote."""
    end = reader_of(root).latestOffset(to_checkpoint({GONE: 3, KEPT: 10}), ALL)
    offsets, log_ids = from_checkpoint(end)
    assert offsets == {GONE: 10, KEPT: 10}
    assert sorted(log_ids) == [GONE, KEPT]
    assert all(is_log_id(one) for one in log_ids.values())
