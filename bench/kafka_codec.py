"""Kafka's protocol without the network: what one Produce and one record cost, and the same by other libraries.

A Produce of 1 MB is parsed without a copy; its batch becomes frames of the log, and frames become a batch again, with
every checksum on the way. A log accepts the frames, and gives them their offsets where they are. Times are CPU time,
best of some runs.

python bench/kafka_codec.py [--rounds 7] [--json]
"""

from __future__ import annotations

import os
import struct
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kio.schema.produce.v9.request import ProduceRequest as OtherProduceRequest
from kio.serial import entity_reader
from measuring import Figure, at_most, parser_for, report

from tidelog import _native
from tidelog.log.append_queue import AppendQueue
from tidelog.log.settings import LogSettings
from tidelog.service.kafka import codec
from tidelog.service.kafka.records import decode_produced, encode_batches

sys.path.append(str(Path(__file__).resolve().parents[1]))
from tests.oracles.record_batches import Record, put_record

here = sys.path.pop(0)  # a benchmark in it is called kafka.py
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from kafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
sys.path.insert(0, here)

VERSION = 9
BATCHES = ((1024, 1000), (1024, 16), (100, 10_000))


def fastest_us(work: Callable[[], Any], times: int, rounds: int) -> float:
    """CPU time of one call, in the best of some rounds."""
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(times):
            work()
        best = min(best, time.process_time() - start)
    return best / times * 1e6


def make_batch(value_bytes: int, count: int) -> bytes:
    """A batch of an idempotent producer."""
    value = os.urandom(value_bytes)
    records = b"".join(put_record(Record(0, index, b"key-%06d" % index, value, [])) for index in range(count))
    now_ms = 1_700_000_000_000
    after = struct.pack(">hiqqqhii", 0, count - 1, now_ms, now_ms, 5, 0, 0, count) + records
    return struct.pack(">qiibI", 0, len(after) + 9, 0, 2, _native.crc32c(after)) + after


def produce_figure(rounds: int) -> Figure:
    """A Produce of one partition: header and body."""
    produce = codec.wire(0)
    data = produce.ProduceRequestPartitionProduceData(index=0, records=bytes(1_000_000))
    topic = produce.ProduceRequestTopicProduceData(name="shop/orders", partition_data=[data])
    request = produce.ProduceRequest(acks=-1, timeout_ms=30_000, topic_data=[topic])
    whole = bytes(codec.encode_request(0, VERSION, 1, "producer-1", request))
    frame = memoryview(whole)[4:]
    body = bytes(frame[codec.decode_header(frame).body_at :])
    read_other = entity_reader(OtherProduceRequest)
    ours = fastest_us(lambda: codec.decode_request(codec.decode_header(frame), frame), 20_000, rounds)
    theirs = fastest_us(lambda: read_other(body, 0), 500, rounds)
    return at_most("parse a Produce of 1 MB", f"{ours:.2f} us", f"kio {theirs:.1f} us (body only)", ours, 8, " us")


def batch_figures(value_bytes: int, count: int, rounds: int) -> list[Figure]:
    """A batch to frames and back, by the record."""
    batch = make_batch(value_bytes, count)
    times = max(5, 100_000 // count)
    to_frames = fastest_us(lambda: decode_produced(batch), times, rounds) / count
    frames = decode_produced(batch).frames
    to_batch = fastest_us(lambda: encode_batches(frames, max_batch_bytes=1 << 30), times, rounds) / count
    other_read = fastest_us(lambda: list(DefaultRecordBatch(batch)), max(1, times // 50), 3) / count
    value = bytes(value_bytes)

    def other_write() -> None:
        builder = DefaultRecordBatchBuilder(2, 0, False, -1, -1, -1, 1 << 30)
        for index in range(count):
            builder.append(index, 1_700_000_000_000, b"key", value, [])
        builder.build()

    other_written = fastest_us(other_write, max(1, times // 50), 3) / count
    renumbering = fastest_us(lambda: frames.numbered(7), times, rounds) / count
    copying = fastest_us(lambda: frames.renumbered(7), times, rounds) / count
    accepting = fastest_us(lambda: make_queue().append_frames(frames), times, rounds)
    accepting = max(0.0, accepting - fastest_us(make_queue, times, rounds)) / count
    what = f"{count} records of {value_bytes} bytes"
    return [
        at_most(
            f"batch to frames, {what}",
            f"{to_frames:.3f} us",
            f"kafka-python {other_read:.1f} us",
            to_frames,
            0.53,
            " us",
        ),
        at_most(
            f"frames to batch, {what}",
            f"{to_batch:.3f} us",
            f"kafka-python {other_written:.1f} us",
            to_batch,
            0.36,
            " us",
        ),
        at_most(
            f"frames accepted by a log, {what}", f"{accepting:.3f} us", "", accepting, 0.1 if count > 100 else 1, " us"
        ),
        at_most(
            f"frames get their offsets, {what}",
            f"{renumbering:.3f} us",
            f"in a copy {copying:.3f} us",
            renumbering,
            0.1,
            " us",
        ),
    ]


def make_queue() -> AppendQueue:
    """A log as far as it accepts messages; nothing is written."""
    return AppendQueue(0, LogSettings())


def main() -> None:
    """Runs all of it."""
    parser = parser_for(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    figures = [produce_figure(arguments.rounds)]
    for value_bytes, count in BATCHES:
        figures += batch_figures(value_bytes, count, arguments.rounds)
    report("Kafka's protocol, without the network", figures, {}, as_json=arguments.json)


if __name__ == "__main__":
    main()
