"""A topic: messages in with all their parts, messages out from any position."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from tests.log.workbench import flip_bit, wal_paths

import tidelog
from tidelog import (
    BackpressureError,
    ClosedError,
    CorruptionError,
    GapError,
    InputError,
    Message,
    MessageTooLargeError,
    OffsetOutOfRangeError,
    Topic,
)
from tidelog.log import LogSettings
from tidelog.log.binding import BINDING_BYTES
from tidelog.log.repair import plan_repair
from tidelog.testing import FaultyFiles, ManualClock
from tidelog.topics.directory import LogDirectory

NAME = "shop/orders"
NOON = datetime(2024, 6, 1, 12, tzinfo=UTC)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(int(NOON.timestamp()) * 1_000_000)


@pytest.fixture
def topic(clock: ManualClock) -> Iterator[Topic]:
    """On a disk in memory, with a clock that stands still."""
    with LogDirectory(Path("/data"), files=FaultyFiles(), clock=clock) as log:
        yield log.topic(NAME)


def values(messages: Iterator[Message]) -> list[bytes]:
    return [message.value or b"" for message in messages]


class TestAppending:
    """What goes in comes out."""

    def test_all_parts_of_a_message_come_back(self, topic: Topic) -> None:
        """Value, key, headers and timestamp, and the offset that it was given."""
        offset = topic.append(b"value", key=b"key", headers={"a": b"1", "ü": b""}, timestamp=NOON)
        assert offset == 0
        (message,) = topic.read()
        assert message == Message(b"value", b"key", {"a": b"1", "ü": b""}, NOON, 0)

    def test_what_is_left_out_has_its_default(self, topic: Topic) -> None:
        """No key, no headers, and the time of the append."""
        topic.append(b"value")
        (message,) = topic.read()
        assert (message.key, message.headers, message.timestamp) == (None, {}, NOON)

    @pytest.mark.parametrize("value", [b"", b"\x00", bytes(range(256)), b"x" * 100_000])
    @pytest.mark.parametrize("key", [None, b"", b"k"])
    def test_any_bytes_are_a_value(self, topic: Topic, value: bytes, key: bytes | None) -> None:
        """The empty value too; an empty key and no key are two things."""
        topic.append(value, key=key)
        topic.flush()
        (message,) = topic.read()
        assert (message.value, message.key) == (value, key)

    def test_a_message_can_be_appended_as_one(self, topic: Topic) -> None:
        """Its offset is ignored: it gets a new one. So a message that was read can be appended elsewhere."""
        topic.append(Message(b"value", b"key", {"h": b"v"}, NOON, offset=99))
        topic.append(next(topic.read()))
        first, second = topic.read()
        assert first == Message(b"value", b"key", {"h": b"v"}, NOON, 0)
        assert second == Message(b"value", b"key", {"h": b"v"}, NOON, 1)

    def test_several_messages_get_consecutive_offsets(self, topic: Topic) -> None:
        """Plain values and messages may be mixed, in any iterable."""
        assert topic.append(b"0") == 0
        assert topic.append_many([b"1", Message(b"2", key=b"k"), b"3"], sync=True) == [1, 2, 3]
        assert topic.append_many(b"%d" % number for number in range(4, 7)) == [4, 5, 6]
        assert topic.append_many([]) == []
        assert values(topic.read()) == [b"%d" % number for number in range(7)]

    def test_a_synced_append_is_durable(self, topic: Topic) -> None:
        """And a flush makes the others so."""
        topic.append(b"value", sync=True)
        assert topic.durable_offset == 1
        topic.append_many([b"value"] * 5)
        topic.flush()
        assert topic.durable_offset == topic.next_offset == 6

    def test_timestamps_keep_their_moment(self, topic: Topic) -> None:
        """Any zone comes back as the same moment in UTC; one without a zone counts as UTC; microseconds are kept."""
        east = datetime(2024, 1, 1, 1, 2, 3, 456789, tzinfo=timezone(timedelta(hours=5, minutes=45)))
        naive = datetime(2024, 1, 1, 1, 2, 3)  # noqa: DTZ001  # that is what is tested
        early = datetime(1, 1, 1, tzinfo=UTC)
        late = datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)
        for moment in (east, naive, early, late):
            topic.append(b"value", timestamp=moment)
        found = [message.timestamp for message in topic.read()]
        assert found == [east, naive.replace(tzinfo=UTC), early, late]
        assert all(moment is not None and moment.tzinfo is UTC for moment in found)

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            ({"value": "text"}, "value must be bytes, not str.*encode"),
            ({"value": 5}, "value must be bytes, not int"),
            ({"value": b"v", "key": "text"}, "key must be bytes, not str"),
            ({"value": b"v", "headers": {("a", b"1")}}, "headers must be a mapping"),
            ({"value": b"v", "headers": {"a": "1"}}, "header 'a' must be bytes, not str.*encode"),
            ({"value": b"v", "headers": {1: b"1"}}, "the name of a header must be str, not int"),
            ({"value": b"v", "timestamp": 1_700_000_000}, "timestamp must be a datetime, not int"),
            ({"value": b"v", "timestamp": "2024-01-01"}, "timestamp must be a datetime, not str"),
            ({"value": Message(b"v"), "key": b"k"}, "a Message carries its own"),
            ({"value": Message("text")}, "value must be bytes, not str"),  # type: ignore[arg-type]
        ],
    )
    def test_what_is_of_the_wrong_type_is_named(
        self, topic: Topic, arguments: dict[str, object], complaint: str
    ) -> None:
        """The error says which part, and nothing is appended, by none of the ways."""
        with pytest.raises(InputError, match=complaint):
            topic.append(**arguments)  # type: ignore[arg-type]
        with pytest.raises(InputError, match=complaint):
            asyncio.run(topic.append_async(**arguments))  # type: ignore[arg-type]
        assert topic.next_offset == 0

    @pytest.mark.parametrize("wrong", [b"one", bytearray(b"one"), "one", Message(b"one"), 5, None])
    def test_append_many_wants_several(self, topic: Topic, wrong: object) -> None:
        """One message is refused, since its bytes would be taken for messages."""
        with pytest.raises(InputError, match="several messages"):
            topic.append_many(wrong)  # type: ignore[arg-type]

    def test_one_wrong_message_refuses_all(self, topic: Topic) -> None:
        """Of several, all are accepted or none is."""
        with pytest.raises(InputError):
            topic.append_many([b"good", "bad", b"good"])  # type: ignore[list-item]
        assert topic.next_offset == 0

    def test_a_message_that_is_too_large_is_refused(self, tmp_path: Path) -> None:
        """Its envelope counts."""
        with tidelog.open(tmp_path, max_message_bytes=1000) as log:
            with pytest.raises(MessageTooLargeError):
                log.topic(NAME).append(b"x" * 1000)
            assert log.topic(NAME).append(b"x" * 900) == 0

    def test_a_timeout_is_passed_on(self, tmp_path: Path) -> None:
        """It is that of the hand-over; a log that keeps up never meets it."""
        with tidelog.open(tmp_path, append_queue_max_messages=1) as log:
            topic, refused = log.topic(NAME), 0
            for _ in range(200):
                try:
                    topic.append(b"value", timeout=0)
                except BackpressureError:
                    refused += 1
            assert len(list(topic.read())) == topic.next_offset == 200 - refused


class TestAsync:
    """The same for tasks."""

    def test_the_async_twins_do_the_same(self, topic: Topic) -> None:
        """Append one and many, flush, read and follow."""

        async def play() -> list[Message]:
            assert await topic.append_async(b"0", key=b"k", headers={"h": b"v"}, timestamp=NOON) == 0
            assert await topic.append_async(Message(b"1"), sync=True) == 1
            assert topic.durable_offset == 2
            assert await topic.append_many_async([b"2", Message(b"3")]) == [2, 3]
            await topic.flush_async()
            assert topic.durable_offset == 4
            return [message async for message in topic.read_async()]

        found = asyncio.run(play())
        assert found == list(topic.read())
        assert found[0] == Message(b"0", b"k", {"h": b"v"}, NOON, 0)

    def test_a_task_follows(self, topic: Topic) -> None:
        """It is suspended while there is nothing, and ends at its stop."""

        async def follow() -> list[bytes]:
            return [message.value or b"" async for message in topic.read_async("latest", 3, follow=True)]

        async def play() -> list[bytes]:
            following = asyncio.create_task(follow())
            await asyncio.sleep(0)
            for number in range(5):
                await topic.append_async(b"%d" % number)
                await asyncio.sleep(0.001)
            return await asyncio.wait_for(following, 60)

        assert asyncio.run(play()) == [b"0", b"1", b"2"]

    def test_many_tasks_append_at_once(self, topic: Topic) -> None:
        """Each gets an offset of its own, and finds its message there."""

        async def append(number: int) -> tuple[int, bytes]:
            return await topic.append_async(b"%d" % number, sync=number % 2 == 0), b"%d" % number

        async def play() -> list[tuple[int, bytes]]:
            return await asyncio.gather(*(append(number) for number in range(500)))

        assert sorted(asyncio.run(play())) == [(m.offset, m.value) for m in topic.read()]


class TestReading:
    """From where to where."""

    def test_positions(self, topic: Topic) -> None:
        """An offset, "earliest" and "latest"; the stop is exclusive."""
        topic.append_many([b"%d" % number for number in range(10)])
        assert values(topic.read()) == values(topic.read("earliest")) == values(topic.read(0))
        assert values(topic.read(7)) == [b"7", b"8", b"9"]
        assert values(topic.read(2, 5)) == [b"2", b"3", b"4"]
        assert values(topic.read(start=8, stop="latest")) == [b"8", b"9"]
        assert values(topic.read("latest")) == values(topic.read(10)) == values(topic.read(5, 5)) == []

    @pytest.mark.parametrize("bad", [-1, 11, 1 << 70])
    def test_a_start_that_was_never_written_is_refused(self, topic: Topic, bad: int) -> None:
        """By the call, not by the first message."""
        topic.append_many([b"value"] * 10)
        with pytest.raises(OffsetOutOfRangeError):
            topic.read(bad)
        with pytest.raises(OffsetOutOfRangeError):
            topic.read_async(bad)

    @pytest.mark.parametrize("bad", ["newest", "0", 1.5, None, True])
    def test_a_position_of_the_wrong_kind_is_named(self, topic: Topic, bad: object) -> None:
        """As an input error, by the call."""
        with pytest.raises(InputError, match="position must be"):
            topic.read(bad)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="on_gap"):
            topic.read(on_gap="ignore")  # type: ignore[arg-type]

    def test_a_moment_is_a_position(self, topic: Topic, clock: ManualClock) -> None:
        """The first message of that time or later; one in the future is the end."""
        for number in range(10):
            topic.append(b"%d" % number)
            clock.advance(60)
        assert values(topic.read(NOON)) == values(topic.read())
        assert values(topic.read(NOON + timedelta(minutes=7))) == [b"7", b"8", b"9"]
        assert values(topic.read(NOON + timedelta(minutes=6, seconds=1))) == [b"7", b"8", b"9"]
        assert values(topic.read(NOON + timedelta(minutes=2), NOON + timedelta(minutes=4))) == [b"2", b"3"]
        assert values(topic.read(NOON + timedelta(days=1))) == []
        assert values(topic.read(datetime(1900, 1, 1, tzinfo=UTC))) == values(topic.read())
        local = (NOON + timedelta(minutes=9)).astimezone(timezone(timedelta(hours=-7)))
        assert values(topic.read(local)) == [b"9"]

    def test_moments_work_with_times_out_of_order(self, tmp_path: Path) -> None:
        """The first message in order of offsets that is late enough, over files, memory and a reopening."""
        minutes = [5, 1, 4, 9, 2, 3, 8, 6, 7, 0] * 30
        for reopened in (False, True):
            with tidelog.open(tmp_path, rotate_max_bytes=700, cache_max_messages=20) as log:
                topic = log.topic(NAME)
                if not reopened:
                    for number, minute in enumerate(minutes):
                        topic.append(b"%d" % number, timestamp=NOON + timedelta(minutes=minute))
                for wanted in range(-1, 10):
                    expected = next(number for number, minute in enumerate(minutes) if minute >= wanted)
                    assert next(topic.read(NOON + timedelta(minutes=wanted))).offset == expected
                assert list(topic.read(NOON + timedelta(minutes=9, microseconds=1))) == []

    def test_where_it_stands(self, topic: Topic) -> None:
        """The offsets that a topic tells, and its statistics."""
        topic.append_many([b"value"] * 3, sync=True)
        assert (topic.start_offset, topic.hot_start_offset, topic.next_offset, topic.durable_offset) == (0, 0, 3, 3)
        assert topic.shipped_offset == 0
        statistics = topic.statistics()
        assert (statistics.name, statistics.start_offset, statistics.next_offset) == (NAME, 0, 3)
        assert statistics.log is not None
        assert statistics.log.durable_offset == 3
        assert (topic.name, NAME in repr(topic)) == (NAME, True)

    def test_a_reader_that_follows_ends_with_the_log(self, tmp_path: Path) -> None:
        """It gets everything that was accepted, and then stops."""
        log = tidelog.open(tmp_path)
        topic, found = log.topic(NAME), list[bytes]()
        reader = topic.read(follow=True)
        following = threading.Thread(target=lambda: found.extend(values(reader)), daemon=True)
        following.start()
        topic.append_many([b"%d" % number for number in range(100)])
        log.close()
        following.join(60)
        assert found == [b"%d" % number for number in range(100)]
        with pytest.raises(ClosedError):
            topic.append(b"late")


class TestDelayed:
    """Messages with a time of delivery."""

    def test_the_time_is_kept(self, tmp_path: Path) -> None:
        """Given by keyword or in a Message, alone or with others; reading shows the message and the time at once."""
        due = datetime(2030, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
        with tidelog.open(tmp_path) as log:
            topic = log.topic(NAME)
            topic.append(b"a", deliver_at=due, key=b"k")
            topic.append(Message(b"b", deliver_at=due))
            topic.append_many([b"c", Message(b"d", deliver_at=due)])
            asyncio.run(topic.append_async(b"e", deliver_at=due))
            found = [(message.value, message.deliver_at) for message in topic.read()]
        assert found == [(b"a", due), (b"b", due), (b"c", None), (b"d", due), (b"e", due)]

    def test_what_is_no_time_is_refused(self, tmp_path: Path) -> None:
        """A number is not taken for a time, and a Message carries its own."""
        wrong: Any = 5
        with tidelog.open(tmp_path) as log:
            with pytest.raises(InputError, match="deliver_at must be a datetime"):
                log.topic(NAME).append(b"a", deliver_at=wrong)
            with pytest.raises(InputError, match="carries its own"):
                log.topic(NAME).append(Message(b"a"), deliver_at=datetime.now(UTC))
            assert log.topic(NAME).next_offset == 0


def repaired(tmp_path: Path, damaged: list[int]) -> None:
    """A topic of 30 messages, 10 a file, of which some were damaged and then marked as lost by a repair."""
    with tidelog.open(tmp_path) as log:
        log.topic(NAME).append(b"%02d" % 0)
        log.topic(NAME).flush()
        frame_bytes = wal_paths(log._topic_directory(NAME))[0].stat().st_size - BINDING_BYTES
    with tidelog.open(tmp_path, rotate_max_bytes=10 * frame_bytes) as log:
        for number in range(1, 30):
            log.topic(NAME).append(b"%02d" % number)
        directory = log._topic_directory(NAME)
    for offset in damaged:
        flip_bit(wal_paths(directory)[offset // 10], offset % 10 * frame_bytes + frame_bytes - 1)
    with tidelog.open(tmp_path) as log, pytest.raises(CorruptionError):
        log.topic(NAME)
    plan_repair(directory).apply()


class TestGaps:
    """Messages that a repair could not save."""

    def test_they_raise_after_everything_before_them(self, tmp_path: Path) -> None:
        """The error names the offsets and says where to go on; going on there works."""
        repaired(tmp_path, [4, 5, 6, 23])
        with tidelog.open(tmp_path) as log:
            topic, found = log.topic(NAME), list[int]()
            for expected in ((4, 6), (23, 23)):
                start = found[-1] + 4 if found else 0
                with pytest.raises(GapError, match=f"from {expected[1] + 1}") as caught:  # noqa: PT012
                    for message in topic.read(start):
                        found.append(message.offset)
                assert (caught.value.first, caught.value.last) == expected
            found += [message.offset for message in topic.read(24)]
            assert found == [offset for offset in range(30) if offset not in (4, 5, 6, 23)]

    def test_they_can_be_skipped(self, tmp_path: Path) -> None:
        """Then everything else comes in order, with its own offset and value."""
        repaired(tmp_path, [0, 9, 10, 29])
        with tidelog.open(tmp_path) as log:
            topic = log.topic(NAME)
            assert topic.next_offset == 30
            expected = [(offset, b"%02d" % offset) for offset in range(30) if offset not in (0, 9, 10, 29)]
            assert [(m.offset, m.value) for m in topic.read(on_gap="skip")] == expected

            async def read() -> list[tuple[int, bytes]]:
                return [(m.offset, m.value or b"") async for m in topic.read_async(on_gap="skip")]

            assert asyncio.run(read()) == expected

    def test_they_are_no_obstacle_for_appends_and_times(self, tmp_path: Path) -> None:
        """A repaired topic takes new messages and finds them by time."""
        repaired(tmp_path, [15])
        with tidelog.open(tmp_path) as log:
            topic = log.topic(NAME)
            later = datetime.now(UTC) + timedelta(hours=1)
            assert topic.append(b"30", timestamp=later) == 30
            assert values(topic.read(later)) == [b"30"]

    def test_a_value_like_the_mark_is_not_a_gap(self, topic: Topic) -> None:
        """Only a whole payload of one zero byte is the mark, and an envelope is never that short."""
        topic.append(b"\x00")
        topic.append(b"")
        assert values(topic.read()) == [b"\x00", b""]


def test_settings_of_the_directory_are_those_of_its_topics(clock: ManualClock) -> None:
    """Each topic rotates, syncs and caches as the directory was opened."""
    settings = LogSettings(rotate_max_bytes=100, cache_max_messages=0)
    with LogDirectory(Path("/data"), settings, files=FaultyFiles(), clock=clock) as log:
        topic = log.topic(NAME)
        topic.append_many([b"value"] * 10, sync=True)
        statistics = topic.statistics().log
        assert statistics is not None
        assert (statistics.files > 3, statistics.cached_messages) == (True, 0)
