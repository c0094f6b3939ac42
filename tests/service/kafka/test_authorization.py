"""Every API without the right grant answers nothing but a refusal, and what is refused is not done."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from tests.campaign import examples, first_seed
from tests.service.kafka.random_messages import APIS as FACTS
from tests.service.kafka.random_messages import make
from tests.service.kafka.secured import Names, Secured, error_codes, has_items, request_of, secured
from tests.service.kafka.test_server import Client, fetch_request, produce_request

from tidelog.service.kafka.authorization import RULES
from tidelog.service.kafka.codec import AMONG_NODES, APIS, is_supported, wire
from tidelog.service.kafka.error_codes import ErrorCode

REFUSALS = {
    ErrorCode.TOPIC_AUTHORIZATION_FAILED,
    ErrorCode.GROUP_AUTHORIZATION_FAILED,
    ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
    ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}
LISTINGS = (3, 16, 66, 75)
"""What lists all there is when nothing is named: of what may not be seen, nothing."""
PLAIN_TOO = (0, 22)
"""What is also sent without a transaction."""
PLANTED = (b"PLANTED", b"hidden", b"1234567")
GUARDED = [key for key in APIS if RULES[key].decide is not None]
VERSIONS = {key: [version for version in range(20) if is_supported(key, version)] for key in GUARDED}


async def plant(server: Secured, root: Client) -> Names:
    """Things that nobody but the administrator may learn of: messages, offsets, configs, quotas, topics, groups."""
    for topic in ("hidden.ledger", "secret.ledger"):
        answer = await root.call(0, 9, produce_request(b"PLANTED-VALUE", topic=topic))
        assert set(error_codes(answer)) == {0}
    commit = wire(8)
    for group in ("hidden-group", "secret-group"):
        part = commit.OffsetCommitRequestPartition(0, 1, -1, "PLANTED-METADATA")
        topic_asked = commit.OffsetCommitRequestTopic(name="secret.ledger", partitions=[part])
        answer = await root.call(8, 8, commit.OffsetCommitRequest(group_id=group, topics=[topic_asked]))
        assert set(error_codes(answer)) == {0}
    alter = wire(44)
    config = alter.IncrementalAlterConfigsRequestAlterableConfig("retention.ms", 0, "1234567000")
    resource = alter.IncrementalAlterConfigsRequestAlterConfigsResource(2, "secret.ledger", [config])
    assert set(error_codes(await root.call(44, 1, alter.IncrementalAlterConfigsRequest([resource])))) == {0}
    quota = wire(49)
    entity = quota.AlterClientQuotasRequestEntityData("client-id", "PLANTED-CLIENT")
    rate = quota.AlterClientQuotasRequestOpData("producer_byte_rate", 12345678.0, False)
    entry = quota.AlterClientQuotasRequestEntryData([entity], [rate])
    assert set(error_codes(await root.call(49, 1, quota.AlterClientQuotasRequest([entry])))) == {0}
    metadata = await root.call(3, 12, wire(3).MetadataRequest(topics=None))
    topic_id = next(one.topic_id for one in metadata.topics if one.name == "secret.ledger")
    return Names("secret.ledger", bytes(topic_id), "secret-group", "secret-transaction")


async def state(root: Client, names: Names) -> list[Any]:
    """What a change would show in."""
    asked = [
        (3, 12, wire(3).MetadataRequest(topics=None)),
        (2, 7, request_of(2, names)),
        (9, 7, request_of(9, names)),
        (16, 4, wire(16).ListGroupsRequest()),
        (32, 4, request_of(32, names)),
        (48, 1, wire(48).DescribeClientQuotasRequest()),
        (1, 12, fetch_request(0, topic=names.topic)),
    ]
    return [await root.call(*one) for one in asked]


def listing_of(api_key: int) -> Any:
    """The request that asks for all."""
    if api_key == 3:
        return wire(3).MetadataRequest(topics=None)
    if api_key == 66:
        return wire(66).ListTransactionsRequest()
    return wire(16).ListGroupsRequest() if api_key == 16 else wire(75).DescribeTopicPartitionsRequest()


def check_refused(api_key: int, version: int, response: Any) -> None:
    """An answer with refusals and nothing else."""
    name = f"{APIS[api_key].name} v{version}: {response}"
    codes = {code for code in error_codes(response) if code}
    assert codes <= REFUSALS, name
    assert codes or (api_key in LISTINGS and not has_items(response)), name
    shown = str(response).encode()
    assert not [one for one in PLANTED if one in shown], name


def test_every_served_api_has_a_rule(tmp_path: Path) -> None:
    """The table of rules has the APIs that are served, no fewer and no more."""

    async def run() -> None:
        async with secured(tmp_path) as server:
            assert server.node._kafka.served == sorted(RULES.keys() - set(AMONG_NODES))

    asyncio.run(run())


def test_every_api_without_a_grant_is_nothing_but_refused(tmp_path: Path) -> None:
    """Each version of each API, with everything that it can name, by somebody who is known and has no grant; then the
    same by the administrator, who is not refused."""

    async def run() -> None:
        async with secured(tmp_path, "root admin *", users=("mallory",)) as server:
            root, mallory = await server.logged_in("root"), await server.logged_in("mallory")
            names = await plant(server, root)
            before = await state(root, names)
            for key in GUARDED:
                for version in VERSIONS[key]:
                    check_refused(key, version, await mallory.call(key, version, request_of(key, names)))
                    if key in PLAIN_TOO:
                        plain = request_of(key, names._replace(transaction=None))
                        check_refused(key, version, await mallory.call(key, version, plain))
                    if key in LISTINGS and version:
                        check_refused(key, version, await mallory.call(key, version, listing_of(key)))
            assert await state(root, names) == before
            for key in set(GUARDED) - set(AMONG_NODES):  # those are no administrator's either
                response = await root.call(key, VERSIONS[key][-1], request_of(key, names))
                assert not REFUSALS & set(error_codes(response)), f"{APIS[key].name}: {response}"

    asyncio.run(run())


def test_other_topics_grant_nothing_here(tmp_path: Path) -> None:
    """All permissions on other topics and groups, whose names begin alike, are none on these."""

    async def run() -> None:
        others = ("topic:secret/ledger2", "topic:secret/ledge", "group:secret-group2", "group:secret-grou", "engine:*")
        grants = [f"mallory admin {other}" for other in others]
        async with secured(tmp_path, *grants, "root admin *") as server:
            root, mallory = await server.logged_in("root"), await server.logged_in("mallory")
            names = await plant(server, root)
            for key in GUARDED:
                if key != 22:  # an idempotent producer needs some topic that it may write to, and has one
                    check_refused(
                        key, VERSIONS[key][-1], await mallory.call(key, VERSIONS[key][-1], request_of(key, names))
                    )
            request = request_of(22, names)
            request.transactional_id = None
            assert set(error_codes(await mallory.call(22, 4, request))) == {0}

    asyncio.run(run())


def with_two_topics(api_key: int, request: Any, other: str) -> Any:
    """The same request, which names another topic too."""
    field = "topic_data" if api_key == 0 else "topics"
    (item,) = getattr(request, field)
    renamed = type(item)(**{name: getattr(item, name) for name in item.__struct_fields__})
    setattr(renamed, "topic" if api_key == 1 else "name", other)
    setattr(request, field, [item, renamed])
    return request


@pytest.mark.parametrize(("api_key", "version"), [(0, 9), (1, 11), (2, 7), (3, 9), (8, 8), (21, 2)])
def test_request_for_two_topics_gets_what_it_may(tmp_path: Path, api_key: int, version: int) -> None:
    """One topic of a request is refused, and the other is served."""

    async def run() -> None:
        grants = ("root admin *", "alice admin topic:secret/ledger", "alice read group:secret-group")
        async with secured(tmp_path, *grants) as server:
            root, alice = await server.logged_in("root"), await server.logged_in("alice")
            names = await plant(server, root)
            request = with_two_topics(api_key, request_of(api_key, names._replace(transaction=None)), "hidden.ledger")
            response = await alice.call(api_key, version, request)
            answers = response.responses if api_key in (0, 1) else response.topics
            codes = {getattr(one, "topic" if api_key == 1 else "name"): set(error_codes(one)) for one in answers}
            assert codes["secret.ledger"] == {0}
            assert codes["hidden.ledger"] >= {ErrorCode.TOPIC_AUTHORIZATION_FAILED}

    asyncio.run(run())


def test_listings_have_what_may_be_seen(tmp_path: Path) -> None:
    """Any permission shows a topic or a group in listings, and in no page is another one named."""

    async def run() -> None:
        grants = ("root admin *", "alice write topic:secret/*", "alice read group:secret-*")
        async with secured(tmp_path, *grants) as server:
            root, alice = await server.logged_in("root"), await server.logged_in("alice")
            await plant(server, root)
            for version in VERSIONS[3][1:]:
                found = await alice.call(3, version, wire(3).MetadataRequest(topics=None))
                assert [one.name for one in found.topics] == ["secret.ledger"]
            found = await alice.call(75, 0, wire(75).DescribeTopicPartitionsRequest())
            assert [one.name for one in found.topics] == ["secret.ledger"]
            found = await alice.call(16, 4, wire(16).ListGroupsRequest())
            assert [one.group_id for one in found.groups] == ["secret-group"]

    asyncio.run(run())


def test_only_administrators_create_a_topic_by_using_it(tmp_path: Path) -> None:
    """Metadata and Produce create topics for those who may; for others they are unknown."""

    async def run() -> None:
        async with secured(tmp_path, "alice write topic:shop/*", "bob admin topic:shop/*") as server:
            alice, bob = await server.logged_in("alice"), await server.logged_in("bob")
            unknown = {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
            asked = wire(3).MetadataRequest(topics=[wire(3).MetadataRequestTopic(name="shop.new")])
            assert set(error_codes(await alice.call(3, 9, asked))) - {0} == unknown
            assert set(error_codes(await alice.call(0, 9, produce_request(b"x", topic="shop.new")))) - {0} == unknown
            assert server.directory.topics() == []
            assert set(error_codes(await bob.call(0, 9, produce_request(b"x", topic="shop.new")))) == {0}
            assert set(error_codes(await alice.call(0, 9, produce_request(b"y", topic="shop.new")))) == {0}
            assert server.directory.topic("shop/new").next_offset == 2

    asyncio.run(run())


def test_refused_produce_without_acks_is_not_answered(tmp_path: Path) -> None:
    """A client that wants no answer gets none, also for what is refused, and nothing is appended."""

    async def run() -> None:
        async with secured(tmp_path, "root admin *", users=("mallory",)) as server:
            root, mallory = await server.logged_in("root"), await server.logged_in("mallory")
            await root.call(0, 9, produce_request(b"x"))
            await mallory.send(mallory.request(0, 9, produce_request(b"y", acks=0)))
            assert set(error_codes(await mallory.call(16, 4, wire(16).ListGroupsRequest()))) == {0}
            assert server.directory.topic("shop/orders").next_offset == 1

    asyncio.run(run())


def test_share_session_of_another_member_gives_no_records(tmp_path: Path) -> None:
    """A member id is no secret: who takes over the session of another gets nothing of topics that it may not read."""

    async def run() -> None:
        async with secured(tmp_path, "root admin *", "mallory read group:g") as server:
            root, mallory = await server.logged_in("root"), await server.logged_in("mallory")
            names = await plant(server, root)
            share = wire(78)
            part = share.ShareFetchRequestFetchPartition(0, 1 << 20)
            topic = share.ShareFetchRequestFetchTopic(names.topic_id, [part])
            opened = share.ShareFetchRequest(
                group_id="g", member_id="m", max_bytes=1 << 20, max_records=10, topics=[topic]
            )
            assert set(error_codes(await root.call(78, 1, opened))) == {0}
            await root.call(0, 9, produce_request(b"PLANTED-LATER", topic="secret.ledger"))
            stolen = share.ShareFetchRequest(
                group_id="g", member_id="m", share_session_epoch=1, max_wait_ms=20_000, min_bytes=1, max_bytes=1 << 20,
                max_records=10,
            )  # fmt: skip
            response = await mallory.call(78, 1, stolen)
            assert set(error_codes(response)) - {0} == {ErrorCode.TOPIC_AUTHORIZATION_FAILED}
            assert b"PLANTED" not in str(response).encode()

    asyncio.run(run())


@pytest.mark.deeper
def test_random_requests_never_fail_inside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever a known client without grants sends, in every API and version, is answered with refusals, or closes its
    connection as no request of the protocol; no rule stumbles over it."""

    async def run() -> None:
        chance = random.Random(first_seed())
        async with secured(tmp_path, users=("mallory",)) as server:
            client = await server.logged_in("mallory")
            for api in FACTS:
                for message in api.messages:
                    if message.kind != "request" or api.key not in GUARDED:
                        continue
                    for version in VERSIONS[api.key]:
                        for _ in range(examples(2)):
                            request = make(api, message, version, chance)
                            if api.key == 0:
                                request.acks = -1
                            response = await client.call(api.key, version, request)
                            codes = {code for code in error_codes(response) if code}
                            assert codes <= {*REFUSALS, ErrorCode.UNKNOWN_TOPIC_ID, *HARMLESS}, (api, response)

    asyncio.run(run())
    assert "internal error" not in caplog.text


HARMLESS = {ErrorCode.INVALID_REQUEST, ErrorCode.FETCH_SESSION_ID_NOT_FOUND, ErrorCode.INVALID_TOPIC_EXCEPTION}
"""What is wrong with a random request whoever sends it."""
