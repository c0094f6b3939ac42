"""Appends of 1 KiB messages by one producer, beside NATS JetStream, Redis Streams and the bare disk.

Accepted: nobody syncs at every message. JetStream and Redis count until the last acknowledgement, pipelined over a bare
socket with several sizes of window, of which the best counts; tidelog counts until the last append has returned (it has
its offset and readers see it), and in a row of its own until the last message is in its file, where a killed process
cannot lose it; the bare disk is `write` of 256 messages at a time. Synced: each answer means that the message is on the
disk; all send 256 messages at a time, and the bare disk is `write` and `fdatasync` of so many. Latency is that of one
append after the other, against one message with its acknowledgement after the other.

python bench/append.py [--messages 200000] [--rounds 3] [--dir .] [--json]
"""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import jetstream
import redis_streams
from measuring import (
    Figure,
    alternate,
    at_most,
    compared,
    parser_for,
    percentile,
    report,
    scratch_directory,
    those_here,
)

import tidelog

GROUP = 256
WINDOWS = (256, 1024, 4096)
WARM_UP = 1000
# Synced messages are so much slower that a part of them tells as much.
SYNCED_PART = 10
DISK = "write"
SYNCED_DISK = "write + fdatasync"
Client = jetstream.Client | redis_streams.Client
Rates = dict[str, list[float]]


