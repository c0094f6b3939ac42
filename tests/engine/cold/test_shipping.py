"""Shipping an engine's log: what leaves, in which order, under which epoch, and what happens when the store is away."""

from __future__ import annotations

import pytest
from tests.engine.stations import KEYS, EngineNode, new_store, usurp
from tests.log.workbench import LIMIT_SECONDS

from tidelog.clock import ManualClock
from tidelog.engine.entry import Batch, CreateBucket, PutObject
from tidelog.errors import FencedError, InputError, StoreUnavailableError


def put(key: str, data: bytes = b"x" * 300) -> PutObject:
    """One object in the bucket that the tests here use."""
    return PutObject("bucket", key, data)


def test_everything_up_to_the_low_water_mark_is_shipped() -> None:
    """The high-water mark becomes the low-water mark, and the manifest says so."""
    with EngineNode(new_store()).open() as node:
        node.apply(200)
        mark = node.engine.applied_seq
        node.engine.update_low_water_mark(mark)
        assert node.engine.ship() == mark
        assert (node.engine.high_water_mark, node.engine.truncation_mark) == (mark, mark)
        assert node.view.manifest.high_water_mark == mark


def test_nothing_above_the_low_water_mark_leaves() -> None:
    """What may still be rolled back is in no object."""
    with EngineNode(new_store()).open() as node:
        node.apply_these([(1, CreateBucket("bucket")), *((seq, put(f"key-{seq}")) for seq in range(2, 100))])
        node.engine.update_low_water_mark(50)
        assert node.engine.ship() == 50
        stored = b"".join(node.objects.get(key).data for key in node.view.object_keys())
        assert b"key-50" in stored
        assert b"key-51" not in stored


def test_nothing_is_shipped_without_a_low_water_mark() -> None:
    """An orchestrator that has said nothing yet has everything to itself."""
    with EngineNode(new_store()).open() as node:
        node.apply(20)
        assert node.engine.ship() == 0
        assert node.view.object_keys() == []
        assert node.engine.truncation_mark == 0


def test_what_was_rolled_back_is_told_as_such() -> None:
    """Records of entries that were thrown away leave with their rollback, and the manifest names them."""
    with EngineNode(new_store()).open() as node:
        node.apply_these([(1, CreateBucket("bucket")), *((seq, put(f"old-{seq}")) for seq in range(2, 30))])
        node.roll_back(10)
        node.apply_these([(seq, put(f"new-{seq}")) for seq in range(11, 20)])
        assert node.ship_all() == 19
        manifest = node.view.manifest
        (dead,) = manifest.rolled_back
        assert dead.last < manifest.high_water_lsn
        assert dead.last - dead.first >= 2 * 19


def test_a_rollback_that_was_not_shipped_over_is_not_shipped() -> None:
    """With the mark before the rolled back stretch, nothing of it leaves."""
    with EngineNode(new_store()).open() as node:
        node.apply_these([(1, CreateBucket("bucket")), *((seq, put(f"old-{seq}")) for seq in range(2, 30))])
        node.roll_back(10)
        node.engine.update_low_water_mark(10)
        assert node.engine.ship() == 10
        stored = b"".join(node.objects.get(key).data for key in node.view.object_keys())
        assert b"old-10" in stored
        assert b"old-11" not in stored


def test_objects_follow_each_other_in_lsns_and_positions() -> None:
    """Each object begins where the one before ends, by both numbers; positions are those of the log."""
    with EngineNode(new_store(), ship_concurrency=4).open() as node:
        node.apply(300)
        node.ship_all()
        found = node.view.descriptors()
        assert len(found) > 3
        lsn, position = 1, 0
        for descriptor in found:
            assert (descriptor.start_offset, descriptor.start_position) == (lsn, position)
            lsn, position = descriptor.next_offset, position + descriptor.raw_size
        manifest = node.view.manifest
        assert (manifest.shipped_lsn, manifest.shipped_position) == (lsn, position)


def test_shipping_goes_on_after_opening_again() -> None:
    """Another process takes the next epoch and goes on where the last one stopped."""
    node = EngineNode(new_store()).open()
    node.apply(80)
    node.ship_all()
    node.apply(40)
    node.close()
    with node.open():
        assert node.engine.high_water_mark == node.engine.truncation_mark > 0
        node.apply(40)
        mark = node.ship_all()
        assert mark == node.model.applied_seq
        assert {one.epoch for one in node.view.descriptors()} == {1, 2}
        node.assert_same()


def test_an_entry_that_is_split_over_objects_counts_when_all_of_it_is_there() -> None:
    """A batch larger than an object is above the high-water mark until its last record is shipped."""
    store = new_store()
    with EngineNode(store, ship_concurrency=1).open() as node:
        big = Batch([PutObject("bucket", f"part-{number}", b"p" * 6000) for number in range(12)])
        node.apply_these([(1, CreateBucket("bucket")), (2, put("a")), (3, big)])
        node.engine.update_low_water_mark(3)
        store.fail("publish", nth=3)
        with pytest.raises(StoreUnavailableError):
            node.engine.ship()
        manifest = node.view.manifest
        assert (manifest.high_water_mark, node.engine.high_water_mark) == (2, 2)
        assert manifest.shipped_lsn > manifest.high_water_lsn + 1
        assert node.engine.ship() == 3


