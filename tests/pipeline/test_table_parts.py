"""The parts of the job `table` that need no Spark: types, fitting, Avro, and the commits of a Parquet table."""

from __future__ import annotations

import contextlib
import datetime
import json
import shutil
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitStateUnknownException

from tidelog.errors import ConflictError, DataError, InputError
from tidelog.pipeline.jobs.job import Reconciliation, Totals
from tidelog.pipeline.jobs.tally import tally_rows
from tidelog.pipeline.tables.avro import avro_decoder, avro_fields
from tidelog.pipeline.tables.commits import FORMAT, Commit, TableCommits, TableFile, staged_prefix
from tidelog.pipeline.tables.files import write_batches
from tidelog.pipeline.tables.fitting import MisfitError, fitter
from tidelog.pipeline.tables.iceberg import iceberg_table
from tidelog.pipeline.tables.parquet import parquet_table
from tidelog.pipeline.tables.table import Step
from tidelog.pipeline.tables.tasks import WrittenPart
from tidelog.pipeline.tables.types import (
    RowMaker,
    evolved,
    fields_of,
    from_json,
    inferred_fields,
    joined,
    must_be_rewritten,
    parsed_shape,
    raw_shape,
    settled,
    signature,
    to_json,
    type_of,
    widened,
)
from tidelog.testing import FaultyStore

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcAB"), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.sampled_from("abcAB"), JSON_VALUES, max_size=4)


def batch_of(values: list[bytes]) -> pa.RecordBatch:
    """Messages as the source gives them."""
    count = len(values)
    times = pa.array(range(count), pa.int64()).cast(pa.timestamp("us", tz="UTC"))
    columns = {"key": pa.nulls(count, pa.binary()), "value": pa.array(values, pa.binary())}
    return pa.record_batch({**columns, "offset": pa.array(range(count), pa.int64()), "timestamp": times})


# Types


def type_of_value(value: object) -> pa.DataType:
    return type_of(signature(value))


@given(JSON_VALUES, JSON_VALUES, JSON_VALUES)
def test_joining_does_not_depend_on_the_order(one: Any, two: Any, three: Any) -> None:
    """Workers infer parts in any order, and the columns are the same but for the order of fields."""
    kinds = [type_of_value(value) for value in (one, two, three)]
    forwards = joined(joined(kinds[0], kinds[1]), kinds[2])
    backwards = joined(kinds[2], joined(kinds[1], kinds[0]))
    assert by_name(forwards) == by_name(backwards)


def by_name(kind: pa.DataType) -> object:
    """A type without the order of its fields."""
    if pa.types.is_struct(kind) or pa.types.is_union(kind):
        return str(kind)[:6], {field.name: by_name(field.type) for field in kind}
    return ("list", by_name(kind.value_type)) if pa.types.is_list(kind) else kind


@given(st.lists(OBJECTS, min_size=1, max_size=5))
def test_what_was_inferred_holds_every_value(values: list[dict[str, Any]]) -> None:
    """No row is rejected by columns that were inferred from it, except for names that differ in case alone."""
    encoded = [json.dumps(value).encode() for value in values]
    shape = evolved(None, inferred_fields([batch_of(encoded)]))
    maker = RowMaker(shape)
    rows = maker.rows(batch_of(encoded)).to_pylist()
    assert [row["_offset"] for row in rows] == list(range(len(values)))
    for row, value in zip(rows, encoded, strict=True):
        assert row["_rejected"] is None or ("no column" in row["_rejected"] and row["_rejected_value"] == value)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (({"a": 1}, {"a": 2}), "long"),
        (({"a": 1}, {"a": 2.5}), "double"),
        (({"a": 1}, {"a": None}), "long"),
        (({"a": 1}, {"a": "x"}), "string"),
        (({"a": True}, {"a": 1}), "string"),
        (({"a": 2**64},), "string"),
        (({"a": {}},), "string"),
        (({"a": []},), {"type": "array", "elementType": "string", "containsNull": True}),
    ],
)
def test_columns_are_inferred(values: tuple[dict[str, Any], ...], expected: object) -> None:
    """Numbers widen, what does not go together becomes text, and what is empty is text too."""
    found = pa.null()
    for value in values:
        found = joined(found, type_of_value(value))
    kind = settled(found)
    assert kind is not None
    assert to_json(kind.field("a").type) == expected


