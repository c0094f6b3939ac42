"""A compaction of an engine that is killed at every call, fails, or is not the only one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
from tests.engine.compacting import compact_by_hand
from tests.engine.stations import KEYS, EngineNode, new_store, successor
from tests.pipeline.engines.jobs_here import compact, compaction_job, new_files, root_of, write_state

from tidelog.engine.cold.gc import drop_wal
from tidelog.engine.mvcc.cells import is_pointer
from tidelog.engine.sst.sstable import SSTable
from tidelog.errors import ConflictError
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.testing import Crash, Faults, FaultyStore


def compacted_twice(name: str) -> EngineNode:
    """An engine with a compaction, and entries behind it."""
    node = EngineNode(new_store(), name=name).open()
    node.apply(80)
    node.ship_all()
    compact(node.objects)
    node.apply(40)
    node.ship_all()
    return node


def killed(store: FaultyStore, call: int) -> FaultyStore | None:
    """The store as a job leaves it that dies at a call; None when it was done before."""
    dying = store.after_crash(faults=Faults(crash_at=call))
    try:
        compact(dying)
    except Crash:
        return dying
    return None


@pytest.mark.parametrize("torn_bytes", [0, 1])
def test_killed_anywhere_and_run_again(torn_bytes: int) -> None:
    """Cut off at any call of the store, done or not: the next run ends with the same bytes under the same names."""
    with compacted_twice("killed") as node:
        store = node.objects
        assert isinstance(store, FaultyStore)
        whole = store.after_crash(faults=Faults())
        compact(whole)
        wanted, call = new_files(whole, store), 1
        while (left := killed(store, call)) is not None:
            again = left.after_crash(faults=Faults(), torn_bytes=torn_bytes)
            report = compact(again)
            assert report.generation == 2
            assert new_files(again, store) == wanted, f"killed at call {call}"
            call += 1
        assert call > 10


def test_a_state_killed_anywhere() -> None:
    """The same of a job that writes a state."""
    with EngineNode(new_store(), name="state").open() as node:
        node.apply(60)
        node.ship_all()
        store = node.objects
        assert isinstance(store, FaultyStore)
        whole = store.after_crash(faults=Faults())
        write_state(whole)
        wanted = new_files(whole, store)
        for call in range(1, 100):
            dying = store.after_crash(faults=Faults(crash_at=call))
            try:
                write_state(dying)
                break
            except Crash:
                again = dying.after_crash(faults=Faults(), torn_bytes=call % 2)
                write_state(again)
                assert new_files(again, store) == wanted
        assert call > 4


@pytest.mark.parametrize("blob_file_bytes", [8 << 10, 3 << 10])
def test_two_at_once(blob_file_bytes: int) -> None:
    """One wins; the other is told so, whenever that happens, be it another compaction or the very same."""
    with compacted_twice("two") as node:
        store = node.objects
        assert isinstance(store, FaultyStore)
        for request in range(2, 1000, 13):
            objects = store.after_crash(faults=Faults())
            if not is_interrupted(objects, request, blob_file_bytes):
                break
        assert request > 50


def is_interrupted(objects: FaultyStore, at_request: int, blob_file_bytes: int) -> bool:
    """Runs a compaction, and a whole other one in the middle of it; whether there was a middle."""
    requests, published = 0, dict[str, bytes]()

    def on_request(operation: str, key: str) -> None:
        nonlocal requests, published
        requests += 1
        if requests == at_request:
            objects.on_request = None
            if compact(
                objects, blob_file_bytes=blob_file_bytes
            ).is_new:  # otherwise the first one is behind its publishing
                published = files_in(objects)

    objects.on_request = on_request
    try:
        report = compact(objects)
    except ConflictError:
        assert published
    else:
        assert report.is_new != bool(published)
        assert not published or report.notes
    assert files_in(objects).items() >= published.items()
    return bool(published)


def files_in(objects: FaultyStore) -> dict[str, bytes]:
    """All that an engine has in a store, without its metadata."""
    return {key: data for key, data in objects.contents().items() if key.startswith("storage/engine/")}


def test_a_collected_base_is_told_as_a_conflict() -> None:
    """The files of the compaction that a slow job was built on may be gone: it is told who was faster."""
    with compacted_twice("collected") as node:
        store, old = node.objects, root_of(node)
        assert isinstance(store, FaultyStore)
        job = compaction_job(store)

        def on_request(operation: str, key: str) -> None:
            if operation == "read_range" and key == old.values[0].key:
                store.on_request = None
                compact(store)
                store.delete([part.key for part in (*old.versions, *old.values)])

        store.on_request = on_request
        with pytest.raises(ConflictError, match="another compaction"):
            job.run()
        assert root_of(node).generation == 2


def test_an_owner_at_work_is_not_in_the_way() -> None:
    """Entries that are shipped while a compaction is at work are for the next one; both manifests' changes stay."""
    with compacted_twice("owner") as node:
        store = node.objects
        assert isinstance(store, FaultyStore)

        def on_request(operation: str, key: str) -> None:
            if operation == "publish" and "/index/" in key:
                store.on_request = None
                node.apply(10)
                node.ship_all()
                node.engine.create_checkpoint()

        store.on_request = on_request
        report = compact(store)
        manifest = node.view.manifest
        assert manifest.high_water_mark > report.seq == root_of(node).seq
        assert manifest.checkpoints[-1].seq == manifest.high_water_mark
        assert compact(store).seq == manifest.high_water_mark
        other = successor(node)
        node.crash()
        other.restore()
        with other.open():
            other.assert_same()


