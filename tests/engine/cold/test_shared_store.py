"""Replicas that share a store: one ships, the others read and take over; N replicas, one copy, equal answers."""

from __future__ import annotations

import contextlib
import copy
import random
from pathlib import Path
from typing import Any

import pytest
from tests.campaign import every, examples, first_seed
from tests.engine.compacting import compact_by_hand
from tests.engine.engines import RandomEntries
from tests.engine.replica_group import Log, Replica, settings_of
from tests.engine.stations import DIRECTORY, KEYS, new_store
from tests.log.workbench import wait_until

import tidelog
from tidelog.clock import ManualClock
from tidelog.cold.catalog import Catalog
from tidelog.engine.changes import Change
from tidelog.engine.core import PAGES, WAL
from tidelog.engine.entry import Batch, CopyObject, CreateBucket, DeleteObject, PutObject, operations
from tidelog.engine.recovery.checkpoint import MASTER
from tidelog.engine.recovery.takeover import TAKEOVER, commit_takeover, finish_takeover
from tidelog.errors import (
    ConflictError,
    DataError,
    FencedError,
    GapError,
    NotSupportedError,
    OffsetOutOfRangeError,
    StoreUnavailableError,
    TidelogError,
)
from tidelog.testing import Crash, FaultyStore, World

WAIT_SECONDS = 60.0
EXCHANGED = (MASTER, PAGES, f"{WAL}/one")


def group(count: int, store: FaultyStore | None = None, **settings: Any) -> tuple[Log, list[Replica]]:
    """An owner and its followers, all open."""
    store, clock = store or new_store(), ManualClock()
    names = "abc"[:count]
    replicas = [Replica(store, name=name, clock=clock, **settings_of(**settings)) for name in names]
    return Log(), [one.open_shared() for one in replicas]


def put(count: int, first_seq: int = 2, size: int = 300) -> list[tuple[int, Any]]:
    return [
        (seq, PutObject("b", f"k{seq % 40}", random.Random(seq).randbytes(size)))
        for seq in range(first_seq, first_seq + count)
    ]


def everywhere(log: Log, replicas: list[Replica]) -> None:
    """All replicas apply everything, and everything is final."""
    for one in replicas:
        log.drive(one, log.last_seq)
    for one in replicas:
        one.engine.update_low_water_mark(log.last_seq)


def ship_and_evict(replicas: list[Replica]) -> None:
    """Twice: a checkpoint in between lets go of the rest of the log."""
    for _ in range(2):
        for one in replicas:
            one.engine.create_checkpoint()
        for one in replicas:
            one.engine.ship()


def test_followers_let_go_of_what_the_owner_has_shipped() -> None:
    """The owner ships; all replicas evict, and read the same from the one copy in the store."""
    log, replicas = group(3)
    owner, *followers = replicas
    assert [one.engine.is_follower for one in replicas] == [False, True, True]
    log.add([(1, CreateBucket("b")), *put(200)])
    everywhere(log, replicas)
    before = {info.key: info.size for info in owner.objects.list("")}
    for one in followers:
        one.engine.create_checkpoint()
        assert one.engine.ship() == 0  # nothing is in the store yet
        assert one.engine.read("b", "k3").tier == "hot"
    assert {info.key: info.size for info in owner.objects.list("")} == before  # a follower writes nothing
    ship_and_evict(replicas)
    shipped = {info.key: info.size for info in owner.objects.list("")}
    for one in followers:
        assert one.engine.read("b", "k3").tier == "cold"
        assert one.engine.statistics().hot_tier_bytes < 20_000
        assert one.engine.high_water_mark == log.last_seq
        log.check(one, [50, 120])
        assert one.engine.verify()
    values = sum(len(entry.data) for _, entry in log.entries if isinstance(entry, PutObject))
    stored = sum(size for key, size in shipped.items() if key.endswith(".tlog"))
    assert stored < 1.8 * values  # one copy, and the records around the values
    assert {info.key: info.size for info in owner.objects.list("")} == shipped
    for one in replicas:
        one.close()


