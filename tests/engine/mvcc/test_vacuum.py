"""Removing versions: every state from the horizon on is what it was, and those before it are told as gone."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.campaign import examples, first_seed
from tests.engine.engines import SMALL, RandomEntries, assert_same, assert_state, open_local
from tests.engine.model import Model, batch

from tidelog import _native
from tidelog.engine.engine import Engine
from tidelog.engine.entry import CopyObject, CreateBucket, DeleteBucket, DeleteObject, Entry, PutObject
from tidelog.engine.mvcc import vacuum_rules
from tidelog.engine.mvcc.cells import (
    at,
    bucket_prefix,
    encode_bucket,
    encode_inline,
    encode_pointer,
    encode_tombstone,
    object_prefix,
    seq_of,
)
from tidelog.engine.mvcc.vacuum_rules import LiveBytes, Rule, judged, sweep
from tidelog.engine.mvcc.versions import BucketVersion
from tidelog.errors import ClosedError, InputError, NotFoundError
from tidelog.testing import FaultyFiles

VALUE = b"v" * 300


def applied(engine: Engine, *entries: Entry) -> None:
    """Entries with the next seqs, which are everywhere then."""
    first = engine.applied_seq + 1
    engine.apply_many(list(enumerate(entries, first)))
    engine.update_low_water_mark(engine.applied_seq)


def rows_of(engine: Engine) -> list[tuple[str, int]]:
    """All rows of the index, in words."""
    return [(key[:-9].decode().replace("\0", "/"), seq_of(key)) for key, _ in engine._core.tree.scan()]


# The rules


def removed(rows: dict[bytes, bytes], horizon: int, keep: int, created: dict[bytes, BucketVersion]) -> list[bytes]:
    """The keys that go, in the order in which they do."""
    kept: list[bytes] = []
    found = judged(sorted(rows.items()), Rule(horizon, keep, created), kept.append)
    gone = [key for verdict in found for key in verdict.doomed()]
    assert len(gone) + len(kept) == len(rows)
    return gone


@pytest.mark.parametrize(
    ("horizon", "keep", "expected"),
    [
        (0, 1, []),
        (4, 1, []),
        (5, 1, [3]),
        (8, 1, [3, 5, 7]),  # the deletion goes with what is below it
        (8, 2, [3]),
        (8, 3, []),
        (9, 1, [3, 5, 7]),
        (12, 1, [3, 5, 7]),
        (12, 2, [3, 5, 7]),
        (99, 1, [3, 5, 7, 9]),
        (99, 2, [3, 5, 7]),
    ],
)
def test_which_versions_of_an_object_go(horizon: int, keep: int, expected: list[int]) -> None:
    """Oldest first; what is seen at the horizon stays, and so do the newest ones that are to be kept."""
    prefix = object_prefix("b", "k")
    rows = {at(prefix, seq): encode_inline(0, 1, 1, 0, b"x") for seq in (3, 5, 9, 20)}
    rows[at(prefix, 7)] = encode_tombstone(0)
    gone = removed(rows, horizon, keep, {b"b": BucketVersion(1, 0, False)})
    assert [seq_of(key) for key in gone] == expected


def test_what_an_earlier_bucket_held_goes() -> None:
    """Whatever is to be kept of objects: these are hidden for ever. The order within a batch counts."""
    prefix, value = object_prefix("b", "k"), encode_pointer(2, 1, 1, 0, 5, 9, 100)
    rows = {at(prefix, seq): value for seq in (3, 8, 9)}
    assert [seq_of(key) for key in removed(rows, 10, 9, {b"b": BucketVersion(8, 2, False)})] == [3]
    assert [seq_of(key) for key in removed(rows, 10, 9, {b"b": BucketVersion(8, 3, False)})] == [3, 8]
    assert [seq_of(key) for key in removed(rows, 10, 9, {})] == [3, 8, 9]
    assert [seq_of(key) for key in removed(rows, 7, 9, {})] == [3]


def test_which_rows_of_a_bucket_go() -> None:
    """All but the one that says what it is at the horizon; a deletion says nothing that no row does not say."""
    prefix = bucket_prefix("b")
    rows = {at(prefix, seq): encode_bucket(0, is_deleted=seq % 2 == 0) for seq in (1, 4, 5, 8)}
    assert [seq_of(key) for key in removed(rows, 3, 5, {})] == []
    assert [seq_of(key) for key in removed(rows, 4, 5, {})] == [1, 4]
    assert [seq_of(key) for key in removed(rows, 6, 5, {})] == [1, 4]
    assert [seq_of(key) for key in removed(rows, 9, 5, {})] == [1, 4, 5, 8]


# An engine


def test_old_versions_go_and_new_ones_stay(tmp_path: Path) -> None:
    """States from the horizon on are as before, those below are refused with the seq from which on there are some."""
    with open_local(tmp_path) as engine:
        applied(engine, CreateBucket("b"), *(PutObject("b", "k", VALUE + b"%d" % n) for n in range(5)))
        before = [engine.digest(seq) for seq in (4, 5, 6)]
        report = engine.collect_garbage(horizon=4)
        assert (report.history_start_seq, report.removed_versions, report.versions) == (4, 2, 4)
        assert [engine.digest(seq) for seq in (4, 5, 6)] == before
        assert [version.seq for version in engine.versions("b", "k")] == [6, 5, 4]
        for read in (engine.digest, engine.list_buckets, engine.pin, lambda seq: engine.read("b", "k", seq)):
            with pytest.raises(NotFoundError, match="states before seq 4 are no longer kept"):
                read(3)
        with pytest.raises(NotFoundError, match="states before seq 4"):
            engine.list_objects("b", seq=3)


def test_versions_that_are_kept_can_be_read(tmp_path: Path) -> None:
    """The newest two of each object by their seqs, although the states that they were part of are gone."""
    settings = msgspec.structs.replace(SMALL, keep_versions=2)
    with open_local(tmp_path, settings=settings) as engine:
        applied(engine, CreateBucket("b"), *(PutObject("b", "k", b"%d" % n) for n in range(5)), CreateBucket("c"))
        assert engine.collect_garbage().history_start_seq == 7
        assert [version.seq for version in engine.versions("b", "k")] == [6, 5]
        assert engine.read("b", "k", 5).data == b"3"
        with pytest.raises(NotFoundError, match="states before seq 7"):
            engine.read("b", "k", 4)
        with pytest.raises(NotFoundError, match="states before seq 7"):
            engine.digest(6)


def test_deleted_objects_and_buckets_leave_nothing(tmp_path: Path) -> None:
    """Neither tombstones nor the rows of a bucket that is no more."""
    with open_local(tmp_path) as engine:
        applied(engine, CreateBucket("b"), PutObject("b", "k", VALUE), DeleteObject("b", "k"), CreateBucket("c"))
        applied(engine, PutObject("c", "k", VALUE), DeleteBucket("c", force=True), CreateBucket("d"))
        engine.collect_garbage(horizon=7)
        assert rows_of(engine) == [("bb", 1), ("bd", 7)]
        assert engine.list_buckets() == ["b", "d"]
        applied(engine, CreateBucket("c"), PutObject("c", "j", b"new"))
        assert [item.key for item in engine.list_objects("c")] == ["j"]
        with pytest.raises(NotFoundError):
            engine.read("c", "k")


def test_a_value_lives_as_long_as_a_copy_does(tmp_path: Path) -> None:
    """The copy points to it, whatever became of the object that it was put as."""
    with open_local(tmp_path) as engine:
        applied(engine, CreateBucket("b"), PutObject("b", "k", VALUE), CopyObject("b", "k", "b", "j"))
        applied(engine, DeleteObject("b", "k"))
        engine.collect_garbage(horizon=4)
        assert rows_of(engine) == [("bb", 1), ("ob/j", 3)]
        assert engine.read("b", "j").data == VALUE


def test_the_horizon_does_not_pass_what_may_be_rolled_back(tmp_path: Path) -> None:
    """However much is asked for; and a rollback finds everything it needs afterwards."""
    with open_local(tmp_path) as engine:
        applied(engine, CreateBucket("b"), *(PutObject("b", "k", VALUE + b"%d" % n) for n in range(4)))
        engine.apply_many([(seq, PutObject("b", "k", VALUE + b"%d" % seq)) for seq in range(6, 10)])
        assert engine.collect_garbage(horizon=9).history_start_seq == 5
        engine.rollback_to(5)
        assert engine.read("b", "k").data == VALUE + b"3"
        with pytest.raises(InputError, match="must be a seq"):
            engine.collect_garbage(horizon=-1)


def test_what_went_stays_away_after_a_crash() -> None:
    """It is in the log: redo removes it again, without a checkpoint between."""
    files = FaultyFiles()
    engine = open_local(Path("/engine"), files)
    applied(engine, CreateBucket("b"), *(PutObject("b", f"k{n % 3}", VALUE) for n in range(60)))
    engine.collect_garbage(horizon=61)
    rows = rows_of(engine)
    assert len(rows) == 4
    files.crash()
    with open_local(Path("/engine"), files.after_crash("lose")) as again:
        assert rows_of(again) == rows
        assert again.statistics().history_start_seq == 61


def test_nothing_goes_that_nobody_asked_for(tmp_path: Path) -> None:
    """Without settings and without a horizon all versions stay."""
    with open_local(tmp_path) as engine:
        applied(engine, CreateBucket("b"), *(PutObject("b", "k", VALUE) for _ in range(9)))
        assert engine.collect_garbage().removed_versions == 0
        assert len(engine.versions("b", "k")) == 9
        assert engine.statistics().history_start_seq == 0


def test_a_plan_says_what_is_done(tmp_path: Path) -> None:
    """Planning changes nothing, and what is done is what was planned."""
    with open_local(tmp_path) as engine:
        applied(engine, CreateBucket("b"), *(PutObject("b", "k", VALUE) for _ in range(9)))
        rows = rows_of(engine)
        plan = engine.plan_garbage(horizon=8)
        assert rows_of(engine) == rows
        assert (plan.horizon_seq, plan.history_start_seq, plan.removable_versions) == (8, 0, 6)
        assert plan.removable_bytes == 6 * (len(VALUE) + 4)
        report = engine.collect_garbage(plan)
        assert (report.removed_versions, report.history_start_seq) == (6, 8)
        assert engine.plan_garbage(horizon=8).removable_versions == 0
        with pytest.raises(InputError, match="its own horizon"):
            engine.collect_garbage(plan, horizon=8)


def test_a_closed_engine_collects_nothing(tmp_path: Path) -> None:
    """It says that it is closed."""
    engine = open_local(tmp_path)
    engine.close()
    for work in (engine.plan_garbage, engine.collect_garbage):
        with pytest.raises(ClosedError):
            work()


# Against the model


def assert_kept(engine: Engine, model: Model, horizon: int) -> None:
    """Every state from a seq on, read in every way; none below it."""
    assert engine.statistics().history_start_seq == horizon
    for seq in [horizon, *(seq for seq in model.states if seq > horizon)]:
        assert_state(engine, model, seq)
    for seq in [seq for seq in model.states if seq < horizon][-3:]:
        with pytest.raises(NotFoundError, match="no longer kept"):
            engine.digest(seq)


@pytest.mark.deeper
@pytest.mark.parametrize("number", range(examples(4)))
def test_random_horizons_change_no_state_that_is_kept(number: int) -> None:
    """Entries, rollbacks, checkpoints and openings between them; several versions kept, or one."""
    seed = first_seed() + number
    chance, entries, files = random.Random(f"vacuum {seed}"), RandomEntries(seed), FaultyFiles()
    settings = msgspec.structs.replace(SMALL, keep_versions=chance.choice((None, None, 1, 2, 5)))
    directory, model, horizon = Path("/engine"), Model(), 0
    engine = open_local(directory, files, settings)
    for _ in range(14):
        for seq, entry in entries.entries(chance.randint(1, 30), engine.applied_seq + 1):
            engine.apply(seq, entry)
            model.apply(seq, entry)
        if chance.random() < 0.3:
            back = chance.randint(max(engine.low_water_mark, engine.applied_seq - 20), engine.applied_seq)
            engine.rollback_to(back)
            model.roll_back(back)
        if chance.random() < 0.7:
            engine.update_low_water_mark(chance.randint(engine.low_water_mark, engine.applied_seq))
        wanted = chance.randint(0, engine.applied_seq)
        engine.collect_garbage(horizon=wanted)
        horizon = max(horizon, min(wanted, engine.low_water_mark))
        assert_kept(engine, model, horizon)
        if chance.random() < 0.4:
            engine.create_checkpoint()
        if chance.random() < 0.3:
            engine.close()
            engine = open_local(directory, files, settings)
            assert_kept(engine, model, horizon)
    engine._core.tree.check()
    engine.close()


def test_what_is_left_is_what_the_states_need() -> None:
    """With one version kept, a horizon at the end leaves one row for each object and bucket there is."""
    model, entries = Model(), RandomEntries("least").entries(400)
    with open_local(Path("/engine"), FaultyFiles()) as engine:
        engine.apply_many(entries)
        for seq, entry in entries:
            model.apply(seq, entry)
        engine.update_low_water_mark(engine.applied_seq)
        engine.collect_garbage(horizon=engine.applied_seq)
        state = model.at(model.applied_seq)
        assert len(rows_of(engine)) == len(state) + sum(len(bucket.objects) for bucket in state.values())
        assert_same(engine, model)


def test_many_versions_in_a_small_pool() -> None:
    """More pages than fit into memory: steps are as large as there is room, and the rest is found intact."""
    with open_local(Path("/engine"), FaultyFiles()) as engine:
        applied(engine, CreateBucket("b"))
        keys = [f"{key:04d}-{'long' * 100}" for key in range(250)]
        for number in range(8):
            applied(engine, batch(*(PutObject("b", key, b"%d" % number) for key in keys)))
        assert engine.statistics().index_bytes > 2 * SMALL.buffer_pool_bytes
        engine.collect_garbage(horizon=engine.applied_seq)
        assert len(rows_of(engine)) == 251
        assert all(engine.read("b", key).data == b"7" for key in keys)
        engine._core.tree.check()


class Busy:
    """Threads that do something over and over, until they are told to stop; what they raise is raised then."""

    def __init__(self, *work: Callable[[], None]) -> None:
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(len(work))
        self._running = [self._pool.submit(self._repeat, one) for one in work]

    def _repeat(self, work: Callable[[], None]) -> None:
        while not self._stop.is_set():
            work()
            time.sleep(0.002)

    def end(self) -> None:
        self._stop.set()
        for one in self._running:
            one.result()
        self._pool.shutdown()


def look_at_all(engine: Engine) -> None:
    """One state, read twice in every way, while it is pinned."""
    with engine.pin() as seq:
        first = engine.digest(seq)
        for bucket in engine.list_buckets(seq):
            for item in engine.list_objects(bucket, seq=seq):
                assert engine.read(bucket, item.key, seq).seq == item.seq
        assert engine.digest(seq) == first


def test_entries_are_applied_and_read_while_versions_go() -> None:
    """Readers of kept states see them whole, and two collections at once are one after the other."""
    model = Model()
    with open_local(Path("/engine"), FaultyFiles()) as engine:

        def collect() -> None:
            engine.collect_garbage(horizon=max(0, engine.low_water_mark - 40))

        busy = Busy(collect, collect, lambda: look_at_all(engine))
        for seq, entry in RandomEntries("busy").entries(600):
            engine.apply(seq, entry)
            model.apply(seq, entry)
            engine.update_low_water_mark(seq)
        busy.end()
        found = engine.statistics()
        assert found.garbage is not None
        assert found.garbage.versions_removed > 100
        for seq in [seq for seq in model.states if seq >= found.history_start_seq]:
            assert engine.digest(seq) == model.digest(seq)


@pytest.mark.parametrize("horizon", [0, 25_000])
@pytest.mark.parametrize("has_tombstones", [False, True])
def test_name_with_many_versions_is_swept_in_bounded_memory(
    monkeypatch: pytest.MonkeyPatch, horizon: int, has_tombstones: bool
) -> None:
    """What goes and what stays is the same as in one step, and never more than some steps are held at once."""
    cells = [
        (at(object_prefix("b", name), seq), encode_tombstone(0) if has_tombstones and seq % 7 == 0 else pointer(seq))
        for name, versions in (("a", 3), ("k", 30_000), ("l", 9000), ("m", 5))
        for seq in range(versions + 1, 1, -1)
    ]
    rule = Rule(horizon, 2, {b"b": BucketVersion(1, 0, False)})
    at_once, held = LiveBytes([(1, 20_000), (20_000, 1 << 40)]), list[int]()
    whole = list(sweep([cells], rule, at_once))

    def judge(some: list[tuple[bytes, bytes]], *rest: Any) -> Any:
        held.append(len(some))
        return _native.judge_cells(some, *rest)

    monkeypatch.setattr(vacuum_rules, "judge_cells", judge)
    live = LiveBytes([(1, 20_000), (20_000, 1 << 40)])
    found = list(sweep([[], *(cells[begin : begin + 1000] for begin in range(0, len(cells), 1000)), []], rule, live))
    assert max(held) <= 10_000
    assert max(len(one.doomed) for one in found) <= 10_000
    assert [key for one in found for key in one.doomed] == [key for one in whole for key in one.doomed]
    assert sum(one.stored_bytes for one in found) == sum(one.stored_bytes for one in whole)
    assert sum(one.kept for one in found) == sum(one.kept for one in whole)
    assert live.numbers == at_once.numbers


def pointer(seq: int) -> bytes:
    return encode_pointer(0, 100, 1, 0, seq, 1000 * seq, 100)
