"""Grants and SCRAM users by Kafka's own requests: what is shown, what is accepted, and what has no meaning here."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.service.auth.test_scram import ScramClient
from tests.service.kafka.secured import Secured, grant, handshake, secured, send_token
from tests.service.kafka.test_server import Client

from tidelog.errors import InputError
from tidelog.service.auth.access import Grant, Kind, Permission, parse_pattern
from tidelog.service.auth.scram import keys_of_salted, make_keys
from tidelog.service.kafka.account_requests import Binding, bindings_of, grant_of, is_asked_for
from tidelog.service.kafka.codec import wire
from tidelog.service.kafka.error_codes import ErrorCode

DESCRIBE, CREATE, DELETE = wire(29), wire(30), wire(31)
ANY, MATCH, LITERAL, PREFIXED = 1, 2, 3, 4
TOPIC, GROUP, CLUSTER = 2, 3, 4
ALL, READ, WRITE, CREATE_OPERATION, CLUSTER_DESCRIBE = 2, 3, 4, 5, 8
DENY, ALLOW = 2, 3


def creation(one: Binding) -> Any:
    """A request that creates what is shown."""
    return CREATE.CreateAclsRequestAclCreation(
        one.resource_type, one.name, one.pattern_type, one.principal, "*", one.operation, ALLOW
    )


names = st.from_regex(r"[a-z]{1,4}(\.[a-z]{1,3})?/[a-z]{1,4}(\.[a-z]{1,3})?", fullmatch=True)
patterns = st.one_of(
    st.builds("topic:{}".format, names),
    st.builds("topic:{}*".format, names),
    st.sampled_from(["topic:*", "topic:shop/*", "group:*", "group:billing", "group:b.*", "transaction:x*", "server"]),
)


@given(st.sampled_from(["alice", "*", "CN=a,O=b"]), st.sampled_from(Permission), patterns)
def test_grant_that_is_shown_can_be_created_from_what_is_shown(who: str, what: Permission, pattern: str) -> None:
    """Showing and creating are inverse, for every grant that Kafka has words for."""
    given = Grant(who, what, parse_pattern(pattern))
    if given.resource.kind is Kind.SERVER and what is Permission.WRITE:
        return  # to write the server means nothing in Kafka, nor here
    (shown,) = bindings_of(given)
    assert grant_of(creation(shown)) == given


def test_grant_for_everything_is_shown_as_four_and_engines_are_not() -> None:
    """Kafka has topics, groups, transactional ids and the cluster."""
    shown = bindings_of(grant("ops admin *"))
    assert {(one.resource_type, one.name) for one in shown} == {(2, "*"), (3, "*"), (4, "kafka-cluster"), (5, "*")}
    assert not any(one.is_whole for one in shown)
    assert bindings_of(grant("ops admin engine:main")) == []


GOOD = {"resource_type": TOPIC, "resource_name": "shop.orders", "resource_pattern_type": LITERAL, "host": "*"}
GOOD |= {"principal": "User:alice", "operation": READ, "permission_type": ALLOW}


@pytest.mark.parametrize(
    "wrong",
    [
        {"permission_type": DENY},
        {"host": "10.0.0.1"},
        {"operation": CREATE_OPERATION},
        {"operation": 0},
        {"resource_type": 6},
        {"resource_type": CLUSTER, "resource_name": "other", "operation": ALL},
        {"resource_type": CLUSTER, "resource_name": "kafka-cluster", "operation": READ},
        {"principal": "Group:admins"},
        {"principal": "alice"},
        {"principal": "User:"},
        {"principal": "User:ANONYMOUS"},
        {"resource_pattern_type": MATCH},
        {"resource_name": "shop.*"},
        {"resource_name": "sh", "resource_pattern_type": PREFIXED},
        {"resource_name": ""},
    ],
)
def test_rule_without_the_same_meaning_here_is_refused(wrong: dict[str, Any]) -> None:
    """Rather no grant than one that allows more, or less, than it says."""
    assert grant_of(CREATE.CreateAclsRequestAclCreation(**GOOD)) == grant("alice read topic:shop/orders")
    with pytest.raises(InputError):
        grant_of(CREATE.CreateAclsRequestAclCreation(**{**GOOD, **wrong}))


def asked(**fields: Any) -> Any:
    """A filter that finds everything but for these fields."""
    everything = {"resource_type_filter": ANY, "resource_name_filter": None, "pattern_type_filter": ANY}
    everything |= {"principal_filter": None, "host_filter": None, "operation": ANY, "permission_type": ANY}
    return DESCRIBE.DescribeAclsRequest(**{**everything, **fields})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "abcd"),
        ({"resource_type_filter": TOPIC}, "abc"),
        ({"resource_type_filter": GROUP}, "d"),
        ({"principal_filter": "User:alice"}, "ab"),
        ({"operation": READ}, "ad"),
        ({"permission_type": DENY}, ""),
        ({"host_filter": "10.0.0.1"}, ""),
        ({"pattern_type_filter": PREFIXED}, "b"),
        ({"resource_name_filter": "shop.orders"}, "a"),
        ({"resource_name_filter": "shop.orders", "pattern_type_filter": PREFIXED}, ""),
        ({"resource_name_filter": "shop.orders", "pattern_type_filter": MATCH, "resource_type_filter": TOPIC}, "abc"),
        ({"resource_name_filter": "stock.x", "pattern_type_filter": MATCH, "resource_type_filter": TOPIC}, "c"),
    ],
)
def test_filter_finds_what_it_asks_for(fields: dict[str, Any], expected: str) -> None:
    """By kind, name, pattern, principal, operation and permission; MATCH finds what would count for a name."""
    texts = ["alice read topic:shop/orders", "alice write topic:shop/*", "bob admin topic:*", "* read group:billing"]
    found = [bindings_of(grant(text))[0] for text in texts]
    names = [letter for letter, one in zip("abcd", found, strict=True) if is_asked_for(one, asked(**fields))]
    assert "".join(names) == expected


async def created(client: Client, **fields: Any) -> ErrorCode:
    request = CREATE.CreateAclsRequest([CREATE.CreateAclsRequestAclCreation(**{**GOOD, **fields})])
    (result,) = (await client.call(30, 3, request)).results
    return ErrorCode(result.error_code)


async def topics(client: Client) -> list[str]:
    found = await client.call(3, 9, wire(3).MetadataRequest(topics=None))
    return [one.name for one in found.topics]


def test_rules_count_when_they_are_answered(tmp_path: Path) -> None:
    """Created, shown, deleted: the next request of whoever they are about sees it."""

    async def run() -> None:
        async with secured(tmp_path, "root admin *", users=("alice",)) as server:
            root, alice = await server.logged_in("root"), await server.logged_in("alice")
            await root.call(3, 9, wire(3).MetadataRequest(topics=[wire(3).MetadataRequestTopic(name="shop.orders")]))
            assert await topics(alice) == []
            assert await created(root) is ErrorCode.NONE
            assert await topics(alice) == ["shop.orders"]
            assert await created(root, operation=CREATE_OPERATION) is ErrorCode.INVALID_REQUEST
            described = await root.call(29, 3, asked(principal_filter="User:alice"))
            (resource,) = described.resources
            assert (resource.resource_type, resource.resource_name, len(resource.acls)) == (TOPIC, "shop.orders", 1)
            (deleted,) = (await root.call(31, 3, deletion("User:alice"))).filter_results
            assert [one.error_code for one in deleted.matching_acls] == [0]
            assert await topics(alice) == []
            (kept,) = (await root.call(31, 3, deletion("User:root"))).filter_results
            assert {one.error_code for one in kept.matching_acls} == {ErrorCode.INVALID_REQUEST}
            assert await topics(root) == ["shop.orders"]

    asyncio.run(run())


def deletion(principal: str) -> Any:
    found = asked(principal_filter=principal)
    fields = {name: getattr(found, name) for name in found.__struct_fields__}
    return DELETE.DeleteAclsRequest([DELETE.DeleteAclsRequestFilter(**fields)])


def upsertion(name: str, password: str, **fields: Any) -> Any:
    """As Kafka's clients send it: salted, never the password itself."""
    salt = b"a salt of 16 byt"
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, 4096)
    values = {"name": name, "mechanism": 1, "iterations": 4096, "salt": salt, "salted_password": salted, **fields}
    return wire(51).AlterUserScramCredentialsRequestScramCredentialUpsertion(**values)


