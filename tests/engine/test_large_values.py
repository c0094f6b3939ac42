"""Large values: put from streams into files of their own, read by pieces, in every tier, gone when nobody needs them.

Kills at every call of disk and store are in tests/crash and test_shipping_crashes.py, which put such values too.
"""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.engine.engines import WITH_VALUE_FILES, assert_same, open_local
from tests.engine.stations import DIRECTORY, KEYS, EngineNode, new_store, successor, use_replica
from tests.log.workbench import LIMIT_SECONDS

from tidelog.engine import value_files
from tidelog.engine.engine import Engine
from tidelog.engine.entry import Batch, CopyObject, CreateBucket, DeleteObject, PutObject, packed_metadata
from tidelog.engine.sst.value_file import BLOCK_BYTES
from tidelog.engine.txn.read_set import encode_entry
from tidelog.errors import (
    ClosedError,
    CorruptionError,
    DiskFullError,
    InputError,
    NotFoundError,
    StoreUnavailableError,
)
from tidelog.testing import FaultyFiles, FaultyStore

# Without the cache on the disk: a large value that was read twice comes back there when there is time for it.
SETTINGS: dict[str, Any] = {"large_value_bytes": 1024, "local_retention_bytes": 0, "disk_cache_bytes": 0}
DATA = random.Random("large").randbytes(2 * BLOCK_BYTES + 12_345)
METADATA = {"type": "image/png", "n": 7}


def names(engine: Engine) -> list[str]:
    """The value files that an engine knows of."""
    return sorted(map(str, engine._core.values.names()))


def on_disk(directory: Path) -> list[str]:
    """What is in the folder of value files."""
    return sorted(path.name for path in (directory / "values").glob("*"))


def stored(store: FaultyStore) -> list[str]:
    """The value files in a store."""
    return [info.key.removeprefix(KEYS.values_prefix) for info in store.list(KEYS.values_prefix)]


def pieces(data: bytes, size: int = 70_001) -> Iterator[bytes]:
    """Data piece by piece."""
    for start in range(0, len(data), size):
        yield data[start : start + size]


def broken(data: bytes) -> Iterator[bytes]:
    """A stream that ends with an error."""
    yield from pieces(data)
    raise OSError("the peer is gone")


@pytest.fixture
def node() -> Iterator[EngineNode]:
    """An engine with a store that has shipped a large object with metadata, a copy of it, and a small one."""
    with EngineNode(new_store(), **SETTINGS).open() as node:
        node.apply_these(
            [
                (1, CreateBucket("b")),
                (2, PutObject("b", "large", DATA, METADATA)),
                (3, CopyObject("b", "large", "b", "copy")),
                (4, PutObject("b", "small", b"s" * 1024)),
            ]
        )
        node.ship_all()
        yield node


@pytest.mark.parametrize(
    "make", [lambda: DATA, lambda: io.BytesIO(DATA), lambda: pieces(DATA), lambda: map(bytearray, pieces(DATA))]
)
def test_data_comes_from_bytes_a_file_object_or_an_iterator(make: Any, tmp_path: Path) -> None:
    """The same object is read back, whatever it came from, with the same checksum as small values have."""
    with open_local(tmp_path, settings=WITH_VALUE_FILES) as engine:
        engine.apply_many([(1, CreateBucket("b")), (2, PutObject("b", "k", make(), METADATA))])
        found = engine.read("b", "k")
        assert (found.data, found.metadata, found.seq, found.tier) == (DATA, METADATA, 2, "hot")
        with open_local(tmp_path / "plain") as plain:
            plain.apply_many([(1, CreateBucket("b")), (2, PutObject("b", "k", DATA, METADATA))])
            assert not plain._core.values.names()
            assert engine.digest() == plain.digest()
            assert engine.stat("b", "k") == plain.stat("b", "k")


