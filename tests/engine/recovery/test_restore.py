"""Restoring an engine from its store when its disk is gone."""

from __future__ import annotations

import random

import pytest
from tests.engine.stations import DIRECTORY, KEYS, EngineNode, new_store, successor

from tidelog.engine.entry import Batch, CreateBucket, PutObject
from tidelog.engine.recovery.checkpoint import MARKER
from tidelog.errors import DataError, FencedError, InputError, NotFoundError, StoreUnavailableError, TidelogError
from tidelog.testing import Crash, FaultyFiles, FaultyStore


def put(key: str, data: bytes = b"x" * 300) -> PutObject:
    """One object in the bucket that the tests here use."""
    return PutObject("bucket", key, data)


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("has_state", [False, True])
def test_a_restored_engine_has_what_the_lost_one_had_shipped(codec: str, has_state: bool) -> None:
    """Every state up to the high-water mark is there, from the log alone or from a state and the log behind it."""
    node = EngineNode(new_store(), ship_compression=codec).open()
    node.apply(150)
    node.ship_all()
    if has_state:
        node.engine.create_checkpoint()
    node.apply(150)
    node.ship_all()
    node.apply(20)
    digest, mark = node.engine.digest(node.engine.high_water_mark), node.engine.high_water_mark
    node.crash()
    with successor(node) as other:
        report = other.restore()
        assert report.seq == mark
        assert bool(report.state_seq) == has_state
        other.open()
        assert other.engine.applied_seq == other.engine.low_water_mark == other.engine.high_water_mark == mark
        assert other.engine.digest() == digest
        other.assert_same(sorted(other.model.states)[::9])
        assert other.core.tree.check() is not None


@pytest.mark.parametrize("has_state", [False, True])
def test_a_refused_end_is_restored(has_state: bool) -> None:
    """The last entry that was shipped was refused because of what was read for it: its seq is used all the same."""
    node = EngineNode(new_store()).open()
    node.apply(50)
    node.apply_refused()
    mark = node.engine.applied_seq
    assert node.ship_all() == mark
    if has_state:
        node.engine.create_checkpoint()
    node.crash()
    with successor(node) as other:
        assert other.restore().seq == mark
        other.open()
        other.assert_same([mark - 1, mark])


def test_a_restored_engine_goes_on() -> None:
    """It applies, ships under its own epoch behind what was there, and can be restored again."""
    node = EngineNode(new_store()).open()
    node.apply(100)
    node.engine.update_low_water_mark(node.engine.applied_seq)
    node.engine.create_checkpoint()
    node.crash()
    other = successor(node)
    other.restore()
    other.open()
    other.apply(100)
    other.ship_all()
    other.engine.create_checkpoint()
    other.apply(30)
    other.ship_all()
    other.assert_same()
    other.crash()
    with successor(other, "c") as third:
        third.restore()
        third.open()
        third.assert_same(sorted(third.model.states)[::11])
        lsns = [(one.start_offset, one.start_position) for one in third.view.descriptors()]
        assert lsns == sorted(lsns)
        assert third.view.manifest.epoch > 3


def test_what_was_rolled_back_stays_away() -> None:
    """Entries that were thrown away and shipped with their rollback are not replayed."""
    node = EngineNode(new_store()).open()
    node.apply_these([(1, CreateBucket("bucket")), *((seq, put(f"old-{seq}")) for seq in range(2, 40))])
    node.roll_back(20)
    node.apply_these([(seq, put(f"new-{seq}")) for seq in range(21, 30)])
    node.roll_back(25)
    node.apply_these([(seq, put(f"newer-{seq}")) for seq in range(26, 33)])
    node.ship_all()
    node.crash()
    with successor(node) as other:
        other.restore()
        other.open()
        other.assert_same(list(range(1, 33)))


