"""The job `table`: a topic as a table, exactly once across runs, kills and rivals; and `verify` of the result."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from tests.servers import S3Server

import tidelog
from tidelog.errors import ConflictError, InputError, NotFoundError
from tidelog.pipeline.address import Root, find_root
from tidelog.pipeline.jobs.job import Progress
from tidelog.pipeline.tables.commits import TableCommits
from tidelog.pipeline.tables.files import table_location
from tidelog.pipeline.tables.iceberg import IcebergTable, iceberg_table
from tidelog.pipeline.tables.parquet import ParquetTable
from tidelog.pipeline.tables.table import Step, TableOptions, TableReport, TableTarget, table
from tidelog.pipeline.tables.tasks import read_table
from tidelog.pipeline.tables.types import TableShape
from tidelog.pipeline.tables.verify import TableVerifyReport, iceberg_content, parquet_content, verify_table
from tidelog.store.settings import StoreSettings
from tidelog.topics.topic import Topic

JSON = TableOptions(values="json")


class KilledError(BaseException):
    """The process is gone: nothing of it runs any more."""


class World:
    """A topic that grows, part of it in objects and part in files, and places for tables of it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = tidelog.open(directory / "data", store=(directory / "store").as_uri(), metadata="bucket")
        self.topic: Topic = self.log.topic("shop/orders")
        self.appended: list[tuple[int, bytes | None, bytes]] = []

    @property
    def root(self) -> Root:
        return find_root(self.directory / "data")

    @property
    def path(self) -> str:
        return str(self.directory / "a table [of orders]")

    def append(self, count: int, *, ship: bool = False) -> None:
        numbers = range(len(self.appended), len(self.appended) + count)
        rows = [(number, b"key %d" % number if number % 3 else None, b"value %d" % number) for number in numbers]
        self.topic.append_many([tidelog.Message(value, key=key) for _, key, value in rows])
        self.topic.flush()
        self.appended += rows
        if ship:
            self.topic.ship()

    def append_json(self, *values: object) -> None:
        encoded = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in values]
        self.topic.append_many(encoded)
        self.topic.flush()

    def parquet(self) -> ParquetTable:
        return ParquetTable(table_location(self.path))

    def iceberg(self) -> IcebergTable:
        uri = f"sqlite:///{self.directory}/catalog.db"
        return iceberg_table(uri, "shop.orders", warehouse=(self.directory / "warehouse").as_uri())


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.log.close()


def rows_of(frame: DataFrame) -> list[tuple[int, bytes | None, bytes]]:
    """Offset, key and value, in order; twice where they are there twice."""
    found = frame.select("offset", "key", "value").collect()
    plain = [(row.offset, None if row.key is None else bytes(row.key), bytes(row.value)) for row in found]
    return sorted(plain, key=lambda row: row[0])


def compared(spark: SparkSession, world: World) -> TableVerifyReport:
    return verify_table(spark, world.root, parquet_content(spark, world.path, StoreSettings()))


def test_a_table_is_brought_up_to_date(spark: SparkSession, world: World) -> None:
    """Each run adds what is new, plain Spark reads exactly the topic, and a run without news adds nothing."""
    world.append(300, ship=True)
    world.append(50)
    told: list[Progress] = []
    first = table(spark, world.root, "shop/orders", world.parquet(), on_progress=told.append)
    assert (first.first_offset, first.next_offset, first.is_good) == (0, 350, True)
    assert first.reconciliations[0].came_out is not None
    assert first.reconciliations[0].came_out.messages == 350
    assert told[-1].done == told[-1].total
    world.append(25)
    second = table(spark, world.root, "shop/orders", world.parquet())
    assert (second.first_offset, second.next_offset, second.reconciliations[0].went_in.messages) == (0, 375, 25)
    third = table(spark, world.root, "shop/orders", world.parquet())
    assert (third.files, third.notes) == (0, ("the table is up to date",))
    escaped = world.path.replace("[", "\\[").replace("]", "\\]")
    assert rows_of(spark.read.parquet(escaped)) == world.appended
    assert rows_of(read_table(spark, world.path)) == world.appended


def test_a_table_is_of_one_topic_and_one_kind(spark: SparkSession, world: World) -> None:
    """Another topic, or other values, are refused instead of mixed in."""
    world.append(5)
    world.log.topic("shop/other").append(b"x", sync=True)
    table(spark, world.root, "shop/orders", world.parquet())
    with pytest.raises(InputError, match="is the table of shop/orders"):
        table(spark, world.root, "shop/other", world.parquet())
    with pytest.raises(InputError, match="stores values as raw, not as json"):
        table(spark, world.root, "shop/orders", world.parquet(), JSON)
    with pytest.raises(NotFoundError):
        table(spark, world.root, "shop/none", ParquetTable(table_location(world.directory / "none")))


