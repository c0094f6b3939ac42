"""Readers that were told where everything is: they ask nobody, until something has moved."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event, Lock

import pytest
from tests.cold.published import KEYS, PublishedTopic
from tests.cold.replacing import HOUR, clean_up, compact, read_all

from tidelog.cold.catalog import Catalog
from tidelog.cold.fetch import ColdReadCounters, Fetcher, FetchSettings, RangeStream
from tidelog.cold.planned_catalog import PlannedCatalog
from tidelog.cold.reader import History
from tidelog.testing import FaultyStore


def read_planned(topic: PublishedTopic, planned: PlannedCatalog) -> list[tuple[int, bytes]]:
    with ThreadPoolExecutor(1) as executor:
        reader = History(planned, topic.store, executor).read(0, 60)
        found: list[tuple[int, bytes]] = []
        while (batch := reader.next_batch()) is not None:
            found += enumerate(batch.payloads(), batch.first_offset)
        return found


def test_a_plan_that_holds_needs_no_metadata_store(topic: PublishedTopic) -> None:
    """Nobody is asked while every object is where it was."""
    topic.publish_hourly(6)

    def nobody() -> Catalog:
        raise AssertionError("the metadata store was opened")

    planned = PlannedCatalog(list(topic.catalog.between(0, 60)), KEYS, nobody)
    assert read_planned(topic, planned) == read_all(topic)


def test_small_objects_of_a_plan_are_fetched_while_others_are_read(
    topic: PublishedTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second object on, several are under way at once, not more than a reader may hold; each is read once."""
    topic.publish_hourly(6)
    expected, read_range = read_all(topic), topic.store.read_range
    guard, has_met, under_way, asked = Lock(), Event(), list[str](), list[str]()
    waits = [0.0] + [30.0] * 9  # the first is fetched by itself

    def meeting(key: str, start: int, length: int) -> memoryview:
        with guard:
            under_way.append(key)
            asked.append(key)
            seconds, most = waits.pop(0), len(under_way)
            if most > 1:
                has_met.set()
        if seconds and not has_met.wait(seconds):
            waits[:] = [0.0] * 9
        data = read_range(key, start, length)
        with guard:
            under_way.remove(key)
        assert most <= 3
        return data

    monkeypatch.setattr(topic.store, "read_range", meeting)
    planned = PlannedCatalog(list(topic.catalog.between(0, 60)), KEYS, lambda: topic.catalog)
    with ThreadPoolExecutor(4) as executor:
        settings = FetchSettings(read_ahead_ranges=2)
        reader = History(planned, topic.store, executor, settings=settings).read(0, 60)
        found = [one for batch in reader for one in enumerate(batch.payloads(), batch.first_offset)]
    assert found == expected
    assert has_met.is_set()
    assert len(asked) == len(set(asked)) == 6


def test_an_object_that_was_compacted_away_is_found_in_its_new_place(topic: PublishedTopic) -> None:
    """The plan is not believed any more once an object is missing, and reading goes on at the same offset."""
    topic.publish_hourly(6)
    expected = read_all(topic)
    planned = PlannedCatalog(list(topic.catalog.between(0, 60)), KEYS, lambda: topic.catalog)
    compact(topic)
    topic.clock.advance(HOUR)
    assert clean_up(topic).objects
    assert read_planned(topic, planned) == expected


def test_ranges_end_where_the_index_knows_a_boundary() -> None:
    """Then no frame is in two of them; where no boundary is in reach, a range has its usual length."""
    store = FaultyStore()
    store.put("object", bytes(1000))
    with ThreadPoolExecutor(1) as executor:
        fetcher = Fetcher(store, executor, ColdReadCounters(), FetchSettings(range_bytes=100))
        stream = RangeStream(fetcher, "object", 0, 1000, 1000, ahead=False, boundaries=[0, 90, 170, 400, 410])
        lengths = []
        while (data := stream.next()) is not None:
            lengths.append(len(data))
    assert (lengths[:3], sum(lengths)) == ([90, 80, 100], 1000)