async def altered(client: Client, *upsertions: Any, deletions: tuple[tuple[str, int], ...] = ()) -> list[ErrorCode]:
    deleted = [wire(51).AlterUserScramCredentialsRequestScramCredentialDeletion(*one) for one in deletions]
    request = wire(51).AlterUserScramCredentialsRequest(deleted, list(upsertions))
    return [ErrorCode(one.error_code) for one in (await client.call(51, 0, request)).results]


async def logs_in(server: Secured, name: str, password: str) -> bool:
    client, scram = await server.client(), ScramClient("sha256", name, password)
    await handshake(client, "SCRAM-SHA-256")
    first = await send_token(client, scram.first)
    return bool((await send_token(client, scram.final(bytes(first.auth_bytes))[0])).error_code == 0)


def test_scram_users_are_made_and_deleted_by_kafka_tools(tmp_path: Path) -> None:
    """They authenticate with the password that the tool salted, are listed, and are gone when deleted."""

    async def run() -> None:
        async with secured(tmp_path, "root admin *") as server:
            root = await server.logged_in("root")
            assert await altered(root, upsertion("carol", "password of carol")) == [ErrorCode.NONE]
            assert await logs_in(server, "carol", "password of carol")
            request = wire(50).DescribeUserScramCredentialsRequest(users=None)
            listed = (await root.call(50, 0, request)).results
            assert [(one.user, [info.mechanism for info in one.credential_infos]) for one in listed] == [
                ("carol", [1]),
                ("root", [1, 2]),
            ]
            assert await altered(root, deletions=(("carol", 1),)) == [ErrorCode.NONE]
            assert await altered(root, deletions=(("carol", 1),)) == [ErrorCode.RESOURCE_NOT_FOUND]
            assert not await logs_in(server, "carol", "password of carol")
            unknown = wire(50).DescribeUserScramCredentialsRequestUserName("carol")
            (missing,) = (await root.call(50, 0, wire(50).DescribeUserScramCredentialsRequest([unknown]))).results
            assert missing.error_code == ErrorCode.RESOURCE_NOT_FOUND

    asyncio.run(run())