def test_copy_of_an_evicted_value_is_read_before_the_owner_ships_it() -> None:
    """The copy is not in the store yet, and its source is: both have the same value."""
    log, (owner, follower) = group(2)
    log.add([(1, CreateBucket("b")), *put(100)])
    everywhere(log, [owner, follower])
    ship_and_evict([owner, follower])
    assert follower.engine.read("b", "k3").tier == "cold"
    log.add([(200, CopyObject("b", "k3", "b", "copy")), (201, CopyObject("b", "copy", "b", "again"))])
    log.add([(202, DeleteObject("b", "k3")), (203, DeleteObject("b", "copy"))])
    log.drive(follower, 203)
    assert follower.engine.read("b", "again").tier == "cold"
    log.check(follower, [200, 201, 202])
    everywhere(log, [owner, follower])
    ship_and_evict([owner, follower])
    log.check(follower, [200, 201, 202])
    for one in (owner, follower):
        one.close()


def test_value_that_the_store_does_not_have_stays_on_the_disk() -> None:
    """What is above the high-water mark, or was never shipped, is not evicted, however full the disk is."""
    log, (owner, follower) = group(2)
    log.add([(1, CreateBucket("b")), *put(60)])
    everywhere(log, [owner, follower])
    owner.engine.ship()
    log.add(put(60, first_seq=100))
    for one in (owner, follower):
        log.drive(one, log.last_seq)
    follower.engine.create_checkpoint()
    follower.engine.ship()
    tiers = {follower.engine.read("b", f"k{seq % 40}", seq).tier for seq in range(100, 160)}
    assert tiers == {"hot"}
    log.check(follower, [30])
    for one in (owner, follower):
        one.close()


def test_replica_with_other_entries_is_told_and_evicts_nothing_of_them() -> None:
    """A value with another checksum in the store is damage, and not evicted as if it were the same."""
    _, (owner, follower) = group(2)
    for one, byte in ((owner, b"o"), (follower, b"f")):
        puts = [(seq, PutObject("b", f"k{seq}", byte * 300)) for seq in range(2, 60)]
        one.engine.apply_many([(1, CreateBucket("b")), *puts])
        one.engine.update_low_water_mark(59)
    owner.engine.ship()
    follower.engine.create_checkpoint()
    follower.engine.apply(60, PutObject("b", "end", b"x" * 9000))
    follower.engine.create_checkpoint()
    with pytest.raises(DataError, match="must be given the same entries"):
        follower.engine.ship()
    assert follower.engine.read("b", "k2").data == b"f" * 300
    for one in (owner, follower):
        one.close()


def test_uncommitted_tail_of_a_follower_can_be_rolled_back() -> None:
    """Whatever the owner has shipped meanwhile: the follower's own orchestrator says what is final there."""
    log, (owner, follower) = group(2)
    log.add([(1, CreateBucket("b")), *put(20)])
    everywhere(log, [owner, follower])
    follower.engine.apply(30, PutObject("b", "lost", b"l" * 300))
    log.add([(30, PutObject("b", "won", b"w" * 300))])
    log.drive(owner, 30)
    owner.engine.update_low_water_mark(30)
    assert owner.engine.ship() == 30
    assert follower.engine.ship() == 21
    follower.engine.rollback_to(21)
    log.drive(follower, 30)
    log.check(follower, [])
    for one in (owner, follower):
        one.close()


def test_follower_takes_over_and_the_owner_becomes_a_follower() -> None:
    """The new owner ships under the next epoch; the old one can change nothing, and reads on when it is reopened."""
    log, replicas = group(3)
    a, b, _ = replicas
    log.add([(1, CreateBucket("b")), *put(120)])
    everywhere(log, replicas)
    ship_and_evict(replicas)
    log.add(put(40, first_seq=300))
    everywhere(log, replicas)
    b.take_over()
    assert b.engine.applied_seq == 121
    log.drive(b, log.last_seq)
    b.engine.update_low_water_mark(log.last_seq)
    assert b.engine.ship() == log.last_seq
    with pytest.raises(FencedError):
        a.engine.ship()
    a.kill()
    a.open_shared()
    assert a.engine.is_follower
    ship_and_evict(replicas)
    for one in replicas:
        log.check(one, [60, 121, 310])
        assert one.engine.high_water_mark == log.last_seq
        one.close()


