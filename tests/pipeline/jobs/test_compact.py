"""The job `compact` on Spark: the same messages in fewer objects, superseded ones gone, each with a proof."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.transactional import Step, fill

import tidelog
from tidelog.cli.main import main
from tidelog.errors import InputError, NotFoundError, NotSupportedError
from tidelog.log.isolation import Isolation
from tidelog.pipeline.address import Root, find_root
from tidelog.pipeline.jobs.compact_topic import CompactOptions, CompactReport, compact
from tidelog.pipeline.jobs.gc import apply_gc, plan_gc
from tidelog.pipeline.jobs.job import Progress
from tidelog.pipeline.jobs.verify import verify
from tidelog.topics.topic import Topic

ORDERS, PRICES = "shop/orders", "shop/prices"
SMALL_OBJECTS = 60
LATER = CompactOptions(grace_seconds=3600)


class Bucket:
    """A store with its catalog in it, and nodes that come and go."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = f"file://{path}/store"
        self.nodes = 0

    @property
    def root(self) -> Root:
        return find_root(self.url)

    def open(self) -> tidelog.LogDirectory:
        """On a new node, which has only what is in the store."""
        self.nodes += 1
        return tidelog.open(self.path / f"node-{self.nodes}", store=self.url, metadata="bucket")

    def messages(self, name: str) -> list[tuple[int | None, bytes | None, bytes]]:
        with self.open() as log:
            return [(message.offset, message.key, message.value or b"") for message in log.topic(name).read(0)]

    def objects(self, name: str) -> list[str]:
        return sorted(path.name for path in (self.path / "store/storage/topics" / name / "objects").glob("data-*"))


def fill_small(topic: Topic) -> None:
    for number in range(SMALL_OBJECTS):
        topic.append_many([b"%d of %d" % (one, number) for one in range(20)])
        topic.ship()


def fill_keyed(topic: Topic) -> None:
    """Four rounds of ten prices; in the last one some are taken back; then an object that is never touched."""
    for turn in range(4):
        with topic.producer(f"till-{turn % 2}") as producer:
            for key in range(10):
                value = b"" if turn == 3 and key < 3 else b"%d" % (turn * 100 + key)
                producer.append(value, key=b"k%d" % key, sequence=turn * 10 + key + 1)
        topic.append(b"without a key")
        topic.ship()
    topic.append(b"last", key=b"last")
    topic.ship()


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Bucket:
    """A topic of many small objects and a topic of keys, for tests that do not change them."""
    found = Bucket(tmp_path_factory.mktemp("compact"))
    with found.open() as log:
        fill_small(log.topic(ORDERS))
        fill_keyed(log.topic(PRICES, compaction="by_key"))
    return found


def only(report: CompactReport) -> dict[str, tuple[int, int]]:
    return {one.topic: (one.replaced_objects, one.new_objects) for one in report.topics}


def test_small_objects_become_large_ones(spark: SparkSession, tmp_path: Path) -> None:
    """The same messages, from few objects; nothing to do the second time; the old ones go by gc after their time."""
    bucket = Bucket(tmp_path)
    with bucket.open() as log:
        fill_small(log.topic(ORDERS))
        fill_small(log.topic("shop/others"))
    before, steps = bucket.messages(ORDERS), list[Progress]()
    report = compact(spark, bucket.root, [ORDERS, "shop/others"], LATER, on_progress=steps.append)
    assert (report.is_good, report.findings) == (True, ())
    assert only(report) == {ORDERS: (SMALL_OBJECTS - 1, 1), "shop/others": (SMALL_OBJECTS - 1, 1)}
    proof = report.reconciliations[0]
    assert proof.came_out is not None
    assert (proof.went_in.messages, proof.went_in.first_offset, proof.went_in.last_offset) == (1180, 0, 1179)
    assert proof.came_out == proof.went_in
    assert steps[-1] == Progress("compacting", 2, 2)
    assert bucket.messages(ORDERS) == before
    assert len(bucket.objects(ORDERS)) == SMALL_OBJECTS + 1
    again = compact(spark, bucket.root, [ORDERS], LATER)
    assert (only(again), again.reconciliations) == ({ORDERS: (0, 0)}, ())
    plan, _ = plan_gc(spark, bucket.root, grace_seconds=0)
    assert apply_gc(spark, bucket.root, plan).removed_objects == 2 * (SMALL_OBJECTS - 1)
    assert bucket.objects(ORDERS) == ["data-0-1179-e1-c1.tlog", "data-1180-1199-e1.tlog"]
    assert bucket.messages(ORDERS) == before
    checked = verify(spark, bucket.root)
    assert (checked.is_good, checked.findings) == (True, ())


