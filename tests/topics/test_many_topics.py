"""Many topics in one directory: what each of them costs, and that they are opened beside each other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.log.workbench import LIMIT_SECONDS, Threads

import tidelog
from tidelog.errors import ClosedError, InputError, LockedError
from tidelog.files import File, Files
from tidelog.log import Log
from tidelog.log.binding import WrappedFiles
from tidelog.log.repair import plan_repair
from tidelog.store.metadata.sqlite import SqliteMetadataStore
from tidelog.testing import Call, FaultyFiles
from tidelog.topics.directory import LogDirectory

ROOT = Path("/data")


def names(count: int) -> list[str]:
    return [f"shop/t{number}" for number in range(count)]


def filled(count: int) -> FaultyFiles:
    """A disk with so many topics, each with a message, all of it closed."""
    files = FaultyFiles()
    with LogDirectory(ROOT, files=files) as log:
        for topic in log.open_topics(names(count)):
            topic.append(b"value")
    return files


def calls_to_reopen(count: int) -> int:
    """Changing calls of an opening of all topics, with the closing after it."""
    files = filled(count)
    before = len(files.calls)
    with LogDirectory(ROOT, files=files) as log:
        assert [topic.next_offset for topic in log.open_topics(names(count))] == [1] * count
    return len(files.calls) - before


def test_a_topic_that_was_closed_is_opened_without_a_sync() -> None:
    """Lost: a minute for ten thousand topics of which none was touched since they were closed."""
    assert calls_to_reopen(20) == calls_to_reopen(5)


class LookedAtFiles(WrappedFiles):
    """What is listed and opened, by name."""

    def __init__(self, files: Files) -> None:
        super().__init__(files)
        self.looks: list[str] = []

    def list(self, directory: Path) -> list[str]:
        self.looks.append(directory.name)
        return super().list(directory)

    def open(self, path: Path, *, write: bool = False) -> File:
        self.looks.append(path.name)
        return super().open(path, write=write)


def test_a_topic_that_was_closed_is_looked_at_once() -> None:
    """Its directory is listed once and its log read once; only its id is asked for again, by the file that has it."""
    files = LookedAtFiles(filled(1))
    with LogDirectory(ROOT, files=files) as log:
        files.looks.clear()
        log.topic("shop/t0")
    assert sorted(files.looks) == ["log.id", "log.id", "t0", "topic.json", "wal.0000000000.log", "wal.ckpt"]


def test_a_topic_with_a_store_is_opened_with_few_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What there is to know of it is read together: once before the claim, and once after it."""
    asked: list[str] = []
    opener = threading.current_thread()

    def counted(name: str) -> Callable[..., object]:
        ask = getattr(SqliteMetadataStore, name)

        def asks(self: SqliteMetadataStore, first: object, *others: object) -> object:
            if threading.current_thread() is opener and "/nodes/" not in str(first):  # whether its last node lives
                asked.append(name)
            return ask(self, first, *others)

        return asks

    store = (tmp_path / "bucket").as_uri()
    with tidelog.open(tmp_path / "log", store=store) as log:
        log.topic("shop/t", retention_seconds=1000).append(b"value")
        log.topic("shop/t").ship()
    with tidelog.open(tmp_path / "log") as log:
        log.topic("shop/first")  # the node takes its lease
        for name in ("get", "get_many", "_range", "_keys", "floor"):
            monkeypatch.setattr(SqliteMetadataStore, name, counted(name))
        log.topic("shop/t")
        monkeypatch.undo()
    assert asked == ["_range", "_range"]


def test_a_topic_that_was_killed_is_synced_when_it_is_opened() -> None:
    """Nothing vouches for what is in its last file; after the opening it is safe."""
    files = FaultyFiles()
    log = LogDirectory(ROOT, files=files)
    log.topic("shop/t").append(b"synced", sync=True)
    topic = log.topic("shop/t")
    topic.append(b"in the file only")
    files.crash()
    left = files.after_crash("keep")
    with LogDirectory(ROOT, files=left) as again:
        found = [message.value for message in again.topic("shop/t").read()]
        lost = left.after_crash("lose")
    with LogDirectory(ROOT, files=lost) as last:
        assert [message.value for message in last.topic("shop/t").read()] == found


def test_topics_are_opened_beside_each_other() -> None:
    """The opening of one goes on while another waits for the disk."""
    files = FaultyFiles()
    reached = {name: threading.Event() for name in names(2)}

    def meet(call: Call) -> None:
        for name, event in reached.items():
            if call.operation == "create" and f"/{name}/" in call.path:
                event.set()
                assert all(other.wait(LIMIT_SECONDS) for other in reached.values())

    with LogDirectory(ROOT, files=files) as log:
        files.faults.on_call = meet
        assert [topic.name for topic in log.open_topics(names(2))] == names(2)


def test_topics_come_in_the_order_of_their_names() -> None:
    """Also one that is named twice, and one that is open already."""
    with LogDirectory(ROOT, files=FaultyFiles()) as log:
        first = log.topic("shop/t1")
        found = log.open_topics(["shop/t2", "shop/t1", "shop/t2"])
        assert [topic.name for topic in found] == ["shop/t2", "shop/t1", "shop/t2"]
        assert found[1] is first
        assert found[0] is found[2]


def test_one_that_cannot_be_opened_leaves_the_others_open() -> None:
    """The error of the first of them is raised."""
    with LogDirectory(ROOT, files=FaultyFiles()) as log:
        with pytest.raises(InputError, match="two words"):
            log.open_topics(["shop/t0", "two words", "shop/t1"])
        assert log.topics() == ["shop/t0", "shop/t1"]


def test_closing_waits_for_a_topic_that_is_being_opened() -> None:
    """Lost: a writer that went on in a directory that was closed."""
    files = FaultyFiles()
    log = LogDirectory(ROOT, files=files)
    is_opening, may_go_on = threading.Event(), threading.Event()

    def hold(call: Call) -> None:
        if call.operation == "create" and "/shop/t/" in call.path:
            is_opening.set()
            assert may_go_on.wait(LIMIT_SECONDS)

    files.faults.on_call = hold
    opened: list[tidelog.Topic] = []
    with Threads() as threads:
        threads.start(lambda: opened.append(log.topic("shop/t")))
        assert is_opening.wait(LIMIT_SECONDS)
        closing = threads.start(log.close)
        may_go_on.set()
        closing.join(LIMIT_SECONDS)
    with pytest.raises(ClosedError):
        opened[0].append(b"late")


def test_the_lock_of_the_directory_covers_its_topics(tmp_path: Path) -> None:
    """With one descriptor for all of them: neither a repair nor another log gets at one of them meanwhile."""
    with tidelog.open(tmp_path) as log:
        log.topic("shop/t").append(b"value")
        plan = plan_repair(tmp_path / "shop" / "t")
        with pytest.raises(LockedError):
            plan.apply()
        with pytest.raises(LockedError):
            Log.open(tmp_path / "shop" / "t")
    alone = Log.open(tmp_path / "shop" / "t")
    with pytest.raises(LockedError):
        tidelog.open(tmp_path)
    alone.close()
    tidelog.open(tmp_path).close()
