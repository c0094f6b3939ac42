"""The jobs over topics in a warm session: ship, verify, compact and table, each beside what it cannot be faster than.

Two topics of 1 KiB messages are in a directory, their store is a local SeaweedFS. Shipping makes objects of the size
that is the default, and is compared with an upload of the same files by obstore alone, two at once. Verify and table
read that store, without the directory; a table is compared with Spark's own copy of it from Parquet to Parquet.
Compact merges objects of `--object` bytes, as an owner makes them that ships every minute. Verify and compact are held
to bytes a second. All of it is local[2], the start of Spark not counted. CPU seconds are those of the driver, of Spark
and its workers; the server's are beside them. `memory` in the details is the most MiB that the driver, Java and the
largest worker held during a job.

`--alone` measures that memory only: the jobs run once, without what they are compared with, and what the next one does
not need is removed, the server's data too: the disk must have room for three times the megabytes, not for eight.

Needs `tidelog[test]` for the server, and Spark.

python bench/topic_pipeline.py [--megabytes 256] [--object 4194304] [--rounds 3] [--dir .] [--json]
python bench/topic_pipeline.py --alone [--megabytes 256] [--object 4194304] [--dir .] [--json]
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import obstore
from measuring import (
    at_least,
    cpu_seconds,
    forget_most_memory,
    memory_of,
    most_memory,
    parser_for,
    report,
    scratch_directory,
    settle,
)
from pyspark.sql import SparkSession

import tidelog
from tidelog.pipeline.address import Root, find_root
from tidelog.pipeline.jobs.compact_topic import CompactOptions, compact
from tidelog.pipeline.jobs.ship import ship
from tidelog.pipeline.jobs.verify import verify
from tidelog.pipeline.tables.parquet import parquet_table
from tidelog.pipeline.tables.table import table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.servers import ACCESS_KEY_ID, BUCKET, SECRET_ACCESS_KEY, S3Server

TOPICS = ("bench/one", "bench/two")
MESSAGE_BYTES = 1024
CREDENTIALS = {"store_access_key_id": ACCESS_KEY_ID, "store_secret_access_key": SECRET_ACCESS_KEY}
BATCH = 4096


@dataclass
class Spent:
    """Seconds on the wall, and of CPU; the most MiB of memory."""

    wall: float = 0.0
    cpu: float = 0.0
    server_cpu: float = 0.0
    memory: dict[str, int] = field(default_factory=dict)


@contextmanager
def spent(server: S3Server) -> Iterator[Spent]:
    """What is spent within."""
    settle()
    forget_most_memory(server.pid)
    found, cpu, both, begin = Spent(), cpu_seconds(server.pid), cpu_seconds(), time.perf_counter()
    yield found
    found.wall, found.cpu = time.perf_counter() - begin, cpu_seconds(server.pid) - cpu
    found.server_cpu, found.memory = cpu_seconds() - both - found.cpu, most_memory(server.pid)


def fill(directory: Path, megabytes: int, object_bytes: int) -> None:
    """Topics in a directory, in files of the size of objects; nothing is shipped."""
    noise = os.urandom(1 << 20)
    count = (megabytes << 20) // MESSAGE_BYTES // len(TOPICS)
    with tidelog.open(directory, rotate_max_bytes=object_bytes) as log:
        for name in TOPICS:
            topic = log.topic(name)
            for first in range(0, count, BATCH):
                many = range(first, min(first + BATCH, count))
                topic.append_many([noise[n * 61 % (len(noise) - MESSAGE_BYTES) :][:MESSAGE_BYTES] for n in many])


def rooted(directory: Path, url: str, settings: dict[str, Any]) -> Root:
    """The directory, with its store."""
    with tidelog.open(directory, store=url, metadata="bucket", ship_max_delay_seconds=3600, **settings):
        pass  # it remembers its store
    return find_root(directory, **settings)


def ship_small(directory: Path, url: str, settings: dict[str, Any], object_bytes: int) -> None:
    """All that is in a directory, in small objects."""
    more: dict[str, Any] = {"max_object_bytes": object_bytes, "ship_max_delay_seconds": 3600}
    with tidelog.open(directory, store=url, metadata="bucket", **more, **settings) as log:
        for name in TOPICS:
            log.topic(name).ship()


def upload(files: list[Path], server: S3Server, prefix: str) -> None:
    """The same bytes by the client of the store alone, two files at once."""
    store = obstore.store.S3Store(
        BUCKET,
        prefix=prefix,
        config={
            "endpoint": server.endpoint,
            "access_key_id": ACCESS_KEY_ID,
            "secret_access_key": SECRET_ACCESS_KEY,
            "region": "us-east-1",
            "virtual_hosted_style_request": "false",
        },
        client_options={"allow_http": True},
    )
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(obstore.put, store, f"file-{n}", file) for n, file in enumerate(files)]:
            done.result()


def good(job: Callable[[], Any]) -> Any:
    """The report of a job with which all is well."""
    done = job()
    assert done.is_good, done
    return done


def _linked(source: str, target: str) -> None:
    """Files of a log are not changed any more; what is beside them is."""
    (os.link if Path(source).name.startswith("wal.") else shutil.copy2)(source, target)


class Jobs:
    """All of them, over one directory a round."""

    def __init__(self, spark: SparkSession, scratch: Path, object_bytes: int) -> None:
        self._spark = spark
        self._scratch = scratch
        self._object_bytes = object_bytes
        self._server, self._settings = self._begin_server()
        self.spent: dict[str, list[Spent]] = {}

    def _begin_server(self) -> tuple[S3Server, dict[str, Any]]:
        directory = self._scratch / "s3"
        directory.mkdir()
        server = S3Server(directory)
        server.begin()
        return server, {"store_endpoint": server.endpoint, **CREDENTIALS}

    def end_server(self) -> None:
        """Its data goes with it: deleted objects would keep their place on the disk for a while."""
        self._server.kill()
        shutil.rmtree(self._scratch / "s3")

    def round(self, number: int, filled: Path, *, counts: bool) -> None:
        """Each job once, and what it is compared with."""
        place, url = self._scratch / f"round-{number}", self._server.url(f"round-{number}")
        for name in ("data", "small"):
            shutil.copytree(filled, place / name)
        root = rooted(place / "data", f"{url}/data", self._settings)
        ship_small(place / "small", f"{url}/small", self._settings, self._object_bytes)
        files = sorted((place / "data").rglob("wal.*.log"))
        copied, tables = place / "copied", [parquet_table(str(place / name)) for name in TOPICS]
        work: dict[str, Callable[[], object]] = {
            "upload": lambda: upload(files, self._server, f"plain-{number}"),
            "ship": lambda: good(lambda: ship(self._spark, root)),
            "verify": lambda: good(lambda: verify(self._spark, self._store(f"{url}/data"))),
            "verify small": lambda: good(lambda: verify(self._spark, self._store(f"{url}/small"))),
            "table": lambda: [
                good(lambda name=name, made=made: table(self._spark, self._store(f"{url}/data"), name, made))  # type: ignore[misc]
                for name, made in zip(TOPICS, tables, strict=True)
            ],
            "copy": lambda: [
                self._spark.read.parquet(str(place / name)).write.parquet(str(copied / name)) for name in TOPICS
            ],
            "compact": lambda: good(
                lambda: compact(self._spark, self._store(f"{url}/small"), options=CompactOptions(grace_seconds=0))
            ),
        }
        for name, one in work.items():
            if counts:
                self._count(name, one)
            else:
                one()
        shutil.rmtree(place)

    def alone(self, filled: Path) -> None:
        """Each job once, with as little on the disk as it needs."""
        place, url, tables = self._scratch / "alone", self._server.url("alone"), self._scratch / "tables"
        shutil.copytree(filled, place / "small", copy_function=_linked)
        filled.rename(place / "data")
        root = rooted(place / "data", f"{url}/data", self._settings)
        self._count("ship", lambda: good(lambda: ship(self._spark, root)))
        shutil.rmtree(place / "data")
        whole = self._store(f"{url}/data")
        self._count("verify", lambda: good(lambda: verify(self._spark, whole)))
        for name in TOPICS:
            made = parquet_table(str(tables / name))
            self._count("table", lambda name=name, made=made: good(lambda: table(self._spark, whole, name, made)))
            shutil.rmtree(tables)
        self.end_server()
        self._server, self._settings = self._begin_server()
        url = self._server.url("alone/small")
        ship_small(place / "small", url, self._settings, self._object_bytes)
        shutil.rmtree(place)
        small = self._store(url)
        options = CompactOptions(grace_seconds=0)
        self._count("verify of small objects", lambda: good(lambda: verify(self._spark, small)))
        self._count("compact", lambda: good(lambda: compact(self._spark, small, options=options)))

    def _count(self, name: str, job: Callable[[], object]) -> None:
        with spent(self._server) as took:
            job()
        self.spent.setdefault(name, []).append(took)
        print(f"{name}: {took.wall:.1f} s, MiB {took.memory}", file=sys.stderr)

    def most_memory(self) -> dict[str, dict[str, int]]:
        """Of each job, in all rounds."""
        return {
            name: {kind: max(one.memory.get(kind, 0) for one in found) for kind in found[0].memory}
            for name, found in self.spent.items()
        }

    def _store(self, url: str) -> Root:
        return find_root(url, **self._settings)


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__)
    parser.add_argument("--megabytes", type=int, default=256, help="of both topics together (256)")
    parser.add_argument("--object", type=int, default=4 << 20, help="bytes of a file, and of an object (4194304)")
    parser.add_argument("--rounds", type=int, default=3, help="how often; the median counts (3)")
    parser.add_argument("--alone", action="store_true", help="only the memory of the jobs, which run once")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        scratch = stack.enter_context(scratch_directory(arguments.dir))
        fill(scratch / "warm", 4, arguments.object)
        fill(scratch / "filled", arguments.megabytes, arguments.object)
        spark = tidelog.spark_session("bench", "local[2]")
        stack.callback(spark.stop)
        jobs = Jobs(spark, scratch, arguments.object)
        stack.callback(jobs.end_server)
        jobs.round(0, scratch / "warm", counts=False)
        if arguments.alone:
            jobs.alone(scratch / "filled")
        for number in range(1, 0 if arguments.alone else arguments.rounds + 1):
            jobs.round(number, scratch / "filled", counts=True)
    details = {name: [asdict(one) for one in found] for name, found in jobs.spent.items()}
    size = f"{arguments.megabytes} MiB"
    if arguments.alone:
        held = [memory_of(f"{name} of topics, {size}", found) for name, found in jobs.most_memory().items()]
        report("topic_pipeline", held, details, as_json=arguments.json)
        return
    seconds = {name: median(one.wall for one in found) for name, found in jobs.spent.items()}
    cpu = {name: median(one.cpu for one in found) for name, found in jobs.spent.items()}
    megabytes = arguments.megabytes * (1 << 20) / 1e6

    def rate(name: str) -> str:
        return f"{megabytes / seconds[name]:.0f} MB/s"

    figures = [
        at_least(
            f"{name} of topics, {size}",
            rate(name),
            f"{cpu[name]:.1f} s of CPU",
            megabytes / seconds[name],
            target,
            " MB/s",
        )
        for name, target in (("verify", 300), ("compact", 150))
    ]
    figures += [
        at_least(
            f"{name} of topics, {size}",
            f"{rate(name)}, {cpu[name]:.1f} s of CPU",
            f"{words} {rate(peer)}, {cpu[peer]:.1f} s of CPU",
            seconds[peer] / seconds[name],
            target,
        )
        for name, peer, words, target in (
            ("table", "copy", "Spark's copy of it, Parquet to Parquet,", 0.5),
            ("ship", "upload", "obstore alone", 0.7),
        )
    ]
    report("topic_pipeline", figures, details, as_json=arguments.json)


if __name__ == "__main__":
    main()
