"""The step of the demo that serves its log: a client of Kafka, curl, and a browser meet the same messages.

Invariant: the server is a process of its own on ports that are free, and ends with the block that started it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tidelog.cli.demo.steps import Step
from tidelog.errors import InternalError

TOPIC = "demo/served"
COUNT = 1000
_WAIT_SECONDS = 60.0


def why_not() -> str | None:
    """What is missing for this part; None when nothing is."""
    for module, package in (("cramjam", "tidelog[serve]"), ("confluent_kafka", "confluent-kafka")):
        if importlib.util.find_spec(module) is None:
            return f"it needs {package}: pip install '{package}'"
    return None


class Server:
    """`tidelog serve` on a directory."""

    def __init__(self, directory: Path) -> None:
        command = [sys.executable, "-m", "tidelog.cli.main", "serve", "--dir", str(directory)]
        command += ["--kafka", "127.0.0.1:0", "--http", "127.0.0.1:0"]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        lines = [self._process.stdout.readline().split() for _ in range(2)]
        if [len(line) for line in lines] != [2, 2]:
            self._process.kill()
            raise InternalError("the server of the demo did not start")
        self.kafka, self.http = (line[1] for line in lines)

    def stop(self) -> None:
        """Returns when it has closed the log."""
        self._process.terminate()
        self._process.communicate()


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[Server]:
    """A server while the block runs."""
    server = Server(directory)
    try:
        yield server
    finally:
        server.stop()


def meet(server: Server) -> Step:
    """Produces and consumes with a client of Kafka, and reads the same messages over HTTP."""
    values = [b'{"order": %d}' % number for number in range(COUNT)]
    failures = _produce(server, values)
    consumed = _consume(server)
    url = f"{server.http.rstrip('/')}/v1/topics/{TOPIC}/messages?offset=0&limit={COUNT}"
    with urllib.request.urlopen(url, timeout=_WAIT_SECONDS) as answer:
        read = [one["value"].encode() for one in json.load(answer)["messages"]]
    step = Step()
    step.findings = [
        f"confluent-kafka produced and consumed {COUNT:,} messages at {server.kafka}",
        f"curl '{url.replace(str(COUNT), '3')}'",
        f"tidelog.connect({server.http!r}) has the names of an embedded log; a browser finds the console there",
    ]
    step.numbers = {"served": len(consumed)}
    step.proofs["the server has acknowledged every message to the producer"] = failures == 0
    step.proofs["a consumer group of Kafka received every message once, in order"] = consumed == values
    step.proofs["HTTP reads the same messages"] = read == values
    return step


def _produce(server: Server, values: list[bytes]) -> int:
    """How many were not acknowledged."""
    from confluent_kafka import Producer

    failed = 0

    def acknowledged(error: object, _message: object) -> None:
        nonlocal failed
        failed += error is not None

    producer = Producer({"bootstrap.servers": server.kafka})
    for value in values:
        producer.produce(TOPIC.replace("/", "."), value, on_delivery=acknowledged)
    return producer.flush(_WAIT_SECONDS) + failed


def _consume(server: Server) -> list[bytes | None]:
    from confluent_kafka import Consumer

    settings = {"bootstrap.servers": server.kafka, "group.id": "demo", "auto.offset.reset": "earliest"}
    consumer = Consumer(settings)
    consumer.subscribe([TOPIC.replace("/", ".")])
    values: list[bytes | None] = []
    while len(values) < COUNT and (message := consumer.poll(_WAIT_SECONDS)) is not None and not message.error():
        values.append(message.value())
    consumer.close()
    return values


def stay(server: Server) -> None:
    """Leaves it running until Enter or Ctrl-C, where somebody can press them."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return
    print(f"\nThe console is at {server.http} until you press Enter.", flush=True)
    with contextlib.suppress(KeyboardInterrupt, EOFError):
        input()
