"""Offsets of groups: committed, fetched, deleted and expired, by members, by others and within transactions."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.service.kafka.group_requests import AUDIT, ORDERS, Bench, run, started

from tidelog.errors import DataError, FencedError, NotFoundError, StoreUnavailableError
from tidelog.service.kafka.error_codes import ErrorCode as E
from tidelog.topics.subscription.group_offsets import GroupOffset, OffsetKey


def test_offsets_are_committed_and_fetched() -> None:
    """Under the names that the client uses; without topics all of them, under the names that Kafka's tools show."""

    async def work(bench: Bench) -> None:
        await started(bench)
        places = {(ORDERS, 1): 5, ("shop.audit", 0): 7}
        assert await bench.commit(places, committed_metadata="m") == {(ORDERS, 1): 0, ("shop.audit", 0): 0}
        found = await bench.fetch(("shop.orders", 1), (AUDIT, 0), (ORDERS, 0), ("none", 0))
        assert found == {
            ("shop.orders", 1): (5, "m", 0),
            (AUDIT, 0): (7, "m", 0),
            (ORDERS, 0): (-1, "", 0),
            ("none", 0): (-1, "", 0),
        }
        assert await bench.fetch() == {("shop.audit", 0): (7, "m", 0), ("shop.orders", 1): (5, "m", 0)}
        assert await bench.fetch(group="other") == {}
        assert await bench.commit({(ORDERS, 1): -1}) == {(ORDERS, 1): 0}
        assert await bench.fetch((ORDERS, 1)) == {(ORDERS, 1): (-1, "", 0)}

    run(work)


def test_old_versions_of_offset_fetch_have_one_group() -> None:
    """Errors are at the partitions in version 1, then at the top."""

    async def work(bench: Bench) -> None:
        bench.topics.make(ORDERS)
        topics = [{"name": ORDERS, "partition_indexes": [0]}]
        for version in range(1, 8):
            answer = await bench.ask(9, version, group_id="g", topics=topics)
            errors = [row.error_code for one in answer.topics for row in one.partitions]
            expected = E.COORDINATOR_LOAD_IN_PROGRESS
            assert (errors, answer.error_code) == (([expected], 0) if version == 1 else ([], expected))
        await bench.coordinator.start()
        await bench.commit({(ORDERS, 0): 3})
        for version in range(1, 8):
            answer = await bench.ask(9, version, group_id="g", topics=topics)
            assert [(row.committed_offset, row.error_code) for row in answer.topics[0].partitions] == [(3, 0)]
            if version >= 2:
                everything = await bench.ask(9, version, group_id="g", topics=None)
                assert [one.name for one in everything.topics] == ["shop.orders"]

    run(work)


def test_a_commit_is_answered_and_seen_when_it_is_durable() -> None:
    """Those that come meanwhile share the next write."""

    async def work(bench: Bench) -> None:
        await started(bench)
        bench.store.may_write.clear()
        first = asyncio.ensure_future(bench.commit({(ORDERS, 0): 1}))
        while not bench.coordinator._offsets._writes._writer:
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)
        others = [asyncio.ensure_future(bench.commit({(ORDERS, 1): n}, group=f"g{n}")) for n in range(20)]
        for _ in range(20):
            await asyncio.sleep(0)
        assert not first.done()
        assert await bench.fetch((ORDERS, 0)) == {(ORDERS, 0): (-1, "", 0)}
        bench.store.may_write.set()
        await asyncio.gather(first, *others)
        assert bench.store.writes == [1, 20]
        assert await bench.fetch((ORDERS, 0)) == {(ORDERS, 0): (1, "", 0)}

    run(work)


def test_a_commit_whose_connection_closes_is_finished() -> None:
    """It may be on the disk already; what is in memory says the same."""

    async def work(bench: Bench) -> None:
        await started(bench)
        bench.store.may_write.clear()
        task = asyncio.ensure_future(bench.commit({(ORDERS, 0): 4}))
        while not bench.coordinator._offsets._writes._writer:
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        bench.store.may_write.set()
        await bench.commit({(ORDERS, 1): 1})
        assert await bench.fetch((ORDERS, 0)) == {(ORDERS, 0): (4, "", 0)}

    run(work)


