"""Sending several objects at once, and publishing them in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from tests.cold.station import FRAME_BYTES, Node, Stores

from tidelog.cold.settings import TierSettings
from tidelog.cold.shipper import Shipper
from tidelog.errors import ClosedError, StoreUnavailableError
from tidelog.store.keys import CheckpointId, EngineKeys, TopicKeys, parse_topic_key

ONE_FILE = TierSettings(max_object_bytes=3 * FRAME_BYTES)


@pytest.fixture
def node() -> Iterator[Node]:
    """A topic with four files and nothing shipped."""
    with Node(Stores()).open() as opened:
        opened.append(12)
        yield opened


def shipper_of(node: Node, concurrency: int = 3, first_position: int | None = None) -> Shipper:
    """A shipper that sends several at once."""
    return Shipper(
        *(node.log, node.owned, node.stores.objects, ONE_FILE, node.stores.clock, 0, 0),
        concurrency=concurrency,
        first_position=first_position,
    )


def test_objects_are_sent_at_once(node: Node) -> None:
    """As many uploads as were asked for are under way at the same moment."""
    together = threading.Barrier(3)
    shipper = shipper_of(node)
    send, waited = shipper.send, 0

    def meet(shipment, key):  # type: ignore[no-untyped-def]
        nonlocal waited
        if shipment.first_offset < 9:
            together.wait(120)
            waited += 1
        return send(shipment, key)

    shipper.send = meet
    assert shipper.ship() == 12
    assert waited == 3
    assert [one.start_offset for one in node.stores.descriptors()] == [0, 3, 6, 9]


def test_what_was_sent_early_is_published_in_order(node: Node) -> None:
    """An object that is there before the one in front of it waits: a reader never sees a hole."""
    shipper = shipper_of(node)
    send, others_are_there = shipper.send, threading.Event()
    sent: list[int] = []

    def first_comes_last(shipment, key):  # type: ignore[no-untyped-def]
        if shipment.first_offset == 0:
            others_are_there.wait(120)
            assert node.stores.descriptors() == []
        uploaded = send(shipment, key)
        sent.append(shipment.first_offset)
        if len(sent) == 2:
            others_are_there.set()
        return uploaded

    shipper.send = first_comes_last
    assert shipper.ship() == 12
    assert [one.start_offset for one in node.stores.descriptors()] == [0, 3, 6, 9]


def test_one_that_failed_is_sent_again_and_the_others_are_not(node: Node) -> None:
    """Objects behind one that failed stay where they are, and are published once it is there."""
    shipper = shipper_of(node)
    send, calls = shipper.send, []
    fails = [True]

    def unlucky(shipment, key):  # type: ignore[no-untyped-def]
        calls.append(shipment.first_offset)
        if shipment.first_offset == 3 and fails.pop():
            raise StoreUnavailableError("no answer")
        return send(shipment, key)

    shipper.send = unlucky
    with pytest.raises(StoreUnavailableError):
        shipper.ship()
    assert shipper.shipped_offset == 3
    fails.append(False)
    assert shipper.ship() == 12
    assert calls.count(3) == 2
    assert sorted(set(calls)) == [0, 3, 6, 9]
    assert all(calls.count(start) == 1 for start in (0, 6, 9))


def test_only_so_many_objects_are_shipped_at_a_time(node: Node) -> None:
    """A call may be bounded, and the next one goes on behind it."""
    shipper = shipper_of(node, concurrency=1)
    assert shipper.ship(max_objects=2) == 6
    assert shipper.ship() == 12


def test_objects_say_their_position_when_asked_to(node: Node) -> None:
    """Positions add up over objects, also by a shipper that begins behind some."""
    assert shipper_of(node, 1, first_position=0).ship(max_objects=2) == 6
    later = Shipper(
        *(node.log, node.owned, node.stores.objects, ONE_FILE, node.stores.clock, 0, 6), concurrency=2, first_position=0
    )
    assert later.ship() == 12
    assert [one.start_position for one in node.stores.descriptors()] == [3 * FRAME_BYTES * n for n in range(4)]


def test_a_closed_shipper_sends_nothing(node: Node) -> None:
    """Closing ends it, with threads as without."""
    shipper = shipper_of(node)
    shipper.close()
    with pytest.raises(ClosedError):
        shipper.ship()
    assert node.stores.object_keys() == []


def test_keys_of_an_engine_are_no_topics() -> None:
    """No key of an engine is taken for one of a topic, and its names are read back as they were built."""
    keys = EngineKeys("main")
    assert parse_topic_key(keys.owner) is None
    assert not keys.objects_prefix.startswith("storage/topics/")
    assert keys.metadata_prefix != TopicKeys("engine", "main").metadata_prefix
    name = CheckpointId(7, 12, 3, "0d" * 16)
    assert keys.parse_checkpoint(keys.checkpoint(name)) == name
    assert keys.parse_checkpoint(keys.checkpoints_prefix + str(name).replace("-7-", "-07-")) is None
    assert keys.parse_checkpoint("elsewhere/" + str(name)) is None
