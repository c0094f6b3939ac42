"""`tidelog pipeline replay --engine`: the log of an engine once more, into another engine or into a topic."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import SparkSession
from tests.engine.compacting import compact_by_hand
from tests.engine.engines import open_local
from tests.engine.stations import KEYS, EngineNode, new_store
from tests.pipeline.engines.engine_places import EngineHome, run_here
from tests.pipeline.engines.in_memory import place_of

import tidelog
from tidelog.cli.app import run
from tidelog.cold.catalog import Catalog
from tidelog.engine.cold.gc import drop_wal
from tidelog.engine.entry import Batch, CreateBucket, PutObject, Result
from tidelog.engine.sst.snapshot import StoredState
from tidelog.engine.txn.read_set import decode_entry, encode_entry
from tidelog.engine.wal.operations import decode_operation
from tidelog.engine.wal.replay import counting, records_of
from tidelog.errors import InputError, NotSupportedError
from tidelog.pipeline.address import OpenedEngine, find_root
from tidelog.pipeline.jobs.engine import replay_entries
from tidelog.pipeline.jobs.engine.replay import SEQ_HEADER, ReplaySource, replay_engine, replay_engine_to_topic
from tidelog.pipeline.jobs.engine.replay_entries import (
    EntriesWork,
    bucket_histories,
    decode_entries,
    entry_batches,
    entry_of,
    state_pieces,
    versions_of,
)
from tidelog.pipeline.jobs.replay_topic import ReplaySteps
from tidelog.pipeline.source import object_batches as object_values
from tidelog.pipeline.source.engine_options import parse_entry_options
from tidelog.pipeline.source.entries import EntryLog
from tidelog.pipeline.source.entry_batches import LogPart
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.store.urls import open_store

TOPIC = "copies/entries"
NOWHERE = "'nowhere'/'k' was changed: its version of seq 1 was read, and is no longer true"


@pytest.fixture(autouse=True)
def readers_of_this_test() -> None:
    """All stores in memory have one address: what was opened for another test is not this one's."""
    object_values._reader.cache_clear()


def opened(node: EngineNode) -> OpenedEngine:
    """What a node has in its store, as a job opens it."""
    metadata = BucketMetadataStore(node.objects)
    return OpenedEngine(node.objects, metadata, Catalog(metadata, KEYS), KEYS, node.view.manifest)


