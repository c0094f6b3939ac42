"""The group coordinator: what clients are answered, in every version, and what waits, expires and survives."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.service.kafka.group_requests import ORDERS, Bench, run, started

from tidelog.service.kafka import codec
from tidelog.service.kafka.error_codes import ErrorCode as E
from tidelog.service.kafka.groups.classic import ClassicGroup, GroupSettings
from tidelog.service.kafka.groups.store import GroupRecord
from tidelog.service.kafka.groups.table import CoordinatorSettings

WAITING = CoordinatorSettings(classic=GroupSettings(initial_rebalance_delay_ms=3000))


async def passed(seconds: float) -> None:
    await asyncio.sleep(seconds)


# Members of the classic protocol


def test_a_first_rebalance_waits_for_more_members() -> None:
    """Both are in the first generation; the follower's sync is answered by the leader's."""

    async def work(bench: Bench) -> None:
        await started(bench)
        begun = asyncio.get_running_loop().time()
        first, second = bench.join(), bench.join()
        one, two = await first, await second
        assert asyncio.get_running_loop().time() - begun >= 3
        assert (one.generation_id, two.generation_id, len(one.members), two.members) == (1, 1, 2, [])
        assert (one.leader, two.leader) == (one.member_id, one.member_id)
        follower = bench.begin(14, 3, group_id="g", generation_id=1, member_id=two.member_id)
        await passed(1)
        assert not follower.done()
        parts = [{"member_id": one.member_id, "assignment": b"1"}, {"member_id": two.member_id, "assignment": b"2"}]
        leader = await bench.ask(14, 3, group_id="g", generation_id=1, member_id=one.member_id, assignments=parts)
        assert (leader.assignment, (await follower).assignment) == (b"1", b"2")
        assert await bench.heartbeat(two.member_id, 1) == E.NONE

    run(work, WAITING)


def test_a_silent_member_is_removed_and_the_others_rebalance() -> None:
    """By the timer alone: the one that goes on hears of it with its next heartbeat."""

    async def work(bench: Bench) -> None:
        await started(bench)
        one = await bench.join()
        joining = bench.join()
        await passed(1)
        assert (await bench.join(one.member_id)).generation_id == 2
        two = await joining
        heard = []
        for _ in range(3):
            await passed(4)
            heard.append(await bench.heartbeat(one.member_id, 2))
        assert heard == [E.NONE, E.NONE, E.REBALANCE_IN_PROGRESS]
        assert (await bench.join(one.member_id)).generation_id == 3
        assert await bench.heartbeat(two.member_id, 2) == E.UNKNOWN_MEMBER_ID

    run(work)


def test_a_rebalance_ends_without_a_member_that_does_not_join_again() -> None:
    """It heartbeats and does not join: after the rebalance timeout the others go on."""

    async def work(bench: Bench) -> None:
        await started(bench)
        member, generation = await bench.stable()
        joining = bench.join()
        for _ in range(6):
            await passed(4.9)
            assert not joining.done()
            assert await bench.heartbeat(member, generation) in (E.NONE, E.REBALANCE_IN_PROGRESS)
        assert (await joining).generation_id == generation + 1
        assert await bench.heartbeat(member, generation) == E.UNKNOWN_MEMBER_ID

    run(work)


def test_a_connection_that_closes_while_it_waits_leaves_nothing() -> None:
    """Its member is silent from then on, and its session timeout ends it: neither group nor timer stays."""

    async def work(bench: Bench) -> None:
        await started(bench)
        parked = bench.join()
        await asyncio.sleep(0)
        parked.cancel()
        await asyncio.gather(parked, return_exceptions=True)
        assert bench.coordinator._table.has_members("g")
        await passed(11)
        assert list(bench.coordinator._table.ids()) == []

    run(work, WAITING)


def test_a_follower_that_closes_while_it_syncs_does_not_hold_up_the_others() -> None:
    """The leader's sync is answered; the follower comes back and syncs again."""

    async def work(bench: Bench) -> None:
        await started(bench)
        first, second = bench.join(), bench.join()
        one, two = await first, await second
        parked = bench.begin(14, 3, group_id="g", generation_id=1, member_id=two.member_id)
        await asyncio.sleep(0)
        parked.cancel()
        await asyncio.gather(parked, return_exceptions=True)
        parts = [{"member_id": two.member_id, "assignment": b"2"}]
        await bench.ask(14, 3, group_id="g", generation_id=1, member_id=one.member_id, assignments=parts)
        again = await bench.ask(14, 3, group_id="g", generation_id=1, member_id=two.member_id)
        assert (again.error_code, again.assignment) == (0, b"2")

    run(work, WAITING)


