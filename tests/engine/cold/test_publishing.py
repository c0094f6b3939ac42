"""Publishing by compare-and-swap: one wins, the other is told, and nothing goes back."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from tests.engine.compacting import build_by_hand, checkpoint_by_hand, compact_by_hand, publish_by_hand
from tests.engine.stations import KEYS, EngineNode, StoreView, new_store

from tidelog.clock import ManualClock
from tidelog.codec import encode_document
from tidelog.engine.cold.manifest import (
    MAX_RANGES,
    Manifest,
    Pinning,
    StoredCheckpoint,
    StoredCompaction,
    change_manifest,
    decode_manifest,
    encode_manifest,
    move_history_start,
    publish_compaction,
    publish_state,
)
from tidelog.engine.wal.ship_watermark import LsnRange
from tidelog.errors import ConflictError, DataError, FencedError, InputError, NotFoundError
from tidelog.store.keys import CheckpointId, CompactedId
from tidelog.store.metadata.base import Check, Put
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.testing import FaultyStore

CLOCK = ManualClock()


def node_of(store: FaultyStore, entries: int = 120) -> EngineNode:
    """An engine that has shipped."""
    node = EngineNode(store).open()
    node.apply(entries)
    node.ship_all()
    return node


class Interfered(BucketMetadataStore):
    """Somebody else changes the manifest between reading and writing it."""

    def __init__(self, store: FaultyStore, interferes: Callable[[], object]) -> None:
        super().__init__(store)
        self._interferes: Callable[[], object] | None = interferes

    def commit(self, checks: list[Check], writes: list[Put]) -> object:  # type: ignore[override]
        """As it is, once the other one was there."""
        interferes, self._interferes = self._interferes, None
        if interferes is not None:
            interferes()
        return super().commit(checks, writes)


def test_a_compaction_is_published_with_its_state() -> None:
    """In one step; epoch and marks stay, the revision grows, and the owner goes on."""
    store = new_store()
    with node_of(store) as node:
        before = node.view.manifest
        built = build_by_hand(store)
        after = publish_by_hand(store, built)
        assert after == node.view.manifest
        assert (after.compacted, after.checkpoints[-1]) == (built.compacted, built.state)
        assert (after.epoch, after.revision) == (before.epoch, before.revision + 1)
        assert after.generation == 1
        node.apply(50)
        node.ship_all()
        assert node.view.manifest.compacted == built.compacted, "the owner carries it on"
        node.engine.create_checkpoint()
        assert node.view.manifest.compacted == built.compacted


def test_publishing_again_changes_nothing() -> None:
    """Who was cut off behind the step repeats it."""
    store = new_store()
    with node_of(store):
        built = build_by_hand(store)
        first = publish_by_hand(store, built)
        assert publish_by_hand(store, built) == first


def test_of_two_at_once_one_wins() -> None:
    """The other is told which one was faster, and writes nothing."""
    store = new_store()
    with node_of(store) as node:
        slow = build_by_hand(store)
        node.apply(30)
        node.ship_all()
        fast = build_by_hand(store)
        published = publish_by_hand(store, fast)
        with pytest.raises(ConflictError, match=r"generation 0.* is 1 up to seq") as caught:
            publish_by_hand(store, slow)
        assert "run it again" in (caught.value.hint or "")
        assert node.view.manifest == published


def test_of_two_in_the_same_moment_one_wins() -> None:
    """Also when both have read the same manifest."""
    store = new_store()
    with node_of(store) as node:
        slow = build_by_hand(store)
        node.apply(30)
        node.ship_all()
        fast = build_by_hand(store)
        metadata = Interfered(store, lambda: publish_by_hand(store, fast))
        with pytest.raises(ConflictError, match="published meanwhile"):
            publish_compaction(metadata, KEYS, CLOCK, base_generation=0, compacted=slow.compacted)
        assert node.view.manifest.compacted == fast.compacted


def test_the_owner_is_not_in_the_way() -> None:
    """What it changed meanwhile is kept, and the compaction is published all the same."""
    store = new_store()
    with node_of(store) as node:
        built = build_by_hand(store)

        def ship() -> None:
            node.apply(40)
            node.ship_all()

        metadata = Interfered(store, ship)
        after = publish_compaction(
            metadata, KEYS, CLOCK, base_generation=0, compacted=built.compacted, state=built.state
        )
        assert after.high_water_mark > built.compacted.seq
        assert after == node.view.manifest


def test_generations_follow_each_other() -> None:
    """The next one is built on the one before; none is left out and none comes again."""
    store = new_store()
    with node_of(store) as node:
        first = compact_by_hand(store)
        node.apply(30)
        node.ship_all()
        second = compact_by_hand(store)
        assert (first.generation, second.generation) == (1, 2)
        assert second.seq > first.seq
        compacted = node.view.manifest.compacted
        assert compacted is not None
        with pytest.raises(InputError):
            publish_compaction(StoreView(store).metadata, KEYS, CLOCK, base_generation=4, compacted=compacted)
        with pytest.raises(DataError, match="generation"):
            change_manifest(
                *(BucketMetadataStore(store), KEYS, CLOCK), lambda one: msgspec.structs.replace(one, compacted=None)
            )


def test_a_state_is_published_behind_the_newest() -> None:
    """One that is as old or older is refused, the same one once more is fine."""
    store = new_store()
    with node_of(store) as node:
        state = checkpoint_by_hand(store)
        metadata = BucketMetadataStore(store)
        assert node.view.manifest.checkpoints[-1] == state
        revision = node.view.manifest.revision
        assert publish_state(metadata, KEYS, CLOCK, state).revision == revision
        other = msgspec.structs.replace(state, key=KEYS.checkpoint(CheckpointId(state.seq, state.lsn, 1, "a" * 32)))
        with pytest.raises(ConflictError, match="listed already"):
            publish_state(metadata, KEYS, CLOCK, other)
        name = CheckpointId(state.seq + 1, state.lsn, 1, "a" * 32)
        ahead = msgspec.structs.replace(state, key=KEYS.checkpoint(name), seq=name.seq, epoch=1)
        with pytest.raises(DataError, match="newer than the last entry"):
            publish_state(metadata, KEYS, CLOCK, ahead)
        assert node.view.manifest.revision == revision


def test_a_compaction_beside_a_newer_state() -> None:
    """The state that it brings is left out; the compaction is published."""
    store = new_store()
    with node_of(store) as node:
        built = build_by_hand(store)
        node.apply(20)
        node.ship_all()
        node.engine.create_checkpoint()
        after = publish_by_hand(store, built)
        assert after.compacted == built.compacted
        assert built.state not in after.checkpoints


def test_history_begins_later() -> None:
    """It never goes back, never behind the last entry, and not past a state that somebody reads."""
    store = new_store()
    with node_of(store) as node:
        metadata, mark = BucketMetadataStore(store), node.view.manifest.high_water_mark
        assert move_history_start(metadata, KEYS, CLOCK, 30).history_start_seq == 30
        assert move_history_start(metadata, KEYS, CLOCK, 20).history_start_seq == 30
        with pytest.raises(InputError, match="the last entry is"):
            move_history_start(metadata, KEYS, CLOCK, mark + 1)
        state = checkpoint_by_hand(store)
        node.apply(20)
        node.ship_all()
        assert Pinning(metadata, KEYS, CLOCK, "reader", 60).pin(state.key)
        assert move_history_start(metadata, KEYS, CLOCK, mark + 10).history_start_seq == state.seq


def test_there_must_be_an_engine() -> None:
    """The error names it."""
    with pytest.raises(NotFoundError, match="main"):
        move_history_start(BucketMetadataStore(new_store()), KEYS, CLOCK, 1)


def test_a_manifest_that_changes_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publishing gives up after many attempts, with nothing written."""
    monkeypatch.setattr("tidelog.store.document.FIRST_PAUSE_SECONDS", 0.0)

    class Restless(BucketMetadataStore):
        def commit(self, checks: list[Check], writes: list[Put]) -> object:  # type: ignore[override]
            raise ConflictError("somebody was faster")

    store = new_store()
    with node_of(store) as node:
        before = node.view.manifest
        with pytest.raises(ConflictError, match=r"gave up after 20 conflicting writes to .*manifest"):
            move_history_start(Restless(store), KEYS, CLOCK, 10)
        assert node.view.manifest == before


