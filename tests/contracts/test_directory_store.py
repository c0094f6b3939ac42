"""What only a directory does as an object store: its lock, its times, and what dead writers leave in it."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from tests.campaign import IS_DEEP, examples
from tests.log.workbench import LIMIT_SECONDS

from tidelog.errors import ConflictError, DataError, InputError, NotSupportedError, StoreUnavailableError
from tidelog.store.object_store import ObjectStore
from tidelog.store.shared_directory import LOCK_NAME, DirectoryLock, DirectoryStore
from tidelog.store.urls import open_store

PROCESSES = 8 if IS_DEEP else 4
ROUNDS = examples(20)
SPAWN = multiprocessing.get_context("spawn")
FAR_US = 4_000_000_000_000_000


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    opened = open_store(f"file://{tmp_path}/objects")
    assert isinstance(opened, DirectoryStore)
    return opened


@pytest.fixture
def directory(store: DirectoryStore, tmp_path: Path) -> Path:
    return tmp_path / "objects"


class TestReplacing:
    """`put_if_match` among processes, and against everything else that writes."""

    @pytest.mark.deeper
    def test_of_many_processes_one_wins_each_round(self, store: DirectoryStore) -> None:
        """Processes that start together from the same etag: one replaces, the others are told."""
        store.put("deep/race", b"start")
        ours, theirs = zip(*(SPAWN.Pipe() for _ in range(PROCESSES)), strict=True)
        racers = [SPAWN.Process(target=race, args=(store.url, end)) for end in theirs]
        for racer in racers:
            racer.start()
        try:
            for number in range(ROUNDS):
                etag = store.head("deep/race").etag
                for end in ours:
                    end.send((number, etag))
                won = [name for end in ours if (name := end.recv()) is not None]
                assert len(won) == 1
                assert store.get("deep/race").data.decode() == won[0]
        finally:
            for end, racer in zip(ours, racers, strict=True):
                end.send(None)
                racer.join(120)
        assert [racer.exitcode for racer in racers] == [0] * PROCESSES

    def test_an_etag_never_comes_back(self, store: DirectoryStore) -> None:
        """Inodes come back at once and the clock of files moves in steps of milliseconds: neither is enough."""
        etags = []
        for number in range(200):
            etags.append(store.put_if_absent("a", b"same") if number % 4 == 0 else store.put("a", b"same"))
            etags.append(store.put_if_match("a", b"same", etags[-1]))
            if number % 4 == 3:
                store.delete("a")
        assert len(set(etags)) == len(etags)

    def test_a_clock_that_goes_back_does_not_bring_back_an_etag(
        self, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A new state is always later than the one that it replaces, and than what was deleted."""
        times_us = []
        for hour in (3, 2, 1, 0):
            monkeypatch.setattr(time, "time_ns", lambda hour=hour: (1_700_000_000 + 3600 * hour) * 10**9)
            store.delete("a")
            etag = store.put("a", b"same")
            times_us.append(store.head("a").modified_us)
            store.put_if_match("a", b"same", etag)
            times_us.append(store.head("a").modified_us)
        assert times_us == sorted(set(times_us))

    def test_a_clock_that_was_once_far_ahead_is_forgotten(self, store: DirectoryStore, directory: Path) -> None:
        """Otherwise every object would seem to be young for years, and no sweep would touch any."""
        for content in (b"%020d" % FAR_US, b"", b"not a number", b"9" * 400):
            (directory / LOCK_NAME).write_bytes(content)
            store.put("a", b"x")
            assert abs(store.head("a").modified_us - time.time_ns() // 1000) < 60_000_000

    def test_what_is_replaced_may_have_a_later_time(self, store: DirectoryStore, directory: Path) -> None:
        """Its successor is later still."""
        store.put("a", b"x")
        os.utime(directory / "a", ns=(FAR_US * 1000, FAR_US * 1000))
        store.put_if_match("a", b"y", store.head("a").etag)
        assert store.head("a").modified_us == FAR_US + 1

    def test_a_file_system_without_microseconds_is_refused(
        self, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two states within one of its steps could not be told apart; plain writing goes on."""
        real = os.utime
        monkeypatch.setattr(os, "utime", lambda path, ns: real(path, ns=(ns[0], ns[1] // 10**9 * 10**9)))
        etag = store.put("a", b"x")
        with pytest.raises(NotSupportedError):
            store.put_if_match("a", b"y", etag)
        assert store.get("a") == (b"x", etag)

    def test_the_etag_that_a_write_returns_is_its_own(self, store: DirectoryStore) -> None:
        """One of somebody who wrote right after it would let its owner overwrite that without having seen it."""

        def write(number: int) -> dict[str, bytes]:
            return {store.put("a", data): data for data in (b"%d %d" % (number, n) for n in range(50))}

        with ThreadPoolExecutor(4) as pool:
            told = [pair for written in pool.map(write, range(4)) for pair in written.items()]
        assert len(dict(told)) == 200
        found = store.get("a")
        assert dict(told)[found.etag] == found.data


class TestLocking:
    """Who waits for whom."""

    def test_nobody_sees_the_lock(self, store: DirectoryStore, directory: Path) -> None:
        """It is no object, for no way of asking."""
        store.put("a", b"")
        assert (directory / LOCK_NAME).exists()
        assert [info.key for info in store.list()] == ["a"]
        assert list(store.unfinished_uploads()) == []
        for use in (store.get, store.delete, store.head):
            with pytest.raises(InputError):
                use(LOCK_NAME)

    def test_every_change_of_a_name_waits_for_the_lock(self, store: DirectoryStore, directory: Path) -> None:
        """Otherwise what was compared could be replaced before the name is given. A holder that hangs is reported."""
        etag = store.put("a", b"x")
        store._lock = DirectoryLock(directory, timeout_seconds=0.05)
        with DirectoryLock(directory).held():
            for change in (
                lambda: store.put("a", b"y"),
                lambda: store.put_if_absent("b", b"y"),
                lambda: store.put_if_match("a", b"y", etag),
                lambda: store.copy("a", "b"),
                lambda: store.delete("a"),
            ):
                with pytest.raises(StoreUnavailableError, match="lock"):
                    change()
            assert store.get("a") == (b"x", etag)
        assert [info.key for info in store.list()] == ["a"]
        assert list(store.unfinished_uploads()) == []

    def test_a_large_writer_holds_no_lock_while_it_streams(self, store: DirectoryStore) -> None:
        """Others write meanwhile."""
        with store.open_writer("large") as writer:
            for number in range(3):
                writer.write(bytes(1 << 20))
                store.put(f"small/{number}", b"x")
        assert [info.size for info in store.list()] == [3 << 20, 1, 1, 1]

    def test_a_dead_holder_is_no_holder(self, store: DirectoryStore, directory: Path) -> None:
        """The system frees what a killed process held."""
        store.put("a", b"x")
        ours, theirs = SPAWN.Pipe()
        holder = SPAWN.Process(target=hold_for_ever, args=(directory, theirs))
        holder.start()
        assert ours.recv() == "held"
        waiting = threading.Timer(0.2, holder.kill)
        waiting.start()
        store.put("a", b"after its death")
        waiting.join()
        holder.join()

    def test_a_lock_that_was_removed_is_made_again(self, store: DirectoryStore, directory: Path) -> None:
        """A lock on a file without a name would keep nobody out: who gets it takes the new one."""
        store.put("a", b"x")
        stale = os.open(directory / LOCK_NAME, os.O_RDWR)
        fcntl.flock(stale, fcntl.LOCK_EX)

        def free() -> None:
            os.unlink(directory / LOCK_NAME)
            os.close(stale)

        freeing = threading.Timer(0.2, free)
        freeing.start()
        with DirectoryLock(directory).held():
            freeing.join()
            with pytest.raises(StoreUnavailableError), DirectoryLock(directory, timeout_seconds=0.05).held():
                pass

    def test_a_directory_that_is_gone_deletes_nothing(self, store: DirectoryStore, directory: Path) -> None:
        """An unmounted disk must not look as if everything had been deleted."""
        directory.rmdir()
        with pytest.raises(StoreUnavailableError):
            store.delete("a")
        with pytest.raises(StoreUnavailableError):
            list(store.unfinished_uploads())


class TestDeadWriters:
    """What they leave can be found and removed."""

    def test_the_remains_of_dead_writers_are_found_and_removed(self, store: DirectoryStore, directory: Path) -> None:
        """Below a prefix, from before a time, and nothing else with them."""
        for key in ("a/one", "b/deep/two"):
            writer = SPAWN.Process(target=die_while_writing, args=(store.url, key))
            writer.start()
            writer.join()
            assert writer.exitcode == 9
        for other in ("a/x#y", "a/x#", "a/.y#1", "a/z#1.tmp"):
            (directory / other).write_bytes(b"somebody else's")
        store.put("a/one", b"written by the next")
        found = sorted(store.unfinished_uploads())
        assert [(info.key.partition("#")[0], info.size) for info in found] == [("a/one", 5000), ("b/deep/two", 5000)]
        assert list(store.unfinished_uploads("b/")) == found[1:]
        assert list(store.unfinished_uploads("none/")) == []
        first_us = min(info.modified_us for info in found)
        assert list(store.unfinished_uploads(modified_before_us=first_us)) == []
        assert sorted(store.unfinished_uploads(modified_before_us=time.time_ns())) == found
        store.delete_unfinished(found)
        store.delete_unfinished(found)
        assert list(store.unfinished_uploads()) == []
        assert store.get("a/one").data == b"written by the next"
        assert len(list((directory / "a").iterdir())) == 5

    def test_who_writes_on_is_spared(self, store: DirectoryStore) -> None:
        """What was found once may be alive after all."""
        with store.open_writer("a") as writer:
            writer.write(b"some")
            found = list(store.unfinished_uploads())
            writer.write(b" more")
            store.delete_unfinished(found)
        assert store.get("a").data == b"some more"

    def test_a_writer_whose_work_was_taken_away_says_so(self, store: DirectoryStore) -> None:
        """It publishes nothing, and may begin again."""
        store.put("a", b"old")
        writer = store.open_writer("a")
        writer.write(b"new")
        store.delete_unfinished(list(store.unfinished_uploads()))
        with pytest.raises(StoreUnavailableError), writer:
            pass
        assert store.get("a").data == b"old"

    @pytest.mark.parametrize("key", ["a", "../a#1", "/etc/x#1", "a#1/../b", ".lock#0", "a#", "a#1x"])
    def test_only_the_unfinished_can_be_removed_so(self, store: DirectoryStore, key: str) -> None:
        """Whatever it is given."""
        info = store.head("a") if store.put("a", b"x") else None
        assert info is not None
        with pytest.raises(InputError):
            store.delete_unfinished([info._replace(key=key)])
        assert store.get("a").data == b"x"

    def test_a_copy_leaves_nothing_beside_it(self, store: DirectoryStore) -> None:
        """Also the second time, when both names are one file already and renaming one to the other does nothing."""
        store.put("a", b"x")
        for _ in range(2):
            store.copy("a", "b")
        store.copy("a", "a")
        assert list(store.unfinished_uploads()) == []
        assert [info.key for info in store.list()] == ["a", "b"]


def race(url: str, end: Connection) -> None:
    """Replaces on the etag that it is told, and answers with what it wrote or None."""
    store = open_store(url)
    while (told := end.recv()) is not None:
        number, etag = told
        end.send(attempt(store, f"{number} by {os.getpid()}", etag))


def attempt(store: ObjectStore, text: str, etag: str) -> str | None:
    try:
        store.put_if_match("deep/race", text.encode(), etag)
    except ConflictError:
        return None
    return text


def hold_for_ever(directory: Path, end: Connection) -> None:
    with DirectoryLock(directory).held():
        end.send("held")
        time.sleep(600)


def die_while_writing(url: str, key: str) -> None:
    writer = open_store(url).open_writer(key)
    writer.write(bytes(5000))
    os._exit(9)


def test_the_name_of_the_directory_is_no_key(tmp_path: Path) -> None:
    """An object at the top of a directory can be deleted, whatever that directory is called."""
    (tmp_path / "a table [of orders]").mkdir()
    store = open_store((tmp_path / "a table [of orders]").as_uri())
    store.put("top", b"content")
    store.delete("top")
    assert [info.key for info in store.list()] == []


@pytest.mark.parametrize("has_link", [False, True])
def test_what_is_no_file_is_told_and_never_waited_for(store: DirectoryStore, directory: Path, has_link: bool) -> None:
    """Opening a FIFO would wait for a writer for ever, and could not even be interrupted."""
    store.put("deep/good", b"x")
    os.mkfifo(directory / "deep" / ("other" if has_link else "pipe"))
    if has_link:
        (directory / "deep" / "pipe").symlink_to("other")
    with ThreadPoolExecutor(1) as pool:
        for ask in (
            store.get,
            store.head,
            lambda key: store.read_range(key, 0, 1),
            lambda key: store.copy(key, "copy"),
        ):
            answer = pool.submit(ask, "deep/pipe")
            try:
                with pytest.raises(DataError, match=r"deep/pipe is a FIFO"):
                    answer.result(LIMIT_SECONDS)
            finally:
                _let_go(directory / "deep" / "pipe")
        pool.submit(store.let_go_below, "deep/pipe", 1).result(LIMIT_SECONDS)
    assert store.get("deep/good").data == b"x"


def _let_go(fifo: Path) -> None:
    """Whoever waits for a writer of a FIFO waits no more."""
    with contextlib.suppress(OSError):  # nobody does
        os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))


def test_the_system_is_told_what_is_not_read_again(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it can be told: elsewhere its cache keeps what it likes."""
    told: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, *advice: told.append(advice))
    store.put("a", b"0123456789")
    store.let_go_below("a", 4)
    assert told == [(0, 4, os.POSIX_FADV_DONTNEED)]
    monkeypatch.delattr(os, "posix_fadvise")
    store.let_go_below("a", 10)
    assert len(told) == 1


def test_an_empty_folder_can_be_removed_while_others_write(store: DirectoryStore, directory: Path) -> None:
    """Nobody who begins to write there fails because of it, and what is in it stays."""
    stop = threading.Event()

    def remove() -> None:
        while not stop.is_set():
            store.remove_folder("deep/folder/")

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        for number in range(200):
            store.put("deep/folder/object", b"%d" % number)
            assert store.get("deep/folder/object").data == b"%d" % number
            store.delete("deep/folder/object")
    finally:
        stop.set()
        remover.join(120)
    store.remove_folder("deep/folder/")
    assert not (directory / "deep/folder").exists()
    store.remove_folder("deep/folder/")
