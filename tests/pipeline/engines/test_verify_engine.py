"""The job `verify` finds what is wrong with an engine, and nothing where nothing is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from pyspark.sql import SparkSession
from tests.engine.compacting import checkpoint_by_hand, compact_by_hand
from tests.engine.stations import EngineNode
from tests.pipeline.engines.computing import compute_once, work_here, work_without_spark
from tests.pipeline.engines.damaged import StoredEngine
from tests.pipeline.engines.eventful import EventfulEngine
from tests.pipeline.engines.table_flow import TableFlow

import tidelog
from tidelog.clock import ManualClock
from tidelog.engine.cold.gc import drop_wal
from tidelog.engine.entry import CreateBucket, PutObject
from tidelog.engine.mvcc.cells import decode_cell, is_pointer
from tidelog.engine.sst.blob_file import (
    BlobPointer,
    decode_value_pointer,
    decode_version,
    encode_version,
    position_of,
)
from tidelog.engine.sst.block import Row
from tidelog.pipeline.address import find_engine
from tidelog.pipeline.jobs.engine import verify as job
from tidelog.pipeline.jobs.engine.compact import CompactEngineJob, CompactEngineOptions
from tidelog.pipeline.jobs.engine.verify import verify_engine
from tidelog.pipeline.jobs.engine.verify_columns import sound_compaction
from tidelog.store.keys import EngineKeys
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.store.object_store import ObjectInfo, ObjectStore
from tidelog.store.settings import StoreSettings
from tidelog.store.urls import open_store

KEYS = EngineKeys()
NO_SPARK: Any = None


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_wrong_whatever_happened(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollbacks, crashes, lost disks, retention, compactions, states by others, and a log that was dropped."""
    work_without_spark(monkeypatch)
    history = EventfulEngine(tmp_path, f"healthy {seed}")
    for step in range(3):
        history.run(4)
        objects = history.node.objects
        if step == seed % 3:
            checkpoint_by_hand(objects)
        compact_by_hand(objects, keep_from=history.high_water_mark // 2 if seed % 2 else 0)
        if seed % 3:
            drop_wal(objects, BucketMetadataStore(objects), KEYS, 1 << 62)
        report = verify_engine(NO_SPARK, history.root, own_digest=history.node.engine.digest)
        assert report.findings == ()
        assert report.digest == history.node.engine.digest(history.high_water_mark)
        assert report.is_good
    history.close()


@pytest.mark.parametrize(("seed", "codec"), [("healthy 108", None), ("compacted 2", "zstd")])
def test_what_the_job_compacts_is_right(
    tmp_path: Path, seed: str, codec: Literal["zstd"] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compactions on top of each other, another codec, the log dropped behind each, and by the owner before any."""
    work_without_spark(monkeypatch)
    history = EventfulEngine(tmp_path, seed)
    options = CompactEngineOptions(large_bytes=1500, blob_file_bytes=8 << 10, rows_per_file=40, codec=codec)
    for _ in range(3):
        history.run(4)
        with history.root.open(read_only=False) as opened:
            CompactEngineJob(TableFlow(), opened, history.root.place, ManualClock(), options).run()
        drop_wal(history.node.objects, BucketMetadataStore(history.node.objects), KEYS, 1 << 62)
        report = verify_engine(NO_SPARK, history.root)
        assert report.findings == ()
        assert report.digest == history.node.engine.digest(history.high_water_mark)
    history.close()


def test_small_objects_of_the_log_are_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are verified while a state is computed from them, and nobody asks the store for their sizes."""
    work_without_spark(monkeypatch)
    history = EventfulEngine(tmp_path, "fetched once")
    history.run(4)
    compact_by_hand(history.node.objects)
    reads, heads, store = list[str](), list[str](), type(history.root.place.objects)
    read_range, head = store.read_range, store.head

    def counting_range(self: ObjectStore, key: str, start: int, length: int) -> memoryview:
        reads.append(key)
        return read_range(self, key, start, length)

    def counting_head(self: ObjectStore, key: str) -> ObjectInfo:
        heads.append(key)
        return head(self, key)

    monkeypatch.setattr(store, "read_range", counting_range)
    monkeypatch.setattr(store, "head", counting_head)
    monkeypatch.setattr(job, "compute_state", compute_once)
    report = verify_engine(NO_SPARK, history.root)
    assert report.is_good
    log = [key for key in reads if "/objects/" in key]
    assert len(log) == len(set(log)) == report.objects > 1
    assert not [key for key in heads if "/objects/" in key]
    history.close()


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> StoredEngine:
    """An engine with everything that one can have in a store."""
    return StoredEngine.make(tmp_path_factory.mktemp("verify-engine") / "store")


def with_value(rows: list[Row], number: int, value: bytes) -> list[Row]:
    """The same rows, but for one."""
    return [(key, value if at == number else old) for at, (key, old) in enumerate(rows)]


def packed(rows: list[Row]) -> list[int]:
    """The rows of the version index whose values are in blob files."""
    return [at for at, (_, value) in enumerate(rows) if isinstance(decode_version(value)[1], BlobPointer)]


def swapped_versions(rows: list[Row]) -> list[Row]:
    """Two versions tell the place of each other's value."""
    one, other = packed(rows)[:2]
    (cell, place), (other_cell, other_place) = decode_version(rows[one][1]), decode_version(rows[other][1])
    changed = with_value(rows, one, encode_version(cell, other_place))
    return with_value(changed, other, encode_version(other_cell, place))


def swapped_values(rows: list[Row]) -> list[Row]:
    """Two positions have each other's place."""
    one, other = [at for at, (_, value) in enumerate(rows) if isinstance(decode_value_pointer(value), BlobPointer)][:2]
    return with_value(with_value(rows, one, rows[other][1]), other, rows[one][1])


def point_elsewhere(engine: StoredEngine) -> None:
    """Both indexes agree on a place where another value is, and all checksums of all files are right."""
    places: dict[int, bytes] = {}

    def values(rows: list[Row]) -> list[Row]:
        swapped = swapped_values(rows)
        places.update((position_of(key), value) for key, value in swapped)
        return swapped

    def versions(rows: list[Row]) -> list[Row]:
        decoded = [(key, decode_version(value)[0]) for key, value in rows]
        return [
            (
                key,
                encode_version(
                    cell, decode_value_pointer(places[decode_cell(cell).position]) if is_pointer(cell) else None
                ),
            )
            for key, cell in decoded
        ]

    engine.rewrite_index(values=values)
    engine.rewrite_index(versions=versions)


def without_one(rows: list[Row]) -> list[Row]:
    """The newest version of some object is not there."""
    return [row for at, row in enumerate(rows) if at != len(rows) // 2]


def with_another_seq(rows: list[Row]) -> list[Row]:
    """One version is a seq later than it was."""
    at = next(number for number, (key, _) in enumerate(rows) if key.startswith(b"o"))
    key, value = rows[at]
    return sorted([*rows[:at], (key[:-1] + bytes((key[-1] ^ 1,)), value), *rows[at + 1 :]])


def lose_values(engine: StoredEngine) -> None:
    """The log was dropped for a compaction of which the manifest no longer tells."""
    engine.rewrite_manifest(checkpoints=engine.manifest.checkpoints[-1:])
    assert drop_wal(engine.objects, engine.metadata, KEYS, 1 << 62).objects > 0
    engine.rewrite_manifest(compacted=None)


Damage = Callable[[StoredEngine], object]
DAMAGES: dict[str, tuple[Damage, str]] = {
    "log: flipped bit": (lambda one: one.flip(one.log_object(2)), "a checksum that does not match"),
    "log: truncated": (lambda one: one.cut(one.log_object(2)), "bytes, its descriptor says"),
    "log: missing": (lambda one: one.log_object(2).unlink(), "the object is missing (LSN"),
    "log: gap": (lambda one: one.withdraw(2), "a gap: no object has the range before it (LSN"),
    "log: overlap": (lambda one: one.overlap(), "an overlap: the object before it has this range too (LSN"),
    "log: wrong checksum": (lambda one: one.rewrite_descriptor(2, checksum="crc32:00000000"), "its checksum is crc32:"),
    "log: wrong position": (
        lambda one: one.rewrite_descriptor(2, position=7),
        "it begins at position 7, and",
    ),
    "log: nonsense": (
        lambda one: one.metadata.put(KEYS.descriptor(one.descriptors[2].start_offset), b"{}"),
        "cannot be understood",
    ),
    "manifest: not shipped": (
        lambda one: one.rewrite_manifest(shipped_lsn=one.manifest.shipped_lsn + 9),
        "is shipped, and the catalog ends at",
    ),
    "manifest: wrong position": (
        lambda one: one.rewrite_manifest(shipped_position=one.manifest.shipped_position + 1),
        "the objects end at",
    ),
    "manifest: wrong last entry": (
        lambda one: one.rewrite_manifest(high_water_mark=one.manifest.high_water_mark + 1),
        "is complete with LSN",
    ),
    "blob file: flipped bit": (
        lambda one: one.flip(one.path(one.compaction.blob_files[0].key), 100),
        "checksum of the value at position",
    ),
    "blob file: flipped name": (
        lambda one: one.flip(one.path(one.compaction.blob_files[0].key), 1),
        "not a blob file of version",
    ),
    "blob file: truncated": (
        lambda one: one.cut(one.path(one.compaction.blob_files[0].key)),
        "bytes that the root says",
    ),
    "blob file: missing": (
        lambda one: one.path(one.compaction.blob_files[0].key).unlink(),
        "blobs/blob-0000000001",
    ),
    "data: flipped bit": (lambda one: one.flip(one.data_file()), "the checksum of the object's value does not match"),
    "data: truncated": (lambda one: one.cut(one.data_file()), "has not the"),
    "data: missing": (lambda one: one.data_file().unlink(), "the data file of bucket-"),
    "index: flipped bit": (lambda one: one.flip(one.path(one.compaction.versions[0].key), 60), "versions-0000000001"),
    "index: flipped head": (lambda one: one.flip(one.path(one.compaction.values[0].key), 2), "the digest in the name"),
    "index: missing": (lambda one: one.path(one.compaction.values[0].key).unlink(), "index/values-0000000001"),
    "index: a version's wrong place": (lambda one: one.rewrite_index(versions=swapped_versions), "tell two places"),
    "index: a wrong place in both": (point_elsewhere, "where it is not"),
    "index: no version": (lambda one: one.rewrite_index(versions=without_one), "1 rows missing; the first: bucket-"),
    "index: no value": (lambda one: one.rewrite_index(values=without_one), "is not in the value index"),
    "root: flipped bit": (lambda one: one.flip(one.path(one.manifest.compacted.key)), "the digest in the name"),  # type: ignore[union-attr]
    "root: forgotten": (lose_values, "values are neither in the log nor in compacted data; the first: bucket-"),
    "state: flipped bit": (lambda one: one.flip(one.path(one.manifest.checkpoints[0].key), 60), "checkpoint-"),
    "state: truncated": (lambda one: one.cut(one.path(one.manifest.checkpoints[0].key)), "and the manifest says"),
    "state: missing": (lambda one: one.path(one.manifest.checkpoints[0].key).unlink(), "checkpoint-"),
    "state: of another state": (
        lambda one: one.add_state(with_another_seq),
        "it is not the state that the log",
    ),
    "state: a row is missing": (lambda one: one.add_state(without_one), "1 rows missing; the first: bucket-"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_found(healthy: StoredEngine, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of damage is told by name, and it is the only thing that is."""
    work_without_spark(monkeypatch)
    engine = healthy.copied(tmp_path / "store")
    damage, expected = DAMAGES[kind]
    damage(engine)
    report = verify_engine(NO_SPARK, engine.root)
    told = [str(problem) for problem in report.findings]
    assert any(expected in problem for problem in told), told
    assert not report.is_good
    assert len(told) <= 3, told


def test_blob_file_with_other_figures_than_its_root_is_not_sound(healthy: StoredEngine) -> None:
    """Everything agrees but for what the root says of how many values of a file are alive; an overlap is no index."""
    root = healthy.compaction
    first, *others = root.blob_files
    wrong = msgspec.structs.replace(first, live_values=first.live_values - 1)
    place = healthy.root.place
    assert sound_compaction(TableFlow(), place, root) is not None
    assert sound_compaction(TableFlow(), place, msgspec.structs.replace(root, blob_files=(wrong, *others))) is None
    assert (
        sound_compaction(TableFlow(), place, msgspec.structs.replace(root, values=(*root.values, *root.values))) is None
    )


def test_the_healthy_one_is_healthy(healthy: StoredEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is wrong with what is damaged in the other tests, and everything was read."""
    work_without_spark(monkeypatch)
    report = verify_engine(NO_SPARK, healthy.root)
    assert report.findings == ()
    assert report.compaction is not None
    assert report.compaction.values == sum(part.rows for part in healthy.compaction.values)
    assert [one.compared_with is not None for one in report.states] == [True] * len(report.states)
    *states, newest = report.reconciliations
    assert all(proof.came_out is not None for proof in states)
    assert (newest.subject, newest.went_in.checksum) == (f"engine main at seq {report.seq}", f"digest:{report.digest}")


def test_an_engine_without_entries_is_healthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a digest, and nothing is wrong with it."""
    work_without_spark(monkeypatch)
    with tidelog.open_engine(tmp_path / "engine", store=(tmp_path / "store").as_uri()) as engine:
        engine.ship()
        digest = engine.digest()
    report = verify_engine(NO_SPARK, find_engine((tmp_path / "store").as_uri()), digest=digest)
    assert (report.is_good, report.seq) == (True, 0)


def test_digests_are_compared(healthy: StoredEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was given, and the one that a node tells; a node that cannot be asked is a note."""
    work_without_spark(monkeypatch)
    right = verify_engine(NO_SPARK, healthy.root)
    assert right.digest is not None
    assert verify_engine(NO_SPARK, healthy.root, digest=right.digest, own_digest=lambda _: right.digest).is_good
    wrong = verify_engine(NO_SPARK, healthy.root, digest="00", own_digest=lambda _: "11")
    assert [right.digest in str(problem) for problem in wrong.findings] == [True, True]
    silent = verify_engine(NO_SPARK, healthy.root, own_digest=lambda _: None)
    assert silent.is_good
    assert any("could not be asked" in note for note in silent.notes)


def test_what_changes_meanwhile_is_no_problem(
    healthy: StoredEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log is dropped while it is read: it is looked at again, and is right."""
    work_without_spark(monkeypatch)
    engine = healthy.copied(tmp_path / "store")
    dropped: list[int] = []

    def drop_first(spark: object, function: Callable[[Any], Any], items: Sequence[Any], **_: int) -> Iterator[Any]:
        if items and not dropped:
            dropped.append(drop_wal(engine.objects, engine.metadata, KEYS, 1 << 62).objects)
        return work_here(spark, function, items)

    monkeypatch.setattr(job, "run_on_workers", drop_first)
    monkeypatch.setattr(job, "compute_state", compute_once)  # two readings would see two logs
    engine.rewrite_manifest(checkpoints=engine.manifest.checkpoints[-1:])
    report = verify_engine(NO_SPARK, engine.root)
    assert dropped != [0]
    assert report.findings == ()


def test_spark_does_the_same(healthy: StoredEngine, tmp_path: Path, spark: SparkSession) -> None:
    """With real tasks and shuffles all of several damages are told at once, of an engine whose log was dropped."""
    engine = healthy.copied(tmp_path / "store")
    lose_values(engine)
    engine.rewrite_manifest(compacted=healthy.manifest.compacted)
    for kind in (kinds := ("blob file: missing", "data: flipped bit", "state: a row is missing")):
        DAMAGES[kind][0](engine)
    told = [str(problem) for problem in verify_engine(spark, engine.root).findings]
    for kind in kinds:
        assert any(DAMAGES[kind][1] in problem for problem in told), told
    assert len(told) == len(kinds)


def test_files_of_large_values_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has what its name says; a changed byte is found, and told with its file."""
    work_without_spark(monkeypatch)
    (tmp_path / "store").mkdir()
    objects = open_store((tmp_path / "store").as_uri(), StoreSettings())
    with EngineNode(objects, name="large", large_value_bytes=1024).open() as node:
        puts = [(seq, PutObject("b", f"k{seq}", bytes([seq]) * 3000)) for seq in range(2, 5)]
        node.apply_these([(1, CreateBucket("b")), *puts])
        node.ship_all()
        node.engine.create_checkpoint()
    root = find_engine((tmp_path / "store").as_uri())
    report = verify_engine(NO_SPARK, root)
    assert (report.value_files, report.findings) == (3, ())
    key = sorted(info.key for info in objects.list(KEYS.values_prefix))[1]
    data = bytearray(objects.read_range(key, 0, 1 << 20))
    data[2000] ^= 1
    objects.put(key, bytes(data))
    (finding,) = verify_engine(NO_SPARK, root).findings
    assert key in str(finding)