def test_new_members_get_their_id_first_from_version_4_on() -> None:
    """The id that was given is forgotten if nobody comes with it."""

    async def work(bench: Bench) -> None:
        await started(bench)
        told = await bench.join(version=9)
        assert (told.error_code, told.protocol_name, told.member_id[:2]) == (E.MEMBER_ID_REQUIRED, None, "c-")
        joined = await bench.join(told.member_id, version=9)
        assert (joined.error_code, joined.member_id, joined.protocol_type) == (0, told.member_id, "consumer")
        await bench.join(group="other", version=5)
        await passed(11)
        assert list(bench.coordinator._table.ids()) == []

    run(work)


def test_a_static_member_comes_back_without_a_rebalance() -> None:
    """And the one before it is fenced."""

    async def work(bench: Bench) -> None:
        await started(bench)
        member, generation = await bench.stable(group_instance_id="one", version=5)
        back = await bench.join(group_instance_id="one", version=9)
        assert (back.error_code, back.generation_id, back.skip_assignment) == (0, generation, True)
        assert back.member_id != member
        assert await bench.heartbeat(member, generation, group_instance_id="one") == E.FENCED_INSTANCE_ID
        synced = await bench.ask(
            14,
            5,
            group_id="g",
            generation_id=generation,
            member_id=back.member_id,
            group_instance_id="one",
            protocol_type="consumer",
            protocol_name="range",
        )
        assert (synced.error_code, synced.assignment) == (0, b"all")
        left = await bench.ask(13, 5, group_id="g", members=[{"member_id": "", "group_instance_id": "one"}])
        assert [(one.group_instance_id, one.error_code) for one in left.members] == [("one", 0)]
        assert not bench.coordinator._table.has_members("g")

    run(work)


def test_members_leave_in_every_version() -> None:
    """Until version 2 the error is the answer's, from then on the member's; an unknown group has unknown members."""

    async def work(bench: Bench) -> None:
        await started(bench)
        for version in range(6):
            member, _ = await bench.stable()
            one, members = {"member_id": member}, [{"member_id": member}]
            for expected in (E.NONE, E.UNKNOWN_MEMBER_ID):
                given: dict[str, Any] = one if version < 3 else {"members": members}
                answer = await bench.ask(13, version, group_id="g", **given)
                found = answer.error_code if version < 3 else answer.members[0].error_code
                assert found == expected, version
                assert answer.error_code in (E.NONE, found)

    run(work)


def test_what_is_not_known_is_refused_as_kafka_does() -> None:
    """A request of a member of a group that is not there, or without a group."""

    async def work(bench: Bench) -> None:
        await started(bench)
        assert (await bench.join("who")).error_code == E.UNKNOWN_MEMBER_ID
        assert await bench.heartbeat("who", 1) == E.UNKNOWN_MEMBER_ID
        assert (await bench.ask(14, 4, group_id="g", member_id="who")).error_code == E.UNKNOWN_MEMBER_ID
        assert (await bench.ask(14, 5, group_id="g", member_id="who")).error_code == E.INCONSISTENT_GROUP_PROTOCOL
        assert (await bench.join(group="")).error_code == E.INVALID_GROUP_ID
        assert (await bench.join(session_timeout_ms=1)).error_code == E.INVALID_SESSION_TIMEOUT
        assert (await bench.join(protocols=[])).error_code == E.INCONSISTENT_GROUP_PROTOCOL
        assert list(bench.coordinator._table.ids()) == []

    run(work)


def test_everybody_who_waits_is_answered_when_the_broker_ends() -> None:
    """Clients look for another coordinator."""

    async def work(bench: Bench) -> None:
        await started(bench)
        parked = bench.join()
        await asyncio.sleep(0)
        await bench.coordinator.stop()
        assert (await parked).error_code == E.NOT_COORDINATOR

    run(work, WAITING)


# Restarts


