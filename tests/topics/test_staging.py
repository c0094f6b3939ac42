"""What others hand over to a topic, as the process that owns it sees it: in every mode, with everything beside it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.crash.tier_promises import open_node, tier_settings
from tests.log.workbench import wait_until
from tests.staging.staged_commits import hand_over, stage
from tests.topics.storage_modes import LOCAL, Storage, storage_fixture

import tidelog
from tidelog.clock import ManualClock, SystemClock
from tidelog.cold.gc import STAGED_AGE_US, Reason
from tidelog.errors import FencedError
from tidelog.files import LocalFiles
from tidelog.staging import rows as staging_rows
from tidelog.staging.area import StagingArea
from tidelog.staging.ingest import read_ingested_ranges
from tidelog.store.keys import TopicKeys
from tidelog.store.metadata.open import open_metadata_store
from tidelog.store.urls import open_store
from tidelog.testing import World
from tidelog.topics.ingest import staging_url
from tidelog.topics.message import encode_message
from tidelog.topics.rescue import Rescue

NAME = "shop/orders"
KEYS = TopicKeys("shop", "orders")
SOON: dict[str, Any] = {"ingest_check_seconds": 0.05}
NEVER: dict[str, Any] = {"ingest_check_seconds": 1000.0}
storage = storage_fixture([LOCAL, "shared_fs-sqlite", "shared_fs-bucket"])


def ingested(topic: tidelog.Topic) -> tuple[int, int, int]:
    """What the statistics have counted: commits, rows, and what was refused."""
    statistics = topic.statistics().ingest
    assert statistics is not None
    return statistics.staged_commits, statistics.rows, statistics.refused


@contextlib.contextmanager
def writer(storage: Storage, directory: Path) -> Iterator[StagingArea]:
    """Whoever hands rows over, with connections of its own."""
    if storage.has_store:
        objects = storage.objects()
        assert storage._metadata is not None
        metadata = open_metadata_store(storage._metadata, objects)
    else:
        objects = open_store(staging_url(directory))
        metadata = open_metadata_store(f"sqlite://{directory}/metadata.db")
    with metadata:
        yield StagingArea(objects, metadata, KEYS)


def payloads(values: Sequence[bytes]) -> list[bytes]:
    return [encode_message(value, b"key", {"from": b"spark"}, 1_000_000) for value in values]


def values(topic: tidelog.Topic) -> list[bytes]:
    return [message.value or b"" for message in topic.read()]


def test_rows_are_messages_like_any_other(storage: Storage, tmp_path: Path) -> None:
    """Taken in at the opening and beside the owner; read, subscribed to, and kept after everything is opened again."""
    root = tmp_path / "data"
    with writer(storage, root) as area:
        hand_over(area, "etl", 0, payloads([b"a", b"b"]))
        with storage.open(root, **SOON) as log:
            topic = log.topic(NAME)
            assert values(topic) == [b"a", b"b"]
            consumer = topic.subscribe("billing")
            topic.append(b"mine")
            hand_over(area, "etl", 1, payloads([b"c", b"d"]), parts=2)
            assert area.wait("etl", 1, timeout_seconds=120).first_offset == 3
            received = [consumer.receive(timeout=120) for _ in range(5)]
            assert [message.value for message in received if message is not None] == [b"a", b"b", b"mine", b"c", b"d"]
            assert received[3] is not None
            assert (received[3].key, dict(received[3].headers)) == (b"key", {"from": b"spark"})
            wait_until(lambda: ingested(topic) == (2, 4, 0), "the count, which follows the messages")
        with storage.open(root) as log:
            assert values(log.topic(NAME)) == [b"a", b"b", b"mine", b"c", b"d"]
        assert hand_over(area, "etl", 1, payloads([b"c", b"d"])) == "already committed"


def test_more_rows_than_are_kept_in_memory(storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come behind what was appended before, whole and in order, into files of the usual size; a subscription goes
    on with them, and they are there after everything is opened again."""
    monkeypatch.setattr(staging_rows, "_LEAST_LANE_BYTES", 1 << 20)
    root = tmp_path / "data"
    large = [b"%06d" % number + b"x" * 32_000 for number in range(600)]
    with writer(storage, root) as area, storage.open(root, **NEVER, rotate_max_bytes=4 << 20) as log:
        topic = log.topic(NAME)
        consumer = topic.subscribe("billing")
        topic.append(b"before")
        hand_over(area, "etl", 0, payloads(large), parts=3)
        topic.ingest()
        topic.append(b"behind")
        assert values(topic) == [b"before", *large, b"behind"]
        assert area.status("etl", 0).first_offset == 1
        received = [consumer.receive(timeout=120) for _ in range(602)]
        assert [message.value for message in received if message is not None] == [b"before", *large, b"behind"]
    with storage.open(root) as log:
        assert values(log.topic(NAME)) == [b"before", *large, b"behind"]
    sizes = [path.stat().st_size for path in root.glob("shop/orders/wal.*.log")]
    assert max(sizes) <= 4 << 20
    assert list(root.glob("shop/orders/wal.prepared*")) == []


