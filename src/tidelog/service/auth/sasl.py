"""The mechanisms of SASL, each as one exchange: PLAIN (RFC 4616), SCRAM, OAUTHBEARER (RFC 7628).

Invariants
- An exchange ends with a principal or with NotAuthenticatedError, which says no more than that to a client.
- Nothing that was sent as a proof is kept, shown or logged. `name` is who the client says it is, for the audit log.
- A client acts as itself: an authorization identity other than its own name is refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from tidelog.service.auth.access import NotAuthenticatedError, Principal
from tidelog.service.auth.accounts import AccountsDocument
from tidelog.service.auth.scram import MECHANISMS, ScramError, ScramKeys, ScramServer, unknown_keys

PLAIN, OAUTHBEARER = "PLAIN", "OAUTHBEARER"
_LONGEST_MESSAGE = 32 << 10
_REFUSED = "Authentication failed"
_SEPARATOR = "\x01"


class Exchange(Protocol):
    """One authentication."""

    name: str
    principal: Principal | None
    """Set when the client has proven who it is."""

    async def step(self, data: bytes) -> bytes:
        """The answer to what the client sent; NotAuthenticatedError ends it."""


class Plain:
    """Name and password in one message."""

    def __init__(self, verify: Callable[[str, str], Awaitable[Principal | None]]) -> None:
        self._verify = verify
        self.name = ""
        self.principal: Principal | None = None

    async def step(self, data: bytes) -> bytes:
        parts = _text(data).split("\0")
        if len(parts) != 3 or not parts[1] or parts[0] not in ("", parts[1]):
            raise NotAuthenticatedError(_REFUSED)
        self.name = parts[1]
        self.principal = await self._verify(parts[1], parts[2])
        if self.principal is None:
            raise NotAuthenticatedError(_REFUSED)
        return b""


class Scram:
    """SCRAM-SHA-256 and SCRAM-SHA-512."""

    def __init__(self, mechanism: str, known: Callable[[], AccountsDocument], seed: bytes) -> None:
        self._mechanism = mechanism
        self._known = known
        self._seed = seed
        self._credential = ""
        self._server = ScramServer(MECHANISMS[mechanism], self._keys_of)
        self.principal: Principal | None = None

    @property
    def name(self) -> str:
        return self._server.name

    @name.setter
    def name(self, value: str) -> None:
        raise AttributeError("the name is what the client says")

    def _keys_of(self, name: str) -> ScramKeys:
        user = self._known().users.get(name)
        keys = None if user is None else user.scram.get(self._mechanism)
        if user is None or keys is None:
            return unknown_keys(MECHANISMS[self._mechanism], name, self._seed)
        self._credential = user.id
        return keys

    async def step(self, data: bytes) -> bytes:
        try:
            answer = self._server.step(data)
        except ScramError:
            raise NotAuthenticatedError(_REFUSED) from None
        if self._server.is_done:
            self.principal = Principal(self._server.name, self._mechanism.lower(), self._credential)
        return answer


class OAuthBearer:
    """A token in one message."""

    def __init__(self, verify: Callable[[str], Principal]) -> None:
        self._verify = verify
        self.name = ""
        self.principal: Principal | None = None

    async def step(self, data: bytes) -> bytes:
        header, _, rest = _text(data).partition(_SEPARATOR)
        flag, _, authorized_as = header.partition(",")
        pairs = [part.partition("=") for part in rest.split(_SEPARATOR) if part]
        fields = {name.lower(): value for name, _, value in pairs}
        scheme, _, token = fields.get("auth", "").partition(" ")
        if flag not in ("n", "y") or scheme.lower() != "bearer":
            raise NotAuthenticatedError(_REFUSED)
        principal = self._verify(token.strip())
        if authorized_as.strip(",").removeprefix("a=") not in ("", principal.name):
            raise NotAuthenticatedError(_REFUSED)
        self.principal = principal
        self.name = principal.name
        return b""


def _text(data: bytes) -> str:
    if len(data) > _LONGEST_MESSAGE:
        raise NotAuthenticatedError(_REFUSED)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise NotAuthenticatedError(_REFUSED) from None
