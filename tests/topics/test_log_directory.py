"""A log directory: one owner, any number of onlookers, topics that are made once and deleted as a whole."""

from __future__ import annotations

import errno
import json
import os
import threading
from functools import partial
from pathlib import Path

import pytest
from tests.log.workbench import Threads, lines_of, run_python, start_python, wal_paths

import tidelog
from tidelog import (
    ClosedError,
    ConfigError,
    DataError,
    InputError,
    LockedError,
    LogFailedError,
    NotFoundError,
    OffsetOutOfRangeError,
    Topic,
)
from tidelog.log import LogSettings
from tidelog.testing import CrashPlan, FaultyFiles, History, crash_everywhere, crash_machine_everywhere
from tidelog.topics.directory import LogDirectory

ROOT = Path("/data")
NAME = "shop/orders"

HOLDER = """
import sys, tidelog
log = tidelog.open(sys.argv[1])
log.topic("shop/orders").append_many([b"%d" % number for number in range(100)], sync=True)
print("open", flush=True)
for line in sys.stdin:
    log.topic("shop/orders").append(line.strip().encode(), sync=True)
    print("appended", flush=True)
log.close()
"""

OPENER = """
import sys, tidelog
try:
    tidelog.open(sys.argv[1])
except tidelog.LockedError as error:
    print("refused", error)
"""


class TestOwnership:
    """One process owns a directory at a time."""

    def test_a_second_opening_is_refused_at_once(self, tmp_path: Path) -> None:
        """In the same process; the error names the directory and says what to do."""
        with tidelog.open(tmp_path) as log:
            log.topic(NAME).append(b"value")
            with pytest.raises(LockedError, match="read_only=True") as caught:
                tidelog.open(tmp_path)
            assert str(tmp_path) in str(caught.value)
            assert log.topic(NAME).append(b"value", sync=True) == 1
        tidelog.open(tmp_path).close()

    def test_another_process_is_refused_at_once(self, tmp_path: Path) -> None:
        """And is told which process has it."""
        with tidelog.open(tmp_path):
            refused = run_python(OPENER, tmp_path).stdout
            assert refused.startswith("refused")
            assert f"process {os.getpid()}" in refused
        assert run_python(OPENER, tmp_path).stdout == ""

    def test_a_killed_owner_leaves_no_lock_behind(self, tmp_path: Path) -> None:
        """The directory can be opened again as soon as the process is gone."""
        holder = start_python(HOLDER, tmp_path)
        assert next(lines_of(holder)) == "open"
        with pytest.raises(LockedError):
            tidelog.open(tmp_path)
        holder.kill()
        holder.communicate()
        with tidelog.open(tmp_path) as log:
            assert len(list(log.topic(NAME).read())) == 100

    def test_a_failed_opening_keeps_no_lock(self, tmp_path: Path) -> None:
        """What is wrong can be mended and the directory opened, by the same process."""
        (tmp_path / "tidelog.json").write_text("{}")
        for _ in range(2):
            with pytest.raises(DataError, match=r"tidelog\.json"):
                tidelog.open(tmp_path)
        (tmp_path / "tidelog.json").unlink()
        tidelog.open(tmp_path).close()

    def test_a_newer_format_is_refused(self, tmp_path: Path) -> None:
        """It is not touched, for owners and for onlookers."""
        content = json.dumps({"format": 99, "created_us": 0})
        (tmp_path / "tidelog.json").write_text(content)
        for read_only in (False, True):
            with pytest.raises(InputError, match="format 99"):
                tidelog.open(tmp_path, read_only=read_only)
        assert (tmp_path / "tidelog.json").read_text() == content


