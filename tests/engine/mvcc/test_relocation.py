"""Value compaction: values that are needed leave the oldest pieces of the log, which go; every state stays the same."""

from __future__ import annotations

import contextlib
import copy
import random
import stat
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.campaign import every, examples, first_seed
from tests.engine.compacting import compact_by_hand
from tests.engine.engines import SMALL, assert_state, open_local
from tests.engine.model import Model
from tests.engine.stations import KEYS, EngineNode, StoreView, new_store, successor

import tidelog
from tidelog.clock import ManualClock
from tidelog.engine.cold import garbage as garbage_module
from tidelog.engine.cold.garbage import GarbageStatistics, PieceUse, move_below, move_parts
from tidelog.engine.cold.shipping import Shipping
from tidelog.engine.core import Turns
from tidelog.engine.entry import CopyObject, CreateBucket, DeleteObject, Entry, PutObject
from tidelog.engine.mvcc import relocation
from tidelog.engine.reader import EngineReader
from tidelog.engine.settings import EngineSettings
from tidelog.errors import TidelogError
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.testing import Crash, FaultyFiles, World

DIRECTORY = Path("/engine")
SETTINGS: dict[str, Any] = {
    "keep_versions": 1,
    "rotate_max_bytes": 8 << 10,
    "inline_value_bytes": 0,
    "local_retention_bytes": 0,
}


class Overwrites:
    """Entries that overwrite a few objects again and again, and others hardly ever: pieces of the log stay needed."""

    def __init__(self, seed: object = 1, keys: int = 24) -> None:
        self._choose = random.Random(str(seed))
        self._keys = keys

    def entries(self, count: int, first_seq: int) -> list[tuple[int, Entry]]:
        begin: list[Entry] = [CreateBucket("b")] if first_seq == 1 else []
        return list(enumerate([*begin, *(self._entry() for _ in range(count))], first_seq))

    def _entry(self) -> Entry:
        choose = self._choose
        key = f"k{min(choose.randrange(self._keys), choose.randrange(self._keys)):02}"
        if choose.random() < 0.05:
            return CopyObject("b", key, "b", f"copy-{choose.randrange(4)}")
        if choose.random() < 0.05:
            return DeleteObject("b", key)
        metadata: dict[str, Any] = {"n": choose.randrange(9)} if choose.random() < 0.2 else {}
        return PutObject("b", key, choose.randbytes(choose.choice((200, 700, 1500))), metadata)


@pytest.mark.parametrize("ratio", [0.5, 0])
def test_overwrites_leave_little_garbage_without_a_store(ratio: float) -> None:
    """However often objects are overwritten, the log stays small, and nothing else is changed by that. Without moves a
    few objects that are hardly ever overwritten keep nearly all of it.
    """
    files, settings = FaultyFiles(), msgspec.structs.replace(SMALL, **SETTINGS, compaction_live_ratio=ratio)
    model, source = Model(), Overwrites()
    engine = open_local(DIRECTORY, files, settings)
    moved, sizes = 0, list[int]()
    for _ in range(30):
        entries = source.entries(60, engine.applied_seq + 1)
        engine.apply_many(entries)
        for seq, entry in entries:
            model.apply(seq, entry)
        engine.update_low_water_mark(engine.applied_seq)
        moved += engine.collect_garbage().moved_values
        sizes.append(engine.statistics().wal.file_bytes)
        assert_state(engine, model, engine.applied_seq)
    assert (moved > 50, max(sizes) < 200_000) == (ratio > 0, ratio > 0), sizes
    assert engine.verify()
    digest = engine.digest()
    files.crash()
    with contextlib.suppress(Crash, TidelogError):
        engine.close(checkpoint=False)
    with open_local(DIRECTORY, files.after_crash("lose"), settings) as engine:
        assert engine.digest() == digest
        assert_state(engine, model, engine.applied_seq)
        assert engine.verify()


