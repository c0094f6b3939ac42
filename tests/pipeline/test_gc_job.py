"""`tidelog pipeline gc`: what belongs to nothing is shown, and goes when that is asked for; nothing else ever does."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import tidelog
from tidelog.cli.app import run
from tidelog.clock import SystemClock
from tidelog.cold.gc import Candidate, Plan, Reason
from tidelog.cold.rewrite import build_object, plan_merges
from tidelog.cold.rewrite_commit import Rewrite, begin
from tidelog.errors import DataError, InputError, NotFoundError, NotSupportedError
from tidelog.log.frame import encode
from tidelog.pipeline.address import Root, find_root
from tidelog.pipeline.jobs.gc import GcPlan, GcReport, apply_gc, plan_gc, read_plan, write_plan
from tidelog.staging.area import StagingArea
from tidelog.store.keys import ObjectId, TopicKeys
from tidelog.topics.columns import frames_digest
from tidelog.topics.message import TIMESTAMP_FIELD

KEYS = TopicKeys("shop", "orders")
ORPHAN = ObjectId(0, 4, 1)


class Place:
    """A directory with a store; `shop/orders` has four objects and is owned for the second time."""

    def __init__(self, path: Path) -> None:
        self.directory = path / "data"
        self.store = path / "store"
        for _ in range(2):
            with self.open() as log:
                for name in ("shop/orders", "shop/quiet"):
                    topic = log.topic(name)
                    for _ in range(2):
                        topic.append_many([b"message"] * 10)
                        topic.ship()

    def open(self) -> tidelog.LogDirectory:
        return tidelog.open(self.directory, store=self.store.as_uri())

    @property
    def root(self) -> Root:
        return find_root(self.directory)

    def leave_orphan(self) -> Path:
        """What a first owner uploaded and did not come to publish."""
        path = self.store / KEYS.object(ORPHAN)
        path.write_bytes(b"orphan")
        return path

    def leave_staged(self) -> Path:
        """What a Spark job staged two days ago and did not come to commit."""
        with self.open() as log:
            assert log._tier is not None
            area = StagingArea(log._tier.objects, log._tier.metadata, KEYS)
            with area.open_part("dead", 7, partition=0, attempt="f00d") as writer:
                writer.write(encode(0, b"\x01"), 1)
        path = self.store / area.part_key("dead", 7, 0, "f00d")
        long_ago = time.time() - 2 * 86_400
        os.utime(path, (long_ago, long_ago))
        return path

    def compact(self) -> list[str]:
        """Replaces the objects of the topic, except for the newest; returns the names of those."""
        with self.open() as log:
            assert log._tier is not None
            catalog, objects = log._tier.catalog("shop", "orders"), log._tier.objects
            work = begin(catalog, objects, SystemClock())
            (merge,) = plan_merges(catalog, target_bytes=1 << 20).runs
            built = build_object(
                *(objects, KEYS, merge.descriptors, work.generation),
                codec="none",
                digest=frames_digest,
                time_field=TIMESTAMP_FIELD,
            )
            work.switch([Rewrite(descriptor=built.descriptor, replaced=merge.replaced)])
        return [one.object_id for one in merge.descriptors]

    def objects(self) -> set[str]:
        return {path.name for path in (self.store / KEYS.objects_prefix).iterdir() if path.suffix == ".tlog"}

    def messages(self, name: str = "shop/orders") -> int:
        """How many can be read from the store alone."""
        with self.root.open() as log:
            return sum(1 for _ in log.topic(name).read())


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Two topics with a store."""
    return Place(tmp_path)


def actions(report: GcReport) -> set[tuple[str, str, str]]:
    """What is said of each object."""
    return {(one.action, one.reason, one.object.rpartition("/")[2]) for one in report.found}


def test_what_is_left_over_goes_and_what_is_named_stays(spark: SparkSession, place: Place) -> None:
    """Orphans and replaced objects are found in one run, removed by the next, and nothing else is touched."""
    staged = place.leave_staged()
    orphan, replaced = place.leave_orphan(), place.compact()
    (place.store / KEYS.objects_prefix / "notes.txt").write_text("not ours")
    before = place.objects()
    plan, shown = plan_gc(spark, place.root, grace_seconds=0)
    assert place.objects() == before
    wanted = {
        ("remove", "orphan", orphan.name),
        ("remove", "uncommitted", staged.name),
        ("keep", "foreign", "notes.txt"),
    }
    assert actions(shown) == wanted | {("remove", "replaced", name) for name in replaced}
    assert shown.removable_objects == 2 + len(replaced)
    done = apply_gc(spark, place.root, plan)
    assert (done.is_applied, done.removed_objects, done.is_good) == (True, shown.removable_objects, True)
    assert before - place.objects() == {orphan.name, *replaced}
    assert not staged.exists()
    assert [(proof.subject, proof.went_in.messages, proof.holds) for proof in done.reconciliations] == [
        ("shop/orders", 40, True)
    ]
    assert place.messages() == 40
    again = apply_gc(spark, place.root, plan)
    assert (actions(again), again.removable_objects, again.removed_objects, again.removed_bytes, again.is_good) == (
        {("keep", "foreign", "notes.txt")},
        *(0, 0, 0, True),
    )
    assert place.messages() == 40


