"""How the main operations grow: the same work at 1, 10 and 100 times the size, and the exponent of its time.

An exponent of 1 is linear. It is taken between 10 and 100 times, since what an operation costs at any size hides the
growth of small ones, and of the fastest of the rounds, since only that is not about the machine's other work. More than
1.1 is a fault. It is that of the processor time, which others on the machine hardly change (for Spark and its jobs that
of the driver, Java and the workers together); the exponent by the clock is told beside. Where an operation is one of
many on a store (a get, a cold read), as many are done as the size says, in a store of that size: then 1 means that one
of them costs the same in a large store.

python bench/growth.py [--base 1000] [--rounds 3] [--only topics|engine|spark|jobs ...] [--dir .] [--json]
"""

from __future__ import annotations

import math
import os
import random
import shutil
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import Figure, at_most, cpu_seconds, parser_for, report, scratch_directory, settle

import tidelog

STEPS = (1, 10, 100)
TARGET = 1.1
VALUE = os.urandom(1024)
BATCH = 256
TOPIC = "bench/growth"
NEVER_SECONDS = 86400
PARTS = ("topics", "engine")
SPARK_PARTS = ("spark", "jobs")
ALL_PARTS = (*PARTS, *SPARK_PARTS)
OBJECT_BYTES = 256 << 10
ENTRIES_A_KEY = 5
Times = dict[str, tuple[float, float]]
# Seconds of an operation, by size, in each round.
Grown = dict[str, list[float]]


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds that it takes: by the clock, and of processors in this process."""
    begin, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - begin, time.process_time() - used


def drain(messages: object) -> None:
    """Takes everything out of an iterator."""
    deque(messages, maxlen=0)  # type: ignore[call-overload]


def topics(root: Path, count: int) -> Times:
    """Seconds of what topics do, with so many messages of 1 KiB."""
    found, store = Times(), f"file://{root / 'store'}"
    with tidelog.open(root / "log", store=store, metadata="bucket", ship_interval_seconds=3600) as log:
        topic = log.topic(TOPIC)

        def append() -> None:
            for _ in range(count):
                topic.append(VALUE)
            topic.flush()

        found["append"] = timed(append)
        found["tail read"] = timed(lambda: drain(topic.read(start="earliest")))
        found["subscription receive"] = timed(lambda: receive(topic, count))
        found["ship"] = timed(topic.ship)
    found["restore of a topic"] = timed(lambda: opened_elsewhere(root / "other", store, count))
    with tidelog.open(root / "other", store=store, metadata="bucket") as log:
        found["history read"] = timed(lambda: drain(log.topic(TOPIC).read(start="earliest")))
    return found


def receive(topic: tidelog.Topic, count: int) -> None:
    """Receives and acknowledges everything."""
    with topic.subscribe("bench", start="earliest") as sub:
        got = 0
        while got < count:
            messages = sub.receive_many(500, timeout=60)
            sub.ack_many(messages)
            got += len(messages)


def opened_elsewhere(directory: Path, store: str, count: int) -> None:
    """A node whose disk is lost: the topic is there again when it can be appended to."""
    with tidelog.open(directory, store=store, metadata="bucket") as log:
        assert log.topic(TOPIC).next_offset == count


def engines(root: Path, count: int) -> Times:
    """Seconds of what an engine does, with so many objects of 1 KiB."""
    found, store = Times(), f"file://{root / 'store'}"
    keys = [f"key-{number:09d}" for number in range(count)]
    chance = random.Random(7)
    chance.shuffle(keys)
    settings: dict[str, Any] = {"checkpoint_interval_seconds": NEVER_SECONDS, "local_retention_bytes": 0}
    with tidelog.open_engine(root / "engine", store=store, **settings) as engine:
        engine.apply(1, tidelog.CreateBucket("b"))

        def apply() -> None:
            for first in range(0, count, BATCH):
                some = enumerate(keys[first : first + BATCH], first + 2)
                engine.apply_many([(seq, tidelog.PutObject("b", key, VALUE)) for seq, key in some])

        def get() -> None:
            for key in keys:
                engine.read("b", key)

        found["engine apply"] = timed(apply)
        chance.shuffle(keys)
        found["get"] = timed(get)
        found["scan"] = timed(lambda: drain(engine.scan("b", with_values=True)))
        found["checkpoint"] = timed(engine.create_checkpoint)
        engine.update_low_water_mark(engine.applied_seq)
        found["engine ship"] = timed(engine.ship)
    found["restore of an engine"] = timed(lambda: tidelog.restore_engine(root / "restored", store=store).close())
    with tidelog.open_engine(store=store, read_only=True) as engine:
        engine.refresh()  # a long log is left for later when it is opened
        chosen = chance.sample(keys, max(1, count // 20))
        found["cold read"] = timed(lambda: [engine.read("b", key) for key in chosen])
    return found


def timed_everywhere(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds that it takes: by the clock, and of processors in this process and those that it started."""
    begin, used = time.perf_counter(), cpu_seconds()
    work()
    return time.perf_counter() - begin, max(cpu_seconds() - used, 1 / os.sysconf("SC_CLK_TCK"))


