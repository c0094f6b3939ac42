"""`topic.verify()`: findings and a verdict, on a topic that is in use."""

from __future__ import annotations

import asyncio
import os
import struct
import threading
from pathlib import Path

import pytest

import tidelog
from tidelog.errors import NotSupportedError
from tidelog.log.binding import BINDING_BYTES

COUNT = 60


def flip(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 0x10
    path.write_bytes(data)


@pytest.fixture
def log(tmp_path: Path) -> tidelog.LogDirectory:
    """A log with a store, and a topic of two objects and a tail."""
    log = tidelog.open(tmp_path / "data", store=(tmp_path / "store").as_uri(), metadata="bucket")
    topic = log.topic("shop/orders")
    for _ in range(2):
        topic.append_many([b"message %d" % number for number in range(COUNT // 3)])
        topic.ship()
    topic.append_many([b"message %d" % number for number in range(COUNT // 3)])
    topic.flush()
    return log


def objects(tmp_path: Path) -> list[Path]:
    found = (tmp_path / "store").rglob("data-*.tlog")
    return sorted(found, key=lambda path: int(path.name.split("-")[1]))


def test_topic_that_is_whole_verifies(log: tidelog.LogDirectory) -> None:
    """The report is true, says ok, and counts what was read; `cold=False` leaves the store out."""
    with log:
        topic = log.topic("shop/orders")
        report = topic.verify()
        assert (bool(report), report.ok, report.verdict, report.findings) == (True, True, "ok", ())
        assert (report.subject, report.read["frames"], report.read["object_messages"]) == ("shop/orders", 60, 40)
        assert "objects" not in topic.verify(cold=False).read
        assert asyncio.run(topic.verify_async()) == report


def test_damaged_file_and_object_are_findings(log: tidelog.LogDirectory, tmp_path: Path) -> None:
    """Each finding says what it is about, where, which offsets, what is wrong and what to do."""
    with log:
        topic = log.topic("shop/orders")
        wal = max((tmp_path / "data/shop/orders").glob("wal.*.log"))
        flip(wal, len(wal.read_bytes()) // 2)
        flip(objects(tmp_path)[1], -3)
        report = topic.verify()
        assert (report.ok, report.verdict) == (False, "damaged")
        in_file, in_object = report.findings
        assert (in_file.subject, in_file.kind, in_file.severity) == ("shop/orders", "frames", "error")
        assert (in_file.path, in_file.first_offset) == (str(wal), in_file.last_offset)
        assert in_file.byte is not None
        assert "tidelog repair" in (in_file.fix or "")
        assert (in_object.kind, in_object.first_offset, in_object.last_offset) == ("object", 20, 39)
        assert str(in_object).startswith(f"shop/orders: {in_object.path}, byte {in_object.byte}: a checksum")
        assert [one.kind for one in topic.verify(cold=False).findings] == ["frames"]


def test_missing_object_and_descriptor_are_findings(log: tidelog.LogDirectory, tmp_path: Path) -> None:
    """The catalog is checked against the store, and the files against the end of the objects."""
    with log:
        topic = log.topic("shop/orders")
        objects(tmp_path)[0].unlink()
        assert [one.text.rpartition(": ")[2] for one in topic.verify().findings] == [
            "the object is missing (offsets 0 to 19)"
        ]
        catalog = topic._joined.history.catalog  # type: ignore[union-attr]
        catalog.metadata.delete(catalog.keys.descriptor(0))
        (gap,) = topic.verify().findings
        assert (gap.kind, gap.first_offset, gap.last_offset) == ("catalog", 0, 19)


@pytest.mark.parametrize("is_foreign", [False, True])
@pytest.mark.parametrize("name", ["start", "owner", "partitions", f"segments/{0:020}", f"segments/{20:020}"])
def test_damaged_document_of_the_catalog_is_a_finding(
    log: tidelog.LogDirectory, tmp_path: Path, name: str, is_foreign: bool
) -> None:
    """It names the key and the command that mends it, and everything else is verified."""
    with log:
        topic = log.topic("shop/orders")
        catalog = topic._joined.history.catalog  # type: ignore[union-attr]
        key = catalog.keys.metadata_prefix + name
        if is_foreign:
            (tmp_path / "store" / key).write_bytes(b"junk")
        else:
            catalog.metadata.put(key, b"{junk")
        report = topic.verify()
        found = report.findings[0]
        assert (found.kind, found.path, report.verdict) == ("catalog", key, "damaged")
        assert "tidelog topic rebuild-catalog shop/orders --replace" in (found.fix or "")
        assert report.read["frames"] == 60


def test_gap_between_objects_and_files_is_a_finding(tmp_path: Path) -> None:
    """Offsets that neither an object nor a file has are lost, though both are whole."""
    store = (tmp_path / "store").as_uri()
    with tidelog.open(tmp_path / "data", store=store, metadata="bucket", rotate_max_bytes=600) as log:
        topic = log.topic("shop/orders")
        topic.append_many([b"%020d" % number for number in range(10)])
        topic.ship()
        for number in range(10, 60):
            topic.append(b"%020d" % number, sync=True)
        first, *middle, _ = sorted((tmp_path / "data/shop/orders").glob("wal.*.log"))
        for path in (first, middle[0], middle[1]):
            path.unlink()
        messages = [one.message for one in topic.verify().findings]
        assert any("neither an object nor a file" in message for message in messages), messages


def test_torn_tail_is_a_verdict_of_its_own(tmp_path: Path) -> None:
    """What a killed process leaves is a warning: the next opening cuts it."""
    with tidelog.open(tmp_path / "data") as log:
        log.topic("a/b").append_many([b"x"] * 5)
    wal = max((tmp_path / "data/a/b").glob("wal.*.log"))
    with wal.open("ab") as file:
        file.write(struct.pack("<QII", 5, 500, 0) + b"begun")
    with tidelog.open(tmp_path / "data", read_only=True) as log:
        report = log.topic("a/b").verify()
    assert (report.ok, report.verdict) == (False, "torn")
    (torn,) = report.findings
    assert not report
    assert (torn.severity, torn.kind, torn.first_offset, torn.fix) == ("warning", "torn tail", 5, None)


def test_owner_tells_a_torn_tail_from_damage(tmp_path: Path) -> None:
    """What it has synced cannot be torn: a bad last frame is damage."""
    with tidelog.open(tmp_path / "data") as log:
        topic = log.topic("a/b")
        topic.append_many([b"x" * 50] * 5)
        topic.flush()
        flip(max((tmp_path / "data/a/b").glob("wal.*.log")), -3)
        (found,) = topic.verify().findings
        assert (found.severity, found.kind, found.first_offset) == ("error", "frames", 4)


def test_topic_in_use_verifies(tmp_path: Path) -> None:
    """Appends, rotation, shipping and pruning beside a verification are not findings."""
    store = (tmp_path / "store").as_uri()
    with tidelog.open(
        tmp_path / "data", store=store, metadata="bucket", rotate_max_bytes=2000, local_retention_bytes=4000
    ) as log:
        topic = log.topic("shop/orders")
        done = threading.Event()

        def work() -> None:
            while not done.is_set():
                topic.append_many([os.urandom(200) for _ in range(10)])
                topic.ship()
                topic.prune()

        worker = threading.Thread(target=work)
        worker.start()
        try:
            for _ in range(8):
                assert topic.verify().findings == ()
        finally:
            done.set()
            worker.join()


def test_topic_in_memory_verifies_and_live_one_refuses() -> None:
    """A log in memory has files too; a topic that keeps nothing has nothing to verify."""
    with tidelog.open(None) as log:
        topic = log.topic("a/b")
        topic.append_many([b"x"] * 5)
        topic.flush()
        assert (topic.verify().ok, topic.verify().read["frames"]) == (True, 5)
        with pytest.raises(NotSupportedError):
            log.topic("a/live", reliable=False).verify()


def test_unreadable_message_is_found(log: tidelog.LogDirectory) -> None:
    """A frame that is whole and no message is found in the file and in the object."""
    with log:
        topic = log.topic("shop/orders")
        topic._log.append(struct.pack("<BBHIqII", 1, 0, 0, 0, -(1 << 62), 0, 0))
        topic.ship()
        found = topic.verify().findings
        assert [(one.kind, one.first_offset) for one in found] == [("message", None), ("message", COUNT)]
        assert found[1].byte is not None
        assert found[1].byte >= BINDING_BYTES


def test_partitions_verify_as_one(tmp_path: Path) -> None:
    """The findings of all partitions are in one report, each with the name of its own; counts are summed."""
    with tidelog.open(tmp_path / "data") as log:
        topic = log.topic("shop/orders", partitions=3)
        for number in range(12):
            topic.append(b"x" * 50, partition=number % 3)
        topic.flush()
        assert (topic.verify().verdict, topic.verify().read["frames"]) == ("ok", 12)
        wal = max((topic.partition(1)._log.directory).glob("wal.*.log"))
        flip(wal, -3)
        (found,) = topic.verify().findings
        assert (found.subject, found.path) == (topic.partition(1).name, str(wal))
