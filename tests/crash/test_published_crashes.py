"""A published catalog, cut at every change of disk, bucket and metadata: readers of the bucket are never misled."""

from __future__ import annotations

import json

import pytest
from tests.campaign import every
from tests.crash.tier_promises import KEYS, NAME, ROOT, SMALL_FILES, tier_settings

from tidelog.clock import ManualClock
from tidelog.cold.catalog import Catalog
from tidelog.cold.settings import TierSettings
from tidelog.cold.tiered_log import Tier
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.store.metadata.published import PublishedMetadata
from tidelog.testing import CrashPlan, History, World, cut_world_everywhere
from tidelog.topics.directory import LogDirectory
from tidelog.topics.directory_info import Place

pytestmark = pytest.mark.deeper
SETTINGS = tier_settings(retention_bytes=700)


def open_node(world: World, settings: TierSettings = SETTINGS) -> LogDirectory:
    files = world.files("a")

    def open_tier(_: object) -> Tier:
        metadata = PublishedMetadata(world.metadata, world.store)
        return Tier(world.store, metadata, files=files, clock=world.clock, node="a", runs_in_background=False)

    place = Place("s3://bucket", "etcd://host:2379")
    world.end_leases()
    return LogDirectory(
        ROOT, SMALL_FILES, files=files, clock=world.clock, place=place, open_tier=open_tier, tier_settings=settings
    )


def live(world: World, _: History) -> None:
    """Ships, deletes by retention, subscribes and seals."""
    with open_node(world) as log:
        topic = log.topic(NAME)
        subscription = topic.subscribe("billing")
        for number in range(12):
            topic.append(b"%d" % number * 40, sync=True)
            if number % 4 == 3:
                topic.ship()
        topic.prune()
        subscription.close()
        topic.seal()


def delete(world: World, _: History) -> None:
    with open_node(world) as log:
        log.delete_topic(NAME)


def public(contents: dict[str, bytes]) -> dict[str, bytes]:
    found = {key.removeprefix(KEYS.metadata_prefix): value for key, value in contents.items()}
    return {key: value for key, value in found.items() if not key.startswith(("tidelog/", "staging", "producers"))}


def copied(world: World) -> dict[str, bytes]:
    with BucketMetadataStore(world.store, read_only=True) as copy:
        found = {entry.key: entry.value for entry in copy.range(KEYS.metadata_prefix)}
    for key in [KEYS.owner] if KEYS.owner in found else []:
        owner = json.loads(found[key])
        assert owner.pop("copy_of") == world.metadata.url
        owner.pop("copied")
        found[key] = json.dumps(owner, separators=(",", ":")).encode()
    return public(found)


def check_readers(world: World) -> None:
    """Whatever a reader finds is contiguous, and its objects are there."""
    with BucketMetadataStore(world.store, read_only=True) as copy:
        catalog = Catalog(copy, KEYS)
        if catalog.owner() is None:
            return
        reached = None
        for one in catalog.walk(catalog.start_offset()):
            assert reached in (None, one.start_offset)
            world.store.head(KEYS.object(one.name))
            reached = one.next_offset


def check(world: World, _: History) -> None:
    check_readers(world)
    with open_node(world) as log:
        log.topic(NAME)
    assert copied(world) == public(world.metadata.contents())


def check_deletion(world: World, _: History) -> None:
    """Once the topic is gone, so is its copy; until then the next attempt finishes both."""
    check_readers(world)
    if KEYS.owner in world.metadata.contents():
        delete(world, History())
    assert copied(world) == {}
    assert [info.key for info in world.store.list("") if "shop/orders" in info.key] == []


def test_crash_between_commit_and_copy_heals_with_the_next_opening() -> None:
    """Loses, without comparing: whatever was committed and not copied is missing in the bucket for ever."""
    cut_world_everywhere(
        live,
        check,
        CrashPlan(policies=("keep",), every=every(3)),
        lambda crash_at: World(crash_at=crash_at, clock=ManualClock()),
    )


def test_crash_during_deletion_leaves_no_copy_behind() -> None:
    """Loses, in the other order: a deleted topic that readers of the bucket see for ever."""
    before = World(clock=ManualClock())
    with open_node(before, tier_settings()) as log:
        for _ in range(3):
            log.topic(NAME).append(b"value" * 20)
            log.topic(NAME).ship()
    cut_world_everywhere(
        delete,
        check_deletion,
        CrashPlan(policies=("keep",)),
        lambda crash_at: before.after_crash("keep", crash_at=crash_at),
    )


def test_objects_outlive_a_copy_that_still_names_them() -> None:
    """Loses, without asking: readers of the bucket are led to objects that retention has just deleted."""
    world = World(clock=ManualClock())
    with open_node(world) as log:
        topic = log.topic(NAME)
        for _ in range(12):
            topic.append(b"value" * 20, sync=True)
            topic.ship()
        world.store.fail("put_if_match", times=1000, matching="tidelog/*")
        topic.prune()
        assert topic.start_offset > 0
        world.heal()
        check_readers(world)
    check(world, History())


@pytest.mark.parametrize("nth", range(1, 60, 7))
def test_outage_of_the_bucket_during_copying_fails_no_commit(nth: int) -> None:
    """What the bucket did not take is there after the next opening."""
    world = World(clock=ManualClock())
    with open_node(world) as log:
        topic = log.topic(NAME)
        topic.append(b"value", sync=True)
        world.store.fail("get", nth=nth, times=3, matching="tidelog/*")
        for _ in range(6):
            topic.append(b"value" * 10)
            topic.ship()
        topic.prune()
    world.heal()
    check(world, History())
