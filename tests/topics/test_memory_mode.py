"""`tidelog.open(None)`: a log in memory for tests, which behaves as one on a disk and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

import tidelog
from tidelog.errors import ConfigError

NAME = "shop/orders"


def test_a_log_in_memory_does_what_one_on_a_disk_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Appending, rotating, subscribing, producing, deleting; and no file is made."""
    monkeypatch.chdir(tmp_path)
    with tidelog.open(None, rotate_max_bytes=100, cache_max_messages=0) as log:
        topic = log.topic(NAME)
        topic.append_many([b"%d" % number for number in range(20)], sync=True)
        assert [message.value for message in topic.read(15)] == [b"15", b"16", b"17", b"18", b"19"]
        with topic.subscribe("billing") as sub:
            message = sub.receive(timeout=120)
            assert message is not None
            sub.ack(message)
        assert topic.subscription_info("billing").offset == 1
        with topic.producer("p") as producer:
            assert producer.append(b"x", sequence=1) == producer.append(b"x", sequence=1) == 20
        log.delete_topic(NAME)
        assert log.topics() == []
    assert os.listdir(tmp_path) == []


def test_each_log_in_memory_is_its_own() -> None:
    """What one has, another has not; closed, it is gone."""
    with tidelog.open(None) as first, tidelog.open(None) as second:
        first.topic(NAME).append(b"value")
        assert second.topics() == []
    with tidelog.open(None) as third:
        assert third.topics() == []


def test_a_log_in_memory_can_have_a_store(tmp_path: Path) -> None:
    """Shipping, sealing and opening again work; another directory reads the store."""
    store = (tmp_path / "store").as_uri()
    with tidelog.open(None, store=store, metadata="bucket") as log:
        log.topic(NAME).append(b"value", sync="shipped")
        log.topic(NAME).seal()
        assert [message.value for message in log.topic(NAME).read()] == [b"value"]
    with tidelog.open(tmp_path / "other", store=store, metadata="bucket", read_only=True) as log:
        assert [message.value for message in log.topic(NAME).read()] == [b"value"]


def test_a_task_can_open_one() -> None:
    """The async twin knows it too."""

    async def run() -> None:
        async with await tidelog.open_async(None) as log:
            assert await log.topic(NAME).append_async(b"value", sync=True) == 0

    asyncio.run(run())


def test_without_a_directory_the_settings_say_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only an explicit None means memory."""
    monkeypatch.setenv("TIDELOG_DIR", str(tmp_path / "data"))
    with tidelog.open() as log:
        assert log.root == tmp_path / "data"
    monkeypatch.delenv("TIDELOG_DIR")
    with pytest.raises(ConfigError, match="no directory was named"):
        tidelog.open()


@pytest.mark.parametrize("wrong", ["memory://", "s3://bucket/prefix", "file:///data"])
def test_a_url_is_no_directory(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused with the way to name a store, and nothing is made."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"not the URL .*tidelog.open\(None\)"):
        tidelog.open(wrong)
    assert os.listdir(tmp_path) == []


def test_a_log_in_memory_has_no_onlooker() -> None:
    """Nobody else can see it."""
    with pytest.raises(ConfigError, match="in memory"):
        tidelog.open(None, read_only=True)
