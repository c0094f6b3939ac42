"""One client of Kafka's protocol as somebody: SaslHandshake, SaslAuthenticate, and how long it counts.

    ApiVersions -> SaslHandshake (mechanism) -> SaslAuthenticate (a message of the mechanism, once or twice) -> requests

Invariants
- Before the client has proven who it is, ApiVersions and SASL are all that is answered, and requests are small.
- A client's certificate is such a proof; SASL after it decides who the client is.
- A session ends when its proof does, or after `auth_session_seconds`: only an authentication is answered then, and it
  must be of the same principal (KIP-368). A failed one ends the connection, after its answer.
- Version 0 of SaslHandshake is followed by bare messages of the mechanism, framed by their size alone.
"""

from __future__ import annotations

import struct
from typing import Any

from tidelog.service.auth.access import ANONYMOUS, NotAuthenticatedError, Principal
from tidelog.service.auth.sasl import Exchange
from tidelog.service.auth.security import Security
from tidelog.service.kafka.codec import API_VERSIONS, wire
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.primitives import Buffer, ProtocolError
from tidelog.service.kafka.requests import RequestContext

SASL_HANDSHAKE, SASL_AUTHENTICATE = 17, 36
_UNAUTHENTICATED = (API_VERSIONS, SASL_HANDSHAKE, SASL_AUTHENTICATE)
_SMALL_REQUEST_BYTES = 64 << 10
_SIZE = struct.Struct(">i")


class ClientSession:
    """Who is behind a connection."""

    def __init__(self, security: Security, host: str, certificate: bytes | None = None) -> None:
        """NotAuthenticatedError for a certificate that names nobody."""
        self._security = security
        self.host = host
        certified = security.user_of_certificate(certificate, host)
        self._principal: Principal | None = certified if security.is_required else ANONYMOUS
        self._by_sasl = False
        self._mechanism = ""
        self._exchange: Exchange | None = None
        self._ends_at: float | None = None
        self.takes_bare_messages = False
        self.is_over = False
        """The connection is closed after the answers that it still gets."""

    @property
    def principal(self) -> Principal:
        return self._principal or ANONYMOUS

    @property
    def is_authenticated(self) -> bool:
        return self._principal is not None

    @property
    def is_current(self) -> bool:
        """Whether the credential behind it still counts."""
        return self._principal is None or not self._by_sasl or self._security.is_current(self._principal)

    def max_request_bytes(self, limit: int) -> int:
        return limit if self.is_authenticated else min(limit, _SMALL_REQUEST_BYTES)

    def check(self, api_key: int) -> None:
        """ProtocolError for a request that is not answered now."""
        if api_key in _UNAUTHENTICATED:
            return
        if self._principal is None:
            raise ProtocolError("a request came before the client has authenticated")
        if self._ends_at is not None and self._security.now() >= self._ends_at:
            raise ProtocolError("the session has ended, and the client has not authenticated again")

    async def handshake(self, context: RequestContext, request: Any) -> Any:
        response = wire(SASL_HANDSHAKE).SaslHandshakeResponse
        offered = list(self._security.mechanisms)
        if request.mechanism not in offered:
            return response(error_code=ErrorCode.UNSUPPORTED_SASL_MECHANISM, mechanisms=offered)
        self._mechanism = request.mechanism
        self._exchange = self._security.exchange(request.mechanism, self.host)
        self.takes_bare_messages = context.version == 0
        return response(mechanisms=offered)

    async def authenticate(self, context: RequestContext, request: Any) -> Any:
        response = wire(SASL_AUTHENTICATE).SaslAuthenticateResponse
        if self._exchange is None:
            self.is_over = True
            text = "SaslHandshake comes before SaslAuthenticate."
            return response(error_code=ErrorCode.ILLEGAL_SASL_STATE, error_message=text)
        try:
            answer = await self._step(self._exchange, bytes(request.auth_bytes))
        except NotAuthenticatedError as error:
            self.is_over = True
            return response(error_code=ErrorCode.SASL_AUTHENTICATION_FAILED, error_message=error.message)
        return response(error_message=None, auth_bytes=answer, session_lifetime_ms=self._lifetime_ms())

    async def bare_message(self, message: Buffer) -> bytes:
        """The answer to a message of the mechanism without a header; ProtocolError when it is refused."""
        assert self._exchange is not None
        try:
            answer = await self._step(self._exchange, bytes(message))
        except NotAuthenticatedError as error:
            raise ProtocolError(error.message) from None
        return _SIZE.pack(len(answer)) + answer

    async def _step(self, exchange: Exchange, data: bytes) -> bytes:
        answer = await self._security.step(exchange, self._mechanism, data, self.host)
        if exchange.principal is not None:
            self._proven(exchange.principal)
        return answer

    def _proven(self, principal: Principal) -> None:
        if self._by_sasl and self._principal is not None and self._principal.name != principal.name:
            raise NotAuthenticatedError("a connection belongs to one principal: connect again as the other")
        self._principal, self._by_sasl = principal, True
        self._exchange, self.takes_bare_messages = None, False
        seconds = self._security.settings.auth_session_seconds
        ends = [principal.expires_at] if principal.expires_at is not None else []
        ends += [self._security.now() + seconds] if seconds else []
        self._ends_at = min(ends, default=None)

    def _lifetime_ms(self) -> int:
        if self._ends_at is None or self._exchange is not None:
            return 0
        return max(1, int((self._ends_at - self._security.now()) * 1000))
