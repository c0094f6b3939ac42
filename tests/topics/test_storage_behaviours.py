"""What a user of any topic storage may rely on, held here in every mode and through the public names."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.log.workbench import flip_bit, open_below, wait_until, wal_paths
from tests.topics.storage_modes import MODES, Storage, storage_fixture

import tidelog
from tidelog import ClosedError, CorruptionError, InputError, Message, Topic
from tidelog.log.binding import BINDING_BYTES

NAME = "shop/orders"


storage = storage_fixture(MODES)


@pytest.fixture
def log(storage: Storage, tmp_path: Path) -> Iterator[tidelog.LogDirectory]:
    with storage.open(tmp_path) as log:
        yield log


def value(number: int) -> bytes:
    return b"message %d" % number


def append_numbers(topic: Topic, start: int, stop: int) -> None:
    for number in range(start, stop):
        assert topic.append(value(number)) == number


def numbers(messages: Iterator[Message]) -> list[int]:
    """The offsets, after a check that each has the value that was appended there."""
    found = []
    for message in messages:
        assert message.value == value(message.offset)
        found.append(message.offset)
    return found


def take(messages: Iterator[Message], count: int) -> list[int]:
    return numbers(iter([next(messages) for _ in range(count)]))


def test_latest_sees_only_what_comes_after(log: tidelog.LogDirectory) -> None:
    """A reader that starts at the latest offset gets nothing of what was there before it."""
    topic = log.topic(NAME)
    append_numbers(topic, 0, 10)
    reader = topic.read("latest", follow=True)
    append_numbers(topic, 10, 13)
    assert take(reader, 3) == [10, 11, 12]


def test_the_last_hundred_of_many_come_in_order(log: tidelog.LogDirectory) -> None:
    """1500 appended, and a read from 100 before the end gives exactly those 100."""
    topic = log.topic(NAME)
    append_numbers(topic, 0, 1500)
    assert numbers(topic.read(topic.next_offset - 100)) == list(range(1400, 1500))


def test_files_cache_and_live_are_one_stream(storage: Storage, tmp_path: Path) -> None:
    """0 to 99 from the files of an earlier life, 100 to 102 from memory, then what comes: no gap and no repeat."""
    with storage.open(tmp_path) as log:
        append_numbers(log.topic(NAME), 0, 100)
    with storage.open(tmp_path) as log:
        topic = log.topic(NAME)
        append_numbers(topic, 100, 103)
        reader = topic.read(0, follow=True)
        assert take(reader, 103) == list(range(103))
        append_numbers(topic, 103, 105)
        assert take(reader, 2) == [103, 104]


def test_a_cache_of_sixteen_delivers_every_burst(storage: Storage, tmp_path: Path) -> None:
    """Bursts far larger than the cache reach a reader that follows, whole and in order."""
    with storage.open(tmp_path, cache_max_messages=16) as log:
        topic = log.topic(NAME)
        reader, found = topic.read("earliest", follow=True), list[int]()
        collector = threading.Thread(target=lambda: found.extend(take(reader, 2000)), daemon=True)
        collector.start()
        for burst in range(20):
            append_numbers(topic, burst * 100, burst * 100 + 100)
            if burst % 5 == 0:
                topic.flush()
        collector.join(60)
        assert found == list(range(2000))


@pytest.mark.parametrize("ending", ["", "below", "below/further"])
def test_an_invalid_path_fails_at_the_start(storage: Storage, tmp_path: Path, ending: str) -> None:
    """A path that runs into a file is refused when the log is opened, not at the first append."""
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(InputError, match="file"):
        storage.open(tmp_path / "file" / ending)
    assert (tmp_path / "file").read_text() == "not a directory"


def test_a_new_instance_replays_what_was_flushed(storage: Storage, tmp_path: Path) -> None:
    """While the first one is still open, another process that only looks finds everything that was flushed."""
    with storage.open(tmp_path) as log:
        append_numbers(log.topic(NAME), 0, 50)
        log.topic(NAME).flush()
        with storage.open(tmp_path, read_only=True) as onlooker:
            assert numbers(onlooker.topic(NAME).read()) == list(range(50))
    with storage.open(tmp_path) as again:
        assert numbers(again.topic(NAME).read()) == list(range(50))


def test_a_tail_crosses_rotated_files(storage: Storage, tmp_path: Path) -> None:
    """With files of 512 bytes, 25 messages and a tail from 10 give 10 to 24."""
    with storage.open(tmp_path, rotate_max_bytes=512, cache_max_messages=0) as log:
        topic = log.topic(NAME)
        append_numbers(topic, 0, 25)
        topic.flush()
        assert len(wal_paths(log._topic_directory(NAME))) > 2
        assert numbers(topic.read(10)) == list(range(10, 25))


def our_threads() -> set[threading.Thread]:
    """Those of log directories; the pulse is the process's own."""
    running = threading.enumerate()
    return {thread for thread in running if thread.name.startswith("tidelog") and thread.name != "tidelog-pulse"}


