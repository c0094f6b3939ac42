"""How the main operations grow: the same work at 1, 10 and 100 times the size, and the exponent of its time.

An exponent of 1 is linear. It is taken between 10 and 100 times, since what an operation costs at any size hides the
growth of small ones, and of the fastest of the rounds, since only that is not about the machine's other work. More than
1.1 is a fault. It is that of the processor time, which others on the machine hardly change (of the clock for Spark,
whose work is in other processes); the exponent by the clock is told beside. Where an operation is one of many on a
store (a get, a cold read), as many are done as the size says, in a store of that size: then 1 means that one of them
costs the same in a large store.

python bench/growth.py [--base 1000] [--rounds 3] [--only topics|engine|spark ...] [--dir .] [--json]
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

from measuring import Figure, at_most, parser_for, report, scratch_directory, settle

import tidelog

STEPS = (1, 10, 100)
TARGET = 1.1
VALUE = os.urandom(1024)
BATCH = 256
TOPIC = "bench/growth"
NEVER_SECONDS = 86400
PARTS = ("topics", "engine")
ALL_PARTS = (*PARTS, "spark")
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


class SparkReads:
    """Spark's source over topics of all sizes, in one session."""

    def __init__(self) -> None:
        self._spark = tidelog.spark_session("bench", "local[2]")

    def __call__(self, root: Path, count: int) -> Times:
        store = f"file://{root / 'store'}"
        with tidelog.open(root / "log", store=store, metadata="bucket", local_retention_bytes=1) as log:
            topic = log.topic(TOPIC)
            for first in range(0, count, 4096):
                topic.append_many([VALUE] * min(4096, count - first))
            topic.ship()

        def read() -> None:
            reader = self._spark.read.format("tidelog").option("root", store).option("subscribe", TOPIC)
            total = (
                reader.option("columns", "value").load().selectExpr("sum(length(value)) AS total").collect()[0].total
            )
            assert total == count * len(VALUE)

        read()
        seconds, _ = timed(read)
        return {"Spark read": (seconds, seconds)}

    def stop(self) -> None:
        self._spark.stop()


def measure(scratch: Path, part: str, base: int, rounds: int) -> dict[str, tuple[Grown, Grown]]:
    """Seconds of each operation, by the clock and of processors."""
    spark = SparkReads() if part == "spark" else None
    work: Callable[[Path, int], Times] = spark or {"topics": topics, "engine": engines}[part]
    found: dict[str, tuple[Grown, Grown]] = {}
    try:
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
