"""Files of an engine's log leave the disk when the store has them, and not before."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.engine.stations import EngineNode, new_store

from tidelog.engine.cold.shipping import removable_below
from tidelog.engine.entry import CreateBucket, PutObject
from tidelog.engine.wal import ship_watermark as gate
from tidelog.engine.wal.files import WalSpan
from tidelog.errors import InputError, StoreUnavailableError


def spans(count: int, size: int = 100) -> list[WalSpan]:
    """Files of ten records each."""
    return [WalSpan(Path(f"{n}"), 10 * n + 1, 10 * n + 11, size * n, size * n + size, 0) for n in range(count)]


@pytest.mark.parametrize(
    ("limit_lsn", "hot_bytes", "expected"),
    [
        (1000, 0, 41),  # all but the last
        (1000, 250, 31),
        (1000, 500, 0),
        (25, 0, 21),  # only whole files below the limit
        (1, 0, 0),
    ],
)
def test_which_files_may_go(limit_lsn: int, hot_bytes: int, expected: int) -> None:
    """Oldest first, below the limit, while there is too much."""
    assert removable_below(spans(5), limit_lsn, hot_bytes, lambda span: False) == expected


def test_what_was_read_lately_stays_longer() -> None:
    """As long as there is not twice as much as wanted."""
    read = {21}
    assert removable_below(spans(5), 1000, 250, lambda span: span.first_lsn in read) == 21
    assert removable_below(spans(5), 1000, 100, lambda span: span.first_lsn == 1) == 41


def test_files_leave_when_they_are_shipped_and_not_needed() -> None:
    """Values are read from the store then, and everything is as it was."""
    with EngineNode(new_store(), local_retention_bytes=0).open() as node:
        node.apply(200)
        node.ship_all()
        assert node.core.wal.first_lsn == 1, "no checkpoint yet: opening needs all of the log"
        node.engine.create_checkpoint()
        node.engine.ship()
        assert node.core.wal.first_lsn > 1
        assert node.shipping.statistics().purged_bytes > 0
        node.assert_same(sorted(node.model.states)[::20])
        node.close()
        with node.open():
            node.assert_same(sorted(node.model.states)[::20])


def test_nothing_leaves_that_is_not_shipped() -> None:
    """However little room there is to be."""
    with EngineNode(new_store(), local_retention_bytes=0).open() as node:
        node.apply(200)
        node.engine.update_low_water_mark(1)
        node.engine.create_checkpoint()
        assert node.shipping.purge() == 0
        assert node.core.wal.first_lsn == 1


def test_nothing_leaves_that_is_not_in_the_store_any_more() -> None:
    """The objects are looked for right before: one that is gone keeps its files here."""
    store = new_store()
    with EngineNode(store, local_retention_bytes=1 << 30).open() as node:
        node.apply(200)
        node.ship_all()
        node.engine.create_checkpoint()
        store.delete(node.view.object_keys()[0])
        node.core.wal.seal()
        node.core.settings = msgspec.structs.replace(node.core.settings, local_retention_bytes=0)
        assert node.shipping.purge() == 0
        assert node.core.wal.first_lsn == 1


def test_a_store_that_is_away_keeps_everything_here() -> None:
    """An error while asking deletes nothing."""
    store = new_store()
    with EngineNode(store, local_retention_bytes=1 << 30).open() as node:
        node.apply(200)
        node.ship_all()
        node.engine.create_checkpoint()
        node.core.settings = msgspec.structs.replace(node.core.settings, local_retention_bytes=0)
        store.fail("*", times=None)
        with pytest.raises(StoreUnavailableError):
            node.shipping.purge()
        assert node.core.wal.first_lsn == 1
        store.heal()


def test_entries_that_come_again_after_their_files_left_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An orchestrator may repeat what is long in the store: that is no error, and another entry still is one."""
    monkeypatch.setattr(gate, "_KNOWN_EXACTLY", 64)
    monkeypatch.setattr(gate, "_SAMPLE_EVERY", 16)
    puts = [(seq, PutObject("bucket", f"key-{seq}", b"x" * 300)) for seq in range(2, 600)]
    with EngineNode(new_store(), local_retention_bytes=0).open() as node:
        node.engine.apply_many([(1, CreateBucket("bucket")), *puts])
        assert node.engine.apply(*puts[20]).status == "applied"
        node.ship_all()
        node.engine.create_checkpoint()
        node.engine.ship()
        assert node.core.wal.first_lsn > 500
        for seq, entry in (puts[3], puts[20], puts[200], puts[-3]):
            assert node.engine.apply(seq, entry).status == "applied"
        with pytest.raises(InputError, match="seq 22"):
            node.engine.apply(22, PutObject("bucket", "key-22", b"something else"))


def test_so_much_stays_as_was_asked_for() -> None:
    """The newest files stay, up to the bound."""
    with EngineNode(new_store(), local_retention_bytes=64 << 10).open() as node:
        node.apply(400)
        node.ship_all()
        node.engine.create_checkpoint()
        node.engine.ship()
        kept = sum(span.next_position - span.first_position for span in node.core.wal.spans())
        assert (64 << 10) - (20 << 10) < kept <= (64 << 10) + (20 << 10)
