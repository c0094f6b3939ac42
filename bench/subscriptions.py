"""Subscriptions: receive and acknowledge 1 KiB messages against JetStream's pull consumer; what a hundred of them cost.

Both sides take turns on the same disk, with one consumer that acknowledges each message. JetStream's pulls batches with
explicit acknowledgement; the client is a bare socket that parses what it gets in bulk, so it is the server that is
measured. Its time is from the first pull until the server says that nothing is unacknowledged.

The second part publishes at full speed, alone and then beside a hundred subscriptions: attached and idle, and attached
with a thread each that takes what comes, a few messages a second (`max_rate_per_second`). A hundred consumers that want
every message of a producer at full speed would need a hundred times its work, which no process has.

python bench/subscriptions.py [--messages 200000] [--rounds 3] [--subscriptions 100] [--dir .] [--json]
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from threading import Thread

from jetstream import Client, Server
from measuring import at_least, parser_for, report, scratch_directory, settle

import tidelog
from tidelog import Topic

BATCH = 500
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


def measure(scratch: Path, arguments: dict[str, int]) -> dict[str, float]:
    """All figures, the sides taking turns."""
    value, count, rounds = os.urandom(1024), arguments["messages"], arguments["rounds"]
    found: dict[str, list[float]] = {}
    with Server(scratch) as server:
        client = Client(server.port)
        for turn in range(rounds):
            client.make_stream()
            client.publish_many(value, count, 1024)
            settle()
            found.setdefault("jetstream", []).append(client.pull_all(count, BATCH))
            for batch in (1, BATCH):
                settle()
                directory = scratch / f"receive-{turn}-{batch}"
                found.setdefault(f"receive-{batch}", []).append(receive_seconds(directory, value, count, batch))
        client.close()
    for turn in range(rounds):
        with tidelog.open(scratch / f"publish-{turn}") as log:
            topic = log.topic("bench/publish")
            publish_seconds(topic, value, count // 10)
            settle()
            found.setdefault("alone", []).append(publish_seconds(topic, value, count))
            for are_busy in (False, True):
                with subscribed(topic, arguments["subscriptions"], are_busy=are_busy):
                    settle()
                    found.setdefault("busy" if are_busy else "idle", []).append(publish_seconds(topic, value, count))
    return {f"{name}_per_second": count / median(times) for name, times in found.items()}


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__)
    parser.add_argument("--messages", type=int, default=200_000, help="in each round and on each side (200000)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side (3)")
    parser.add_argument("--subscriptions", type=int, default=100, help="beside which it is published (100)")
    arguments = parser.parse_args()
    with scratch_directory(arguments.dir) as scratch:
        numbers = {name: getattr(arguments, name) for name in ("messages", "rounds", "subscriptions")}
        found = measure(scratch, numbers)
    one, many, theirs = (found[f"{name}_per_second"] for name in ("receive-1", f"receive-{BATCH}", "jetstream"))
    alone, beside = found["alone_per_second"], f"alone {found['alone_per_second']:,.0f} msg/s"
    idle, busy = found["idle_per_second"], found["busy_per_second"]
    peer, subs = f"JetStream {theirs:,.0f} msg/s", arguments.subscriptions
    figures = [
        at_least("receive and ack, one by one", f"{one:,.0f} msg/s", peer, one, TARGET_PER_SECOND, " msg/s"),
        at_least("the same, against JetStream", f"{one:,.0f} msg/s", peer, one / theirs, 1),
        at_least(f"receive and ack, {BATCH} at a time", f"{many:,.0f} msg/s", peer, many / theirs, 1),
        at_least(f"publish beside {subs} idle subscriptions", f"{idle:,.0f} msg/s", beside, idle / alone, 0.7),
        at_least(f"publish beside {subs} that consume", f"{busy:,.0f} msg/s", beside, busy / alone, 0.7),
    ]
    report("subscriptions", figures, found, as_json=arguments.json)


if __name__ == "__main__":
    main()