def test_overwrites_leave_little_garbage_in_the_store() -> None:
    """Though there are always entries that are not final, after which nothing ships, when values are moved."""
    node = EngineNode(new_store(), **SETTINGS).open()
    source, sizes, moved = Overwrites(), list[int](), 0
    for _ in range(30):
        node.apply_these(source.entries(60, node.engine.applied_seq + 1))
        node.ship_all()
        node.apply_these(source.entries(2, node.engine.applied_seq + 1))
        node.clock.advance(1)
        report = node.engine.collect_garbage()
        moved += report.moved_values
        sizes.append(sum(info.size for info in node.objects.list(KEYS.objects_prefix)))
    assert moved > 50
    assert max(sizes) < 350_000, sizes  # of some 1.5 million that were written
    assert_state(node.engine, node.model, node.engine.applied_seq)
    node.crash()
    other = successor(node, **SETTINGS)
    other.restore()
    with other.open():
        assert_state(other.engine, other.model, other.engine.applied_seq)


def test_what_the_store_has_dropped_leaves_the_disk_too() -> None:
    """However much may stay there: nobody points into it, here or in the store."""
    node = EngineNode(new_store(), **{**SETTINGS, "local_retention_bytes": 1 << 30}).open()
    source, sizes = Overwrites(), list[int]()
    for _ in range(20):
        node.apply_these(source.entries(60, node.engine.applied_seq + 1))
        node.ship_all()
        node.clock.advance(1)
        node.engine.collect_garbage()
        sizes.append(node.engine.statistics().wal.file_bytes)
    assert max(sizes) < 350_000, sizes  # of some million
    assert_state(node.engine, node.model, node.engine.applied_seq)
    node.crash()
    with node.open():
        assert_state(node.engine, node.model, node.engine.applied_seq)
    node.crash()


def test_values_stay_on_the_disk_when_the_store_drops_a_log_that_was_compacted() -> None:
    """The loss: compacted values are still pointed to where they are, and every read of a hot one asked the store."""
    node = EngineNode(new_store(), **{**SETTINGS, "local_retention_bytes": 1 << 30}).open()
    with node:
        puts: list[Entry] = [PutObject("b", f"k{n}", b"v" * 900) for n in range(60)]
        node.apply_these(list(enumerate([CreateBucket("b"), *puts], 1)))
        node.ship_all()
        compact_by_hand(node.objects)
        node.engine.create_checkpoint()
        node.engine.create_checkpoint()
        assert node.engine.collect_garbage().dropped_pieces > 3
        assert {node.engine.read("b", f"k{n}").tier for n in range(60)} == {"hot"}


def test_checkpoints_are_made_only_for_pieces_that_wait_for_one() -> None:
    """Each costs an image of every page that is changed after it, which would be more log than the values are."""
    engine = open_local(DIRECTORY, FaultyFiles(), msgspec.structs.replace(SMALL, **SETTINGS))
    source, moves = Overwrites(keys=200), 0
    for _ in range(60):
        engine.apply_many(source.entries(40, engine.applied_seq + 1))
        engine.update_low_water_mark(engine.applied_seq)
        moves += engine.collect_garbage().moved_values > 0
    checkpoints = engine.statistics().checkpoints
    assert 0 < checkpoints < moves / 2, (checkpoints, moves)
    engine.close()


