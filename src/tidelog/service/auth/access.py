"""Who may do what: principals, permissions on resources, and the grants that connect them.

    alice   write   topic:shop/orders       one topic
    alice   read    group:billing*          every group whose name begins so
    ops     admin   *                       everything

Both sides of the server ask one `Authorizer`; Kafka's APIs and the routes of HTTP only say which permission on which
resource they need.

Invariants
- What no grant allows is refused. There are no denials, so the order of grants means nothing.
- `admin` includes `read` and `write`; `write` does not include `read`. Any of them lets a principal see that the
  resource exists.
- A pattern is a name, or the beginning of one before a final `*`. Topics are known as `namespace/name`, whatever a
  client calls them, and the log of a partition is its topic.
- A grant to `*` is a grant to everyone who is authenticated, never to the anonymous.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple, Protocol

import msgspec

from tidelog.errors import AccessDeniedError, InputError
from tidelog.topics.names import TopicName, parse_topic_name

ANYONE = "*"
LONGEST_NAME = 250
_KEPT_DECISIONS = 20_000


class NotAuthenticatedError(AccessDeniedError):
    """Nobody proved who they are, or the proof is wrong. It never says which part of it."""


class NotAuthorizedError(AccessDeniedError):
    """The principal is known, and no grant allows this."""


class Permission(StrEnum):
    """What a grant allows."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"


class Kind(StrEnum):
    """What there is to protect. `server` has no names: it is the configuration, the users and the grants."""

    TOPIC = "topic"
    ENGINE = "engine"
    GROUP = "group"
    TRANSACTION = "transaction"
    SERVER = "server"


class Resource(NamedTuple):
    """One thing that is protected."""

    kind: Kind
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}" if self.name else str(self.kind)


SERVER = Resource(Kind.SERVER)


def topic_resource(name: str | TopicName) -> Resource:
    """The topic of this name, `namespace/name`; that of a partition's log is its topic.

    What no topic can be called is a resource all the same: only a grant for all topics covers it.
    """
    try:
        parsed = parse_topic_name(name) if isinstance(name, str) else name
    except InputError:
        return Resource(Kind.TOPIC, str(name))
    parent = parsed.parent()
    return Resource(Kind.TOPIC, str(parsed if parent is None else parent[0]))


class Principal(NamedTuple):
    """Who a connection or a request belongs to, and how that was proven."""

    name: str
    method: str
    credential: str = ""
    """Which credential it was, as `Accounts` knows it: when that is changed or revoked, the session ends."""
    expires_at: float | None = None
    """Seconds since 1970 after which the proof is worth nothing: that of a token."""

    @property
    def is_anonymous(self) -> bool:
        return self.method == _NONE

    def __str__(self) -> str:
        return f"User:{self.name}"


_NONE, _SOCKET, _NODE = "none", "socket", "node"
TRUSTED = (_SOCKET, _NODE)
"""The methods of those who may do everything."""
ANONYMOUS = Principal("ANONYMOUS", _NONE)
LOCAL = Principal("LOCAL", _SOCKET)
"""A process that can open the socket in the log directory could read the files beside it: it may do everything."""

NODE = Principal("NODE", _NODE)
"""Another node of the installation, which has proven that with the secret of all nodes: may do everything."""


def check_principal_name(name: str) -> str:
    """InputError for what nobody can be called."""
    is_fine = 1 <= len(name) <= LONGEST_NAME and name.isprintable() and name == name.strip()
    if not is_fine:
        raise InputError(f"a user name must have 1 to {LONGEST_NAME} printable characters, not {name!r:.60}")
    if name in (ANYONE, ANONYMOUS.name, LOCAL.name, NODE.name) or name.startswith("User:"):
        raise InputError(f"the user name {name!r} is reserved", hint="Write the name alone, without User:")
    return name


class Pattern(msgspec.Struct, frozen=True, order=True, omit_defaults=True):
    """The resources that a grant is about; without a kind it is all of them."""

    kind: Kind | None = None
    name: str = ANYONE

    def matches(self, resource: Resource) -> bool:
        if self.kind is None:
            return True
        if self.kind is not resource.kind:
            return False
        return resource.name.startswith(self.name[:-1]) if self.name.endswith("*") else resource.name == self.name

    def __str__(self) -> str:
        if self.kind is None:
            return ANYONE
        return str(self.kind) if self.kind is Kind.SERVER else f"{self.kind}:{self.name}"


