"""The index, written anew in full pages: smaller, with the same states, whatever happens on the way."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.engine.engines import SMALL, RandomEntries, assert_same, open_local
from tests.engine.model import Model, ModelObject
from tests.engine.stations import DIRECTORY, KEYS, EngineNode, new_store, successor

from tidelog.cold.catalog import Catalog
from tidelog.engine.btree.page import PAGE_BYTES
from tidelog.engine.cold.shipping import shipped_pieces_of
from tidelog.engine.core import Core
from tidelog.engine.engine import Engine
from tidelog.engine.entry import CreateBucket, PutObject
from tidelog.engine.wal.records import encode_repack
from tidelog.errors import DataError, DiskFullError, LogFailedError, TidelogError
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.testing import FaultyFiles

PAGES = DIRECTORY / "pages.db"


def filled(files: FaultyFiles, count: int = 3000, seed: str = "index") -> tuple[Engine, Model]:
    """An engine whose pages are half empty: keys came in any order."""
    engine, model = open_local(DIRECTORY, files), Model()
    numbers = list(range(count))
    random.Random(seed).shuffle(numbers)
    model.apply(1, CreateBucket("b"))
    puts = [(seq, PutObject("b", f"{key:06d}", b"v" * 40)) for seq, key in enumerate(numbers, 2)]
    engine.apply_many([(1, CreateBucket("b")), *puts])
    # The model copies every state: here only the last one is of interest.
    model.states[1]["b"].objects.update({put.key: ModelObject(b"v" * 40, {}, seq) for seq, put in puts})
    model.states[count + 1] = model.states.pop(1)
    return engine, model


def test_it_becomes_smaller_and_says_the_same() -> None:
    """Pages are full afterwards, every object is read, and the tree is sound."""
    engine, model = filled(FaultyFiles())
    digest = engine.digest()
    report = engine.compact_index()
    assert report.pages_after < report.pages_before * 0.9
    assert report.cells == 3001
    assert engine._core.tree.check().pages <= report.pages_after
    assert engine.digest() == digest == model.digest()
    assert_same(engine, model)
    assert engine.statistics().compaction.index_runs == 1
    assert engine.statistics().index_bytes == report.pages_after * PAGE_BYTES
    engine.close()


def test_the_file_becomes_smaller() -> None:
    """The old file is gone, and the new one has nothing but the new pages."""
    files = FaultyFiles()
    engine, _ = filled(files)
    engine.create_checkpoint()
    before = len(files.read(PAGES))
    report = engine.compact_index()
    assert len(files.read(PAGES)) == report.pages_after * PAGE_BYTES < before
    assert sorted(files.list(DIRECTORY)) == ["engine.ckpt", "pages.db", "wal"]
    engine.close()


@pytest.mark.parametrize("seed", range(8))
def test_every_state_is_read_as_before(seed: int) -> None:
    """Random entries, rollbacks, checkpoints and openings, with compactions of the index between them."""
    chance, source, files, model = random.Random(f"repack {seed}"), RandomEntries(seed), FaultyFiles(), Model()
    engine = open_local(DIRECTORY, files)
    for _ in range(25):
        entries = source.entries(chance.choice((1, 5, 20)), engine.applied_seq + 1)
        engine.apply_many(entries)
        for seq, entry in entries:
            model.apply(seq, entry)
        kind = chance.random()
        if kind < 0.35:
            engine.compact_index()
        elif kind < 0.5:
            seq = chance.randint(max(0, engine.applied_seq - 30), engine.applied_seq)
            engine.rollback_to(seq)
            model.roll_back(seq)
        elif kind < 0.6:
            engine.create_checkpoint()
        elif kind < 0.8:
            engine._core.close()
            engine = open_local(DIRECTORY, files)
    engine._core.tree.check()
    assert_same(engine, model, sorted(model.states)[::5])
    engine.close()


def test_a_crash_before_the_next_checkpoint_begins_with_the_new_file() -> None:
    """Redo leaves out what is of the old file, and does what came behind."""
    files = FaultyFiles()
    engine, _ = filled(files, 600)
    core = engine._core
    core.checkpointer.checkpoint()
    engine.apply(1000, PutObject("b", "between", b"1" * 300))
    new = core.build_new_index(core.wal.next_lsn)
    core.wal.add(encode_repack(new.cells))
    core.wal.commit()
    core.use_new_index(new)
    for seq in range(1001, 1200):
        engine.apply(seq, PutObject("b", f"behind-{seq}", b"2" * 300))
    digest = engine.digest()
    core.close()
    for _ in range(2):
        engine = open_local(DIRECTORY, files)
        assert engine.digest() == digest
        engine._core.tree.check()
        engine._core.close()


@pytest.mark.parametrize("lost", [("pages.db",), ("engine.ckpt",), ("pages.db", "engine.ckpt")])
def test_an_index_is_still_made_from_the_log(lost: tuple[str, ...]) -> None:
    """Its file is gone: redo from the beginning writes it anew where it was written anew, twice."""
    files = FaultyFiles()
    engine, _ = filled(files, 700)
    engine.compact_index()
    engine.apply_many([(2000 + n, PutObject("b", f"{n:06d}x", b"2" * 200)) for n in range(300)])
    engine.compact_index()
    engine.apply_many([(3000 + n, PutObject("b", f"{n:06d}y", b"3" * 200)) for n in range(300)])
    digest = engine.digest()
    engine.close()
    for name in lost:
        files.remove(DIRECTORY / name)
    engine = open_local(DIRECTORY, files)
    assert engine.digest() == digest
    engine._core.tree.check()
    engine.close()


def test_a_damaged_page_is_not_made_from_images_of_another_file() -> None:
    """What the log has of a page with this number is of another page; that is told, and nothing else is made up."""
    files = FaultyFiles()
    engine, _ = filled(files, 900)
    engine.compact_index()
    engine.close()
    data = files.read(PAGES)
    at = 3 * PAGE_BYTES + 100
    files.write_atomically(PAGES, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    engine = open_local(DIRECTORY, files)
    with pytest.raises(DataError, match="page 3 is damaged"):
        engine.digest()
    engine._core.close()
    files.remove(PAGES)
    engine = open_local(DIRECTORY, files)
    assert len(list(engine.list_objects("b"))) == 900
    engine.close()


def test_a_damaged_page_that_was_changed_since_is_made_anew() -> None:
    """Its image behind the record is that of the new page."""
    files = FaultyFiles()
    engine, _ = filled(files, 900)
    engine.compact_index()
    engine.apply_many([(2000 + n, PutObject("b", f"{n:06d}+", b"2" * 100)) for n in range(0, 900, 7)])
    digest = engine.digest()
    engine.close()
    data = bytearray(files.read(PAGES))
    for page in range(2, 6):
        data[page * PAGE_BYTES + 200] ^= 1
    files.write_atomically(PAGES, bytes(data))
    engine = open_local(DIRECTORY, files)
    assert engine.digest() == digest
    engine.close()


def test_a_full_disk_leaves_the_index_as_it_was() -> None:
    """Nothing has happened before the record: entries are applied, and it is tried again."""
    files = FaultyFiles()
    engine, _ = filled(files, 600)
    digest = engine.digest()
    files.capacity_bytes = sum(len(data) for data in files.tree().values() if data) + 3 * PAGE_BYTES
    with pytest.raises(DiskFullError):
        engine.compact_index()
    files.capacity_bytes = None
    assert "pages.db.new" not in files.list(DIRECTORY)
    assert engine.digest() == digest
    engine.apply(1000, PutObject("b", "new", b"x"))
    engine.compact_index()
    assert engine.read("b", "new").data == b"x"
    engine.close()


def test_an_engine_whose_rename_fails_must_be_opened_again() -> None:
    """The record is in the log: opening does what it says."""
    files = FaultyFiles()
    engine, _ = filled(files, 600)
    digest = engine.digest()
    files.fail("rename", matching="pages.db")
    with pytest.raises(TidelogError, match="replace the page file"):
        engine.compact_index()
    files.heal()
    with pytest.raises(LogFailedError):
        engine.apply(1000, PutObject("b", "new", b"x"))
    engine.close()
    engine = open_local(DIRECTORY, files)
    assert engine.digest() == digest
    assert engine._core.page_file.made_lsn > 0
    engine._core.tree.check()
    engine.close()


def read_until(is_over: threading.Event, engine: Engine, keys: list[str], number: int) -> int:
    """Reads objects at random, and lists all of them now and then; how many times."""
    chance, times = random.Random(number), 0
    while not is_over.is_set():
        for key in chance.choices(keys, k=20):
            assert engine.read("b", key).data == key.encode()
        if times % 50 == number:
            assert sum(1 for _ in engine.list_objects("b")) == len(keys)
        times += 1
    return times


def test_readers_go_on_meanwhile(tmp_path: Path) -> None:
    """Threads read and list while the pages change their numbers, with a pool that is too small for the index."""
    keys = [f"{number:05d}-{'long' * 60}" for number in range(2000)]
    random.Random("readers").shuffle(keys)
    puts = [(seq, PutObject("b", key, key.encode())) for seq, key in enumerate(keys, 2)]
    is_over = threading.Event()
    with open_local(tmp_path / "engine", settings=SMALL) as engine, ThreadPoolExecutor(4) as threads:
        engine.apply_many([(1, CreateBucket("b")), *puts])
        readers = [threads.submit(read_until, is_over, engine, keys, number) for number in range(4)]
        seq = len(keys) + 2
        try:
            for _ in range(6):
                engine.compact_index()
                again = random.Random(seq).choices(keys, k=150)  # splits, so that there are more pages again
                engine.apply_many(
                    [(seq + number, PutObject("b", key, key.encode())) for number, key in enumerate(again)]
                )
                seq += len(again)
        finally:
            is_over.set()
        assert all(reader.result() for reader in readers)
        engine._core.tree.check()


def test_a_damaged_page_of_a_restored_engine_is_not_made_from_images_of_the_lost_disk() -> None:
    """The shipped log has images of pages with the same numbers, of another tree: the damage is told."""
    store = new_store()
    node = EngineNode(store).open()
    keys = [f"{number * 7919 % 1000:04d}-{'long' * 100}" for number in range(200)]
    node.apply_these([(1, CreateBucket("b")), *((seq, PutObject("b", key, b"v")) for seq, key in enumerate(keys, 2))])
    node.ship_all()
    node.crash()
    other = successor(node)
    other.restore()
    data = bytearray(other.files.read(PAGES))
    data[3 * PAGE_BYTES + 100] ^= 1
    other.files.write_atomically(PAGES, bytes(data))
    pieces = shipped_pieces_of(store, Catalog(BucketMetadataStore(store, read_only=True), KEYS))
    core = Core.open(DIRECTORY, other.settings, other.files, other.clock, pieces)
    with pytest.raises(DataError, match="page 3 is damaged"):
        list(core.tree.scan())
    core.close()
