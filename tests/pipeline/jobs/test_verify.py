"""The job `verify` finds what is wrong with topics, and nothing where nothing is wrong.

Every kind of damage has a topic of its own in one world, so that one run has to find all of them and blame no other.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import SparkSession

import tidelog
from tidelog.cold.catalog import Catalog, Descriptor, encode_descriptor
from tidelog.errors import NotFoundError
from tidelog.log.binding import BINDING_BYTES
from tidelog.pipeline.address import Root, find_root
from tidelog.pipeline.jobs.job import Progress
from tidelog.pipeline.jobs.verify import TopicsVerifyReport, verify
from tidelog.topics.directory import LogDirectory

OBJECTS = 3
PER_OBJECT = 50
TAIL = 7
MESSAGES = OBJECTS * PER_OBJECT + TAIL
GOOD = ("shop/good", "shop/zipped")
UNREADABLE = struct.pack("<BBHIqII", 1, 0, 0, 0, -(1 << 62), 0, 0)


class Damaged:
    """A topic with three objects and a tail in a file, and ways to damage it."""

    def __init__(self, log: LogDirectory, name: str, store: Path) -> None:
        topic = log.topic(name, ship_compression="zstd" if name == "shop/zipped" else "none")
        for number in range(OBJECTS):
            if name == "shop/unreadable" and number == 1:
                topic._log.append(UNREADABLE)
            topic.append_many([b"message %d of %d" % (one, number) for one in range(topic.next_offset % 2, PER_OBJECT)])
            topic.ship()
        if name == "shop/unreadable-file":
            topic._log.append(UNREADABLE)
        topic.append_many([b"tail %d" % number for number in range(TAIL)])
        topic.flush()
        assert log._tier is not None
        self.name = name
        self.file = max((log.root / name).glob("wal.*.log"))
        found = (store / "storage/topics" / name / "objects").glob("data-*")
        self.objects = sorted(found, key=lambda path: int(path.name.split("-")[1]))
        self._catalog: Catalog = log._tier.catalog(*name.split("/"))
        self.descriptor: Descriptor = list(self._catalog.walk(0))[1]

    def rewrite(self, **changes: object) -> None:
        """Puts a changed descriptor in the place of the second."""
        self.publish(PER_OBJECT, encode_descriptor(msgspec.structs.replace(self.descriptor, **changes)))

    def publish(self, start: int, value: bytes) -> None:
        self._catalog.metadata.put(self._catalog.keys.descriptor(start), value)

    def withdraw(self, start: int) -> None:
        self._catalog.metadata.delete(self._catalog.keys.descriptor(start))

    def overlap(self) -> None:
        """One more object, which begins inside the second."""
        copy = self.objects[1].with_name("data-60-99-e1.tlog")
        copy.write_bytes(self.objects[1].read_bytes())
        changes = {"start_offset": 60, "object_id": copy.name, "offset_index": ((60, BINDING_BYTES),)}
        self.publish(60, encode_descriptor(msgspec.structs.replace(self.descriptor, **changes)))


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 0x10
    path.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Damaged], object], str]] = {
    "flipped-bit": (lambda topic: flip_a_bit(topic.objects[1]), "a checksum that does not match (offsets 50 to 99)"),
    "truncated-object": (lambda topic: os.truncate(topic.objects[1], 99), "it has 99 bytes"),
    "missing-object": (lambda topic: topic.objects[1].unlink(), "the object is missing (offsets 50 to 99)"),
    "gap": (lambda topic: topic.withdraw(PER_OBJECT), "no object has the range before it (offsets 50 to 99)"),
    "overlap": (lambda topic: topic.overlap(), "the object before it has this range too (offsets 60 to 99)"),
    "missing-newest": (lambda topic: topic.withdraw(PER_OBJECT * (OBJECTS - 1)), "was published, and is gone"),
    "wrong-checksum": (lambda topic: topic.rewrite(checksum="crc32:00000000"), "its checksum is crc32:"),
    "wrong-time": (lambda topic: topic.rewrite(first_time_us=5), "its first_time_us is"),
    "wrong-size": (lambda topic: topic.rewrite(size=12345), "its descriptor says 12345"),
    "wrong-index": (
        lambda topic: topic.rewrite(offset_index=((50, BINDING_BYTES), (60, BINDING_BYTES + 17))),
        "offset 60 is at byte 53, where it is not",
    ),
    "nonsense": (lambda topic: topic.publish(PER_OBJECT, b"{}"), "cannot be understood"),
    "unreadable": (lambda _: None, "message 50 has an impossible timestamp (offset 50)"),
    "unreadable-file": (lambda _: None, "message 150 has an impossible timestamp"),
    "damaged-file": (lambda topic: flip_a_bit(topic.file), "a checksum that does not match"),
}


class World:
    """A log directory with its store, in which most topics are damaged."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "data"
        self.store = directory / "store"
        with tidelog.open(self.directory, store=self.store.as_uri(), metadata="bucket") as log:
            topics = {kind: Damaged(log, f"shop/{kind}", self.store) for kind in (*DAMAGES, "good", "zipped", "orphan")}
            for kind, (damage, _) in DAMAGES.items():
                damage(topics[kind])
        topics["orphan"].objects[0].with_name("data-900-910-e1.tlog").write_bytes(b"left over")

    @property
    def root(self) -> Root:
        return find_root(self.directory)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("verify"))


