"""The engine against RocksDB, LMDB, SQLite and SlateDB: the same durable batches and the same reads, in one run.

    python bench/engine.py [--entries 100000] [--rounds 3] [--only puts] [--recovery-megabytes 1024]

Puts are batches of 256 with one sync each, keys in random order. Reads are of random keys, hot. Recovery applies
entries without a checkpoint, is killed, and is opened again; beside it the kernel scans the same files.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

from engine_peers import LmdbPeer, Pair, Peer, RocksPeer, SlatePeer, SqlitePeer
from measuring import (
    Figure,
    at_least,
    at_most,
    compared,
    parser_for,
    percentile,
    report,
    scratch_directory,
    settle,
    those_here,
)

import tidelog
from tidelog.log.binding import BINDING_BYTES
from tidelog.log.frame import scan

BATCH = 256
NEVER_SECONDS = 86400
PARTS = ["puts", "large", "versions", "listing", "recovery", "zipf", "stream", "scan"]
TARGETS = {"rocksdb": 0.5, "lmdb": 1.0, "sqlite": 3.0, "slatedb": 20.0}
PEERS: dict[str, Callable[[Path], Peer]] = {
    "rocksdb": RocksPeer,
    "lmdb": LmdbPeer,
    "sqlite": SqlitePeer,
    "slatedb": SlatePeer,
}


class EnginePeer:
    """The engine, seen as one of them."""

    def __init__(self, directory: Path) -> None:
        self.engine = tidelog.open_engine(directory, checkpoint_interval_seconds=NEVER_SECONDS)
        self.engine.apply(1, tidelog.CreateBucket("b"))

    def put_batch(self, pairs: Sequence[Pair]) -> None:
        seq = self.engine.applied_seq + 1
        entries = [(seq + number, tidelog.PutObject("b", key, value)) for number, (key, value) in enumerate(pairs)]
        self.engine.apply_many(entries)

    def get(self, key: str) -> bytes:
        return self.engine.read("b", key).data

    def listed(self) -> int:
        return len(list(self.engine.list_objects("b")))

    def scanned(self) -> int:
        return sum(1 for _ in self.engine.scan("b", with_values=True))

    def close(self) -> None:
        self.engine.close()


def workload(entries: int, size: int) -> list[list[Pair]]:
    """Batches of pairs, in random order of keys."""
    noise = os.urandom(1 << 20)
    chance = random.Random(7)
    keys = [f"key-{number:012d}" for number in range(entries)]
    chance.shuffle(keys)
    start = [chance.randrange(len(noise) - size) for _ in range(entries)] if size < len(noise) else [0] * entries
    pairs = [(key, noise[begin : begin + size]) for key, begin in zip(keys, start, strict=True)]
    return [pairs[begin : begin + BATCH] for begin in range(0, entries, BATCH)]


def puts_per_second(peer: Peer, batches: list[list[Pair]]) -> float:
    """The whole workload, each batch durable."""
    begin = time.perf_counter()
    for batch in batches:
        peer.put_batch(batch)
    return sum(map(len, batches)) / (time.perf_counter() - begin)


def get_median_us(get: Callable[[str], object], keys: list[str]) -> float:
    """The median of single reads."""
    times = []
    for key in keys:
        begin = time.perf_counter()
        get(key)
        times.append(time.perf_counter() - begin)
    return percentile(sorted(times), 50) * 1e6


class Measured:
    """What one store did in each round."""

    def __init__(self) -> None:
        self.puts: list[float] = []
        self.gets_us: list[float] = []

    @property
    def put_rate(self) -> float:
        return statistics.median(self.puts)

    @property
    def get_us(self) -> float:
        return statistics.median(self.gets_us)


def installed(names: Iterable[str], missing: list[str]) -> list[str]:
    """Those of the peers that are here; the others are named."""
    modules = {"rocksdb": "rocksdict", "lmdb": "lmdb", "sqlite": "sqlite3", "slatedb": "slatedb"}
    return list(those_here({name: partial(import_module, modules[name]) for name in names}, missing))


def compare(root: Path, entries: int, size: int, rounds: int, names: list[str]) -> dict[str, Measured]:
    """Every store in turn, so that all meet the same machine."""
    batches = workload(entries, size)
    few = batches[: max(1, len(batches) // 20)]
    keys = random.Random(3).sample([key for batch in few for key, _ in batch], min(2000, len(few) * BATCH))
    found = {name: Measured() for name in ["engine", *names]}
    for _ in range(rounds):
        for name, measured in found.items():
            settle()
            directory = root / name
            peer: Peer = EnginePeer(directory) if name == "engine" else PEERS[name](directory)
            # SlateDB takes a hundred times as long: a part of the work tells as much.
            measured.puts.append(puts_per_second(peer, few if name == "slatedb" else batches))
            measured.gets_us.append(get_median_us(peer.get, keys))
            peer.close()
            shutil.rmtree(directory)
    return found


def put_figures(found: dict[str, Measured]) -> list[Figure]:
    """1 KiB puts, and reads."""
    ours, figures = found["engine"], []
    for name, target in TARGETS.items():
        if name in found:
            rounds = {"tidelog": ours.puts, name: found[name].puts}
            what = f"1 KiB puts, batches of {BATCH}"
            figures.append(compared(what, rounds, name, target, unit="/s", durability="synced"))
    if "rocksdb" in found:
        gets = (ours.gets_us, found["rocksdb"].gets_us)
        words = f"{ours.get_us:.1f} us", f"rocksdb {found['rocksdb'].get_us:.1f} us"
        ratio = ours.get_us / found["rocksdb"].get_us
        figures.append(at_most("hot get, median", *words, ratio, 2, rounds=gets))
    return figures


def old_versions(root: Path) -> Figure:
    """Reading an old version costs what reading the newest does."""
    peer = EnginePeer(root / "versions")
    keys = [f"key-{number:06d}" for number in range(4096)]
    for _ in range(8):
        peer.put_batch([(key, os.urandom(1024)) for key in keys])
    middle = peer.engine.applied_seq // 2
    chosen = random.Random(5).sample(keys, 2000)
    newest, old = [], []
    for _ in range(5):
        newest.append(get_median_us(peer.get, chosen))
        old.append(get_median_us(lambda key: peer.engine.read("b", key, middle), chosen))
    peer.close()
    ours, latest = statistics.median(old), statistics.median(newest)
    return at_most("get as of an old seq", f"{ours:.1f} us", f"newest {latest:.1f} us", ours / latest, 1.2)


def listings(root: Path, entries: int, rounds: int) -> list[Figure]:
    """Objects of 200 bytes: what listing all of them costs, and what they take on the disk once the store is closed."""
    batches, size = workload(entries, 200), entries * 200
    found: dict[str, tuple[float, float]] = {}
    for name in ["engine", "rocksdb", "lmdb", "sqlite"]:
        directory = root / name
        try:
            peer: Peer = EnginePeer(directory) if name == "engine" else PEERS[name](directory)
        except ImportError:
            continue  # those of the extra `bench` may be missing; SQLite never is
        puts_per_second(peer, batches)
        seconds = min(timed(peer.listed) for _ in range(rounds))
        peer.close()
        found[name] = seconds / entries * 1e6, disk_bytes(directory) / size
        shutil.rmtree(directory)
    us, times = found.pop("engine")
    peers_us = ", ".join(f"{name} {listed:.2f} us" for name, (listed, _) in found.items())
    peers_times = ", ".join(f"{name} {taken:.2f}" for name, (_, taken) in found.items())
    return [
        at_most("listing, an object", f"{us:.2f} us", peers_us, us, 2, " us"),
        at_most("bytes on the disk, of 200 an object", f"{times:.2f}", peers_times, times, 1.8),
    ]


def timed(work: Callable[[], object]) -> float:
    """Seconds that some work takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def disk_bytes(directory: Path) -> int:
    """What a directory takes on the disk, holes left out."""
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