def parse_pattern(text: str) -> Pattern:
    """`topic:shop/*`, `group:billing`, `engine:*`, `server`, or `*` for everything."""
    if text == ANYONE:
        return Pattern()
    if text == Kind.SERVER:
        return Pattern(Kind.SERVER)
    kind, colon, name = text.partition(":")
    kinds = [known for known in Kind if known is not Kind.SERVER]
    if not colon or kind not in kinds:
        raise InputError(
            f"{text!r:.80} names no resource",
            hint=f"Write KIND:NAME with one of {', '.join(kinds)}, for example topic:shop/*; or server; or * for all",
        )
    return _checked(Pattern(Kind(kind), name))


def _checked(pattern: Pattern) -> Pattern:
    name = pattern.name
    if not name or len(name) > LONGEST_NAME or not name.isprintable() or "*" in name[:-1]:
        raise InputError(f"the pattern {name!r:.80} must be a name, or the beginning of one with a * at its end")
    if pattern.kind is Kind.TOPIC and not name.endswith("*"):
        return Pattern(Kind.TOPIC, str(parse_topic_name(name)))
    if pattern.kind is Kind.TOPIC and name != ANYONE and "/" not in name:
        raise InputError(f"topic:{name} needs a namespace", hint=f"Write topic:{name[:-1]}/* for all of a namespace")
    return pattern


class Grant(msgspec.Struct, frozen=True, order=True):
    """One permission of one principal; `*` is everyone who is authenticated."""

    principal: str
    permission: Permission
    resource: Pattern

    def allows(self, permission: Permission | None, resource: Resource) -> bool:
        """Whether it allows this; None asks for any permission at all."""
        is_enough = permission is None or self.permission in (permission, Permission.ADMIN)
        return is_enough and self.resource.matches(resource)


class Authorizer(Protocol):
    """Decides. It answers from memory: a listener asks it for every request."""

    def allows(self, principal: Principal, permission: Permission | None, resource: Resource) -> bool:
        """Whether the principal has this permission on the resource; None: any permission, so that it may be seen."""

    def allows_any(self, principal: Principal, permission: Permission, kind: Kind) -> bool:
        """Whether there could be a resource of this kind that the principal has this permission on."""


class Open:
    """Everybody may do everything: authentication is off."""

    def allows(self, principal: Principal, permission: Permission | None, resource: Resource) -> bool:
        return True

    def allows_any(self, principal: Principal, permission: Permission, kind: Kind) -> bool:
        return True


class Grants:
    """An authorizer of a set of grants, which does not change."""

    def __init__(self, grants: Iterable[Grant] = ()) -> None:
        self._of: dict[str, list[Grant]] = {}
        for grant in grants:
            self._of.setdefault(grant.principal, []).append(grant)
        self._decided: dict[tuple[str, Permission | None, Resource], bool] = {}

    def of(self, principal: Principal) -> list[Grant]:
        """The grants that count for a principal."""
        if principal.is_anonymous:
            return []
        return [*self._of.get(principal.name, ()), *self._of.get(ANYONE, ())]

    def allows(self, principal: Principal, permission: Permission | None, resource: Resource) -> bool:
        if principal.method == _NONE or principal.method in TRUSTED:
            return principal.method in TRUSTED
        question = (principal.name, permission, resource)
        known = self._decided.get(question)
        if known is None:
            known = any(grant.allows(permission, resource) for grant in self.of(principal))
            if len(self._decided) >= _KEPT_DECISIONS:  # names are the client's: they must not fill the memory
                self._decided.clear()
            self._decided[question] = known
        return known

    def allows_any(self, principal: Principal, permission: Permission, kind: Kind) -> bool:
        return principal.method in TRUSTED or any(
            grant.permission in (permission, Permission.ADMIN) and grant.resource.kind in (kind, None)
            for grant in self.of(principal)
        )
