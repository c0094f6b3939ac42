"""Danube's broker beside `tidelog serve`: 1 KiB messages of one client, each with the Python client of its project.

Danube answers before a message is written and does not sync, so it is compared with appends that are accepted; synced
ones have rows of their own beside the same figures of Danube's. Rates count until the last answer with `--window` sends
unanswered, latency is that of one send after the other, both without a consumer: with one in the same process the sends
of Danube's client (0.5.0) did not end.

The broker is built from its repository, as its README says, and found on the path of the shell or by
`--broker FILE`; its client is `pip install danube-client`.

python bench/danube_broker.py [--messages 20000] [--window 256] [--rounds 3] [--broker FILE] [--dir .] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import subprocess
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from jetstream import START_SECONDS, connect, free_port
from measuring import (
    Figure,
    MissingPeerError,
    alternate,
    compared,
    parser_for,
    percentile,
    program,
    report,
    scratch_directory,
)
from remote import VALUE_BYTES, served

import tidelog

REMEDY = "Build it as the README of github.com/danube-messaging/danube says, then --broker FILE"
CLIENT_REMEDY = "its client is not installed: pip install danube-client"
DANUBE, SYNCED = "Danube", "tidelog, synced"
MOST_LATENCIES = 5000
Send = Callable[[bytes], Awaitable[object]]


class Channel(Protocol):
    """A new topic of one contender."""

    send: Send

    async def close(self) -> None:
        """Ends what this has begun."""


class Danube:
    """A broker of our own, in its mode for one node."""

    def __init__(self, directory: Path, broker: Path | None) -> None:
        try:
            import danube
        except ImportError:
            raise MissingPeerError(CLIENT_REMEDY) from None
        self._library: Any = danube
        if broker is not None and not broker.exists():
            raise MissingPeerError(f"there is no {broker}: {REMEDY}")
        command = [str(broker) if broker else program("danube-broker", remedy=REMEDY)]
        self._port, admin, metrics = (free_port() for _ in range(3))
        command += ["--mode", "standalone", "--data-dir", str(directory / "data")]
        command += ["--broker-addr", f"127.0.0.1:{self._port}", "--admin-addr", f"127.0.0.1:{admin}"]
        command += ["--prom-exporter", f"127.0.0.1:{metrics}"]
        directory.mkdir(parents=True)
        self._log = (directory / "broker.log").open("wb")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log, cwd=directory)

    def __enter__(self) -> Self:
        connect(self._port, START_SECONDS).close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait(START_SECONDS)
        self._log.close()

    async def channel(self, name: str) -> Channel:
        """A reliable topic: others lose what nobody receives at once."""
        client = await self._library.DanubeClientBuilder().service_url(f"http://127.0.0.1:{self._port}").build()
        topic, reliable = f"/default/{name}", self._library.DispatchStrategy.RELIABLE
        producer = client.new_producer().with_topic(topic).with_name("bench").with_dispatch_strategy(reliable).build()
        await producer.create()
        return DanubeChannel(producer)


class DanubeChannel:
    """A producer of Danube's client."""

    def __init__(self, producer: Any) -> None:
        self.send: Send = producer.send
        self._producer = producer

    async def close(self) -> None:
        await self._producer.close()


class Tidelog:
    """`tidelog serve`, whose appends are synced or not."""

    def __init__(self, url: str, *, is_synced: bool) -> None:
        self._url = url
        self._is_synced = is_synced

    async def channel(self, name: str) -> Channel:
        """A topic and a connection."""
        client = await tidelog.connect_async(self._url)
        topic = await client.topic_async(f"bench/{name}{'-synced' if self._is_synced else ''}")
        return TidelogChannel(client, topic, is_synced=self._is_synced)


class TidelogChannel:
    """A connection to `tidelog serve`."""

    def __init__(self, client: Any, topic: Any, *, is_synced: bool) -> None:
        self._client = client
        self._topic = topic
        self._is_synced = is_synced

    async def send(self, value: bytes) -> object:
        return await self._topic.append_async(value, sync=self._is_synced)

    async def close(self) -> None:
        await self._client.close_async()