def apply_and_die(directory: Path, entries: int, report_to: str) -> None:
    """Applies entries without ever making a checkpoint, and is gone."""
    peer = EnginePeer(directory)
    batches = workload(entries, 1024)
    rate = puts_per_second(peer, batches)
    Path(report_to).write_text(str(entries / rate))
    os._exit(0)


def recovery(root: Path, megabytes: int) -> list[Figure]:
    """Opening after a crash, against applying the same and against a scan of the same bytes."""
    directory, seconds_file = root / "crashed", root / "seconds"
    entries = (megabytes << 20) // 1250
    child = multiprocessing.Process(target=apply_and_die, args=(directory, entries, str(seconds_file)))
    child.start()
    child.join()
    applying = float(seconds_file.read_text())
    files = sorted((directory / "wal").glob("wal.*.log"), key=lambda path: int(path.name.split(".")[1]))
    scanning = min(scan_seconds(files) for _ in range(2))
    begin = time.perf_counter()
    engine = tidelog.open_engine(directory)
    opening = time.perf_counter() - begin
    engine.close()
    size = sum(path.stat().st_size for path in files) / (1 << 20)
    return [
        at_most(
            f"open after {size:.0f} MiB without a checkpoint",
            f"{opening:.2f} s",
            f"applying {applying:.1f} s",
            opening / applying,
            0.1,
        ),
        at_most("the same, of a kernel scan", f"{opening:.2f} s", f"scan {scanning:.2f} s", opening / scanning, 10),
    ]


