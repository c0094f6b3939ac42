"""`tidelog_objects` without Spark: what the driver plans and what tasks read, held against the engine itself."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import StructType
from tests.engine.engines import RandomEntries
from tests.pipeline.engines.histories import History

import tidelog
from tidelog.engine.engine import Engine
from tidelog.engine.entry import Batch, CreateBucket, Entry, PutObject
from tidelog.engine.txn.read_set import Guarded, ObjectRead
from tidelog.errors import CorruptionError, DataError, InputError, NotFoundError, NotSupportedError
from tidelog.pipeline.address import find_engine
from tidelog.pipeline.source import log_changes
from tidelog.pipeline.source import objects as objects_source
from tidelog.pipeline.source.entries import EntriesDataSource
from tidelog.pipeline.source.entry_batches import LogPart, as_text, plan_log
from tidelog.pipeline.source.objects import ObjectsDataSource


def rows_of(root: object, **options: object) -> list[dict[str, Any]]:
    """All rows, in the order of the parts; read as tasks do."""
    given = {"root": str(root), **{name: str(value) for name, value in options.items()}}
    source = ObjectsDataSource(given)
    reader = source.reader(source.schema())
    batches: list[Any] = [batch for partition in reader.partitions() for batch in reader.read(partition)]
    for batch in batches:
        batch.validate(full=True)
    return [row for batch in batches for row in batch.to_pylist()]


def objects_of(root: object, **options: object) -> list[tuple[Any, ...]]:
    """Objects with data and metadata, as `History.objects_at` has them."""
    rows = rows_of(root, withData="true", withMetadata="true", **options)
    return [(row["bucket"], row["key"], row["seq"], row["data"], row["metadata"]) for row in rows]


def expected(history: History, seq: int) -> list[tuple[Any, ...]]:
    """What the model has, with metadata as Spark has it."""
    return [
        (*one[:4], [(name, as_text(value)) for name, value in sorted(one[4].items())])
        for one in history.objects_at(seq)
    ]


def assert_same(history: History, seqs: list[int], **options: object) -> None:
    """At each of these seqs all objects are there, with what is in them."""
    for seq in seqs:
        assert objects_of(history.store, seq=seq, **options) == expected(history, seq)


def engine_versions(engine: Engine) -> list[tuple[Any, ...]]:
    """All versions of all objects that the engine knows of."""
    keys = {(bucket, key) for bucket in ("bucket-0", "bucket-1", "bucket-2") for key in _keys()}
    found: list[tuple[Any, ...]] = []
    for bucket, key in sorted(keys):
        try:
            versions = engine.versions(bucket, key)
        except NotFoundError:
            continue
        found += [(bucket, key, one.seq, None if one.is_deleted else one.size, one.is_deleted) for one in versions]
    return found


def _keys() -> list[str]:
    return [f"key/{number}" if number % 3 else f"key-{'long' * 60}-{number}" for number in range(12)]


def known_seqs(history: History, last: int) -> list[int]:
    """Some seqs of the past, the oldest and the newest among them."""
    seqs = [seq for seq in sorted(history.model.states) if seq <= last]
    return [*seqs[:: max(1, len(seqs) // 5)], last]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("settings", [{}, {"wal_compression": "zstd", "inline_value_bytes": 200}])
def test_objects_are_those_of_the_engine(tmp_path: Path, seed: int, settings: dict[str, Any]) -> None:
    """Random histories: from the log alone, from a state, from a state and the log behind it; before a compaction and
    after it, with the raw log gone, and with more log behind it."""
    history = History(tmp_path, seed, **settings)
    with history.open() as engine:
        history.grow(engine, 45)
        assert_same(history, known_seqs(history, engine.applied_seq), minPartitions=3)
        engine.create_checkpoint()
        engine.ship()
        assert_same(history, known_seqs(history, engine.applied_seq)[::3])
        history.grow(engine, 45)
        assert_same(history, known_seqs(history, engine.applied_seq), minPartitions=5, maxRowsPerBatch=4)
        versions = rows_of(history.store, versions="true")
        found = [(*list(row.values())[:3], row["size"], row["is_deleted"]) for row in versions]
        assert found == engine_versions(engine)


class _Conditions:
    """Entries that meet each other, many of them guarded or with a condition; what becomes of them the engine says."""

    def __init__(self, seed: int) -> None:
        self._choose = random.Random(seed)
        self._plain = RandomEntries(seed)

    def buckets(self, engine: Engine) -> list[tuple[int, Entry | Guarded]]:
        """All of them, so that there is something to be refused for other reasons."""
        return [(engine.applied_seq + number, CreateBucket(f"bucket-{number - 1}")) for number in (1, 2, 3)]

    def entries(self, engine: Engine, count: int) -> list[tuple[int, Entry | Guarded]]:
        first = engine.applied_seq + 1
        return [(first + number, self._entry(engine.applied_seq)) for number in range(count)]

    def _entry(self, applied_seq: int) -> Entry | Guarded:
        choose, entry = self._choose, self._plain.entry()
        seen = choose.randint(0, applied_seq) if choose.random() < 0.5 else 0
        key = choose.choice(_keys())
        match choose.randrange(4):
            case 0:
                batch = entry if isinstance(entry, Batch) else Batch([entry])
                return Guarded(batch, (ObjectRead("bucket-1", key, seen),))
            case 1:
                return PutObject("bucket-0", key, choose.randbytes(60), if_absent=True)
            case 2:
                return PutObject("bucket-1", key, b"matched", if_match=max(1, seen))
            case _:
                return entry


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("part_bytes", [500, 20_000])
def test_log_behind_a_state_is_read_in_parts_as_the_engine_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, part_bytes: int
) -> None:
    """Guards and conditions, refused entries, rollbacks, deleted buckets, and what retention removed, all in the log
    alone: at every seq the objects are those that the engine lists, and so are all versions."""
    monkeypatch.setattr(objects_source, "_TAIL_PART_BYTES", part_bytes)
    monkeypatch.setattr(log_changes, "_UNSETTLED_BYTES", 4_000)
    source = _Conditions(seed)
    history, start_seq = History(tmp_path, seed, compaction_enabled=False), 0
    with history.open() as engine:
        for turn in range(4):
            engine.apply_many(source.buckets(engine))
            results = engine.apply_many(source.entries(engine, 40))
            assert {"applied", "refused"} <= {one.status for one in results}
            if turn % 2:
                engine.rollback_to(engine.applied_seq - 11)
                engine.apply_many(source.entries(engine, 5))
            if turn == 2:  # the entries of the next turn have its records shipped
                start_seq = engine.collect_garbage(horizon=engine.low_water_mark).history_start_seq
            engine.update_low_water_mark(engine.applied_seq)
            engine.ship()
            if turn == 0:
                engine.create_checkpoint()
                engine.ship()
        parts = _parts_of_tail(history.store)
        assert len(parts) > (8 if part_bytes == 500 else 1)
        for seq in range(start_seq, engine.applied_seq + 1, 7):
            assert listed(rows_of(history.store, seq=seq)) == _listed_by(engine, seq)
        versions = rows_of(history.store, versions="true")
        found = [(*list(row.values())[:3], row["size"], row["is_deleted"]) for row in versions]
        assert found == engine_versions(engine)


def _parts_of_tail(store: str) -> list[LogPart]:
    """What the tail is cut into."""
    root = find_engine(store)
    with root.open() as opened:
        base = objects_source.find_base(opened, opened.manifest)
        assert base.lsn > 1
        part_bytes = objects_source._TAIL_PART_BYTES
        return plan_log(opened.catalog, root.place, opened.manifest, base.lsn, part_bytes=part_bytes)


def listed(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(row["bucket"], row["key"], row["seq"], row["size"]) for row in rows]


def _listed_by(engine: Engine, seq: int) -> list[tuple[Any, ...]]:
    """What the engine itself lists at a seq."""
    return [
        (bucket, one.key, one.seq, one.size)
        for bucket in engine.list_buckets(seq)
        for one in engine.list_objects(bucket, seq=seq)
    ]


@pytest.mark.parametrize("seed", range(2))
def test_objects_survive_compaction(tmp_path: Path, seed: int) -> None:
    """With the raw log gone, and with more log behind the compaction, every state is as it was."""
    history = History(tmp_path, seed)
    with history.open() as engine:
        history.grow(engine, 60)
        before = rows_of(history.store, versions="true")
        assert_same(history, [engine.applied_seq])  # a reader that knows where values were must look again
        assert history.compact() > 1
        assert rows_of(history.store, versions="true") == before
        assert_same(history, known_seqs(history, engine.applied_seq), minPartitions=2)
        history.grow(engine, 45)
        assert_same(history, known_seqs(history, engine.applied_seq), minPartitions=4)


def test_a_bucket_and_a_prefix_choose_keys(tmp_path: Path) -> None:
    """The same as by filtering; a bucket that is not there is named."""
    history = History(tmp_path, "prefix")
    with history.open() as engine:
        history.grow(engine, 60, rolls_back=False)
        engine.create_checkpoint()
        engine.ship()
        bucket = engine.list_buckets()[0]
    everything = rows_of(history.store)
    assert rows_of(history.store, bucket=bucket) == [row for row in everything if row["bucket"] == bucket]
    found = rows_of(history.store, bucket=bucket, prefix="key/1")
    assert found == [row for row in everything if row["bucket"] == bucket and row["key"].startswith("key/1")]
    with pytest.raises(NotFoundError, match="no bucket 'nobody'"):
        rows_of(history.store, bucket="nobody")


def test_columns_are_those_that_are_asked_for(tmp_path: Path) -> None:
    """Values only when asked; checksums are those of the values."""
    history = History(tmp_path, "columns")
    with history.open() as engine:
        history.grow(engine, 30)
    assert list(rows_of(history.store)[0]) == ["bucket", "key", "seq", "order", "size", "crc"]
    assert "is_deleted" in rows_of(history.store, versions="true")[0]
    assert list(rows_of(history.store, columns="data,key")[0]) == ["data", "key"]
    assert "metadata" not in rows_of(history.store, withData="true")[0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prefix": "a"}, "Name the bucket too"),
        ({"seq": "-1"}, "a number of 0 or more"),
        ({"seq": "99999"}, "seq 99999 was asked for"),
        ({"withdate": "true"}, "Did you mean withData"),
        ({"columns": "value"}, "no column value"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, options: dict[str, str], says: str) -> None:
    """A slip is an error that says what would be right."""
    with tidelog.open_engine(tmp_path / "e", store=f"file://{tmp_path}/s") as engine:
        engine.apply(1, tidelog.CreateBucket("b"))
        engine.update_low_water_mark(1)
        engine.ship()
    with pytest.raises(InputError, match=says):
        rows_of(tmp_path / "e", **options)


def test_what_an_engine_has_not_is_said_with_what_it_has() -> None:
    """There is no stream of objects, and nothing is written from Spark."""
    objects, entries = ObjectsDataSource({}), EntriesDataSource({})
    with pytest.raises(NotSupportedError, match="tidelog_entries"):
        objects.streamReader(StructType()).initialOffset()
    for source in (objects, entries):
        with pytest.raises(NotSupportedError, match="read only"):
            source.writer(StructType(), overwrite=False)
        with pytest.raises(NotSupportedError, match="read only"):
            source.streamWriter(StructType(), overwrite=False)


def test_states_that_are_no_longer_kept_are_refused(tmp_path: Path) -> None:
    """What retention has removed cannot be told from what never was, so a seq before it is an error that says so."""
    history = History(tmp_path, "kept")
    with history.open() as engine:
        history.grow(engine, 60, rolls_back=False)
        horizon = engine.applied_seq - 10
        engine.collect_garbage(horizon=horizon)
        engine.create_checkpoint()
        engine.update_low_water_mark(engine.applied_seq)
        engine.ship()
        assert_same(history, [horizon, engine.applied_seq])
        with pytest.raises(NotFoundError, match=f"states before seq {horizon} are no longer kept"):
            rows_of(history.store, seq=horizon - 1)


def test_a_state_that_is_read_can_be_pinned(tmp_path: Path) -> None:
    """For as long as the options say nobody deletes it; without the option nothing is written."""
    history = History(tmp_path, "pinned")
    with history.open() as engine:
        history.grow(engine, 30)
        engine.create_checkpoint()
        engine.ship()
    rows = rows_of(history.store)
    with find_engine(history.store).open() as opened:
        assert opened.manifest.pins == ()
    assert rows_of(history.store, pinSeconds=60) == rows
    with find_engine(history.store).open() as opened:
        assert [pin.key for pin in opened.manifest.pins] == [opened.manifest.checkpoints[-1].key]


def test_a_long_tail_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """The driver holds what the log behind the newest state changed, up to a limit."""
    history = History(tmp_path, "tail")
    with history.open() as engine:
        history.grow(engine, 60)
        with pytest.raises(NotSupportedError, match="pipeline checkpoint"):
            rows_of(history.store, maxTailBytes=1000)
        engine.create_checkpoint()
        engine.ship()
        assert rows_of(history.store, maxTailBytes=1000)


def test_damage_is_named(tmp_path: Path) -> None:
    """A flipped bit in a block of a state is found by its reader; a damaged document leads to the state before."""
    history = History(tmp_path, "damaged")
    with history.open() as engine:
        history.grow(engine, 45)
        engine.create_checkpoint()
        engine.ship()
        last = engine.applied_seq
    folder = tmp_path / "store" / "storage" / "engine" / "main" / "checkpoints"
    (file,), (state,) = folder.glob("*.trow"), folder.glob("*.tckp")
    good = file.read_bytes()
    file.write_bytes(good[:40] + bytes([good[40] ^ 4]) + good[41:])
    with pytest.raises(CorruptionError, match="checksum"):
        rows_of(history.store)
    state.write_bytes(state.read_bytes()[:-20] + b"\0" * 20)
    assert_same(history, [last])


def test_a_state_that_went_while_it_was_read_is_told(tmp_path: Path) -> None:
    """The error says what to do; a compaction serves where no state can be used."""
    history = History(tmp_path, "went")
    with history.open() as engine:
        history.grow(engine, 45)
        last = engine.applied_seq
    history.compact()
    states = tmp_path / "store" / "storage" / "engine" / "main" / "checkpoints"
    for path in states.glob("*"):
        path.unlink()
    assert_same(history, [last])
    source = ObjectsDataSource({"root": history.store})
    reader = source.reader(source.schema())
    partitions = reader.partitions()
    for path in (states.parent / "index").glob("versions-*"):
        path.unlink()
    with pytest.raises(NotFoundError, match="pinSeconds"):
        [list(reader.read(one)) for one in partitions]


def test_a_value_that_is_damaged_is_not_handed_out(tmp_path: Path) -> None:
    """Rows come from the state and are right; whoever wants the values is told which one is not."""
    with tidelog.open_engine(tmp_path / "e", store=f"file://{tmp_path}/s") as engine:
        engine.apply_many([(1, tidelog.CreateBucket("b")), (2, tidelog.PutObject("b", "k", b"x" * 500))])
        engine.update_low_water_mark(2)
        engine.create_checkpoint()
        engine.ship()
    (path,) = (tmp_path / "s" / "storage" / "engine" / "main" / "objects").glob("*")
    path.write_bytes(path.read_bytes().replace(b"x" * 500, b"x" * 499 + b"y"))
    assert [row["size"] for row in rows_of(tmp_path / "e", bucket="b")] == [500]
    with pytest.raises(DataError, match="checksum"):
        rows_of(tmp_path / "e", withData="true")
