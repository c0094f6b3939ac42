"""A disk that is full or fails: what was accepted stays what it is, and nothing is hidden from the next opening."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from pathlib import Path

import pytest
from tests.engine.engines import SMALL, open_local
from tests.engine.model import batch

from tidelog.engine.btree.page import PAGE_BYTES
from tidelog.engine.engine import Engine
from tidelog.engine.entry import CreateBucket, PutObject
from tidelog.engine.settings import EngineSettings
from tidelog.errors import DiskFullError, LogFailedError, TidelogError
from tidelog.log import writer
from tidelog.testing import Crash, FaultyFiles
from tidelog.testing.crash import quiet_crashes
from tidelog.testing.survival import Policy

DIRECTORY = Path("/data/engine")
LATE = PutObject("b", "late", b"2" * 500)


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that waits for room on its disk looks for it a hundred times a second."""
    monkeypatch.setattr(writer, "_FULL_DISK_RETRY_SECONDS", 0.01)


def used_bytes(files: FaultyFiles) -> int:
    """What is on the disk."""
    return sum(len(content or b"") for content in files.tree().values())


def with_accepted_entry(files: FaultyFiles) -> Engine:
    """An engine whose last entry is in the log's memory alone: there was no room. Now there is."""
    engine = open_local(DIRECTORY, files)
    engine.apply_many([(1, CreateBucket("b")), (2, PutObject("b", "early", b"1" * 500))])
    files.capacity_bytes = used_bytes(files) + 50
    with pytest.raises(DiskFullError):
        engine.apply(3, LATE)
    assert engine.applied_seq == 2
    files.capacity_bytes = None
    wait_for_room(engine)
    return engine