def test_large_values_are_shared_too() -> None:
    """Their files have the same names: one upload, and every replica reads it."""
    log, replicas = group(2, large_value_bytes=1024)
    log.add([(1, CreateBucket("b")), *put(12, size=5000)])
    everywhere(log, replicas)
    ship_and_evict(replicas)
    owner, follower = replicas
    assert follower.core.values.names() == []
    assert len([info for info in owner.objects.list("") if info.key.endswith(".tval")]) == 12
    log.check(follower, [5])
    follower.take_over()
    log.check(follower, [5])
    for one in replicas:
        one.close()


@pytest.mark.parametrize("settings", [{}, {"wal_compression": "zstd"}, {"large_value_bytes": 1024}])
def test_values_come_back_to_the_disk_of_a_follower(settings: dict[str, Any]) -> None:
    """Those that are read a second time, or prefetched; scans of small ones bring none. They are read without the store
    then, and after a reopen too.
    """
    log, replicas = group(2, cold_cache_bytes=0, **settings)
    owner, follower = replicas
    log.add([(1, CreateBucket("b")), *put(38, size=1500), (100, CopyObject("b", "k9", "b", "copy"))])
    everywhere(log, replicas)
    ship_and_evict(replicas)
    for _ in range(0 if "large_value_bytes" in settings else 2):
        assert len(list(follower.engine.scan("b", with_values=True))) == 39
    store = owner.objects
    assert isinstance(store, FaultyStore)
    reader, tiers = follower.shared.reader, []
    for _ in range(3):
        tiers.append(follower.engine.read("b", "k3").tier)
        wait_until(lambda: not reader._coming, "a large value comes back in the background")
    assert tiers == ["cold", "cold", "hot"]
    assert follower.engine.read("b", "copy").data == log.model.at(100)["b"].objects["k9"].data
    report = follower.engine.prefetch("b", "k1")
    assert (report.objects, report.already_here, report.left_out) == (10, 0, 0)
    cold = follower.engine.statistics().cold
    assert cold is not None
    assert cold.disk_cache is not None
    assert cold.disk_cache.values == 11
    follower.engine.close()
    follower.open_shared()
    store.fail("*", times=None)
    for key in ("k3", *(f"k{number}" for number in range(10, 20))):
        found = follower.engine.read("b", key)
        assert (found.tier, follower.engine.stat("b", key).tier) == ("hot", "hot")
        assert found.data == log.model.at(100)["b"].objects[key].data
    with pytest.raises(StoreUnavailableError):
        follower.engine.read("b", "k20")
    store.heal()
    log.check(follower, [30])
    follower.take_over()
    log.check(follower, [30])
    for one in replicas:
        one.close()


def test_changes_of_a_follower_are_those_of_the_owner() -> None:
    """Whatever its disk has let go of: the rest comes from the store, where the log has other LSNs."""
    log, replicas = group(3, large_value_bytes=1024)
    owner, first, second = replicas
    log.add([(1, CreateBucket("b")), *put(60), *put(6, first_seq=70, size=5000)])
    log.add([(80, Batch([PutObject("b", "x", b"x" * 300), PutObject("b", "y", b"y" * 300)]))])
    log.add([(81, PutObject("b", "x", b"refused", if_absent=True))])
    everywhere(log, replicas)
    expected = changes_of(owner, 1)
    assert [seq for seq, _, _ in expected] == [seq for seq, _ in log.entries]
    feed = first.engine.changes(with_values=True)
    begun = [resolved(next(feed)) for _ in range(5)]
    for _ in range(3):  # its log has more records than the owner's
        first.engine.update_low_water_mark(log.last_seq)
        first.engine.create_checkpoint()
    ship_and_evict(replicas)
    assert first.core.wal.first_lsn > 1
    assert begun + [resolved(one) for one in feed] == expected
    for one in replicas:
        for start_seq in (1, 30, 70, 80, 81, 82):
            assert changes_of(one, start_seq) == [each for each in expected if each[0] >= start_seq]
    follower_only = [(90, PutObject("b", "lost", b"l" * 300))]
    second.engine.apply_many(follower_only)
    log.add([(90, PutObject("b", "won", b"w" * 300))])
    for one in (owner, first):
        log.drive(one, 90)
        one.engine.update_low_water_mark(90)
        one.engine.ship()
    second.engine.ship()
    (last,) = changes_of(second, 82)
    assert last[1] == follower_only[0][1]  # what the store has of this seq is not what was applied here
    assert changes_of(second, 1)[-1] == last
    assert changes_of(first, 1) == changes_of(owner, 1)
    for one in replicas:
        one.close()


