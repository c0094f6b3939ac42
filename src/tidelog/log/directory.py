"""Builds and parses every file name in a log directory, and takes the directory's lock.

wal.0000000000.log    a WAL file; the number grows by one with every rotation
wal.prepared-*.tmp    a file that is written beside the log and becomes its next one; see writer.py
log.id                which log this is; see binding.py
wal.ckpt              the checkpoint, a hint for opening
wal.start-*           an empty file whose name says where the log begins; see first_offset.py
producers.ckpt        what the layer above knows about its producers; it belongs to these files and moves with them
kafka.ckpt            the same about those of Kafka's protocol
lock                  held by the owner while the log is open, unless it holds a lock that covers this directory
topic.json            of the layer above: this log is one of many, and `.lock` two levels above covers all of them
removed/              what a repair or a cut took out, never deleted by tidelog
"""

from __future__ import annotations

import re
from pathlib import Path

from tidelog.files import Files, Lock

CHECKPOINT = "wal.ckpt"
PRODUCERS = "producers.ckpt"
KAFKA_PRODUCERS = "kafka.ckpt"
INGESTED_RANGES = "placed.json"
LOCK = "lock"
LOG_ID = "log.id"
REMOVED = "removed"
TOPIC = "topic.json"
ROOT_LOCK = ".lock"

_WAL = re.compile(r"wal\.(\d{1,19})\.log")
_START = re.compile(r"wal\.start-(\d{20})", re.ASCII)
PREPARED_FILE = re.compile(r"wal\.prepared-\d+-\d+\.tmp", re.ASCII)


def wal_name(seq: int) -> str:
    """The name of the WAL file with this number."""
    return f"wal.{seq:010d}.log"


def wal_seq(name: str) -> int | None:
    """The number of a WAL file; None for any other name."""
    match = _WAL.fullmatch(name)
    return None if match is None else int(match[1])


def wal_files(names: list[str]) -> list[tuple[int, str]]:
    """The WAL files among these names as (number, name), oldest first."""
    return sorted((seq, name) for name in names if (seq := wal_seq(name)) is not None)


def start_name(offset: int) -> str:
    """The name of the mark of a log that begins at an offset."""
    return f"wal.start-{offset:020d}"


def start_offsets(names: list[str]) -> list[int]:
    """What the marks among these names say, lowest first."""
    return sorted(int(match[1]) for name in names if (match := _START.fullmatch(name)) is not None)


def marked_offset(names: list[str]) -> int | None:
    """Where a log with these names begins; None when that is not marked."""
    return max(start_offsets(names), default=None)


def ingested_name(writer: int, seq: int) -> str:
    """The name of a file that may become one of the log: `seq` counts those of one writer."""
    return f"wal.prepared-{writer}-{seq:010d}.tmp"


def is_ingested(name: str) -> bool:
    """Whether it is such a name."""
    return PREPARED_FILE.fullmatch(name) is not None


def removed_name(wal_file_name: str, byte: int, number: int) -> str:
    """Where the bytes that were taken out of a WAL file from `byte` on are kept; `number` tells several apart."""
    return f"{wal_file_name}.from-{byte}" + (f".{number}" if number else "")


# The lock of a log's directory: one process owns it at a time.
#
# The lock of a log directory covers the directories of its topics: a process that has opened it has all topics, with
# one descriptor for all of them. A process that takes a topic's directory by itself, as a repair does, takes both
# locks.


class _Locks:
    """Several locks, taken in this order."""

    def __init__(self, *locks: Lock) -> None:
        self._locks = locks

    def release(self) -> None:
        for lock in reversed(self._locks):
            lock.release()

    def abandon(self) -> None:
        for lock in self._locks:
            lock.abandon()


def take_directory(files: Files, directory: Path) -> Lock:
    """Takes it at once, or raises LockedError."""
    above = directory.parent.parent / ROOT_LOCK
    if not files.exists(directory / TOPIC) or not files.exists(above):
        return files.lock(directory / LOCK)
    first = files.lock(above)
    try:
        return _Locks(first, files.lock(directory / LOCK))
    except BaseException:
        first.release()
        raise
