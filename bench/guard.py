"""Guards the paths that every message takes: instructions that an operation costs, and how long an append takes.

Instructions are counted by valgrind, which is the same on a busy machine as on a quiet one. Each operation is done so
many times and three times as many times: the difference is what it costs, without the start of Python. The processes
have the same small environment and hash seed, and glibc copies memory in the same way on any processor, so a machine of
the same kind counts the same. What is counted is compared with `guard.json`, which has figures for a version of Python:
15 % more fails. Where there are none for this version, or no valgrind, that is said, and nothing fails; without
valgrind in CI (`CI=true`) it does. Reading is guarded twice: small messages show what each of them costs, large ones
(`read`, `columns`, `engine_scan`) what their bytes cost, where one more copy is more than the 15 %.

Instructions do not see a thread that sleeps. So it is counted how often an operation that never waits gives the
processor away (an apply waits for the disk): once more than is written down fails, however short it is. And the median
of appends is held against a copy of memory in the same process, in alternating rounds, of which the best counts: more
than five times what is written down fails.

python bench/guard.py [--only NAME ...] [--write] [--json]
python bench/guard.py --work append=2000,scan=400
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from measuring import parser_for

import tidelog
from tidelog import _native
from tidelog.log.frame import scan
from tidelog.log.view import LogView
from tidelog.topics.columns import gather_columns
from tidelog.topics.message import Message

HERE = Path(__file__).resolve().parent
WRITTEN = HERE / "guard.json"
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
MOST_GROWTH = 1.15
MOST_WAITING = 5.0
PAYLOAD = bytes(range(256)) * 4
FRAMES = 64
LARGE = PAYLOAD * 16
LARGE_MESSAGES = 32
TOPIC = "bench/guard"
COPIED_BYTES = 64 << 10
LATENCY_ROUNDS = 5
LATENCY_APPENDS = 2000
WAITING_OPERATIONS = 100
# They wait for the disk: how often their thread is switched meanwhile is the machine's doing.
SYNCED = ("apply", "apply_many")
BATCH = 100
# A copy is then one instruction a byte, by whatever processor: one more copy of something large is seen.
GLIBC_FOR_ANY = "glibc.cpu.hwcaps=Prefer_ERMS"


Operation = Callable[[int], object]
"""Does it once; it is told how many times before."""


@contextmanager
def append(directory: Path) -> Iterator[Operation]:
    """An append that is accepted; each hundred is flushed: the writer's part is in it."""
    with tidelog.open(directory / "append", store=None) as log:
        topic = log.topic(TOPIC)

        def one(number: int) -> None:
            topic.append(PAYLOAD)
            if number % BATCH == BATCH - 1:
                topic.flush()

        yield one


@contextmanager
def append_many(directory: Path) -> Iterator[Operation]:
    """Appends of ten messages at once."""
    with tidelog.open(directory / "append_many", store=None) as log:
        topic = log.topic(TOPIC)

        def one(number: int) -> None:
            topic.append_many([PAYLOAD] * 10)
            if number % BATCH == BATCH - 1:
                topic.flush()

        yield one


@contextmanager
def scan_frames(directory: Path) -> Iterator[Operation]:
    """A scan of a buffer of frames of 1 KiB: headers, checksums, positions."""
    buffer, _, _ = _native.encode_many(0, [PAYLOAD] * FRAMES)
    yield lambda _: scan(buffer)


@contextmanager
def decode(directory: Path) -> Iterator[Operation]:
    """Messages made of frames."""
    payload = _native.encode(PAYLOAD, b"key", {"header": b"value"}, 0)
    places = _native.encode_many(0, [payload] * FRAMES)
    yield lambda _: _native.decode_frames(Message, 0, *places, 0, FRAMES)


@contextmanager
def read(directory: Path) -> Iterator[Operation]:
    """A topic read back from its files: large messages, so that what is done with their bytes is most of it."""
    _fill_topic(directory / "read")
    with tidelog.open(directory / "read", store=None) as log:
        topic = log.topic(TOPIC)
        yield lambda _: deque(topic.read(start="earliest"), maxlen=0)