class Walk:
    """An owner with a store, a reader beside it, crashes, losses of the disk and compactions, in any order."""

    def __init__(self, seed: int) -> None:
        self._choose = random.Random(seed)
        self._source = Overwrites(seed)
        self._settings = {**SETTINGS, "ship_compression": self._choose.choice(("none", "zstd"))}
        self._names = 0
        self.moved = 0
        self.store = new_store()
        self.node = EngineNode(self.store, **self._settings).open()
        self._apply()
        self.node.ship_all()
        self.reader = self._opened()

    def _opened(self) -> EngineReader:
        metadata = BucketMetadataStore(self.store, read_only=True)
        return EngineReader(self.store, metadata, KEYS, EngineSettings(cold_cache_bytes=0), runs_in_background=False)

    def step(self) -> None:
        choice = self._choose.randrange(20)
        if choice < 7:
            self._apply()
        elif choice < 11:
            self.node.ship_all()
        elif choice < 15:
            self.moved += self.node.engine.collect_garbage().moved_values
        elif choice == 15:
            self.node.clock.advance(1)
            self.node.engine.create_checkpoint()
        elif choice == 16:
            with contextlib.suppress(TidelogError):  # the log of versions that the owner has removed may be gone
                compact_by_hand(self.store, clock=self.node.clock)
        elif choice == 17:
            engine = self.node.engine
            self.node.roll_back(self._choose.randint(engine.low_water_mark, engine.applied_seq))
        elif choice == 18:
            self.node.crash()
            self.node.open()
        else:
            self._lose_disk()

    def _apply(self) -> None:
        entries = self._source.entries(self._choose.randrange(5, 60), self.node.engine.applied_seq + 1)
        self.node.apply_these(entries)

    def _lose_disk(self) -> None:
        self.node.crash()
        self._names += 1
        self.node = successor(self.node, f"node-{self._names}", **self._settings)
        self.node.restore()
        self.node.open()

    def compare(self) -> None:
        engine, model = self.node.engine, self.node.model
        assert_state(engine, model, engine.applied_seq)
        if self._choose.random() < 0.3:
            self.reader.refresh()
        seq = self.reader.applied_seq
        if seq >= max(engine.statistics().history_start_seq, StoreView(self.store).manifest.history_start_seq):
            assert_state(self.reader, model, seq)

    def close(self) -> None:
        self.reader.close()
        self.node.close()


@pytest.mark.deeper
def test_moved_values_are_found_whatever_happens() -> None:
    """By the owner, after crashes, after the loss of its disk, by readers beside it and after a compaction in Spark."""
    moved = 0
    for number in range(examples(4)):
        walk = Walk(first_seed() + number)
        for _ in range(30):
            walk.step()
            walk.compare()
        moved += walk.moved
        walk.close()
    assert moved > 10


@pytest.mark.deeper
def test_compaction_that_is_cut_off_anywhere_loses_nothing() -> None:
    """On the same disk, and restored from what is in the store."""
    past = World(clock=ManualClock())
    with _node_in(past).open() as node:
        source = Overwrites()
        for _ in range(4):
            node.apply_these(source.entries(60, node.engine.applied_seq + 1))
            node.ship_all()
            node.engine.create_checkpoint()
        model = node.model
    crash_at, died, moved = 1, True, 0
    while died:
        world = past.after_crash("keep", crash_at=crash_at)
        cut = _node_in(world)
        try:
            cut.open()
            moved = max(moved, cut.engine.collect_garbage().moved_values)
            cut.engine.collect_garbage()
            cut.close()
        except (Crash, TidelogError):
            if not world.crashed:
                raise
        finally:
            with contextlib.suppress(Crash, TidelogError, OSError):
                cut.crash()
        died = world.crashed
        left = world.after_crash("lose" if crash_at % 2 else "tear", seed=crash_at, torn_bytes=crash_at % 3)
        _check(left.lose_disk("a"), model, "b", restores=True)
        _check(left, model, "a", restores=False)
        crash_at += every(11)
    assert moved > 5


def _node_in(world: World, name: str = "a") -> EngineNode:
    clock = world.clock
    assert isinstance(clock, ManualClock)
    return EngineNode(world.store, name=name, files=world.files(name), clock=clock, ship_concurrency=1, **SETTINGS)


def _check(world: World, model: Model, name: str, *, restores: bool) -> None:
    node = _node_in(world, name)
    node.model = copy.deepcopy(model)
    if restores:
        node.restore()
    with node.open():
        assert_state(node.engine, model, model.applied_seq)
        node.engine.collect_garbage()
        assert_state(node.engine, model, model.applied_seq)