def wait_for_room(engine: Engine) -> None:
    """The log looks once in a while whether it can go on."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with contextlib.suppress(DiskFullError):
            engine._wal.wait_durable(engine._wal.log.next_offset - 1)
            return
        time.sleep(0.01)


@pytest.mark.parametrize("ending", ["checkpoint", "close", "crash"])
def test_an_entry_that_was_accepted_on_a_full_disk_is_known_after_opening(ending: str) -> None:
    """Its records are on the disk by now, so a checkpoint counts it, and the same entry again does nothing."""
    files = FaultyFiles()
    engine = with_accepted_entry(files)
    if ending == "close":
        engine.close()
    else:
        if ending == "checkpoint":
            assert engine.create_checkpoint() == 3
        files.crash()
        files = files.after_crash("keep")
    with open_local(DIRECTORY, files) as again:
        assert again.applied_seq == 3
        assert again.apply(3, LATE).applied
        assert again.read("b", "late").data == LATE.data


def test_a_rollback_to_an_accepted_entry_makes_it_visible() -> None:
    """A rollback waits for the disk: what stays is there then."""
    files = FaultyFiles()
    engine = with_accepted_entry(files)
    files.capacity_bytes = used_bytes(files) + 50
    with pytest.raises(DiskFullError):
        engine.apply(4, PutObject("b", "thrown away", b"3" * 500))
    files.capacity_bytes = None
    wait_for_room(engine)
    engine.rollback_to(3)
    assert engine.applied_seq == 3
    assert [item.key for item in engine.list_objects("b")] == ["early", "late"]
    engine.close()


def full_with_accepted_entry(files: FaultyFiles) -> Engine:
    """An engine that has read nothing since it was opened, and an entry in memory that there is no room for."""
    engine = open_local(DIRECTORY, files)
    puts = [(seq, PutObject("b", f"k{seq:05}", b"1" * 300)) for seq in (2, 3)]
    engine.apply_many([(1, CreateBucket("b")), *puts])
    files.capacity_bytes = used_bytes(files) + 50
    with pytest.raises(DiskFullError):
        engine.apply(4, LATE)
    return engine


def test_the_first_read_since_opening_works_on_a_full_disk() -> None:
    """Without this an engine that was never read from could not be read at all until there was room again."""
    files = FaultyFiles()
    engine = full_with_accepted_entry(files)
    assert engine.read("b", "k00002").data == b"1" * 300
    assert [item.key for item in engine.list_objects("b")] == ["k00002", "k00003"]
    assert engine.read("b", "k00003", seq=3).seq == 3
    files.capacity_bytes = None
    engine.close()


def test_an_engine_that_is_opened_on_a_full_disk_can_be_read() -> None:
    """With a checkpoint, opening and reading write nothing, and neither waits for an entry that is accepted then."""
    files = FaultyFiles()
    engine = full_with_accepted_entry(files)
    files.capacity_bytes = None
    wait_for_room(engine)
    engine.create_checkpoint()
    engine.close()
    files.capacity_bytes = used_bytes(files)
    again = open_local(DIRECTORY, files)
    with pytest.raises(DiskFullError):
        again.apply(again.applied_seq + 1, PutObject("b", "later", b"2" * 500))
    assert again.read("b", "k00002").data == b"1" * 300
    files.capacity_bytes = None
    again.close()


def test_an_index_that_is_larger_than_its_memory_can_be_read_on_a_full_disk() -> None:
    """Pages that cannot be written stay in memory, others leave in their place, and memory stays bounded."""
    files = FaultyFiles()
    settings = EngineSettings(buffer_pool_bytes=16 * PAGE_BYTES)
    engine = open_local(DIRECTORY, files, settings)
    puts = [(seq, PutObject("b", f"{seq:05}" * 40, b"")) for seq in range(2, 1000)]
    engine.apply_many([(1, CreateBucket("b")), *puts])
    engine.create_checkpoint()
    engine.apply_many([(1000 + seq, PutObject("b", f"{seq:05}" * 40, b"x")) for seq in range(2, 1000, 60)])
    pool = engine._core.pool
    assert pool.statistics().dirty > 3
    files.capacity_bytes = used_bytes(files)
    files.fail("write_at", times=None, error=errno.ENOSPC, matching="pages.db")
    with pytest.raises(DiskFullError):
        engine.apply(2000, LATE)
    assert len([engine.read("b", f"{seq:05}" * 40).data for seq in range(2, 1000)]) == 998
    assert len(pool.pages) <= pool.capacity_pages + 16
    files.heal()
    engine.close()


def killed(files: FaultyFiles, engine: Engine, policy: Policy = "keep") -> FaultyFiles:
    """The disk as the next process finds it, still as full."""
    files.crash()
    with contextlib.suppress(Crash, TidelogError), quiet_crashes():
        engine.close(checkpoint=False)
    left = files.after_crash(policy)
    left.capacity_bytes = used_bytes(left)
    return left


@pytest.mark.parametrize("count", [3, 2000])
def test_an_engine_that_died_before_its_first_checkpoint_is_opened_and_read_on_a_full_disk(count: int) -> None:
    """Loss prevented: it asked for room for a new page file. An index that is larger than its memory stays there."""
    files = FaultyFiles()
    settings = EngineSettings(buffer_pool_bytes=16 * PAGE_BYTES)
    engine = open_local(DIRECTORY, files, settings)
    puts = [(seq, PutObject("b", f"{seq:05}" * 40, b"1" * 300)) for seq in range(2, count)]
    engine.apply_many([(1, CreateBucket("b")), *puts])
    digest = engine.digest()
    files = killed(files, engine, "lose")
    again = open_local(DIRECTORY, files, settings)
    assert (again.applied_seq, again.digest()) == (count - 1, digest)
    assert len([again.read("b", put.key).data for _, put in puts]) == count - 2
    for work in (lambda: again.apply(count, LATE), again.create_checkpoint):
        with pytest.raises(DiskFullError):
            work()
    assert again.digest() == digest
    files.capacity_bytes = None
    wait_for_room(again)
    assert again.apply(count, LATE).applied
    assert again.create_checkpoint() == count
    digest = again.digest()
    again.close()
    with open_local(DIRECTORY, files, settings) as last:
        assert last.digest() == digest
        assert last.verify()


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_a_batch_that_a_full_disk_has_cut_is_taken_back_without_room(has_checkpoint: bool) -> None:
    """Reads work at once, and opening again takes it back again, until there is room for what says so."""
    files = FaultyFiles()
    engine = open_local(DIRECTORY, files)
    engine.apply_many([(1, CreateBucket("b")), (2, PutObject("b", "early", b"1" * 500))])
    if has_checkpoint:
        engine.create_checkpoint()
    digest = engine.digest()
    files.capacity_bytes = used_bytes(files) + 500_000
    with pytest.raises(DiskFullError):
        engine.apply(3, batch(*(PutObject("b", f"k{number}", b"x" * 60_000) for number in range(20))))
    for _ in range(2):
        files = killed(files, engine)
        engine = open_local(DIRECTORY, files)
        assert engine._core.recovery.undone_seq == 3
        assert (engine.applied_seq, engine.digest()) == (2, digest)
        assert engine.read("b", "early").data == b"1" * 500
    files.capacity_bytes = None
    wait_for_room(engine)
    assert engine.apply(3, LATE).applied
    engine.close()
    with open_local(DIRECTORY, files) as again:
        assert again.digest(2) == digest
        assert again.verify()


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_a_rollback_that_a_full_disk_has_cut_is_finished_without_room(has_checkpoint: bool) -> None:
    """The state that was asked for can be read; entries wait."""
    files = FaultyFiles()
    engine, digest = failed_in_a_rollback(files, has_checkpoint=has_checkpoint, heals=False)
    files = killed(files, engine)
    again = open_local(DIRECTORY, files)
    assert again._core.recovery.finished_rollback
    assert (again.applied_seq, again.digest()) == (5, digest)
    with pytest.raises(DiskFullError):
        again.apply(6, LATE)
    files.capacity_bytes = None
    wait_for_room(again)
    assert again.apply(6, LATE).applied
    again.close()
    with open_local(DIRECTORY, files) as last:
        assert last.digest(5) == digest
        assert last.verify()


def failed_in_a_rollback(files: FaultyFiles, *, has_checkpoint: bool = False, heals: bool = True) -> tuple[Engine, str]:
    """An engine that could not finish a rollback to seq 5, and the digest of that seq."""
    engine = open_local(DIRECTORY, files)
    puts = [(seq, PutObject("b", f"k{seq}", b"1" * 500)) for seq in range(2, 100)]
    engine.apply_many([(1, CreateBucket("b")), *puts])
    digest = engine.digest(5)
    if has_checkpoint:
        engine.create_checkpoint()
    files.capacity_bytes = used_bytes(files) + 3000
    with pytest.raises(LogFailedError, match=r"no room to finish a rollback.*Make room, close the engine and open it"):
        engine.rollback_to(5)
    if heals:
        files.capacity_bytes = None
        wait_for_room(engine)
    return engine, digest


def test_a_failed_engine_makes_no_checkpoint() -> None:
    """It would hide the rollback that is to be finished. Nobody waits for ever, and opening again finishes it."""
    files = FaultyFiles()
    engine, digest = failed_in_a_rollback(files)
    heard: list[BaseException] = []

    def checkpoint() -> None:
        try:
            engine._core.checkpointer.checkpoint()
        except LogFailedError as error:
            heard.append(error)

    thread = threading.Thread(target=checkpoint, daemon=True)
    thread.start()
    thread.join(120)
    assert len(heard) == 1
    with pytest.raises(LogFailedError, match="opened again"):
        engine.apply(6, CreateBucket("c"))
    engine.close()
    with open_local(DIRECTORY, files) as again:
        assert again._core.recovery.finished_rollback or again.applied_seq == 5
        assert again.digest() == digest
        assert again.apply(6, PutObject("b", "k6", b"another")).applied


def test_a_checkpoint_under_way_ends_when_the_engine_fails() -> None:
    """A page that it waits for will never be settled; it is told so."""
    files = FaultyFiles()
    engine = open_local(DIRECTORY, files)
    engine.apply(1, CreateBucket("b"))
    pool = engine._core.pool
    assert pool.hold(1)
    heard: list[BaseException] = []

    def flush() -> None:
        try:
            pool.write_page(1)
        except LogFailedError as error:
            heard.append(error)

    thread = threading.Thread(target=flush, daemon=True)
    thread.start()
    engine._core.fail()
    thread.join(120)
    assert len(heard) == 1
    files.crash()


def test_a_batch_that_the_log_took_in_part_fails_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only opening again can take it back; until then the engine says so, and reads what was there."""
    files = FaultyFiles()
    engine = open_local(DIRECTORY, files, SMALL)
    engine.apply_many([(1, CreateBucket("b")), (2, PutObject("b", "early", b"1" * 500))])
    append_many, calls = engine._wal.log.append_many, []

    def refuse_second(payloads: list[bytes], timeout_seconds: float | None = None) -> object:
        calls.append(len(payloads))
        if len(calls) == 2:
            raise DiskFullError("full")
        return append_many(payloads, timeout_seconds=timeout_seconds)

    monkeypatch.setattr(engine._wal.log, "append_many", refuse_second)
    large = batch(*(PutObject("b", f"k{number}", b"x" * 60_000) for number in range(120)))
    with pytest.raises(DiskFullError):
        engine.apply(3, large)
    with pytest.raises(LogFailedError, match="opened again"):
        engine.apply(3, large)
    assert [item.key for item in engine.list_objects("b")] == ["early"]
    engine.close()
    with open_local(DIRECTORY, files) as again:
        assert again.applied_seq == 2
        assert again.apply(3, large).applied
        assert len(list(again.list_objects("b"))) == 121


