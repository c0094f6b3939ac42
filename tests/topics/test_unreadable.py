"""A message that nobody could read again is refused; one that is there already is named, found, and can be passed over.

Such a frame has a good checksum, so nothing below the topic sees anything wrong with it: it must neither get in nor
stand in the way of the messages behind it.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from tests.staging.staged_commits import hand_over
from tests.topics.storage_modes import Storage, storage_fixture
from tests.topics.test_staging import NEVER, writer

import tidelog
from tidelog import GapError, InputError, Message
from tidelog.topics.message import encode_deliver_at, encode_message

NAME = "shop/orders"
EARLY = datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14)))
LATE = datetime(9999, 12, 31, 23, tzinfo=timezone(-timedelta(hours=2)))
BAD = struct.pack("<BBHIqII", 1, 0, 0, 0, -62_135_596_800_000_001, 0, 0) + b"no time"
storage = storage_fixture(["local", "shared_fs-sqlite"])


def fill(topic: tidelog.Topic) -> None:
    """Offsets 0 to 4, of which 2 cannot be read."""
    topic.append_many([b"0", b"1"])
    topic._log.append(BAD)
    topic.append_many([b"3", b"4"], sync=True)


def values(topic: tidelog.Topic, **options: Any) -> list[bytes]:
    return [message.value or b"" for message in topic.read(0, **options)]


WAYS: dict[str, Callable[[tidelog.Topic, datetime], object]] = {
    "append": lambda topic, time: topic.append(b"v", timestamp=time),
    "deliver_at": lambda topic, time: topic.append(b"v", deliver_at=time),
    "message": lambda topic, time: topic.append(Message(b"v", timestamp=time)),
    "append_many": lambda topic, time: topic.append_many([b"a", Message(b"v", timestamp=time)]),
    "delivery of many": lambda topic, time: topic.append_many([b"a", Message(b"v", deliver_at=time)]),
    "append_async": lambda topic, time: asyncio.run(topic.append_async(b"v", timestamp=time)),
}


@pytest.mark.parametrize("time", [EARLY, LATE], ids=["early", "late"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reliable", [True, False])
def test_a_time_outside_of_the_years_is_refused(tmp_path: Path, way: str, time: datetime, reliable: bool) -> None:
    """However it comes, nothing of it is in the topic, and no offset was used."""
    with tidelog.open(tmp_path) as log:
        topic = log.topic(NAME, reliable=reliable)
        with pytest.raises(InputError, match=r"outside of the years 1 to 9999 in UTC: (0001|9999)-"):
            WAYS[way](topic, time)
        assert topic.next_offset == 0


@pytest.mark.parametrize("named", ["timestamp", "deliver_at"])
def test_a_producer_refuses_it_and_its_sequence_stays_free(tmp_path: Path, named: str) -> None:
    """The same sequence is stored when it comes again with a time that can be."""
    with tidelog.open(tmp_path) as log:
        topic = log.topic(NAME)
        with topic.producer("till") as producer:
            times: dict[str, Any] = {named: EARLY}
            with pytest.raises(InputError, match="years 1 to 9999"):
                producer.append(b"v", sequence=1, **times)
            assert producer.append(b"v", sequence=1) == 0
        assert values(topic) == [b"v"]


def test_the_first_and_the_last_moment_are_read_back(tmp_path: Path) -> None:
    """The edges themselves are messages like any other."""
    moments = [datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)]
    with tidelog.open(tmp_path) as log:
        topic = log.topic(NAME)
        for moment in moments:
            topic.append(b"v", timestamp=moment, deliver_at=moment)
        assert [message.timestamp for message in topic.read()] == moments
        assert [message.deliver_at for message in topic.read()] == moments


def test_an_impossible_time_of_delivery_has_no_extension() -> None:
    """Whoever builds the extension itself is refused as well."""
    with pytest.raises(InputError, match="time of delivery"):
        encode_deliver_at(1 << 62)


def test_rows_that_are_no_messages_are_refused_as_a_whole(storage: Storage, tmp_path: Path) -> None:
    """What was handed over stays out, whoever made it is told why, and what comes behind it comes in."""
    root = tmp_path / "data"
    good = encode_message(b"row", None, None, 0)
    with writer(storage, root) as area, storage.open(root, **NEVER) as log:
        topic = log.topic(NAME)
        hand_over(area, "etl", 0, [good, BAD])
        hand_over(area, "etl", 1, [good])
        topic.ingest()
        assert values(topic) == [b"row"]
        status = area.status("etl", 0)
        assert status.state == "refused"
        assert "message 1 has an impossible timestamp" in str(status)


def test_a_plain_read_names_offset_and_file(storage: Storage, tmp_path: Path) -> None:
    """Everything before it is handed out; the error says which offset, in which file or object, and how to go on."""
    with storage.open(tmp_path / "data", **NEVER) as log:
        topic = log.topic(NAME)
        fill(topic)
        found: list[bytes] = []
        with pytest.raises(GapError, match=r"message 2 has an impossible timestamp.*Read on from 3") as caught:
            found.extend(message.value or b"" for message in topic.read(0))
        assert (caught.value.first, caught.value.last) == (2, 2)
        assert str(caught.value.path).endswith("wal.0000000000.log")
        assert values(topic, on_gap="skip") == [b"0", b"1", b"3", b"4"]


def test_what_is_shipped_is_read_past_it(storage: Storage, tmp_path: Path) -> None:
    """In the object as in the file: the error names the object, and skipping leaves out that one alone."""
    if not storage.has_store:
        return
    with storage.open(tmp_path / "data", **NEVER) as log:
        topic = log.topic(NAME)
        fill(topic)
        assert topic.ship() == 5
    with storage.open(tmp_path / "other", **NEVER) as log:
        topic = log.topic(NAME)
        with pytest.raises(GapError, match="message 2") as caught:
            list(topic.read(0))
        assert "/objects/data-0-4-" in str(caught.value.path)
        assert values(topic, on_gap="skip") == [b"0", b"1", b"3", b"4"]


def test_skipping_says_which_offset(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is left out in silence."""
    with tidelog.open(tmp_path) as log, caplog.at_level(logging.WARNING):
        topic = log.topic(NAME)
        fill(topic)
        assert len(values(topic, on_gap="skip")) == 4
        assert "wal.0000000000.log: passed over: message 2 has an impossible timestamp" in caplog.text


