"""A compaction of an engine: what can be read from it, what stays of it the next time, and that its bytes depend on the
engine alone. Without Spark, but for the last tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.engine.compacting import compact_by_hand, value_at
from tests.engine.stations import KEYS, EngineNode, new_store, successor
from tests.pipeline.engines.jobs_here import compact, copy_of, data_of, keys_of, new_files, root_of, write_state

import tidelog
from tidelog.cli.main import main
from tidelog.engine.cold.gc import drop_wal
from tidelog.engine.cold.manifest import move_history_start
from tidelog.engine.entry import Batch, CopyObject, CreateBucket, DeleteBucket, DeleteObject, Entry, PutObject
from tidelog.engine.mvcc.cells import decode_cell, is_pointer, object_prefix, seq_of
from tidelog.engine.sst.blob_file import BlobPointer, FilePointer, check_blob_file, decode_version
from tidelog.engine.sst.snapshot import StoredState
from tidelog.engine.sst.sorted_index import SortedIndex
from tidelog.engine.sst.sstable import SSTable
from tidelog.engine.wal.value import decode_value
from tidelog.errors import CorruptionError, DataError, InputError
from tidelog.pipeline.address import find_engine
from tidelog.pipeline.jobs.engine.compact import CompactEngineOptions, compact_engine
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.store.settings import StoreSettings
from tidelog.store.urls import open_store


def rows_in(data: SortedIndex, node: EngineNode) -> dict[bytes, bytes]:
    """The cells of the version index; every value that one of them points to is read and checked on the way."""
    found: dict[bytes, bytes] = {}
    for part in data.compaction.versions:
        for key, value in SSTable(node.objects, part, kind="versions").rows():
            found[key], place = decode_version(value)
            assert (place is not None) == (is_pointer(found[key]) and key.startswith(b"o"))
            if place is not None:
                cell = decode_cell(found[key])
                decode_value(value_at(node.objects, data, place), place.codec, cell.size, cell.crc, cell.lsn)
                assert data.find_value(cell.position) == place
    return found


def assert_complete(node: EngineNode) -> None:
    """The compaction has exactly the rows of the engine's tree, and every value."""
    data = data_of(node)
    assert rows_in(data, node) == dict(node.core.tree.scan())
    for blob_file in data.compaction.blob_files:
        assert len(check_blob_file(node.objects.get(blob_file.key).data)) == blob_file.values