def test_what_cannot_be_stored_is_refused_partition_by_partition() -> None:
    """Unknown partitions, texts that are too long, a topic that is lost to another node, a store that is silent."""

    async def work(bench: Bench) -> None:
        await started(bench)
        bench.store.failing = {
            OffsetKey("g", ORDERS, 0): FencedError("taken over"),
            OffsetKey("g", AUDIT, 0): NotFoundError("deleted"),
        }
        errors = await bench.commit({(ORDERS, 0): 1, (AUDIT, 0): 1, (ORDERS, 1): 1, (ORDERS, 2): 1, ("none", 0): 1})
        assert list(errors.values()) == [
            E.NOT_COORDINATOR,
            E.UNKNOWN_TOPIC_OR_PARTITION,
            E.NONE,
            E.UNKNOWN_TOPIC_OR_PARTITION,
            E.UNKNOWN_TOPIC_OR_PARTITION,
        ]
        bench.store.failing = {}
        assert await bench.commit({(ORDERS, 0): 1}, committed_metadata="x" * 4097) == {
            (ORDERS, 0): E.OFFSET_METADATA_TOO_LARGE
        }
        assert await bench.commit({(ORDERS, 0): 1}, group="x" * 201) == {(ORDERS, 0): E.INVALID_GROUP_ID}
        bench.store.is_down = True
        assert await bench.commit({(ORDERS, 0): 1}) == {(ORDERS, 0): E.COORDINATOR_NOT_AVAILABLE}
        bench.store.is_down = False
        assert await bench.fetch() == {("shop.orders", 1): (1, "", 0)}

    run(work)


def test_members_commit_and_others_do_not() -> None:
    """Anybody while a group has no members; then its members, with the generation that they are in."""

    async def work(bench: Bench) -> None:
        await started(bench)
        place = {(ORDERS, 0): 1}

        async def error(*args: Any, **more: Any) -> int:
            return next(iter((await bench.commit(place, "g", *args, **more)).values()))

        assert await error("who", 1, version=8) == E.ILLEGAL_GENERATION
        assert await error("who", 1) == E.UNKNOWN_MEMBER_ID
        assert await error() == E.NONE
        member, generation = await bench.stable()
        assert await error(member, generation) == E.NONE
        assert await error(member, generation + 1) == E.ILLEGAL_GENERATION
        assert await error("who", generation) == E.UNKNOWN_MEMBER_ID
        assert await error() == E.UNKNOWN_MEMBER_ID
        bench.join()
        await asyncio.sleep(0)
        assert await error(member, generation) == E.NONE  # what it has read before it joins again
        again = await bench.join(member)
        assert await error(member, again.generation_id) == E.REBALANCE_IN_PROGRESS

    run(work)


def test_offsets_that_are_not_loaded_are_not_missing() -> None:
    """While the store is silent clients wait; loading is tried again by itself."""

    async def work(bench: Bench) -> None:
        bench.topics.make(ORDERS)
        bench.store.stored[OffsetKey("g", ORDERS, 0)] = GroupOffset(9)
        bench.store.stored[OffsetKey("g", "shop/gone", 0)] = GroupOffset(9)
        bench.store.is_down = True
        await bench.coordinator.start()
        answer = await bench.ask(9, 9, groups=[{"group_id": "g", "topics": None}])
        assert answer.groups[0].error_code == E.COORDINATOR_LOAD_IN_PROGRESS
        assert (await bench.join()).error_code == E.COORDINATOR_LOAD_IN_PROGRESS
        assert (await bench.ask(16)).error_code == E.COORDINATOR_LOAD_IN_PROGRESS
        bench.store.is_down = False
        await asyncio.sleep(30)
        assert await bench.fetch() == {("shop.orders", 0): (9, "", 0)}

    run(work)