def test_json_columns_grow_with_the_values(spark: SparkSession, world: World) -> None:
    """New fields become columns, whole numbers become doubles, and what does not fit is kept with the reason."""
    world.append_json({"id": 1, "amount": 5}, {"id": 2, "amount": 7})
    table(spark, world.root, "shop/orders", world.parquet(), JSON)
    world.append_json({"id": 3, "amount": 1.5, "to": {"city": "Bern"}}, b"nonsense", {"id": "four", "amount": 2}, b"")
    report = table(spark, world.root, "shop/orders", world.parquet(), JSON)
    assert (report.rejected, len(report.notes)) == (2, 2)
    rows = read_table(spark, world.path).orderBy("_offset").collect()
    assert [row.amount for row in rows] == [5.0, 7.0, 1.5, None, None, None]
    assert [row.to and row.to.city for row in rows] == [None, None, "Bern", None, None, None]
    assert [row._rejected_value for row in rows] == [
        None,
        None,
        None,
        b"nonsense",
        b'{"id": "four", "amount": 2}',
        None,
    ]
    assert rows[4]._rejected == "id: text where a whole number is expected"
    assert compared(spark, world).is_good


def test_a_schema_chooses_the_columns(spark: SparkSession, world: World) -> None:
    """With a schema of one's own nothing is inferred, and other fields are left out."""
    world.append_json({"id": 1, "at": "2026-01-31T12:00:00Z", "more": 5})
    fields = [{"name": "at", "type": "timestamp"}, {"name": "id", "type": "integer"}]
    options = TableOptions(values="json", schema={"type": "struct", "fields": fields})
    report = table(spark, world.root, "shop/orders", world.parquet(), options)
    assert [field["name"] for field in report.columns["fields"]][-2:] == ["at", "id"]
    rows = read_table(spark, world.path).selectExpr("CAST(at AS string) AS at", "id").collect()
    assert [(row.at, row.id) for row in rows] == [("2026-01-31 12:00:00", 1)]
    other = TableOptions(values="json", schema={"type": "struct", "fields": [{"name": "id", "type": "boolean"}]})
    with pytest.raises(InputError, match="the column id"):
        table(spark, world.root, "shop/orders", world.parquet(), other)


# Kills. An exception that ends a run also clears away, so the clearing is taken out too: a killed process does none.


def kill(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, *, after: bool = False) -> None:
    """The process dies when it calls this, or when that is done."""
    work = getattr(owner, name)

    def die(*arguments: Any, **named: Any) -> None:
        if after:
            work(*arguments, **named)
        raise KilledError

    monkeypatch.setattr(owner, name, die)
    monkeypatch.setattr(ParquetTable, "discard", lambda *_: None)
    monkeypatch.setattr(IcebergTable, "discard", lambda *_: None)


def kill_publishing(monkeypatch: pytest.MonkeyPatch) -> None:
    kill(monkeypatch, TableCommits, "_publish", after=True)


KILLS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "before the files": lambda patch: kill(patch, ParquetTable, "prepare"),
    "before the commit": lambda patch: kill(patch, TableCommits, "commit"),
    "behind the commit": lambda patch: kill(patch, TableCommits, "commit", after=True),
    "while publishing": kill_publishing,
}


