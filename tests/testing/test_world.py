"""Disks, an object store and a metadata store that die together: one machine for the crash driver."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from tidelog.cold.catalog import Owner
from tidelog.cold.lease import NodeLease
from tidelog.errors import ConflictError, StoreUnavailableError
from tidelog.log import Log
from tidelog.store.metadata import Check, Put
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.testing import BrokenPromiseError, Crash, CrashPlan, History, ManualClock, World, cut_world_everywhere

ROOT = Path("/")
LOG = Path("/log")
DESCRIPTOR = "t/segments/0"
OBJECT = "data-0"
VALUES = [b"one", b"two", b"three"]


def node_of(world: World, name: str, in_bucket: bool) -> NodeLease:
    """The lease of a node, in the metadata store of the world or in its bucket."""
    metadata = BucketMetadataStore(world.store) if in_bucket else world.metadata
    return NodeLease(metadata, world.clock, name, ROOT, renews_itself=False)


def write_file(world: World, node: str, name: str, content: bytes, *, sync: bool = True) -> None:
    """A file on a node's disk."""
    file = world.files(node).create(ROOT / name)
    file.write_at(0, content)
    if sync:
        file.sync()
        world.files(node).sync_directory(ROOT)
    file.close()


def append_all(world: World, history: History) -> None:
    """The real log, on the disk of node a."""
    log = Log.open(LOG, files=world.files("a"))
    try:
        for value in VALUES:
            history.attempted("main", value)
            offset = log.append(value, sync=True)
            history.accepted("main", offset, value)
            history.synced(offset)
    finally:
        log.close()


def local_values(world: World) -> list[bytes]:
    """What the log of node a holds."""
    log = Log.open(LOG, files=world.files("a"))
    try:
        return [value for batch in log.read() for value in batch.payloads()]
    finally:
        log.close()


def upload(world: World) -> None:
    """All that is local, as one object."""
    with world.store.open_writer(OBJECT) as writer:
        writer.write(json.dumps([value.decode() for value in local_values(world)]).encode())


def publish(world: World) -> None:
    """The descriptor, unless it is there."""
    try:
        world.metadata.commit([Check(DESCRIPTOR, None)], [Put(DESCRIPTOR, OBJECT.encode())])
    except ConflictError:
        return


def ship_and_prune(world: World, history: History) -> None:
    """Object, descriptor, then the local files go: in this order nothing is lost."""
    append_all(world, history)
    upload(world)
    publish(world)
    world.files("a").remove_tree(LOG)


def shipped_values(world: World) -> list[bytes]:
    """What any node finds in the cold tier."""
    found = world.metadata.get(DESCRIPTOR)
    if found is None:
        return []
    return [value.encode() for value in json.loads(world.store.get(found.value.decode()).data)]


def nothing_is_lost(world: World, history: History) -> None:
    """Everything that was synced is in the bucket or on the disk of node a."""
    shipped = shipped_values(world)
    kept = shipped if shipped else local_values(world)
    assert kept[: len(history.synced_offsets)] == VALUES[: len(history.synced_offsets)], "lost"


