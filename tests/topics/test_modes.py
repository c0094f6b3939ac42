"""Modes of a log directory: where its history is, what it remembers of that, and which settings count where."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.log.workbench import wal_paths

import tidelog
from tidelog import ConfigError, DataError, FencedError, InputError, NotFoundError, NotSupportedError, TidelogError
from tidelog.cold.settings import TierSettings
from tidelog.store.settings import StoreSettings
from tidelog.topics.subscription.cursors import LocalCursors

NAME = "shop/orders"
CALM = {"ship_interval_seconds": 1000.0, "retention_interval_seconds": 1000.0, "ownership_check_seconds": 1000.0}


@pytest.fixture
def bucket(tmp_path: Path) -> str:
    """A store that outlives its directories."""
    return (tmp_path / "bucket").as_uri()


def open_log(root: Path, **settings: Any) -> tidelog.LogDirectory:
    """Nothing happens by itself."""
    return tidelog.open(root, **{**CALM, **settings})


def remembered(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "tidelog.json").read_text())
    return found


def fill(log: tidelog.LogDirectory, count: int, name: str = NAME) -> tidelog.Topic:
    topic = log.topic(name)
    first = topic.next_offset
    topic.append_many([b"%d" % number for number in range(first, first + count)], sync=True)
    return topic


def values(topic: tidelog.Topic) -> list[int]:
    found = [int(message.value or b"") for message in topic.read()]
    assert found == list(range(topic.start_offset, topic.start_offset + len(found)))
    return found


# What a directory remembers


def test_a_directory_without_a_store_is_local(tmp_path: Path) -> None:
    """Nothing is remembered but that it is one; what needs a store says so."""
    with open_log(tmp_path / "a") as log:
        assert (log.mode, log._tier) == ("local", None)
        topic = fill(log, 3)
        assert topic.shipped_offset == 0
        with pytest.raises(NotSupportedError, match="has no object store"):
            topic.ship()
    assert not {"store", "metadata"} & remembered(tmp_path / "a").keys()


@pytest.mark.parametrize("metadata", [None, "sqlite", "bucket", "outside"])
def test_store_and_metadata_are_remembered(tmp_path: Path, bucket: str, metadata: str | None) -> None:
    """Opened again without naming them, everything is there and goes on."""
    root = tmp_path / "a"
    named = f"sqlite://{tmp_path}/outside.db" if metadata == "outside" else metadata
    with open_log(root, store=bucket, metadata=named) as log:
        assert log.mode == "shared_fs"
        assert fill(log, 5).ship() == 5
    assert (remembered(root)["store"], remembered(root)["metadata"]) == (bucket, named or "sqlite")
    with open_log(root) as log:
        assert (log.mode, log.topic(NAME).shipped_offset) == ("shared_fs", 5)
        assert values(fill(log, 2)) == list(range(7))


def test_naming_the_same_again_is_fine(tmp_path: Path, bucket: str) -> None:
    """However it is spelled: a slash at the end, dots in the path, escapes."""
    with open_log(tmp_path / "a", store=bucket, metadata="sqlite"):
        pass
    for spelled in (bucket, bucket + "/", bucket + "//", bucket.replace("/bucket", "/x/../bucket"), bucket + "/."):
        with open_log(tmp_path / "a", store=spelled, metadata="sqlite") as log:
            assert log._info.store == bucket


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("store", {"store": "file:///somewhere/else"}),
        ("store", {"store": "s3://bucket/prefix"}),
        ("store", {"store": "memory://"}),
        ("metadata", {"metadata": "bucket"}),
        ("metadata", {"metadata": "sqlite:///elsewhere.db"}),
    ],
)
def test_naming_others_is_refused_with_the_way_to_move(
    tmp_path: Path, bucket: str, what: str, changes: dict[str, str]
) -> None:
    """The histories of its topics would stay behind."""
    with open_log(tmp_path / "a", store=bucket):
        pass
    before = (tmp_path / "a" / "tidelog.json").read_bytes()
    for read_only in (False, True):
        with pytest.raises(ConfigError, match=f"keeps its {what} in") as raised:
            open_log(tmp_path / "a", read_only=read_only, **changes)
        assert "To move: copy what is there" in str(raised.value)
        assert f"change `{what}` in tidelog.json" in str(raised.value)
    assert (tmp_path / "a" / "tidelog.json").read_bytes() == before
    with open_log(tmp_path / "a") as log:
        assert log._info.store == bucket


def test_the_way_to_move_works(tmp_path: Path, bucket: str) -> None:
    """Copied and renamed as the error says, the topic goes on from the new place."""
    with open_log(tmp_path / "a", store=bucket) as log:
        fill(log, 5).ship()
    shutil.copytree(tmp_path / "bucket", tmp_path / "moved")
    shutil.rmtree(tmp_path / "bucket")
    path = tmp_path / "a" / "tidelog.json"
    path.write_text(path.read_text().replace(bucket, (tmp_path / "moved").as_uri()))
    for file in wal_paths(tmp_path / "a" / "shop" / "orders"):
        file.unlink()
    (tmp_path / "a" / "shop" / "orders" / "wal.ckpt").unlink()
    with open_log(tmp_path / "a") as log:
        assert values(log.topic(NAME)) == list(range(5))


def test_metadata_without_a_store_is_refused(tmp_path: Path) -> None:
    """There would be nothing to keep it for."""
    with pytest.raises(ConfigError, match="without a store"):
        open_log(tmp_path / "a", metadata="bucket")


@pytest.mark.parametrize("url", ["bucket", "ftp://x", "s3://", "/srv/history", "s3://b/p?x=1", "s3://key@b/p"])
def test_what_is_no_store_is_refused(tmp_path: Path, url: str) -> None:
    """Before anything is remembered."""
    with pytest.raises(ConfigError):
        open_log(tmp_path / "a", store=url)
    with open_log(tmp_path / "a") as log:
        assert log.mode == "local"


def test_a_store_that_cannot_be_opened_does_not_keep_the_lock(tmp_path: Path, bucket: str) -> None:
    """Nor is it remembered: the next attempt may name another, and is not told that the directory is in use."""
    with pytest.raises(ConfigError, match="mysql"):
        open_log(tmp_path / "a", store=bucket, metadata="mysql://host")
    with open_log(tmp_path / "a", store=bucket) as log:
        assert (log._info.store, log._info.metadata) == (bucket, "sqlite")


def test_a_local_directory_is_given_a_store_later(tmp_path: Path, bucket: str) -> None:
    """What was there before is history too, from its first message on."""
    with open_log(tmp_path / "a") as log:
        fill(log, 5)
    with open_log(tmp_path / "a", store=bucket, metadata="bucket") as log:
        topic = fill(log, 3)
        assert (topic.shipped_offset, topic.start_offset) == (0, 0)
        assert topic.ship() == 8
    shutil.rmtree(tmp_path / "a")
    with open_log(tmp_path / "b", store=bucket, metadata="bucket") as log:
        assert values(log.topic(NAME)) == list(range(8))


def test_memory_is_not_remembered(tmp_path: Path) -> None:
    """There is nothing to come back to; the messages on the disk are."""
    with open_log(tmp_path / "a", store="memory://") as log:
        assert log.mode == "object_store"
        assert fill(log, 5).ship() == 5
    assert not {"store", "metadata"} & remembered(tmp_path / "a").keys()
    with open_log(tmp_path / "a") as log:
        assert log.mode == "local"
        assert values(log.topic(NAME)) == list(range(5))
    with open_log(tmp_path / "a", store="memory://") as log:
        topic = fill(log, 1)
        assert topic.ship() == 6
        assert values(topic) == list(range(6))


@pytest.mark.parametrize("name", ["elsewhere", "with space", "a#b", "a?b", "100%41", "ünïcode", "sqlite:x"])
def test_a_directory_that_was_moved_finds_its_metadata(tmp_path: Path, bucket: str, name: str) -> None:
    """The catalog inside it moves with it, whatever the path is called."""
    with open_log(tmp_path / "a", store=bucket) as log:
        fill(log, 5).ship()
    (tmp_path / "a").rename(tmp_path / name)
    with open_log(tmp_path / name) as log:
        topic = fill(log, 1)
        assert (topic.shipped_offset, values(topic)) == (5, list(range(6)))
    assert (tmp_path / name / "metadata.db").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["bucket", name])


@pytest.mark.parametrize("stored", [True, False])
def test_a_relative_directory_stays_where_it_is(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    """A process that changes its directory afterwards, as daemons do, goes on writing to the same place."""
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with open_log(Path("data"), store=bucket if stored else None) as log:
        monkeypatch.chdir(tmp_path / "other")
        fill(log, 5)
        assert log.topics() == [NAME]
    assert os.listdir(tmp_path / "other") == []
    with open_log(tmp_path / "data") as log:
        assert values(log.topic(NAME)) == list(range(5))


def test_a_node_keeps_its_name(tmp_path: Path, bucket: str) -> None:
    """How a directory is called as an owner is drawn once; two directories are never called the same."""
    nodes = []
    for root in ("a", "b", "a"):
        with open_log(tmp_path / root, store=bucket, metadata="bucket") as log:
            nodes.append(log._info.node)
    assert nodes[0] == nodes[2] != nodes[1]
    assert all(nodes)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"format": 1}', b'{"format": 1, "created_us": 1, "store": 7}', b"[" * 100_000]
)
def test_a_directory_that_cannot_be_understood_is_refused(tmp_path: Path, content: bytes) -> None:
    """It is not taken for a new one; the error names the file."""
    with open_log(tmp_path / "a"):
        pass
    (tmp_path / "a" / "tidelog.json").write_bytes(content)
    for read_only in (False, True):
        with pytest.raises(DataError, match=r"tidelog\.json"):
            open_log(tmp_path / "a", read_only=read_only)
    assert (tmp_path / "a" / "tidelog.json").read_bytes() == content


def test_a_directory_of_another_format_is_refused(tmp_path: Path) -> None:
    """A newer tidelog made it."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "tidelog.json").write_text('{"format": 2, "created_us": 1}')
    with pytest.raises(InputError, match="format 2"):
        open_log(tmp_path / "a")