class TestAStoreThatIsAway:
    """Entries are applied and read, the lag is counted, and it is made up for."""

    def test_entries_are_applied_and_read(self) -> None:
        """Nothing that users do waits for the store."""
        store = new_store()
        with EngineNode(store).open() as node:
            store.fail("*", times=None)
            node.apply(50)
            node.engine.update_low_water_mark(node.engine.applied_seq)
            with pytest.raises(StoreUnavailableError):
                node.engine.ship()
            node.apply(50)
            node.assert_same()
            assert node.engine.high_water_mark == 0
            store.heal()
            assert node.ship_all() == node.model.applied_seq

    def test_the_lag_is_counted(self) -> None:
        """Bytes and seconds grow while it is away and are gone afterwards."""
        store, clock = new_store(), ManualClock()
        with EngineNode(store, clock=clock).open() as node:
            store.fail("*", times=None)
            node.apply(50)
            node.engine.update_low_water_mark(node.engine.applied_seq)
            clock.advance(90)
            with pytest.raises(StoreUnavailableError):
                node.engine.ship()
            lagging = node.shipping.statistics()
            assert lagging.lag_bytes == node.core.wal.next_position
            assert lagging.lag_seconds >= 90
            assert (lagging.errors_in_a_row, lagging.is_fenced) == (1, False)
            assert lagging.last_error is not None
            store.heal()
            node.ship_all()
            done = node.shipping.statistics()
            assert done.lag_bytes < 300
            assert (done.lag_seconds, done.errors_in_a_row, done.last_error) == (0, 0, None)

    def test_only_what_may_be_shipped_lags(self) -> None:
        """While the low-water mark stands still nothing waits for the store, however long the replicas take."""
        clock = ManualClock()
        with EngineNode(new_store(), clock=clock).open() as node:
            node.apply(20)
            node.ship_all()
            mark = node.engine.applied_seq
            node.apply(20)
            clock.advance(90)
            assert node.shipping.statistics().lag_seconds == 0
            node.roll_back(mark)
            clock.advance(10)
            node.apply(20)
            clock.advance(30)
            standing = node.shipping.statistics()
            assert (standing.lag_seconds, standing.lag_bytes > 0) == (0, True)
            node.engine.update_low_water_mark(node.engine.applied_seq)
            assert node.shipping.statistics().lag_seconds >= 30
            node.engine.ship()
            assert node.shipping.statistics().lag_seconds == 0

    def test_an_engine_opens_without_it(self) -> None:
        """The claim is made when the store answers; until then nothing may be truncated."""
        store = new_store()
        node = EngineNode(store).open()
        node.apply(30)
        node.ship_all()
        node.close()
        store.fail("*", times=None)
        with node.open(connects=False):
            node.shipping.connect_within(LIMIT_SECONDS)
            assert not node.shipping.statistics().is_connected
            assert node.engine.truncation_mark == 0
            node.apply(30)
            node.assert_same()
            store.heal()
            assert node.ship_all() == node.engine.truncation_mark == node.model.applied_seq


class TestOwnership:
    """One writer at a time."""

    def test_a_writer_that_lost_its_epoch_publishes_nothing(self) -> None:
        """Whoever was replaced hears so, and the store stays as the new owner left it."""
        store = new_store()
        old = EngineNode(store, name="old").open()
        old.apply(40)
        old.ship_all()
        old.apply(40)
        old.engine.update_low_water_mark(old.engine.applied_seq)
        before = old.engine.high_water_mark
        usurp(store)
        contents = store.contents()
        with pytest.raises(FencedError):
            old.engine.ship()
        assert old.engine.high_water_mark == old.engine.truncation_mark == before
        documents = {key: data for key, data in store.contents().items() if not key.startswith(KEYS.objects_prefix)}
        assert documents == {key: data for key, data in contents.items() if not key.startswith(KEYS.objects_prefix)}
        with pytest.raises(FencedError):
            old.engine.create_checkpoint()
        with pytest.raises(FencedError):
            old.shipping.purge()
        assert old.shipping.statistics().is_fenced
        old.close()

    def test_a_directory_that_is_not_the_end_any_more_is_refused(self) -> None:
        """Its pages and its log are of another history: the error says how to make a new copy."""
        store = new_store()
        node = EngineNode(store).open()
        node.apply(40)
        node.ship_all()
        node.close()
        usurp(store)
        with node.open(connects=False), pytest.raises(FencedError, match="restore_engine"):
            node.shipping.connect()

    def test_a_directory_that_was_set_back_is_refused(self) -> None:
        """A disk from a backup has less than the store: going on from it would make another history."""
        store = new_store()
        node = EngineNode(store).open()
        node.apply(40)
        node.ship_all()
        node.close()
        backup = node.files.after_crash("keep")
        with node.open():
            node.apply(60)
            node.ship_all()
        late = EngineNode(store, files=backup)
        with late.open(connects=False), pytest.raises(FencedError, match="restore_engine"):
            late.shipping.connect()

    def test_another_engine_cannot_take_the_place(self) -> None:
        """A directory that has entries of its own is not mixed into the store of another."""
        store = new_store()
        with EngineNode(store).open() as node:
            node.apply(40)
            node.ship_all()
        stranger = EngineNode(new_store(), name="stranger").open()
        stranger.apply(10)
        stranger.close()
        stranger.objects = store
        with stranger.open(connects=False), pytest.raises((InputError, FencedError)):
            stranger.shipping.connect()