def test_snapshot_names_no_value_that_is_on_this_disk_alone() -> None:
    """A restore of the newest snapshot after the loss of the disk finds every value that was moved before it."""
    node = EngineNode(new_store(), **SETTINGS).open()
    source = Overwrites()
    for _ in range(6):
        node.apply_these(source.entries(60, node.engine.applied_seq + 1))
        node.ship_all()
    node.apply_these(source.entries(5, node.engine.applied_seq + 1))  # not final: what comes after it does not ship
    moved = relocation.Relocation(node.core, lambda: None, lambda error: None, node.shipping.reader.read_many, _nothing)
    assert moved.run(0, node.core.wal.next_lsn).values > 5
    before = StoreView(node.objects).manifest.checkpoints
    node.engine.create_checkpoint()
    assert StoreView(node.objects).manifest.checkpoints == before  # it waits until the moves are in the store
    node.crash()
    other = successor(node)
    other.restore()
    with other.open():
        assert_state(other.engine, other.model, other.engine.applied_seq)


def _nothing(size: int) -> None:
    """As fast as it goes."""


def test_copies_share_a_value_after_it_was_moved() -> None:
    """What many versions point to is not written for each of them."""
    settings = msgspec.structs.replace(SMALL, inline_value_bytes=0)
    with open_local(DIRECTORY, FaultyFiles(), settings) as engine:
        engine.apply_many([(1, CreateBucket("b")), (2, PutObject("b", "original", b"v" * 3000))])
        engine.apply_many((seq, CopyObject("b", "original", "b", f"copy-{seq:03}")) for seq in range(3, 60))
        engine.update_low_water_mark(59)
        digest, before = engine.digest(), engine._wal.next_position
        core = engine._core
        moved = relocation.Relocation(core, lambda: None, lambda error: None, None, _nothing)
        assert moved.run(0, core.wal.next_lsn).values == 4  # 58 versions, 16 with each
        assert engine._wal.next_position - before < 4 * 3000 + 58 * 400
        assert engine.digest() == digest
        assert engine.read("b", "copy-033").data == b"v" * 3000
        positions = {core.versions.find("b", f"copy-{seq:03}", 59).cell.position for seq in range(3, 60)}  # type: ignore[union-attr]
        assert len(positions) == 4


