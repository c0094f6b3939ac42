"""A directory and its store: bound when the store has answered, and not let go of when it is gone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import tidelog
from tidelog.topics.directory_info import Place, settle_place


def change_info(directory: Path, **changes: str | None) -> None:
    """As somebody would with an editor; None takes a field out."""
    path = directory / "tidelog.json"
    changed = json.loads(path.read_bytes()) | changes
    path.write_text(json.dumps({name: value for name, value in changed.items() if value is not None}), "utf-8")


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
        assert log._info.metadata == "bucket"


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
    change_info(tmp_path / "data", metadata="etcd://127.0.0.1:9")
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


class TestTwoInstallations:
    """Two stores and one metadata store, both with the default metadata_root."""

    def test_second_installation_is_refused_until_it_has_a_root_of_its_own(self, tmp_path: Path) -> None:
        """Loss prevented: the second one claimed the topics of the first, whose owner was fenced."""
        metadata = f"sqlite://{tmp_path / 'shared.db'}"
        first, second = (f"file://{tmp_path / name}" for name in ("store-1", "store-2"))
        with tidelog.open(tmp_path / "a", store=first, metadata=metadata) as log:
            topic = log.topic("shop/orders")
            topic.append(b"mine", sync=True)
            for read_only in (False, True):
                with (
                    pytest.raises(tidelog.ConfigError, match=r"not to .*store-2.*metadata_root=") as error,
                    tidelog.open(tmp_path / "b", store=second, metadata=metadata, read_only=read_only) as other,
                ):
                    other.topics()
                assert first in str(error.value)
            assert not (tmp_path / "b" / "tidelog.json").exists()
            assert topic.ship() == 1
        with tidelog.open(tmp_path / "b", store=second, metadata=metadata, metadata_root="second") as log:
            log.topic("shop/orders").append(b"other", sync=True)
        with tidelog.open(tmp_path / "b") as log:
            assert log._info.metadata_root == "second"
            assert [message.value for message in log.topic("shop/orders").read()] == [b"other"]
        with tidelog.open(tmp_path / "a") as log:
            assert [message.value for message in log.topic("shop/orders").read()] == [b"mine"]

    def test_directory_that_was_pointed_elsewhere_opens_no_topic(self, tmp_path: Path) -> None:
        """Where the stores are not asked when the directory is opened, they are before the first topic is."""
        metadata = f"sqlite://{tmp_path / 'shared.db'}"
        for name, root in (("a", "tidelog"), ("b", "second")):
            with tidelog.open(
                tmp_path / name, store=f"file://{tmp_path / name}-store", metadata=metadata, metadata_root=root
            ) as log:
                log.topic("shop/orders").append(b"here")
        change_info(tmp_path / "b", metadata_root="tidelog")
        with tidelog.open(tmp_path / "b") as log:
            for use in (log.topics, lambda: log.topic("shop/orders"), lambda: log.has_topic("shop/new")):
                with pytest.raises(tidelog.ConfigError, match="metadata_root"):
                    use()

    def test_store_that_was_moved_is_the_same_with_its_id(self, tmp_path: Path) -> None:
        """A copy without the id is another store; the error says what to copy."""
        with tidelog.open(
            tmp_path / "a", store=f"file://{tmp_path / 'old'}", metadata=f"sqlite://{tmp_path / 'shared.db'}"
        ) as log:
            log.topic("a/b").append(b"one", sync=True)
            log.topic("a/b").ship()
        shutil.copytree(tmp_path / "old", tmp_path / "new")
        identity = tmp_path / "new" / "storage" / "store.json"
        kept = identity.read_bytes()
        identity.unlink()
        change_info(tmp_path / "a", store=f"file://{tmp_path / 'new'}")
        with tidelog.open(tmp_path / "a") as log, pytest.raises(tidelog.ConfigError, match=r"copy storage/store\.json"):
            log.topic("a/b")
        identity.write_bytes(kept)
        with tidelog.open(tmp_path / "a") as log:
            assert [message.value for message in log.topic("a/b").read()] == [b"one"]

    @pytest.mark.parametrize("metadata", [None, "bucket"])
    def test_catalog_of_its_own_needs_no_id(self, tmp_path: Path, metadata: str | None) -> None:
        """In the directory or in the bucket itself it cannot be another's."""
        with tidelog.open(tmp_path / "a", store=f"file://{tmp_path / 's'}", metadata=metadata) as log:
            log.topic("a/b").append(b"one", sync=True)
        assert not (tmp_path / "s" / "storage" / "store.json").exists()


