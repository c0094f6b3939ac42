"""The part of the demo about the engine: entries, old states, the bucket, a lost disk."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tidelog.cli.demo_steps import Step
from tidelog.cli.demo_store_steps import Bucket
from tidelog.cli.output import human_bytes
from tidelog.config import EngineConfig
from tidelog.engine.engine import Engine
from tidelog.engine.entry import Batch, CopyObject, CreateBucket, DeleteObject, Entry, PutObject
from tidelog.engine.settings import EngineSettings
from tidelog.engine_wiring import open_engine_at, restore_directory

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidelog.pipeline.engines.place import EngineRoot

ENTRIES = 20_000
_APPLIED_AT_ONCE = 256
_OBJECTS = 4_000
_SEGMENT_BYTES = 1 << 20
_HOT_BYTES = 4 << 20
BUCKET = "demo"

OnDone = Callable[[int], None]


class Known(NamedTuple):
    """What is remembered of the engine before its disk is lost."""

    seq: int
    digest: str
    older_seq: int
    older_digest: str
    data: bytes


def config_of(place: Bucket) -> EngineConfig:
    """An engine that keeps only the newest few MiB of its log on the disk."""
    settings = EngineSettings(wal_segment_size=_SEGMENT_BYTES, hot_tier_bytes=_HOT_BYTES)
    return EngineConfig(store=place.url, storage_engine=settings, object_store=place.settings)


def entries(count: int) -> Iterator[tuple[int, Entry]]:
    """The log of an orchestrator: puts of about 1 KiB, some batches, copies and deletions."""
    yield 1, CreateBucket(BUCKET)
    for seq in range(2, count + 1):
        key = f"object-{seq * 7919 % _OBJECTS:05}"
        if seq % 100 == 0:
            yield seq, Batch([PutObject(BUCKET, f"copy-of-{key}", b"soon replaced"), DeleteObject(BUCKET, key)])
        elif seq % 50 == 0:
            yield seq, CopyObject(BUCKET, f"object-{(seq - 1) * 7919 % _OBJECTS:05}", BUCKET, f"copy-of-{key}")
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
    step.proofs["the engine's disk keeps no more than it was told to"] = found.hot_tier_bytes <= _HOT_BYTES
    step.proofs["the first version of an object is still there, wherever it is"] = first.data == b"%020d" % 2 * 50
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


def lose_and_restore(lost: Path, restored: Path, place: Bucket, known: Known, on_done: OnDone) -> Step:
    """Deletes the directory, and builds the engine anew from the bucket."""
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
    step.proofs["the log goes on where it was"] = next_one.applied
    return step


def collect_with_spark(spark: SparkSession, restored: Path, again: Path, place: Bucket) -> Step:
    """Compacts the engine's log, drops what is not needed any more, and builds the engine anew: all of it by Spark."""
    from tidelog.pipeline.engine_jobs.compact import compact_engine
    from tidelog.pipeline.engine_jobs.gc import apply_engine_gc, plan_engine_gc
    from tidelog.pipeline.engine_jobs.restore import restore_engine_directory

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
            f"{collected.removed_objects} objects, {human_bytes(collected.removed_bytes)}, were not needed any more; "
            f"the log begins at LSN {collected.log_start_lsn:,}",
            f"{rebuilt.rows:,} versions were back in {rebuilt.seconds:.1f} s",
        ]
    )
    step.numbers = {
        "engine_objects_collected": collected.removed_objects,
        "engine_spark_restore_seconds": rebuilt.seconds,
    }
    step.proofs["nothing that the engine refers to was collected"] = compacted.is_good and collected.is_good
    step.proofs["the engine that Spark built anew has the digest of the one before"] = digests[0] == digests[1]
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
    from tidelog.pipeline.engines.place import find_engine

    return find_engine(place.url, None, **place.plain_settings())
