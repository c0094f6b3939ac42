"""States of several files: restored from as from any other, and damage in one of them is named and passed over."""

from __future__ import annotations

import logging
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.compacting import checkpoint_by_hand, compact_by_hand
from tests.engine.stations import DIRECTORY, KEYS, EngineNode, new_store, successor

from tidelog.engine.cold.manifest import StoredCheckpoint
from tidelog.engine.recovery.checkpoint import MARKER
from tidelog.engine.sst.blob_file import BlobPointer, encode_version
from tidelog.engine.sst.block import Row
from tidelog.engine.sst.snapshot import StoredState, write_parts_state
from tidelog.engine.sst.sstable import RowPart, encode_sstable
from tidelog.errors import CorruptionError, DataError, InputError, NotFoundError, TidelogError
from tidelog.store.keys import CheckpointId, StatePartId
from tidelog.testing import Crash, FaultyFiles, FaultyStore

ROWS = st.dictionaries(st.binary(min_size=1, max_size=20), st.binary(min_size=1, max_size=60), max_size=40).map(
    lambda rows: sorted(rows.items())
)
PLACE = BlobPointer(0, 1, 2, 3)


def parts_of(store: FaultyStore, rows: list[Row], rows_a_file: int = 7) -> list[RowPart]:
    """Row files with these rows; every other cell has a place."""
    parts = []
    for at in range(0, len(rows), rows_a_file):
        some = [
            (key, encode_version(cell, PLACE if len(cell) % 2 else None)) for key, cell in rows[at : at + rows_a_file]
        ]
        encoded = encode_sstable("versions", some)
        key = KEYS.state_part(StatePartId(9, 30, encoded.digest))
        store.put(key, encoded.data)
        parts.append(encoded.part(key))
    return parts


def written(store: FaultyStore, parts: list[RowPart], created_us: int = 5) -> StoredCheckpoint:
    """A state of these files."""
    return write_parts_state(store, KEYS, CheckpointId(9, 30, 2), parts, created_us=created_us, history_start_seq=4)


def some_rows(count: int) -> list[Row]:
    return [(b"key-%05d" % number, b"cell-%d" % number) for number in range(count)]


@given(ROWS)
def test_what_was_written_is_read(rows: list[Row]) -> None:
    """All rows without their places, with files fetched ahead or not; no rows at all are a state too."""
    store = new_store()
    parts = parts_of(store, rows)
    listed = written(store, parts)
    state = StoredState(store, listed)
    assert list(state.rows()) == rows
    with ThreadPoolExecutor(3) as fetchers:
        assert list(state.rows(fetchers)) == rows
    assert state.parts() == tuple(parts)
    footer = state.footer
    assert (footer.seq, footer.lsn, footer.epoch, footer.rows, footer.history_start_seq) == (9, 30, 2, len(rows), 4)
    assert state.stored_bytes == listed.size + sum(part.size for part in parts)


def test_written_again_it_is_the_same() -> None:
    """At whatever time. Its name has its digest."""
    store = new_store()
    parts = parts_of(store, some_rows(20))
    first, again = written(store, parts, 5), written(store, parts, 6)
    assert msgspec.structs.replace(again, created_us=5) == first
    name = KEYS.parse_checkpoint(first.key)
    assert name is not None
    assert name.digest in first.key


def test_few_requests() -> None:
    """One for each file, and three for what it says about itself."""
    store = new_store()
    listed = written(store, parts_of(store, some_rows(70)))
    store.reset_traffic()
    assert len(list(StoredState(store, listed).rows())) == 70
    assert store.traffic.requests["read_range"] <= 10 + 3


def test_every_flipped_bit_is_noticed() -> None:
    """In the state, or in one of its files; the file is named."""
    store = new_store()
    parts = parts_of(store, some_rows(14))
    listed = written(store, parts)
    for key in (listed.key, parts[0].key, parts[1].key):
        good = store.contents()[key]
        for byte in range(len(good)):
            bad = bytearray(good)
            bad[byte] ^= 1 << byte % 8
            store.put(key, bytes(bad))
            with pytest.raises(CorruptionError) as caught:
                list(StoredState(store, listed).rows())
            assert str(caught.value.path) == key
        store.put(key, good)
    store.delete(parts[1].key)
    with pytest.raises(NotFoundError):
        list(StoredState(store, listed).rows())


@pytest.mark.parametrize("changes", [{"rows": 8}, {"digest": "00"}, {"seq": 8}, {"lsn": 31}, {"size": 20}])
def test_a_state_that_is_another(changes: dict[str, Any]) -> None:
    """What the manifest says about it must be so."""
    store = new_store()
    listed = written(store, parts_of(store, some_rows(9)))
    with pytest.raises(DataError):
        StoredState(store, msgspec.structs.replace(listed, **changes))


def test_files_out_of_order_are_no_state() -> None:
    """Neither written nor read."""
    store = new_store()
    parts = parts_of(store, some_rows(20))
    with pytest.raises(InputError, match="order"):
        written(store, parts[::-1])
    with pytest.raises(InputError, match="order"):
        written(store, [parts[0], parts[0]])


