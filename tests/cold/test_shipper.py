"""The shipper: what is synced becomes published objects, once each, whatever fails on the way."""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from tests.cold.published import KINDS
from tests.cold.station import DIRECTORY, FRAME_BYTES, Node, Stores

from tidelog.cold.settings import TierSettings
from tidelog.cold.shipper import NAME as CHECKPOINT
from tidelog.cold.shipper import read_uploader_checkpoint
from tidelog.errors import ClosedError, CorruptionError, DataError, FencedError, StoreUnavailableError, TidelogError
from tidelog.log.binding import BINDING_BYTES
from tidelog.store.scheduler import NEVER, with_backoff
from tidelog.testing import FaultyMetadata

FILE_BYTES = 3 * FRAME_BYTES
SMALL_OBJECTS = TierSettings(max_object_bytes=FILE_BYTES, ship_interval_seconds=5, ship_retry_max_seconds=60)


@pytest.fixture(params=KINDS)
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    with Node(Stores(request.param)).open(SMALL_OBJECTS) as node:
        yield node


@pytest.fixture
def simple() -> Iterator[Node]:
    """Over stores that can be made to fail."""
    with Node(Stores()).open(SMALL_OBJECTS) as node:
        yield node


def metadata_of(node: Node) -> FaultyMetadata:
    assert isinstance(node.stores.metadata, FaultyMetadata)
    return node.stores.metadata


def offsets(node: Node) -> list[tuple[int, int]]:
    return [(one.start_offset, one.next_offset) for one in node.stores.descriptors()]


def shipped_bytes(node: Node) -> bytes:
    contents, keys = node.stores.objects.contents(), node.stores.catalog.keys
    return b"".join(contents[keys.object(one.name)][BINDING_BYTES:] for one in node.stores.descriptors())


def log_bytes(node: Node) -> bytes:
    return b"".join(
        node.files.read(part.segment.path)[BINDING_BYTES:] for part in node.log.parts(0, node.log.next_offset)
    )


def retried(node: Node) -> Callable[[], float]:
    """A background round, as an owner runs it."""
    return with_backoff(node.shipper.ship_if_due, SMALL_OBJECTS.ship_retry_max_seconds, lambda error: None)


def uploads(node: Node) -> int:
    return node.stores.objects.traffic.requests.get("publish", 0)


# Shipping


def test_everything_synced_is_shipped_in_order(node: Node) -> None:
    """Contiguous objects, byte for byte the log, each described by what is in it."""
    node.append(20)
    assert node.shipper.ship() == 20 == node.shipper.shipped_offset
    assert offsets(node) == [*((start, start + 3) for start in range(0, 18, 3)), (18, 20)]
    assert shipped_bytes(node) == log_bytes(node)
    for one in node.stores.descriptors():
        info = node.stores.objects.head(node.stores.catalog.keys.object(one.name))
        assert (one.size, one.etag, one.epoch) == (info.size, info.etag, node.owned.epoch)
        assert one.created_us == node.stores.clock.now_us()


def test_what_is_not_synced_is_not_shipped(node: Node) -> None:
    """The store never has an offset that a power cut takes from the disk."""
    node.append(4)
    node.log.append(node.payload(4))
    assert node.log.durable_offset == 4
    assert node.shipper.ship() == 4


def test_nothing_new_is_nothing_to_do(node: Node) -> None:
    """A second call sends nothing."""
    node.append(4)
    node.shipper.ship()
    before = uploads(node)
    assert node.shipper.ship() == 4
    assert uploads(node) == before


def test_nothing_at_or_above_the_gate_is_shipped(node: Node) -> None:
    """Also where the gate is inside a file, and when it moves on."""
    gate = [0]
    node.shipper.gate = lambda: gate[0]
    node.append(10)
    for allowed in (0, 1, 5, 5, 8, 100):
        gate[0] = allowed
        assert node.shipper.ship() == min(allowed, 10)
        assert node.stores.catalog.next_offset() == min(allowed, 10)
    assert shipped_bytes(node) == log_bytes(node)


