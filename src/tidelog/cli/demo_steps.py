"""The steps of the demo. Each works on real files, and returns its numbers and its proofs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread, Timer

from tidelog.errors import InternalError
from tidelog.log.binding import BINDING_BYTES
from tidelog.log.examine import LogExamination, examine_log
from tidelog.log.repair import plan_repair
from tidelog.log.settings import LogSettings
from tidelog.topics.storage import LogDirectory
from tidelog.topics.topic import Topic

TOPIC = "demo/orders"
# Small, so that there are several files to be pruned later.
ROTATE_BYTES = 2 << 20
_CUSTOMERS = 1000
_REPORT_EVERY = 1000
_CHILD_TIMEOUT_SECONDS = 60

OnDone = Callable[[int], None]


@dataclass
class Step:
    """What a step found out: remarks, figures, and claims that were checked."""

    findings: list[str] = field(default_factory=list)
    numbers: dict[str, object] = field(default_factory=dict)
    proofs: dict[str, bool] = field(default_factory=dict)


@dataclass
class Appended:
    """The messages of the first step: how many, and the checksum of all values in order."""

    step: Step
    messages: int
    checksum: int


@dataclass
class Crashed:
    """What the killed process had been told to be safe: the value at each offset."""

    step: Step
    acknowledged: dict[int, bytes]


class _Tail(Thread):
    """Follows a topic from its beginning up to an offset, and checks the order as it goes."""

    def __init__(self, topic: Topic, stop_offset: int) -> None:
        super().__init__(name="demo-tail", daemon=True)
        self._messages = topic.read(0, stop_offset, follow=True)
        self.count = 0
        self.checksum = 0
        self.is_in_order = True

    def run(self) -> None:
        for message in self._messages:
            self.is_in_order = self.is_in_order and message.offset == self.count
            self.checksum = zlib.crc32(message.value, self.checksum)
            self.count += 1


def append_and_tail(root: Path, messages: int, on_done: OnDone) -> Appended:
    """Appends one by one and tails from a second thread, then syncs."""
    with LogDirectory(root, LogSettings(rotate_max_bytes=ROTATE_BYTES)) as log:
        topic = log.topic(TOPIC)
        tail = _Tail(topic, messages)
        tail.start()
        started = time.perf_counter()
        checksum = _append(topic, messages, on_done)
        append_seconds = time.perf_counter() - started
        topic.flush()
        seconds = time.perf_counter() - started
        tail.join()
        is_durable = topic.durable_offset == topic.next_offset == messages
    step = Step()
    step.findings = [f"accepted {messages:,} in {append_seconds:.2f} s, all on the disk after {seconds:.2f} s"]
    step.numbers = {"appended": messages, "appends_per_second": messages / append_seconds, "tailed": tail.count}
    step.proofs["the tail saw every message once, in order"] = (
        tail.is_in_order and tail.count == messages and tail.checksum == checksum
    )
    step.proofs["flush returned with everything on the disk"] = is_durable
    return Appended(step, messages, checksum)


def _append(topic: Topic, messages: int, on_done: OnDone) -> int:
    checksum = 0
    for number in range(messages):
        value = b'{"order": %d, "article": %d, "cents": %d}' % (number, number * 7919 % 5000, number * 104729 % 99999)
        topic.append(value, key=b"customer-%d" % (number % _CUSTOMERS), headers={"source": b"demo"})
        checksum = zlib.crc32(value, checksum)
        if number % _REPORT_EVERY == 0:
            on_done(number)
    return checksum


def crash(root: Path, acknowledged_target: int, on_done: OnDone) -> Crashed:
    """Lets another process append until it has told of enough acknowledged messages, and kills it at work."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tidelog.cli.demo_writer", str(root), TOPIC],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    watchdog = Timer(_CHILD_TIMEOUT_SECONDS, child.kill)
    watchdog.start()
    try:
        acknowledged = _listen(child, acknowledged_target, on_done)
    finally:
        watchdog.cancel()
        child.kill()
        code = child.wait()
    if len(acknowledged) < acknowledged_target:
        raise InternalError(f"the appending process ended early, with {code}")
    step = Step(findings=[f"killed after {len(acknowledged):,} messages had been acknowledged as synced"])
    step.numbers["acknowledged_before_kill"] = len(acknowledged)
    return Crashed(step, acknowledged)