def test_an_entry_that_the_log_refuses_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in pages nor in what is known of buckets; the same call succeeds when the log takes it."""
    engine = open_local(DIRECTORY, FaultyFiles())
    engine.apply(1, CreateBucket("b"))
    append_many = engine._wal.log.append_many
    many = [(seq, PutObject("b", f"{seq:05d}" * 100, b"v")) for seq in range(3, 60)]

    def refuse(payloads: list[bytes], timeout_seconds: float | None = None) -> object:
        raise DiskFullError("full")

    before, next_page = engine.digest(), engine._core.tree.next_page
    monkeypatch.setattr(engine._wal.log, "append_many", refuse)
    with pytest.raises(DiskFullError):
        engine.apply_many([(2, CreateBucket("c")), *many])
    monkeypatch.setattr(engine._wal.log, "append_many", append_many)
    assert (engine.applied_seq, engine.digest(), engine._core.tree.next_page) == (1, before, next_page)
    assert engine._buckets.created("c", 2) is None
    engine._core.tree.check()
    assert [result.status for result in engine.apply_many([(2, CreateBucket("c")), *many])] == ["applied"] * 58
    engine._core.tree.check()
    engine.close()


def test_nothing_is_visible_before_it_is_on_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads while the sync goes on sees the state before."""
    engine = open_local(DIRECTORY, FaultyFiles())
    commit, seen = engine._wal.commit, []

    def looking() -> int:
        seen.append((engine.applied_seq, engine.list_buckets()))
        return commit()

    monkeypatch.setattr(engine._wal, "commit", looking)
    engine.apply(7, CreateBucket("b"))
    assert seen == [(0, [])]
    assert engine.list_buckets() == ["b"]
    engine.close()
