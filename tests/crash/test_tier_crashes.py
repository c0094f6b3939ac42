"""A topic with a store, killed at every change of disk, bucket and metadata: no loss, no gap, no double, no reuse.

Each workload has a past that is not cut. What a cut leaves is looked at by the same node, and in one of three other
ways by turns: by a node that takes the topic over, without the disk, and after a second crash during the recovery.
The long workloads are cut at each so-many-th call; a campaign cuts at all of them, and looks in all ways.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable

import pytest
from tests.campaign import IS_DEEP, every
from tests.crash.tier_promises import (
    DIRECTORY,
    KEYS,
    NAME,
    Ledger,
    check_all_or_nothing,
    check_life_goes_on,
    open_local,
    tier_settings,
)

from tidelog.clock import ManualClock
from tidelog.cold.catalog import Catalog, Codec
from tidelog.cold.ownership import read_local_claim
from tidelog.cold.rebuild import rebuild_catalog
from tidelog.cold.settings import TierSettings
from tidelog.errors import FencedError, StoreUnavailableError, TidelogError
from tidelog.testing import Crash, CrashPlan, History, World, cut_world_everywhere
from tidelog.topics.message import TIMESTAMP_FIELD

pytestmark = pytest.mark.deeper
KINDS: list[tuple[bool, Codec]] = [(True, "none"), (False, "zstd")]
each_kind = pytest.mark.parametrize(("multi_key", "codec"), KINDS, ids=["multi-key-none", "single-key-zstd"])
Workload = Callable[[World, Ledger, TierSettings], None]
Check = Callable[[World, History], None]


# What is looked at after a crash


def by_the_same_node(world: World, history: History, settings: TierSettings) -> None:
    check_life_goes_on(world, history, settings)


def by_another_node_and_back(world: World, history: History, settings: TierSettings) -> None:
    check_life_goes_on(world, history, settings, "b")
    check_life_goes_on(world, history, settings, "a")


def without_the_disk(world: World, history: History, settings: TierSettings) -> None:
    Ledger(history).lost_disk("a")
    check_life_goes_on(world.lose_disk("a"), history, settings)


def after_a_second_crash(world: World, history: History, settings: TierSettings) -> None:
    check_life_goes_on(crashed_again(world, history, settings), history, settings)


def crashed_again(world: World, history: History, settings: TierSettings) -> World:
    """The world after a recovery that was cut somewhere, by a power failure."""
    crash_at = random.Random(f"{len(world.metadata.contents())}:{len(history.lives[0].attempts)}").randint(1, 30)
    cut = world.after_crash("keep", crash_at=crash_at)
    with contextlib.suppress(Crash, TidelogError), Ledger(history).open(cut, "a", settings) as log:
        Ledger(history).append(log.topic(NAME), "a", 2)
        Ledger(history).ship(log.topic(NAME), "a")
    cut.crash()
    return cut.after_crash("lose", seed=crash_at, torn_bytes=crash_at % 2)


def look(settings: TierSettings) -> Check:
    others = [by_another_node_and_back, without_the_disk, after_a_second_crash]
    turns = itertools.cycle(others)

    def check(world: World, history: History) -> None:
        for way in [by_the_same_node, *(others if IS_DEEP else [next(turns)])]:
            way(world.after_crash("keep"), history.copy(), settings)

    return check


def look_after_a_power_cut(settings: TierSettings) -> Check:
    """The node comes back, and then the power fails: what its recovery relied on must have been made durable by it."""

    def check(world: World, history: History) -> None:
        ledger = Ledger(history)
        with ledger.open(world, "a", settings) as log:
            log.topic(NAME)
            without_power = world.after_crash("lose")
        check_life_goes_on(without_power, history, settings)

    return check


def cut(
    workload: Workload,
    settings: TierSettings,
    *,
    multi_key: bool,
    past: Workload | None = None,
    check: Check | None = None,
    step: int = 1,
) -> None:
    """Cuts a workload anywhere; its past happened for sure."""
    before, earlier = World(multi_key=multi_key, clock=ManualClock(), part_bytes=150), History()
    if past is not None:
        past(before, Ledger(earlier), settings)

    def run(world: World, history: History) -> None:
        ledger = Ledger(history)
        ledger.goes_on_after(earlier)
        workload(world, ledger, settings)

    summary = cut_world_everywhere(
        run,
        check or look(settings),
        CrashPlan(policies=("lose", "keep"), every=every(step)),
        lambda crash_at: before.after_crash("keep", crash_at=crash_at),
    )
    assert summary.cut_points > 3
    assert summary.abandoned_threads == 0


# Shipping


def ship_once(world: World, ledger: Ledger, settings: TierSettings) -> None:
    with ledger.open(world, "a", settings) as log:
        ledger.append(log.topic(NAME), "a", 3)
        ledger.ship(log.topic(NAME), "a")


def ship_several(world: World, ledger: Ledger, settings: TierSettings) -> None:
    """Several objects: across files, cut out of a large one, and resumed in the middle of a file."""
    with ledger.open(world, "a", settings) as log:
        topic = log.topic(NAME)
        ledger.append(topic, "a", 6)
        ledger.append(topic, "a", 1, size=900)
        ledger.append(topic, "a", 2, sync=False)
        ledger.ship(topic, "a")
        ledger.append(topic, "a", 2)


@each_kind
def test_shipping(multi_key: bool, codec: Codec) -> None:
    """Loses, without its order: messages whose object is there but not published, or published but not there."""
    cut(ship_several, tier_settings(codec), multi_key=multi_key, past=ship_once, step=23)


def ship_and_prune(world: World, ledger: Ledger, settings: TierSettings) -> None:
    """Files leave the disk as soon as the store has them."""
    with ledger.open(world, "a", settings) as log:
        topic = log.topic(NAME)
        ledger.append(topic, "a", 6)
        ledger.ship(topic, "a")
        ledger.append(topic, "a", 1)
        topic.prune()


@each_kind
def test_pruning_the_disk(multi_key: bool, codec: Codec) -> None:
    """Loses, without its order: a file that left the disk before the store had it."""
    settings = tier_settings(codec, local_retention_bytes=1)
    cut(ship_and_prune, settings, multi_key=multi_key, past=ship_and_prune, step=23)


# Changing hands


def append_and_seal(world: World, ledger: Ledger, settings: TierSettings) -> None:
    seal_on(world, ledger, settings, "a")


def seal_on(world: World, ledger: Ledger, settings: TierSettings, node: str) -> None:
    with ledger.open(world, node, settings) as log:
        topic = log.topic(NAME)
        ledger.append(topic, node, 7)
        next_offset = topic.next_offset
        topic.seal()
        ledger.sealed(node, next_offset)


def move_and_move_back(world: World, ledger: Ledger, settings: TierSettings) -> None:
    seal_on(world, ledger, settings, "b")
    with ledger.open(world, "a", settings) as log:
        ledger.append(log.topic(NAME), "a", 1)


@each_kind
def test_sealing(multi_key: bool, codec: Codec) -> None:
    """Loses, without its order: files that were removed before the marker was written."""
    cut(append_and_seal, tier_settings(codec), multi_key=multi_key, past=ship_once, step=15)


@each_kind
def test_files_go_after_the_marker_is_written(multi_key: bool, codec: Codec) -> None:
    """Loses, in another order: the disk's copy, while it is not yet written down that the store has it all."""
    world = World(multi_key=multi_key, clock=ManualClock())
    append_and_seal(world, Ledger(History()), tier_settings(codec))
    calls = [str(call) for call in world.calls]
    marker = next(number for number, call in enumerate(calls) if "metadata.commit" in call and "/state" in call)
    removals = [number for number, call in enumerate(calls) if "a.remove" in call and "/wal." in call]
    assert removals
    assert marker < min(removals)


