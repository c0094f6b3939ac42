"""The classic group protocol: its rules one by one, and a model with clients that behave and clients that do not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.campaign import run_machine

from tidelog.errors import DataError
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.groups.classic import (
    ClassicGroup,
    GroupSettings,
    GroupState,
    JoinRequest,
    JoinResult,
    Reply,
    SyncResult,
)

SESSION_MS, REBALANCE_MS = 10_000, 30_000
AT_ONCE = GroupSettings(initial_rebalance_delay_ms=0, max_members=6)


def id_maker() -> Callable[[str], str]:
    numbers = itertools.count(1)
    return lambda client: f"{client}-{next(numbers)}"


def new_group(settings: GroupSettings = AT_ONCE) -> ClassicGroup:
    return ClassicGroup("g", id_maker(), settings)


def request(
    member_id: str = "", protocols: tuple[tuple[str, bytes], ...] = (("range", b"m"),), **more: Any
) -> JoinRequest:
    values = {"protocol_type": "consumer", "session_timeout_ms": SESSION_MS, "rebalance_timeout_ms": REBALANCE_MS}
    return JoinRequest(member_id=member_id, protocols=protocols, **{"client_id": "c", **values, **more})


def join(group: ClassicGroup, token: object, now_ms: int = 0, member_id: str = "", **more: Any) -> dict[Any, Any]:
    return as_dict(group.join(now_ms, token, request(member_id, **{"requires_known_id": False, **more})))


def as_dict(replies: list[Reply]) -> dict[Any, Any]:
    assert len({reply.token for reply in replies}) == len(replies)
    return {reply.token: reply.result for reply in replies}


def stable_pair(group: ClassicGroup, **more: Any) -> tuple[str, str]:
    """A leader and a follower, in sync."""
    first = join(group, "a", **more)["a"].member_id
    assert join(group, "b", **{**more, "instance_id": "two"} if more else {}) == {}
    replies = join(group, "a", member_id=first, **more)
    second = replies["b"].member_id
    generation = replies["a"].generation
    assert as_dict(group.sync(0, "s2", second, generation, {})) == {}
    synced = as_dict(group.sync(0, "s1", first, generation, {first: b"1", second: b"2"}))
    assert (synced["s1"].assignment, synced["s2"].assignment) == (b"1", b"2")
    assert group.state is GroupState.STABLE
    return first, second


def test_new_members_are_told_their_id_first() -> None:
    """A client that loses the answer and tries again would otherwise leave members behind that nobody is."""
    group = new_group()
    told = as_dict(group.join(0, "t", request()))["t"]
    assert (told.error, told.member_id) == (ErrorCode.MEMBER_ID_REQUIRED, "c-1")
    assert group.member_ids == []
    joined = as_dict(group.join(5, "t", request("c-1")))["t"]
    assert (joined.error, joined.generation, joined.leader_id) == (ErrorCode.NONE, 1, "c-1")


def test_a_pending_member_is_waited_for_and_then_forgotten() -> None:
    """For its session timeout, no longer."""
    group = new_group()
    first, second = stable_pair(group)
    as_dict(group.join(0, "p", request()))
    assert join(group, "a2", 1, first) == {}
    assert join(group, "b2", 1, second) == {}
    assert group.next_deadline_ms == SESSION_MS
    assert group.tick(SESSION_MS - 1) == []
    assert set(as_dict(group.tick(SESSION_MS))) == {"a2", "b2"}


def test_all_members_of_a_generation_agree() -> None:
    """The leader alone is told of everybody."""
    group = new_group()
    first = join(group, "a")["a"].member_id
    join(group, "b")
    replies = join(group, "a2", member_id=first)
    assert {one.generation for one in replies.values()} == {2}
    assert {one.leader_id for one in replies.values()} == {first}
    assert [len(replies[token].members) for token in ("a2", "b")] == [2, 0]


def test_the_first_rebalance_waits_for_more_members() -> None:
    """Consumers that start together get one rebalance, not one each."""
    group = new_group(GroupSettings(initial_rebalance_delay_ms=3000))
    assert join(group, "a", 0) == {}
    assert join(group, "b", 2000) == {}
    assert group.tick(4999) == []
    assert set(as_dict(group.tick(5000))) == {"a", "b"}
    assert group.generation == 1


def test_the_protocol_that_most_prefer_is_chosen() -> None:
    """Of those that all of them have."""
    group = new_group(GroupSettings(initial_rebalance_delay_ms=10))
    join(group, "a", protocols=(("range", b"r"), ("sticky", b"s")))
    join(group, "b", protocols=(("sticky", b"s"), ("range", b"r")))
    join(group, "c", protocols=(("other", b""), ("sticky", b"s"), ("range", b"r")))
    replies = as_dict(group.tick(10_000))
    assert {one.protocol_name for one in replies.values()} == {"sticky"}


def test_a_member_without_a_common_protocol_is_refused() -> None:
    """Also one of another type, and one that offers nothing."""
    group = new_group()
    stable_pair(group)
    for wrong in ({"protocols": (("other", b""),)}, {"protocol_type": "connect"}, {"protocols": ()}):
        assert join(group, "x", **wrong)["x"].error == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert group.state is GroupState.STABLE


def test_a_silent_member_is_removed_and_the_others_share_its_work() -> None:
    """They learn of it by their next heartbeat."""
    group = new_group()
    first, second = stable_pair(group)
    assert group.heartbeat(5000, first, 2) == ErrorCode.NONE
    assert group.tick(SESSION_MS) == []
    assert group.state is GroupState.PREPARING
    assert group.heartbeat(SESSION_MS + 1, first, 2) == ErrorCode.REBALANCE_IN_PROGRESS
    assert group.heartbeat(SESSION_MS + 1, second, 2) == ErrorCode.UNKNOWN_MEMBER_ID
    assert join(group, "a", SESSION_MS + 2, first)["a"].generation == 3


def test_a_member_that_does_not_join_again_in_time_is_left_behind() -> None:
    """The others are not held up for longer than the rebalance timeout, though it heartbeats."""
    group = new_group()
    first, second = stable_pair(group)
    assert join(group, "a", 0, first) == {}
    for now in range(0, REBALANCE_MS, 5000):
        assert group.heartbeat(now, second, 2) == ErrorCode.REBALANCE_IN_PROGRESS
    replies = as_dict(group.tick(REBALANCE_MS))
    assert replies["a"].error == ErrorCode.NONE
    assert group.member_ids == [first]


def test_a_member_that_does_not_sync_is_removed() -> None:
    """A leader that dies between join and sync, but heartbeats, must not block the group."""
    group = new_group()
    first = join(group, "a")["a"].member_id
    for now in range(0, REBALANCE_MS, 5000):
        assert group.heartbeat(now, first, 1) == ErrorCode.NONE
    group.tick(REBALANCE_MS)
    assert group.state is GroupState.EMPTY


def test_syncs_that_wait_are_told_of_the_next_rebalance() -> None:
    """Nobody waits for a leader that will never answer for this generation."""
    group = new_group()
    first = join(group, "a")["a"].member_id
    join(group, "b")
    second = join(group, "a2", member_id=first)["b"].member_id
    assert group.sync(0, "s", second, 2, {}) == []
    _, replies = group.leave(1, first)
    assert as_dict(replies) == {"s": SyncResult(ErrorCode.REBALANCE_IN_PROGRESS)}
    assert group.leader_id == second


def test_a_wrong_generation_or_member_is_refused_everywhere() -> None:
    """A zombie changes nothing."""
    group = new_group()
    first, _ = stable_pair(group)
    assert group.heartbeat(0, first, 1) == ErrorCode.ILLEGAL_GENERATION
    assert group.heartbeat(0, "nobody", 2) == ErrorCode.UNKNOWN_MEMBER_ID
    assert as_dict(group.sync(0, "s", first, 3, {}))["s"].error == ErrorCode.ILLEGAL_GENERATION
    assert as_dict(group.sync(0, "s", "nobody", 2, {}))["s"].error == ErrorCode.UNKNOWN_MEMBER_ID
    assert join(group, "j", member_id="nobody")["j"].error == ErrorCode.UNKNOWN_MEMBER_ID
    assert group.commit(0, first, 1) == ErrorCode.ILLEGAL_GENERATION
    assert group.commit(0, "", -1) == ErrorCode.UNKNOWN_MEMBER_ID
    assert group.commit(0, first, 2) == ErrorCode.NONE
    wrong = group.sync(0, "s", first, 2, {}, protocol_name="other")
    assert as_dict(wrong)["s"].error == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert group.leave(0, "nobody")[0] == ErrorCode.UNKNOWN_MEMBER_ID


def test_anybody_commits_to_a_group_without_members() -> None:
    """Consumers that assign partitions themselves, and tools that reset offsets."""
    group = new_group()
    assert group.commit(0, "", -1) == ErrorCode.NONE
    assert group.commit(0, "x", 3) == ErrorCode.UNKNOWN_MEMBER_ID


def test_offsets_are_not_committed_between_join_and_sync() -> None:
    """Partitions belong to nobody at that moment."""
    group = new_group()
    first = join(group, "a")["a"].member_id
    assert group.commit(0, first, 1) == ErrorCode.REBALANCE_IN_PROGRESS


def test_followers_that_join_again_unchanged_rebalance_nobody() -> None:
    """They lost the answer; a leader asks for a rebalance that way."""
    group = new_group()
    first, second = stable_pair(group)
    assert join(group, "b", member_id=second)["b"].generation == 2
    assert group.heartbeat(0, first, 2) == ErrorCode.NONE
    assert join(group, "b", member_id=second, protocols=(("range", b"more topics"),)) == {}
    assert group.state is GroupState.PREPARING
    assert join(group, "a", member_id=first)["a"].generation == 3


def test_a_static_member_that_comes_back_keeps_its_partitions() -> None:
    """A restart within the session timeout costs no rebalance, and the one before is fenced."""
    group = new_group()
    first, second = stable_pair(group, instance_id="one")
    back = join(group, "r", instance_id="two")["r"]
    assert (back.error, back.generation) == (ErrorCode.NONE, 2)
    assert back.member_id != second
    assert group.state is GroupState.STABLE
    assert group.heartbeat(0, second, 2, "two") == ErrorCode.FENCED_INSTANCE_ID
    assert as_dict(group.sync(0, "s", back.member_id, 2, {}, instance_id="two"))["s"].assignment == b"2"
    assert group.heartbeat(0, first, 2, "one") == ErrorCode.NONE


@pytest.mark.parametrize("can_skip", [True, False])
def test_a_static_leader_that_comes_back_does_not_assign_again(can_skip: bool) -> None:
    """It is told to skip the assignment, or where it cannot understand that, that it does not lead."""
    group = new_group()
    first, _ = stable_pair(group, instance_id="one")
    back = join(group, "r", instance_id="one", can_skip_assignment=can_skip)["r"]
    assert group.leader_id == back.member_id
    assert back.skip_assignment is can_skip
    assert back.leader_id == (back.member_id if can_skip else first)
    assert len(back.members) == (2 if can_skip else 0)


def test_a_static_member_with_other_topics_causes_a_rebalance() -> None:
    """Its partitions would be wrong."""
    group = new_group()
    stable_pair(group, instance_id="one")
    assert join(group, "r", instance_id="two", protocols=(("range", b"other"),)) == {}
    assert group.state is GroupState.PREPARING


def test_a_fenced_instance_is_told_where_it_waits() -> None:
    """Two processes with one instance id: the later one counts."""
    group = new_group(GroupSettings(initial_rebalance_delay_ms=1000))
    assert join(group, "old", instance_id="one") == {}
    replies = join(group, "new", instance_id="one")
    assert replies["old"].error == ErrorCode.FENCED_INSTANCE_ID
    assert as_dict(group.tick(1000))["new"].error == ErrorCode.NONE


def test_an_administrator_removes_a_static_member_by_its_instance_id() -> None:
    """Or by both ids, which must fit."""
    group = new_group()
    first, second = stable_pair(group, instance_id="one")
    assert group.leave(0, second, "one")[0] == ErrorCode.FENCED_INSTANCE_ID
    assert group.leave(0, "", "two")[0] == ErrorCode.NONE
    assert group.leave(0, "", "two")[0] == ErrorCode.UNKNOWN_MEMBER_ID
    assert group.member_ids == [first]


def test_a_rebalance_that_only_static_members_missed_waits_for_them() -> None:
    """Nobody is there who could lead; they are removed by their sessions alone."""
    group = new_group()
    first, second = stable_pair(group, instance_id="one")
    group.leave(0, "", "two")
    assert group.member_ids == [first]
    assert group.heartbeat(REBALANCE_MS - 1, first, 2, "one") == ErrorCode.REBALANCE_IN_PROGRESS
    assert group.tick(REBALANCE_MS) == []
    assert group.member_ids == [first]
    assert join(group, "a", REBALANCE_MS + 1, first, instance_id="one")["a"].generation == 3
    assert second not in group.member_ids


def test_the_group_has_a_largest_size() -> None:
    """Pending members count."""
    group = new_group(GroupSettings(initial_rebalance_delay_ms=0, max_members=1))
    as_dict(group.join(0, "t", request()))
    assert join(group, "x")["x"].error == ErrorCode.GROUP_MAX_SIZE_REACHED


def test_session_timeouts_have_limits() -> None:
    """Too short a one would rebalance all the time, too long a one never."""
    group = new_group()
    assert join(group, "x", session_timeout_ms=1)["x"].error == ErrorCode.INVALID_SESSION_TIMEOUT
    assert join(group, "x", session_timeout_ms=1 << 30)["x"].error == ErrorCode.INVALID_SESSION_TIMEOUT


def test_a_closed_group_answers_everybody() -> None:
    """Its coordinator moved to another node, or the group was deleted."""
    group = new_group(GroupSettings(initial_rebalance_delay_ms=1000))
    join(group, "a")
    assert as_dict(group.close())["a"].error == ErrorCode.NOT_COORDINATOR
    assert join(group, "b")["b"].error == ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert group.heartbeat(0, "c-1", 1) == ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert group.next_deadline_ms is None


def test_members_are_shown_as_kafka_s_tools_show_them() -> None:
    """Metadata counts in a stable group only; the last assignment is shown until there is another."""
    group = new_group()
    first, second = stable_pair(group)
    assert [(one.member_id, one.assignment) for one in group.members()] == [(first, b"1"), (second, b"2")]
    assert {one.metadata for one in group.members()} == {b"m"}
    join(group, "a", member_id=first)
    assert [one.assignment for one in group.members()] == [b"1", b"2"]
    assert {one.metadata for one in group.members()} == {b""}


def test_a_stable_group_survives_its_coordinator() -> None:
    """Its members go on; of one that rebalances only the generation is kept."""
    group = new_group()
    first, second = stable_pair(group, instance_id="one")
    data = group.snapshot()
    again = new_group()
    again.restore(1000, data)
    assert again.heartbeat(1000, first, 2, "one") == ErrorCode.NONE
    assert again.commit(1000, second, 2, "two") == ErrorCode.NONE
    assert as_dict(again.sync(1000, "s", second, 2, {}, instance_id="two"))["s"].assignment == b"2"
    assert again.members() == group.members()
    assert again.next_deadline_ms == 1000 + SESSION_MS
    join(group, "a", member_id=first, instance_id="one")
    later = new_group()
    later.restore(0, group.snapshot())
    assert (later.generation, later.member_ids, later.state) == (2, [], GroupState.EMPTY)


@given(data=st.binary(max_size=60))
def test_a_damaged_snapshot_of_a_group_is_refused(data: bytes) -> None:
    """Its members join again then."""
    with pytest.raises(DataError):
        new_group().restore(0, data)


class Client:
    """A consumer that follows the protocol as long as it is awake."""

    def __init__(self, name: int, instance_id: str | None) -> None:
        self.name, self.instance_id = name, instance_id
        self.forget()
        self.is_dead = False

    def forget(self) -> None:
        self.member_id, self.generation, self.phase, self.leads = "", -1, "out", False
        self.everybody: list[str] = []
        self.next_action_ms = 0
        self.token: int | None = None


class GroupModel(RuleBasedStateMachine):
    """Clients join, sync, heartbeat in time, die, come back and leave, while zombies interfere."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0
        self.tokens = itertools.count()
        self.clients: list[Client] = []
        self.waiting: dict[int, Client | None] = {}
        self.given: dict[int, dict[str, bytes]] = {}
        self.last_generation = 0

    @initialize(delay=st.sampled_from([0, 3000]), count=st.integers(2, 5), static=st.integers(0, 2))
    def start(self, delay: int, count: int, static: int) -> None:
        self.group = new_group(GroupSettings(initial_rebalance_delay_ms=delay, max_members=50))
        self.clients = [Client(index, f"i{index}" if index < static else None) for index in range(count)]

    # What the clients do

    def send_join(self, client: Client, requires_known_id: bool = True) -> None:
        client.token = next(self.tokens)
        client.phase = "joining"
        self.waiting[client.token] = client
        details = request(
            client.member_id,
            instance_id=client.instance_id,
            requires_known_id=requires_known_id,
            client_id=f"c{client.name}",
        )
        self.take(self.group.join(self.now_ms, client.token, details))

    def send_sync(self, client: Client) -> None:
        client.token = next(self.tokens)
        client.phase = "syncing"
        self.waiting[client.token] = client
        assignments = {}
        if client.leads:
            assignments = {one: f"{client.generation}:{one}".encode() for one in client.everybody}
            self.given[client.generation] = assignments
        self.take(
            self.group.sync(
                self.now_ms,
                client.token,
                client.member_id,
                client.generation,
                assignments,
                instance_id=client.instance_id,
            )
        )

    def take(self, replies: list[Reply]) -> None:
        todo = []
        for token, result in replies:
            assert isinstance(token, int)
            client = self.waiting.pop(token)  # a second answer to a token is an error here
            if client is not None and client.token == token and not client.is_dead:
                client.token = None
                todo.append((client, result))
        for client, result in todo:
            if isinstance(result, JoinResult):
                self.joined(client, result)
            else:
                self.synced(client, result)

    def joined(self, client: Client, result: JoinResult) -> None:
        if result.error is ErrorCode.MEMBER_ID_REQUIRED:
            client.member_id, client.phase = result.member_id, "told"
            client.next_action_ms = self.now_ms
            return
        # A member that behaves is never told that it is unknown, whatever the others do.
        assert result.error is ErrorCode.NONE, result
        client.member_id, client.generation = result.member_id, result.generation
        client.leads = result.leader_id == result.member_id
        client.everybody = [one[0] for one in result.members]
        assert not client.leads or client.member_id in client.everybody
        client.phase, client.next_action_ms = "joined", self.now_ms

    def synced(self, client: Client, result: SyncResult) -> None:
        if result.error is ErrorCode.REBALANCE_IN_PROGRESS:
            client.phase, client.next_action_ms = "told", self.now_ms
            return
        assert result.error is ErrorCode.NONE, result
        assert result.assignment == self.given[client.generation].get(client.member_id, b"")
        client.phase, client.next_action_ms = "stable", self.now_ms + 3000

    def act(self, client: Client) -> None:
        """The next thing that a live client does."""
        if client.phase in ("told", "out"):
            self.send_join(client)
        elif client.phase == "joined":
            self.send_sync(client)
        elif client.phase == "stable":
            error = self.group.heartbeat(self.now_ms, client.member_id, client.generation, client.instance_id)
            assert error in (ErrorCode.NONE, ErrorCode.REBALANCE_IN_PROGRESS)
            client.phase = "stable" if error is ErrorCode.NONE else "told"
            client.next_action_ms = self.now_ms + (3000 if error is ErrorCode.NONE else 0)

    # What happens

    @rule(data=st.data())
    def a_client_acts(self, data: st.DataObject) -> None:
        ready = [one for one in self.clients if not one.is_dead and one.phase not in ("joining", "syncing")]
        if ready:
            self.act(data.draw(st.sampled_from(ready)))

    @rule(passed_ms=st.integers(1, 40_000))
    def time_passes(self, passed_ms: int) -> None:
        """Every live client acts within three seconds of when it is due; deadlines are kept."""
        end = self.now_ms + passed_ms
        for step in itertools.count():
            assert step < 2000, "the group does not come to rest"
            due = [
                one.next_action_ms
                for one in self.clients
                if not one.is_dead and one.phase in ("told", "joined", "stable")
            ]
            deadline = self.group.next_deadline_ms
            moments = [moment for moment in (*due, deadline) if moment is not None and moment <= end]
            if not moments:
                break
            self.now_ms = max(self.now_ms, min(moments))
            if deadline is not None and deadline <= self.now_ms:
                self.take(self.group.tick(self.now_ms))
            for client in self.clients:
                is_due = client.phase in ("told", "joined", "stable") and client.next_action_ms <= self.now_ms
                if is_due and not client.is_dead:
                    self.act(client)
        self.now_ms = end

    @rule(data=st.data())
    def a_client_dies(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.clients))
        client.is_dead = True

    @rule(data=st.data())
    def a_dead_client_starts_again(self, data: st.DataObject) -> None:
        """With a new id; a static one takes its own place, and its old self is fenced."""
        dead = [one for one in self.clients if one.is_dead]
        if dead:
            client = data.draw(st.sampled_from(dead))
            client.forget()
            client.is_dead = False
            self.send_join(client, requires_known_id=data.draw(st.booleans()))

    @rule(data=st.data())
    def a_client_leaves(self, data: st.DataObject) -> None:
        members = [one for one in self.clients if one.phase == "stable" and not one.is_dead]
        if members:
            client = data.draw(st.sampled_from(members))
            error, replies = self.group.leave(self.now_ms, client.member_id, client.instance_id)
            assert error is ErrorCode.NONE
            client.forget()
            self.take(replies)

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), generation=st.integers(-1, 4), name=st.sampled_from(["", "c0-1", "c1-2", "i0-1", "zombie"]))
    def a_zombie_interferes(self, data: st.DataObject, generation: int, name: str) -> None:
        """With ids and generations of the past it gets errors, and harms nobody."""
        live = {one.member_id for one in self.clients if not one.is_dead}
        if name in live or (generation == self.group.generation and name in self.group.member_ids):
            return
        token = next(self.tokens)
        self.waiting[token] = None
        self.take(self.group.sync(self.now_ms, token, name, generation, {"x": b"evil"}))
        assert token not in self.waiting
        assert self.group.heartbeat(self.now_ms, name, generation) is not ErrorCode.NONE

    @precondition(lambda self: self.clients and self.group.state is GroupState.STABLE)
    @rule()
    def the_coordinator_starts_again(self) -> None:
        """From the snapshot of a stable group, which nobody notices."""
        if not self.waiting and self.group.is_settled:
            again = new_group(self.group.settings)
            again.new_member_id = self.group.new_member_id
            again.restore(self.now_ms, self.group.snapshot())
            self.group = again

    # What is true at all times

    @invariant()
    def generations_grow(self) -> None:
        if self.clients:
            assert self.group.generation >= self.last_generation
            self.last_generation = self.group.generation

    @invariant()
    def live_members_are_members(self) -> None:
        for client in self.clients:
            if not client.is_dead and client.phase in ("joined", "syncing", "stable"):
                assert client.member_id in self.group.member_ids
                assert client.generation == self.group.generation or self.group.state is not GroupState.STABLE

    @invariant()
    def one_leads(self) -> None:
        if self.clients and self.group.state in (GroupState.COMPLETING, GroupState.STABLE):
            assert self.group.leader_id in self.group.member_ids
        instances = [one.instance_id for one in self.group.members() if one.instance_id] if self.clients else []
        assert len(set(instances)) == len(instances)

    def teardown(self) -> None:
        """Left alone, the living end up in one stable generation; the dead are gone; no answer is owed."""
        if not self.clients:
            return
        for _ in range(8):
            self.time_passes(REBALANCE_MS + SESSION_MS)
        live = [one for one in self.clients if not one.is_dead and one.phase != "out"]
        assert all(one.phase == "stable" for one in live)
        assert {one.generation for one in live} <= {self.group.generation}
        assert {one.member_id for one in live} == set(self.group.member_ids)
        assert self.group.state is (GroupState.STABLE if live else GroupState.EMPTY)
        assert all(client is None or client.is_dead for client in self.waiting.values())
        self.take(self.group.close())
        assert not self.waiting


@pytest.mark.deeper
def test_members_that_behave_stay_members() -> None:
    """Whatever others do: one generation in the end, every request answered once, nobody unknown who was there."""
    run_machine(GroupModel, 60, steps=30)