def _listen(child: subprocess.Popen[bytes], target: int, on_done: OnDone) -> dict[int, bytes]:
    """What the child tells until it is killed, and what it had told by then. A line is written in one piece."""
    assert child.stdout is not None
    acknowledged: dict[int, bytes] = {}
    with child.stdout as lines:
        for line in lines:
            offset, _, value = line.partition(b" ")
            if value.endswith(b"\n"):
                acknowledged[int(offset)] = value[:-1]
            if len(acknowledged) == target:
                child.kill()
            on_done(min(len(acknowledged), target))
    return acknowledged


def reread(root: Path, appended: Appended, crashed: Crashed, on_done: OnDone) -> Step:
    """Opens what the killed process left, and holds every message against what is known about it."""
    started = time.perf_counter()
    with LogDirectory(root, LogSettings(rotate_max_bytes=ROTATE_BYTES)) as log:
        topic = log.topic(TOPIC)
        open_seconds = time.perf_counter() - started
        statistics = topic.statistics().log
        torn = None if statistics is None else statistics.recovery.torn_tail
        count, checksum, missing, is_contiguous = 0, 0, dict(crashed.acknowledged), True
        for message in topic.read():
            is_contiguous = is_contiguous and message.offset == count
            if count < appended.messages:
                checksum = zlib.crc32(message.value, checksum)
            if missing.get(message.offset) == message.value:
                del missing[message.offset]
            count += 1
            if count % _REPORT_EVERY == 0:
                on_done(count)
        next_offset = topic.next_offset
    step = Step()
    tail = "no torn tail" if torn is None else f"a torn tail of {torn.size} bytes was cut"
    step.findings = [f"opened in {open_seconds * 1000:.0f} ms, {tail}; {count:,} messages"]
    step.numbers = {"recovered": count, "acknowledged_and_lost": len(missing), "open_ms": open_seconds * 1000}
    step.proofs["every message that was acknowledged as synced is there"] = not missing
    step.proofs["offsets are contiguous, none is missing or used twice"] = is_contiguous and count == next_offset
    step.proofs["the messages from before the crash have their checksum"] = checksum == appended.checksum
    return step


def damage_and_repair(root: Path, copy_root: Path) -> Step:
    """Flips a bit in a copy, and lets verify and repair loose on it."""
    shutil.copytree(root, copy_root, ignore=shutil.ignore_patterns("lock"))
    with LogDirectory(copy_root, read_only=True) as log:
        directory = log.topic_directory(TOPIC)
        total = log.topic(TOPIC).next_offset
    path, byte = _flip_bit(directory)
    examined = examine_log(directory)
    step = Step(findings=[f"flipped bit 0 of byte {byte} in {path.name}"])
    step.findings += [f"verify found: {problem}" for problem in examined.problems]
    step.proofs["verify finds the damage, by file and byte"] = _is_found(examined, path.name, byte)
    plan = plan_repair(directory)
    kept = plan.apply()
    step.findings += [f"repair did: {action}" for action in plan.actions]
    lost = sum(last - first + 1 for first, last in plan.lost)
    step.numbers |= {"damaged_messages": lost, "kept_aside": [str(one) for one in kept]}
    step.proofs["after the repair verify finds nothing"] = not examine_log(directory).problems
    step.proofs["all other messages are still there"] = lost >= 1 and _readable(copy_root) == total - lost
    return step


def _flip_bit(directory: Path) -> tuple[Path, int]:
    """In the middle of the largest file: far from both ends, so it cannot pass for a torn tail."""
    path = max(directory.glob("wal.*.log"), key=lambda one: one.stat().st_size)
    byte = path.stat().st_size // 2
    with path.open("r+b") as file:
        file.seek(BINDING_BYTES + byte)
        before = file.read(1)[0]
        file.seek(BINDING_BYTES + byte)
        file.write(bytes([before ^ 1]))
    return path, byte


def _is_found(examined: LogExamination, name: str, byte: int) -> bool:
    """Whether there is one problem: in this file, from before the byte to behind it."""
    if len(examined.problems) != 1 or examined.problems[0].file != name:
        return False
    runs = next(file.runs for file in examined.files if file.name == name)
    return examined.problems[0].byte <= byte and not any(run.start <= byte < run.end for run in runs)


def _readable(root: Path) -> int:
    with LogDirectory(root, read_only=True) as log:
        return sum(1 for _ in log.topic(TOPIC).read(on_gap="skip"))
