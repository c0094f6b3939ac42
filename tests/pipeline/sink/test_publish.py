"""Large staged parts become objects of a topic in a store as they are, and are read as any others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tidelog
from tidelog.clock import SystemClock
from tidelog.cold.catalog import Catalog, Descriptor
from tidelog.cold.merging import Merging
from tidelog.cold.rebuild import rebuild_catalog
from tidelog.errors import CorruptionError, OtherLogError, StoreUnavailableError, TidelogError
from tidelog.files import LocalFiles
from tidelog.log.binding import BINDING_BYTES, Binding, decode_binding, write_log_id
from tidelog.log.frame import scan
from tidelog.pipeline.address import Root, find_root
from tidelog.pipeline.location import ReadPart
from tidelog.pipeline.sink.sink import SinkCommit, SinkOptions, Staged, parts_by_log, staging_location
from tidelog.pipeline.sink.task import StagedParts, stage_rows
from tidelog.pipeline.source.partition_reader import read_batches
from tidelog.staging import publish
from tidelog.store.shared_directory import DirectoryStore, _DirectoryWriter
from tidelog.topics.columns import frames_digest
from tidelog.topics.message import TIMESTAMP_FIELD

TOPIC = "shop/orders"
APP = "nightly"
ROWS = 40


@pytest.fixture(autouse=True)
def small_parts_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is large elsewhere is small here."""
    monkeypatch.setattr(publish, "_LEAST_BYTES", 100)
    monkeypatch.setattr(publish, "_LEAST_MEAN_PART_BYTES", 10)


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return new_root(tmp_path / "store")


def new_root(directory: Path, **settings: Any) -> Root:
    directory.mkdir()
    return find_root(directory.as_uri(), **settings)


def value(version: int, number: int) -> bytes:
    return b"v%d row %03d" % (version, number)


