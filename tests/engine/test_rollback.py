"""Rolling back: what the orchestrator threw away is gone, whatever came before and after."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tests.engine.engines import RandomEntries, assert_same, copy_alive, is_missing, open_local
from tests.engine.model import Model, batch

import tidelog
from tidelog.engine.engine import Engine
from tidelog.engine.entry import Batch, CreateBucket, Entry, ObjectInfo, PutObject, Result
from tidelog.engine.mvcc.retention import Pin
from tidelog.engine.mvcc.versions import LISTED_ROWS
from tidelog.engine.recovery.recovery import Undo
from tidelog.errors import ConflictError, InputError
from tidelog.testing import FaultyFiles


@pytest.mark.parametrize("seed", range(10))
def test_many_rollbacks_leave_what_the_model_says(tmp_path: Path, seed: int) -> None:
    """Forward and back in turns, by little and by much, with checkpoints and openings in between."""
    chance = random.Random(seed)
    source, model = RandomEntries(seed, largest=1200), Model()
    engine = open_local(tmp_path / "e")
    for _ in range(12):
        for seq, entry in source.entries(chance.randint(1, 30), model.applied_seq + 1):
            engine.apply(seq, entry)
            model.apply(seq, entry)
        target = chance.randint(max(0, model.applied_seq - 40), model.applied_seq)
        if target >= engine.low_water_mark:
            engine.rollback_to(target)
            if target < model.applied_seq:
                model.roll_back(target)
        match chance.randrange(4):
            case 0:
                engine.create_checkpoint()
            case 1:
                engine.close()
                engine = open_local(tmp_path / "e")
            case 2:
                engine.update_low_water_mark(chance.randint(engine.low_water_mark, engine.applied_seq))
        assert_same(engine, model)
    assert_same(engine, model, chance.sample(sorted(model.states), min(8, len(model.states))))
    engine._core.tree.check()
    engine.close()


def test_a_rollback_that_was_cut_off_is_finished_by_the_next_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine stands where the rollback leads to, and takes from there on what comes instead."""
    files, left = FaultyFiles(), list[FaultyFiles]()

    def finish(undo: Undo, target_seq: int, begin_lsn: int) -> int:
        undo._wal.commit()
        left.append(files.after_crash("keep"))
        return real(undo, target_seq, begin_lsn)

    real = Undo._finish
    monkeypatch.setattr(Undo, "_finish", finish)
    puts = [(seq, PutObject("b", f"k{seq}", b"v")) for seq in range(2, 20)]
    with open_local(Path("/engine"), files) as engine:
        engine.apply_many([(1, CreateBucket("b")), *puts])
        digest = engine.digest(5)
        engine.rollback_to(5)
    with open_local(Path("/engine"), left[0]) as again:
        assert again._core.recovery.finished_rollback
        assert (again.applied_seq, again.digest()) == (5, digest)
        assert again.apply(6, PutObject("b", "k6", b"another")).applied


# Whoever reads meanwhile

MANY = 2 * LISTED_ROWS


def filled(directory: Path, data: bytes = b"old") -> Engine:
    """Objects of two seqs: the bucket is below the low-water mark, what is in it above."""
    engine = open_local(directory)
    engine.apply(1, CreateBucket("b"))
    engine.update_low_water_mark(1)
    engine.apply(2, Batch([PutObject("b", f"{number:04}", data) for number in range(MANY)]))
    return engine


def replace_end(engine: Engine, data: bytes = b"of the new end") -> None:
    """The orchestrator's log loses its end, and gets another one under the same seq."""
    engine.rollback_to(1)
    engine.apply(2, Batch([PutObject("b", f"{number:04}", data) for number in range(MANY)]))