def resolved(change: Change) -> tuple[int, Any, Any]:
    """A change with the data of large values."""
    parts = [
        PutObject(part.bucket, part.key, b"".join(part.data), part.metadata)
        if isinstance(part, PutObject) and not isinstance(part.data, bytes)
        else part
        for part in operations(change.entry)
    ]
    return change.seq, Batch(parts) if isinstance(change.entry, Batch) else parts[0], change.result


def changes_of(one: Replica, start_seq: int) -> list[tuple[int, Any, Any]]:
    return [resolved(change) for change in one.engine.changes(start_seq, with_values=True)]


def test_follower_works_while_the_store_is_away() -> None:
    """It opens, applies and reads what is on its disk; only cold values are out of reach."""
    log, (owner, follower) = group(2)
    log.add([(1, CreateBucket("b")), *put(80)])
    everywhere(log, [owner, follower])
    ship_and_evict([owner, follower])
    follower.kill()
    store = owner.objects
    assert isinstance(store, FaultyStore)
    store.fail("*", times=None)
    follower.open_shared()
    assert follower.engine.is_follower
    follower.engine.apply(200, PutObject("b", "new", b"n" * 300))
    assert follower.engine.read("b", "new").tier == "hot"
    with pytest.raises(StoreUnavailableError):
        follower.engine.read("b", "k3")
    store.heal()
    assert follower.engine.read("b", "k3").tier == "cold"
    for one in (owner, follower):
        one.close()


@pytest.mark.deeper
@pytest.mark.parametrize("settings", [{}, {"keep_versions": 1}, {"keep_versions": 2}, {"large_value_bytes": 1024}])
def test_replicas_give_the_models_answers_whatever_is_killed(settings: dict[str, Any]) -> None:
    """Three replicas, entries that are rolled back, kills, takeovers, collections that move values, compactions by
    another process: at the same seq they answer as the model does, always.
    """
    for seed in range(first_seed(), first_seed() + examples(1)):
        play = Play(seed, settings)
        for _ in range(70):
            play.step()
        play.end()


