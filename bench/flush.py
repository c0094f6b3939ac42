"""Appends that the store acknowledges: how long they take and how many objects they cost, with 10 to 1,000 topics.

In each round every topic appends one message and waits for the store; all of them share the flushes. SeaweedFS on this
machine is the store, SQLite the metadata. A PUT of the same bytes to the same store is what a flush is compared with.

python bench/flush.py [--topics 10,100,1000] [--rounds 30] [--dir .] [--json]
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from measuring import Figure, at_most, parser_for, report, scratch_directory
from store_server import Store, store_server

import tidelog
from tidelog.store.urls import open_store

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.servers import ACCESS_KEY_ID, SECRET_ACCESS_KEY

FLUSHES_A_SECOND = 10
VALUE = b"x" * 1024


async def rounds(topics: list[tidelog.Topic], count: int) -> list[float]:
    """Seconds from each append to its answer."""
    taken: list[float] = []

    async def one(topic: tidelog.Topic) -> None:
        begin = time.perf_counter()
        await topic.append_async(VALUE, sync=True)
        taken.append(time.perf_counter() - begin)

    for _ in range(count):
        await asyncio.gather(*(one(topic) for topic in topics))
    return taken


def measure(directory: Path, server: Store, number: int, count: int) -> dict[str, Any]:
    """One number of topics."""
    settings: dict[str, Any] = {
        "store": server.url(f"flush-{number}"),
        "store_endpoint": server.endpoint,
        "store_access_key_id": ACCESS_KEY_ID,
        "store_secret_access_key": SECRET_ACCESS_KEY,
        "durability": "shipped",
        "ship_max_delay_seconds": 3600,
    }
    with tidelog.open(directory / str(number), **settings) as log:
        topics = [log.topic(f"bench/topic-{at}") for at in range(number)]
        asyncio.run(rounds(topics, 2))
        tier = topics[0].statistics().tier
        assert tier is not None
        assert tier.flushes is not None
        before, begin = tier.flushes, time.perf_counter()
        taken = asyncio.run(rounds(topics, count))
        seconds = time.perf_counter() - begin
        tier = topics[0].statistics().tier
        assert tier is not None
        assert tier.flushes is not None
        flushes = tier.flushes.flushes - before.flushes
        size = (tier.flushes.bytes - before.bytes) // max(1, flushes)
    store = open_store(server.url(f"flush-{number}"), server.settings())
    puts = []
    for at in range(20):
        begin = time.perf_counter()
        store.put(f"bench/{at}", b"x" * size)
        puts.append(time.perf_counter() - begin)
    return {
        "topics": number,
        "append_ms_p50": round(median(taken) * 1000, 1),
        "append_ms_p99": round(quantiles(taken, n=100)[98] * 1000, 1),
        "flushes_per_second": round(flushes / seconds, 1),
        "messages_per_flush": round(len(taken) / max(1, flushes), 1),
        "bytes_per_flush": size,
        "plain_put_ms_p50": round(median(puts) * 1000, 1),
    }


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__)
    parser.add_argument("--topics", default="10,100,1000")
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    details = []
    with scratch_directory(arguments.dir) as directory, store_server(directory) as server:
        for number in map(int, arguments.topics.split(",")):
            details.append(measure(directory, server, number, arguments.rounds))
    figures: list[Figure] = [
        at_most(
            f"flushes a second, {one['topics']} topics",
            f"append p50 {one['append_ms_p50']} ms, p99 {one['append_ms_p99']} ms",
            f"a plain PUT of {one['bytes_per_flush']} bytes {one['plain_put_ms_p50']} ms",
            one["flushes_per_second"],
            FLUSHES_A_SECOND,
            unit="/s",
            durability="in the store",
        )
        for one in details
    ]
    report("flush", figures, details, as_json=arguments.json)


if __name__ == "__main__":
    main()