class TestParts:
    """One death, several parts."""

    def test_all_parts_have_one_numbering(self) -> None:
        """The trace names the part of every call."""
        world = World(part_bytes=2)
        world.files("a").make_directory(ROOT / "d")
        world.store.put("a", b"")
        world.metadata.put("b", b"")
        world.files("b").make_directory(ROOT / "d")
        with world.store.open_writer("c") as writer:
            writer.write(b"012")
        assert [str(call) for call in world.calls] == [
            "1 a.make_directory /d",
            "2 store.put a",
            "3 metadata.commit b",
            "4 b.make_directory /d",
            "5 store.begin_upload c",
            "6 store.upload_part c",
            "7 store.upload_part c",
            "8 store.publish c",
        ]

    def test_all_parts_die_together(self) -> None:
        """The process that used them is dead."""
        world = World(crash_at=2)
        write_part = world.files("b")
        world.files("a").make_directory(ROOT / "d")
        with pytest.raises(Crash):
            world.store.put("a", b"")
        assert world.crashed
        for use in (lambda: write_part.list(ROOT), lambda: world.metadata.get("a"), lambda: world.store.head("a")):
            with pytest.raises(Crash):
                use()

    def test_parts_fail_each_for_itself(self) -> None:
        """A full disk on one node is none on the other, and an outage of the store is none of the metadata."""
        world = World()
        world.files("a").fail("create", error=errno.ENOSPC, times=None)
        world.store.fail("*", times=None)
        write_file(world, "b", "x", b"")
        world.metadata.put("a", b"")
        with pytest.raises(OSError, match="No space"):
            write_file(world, "a", "x", b"")
        with pytest.raises(StoreUnavailableError):
            world.store.put("a", b"")
        world.heal()
        write_file(world, "a", "x", b"")
        world.store.put("a", b"")

    def test_objects_have_the_time_of_the_world(self) -> None:
        """Also after a crash."""
        clock = ManualClock()
        world = World(clock=clock)
        world.store.put("a", b"")
        after = world.after_crash()
        clock.advance(60)
        after.store.put("b", b"")
        times = [info.modified_us for info in after.store.list()]
        assert times[1] - times[0] == 60_000_000


class TestAfterwards:
    """What a crash leaves."""

    def test_disks_suffer_and_stores_do_not(self) -> None:
        """They are other machines: the policy is about disks."""
        world = World()
        for node in ("a", "b"):
            write_file(world, node, "synced", b"1")
            write_file(world, node, "unsynced", b"2", sync=False)
        world.store.put("a", b"object")
        world.metadata.put("a", b"entry")
        lost, kept = world.after_crash("lose"), world.after_crash("keep")
        for node in ("a", "b"):
            assert lost.files(node).tree() == {"/synced": b"1"}
            assert kept.files(node).tree() == {"/synced": b"1", "/unsynced": b"2"}
        for found in (lost, kept):
            assert found.store.contents() == {"a": b"object"}
            assert found.metadata.contents() == {"a": b"entry"}

    def test_what_is_found_changes_by_itself(self) -> None:
        """One crash can be looked at many times, and the next life be cut short too."""
        world = World(multi_key=False, part_bytes=3)
        write_file(world, "a", "x", b"")
        found = world.after_crash("lose", crash_at=3)
        found.store.put("a", b"")
        found.files("a").remove(ROOT / "x")
        with pytest.raises(Crash):
            found.metadata.put("a", b"")
        assert (world.store.contents(), world.files("a").tree()) == ({}, {"/x": b""})
        assert (found.metadata.supports_multi_key, found.store.part_bytes) == (False, 3)

    @pytest.mark.parametrize("part", ["store", "metadata"])
    def test_the_last_call_of_a_store_was_done_or_was_not(self, part: str) -> None:
        """It counts as a write of one byte."""
        world = World(crash_at=1)
        with pytest.raises(Crash):
            world.store.put("a", b"") if part == "store" else world.metadata.put("a", b"")
        assert world.in_flight_bytes == 1
        found = [world.after_crash(torn_bytes=torn) for torn in (0, 1)]
        assert [len(getattr(each, part).contents()) for each in found] == [0, 1]
        assert found[0].image() != found[1].image()
        assert found[0].image() == world.after_crash("keep").image()

    def test_the_last_write_of_a_disk_is_torn(self) -> None:
        """As it is without stores."""
        world = World(crash_at=2)
        with pytest.raises(Crash):
            write_file(world, "a", "x", b"01234")
        assert world.in_flight_bytes == 5
        assert world.after_crash("keep", torn_bytes=3).files("a").tree() == {"/x": b"012"}

    def test_a_disk_can_be_lost(self) -> None:
        """That of one node; everything else is as it was."""
        world = World()
        for node in ("a", "b"):
            write_file(world, node, "x", b"")
        world.store.put("a", b"object")
        found = world.lose_disk("a")
        assert (found.files("a").tree(), found.files("b").tree()) == ({}, {"/x": b""})
        assert found.store.contents() == {"a": b"object"}
        assert world.files("a").tree() == {"/x": b""}