def test_short_stream_is_an_ordinary_value(tmp_path: Path) -> None:
    """What fits into the log is put there, whatever it came from."""
    with open_local(tmp_path, settings=WITH_VALUE_FILES) as engine:
        engine.apply_many([(1, CreateBucket("b")), (2, PutObject("b", "k", iter([b"a" * 1000, b"", b"b" * 24])))])
        assert engine.read("b", "k").data == b"a" * 1000 + b"b" * 24
        assert names(engine) == []


@pytest.mark.parametrize("make", [bytes, io.BytesIO, lambda data: pieces(data, 70_001)])
def test_data_of_more_than_the_limit_is_refused_and_leaves_nothing(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit itself is accepted; it is 5 GiB, and 1 MiB here."""
    monkeypatch.setattr(value_files, "MAX_STREAM_BYTES", 1 << 20)
    most = random.Random("limit").randbytes(1 << 20)
    with open_local(tmp_path, settings=WITH_VALUE_FILES) as engine:
        engine.apply_many([(1, CreateBucket("b")), (2, PutObject("b", "k", make(most)))])
        before, digest = names(engine), engine.digest()
        entries = [(3, PutObject("b", "small", b"s")), (4, PutObject("b", "k", make(most + b"x")))]
        for refused in (entries, entries[1:]):
            with pytest.raises(InputError, match="more than 1048576 bytes; put it into several objects"):
                engine.apply_many([(seq, msgspec.structs.replace(put, data=make(most + b"x"))) for seq, put in refused])
            assert (names(engine), engine.digest(), engine.applied_seq) == (before, digest, 2)
        assert sorted(path.name for path in (tmp_path / "values").iterdir()) == [str(name) for name in before]
        assert engine.apply(3, PutObject("b", "k", make(most[:-1]))).applied
        assert engine.read("b", "k").data == most[:-1]
        assert engine.read("b", "k", 2).data == most


@pytest.mark.parametrize("offset", [0, 1, BLOCK_BYTES - 10, BLOCK_BYTES, 2 * BLOCK_BYTES + 12_344, len(DATA), 1 << 40])
@pytest.mark.parametrize("length", [None, 0, 1, 30, BLOCK_BYTES + 1])
@pytest.mark.parametrize("tier", ["hot", "cold"])
def test_range_of_an_object_is_read(node: EngineNode, offset: int, length: int | None, tier: str) -> None:
    """Any range is what a slice of the data is; of what is in the store only the blocks of the range are fetched."""
    engine = node.engine
    if tier == "hot":
        engine.apply(5, PutObject("b", "large", DATA, METADATA))
    before = node.shipping.reader.statistics().bytes_fetched
    found = engine.read("b", "large", offset=offset, length=length)
    assert found.data == DATA[offset:][:length]
    assert (found.metadata, found.tier) == (METADATA, tier)
    if length is not None and length <= 30:
        assert node.shipping.reader.statistics().bytes_fetched - before <= 3 * (BLOCK_BYTES + 4)
    assert engine.read("b", "small", offset=offset, length=length).data == (b"s" * 1024)[offset:][:length]


def test_invalid_ranges_are_refused(node: EngineNode) -> None:
    """What is no range is told, and nothing is read."""
    for wrong in ({"offset": -1}, {"length": -1}, {"offset": 1.5}, {"length": "3"}):
        with pytest.raises(InputError, match="must be a whole number from 0 on"):
            node.engine.read("b", "large", **wrong)


@pytest.mark.parametrize("key", ["large", "small"])
def test_object_is_a_file_object(node: EngineNode, key: str) -> None:
    """It is read by pieces, forwards and after jumps, and knows what it is."""
    data = {"large": DATA, "small": b"s" * 1024}[key]
    with node.engine.open_object("b", key) as file:
        assert (file.size, file.seq) == (len(data), {"large": 2, "small": 4}[key])
        assert file.tier == {"large": "cold", "small": "hot"}[key]  # the newest file of the log is here
        assert file.readable()
        assert file.seekable()
        assert file.read(7) == data[:7]
        assert file.tell() == 7
        assert file.seek(-5, io.SEEK_END) == len(data) - 5
        assert file.read() == data[-5:]
        assert file.read(1) == b""
        file.seek(0)
        assert b"".join(iter(lambda: file.read(100_000), b"")) == data
        with pytest.raises(InputError, match="before the beginning"):
            file.seek(-1)
    assert file.closed
    with pytest.raises(NotFoundError, match="no object 'nothing'"):
        node.engine.open_object("b", "nothing")


def test_open_file_shows_its_version_to_the_end(tmp_path: Path) -> None:
    """What is put, deleted and collected meanwhile does not reach a reader that is at it."""
    with open_local(tmp_path, settings=WITH_VALUE_FILES) as engine:
        engine.apply_many([(1, CreateBucket("b")), (2, PutObject("b", "k", DATA))])
        with engine.open_object("b", "k") as file:
            assert file.read(10) == DATA[:10]
            engine.apply_many([(3, PutObject("b", "k", DATA[::-1])), (4, DeleteObject("b", "k"))])
            engine.update_low_water_mark(4)
            assert engine.collect_garbage(horizon=4).history_start_seq == 2  # the reader holds it
            assert file.read() == DATA[10:]
        engine.collect_garbage(horizon=4)
        assert on_disk(tmp_path) == []


def test_stream_that_breaks_leaves_nothing(tmp_path: Path) -> None:
    """Its own error arrives, no entry is applied, and no byte stays on the disk."""
    with open_local(tmp_path, settings=WITH_VALUE_FILES) as engine:
        engine.apply(1, CreateBucket("b"))
        with pytest.raises(OSError, match="the peer is gone"):
            engine.apply_many([(2, PutObject("b", "a", DATA)), (3, PutObject("b", "k", broken(DATA)))])
        assert (engine.applied_seq, on_disk(tmp_path)) == (1, [])
        with pytest.raises(InputError, match="open the file in binary mode"):
            engine.apply(2, PutObject("b", "k", io.StringIO("text")))
        assert engine.apply(2, PutObject("b", "k", pieces(DATA))).applied
        assert engine.read("b", "k").data == DATA


@pytest.mark.parametrize("make", [lambda: io.BytesIO(DATA), lambda: pieces(DATA)])
def test_stream_that_was_read_is_refused_in_a_second_apply(make: Any) -> None:
    """An entry that was repeated after a full disk stored the rest of its stream, as if that were the object."""
    files = FaultyFiles()
    with open_local(DIRECTORY, files, WITH_VALUE_FILES) as engine:
        engine.apply(1, CreateBucket("b"))
        put = PutObject("b", "k", make())
        files.capacity_bytes = BLOCK_BYTES
        with pytest.raises(DiskFullError):
            engine.apply(2, put)
        files.capacity_bytes = None
        for entry in (put, Batch([put])):
            with pytest.raises(InputError, match="was read before") as refused:
                engine.apply(2, entry)
            assert "at its beginning" in str(refused.value)
        assert engine.applied_seq == 1
        engine.apply(2, again := PutObject("b", "k", make()))
        with pytest.raises(InputError, match="was read before"):
            engine.apply(3, again)
        assert engine.read("b", "k").data == DATA


def test_full_disk_refuses_a_stream_and_keeps_the_engine() -> None:
    """There was no room for it: nothing of it is left, and what fits is put afterwards."""
    files = FaultyFiles()
    with open_local(DIRECTORY, files, WITH_VALUE_FILES) as engine:
        engine.apply(1, CreateBucket("b"))
        files.capacity_bytes = BLOCK_BYTES
        with pytest.raises(DiskFullError):
            engine.apply(2, PutObject("b", "k", pieces(DATA)))
        files.capacity_bytes = None
        assert files.list(DIRECTORY / "values") == []
        assert engine.apply(2, PutObject("b", "k", pieces(DATA))).applied


def test_refused_put_keeps_no_file(tmp_path: Path) -> None:
    """A condition that does not hold refuses a stream like any other put, and the same again gets the same answer."""
    with open_local(tmp_path, settings=WITH_VALUE_FILES) as engine:
        engine.apply_many([(1, CreateBucket("b")), (2, PutObject("b", "k", b"there"))])
        refused = engine.apply(3, PutObject("b", "k", pieces(DATA), if_absent=True))
        assert refused.status == "refused"
        assert engine.apply(4, PutObject("nowhere", "k", pieces(DATA))).status == "refused"
        assert engine.apply(3, PutObject("b", "k", pieces(DATA))) == refused
        assert on_disk(tmp_path) == []


def test_same_entry_again_is_known_and_another_is_refused(tmp_path: Path) -> None:
    """An orchestrator that repeats a stream hears what became of it; nothing is written again."""
    with open_local(tmp_path, settings=WITH_VALUE_FILES) as engine:
        engine.apply_many([(1, CreateBucket("b")), (2, PutObject("b", "k", pieces(DATA), METADATA))])
        before = names(engine)
        assert engine.apply(2, PutObject("b", "k", pieces(DATA, 999), METADATA)).applied
        with pytest.raises(InputError, match="another entry was applied under this seq"):
            engine.apply(2, PutObject("b", "k", pieces(DATA)))
        assert names(engine) == before == on_disk(tmp_path)


def test_rollback_takes_its_files_with_it(tmp_path: Path) -> None:
    """What was rolled back is gone; the same seq may put something else."""
    with open_local(tmp_path, settings=WITH_VALUE_FILES) as engine:
        engine.apply_many([(1, CreateBucket("b")), (2, PutObject("b", "k", DATA))])
        kept = on_disk(tmp_path)
        batch = Batch(
            [PutObject("b", "k", DATA[1:]), PutObject("b", "l", pieces(DATA)), CopyObject("b", "k", "b", "m")]
        )
        engine.apply(3, batch)
        assert len(on_disk(tmp_path)) == 3
        assert engine.read("b", "m").data == DATA[1:]
        engine.rollback_to(2)
        assert on_disk(tmp_path) == kept
        assert engine.read("b", "k").data == DATA
        engine.apply(3, PutObject("b", "k", DATA[2:]))
        assert engine.read("b", "k").data == DATA[2:]


def test_what_a_crash_left_is_removed_when_the_engine_opens(tmp_path: Path) -> None:
    """Unfinished files, and those of entries that never were in the log."""
    with open_local(tmp_path, settings=WITH_VALUE_FILES) as engine:
        engine.apply_many([(1, CreateBucket("b")), (2, PutObject("b", "k", DATA))])
    (tmp_path / "values" / "0.tmp").write_bytes(b"half")
    (tmp_path / "values" / "00000000000000000003-0-9999-00000000.tval").write_bytes(b"never")
    with open_local(tmp_path, settings=WITH_VALUE_FILES) as engine:
        assert on_disk(tmp_path) == names(engine)
        assert engine.read("b", "k").data == DATA


def test_file_is_in_the_store_before_its_record_and_then_leaves_the_disk() -> None:
    """A store that fails at the upload ships nothing that names the file; copies share it."""
    store = new_store()
    with EngineNode(store, **SETTINGS).open() as node:
        node.apply_these([(1, CreateBucket("b")), (2, PutObject("b", "k", DATA)), (3, PutObject("b", "l", b"x"))])
        store.fail("publish", matching="*.tval", times=None)
        with pytest.raises(StoreUnavailableError):
            node.ship_all()
        assert node.view.manifest.high_water_mark == 0
        node.shipping.owner.ship()  # the low-water mark may rise between the upload and the log
        assert node.view.manifest.high_water_mark == 1
        store.heal()
        assert node.ship_all() == 3
        assert len(stored(store)) == 1
        assert node.files.list(DIRECTORY / "values") == []
        node.assert_same([2])


def test_stat_and_listing_fetch_no_value(node: EngineNode) -> None:
    """Size, checksum and where it is are known from the index; metadata takes one block at most."""
    before = node.shipping.reader.statistics()
    assert [(one.key, one.size) for one in node.engine.list_objects("b")] == [
        ("copy", len(DATA)),
        ("large", len(DATA)),
        ("small", 1024),
    ]
    assert [one.tier for one in node.engine.versions("b", "large")] == ["cold"]
    assert node.engine.stat("b", "copy").metadata == METADATA
    after = node.shipping.reader.statistics()
    assert after.requests - before.requests == 1
    assert after.bytes_fetched - before.bytes_fetched <= BLOCK_BYTES + 4


def test_scan_and_read_many_have_large_values(node: EngineNode) -> None:
    """They are among the others, wherever they are."""
    node.engine.apply(5, PutObject("b", "hot", DATA[5:]))
    node.model.apply(5, PutObject("b", "hot", DATA[5:]))
    expected = [("copy", DATA), ("hot", DATA[5:]), ("large", DATA), ("small", b"s" * 1024)]
    assert [(one.key, one.data) for one in node.engine.scan("b", with_values=True)] == expected
    many = node.engine.read_many([("b", key) for key, _ in expected])
    assert [(one.data, one.tier) for one in many if one is not None] == [
        (data, "hot" if key in ("hot", "small") else "cold") for key, data in expected
    ]


def test_restore_reader_and_replica_have_the_same(node: EngineNode) -> None:
    """Without the disk every value is where the store is; a replica has copies of the files."""
    replica = new_store()
    use_replica(node, replica)
    node.engine.create_checkpoint()
    node.shipping.replicate()
    assert stored(replica) == stored(node.objects)  # type: ignore[arg-type]
    with successor(node, **SETTINGS) as other:
        other.restore()
        other.open()
        assert_same(other.engine, node.model)
        assert other.engine.verify().ok
    for key in list(node.objects.list(KEYS.values_prefix)):
        node.objects.delete(key.key)
    assert node.engine.read("b", "large").data == DATA  # from the replica


def test_damage_is_named_and_a_replica_mends_it(node: EngineNode) -> None:
    """A block that is not what it was is never handed out: file and byte are told, and a good copy is read."""
    store = node.objects
    (name,) = stored(store)  # type: ignore[arg-type]
    key = KEYS.values_prefix + name
    good = store.get(key).data
    bad = bytearray(good)
    bad[BLOCK_BYTES + 200] ^= 1
    store.put(key, bytes(bad))
    assert node.engine.read("b", "large", length=100).data == DATA[:100]
    with pytest.raises(CorruptionError, match="checksum of block 2") as raised:
        node.engine.read("b", "large")
    head_bytes = 4 + len(packed_metadata(METADATA)) + 4  # type: ignore[arg-type]
    assert (str(raised.value.path), raised.value.byte) == (key, head_bytes + BLOCK_BYTES + 4)
    found = node.engine.verify().findings
    assert {one.kind for one in found} == {"value"}
    store.put(key, good[:-9])
    with pytest.raises(CorruptionError, match="it ends there"):
        node.engine.read("b", "large")
    replica = new_store()
    replica.put(key, good)
    use_replica(node, replica)
    assert node.engine.read("b", "large").data == DATA


def test_collection_removes_files_of_old_versions_here_and_in_the_store() -> None:
    """A file goes with the last version that refers to it, and no sooner: a copy keeps it."""
    store = new_store()
    with EngineNode(store, **{**SETTINGS, "local_retention_bytes": 1 << 30}, keep_versions=1).open() as node:
        node.apply_these(
            [
                (1, CreateBucket("b")),
                (2, PutObject("b", "copied", DATA)),
                (3, PutObject("b", "old", DATA[1:])),
                (4, CopyObject("b", "copied", "b", "copy")),
                (5, PutObject("b", "old", DATA[2:])),
                (6, DeleteObject("b", "copied")),
            ]
        )
        node.ship_all()
        node.engine.create_checkpoint()
        assert len(stored(store)) == len(names(node.engine)) == 3
        node.engine.collect_garbage()
        assert [name[:20] for name in stored(store)] == ["00000000000000000002".zfill(20), "00000000000000000005"]
        assert names(node.engine) == stored(store)
        assert node.engine.read("b", "copy").data == DATA
        assert node.engine.verify().ok


def test_file_put_again_during_a_collection_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was counted was rolled back since, and the same seq has put something else: that is not garbage."""
    with open_local(tmp_path, settings=WITH_VALUE_FILES) as engine:
        engine.apply_many([(1, CreateBucket("b")), (2, PutObject("b", "k", DATA)), (3, PutObject("b", "k", DATA[1:]))])
        engine.update_low_water_mark(2)
        vacuum = engine._garbage()._vacuum
        run = vacuum.run

        def run_and_replace(*arguments: Any) -> Any:
            found = run(*arguments)
            engine.rollback_to(2)
            engine.apply(3, PutObject("b", "k", DATA[2:]))
            return found

        monkeypatch.setattr(vacuum, "run", run_and_replace)
        engine.collect_garbage(horizon=2)
        assert engine.read("b", "k").data == DATA[2:]
        assert engine.read("b", "k", 2).data == DATA


def test_change_feed_streams_large_values(node: EngineNode) -> None:
    """A put in the feed has an iterator of its data, which another engine can apply."""
    with open_local(DIRECTORY / "other", FaultyFiles(), WITH_VALUE_FILES) as other:
        for change in node.engine.changes(with_values=True):
            other.apply(change.seq, change.entry)
        assert other.digest() == node.engine.digest()


def test_streams_cannot_be_carried_by_a_log(node: EngineNode) -> None:
    """Who would read a stream once for every replica hears it before anything is written."""
    with pytest.raises(InputError, match="cannot be carried by a log"):
        encode_entry(PutObject("b", "k", io.BytesIO(b"x")))
    with node.engine.transaction() as transaction, pytest.raises(InputError, match="a transaction puts bytes"):
        transaction.put("b", "k", io.BytesIO(b"x"))  # type: ignore[arg-type]


@pytest.mark.parametrize("tier", ["hot", "cold"])
def test_a_task_reads_an_object_as_a_file(tier: str) -> None:
    """By pieces, from anywhere, on this disk and in the store; and so it reads the data of a change."""
    data = bytes(range(256)) * (36 << 10)
    settings = {**SETTINGS, "local_retention_bytes": 0 if tier == "cold" else 1 << 30}
    with EngineNode(new_store(), **settings).open() as node:
        node.apply_these([(1, CreateBucket("b")), (2, PutObject("b", "k", data, {"n": 1}))])
        node.ship_all()
        engine = node.engine

        async def play() -> None:
            async with await engine.open_object_async("b", "k") as file:
                assert (file.size, file.metadata, file.seq, file.tier) == (len(data), {"n": 1}, 2, tier)
                assert (await file.read(10), await file.tell()) == (data[:10], 10)
                assert await file.seek(-300, 2) == len(data) - 300
                assert await file.read() == data[-300:]
                assert await file.read() == b""
                await file.seek(5)
                pieces = [piece async for piece in file]
                assert (b"".join(pieces) == data[5:], len(pieces)) == (True, 9)
                with pytest.raises(InputError, match="before the beginning"):
                    await file.seek(-1)
            assert file.closed
            await file.close()
            with pytest.raises(ClosedError):
                await file.seek(0)
            puts: list[Any] = [change.entry async for change in engine.changes_async(2, with_values=True)]
            taken = [piece async for piece in puts[0].data]
            assert (b"".join(taken) == data, len(taken)) == (True, 3)
            puts = [change.entry async for change in engine.changes_async(2, with_values=True)]
            assert (await engine.apply_async(3, PutObject("b", "copy", puts[0].data))).applied

        asyncio.run(asyncio.wait_for(play(), LIMIT_SECONDS))
        assert engine.read("b", "copy").data == data