@contextmanager
def columns(directory: Path) -> Iterator[Operation]:
    """The same messages as columns, as Spark reads them."""
    _fill_topic(directory / "columns")
    view = LogView(directory / "columns" / TOPIC)

    def one(_: int) -> None:
        for batch in view.read():
            assert batch.frames is not None
            gather_columns(batch.frames, batch.start, batch.stop)

    try:
        yield one
    finally:
        view.close()


def _fill_topic(directory: Path) -> None:
    with tidelog.open(directory, store=None) as log:
        log.topic(TOPIC).append_many([LARGE] * LARGE_MESSAGES)


@contextmanager
def apply(directory: Path) -> Iterator[Operation]:
    """An entry applied to an engine."""
    with tidelog.open_engine(directory / "apply") as engine:
        engine.apply(1, tidelog.CreateBucket("bench"))

        def one(number: int) -> None:
            engine.apply(number + 2, tidelog.PutObject("bench", f"key-{number % 500:04}", PAYLOAD))

        yield one


@contextmanager
def apply_many(directory: Path) -> Iterator[Operation]:
    """A hundred entries applied at once."""
    with tidelog.open_engine(directory / "apply_many") as engine:
        engine.apply(1, tidelog.CreateBucket("bench"))

        def one(number: int) -> None:
            seqs = range(number * BATCH + 2, (number + 1) * BATCH + 2)
            engine.apply_many([(seq, tidelog.PutObject("bench", f"key-{seq % 500:04}", PAYLOAD)) for seq in seqs])

        yield one


@contextmanager
def get(directory: Path) -> Iterator[Operation]:
    """An object read from an engine."""
    with tidelog.open_engine(directory / "get") as engine:
        _fill_engine(engine, PAYLOAD, 100)
        yield lambda number: engine.read("bench", f"key-{number % 100:04}")


@contextmanager
def engine_scan(directory: Path) -> Iterator[Operation]:
    """Large objects of an engine, listed with their values."""
    with tidelog.open_engine(directory / "engine_scan") as engine:
        _fill_engine(engine, LARGE, LARGE_MESSAGES)
        yield lambda _: deque(engine.scan("bench", with_values=True), maxlen=0)


def _fill_engine(engine: tidelog.Engine, value: bytes, count: int) -> None:
    engine.apply(1, tidelog.CreateBucket("bench"))
    engine.apply_many([(n + 2, tidelog.PutObject("bench", f"key-{n:04}", value)) for n in range(count)])


WORKS: dict[str, Callable[[Path], AbstractContextManager[Operation]]] = {
    "append": append,
    "append_many": append_many,
    "scan": scan_frames,
    "decode": decode,
    "read": read,
    "columns": columns,
    "apply": apply,
    "apply_many": apply_many,
    "get": get,
    "engine_scan": engine_scan,
}
COUNTS = {
    "append": 4000,
    "append_many": 500,
    "scan": 500,
    "decode": 200,
    "read": 50,
    "columns": 50,
    "apply": 200,
    "apply_many": 20,
    "get": 3000,
    "engine_scan": 50,
}


def do_works(counts: dict[str, int]) -> None:
    """Does all of them in this process."""
    with TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as directory:
        for name, count in counts.items():
            with WORKS[name](Path(directory)) as operation:
                for number in range(count):
                    operation(number)


def instructions_of(name: str, count: int) -> int:
    """How many instructions a process executes that does an operation so many times."""
    counted = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
    said = _worked(f"{name}={count}", *counted)
    found = re.search(r"I\s+refs:\s+([\d,]+)", said)
    assert found is not None, said
    return int(found[1].replace(",", ""))


