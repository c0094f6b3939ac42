"""A restore from the raw log of an engine, and from what Spark makes of it: compact, checkpoint, gc.

The engine's entries are puts over fewer keys, in files of the log that are small, as an engine leaves them that ships
often; no state was written. They are in a local SeaweedFS. A restore counts what it fetches: objects, requests, bytes.
All restores must have the digest that the engine had, and every value is where it was.

The jobs run one after the other in a warm session of local[2], whose start is not counted. Then the compacted engine is
restored in turn by the job of the pipeline and by the library, a round each. `jobs_memory_mib` in the details is the
most that the driver, Java and the largest worker held during a job; `--alone` measures that only, each job once.

Needs `tidelog[test]` for the server, and Spark.

python bench/engine_pipeline.py [--entries 1000000] [--keys 200000] [--value 256] [--segment 262144] [--rounds 3]
    [--alone] [--dir .] [--json]
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from measuring import (
    alternate,
    at_least,
    at_most,
    compared,
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
from tidelog.clock import SystemClock
from tidelog.config import load_engine_config
from tidelog.engine.recovery.restore import Restore
from tidelog.engine_wiring import open_engine_at
from tidelog.files import LocalFiles
from tidelog.pipeline.address import EngineRoot, find_engine
from tidelog.pipeline.jobs.engine.compact import compact_engine
from tidelog.pipeline.jobs.engine.digest import digest_engine
from tidelog.pipeline.jobs.engine.restore import restore_engine_directory
from tidelog.pipeline.jobs.engine.snapshot import checkpoint_engine
from tidelog.pipeline.jobs.engine.verify import verify_engine
from tidelog.pipeline.jobs.gc import apply_engine_gc, plan_engine_gc
from tidelog.store.keys import EngineKeys
from tidelog.store.metadata.open import BUCKET, open_metadata_store
from tidelog.store.object_store import ObjectStore
from tidelog.store.urls import open_store

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.servers import ACCESS_KEY_ID, SECRET_ACCESS_KEY, S3Server

BATCH = 1000
SAMPLE = 200
CREDENTIALS = {"store_access_key_id": ACCESS_KEY_ID, "store_secret_access_key": SECRET_ACCESS_KEY}


def fill(
    directory: Path, url: str, settings: dict[str, Any], entries: int, keys: int, segment: int, value_bytes: int
) -> str:
    """An engine with so many puts over so many keys, shipped and closed; its digest."""
    config = load_engine_config(None, {}, {"dir": directory, "store": url, "rotate_max_bytes": segment, **settings})
    noise, choose = os.urandom(1 << 20), random.Random(7)
    with open_engine_at(directory, config, runs_in_background=False) as engine:
        engine.apply(1, tidelog.CreateBucket("bench"))
        for first in range(2, entries + 2, BATCH):
            batch = []
            for seq in range(first, min(first + BATCH, entries + 2)):
                number = seq - 2 if seq - 2 < keys else choose.randrange(keys)
                at = choose.randrange(len(noise) - value_bytes)
                batch.append((seq, tidelog.PutObject("bench", f"key-{number:08}", noise[at : at + value_bytes])))
            engine.apply_many(batch)
        engine.update_low_water_mark(engine.applied_seq)
        engine.ship()
        return engine.digest()


@dataclass
class Fetched:
    """What a restore asked of the store."""

    seconds: float = 0.0
    requests: int = 0
    bytes: int = 0
    keys: set[str] = field(default_factory=set)

    @property
    def objects(self) -> int:
        """Objects of the engine, its catalog not counted."""
        return sum(1 for key in self.keys if key.startswith("storage/"))


@contextmanager
def counted(objects: ObjectStore, fetched: Fetched) -> Iterator[None]:
    """Counts what is read from a store."""
    read_range, get = objects.read_range, objects.get

    def counting_range(key: str, start: int, length: int) -> memoryview:
        data = read_range(key, start, length)
        count(key, len(data))
        return data

    def counting_get(key: str) -> Any:
        found = get(key)
        count(key, len(found.data))
        return found

    def count(key: str, size: int) -> None:
        fetched.requests += 1
        fetched.bytes += size
        fetched.keys.add(key)

    objects.read_range, objects.get = counting_range, counting_get  # type: ignore[method-assign]
    try:
        yield
    finally:
        del objects.read_range, objects.get


def restore(directory: Path, url: str, settings: dict[str, Any]) -> tuple[Fetched, str]:
    """A new node's directory; what it cost, and the digest of the engine in it."""
    config = load_engine_config(None, {}, {"dir": directory, "store": url, **settings})
    objects, fetched = open_store(url, config.object_store), Fetched()
    settle()
    with open_metadata_store(BUCKET, objects) as metadata, counted(objects, fetched):
        begin = time.perf_counter()
        Restore(
            *(directory, objects, metadata),
            keys=EngineKeys(),
            node="bench",
            settings=config.storage_engine,
            files=LocalFiles(),
            clock=SystemClock(),
        ).run()
        fetched.seconds = time.perf_counter() - begin
    return fetched, digest_of(directory, url, settings)