@pytest.fixture(scope="module")
def report(spark: SparkSession, world: World) -> TopicsVerifyReport:
    """Of all topics at once."""
    return verify(spark, world.root)


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_found(report: TopicsVerifyReport, kind: str) -> None:
    """Each kind of damage is named, with the offsets that it concerns."""
    problems = [str(problem) for problem in report.findings if problem.subject == f"shop/{kind}"]
    assert any(DAMAGES[kind][1] in problem for problem in problems), problems
    assert not report.is_good


def test_no_other_topic_is_blamed(report: TopicsVerifyReport) -> None:
    """What is damaged in one topic is no problem of another, and every message of the good ones is counted once."""
    assert {problem.subject for problem in report.findings} == {f"shop/{kind}" for kind in DAMAGES}
    good = [proof.went_in for proof in report.reconciliations if proof.subject in GOOD]
    assert [(one.messages, one.first_offset, one.last_offset) for one in good] == [(MESSAGES, 0, MESSAGES - 1)] * 2


def test_an_object_that_nobody_names_is_noted(report: TopicsVerifyReport) -> None:
    """It is no problem: nothing is missing because of it."""
    assert any("shop/orphan" in note and "data-900-910-e1.tlog" in note for note in report.notes)


def test_a_report_is_json(report: TopicsVerifyReport) -> None:
    """What is printed with --json is the report itself, and can be read back."""
    assert msgspec.json.decode(msgspec.json.encode(report), type=TopicsVerifyReport) == report


def test_a_proof_is_the_same_again(spark: SparkSession, world: World, report: TopicsVerifyReport) -> None:
    """A second run of the good topics alone is good, tells how far it is, and proves the same."""
    told: list[Progress] = []
    again = verify(spark, world.root, GOOD, told.append)
    assert again.is_good
    assert again.reconciliations == tuple(proof for proof in report.reconciliations if proof.subject in GOOD)
    assert told[-1].done == told[-1].total > 0


def test_a_bucket_alone_is_enough(spark: SparkSession, world: World) -> None:
    """Without the directory all objects are read, and only the tail is missing."""
    report = verify(spark, find_root(world.store.as_uri()), GOOD)
    assert report.is_good
    assert [one.totals.messages for one in report.topics] == [MESSAGES - TAIL, MESSAGES - TAIL]


def test_a_topic_that_is_not_there_is_refused(spark: SparkSession, world: World) -> None:
    """A misspelt name is an error, not an empty proof."""
    with pytest.raises(NotFoundError, match="shop/goods"):
        verify(spark, world.root, ["shop/goods"])
