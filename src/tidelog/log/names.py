"""Every file name in a log directory is built and parsed here.

wal.0000000000.log    a WAL file; the number grows by one with every rotation
wal.prepared-*.tmp    a file that is written beside the log and becomes its next one; see prepared.py
log.id                which log this is; see bound_files.py
wal.ckpt              the checkpoint, a hint for opening
wal.start-*           an empty file whose name says where the log begins; see start_mark.py
producers.ckpt        what the layer above knows of who appended; it belongs to these files and goes where they go
lock                  held by the owner for the log's life, unless it holds a lock that covers this directory
topic.json            of the layer above: this log is one of many, and `.lock` two levels above covers all of them
removed/              what a repair or a cut took out, never deleted by tidelog
"""

from __future__ import annotations

import re

CHECKPOINT = "wal.ckpt"
PRODUCERS = "producers.ckpt"
LOCK = "lock"
LOG_ID = "log.id"
REMOVED = "removed"
TOPIC = "topic.json"
ROOT_LOCK = ".lock"

_WAL = re.compile(r"wal\.(\d{1,19})\.log")
_START = re.compile(r"wal\.start-(\d{20})", re.ASCII)
_PREPARED = re.compile(r"wal\.prepared-\d+-\d+\.tmp", re.ASCII)


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


def prepared_name(writer: int, seq: int) -> str:
    """The name of a file that may become one of the log: `seq` counts those of one writer."""
    return f"wal.prepared-{writer}-{seq:010d}.tmp"


def is_prepared(name: str) -> bool:
    """Whether it is such a name."""
    return _PREPARED.fullmatch(name) is not None


def removed_name(wal_file_name: str, byte: int, number: int) -> str:
    """Where the bytes that were taken out of a WAL file from `byte` on are kept; `number` tells several apart."""
    return f"{wal_file_name}.from-{byte}" + (f".{number}" if number else "")
