"""SASL on a connection: who gets in, how, for how long, and what is answered before and after."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from tests.service.auth.test_scram import ScramClient
from tests.service.kafka.secured import (
    AUTHENTICATE,
    HANDSHAKE,
    PASSWORD,
    Secured,
    add_users,
    authenticate,
    change_accounts,
    handshake,
    secured,
    send_token,
)
from tests.service.kafka.test_server import Client, produce_request, running

from tidelog.clock import ManualClock
from tidelog.service.auth.accounts import make_user, removing_user, setting_password
from tidelog.service.auth.security import Failures
from tidelog.service.kafka.broker import BrokerSettings
from tidelog.service.kafka.codec import APIS, wire
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.session import ClientSession

PRODUCE, METADATA, API_VERSIONS = 0, 3, 18


async def is_served(client: Client) -> bool:
    """Whether the client is somebody: a listing is answered."""
    found = await client.call(METADATA, 9, wire(METADATA).MetadataRequest(topics=None))
    return bool(found.controller_id == 1)


def test_each_mechanism_lets_the_right_password_in(tmp_path: Path) -> None:
    """PLAIN and both of SCRAM, and the server proves itself to SCRAM's clients."""

    async def run() -> None:
        async with secured(tmp_path, "alice admin *") as server:
            assert await is_served(await server.logged_in("alice"))
            for mechanism, digest in (("SCRAM-SHA-256", "sha256"), ("SCRAM-SHA-512", "sha512")):
                client, scram = await server.client(), ScramClient(digest, "alice", PASSWORD)
                assert (await handshake(client, mechanism)).error_code == 0
                first = await send_token(client, scram.first)
                final, expected = scram.final(bytes(first.auth_bytes))
                answer = await send_token(client, final)
                assert (answer.error_code, bytes(answer.auth_bytes)) == (0, expected)
                assert await is_served(client)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "password"),
    [
        ("alice", "wrong"),
        ("alice", ""),
        ("alice", PASSWORD + "x"),
        ("nobody", PASSWORD),
        ("", ""),
        ("alice\0alice", "x"),
    ],
)
def test_wrong_password_is_refused_and_the_connection_ends(tmp_path: Path, name: str, password: str) -> None:
    """The answer is Kafka's error 58 with the same words for a wrong password and an unknown user."""

    async def run() -> None:
        async with secured(tmp_path, "alice admin *") as server:
            client = await server.client()
            answer = await authenticate(client, name, password)
            assert answer.error_code == ErrorCode.SASL_AUTHENTICATION_FAILED
            assert answer.error_message == "Authentication failed"
            assert await client.is_closed()

    asyncio.run(run())


def test_nothing_else_is_answered_before_authentication(tmp_path: Path) -> None:
    """Every other API closes the connection without an answer; so does a large request, before its bytes came."""

    async def run() -> None:
        async with secured(tmp_path, "alice admin *") as server:
            for key in sorted(APIS.keys() - {API_VERSIONS, HANDSHAKE, AUTHENTICATE}):
                client = await server.client()
                await client.send(b"\x00\x00\x00\x0e" + key.to_bytes(2, "big") + bytes(12))
                assert await client.is_closed()
            client = await server.client()
            await client.send((65 << 10).to_bytes(4, "big"))
            assert await client.is_closed()
            client = await server.client()
            versions = await client.call(API_VERSIONS, 3, wire(API_VERSIONS).ApiVersionsRequest())
            assert {HANDSHAKE, AUTHENTICATE} <= {one.api_key for one in versions.api_keys}

    asyncio.run(run())


def test_unknown_mechanism_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    """Error 33 and the list, and the client may choose again; a message without a handshake is error 34."""

    async def run() -> None:
        async with secured(tmp_path, "alice admin *") as server:
            client = await server.client()
            for mechanism in ("GSSAPI", "OAUTHBEARER", ""):
                answer = await handshake(client, mechanism)
                assert answer.error_code == ErrorCode.UNSUPPORTED_SASL_MECHANISM
                assert answer.mechanisms == ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]
            assert (await authenticate(client, "alice")).error_code == 0
            other = await server.client()
            assert (await send_token(other, b"\0alice\0x")).error_code == ErrorCode.ILLEGAL_SASL_STATE
            assert await other.is_closed()

    asyncio.run(run())


