"""The HTTP side of `tidelog serve`: appends, a WebSocket consumer, idle subscribers, and a scrape of many topics.

The server is a process of its own. Appends of 1 KiB messages in batches are compared with the same batches appended and
synced by the library in this process, on the same disk in the same run; they take turns, since the speed of a disk
changes from minute to minute. Processor time of the server says what idle subscribers cost.

python bench/http_api.py [--batch 500] [--connections 4] [--seconds 3] [--rounds 3] [--topics 1000] [--dir .] [--json]
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import msgspec
from measuring import Figure, at_least, at_most, parser_for, report, scratch_directory, settle
from websockets.sync.client import connect

import tidelog

VALUE = os.urandom(1024)
PACKED = {"content-type": "application/msgpack"}
IDLE_SECONDS = 20.0
SUBSCRIBERS = 200


class Server:
    """`tidelog serve` in a process of its own."""

    def __init__(self, directory: Path) -> None:
        command = [sys.executable, "-m", "tidelog.cli.main", "serve", "--dir", str(directory)]
        command += ["--kafka", "127.0.0.1:0", "--http", "127.0.0.1:0"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()
        self.url = self._process.stdout.readline().split()[1]
        self.host, port = self.url.removeprefix("http://").rsplit(":", 1)
        self.port = int(port)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=120)

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[Server]:
    """A server, stopped at the end."""
    server = Server(directory)
    try:
        yield server
    finally:
        server.stop()


def embedded(directory: Path, batch: int, seconds: float) -> float:
    """Messages a second of the library: one batch after the other, each synced."""
    with tidelog.open(directory) as log:
        topic = log.topic("bench/embedded")
        messages = [tidelog.Message(VALUE)] * batch
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            topic.append_many(messages, sync=True)
            count += batch
        return count / (time.perf_counter() - began)


def remote(server: Server, batch: int, connections: int, seconds: float) -> float:
    """Messages a second of one client with some requests under way; each is answered when it is synced."""
    body = msgspec.msgpack.encode([[VALUE]] * batch)
    counts = [0] * connections
    go = threading.Barrier(connections + 1)

    def produce(number: int) -> None:
        connection = server.connect()
        connection.connect()
        go.wait()
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            connection.request("POST", "/v1/topics/bench/remote/messages", body, PACKED)
            response = connection.getresponse()
            response.read()
            assert response.status == 200
            counts[number] += batch
        connection.close()

    threads = [threading.Thread(target=produce, args=(number,)) for number in range(connections)]
    for thread in threads:
        thread.start()
    go.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - began)


def consume(server: Server, total: int) -> float:
    """Messages a second that one WebSocket receives and acknowledges, in batches of 100."""
    path = "/v1/topics/bench/remote/subscriptions/bench/connect?format=msgpack&limit=100&window=1000"
    decode, encode = msgspec.msgpack.decode, msgspec.msgpack.encode
    with connect(f"ws://{server.host}:{server.port}{path}", max_size=None, compression=None) as socket:
        decode(socket.recv())
        count, began = 0, time.perf_counter()
        while count < total:
            said = decode(socket.recv())
            if said["op"] == "messages":
                socket.send(encode({"op": "ack", "messages": [[one[0][6], one[0][4]] for one in said["messages"]]}))
                count += len(said["messages"])
        socket.send(encode({"op": "close"}))
        while decode(socket.recv())["op"] != "closed":
            pass
        return count / (time.perf_counter() - began)


def idle(server: Server) -> float:
    """The part of a core that the server uses while so many subscribers wait for messages."""
    with contextlib.ExitStack() as open_sockets:
        for number in range(SUBSCRIBERS):
            path = f"/v1/topics/bench/idle/subscriptions/s{number}/connect?start=latest"
            socket = open_sockets.enter_context(connect(f"ws://{server.host}:{server.port}{path}", compression=None))
            socket.recv()
        time.sleep(2)
        before = server.cpu_seconds()
        time.sleep(IDLE_SECONDS)
        return (server.cpu_seconds() - before) / IDLE_SECONDS


def scrape(server: Server, topics: int) -> list[float]:
    """Seconds of scrapes with so many open topics."""
    connection = server.connect()
    for number in range(topics):
        connection.request(
            "POST", f"/v1/topics/many/t{number}/messages?sync=false", b"x", {"content-type": "text/plain"}
        )
        connection.getresponse().read()
    times = []
    for _ in range(7):
        began = time.perf_counter()
        connection.request("GET", "/metrics")
        size = len(connection.getresponse().read())
        times.append(time.perf_counter() - began)
    assert size > topics * 100
    return sorted(times)


def main() -> None:
    """Measures, and prints what came of it."""
    parser = parser_for(__doc__)
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--topics", type=int, default=1000)
    arguments = parser.parse_args()
    batch, seconds = arguments.batch, arguments.seconds
    figures: list[Figure] = []
    with scratch_directory(arguments.dir) as scratch:
        ours, one, theirs = [], [], []
        with serving(scratch / "served") as server:
            remote(server, batch, 1, 0.5)
            for number in range(arguments.rounds):
                settle()
                theirs.append(embedded(scratch / f"embedded-{number}", batch, seconds))
                settle()
                ours.append(remote(server, batch, arguments.connections, seconds))
                settle()
                one.append(remote(server, batch, 1, seconds))
            for what, rates in ((f"{arguments.connections} connections", ours), ("1 connection", one)):
                ratio = median(mine / other for mine, other in zip(rates, theirs, strict=True))
                told = f"{median(rates):,.0f}/s over HTTP"
                peer = f"{median(theirs):,.0f}/s by the library"
                figures.append(at_least(f"append {batch} x 1 KiB, synced, {what}", told, peer, ratio, 0.5))
            rate = consume(server, 100_000)
            figures.append(at_least("receive + ack over WebSocket", f"{rate:,.0f}/s", "-", rate / 20_000, 1.0))
            part = idle(server)
            figures.append(
                at_most(f"{SUBSCRIBERS} idle subscribers", f"{part:.1%} of a core", "-", part * 100, 5, " %")
            )
        with serving(scratch / "many") as server:
            times = scrape(server, arguments.topics)
            told = f"{median(times) * 1000:.0f} ms"
            figures.append(at_most(f"scrape of {arguments.topics} topics", told, "-", median(times) * 1000, 200, " ms"))
    report("http", figures, json.loads("{}"), as_json=arguments.json)


if __name__ == "__main__":
    main()