# Settings of the store


def test_settings_reach_the_store_from_file_variables_and_keywords(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each source, the later one first: what is given is used, which a refusal proves."""
    config = tmp_path / "tidelog.toml"
    config.write_text(
        'store = "s3://bucket/prefix"\nmetadata = "bucket"\n[object_store]\nstore_endpoint = "http://far.example"\n'
    )
    with pytest.raises(ConfigError, match=r"far\.example|http"):
        tidelog.open(tmp_path / "a", config=config)
    monkeypatch.setenv("TIDELOG_STORE_ENDPOINT", "http://variable.example")
    with pytest.raises(ConfigError, match="http") as raised:
        tidelog.open(tmp_path / "b", config=config)
    assert "far.example" not in str(raised.value)
    monkeypatch.setenv("TIDELOG_STORE", "memory://")
    with pytest.raises(ConfigError, match="store_endpoint"):
        tidelog.open(tmp_path / "c")
    monkeypatch.delenv("TIDELOG_STORE_ENDPOINT")
    with pytest.raises(ConfigError, match="store_region"):
        tidelog.open(tmp_path / "d", store_region="here")


VALUES: dict[str, object] = {
    "store_endpoint": "https://x.example",
    "store_region": "here",
    "store_access_key_id": "id",
    "store_secret_access_key": "secret",
    "store_session_token": "token",
    "store_service_account_path": "/nowhere.json",
    "store_account_name": "name",
    "store_account_key": "a2V5",
    "store_allow_http": True,
    "store_connect_timeout_ms": 1000,
    "store_request_timeout_ms": 1000,
    "store_part_bytes": 8 << 20,
    "store_parts_in_flight": 2,
    "store_fetch_bytes": 1 << 20,
    "store_fetch_ahead": 1,
    "store_max_retries": 1,
    "store_retry_timeout_seconds": 5,
    "replica_stores": {"s3://elsewhere": {"store_region": "eu-north-1"}},
}
FETCHED = {"store_fetch_bytes", "store_fetch_ahead", "replica_stores"}
HTTP = {
    *FETCHED,
    "store_part_bytes",
    "store_parts_in_flight",
    "store_endpoint",
    "store_allow_http",
    "store_connect_timeout_ms",
    "store_request_timeout_ms",
    "store_max_retries",
    "store_retry_timeout_seconds",
}
MEANT = {
    "file": FETCHED,
    "memory://": FETCHED,
    "s3://bucket/prefix": {
        *HTTP,
        "store_region",
        "store_access_key_id",
        "store_secret_access_key",
        "store_session_token",
    },
    "gs://bucket/prefix": {*HTTP, "store_service_account_path"},
    "az://container/prefix": {*HTTP, "store_account_name", "store_account_key"},
}


def test_every_option_of_a_store_is_looked_at_here() -> None:
    """A new one must be added to the table above."""
    assert set(VALUES) == {field.name for field in msgspec.structs.fields(StoreSettings)}


@pytest.mark.parametrize("url", MEANT)
def test_an_option_that_means_nothing_to_the_store_is_refused(tmp_path: Path, bucket: str, url: str) -> None:
    """By its name, for every option and every kind of store: none is accepted and ignored."""
    for number, (name, value) in enumerate(VALUES.items()):
        if name in MEANT[url]:
            continue
        with pytest.raises(ConfigError, match=name):
            open_log(tmp_path / str(number), store=bucket if url == "file" else url, metadata="bucket", **{name: value})


# Settings of a topic


def test_a_topics_own_settings_are_remembered(tmp_path: Path) -> None:
    """Over a closing, beside those of the directory; None takes one back."""
    with open_log(tmp_path / "a", retention_bytes=1 << 30) as log:
        log.topic(NAME, retention_seconds=60)
    info = json.loads((tmp_path / "a" / "shop" / "orders" / "topic.json").read_text())
    assert info["settings"] == {"retention_seconds": 60}
    with open_log(tmp_path / "a") as log:
        log.topic(NAME, retention_bytes=5000)
    info = json.loads((tmp_path / "a" / "shop" / "orders" / "topic.json").read_text())
    assert info["settings"] == {"retention_seconds": 60, "retention_bytes": 5000}
    with open_log(tmp_path / "a") as log:
        log.topic(NAME, retention_seconds=None)
    info = json.loads((tmp_path / "a" / "shop" / "orders" / "topic.json").read_text())
    assert info["settings"] == {"retention_bytes": 5000}


def test_a_topics_own_settings_are_used(tmp_path: Path) -> None:
    """They win over those of the directory, after a reopening too."""
    with open_log(tmp_path / "a", rotate_max_bytes=500, retention_bytes=1 << 40) as log:
        log.topic(NAME, retention_bytes=1000)
    with open_log(tmp_path / "a", rotate_max_bytes=500, retention_bytes=1 << 40) as log:
        for name in (NAME, "shop/other"):
            topic = log.topic(name)
            for _ in range(100):
                topic.append(b"x" * 50, sync=True)
            topic.prune()
        assert log.topic(NAME).start_offset > 0
        assert log.topic("shop/other").start_offset == 0


def test_settings_move_with_the_topic(tmp_path: Path, bucket: str) -> None:
    """Another node takes them from the catalog, also when its own copy says otherwise."""
    with open_log(tmp_path / "a", store=bucket, metadata="bucket") as log:
        log.topic(NAME, max_object_bytes=100)
        fill(log, 20).seal()
    with open_log(tmp_path / "b", store=bucket, metadata="bucket") as log:
        topic = fill(log, 20)
        topic.ship()
        assert topic._tiered is not None
        assert topic._tiered.settings.max_object_bytes == 100
        log.topic("shop/other")
    with open_log(tmp_path / "b", store=bucket) as log:
        log.topic(NAME, max_object_bytes=None, retention_bytes=1 << 40)
    with open_log(tmp_path / "a") as log:
        topic = log.topic(NAME)
        assert topic._tiered is not None
        assert topic._tiered.settings.max_object_bytes == TierSettings().max_object_bytes
        assert topic._tiered.settings.retention_bytes == 1 << 40


def test_settings_of_a_local_topic_go_to_its_catalog(tmp_path: Path, bucket: str) -> None:
    """When the directory is given a store."""
    with open_log(tmp_path / "a") as log:
        log.topic(NAME, retention_bytes=1 << 40)
    with open_log(tmp_path / "a", store=bucket, metadata="bucket") as log:
        fill(log, 1).seal()
    with open_log(tmp_path / "b", store=bucket, metadata="bucket") as log:
        topic = log.topic(NAME)
        assert topic._tiered is not None
        assert topic._tiered.settings.retention_bytes == 1 << 40


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"retention_secs": 5}, "retention_secs is not a setting of a topic"),
        ({"fsync_interval_ms": 5}, "fsync_interval_ms is not a setting of a topic"),
        ({"retention_seconds": 0}, "retention_seconds must be a whole number of seconds .* not 0"),
        ({"retention_seconds": -5}, "retention_seconds must be a whole number of seconds .* not -5"),
        ({"retention_seconds": "soon"}, "retention_seconds must be a whole number of seconds .* not 'soon'"),
        ({"retention_seconds": True}, "retention_seconds must be a whole number of seconds .* not True"),
        ({"ship_compression": "lz4"}, "ship_compression must be one of .*zstd.* not 'lz4'"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(tmp_path: Path, settings: dict[str, Any], problem: str) -> None:
    """And the topic is not made."""
    with open_log(tmp_path / "a") as log:
        with pytest.raises(ConfigError, match=problem):
            log.topic(NAME, **settings)
        assert log.topics() == []


@pytest.mark.parametrize("name", ["local_retention_seconds", "local_retention_bytes"])
def test_local_retention_without_a_store_is_refused(tmp_path: Path, bucket: str, name: str) -> None:
    """From the directory or from the topic: it would delete the only copy. With a store it is fine."""
    with open_log(tmp_path / "a", **{name: 60}) as log, pytest.raises(ConfigError, match=name):
        log.topic(NAME)
    with open_log(tmp_path / "a") as log:
        own: dict[str, Any] = {name: 60}
        with pytest.raises(ConfigError, match=name):
            log.topic(NAME, **own)
        assert log.topics() == []
    with open_log(tmp_path / "b", store=bucket, **{name: 60}) as log:
        log.topic(NAME)


@pytest.mark.parametrize(
    "settings", [{"ship_compression": "zstd"}, {"max_object_bytes": 5000}, {"ownership_check_seconds": 1.0}]
)
def test_a_topics_shipping_without_a_store_is_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    """A topic's own setting that means nothing where it is kept is a mistake, and says so."""
    with open_log(tmp_path / "a") as log:
        with pytest.raises(ConfigError, match=next(iter(settings))):
            log.topic(NAME, **settings)
        assert log.topics() == []


def test_an_open_topic_takes_no_settings(tmp_path: Path) -> None:
    """They are given when it is opened for the first time; asking for it again without any is fine."""
    with open_log(tmp_path / "a") as log:
        topic = log.topic(NAME)
        with pytest.raises(InputError, match="open already"):
            log.topic(NAME, retention_seconds=60)
        assert log.topic(NAME) is topic


@pytest.mark.parametrize("content", [b"{", b'{"format": 1}', b"[" * 100_000])
def test_settings_that_cannot_be_understood_are_refused(tmp_path: Path, bucket: str, content: bytes) -> None:
    """In the catalog or in `topic.json`: retention must not go by defaults because nobody could read it."""
    with open_log(tmp_path / "a") as log:
        log.topic(NAME)
    (tmp_path / "a" / "shop" / "orders" / "topic.json").write_bytes(content)
    with open_log(tmp_path / "a") as log, pytest.raises(DataError, match=r"topic\.json"):
        log.topic(NAME)


# For reading only


def test_a_bucket_alone_can_be_read(tmp_path: Path, bucket: str) -> None:
    """Without a directory, without a claim, without a trace."""
    with open_log(tmp_path / "a", store=bucket, metadata="bucket") as log:
        fill(log, 5).ship()
        fill(log, 2)
        fill(log, 1, "shop/empty-in-the-store")
        with tidelog.open(tmp_path / "nowhere", store=bucket, metadata="bucket", read_only=True) as view:
            assert view.mode == "shared_fs"
            assert view.topics() == ["shop/empty-in-the-store", NAME]
            topic = view.topic(NAME)
            assert values(topic) == list(range(5))
            assert (topic.next_offset, topic.shipped_offset, topic.hot_start_offset) == (5, 5, 5)
            assert msgspec.json.encode(topic.statistics())
            assert list(view.topic("shop/empty-in-the-store").read()) == []
            for change in (lambda: topic.append(b"x"), topic.ship, topic.seal, topic.prune):
                with pytest.raises(TidelogError):
                    change()
            with pytest.raises(NotFoundError):
                view.topic("shop/none")
            with pytest.raises(InputError):
                view.topic("shop/other", retention_seconds=5)
            with pytest.raises(InputError):
                view.delete_topic(NAME)
        assert fill(log, 1).ship() == 8
    assert not (tmp_path / "nowhere").exists()


def test_a_directory_that_is_open_elsewhere_can_be_read_with_its_history(tmp_path: Path, bucket: str) -> None:
    """What is on its disk and not shipped is seen as well."""
    with open_log(tmp_path / "a", store=bucket) as log:
        fill(log, 5).ship()
        fill(log, 2)
        with tidelog.open(tmp_path / "a", read_only=True) as view:
            assert values(view.topic(NAME)) == list(range(7))


def test_reading_only_without_anything_is_not_found(tmp_path: Path) -> None:
    """No directory, no store: nothing is made."""
    with pytest.raises(NotFoundError):
        tidelog.open(tmp_path / "nowhere", read_only=True)
    assert os.listdir(tmp_path) == []


def test_reading_only_makes_no_catalog(tmp_path: Path, bucket: str) -> None:
    """A bucket whose catalog is inside another directory cannot be read without it, and nothing is left behind."""
    with open_log(tmp_path / "a", store=bucket) as log:
        fill(log, 5).ship()
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(TidelogError):
        tidelog.open(tmp_path / "nowhere", store=bucket, read_only=True).topic(NAME)
    assert sorted(os.listdir(tmp_path)) == before


# Two directories, one bucket


def test_two_directories_share_a_bucket(tmp_path: Path, bucket: str) -> None:
    """Each topic has one owner; a topic that only the catalog knows is listed and opened."""
    with (
        open_log(tmp_path / "a", store=bucket, metadata="bucket") as a,
        open_log(tmp_path / "b", store=bucket, metadata="bucket") as b,
    ):
        fill(a, 5, "shop/first").ship()
        fill(b, 3, "shop/second").ship()
        assert a.topics() == b.topics() == ["shop/first", "shop/second"]
        assert b.has_topic("shop/first")
        assert not (tmp_path / "b" / "shop" / "first").exists()
        b.topic("shop/first", take_over=True)
        taken = fill(b, 2, "shop/first")
        assert values(taken) == list(range(7))
        a.topic("shop/first").append(b"nobody has told it yet")
        with pytest.raises(FencedError):
            a.topic("shop/first").ship()
        with pytest.raises(FencedError):
            a.topic("shop/first").append(b"late")
        with pytest.raises(tidelog.HeldError, match="shop/second"):
            a.topic("shop/second")
        assert a.topic("shop/second", take_over=True).next_offset == 3
        b.delete_topic("shop/first")
        assert "shop/first" not in b.topics()
        assert not b.has_topic("shop/first")


def test_two_directories_on_one_bucket_with_catalogs_of_their_own_do_not_overwrite(tmp_path: Path, bucket: str) -> None:
    """The second one finds objects that its catalog does not know, and refuses to begin."""
    with open_log(tmp_path / "a", store=bucket) as a:
        fill(a, 5).ship()
        with open_log(tmp_path / "b", store=bucket) as b, pytest.raises(DataError, match="does not know this topic"):
            b.topic(NAME)
        assert values(a.topic(NAME)) == list(range(5))


def test_installations_in_one_catalog_are_apart(tmp_path: Path) -> None:
    """`metadata_root` keeps them so."""
    metadata = f"sqlite://{tmp_path}/shared.db"
    for number in (1, 2):
        store = (tmp_path / f"bucket{number}").as_uri()
        with open_log(tmp_path / str(number), store=store, metadata=metadata, metadata_root=f"root{number}") as log:
            fill(log, number).ship()
            assert log.topics() == [NAME]
            assert log.topic(NAME).next_offset == number


# Statistics


@pytest.mark.parametrize("mode", ["local", "shared_fs", "object_store"])
def test_statistics_are_json(tmp_path: Path, bucket: str, mode: str) -> None:
    """In every mode, before and after something happened; what needs a store is there where there is one."""
    store = {"local": None, "shared_fs": bucket, "object_store": "memory://"}[mode]
    with open_log(tmp_path / "a", store=store) as log:
        assert log.mode == mode
        topic = log.topic(NAME)
        msgspec.json.encode(topic.statistics())
        fill(log, 5)
        if store is not None:
            topic.ship()
        list(topic.read())
        found = json.loads(msgspec.json.encode(topic.statistics()))
        assert (found["name"], found["next_offset"]) == (NAME, 5)
        assert (found["tier"] is not None) == (store is not None)
        if store is not None:
            assert found["shipped_offset"] == found["tier"]["shipper"]["shipped_offset"] == 5
            assert found["tier"]["metadata"] is not None


def test_positions_that_were_brought_into_the_catalog_stay_there(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever brought them was killed before the old ones were removed: they have moved on since, and are not set
    back."""
    with open_log(tmp_path / "a") as log:
        sub = fill(log, 9).subscribe("work")
        sub.ack_many(sub.receive_many(3, timeout=120))
    monkeypatch.setattr(LocalCursors, "delete", lambda *_: None)
    with open_log(tmp_path / "a", store=bucket, metadata="bucket") as log:
        sub = log.topic(NAME).subscribe("work")
        sub.ack_many(sub.receive_many(4, timeout=120))
    monkeypatch.undo()
    for _ in range(2):
        with open_log(tmp_path / "a") as log:
            assert log.topic(NAME).subscription_info("work").offset == 7