def test_credentials_that_are_not_safe_are_refused(tmp_path: Path) -> None:
    """Too few iterations, a mechanism that does not exist, a reserved name, the same twice: nothing is stored."""

    async def run() -> None:
        async with secured(tmp_path, "root admin *") as server:
            root = await server.logged_in("root")
            bad = ErrorCode.UNACCEPTABLE_CREDENTIAL
            assert await altered(root, upsertion("x", "p", iterations=4095)) == [bad]
            assert await altered(root, upsertion("x", "p", iterations=1_000_000)) == [bad]
            assert await altered(root, upsertion("x", "p", salted_password=b"")) == [bad]
            assert await altered(root, upsertion("*", "p")) == [bad]
            unsupported = [ErrorCode.UNSUPPORTED_SASL_MECHANISM]
            assert await altered(root, upsertion("x", "p", mechanism=3)) == unsupported
            twice = upsertion("x", "p"), upsertion("x", "q")
            assert await altered(root, *twice) == [ErrorCode.DUPLICATE_RESOURCE]
            assert set(server.node.security.known.users) == {"root"}

    asyncio.run(run())


def test_keys_of_a_salted_password_are_those_of_the_password() -> None:
    """A tool and `tidelog auth user add` store the same."""

    salt = b"salt"
    salted = hashlib.pbkdf2_hmac("sha512", b"password", salt, 4096)
    assert keys_of_salted("sha512", salted, salt, 4096) == make_keys("sha512", "password", salt, 4096)
