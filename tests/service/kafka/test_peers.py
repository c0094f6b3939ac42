"""Nodes that ask each other: who may, and what becomes of a node that does not answer."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from asyncio.trsock import TransportSocket
from pathlib import Path

import pytest
from tests.service.auth.certificates import Authority
from tests.service.installation import run
from tests.service.kafka.secured import secured

from tidelog.config.serve import ServeSettings
from tidelog.errors import ServerUnavailableError
from tidelog.service.auth.security import Security
from tidelog.service.kafka.codec import wire
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.peers import Peers
from tidelog.service.placement import Address, NodeAddress

METADATA = 3


def test_a_node_that_does_not_answer_is_an_error_to_try_again() -> None:
    """One that refuses the connection, one that closes it, and one that says nothing."""

    async def work() -> None:
        async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        silent: list[asyncio.StreamWriter] = []
        closing = await asyncio.start_server(close, "127.0.0.1", 0)
        saying_nothing = await asyncio.start_server(lambda _, writer: silent.append(writer), "127.0.0.1", 0)
        addresses = [Address(*server.sockets[0].getsockname()) for server in (closing, saying_nothing)]
        peers = Peers(Security(), answer_seconds=0.2)
        for address in (Address("127.0.0.1", 1), *addresses):
            with pytest.raises(ServerUnavailableError, match="the node other did not answer"):
                await peers.call(NodeAddress("other", 2, address, ""), METADATA, 9, wire(METADATA).MetadataRequest())
        await peers.close()
        for writer in silent:
            writer.close()
        for server in (closing, saying_nothing):
            server.close()
            await server.wait_closed()

    run(work())


def test_a_node_proves_itself_with_the_secret_of_the_installation(tmp_path: Path) -> None:
    """It may do everything then; with another secret it is refused, and so is a user who calls itself a node."""

    async def work() -> None:
        async with secured(tmp_path) as server:
            address = NodeAddress("other", 2, Address(*server.address), "")
            security = server.node.security
            for secret, is_right in (("", False), ("wrong", False), ("right", True)):
                security.node_secret = "right" if secret else ""
                asking = Security(security.settings)
                asking.node_secret = secret
                peers = Peers(asking)
                request = wire(METADATA).MetadataRequest(topics=None)
                if is_right:
                    answer = await peers.call(address, METADATA, 9, request)
                    assert all(topic.error_code == ErrorCode.NONE for topic in answer.topics)
                else:
                    with pytest.raises(ServerUnavailableError, match="another secret"):
                        await peers.call(address, METADATA, 9, request)
                await peers.close()

    run(work())


class _Watched(Peers):
    """Remembers the connections that it opens."""

    def __init__(self, security: Security) -> None:
        super().__init__(security, answer_seconds=0.5)
        self.sockets: list[TransportSocket] = []

    async def _connect(self, address: tuple[str, int]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        connection = await super()._connect(address)
        self.sockets.append(connection[1].get_extra_info("socket"))
        return connection


def test_connection_over_tls_ends_without_the_other_side(tmp_path: Path) -> None:
    """A node that hangs does not keep the connection open until the handshake of its end has timed out."""
    files = Authority(tmp_path).signed("node", "node")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key)
    listener, is_over = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def hang() -> None:
        accepted, _ = listener.accept()
        with context.wrap_socket(accepted, server_side=True):
            is_over.wait(60)

    async def work() -> None:
        peers = _Watched(Security(ServeSettings(tls_cert=files.cert, tls_key=files.key)))
        address = NodeAddress("other", 2, Address(*listener.getsockname()), "")
        with pytest.raises(ServerUnavailableError):
            await peers.call(address, METADATA, 9, wire(METADATA).MetadataRequest())
        for _ in range(10):
            await asyncio.sleep(0)
        assert [one.fileno() for one in peers.sockets] == [-1]
        await peers.close()

    thread = threading.Thread(target=hang)
    thread.start()
    with listener:
        try:
            run(work())
        finally:
            is_over.set()
            thread.join(60)
