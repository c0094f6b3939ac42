"""Walks: an owner that does whatever owners do, in any order, killed at any call, and readers beside it.

After a death the owner has what it acknowledged, and of what was under way the whole or nothing; of several entries the
first ones. Readers show what the owner had at their seq, always, also while nobody owns the store.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import pytest
from tests.campaign import examples, first_seed
from tests.engine.compacting import (
    BuiltCompaction,
    build_by_hand,
    checkpoint_by_hand,
    compact_by_hand,
    publish_by_hand,
)
from tests.engine.engines import RandomEntries, assert_state
from tests.engine.model import Model
from tests.engine.stations import KEYS, EngineNode, StoreView, new_store
from tests.engine.test_reader import opened
from tests.log.workbench import LIMIT_SECONDS

from tidelog.clock import Clock, ManualClock
from tidelog.cold.catalog import Catalog
from tidelog.engine.cold.gc import drop_wal
from tidelog.engine.engine import Engine
from tidelog.engine.entry import Batch, CopyObject, CreateBucket, DeleteObject, Entry, PutObject
from tidelog.engine.reader import EngineReader
from tidelog.engine.restoring import RestoringEngine
from tidelog.engine.txn.read_set import Guarded, ObjectRead
from tidelog.engine.wal.value import object_crc
from tidelog.errors import ConflictError, GapError, InputError, OffsetOutOfRangeError, TidelogError
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.store.object_store import ObjectStore
from tidelog.testing import POLICIES, Crash, FaultyFiles, FaultyStore
from tidelog.testing.crash import quiet_crashes
from tidelog.testing.faults import Faults

pytestmark = pytest.mark.deeper
GROUPS = 6
WALKS_OF_A_GROUP = examples(3)
STEPS = 25
# How many calls of disk and store a process makes at most before it is cut: some entries, a shipment, a compaction.
CUTS = (3, 12, 50, 200)


class Owner:
    """The processes that own an engine one after the other, and what their calls have promised."""

    def __init__(self, store: FaultyStore, choose: random.Random) -> None:
        self._store = store
        self._choose = choose
        self._settings: dict[str, Any] = {
            "keep_versions": choose.choice((None, 1, 2)),
            "local_retention_bytes": 0,
            "large_value_bytes": choose.choice((1024, 8 << 20)),
            "disk_cache_bytes": choose.choice((0, 64 << 10)),
            "ship_compression": choose.choice(("none", "none", "zstd")),
            "ship_concurrency": 1,  # a walk is the same one again
        }
        self._entries = RandomEntries(choose.random())
        self._names = 0
        self._is_restoring = False
        self._under_way: list[Callable[[], object]] = []
        self.clock = ManualClock()
        self.model = Model()
        self.deaths = 0
        self._begin(FaultyFiles())
        self.node.open()

    @property
    def engine(self) -> Engine:
        return self.node.engine

    def _begin(self, files: FaultyFiles, **crash: Any) -> None:
        """A process on this disk."""
        self.faults = Faults()
        self._files = files.after_crash(faults=self.faults.sharing("disk"), **crash)
        self._client = self._store.another_client(self.faults)
        self.node = EngineNode(
            self._client, name=f"node-{self._names}", files=self._files, clock=self.clock, **self._settings
        )

    # What it does, and what is promised by that

    def apply(self, entries: Iterable[tuple[int, Entry]]) -> None:
        """Each is applied wholly or not at all, and none before the one before it."""
        given = list(entries)
        self._under_way = [lambda seq=seq, entry=entry: self.model.apply(seq, entry) for seq, entry in given]  # type: ignore[misc]
        self.engine.apply_many(given)
        self._done()

    def apply_random(self) -> None:
        self.apply(self._entries.entries(self._choose.randrange(1, 40), self.engine.applied_seq + 1))

    def apply_again(self) -> None:
        """The orchestrator repeats its last entries, which does nothing."""
        self.engine.apply_many([one for one in self.model.entries.items() if one[0] <= self.engine.applied_seq][-3:])

    def apply_refused(self) -> None:
        """A guarded entry that would change much if what was read for it were true."""
        seq = self.engine.applied_seq + 1
        batch = Batch((CreateBucket(f"refused-{seq}"), PutObject(f"refused-{seq}", "k", b"v" * 300)))
        self._under_way = [lambda: self.model.refuse(seq, batch)]
        assert self.engine.apply(seq, Guarded(batch, (ObjectRead("nowhere", "k", 1),))).status == "refused"
        self._done()

    def apply_conditions(self) -> None:
        """Some hold, and others do not: then the entry is refused, and its seq is used."""
        choose, state = self._choose, self.model.at(self.engine.applied_seq)
        for name in list(state)[:2]:
            objects = state[name].objects
            for key in ["key/1", "key/5", *list(objects)[:1]]:
                found = objects.get(key)
                conditions: list[dict[str, Any]] = [{"if_absent": True}, {"if_match": choose.randrange(1, 50)}]
                if found is not None:
                    conditions += [{"if_match": found.seq}, {"if_match_crc": object_crc(found.data, found.metadata)}]
                entries: list[Entry] = [
                    PutObject(name, key, choose.randbytes(300), **choose.choice(conditions)),
                    DeleteObject(name, key, **choose.choice(conditions[1:])),
                    CopyObject(name, key, name, "key/7", **choose.choice(conditions)),
                ]
                seq, entry = self.engine.applied_seq + 1, choose.choice(entries)
                self._under_way = [lambda seq=seq, entry=entry: self.model.apply(seq, entry)]  # type: ignore[misc]
                is_applied = self.engine.apply(seq, entry).applied
                assert is_applied == self.model.apply(seq, entry)
                self._under_way = []

    def apply_streams(self) -> None:
        """Data in pieces, which is large or is not; a stream that breaks leaves nothing."""
        data = self._choose.randbytes(self._choose.choice((10, 1024, 5000)))
        for name in list(self.model.at(self.engine.applied_seq))[:1]:
            seq, metadata = self.engine.applied_seq + 1, {"n": 1}
            self._under_way = [lambda: self.model.apply(seq, PutObject(name, "key/stream", data, metadata))]  # noqa: B023 - there is one
            self.engine.apply(seq, PutObject(name, "key/stream", iter([data[:700], data[700:]]), metadata))
            self._done()
            with pytest.raises(OSError, match="the peer is gone"):
                self.engine.apply(seq + 1, PutObject(name, "key/stream", _broken(data)))
            assert self.engine.applied_seq == seq

    def roll_back(self) -> None:
        seq = self._choose.randint(self.engine.low_water_mark, self.engine.applied_seq)
        self._under_way = [lambda: self.model.roll_back(seq)]
        self.engine.rollback_to(seq)
        self._done()

    def prefetch(self) -> None:
        for name in self.engine.list_buckets():
            self.engine.prefetch(name, "key/")

    def checkpoint(self) -> None:
        self.clock.advance(1)
        self.engine.create_checkpoint()

    def close(self) -> None:
        """And is opened again."""
        self.node.close()
        self.die()
        self.recover()

    def fail_over(self) -> None:
        """Its disk is lost, and another node restores what was shipped, which is read meanwhile."""
        self.die()
        self._names += 1
        self._is_restoring = True
        self._under_way = []
        self.model.roll_back(StoreView(self._store).manifest.high_water_mark)
        self._files = FaultyFiles()
        self.recover()

    def _done(self) -> None:
        for effect in self._under_way:
            effect()
        self._under_way = []

    # How it dies, and what comes after it

    def cut_soon(self) -> None:
        """It dies at one of its next calls of disk or store."""
        self.faults.crash_at = len(self.faults.calls) + self._choose.randint(1, self._choose.choice(CUTS))

    def do(self, work: Callable[[], object]) -> None:
        """Some work, which may be cut; then the engine is opened by another process."""
        try:
            work()
        except (Crash, TidelogError):
            if not self.faults.crashed:
                raise
        self.faults.crash_at = None
        if self.faults.crashed:
            self.recover()

    def die(self) -> None:
        """The process is gone. A call of the store that was cut was done, or was not."""
        self.deaths += 1
        self.faults.crash()
        if self._client.in_flight_bytes and self._choose.random() < 0.5:
            self._client.finish_interrupted()
        with contextlib.suppress(Crash, TidelogError, OSError):
            self.node.crash()

    def recover(self) -> None:
        """Another process has what the dead one left, and may die as well before it has opened the engine."""
        while True:
            self.die()
            policy = self._choose.choice([policy for policy in POLICIES if policy != "holes"])
            torn_bytes = self._choose.randint(0, max(1, self._files.in_flight_bytes))
            self._begin(self._files, policy=policy, seed=self._choose.randrange(1 << 30), torn_bytes=torn_bytes)
            if self._choose.random() < 0.3:
                self.cut_soon()
            try:
                self._open()
                break
            except (Crash, TidelogError):
                if not self.faults.crashed:
                    raise
        self.faults.crash_at = None
        self._settle()

    def _open(self) -> None:
        if not self._is_restoring:
            self.node.open()
            return
        with opened(self._store) as reader:  # the engine goes on without it
            restoring = RestoringEngine(lambda: reader, lambda on_progress: self._restored())
            seq = StoreView(self._store).manifest.high_water_mark
            assert_state(cast(Engine, restoring), self.model, seq)
            assert restoring.wait(LIMIT_SECONDS) is self.engine
            assert_state(cast(Engine, restoring), self.model, seq)
        self._is_restoring = False

    def _restored(self) -> Engine:
        try:
            self.node.restore()
        except InputError as error:  # the one before has finished, and died while it opened the engine
            if "empty directory" not in str(error):
                raise
        return self.node.open().engine

    def _settle(self) -> None:
        """The model goes as far as the engine has come: some of what was under way may have been done."""
        while self.model.applied_seq != self.engine.applied_seq:
            assert self._under_way, f"at seq {self.engine.applied_seq} and not at {self.model.applied_seq}"
            self._under_way.pop(0)()
        self._under_way = []


class Walk:
    """An owner that is killed, and readers beside it."""

    def __init__(self, seed: int) -> None:
        self._choose = random.Random(seed)
        self.store = new_store()
        self.owner = Owner(self.store, self._choose)
        self.owner.apply_random()
        self._ship()
        self.reader = opened(self.store)
        self._built: BuiltCompaction | None = None

    def step(self) -> None:
        """Something happens to the owner, and some steps kill it."""
        owner = self.owner
        steps: list[tuple[int, Callable[[], object]]] = [
            (6, owner.apply_random),
            (5, self._ship),
            (3, owner.apply_conditions),
            (2, owner.apply_streams),
            (1, owner.apply_refused),
            (1, owner.apply_again),
            (1, owner.prefetch),
            (2, owner.roll_back),
            (2, owner.checkpoint),
            (2, lambda: self._by_another_process(checkpoint_by_hand)),
            (2, lambda: self._by_another_process(compact_by_hand)),
            (3, lambda: self._by_another_process(self._compact_slowly)),
            (1, lambda: self._by_another_process(_drop_log)),
            (3, owner.engine.collect_garbage),
            (1, lambda: owner.engine.compact(grace_seconds=0)),
            (1, owner.engine.compact_index),
            (1, owner.recover),
            (1, owner.close),
            (1, owner.fail_over),
        ]
        work = self._choose.choices([step for _, step in steps], [weight for weight, _ in steps])[0]
        if self._choose.random() < 0.4:
            owner.cut_soon()
        owner.do(work)

    def _ship(self) -> None:
        """Everything that was applied is everywhere, and goes to the store."""
        self.owner.engine.update_low_water_mark(self.owner.engine.applied_seq)
        self.owner.engine.ship()

    def _by_another_process(self, work: Callable[..., object]) -> None:
        """It dies by itself; the owner lives on."""
        faults = Faults()
        if self._choose.random() < 0.4:
            faults.crash_at = self._choose.randint(1, self._choose.choice(CUTS))
        # The same snapshot is listed already; or the owner has dropped the log of versions that it has removed.
        with contextlib.suppress(ConflictError, OffsetOutOfRangeError, Crash):
            work(self.store.another_client(faults), clock=self.owner.clock)

    def _compact_slowly(self, objects: ObjectStore, *, clock: Clock) -> None:
        """What is published was read some steps ago; readers may have seen more by then."""
        built, self._built = self._built, None
        if built is None:
            self._built = build_by_hand(objects, clock=clock)
        else:
            publish_by_hand(objects, built, clock=clock)

    def compare(self) -> None:
        """The owner has what the model has. Readers that were open before, and those that are opened now, have what the
        owner had at their seq.
        """
        engine, model = self.owner.engine, self.owner.model
        first = self.owner.node.core.history.start_seq
        for seq in {engine.applied_seq, self._choose.randint(first, engine.applied_seq)}:
            assert_state(engine, model, seq)
        self._compare(self.reader)
        if self._choose.random() < 0.5:
            self.reader.refresh()
            assert self.reader.applied_seq == StoreView(self.store).manifest.high_water_mark
            self._compare(self.reader)
        if self._choose.random() < 0.2:
            with opened(self.store) as fresh:
                assert fresh.applied_seq == StoreView(self.store).manifest.high_water_mark
                self._compare(fresh)

    def _compare(self, reader: EngineReader) -> None:
        model, first, last = self.owner.model, reader.history_start_seq, reader.applied_seq
        for seq in {last, self._choose.randint(first, last)}:
            # What the owner has removed since may be gone from the store.
            if seq >= self.owner.node.core.history.start_seq:
                assert_state(reader, model, seq)
                self._compare_scans(reader, seq)
                self._compare_many(reader, seq)
        self._compare_changes(reader)

    def _compare_many(self, reader: EngineReader, seq: int) -> None:
        """Those that are there, and some that are not, in any order."""
        owner = self.owner.engine
        keys = [(bucket, one.key) for bucket in owner.list_buckets(seq) for one in owner.list_objects(bucket, "", seq)]
        keys += [(bucket, "nowhere") for bucket, _ in keys[:2]]
        self._choose.shuffle(keys)
        found, expected = (
            [one and (one.data, one.metadata, one.seq) for one in each.read_many(keys, seq)] for each in (reader, owner)
        )
        assert found == expected

    def _compare_changes(self, reader: EngineReader) -> None:
        """From any seq on, as far as the store has the log. The owner may have more of it on its disk."""
        start_seq, last_seq = self._choose.randint(0, reader.applied_seq), reader.applied_seq
        try:
            found = list(reader.changes(start_seq))
        except GapError:
            assert Catalog(StoreView(self.store).metadata, KEYS).start_offset() > 1  # its beginning was dropped
            return
        expected = self.owner.engine.changes(start_seq)
        assert found == [change for change in expected if change.seq <= last_seq]
        assert list(reader.changes(start_seq, committed=True)) == found

    def _compare_scans(self, reader: EngineReader, seq: int) -> None:
        owner, choose = self.owner.engine, self._choose
        for bucket in reader.list_buckets(seq):
            keys = ["", "key/1", "key/5", "key-", "key/", "zzz", None]
            start, end, reverse = choose.choice(keys), choose.choice(keys), choose.random() < 0.5
            limit, prefix = choose.choice((None, 1, 3)), choose.choice(("", "key/", "key-"))
            for with_values in (False, True):
                found, expected = (
                    [
                        (one.key, one.size, one.seq, one.crc, one.data, one.metadata)
                        for one in each.scan(
                            *(bucket, start, end),
                            prefix=prefix,
                            reverse=reverse,
                            limit=limit,
                            with_values=with_values,
                            seq=seq,
                        )
                    ]
                    for each in (reader, owner)
                )
                assert found == expected
            after = choose.choice((None, "key/", "key/1"))
            for delimiter in ("", "/"):
                listed = [
                    list(each.list_objects(bucket, prefix[:3], seq, start_after=after, delimiter=delimiter))
                    for each in (reader, owner)
                ]
                assert listed[0] == listed[1]

    def close(self) -> None:
        self.reader.close()
        self.owner.node.close()


def _broken(data: bytes) -> Iterator[bytes]:
    yield data
    raise OSError("the peer is gone")


def _drop_log(objects: ObjectStore, *, clock: Clock) -> None:
    """What is unnecessary after a compaction."""
    drop_wal(objects, BucketMetadataStore(objects), KEYS, 1 << 60, clock=clock)


@pytest.mark.parametrize("group", range(GROUPS))
def test_owner_that_is_killed_anywhere_and_readers_have_what_they_may(group: int) -> None:
    """Whatever the owner does: it applies, ships, rolls back, compacts, removes, opens, is replaced. A failure names
    its seed.
    """
    begin, deaths = first_seed() + group * WALKS_OF_A_GROUP, 0
    for seed in range(begin, begin + WALKS_OF_A_GROUP):
        try:
            with quiet_crashes():
                walk = Walk(seed)
                for _ in range(STEPS):
                    walk.step()
                    walk.compare()
                walk.close()
                deaths += walk.owner.deaths
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert deaths > WALKS_OF_A_GROUP