def test_gc_says_why_there_is_nothing_to_remove(spark: SparkSession, place: Place) -> None:
    """All of it is in use, or what was found has to stay for now; when a plan is applied, too."""
    plan, shown = plan_gc(spark, place.root)
    in_use = "everything of 2 topics in the store is in use: a catalog, a compaction or a snapshot names it"
    assert shown.notes == apply_gc(spark, place.root, plan).notes == (in_use,)
    replaced = place.compact()
    _, shown = plan_gc(spark, place.root)
    assert shown.notes[-1] == f"what was found stays: {len(replaced)} recent"


def test_a_plan_that_has_grown_old_removes_nothing_that_is_needed(spark: SparkSession, place: Place) -> None:
    """Between plan and apply another owner came: each thing is looked at again, and stays with the reason told."""
    orphan = place.leave_orphan()
    plan, _ = plan_gc(spark, place.root)
    with place.open() as log:
        log.topic("shop/orders")
    done = apply_gc(spark, place.root, plan)
    assert orphan.exists()
    assert done.removed_objects == 0
    assert [(one.reason, one.why) for one in done.kept] == [(Reason.TAKEN_OVER, Reason.TAKEN_OVER.text)]


def test_the_command_keeps_a_plan_and_applies_it(
    spark: SparkSession, place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --apply nothing changes; replaced objects wait for their time; a lost object is exit code 1."""
    orphan, kept = place.leave_orphan(), tmp_path / "gc.plan"
    place.compact()
    assert run(["pipeline", "gc", "--root", str(place.directory), "--plan", str(kept), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["removable_objects"], shown["is_applied"], orphan.exists()) == (1, False, True)
    assert "superseded objects have not waited long enough" in shown["notes"][0]
    assert run(["pipeline", "gc", "--root", str(place.directory), "--apply", str(kept)]) == 0
    assert not orphan.exists()
    (place.store / KEYS.object(ObjectId(30, 39, 2))).unlink()
    assert run(["pipeline", "gc", "shop/orders", "--root", str(place.directory)]) == 1
    assert "LOST" in capsys.readouterr().out
    assert run(["pipeline", "gc", "shop/orders", "--root", str(place.directory), "--apply", str(kept)]) == 2


def test_a_topic_that_cannot_be_looked_at_is_told(spark: SparkSession, place: Place) -> None:
    """The others are looked at all the same."""
    with place.open() as log:
        assert log._tier is not None
        log._tier.metadata.put(KEYS.owner, b"nonsense")
    _, report = plan_gc(spark, place.root)
    assert [one.subject for one in report.findings] == ["shop/orders"]
    assert [proof.subject for proof in report.reconciliations] == ["shop/quiet"]


def test_a_plan_is_for_its_own_store(spark: SparkSession, place: Place, tmp_path: Path) -> None:
    """Carried out elsewhere it would hold one store's objects against another's catalog."""
    with pytest.raises(InputError, match="this plan is for topics in file:///elsewhere"):
        apply_gc(spark, place.root, GcPlan(store="file:///elsewhere", made_us=0))
    with tidelog.open(tmp_path / "local") as log:
        log.topic("a/b").append(b"x")
    with pytest.raises(NotSupportedError, match="no store"):
        plan_gc(spark, find_root(tmp_path / "local"))


@pytest.mark.parametrize(
    "key",
    [
        "storage/topics/shop/other/objects/data-0-4-e1.tlog",
        "storage/topics/shop/orders/objects/../../other/objects/data-0-4-e1.tlog",
        "storage/engine/main/objects/data-0-4-e1.tlog",
    ],
)
@pytest.mark.parametrize("kind", ["log object", "staged rows", "upload"])
def test_a_plan_from_a_file_can_name_nothing_of_others(kind: str, key: str, tmp_path: Path) -> None:
    """Whoever changed it, or whatever did: only objects of the topic are believed to be meant."""
    found = Candidate(kind=kind, action="remove", reason=Reason.ORPHAN, key=key, bytes=6)
    plan = Plan(subject="shop/orders", epoch=2, claim="c", start_offset=0, found=(found,))
    write_plan(tmp_path / "plan", GcPlan(store="file:///x", made_us=0, plans=(plan,)))
    with pytest.raises(DataError, match="not an object of the topic shop/orders"):
        read_plan(tmp_path / "plan")


def test_a_plan_that_was_changed_is_refused(tmp_path: Path) -> None:
    """Its checksum tells; a file that is not a plan, or not there, is named."""
    path = tmp_path / "plan"
    write_plan(path, GcPlan(store="file:///x", made_us=0))
    assert read_plan(path) == GcPlan(store="file:///x", made_us=0)
    path.write_bytes(path.read_bytes().replace(b"file:///x", b"file:///y"))
    with pytest.raises(DataError, match="checksum"):
        read_plan(path)
    with pytest.raises(NotFoundError, match=r"there is no plan.*gc --plan FILE"):
        read_plan(tmp_path / "nothing")
