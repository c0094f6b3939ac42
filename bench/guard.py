"""Guards the paths that every message takes: instructions that an operation costs, and how long an append takes.

Instructions are counted by valgrind, which is the same on a busy machine as on a quiet one. Each operation is run so
many times and twice as many times: the difference is what it costs, without the start of Python. What is counted is
compared with `guard.json`, which has figures for a version of Python: 15 % more fails. Where there are none for this
version, or no valgrind, that is said, and nothing fails; without valgrind in CI (`CI=true`) it does.

Instructions do not see a thread that sleeps. So the median of appends is held against a copy of memory in the same
process, in alternating rounds, of which the best counts: more than five times what is written down fails.

python bench/guard.py [--write] [--json]
python bench/guard.py --work append=2000,scan=400
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from measuring import parser_for

import tidelog
from tidelog import _native
from tidelog.log.frame import MAX_PAYLOAD_BYTES
from tidelog.topics.message import Message

HERE = Path(__file__).resolve().parent
WRITTEN = HERE / "guard.json"
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
MOST_GROWTH = 1.15
MOST_WAITING = 5.0
PAYLOAD = bytes(range(256)) * 4
FRAMES = 64
COPIED_BYTES = 64 << 10
LATENCY_ROUNDS = 5
LATENCY_APPENDS = 2000
BATCH = 100


def work_append(count: int, directory: Path) -> None:
    """Appends that are accepted, in batches that are flushed: the writer's part is in it."""
    with tidelog.open(directory / "log", store=None) as log:
        topic = log.topic("bench/append")
        for number in range(count):
            topic.append(PAYLOAD)
            if number % BATCH == BATCH - 1:
                topic.flush()


def work_scan(count: int, directory: Path) -> None:
    """Scans of a buffer of frames of 1 KiB: headers, checksums, positions."""
    buffer, _, _ = _native.encode_many(0, [PAYLOAD] * FRAMES)
    for _ in range(count):
        _native.scan_frames(buffer, 0, 0, MAX_PAYLOAD_BYTES)


def work_decode(count: int, directory: Path) -> None:
    """Messages made of frames."""
    payload = _native.encode(PAYLOAD, b"key", {"header": b"value"}, 0)
    buffer, positions, lengths = _native.encode_many(0, [payload] * FRAMES)
    for _ in range(count):
        _native.decode_frames(Message, 0, buffer, positions, lengths, 0, FRAMES)


def work_apply(count: int, directory: Path) -> None:
    """Entries applied to an engine, in batches."""
    with tidelog.open_engine(directory / "engine") as engine:
        engine.apply(1, tidelog.CreateBucket("bench"))
        for first in range(2, count + 2, BATCH):
            seqs = range(first, min(first + BATCH, count + 2))
            engine.apply_many([(seq, tidelog.PutObject("bench", f"key-{seq % 500:04}", PAYLOAD)) for seq in seqs])


def work_get(count: int, directory: Path) -> None:
    """Objects read from an engine."""
    with tidelog.open_engine(directory / "objects") as engine:
        engine.apply(1, tidelog.CreateBucket("bench"))
        engine.apply_many([(seq, tidelog.PutObject("bench", f"key-{seq:04}", PAYLOAD)) for seq in range(2, 102)])
        for number in range(count):
            engine.read("bench", f"key-{2 + number % 100:04}")


WORKS = {"append": work_append, "scan": work_scan, "decode": work_decode, "apply": work_apply, "get": work_get}
COUNTS = {"append": 3000, "scan": 400, "decode": 100, "apply": 1000, "get": 2000}


def do_works(counts: dict[str, int]) -> None:
    """Does all of them in this process."""
    with TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as directory:
        for name, count in counts.items():
            WORKS[name](count, Path(directory))


def instructions_of(counts: dict[str, int]) -> int:
    """How many instructions a process executes that does these works."""
    words = ",".join(f"{name}={count}" for name, count in counts.items())
    command = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
    command += [sys.executable, str(Path(__file__).resolve()), "--work", words]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = re.search(r"I\s+refs:\s+([\d,]+)", done.stderr)
    assert found is not None, done.stderr
    return int(found[1].replace(",", ""))


def count_instructions() -> dict[str, int]:
    """Instructions of one operation of each kind."""
    found = {}
    for name, count in COUNTS.items():
        once, twice = instructions_of({name: count}), instructions_of({name: 2 * count})
        found[name] = (twice - once) // count
        print(f"{name}: {found[name]:,} instructions", file=sys.stderr)
    return found


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
    if found["append_over_copy"] > written["append_over_copy"] * MOST_WAITING:
        told.append(
            f"the median append takes {found['append_over_copy']} times a copy of 64 KiB, "
            f"and {written['append_over_copy']} before: it waits for something"
        )
    return told


def main() -> int:
    """Measures, and compares or writes."""
    parser = parser_for(__doc__)
    parser.add_argument("--write", action="store_true", help="write down what is measured, as what later ones may cost")
    parser.add_argument("--work", metavar="NAME=COUNT,...", help="only do these works: what valgrind looks at")
    arguments = parser.parse_args()
    if arguments.work:
        do_works({name: int(count) for name, count in (one.split("=") for one in arguments.work.split(","))})
        return 0
    written = json.loads(WRITTEN.read_text("utf-8")) if WRITTEN.exists() else {}
    has_valgrind = shutil.which("valgrind") is not None
    if not has_valgrind:
        print("there is no valgrind: instructions are not counted", file=sys.stderr)
    found = {
        "instructions": count_instructions() if has_valgrind else {},
        "append_over_copy": append_over_copy(),
    }
    if arguments.write:
        WRITTEN.write_text(json.dumps({**written, VERSION: found}, indent=2) + "\n", "utf-8")
    told = judged(found, written[VERSION]) if VERSION in written else []
    if VERSION not in written:
        print(f"nothing is written down for Python {VERSION}: nothing is compared", file=sys.stderr)
    print(
        json.dumps({"python": VERSION, **found, "told": told}, indent=2) if arguments.json else "\n".join(told) or "ok"
    )
    is_blind = not has_valgrind and os.environ.get("CI") == "true"
    return 1 if told or is_blind else 0


if __name__ == "__main__":
    sys.exit(main())