def test_a_column_that_exists_grows_and_never_changes_its_kind() -> None:
    """Fields are added and numbers widen even where text came in between, which alone is rejected."""
    known = evolved(None, type_of_value({"amount": 1, "inner": {"x": 1}}))
    coming = [{"amount": 2.5}, {"amount": "much"}, {"inner": {"y": True}}, {"new": [1]}]
    found = pa.null()
    for value in coming:
        found = joined(found, type_of_value(value))
    shape = evolved(known, found)
    kinds = {field.name: str(field.type) for field in fields_of(shape)}
    assert kinds["amount"] == "double"
    assert kinds["inner"] == "struct<x: int64, y: bool>"
    assert kinds["new"].startswith("list<element: int64")
    assert must_be_rewritten(known.kind, shape.kind)
    rows = RowMaker(shape).rows(batch_of([json.dumps(value).encode() for value in coming])).to_pylist()
    assert [row["_rejected"] for row in rows] == [None, "amount: text where a number is expected", None, None]
    assert rows[1]["_rejected_value"] == b'{"amount": "much"}'


def test_new_fields_alone_rewrite_nothing() -> None:
    """Files without a column may stand beside files that have it."""
    known = type_of_value({"a": 1})
    assert not must_be_rewritten(known, widened(known, type_of_value({"a": 1, "b": 2})))


@given(OBJECTS)
def test_a_schema_survives_its_json(value: dict[str, Any]) -> None:
    """Columns are written down in commits and read back the same."""
    kind = evolved(None, type_of_value(value)).kind
    assert from_json(json.loads(json.dumps(to_json(kind)))) == kind


@pytest.mark.parametrize("depth", [30, 400, 900])
def test_what_is_nested_deeply_is_text_from_some_level_on(depth: int) -> None:
    """A value that no reader's schema could follow does not stop the table of its topic, and nothing of it is lost."""
    values = [b'{"a": ' + b"[" * depth + b"1" + b"]" * depth + b"}", b'{"a": ' * depth + b"1" + b"}" * depth]
    for value in values:
        shape = evolved(None, inferred_fields([batch_of([value])]))
        assert from_json(shape.columns) == shape.kind
        maker = RowMaker(shape)
        (row,) = maker.rows(batch_of([value])).to_pylist()
        assert (maker.rejected, row["_rejected"]) == (0, None)


@pytest.mark.parametrize("kind", ["decimal(39,2)", "decimal(5,9)", "decimal(", "decimal(5)", "decimal(a,b)", {}, 5])
def test_a_type_that_no_table_has_is_named(kind: object) -> None:
    """In a schema that somebody gives."""
    with pytest.raises(InputError, match="does not support columns of the type"):
        from_json({"type": "struct", "fields": [{"name": "a", "type": kind}]})


