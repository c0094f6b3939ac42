"""Nodes that ask each other: who may, and what becomes of a node that does not answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.service.installation import run
from tests.service.kafka.secured import secured

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