def digest_of(directory: Path, url: str, settings: dict[str, Any]) -> str:
    """What a restored engine is; some of its values are read."""
    config = load_engine_config(None, {}, {"dir": directory, "store": url, **settings})
    with open_engine_at(directory, config, runs_in_background=False) as engine:
        for number in range(SAMPLE):
            engine.read("bench", f"key-{number:08}")
        return engine.digest()


@dataclass
class Spent:
    """What jobs took: seconds on the wall, CPU seconds of the driver, of Spark and of its workers, and the most MiB."""

    wall: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)
    memory: dict[str, dict[str, int]] = field(default_factory=dict)

    @contextmanager
    def on(self, name: str, server: int) -> Iterator[None]:
        """One of them; the server of the store is not counted."""
        forget_most_memory(server)
        begin, cpu = time.perf_counter(), cpu_seconds(server)
        yield
        self.wall[name], self.cpu[name] = time.perf_counter() - begin, cpu_seconds(server) - cpu
        self.memory[name] = most_memory(server)
        print(f"{name}: {self.wall[name]:.1f} s, MiB {self.memory[name]}", file=sys.stderr)


def compact_and_collect(spark: SparkSession, root: EngineRoot, server: int) -> Spent:
    """The jobs on two workers, the start of Spark not counted."""
    spent = Spent()
    digest_engine(spark, root)  # a session that has worked before
    jobs = (("digest", digest_engine), ("compact", compact_engine), ("checkpoint", checkpoint_engine))
    for name, job in (*jobs, ("verify", verify_engine)):
        with spent.on(name, server):
            done = job(spark, root)
        assert done.is_good, done
    with spent.on("gc", server):
        plan, _ = plan_engine_gc(spark, root, grace_seconds=0)
        apply_engine_gc(spark, root, plan)
    with spent.on("verify after gc", server):
        assert verify_engine(spark, root).is_good
    return spent