class Bench:
    """What is measured of a contender, each time with a topic of its own."""

    def __init__(self, messages: int, window: int) -> None:
        self._messages = messages
        self._window = window
        self._numbers = itertools.count()
        self._value = os.urandom(VALUE_BYTES)
        self.p99: dict[str, list[float]] = {}

    def rate(self, contender: Danube | Tidelog) -> float:
        """Messages a second until the last answer."""
        return self._with(contender, self._produced)

    def latency(self, name: str, contender: Danube | Tidelog) -> float:
        """The median of microseconds from a send to its answer."""

        async def waited(channel: Channel) -> float:
            times = []
            for _ in range(min(self._messages, MOST_LATENCIES)):
                began = time.perf_counter_ns()
                await channel.send(self._value)
                times.append((time.perf_counter_ns() - began) / 1000)
            times.sort()
            self.p99.setdefault(name, []).append(percentile(times, 99))
            return percentile(times, 50)

        return self._with(contender, waited)

    async def _produced(self, channel: Channel) -> float:
        left = iter(range(self._messages))

        async def sends() -> None:
            for _ in left:
                await channel.send(self._value)

        began = time.perf_counter()
        await asyncio.gather(*(sends() for _ in range(self._window)))
        return self._messages / (time.perf_counter() - began)

    def _with(
        self,
        contender: Danube | Tidelog,
        measure: Callable[[Channel], Awaitable[float]],
    ) -> float:
        async def run() -> float:
            channel = await contender.channel(f"t{next(self._numbers)}")
            try:
                return await measure(channel)
            finally:
                await channel.close()

        return asyncio.run(run())


def measured(
    arguments: argparse.Namespace, missing: list[str]
) -> tuple[list[Figure], dict[str, dict[str, list[float]]]]:
    """All figures, and what they are made of. Without a broker ours are compared with each other alone."""
    bench = Bench(arguments.messages, arguments.window)
    with ExitStack() as running:
        scratch = running.enter_context(scratch_directory(arguments.dir))
        contenders: dict[str, Danube | Tidelog] = {}
        try:
            contenders[DANUBE] = running.enter_context(Danube(scratch / "danube", arguments.broker))
        except MissingPeerError as error:
            missing.append(f"{DANUBE}: {error}")
        url = running.enter_context(served(scratch / "tidelog"))
        contenders |= {"tidelog": Tidelog(url, is_synced=False), SYNCED: Tidelog(url, is_synced=True)}
        rates = alternate({name: lambda one=one: bench.rate(one) for name, one in contenders.items()}, arguments.rounds)
        latencies = alternate(
            {name: lambda name=name, one=one: bench.latency(name, one) for name, one in contenders.items()},
            arguments.rounds,
        )
    in_flight = f"produce, {arguments.window} in flight"
    figures = [compared(f"{in_flight}, accepted beside synced", rates, SYNCED, 0.9)]
    for ours, durability in (("tidelog", "accepted"), (SYNCED, "ours synced, Danube accepted")) if not missing else ():
        said: dict[str, Any] = {"ours": ours, "durability": durability}
        figures.append(compared(in_flight, rates, DANUBE, 1.0, **said))
        for part, times in (("median", latencies), ("p99", bench.p99)):
            said |= {"unit": " us", "smaller_is_better": True}
            figures.append(compared(f"produce one by one, {part}", times, DANUBE, 1.0, **said))
    return figures, {"rates": rates, "latencies_us": latencies, "p99_us": bench.p99}


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__)
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--broker", type=Path, default=None)
    arguments = parser.parse_args()
    missing: list[str] = []
    figures, details = measured(arguments, missing)
    report("danube_broker", figures, details, as_json=arguments.json, missing=missing)


if __name__ == "__main__":
    main()
