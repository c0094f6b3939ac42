"""Change data of an engine in Spark: every change with what was there before, held to the engine itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable
from tests.campaign import examples, first_seed
from tests.pipeline.engines.histories import History
from tests.pipeline.engines.test_objects import expected

import tidelog
from tidelog.engine.entry import Entry
from tidelog.errors import InputError, NotFoundError, OffsetOutOfRangeError
from tidelog.pipeline import change_data, find_engine
from tidelog.pipeline.address import EngineRoot
from tidelog.pipeline.source import change_batches, object_batches
from tidelog.pipeline.source.change_data import ChangesStreamReader
from tidelog.pipeline.source.entries import EntriesDataSource

ENTRIES: list[Entry] = [
    tidelog.CreateBucket("a"),
    tidelog.PutObject("a", "x", b"1", {"type": "text"}),
    tidelog.PutObject("a", "y", b"1"),
    tidelog.PutObject("a", "x", b"22"),
    tidelog.DeleteObject("a", "y"),
    tidelog.DeleteObject("a", "y"),  # of what is not there
    tidelog.CopyObject("a", "x", "a", "z"),
    tidelog.DeleteBucket("a", force=True),
    tidelog.CreateBucket("a"),
    tidelog.PutObject("a", "z", b"333"),
    tidelog.Batch([tidelog.PutObject("a", "x", b"4"), tidelog.DeleteObject("a", "x")]),
    tidelog.PutObject("a", "y", b"55555"),
]
Seen = dict[str, bytes]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[EngineRoot, dict[int, Seen]]:
    """The engine in its store, and what it shows at each seq."""
    path = tmp_path_factory.mktemp("change-data")
    with tidelog.open_engine(path / "node", store=(path / "store").as_uri()) as engine:
        states: dict[int, Seen] = {0: {}}
        for seq, entry in enumerate(ENTRIES, 1):
            engine.apply(seq, entry)
            names = [one.key for one in engine.list_objects("a")] if "a" in engine.list_buckets() else []
            states[seq] = {name: engine.read("a", name).data for name in names}
        engine.update_low_water_mark(len(ENTRIES))
        engine.ship()
    return find_engine((path / "store").as_uri()), states


def _data(side: Row | None) -> bytes | None:
    return None if side is None else bytes(side.data)


def test_changes_lead_from_each_state_to_the_next(
    spark: SparkSession, made: tuple[EngineRoot, dict[int, Seen]]
) -> None:
    """Whoever applies them in order has what the engine shows at every seq, deletions with a bucket included."""
    engine, states = made
    rows = change_data(spark, engine).orderBy("seq", "order").collect()
    for start in (1, 5):
        shown, known = dict(states[start - 1]), [row for row in rows if row.seq >= start]
        for seq in range(start, len(ENTRIES) + 1):
            for row in [one for one in known if one.seq == seq]:
                assert shown.get(row.key) == _data(row.before)
                after = _data(row.after)
                shown.pop(row.key, None)
                shown.update({} if after is None else {row.key: after})
                kinds = {(True, False): "insert", (False, True): "delete", (False, False): "update"}
                assert row.change == kinds[row.before is None, row.after is None]
            assert shown == states[seq]
    assert rows[0].after.metadata == {"type": "text"}
    assert len(rows) == 9


def test_newest_change_of_each_object_is_ready_to_be_merged(
    spark: SparkSession, made: tuple[EngineRoot, dict[int, Seen]]
) -> None:
    """One row for each object that differs between two states, from the state before to the state at the end."""
    engine, states = made
    rows = change_data(spark, engine, 5, 12, newest_only=True).collect()
    found = {row.key: (row.change, _data(row.before), _data(row.after)) for row in rows}
    assert found == {
        "x": ("delete", b"22", None),
        "y": ("update", b"1", b"55555"),
        "z": ("insert", None, b"333"),
    }
    assert {key: after for key, (_, _, after) in found.items() if after is not None} == states[12]


def test_range_that_the_store_does_not_have_is_refused(
    spark: SparkSession, made: tuple[EngineRoot, dict[int, Seen]]
) -> None:
    """An empty answer would look like an engine that nobody changes."""
    for first, last in ((0, None), (1, 13), (14, None)):
        with pytest.raises(InputError, match="entries up to 12"):
            change_data(spark, made[0], first, last)
    assert change_data(spark, made[0], 13).collect() == []  # where the next read begins


# Histories of all kinds, without Spark: what tasks read, held against the model


def changes_of(history: History, **options: object) -> list[dict[str, Any]]:
    """All changes with their values, read as tasks do."""
    given = {"root": history.store, "changes": "true", "includeValue": "true"}
    source = EntriesDataSource(given | {name: str(value) for name, value in options.items()})
    reader = source.reader(source.schema())
    batches: list[Any] = [batch for partition in reader.partitions() for batch in reader.read(partition)]
    for batch in batches:
        batch.validate(full=True)
    return [row for batch in batches for row in batch.to_pylist()]


def _state(history: History, seq: int) -> dict[tuple[str, str], Any]:
    return {(one[0], one[1]): (one[2], one[3], one[4]) for one in expected(history, seq)}


def _object(side: dict[str, Any] | None) -> Any:
    return None if side is None else (side["seq"], side["data"], side["metadata"])


def _applied(state: dict[tuple[str, str], Any], rows: list[dict[str, Any]]) -> dict[tuple[str, str], Any]:
    """The state with these changes, each of which has to fit."""
    state = dict(state)
    for row in sorted(rows, key=lambda one: (one["seq"], one["order"])):
        name = row["bucket"], row["key"]
        assert state.get(name) == _object(row["before"])
        kinds = {(True, False): "insert", (False, True): "delete", (False, False): "update"}
        assert row["change"] == kinds[row["before"] is None, row["after"] is None]
        state[name] = _object(row["after"])
        if row["after"] is None:
            del state[name]
    return state


@pytest.mark.parametrize("seed", range(first_seed(), first_seed() + examples(4)))
def test_changes_of_any_range_make_its_end_of_its_beginning(tmp_path: Path, seed: int) -> None:
    """Whatever was put, copied, deleted, emptied with its bucket, rolled back, compacted or divided among tasks; also
    where the log of the range is gone."""
    history = History(tmp_path, f"changes {seed}")
    with history.open() as engine:
        history.grow(engine)
        mark = engine.applied_seq
        if seed % 2:
            history.compact()
        history.grow(engine)
        last = engine.applied_seq
    for first, end in ((1, mark), (mark + 1, last), (1, last), (mark // 2, mark + 1)):
        options = {"startingSeq": first, "endingSeq": end, "minPartitions": 3}
        rows = changes_of(history, **options)
        for seq in {first, (first + end) // 2, end}:
            so_far = [row for row in rows if row["seq"] <= seq]
            assert _applied(_state(history, first - 1), so_far) == _state(history, seq)
        newest = changes_of(history, newestOnly="true", **options)
        assert _applied(_state(history, first - 1), newest) == _state(history, end)
        assert len({(row["bucket"], row["key"]) for row in newest}) == len(newest)


@pytest.mark.parametrize("newest_only", ["false", "true"])
def test_values_are_read_in_groups_that_leave_no_change_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newest_only: str
) -> None:
    """Loses, without this: what was before the last change of a group, and changes of an object at its edge. Values of
    any size, the empty one included, come with their versions."""
    history = History(tmp_path, "groups")
    with history.open() as engine:
        history.grow(engine)
        last = engine.applied_seq
    whole = changes_of(history, newestOnly=newest_only)
    monkeypatch.setattr(object_batches, "_FETCHED_TOGETHER_BYTES", 700)
    monkeypatch.setattr(change_batches, "_ROW_BYTES", 300)
    assert changes_of(history, newestOnly=newest_only, maxRowsPerBatch=3) == whole
    assert _applied({}, whole) == _state(history, last)


def test_changes_that_are_no_longer_kept_are_refused_with_where_to_begin(tmp_path: Path) -> None:
    """Not a range that begins with inserts of what was there long before."""
    history = History(tmp_path, "retention")
    with history.open() as engine:
        history.grow(engine, rolls_back=False)
        engine.collect_garbage(horizon=engine.applied_seq - 20)
        history.grow(engine, 10, rolls_back=False)
        last = engine.applied_seq
    with pytest.raises(NotFoundError, match="are no longer kept") as raised:
        changes_of(history)
    begin = int(re.findall(r"startingSeq (\d+)", raised.value.hint or "")[0])
    rows = changes_of(history, startingSeq=begin)
    assert _applied(_state(history, begin - 1), rows) == _state(history, last)


def test_stream_of_changes_goes_from_state_to_state(tmp_path: Path) -> None:
    """Each micro-batch has what was shipped since the one before; planned again it is the same."""
    history = History(tmp_path, "stream")
    options = {"root": history.store, "changes": "true", "includeValue": "true", "startingSeq": "earliest"}
    source = EntriesDataSource(options)
    state: dict[tuple[str, str], Any] = {}
    offset: dict[str, int] | None = None
    with history.open() as engine:
        for _ in range(3):
            history.grow(engine)
            reader = cast(ChangesStreamReader, source.streamReader(source.schema()))
            start = reader.initialOffset() if offset is None else offset
            offset = reader.latestOffset(start, ReadAllAvailable())
            assert offset == {"seq": engine.applied_seq}
            first, again = (
                [
                    row
                    for part in reader.partitions(start, offset)
                    for one in reader.read(part)
                    for row in one.to_pylist()
                ]
                for _ in range(2)
            )
            assert first == again
            state = _applied(state, first)
            assert state == _state(history, offset["seq"])
            assert reader.partitions(offset, offset) == []
    latest = EntriesDataSource({**options, "startingSeq": "latest"})
    reader = cast(ChangesStreamReader, latest.streamReader(latest.schema()))
    assert reader.initialOffset() == offset
    with pytest.raises(OffsetOutOfRangeError, match="another engine"):
        reader.latestOffset({"seq": 10**9}, ReadAllAvailable())
    with pytest.raises(InputError, match="not a position in changes"):
        reader.partitions({"lsn": 3}, offset)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"changes": "true", "includeRefused": "false"}, "includeRefused is for entries"),
        ({"changes": "true", "maxEntriesPerTrigger": "7"}, "maxEntriesPerTrigger is for entries"),
        ({"newestOnly": "true"}, "newestOnly is for change data"),
        ({"changes": "true", "columns": "lsn"}, "there is no column lsn"),
        ({"changes": "true", "startingSeq": "99"}, "there are no changes from seq 99 to 12"),
    ],
)
def test_options_that_do_not_go_together_are_named(
    made: tuple[EngineRoot, dict[int, Seen]], options: dict[str, str], message: str
) -> None:
    """An option that would change nothing is a mistake."""
    source = EntriesDataSource({"root": made[0].store_url, **options})
    with pytest.raises(InputError, match=message):
        source.reader(source.schema()).partitions()


# In SQL, into tables


def test_changes_bring_tables_up_to_date_in_sql_and_with_iceberg(
    spark: SparkSession, made: tuple[EngineRoot, dict[int, Seen]], tmp_path: Path
) -> None:
    """A table that plain Spark keeps by a join, and one of Iceberg that takes upserts and deletes, are what
    `tidelog_objects` shows after each round."""
    engine, states = made
    catalog = SqlCatalog("lake", uri=f"sqlite:///{tmp_path}/lake.db", warehouse=f"file://{tmp_path}/lake")
    catalog.create_namespace("lake")
    kind = pa.schema([pa.field("key", pa.string(), nullable=False), pa.field("data", pa.binary())])
    lake = catalog.create_table("lake.objects", kind)
    kept = spark.createDataFrame([], "bucket string, key string, data binary")
    options = f"root '{engine.store_url}', changes 'true', newestOnly 'true', includeValue 'true'"
    spark.sql(f"CREATE TABLE changes USING tidelog_entries OPTIONS ({options})")
    try:
        for first, last in ((1, 4), (5, 7), (8, 12)):
            changes = spark.sql(f"SELECT * FROM changes WITH (startingSeq = '{first}', endingSeq = '{last}')")
            changes.createOrReplaceTempView("round")
            kept.createOrReplaceTempView("kept")
            kept = spark.createDataFrame(
                spark.sql(
                    "SELECT bucket, key, IF(c.change IS NULL, k.data, c.after.data) AS data FROM kept k "
                    "FULL JOIN round c USING (bucket, key) WHERE c.change IS NULL OR c.change <> 'delete'"
                ).collect(),
                kept.schema,
            )
            rows = changes.select("key", "change", "after.data").collect()
            gone = [row.key for row in rows if row.change == "delete"]
            if gone:
                lake.delete(f"key IN ({', '.join(map(repr, gone))})")
            put = [{"key": row.key, "data": bytes(row.data)} for row in rows if row.change != "delete"]
            if put:
                lake.upsert(pa.Table.from_pylist(put, schema=kind), join_cols=["key"])
            assert {row.key: bytes(row.data) for row in kept.collect()} == states[last]
            assert {row["key"]: row["data"] for row in lake.scan().to_arrow().to_pylist()} == states[last]
    finally:
        spark.sql("DROP TABLE changes")


def test_table_of_changes_is_a_stream(
    spark: SparkSession, made: tuple[EngineRoot, dict[int, Seen]], tmp_path: Path
) -> None:
    """`readStream.table` in the manner of entries: from the beginning here, and once."""
    engine, states = made
    spark.sql(f"CREATE TABLE changed USING tidelog_entries OPTIONS (root '{engine.store_url}', changes 'true')")
    try:
        stream = spark.readStream.option("startingSeq", "earliest").option("newestOnly", "true").table("changed")
        query = stream.writeStream.format("memory").queryName("seen_changes").trigger(availableNow=True)
        query.option("checkpointLocation", str(tmp_path / "checkpoint")).start().awaitTermination()
        rows = spark.sql("SELECT key, change, after.data FROM seen_changes").collect()
        assert {(row.key, row.change, row.data) for row in rows} == {(key, "insert", None) for key in states[12]}
    finally:
        spark.sql("DROP TABLE changed")
