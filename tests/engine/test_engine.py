"""Applying and reading: an engine is what the model says, at every seq, now and after it was opened again."""

from __future__ import annotations

import random
import time
from pathlib import Path
from threading import Thread

import pytest
from tests.engine.engines import RandomEntries, assert_same, is_missing, open_local
from tests.engine.model import Model, batch

from tidelog.engine.btree.page import PAGE_BYTES
from tidelog.engine.entry import CopyObject, CreateBucket, DeleteBucket, DeleteObject, Entry, ObjectInfo, PutObject
from tidelog.errors import ClosedError, InputError, LockedError, NotFoundError


@pytest.mark.parametrize("seed", range(12))
def test_is_what_the_model_says_at_every_seq(tmp_path: Path, seed: int) -> None:
    """Random entries, one by one and many at once: every state is right while it is open, and after opening again."""
    entries = RandomEntries(seed).entries(150)
    model = Model()
    with open_local(tmp_path / "e") as engine:
        for begin in range(0, len(entries), 10):
            some = entries[begin : begin + 10]
            results = engine.apply_many(some) if begin % 20 else [engine.apply(*one) for one in some]
            for (seq, entry), result in zip(some, results, strict=True):
                assert (result.status != "refused") is model.apply(seq, entry)
            if begin % 50 == 0:
                engine.create_checkpoint()
        assert_same(engine, model, list(model.states))
    with open_local(tmp_path / "e") as engine:
        assert_same(engine, model, list(model.states))
        engine._core.tree.check()


def test_values_of_every_size_come_back(tmp_path: Path) -> None:
    """From nothing to several megabytes, with metadata and without."""
    sizes = [0, 1, 100, 124, 125, 128, 1000, 8192, 70_000, 5_000_000]
    with open_local(tmp_path / "e") as engine:
        engine.apply(1, CreateBucket("b"))
        for seq, size in enumerate(sizes, 2):
            engine.apply(seq, PutObject("b", f"k{size}", b"v" * size, {"size": size, "name": "x", "raw": b"\0"}))
        for size in sizes:
            found = engine.read("b", f"k{size}")
            assert found.data == b"v" * size
            assert found.metadata == {"name": "x", "raw": b"\0", "size": size}
            assert found.tier == "hot"


def test_before_the_first_entry_there_is_nothing(tmp_path: Path) -> None:
    """All marks are 0, there are no buckets, and the state before the first entry can be read."""
    with open_local(tmp_path / "e") as engine:
        assert (engine.applied_seq, engine.low_water_mark, engine.high_water_mark, engine.truncation_mark) == (
            0,
            0,
            0,
            0,
        )
        assert engine.list_buckets() == []
        empty = engine.digest()
        engine.apply(7, CreateBucket("b"))
        assert engine.list_buckets(seq=6) == []
        assert engine.digest(seq=0) == empty != engine.digest()


def test_the_same_entry_again_does_nothing(tmp_path: Path) -> None:
    """An orchestrator may repeat itself, also after the engine was opened again: the results are those of before."""
    entries = RandomEntries("again").entries(60)
    with open_local(tmp_path / "e") as engine:
        results = engine.apply_many(entries)
        lsn = engine.statistics().wal.next_lsn
        assert engine.apply_many(entries) == results
        assert [engine.apply(*one) for one in entries[::7]] == results[::7]
        assert engine.statistics().wal.next_lsn == lsn
    with open_local(tmp_path / "e") as engine:
        assert engine.apply_many(entries) == results


def test_another_entry_under_a_used_seq_is_refused(tmp_path: Path) -> None:
    """And so is a seq that was passed over; nothing changes."""
    with open_local(tmp_path / "e") as engine:
        engine.apply(1, CreateBucket("b"))
        engine.apply(3, PutObject("b", "k", b"v" * 300))
        before = engine.digest()
        wrong: list[tuple[int, Entry]] = [(3, PutObject("b", "k", b"w" * 300)), (2, CreateBucket("c"))]
        for seq, entry in [*wrong, (1, DeleteBucket("b"))]:
            with pytest.raises(InputError, match=f"seq {seq}"):
                engine.apply(seq, entry)
        with pytest.raises(InputError, match="order"):
            engine.apply_many([(9, CreateBucket("x")), (8, CreateBucket("y"))])
        assert engine.digest() == before
        assert engine.applied_seq == 3


@pytest.mark.parametrize("seq", [0, -1, 1 << 64, 1.5, "1", True, None])
def test_what_is_no_seq_is_named(tmp_path: Path, seq: object) -> None:
    """A seq is a whole number of 64 bits from 1 on."""
    with open_local(tmp_path / "e") as engine, pytest.raises(InputError, match="seq"):
        engine.apply(seq, CreateBucket("b"))  # type: ignore[arg-type]