def test_a_listing_that_a_rollback_cuts_across_ends_with_an_error(tmp_path: Path) -> None:
    """It had the first objects of the old state and the others of the new one."""
    with filled(tmp_path / "e") as engine:
        listing, small = engine.list_objects("b"), engine.list_objects("b", "000")
        sizes = {next(listing).size, next(small).size}
        replace_end(engine)
        for found in (listing, small):
            with pytest.raises(ConflictError, match="that seq now names a different state"):
                sizes |= {item.size for item in found}
        assert sizes == {len(b"old")}
        assert {item.size for item in engine.list_objects("b")} == {len(b"of the new end")}
        below = engine.list_objects("b", seq=1)
        engine.rollback_to(1)
        assert list(below) == []  # at or below the target nothing changes


def test_a_listing_in_a_loop_ends_with_an_error(tmp_path: Path) -> None:
    """The same for tasks, which read some objects at a time."""

    async def rest_of(listing: AsyncIterator[ObjectInfo]) -> None:
        async for item in listing:
            assert item.size == len(b"old")

    async def play() -> None:
        with filled(tmp_path / "e") as engine:
            listing = engine.list_objects_async("b")
            await anext(listing)
            replace_end(engine)
            with pytest.raises(ConflictError):
                await rest_of(listing)

    with patch("tidelog.store.aio.ITEMS_AT_ONCE", 10):
        asyncio.run(play())


def pinned(engine: Engine, read: Callable[[int], object]) -> None:
    """A block with a pin of the newest state, while the end of the log is replaced."""
    with engine.pin() as seq:
        before = engine.digest(seq)
        replace_end(engine, before.encode())
        assert engine.digest(seq) != before
        read(seq)