def test_all_values_of_a_piece_are_moved_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss: pieces with more values than fit into memory at a time kept those behind, and stayed for ever."""
    monkeypatch.setattr(relocation, "_MAX_ROWS", 7)
    settings = msgspec.structs.replace(SMALL, inline_value_bytes=0)
    with open_local(DIRECTORY, FaultyFiles(), settings) as engine:
        engine.apply_many([(1, CreateBucket("b"))])
        engine.apply_many((seq, PutObject("b", f"k{seq}", b"%03d" % seq * 300)) for seq in range(2, 3000))
        engine.update_low_water_mark(2999)
        core = engine._core
        before, below_lsn = core.written_bytes, core.wal.next_lsn
        moved = relocation.Relocation(core, lambda: None, lambda error: None, None, _nothing)
        assert moved.run(0, below_lsn).values == 2998
        assert core.written_bytes == before, "moves are not written for entries"
        assert not moved._rows(0, below_lsn, b"")[0]


def test_damaged_value_is_not_moved() -> None:
    """Its piece stays, and what is wrong with it is told by whoever reads it."""
    settings = msgspec.structs.replace(SMALL, inline_value_bytes=0)
    files = FaultyFiles()
    with open_local(DIRECTORY, files, settings) as engine:
        engine.apply_many([(1, CreateBucket("b"))])
        engine.apply_many((seq, PutObject("b", f"k{seq}", b"%03d" % seq * 300)) for seq in range(2, 12))
        engine.update_low_water_mark(11)
        core = engine._core
        read_stored = core.wal.read_stored
        bad = core.versions.find("b", "k5", 11)
        assert bad is not None

        def damaged(position: int, length: int) -> bytes | None:
            found = read_stored(position, length)
            return b"?" * length if position == bad.cell.position else found

        core.wal.read_stored = damaged  # type: ignore[method-assign]
        moved = relocation.Relocation(core, lambda: None, lambda error: None, None, _nothing)
        assert moved.run(0, core.wal.next_lsn).values == 9
        core.wal.read_stored = read_stored  # type: ignore[method-assign]
        assert core.versions.find("b", "k5", 11) == bad
        assert engine.read("b", "k5").data == b"005" * 300


def test_scan_and_read_that_began_before_a_move_end_after_it() -> None:
    """They looked the value up where it was; its file is gone when they come to read it."""
    settings = msgspec.structs.replace(SMALL, **SETTINGS)
    with open_local(DIRECTORY, FaultyFiles(), settings) as engine:
        engine.apply(1, CreateBucket("b"))
        for first in range(2, 400, 40):
            engine.apply_many(
                (seq, PutObject("b", f"k{seq % 40:02}", b"%04d" % seq * 100)) for seq in range(first, first + 40)
            )
        last = engine.applied_seq
        engine.update_low_water_mark(last)
        expected = {one.key: one.data for one in engine.scan("b", with_values=True)}
        scan = engine.scan("b", with_values=True)
        got = [next(scan) for _ in range(3)]
        found = engine._versions.find("b", "k39", last)
        assert found is not None
        core = engine._core
        core.wal.seal()
        below_lsn = core.wal.next_lsn
        moved = relocation.Relocation(core, lambda: None, lambda error: None, None, _nothing)
        assert moved.run(0, below_lsn).values == 400  # all versions
        engine.create_checkpoint()
        core.wal.remove_below(below_lsn)
        assert core.wal.first_position > found.cell.position
        assert {one.key: one.data for one in [*got, *scan]} == expected
        created = engine._buckets.created("b", last)
        engine._find_in = _first(found, engine._find_in)
        assert engine._read_any(created, "b", "k39", None, last).data == expected["k39"]


def _first(found: object, then: Any) -> Any:
    """What was looked up before, once."""
    answers = [found]

    def find(*args: object) -> object:
        return answers.pop() if answers else then(*args)

    return find


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([(90, 10), (90, 10), (0, 20)], 0),
        ([(10, 90), (10, 90), (50, 50)], 10),
        ([(10, 90), (20, 80), (90, 10), (90, 10)], 30),
        ([(0, 100), (0, 100), (10, 90), (80, 20)], 0),
        ([(90, 10), (0, 100), (0, 100), (90, 10)], 30),
    ],
)
def test_values_are_moved_until_enough_of_the_log_is_live(pieces: list[tuple[int, int]], expected: int) -> None:
    """From the front, never out of the newest; a piece that is dropped anyway does not count."""
    uses = [
        PieceUse(
            name="piece",
            first_lsn=10 * number,
            next_lsn=10 * number + 10,
            size=100,
            live_bytes=live,
            dead_bytes=dead,
            fate="newest" if number == len(pieces) - 1 else "live" if live else "behind" if pieces[0][0] else "drop",
        )
        for number, (live, dead) in enumerate(pieces)
    ]
    assert move_below(uses, 220, 1) == expected
    assert move_below(uses, 220, 1000) == 0


def test_growing_log_is_collected_by_itself(tmp_path: Path) -> None:
    """Long before the interval has passed, and its room comes back while objects are overwritten."""
    settings: dict[str, Any] = {**SETTINGS, "rotate_max_bytes": "64KiB"}
    with tidelog.open_engine(tmp_path / "e", read_only=False, **settings) as engine:
        engine.apply(1, tidelog.CreateBucket("b"))
        seq = 2
        for _ in range(2000):
            engine.apply_many((seq + n, tidelog.PutObject("b", f"k{n % 25}", b"v" * 1000)) for n in range(50))
            seq += 50
            engine.update_low_water_mark(seq - 1)
            garbage = engine.statistics().garbage
            if garbage is not None and garbage.pieces_dropped > 3:
                break
        else:
            raise AssertionError("nothing was collected")
        assert engine.read("b", "k7").data == b"v" * 1000


def test_pieces_whose_values_were_moved_go_with_the_first_entry_that_is_shipped_behind_the_moves(
    tmp_path: Path,
) -> None:
    """The loss: a bucket with four times the live bytes, since old copies stayed until the log had grown once more."""
    store = f"file://{tmp_path / 'store'}"
    settings: dict[str, Any] = {**SETTINGS, "rotate_max_bytes": "8KiB", "ship_interval_seconds": 3600}
    with tidelog.open_engine(tmp_path / "e", store=store, **settings) as engine:
        upkeep, source = engine._upkeep, Overwrites()
        upkeep._collects_at = 1 << 64  # by hand
        for _ in range(3):
            engine.apply_many(source.entries(100, engine.applied_seq + 1))
            engine.update_low_water_mark(engine.applied_seq)
            upkeep._collect()
        engine.apply_many(source.entries(100, engine.applied_seq + 1))
        engine.update_low_water_mark(engine.applied_seq)
        engine.apply_many(source.entries(1, engine.applied_seq + 1))  # not final, and before the moves
        upkeep._collect()
        assert upkeep._awaited_seq == engine.applied_seq
        upkeep._collects_at = 1 << 64
        before = _garbage(engine)
        assert before.values_moved > 0
        engine.apply_many(source.entries(1, engine.applied_seq + 1))
        assert upkeep._awaited_seq is not None, "it is not final yet"
        engine.update_low_water_mark(engine.applied_seq)
        engine.apply_many(source.entries(1, engine.applied_seq + 1))
        deadline = time.monotonic() + 120
        while _garbage(engine).collections == before.collections:
            assert time.monotonic() < deadline, "no collection is due"
            time.sleep(0.02)
        assert _garbage(engine).pieces_dropped > before.pieces_dropped


def test_old_copies_of_moved_values_go_with_the_same_collection_while_entries_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss: a bucket of more than three times the live bytes, since old copies stayed until the next collection."""
    settings: dict[str, Any] = {**SETTINGS, "rotate_max_bytes": "8KiB", "ship_interval_seconds": 3600}
    with tidelog.open_engine(tmp_path / "e", store=f"file://{tmp_path / 'store'}", **settings) as engine:
        upkeep, source = engine._upkeep, Overwrites()
        upkeep._collects_at = 1 << 64  # by hand

        def entries_come(count: int, *, are_final: bool) -> None:
            engine.apply_many(source.entries(count, engine.applied_seq + 1))
            if are_final:
                engine.update_low_water_mark(engine.applied_seq)

        def sleep(seconds: float) -> None:
            is_waiting = seconds == garbage_module._ENTRY_SECONDS / garbage_module._LOOKS
            entries_come(1, are_final=is_waiting)

        monkeypatch.setattr(garbage_module, "time", SimpleNamespace(sleep=sleep))
        dropped = 0
        for _ in range(4):
            entries_come(100, are_final=True)
            before = _garbage(engine)
            upkeep._collect()
            upkeep._collects_at = 1 << 64
            assert upkeep._awaited_seq is None
            if _garbage(engine).values_moved > before.values_moved:
                dropped += _garbage(engine).pieces_dropped - before.pieces_dropped
        assert dropped > 0
        digest = engine.digest()
    with tidelog.restore_engine(tmp_path / "again", store=f"file://{tmp_path / 'store'}", take_over=True) as restored:
        assert restored.digest() == digest
        assert all(one.data is not None for one in restored.scan("b", with_values=True))


