"""The buffer pool: bounds, eviction, the log before the page, taking back, and damaged pages."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
from tests.engine.tree_workbench import PATH, meanwhile, new_files

from tidelog.engine.btree import page
from tidelog.engine.btree.buffer_pool import MIN_PAGES, BufferPool
from tidelog.engine.btree.page import PAGE_BYTES, ROOT, new_page
from tidelog.engine.btree.page_file import PageFile
from tidelog.errors import CorruptionError, DataError, InternalError
from tidelog.files import Files

CAPACITY = MIN_PAGES
DEADLINE_SECONDS = 120


class Durability:
    """A log whose records are durable up to a number."""

    def __init__(self) -> None:
        self.durable_lsn = 1 << 60
        self.waited: list[int] = []

    def wait(self, lsn: int) -> None:
        """As a log that syncs at once would."""
        self.waited.append(lsn)
        self.durable_lsn = max(self.durable_lsn, lsn)

    def has(self, lsn: int) -> bool:
        """Whether a record is durable."""
        return lsn <= self.durable_lsn


def pool_of(files: Files, log: Durability | None = None) -> BufferPool:
    """A small pool over a new file with pages 1 to 40, each with its number in it."""
    file = PageFile.create(files, PATH)
    for number in range(1, 41):
        made = new_page(number, 0)
        page.insert(made, b"number", b"%d" % number, 1)
        file.write_page(number, page.sealed(made))
    file.sync()
    log = log or Durability()
    return BufferPool(file, CAPACITY * PAGE_BYTES, wait_durable=log.wait, is_durable=log.has)


def change(pool: BufferPool, page_id: int, lsn: int, value: bytes = b"changed") -> None:
    """As the applier does it."""
    pool.load(page_id)
    assert pool.hold(page_id)
    page.replace(pool.pages[page_id], b"number", value, lsn)
    pool.dirtied(page_id, lsn)


def in_file(pool: BufferPool, page_id: int) -> bytes | None:
    """What the file has for a page."""
    return page.get(pool._file.read_page(page_id), b"number")


def eventually(condition: Callable[[], bool]) -> None:
    """Waits for another thread."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_number_of_pages_is_bounded() -> None:
    """However many are asked for, no more than the capacity stay."""
    pool = pool_of(new_files())
    for number in range(1, 41):
        pool.load(number)
        assert len(pool.pages) <= CAPACITY
    statistics = pool.statistics()
    assert (statistics.misses, statistics.evictions) == (40, 40 - CAPACITY)
    assert statistics.size_bytes == statistics.capacity_bytes == CAPACITY * PAGE_BYTES


def test_the_first_page_goes_unless_it_was_used() -> None:
    """Second chance: a page that was used since it came stays for another round; the root stays for ever."""
    pool = pool_of(new_files())
    for number in range(1, CAPACITY + 1):
        pool.load(number)
    pool.pages[2][38] = 1
    pool.load(30)
    assert 2 in pool.pages
    assert 3 not in pool.pages
    for number in range(20, 40):
        pool.load(number)
    assert 2 not in pool.pages
    assert ROOT in pool.pages


def test_pinned_and_held_pages_stay() -> None:
    """What somebody works on is not evicted; afterwards it may be."""
    pool = pool_of(new_files())
    pool.load(2)
    assert pool.pin(2)
    assert pool.pin(2)
    assert not pool.pin(3)
    change(pool, 4, 9)
    pool.unpin(2)
    for number in range(10, 41):
        pool.load(number)
    assert {2, 4} <= set(pool.pages)
    pool.unpin(2)
    pool.settle()
    for number in range(10, 41):
        pool.load(number)
    assert {2, 4}.isdisjoint(pool.pages)