@each_kind
def test_taking_over_what_was_sealed(multi_key: bool, codec: Codec) -> None:
    """Loses, without a claim: offsets that two owners used."""
    cut(move_and_move_back, tier_settings(codec), multi_key=multi_key, past=append_and_seal, step=23)


def leave_a_tail(world: World, ledger: Ledger, settings: TierSettings) -> None:
    """Shipped messages, and some in two files that are not."""
    ship_once(world, ledger, settings)
    with ledger.open(world, "a", settings) as log:
        ledger.append(log.topic(NAME), "a", 3)


def take_over_while_the_owner_lives(world: World, ledger: Ledger, settings: TierSettings) -> None:
    with ledger.open(world, "a", settings) as first, ledger.open(world, "b", settings) as second:
        topic, taken = first.topic(NAME), second.topic(NAME, take_over=True)
        ledger.append(taken, "b", 2)
        with pytest.raises(FencedError):
            topic.ship()
        ledger.ship(taken, "b")


def leave_a_fenced_tail(world: World, ledger: Ledger, settings: TierSettings) -> None:
    leave_a_tail(world, ledger, settings)
    take_over_while_the_owner_lives(world, ledger, settings)


def come_back(world: World, ledger: Ledger, settings: TierSettings) -> None:
    with ledger.open(world, "a", settings) as log:
        ledger.append(log.topic(NAME), "a", 1)


