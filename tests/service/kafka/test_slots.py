"""Coordinators by slots: who coordinates a group is found at every node, and the next one goes on where it stopped."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.service.installation import Installation, installed, run
from tests.service.test_placement import created

from tidelog.errors import FencedError, StoreUnavailableError
from tidelog.service.kafka.codec import wire
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.peers import Peers
from tidelog.service.kafka.slots import Slots
from tidelog.service.kafka.transactions.remote import RemoteCoordinators
from tidelog.service.placement import SLOTS, slot_of
from tidelog.testing import FaultyMetadata
from tidelog.topics.subscription.group_offsets import GroupOffset

OFFSET_COMMIT, OFFSET_FETCH, FIND_COORDINATOR, JOIN, HEARTBEAT, SYNC = 8, 9, 10, 11, 12, 14
GROUP = "billing"


async def found(nodes: Installation, number: int, key: str, kind: int = 0) -> Any:
    request = wire(FIND_COORDINATOR).FindCoordinatorRequest(key_type=kind, coordinator_keys=[key])
    (answer,) = (await nodes.call(number, FIND_COORDINATOR, 4, request)).coordinators
    return answer


async def commit(nodes: Installation, number: int, offset: int, partition: int = 0, **more: Any) -> int:
    module = wire(OFFSET_COMMIT)
    part = module.OffsetCommitRequestPartition(partition, offset, -1, "note")
    topic = module.OffsetCommitRequestTopic(name="shop.orders", partitions=[part])
    request = module.OffsetCommitRequest(group_id=GROUP, topics=[topic], **more)
    (answer,) = (await nodes.call(number, OFFSET_COMMIT, 8, request)).topics
    return int(answer.partitions[0].error_code)


async def committed(nodes: Installation, number: int, partition: int = 0) -> tuple[int, int]:
    module = wire(OFFSET_FETCH)
    topic = module.OffsetFetchRequestTopics(name="shop.orders", partition_indexes=[partition])
    request = module.OffsetFetchRequest(groups=[module.OffsetFetchRequestGroup(group_id=GROUP, topics=[topic])])
    (answer,) = (await nodes.call(number, OFFSET_FETCH, 8, request)).groups
    if answer.error_code:
        return answer.error_code, -1
    return 0, answer.topics[0].partitions[0].committed_offset


def test_coordinators_are_found_at_every_node(tmp_path: Path) -> None:
    """Groups and transactional ids alike; while nobody has the slot, clients are told to ask again."""

    async def work() -> None:
        async with installed(tmp_path) as nodes:
            assert (await found(nodes, 1, GROUP)).error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE
            await nodes.move_slot(GROUP, 2)
            for number in nodes.nodes:
                for kind in (0, 1):
                    answer = await found(nodes, number, GROUP, kind)
                    address = nodes.addresses[2]
                    assert (answer.error_code, answer.node_id) == (ErrorCode.NONE, 2)
                    assert (answer.host, answer.port) == address.kafka

    run(work())


def test_offsets_are_committed_at_the_coordinator_whoever_owns_the_partition(tmp_path: Path) -> None:
    """The other node answers NOT_COORDINATOR, and the next coordinator has every offset."""

    async def work() -> None:
        async with installed(tmp_path) as nodes:
            await created(nodes, 3)
            await nodes.move_slot(GROUP, 2)
            for partition in range(3):
                assert await commit(nodes, 2, 10 + partition, partition) == ErrorCode.NONE
            assert await commit(nodes, 1, 99) == ErrorCode.NOT_COORDINATOR
            assert await committed(nodes, 1) == (ErrorCode.NOT_COORDINATOR, -1)
            await nodes.move_slot(GROUP, 1)
            assert await commit(nodes, 2, 99) == ErrorCode.NOT_COORDINATOR
            assert [await committed(nodes, 1, partition) for partition in range(3)] == [(0, 10), (0, 11), (0, 12)]

    run(work())


def test_late_end_of_a_transaction_does_not_move_offsets_back(tmp_path: Path) -> None:
    """Loses otherwise: its group goes back behind what a later transaction has committed, and reads it again."""

    async def work() -> None:
        async with installed(tmp_path) as nodes:
            await created(nodes, 3)
            await nodes.move_slot(GROUP, 1)
            peers = Peers(nodes.nodes[2].security)
            remote = RemoteCoordinators(nodes.nodes[2]._broker, peers)
            for number, offset in ((1, 10), (2, 20), (1, 10), (2, 15), (3, 30)):
                await remote.complete(GROUP, 7, number, True, {("shop/orders", 2): GroupOffset(offset, -1, "")})
                seen.append((await committed(nodes, 1, 2))[1])
            await peers.close()

    seen: list[int] = []
    run(work())
    assert seen == [10, 20, 20, 20, 30]


def test_offsets_of_a_deleted_topic_are_gone_at_the_next_coordinator(tmp_path: Path) -> None:
    """A topic of the same name begins without any."""

    async def work() -> None:
        async with installed(tmp_path) as nodes:
            await created(nodes, 1)
            await nodes.move_slot(GROUP, 2)
            assert await commit(nodes, 2, 10) == ErrorCode.NONE
            request = wire(20).DeleteTopicsRequest(topic_names=["shop.orders"])
            assert (await nodes.call(1, 20, 4, request)).responses[0].error_code == ErrorCode.NONE
            await created(nodes, 1)
            assert await committed(nodes, 2) == (0, -1)
            await nodes.move_slot(GROUP, 1)
            assert await committed(nodes, 1) == (0, -1)

    run(work())


async def joined(nodes: Installation, number: int, member_id: str = "") -> Any:
    module = wire(JOIN)
    request = module.JoinGroupRequest(
        group_id=GROUP,
        session_timeout_ms=60_000,
        rebalance_timeout_ms=60_000,
        member_id=member_id,
        protocol_type="consumer",
        protocols=[module.JoinGroupRequestProtocol("range", b"")],
    )
    return await nodes.call(number, JOIN, 3, request)


def test_members_of_a_group_outlive_their_coordinator(tmp_path: Path) -> None:
    """The next one knows member and generation, so that nobody has to join again, also when the node was not asked to
    hand anything over."""

    async def work() -> None:
        async with installed(tmp_path) as nodes:
            await created(nodes, 1)
            await nodes.move_slot(GROUP, 2)
            member = await joined(nodes, 2)
            assert member.error_code == ErrorCode.NONE, member
            module = wire(SYNC)
            assignment = module.SyncGroupRequestAssignment(member.member_id, b"mine")
            who = {"group_id": GROUP, "generation_id": member.generation_id, "member_id": member.member_id}
            synced = await nodes.call(2, SYNC, 3, module.SyncGroupRequest(assignments=[assignment], **who))
            assert (synced.error_code, bytes(synced.assignment)) == (ErrorCode.NONE, b"mine")
            await nodes.nodes[1].acquire_slot(slot_of(GROUP))
            nodes.slots[slot_of(GROUP)] = 1
            beat = wire(HEARTBEAT).HeartbeatRequest(**who)
            assert (await nodes.call(1, HEARTBEAT, 3, beat)).error_code == ErrorCode.NONE
            again = await nodes.call(1, SYNC, 3, module.SyncGroupRequest(assignments=[], **who))
            assert bytes(again.assignment) == b"mine"
            of_member = {"generation_id_or_member_epoch": member.generation_id, "member_id": member.member_id}
            assert await commit(nodes, 2, 5, **of_member) == ErrorCode.NOT_COORDINATOR
            assert await commit(nodes, 1, 6, **of_member) == ErrorCode.NONE
            assert await committed(nodes, 2) == (ErrorCode.NOT_COORDINATOR, -1)

    run(work())


def test_a_claim_is_lost_to_the_next_one(tmp_path: Path) -> None:
    """What a node writes that slept through it is refused, and it knows from then on."""

    async def work() -> None:
        async with installed(tmp_path) as nodes:
            first, second = nodes.nodes[1]._slots, nodes.nodes[2]._slots
            assert first is not None
            assert second is not None
            await asyncio.gather(*(first.acquire(slot) for slot in range(SLOTS)))
            assert first.refusal(GROUP) is None
            await second.acquire(slot_of(GROUP))
            assert first.refusal(GROUP) is None  # nobody has told it
            failed = await asyncio.to_thread(
                nodes.nodes[1]._shared_records.store,  # type: ignore[union-attr]
                {GROUP: None, "other": None},
            )
            assert isinstance(failed[GROUP], FencedError)
            assert list(failed) == [GROUP]
            assert first.refusal(GROUP) is ErrorCode.NOT_COORDINATOR
            assert second.refusal(GROUP) is None

    run(work())


@pytest.mark.parametrize("fails", ["claim", "load"])
def test_slot_that_could_not_be_acquired_is_not_ours(fails: str) -> None:
    """Loses otherwise: its groups and transactions are looked for here, and their markers wait for ever."""
    metadata = FaultyMetadata()
    problems = [StoreUnavailableError("the records cannot be read")] if fails == "load" else []
    if fails == "claim":
        metadata.fail("*", "unavailable")

    async def load(slots: frozenset[int]) -> None:
        if problems:
            raise problems.pop()

    async def work() -> None:
        slots = Slots(lambda: (metadata, "tidelog"), "node1", load)
        with pytest.raises(StoreUnavailableError):
            await slots.acquire(slot_of(GROUP))
        assert slots.refusal(GROUP) is ErrorCode.NOT_COORDINATOR
        assert not slots.has(GROUP)
        assert not slots.is_claimed(GROUP)
        await slots.acquire(slot_of(GROUP))
        assert slots.refusal(GROUP) is None

    run(work())
