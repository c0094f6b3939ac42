"""The new group protocol: assignors, the rules of heartbeats, and a model in which no two members own a partition."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.campaign import run_machine

from tidelog.errors import DataError
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.groups.assignors import ASSIGNORS, Partition, assign_range, assign_uniform
from tidelog.service.kafka.groups.consumer import (
    ConsumerGroup,
    ConsumerGroupSettings,
    HeartbeatRequest,
    HeartbeatResult,
    MemberState,
)

names = st.sampled_from(["a", "b", "c"])
subscriptions = st.dictionaries(st.sampled_from(["m1", "m2", "m3", "m4"]), st.frozensets(names), min_size=1)
topic_counts = st.dictionaries(names, st.integers(0, 7))
REBALANCE_MS = 20_000
SETTINGS = ConsumerGroupSettings(session_timeout_ms=10_000, heartbeat_interval_ms=3000)


def partitions(topic: str, *numbers: int) -> frozenset[Partition]:
    return frozenset((topic, number) for number in numbers)


@pytest.mark.parametrize("name", sorted(ASSIGNORS))
@given(members=subscriptions, topics=topic_counts, earlier=subscriptions)
def test_every_partition_has_one_member_that_wants_it(
    name: str, members: dict[str, frozenset[str]], topics: dict[str, int], earlier: dict[str, frozenset[str]]
) -> None:
    """Whoever had it before."""
    previous = ASSIGNORS[name](earlier, topics, {})
    found = ASSIGNORS[name](members, topics, previous)
    assert set(found) == set(members)
    given_out = [one for assigned in found.values() for one in assigned]
    assert len(set(given_out)) == len(given_out)
    wanted = {topic for topic in topics if any(topic in one for one in members.values())}
    assert set(given_out) == {(topic, number) for topic in wanted for number in range(topics[topic])}
    assert all(topic in members[member] for member, assigned in found.items() for topic, _ in assigned)


@given(members=subscriptions, topics=topic_counts, earlier=subscriptions)
def test_uniform_leaves_no_better_move_and_moves_nothing_without_need(
    members: dict[str, frozenset[str]], topics: dict[str, int], earlier: dict[str, frozenset[str]]
) -> None:
    """A second time with the same members changes nothing."""
    found = assign_uniform(members, topics, assign_uniform(earlier, topics, {}))
    for giver, taker in itertools.permutations(found, 2):
        if any(topic in members[taker] for topic, _ in found[giver]):
            assert len(found[giver]) - len(found[taker]) < 2
    assert assign_uniform(members, topics, found) == found


def test_uniform_moves_as_few_as_possible() -> None:
    """A third member takes two of six, and the others keep theirs."""
    members = {"m1": frozenset("a"), "m2": frozenset("a")}
    before = assign_uniform(members, {"a": 6}, {})
    after = assign_uniform({**members, "m3": frozenset("a")}, {"a": 6}, before)
    assert [len(after[one]) for one in ("m1", "m2", "m3")] == [2, 2, 2]
    assert after["m1"] < before["m1"]
    assert after["m2"] < before["m2"]


def test_range_gives_runs_of_each_topic() -> None:
    """Topics of one size are cut alike."""
    found = assign_range({"m1": frozenset("ab"), "m2": frozenset("ab")}, {"a": 3, "b": 3}, {})
    assert found["m1"] == partitions("a", 0, 1) | partitions("b", 0, 1)
    assert found["m2"] == partitions("a", 2) | partitions("b", 2)


def new_group(**topics: int) -> ConsumerGroup:
    numbers = itertools.count(1)
    group = ConsumerGroup("g", lambda: f"id-{next(numbers)}", SETTINGS)
    group.set_topics(topics or {"a": 4})
    return group


def beat(group: ConsumerGroup, member_id: str, epoch: int, now_ms: int = 0, **more: Any) -> HeartbeatResult:
    if epoch == 0:
        more = {"topics": frozenset("a"), "rebalance_timeout_ms": REBALANCE_MS, **more}
    return group.heartbeat(now_ms, HeartbeatRequest(member_id, epoch, **more))


def test_the_first_member_gets_everything() -> None:
    """And an id, when it has none."""
    group = new_group()
    result = beat(group, "", 0)
    assert (result.error, result.member_id, result.member_epoch) == (ErrorCode.NONE, "id-1", group.epoch)
    assert result.assignment == partitions("a", 0, 1, 2, 3)
    assert beat(group, "id-1", group.epoch).assignment is None
    assert group.state == "Stable"


def test_partitions_go_to_another_member_only_when_they_are_given_up() -> None:
    """The first is told to give up two; the second has them when the first has said that it did."""
    group = new_group()
    first = beat(group, "m1", 0)
    assert beat(group, "m2", 0).assignment == frozenset()
    told = beat(group, "m1", first.member_epoch)
    assert told.member_epoch == first.member_epoch
    assert told.assignment is not None
    assert len(told.assignment) == 2
    assert group.members["m1"].state is MemberState.UNREVOKED
    assert beat(group, "m2", group.epoch).assignment is None
    assert beat(group, "m1", first.member_epoch, owned=partitions("a", 0, 1, 2, 3)).member_epoch == first.member_epoch
    done = beat(group, "m1", first.member_epoch, owned=told.assignment)
    assert done.member_epoch == group.epoch
    given_now = beat(group, "m2", group.epoch).assignment
    assert given_now == partitions("a", 0, 1, 2, 3) - told.assignment
    assert group.state == "Stable"


def test_a_member_that_does_not_give_up_in_time_is_removed() -> None:
    """Though it heartbeats."""
    group = new_group()
    first = beat(group, "m1", 0)
    beat(group, "m2", 0)
    for now in range(0, REBALANCE_MS, 5000):
        assert beat(group, "m1", first.member_epoch, now).error == ErrorCode.NONE
        beat(group, "m2", group.members["m2"].epoch, now)
    assert group.tick(REBALANCE_MS) == ["m1"]
    assert beat(group, "m1", first.member_epoch, REBALANCE_MS).error == ErrorCode.UNKNOWN_MEMBER_ID
    assert beat(group, "m2", group.members["m2"].epoch, REBALANCE_MS).assignment == partitions("a", 0, 1, 2, 3)


def test_a_silent_member_is_removed() -> None:
    """By its session, after which the next heartbeat of another one sees the change."""
    group = new_group()
    beat(group, "m1", 0)
    assert group.next_deadline_ms == SETTINGS.session_timeout_ms
    assert group.tick(SETTINGS.session_timeout_ms - 1) == []
    assert group.tick(SETTINGS.session_timeout_ms) == ["m1"]
    assert group.state == "Empty"


def test_a_lost_answer_is_answered_again() -> None:
    """The member comes with the epoch before and with no more than it was given."""
    group = new_group()
    first = beat(group, "m1", 0)
    group.set_topics({"a": 5})
    beat(group, "m1", first.member_epoch)
    again = beat(group, "m1", first.member_epoch, owned=first.assignment)
    assert (again.error, again.assignment) == (ErrorCode.NONE, partitions("a", 0, 1, 2, 3, 4))
    too_much = beat(group, "m1", first.member_epoch, owned=partitions("b", 1))
    assert too_much.error == ErrorCode.FENCED_MEMBER_EPOCH
    assert beat(group, "m1", 99).error == ErrorCode.FENCED_MEMBER_EPOCH


def test_a_static_member_that_comes_back_has_what_it_had() -> None:
    """It said that it would; another one with its instance id is refused while it is there."""
    group = new_group()
    first = beat(group, "m1", 0, instance_id="one")
    beat(group, "m2", 0)
    assert beat(group, "other", 0, instance_id="one").error == ErrorCode.UNRELEASED_INSTANCE_ID
    assert beat(group, "m1", -2, instance_id="one").error == ErrorCode.NONE
    epoch = group.epoch
    back = beat(group, "m1b", 0, instance_id="one")
    assert back.error == ErrorCode.NONE
    assert group.epoch == epoch
    assert back.assignment
    assert back.assignment < (first.assignment or frozenset())
    assert beat(group, "m1", first.member_epoch, instance_id="one").error == ErrorCode.FENCED_INSTANCE_ID
    assert beat(group, "m1", -1, instance_id="one").error == ErrorCode.FENCED_INSTANCE_ID


def test_subscriptions_by_pattern_follow_the_topics() -> None:
    """Also those that are created later; a broken pattern is refused."""
    group = new_group(orders_eu=1, other=1)
    first = beat(group, "m1", 0, topics=frozenset(), regex="orders_.*")
    assert first.assignment == partitions("orders_eu", 0)
    group.set_topics({"orders_eu": 1, "orders_us": 1, "other": 9})
    assert beat(group, "m1", first.member_epoch).assignment == partitions("orders_eu", 0) | partitions("orders_us", 0)
    epoch = group.epoch
    group.set_topics({"orders_eu": 1, "orders_us": 1, "other": 3})
    assert group.epoch == epoch
    assert beat(group, "m2", 0, topics=frozenset(), regex="(").error == ErrorCode.INVALID_REGULAR_EXPRESSION


def test_wrong_heartbeats_are_refused() -> None:
    """Before they change anything."""
    group = new_group()
    assert beat(group, "m", 0, assignor="magic").error == ErrorCode.UNSUPPORTED_ASSIGNOR
    assert beat(group, "m", 0, topics=None).error == ErrorCode.INVALID_REQUEST
    assert beat(group, "m", 0, rebalance_timeout_ms=-1).error == ErrorCode.INVALID_REQUEST
    assert beat(group, "m", 0, owned=partitions("a", 1)).error == ErrorCode.INVALID_REQUEST
    assert beat(group, "m", -3).error == ErrorCode.INVALID_REQUEST
    assert beat(group, "m", 5).error == ErrorCode.UNKNOWN_MEMBER_ID
    assert beat(group, "m", -1).error == ErrorCode.UNKNOWN_MEMBER_ID
    assert (group.epoch, group.members) == (0, {})


def test_offsets_are_committed_with_the_current_epoch() -> None:
    """By members, and by anybody while there are none."""
    group = new_group()
    assert group.commit_error("", -1) == ErrorCode.NONE
    first = beat(group, "m1", 0)
    assert group.commit_error("m1", first.member_epoch) == ErrorCode.NONE
    assert group.commit_error("m1", first.member_epoch - 1) == ErrorCode.STALE_MEMBER_EPOCH
    assert group.commit_error("x", 1) == ErrorCode.UNKNOWN_MEMBER_ID
    assert group.commit_error("", -1) == ErrorCode.UNKNOWN_MEMBER_ID


def test_most_members_choose_the_assignor() -> None:
    """Uniform where nobody says anything."""
    group = new_group(a=3, b=3)
    both = frozenset("ab")
    beat(group, "m1", 0, topics=both)
    assert group.assignor_name() == "uniform"
    beat(group, "m2", 0, topics=both, assignor="range")
    assert group.assignor_name() == "range"


@given(data=st.binary(max_size=60))
def test_a_damaged_snapshot_of_a_group_is_refused(data: bytes) -> None:
    """Its members join again then."""
    with pytest.raises(DataError):
        new_group().restore(0, data)


class Member:
    """A consumer: it owns partitions until it has given them up, and says what it owns."""

    def __init__(self, name: str, instance_id: str | None) -> None:
        self.name, self.instance_id = name, instance_id
        self.topics: frozenset[str] = frozenset("a")
        self.restart(name)

    def restart(self, member_id: str) -> None:
        self.id, self.epoch = member_id, 0
        self.owned: frozenset[Partition] = frozenset()
        self.assignment: frozenset[Partition] = frozenset()
        self.says_all, self.is_running = True, True
        self.next_ms = 0


class ConsumerGroupModel(RuleBasedStateMachine):
    """Members that come, go, change their minds, lose answers, and are slow to give up partitions."""

    def __init__(self) -> None:
        super().__init__()
        self.group = new_group()
        self.now_ms = 0
        self.members: list[Member] = []
        self.restarts = itertools.count()

    @initialize(
        count=st.integers(1, 4), static=st.integers(0, 2), sizes=st.tuples(st.integers(0, 6), st.integers(0, 6))
    )
    def start(self, count: int, static: int, sizes: tuple[int, int]) -> None:
        self.group.set_topics({"a": sizes[0], "b": sizes[1]})
        self.members = [Member(f"m{index}", f"i{index}" if index < static else None) for index in range(count)]
        for member in self.members:
            member.is_running = False

    def send(self, member: Member, is_lost: bool = False, gives_up: bool = True) -> None:
        """One heartbeat; its answer may be lost, and what has to be given up may take longer."""
        if gives_up:
            member.owned &= member.assignment
        joins = member.epoch == 0
        everything = member.says_all or joins
        is_slow = not member.owned <= member.assignment
        owned = frozenset() if joins else None if is_slow and not everything else member.owned
        request = HeartbeatRequest(
            member.id,
            member.epoch,
            member.instance_id,
            rebalance_timeout_ms=REBALANCE_MS if everything else -1,
            topics=member.topics if everything else None,
            owned=owned,
        )
        result = self.group.heartbeat(self.now_ms, request)
        member.next_ms = self.now_ms + SETTINGS.heartbeat_interval_ms
        member.says_all = is_lost
        if is_lost:
            return
        if result.error in (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.FENCED_MEMBER_EPOCH):
            member.owned = member.assignment = frozenset()
            member.epoch = 0
            return
        assert result.error in (ErrorCode.NONE, ErrorCode.UNRELEASED_INSTANCE_ID, ErrorCode.FENCED_INSTANCE_ID), result
        if result.error is not ErrorCode.NONE:
            member.is_running = False
            return
        member.epoch = result.member_epoch
        if result.assignment is not None:
            member.assignment = result.assignment
        if member.owned <= member.assignment:
            member.owned = member.assignment

    def running(self) -> list[Member]:
        return [one for one in self.members if one.is_running]

    @rule(data=st.data(), is_lost=st.booleans(), gives_up=st.booleans())
    def a_member_heartbeats(self, data: st.DataObject, is_lost: bool, gives_up: bool) -> None:
        if self.running():
            self.send(data.draw(st.sampled_from(self.running())), is_lost, gives_up)

    @rule(data=st.data(), passed_ms=st.integers(1, 15_000))
    def time_passes(self, data: st.DataObject, passed_ms: int) -> None:
        """Running members heartbeat on time, but some may be slow to give up."""
        slow = {one.name for one in self.running() if data.draw(st.booleans())}
        self.run_for(passed_ms, slow)

    def run_for(self, passed_ms: int, slow: set[str]) -> None:
        end = self.now_ms + passed_ms
        for step in itertools.count():
            assert step < 2000, "the group does not come to rest"
            moments = [one.next_ms for one in self.running()]
            deadline = self.group.next_deadline_ms
            due = [moment for moment in (*moments, deadline) if moment is not None and moment <= end]
            if not due:
                break
            self.now_ms = max(self.now_ms, min(due))
            if deadline is not None and deadline <= self.now_ms:
                self.group.tick(self.now_ms)
            for member in self.running():
                if member.next_ms <= self.now_ms:
                    self.send(member, gives_up=member.name not in slow)
        self.now_ms = end

    @rule(data=st.data())
    def a_member_starts(self, data: st.DataObject) -> None:
        stopped = [one for one in self.members if not one.is_running]
        if stopped:
            member = data.draw(st.sampled_from(stopped))
            member.restart(f"{member.name}-{next(self.restarts)}")
            member.next_ms = self.now_ms
            self.send(member)

    @rule(data=st.data(), says_so=st.booleans())
    def a_member_stops(self, data: st.DataObject, says_so: bool) -> None:
        """Leaving, or just dying: then its session ends it."""
        if not self.running():
            return
        member = data.draw(st.sampled_from(self.running()))
        if says_so and member.epoch > 0:
            epoch = -1 if member.instance_id is None else -2
            member.owned = frozenset()
            self.group.heartbeat(self.now_ms, HeartbeatRequest(member.id, epoch, member.instance_id))
        member.is_running = False

    @rule(data=st.data(), topics=st.frozensets(st.sampled_from("ab"), min_size=1))
    def a_member_subscribes_to_other_topics(self, data: st.DataObject, topics: frozenset[str]) -> None:
        if self.running():
            member = data.draw(st.sampled_from(self.running()))
            member.topics, member.says_all = topics, True

    @rule(sizes=st.tuples(st.integers(0, 6), st.integers(0, 6)))
    def topics_change(self, sizes: tuple[int, int]) -> None:
        self.group.set_topics({"a": sizes[0], "b": sizes[1]})

    @rule()
    def the_coordinator_starts_again(self) -> None:
        """From its snapshot, at any time."""
        again = new_group()
        again.restore(self.now_ms, self.group.snapshot())
        assert again.target == self.group.target
        self.group = again

    @invariant()
    def no_partition_is_owned_twice(self) -> None:
        """Among members that the coordinator still counts as such."""
        owned = [one for member in self.members if member.id in self.group.members for one in member.owned]
        assert len(set(owned)) == len(owned)

    @invariant()
    def nothing_is_given_twice(self) -> None:
        held = [one for member in self.group.members.values() for one in member.holds]
        assert len(set(held)) == len(held)

    def teardown(self) -> None:
        """Left alone, every partition is with the one member that the target names."""
        self.run_for(3 * REBALANCE_MS, set())
        for member in self.running():
            if member.epoch == 0 or member.id not in self.group.members:
                return  # another one with its instance id came first
        assert set(self.group.members) == {one.id for one in self.running()}
        for member in self.running():
            assert member.owned == self.group.target[member.id]
            assert member.epoch == self.group.epoch


@pytest.mark.deeper
def test_no_two_members_own_a_partition_and_all_is_owned_in_the_end() -> None:
    """Through lost answers, slow members, deaths and returns."""
    run_machine(ConsumerGroupModel, 60, steps=30)
