"""One client of `tidelog serve` against the embedded log: synced produce in batches, and receive with ack.

Both produce 1 KiB messages in batches to the same disk and take turns, since its speed changes from minute to minute;
medians count. Consuming goes over a WebSocket, in batches, each acknowledged; the last flush is in the time.

python bench/remote.py [--batch 100] [--seconds 2] [--rounds 5] [--dir .] [--json]
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from measuring import at_least, parser_for, report, scratch_directory, settle

import tidelog

VALUE_BYTES = 1024
PRODUCE_TARGET = 0.5
CONSUME_TARGET = 20_000


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """The URL of a server, as a process of its own."""
    command = [sys.executable, "-m", "tidelog.cli.main", "serve", "--dir", str(directory)]
    command += ["--kafka", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        lines = [process.stdout.readline().split() for _ in range(2)]
        yield lines[1][1]
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


def produce(topic: Any, batch: int, seconds: float) -> float:
    """Messages a second, each batch on the disk before the next."""
    messages = [os.urandom(VALUE_BYTES) for _ in range(batch)]
    topic.append_many(messages, sync=True)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        topic.append_many(messages, sync=True)
        count += batch
    return count / (time.perf_counter() - began)


def consume(topic: tidelog.RemoteTopic, name: str, batch: int, messages: int) -> float:
    """Messages a second, received and acknowledged."""
    with topic.subscribe(name) as sub:
        began, count = time.perf_counter(), 0
        while count < messages:
            some = sub.receive_many(batch, 60)
            assert some, "nothing came for a minute"
            sub.ack_many(some)
            count += len(some)
        sub.flush()
        return count / (time.perf_counter() - began)


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    embedded, remote, consumed = [], [], []
    with (
        scratch_directory(arguments.dir) as directory,
        tidelog.open(directory / "embedded") as own,
        served(directory / "served") as url,
        tidelog.connect(url) as client,
    ):
        here, there = own.topic("bench/orders"), client.topic("bench/orders")
        for number in range(arguments.rounds):
            settle()
            embedded.append(produce(here, arguments.batch, arguments.seconds))
            remote.append(produce(there, arguments.batch, arguments.seconds))
            consumed.append(consume(there, f"round-{number}", arguments.batch, min(50_000, there.next_offset)))
    ratio = median(ours / peer for ours, peer in zip(remote, embedded, strict=True))
    speed = median(consumed)
    figures = [
        at_least(
            "synced produce of one client",
            f"{median(remote):,.0f}/s",
            f"embedded {median(embedded):,.0f}/s",
            ratio,
            PRODUCE_TARGET,
        ),
        at_least("receive and ack over WebSocket", f"{speed:,.0f}/s", "", speed, CONSUME_TARGET, "/s"),
    ]
    details = {"embedded": embedded, "remote": remote, "consumed": consumed, "batch": arguments.batch}
    report("remote", figures, details, as_json=arguments.json)


if __name__ == "__main__":
    main()