@pytest.mark.parametrize("is_killed", [False, True])
def test_members_go_on_when_the_broker_is_started_again(is_killed: bool) -> None:
    """Without a rebalance; who is gone meanwhile is removed after its session timeout."""

    async def work(bench: Bench) -> None:
        await started(bench)
        member, generation = await bench.stable()
        static, _ = await bench.stable("static", group_instance_id="one", version=5)
        new = await bench.beat(group="new")
        await bench.commit({(ORDERS, 0): 3}, member_id=member, generation=generation)
        await bench.restart(is_killed=is_killed)
        assert await bench.heartbeat(member, generation) == E.NONE
        assert await bench.commit({(ORDERS, 0): 4}, member_id=member, generation=generation) == {(ORDERS, 0): 0}
        assert await bench.heartbeat(static, 1, "static", group_instance_id="one") == E.NONE
        again = await bench.beat(group="new", epoch=new.member_epoch)
        assert (again.error_code, again.member_epoch, bench.owned(again)) == (0, new.member_epoch, None)
        await passed(11)
        assert set(bench.coordinator._table.ids()) == {"g", "new"}
        await passed(40)
        assert list(bench.coordinator._table.ids()) == ["g"]
        assert await bench.kept() == ["g"]

    run(work)


def test_members_of_a_group_that_was_rebalancing_join_again() -> None:
    """Nothing that the broker before said to some and not to others counts."""

    async def work(bench: Bench) -> None:
        await started(bench)
        member, generation = await bench.stable(group_instance_id="one", version=5)
        joining = bench.join(version=3)
        while generation in _generations(bench):
            await passed(0.1)
        await bench.restart(is_killed=True)
        joining.cancel()
        assert await bench.heartbeat(member, generation, group_instance_id="one") == E.UNKNOWN_MEMBER_ID
        assert (await bench.join(version=3)).error_code == 0

    def _generations(bench: Bench) -> list[int]:
        stable = ClassicGroup("g", str)
        stable.restore(0, bench.records.kept["g"].snapshot)
        return [stable.generation] if stable.member_ids else []

    run(work)