class TestCutting:
    """The driver over all parts."""

    def test_an_honest_order_passes_at_every_cut(self) -> None:
        """Calls of disk, store and metadata are all cut points."""
        summary = cut_world_everywhere(ship_and_prune, nothing_is_lost)
        world = World()
        ship_and_prune(world, History())
        assert summary.cut_points >= len(world.calls)
        assert {call.operation.partition(".")[0] for call in world.calls} == {"a", "store", "metadata"}

    def test_pruning_before_the_descriptor_is_found(self) -> None:
        """A crash between the two parts shows the loss, with the calls that led there."""

        def workload(world: World, history: History) -> None:
            append_all(world, history)
            upload(world)
            world.files("a").remove_tree(LOG)
            world.files("a").sync_directory(ROOT)
            publish(world)

        with pytest.raises(BrokenPromiseError, match="lost") as failure:
            cut_world_everywhere(workload, nothing_is_lost, CrashPlan(policies=("lose",)))
        assert "store.publish data-0" in str(failure.value)

    def test_a_descriptor_before_its_object_is_found(self) -> None:
        """Whoever reads then finds a name without content."""

        def workload(world: World, history: History) -> None:
            append_all(world, history)
            publish(world)
            upload(world)

        with pytest.raises(BrokenPromiseError, match="no such object"):
            cut_world_everywhere(workload, nothing_is_lost)

    def test_a_disk_that_is_lost_too_is_found(self) -> None:
        """What was not shipped is gone with it, and the check can say so."""

        def check(world: World, history: History) -> None:
            replaced = world.lose_disk("a")
            assert shipped_values(replaced) in ([], VALUES)
            assert replaced.files("a").list(ROOT) == []

        cut_world_everywhere(ship_and_prune, check, CrashPlan(policies=("lose",)))

    def test_a_world_may_have_a_past(self) -> None:
        """Shipping again after a crash in the middle of shipping publishes once, wherever that is cut."""
        prepared, history = World(part_bytes=4), History()
        append_all(prepared, history)

        def again(world: World, _: History) -> None:
            upload(world)
            publish(world)

        def check(world: World, _: History) -> None:
            again(world, History())
            assert shipped_values(world) == VALUES

        summary = cut_world_everywhere(
            again, check, start=lambda crash_at: prepared.after_crash("keep", crash_at=crash_at)
        )
        assert summary.cut_points > 5

    @pytest.mark.parametrize("in_bucket", [False, True])
    def test_leases_of_a_world_run_out(self, in_bucket: bool) -> None:
        """Whoever died in it held its topics; afterwards another node opens them, and nothing else has changed."""
        world = World()
        dead = node_of(world, "a", in_bucket)
        dead.hold()
        owner = Owner(
            epoch=1, claim="c", incarnation="c", node="a", claimed_us=0, log_id="00" * 16, session=dead.session
        )
        world.crash()
        after = world.after_crash()
        after.metadata.put(DESCRIPTOR, b"stays")
        other = node_of(after, "b", in_bucket)
        assert other.holder(owner) is not None
        calls = len(after.calls)
        after.end_leases()
        assert other.holder(owner) is None
        assert after.metadata.contents() == {DESCRIPTOR: b"stays"}
        assert len(after.calls) == calls

    def test_a_late_descriptor_cannot_overtake(self) -> None:
        """The stores of a world answer late as well, also in the life after a crash."""
        world = World()
        world.metadata.fail("commit", "late")
        with pytest.raises(StoreUnavailableError):
            publish(world)
        after = world.after_crash()
        after.metadata.put(DESCRIPTOR, b"of the next owner")
        assert after.metadata.land_late_writes() == 1
        assert after.metadata.contents() == {DESCRIPTOR: b"of the next owner"}
