"""`tidelog pipeline replay` and `backfill`: messages and rows into a topic, in order, each once, whatever happens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from tests.pipeline.tables.avro_writing import avro_file

import tidelog
from tidelog.cli.app import run
from tidelog.errors import ConflictError, DataError, InputError, NotFoundError
from tidelog.pipeline.address import Root, find_root
from tidelog.pipeline.jobs.job import told_in_our_words
from tidelog.pipeline.jobs.replay_topic import Mapping, Selection, Step, StepWriter, backfill, open_steps, replay
from tidelog.pipeline.jobs.tally import read_rows


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """A local directory with a topic of 100 messages."""
    with tidelog.open(tmp_path / "data") as log:
        append(log, 0, 100)
    return find_root(tmp_path / "data")


def append(log: tidelog.LogDirectory, first: int, end: int) -> None:
    topic = log.topic("shop/orders")
    for number in range(first, end):
        headers = {"n": str(number).encode()} if number % 3 == 0 else None
        topic.append(f"order {number}".encode(), key=f"k{number % 5}".encode(), headers=headers)


def messages(root: Root, topic: str) -> list[tidelog.Message]:
    with root.open() as log:
        return list(log.topic(topic).read())


def values(root: Root, topic: str) -> list[str]:
    return [(one.value or b"").decode() for one in messages(root, topic)]


def orders(*numbers: int) -> list[str]:
    return [f"order {number}" for number in numbers]


def test_a_topic_is_replayed_as_it_is(spark: SparkSession, root: Root, tmp_path: Path) -> None:
    """In order, with keys, headers and times, in steps; a later run takes what has come since. Into a bucket."""
    (tmp_path / "store").mkdir()
    bucket = find_root((tmp_path / "store").as_uri())
    report = replay(spark, root, "shop/orders", "shop/copy", step_messages=40, target_root=bucket)
    assert report.is_good
    assert (report.steps, report.messages, report.source_end) == (3, 100, 100)
    assert (report.target_first_offset, report.target_next_offset) == (0, 100)
    before, after = messages(root, "shop/orders"), messages(bucket, "shop/copy")
    assert [(one.key, one.value, one.headers, one.timestamp) for one in after] == [
        (one.key, one.value, one.headers, one.timestamp) for one in before
    ]
    with tidelog.open(root.location) as log:
        append(log, 100, 103)
    again = replay(spark, root, "shop/orders", "shop/copy", step_messages=40, target_root=bucket)
    assert (again.steps, again.messages, again.source_first, again.target_first_offset) == (1, 3, 100, 100)
    idle = replay(spark, root, "shop/orders", "shop/copy", step_messages=40, target_root=bucket)
    assert (idle.steps, idle.messages, idle.is_good) == (0, 0, True)
    assert values(bucket, "shop/copy") == orders(*range(103))


def test_some_messages_are_replayed_as_sql_says(
    spark: SparkSession, root: Root, capsys: pytest.CaptureFixture[str]
) -> None:
    """A condition and expressions over the columns of the topic; what is not selected is left out."""
    arguments = ["shop/orders", "shop/some", "--where", "key = 'k1' AND offset < 50", "--select"]
    arguments += ["upper(cast(value AS string)) AS value", "--select", "cast(offset AS string) AS key"]
    assert run(["pipeline", "replay", *arguments, "--root", root.location, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["messages"], told["is_good"]) == (10, True)
    found = messages(root, "shop/some")
    assert [one.value for one in found] == [f"ORDER {number}".encode() for number in range(1, 50, 5)]
    assert [one.key for one in found] == [str(number).encode() for number in range(1, 50, 5)]
    assert all(not one.headers for one in found)


def test_a_step_without_rows_is_passed(spark: SparkSession, root: Root) -> None:
    """When no message of a step is wanted, the next one is gone on with."""
    report = replay(
        spark, root, "shop/orders", "shop/late", selection=Selection(where="offset >= 90"), step_messages=45
    )
    assert (report.steps, report.messages, report.is_good) == (3, 10, True)
    assert values(root, "shop/late") == orders(*range(90, 100))


@pytest.mark.parametrize("is_written", [False, True])
def test_a_killed_replay_goes_on_with_the_step_that_it_had_begun(
    spark: SparkSession, root: Root, is_written: bool
) -> None:
    """Killed before or after its rows were written, the same step comes in once, whatever the next run was to do."""
    identity = f'{{"root":"{root.location}","topic":"shop/orders"}}'
    with open_steps(root, "shop/copy", "mine", identity) as steps:
        step = next(steps.all(0, lambda at: at + 30))
        assert step == Step(0, 30)
        if is_written:
            rows = read_rows(spark, root, {"shop/orders": step}, includeHeaders=True)
            StepWriter(spark, root, "shop/copy", steps).write(step, Selection().of(rows))
    report = replay(spark, root, "shop/orders", "shop/copy", step_messages=50, name="mine")
    assert report.is_good
    assert (report.source_first, report.source_end, report.steps) == (0, 100, 3)
    assert values(root, "shop/copy") == orders(*range(100))


def test_a_name_belongs_to_one_replay(spark: SparkSession, root: Root) -> None:
    """What was begun with other arguments is not gone on with."""
    replay(spark, root, "shop/orders", "shop/copy", name="mine", end_offset=10)
    with pytest.raises(ConflictError, match="begun with another source"):
        replay(spark, root, "shop/orders", "shop/copy", name="mine", selection=Selection(where="offset > 5"))
    assert len(messages(root, "shop/copy")) == 10


def test_what_cannot_be_replayed_is_named(spark: SparkSession, root: Root, tmp_path: Path) -> None:
    """A topic into itself, one that is not there, offsets that it does not have, a target that is nowhere."""
    with pytest.raises(InputError, match="into itself"):
        replay(spark, root, "shop/orders", "shop/orders")
    with pytest.raises(NotFoundError, match="no topic shop/nothing"):
        replay(spark, root, "shop/nothing", "shop/copy")
    with pytest.raises(InputError, match="has the offsets 0 up to 100"):
        replay(spark, root, "shop/orders", "shop/copy", end_offset=101)
    with pytest.raises(NotFoundError, match="no log directory"):
        replay(spark, root, "shop/orders", "shop/copy", target_root=find_root(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("selection", "problem"),
    [
        (Selection(where="price > 3"), "the selection cannot be understood.*price"),
        (Selection(select=("value AS (",)), "the selection cannot be understood"),
        (Selection(select=("key",)), "the column value is missing"),
        (Selection(select=("value", "1 AS price")), "price is not part of a message"),
        (Selection(select=("repeat('x', 20000000) AS value",)), "max_message_bytes"),
    ],
)
def test_a_mistake_in_a_selection_is_told(spark: SparkSession, root: Root, selection: Selection, problem: str) -> None:
    """As an error in the input, in the words of whoever noticed it, and nothing is written."""
    with pytest.raises(InputError, match=problem):
        replay(spark, root, "shop/orders", "shop/copy", selection=selection)
    with root.open() as log:
        assert not log.has_topic("shop/copy")


# Files


def test_a_mistake_leaves_no_trace(spark: SparkSession, root: Root, tmp_path: Path) -> None:
    """A wrong column makes no topic that cannot be opened, and the command may be put right and run again."""
    (tmp_path / "rows.csv").write_text("id,text\n1,a\n2,b\n", "utf-8")
    files, header = [str(tmp_path / "rows.csv")], {"header": "true"}
    mapping = Mapping(value="nothing")
    with pytest.raises(InputError, match="no column nothing"):
        backfill(spark, root, files, "shop/rows", format="csv", mapping=mapping, options=header)
    with pytest.raises(InputError, match="cannot be understood"):
        replay(spark, root, "shop/orders", "shop/some", selection=Selection(where="nothing = 1"))
    with root.open() as log:
        assert log.topics() == ["shop/orders"]
    mapping = Mapping(value="text")
    backfill(spark, root, files, "shop/rows", format="csv", mapping=mapping, options=header)
    assert values(root, "shop/rows") == ["a", "b"]


def test_parquet_files_become_messages(spark: SparkSession, root: Root, tmp_path: Path) -> None:
    """File by file in the order of their names; by columns, or whole rows as JSON; a second run writes nothing."""
    for number in range(3):
        rows = spark.range(number * 10, number * 10 + 10).selectExpr("id", "concat('row ', id) AS text", "id % 2 AS k")
        rows.coalesce(1).write.parquet(str(tmp_path / "rows" / f"part={number}"))
    paths = [str(tmp_path / "rows")]
    mapping = Mapping(value="text", key="k")
    report = backfill(spark, root, paths, "shop/rows", mapping=mapping, step_bytes=1)
    assert (report.is_good, report.steps, report.messages) == (True, 3, 30)
    found = messages(root, "shop/rows")
    assert [one.value for one in found] == [f"row {number}".encode() for number in range(30)]
    assert [one.key for one in found] == [str(number % 2).encode() for number in range(30)]
    assert backfill(spark, root, paths, "shop/rows", mapping=mapping).messages == 0
    assert backfill(spark, root, paths, "shop/json").messages == 30
    assert json.loads(messages(root, "shop/json")[7].value or b"") == {"id": 7, "text": "row 7", "k": 1}
    spark.range(1).write.parquet(str(tmp_path / "rows" / "part=9"))
    with pytest.raises(ConflictError, match="begun with another source: 3 parquet files"):
        backfill(spark, root, paths, "shop/rows", mapping=mapping)
    with pytest.raises(InputError, match="no column nothing"):
        backfill(spark, root, paths, "shop/other", mapping=Mapping(key="nothing"))


def test_lines_of_json_become_messages(spark: SparkSession, root: Root, tmp_path: Path) -> None:
    """A line is the message as it is written, blank ones are none; key and time are fields. What is no JSON is told."""
    lines = ['{"id": 1, "price": 1.10, "at": "2026-01-01T00:00:00Z"}', "", '{"id": 2, "more": [1,  2]}']
    (tmp_path / "rows.json").write_text("\n".join(lines) + "\n", "utf-8")
    paths = [str(tmp_path / "rows.json")]
    mapping = Mapping(key="id", timestamp="at")
    assert backfill(spark, root, paths, "shop/json", format="json", mapping=mapping).messages == 2
    found = messages(root, "shop/json")
    assert [(one.key, one.value) for one in found] == [(b"1", lines[0].encode()), (b"2", lines[2].encode())]
    assert found[0].timestamp is not None
    assert (found[0].timestamp.year, found[0].timestamp.month) == (2026, 1)
    with pytest.raises(InputError, match="there is no field nothing"):
        backfill(spark, root, paths, "shop/other", format="json", mapping=Mapping(value="nothing"))
    with pytest.raises(DataError, match=r"rows\.json: it is no Avro file"):
        backfill(spark, root, paths, "shop/other", format="avro")


def test_avro_files_become_messages(spark: SparkSession, root: Root, tmp_path: Path) -> None:
    """In the order of their names, without a package of Spark's; a later file may lack a column. A damaged one is named
    with its byte, and writes nothing."""
    files = tmp_path / "files"
    files.mkdir()
    head = {"type": "record", "name": "order", "fields": [{"name": "id", "type": "long"}]}
    more = {**head, "fields": [*head["fields"], {"name": "text", "type": ["null", "string"]}]}
    (files / "a.avro").write_bytes(avro_file(more, [b"\x02\x02\x04hi", b"\x04\x00"], codec="deflate"))
    (files / "b.avro").write_bytes(avro_file(head, [b"\x06"]))
    paths = [str(files)]
    assert backfill(spark, root, paths, "shop/avro", format="avro", mapping=Mapping(key="id")).messages == 3
    found = messages(root, "shop/avro")
    assert [one.key for one in found] == [b"1", b"2", b"3"]
    assert [json.loads(one.value or b"") for one in found] == [
        {"id": 1, "text": "hi"},
        {"id": 2, "text": None},
        {"id": 3, "text": None},
    ]
    (files / "b.avro").write_bytes(avro_file(head, [b"\x06"])[:-1])
    with pytest.raises(DataError, match=r"b\.avro: byte \d+: "):
        backfill(spark, root, paths, "shop/damaged", format="avro", name="damaged")
    with root.open() as log:
        assert not log.has_topic("shop/damaged") or not values(root, "shop/damaged")


def test_a_line_that_is_not_json_is_told_with_its_file(
    spark: SparkSession, root: Root, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is bad input: one line with the file and the line, and nothing of Java."""
    (tmp_path / "a.json").write_text('{"id": 1}\n', "utf-8")
    (tmp_path / "b.json").write_text('{"id": 2}\nhalf a line, ' + "x" * 1000 + "\n", "utf-8")
    assert (
        run(["pipeline", "backfill", str(tmp_path), "--to", "shop/json", "--format", "json", "--root", root.location])
        == 2
    )
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(told) == 1
    assert "b.json has a line that is not JSON: half a line, xxx" in told[0]
    assert len(told[0]) < 400