def test_a_half_shipped_batch_is_left_to_the_orchestrator() -> None:
    """Records of an entry that is not whole in the store are dead; the same entry is applied anew behind them."""
    store = new_store()
    node = EngineNode(store, ship_concurrency=1).open()
    big = Batch([PutObject("bucket", f"part-{number}", bytes([number]) * 6000) for number in range(12)])
    node.apply_these([(1, CreateBucket("bucket")), (2, put("a")), (3, big)])
    node.engine.update_low_water_mark(3)
    store.fail("publish", nth=3)
    with pytest.raises(StoreUnavailableError):
        node.engine.ship()
    node.crash()
    with successor(node) as other:
        assert other.restore().seq == 2
        other.open()
        other.assert_same()
        other.apply_these([(3, big), (4, put("b"))])
        other.ship_all()
        other.assert_same([2, 3])
        other.crash()
        with successor(other, "c") as third:
            assert third.restore().seq == 4
            third.open()
            third.assert_same([2, 3])


def test_what_is_in_the_catalog_and_not_in_the_manifest_is_left_to_the_orchestrator() -> None:
    """A crash between an object and the manifest: its records are dead, and the addresses go on behind them."""
    store = new_store()
    node = EngineNode(store).open()
    node.apply(40)
    mark = node.ship_all()
    node.apply(40)
    node.engine.update_low_water_mark(node.engine.applied_seq)
    store.fail("*", times=None, matching="manifest")
    with pytest.raises(StoreUnavailableError):
        node.engine.ship()
    store.heal()
    node.crash()
    with successor(node) as other:
        report = other.restore()
        assert report.seq == mark
        assert other.view.manifest.rolled_back[-1].last == report.next_lsn - 1
        other.open()
        other.apply(60)
        other.ship_all()
        other.assert_same()
        other.crash()
        with successor(other, "c") as third:
            third.restore()
            third.open()
            third.assert_same(sorted(third.model.states)[::9])


def test_values_are_read_from_the_store() -> None:
    """Nothing of the old log is on the new disk: values come from the objects."""
    node = EngineNode(new_store()).open()
    node.apply_these([(1, CreateBucket("bucket")), *((seq, put(f"key-{seq}")) for seq in range(2, 60))])
    node.ship_all()
    node.crash()
    with successor(node) as other:
        other.restore()
        other.open()
        found = other.engine.read("bucket", "key-7")
        assert (found.data, found.tier) == (b"x" * 300, "cold")


class TestDamage:
    """What is bad is not restored, and is named."""

    def test_a_damaged_state_is_passed_over(self) -> None:
        """The one before it is used, or the log alone."""
        store = new_store()
        node = EngineNode(store).open()
        for _ in range(2):
            node.apply(60)
            node.ship_all()
            node.engine.create_checkpoint()
        node.crash()
        older, newest = node.view.manifest.checkpoints
        flip(store, newest.key, 100)
        report = successor(node).restore()
        assert (report.damaged_states, report.state_seq) == ((newest.key,), older.seq)
        flip(store, older.key, 100)
        with successor(node, "c") as third:
            report = third.restore()
            assert (report.state_seq, len(report.damaged_states)) == (0, 2)
            third.open()
            third.assert_same()

    @pytest.mark.parametrize("codec", ["none", "zstd"])
    def test_no_bit_in_the_store_matters_unnoticed(self, codec: str) -> None:
        """Whichever bit of whichever object flips: the restored engine is the right one, or an error says why not."""
        store = new_store()
        node = EngineNode(store, ship_compression=codec).open()
        node.apply(40)
        node.ship_all()
        node.engine.create_checkpoint()
        node.apply(40)
        node.ship_all()
        digest = node.engine.digest()
        node.crash()
        good, chance = store.contents(), random.Random(codec)
        refused = 0
        for key, data in sorted(good.items()):
            for _ in range(4):
                copied = new_store()
                for other_key, other_data in good.items():
                    copied.put(other_key, other_data)
                flip(copied, key, chance.randrange(len(data)), 1 << chance.randrange(8))
                other = EngineNode(copied, name="b")
                try:
                    other.restore()
                except TidelogError:
                    refused += 1
                    continue
                with other.open(connects=False):
                    assert other.engine.digest() == digest, key
        assert refused

    def test_an_object_that_is_missing_is_told(self) -> None:
        """A hole in the log is an error, never an older state."""
        store = new_store()
        node = EngineNode(store).open()
        node.apply(100)
        node.ship_all()
        node.crash()
        store.delete(node.view.object_keys()[1])
        with pytest.raises(DataError):
            successor(node).restore()


