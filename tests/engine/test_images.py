"""Images of pages in the log: whatever redo begins with, it needs no page from the file that may have been torn."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engine.engines import RandomEntries, open_local

from tidelog.engine.btree.page import IMAGE, SPLIT, decode, record_updates
from tidelog.engine.engine import Engine
from tidelog.engine.entry import CreateBucket, PutObject
from tidelog.engine.wal.record_header import CHECKPOINT_BEGIN, CHECKPOINT_END, decode_header
from tidelog.engine.wal.records import CheckpointEndRecord, decode_record


def assert_images_come_first(engine: Engine) -> int:
    """Behind each beginning of a checkpoint, pages begin with an image or are split from such; how many begin there."""
    changed: set[int] = set()
    images = 0
    for frames in engine._core.wal.batches(1):
        for lsn, payload in enumerate(frames.payloads(), frames.first_offset):
            header = decode_header(payload, lsn)
            if header.kind == CHECKPOINT_BEGIN:
                changed = set()
            for update in decode(record_updates(payload, lsn), lsn):
                is_split = update.what == SPLIT and int.from_bytes(update.value, "little") in changed
                assert update.page in changed or update.what == IMAGE or is_split, f"page {update.page}, LSN {lsn}"
                images += update.page not in changed
                changed.add(update.page)
    return images


def long_keys(engine: Engine, first_seq: int, count: int) -> None:
    """Entries that split pages of all levels: keys so long that few fit into a page."""
    puts = [
        (seq, PutObject("b", f"{seq * 7919 % 1000:04d}" + "long" * 220, b"v"))
        for seq in range(first_seq, first_seq + count)
    ]
    engine.apply_many(puts)


@pytest.mark.parametrize("reopens", [False, True])
def test_the_first_change_after_a_checkpoint_is_an_image(tmp_path: Path, reopens: bool) -> None:
    """Of leaves and inner pages, by puts, splits and rollbacks, and after opening again."""
    engine = open_local(tmp_path / "e")
    engine.apply(1, CreateBucket("b"))
    for round_ in range(6):
        long_keys(engine, 2 + 100 * round_, 60)
        engine.create_checkpoint()
        engine.rollback_to(40 + 100 * round_)
        if reopens:
            engine.close()
            engine = open_local(tmp_path / "e")
    assert assert_images_come_first(engine) > 50
    engine.close()


def test_images_of_random_work(tmp_path: Path) -> None:
    """All kinds of entries, cut into pieces by checkpoints that nobody announced."""
    source = RandomEntries("images", keys=200)
    with open_local(tmp_path / "e") as engine:
        for _ in range(6):
            engine.apply_many(source.entries(60, engine.applied_seq + 1))
            engine.create_checkpoint()
        assert assert_images_come_first(engine) > 6


def test_a_checkpoint_begins_before_it_ends_and_its_pages_are_on_the_disk(tmp_path: Path) -> None:
    """Each end names a beginning that is there, and the file has every page that was dirty at it."""
    with open_local(tmp_path / "e") as engine:
        engine.apply(1, CreateBucket("b"))
        for round_ in range(3):
            long_keys(engine, 2 + 100 * round_, 60)
            begun = engine._core.pool.dirty_pages()
            engine.create_checkpoint()
            for page in begun:
                engine._core.page_file.read_page(page)
        begins, ends = [], []
        for frames in engine._core.wal.batches(1):
            for lsn, payload in enumerate(frames.payloads(), frames.first_offset):
                if payload[0] == CHECKPOINT_BEGIN:
                    begins.append(lsn)
                elif payload[0] == CHECKPOINT_END:
                    record = decode_record(payload, lsn)
                    assert isinstance(record, CheckpointEndRecord)
                    ends.append(record.state.begin_lsn)
        assert begins == ends
        assert len(ends) == 3