@each_kind
def test_taking_over_without_a_seal(multi_key: bool, codec: Codec) -> None:
    """Loses, without fencing: the tail of the old owner, or the new owner's messages at the same offsets."""
    settings = tier_settings(codec)
    cut(take_over_while_the_owner_lives, settings, multi_key=multi_key, past=leave_a_tail, step=15)


@each_kind
def test_putting_a_fenced_tail_aside(multi_key: bool, codec: Codec) -> None:
    """Loses, when cut between two directories: the tail, or what is hidden by files that were left in place."""
    settings = tier_settings(codec)
    cut(
        come_back,
        settings,
        multi_key=multi_key,
        past=leave_a_fenced_tail,
        check=look_after_a_power_cut(settings),
        step=7,
    )


def look_and_leave(world: World, ledger: Ledger, settings: TierSettings) -> None:
    """Another node opens the topic and closes it again; what the first has on its disk is still the end of it."""
    with ledger.open(world, "b", settings) as log:
        log.topic(NAME)
    ledger.gave_back("b")
    with ledger.open(world, "a", settings) as log:
        assert log.topic(NAME).next_offset == 6
        ledger.append(log.topic(NAME), "a", 1)


@each_kind
def test_an_idle_claim(multi_key: bool, codec: Codec) -> None:
    """Loses, without giving back: the unshipped messages of a node whose topic somebody only looked at."""
    cut(look_and_leave, tier_settings(codec), multi_key=multi_key, past=leave_a_tail, step=15)


# Acknowledged by the store


def flush_several(world: World, ledger: Ledger, settings: TierSettings) -> None:
    """What was flushed by an earlier owner, by this one, and by this one after it has shipped."""
    with ledger.open(world, "a", settings) as log:
        topic = log.topic(NAME)
        ledger.append(topic, "a", 2)
        ledger.append(topic, "a", 1, size=900)
        ledger.ship(topic, "a")
        ledger.append(topic, "a", 2)


def flush_on_two_nodes(world: World, ledger: Ledger, settings: TierSettings) -> None:
    """The old owner lives on; what it accepts from then on is acknowledged to nobody."""
    with ledger.open(world, "a", settings) as first, ledger.open(world, "b", settings) as second:
        topic = first.topic(NAME)
        ledger.append(topic, "a", 1)
        taken = second.topic(NAME, take_over=True)
        ledger.append(taken, "b", 1)
        with pytest.raises(FencedError):
            topic.append(b"of nobody", sync=True)
        ledger.append(taken, "b", 1)


@each_kind
def test_flushing(multi_key: bool, codec: Codec) -> None:
    """Loses, without its order: messages that were acknowledged by a flush that nobody finds."""
    settings = tier_settings(codec, durability="shipped")
    cut(flush_several, settings, multi_key=multi_key, past=flush_several, step=11)


@each_kind
def test_flushing_on_two_nodes(multi_key: bool, codec: Codec) -> None:
    """Loses, without the fence: messages that the old owner has acknowledged after the new one looked."""
    settings = tier_settings(codec, durability="shipped")
    cut(flush_on_two_nodes, settings, multi_key=multi_key, past=flush_several, step=15)


# Deleting


def expire(world: World, ledger: Ledger, settings: TierSettings) -> None:
    """Old objects go while new ones come."""
    with ledger.open(world, "a", settings) as log:
        topic = log.topic(NAME)
        ledger.append(topic, "a", 5)
        ledger.ship(topic, "a")
        topic.prune()
        ledger.append(topic, "a", 2)


@each_kind
def test_cold_retention(multi_key: bool, codec: Codec) -> None:
    """Loses, without its plan: the place where the topic begins, or objects that are still named."""
    settings = tier_settings(codec, retention_bytes=500, local_retention_bytes=1)
    cut(expire, settings, multi_key=multi_key, past=expire, step=19)


