"""`tidelog pipeline ship`: backlogs of many topics, sent by workers, published by the driver in order, proven."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from pyspark.sql import SparkSession
from tests.servers import ACCESS_KEY_ID, SECRET_ACCESS_KEY, S3Server

import tidelog
from tidelog.cli.app import run
from tidelog.cold.settings import TierSettings
from tidelog.cold.upload import Piece, UploadPlan, plan_upload
from tidelog.errors import ConflictError, InputError, LockedError, NotFoundError, NotSupportedError
from tidelog.pipeline.address import Root, find_root
from tidelog.pipeline.jobs import ship as ship_job
from tidelog.pipeline.jobs.gc import apply_gc, plan_gc
from tidelog.pipeline.jobs.job import Progress
from tidelog.pipeline.jobs.ship import SendWork, send_object, ship
from tidelog.pipeline.location import TopicLocation
from tidelog.pipeline.report.report import make_report
from tidelog.store.keys import ObjectId, TopicKeys
from tidelog.store.settings import StoreSettings

NAMES = [f"shop/topic-{number}" for number in range(4)]
SMALL: dict[str, Any] = {"max_object_bytes": 20_000, "rotate_max_bytes": 8_000}


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """A directory with a store that nothing was shipped to yet: four topics of several objects each."""
    with tidelog.open(tmp_path / "data", rotate_max_bytes=8_000) as log:
        for number, name in enumerate(NAMES):
            for _ in range(100 + number):
                log.topic(name).append(b"x" * 500)
    with tidelog.open(tmp_path / "data", store=(tmp_path / "store").as_uri(), ship_max_delay_seconds=3600):
        pass  # it remembers its store
    return find_root(tmp_path / "data", **SMALL)


@pytest.fixture(autouse=True)
def workers_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the objects are."""
    monkeypatch.setattr(ship_job, "_LEAST_TASK_BYTES", 0)


def contents(root: Root) -> dict[str, list[tuple[int, bytes]]]:
    """All messages, read through the catalog where that has them."""
    with root.open() as log:
        return {name: [(one.offset, one.value or b"") for one in log.topic(name).read()] for name in log.topics()}


def test_all_backlogs_are_shipped_and_proven(spark: SparkSession, root: Root) -> None:
    """Every message is in a published object then, the frames of both sides are equal, and a second run is idle."""
    told: list[Progress] = []
    before = contents(root)
    report = ship(spark, root, on_progress=told.append)
    assert report.is_good
    assert [(one.topic, one.shipped_offset) for one in report.topics] == [
        (name, 100 + number) for number, name in enumerate(NAMES)
    ]
    assert [(one.subject, one.went_in.messages, one.went_in.last_offset) for one in report.reconciliations] == [
        (name, 100 + number, 99 + number) for number, name in enumerate(NAMES)
    ]
    assert all(one.came_out == one.went_in for one in report.reconciliations)
    assert min(one.objects for one in report.topics) >= 3
    assert told[-1].done == told[-1].total > 0
    assert contents(root) == before
    again = ship(spark, root)
    assert (sum(one.objects for one in again.topics), again.reconciliations, again.is_good) == (0, (), True)


def test_no_topics_are_not_all_topics(root: Root) -> None:
    """Loses, without this: the choice of a pattern that matches nothing yet. Everything was shipped then."""
    report = ship(cast(SparkSession, None), root, [])
    assert (report.topics, report.notes) == ((), (f"there are no topics in {root.directory}",))


