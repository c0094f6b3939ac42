"""Staging rows and handing them over, as tasks and drivers do it, in one process: what fails between the steps."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.servers import ACCESS_KEY_ID, SECRET_ACCESS_KEY, S3Server

import tidelog
from tidelog.errors import IngestPendingError, InputError, LogFailedError, StoreUnavailableError
from tidelog.pipeline import ingest as handing
from tidelog.pipeline.address import Root, find_root
from tidelog.pipeline.ingest import write_place
from tidelog.pipeline.sink import sink
from tidelog.pipeline.sink import task as partition_writer
from tidelog.pipeline.sink.sink import SinkCommit, SinkOptions, staging_location
from tidelog.pipeline.sink.task import StagingLocation, stage_rows
from tidelog.staging.area import StagedPart
from tidelog.store.metadata.sqlite import SqliteMetadataStore
from tidelog.topics.directory import LogDirectory

TOPIC = "shop/orders"
Parts = dict[str, list[StagedPart]]


def stage(root: Root, numbers: range, *, app: str = "nightly", version: int = 1, task: int = 0) -> Parts:
    """What one task stages."""
    batch = pa.record_batch({"value": [b"%d" % number for number in numbers]})
    place = StagingLocation(write_place(root), TOPIC, 1 << 20)
    return stage_rows(iter([batch]), place, app, version, task)


def values(root: Root, topic: str = TOPIC) -> list[int]:
    """What is in a topic."""
    with root.open() as log:
        return [int(message.value or b"") for message in log.topic(topic).read()]


def staged(root: Root) -> list[Path]:
    """Every staged object."""
    assert root.directory is not None
    return [path for path in root.directory.rglob("*.tlog") if "staging" in path.parts or ".staging" in path.parts]


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """A directory that nobody owns."""
    return find_root(tmp_path / "data")


def test_what_is_staged_behind_the_commit_does_not_count(root: Root) -> None:
    """A task that was thought dead may stage its rows again after the commit: they are in no topic."""
    SinkCommit(root, "nightly", 1).commit(stage(root, range(5)), 10)
    late = stage(root, range(5))
    assert values(root) == list(range(5))
    SinkCommit(root, "nightly", 1).commit(late, 10)
    assert values(root) == list(range(5))
    assert staged(root) == [], "what was written again for nothing is removed"


def test_a_full_disk_while_rows_are_taken_in(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says that they are handed over; they come in once when there is room, whether written again or not."""

    def full(*_: object) -> None:
        raise LogFailedError("closed, and the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(LogDirectory, "topic", full)
        with pytest.raises(IngestPendingError, match="Do not write it again"):
            SinkCommit(root, "nightly", 1).commit(stage(root, range(5)), 0.1)
    SinkCommit(root, "nightly", 1).commit(stage(root, range(5)), 10)
    assert values(root) == list(range(5))


def test_a_store_that_goes_away(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the commit nothing was written, behind it the error says that all is handed over; it comes in once."""
    settings = {
        "store_endpoint": s3_server.endpoint,
        "store_access_key_id": ACCESS_KEY_ID,
        "store_secret_access_key": SECRET_ACCESS_KEY,
        "store_max_retries": "0",
    }
    root = find_root(s3_server.url("store-goes-away"), **settings)
    parts, ingest = stage(root, range(5)), handing.ingest

    def take_in_without_store(*arguments: Any) -> None:
        s3_server.kill()
        ingest(*arguments)

    s3_server.kill()
    with pytest.raises(StoreUnavailableError):
        SinkCommit(root, "nightly", 1).commit(parts, 5)
    s3_server.start()
    with monkeypatch.context() as patched:
        patched.setattr(sink, "ingest", take_in_without_store)
        with pytest.raises(IngestPendingError, match="Do not write"):
            SinkCommit(root, "nightly", 1).commit(parts, 0.5)
    s3_server.start()
    SinkCommit(root, "nightly", 1).commit(stage(root, range(5)), 30)
    assert values(root) == list(range(5))


def test_two_drivers_at_once(root: Root) -> None:
    """Under one name and version: the rows of exactly one of them come in, whole, and nothing staged stays."""
    parts = [stage(root, range(first, first + 50)) for first in (0, 100, 200)]
    drivers = [threading.Thread(target=SinkCommit(root, "nightly", 1).commit, args=(one, 30)) for one in parts]
    for driver in drivers:
        driver.start()
    for driver in drivers:
        driver.join()
    assert values(root) in [list(range(first, first + 50)) for first in (0, 100, 200)]
    assert staged(root) == []


def test_an_abort_leaves_what_another_driver_staged(root: Root) -> None:
    """Two drivers run the same version: that one of them gives up takes nothing from the other."""
    mine, theirs = stage(root, range(3)), stage(root, range(10, 13))
    SinkCommit(root, "nightly", 1).discard(mine, TOPIC)
    SinkCommit(root, "nightly", 1).commit(theirs, 10)
    assert values(root) == [10, 11, 12]
    assert staged(root) == []


def test_an_abort_of_a_nameless_write_removes_everything(root: Root) -> None:
    """Nobody else has its name, so what failed tasks have staged goes too."""
    stage(root, range(3), app="once-f00d", version=0)
    SinkCommit(root, "once-f00d", 0, is_once=True).discard({}, TOPIC)
    assert staged(root) == []


def test_a_commit_without_an_answer(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store has done it and does not say so: neither the abort that follows nor a second write changes anything."""
    with tidelog.open(root.location, ingest_check_seconds=3600) as log:
        log.topic(TOPIC)
        parts, commit = stage(root, range(5)), SqliteMetadataStore.commit

        def without_answer(*arguments: object) -> None:
            commit(*arguments)  # type: ignore[arg-type]
            raise StoreUnavailableError("no answer")

        with monkeypatch.context() as patched:
            patched.setattr(SqliteMetadataStore, "commit", without_answer)
            with pytest.raises((StoreUnavailableError, IngestPendingError)):
                SinkCommit(root, "nightly", 1).commit(parts, 0.1)
        SinkCommit(root, "nightly", 1).discard(parts, TOPIC)
        again = stage(root, range(5))
        committing = threading.Thread(target=lambda: SinkCommit(root, "nightly", 1).commit(again, 30))
        committing.start()
        log.topic(TOPIC).ingest()
        committing.join()
        assert [int(message.value or b"") for message in log.topic(TOPIC).read()] == list(range(5))


def test_a_topic_that_is_deleted_before_it_is_taken_in(root: Root) -> None:
    """The rows go with it, and so does the memory of them: a topic made anew gets them when they are written again."""
    with tidelog.open(root.location, ingest_check_seconds=3600) as log:
        log.topic(TOPIC)
        with pytest.raises(IngestPendingError):
            SinkCommit(root, "nightly", 1).commit(stage(root, range(5)), 0.1)
        log.delete_topic(TOPIC)
        assert staged(root) == []
        assert log.topic(TOPIC).ingest() == 0
    SinkCommit(root, "nightly", 1).commit(stage(root, range(5)), 10)
    assert values(root) == list(range(5))


def test_a_driver_that_dies_between_two_topics(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """One topic has its rows, the other gets them when the write is made again, and none has them twice."""
    place = StagingLocation(write_place(root), None, 1 << 20, directory=root.directory)

    def stage_both() -> Parts:
        batch = pa.record_batch({"value": [b"1", b"2", b"3", b"4"], "topic": ["shop/a", "shop/b", "shop/a", "shop/b"]})
        return stage_rows(iter([batch]), place, "nightly", 1, 0)

    both = stage_both()
    SinkCommit(root, "nightly", 1).commit({"shop/a": both["shop/a"]}, 10)
    SinkCommit(root, "nightly", 1).commit(stage_both(), 10)
    assert (values(root, "shop/a"), values(root, "shop/b")) == ([1, 3], [2, 4])


def test_many_topics_are_staged_in_bounded_memory(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more topics than may be open at once each has several parts, and its rows in order."""
    monkeypatch.setattr(partition_writer, "_MOST_OPEN", 3)
    monkeypatch.setattr(partition_writer, "_MOST_HELD_BYTES", 2000)
    place = StagingLocation(write_place(root), None, 1 << 20, directory=root.directory)
    names = [f"shop/t{number}" for number in range(7)]
    batches = [
        pa.record_batch({"value": [b"%d" % n for n in range(first, first + 70)], "topic": names * 10})
        for first in range(0, 700, 70)
    ]
    parts = stage_rows(iter(batches), place, "nightly", 1, 0)
    assert all(len(some) > 1 for some in parts.values())
    SinkCommit(root, "nightly", 1).commit(parts, 10)
    for number, name in enumerate(names):
        assert values(root, name) == list(range(number, 700, 7))


def test_a_task_that_fails_leaves_nothing(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what it was writing nor the parts that it had finished; the error says which row."""
    monkeypatch.setattr(partition_writer, "_MOST_HELD_BYTES", 10)

    def batches() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"value": [b"x"] * 10})
        yield pa.record_batch({"value": [b"x", b"x" * (2 << 20)]})

    with pytest.raises(InputError, match="task 4, after its first 10 rows for shop/orders: row 1 makes a message of"):
        stage_rows(batches(), StagingLocation(write_place(root), TOPIC, 1 << 20), "nightly", 1, 4)
    assert staged(root) == []


def test_a_directory_that_was_removed_is_written_anew(root: Root) -> None:
    """A worker keeps its stores open between tasks; who removes a directory and writes again gets a new one."""
    for _ in range(2):
        SinkCommit(root, "nightly", 1).commit(stage(root, range(5)), 10)
        assert values(root) == list(range(5))
        assert root.directory is not None
        shutil.rmtree(root.directory)


def test_a_file_in_the_place_of_a_directory_is_named(tmp_path: Path) -> None:
    """A root that can be no directory is wrong input, before any task has begun."""
    (tmp_path / "file").touch()
    options = SinkOptions(root=find_root(tmp_path / "file"), topic=TOPIC)
    with pytest.raises(InputError, match="the path cannot be used: Not a directory"):
        staging_location(options)


def test_rows_are_not_handed_over_to_the_catalog_of_another_store(tmp_path: Path) -> None:
    """Loss prevented: rows would be in one store, and the topic that waits for them in another."""
    metadata = f"sqlite://{tmp_path / 'shared.db'}"
    with tidelog.open(tmp_path / "data", store=f"file://{tmp_path / 'mine'}", metadata=metadata) as log:
        log.topic(TOPIC)
    (tmp_path / "other").mkdir()
    other = find_root(f"file://{tmp_path / 'other'}", metadata=metadata)
    with pytest.raises(tidelog.ConfigError, match="metadata_root"):
        SinkCommit(other, "nightly", 1).commit(stage(other, range(5)), 10)
    with other.open() as log, pytest.raises(tidelog.ConfigError, match="metadata_root"):
        log.topics()
    own = find_root(f"file://{tmp_path / 'other'}", metadata=metadata, metadata_root="other")
    SinkCommit(own, "nightly", 2).commit(stage(own, range(5), version=2), 10)
    assert values(own) == list(range(5))


def test_root_that_a_directory_remembers_is_where_rows_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the environment says about other installations."""
    place: dict[str, Any] = {"store": f"file://{tmp_path / 'store'}", "metadata": f"sqlite://{tmp_path / 'shared.db'}"}
    with tidelog.open(tmp_path / "data", **place, metadata_root="mine") as log:
        log.topic(TOPIC)
    monkeypatch.setenv("TIDELOG_METADATA_ROOT", "elsewhere")
    root = find_root(tmp_path / "data")
    assert write_place(root).metadata_root == "mine"
    SinkCommit(root, "nightly", 1).commit(stage(root, range(5)), 10)
    assert values(root) == list(range(5))
