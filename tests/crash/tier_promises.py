"""What a topic with a store promises about crashes: work that writes the promises down, and a check of them.

Every message is told apart from all others, so that one that is lost, doubled or moved shows.
"""

from __future__ import annotations

import itertools
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from tidelog.cold.catalog import Catalog, Codec
from tidelog.cold.flush_log import collect_flushes
from tidelog.cold.settings import TierSettings
from tidelog.cold.takeover import FENCED, DivergentTail, divergent_tails
from tidelog.cold.tiered_log import Tier
from tidelog.log import LogSettings
from tidelog.log.binding import bound
from tidelog.log.directory import wal_files
from tidelog.log.view import LogView
from tidelog.store.keys import DEFAULT_ROOT, TopicKeys
from tidelog.testing import FaultyFiles, History, World
from tidelog.topics.directory import LogDirectory
from tidelog.topics.directory_info import LOCAL, Place
from tidelog.topics.topic import Topic

ROOT = Path("/data")
NAME = "shop/orders"
DIRECTORY = ROOT / NAME
KEYS = TopicKeys("shop", "orders")
BUCKET = Place("s3://bucket", "bucket")
SMALL_FILES = LogSettings(rotate_max_bytes=300, fsync_interval_ms=3_600_000)
TWO_DAYS = 48 * 3600


def open_node(
    world: World, node: str, settings: TierSettings, place: Place = BUCKET, *, ends_leases: bool = True
) -> LogDirectory:
    """The log directory of a node, as `tidelog.open` makes it, in a world that may crash.

    Other nodes have been silent for longer than their leases, unless a test is about that.
    """
    files = world.files(node)
    if ends_leases:
        world.end_leases()

    def open_tier(_: object) -> Tier:
        return Tier(world.store, world.metadata, files=files, clock=world.clock, node=node, runs_in_background=False)

    return LogDirectory(
        ROOT, SMALL_FILES, files=files, clock=world.clock, place=place, open_tier=open_tier, tier_settings=settings
    )


def open_local(world: World, node: str) -> LogDirectory:
    """The same directory before it was given a store."""
    return LogDirectory(ROOT, SMALL_FILES, files=world.files(node), clock=world.clock, place=LOCAL)


def tier_settings(codec: Codec = "none", **changes: object) -> TierSettings:
    """Objects of a few messages."""
    return TierSettings(max_object_bytes=400, ship_compression=codec, **changes)  # type: ignore[arg-type]


Event = tuple[Any, ...]
_numbers = itertools.count()


class Durable(NamedTuple):
    """A message that was acknowledged as synced, and what has happened since."""

    node: str
    offset: int
    value: bytes
    is_shipped: bool
    is_lost: bool
    is_claimed_since: bool


class Ledger:
    """What nodes did and were promised, in order. It is kept in a `History`, which the crash driver hands on."""

    def __init__(self, history: History) -> None:
        self._history = history

    # Written by workloads

    def open(self, world: World, node: str, settings: TierSettings, *, ends_leases: bool = True) -> LogDirectory:
        """From the moment a node tries to claim the topic, the messages of others may end as a fenced tail."""
        self._history.attempted("claim", (node,))
        return open_node(world, node, settings, ends_leases=ends_leases)

    def gave_back(self, node: str) -> None:
        """It closed without having accepted anything."""
        self._history.attempted("gave back", (node,))

    def lost_disk(self, node: str) -> None:
        """What was only there is gone."""
        self._history.attempted("lost", (node,))

    def append(self, topic: Topic, node: str, count: int, *, size: int = 30, sync: bool = True) -> None:
        """Several messages, each promised for itself."""
        for _ in range(count):
            value = self._new_value(node, size)
            self._history.attempted("try", (node, value))
            offset = topic.append(value, sync=sync)
            if sync:
                self._history.attempted("durable", (node, offset, value))
            if sync and topic._tiered is not None and topic._tiered.flushed is not None:
                self._history.attempted("shipped", (node, offset + 1))

    def ship(self, topic: Topic, node: str) -> None:
        """Whatever it says is shipped outlives the disk."""
        self._history.attempted("shipped", (node, topic.ship()))

    def sealed(self, node: str, next_offset: int) -> None:
        """Sealing ships everything."""
        self._history.attempted("shipped", (node, next_offset))

    def deleted(self) -> None:
        """Everything so far is gone for good."""
        self._history.attempted("deleted", ("everybody",))

    def _new_value(self, node: str, size: int) -> bytes:
        return b"<%s:%d>" % (node.encode(), next(_numbers)) + b"." * size

    def goes_on_after(self, earlier: History) -> None:
        """Takes over what was promised in a life before."""
        for kind, data in Ledger(earlier)._events():
            self._history.attempted(kind, data)

    # Read by checks

    def _events(self) -> list[tuple[str, Event]]:
        return [(str(kind), data) for life in self._history.lives for kind, data in life.attempts]

    def tried(self) -> set[bytes]:
        """Everything that may be found."""
        return {data[1] for kind, data in self._events() if kind == "try"}

    def before_deletion(self) -> tuple[list[Durable], bool]:
        """What was durable before the topic was deleted, and whether that was done."""
        events = self._events()
        kinds = [kind for kind, _ in events]
        end = kinds.index("deleted") if "deleted" in kinds else len(kinds)
        durable = [_fate(events[:end], place) for place, kind in enumerate(kinds[:end]) if kind == "durable"]
        return durable, end < len(kinds)

    def durable(self) -> list[Durable]:
        """Everything that must be found somewhere."""
        events = self._events()
        return [_fate(events, place) for place, (kind, _) in enumerate(events) if kind == "durable"]