def test_an_append_after_close_raises_and_uses_no_offset(storage: Storage, tmp_path: Path) -> None:
    """Closing is final for its topics: nothing is accepted any more, and nothing was used up by trying."""
    log = storage.open(tmp_path)
    topic = log.topic(NAME)
    append_numbers(topic, 0, 3)
    log.close()
    with pytest.raises(ClosedError):
        topic.append(b"late")
    with pytest.raises(ClosedError):
        topic.append_many([b"late", b"later"])
    assert (topic.next_offset, topic.durable_offset) == (3, 3)
    with storage.open(tmp_path) as again:
        assert again.topic(NAME).append(value(3)) == 3


def test_closing_leaks_nothing(storage: Storage, tmp_path: Path) -> None:
    """Neither threads nor open files are left, however often a log is opened, used and closed."""

    def use() -> None:
        log = storage.open(tmp_path, rotate_max_bytes=512)
        topics = [log.topic(name) for name in ("a/x", "a/y", "b/x")]
        for topic in topics:
            topic.append_many([b"some" * 20] * 20)
            assert len(list(topic.read())) >= 20
        log.close()
        with pytest.raises(ClosedError):
            log.topic("a/x")
        with pytest.raises(ClosedError):
            topics[0].append(b"late")

    before = our_threads()  # of tests that play a crash, and leave theirs behind
    for _ in range(4):
        use()
        assert open_below(tmp_path) == []
    wait_until(lambda: our_threads() <= before, "the threads' end")


def test_a_frame_with_a_bad_checksum_is_never_delivered(storage: Storage, tmp_path: Path) -> None:
    """Frame 1 is damaged: a reader gets frame 0, then an error that names the place, and never frame 1."""
    with storage.open(tmp_path) as log:
        append_numbers(log.topic(NAME), 0, 3)
        log.topic(NAME).flush()
        path = wal_paths(log._topic_directory(NAME))[0]
    frame_bytes = (path.stat().st_size - BINDING_BYTES) // 3
    with storage.open(tmp_path, cache_max_messages=0, open_check_bytes=0) as log:
        topic = log.topic(NAME)
        flip_bit(path, 2 * frame_bytes - 1)
        reader = topic.read()
        assert next(reader).offset == 0
        with pytest.raises(CorruptionError, match=f"byte {frame_bytes} of"):
            next(reader)
        assert next(reader, None) is None
    with storage.open(tmp_path) as log, pytest.raises(CorruptionError, match=f"byte {frame_bytes} of"):
        log.topic(NAME)


def test_appending_goes_on_after_a_reopening(storage: Storage, tmp_path: Path) -> None:
    """Three appended, closed, opened: the next one is 3, and all four are read."""
    with storage.open(tmp_path) as log:
        append_numbers(log.topic(NAME), 0, 3)
    with storage.open(tmp_path) as log:
        append_numbers(log.topic(NAME), 3, 4)
        assert numbers(log.topic(NAME).read()) == [0, 1, 2, 3]


def test_three_owners_in_turn_use_every_offset_once(storage: Storage, tmp_path: Path) -> None:
    """Whoever opens the directory next goes on where the one before stopped."""
    for owner in range(3):
        with storage.open(tmp_path) as log:
            append_numbers(log.topic(NAME), owner * 2, owner * 2 + 2)
    with storage.open(tmp_path, read_only=True) as log:
        assert numbers(log.topic(NAME).read()) == list(range(6))