def test_a_pin_that_a_rollback_cuts_across_ends_with_an_error(tmp_path: Path) -> None:
    """The digest at a pinned seq became another one. What is not found because of it is told so; other errors stay."""
    with filled(tmp_path / "e") as engine:
        with pytest.raises(ConflictError):
            pinned(engine, lambda seq: None)
        with pytest.raises(ConflictError):
            pinned(engine, lambda seq: engine.read("b", "nothing", seq))
        with pytest.raises(ZeroDivisionError):
            pinned(engine, lambda seq: 1 // 0)
        engine.rollback_to(1)
        pin = engine.pin()
        with pin as seq:
            engine.apply(2, CreateBucket("c"))
            engine.rollback_to(1)
            pin.check()
            assert seq == 1


@pytest.mark.parametrize("is_given", [True, False])
def test_a_pin_is_of_a_state_that_was_there_when_it_was_taken(tmp_path: Path, is_given: bool) -> None:
    """The end is rolled back between the look at the applied seq and the pin."""
    with filled(tmp_path / "e") as engine:
        history = engine._core.history
        taken = history.pin

        def late(seq: int) -> Pin:
            history.pin = taken  # type: ignore[method-assign]
            engine.rollback_to(1)
            return taken(seq)

        history.pin = late  # type: ignore[method-assign]
        if is_given:
            with pytest.raises(InputError, match="not applied yet"):
                engine.pin(2)
        else:
            with engine.pin() as seq:
                assert seq == 1
        assert history.pins == 0


@pytest.mark.parametrize(
    ("look", "step"), [(Engine.digest, "objects"), (lambda engine: engine.versions("b", "0000"), "history")]
)
def test_a_look_that_a_rollback_cuts_across_gives_nothing(
    tmp_path: Path, look: Callable[[Engine], object], step: str
) -> None:
    """Neither a digest nor a history of an object is of two states."""
    with filled(tmp_path / "e") as engine:
        take = getattr(engine._versions, step)

        def taken(*args: Any, **options: Any) -> Iterator[Any]:
            yield from take(*args, **options)
            replace_end(engine)

        with patch.object(engine._versions, step, taken), pytest.raises(ConflictError):
            look(engine)
        look(engine)


def test_a_seq_that_was_rolled_back_is_free_again(tmp_path: Path) -> None:
    """Another entry may have it, and then that one is what it was."""
    with open_local(tmp_path / "e") as engine:
        engine.apply(1, CreateBucket("b"))
        engine.apply(2, PutObject("b", "k", b"thrown away"))
        engine.rollback_to(1)
        assert engine.applied_seq == 1
        assert is_missing(engine, "b", "k")
        assert engine.apply(2, PutObject("b", "k", b"stays")).applied
        assert engine.apply(2, PutObject("b", "k", b"stays")).applied
        with pytest.raises(InputError, match="another entry"):
            engine.apply(2, PutObject("b", "k", b"thrown away"))
        assert engine.read("b", "k").data == b"stays"


@pytest.mark.parametrize("seed", range(4))
def test_what_comes_again_between_rollbacks_is_compared_with_what_counts(tmp_path: Path, seed: int) -> None:
    """The entry that has a seq now, and none that had it before."""
    chance, source = random.Random(seed), RandomEntries(seed)
    counts: dict[int, tuple[Entry, Result]] = {}
    thrown_away: dict[int, Entry] = {}
    with open_local(tmp_path / "e") as engine:
        for _ in range(12):
            for seq, entry in source.entries(chance.randint(5, 40), engine.applied_seq + 1):
                counts[seq] = entry, engine.apply(seq, entry)
            for seq in chance.sample(sorted(counts), min(10, len(counts))):
                assert engine.apply(seq, counts[seq][0]) == counts[seq][1]
            for seq in sorted(counts.keys() & thrown_away.keys())[-5:]:
                if thrown_away[seq] != counts[seq][0]:
                    with pytest.raises(InputError, match="another entry"):
                        engine.apply(seq, thrown_away[seq])
            target = chance.randint(max(0, engine.applied_seq - 60), engine.applied_seq)
            engine.rollback_to(target)
            for seq in [seq for seq in counts if seq > target]:
                thrown_away[seq] = counts.pop(seq)[0]


def test_an_engine_that_has_not_come_so_far_has_nothing_to_take_back(tmp_path: Path) -> None:
    """An orchestrator that repeats a rollback after a crash need not know how far this engine was."""
    with open_local(tmp_path / "e") as engine:
        engine.apply(1, CreateBucket("b"))
        for seq in (1, 2, 1 << 40):
            engine.rollback_to(seq)
        assert (engine.applied_seq, engine.list_buckets()) == (1, ["b"])


def test_nothing_below_the_low_water_mark_is_taken_back(tmp_path: Path) -> None:
    """All replicas have it. The mark is remembered when the engine is opened again."""
    with open_local(tmp_path / "e") as engine:
        engine.apply_many([(1, CreateBucket("b")), (2, PutObject("b", "k", b"")), (3, PutObject("b", "k", b""))])
        engine.update_low_water_mark(2)
    with open_local(tmp_path / "e") as engine:
        assert engine.low_water_mark == 2
        with pytest.raises(InputError, match="low-water mark"):
            engine.rollback_to(1)
        engine.rollback_to(2)
        engine.rollback_to(7)
        assert engine.applied_seq == 2


def test_the_low_water_mark_cannot_pass_what_was_applied(tmp_path: Path) -> None:
    """An older one that comes late is fine."""
    with open_local(tmp_path / "e") as engine:
        engine.apply(5, CreateBucket("b"))
        with pytest.raises(InputError, match="low-water mark"):
            engine.update_low_water_mark(6)
        engine.update_low_water_mark(5)
        engine.update_low_water_mark(3)
        assert engine.low_water_mark == 5


def test_more_empty_leaves_in_a_row_than_fit_into_memory(tmp_path: Path) -> None:
    """A rollback leaves the leaves of what it took back. Reads, listings and opening go over them and end."""
    keys = [f"{number:04d}" + "long" * 220 for number in range(900)]
    with open_local(tmp_path / "e") as engine:
        engine.apply_many(
            [(1, CreateBucket("b")), (2, PutObject("b", "0", b"first")), (3, PutObject("b", "z", b"last"))]
        )
        digest = engine.digest()
        engine.apply_many([(seq, PutObject("b", key, b"v")) for seq, key in enumerate(keys, 4)])
        engine.rollback_to(3)
        assert engine.digest() == digest
        assert engine._core.tree.check().pages > 2 * engine._core.pool.capacity_pages
    with open_local(tmp_path / "e") as engine:
        assert engine.digest() == digest
        assert [item.key for item in engine.list_objects("b")] == ["0", "z"]
        assert all(is_missing(engine, "b", key) for key in keys[::90])
        assert engine.read("b", "z").data == b"last"
        assert engine.apply(4, PutObject("b", keys[400], b"again")).applied
        assert [item.key for item in engine.list_objects("b")] == ["0", keys[400], "z"]


def test_a_batch_that_was_torn_and_came_again_is_rolled_back_once(tmp_path: Path) -> None:
    """What recovery took back is passed over, although it has the seq of what is rolled back."""
    puts = batch(*(PutObject("b", f"k{number}", b"v" * 300) for number in range(5)))
    with open_local(tmp_path / "whole") as engine:
        engine.apply(1, CreateBucket("b"))
        before = engine.digest()
        engine.apply(2, puts)
        copy_alive(tmp_path / "whole", tmp_path / "torn")
    newest = max((tmp_path / "torn" / "wal").glob("wal.*.log"), key=lambda path: int(path.name.split(".")[1]))
    os.truncate(newest, newest.stat().st_size - 100)
    with open_local(tmp_path / "torn") as engine:
        assert engine._core.recovery.undone_seq == 2
        assert engine.digest() == before
        assert engine.apply(2, puts).applied
        assert len(list(engine.list_objects("b"))) == 5
        engine.rollback_to(1)
        assert engine.digest() == before
        engine._core.tree.check()


def test_a_mark_that_comes_during_a_rollback_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is then one of what is gone, and is refused: the marks keep their order."""
    with open_local(tmp_path / "e") as engine:
        engine.apply_many([(1, CreateBucket("b")), *((seq, PutObject("b", f"{seq}", b"v")) for seq in range(2, 50))])
        told: list[BaseException] = []

        def raise_mark() -> None:
            try:
                engine.update_low_water_mark(40)
            except InputError as error:
                told.append(error)

        other = threading.Thread(target=raise_mark)
        real = engine._core.roll_back

        def roll_back(seq: int) -> None:
            other.start()
            other.join(0.05)
            assert other.is_alive()
            real(seq)

        monkeypatch.setattr(engine._core, "roll_back", roll_back)
        engine.rollback_to(20)
        other.join(120)
        assert "above applied_seq 20" in str(told[0])
        assert (engine.applied_seq, engine.low_water_mark) == (20, 0)


def test_rolling_back_right_after_a_restore(tmp_path: Path) -> None:
    """What came from the store was everywhere, and stays; what came since goes."""
    store, model = (tmp_path / "store").as_uri(), Model()
    entries = RandomEntries("restored").entries(120)
    for seq, entry in entries:
        model.apply(seq, entry)
    shipped, some, all_of_them = entries[79][0], entries[99][0], entries[-1][0]
    with tidelog.open_engine(tmp_path / "lost", store=store) as engine:
        engine.apply_many(entries)
        engine.update_low_water_mark(shipped)
        engine.create_checkpoint()
    with tidelog.restore_engine(tmp_path / "new", store=store) as engine:
        engine.rollback_to(engine.applied_seq)
        with pytest.raises(InputError, match="below the low-water mark"):
            engine.rollback_to(shipped - 1)
        assert engine.digest() == model.digest(shipped)
        engine.apply_many(entries[80:])
        for seq in (some, shipped):
            engine.rollback_to(seq)
            assert engine.digest() == model.digest(seq)
        engine.apply_many(entries[80:])
        assert engine.digest() == model.digest(all_of_them)