@pytest.mark.parametrize(
    ("below", "most_bytes", "expected"),
    [(0, 10, []), (40, 10, [10, 20, 30, 40]), (40, 25, [20, 40]), (30, 1000, [30]), (40, 100, [40])],
)
def test_values_are_moved_in_parts_that_bound_what_is_there_twice(
    below: int, most_bytes: int, expected: list[int]
) -> None:
    """The last part ends where the values of all that were wanted are moved."""
    uses = [
        PieceUse(name="", first_lsn=lsn, next_lsn=lsn + 10, size=100, live_bytes=20, dead_bytes=80, fate="live")
        for lsn in range(0, 50, 10)
    ]
    assert move_parts(uses, below, most_bytes) == expected


def _garbage(engine: tidelog.Engine) -> GarbageStatistics:
    found = engine.statistics().garbage
    assert found is not None
    return found


def test_entries_are_slowed_down_by_a_collection_and_not_by_a_store_that_hangs(tmp_path: Path) -> None:
    """While it gets on, entries that outrun it wait. If it has done nothing for some seconds, they go on."""
    with tidelog.open_engine(tmp_path / "e", keep_versions=1, rotate_max_bytes="64KiB") as engine:
        upkeep, clock = engine._upkeep, ManualClock()
        engine._core.clock = clock
        assert upkeep._collecting is not None
        upkeep._is_collecting, upkeep._collects_at, upkeep._due_bytes = True, 1000, 100
        upkeep.garbage().progress_seconds = clock.monotonic()
        assert upkeep.grown(1010, 0.001) == 0, "a little more is free"
        assert 0 < upkeep.grown(1050, 0.001) < upkeep.grown(1100, 0.001)
        assert upkeep.grown(100_000, 1.0) == 1, "never longer than this"
        clock.advance(60)
        assert upkeep.grown(100_000, 1.0) == 0
        upkeep.garbage()._go_on()
        assert upkeep.grown(100_000, 1.0) == 1