def test_what_the_state_does_not_allow_is_a_result(tmp_path: Path) -> None:
    """No bucket, a bucket twice, a bucket that is not empty, nothing to copy: refused with the reason, seq used."""
    with open_local(tmp_path / "e") as engine:
        refused = [
            engine.apply(1, PutObject("b", "k", b"")),
            engine.apply(2, DeleteBucket("b")),
            engine.apply(3, DeleteObject("b", "k")),
        ]
        engine.apply(4, CreateBucket("b"))
        refused.append(engine.apply(5, CreateBucket("b")))
        refused.append(engine.apply(6, CopyObject("b", "x", "b", "y")))
        engine.apply(7, PutObject("b", "k", b"v"))
        refused.append(engine.apply(8, DeleteBucket("b")))
        refused.append(engine.apply(9, CopyObject("b", "k", "c", "k")))
        assert [result.status for result in refused] == ["refused"] * 7
        assert all(result.reason for result in refused)
        assert engine.apply(10, DeleteObject("b", "nothing")).status == "nothing"
        assert engine.apply(11, DeleteBucket("b", force=True)).applied
        assert engine.applied_seq == 11


def test_a_batch_is_applied_whole_or_not_at_all(tmp_path: Path) -> None:
    """Each operation sees those before it; one that is refused refuses all of them."""
    with open_local(tmp_path / "e") as engine:
        good = batch(
            CreateBucket("b"), PutObject("b", "a", b"1"), CopyObject("b", "a", "b", "c"), DeleteObject("b", "a")
        )
        assert engine.apply(1, good).applied
        assert [item.key for item in engine.list_objects("b")] == ["c"]
        bad = engine.apply(2, batch(PutObject("b", "d", b"2"), PutObject("nowhere", "d", b"2")))
        assert bad.status == "refused"
        assert bad.reason is not None
        assert "operation 1" in bad.reason
        assert is_missing(engine, "b", "d")


def test_a_bucket_made_again_has_none_of_the_old_objects(tmp_path: Path) -> None:
    """Not in the same batch, not later; at old seqs they are still there."""
    with open_local(tmp_path / "e") as engine:
        engine.apply(1, CreateBucket("b"))
        engine.apply(2, PutObject("b", "k", b"old"))
        engine.apply(3, batch(PutObject("b", "j", b"x"), DeleteBucket("b", force=True), CreateBucket("b")))
        assert list(engine.list_objects("b")) == []
        assert is_missing(engine, "b", "k")
        assert is_missing(engine, "b", "j")
        assert engine.read("b", "k", seq=2).data == b"old"
        engine.apply(4, PutObject("b", "k", b"new"))
        assert [version.seq for version in engine.versions("b", "k")] == [4, 2]


@pytest.mark.parametrize("size", [1, 5000])
def test_order_within_a_batch_decides(tmp_path: Path, size: int) -> None:
    """What was put before the bucket was made anew is gone with the old one; what came after it is there."""
    with open_local(tmp_path / "e") as engine:
        engine.apply(1, batch(CreateBucket("b"), CreateBucket("c"), PutObject("c", "source", b"c" * size)))
        engine.apply(
            2,
            batch(
                PutObject("b", "before", b"x" * size),
                CopyObject("c", "source", "b", "copied before"),
                DeleteBucket("b", force=True),
                CreateBucket("b"),
                PutObject("b", "after", b"y" * size),
                CopyObject("c", "source", "b", "copied after"),
            ),
        )
        assert [item.key for item in engine.list_objects("b")] == ["after", "copied after"]
        assert is_missing(engine, "b", "before")
        assert is_missing(engine, "b", "copied before")
        assert engine.read("b", "after").data == b"y" * size
        assert engine.read("b", "copied after").data == b"c" * size


def test_versions_tell_the_history_of_an_object(tmp_path: Path) -> None:
    """Newest first, deletions included; an object that never was is not found."""
    with open_local(tmp_path / "e") as engine:
        engine.apply(1, CreateBucket("b"))
        engine.apply(2, PutObject("b", "k", b"12345"))
        engine.apply(5, DeleteObject("b", "k"))
        engine.apply(9, PutObject("b", "k", b"1"))
        found = [(one.seq, one.size, one.is_deleted) for one in engine.versions("b", "k")]
        assert found == [(9, 1, False), (5, 0, True), (2, 5, False)]
        with pytest.raises(NotFoundError):
            engine.versions("b", "other")


def test_listing_is_by_prefix_and_in_order(tmp_path: Path) -> None:
    """Also across many pages, with keys that begin like others, in any script."""
    keys = sorted([f"a/{number:05d}" for number in range(2000)] + ["a", "a/", "b", "ä", "日本", "a\x01", "a/00001\x01"])
    with open_local(tmp_path / "e") as engine:
        engine.apply(1, CreateBucket("b"))
        engine.apply_many([(seq, PutObject("b", key, b"v")) for seq, key in enumerate(reversed(keys), 2)])
        assert [item.key for item in engine.list_objects("b")] == sorted(keys, key=str.encode)
        assert [item.key for item in engine.list_objects("b", prefix="a/0000")] == sorted(
            (key for key in keys if key.startswith("a/0000")), key=str.encode
        )
        assert list(engine.list_objects("b", prefix="zzz")) == []
        with pytest.raises(NotFoundError):
            engine.list_objects("nowhere")


