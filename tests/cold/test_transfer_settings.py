"""How large the pieces are in which a store is written and read, as the settings say."""

from __future__ import annotations

from pathlib import Path

import pytest

import tidelog
from tidelog.cold.catalog import Catalog
from tidelog.cold.fetch import FetchSettings
from tidelog.errors import ConfigError
from tidelog.store.keys import TopicKeys
from tidelog.store.metadata.open import open_metadata_store
from tidelog.store.settings import StoreSettings
from tidelog.store.urls import open_store

NAME = "shop/orders"


def test_history_is_fetched_in_ranges_of_the_setting(tmp_path: Path) -> None:
    """What opens a store passes its settings on to whoever reads history from it."""
    objects = open_store((tmp_path / "store").as_uri(), StoreSettings(store_fetch_bytes=1 << 20, store_fetch_ahead=0))
    assert FetchSettings.of(objects.settings) == FetchSettings(range_bytes=1 << 20, read_ahead_ranges=0)
    assert FetchSettings.of(StoreSettings()) == FetchSettings(range_bytes=4 << 20, read_ahead_ranges=3)


def test_the_index_of_an_object_is_as_fine_as_the_setting(tmp_path: Path) -> None:
    """An entry every hundred messages, where a topic asks for that."""
    store = (tmp_path / "store").as_uri()
    with tidelog.open(tmp_path / "data", store=store, metadata="bucket") as log:
        topic = log.topic(NAME, ship_index_messages=100)
        topic.append_many([b"x"] * 1000)
        topic.ship()
    objects = open_store(store)
    with open_metadata_store("bucket", objects) as metadata:
        (descriptor,) = Catalog(metadata, TopicKeys("shop", "orders")).walk(0)
    assert [offset for offset, _ in descriptor.offset_index] == list(range(0, 1000, 100))


def test_subscriptions_store_their_progress_as_the_topic_says() -> None:
    """The settings are the default of the options with the same names."""
    with tidelog.open(None, progress_min_offset_delta=7) as log:
        topic = log.topic(NAME, progress_flush_interval_seconds="1h")
        assert topic._delivery_defaults == {
            "progress_flush_interval_seconds": 3600,
            "progress_min_offset_delta": 7,
        }
        with topic.subscribe("s", progress_min_offset_delta=3) as sub:
            options = sub._subscription.state.options
            assert options.progress_flush_interval_seconds == 3600
            assert options.progress_min_offset_delta == 3


def test_parts_are_for_stores_that_have_them(tmp_path: Path) -> None:
    """No setting is accepted and then ignored."""
    with pytest.raises(ConfigError, match="store_part_bytes does not apply to a file"):
        open_store((tmp_path / "store").as_uri(), StoreSettings(store_part_bytes=8 << 20))