class Play:
    """A random life of a group. One step is one call on one replica."""

    def __init__(self, seed: int, settings: dict[str, Any]) -> None:
        self.choose = random.Random(f"group-{seed}-{settings}")
        self.log, self.replicas = group(3, new_store(), **settings)
        self._entries = RandomEntries(f"group-{seed}")
        self._steps = [self.add, self.add, self.add, self.drive, self.drive, self.finish_some]
        self._steps += [self.ship, self.ship, self.settle, self.settle, self.settle, self.kill, self.kill, self.cut]
        self._steps += [self.take_over, self.collect, self.move_values, self.compact, self.copy_some, self.copy_some]
        self.moved_values = self.compactions = self.checked_changes = 0

    def step(self) -> None:
        one = self.choose.choice(self.replicas)
        self.choose.choice(self._steps)(one)
        assert sum(not each.engine.is_follower for each in self.replicas) == 1
        self.log.check(one, [self.choose.randint(0, self.log.last_seq + 1)])
        self.check_changes(one)

    def check_changes(self, one: Replica) -> None:
        """Its feed has the entries that it has applied, unless the store has no log of theirs any more."""
        start_seq = self.choose.randint(1, one.engine.applied_seq + 1)
        with_values = self.replicas[0].settings.keep_versions is None  # else some are gone
        try:
            found = [resolved(each) for each in one.engine.changes(start_seq, with_values=with_values)]
        except GapError:
            assert Catalog(one.view.metadata, KEYS).start_offset() > 1  # its beginning was dropped
            return
        applied = {seq: entry for seq, entry in self.log.entries if start_seq <= seq <= one.engine.applied_seq}
        assert [seq for seq, _, _ in found] == list(applied)
        for seq, entry, result in found:
            if with_values and result.status != "refused":
                assert list(operations(entry)) == list(operations(applied[seq]))
        self.checked_changes += len(found)

    def end(self) -> None:
        """What did not happen by chance happens now, and then the owner changes."""
        for step in (self.move_values, self.compact):
            step(self.owner)
            self.check_all()
        self.take_over(next(one for one in self.replicas if one.engine.is_follower))
        self.move_values(self.owner)
        if self.owner.settings.keep_versions is None:
            assert self.compactions
        else:  # then there may be no compaction: the log of versions that were removed is gone
            assert self.moved_values
        self.check_all()
        assert self.checked_changes
        for one in self.replicas:
            self.log.drive(one, self.log.last_seq)
            self.log.check(one, [self.log.low_water_mark])
            one.close()

    @property
    def owner(self) -> Replica:
        return next(one for one in self.replicas if not one.engine.is_follower)

    def check_all(self) -> None:
        for one in self.replicas:
            self.log.check(one, [])

    def add(self, one: Replica) -> None:
        self.log.add(self._entries.entries(self.choose.randrange(1, 9), self.log.last_seq + 1))

    def drive(self, one: Replica) -> None:
        self.log.drive(one, self.choose.randint(0, self.log.last_seq))

    def finish_some(self, one: Replica) -> None:
        """What all of them have is final; one of them is told."""
        applied = min(each.engine.applied_seq for each in self.replicas)
        self.log.low_water_mark = max(self.log.low_water_mark, applied)
        one.engine.update_low_water_mark(min(self.log.low_water_mark, one.engine.applied_seq))

    def ship(self, one: Replica) -> None:
        one.engine.create_checkpoint()
        one.engine.ship()

    def settle(self, one: Replica) -> None:
        """What one of them has becomes final everywhere, and leaves the disks."""
        seq = max(self.log.low_water_mark, one.engine.applied_seq)
        for each in self.replicas:
            self.log.drive(each, seq)
        self.log.low_water_mark = min(each.engine.applied_seq for each in self.replicas)
        for each in self.replicas:
            each.engine.update_low_water_mark(self.log.low_water_mark)
        for each in (self.owner, *self.replicas):
            self.ship(each)
        if self.choose.random() < 0.5:
            self.ship(one)

    def copy_some(self, one: Replica) -> None:
        """Copies of what is cold, so that their sources are known before they are shipped."""
        state, copies = self.log.model.at(self.log.last_seq), []
        for name, bucket in state.items():
            copies += [CopyObject(name, key, name, f"copy-{key[-3:]}") for key in list(bucket.objects)[:2]]
        self.log.add(list(enumerate(copies, self.log.last_seq + 1)))
        self.log.drive(one, self.log.last_seq)

    def kill(self, one: Replica) -> None:
        one.kill()
        one.open_shared()

    def cut(self, one: Replica) -> None:
        """Some entries are thrown away that are not final."""
        seqs = [seq for seq, _ in self.log.entries if seq >= self.log.low_water_mark]
        if seqs:
            seq = self.choose.choice(seqs)
            self.log.cut(seq)
            for each in self.replicas:
                each.engine.rollback_to(seq)

    def take_over(self, one: Replica) -> None:
        """Now and then the former owner does not know it yet: it changes nothing in the store."""
        if one.engine.is_follower:
            before = self.owner
            one.take_over()
            if self.choose.random() < 0.5:
                self.log.drive(before, self.log.last_seq)
                for call in (before.engine.ship, before.engine.collect_garbage, before.engine.compact):
                    with pytest.raises(FencedError):
                        call()
                self.log.check(one, [self.log.low_water_mark])
            self.kill(before)

    def collect(self, one: Replica) -> None:
        if one.settings.keep_versions is not None:
            self.moved_values += one.engine.collect_garbage().moved_values

    def move_values(self, one: Replica) -> None:
        """Values that stay, each among many that are overwritten: the owner moves the former, and drops the log."""
        if one.settings.keep_versions is None:
            return
        entries: list[Any] = [CreateBucket("moved")] if "moved" not in self.log.model.at(self.log.last_seq) else []
        for number in range(40):
            key = f"stays-{self.log.last_seq}-{number}" if number % 10 == 0 else f"goes-{number % 3}"
            entries.append(PutObject("moved", key, self.choose.randbytes(900)))
        self.log.add(list(enumerate(entries, self.log.last_seq + 1)))
        self.log.drive(one, self.log.last_seq)
        for _ in range(3):  # what was moved is dropped when it was shipped, with the next collection
            self.settle(one)
            self.collect(self.owner)

    def compact(self, one: Replica) -> None:
        """Another process writes values to files of its own, and the log before them may go."""
        self.settle(one)
        if not self.owner.engine.high_water_mark:
            return
        # The same snapshot is listed already; or the owner has dropped the log of versions that it has removed.
        with contextlib.suppress(ConflictError, OffsetOutOfRangeError):
            compact_by_hand(one.objects, clock=one.clock)
            self.compactions += 1
        self.settle(one)
        self.collect(self.owner)