def test_entries_wait_for_the_end_of_a_collection_that_they_outrun(tmp_path: Path) -> None:
    """Slower ones would outrun it all the same while the machine has no time for it. They wait for neither a store that
    hangs nor a collection that waits for an entry, and not for ever when the engine is closed.
    """
    with tidelog.open_engine(tmp_path / "e", keep_versions=1, rotate_max_bytes="64KiB") as engine:
        upkeep, core = engine._upkeep, engine._core
        garbage = upkeep.garbage()

        def outrun(times: float) -> None:
            upkeep._is_collecting, upkeep._due_bytes = True, 1000
            upkeep._collects_at = core.written_bytes - int(times * 1000)
            garbage.progress_seconds = core.clock.monotonic()

        outrun(0.4)
        assert not upkeep._is_full()
        outrun(0.6)
        assert upkeep._is_full()
        core.moved_bytes += 200  # what a collection moves is not written for entries
        assert not upkeep._is_full()
        outrun(0.6)
        waiting = threading.Thread(target=upkeep.hold_back, args=(0.0,))
        waiting.start()
        for _ in range(5):
            garbage._go_on()
            assert waiting.is_alive()
            time.sleep(0.02)
        upkeep._is_collecting = False
        waiting.join(60)
        assert not waiting.is_alive()
        outrun(2)
        place = garbage._place
        place.awaits_entry = True
        assert not upkeep._is_full()
        place.awaits_entry = False
        garbage.progress_seconds -= 60
        assert not upkeep._is_full()
        outrun(2)
        assert upkeep._is_full()
        upkeep.stop()
        assert not upkeep._is_full()