def test_a_later_life_goes_on_where_the_catalog_ends(node: Node) -> None:
    """With the place that was written down, without it, and with one that is wrong."""
    node.append(4)
    node.shipper.ship()
    for change in ("kept", "lost", "damaged"):
        node.close()
        if change == "lost":
            node.files.remove(DIRECTORY / CHECKPOINT)
        elif change == "damaged":
            node.files.write_atomically(DIRECTORY / CHECKPOINT, b"nonsense")
        node.open(SMALL_OBJECTS)
        node.append(4)
        assert node.shipper.ship() == node.log.next_offset
    assert all(before[1] == behind[0] for before, behind in pairwise(offsets(node)))
    assert shipped_bytes(node) == log_bytes(node)


def test_the_place_is_written_down(node: Node) -> None:
    """After each object: the offset, the file, the byte, the object and the epoch."""
    node.append(5)
    node.shipper.ship()
    found = read_uploader_checkpoint(node.files, DIRECTORY)
    assert found is not None
    assert (found.next_offset, found.file_seq, found.byte, found.epoch) == (5, 1, 2 * FRAME_BYTES, 1)
    assert found.last_object_id == "data-3-4-e1.tlog"


def test_a_place_that_cannot_be_written_does_not_stop_shipping(node: Node) -> None:
    """It is a hint; the catalog knows."""
    node.append(9)
    node.files.fail("rename", times=None, matching=CHECKPOINT)
    assert node.shipper.ship() == 9


def test_reached_times_grow_from_one_object_to_the_next(node: Node) -> None:
    """Also over a change of owner, and when messages are older than those before."""
    node.append(3)
    node.stores.clock.advance(-50)
    node.append(3)
    node.shipper.ship()
    node.close()
    node.open(SMALL_OBJECTS)
    node.append(3)
    node.shipper.ship()
    reached = [one.reached_time_us for one in node.stores.descriptors()]
    last = [one.last_time_us for one in node.stores.descriptors()]
    assert last[1] == last[2] < last[0]  # type: ignore[operator]  # all of them have times
    assert reached == [last[0]] * 3


# Failing


@pytest.mark.parametrize("fault", ["unavailable", "unanswered", "late", "denied"])
def test_an_upload_that_failed_is_made_again_as_it_was_planned(simple: Node, fault: str) -> None:
    """Under the same name, although there is more to ship by then; nothing is published twice and no orphan stays."""
    simple.append(2)
    simple.stores.objects.fail("publish", fault)  # type: ignore[arg-type]  # all are faults
    with pytest.raises(TidelogError):
        simple.shipper.ship()
    assert simple.shipper.in_flight() == [simple.stores.catalog.keys.objects_prefix + "data-0-1-e1.tlog"]
    simple.append(4)
    assert simple.shipper.ship() == 6
    simple.stores.objects.land_late_writes()
    assert offsets(simple)[0] == (0, 2)
    assert shipped_bytes(simple) == log_bytes(simple)
    assert len(simple.stores.object_keys()) == len(offsets(simple))
    assert simple.shipper.in_flight() == []


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("fault", ["unavailable", "unanswered", "late", "conflict"])
def test_an_undecided_publication_is_made_again_without_a_second_upload(kind: str, fault: str) -> None:
    """The object is in the store; only its descriptor is in doubt, and that is settled."""
    with Node(Stores(kind)).open(SMALL_OBJECTS) as node:
        node.append(2)
        metadata_of(node).fail("commit", fault)  # type: ignore[arg-type]  # all are faults
        with pytest.raises(TidelogError):
            node.shipper.ship()
        assert uploads(node) == 1
        assert node.shipper.shipped_offset == 0
        assert node.shipper.ship() == 2
        metadata_of(node).land_late_writes()
        assert uploads(node) == 1
        node.append(1)
        assert node.shipper.ship() == 3
        assert offsets(node) == [(0, 2), (2, 3)]


@pytest.mark.parametrize("operation", ["get", "range", "floor"])
def test_a_catalog_out_of_reach_costs_no_second_upload(simple: Node, operation: str) -> None:
    """Whatever is asked for first, the object is sent once."""
    simple.append(2)
    metadata_of(simple).fail(operation, times=None)
    for _ in range(3):
        try:
            simple.shipper.ship()
        except StoreUnavailableError:
            continue
    metadata_of(simple).heal()
    assert simple.shipper.ship() == 2
    assert uploads(simple) == 1