def stage(root: Root, version: int, tasks: int = 2) -> StagedParts:
    """The rows of a write, by so many tasks."""
    target = staging_location(SinkOptions(root=root, topic=TOPIC))
    staged: list[Any] = []
    for task in range(tasks):
        numbers = range(task * ROWS // tasks, (task + 1) * ROWS // tasks)
        batch = pa.record_batch({"value": [value(version, number) for number in numbers]})
        staged.append(Staged(APP, task, stage_rows(iter([batch]), target, APP, version, task)))
    return parts_by_log(staged)


def write(root: Root, version: int, tasks: int = 2) -> StagedParts:
    parts = stage(root, version, tasks)
    SinkCommit(root, APP, version).commit(parts, 60)
    return parts


def values(root: Root, start: int = 0) -> list[tuple[int, bytes | None]]:
    with root.open() as log:
        return [(one.offset, one.value) for one in log.topic(TOPIC).read(start)]


def expected(*versions: int) -> list[tuple[int, bytes | None]]:
    return list(enumerate(value(version, number) for version in versions for number in range(ROWS)))


def catalog_of(root: Root) -> Catalog:
    assert root.place is not None
    return root.place.catalog(TOPIC)


def objects_of(root: Root) -> list[tuple[Descriptor, bytes]]:
    """What the catalog has, with the bytes of each object."""
    assert root.place is not None
    catalog = catalog_of(root)
    return [
        (one, bytes(root.place.objects.read_range(catalog.keys.object(one.name), 0, one.size)))
        for one in catalog.walk(0)
    ]


def findings(root: Root) -> list[object]:
    with root.open() as log:
        return list(log.topic(TOPIC).verify().findings)


def test_staged_parts_are_the_objects(root: Root) -> None:
    """Every part becomes one object, byte by byte, and nothing of it is staged any more."""
    for version in (0, 1):
        parts = write(root, version)[TOPIC]
        objects = objects_of(root)[-2:]
        assert [one.checksum for one, _ in objects] == [part.checksum for part in parts]
        owner = catalog_of(root).owner()
        assert owner is not None
        for _, data in objects:
            assert decode_binding(data) == Binding(owner[0].log_id, 0, is_staged=True)
            assert scan(data, BINDING_BYTES, 0).frames.count == ROWS // 2
    assert root.place is not None
    assert not list(root.place.objects.list(catalog_of(root).keys.staging_prefix))


def test_published_rows_are_read_at_their_offsets(root: Root) -> None:
    """By a topic, by Spark's tasks and as frames whose headers say the same; from any offset on."""
    write(root, 0)
    write(root, 1)
    for start in (0, 1, ROWS // 2, ROWS + 3, 2 * ROWS - 1):
        assert values(root, start) == expected(0, 1)[start:]
        part = ReadPart(topic=TOPIC, start=start, stop=2 * ROWS, cold_stop=2 * ROWS)
        batches = list(read_batches(part, root.place, skips_gaps=False))
        assert batches[0].first_offset == start
        assert sum(len(batch.payloads()) for batch in batches) == 2 * ROWS - start
    with root.open() as log:
        tier = log._tier
        assert tier is not None
        for frames in tier.history(tier.catalog("shop", "orders"), 1 << 20).frames(0, 2 * ROWS):
            again = scan(frames.buffer, frames.start_of(0), frames.first_offset).frames
            assert again.count >= frames.count


def test_verify_and_rebuild_understand_staged_objects(root: Root) -> None:
    """Nothing is found wrong, and a catalog that is rebuilt from the objects has the same log and the same rows."""
    write(root, 0)
    write(root, 1)
    assert not findings(root)
    assert root.place is not None
    before = [one for one, _ in objects_of(root)]
    with root.place.open_stores() as (objects, metadata):
        keys = root.place.keys(TOPIC)
        for entry in list(metadata.range(keys.metadata_prefix)):
            metadata.delete(entry.key)
        rebuild_catalog(metadata, keys, objects, clock=SystemClock(), time_field=TIMESTAMP_FIELD)
    after = [one for one, _ in objects_of(root)]
    said = ("object_id", "log_id", "checksum", "raw_size", "first_time_us", "last_time_us", "size", "codec")
    assert [[getattr(one, field) for field in said] for one in after] == [
        [getattr(one, field) for field in said] for one in before
    ]
    assert values(root) == expected(0, 1)


def test_merged_staged_objects_have_offsets(root: Root) -> None:
    """An object that is made of staged ones has the numbers of its offsets in its frames."""
    write(root, 0)
    write(root, 1)
    assert root.place is not None
    with root.place.open_stores() as (objects, metadata):
        Merging(
            Catalog(metadata, root.place.keys(TOPIC)),
            objects,
            SystemClock(),
            digest=frames_digest,
            time_field=TIMESTAMP_FIELD,
        ).run()
    descriptor, data = objects_of(root)[0]
    assert descriptor.name.generation
    assert not decode_binding(data).is_staged
    assert scan(data, BINDING_BYTES, 0).frames.count == descriptor.count > ROWS
    assert values(root) == expected(0, 1)
    assert not findings(root)


def test_damage_in_a_staged_object_costs_the_damaged_row(root: Root) -> None:
    """Readers name the object, and those who skip gaps get every other row at its offset."""
    write(root, 0)
    write(root, 1)
    assert root.place is not None
    descriptor, data = objects_of(root)[2]
    damaged = bytearray(data)
    damaged[scan(data, BINDING_BYTES, 0).frames.start_of(5) + 30] ^= 1
    root.place.objects.put(catalog_of(root).keys.object(descriptor.name), bytes(damaged))
    with pytest.raises(CorruptionError):
        values(root)
    with root.open() as log:
        found = [(one.offset, one.value) for one in log.topic(TOPIC).read(0, on_gap="skip")]
    assert found == [one for one in expected(0, 1) if one[0] != descriptor.start_offset + 5]


def test_rows_of_another_log_are_refused(root: Root, tmp_path: Path) -> None:
    """A staged object belongs to the log that its header names, as any other."""
    write(root, 0)
    other = new_root(tmp_path / "other")
    write(other, 0)
    assert root.place is not None
    (descriptor, _), _ = objects_of(root)
    root.place.objects.put(catalog_of(root).keys.object(descriptor.name), objects_of(other)[0][1])
    with pytest.raises(OtherLogError):
        values(root)


def test_parts_for_another_log_are_ingested(root: Root) -> None:
    """Who staged rows for a topic before another process created it: they are written again, with the topic's id."""
    late = stage(root, 1)
    write(root, 0)
    SinkCommit(root, APP, 1).commit(late, 60)
    assert values(root) == expected(0, 1)
    assert [decode_binding(data).is_staged for _, data in objects_of(root)] == [True, True, False]


def test_small_parts_are_ingested_together(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tasks with few rows make one object."""
    monkeypatch.setattr(publish, "_LEAST_MEAN_PART_BYTES", 1000)
    write(root, 0, tasks=8)
    assert [one.count for one, _ in objects_of(root)] == [ROWS]
    assert values(root) == expected(0)


def test_a_task_makes_parts_of_the_size_of_objects(tmp_path: Path) -> None:
    """Rows of one task that are more than an object may have make several, in their order."""
    root = new_root(tmp_path / "store", max_object_bytes=400)
    target = staging_location(SinkOptions(root=root, topic=TOPIC))
    batches = [pa.record_batch({"value": [value(0, 10 * batch + row) for row in range(10)]}) for batch in range(4)]
    parts = stage_rows(iter(batches), target, APP, 0, 0)
    assert [part.rows for part in parts[TOPIC]] == [10, 10, 10, 10]
    SinkCommit(root, APP, 0).commit(parts, 60)
    assert values(root) == expected(0)


def test_staged_rows_are_no_file_of_a_log(root: Root, tmp_path: Path) -> None:
    """Frames numbered from 0 are not taken for the messages of a WAL file, whatever its name is."""
    write(root, 0)
    with tidelog.open(tmp_path / "log") as log:
        log.topic(TOPIC).append(b"one", sync=True)
    (file,) = (tmp_path / "log").rglob("wal.*.log")
    (descriptor, data), _ = objects_of(root)
    write_log_id(LocalFiles(), file.parent, descriptor.log_id)
    file.write_bytes(data)
    with tidelog.open(tmp_path / "log") as log, pytest.raises(CorruptionError, match="staged rows"):
        log.topic(TOPIC)


def test_damaged_part_is_refused(root: Root) -> None:
    """Rows that are not what was committed come into no topic."""
    parts = stage(root, 0)
    assert root.place is not None
    key = parts[TOPIC][1].key
    data = bytearray(root.place.objects.get(key).data)
    data[-1] ^= 1
    root.place.objects.put(key, bytes(data))
    with pytest.raises(TidelogError, match="refused"):
        SinkCommit(root, APP, 0).commit(parts, 60)
    assert not objects_of(root)


class FailingStore:
    """Fails the change with this number, before it takes effect or after."""

    def __init__(self, number: int, *, is_done: bool) -> None:
        self.calls = itertools.count(1)
        self.has_failed = False
        self._number = number
        self._is_done = is_done

    def around(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            fails = next(self.calls) == self._number
            self.has_failed |= fails
            if not fails:
                return change(*arguments)
            if self._is_done:
                change(*arguments)
            raise StoreUnavailableError("no answer")

        return call


@contextmanager
def failing(number: int, *, is_done: bool) -> Iterator[FailingStore]:
    store = FailingStore(number, is_done=is_done)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_DirectoryWriter, "_publish", store.around(_DirectoryWriter._publish))
        for name in ("copy", "delete"):
            patch.setattr(DirectoryStore, name, store.around(getattr(DirectoryStore, name)))
        yield store


@pytest.mark.parametrize("is_done", [False, True], ids=["lost", "unanswered"])
def test_failure_at_any_step_publishes_rows_once(tmp_path: Path, is_done: bool) -> None:
    """Whichever change of the store fails once, with or without effect: a write that is made again is there once."""
    for number in itertools.count(1):
        root = new_root(tmp_path / str(number))
        write(root, 0)
        parts = stage(root, 1)
        with failing(number, is_done=is_done) as store:
            try:
                SinkCommit(root, APP, 1).commit(parts, 60)
            except TidelogError:
                SinkCommit(root, APP, 1).commit(parts, 60)
        assert values(root) == expected(0, 1), number
        assert not findings(root), number
        if not store.has_failed:
            break
    assert number > 8