class SparkSource:
    """Spark's source and sink over topics of all sizes, in one session."""

    def __init__(self) -> None:
        self._spark = tidelog.spark_session("bench", "local[2]")

    def __call__(self, root: Path, count: int) -> Times:
        store = filled_topic(root, count)

        def read() -> None:
            reader = self._spark.read.format("tidelog").option("root", store).option("subscribe", TOPIC)
            total = (
                reader.option("columns", "value").load().selectExpr("sum(length(value)) AS total").collect()[0].total
            )
            assert total == count * len(VALUE)

        rows = self._spark.range(count).selectExpr("CAST(repeat('tidelog!', 128) AS BINARY) AS value")
        written = root / "written"
        written.mkdir()
        writer = rows.write.format("tidelog").option("root", f"file://{written}").option("topic", TOPIC).mode("append")
        return {"Spark read": timed_everywhere(read), "Spark write": timed_everywhere(writer.save)}

    def stop(self) -> None:
        self._spark.stop()


def filled_topic(root: Path, count: int, **settings: Any) -> str:
    """A store with a topic of so many messages of 1 KiB; its address."""
    store = f"file://{root / 'store'}"
    with tidelog.open(root / "log", store=store, metadata="bucket", local_retention_bytes=1, **settings) as log:
        topic = log.topic(TOPIC)
        for first in range(0, count, 4096):
            topic.append_many([VALUE] * min(4096, count - first))
        topic.ship()
    return store