class TestMetadataRoot:
    """`metadata_root` is remembered as the store is."""

    def test_another_root_is_refused_with_the_way_to_move(self, tmp_path: Path) -> None:
        """Topics would seem to be gone."""
        store = f"file://{tmp_path / 's'}"
        with tidelog.open(tmp_path / "data", store=store, metadata="bucket", metadata_root="mine"):
            pass
        with tidelog.open(tmp_path / "data", metadata_root="mine"):
            pass
        for read_only in (False, True):
            with pytest.raises(tidelog.ConfigError, match=r"below metadata_root mine, not below other.*mine/.*change"):
                tidelog.open(tmp_path / "data", metadata_root="other", read_only=read_only)

    def test_directory_from_before_takes_the_root_that_is_named(self, tmp_path: Path) -> None:
        """It had no place to remember it."""
        store = f"file://{tmp_path / 's'}"
        with tidelog.open(tmp_path / "data", store=store, metadata="bucket", metadata_root="mine") as log:
            log.topic("a/b").append(b"one", sync=True)
        change_info(tmp_path / "data", metadata_root=None)
        with tidelog.open(tmp_path / "data", metadata_root="mine") as log:
            assert log.topics() == ["a/b"]
        assert json.loads((tmp_path / "data" / "tidelog.json").read_bytes())["metadata_root"] == "mine"

    def test_root_that_means_nothing_is_refused(self, tmp_path: Path) -> None:
        """Without a store, and where it cannot be part of a key."""
        with pytest.raises(tidelog.ConfigError, match="metadata_root is named without a store"):
            tidelog.open(tmp_path / "data", metadata_root="mine")
        with pytest.raises(tidelog.ConfigError, match=r"metadata_root must be .* not 'a/b'"):
            tidelog.open(tmp_path / "data", store=f"file://{tmp_path / 's'}", metadata_root="a/b")


def test_other_members_of_the_cluster_are_the_same_place(tmp_path: Path) -> None:
    """Members come and go: one that both URLs name is enough; what is named last is remembered, a user never."""
    known = Place("s3://bucket", "etcd://h1:2379,h2:2379", "tidelog")
    for named, shown in (("etcd://h2,h3", "etcd://h2:2379,h3:2379"), ("etcds://h1:2379", "etcds://h1:2379")):
        assert settle_place(tmp_path, known, Place(metadata=named)).metadata == shown
    for other in ("etcd://h3", "bucket", "etcd://user:secret@h1"):
        with pytest.raises(tidelog.ConfigError) as refused:
            settle_place(tmp_path, known, Place(metadata=other))
        assert "secret" not in str(refused.value)


@pytest.mark.parametrize("settings", [{"etcd_user": "a", "etcd_password": "b"}, {"etcd_ca_path": "/ca.pem"}])
def test_settings_of_etcd_without_etcd_are_refused(tmp_path: Path, settings: dict[str, str]) -> None:
    """With another kind of metadata, and without a store."""
    name = next(iter(settings))
    with pytest.raises(tidelog.ConfigError, match=name):
        tidelog.open(tmp_path / "data", **settings)  # type: ignore[arg-type]
    with pytest.raises(tidelog.ConfigError, match=name):
        tidelog.open(tmp_path / "data", store=f"file://{tmp_path / 's'}", **settings)  # type: ignore[arg-type]