class Restores:
    """The same engine again and again, by the job of the pipeline and by the library."""

    def __init__(
        self, spark: SparkSession, root: EngineRoot, scratch: Path, settings: dict[str, Any], spent: Spent, server: int
    ) -> None:
        self._spark = spark
        self._root = root
        self._scratch = scratch
        self._settings = settings
        self._spent = spent
        self._server = server
        self.fetched: list[Fetched] = []
        self.digests: set[str] = set()

    def by_job(self) -> float:
        directory = Path(tempfile.mkdtemp(dir=self._scratch))
        with self._spent.on("restore", self._server):
            restore_engine_directory(self._spark, self._root, directory)
        self._seen(directory, digest_of(directory, self._root.store_url, self._settings))
        return self._spent.wall["restore"]

    def by_library(self) -> float:
        directory = Path(tempfile.mkdtemp(dir=self._scratch))
        fetched, digest = restore(directory, self._root.store_url, self._settings)
        self._seen(directory, digest)
        self.fetched.append(fetched)
        return fetched.seconds

    def _seen(self, directory: Path, digest: str) -> None:
        self.digests.add(digest)
        shutil.rmtree(directory)


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000, help="how many puts (1000000)")
    parser.add_argument("--keys", type=int, default=200_000, help="of how many keys (200000)")
    parser.add_argument("--value", type=int, default=256, help="bytes of each (256)")
    parser.add_argument("--segment", type=int, default=256 << 10, help="bytes of a file of the log (262144)")
    parser.add_argument("--rounds", type=int, default=3, help="restores of either kind; the median counts (3)")
    parser.add_argument("--alone", action="store_true", help="only the memory of the jobs, which run once")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        scratch = stack.enter_context(scratch_directory(arguments.dir))
        (scratch / "s3").mkdir()
        server = S3Server(scratch / "s3")
        server.begin()
        stack.callback(server.kill)
        url, settings = server.url("bench"), {"store_endpoint": server.endpoint, **CREDENTIALS}
        digest = fill(
            *(scratch / "engine", url, settings),
            *(arguments.entries, arguments.keys, arguments.segment, arguments.value),
        )
        shutil.rmtree(scratch / "engine")
        if not arguments.alone:
            raw, raw_digest = restore(scratch / "raw", url, settings)
            shutil.rmtree(scratch / "raw")
        place = find_engine(url, **settings)
        with place.open() as opened:
            log_bytes = sum(info.size for info in opened.objects.list())
        spark = tidelog.spark_session("bench", "local[2]")
        stack.callback(spark.stop)
        spent = compact_and_collect(spark, place, server.pid)
        jobs = spent.wall
        with place.open() as opened:
            stored = log_bytes + sum(info.size for info in opened.objects.list())
        restores = Restores(spark, place, scratch, settings, spent, server.pid)
        if arguments.alone:
            restores.by_job()
            assert restores.digests == {digest}, "the engines are not the same"
            size = f"{arguments.entries:,} entries of {arguments.value:,} bytes"
            held = [memory_of(f"{name} of {size}", found) for name, found in spent.memory.items()]
            report("engine_pipeline", held, asdict(spent), as_json=arguments.json)
            return
        restored = alternate({"tidelog": restores.by_job, "the library": restores.by_library}, arguments.rounds)
    assert restores.digests == {digest} == {raw_digest}, "the engines are not the same"
    compacted = min(restores.fetched, key=lambda one: one.seconds)
    entries = f"{arguments.entries:,} entries"
    figures = [
        at_least(
            f"restore of {entries}, compacted",
            f"{compacted.seconds:.1f} s",
            f"from the raw log {raw.seconds:.1f} s",
            raw.seconds / compacted.seconds,
            3,
        ),
        at_least(
            "objects that it fetches",
            f"{compacted.objects}",
            f"from the raw log {raw.objects}",
            raw.objects / compacted.objects,
            5,
        ),
        compared(
            f"restore of {entries}, compacted, by two workers",
            restored,
            "the library",
            1,
            unit=" s",
            digits=1,
            smaller_is_better=True,
        ),
        *(
            at_most(
                f"{name} of {entries} on two workers",
                f"{jobs[name]:.1f} s",
                f"a warm session, {spent.cpu[name]:.1f} s of CPU",
                jobs[name],
                10,
                " s",
            )
            for name in ("digest", "compact", "gc")
        ),
        at_least(
            f"verify of {entries}, compacted, on two workers",
            f"{jobs['verify']:.1f} s",
            f"{stored / 1e6:.0f} MB of log and compacted data, {spent.cpu['verify']:.1f} s of CPU",
            stored / 1e6 / jobs["verify"],
            150,
            " MB/s",
        ),
    ]
    shown = {name: {**asdict(one), "keys": len(one.keys)} for name, one in (("raw", raw), ("compacted", compacted))}
    details = {**shown, "jobs_s": spent.wall, "jobs_cpu_s": spent.cpu, "jobs_memory_mib": spent.memory}
    report("engine_pipeline", figures, details, as_json=arguments.json)


if __name__ == "__main__":
    main()