def _worked(works: str, *under: str) -> str:
    """What a process of its own that did these works says; its environment is the same whatever the user's is."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    return subprocess.run(
        [*under, sys.executable, str(Path(__file__).resolve()), "--work", works],
        env={**kept, "PYTHONHASHSEED": "0", "LC_ALL": "C", "GLIBC_TUNABLES": GLIBC_FOR_ANY},
        capture_output=True,
        text=True,
        check=True,
    ).stderr


def count_instructions(names: Sequence[str]) -> dict[str, int]:
    """Instructions of one operation of each kind."""
    _worked(",".join(f"{name}=1" for name in names))  # all that is imported is compiled by now
    found = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name in names:
            few, many = COUNTS[name], 3 * COUNTS[name]
            once, thrice = pool.map(instructions_of, (name, name), (few, many))
            found[name] = (thrice - once) // (many - few)
            print(f"{name}: {found[name]:,} instructions", file=sys.stderr)
    return found


def waits(name: str) -> int:
    """How many times an operation that never waits gives the processor away. Other threads make it more for some of the
    operations: a tenth of them have so few."""
    counts = []
    with TemporaryDirectory() as directory, WORKS[name](Path(directory)) as operation:
        for number in range(WAITING_OPERATIONS):
            before = _times_given_away()
            operation(number)
            counts.append(_times_given_away() - before)
    return sorted(counts)[WAITING_OPERATIONS // 10]


def _times_given_away() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def append_over_copy() -> float:
    """The median of appends over the median of copies of 64 KiB, in the best of some rounds."""
    data, ratios = bytes(COPIED_BYTES), []
    with TemporaryDirectory() as directory, tidelog.open(directory, store=None) as log:
        topic = log.topic("bench/append")
        for _ in range(LATENCY_ROUNDS):
            appends = [_seconds(lambda: topic.append(PAYLOAD)) for _ in range(LATENCY_APPENDS)]
            copies = [_seconds(lambda: bytearray(data)) for _ in range(LATENCY_APPENDS)]
            topic.flush()
            ratios.append(statistics.median(appends) / statistics.median(copies))
    return round(min(ratios), 3)


def _seconds(call: Any) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def judged(found: dict[str, Any], written: dict[str, Any]) -> list[str]:
    """What has become more than it may."""
    told = []
    for name, count in found["instructions"].items():
        before = written["instructions"].get(name)
        if before is not None and count > before * MOST_GROWTH:
            told.append(
                f"{name} costs {count:,} instructions, {count / before - 1:.0%} more than the {before:,} before"
            )
    for name, times in found["waits"].items():
        before = written["waits"].get(name)
        if before is not None and times > before:
            told.append(f"{name} gives the processor away {times} times, and {before} before: it sleeps or waits")
    if found["append_over_copy"] > written["append_over_copy"] * MOST_WAITING:
        told.append(
            f"the median append takes {found['append_over_copy']} times a copy of 64 KiB, "
            f"and {written['append_over_copy']} before: it waits for something"
        )
    return told


def main() -> int:
    """Measures, and compares or writes."""
    parser = parser_for(__doc__)
    parser.add_argument("--only", nargs="+", choices=WORKS, default=list(WORKS), help="these operations (all)")
    parser.add_argument("--write", action="store_true", help="write down what is measured, as what later ones may cost")
    parser.add_argument("--work", metavar="NAME=COUNT,...", help="only do these works: what valgrind looks at")
    arguments = parser.parse_args()
    if arguments.work:
        do_works({name: int(count) for name, count in (one.split("=") for one in arguments.work.split(","))})
        return 0
    everything = json.loads(WRITTEN.read_text("utf-8")) if WRITTEN.exists() else {}
    has_valgrind = shutil.which("valgrind") is not None
    if not has_valgrind:
        print("there is no valgrind: instructions are not counted", file=sys.stderr)
    found = {
        "instructions": count_instructions(arguments.only) if has_valgrind else {},
        "waits": {name: waits(name) for name in arguments.only if name not in SYNCED},
        "append_over_copy": append_over_copy(),
    }
    if arguments.write:
        WRITTEN.write_text(json.dumps({**everything, VERSION: found}, indent=2) + "\n", "utf-8")
        everything[VERSION] = found
    told = judged(found, everything[VERSION]) if VERSION in everything else []
    if VERSION not in everything:
        print(f"nothing is written down for Python {VERSION}: nothing is compared", file=sys.stderr)
    print(
        json.dumps({"python": VERSION, **found, "told": told}, indent=2) if arguments.json else "\n".join(told) or "ok"
    )
    is_blind = not has_valgrind and os.environ.get("CI") == "true"
    return 1 if told or is_blind else 0


if __name__ == "__main__":
    sys.exit(main())