def test_a_listing_comes_in_pages(tmp_path: Path) -> None:
    """From behind a key on, and so many: all pages together are the whole, with versions and deletions in between."""
    with open_local(tmp_path / "e") as engine:
        engine.apply(1, CreateBucket("b"))
        entries: list[tuple[int, Entry]] = [
            (seq, DeleteObject("b", f"k{seq % 50:03d}") if seq % 7 == 0 else PutObject("b", f"k{seq % 50:03d}", b"v"))
            for seq in range(2, 200)
        ]
        engine.apply_many(entries)
        whole = list(engine.list_objects("b", "k0"))
        pages: list[ObjectInfo] = []
        while page := list(engine.list_objects("b", "k0", start_after=pages[-1].key if pages else None, limit=7)):
            pages += page
        assert pages == whole
        assert list(engine.list_objects("b", "k0", start_after="zzz")) == []
        assert list(engine.list_objects("b", "k0", start_after="a")) == whole
        assert list(engine.list_objects("b", "k0", limit=1 << 80)) == whole
        with pytest.raises(InputError, match="limit"):
            engine.list_objects("b", limit=0)


def test_a_seq_that_is_not_applied_cannot_be_read(tmp_path: Path) -> None:
    """It may come to mean something else."""
    with open_local(tmp_path / "e") as engine:
        engine.apply(3, CreateBucket("b"))
        for look in (engine.list_buckets, engine.digest):
            with pytest.raises(InputError, match="not applied"):
                look(seq=4)


def test_one_process_has_it_open(tmp_path: Path) -> None:
    """A second one is told at once; a closed one says that it is closed."""
    engine = open_local(tmp_path / "e")
    with pytest.raises(LockedError):
        open_local(tmp_path / "e")
    engine.close()
    engine.close()
    with pytest.raises(ClosedError):
        engine.apply(1, CreateBucket("b"))
    with pytest.raises(ClosedError):
        engine.read("b", "k")


def test_closing_ends_transactions_that_wait(tmp_path: Path) -> None:
    """Whoever waits for a lock hears that the engine is gone, and not after half a minute."""
    engine = open_local(tmp_path / "e")
    engine.apply(1, CreateBucket("b"))
    heard: list[BaseException] = []

    def wait() -> None:
        try:
            with engine.transaction() as second:
                second.put("b", "k", b"2")
        except ClosedError as error:
            heard.append(error)

    with engine.transaction() as first:
        first.put("b", "k", b"1")
        waiting = Thread(target=wait)
        waiting.start()
        while not engine.statistics().locks.waiting:
            time.sleep(0.001)
        engine.close()
        waiting.join(120)
    assert len(heard) == 1


def test_old_entries_come_again_after_their_records_have_gone(tmp_path: Path) -> None:
    """They do nothing, and others under their seqs are refused."""
    entries = RandomEntries("gone", buckets=1).entries(80)
    with open_local(tmp_path / "e") as engine:
        engine.apply(1, CreateBucket("bucket-0"))
        engine.apply_many([(seq + 1, entry) for seq, entry in entries])
        engine.create_checkpoint()
        engine._core.wal.seal()
        engine.apply(1000, PutObject("bucket-0", "last", b""))
        engine._core.wal.remove_below(engine._core.checkpointer.redo_lsn)
        assert engine._core.wal.first_lsn > 80
        before = engine.digest()
        assert len(engine.apply_many([(seq + 1, entry) for seq, entry in entries])) == 80
        seq, put = next((seq, one) for seq, one in entries if isinstance(one, PutObject))
        with pytest.raises(InputError, match="another entry"):
            engine.apply(seq + 1, PutObject(put.bucket, put.key, b"another"))
        assert engine.digest() == before


def test_small_objects_take_less_than_twice_their_bytes(tmp_path: Path) -> None:
    """Log and index together, where keys come in no order: besides the data it is names and numbers, once in each."""
    chance = random.Random(1)
    keys = [f"key-{number:012d}" for number in range(4000)]
    chance.shuffle(keys)
    with open_local(tmp_path / "e") as engine:
        engine.apply(1, CreateBucket("b"))
        engine.apply_many([(2 + at, PutObject("b", key, chance.randbytes(200))) for at, key in enumerate(keys)])
        core = engine._core
        taken = core.wal.next_position + core.tree.next_page * PAGE_BYTES
    assert taken < 1.8 * 200 * len(keys)
