"""Writing to a topic with partitions: where rows go, and that a write is in all of its partitions, once."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from tests.log.workbench import wait_until
from tests.oracles import murmur2 as murmur2_oracle
from tests.twins import agreed

import tidelog
from tidelog import _native
from tidelog.errors import InputError
from tidelog.pipeline.address import Root, find_root
from tidelog.pipeline.ingest import bound_place, directory_alone
from tidelog.pipeline.sink.sink import SinkCommit
from tidelog.pipeline.sink.task import StagedParts, StagingLocation, layout_of, stage_rows
from tidelog.staging.area import StagingArea
from tidelog.staging.partitions import PartitionedArea
from tidelog.topics.partitioned import partition_of

TOPIC = "shop/orders"
APP = "nightly"


class CutError(Exception):
    """The writer dies here."""


def var_column(items: Sequence[bytes | None], first: int) -> tuple[Any, ...]:
    """Arrow's layout of a column of bytes, behind `first` others."""
    ends = [*range(0, 2 * first, 2), 2 * first]
    for item in items:
        ends.append(ends[-1] + len(item or b""))
    bits = sum(1 << index for index, item in enumerate(items, first) if item is not None)
    validity = bits.to_bytes((first + len(items) + 7) // 8, "little")
    return (
        validity,
        struct.pack(f"<{len(ends)}i", *ends),
        b"--" * first + b"".join(map(bytes, filter(None, items))),
        first,
        4,
    )


@given(
    st.lists(st.none() | st.binary(max_size=9), max_size=12),
    st.integers(0, 9),
    st.integers(0, 5),
    st.integers(0, 99),
    st.integers(0, 13),
)
def test_partitions_of_keys_are_those_of_the_library(
    keys: list[bytes | None], first: int, partitions: int, turn: int, count: int
) -> None:
    """In C as in Python, for any slice of a column; without a key rows take turns."""
    column = var_column(keys, first)
    agreed(_native, murmur2_oracle, "partitions_of", count, column, partitions, turn)
    agreed(_native, murmur2_oracle, "partitions_of", count, None, partitions, turn)
    broken = (column[0], struct.pack("<2i", 5, 3), *column[2:])
    agreed(_native, murmur2_oracle, "partitions_of", 1, broken, partitions, turn)
    if partitions:
        found, _ = _native.partitions_of(len(keys), column, partitions, turn)
        numbers = memoryview(found).cast("i").tolist()
        assert all(number == partition_of(key, partitions) for number, key in zip(numbers, keys, strict=True) if key)


@pytest.fixture(params=["directory", "store", "bucket", "grown"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Root:
    """A topic with three partitions that nobody has open: on a disk alone, with a store, and in a bucket alone."""
    has_store = request.param in ("store", "bucket")
    store = (tmp_path / "store").as_uri() if has_store else None
    with tidelog.open(tmp_path / "data", store=store, metadata="bucket" if has_store else None) as log:
        if request.param == "grown":
            log.topic(TOPIC)
        log.topic(TOPIC, partitions=3)
    return find_root(store if store is not None and request.param == "bucket" else tmp_path / "data")


def stage(root: Root, columns: dict[str, Any], *, version: int = 1, task: int = 0) -> StagedParts:
    """What one task stages."""
    place, directory = bound_place(root), directory_alone(root)
    target = StagingLocation(place, TOPIC, 1 << 20, layout_of(place, directory, TOPIC), directory)
    return stage_rows(iter([pa.record_batch(columns)]), target, APP, version, task)


def commit(root: Root, parts: StagedParts, version: int = 1) -> None:
    SinkCommit(root, APP, version).commit(parts, 60)


def values(root: Root, topic: str = TOPIC) -> dict[int, list[bytes]]:
    """What is in the partitions that have something."""
    with root.open() as log:
        opened = cast(tidelog.PartitionedTopic, log.topic(topic))
        found = {number: list(opened.partition(number).read()) for number in range(opened.partitions)}
    return {number: [one.value or b"" for one in messages] for number, messages in found.items() if messages}


def test_rows_go_where_their_columns_say(root: Root) -> None:
    """To the partition that is named, else to that of the key, else to each in turn; in their order."""
    keys = [b"a", b"b", b"c", b"a", None, None, None, b"a"]
    partitions = [None, None, None, None, None, None, None, 2]
    columns = {
        "key": pa.array(keys),
        "value": [b"%d" % row for row in range(8)],
        "partition": pa.array(partitions, "int32"),
    }
    commit(root, stage(root, columns, task=1))
    expected: dict[int, list[bytes]] = {}
    turn = 1
    for row, (key, given_number) in enumerate(zip(keys, partitions, strict=True)):
        number = given_number if given_number is not None else turn % 3 if key is None else partition_of(key, 3)
        turn += key is None
        expected.setdefault(number, []).append(b"%d" % row)
    assert values(root) == expected
    with pytest.raises(InputError, match="a row has the partition 3, and shop/orders has 0 to 2"):
        stage(root, {"value": [b"x"], "partition": [3]}, version=2)


def cut(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, calls: int) -> None:
    """The method fails after so many calls, instead of doing its work."""
    whole: Callable[..., Any] = getattr(owner, name)
    left = calls

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal left
        if left == 0:
            raise CutError
        left -= 1
        return whole(*arguments, **named)

    monkeypatch.setattr(owner, name, counted)


@pytest.mark.parametrize(
    ("owner", "name", "calls"),
    [
        (PartitionedArea, "commit", 0),
        (PartitionedArea, "pending", 0),
        (StagingArea, "commit", 1),
        (PartitionedArea, "finish", 0),
    ],
)
@pytest.mark.parametrize("is_next", [False, True])
def test_a_write_that_is_cut_anywhere_is_made_again_once(
    tmp_path: Path, owner: type, name: str, calls: int, is_next: bool
) -> None:
    """The second attempt divides its rows differently, or is the next version: each row of both is there once."""
    with tidelog.open(tmp_path / "data") as log:
        log.topic(TOPIC, partitions=3)
    root = find_root(tmp_path / "data")
    rows = [b"%d" % row for row in range(9)]
    with pytest.MonkeyPatch.context() as patch:
        first = stage(root, {"value": rows})
        cut(patch, owner, name, calls)
        with pytest.raises(CutError):
            commit(root, first)
    is_decided = (owner, name) != (PartitionedArea, "commit")
    if is_next and is_decided:
        commit(root, stage(root, {"value": [b"next"]}, version=2), version=2)
    else:
        commit(root, stage(root, {"value": rows, "partition": [1] * 9}))
    found = [value for each in values(root).values() for value in each]
    assert sorted(found) == sorted([*rows, b"next"] if is_next and is_decided else rows)
    commit(root, stage(root, {"value": rows}))
    assert sum(map(len, values(root).values())) == len(found)
    left = [path for path in tmp_path.rglob("*") if path.is_file() and ".staging" in path.parts]
    assert [path.name for path in left if path.suffix == ".json"] == []


def test_what_is_discarded_is_not_what_is_decided(tmp_path: Path) -> None:
    """Spark may abort after a commit; a write that is decided comes to its end, another leaves nothing."""
    with tidelog.open(tmp_path / "data") as log:
        log.topic(TOPIC, partitions=3)
    root = find_root(tmp_path / "data")
    parts = stage(root, {"value": [b"1", b"2", b"3"]})
    with pytest.MonkeyPatch.context() as patch:
        cut(patch, StagingArea, "commit", 1)
        with pytest.raises(CutError):
            commit(root, parts)
    SinkCommit(root, APP, 1).discard(parts, TOPIC)
    commit(root, stage(root, {"value": [b"other"]}))
    assert sorted(value for each in values(root).values() for value in each) == [b"1", b"2", b"3"]
    unwanted = stage(root, {"value": [b"4", b"5"]}, version=2)
    SinkCommit(root, APP, 2, is_once=True).discard(unwanted, TOPIC)
    assert [path for path in tmp_path.rglob("*.tlog") if "00000" in path.name and ".staging" in path.parts] == []


def test_a_topic_that_is_made_again_knows_of_no_writes(root: Root, tmp_path: Path) -> None:
    """A version that the deleted topic had is written."""
    commit(root, stage(root, {"value": [b"old"]}))
    with tidelog.open(tmp_path / "data") as log:
        log.delete_topic(TOPIC, take_over=True)
        log.topic(TOPIC, partitions=3)
    commit(root, stage(root, {"value": [b"new"]}))
    assert values(root) == {0: [b"new"]}


def test_an_owner_ingests_partitions_that_it_has_not_used(tmp_path: Path) -> None:
    """They are opened for what others write to them, while the owner runs; those without rows are left alone."""
    root = find_root(tmp_path / "data")
    with tidelog.open(tmp_path / "data", ingest_check_seconds=0.05) as log:
        topic = log.topic(TOPIC, partitions=4)
        topic.append(b"used", partition=0)
        commit(root, stage(root, {"value": [b"1", b"2", b"3"], "partition": [1, 2, 1]}))
        # What waits for a partition is ingested while it is opened: it is open a moment later.
        wait_until(lambda: sorted(topic.statistics().partitions) == [0, 1, 2], "the partitions with rows are open")
        assert [message.value for message in topic.partition(1).read()] == [b"1", b"3"]


def test_spark_writes_to_partitions(spark: SparkSession, tmp_path: Path) -> None:
    """Named by the option or by a column beside others, as a batch and as a stream from topic to topic."""
    with tidelog.open(tmp_path / "data") as log:
        log.topic(TOPIC, partitions=3)
        log.topic("shop/copy", partitions=3)
    frame = spark.range(0, 30, 1, 2).selectExpr("string(id % 5) key", "string(id) value", "'shop/orders' topic")
    writer = frame.union(spark.sql("select 'k', 'v', 'shop/plain'")).write.format("tidelog").mode("append")
    writer.option("root", str(tmp_path / "data")).save()
    expected = {
        number: [b"%d" % row for row in range(30) if partition_of(b"%d" % (row % 5), 3) == number]
        for number in range(3)
    }
    root = find_root(tmp_path / "data")
    assert {number: sorted(each) for number, each in values(root).items()} == {
        number: sorted(each) for number, each in expected.items() if each
    }
    query = (
        spark.readStream.format("tidelog")
        .options(root=str(tmp_path / "data"), subscribe=TOPIC, startingOffsets="earliest")
        .load()
        .drop("topic")
        .writeStream.format("tidelog")
        .options(root=str(tmp_path / "data"), topic="shop/copy", checkpointLocation=str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert values(root, "shop/copy") == values(root)
    wrong = spark.sql("select 'v' value, 7 partition").write.format("tidelog").mode("append")
    with pytest.raises(PySparkException, match="a row has the partition 7"):
        wrong.options(root=str(tmp_path / "data"), topic=TOPIC).save()