@pytest.mark.parametrize("seed", ["a", "b", "c"])
def test_decoded_entries_make_the_same_engine(tmp_path: Path, seed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that cut batches in two, rolled back and refused entries: applied again they give every state."""
    node = EngineNode(new_store(), name=seed).open()
    for _ in range(3):
        node.apply(60)
        node.apply_refused()
        node.roll_back(sorted(node.model.states)[-7])
        node.apply(10)
        node.apply_refused()
        node.ship_all()
    monkeypatch.setattr("tidelog.pipeline.jobs.engine.replay._PART_BYTES", 3000)
    source = ReplaySource(None, opened(node), place_of(node.objects), None)  # type: ignore[arg-type]
    parts = source.parts(1, 0)
    assert len(parts) > 10
    works = [EntriesWork(number=number, part=part) for number, part in enumerate(parts)]
    pairs = [pair for found in run_here(None, decode_entries, works) for pair in found.pairs()]
    assert [seq for seq, _ in pairs] == sorted({seq for seq, _ in pairs})
    with open_local(tmp_path / "copy") as copy:
        results = copy.apply_many([(seq, decode_entry(value)) for seq, value in pairs])
        assert copy.applied_seq == node.engine.applied_seq
        assert results[-1] == Result(copy.applied_seq, "refused", NOWHERE)
        for seq in sorted(node.model.states)[::6]:
            assert copy.digest(seq) == node.model.digest(seq)


@pytest.mark.parametrize(("records", "most_bytes"), [(1 << 16, 4 << 20), (2, 4 << 20), (1 << 16, 1)])
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_entries_do_not_depend_on_how_the_log_is_divided(
    monkeypatch: pytest.MonkeyPatch, compression: str, records: int, most_bytes: int
) -> None:
    """Plain ones and others in turn, batches that go on in the next object: those of one record after the other."""
    monkeypatch.setattr(replay_entries, "_RECORDS_AT_ONCE", records)
    monkeypatch.setattr(replay_entries, "_ENCODED_BYTES", most_bytes)
    with EngineNode(new_store(), name="divided", rotate_max_bytes=4096, wal_compression=compression).open() as node:
        puts = [PutObject("b", f"key-{number}", bytes(900)) for number in range(9)]
        node.apply_these([(1, CreateBucket("b")), (2, Batch(puts)), (3, PutObject("b", "last", b""))])
        for _ in range(2):
            node.apply(60)
            node.apply_refused()
            node.roll_back(sorted(node.model.states)[-7])
        node.ship_all()
        source = ReplaySource(None, opened(node), place_of(node.objects), None)  # type: ignore[arg-type]
        whole, *_ = source.parts(1, 0)
        wanted = _one_by_one(msgspec.structs.replace(whole, stop_lsn=whole.end_lsn, descriptors=()))
        for part_bytes in (1, 3000, 1 << 30):
            monkeypatch.setattr("tidelog.pipeline.jobs.engine.replay._PART_BYTES", part_bytes)
            batches = [batch for part in source.parts(1, 0) for batch in entry_batches(part)]
            found = [tuple(row.values()) for batch in batches for row in batch.to_pylist()]
            assert found == wanted
        assert sum(decode_entry(value) != decode_entry(wanted[0][2]) for *_, value in wanted) > 60


def _one_by_one(part: LogPart) -> list[tuple[int, int, bytes]]:
    """The entries of a part by the decoder of records and the encoder of entries alone."""
    found, gathered = [], []
    for frames, indexes in counting(part.log(), part):
        for lsn, record in records_of(frames, indexes):
            one = decode_operation(bytes(record), lsn)
            gathered.append(replay_entries._operation(one, lsn, part.place))
            if one.is_last:
                found.append((one.transaction, one.time_us, encode_entry(replay_entries._entry(one, gathered))))
                gathered = []
    return found


LARGE = 1 << 63


def large_node() -> EngineNode:
    """An engine whose seqs are not numbers of Spark."""
    node = EngineNode(new_store()).open()
    node.apply_these([(LARGE - 1, CreateBucket("b")), *((LARGE + n, PutObject("b", f"{n}", b"v")) for n in range(9))])
    node.ship_all()
    return node


def test_large_seqs_are_replayed_from_the_log(tmp_path: Path) -> None:
    """They are no rows of Spark there: the copy is the same."""
    node = large_node()
    source = ReplaySource(None, opened(node), place_of(node.objects), LARGE + 5)  # type: ignore[arg-type]
    works = [EntriesWork(number=0, part=part) for part in source.parts(1, 0)]
    pairs = [pair for found in run_here(None, decode_entries, works) for pair in found.pairs()]
    with open_local(tmp_path / "copy") as copy:
        copy.apply_many([(seq, decode_entry(value)) for seq, value in pairs])
        assert (copy.applied_seq, copy.digest()) == (LARGE + 5, node.model.digest(LARGE + 5))


def test_large_seqs_are_refused_by_name_where_spark_has_them(tmp_path: Path) -> None:
    """From a state, and into a topic, which is not made; it was an error of a worker that named a column."""
    node = large_node()
    node.engine.create_checkpoint()
    found = opened(node)
    source = ReplaySource(None, found, place_of(node.objects), None)  # type: ignore[arg-type]
    with pytest.raises(NotSupportedError, match="Spark's largest number is 9223372036854775807"):
        source.state_entries(found.manifest.checkpoints[-1], 0)
    with pytest.raises(NotSupportedError, match="2\\*\\*63"):
        source.log_entries(source.parts(1))
    home = EngineHome(tmp_path)
    with home.open() as engine:
        engine.apply(LARGE, CreateBucket("b"))
        engine.update_low_water_mark(LARGE)
        engine.ship()
    with tidelog.open(tmp_path / "topics") as log:
        with pytest.raises(NotSupportedError):
            replay_engine_to_topic(None, home.root, find_root(tmp_path / "topics"), TOPIC)  # type: ignore[arg-type]
        assert not log.has_topic(TOPIC)


def test_a_log_that_comes_to_large_seqs_is_refused(tmp_path: Path) -> None:
    """A stream that began below reads on: its rows would have had negative seqs."""
    home = EngineHome(tmp_path)
    with home.open() as engine:
        home.feed(engine, 5)
        with EntryLog(parse_entry_options({"root": home.url})) as log:
            assert log.manifest().high_water_mark == home.seq
            engine.apply(LARGE, CreateBucket("large"))
            engine.update_low_water_mark(LARGE)
            engine.ship()
            with pytest.raises(NotSupportedError, match="Give entries seqs below"):
                log.manifest()


@pytest.mark.parametrize("keeps_all", [True, False])
@pytest.mark.parametrize("seed", ["a", "b", "c", "d"])
def test_versions_of_a_state_make_the_same_engine(tmp_path: Path, seed: str, keeps_all: bool) -> None:
    """Buckets made and deleted within one batch, copies and deletions: from the versions alone, every state."""
    node = EngineNode(new_store(), name=seed).open()
    node.apply(250)
    node.ship_all()
    start = 0 if keeps_all else sorted(node.model.states)[150]
    compact_by_hand(node.objects, keep_from=start)
    place = place_of(node.objects)
    listed = node.view.manifest.checkpoints[-1]
    pieces = state_pieces(node.objects, place, StoredState(node.objects, listed), 0, listed.seq)
    histories = bucket_histories(pieces)
    versions = sorted(version for piece in pieces for version in versions_of(piece))
    with open_local(tmp_path / "copy") as copy:
        for seq, group in groupby(versions, key=lambda one: one[0]):
            operations = [(order, decode_entry(value)) for _, order, value in group]
            entry = entry_of(seq, operations, histories)  # type: ignore[arg-type]
            if entry is not None:
                assert copy.apply(seq, entry).status != "refused"
        for seq in sorted(node.model.states)[::5]:
            if seq >= start:
                assert copy.digest(min(seq, copy.applied_seq)) == node.model.digest(seq)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> EngineHome:
    """An engine with entries of all kinds, shipped."""
    home = EngineHome(tmp_path_factory.mktemp("replayed"), local_retention_bytes=0)
    with home.open() as engine:
        for _ in range(4):
            home.feed(engine, 50)
        home.feed_refused(engine)
    return home


def digests(home: EngineHome, seqs: list[int]) -> list[str]:
    """Those of the original."""
    with home.open() as engine:
        return [engine.digest(seq) for seq in seqs]


def test_a_copy_is_made_and_led_on(spark: SparkSession, home: EngineHome, tmp_path: Path) -> None:
    """Up to a seq, then further, then nothing more; the digests are those of the original, and itself is refused."""
    middle = home.seq // 2
    first = replay_engine(spark, home.root, tmp_path / "copy", until_seq=middle)
    assert first.is_good
    assert first.seq == middle
    second = replay_engine(spark, home.root, tmp_path / "copy")
    assert second.is_good
    assert second.first_seq > 1
    assert second.refused > 0
    wanted = digests(home, [middle, home.seq])
    with tidelog.open_engine(tmp_path / "copy") as copy:
        assert [copy.digest(middle), copy.digest()] == wanted
        assert copy.applied_seq == copy.low_water_mark == home.seq
    with pytest.raises(InputError, match="is at seq"):
        replay_engine(spark, home.root, tmp_path / "copy", until_seq=middle)
    with pytest.raises(InputError, match="into itself"):
        replay_engine(spark, home.root, home.directory)
    with pytest.raises(InputError, match="cannot be reached"):
        replay_engine(spark, home.root, tmp_path / "other", until_seq=10**9)


class _Killed(BaseException):
    """The process is gone."""


def die(*_: object) -> None:
    """Kills the process."""
    raise _Killed


def test_a_topic_drives_an_engine_to_the_same_state(
    spark: SparkSession, home: EngineHome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offsets are seqs minus one, places without an entry are filled, and nothing is written twice after a kill."""
    root = find_root(tmp_path / "topics")
    with tidelog.open(tmp_path / "topics"):
        pass
    middle = home.seq // 2
    with monkeypatch.context() as patched:
        patched.setattr(ReplaySteps, "_finish", die)
        with pytest.raises(_Killed):
            replay_engine_to_topic(spark, home.root, root, TOPIC, step_bytes=45_000)
    first = replay_engine_to_topic(spark, home.root, root, TOPIC, until_seq=middle, step_bytes=45_000)
    assert first.is_good
    done = replay_engine_to_topic(spark, home.root, root, TOPIC, step_bytes=45_000)
    assert done.is_good
    assert first.steps + done.steps > 1
    assert done.target_next_offset == home.seq
    with tidelog.open(tmp_path / "topics") as log:
        topic = log.topic(TOPIC)
        assert topic.next_offset == home.seq
        with tidelog.open_engine(tmp_path / "follower", orchestrator=tidelog.TopicOrchestrator(topic)) as engine:
            assert [engine.digest(middle), engine.digest()] == digests(home, [middle, home.seq])


def test_a_log_without_its_beginning_begins_with_a_state(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a compaction and the log's deletion, both ways, as commands: into an engine, and with seqs in headers."""
    home = EngineHome(tmp_path, seed="late", local_retention_bytes=0)
    with home.open() as engine:
        home.feed(engine, 150)
        compact_by_hand(open_store(home.url))
        home.feed(engine, 60)
    with home.root.open(read_only=False) as store:
        drop_wal(store.objects, store.metadata, store.keys, store.manifest.high_water_lsn)
    command = ["--json", "pipeline", "replay", "--engine", home.url]
    assert run([*command, "--to-engine", str(tmp_path / "copy")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["state_seq"] > 0
    seqs = [home.seq // 3, home.seq]
    with tidelog.open_engine(tmp_path / "copy") as copy:
        assert [copy.digest(seqs[0]), copy.digest()] == digests(home, seqs)
    with tidelog.open(tmp_path / "topics"):
        pass
    assert run([*command, "--to", TOPIC, "--root", str(tmp_path / "topics"), "--seqs", "header"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert any(SEQ_HEADER in note for note in told["notes"])
    with tidelog.open(tmp_path / "topics") as log, tidelog.open_engine(tmp_path / "second") as copy:
        messages = list(log.topic(TOPIC).read())
        copy.apply_many([(int(one.headers[SEQ_HEADER]), decode_entry(one.value or b"")) for one in messages])
        assert [copy.digest(seqs[0]), copy.digest()] == digests(home, seqs)


def test_options_that_do_not_go_together_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Topics and engines do not mix, and it must be said where an engine's log is to go."""
    engine = ["--engine", tmp_path.as_uri()]
    assert run(["pipeline", "replay", "shop/a", *engine, "--to-engine", "x"]) == 2
    assert run(["pipeline", "replay", *engine]) == 2
    assert run(["pipeline", "replay", *engine, "--to-engine", "x", "--to", "a/b"]) == 2
    assert run(["pipeline", "replay", "shop/a", "shop/b", "--until-seq", "5"]) == 2
    assert run(["pipeline", "replay", "shop/a"]) == 2
    assert run(["pipeline", "replay", "shop/a", "shop/b", "--to", "soon"]) == 2
    told = capsys.readouterr().err
    for text in ("SOURCE is for topics", "the target is missing", "Give one of them", "--until-seq is for engines"):
        assert text in told
    assert "TARGET is missing" in told
    assert "not an offset" in told
