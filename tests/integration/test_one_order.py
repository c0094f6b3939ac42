"""Eight threads, two readers: the order of offsets, of frames and of delivery is one order."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.log.workbench import Threads, frames_in, wal_paths

import tidelog
from tidelog import Topic
from tidelog.testing import History, assert_history
from tidelog.topics.message import decode_payloads

THREADS = 8
EACH = 2000
NAME = "shop/orders"


def produce(topic: Topic, history: History, thread: int) -> None:
    """A mixture of single appends, several at once, and waits for the disk."""
    number = 0
    while number < EACH:
        count = min(EACH - number, 5 if number % 7 == 0 else 1)
        values = [b"%d/%d" % (thread, number + index) for index in range(count)]
        offsets = [topic.append(values[0], sync=number % 97 == 0)] if count == 1 else topic.append_many(values)
        for offset, value in zip(offsets, values, strict=True):
            history.accepted(thread, offset, value)
        number += count


def follow(topic: Topic, history: History, reader: str) -> None:
    for message in topic.read("earliest", THREADS * EACH, follow=True):
        history.read(reader, message.offset, message.value)


def values_in_files(directory: Path) -> list[bytes]:
    """Straight from the bytes on the disk, in the order of the files."""
    found: list[bytes] = []
    for path in wal_paths(directory):
        payloads = frames_in(path.read_bytes(), len(found)).payloads()
        found += [message.value or b"" for message in decode_payloads(len(found), payloads)]
    return found


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    """The interpreter lets another thread run every few microseconds, so that each meets the others everywhere."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.parametrize("cache_max_messages", [65536, 64])
def test_offsets_frames_and_delivery_have_one_order(tmp_path: Path, cache_max_messages: int) -> None:
    """What the threads were told, what is in the files and what readers got agree, and each thread's order is kept."""
    history = History()
    with tidelog.open(tmp_path, rotate_max_bytes=100_000, cache_max_messages=cache_max_messages) as log:
        topic = log.topic(NAME)
        with Threads() as threads:
            for reader in ("one", "two"):
                threads.start(partial(follow, topic, history, reader))
            for thread in range(THREADS):
                threads.start(partial(produce, topic, history, thread))
        for message in topic.read():
            history.read("afterwards", message.offset, message.value)
        directory = log._topic_directory(NAME)
    assert_history(history)
    in_order = [value for _, value in sorted(history.values.items())]
    assert values_in_files(directory) == in_order
    (life,) = history.lives
    for reader in ("one", "two", "afterwards"):
        assert [value for _, value in life.reads[reader]] == in_order
    for thread in range(THREADS):
        mine = [value for value in in_order if value.startswith(b"%d/" % thread)]
        assert mine == [b"%d/%d" % (thread, number) for number in range(EACH)]