def test_an_answer_waits_until_the_group_is_kept() -> None:
    """Or until that has failed: a store that is away ends no group."""

    async def work(bench: Bench) -> None:
        await started(bench)
        bench.records.may_write.clear()
        joining, beating = bench.join(), asyncio.ensure_future(bench.beat(group="new"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not joining.done()
        assert not beating.done()
        bench.records.may_write.set()
        assert (await joining).error_code == (await beating).error_code == 0
        assert await bench.kept() == ["g", "new"]
        bench.records.is_down = True
        member, _ = await bench.stable("other")
        bench.records.is_down = False
        await bench.ask(13, 5, group_id="other", members=[{"member_id": member}])
        assert await bench.kept() == ["g", "new"]

    run(work)


def test_offsets_beyond_the_end_of_an_opened_partition_are_moved_back() -> None:
    """Its owner has lost the end of the log: messages that get these offsets now are other ones."""

    async def work(bench: Bench) -> None:
        await started(bench)
        await bench.commit({(ORDERS, 0): 1000, (ORDERS, 1): 1000}, group="simple")
        bench.coordinator.partition_opened(ORDERS, 0, 600)
        bench.coordinator.partition_opened(ORDERS, 1, 2000)
        found = await bench.fetch((ORDERS, 0), (ORDERS, 1), group="simple")
        assert [one[0] if isinstance(one, tuple) else one.committed_offset for one in found.values()] == [600, 1000]

    run(work)


def test_offsets_that_are_read_after_a_partition_was_opened_are_moved_back_too() -> None:
    """A client may open it while the store is still being asked."""

    async def work(bench: Bench) -> None:
        await started(bench)
        await bench.commit({(ORDERS, 0): 1000}, group="simple")
        bench.store.is_down = True
        await bench.restart(is_killed=True)
        bench.coordinator.partition_opened(ORDERS, 0, 600)
        bench.store.is_down = False
        while not bench.coordinator._offsets.is_loaded:
            await passed(1)
        ((found, *_),) = (await bench.fetch((ORDERS, 0), group="simple")).values()
        assert found == 600

    run(work)


def test_a_damaged_group_begins_again() -> None:
    """Its members are unknown, and the others go on."""

    async def work(bench: Bench) -> None:
        await started(bench)
        member, generation = await bench.stable()
        other, _ = await bench.stable("other")
        bench.records.kept["g"] = GroupRecord("classic", "consumer", None, b"damaged")
        await bench.restart(is_killed=True)
        assert await bench.heartbeat(member, generation) == E.UNKNOWN_MEMBER_ID
        assert await bench.heartbeat(other, 1, "other") == E.NONE
        assert await bench.kept() == ["other"]

    run(work)


# Administration


def test_groups_are_listed_by_state_and_type() -> None:
    """Also those that only have offsets."""

    async def work(bench: Bench) -> None:
        await started(bench)
        await bench.stable("classic")
        await bench.beat(group="new")
        await bench.commit({(ORDERS, 0): 1}, group="simple")

        async def listed(**filters: Any) -> list[tuple[str, str, str, str]]:
            found = (await bench.ask(16, **filters)).groups
            return [(one.group_id, one.protocol_type, one.group_state, one.group_type) for one in found]

        everything = [
            ("classic", "consumer", "Stable", "classic"),
            ("new", "consumer", "Stable", "consumer"),
            ("simple", "", "Empty", "classic"),
        ]
        assert await listed() == everything
        assert await listed(states_filter=["stable"]) == everything[:2]
        assert await listed(types_filter=["Consumer"]) == everything[1:2]
        assert len((await bench.ask(16, 0)).groups) == 3

    run(work)


def test_groups_are_described_by_the_request_of_their_protocol() -> None:
    """The other one does not know them."""

    async def work(bench: Bench) -> None:
        await started(bench)
        member, _ = await bench.stable("classic")
        await bench.beat(group="new")
        await bench.commit({(ORDERS, 0): 1}, group="simple")
        asked = ["classic", "new", "simple", "none"]
        found = (await bench.ask(15, 5, groups=asked, include_authorized_operations=True)).groups
        assert [(one.group_state, one.error_code, len(one.members)) for one in found] == [
            ("Stable", 0, 1),
            ("Dead", 0, 0),
            ("Empty", 0, 0),
            ("Dead", 0, 0),
        ]
        described = found[0].members[0]
        assert (described.member_id, described.client_host) == (member, "/10.0.0.1")
        assert (found[0].protocol_data, described.member_metadata, described.member_assignment) == (
            "range",
            b"meta",
            b"all",
        )
        newest = (await bench.ask(15, 6, groups=asked)).groups
        assert [one.error_code for one in newest] == [0, E.GROUP_ID_NOT_FOUND, 0, E.GROUP_ID_NOT_FOUND]
        found = (await bench.ask(69, 1, group_ids=asked)).groups
        assert [one.error_code for one in found] == [
            E.GROUP_ID_NOT_FOUND,
            0,
            E.GROUP_ID_NOT_FOUND,
            E.GROUP_ID_NOT_FOUND,
        ]
        described = found[1]
        assert (described.group_state, described.assignor_name, described.group_epoch) == ("Stable", "uniform", 1)
        assigned = described.members[0].assignment.topic_partitions
        assert [(one.topic_name, one.partitions) for one in assigned] == [("shop.orders", [0, 1])]

    run(work)


def test_only_groups_without_members_are_deleted() -> None:
    """With their offsets, in the store too."""

    async def work(bench: Bench) -> None:
        await started(bench)
        await bench.stable("classic")
        await bench.beat(group="new")
        await bench.commit({(ORDERS, 0): 1, (ORDERS, 1): 1}, group="simple")
        asked = ["classic", "new", "simple", "none"]
        found = (await bench.ask(42, groups_names=asked)).results
        assert [one.error_code for one in found] == [E.NON_EMPTY_GROUP, E.NON_EMPTY_GROUP, 0, E.GROUP_ID_NOT_FOUND]
        assert bench.store.stored == {}
        assert [one.group_id for one in (await bench.ask(16)).groups] == ["classic", "new"]
        assert await bench.kept() == ["classic", "new"]

    run(work)


# The new protocol


def test_consumers_get_partitions_by_topic_id() -> None:
    """A second member gets its share when the first has given it up; more partitions come by themselves."""

    async def work(bench: Bench) -> None:
        await started(bench)
        orders = bench.topics.make(ORDERS, 2)
        one = await bench.beat()
        assert (one.error_code, one.member_epoch, bench.owned(one)) == (0, 1, {ORDERS: [0, 1]})
        two = await bench.beat("m2")
        assert bench.owned(two) == {}
        one = await bench.beat(epoch=1)
        kept = bench.owned(one)
        assert kept is not None
        assert len(kept[ORDERS]) == 1
        owned = [{"topic_id": orders.id, "partitions": kept[ORDERS]}]
        one = await bench.beat(epoch=1, topic_partitions=owned)
        assert one.member_epoch == 2
        two = await bench.beat("m2", epoch=two.member_epoch)
        assert bench.owned(two) == {ORDERS: [number for number in (0, 1) if number not in kept[ORDERS]]}
        bench.topics.make(ORDERS, 4)
        await asyncio.sleep(0)
        one = await bench.beat(epoch=2)
        assert len((bench.owned(one) or {})[ORDERS]) == 2

    run(work)


def test_a_pattern_follows_the_topics() -> None:
    """By the names that Kafka's tools show; one that is no pattern is refused."""

    async def work(bench: Bench) -> None:
        await started(bench)
        asked: dict[str, Any] = {"subscribed_topic_names": None, "subscribed_topic_regex": "shop[.]o.*"}
        one = await bench.beat(**asked)
        assert bench.owned(one) == {ORDERS: [0, 1]}
        bench.topics.make("shop/other")
        await asyncio.sleep(0)
        one = await bench.beat(epoch=1)
        assert bench.owned(one) == {ORDERS: [0, 1], "shop/other": [0]}
        wrong = await bench.beat("m2", **{**asked, "subscribed_topic_regex": "(a"})
        assert wrong.error_code == E.INVALID_REGULAR_EXPRESSION

    run(work)


def test_a_member_that_is_silent_loses_its_partitions() -> None:
    """By the timer; when it comes back it is unknown, and joins again."""

    async def work(bench: Bench) -> None:
        await started(bench)
        await bench.beat()
        await passed(46)
        assert list(bench.coordinator._table.ids()) == []
        assert (await bench.beat(epoch=1)).error_code == E.UNKNOWN_MEMBER_ID
        assert (await bench.beat()).error_code == 0

    run(work)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"group": ""}, "GroupId"),
        ({"member_id": ""}, "MemberId"),
        ({"instance_id": ""}, "InstanceId"),
        ({"rack_id": ""}, "RackId"),
        ({"topic_partitions": None}, "TopicPartitions"),
        ({"epoch": -2}, "InstanceId"),
        ({"epoch": -3}, "MemberEpoch"),
    ],
)
def test_heartbeats_that_cannot_be_are_refused(given: dict[str, Any], problem: str) -> None:
    """With the words of Kafka's broker."""

    async def work(bench: Bench) -> None:
        await started(bench)
        answer = await bench.beat(**given)
        assert answer.error_code == E.INVALID_REQUEST
        assert problem in answer.error_message
        assert list(bench.coordinator._table.ids()) == []

    run(work)