def test_deleting_leaves_nothing(storage: Storage, tmp_path: Path) -> None:
    """A deleted topic has no file and no directory left; made again, it begins at 0."""
    with storage.open(tmp_path, rotate_max_bytes=512) as log:
        empty = sorted(tmp_path.rglob("*"))
        append_numbers(log.topic(NAME), 0, 50)
        log.delete_topic(NAME)
        assert sorted(tmp_path.rglob("*")) == empty
        assert log.topics() == []
        append_numbers(log.topic(NAME), 0, 1)
        assert numbers(log.topic(NAME).read()) == [0]


def test_topics_are_isolated(log: tidelog.LogDirectory) -> None:
    """Each topic has its own offsets, messages and files, also where names resemble each other."""
    names = ["a/b", "a/b-", "a-/b", "a.b/c", "a/b.c"]
    for number, name in enumerate(names):
        log.topic(name).append_many([name.encode()] * (number + 1))
    for number, name in enumerate(names):
        assert [(m.offset, m.value) for m in log.topic(name).read()] == [(n, name.encode()) for n in range(number + 1)]
    log.delete_topic("a/b")
    assert log.topics() == sorted(names[1:])
    assert len(list(log.topic("a/b-").read())) == 2


def test_a_large_message_comes_back_intact(storage: Storage, tmp_path: Path) -> None:
    """1 MiB, larger than a file and than what a reader takes at once, from memory and from the file."""
    large = os.urandom(1 << 20)
    with storage.open(tmp_path, rotate_max_bytes=4096, read_chunk_bytes=4096) as log:
        topic = log.topic(NAME)
        topic.append_many([b"before", large, b"after"])
        assert [message.value for message in topic.read()] == [b"before", large, b"after"]
    with storage.open(tmp_path, read_chunk_bytes=4096) as log:
        assert [message.value for message in log.topic(NAME).read()] == [b"before", large, b"after"]


def test_a_stale_checkpoint_changes_nothing(storage: Storage, tmp_path: Path) -> None:
    """With the checkpoint of an earlier day in place, opening finds everything that came since."""
    with storage.open(tmp_path, rotate_max_bytes=512) as log:
        append_numbers(log.topic(NAME), 0, 30)
        checkpoint = log._topic_directory(NAME) / "wal.ckpt"
    stale = checkpoint.read_bytes()
    with storage.open(tmp_path, rotate_max_bytes=512) as log:
        append_numbers(log.topic(NAME), 30, 90)
    checkpoint.write_bytes(stale)
    with storage.open(tmp_path, rotate_max_bytes=512, open_check_bytes=0) as log:
        topic = log.topic(NAME)
        assert numbers(topic.read()) == list(range(90))
        append_numbers(topic, 90, 91)


def test_subscribers_at_several_offsets_see_the_rest(log: tidelog.LogDirectory) -> None:
    """Readers from 0, 5 and 10 each get everything from there on, what is appended later included."""
    topic = log.topic(NAME)
    append_numbers(topic, 0, 12)
    readers = {start: topic.read(start, follow=True) for start in (0, 5, 10)}
    append_numbers(topic, 12, 15)
    for start, reader in readers.items():
        assert take(reader, 15 - start) == list(range(start, 15))


def test_a_range_is_read_by_its_index(log: tidelog.LogDirectory) -> None:
    """3000 messages, and the range 2500 to 2520 gives its 21."""
    topic = log.topic(NAME)
    append_numbers(topic, 0, 3000)
    topic.flush()
    assert numbers(topic.read(2500, 2521)) == list(range(2500, 2521))


def test_a_reader_that_follows_is_woken(log: tidelog.LogDirectory) -> None:
    """A reader that waits at the end gets the next message without asking again."""
    topic, found = log.topic(NAME), list[int]()
    reader = topic.read("latest", follow=True)
    waiting = threading.Thread(target=lambda: found.extend(take(reader, 2)), daemon=True)
    waiting.start()
    append_numbers(topic, 0, 1)
    wait_until(lambda: not waiting.is_alive() or topic.next_offset == 1, "the first append")
    append_numbers(topic, 1, 2)
    waiting.join(60)
    assert found == [0, 1]