def test_small_objects_are_sent_without_a_task(
    spark: SparkSession, root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To start one takes longer; they are checked, read back and proven all the same."""
    monkeypatch.setattr(ship_job, "_LEAST_TASK_BYTES", 1 << 20)
    monkeypatch.setattr(ship_job, "run_on_workers", lambda *_: pytest.fail("a task was started"))
    before = contents(root)
    report = ship(spark, root)
    assert report.is_good
    assert [one.came_out.messages for one in report.reconciliations if one.came_out] == [100, 101, 102, 103]
    assert all(one.came_out == one.went_in for one in report.reconciliations)
    assert contents(root) == before


def test_what_a_killed_run_has_sent_is_sent_again_and_goes(spark: SparkSession, root: Root) -> None:
    """Death between sending and publishing leaves one object a topic; the next run ships all, and gc removes it."""
    keys = TopicKeys("shop", "topic-0")
    with tidelog.open(root.location, ship_max_delay_seconds=3600, **SMALL) as log:
        tiered = log.topic(NAMES[0])._tiered
        assert tiered is not None
        shipment = plan_upload(tiered.log, 0, 100, 20_000, None)
        assert shipment is not None
        name = ObjectId(0, shipment.next_offset - 1, tiered.owned.epoch)
        place = root.place
        assert place is not None
        log_id = tiered.owned.ownership.owner.log_id
        settings, key = TierSettings(), keys.object(name)
        work = SendWork(topic=NAMES[0], place=place, key=key, shipment=shipment, settings=settings, log_id=log_id)
        sent = send_object(work)
    assert sent.went_in == sent.came_out
    assert sent.went_in.messages == shipment.next_offset
    report = ship(spark, root, [NAMES[0]])
    assert (report.is_good, report.topics[0].shipped_offset) == (True, 100)
    plan, found = plan_gc(spark, root, [NAMES[0]])
    assert [(one.action, one.object) for one in found.found] == [("remove", keys.object(name))]
    assert apply_gc(spark, root, plan).removed_objects == 1
    assert len(contents(root)[NAMES[0]]) == 100


def test_a_damaged_file_stops_its_topic_alone(spark: SparkSession, root: Root) -> None:
    """Everything before the damage is shipped of it, the problem is told, and the other topics are shipped."""
    (first, *_) = sorted((Path(root.location) / NAMES[1]).glob("wal.*.log"))
    data = bytearray(first.read_bytes())
    data[-10] ^= 1
    first.write_bytes(bytes(data))
    report = ship(spark, find_root(root.location, **SMALL, open_check_bytes=0))
    assert {problem.subject for problem in report.findings} == {NAMES[1]}
    assert not report.is_good
    shipped = {one.topic: one.shipped_offset for one in report.topics}
    assert [shipped[name] for name in (NAMES[0], *NAMES[2:])] == [100, 102, 103]
    assert shipped[NAMES[1]] < 101


def test_a_live_owner_is_left_alone(spark: SparkSession, root: Root, tmp_path: Path) -> None:
    """It ships by itself; so does another node that owns a topic, and a topic that is sealed waits for its owner."""
    with tidelog.open(root.location, ship_max_delay_seconds=3600) as log:
        with pytest.raises(LockedError, match="ships it by itself"):
            ship(spark, root)
        log.topic(NAMES[0]).seal()
    other = tidelog.open(tmp_path / "other", store=(tmp_path / "store").as_uri(), metadata=metadata_of(root))
    with other as log:
        log.topic(NAMES[1]).append(b"theirs")
    report = ship(spark, root)
    assert [one.topic for one in report.topics] == NAMES[2:]
    assert report.notes[0] == "left out: shop/topic-0 is sealed for its next owner"
    assert "owns shop/topic-1" in report.notes[1]
    with pytest.raises(ConflictError, match="is sealed"):
        ship(spark, root, [NAMES[0]])


def metadata_of(root: Root) -> str:
    """The catalog of a directory that keeps it inside."""
    return f"sqlite://{root.location}/metadata.db"


def test_what_cannot_be_shipped_is_named(spark: SparkSession, root: Root, tmp_path: Path) -> None:
    """A store alone, a directory without a store, a topic or directory that is not there, files that no worker sees."""
    with pytest.raises(InputError, match="no local files to ship"):
        ship(spark, find_root((tmp_path / "store").as_uri()))
    with pytest.raises(NotFoundError, match="no log directory"):
        ship(spark, find_root(tmp_path / "nowhere"))
    with pytest.raises(NotFoundError, match="no topic shop/nothing"):
        ship(spark, root, ["shop/nothing"])
    with tidelog.open(tmp_path / "local") as log:
        log.topic("a/b").append(b"x")
    with pytest.raises(NotSupportedError, match="no store"):
        ship(spark, find_root(tmp_path / "local"))
    place = TopicLocation((tmp_path / "store").as_uri(), StoreSettings(), "bucket", "tidelog")
    gone = UploadPlan((Piece(0, tmp_path / "elsewhere" / "wal.0.log", 0, 10, 0, 1),))
    settings = TierSettings()
    with pytest.raises(InputError, match="a worker does not see"):
        send_object(SendWork(topic="a/b", place=place, key="k", shipment=gone, settings=settings, log_id="00" * 16))


def test_a_bucket_is_shipped_to_looked_at_and_swept(spark: SparkSession, s3_server: S3Server, tmp_path: Path) -> None:
    """Over S3: workers send with the settings of the root; gc and report need nothing but the bucket."""
    settings: dict[str, Any] = {
        "store_endpoint": s3_server.endpoint,
        "store_access_key_id": ACCESS_KEY_ID,
        "store_secret_access_key": SECRET_ACCESS_KEY,
    }
    url = s3_server.url("ship-job")
    with tidelog.open(tmp_path / "s3", store=url, metadata="bucket", ship_max_delay_seconds=3600, **settings) as log:
        for _ in range(100):
            log.topic("shop/orders").append(b"x" * 500)
    root = find_root(tmp_path / "s3", **settings, max_object_bytes=20_000)
    shipped = ship(spark, root)
    assert (shipped.is_good, shipped.topics[0].shipped_offset) == (True, 100)
    assert shipped.topics[0].objects > 1
    bucket = find_root(url, **settings)
    orphan = TopicKeys("shop", "orders").object(ObjectId(0, 9, 1))
    with tidelog.open(tmp_path / "s3", ship_max_delay_seconds=3600, **settings) as log:
        log.topic("shop/orders")
        assert log._tier is not None
        log._tier.objects.put(orphan, b"left over by an owner that died")
    plan, _ = plan_gc(spark, bucket)
    done = apply_gc(spark, bucket, plan)
    assert (done.is_good, done.removed_objects) == (True, 1)
    report = make_report(bucket, tmp_path / "page.html", spark=spark, exact=True)
    assert (report.is_good, report.messages, report.hot_bytes) == (True, 100, 0)
    assert len(contents(bucket)["shop/orders"]) == 100


def test_the_command_ships(spark: SparkSession, root: Root, capsys: pytest.CaptureFixture[str]) -> None:
    """`tidelog pipeline ship` tells how far each topic is, and its proofs."""
    assert run(["pipeline", "ship", NAMES[0], "--root", root.location, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["topics"][0]["shipped_offset"], told["is_good"]) == (100, True)
    assert told["reconciliations"][0]["went_in"] == told["reconciliations"][0]["came_out"]