def test_values_that_are_no_objects_are_rejected_whole() -> None:
    """Nothing is lost: each is kept as it came, with the reason."""
    values = [b"nonsense", b"[1]", b"\xff", b"", b'{"_offset": 5}', b"[" * 100_000]
    rows = RowMaker(parsed_shape("json", pa.struct([pa.field("a", pa.int64())]))).rows(batch_of(values)).to_pylist()
    assert [row["_rejected"] is None for row in rows] == [False, False, False, True, False, False]
    assert [row["_rejected_value"] for row in rows] == [value or None for value in values]
    assert [row["_offset"] for row in rows] == list(range(len(values)))


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (pa.int8(), 127, 127),
        (pa.int64(), 3.0, 3),
        (pa.float64(), 3, 3.0),
        (pa.string(), {"a": 1}, '{"a":1}'),
        (pa.decimal128(6, 2), 12.5, Decimal("12.50")),
        (pa.date32(), "2026-01-31", datetime.date(2026, 1, 31)),
        (pa.timestamp("us", tz="UTC"), "2026-01-31T12:00:00Z", datetime.datetime(2026, 1, 31, 12, tzinfo=datetime.UTC)),
    ],
)
def test_values_fit(kind: pa.DataType, value: object, expected: object) -> None:
    """A value becomes what its column holds."""
    assert fitter(kind)(value) == expected


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.int8(), 128),
        (pa.int64(), 2**63),
        (pa.int64(), 1.5),
        (pa.int64(), True),
        (pa.bool_(), 1),
        (pa.float64(), "1"),
        (pa.decimal128(4, 2), 123.4),
        (pa.decimal128(6, 1), 1.25),
        (pa.date32(), "yesterday"),
        (pa.float32(), 1e300),
        (pa.timestamp("us", tz="UTC"), "0001-01-01T00:00:00+23:59"),
        (pa.timestamp("us", tz="UTC"), "9999-12-31T23:59:59-23:59"),
        (pa.struct([pa.field("a", pa.int64())]), [1]),
    ],
)
def test_values_that_would_change_do_not_fit(kind: pa.DataType, value: object) -> None:
    """What a type cannot hold exactly is refused, not rounded."""
    with pytest.raises(MisfitError):
        fitter(kind)(value)


# Avro