def test_damage_stops_shipping_there(simple: Node) -> None:
    """What is before it is shipped, nothing behind it is, and the statistics say where it is."""
    simple.append(9)
    data = simple.files.read(DIRECTORY / "wal.0000000001.log")
    file = simple.files.open(DIRECTORY / "wal.0000000001.log", write=True)
    file.write_at(20, bytes([data[20] ^ 1]))
    file.close()
    for _ in range(2):
        with pytest.raises(CorruptionError):
            simple.shipper.ship()
    assert offsets(simple) == [(0, 3)]
    statistics = simple.shipper.statistics()
    assert statistics.shipped_offset == 3
    assert "wal.0000000001.log" in (statistics.last_error or "")
    assert len(simple.stores.object_keys()) == 1


@pytest.mark.parametrize("operation", ["open", "read_at"])
def test_a_disk_that_fails_is_an_error_of_ours(simple: Node, operation: str) -> None:
    """Whoever ships sees one kind of error, it is counted, and in the background it is tried again."""
    simple.append(9)
    simple.files.fail(operation, error=errno.EIO, times=None)  # type: ignore[arg-type]  # both are operations
    with pytest.raises(TidelogError, match="Input/output"):
        simple.shipper.ship()
    assert simple.shipper.statistics().errors == 1
    simple.stores.clock.advance(1000)
    assert retried(simple)() <= 0.5
    simple.files.heal()
    assert simple.shipper.ship() == 9


def test_a_fenced_shipper_publishes_nothing(simple: Node) -> None:
    """Not even what it has uploaded already."""
    simple.append(3)
    metadata_of(simple).fail("commit")
    with pytest.raises(StoreUnavailableError):
        simple.shipper.ship()
    with Node(simple.stores, "b").open():
        with pytest.raises(FencedError):
            simple.shipper.ship()
        simple.stores.clock.advance(100)
        with pytest.raises(FencedError):
            simple.shipper.ship_if_due()
    assert offsets(simple) == []


def test_a_name_that_is_taken_is_not_overwritten(simple: Node) -> None:
    """An object of our epoch that we have not sent is somebody's with another catalog."""
    simple.append(3)
    key = simple.stores.catalog.keys.objects_prefix + "data-0-2-e1.tlog"
    simple.stores.objects.put(key, b"theirs")
    with pytest.raises(DataError, match="already exists"):
        simple.shipper.ship()
    assert simple.stores.objects.get(key).data == b"theirs"


def test_a_closed_shipper_sends_nothing(simple: Node) -> None:
    """What is under way is given up before it is published."""
    simple.append(6)

    def close_after_upload(operation: str, _key: str) -> None:
        if operation == "publish":
            simple.shipper.close()

    simple.stores.objects.on_request = close_after_upload
    with pytest.raises(ClosedError):
        simple.shipper.ship()
    assert offsets(simple) == []
    simple.stores.clock.advance(100)
    assert retried(simple)() == SMALL_OBJECTS.ship_retry_max_seconds


# When it is due


def due_settings(**changes: float) -> TierSettings:
    settings = {"ship_min_bytes": 10 * FRAME_BYTES, "ship_max_delay_seconds": 60.0, "ship_interval_seconds": 5.0}
    return TierSettings(**{**settings, **changes})  # type: ignore[arg-type]  # numbers of the right kind


def test_enough_bytes_are_due_at_once() -> None:
    """However young they are; less waits."""
    with Node(Stores()).open(due_settings()) as node:
        node.append(9)
        assert node.shipper.ship_if_due() == 5.0
        assert node.shipper.shipped_offset == 0
        node.append(1)
        assert node.shipper.ship_if_due() == NEVER  # until something is appended
        assert node.shipper.shipped_offset == 10


