"""Jobs over topics with partitions: a topic is all of its partitions, and reports list them."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from pyspark.sql import SparkSession

import tidelog
from tidelog.errors import InputError, NotFoundError
from tidelog.pipeline.address import Root, find_root
from tidelog.pipeline.jobs.compact_topic import CompactOptions, compact
from tidelog.pipeline.jobs.gc import plan_gc
from tidelog.pipeline.jobs.replay_topic import Selection, replay
from tidelog.pipeline.jobs.ship import ship
from tidelog.pipeline.jobs.verify import verify
from tidelog.pipeline.report.report import make_report
from tidelog.topics.partitioned import partition_of

TOPIC, GROWN = "shop/orders", "shop/grown"
LOGS = [f"{TOPIC}-part-0", f"{TOPIC}-part-1"]
GROWN_LOGS = [GROWN, f"{GROWN}-part-1"]


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """Two topics with partitions, one of which had none at first; the last partition was never used."""
    with tidelog.open(tmp_path / "data", store=(tmp_path / "store").as_uri()) as log:
        log.topic(GROWN).append(b"first")
        for name, logs in ((TOPIC, LOGS), (GROWN, GROWN_LOGS)):
            topic = log.topic(name, partitions=len(logs) + 1)
            for number in range(len(logs)):
                topic.append_many([b"%d" % each for each in range(10)], partition=number)
    return find_root(tmp_path / "data")


def test_a_topic_is_all_of_its_partitions(spark: SparkSession, root: Root, tmp_path: Path) -> None:
    """Shipped, verified, compacted, collected and reported one by one; the one that nobody has used is left out."""
    shipped = ship(spark, root, [TOPIC])
    assert [(one.topic, one.messages) for one in shipped.topics] == [(log, 10) for log in LOGS]
    whole = ship(spark, root)
    assert {one.topic: one.messages for one in whole.topics} == {LOGS[0]: 0, LOGS[1]: 0, GROWN: 11, GROWN_LOGS[1]: 10}
    assert shipped.ok
    assert whole.ok

    verified = verify(spark, root, [GROWN])
    assert [(one.topic, one.totals.messages) for one in verified.topics] == [(GROWN, 11), (GROWN_LOGS[1], 10)]
    assert {one.topic for one in verify(spark, root).topics} == {*LOGS, *GROWN_LOGS}
    assert [one.topic for one in verify(spark, root, [LOGS[1]]).topics] == [LOGS[1]]
    with pytest.raises(NotFoundError, match="no topic shop/orders-part-2"):
        verify(spark, root, [f"{TOPIC}-part-2"])

    options = CompactOptions(by_key=True)
    compacted = compact(spark, root, [GROWN], options)
    assert ([one.topic for one in compacted.topics], compacted.findings) == (GROWN_LOGS, ())
    plan, report = plan_gc(spark, root, [TOPIC])
    assert [one.subject for one in plan.plans] == LOGS
    assert report.ok

    made = make_report(root, tmp_path / "page.html", spark=spark, exact=True)
    assert (made.topics, made.messages, made.ok) == (4, 41, True)
    assert f"{TOPIC}-part-1" in (tmp_path / "page.html").read_text()


def values(log: tidelog.LogDirectory, name: str) -> dict[int, list[bytes]]:
    topic = cast(tidelog.PartitionedTopic, log.topic(name))
    found = {number: [one.value or b"" for one in topic.partition(number).read()] for number in range(topic.partitions)}
    return {number: each for number, each in found.items() if each}


def test_a_replay_keeps_partitions_where_it_can(spark: SparkSession, tmp_path: Path) -> None:
    """In a topic with as many; with another number the keys decide. A second run copies what is new, once."""
    root = find_root(tmp_path / "data")
    with tidelog.open(tmp_path / "data") as log:
        source = log.topic(TOPIC, partitions=2)
        log.topic("shop/same", partitions=2)
        log.topic("shop/more", partitions=3)
        for number in range(2):
            messages = [tidelog.Message(b"%d-%d" % (number, each), key=b"%d" % each) for each in range(5)]
            source.append_many(messages, partition=number, sync=True)
    first = replay(spark, root, TOPIC, "shop/same", step_messages=3)
    assert (first.messages, first.ok) == (10, True)
    assert [(one.partition, one.source_end, one.steps, one.messages) for one in first.partitions] == [
        (0, 5, 2, 5),
        (1, 5, 2, 5),
    ]
    with tidelog.open(tmp_path / "data") as log:
        log.topic(TOPIC, partitions=2).append(b"new", partition=1)
    again = replay(spark, root, TOPIC, "shop/same", step_messages=3)
    assert (again.messages, again.ok) == (1, True)
    more = replay(spark, root, TOPIC, "shop/more", selection=Selection(where="partition = 0"))
    assert (more.messages, more.ok) == (5, True)
    with tidelog.open(tmp_path / "data") as log:
        assert values(log, "shop/same") == values(log, TOPIC)
        keyed: dict[int, list[bytes]] = {}
        for each in range(5):
            keyed.setdefault(partition_of(b"%d" % each, 3), []).append(b"0-%d" % each)
        assert values(log, "shop/more") == keyed
    with pytest.raises(InputError, match="offsets are each partition's own"):
        replay(spark, root, TOPIC, "shop/same", start_offset=3)
