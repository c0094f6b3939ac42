"""Spark SQL over topics and engines: the guide keeps its word, and what could go wrong silently is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from tests.servers import ACCESS_KEY_ID, SECRET_ACCESS_KEY, S3Server

import tidelog
from tidelog.pipeline.address import find_root

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "spark-sql.md"
SQL = re.compile(r"^```sql\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SCRIPT = re.compile(r"^```sql script\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def sql(spark: SparkSession) -> Iterator[SparkSession]:
    """The session; tables and views of the test are gone behind it."""
    yield spark
    for table in spark.catalog.listTables():
        kind = "VIEW" if table.tableType in ("VIEW", "TEMPORARY") else "TABLE"
        spark.sql(f"DROP {kind} IF EXISTS {table.name}")


def _make_engine(path: Path, store: str | None = None, **settings: Any) -> None:
    with tidelog.open_engine(path.with_name("node"), store=store or path.as_uri(), **settings) as engine:
        engine.apply(1, tidelog.CreateBucket("photos"))
        engine.apply_many([(seq, tidelog.PutObject("photos", f"{seq}.png", b"x" * seq)) for seq in (2, 3)])
        engine.update_low_water_mark(3)
        engine.ship()


@pytest.mark.parametrize("place", ["directory", "bucket"])
def test_sql_guide_runs_and_sees_new_messages(
    sql: SparkSession, s3_server: S3Server, tmp_path: Path, place: str
) -> None:
    """Whoever knows only SQL gets a table, an insert, a view that sees it, a copy, and an engine's entries; in a bucket
    too, with its keys in a file."""
    text = GUIDE.read_text("utf-8")
    if place == "directory":
        _make_engine(tmp_path / "engine")
        text = text.replace("/data/", f"{tmp_path}/")
    else:
        settings, keys = _settings(s3_server, tmp_path)
        _make_engine(tmp_path / "engine", s3_server.url("sql-guide/engine"), **keys)
        text = text.replace("file:///data/engine", s3_server.url("sql-guide/engine"))
        text = text.replace("/data/shop", s3_server.url("sql-guide/shop"))
        text = text.replace("OPTIONS (root", f"OPTIONS (config '{settings}', root")
    results: dict[str, list[tuple[object, ...]]] = {}
    for block in SQL.findall(text):
        for statement in filter(str.strip, block.split(";\n")):
            frame = sql.sql(statement)
            if frame.columns:
                results[",".join(frame.columns)] = [tuple(row) for row in frame.collect()]
    assert results == {
        "orders": [(0,)],
        "customer,amount": [("customer-0", 30), ("customer-1", 50), ("customer-2", 70)],
        "offset": [(4,), (5,)],
        "topic,offset,value": [("shop/loud", 0, '{"ID":0,"AMOUNT":0}')],
        "kind,entries": [("CreateBucket", 1), ("PutObject", 2)],
        "key,size": [("2.png", 2), ("3.png", 3)],
        "objects_then": [(1,)],
        "change,key,size_before,bytes": [("insert", "3.png", None, 3)],
    }


def _settings(server: S3Server, directory: Path) -> tuple[Path, dict[str, str]]:
    """How the bucket is reached: a file of settings, and what is in it."""
    keys = {"endpoint": server.endpoint, "access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY}
    given = {f"store_{name}": value for name, value in keys.items()}
    file = directory / "settings.toml"
    file.write_text("".join(f'{name} = "{value}"\n' for name, value in given.items()))
    return file, given


@pytest.mark.parametrize("place", ["directory", "file", "s3"])
def test_table_is_empty_until_the_first_insert_makes_its_root(
    sql: SparkSession, s3_server: S3Server, tmp_path: Path, place: str
) -> None:
    """Whoever knows only SQL begins with nothing: no directory, no prefix, no topic."""
    settings, _ = _settings(s3_server, tmp_path)
    roots = {"directory": f"{tmp_path}/log", "file": f"file://{tmp_path}/store", "s3": s3_server.url("sql-nothing")}
    config = f", config '{settings}'" if place == "s3" else ""
    sql.sql(f"CREATE TABLE a USING tidelog OPTIONS (root '{roots[place]}', topic 'shop/a'{config})")
    assert sql.sql("SELECT value FROM a").collect() == []
    assert {one.name for one in tmp_path.iterdir()} == {"settings.toml"}
    sql.sql("INSERT INTO a (value) VALUES (X'01')")
    assert sql.sql("SELECT value FROM a").collect() == [(b"\x01",)]


def test_tables_over_an_engine_are_empty_until_it_has_shipped(sql: SparkSession, tmp_path: Path) -> None:
    """They can be declared first; a state that is asked for by its seq is not there."""
    root = f"OPTIONS (root 'file://{tmp_path}/engine')"
    for name in ("entries", "objects"):
        sql.sql(f"CREATE TABLE {name} USING tidelog_{name} {root}")
        assert sql.sql(f"SELECT * FROM {name}").collect() == []
    for query in ("objects WITH (seq = '2')", "entries WITH (startingSeq = '2')", "entries WITH (endingSeq = '2')"):
        with pytest.raises(PySparkException, match="there is no such directory"):
            sql.sql(f"SELECT * FROM {query}").collect()
    _make_engine(tmp_path / "engine")
    assert [sql.table(name).count() for name in ("entries", "objects")] == [3, 2]


def test_insert_of_rows_of_another_table_is_refused_not_misdirected(sql: SparkSession, tmp_path: Path) -> None:
    """Spark hands `INSERT INTO b SELECT * FROM a` and `CREATE TABLE b AS SELECT * FROM a` over as writes to `a`: its
    topic must not grow by its own rows, and a write that was said to be done must have been."""
    with tidelog.open(tmp_path / "log") as log:
        log.topic("shop/a").append_many([b"1", b"2"])
    for name in ("a", "b"):
        sql.sql(f"CREATE TABLE {name} USING tidelog OPTIONS (root '{tmp_path}/log', topic 'shop/{name}')")
    options = f"OPTIONS (root '{tmp_path}/log', topic 'shop/c')"
    for statement, expected in (
        ("INSERT INTO b SELECT * FROM a", "has an offset"),
        (f"CREATE TABLE c USING tidelog {options} AS SELECT * FROM a", "has an offset"),
        (f"CREATE TABLE c USING tidelog {options} AS SELECT value FROM a", "CREATE TABLE ... USING ... OPTIONS"),
    ):
        with pytest.raises(PySparkException, match=expected) as raised:
            sql.sql(statement)
        assert "Traceback" not in str(raised.value)
    with find_root(tmp_path / "log").open() as log:
        assert log.topic("shop/a").next_offset == 2
        assert [str(name) for name in log.topics()] == ["shop/a"]


@pytest.mark.parametrize(
    "options",
    [
        "OPTIONS (root '{root}', topic 'shop/c')",
        "OPTIONS (path '{root}', topic 'shop/c')",
        "LOCATION '{root}#shop/c'",
        "OPTIONS (topic 'shop/c') LOCATION '{root}'",
        "TBLPROPERTIES (root '{root}', topic 'shop/c')",
    ],
)
def test_table_as_select_is_refused_with_the_way_around(sql: SparkSession, tmp_path: Path, options: str) -> None:
    """Spark hands such options to nobody: no row goes anywhere, no table stays, and the error is one line to act on."""
    root = tmp_path / "log"
    tidelog.open(root).close()
    for create in ("CREATE TABLE", "CREATE OR REPLACE TABLE"):
        with pytest.raises(PySparkException) as raised:
            sql.sql(f"{create} c USING tidelog {options.format(root=root)} AS SELECT X'01' AS value")
        told = str(raised.value).splitlines()[0]
        assert "CREATE TABLE ... USING ... OPTIONS (...) alone, then INSERT INTO it" in told
        assert "Traceback" not in str(raised.value)
    assert sql.catalog.listTables() == []
    with find_root(root).open() as log:
        assert [*log.topics()] == []


def test_script_makes_a_table_and_fills_it_in_one_statement(sql: SparkSession, tmp_path: Path) -> None:
    """What the guide offers in the place of CREATE TABLE AS SELECT; the table is one like any other behind it."""
    with tidelog.open(tmp_path / "shop") as log:
        log.topic("shop/orders").append_many([b"1", b"2"])
    sql.sql(f"CREATE TABLE orders USING tidelog OPTIONS (root '{tmp_path}/shop', topic 'shop/orders')")
    (script,) = SCRIPT.findall(GUIDE.read_text("utf-8").replace("/data/", f"{tmp_path}/"))
    sql.sql(script)
    assert sorted(row.value for row in sql.table("copy").collect()) == [b"1", b"2"]


def test_named_insert_is_stored_once(sql: SparkSession, tmp_path: Path) -> None:
    """A statement that a scheduler runs again after a failure adds its rows once."""
    sql.sql(f"CREATE TABLE a USING tidelog OPTIONS (root '{tmp_path}/log', topic 'shop/a') COMMENT 'ours'")
    for _ in range(2):
        sql.sql("INSERT INTO a WITH (txnAppId = 'nightly', txnVersion = '7') (value) VALUES (X'01'), (X'02')")
    assert sql.sql("SELECT value FROM a ORDER BY offset").collect() == [(b"\x01",), (b"\x02",)]


def test_table_is_a_stream(sql: SparkSession, tmp_path: Path) -> None:
    """`readStream.table` takes the options of the table, and those of the stream win over them."""
    with tidelog.open(tmp_path / "log") as log:
        log.topic("shop/a").append_many([b"1", b"2", b"3"])
    sql.sql(f"CREATE TABLE a USING tidelog OPTIONS (root '{tmp_path}/log', topic 'shop/a', startingOffsets 'latest')")
    stream = sql.readStream.option("startingOffsets", "earliest").table("a")
    query = stream.writeStream.format("memory").queryName("seen").trigger(availableNow=True).start()
    query.awaitTermination()
    assert sql.sql("SELECT count(*) FROM seen").first() == (3,)


def test_table_of_entries_is_a_stream(sql: SparkSession, tmp_path: Path) -> None:
    """`readStream.table` over an engine, too: from the beginning, where the stream says so."""
    _make_engine(tmp_path / "engine")
    sql.sql(f"CREATE TABLE entries USING tidelog_entries OPTIONS (root 'file://{tmp_path}/engine')")
    stream = sql.readStream.option("startingSeq", "2").table("entries").select("seq", "key")
    query = stream.writeStream.format("memory").queryName("seen_entries").trigger(availableNow=True).start()
    query.awaitTermination()
    assert sql.sql("SELECT seq, key FROM seen_entries ORDER BY seq").collect() == [(2, "2.png"), (3, "3.png")]


def test_temporary_view_over_options_is_frozen_and_one_over_a_table_is_not(sql: SparkSession, tmp_path: Path) -> None:
    """What the guide says of both, and its way around: a view of any kind over a table."""
    options = f"OPTIONS (root '{tmp_path}/log', topic 'shop/a')"
    sql.sql(f"CREATE TABLE a USING tidelog {options}")
    sql.sql("INSERT INTO a (value) VALUES (X'01')")
    sql.sql(f"CREATE TEMP VIEW frozen USING tidelog {options}")
    sql.sql("CREATE TEMP VIEW living AS SELECT value FROM a")
    counts = [[sql.table(name).count() for name in ("frozen", "living")]]
    sql.sql("INSERT INTO a (value) VALUES (X'02')")
    counts.append([sql.table(name).count() for name in ("frozen", "living")])
    assert counts == [[1, 1], [1, 2]]


def test_stream_that_cannot_be_says_why_in_one_line(spark: SparkSession, tmp_path: Path) -> None:
    """Not Spark's own error about a reader that was never made, and no traceback of a worker."""
    with tidelog.open(tmp_path) as log:
        log.topic("shop/a").append(b"1")
    frame = (
        spark.readStream.format("tidelog")
        .option("root", str(tmp_path))
        .option("subscribe", "shop/a")
        .option("endingOffsets", "latest")
        .load()
    )
    query = frame.writeStream.format("noop").start()
    with pytest.raises(PySparkException, match="a stream has no end") as raised:
        query.awaitTermination()
    assert "UnboundLocalError" not in str(raised.value)
    assert "Traceback" not in str(raised.value)
