"""A topic full of messages to read and open again, and the plainest scan of its files to compare with."""

from __future__ import annotations

import os
import time
from pathlib import Path

import tidelog
from tidelog.log.binding import BINDING_BYTES
from tidelog.log.directory import wal_files
from tidelog.log.frame import Stop, scan

TOPIC = "bench/filled"
_BATCH_BYTES = 1 << 20
_CHUNK_BYTES = 2 << 20


def fill(directory: Path, count: int, value_bytes: int) -> None:
    """Makes a topic of `count` messages, all on the disk and closed."""
    batch = [os.urandom(value_bytes)] * max(1, _BATCH_BYTES // value_bytes)
    with tidelog.open(directory) as log:
        topic = log.topic(TOPIC)
        while topic.next_offset < count:
            topic.append_many(batch[: count - topic.next_offset])


def wal_paths(directory: Path) -> list[Path]:
    """The files of the topic, oldest first."""
    folder = directory / TOPIC
    return [folder / name for _, name in wal_files(os.listdir(folder))]


def scan_in_memory_seconds(directory: Path) -> float:
    """Seconds that the scan of all frames takes when their bytes are in memory already."""
    offset, seconds = 0, 0.0
    for path in wal_paths(directory):
        data = path.read_bytes()
        begin = time.perf_counter()
        result = scan(data, BINDING_BYTES, offset)
        seconds += time.perf_counter() - begin
        assert result.stop is Stop.END
        offset = result.frames.next_offset
    return seconds


def plain_scan_seconds(directory: Path) -> float:
    """Seconds to read the files from the first byte to the last and to scan every frame, with nothing around it."""
    offset, begin = 0, time.perf_counter()
    for path in wal_paths(directory):
        offset = _scan_file(path, offset)
    return time.perf_counter() - begin


def _scan_file(path: Path, offset: int) -> int:
    descriptor, position = os.open(path, os.O_RDONLY), BINDING_BYTES
    while data := os.pread(descriptor, _CHUNK_BYTES, position):
        result = scan(data, 0, offset)
        assert result.end, f"{path} has no frame at {position}"
        position += result.end
        offset = result.frames.next_offset
    os.close(descriptor)
    return offset