@pytest.mark.parametrize("keeps_all", [False, True])
def test_log_behind_a_compaction_that_its_owner_has_dropped(keeps_all: bool) -> None:
    """No value is in it, and there are newer states: compactions go on from one of those, without what was let go."""
    with EngineNode(new_store(), name="dropped", local_retention_bytes=0, rotate_max_bytes=4 << 10).open() as node:
        node.apply(80)
        node.ship_all()
        compact(node.objects, **({} if keeps_all else {"keep_from": node.engine.applied_seq}))
        compacted = node.view.manifest.compacted
        for _ in range(3):
            node.apply(30)
            node.ship_all()
            node.engine.create_checkpoint()
        node.engine.collect_garbage(horizon=node.engine.applied_seq)
        assert compacted is not None
        assert node.view.descriptors()[0].start_offset > compacted.lsn
        assert compact(node.objects).generation == 2
        other = successor(node)
        node.crash()
        other.restore()
        with other.open():
            other.assert_same()


@pytest.mark.parametrize("job", [compact, write_state])
def test_log_that_goes_while_a_job_reads_it(job: Callable[[FaultyStore], object]) -> None:
    """In front of any request another compaction is published and the log dropped: that is told, or nobody minds."""
    outcomes = set()
    for request in range(1, 200, 3):
        with EngineNode(new_store(), name="goes", rotate_max_bytes=4 << 10).open() as node:
            node.apply(40)
            node.ship_all()
            store, requests = node.objects, itertools.count(1)
            assert isinstance(store, FaultyStore)

            def drop_log(*_: str, at: int = request, counted: Iterator[int] = requests) -> None:
                if next(counted) == at:
                    compact_by_hand(store)  # noqa: B023  # called before the next one is made
                    drop_wal(store, BucketMetadataStore(store), KEYS, 1 << 62)  # noqa: B023

            watched = FaultyStore(on_request=drop_log)
            watched._server = store._server
            try:
                job(watched)
                outcomes.add("done")
            except ConflictError:
                outcomes.add("told")
            node.assert_same()
            if next(requests) <= request:
                break
    assert outcomes == {"done", "told"}


def test_versions_that_a_node_keeps_by_their_number_outlive_dropped_log() -> None:
    """Below the start of history nothing goes whose value is still there: its node may have settings to keep it."""
    with EngineNode(
        new_store(), name="numbered", local_retention_bytes=0, rotate_max_bytes=4 << 10, keep_versions=3
    ).open() as node:
        node.apply(80)
        node.ship_all()
        compact(node.objects)
        compacted = node.view.manifest.compacted
        for _ in range(3):
            node.apply(60)
            node.ship_all()
            node.engine.create_checkpoint()
        node.engine.collect_garbage(horizon=node.engine.applied_seq)
        assert compacted is not None
        compact(node.objects)
        kept = {key for key, cell in node.core.tree.scan() if is_pointer(cell)}
        files = [SSTable(node.objects, part, kind="versions") for part in root_of(node).versions]
        assert node.view.descriptors()[0].start_offset > compacted.lsn
        assert kept <= {key for file in files for key, _ in file.rows()}