def test_oldest_handshake_is_followed_by_bare_messages(tmp_path: Path) -> None:
    """Version 0: messages of the mechanism with their size alone, then requests as always."""

    async def run() -> None:
        async with secured(tmp_path, "alice admin *") as server:
            client = await server.client()
            assert (await handshake(client, "PLAIN", version=0)).error_code == 0
            message = f"\0alice\0{PASSWORD}".encode()
            await client.send(len(message).to_bytes(4, "big") + message)
            async with asyncio.timeout(60):
                assert await client._reader.readexactly(4) == bytes(4)
            assert await is_served(client)
            wrong = await server.client()
            await handshake(wrong, "PLAIN", version=0)
            await wrong.send(b"\x00\x00\x00\x09\0alice\0xx")
            assert await wrong.is_closed()

    asyncio.run(run())


def test_session_ends_unless_the_same_principal_authenticates_again(tmp_path: Path) -> None:
    """The answer says for how long it counts; after that only an authentication of the same principal is answered."""

    async def run() -> None:
        async with secured(tmp_path, "alice admin *", "bob admin *", auth_session_seconds=100) as server:
            clock = ManualClock()
            server.node.security._clock = clock
            client, late = await server.client(), await server.client()
            answer = await authenticate(client, "alice")
            assert answer.session_lifetime_ms == 100_000
            await authenticate(late, "alice")
            clock.advance(99)
            assert await is_served(client)
            assert (await authenticate(client, "alice")).session_lifetime_ms == 100_000
            clock.advance(2)
            assert await is_served(client)
            await late.send(late.request(METADATA, 9, wire(METADATA).MetadataRequest(topics=None)))
            assert await late.is_closed()
            other = await authenticate(client, "bob")
            assert other.error_code == ErrorCode.SASL_AUTHENTICATION_FAILED
            assert await client.is_closed()

    asyncio.run(run())


def test_connections_of_changed_and_removed_users_end(tmp_path: Path) -> None:
    """A new password and a removed user take effect on connections that are open; others go on."""

    async def run() -> None:
        async with secured(tmp_path, "alice admin *", "bob admin *", "carol admin *") as server:
            alice, bob, carol = [await server.logged_in(name) for name in ("alice", "bob", "carol")]
            new = make_user("another password", 0)
            change_accounts(server.directory, setting_password("alice", new), removing_user("bob"))
            await server.node.security.reload_accounts()
            assert await alice.is_closed()
            assert await bob.is_closed()
            assert await is_served(carol)
            assert (await authenticate(await server.client(), "alice")).error_code == 58
            assert await is_served(await server.logged_in("alice", "another password"))

    asyncio.run(run())


def test_changes_count_without_a_restart(tmp_path: Path) -> None:
    """What another process has stored is found by itself."""

    async def run() -> None:
        async with secured(tmp_path) as server:
            server.node.security._watch = asyncio.create_task(follow_quickly(server))
            changed = asyncio.Event()
            server.node.security.on_change(changed.set)
            await asyncio.to_thread(add_users, server.directory, "alice")
            async with asyncio.timeout(60):
                await changed.wait()
            assert await is_served(await server.logged_in("alice"))

    async def follow_quickly(server: Secured) -> None:
        security: Any = server.node.security
        security.settings = type(security.settings)(auth="required", auth_reload_seconds=0.1)
        await security._follow()

    asyncio.run(run())


def test_connections_of_one_address_are_limited(tmp_path: Path) -> None:
    """The connection beyond the limit is closed; when one ends there is room again."""

    async def run() -> None:
        async with running(tmp_path, max_connections_per_address=2) as server:
            first, second = await server.client(), await server.client()
            assert await is_served(first)
            assert await is_served(second)
            assert await (await server.client()).is_closed()
            await first.close()
            while server.node._kafka._by_host["127.0.0.1"] > 1:
                await asyncio.sleep(0.01)
            assert await is_served(await server.client())

    asyncio.run(run())


