"""kill -9 of a real process under load, again and again, on one directory that grows and rotates."""

from __future__ import annotations

import random
import re
import subprocess
from pathlib import Path

import pytest
from tests.campaign import SEED, examples
from tests.log.workbench import python, python_environment, wal_paths

import tidelog

KILLS = examples(5)
THREADS = 4
NAME = "shop/orders"
ROTATE_BYTES = 4000
LINE = re.compile(rb"(\d+) (\d+/\d+/\d+)")

# Each thread tells offset and value once they are synced, by one write a line: a kill tears at most the last one.
CHILD = """
import os, sys, threading, tidelog
life, threads = int(sys.argv[2]), int(sys.argv[3])
log = tidelog.open(sys.argv[1], rotate_max_bytes=4000, cache_max_messages=100)
topic = log.topic("shop/orders")

def produce(thread):
    number = 0
    while True:
        value = b"%d/%d/%d" % (life, thread, number)
        if number % 10 == 9:
            topic.append(value)
        else:
            offset = topic.append(value, sync=True)
            os.write(1, b"%d %s\\n" % (offset, value))
        number += 1

for thread in range(threads):
    threading.Thread(target=produce, args=(thread,), daemon=True).start()
os.write(1, b"started %d\\n" % topic.next_offset)
threading.Event().wait()
"""


class Acknowledged:
    """What the children were told is on the disk: values by offset."""

    def __init__(self) -> None:
        self.values: dict[int, bytes] = {}

    def take(self, output: bytes) -> None:
        """Whole lines only: a kill may have torn the last one."""
        for line in output[: output.rfind(b"\n") + 1].splitlines():
            if line.startswith(b"started"):
                continue
            match = LINE.fullmatch(line)
            assert match is not None, line
            offset, value = int(match[1]), match[2]
            assert offset not in self.values, f"offset {offset} was given to {self.values[offset]!r} and {value!r}"
            self.values[offset] = value


def killed_child(directory: Path, life: int, lines: int) -> bytes:
    """Lets a process append until it has told so many messages, and kills it."""
    process = subprocess.Popen(
        python(CHILD, directory, str(life), str(THREADS)), env=python_environment(), stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    told = [process.stdout.readline() for _ in range(lines)]
    assert told[0].startswith(b"started") or LINE.match(told[0]), told[0]
    process.kill()
    rest, _ = process.communicate()
    assert process.returncode == -9
    return b"".join(told) + rest


def check(directory: Path, acknowledged: Acknowledged, before: list[bytes]) -> list[bytes]:
    """Reopens as the next owner would: every promise that was made is kept. Returns all values, by offset."""
    with tidelog.open(directory, rotate_max_bytes=ROTATE_BYTES) as log:
        topic = log.topic(NAME)
        messages = list(topic.read())
        assert [message.offset for message in messages] == list(range(topic.next_offset)), "an offset was skipped"
    values = [message.value or b"" for message in messages]
    assert values[: len(before)] == before, "an offset was used twice"
    lost = [offset for offset, value in acknowledged.values.items() if values[offset : offset + 1] != [value]]
    assert lost == []
    check_thread_order(values)
    return values


def check_thread_order(values: list[bytes]) -> None:
    """Of each thread of each life the first so many are there, in order: none is missing in between."""
    expected: dict[bytes, int] = {}
    for value in values:
        life, thread, number = value.split(b"/")[:3]
        name = life + b"/" + thread
        assert int(number) == expected.get(name, 0), value
        expected[name] = int(number) + 1


@pytest.mark.deeper
def test_kills_lose_nothing_that_was_synced(tmp_path: Path) -> None:
    """No synced message is lost, no offset is used twice or skipped, and the log opens every time."""
    choose, acknowledged, values = random.Random(20240501 + SEED), Acknowledged(), list[bytes]()
    for life in range(KILLS):
        acknowledged.take(killed_child(tmp_path, life, choose.randint(2, 300)))
        values = check(tmp_path, acknowledged, values)
    assert KILLS < len(acknowledged.values) <= len(values)
    assert len(wal_paths(tmp_path / NAME)) > 3