@pytest.mark.parametrize("when", KILLS)
def test_a_run_that_was_killed_is_run_again(
    spark: SparkSession, world: World, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Every message is in the table once, and what is committed can be read at every moment."""
    world.append(20)
    table(spark, world.root, "shop/orders", world.parquet())
    world.append(30)
    with monkeypatch.context() as patch:
        KILLS[when](patch)
        with pytest.raises(KilledError):
            table(spark, world.root, "shop/orders", world.parquet())
    is_committed = when in ("behind the commit", "while publishing")
    assert rows_of(read_table(spark, world.path)) == world.appended[: 50 if is_committed else 20]
    world.append(1)
    table(spark, world.root, "shop/orders", world.parquet())
    assert rows_of(read_table(spark, world.path)) == world.appended
    names = {path.name for path in Path(world.path).iterdir() if path.suffix == ".parquet"}
    assert names == {file.name for file in TableCommits(table_location(world.path).open()).state().files}
    assert not list(Path(world.path, "_tidelog").glob("staged-*/*"))


class Rival:
    """A table that another run brings up to date while this one has looked at it and is about to write."""

    def __init__(self, target: TableTarget, run: Callable[[], object]) -> None:
        self._target = target
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def prepare(self, shape: TableShape) -> None:
        self._target.prepare(shape)
        self._run()

    def commit(self, step: Step) -> None:
        self._target.commit(step)


@pytest.mark.parametrize("kind", ["parquet", "iceberg"])
def test_of_two_runs_at_once_one_wins(spark: SparkSession, world: World, kind: str) -> None:
    """The other says so and adds nothing, so no row is there twice."""
    world.append(20)
    target: Callable[[], TableTarget] = world.parquet if kind == "parquet" else world.iceberg
    table(spark, world.root, "shop/orders", target())
    world.append(10)
    rival: Any = Rival(target(), lambda: table(spark, world.root, "shop/orders", target()))
    with pytest.raises(ConflictError, match="another run wrote"):
        table(spark, world.root, "shop/orders", rival)
    rows = read_table(spark, world.path) if kind == "parquet" else iceberg_rows(spark, world)
    assert rows_of(rows) == world.appended


# Iceberg


def iceberg_rows(spark: SparkSession, world: World) -> DataFrame:
    return iceberg_content(spark, world.iceberg()._catalog, "shop.orders").rows


def test_an_iceberg_table_is_brought_up_to_date(
    spark: SparkSession, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and offsets are committed together: a run that is killed has done all or nothing."""
    world.append(40, ship=True)
    table(spark, world.root, "shop/orders", world.iceberg())
    world.append(10)
    for after in (False, True):
        with monkeypatch.context() as patch:
            kill(patch, IcebergTable, "commit", after=after)
            with pytest.raises(KilledError):
                table(spark, world.root, "shop/orders", world.iceberg())
    report = table(spark, world.root, "shop/orders", world.iceberg())
    assert report.notes == ("the table is up to date",)
    loaded = world.iceberg()._catalog.load_table("shop.orders")
    found = loaded.scan().to_arrow().sort_by("offset").to_pylist()
    assert [(row["offset"], row["key"], row["value"]) for row in found] == world.appended
    assert len(loaded.metadata.snapshots) == 2
    assert verify_table(spark, world.root, iceberg_content(spark, world.iceberg()._catalog, "shop.orders")).is_good


def test_columns_of_an_iceberg_table_grow(spark: SparkSession, world: World) -> None:
    """As in a Parquet table; a column that became wider is a new one of the same name, with all of its rows."""
    world.append_json({"id": 1, "amount": 5, "to": {"city": "Bern"}})
    table(spark, world.root, "shop/orders", world.iceberg(), JSON)
    world.append_json({"id": 2, "amount": 1.5, "to": {"city": "Biel", "zip": 2500}, "new": True})
    table(spark, world.root, "shop/orders", world.iceberg(), JSON)
    found = world.iceberg()._catalog.load_table("shop.orders").scan().to_arrow().sort_by("_offset").to_pylist()
    assert [(row["id"], row["amount"], row["new"]) for row in found] == [(1, 5.0, None), (2, 1.5, True)]
    assert [row["to"] for row in found] == [{"city": "Bern", "zip": None}, {"city": "Biel", "zip": 2500}]
    assert verify_table(spark, world.root, iceberg_content(spark, world.iceberg()._catalog, "shop.orders")).is_good


# Proofs


def rewrite(world: World, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Somebody changes a file of the table behind our back."""
    path = next(Path(world.path).glob("part-*.parquet"))
    content = pq.read_table(path)
    rows = content.to_pylist()
    change(rows)
    path.unlink()  # it may share its content with a name in another place
    pq.write_table(content.from_pylist(rows, schema=content.schema), path)


def test_a_table_that_is_not_its_topic_is_found(spark: SparkSession, world: World) -> None:
    """A row that is missing, one that is there twice and one that differs are named by their offsets."""
    world.append(40)
    table(spark, world.root, "shop/orders", world.parquet())
    assert compared(spark, world).is_good

    def change(rows: list[dict[str, Any]]) -> None:
        rows[7]["value"] = b"other"
        rows.append(rows[11])
        del rows[5]

    rewrite(world, change)
    report = compared(spark, world)
    assert not report.is_good
    reasons = {problem.message for problem in report.findings}
    assert reasons == {
        "1 rows are missing from the table: offsets 5",
        "1 rows are in the table more than once: offsets 11",
        "1 rows of the table differ from the topic: offsets 7",
    }


def test_a_table_in_a_bucket_needs_no_jar(spark: SparkSession, world: World, s3_server: S3Server) -> None:
    """Written, read and proven in an S3 store by workers alone."""
    world.append(40)
    url, settings = s3_server.url("a-table"), s3_server.settings()
    report: TableReport = table(spark, world.root, "shop/orders", ParquetTable(table_location(url, settings)))
    assert report.is_good
    content = parquet_content(spark, url, settings)
    assert rows_of(content.rows) == world.appended
    assert verify_table(spark, world.root, content).is_good
    assert "test-secret" not in content.rows._jdf.queryExecution().toString()
