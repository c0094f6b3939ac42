"""`tidelog pipeline gc --engine`: what nobody needs goes, and nothing that is referenced ever does."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.campaign import examples, first_seed
from tests.engine.compacting import build_by_hand, checkpoint_by_hand, compact_by_hand, publish_by_hand
from tests.engine.engines import assert_state
from tests.engine.mvcc.test_relocation import Overwrites
from tests.engine.stations import KEYS, EngineNode, new_store, successor, usurp
from tests.pipeline.engines.engine_places import work_here
from tests.pipeline.engines.in_memory import place_of
from tests.pipeline.engines.jobs_here import compact, root_of

from tidelog.clock import ManualClock
from tidelog.cold.catalog import Catalog
from tidelog.cold.gc import Candidate, Reason
from tidelog.engine.cold.gc import ComparedDataFiles, references_of
from tidelog.engine.cold.manifest import Pinning, read_manifest
from tidelog.engine.sst.sorted_index import Compaction
from tidelog.engine.sst.sstable import RowPart, SSTable
from tidelog.errors import ConflictError, DataError, InputError, NotFoundError
from tidelog.pipeline.address import OpenedEngine
from tidelog.pipeline.jobs import gc as gc_job
from tidelog.pipeline.jobs.gc import (
    EngineGcReport,
    GcPlan,
    apply_engine_gc,
    name_ranges,
    plan_engine_gc,
    read_plan,
    write_plan,
)
from tidelog.pipeline.jobs.gc_tasks import list_names, read_names
from tidelog.pipeline.location import EngineLocation
from tidelog.pipeline.tasks import tuples_in
from tidelog.store.keys import ObjectId
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.testing import FaultyStore

NO_SPARK = None
PLACE = "storage/engine/main/"


class MemoryRoot:
    """An engine's root in a store of this process; each request may be watched."""

    name = "main"
    store_url = "memory://here"

    def __init__(self, objects: FaultyStore, on_request: Callable[[str, str], None] | None = None) -> None:
        self._objects = FaultyStore(on_request=on_request)
        self._objects._server = objects._server
        self.place = place_of(self._objects)

    @contextmanager
    def open(self, *, read_only: bool = True) -> Iterator[OpenedEngine]:
        metadata = BucketMetadataStore(self._objects, read_only=read_only)
        found = read_manifest(metadata, KEYS)
        assert found is not None
        yield OpenedEngine(self._objects, metadata, Catalog(metadata, KEYS), KEYS, found[0])


def compare_here(spark: object, place: EngineLocation, root: Compaction | None) -> ComparedDataFiles:
    """As `compare_data_files`, with what its tasks do done in this process."""
    ranges, parts = name_ranges(KEYS, () if root is None else root.versions), () if root is None else root.values
    listed = dict(tuples_in(itertools.chain.from_iterable(list_names(place, one) for one in ranges), "key", "size"))
    named = dict(tuples_in(itertools.chain.from_iterable(read_names(place, one) for one in parts), "key", "size"))
    there = {key: size for key, size in named.items() if listed.get(key) == size}
    return ComparedDataFiles(
        unnamed={key: size for key, size in sorted(listed.items()) if key not in named},
        missing=[(key, size, listed.get(key)) for key, size in sorted(named.items()) if key not in there],
        named=len(named),
        named_bytes=sum(named.values()),
        named_sum=hash(tuple(sorted(named))) % (1 << 64),
        there=len(there),
        there_sum=hash(tuple(sorted(there))) % (1 << 64),
    )


@pytest.fixture(autouse=True)
def workers_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's part is done in this process."""
    work_here(monkeypatch, "gc")
    monkeypatch.setattr(gc_job, "compare_data_files", compare_here)


def plan(
    node: EngineNode, on_request: Callable[[str, str], None] | None = None, **options: float
) -> tuple[GcPlan, EngineGcReport]:
    """A plan for what a node has in its store, without any time of grace."""
    assert isinstance(node.objects, FaultyStore)
    root = MemoryRoot(node.objects, on_request)
    return plan_engine_gc(NO_SPARK, root, **{"grace_seconds": 0, **options}, clock=node.clock)  # type: ignore[arg-type]


def carry_out(node: EngineNode, made: GcPlan, on_request: Callable[[str, str], None] | None = None) -> EngineGcReport:
    """Carries out a plan."""
    assert isinstance(node.objects, FaultyStore)
    return apply_engine_gc(NO_SPARK, MemoryRoot(node.objects, on_request), made, clock=node.clock)  # type: ignore[arg-type]