def test_a_few_bytes_are_due_when_they_are_old_enough() -> None:
    """Counted from when they were first seen; each object begins the count anew."""
    with Node(Stores()).open(due_settings()) as node:
        node.append(1)
        node.shipper.ship_if_due()
        node.stores.clock.advance(59)
        node.shipper.ship_if_due()
        assert node.shipper.shipped_offset == 0
        node.stores.clock.advance(1)
        node.shipper.ship_if_due()
        assert node.shipper.shipped_offset == 1
        node.append(1)
        node.shipper.ship_if_due()
        assert node.shipper.shipped_offset == 1
        node.stores.clock.advance(60)
        node.shipper.ship_if_due()
        assert node.shipper.shipped_offset == 2


def test_an_idle_time_does_not_make_a_new_message_old() -> None:
    """An hour without messages, then one: it waits its own time."""
    with Node(Stores()).open(due_settings()) as node:
        for _ in range(3):
            node.shipper.ship_if_due()
            node.stores.clock.advance(3600)
        node.append(1)
        node.shipper.ship_if_due()
        assert node.shipper.shipped_offset == 0


def test_restarts_do_not_put_shipping_off() -> None:
    """An owner that is restarted more often than `ship_max_delay_seconds` ships all the same."""
    node = Node(Stores())
    for restart in range(3):
        with node.open(due_settings()):
            if not restart:
                node.append(1)
            node.shipper.ship_if_due()
            assert node.shipper.shipped_offset == 0
            node.stores.clock.advance(25)
    with node.open(due_settings()):
        node.shipper.ship_if_due()
        assert node.shipper.shipped_offset == 1


@pytest.mark.parametrize("said_seconds", [-(10**6), 10**6])
def test_a_message_with_a_wrong_time_is_due_from_the_last_object_on(said_seconds: int) -> None:
    """A time of the user's own, long ago or in the future, neither ships at each look nor puts shipping off."""
    node = Node(Stores())
    with node.open(due_settings()):
        node.append(1)
        node.shipper.ship()
        node.stores.clock.advance(50)
        said_us = node.stores.clock.now_us() + said_seconds * 1_000_000
        node.log.append(struct.pack("<q", said_us) + node.payload(1)[8:], sync=True)
    with node.open(due_settings()):
        node.shipper.ship_if_due()
        assert node.shipper.shipped_offset == 1
    node.stores.clock.advance(10)
    with node.open(due_settings()):
        node.shipper.ship_if_due()
        assert node.shipper.shipped_offset == 2


def test_what_came_during_an_upload_waits_from_its_beginning() -> None:
    """The count of a message that was accepted while another was shipped does not begin after that."""
    with Node(Stores()).open(due_settings()) as node:
        node.append(1)

        def append_another(operation: str, _key: str) -> None:
            if operation == "publish" and node.log.next_offset == 1:
                node.append(1)
                node.stores.clock.advance(60)

        node.stores.objects.on_request = append_another
        assert node.shipper.ship() == 1
        node.shipper.ship_if_due()
        assert node.shipper.shipped_offset == 2


def test_nothing_is_due_above_the_gate() -> None:
    """However much waits behind it."""
    with Node(Stores()).open(due_settings(ship_min_bytes=1), gate=lambda: 2) as node:
        node.append(10)
        node.shipper.ship_if_due()
        assert node.shipper.shipped_offset == 2
        node.stores.clock.advance(1000)
        node.shipper.ship_if_due()
        assert node.shipper.shipped_offset == 2


