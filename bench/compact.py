"""Compaction of many small objects on two workers, and what reading the topic costs before and after.

The objects are in a local SeaweedFS with the catalog in the same bucket. They are shipped one by one, as an owner does
that ships often. Reading is all messages in one reader of history with a new catalog; what comes back is held to be the
same to the last byte.

Needs `tidelog[test]` for the server, and Spark.

python bench/compact.py [--objects 2000] [--messages 20] [--rounds 3] [--dir .] [--json]
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from measuring import at_least, parser_for, report, scratch_directory

import tidelog
from tidelog.cold.catalog import Catalog
from tidelog.cold.reader import History
from tidelog.pipeline.address import find_root
from tidelog.pipeline.jobs.compact_topic import CompactOptions, CompactReport, compact
from tidelog.store.keys import TopicKeys
from tidelog.store.metadata.open import open_metadata_store
from tidelog.store.settings import StoreSettings
from tidelog.store.urls import open_store

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.servers import ACCESS_KEY_ID, SECRET_ACCESS_KEY, S3Server

PREFIX = "bench"
TOPIC = "bench/small"
PAYLOAD_BYTES = 1024
CREDENTIALS = {"store_access_key_id": ACCESS_KEY_ID, "store_secret_access_key": SECRET_ACCESS_KEY}


def ship_small_objects(scratch: Path, url: str, endpoint: str, objects: int, messages: int) -> None:
    """A topic of so many objects of so many messages."""
    noise = os.urandom(1 << 20)
    settings = {"store_endpoint": endpoint, **CREDENTIALS}
    with tidelog.open(scratch / "data", store=url, metadata="bucket", **settings) as log:
        topic = log.topic(TOPIC, ship_min_bytes=1 << 40, ship_max_delay_seconds=1e6)
        for number in range(objects):
            first = number * 37 % (len(noise) - PAYLOAD_BYTES * messages)
            topic.append_many([noise[first + each :][:PAYLOAD_BYTES] for each in range(messages)])
            topic.ship()


@contextmanager
def history_of(url: str, store: StoreSettings) -> Iterator[History]:
    """The topic's history, by somebody who has just come."""
    objects = open_store(url, store)
    with open_metadata_store("bucket", objects, read_only=True) as metadata, ThreadPoolExecutor(4) as threads:
        yield History(Catalog(metadata, TopicKeys(*TOPIC.split("/"))), objects, threads)


def read_all(url: str, store: StoreSettings) -> tuple[float, str]:
    """Seconds for all messages, and a digest of them."""
    with history_of(url, store) as history:
        digest, begin = hashlib.sha256(), time.perf_counter()
        reader = history.read(0, history.catalog.next_offset())
        while (batch := reader.next_batch()) is not None:
            for offset, payload in enumerate(batch.payloads(), batch.first_offset):
                digest.update(b"%d " % offset)
                digest.update(payload)
        return time.perf_counter() - begin, digest.hexdigest()


def compact_on_spark(url: str, endpoint: str) -> tuple[float, CompactReport]:
    """Seconds of the job on two workers, the start of Spark not counted."""
    spark = tidelog.spark_session("bench", "local[2]")
    try:
        root = find_root(url, store_endpoint=endpoint, **CREDENTIALS)
        begin = time.perf_counter()
        done = compact(spark, root, [TOPIC], CompactOptions(grace_seconds=0))
        return time.perf_counter() - begin, done
    finally:
        spark.stop()


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__)
    parser.add_argument("--objects", type=int, default=2000, help="how many small objects (2000)")
    parser.add_argument("--messages", type=int, default=20, help="messages of 1 KiB in each (20)")
    parser.add_argument("--rounds", type=int, default=3, help="how often it is read; the median counts (3)")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        scratch = stack.enter_context(scratch_directory(arguments.dir))
        (scratch / "s3").mkdir()
        server = S3Server(scratch / "s3")
        server.begin()
        stack.callback(server.kill)
        url, store = server.url(PREFIX), server.settings()
        ship_small_objects(scratch, url, server.endpoint, arguments.objects, arguments.messages)
        before = [read_all(url, store) for _ in range(arguments.rounds)]
        seconds, done = compact_on_spark(url, server.endpoint)
        after = [read_all(url, store) for _ in range(arguments.rounds)]
    assert done.is_good, done
    assert len({digest for _, digest in (*before, *after)}) == 1, "the messages are not the same"
    (topic,) = done.topics
    slow, fast = (median(one for one, _ in rounds) for rounds in (before, after))
    figures = [
        at_least(
            f"read {arguments.objects} small objects, compacted",
            f"{fast:.2f} s",
            f"as they were {slow:.2f} s",
            slow / fast,
            5,
        ),
        at_least(
            f"compact {topic.replaced_objects} objects on two workers",
            f"{seconds:.1f} s",
            f"into {topic.new_objects}",
            topic.replaced_objects / seconds,
            20,
            " objects/s",
        ),
    ]
    details = {"before_s": [one for one, _ in before], "after_s": [one for one, _ in after], "compact_s": seconds}
    report("compact", figures, details, as_json=arguments.json)


if __name__ == "__main__":
    main()