def test_a_damaged_offset_is_an_error_until_it_is_committed_again() -> None:
    """A consumer that was told that there is none would pass over messages."""

    async def work(bench: Bench) -> None:
        bench.store.stored[OffsetKey("g", ORDERS, 0)] = DataError("damaged")
        await started(bench)
        assert await bench.fetch((ORDERS, 0)) == {(ORDERS, 0): (-1, "", E.UNKNOWN_SERVER_ERROR)}
        await bench.commit({(ORDERS, 0): 1})
        assert await bench.fetch((ORDERS, 0)) == {(ORDERS, 0): (1, "", 0)}

    run(work)


def test_offsets_end_with_their_topic() -> None:
    """Also those whose write was under way: a new topic of the same name has none."""

    async def work(bench: Bench) -> None:
        await started(bench)
        await bench.commit({(ORDERS, 0): 1, (AUDIT, 0): 1})
        bench.store.may_write.clear()
        running = asyncio.ensure_future(bench.commit({(ORDERS, 1): 1}))
        while not bench.coordinator._offsets._writes._writer:
            await asyncio.sleep(0)
        bench.topics.delete(ORDERS)
        bench.topics.make(ORDERS, 2)
        bench.store.may_write.set()
        await running
        assert await bench.fetch() == {("shop.audit", 0): (1, "", 0)}

    run(work)


def test_offsets_of_a_group_without_members_expire() -> None:
    """So long after the last member left; a group with members keeps what it subscribes to."""

    async def work(bench: Bench) -> None:
        await started(bench)
        week = 7 * 24 * 3600
        await bench.beat()
        await bench.commit({(ORDERS, 0): 1, (AUDIT, 0): 1}, member_id="m1", generation=1)
        await bench.commit({(ORDERS, 0): 1}, group="simple")
        bench.clock.advance(week + 1)
        await bench.coordinator.expire()
        assert await bench.fetch() == {("shop.orders", 0): (1, "", 0)}
        assert await bench.fetch(group="simple") == {}
        await bench.beat(epoch=-1)
        bench.clock.advance(week - 1)
        await bench.coordinator.expire()
        assert await bench.fetch() == {("shop.orders", 0): (1, "", 0)}
        bench.clock.advance(2)
        await bench.coordinator.expire()
        assert await bench.fetch() == {}
        assert bench.store.stored == {}
        assert list(bench.coordinator._table.ids()) == []

    run(work)


def test_offsets_are_deleted_unless_the_group_reads_the_topic() -> None:
    """A group of another kind than consumers must not have members."""

    async def work(bench: Bench) -> None:
        await started(bench)

        async def delete(group: str) -> Any:
            topics = [
                {"name": ORDERS, "partitions": [{"partition_index": 0}, {"partition_index": 9}]},
                {"name": AUDIT, "partitions": [{"partition_index": 0}]},
            ]
            answer = await bench.ask(47, group_id=group, topics=topics)
            return answer.error_code, [row.error_code for one in answer.topics for row in one.partitions]

        await bench.beat(group="new")
        await bench.commit({(ORDERS, 0): 1, (AUDIT, 0): 1}, group="new", member_id="m1", generation=1)
        expected = (0, [E.GROUP_SUBSCRIBED_TO_TOPIC, E.UNKNOWN_TOPIC_OR_PARTITION, 0])
        assert await delete("new") == expected
        assert await bench.fetch(group="new") == {("shop.orders", 0): (1, "", 0)}
        subscription = b"\0\0\0\0\0\1\0\x0bshop.orders\xff\xff\xff\xff"
        await bench.stable("classic", protocols=[{"name": "range", "metadata": subscription}])
        assert await delete("classic") == expected
        await bench.stable("odd", protocol_type="connect")
        assert await delete("odd") == (E.NON_EMPTY_GROUP, [])
        assert await delete("none") == (E.GROUP_ID_NOT_FOUND, [])

    run(work)


