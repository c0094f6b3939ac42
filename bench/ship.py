"""Shipping a file to a local SeaweedFS: against obstore's plain upload of the same bytes, in bounded memory.

Ship: a topic whose messages are in one WAL file, through `topic.ship()` into one object: every frame checked, indexed,
summed up and sent. Plain: obstore sends the same file, by `put` and by `open_writer`, in parts of the same size, as
many at once; the faster one counts. They take turns, each in a new process. Memory: what the resident memory of the
shipping process grows by at most. Append: messages a second of a topic that is shipped all the time, against one
without a store, beside a process that uploads all the time.

Needs `tidelog[test]` for the server.

python bench/ship.py [--megabytes 1024] [--rounds 3] [--seconds 5] [--dir .] [--json]
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import obstore
from history_read import in_new_process, resident_bytes
from measuring import Figure, at_least, at_most, parser_for, report, scratch_directory, settle
from obstore.store import S3Store
from store_server import store_server

import tidelog
from tidelog.store.settings import DEFAULT_PART_BYTES, DEFAULT_PARTS_IN_FLIGHT

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.servers import ACCESS_KEY_ID, BUCKET, SECRET_ACCESS_KEY

MEGABYTE = 1 << 20
TOPIC = "bench/shipped"
VALUE_BYTES = 1024
PIECE_BYTES = 4 << 20
LARGE = 64 << 30
PATIENCE_SECONDS = 60
EAGER = {"ship_interval_seconds": 0.1, "ship_min_bytes": 8 * MEGABYTE, "ship_max_delay_seconds": 1}


class Target(NamedTuple):
    """Where everything goes."""

    endpoint: str
    prefix: str

    def settings(self) -> dict[str, Any]:
        """For `tidelog.open`."""
        return {
            "store": f"s3://{BUCKET}/{self.prefix}",
            "metadata": "bucket",
            "store_endpoint": self.endpoint,
            "store_access_key_id": ACCESS_KEY_ID,
            "store_secret_access_key": SECRET_ACCESS_KEY,
            "max_object_bytes": LARGE,
        }

    def client(self) -> S3Store:
        """obstore's own."""
        return S3Store(
            BUCKET,
            config={"endpoint": self.endpoint, "region": "us-east-1"},
            access_key_id=ACCESS_KEY_ID,
            secret_access_key=SECRET_ACCESS_KEY,
            client_options={"allow_http": True},
        )


class Shipped(NamedTuple):
    """One turn of ours."""

    seconds: float
    grown_bytes: int