def test_a_group_changes_its_protocol_only_without_members() -> None:
    """Members of the other protocol are refused until the last has left; offsets stay."""

    async def work(bench: Bench) -> None:
        await started(bench)
        member, generation = await bench.stable()
        assert (await bench.beat()).error_code == E.GROUP_ID_NOT_FOUND
        await bench.commit({(ORDERS, 0): 7}, member_id=member, generation=generation)
        await bench.ask(13, 5, group_id="g", members=[{"member_id": member}])
        joined = await bench.beat()
        assert (joined.error_code, bench.owned(joined)) == (0, {ORDERS: [0, 1]})
        assert (await bench.join()).error_code == E.INCONSISTENT_GROUP_PROTOCOL
        assert await bench.heartbeat(member, generation) == E.UNKNOWN_MEMBER_ID
        await bench.beat(epoch=-1)
        assert (await bench.join()).error_code == 0
        assert (await bench.ask(9, 9, groups=[{"group_id": "g", "topics": None}])).groups[0].topics != []

    run(work)


# All versions


@pytest.mark.parametrize("key_type", [0, 1])
def test_this_broker_coordinates_everything(key_type: int) -> None:
    """Groups and transactions, in every version; other kinds are refused."""

    async def work(bench: Bench) -> None:
        await started(bench)
        for version in range(5):
            given: dict[str, Any] = {"key": "k"} if version < 4 else {"coordinator_keys": ["k", "l"]}
            if version > 0:
                given["key_type"] = key_type
            answer = await bench.ask(10, version, **given)
            for one in [answer] if version < 4 else answer.coordinators:
                assert (one.node_id, one.host, one.port, one.error_code) == (1, "broker", 9092, 0)
        assert (await bench.ask(10, 3, key="k", key_type=9)).error_code == E.INVALID_REQUEST

    run(work)


@pytest.mark.parametrize("api", [8, 9, 10, 11, 12, 13, 14, 15, 16, 42, 47, 68, 69])
def test_every_version_is_answered(api: int) -> None:
    """An empty request of each has an answer that a client can read."""

    async def work(bench: Bench) -> None:
        await started(bench)
        for version in range(codec.APIS[api].first, codec.APIS[api].last + 1):
            assert await bench.ask(api, version) is not None

    run(work)
