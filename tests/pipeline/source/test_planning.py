"""How a range is divided among tasks, and that the parts give back exactly what was asked for."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tidelog
from tidelog.cold.fetch import Fetcher
from tidelog.errors import GapError, NotSupportedError, OffsetOutOfRangeError
from tidelog.pipeline.location import ReadPart
from tidelog.pipeline.source.options import parse_source_options
from tidelog.pipeline.source.partition_reader import read_batches
from tidelog.pipeline.source.planning import OpenTopics
from tidelog.pipeline.source.topics_stream import admit_rows
from tidelog.topics.message import decode_frames

TOPIC = "shop/orders"
MESSAGES = 3000


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2,000 messages in some objects, 1,000 more on the disk alone."""
    root = tmp_path_factory.mktemp("shop")
    with tidelog.open(root / "data", store=f"file://{root}/store", metadata="bucket", rotate_max_bytes="16KiB") as log:
        topic = log.topic(TOPIC, max_object_bytes=100_000)
        for number in range(2000):
            topic.append(_value(number))
        topic.ship()
        for number in range(2000, MESSAGES):
            topic.append(_value(number))
    return root


def _value(number: int) -> bytes:
    return b"%08d" % number * 25


def _topics(root: Path | str, **options: object) -> OpenTopics:
    given = {"root": str(root), "subscribe": TOPIC, **{name: str(value) for name, value in options.items()}}
    return OpenTopics(parse_source_options(given))


def _read(topics: OpenTopics, parts: list[ReadPart]) -> list[int]:
    batches = [batch for part in parts for batch in read_batches(part, topics.place, skips_gaps=False)]
    messages = [
        one for batch in batches if batch.frames for one in decode_frames(batch.frames, batch.start, batch.stop)
    ]
    assert all(message.value == _value(message.offset) for message in messages)
    return [message.offset for message in messages]


def test_the_whole_topic_comes_from_objects_and_then_from_files(shop: Path) -> None:
    """Every offset once and in order, the shipped ones from the store although the disk has them too."""
    with _topics(shop / "data") as topics:
        parts = topics.plan({TOPIC: (0, MESSAGES)})
        assert _read(topics, parts) == list(range(MESSAGES))
        assert sum(len(part.descriptors) for part in parts) >= 5
        assert {part.cold_stop for part in parts} == {2000}


def test_the_bucket_alone_gives_what_was_shipped(shop: Path) -> None:
    """A store URL is enough, and a task needs no metadata store: it is told where everything is."""
    with _topics(f"file://{shop}/store") as topics:
        assert topics.log(TOPIC).next_offset == 2000
        assert _read(topics, topics.plan({TOPIC: (100, 1900)})) == list(range(100, 1900))


