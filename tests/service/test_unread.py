"""Clients that do not read their answers are cut; those that read slowly are not."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from tests.service.http.serving import WAIT_SECONDS, Served, serving

from tidelog.service.http.service import HttpSettings
from tidelog.service.unread import UnreadWatch

SECONDS = 0.2
VALUE = "x" * 100_000


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """With 20 MB in a topic, which no buffer of a socket takes."""
    limits = HttpSettings(unread_seconds=SECONDS)
    with serving(tmp_path / "data", limits, unread_seconds=SECONDS) as running:
        for _ in range(10):
            running.produce("shop/orders", *[VALUE] * 20)
        yield running


def connected(address: tuple[str, int]) -> socket.socket:
    """A client with little room for answers."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(WAIT_SECONDS)
    client.connect(address)
    return client


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def is_cut(client: socket.socket) -> bool:
    """Reads to the end, which comes before the answer's."""
    received = 0
    with contextlib.suppress(ConnectionError):
        while data := client.recv(1 << 20):
            received += len(data)
    return received < 15_000_000


READ = "GET /v1/topics/shop/orders/messages?limit=10000&max_bytes=67108864 HTTP/1.1\r\nhost: localhost\r\n\r\n"
TAIL = "GET /v1/topics/shop/orders/tail?offset=earliest HTTP/1.1\r\nhost: localhost\r\n\r\n"
SOCKET = (
    "GET /v1/topics/shop/orders/subscriptions/billing/connect?window=10000 HTTP/1.1\r\nhost: localhost\r\n"
    "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    f"sec-websocket-key: {base64.b64encode(bytes(16)).decode()}\r\n\r\n"
)


@pytest.mark.parametrize("request_text", [READ, TAIL, SOCKET], ids=["answer", "events", "websocket"])
def test_client_of_http_that_reads_nothing_is_cut(
    served: Served, request_text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection is closed, counted and logged, and what it asked for is let go."""
    with connected(served.address) as client:
        client.sendall(request_text.encode())
        wait_until(lambda: served.node._http.cut_clients == 1)
        assert is_cut(client)
    wait_until(lambda: served.node._http.connections == 0)
    assert "read nothing" in caplog.text
    assert b'tidelog_clients_cut_total{side="http"} 1' in served.call("GET", "/metrics").body


def test_client_of_kafka_that_reads_nothing_is_cut(served: Served) -> None:
    """Its requests are no longer read while its answers wait; then it is cut."""
    address = served.node._broker.address
    request = struct.pack(">ihhih", 10, 18, 0, 1, -1)  # ApiVersions
    with connected(address) as client:
        client.settimeout(SECONDS)
        deadline = time.monotonic() + WAIT_SECONDS
        while not served.node._kafka.cut_clients:
            assert time.monotonic() < deadline, "it was not cut"
            with contextlib.suppress(TimeoutError, ConnectionError):
                client.sendall(request * 100)
    wait_until(lambda: not served.node._kafka.statistics().connections)
    assert b'tidelog_clients_cut_total{side="kafka"} 1' in served.call("GET", "/metrics").body


class Buffer:
    """A transport of which only the buffer matters."""

    def __init__(self, waiting: int) -> None:
        self.waiting = waiting
        self.is_aborted = False

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def is_closing(self) -> bool:
        return self.is_aborted

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 1)

    def abort(self) -> None:
        self.is_aborted = True


class Timers:
    """The timers of an event loop, which end when they are told to."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def call_later(self, seconds: float, work: Callable[[], None]) -> Any:
        self.waiting.append(work)
        return self

    def cancel(self) -> None:
        self.waiting.clear()

    def end(self) -> None:
        self.waiting.pop()()


def test_client_that_reads_slowly_is_not_cut() -> None:
    """One byte in the whole time is enough; nothing in it is the end, once."""
    timers, buffer, cuts = Timers(), Buffer(3), list[int]()
    loop, transport = cast(asyncio.AbstractEventLoop, timers), cast(asyncio.Transport, buffer)
    watch = UnreadWatch(loop, transport, 60.0, lambda: cuts.append(1))
    watch.pause()
    watch.pause()
    for left in (2, 1):
        buffer.waiting = left
        timers.end()
        assert not buffer.is_aborted
    watch.resume()
    assert not timers.waiting
    watch.pause()
    timers.end()
    assert (buffer.is_aborted, cuts, timers.waiting) == (True, [1], [])