def test_store_that_answers_is_no_store_that_hangs(tmp_path: Path) -> None:
    """The loss: a bucket with four times the live bytes. One request after the other was answered late, on a busy
    machine, and entries were let go as if the store had hung.
    """
    store = f"file://{tmp_path / 'store'}"
    with tidelog.open_engine(tmp_path / "e", keep_versions=1, store=store, rotate_max_bytes="64KiB") as engine:
        engine.apply(1, CreateBucket("b"))
        engine.update_low_water_mark(1)
        engine.ship()
        upkeep, clock = engine._upkeep, ManualClock()
        engine._core.clock = clock
        upkeep._is_collecting, upkeep._collects_at, upkeep._due_bytes = True, engine._core.written_bytes - 1000, 100
        upkeep.garbage()._go_on()
        upkeep.garbage().note_answers()
        clock.advance(60)
        assert not upkeep._is_full()
        assert isinstance(upkeep.cold, Shipping)
        upkeep.cold._objects.exists("anything")
        assert upkeep._is_full()


@pytest.mark.parametrize("has_store", [True, False])
def test_disk_and_bucket_stay_below_three_times_the_live_bytes_however_slow_collections_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_store: bool
) -> None:
    """Each of their steps takes long here, while entries come one after the other: what counts is bytes, not time."""
    keys, size, overwrites = 400, 4096, 5_000
    settings: dict[str, Any] = {"keep_versions": 1, "rotate_max_bytes": "64KiB", "local_retention_bytes": 0}
    if has_store:
        settings |= {"store": f"file://{tmp_path / 'store'}", "ship_interval_seconds": 3600}
    go_on = garbage_module.Garbage._go_on

    def go_on_slowly(self: garbage_module.Garbage) -> None:
        time.sleep(0.002)
        go_on(self)

    monkeypatch.setattr(garbage_module.Garbage, "_go_on", go_on_slowly)
    chance, live_bytes, most = random.Random(4), keys * size, {"e": 0, "store": 0}
    with tidelog.open_engine(tmp_path / "e", **settings) as engine:
        engine.apply(1, CreateBucket("b"))
        for first in range(0, keys + overwrites, 10):
            numbers = [n if n < keys else chance.randrange(keys) for n in range(first, first + 10)]
            puts = [PutObject("b", f"key-{number:04}", chance.randbytes(size)) for number in numbers]
            engine.apply_many(enumerate(puts, first + 2))
            engine.update_low_water_mark(engine.applied_seq)
            for place in most if first >= keys else ():
                files = (tmp_path / place).rglob("*")
                most[place] = max(most[place], sum(_size_of(one) for one in files))
        assert _garbage(engine).pieces_dropped > 10
    assert max(most.values()) < 3 * live_bytes, {place: found / live_bytes for place, found in most.items()}


def _size_of(path: Path) -> int:
    """0 if it is gone, or is no file."""
    with contextlib.suppress(FileNotFoundError):
        found = path.stat()
        return found.st_size if stat.S_ISREG(found.st_mode) else 0
    return 0


def test_files_of_the_log_are_small_beside_what_is_live(tmp_path: Path) -> None:
    """The loss: a file of 100 MB is kept as a whole by one value in it."""
    with tidelog.open_engine(tmp_path / "e", keep_versions=1) as engine:
        upkeep = engine._upkeep
        engine.apply(1, tidelog.CreateBucket("b"))
        upkeep._seals_at = engine._core.wal.next_position + 1000
        for seq in range(2, 12):
            engine.apply(seq, tidelog.PutObject("b", "k", b"v" * 500))
        assert len(engine._core.wal.spans()) == 2
        assert upkeep._seals_at > engine._core.wal.next_position + (1 << 20)


def test_entries_give_way_to_maintenance_that_waits() -> None:
    """Its turn is about as long as that of the last entries, within bounds."""
    turns = Turns()
    turns.entries_took(1e9)
    with turns as turn:
        assert not turn.is_over
        assert turns._is_taken.is_set()
    turns.give_way()  # nobody waits
    assert turns.applying.acquire(blocking=False)
    turns.applying.release()