ORDER = json.dumps(
    {
        "type": "record",
        "name": "Order",
        "namespace": "shop",
        "fields": [
            {"name": "id", "type": "long"},
            {"name": "name", "type": ["null", "string"]},
            {"name": "price", "type": "double"},
            {"name": "tags", "type": {"type": "array", "items": "string"}},
            {"name": "counts", "type": {"type": "map", "values": "int"}},
            {"name": "state", "type": {"type": "enum", "name": "State", "symbols": ["NEW", "PAID"]}},
            {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
            {"name": "hash", "type": {"type": "fixed", "name": "Hash", "size": 2}},
            {"name": "sum", "type": {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2}},
            {"name": "before", "type": ["null", "shop.State"]},
        ],
    }
)
# By hand, from the specification: zigzag numbers, lengths before bytes, blocks that end with 0.
ENCODED = bytes.fromhex("0e020468690000000000001c400402610262000106027809000280a09ab58867abcd0404e20202")
DECODED = {
    "id": 7,
    "name": "hi",
    "price": 7.0,
    "tags": ["a", "b"],
    "counts": [{"key": "x", "value": -5}],
    "state": "PAID",
    "hash": b"\xab\xcd",
    "sum": Decimal("12.50"),
    "before": "PAID",
}


def test_avro_is_read_by_its_schema() -> None:
    """Every type of the format comes out as its column holds it."""
    found = avro_decoder(ORDER)(ENCODED)
    assert found.pop("at").tzinfo is not None
    assert found == DECODED
    fitted = fitter(avro_fields(ORDER))(avro_decoder(ORDER)(ENCODED))
    assert pa.array([fitted], avro_fields(ORDER)).to_pylist()[0]["sum"] == Decimal("12.50")


@given(st.binary(max_size=60))
def test_bytes_that_are_no_avro_are_misfits(data: bytes) -> None:
    """Whatever comes, the answer is a value or the reason why there is none."""
    with contextlib.suppress(MisfitError):
        fitter(avro_fields(ORDER))(avro_decoder(ORDER)(data))


@given(st.integers(0, len(ENCODED) - 1))
def test_avro_that_is_cut_short_is_a_misfit(length: int) -> None:
    """A value is read to its last byte or not at all."""
    with pytest.raises(MisfitError):
        avro_decoder(ORDER)(ENCODED[:length])


@pytest.mark.parametrize("schema", ['"string"', "{", '{"type": "record", "name": "A"}', '["int", "string"]'])
def test_an_avro_schema_without_columns_is_refused(schema: str) -> None:
    """The mistake is named before anything is read."""
    with pytest.raises(InputError):
        avro_fields(schema)


# Sums


def test_a_sum_of_rows_does_not_depend_on_how_they_are_split() -> None:
    """Parts add up to the whole, with holes between offsets or without."""
    offsets = pa.array([0, 1, 2, 7, 8, 20], pa.int64())
    batch = batch_of([b"a", b"b", b"c", b"d", b"e", b"f"])
    columns = [offsets, *(batch.column(name) for name in ("key", "value", "timestamp"))]
    whole = tally_rows(*columns)
    for cut in range(7):
        parts = [tally_rows(*(column[:cut] for column in columns)), tally_rows(*(column[cut:] for column in columns))]
        assert parts[0] + parts[1] == whole
    changed = [*columns[:2], pa.array([b"a", b"b", b"c", b"d", b"e", b"F"]), columns[3]]
    assert tally_rows(*changed).checksum != whole.checksum


# Commits


def commit_of(number: int, first: int, stop: int, attempt: str = "a1", removed: tuple[str, ...] = ()) -> Commit:
    file = TableFile(name=f"part-{number}-{attempt}.parquet", rows=1, bytes=1, first_offset=first, last_offset=stop - 1)
    return Commit(
        format=FORMAT,
        number=number,
        attempt=attempt,
        topic="shop/orders",
        values="raw",
        first_offset=first,
        next_offset=stop,
        columns={"type": "struct", "fields": []},
        added=(file,),
        removed=removed,
    )


def stage(store: FaultyStore, commit: Commit) -> None:
    for file in commit.added:
        store.put(staged_prefix(commit.number, commit.attempt) + file.name, b"content of " + file.name.encode())


def visible(store: FaultyStore) -> set[str]:
    return {info.key for info in store.list() if info.key.startswith("part-")}


class DiedError(BaseException):
    """The process is gone."""


class MortalStore(FaultyStore):
    """A store whose client dies before or after the n-th change."""

    def __init__(self, lives: int, *, is_after: bool) -> None:
        super().__init__()
        self.lives = lives
        self.is_after = is_after

    def _risked(self, name: str, *arguments: Any) -> Any:
        self.lives -= 1
        if self.lives == 0 and not self.is_after:
            raise DiedError
        result = getattr(super(), name)(*arguments)
        if self.lives == 0:
            raise DiedError
        return result

    def put(self, key: str, data: bytes) -> str:
        return str(self._risked("put", key, data))

    def put_if_absent(self, key: str, data: bytes) -> str:
        return str(self._risked("put_if_absent", key, data))

    def copy(self, source: str, target: str) -> None:
        self._risked("copy", source, target)

    def delete(self, keys: Any) -> None:
        self._risked("delete", keys)


def run_once(store: FaultyStore) -> None:
    """What a run does with the commits: finish the one before, stage, commit, finish. The second one rewrites."""
    commits = TableCommits(store)
    state = commits.state()
    commits.finish(state, b"schema")
    if state.next_number == 2:
        return
    number = state.next_number
    removed = tuple(file.name for file in state.files)
    commit = commit_of(number, number * 10, number * 10 + 10, "b2" if number else "a1", removed)
    stage(store, commit)
    commits.commit(commit)
    commits.finish(commits.state(), b"schema")


def test_a_table_that_was_removed_is_made_anew(tmp_path: Path) -> None:
    """In the same process, which keeps stores open."""
    for _ in range(2):
        assert parquet_table(tmp_path / "table").begin() is None
        shutil.rmtree(tmp_path / "table")


@pytest.mark.parametrize("is_after", [False, True])
def test_a_run_that_dies_anywhere_is_finished_by_the_next(is_after: bool) -> None:
    """Whichever change was the last one, running again ends with the same files as one clean run."""
    lives, died = 1, True
    while died:
        store, died = MortalStore(lives, is_after=is_after), False
        runs_left = 3  # two that commit, and one that finds nothing to do
        while runs_left:
            try:
                run_once(store)
                runs_left -= 1
            except DiedError:
                died = True
                keys = TableCommits(store).keys_of(TableCommits(store).state())
                assert all(store.get(key).data for key in keys), "what is committed can be read at every moment"
        assert [info.key for info in store.list("_tidelog/")] == [f"_tidelog/commit-{n:010}.json" for n in range(2)]
        assert visible(store) == {"part-1-b2.parquet"}
        assert store.get("part-1-b2.parquet").data == b"content of part-1-b2.parquet"
        lives += 1
    assert lives > 10


def test_of_two_runs_one_wins() -> None:
    """The other is told, its files go, and those of the winner stay."""
    store = FaultyStore()
    commits = TableCommits(store)
    winner, loser = commit_of(0, 0, 10, "aa"), commit_of(0, 0, 20, "bb")
    for commit in (winner, loser):
        stage(store, commit)
    commits.commit(winner)
    commits.commit(winner)  # its answer was lost on the way
    with pytest.raises(ConflictError, match="another run"):
        commits.commit(loser)
    commits.finish(commits.state(), None)
    assert visible(store) == {"part-0-aa.parquet"}
    assert list(store.list("_tidelog/staged-0000000000-bb/")) == []


def test_a_run_that_is_behind_deletes_nothing_of_another() -> None:
    """A state that was read before another run committed is no reason to remove that run's files."""
    store = FaultyStore()
    commits = TableCommits(store)
    old = commits.state()
    commit = commit_of(0, 0, 10)
    stage(store, commit)
    commits.commit(commit)
    commits.finish(commits.state(), None)
    commits.finish(old, None)
    assert visible(store) == {"part-0-a1.parquet"}


def test_commits_that_do_not_follow_each_other_are_refused() -> None:
    """A table with a missing commit is named as such, not read in part."""
    store = FaultyStore()
    commits = TableCommits(store)
    for commit in (commit_of(0, 0, 10), commit_of(1, 10, 20)):
        commits.commit(commit)
    store.delete("_tidelog/commit-0000000000.json")
    with pytest.raises(DataError, match="commit 1 begins at offset 10"):
        commits.state()


@pytest.mark.parametrize("name", ["../../etc/passwd", "part-0/../x.parquet", "_tidelog/commit-0000000000.json"])
def test_a_commit_with_names_that_are_not_ours_is_refused(name: str) -> None:
    """Whatever is in the document, nothing outside of the table is read or removed by it."""
    store = FaultyStore()
    TableCommits(store).commit(commit_of(0, 0, 10, removed=(name,)))
    with pytest.raises(DataError, match="is inconsistent"):
        TableCommits(store).state()


# Iceberg


def test_a_commit_whose_answer_was_lost_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A catalog that commits and then fails to say so: the files stay, and they are in the table once."""
    target = iceberg_table(f"sqlite:///{tmp_path}/catalog.db", "shop.orders", warehouse=(tmp_path / "wh").as_uri())
    shape = raw_shape()
    assert target.begin() is None
    target.prepare(shape)
    key = target.new_key("a1", 0, 0)
    rows = pa.RecordBatch.from_pylist([{"offset": 0, "value": b"v"}], schema=shape.schema)
    with target.place.writing(key) as sink:
        size = write_batches(sink, shape.schema, [rows])
    tally = Totals(messages=1, first_offset=0, last_offset=0, checksum="rows:0000000000000000")
    part = WrittenPart(key=key, start=0, stop=1, bytes=size, went_in=tally, came_out=tally, rejected=0)
    proof = Reconciliation(subject="a", went_in=tally, came_out=tally)
    step = Step(
        topic="shop/orders",
        attempt="a1",
        shape=shape,
        first_offset=0,
        next_offset=1,
        written=(part,),
        rewritten=(),
        proof=proof,
    )
    commit_table = SqlCatalog.commit_table

    def commit_and_forget(*arguments: Any) -> None:
        commit_table(*arguments)
        raise CommitStateUnknownException("no answer")

    monkeypatch.setattr(SqlCatalog, "commit_table", commit_and_forget)
    target.commit(step)
    monkeypatch.undo()
    state = target.begin()
    assert state is not None
    assert state.next_offset == 1
    assert list(target.files()) == [key]
    assert target.place.reading(key).size() == size