def value_of(number: int) -> bytes:
    """Half of it compresses well, half of it not at all."""
    line = json.dumps({"order": number, "customer": f"customer-{number % 1000}", "state": "shipped"}).encode()
    return (line * 8)[: VALUE_BYTES // 2] + os.urandom(VALUE_BYTES // 2)


def fill(directory: Path, megabytes: int) -> Path:
    """A local topic of so many megabytes; returns its one WAL file."""
    batch = [value_of(number) for number in range(MEGABYTE // VALUE_BYTES)]
    with tidelog.open(directory, rotate_max_bytes=LARGE) as log:
        topic = log.topic(TOPIC)
        for _ in range(megabytes):
            topic.append_many(batch)
    (path,) = (directory / TOPIC).glob("wal.*.log")
    return path


def twin_of(directory: Path, name: str) -> Path:
    """The same topic once more, never shipped: its files are the same ones, since nobody appends."""
    twin = directory.parent / name
    shutil.copytree(directory, twin, copy_function=os.link, ignore=shutil.ignore_patterns(".lock", "tidelog.json"))
    return twin


def ship(directory: Path, target: Target, compression: str) -> Shipped:
    """Ships all of a topic that was local until now."""
    with tidelog.open(directory, ship_compression=compression, ship_interval_seconds=3600, **target.settings()) as log:
        topic = log.topic(TOPIC)
        before = resident_bytes()
        begin = time.perf_counter()
        assert topic.ship() == topic.next_offset > 0
        seconds = time.perf_counter() - begin
        return Shipped(seconds, peak_bytes() - before)


def peak_bytes() -> int:
    """The most that this process ever had in memory."""
    line = next(line for line in Path("/proc/self/status").read_text("ascii").splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def put_seconds(path: Path, target: Target) -> float:
    """Seconds for the same bytes with nothing around it."""
    client, begin = target.client(), time.perf_counter()
    parts = {"chunk_size": DEFAULT_PART_BYTES, "max_concurrency": DEFAULT_PARTS_IN_FLIGHT}
    obstore.put(client, f"{target.prefix}/put", path, use_multipart=True, **parts)
    return time.perf_counter() - begin


def writer_seconds(path: Path, target: Target) -> float:
    """Seconds for the same bytes, read and handed over piece by piece."""
    client, begin = target.client(), time.perf_counter()
    writer = obstore.open_writer(
        client, f"{target.prefix}/writer", buffer_size=DEFAULT_PART_BYTES, max_concurrency=DEFAULT_PARTS_IN_FLIGHT
    )
    with path.open("rb") as file, writer:
        while data := file.read(PIECE_BYTES):
            writer.write(data)
    return time.perf_counter() - begin


class Turns:
    """Everything that takes turns, on one server and one file."""

    def __init__(self, scratch: Path, endpoint: str, path: Path) -> None:
        self._scratch = scratch
        self._endpoint = endpoint
        self._path = path
        self._uploads = 0
        self.seconds: dict[str, list[float]] = {}
        self.grown: dict[str, list[int]] = {}

    def target(self) -> Target:
        """A place of its own for each."""
        self._uploads += 1
        return Target(self._endpoint, f"bench-{self._scratch.name[-8:]}-{self._uploads}")

    def plain(self, name: str, upload: Callable[[Path, Target], float]) -> None:
        """One turn of a peer."""
        settle()
        self.seconds.setdefault(name, []).append(in_new_process(upload, self._path, self.target()))

    def ship(self, compression: str) -> None:
        """One turn of ours."""
        target = self.target()
        directory = twin_of(self._scratch / "topic", target.prefix)
        settle()
        shipped: Shipped = in_new_process(ship, directory, target, compression)
        self.seconds.setdefault(compression, []).append(shipped.seconds)
        self.grown.setdefault(compression, []).append(shipped.grown_bytes)

    def figures(self, megabytes: int) -> list[Figure]:
        """Ours against the faster peer."""
        seconds = {name: median(found) for name, found in self.seconds.items()}
        peer = min(("put", "open_writer"), key=seconds.__getitem__)
        peer_text = f"obstore's {peer} {megabytes / seconds[peer]:.0f} MiB/s"
        figures = []
        for compression, name in (("none", "ship"), ("zstd", "ship with zstd")):
            speed, ratio = megabytes / seconds[compression], seconds[peer] / seconds[compression]
            rounds = [[megabytes / one for one in self.seconds[name]] for name in (compression, peer)]
            grown = max(self.grown[compression]) / MEGABYTE
            figures += [
                at_least(
                    f"{name}, {megabytes} MiB",
                    f"{speed:.0f} MiB/s",
                    peer_text,
                    ratio,
                    0.7,
                    durability="in the store",
                    rounds=(rounds[0], rounds[1]),
                ),
                at_most(f"memory to {name} {megabytes} MiB", f"{grown:.0f} MiB more", "", grown, 96, " MiB"),
            ]
        return figures


# Appending meanwhile


def append_rate(directory: Path, target: Target | None, seconds: float) -> float:
    """Messages a second that a topic takes; with a target it is shipped all the time."""
    settings = {} if target is None else {**target.settings(), **EAGER}
    with tidelog.open(directory, **settings) as log:
        topic, value = log.topic(TOPIC), os.urandom(VALUE_BYTES)
        begin = time.perf_counter()
        while time.perf_counter() - begin < seconds:
            for _ in range(100):
                topic.append(value)
        topic.flush()
        rate = topic.next_offset / (time.perf_counter() - begin)
        while target is not None and not is_shipping(topic) and time.perf_counter() - begin < PATIENCE_SECONDS:
            time.sleep(0.01)  # a short turn may end before the shipper's
        assert target is None or is_shipping(topic), "nothing was shipped meanwhile"
        return rate


def is_shipping(topic: tidelog.Topic) -> bool:
    """Whether something is in the store, or on its way."""
    tier = topic.statistics().tier
    return (
        tier is not None and tier.shipper is not None and bool(tier.shipper.objects_created or tier.shipper.uploading)
    )


def upload_for_ever(path: Path, target: Target) -> None:
    """What others do to the machine."""
    while True:
        put_seconds(path, target)


@contextmanager
def uploading(path: Path, target: Target) -> Iterator[None]:
    """While another process uploads all the time."""
    process = multiprocessing.get_context("spawn").Process(target=upload_for_ever, args=(path, target), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def append_rates(scratch: Path, turns: Turns, path: Path, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Messages a second: alone, beside a process that uploads, and shipping itself."""
    rates: dict[str, list[float]] = {"alone": [], "beside": [], "shipping": []}
    for turn in range(rounds):
        for name in rates:
            directory = scratch / f"append-{name}-{turn}"
            settle()
            with uploading(path, turns.target()) if name == "beside" else nullcontext():
                target = turns.target() if name == "shipping" else None
                rates[name].append(in_new_process(append_rate, directory, target, seconds))
            shutil.rmtree(directory)
    return rates


def append_figure(rates: dict[str, list[float]]) -> Figure:
    """What shipping costs those who append."""
    shipping, beside = median(rates["shipping"]), median(rates["beside"])
    peer = f"not shipping, beside an upload {beside:,.0f} msg/s"
    return at_least(
        "append while shipping",
        f"{shipping:,.0f} msg/s",
        peer,
        shipping / beside,
        0.7,
        durability="accepted",
        rounds=(rates["shipping"], rates["beside"]),
    )


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__)
    parser.add_argument("--megabytes", type=int, default=1024, help="size of the file in MiB (1024)")
    parser.add_argument("--rounds", type=int, default=3, help="how often; the median counts (3)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of appending, each turn (5)")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        scratch = stack.enter_context(scratch_directory(arguments.dir))
        server = stack.enter_context(store_server(scratch))
        path = fill(scratch / "topic", arguments.megabytes)
        turns = Turns(scratch, server.endpoint, path)
        order: deque[Callable[[], None]] = deque(
            [
                lambda: turns.plain("put", put_seconds),
                lambda: turns.ship("none"),
                lambda: turns.plain("open_writer", writer_seconds),
                lambda: turns.ship("zstd"),
            ]
        )
        for _ in range(arguments.rounds):
            for take_turn in order:
                take_turn()
            order.rotate()  # nobody always comes after the same one
        rates = append_rates(scratch, turns, path, arguments.rounds, arguments.seconds)
    details = {"seconds": turns.seconds, "grown_bytes": turns.grown, "messages_per_second": rates}
    figures = [*turns.figures(arguments.megabytes), append_figure(rates)]
    report("ship", figures, details, as_json=arguments.json)


if __name__ == "__main__":
    main()
