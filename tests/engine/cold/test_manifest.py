"""The manifest: one document by compare-and-swap, under the epoch of the engine's owner."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from tests.cold.published import lease_of
from tests.engine.stations import DIRECTORY, KEYS, new_store

from tidelog.clock import ManualClock
from tidelog.cold.catalog import Catalog
from tidelog.engine.cold.manifest import (
    Manifest,
    OwnedManifest,
    Pinning,
    PublishedManifest,
    StoredCheckpoint,
    StoredCompaction,
    decode_manifest,
    encode_manifest,
    read_manifest,
)
from tidelog.engine.cold.store_link import claim_engine, merged
from tidelog.engine.wal.ship_watermark import LsnRange
from tidelog.errors import ConflictError, DataError, FencedError
from tidelog.store.keys import CheckpointId, CompactedId
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.testing import FaultyFiles, FaultyMetadata, FaultyStore


def state(seq: int, lsn: int, epoch: int = 1) -> StoredCheckpoint:
    """A state as a manifest lists it."""
    key = KEYS.checkpoint(CheckpointId(seq, lsn, epoch, "0d" * 16))
    return StoredCheckpoint(key=key, seq=seq, lsn=lsn, epoch=epoch, rows=3, size=100, digest="d", created_us=1)


GOOD = Manifest(
    epoch=3,
    revision=7,
    high_water_mark=50,
    high_water_lsn=90,
    shipped_lsn=100,
    shipped_position=4000,
    rolled_back=(LsnRange(10, 20), LsnRange(30, 31)),
    checkpoints=(state(20, 40), state(50, 91)),
)


def owner_of(store: FaultyStore) -> OwnedManifest:
    """The manifest in the hands of a new owner."""
    catalog = Catalog(BucketMetadataStore(store), KEYS)
    clock = ManualClock()
    taken = claim_engine(
        FaultyFiles(), DIRECTORY / "wal", catalog, store, clock, lease_of(catalog.metadata, clock, "node")
    )
    return OwnedManifest(taken.catalog, KEYS, clock)


def advanced(manifest: Manifest, seq: int) -> Manifest:
    """One that tells of more."""
    return msgspec.structs.replace(manifest, high_water_mark=seq, high_water_lsn=seq, shipped_lsn=seq + 1)


def test_it_comes_back_as_it_was() -> None:
    """What is decoded is what was encoded."""
    assert decode_manifest(encode_manifest(GOOD), "key", KEYS) == GOOD


@pytest.mark.parametrize(
    "changes",
    [
        {"shipped_lsn": 0, "high_water_lsn": 0, "high_water_mark": 0, "rolled_back": (), "checkpoints": ()},
        {"high_water_lsn": 100},
        {"high_water_mark": 0, "checkpoints": ()},
        {"shipped_lsn": 1 << 64},
        {"epoch": -1},
        {"rolled_back": (LsnRange(20, 10),)},
        {"rolled_back": (LsnRange(10, 20), LsnRange(20, 30))},
        {"rolled_back": (LsnRange(90, 100),)},
        {"checkpoints": (state(50, 91), state(20, 40))},
        {"checkpoints": (state(51, 91),)},
        {"checkpoints": (state(50, 101),)},
        {"checkpoints": (msgspec.structs.replace(state(20, 40), key="elsewhere/state"),)},
        {"leaving": (state(20, 40).key,)},
        {"leaving": ("storage/topics/shop/orders/objects/data-0-9-e1.tlog",)},
    ],
)
def test_what_does_not_hold_together_is_refused(changes: dict[str, Any]) -> None:
    """A document with a good checksum and nonsense in it is not believed either."""
    bad = msgspec.structs.replace(GOOD, **changes)
    with pytest.raises(DataError, match="the manifest key"):
        decode_manifest(encode_manifest(bad), "key", KEYS)


def test_hostile_bytes_are_refused() -> None:
    """Bit flips, cuts and other documents raise DataError and nothing else."""
    good, chance = encode_manifest(GOOD), random.Random(1)
    for _ in range(300):
        bad = bytearray(good)
        bad[chance.randrange(len(bad))] ^= 1 << chance.randrange(8)
        with pytest.raises(DataError):
            decode_manifest(bytes(bad), "key", KEYS)
    for end in range(0, len(good) - 1, 7):
        with pytest.raises(DataError):
            decode_manifest(good[:end], "key", KEYS)
    with pytest.raises(DataError):
        decode_manifest(b"x" * (2 << 20), "key", KEYS)


def test_an_earlier_owner_changes_nothing() -> None:
    """From the moment a new owner has settled in, the old one hears that it is fenced."""
    store = new_store()
    old = owner_of(store)
    old.change(lambda one: advanced(one, 5))
    new = owner_of(store)
    assert new.settle_in().high_water_mark == 5
    with pytest.raises(FencedError):
        old.change(lambda one: advanced(one, 9))
    assert new.read().high_water_mark == 5
    assert new.read().epoch == 2


def test_an_owner_that_sleeps_inside_a_change_changes_nothing() -> None:
    """It has read, and has checked its claim: what it writes after waking up fails on the version."""
    store = new_store()
    old = owner_of(store)
    old.change(lambda one: advanced(one, 5))
    woken: list[OwnedManifest] = []

    def sleep(operation: str, key: str) -> None:
        if operation == "put_if_match" and key == KEYS.engine_manifest and not woken:
            woken.append(owner_of(store))
            woken[0].settle_in()

    store.on_request = sleep
    with pytest.raises(FencedError):
        old.change(lambda one: advanced(one, 9))
    store.on_request = None
    found = read_manifest(BucketMetadataStore(store, read_only=True), KEYS)
    assert found is not None
    assert (found[0].epoch, found[0].high_water_mark) == (2, 5)


def test_marks_never_go_back() -> None:
    """A change that would take a mark back is refused before anything is written."""
    owned = owner_of(new_store())
    owned.change(lambda one: advanced(one, 9))
    with pytest.raises(DataError, match="go back"):
        owned.change(lambda one: advanced(one, 5))
    assert owned.read().high_water_mark == 9


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"epoch": 2}, "epoch"),
        ({"high_water_mark": 49, "checkpoints": (), "compacted": None}, "high_water_mark"),
        ({"high_water_lsn": 89}, "high_water_lsn"),
        ({"shipped_lsn": 99}, "shipped_lsn"),
        ({"shipped_position": 3999}, "shipped_position"),
        ({"history_start_seq": 4}, "history_start_seq"),
        ({"compacted": None}, "generation"),
    ],
)
@pytest.mark.parametrize("writer", ["owner, job or reader", "replica"])
def test_nobody_takes_anything_back(changes: dict[str, Any], name: str, writer: str) -> None:
    """Whoever publishes goes through one place, which holds the new manifest against the one it replaces."""
    digest = "e" * 32
    root = KEYS.compacted(CompactedId("root", 4, digest))
    compacted = StoredCompaction(
        generation=4, key=root, size=7, digest=digest, seq=20, lsn=40, position=5, created_us=3
    )
    there = msgspec.structs.replace(GOOD, epoch=3, history_start_seq=5, compacted=compacted)
    metadata = FaultyMetadata()
    published = PublishedManifest(metadata, KEYS)
    assert published.copy(there) == there
    before, worse = metadata.contents(), msgspec.structs.replace(there, **changes)
    with pytest.raises(DataError, match=f"{name} would go back"):
        published.copy(worse) if writer == "replica" else published.change(lambda known: worse)
    assert metadata.contents() == before


def test_a_copy_loses_no_pin_that_is_set_meanwhile() -> None:
    """A restore from the replica begins while it is brought up to date."""
    metadata = FaultyMetadata()
    PublishedManifest(metadata, KEYS).copy(GOOD)
    pinning = Pinning(metadata.another_client(), KEYS, ManualClock(), "restore-1", 60)

    def pin_meanwhile(operation: str, key: str) -> None:
        if operation == "commit":
            metadata.on_request = None
            assert pinning.pin(GOOD.checkpoints[0].key)

    metadata.on_request = pin_meanwhile
    copied = PublishedManifest(metadata, KEYS).copy(msgspec.structs.replace(GOOD, shipped_lsn=120))
    assert copied.shipped_lsn == 120
    assert [pin.name for pin in copied.pins] == ["restore-1"]


def test_a_change_that_changes_nothing_writes_nothing() -> None:
    """Looking costs no write."""
    owned = owner_of(new_store())
    first = owned.change(lambda one: advanced(one, 9))
    assert owned.change(lambda one: one) == first


def test_pins_and_changes_of_the_owner_do_not_lose_each_other() -> None:
    """Whoever is second reads again: both are there in the end."""
    store = new_store()
    owned = owner_of(store)
    listed = state(5, 6)
    owned.change(lambda one: msgspec.structs.replace(advanced(one, 5), checkpoints=(listed,)))
    pinning = Pinning(BucketMetadataStore(store), KEYS, ManualClock(), "restore-1", 60)
    done: list[bool] = []

    def pin_meanwhile(one: Manifest) -> Manifest:
        if not done:
            done.append(pinning.pin(listed.key))
        return advanced(one, 7)

    after = owned.change(pin_meanwhile)
    assert done == [True]
    assert after.high_water_mark == 7
    assert [pin.name for pin in after.pins] == ["restore-1"]
    assert after.is_pinned(listed.key, ManualClock().now_us())
    assert not after.is_pinned(listed.key, ManualClock().now_us() + 61_000_000)
    pinning.release()
    assert owned.read().pins == ()


def test_a_state_that_is_gone_cannot_be_pinned() -> None:
    """Who is told so takes another one."""
    store = new_store()
    owner_of(store).change(lambda one: advanced(one, 5))
    pinning = Pinning(BucketMetadataStore(store), KEYS, ManualClock(), "restore-1", 60)
    assert not pinning.pin(state(5, 6).key)


def test_two_who_claim_at_once_are_told_apart() -> None:
    """One of them gets the epoch, the other a conflict or the next one."""
    store = new_store()
    first = owner_of(store)

    def claim_too(operation: str, key: str) -> None:
        if operation == "put_if_match" and key == KEYS.owner:
            store.on_request = None
            owner_of(store)

    store.on_request = claim_too
    with pytest.raises(ConflictError):
        owner_of(store)
    with pytest.raises(FencedError):
        first.settle_in()


def test_ranges_are_merged() -> None:
    """What touches becomes one."""
    ranges = [LsnRange(5, 9), LsnRange(1, 2), LsnRange(10, 12), LsnRange(6, 7), LsnRange(20, 21)]
    assert merged(ranges) == (LsnRange(1, 2), LsnRange(5, 12), LsnRange(20, 21))
