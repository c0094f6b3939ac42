"""The steps of the demo: the log, the store, the engine, Spark. Each returns its numbers and its proofs."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread, Timer
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tidelog.cli.dev_s3 import SeaweedServer, weed_program
from tidelog.cli.output import Output
from tidelog.cold.settings import TierSettings
from tidelog.config import EngineConfig, Settings
from tidelog.engine.engine import Engine
from tidelog.engine.entry import Batch, CopyObject, CreateBucket, DeleteObject, Entry, PutObject
from tidelog.engine.settings import EngineSettings
from tidelog.engine_wiring import open_engine_at, restore_directory
from tidelog.errors import ConfigError, FencedError, HeldError, InternalError
from tidelog.log.binding import BINDING_BYTES
from tidelog.log.repair import plan_repair
from tidelog.log.settings import LogSettings
from tidelog.log.verify import LogFindings, verify_files
from tidelog.pipeline.address import EngineRoot, Root, find_engine, find_root
from tidelog.secret import Secret
from tidelog.store.settings import StoreSettings
from tidelog.topics.directory import LogDirectory
from tidelog.topics.topic import Topic
from tidelog.units import human_bytes
from tidelog.wiring import open_directory

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidelog.pipeline.jobs.job import JobReport

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
            self.checksum = zlib.crc32(message.value or b"", self.checksum)
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
    """Starts a process that appends, and kills it once it has reported enough acknowledged messages."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tidelog.cli.demo.steps", str(root), TOPIC],
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
                checksum = zlib.crc32(message.value or b"", checksum)
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
    """Flips a bit in a copy, then verifies and repairs the copy."""
    shutil.copytree(root, copy_root, ignore=shutil.ignore_patterns("lock"))
    with LogDirectory(copy_root, read_only=True) as log:
        directory = log._topic_directory(TOPIC)
        total = log.topic(TOPIC).next_offset
    path, byte = _flip_bit(directory)
    examined = verify_files(directory)
    step = Step(findings=[f"flipped bit 0 of byte {byte} in {path.name}"])
    step.findings += [f"verify found: {finding.text}" for finding in examined.findings]
    step.proofs["verify finds the damage, by file and byte"] = _is_found(examined, path.name, byte)
    plan = plan_repair(directory)
    kept = plan.apply()
    step.findings += [f"repair did: {action}" for action in plan.actions]
    lost = sum(last - first + 1 for first, last in plan.lost)
    step.numbers |= {"damaged_messages": lost, "kept_aside": [str(one) for one in kept]}
    step.proofs["after the repair verify finds nothing"] = not verify_files(directory).findings
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


def _is_found(examined: LogFindings, name: str, byte: int) -> bool:
    """Whether there is exactly one problem: in this file, in a range around the byte."""
    found = examined.findings[0] if len(examined.findings) == 1 else None
    if found is None or found.byte is None or Path(found.path or "").name != name:
        return False
    runs = next(file.runs for file in examined.files if file.name == name)
    return found.byte <= byte and not any(run.start <= byte < run.end for run in runs)


def _readable(root: Path) -> int:
    with LogDirectory(root, read_only=True) as log:
        return sum(1 for _ in log.topic(TOPIC).read(on_gap="skip"))


# The process that the demo kills: it appends synced messages and prints each one only after it was acknowledged.
#
# A line on stdout is `offset value`, written in one piece, so its reader knows what has to survive the kill.


_THREADS = 8


def append_until_killed(topic: Topic, worker: int) -> None:
    """Ends otherwise only when its reader is gone."""
    number = 0
    while True:
        value = b"worker-%d-message-%d" % (worker, number)
        offset = topic.append(value, key=b"worker-%d" % worker, sync=True)
        try:
            os.write(sys.stdout.fileno(), b"%d %s\n" % (offset, value))
        except BrokenPipeError:
            return
        number += 1


