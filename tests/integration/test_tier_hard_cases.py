"""Cases that broke the cold tier once: each opens with the loss it prevents."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from tests.log.workbench import run_python, wait_until

import tidelog
from tidelog.clock import SystemClock
from tidelog.cold.owned_log import PauseDetector, pulse
from tidelog.cold.ownership import Ownership
from tidelog.cold.rebuild import rebuild_catalog
from tidelog.errors import ClosedError, DataError, FencedError, StoreUnavailableError, TidelogError
from tidelog.store.keys import TopicKeys
from tidelog.store.metadata.base import MeasuredMetadata
from tidelog.store.object_store import ObjectWriter
from tidelog.store.shared_directory import DirectoryStore
from tidelog.topics.directory import LogDirectory
from tidelog.topics.message import TIMESTAMP_FIELD

NAME = "shop/orders"
KEYS = TopicKeys("shop", "orders")


class Shared:
    """A store and a SQLite file that several directories use."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.database = root / "meta" / "metadata.db"

    def open(self, node: str, **settings: Any) -> LogDirectory:
        place: dict[str, Any] = {"store": f"file://{self.root}/bucket", "metadata": f"sqlite://{self.database}"}
        return tidelog.open(self.root / node, **place, **settings)

    def ship_each(self, node: str, *values: bytes) -> None:
        """One object a message."""
        with self.open(node) as log:
            topic = log.topic(NAME)
            for value in values:
                topic.append(value)
                topic.ship()

    def values(self, node: str) -> list[bytes]:
        with self.open(node) as log:
            return [message.value or b"" for message in log.topic(NAME).read()]

    def lose_descriptor(self, offset: int) -> None:
        connection = sqlite3.connect(self.database)
        with connection:
            assert connection.execute("DELETE FROM entries WHERE key = ?", (KEYS.descriptor(offset),)).rowcount == 1
        connection.close()

    def rebuild(self, node: str) -> None:
        with self.open(node) as log:
            assert log._tier is not None
            clock = SystemClock()
            stores = (log._tier.metadata, KEYS, log._tier.objects)
            rebuild_catalog(*stores, clock=clock, time_field=TIMESTAMP_FIELD, replace=True)


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    return Shared(tmp_path)


FORK = """
import os, sys, tidelog
with tidelog.open(sys.argv[1], store="file://" + sys.argv[2], retention_bytes=1) as log:
    topic = log.topic("shop/orders")
    topic.append(b"shipped")
    topic.ship()
    child = os.fork()
    if child == 0:
        refused = 0
        for work in (topic.seal, topic.prune, topic.ship):
            try:
                work()
            except tidelog.TidelogError:
                refused += 1
        os._exit(refused)
    _, status = os.waitpid(child, 0)
    topic.append(b"synced after the fork", sync=True)
    assert os.waitstatus_to_exitcode(status) == 3, status
with tidelog.open(sys.argv[1]) as log:
    print([message.value for message in log.topic("shop/orders").read()])
"""


def test_a_forked_child_cannot_seal_the_topic_of_its_parent(tmp_path: Path) -> None:
    """Prevents: a worker process sealed its copy of a topic, and the parent's files were deleted under its appends."""
    done = run_python(FORK, tmp_path / "data", tmp_path / "bucket")
    assert (done.stdout.strip(), done.returncode) == ("[b'shipped', b'synced after the fork']", 0), done.stderr


def test_a_sealed_topic_whose_catalog_lost_its_end_is_refused_every_time(shared: Shared) -> None:
    """Prevents: the second attempt to open was let through, and offsets of shipped messages were used again."""
    with shared.open("a") as log:
        topic = log.topic(NAME)
        for value in (b"0", b"1", b"2"):
            topic.append(value)
            topic.ship()
        topic.seal()
    shared.lose_descriptor(2)
    for _ in range(3):
        with shared.open("b") as log, pytest.raises(DataError, match="sealed the topic at offset 3"):
            log.topic(NAME)
    shared.rebuild("b")
    assert shared.values("b") == [b"0", b"1", b"2"]