def test_an_owner_that_was_replaced_cannot_take_a_compaction_back() -> None:
    """Its next change of the manifest is refused."""
    store = new_store()
    with node_of(store) as node:
        compact_by_hand(store)
        other = EngineNode(store, name="b")
        other.restore()
        node.apply(10)
        with pytest.raises(FencedError):
            node.ship_all()
        assert StoreView(store).manifest.generation == 1


ROOT = KEYS.compacted(CompactedId("root", 2, "e" * 32))
COMPACTED = StoredCompaction(
    generation=2, key=ROOT, size=700, digest="e" * 32, seq=90, lsn=180, position=5000, created_us=3
)
MANIFEST = Manifest(
    epoch=3, high_water_mark=95, high_water_lsn=190, shipped_lsn=200, shipped_position=9000, compacted=COMPACTED
)


def test_a_manifest_with_a_compaction_is_one_of_version_2() -> None:
    """A program that does not know of compactions refuses it; without one it is what it was."""
    data = encode_manifest(MANIFEST)
    assert data.startswith(b"tidelog engine-manifest 2 ")
    assert decode_manifest(data, "manifest", KEYS) == MANIFEST
    plain = msgspec.structs.replace(MANIFEST, compacted=None)
    assert encode_manifest(plain).startswith(b"tidelog engine-manifest 1 ")
    assert b"compacted" not in encode_manifest(plain)
    assert decode_manifest(encode_manifest(plain), "manifest", KEYS) == plain


