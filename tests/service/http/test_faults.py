"""What goes wrong on a network, and a server that is killed: at least once, in order, stored once, nothing acknowledged
returns after a clean close."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.fault_proxy import LOSE_ANSWER, RESET_ANSWER, RESET_REQUEST, TRUNCATE, UNAVAILABLE, FaultProxy
from tests.service.http.serving import WAIT_SECONDS, serving

TOPIC = "/v1/topics/shop/orders"
BILLING = f"{TOPIC}/subscriptions/billing"
BROKEN = (OSError, http.client.HTTPException, ValueError)
ATTEMPTS = 1000


class Stubborn:
    """A client that asks again until it is answered, over a new connection each time."""

    def __init__(self, url: str) -> None:
        self.url = url

    def once(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        address = urlsplit(self.url)
        assert address.hostname is not None
        with contextlib.closing(
            http.client.HTTPConnection(address.hostname, address.port, timeout=WAIT_SECONDS)
        ) as connection:
            sent = None if body is None else json.dumps(body)
            connection.request(method, path, sent, {"content-type": "application/json"})
            response = connection.getresponse()
            content = response.read()
            return response.status, json.loads(content) if content else None

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """The first answer that is one: neither cut, nor a refusal for now."""
        for _ in range(ATTEMPTS):
            with contextlib.suppress(*BROKEN):
                status, answer = self.once(method, path, body)
                if status not in (503, 507):
                    return status, answer
        raise AssertionError(f"{method} {path} was never answered")


class Consumer:
    """Receives by long poll; subscribes again, by its name, when the server does not know it any more."""

    def __init__(self, client: Stubborn) -> None:
        self._client = client
        self._path = ""
        self._seen = 0
        self.handled: list[str] = []

    def _subscribe(self) -> None:
        # The same name: an answer that was lost leaves a session behind, whose place the next one takes.
        wanted = {"consumer": "till", "lease_seconds": 3600}
        status, made = self._client.ask("POST", f"{BILLING}/consumers", wanted)
        assert status == 201, made
        self._path, self._seen = f"{BILLING}/consumers/{made['id']}", 0

    def step(self) -> None:
        """Receives some messages, handles them, and acknowledges them."""
        if not self._path:
            self._subscribe()
        status, received = self._client.ask("POST", f"{self._path}/receive?limit=3&wait=0.2&seen={self._seen}")
        if status == 410:
            self._path = ""
            return
        assert status == 200, received
        self._seen = received["batch"]
        messages = received["messages"]
        self.handled += [one["value"] for one in messages]
        settled = {"messages": [[one["partition"], one["offset"]] for one in messages]}
        status, _ = self._client.ask("POST", f"{self._path}/ack", settled)
        if status == 410:
            self._path = ""

    def close(self) -> None:
        status, answer = self._client.ask("DELETE", self._path)
        assert status in (204, 410), answer  # 410: it was closed, and the answer was lost


def produce(client: Stubborn, number: int) -> None:
    body = {"messages": [{"value": str(number)}]}
    status, answer = client.ask("POST", f"{TOPIC}/messages?producer=till&sequence={number}", body)
    assert status == 200, answer


def check_order(handled: list[str], total: int) -> None:
    """All of them, the first time each in its order."""
    assert list(dict.fromkeys(handled)) == [str(number) for number in range(total)]


def test_broken_network_loses_and_doubles_nothing(tmp_path: Path) -> None:
    """Requests and answers that are cut or lost: each message is stored once, and handled in order, at least once."""
    total = 20
    with serving(tmp_path / "data") as served:
        with FaultProxy(f"http://127.0.0.1:{served.address.port}") as proxy:
            client = Stubborn(proxy.endpoint)
            proxy.misbehave(RESET_REQUEST, LOSE_ANSWER, UNAVAILABLE, TRUNCATE, RESET_ANSWER, every=2)
            consumer = Consumer(client)
            for number in range(total):
                produce(client, number)
                consumer.step()
            while len(set(consumer.handled)) < total:
                consumer.step()
            consumer.close()
            assert set(proxy.met) == {RESET_REQUEST, LOSE_ANSWER, UNAVAILABLE, TRUNCATE, RESET_ANSWER}
        check_order(consumer.handled, total)
        stored = served.ok("GET", f"{TOPIC}/messages")["messages"]
        assert [one["value"] for one in stored] == [str(number) for number in range(total)]
        again = served.ok("POST", f"{BILLING}/consumers", {})
        received = served.ok("POST", f"{BILLING}/consumers/{again['id']}/receive")
        assert received["messages"] == []


class ServerProcess:
    """`tidelog serve`, which can be killed."""

    def __init__(self, directory: Path, port: int = 0) -> None:
        command = [sys.executable, "-m", "tidelog.cli.main", "serve", "--dir", str(directory)]
        command += ["--kafka", "127.0.0.1:0", "--http", f"127.0.0.1:{port}"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        lines = [self._process.stdout.readline() for _ in range(2)]
        self.url = lines[1].split()[1]

    def end(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
        self._process.wait(WAIT_SECONDS)
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextlib.contextmanager
def process(directory: Path, ending: signal.Signals) -> Iterator[Stubborn]:
    """A server that ends so."""
    server = ServerProcess(directory)
    try:
        yield Stubborn(server.url)
    finally:
        server.end(ending)


def test_killed_server_loses_nothing_that_it_answered(tmp_path: Path) -> None:
    """After kill -9 every answered message is there once, and consumers go on, in order; after SIGTERM nothing that was
    acknowledged returns."""
    with process(tmp_path / "data", signal.SIGKILL) as client:
        for number in range(6):
            produce(client, number)
        consumer = Consumer(client)
        consumer.step()
        produce(client, 6)
    handled = consumer.handled
    with process(tmp_path / "data", signal.SIGTERM) as client:
        produce(client, 6)  # its answer might have been lost
        produce(client, 7)
        consumer = Consumer(client)
        while "7" not in consumer.handled:
            consumer.step()
        assert consumer.handled == sorted(consumer.handled, key=int)
        check_order([*handled, *consumer.handled], 8)
    with process(tmp_path / "data", signal.SIGTERM) as client:
        consumer = Consumer(client)
        consumer.step()
        assert consumer.handled == []
        _, stored = client.ask("GET", f"{TOPIC}/messages")
        assert [one["value"] for one in stored["messages"]] == [str(number) for number in range(8)]