def test_superseded_messages_go_and_the_table_stays(spark: SparkSession, tmp_path: Path) -> None:
    """By key where the topic says so: the newest of every key, what has no key, and the newest of every producer."""
    bucket = Bucket(tmp_path)
    with bucket.open() as log:
        fill_keyed(log.topic(PRICES, compaction="by_key"))
    before = bucket.messages(PRICES)
    with bucket.open() as log:
        table = dict(log.topic(PRICES).latest_by_key())
    report = compact(spark, bucket.root, None, CompactOptions(grace_seconds=0))
    (told,) = report.topics
    assert (report.is_good, told.by_key, told.superseded_messages) == (True, True, 30)
    after = bucket.messages(PRICES)
    assert told.removed_messages == len(before) - len(after) == 28  # of each producer one stays in what was rewritten
    newest = {message[1]: message for message in before if message[1] is not None}
    assert set(newest.values()) <= set(after) <= set(before)
    assert [message for message in after if message[1] is None] == [one for one in before if one[1] is None]
    with bucket.open() as log:
        topic = log.topic(PRICES)
        assert dict(topic.latest_by_key()) == table
        with topic.producer("till-1") as producer:
            producer.append(b"again", key=b"k9", sequence=40)
            assert topic.next_offset == len(before)
    checked = verify(spark, bucket.root)
    assert (checked.is_good, checked.findings) == (True, ())


def test_only_committed_messages_supersede(spark: SparkSession, tmp_path: Path) -> None:
    """What was aborted supersedes nothing, nor does what the store does not know to be committed, and control records
    stay: the table is the same, and once the end of the transaction is in the store it is that of the newest."""
    bucket = Bucket(tmp_path)
    a, b, c = (Step(1, key=key) for key in (b"a", b"b", b"c"))
    objects = [
        [a, b, Step(1, commits=True), Step(key=b"b")],
        [a, Step(1, commits=False), Step(key=b"c"), Step(key=b"b")],
        [c, b],
        [Step(key=b"b"), Step(key=b"last")],
    ]
    with bucket.open() as log:
        topic = log.topic(PRICES, compaction="by_key")
        for steps in objects:
            fill(topic, steps)
            topic.ship()
        assert topic._tiered is not None
        catalog = topic._tiered.catalog
        catalog.metadata.put(catalog.keys.kafka_producers, b"{}")  # as the server writes before the first batch
        fill(topic, [Step(1, commits=True)])  # on this disk only
        options = CompactOptions(grace_seconds=0, min_dirty_ratio=0.01)
        here = find_root(str(log.root))  # its readers see that disk
        (told,) = compact(spark, here, None, options).topics
        # Offsets 1 and 3 are superseded by 7; 1 was the first of two messages of its producer in that object.
        assert (told.superseded_messages, told.removed_messages) == (2, 1)
        assert [offset for offset, *_ in bucket_rows(bucket, "read_committed")] == [0, 1, 6, 7]
        assert [offset for offset, *_ in bucket_rows(bucket, "read_uncommitted")] == [0, 1, 4, 6, 7, 8, 9, 10, 11]
        topic.ship()
        compact(spark, here, None, options)
        assert {key: offset for offset, key in bucket_rows(bucket, "read_committed")} == {
            b"a": 0,
            b"b": 10,
            b"c": 8,
            b"last": 11,
        }


def bucket_rows(bucket: Bucket, isolation: Isolation) -> list[tuple[int | None, bytes | None]]:
    """Offsets and keys, from the store alone."""
    with tidelog.open(bucket.path / "elsewhere", store=bucket.url, metadata="bucket", read_only=True) as log:
        return [(message.offset, message.key) for message in log.topic(PRICES).read(isolation=isolation)]


