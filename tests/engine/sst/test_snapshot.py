"""States in the store: what is written is what is read, and old ones go by a plan."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.stations import KEYS, EngineNode, new_store

from tidelog.clock import ManualClock
from tidelog.engine.cold.manifest import Pinning, StoredCheckpoint
from tidelog.engine.mvcc.cells import seq_of
from tidelog.engine.sst.block import (
    HEADER_BYTES,
    Row,
    block_bytes,
    count_of,
    decode_block,
    encode_packed_blocks,
    pack_rows,
    rows_in,
)
from tidelog.engine.sst.snapshot import StoredState, write_parts_state, write_row_parts
from tidelog.errors import CorruptionError, DataError, StoreUnavailableError, TidelogError
from tidelog.store.keys import CheckpointId, digest_of
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.testing import FaultyStore

ROWS = st.dictionaries(st.binary(min_size=1, max_size=40), st.binary(min_size=1, max_size=60), max_size=60)


def written(store: FaultyStore, rows: list[Row], seq: int = 9) -> StoredCheckpoint:
    """A state with these rows."""
    name = CheckpointId(seq, 30, 2)
    parts = write_row_parts(store, KEYS, name, iter(rows), level=3)
    return write_parts_state(store, KEYS, name, parts, created_us=5, history_start_seq=4)


def many_rows(count: int) -> list[Row]:
    """Rows for several blocks: they do not compress well."""
    chance = random.Random(count)
    return [(b"key-%08d" % number, chance.randbytes(chance.randrange(1, 1000))) for number in range(count)]


@given(ROWS)
def test_what_was_written_is_read(rows: dict[bytes, bytes]) -> None:
    """All rows, in order, and what it is a state of."""
    store, wanted = new_store(), sorted(rows.items())
    listed = written(store, wanted)
    state = StoredState(store, listed)
    assert list(state.rows()) == wanted
    footer = state.footer
    assert (footer.seq, footer.lsn, footer.epoch, footer.rows, footer.history_start_seq) == (9, 30, 2, len(rows), 4)


def test_owner_cuts_rows_into_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are about as large as the limit says, in key order, and each is read with one request."""
    monkeypatch.setattr("tidelog.engine.sst.snapshot._FILE_BYTES", 1 << 20)
    store, rows = new_store(), many_rows(12_000)
    store.reset_traffic()
    listed = written(store, rows)
    state = StoredState(store, listed)
    parts = state.parts()
    assert 4 < len(parts) < 10
    assert store.traffic.requests["read_range"] == 1
    assert list(state.rows()) == rows
    assert store.traffic.requests["read_range"] == 1 + len(parts)
    assert (parts[0].first_key, parts[-1].last_key) == (rows[0][0], rows[-1][0])
    assert listed.rows == len(rows)


def test_document_of_another_size_or_version_is_refused() -> None:
    """A manifest that names a huge document makes nobody read it, and neither does one of another kind."""
    store = new_store()
    listed = written(store, many_rows(60))
    with pytest.raises(CorruptionError, match="too large"):
        StoredState(store, msgspec.structs.replace(listed, size=1 << 40))
    data = store.contents()[listed.key].replace(b"engine-snapshot 1", b"engine-snapshot 2")
    key = KEYS.checkpoint(CheckpointId(9, 30, 2, digest_of(data)))
    store.put(key, data)
    with pytest.raises(CorruptionError, match="reads version 1"):
        StoredState(store, msgspec.structs.replace(listed, key=key))