@pytest.mark.deeper
def test_takeover_that_is_cut_anywhere_loses_nothing() -> None:
    """Whichever change of disk or store is the last one: the directory is the follower that it was or the new owner,
    has what was shipped, and goes on.
    """
    world, log = World(clock=ManualClock()), Log()
    a, b = (replica_in(world, name) for name in "ab")
    log.add([(1, CreateBucket("b")), *put(40)])
    for one in (a, b):
        one.open_shared()
    everywhere(log, [a, b])
    ship_and_evict([a, b])
    log.add(put(5, first_seq=100))
    for one in (a, b):
        log.drive(one, log.last_seq)
        one.kill()
    died, crash_at = True, 1
    roles: set[bool] = set()
    while died:
        cut = world.after_crash("keep", crash_at=crash_at)
        died = run_takeover(cut, log)
        left = cut.after_crash("lose" if crash_at % 2 else "tear", seed=crash_at, torn_bytes=crash_at % 3)
        found = replica_in(left, "b").open_shared()
        roles.add(found.engine.is_follower)
        assert found.engine.applied_seq >= 41
        finish(found, copy.deepcopy(log))
        crash_at += every(9)
    assert roles == {True, False}


def test_exchange_of_a_takeover_that_is_cut_anywhere_is_finished() -> None:
    """With what was not synced lost, the directory holds the replica's files or those of the copy, all of them."""
    world = World()
    files = world.files("b")
    for directory, data in ((DIRECTORY, b"old"), (DIRECTORY / TAKEOVER, b"new")):
        files.make_directories(directory / WAL)
        for name in EXCHANGED:
            files.write_atomically(directory / name, data)
    died, crash_at, found = True, 1, set[bytes]()
    while died:
        cut = world.after_crash("keep", crash_at=crash_at)
        with contextlib.suppress(Crash):
            commit_takeover(cut.files("b"), DIRECTORY)
        died = cut.crashed
        left = cut.after_crash("lose").files("b")
        finish_takeover(left, DIRECTORY)
        (data,) = {left.read(DIRECTORY / name) for name in EXCHANGED}
        found.add(data)
        assert data == b"old" or left.list(DIRECTORY) == sorted((MASTER, PAGES, WAL))
        crash_at += 1
    assert found == {b"old", b"new"}


def replica_in(world: World, name: str) -> Replica:
    assert isinstance(world.clock, ManualClock)
    return Replica(world.store, name=name, files=world.files(name), clock=world.clock, **settings_of())