class TestTheDirectory:
    """Where to, and how often."""

    def test_it_must_be_empty(self) -> None:
        """Nothing that is there is overwritten."""
        node = EngineNode(new_store()).open()
        node.apply(20)
        node.ship_all()
        node.close()
        with pytest.raises(InputError, match="empty directory"):
            node.restore()

    def test_a_store_without_an_engine_is_told(self) -> None:
        """Nothing is made, on the disk or in the store."""
        node = EngineNode(new_store())
        with pytest.raises(NotFoundError, match="no engine"):
            node.restore()
        assert not node.files.is_directory(DIRECTORY)

    def test_it_may_be_cut_off_anywhere_and_begun_again(self) -> None:
        """Until it is complete the directory is no engine; the next attempt makes one."""
        node = EngineNode(new_store()).open()
        node.apply(60)
        node.ship_all()
        node.engine.create_checkpoint()
        node.apply(60)
        node.ship_all()
        node.crash()
        files, cuts = FaultyFiles(), 0
        for crash_at in range(1, 400, 7):
            files = FaultyFiles(crash_at=crash_at)
            cut = successor(node)
            cut.files = files
            try:
                cut.restore()
            except Crash:
                cuts += 1
            else:
                break
            again = successor(node)
            again.files = files.after_crash("tear", seed=crash_at)
            if again.files.exists(DIRECTORY / MARKER):
                with pytest.raises(InputError, match="cut off"):
                    again.open(connects=False)
            again.restore()
            with again.open():
                again.assert_same()
        assert cuts > 3

    def test_the_old_owner_is_fenced(self) -> None:
        """A writer that was only slow publishes nothing after somebody else has restored the engine."""
        old = EngineNode(new_store(), name="old").open()
        old.apply(40)
        mark = old.ship_all()
        old.apply(40)
        old.engine.update_low_water_mark(old.engine.applied_seq)
        with successor(old) as other:
            other.restore()
            other.open()
            with pytest.raises(FencedError):
                old.engine.ship()
            assert old.engine.truncation_mark == mark
            other.apply(30)
            other.ship_all()
            other.assert_same()
        old.close()

    def test_a_restore_that_fails_takes_nothing_away(self) -> None:
        """As long as it has not succeeded in reading, whoever owns the engine goes on."""
        store = new_store()
        node = EngineNode(store).open()
        node.apply(100)
        node.ship_all()
        lost = node.view.object_keys()[1]
        data = store.get(lost).data
        store.delete(lost)
        with pytest.raises(DataError):
            successor(node).restore()
        store.put(lost, data)
        node.apply(20)
        assert node.ship_all() == node.engine.applied_seq
        node.close()

    def test_what_it_reads_is_pinned(self) -> None:
        """States do not go while somebody restores from them; afterwards nothing is pinned."""
        store = new_store()
        node = EngineNode(store).open()
        node.apply(30)
        node.ship_all()
        node.engine.create_checkpoint()
        pinned: list[list[str]] = []

        def look(operation: str, key: str) -> None:
            if operation == "read_range" and key.startswith(KEYS.checkpoints_prefix) and not pinned:
                pinned.append([pin.key for pin in node.view.manifest.pins])

        store.on_request = look
        other = successor(node)
        other.restore()
        store.on_request = None
        assert pinned == [[node.view.manifest.checkpoints[0].key]]
        assert node.view.manifest.pins == ()
        node.close()


def flip(store: FaultyStore, key: str, byte: int, mask: int = 1) -> None:
    """Changes a byte of an object at rest."""
    data = bytearray(store.contents()[key])
    data[byte] ^= mask
    store.tamper(key, bytes(data))