def test_more_held_pages_than_fit_are_kept_and_told() -> None:
    """The bound gives way rather than a change; the applier is told to settle long before."""
    pool = pool_of(new_files())
    for number in range(1, CAPACITY // 2 + 1):
        change(pool, number, 9)
    told = [pool.wants_settling]
    for number in range(CAPACITY // 2 + 1, 31):
        change(pool, number, 9)
    told.append(pool.wants_settling)
    assert told == [False, True]
    assert len(pool.pages) == 30
    pool.settle()
    pool.load(40)
    assert len(pool.pages) <= CAPACITY


def test_a_changed_page_is_written_before_it_leaves() -> None:
    """Steal: it may leave before anybody flushes, and comes back as it was."""
    pool = pool_of(new_files())
    change(pool, 5, 9)
    pool.settle()
    for number in range(10, 41):
        pool.load(number)
    assert 5 not in pool.pages
    assert 5 not in pool.dirty_pages()
    assert in_file(pool, 5) == b"changed"
    pool.load(5)
    assert page.lsn_of(pool.pages[5]) == 9


def test_nothing_is_written_before_it_must() -> None:
    """No-force: a settled change is in memory only."""
    pool = pool_of(new_files())
    change(pool, 5, 9)
    pool.settle()
    assert in_file(pool, 5) == b"5"
    assert pool.dirty_pages() == {5: 9}


def test_the_log_is_durable_before_the_page_is_written() -> None:
    """Every write waits for the page's LSN."""
    log = Durability()
    pool = pool_of(new_files(), log)
    log.durable_lsn = 1
    change(pool, 5, 9)
    pool.settle()
    pool.write_page(5)
    assert set(log.waited) == {9}


def test_pages_whose_records_are_not_durable_yet_go_last() -> None:
    """Whoever reads does not wait for a log that is busy, as long as another page can go."""
    log = Durability()
    pool = pool_of(new_files(), log)
    log.durable_lsn = 8
    for number in (5, 6, 7):
        change(pool, number, 9)
    pool.settle()
    for number in range(10, 41):
        pool.load(number)
    assert log.waited == []
    assert {5, 6, 7} <= set(pool.pages)
    log.durable_lsn = 9
    for number in range(10, 41):
        pool.load(number)
    assert {5, 6, 7}.isdisjoint(pool.pages)


def test_a_page_ahead_of_its_log_is_never_written() -> None:
    """If the wait did not do its work, the check finds it."""
    log = Durability()
    pool = pool_of(new_files(), log)
    change(pool, 5, 9)
    pool.settle()
    log.durable_lsn = 8
    pool._wait_durable = lambda lsn: None
    with pytest.raises(InternalError, match="page 5 would be written before its record 9 is durable"):
        pool.flush([5])
    assert in_file(pool, 5) == b"5"
    assert pool.dirty_pages() == {5: 9}


def test_a_flush_makes_pages_clean_and_durable() -> None:
    """After a crash the file has what was flushed."""
    files = new_files()
    pool = pool_of(files)
    change(pool, 5, 9)
    change(pool, 6, 10)
    pool.settle()
    pool.flush(pool.dirty_pages())
    assert pool.dirty_pages() == {}
    assert pool.statistics().flushes == 2
    files.crash()
    assert page.get(PageFile(files.after_crash("lose"), PATH).read_page(5), b"number") == b"changed"


def test_a_page_that_is_changed_while_it_is_written_stays_dirty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the file has is the page before: a checkpoint that called it clean would lose the change."""
    pool = pool_of(new_files())
    change(pool, 3, 10)
    pool.settle()
    write_page = pool._file.write_page

    def changed_meanwhile(page_id: int, image: bytes) -> None:
        change(pool, page_id, 20, b"newer")
        pool.settle()
        write_page(page_id, image)

    monkeypatch.setattr(pool._file, "write_page", changed_meanwhile)
    pool.write_page(3)
    monkeypatch.undo()
    assert 3 in pool.dirty_pages()
    pool.flush(pool.dirty_pages())
    assert in_file(pool, 3) == b"newer"


def test_a_held_page_is_in_the_table_of_dirty_ones() -> None:
    """A checkpoint that begins between a change and its settling would not wait for it."""
    pool = pool_of(new_files())
    change(pool, 3, 10)
    pool.settle()
    change(pool, 3, 20)
    assert pool.dirty_pages() == {3: 10}


def test_a_flush_waits_until_changes_are_settled() -> None:
    """It asks for the page as it is now, and gets it with the records that the log has by then."""
    pool = pool_of(new_files())
    change(pool, 5, 9)
    flusher = threading.Thread(target=pool.flush, args=([5],))
    flusher.start()
    flusher.join(0.05)
    assert flusher.is_alive()
    pool.settle()
    flusher.join(DEADLINE_SECONDS)
    assert in_file(pool, 5) == b"changed"
    assert pool.dirty_pages() == {}


def test_a_flush_does_not_wait_twice_for_a_page_that_is_always_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes what was settled meanwhile, and the table says from where on the file lacks changes."""
    log = Durability()
    pool = pool_of(new_files(), log)
    change(pool, 5, 9, b"first")
    flusher, has_begun = threading.Thread(target=pool.flush, args=([5],)), threading.Event()
    monkeypatch.setattr(pool, "_wait_beforehand", lambda page_id: has_begun.set())
    with pool._writing:  # the flusher cannot look before the page is held again
        flusher.start()
        assert has_begun.wait(DEADLINE_SECONDS)
        pool.settle()
        change(pool, 5, 10, b"second")
    flusher.join(DEADLINE_SECONDS)
    assert not flusher.is_alive()
    assert in_file(pool, 5) == b"first"
    assert pool.dirty_pages() == {5: 10}
    pool.settle()
    assert pool.dirty_pages() == {5: 10}


def test_whoever_holds_pages_must_settle_before_flushing() -> None:
    """Waiting for oneself is a bug that is named, not a thread that hangs."""
    pool = pool_of(new_files())
    change(pool, 5, 9)
    with pytest.raises(InternalError, match="changes are not committed yet"):
        pool.flush([5])


def test_changes_are_taken_back() -> None:
    """Bytes, LSN and dirty state are what they were; new pages are gone."""
    pool = pool_of(new_files())
    change(pool, 5, 9, b"settled")
    pool.settle()
    pool.load(6)
    before = {number: bytes(pool.pages[number]) for number in (5, 6)}
    pool.settle()
    change(pool, 5, 10, b"refused")
    change(pool, 6, 11, b"refused")
    pool.new(50, 0, held=True)
    pool.dirtied(50, 12)
    pool.take_back()
    assert {number: bytes(pool.pages[number]) for number in (5, 6)} == before
    assert 50 not in pool.pages
    assert pool.dirty_pages() == {5: 9}
    change(pool, 5, 10, b"again")
    pool.settle()
    assert page.get(pool.pages[5], b"number") == b"again"


def test_a_page_that_was_flushed_while_held_is_clean_when_taken_back() -> None:
    """The file has what the page was, so there is nothing to write."""
    pool = pool_of(new_files())
    change(pool, 5, 9, b"settled")
    pool.settle()
    change(pool, 5, 10, b"refused")
    settlings = pool._settlings
    pool._settlings += 1  # as if the flush had begun before the last settling
    pool._write_image(5, page.sealed(pool._held[5] or b""))
    pool._settlings = settlings
    pool.take_back()
    assert pool.dirty_pages() == {}
    assert in_file(pool, 5) == b"settled"


def test_a_damaged_page_is_rebuilt() -> None:
    """With a rebuilder the page is made again and written; without one, or with a bad one, the caller is told."""
    files = new_files()
    pool = pool_of(files)
    pool._file.write_page(7, b"\xff" * PAGE_BYTES)
    with pytest.raises(CorruptionError, match="page 7"):
        pool.load(7)
    pool.rebuild = lambda page_id: new_page(page_id + 1, 0)
    with pytest.raises(DataError, match="page 7 was rebuilt from the log and is invalid"):
        pool.load(7)
    rebuilt = new_page(7, 0)
    page.insert(rebuilt, b"number", b"seven", 4)
    pool.rebuild = lambda page_id: rebuilt
    pool.load(7)
    assert pool.dirty_pages() == {7: 4}
    pool.flush([7])
    assert in_file(pool, 7) == b"seven"


def test_a_page_that_its_log_knows_nothing_of_is_refused() -> None:
    """The log has lost its end: what is in the page was never applied, as far as the log goes."""
    log = Durability()
    pool = pool_of(new_files(), log)
    log.durable_lsn = 0
    with pytest.raises(DataError, match="page 7 was changed at LSN 1, after the end of the log"):
        pool.load(7)


def test_a_page_is_read_once_for_all_who_miss_it() -> None:
    """Threads that miss the same page share one read, and a failure keeps nobody waiting."""
    pool = pool_of(new_files())
    threads = [threading.Thread(target=pool.load, args=(9,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
    assert pool.statistics().misses == 1
    with pytest.raises(CorruptionError):
        pool.load(99)
    with pytest.raises(CorruptionError):
        pool.load(99)


def apply_change(pool: BufferPool, number: int, lsn: int) -> None:
    """As the applier does it while others evict."""
    while not pool.hold(number):
        pool.load(number)
    page.replace(pool.pages[number], b"number", b"%d" % lsn, lsn)
    pool.dirtied(number, lsn)
    if pool.wants_settling:
        pool.settle()


def test_readers_appliers_and_flushers_at_once_lose_nothing() -> None:
    """Under eviction from all sides, every settled change is found, in memory or in the file."""
    pool = pool_of(new_files())
    source = random.Random(4)
    values = dict[int, bytes]()

    def read() -> None:
        pool.load(random.randrange(1, 41))

    with meanwhile(read, read, lambda: pool.flush(pool.dirty_pages())):
        for lsn in range(2, 3000):
            number = source.randrange(1, 41)
            apply_change(pool, number, lsn)
            values[number] = b"%d" % lsn
        pool.settle()
    pool.flush(pool.dirty_pages())
    assert {number: in_file(pool, number) for number in values} == values


def test_pages_on_the_way_down_do_not_drive_each_other_out() -> None:
    """Where the log is still writing all others, a page in use stays, and the pool waits for the log instead."""
    log = Durability()
    pool = pool_of(new_files(), log)
    log.durable_lsn = 1
    for number in range(1, CAPACITY):
        change(pool, number, 100 + number)
        pool.settle()
    pool.load(30)
    pool.pages[30][38] = 1  # somebody has come by
    pool.load(31)
    assert {30, 31} <= set(pool.pages)
    assert log.waited