def _fate(events: list[tuple[str, Event]], place: int) -> Durable:
    """What became of a message: shipped while its node had the topic, or claimed by another and not given back."""
    node, offset, value = events[place][1]
    is_shipped, is_lost, claims = False, False, list[object]()
    for number, (kind, (who, *rest)) in enumerate(events):
        if kind == "claim" and who == node and number < place:
            claims.clear()  # it had the topic when it accepted the message, unless somebody claims it from here on
        elif kind == "claim" and who != node:
            claims.append(who)
        elif kind == "gave back" and who in claims:
            claims.remove(who)
        elif kind == "lost" and who == node and number > place:
            is_lost = True
        elif kind == "shipped" and number > place and who == node and rest[0] > offset and not (claims or is_lost):
            is_shipped = True
    return Durable(node, offset, value, is_shipped, is_lost, bool(claims))


# The check


def on_disk(files: FaultyFiles) -> dict[int, list[bytes]]:
    """All frames on a node's disk, those of fenced tails included."""
    found: dict[int, list[bytes]] = {}
    folders = [DIRECTORY, *(DIRECTORY / FENCED / tail.name for tail in _tails(files))]
    for folder in folders:
        if files.is_directory(folder) and wal_files(files.list(folder)):
            for batch in LogView(folder, SMALL_FILES, files=bound(files)).read("earliest"):
                for offset, payload in enumerate(batch.payloads(), batch.first_offset):
                    found.setdefault(offset, []).append(bytes(payload))
    return found


def _tails(files: FaultyFiles) -> list[DivergentTail]:
    return divergent_tails(files, DIRECTORY) if files.is_directory(DIRECTORY) else []


def check_topic(world: World, topic: Topic, ledger: Ledger) -> dict[int, bytes]:
    """Everything promised is readable, or kept aside, or gone with a disk; returns what is readable."""
    messages = [(message.offset, message.value or b"") for message in topic.read("earliest")]
    found = dict(messages)
    assert [offset for offset, _ in messages] == list(range(topic.start_offset, topic.next_offset))
    assert len(set(found.values())) == len(found), "a message is there twice"
    assert set(found.values()) <= ledger.tried(), "a message is there that nobody appended"
    disks = {node: on_disk(world.files(node)) for node in ("a", "b")}
    for message in ledger.durable():
        if message.offset < topic.start_offset or found.get(message.offset) == message.value:
            continue
        assert not message.is_shipped, f"{message} was shipped and cannot be read"
        if message.is_lost:
            continue
        assert message.is_claimed_since, f"{message} cannot be read although nobody else had the topic"
        kept = disks[message.node].get(message.offset, [])
        assert any(message.value in payload for payload in kept), f"{message} is neither readable nor kept aside"
    check_catalog(world)
    return found


def check_catalog(world: World) -> None:
    """Descriptors are contiguous, their objects are there with the right bytes, and the newest is found."""
    catalog, objects = Catalog(world.metadata, KEYS), world.store.contents()
    descriptors = list(catalog.walk(0))
    for before, behind in itertools.pairwise(descriptors):
        assert behind.start_offset == before.next_offset, "the catalog has a hole or an overlap"
        assert behind.epoch >= before.epoch
    for descriptor in descriptors:
        if descriptor.next_offset > catalog.start_offset():
            data = objects[KEYS.object(descriptor.name)]
            assert (len(data), f"crc32:{zlib.crc32(data):08x}") == (descriptor.size, descriptor.checksum)
    assert catalog.newest() == (descriptors[-1] if descriptors else None)


def check_swept(world: World, topic: Topic) -> None:
    """After everything is shipped, a sweep leaves exactly what the catalog names."""
    world.clock.advance(TWO_DAYS)  # type: ignore[attr-defined]  # a ManualClock
    topic.remove_orphans(topic.plan_orphans(), drop_uncovered=True)
    collect_flushes(world.metadata, world.store, DEFAULT_ROOT, lambda _: False, lambda *_: False)
    named = {KEYS.object(descriptor.name) for descriptor in Catalog(world.metadata, KEYS).walk(0)}
    assert set(world.store.contents()) == named
    assert world.store.uploads() == {}


def check_life_goes_on(world: World, history: History, settings: TierSettings, node: str = "a") -> None:
    """A node opens the topic, finds what was promised, appends, ships, sweeps, and all of it is there once more."""
    ledger = Ledger(history)
    with ledger.open(world, node, settings) as log:
        topic = log.topic(NAME)
        check_topic(world, topic, ledger)
        start_offset = topic.start_offset
        ledger.append(topic, node, 2)
        ledger.ship(topic, node)
        check_swept(world, topic)
        topic.prune()
        check_topic(world, topic, ledger)
        assert topic.start_offset >= start_offset
    with ledger.open(world, node, settings) as log:
        check_topic(world, log.topic(NAME), ledger)
        assert log.topic(NAME).start_offset >= start_offset


def check_all_or_nothing(world: World, history: History, settings: TierSettings, node: str) -> None:
    """Of a topic that was being deleted, everything is there or nothing; made again, it is a topic like any other."""
    ledger = Ledger(history)
    old, is_deleted = ledger.before_deletion()
    with ledger.open(world, node, settings) as log:
        topic = log.topic(NAME)
        found = {message.offset: message.value for message in topic.read("earliest")}
        assert list(found) == list(range(topic.start_offset, topic.next_offset))
        here = [message for message in old if found.get(message.offset) == message.value]
        expected = [message for message in old if node == message.node or message.is_shipped]
        assert here == [] or not is_deleted, "what was deleted came back"
        assert here == [] or set(here) >= set(expected), f"only {len(here)} of {len(expected)} are left"
        check_catalog(world)
        ledger.append(topic, node, 2)
        ledger.ship(topic, node)
        check_swept(world, topic)
        check_catalog(world)
