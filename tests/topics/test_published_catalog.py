"""Wherever the metadata is, the bucket alone is enough to read a topic: for processes and for Spark's planning."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.topics.storage_modes import Storage, make_storage

import tidelog
from tidelog.errors import ConfigError, NotFoundError
from tidelog.pipeline.ingest import ingest_unowned
from tidelog.topics.names import parse_topic_name
from tidelog.topics.subscription.group_offsets import GroupOffset, OffsetKey

NAME = "shop/orders"


class Place:
    """A log directory whose metadata is not in its bucket."""

    def __init__(self, directory: Path, store: str, metadata: str | None, settings: dict[str, Any]) -> None:
        self.directory = directory
        self.store = store
        self.settings = settings
        self._metadata = metadata

    def open(self, **settings: Any) -> tidelog.LogDirectory:
        return tidelog.open(
            self.directory / "log", store=self.store, metadata=self._metadata, **self.settings, **settings
        )

    def open_bucket(self, *, read_only: bool = True) -> tidelog.LogDirectory:
        """With nothing but the bucket."""
        return tidelog.open(
            self.directory / "elsewhere", store=self.store, metadata="bucket", read_only=read_only, **self.settings
        )


@pytest.fixture(params=["inside", "shared_fs-sqlite", "object_store-etcd"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "inside":
        yield Place(tmp_path, f"file://{tmp_path}/bucket", None, {})
        return
    storage: Storage = make_storage(request.param, tmp_path, request.getfixturevalue)
    assert storage._store is not None
    yield Place(tmp_path, storage._store, storage._metadata, storage._settings)


def write(place: Place, count: int = 20, **settings: Any) -> None:
    with place.open() as log:
        topic = log.topic(NAME, **settings)
        for number in range(count):
            topic.append(b"%d" % number)
            if number % 5 == 4:
                topic.ship()
        topic.ship()


def values(log: tidelog.LogDirectory) -> list[bytes]:
    return [message.value or b"" for message in log.topic(NAME).read()]


def test_bucket_alone_is_enough_to_read_a_topic(place: Place) -> None:
    """Another process lists and reads it with nothing but the URL of the store."""
    write(place)
    with place.open_bucket() as log:
        assert log.topics() == [NAME]
        assert values(log) == [b"%d" % number for number in range(20)]
        assert log.topic(NAME).shipped_offset == 20


def test_reader_of_the_bucket_sees_what_was_just_shipped(place: Place) -> None:
    """While the owner runs, in the moment in which `ship` returns."""
    with place.open() as log, place.open_bucket() as reading:
        topic = log.topic(NAME)
        for number in range(3):
            topic.append(b"%d" % number)
            topic.ship()
            assert values(reading) == [b"%d" % one for one in range(number + 1)]
        statistics = topic.statistics().tier
        assert statistics is not None
        assert statistics.metadata is not None
        assert statistics.metadata.copy is not None
        assert statistics.metadata.copy.errors == 0


def test_copy_cannot_be_opened_for_writing(place: Place) -> None:
    """And the error says which metadata store to name."""
    write(place)
    with place.open_bucket(read_only=False) as log:
        for take_over in (False, True):
            with pytest.raises(ConfigError, match=r"is a copy, for reading: the metadata store is (sqlite|etcd)://"):
                log.topic(NAME, take_over=take_over)
        with pytest.raises(ConfigError, match="is a copy"):
            log.delete_topic(NAME)
    with place.open() as log:
        assert len(values(log)) == 20


def test_refused_copy_leaves_a_directory_that_takes_the_advised_metadata(place: Place, tmp_path: Path) -> None:
    """Loses otherwise: the directory remembers the wrong metadata, and refuses the one that the error names."""
    write(place)
    with place.open_bucket(read_only=False) as log, pytest.raises(ConfigError, match="is a copy") as refused:
        log.topic(NAME, take_over=True)
    advised = str(refused.value).partition("metadata='")[2].partition("'")[0]
    elsewhere = {"store": place.store, "metadata": advised, **place.settings}
    with tidelog.open(tmp_path / "elsewhere", **elsewhere) as log:
        assert len(list(log.topic(NAME, take_over=True).read())) == 20
    with pytest.raises(ConfigError, match="keeps its metadata in"):
        tidelog.open(tmp_path / "elsewhere", **{**elsewhere, "metadata": "bucket"})


def test_deleted_topic_is_gone_from_the_bucket(place: Place) -> None:
    """Readers of the bucket do not see it any more."""
    write(place)
    with place.open() as log:
        log.delete_topic(NAME)
    with place.open_bucket() as reading:
        assert reading.topics() == []
        with pytest.raises(NotFoundError):
            reading.topic(NAME)


def test_offsets_of_consumer_groups_reach_the_bucket(place: Place) -> None:
    """They are copied together, at the latest when the directory is closed; a deleted topic leaves none."""
    write(place)
    offset = OffsetKey("readers", NAME, 0)
    with place.open() as log:
        for number in range(5):
            assert log._group_offsets.store({offset: GroupOffset(number)}) == {}
    with place.open_bucket() as reading:
        found = reading._group_offsets.load()[offset]
        assert isinstance(found, GroupOffset)
        assert found.offset == 4
    with place.open() as log:
        assert log._group_offsets.store({offset: GroupOffset(7)}) == {}
        log.delete_topic(NAME)
    with place.open_bucket() as reading:
        assert reading.topics() == []


def test_retention_and_positions_reach_the_bucket(place: Place) -> None:
    """What was deleted for good is not offered any more, and positions of subscriptions are shown."""
    write(place, retention_bytes=1)
    with place.open() as log:
        topic = log.topic(NAME)
        with topic.subscribe("billing", start="earliest") as subscription:
            message = subscription.receive(timeout=120)
            assert message is not None
            subscription.ack(message)
        topic.prune()
        start = topic.start_offset
        assert start > 0
    with place.open_bucket() as reading:
        assert reading.topic(NAME).start_offset == start
        assert reading.topic(NAME).subscriptions() == ["billing"]


def test_spark_plans_from_the_bucket(place: Place) -> None:
    """A root that is a store URL is enough, wherever the metadata is."""
    from tidelog.pipeline.source.options import parse_source_options
    from tidelog.pipeline.source.planning import OpenTopics

    write(place)
    options = {"root": place.store, "subscribe": NAME, **{name: str(one) for name, one in place.settings.items()}}
    with OpenTopics(parse_source_options(options)) as topics:
        assert topics.log(NAME).next_offset == 20
        assert topics.log_id(NAME) is not None


def test_rows_for_a_published_topic_are_not_ingested_into_its_copy(place: Place) -> None:
    """Nobody would ever ingest what is staged beside a copy: the sink is told where the metadata is."""
    from tidelog.pipeline.address import find_root
    from tidelog.pipeline.ingest import open_area

    write(place)
    root = find_root(place.store, **place.settings)
    assert not ingest_unowned(root, parse_topic_name(NAME))
    with open_area(root, parse_topic_name(NAME)) as area, pytest.raises(ConfigError, match="is a copy"):
        area.status("app", 1)


def test_partitions_are_published(place: Place) -> None:
    """A topic with partitions has no owner of its own; readers of the bucket find it all the same, and only read."""
    with place.open() as log:
        topic = log.topic(NAME, partitions=2)
        for number in range(10):
            topic.append(b"%d" % number, key=b"%d" % number)
        for number in range(2):
            topic.partition(number).ship()
    with place.open_bucket() as reading:
        assert reading.topics() == [NAME]
        assert sorted(values(reading)) == [b"%d" % number for number in range(10)]
    with place.open_bucket(read_only=False) as log, pytest.raises(ConfigError, match="is a copy"):
        log.topic(NAME)
    with place.open() as log:
        log.delete_topic(NAME)
    with place.open_bucket() as reading:
        assert reading.topics() == []
