"""How fast a topic is read through the public iterator, and how fast the kernel scans the same bytes.

The topic is closed and opened again before it is read, so that its messages come from files and not from memory. Both
read the same chunks of the same files, which the system has in its cache by then: this measures code, not the disk.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from tidelog.log import LogSettings
from tidelog.log.bound_files import BoundFiles
from tidelog.log.frame import KERNEL_IS_NATIVE
from tidelog.log.names import wal_files
from tidelog.log.scanner import FileScanner
from tidelog.topics.storage import LogDirectory

_TOPIC = "bench/read"
_BATCH_MESSAGES = 1000
_ROUNDS = 3


def measure_read(
    scratch: Path, settings: LogSettings, messages: int, size: int, on_done: Callable[[int], None]
) -> dict[str, object]:
    """All figures of one run; of three rounds each the fastest counts, since the others were disturbed."""
    root = scratch / "log"
    _fill(root, settings, messages, size, on_done)
    with LogDirectory(root, settings) as log:
        directory = log.topic_directory(_TOPIC)
        read_seconds = min(_read_seconds(log, messages) for _ in range(_ROUNDS))
        scan_seconds = min(_scan_seconds(directory, settings.read_chunk_bytes, messages) for _ in range(_ROUNDS))
        on_done(2 * messages)
        total_bytes = sum(path.stat().st_size for path in directory.glob("wal.*.log"))
    return {
        "messages": messages,
        "size": size,
        "total_bytes": total_bytes,
        "native_kernel": KERNEL_IS_NATIVE,
        "messages_per_second": messages / read_seconds,
        "read_us_per_message": read_seconds / messages * 1e6,
        "scan_us_per_message": scan_seconds / messages * 1e6,
        "beyond_scan_us_per_message": (read_seconds - scan_seconds) / messages * 1e6,
        "scan_gigabytes_per_second": total_bytes / scan_seconds / 1e9,
    }


def _fill(root: Path, settings: LogSettings, messages: int, size: int, on_done: Callable[[int], None]) -> None:
    with LogDirectory(root, settings) as log:
        topic = log.topic(_TOPIC)
        for start in range(0, messages, _BATCH_MESSAGES):
            count = min(_BATCH_MESSAGES, messages - start)
            data = os.urandom(size * count)
            topic.append_many([data[index * size : (index + 1) * size] for index in range(count)])
            on_done(start + count)


def _read_seconds(log: LogDirectory, messages: int) -> float:
    topic = log.topic(_TOPIC)
    started = time.perf_counter()
    last = deque(topic.read(), maxlen=1)
    seconds = time.perf_counter() - started
    assert last[0].offset == messages - 1, "not all messages were read"
    return seconds


def _scan_seconds(directory: Path, chunk_bytes: int, messages: int) -> float:
    files = BoundFiles()
    started = time.perf_counter()
    offset = 0
    for _, name in wal_files(files.list(directory)):
        file = files.open(directory / name)
        try:
            scanner, size = FileScanner(file, 0, offset, chunk_bytes), file.size()
            while scanner.read(size) is not None:
                pass
            offset = scanner.offset
        finally:
            file.close()
    seconds = time.perf_counter() - started
    assert offset == messages, "not all frames were scanned"
    return seconds