def scan_seconds(files: list[Path]) -> float:
    """Reads and checks every frame."""
    begin, offset = time.perf_counter(), 1
    for path in files:
        frames, _, _ = scan(path.read_bytes(), BINDING_BYTES, offset)
        offset = frames.next_offset
    return time.perf_counter() - begin


def zipf(root: Path, objects: int, reads: int) -> list[Figure]:
    """Many objects and a pool of a tenth of their index: memory, and how often the pool has what is asked for."""
    pool_bytes = max(objects * 100 // 10, 64 * 8192)
    engine = tidelog.open_engine(root / "zipf", buffer_pool_bytes=pool_bytes, checkpoint_interval_seconds=30)
    engine.apply(1, tidelog.CreateBucket("b"))
    for first in range(0, objects, 4096):
        numbers = range(first, min(objects, first + 4096))
        engine.apply_many(
            [(2 + n, tidelog.PutObject("b", f"key-{n * 7919 % objects:012d}", b"v" * 200)) for n in numbers]
        )
    before = engine.statistics().buffer_pool
    chance = random.Random(11)
    for _ in range(reads):
        rank = int(objects ** chance.random()) - 1  # P(rank) ~ 1 / rank
        engine.read("b", f"key-{rank:012d}")
    after = engine.statistics().buffer_pool
    hits, misses = after.hits - before.hits, after.misses - before.misses
    rate = hits / max(1, hits + misses)
    size = after.size_bytes / pool_bytes
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    engine.close()
    return [
        at_least("Zipf reads from a tenth", f"{rate:.1%} hits", f"{misses} misses", rate, 0.8, ""),
        at_most(
            "pages in memory, of the limit", f"{after.size_bytes >> 20} MiB", f"process peak {peak} MiB", size, 1.0
        ),
    ]


def streams(root: Path, megabytes: int) -> list[Figure]:
    """A value from a file and back into one, against a plain copy of that file with fsync; and what memory it takes."""
    source, noise = root / "source", os.urandom(4 << 20)
    with source.open("wb") as file:
        for _ in range(megabytes // 4):
            file.write(noise)
    size = source.stat().st_size
    ours, out, plain = [], [], []
    for number in range(3):
        settle()
        plain.append(timed(lambda: plain_copy(source, root / "copy")))
        with tidelog.open_engine(root / f"stream-{number}") as engine, source.open("rb") as file:
            engine.apply(1, tidelog.CreateBucket("b"))
            settle()
            entry = tidelog.PutObject("b", "k", file)
            ours.append(timed(lambda: engine.apply(2, entry)))  # noqa: B023
            settle()
            out.append(timed(lambda: stream_out(engine, root / "copy")))
        shutil.rmtree(root / f"stream-{number}")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        growth = pool.apply(stream_growth, (str(source), str(root / "growing")))
    rate, out_rate, peer = (size / statistics.median(seconds) / 1e6 for seconds in (ours, out, plain))
    copy = f"copy {peer:,.0f} MB/s"
    return [
        at_least(f"a stream of {size >> 20} MiB in", f"{rate:,.0f} MB/s", copy, rate / peer, 0.7),
        at_least(f"a stream of {size >> 20} MiB out", f"{out_rate:,.0f} MB/s", copy, out_rate / peer, 0.7),
        at_most("memory for it, in and out", f"{growth:.0f} MiB", "limit 64 MiB", growth, 64, " MiB"),
    ]


def plain_copy(source: Path, target: Path) -> None:
    """What `cp` does, and a sync."""
    with source.open("rb") as read, target.open("wb") as write:
        shutil.copyfileobj(read, write, 1 << 20)
        write.flush()
        os.fsync(write.fileno())


def stream_out(engine: tidelog.Engine, target: Path) -> None:
    """Reads an object into a file, and syncs that."""
    with engine.open_object("b", "k") as read, target.open("wb") as write:
        shutil.copyfileobj(read, write, 1 << 20)
        write.flush()
        os.fsync(write.fileno())


def stream_growth(source: str, directory: str) -> float:
    """By how many MiB a process grows that puts a file, reads it here, ships it and reads it from the store."""
    store = f"file://{directory}-store"
    with tidelog.open_engine(directory, store=store, local_retention_bytes=0) as engine:
        engine.apply(1, tidelog.CreateBucket("b"))
        engine.apply(2, tidelog.PutObject("b", "warm", bytes(1 << 20)))
        engine.update_low_water_mark(2)
        engine.ship()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with Path(source).open("rb") as file:
            engine.apply(3, tidelog.PutObject("b", "k", file))
        read_through(engine, "hot")
        engine.update_low_water_mark(3)
        engine.ship()
        read_through(engine, "cold")
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def read_through(engine: tidelog.Engine, tier: str) -> None:
    """Reads all of an object, piece by piece."""
    with engine.open_object("b", "k") as file:
        assert file.tier == tier
        while file.read(1 << 20):
            pass


def scans(root: Path, entries: int, size: int, rounds: int) -> Figure:
    """A scan with values, hot, in key order, against RocksDB's iterator, in turns: the best round of each."""
    batches = workload(entries, size)
    ours, theirs = EnginePeer(root / "scan-engine"), RocksPeer(root / "scan-rocksdb")
    for peer in (ours, theirs):
        puts_per_second(peer, batches)
    found = [(timed(ours.scanned), timed(theirs.scanned)) for _ in range(rounds)]
    for peer in (ours, theirs):
        peer.close()
    for name in ("scan-engine", "scan-rocksdb"):
        shutil.rmtree(root / name)
    rate, peer_rate = (entries / min(times) for times in zip(*found, strict=True))
    what = f"scan of {entries:,} keys with values of {size:,} bytes"
    return at_least(what, f"{rate:,.0f}/s", f"rocksdb {peer_rate:,.0f}/s", rate / peer_rate, 0.3)


def main() -> None:
    """Runs it."""
    parser = parser_for(__doc__)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--recovery-megabytes", type=int, default=1024)
    parser.add_argument("--zipf-objects", type=int, default=1_000_000)
    parser.add_argument("--zipf-reads", type=int, default=100_000)
    parser.add_argument("--stream-megabytes", type=int, default=1024)
    parser.add_argument("--scan-entries", type=int, default=1_000_000)
    parser.add_argument("--only", choices=PARTS, action="append")
    arguments = parser.parse_args()
    parts = arguments.only or PARTS
    figures: list[Figure] = []
    missing: list[str] = []
    with scratch_directory(arguments.dir) as root:
        here = installed(PEERS, missing)
        if "puts" in parts:
            figures += put_figures(compare(root, arguments.entries, 1024, arguments.rounds, here))
        if "large" in parts and "rocksdb" in here:
            found = compare(root, 4096, 64 << 10, arguments.rounds, ["rocksdb"])
            puts = {"tidelog": found["engine"].puts, "rocksdb": found["rocksdb"].puts}
            figures.append(compared("64 KiB puts", puts, "rocksdb", 1, unit="/s", durability="synced"))
        if "versions" in parts:
            figures.append(old_versions(root))
        if "listing" in parts:
            figures += listings(root, arguments.entries, arguments.rounds)
        figures += recovery(root, arguments.recovery_megabytes) if "recovery" in parts else []
        figures += zipf(root, arguments.zipf_objects, arguments.zipf_reads) if "zipf" in parts else []
        figures += streams(root, arguments.stream_megabytes) if "stream" in parts else []
        if "scan" in parts:
            figures.append(scans(root, arguments.scan_entries, 100, arguments.rounds))
            figures.append(scans(root, arguments.scan_entries // 4, 1024, arguments.rounds))
    report("engine", figures, {"entries": arguments.entries}, as_json=arguments.json, missing=missing)


if __name__ == "__main__":
    sys.exit(main())