def test_a_lost_newest_descriptor_is_noticed(shared: Shared) -> None:
    """Prevents: a new node went on in front of the last object, and its offsets were used again."""
    shared.ship_each("a", b"0", b"1", b"2")
    shared.lose_descriptor(2)
    for _ in range(2):
        with shared.open("b") as log, pytest.raises(DataError, match="older than the bucket"):
            log.topic(NAME)
    shared.rebuild("b")
    assert shared.values("b") == [b"0", b"1", b"2"]


@pytest.mark.parametrize("node", ["a", "b"])
def test_metadata_from_a_backup_is_noticed(shared: Shared, node: str) -> None:
    """Prevents: with yesterday's catalog the objects of today were forgotten, and their offsets used again."""
    shared.ship_each("a", b"0", b"1")
    shutil.copy(shared.database, shared.root / "backup.db")
    shared.ship_each("a", b"2")
    shared.ship_each("a", b"3")
    shutil.copy(shared.root / "backup.db", shared.database)
    for _ in range(2):
        with shared.open(node) as log, pytest.raises(DataError, match="older than the bucket"):
            log.topic(NAME)
    shared.rebuild(node)
    assert shared.values(node) == [b"0", b"1", b"2", b"3"]


def test_a_machine_that_was_set_back_ships_nothing_over_its_later_self(tmp_path: Path) -> None:
    """Prevents: after a return to a snapshot other messages were shipped under the offsets of shipped ones."""
    store = f"file://{tmp_path}/bucket"
    with tidelog.open(tmp_path / "data", store=store) as log:
        topic = log.topic(NAME)
        for value in (b"0", b"1", b"2", b"3"):
            topic.append(value)
            topic.ship()
            if value == b"1":
                shutil.copytree(tmp_path / "data", tmp_path / "snapshot")
    with tidelog.open(tmp_path / "snapshot") as log:
        topic = log.topic(NAME, take_over=True)  # the snapshot has the heartbeat of a moment ago
        topic.append(b"other")
        with pytest.raises(DataError, match="older than the bucket"):
            topic.ship()