def test_offsets_of_the_new_protocol_are_for_its_members() -> None:
    """With the epoch that they have; older versions of the requests are refused."""

    async def work(bench: Bench) -> None:
        await started(bench)
        await bench.beat()
        place = {(ORDERS, 0): 1}
        for member, epoch, version, expected in (
            ("m1", 1, 9, E.NONE),
            ("m1", 5, 9, E.STALE_MEMBER_EPOCH),
            ("m2", 1, 9, E.UNKNOWN_MEMBER_ID),
            ("m1", 1, 8, E.UNSUPPORTED_VERSION),
        ):
            found = await bench.commit(place, "g", member, epoch, version)
            assert found == {(ORDERS, 0): expected}
        for member, epoch, expected in (
            ("m1", 1, E.NONE),
            ("m1", 4, E.STALE_MEMBER_EPOCH),
            ("x", 1, E.UNKNOWN_MEMBER_ID),
        ):
            groups = [{"group_id": "g", "member_id": member, "member_epoch": epoch, "topics": None}]
            assert (await bench.ask(9, 9, groups=groups)).groups[0].error_code == expected

    run(work)


# Transactions


def test_offsets_of_a_transaction_are_pending_until_it_ends() -> None:
    """Who wants stable offsets waits; others see what was committed before."""

    async def work(bench: Bench) -> None:
        await started(bench)
        await bench.commit({(ORDERS, 0): 1})
        for commit, expected in ((False, 1), (True, 5)):
            bench.coordinator.begin_pending("g", 7, [(ORDERS, 0)])
            assert await bench.fetch((ORDERS, 0)) == {(ORDERS, 0): (1, "", 0)}
            assert await bench.fetch((ORDERS, 0), (ORDERS, 1), stable=True) == {
                (ORDERS, 0): (-1, "", E.UNSTABLE_OFFSET_COMMIT),
                (ORDERS, 1): (-1, "", 0),
            }
            assert await bench.coordinator.complete("g", 7, commit, {(ORDERS, 0): GroupOffset(5)}) == {}
            assert await bench.fetch((ORDERS, 0), stable=True) == {(ORDERS, 0): (expected, "", 0)}

    run(work)


def test_a_transaction_whose_offsets_cannot_be_stored_stays_pending() -> None:
    """It is completed again later; a topic that is gone holds up nothing."""

    async def work(bench: Bench) -> None:
        await started(bench)
        bench.coordinator.begin_pending("g", 7, [(ORDERS, 0), (AUDIT, 0)])
        offsets = {(ORDERS, 0): GroupOffset(5), (AUDIT, 0): GroupOffset(6)}
        bench.store.failing = {
            OffsetKey("g", ORDERS, 0): StoreUnavailableError("no answer"),
            OffsetKey("g", AUDIT, 0): NotFoundError("deleted"),
        }
        assert list(await bench.coordinator.complete("g", 7, True, offsets)) == [(ORDERS, 0)]
        assert (await bench.fetch((ORDERS, 0), stable=True))[(ORDERS, 0)][2] == E.UNSTABLE_OFFSET_COMMIT
        bench.store.failing = {OffsetKey("g", AUDIT, 0): NotFoundError("deleted")}
        assert await bench.coordinator.complete("g", 7, True, offsets) == {}
        assert await bench.fetch((ORDERS, 0), stable=True) == {(ORDERS, 0): (5, "", 0)}

    run(work)


def test_who_may_commit_within_a_transaction() -> None:
    """A producer need not say which member consumes; what it says is checked."""

    async def work(bench: Bench) -> None:
        await started(bench)
        check = bench.coordinator.check_commit
        assert check("g", "who", 3) == E.ILLEGAL_GENERATION
        assert check("") == E.INVALID_GROUP_ID
        member, generation = await bench.stable()
        assert check("g") == E.NONE
        assert check("g", member, generation) == E.NONE
        assert check("g", member, generation + 1) == E.ILLEGAL_GENERATION
        assert check("g", "who", generation) == E.UNKNOWN_MEMBER_ID
        await bench.beat(group="new")
        assert check("new", "m1", 1) == E.NONE
        assert check("new", "m1", 2) == E.STALE_MEMBER_EPOCH

    run(work)
