"""TLS of the listeners: who is let in by a certificate, and certificates that are replaced while it runs."""

from __future__ import annotations

import asyncio
import logging
import shutil
import ssl
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from tests.service.auth.certificates import Authority, Files
from tests.service.kafka.secured import Secured, secured
from tests.service.kafka.test_server import Client

from tidelog.errors import ConfigError, TidelogError
from tidelog.service.auth.access import NotAuthenticatedError
from tidelog.service.auth.tls import Naming, ServerTls, principal_of_certificate
from tidelog.service.kafka.codec import wire

METADATA = 3


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "certificates")


def trusting(authority: Authority, own: Files | None = None) -> ssl.SSLContext:
    """What a client has: the authority of the server, and perhaps a certificate of its own."""
    context = ssl.create_default_context(cafile=authority.path)
    if own is not None:
        context.load_cert_chain(*own)
    return context


async def connected(server: Secured, context: ssl.SSLContext) -> Client:
    client = Client(*await asyncio.open_connection(*server.address, ssl=context, server_hostname="127.0.0.1"))
    server._clients.append(client)
    return client


async def topics(client: Client) -> list[str]:
    found = await client.call(METADATA, 9, wire(METADATA).MetadataRequest(topics=None))
    return [one.name for one in found.topics]


async def is_refused(server: Secured, context: ssl.SSLContext) -> bool:
    """Whether the handshake fails, or the first request (TLS 1.3 tells a client late)."""
    try:
        client = await connected(server, context)
        await topics(client)
    except (ssl.SSLError, OSError, asyncio.IncompleteReadError):
        return True
    return False


def test_certificate_of_a_client_says_who_it_is(tmp_path: Path, authority: Authority) -> None:
    """Its common name has the grants; without one nobody is known, and one of another authority is refused."""
    own = authority.signed("server", "server")
    options: dict[str, Any] = {"tls_cert": own.cert, "tls_key": own.key, "tls_client_ca": authority.path}

    async def run() -> None:
        async with secured(tmp_path / "data", "alice read topic:shop/*", users=("bob",), **options) as server:
            server.directory.topic("shop/orders")
            await server.node._broker._adopt(next(iter(server.directory._topics)))
            alice = await connected(server, trusting(authority, authority.signed("alice", "alice")))
            assert await topics(alice) == ["shop.orders"]
            carol = await connected(server, trusting(authority, authority.signed("carol", "carol")))
            assert await topics(carol) == []
            nobody = await connected(server, trusting(authority))
            await nobody.send(nobody.request(METADATA, 9, wire(METADATA).MetadataRequest(topics=None)))
            assert await nobody.is_closed()
            other = Authority(tmp_path / "other").signed("alice", "alice")
            assert await is_refused(server, trusting(authority, other))
            late = authority.signed("late", "alice", days=-1)
            assert await is_refused(server, trusting(authority, late))
            plain = await server.client()
            await plain.send(plain.request(METADATA, 9, wire(METADATA).MetadataRequest(topics=None)))
            assert await plain.is_closed()

    asyncio.run(run())


def test_certificates_are_replaced_while_it_runs(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """After a reload new connections get the new certificate, and clients the new authority; old connections go on.
    Files that cannot be used change nothing."""
    first, second = authority.signed("first", "first"), authority.signed("second", "second")
    live = Files(str(tmp_path / "live.pem"), str(tmp_path / "live.key"))
    client_ca = tmp_path / "clients.pem"
    old_clients, new_clients = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    shutil.copy(old_clients.path, client_ca)
    for source, target in zip(first, live, strict=True):
        shutil.copy(source, target)
    options: dict[str, Any] = {"tls_cert": live.cert, "tls_key": live.key, "tls_client_ca": str(client_ca)}

    async def name_of(server: Secured, context: ssl.SSLContext) -> str:
        client = await connected(server, context)
        der = client._writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return x509.load_der_x509_certificate(der).subject.rfc4514_string()

    async def run() -> None:
        async with secured(tmp_path / "data", "alice admin *", **options) as server:
            old = trusting(authority, old_clients.signed("alice", "alice"))
            new = trusting(authority, new_clients.signed("alice", "alice"))
            before = await connected(server, old)
            assert await name_of(server, old) == "CN=first"
            assert await is_refused(server, new)
            for source, target in zip(second, live, strict=True):
                shutil.copy(source, target)
            shutil.copy(new_clients.path, client_ca)
            await server.node.security.reload()
            assert await name_of(server, new) == "CN=second"
            assert await topics(await connected(server, new)) == []
            assert await is_refused(server, old)
            assert await topics(before) == []
            Path(live.key).write_text("no key")
            await server.node.security.reload()
            assert await name_of(server, new) == "CN=second"

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert "the certificates stay as they were" in caplog.text


@pytest.mark.parametrize(
    ("naming", "expected"), [("common_name", "alice"), ("subject", "O=shop,CN=alice"), ("san", "alice.example.org")]
)
def test_principal_is_the_part_of_the_certificate_that_was_chosen(
    authority: Authority, naming: Naming, expected: str
) -> None:
    """Common name, whole subject, or first alternative name."""
    found = authority.signed("alice", "alice", "alice.example.org", organization="shop")
    der = x509.load_pem_x509_certificate(Path(found.cert).read_bytes()).public_bytes(Encoding.DER)
    principal = principal_of_certificate(der, naming)
    assert (principal.name, principal.method) == (expected, "certificate")


@pytest.mark.parametrize("name", ["*", "ANONYMOUS", "LOCAL", "a\nb", "User:alice"])
def test_certificate_with_a_reserved_name_is_nobody(authority: Authority, name: str) -> None:
    """No certificate makes its owner everyone, or writes a second line into the audit log."""
    found = authority.signed("odd", name)
    der = x509.load_pem_x509_certificate(Path(found.cert).read_bytes()).public_bytes(Encoding.DER)
    with pytest.raises(NotAuthenticatedError):
        principal_of_certificate(der, "common_name")
    with pytest.raises(NotAuthenticatedError):
        principal_of_certificate(b"no certificate", "common_name")


def test_files_that_cannot_be_used_are_named(tmp_path: Path, authority: Authority) -> None:
    """A missing file, a key of another certificate, and text that is no PEM; nothing of a key is in the error."""
    own, other = authority.signed("a", "a"), authority.signed("b", "b")
    empty = tmp_path / "empty.pem"
    empty.write_text("SECRET, and no PEM")
    wrong: list[tuple[Any, ...]] = [
        (Path(own.cert), Path(other.key), None),
        (Path(own.cert), empty, None),
        (Path(own.cert), None, None),
        (empty, Path(own.key), None),
        (Path(own.cert), Path(own.key), empty),
        (tmp_path / "missing.pem", Path(own.key), None),
    ]
    for cert, key, client_ca in wrong:
        with pytest.raises(TidelogError) as caught:
            ServerTls(cert, key, client_ca)
        assert "SECRET" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be used"):
        ServerTls(Path(own.cert), Path(other.key), None)
