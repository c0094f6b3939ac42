"""etcd as metadata store: leases, values of others and answers of others."""

from __future__ import annotations

import secrets
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from tests.servers import EtcdServer

from tidelog.clock import ManualClock
from tidelog.errors import ClosedError, DataError, LeaseLostError, StoreUnavailableError
from tidelog.store.metadata import Put
from tidelog.store.metadata.base import Lease
from tidelog.store.metadata.etcd import EtcdMetadataStore
from tidelog.store.metadata.etcd_client import Endpoint, EtcdClient
from tidelog.store.settings import MetadataSettings

PATIENCE_SECONDS = 60.0


@pytest.fixture
def store(etcd_server: EtcdServer) -> Iterator[EtcdMetadataStore]:
    with EtcdMetadataStore([etcd_server.endpoint]) as opened:
        yield opened


@pytest.fixture
def at() -> str:
    """A prefix that no other test uses."""
    return f"test-{secrets.token_hex(8)}/"


def is_held(lease: Lease) -> bool:
    """Asked through a function: a type checker takes a property for constant."""
    return lease.is_held


def vanishes(store: EtcdMetadataStore, key: str) -> bool:
    """Whether a key is gone before long."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while store.get(key) is not None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


class TestLeases:
    """Entries that live as long as their holder."""

    def test_what_hangs_on_a_lease_vanishes_with_it(self, store: EtcdMetadataStore, at: str) -> None:
        """When it is given back, at once; everything else stays."""
        lease = store.lease(30)
        store.commit([], [Put(at + "leased", b"x", lease), Put(at + "kept", b"y")])
        assert is_held(lease)
        lease.revoke()
        lease.revoke()
        assert not is_held(lease)
        assert store.keys(at) == [at + "kept"]

    def test_a_lease_that_is_not_refreshed_runs_out(self, store: EtcdMetadataStore, at: str) -> None:
        """The holder knows it before the entry is gone, and can neither refresh nor use it any more."""
        lease = store.lease(1)
        store.commit([], [Put(at + "leased", b"x", lease)])
        assert vanishes(store, at + "leased")
        assert not is_held(lease)
        with pytest.raises(LeaseLostError):
            lease.refresh()
        with pytest.raises(LeaseLostError):
            store.commit([], [Put(at + "leased", b"x", lease)])

    def test_a_holder_that_slept_does_not_believe_in_its_lease(self, etcd_server: EtcdServer) -> None:
        """By its own clock, before it has asked anybody; and it stays lost."""
        clock = ManualClock()
        with EtcdMetadataStore([etcd_server.endpoint], clock=clock) as store:
            lease = store.lease(30)
            clock.advance(29.9)
            assert is_held(lease)
            lease.refresh()
            clock.advance(29.9)
            assert is_held(lease)
            clock.advance(0.2)
            assert not is_held(lease)
            with pytest.raises(LeaseLostError):
                lease.refresh()


def test_what_tidelog_did_not_write_is_named(store: EtcdMetadataStore, at: str) -> None:
    """It is neither served nor taken for a missing entry."""
    key = at + "foreign"
    store._client.ask("kv/put", {"key": b64encode(key.encode()).decode(), "value": b64encode(b"{}").decode()})
    with pytest.raises(DataError, match="foreign"):
        store.get(key)
    with pytest.raises(DataError, match="foreign"):
        store.range(at)
    store.delete(key)


def test_a_closed_store_says_so(etcd_server: EtcdServer) -> None:
    """It does not connect again."""
    store = EtcdMetadataStore([etcd_server.endpoint])
    store.close()
    with pytest.raises(ClosedError):
        store.get("a")


def test_request_that_begins_while_it_is_closed_leaves_no_connection(etcd_server: EtcdServer) -> None:
    """Another thread closes the store between the look whether it is open and the request: no socket stays open."""
    client = EtcdClient([etcd_server.endpoint], MetadataSettings(), is_tls=False, timeout_seconds=PATIENCE_SECONDS)

    send = client._members[0].urlopen

    def closing(*arguments: Any, **named: Any) -> Any:
        client.close()
        return send(*arguments, **named)

    client._members[0].urlopen = closing  # type: ignore[method-assign]
    with pytest.raises(ClosedError):
        client.ask("kv/range", {"key": b64encode(b"a").decode(), "limit": 1})


def test_request_that_is_under_way_while_it_is_closed_leaves_no_connection(etcd_server: EtcdServer) -> None:
    """It gets its answer, and its connection is closed, not kept."""
    client = EtcdClient([etcd_server.endpoint], MetadataSettings(), is_tls=False, timeout_seconds=PATIENCE_SECONDS)
    pool = client._members[0]
    put_back, put = pool._put_conn, []

    def closing(connection: Any) -> None:
        client.close()
        put_back(connection)
        put.append(connection)

    pool._put_conn = closing  # type: ignore[method-assign,assignment]
    client.ask("kv/range", {"key": b64encode(b"a").decode(), "limit": 1})
    assert [connection.sock for connection in put] == [None]


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b"<html>some proxy</html>"),
        (200, b"[]"),
        (503, b""),
        (500, b'{"code": 2, "message": "no leader"}'),
        (404, b"nothing here"),
    ],
)
def test_a_server_that_is_no_etcd_is_never_an_empty_store(status: int, body: bytes) -> None:
    """Whatever it answers, it is an error."""

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Nothing on the terminal."""

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.02,))
        serving.start()
        try:
            with EtcdMetadataStore([Endpoint("127.0.0.1", server.server_port)]) as store:
                for read in (lambda: store.get("a"), lambda: store.range("a/"), lambda: store.keys("a/")):
                    with pytest.raises((StoreUnavailableError, DataError)):
                        read()
        finally:
            server.shutdown()
            serving.join()
