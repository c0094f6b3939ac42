"""A server in this process, and a client that knows nothing of tidelog: the standard library's."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple, TypeVar

import tidelog
from tidelog.service.auth.security import Security
from tidelog.service.http.service import HttpSettings
from tidelog.service.kafka.broker import BrokerSettings
from tidelog.service.node import Node
from tidelog.service.placement import Address

WAIT_SECONDS = 60
LOOPBACK = Address("127.0.0.1", 0)
Result = TypeVar("Result")


class Answer(NamedTuple):
    """What the server said."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Served:
    """A running server. Its event loop runs in a thread of its own; this is used from the test's."""

    def __init__(self, node: Node, address: Address, loop: asyncio.AbstractEventLoop, kafka: Address) -> None:
        self.node = node
        self.address = address
        self.kafka = kafka
        self._loop = loop

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(*self.address, timeout=WAIT_SECONDS)

    def raw(self) -> socket.socket:
        """A connection for bytes that are no request."""
        return socket.create_connection(self.address, timeout=WAIT_SECONDS)

    def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        """One request over a connection of its own; what is not bytes goes as JSON."""
        sent = dict(headers or {})
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            sent.setdefault("content-type", "application/json")
        with contextlib.closing(self.connect()) as connection:
            connection.request(method, path, body, sent)
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, found, response.read())

    def ok(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        """The JSON of an answer that has to be a success."""
        answer = self.call(method, path, body, headers)
        assert 200 <= answer.status < 300, answer
        return answer.json if answer.body else None

    def produce(self, topic: str, *values: str, **query: str) -> list[int]:
        """The offsets of these values."""
        extra = "&".join(f"{name}={value}" for name, value in query.items())
        body = {"messages": [{"value": value} for value in values]}
        offsets: list[int] = self.ok("POST", f"/v1/topics/{topic}/messages?{extra}", body)["offsets"]
        return offsets

    def in_loop(self, work: Callable[[], Any]) -> Any:
        """The result of a call, or of a coroutine, in the server's event loop."""

        async def run() -> Any:
            found = work()
            return await found if asyncio.iscoroutine(found) else found

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(WAIT_SECONDS)


@contextlib.contextmanager
def serving(
    directory: Path,
    http_settings: HttpSettings | None = None,
    security: Security | None = None,
    *,
    store: str | None = None,
    engine: Path | None = None,
    **settings: Any,
) -> Iterator[Served]:
    """A server of a directory, stopped at the end as SIGTERM stops it. Without `security` it asks nobody."""
    ready: Future[Served] = Future()
    ending = asyncio.Event()

    async def run() -> None:
        engines = {} if engine is None else {"main": tidelog.open_engine(engine)}
        node = Node(
            tidelog.open(directory, store=store, metadata=None if store is None else "bucket"),
            BrokerSettings(**settings),
            http_settings=http_settings,
            security=security,
            engines=engines,
        )
        try:
            listening = await node.start(LOOPBACK, LOOPBACK)
            ready.set_result(Served(node, listening.http, asyncio.get_running_loop(), listening.kafka))
            await ending.wait()
        finally:
            await node.stop()

    def in_thread() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    thread = Thread(target=in_thread, name="http-server")
    thread.start()
    try:
        served = ready.result(WAIT_SECONDS)
        try:
            yield served
        finally:
            served._loop.call_soon_threadsafe(ending.set)
    finally:
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive(), "the server did not stop"


class Events:
    """A client of server-sent events."""

    def __init__(self, served: Served, path: str, headers: dict[str, str] | None = None) -> None:
        self._connection = served.connect()
        self._connection.request("GET", path, headers=headers or {})
        self.response = self._connection.getresponse()

    def next(self) -> dict[str, str]:
        """The next event, by field; comments are passed over."""
        fields: dict[str, str] = {}
        while True:
            line = self.response.readline().decode().rstrip("\n")
            if line.startswith(":"):
                continue
            if line:
                name, _, value = line.partition(": ")
                fields[name] = value
            elif fields:
                return fields
            elif self.response.closed:
                raise EOFError

    def wait_until_following(self) -> None:
        """Until the server has found out where the stream begins."""
        assert self.response.status == 200
        assert self.response.readline() == b": follows\n"

    def close(self) -> None:
        self._connection.close()


async def eventually(is_so: Callable[[], bool]) -> None:
    """Waits in an event loop until something is so."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not is_so():
            await asyncio.sleep(0.005)