@pytest.mark.parametrize("seed", range(3))
def test_everything_is_in_it(seed: int) -> None:
    """Rows and values of a random history, rollbacks included, compacted three times; a restore from it is the same."""
    with EngineNode(new_store(), name=f"compact-{seed}").open() as node:
        for turn in range(3):
            node.apply(90)
            node.ship_all()
            if turn:
                kept = node.engine.applied_seq
                node.apply(20)
                node.roll_back(kept)
                node.apply(3)
                node.ship_all()
            report = compact(node.objects)
            assert (report.is_good, report.is_new, report.generation) == (True, True, turn + 1)
            assert report.digest == node.engine.digest()
            assert_complete(node)
            assert report.versions == len(dict(node.core.tree.scan()))
        seq = root_of(node).seq
        assert node.view.manifest.checkpoints[-1].seq == seq
        other = successor(node)
        node.crash()
        assert other.restore().state_seq == seq
        with other.open():
            other.assert_same([seq // 2])


def test_bytes_depend_on_the_engine_alone() -> None:
    """However many tasks there are, and whatever state it begins with: the same files, byte by byte."""
    with EngineNode(new_store(), name="same").open() as node:
        node.apply(100)
        node.ship_all()
        with_state = node.objects
        copies = [copy_of(with_state) for _ in range(2)]
        node.engine.create_checkpoint()
        copies.append(copy_of(with_state))
        for objects, tasks in zip(copies, (1, 5, 2), strict=True):
            assert compact(objects, tasks=tasks).is_good
        written = [new_files(objects, with_state) for objects in copies]
        files = [{key: data for key, data in one.items() if not key.endswith(".tckp")} for one in written]
        assert files[0] == files[1] == files[2]
        assert written[0] == written[1]


def test_it_is_what_is_made_by_hand() -> None:
    """The same places hold the same values as in a compaction that is made without any tasks."""
    with EngineNode(new_store(), name="hand").open() as node:
        node.apply(120)
        node.ship_all()
        by_hand = copy_of(node.objects)
        compact_by_hand(by_hand, large_bytes=1500)
        compact(node.objects)
        ours = {key: node.objects.get(key).data for key in keys_of(node.objects) if "/data/" in key}
        theirs = {key: by_hand.get(key).data for key in keys_of(by_hand) if "/data/" in key}
        assert ours == theirs


def test_large_values_have_a_name() -> None:
    """A large value is a file by the name of the put that wrote it; a copy leads to the same file."""
    with EngineNode(new_store()).open() as node:
        large, small = bytes(range(256)) * 10, bytes(600)
        node.apply_these(
            [
                (1, CreateBucket("photos")),
                (2, PutObject("photos", "2024/a b.jpg", large)),
                (3, CopyObject("photos", "2024/a b.jpg", "photos", "copy")),
                (4, PutObject("photos", "small", small)),
            ]
        )
        node.ship_all()
        compact(node.objects)
        data = data_of(node)
        original = data.find_version(object_prefix("photos", "2024/a b.jpg"), 4)
        copy = data.find_version(object_prefix("photos", "copy"), 4)
        packed = data.find_version(object_prefix("photos", "small"), 4)
        assert original is not None
        assert isinstance(original.place, FilePointer)
        assert original.place.name == "photos/2024_2fa_20b.jpg/v0000000002.dat"
        assert copy is not None
        assert copy.place == original.place
        assert packed is not None
        assert isinstance(packed.place, BlobPointer)
        assert value_at(node.objects, data, original.place)[4:] == large
        assert root_of(node).data_files == 1


def test_two_values_never_share_a_name() -> None:
    """A batch puts a key twice and copies what was there in between: both large values stay what they are."""
    with EngineNode(new_store()).open() as node:
        first, second = bytes(3000), bytes([1]) * 3000
        batch = Batch([PutObject("b", "k", first), CopyObject("b", "k", "b", "other"), PutObject("b", "k", second)])
        node.apply_these([(1, CreateBucket("b")), (2, batch)])
        node.ship_all()
        compact(node.objects)
        assert_complete(node)
        assert root_of(node).data_files == 2


def test_a_name_that_is_too_long_goes_into_a_pack() -> None:
    """A large value whose file could not be named is packed, and stays there."""
    with EngineNode(new_store()).open() as node:
        node.apply_these([(1, CreateBucket("b")), (2, PutObject("b", "ä" * 100, bytes(5000)))])
        node.ship_all()
        for _ in range(2):
            compact(node.objects)
            assert_complete(node)
            assert root_of(node).data_files == 0
            node.apply(5)
            node.ship_all()


@pytest.mark.parametrize("has_log", [True, False])
def test_scan_in_key_order_takes_a_request_for_many_small_values(has_log: bool) -> None:
    """Values were put in any order; after the compaction those of neighbours come together, though the log may still
    have them.
    """
    count = 3000
    with EngineNode(new_store(), local_retention_bytes=0, inline_value_bytes=0, cold_cache_bytes=0).open() as node:
        keys = [f"key-{number * 1237 % count:06d}" for number in range(count)]
        puts: list[tuple[int, Entry]] = [
            (seq, PutObject("b", key, key.encode() * 30)) for seq, key in enumerate(keys, 2)
        ]
        node.apply_these([(1, CreateBucket("b")), *puts[: count // 2]])
        node.ship_all()
        compact(node.objects, blob_file_bytes=1 << 20, rows_per_file=100_000)
        node.apply_these(puts[count // 2 :])
        node.ship_all()
        node.engine.create_checkpoint()
        compact(node.objects, blob_file_bytes=1 << 20, rows_per_file=100_000)
        node.apply_these([(count + 10, PutObject("b", "zz", b"z" * 1000))])  # the newest file of the log stays here
        node.core.wal.seal()
        node.ship_all()
        if not has_log:
            drop_wal(node.objects, BucketMetadataStore(node.objects), KEYS, 1 << 60)
        before = node.shipping.reader.statistics()
        for reverse in (False, True):
            found = [(one.key, one.data) for one in node.engine.scan("b", end="z", with_values=True, reverse=reverse)]
            assert found == [(key, key.encode() * 30) for key in sorted(keys, reverse=reverse)]
        after = node.shipping.reader.statistics()
        assert after.requests - before.requests <= 2 * count / 64
        assert after.bytes_fetched - before.bytes_fetched <= 1.5 * (after.bytes_used - before.bytes_used)


def test_nothing_to_do() -> None:
    """Without new entries nothing is written, and the report says so."""
    with EngineNode(new_store(), name="idle").open() as node:
        with pytest.raises(InputError, match="shipped"):
            compact(node.objects)
        node.apply(40)
        node.ship_all()
        compact(node.objects)
        before = copy_of(node.objects)
        report = compact(node.objects)
        assert not report.is_new
        assert report.notes == (f"nothing has come since generation 1, which goes up to seq {report.seq}",)
        assert keys_of(before) == keys_of(node.objects)


def test_a_dry_run_changes_nothing() -> None:
    """It tells what would be made, and not one object is another one then."""
    with EngineNode(new_store(), name="dry").open() as node:
        node.apply(80)
        node.ship_all()
        before = copy_of(node.objects)
        planned = compact(node.objects, is_dry_run=True, keep_from=node.engine.applied_seq // 2)
        assert {key: before.get(key).data for key in keys_of(before)} == {
            key: node.objects.get(key).data for key in keys_of(node.objects)
        }
        made = compact(node.objects, keep_from=node.engine.applied_seq // 2)
        assert (planned.values, planned.versions, planned.new_data_files) == (
            *(made.values, made.versions),
            made.new_data_files,
        )
        assert planned.is_dry_run
        assert made.dropped_versions == planned.dropped_versions > 0


def test_states_of_jobs_know_what_became_of_the_last_entries() -> None:
    """Those of a compaction, of one built on it, and of the job `checkpoint`; rolled back entries are in the log."""
    with EngineNode(new_store(), name="known").open() as node:
        for turn in range(3):
            node.apply(40)
            kept = node.engine.applied_seq
            node.apply(10)
            node.roll_back(kept)
            node.apply(5)
            node.ship_all()
            if turn < 2:
                compact(node.objects)
            else:
                write_state(node.objects)
            state = StoredState(node.objects, node.view.manifest.checkpoints[-1]).footer
            assert state.seq == node.engine.applied_seq
            assert state.results == node.core.results.known_up_to(state.seq)


# Retention


def test_retention_leaves_what_can_be_asked_for() -> None:
    """With a later start of history, older versions are left out; every state from there on is the same."""
    with EngineNode(new_store(), name="kept").open() as node:
        node.apply(200)
        node.ship_all()
        start = node.engine.applied_seq // 2
        report = compact(node.objects, keep_from=start)
        assert report.dropped_versions > 0
        assert report.is_good
        assert node.view.manifest.history_start_seq == start
        assert rows_in(data_of(node), node).items() < dict(node.core.tree.scan()).items()
        other = successor(node)
        node.crash()
        other.restore()
        with other.open():
            other.assert_same([start, start + 7])


def test_what_retention_removed_does_not_come_back() -> None:
    """A later compaction begins with the one before, not with a state that the node wrote from its own tree."""
    with EngineNode(new_store(), name="gone").open() as node:
        node.apply(100)
        node.ship_all()
        compact(node.objects, keep_from=node.engine.applied_seq)
        before = set(rows_in(data_of(node), node))
        node.apply(20)
        node.ship_all()
        node.engine.create_checkpoint()
        seq = root_of(node).seq
        compact(node.objects)
        after = rows_in(data_of(node), node)
        assert {key for key in after if seq_of(key) <= seq} <= before


@pytest.mark.parametrize("keep_versions", [None, 2])
@pytest.mark.parametrize("has_previous", [False, True])
def test_what_the_owner_collected_does_not_come_back(keep_versions: int | None, has_previous: bool) -> None:
    """What a node removed is left out, also when the records of that are behind all that is shipped."""
    with EngineNode(new_store(), name="collected", keep_versions=keep_versions).open() as node:
        node.apply(150)
        node.ship_all()
        if has_previous:
            compact(node.objects)
            node.apply(20)
            node.ship_all()
        report = node.engine.collect_garbage(horizon=node.engine.applied_seq - 9)
        assert report.removed_versions > 0
        assert compact(node.objects).dropped_versions > 0
        assert rows_in(data_of(node), node) == dict(node.core.tree.scan())
        assert not compact(node.objects).is_new


def test_keep_from_lets_go_what_an_earlier_compaction_has_kept() -> None:
    """Nothing has come since then, and history begins where it did: there is still something to leave out, once."""
    with EngineNode(new_store(), name="again").open() as node:
        node.apply(150)
        node.ship_all()
        start = node.engine.applied_seq - 9
        metadata = BucketMetadataStore(node.objects)
        move_history_start(metadata, KEYS, node.clock, start)
        kept = compact(node.objects)
        assert (kept.is_new, kept.dropped_versions) == (True, 0)
        some = compact(node.objects, keep_from=start, keep_versions=3)
        fewer = compact(node.objects, keep_from=start)
        assert [some.is_new, fewer.is_new] == [True, True]
        assert min(some.dropped_versions, fewer.dropped_versions) > 0
        assert not compact(node.objects, keep_from=start).is_new
        assert not compact(node.objects, keep_from=start, keep_versions=3).is_new
        assert not compact(node.objects).is_new


def test_packs_that_are_mostly_dead_are_given_up() -> None:
    """When more than half of a blob file is no longer pointed to, what lives in it moves to a new one; others stay."""
    with EngineNode(new_store(), name="dead").open() as node:
        keys = [f"key-{number:03}" for number in range(40)]
        puts = [PutObject("b", key, bytes([number]) * 900) for number, key in enumerate(keys)]
        node.apply_these([(1, CreateBucket("b")), *enumerate(puts, 2)])
        node.ship_all()
        compact(node.objects)
        first = root_of(node)
        assert len(first.blob_files) > 3
        doomed = keys[:8] + keys[9:10]
        node.apply_these([(100 + number, DeleteObject("b", key)) for number, key in enumerate(doomed)])
        node.ship_all()
        report = compact(node.objects, keep_from=200 - 92)
        second = root_of(node)
        assert report.rewritten_blob_files == 1
        assert report.kept_blob_files == len(first.blob_files) - 1
        assert {blob_file.key for blob_file in first.blob_files[1:]} == {
            blob_file.key for blob_file in second.blob_files[:-1]
        }
        rows = rows_in(data_of(node), node)
        live = {key for key, cell in rows.items() if is_pointer(cell)}
        assert len(live) == len(keys) - len(doomed)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_damage_in_a_blob_file_that_is_given_up_is_told_with_its_byte(codec: str) -> None:
    """Nothing is published; the error names the file, and the byte where the damaged value begins."""
    with EngineNode(new_store(), name="hurt").open() as node:
        keys = [f"key-{number:03}" for number in range(40)]
        puts = [PutObject("b", key, bytes([number]) * 900) for number, key in enumerate(keys)]
        node.apply_these([(1, CreateBucket("b")), *enumerate(puts, 2)])
        node.ship_all()
        compact(node.objects, codec=codec, large_bytes=1 << 20)
        first = root_of(node)
        hurt = first.blob_files[0]
        data = node.objects.get(hurt.key).data
        entry = check_blob_file(bytes(data))[-1]
        doomed = keys[: hurt.values - 2]
        node.apply_these([(100 + number, DeleteObject("b", key)) for number, key in enumerate(doomed)])
        node.ship_all()
        node.objects.put(hurt.key, bytes(data[: entry.byte]) + b"\xff" + bytes(data[entry.byte + 1 :]))
        with pytest.raises(CorruptionError) as told:
            compact(node.objects, keep_from=99 + len(doomed), large_bytes=1 << 20)
        assert (str(told.value.path), told.value.byte) == (hurt.key, entry.byte)
        assert root_of(node) == first


def test_an_engine_in_which_nothing_is_left() -> None:
    """When retention leaves no row at all, the compaction is empty, and so is what is restored from it."""
    with EngineNode(new_store()).open() as node:
        node.apply_these([(1, CreateBucket("b")), (2, PutObject("b", "k", bytes(900)))])
        node.ship_all()
        compact(node.objects)
        node.apply_these([(3, DeleteObject("b", "k")), (4, DeleteBucket("b"))])
        node.ship_all()
        report = compact(node.objects, keep_from=4)
        assert (report.is_good, report.versions, report.objects) == (True, 0, 0)
        other = successor(node)
        node.crash()
        other.restore()
        with other.open():
            other.assert_same()


# Codecs


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_values_can_be_stored_in_another_way(codec: str) -> None:
    """Values in blob files are compressed, or no longer are, as it is asked for; cells stay what they are."""
    for stored in ("none", "zstd"):
        with EngineNode(new_store(), name="codec", wal_compression=stored).open() as node:
            node.apply(60)
            node.ship_all()
            compact(node.objects, codec=codec, large_bytes=1 << 20)
            assert_complete(node)


def test_objects_of_the_log_may_be_compressed_or_put_together() -> None:
    """Whatever the owner made of its log meanwhile, blocks or larger objects: the same files come of it."""
    files = []
    for compression in ("none", "zstd"):
        with EngineNode(new_store(), name="blocks", ship_compression=compression, rotate_max_bytes=4096).open() as node:
            before = node.objects
            for _ in range(2):
                node.apply(50)
                node.ship_all()
                before = copy_of(node.objects)
                report = compact(node.objects)
                assert report.digest == node.engine.digest()
                assert_complete(node)
                node.engine.compact(grace_seconds=0)
            files.append(new_files(node.objects, before).keys() - set(node.view.object_keys()))
    assert files[0] == files[1]


# Options


def test_options_are_checked() -> None:
    """What cannot be is told by name; from how many bytes on values are files is decided once."""
    with EngineNode(new_store(), name="options").open() as node:
        node.apply(30)
        node.ship_all()
        with pytest.raises(InputError, match="blob_file_bytes"):
            compact(node.objects, blob_file_bytes=0)
        with pytest.raises(InputError, match="keep_from"):
            compact(node.objects, keep_versions=2)
        with pytest.raises(InputError, match="large_bytes"):
            compact(node.objects, large_bytes=0)
        with pytest.raises(InputError, match="begin at seq"):
            compact(node.objects, keep_from=10**9)
        compact(node.objects)
        node.apply(5)
        node.ship_all()
        with pytest.raises(InputError, match="it stays"):
            compact(node.objects, large_bytes=7)
        compact(node.objects, large_bytes=None)
        assert root_of(node).large_bytes == 1500


# Damage


def test_damage_is_told_and_nothing_is_published() -> None:
    """A flipped bit in the log, or in a file of the compaction before, ends the job before it publishes anything."""
    with EngineNode(new_store(), name="damage").open() as node:
        node.apply(60)
        node.ship_all()
        compact(node.objects)
        node.apply(60)
        node.ship_all()
        root, newest = root_of(node), KEYS.object(node.view.descriptors()[-1].name)
        for key in (newest, root.versions[0].key, root.values[0].key):
            copy = copy_of(node.objects)
            data = bytearray(copy.get(key).data)
            data[len(data) // 2] ^= 8
            copy.put(key, bytes(data))
            with pytest.raises(DataError):
                compact(copy)
            again = copy_of(copy)
            again.put(key, node.objects.get(key).data)
            assert compact(again).is_good


# The command


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["shop/orders", "--engine", "file:///nowhere"], "TOPIC is for topics"),
        (["--not-by-key", "--grace", "0", "--engine", "file:///nowhere"], "--by-key, --grace is for topics"),
        (["--keep-from", "7", "--large-bytes", "1MiB"], "--large-bytes, --keep-from is for engines"),
        (["--engine", "file:///nowhere", "--blob-file-bytes", "many"], "--blob-file-bytes is a size"),
    ],
)
def test_a_command_is_about_topics_or_about_an_engine(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options of both at once, and sizes that are none, are refused by name, before Spark is started."""
    assert main(["pipeline", "compact", *arguments]) != 0
    assert told in " ".join(capsys.readouterr().err.split())


# With Spark


def test_with_spark(spark: SparkSession, tmp_path: Path) -> None:
    """The job itself, on a store of files with a compaction; a new node begins with what it made, and reads from it."""
    store = (tmp_path / "store").as_uri()
    with tidelog.open_engine(tmp_path / "engine", store=store, ship_interval_seconds=3600) as engine:
        engine.apply(1, tidelog.CreateBucket("b"))
        put_and_ship(engine, 200)
        compact_by_hand(open_store(store, StoreSettings()), large_bytes=4000, blob_file_bytes=200_000)
        put_and_ship(engine, 200)
        report = compact_engine(
            spark, find_engine(store), CompactEngineOptions(blob_file_bytes=1 << 20, rows_per_file=300)
        )
        digest = engine.digest()
    assert (report.is_good, report.is_new, report.digest) == (True, True, digest)
    assert (report.generation, report.seq) == (2, 401)
    assert report.kept_blob_files
    assert report.data_files
    with tidelog.restore_engine(tmp_path / "new", store=store) as restored:
        assert restored.digest() == digest
        assert restored.read("b", "key-1").data == bytes([401 % 256]) * 4010


def put_and_ship(engine: tidelog.Engine, count: int) -> None:
    """So many more entries, in the store."""
    first = engine.applied_seq + 1
    puts = [tidelog.PutObject("b", f"key-{n % 50}", bytes([n % 256]) * (10 * n)) for n in range(first, first + count)]
    engine.apply_many(list(enumerate(puts, first)))
    engine.update_low_water_mark(engine.applied_seq)
    engine.ship()