class Appends:
    """What each contender does with so many messages."""

    def __init__(self, scratch: Path, messages: int) -> None:
        self.scratch = scratch
        self.messages = messages
        self.synced_messages = max(GROUP, messages // SYNCED_PART)
        self.value = os.urandom(512).hex().encode("ascii")  # Redis' client wants no line ends in it
        self._numbers = itertools.count()
        self.in_file: list[float] = []

    def accepted(self) -> float:
        """Messages a second until all are accepted; until all are in the file is noted beside."""
        directory = self._fresh()
        with tidelog.open(directory) as log:
            topic = log.topic("bench/append")
            topic.append_many([self.value] * WARM_UP, sync=True)
            begin = time.perf_counter()
            for _ in range(self.messages):
                topic.append(self.value)
            seconds = time.perf_counter() - begin
            while written_offset(topic) < topic.next_offset:
                time.sleep(0.002)
            self.in_file.append(self.messages / (time.perf_counter() - begin))
        # Everybody begins each turn with the old files gone, so that nobody has to find fresh memory for pages.
        shutil.rmtree(directory)
        return self.messages / seconds

    def synced(self) -> float:
        """Messages a second, each group on the disk before the next."""
        directory = self._fresh()
        with tidelog.open(directory) as log:
            topic, group = log.topic("bench/append"), [self.value] * GROUP
            topic.append_many(group, sync=True)
            begin = time.perf_counter()
            for _ in range(0, self.synced_messages, GROUP):
                topic.append_many(group, sync=True)
            seconds = time.perf_counter() - begin
        shutil.rmtree(directory)
        return self.synced_messages / seconds

    def disk(self, *, is_synced: bool) -> float:
        """What a loop of writes reaches."""
        path, group = self._fresh(), self.value * GROUP
        count = self.synced_messages if is_synced else self.messages
        with path.open("wb", buffering=0) as file:
            begin = time.perf_counter()
            for _ in range(0, count, GROUP):
                file.write(group)
                if is_synced:
                    os.fdatasync(file.fileno())
            seconds = time.perf_counter() - begin
        path.unlink()
        return count / seconds

    def served(self, client: Client, *, is_synced: bool) -> float:
        """Messages a second of a server, with its best window."""
        count = self.synced_messages if is_synced else self.messages
        best = 0.0
        for window in (GROUP,) if is_synced else WINDOWS:
            client.make_stream()
            client.publish_many(self.value, min(WARM_UP, count), window)
            best = max(best, count / client.publish_many(self.value, count, window))
            stored = client.stored_messages()
            assert stored == min(WARM_UP, count) + count, f"the server has {stored} messages"
        return best

    def append_microseconds(self) -> list[float]:
        """How long each of many appends took, one after the other at full speed, sorted."""
        clock, times = time.perf_counter_ns, []
        with tidelog.open(self._fresh()) as log:
            topic = log.topic("bench/latency")
            topic.append_many([self.value] * WARM_UP, sync=True)
            for _ in range(self.messages):
                begin = clock()
                topic.append(self.value)
                times.append((clock() - begin) / 1000)
        return sorted(times)

    def _fresh(self) -> Path:
        return self.scratch / f"turn-{next(self._numbers)}"


def written_offset(topic: tidelog.Topic) -> int:
    """Up to where the messages are in the file."""
    statistics = topic.statistics().log
    assert statistics is not None
    return statistics.written_offset


def clients(scratch: Path, stack: ExitStack, missing: list[str], *, is_synced: bool) -> dict[str, Client]:
    """A connection to each server that is here."""
    kind = "synced" if is_synced else "accepted"
    servers = those_here(
        {
            "JetStream": lambda: jetstream.Server(scratch / f"jetstream-{kind}", is_synced=is_synced),
            "Redis": lambda: redis_streams.Server(scratch / f"redis-{kind}", is_synced=is_synced),
        },
        missing,
        stack=stack,
    )
    found: dict[str, Client] = {}
    for name, server in servers.items():
        module = jetstream if isinstance(server, jetstream.Server) else redis_streams
        found[name] = module.Client(server.port)
        stack.callback(found[name].close)
    return found


def measured(appends: Appends, rounds: int, missing: list[str], *, is_synced: bool) -> Rates:
    """All of one durability in turns."""
    ours = {"tidelog": appends.synced if is_synced else appends.accepted}
    contenders: dict[str, Callable[[], float]] = {
        **ours,
        SYNCED_DISK if is_synced else DISK: lambda: appends.disk(is_synced=is_synced),
    }
    with ExitStack() as stack:
        for name, client in clients(appends.scratch, stack, missing, is_synced=is_synced).items():
            contenders[name] = lambda client=client: appends.served(client, is_synced=is_synced)  # type: ignore[misc]
        return alternate(contenders, rounds)


def latencies(appends: Appends, missing: list[str]) -> dict[str, list[float]]:
    """Microseconds of single messages, sorted."""
    with ExitStack() as stack:
        found = {}
        for name, client in clients(appends.scratch / "latency", stack, missing, is_synced=False).items():
            client.make_stream()
            found[name] = client.publish_one_by_one(appends.value, max(200, appends.messages // 40))
    return {"tidelog": appends.append_microseconds(), **found}


def figures_of(accepted: Rates, in_file: list[float], synced: Rates, single: dict[str, list[float]]) -> list[Figure]:
    """What is compared with what."""
    figures = []
    for peer, target in (("JetStream", 3), ("Redis", 3), (DISK, 0.3)):
        if peer in accepted:
            figures.append(compared("append, 1 KiB", accepted, peer, target, durability="accepted"))
    for peer in ("JetStream", "Redis"):
        if peer in accepted:
            both = {"tidelog": in_file, peer: accepted[peer]}
            figures.append(compared("the same, until in the file", both, peer, 1, durability="in the file"))
    for peer, target in (("JetStream", 3), ("Redis", 1), (SYNCED_DISK, 0.6)):
        if peer in synced:
            figures.append(compared(f"append, {GROUP} at a time", synced, peer, target, durability="synced"))
    p99 = {name: percentile(times, 99) for name, times in single.items()}
    for peer in sorted(p99.keys() - {"tidelog"}):
        words = f"{p99['tidelog']:.1f} us", f"{peer} {p99[peer]:.0f} us"
        figures.append(at_most("p99 of one append", *words, p99["tidelog"], 100, " us", durability="accepted"))
    return figures


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__)
    parser.add_argument("--messages", type=int, default=200_000, help="in each round and on each side (200000)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side (3)")
    arguments = parser.parse_args()
    missing: list[str] = []
    with scratch_directory(arguments.dir) as scratch:
        appends = Appends(scratch, arguments.messages)
        accepted = measured(appends, arguments.rounds, missing, is_synced=False)
        synced = measured(appends, arguments.rounds, [], is_synced=True)
        single = latencies(appends, [])
    figures = figures_of(accepted, appends.in_file, synced, single)
    quantiles = {
        name: {str(percent): percentile(times, percent) for percent in (50, 99, 99.9)} for name, times in single.items()
    }
    details = {"accepted": accepted, "in_file": appends.in_file, "synced": synced, "latency_us": quantiles}
    report("append", figures, details, as_json=arguments.json, missing=missing)


if __name__ == "__main__":
    main()