def carry_out_of(node: EngineNode, made: GcPlan) -> set[str]:
    """What is gone when a plan was carried out."""
    before = keys_of(node)
    carry_out(node, made)
    return before - keys_of(node)


def collect(node: EngineNode) -> EngineGcReport:
    """Plan and apply."""
    return carry_out(node, plan(node)[0])


def keys_of(node: EngineNode) -> set[str]:
    """All objects of the engine."""
    return {info.key for info in node.objects.list(PLACE)}


def assert_whole(node: EngineNode, every: int = 5) -> None:
    """The engine of the node, and one that is restored from its store, have every state with all of its values."""
    start = node.view.manifest.history_start_seq
    seqs = [seq for seq in sorted(node.model.states) if seq >= start]
    node.assert_same(seqs[::every])
    assert_restored(node, seqs[::every])


def assert_restored(node: EngineNode, seqs: list[int] | None = None) -> None:
    """An engine that is restored from a copy of the store is that of the node."""
    assert isinstance(node.objects, FaultyStore)
    other = EngineNode(node.objects.after_crash(), name="reader", clock=node.clock)
    other.model = node.model
    other.restore()
    with other.open():
        other.assert_same(seqs)


def grown(rounds: int = 2, seed: str = "a", clock: ManualClock | None = None) -> EngineNode:
    """An engine with a past of which each round was compacted."""
    node = EngineNode(new_store(clock), name=seed, clock=clock, local_retention_bytes=0).open()
    for _ in range(rounds):
        node.apply(80)
        node.ship_all()
        compact_by_hand(node.objects, clock=node.clock)
    node.apply(30)
    node.ship_all()
    return node


def test_what_compactions_have_left_behind_goes_and_the_engine_is_whole() -> None:
    """The raw log, and files of the compaction before; the second collection finds nothing any more."""
    node = grown()
    before = keys_of(node)
    made, shown = plan(node)
    assert keys_of(node) == before
    assert shown.is_good
    assert {"compacted log", "index file", "root"} <= {one.kind for one in made.removable}
    done = carry_out(node, made)
    assert done.is_good
    assert before - keys_of(node) == {one.key for one in made.removable}
    assert (done.removed_objects, done.removed_bytes) == (len(made.removable), shown.removable_bytes)
    assert done.log_start_lsn > 1
    assert_whole(node)
    again = carry_out(node, made)
    assert (again.found, again.removable_objects, again.removed_objects, again.is_good) == ((), 0, 0, True)
    assert collect(node).removed_objects == 0
    node.apply(40)
    node.ship_all()
    compact_by_hand(node.objects, clock=node.clock)
    assert collect(node).removed_objects > 0
    assert_whole(node)


def test_gc_of_an_engine_says_why_there_is_nothing_to_remove() -> None:
    """All of it is in use, or what was found has to stay for now."""
    node = grown()
    carry_out_of(node, plan(node)[0])
    in_use = "everything of the engine in the store is in use: a catalog, a compaction or a snapshot names it"
    assert plan(node)[1].notes == (in_use,)


def test_what_was_just_superseded_waits_for_its_time() -> None:
    """Whoever reads the files of the compaction before has an hour for it, unless told otherwise."""
    node = grown()
    for _ in range(2):
        node.apply(10)
        node.ship_all()
        checkpoint_by_hand(node.objects, clock=node.clock)
    made, shown = plan(node, grace_seconds=3600)
    assert {one.kind for one in made.removable} == {"compacted log", "snapshot"}
    assert {one.key for one in made.removable} == carry_out_of(node, made)
    assert any("have not waited long enough" in note for note in shown.notes)
    node.clock.advance(3601)
    assert_whole(node)
    assert {"index file", "root"} <= {one.kind for one in plan(node, grace_seconds=3600)[0].removable}


def test_a_compaction_that_is_being_built_is_left_alone() -> None:
    """Its files are named as somebody's at work; once another one was published instead, they go."""
    node = grown(1)
    built = build_by_hand(node.objects, clock=node.clock, large_bytes=800)
    before = keys_of(node)
    collect(node)
    made_by_it = {key for key in before if f"-{built.root.generation:010d}-" in key}
    assert made_by_it
    assert made_by_it <= keys_of(node)
    node.apply(20)
    node.ship_all()
    compact_by_hand(node.objects, clock=node.clock, large_bytes=700)
    collect(node)
    assert not made_by_it & keys_of(node) - set(compaction_keys(node))
    with pytest.raises(ConflictError, match="published meanwhile"):
        publish_by_hand(node.objects, built, clock=node.clock)
    assert_whole(node)


