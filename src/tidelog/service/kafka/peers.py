"""What one node asks of another, over Kafka's own protocol at the address that clients use.

Invariants
- A request is sent once. When its answer does not come, its outcome is unknown: the caller decides what is repeated.
- A connection carries one request at a time, and is closed after an error: an answer never goes to another question.
  It is closed without TLS's own farewell, which would wait for a node that hangs.
- Where authentication is on, a node proves itself with the secret of the installation, which is in its metadata store.
  Read access to that is as good as write access to everything there.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import ssl
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tidelog.config.load import TLS_CA_VARIABLE
from tidelog.errors import ServerUnavailableError
from tidelog.service.auth.access import NODE
from tidelog.service.auth.security import Security
from tidelog.service.kafka.codec import decode_response, encode_request, wire
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.primitives import ProtocolError
from tidelog.service.kafka.requests import ANONYMOUS, RequestContext
from tidelog.service.placement import NodeAddress
from tidelog.store.document import VersionedDocument, decode_json, encode_json
from tidelog.store.keys import node_secret_key
from tidelog.store.metadata.base import MetadataStore

FORWARDED = "tidelog-node"
"""The client id of what a node asks another one."""
_HANDSHAKE, _AUTHENTICATE = 17, 36
_ANSWER_SECONDS = 15.0
_CONNECT_SECONDS = 5.0
_MAX_ANSWER_BYTES = 16 << 20
_AT_ONCE = 16


def is_forwarded(context: RequestContext) -> bool:
    """Whether another node asks, not a client. Without authentication everybody may say so, as they may everything."""
    return context.client_id == FORWARDED and context.principal in (ANONYMOUS, str(NODE))


class _Secret(msgspec.Struct, frozen=True):
    secret: str


def shared_secret(metadata: MetadataStore, root: str) -> str:
    """In a thread: what nodes of an installation prove themselves with; the first one makes it."""
    key = node_secret_key(root)
    document = VersionedDocument(metadata, key, encode_json, partial(decode_json, kind=_Secret))
    made: _Secret = document.update(lambda known: known or _Secret(secrets.token_urlsafe(32)))
    return made.secret


Address = tuple[str, int]
_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Peers:
    """Connections to other nodes, opened when they are needed and kept."""

    def __init__(self, security: Security, *, answer_seconds: float = _ANSWER_SECONDS) -> None:
        self._security = security
        self._answer_seconds = answer_seconds
        self._free: dict[Address, list[_Connection]] = {}
        self._rooms: dict[Address, asyncio.Semaphore] = {}
        self._next_id = 0
        self._is_closed = False

    async def call(self, node: NodeAddress, api_key: int, version: int, request: Any) -> Any:
        """The answer of a node; ServerUnavailableError when none came, whatever the node has done."""
        address = node.kafka
        room = self._rooms.setdefault(address, asyncio.Semaphore(_AT_ONCE))
        async with room:
            try:
                async with asyncio.timeout(self._answer_seconds):
                    return await self._ask(address, api_key, version, request)
            except (OSError, TimeoutError, EOFError, ProtocolError) as error:
                raise ServerUnavailableError(
                    f"the node {node.node} did not answer: {str(error) or type(error).__name__}", hint="Try again"
                ) from error

    async def _ask(self, address: Address, api_key: int, version: int, request: Any) -> Any:
        free = self._free.setdefault(address, [])
        connection = free.pop() if free else None
        if connection is not None and (connection[0].at_eof() or connection[1].is_closing()):
            connection[1].transport.abort()
            connection = None
        if connection is None:
            async with asyncio.timeout(_CONNECT_SECONDS):
                connection = await self._connect(address)
        try:
            answer = await self._exchange(connection, api_key, version, request)
        except BaseException:
            connection[1].transport.abort()
            raise
        if self._is_closed:
            connection[1].transport.abort()
        else:
            free.append(connection)
        return answer

    async def _connect(self, address: Address) -> _Connection:
        tls = self._security.ssl_context and client_tls(self._security)
        connection = await asyncio.open_connection(*address, ssl=tls, server_hostname=address[0] if tls else None)
        try:
            if self._security.is_required:
                await self._authenticate(connection)
        except BaseException:
            connection[1].transport.abort()
            raise
        return connection

    async def _authenticate(self, connection: _Connection) -> None:
        shaken = await self._exchange(connection, _HANDSHAKE, 1, wire(_HANDSHAKE).SaslHandshakeRequest("PLAIN"))
        proof = f"\0{NODE.name}\0{self._security.node_secret}".encode()
        request = wire(_AUTHENTICATE).SaslAuthenticateRequest(auth_bytes=proof)
        proven = await self._exchange(connection, _AUTHENTICATE, 2, request)
        if shaken.error_code != ErrorCode.NONE or proven.error_code != ErrorCode.NONE:
            raise ProtocolError("it does not know this node: its installation has another secret")

    async def _exchange(self, connection: _Connection, api_key: int, version: int, request: Any) -> Any:
        reader, writer = connection
        self._next_id = (self._next_id + 1) & 0x7FFFFFFF
        sent = self._next_id
        writer.write(encode_request(api_key, version, sent, FORWARDED, request))
        await writer.drain()
        size = int.from_bytes(await reader.readexactly(4), "big", signed=True)
        if not 0 <= size <= _MAX_ANSWER_BYTES:
            raise ProtocolError(f"an answer of {size} bytes")
        correlation_id, answer = decode_response(api_key, version, await reader.readexactly(size))
        if correlation_id != sent:
            raise ProtocolError(f"an answer to request {correlation_id}, not to {sent}")
        return answer

    async def close(self) -> None:
        """Ends all connections; requests that wait fail."""
        self._is_closed = True
        for connections in self._free.values():
            for _, writer in connections:
                writer.transport.abort()
        self._free.clear()


def client_tls(security: Security) -> ssl.SSLContext:
    """Trusts this node's own certificate, what its clients are checked with, and what clients are told to trust."""
    context = ssl.create_default_context()
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # nodes may share a certificate, of any signer
    trusted = security.settings.tls_cert, security.settings.tls_client_ca, os.environ.get(TLS_CA_VARIABLE)
    for path in trusted:
        if path:
            context.load_verify_locations(Path(path))
    return context
