"""Damage on the disk: found, mended where the log has a good copy, refused by name where it has not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.engine.engines import SMALL, RandomEntries, assert_same, open_local
from tests.engine.model import Model

import tidelog
from tidelog.engine.core import PAGES
from tidelog.engine.recovery.checkpoint import MASTER, read_master, write_master
from tidelog.errors import CorruptionError, DataError, InputError, NotFoundError
from tidelog.files import LocalFiles

PAGE = 8192


def filled(directory: Path, entries: int = 300) -> Model:
    """An engine with a past: checkpoints, and something behind the last one."""
    source, model = RandomEntries("damage", keys=300), Model()
    with open_local(directory) as engine:
        for begin in range(3):
            for seq, entry in source.entries(entries // 3, model.applied_seq + 1):
                engine.apply(seq, entry)
                model.apply(seq, entry)
            if begin < 2:
                engine.create_checkpoint()
    return model


def flip(path: Path, byte: int, mask: int = 1) -> None:
    """One bit is another one."""
    data = bytearray(path.read_bytes())
    data[byte] ^= mask
    path.write_bytes(data)


def test_any_page_can_be_made_from_the_log(tmp_path: Path) -> None:
    """A flipped bit anywhere in the page file, or a page of noise, changes nothing that is read."""
    model = filled(tmp_path / "e")
    pages = tmp_path / "e" / PAGES
    good = pages.read_bytes()
    chance = random.Random(1)
    for page in range(1, len(good) // PAGE):
        if page % 3:
            flip(pages, page * PAGE + chance.randrange(PAGE), 1 << chance.randrange(8))
        else:
            pages.write_bytes(good[: page * PAGE] + chance.randbytes(PAGE) + good[(page + 1) * PAGE :])
        with open_local(tmp_path / "e") as engine:
            assert_same(engine, model)
            engine._core.tree.check()
        good = pages.read_bytes()


@pytest.mark.parametrize("lost", [(PAGES,), (MASTER,), (PAGES, MASTER)])
def test_lost_files_are_made_from_the_log(tmp_path: Path, lost: tuple[str, ...]) -> None:
    """As long as all of the log is there, nothing else is needed."""
    model = filled(tmp_path / "e")
    for name in lost:
        (tmp_path / "e" / name).unlink()
    with open_local(tmp_path / "e") as engine:
        assert_same(engine, model, sorted(model.states)[::40])


def test_lost_pages_are_made_from_the_start_of_the_log(tmp_path: Path) -> None:
    """All at once, and not one by one as they are missed: each would be looked for in all of the log."""
    filled(tmp_path / "e")
    (tmp_path / "e" / PAGES).unlink()
    with open_local(tmp_path / "e") as engine:
        assert engine.statistics().recovery.begin_lsn == 1


def test_lost_pages_whose_log_has_left_the_disk_are_named(tmp_path: Path) -> None:
    """The log alone would give a part of the index; a restore gives all of it."""
    store = (tmp_path / "store").as_uri()
    with tidelog.open_engine(tmp_path / "e", store=store, rotate_max_bytes=64 << 10, local_retention_bytes=0) as engine:
        engine.apply(1, tidelog.CreateBucket("b"))
        for seq in range(2, 300):
            engine.apply(seq, tidelog.PutObject("b", f"{seq}", b"v" * 1000))
        engine.update_low_water_mark(engine.applied_seq)
        engine.create_checkpoint()
        engine.ship()
        assert engine.statistics().wal.first_lsn > 1
    (tmp_path / "e" / PAGES).unlink()
    for _ in range(2):
        with pytest.raises(DataError, match=rf"{PAGES} is gone.*Restore the engine from its store"):
            tidelog.open_engine(tmp_path / "e")


def test_a_damaged_checkpoint_file_is_not_believed(tmp_path: Path) -> None:
    """Whichever byte it is: the record in the log says the same."""
    model = filled(tmp_path / "e", 60)
    for part in range(40):
        size = (tmp_path / "e" / MASTER).stat().st_size  # each opening has written another one
        flip(tmp_path / "e" / MASTER, part * size // 40)
        with open_local(tmp_path / "e") as engine:
            assert_same(engine, model)


def test_damage_in_the_log_is_named(tmp_path: Path) -> None:
    """A flipped bit in a record, before others: opening or reading refuses with file and byte, or the LSN."""
    filled(tmp_path / "e")
    files = sorted((tmp_path / "e" / "wal").glob("wal.*.log"), key=lambda path: int(path.name.split(".")[1]))
    chance = random.Random(2)
    for path in files[:-1][:8]:
        byte = chance.randrange(path.stat().st_size)
        flip(path, byte)
        with pytest.raises(DataError) as caught:
            open_and_read(tmp_path / "e")
        assert isinstance(caught.value, CorruptionError) or "LSN" in str(caught.value)
        flip(path, byte)


def open_and_read(directory: Path) -> None:
    """Every state, every value, every record."""
    with open_local(directory) as engine:
        for bucket in engine.list_buckets():
            for seq in range(0, engine.applied_seq + 1, 3):
                read_all(engine, bucket, seq)
        for _ in engine._core.wal.batches(engine._core.wal.first_lsn):
            pass


def read_all(engine: tidelog.Engine, bucket: str, seq: int) -> None:
    """Every object of a bucket at a seq, if it was there."""
    if bucket in engine.list_buckets(seq):
        for item in list(engine.list_objects(bucket, seq=seq)):
            engine.read(bucket, item.key, seq)


def test_a_page_is_made_from_what_was_shipped(tmp_path: Path) -> None:
    """The files of the log have left the disk: its pages come from the objects that they became."""
    store = f"file://{tmp_path}/store"
    settings: dict[str, Any] = {
        "buffer_pool_bytes": SMALL.buffer_pool_bytes,
        "rotate_max_bytes": 20_000,
        "local_retention_bytes": 0,
    }
    with tidelog.open_engine(tmp_path / "e", store=store, **settings) as engine:
        engine.apply(1, tidelog.CreateBucket("b"))
        for first in range(2, 3000, 100):
            engine.apply_many(
                [
                    (seq, tidelog.PutObject("b", f"k{seq * 7919 % 5000:05d}", b"v" * 150))
                    for seq in range(first, first + 100)
                ]
            )
        engine.update_low_water_mark(engine.applied_seq)
        engine.create_checkpoint()
        engine.ship()
        assert engine.statistics().wal.first_lsn > 1000
        digest = engine.digest()
    pages = tmp_path / "e" / PAGES
    for page in range(2, pages.stat().st_size // PAGE, 2):
        flip(pages, page * PAGE + 100)
    with tidelog.open_engine(tmp_path / "e") as engine:
        assert engine.digest() == digest
        assert engine._core.tree.check().pages > 10


def test_checkpoint_whose_history_begins_behind_everything_is_told(tmp_path: Path) -> None:
    """It has a good checksum, so nobody flipped a bit in it; but the newest state cannot be read."""
    filled(tmp_path / "e", 30)
    state, _ = read_master(LocalFiles(), tmp_path / "e")
    assert state is not None
    write_master(LocalFiles(), tmp_path / "e", msgspec.structs.replace(state, history_start_seq=2**62))
    with open_local(tmp_path / "e") as engine, pytest.raises(NotFoundError, match="no longer kept"):
        engine.digest()


def test_claim_that_is_no_file_is_told(tmp_path: Path) -> None:
    """As every other file of an engine that is a link."""
    url = f"file://{tmp_path}/store"
    tidelog.open_engine(tmp_path / "e", store=url).close()
    claim = tmp_path / "e" / "wal" / "owner.json"
    claim.unlink()
    claim.symlink_to("/nowhere")
    with pytest.raises(InputError, match=r"owner\.json is a symbolic link"):
        tidelog.open_engine(tmp_path / "e", store=url)
