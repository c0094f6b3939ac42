"""A directory and its store: bound when the store has answered, and not let go of when it is gone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import tidelog


def test_a_mistyped_store_binds_nobody(tmp_path: Path) -> None:
    """Loss prevented: one wrong letter made a directory with messages unusable, since it was remembered for good."""
    with tidelog.open(tmp_path / "data") as log:
        log.topic("a/b").append(b"here", sync=True)
    wrong = "s3://tidelog-does-not-exist"
    with pytest.raises(tidelog.TidelogError):
        tidelog.open(
            tmp_path / "data",
            store=wrong,
            store_endpoint="http://127.0.0.1:9",
            store_max_retries=0,
            store_access_key_id="a",
            store_secret_access_key="b",
        )
    assert "store" not in json.loads((tmp_path / "data" / "tidelog.json").read_bytes())
    with tidelog.open(tmp_path / "data", store=f"file://{tmp_path / 'right'}") as log:
        assert [message.value for message in log.topic("a/b").read()] == [b"here"]


def test_metadata_that_cannot_be_opened_is_not_remembered(tmp_path: Path) -> None:
    """A URL that is none leaves no trace in the directory."""
    with pytest.raises(tidelog.ConfigError):
        tidelog.open(tmp_path / "data", store=f"file://{tmp_path / 's'}", metadata="zookeeper://h")
    with tidelog.open(tmp_path / "data", store=f"file://{tmp_path / 's'}", metadata="bucket") as log:
        assert log.info.metadata == "bucket"


def test_a_store_that_is_not_mounted_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    """Loss prevented: an empty mount point in the place of the store let a topic begin anew, without its history."""
    store = tmp_path / "shared"
    url = f"file://{store}"
    with tidelog.open(tmp_path / "data", store=url, metadata="bucket") as log:
        log.topic("a/b").append(b"one", sync=True)
        log.topic("a/b").ship()
    store.rename(tmp_path / "elsewhere")
    store.mkdir()
    with tidelog.open(tmp_path / "data") as log, pytest.raises(tidelog.DataError, match="mounted"):
        log.topic("a/b")
    shutil.rmtree(store)
    (tmp_path / "elsewhere").rename(store)
    with tidelog.open(tmp_path / "data") as log:
        assert [message.value for message in log.topic("a/b").read()] == [b"one"]


def test_what_is_on_the_disk_can_be_looked_at_without_the_store(tmp_path: Path) -> None:
    """A reader of the directory sees what is local while the metadata is out of reach."""
    with tidelog.open(tmp_path / "data", store=f"file://{tmp_path / 's'}", metadata="bucket") as log:
        log.topic("a/b").append_many([b"one", b"two"], sync=True)
    info = tmp_path / "data" / "tidelog.json"
    changed = json.loads(info.read_bytes()) | {"metadata": "etcd://127.0.0.1:9"}
    info.write_text(json.dumps(changed), "utf-8")
    with tidelog.open(tmp_path / "data", read_only=True) as log:
        topic = log.topic("a/b")
        assert [message.value for message in topic.read(1)] == [b"two"]
        assert (topic.start_offset, topic.next_offset) == (0, 2)


def test_settings_of_an_open_topic_can_be_changed(tmp_path: Path) -> None:
    """They are kept for the next opening, and None takes one back."""
    with tidelog.open(tmp_path / "data", store=f"file://{tmp_path / 's'}") as log:
        log.topic("a/b", retention_seconds=60)
        assert log.configure_topic("a/b", ship_compression="zstd") == {
            "retention_seconds": 60,
            "ship_compression": "zstd",
        }
        assert log.configure_topic("a/b", retention_seconds=None) == {"ship_compression": "zstd"}
        with pytest.raises(tidelog.ConfigError, match="ship_compresion"):
            log.configure_topic("a/b", ship_compresion="zstd")  # type: ignore[call-arg]
    with tidelog.open(tmp_path / "data") as log:
        topic = log.topic("a/b")
        topic.append(b"x" * 1000)
        topic.ship()
        tier = topic.statistics().tier
        assert tier is not None
        assert tier.shipper is not None
        assert tier.shipper.bytes_uploaded < tier.shipper.raw_bytes_uploaded


def test_settings_of_a_store_without_a_store_are_refused(tmp_path: Path) -> None:
    """Nobody believes that a key or a region is in use when it is not."""
    with pytest.raises(tidelog.ConfigError, match="store_region"):
        tidelog.open(tmp_path / "data", store_region="eu-west-1")
    with tidelog.open(tmp_path / "data") as log:
        log.topic("a/b").append(b"the directory was given back")


def test_a_replaced_owner_with_nothing_to_ship_hears_of_it(tmp_path: Path) -> None:
    """Shipping tells who owns the topic, also when everything was shipped already."""
    url = f"file://{tmp_path / 's'}"
    with (
        tidelog.open(tmp_path / "old", store=url, metadata="bucket") as old,
        tidelog.open(tmp_path / "new", store=url, metadata="bucket") as new,
    ):
        topic = old.topic("a/b")
        topic.append(b"one")
        assert topic.ship() == topic.ship() == 1
        new.topic("a/b", take_over=True)
        with pytest.raises(tidelog.FencedError):
            topic.ship()