def test_one_object_that_was_sent_and_not_published_is_no_sign_of_an_older_catalog(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a crash between upload and publishing would have kept everybody from opening the topic."""
    shared.ship_each("a", b"0")
    with shared.open("a") as log:
        topic = log.topic(NAME)
        topic.append(b"1")

        def dies(*arguments: object) -> None:
            raise StoreUnavailableError("the process died here")

        with monkeypatch.context() as patch:
            patch.setattr("tidelog.cold.ownership.OwnedCatalog.publish", dies)
            with pytest.raises(StoreUnavailableError):
                topic.ship()
    shared.ship_each("b", b"another 1")
    assert shared.values("b") == [b"0", b"another 1"]


def test_a_topic_that_could_not_be_deleted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: after a deletion in an outage the topic was locked by itself, fenced itself, and was never closed."""
    with tidelog.open(tmp_path / "data", store=f"file://{tmp_path}/bucket") as log:
        topic = log.topic(NAME)
        topic.append(b"0")

        def does_not_answer(*arguments: object) -> None:
            raise StoreUnavailableError("no answer")

        with monkeypatch.context() as patch:
            patch.setattr(MeasuredMetadata, "get", does_not_answer)
            with pytest.raises(StoreUnavailableError):
                log.delete_topic(NAME)
        assert log.topic(NAME) is topic
        topic.append(b"1")
        assert topic.ship() == 2
        log.delete_topic(NAME)
        assert not log.has_topic(NAME)


def test_what_was_sealed_cannot_seal_what_was_opened_since(tmp_path: Path) -> None:
    """Prevents: sealing twice, as two parts of a program may, closed the topic under whoever had opened it again."""
    with tidelog.open(tmp_path / "data", store=f"file://{tmp_path}/bucket") as log:
        before = log.topic(NAME)
        before.append(b"0")
        before.seal()
        with pytest.raises(ClosedError):
            before.seal()
        after = log.topic(NAME)
        with pytest.raises(ClosedError):
            before.seal()
        assert after.append(b"1", sync=True) == 1


def test_uploads_that_hang_do_not_keep_an_owner_from_noticing_that_it_was_replaced(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: while a few topics hung in a slow store, replaced owners went on accepting for minutes."""
    names = [f"shop/{number}" for number in range(6)]
    settings = {"ship_max_delay_seconds": 0, "ship_interval_seconds": 0.05, "ownership_check_seconds": 0.2}
    answers, hanging = Event(), []

    def hangs(store: DirectoryStore, key: str) -> ObjectWriter:
        hanging.append(key)
        answers.wait(240)
        raise StoreUnavailableError("no answer")

    monkeypatch.setattr(DirectoryStore, "open_writer", hangs)
    try:
        with shared.open("a", **settings) as old, shared.open("b") as new:
            topics = [old.topic(name) for name in names]
            for topic in topics:
                topic.append(b"0", sync=True)
            wait_until(lambda: len(hanging) >= 4, "uploads that hang")
            for name in names:
                new.topic(name, take_over=True)
            wait_until(lambda: all(_is_refused(topic) for topic in topics), "owners that know that they were replaced")
            assert not answers.is_set()
            answers.set()
    finally:
        answers.set()


def _is_refused(topic: tidelog.Topic) -> bool:
    try:
        topic.append(b"late")
    except FencedError:
        return True
    except TidelogError:
        return False
    return False


def test_an_onlooker_goes_on_with_the_store_when_the_topic_leaves_its_disk(shared: Shared) -> None:
    """Prevents: after a seal whoever read beside the owner saw an empty topic, and whoever followed waited for ever."""
    with shared.open("a") as log, shared.open("a", read_only=True) as beside:
        topic = log.topic(NAME)
        topic.append_many([b"0", b"1"], sync=True)
        seen = beside.topic(NAME)
        following = seen.read(follow=True)
        assert [next(following).value for _ in range(2)] == [b"0", b"1"]
        topic.seal()
        assert (seen.next_offset, [message.value for message in seen.read(0)]) == (2, [b"0", b"1"])
        shared.ship_each("b", b"2")
        assert next(following).value == b"2"
        assert [message.offset for message in seen.read(0)] == [0, 1, 2]


def test_a_time_leads_to_nothing_that_retention_deleted(tmp_path: Path) -> None:
    """Prevents: a file that begins below the topic's start gave deleted messages to whoever read from a time on."""
    now = datetime.now(UTC)
    with tidelog.open(tmp_path / "data", store=f"file://{tmp_path}/bucket", retention_seconds=3600) as log:
        topic = log.topic(NAME)
        topic.append(b"old", timestamp=now - timedelta(days=1))
        topic.ship()
        topic.append(b"new", timestamp=now)
        topic.ship()
        topic.prune()
        assert topic.start_offset == 1
        assert [message.value for message in topic.read(now - timedelta(days=2))] == [b"new"]


def test_no_thread_of_a_process_that_slept_goes_on_before_the_answer() -> None:
    """Prevents: of the threads of a woken owner one asked who owns the topic, and the others appended meanwhile."""

    def answers_late() -> None:
        time.sleep(0.3)
        raise FencedError("another node owns the topic")

    wakefulness = PauseDetector(answers_late)
    pulse.sleeps += 1
    with ThreadPoolExecutor(8) as threads:
        for check in [threads.submit(wakefulness.check) for _ in range(8)]:
            with pytest.raises(FencedError):
                check.result()


def test_a_task_that_appends_after_a_sleep_does_not_stop_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: while the store was slow to say who owns the topic, every task of the program stood still."""

    may_answer = Event()

    def answers_late(owner: Ownership) -> None:
        assert may_answer.wait(240), "the loop stood still"

    async def append_and_tick(topic: tidelog.Topic) -> int:
        ticks = 0
        appending = asyncio.gather(topic.append_async(b"0"), topic.append_many_async([b"1", b"2"]))
        while not appending.done():
            await asyncio.sleep(0.001)
            ticks += 1
            if ticks > 10:
                may_answer.set()
        await appending
        return ticks

    with tidelog.open(tmp_path / "data", store=f"file://{tmp_path}/bucket", ownership_check_seconds=3600) as log:
        topic = log.topic(NAME)
        monkeypatch.setattr(Ownership, "verify", answers_late)
        pulse.sleeps += 1
        assert asyncio.run(append_and_tick(topic)) > 10
        assert topic.next_offset == 3