@given(
    start=st.integers(0, MESSAGES - 1),
    length=st.integers(1, MESSAGES),
    min_parts=st.integers(1, 40),
    max_records=st.none() | st.integers(1, 500),
)
def test_parts_cover_any_range_exactly(
    shop: Path, start: int, length: int, min_parts: int, max_records: int | None
) -> None:
    """Whatever is asked for, parts touch each other, keep the limits and miss nothing."""
    stop = min(MESSAGES, start + length)
    more = {} if max_records is None else {"maxRecordsPerPartition": max_records}
    with _topics(shop / "data", minPartitions=min_parts, **more) as topics:
        parts = topics.plan({TOPIC: (start, stop)})
    assert [part.start for part in parts] == [start, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == stop
    assert len(parts) >= min(min_parts, stop - start)
    assert max_records is None or all(part.stop - part.start <= max_records for part in parts)
    assert [part.cold_stop for part in parts] == [min(max(part.start, 2000), part.stop) for part in parts]


def test_no_part_reads_beyond_its_end(shop: Path) -> None:
    """Also where objects have more: each offset comes once, whatever it is cut into."""
    with _topics(shop / "data", minPartitions=7) as topics:
        assert _read(topics, topics.plan({TOPIC: (0, MESSAGES)})) == list(range(MESSAGES))


def test_parts_have_about_the_same_number_of_bytes(shop: Path) -> None:
    """Four parts of a topic with messages of one size have about a quarter of them each."""
    with _topics(shop / "data", minPartitions=4) as topics:
        parts = topics.plan({TOPIC: (0, MESSAGES)})
    assert len(parts) == 4
    assert all(500 < part.stop - part.start < 1000 for part in parts)


def test_a_file_that_was_pruned_since_the_plan_is_read_from_the_store(shop: Path, tmp_path: Path) -> None:
    """The plan names files; when these are gone by then, the catalog says where their messages are."""
    shutil.copytree(shop / "data", tmp_path / "data")
    shutil.copytree(shop / "store", tmp_path / "store")
    info = tmp_path / "data" / "tidelog.json"
    info.write_text(info.read_text().replace(str(shop), str(tmp_path)))
    with _topics(tmp_path / "data") as topics:
        parts = topics.plan({TOPIC: (1500, MESSAGES)})
        with tidelog.open(tmp_path / "data") as log:
            log.topic(TOPIC).ship()
            log.topic(TOPIC).seal()
        assert _read(topics, parts) == list(range(1500, MESSAGES))


def test_an_object_that_is_gone_is_named(shop: Path, tmp_path: Path) -> None:
    """A task whose object is missing asks the catalog once more, and then says which offsets are gone."""
    shutil.copytree(shop / "store", tmp_path / "store")
    with _topics(f"file://{tmp_path}/store") as topics:
        parts = topics.plan({TOPIC: (0, 2000)})
        victim = sorted((tmp_path / "store").rglob("*.tlog"))[2]
        victim.unlink()
        with pytest.raises(GapError, match="not in the store"):
            _read(topics, parts)


def test_one_percent_of_the_offsets_costs_less_than_three_percent_of_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is fetched follows from what is asked for, wherever in the topic that is."""
    with tidelog.open(tmp_path / "data", store=f"file://{tmp_path}/store", metadata="bucket") as log:
        topic = log.topic(TOPIC)
        for first in range(0, 200_000, 10_000):
            topic.append_many([b"%0200d" % number for number in range(first, first + 10_000)])
        topic.ship()
    total = sum(path.stat().st_size for path in (tmp_path / "store").rglob("*.tlog"))
    fetched: list[int] = []
    fetch = Fetcher.fetch

    def counted(fetcher: Fetcher, key: str, start: int, length: int) -> memoryview:
        fetched.append(length)
        return fetch(fetcher, key, start, length)

    monkeypatch.setattr(Fetcher, "fetch", counted)
    with _topics(f"file://{tmp_path}/store") as topics:
        for start in (0, 70_001, 123_456, 198_000):
            fetched.clear()
            parts = topics.plan({TOPIC: (start, start + 2000)})
            batches = [batch for part in parts for batch in read_batches(part, topics.place, skips_gaps=False)]
            assert sum(batch.stop - batch.start for batch in batches) == 2000
            assert 0 < sum(fetched) < 0.03 * total


def test_offsets_that_are_no_longer_kept_are_data_loss(shop: Path) -> None:
    """Behind the end, and told with the option that allows it."""
    with _topics(shop / "data") as topics, pytest.raises(OffsetOutOfRangeError, match="failOnDataLoss"):
        topics.readable_range(TOPIC, 10, MESSAGES + 1)
    with _topics(shop / "data", failOnDataLoss="false") as topics:
        assert topics.readable_range(TOPIC, 10, MESSAGES + 1) == (10, MESSAGES)


@given(
    waiting=st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 1000), min_size=1), limit=st.integers(1, 500)
)
def test_a_limit_is_shared_out_and_used_up(waiting: dict[str, int], limit: int) -> None:
    """As many rows as allowed, never more, never behind the end of a topic."""
    admitted = admit_rows(dict.fromkeys(waiting, 0), waiting, limit)
    assert sum(admitted.values()) == min(limit, sum(waiting.values()))
    assert all(admitted[topic] <= waiting[topic] for topic in waiting)


def test_topic_with_partitions_has_no_log_of_its_own(tmp_path: Path) -> None:
    """Loss prevented: a topic with partitions has no log of its own, and would be read as an empty one."""
    with tidelog.open(tmp_path / "log") as log:
        log.topic("shop/orders", partitions=2)
    options = parse_source_options({"root": str(tmp_path / "log"), "subscribePattern": "shop/.*"})
    with OpenTopics(options) as topics:
        assert topics.names() == ["shop/orders-part-0", "shop/orders-part-1"]
        with pytest.raises(NotSupportedError, match=r"shop/orders has partitions.*shop/orders\S*0, shop/orders\S*1"):
            topics.log("shop/orders")