def test_a_manifest_of_the_wrong_version_is_refused() -> None:
    """One with a compaction that says 1, one without that says 2, and one of the future."""
    plain = msgspec.structs.replace(MANIFEST, compacted=None)
    for version, manifest in ((1, MANIFEST), (2, plain), (3, MANIFEST)):
        with pytest.raises(DataError, match="version"):
            decode_manifest(encode_document("engine-manifest", version, manifest), "manifest", KEYS)


@pytest.mark.parametrize(
    "changes",
    [
        {"generation": 3},
        {"generation": 0},
        {"key": KEYS.compacted(CompactedId("blob", 2, "e" * 32))},
        {"digest": "f" * 32},
        {"seq": 96},
        {"lsn": 192},
        {"lsn": 0},
        {"position": 9001},
        {"size": 0},
    ],
)
def test_a_compaction_that_does_not_fit_its_manifest(changes: dict[str, object]) -> None:
    """It is refused when it is read."""
    bad = msgspec.structs.replace(MANIFEST, compacted=msgspec.structs.replace(COMPACTED, **changes))
    with pytest.raises(DataError):
        decode_manifest(encode_manifest(bad), "manifest", KEYS)


def test_ranges_that_a_compaction_needs_are_kept() -> None:
    """Of too many ranges those go that are before the oldest state and before what is compacted."""
    state = StoredCheckpoint(
        key=KEYS.checkpoint(CheckpointId(9, 60_001, 1, "0d" * 16)),
        seq=9,
        lsn=60_001,
        epoch=1,
        rows=1,
        size=1,
        digest="",
        created_us=0,
    )
    ranges = tuple(LsnRange(10 * number + 1, 10 * number + 2) for number in range(MAX_RANGES + 1))
    crowded = Manifest(
        epoch=1,
        high_water_mark=9,
        high_water_lsn=200_000,
        shipped_lsn=300_000,
        shipped_position=10**6,
        rolled_back=ranges,
        checkpoints=(state,),
    )
    for lsn, first in ((30_001, 30_001), (90_001, 60_001)):
        root = msgspec.structs.replace(COMPACTED, seq=8, lsn=lsn)
        kept = decode_manifest(encode_manifest(msgspec.structs.replace(crowded, compacted=root)), "manifest", KEYS)
        assert kept.rolled_back[0].first == first
