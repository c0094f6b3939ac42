"""A topic as the log of one engine and of several, and the marks of a group."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engine.engines import open_local
from tests.engine.fake_engine import FakeEngine

import tidelog
from tidelog.engine.entry import Batch, CreateBucket, PutObject
from tidelog.engine.orchestrator.base import NotesApplied, Orchestrator, RollsBack, drive
from tidelog.engine.orchestrator.topic import (
    DirectoryMarks,
    MemberMarks,
    MemoryMarks,
    TopicOrchestrator,
    offset_of,
    seq_of,
)
from tidelog.engine.txn.read_set import Guarded, ObjectRead
from tidelog.errors import DataError, GapError, InputError
from tidelog.testing import FaultyFiles

# The topic


def test_the_first_offset_is_seq_one(tmp_path: Path) -> None:
    """A seq is the offset and one more, since seq 0 is what an engine has before the first entry."""
    with tidelog.open(tmp_path) as log:
        orchestrator = TopicOrchestrator(log.topic("a/entries"))
        assert orchestrator.last_seq == 0
        assert orchestrator.append(CreateBucket("b")) == 1
        assert orchestrator.append(PutObject("b", "k", b"v")) == 2
        assert list(orchestrator.entries(0)) == [(1, CreateBucket("b")), (2, PutObject("b", "k", b"v"))]
        assert list(orchestrator.entries(1)) == [(2, PutObject("b", "k", b"v"))]
        assert list(orchestrator.entries(0, up_to=1)) == [(1, CreateBucket("b"))]
        assert list(orchestrator.entries(2)) == list(orchestrator.entries(7)) == []
    assert (seq_of(0), offset_of(1)) == (1, 0)


def test_a_topic_is_an_orchestrator(tmp_path: Path) -> None:
    """By its methods, the optional ones included."""
    with tidelog.open(tmp_path) as log:
        orchestrator = TopicOrchestrator(log.topic("a/entries"))
    assert isinstance(orchestrator, Orchestrator)
    assert isinstance(orchestrator, RollsBack)
    assert isinstance(orchestrator, NotesApplied)


def test_a_topic_drives_an_engine_and_may_then_be_truncated(tmp_path: Path) -> None:
    """One engine alone has everything applied that there is, so its low-water mark is the end."""
    engine = FakeEngine()
    with tidelog.open(tmp_path) as log:
        orchestrator = TopicOrchestrator(log.topic("a/entries"))
        orchestrator.append(CreateBucket("b"))
        orchestrator.append(Guarded(Batch((PutObject("b", "k", b"1"),)), (ObjectRead("b", "k", 0),)))
        orchestrator.append(Guarded(Batch((PutObject("b", "k", b"2"),)), (ObjectRead("b", "k", 0),)))
        orchestrator.append(PutObject("b", "l", b"1"))
        assert drive(engine, orchestrator) == 4
        assert engine.read("b", "k").data == b"1"
        assert engine.low_water_mark == 4
        engine.truncation_mark = 3
        drive(engine, orchestrator)
        assert orchestrator.truncated_seq == 3


def test_what_is_not_on_the_disk_is_not_given_out(tmp_path: Path) -> None:
    """An accepted message may be lost in a crash, and the engine would have what the log has not."""
    with tidelog.open(tmp_path, fsync_interval_ms=60_000) as log:
        topic = log.topic("a/entries")
        orchestrator = TopicOrchestrator(topic)
        orchestrator.append(CreateBucket("b"))
        topic.append(b"accepted and not synced")
        assert orchestrator.last_seq == topic.durable_offset == 1
        assert [seq for seq, _ in orchestrator.entries(0)] == [1]


def test_a_topic_that_lost_its_tail_takes_the_engine_back(tmp_path: Path) -> None:
    """After a takeover without the tail its end is before what the engine applied."""
    engine = FakeEngine()
    engine.apply_many([(1, CreateBucket("b")), (2, PutObject("b", "k", b"lost"))])
    with tidelog.open(tmp_path) as log:
        orchestrator = TopicOrchestrator(log.topic("a/entries"))
        orchestrator.append(CreateBucket("b"))
        assert drive(engine, orchestrator) == 1
        orchestrator.append(PutObject("b", "k", b"new"))
        assert drive(engine, orchestrator) == 2
    assert engine.read("b", "k").data == b"new"


def test_another_process_reads_the_topic(tmp_path: Path) -> None:
    """Read-only, as far as it was written."""
    engine = FakeEngine()
    with tidelog.open(tmp_path) as log:
        TopicOrchestrator(log.topic("a/entries")).append(CreateBucket("b"))
        with tidelog.open(tmp_path, read_only=True) as view:
            assert drive(engine, TopicOrchestrator(view.topic("a/entries"), is_owner=False)) == 1


def test_a_message_that_is_no_entry_is_named(tmp_path: Path) -> None:
    """Nothing is skipped: every replica stops there, and says where."""
    engine = FakeEngine()
    with tidelog.open(tmp_path) as log:
        topic = log.topic("a/entries")
        orchestrator = TopicOrchestrator(topic)
        orchestrator.append(CreateBucket("b"))
        topic.append(b"hello", sync=True)
        with pytest.raises(DataError, match=r"offset 1 of topic a/entries: these bytes are not an entry"):
            drive(engine, orchestrator)


class ShortTopic:
    """A topic whose retention has removed its beginning."""

    name = "a/entries"
    start_offset = 5
    next_offset = durable_offset = 9

    def read(self, start: int, stop: int) -> None:
        raise AssertionError("it must not be read")

    append = read


def test_an_engine_that_comes_too_late_is_told() -> None:
    """What is gone from the topic is asked for: the engine has to be restored first."""
    with pytest.raises(
        GapError, match=r"begins at offset 5 by now, and seq 4 is asked for.*Restore the engine"
    ) as found:
        list(TopicOrchestrator(ShortTopic()).entries(3))  # type: ignore[arg-type]
    assert (found.value.first, found.value.last) == (3, 4)


# Groups


@pytest.fixture(params=["memory", "directory"])
def marks(request: pytest.FixtureRequest, tmp_path: Path) -> MemberMarks:
    members = ["one", "two"]
    return MemoryMarks(members) if request.param == "memory" else DirectoryMarks(tmp_path / "marks", members)


def test_the_slowest_member_is_the_low_water_mark(marks: MemberMarks) -> None:
    """One that was never heard of has applied nothing."""
    assert marks.low_water_mark() == 0
    marks.report("one", 7)
    assert marks.low_water_mark() == 0
    marks.report("two", 5)
    assert marks.low_water_mark() == 5
    marks.report("two", 9)
    assert marks.low_water_mark() == 7


def test_several_engines_follow_one_topic(tmp_path: Path, marks: MemberMarks) -> None:
    """Each from where it is; the low-water mark waits for the slowest, and their states are the same."""
    one, two = FakeEngine(), FakeEngine()
    with tidelog.open(tmp_path / "log") as log:
        topic = log.topic("a/entries")
        first = TopicOrchestrator(topic, marks=marks, member="one")
        second = TopicOrchestrator(topic, marks=marks, member="two")
        first.append(CreateBucket("b"))
        for number in range(9):
            first.append(PutObject("b", f"k{number % 3}", b"%d" % number))
        drive(one, first)
        assert (one.applied_seq, one.low_water_mark) == (10, 0)
        drive(two, second, up_to=4)
        drive(one, first)
        assert (one.low_water_mark, two.low_water_mark) == (4, 4)
        drive(two, second)
        drive(one, first)
        assert (one.low_water_mark, two.low_water_mark) == (10, 10)
    assert one.digest() == two.digest()


def test_a_real_engine_goes_on_where_it_was(tmp_path: Path) -> None:
    """Opened again in between, at every place of a log with guarded entries, it ends as one that was never closed."""
    with tidelog.open(tmp_path / "log") as log:
        orchestrator = TopicOrchestrator(log.topic("a/entries"))
        orchestrator.append(CreateBucket("b"))
        for number in range(6):
            guard = ObjectRead("b", "n", number if number % 2 else 0)  # some are refused
            orchestrator.append(Guarded(Batch((PutObject("b", "n", b"%d" % number),)), (guard,)))
            orchestrator.append(PutObject("b", f"k{number}", b"x" * 1000))
        with open_local(tmp_path / "whole") as whole:
            drive(whole, orchestrator)
            digest = whole.digest()
        for seq in range(1, orchestrator.last_seq + 1):
            with open_local(tmp_path / "parts") as parts:
                drive(parts, orchestrator, up_to=seq)
        with open_local(tmp_path / "parts") as parts:
            assert (parts.digest(), parts.low_water_mark) == (digest, parts.applied_seq)


def test_a_real_engine_follows_a_log_that_lost_its_end(tmp_path: Path) -> None:
    """It rolls back what the topic no longer has, and then is what an engine is that has only seen the new end."""
    with open_local(tmp_path / "one") as one, open_local(tmp_path / "two") as two:
        old = [(2, PutObject("b", "k", b"lost")), (3, PutObject("b", "lost", b"lost"))]
        one.apply_many([(1, CreateBucket("b")), *old])
        with tidelog.open(tmp_path / "log") as log:
            orchestrator = TopicOrchestrator(log.topic("a/entries"))
            orchestrator.append(CreateBucket("b"))
            assert drive(one, orchestrator) == 1
            orchestrator.append(PutObject("b", "k", b"new"))
            drive(one, orchestrator, compares_last=True)
            drive(two, orchestrator)
        assert one.digest() == two.digest()


def test_a_group_needs_marks_and_a_name(tmp_path: Path) -> None:
    """One without the other is a mistake that would leave the low-water mark wrong."""
    with tidelog.open(tmp_path) as log:
        with pytest.raises(InputError, match="Give both"):
            TopicOrchestrator(log.topic("a/entries"), member="one")
        with pytest.raises(InputError, match="Give both"):
            TopicOrchestrator(log.topic("a/entries"), marks=MemoryMarks(["one"]))


@pytest.mark.parametrize("members", [[], ["a", "a"], ["../a"], [""], ["a" * 101]])
def test_members_have_plain_names(tmp_path: Path, members: list[str]) -> None:
    """They become names of files."""
    with pytest.raises(InputError):
        MemoryMarks(members)
    with pytest.raises(InputError):
        DirectoryMarks(tmp_path, members)


def test_a_stranger_does_not_report(marks: MemberMarks) -> None:
    """A mistyped name would otherwise keep the mark where it is for ever."""
    with pytest.raises(InputError, match="'three' is no member of the group one, two"):
        marks.report("three", 1)


def test_marks_are_seen_by_other_processes(tmp_path: Path) -> None:
    """They are files, one a member, replaced as a whole."""
    DirectoryMarks(tmp_path, ["one", "two"]).report("one", 7)
    DirectoryMarks(tmp_path, ["one", "two"]).report("two", 9)
    assert DirectoryMarks(tmp_path, ["one", "two"]).low_water_mark() == 7
    page = (Path(__file__).resolve().parents[2] / "docs" / "formats.md").read_text("utf-8")
    assert (tmp_path / "one.mark").read_text("utf-8") == page.split("```text one.mark\n")[1].split("```")[0]


def test_a_damaged_mark_is_an_error() -> None:
    """It is neither 0 nor what it was."""
    files = FaultyFiles()
    marks = DirectoryMarks("/marks", ["one"], files=files)
    marks.report("one", 3)
    files.write_atomically(Path("/marks/one.mark"), files.read(Path("/marks/one.mark")).replace(b"3", b"4"))
    with pytest.raises(DataError, match="mark document"):
        marks.low_water_mark()
