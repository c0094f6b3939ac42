"""Grants: which permissions they give on which resources, and that nothing else is allowed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.errors import InputError
from tidelog.service.auth.access import (
    ANONYMOUS,
    SERVER,
    Grant,
    Grants,
    Kind,
    Pattern,
    Permission,
    Principal,
    Resource,
    check_principal_name,
    parse_pattern,
    topic_resource,
)

ALICE = Principal("alice", "plain")
READ, WRITE, ADMIN = Permission.READ, Permission.WRITE, Permission.ADMIN


def granted(*texts: str) -> Grants:
    """`alice read topic:shop/*` and the like."""
    parts = [text.split() for text in texts]
    return Grants(Grant(who, Permission(what), parse_pattern(pattern)) for who, what, pattern in parts)


@pytest.mark.parametrize(
    ("grant", "permission", "resource", "is_allowed"),
    [
        ("alice read topic:shop/orders", READ, "topic:shop/orders", True),
        ("alice read topic:shop/orders", READ, "topic:shop/orders2", False),
        ("alice read topic:shop/orders", WRITE, "topic:shop/orders", False),
        ("alice write topic:shop/orders", READ, "topic:shop/orders", False),
        ("alice admin topic:shop/orders", READ, "topic:shop/orders", True),
        ("alice admin topic:shop/orders", WRITE, "topic:shop/orders", True),
        ("alice read topic:shop/*", READ, "topic:shop/orders", True),
        ("alice read topic:shop/*", READ, "topic:shopping/orders", False),
        ("alice read topic:*", READ, "topic:any/thing", True),
        ("alice read topic:*", READ, "group:thing", False),
        ("alice read *", READ, "group:thing", True),
        ("alice read *", WRITE, "group:thing", False),
        ("alice admin *", ADMIN, "server", True),
        ("alice admin topic:*", ADMIN, "server", False),
        ("alice admin server", ADMIN, "server", True),
        ("alice admin server", READ, "topic:shop/orders", False),
        ("bob admin *", READ, "topic:shop/orders", False),
        ("* read topic:shop/orders", READ, "topic:shop/orders", True),
        ("alice read group:bill*", READ, "group:bill", True),
        ("alice read engine:main", READ, "engine:main", True),
        ("alice read engine:main", READ, "topic:main/main", False),
        ("alice write transaction:tx", WRITE, "transaction:tx", True),
    ],
)
def test_grant_allows_only_what_it_says(grant: str, permission: Permission, resource: str, is_allowed: bool) -> None:
    """Principal, permission, kind and name must all be covered by one grant."""
    kind, _, name = resource.partition(":")
    assert granted(grant).allows(ALICE, permission, Resource(Kind(kind), name)) is is_allowed


def test_any_permission_makes_a_resource_visible() -> None:
    """A producer that may only write sees its topic in listings, and no other."""
    grants = granted("alice write topic:shop/orders")
    assert grants.allows(ALICE, None, topic_resource("shop/orders"))
    assert not grants.allows(ALICE, None, topic_resource("shop/other"))
    assert grants.allows_any(ALICE, WRITE, Kind.TOPIC)
    assert not grants.allows_any(ALICE, READ, Kind.TOPIC)
    assert not grants.allows_any(ALICE, WRITE, Kind.GROUP)


def test_anonymous_is_not_everyone() -> None:
    """A grant to everyone is one to those who are authenticated."""
    grants = granted("* admin *")
    assert grants.allows(ALICE, ADMIN, SERVER)
    assert not grants.allows(ANONYMOUS, READ, topic_resource("shop/orders"))
    assert not grants.allows_any(ANONYMOUS, READ, Kind.TOPIC)


def test_partition_log_is_protected_as_its_topic() -> None:
    """The logs of partitions cannot be named to get around the grants of their topic."""
    assert topic_resource("shop/orders-part-3") == topic_resource("shop/orders")
    assert topic_resource("no topic") == Resource(Kind.TOPIC, "no topic")


@pytest.mark.parametrize(
    "text", ["", "shop/orders", "topic:", "topic:shop", "topic:sh*op", "topic:sh*", "table:x", "Topic:a/b"]
)
def test_pattern_that_names_nothing_is_refused(text: str) -> None:
    """A mistyped resource is an error, not a grant that never matches."""
    with pytest.raises(InputError):
        parse_pattern(text)


@pytest.mark.parametrize("name", ["", " alice", "al\nice", "*", "ANONYMOUS", "User:alice", "a" * 251])
def test_reserved_and_unprintable_names_are_refused(name: str) -> None:
    """A user cannot be called as everybody, nobody, or in a way that a log line hides."""
    with pytest.raises(InputError):
        check_principal_name(name)


names = st.text("ab/*:", min_size=0, max_size=5)


@given(st.lists(st.tuples(st.sampled_from(["alice", "bob", "*"]), st.sampled_from(Permission), names)), names)
def test_more_grants_never_allow_less(parts: list[tuple[str, Permission, str]], asked: str) -> None:
    """Grants only add up, patterns read back as they are written, and asking twice gives one answer."""
    grants = [Grant(who, what, Pattern(Kind.GROUP, f"{name.replace('*', '')}*")) for who, what, name in parts]
    resource = Resource(Kind.GROUP, asked)
    table = Grants(grants)
    for permission in Permission:
        expected = any(Grants([one]).allows(ALICE, permission, resource) for one in grants)
        assert table.allows(ALICE, permission, resource) is expected
        assert table.allows(ALICE, permission, resource) is expected
    for one in grants:
        assert parse_pattern(str(one.resource)) == one.resource


def test_everybody_and_prefix_together_cover_the_longest_name() -> None:
    """Names of clients that fill the memory of decisions change none of them."""
    grants = granted("alice read group:a*")
    for index in range(25_000):
        assert grants.allows(ALICE, READ, Resource(Kind.GROUP, f"b{index}")) is False
    assert grants.allows(ALICE, READ, Resource(Kind.GROUP, "a1"))
    assert len(grants._decided) <= 20_000