class TestReadOnly:
    """Onlookers, beside an owner or without one."""

    def test_it_follows_what_an_owner_in_another_process_writes(self, tmp_path: Path) -> None:
        """What was there, and what comes."""
        holder = start_python(HOLDER, tmp_path)
        lines = lines_of(holder)
        assert next(lines) == "open"
        with tidelog.open(tmp_path, read_only=True) as log:
            reader = log.topic(NAME).read(98, follow=True)
            assert [next(reader).value for _ in range(2)] == [b"98", b"99"]
            assert holder.stdin is not None
            holder.stdin.write("news\n")
            holder.stdin.flush()
            assert next(lines) == "appended"
            assert next(reader).value == b"news"
            assert log.topics() == [NAME]
        holder.communicate(timeout=60)

    def test_it_can_change_nothing(self, tmp_path: Path) -> None:
        """Every way to write is refused and named, and a topic that is not there is not made."""
        with tidelog.open(tmp_path) as log:
            log.topic(NAME).append(b"value")
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        with tidelog.open(tmp_path, read_only=True) as log:
            topic = log.topic(NAME)
            for attempt in (partial(topic.append, b"v"), partial(topic.append_many, [b"v"]), topic.flush):
                with pytest.raises(InputError, match="read_only"):
                    attempt()
            with pytest.raises(InputError, match="read_only"):
                log.delete_topic(NAME)
            with pytest.raises(NotFoundError, match="shop/other"):
                log.topic("shop/other")
            assert topic.statistics().log is None
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before

    def test_a_directory_that_is_not_there_is_not_made(self, tmp_path: Path) -> None:
        """It is named instead."""
        with pytest.raises(NotFoundError, match="nowhere"):
            tidelog.open(tmp_path / "nowhere", read_only=True)
        assert list(tmp_path.iterdir()) == []


class TestTopics:
    """Made once, opened once, listed."""

    def test_racing_threads_get_the_same_topic(self, tmp_path: Path) -> None:
        """Eight threads ask for a new topic at once: one is made, and all append to it."""
        for attempt in range(5):
            with tidelog.open(tmp_path / str(attempt)) as log:
                barrier, topics = threading.Barrier(8), list[Topic]()

                def race(log: LogDirectory, barrier: threading.Barrier, topics: list[Topic]) -> None:
                    barrier.wait(60)
                    topic = log.topic(NAME)
                    topics.append(topic)
                    topic.append(b"value")

                with Threads() as threads:
                    for _ in range(8):
                        threads.start(partial(race, log, barrier, topics))
                assert {id(topic) for topic in topics} == {id(log.topic(NAME))}
                assert [message.offset for message in log.topic(NAME).read()] == list(range(8))

    def test_topics_are_listed(self, tmp_path: Path) -> None:
        """By name, sorted, over reopenings; strangers in the directory are not topics."""
        names = ["b/z", "a/y", "a/x"]
        with tidelog.open(tmp_path) as log:
            assert log.topics() == []
            for name in names:
                log.topic(name)
            (tmp_path / "notes").mkdir()
            (tmp_path / "notes" / "file").write_text("not a topic")
            (tmp_path / "a" / "empty").mkdir()
            (tmp_path / ".hidden" / "x").mkdir(parents=True)
            assert log.topics() == sorted(names)
            assert (log.has_topic("a/x"), log.has_topic("a/empty"), log.has_topic("c/x")) == (True, False, False)
        with tidelog.open(tmp_path) as log:
            assert log.topics() == sorted(names)
            assert log._topic_directory("a/x") == tmp_path / "a" / "x"
            with pytest.raises(NotFoundError):
                log._topic_directory("c/x")

    def test_closing_closes_all(self, tmp_path: Path) -> None:
        """Every topic is flushed and refuses appends; the directory refuses everything."""
        log = tidelog.open(tmp_path, fsync_interval_ms=3_600_000)
        topics = [log.topic(f"a/{number}") for number in range(5)]
        for topic in topics:
            topic.append_many([b"value"] * 10)
        log.close()
        log.close()
        for topic in topics:
            assert topic.durable_offset == 10
            with pytest.raises(ClosedError):
                topic.append(b"late")
        for attempt in (partial(log.topic, "a/0"), log.topics, partial(log.delete_topic, "a/0")):
            with pytest.raises(ClosedError):
                attempt()
        assert "closed" in repr(log)

    def test_one_topic_that_fails_does_not_keep_others_from_closing(self) -> None:
        """The failure is raised after everything was closed and the directory given back."""
        files = FaultyFiles()
        log = LogDirectory(ROOT, files=files)
        good, bad = log.topic("a/good"), log.topic("a/bad")
        bad.append(b"value", sync=True)
        good.append(b"value", sync=True)
        files.fail("sync", error=errno.EIO, matching="wal.*.log")
        with pytest.raises(LogFailedError):
            bad.append(b"lost", sync=True)
        good.append(b"value")
        with pytest.raises(LogFailedError, match=r"offset 1\b"):
            log.close()
        with LogDirectory(ROOT, files=files) as again:
            assert again.topic("a/good").next_offset == 2
            assert again.topic("a/bad").next_offset == 1

    def test_making_a_topic_can_be_crashed_at_every_call(self) -> None:
        """Afterwards it is there or not, and can be made and used either way."""

        def make(files: FaultyFiles, history: History) -> None:
            with LogDirectory(ROOT, files=files) as log:
                history.attempted("topic", b"value")
                history.accepted("topic", log.topic(NAME).append(b"value", sync=True), b"value")
                history.synced(0)

        def check(files: FaultyFiles, history: History) -> None:
            with LogDirectory(ROOT, files=files) as log:
                found = [message.value for message in log.topic(NAME).read()]
                assert found == [b"value"] or (found == [] and not history.synced_offsets)
                assert log.topics() == [NAME]
                log.topic(NAME).append(b"next", sync=True)

        summary = crash_everywhere(make, check)
        assert summary.cut_points > 10