def test_csv_files_become_messages(
    spark: SparkSession, root: Root, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command reads names from the first line, and takes times from a column."""
    (tmp_path / "a.csv").write_text("id;at;text\n1;2026-01-01 00:00:00;first\n2;2026-01-02 00:00:00;\n", "utf-8")
    (tmp_path / "b.csv").write_text("id;at;text\n3;2026-01-03 00:00:00;third\n", "utf-8")
    arguments = [str(tmp_path / "b.csv"), str(tmp_path / "a.csv"), "--to", "shop/csv", "--format", "csv"]
    arguments += ["--separator", ";", "--timestamp-column", "at", "--key-column", "id", "--root", root.location]
    assert run(["pipeline", "backfill", *arguments]) == 0
    assert "shop/csv: 3 messages in 1 step" in capsys.readouterr().out
    found = messages(root, "shop/csv")
    assert [one.key for one in found] == [b"1", b"2", b"3"]
    assert json.loads(found[1].value or b"") == {"id": "2", "at": "2026-01-02 00:00:00", "text": None}
    assert [one.timestamp.day for one in found if one.timestamp is not None] == [1, 2, 3]
    assert run(["pipeline", "backfill", str(tmp_path / "c.csv"), "--to", "shop/csv", "--root", root.location]) == 3
    (tmp_path / "d.csv").write_text("id;at;text\n4;yesterday;fourth\n", "utf-8")
    assert run(["pipeline", "backfill", str(tmp_path / "d.csv"), *arguments[2:]]) == 2
    told = capsys.readouterr().err
    assert "yesterday" in told
    assert "Logger" not in told


def test_of_several_errors_in_one_text_the_right_one_is_told() -> None:
    """Spark wraps errors in others: told are the words of the data that does not fit, or of the task that failed."""
    text = "[WRAPPED] outer. SQLSTATE: 38000\n[CAST_INVALID_INPUT] The value 'x'\ncannot be cast. SQLSTATE: 22018"
    with pytest.raises(InputError) as told, told_in_our_words("write"):
        raise PySparkException(text)
    assert told.value.message == "the data does not fit: The value 'x' cannot be cast."
    with pytest.raises(NotFoundError, match="gone"), told_in_our_words("write"):
        raise PySparkException("[WRAPPED] Traceback\ntidelog.errors.NotFoundError: gone\n SQLSTATE: 38000")


def test_files_that_cannot_be_read_are_told_as_such(
    spark: SparkSession, root: Root, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files of another format, a store without its jar, a damaged file: wrong input with a hint, and no Java."""
    (tmp_path / "rows.csv").write_text("id,text\n1,a\n", "utf-8")
    spark.range(3).coalesce(1).write.parquet(str(tmp_path / "some"))
    (tmp_path / "some" / "part-zz.parquet").write_bytes(b"PAR1 and nothing else")
    for path, *arguments, problem in [
        (str(tmp_path / "rows.csv"), "say so: --format csv"),
        (str(tmp_path / "rows.csv"), "--format", "csv", "--separator", "", "Check --format and --separator"),
        ("s3a://bucket/rows.csv", "--format", "csv", "Spark needs a jar"),
        (str(tmp_path / "some"), "part-zz.parquet"),
    ]:
        assert run(["pipeline", "backfill", path, *arguments, "--to", "shop/rows", "--root", root.location]) == 2
        told = capsys.readouterr().err
        assert problem in told
        assert "Py4J" not in told
        assert "\tat " not in told


def test_rows_that_cannot_be_loaded_are_an_error_of_ours(spark: SparkSession, tmp_path: Path) -> None:
    """A run that tries again what may pass goes by the class of an error: that of `load()` is not Spark's."""
    with pytest.raises(NotFoundError, match="there is no such directory"):
        read_rows(spark, find_root((tmp_path / "nowhere").as_uri()), {"shop/orders": (0, 1)})