def test_a_state_that_is_cut_short_is_noticed() -> None:
    """As is one with something behind it."""
    store = new_store()
    listed = written(store, many_rows(60))
    good = store.contents()[listed.key]
    for bad in (b"", good[:7], good[: len(good) // 2], good[:-1], good + b"x"):
        store.tamper(listed.key, bad)
        with pytest.raises(DataError):
            list(StoredState(store, listed).rows())


@pytest.mark.parametrize("changes", [{"seq": 8}, {"lsn": 31}, {"epoch": 1}, {"rows": 59}, {"digest": "0" * 64}])
def test_it_must_be_the_one_that_the_manifest_means(changes: dict[str, Any]) -> None:
    """Another good state in its place is not taken for it."""
    store = new_store()
    listed = written(store, many_rows(60))
    with pytest.raises(DataError, match="does not match the manifest"):
        StoredState(store, msgspec.structs.replace(listed, **changes))


def test_hostile_blocks_raise_and_nothing_else() -> None:
    """Random bytes and wrong claims never get further than an error."""
    (block,) = encode_packed_blocks(pack_rows(many_rows(20)), 3)
    chance = random.Random(5)
    for _ in range(500):
        bad = bytearray(block.data)
        for _ in range(chance.randrange(1, 4)):
            bad[chance.randrange(len(bad))] = chance.randrange(256)
        if bytes(bad) != block.data:
            with pytest.raises(DataError):
                decode_block(bytes(bad))
    for raw, count in ((block.raw[:-1], block.count), (block.raw, block.count + 1), (block.raw, block.count - 1)):
        with pytest.raises(DataError):
            list(rows_in(raw, count, b""))
    with pytest.raises(DataError, match="not in order"):
        list(rows_in(block.raw, block.count, block.first_key))
    assert block_bytes(block.data[:HEADER_BYTES]) == len(block.data)
    assert count_of(block.data) == 20


def test_only_what_is_shipped_is_in_a_state() -> None:
    """Versions above the high-water mark may still be rolled back."""
    with EngineNode(new_store()).open() as node:
        node.apply(100)
        mark = node.ship_all()
        node.apply(50)
        node.engine.create_checkpoint()
        (listed,) = node.view.manifest.checkpoints
        rows = list(StoredState(node.objects, listed).rows())
        assert listed.seq == mark
        assert max(seq_of(key) for key, _ in rows) <= mark
        assert rows == [(key, value) for key, value in node.core.tree.scan() if seq_of(key) <= mark]


def test_nothing_new_makes_no_new_state() -> None:
    """A state at the same seq is not written again; without anything shipped there is none."""
    with EngineNode(new_store()).open() as node:
        assert node.shipping.write_state() is None
        node.apply(30)
        node.ship_all()
        first = node.shipping.write_state()
        assert node.shipping.write_state() == first
        assert len(node.view.state_keys()) == 1


def test_old_states_go_and_two_stay() -> None:
    """The newest and the one before it are kept."""
    store = new_store()
    with EngineNode(store).open() as node:
        for _ in range(5):
            node.apply(20)
            node.ship_all()
            node.shipping.write_state()
        listed = [one.key for one in node.view.manifest.checkpoints]
        assert len(listed) == 2
        assert sorted(node.view.state_keys()) == sorted(listed)
        used = {part.key for one in node.view.manifest.checkpoints for part in StoredState(node.objects, one).parts()}
        assert {key for key in store.contents() if KEYS.parse_state_part(key)} == used
        assert not node.view.manifest.leaving


def test_a_pinned_state_stays_until_the_pin_is_old() -> None:
    """Somebody reads it."""
    clock = ManualClock()
    with EngineNode(new_store(), clock=clock).open() as node:
        node.apply(20)
        node.ship_all()
        pinned = node.shipping.write_state()
        assert pinned is not None
        assert Pinning(BucketMetadataStore(node.objects), KEYS, clock, "restore-1", 100).pin(pinned.key)
        for _ in range(3):
            node.apply(20)
            node.ship_all()
            node.shipping.write_state()
        assert pinned.key in node.view.state_keys()
        clock.advance(101)
        node.apply(20)
        node.ship_all()
        node.shipping.write_state()
        assert pinned.key not in node.view.state_keys()


def test_a_deletion_that_was_cut_off_is_finished_by_the_next_owner() -> None:
    """What was written down to go, goes."""
    store = new_store()
    node = EngineNode(store).open()
    for _ in range(2):
        node.apply(20)
        node.ship_all()
        node.shipping.write_state()
    node.apply(20)
    node.ship_all()
    store.fail("delete", matching="*.tckp")
    with pytest.raises(StoreUnavailableError):
        node.shipping.write_state()
    assert len(node.view.manifest.leaving) == 1
    assert len(node.view.state_keys()) == 3
    node.crash()
    with node.open():
        assert len(node.view.state_keys()) == 2
        assert not node.view.manifest.leaving


@pytest.mark.parametrize("kind", ["*.tckp", "*.trow"])
def test_a_state_that_could_not_be_written_is_not_listed(kind: str) -> None:
    """It appears whole or not at all, and counts when the manifest names it."""
    store = new_store()
    with EngineNode(store).open() as node:
        node.apply(20)
        node.ship_all()
        store.fail("put", matching=kind)
        with pytest.raises(TidelogError):
            node.shipping.write_state()
        assert node.view.manifest.checkpoints == ()
        assert node.shipping.write_state() is not None