class TestDeleting:
    """All of a topic or nothing of it."""

    def test_what_is_not_there_is_named(self, tmp_path: Path) -> None:
        """A topic that does not exist cannot be deleted, nor can it twice."""
        with tidelog.open(tmp_path) as log:
            log.topic(NAME)
            log.delete_topic(NAME)
            with pytest.raises(NotFoundError, match=NAME):
                log.delete_topic(NAME)

    def test_open_readers_end(self, tmp_path: Path) -> None:
        """One that has seen everything ends; one that has not is told that the rest is gone."""
        with tidelog.open(tmp_path, cache_max_messages=0) as log:
            topic = log.topic(NAME)
            topic.append_many([b"old"] * 10, sync=True)
            following, behind = topic.read("latest", follow=True), topic.read(0, follow=True)
            with Threads() as threads:
                threads.start(lambda: list(following))
                log.delete_topic(NAME)
            with pytest.raises(OffsetOutOfRangeError):
                next(behind)
            with pytest.raises(ClosedError):
                topic.append(b"late")

    def test_a_reader_of_the_old_topic_never_sees_the_new_one(self, tmp_path: Path) -> None:
        """The same name, made again, is another topic."""
        with tidelog.open(tmp_path, cache_max_messages=0) as log:
            old = log.topic(NAME)
            old.append_many([b"old"] * 10, sync=True)
            reader = old.read(0, follow=True)
            log.delete_topic(NAME)
            new = log.topic(NAME)
            new.append_many([b"new"] * 20, sync=True)
            with pytest.raises(OffsetOutOfRangeError):
                next(reader)
            assert [message.value for message in new.read()] == [b"new"] * 20
            assert new is not old

    def test_it_can_be_crashed_at_every_call(self) -> None:
        """Afterwards all of the topic is there or none of it, the other topic is untouched, and no debris stays."""
        prepared = FaultyFiles()
        with LogDirectory(ROOT, LogSettings(rotate_max_bytes=200), files=prepared) as log:
            log.topic(NAME).append_many([b"%d" % number for number in range(20)])
            log.topic("shop/other").append(b"stays")
        prepared = prepared.after_crash("lose")

        def delete(files: FaultyFiles, history: History) -> None:
            with LogDirectory(ROOT, files=files) as log:
                log.delete_topic(NAME)
                history.accepted("deleted", 0, NAME)

        def check(files: FaultyFiles, history: History) -> None:
            with LogDirectory(ROOT, files=files) as log:
                assert [message.value for message in log.topic("shop/other").read()] == [b"stays"]
                if log.has_topic(NAME):
                    assert not history.values, "deleted, and there again"
                    assert [m.value for m in log.topic(NAME).read()] == [b"%d" % number for number in range(20)]
                    log.delete_topic(NAME)
                assert log.topics() == ["shop/other"]
                assert not any("orders" in path or ".deleted/" in path for path in files.tree())

        summary = crash_machine_everywhere(
            lambda crash_at: prepared.after_crash("keep", crash_at=crash_at), delete, check, CrashPlan(seeds=2)
        )
        assert summary.cut_points > 10
        assert summary.abandoned_threads == 0