def test_tombstones_go_when_nothing_is_left_before_them(spark: SparkSession, tmp_path: Path) -> None:
    """First what they stand for, then, in another run, they themselves; until they are old enough they stay."""
    bucket = Bucket(tmp_path)
    with bucket.open() as log:
        topic = log.topic(PRICES)
        for value in (b"1", b"2", b""):
            topic.append_many([tidelog.Message(value, key=b"a"), tidelog.Message(b"x", key=b"b%s" % value)])
            topic.ship()
        topic.append(b"last")
        topic.ship()
    now = CompactOptions(by_key=True, tombstone_seconds=0, min_dirty_ratio=0.1)
    compact(spark, bucket.root, [PRICES], now)
    assert [message[0] for message in bucket.messages(PRICES) if message[1] == b"a"] == [4]
    compact(spark, bucket.root, [PRICES], CompactOptions(by_key=True, min_dirty_ratio=0.1))
    assert [message[0] for message in bucket.messages(PRICES) if message[1] == b"a"] == [4]
    compact(spark, bucket.root, [PRICES], now)
    assert [message[0] for message in bucket.messages(PRICES)] == [1, 3, 5, 6]


def test_a_damaged_topic_is_left_alone_and_named(spark: SparkSession, tmp_path: Path) -> None:
    """By key and without: the others are compacted, and the report says what is wrong with which."""
    bucket = Bucket(tmp_path)
    names = ("shop/damaged", "shop/damaged-table", "shop/good")
    with bucket.open() as log:
        for name in names:
            topic = log.topic(name, compaction="by_key" if name.endswith("table") else "none")
            for number in range(4):
                topic.append(b"value %d" % number, key=b"key")
                topic.ship()
    for name in names[:2]:
        path = tmp_path / "store/storage/topics" / name / "objects" / "data-1-1-e1.tlog"
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    report = compact(spark, bucket.root, None, LATER)
    assert [problem.subject for problem in report.findings] == list(names[:2])
    assert all("checksum" in problem.message for problem in report.findings)
    assert (only(report), report.is_good) == ({"shop/good": (3, 1)}, False)
    assert len(bucket.objects("shop/damaged")) == len(bucket.objects("shop/damaged-table")) == 4


def test_a_dry_run_shows_and_changes_nothing(
    spark: SparkSession, bucket: Bucket, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the command line, for people and as JSON."""
    names = bucket.objects(ORDERS) + bucket.objects(PRICES)
    assert main(["pipeline", "compact", "--root", bucket.url, "--dry-run", "--master", "local[2]", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    found = {one["topic"]: one for one in told["topics"]}
    assert (found[ORDERS]["replaced_objects"], found[ORDERS]["new_objects"]) == (SMALL_OBJECTS - 1, 1)
    assert (found[PRICES]["by_key"], found[PRICES]["superseded_messages"]) == (True, 30)
    assert (told["is_good"], told["is_dry_run"]) == (True, True)
    assert main(["pipeline", "compact", ORDERS, "--root", bucket.url, "--dry-run", "--target-bytes", "1kB"]) == 0
    assert "nothing was changed" in capsys.readouterr().err
    assert bucket.objects(ORDERS) + bucket.objects(PRICES) == names


def test_what_cannot_be_is_named(spark: SparkSession, bucket: Bucket, tmp_path: Path) -> None:
    """A topic that there is not, a ratio that is none, a directory without a store."""
    with pytest.raises(NotFoundError, match="no topic shop/none"):
        compact(spark, bucket.root, ["shop/none"])
    with pytest.raises(InputError, match="min_dirty_ratio"):
        compact(spark, bucket.root, [ORDERS], CompactOptions(min_dirty_ratio=0))
    with tidelog.open(tmp_path / "local") as log:
        log.topic(ORDERS).append(b"x", sync=True)
    with pytest.raises(NotSupportedError, match="no store"):
        compact(spark, find_root(tmp_path / "local"))
