"""The engine and its store, a local SeaweedFS: scans against a plain download, latency, a store that hangs, restores.

    python bench/engine_cold.py [--only scan] [--objects 100000] [--value-bytes 1024] [--compacted] [--rounds 5]

scan      All objects in the order of keys from the store, by an engine without a disk, against obstore's ranges of as
          many bytes of the same objects. `--compacted` has Spark put the values in the order of keys first; without it
          they were put in that order.
latency   200 objects that have left the disk, read at once by tasks and by threads, 50 ms away.
hang      The store is stopped (SIGSTOP): hot reads, applies, and opening.
reader    The first read of an engine that is opened for reading alone, from the store.
restore   The first read of a lazy restore, and all of it, against one that is not lazy.
space     Overwrites with `keep_versions=1`: the most that disk and bucket take, of the bytes that are alive. Only if
          asked for: it takes minutes. `--overwrites 10000000 --least-value-bytes 100 [--without-store]`

Needs `tidelog[test]` for the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cold_object import plain_ranges
from measuring import Figure, at_least, at_most, parser_for, percentile, report, scratch_directory, settle
from obstore.store import S3Store
from store_server import Store, store_server

import tidelog

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.servers import ACCESS_KEY_ID, BUCKET, SECRET_ACCESS_KEY, Server

PARTS = ["scan", "latency", "hang", "reader", "restore", "space"]
KEYS_AND_SECRET: dict[str, Any] = {
    "store_access_key_id": ACCESS_KEY_ID,
    "store_secret_access_key": SECRET_ACCESS_KEY,
}
BATCH = 1000
RANGE_BYTES = 8 << 20
AT_ONCE = 4
COLD_READS = 200
LATENCY_SECONDS = 0.05


class Measured:
    """Seconds, and seconds of the CPU, of the best round."""

    def __init__(self) -> None:
        self.seconds = self.cpu_seconds = float("inf")

    def add(self, work: Callable[[], object]) -> None:
        """Does it once more."""
        begin, cpu = time.perf_counter(), time.process_time()
        work()
        self.seconds = min(self.seconds, time.perf_counter() - begin)
        self.cpu_seconds = min(self.cpu_seconds, time.process_time() - cpu)


def fill(directory: Path, where: dict[str, Any], objects: int, value_bytes: int, *, shuffled: bool = False) -> None:
    """An engine whose objects have left the disk."""
    noise, chance = os.urandom(1 << 20), random.Random(7)
    numbers = list(range(objects))
    if shuffled:
        chance.shuffle(numbers)
    with tidelog.open_engine(
        directory, rotate_max_bytes=4 << 20, local_retention_bytes=0, ship_interval_seconds=3600, **where
    ) as engine:
        engine.apply(1, tidelog.CreateBucket("b"))
        for first in range(0, objects, BATCH):
            places = [chance.randrange(len(noise) - value_bytes) for _ in range(BATCH)]
            some = zip(range(first, first + BATCH), numbers[first : first + BATCH], places, strict=False)
            engine.apply_many(
                [(2 + at, tidelog.PutObject("b", f"key-{n:012d}", noise[p : p + value_bytes])) for at, n, p in some]
            )
        engine.update_low_water_mark(engine.applied_seq)
        engine.ship()
        engine.create_checkpoint()
        engine.ship()  # the files before the checkpoint leave the disk


def compact(url: str, where: dict[str, Any]) -> None:
    """Puts the values in the order of keys."""
    from tidelog.pipeline.address import find_engine
    from tidelog.pipeline.jobs.engine.compact import compact_engine

    spark = tidelog.spark_session("bench", "local[2]")
    try:
        done = compact_engine(spark, find_engine(url, **{key: where[key] for key in where if key != "store"}))
        assert done.is_good, done
    finally:
        spark.stop()


def download(client: S3Store, prefix: str, wanted: int) -> int:
    """Plain ranges of the largest objects, so many bytes of them."""
    listed = [one for some in client.list(prefix) for one in some]
    found = 0
    for one in sorted(listed, key=lambda one: -one["size"]):
        for data in plain_ranges(client, one["path"], min(one["size"], wanted - found), RANGE_BYTES, AT_ONCE):
            found += len(data)
        if found == wanted:
            break
    return found


def scans(server: Store, root: Path, where: dict[str, Any], arguments: Any) -> list[Figure]:
    """A scan of everything, and a download of as many bytes."""
    objects, value_bytes = arguments.objects, arguments.value_bytes
    fill(root / "scan", where, objects, value_bytes, shuffled=arguments.compacted)
    if arguments.compacted:
        compact(where["store"], where)
    client = S3Store(
        BUCKET,
        config={"endpoint": server.endpoint, "region": "us-east-1"},
        access_key_id=ACCESS_KEY_ID,
        secret_access_key=SECRET_ACCESS_KEY,
        client_options={"allow_http": True},
    )
    prefix = urlsplit(where["store"]).path.strip("/")
    ours, plain = Measured(), Measured()

    def scan_all() -> None:
        with tidelog.open_engine(read_only=True, **where) as reader:
            assert sum(len(one.data or b"") for one in reader.scan("b", with_values=True)) == objects * value_bytes

    for _ in range(arguments.rounds):
        plain.add(lambda: download(client, prefix, objects * value_bytes))
        ours.add(scan_all)
    rate, peer = (objects * value_bytes / one.seconds / 1e6 for one in (ours, plain))
    cpu = f"CPU {ours.cpu_seconds:.2f} s"
    how = "compacted" if arguments.compacted else "as put"
    return [
        at_least(
            f"cold scan of {objects:,} x {value_bytes:,} bytes, {how}",
            f"{rate:,.0f} MB/s ({cpu})",
            f"plain ranges {peer:,.0f} MB/s (CPU {plain.cpu_seconds:.2f} s)",
            rate / peer,
            0.5,
        )
    ]


async def _late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
    """Passes bytes on, each so much later than it came, however many follow."""
    loop, pending = asyncio.get_running_loop(), set[asyncio.TimerHandle]()
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            if seconds:
                pending.add(loop.call_later(seconds, writer.write, data))
            else:
                writer.write(data)
                await writer.drain()
    loop.call_later(seconds, writer.close)


def _far_away(endpoint: str, told: Connection) -> None:
    """A way to a server that takes 50 ms: requests are passed on so much later."""
    address = urlsplit(endpoint)

    async def serve() -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            back, out = await asyncio.open_connection(address.hostname, address.port)
            await asyncio.gather(_late(reader, out, LATENCY_SECONDS), _late(back, writer, 0))

        server = await asyncio.start_server(accept, "127.0.0.1", 0, backlog=1024)
        told.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


@contextlib.contextmanager
def far_away(server: Store) -> Iterator[str]:
    """The endpoint of the same server, 50 ms away."""
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_far_away, args=(server.endpoint, theirs), daemon=True)
    child.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        child.kill()
        child.join()


def latency(server: Store, root: Path, where: dict[str, Any], arguments: Any) -> list[Figure]:
    """Many cold reads at once, far away."""
    objects = 20 * COLD_READS * (2 * arguments.rounds + 1)
    fill(root / "latency", where, objects, 1024)
    tasks, threads = Measured(), Measured()
    numbers = random.Random(5).sample(range(objects // 2), objects // 2)  # the newest are on the disk still
    keys = iter([f"key-{number:012d}" for number in numbers])

    def some() -> list[str]:
        return [next(keys) for _ in range(COLD_READS)]

    with far_away(server) as endpoint:
        away = {**where, "store_endpoint": endpoint, "open_store_wait_seconds": 30}
        with tidelog.open_engine(root / "latency", **away) as engine, ThreadPoolExecutor(COLD_READS) as pool:
            assert engine.read("b", next(keys)).tier == "cold"

            async def read_all() -> None:
                await asyncio.gather(*(engine.read_async("b", key) for key in some()))

            for _ in range(arguments.rounds):
                tasks.add(lambda: asyncio.run(read_all()))
                threads.add(lambda: list(pool.map(lambda key: engine.read("b", key), some())))
    return [
        at_most(
            f"{COLD_READS} cold reads at once, 50 ms away, {how}",
            f"{one.seconds:.3f} s",
            f"CPU {one.cpu_seconds:.3f} s",
            one.seconds,
            0.5,
            " s",
        )
        for how, one in (("tasks", tasks), ("threads", threads))
    ]


def hang(server: Store, root: Path, where: dict[str, Any], arguments: Any) -> list[Figure]:
    """What goes on while the store is stopped."""
    assert isinstance(server, Server), "only a server of its own may be stopped"
    directory, value = root / "hang", os.urandom(1024)
    with tidelog.open_engine(directory, ship_interval_seconds=0.2, **where) as engine:
        engine.apply(1, tidelog.CreateBucket("b"))
        engine.apply_many([(2 + n, tidelog.PutObject("b", f"key-{n:06d}", value)) for n in range(20_000)])
        engine.update_low_water_mark(10_000)
        engine.ship()
        engine.update_low_water_mark(20_000)
        server.pause()
        try:
            time.sleep(1)  # what is under way hangs now
            chance, reads, applies = random.Random(3), list[float](), list[float]()
            for number in range(20_000):
                key = f"key-{chance.randrange(20_000):06d}"
                begin = time.perf_counter()
                engine.read("b", key)
                reads.append(time.perf_counter() - begin)
                if not number % 100:
                    begin = time.perf_counter()
                    engine.apply(engine.applied_seq + 1, tidelog.PutObject("b", f"new-{number}", value))
                    applies.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            engine.close()
            closing = time.perf_counter() - begin
            begin = time.perf_counter()
            with tidelog.open_engine(directory, **where) as again:
                opening = time.perf_counter() - begin
                assert again.read("b", "new-0").data == value
                again.apply(again.applied_seq + 1, tidelog.PutObject("b", "newest", value))
        finally:
            server.resume()
    reads.sort()
    applies.sort()
    p99, p50 = (percentile(reads, percent) * 1e3 for percent in (99, 50))
    apply_p99, apply_p50 = (percentile(applies, percent) * 1e3 for percent in (99, 50))
    return [
        at_most("store stopped: hot read, p99", f"{p99:.3f} ms", f"p50 {p50:.3f} ms", p99, 1, " ms"),
        at_most("store stopped: apply, p99", f"{apply_p99:.2f} ms", f"p50 {apply_p50:.2f} ms", apply_p99, 100, " ms"),
        at_most("store stopped: opening", f"{opening:.2f} s", f"closing {closing:.2f} s", opening, 3, " s"),
    ]


def filled_once(server: Store, root: Path, objects: int) -> dict[str, Any]:
    """Where an engine of many small objects is, which is filled for the first who asks."""
    where = {"store": server.url("lost"), "store_endpoint": server.endpoint, **KEYS_AND_SECRET}
    if not (root / "lost").exists():
        fill(root / "lost", where, objects, 100)
    return where


def readers(server: Store, root: Path, where: dict[str, Any], arguments: Any) -> list[Figure]:
    """The first read of one that has no disk and claims nothing."""
    objects = arguments.restore_objects
    where, first = filled_once(server, root, objects), Measured()
    key = f"key-{objects // 2:012d}"

    def read_first() -> None:
        with tidelog.open_engine(read_only=True, **where) as reader:
            assert len(reader.read("b", key).data) == 100

    for _ in range(arguments.rounds):
        settle()
        first.add(read_first)
    what = f"read-only on {objects:,} objects: first read"
    return [at_most(what, f"{first.seconds:.2f} s", f"CPU {first.cpu_seconds:.2f} s", first.seconds, 1, " s")]


def restores(server: Store, root: Path, where: dict[str, Any], arguments: Any) -> list[Figure]:
    """All objects of an engine onto a new disk."""
    objects = arguments.restore_objects
    where = filled_once(server, root, objects)
    key = f"key-{objects // 2:012d}"
    lazy, first, whole = Measured(), Measured(), Measured()
    for number in range(arguments.rounds):
        settle()

        def restore(number: int = number) -> None:
            tidelog.restore_engine(root / f"whole-{number}", take_over=True, **where).close(checkpoint=False)

        def restore_lazily(number: int = number) -> None:
            restoring: list[Any] = []

            def read_first() -> None:
                restoring.append(tidelog.restore_engine(root / f"lazy-{number}", take_over=True, lazy=True, **where))
                assert len(restoring[0].read("b", key).data) == 100

            first.add(read_first)
            restoring[0].wait().close(checkpoint=False)

        whole.add(restore)
        settle()
        lazy.add(restore_lazily)
        for name in ("whole", "lazy"):
            shutil.rmtree(root / f"{name}-{number}")
    return [
        at_most(f"lazy restore of {objects:,}: first read", f"{first.seconds:.2f} s", "", first.seconds, 1, " s"),
        at_most(
            f"lazy restore of {objects:,}: all of it",
            f"{lazy.seconds:.1f} s (CPU {lazy.cpu_seconds:.1f} s)",
            f"not lazy {whole.seconds:.1f} s (CPU {whole.cpu_seconds:.1f} s)",
            lazy.seconds / whole.seconds,
            1.1,
        ),
    ]


def bytes_on_disk(directory: Path) -> int:
    """What the files below a directory take; one may go while they are counted."""
    found = 0
    for one in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            found += one.stat().st_blocks * 512 if one.is_file() else 0
    return found


def space(server: Store, root: Path, where: dict[str, Any], arguments: Any) -> list[Figure]:
    """Looked at a thousand times, from the moment on when every key was put once."""
    from tidelog.config import load_engine_config
    from tidelog.store.urls import open_store

    overwrites, keys, directory = arguments.overwrites, arguments.keys, root / "space"
    least, most = arguments.least_value_bytes or arguments.value_bytes, arguments.value_bytes
    # Of few live bytes as much garbage is collected as of many: a file of the log at a time.
    settings: dict[str, Any] = {
        "keep_versions": 1,
        "rotate_max_bytes": max(64 << 10, min(100_000_000, keys * most // 4)),
    }
    bucket = None
    if not arguments.without_store:
        settings |= {"ship_interval_seconds": 1, "local_retention_bytes": 0, **where}
        config = load_engine_config(None, {}, {"dir": directory, **where})
        bucket = open_store(where["store"], config.object_store)
    chance, noise, sizes, live = random.Random(7), os.urandom(1 << 20), [0] * keys, 0
    disks, buckets = list[float](), list[float]()
    look_every = max(BATCH, overwrites // 1000 // BATCH * BATCH)
    begin = time.perf_counter()
    with tidelog.open_engine(directory, **settings) as engine:
        engine.apply(1, tidelog.CreateBucket("b"))
        for first in range(0, keys + overwrites, BATCH):
            entries = list[tuple[int, tidelog.PutObject]]()
            for number in range(first, min(first + BATCH, keys + overwrites)):
                key = number if number < keys else chance.randrange(keys)
                size = chance.randint(least, most)
                live += size - sizes[key]
                sizes[key] = size
                place = chance.randrange(len(noise) - size)
                entries.append((2 + number, tidelog.PutObject("b", f"key-{key:012d}", noise[place : place + size])))
            engine.apply_many(entries)
            engine.update_low_water_mark(engine.applied_seq)
            if first >= keys and not first % look_every:
                of = live + keys * len("key-000000000000")
                disks.append(bytes_on_disk(directory) / of)
                if bucket is not None:
                    buckets.append(sum(info.size for info in bucket.list()) / of)
        seconds = time.perf_counter() - begin
        moved = engine.statistics().garbage
    amount = f"{least:,} to {most:,}" if least < most else f"{most:,}"
    how = f"{overwrites:,} overwrites of {keys:,} x {amount} bytes: most bytes"
    written = (keys + overwrites) * (least + most) / 2
    note = "" if moved is None else f", {moved.bytes_moved / written:.2f} bytes moved a byte written"
    return [
        at_most(
            f"{how} {what}",
            f"{max(found):.2f} of the live ones (mean {sum(found) / len(found):.2f}, last {found[-1]:.2f})",
            f"live {live / 1e6:,.0f} MB; {overwrites / seconds:,.0f}/s{note}",
            max(found),
            3,
        )
        for what, found in (("on disk", disks), ("in the bucket", buckets))
        if found
    ]


def main() -> None:
    """Runs it."""
    parser = parser_for(__doc__)
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--objects", type=int, default=100_000)
    parser.add_argument("--value-bytes", type=int, default=1024)
    parser.add_argument("--restore-objects", type=int, default=1_000_000)
    parser.add_argument("--overwrites", type=int, default=1_000_000)
    parser.add_argument("--least-value-bytes", type=int, help="of overwrites; default: as --value-bytes")
    parser.add_argument("--without-store", action="store_true", help="overwrites of an engine that has none")
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--compacted", action="store_true", help="have Spark compact before the scan")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    measures = {
        "scan": scans,
        "latency": latency,
        "hang": hang,
        "reader": readers,
        "restore": restores,
        "space": space,
    }
    figures: list[Figure] = []
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(scratch_directory(arguments.dir))
        server = stack.enter_context(store_server(root))
        for part in arguments.only or PARTS[:-1]:
            where = {"store": server.url(part), "store_endpoint": server.endpoint, **KEYS_AND_SECRET}
            figures += measures[part](server, root, where, arguments)
    report("engine_cold", figures, {"load": os.getloadavg()[0]}, as_json=arguments.json)


if __name__ == "__main__":
    main()
