"""The security of one server: who clients are, what they may do, and the files and documents that say so.

Invariants
- With authentication off everybody is anonymous and may do everything. With it on, nobody is anonymous.
- Users, tokens and grants are read when it starts and then every `auth_reload_seconds`. While the metadata store does
  not answer, what was read last counts.
- A reload (SIGHUP) reads certificates, keys of tokens and accounts again. What cannot be read leaves what was in force,
  and says so.
- A password is checked outside of the event loop, a few at a time; a refusal comes late (`Failures`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tidelog.clock import Clock, SystemClock
from tidelog.config.serve import ServeSettings
from tidelog.errors import ConfigError, TidelogError
from tidelog.events import tell
from tidelog.service.auth.access import (
    ANONYMOUS,
    NODE,
    Authorizer,
    Grants,
    Kind,
    NotAuthenticatedError,
    Open,
    Permission,
    Principal,
    Resource,
)
from tidelog.service.auth.accounts import AccountsDocument, AccountStore, is_current, user_of_password, user_of_token
from tidelog.service.auth.audit import Audit
from tidelog.service.auth.jwt import JwtVerifier, read_keys
from tidelog.service.auth.sasl import OAUTHBEARER, PLAIN, Exchange, OAuthBearer, Plain, Scram
from tidelog.service.auth.scram import MECHANISMS
from tidelog.service.auth.tls import ServerTls, principal_of_certificate
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.scheduler import in_store_thread

_logger = logging.getLogger("tidelog.service")
_PASSWORDS_AT_ONCE = 2
_BEARER = "bearer "
_TOKEN_HINT = "`tidelog auth token create` makes one, at the server; pass it as token=, --token or TIDELOG_TOKEN"
_TOO_MANY = "Authentication failed: too many attempts, try again later"


class Security:
    """What listeners ask. `start` it before them."""

    def __init__(self, settings: ServeSettings | None = None, clock: Clock | None = None) -> None:
        """ConfigError when a file cannot be used, or settings do not fit together."""
        self.settings = settings or ServeSettings()
        self._clock = clock or SystemClock()
        self.audit = Audit(self._clock.monotonic)
        self._failures = Failures(self._clock.monotonic)
        self._tls = _tls_of(self.settings)
        self._jwt = _jwt_of(self.settings, self.now)
        self._seed = secrets.token_bytes(32)
        self._known = AccountsDocument()
        self._version: str | None = None
        self._decides: Authorizer = Grants() if self.is_required else Open()
        self.authorizer: Authorizer = _Current(self)
        """Decides by the grants that count at the moment, and writes no audit log."""
        self._store: AccountStore | None = None
        self.node_secret = ""
        """What other nodes of the installation prove themselves with; empty: there are none."""
        self._reading = asyncio.Lock()
        self._passwords = asyncio.Semaphore(_PASSWORDS_AT_ONCE)
        self._on_change: list[Callable[[], None]] = []
        self._on_check: list[Callable[[], None]] = []
        self._watch: asyncio.Task[None] | None = None
        self._is_stale = False

    @property
    def is_required(self) -> bool:
        """Whether clients must authenticate."""
        return self.settings.auth == "required"

    @property
    def ssl_context(self) -> ssl.SSLContext | None:
        """For listeners; None where they speak without TLS."""
        return None if self._tls is None else self._tls.context

    @property
    def accounts(self) -> AccountStore:
        """Where users, tokens and grants are changed; `reload_accounts` afterwards."""
        assert self._store is not None, "not started"
        return self._store

    @property
    def known(self) -> AccountsDocument:
        """Users, tokens and grants as they count now."""
        return self._known

    def now(self) -> float:
        """Seconds since 1970."""
        return self._clock.now_us() / 1e6

    # Starting and changing

    async def start(self, metadata: MetadataStore, root: str) -> None:
        """Reads the accounts, and follows them."""
        self._store = AccountStore(metadata, root)
        if not self.is_required:
            return
        await self.reload_accounts()
        if not self._known.grants:
            _logger.warning("no grants: nobody may do anything until `tidelog auth grant` gives some")
        self._watch = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch

    def on_change(self, callback: Callable[[], None]) -> None:
        """Calls this whenever users, tokens or grants have changed."""
        self._on_change.append(callback)

    def on_check(self, callback: Callable[[], None]) -> None:
        """Calls this whenever they have changed, and every `auth_reload_seconds`: tokens end by themselves."""
        self._on_check.append(callback)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self.settings.auth_reload_seconds)
            try:
                await self.reload_accounts()
            except TidelogError as error:
                if not self._is_stale:
                    _logger.warning("users and grants cannot be read, the last known ones count: %s", error)
                self._is_stale = True
            else:
                self._is_stale = False
            self._check()

    def _check(self) -> None:
        for callback in self._on_check:
            callback()

    async def reload_accounts(self) -> None:
        """What is stored now counts from here on."""
        async with self._reading:  # so that what was read first does not count last
            known, version = await in_store_thread(self.accounts.read)
            if version == self._version or not self.is_required:
                return
            self._use(known, version)

    def _use(self, known: AccountsDocument, version: str | None) -> None:
        self._known, self._version, self._decides = known, version, Grants(known.grants)
        tell(_logger, "accounts_loaded", users=len(known.users), tokens=len(known.tokens), grants=len(known.grants))
        for callback in self._on_change:
            callback()
        self._check()

    async def reload(self) -> None:
        """Certificates, keys of tokens, and accounts. A part that cannot be read stays as it was; a warning says so."""
        for what, work in (("certificates", self._reload_tls), ("keys of tokens", self._reload_keys)):
            try:
                await asyncio.to_thread(work)
            except TidelogError as error:
                _logger.warning("the %s stay as they were: %s", what, error)
        if self.is_required:
            try:
                await self.reload_accounts()
            except TidelogError as error:
                _logger.warning("users and grants stay as they were: %s", error)
        tell(_logger, "security_reloaded")

    def _reload_tls(self) -> None:
        if self._tls is not None:
            self._tls.reload()

    def _reload_keys(self) -> None:
        self._jwt = _jwt_of(self.settings, self.now)

    # What they may do

    def allows(
        self, principal: Principal, what: str, permission: Permission | None, resource: Resource, client: str
    ) -> bool:
        """Decides, and writes the audit log where authentication is on. `what` is the API or the route."""
        allowed = self._decides.allows(principal, permission, resource)
        if self.is_required:
            self.audit.access(principal, what, permission, resource, allowed=allowed, client=client)
        return allowed

    def allows_any(self, principal: Principal, permission: Permission, kind: Kind) -> bool:
        """Whether there could be such a resource."""
        return self._decides.allows_any(principal, permission, kind)

    def is_current(self, principal: Principal) -> bool:
        """Whether the credential still counts, and has not ended."""
        if principal.expires_at is not None and self.now() >= principal.expires_at:
            return False
        return not self.is_required or is_current(self._known, principal)

    # Who they are

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """Those of SASL."""
        return (PLAIN, *MECHANISMS, *((OAUTHBEARER,) if self._jwt is not None else ()))

    def exchange(self, mechanism: str, client: str) -> Exchange:
        """A new authentication of a client at this address, by one of `mechanisms`."""
        if mechanism == PLAIN:
            return Plain(partial(self._user_of_password, client))
        if mechanism == OAUTHBEARER:
            return OAuthBearer(self._user_of_jwt)
        return Scram(mechanism, lambda: self._known, self._seed)

    async def step(self, exchange: Exchange, mechanism: str, data: bytes, client: str) -> bytes:
        """One step of an authentication. NotAuthenticatedError comes as late as failures deserve it."""
        try:
            if exchange.name and self._failures.is_blocked(client, exchange.name):
                raise NotAuthenticatedError(_TOO_MANY)
            answer = await exchange.step(data)
        except NotAuthenticatedError as error:
            await self._refused(exchange.name, mechanism.lower(), client, error.reason)
            raise
        if exchange.principal is not None:
            self.audit.authentication(exchange.principal.name, mechanism.lower(), allowed=True, client=client)
        return answer

    async def _refused(self, name: str, method: str, client: str, reason: str) -> None:
        seconds = self._failures.failed(client, name) if name else self._failures.token_failed(client)
        self.audit.authentication(name, method, allowed=False, client=client, reason=reason)
        await asyncio.sleep(seconds)

    async def _user_of_password(self, client: str, name: str, password: str) -> Principal | None:
        if self._failures.is_blocked(client, name):
            return None
        if name == NODE.name:
            is_right = hmac.compare_digest(password.encode(), self.node_secret.encode())
            return NODE if self.node_secret and is_right else None
        async with self._passwords:
            return await asyncio.to_thread(user_of_password, self._known, name, password)

    def _user_of_jwt(self, token: str) -> Principal:
        if self._jwt is None:
            raise NotAuthenticatedError("tokens of an issuer are not accepted here")
        subject, expires_at = self._jwt.verify(token)
        return Principal(subject, "oauth", "", expires_at)

    def user_of_certificate(self, der: bytes | None, client: str) -> Principal | None:
        """Who a verified certificate of a client is about; None where there is none."""
        if der is None or not self.is_required:
            return None
        try:
            principal = principal_of_certificate(der, self.settings.tls_principal)
        except NotAuthenticatedError as error:
            self.audit.authentication("", "certificate", allowed=False, client=client, reason=error.reason)
            raise
        self.audit.authentication(principal.name, principal.method, allowed=True, client=client)
        return principal

    async def authenticate_http(self, authorization: str | None, certificate: bytes | None, client: str) -> Principal:
        """Who a request of HTTP is from: by its header `Authorization: Bearer TOKEN`, else by its certificate."""
        if not self.is_required:
            return ANONYMOUS
        if authorization is None:
            principal = self._certified(certificate)
            if principal is not None:
                return principal
            raise NotAuthenticatedError("a bearer token is needed", hint=_TOKEN_HINT)
        try:
            return self._bearer(authorization)
        except NotAuthenticatedError as error:
            await self._refused("", "bearer", client, error.reason)
            raise

    def _certified(self, certificate: bytes | None) -> Principal | None:
        return None if certificate is None else principal_of_certificate(certificate, self.settings.tls_principal)

    def _bearer(self, authorization: str) -> Principal:
        if not authorization.lower().startswith(_BEARER):
            raise NotAuthenticatedError("expected is the header Authorization: Bearer TOKEN")
        token = authorization[len(_BEARER) :].strip()
        if self._jwt is not None and token.count(".") == 2:
            return self._user_of_jwt(token)
        principal = user_of_token(self._known, token, self._clock.now_us())
        if principal is None:
            raise NotAuthenticatedError("the token is unknown, revoked or has expired", hint=_TOKEN_HINT)
        return principal


class _Current:
    """The authorizer for those who keep one."""

    def __init__(self, security: Security) -> None:
        self._security = security

    def allows(self, principal: Principal, permission: Permission | None, resource: Resource) -> bool:
        return self._security._decides.allows(principal, permission, resource)

    def allows_any(self, principal: Principal, permission: Permission, kind: Kind) -> bool:
        return self._security._decides.allows_any(principal, permission, kind)


def _tls_of(settings: ServeSettings) -> ServerTls | None:
    if settings.tls_cert is None:
        for name, given in (("tls_key", settings.tls_key), ("tls_client_ca", settings.tls_client_ca)):
            if given is not None:
                raise ConfigError(f"{name} is set without tls_cert", hint="Give the server's certificate too")
        return None
    key, client_ca = (None if path is None else Path(path) for path in (settings.tls_key, settings.tls_client_ca))
    return ServerTls(Path(settings.tls_cert), key, client_ca)


def _jwt_of(settings: ServeSettings, now: Callable[[], float]) -> JwtVerifier | None:
    issuer, audience = settings.oauth_issuer, settings.oauth_audience
    if settings.oauth_keys is None:
        if issuer is not None or audience is not None:
            raise ConfigError(
                "oauth_issuer or oauth_audience is set without oauth_keys", hint="Name the file with the keys"
            )
        return None
    if not issuer or not audience:
        raise ConfigError(
            "oauth_keys needs oauth_issuer and oauth_audience", hint="A token for another service would count"
        )
    return JwtVerifier(read_keys(Path(settings.oauth_keys)), issuer, audience, now, settings.oauth_principal_claim)


# Failed authentications are answered late, and too many of them not at all, so that passwords cannot be tried out.
#
# Invariants
# - One address may be wrong about one name once a second in the long run, and twenty times a second in all; each
#   failure beyond that waits until it is due.
# - A client that is more than ten seconds ahead is refused without a look at the proof, right or wrong: that bounds the
#   guesses. Others, at other addresses or with other names, notice nothing.
# - A token cannot be guessed, so a wrong one is answered late and blocks nobody: many clients may share an address, as
#   those behind a proxy do.
# - Success waits for nothing.

_SECONDS_A_NAME = 1.0
_SECONDS_AN_ADDRESS = 0.05
_FIRST_SECONDS = 0.1
_LONGEST_SECONDS = 10.0
_LONGEST_TOKEN_SECONDS = 1.0
_TOKENS = "\n"  # no user is called so
_KEPT = 20_000


class Failures:
    """Counts what was wrong, by address and name."""

    def __init__(self, now: Callable[[], float]) -> None:
        """`now` is a monotonic time in seconds."""
        self._now = now
        self._even_at: dict[tuple[str, str | None], float] = {}

    def is_blocked(self, client: str, name: str) -> bool:
        """Whether the proof is not even looked at."""
        now = self._now()
        keys = (client, name), (client, None)
        return any(self._even_at.get(key, 0.0) - now > _LONGEST_SECONDS for key in keys)

    def failed(self, client: str, name: str) -> float:
        """Counts a failure; returns the seconds after which it is answered."""
        now = self._now()
        self._forget_old()
        waits = [
            self._count((client, name), _SECONDS_A_NAME, now),
            self._count((client, None), _SECONDS_AN_ADDRESS, now),
        ]
        return min(max(*waits, _FIRST_SECONDS), _LONGEST_SECONDS)

    def token_failed(self, client: str) -> float:
        """Counts a wrong token; returns the seconds after which it is answered."""
        self._forget_old()
        wait = self._count((client, _TOKENS), _SECONDS_AN_ADDRESS, self._now())
        return min(max(wait, _FIRST_SECONDS), _LONGEST_TOKEN_SECONDS)

    def _forget_old(self) -> None:
        if len(self._even_at) >= _KEPT:
            now = self._now()
            self._even_at = {key: at for key, at in self._even_at.items() if at > now}

    def _count(self, key: tuple[str, str | None], seconds: float, now: float) -> float:
        before = max(self._even_at.get(key, 0.0), now)
        self._even_at[key] = before + seconds
        return before - now
