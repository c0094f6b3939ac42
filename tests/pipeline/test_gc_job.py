"""`tidelog pipeline gc`: what belongs to nothing is shown, and goes when that is asked for; nothing else ever does."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import SparkSession

import tidelog
from tidelog.cli.app import run
from tidelog.clock import SystemClock
from tidelog.errors import DataError, InputError, NotFoundError, NotSupportedError
from tidelog.log.frame import encode
from tidelog.pipeline.jobs.gc import GcReport, apply_gc, plan_gc
from tidelog.pipeline.jobs.gc_plan import GcPlan, TopicGarbage, read_plan, write_plan
from tidelog.pipeline.root import Root, find_root
from tidelog.tier.intake_area import IntakeArea
from tidelog.tier.keys import ObjectId, TopicKeys
from tidelog.tier.replacement import Replacement
from tidelog.tier.replacement_build import build_object
from tidelog.tier.replacement_plan import plan_merges
from tidelog.tier.replacement_switch import begin
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
            assert log.tier is not None
            area = IntakeArea(log.tier.objects, log.tier.metadata, KEYS)
            with area.open_part("dead", 7, partition=0, attempt="f00d") as writer:
                writer.write(encode(0, b"\x01"), 1)
        path = self.store / area.part_key("dead", 7, 0, "f00d")
        long_ago = time.time() - 2 * 86_400
        os.utime(path, (long_ago, long_ago))
        return path

    def compact(self) -> list[str]:
        """Replaces the objects of the topic, except for the newest; returns the names of those."""
        with self.open() as log:
            assert log.tier is not None
            catalog, objects = log.tier.catalog("shop", "orders"), log.tier.objects
            work = begin(catalog, objects, SystemClock())
            (merge,) = plan_merges(catalog, target_bytes=1 << 20).runs
            built = build_object(
                *(objects, KEYS, merge.descriptors, work.generation),
                codec="none",
                digest=frames_digest,
                time_field=TIMESTAMP_FIELD,
            )
            work.switch([Replacement(descriptor=built.descriptor, replaced=merge.replaced)])
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
    return {(one.action, one.kind, one.object.rpartition("/")[2]) for one in report.found}


def test_what_is_left_over_goes_and_what_is_named_stays(spark: SparkSession, place: Place) -> None:
    """Orphans and replaced objects are found in one run, removed by the next, and nothing else is touched."""
    staged = place.leave_staged()
    orphan, replaced = place.leave_orphan(), place.compact()
    (place.store / KEYS.objects_prefix / "notes.txt").write_text("not ours")
    before = place.objects()
    plan, shown = plan_gc(spark, place.root, grace_seconds=0)
    assert place.objects() == before
    wanted = {("remove", "orphans", orphan.name), ("remove", "staged", staged.name), ("keep", "foreign", "notes.txt")}
    assert actions(shown) == wanted | {("remove", "replaced", name) for name in replaced}
    assert shown.removable_objects == 2 + len(replaced)
    done = apply_gc(spark, place.root, plan)
    assert (done.is_applied, done.removed_objects, done.is_good) == (True, shown.removable_objects, True)
    assert before - place.objects() == {orphan.name, *replaced}
    assert not staged.exists()
    assert [(proof.subject, proof.went_in.messages, proof.holds) for proof in done.proofs] == [
        ("shop/orders", 40, True)
    ]
    assert place.messages() == 40
    again = apply_gc(spark, place.root, plan)
    assert again.removed_bytes <= done.removed_bytes
    assert again.is_good
    assert place.messages() == 40


def test_a_plan_that_has_grown_old_removes_nothing_that_is_needed(spark: SparkSession, place: Place) -> None:
    """Between plan and apply another owner came: each thing is looked at again, and stays with the reason told."""
    orphan = place.leave_orphan()
    plan, _ = plan_gc(spark, place.root)
    with place.open() as log:
        log.topic("shop/orders")
    done = apply_gc(spark, place.root, plan)
    assert orphan.exists()
    assert done.removed_objects == 0
    assert "has taken the topic over since" in done.kept[0][1]


def test_the_command_keeps_a_plan_and_applies_it(
    spark: SparkSession, place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --apply nothing changes; replaced objects wait for their time; a lost object is exit code 1."""
    orphan, kept = place.leave_orphan(), tmp_path / "gc.plan"
    place.compact()
    assert run(["pipeline", "gc", "--root", str(place.directory), "--plan", str(kept), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["removable_objects"], shown["is_applied"], orphan.exists()) == (1, False, True)
    assert "replaced objects have not waited long enough" in shown["notes"][0]
    assert run(["pipeline", "gc", "--root", str(place.directory), "--apply", str(kept)]) == 0
    assert not orphan.exists()
    (place.store / KEYS.object(ObjectId(30, 39, 2))).unlink()
    assert run(["pipeline", "gc", "shop/orders", "--root", str(place.directory)]) == 1
    assert "LOST" in capsys.readouterr().out
    assert run(["pipeline", "gc", "shop/orders", "--root", str(place.directory), "--apply", str(kept)]) == 2


def test_a_topic_that_cannot_be_looked_at_is_told(spark: SparkSession, place: Place) -> None:
    """The others are looked at all the same."""
    with place.open() as log:
        assert log.tier is not None
        log.tier.metadata.put(KEYS.owner, b"nonsense")
    _, report = plan_gc(spark, place.root)
    assert [problem.topic for problem in report.problems] == ["shop/orders"]
    assert [proof.subject for proof in report.proofs] == ["shop/quiet"]


def test_a_plan_is_for_its_own_store(spark: SparkSession, place: Place, tmp_path: Path) -> None:
    """Carried out elsewhere it would hold one store's objects against another's catalog."""
    with pytest.raises(InputError, match="this plan is for file:///elsewhere"):
        apply_gc(spark, place.root, GcPlan(store="file:///elsewhere", made_us=0))
    with tidelog.open(tmp_path / "local") as log:
        log.topic("a/b").append(b"x")
    with pytest.raises(NotSupportedError, match="no store"):
        plan_gc(spark, find_root(tmp_path / "local"))


GARBAGE = {
    "topic": "shop/orders",
    "catalog": {"messages": 0, "first_offset": None, "last_offset": None, "checksum": ""},
    "cleanup": {"claim": None},
}


@pytest.mark.parametrize(
    "key",
    [
        "storage/topics/shop/other/objects/data-0-4-e1.tlog",
        "storage/topics/shop/orders/objects/data-0-9-e1.tlog",
        "storage/topics/shop/orders/objects/../../other/objects/data-0-4-e1.tlog",
    ],
)
def test_a_plan_from_a_file_can_name_nothing_of_others(key: str, tmp_path: Path) -> None:
    """Whoever changed it, or whatever did: only objects of the topic with the offsets of their names are believed."""
    swept = {"key": key, "start_offset": 0, "end_offset": 4, "epoch": 1, "size": 6}
    sweep = {"epoch": 2, "claim": "c", "start_offset": 0, "next_offset": 40, "orphans": [swept]}
    garbage = msgspec.convert({**GARBAGE, "sweep": sweep}, TopicGarbage)
    write_plan(tmp_path / "plan", GcPlan(store="file:///x", made_us=0, topics=(garbage,)))
    with pytest.raises(DataError, match="not a plan of gc"):
        read_plan(tmp_path / "plan")
    sweep = {"epoch": 2, "claim": "c", "start_offset": 0, "next_offset": 40, "staged": [(key, 6, "etag", 0)]}
    garbage = msgspec.convert({**GARBAGE, "sweep": sweep}, TopicGarbage)
    write_plan(tmp_path / "plan", GcPlan(store="file:///x", made_us=0, topics=(garbage,)))
    with pytest.raises(DataError, match="not what was staged"):
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