def compaction_keys(node: EngineNode) -> list[str]:
    """What the published compaction consists of, data files apart."""
    with MemoryRoot(node.objects).open() as opened:  # type: ignore[arg-type]
        found = references_of(opened.manifest, opened.objects, KEYS)
    return list(found.sizes)


def test_a_state_that_somebody_reads_stays_with_what_it_needs() -> None:
    """A pinned state, its files and the log behind it stay through collections; afterwards they go."""
    node = grown(1)
    first = checkpoint_by_hand(node.objects, clock=node.clock)
    pinning = Pinning(BucketMetadataStore(node.objects), KEYS, node.clock, "restore", 3600)
    assert pinning.pin(first.key)
    for _ in range(4):
        node.apply(20)
        node.ship_all()
        checkpoint_by_hand(node.objects, clock=node.clock)
    compact_by_hand(node.objects, clock=node.clock)
    done = collect(node)
    assert first.key in keys_of(node)
    assert done.log_start_lsn <= first.lsn
    assert len(node.view.manifest.checkpoints) == 3
    assert_whole(node)
    pinning.release()
    assert collect(node).log_start_lsn > first.lsn
    assert first.key not in keys_of(node)
    assert node.view.manifest.leaving == ()
    assert not [key for key in keys_of(node) if f"/part-{first.seq}-" in key]
    assert_whole(node)


@pytest.mark.parametrize("kind", ["blobs/", "index/versions", "index/values", "data/", "checkpoints/"])
def test_nothing_of_the_log_goes_while_something_is_lost(kind: str) -> None:
    """A file that is referenced and gone is a problem, and the log, which may have the only copy, stays."""
    node = grown(2)
    checkpoint_by_hand(node.objects, clock=node.clock)
    referenced = {*compaction_keys(node), *(key for key in keys_of(node) if "/data/" in key)}
    lost = sorted(key for key in referenced if key.startswith(PLACE + kind))[-1]
    node.objects.delete(lost)
    made, shown = plan(node)
    assert not shown.is_good
    assert any(one.path == lost for one in shown.findings) or kind == "checkpoints/"
    assert not [one for one in made.removable if one.kind == "compacted log"]
    carry_out(node, made)
    assert node.view.descriptors()[0].start_offset == 1