def main() -> None:
    """Takes the log directory and the topic from the command line."""
    root, name = sys.argv[1:]
    with LogDirectory(Path(root)) as log:
        topic = log.topic(name)
        threads = [Thread(target=append_until_killed, args=(topic, worker)) for worker in range(_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


# The store steps of the demo: ship, prune, lose the disk, restore, and fence the previous owner.


_KEPT_BYTES = 4 << 20


class Bucket(NamedTuple):
    """Where the history goes, and how it is reached."""

    url: str
    settings: StoreSettings
    remark: str

    def plain_settings(self) -> dict[str, object]:
        """Its connection settings as keywords, to be sent to other processes."""
        given = {name: value for name, value in msgspec.structs.asdict(self.settings).items() if value is not None}
        return {name: value.reveal() if isinstance(value, Secret) else value for name, value in given.items()}


class Content(NamedTuple):
    """All of a topic: how many messages, from which offset on, and the checksum of their values in order."""

    messages: int
    next_offset: int
    checksum: int
    is_contiguous: bool


@contextlib.contextmanager
def bucket(directory: Path, output: Output) -> Iterator[Bucket]:
    """A bucket of a SeaweedFS that runs for as long as this lasts; without the program, a directory stands in."""
    if weed_program() is None:
        directory.mkdir(parents=True, exist_ok=True)
        remark = "weed is not installed (pip install 'tidelog[dev-s3]'), so a directory stands in for the bucket"
        yield Bucket(f"file://{directory.resolve()}", StoreSettings(), remark)
        return
    server = SeaweedServer(directory)
    with contextlib.ExitStack() as running:
        running.callback(server.stop)
        with output.working("Starting SeaweedFS"):
            server.start()
        yield Bucket(server.url, server.settings(), f"SeaweedFS answers at {server.endpoint}")


def open_node(root: Path, place: Bucket) -> LogDirectory:
    """A log directory with its history in the bucket, and only the newest few MiB of it on the disk."""
    settings = Settings(
        store=place.url,
        metadata="bucket",
        log=LogSettings(rotate_max_bytes=ROTATE_BYTES),
        tier=TierSettings(max_object_bytes=8 << 20, local_retention_bytes=_KEPT_BYTES),
        object_store=place.settings,
    )
    return open_directory(root, settings)


def ship_and_prune(root: Path, place: Bucket, on_done: OnDone) -> tuple[Step, Content]:
    """Ships a log that was local so far, lets its disk be pruned, and reads all of it again."""
    with open_node(root, place) as log:
        topic = log.topic(TOPIC)
        before = content_of(topic, lambda _: None)
        local_bytes = _local_bytes(topic)
        started = time.perf_counter()
        shipped = topic.ship()
        seconds = time.perf_counter() - started
        topic.prune()
        hot_start, left_bytes = topic.hot_start_offset, _local_bytes(topic)
        after = content_of(topic, on_done)
        objects = _objects(topic)
    step = Step(
        findings=[
            place.remark,
            f"shipped {shipped:,} messages as {objects} objects in {seconds:.2f} s",
            f"the disk has {human_bytes(left_bytes)} of {human_bytes(local_bytes)} left: offsets from {hot_start:,} on",
        ]
    )
    step.numbers = {"shipped": shipped, "objects": objects, "ship_seconds": seconds, "local_bytes_left": left_bytes}
    step.proofs["everything is in the bucket"] = shipped == before.next_offset
    step.proofs["the disk keeps no more than its limit"] = left_bytes <= _KEPT_BYTES + ROTATE_BYTES
    step.proofs["reads continue from bucket to disk, byte for byte"] = after == before and after.is_contiguous
    return step, before


def lose_and_restore(lost: Path, restored: Path, place: Bucket, before: Content, on_done: OnDone) -> Step:
    """Deletes the directory, and continues from the bucket alone in another one."""
    shutil.rmtree(lost)
    started = time.perf_counter()
    with open_node(restored, place) as log:
        topic = log.topic(TOPIC)
        seconds = time.perf_counter() - started
        after = content_of(topic, on_done)
        offset = topic.append(b"the first message after the disk was lost", sync=True)
        topic.ship()
    step = Step(findings=[f"opened from the bucket alone in {seconds * 1000:.0f} ms; {after.messages:,} messages"])
    step.numbers = {"restored": after.messages, "restore_open_ms": seconds * 1000}
    step.proofs["nothing is missing after the loss of the disk"] = after == before
    step.proofs["the next message got the next offset"] = offset == before.next_offset
    return step


def fence(old_root: Path, new_root: Path, place: Bucket) -> Step:
    """Lets a second node take the topic over while the first still has it open, once that is meant."""
    with open_node(old_root, place) as old, open_node(new_root, place) as new:
        replaced, held = old.topic(TOPIC), _is_held(new)
        owner = new.topic(TOPIC, take_over=True)
        offset = owner.append(b"written by the new owner", sync=True)
        owner.ship()
        try:
            replaced.append(b"written by the replaced owner")
            replaced.ship()
            refused = ""
        except FencedError as error:
            refused = str(error)
        last = next(iter(owner.read(offset)))
    step = Step(
        findings=[f"the first node got: {refused.partition('.')[0]}" if refused else "the first node got no error"]
    )
    step.proofs["no node takes a topic from a live one by accident"] = held
    step.proofs["the replaced owner can change nothing"] = bool(refused)
    step.proofs["the new owner's messages are untouched"] = last.value == b"written by the new owner"
    return step


def _is_held(log: LogDirectory) -> bool:
    try:
        log.topic(TOPIC)
    except HeldError:
        return True
    return False


def content_of(topic: Topic, on_done: OnDone) -> Content:
    """Reads everything."""
    count, checksum, is_contiguous = 0, 0, True
    for message in topic.read():
        is_contiguous = is_contiguous and message.offset == count
        checksum = zlib.crc32(message.value or b"", checksum)
        count += 1
        if count % _REPORT_EVERY == 0:
            on_done(count)
    return Content(count, topic.next_offset, checksum, is_contiguous)


def _local_bytes(topic: Topic) -> int:
    statistics = topic.statistics().log
    return 0 if statistics is None else statistics.file_bytes


def _objects(topic: Topic) -> int:
    tier = topic.statistics().tier
    return 0 if tier is None or tier.shipper is None else tier.shipper.objects_created


# The engine steps of the demo: entries, old states, the bucket, a lost disk.


ENTRIES = 20_000
_APPLIED_AT_ONCE = 256
_OBJECTS = 4_000
_SEGMENT_BYTES = 1 << 20
_HOT_BYTES = 4 << 20
BUCKET = "demo"


class Known(NamedTuple):
    """What is remembered of the engine before its disk is lost."""

    seq: int
    digest: str
    older_seq: int
    older_digest: str
    data: bytes


def config_of(place: Bucket) -> EngineConfig:
    """An engine that keeps only the newest few MiB of its log on the disk."""
    settings = EngineSettings(rotate_max_bytes=_SEGMENT_BYTES, local_retention_bytes=_HOT_BYTES)
    return EngineConfig(store=place.url, storage_engine=settings, object_store=place.settings)


def entries(count: int) -> Iterator[tuple[int, Entry]]:
    """The log of an orchestrator: puts of about 1 KiB, some batches, copies and deletions."""
    yield 1, CreateBucket(BUCKET)
    for seq in range(2, count + 1):
        key = _key(seq)
        if seq % 100 == 0:
            yield seq, Batch([PutObject(BUCKET, f"copy-of-{key}", b"soon replaced"), DeleteObject(BUCKET, key)])
        elif seq % 50 == 0:
            yield seq, CopyObject(BUCKET, _key(seq - 1), BUCKET, f"copy-of-{key}")
        else:
            yield seq, PutObject(BUCKET, key, b"%020d" % seq * 50, {"seq": seq})


def apply_and_ship(root: Path, place: Bucket, count: int, on_done: OnDone) -> tuple[Step, Known]:
    """Applies a log, reads old states, ships everything and lets files leave the disk."""
    with open_engine_at(root, config_of(place), runs_in_background=False) as engine:
        started = time.perf_counter()
        _apply(engine, count, on_done)
        seconds = time.perf_counter() - started
        engine.update_low_water_mark(engine.applied_seq)
        engine.ship()
        engine.create_checkpoint()
        engine.ship()
        found = engine.statistics()
        older_seq = count // 3
        first = engine.read(BUCKET, _key(2), seq=2)
        known = Known(engine.applied_seq, engine.digest(), older_seq, engine.digest(older_seq), first.data)
        marks = (engine.high_water_mark, engine.low_water_mark, engine.truncation_mark)
    written = found.wal.next_position
    step = Step(
        findings=[
            f"{count:,} entries, {count / seconds:,.0f} a second, 256 with one sync",
            f"the disk has {human_bytes(found.hot_tier_bytes)} of {human_bytes(written)} of the log left",
        ]
    )
    step.numbers = {"engine_entries": count, "engine_entries_per_second": count / seconds}
    step.proofs["every entry is in the bucket, and its log may be truncated"] = marks == (count, count, count)
    step.proofs["the engine's disk keeps no more than its limit"] = found.hot_tier_bytes <= _HOT_BYTES
    step.proofs["the first version of an object can still be read"] = first.data == b"%020d" % 2 * 50
    return step, known


def _apply(engine: Engine, count: int, on_done: OnDone) -> None:
    waiting: list[tuple[int, Entry]] = []
    for one in entries(count):
        waiting.append(one)
        if len(waiting) == _APPLIED_AT_ONCE or one[0] == count:
            engine.apply_many(waiting)
            on_done(one[0])
            waiting = []


def _key(seq: int) -> str:
    return f"object-{seq * 7919 % _OBJECTS:05}"


def lose_engine_and_restore(lost: Path, restored: Path, place: Bucket, known: Known, on_done: OnDone) -> Step:
    """Deletes the directory, and restores the engine from the bucket."""
    shutil.rmtree(lost)
    config = config_of(place)
    started = time.perf_counter()
    report = restore_directory(restored, config)
    on_done(1)
    with open_engine_at(restored, config, runs_in_background=False) as engine:
        seconds = time.perf_counter() - started
        digests = (engine.digest(), engine.digest(known.older_seq))
        first = engine.read(BUCKET, _key(2), seq=2)
        next_one = engine.apply(known.seq + 1, PutObject(BUCKET, "after", b"the disk was lost"))
        on_done(2)
    step = Step(findings=[f"{report.rows:,} versions were back in {seconds:.2f} s; the digest is {digests[0][:16]}..."])
    step.numbers = {"engine_versions_restored": report.rows, "engine_restore_seconds": seconds}
    step.proofs["the restored engine has the digest of the lost one"] = digests[0] == known.digest
    step.proofs["and so has the state that it had earlier"] = digests[1] == known.older_digest
    step.proofs["old values are read from the bucket, byte for byte"] = (
        first.data == known.data and first.tier == "cold"
    )
    step.proofs["the log continues at the next seq"] = next_one.applied
    return step


def collect_with_spark(spark: SparkSession, restored: Path, again: Path, place: Bucket) -> Step:
    """Compacts the engine's log, drops what is no longer needed, and restores the engine: all of it by Spark."""
    from tidelog.pipeline.jobs.engine.compact import compact_engine
    from tidelog.pipeline.jobs.engine.restore import restore_engine_directory
    from tidelog.pipeline.jobs.gc import apply_engine_gc, plan_engine_gc

    digest = _shipped_digest(restored, place)
    root = engine_root_of(place)
    compacted = compact_engine(spark, root)
    plan, _ = plan_engine_gc(spark, root, grace_seconds=0)
    collected = apply_engine_gc(spark, root, plan)
    rebuilt = restore_engine_directory(spark, root, again)
    with open_engine_at(again, config_of(place), runs_in_background=False) as engine:
        digests, first = (digest, engine.digest()), engine.read(BUCKET, _key(2), seq=2)
    step = Step(
        findings=[
            f"{collected.removed_objects} objects, {human_bytes(collected.removed_bytes)}, were no longer needed; "
            f"the log begins at LSN {collected.log_start_lsn:,}",
            f"{rebuilt.rows:,} versions were back in {rebuilt.seconds:.1f} s",
        ]
    )
    step.numbers = {
        "engine_objects_collected": collected.removed_objects,
        "engine_spark_restore_seconds": rebuilt.seconds,
    }
    step.proofs["nothing that the engine refers to was collected"] = compacted.is_good and collected.is_good
    step.proofs["the engine that Spark restored has the same digest"] = digests[0] == digests[1]
    step.proofs["values are read from compacted data, byte for byte"] = first.data == b"%020d" % 2 * 50
    return step


def _shipped_digest(directory: Path, place: Bucket) -> str:
    """All of the engine is in the bucket then."""
    with open_engine_at(directory, config_of(place), runs_in_background=False) as engine:
        engine.update_low_water_mark(engine.applied_seq)
        engine.ship()
        return engine.digest()


def engine_root_of(place: Bucket) -> EngineRoot:
    """The engine in the bucket, as Spark finds it."""
    return find_engine(place.url, None, **place.plain_settings())


# The Spark steps of the demo: query the bucket, write a topic, run the jobs, write a report page.


CUSTOMERS = "demo/customers"
PAGE = "report.html"
_OBJECT_BYTES = 64 << 20
_INSTALL = "PySpark is not installed (pip install 'tidelog[spark]')"


def why_no_spark() -> str | None:
    """Why there is no Spark here, and how to get it; None where there is."""
    if importlib.util.find_spec("pyspark") is None or importlib.util.find_spec("pyarrow") is None:
        return _INSTALL
    from tidelog.pipeline.session.java import find_java

    try:
        find_java()
    except ConfigError as error:
        return str(error)
    return None


def root_of(place: Bucket) -> Root:
    """The bucket as Spark finds it."""
    return find_root(place.url, None, **place.plain_settings())


def query_bucket(spark: SparkSession, place: Bucket, messages: int) -> Step:
    """Reads everything from the bucket, in SQL."""
    from tidelog.pipeline.jobs.tally import root_options

    root = root_of(place)
    started = time.perf_counter()
    frame = spark.read.format("tidelog").options(subscribe=TOPIC, **root_options(root)).load()
    frame.createOrReplaceTempView("orders")
    found = spark.sql("""
        SELECT count(*) AS messages, count(DISTINCT offset) AS offsets, max(offset) AS last,
               count(DISTINCT key) AS customers, sum(length(value)) AS bytes
        FROM orders
    """).collect()[0]
    seconds = time.perf_counter() - started
    findings = [
        f"{found.messages:,} messages of {found.customers:,} customers, {human_bytes(found.bytes)}: {seconds:.1f} s"
    ]
    step = Step(findings=findings, numbers={"queried": found.messages, "query_seconds": seconds})
    step.proofs["Spark sees every message of the bucket once"] = (
        found.messages == found.offsets == messages and found.last == messages - 1
    )
    return step


def write_topic(spark: SparkSession, owner: Path, place: Bucket) -> Step:
    """Writes what it found to another topic, beside the process that owns it."""
    from tidelog.pipeline.jobs.tally import root_options

    root = root_of(place)
    with open_node(owner, place) as log:
        topic = log.topic(CUSTOMERS)
        counts = spark.sql("SELECT key, to_json(struct(count(*) AS orders)) AS value FROM orders GROUP BY key")
        options = {**root_options(root), "topic": CUSTOMERS, "txnAppId": "demo", "txnVersion": "1"}
        for _ in range(2):
            counts.write.format("tidelog").options(**options).mode("append").save()
        written = list(topic.read())
        topic.ship()
    customers = spark.sql("SELECT DISTINCT key FROM orders").count()
    step = Step(findings=[f"{len(written):,} rows came into {CUSTOMERS} through its owner; written twice, there once"])
    step.numbers = {"written_by_spark": len(written)}
    step.proofs["each row that Spark wrote is in the topic once"] = (
        len(written) == customers == len({message.key for message in written})
    )
    return step


def run_jobs(spark: SparkSession, directory: Path, place: Bucket) -> Step:
    """Verifies, compacts and verifies the bucket, makes a table of it and proves that it is equal."""
    from tidelog.pipeline.jobs.compact_topic import CompactOptions, compact
    from tidelog.pipeline.jobs.verify import verify

    root, step = root_of(place), Step()
    before = verify(spark, root)
    compacted = compact(spark, root, options=CompactOptions(target_bytes=_OBJECT_BYTES))
    after = verify(spark, root)
    replaced = sum(one.replaced_objects for one in compacted.topics)
    step.findings.append(f"{replaced} small objects became {sum(one.new_objects for one in compacted.topics)}")
    step.numbers = {"compacted_objects": replaced}
    step.proofs["every frame in the bucket is good"] = before.is_good and after.is_good
    step.proofs["what was compacted is the same, message for message"] = compacted.is_good and _same(before, after)
    _make_table(spark, root, directory, step)
    _make_page(spark, root, directory, step)
    return step


def _same(before: JobReport, after: JobReport) -> bool:
    return [proof.went_in for proof in before.reconciliations] == [proof.went_in for proof in after.reconciliations]


def _make_table(spark: SparkSession, root: Root, directory: Path, step: Step) -> None:
    from tidelog.pipeline.tables.parquet import parquet_table
    from tidelog.pipeline.tables.table import table

    path = (directory / "table").resolve()
    made = table(spark, root, TOPIC, parquet_table(path))
    rows = spark.read.parquet(str(path)).count()
    step.findings.append(f"{path.name}/ is the topic as a Parquet table of {rows:,} rows")
    step.numbers["table_rows"] = rows
    step.proofs["the table has the rows of the topic"] = made.is_good and rows == spark.table("orders").count()


def _make_page(spark: SparkSession, root: Root, directory: Path, step: Step) -> None:
    from tidelog.pipeline.report.report import make_report

    page = directory / PAGE
    make_report(root, page, spark=spark, exact=True)
    step.findings.append(f"{page} is a page to look at")
    step.numbers["page"] = str(page)


if __name__ == "__main__":
    main()