def test_appends_and_producers_go_on_beside_it(storage: Storage, tmp_path: Path) -> None:
    """Each consignment in one piece, each sequence once."""
    root = tmp_path / "data"
    with writer(storage, root) as area, storage.open(root, **SOON) as log:
        topic = log.topic(NAME)
        stop = threading.Event()

        def produce() -> None:
            producer = topic.producer("till")
            number = 0
            while not stop.is_set():
                producer.append(b"p", sequence=number)
                number += 1
                time.sleep(0.0005)

        thread = threading.Thread(target=produce)
        thread.start()
        for version in range(4):
            hand_over(area, "etl", version, payloads([b"%d-%d" % (version, number) for number in range(100)]))
            assert area.wait("etl", version, timeout_seconds=120).state == "taken"
        stop.set()
        thread.join(120)
        found = values(topic)
    rows = [value for value in found if value != b"p"]
    assert rows == [b"%d-%d" % (version, number) for version in range(4) for number in range(100)]
    for version in range(4):
        first = found.index(b"%d-0" % version)
        assert found[first + 99] == b"%d-99" % version


def test_a_deleted_topic_takes_nothing_along(storage: Storage, tmp_path: Path) -> None:
    """Neither what waits for it nor what is staged comes to a topic that is made again under its name."""
    root = tmp_path / "data"
    with writer(storage, root) as area, storage.open(root, **NEVER) as log:
        log.topic(NAME).append(b"old")
        hand_over(area, "etl", 5, payloads([b"a"]))
        stage(area, "etl", 6, payloads([b"b"]))
        log.delete_topic(NAME)
        assert values(log.topic(NAME)) == []
        assert area.status("etl", 5).state == "unknown"
        assert list(area._objects.list(KEYS.staging_prefix)) == []
        hand_over(area, "etl", 5, payloads([b"again"]))
        assert log.topic(NAME).ingest() == 1
        assert values(log.topic(NAME)) == [b"again"]


def test_closing_waits_for_nobody(storage: Storage, tmp_path: Path) -> None:
    """A consignment that nobody has taken in yet waits for the next opening."""
    root = tmp_path / "data"
    with writer(storage, root) as area:
        with storage.open(root, **NEVER) as log:
            log.topic(NAME)
            hand_over(area, "etl", 0, payloads([b"a"]))
        assert area.status("etl", 0).state == "pending"
        with storage.open(root) as log:
            assert values(log.topic(NAME)) == [b"a"]


def test_a_reader_changes_nothing(storage: Storage, tmp_path: Path) -> None:
    """A directory that is open for reading only takes nothing in."""
    root = tmp_path / "data"
    with storage.open(root) as log:
        log.topic(NAME).append(b"a", sync=True)
        if storage.has_store:
            log.topic(NAME).ship()
    with writer(storage, root) as area, storage.open(root, read_only=True) as view:
        hand_over(area, "etl", 0, payloads([b"b"]))
        topic = view.topic(NAME)
        assert values(topic) == [b"a"]
        assert topic.statistics().ingest is None
        with pytest.raises(tidelog.InputError):
            topic.ingest()
        assert area.status("etl", 0).state == "pending"