def run_takeover(world: World, log: Log) -> bool:
    """Whether it died."""
    one = replica_in(world, "b")
    try:
        one.open_shared()
        one.take_over()
        log.drive(one, log.last_seq)
        one.engine.update_low_water_mark(log.last_seq)
        one.engine.ship()
        one.engine.create_checkpoint()
        one.close()
    except (Crash, TidelogError):
        if not world.crashed:
            raise
    finally:
        with contextlib.suppress(Crash, TidelogError, OSError):
            one.kill()
    return world.crashed


def finish(one: Replica, log: Log) -> None:
    """It goes on where it is, takes over if it has not, and ships the rest."""
    log.drive(one, log.last_seq)
    log.check(one, [20, 41])
    if one.engine.is_follower:
        one.take_over()
        log.drive(one, log.last_seq)
    one.engine.update_low_water_mark(log.last_seq)
    assert one.engine.ship() == log.last_seq
    log.check(one, [20, 41])
    assert "takeover" not in one.files.list(DIRECTORY) or not one.files.list(DIRECTORY / "takeover")
    one.close()


@pytest.mark.deeper
def test_eviction_of_a_follower_that_is_cut_anywhere_loses_nothing() -> None:
    """A follower that dies while it evicts has its values here or in the store."""
    world, log = World(clock=ManualClock()), Log()
    a, b = (replica_in(world, name) for name in "ab")
    log.add([(1, CreateBucket("b")), *put(40)])
    for one in (a, b):
        one.open_shared()
    everywhere(log, [a, b])
    a.engine.ship()
    b.engine.create_checkpoint()
    for one in (a, b):
        one.kill()
    died, crash_at = True, 1
    while died:
        cut = world.after_crash("keep", crash_at=crash_at)
        one = replica_in(cut, "b")
        try:
            one.open_shared()
            one.engine.ship()
            one.engine.create_checkpoint()
            one.engine.ship()
        except (Crash, TidelogError):
            assert cut.crashed
        died = cut.crashed
        with contextlib.suppress(Crash, TidelogError, OSError):
            one.kill()
        left = cut.after_crash("lose" if crash_at % 2 else "tear", seed=crash_at)
        found = replica_in(left, "b").open_shared()
        log.check(found, [20])
        found.close()
        crash_at += every(5)
    assert crash_at > 3


def test_public_names_of_sharing(tmp_path: Path) -> None:
    """`shares_store=True` opens followers, a late one is restored, `take_over()` returns the new owner; the directory
    remembers that it shares.
    """
    store = (tmp_path / "store").as_uri()
    settings: dict[str, Any] = {"store": store, "shares_store": True, "local_retention_bytes": 0}
    entries = [(1, CreateBucket("b")), *put(30)]
    with (
        tidelog.open_engine(tmp_path / "a", **settings) as a,
        tidelog.open_engine(tmp_path / "b", **settings) as b,
    ):
        for one in (a, b):
            one.apply_many(entries)
            one.update_low_water_mark(31)
        assert (a.is_follower, b.is_follower, b.owner_is_alive(), a.owner_is_alive()) == (False, True, True, True)
        assert a.ship() == b.ship() == b.truncation_mark == 31
        with pytest.raises(NotSupportedError, match="follows no other"):
            a.take_over()
        with pytest.raises(NotSupportedError, match="another replica ships to the store"):
            b.compact()
        with tidelog.restore_engine(tmp_path / "c", **settings) as c:
            assert (c.is_follower, c.applied_seq, c.digest()) == (True, 31, a.digest())
            assert c.read("b", "k3").data == a.read("b", "k3").data
        with b.take_over() as owner:
            assert not owner.is_follower
            assert owner.digest() == a.digest()
            with pytest.raises(FencedError) as fenced:
                a.ship()
            assert "opened again" in str(fenced.value.hint)
    with tidelog.open_engine(tmp_path / "c") as c, tidelog.open_engine(tmp_path / "a") as a:
        assert c.is_follower
        assert a.is_follower
        assert not c.owner_is_alive()
        assert c.digest() == a.digest()
    with tidelog.open_engine(tmp_path / "c", take_over=True) as c:
        assert not c.is_follower
