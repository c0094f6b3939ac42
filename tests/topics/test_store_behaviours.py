"""What a user may rely on where a topic has a store: in a shared directory, in a bucket, with each kind of metadata."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.log.workbench import wal_paths
from tests.topics.storage_modes import WITH_STORE, Storage, storage_fixture
from tests.topics.test_storage_behaviours import NAME, append_numbers, numbers, take

from tidelog import NotFoundError

storage = storage_fixture(WITH_STORE)
# Nothing happens by itself: what these tests are about is done when they say so.
QUIET: dict[str, Any] = {"ship_interval_seconds": 3600, "retention_interval_seconds": 3600}
SMALL: dict[str, Any] = {"rotate_max_bytes": 512, "max_object_bytes": 1024, **QUIET}


def test_the_mode_is_told(storage: Storage, tmp_path: Path) -> None:
    """A directory says what kind of place its history has."""
    with storage.open(tmp_path) as log:
        assert log.mode == storage.mode


def test_another_node_goes_on_and_reads_everything(storage: Storage, tmp_path: Path) -> None:
    """Three appended and sealed on one node; another continues at 3 and reads 0 to 3."""
    with storage.open(tmp_path / "a") as log:
        append_numbers(log.topic(NAME), 0, 3)
        log.topic(NAME).seal()
    with storage.open(tmp_path / "b") as log:
        append_numbers(log.topic(NAME), 3, 4)
        assert numbers(log.topic(NAME).read(0)) == [0, 1, 2, 3]


def test_three_owners_in_turn_leave_no_duplicate(storage: Storage, tmp_path: Path) -> None:
    """Offsets 0 to 4 over three nodes, each there once, read by the last."""
    for node, (start, stop) in zip("abc", [(0, 2), (2, 3), (3, 5)], strict=True):
        with storage.open(tmp_path / node) as log:
            append_numbers(log.topic(NAME), start, stop)
            log.topic(NAME).seal()
    with storage.open(tmp_path / "d", read_only=True) as log:
        assert numbers(log.topic(NAME).read()) == [0, 1, 2, 3, 4]


def test_a_stale_checkpoint_with_missing_files_recovers_from_the_catalog(storage: Storage, tmp_path: Path) -> None:
    """The files are gone and the checkpoint still names them: the topic goes on behind what was shipped."""
    with storage.open(tmp_path, **SMALL) as log:
        append_numbers(log.topic(NAME), 0, 30)
        log.topic(NAME).ship()
        directory = log._topic_directory(NAME)
    for path in wal_paths(directory):
        path.unlink()
    assert (directory / "wal.ckpt").exists()
    with storage.open(tmp_path, **SMALL) as log:
        append_numbers(log.topic(NAME), 30, 33)
        assert numbers(log.topic(NAME).read()) == list(range(33))


def test_a_lost_disk_loses_nothing_that_was_shipped(storage: Storage, tmp_path: Path) -> None:
    """The whole directory is gone, and everything is there again."""
    with storage.open(tmp_path / "data", **SMALL) as log:
        append_numbers(log.topic(NAME), 0, 40)
        log.topic(NAME).ship()
    shutil.rmtree(tmp_path / "data")
    with storage.open(tmp_path / "data", **SMALL) as log:
        assert numbers(log.topic(NAME).read()) == list(range(40))
        append_numbers(log.topic(NAME), 40, 41)


def test_deleting_leaves_no_object_descriptor_state_or_directory(storage: Storage, tmp_path: Path) -> None:
    """A deleted topic is nowhere any more; made again, it begins at 0."""
    with storage.open(tmp_path, **SMALL) as log:
        before = sorted(tmp_path.rglob("*"))
        append_numbers(log.topic(NAME), 0, 30)
        log.topic(NAME).ship()
        append_numbers(log.topic(NAME), 30, 33)
        assert list(storage.objects().list(f"storage/topics/{NAME}/"))
        assert storage.metadata_keys(NAME)
        log.delete_topic(NAME)
        assert sorted(tmp_path.rglob("*")) == before
        assert (log.topics(), log.has_topic(NAME)) == ([], False)
        assert list(storage.objects().list(f"storage/topics/{NAME}/")) == []
        assert storage.metadata_keys(NAME) == []
        append_numbers(log.topic(NAME), 0, 2)
        assert numbers(log.topic(NAME).read()) == [0, 1]
    with storage.open(tmp_path / "other", read_only=True) as log, pytest.raises(NotFoundError):
        log.topic("shop/never")


def test_cold_and_hot_are_one_stream(storage: Storage, tmp_path: Path) -> None:
    """From objects over files to what is appended while it is read: no gap and no repeat."""
    with storage.open(tmp_path, local_retention_bytes=1, cache_max_messages=4, **SMALL) as log:
        topic = log.topic(NAME)
        append_numbers(topic, 0, 60)
        topic.ship()
        topic.prune()
        append_numbers(topic, 60, 100)
        topic.flush()
        assert 0 < topic.hot_start_offset <= topic.shipped_offset == 60
        reader = topic.read(0, follow=True)
        assert take(reader, 100) == list(range(100))
        append_numbers(topic, 100, 103)
        assert take(reader, 3) == [100, 101, 102]


def test_a_range_of_many_is_found_by_the_index(storage: Storage, tmp_path: Path) -> None:
    """3000 messages in the store alone, and the range 2500 to 2520 gives its 21."""
    with storage.open(tmp_path / "a", ship_compression="zstd", **QUIET) as log:
        append_numbers(log.topic(NAME), 0, 3000)
        log.topic(NAME).seal()
    with storage.open(tmp_path / "b", **QUIET) as log:
        assert numbers(log.topic(NAME).read(2500, 2521)) == list(range(2500, 2521))


def test_retention_never_passes_what_is_durable_elsewhere(storage: Storage, tmp_path: Path) -> None:
    """Local files stay until the store has them, however small the disk may be; then they go, and the start stays."""
    with storage.open(tmp_path, local_retention_bytes=1, **SMALL) as log:
        topic = log.topic(NAME)
        append_numbers(topic, 0, 30)
        topic.flush()
        topic.prune()
        assert topic.hot_start_offset == 0
        topic.ship()
        topic.prune()
        assert topic.hot_start_offset > topic.start_offset == 0
        assert numbers(topic.read()) == list(range(30))


def test_retention_survives_a_missing_file(storage: Storage, tmp_path: Path) -> None:
    """A file that somebody removed is no reason to stop, nor to forget where the topic begins."""
    with storage.open(tmp_path, local_retention_bytes=1, retention_bytes=1500, **SMALL) as log:
        topic = log.topic(NAME)
        append_numbers(topic, 0, 60)
        topic.ship()
        wal_paths(log._topic_directory(NAME))[0].unlink()
        topic.prune()
        start = topic.start_offset
        assert start > 0
        assert numbers(topic.read()) == list(range(start, 60))
    with storage.open(tmp_path, **SMALL) as log:
        assert log.topic(NAME).start_offset == start


def test_topics_are_isolated_in_the_store(storage: Storage, tmp_path: Path) -> None:
    """Names that resemble each other share nothing, and one that is deleted takes none with it."""
    names = ["a/b", "a/b-", "a-/b", "a/b.c"]
    with storage.open(tmp_path / "a", **QUIET) as log:
        for number, name in enumerate(names):
            log.topic(name).append_many([name.encode()] * (number + 1))
            log.topic(name).seal()
        log.delete_topic("a/b")
    with storage.open(tmp_path / "b", **QUIET) as log:
        assert log.topics() == sorted(names[1:])
        for number, name in enumerate(names[1:], 1):
            found = [(message.offset, message.value) for message in log.topic(name).read()]
            assert found == [(offset, name.encode()) for offset in range(number + 1)]


def test_a_large_message_comes_back_from_the_store(storage: Storage, tmp_path: Path) -> None:
    """1 MiB, larger than a file and than an object should be."""
    large = bytes(range(256)) * 4096
    with storage.open(tmp_path / "a", **SMALL) as log:
        log.topic(NAME).append_many([b"before", large, b"after"])
        log.topic(NAME).seal()
    with storage.open(tmp_path / "b", **SMALL) as log:
        assert [message.value for message in log.topic(NAME).read()] == [b"before", large, b"after"]