def test_what_is_staged_and_never_committed_goes_after_a_day(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a sweep where there is a store, else by the next opening; what is committed stays."""
    root = tmp_path / "data"
    with writer(storage, root) as area, storage.open(root, **NEVER) as log:
        log.topic(NAME)
        stage(area, "dead", 0, payloads([b"a"]))
        stage(area, "dead", 1, payloads([b"a"]))
        hand_over(area, "etl", 0, payloads([b"b"]))
        if storage.has_store:
            assert log.topic(NAME).plan_orphans().is_empty
        before_us = SystemClock().now_us()
        monkeypatch.setattr(SystemClock, "now_us", lambda self: before_us + STAGED_AGE_US + 60_000_000)
        if storage.has_store:
            plan = log.topic(NAME).plan_orphans()
            assert [(one.kind, one.reason) for one in plan.removable] == [("staged rows", Reason.UNCOMMITTED)] * 2
            assert "never committed" in "".join(plan.lines())
            report = log.topic(NAME).remove_orphans(plan)
            assert len(report.objects) == 2
            assert report.bytes == plan.bytes > 0
        assert area.status("etl", 0).state == "pending"
    with writer(storage, root) as area, storage.open(root) as log:
        assert values(log.topic(NAME)) == [b"b"]
        if storage.has_store:
            log.topic(NAME).ship()
            log.topic(NAME).ingest()
        assert list(area._objects.list(KEYS.staging_prefix)) == []


def test_the_twin_for_tasks(tmp_path: Path) -> None:
    """It takes in as the other does."""
    place = Storage(LOCAL, None, None, {})
    root = tmp_path / "data"
    with writer(place, root) as area, place.open(root, **NEVER) as log:
        topic = log.topic(NAME)
        hand_over(area, "etl", 0, payloads([b"a"]))
        assert asyncio.run(topic.ingest_async()) == 1
        assert values(topic) == [b"a"]


def test_a_replaced_owner_takes_nothing_in(tmp_path: Path) -> None:
    """The new one does, and the old one hears of it."""
    place = Storage("shared_fs", f"file://{tmp_path}/bucket", "bucket", {"ownership_check_seconds": 3600.0})
    with writer(place, tmp_path) as area, place.open(tmp_path / "a", **NEVER) as first:
        first.topic(NAME).append(b"one")
        first.topic(NAME).ship()
        with place.open(tmp_path / "b", **NEVER) as second:
            second.topic(NAME, take_over=True)
            hand_over(area, "etl", 0, payloads([b"two"]))
            with pytest.raises(FencedError):
                first.topic(NAME).ingest()
            assert second.topic(NAME).ingest() == 1
            assert values(second.topic(NAME)) == [b"one", b"two"]
        with pytest.raises(FencedError):
            first.topic(NAME).append(b"late")


def test_a_name_that_nobody_has_opened_is_no_topic(storage: Storage, tmp_path: Path) -> None:
    """Whatever was handed over to it; whoever opens it makes it one, with the rows in it."""
    root = tmp_path / "data"
    with writer(storage, root) as area, storage.open(root) as log:
        log.topic("shop/before")
        log.topic("shop/zebra")
        hand_over(area, "etl", 0, payloads([b"a"]))
        assert log.topics() == ["shop/before", "shop/zebra"]
        assert not log.has_topic(NAME)
        log.topic(NAME)
        assert log.topics() == ["shop/before", NAME, "shop/zebra"]


def test_a_rescue_leaves_out_what_was_handed_over(tmp_path: Path) -> None:
    """The new owner has taken it in again, from where it was staged: returned as well, it would be there twice."""
    place = Storage("shared_fs", f"file://{tmp_path}/bucket", "bucket", {})
    with writer(place, tmp_path) as area:
        with place.open(tmp_path / "a", **NEVER) as first:
            topic = first.topic(NAME)
            topic.append(b"one", sync=True)
            hand_over(area, "etl", 0, payloads([b"a", b"b"]))
            topic.ingest()
            topic.append(b"two", sync=True)
            hand_over(area, "etl", 1, payloads([b"c"]))
            topic.ingest()
        with place.open(tmp_path / "b") as second:
            assert values(second.topic(NAME)) == [b"a", b"b", b"c"]
            second.topic(NAME).seal()
        with place.open(tmp_path / "a", **NEVER) as first:
            rescue = Rescue(first, NAME)
            (tail,) = rescue.set_aside()
            assert tail.count == 5
            report = rescue.append_to(tail, first.topic("shop/rescued"))
            assert (report.appended, report.handed_over, report.lost) == (2, 3, 0)
            assert values(first.topic("shop/rescued")) == [b"one", b"two"]
            assert values(first.topic(NAME)) == [b"a", b"b", b"c"]


def test_shipped_rows_are_no_longer_remembered(tmp_path: Path) -> None:
    """Messages that get no rows' offsets are never left out of a rescue."""
    place = Storage("shared_fs", f"file://{tmp_path}/bucket", "bucket", {})
    with writer(place, tmp_path) as area, place.open(tmp_path / "a", **NEVER) as log:
        topic = log.topic(NAME)
        hand_over(area, "etl", 0, payloads([b"a", b"b"]))
        topic.ingest()
        directory = log._topic_directory(NAME)
        assert read_ingested_ranges(LocalFiles(), directory) == ((0, 2),)
        topic.ship()
        topic.ingest()
        hand_over(area, "etl", 1, payloads([b"c"]))
        topic.ingest()
        assert read_ingested_ranges(LocalFiles(), directory) == ((2, 3),)
        topic.seal()
        assert read_ingested_ranges(LocalFiles(), directory) == ()


def test_a_tail_with_rows_that_are_placed_anew_is_not_given_back(tmp_path: Path) -> None:
    """Doubles, otherwise: rows that one node has on its disk, and that another was about to take in again."""
    world = World(clock=ManualClock())
    area = StagingArea(world.store, world.metadata, KEYS)
    with open_node(world, "a", tier_settings()) as log:
        hand_over(area, "etl", 0, payloads([b"a", b"b"]))
        log.topic(NAME).append(b"mine", sync=True)
        log.topic(NAME).ingest()
    world.store.fail("get", times=None)
    with open_node(world, "b", tier_settings()) as log:
        assert log.topic(NAME).next_offset == 0
    world.store.heal()
    with open_node(world, "a", tier_settings()) as log:
        assert values(log.topic(NAME)) == [b"a", b"b"]
    with open_node(world, "b", tier_settings()) as log:
        log.topic(NAME)


def test_a_tail_without_such_rows_is_given_back(tmp_path: Path) -> None:
    """Looking at a topic to which something was handed over earlier takes nothing from its owner."""
    world = World(clock=ManualClock())
    area = StagingArea(world.store, world.metadata, KEYS)
    with open_node(world, "a", tier_settings()) as log:
        hand_over(area, "etl", 0, payloads([b"a", b"b"]))
        log.topic(NAME).ship()
        log.topic(NAME).ingest()
        log.topic(NAME).append(b"mine", sync=True)
    with open_node(world, "b", tier_settings()) as log:
        assert log.topic(NAME).next_offset == 2
    with open_node(world, "a", tier_settings()) as log:
        assert values(log.topic(NAME)) == [b"a", b"b", b"mine"]


@pytest.mark.parametrize("metadata", ["sqlite", "bucket"])
def test_a_directory_that_is_given_a_store_takes_what_waits_along(tmp_path: Path, metadata: str) -> None:
    """What was handed over before, wherever the catalog is from then on; and what was done stays done."""
    root, local = tmp_path / "data", Storage(LOCAL, None, None, {})
    with writer(local, root) as area:
        hand_over(area, "etl", 0, payloads([b"a"]))
        with local.open(root) as log:
            log.topic(NAME).append(b"mine")
        hand_over(area, "etl", 1, payloads([b"b", b"c"]), parts=2)
    place = Storage("shared_fs", f"file://{tmp_path}/bucket", metadata, {})
    with place.open(root) as log:
        assert values(log.topic(NAME)) == [b"a", b"mine", b"b", b"c"]
        log.topic(NAME).ship()
        log.topic(NAME).ingest()
        assert list(place.objects().list(KEYS.staging_prefix)) == []
        assert not list((root / ".staging").rglob("*.tlog"))
        again = Storage("shared_fs", f"file://{tmp_path}/bucket", f"sqlite://{root}/metadata.db", {})
        with writer(again if metadata == "sqlite" else place, root) as area:
            assert hand_over(area, "etl", 1, payloads([b"b", b"c"])) == "already committed"