def filled_engine(root: Path, count: int) -> str:
    """A store with an engine of so many entries of 1 KiB, in small files; its address."""
    store, keys = f"file://{root / 'engine-store'}", max(1, count // ENTRIES_A_KEY)
    settings: dict[str, Any] = {"checkpoint_interval_seconds": NEVER_SECONDS, "rotate_max_bytes": OBJECT_BYTES}
    with tidelog.open_engine(root / "engine", store=store, **settings) as engine:
        engine.apply(1, tidelog.CreateBucket("b"))
        for first in range(2, count + 2, BATCH):
            seqs = range(first, min(first + BATCH, count + 2))
            engine.apply_many([(seq, tidelog.PutObject("b", f"key-{seq * 7919 % keys:09d}", VALUE)) for seq in seqs])
        engine.update_low_water_mark(engine.applied_seq)
        engine.ship()
    return store


class SparkJobs:
    """The jobs of the pipeline over topics and engines of all sizes, in one session."""

    def __init__(self) -> None:
        self._spark = tidelog.spark_session("bench", "local[2]")

    def __call__(self, root: Path, count: int) -> Times:
        return {**self._topics(root, count), **self._engines(root, count)}

    def _topics(self, root: Path, count: int) -> Times:
        from tidelog.pipeline.address import find_root
        from tidelog.pipeline.jobs.compact_topic import CompactOptions, compact
        from tidelog.pipeline.jobs.gc import apply_gc, plan_gc
        from tidelog.pipeline.jobs.verify import verify
        from tidelog.pipeline.tables.parquet import parquet_table
        from tidelog.pipeline.tables.table import table

        spark, place = self._spark, find_root(filled_topic(root, count, max_object_bytes=OBJECT_BYTES))
        options, made = CompactOptions(grace_seconds=0), parquet_table(str(root / "table"))

        def collect() -> None:
            plan, _ = plan_gc(spark, place, grace_seconds=0)
            apply_gc(spark, place, plan)

        return {
            "job verify, topic": timed_everywhere(lambda: good(verify(spark, place))),
            "job table": timed_everywhere(lambda: good(table(spark, place, TOPIC, made))),
            "job compact, topic": timed_everywhere(lambda: good(compact(spark, place, options=options))),
            "job gc, topic": timed_everywhere(collect),
        }

    def _engines(self, root: Path, count: int) -> Times:
        from tidelog.pipeline.address import find_engine
        from tidelog.pipeline.jobs.engine.compact import compact_engine
        from tidelog.pipeline.jobs.engine.digest import digest_engine
        from tidelog.pipeline.jobs.engine.snapshot import checkpoint_engine
        from tidelog.pipeline.jobs.engine.verify import verify_engine
        from tidelog.pipeline.jobs.gc import apply_engine_gc, plan_engine_gc

        spark, place = self._spark, find_engine(filled_engine(root, count))

        def collect() -> None:
            plan, _ = plan_engine_gc(spark, place, grace_seconds=0)
            apply_engine_gc(spark, place, plan)

        return {
            "job digest": timed_everywhere(lambda: good(digest_engine(spark, place))),
            "job compact, engine": timed_everywhere(lambda: good(compact_engine(spark, place))),
            "job checkpoint": timed_everywhere(lambda: good(checkpoint_engine(spark, place))),
            "job verify, engine": timed_everywhere(lambda: good(verify_engine(spark, place))),
            "job gc, engine": timed_everywhere(collect),
        }

    def stop(self) -> None:
        self._spark.stop()


def good(done: Any) -> None:
    """All is well with what a job reports."""
    assert done.is_good, done


def measure(scratch: Path, part: str, base: int, rounds: int) -> dict[str, tuple[Grown, Grown]]:
    """Seconds of each operation, by the clock and of processors."""
    spark = {"spark": SparkSource, "jobs": SparkJobs}[part]() if part in SPARK_PARTS else None
    work: Callable[[Path, int], Times] = spark or {"topics": topics, "engine": engines}[part]
    found: dict[str, tuple[Grown, Grown]] = {}
    try:
        if spark is not None:
            (scratch / "warm").mkdir()
            spark(scratch / "warm", base)  # the first of each compiles
        for number in range(rounds):
            for step in STEPS:
                # Small ones are over so soon that chance decides: more of them cost little.
                for again in range(1 if step == STEPS[-1] else 3):
                    root = scratch / f"{part}-{number}-{step}-{again}"
                    root.mkdir()
                    settle()
                    for name, both in work(root, step * base).items():
                        for grown, seconds in zip(found.setdefault(name, ({}, {})), both, strict=True):
                            grown.setdefault(str(step * base), []).append(seconds)
                    shutil.rmtree(root)
    finally:
        if spark is not None:
            spark.stop()
    return found


def exponent(seconds: Grown) -> float:
    """Of the time, between the two largest sizes."""
    (small, small_rounds), (large, large_rounds) = list(seconds.items())[-2:]
    return math.log(min(large_rounds) / min(small_rounds)) / math.log(int(large) / int(small))


def figure_of(name: str, clock: Grown, used: Grown) -> Figure:
    """One operation."""
    ours = ", ".join(f"{min(rounds) * 1000:,.3g}" for rounds in used.values())
    sizes = ", ".join(f"{int(size):,}" for size in used)
    return at_most(name, f"{ours} ms", f"at {sizes}; by the clock {exponent(clock):.2f}", exponent(used), TARGET, "")


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__)
    parser.add_argument("--base", type=int, default=1000, help="items at 1x (1000)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=ALL_PARTS, nargs="+", default=PARTS)
    arguments = parser.parse_args()
    found: dict[str, tuple[Grown, Grown]] = {}
    with scratch_directory(arguments.dir) as scratch:
        for part in arguments.only:
            found |= measure(scratch, part, arguments.base, arguments.rounds)
    figures = [figure_of(name, *both) for name, both in found.items()]
    details = {name: {"clock_s": clock, "processor_s": used} for name, (clock, used) in found.items()}
    report("growth", figures, details, as_json=arguments.json)


if __name__ == "__main__":
    main()