def test_an_engine_is_restored_from_it() -> None:
    """With the log behind it, and what was rolled back gone."""
    store = new_store()
    with EngineNode(store).open() as node:
        node.apply(300)
        node.ship_all()
        checkpoint_by_hand(store)
        node.apply(80)
        node.roll_back(node.engine.applied_seq - 30)
        node.apply(60)
        node.ship_all()
        mark = node.view.manifest.high_water_mark
        digest = node.engine.digest(mark)
        with successor(node) as other:
            report = other.restore()
            other.open(connects=False)
            other.assert_same()
            assert other.engine.digest(mark) == digest
            assert (report.seq, report.damaged_states) == (mark, ())
            assert 0 < report.state_seq < mark


def test_a_compaction_brings_such_a_state() -> None:
    """Its version index is the state: nothing is behind it, so no record is read."""
    store = new_store()
    with EngineNode(store).open() as node:
        node.apply(300)
        node.ship_all()
        root = compact_by_hand(store)
        mark = node.view.manifest.high_water_mark
        digest = node.engine.digest(mark)
        with successor(node) as other:
            report = other.restore()
            other.open(connects=False)
            other.assert_same()
            assert other.engine.digest(mark) == digest
            assert (report.state_seq, report.entries, report.rows) == (mark, 0, sum(one.rows for one in root.versions))


@pytest.mark.parametrize("is_missing", [True, False])
def test_damage_in_a_file_leads_to_the_state_before(is_missing: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The restore says which file it is, and is complete all the same."""
    store = new_store()
    with EngineNode(store).open() as node:
        node.apply(200)
        node.ship_all()
        node.engine.create_checkpoint()
        node.apply(100)
        node.ship_all()
        damaged = checkpoint_by_hand(store)
        part = StoredState(store, damaged).parts()[2]
        if is_missing:
            store.delete(part.key)
        else:
            bad = bytearray(store.contents()[part.key])
            bad[len(bad) // 2] ^= 1
            store.put(part.key, bytes(bad))
        with successor(node) as other, caplog.at_level(logging.WARNING):
            report = other.restore()
            other.open(connects=False)
            other.assert_same()
        assert report.damaged_states == (damaged.key,)
        assert 0 < report.state_seq < damaged.seq
        assert part.key in caplog.text
        if not is_missing:
            assert "at byte" in caplog.text


def test_without_a_good_state_the_compaction_is_one() -> None:
    """Its versions are what a restore begins with then, and the log behind them."""
    store = new_store()
    with EngineNode(store).open() as node:
        node.apply(200)
        node.ship_all()
        root = compact_by_hand(store)
        node.apply(50)
        node.ship_all()
        node.engine.create_checkpoint()
        listed = node.view.manifest.checkpoints
        for state in listed:
            store.put(state.key, b"x" * state.size)
        with successor(node) as other:
            report = other.restore()
            other.open(connects=False)
            other.assert_same()
        assert report.state_seq == root.seq
        assert report.entries > 0
        assert report.damaged_states == tuple(state.key for state in reversed(listed))


def test_with_nothing_good_at_all_the_log_is_replayed() -> None:
    """As long as it is there."""
    store = new_store()
    with EngineNode(store).open() as node:
        node.apply(100)
        node.ship_all()
        root = compact_by_hand(store)
        store.delete(root.versions[0].key)
        with successor(node) as other:
            report = other.restore()
            other.open(connects=False)
            other.assert_same()
        assert report.state_seq == 0
        assert len(report.damaged_states) == 2


def compacted_engine() -> tuple[FaultyStore, EngineNode, str]:
    """A store with a compaction and a little log behind it, its node that is gone, and the digest of its state."""
    store = new_store()
    node = EngineNode(store).open()
    node.apply(80)
    node.ship_all()
    compact_by_hand(store, rows_a_file=25)
    node.apply(30)
    node.ship_all()
    digest = node.engine.digest()
    node.crash()
    return store, node, digest


def test_no_bit_in_the_store_matters_unnoticed() -> None:
    """Whichever bit of whichever object flips: the restored engine is the right one, or an error says why not."""
    store, _, digest = compacted_engine()
    good, chance = store.contents(), random.Random(7)
    for key, data in sorted(good.items()):
        for _ in range(2):
            copied = new_store()
            for other_key, other_data in good.items():
                copied.put(other_key, other_data)
            bad = bytearray(data)
            bad[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            copied.put(key, bytes(bad))
            other = EngineNode(copied, name="b")
            try:
                other.restore()
            except TidelogError:
                continue
            with other.open(connects=False):
                assert other.engine.digest() == digest, key


def test_a_restore_may_be_cut_off_anywhere_and_begun_again() -> None:
    """What was cut off leaves nothing that the next one takes for good."""
    _, node, digest = compacted_engine()
    cuts = 0
    for crash_at in range(1, 400, 9):
        cut = successor(node)
        cut.files = FaultyFiles(crash_at=crash_at)
        try:
            cut.restore()
        except Crash:
            cuts += 1
        else:
            break
        again = successor(node)
        again.files = cut.files.after_crash("tear", seed=crash_at)
        if again.files.is_directory(DIRECTORY) and not again.files.exists(DIRECTORY / MARKER):
            continue  # it was complete, but for the last sync
        again.restore()
        with again.open(connects=False):
            assert again.engine.digest() == digest
    assert cuts > 3
