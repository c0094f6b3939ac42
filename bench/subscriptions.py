"""Subscriptions: receive and acknowledge 1 KiB messages beside JetStream and Redis; what a hundred of them cost.

All take turns on the same disk, with one consumer that acknowledges each message. JetStream's pulls batches with
explicit acknowledgement, Redis' reads through a group; the clients are bare sockets that parse what they get in bulk,
so it is the servers that are measured. JetStream's time ends when the server says that nothing is unacknowledged.

The second part publishes at full speed, alone and then beside a hundred subscriptions: attached and idle, and attached
with a thread each that takes what comes, a few messages a second (`max_rate_per_second`). A hundred consumers that want
every message of a producer at full speed would need a hundred times its work, which no process has.

python bench/subscriptions.py [--messages 200000] [--rounds 3] [--subscriptions 100] [--dir .] [--json]
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from threading import Thread

import jetstream
import redis_streams
from measuring import alternate, at_least, compared, parser_for, report, scratch_directory, settle, those_here

import tidelog
from tidelog import Topic

BATCH = 500
ONE, MANY = "receive and ack, one by one", f"receive and ack, {BATCH} at a time"
RATE_PER_SECOND = 5
TARGET_PER_SECOND = 100_000


def receive_seconds(directory: Path, value: bytes, count: int, batch: int) -> float:
    """Seconds to receive and acknowledge so many messages through one exclusive subscription."""
    with tidelog.open(directory) as log:
        topic = log.topic("bench/receive")
        for _ in range(count // 10_000 + 1):
            topic.append_many([value] * 10_000)
        topic.flush()
        with topic.subscribe("bench") as sub:
            begin = time.perf_counter()
            if batch == 1:
                for _ in range(count):
                    message = sub.receive(timeout=10)
                    assert message is not None
                    sub.ack(message)
            else:
                got = 0
                while got < count:
                    messages = sub.receive_many(batch, timeout=10)
                    sub.ack_many(messages)
                    got += len(messages)
            return time.perf_counter() - begin


def publish_seconds(topic: Topic, value: bytes, count: int) -> float:
    """Seconds to append so many messages one by one."""
    begin = time.perf_counter()
    for _ in range(count):
        topic.append(value)
    return time.perf_counter() - begin


@contextlib.contextmanager
def subscribed(topic: Topic, subscriptions: int, *, are_busy: bool) -> Iterator[None]:
    """So many subscriptions with a consumer each, which waits in a thread of its own if it is busy."""
    options: dict[str, object] = {"max_rate_per_second": RATE_PER_SECOND} if are_busy else {}
    consumers = [topic.subscribe(f"sub-{number}", start="latest", **options) for number in range(subscriptions)]

    def work(sub: tidelog.Consumer) -> None:
        for message in sub:
            sub.ack(message)

    threads = [Thread(target=work, args=(sub,), daemon=True) for sub in consumers] if are_busy else []
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for sub in consumers:
            sub.close()
        for thread in threads:
            thread.join()


def receiving(scratch: Path, value: bytes, count: int, rounds: int, missing: list[str]) -> dict[str, list[float]]:
    """Messages a second of each side, in turns."""
    numbers = itertools.count()

    def ours(batch: int) -> float:
        directory = scratch / f"receive-{next(numbers)}"
        rate = count / receive_seconds(directory, value, count, batch)
        shutil.rmtree(directory)
        return rate

    contenders = {ONE: lambda: ours(1), MANY: lambda: ours(BATCH)}
    with contextlib.ExitStack() as stack:
        servers = those_here(
            {
                "JetStream": lambda: jetstream.Server(scratch / "jetstream"),
                "Redis": lambda: redis_streams.Server(scratch / "redis"),
            },
            missing,
            stack=stack,
        )
        for name, server in servers.items():
            module = jetstream if isinstance(server, jetstream.Server) else redis_streams
            client = module.Client(server.port)
            stack.callback(client.close)
            contenders[name] = lambda client=client: pulling(client, value, count)  # type: ignore[misc]
        return alternate(contenders, rounds)


def pulling(client: jetstream.Client | redis_streams.Client, value: bytes, count: int) -> float:
    """Messages a second that a server delivers, each acknowledged."""
    client.make_stream()
    client.publish_many(value, count, 1024)
    settle()
    if isinstance(client, redis_streams.Client):
        return count / client.pull_all(count, BATCH, len(value))
    return count / client.pull_all(count, BATCH)


def publishing(scratch: Path, value: bytes, count: int, rounds: int, subscriptions: int) -> dict[str, list[float]]:
    """Messages a second alone, and beside subscriptions that wait or work."""
    found: dict[str, list[float]] = {"alone": [], "idle": [], "busy": []}
    for turn in range(rounds):
        with tidelog.open(scratch / f"publish-{turn}") as log:
            topic = log.topic("bench/publish")
            publish_seconds(topic, value, count // 10)
            settle()
            found["alone"].append(count / publish_seconds(topic, value, count))
            for name in ("idle", "busy"):
                with subscribed(topic, subscriptions, are_busy=name == "busy"):
                    settle()
                    found[name].append(count / publish_seconds(topic, value, count))
    return found


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__)
    parser.add_argument("--messages", type=int, default=200_000, help="in each round and on each side (200000)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side (3)")
    parser.add_argument("--subscriptions", type=int, default=100, help="beside which it is published (100)")
    arguments = parser.parse_args()
    value, count, rounds = os.urandom(512).hex().encode("ascii"), arguments.messages, arguments.rounds
    missing: list[str] = []
    with scratch_directory(arguments.dir) as scratch:
        received = receiving(scratch, value, count, rounds, missing)
        published = publishing(scratch, value, count, rounds, arguments.subscriptions)
    one, subs = median(received[ONE]), arguments.subscriptions
    figures = [
        at_least(ONE, f"{one:,.0f} msg/s", "", one, TARGET_PER_SECOND, " msg/s", rounds=(received[ONE], ())),
        *(
            compared(what, received, peer, 1, ours=what, durability="cursor not synced")
            for what in (ONE, MANY)
            for peer in ("JetStream", "Redis")
            if peer in received
        ),
        compared(f"publish beside {subs} idle subscriptions", published, "alone", 0.7, ours="idle"),
        compared(f"publish beside {subs} that consume", published, "alone", 0.7, ours="busy"),
    ]
    details = {"received": received, "published": published}
    report("subscriptions", figures, details, as_json=arguments.json, missing=missing)


if __name__ == "__main__":
    main()