def test_client_that_does_not_authenticate_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is nobody's does not stay."""
    monkeypatch.setattr("tidelog.service.kafka.server._AUTHENTICATION_SECONDS", 0.01)

    async def run() -> None:
        async with secured(tmp_path, broker=BrokerSettings(idle_seconds=3600)) as server:
            assert await (await server.client()).is_closed()

    asyncio.run(run())


def test_failures_are_answered_late_and_many_not_at_all() -> None:
    """One wrong name waits longer each time until it is blocked; time makes it good again, and others go free."""
    seconds = 1000.0
    failures = Failures(lambda: seconds)
    waits = [failures.failed("10.0.0.1", "alice") for _ in range(12)]
    assert waits == sorted(waits)
    assert (waits[0], waits[5], waits[-1]) == (0.1, 5.0, 10.0)
    assert failures.is_blocked("10.0.0.1", "alice")
    assert not failures.is_blocked("10.0.0.1", "bob")
    assert not failures.is_blocked("10.0.0.2", "alice")
    for index in range(400):
        failures.failed("10.0.0.3", f"user-{index}")
    assert failures.is_blocked("10.0.0.3", "never-tried")
    late = [failures.token_failed("10.0.0.4") for _ in range(1000)]
    assert (late[0], late[-1]) == (0.1, 1.0)
    assert not failures.is_blocked("10.0.0.4", "alice")
    seconds += 60
    assert not failures.is_blocked("10.0.0.1", "alice")
    assert not failures.is_blocked("10.0.0.3", "never-tried")


def test_blocked_client_is_refused_with_the_right_password_too(tmp_path: Path) -> None:
    """The proof is not looked at, so trying on tells nothing."""

    async def run() -> None:
        async with secured(tmp_path, "alice admin *") as server:
            failures = server.node.security._failures
            for _ in range(30):
                failures.failed("127.0.0.1", "alice")
            failures.failed = lambda client, name: 0.0  # type: ignore[method-assign]
            assert (await authenticate(await server.client(), "alice")).error_code == 58

    asyncio.run(run())


def test_audit_log_says_who_did_what(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One record for an authentication, for a refusal and for the beginning of an access; no record per message, and no
    password in any."""
    caplog.set_level(logging.INFO, "tidelog")

    async def run() -> None:
        async with secured(tmp_path, "alice admin topic:shop/*") as server:
            server.node.security.audit._now = lambda: 1000.0
            alice = await server.logged_in("alice")
            for _ in range(5):
                await alice.call(PRODUCE, 9, produce_request(b"SECRET-PAYLOAD"))
                await alice.call(PRODUCE, 9, produce_request(b"x", topic="other.topic"))
            await authenticate(await server.client(), "alice", "SECRET-PASSWORD")

    asyncio.run(run())
    said = [record.getMessage() for record in caplog.records if record.name == "tidelog.audit"]
    assert said[0] == "event=authentication principal=User:alice method=plain allowed=true client=127.0.0.1"
    writes = [line for line in said if "permission=write" in line]
    who, rest = "event=access what=produce principal=User:alice resource=topic", "client=127.0.0.1"
    assert writes == [
        f"{who}:shop/orders permission=write allowed=true {rest}",
        f"{who}:other/topic permission=write allowed=false {rest}",
    ]
    assert "allowed=false" in said[-1]
    assert "SECRET" not in caplog.text
    assert PASSWORD not in caplog.text


def test_open_server_asks_nobody(tmp_path: Path) -> None:
    """Without authentication SASL is not offered, and every client is the anonymous."""

    async def run() -> None:
        async with running(tmp_path) as server:
            client = await server.client()
            versions = await client.call(API_VERSIONS, 3, wire(API_VERSIONS).ApiVersionsRequest())
            assert not {HANDSHAKE, AUTHENTICATE} & {one.api_key for one in versions.api_keys}
            assert await is_served(client)
            session = ClientSession(server.node.security, "127.0.0.1")
            assert (session.is_authenticated, session.principal.is_anonymous) == (True, True)

    asyncio.run(run())