def test_an_unreadable_root_stops_everything_by_rule() -> None:
    """When nobody knows what is referenced, nothing of compacted data goes."""
    node = grown(2)
    compacted = node.view.manifest.compacted
    assert compacted is not None
    assert isinstance(node.objects, FaultyStore)
    node.objects.tamper(compacted.key, b"not a root" * (compacted.size // 10) + b"x" * (compacted.size % 10))
    made, shown = plan(node)
    assert not shown.is_good
    assert not made.removable


class _Killed(BaseException):
    """The process is gone."""


def requests_of(work: Callable[[Callable[[str, str], None]], object]) -> int:
    """How many requests something makes."""
    seen: list[str] = []
    work(lambda operation, key: seen.append(operation))
    return len(seen)


def at_request(number: int, action: Callable[[], object]) -> Callable[[str, str], None]:
    """Does something right before the request with a number."""
    counter = itertools.count(1)

    def watch(operation: str, key: str) -> None:
        if next(counter) == number:
            action()

    return watch


def die() -> None:
    """Kills the process."""
    raise _Killed


def test_it_may_be_killed_at_any_request_and_run_again() -> None:
    """Whatever is left the engine is whole, and the next collection ends where one that was not killed does."""
    node = grown()
    assert isinstance(node.objects, FaultyStore)
    made, _ = plan(node)
    before, kills = node.objects.after_crash(), 0
    carry_out(node, made)
    wanted = keys_of(node)
    for number in range(1, 2000, 7):
        node.objects = before.after_crash()
        try:
            carry_out(node, made, at_request(number, die))
        except _Killed:
            kills += 1
        else:
            break
        if number % 6 == 1:
            assert_restored(node)
        carry_out(node, made)
        collect(node)
        assert keys_of(node) == wanted
    assert kills > 5


def publish(node: EngineNode) -> None:
    """Another compaction is published, of more entries."""
    node.apply(15)
    node.ship_all()
    compact_by_hand(node.objects, clock=node.clock)


def write_state(node: EngineNode) -> None:
    """The owner writes a state, and lets old ones go."""
    node.apply(15)
    node.ship_all()
    node.engine.create_checkpoint()


def collect_beside(node: EngineNode) -> None:
    """The owner collects its garbage itself."""
    node.engine.collect_garbage()


def restore_beside(node: EngineNode) -> None:
    """Somebody restores the engine from its store, and reads all of it."""
    other = successor(node, "b")
    other.restore()


@pytest.mark.parametrize("action", [publish, write_state, collect_beside, restore_beside, collect])
def test_others_may_do_anything_between_any_two_requests(action: Callable[[EngineNode], object]) -> None:
    """Compactions, owners, restores and other collections beside it: the engine is whole whatever comes first."""
    first = grown(1)
    requests = requests_of(lambda watch: carry_out(first, plan(first)[0], watch))
    for number in range(1, requests + 1, max(1, requests // 6)):
        node = grown(1)
        if number % 2:
            checkpoint_by_hand(node.objects, clock=node.clock)
        made, _ = plan(node)
        carry_out(node, made, at_request(number, partial(action, node)))
        if action is restore_beside:
            clone = successor(node, "c")
            clone.restore()
            with clone.open():
                clone.assert_same(sorted(clone.model.states)[::20])
        else:
            assert_whole(node, every=20)


def assert_no_problems_beside(node: EngineNode, action: Callable[[EngineNode], object]) -> None:
    """What others do in front of any request of a plan is no problem to tell of."""
    assert isinstance(node.objects, FaultyStore)
    before, requests = node.objects.after_crash(), requests_of(lambda watch: plan(node, watch))
    action(node)
    after = node.objects.after_crash()
    assert requests > 20
    for number in range(1, requests + 1):
        here = node.objects = before.after_crash()
        _, report = plan(node, at_request(number, partial(become, here, after)))
        assert report.findings == (), f"in front of request {number}"


def become(objects: FaultyStore, other: FaultyStore) -> None:
    """A store has what another one has."""
    objects._server.content = other._server.content.copy()


def test_what_others_take_away_while_it_looks_is_not_lost() -> None:
    """A state that its owner lets go, in front of any request of a plan, is no problem to tell of."""
    node = grown(2)
    write_state(node)
    assert_no_problems_beside(node, write_state)


def publish_and_collect(node: EngineNode) -> None:
    """Another compaction is published, and what it does without goes."""
    publish(node)
    collect(node)


def test_files_that_go_while_it_looks_at_them_are_looked_at_anew() -> None:
    """Another compaction is published and collected, in front of any request of a plan: that is done all the same."""
    assert_no_problems_beside(grown(2), publish_and_collect)


def test_an_old_plan_and_an_old_owner_remove_nothing_that_is_needed() -> None:
    """A plan from before further compactions, carried out late and beside a new owner: each key is judged again."""
    node = grown()
    made, _ = plan(node)
    publish(node)
    usurp(node.objects)
    carry_out(node, made)
    clone = successor(node, "c")
    clone.restore()
    with clone.open():
        clone.assert_same(sorted(clone.model.states)[::9])


def test_what_interrupted_shipping_left_goes_too() -> None:
    """An orphan of an earlier epoch goes, an object of the owner's and a foreign name stay."""
    node = grown(1)
    node.crash()
    node.open()
    orphan, own = KEYS.object(ObjectId(1, 4, 1)), KEYS.object(ObjectId(1, 9, node.view.manifest.epoch))
    for key in (orphan, own, KEYS.blobs_prefix + "notes.txt", KEYS.objects_prefix + "notes.txt"):
        node.objects.put(key, b"x")
    made, _ = plan(node)
    told = {one.key: (one.action, one.kind) for one in made.found}
    assert told[KEYS.blobs_prefix + "notes.txt"] == ("keep", "foreign")
    assert told[orphan][0] == "remove"
    carry_out(node, made)
    assert KEYS.blobs_prefix + "notes.txt" in keys_of(node)
    assert orphan not in keys_of(node)
    assert_whole(node)


def test_history_is_told_to_begin_later() -> None:
    """`keep_from` moves where history begins, and the compaction after that does without older versions."""
    node = grown(1)
    seq = sorted(node.model.states)[60]
    made, _ = plan(node, keep_from=seq)
    assert [one.kind for one in made.found if one.action == "move"] == ["history"]
    done = carry_out(node, made)
    assert done.history_start_seq == seq
    assert plan(node, keep_from=seq)[0].found == plan(node)[0].found
    compact_by_hand(node.objects, clock=node.clock, keep_from=seq)
    collect(node)
    assert_whole(node)
    with pytest.raises(InputError, match="the last entry is"):
        plan(node, keep_from=10**9)


def test_a_plan_is_kept_as_a_file_and_believed_only_so_far(tmp_path: Path) -> None:
    """What was written is read again; objects of others, and other stores, are refused."""
    node = grown()
    made, _ = plan(node)
    write_plan(tmp_path / "plan.json", made)
    assert read_plan(tmp_path / "plan.json") == made
    with pytest.raises(NotFoundError, match="no plan"):
        read_plan(tmp_path / "none.json")
    write_plan(tmp_path / "alien.json", with_forged(made, "storage/engine/other/blobs/x.tblb"))
    with pytest.raises(DataError, match="not an object of the engine main"):
        read_plan(tmp_path / "alien.json")
    (tmp_path / "bad.json").write_bytes(b"{}")
    with pytest.raises(DataError, match="not a plan of gc"):
        read_plan(tmp_path / "bad.json")
    with pytest.raises(InputError, match="not for the engine main"):
        carry_out(node, msgspec.structs.replace(made, store="s3://other"))


def test_a_plan_that_names_what_is_needed_removes_it_not() -> None:
    """Somebody has written the names of the published compaction into a plan: they are judged again, and stay."""
    node = grown()
    made, _ = plan(node)
    wanted = sorted(compaction_keys(node))
    done = carry_out(node, with_forged(made, *wanted))
    assert {(one.object, one.reason) for one in done.kept} == {(key, Reason.NEEDED) for key in wanted}
    assert set(wanted) <= keys_of(node)
    assert_whole(node)


def with_forged(made: GcPlan, *keys: str) -> GcPlan:
    """A plan into which somebody has written these keys."""
    (one,) = made.plans
    forged = (Candidate(kind="blob file", action="remove", reason=Reason.SUPERSEDED, key=key, bytes=1) for key in keys)
    return msgspec.structs.replace(made, plans=(msgspec.structs.replace(one, found=(*one.found, *forged)),))


def test_data_files_that_the_index_names_stay_whatever_a_plan_says() -> None:
    """Somebody has written their names into a plan: the index of this moment is read again, and they stay."""
    node = EngineNode(new_store(), hot_tier_bytes=0).open()
    node.apply(60)
    node.ship_all()
    compact_by_hand(node.objects, clock=node.clock, large_bytes=200)
    named = [key for key in keys_of(node) if "/data/" in key]
    assert named
    made, _ = plan(node)
    (one,) = made.plans
    forged = (Candidate(kind="data file", action="remove", reason=Reason.SUPERSEDED, key=key, bytes=1) for key in named)
    carry_out(node, msgspec.structs.replace(made, plans=(msgspec.structs.replace(one, found=tuple(forged)),)))
    assert set(named) <= keys_of(node)
    assert_whole(node)


@pytest.mark.deeper
@pytest.mark.parametrize("nth", range(examples(1)))
def test_node_and_spark_collect_one_engine_in_any_order_and_lose_nothing(nth: int) -> None:
    """The node removes versions, moves values and deletes files of large ones; Spark compacts and collects beside it.

    What the node removed is in no compaction, and all that is kept can be read, here and after the loss of the disk.
    """
    seed = first_seed() + nth
    choose, source = random.Random(seed), Overwrites(seed)
    settings: dict[str, Any] = {"keep_versions": 1, "rotate_max_bytes": 8 << 10, "inline_value_bytes": 0}
    settings |= {"large_value_bytes": 1024, "local_retention_bytes": 0}
    with EngineNode(new_store(), name=f"both-{seed}", **settings).open() as node:
        moved = compacted = removed = 0
        for _ in range(8):
            node.apply_these(source.entries(40, node.engine.applied_seq + 1))
            node.ship_all()
            node.apply_these(source.entries(choose.randrange(3), node.engine.applied_seq + 1))  # not final
            node.clock.advance(1)
            for step in choose.sample(("node", "compact", "spark", "snapshot"), 3):
                if step == "node":
                    moved += node.engine.collect_garbage().moved_values
                elif step == "compact":
                    compacted += compact(node.objects).dropped_versions
                    there = {key for one in root_of(node).versions for key, _ in rows_of(node, one)}
                    assert there <= {key for key, _ in node.core.tree.scan()}
                elif step == "spark":
                    report = collect(node)
                    assert report.is_good
                    removed += report.removed_objects
                else:
                    node.engine.create_checkpoint()
            assert_state(node.engine, node.model, node.engine.applied_seq)
            assert isinstance(node.objects, FaultyStore)
            other = EngineNode(node.objects.after_crash(), name="reader", clock=node.clock)
            other.restore()
            with other.open():
                assert_state(other.engine, node.model, node.view.manifest.high_water_mark)
        assert min(moved, compacted, removed) > 10


def rows_of(node: EngineNode, part: RowPart) -> Iterator[tuple[bytes, bytes]]:
    """The rows of a file of the version index."""
    return SSTable(node.objects, part, kind="versions").rows()
