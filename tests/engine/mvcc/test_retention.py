"""Where history begins: by number, by age, and never where somebody still reads."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.engine.engines import SMALL, open_local
from tests.engine.stations import EngineNode, new_store

from tidelog.clock import ManualClock
from tidelog.engine.engine import Engine
from tidelog.engine.entry import CreateBucket, PutObject
from tidelog.engine.mvcc.retention import History
from tidelog.errors import InputError, NotFoundError

HOUR = 3600
VALUE = b"v" * 400


class Start:
    """Something that remembers where history begins."""

    history_start_seq = 0


def put(engine: Engine, seq: int) -> None:
    """One more version of an object, which is everywhere at once."""
    engine.apply(seq, CreateBucket("b") if seq == 1 else PutObject("b", f"k{seq % 4}", VALUE + b"%d" % seq))
    engine.update_low_water_mark(seq)


# Pins


def test_the_start_moves_up_to_the_oldest_pin() -> None:
    """And further when that is released; it never goes back."""
    history = History(Start())
    with history.pin(5) as seq:
        assert seq == 5
        later = history.pin(7)
        assert history.move_start(9) == 5
        assert history.least_pinned() == 5
    assert history.move_start(9) == 7
    later.release()
    later.release()
    assert history.pins == 0
    assert history.move_start(9) == 9
    assert history.move_start(3) == 9


def test_what_is_gone_cannot_be_pinned() -> None:
    """The error says from where on there is something."""
    history = History(Start())
    history.move_start(9)
    with pytest.raises(NotFoundError, match="before seq 9"):
        history.pin(8)
    history.pin(9).release()


def test_pins_of_one_seq_are_counted() -> None:
    """Each holds by itself; one that is forgotten holds nothing."""
    history = History(Start())
    first, second = history.pin(4), history.pin(4)
    first.release()
    assert history.move_start(9) == 4
    del second
    gc.collect()
    assert history.move_start(9) == 9


def test_long_listings_are_read_to_their_end(tmp_path: Path) -> None:
    """One that has begun, or was asked for, sees its state, whatever is collected meanwhile."""
    with open_local(tmp_path) as engine:
        engine.apply(1, CreateBucket("b"))
        engine.apply_many([(seq, PutObject("b", f"{seq:04d}", b"old")) for seq in range(2, 402)])
        engine.update_low_water_mark(401)
        begun, asked = engine.list_objects("b", seq=401), engine.list_objects("b", seq=401)
        assert next(begun).key == "0002"
        engine.apply_many([(seq, PutObject("b", f"{seq - 400:04d}", b"new")) for seq in range(402, 802)])
        engine.update_low_water_mark(801)
        assert engine.collect_garbage(horizon=801).history_start_seq == 401
        assert [item.seq for item in begun] == list(range(3, 402))
        del asked
        gc.collect()
        assert engine.collect_garbage(horizon=801).history_start_seq == 801
        with pytest.raises(NotFoundError):
            engine.list_objects("b", seq=401)


def test_a_pinned_state_is_kept(tmp_path: Path) -> None:
    """For as long as the block takes."""
    with open_local(tmp_path) as engine:
        for seq in range(1, 40):
            put(engine, seq)
        with engine.pin(10) as seq:
            before = engine.digest(seq)
            assert engine.collect_garbage(horizon=30).history_start_seq == 10
            assert engine.digest(seq) == before
            assert engine.statistics().garbage.pins == 1  # type: ignore[union-attr]
        assert engine.collect_garbage(horizon=30).history_start_seq == 30
        with pytest.raises(InputError, match="not applied yet"):
            engine.pin(40)


def test_an_open_transaction_holds_its_state(tmp_path: Path) -> None:
    """It reads what it has begun with."""
    with open_local(tmp_path) as engine:
        for seq in range(1, 20):
            put(engine, seq)
        with engine.transaction() as tx:
            assert tx.read("b", "k1").seq == 17
            for seq in range(20, 40):
                if seq % 4 != 1:
                    engine.apply(seq, PutObject("b", f"k{seq % 4}", VALUE))
            engine.update_low_water_mark(39)
            assert engine.collect_garbage(horizon=39).history_start_seq == 19
        assert engine.collect_garbage(horizon=39).history_start_seq == 39


# Age


def hourly(engine: Engine, clock: ManualClock, hours: int) -> None:
    """An entry an hour, the first one at once."""
    for seq in range(engine.applied_seq + 1, engine.applied_seq + 1 + hours):
        put(engine, seq)
        clock.advance(HOUR)


def test_versions_go_by_age_on_the_disk(tmp_path: Path) -> None:
    """Every state of the last ten hours is kept, and not many more; also after it was opened again."""
    clock, settings = ManualClock(), msgspec.structs.replace(SMALL, keep_seconds=10 * HOUR, rotate_max_bytes=8 << 10)
    for _ in range(2):
        with open_local(tmp_path, settings=settings, clock=clock) as engine:
            hourly(engine, clock, 60)
            last = engine.applied_seq
            start = engine.collect_garbage().history_start_seq
            assert last - 12 <= start <= last - 9
            clock.advance(HOUR // 2)
            assert engine.collect_garbage().history_start_seq <= last - 9
    clock.advance(100 * HOUR)
    with open_local(tmp_path, settings=settings, clock=clock) as engine:
        assert engine.collect_garbage().history_start_seq == engine.applied_seq


def test_marks_that_come_late_keep_versions_longer(tmp_path: Path) -> None:
    """What may be rolled back was not settled then: never is a state gone that is younger than it may be."""
    clock, settings = ManualClock(), msgspec.structs.replace(SMALL, keep_seconds=10 * HOUR)
    with open_local(tmp_path, settings=settings, clock=clock) as engine:
        for seq in range(1, 40):
            engine.apply(seq, CreateBucket("b") if seq == 1 else PutObject("b", "k", VALUE))
            clock.advance(HOUR)
        engine.rollback_to(30)
        engine.apply(31, PutObject("b", "k", VALUE))
        engine.update_low_water_mark(31)
        assert engine.collect_garbage().history_start_seq == 0
        clock.advance(11 * HOUR)
        assert engine.collect_garbage().history_start_seq == 31


@pytest.mark.parametrize("local_retention_bytes", [0, 1 << 30])
def test_versions_go_by_age_with_a_store(local_retention_bytes: int) -> None:
    """Times are read from the log here or there, and entries that were rolled back count for nothing."""
    clock = ManualClock()
    settings: dict[str, Any] = {
        "keep_seconds": 20 * HOUR,
        "local_retention_bytes": local_retention_bytes,
        "rotate_max_bytes": 4 << 10,
    }
    with EngineNode(new_store(clock), clock=clock, **settings).open() as node:
        engine = node.engine
        for _ in range(8):
            hourly(engine, clock, 10)
            engine.apply_many([(seq, PutObject("b", "lost", VALUE)) for seq in range(500, 505)])
            engine.rollback_to(engine.low_water_mark)
            engine.ship()
            engine.create_checkpoint()
        engine.ship()
        assert (engine.statistics().wal.first_lsn > 1) == (local_retention_bytes == 0)
        last = engine.applied_seq
        start = engine.collect_garbage().history_start_seq
        assert last - 32 <= start <= last - 19, "an object has about ten entries"
        clock.advance(20 * HOUR)
        assert engine.collect_garbage().history_start_seq == last


def test_age_and_number_keep_what_either_does(tmp_path: Path) -> None:
    """A version goes when it is old, and not among the newest."""
    clock = ManualClock()
    settings = msgspec.structs.replace(SMALL, keep_seconds=10 * HOUR, keep_versions=3)
    with open_local(tmp_path, settings=settings, clock=clock) as engine:
        hourly(engine, clock, 60)
        clock.advance(100 * HOUR)
        engine.collect_garbage()
        assert [version.seq for version in engine.versions("b", "k0")] == [60, 56, 52]
        assert engine.read("b", "k0", 53).seq == 52


# Who holds it back


def test_a_plan_says_who_holds_the_horizon_back(tmp_path: Path) -> None:
    """The strictest of all: a mark, a reader, a transaction; nobody when it is where it was wanted."""
    with open_local(tmp_path / "e", settings=msgspec.structs.replace(SMALL, keep_versions=1)) as engine:
        for seq in range(1, 11):
            put(engine, seq)
        assert engine.plan_garbage().held_back_by is None
        engine.apply(11, PutObject("b", "k", VALUE))
        assert "low-water mark: what is above seq 10" in str(engine.plan_garbage().held_back_by)
        assert engine.plan_garbage(9).held_back_by is None
        with engine.transaction() as transaction, engine.pin(8):
            assert engine.plan_garbage(9).held_back_by == "a reader that has pinned the state of seq 8"
            with engine.pin(9):
                assert engine.plan_garbage(8).held_back_by is None
            assert transaction.seq == 11
        with engine.pin(3):
            engine.collect_garbage()
        assert engine.plan_garbage(2).horizon_seq == 3


def test_in_a_store_what_is_not_shipped_holds_it_back() -> None:
    """A restore begins with what is there."""
    with EngineNode(new_store(), keep_versions=1).open() as node:
        node.apply(20)
        node.ship_all()
        assert node.engine.plan_garbage().held_back_by is None
        shipped = node.engine.applied_seq
        node.apply(5)
        node.engine.update_low_water_mark(node.engine.applied_seq)
        assert f"what is above seq {shipped} is not in the store" in str(node.engine.plan_garbage().held_back_by)