def fail_to_publish(world: World, ledger: Ledger, settings: TierSettings) -> None:
    """An object is there, and no descriptor of it."""
    with ledger.open(world, "a", settings) as log:
        ledger.append(log.topic(NAME), "a", 2)
        world.metadata.fail("commit", matching=f"*/{0:020d}*")
        with pytest.raises(StoreUnavailableError):
            log.topic(NAME).ship()


def ship_and_sweep(world: World, ledger: Ledger, settings: TierSettings) -> None:
    """Other objects are shipped in its place, and it is swept away."""
    with ledger.open(world, "a", settings) as log:
        topic = log.topic(NAME)
        ledger.append(topic, "a", 4)
        ledger.ship(topic, "a")
        assert topic.remove_orphans(topic.plan_orphans()).objects
        ledger.append(topic, "a", 1)


@each_kind
def test_sweeping(multi_key: bool, codec: Codec) -> None:
    """Loses, without a second look: an object that somebody needs."""
    cut(ship_and_sweep, tier_settings(codec), multi_key=multi_key, past=fail_to_publish, step=15)


def delete_and_make_again(world: World, ledger: Ledger, settings: TierSettings) -> None:
    """The same name, two topics."""
    with ledger.open(world, "a", settings) as log:
        log.delete_topic(NAME)
        ledger.deleted()
        assert not log.has_topic(NAME)
        ledger.append(log.topic(NAME), "a", 3)
        ledger.ship(log.topic(NAME), "a")
        ledger.append(log.topic(NAME), "a", 1)


@each_kind
def test_deleting_and_making_again(multi_key: bool, codec: Codec) -> None:
    """Loses, without its mark: half of a topic, or it brings back what was deleted."""
    settings, nodes = tier_settings(codec, local_retention_bytes=1), itertools.cycle("aba")

    def check(world: World, history: History) -> None:
        check_all_or_nothing(world.after_crash("keep"), history.copy(), settings, next(nodes))
        if IS_DEEP:
            check_all_or_nothing(world.after_crash("keep"), history.copy(), settings, next(nodes))
            check_all_or_nothing(crashed_again(world, History(), settings), history.copy(), settings, "a")

    cut(delete_and_make_again, settings, multi_key=multi_key, past=ship_and_prune, check=check, step=5)


# A store for what was local


def stay_local(world: World, ledger: Ledger, settings: TierSettings) -> None:
    with open_local(world, "a") as log:
        ledger.append(log.topic(NAME), "a", 6)


@each_kind
def test_a_store_for_a_directory_that_was_local(multi_key: bool, codec: Codec) -> None:
    """Loses, when its first claim is interrupted: everything that was appended before there was a store."""
    settings = tier_settings(codec)

    def check(world: World, history: History) -> None:
        """The same node alone: another one cannot know of a topic that was never shipped."""
        by_the_same_node(world.after_crash("keep"), history.copy(), settings)
        after_a_second_crash(world, history, settings)

    cut(come_back, settings, multi_key=multi_key, past=stay_local, check=check, step=7)


# A catalog that was lost


def lose_the_catalog(world: World, ledger: Ledger, settings: TierSettings) -> None:
    """Shipped messages and a tail on the disk, and nobody knows of either."""
    leave_a_tail(world, ledger, settings)
    for key in list(world.metadata.contents()):
        world.metadata.delete(key)


def rebuild_and_go_on(world: World, ledger: Ledger, settings: TierSettings) -> None:
    """The bucket gives the catalog back, and the disk is still the end of the topic."""
    if Catalog(world.metadata, KEYS).owner() is None:
        claim = read_local_claim(world.files("a"), DIRECTORY)
        assert claim is not None
        rebuild_catalog(
            *(world.metadata, KEYS, world.store),
            clock=world.clock,
            time_field=TIMESTAMP_FIELD,
            incarnation=claim.claim,
        )
    come_back(world, ledger, settings)


@each_kind
def test_rebuilding_the_catalog(multi_key: bool, codec: Codec) -> None:
    """Loses, when it is interrupted: what the disk alone has, or the place where the topic ends."""
    settings = tier_settings(codec)

    def check(world: World, history: History) -> None:
        rebuild_and_go_on(world, Ledger(history), settings)
        look(settings)(world, history)

    cut(rebuild_and_go_on, settings, multi_key=multi_key, past=lose_the_catalog, check=check, step=13)