def test_pauses_grow_are_bounded_and_jittered(simple: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second, doubled each time up to the longest; a success begins anew."""
    simple.append(9)
    simple.stores.clock.advance(100)
    simple.shipper.ship_if_due()
    simple.stores.clock.advance(100)
    simple.stores.objects.fail("*", times=None)
    monkeypatch.setattr("tidelog.store.scheduler.jittered", lambda seconds: seconds)
    ship_if_due = retried(simple)
    longest = [ship_if_due() for _ in range(12)]
    assert longest == [min(60, 0.5 * 2**turn) for turn in range(12)]
    monkeypatch.undo()
    pauses = {ship_if_due() for _ in range(40)}
    assert len(pauses) > 20
    assert all(30 <= pause <= 60 for pause in pauses)
    simple.stores.objects.heal()
    assert ship_if_due() == NEVER
    assert simple.shipper.shipped_offset == 9
    simple.append(9)
    simple.stores.objects.fail("*", times=None)
    ship_if_due()
    simple.stores.clock.advance(100)
    assert ship_if_due() <= 0.5


def test_a_failure_is_tried_again_without_waiting_to_be_due() -> None:
    """What was due and failed is due."""
    with Node(Stores()).open(due_settings()) as node:
        node.append(10)
        node.stores.objects.fail("publish")
        with pytest.raises(StoreUnavailableError):
            node.shipper.ship_if_due()
        assert node.shipper.shipped_offset == 0
        node.shipper.ship_if_due()
        assert node.shipper.shipped_offset == 10


# Looking at it


def test_lag_is_what_a_lost_disk_would_cost(simple: Node) -> None:
    """In messages, bytes and seconds, with the time of the oldest message that is not shipped."""
    simple.append(3)
    simple.shipper.ship()
    shipped = simple.shipper.statistics()
    assert (shipped.lag_messages, shipped.lag_bytes, shipped.lag_seconds) == (0, 0, 0.0)
    assert shipped.oldest_unshipped_us is None
    begin = simple.stores.clock.now_us()
    simple.append(2)
    simple.stores.clock.advance(30)
    simple.append(2)
    lagging = simple.shipper.statistics()
    assert (lagging.lag_messages, lagging.lag_bytes) == (4, 4 * FRAME_BYTES)
    assert (lagging.oldest_unshipped_us, lagging.lag_seconds) == (begin, 30.0)


def test_lag_counts_from_when_a_message_came(simple: Node) -> None:
    """One that was appended again has its old time: it has waited since everything was in the store, no longer."""
    old = simple.payload(1)
    simple.append(2)
    simple.shipper.ship()
    simple.stores.clock.advance(500)
    assert simple.shipper.statistics().lag_messages == 0
    simple.stores.clock.advance(3)
    simple.log.append(old)
    simple.log.flush()
    assert simple.shipper.statistics().lag_seconds == 3.0


def test_messages_that_are_in_memory_only_count_as_lag(simple: Node) -> None:
    """They would be lost too."""
    simple.append(1)
    simple.log.append(simple.payload(1))
    assert simple.shipper.statistics().lag_messages == 2


def test_what_was_done_is_counted(simple: Node) -> None:
    """Objects, bytes, cycles and errors; a success clears the last error and the row, not the sum."""
    simple.append(9)
    simple.stores.objects.fail("publish", nth=2, times=2)
    for _ in range(2):
        with pytest.raises(StoreUnavailableError):
            simple.shipper.ship()
    failed = simple.shipper.statistics()
    assert (failed.objects_created, failed.errors, failed.errors_in_a_row, failed.cycles) == (1, 2, 2, 2)
    assert "not available" in (failed.last_error or "")
    simple.shipper.ship()
    done = simple.shipper.statistics()
    assert (done.objects_created, done.errors, done.errors_in_a_row, done.cycles) == (3, 2, 0, 3)
    assert (done.last_error, done.last_object_id) == (None, "data-6-8-e1.tlog")
    assert done.raw_bytes_uploaded == 9 * FRAME_BYTES
    assert done.bytes_uploaded == 9 * FRAME_BYTES + 3 * BINDING_BYTES
    assert done.uploading is None


def test_an_upload_under_way_can_be_seen(simple: Node) -> None:
    """Which object, and how large it will be."""
    simple.append(3)
    seen = []

    def look(operation: str, _key: str) -> None:
        if operation == "publish":
            seen.append(simple.shipper.statistics())

    simple.stores.objects.on_request = look
    simple.shipper.ship()
    assert [(one.uploading, one.uploading_raw_bytes) for one in seen] == [("data-0-2-e1.tlog", 3 * FRAME_BYTES)]


def test_compressed_objects_count_both_sizes() -> None:
    """What was sent, and what it was made of."""
    with Node(Stores()).open(TierSettings(ship_compression="zstd")) as node:
        node.append(100)
        node.shipper.ship()
        statistics = node.shipper.statistics()
        (descriptor,) = node.stores.descriptors()
        assert statistics.raw_bytes_uploaded == 100 * FRAME_BYTES == descriptor.raw_size
        assert statistics.bytes_uploaded == descriptor.size < 100 * FRAME_BYTES
        assert descriptor.codec == "zstd"