class TestSettings:
    """From a file, from the environment, from keywords: the later one wins."""

    def rotations(self, log: LogDirectory) -> int:
        """In how many files ten messages of 100 bytes end up."""
        for _ in range(10):
            log.topic(NAME).append(b"x" * 100, sync=True)
        return len(wal_paths(log._topic_directory(NAME)))

    def test_each_source_is_used(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A message has 140 bytes with all that is around it: the files tell which setting was used."""
        config = tmp_path / "tidelog.toml"
        config.write_text(f'dir = "{tmp_path}/from-file"\n[log]\nrotate_max_bytes = 1400\n')
        with tidelog.open(config=config) as log:
            assert (log.root, self.rotations(log)) == (tmp_path / "from-file", 1)
        monkeypatch.setenv("TIDELOG_ROTATE_MAX_BYTES", "700")
        monkeypatch.setenv("TIDELOG_DIR", str(tmp_path / "from-environment"))
        with tidelog.open(config=config) as log:
            assert (log.root, self.rotations(log)) == (tmp_path / "from-environment", 2)
        with tidelog.open(tmp_path / "named", config=config, rotate_max_bytes=280) as log:
            assert (log.root, self.rotations(log)) == (tmp_path / "named", 5)

    def test_what_is_wrong_is_named(self, tmp_path: Path) -> None:
        """A setting that does not exist is answered with the nearest one, and nothing is made."""
        with pytest.raises(ConfigError, match="fsync_interval_ms"):
            tidelog.open(tmp_path / "data", fsync_intervall_ms=5)  # type: ignore[call-arg]
        with pytest.raises(ConfigError):
            tidelog.open(tmp_path / "data", fsync_interval_ms=0)
        with pytest.raises(ConfigError, match="no directory"):
            tidelog.open()
        assert list(tmp_path.iterdir()) == []


FORKS = """
import os, sys, tidelog
log = tidelog.open(sys.argv[1])
topic = log.topic("shop/orders")
topic.append(b"0", sync=True)
child = os.fork()
if child == 0:
    for attempt in (lambda: topic.append(b"child"), lambda: log.topic("shop/new"), log.topics):
        try:
            attempt()
            os.write(1, b"child allowed\\n")
        except tidelog.ClosedError:
            os.write(1, b"child refused\\n")
    log.close()
    sys.stdin.readline()
    os._exit(0)
topic.append(b"1")
log.close()
os.write(1, b"parent closed\\n")
os.waitpid(child, 0)
"""


def test_a_forked_child_keeps_nothing(tmp_path: Path) -> None:
    """It can neither append nor open, and the directory is free once the parent has closed it."""
    process = start_python(FORKS, tmp_path)
    lines = lines_of(process)
    assert sorted(next(lines) for _ in range(4)) == ["child refused"] * 3 + ["parent closed"]
    with tidelog.open(tmp_path) as log:
        assert [message.value for message in log.topic(NAME).read()] == [b"0", b"1"]
    process.communicate("go on\n", timeout=60)
    assert process.returncode == 0