def test_reading_in_a_task_passes_over_it(tmp_path: Path) -> None:
    """As in a thread."""

    async def read(topic: tidelog.Topic) -> list[bytes]:
        return [message.value or b"" async for message in topic.read_async(0, on_gap="skip")]

    with tidelog.open(tmp_path) as log:
        topic = log.topic(NAME)
        fill(topic)
        assert asyncio.run(read(topic)) == [b"0", b"1", b"3", b"4"]


def test_a_subscription_passes_over_it_or_says_where_to_go_on(tmp_path: Path) -> None:
    """With on_gap="skip" it is counted as lost; without, the hint leads past it."""
    with tidelog.open(tmp_path) as log:
        topic = log.topic(NAME)
        fill(topic)
        skipping = topic.subscribe("skipping", start="earliest", on_gap="skip")
        received = [skipping.receive(timeout=60) for _ in range(4)]
        assert [message.value for message in received if message is not None] == [b"0", b"1", b"3", b"4"]
        plain = topic.subscribe("plain", start="earliest")
        for expected in (b"0", b"1"):
            message = plain.receive(timeout=60)
            assert message is not None
            assert message.value == expected
        with pytest.raises(GapError, match=r"message 2 has .*wal\.0000000000\.log.*sub\.seek\(3\)"):
            plain.receive(timeout=60)
        plain.seek(3)
        message = plain.receive(timeout=60)
        assert message is not None
        assert message.value == b"3"
