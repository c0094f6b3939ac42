"""Change data of an engine in Spark: every change with what was there before, held to the engine itself."""

from __future__ import annotations

import pytest
from pyspark.sql import Row, SparkSession

import tidelog
from tidelog.engine.entry import Entry
from tidelog.errors import InputError
from tidelog.pipeline import change_data, find_engine
from tidelog.pipeline.address import EngineRoot

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
